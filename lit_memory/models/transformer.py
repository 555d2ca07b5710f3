"""Transformer without memory, or with a window of cached keys and values.

Paper:     the backbones of arXiv 2407.04841; window: the reference wrapper's ``sliding_window`` (spec 1).
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de.

Deviations
1. Keys keep their true distance to the queries. (The reference gives cached and current tokens the same positions from
   the second segment on.) A window that covers the sequence is full causal attention. Padding takes no place in it.
2. The cache may carry gradients (``window_detach=False``); the reference always detaches it.

Shape suffixes: B batch, T tokens, W cached tokens, D width, G heads of keys and values, K head width, V vocabulary, S =
W + T keys, P = W columns in front of the open segment, C columns of it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.attention import attention_mask, rotary_table, turn
from lit_memory.models.decoder import BackboneConfig, Block, Decoder
from lit_memory.models.key_values import KeyValueCache, Piece
from lit_memory.models.parts import newest_keys
from lit_memory.recurrence import LayerRecurrent, SeparateWrite, state_options
from lit_memory.util.checks import FieldError


class WindowState(NamedTuple):
    """Unrotated keys and values of the last W tokens of one layer, and which of them are real (at first: none)."""

    k_BGWK: Tensor
    v_BGWK: Tensor
    mask_BW: Tensor


class WindowLayer(nn.Module):
    """A block that reads the cache of its own layer."""

    def __init__(self, config: "Transformer.Config") -> None:
        super().__init__()
        self.window, self.detach = config.window, config.window_detach
        self.block = Block(config)

    def forward(self, rows_BTD: Tensor, state: WindowState, mask_BT: Tensor | None = None, write: bool = True):
        if not self.window:
            return self.block(rows_BTD, None if mask_BT is None else attention_mask(mask_BT, rows_BTD.shape[1])), state
        now_BT = (
            torch.ones(rows_BTD.shape[:2], dtype=torch.bool, device=rows_BTD.device) if mask_BT is None else mask_BT
        )
        mask_BS = torch.cat([state.mask_BW, now_BT], dim=1)
        past = (state.k_BGWK.to(rows_BTD.dtype), state.v_BGWK.to(rows_BTD.dtype))
        rows_BTD, k, v = self.block.attend(rows_BTD, attention_mask(mask_BS, rows_BTD.shape[1]), past)
        if not write:
            return rows_BTD, state
        k, v, mask_BW = newest_keys(k, v, mask_BS, self.window, padded=mask_BT is not None)
        k, v = (t.to(state.k_BGWK.dtype) for t in (k, v))
        return rows_BTD, WindowState(k.detach(), v.detach(), mask_BW) if self.detach else WindowState(k, v, mask_BW)


class Transformer(SeparateWrite, KeyValueCache, LayerRecurrent):
    """The backbone alone. ``window=0`` reads every segment by itself."""

    @dataclass
    class Config(BackboneConfig):
        window: int = 0
        """Tokens before the segment that stay visible (not gpt2)."""
        window_detach: bool = True

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.window < 0:
                raise FieldError("window", self.window, "expected 0 or more tokens")
            if self.window and self.family == "gpt2":
                raise FieldError(
                    "window", self.window, "a window needs rotary positions; use family: gpt_neox or llama"
                )

    def __init__(self, config: "Transformer.Config") -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config, WindowLayer)

    def init_state(self, batch, device=None, dtype=None):
        options = state_options(self, device, dtype)
        c = self.config
        keys = torch.zeros(batch, c.kv_heads or c.heads, c.window, c.head_width, **options)
        mask = torch.zeros(batch, c.window, dtype=torch.bool, device=options["device"])
        return tuple(WindowState(keys, keys, mask) for _ in self.layers)

    def embed(self, ids_BT, write=True):
        return self.decoder.add_positions(self.decoder.tokens(ids_BT))

    def finish(self, rows_BTD, write=True):
        return self.decoder.norm(rows_BTD)

    def advance(self, state, ids_BT, mask_BT=None):
        if self.config.window or (self.training and self.config.dropout):
            return self.step(state, ids_BT, mask_BT)[1]
        return state  # the next segment sees nothing of this one

    def read_memory(self, state, opened, live_B):
        if not self.config.window:
            return opened
        real_BP = state[0].mask_BW
        if opened.real_BP.shape[1]:
            real_BP = torch.where(live_B[:, None], real_BP, opened.real_BP)
        piece = Piece(opened, self.config.window, live_B * self.config.window)
        for layer, layer_state in zip(self.layers, state, strict=True):
            kept = self.turned(layer, layer_state.k_BGWK), layer_state.v_BGWK
            piece.put(*(part.to(self.decoder.norm.weight.dtype) for part in kept))
        return piece.done()._replace(real_BP=real_BP)

    def turned(self, layer: Any, k_BGWK: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """Keys of the window of a layer, rotated to the first columns; back, from the last of ``rows_B`` columns."""
        attention, count = layer.block.attention, k_BGWK.shape[2]
        length = count if rows_B is None else int(rows_B.max())
        cos, sin = rotary_table(length, attention.rotary, attention.base, k_BGWK.device, k_BGWK.dtype)
        if rows_B is None:
            return turn(k_BGWK, cos, sin)
        columns_BW = rows_B[:, None] - count + torch.arange(count, device=rows_B.device)
        return turn(k_BGWK, cos[columns_BW].unsqueeze(1), -sin[columns_BW].unsqueeze(1))

    def read_tokens(self, state, piece, rows_BTD):
        for layer in self.layers:
            rows_BTD = piece.through(layer.block, rows_BTD)
        return rows_BTD

    def write_memory(self, state, opened):
        if not self.config.window:
            return state
        window, columns = self.config.window, opened.layers[0].k_BGCK.shape[2]
        kept_BW = opened.rows_B[:, None] - window + torch.arange(window, device=opened.rows_B.device)
        mask_BW = F.pad(opened.real_BP, (0, columns - window), value=True).gather(1, kept_BW)
        new = []
        for layer, layer_state, cache in zip(self.layers, state, opened.layers, strict=True):
            k, v = (part.take_along_dim(kept_BW[:, None, :, None], dim=2) for part in cache)
            k, v = (part.to(layer_state.k_BGWK.dtype) for part in (k, v))
            new.append(WindowState(self.turned(layer, k, opened.rows_B), v, mask_BW))
        return tuple(new)
