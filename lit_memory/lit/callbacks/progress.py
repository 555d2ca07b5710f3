"""How far a run is."""

import time
from collections.abc import Callable
from typing import Any

import lightning as L

from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.recurrence import Compiled
from lit_memory.tasks.batch import Segment
from lit_memory.util.metrics import MetricName

Send = Callable[[dict[str, Any]], None]
"""Receives messages about a run, dictionaries with an "event":

"progress" with "stage", "stages", "step", "steps", "total_step", "loss", "metric", "metric_name"; "testing", at first
alone, then with "share", "tokens", "tokens_per_s"; "waiting" while another process trains the same key; "warning" with
a "message".
"""
TRAINING_SECONDS = 0.5
"""Least time between two messages of a training."""
TEST_SECONDS = 1.0
"""Least time between two messages of a test, and before the first one."""


class Progress(L.Callback):
    """Reports the progress of a run: at every validation, between validations, and what share of a test is read."""

    def __init__(self, send: Send, curriculum: Curriculum, metric: str) -> None:
        self.send, self.curriculum, self.metric = send, curriculum, metric
        self.last = 0.0  # when the last message was sent
        self.tokens_read = self.test_tokens = 0
        self.devices = 1

    def on_fit_start(self, trainer, pl_module):
        if pl_module.device.type == "cpu" and isinstance(pl_module.model, Compiled) and pl_module.model.uncompiled():
            self.send({"event": "warning", "message": pl_module.model.uncompiled()})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if time.monotonic() - self.last > TRAINING_SECONDS:
            self.report(trainer, loss=float(outputs["loss"]))  # type: ignore[index]

    def on_validation_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        metric = metrics.get(str(MetricName(self.metric, "valid")), float("nan"))
        self.report(trainer, metric=float(metric))  # "loss" is that of the training

    def setup(self, trainer: Any, pl_module, stage):
        if stage == "test":
            trainer.datamodule.on_test_segment = self.count

    def on_test_start(self, trainer, pl_module):
        self.tokens_read, self.began, self.devices = 0, time.monotonic(), trainer.world_size
        loaders: Any = trainer.test_dataloaders
        self.test_tokens = sum(loader.dataset.samples * loader.dataset.task.tokens for loader in loaders)

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if isinstance(batch.context, tuple):  # otherwise its segments were counted one by one
            for segment in batch.context:
                self.count(segment)
        self.count(batch.ids_BT)

    def count(self, segment: Segment) -> None:
        """Add the tokens of a segment of a test, which all devices read a part of, and report about once a second."""
        self.tokens_read += self.devices * (int(segment[1].sum()) if isinstance(segment, tuple) else segment.numel())
        now = time.monotonic()
        seconds = now - self.began
        if now - self.last > TEST_SECONDS and seconds > TEST_SECONDS:
            self.last = now
            share = min(1.0, self.tokens_read / self.test_tokens)
            speed = {"tokens": self.tokens_read, "tokens_per_s": self.tokens_read / seconds}
            self.send({"event": "testing", "share": share, **speed})

    def report(self, trainer, **values):
        self.last = time.monotonic()
        stages, bounds = self.curriculum.stages, self.curriculum.bounds
        stage = min(self.curriculum.stage, len(stages) - 1)
        step = trainer.global_step - bounds[stage]  # of the last stage also when it has ended
        where = {"stage": stage + 1, "stages": len(stages), "step": step, "steps": stages[stage]["steps"]}
        run = {"metric_name": self.metric, "total_step": trainer.global_step}
        self.send({"event": "progress", **run, **where, **values})
