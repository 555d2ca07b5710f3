"""RMT on a Transformer-XL, as first published, and TARM, which averages its memory.

Paper:     Bulatov et al. 2022, Recurrent Memory Transformer, arXiv 2207.06881, sections 3 and 4; Vigneswaran 2023, TARM
    (course report), eq. 1.
Reference: github.com/booydar/LM-RMT (spec 3); of TARM, none published.

The rows of segment s are ``[E; tokens; E]`` with E = E_(s-1), at relative positions. With M_s the last layer's output
at the write rows,

    E_s = alpha * M_s + (1 - alpha) * E_(s-1)         alpha = 1 is RMT, alpha < 1 TARM

With ``mem_len`` every layer also reads its inputs at the W tokens before the segment. That cache is detached, the
memory is not: its gradients cross the segments of one ``unroll``, or the last ``bptt`` of them. The layers are those of
``xl.py``; ``rmt.py`` and ``tarm.py`` have the other backbones.

Deviations
1. Attention is causal over all rows, as relative positions are not defined ahead. In the reference read rows see each
   other, and so do write rows.
2. The first memory is one row N(0, 1), repeated, as in the reference; each row is trained on its own.
3. All rows see the cache, which holds no memory rows (reference: memory rows see it only with ``read_mem_from_cache``).
4. The memory is carried as the last layer leaves it, without dropout.
5. TARM leaves open what the write rows hold (here: E) and how far gradients go (here: as far as RMT's).

Shape suffixes: B batch, T tokens, M memory tokens, R rows, W cached tokens, S = W + R keys, D width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.rmt import TokenMemory, check_alpha
from lit_memory.models.xl import XL, XLDecoder, XLState, empty_cache
from lit_memory.recurrence import SeparateWrite, state_options
from lit_memory.util.checks import at_least


class RMTXLState(NamedTuple):
    """The memory, and the cache of every layer."""

    memory_BMD: Tensor
    caches: tuple[XLState, ...]


class RMTXL(SeparateWrite, TokenMemory):
    """Transformer-XL that passes memory tokens from the top of one segment to the bottom of the next."""

    numbers = 1

    @dataclass
    class Config(XL.Config):
        memory_tokens: int = 10
        """Memory tokens; 0: only the cache."""
        alpha: float = 1.0
        """Weight of the new memory in the average: 1 is RMT; TARM's best is 0.2."""
        mem_len: int = 0
        """Cached tokens besides the memory."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, self, "memory_tokens")
            check_alpha(self.alpha)

        def rows(self, segment_len: int) -> int:
            return segment_len + 2 * self.memory_tokens

    def __init__(self, config: "RMTXL.Config") -> None:
        super().__init__()
        self.config, self.front = config, config.memory_tokens
        self.decoder = XLDecoder(config)
        self.memory = nn.Parameter(torch.randn(config.width).repeat(config.memory_tokens, 1))

    def init_state(self, batch, device=None, dtype=None):
        options = state_options(self, device, dtype)
        return RMTXLState(self.memory.to(**options).expand(batch, -1, -1), empty_cache(self.config, batch, **options))

    def step(self, state, ids_BT, mask_BT=None, write=True):
        rows_BRD, caches = self.rows(state, ids_BT, mask_BT, write)
        start, end = self.front, self.front + ids_BT.shape[1]
        hidden_BTD = self.decoder.dropout(rows_BRD[:, start:end])
        return hidden_BTD, self.written(state, rows_BRD[:, end:], caches) if write else state

    def advance(self, state, ids_BT, mask_BT=None):
        if self.training and self.config.dropout:  # fewer rows would draw other numbers
            return self.step(state, ids_BT, mask_BT)[1]
        return self.written(state, *self.rows(state, ids_BT, mask_BT, True, self.front))

    def rows(
        self, state: RMTXLState, ids_BT: Tensor, mask_BT: Tensor | None, write: bool, last: int | None = None
    ) -> tuple[Tensor, list[XLState]]:
        """Outputs of the top layer at the ``last`` rows (default: all), and the caches after the segment."""
        tokens_BTD, m = self.decoder.embed(ids_BT), self.front
        read_BMD, written = state.memory_BMD.to(tokens_BTD.dtype), m if write else 0
        rows_BRD = torch.cat([read_BMD, tokens_BTD, read_BMD[:, :written]], dim=1)
        mask_BR = None if mask_BT is None else F.pad(mask_BT, (m, written), value=True)
        tokens, caches, top = slice(m, m + ids_BT.shape[1]), [], self.decoder.layers[-1]
        for layer, cache in zip(self.decoder.layers, state.caches, strict=True):
            rows_BRD, cache = layer(rows_BRD, cache, mask_BR, write, tokens, last if layer is top else None)
            caches.append(cache)
        return rows_BRD, caches

    def written(self, state: RMTXLState, new_BMD: Tensor, caches: list[XLState]) -> RMTXLState:
        """The state after a segment, from the outputs at its write rows."""
        memory_BMD = state.memory_BMD
        return RMTXLState(torch.lerp(memory_BMD, new_BMD.to(memory_BMD.dtype), self.config.alpha), tuple(caches))
