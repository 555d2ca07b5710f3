"""Associative (fast-weight) memory of ARMT as pure functions of tensors.

Paper:     Rodkin et al. 2024, Associative Recurrent Memory Transformer, arXiv 2407.04841, section 2 and appendix C.1;
           the feature map is DPFP of Schlag et al. 2021, arXiv 2102.11174, eq. 37-38.
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de, and at 3da7f48 (``armt.py`` lists
           what differs).

Deviations
1. The first segment needs no special case: an all-zero ``z`` marks a memory that was never written, and its gamma is
   exactly 1. (The reference keeps a Python flag, which cannot differ between the samples of a batch.)
2. ``gamma="raw"``, ``update="sequential"`` and ``gamma_detach=False`` are the paper's formulas; the defaults are the
   reference's.
3. ``normalize_phi``, ``use_denom=False`` and ``gamma_eps=0`` are not in the paper, but in the reference at 3da7f48;
   ``denom_floor`` is ours. They are off by default.

Shape suffixes: B batch, T rows, M memory tokens, C channels of a key before the feature map, K features (2*nu*C), D
value width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class AssociativeState(NamedTuple):
    """The memory of one layer. Both tensors are zero for an empty memory."""

    A_BKD: Tensor
    z_BK: Tensor


def empty(batch: int, keys: int, width: int, device=None, dtype=torch.float32) -> AssociativeState:
    """An empty memory of ``keys`` features and values of ``width`` floats."""
    return AssociativeState(
        torch.zeros(batch, keys, width, device=device, dtype=dtype),
        torch.zeros(batch, keys, device=device, dtype=dtype),
    )


def dpfp(x_BTC: Tensor, nu: int = 3, normalize: bool = False) -> Tensor:
    """Deterministic parameter-free projection, phi(x): (B, T, C) -> (B, T, 2*nu*C), non-negative and of degree two.

    ``r = [relu(x); relu(-x)]`` and ``phi = concat_j r * roll(r, j)`` for j = 1..nu. With ``normalize`` every non-zero
    phi has unit length.
    """
    r = torch.cat([x_BTC, -x_BTC], dim=-1).relu()
    phi = torch.cat([r * r.roll(j, -1) for j in range(1, nu + 1)], dim=-1)
    return F.normalize(phi, dim=-1, eps=1e-12) if normalize else phi


def dpfp_backward(dphi: Tensor, x: Tensor, nu: int, normalize: bool) -> Tensor:
    """Gradient of ``dpfp`` for x (..., C), given that for phi (..., 2*nu*C). nu: at most 2*C."""
    size = 2 * x.shape[-1]
    end = -x[..., -nu:] if 2 * nu <= size else torch.cat([x, -x], dim=-1)[..., -nu:]
    ring = torch.cat([end, x, -x], dim=-1).relu_()  # r, and before it its end
    rolled = [ring.narrow(-1, nu - j, size) for j in range(nu + 1)]
    if normalize:
        dphi = _normalize_backward(dphi, torch.cat([rolled[0] * other for other in rolled[1:]], dim=-1))
    dring = torch.zeros_like(ring)
    dr = dring.narrow(-1, nu, size)
    for j, part in enumerate(dphi.split(size, dim=-1), start=1):
        dr.addcmul_(part, rolled[j])
        dring.narrow(-1, nu - j, size).addcmul_(part, rolled[0])
    dring.narrow(-1, size, nu).add_(dring.narrow(-1, 0, nu))
    positive, negative = torch.where(rolled[0] > 0, dr, 0).chunk(2, dim=-1)
    return positive - negative


def _normalize_backward(dunit: Tensor, phi: Tensor) -> Tensor:
    """Gradient of ``F.normalize(phi, dim=-1, eps=1e-12)``."""
    size = length(phi)
    unit = phi / size.clamp_min(1e-12)
    along = torch.where(size > 1e-12, (dunit * unit).sum(-1, keepdim=True), 0)
    return (dunit - along * unit) / size.clamp_min(1e-12)


def length(x: Tensor) -> Tensor:
    """|x| over the last dimension, which stays."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def overlap(z_BK: Tensor, phi_BTK: Tensor, eps: float = 1e-5) -> Tensor:
    """z . phi + eps of every row, (B, T, 1): how much of each key the normaliser holds."""
    products_BTK = phi_BTK * z_BK.unsqueeze(1)  # on CPU twice as fast as a matrix product with one column
    return products_BTK.sum(-1, keepdim=True) + eps


