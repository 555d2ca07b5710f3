"""When a run is saved, and how Lightning reads and writes checkpoints."""

import time
from pathlib import Path
from typing import IO, Any, cast

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from lit_memory.run import checkpoint
from lit_memory.run.checkpoint import CheckpointError, save
from lit_memory.run.journal import Journal
from lit_memory.run.signals import Termination

SAVE_SECONDS = 60.0
"""Seconds between two checkpoints: the most work that a killed run loses, beside the step that it was in."""


class VerifiedCheckpoints(TorchCheckpointIO):
    """Lightning's plugin for reading and writing: whole files with a checksum, see ``checkpoint.py``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save(Path(path), lambda file: torch.save(checkpoint, cast(IO[bytes], file)))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        """Raises CheckpointError for a file that is no checkpoint, or that would run code."""
        try:
            return torch.load(path, map_location=map_location or (lambda storage, location: storage), weights_only=True)
        except Exception as error:  # torch reports a wrong file in many ways
            problem = f"not a checkpoint of plain tensors and numbers ({type(error).__name__})"
            raise CheckpointError(f"{path}: {problem}; delete it to train anew") from error


class RunCheckpoint(Checkpoint):
    """Saves the run after every validation, every ``SAVE_SECONDS`` in between, and on SIGTERM.

    Lightning calls a ``Checkpoint`` after all other callbacks, when their states are up to date.
    """

    def __init__(self, folder: Path, journal: Journal | None = None, termination: Termination | None = None) -> None:
        self.folder, self.journal = folder, journal
        self.started, self.seconds_before = time.monotonic(), 0.0
        self.saved = self.started
        self.termination = termination or Termination()

    @property
    def state_key(self) -> str:
        """The name of this class in the checkpoints of version 0.1."""
        return "Keeper"

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, those before an interruption included."""
        return self.seconds_before + time.monotonic() - self.started

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds_before = state_dict["seconds"]
        for values, step in state_dict.get("rows", []):  # version 0.1 had no journal
            if self.journal:
                self.journal.log(values, step)

    def on_train_start(self, trainer, pl_module):
        self.termination.reinstall()

    def on_test_start(self, trainer, pl_module):
        self.termination.reinstall()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        # The last step of an epoch is not saved by itself: a run resumed there would miss the validation behind it.
        self.termination.defer(batch_idx + 1 < trainer.num_training_batches)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not self.termination.deferred or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        due = self.termination.requested or time.monotonic() - self.saved > SAVE_SECONDS
        if trainer.strategy.reduce_boolean_decision(due, all=False):  # all ranks save together
            self.log_step(trainer)
            self.save(trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer)

    def log_step(self, trainer: Any) -> None:
        """Log what Lightning logs of a step once its callbacks have ended. A run resumed behind the step would miss
        it."""
        if self.journal and trainer.global_step % trainer.log_every_n_steps == 0:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("train/")}
            self.journal.log(metrics, trainer.global_step)

    def save(self, trainer: L.Trainer) -> None:
        self.termination.defer(True)  # an exception in the middle of torch.save would come out as a broken file
        if self.journal:
            self.journal.sync()
        trainer.save_checkpoint(checkpoint.path_of(self.folder, trainer.global_step))
        self.saved = time.monotonic()
        self.termination.defer(False)
