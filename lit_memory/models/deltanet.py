"""DeltaNet and Gated DeltaNet: linear attention that replaces what its memory holds under a key.

Paper:     Yang et al. 2024, Parallelizing linear transformers with the delta rule over sequence length, arXiv
           2406.06484, section 3.3 and figure 2 (DeltaNet); Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks:
           improving Mamba2 with delta rule, arXiv 2412.06464, section 3 and figure 1 (Gated DeltaNet). The recurrence,
           its equations and its WY form are in ``memory/delta.py``.
Reference: github.com/fla-org/flash-linear-attention at 0315a70e, ``layers/delta_net.py``, ``layers/gated_deltanet.py``
    and ``models/delta_net``.

A layer is the delta rule and a gated feed-forward, both on a residual stream. Queries, keys and values go through a
short convolution over time and SiLU; queries and keys of every head get unit length, queries times K^-1/2. A sigmoid
gives beta. The output of every head is normalised. Gated DeltaNet adds a decay of the whole memory,
a_t = exp(-exp(A_log) softplus(x_t w + dt_bias)) for each head as in Mamba2, and a gate on the output, and its values
are wider than its keys.

Deviations
1. The width of the feed-forward is not rounded up to a multiple of 256, which would be most of it in a small model.
2. The projections are one matrix, and the convolutions of queries, keys and values one convolution; it is the same.
3. The state holds the last taps-1 inputs of the convolution; the reference holds one more, which it never reads.
4. Masked tokens are skipped: they change neither the convolution nor the memory.
5. The reference's hybrids with attention, grouped value heads, and its other feature maps, norms and choices without
   convolution or beta are left out.

Shape suffixes: B batch, T tokens, J kept inputs (taps-1), C channels of queries, keys and values together, D width, H
heads, K key width of a head, V value width of a head, E = H V.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.memory.delta import delta_rule
from lit_memory.models.mamba import draw_delta_
from lit_memory.models.parts import FeedForward, RMSNorm, causal_conv, l2_normalized
from lit_memory.models.token_recurrent import ReadsAhead, Stack, TokenRecurrentConfig
from lit_memory.recurrence import NoWeightDecay, Visible, full_precision, state_options
from lit_memory.util.checks import FieldError, at_least


class DeltaState(NamedTuple):
    """The last inputs of the convolution, and the memory."""

    conv_BJC: Tensor
    memory_BHKV: Tensor


@dataclass
class DeltaConfig(TokenRecurrentConfig):
    """Sizes of both architectures. Defaults: those of the reference, but for ``layers``, ``width`` and ``heads``."""

    heads: int = 2
    expand_k: float = 1.0
    """Width of all keys over the model's."""
    expand_v: float = 1.0
    """Width of all values over the model's."""
    conv_taps: int = 4
    negative_eigenvalues: bool = False
    """beta = 2 sigmoid, so that I - beta k k^T can flip a direction (Grazzi et al. 2024, arXiv 2411.12537)."""
    output_gate: bool = False
    """Multiply the normalised output by SiLU of a projection."""
    ff_mult: float = 8 / 3
    """Width of the gated feed-forward over the model's, the product rounded; 0: no feed-forward."""
    tie_embeddings: bool = False
    """Output head = token embedding."""
    init_std: float = 0.02
    """Standard deviation of projections and convolutions at init."""
    embedding_std: float = 0.02
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "heads", "conv_taps")
        at_least(0, self, "ff_mult", "init_std", "embedding_std")
        for name, head_width in (("expand_k", self.key_width), ("expand_v", self.value_width)):
            if head_width < 1 or not math.isclose(getattr(self, name) * self.width, self.heads * head_width):
                expected = f"expected a share of width={self.width} that heads={self.heads} can split evenly"
                raise FieldError(name, getattr(self, name), expected)

    @property
    def key_width(self) -> int:
        """K, of a head."""
        return round(self.expand_k * self.width / self.heads)

    @property
    def value_width(self) -> int:
        """V, of a head."""
        return round(self.expand_v * self.width / self.heads)

    @property
    def channels(self) -> int:
        """C: queries, keys and values of all heads."""
        return self.heads * (2 * self.key_width + self.value_width)

    @property
    def ff_width(self) -> int:
        return round(self.ff_mult * self.width)


