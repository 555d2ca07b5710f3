"""What the devices that train one model tell each other. All of them have to ask for the same at the same time."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed


def gathered(own: Any) -> list[Any]:
    """What every device of the run has, in their order; only for what is called on all of them."""
    if not distributed.is_initialized():
        return [own]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found


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
