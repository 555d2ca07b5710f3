"""The neural memory in closed form: one chunk of tokens at a time.

Paper:     Behrouz et al. 2025, Titans, arXiv 2501.00663, section 3.2; the closed forms are those of spec 10.3.
           Equations (1) to (4), the deviations and stability are in ``neural.py``.

``by_chunk`` computes (1) to (4) without the weights of any token but the last of a chunk. (2) and (3) are linear in u,
and u of a layer is the outer product of what enters the layer, a_j, and the gradient at its output, g_j. So

(5) M_t = beta_t M + f_t S - sum_{j<=t} G_tj a_j g_j^T  and  S_t = mu_t S - sum_{j<=t} c_tj a_j g_j^T, and for a query x
    at that layer
(6) x M_t = beta_t (x M) + f_t (x S) - sum_{j<=t} G_tj (x . a_j) g_j^T

with M, S at the start of the chunk. All coefficients are products of gates and sums of such products. With R(g)_tj the
product of the gates g of the tokens j+1..t, and from the start of the chunk for j = 0,

(7) beta_t = R(1 - alpha)_t0,  mu_t = R(eta)_t0,  c_tj = R(eta)_tj theta_j,  f = R(1 - alpha) mu,  G = R(1 - alpha) c

``coefficients`` computes (7) for all chunks at once, in the form that (5) and (6) have in ``neural_node.py``, which
goes from chunk to chunk. ``neural_exact.py`` does where every token has a surprise of its own.

Shape suffixes: X samples times heads, N chunks, T tokens (of a chunk, or of all), K width of keys and queries, V width
of values, I and O inputs and outputs of a layer of the memory, J parts of the state (M, and S with momentum).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.memory.neural import Gates, NeuralState, Read
from lit_memory.memory.neural_by_hand import Coefficients
from lit_memory.memory.neural_exact import exact_chunks
from lit_memory.memory.neural_node import Form, chunks

FLOOR = -800.0
"""Smallest logarithm of a gate: its exponential is 0 in every precision."""


class _Ratios(torch.autograd.Function):
    """exp(s_t - s_j) for j <= t, else 0, (X, N, T, T), of sums s in fp64. One node of the graph in place of five."""

    generate_vmap_rule = True

    @staticmethod
    def forward(sums_XNT: Tensor, dtype: torch.dtype) -> Tensor:
        return (sums_XNT.unsqueeze(-1) - sums_XNT.unsqueeze(-2)).to(dtype).exp_().tril()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ratios_XNTT,) = ctx.saved_tensors
        weighted_XNTT = grads[0] * ratios_XNTT
        return (weighted_XNTT.sum(-1) - weighted_XNTT.sum(-2)).double(), None


def products(log_XNT: Tensor) -> tuple[Tensor, Tensor]:
    """R of (7): products of the gates j+1..t, (X, N, T, T) with 0 where j > t, and of the gates 1..t, (X, N, T, 1).

    They are exponentials of differences of sums, which fp64 keeps exact where such a difference is small. Nothing is
    divided.
    """
    ones_TT = torch.ones(log_XNT.shape[-1], log_XNT.shape[-1], dtype=torch.float64, device=log_XNT.device)
    sums = log_XNT.double().clamp(min=FLOOR) @ ones_TT.triu()  # cumsum has no deterministic form on CUDA
    return _Ratios.apply(sums, log_XNT.dtype), sums.to(log_XNT.dtype).exp().unsqueeze(-1)


def coefficients(gates: Gates, momentum: bool, real_XNT: Tensor | None = None) -> Coefficients:
    """(7) from gates (X, N, T). ``real_XNT``: False at tokens that leave M and S unchanged; default: all are real."""
    log_keep, log_eta, theta = gates if real_XNT is None else (gate.masked_fill(~real_XNT, 0) for gate in gates)
    minus_theta = -theta.unsqueeze(-2)
    if not momentum:
        keep_XNTT, beta_XNT1 = products(log_keep)
        minus_G_XNTT = keep_XNTT * minus_theta
        return Coefficients(beta_XNT1, minus_G_XNTT, minus_G_XNTT[..., -1:, :].mT, beta_XNT1[..., -1:, :])
    ratios, firsts = products(torch.stack([log_keep, log_eta]))  # both at once: half the operations
    (keep_XNTT, eta_XNTT), (beta_XNT1, mu_XNT1) = ratios.unbind(), firsts.unbind()
    if real_XNT is not None:
        keep_XNTT = keep_XNTT * real_XNT.unsqueeze(-2)  # M takes S in at real tokens only
    minus_G_XNTT = (keep_XNTT @ eta_XNTT) * minus_theta
    minus_c_XN1T = eta_XNTT[..., -1:, :] * minus_theta
    read_XNTJ = torch.cat([beta_XNT1, keep_XNTT @ mu_XNT1], dim=-1)
    write_XNTJ = torch.cat([minus_G_XNTT[..., -1:, :], minus_c_XN1T], dim=-2).mT
    last_mu = F.pad(mu_XNT1[..., -1:, :], (1, 0))  # S takes nothing of M in
    return Coefficients(read_XNTJ, minus_G_XNTT, write_XNTJ, torch.cat([read_XNTJ[..., -1:, :], last_mu], dim=-2))


def by_chunk(
    state: NeuralState,
    q_XTK: Tensor,
    k_XTK: Tensor,
    v_XTV: Tensor,
    gates: Gates,
    chunk: int,
    *,
    activation: str = "silu",
    residual: bool = False,
    normalized: bool = False,
    exact: bool = False,
    real_XT: Tensor | None = None,
    segment: int | None = None,
    write: bool = True,
) -> Read:
    """(1) to (4) chunk by chunk, by (5) and (6), from a state and the gates of every token.

    chunk: tokens that take their surprise at the same weights; the last chunk may be shorter.
    activation: "silu" or "gelu".
    residual: M(x) = x + the network.
    normalized: no step corrects more than the share theta of its error.
    exact: every token takes its surprise at the weights right before it, and the length of a chunk is speed alone. Only
        for a memory of one layer, with keys of at most unit length, which ``normalized`` leaves as it is.
    real_XT: False at tokens that leave the memory unchanged; their outputs are arbitrary. They must be at the end.
        Default: all are real.
    segment: tokens after which a new chunk begins, whatever is left of the last one. They divide T. Default: T.
    write: without, the state that is returned is the one that was given.
    """
    tokens, segment = q_XTK.shape[1], segment or q_XTK.shape[1]
    target_XTV = v_XTV - k_XTK if residual else v_XTV
    parts = into_chunks((q_XTK, k_XTK, target_XTV, *gates), real_XT, segment, min(chunk, segment))
    q, k, target, log_keep, log_eta, theta, real_XNT = parts
    table = coefficients(Gates(log_keep, log_eta, theta), bool(state.S), real_XNT)
    passed = (exact_chunks if exact else chunks)(Form(activation, normalized, write), state, q, k, target, table)
    o_XTV = whole(passed.o_XNTV, tokens, segment)
    scale_XT1 = None if passed.scale_XNT1 is None else whole(passed.scale_XNT1, tokens, segment)
    new = state if passed.state is None else passed.state
    return Read(o_XTV + q_XTK if residual else o_XTV, new, scale_XT1)


def whole(t_XNT: Tensor, tokens: int, segment: int) -> Tensor:
    """(X, N, T, ...) of chunks as (X, tokens, ...), without what stands behind the segments."""
    return t_XNT.flatten(1, 2).unflatten(1, (tokens // segment, -1))[:, :, :segment].flatten(1, 2)


def into_chunks(tensors: tuple[Tensor, ...], real_XT: Tensor | None, segment: int, chunk: int) -> list[Any]:
    """Tensors (X, T, ...) and the mask as (X, N, chunk, ...), with tokens behind every segment that are not real."""
    missing = -segment % chunk
    if missing and real_XT is None:
        real_XT = torch.ones(tensors[0].shape[:2], dtype=torch.bool, device=tensors[0].device)

    def cut(t_XT: Tensor) -> Tensor:
        if missing:
            t_XT = F.pad(t_XT.unflatten(1, (-1, segment)), (0, 0) * (t_XT.dim() - 2) + (0, missing)).flatten(1, 2)
        return t_XT.unflatten(1, (-1, chunk))

    return [*map(cut, tensors), None if real_XT is None else cut(real_XT)]
