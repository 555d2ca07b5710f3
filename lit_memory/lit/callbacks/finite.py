"""Stops a run before a non-finite number reaches its weights.

Shape suffix: R devices.
"""

from typing import Any

import lightning as L
import torch

from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.lit.devices import stacked


class NonFinite(FloatingPointError):
    """A loss or a gradient is NaN or infinite; the weights have not been touched."""


class FiniteGuard(L.Callback):
    """Stops a run before a non-finite loss or gradient reaches the weights."""

    def __init__(self, arm: str) -> None:
        self.arm = arm

    def on_before_backward(self, trainer, pl_module: Any, loss):
        losses_R = stacked(loss.detach())  # of all devices, which end together
        if not torch.isfinite(losses_R).all():
            rank = int(torch.isfinite(losses_R).int().argmin())
            what = f"loss{f' on rank {rank}' * (len(losses_R) > 1)} is {losses_R[rank].item()}"
            floor = " or raise model.denom_floor" * hasattr(pl_module.model.config, "denom_floor")
            raise NonFinite(f"{what} at {self.where(trainer)}; lower train.lr{floor}")

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
