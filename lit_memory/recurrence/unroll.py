"""``unroll``, the only loop over segments. It serves training, evaluation, generation and benchmarks alike.

Shape suffixes: B batch, T tokens, D width.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_memory.recurrence.checkpointing import checkpointed
from lit_memory.recurrence.protocol import SegmentRecurrent, SharedRead
from lit_memory.recurrence.schedules import check_schedule, scheduled, streamed
from lit_memory.recurrence.segment import Segment, as_segment, with_new_samples
from lit_memory.recurrence.state import State, batch_size, detach, map_state
from lit_memory.util.checks import FieldError, check_least


class Order(NamedTuple):
    """How writing segments are computed: arguments of ``unroll``."""

    schedule: str
    bptt: int | None
    checkpoint_segments: int | None


class Unrolled(NamedTuple):
    """Hidden states of the segments that were kept, joined to (B, T, D), and the state after the last writing one."""

    hidden_BTD: Tensor
    state: State


def unroll(
    model: SegmentRecurrent,
    ids_BT: Tensor | Iterable[Tensor | tuple[Tensor, Tensor]],
    segment_len: int | None = None,
    *,
    mask_BT: Tensor | None = None,
    state: State | None = None,
    read_only: int = 0,
    keep: int | None = None,
    bptt: int | None = None,
    schedule: str = "auto",
    align: str = "left",
    checkpoint_segments: int | None = None,
) -> Unrolled:
    """Read a sequence segment by segment. Raises ValueError for arguments that exclude each other.

    ids_BT: (B, T) token ids; or a tuple of segments; or an iterator, read a group ahead in constant memory (``keep``).
        Segments, or pairs (ids, mask) of them, may gain samples: new ones begin behind the present ones.
    segment_len, align: how a tensor is cut, see ``segment_lengths``. Default: one segment.
    mask_BT: (B, T), True (or 1) at real tokens. A sample whose segment has none keeps its state. Not for a tuple.
    state: the state to start from; default ``model.init_state``.
    read_only: number of last segments that read the memory and do not write it. They run as one batch.
    keep: number of last segments whose hidden states are returned; default all.
    bptt: gradients stay within the last ``bptt`` segments, the read-only ones counting as one; default no truncation.
    schedule: the order of computation, see ``schedules``: "auto", the fastest one that gives the same values; allows
        one backward pass; "sequential", the definition; "layer" for a ``LayerMajor`` model; "diagonal" for a
        ``LayerRecurrent`` model, with neither masks nor ``bptt``.
    checkpoint_segments: the graph holds the states between groups of so many writing segments; a group is computed
        again on the way back. Default: the graph holds everything.
    """
    check_options(segment_len, keep, bptt, schedule, checkpoint_segments)
    if isinstance(ids_BT, Tensor | tuple):
        segments = cut(ids_BT, mask_BT, segment_len, align)
        order = Order(schedule, bptt, checkpoint_segments)
        return write_then_read(model, segments, state, read_only, keep, order)
    if read_only or mask_BT is not None or schedule not in ("sequential", "auto") or bptt or checkpoint_segments:
        options = "read_only, bptt, mask_BT, checkpoint_segments nor a schedule"
        raise ValueError(f"an iterator of segments allows neither {options}: its length is unknown")
    hidden, state = streamed(model, schedule)(model, map(as_segment, ids_BT), state, keep)
    return Unrolled(join_hidden(model, hidden, state), state)


def check_options(
    segment_len: int | None, keep: int | None, bptt: int | None, schedule: str, checkpoint_segments: int | None
) -> None:
    """Raise FieldError for an argument out of its range."""
    check_least(1, segment_len=segment_len)
    check_least(0, keep=keep)
    if checkpoint_segments is not None and checkpoint_segments < 1:
        expected = "expected at least 1 segment, or None for no checkpointing"
        raise FieldError("checkpoint_segments", checkpoint_segments, expected)
    if bptt is not None and bptt < 1:
        raise FieldError("bptt", bptt, "expected at least 1 segment, or None for no truncation")
    check_schedule(schedule)


def check_state(state: State | None) -> None:
    """Raise FieldError if there is no state, where there was no segment."""
    if state is None:
        raise FieldError("ids_BT", (), "expected at least one segment, or a state to go on from")


def segment_lengths(total: int, segment_len: int, align: str = "left") -> list[int]:
    """Lengths of the segments that ``total`` tokens are cut into.

    align: "left" leaves the last segment short, "right" the first one, "center" makes ceil(total / segment_len) nearly
        equal ones.
    Source: the reference's segmenter (spec 0.2).
    """
    count, rest = -(-total // segment_len), total % segment_len
    if align == "center":
        return [total // count + (i < total % count) for i in range(count)]
    full = [segment_len] * (total // segment_len)
    if align not in ("left", "right"):
        raise FieldError("align", align, "expected 'left', 'right' or 'center'")
    if not rest:
        return full
    return [*full, rest] if align == "left" else [rest, *full]


def cut(
    ids_BT: Tensor | tuple[Tensor | tuple[Tensor, Tensor], ...],
    mask_BT: Tensor | None,
    segment_len: int | None,
    align: str,
) -> tuple[Segment, ...]:
    """The segments of a tensor, or of a tuple of segments. Either all of them have a mask, or none has."""
    if isinstance(ids_BT, Tensor):
        if ids_BT.dim() < 2:
            raise FieldError("ids_BT", tuple(ids_BT.shape), "expected a batch of sequences, (B, T)")
        lengths = segment_lengths(ids_BT.shape[1], segment_len or ids_BT.shape[1] or 1, align)
        ids = ids_BT.split(lengths, dim=1)
        masks = [None] * len(ids) if mask_BT is None else mask_BT.bool().split(lengths, dim=1)
        return tuple(map(Segment, ids, masks))
    if mask_BT is not None:
        raise ValueError("a tuple of segments allows no mask_BT; pass one tensor, or pairs of ids and mask")
    segments = tuple(map(as_segment, ids_BT))
    if all(segment.mask_BT is None for segment in segments):
        return segments
    return tuple(
        Segment(ids, ids.new_ones(ids.shape[:2], dtype=torch.bool) if mask is None else mask) for ids, mask in segments
    )


def write_then_read(
    model: SegmentRecurrent,
    segments: tuple[Segment, ...],
    state: State | None,
    read_only: int,
    keep: int | None,
    order: Order,
) -> Unrolled:
    """``unroll`` of segments whose number is known: first those that write, then those that only read."""
    if not 0 <= read_only <= len(segments):
        raise FieldError("read_only", read_only, f"the input has {len(segments)} segments")
    writing = segments[: len(segments) - read_only]
    reading = segments[len(segments) - (read_only if keep is None else min(read_only, keep)) :]
    if not segments:
        check_state(state)
    if state is None:
        state = model.init_state(segments[0].ids_BT.shape[0], segments[0].ids_BT.device)
    elif order.bptt is not None and order.bptt <= len(writing) + (read_only > 0):
        state = detach(state)
    keep_writing = None if keep is None else max(keep - read_only, 0)
    bptt_writing = None if order.bptt is None else order.bptt - (read_only > 0)
    hidden, state = write_segments(model, writing, state, keep_writing, order._replace(bptt=bptt_writing))
    if not reading:
        return Unrolled(join_hidden(model, hidden, state), state)
    memory = with_new_samples(model, detach(state) if order.bptt == 1 and writing else state, reading[-1].ids_BT)
    return Unrolled(join_hidden(model, [*hidden, read_segments(model, reading, memory)], state), state)


def write_segments(
    model: SegmentRecurrent, segments: tuple[Segment, ...], state: State, keep: int | None, order: Order
) -> tuple[list[Tensor], State]:
    """Hidden states of the last ``keep`` segments, and the state after the last one, group by group."""
    run, total = scheduled(model, order.schedule, segments), len(segments)
    size, hidden = order.checkpoint_segments or max(total, 1), []
    for begin in range(0, max(total, 1), size):
        group = segments[begin : begin + size]
        after = total - begin - len(group)
        kept = None if keep is None else max(keep - after, 0)
        bptt = None if order.bptt is None else order.bptt - after
        if begin and order.bptt is not None and begin <= total - order.bptt:
            state = detach(state)

        def read(start: State, group=group, kept=kept, bptt=bptt) -> tuple[list[Tensor], State]:
            rows, end = run(model, group, start, kept, bptt)
            return list(rows), end

        rows, state = checkpointed(model, read, state) if order.checkpoint_segments else read(state)
        hidden += rows
    return hidden, state


def expand_state(model: SegmentRecurrent, state: State, readers: int) -> State:
    """The state for ``readers`` samples in a row that all read what one sample wrote.

    Not by ``reorder``, which may look at numbers to drop what belonged to other samples.
    """
    if readers == 1 or isinstance(model, SharedRead):
        return state
    return map_state(lambda t: t.repeat_interleave(readers, 0), state)


def read_segments(model: SegmentRecurrent, segments: tuple[Segment, ...], state: State) -> Tensor:
    """Hidden states (B, T, D) of segments that all read the same state; as one batch, if they have one shape."""
    if len({segment.ids_BT.shape for segment in segments}) > 1:
        return torch.cat([model.step(state, ids, mask, write=False)[0] for ids, mask in segments], dim=1)
    batch, count = segments[0].ids_BT.shape[0], len(segments)
    ids = torch.stack([segment.ids_BT for segment in segments], dim=1).flatten(0, 1)
    masks = [segment.mask_BT for segment in segments if segment.mask_BT is not None]
    mask = torch.stack(masks, dim=1).flatten(0, 1) if masks else None
    hidden = model.step(expand_state(model, state, count), ids, mask, write=False)[0]
    return hidden.unflatten(0, (batch, count)).flatten(1, 2)


def join_hidden(model: SegmentRecurrent, hidden: Iterable[Tensor], state: State) -> Tensor:
    """Hidden states of consecutive segments as one tensor (B, T, D); (B, 0, 0) if there are none."""
    parts = list(hidden)
    if parts:
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    check_state(state)
    return next(model.parameters()).new_zeros(batch_size(state), 0, 0)
