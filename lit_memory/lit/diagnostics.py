"""What a validation measures inside a memory, besides the task's metrics.

``diagnostics_of`` chooses by what a model offers; ``update`` gets every batch of a validation, ``compute`` gives the
names and values.

Shape suffixes: B batch, T tokens, M memory tokens, D width.
"""

from typing import Any, Protocol

from torch import Tensor

from lit_memory.tasks.batch import Batch, Segment

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
        unwritten = batch.read_only * (batch.segment_len or 0) if batch.continues is None else 1
        length = batch.ids_BT.shape[1] - unwritten
        if length and len(self.memories) < MAX_MEMORIES and (batch_idx == 0 or batch.continues):
            ids_BT = batch.ids_BT[:MAX_SAMPLES, :length]
            memories, self.state = self.model.trace(ids_BT, batch.segment_len, self.state)
            self.memories += memories[1:] if self.memories else memories  # the first is where the batch before ended

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


def first_samples(segment: Segment, samples: int) -> Segment:
    if isinstance(segment, tuple):
        ids_BT, mask_BT = segment
        return ids_BT[:samples], mask_BT[:samples]
    return segment[:samples]
