"""The delta rule as a recurrence over tokens, with or without a decay: DeltaNet and Gated DeltaNet.

Paper:     Yang et al. 2024, Parallelizing linear transformers with the delta rule over sequence length, arXiv
           2406.06484, sections 2.2 and 3 (DeltaNet); Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464, section
           3 (Gated DeltaNet).
Reference: github.com/fla-org/flash-linear-attention, ``chunk_delta_rule`` and ``chunk_gated_delta_rule``, which are
    used where they are installed (the extra ``fla``) and apply.

The memory S maps keys to values. Token t with decay a_t, strength beta_t, key k_t, value v_t and query q_t

(1) S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
(2) o_t = S_t^T q_t

replaces the share beta_t of what the memory holds under its key. a_t = 1 is DeltaNet. In a chunk of C tokens that
begins with S, with u_t = beta_t (v_t - a_t S_{t-1}^T k_t) for what token t adds, g_t = a_1 ... a_t, and G_tj = g_t /
g_j for j <= t, (1) is a triangular system for all u of the chunk (the WY form of a product of Householder matrices):

(3) (I + L) u = beta (V - g K S)       with L_tj = beta_t G_tj k_t . k_j for j < t, else 0
(4) u = U - W S                        with U = (I + L)^-1 beta V and W = (I + L)^-1 beta g K: of every chunk at once
(5) O = g Q S + (G * Q K^T) u          (G_tj = 0 for j > t)
(6) S' = g_C S + (G_C K)^T u           with G_C the last row of G

so that only the products of (4) and (6) with S are computed chunk after chunk. No ratio of g is a quotient: it is the
exponential of a difference, at most 1.

Deviations
1. The memory is (keys, values), the transpose of the papers'.
2. Gradients reach the first state and flow back from the final one.

Shape suffixes: B batch, T tokens, H heads, K key width, V value width, X samples times heads, N chunks, C tokens of a
chunk, E = V + K.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.memory.neural_chunk import products

CHUNK = 32
"""Tokens of a chunk."""


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    log_decay_BTH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(1) and (2): outputs (B, T, H, V) and final state (B, H, K, V), in the precision of ``state_BHKV``.

    k_BTHK: keys of unit length; with ``beta`` up to 1 (or 2) no write makes the memory larger than what it holds and
    the new value. log_decay_BTH: log of a_t, at most 0; None: no decay. A token with beta 0 and log decay 0 leaves the
    state as it is. On CUDA in bf16 or fp16 the reference's kernels run if installed, from a state in fp32. Call it
    outside of autocast.
    """
    inputs = q_BTHK, k_BTHK, v_BTHV, beta_BTH
    kernels = _kernels() if _suits_kernels(q_BTHK, state_BHKV) else None
    if kernels is not None:
        return with_kernels(kernels, *inputs, state_BHKV, log_decay_BTH)
    q, k, v, beta = (t.to(state_BHKV.dtype) for t in inputs)
    log_decay_BTH = None if log_decay_BTH is None else log_decay_BTH.to(state_BHKV.dtype)
    return by_chunks(q, k, v, beta, state_BHKV, log_decay_BTH)


def by_chunks(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    log_decay_BTH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``delta_rule`` by (3) to (6), of tensors in one precision."""
    tokens, heads = beta_BTH.shape[1:]
    q, k, v, beta = (_chunks(t) for t in (q_BTHK, k_BTHK, v_BTHV, beta_BTH.unsqueeze(-1)))
    lower_CC = torch.ones(q.shape[-2], q.shape[-2], dtype=q.dtype, device=q.device).tril()
    ratios, reach = lower_CC, lower_CC[:, :1]  # G and g; without decay all ones
    if log_decay_BTH is not None:
        ratios, reach = products(_chunks(log_decay_BTH.unsqueeze(-1)).squeeze(-1))
    system_XNCC = beta * (ratios * (k @ k.mT))  # L, and on and above the diagonal what the solver does not read
    given_XNCE = beta * torch.cat([v, reach * k], dim=-1)
    solved_XNCE = torch.linalg.solve_triangular(system_XNCC, given_XNCE, upper=False, unitriangular=True)
    U, W = solved_XNCE.split([v.shape[-1], k.shape[-1]], dim=-1)  # (4)
    to_end_XNKC = (ratios[..., -1, :].unsqueeze(-1) * k).mT
    left = reach[..., -1:, :].expand(*k.shape[:2], 1, 1)  # g_C
    state_XKV, starts, added = state_BHKV.flatten(0, 1), [], []
    for chunk in zip(*(t.unbind(1) for t in (U, W, to_end_XNKC, left)), strict=True):
        u_XCV = chunk[0] - chunk[1] @ state_XKV
        starts.append(state_XKV)
        added.append(u_XCV)
        state_XKV = chunk[3] * state_XKV + chunk[2] @ u_XCV  # (6)
    o_XNCV = (reach * q) @ torch.stack(starts, dim=1) + (ratios * (q @ k.mT)) @ torch.stack(added, dim=1)  # (5)
    o_XTV = o_XNCV.flatten(1, 2)[:, :tokens]
    return o_XTV.unflatten(0, (-1, heads)).transpose(1, 2), state_XKV.unflatten(0, (-1, heads))


def _chunks(x_BTHE: Tensor) -> Tensor:
    """(B, T, H, E) -> (X, N, C, E), with zeros behind the last token."""
    tokens = x_BTHE.shape[1]
    count = -(-tokens // CHUNK)
    size = -(-tokens // count)
    x_XTE = x_BTHE.transpose(1, 2).flatten(0, 1)
    return F.pad(x_XTE, (0, 0, 0, count * size - tokens)).unflatten(1, (count, size))


class Kernels(NamedTuple):
    """The reference's functions, without and with decay."""

    plain: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., tuple[Tensor, Tensor]]


@lru_cache
def _kernels() -> Kernels | None:
    """The reference's CUDA kernels, or None where they are not installed."""
    try:
        from fla.ops.delta_rule import chunk_delta_rule  # type: ignore[import-not-found]
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    except ImportError:
        return None
    return Kernels(chunk_delta_rule, chunk_gated_delta_rule)


def _suits_kernels(q_BTHK: Tensor, state_BHKV: Tensor) -> bool:
    """Whether the kernels accept these: half precision, up to 256 key channels, and no vmap, which cannot batch
    them."""
    half = q_BTHK.dtype in (torch.bfloat16, torch.float16) and state_BHKV.dtype == torch.float32
    return q_BTHK.is_cuda and half and q_BTHK.shape[-1] <= 256 and not torch._C._are_functorch_transforms_active()


def with_kernels(
    kernels: Kernels,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    log_decay_BTH: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``delta_rule`` by the reference's kernels, which scale queries unless told otherwise."""
    options = {"scale": 1.0, "initial_state": state_BHKV, "output_final_state": True}
    q, k, v, beta = (t.to(q_BTHK.dtype).contiguous() for t in (q_BTHK, k_BTHK, v_BTHV, beta_BTH))
    if log_decay_BTH is None:
        o_BTHV, state_BHKV = kernels.plain(q=q, k=k, v=v, beta=beta, **options)
    else:
        o_BTHV, state_BHKV = kernels.gated(q=q, k=k, v=v, g=log_decay_BTH.float(), beta=beta, **options)
    return o_BTHV.to(state_BHKV.dtype), state_BHKV
