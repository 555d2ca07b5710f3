"""The scores of the single samples of a test, of which its metrics are the means.

Shape suffixes: B batch, T tokens, N values of a metric.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lit_memory.lit.devices import gathered
from lit_memory.util.metrics import Condition, MetricName


class Mean(NamedTuple):
    """A metric over a batch."""

    value: Tensor
    weight: int
    """In a mean over batches."""
    scores_B: Tensor | None = None
    """Of the samples, of which ``value`` is the mean; None for a metric that samples do not have one by one."""

    @classmethod
    def of_samples(cls, scores_B: Tensor) -> "Mean":
        """From a score of every sample."""
        return cls(scores_B.mean(), len(scores_B), scores_B)

    @classmethod
    def of_tokens(cls, values_N: Tensor, scored_BT: Tensor) -> "Mean":
        """From the values of tokens, sample by sample. Samples have scores where all have equally many tokens: their
        mean is that of the tokens then."""
        counts_B = scored_BT.sum(1)
        even = bool((counts_B == counts_B[0]).all()) and len(values_N) % len(counts_B) == 0
        scores_B = values_N.reshape(len(counts_B), -1).double().mean(1) if even else None
        return cls(values_N.mean(), len(values_N), scores_B)


Means = dict[str, Mean]
"""Metric -> its mean over a batch."""


class Part(NamedTuple):
    """Samples of a batch: all, or those of one device."""

    batch: int
    scores_B: Tensor
    drawn_B: Tensor | None
    """Their places in the batch as it was drawn; None: as they are."""


class TestScores(L.Callback):
    """Keeps what ``test_step`` returns: the scores of every sample, in the order in which the test draws them.

    A batch may have them in another one (``meta["drawn"]``), which depends on how long segments are, so that arms would
    be compared on different questions.
    """

    __test__ = False  # for pytest

    def __init__(self) -> None:
        self.parts: dict[tuple[str, Condition], list[Part]] = {}

    def on_test_batch_end(self, trainer: Any, pl_module, outputs: Any, batch, batch_idx, dataloader_idx=0):
        conditions = trainer.datamodule.test_conditions
        condition, (last, _) = conditions[dataloader_idx][0], conditions[-1]
        drawn_B = batch.meta["drawn"].cpu() if outputs and "drawn" in batch.meta else None
        for name, scores_B in (outputs or {}).items():
            metric = MetricName.parse(name)
            if metric.place is None or condition == last:  # a curve is that of the last condition
                x = condition if metric.place is None else metric.place
                places_B = None if drawn_B is None or len(drawn_B) != len(scores_B) else drawn_B
                self.parts.setdefault((metric.name, x), []).append(Part(batch_idx, scores_B.detach().cpu(), places_B))

    def on_test_end(self, trainer: Any, pl_module):
        devices = gathered(self.parts)  # each with its samples of every batch, in the order of the batch
        cells = dict.fromkeys(cell for parts in devices for cell in parts)
        joined = {cell: [part for parts in devices for part in parts.get(cell, [])] for cell in cells}
        self.parts = {cell: sorted(parts, key=lambda part: part.batch) for cell, parts in joined.items()}

    @property
    def scores(self) -> dict[tuple[str, Condition], Any]:
        """(metric, x) -> an array with one number for every sample that has the metric."""
        return {cell: torch.cat(list(as_drawn(parts))).double().numpy() for cell, parts in self.parts.items()}


def as_drawn(parts: Iterable[Part]) -> Iterator[Tensor]:
    """The scores of every batch. parts: by batch, and by device."""
    for _, group in itertools.groupby(parts, key=lambda part: part.batch):
        _, scores, places = zip(*group, strict=True)
        scores_B = torch.cat(scores)
        yield scores_B if any(place is None for place in places) else scores_B[torch.cat(places).argsort()]
