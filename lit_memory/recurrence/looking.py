"""``looks``: what is seen of a memory, segment after segment.

Shape suffixes: B batch, T tokens.
"""

import math
from collections.abc import Iterable, Iterator

from torch import Tensor

from lit_memory.recurrence.protocol import Look, Visible
from lit_memory.recurrence.segment import as_segment, with_new_samples, without_ended


def looks(model: Visible, segments: Iterable[Tensor | tuple[Tensor, Tensor]]) -> Iterator[Look]:
    """Read segments, or pairs (ids, mask) of them, and show the memory after each, in constant memory.

    Segments may gain samples, as those of ``unroll``: a look has those that have begun. What is seen of a sample
    without a real token is NaN.
    """
    state = None
    for found in segments:
        ids_BT, mask_BT = as_segment(found)
        state = model.init_state(len(ids_BT), ids_BT.device) if state is None else state
        state = with_new_samples(model, state, ids_BT)
        look, new = model.look(state, ids_BT, mask_BT)
        state = without_ended(model, new, state, mask_BT)
        yield look if mask_BT is None else of_the_living(look, mask_BT.any(1))


def of_the_living(look: Look, live_B: Tensor) -> Look:
    """A look with NaN for all samples that have ended."""

    def masked(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(t.masked_fill(~live_B.view(-1, *[1] * (t.dim() - 1)), math.nan) for t in tensors)

    parts, gates = ({name: masked(of_name) for name, of_name in named.items()} for named in (look.parts, look.gates))
    return Look(parts, masked(look.keys), gates)
