"""Titans' neural memory as a module: projections, convolution, gates, the memory, and the gated output.

Paper:     Behrouz et al. 2025, Titans: learning to memorize at test time, arXiv 2501.00663, sections 3.1 and 4.4. The
           memory's equations are in ``memory/neural.py``.
Reference: none by the authors; ``titans/models.py`` lists the deviations.

Padding is at the end of the rows, as everywhere in a ``TokenRecurrent``.

Shape suffixes: B batch, T tokens, D width, H heads of the memory, K head width, X samples times heads, I and O inputs
and outputs of a layer of the memory, J kept inputs of the convolution, S kept inputs and then new ones, C channels of
queries, keys and values together, V value width (K).
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.memory import neural
from lit_memory.memory.neural import Gates, NeuralState
from lit_memory.memory.neural_chunk import by_chunk
from lit_memory.models.parts import RMSNorm, causal_conv, fold_heads, l2_normalized, unfold_heads
from lit_memory.models.plain import is_plain
from lit_memory.recurrence import full_precision


class MemoryState(NamedTuple):
    """The last inputs of the convolution, and weights (B, H, I, O) and momentum of the memory's layers."""

    conv_BJC: Tensor
    M: tuple[Tensor, ...]
    S: tuple[Tensor, ...]


class MemoryOutput(NamedTuple):
    """Output (B, T, D) of the memory, its next state, the gates (X, T), and the factors of ``normalized`` if on."""

    out_BTD: Tensor
    state: MemoryState
    gates: Gates
    scale_XT1: Tensor | None


