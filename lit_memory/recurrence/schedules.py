"""The orders in which the cells (segment, layer) of writing segments are computed. All give the same values.

"sequential" is the definition and serves every model; ``diagonal`` and ``layer_major`` say what they need. "auto" reads
segments in groups where the model can, layer-major or in the order of the definition, else one by one.

Shape suffixes: B batch, S segments, T tokens, D width.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_memory.recurrence.diagonal import diagonal
from lit_memory.recurrence.layer_major import LayerMajor
from lit_memory.recurrence.protocol import (
    Grouped,
    GrowingState,
    LayerRecurrent,
    SegmentRecurrent,
    SeparateWrite,
)
from lit_memory.recurrence.state import State, append_samples, batch_size, detach, select_state
from lit_memory.util.checks import FieldError

SCHEDULES = ("auto", "sequential", "diagonal", "layer")
GROUP_ROWS = 1 << 15
"""Tokens of all samples that are read in one go: bounds the memory of a long evaluation, and keeps rows in caches."""


class Segment(NamedTuple):
    """Token ids of one segment, and a mask that is True at real tokens; None if all are real."""

    ids_BT: Tensor
    mask_BT: Tensor | None = None


def check_schedule(schedule: str) -> None:
    """Raise FieldError for a schedule that does not exist."""
    if schedule not in SCHEDULES:
        raise FieldError("schedule", schedule, "expected 'auto', 'sequential', 'diagonal' or 'layer'")


def scheduled(
    model: SegmentRecurrent, schedule: str, segments: tuple[Segment, ...]
) -> Callable[..., tuple[deque[Tensor], State]]:
    """``sequential``, or what does the same to the segments by another schedule.

    Raises ValueError where the model does not allow it.
    """
    longest = max([0, *(segment.ids_BT.shape[1] for segment in segments)])
    if schedule == "auto":
        return by_groups if isinstance(model, Grouped) and not model.refuses_groups(longest) else sequential
    if schedule == "layer":
        refusal = model.refuses_groups(longest) if isinstance(model, LayerMajor) else "its layers do not read ahead"
        if refusal:
            name = type(model).__name__
            raise ValueError(f"{name} allows no schedule='layer': {refusal}; use 'sequential' or 'auto'")
    return {"sequential": sequential, "diagonal": by_diagonals, "layer": by_groups}[schedule]


def sequential(
    model: SegmentRecurrent,
    segments: Iterable[Segment],
    state: State | None,
    keep: int | None = None,
    bptt: int | None = None,
) -> tuple[deque[Tensor], State]:
    """Hidden states of the last ``keep`` segments, each of which writes, and the state after the last one.

    ``bptt`` needs a tuple of segments.
    """
    total = len(segments) if isinstance(segments, tuple) else None
    skipped = unread_segments(total, keep)
    hidden: deque[Tensor] = deque(maxlen=keep)
    for i, (ids_BT, mask_BT) in enumerate(segments):
        if state is None:
            state = model.init_state(ids_BT.shape[0], ids_BT.device)
        if total is not None and bptt is not None and 0 < i <= total - bptt:  # i = 0: a learned first memory is trained
            state = detach(state)
        state = with_new_samples(model, state, ids_BT)
        if i < skipped:
            state = advance(model, state, ids_BT, mask_BT)
        else:
            hidden_BTD, new = model.step(state, ids_BT, mask_BT)
            hidden.append(hidden_BTD)
            state = without_ended(model, new, state, mask_BT)
    return hidden, state


def unread_segments(total: int | None, keep: int | None) -> float:
    """How many first segments need no hidden states. Any segment of an iterator (``total`` None) may be the last."""
    if keep == 0:
        return math.inf
    return 0 if total is None or keep is None else total - keep


def by_diagonals(
    model: SegmentRecurrent, segments: tuple[Segment, ...], state: State, keep: int | None, bptt: int | None
) -> tuple[deque[Tensor], State]:
    """``sequential`` by the diagonal schedule, up to the first segment of another length (a short last one).

    Raises ValueError for a model whose layers are not recurrent, for masks and for ``bptt``.
    """
    if not isinstance(model, LayerRecurrent):
        raise ValueError(
            f"{type(model).__name__} passes memory from the top layer to the bottom one, "
            "so schedule='diagonal' is impossible; use 'sequential'"
        )
    if refusal := model.refuses_diagonal():
        raise ValueError(f"{type(model).__name__} allows no schedule='diagonal': {refusal}; use 'sequential'")
    if bptt is not None or any(segment.mask_BT is not None for segment in segments):
        raise ValueError("schedule='diagonal' allows neither mask_BT nor bptt")
    shapes = [segment.ids_BT.shape for segment in segments]
    even = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), len(segments))
    hidden, state = diagonal(model, [segment.ids_BT for segment in segments[:even]], state)
    rest, state = sequential(model, segments[even:], state, keep)
    return deque([*hidden, *rest], maxlen=keep), state


def by_groups(
    model: Grouped, segments: tuple[Segment, ...], state: State, keep: int | None, bptt: int | None
) -> tuple[deque[Tensor], State]:
    """``sequential`` by ``read_group``, in groups of segments of one shape."""
    hidden: deque[Tensor] = deque(maxlen=keep)
    cuts, skipped = cuts_of(len(segments), bptt), unread_segments(len(segments), keep)
    begin = 0
    while begin < len(segments):
        first, end = segments[begin].ids_BT, begin + 1
        while end < min(len(segments), begin + group_size(first)) and segments[end].ids_BT.shape == first.shape:
            end += 1
        ids_SBT = torch.stack([segment.ids_BT for segment in segments[begin:end]])
        masks = [segment.mask_BT for segment in segments[begin:end] if segment.mask_BT is not None]
        mask_SBT = torch.stack(masks) if masks else None
        inner = frozenset(cut - begin for cut in cuts if begin <= cut < end)
        wanted = int(max(0, min(end - begin, end - skipped)))
        state = with_new_samples(model, detach(state) if begin in cuts else state, first)
        out, state = model.read_group(ids_SBT, state, mask_SBT, inner, wanted)
        hidden += out
        begin = end
    return hidden, state


def advance(model: SegmentRecurrent, state: State, ids_BT: Tensor, mask_BT: Tensor | None = None) -> State:
    """The state after one segment whose hidden states nobody needs. Samples without a real token keep theirs."""
    if isinstance(model, SeparateWrite):
        new = model.advance(state, ids_BT, mask_BT)
    else:
        new = model.step(state, ids_BT, mask_BT)[1]
    return without_ended(model, new, state, mask_BT)


def without_ended(model: SegmentRecurrent, new: State, old: State, mask_BT: Tensor | None) -> State:
    """State ``new``, but ``old`` for the samples that have ended: they must not write their padding."""
    return new if mask_BT is None else select_samples(model, mask_BT.any(1), new, old)


def select_samples(model: SegmentRecurrent, live_B: Tensor, new: State, old: State) -> State:
    """State ``new`` of the samples that are live, state ``old`` before it of the others."""
    if isinstance(model, GrowingState):
        return model.select_state(live_B, new, old)
    return select_state(live_B, new, old)


def with_new_samples(model: SegmentRecurrent, state: State, ids_BT: Tensor) -> State:
    """The state of all samples of a segment. Those that ``state`` does not have begin there, behind the others."""
    count = ids_BT.shape[0] - batch_size(state)
    if count <= 0:
        return state
    fresh = model.init_state(count, ids_BT.device)
    return model.append_samples(state, fresh) if isinstance(model, GrowingState) else append_samples(state, fresh)


def group_size(ids_BT: Tensor) -> int:
    """Segments of the shape of ``ids_BT`` that are read in one go."""
    return max(1, GROUP_ROWS // max(1, ids_BT.shape[0] * ids_BT.shape[1]))


def cuts_of(total: int, bptt: int | None) -> frozenset[int]:
    """Segments before which gradients stop, of ``total``. The first one is none: a learned first memory is trained."""
    return frozenset() if bptt is None else frozenset(range(1, total - bptt + 1))
