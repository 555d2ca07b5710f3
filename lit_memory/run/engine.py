"""One run, as a story: build, resume, fit, test, record.

``run_one`` needs nothing but a RunSpec, a folder and a tracking URI. Item k of the data is a function of (seed, split,
k), and so are the random numbers of step k: a run goes on bit for bit from any of its checkpoints.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.lit.callbacks.progress import Send
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import model_size
from lit_memory.run import checkpoint, lease
from lit_memory.run.logger import TrackingLogger
from lit_memory.run.results import Results, collect, peak_memory_mb
from lit_memory.run.starts import provide_start
from lit_memory.run.tracking import Tracker
from lit_memory.run.trainer import silence_lightning
from lit_memory.run.training import trained


def run_one(spec: RunSpec, root: Path, uri: str, parent: str, tags: Mapping[str, str], send: Send) -> None:
    """Train, test and record one run; returns at once if its key is FINISHED.

    root: folder of checkpoints and reports. uri: of MLflow. parent: id of the parent run. tags: of a new run. send:
    receives progress. Raises what goes wrong, after recording it.
    """
    silence_lightning()
    folder = spec.folder(root)
    with checkpoint.held(folder, send):
        tracker = Tracker(root, uri)
        with lease.held(tracker.register, spec.key, folder, send) as own:
            run = tracker.find(spec.key)
            if run is not None and run.status == "FINISHED":
                return
            tracker.guard(own.check)
            run_id = tracker.start(spec, run, parent, tags, parameters(spec))
            with recording_errors(tracker, run_id):
                provide_start(spec, root, tracker, own.raise_if_lost, send)
                results = train_and_test(spec, root, tracker, run_id, own.raise_if_lost, send)
                tracker.finish(run_id, results.rows, results.totals, results.times)


def train_and_test(
    spec: RunSpec, root: Path, tracker: Tracker, run_id: str, check: Callable[[], None], send: Send
) -> Results:
    """Train from the newest checkpoint through all stages, then test on the whole task.

    check: is called before every batch and raises to end the run.
    """
    with trained(spec, root, TrackingLogger(tracker, run_id), check, send) as done:
        data, saver = done.data, done.saver
        train_seconds, steps = saver.seconds, done.trainer.global_step
        record_stages(tracker, run_id, done.curriculum)
        tracker.tag(run_id, {"remarks": "\n".join(data.whole_task.remarks())})
        send({"event": "testing"})
        data.task = data.whole_task
        done.trainer.test(done.module, datamodule=data, verbose=False)
    totals = {
        "steps": steps,
        "train_seconds": train_seconds,
        "seconds": saver.seconds,
        "peak_memory_mb": peak_memory_mb(),
    }
    return Results(collect(done.trainer.callback_metrics, data), totals, done.timer.rows)


@contextlib.contextmanager
def recording_errors(tracker: Tracker, run_id: str) -> Iterator[None]:
    """Record what ends the block before it is raised: KILLED for a signal, else FAILED."""
    try:
        yield
    except BaseException as error:
        status = "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"
        with contextlib.suppress(Exception):  # on a full disk nothing can be written; the error is raised all the same
            tracker.tag(run_id, {"error": f"{type(error).__name__}: {error}"[:5000]})
            tracker.end(run_id, status)
        raise


def record_stages(tracker: Tracker, run_id: str, curriculum: Curriculum) -> None:
    """Record when each stage ended, whether it was solved, and its number of steps."""
    for entry in curriculum.history:
        tracker.log(run_id, {"stage": entry["stage"], "stage_solved": float(entry["solved"])}, entry["step"])
    steps = [str(end - start) for start, end in pairwise(curriculum.bounds)]
    tracker.tag(run_id, {"stage_steps": " ".join(steps)})


def parameters(spec: RunSpec) -> dict[str, Any]:
    """The configuration as MLflow parameters with dotted names, and the size of the model."""
    found: dict[str, Any] = {}
    for section in ("model", "task", "train"):
        found |= {f"{section}.{name}": value for name, value in getattr(spec, section).items()}
    found |= model_size(spec.model) | {"seed": spec.seed, "arm": spec.arm}
    if spec.start:
        found["start"] = f"{spec.start.arm} of {spec.start.experiment}, key {spec.start.key}"
    return found
