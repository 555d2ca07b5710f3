"""RMT on a Transformer-XL, as it was first published, and TARM, which averages its memory.

Paper:     Bulatov et al. 2022, Recurrent Memory Transformer, arXiv 2207.06881, sections 3 and 4; Vigneswaran 2023, TARM
    (course report), eq. 1.
Reference: github.com/booydar/LM-RMT (spec 3); of TARM, none published.

The rows of segment s are ``[E; tokens; E]`` with E = E_(s-1), at relative positions, and with M_s what the last layer
made of the write rows

    E_s = alpha * M_s + (1 - alpha) * E_(s-1)         alpha = 1 is RMT, alpha < 1 TARM

With ``mem_len`` every layer also reads its inputs at the W ordinary tokens before the segment. That cache is detached,
the memory is not: its gradients cross the segments of one ``unroll``, or the last ``bptt`` of them. The layers are
those of ``xl.py``; ``rmt.py`` and ``tarm.py`` have the other backbones.

Deviations
1. Attention is causal over all rows; in the reference read rows see each other, and so do write rows. Relative
   positions know no row ahead.
2. The first memory is one row N(0, 1), repeated, as in the reference; each row learns by itself from then on.
3. All rows see the cache (reference: memory only with ``read_mem_from_cache``), in which no memory row is kept.
4. The memory is carried as the last layer leaves it, without dropout.
5. TARM leaves open what the write rows hold, and how far gradients go: here E, and as far as RMT's.

Shape suffixes: B batch, T tokens, M memory tokens, R rows, W cached tokens, S = W + R keys, D width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.rmt import TokenMemory, check_alpha
from lit_memory.models.xl import XL, XLDecoder, XLState, empty_cache
from lit_memory.recurrence import state_options
from lit_memory.util.checks import at_least


class RMTXLState(NamedTuple):
    """What the segment before has left: the memory, and the cache of every layer."""

    memory_BMD: Tensor
    caches: tuple[XLState, ...]


class RMTXL(TokenMemory):
    """Transformer-XL that passes memory tokens from the top of one segment to the bottom of the next."""

    @dataclass
    class Config(XL.Config):
        memory_tokens: int = 10
        """Carried rows; 0 leaves the cache alone."""
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
        self.config = config
        self.decoder = XLDecoder(config)
        self.memory = nn.Parameter(torch.randn(config.width).repeat(config.memory_tokens, 1))

    def init_state(self, batch, device=None, dtype=None):
        options = state_options(self, device, dtype)
        return RMTXLState(self.memory.to(**options).expand(batch, -1, -1), empty_cache(self.config, batch, **options))

    def step(self, state, ids_BT, mask_BT=None, write=True):
        memory_BMD, caches = state
        tokens_BTD = self.decoder.embed(ids_BT)
        read_BMD = memory_BMD.to(tokens_BTD.dtype)
        write_BMD = read_BMD if write else read_BMD[:, :0]
        rows_BRD = torch.cat([read_BMD, tokens_BTD, write_BMD], dim=1)
        start, end = read_BMD.shape[1], read_BMD.shape[1] + tokens_BTD.shape[1]
        mask_BR = None if mask_BT is None else F.pad(mask_BT, (start, write_BMD.shape[1]), value=True)
        new_caches = []
        for layer, cache in zip(self.decoder.layers, caches, strict=True):
            rows_BRD, cache = layer(rows_BRD, cache, mask_BR, write, slice(start, end))
            new_caches.append(cache)
        hidden_BTD = self.decoder.dropout(rows_BRD[:, start:end])
        if not write:
            return hidden_BTD, state
        return hidden_BTD, RMTXLState(
            torch.lerp(memory_BMD, rows_BRD[:, end:].to(memory_BMD.dtype), self.config.alpha), tuple(new_caches)
        )
