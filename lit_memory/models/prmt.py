"""PRMT: parallel-memory RMT, the ablation of ARMT without associations.

Paper:     Rodkin et al. 2024, arXiv 2407.04841, appendix C.2 (a figure; the code is the definition).
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de, ``modeling_rmt/experimental.py``.

The rows of a segment are ``[read memory; tokens; write memory]`` as in RMT, but each layer has its own recurrence: it
overwrites the memory rows with its output at the write rows of the previous segment.

Deviations
1. Rows are replaced by concatenation, not in place.
2. The memory rows that enter the first layer are zeros. The reference embeds a parameter there, which the first layer
   overwrites, so that it never gets a gradient.

Shape suffixes: B batch, T rows, M memory tokens, D width, S segments (in a mask: keys), R rows of a segment, E channels
of queries, keys and values together.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models import prmt_segments, rmt_segments
from lit_memory.models.attention import attention_mask, rotate
from lit_memory.models.decoder import Attention, BackboneConfig, Block, Decoder
from lit_memory.models.key_values import KeyValueCache, Piece
from lit_memory.recurrence import LayerMajor, detach, select_state, state_options
from lit_memory.util.checks import at_least


class PRMTLayer(nn.Module):
    """Overwrite the memory rows, run the block, and keep its output at the write rows."""

    def __init__(self, config: "PRMT.Config") -> None:
        super().__init__()
        self.memory_tokens = config.memory_tokens
        self.block = Block(config)
        self.memory = nn.Parameter(torch.randn(config.memory_tokens, config.width))

    def forward(self, rows_BTD: Tensor, state: Tensor, mask_BT: Tensor | None = None, write: bool = True):
        m, written = self.memory_tokens, self.memory_tokens if write else 0
        memory_BMD = state.to(rows_BTD.dtype)
        end = rows_BTD.shape[1] - written
        rows_BTD = torch.cat([memory_BMD, rows_BTD[:, m:end], memory_BMD[:, :written]], dim=1)
        mask = None if mask_BT is None else attention_mask(F.pad(mask_BT, (m, written), value=True), rows_BTD.shape[1])
        rows_BTD = self.block(rows_BTD, mask)
        # A view would keep the whole segment alive.
        return rows_BTD, rows_BTD[:, end:].to(state.dtype, copy=True) if write else state

    def write_rows(self, memory_BMD: Tensor, qkv_BTE: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The block at the write rows alone, and queries, keys and values of the memory.

        qkv_BTE: those of the token rows. mask: that of the write rows, (B or 1, 1, M, S).
        """
        known_BME = self.block.attention.qkv(self.block.norm1(memory_BMD))
        q, k, v = heads_of(self.block.attention, torch.cat([known_BME, qkv_BTE, known_BME], dim=1))
        y_BMD = self.block.attention.mix(q[:, :, -self.memory_tokens :], k, v, mask)
        return self.block.join(memory_BMD, y_BMD), known_BME

    def token_rows(self, rows_BTD: Tensor, known_BME: Tensor, qkv_BTE: Tensor, mask: Tensor) -> Tensor:
        """The block at the token rows, behind the read rows of ``known_BME``. mask: (B or 1, 1, T, M + T)."""
        q, k, v = heads_of(self.block.attention, torch.cat([known_BME, qkv_BTE], dim=1))
        return self.block.join(rows_BTD, self.block.attention.mix(q[:, :, self.memory_tokens :], k, v, mask))


