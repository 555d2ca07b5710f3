"""What the devices that train one model tell each other. All of them have to ask for the same at the same time."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, distributed


def gathered(own: Any) -> list[Any]:
    """What every device of the run has, in their order; only for what is called on all of them."""
    if not distributed.is_initialized():
        return [own]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found


def stacked(own: Tensor) -> Tensor:
    """Tensors of one shape, (...), of every device: (devices, ...)."""
    if not distributed.is_initialized():
        return own.unsqueeze(0)
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, own)
    return torch.stack(found)


class EpochMeans:
    """Means over the batches of several devices, one of which may lack a metric that others have, or a whole batch.

    Lightning's own reduction would wait for it without an end.
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[Any, int]] = {}  # metric -> weighted sum and weights

    def add(self, name: str, value: Tensor, weight: int) -> None:
        """Add the mean over a batch of this device."""
        total, weights = self.sums.get(name, (0.0, 0))
        self.sums[name] = total + value.detach().double() * weight, weights + weight

    def compute(self) -> dict[str, Tensor]:
        """The means over all devices, and start anew."""
        parts = gathered({name: (float(total), weight) for name, (total, weight) in self.sums.items()})
        self.sums, found = {}, {}
        for name in dict.fromkeys(name for sums in parts for name in sums):
            totals, weights = zip(*(sums[name] for sums in parts if name in sums), strict=True)
            found[name] = torch.tensor(sum(totals) / sum(weights), dtype=torch.float64)
        return found


def mean_losses(losses: Mapping[str, Tensor | None], own: Tensor) -> dict[str, Tensor | None]:
    """The means over all devices of losses that some of them may not have, None. own: any loss of this device."""
    known = [own.detach() if loss is None else loss.detach() for loss in losses.values()]
    has = torch.tensor([loss is not None for loss in losses.values()]).to(own)
    sums = torch.stack([torch.stack(known) * has, has])
    distributed.all_reduce(sums)
    totals, counts = sums.unbind()
    return {name: total / count if count else None for name, total, count in zip(losses, totals, counts, strict=True)}


class OnDevices(L.LightningModule):
    """Logs means over all devices that train a model."""

    def __init__(self) -> None:
        super().__init__()
        self.means = EpochMeans()

    @property
    def devices(self) -> int:
        """Devices that train this model together."""
        return self._trainer.world_size if self._trainer else 1

    @property
    def synced(self) -> dict[str, Any]:
        """Options of ``log`` for what every device logs."""
        return {"sync_dist": self.devices > 1}

    def log_losses(self, losses: Mapping[str, Tensor | None], size: int) -> None:
        """Log ``train/<name>`` of a batch of ``size`` samples. None: it has no such loss; all devices name the same
        ones."""
        if self.devices > 1:
            losses = mean_losses(losses, next(loss for loss in losses.values() if loss is not None))
        for name, loss in losses.items():
            if loss is not None:
                self.log(f"train/{name}", loss, batch_size=size)

    def log_mean(self, name: str, value: Tensor, weight: int) -> None:
        """Log a mean over a batch of an evaluation, of ``weight`` in the mean over all batches."""
        if self.devices > 1:
            self.means.add(name, value, weight)
        else:
            self.log(name, value, batch_size=weight, add_dataloader_idx=False)

    def finish_means(self) -> None:
        """Log what ``log_mean`` could not log batch by batch, at the end of an evaluation."""
        if self.devices > 1:
            self.log_dict(self.means.compute(), batch_size=1, **self.synced)
