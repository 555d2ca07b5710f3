"""One run: train through the stages, test, record. ``run_one`` needs nothing but a RunSpec, a folder and a tracking
URI.

A Lightning epoch is the stretch between two validations, and stages change at its end only. Item k of the data is a
function of (seed, split, k), and so are the random numbers of step k: a run goes on bit for bit from any of its
checkpoints.
"""

import contextlib
import logging
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import lightning as L
import torch
from filelock import Timeout
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import Logger

from lit_memory.hf.pretrained import check_weights, start_from
from lit_memory.lit import LIT_MODULES
from lit_memory.lit.data import LIT_DATA, LitData
from lit_memory.lit.modules import LitMemory
from lit_memory.plan.experiment import RunSpec
from lit_memory.registry import model_size
from lit_memory.run import checkpoint
from lit_memory.run.checkpoint import CheckpointError, save
from lit_memory.run.tracking import Tracker
from lit_memory.util import files
from lit_memory.util.seeds import mixed_seed

Send = Callable[[dict[str, Any]], None]
"""Receives progress: {"event": "progress", "stage", "stages", "step", "steps", "loss", "metric"}, the event "testing",
at first alone, then with "share", "tokens" and "tokens_per_s", and the events "waiting" (another process trains the
same key) and "warning" with its "message"."""

SAVE_SECONDS = 60.0
"""Most work that a killed run loses, beside the step that it was in."""


class NonFinite(FloatingPointError):
    """A loss or a gradient is NaN or infinite; the weights have not been touched."""


class FiniteGuard(L.Callback):
    """Stops a run before a non-finite loss or gradient reaches the weights."""

    def __init__(self, arm: str) -> None:
        self.arm = arm

    def on_before_backward(self, trainer, pl_module, loss):
        if not torch.isfinite(loss):
            raise NonFinite(
                f"loss is {loss.item()} at {self.where(trainer)}; lower train.lr or raise model.denom_floor"
            )

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norm = torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None])
        if not torch.isfinite(norm):
            raise NonFinite(f"gradient norm is {norm.item()} at {self.where(trainer)}; lower train.lr or clip harder")

    def where(self, trainer) -> str:
        curriculum = next((c for c in trainer.callbacks if isinstance(c, Curriculum)), None)
        stage = f", stage {curriculum.stage + 1} of {len(curriculum.stages)}" if curriculum else ""
        return (
            f"step {trainer.global_step}{stage}, arm {self.arm}, lr {trainer.optimizers[0].param_groups[0]['lr']:.3g}"
        )


