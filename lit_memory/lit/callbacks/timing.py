"""How long a run takes."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
import torch

from lit_memory.util.metrics import Condition


class TestTimer(L.Callback):
    """Measures seconds per context of the test, and tokens per second of the training, at every test condition.

    The seconds include drawing a context where it is made while it is read. The first batch of a test warms up: it does
    not count where another of its condition follows. The speed is the mean of ``timed_steps`` forward and backward
    passes after one that does not count; with 0 it is not measured. They read ``timed_contexts`` contexts, or, with 0,
    as many as have the tokens of a training batch.
    """

    __test__ = False  # for pytest

    def __init__(self, timed_steps: int = 0, timed_contexts: int = 0) -> None:
        self.timed_steps, self.timed_contexts = timed_steps, timed_contexts
        self.totals: dict[Condition, tuple[float, int]] = {}  # condition -> seconds, contexts
        self.speeds: dict[Condition, float] = {}

    def on_test_start(self, trainer: Any, pl_module):
        if not self.timed_steps:
            return
        module, data = pl_module, trainer.datamodule
        batch_tokens = data.batch_size * data.whole_task.tokens
        module.train()
        for condition, task in data.test_conditions:
            samples = self.timed_contexts or max(1, batch_tokens // task.tokens)
            batch = task.batch(data.seed, "train", 0, samples)
            batch = batch.recut(data.cuts).to(module.device)
            with torch.enable_grad():
                seconds = self.seconds_per_step(module, batch, trainer.precision_plugin.forward_context)
            self.speeds[condition] = len(batch.ids_BT) * task.tokens / seconds
        module.zero_grad()
        module.eval()

    def seconds_per_step(self, module: Any, batch: Any, precision: Callable[[], AbstractContextManager[Any]]) -> float:
        """Mean duration of a forward and backward pass. precision: the context of a forward pass, such as autocast; as
        in a training, the backward pass is outside."""

        def step() -> None:
            with precision():
                loss = module.loss(batch)
            loss.backward()

        step()
        began = self.now(module.device)
        for _ in range(self.timed_steps):
            step()
        return (self.now(module.device) - began) / self.timed_steps

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.began = self.now(pl_module.device)

    def on_test_batch_end(self, trainer: Any, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        condition = trainer.datamodule.test_conditions[dataloader_idx][0]
        if (batch_idx, dataloader_idx) == (1, 0):
            self.totals.clear()  # of the first batch
        seconds, contexts = self.totals.get(condition, (0.0, 0))
        seconds += self.now(pl_module.device) - self.began
        self.totals[condition] = seconds, contexts + len(batch.ids_BT)

    def now(self, device: torch.device) -> float:
        """A clock in seconds that waits for the device."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    @property
    def rows(self) -> list[tuple[str, Condition, float]]:
        """(metric, condition, value)."""
        seconds = [("seconds", x, seconds / contexts) for x, (seconds, contexts) in self.totals.items()]
        return seconds + [("train_tokens_per_s", x, speed) for x, speed in self.speeds.items()]