class NeuralMemory(nn.Module):
    """LMM(x) of section 3: norm, projections with convolution, the memory, and the gated output of section 4.4."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        c = self.config = config
        d, k = c.width, c.width // c.memory_heads
        self.norm = RMSNorm(d, c.norm_eps)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.conv1d = nn.Conv1d(3 * d, 3 * d, c.conv_taps, groups=3 * d, bias=False) if c.conv_taps else None
        self.to_gates = nn.Linear(d, 3 * c.memory_heads)
        widths = [k, *[c.memory_expand * k] * (c.memory_depth - 1), k]
        self.M = nn.ParameterList(torch.empty(c.memory_heads, i, o) for i, o in pairwise(widths))
        self.out_norm = RMSNorm(d, c.norm_eps)
        self.to_output_gate = nn.Linear(d, d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """M_0 normal, with Xavier's deviation or ``memory_std``; biases of gates by ``alpha_init`` and the others."""
        c = self.config
        for W_HIO in self.M:
            nn.init.normal_(W_HIO, std=(2 / sum(W_HIO.shape[1:])) ** 0.5 if c.memory_std is None else c.memory_std)
        for bias_H, gate in zip(self.to_gates.bias.chunk(3), (c.alpha_init, c.eta_init, c.theta_init), strict=True):
            nn.init.constant_(bias_H, math.log(gate / (1 - gate)))

    def first_state(self, **options: Any) -> MemoryState:
        """The state of one sample that has read nothing."""
        c = self.config
        M = tuple(W_HIO.unsqueeze(0).to(**options) for W_HIO in self.M)
        conv_BJC = torch.zeros(1, max(c.conv_taps - 1, 0), 3 * c.width, **options)
        return MemoryState(conv_BJC, M, tuple(torch.zeros_like(W) for W in M) if c.momentum else ())

    def queries_keys_values(self, qkv_BTC: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Queries and keys of unit length, and values, (X, T, K) each, in the state's precision (section 4.4)."""
        q, k, v = (fold_heads(part, self.config.memory_heads).to(dtype) for part in F.silu(qkv_BTC).chunk(3, dim=-1))
        return [l2_normalized(q), l2_normalized(k), v]

    def gates(self, x_BTD: Tensor, dtype: torch.dtype, segment: int | None = None) -> Gates:
        """The gates of every row; with ``per_chunk_gates`` a chunk has those of its first row."""
        c = self.config
        if c.per_chunk_gates:
            row_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
            x_BTD = x_BTD[:, row_T - row_T % (segment or len(row_T)) % c.chunk]
        alpha, eta, theta = (
            fold_heads(part, c.memory_heads).squeeze(-1).to(dtype) for part in self.to_gates(x_BTD).chunk(3, dim=-1)
        )
        rate = c.theta_limit * theta.sigmoid() * (1 if c.half_loss else 2)
        if c.damped and c.momentum:
            rate = rate * eta.neg().sigmoid()  # 1 - eta
        return Gates(F.logsigmoid(-alpha) if c.forget else torch.zeros_like(alpha), F.logsigmoid(eta), rate)

    def own_queries(self, x_BTD: Tensor, state: MemoryState) -> Tensor:
        """Queries (X, T, K), for ``recall``, of rows that are already normalised, without convolution."""
        width = self.config.width
        queries = F.linear(x_BTD, self.qkv.weight[:width]) if is_plain(self.qkv) else self.qkv(x_BTD)[..., :width]
        with full_precision(x_BTD.device):
            return l2_normalized(fold_heads(F.silu(queries), self.config.memory_heads).to(state.M[0].dtype))

    def recall(self, q_XTK: Tensor, state: MemoryState, dtype: torch.dtype) -> Tensor:
        """M(q) at the state's weights, (B, T, D), in this precision."""
        c = self.config
        with full_precision(q_XTK.device):
            M = tuple(W.flatten(0, 1) for W in state.M)
            recalled_XTK = neural.recall(M, q_XTK, c.memory_activation, c.memory_residual)
            return unfold_heads(recalled_XTK, c.memory_heads).to(dtype)

    def forward(
        self,
        rows_BTD: Tensor,
        state: MemoryState,
        mask_BT: Tensor | None = None,
        causal: bool = True,
        segment: int | None = None,
        write: bool = True,
        project: bool = True,
    ) -> MemoryOutput:
        """Read and write.

        causal: without, all rows read the memory as it was before the first one.
        segment: rows after which a new chunk begins; default: all.
        write: without, the state may lack what the last chunk writes.
        project: without, the output is only what was read, and ``output`` is left to the caller.
        """
        c, dtype = self.config, state.M[0].dtype
        x_BTD = self.norm(rows_BTD)
        qkv_BTC, conv_BJC = self.convolve(self.qkv(x_BTD), state.conv_BJC, mask_BT)
        gates = self.gates(x_BTD, dtype, segment)
        with full_precision(x_BTD.device):
            q, k, v = self.queries_keys_values(qkv_BTC, dtype)
            old = NeuralState(*(tuple(W.flatten(0, 1) for W in part) for part in (state.M, state.S)))
            form: dict[str, Any] = {"activation": c.memory_activation, "residual": c.memory_residual}
            real_XT = None if mask_BT is None else mask_BT.repeat_interleave(c.memory_heads, dim=0)
            normalized = c.normalized and c.memory_depth > 1  # it leaves a matrix with keys of unit length as it is
            cut: dict[str, Any] = {"real_XT": real_XT, "segment": segment, "write": write}
            read = by_chunk(old, q, k, v, gates, c.chunk, normalized=normalized, exact=c.exact, **form, **cut)
            o_XTK = read.o_XTV if causal else neural.recall(old.M, q, **form)
        o_BTD = unfold_heads(o_XTK, c.memory_heads)
        new = (tuple(W.unflatten(0, (-1, c.memory_heads)) for W in part) for part in read.state)
        state = MemoryState(conv_BJC, *new)
        return MemoryOutput(self.output(o_BTD, x_BTD) if project else o_BTD, state, gates, read.scale_XT1)

    def output(self, o_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        """The gated output of section 4.4. o: what was read. x: the rows, normalised."""
        gate = F.silu if self.config.output_gate == "silu" else torch.sigmoid
        return self.out(self.out_norm(o_BTD) * gate(self.to_output_gate(x_BTD)))

    def convolve(self, qkv_BTC: Tensor, kept_BJC: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Depthwise convolution over time, and the last inputs, which the next rows need."""
        if self.conv1d is None:
            return qkv_BTC, kept_BJC
        return causal_conv(self.conv1d, qkv_BTC, kept_BJC, mask_BT)