class StepSeed(L.Callback):
    """Random numbers of a training step (dropout) depend on (seed, step) alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.manual_seed(mixed_seed(self.seed, "dropout", trainer.global_step))


class Curriculum(L.Callback):
    """Walks through the stages of a run: each changes fields of the task and ends after its steps, or as soon as a
    validation reaches all metrics of its ``until``, from below or, if less is better, from above."""

    def __init__(self, spec: RunSpec) -> None:
        self.stages, self.valid_every = spec.stages, spec.train["valid_every"]
        self.step = 0  # of the last validation: Lightning restores its own counter after on_fit_start
        self.history: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.history = state_dict["step"], state_dict["history"]

    @property
    def stage(self) -> int:
        """How many stages have ended."""
        return len(self.history)

    @property
    def bounds(self) -> list[int]:
        """Steps between stages: where the first one began, and where each that has ended did."""
        return [0, *(entry["step"] for entry in self.history)]

    @property
    def done(self) -> bool:
        return self.stage >= len(self.stages)

    def enter(self, data: Any, module: Any, step: int) -> None:
        """Set task, epoch length and schedule for what follows ``step``."""
        stage = self.stages[self.stage]
        data.set_task(data.whole_task.at(**stage["task"]) if stage["task"] else data.whole_task)
        data.batch_size = stage["batch_size"]
        began = self.bounds[-1]
        data.epoch_steps = min(self.valid_every, stage["steps"] - (step - began))
        module.span = (began, stage["steps"])

    def on_fit_start(self, trainer, pl_module):
        if self.done:
            trainer.should_stop = True
        else:
            self.enter(pl_module.data, pl_module, self.step)

    def on_validation_end(self, trainer, pl_module):
        self.step = trainer.global_step
        stage, data = self.stages[self.stage], cast(LitData, pl_module.data)
        reached = {name: float(trainer.callback_metrics[f"valid/{name}"]) for name in stage["until"]}
        solved = bool(reached) and all(
            data.task.better(name, reached[name], goal) for name, goal in stage["until"].items()
        )
        if solved or trainer.global_step - self.bounds[-1] >= stage["steps"]:
            self.history = [
                *self.history,
                {"stage": self.stage, "task": stage["task"], "step": trainer.global_step, "solved": solved},
            ]
        if self.done:
            trainer.should_stop = True
        else:
            self.enter(pl_module.data, pl_module, trainer.global_step)


class Progress(L.Callback):
    """Tells the parent process how far the run is, at every validation and a few times in between; of a test, how much
    it has read."""

    def __init__(self, send: Send, curriculum: Curriculum, metric: str) -> None:
        self.send, self.curriculum, self.metric, self.last = send, curriculum, metric, 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if time.monotonic() - self.last > 0.5:
            self.tell(trainer, loss=float(outputs["loss"]))  # type: ignore[index]

    def on_validation_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        self.tell(
            trainer, metric=float(metrics.get(f"valid/{self.metric}", float("nan"))), loss=float(metrics["valid/loss"])
        )

    def on_test_start(self, trainer, pl_module):
        data: Any = pl_module.data
        self.read, self.began = 0, time.monotonic()
        loaders: Any = trainer.test_dataloaders
        read = zip(loaders, data.test_conditions, strict=True)
        self.total = sum(loader.dataset.samples * task.tokens for loader, (_, task) in read)

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if not isinstance(batch.context, tuple):
            batch.context = map(self.count, batch.context)

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        for part in (*(batch.context if isinstance(batch.context, tuple) else ()), batch.ids_BT):
            self.count(part)

    def count(self, segment):
        """Pass on a segment of a test, and tell about once a second what share has been read and how fast."""
        self.read += int(segment[1].sum()) if isinstance(segment, tuple) else segment.numel()
        now = time.monotonic()
        if now - self.last > 1 and now - self.began > 1:
            self.last = now
            self.send(
                {
                    "event": "testing",
                    "share": min(1.0, self.read / self.total),
                    "tokens": self.read,
                    "tokens_per_s": self.read / (now - self.began),
                }
            )
        return segment

    def tell(self, trainer, **values):
        self.last = time.monotonic()
        c = self.curriculum
        stage = min(c.stage, len(c.stages) - 1)
        step = trainer.global_step - c.bounds[stage]  # of the last stage also when it has ended
        place = {"stage": stage + 1, "stages": len(c.stages), "step": step, "steps": c.stages[stage]["steps"]}
        self.send(
            {"event": "progress", "metric_name": self.metric, "total_step": trainer.global_step, **place, **values}
        )


class Stopwatch(L.Callback):
    """How long the test took per context, for every x: reading it and answering, and drawing it where it is made while
    it is read. And how many tokens a second a training reads at that x, as the mean of ``timed_steps`` forward and
    backward passes after one that does not count."""

    def __init__(self, timed_steps: int = 0) -> None:
        self.timed_steps = timed_steps
        self.totals: dict[float, tuple[float, int]] = {}  # x -> seconds, contexts
        self.speeds: dict[float, float] = {}

    def on_test_start(self, trainer, pl_module):
        if not self.timed_steps:
            return
        module: Any = pl_module
        data = module.data
        wanted = data.batch_size * data.whole_task.tokens
        module.train()
        for x, task in data.test_conditions:
            batch = task.batch(data.seed, "train", 0, max(1, wanted // task.tokens)).to(module.device)
            with torch.enable_grad(), trainer.precision_plugin.forward_context():
                module.loss(batch).backward()
                began = self.now(module.device)
                for _ in range(self.timed_steps):
                    module.loss(batch).backward()
            seconds = (self.now(module.device) - began) / self.timed_steps
            self.speeds[x] = len(batch.ids_BT) * task.tokens / seconds
        module.zero_grad()
        module.eval()

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.began = self.now(pl_module.device)

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        data: Any = pl_module.data
        x = data.test_conditions[dataloader_idx][0]
        seconds, contexts = self.totals.get(x, (0.0, 0))
        self.totals[x] = seconds + self.now(pl_module.device) - self.began, contexts + len(batch.ids_BT)

    def now(self, device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """(metric, x, value)."""
        seconds = [("seconds", x, seconds / contexts) for x, (seconds, contexts) in self.totals.items()]
        return seconds + [("train_tokens_per_s", x, speed) for x, speed in self.speeds.items()]


class TrackingLogger(Logger):
    """Lightning's metrics, written to one MLflow run in batches of one database transaction per validation."""

    def __init__(self, tracker: Tracker, run_id: str) -> None:
        super().__init__()
        self.tracker, self.run_id = tracker, run_id
        self.rows: list[tuple[dict[str, float], int]] = []  # all that was logged; kept in checkpoints

    def restore(self, rows: list[tuple[dict[str, float], int]]) -> None:
        """Log again what MLflow does not have: the run may have been deleted there."""
        self.rows = rows
        for values, step in rows:
            self.tracker.log(self.run_id, values, step)

    @property
    def name(self) -> str:
        return "lit-memory"

    @property
    def version(self) -> str:
        return self.run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = {k: float(v) for k, v in metrics.items() if k.startswith(("train/", "valid/"))}
        if values:
            self.rows.append((values, (step or 0) + 1))  # Lightning tells the index of the last step
            self.tracker.log(self.run_id, *self.rows[-1])

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The engine logs the whole configuration itself; Lightning would cut its values to 250 characters."""


class VerifiedCheckpoints(TorchCheckpointIO):
    """How Lightning writes and reads checkpoints here: see ``checkpoint.py``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save(Path(path), lambda file: torch.save(checkpoint, cast(IO[bytes], file)))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        """Raises CheckpointError for a file that is not a checkpoint, or that would run code."""
        try:
            return torch.load(path, map_location=map_location or (lambda storage, location: storage), weights_only=True)
        except Exception as error:  # torch reports a wrong file in many ways
            raise CheckpointError(
                f"{path}: not a checkpoint of plain tensors and numbers ({type(error).__name__}); delete it to train anew"
            ) from error


