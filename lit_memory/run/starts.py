"""The weights that a run starts from (``train.init: {run: ...}``), wherever they were trained."""

from pathlib import Path

from lit_memory.lit.callbacks.progress import Send
from lit_memory.plan.runspec import RunSpec
from lit_memory.run import checkpoint, journal
from lit_memory.run.outbox import Outbox
from lit_memory.run.tracking import Run
from lit_memory.run.training import trained


def provide_start(spec: RunSpec, root: Path, outbox: Outbox, send: Send) -> None:
    """Have the weights that a run starts from below ``root``.

    A store may know a run that was trained below another root. Its last checkpoint is copied from there where that
    folder can be seen; otherwise the run is trained again here, for its weights: its record stays as it is. outbox: of
    the run that needs them. Raises RuntimeError if the run that it starts from has not finished.
    """
    start = spec.start
    if start is None or whole(start, root):
        return
    name = f"{start.arm} of {start.experiment}, seed {start.seed}"
    found = outbox.find(start.key)
    if found is None or found.status != "FINISHED":
        raise RuntimeError(f"init: the run that it starts from, {name}, has not finished")
    if at_hand(start, found, root):
        return
    steps = int(found.metrics["steps"])
    with checkpoint.held(start.folder(root), send):
        if last(start, root, steps) or copied(start, found, root, steps):
            return
        provide_start(start, root, outbox, send)
        where = f"its weights are not below {root}"
        send({"event": "warning", "message": f"init: {name}: {where}; training it again for them"})
        with trained(start, root, None, outbox.raise_if_lost, send):
            pass


def whole(start: RunSpec, root: Path) -> bool:
    """Whether a run is complete on disk, its last weights as well; one without stages has none.

    A run whose record came without weights may have checkpoints of a training for them that was interrupted.
    """
    folder = start.folder(root)
    return journal.complete(folder) and (
        not start.stages
        or any(name == "steps" and last(start, root, int(value)) for name, _, value, _ in journal.read(folder).rows)
    )


def at_hand(start: RunSpec, found: Run, root: Path) -> bool:
    """Whether the last weights of a finished run are below ``root``; one without stages has none."""
    return not start.stages or last(start, root, int(found.metrics["steps"])) is not None


def last(start: RunSpec, root: Path, steps: int) -> Path | None:
    """The intact checkpoint of a run after its last step; None where there is none."""
    path = checkpoint.path_of(start.folder(root), steps)
    return path if path.is_file() and not checkpoint.damaged(path) else None


def weights_of(spec: RunSpec, run: Run, root: Path) -> Path | None:
    """The intact checkpoint of a finished run after its last step, below ``root`` or the root where it was trained;
    None where it is gone."""
    for place in (root, elsewhere(run)):
        try:
            if place and (found := last(spec, place, int(run.metrics["steps"]))):
                return found
        except OSError:  # of another machine, or of another user
            continue
    return None


def elsewhere(run: Run) -> Path | None:
    """The root where a run was trained, as it knows it."""
    place = Path(run.tags.get("lit.where", "").partition(":")[2])
    return place if place.is_absolute() else None


def copied(start: RunSpec, run: Run, root: Path, steps: int) -> bool:
    """Copy the last checkpoint of a run from the root where it was trained; False where that cannot be read."""
    other = elsewhere(run)
    try:
        path = last(start, other, steps) if other else None
        content = path.read_bytes() if path else b""
    except OSError:
        return False

    def fill(file: checkpoint.Hashing) -> None:
        file.write(content)

    if content:
        checkpoint.save(checkpoint.path_of(start.folder(root), steps), fill)
    return bool(content)
