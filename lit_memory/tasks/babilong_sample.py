"""A sample of BABILong before it is read: its context may be too long to hold.

Shape suffixes: b samples that have begun, S tokens of a segment, F facts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lit_memory.tasks.base import Segment
from lit_memory.text.haystack import Haystack


class Sample(NamedTuple):
    """One sample whose context is not there yet: what it takes to read any part of it."""

    noise: Haystack | None
    """None where there are facts alone."""
    position: int
    """Where its noise begins in the haystack."""
    facts: list[np.ndarray]
    starts_F: np.ndarray
    """Offsets of the facts in the context."""
    segments: int
    context: int
    """Tokens of the context."""
    question: np.ndarray
    """With GEN."""
    answer: np.ndarray
    """With EOS."""

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens ``start .. start + count`` of the context."""
        out, at, end = np.empty(count, np.int64), start, start + count
        ends_F = self.starts_F + [len(fact) for fact in self.facts]
        i = int(np.searchsorted(ends_F, start, side="right"))
        before = sum(len(fact) for fact in self.facts[:i])
        while at < end:
            upcoming = int(self.starts_F[i]) if i < len(self.facts) else end
            if at < upcoming and self.noise:
                stop = min(upcoming, end)
                out[at - start : stop - start] = self.noise.tokens(self.position + at - before, stop - at)
            else:
                stop = min(int(ends_F[i]), end)
                out[at - start : stop - start] = self.facts[i][at - upcoming : stop - upcoming]
                before, i = before + len(self.facts[i]), i + 1
            at = stop
        return out

    def segment(self, k: int, segment_len: int, margin: int) -> np.ndarray:
        """The part of the context that segment ``k`` has, counted back from the end: the last one leaves ``margin`` free, and the first may be short."""
        first = self.context - (segment_len - margin) - (self.segments - 1 - k) * segment_len
        start, stop = max(first, 0), min(first + segment_len, self.context)
        return self.read(start, stop - start)


def padded(rows: Sequence[np.ndarray], segment_len: int, pad_id: int) -> Segment:
    """Rows of tokens as one full segment (b, S), with a mask of the real tokens where some are short.

    A short one is never read as it is: what a model appends to a segment, memory tokens for example, lies where it lay in training, and no
    sample depends on the others of its batch.
    """
    lengths = np.array([len(row) for row in rows])
    if (lengths == segment_len).all():
        return torch.from_numpy(np.stack(rows))
    mask_bS = np.arange(segment_len) < lengths[:, None]
    ids_bS = np.full(mask_bS.shape, pad_id, np.int64)
    ids_bS[mask_bS] = np.concatenate(rows)
    return torch.from_numpy(ids_bS), torch.from_numpy(mask_bS)
