"""Linear recurrences over time as pure functions: Mamba's state-space model, RWKV-5's attention, the scan of both.

Paper:     Gu and Dao 2023, Mamba, arXiv 2312.00752, section 2 (eq. 2a, 2b, 4) and algorithm 2; Peng et al. 2024, Eagle
           and Finch, arXiv 2404.05892, section 4.1 (Eagle is RWKV-5; its formulas are those of spec 9).
Reference: github.com/state-spaces/mamba, ``selective_scan_fn``, which is used where it is installed and applies; for
           RWKV-5 github.com/BlinkDL/ChatRWKV, ``att_seq_v5_2``.

Deviations
1. A scan starts from any state, and gradients reach that state and flow back from the final one. The reference starts
   from zero, and its final state carries no gradient.
2. B is discretised by Euler's rule (Delta B), as in the reference's code; eq. 4 has the zero-order hold.
3. RWKV-5's decay may be any number up to 1. Code that divides by products of decays has to clip it at 0.005. Here each
   step multiplies by a decay of at most 1, so that nothing overflows.

Shape suffixes: B batch, T tokens, E channels, N states per channel, H heads, K key width, V value width, X any further
dimensions, S blocks of C tokens in a scan.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_memory.memory import compiled
from lit_memory.memory.precision import outside_autocast

CHUNK = 16
"""Tokens whose states a CPU holds at a time (with gradients RWKV-5 keeps all), and that a block of ``_states`` has."""
CACHE = 2**18
"""Numbers in the states of a chunk that a CPU scans at a time, split by samples: 1 MB in fp32, about a core's cache."""
WIDE = 2**25
"""Numbers in the states that another device holds at a time: 128 MB in fp32."""


def _is_wide(t: Tensor) -> bool:
    """Whether a call costs more than its arithmetic, as on CUDA, so that blocks of tokens are scanned side by side."""
    return not t.is_cpu


def _span(t: Tensor, numbers: int) -> int:
    """Tokens of a chunk, whose states have so many numbers each."""
    return max(CHUNK, WIDE // numbers) if _is_wide(t) else CHUNK


def _states(decay_BTX: Tensor, input_BTX: Tensor, state_BX: Tensor) -> Tensor:
    """h_t = decay_t h_{t-1} + input_t of t = 1..T from h_0 = ``state_BX``."""
    tokens = input_BTX.shape[1]
    whole = tokens - tokens % CHUNK
    if whole <= CHUNK or not _is_wide(input_BTX):
        return _one_by_one(decay_BTX, input_BTX, state_BX, dim=1)
    decay_BSCX, input_BSCX = (t[:, :whole].unflatten(1, (-1, CHUNK)) for t in (decay_BTX, input_BTX))
    states_BSCX = _one_by_one(decay_BSCX, input_BSCX, torch.zeros_like(input_BSCX[:, :, 0]), dim=2)  # from 0
    decay_BSCX = decay_BSCX.cumprod(2)  # since the block began
    ends_BSX = _states(decay_BSCX[:, :, -1], states_BSCX[:, :, -1], state_BX)
    states_BTX = torch.addcmul(states_BSCX, decay_BSCX, _before(state_BX, ends_BSX).unsqueeze(2)).flatten(1, 2)
    if whole == tokens:
        return states_BTX
    rest_BTX = _one_by_one(decay_BTX[:, whole:], input_BTX[:, whole:], ends_BSX[:, -1], dim=1)
    return torch.cat([states_BTX, rest_BTX], dim=1)


def _one_by_one(decay: Tensor, input: Tensor, state: Tensor, dim: int) -> Tensor:
    """The states of ``_states`` with time in ``dim``, which ``state`` lacks."""
    states = []
    for decay_t, input_t in zip(decay.unbind(dim), input.unbind(dim), strict=True):
        state = torch.addcmul(input_t, decay_t, state)
        states.append(state)
    return torch.stack(states, dim)


def _reached(decay_BTX: Tensor, direct_BTX: Tensor, beyond_BX: Tensor) -> Tensor:
    """dL/dh_t of t = 1..T: the direct part (``direct_BTX``) plus decay_{t+1} dL/dh_{t+1}, for T plus ``beyond_BX``: a
    scan from behind."""
    decay_BTX = torch.cat([torch.ones_like(decay_BTX[:, :1]), decay_BTX[:, 1:].flip(1)], dim=1)
    return _states(decay_BTX, direct_BTX.flip(1), beyond_BX).flip(1)


def _before(state_BX: Tensor, states_BTX: Tensor) -> Tensor:
    """h_{t-1} of t = 1..T."""
    return torch.cat([state_BX.unsqueeze(1), states_BTX[:, :-1]], dim=1)


def _chunks(span: int, *tensors_BTX: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.split(span, dim=1) for t in tensors_BTX), strict=True))


