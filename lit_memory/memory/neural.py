"""Neural long-term memory of Titans as pure functions: a network whose weights are trained while it reads.

Paper:     Behrouz et al. 2025, Titans: learning to memorize at test time, arXiv 2501.00663, sections 3.1 and 3.2; the
           closed forms are those of spec 10.3.
Reference: none by the authors. lucidrains' titans-pytorch (compared in benchmarks/titans.py) is another algorithm: it
           reads the memory of the chunk before and has one gate per chunk.

The memory is an MLP without biases of L layers, M(x) = act(... act(x W_1) ...) W_L. It is trained on keys and values:
for the token (q_t, k_t, v_t), with l(M; t) = 1/2 |M(k_t) - v_t|^2 and t' the last token of the chunk before that of t,

(1) u_t = grad l(M_t'; t)                 its surprise (eq. 8, 12), at the same weights for all tokens of a chunk
                                          (section 3.2)
(2) S_t = eta_t S_{t-1} - theta_t u_t     (eq. 10, 14)
(3) M_t = (1 - alpha_t) M_{t-1} + S_t     (eq. 13)
(4) o_t = M_t(q_t)                        (eq. 15), after token t was written

``by_token`` computes these lines as they stand, and is the slow reference of ``neural_chunk.by_chunk``.

Deviations
1. The loss has a factor 1/2 (eq. 12: none; the appendix: 1/2). Twice the theta is the paper's.
2. Gates are given as log(1 - alpha) and log eta, which a sigmoid computes without rounding to 0 or 1. -inf, a gate of
   exactly 0, is allowed.
3. ``normalized``, ``residual`` (M(x) = x + the network) and ``exact`` (t' in (1) is t - 1, whatever the chunk) are
   ours, and off by default.

Stability. The surprises of one chunk are taken at the same weights, so that T tokens with one key act as one step T
times as long. With constant gates and unit keys, no such chunk map amplifies if T theta <= 1 - eta, whatever alpha is
(a memory of one layer; tests/test_neural.py). To first order, a step corrects the share theta rho_t of the error
M(k_t) - v_t, where rho_t = |u_t|^2 / |M(k_t) - v_t|^2 is |k_t|^2 in a matrix. In a deeper memory rho_t grows with the
weights, so that the memory diverges under the same theta where its values are a few times longer than its keys.
``normalized`` divides theta_t by max(1, rho_t), as normalised LMS does. Then theta_t u_t is at most
theta_t (|v_t| + |W_L|) long, whatever the weights, and nothing changes while rho_t is at most 1. M = 0 is a fixed point
of a memory of two or more layers: one that alpha near 1 has emptied learns nothing any more.

Shape suffixes: X samples times heads, T tokens, K width of keys and queries, V width of values, I and O inputs and
outputs of a layer of the memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class NeuralState(NamedTuple):
    """Weights (X, I, O) of every layer of the memory, and their momentum: as many tensors, or none."""

    M: tuple[Tensor, ...]
    S: tuple[Tensor, ...]


class Gates(NamedTuple):
    """log(1 - alpha) <= 0, log eta <= 0 and theta >= 0 of every token. A memory without momentum ignores eta."""

    log_keep_XT: Tensor
    log_eta_XT: Tensor
    theta_XT: Tensor


def silu_slope(z: Tensor) -> Tensor:
    """d silu(z) / dz."""
    s = z.sigmoid()
    return s * (1 + z * (1 - s))


def silu_curve(z: Tensor) -> Tensor:
    """The second derivative of silu."""
    s = z.sigmoid()
    rest = 1 - s
    return (rest - s).mul_(z).add_(2).mul_(rest).mul_(s)


def gelu_slope(z: Tensor) -> Tensor:
    """d gelu(z) / dz."""
    return torch.special.ndtr(z) + z * torch.exp(-0.5 * z.square()) * 0.3989422804014327  # 1 / sqrt(2 pi)


def gelu_curve(z: Tensor) -> Tensor:
    """The second derivative of gelu."""
    square = z.square()
    return torch.exp(-0.5 * square) * (2 - square) * 0.3989422804014327


class Activation(NamedTuple):
    """Activation of the memory: the function, its derivative, that times another tensor, and its second derivative."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """(dy, z) -> dy times the derivative at z, as one operation, which cannot be differentiated."""
    curve: Callable[[Tensor], Tensor]


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(F.silu, silu_slope, torch.ops.aten.silu_backward, silu_curve),
    "gelu": Activation(F.gelu, gelu_slope, torch.ops.aten.gelu_backward, gelu_curve),
}


def recall(M: tuple[Tensor, ...], x_XTK: Tensor, activation: str = "silu", residual: bool = False) -> Tensor:
    """M(x), (X, T, V)."""
    act, h = ACTIVATIONS[activation].function, x_XTK
    for W_XIO in M[:-1]:
        h = act(h @ W_XIO)
    return h @ M[-1] + x_XTK if residual else h @ M[-1]


def surprise(
    M: tuple[Tensor, ...], k_XTK: Tensor, v_XTV: Tensor, activation: str = "silu", residual: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """(1) in closed form: a (X, T, I) and g (X, T, O) of every layer; u_t of the layer is their outer product."""
    act, slope, *_ = ACTIVATIONS[activation]
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


def shortening(inputs: list[Tensor], grads: list[Tensor]) -> Tensor:
    """The factor of ``normalized`` for every u_t: 1 / max(1, rho_t), (X, T, 1). |u_t|^2 sums over all layers."""
    of_a, of_g = ([torch.linalg.vecdot(x, x).unsqueeze(-1) for x in factors] for factors in (inputs, grads))
    of_u = torch.stack([a * g for a, g in zip(of_a, of_g, strict=True)]).sum(0)
    return (of_u / (of_g[-1] + 1e-20)).clamp(min=1).reciprocal()  # without an error there is no step


class Read(NamedTuple):
    """Outputs (4) of every token, the state after the last one, and the factors of ``normalized`` if that is on."""

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
    exact=False,
) -> Read:
    """(1) to (4) as they stand, token by token: the slow reference of ``by_chunk``, with the same arguments."""
    M, S = state
    start, outputs, scales = M, [], []
    tokens = zip(
        *(t.split(1, dim=1) for t in (q_XTK, k_XTK, v_XTV)),
        *(t[:, :, None, None].unbind(1) for t in gates),
        strict=True,
    )
    for t, (q, k, v, log_keep, log_eta, theta) in enumerate(tokens):
        start = M if exact or t % chunk == 0 else start
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
