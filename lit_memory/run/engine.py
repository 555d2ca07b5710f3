"""One run, as a story: build, resume, fit, test, record.

``run_one`` needs nothing but a RunSpec, a folder and a tracking URI. Item k of the data is a function of (seed, split,
k), and so are the random numbers of step k: a run goes on bit for bit from any of its checkpoints.
"""

import contextlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout

from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.lit.callbacks.progress import Progress, Send
from lit_memory.lit.callbacks.timing import TestTimer
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import model_size
from lit_memory.run import checkpoint
from lit_memory.run.build import build
from lit_memory.run.logger import TrackingLogger
from lit_memory.run.results import Results, collect, peak_memory_mb
from lit_memory.run.saving import RunCheckpoint
from lit_memory.run.tracking import TAG, Run, Tracker
from lit_memory.run.trainer import make_trainer, silence_lightning
from lit_memory.util import files
from lit_memory.util.provenance import code_changes


def run_one(spec: RunSpec, root: Path, uri: str, parent: str, tags: Mapping[str, str], send: Send) -> None:
    """Train, test and record one run; returns at once if its key is FINISHED.

    root: folder of checkpoints and reports. uri: of MLflow. parent: id of the parent run. tags: of a new run. send:
    receives progress. Raises what goes wrong, after recording it.
    """
    silence_lightning()
    with lock_of(spec, root, send):
        tracker = Tracker(root, uri)
        run = tracker.find(spec.key)
        if run is not None and run.status == "FINISHED":
            return
        if run is not None:
            tell_changes(spec, root, run, tags, send)
        run_id = tracker.start(spec, run, parent, tags, parameters(spec))
        with recording_errors(tracker, run_id):
            check_start(spec, tracker)
            results = train_and_test(spec, root, tracker, run_id, send)
            tracker.finish(run_id, results.rows, results.totals, results.times)


def train_and_test(spec: RunSpec, root: Path, tracker: Tracker, run_id: str, send: Send) -> Results:
    """Train from the newest checkpoint through all stages, then test on the whole task."""
    torch.set_num_threads(spec.train["threads"])
    folder = spec.folder(root)
    files.remove_staged(folder)
    module, data = build(spec, root)
    logger = TrackingLogger(tracker, run_id)
    curriculum = Curriculum(spec.stages, spec.train["valid_every"])
    progress = Progress(send, curriculum, data.task.metrics[0])
    timer = TestTimer(spec.train["timed_steps"])
    saver = RunCheckpoint(folder, logger)
    trainer = make_trainer(spec, folder, logger, curriculum, progress, timer, saver)
    newest = checkpoint.newest(folder, lambda text: send({"event": "warning", "message": text}))
    with saver.termination.handled():
        if spec.stages:
            with naming_misfit(newest):
                trainer.fit(module, datamodule=data, ckpt_path=newest and str(newest), weights_only=True)
        train_seconds, steps = saver.seconds, trainer.global_step
        record_stages(tracker, run_id, curriculum)
        tracker.tag(run_id, {"remarks": "\n".join(data.whole_task.remarks())})
        send({"event": "testing"})
        data.task = data.whole_task
        trainer.test(module, datamodule=data, verbose=False)
    totals = {
        "steps": steps,
        "train_seconds": train_seconds,
        "seconds": saver.seconds,
        "peak_memory_mb": peak_memory_mb(),
    }
    return Results(collect(trainer.callback_metrics, data), totals, timer.rows)


@contextlib.contextmanager
def lock_of(spec: RunSpec, root: Path, send: Send) -> Iterator[None]:
    """Hold the lock of a run; wait for another process that trains it."""
    lock = checkpoint.lock(spec.folder(root))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        send({"event": "waiting"})
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


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


def check_start(spec: RunSpec, tracker: Tracker) -> None:
    """Raise RuntimeError if the run that this one starts from has not finished."""
    if spec.start is None:
        return
    found = tracker.find(spec.start.key)
    if found is None or found.status != "FINISHED":
        run = f"{spec.start.arm} of {spec.start.experiment}, seed {spec.start.seed}"
        raise RuntimeError(f"init: the run that it starts from, {run}, has not finished")


def record_stages(tracker: Tracker, run_id: str, curriculum: Curriculum) -> None:
    """Record when each stage ended, whether it was solved, and its number of steps."""
    for entry in curriculum.history:
        tracker.log(run_id, {"stage": entry["stage"], "stage_solved": float(entry["solved"])}, entry["step"])
    steps = [str(end - start) for start, end in pairwise(curriculum.bounds)]
    tracker.tag(run_id, {"stage_steps": " ".join(steps)})


@contextlib.contextmanager
def naming_misfit(path: Path | None) -> Iterator[None]:
    """Raise CheckpointError, in one line, where the weights of a checkpoint are not those of the model: its code has
    changed since."""
    try:
        yield
    except RuntimeError as error:
        first, *lines = str(error).splitlines()
        if path is None or "loading state_dict" not in first:
            raise
        problem = f"does not fit the model ({lines[0].strip():.200})" if lines else "does not fit the model"
        advice = "its code has changed since; go back to that code, or use --fresh to train anew"
        raise checkpoint.CheckpointError(f"{path}: {problem}; {advice}") from error


def tell_changes(spec: RunSpec, root: Path, run: Run, tags: Mapping[str, str], send: Send) -> None:
    """Warn of code or libraries that are others than those with which an interrupted run has come so far."""
    before = {name.removeprefix(TAG): value for name, value in run.tags.items()}
    changes = code_changes(before, tags)
    if changes and (run.metrics or checkpoint.saved(spec.folder(root))):
        name = f"{spec.arm} {spec.point}".strip()
        problem = f"{name} seed {spec.seed} goes on with other code than it began with ({changes})"
        advice = "its numbers may differ from those of either; --fresh trains it anew"
        send({"event": "warning", "message": f"{problem}; {advice}"})


def parameters(spec: RunSpec) -> dict[str, Any]:
    """The configuration as MLflow parameters with dotted names, and the size of the model."""
    found: dict[str, Any] = {}
    for section in ("model", "task", "train"):
        found |= {f"{section}.{name}": value for name, value in getattr(spec, section).items()}
    found |= model_size(spec.model) | {"seed": spec.seed, "arm": spec.arm}
    if spec.start:
        found["start"] = f"{spec.start.arm} of {spec.start.experiment}, key {spec.start.key}"
    return found
