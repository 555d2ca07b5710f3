"""An open segment, read piece by piece by any model.

Shape suffixes: B batch, T tokens, S tokens kept, D width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_memory.recurrence.protocol import Divisible, GrowingState, Incremental, SegmentRecurrent
from lit_memory.recurrence.segment import advance, without_ended
from lit_memory.recurrence.state import State, batch_size, select_state, state_tensors


class Tail(NamedTuple):
    """What ``Rereading`` keeps: the tokens that it reads again, how many of them are real, and the memory that they
    read, () if that is the one before the segment."""

    ids_BS: Tensor
    count_B: Tensor
    state: State


class Rereading:
    """``Incremental`` of any model: every piece is read with all tokens of the segment before it.

    Of a ``Divisible`` model only those since the last multiple of its ``grain`` are read again.
    """

    def __init__(self, model: SegmentRecurrent) -> None:
        self.model = model
        self.grain = model.grain if isinstance(model, Divisible) else 0

    def begin(self, state: State, opened: Tail | None = None, live_B: Tensor | None = None) -> Tail:
        if opened is None or live_B is None:
            device, batch = next(state_tensors(state)).device, batch_size(state)
            count_B = torch.zeros(batch, dtype=torch.long, device=device)
            return Tail(count_B.new_zeros(batch, 0), count_B, self.inner(state))
        inner = self.inner(state)
        inner = inner if is_empty(inner) else select_state(live_B, inner, opened.state)
        return Tail(opened.ids_BS, opened.count_B.masked_fill(live_B, 0), inner)

    def inner(self, state: State) -> State:
        """``Tail.state`` of segments that begin; () for the memory before them."""
        if self.grain:
            return state
        found = self.model.read_once(state) if isinstance(self.model, GrowingState) else None
        return () if found is None else found

    def extend(
        self, state: State, opened: Tail, ids_BT: Tensor, lengths_B: Tensor | None = None
    ) -> tuple[Tensor, Tail]:
        tokens = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        lengths_B = torch.full_like(opened.count_B, len(tokens)) if lengths_B is None else lengths_B
        places_BT = opened.count_B[:, None] + tokens
        kept_BS = ids_BT.new_zeros(len(ids_BT), int(places_BT.max()) + 1)
        kept_BS[:, : opened.ids_BS.shape[1]] = opened.ids_BS[:, : kept_BS.shape[1]]
        tail = Tail(kept_BS.scatter(1, places_BT, ids_BT), opened.count_B + lengths_B, opened.state)
        hidden_BSD, tail = self.read_tail(tail) if self.grain else (self.read_all(state, tail), tail)
        return hidden_BSD.take_along_dim(places_BT.clamp(max=hidden_BSD.shape[1] - 1)[:, :, None], dim=1), tail

    def read_all(self, state: State, tail: Tail) -> Tensor:
        """Hidden states (B, S, D) of all tokens of the segment."""
        longest = int(tail.count_B.max())
        mask = prefix_mask(tail.count_B, longest)
        state = state if is_empty(tail.state) else tail.state
        return self.model.step(state, tail.ids_BS[:, :longest], mask, write=False)[0]

    def read_tail(self, tail: Tail) -> tuple[Tensor, Tail]:
        """Hidden states (B, S, D) of the tokens of a tail, and the tail behind the last cut."""
        ids_BS, count_B, state = tail
        cut_B = count_B // self.grain * self.grain
        first, rest_B = int(cut_B.max()), count_B - cut_B
        parts = []
        if first:
            mask = prefix_mask(cut_B, first)
            hidden_BSD, new = self.model.step(state, ids_BS[:, :first], mask)
            state = without_ended(self.model, new, state, mask)
            parts.append(hidden_BSD)
        rest_BS = cut_B[:, None] + torch.arange(int(rest_B.max()), device=ids_BS.device)
        tail = Tail(ids_BS.take_along_dim(rest_BS.clamp(max=ids_BS.shape[1] - 1), dim=1), rest_B, state)
        if rest_BS.shape[1]:
            mask = prefix_mask(rest_B, rest_BS.shape[1])
            parts.append(self.model.step(state, tail.ids_BS, mask, write=False)[0])
        return joined(torch.cat(parts, dim=1), cut_B, first, int(count_B.max())), tail

    def close(self, state: State, opened: Tail, live_B: Tensor) -> State:
        """Samples without a token behind the last cut have the state of that."""
        old = opened.state if self.grain else state
        count_B = opened.count_B.masked_fill(~live_B, 0)
        if longest := int(count_B.max()):
            mask = prefix_mask(count_B, longest)
            old = advance(self.model, old, opened.ids_BS[:, :longest], mask)
        return select_state(live_B, old, state) if self.grain else old


def is_empty(state: State) -> bool:
    """Whether a state has no tensor."""
    return next(state_tensors(state), None) is None


Reader = Incremental | Rereading


def reader(model: SegmentRecurrent) -> Reader:
    """What reads an open segment of the model piece by piece."""
    return model if isinstance(model, Incremental) and not model.refuses_incremental() else Rereading(model)


def joined(hidden_BSD: Tensor, cut_B: Tensor, first: int, total: int) -> Tensor:
    """Hidden states (B, T, D) of ``total`` tokens in order, from those before a cut and those behind it.

    cut_B: where the sample is cut. first: columns for tokens before the cut; those behind it follow.
    """
    places_BT = torch.arange(total, device=cut_B.device).expand(len(cut_B), -1)
    places_BT = torch.where(places_BT < cut_B[:, None], places_BT, first + places_BT - cut_B[:, None])
    return hidden_BSD.take_along_dim(places_BT.clamp(max=hidden_BSD.shape[1] - 1)[:, :, None], dim=1)


def prefix_mask(lengths_B: Tensor, total: int) -> Tensor | None:
    """True at the first ``lengths_B`` of ``total`` tokens, (B, T); None if that is all of them."""
    if bool((lengths_B == total).all()):
        return None
    return torch.arange(total, device=lengths_B.device) < lengths_B[:, None]
