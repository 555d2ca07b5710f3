"""The optimizer of a ``LitMemory``, and its learning rate."""

from typing import Any

import lightning as L
import torch

from lit_memory.lit.schedule import relative_rate
from lit_memory.registry import weights_of


class Optimized(L.LightningModule):
    """AdamW on a ``model``, with the rates of ``schedule.relative_rate``.

    The optimizer of a subclass keeps its own largest rates, one for each group. Where the Trainer has a scheduler, from
    ``configure_optimizers`` of a subclass or from a callback, the rates are its own.
    """

    model: Any
    stage: tuple[int, int] | None = None
    """First step and steps of the present stage; None: the training is one."""
    largest_rates: list[float] | None = None
    """Of the groups of weights, as the optimizer was made."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        for weight in weights_of(self.model, self.hparams["frozen"] or ()).values():
            weight.requires_grad_(False)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        exempt: set[str] = getattr(self.model, "no_weight_decay", set())
        groups: list[dict[str, Any]] = [{"params": [p for name, p in trained.items() if name not in exempt]}]
        if exempt:
            groups.append({"params": [p for name, p in trained.items() if name in exempt], "weight_decay": 0.0})
        return torch.optim.AdamW(groups, lr=self.hparams["lr"], weight_decay=self.hparams["weight_decay"])

    def set_stage(self, first_step: int, steps: int) -> None:
        """Begin a stage of ``steps`` optimizer steps at ``first_step``: a schedule that falls, and a warm-up that is a
        share, begin anew."""
        self.stage = first_step, steps

    def rate_share(self, step: int) -> float:
        """Learning rate of an optimizer step, counted from the start of the run, as a share of the largest one."""
        h = self.hparams
        first_step, steps = self.stage or (0, self.trainer.estimated_stepping_batches)
        return relative_rate(step, first_step, steps, h["schedule"], h["warmup"], h["final_lr"])

    def set_rates(self) -> None:
        """Give the optimizer the rates of the step that comes next."""
        # Not a LambdaLR: Lightning steps one before the validation that ends a stage, and old checkpoints lack its
        # state. This rate depends on step and stage alone, so that it is exact after a stage change and a resume.
        if self.trainer.lr_scheduler_configs:
            return  # a scheduler of the user, of Tuner.lr_find or of StochasticWeightAveraging
        groups, share = self.trainer.optimizers[0].param_groups, self.rate_share(self.trainer.global_step)
        rates = self.largest_rates if self.largest_rates is not None else [self.hparams["lr"]] * len(groups)
        rates += [group["lr"] for group in groups[len(rates) :]]  # of a callback that unfreezes weights
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * share

    def on_fit_start(self) -> None:  # before a checkpoint brings the rates of its last step
        self.largest_rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]

    def on_train_start(self) -> None:
        self.set_rates()  # callbacks such as LearningRateMonitor look before the hook of the step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.set_rates()  # a stage may have begun

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.set_rates()