class Keeper(Checkpoint):
    """Saves the run after every validation, once a minute in between, and when it is told to stop.

    Lightning calls a ``Checkpoint`` after all other callbacks, so that their states are up to date.
    """

    def __init__(self, folder: Path, logger: TrackingLogger | None = None) -> None:
        self.folder, self.logger = folder, logger
        self.started, self.before = time.monotonic(), 0.0
        self.saved = self.started
        self.stopping = self.can_wait = self.handling = False

    @property
    def seconds(self) -> float:
        """What the run has taken so far, with what it took before it was interrupted."""
        return self.before + time.monotonic() - self.started

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "rows": self.logger.rows if self.logger else []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict["seconds"]
        if self.logger:
            self.logger.restore(state_dict["rows"])

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM ends the run: while it trains after the present step and a checkpoint, else at once. It counts once:
        the command that sends it may be gone before the run is closed, and then it comes again (``launch.follow``)."""
        if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
            yield
            return
        handler, self.handling = signal.signal(signal.SIGTERM, self.stop), True
        try:
            yield
        finally:
            if not self.stopping:
                signal.signal(signal.SIGTERM, handler)

    def on_train_start(self, trainer, pl_module):
        if (
            self.handling
        ):  # alone: Lightning's handler, which it has put before ours by now, ends the training before we can save
            signal.signal(signal.SIGTERM, self.stop)

    def stop(self, number: int, frame: Any) -> None:
        if self.stopping:
            return
        self.stopping = True
        if not self.can_wait:
            raise SystemExit(128 + number)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        # After the last step of an epoch comes its validation, which a resumed run would not know.
        self.can_wait = batch_idx + 1 < trainer.num_training_batches
        if self.stopping and not self.can_wait:
            raise SystemExit(128 + signal.SIGTERM)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self.can_wait and whole and (self.stopping or time.monotonic() - self.saved > SAVE_SECONDS):
            self.save(trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        self.can_wait = True  # an exception in the middle of torch.save would come out as a broken file
        trainer.save_checkpoint(checkpoint.place(self.folder, trainer.global_step))
        self.saved, self.can_wait = time.monotonic(), False
        if self.stopping:
            raise SystemExit(128 + signal.SIGTERM)


def build(spec: RunSpec, root: Path | None = None) -> tuple[LitMemory, LitData]:
    """The LightningModule and LightningDataModule of a run, with weights drawn from its seed, or those of
    ``train.init``; of another run's if there is a ``root`` with its checkpoints."""
    t = spec.train
    model = {k: v for k, v in spec.model.items() if k != "name"}
    optimizer = {k: t[k] for k in ("lr", "weight_decay", "schedule", "warmup", "final_lr", "bptt", "unroll_schedule")}
    optimizer["frozen"] = t["frozen"] or None  # a checkpoint of a run without is plain
    torch.manual_seed(spec.seed)
    losses = {f"{name}_loss": weight for name, weight in t["losses"].items()}
    module = LIT_MODULES[spec.model["name"]](**optimizer, **losses, **model)
    if spec.start is None and t["init"]:
        init = t["init"] if isinstance(t["init"], dict) else {"decoder": t["init"]}
        start_from(module.model, init["decoder"], init.get("encoder"))
    elif spec.start is not None and root is not None:
        start_from_run(module, spec.start, root)
    task = {k: v for k, v in spec.task.items() if k != "name"}
    loaders = {k: t[k] for k in ("batch_size", "valid_size", "test_size", "eval_batch_size", "test_cuts", "workers")}
    data = LIT_DATA[spec.task["name"]](seed=spec.seed, epoch_steps=t["valid_every"], **loaders, **task)
    return module, data