def heads_of(attention: Attention, qkv_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, (B, heads, T, K) each."""
    q, k, v = attention.heads(qkv_BTE)
    if attention.rotary:
        q, k = (rotate(x, attention.rotary, attention.base) for x in (q, k))
    return q, k, v


class PRMT(KeyValueCache, LayerMajor):
    """RMT with a recurrence in every layer and no association matrix."""

    numbers = 1

    @dataclass
    class Config(BackboneConfig):
        memory_tokens: int = 4

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, self, "memory_tokens")

        def rows(self, segment_len: int) -> int:
            return segment_len + 2 * self.memory_tokens

    def __init__(self, config: "PRMT.Config") -> None:
        super().__init__()
        self.config, self.front = config, config.memory_tokens
        self.decoder = Decoder(config, PRMTLayer)

    def memories(self) -> list[Tensor]:
        """The learned initial memory of every layer, (M, D) each."""
        layers: Any = self.layers
        return [layer.memory for layer in layers]

    def init_state(self, batch, device=None, dtype=None):
        options = state_options(self, device, dtype)
        return tuple(memory.to(**options).expand(batch, -1, -1) for memory in self.memories())

    def embed(self, ids_BT, write=True):
        before, after = self.config.memory_tokens, self.config.memory_tokens if write else 0
        return self.decoder.add_positions(F.pad(self.decoder.tokens(ids_BT), (0, 0, before, after)), before, after)

    def finish(self, rows_BTD, write=True):
        m = self.config.memory_tokens
        return self.decoder.norm(rows_BTD[:, m : rows_BTD.shape[1] - m if write else None])

    def read_memory(self, state, opened, live_B):
        piece = Piece(opened, self.front, live_B * self.front)
        self.pass_memory(state, piece)
        return piece.done()

    def pass_memory(self, state: tuple[Tensor, ...], piece: Piece) -> list[Tensor]:
        """Outputs (B, M, D) of every layer at the memory rows."""
        dtype = self.decoder.tokens.weight.dtype
        return [piece.through(layer.block, memory.to(dtype)) for layer, memory in zip(self.layers, state, strict=True)]

    def read_tokens(self, state, piece, rows_BTD):
        for layer in self.layers:
            rows_BTD = piece.through(layer.block, rows_BTD)
        return rows_BTD

    def write_memory(self, state, opened):
        written = self.pass_memory(state, Piece(opened, self.front))
        return tuple(new.to(old.dtype) for new, old in zip(written, state, strict=True))

    def read_layer(self, layer, rows_SBRD, state, mask_SBT, cuts, keep):
        m, total = self.config.memory_tokens, len(rows_SBRD)
        tokens_SBTD = rows_SBRD[:, :, m : rows_SBRD.shape[2] - m]
        real_SBT = mask_SBT
        if real_SBT is None:  # one mask for all samples and segments
            real_SBT = tokens_SBTD.new_ones(1, 1, tokens_SBTD.shape[2], dtype=torch.bool).expand(total, 1, -1)
        qkv_SBTE = layer.block.attention.qkv(layer.block.norm1(tokens_SBTD))
        write_mask = attention_mask(F.pad(real_SBT.flatten(0, 1), (m, m), value=True), m).unflatten(
            0, real_SBT.shape[:2]
        )
        known, written, write = [], [], layer.write_rows
        if not rmt_segments.refusal(self, tokens_SBTD.shape[2]):
            write = prmt_segments.writer(layer.block, self.config, tokens_SBTD.shape[2])
            write_mask = qkv_SBTE.new_zeros(()).masked_fill(~write_mask.squeeze(2), -torch.inf)
        for s, (qkv_BTE, mask) in enumerate(zip(qkv_SBTE.unbind(), write_mask.unbind(), strict=True)):
            state = detach(state) if s in cuts else state
            new, known_BME = write(state.to(rows_SBRD.dtype), qkv_BTE, mask)
            known.append(known_BME)
            written.append(new)
            new = new.to(state.dtype)
            state = new if mask_SBT is None else select_state(mask_SBT[s].any(1), new, state)
        if not keep:
            return rows_SBRD[:0], state
        last = slice(total - keep, total)
        real_BT = real_SBT[last].flatten(0, 1)[: None if mask_SBT is not None else 1]
        mask = attention_mask(F.pad(real_BT, (m, 0), value=True), real_BT.shape[1])
        parts = (tokens_SBTD[last], torch.stack(known[last]), qkv_SBTE[last])
        rows_BTD = layer.token_rows(*(part.flatten(0, 1) for part in parts), mask)
        rows_SBTD = F.pad(
            rows_BTD.unflatten(0, parts[0].shape[:2]), (0, 0, m, 0)
        )  # the next layer overwrites read rows
        return torch.cat([rows_SBTD, torch.stack(written[last])], dim=2), state
