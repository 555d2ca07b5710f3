"""One run: train through the stages, test, record. ``run_one`` needs nothing but a RunSpec, a folder and a tracking
URI.

A Lightning epoch is the stretch between two validations, and stages change at its end only. Item k of the data is a
function of (seed, split, k), and so are the random numbers of step k: a run goes on bit for bit from any of its
checkpoints.
"""

import contextlib
import logging
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from filelock import Timeout

from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.lit.callbacks.finite import FiniteGuard
from lit_memory.lit.callbacks.progress import Progress, Send
from lit_memory.lit.callbacks.seed import StepSeed
from lit_memory.lit.callbacks.timing import Stopwatch
from lit_memory.lit.data import LitData
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import model_size
from lit_memory.run import checkpoint
from lit_memory.run.build import build
from lit_memory.run.logger import TrackingLogger
from lit_memory.run.saving import Keeper, VerifiedCheckpoints
from lit_memory.run.tracking import Tracker
from lit_memory.util import files


def run_one(spec: RunSpec, root: Path, uri: str, parent: str, tags: Mapping[str, str], send: Send) -> None:
    """Train and test one run and record it; returns at once if its key is FINISHED. Raises what went wrong, after
    recording it."""
    quiet()
    lock = checkpoint.lock(spec.folder(root))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        send({"event": "waiting"})
        lock.acquire()
    with lock:
        tracker = Tracker(root, uri)
        run = tracker.find(spec.key)
        if run is not None and run.status == "FINISHED":
            return
        run_id = tracker.start(spec, run, parent, tags, flatten(spec))
        try:
            if spec.start is not None and (
                (found := tracker.find(spec.start.key)) is None or found.status != "FINISHED"
            ):
                raise RuntimeError(
                    f"init: the run that it starts from, {spec.start.arm} of {spec.start.experiment}, seed {spec.start.seed}, has not finished"
                )
            tracker.finish(run_id, *train_and_test(spec, root, tracker, run_id, send))
        except BaseException as error:
            status = "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"
            with contextlib.suppress(
                Exception
            ):  # whoever cannot write this, on a full disk say, still tells what happened
                tracker.tag(run_id, {"error": f"{type(error).__name__}: {error}"[:5000]})
                tracker.end(run_id, status)
            raise


def train_and_test(spec: RunSpec, root: Path, tracker: Tracker, run_id: str, send: Send):
    """Fit from the last checkpoint, if there is something to train, then test: (metric, x, value) rows, totals, and
    such rows of measured times."""
    torch.set_num_threads(spec.train["threads"])
    path = spec.folder(root)
    files.sweep(path)
    module, data = build(spec, root)
    logger, curriculum = TrackingLogger(tracker, run_id), Curriculum(spec.stages, spec.train["valid_every"])
    keeper, stopwatch = Keeper(path, logger), Stopwatch(spec.train["timed_steps"])
    trainer = make_trainer(
        spec, path, logger, curriculum, Progress(send, curriculum, data.task.metrics[0]), stopwatch, keeper
    )
    last = checkpoint.newest(path, lambda text: send({"event": "warning", "message": text}))
    with keeper.signals():
        if spec.stages:
            trainer.fit(module, datamodule=data, ckpt_path=last and str(last), weights_only=True)
        trained = keeper.seconds
        for entry in curriculum.history:
            tracker.log(run_id, {"stage": entry["stage"], "stage_solved": float(entry["solved"])}, entry["step"])
        tracker.tag(run_id, {"stage_steps": " ".join(str(b - a) for a, b in pairwise(curriculum.bounds))})
        tracker.tag(run_id, {"remarks": "\n".join(data.whole_task.remarks())})
        send({"event": "testing"})
        steps, data.task = trainer.global_step, data.whole_task
        trainer.test(module, datamodule=data, verbose=False)
    totals = {"steps": steps, "train_seconds": trained, "seconds": keeper.seconds, "peak_memory_mb": peak_memory_mb()}
    return collect(trainer.callback_metrics, data), totals, stopwatch.rows


def collect(metrics: Mapping[str, Any], data: LitData) -> list[tuple[str, float, float]]:
    """(metric, x, value) rows from Lightning's ``test/<metric>@<x>``, with what the task derives from them.
    ``metric[place]`` is a value of a curve, whose x is its place; a test with several conditions has the curve of its
    last one."""
    out = []
    for x, task in data.test_conditions:
        means = {
            name.removeprefix("test/").removesuffix(f"@{x}"): float(v)
            for name, v in metrics.items()
            if name.endswith(f"@{x}")
        }
        for name, value in (means | task.summarize(means)).items():
            metric, on_curve, place = name.removesuffix("]").partition("[")
            if not on_curve or x == data.test_conditions[-1][0]:
                out.append((metric, int(place) if on_curve else x, value))
    return out


def make_trainer(spec: RunSpec, path: Path, logger: Any, *callbacks: L.Callback) -> L.Trainer:
    """Lightning's Trainer with our epochs, checkpoints and guards."""
    t = spec.train
    clip = {
        "gradient_clip_val": t["clip_norm"] or t["clip_value"] or None,
        "gradient_clip_algorithm": "value" if t["clip_value"] else "norm",
    }
    return L.Trainer(
        default_root_dir=path,  # what a profiler writes; Lightning would take the working directory
        max_epochs=-1,
        accelerator=t["accelerator"],
        devices=t["trainer"].get("devices", 1),
        precision=t["precision"],
        deterministic=True,
        logger=logger,
        callbacks=[*callbacks, StepSeed(spec.seed), FiniteGuard(spec.arm)],
        plugins=[VerifiedCheckpoints()],
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=t["valid_every"],
        inference_mode=False,
        **clip,
        **{k: v for k, v in t["trainer"].items() if k != "devices"},
    )


def flatten(spec: RunSpec) -> dict[str, Any]:
    """The configuration as dotted MLflow parameters, with the model's size."""
    flat = {f"{section}.{k}": v for section in ("model", "task", "train") for k, v in getattr(spec, section).items()}
    started = {"start": f"{spec.start.arm} of {spec.start.experiment}, key {spec.start.key}"} if spec.start else {}
    return flat | model_size(spec.model) | {"seed": spec.seed, "arm": spec.arm} | started


def peak_memory_mb() -> float:
    """Largest resident size of this process so far (Linux counts kilobytes, macOS bytes)."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def quiet() -> None:
    """Lightning's banners and hints about workers say nothing that the report does not."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings(
        "ignore", message="You're resuming from a checkpoint that ended before the epoch ended.*"
    )  # our data is a function of the step
    warnings.filterwarnings("ignore", message=".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*")
