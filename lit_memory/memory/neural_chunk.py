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

Shape suffixes: X samples times heads, N chunks, T tokens (of a chunk, or of all), K width of keys and queries, V width
of values, I and O inputs and outputs of a layer of the memory.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.memory.neural import ACTIVATIONS, Gates, NeuralState, Read, shortening, surprise

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


class Coefficients(NamedTuple):
    """Coefficients of (5) and (6) for every token t; minus signs are included.

    mu and minus_c are those of the last token, as S_t is needed there alone. f, mu and minus_c are None without
    momentum. The shapes are those of N chunks; ``chunks`` leaves N out.
    """

    beta_XNT1: Tensor
    minus_G_XNTT: Tensor
    f_XNT1: Tensor | None = None
    mu_XN11: Tensor | None = None
    minus_c_XNT1: Tensor | None = None

    def chunks(self) -> list[Self]:
        """The coefficients of every chunk."""
        count = self.beta_XNT1.shape[1]
        parts = [[None] * count if t is None else t.unbind(1) for t in self]
        return [type(self)(*chunk) for chunk in zip(*parts, strict=True)]

    def scaled(self, scale_XT1: Tensor) -> Self:
        """The coefficients of one chunk whose u_t are multiplied by these factors."""
        minus_c = None if self.minus_c_XNT1 is None else self.minus_c_XNT1 * scale_XT1
        return self._replace(minus_G_XNTT=self.minus_G_XNTT * scale_XT1.mT, minus_c_XNT1=minus_c)


def coefficients(gates: Gates, momentum: bool, real_XNT: Tensor | None = None) -> Coefficients:
    """(7) from gates (X, N, T). ``real_XNT``: False at tokens that leave M and S unchanged; default: all are real."""
    log_keep, log_eta, theta = gates if real_XNT is None else (gate.masked_fill(~real_XNT, 0) for gate in gates)
    keep_XNTT, beta_XNT1 = products(log_keep)
    minus_theta = -theta.unsqueeze(-2)
    if not momentum:
        return Coefficients(beta_XNT1, keep_XNTT * minus_theta)
    eta_XNTT, mu_XNT1 = products(log_eta)
    if real_XNT is not None:
        keep_XNTT = keep_XNTT * real_XNT.unsqueeze(-2)  # M takes S in at real tokens only
    minus_G_XNTT = (keep_XNTT @ eta_XNTT) * minus_theta
    minus_c_XNT1 = (eta_XNTT[..., -1:, :] * minus_theta).mT
    return Coefficients(beta_XNT1, minus_G_XNTT, keep_XNTT @ mu_XNT1, mu_XNT1[..., -1:, :], minus_c_XNT1)


