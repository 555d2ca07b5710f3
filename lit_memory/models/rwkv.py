"""RWKV-5 (Eagle): linear attention with a decay per channel, and token shifts.

Paper:     Peng et al. 2024, Eagle and Finch: RWKV with matrix-valued states and dynamic recurrence, arXiv 2404.05892,
           section 4.1 (formulas as in spec 9); as the baseline of arXiv 2407.04841, appendix on RWKV. The recurrence is
           in ``memory/scan.py``.
Reference: github.com/BlinkDL/RWKV-LM, ``RWKV-v5`` (training, init) and github.com/BlinkDL/ChatRWKV, ``att_seq_v5_2``
    (inference).

A layer is a time mix (the attention) and a channel mix (the feed-forward), both on a residual stream. The input of
their projections is, channel by channel, a weighted mean of the token and the one before.

Deviations
1. Decays are not clipped at 0.005 (torch code that divides by products of decays needs that), and segments have any
   length.
2. The residual stream is fp32 under bf16 weights, as in Mamba; the reference's is bf16.
3. ``zero_init=False`` initialises the projections onto the residual stream like the others. The reference starts them
   at zero, so that a fresh model is the identity. Ours.
4. Masked tokens are skipped: they change neither the shifts nor the state.

Shape suffixes: B batch, T tokens, D width, H heads, K key width of a head, V value width (equal), F feed-forward width,
S the row before and then T.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.memory import compiled
from lit_memory.memory.scan import decayed_attention
from lit_memory.models.parts import last_rows
from lit_memory.models.token_recurrent import ReadsAhead, Stack, TokenRecurrentConfig
from lit_memory.recurrence import Compiled, Visible, at_least_single, state_options
from lit_memory.util.checks import FieldError, at_least

DIVISOR = 8
"""Attention outputs are divided by it before their norm, where it scales the norm's epsilon."""


class RWKVState(NamedTuple):
    """Inputs of the time mix and the channel mix at the last token, and the attention's memory."""

    time_B1D: Tensor
    channel_B1D: Tensor
    memory_BHKV: Tensor


