"""Neural long-term memory of Titans as pure functions of tensors: a network whose weights are trained on the keys and
values it reads.

Paper:     Behrouz et al. 2025, Titans: learning to memorize at test time, arXiv 2501.00663, sections 3.1 and 3.2; the
           closed forms are those of spec 10.3.
Reference: none by the authors. lucidrains' titans-pytorch (compared in benchmarks/titans.py) is another algorithm: it
           reads the memory of the chunk before and has one gate a chunk.

The memory is an MLP without biases of L layers, M(x) = act(... act(x W_1) ...) W_L. For the token (q_t, k_t, v_t), with
l(M; t) = 1/2 |M(k_t) - v_t|^2 and t' the end of the chunk before the one that t lies in,

(1) u_t = grad l(M_t'; t)             its surprise (eq. 8, 12); all tokens of a chunk take it at the same weights
    (section 3.2)
(2) S_t = eta_t S_{t-1} - theta_t u_t (eq. 10, 14)
(3) M_t = (1 - alpha_t) M_{t-1} + S_t (eq. 13)
(4) o_t = M_t(q_t)                    (eq. 15), after token t was written

``by_token`` is these lines. ``by_chunk`` is the same without the weights of any token but the last of a chunk. (2) and
(3) are linear in u, and the gradient of layer l is an outer product of what enters it, a_j, and of what comes back,
    g_j. So

(5) M_t = beta_t M + f_t S - sum_{j<=t} G_tj a_j g_j^T  and  S_t = mu_t S - sum_{j<=t} c_tj a_j g_j^T, and for a query x
    at layer l
(6) x M_t = beta_t (x M) + f_t (x S) - sum_{j<=t} G_tj (x . a_j) g_j^T

with M, S at the start of the chunk. All coefficients are products of gates and sums of such products; see
``coefficients``.

Deviations
1. The loss has a factor 1/2 (eq. 12: none; the appendix: 1/2). Twice the theta is the paper's.
2. Gates arrive as logarithms of 1 - alpha and of eta, which a sigmoid gives without rounding to 0 or 1. -inf, a gate of
   exactly 0, is fine.
3. ``normalized`` and ``residual`` (M(x) = x + the network) are ours, and off by default.

Stability. Surprises of one chunk are taken at the same weights, so that T tokens with one key act as a step T times as
long. With constant gates, no such chunk map amplifies if T theta <= 1 - eta for unit keys, whatever alpha is (a memory
of one layer; tests/test_neural.py). To first order, a step corrects the share theta rho_t of the error M(k_t) - v_t,
where rho_t = |u_t|^2 / |M(k_t) - v_t|^2 is |k_t|^2 in a matrix, but grows with the weights in a deeper memory, which
diverges under the same theta where its values are a few times longer than its keys. ``normalized`` divides theta_t by
max(1, rho_t), as normalised LMS does. Then theta_t u_t is at most theta_t (|v_t| + |W_L|) long, whatever the weights,
and nothing changes while rho_t is at most 1. M = 0 is a fixed point of a memory of two or more layers: what alpha near
1 has emptied learns nothing any more.

Shape suffixes: X samples times heads, N chunks, T tokens, K width of keys and queries, V width of values, I and O
inputs and outputs of a layer of the memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

FLOOR = -800.0
"""Least logarithm of a gate: its exponential is 0 in every precision."""


class NeuralState(NamedTuple):
    """Weights (X, I, O) of every layer of the memory, and their momentum: the same shapes, or none at all."""

    M: tuple[Tensor, ...]
    S: tuple[Tensor, ...]


class Gates(NamedTuple):
    """log(1 - alpha) <= 0, log eta <= 0 and theta >= 0 of every token. eta is not used by a memory without momentum."""

    log_keep_XT: Tensor
    log_eta_XT: Tensor
    theta_XT: Tensor


def silu_slope(z: Tensor) -> Tensor:
    """d silu(z) / dz."""
    s = z.sigmoid()
    return s * (1 + z * (1 - s))


def gelu_slope(z: Tensor) -> Tensor:
    """d gelu(z) / dz."""
    return torch.special.ndtr(z) + z * torch.exp(-0.5 * z.square()) * 0.3989422804014327  # 1 / sqrt(2 pi)


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (F.silu, silu_slope),
    "gelu": (F.gelu, gelu_slope),
}
"""Activation of the memory -> the function and its derivative."""


def recall(M: tuple[Tensor, ...], x_XTK: Tensor, activation: str = "silu", residual: bool = False) -> Tensor:
    """M(x), (X, T, V)."""
    act, _ = ACTIVATIONS[activation]
    h = x_XTK
    for W_XIO in M[:-1]:
        h = act(h @ W_XIO)
    return h @ M[-1] + x_XTK if residual else h @ M[-1]


def surprise(
    M: tuple[Tensor, ...], k_XTK: Tensor, v_XTV: Tensor, activation: str = "silu", residual: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """(1) in closed form: a (X, T, I) and g (X, T, O) of every layer, whose outer product a_t g_t^T is the layer's part
    of u_t."""
    act, slope = ACTIVATIONS[activation]
    inputs, slopes = [k_XTK], []
    for W_XIO in M[:-1]:
        z = torch.bmm(inputs[-1], W_XIO)
        inputs.append(act(z))
        slopes.append(slope(z))
    target = v_XTV - k_XTK if residual else v_XTV
    grads = [torch.baddbmm(target, inputs[-1], M[-1], beta=-1)]
    for W_XIO, slope_XTI in zip(M[:0:-1], slopes[::-1], strict=True):
        grads.append(torch.bmm(grads[-1], W_XIO.mT) * slope_XTI)
    return inputs, grads[::-1]


class _Shortening(torch.autograd.Function):
    """1 / max(1, rho_t), (X, T, 1), of a and then g of all layers, as one node. The backward may be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def squares(factors: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """|a|^2 and |g|^2 of every layer, and that of the error, which is above 0: without an error there is no step
        either."""
        squares = [torch.linalg.vecdot(x, x).unsqueeze(-1) for x in factors]
        return squares[: len(squares) // 2], squares[len(squares) // 2 :], squares[-1] + 1e-20

    @staticmethod
    def forward(*factors: Tensor) -> Tensor:
        of_a, of_g, of_error = _Shortening.squares(factors)
        return (
            torch.stack([a * g for a, g in zip(of_a, of_g, strict=True)])
            .sum(0)
            .div_(of_error)
            .clamp(min=1)
            .reciprocal()
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        *factors, scale = ctx.saved_tensors
        of_a, of_g, of_error = _Shortening.squares(tuple(factors))
        weight = torch.where(scale < 1, -2 * grads[0] * scale.square(), 0) / of_error
        of_a[-1] = of_a[-1] - scale.reciprocal()  # rho has the error as its denominator
        return tuple(x * (weight * other) for x, other in zip(factors, [*of_g, *of_a], strict=True))


def shortening(inputs: list[Tensor], grads: list[Tensor]) -> Tensor:
    """What ``normalized`` multiplies every u_t by: 1 / max(1, rho_t), (X, T, 1). |u_t|^2 sums over all layers."""
    return _Shortening.apply(*inputs, *grads)


class Read(NamedTuple):
    """(4) for every token (X, T, V), the state after the last one, and what ``normalized`` multiplied every u_t by (X,
    T, 1), if it is on."""

    o_XTV: Tensor
    state: NeuralState
    scale_XT1: Tensor | None


def by_token(
    state: NeuralState,
    q_XTK: Tensor,
    k_XTK: Tensor,
    v_XTV: Tensor,
    gates: Gates,
    chunk: int,
    *,
    activation="silu",
    residual=False,
    normalized=False,
) -> Read:
    """(1) to (4) as they stand, for one token after another: the reference of ``by_chunk``, with the same arguments."""
    M, S = state
    start, outputs, scales = M, [], []
    tokens = zip(
        *(t.split(1, dim=1) for t in (q_XTK, k_XTK, v_XTV)),
        *(t[:, :, None, None].unbind(1) for t in gates),
        strict=True,
    )
    for t, (q, k, v, log_keep, log_eta, theta) in enumerate(tokens):
        start = M if t % chunk == 0 else start
        inputs, grads = surprise(start, k, v, activation, residual)
        if normalized:
            scales.append(shortening(inputs, grads))
            theta = theta * scales[-1]
        step = [-theta * a.mT @ g for a, g in zip(inputs, grads, strict=True)]
        step = [log_eta.exp() * s + d for s, d in zip(S, step, strict=True)] if S else step  # (2)
        S = tuple(step) if S else ()
        M = tuple(log_keep.exp() * m + d for m, d in zip(M, step, strict=True))  # (3)
        outputs.append(recall(M, q, activation, residual))  # (4)
    return Read(torch.cat(outputs, dim=1), NeuralState(M, S), torch.cat(scales, dim=1) if normalized else None)


class _Ratios(torch.autograd.Function):
    """exp(s_t - s_j) for j <= t, else 0, (X, N, T, T), of sums s in fp64: one node, which keeps what it returns, in
    place of five."""

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
    """Products of the gates j+1..t, (X, N, T, T) with 0 where j > t, and of the gates 1..t, (X, N, T, 1).

    They are exponentials of differences of sums, which fp64 keeps exact where such a difference is small; nothing is
    divided.
    """
    ones_TT = torch.ones(log_XNT.shape[-1], log_XNT.shape[-1], dtype=torch.float64, device=log_XNT.device)
    sums = log_XNT.double().clamp(min=FLOOR) @ ones_TT.triu()  # cumsum has no deterministic form on CUDA
    return _Ratios.apply(sums, log_XNT.dtype), sums.to(log_XNT.dtype).exp().unsqueeze(-1)


def coefficients(gates: Gates, momentum: bool, real_XNT: Tensor | None = None) -> tuple[Tensor, ...]:
    """What M_t and S_t of (5) are made of: beta (X, N, T, 1), -G (X, N, T, T) and, with momentum, f (X, N, T, 1), and
    mu (X, N, 1, 1) and -c (X, N, T, 1) of the last token, from gates (X, N, T).

    With R(g)_tj the product of the gates g of the tokens j+1..t, and from the start for j = 0: beta_t = R(1 -
    alpha)_t0, mu_t = R(eta)_t0, c_tj = R(eta)_tj theta_j, f = R(1 - alpha) mu and G = R(1 - alpha) c. ``real_XNT`` is
    False at tokens that leave M and S as they are.
    """
    log_keep, log_eta, theta = gates if real_XNT is None else (gate.masked_fill(~real_XNT, 0) for gate in gates)
    keep_XNTT, beta_XNT1 = products(log_keep)
    minus_theta = -theta.unsqueeze(-2)
    if not momentum:
        return beta_XNT1, keep_XNTT * minus_theta
    eta_XNTT, mu_XNT1 = products(log_eta)
    if real_XNT is not None:
        keep_XNTT = keep_XNTT * real_XNT.unsqueeze(-2)  # M takes S in at real tokens only
    G_XNTT = (keep_XNTT @ eta_XNTT) * minus_theta
    return beta_XNT1, G_XNTT, keep_XNTT @ mu_XNT1, mu_XNT1[..., -1:, :], (eta_XNTT[..., -1:, :] * minus_theta).mT


class _ReadAndWrite(torch.autograd.Function):
    """One layer on one chunk as one node of the graph, which keeps its inputs and x a^T: less time and half the memory
    of the plain operations.

    (M, S, x, a, g, coefficients) -> (x M_t for the queries x (6), M and S after the last token (5), and x a^T). S and
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
        """Another batch dimension is more samples: functorch knows no rule for the operations in place."""
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
    """(1) to (4) chunk by chunk, by (5) and (6).

    state: to start from. gates: of every token. chunk: tokens that take their surprise at the same weights; the last
        chunk may be shorter. activation: "silu" or "gelu". residual: M(x) = x + the network. normalized: no step
        corrects more than the share theta of its error.
    real_XT: False at tokens that leave the memory as it is; their outputs mean nothing. They must be at the end.
        Default: all are real.
    """
    tokens, (M, S) = q_XTK.shape[1], state
    chunk = min(chunk, tokens)
    if missing := -tokens % chunk:
        real_XT = F.pad(
            torch.ones(q_XTK.shape[:2], dtype=torch.bool, device=q_XTK.device) if real_XT is None else real_XT,
            (0, missing),
        )
        q_XTK, k_XTK, v_XTV = (F.pad(t, (0, 0, 0, missing)) for t in (q_XTK, k_XTK, v_XTV))
        gates = Gates(*(F.pad(gate, (0, missing)) for gate in gates))
    cut = [t.unflatten(1, (-1, chunk)) for t in (*gates, q_XTK, k_XTK, v_XTV)]
    table = coefficients(Gates(*cut[:3]), bool(S), None if real_XT is None else real_XT.unflatten(1, (-1, chunk)))
    act, outputs, scales = ACTIVATIONS[activation][0], [], []
    for q, k, v, *row in zip(*(t.unbind(1) for t in (*cut[3:], *table)), strict=True):
        inputs, grads = surprise(M, k, v, activation, residual)
        if normalized:
            scales.append(scale := shortening(inputs, grads))
            row[1] = row[1] * scale.mT
            row[4:] = [minus_c * scale for minus_c in row[4:]]
        x, after, row = q, [], [*row, *[None] * (5 - len(row))]
        for W, momentum, a, g in zip(M, S or [None] * len(M), inputs, grads, strict=True):
            x, *new, _ = _ReadAndWrite.apply(W, momentum, act(x) if after else x, a, g, *row)
            after.append(new)
        M, S = tuple(m for m, _ in after), tuple(s for _, s in after if s is not None)
        outputs.append(x + q if residual else x)
    return Read(
        torch.cat(outputs, dim=1)[:, :tokens],
        NeuralState(M, S),
        torch.cat(scales, dim=1)[:, :tokens] if normalized else None,
    )
