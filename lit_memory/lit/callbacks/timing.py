"""How long a run takes."""

import time
from typing import Any

import lightning as L
import torch


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