def floored(den_BT1: Tensor, z_BK: Tensor, phi_BTK: Tensor, floor: float) -> Tensor:
    """The overlap as a denominator: at least ``floor * |phi| * |z|``.

    So it cannot vanish or change sign where z has little mass (clipped gamma) or negative mass (raw gamma).
    """
    if not floor:
        return den_BT1
    return torch.maximum(den_BT1, floor * phi_BTK.norm(dim=-1, keepdim=True) * z_BK.norm(dim=-1)[:, None, None])


def read(
    state: AssociativeState, phi_BTK: Tensor, *, eps: float = 1e-5, denom_floor: float = 0.0, use_denom: bool = True
) -> Tensor:
    """Recall y = A^T phi / (z . phi + eps), (B, T, D); all zeros from an empty memory.

    Without ``use_denom`` it is A^T phi. Source: the recall equation of section 2.
    """
    y_BTD = phi_BTK @ state.A_BKD
    if not use_denom:
        return y_BTD
    return y_BTD / floored(overlap(state.z_BK, phi_BTK, eps), state.z_BK, phi_BTK, denom_floor)


def gamma_correction(z_BK: Tensor, phi_BMK: Tensor, den_BM1: Tensor, mode: str = "clip", eps: float = 1e-5) -> Tensor:
    """gamma = 1 - z.phi / |phi|^2, (B, M, 1): the fraction of phi that z does not hold yet (appendix C.1).

    mode: "clip" clips it to [0, 1] as the reference does, "raw" is the paper's formula, "off" is 1. It is exactly 1
        for a sample whose z is all zero.
    eps: added to |phi|^2. With 0, a phi of zeros has a gamma of 0 ("clip") or none.
    """
    if mode == "off":
        return torch.ones_like(den_BM1)
    gamma = 1 - den_BM1 / (phi_BMK.square().sum(-1, keepdim=True) + eps)
    if mode == "clip":
        gamma = gamma.clamp(0, 1)
    empty_B11 = (z_BK == 0).all(-1)[:, None, None]
    return gamma.masked_fill(empty_B11, 1.0)


def write(
    state: AssociativeState,
    phi_BMK: Tensor,
    v_BMD: Tensor,
    beta_BM1: Tensor,
    *,
    update: str = "batch",
    gamma: str = "clip",
    gamma_detach: bool = True,
    beta_on_z: bool = False,
    eps: float = 1e-5,
    gamma_eps: float | None = None,
    denom_floor: float = 0.0,
    use_denom: bool = True,
) -> AssociativeState:
    """Replace the values under the keys ``phi`` by ``v``, with strength ``beta`` in [0, 1].

    update: "batch" writes all M tokens against the same (A, z), as the reference does; "sequential" one after another,
        as in the paper. They agree where the keys of one segment are orthogonal.
    gamma_eps: that of gamma; default: ``eps``.
    Source: the update equations of section 2.
    """
    gamma_eps = eps if gamma_eps is None else gamma_eps
    if update == "sequential":
        flags = {"gamma": gamma, "gamma_detach": gamma_detach, "beta_on_z": beta_on_z, "eps": eps}
        flags |= {"gamma_eps": gamma_eps, "denom_floor": denom_floor, "use_denom": use_denom}
        in_turn = _write_row_by_row if gamma == "clip" and use_denom else _write_at_once
        return in_turn(state, phi_BMK, v_BMD, beta_BM1, **flags)
    A_BKD, z_BK = state
    old_BMD = phi_BMK @ A_BKD  # v-bar: what the memory recalls under the keys now
    if not use_denom:
        return AssociativeState(A_BKD + (beta_BM1 * phi_BMK).mT @ (v_BMD - old_BMD), z_BK)
    den_BM1 = overlap(z_BK, phi_BMK, eps)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not gamma_detach):
        gamma_BM1 = gamma_correction(z_BK, phi_BMK, den_BM1, gamma, gamma_eps)
    if beta_on_z:
        gamma_BM1 = gamma_BM1 * beta_BM1
    old_BMD = old_BMD / floored(den_BM1, z_BK, phi_BMK, denom_floor)
    A_BKD = A_BKD + (beta_BM1 * phi_BMK).mT @ (v_BMD - old_BMD)
    return AssociativeState(A_BKD, z_BK + (gamma_BM1 * phi_BMK).sum(1))


