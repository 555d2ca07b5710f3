"""The orders in which the cells (segment, layer) of writing segments are computed. All give the same values.

"sequential" is the definition and serves every model; ``diagonal`` and ``layer_major`` say what they need. "auto" reads
segments in groups where the model can, layer-major or in the order of the definition, else one by one; without
gradients on a GPU one by one, by ``replay``. Of an iterator "auto" reads a group ahead.

Shape suffixes: B batch, S segments, T tokens, D width.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from lit_memory.recurrence.diagonal import diagonal
from lit_memory.recurrence.layer_major import LayerMajor
from lit_memory.recurrence.protocol import Grouped, LayerRecurrent, SegmentRecurrent
from lit_memory.recurrence.replay import WORTH, Replay, replays
from lit_memory.recurrence.segment import Segment, read_segment, with_new_samples
from lit_memory.recurrence.state import State, detach
from lit_memory.util.checks import FieldError

SCHEDULES = ("auto", "sequential", "diagonal", "layer")
GROUP_ROWS = 1 << 15
"""Tokens of all samples that are read in one go: bounds the memory of a long evaluation, and keeps rows in caches."""


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
        if len(segments) >= WORTH and replays(model):
            return replayed(model)
        return by_groups if isinstance(model, Grouped) and not model.refuses_groups(longest) else sequential
    if schedule == "layer":
        refusal = model.refuses_groups(longest) if isinstance(model, LayerMajor) else "its layers do not read ahead"
        if refusal:
            name = type(model).__name__
            raise ValueError(f"{name} allows no schedule='layer': {refusal}; use 'sequential' or 'auto'")
    return {"sequential": sequential, "diagonal": by_diagonals, "layer": by_groups}[schedule]


def streamed(model: SegmentRecurrent, schedule: str) -> Callable[..., tuple[deque[Tensor], State]]:
    """How an iterator of segments is read, whose length is unknown."""
    if schedule == "auto" and replays(model):
        return replayed(model)
    return ahead if schedule == "auto" and isinstance(model, Grouped) else sequential


def ahead(
    model: SegmentRecurrent, segments: Iterable[Segment], state: State | None, keep: int | None
) -> tuple[deque[Tensor], State]:
    """``sequential`` of an iterator, of which the segments of a group are read before they are computed."""
    hidden: deque[Tensor] = deque(maxlen=keep)
    for group in alike(segments):
        if state is None:
            state = model.init_state(group[0].ids_BT.shape[0], group[0].ids_BT.device)
        out, state = scheduled(model, "auto", group)(model, group, state, keep, None)
        hidden += out
    return hidden, state


def alike(segments: Iterable[Segment]) -> Iterator[tuple[Segment, ...]]:
    """Segments in a row of one shape, all with or all without a mask, as many as are read in one go."""
    group: list[Segment] = []
    for segment in segments:
        if group and (kind(segment) != kind(group[0]) or len(group) == group_size(segment.ids_BT)):
            yield tuple(group)
            group = []
        group.append(segment)
    if group:
        yield tuple(group)


def kind(segment: Segment) -> tuple[torch.Size, bool]:
    """Shape, and whether there is a mask."""
    return segment.ids_BT.shape, segment.mask_BT is None


def sequential(
    model: SegmentRecurrent,
    segments: Iterable[Segment],
    state: State | None,
    keep: int | None = None,
    bptt: int | None = None,
    read: Callable[[State, Segment, bool], tuple[Tensor | None, State]] | None = None,
) -> tuple[deque[Tensor], State]:
    """Hidden states of the last ``keep`` segments, each of which writes, and the state after the last one.

    ``bptt`` needs a tuple of segments. read: how one is read; default ``read_segment``.
    """
    total = len(segments) if isinstance(segments, tuple) else None
    skipped = unread_segments(total, keep)
    hidden: deque[Tensor] = deque(maxlen=keep)
    read = read or partial(read_segment, model)
    for i, segment in enumerate(segments):
        if state is None:
            state = model.init_state(segment.ids_BT.shape[0], segment.ids_BT.device)
        if total is not None and bptt is not None and 0 < i <= total - bptt:  # i = 0: a learned first memory is trained
            state = detach(state)
        hidden_BTD, state = read(with_new_samples(model, state, segment.ids_BT), segment, i >= skipped)
        if hidden_BTD is not None:
            hidden.append(hidden_BTD)
    return hidden, state


def replayed(model: SegmentRecurrent) -> Callable[..., tuple[deque[Tensor], State]]:
    """``sequential`` of one sequence by replay; see ``replays``."""
    return partial(sequential, read=Replay(model))


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
    if segments:
        state = with_new_samples(model, state, segments[0].ids_BT)
    skipped = unread_segments(len(segments), keep)
    hidden, state = diagonal(model, [segment.ids_BT for segment in segments[:even]], state, skipped)
    rest, state = sequential(model, segments[even:], state, keep)
    return deque([*hidden, *rest], maxlen=keep), state


def by_groups(
    model: Grouped, segments: tuple[Segment, ...], state: State, keep: int | None, bptt: int | None
) -> tuple[deque[Tensor], State]:
    """``sequential`` by ``read_group``, in groups of segments that are ``alike``."""
    hidden: deque[Tensor] = deque(maxlen=keep)
    cuts, skipped = cuts_of(len(segments), bptt), unread_segments(len(segments), keep)
    begin = 0
    for group in alike(segments):
        first, end = group[0].ids_BT, begin + len(group)
        ids_SBT = torch.stack([segment.ids_BT for segment in group])
        masks = [segment.mask_BT for segment in group if segment.mask_BT is not None]
        mask_SBT = torch.stack(masks) if masks else None
        inner = frozenset(cut - begin for cut in cuts if begin < cut < end)  # at ``begin`` new samples have joined
        wanted = int(max(0, min(end - begin, end - skipped)))
        state = with_new_samples(model, detach(state) if begin in cuts else state, first)
        out, state = model.read_group(ids_SBT, state, mask_SBT, inner, wanted)
        hidden += out
        begin = end
    return hidden, state


def group_size(ids_BT: Tensor) -> int:
    """Segments of the shape of ``ids_BT`` that are read in one go."""
    return max(1, GROUP_ROWS // max(1, ids_BT.shape[0] * ids_BT.shape[1]))


def cuts_of(total: int, bptt: int | None) -> frozenset[int]:
    """Segments before which gradients stop, of ``total``. The first one is none: a learned first memory is trained."""
    return frozenset() if bptt is None else frozenset(range(1, total - bptt + 1))
