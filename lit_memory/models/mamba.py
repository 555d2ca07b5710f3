"""Mamba: selective state spaces.

Paper:     Gu and Dao 2023, Mamba: linear-time sequence modeling with selective state spaces, arXiv 2312.00752, section
           3 (algorithm 2, eq. 2a, 2b and 4, figure 3); as the baseline of arXiv 2407.04841. The scan is in
           ``memory/scan.py``.
Reference: github.com/state-spaces/mamba, ``Mamba`` with its pure torch path, and Hugging Face's ``MambaForCausalLM``
    (spec 8).

A layer is one gated block on a residual stream: a short convolution over time, then the state-space model whose Delta,
B and C depend on the token, then the gate. There is no attention and no feed-forward.

Deviations
1. Every segment starts from a state, so that any segmentation equals one pass. The reference accepts a state for one
   token at a time only (arXiv 2407.04841 reports this limit), and Hugging Face's code drops it before a second segment
   of several tokens.
2. The state holds the last taps-1 inputs of the convolution; the reference holds one more, which it never reads.
3. Masked tokens are skipped: they change neither the convolution nor the state. Hugging Face zeroes them, which is the
   same for padding on the left.
4. Delta starts log-uniform and B is discretised by Euler's rule, both as in the reference (paper: uniform; zero-order
   hold).

Shape suffixes: B batch, T tokens, J kept inputs (taps-1), S kept inputs and then tokens, D width, E channels, N states,
R rank of Delta.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.memory import compiled
from lit_memory.memory.scan import selective_scan
from lit_memory.models.parts import causal_conv
from lit_memory.models.plain import is_plain
from lit_memory.models.token_recurrent import ReadsAhead, Stack, TokenRecurrentConfig
from lit_memory.recurrence import Compiled, NoWeightDecay, Visible, full_precision, state_options
from lit_memory.util.checks import at_least

DELTA = (1e-3, 0.1)
"""Range of Delta at init (section 3.6), in which it is log-uniform."""


@torch.no_grad()
def draw_delta_(bias: Tensor) -> None:
    """Biases whose softplus is log-uniform in ``DELTA``."""
    low, high = map(math.log, DELTA)
    delta = nn.init.uniform_(bias, low, high).exp()
    bias.copy_(delta + (-torch.expm1(-delta)).log())  # softplus^-1


class MambaState(NamedTuple):
    """The last inputs of the convolution, and the state-space model's state."""

    conv_BJE: Tensor
    ssm_BEN: Tensor


