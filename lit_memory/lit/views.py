"""What a trained memory does while it reads the test: the numbers behind the views of ``registry.VIEWS``.

Every view gives named arrays, which depend on the weights, the data and nothing else. Nothing is trained, and no random
number is drawn.

Shape suffixes: B samples, M keys, K features of a key, X their sum and number, P places along the context, L layers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.lit.data import LitData
from lit_memory.lit.modules import LitMemory
from lit_memory.recurrence import Look, looks
from lit_memory.registry import VIEWS
from lit_memory.tasks.batch import Batch, Segment
from lit_memory.util.names import load

SAMPLES = 8
"""Samples of the test that are looked at."""
PLACES = 200
"""Most places along a context at which a view has values."""


@torch.no_grad()
def measure(
    module: LitMemory, data: LitData, views: Sequence[str], samples: int = SAMPLES
) -> dict[tuple[str, str], Tensor]:
    """(view, name) -> numbers of a model in its evaluation mode, on the first samples of the longest test.

    What lies along the context is (P, L), a mean over the samples that have begun; ``segment`` (P,) counts the segments
    read. Of a layer that has nothing to show yet it is NaN.
    """
    training = module.training
    module.eval()
    try:
        along = {name: load(VIEWS[name].measured)() for name in views}
        for look in looks(module.model, segments(data.test_samples(samples))):
            for view in along.values():
                view.update(look)
    finally:
        module.train(training)
    return {(name, part): found for name, view in along.items() for part, found in view.arrays().items()}


def segments(batch: Batch) -> Iterable[Segment]:
    """The segments that a batch has a model write, one after another; a context is not held."""
    return chain(batch.context, replace(batch, context=()).written())


class Along:
    """A view along the context: ``measured`` gives the means of one segment, name -> (L,)."""

    def __init__(self) -> None:
        self.means: list[dict[str, Tensor]] = []

    def measured(self, look: Look) -> dict[str, Tensor]:
        raise NotImplementedError

    def update(self, look: Look) -> None:
        self.means.append(self.measured(look))

    def arrays(self) -> dict[str, Tensor]:
        """Of at most ``PLACES`` segments, which lie the closer the earlier they are, with the first and the last."""
        last = len(self.means)
        places_P = torch.arange(1, last + 1)
        if last > PLACES:
            places_P = torch.logspace(0, 1, PLACES, base=last, dtype=torch.float64).round().long().unique()
        names = self.means[-1] if self.means else ()
        rows = {name: torch.stack([self.means[i - 1][name] for i in places_P.tolist()]) for name in names}
        return {"segment": places_P.float()} | {name: found_PL.float() for name, found_PL in rows.items()}


def mean_of_layers(tensors: Iterable[Tensor], reduced: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over samples, (L,), of ``reduced``, which gives a number per sample; NaN does not count."""
    return torch.stack([reduced(tensor).nanmean() for tensor in tensors]).cpu()


class Norm(Along):
    """Norm of every part of the memory."""

    def measured(self, look: Look) -> dict[str, Tensor]:
        return {name: mean_of_layers(of_layers, norm) for name, of_layers in look.parts.items()}


def norm(x: Tensor) -> Tensor:
    """Norm of each sample, (B,)."""
    return x.flatten(1).norm(dim=1)


class Overlap(Along):
    """Mean cosine of the features of a segment's keys with those of all segments before it."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[Tensor] = []  # per layer, of all unit keys so far, and behind it how many they are

    def measured(self, look: Look) -> dict[str, Tensor]:
        sums, cosines = [], []
        for layer, keys_BMK in enumerate(look.keys):
            unit_BMK, sum_BX = F.normalize(keys_BMK, dim=-1), keys_BMK.new_zeros(0, keys_BMK.shape[2] + 1)
            sum_BX = self.sums[layer] if self.sums else sum_BX
            sum_BX = F.pad(sum_BX, (0, 0, 0, len(unit_BMK) - len(sum_BX)))  # samples that begin now
            cosines.append((unit_BMK @ sum_BX[:, :-1, None]).mean((1, 2)) / sum_BX[:, -1])
            counted_BMX = F.pad(unit_BMK, (0, 1), value=1.0)
            sums.append(sum_BX + counted_BMX.where(unit_BMK.isfinite().all(2, keepdim=True), 0).sum(1))
        self.sums = sums
        return {"overlap": mean_of_layers(cosines, lambda cosine_B: cosine_B)}
