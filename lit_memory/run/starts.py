"""The weights that a run starts from (``train.init: {run: ...}``), wherever they were trained."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from lit_memory.lit.callbacks.progress import Send
from lit_memory.plan.runspec import RunSpec
from lit_memory.run import checkpoint
from lit_memory.run.logger import TrackingLogger
from lit_memory.run.tracking import Run, Tracker
from lit_memory.run.training import trained


class Unrecorded:
    """In place of a Tracker: nothing is written, as the run is FINISHED in MLflow."""

    def log(self, run_id: str, metrics: Mapping[str, Any], step: int) -> None:
        pass


def provide_start(spec: RunSpec, root: Path, tracker: Tracker, check: Callable[[], None], send: Send) -> None:
    """Have the weights that a run starts from below ``root``.

    A store may know a run that was trained below another root. Its last checkpoint is copied from there where that
    folder can be seen; otherwise the run is trained again here, for its weights: its record stays as it is. check: is
    called before every batch of that and raises to end it. Raises RuntimeError if the run has not finished.
    """
    start = spec.start
    if start is None:
        return
    name = f"{start.arm} of {start.experiment}, seed {start.seed}"
    found = tracker.find(start.key)
    if found is None or found.status != "FINISHED":
        raise RuntimeError(f"init: the run that it starts from, {name}, has not finished")
    steps = int(found.metrics["steps"])
    if not start.stages or last(start, root, steps):
        return
    with checkpoint.held(start.folder(root), send):
        if last(start, root, steps) or copied(start, found, root, steps):
            return
        provide_start(start, root, tracker, check, send)
        where = f"its weights are not below {root}"
        send({"event": "warning", "message": f"init: {name}: {where}; training it again for them"})
        with trained(start, root, TrackingLogger(cast(Tracker, Unrecorded()), ""), check, send):
            pass


def last(start: RunSpec, root: Path, steps: int) -> Path | None:
    """The intact checkpoint of a run after its last step; None where there is none."""
    path = checkpoint.path_of(start.folder(root), steps)
    return path if path.is_file() and not checkpoint.damaged(path) else None


def copied(start: RunSpec, run: Run, root: Path, steps: int) -> bool:
    """Copy the last checkpoint of a run from the root where it was trained; False where that cannot be read."""
    other = Path(run.tags.get("lit.where", "").partition(":")[2])
    try:
        path = last(start, other, steps) if other.is_absolute() else None
        content = path.read_bytes() if path else b""
    except OSError:
        return False

    def fill(file: checkpoint.Hashing) -> None:
        file.write(content)

    if content:
        checkpoint.save(checkpoint.path_of(start.folder(root), steps), fill)
    return bool(content)