class _ReadAndWrite(torch.autograd.Function):
    """One layer on one chunk as one node of the graph: less time and half the memory of the plain operations.

    (M, S, x, a, g, *coefficients) -> (x M_t of the queries x (6), M and S after the last token (5), and x a^T). S and
    its three coefficients may be None. The backward may be differentiated.
    """

    @staticmethod
    def forward(M, S, x, a, g, beta, minus_G, f, mu, minus_c):
        y = torch.bmm(x, M).mul_(beta)
        M = M * beta[:, -1:]
        if S is not None:
            y.addcmul_(torch.bmm(x, S), f)
            M.addcmul_(S, f[:, -1:])
            S = (S * mu).baddbmm_(a.mT, g * minus_c)
        scores = torch.bmm(x, a.mT)
        y.baddbmm_(scores * minus_G, g)
        return y, M.baddbmm_(a.mT, g * minus_G[:, -1].unsqueeze(-1)), S, scores

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs, output[3])

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor):
        M, S, x, a, g, beta, minus_G, f, mu, minus_c, scores = ctx.saved_tensors
        dy, dM_new, dS_new, dscores = outputs
        last = minus_G[:, -1].unsqueeze(-1)  # the last token's row makes the new M
        dread = torch.bmm(dy, g.mT)
        dscores, dG = torch.addcmul(dscores, dread, minus_G), dread * scores
        xdM, adM = torch.bmm(dy, M.mT), torch.bmm(a, dM_new)
        dx = (xdM * beta).baddbmm_(dscores, a)
        dM = (dM_new * beta[:, -1:]).baddbmm_(x.mT, dy * beta)
        da = torch.bmm(dscores.mT, x).baddbmm_(g * last, dM_new.mT)
        dg = (adM * last).baddbmm_((scores * minus_G).mT, dy)
        dbeta = (x * xdM).sum(-1, keepdim=True)
        dbeta[:, -1:] += (M * dM_new).sum((1, 2), keepdim=True)
        dG[:, -1] += (g * adM).sum(-1)
        if S is None:
            return dM, None, dx, da, dg, dbeta, dG, None, None, None
        xdS, adS = torch.bmm(dy, S.mT), torch.bmm(a, dS_new)
        dx.addcmul_(xdS, f)
        dS = (dM_new * f[:, -1:]).addcmul_(dS_new, mu).baddbmm_(x.mT, dy * f)
        da.baddbmm_(g * minus_c, dS_new.mT)
        dg.addcmul_(adS, minus_c)
        df = (x * xdS).sum(-1, keepdim=True)
        df[:, -1:] += (S * dM_new).sum((1, 2), keepdim=True)
        dmu, dc = (S * dS_new).sum((1, 2), keepdim=True), (g * adS).sum(-1, keepdim=True)
        return dM, dS, dx, da, dg, dbeta, dG, df, dmu, dc

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor | None):
        """A further batch dimension is more samples, as functorch has no rule for the operations in place."""
        groups = [
            t if t is None else t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(inputs, in_dims, strict=True)
        ]
        outputs = _ReadAndWrite.apply(*(None if t is None else t.flatten(0, 1) for t in groups))
        outputs = tuple(None if t is None else t.unflatten(0, (info.batch_size, -1)) for t in outputs)
        return outputs, tuple(None if t is None else 0 for t in outputs)


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
    real_XT: Tensor | None = None,
) -> Read:
    """(1) to (4) chunk by chunk, by (5) and (6), from a state and the gates of every token.

    chunk: tokens that take their surprise at the same weights; the last chunk may be shorter.
    activation: "silu" or "gelu".
    residual: M(x) = x + the network.
    normalized: no step corrects more than the share theta of its error.
    real_XT: False at tokens that leave the memory unchanged; their outputs are arbitrary. They must be at the end.
        Default: all are real.
    """
    tokens = q_XTK.shape[1]
    cut, cut_gates, real_XNT = into_chunks((q_XTK, k_XTK, v_XTV), gates, real_XT, min(chunk, tokens))
    table = coefficients(cut_gates, bool(state.S), real_XNT)
    outputs, scales = [], []
    for q, k, v, row in zip(*(t.unbind(1) for t in cut), table.chunks(), strict=True):
        output, state, scale = one_chunk(state, q, k, v, row, activation, residual, normalized)
        outputs.append(output)
        scales.append(scale)
    scale_XT1 = torch.cat(scales, dim=1)[:, :tokens] if normalized else None
    return Read(torch.cat(outputs, dim=1)[:, :tokens], state, scale_XT1)


def into_chunks(
    tensors: tuple[Tensor, ...], gates: Gates, real_XT: Tensor | None, chunk: int
) -> tuple[list[Tensor], Gates, Tensor | None]:
    """Tensors (X, T, ...), gates and mask cut to (X, N, chunk, ...), with tokens that are not real at the end."""
    size = tensors[0].shape[:2]
    if missing := -size[1] % chunk:
        real_XT = torch.ones(size, dtype=torch.bool, device=tensors[0].device) if real_XT is None else real_XT
        real_XT = F.pad(real_XT, (0, missing))
        tensors = tuple(F.pad(t, (0, 0, 0, missing)) for t in tensors)
        gates = Gates(*(F.pad(gate, (0, missing)) for gate in gates))
    cut = [t.unflatten(1, (-1, chunk)) for t in tensors]
    cut_gates = Gates(*(gate.unflatten(1, (-1, chunk)) for gate in gates))
    return cut, cut_gates, None if real_XT is None else real_XT.unflatten(1, (-1, chunk))


def one_chunk(
    state: NeuralState,
    q_XTK: Tensor,
    k_XTK: Tensor,
    v_XTV: Tensor,
    row: Coefficients,
    activation: str,
    residual: bool,
    normalized: bool,
) -> Read:
    """``by_chunk`` of one chunk with its coefficients."""
    inputs, grads = surprise(state.M, k_XTK, v_XTV, activation, residual)
    scale_XT1 = shortening(inputs, grads) if normalized else None
    if scale_XT1 is not None:
        row = row.scaled(scale_XT1)
    act, x, M, S = ACTIVATIONS[activation][0], q_XTK, [], []
    for layer, (W, a, g) in enumerate(zip(state.M, inputs, grads, strict=True)):
        momentum = state.S[layer] if state.S else None
        x, new_W, new_momentum, _ = _ReadAndWrite.apply(W, momentum, act(x) if layer else x, a, g, *row)
        M.append(new_W)
        if new_momentum is not None:
            S.append(new_momentum)
    return Read(x + q_XTK if residual else x, NeuralState(tuple(M), tuple(S)), scale_XT1)
