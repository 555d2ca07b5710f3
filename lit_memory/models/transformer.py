"""Transformer without memory, or with a window of cached keys and values.

Paper:     the backbones of arXiv 2407.04841; window: the reference wrapper's ``sliding_window`` (spec 1).
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de.

Deviations
1. Keys keep their true distance to the queries (the reference gives cached and current tokens the same positions from
   the second segment on). With a window that covers the sequence this is full causal attention.
2. The cache may carry gradients (``window_detach=False``); the reference always detaches it.

Shape suffixes: B batch, T tokens, W cached tokens, D width, G heads of keys and values, K head width, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_memory.models.attention import attention_mask
from lit_memory.models.decoder import BackboneConfig, Block, Decoder
from lit_memory.recurrence import LayerRecurrent, state_options
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
        k, v = (t[:, :, -self.window :].to(state.k_BGWK.dtype) for t in (k, v))
        new = WindowState(k, v, mask_BS[:, -self.window :])
        return rows_BTD, WindowState(new.k_BGWK.detach(), new.v_BGWK.detach(), new.mask_BW) if self.detach else new


class Transformer(LayerRecurrent):
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