class _LinearScan(torch.autograd.Function):
    """One node of the graph in place of one per step, which on a CPU would cost more than the arithmetic."""

    generate_vmap_rule = True

    @staticmethod
    def forward(decay_BTX: Tensor, input_BTX: Tensor, state_BX: Tensor) -> Tensor:
        return _states(decay_BTX, input_BTX, state_BX)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[2], output)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay_BTX, state_BX, states_BTX = ctx.saved_tensors
        grad_BTX = _reached(decay_BTX, grads[0], torch.zeros_like(state_BX))
        return grad_BTX * _before(state_BX, states_BTX), grad_BTX, decay_BTX[:, 0] * grad_BTX[:, 0]


class _SelectiveScan(torch.autograd.Function):
    """Keeps one state per chunk and recomputes the others in the backward pass (section 3.3.2 of the paper).

    On a CPU the states of a chunk stay in its cache; memory per token does not grow with N.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x_BTE: Tensor, delta_BTE: Tensor, A_EN: Tensor, B_BTN: Tensor, C_BTN: Tensor, state_BEN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        outputs, starts = [], [state_BEN]
        for x, delta, B, C in _chunks(_span(x_BTE, state_BEN.numel()), x_BTE, delta_BTE, B_BTN, C_BTN):
            _, states_BTEN = _selective_states(x, delta, A_EN, B, starts[-1])
            outputs.append((states_BTEN @ C.unsqueeze(-1)).squeeze(-1))  # eq. 2b
            starts.append(states_BTEN[:, -1].clone())  # a view would keep the states of the chunk alive
        return torch.cat(outputs, dim=1), starts[-1], torch.stack(starts[:-1], dim=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs[:5], output[2])

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x_BTE, delta_BTE, A_EN, B_BTN, C_BTN, starts = ctx.saved_tensors
        grad_y_BTE, grad_BEN, _ = grads
        grad_A_EN, found = torch.zeros_like(A_EN), []
        chunks = _chunks(_span(x_BTE, grad_BEN.numel()), x_BTE, delta_BTE, B_BTN, C_BTN, grad_y_BTE)
        for (x, delta, B, C, grad_y), start_BEN in reversed(list(zip(chunks, starts.unbind(1), strict=True))):
            decay_BTEN, states_BTEN = _selective_states(x, delta, A_EN, B, start_BEN)
            grad_BTEN = _reached(decay_BTEN, grad_y.unsqueeze(-1) * C.unsqueeze(2), grad_BEN)
            grad_BEN = decay_BTEN[:, 0] * grad_BTEN[:, 0]
            grad_input_BTE = (grad_BTEN @ B.unsqueeze(-1)).squeeze(-1)  # of Delta x
            grad_exponent_BTEN = grad_BTEN * decay_BTEN * _before(start_BEN, states_BTEN)  # of Delta A
            grad_A_EN = grad_A_EN + (grad_exponent_BTEN * delta.unsqueeze(-1)).sum((0, 1))
            grad_delta_BTE = (grad_exponent_BTEN * A_EN).sum(-1) + grad_input_BTE * x
            grad_B_BTN = ((delta * x).unsqueeze(2) @ grad_BTEN).squeeze(2)
            grad_C_BTN = (grad_y.unsqueeze(2) @ states_BTEN).squeeze(2)
            found.append((grad_input_BTE * delta, grad_delta_BTE, grad_B_BTN, grad_C_BTN))
        grad_x_BTE, grad_delta_BTE, grad_B_BTN, grad_C_BTN = (
            torch.cat(parts[::-1], dim=1) for parts in zip(*found, strict=True)
        )
        return grad_x_BTE, grad_delta_BTE, grad_A_EN, grad_B_BTN, grad_C_BTN, grad_BEN


def _selective_states(
    x_BTE: Tensor, delta_BTE: Tensor, A_EN: Tensor, B_BTN: Tensor, state_BEN: Tensor
) -> tuple[Tensor, Tensor]:
    """Decays and states (B, T, E, N) of a chunk."""
    decay_BTEN = (delta_BTE.unsqueeze(-1) * A_EN).exp()  # eq. 4
    input_BTEN = (delta_BTE * x_BTE).unsqueeze(-1) * B_BTN.unsqueeze(2)  # eq. 4 by Euler's rule
    return decay_BTEN, _states(decay_BTEN, input_BTEN, state_BEN)  # eq. 2a


def linear_scan(decay_BTX: Tensor, input_BTX: Tensor, state_BX: Tensor) -> Tensor:
    """All states h_t = decay_t h_{t-1} + input_t of t = 1..T, (B, T, X), from h_0 = ``state_BX``.

    A decay may have size 1 in any dimension but T.
    """
    return _LinearScan.apply(decay_BTX.expand_as(input_BTX), input_BTX, state_BX)


def selective_scan(
    x_BTE: Tensor, delta_BTE: Tensor, A_EN: Tensor, B_BTN: Tensor, C_BTN: Tensor, state_BEN: Tensor
) -> tuple[Tensor, Tensor]:
    """The selective state-space model: outputs (B, T, E) and final state (B, E, N), in the precision of ``state_BEN``.

    h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t x_t (eq. 2a, 4) and y_t = C_t h_t (eq. 2b). ``delta_BTE`` is at least 0
    and ``A_EN`` below 0; a token of Delta 0 leaves the state unchanged. Time is linear in T. On CUDA in fp32 the
    reference's kernel runs if installed. Call it outside of autocast.
    """
    x_BTE, delta_BTE, A_EN, B_BTN, C_BTN = (t.to(state_BEN.dtype) for t in (x_BTE, delta_BTE, A_EN, B_BTN, C_BTN))
    transformed = torch._C._are_functorch_transforms_active()  # vmap cannot batch the kernel
    if x_BTE.is_cuda and state_BEN.dtype == torch.float32 and not transformed:
        kernel = _kernel()
        if kernel is not None:
            return with_kernel(kernel, x_BTE, delta_BTE, A_EN, B_BTN, C_BTN, state_BEN)
    if compiled.applies(state_BEN):
        return compiled.selective_scan(x_BTE, delta_BTE, A_EN, B_BTN, C_BTN, state_BEN)
    return plain_selective_scan(x_BTE, delta_BTE, A_EN, B_BTN, C_BTN, state_BEN)


def plain_selective_scan(
    x_BTE: Tensor, delta_BTE: Tensor, A_EN: Tensor, B_BTN: Tensor, C_BTN: Tensor, state_BEN: Tensor
) -> tuple[Tensor, Tensor]:
    """``selective_scan`` by tensor operations alone, of tensors in one precision."""
    rows = len(x_BTE) if _is_wide(x_BTE) else max(1, CACHE // (min(CHUNK, x_BTE.shape[1]) * A_EN.numel()))
    if rows >= len(x_BTE):
        return _SelectiveScan.apply(x_BTE, delta_BTE, A_EN, B_BTN, C_BTN, state_BEN)[:2]
    parts = zip(*(t.split(rows) for t in (x_BTE, delta_BTE, B_BTN, C_BTN, state_BEN)), strict=True)
    found = [_SelectiveScan.apply(x, delta, A_EN, B, C, state)[:2] for x, delta, B, C, state in parts]
    y_BTE, state_BEN = (torch.cat(part) for part in zip(*found, strict=True))
    return y_BTE, state_BEN


def decayed_attention(
    r_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, bonus_HK: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Linear attention whose memory decays by key channel: outputs (B, T, H, V) and final state (B, H, K, V).

    S_t = diag(w_t) S_{t-1} + k_t^T v_t and o_t = r_t (S_{t-1} + diag(u) k_t^T v_t), with the bonus u for the current
    token, in the precision of ``state_BHKV``.
    """
    r, k, v, decay = (t.to(state_BHKV.dtype) for t in (r_BTHK, k_BTHK, v_BTHV, decay_BTHK))
    read = compiled.decayed_attention if compiled.applies(state_BHKV) else plain_decayed_attention
    past_BTHV, state_BHKV = read(r, k, v, decay, state_BHKV)
    return past_BTHV + (r * bonus_HK * k).sum(-1, keepdim=True) * v, state_BHKV


