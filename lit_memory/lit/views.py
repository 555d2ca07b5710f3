"""What a trained memory does while it reads the test: the numbers behind the views of ``util.views.VIEWS``.

Every view gives named arrays, which depend on the weights, the data and nothing else. Nothing is trained, and no random
number is drawn.

Shape suffixes: B samples, M keys, K features of a key, X their sum and number, D channels of a value, P places
along the context, L layers, N lines, H hops.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.lit.data import LitData
from lit_memory.lit.modules import LitMemory
from lit_memory.recurrence import Look, looks
from lit_memory.tasks.batch import Batch, Segment
from lit_memory.util.names import load
from lit_memory.util.views import VIEWED, VIEWS

PLACES = 200
"""Most places along a context at which a view has values."""


@torch.no_grad()
def measure(module: LitMemory | None, data: LitData, views: Iterable[str]) -> dict[tuple[str, str], Tensor]:
    """(view, name) -> numbers, of ``VIEWED`` samples of the longest test, or of all in a view that needs no weights.

    module: with trained weights, which is read in its evaluation mode; None for views without weights.
    What lies along the context is (P, L), a mean over the samples that have begun; ``segment`` (P,) counts the segments
    read. What a layer cannot show yet is NaN.
    """
    found = {name: load(VIEWS[name].measured)() for name in views}
    along = [view for view in found.values() if isinstance(view, Along)]
    with evaluating(module):
        if along and module is not None:
            for look in looks(module.model, segments(data.test_samples(VIEWED))):
                for view in along:
                    view.update(look)
        for view in found.values():
            if not isinstance(view, Along):
                view.read(module, data)
    return {(name, part): of for name, view in found.items() for part, of in view.arrays().items()}


@contextlib.contextmanager
def evaluating(module: LitMemory | None) -> Iterator[None]:
    """A module in its evaluation mode; afterwards in the mode that it had."""
    training = module if module is not None and module.training else None
    try:
        if training is not None:
            training.eval()
        yield
    finally:
        if training is not None:
            training.train()


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
        if not last:
            return {}
        places_P = torch.arange(1, last + 1)
        if last > PLACES:
            places_P = torch.logspace(0, 1, PLACES, base=last, dtype=torch.float64).round().long().unique()
        rows = {
            name: torch.stack([self.means[i - 1][name] for i in places_P.tolist()]).float() for name in self.means[0]
        }
        return {"segment": places_P.float()} | rows


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


class Gates(Along):
    """Mean of every gate of what is written."""

    def measured(self, look: Look) -> dict[str, Tensor]:
        return {name: mean_of_layers(of_layers, lambda gate: gate.nanmean(1)) for name, of_layers in look.gates.items()}


class Map(Along):
    """The associative matrix of the last layer, (K, D), after the context of the first sample."""

    def update(self, look: Look) -> None:
        self.last_KD = look.parts["A"][-1][0]

    def arrays(self) -> dict[str, Tensor]:
        return {"A": self.last_KD.float().cpu()} if hasattr(self, "last_KD") else {}


class Hops:
    """Lines that the hops retrieve, and those that support the answer, (B, H), counted from the first, 1; 0: none. And
    ``lines`` (B,), the number of lines."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def read(self, module: Any, data: LitData) -> None:
        batch = data.test_samples(VIEWED)
        readouts = module.read_context(batch).readouts
        if readouts is None:  # a model without memory
            return
        lines_B = readouts.age_BN.amax(1)
        ages = {"retrieved": readouts.nearest_BH, "support": batch.meta.get("support")}
        numbered = {name: (lines_B[:, None] - of + 1) * (of > 0) for name, of in ages.items() if of is not None}
        self.found = {name: of.float().cpu() for name, of in (numbered | {"lines": lines_B}).items()}

    def arrays(self) -> dict[str, Tensor]:
        return self.found


class Depth:
    """``depth``: percent of the context before the fact, of every sample of the longest test; ``x``: that test."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def read(self, module: Any, data: LitData) -> None:
        x, steps = data.longest_test()
        batches = [steps[i] for i in range(len(steps))]
        depths = [batch.as_drawn(batch.meta["depth"]) for batch in batches if "depth" in batch.meta]
        if depths:
            self.found = {"depth": torch.cat(depths).float(), "x": torch.tensor([float(x)])}

    def arrays(self) -> dict[str, Tensor]:
        return self.found
