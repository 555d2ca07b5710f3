"""The training of a run, from its newest checkpoint through all stages."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch

from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.lit.callbacks.finite import NonFinite
from lit_memory.lit.callbacks.progress import Progress, Send
from lit_memory.lit.callbacks.timing import TestTimer
from lit_memory.lit.data import LitData
from lit_memory.lit.modules import LitMemory
from lit_memory.lit.scores import TestScores
from lit_memory.plan.runspec import RunSpec
from lit_memory.run import checkpoint
from lit_memory.run.build import build
from lit_memory.run.journal import Journal
from lit_memory.run.logger import TrackingLogger
from lit_memory.run.ranks import Rank, together
from lit_memory.run.saving import RunCheckpoint
from lit_memory.run.signals import Termination
from lit_memory.run.trainer import make_trainer
from lit_memory.util import files


class BeforeEachBatch(L.Callback):
    """Calls a function before every batch of training, validation and test; it raises to end the run."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.check()

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.check()

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.check()


@dataclass(frozen=True)
class Training:
    """What has trained a model."""

    rank: Rank
    trainer: L.Trainer
    module: LitMemory
    data: LitData
    curriculum: Curriculum
    timer: TestTimer
    scores: TestScores
    saver: RunCheckpoint

    def test(self) -> None:
        """Test on the whole task."""
        self.rank.tell("test")
        self.data.task = self.data.whole_task
        self.trainer.test(self.module, datamodule=self.data, verbose=False)


@contextlib.contextmanager
def trained(
    spec: RunSpec, root: Path, journal: Journal | None, check: Callable[[], None], send: Send
) -> Iterator[Training]:
    """Train a run on all its devices, or do nothing where its newest checkpoint is its last.

    journal: receives the metrics; None where they are known already. check: is called before every batch and raises to
    end the run.
    """
    folder = spec.folder(root)
    files.remove_staged(folder)
    newest = checkpoint.newest(folder, lambda text: send({"event": "warning", "message": text}))
    with (
        together(spec, root, newest, send) as rank,
        training(spec, root, journal, check, send, rank, newest) as done,
    ):
        yield done


@contextlib.contextmanager
def training(
    spec: RunSpec,
    root: Path,
    journal: Journal | None,
    check: Callable[[], None],
    send: Send,
    rank: Rank,
    newest: Path | None,
) -> Iterator[Training]:
    """``trained`` as one rank does it, from the checkpoint ``newest``. SIGTERM ends the block as it ends the
    training."""
    torch.set_num_threads(spec.train["threads"])
    module, data = build(spec, root)
    if (
        spec.train["precision"] == "64-true"
    ):  # else Lightning would read the weights of a checkpoint in single precision
        module.double()
    curriculum = Curriculum(spec.stages, spec.train["valid_every"])
    progress = Progress(send, curriculum, data.task.metrics[0])
    timer = TestTimer(spec.train["timed_steps"], spec.train["timed_contexts"])
    scores = TestScores()
    folder = spec.folder(root)
    saver = RunCheckpoint(folder, journal, Termination(obeyed=rank.number == 0))
    logger = TrackingLogger(journal) if journal else False
    callbacks = [BeforeEachBatch(check), curriculum, progress, timer, scores, saver]
    trainer = make_trainer(spec, folder, logger, *callbacks, rank=rank)
    with saver.termination.handled():
        if spec.stages:
            try:
                with naming_misfit(newest):
                    trainer.fit(module, datamodule=data, ckpt_path=newest and str(newest), weights_only=True)
            except NonFinite as error:
                if spec.train["breakdown"] == "fail":
                    raise
                curriculum.break_down(trainer.global_step)
                saver.save(trainer)
                send({"event": "warning", "message": f"training broke down, and is tested as it was: {error}"})
        yield Training(rank, trainer, module, data, curriculum, timer, scores, saver)


@contextlib.contextmanager
def naming_misfit(path: Path | None) -> Iterator[None]:
    """Raise CheckpointError, in one line, where the weights of a checkpoint are not those of the model: its code has
    changed since."""
    try:
        yield
    except RuntimeError as error:
        first, *lines = str(error).splitlines() or [""]
        if path is None or "loading state_dict" not in first:
            raise
        problem = f"does not fit the model ({lines[0].strip():.200})" if lines else "does not fit the model"
        advice = "its code has changed since; go back to that code, or use --fresh to train anew"
        raise checkpoint.CheckpointError(f"{path}: {problem}; {advice}") from error
