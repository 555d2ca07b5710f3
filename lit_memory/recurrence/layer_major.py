"""The layer-major schedule: a layer reads all segments, then the next layer does.

Cell (segment s, layer l) needs the output of (s, l-1), and of (s-1, l) the state alone. With all segments' rows of
layer l-1 at hand, a layer computes segment after segment only what its state needs; see ``LayerMajor``.

Shape suffixes: S segments, B batch, T tokens, R rows, D width.
"""

from torch import Tensor

from lit_memory.recurrence.protocol import LayerMajor
from lit_memory.recurrence.state import State

GROUP_ROWS = 1 << 15
"""Tokens of all samples that are read in one go: bounds the memory of a long evaluation, and keeps rows in caches."""


def layer_major(
    model: LayerMajor, ids_SBT: Tensor, state: State, mask_SBT: Tensor | None, cuts: frozenset[int], keep: int
) -> tuple[list[Tensor], State]:
    """Hidden states (B, T, D) of the last ``keep`` segments, and the state after the last one.

    ids_SBT: the segments, which all have the same shape. cuts: segments before which no gradient leaves the state.
    """
    rows = model.embed(ids_SBT.flatten(0, 1)).unflatten(0, ids_SBT.shape[:2])
    states = []
    for i, (layer, layer_state) in enumerate(zip(model.layers, state, strict=True)):
        wanted = keep if i + 1 == len(model.layers) else len(ids_SBT)
        rows, layer_state = model.read_layer(layer, rows, layer_state, mask_SBT, cuts, wanted)
        states.append(layer_state)
    if not keep:
        return [], tuple(states)
    hidden = model.finish(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
    return list(hidden.unbind()), tuple(states)


def group_size(ids_BT: Tensor) -> int:
    """Segments of the shape of ``ids_BT`` that are read in one go."""
    return max(1, GROUP_ROWS // max(1, ids_BT.shape[0] * ids_BT.shape[1]))


def cuts_of(total: int, bptt: int | None) -> frozenset[int]:
    """Segments before which gradients stop, of ``total``. The first one is none: a learned first memory is trained."""
    return frozenset() if bptt is None else frozenset(range(1, total - bptt + 1))
