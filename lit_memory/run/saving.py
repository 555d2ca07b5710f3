"""When a run is saved, and how Lightning writes and reads what is saved."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from lit_memory.run import checkpoint
from lit_memory.run.checkpoint import CheckpointError, save
from lit_memory.run.logger import TrackingLogger

SAVE_SECONDS = 60.0
"""Most work that a killed run loses, beside the step that it was in."""


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
