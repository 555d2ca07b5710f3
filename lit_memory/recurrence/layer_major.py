"""The layer-major schedule: a layer reads all segments, then the next layer does.

Cell (segment s, layer l) needs the output of (s, l-1), and of (s-1, l) the state alone. With all segments' rows of
layer l-1 at hand, a layer computes segment after segment only what its state needs; see ``LayerMajor``.

Shape suffixes: S segments, B batch, T tokens, R rows, D width.
"""

from typing import Any

from torch import Tensor

from lit_memory.recurrence.protocol import Grouped, LayerRecurrent
from lit_memory.recurrence.state import State


class LayerMajor(Grouped, LayerRecurrent):
    """A model of which one layer can read many segments before the next layer begins.

    Within a layer the segments are coupled by the layer's state alone, so that only what the state needs is computed
    segment after segment. The rest is done for all segments at once.
    """

    def read_group(self, ids_SBT, state, mask_SBT, cuts, keep):
        rows_SBRD = self.embed(ids_SBT.flatten(0, 1)).unflatten(0, ids_SBT.shape[:2])
        states = []
        for i, (layer, layer_state) in enumerate(zip(self.layers, state, strict=True)):
            wanted = keep if i + 1 == len(self.layers) else len(ids_SBT)
            rows_SBRD, layer_state = self.read_layer(layer, rows_SBRD, layer_state, mask_SBT, cuts, wanted)
            states.append(layer_state)
        if not keep:
            return [], tuple(states)
        hidden = self.finish(rows_SBRD.flatten(0, 1)).unflatten(0, rows_SBRD.shape[:2])
        return list(hidden.unbind()), tuple(states)

    def read_layer(
        self, layer: Any, rows_SBRD: Tensor, state: State, mask_SBT: Tensor | None, cuts: frozenset[int], keep: int
    ) -> tuple[Tensor, State]:
        """Rows of the last ``keep`` segments after the layer, and its state after all S segments; see ``read_group``.

        rows_SBRD: rows of all segments, as ``embed`` gives them.
        """
        raise NotImplementedError