def gammas(
    z_BK: Tensor,
    phi_BMK: Tensor,
    beta_BM1: Tensor,
    *,
    update: str = "batch",
    gamma: str = "clip",
    beta_on_z: bool = False,
    eps: float = 1e-5,
    gamma_eps: float | None = None,
) -> Tensor:
    """What a ``write`` with these arguments multiplies each of its keys by before it adds them to z, (B, M, 1)."""
    gamma_eps = eps if gamma_eps is None else gamma_eps
    if update == "batch":
        gamma_BM1 = gamma_correction(z_BK, phi_BMK, overlap(z_BK, phi_BMK, eps), gamma, gamma_eps)
        return gamma_BM1 * beta_BM1 if beta_on_z else gamma_BM1
    found = []
    for phi, beta in zip(phi_BMK.split(1, 1), beta_BM1.split(1, 1), strict=True):
        found.append(gammas(z_BK, phi, beta, gamma=gamma, beta_on_z=beta_on_z, eps=eps, gamma_eps=gamma_eps))
        z_BK = z_BK + (found[-1] * phi).sum(1)
    return torch.cat(found, dim=1)


def _write_row_by_row(
    state: AssociativeState, phi_BMK: Tensor, v_BMD: Tensor, beta_BM1: Tensor, **flags: Any
) -> AssociativeState:
    """``write`` of one token after another."""
    for token in zip(phi_BMK.split(1, 1), v_BMD.split(1, 1), beta_BM1.split(1, 1), strict=True):
        state = write(state, *token, **flags)
    return state


def _write_at_once(
    state: AssociativeState,
    phi_BMK: Tensor,
    v_BMD: Tensor,
    beta_BM1: Tensor,
    *,
    gamma: str,
    gamma_detach: bool,
    beta_on_z: bool,
    eps: float,
    gamma_eps: float,
    denom_floor: float,
    use_denom: bool,
) -> AssociativeState:
    """``_write_row_by_row`` where everything is linear in what the earlier tokens wrote: gamma is not clipped.

    What token i adds, delta_i = beta_i (v_i - A_(i-1)^T phi_i / den_i), holds the earlier ones by A_(i-1) = A + sum
    over j < i of phi_j delta_j^T: a triangular system of M equations. So do the denominators.
    """
    A_BKD, z_BK = state
    earlier_BMM, den_BM1 = (phi_BMK @ phi_BMK.mT).tril(-1), torch.ones_like(beta_BM1)
    if use_denom:
        known_BM1, weight_BM1 = overlap(z_BK, phi_BMK, eps), beta_BM1 if beta_on_z else torch.ones_like(beta_BM1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not gamma_detach):
            gamma_BM1 = torch.ones_like(beta_BM1)
            if gamma == "raw":
                gamma_BM1 = _raw_gammas(z_BK, phi_BMK, known_BM1, earlier_BMM, weight_BM1, gamma_eps)
        added_BMK = gamma_BM1 * weight_BM1 * phi_BMK
        den_BM1 = known_BM1 + earlier_BMM @ (gamma_BM1 * weight_BM1)
        if denom_floor:
            before_BMK = z_BK.unsqueeze(1) + F.pad(added_BMK[:, :-1].cumsum(1), (0, 0, 1, 0))
            den_BM1 = torch.maximum(den_BM1, denom_floor * phi_BMK.norm(dim=-1, keepdim=True) * length(before_BMK))
        z_BK = z_BK + added_BMK.sum(1)
    share_BM1 = beta_BM1 / den_BM1
    alone_BMD = beta_BM1 * v_BMD - share_BM1 * (phi_BMK @ A_BKD)
    delta_BMD = torch.linalg.solve_triangular(share_BM1 * earlier_BMM, alone_BMD, upper=False, unitriangular=True)
    return AssociativeState(A_BKD + phi_BMK.mT @ delta_BMD, z_BK)


def _raw_gammas(
    z_BK: Tensor, phi_BMK: Tensor, known_BM1: Tensor, earlier_BMM: Tensor, weight_BM1: Tensor, eps: float
) -> Tensor:
    """The raw gammas of tokens that are written one after another. known: their overlap with z. weight: of gamma, in
    z."""
    mass_BM1 = phi_BMK.square().sum(-1, keepdim=True)
    written_BM1 = F.pad((weight_BM1 * mass_BM1)[:, :-1].cumsum(1), (0, 0, 1, 0))  # 0 before the first key that is not
    first_BM1 = (z_BK == 0).all(-1)[:, None, None] & (written_BM1 == 0)
    share_BM1 = (weight_BM1 / (mass_BM1 + eps)).masked_fill(first_BM1, 0)
    given_BM1 = known_BM1 + earlier_BMM @ weight_BM1
    den_BM1 = torch.linalg.solve_triangular(earlier_BMM * share_BM1.mT, given_BM1, upper=False, unitriangular=True)
    return (1 - den_BM1 / (mass_BM1 + eps)).masked_fill(first_BM1, 1)