def plain_decayed_attention(
    r_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """The past of ``decayed_attention``, r_t S_{t-1}, by tensor operations alone, of tensors in one precision; and the
    final state."""
    past = []
    for r, k, v, decay in _chunks(_span(r_BTHK, state_BHKV.numel()), r_BTHK, k_BTHK, v_BTHV, decay_BTHK):
        states_BTHKV = linear_scan(decay.unsqueeze(-1), k.unsqueeze(-1) * v.unsqueeze(-2), state_BHKV)  # S_t
        past.append((r.unsqueeze(-1) * _before(state_BHKV, states_BTHKV)).sum(-2))
        state_BHKV = states_BTHKV[:, -1]
    return torch.cat(past, dim=1), state_BHKV.clone()


@lru_cache
def _kernel() -> Callable[..., Tensor] | None:
    """The reference's CUDA kernel, or None where it is not installed."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn  # type: ignore[import-not-found]
    except ImportError:
        return None
    return selective_scan_fn


def with_kernel(
    kernel: Callable[..., Tensor],
    x_BTE: Tensor,
    delta_BTE: Tensor,
    A_EN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    state_BEN: Tensor,
):
    """``selective_scan`` by a kernel that starts from zero and returns outputs only.

    kernel: ``kernel(x, Delta, A, B, C)``, channels first. N tokens in front write the initial state, one column each,
    and N tokens at the end read the final state. Those in front have Delta = 2^-60 and B = 2^60: their decay rounds to
    exactly 1, and powers of two do not round. Those at the end have Delta = 0.
    """
    batch, states = len(x_BTE), A_EN.shape[1]
    one_BNN = torch.eye(states, dtype=x_BTE.dtype, device=x_BTE.device).expand(batch, -1, -1)
    none_BNN, still_BNE = torch.zeros_like(one_BNN), torch.zeros_like(state_BEN.mT)
    parts = (
        [state_BEN.mT, x_BTE, still_BNE],
        [still_BNE + 2.0**-60, delta_BTE, still_BNE],
        [one_BNN * 2.0**60, B_BTN, none_BNN],
        [none_BNN, C_BTN, one_BNN],
    )
    x, delta, B, C = (torch.cat(part, dim=1).mT.contiguous() for part in parts)
    y_BTE = kernel(x, delta, A_EN, B, C).mT
    return y_BTE[:, states:-states], y_BTE[:, -states:].mT