def token_shift(x_BTD: Tensor, last_B1D: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """The row before each row, (B, T, D), and the last real row, in the precision of ``last_B1D``."""
    window_BSD = torch.cat([last_B1D.to(x_BTD.dtype), x_BTD], dim=1)
    return window_BSD[:, :-1], last_rows(window_BSD, 1, mask_BT).to(last_B1D.dtype)


class TimeMix(nn.Module):
    """Attention with decay w = exp(-exp(decay)) and bonus u."""

    def __init__(self, config: "RWKV.Config", depth: float) -> None:
        super().__init__()
        d, self.heads = config.width, config.heads
        channel_D, slope = torch.arange(d) / d, 1 - depth * (config.layers - 1) / config.layers
        k_D, v_D, rg_D = channel_D**slope, channel_D**slope + 0.3 * depth, channel_D ** (0.5 * slope)
        self.mix_4D = nn.Parameter(torch.stack([rg_D, k_D, v_D, rg_D]))
        along_D = torch.arange(d) / max(d - 1, 1)
        zigzag_D = ((torch.arange(d) + 1) % 3 - 1) * 0.1
        self.decay_HK = nn.Parameter((-6 + 5 * along_D ** (0.7 + 1.3 * depth)).unflatten(0, (config.heads, -1)))
        self.bonus_HK = nn.Parameter((depth * (1 - along_D) + zigzag_D).unflatten(0, (config.heads, -1)))
        self.receptance, self.key, self.value, self.gate, self.out = (nn.Linear(d, d, bias=False) for _ in range(5))
        self.norm = nn.GroupNorm(config.heads, d, config.norm_eps)

    def forward(
        self, x_BTD: Tensor, last_B1D: Tensor, memory_BHKV: Tensor, mask_BT: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = memory_BHKV.dtype
        before_BTD, last_B1D = token_shift(x_BTD, last_B1D, mask_BT)
        r, k, v, g = before_BTD.lerp(x_BTD, self.mix_4D[:, None, None]).unbind(0)  # x mu + x_{t-1} (1 - mu)
        r, k, v = (
            f(x).unflatten(-1, (self.heads, -1)) for f, x in ((self.receptance, r), (self.key, k), (self.value, v))
        )
        decay_BTHK = self.decay_HK.to(dtype).exp().neg().exp().expand_as(k)  # w = exp(-exp(decay))
        if mask_BT is not None:
            real_BT11 = mask_BT[..., None, None]
            k, decay_BTHK = k * real_BT11, decay_BTHK.where(real_BT11, 1)  # S stays as it is
        o_BTHV, memory_BHKV = decayed_attention(r, k, v, decay_BTHK, self.bonus_HK.to(dtype), memory_BHKV)
        o_BTD = (o_BTHV / DIVISOR).to(self.norm.weight.dtype).flatten(2)
        o_BTD = self.norm(o_BTD.flatten(0, 1)).view_as(o_BTD)  # each head by itself
        return self.out(o_BTD.to(x_BTD.dtype) * F.silu(self.gate(g))), last_B1D, memory_BHKV


class ChannelMix(nn.Module):
    """Feed-forward with squared relu and a sigmoid gate."""

    def __init__(self, config: "RWKV.Config", depth: float) -> None:
        super().__init__()
        slope = 1 - depth * (config.layers - 1) / config.layers
        self.mix_2D = nn.Parameter((torch.arange(config.width) / config.width).pow(slope).repeat(2, 1))
        self.key = nn.Linear(config.width, config.inner, bias=False)
        self.value = nn.Linear(config.inner, config.width, bias=False)
        self.receptance = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BTD: Tensor, last_B1D: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        before_BTD, last_B1D = token_shift(x_BTD, last_B1D, mask_BT)
        k, r = before_BTD.lerp(x_BTD, self.mix_2D[:, None, None]).unbind(0)
        return self.receptance(r).sigmoid() * self.value(self.key(k).relu().square()), last_B1D


class RWKVLayer(nn.Module):
    """Time mix and channel mix. ``depth``: 0 in the first layer, 1 in the last."""

    def __init__(self, config: "RWKV.Config", depth: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(config.width, config.norm_eps) for _ in range(2))
        self.time, self.channel = TimeMix(config, depth), ChannelMix(config, depth)
        onto_residual = (self.time.out, self.channel.value, self.channel.receptance)
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            scale = 0.1 if linear in (self.time.key, self.time.gate) else 1.0
            nn.init.orthogonal_(
                linear.weight, gain=scale * max(1.0, math.sqrt(linear.out_features / linear.in_features))
            )
            if config.zero_init and linear in onto_residual:
                nn.init.zeros_(linear.weight)

    def forward(self, rows_BTD: Tensor, state: RWKVState, mask_BT: Tensor | None = None, write: bool = True):
        rows_BTD, new = self.mix(rows_BTD, state, mask_BT)
        x_BTD = self.norm2(rows_BTD.to(self.norm2.weight.dtype))
        y_BTD, channel_B1D = self.channel(x_BTD, state.channel_B1D, mask_BT)
        return rows_BTD + y_BTD, new._replace(channel_B1D=channel_B1D) if write else state

    def advance(self, rows_BTD: Tensor, state: RWKVState) -> RWKVState:
        rows_BTD, new = self.mix(rows_BTD, state, None)
        last_B1D = self.norm2(rows_BTD[:, -1:].to(self.norm2.weight.dtype))
        return new._replace(channel_B1D=token_shift(last_B1D, state.channel_B1D, None)[1])

    def mix(self, rows_BTD: Tensor, state: RWKVState, mask_BT: Tensor | None) -> tuple[Tensor, RWKVState]:
        """Rows with what the time mix adds, and the state after it, which the channel mix completes."""
        x_BTD = self.norm1(rows_BTD.to(self.norm1.weight.dtype))
        y_BTD, time_B1D, memory_BHKV = self.time(x_BTD, state.time_B1D, state.memory_BHKV, mask_BT)
        return rows_BTD + y_BTD, RWKVState(time_B1D, state.channel_B1D, memory_BHKV)


class RWKV(Visible, Compiled, ReadsAhead):
    """Language model of RWKV-5 layers."""

    numbers = 1

    @dataclass
    class Config(TokenRecurrentConfig):
        heads: int = 2
        """Heads of the attention. The reference's are 64 wide."""
        ff_mult: float = 3.5
        """Feed-forward width over width; the product is rounded down to a multiple of 32."""
        embedding_std: float = 1e-4
        """Standard deviation of the embeddings, which a norm follows. The reference draws them uniformly from plus and
        minus its learning rate."""
        zero_init: bool = True
        """Projections onto the residual stream start at zero."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, self, "heads")
            at_least(0, self, "embedding_std")
            if self.width % self.heads:
                raise FieldError("width", self.width, f"expected a multiple of heads={self.heads}")
            if self.inner < 1:
                raise FieldError(
                    "ff_mult", self.ff_mult, "expected a feed-forward width, ff_mult*width, of at least 32"
                )

        @property
        def inner(self) -> int:
            return int(self.width * self.ff_mult) // 32 * 32

    def __init__(self, config: "RWKV.Config") -> None:
        super().__init__()
        c = self.config = config
        layers = [RWKVLayer(c, depth=i / max(c.layers - 1, 1)) for i in range(c.layers)]
        self.decoder = Stack(c, layers, nn.LayerNorm(c.width, c.norm_eps))
        self.embed_norm = nn.LayerNorm(c.width, c.norm_eps)
        nn.init.normal_(self.decoder.tokens.weight, std=c.embedding_std)
        nn.init.orthogonal_(self.decoder.head.weight, gain=0.5 * max(1.0, math.sqrt(c.vocab_size / c.width)))

    def init_state(self, batch, device=None, dtype=None):
        c, options = self.config, state_options(self, device, dtype)
        last_B1D = torch.zeros(batch, 1, c.width, **options)
        memory_BHKV = torch.zeros(batch, c.heads, c.width // c.heads, c.width // c.heads, **options)
        return tuple(RWKVState(last_B1D, last_B1D, memory_BHKV) for _ in self.layers)

    def embed(self, ids_BT, write=True):
        return at_least_single(self.embed_norm(self.decoder.tokens(ids_BT)))

    def uncompiled(self):
        return compiled.missing()

    def parts(self, state):
        return {"S": tuple(layer.memory_BHKV for layer in state)}
