"""A batch of samples: what every task returns and every model reads.

Shape suffixes: B batch, b samples of a batch that have begun, T tokens, n lines, L tokens of a line.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Segment = Tensor | tuple[Tensor, Tensor]
"""Token ids (b, T), or a pair of token ids and a mask that is True at real tokens."""


@dataclass
class Batch:
    """Inputs and targets of B samples.

    ids_BT: token ids. Tasks with ``ContinuousTokens`` have numbers instead, (B, T, input_dim).
    targets_BT: the target id at every scored position, -100 elsewhere. Position p is predicted from position p-1.
    segment_len: tokens per segment if the task fixes it; None: the whole sequence is one segment.
    read_only: the last ``read_only`` segments are read without writing the memory; if positive, they hold all targets.
    meta: properties of the samples, each of shape (B,) or (B, ...), such as the number of pairs.
    context: segments (b, T) that are read before ``ids_BT``. A tuple, or, for a context too long to hold, an iterable
        that generates its segments once. The samples with the longest context come first: b grows up to B.
    prompt_B: tokens of ``ids_BT`` that an evaluation gives to the model before it generates (``Prompted.score_text``).
        None: nothing is generated.
    continues: whether the samples continue those of the previous batch, with the memory that it left. False: they are
        the first of a stream. The last token of such a batch is only predicted; the next batch begins with it.
        None: the batch stands alone.
    share: weight of the batch's loss where it is a part of another one (``part``): its scored positions over the mean
        of all parts. The mean of the weighted losses is then the loss of the whole.
    auxiliary_lines: extra lines (B, n, L) outside the context, and a mask that is True at real tokens. Models that
        learn to write lines are trained on them as well. None: there are none.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    segment_len: int | None = None
    read_only: int = 0
    meta: dict[str, Tensor] = field(default_factory=dict)
    context: Iterable[Segment] = ()
    prompt_B: Tensor | None = None
    continues: bool | None = None
    auxiliary_lines: tuple[Tensor, Tensor] | None = None
    share: float = 1.0

    @property
    def scored_BT(self) -> Tensor:
        """Mask that is True at the scored positions."""
        return self.targets_BT != -100 if self.targets_BT.dim() == 2 else ~self.targets_BT[..., 0].isnan()

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copy of the batch on ``device``. A context that is generated is moved segment by segment."""
        return self.mapped(partial(Tensor.to, device=device, non_blocking=non_blocking))

    def mapped(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        """Copy of the batch with ``move`` of every tensor; of a context that is generated, when it is."""
        moved: dict[str, Any] = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        if self.auxiliary_lines is not None:
            ids_BNL, mask_BNL = self.auxiliary_lines
            moved["auxiliary_lines"] = move(ids_BNL), move(mask_BNL)
        context = (tuple(map(move, part)) if isinstance(part, tuple) else move(part) for part in self.context)
        return replace(
            self,
            **moved,
            meta={name: move(value) for name, value in self.meta.items()},
            context=tuple(context) if isinstance(self.context, tuple) else context,
        )

    def part(self, index: int, parts: int) -> "Batch":
        """Samples ``index`` of ``parts`` parts in order, of equal sizes or, of the first ones, by one larger."""
        if parts == 1:
            return self
        begin, end = part_bounds(len(self.ids_BT), index, parts)
        found = self.mapped(lambda tensor: tensor[begin:end])
        if isinstance(found.context, tuple):  # without the segments in which none of these samples has begun
            found.context = tuple(segment for segment in found.context if rows_of(segment))
        else:
            found.context = filter(rows_of, found.context)
        found.share = int(found.scored_BT.sum()) * parts / max(int(self.scored_BT.sum()), 1)
        return found

    def as_drawn(self, values_B: Tensor) -> Tensor:
        """Values of the samples in the order in which they were drawn: ``meta["drawn"]`` has their places where a
        layout has changed it."""
        return values_B[self.meta["drawn"].argsort()] if "drawn" in self.meta else values_B

    def level(self) -> "Batch":
        """The same batch with all samples in every segment of its ``context``, a tuple: those that begin later have no
        real token there."""
        size = len(self.ids_BT)
        if all(rows_of(segment) == size for segment in self.context):
            return self
        return replace(self, context=tuple(with_rows(segment, size) for segment in self.context))

    def written(self) -> list[Segment]:
        """Segments that the model writes: ``context`` (consumed if it is an iterator) and all but the read-only ones.

        The latter are cut from ``ids_BT``.
        """
        written_BT = self.ids_BT[:, : self.ids_BT.shape[1] - self._read_only_tokens]
        length = written_BT.shape[1]
        return [*self.context, *(written_BT.split(self.segment_len or length, dim=1) if length else ())]

    def recut(self, lengths: Sequence[int]) -> "Batch":
        """Copy of the batch whose written tokens become ``context``, in segments of other lengths.

        lengths: tokens per segment; the last length repeats, and 0 means all remaining tokens. (): the batch itself.
        The batch has to come from a task with ``FreeSegments``: one tensor that ends with the read-only segments.
        """
        if not lengths:
            return self
        left, cuts = self.ids_BT.shape[1] - self._read_only_tokens, []
        written_BT, query_BT = self.ids_BT.split([left, self._read_only_tokens], dim=1)
        while left:
            length = lengths[min(len(cuts), len(lengths) - 1)]
            cuts.append(min(length or left, left))
            left -= cuts[-1]
        targets_BT = self.targets_BT[:, -self._read_only_tokens :]
        return replace(self, ids_BT=query_BT, targets_BT=targets_BT, context=written_BT.split(cuts, dim=1))

    @property
    def _read_only_tokens(self) -> int:
        return self.read_only * (self.segment_len or 0)


def part_bounds(size: int, index: int, parts: int) -> tuple[int, int]:
    """Begin and end of a part of ``size`` samples: of equal parts or, of the first ones, by one larger."""
    each, more = divmod(size, parts)
    begin = index * each + min(index, more)
    return begin, begin + each + (index < more)


def rows_of(segment: Segment) -> int:
    """Samples of a segment."""
    return len(segment[0] if isinstance(segment, tuple) else segment)


def with_rows(segment: Segment, size: int) -> Segment:
    """A segment of ``size`` samples; the added ones have no real token."""
    ids, mask = segment if isinstance(segment, tuple) else (segment, torch.ones_like(segment, dtype=torch.bool))
    more = 0, 0, 0, size - len(ids)
    return F.pad(ids, more), F.pad(mask, more)


def exact_match(predicted_BT: Tensor, batch: Batch) -> Tensor:
    """Share of a sample's answers whose tokens are all right, (B,). Every read-only segment holds one answer."""
    answers = max(batch.read_only, 1)
    length = batch.ids_BT.shape[1] if not batch.read_only else batch.read_only * (batch.segment_len or 0)
    targets, predicted = (t[:, -length:].unflatten(1, (answers, -1)) for t in (batch.targets_BT, predicted_BT))
    return ((predicted == targets) | (targets == -100)).all(-1).float().mean(-1)
