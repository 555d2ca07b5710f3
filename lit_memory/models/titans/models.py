"""Titans: a neural long-term memory, alone (LMM) or beside attention: as context (MAC), gate (MAG) or layer (MAL).

Paper:     Behrouz et al. 2025, Titans: learning to memorize at test time, arXiv 2501.00663, sections 3 (memory), 4 (the
           wirings) and 4.4 (details). The memory's equations are in ``memory/neural.py``, its module in
           ``titans/memory.py``, the layers in ``titans/layers.py``.
Reference: none by the authors. What the paper leaves open follows spec 10 and is a flag.

With LMM(x) a layer's memory read and written at rows x, P its persistent tokens, and each layer followed by a
feed-forward,

LMM  x + LMM(x)
MAC  h = M(q_x); y = Attention([P; h; x]); x + y (*) LMM(y)     (eq. 21 to 25), segment by segment of ``window`` tokens
MAG  y = WindowAttention([P; x]); x + y (*) LMM(x)              (eq. 26 to 28)
MAL  y = x + LMM(x); y + WindowAttention(y)                     (eq. 29 to 31)

where a (*) b is RMS(a) sigmoid(RMS(b)), both norms with learned weights. Every attention is causal.

Deviations
1. Causality. Read literally, eq. 21 and 22 let a token attend to the recalls of later tokens, and eq. 25 reads a memory
   that has seen the whole segment. Here token j sees the recalls of tokens up to j, and reads the memory right after
   its own write. ``long_tokens`` and ``causal_read=False`` are the alternatives.
2. The memory's persistent tokens are read once, before the first token: they make the initial state. In MAC they are
   for attention only.
3. Attention sees P without positions: as rotated keys they would have another distance to every token. In MAC, h_j has
   the position of token j. MAL's attention gets P behind its memory, as in eq. 29: as rows before the first token, with
   positions, which leave the window as tokens do.
4. MAC's queries for h have no convolution, which would be a second one over other rows. What they recall, and P, are
   normalised before attention as its other rows are, so that the size of a recall is lost.
5. With ``per_chunk_gates`` a chunk has the gates of its first token, which is causal; the paper leaves it open.
6. A segment starts a new chunk, and in MAC a new segment of attention. Cut at multiples of both, a sequence gives what
   one pass does.
7. ``damped`` and ``normalized`` are ours. They keep the memory from diverging; see ``memory/neural.py``. ``exact`` is
   ours, too: in a matrix, chunks whose tokens share no surprise; see ``memory/neural_exact.py``.
8. The biases of the gates have no weight decay: at 0, which it would pull them to, every token forgets half of the
   memory.

Shape suffixes: B batch, T tokens, D width, H heads of the memory, P persistent tokens, S segments, R rows of one.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_memory.models.parts import RMSNorm
from lit_memory.models.titans.calls import memory_diagnostics, real_gates, recorded
from lit_memory.models.titans.config import AttentionConfig, TitansConfig
from lit_memory.models.titans.layers import LMMLayer, MACLayer, MAGLayer, MALLayer
from lit_memory.models.token_recurrent import Stack, TokenRecurrent, in_order, joined, real_first
from lit_memory.recurrence import (
    Diagnosed,
    LayerMajor,
    Look,
    NoWeightDecay,
    Visible,
    detach,
    map_state,
    state_options,
    unroll,
)
from lit_memory.util.checks import FieldError, at_least


class Titans(Visible, Diagnosed, NoWeightDecay, TokenRecurrent, LayerMajor):
    """Shared base of the four models: the stack of layers, the initial state and the diagnostics."""

    visible = ("norm", "gates")
    numbers = 1
    layer_class: ClassVar[type[LMMLayer]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        c = self.config = config
        self.grain = c.shared
        self.decoder = Stack(c, [self.layer_class(c) for _ in range(c.layers)], RMSNorm(c.width, c.norm_eps))
        nn.init.normal_(self.decoder.tokens.weight, std=c.embedding_std)
        if c.tie_embeddings and not c.inputs:
            self.decoder.head.weight = self.decoder.tokens.weight

    @property
    def no_weight_decay(self):
        return {name for name, _ in self.named_parameters() if name.endswith(".to_gates.bias")}

    def init_state(self, batch, device=None, dtype=None):
        layers: Any = self.layers
        options = state_options(self, device, dtype)
        sizes = options["device"].type == "meta"  # which the persistent tokens leave as they are
        firsts = [layer.empty_state(**options) if sizes else layer.first_state(**options) for layer in layers]
        return tuple(map_state(lambda t: t.expand(batch, *t.shape[1:]), first) for first in firsts)

    def refuses_groups(self, longest=0):
        return self.refuses_hooks()  # the memory alone is by hand, in full precision and without dropout

    def read_layer(self, layer, rows_SBRD, state, mask_SBT, cuts, keep):
        total, segment, found = len(rows_SBRD), rows_SBRD.shape[2], []
        if not segment:
            return rows_SBRD[total - keep :], state
        for begin, end in pairwise(sorted({0, *cuts, total})):
            state, rows = detach(state) if begin in cuts else state, rows_SBRD[begin:end]
            if mask_SBT is not None:
                rows, state = one_by_one(layer, rows, state, mask_SBT[begin:end])
            elif keep:
                rows_BTD, state = layer(joined(rows), state, segment=segment)
                rows = rows_BTD.unflatten(1, (end - begin, -1)).transpose(0, 1)
            else:
                state = layer.mix(joined(rows), state, None, segment)[1]
            found.append(rows)
        return torch.cat(found)[total - keep :], state

    @torch.no_grad()
    def diagnostics(self, ids_BT: Tensor | tuple, segment_len: int | None = None) -> dict[str, Tensor]:
        """Diagnostics of the memory of every layer l, ``name.l``, on a sequence that ``unroll`` reads.

        M_norm, S_norm: norms of all weights and momentum after the last token, means over samples.
        alpha, eta, theta: gates, means over real tokens.
        clipped: fraction of tokens whose step ``normalized`` shortened; 0 without it, and for a matrix.
        """
        with recorded(self.layers) as calls:
            unroll(self, ids_BT, segment_len, keep=0, schedule="sequential")
        found = [memory_diagnostics(own) for own in calls]
        return {f"{name}.{layer}": value for layer, own in enumerate(found) for name, value in own.items()}

    def parts(self, state):
        memories = [getattr(layer, "memory", layer) for layer in state]  # a hybrid state has a window as well
        return {"M": tuple(torch.cat([W.flatten(1) for W in memory.M], dim=1) for memory in memories)}

    def look(self, state, ids_BT, mask_BT=None):
        with recorded(self.layers) as calls:
            new = self.step(state, ids_BT, mask_BT)[1]
        c, found = self.config, [real_gates(own, len(ids_BT)) for own in calls]
        names = [*["alpha"] * c.forget, *["eta"] * c.momentum, "theta"]
        gates = {name: tuple(of_layer[name] for of_layer in found) for name in names}
        return Look(self.parts(new), (), gates), new


def one_by_one(layer: LMMLayer, rows_SBRD: Tensor, state: Any, mask_SBT: Tensor) -> tuple[Tensor, Any]:
    """Rows and state of a layer that reads segments with padding, which would stand between them as one sequence."""
    found = []
    for rows_BRD, mask_BR in zip(rows_SBRD, mask_SBT, strict=True):
        order_BR = real_first(mask_BR)
        rows_BRD, state = layer(in_order(rows_BRD, order_BR), state, in_order(mask_BR, order_BR))
        found.append(in_order(rows_BRD, order_BR.argsort(1)))
    return torch.stack(found), state


class LMM(Titans):
    """The memory without attention."""

    Config = TitansConfig
    layer_class = LMMLayer


class MAC(Titans):
    """Memory as context."""

    @dataclass
    class Config(AttentionConfig):
        long_tokens: int = 0
        """N_l, learned queries whose recalls come in front of a segment; 0: every token has its own query."""
        causal_read: bool = True
        """Read the memory right after each token was written; without, as it was at the start of the segment."""
        write_prefix: bool = False
        """Before each segment, also write what attention makes of P and of the recalls of learned queries."""
        fusion: Literal["sigmoid_m", "silu_prod"] = "sigmoid_m"
        """How memory and attention are multiplied: RMS(y) sigmoid(RMS(m)), or silu(RMS(y) RMS(m))."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, self, "long_tokens")
            if self.write_prefix and not self.persistent + self.long_tokens:
                raise FieldError("write_prefix", self.write_prefix, "expected a prefix; set persistent or long_tokens")

    layer_class = MACLayer

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.grain = config.window  # a segment of attention begins with a chunk


class MAG(Titans):
    """Memory as gate."""

    @dataclass
    class Config(AttentionConfig):
        fusion: Literal["sigmoid_m", "silu_prod"] = "sigmoid_m"
        """How memory and attention are multiplied: RMS(y) sigmoid(RMS(m)), or silu(RMS(y) RMS(m))."""

    layer_class = MAGLayer


class MAL(Titans):
    """Memory as layer."""

    Config = AttentionConfig
    layer_class = MALLayer
