"""How far a run is."""

import time
from collections.abc import Callable
from typing import Any

import lightning as L

from lit_memory.lit.callbacks.curriculum import Curriculum

Send = Callable[[dict[str, Any]], None]
"""Receives progress: {"event": "progress", "stage", "stages", "step", "steps", "loss", "metric"}, the event "testing",
at first alone, then with "share", "tokens" and "tokens_per_s", and the events "waiting" (another process trains the
same key) and "warning" with its "message"."""


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