class MambaLayer(nn.Module):
    """Norm, block of figure 3, residual."""

    def __init__(self, config: "Mamba.Config") -> None:
        super().__init__()
        c = self.config = config
        self.norm = nn.RMSNorm(c.width, c.norm_eps)
        self.in_proj = nn.Linear(c.width, 2 * c.channels, bias=False)
        self.conv1d = nn.Conv1d(c.channels, c.channels, c.conv_taps, groups=c.channels)
        self.x_proj = nn.Linear(c.channels, c.rank + 2 * c.state_dim, bias=False)
        self.dt_proj = nn.Linear(c.rank, c.channels)
        self.A_log = nn.Parameter(
            torch.arange(1.0, c.state_dim + 1).log().repeat(c.channels, 1)
        )  # S4D-real: A_n = -n (section 3.6)
        self.D = nn.Parameter(torch.ones(c.channels))
        self.out_proj = nn.Linear(c.channels, c.width, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Torch's init for projections, the last one divided by sqrt(layers); Delta of a zero input is in ``DELTA``."""
        self.out_proj.weight.div_(math.sqrt(self.config.layers))
        nn.init.uniform_(self.dt_proj.weight, -(self.config.rank**-0.5), self.config.rank**-0.5)
        draw_delta_(self.dt_proj.bias)

    def forward(self, rows_BTD: Tensor, state: MambaState, mask_BT: Tensor | None = None, write: bool = True):
        y_BTE, gate_BTE, new = self.mix(rows_BTD, state, mask_BT)
        return rows_BTD + self.out_proj(y_BTE.to(gate_BTE.dtype) * F.silu(gate_BTE)), new if write else state

    def advance(self, rows_BTD: Tensor, state: MambaState) -> MambaState:
        return self.mix(rows_BTD, state, None)[2]

    def mix(self, rows_BTD: Tensor, state: MambaState, mask_BT: Tensor | None) -> tuple[Tensor, Tensor, MambaState]:
        """Outputs of the recurrence, their gate, (B, T, E) each, and the state after the rows."""
        x_BTE, gate_BTE = self.in_proj(self.norm(rows_BTD.to(self.norm.weight.dtype))).chunk(2, dim=-1)
        x_BTE, conv_BJE = causal_conv(self.conv1d, x_BTE, state.conv_BJE, mask_BT)
        y_BTE, ssm_BEN = self.ssm(F.silu(x_BTE), state.ssm_BEN, mask_BT)
        return y_BTE, gate_BTE, MambaState(conv_BJE, ssm_BEN)

    def ssm(self, x_BTE: Tensor, state_BEN: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Algorithm 2 in the state's precision: outputs (B, T, E) and the state after the last token."""
        c, dtype = self.config, state_BEN.dtype
        delta_BTR, B_BTN, C_BTN = self.x_proj(x_BTE).split([c.rank, c.state_dim, c.state_dim], dim=-1)
        delta_BTE = F.softplus(self.delta(delta_BTR, dtype))
        if mask_BT is not None:
            delta_BTE = delta_BTE * mask_BT.unsqueeze(-1)  # Delta = 0 leaves the state as it is
        A_EN = -self.A_log.to(dtype).exp()
        with full_precision(x_BTE.device):
            y_BTE, state_BEN = selective_scan(x_BTE, delta_BTE, A_EN, B_BTN, C_BTN, state_BEN)  # eq. 2a, 2b, 4
        return y_BTE + self.D.to(dtype) * x_BTE, state_BEN

    def delta(self, delta_BTR: Tensor, dtype: torch.dtype) -> Tensor:
        """The projection to Delta, before its softplus, (B, T, E). Its bias is added in full precision."""
        if not is_plain(self.dt_proj):
            return self.dt_proj(delta_BTR).to(dtype)
        return F.linear(delta_BTR, self.dt_proj.weight).to(dtype) + self.dt_proj.bias.to(dtype)


class Mamba(Visible, Compiled, NoWeightDecay, ReadsAhead):
    """Language model of Mamba layers."""

    numbers = 1

    @dataclass
    class Config(TokenRecurrentConfig):
        state_dim: int = 16
        """N, states per channel (the script for associative retrieval has 32)."""
        expand: int = 2
        """Channels over width."""
        conv_taps: int = 4
        dt_rank: int = 0
        """R, rank of the projection to Delta; 0 is ceil(width / 16)."""
        tie_embeddings: bool = True
        """Output head = token embedding."""
        embedding_std: float = 0.02
        wd_all: bool = True
        """Weight decay for all parameters, as in the scripts of arXiv 2407.04841. Without: none for A, D and the bias
        of Delta (upstream: none for A and D)."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, self, "state_dim", "expand", "conv_taps")
            at_least(0, self, "dt_rank", "embedding_std")

        @property
        def channels(self) -> int:
            return self.expand * self.width

        @property
        def rank(self) -> int:
            return self.dt_rank or -(-self.width // 16)

    def __init__(self, config: "Mamba.Config") -> None:
        super().__init__()
        self.config = config
        layers = [MambaLayer(config) for _ in range(config.layers)]
        self.decoder = Stack(config, layers, nn.RMSNorm(config.width, config.norm_eps))
        nn.init.normal_(self.decoder.tokens.weight, std=config.embedding_std)
        if config.tie_embeddings and not config.inputs:
            self.decoder.head.weight = self.decoder.tokens.weight

    @property
    def no_weight_decay(self):
        spared = () if self.config.wd_all else (".A_log", ".D", ".dt_proj.bias")
        return {name for name, _ in self.named_parameters() if name.endswith(spared)}

    def uncompiled(self):
        return compiled.missing()

    def init_state(self, batch, device=None, dtype=None):
        c, options = self.config, state_options(self, device, dtype)
        conv_BJE = torch.zeros(batch, c.conv_taps - 1, c.channels, **options)
        return tuple(MambaState(conv_BJE, torch.zeros(batch, c.channels, c.state_dim, **options)) for _ in self.layers)

    def parts(self, state):
        return {"h": tuple(layer.ssm_BEN for layer in state)}
