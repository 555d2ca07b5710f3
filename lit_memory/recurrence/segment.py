"""One segment of a sequence, and what every schedule does with it.

Shape suffixes: B batch, T tokens, D width.
"""

from typing import NamedTuple

from torch import Tensor

from lit_memory.recurrence.protocol import GrowingState, SegmentRecurrent, SeparateWrite
from lit_memory.recurrence.state import State, append_samples, batch_size, select_state
from lit_memory.util.checks import FieldError


class Segment(NamedTuple):
    """Token ids of one segment, and a mask that is True at real tokens; None if all are real."""

    ids_BT: Tensor
    mask_BT: Tensor | None = None


def as_segment(segment: Tensor | tuple[Tensor, Tensor | None]) -> Segment:
    """The segment of ids, or of ids and a mask of any type."""
    ids_BT, mask_BT = segment if isinstance(segment, tuple) else (segment, None)
    return Segment(ids_BT, None if mask_BT is None else mask_BT.bool())


def read_segment(model: SegmentRecurrent, state: State, segment: Segment, wanted: bool) -> tuple[Tensor | None, State]:
    """Read and write one segment: its hidden states (B, T, D), None if they are not ``wanted``, and the next state."""
    ids_BT, mask_BT = segment
    if not wanted:
        return None, advance(model, state, ids_BT, mask_BT)
    hidden_BTD, new = model.step(state, ids_BT, mask_BT)
    return hidden_BTD, without_ended(model, new, state, mask_BT)


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
    """The state of all samples of a segment. Those that ``state`` does not have begin there, behind the others. Raises
    FieldError for a state of more samples."""
    count = ids_BT.shape[0] - batch_size(state)
    if count < 0:
        raise FieldError("state", batch_size(state), f"its samples are more than the {ids_BT.shape[0]} of ids_BT")
    if not count:
        return state
    fresh = model.init_state(count, ids_BT.device)
    return model.append_samples(state, fresh) if isinstance(model, GrowingState) else append_samples(state, fresh)