def start_from_run(module: LitMemory, start: RunSpec, root: Path) -> None:
    """Give a fresh model the weights that a run ended with. Parts that only one of the two has, such as ways to tell
    the order of lines, stay as they were drawn from the seed, or are left behind.

    Raises FileNotFoundError where the run has left none, ValueError for weights of another model.
    """
    path = checkpoint.newest(start.folder(root), lambda text: None)
    if path is None:
        raise FileNotFoundError(
            f"init={{run: {start.experiment}/{start.arm}}}: no checkpoint of its seed {start.seed} in {start.folder(root)}; run it first"
        )
    theirs, own = VerifiedCheckpoints().load_checkpoint(path)["state_dict"], module.state_dict()
    common = {part_of(name) for name in theirs} & {part_of(name) for name in own}
    weights = {name: tensor for name, tensor in theirs.items() if part_of(name) in common}
    weights |= {name: tensor for name, tensor in own.items() if part_of(name) not in common}
    try:
        check_weights(weights, own)
    except ValueError as error:
        raise ValueError(f"init={{run: {start.experiment}/{start.arm}}}: {error}") from None
    module.load_state_dict(weights)


def part_of(name: str) -> str:
    """The part of a model that a weight of its LightningModule belongs to: ``model.decoder.norm.weight`` to decoder."""
    return name.split(".")[1]


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
    logger, curriculum = TrackingLogger(tracker, run_id), Curriculum(spec)
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
