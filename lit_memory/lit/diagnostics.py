"""What a validation measures inside a memory, besides the task's metrics.

``diagnostics_of`` chooses by what a model offers; ``update`` gets every batch of a validation, ``compute`` gives the
names and values.

Shape suffixes: B batch, T tokens, M memory tokens, D width.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from lit_memory.tasks.batch import Batch, Segment, rows_of

MAX_SAMPLES = 16
"""Samples of a batch that are diagnosed."""
MAX_MEMORIES = 64
"""Memories of a stream after which no further batch is diagnosed."""


class Diagnostics(Protocol):
    def update(self, batch: Batch, batch_idx: int) -> None: ...

    def compute(self) -> dict[str, Tensor]: ...


def diagnostics_of(model: Any) -> Diagnostics | None:
    """Diagnostics of one validation of a model; None for a model that has none."""
    if not hasattr(model, "diagnostics"):
        return None
    if not hasattr(model, "trace"):
        return FirstContext(model)
    grows = getattr(model, "state_growth", 0)  # then the tokens are only the newest part of the memory
    return None if grows else MemoryTokens(model)


class MemoryTokens:
    """Diagnostics of memory tokens (B, M, D) over the segments of the first batch, or of the first batches of a
    stream."""

    def __init__(self, model: Any) -> None:
        self.model, self.state = model, None
        self.memories: list[Tensor] = []

    def update(self, batch: Batch, batch_idx: int) -> None:
        if len(self.memories) >= MAX_MEMORIES or (batch_idx and not batch.continues):
            return
        segments = self.read(batch)
        longest = min([MAX_SAMPLES, *(rows_of(segment) for segment in segments[:1])])  # others begin later
        followed = (first_samples(segment, longest) for segment in segments)
        if whole := list(itertools.takewhile(of_all_samples, followed)):
            memories, self.state = self.model.trace(whole, self.state)
            self.memories += memories[1:] if self.memories else memories  # the first is where the batch before ended

    def read(self, batch: Batch) -> Sequence[Segment]:
        """What the memory follows: all of a stream but its last token, else what the samples write."""
        if batch.continues is None:
            return batch.written()
        ids_BT = batch.ids_BT[:, :-1]
        return ids_BT.split(batch.segment_len or ids_BT.shape[1], dim=1) if ids_BT.shape[1] else ()

    def compute(self) -> dict[str, Tensor]:
        enough = len(self.memories) > 2 and self.memories[0].numel()
        return self.model.diagnostics(self.memories) if enough else {}


class FirstContext:
    """Diagnostics of a memory on what the samples of the first batch write."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.values: dict[str, Tensor] = {}

    def update(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 0:
            self.values = self.model.diagnostics(written_segments(batch, MAX_SAMPLES))

    def compute(self) -> dict[str, Tensor]:
        return self.values


def written_segments(batch: Batch, samples: int) -> tuple[Segment, ...]:
    """The segments that the first ``samples`` samples of a batch write; if they write none, the first one that they
    read."""
    segments = batch.written() or [batch.ids_BT[:, : batch.segment_len]]
    return tuple(first_samples(segment, samples) for segment in segments)


def of_all_samples(segment: Segment) -> bool:
    """Whether every sample has a token there: the memory of one that has ended stands still."""
    return not isinstance(segment, tuple) or bool(segment[1].any(1).all())


def first_samples(segment: Segment, samples: int) -> Segment:
    if isinstance(segment, tuple):
        ids_BT, mask_BT = segment
        return ids_BT[:samples], mask_BT[:samples]
    return segment[:samples]