class DeltaLayer(nn.Module):
    """Norm and delta rule, then norm and feed-forward, on a residual stream. With ``decays`` the memory decays."""

    def __init__(self, config: DeltaConfig, decays: bool) -> None:
        super().__init__()
        c = self.config = config
        gates = c.heads * c.value_width if c.output_gate else 0
        self.sizes = [c.channels, c.heads, c.heads if decays else 0, gates]
        self.norm = RMSNorm(c.width, c.norm_eps)
        self.in_proj = nn.Linear(c.width, sum(self.sizes), bias=False)
        self.conv1d = nn.Conv1d(c.channels, c.channels, c.conv_taps, groups=c.channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(c.heads)) if decays else None
        self.dt_bias = nn.Parameter(torch.empty(c.heads)) if decays else None
        self.out_norm = RMSNorm(c.value_width, c.norm_eps)
        self.out_proj = nn.Linear(c.heads * c.value_width, c.width, bias=False)
        self.feed_forward = FeedForward(c) if c.ff_width else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Projections and convolution normal; rates of decay uniform up to 16, at steps as in Mamba."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                nn.init.normal_(module.weight, std=self.config.init_std)
        if self.A_log is not None and self.dt_bias is not None:
            nn.init.uniform_(self.A_log, 0, 16).log_()
            draw_delta_(self.dt_bias)

    def forward(self, rows_BTD: Tensor, state: DeltaState, mask_BT: Tensor | None = None, write: bool = True):
        o_BTHV, gate_BTE, new = self.mix(rows_BTD, state, mask_BT)
        o_BTE = self.out_norm(o_BTHV).to(gate_BTE.dtype).flatten(2)
        if self.config.output_gate:
            o_BTE = o_BTE * F.silu(gate_BTE)
        rows_BTD = rows_BTD + self.out_proj(o_BTE)
        if self.feed_forward is not None:
            rows_BTD = rows_BTD + self.feed_forward(rows_BTD)
        return rows_BTD, new if write else state

    def advance(self, rows_BTD: Tensor, state: DeltaState) -> DeltaState:
        return self.mix(rows_BTD, state, None)[2]

    def mix(self, rows_BTD: Tensor, state: DeltaState, mask_BT: Tensor | None) -> tuple[Tensor, Tensor, DeltaState]:
        """What the memory answers, (B, T, H, V), its gate, and the state after the rows."""
        qkv_BTC, beta_BTH, step_BTH, gate_BTE = self.in_proj(self.norm(rows_BTD)).split(self.sizes, dim=-1)
        qkv_BTC, conv_BJC = causal_conv(self.conv1d, qkv_BTC, state.conv_BJC, mask_BT)
        o_BTHV, memory_BHKV = self.recur(F.silu(qkv_BTC), beta_BTH, step_BTH, state.memory_BHKV, mask_BT)
        return o_BTHV, gate_BTE, DeltaState(conv_BJC, memory_BHKV)

    def recur(
        self, qkv_BTC: Tensor, beta_BTH: Tensor, step_BTH: Tensor, memory_BHKV: Tensor, mask_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The delta rule: outputs (B, T, H, V) and the memory after the last token, in its precision."""
        c, dtype = self.config, memory_BHKV.dtype
        sizes = [c.key_width, c.key_width, c.value_width]
        q, k, v = (
            part.unflatten(-1, (c.heads, -1)) for part in qkv_BTC.split([c.heads * size for size in sizes], dim=-1)
        )
        beta_BTH = beta_BTH.to(dtype).sigmoid() * (2 if c.negative_eigenvalues else 1)
        log_decay_BTH = None
        if self.A_log is not None and self.dt_bias is not None:
            step_BTH = F.softplus(step_BTH.to(dtype) + self.dt_bias.to(dtype))
            log_decay_BTH = -self.A_log.to(dtype).exp() * step_BTH
        if mask_BT is not None:
            beta_BTH = beta_BTH * mask_BT.unsqueeze(-1)
            log_decay_BTH = None if log_decay_BTH is None else log_decay_BTH * mask_BT.unsqueeze(-1)
        with full_precision(qkv_BTC.device):
            q, k = (l2_normalized(x.to(dtype)).to(x.dtype) for x in (q, k))
            return delta_rule(q * c.key_width**-0.5, k, v, beta_BTH, memory_BHKV, log_decay_BTH)


class DeltaModel(Visible, NoWeightDecay, ReadsAhead):
    """Shared base of both: the stack of layers, and the initial state."""

    decays: ClassVar[bool]

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        c = self.config = config
        layers = [DeltaLayer(c, self.decays) for _ in range(c.layers)]
        self.decoder = Stack(c, layers, RMSNorm(c.width, c.norm_eps))
        nn.init.normal_(self.decoder.tokens.weight, std=c.embedding_std)
        nn.init.normal_(self.decoder.head.weight, std=c.init_std)
        if c.tie_embeddings and not c.inputs:
            self.decoder.head.weight = self.decoder.tokens.weight

    @property
    def no_weight_decay(self):
        return {name for name, _ in self.named_parameters() if name.endswith((".A_log", ".dt_bias"))}

    def init_state(self, batch, device=None, dtype=None):
        c, options = self.config, state_options(self, device, dtype)
        conv_BJC = torch.zeros(batch, c.conv_taps - 1, c.channels, **options)
        memory_BHKV = torch.zeros(batch, c.heads, c.key_width, c.value_width, **options)
        return tuple(DeltaState(conv_BJC, memory_BHKV) for _ in self.layers)

    def parts(self, state):
        return {"S": tuple(layer.memory_BHKV for layer in state)}


class DeltaNet(DeltaModel):
    """Language model of layers whose memory the delta rule writes."""

    decays = False

    @dataclass
    class Config(DeltaConfig):
        pass


class GatedDeltaNet(DeltaModel):
    """DeltaNet with a decay of the memory and a gate on the output."""

    decays = True

    @dataclass
    class Config(DeltaConfig):
        expand_k: float = 0.75
        expand_v: float = 1.5
        output_gate: bool = True
