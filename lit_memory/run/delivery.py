"""Sends what ended runs have left on disk: what a command does before it begins, and once more in the end."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import Timeout

from lit_memory.plan.runspec import RunSpec
from lit_memory.run import checkpoint, journal
from lit_memory.run.journal import Journal
from lit_memory.run.lease import Lease, LeaseLost
from lit_memory.run.outbox import Outbox, away
from lit_memory.util import files

if TYPE_CHECKING:
    from lit_memory.run.tracking import Tracker


def deliver(specs: Iterable[RunSpec], root: Path, tracker: "Tracker", status: str = "KILLED") -> str:
    """Send what ended runs have left on disk. Returns why some of it could not be sent; "" where all was.

    One run that the store refuses does not stand in the way of the others; after two in a row the rest is left.
    status: of a run whose process died without a word. Raises OSError and the like for a full disk.
    """
    reason, failures, parents = "", 0, dict[tuple[str, str], str]()
    for spec in waiting(specs, root):
        folder, group = spec.folder(root), (spec.experiment, spec.scale)
        outbox = Outbox(spec, root, lambda: tracker, parents.get(group, ""))
        try:
            with checkpoint.acquired(folder):
                send_rest(outbox, tracker, status)
            parents[group] = outbox.parent  # is looked up once
        except Timeout:
            continue  # another process trains it now, and sends this too
        except Exception as error:
            if files.disk_full(error, root) or not away(error):
                raise
            reason, failures = str(away(error)), failures + 1
            if failures == 2:
                break
        else:
            failures = 0
    return reason


def send_rest(outbox: Outbox, tracker: "Tracker", status: str) -> None:
    """Send what an ended run has left on disk, unless a process of another root has the run by now."""
    own = Lease(tracker.register, outbox.spec.key, outbox.folder)
    try:
        own.check()
    except LeaseLost:
        return
    outbox.lease = own
    try:
        if not journal.ended(outbox.folder):
            Journal(outbox.folder).end(status)  # behind what is whole; with a checkpoint the run goes on from there
        outbox.send()
    finally:
        own.end()


def waiting(specs: Iterable[RunSpec], root: Path) -> list[RunSpec]:
    """The runs that are not trained now and whose journals the store may not have."""
    found = {spec.key: spec for spec in specs if journal.waits(spec.folder(root))}
    return [spec for spec in found.values() if not checkpoint.locked(spec.folder(root))]
