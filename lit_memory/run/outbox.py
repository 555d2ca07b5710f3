"""Brings the tracking store up to the journals of runs. A run does not wait for the store, and does not die with it.

A thread of the run's process sends what the run tells. While the store does not answer, everything stays in the journal
and is sent later: by that thread, or by the next command. Nothing arrives twice: whoever connects anew first asks which
rows the store has, and a row that was on its way all the same has the time of the journal, by which the store knows it.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run import checkpoint, journal, lease
from lit_memory.run.journal import Journal, Messages
from lit_memory.run.lease import Lease
from lit_memory.util import files
from lit_memory.util.checks import first_line

if TYPE_CHECKING:
    from lit_memory.lit.callbacks.progress import Send
    from lit_memory.run.tracking import Run, Tracker

FIRST_DELAY, LONGEST_DELAY = 1.0, 15.0
"""Seconds until a store that did not answer is tried again; each delay is twice the one before."""
PATIENCE = 3.0
"""Seconds that an interrupted run or command gives the store for an answer."""


def away(error: BaseException) -> str | None:
    """Why the tracking store cannot be used, in a few words, if ``error`` says so; else None."""
    tracking = sys.modules.get("lit_memory.run.tracking")  # without it nobody has spoken to a store
    if not isinstance(error, ConfigError if tracking is None else (ConfigError, *tracking.Tracker.Error)):
        return None
    causes = list(files.chain(error))
    for cause in causes:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if isinstance(cause, TimeoutError):
            return "timed out"
    return first_line(error if isinstance(error, ConfigError) else cast(Exception, causes[-1]))[:200]


def away_line(error: BaseException) -> str | None:
    """What a command says that needs the store and does not get it, in one line; None for another error."""
    reason = away(error)
    return reason and f"the tracking store does not answer ({reason}); run the same command again when it does"


class Outbox:
    """Brings the run of one key in the store up to its journal."""

    def __init__(self, spec: RunSpec, root: Path, connect: "Callable[[], Tracker]", parent: str = "") -> None:
        """connect: opens the store. parent: id of the parent run, looked up where it is needed and not given."""
        self.spec, self.connect, self.parent = spec, connect, parent
        self.folder = spec.folder(root)
        self.tracker: Tracker | None = None
        self.lease: Lease | None = None
        """Of the key; None before the store has been reached."""
        self.run_id = ""
        """Of the run in the store; "" before it is known, and after a failure."""
        self.superfluous = False
        """The store has a FINISHED run of the key."""
        self.position = 0
        """Bytes of the journal that the store has."""
        self.answered = 0.0
        """When the store last did what it was asked, on the monotonic clock."""

    @contextlib.contextmanager
    def owning(self, send: "Send") -> Iterator[None]:
        """Own the key in this block; wait for a process of another root that has it.

        Where the store is away, nobody else can take the key there: training begins, and the key is taken with the
        first message that arrives. send: is told of the wait.
        """
        with contextlib.ExitStack() as stack:
            try:
                register = self._open().register
                self._hold(stack.enter_context(lease.held(register, self.spec.key, self.folder, send)))
            except Exception as error:
                if away(error) is None:
                    raise
            try:
                yield
            finally:
                if self.lease is not None:
                    self.lease.end()

    def raise_if_lost(self) -> None:
        """Raise LeaseLost if another process owns the key by now. Asks nobody."""
        if self.lease is not None:
            self.lease.raise_if_lost()

    def find(self, key: str) -> "Run | None":
        """What the store knows of a key. Raises what goes wrong, see ``away``."""
        return self._open().find(key)

    def origin(self) -> dict[str, str]:
        """Tags of the processes that have trained the run so far; {} where none has come to a number."""
        told = journal.read(self.folder)
        if told.origin:
            return told.origin if told.rows or checkpoint.saved(self.folder) else {}
        try:
            run = self.find(self.spec.key)
        except Exception as error:
            if away(error) is None:
                raise
            return {}
        return run.own_tags if run is not None and (run.metrics or checkpoint.saved(self.folder)) else {}

    def finished(self) -> bool:
        """Whether nothing is left to train: the run is FINISHED in the store, or on disk and on its way there."""
        try:
            if journal.complete(self.folder) and journal.waits(self.folder):
                self.send()
                return True
            run = self._open().find(self.spec.key)
        except Exception as error:
            if away(error) is None:
                raise
            return journal.complete(self.folder)
        return run is not None and run.status == "FINISHED"

    def send(self) -> None:
        """Send what the store does not have. Raises what goes wrong, see ``away``; the next call begins anew."""
        try:
            self._send()
        except BaseException:
            self.run_id = ""
            raise

    def _open(self) -> "Tracker":
        self.tracker = self.tracker or self.connect()
        self.answered = time.monotonic()
        return self.tracker

    def _send(self) -> None:
        tracker, told = self._open(), journal.read(self.folder, self.position if self.run_id else 0)
        if not self.run_id:
            self._attach(tracker, told)
        if not self.superfluous:
            tracker.write(self.run_id, told.rows)
            self.answered = time.monotonic()
            for name in told.files:
                tracker.files.add(self.run_id, self.folder / name)
            if tags := told.tags | told.files:
                tracker.tag(self.run_id, tags)
                self.answered = time.monotonic()
            if told.status == "FINISHED":
                tracker.lineage.link_model(self.run_id, self.spec, self.folder)
            if told.status not in ("", "RUNNING"):
                tracker.end(self.run_id, told.status)
        self.position = told.end
        if told.status not in ("", "RUNNING"):
            journal.append(self.folder / journal.NAME, {"status": told.status, "sent": self.run_id})

    def _hold(self, own: Lease) -> None:
        """Keep a lease, without which nothing is written any more."""
        self.lease = own
        self._open().guard(own.check)

    def _attach(self, tracker: "Tracker", told: Messages) -> None:
        """Find the run of the key in the store, or create it."""
        if self.lease is None:
            self._hold(Lease(tracker.register, self.spec.key, self.folder))
        run = tracker.find(self.spec.key)
        self.answered = time.monotonic()
        self.superfluous = run is not None and run.status == "FINISHED"
        if run is not None and self.superfluous:
            self.run_id = run.run_id
            return
        self.parent = self.parent or tracker.parent(self.spec.experiment, self.spec.scale, {})
        self.run_id = tracker.start(self.spec, run, self.parent, told.origin, told.params)
        self.answered = time.monotonic()


class Sender:
    """The thread that sends the journal of a run while it is trained."""

    def __init__(self, outbox: Outbox, warn: Callable[[str], None]) -> None:
        """warn: receives why the store cannot be used, once."""
        self.outbox, self.warn = outbox, warn
        self.news, self.closing = threading.Event(), threading.Event()
        self.problem: Exception | None = None
        """What the run has to fail for: a full disk, for example."""
        self.thread = threading.Thread(target=self._work, daemon=True, name="sender")

    def notify(self) -> None:
        """The journal has a new line. Raises the problem of the thread, once."""
        self.news.set()
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem

    def close(self, patience: float = math.inf) -> None:
        """Let the thread try once more and end. Raises the problem of the thread, once.

        patience: seconds to wait for each answer of the store; one that is slow but answers is waited for.
        """
        self.closing.set()
        self.news.set()
        closed = time.monotonic()
        while self.thread.is_alive() and time.monotonic() - max(closed, self.outbox.answered) < patience:
            self.thread.join(0.05)
        self.notify()

    def _work(self) -> None:
        delay, warned = 0.0, False
        while True:
            (self.closing if delay else self.news).wait(delay or None)
            self.news.clear()
            last = self.closing.is_set()
            try:
                self.outbox.send()
                delay = 0.0
            except Exception as error:
                reason = away(error)
                if reason is None or files.disk_full(error, self.outbox.folder):
                    self.problem = error
                elif not warned:
                    self.warn(reason)
                    warned = True
                delay = min(max(FIRST_DELAY, 2 * delay), LONGEST_DELAY)
            if self.closing.is_set() and (last or delay):
                return


@contextlib.contextmanager
def sending(outbox: Outbox, send: Callable[[dict[str, Any]], object]) -> Iterator[Journal]:
    """The journal of a run, which is sent while the block runs.

    send: receives one warning if the store does not answer. What the store does not have in the end is for the next
    command (``deliver``).
    """

    def warn(reason: str) -> None:
        text = f"the tracking store does not answer ({reason}); runs go on, and what they log is kept and sent later"
        send({"event": "warning", "message": text, "once": "store"})

    sender = Sender(outbox, warn)
    story = Journal(outbox.folder, sender.notify)
    sender.thread.start()
    try:
        yield story
    except BaseException as error:
        with contextlib.suppress(Exception):  # what ends the run is raised, not what follows from it
            sender.close(math.inf if isinstance(error, Exception) else PATIENCE)
        raise
    sender.close()
