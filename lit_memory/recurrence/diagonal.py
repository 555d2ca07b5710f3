"""The diagonal schedule: layers of different segments run together.

Cell (segment s, layer l) needs the cells (s, l-1) and (s-1, l) alone, so that all cells on one diagonal, s + l = t, can
run as one group: S + L - 1 grouped steps in place of S * L single ones. The layers of a group run as one ``vmap`` over
stacked weights.

Paper:  Sivtsov et al. 2025, Diagonal Batching, arXiv 2506.05229; spec 13.

Shape suffixes: B batch, T tokens, D width, G layers of a group.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_memory.recurrence.protocol import LayerRecurrent
from lit_memory.recurrence.state import State, map_state


def diagonal(
    model: LayerRecurrent, segments: Sequence[Tensor], state: State, skipped: float = 0
) -> tuple[list[Tensor], State]:
    """Hidden states (B, T, D) of every segment but the first ``skipped`` ones, and the state after the last one. All
    segments have the same shape."""
    depth, states = len(model.layers), list(state)
    weights, group = stacked_weights(model.layers), layer_group(model.layers[0])
    rows, hidden = [torch.empty(0)] * depth, []
    for t in range(len(segments) + depth - 1 if segments else 0):
        first, last = max(0, t - len(segments) + 1), min(t, depth - 1)
        if first == 0:
            rows[0] = model.embed(segments[t])
        part = slice(first, last + 1)
        stacked = map_state(lambda *layers: torch.stack(layers), *states[part])
        with sdpa_kernel(SDPBackend.MATH):  # the only attention kernel that vmap can batch on every device
            out_GBTD, new = group({k: v[part] for k, v in weights.items()}, torch.stack(rows[part]), stacked)
        for i, out in enumerate(out_GBTD.unbind(0)):
            states[first + i] = map_state(lambda a, i=i: a.unbind(0)[i], new)
            if first + i + 1 < depth:
                rows[first + i + 1] = out
            elif t - depth + 1 >= skipped:
                hidden.append(model.finish(out))
    return hidden, tuple(states)


def stacked_weights(layers: nn.ModuleList) -> dict[str, Tensor]:
    """Parameters and buffers of all layers, stacked. ``torch.func.stack_module_state`` would cut the graph."""
    single = [{**dict(layer.named_parameters()), **dict(layer.named_buffers())} for layer in layers]
    return {name: torch.stack([weights[name] for weights in single]) for name in single[0]}


def layer_group(layer: nn.Module) -> Callable[..., tuple[Tensor, State]]:
    """``group(weights, rows, states)``: several layers of the structure of ``layer`` at once."""

    def cell(weights, rows, layer_state):
        # GPT-J has one norm under two names: tied, the call would leave its batched weight in the layer.
        return torch.func.functional_call(layer, weights, (rows, layer_state, None, True), tie_weights=False)

    return torch.func.vmap(cell, randomness="different")
