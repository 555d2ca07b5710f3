"""The scans of ``scan.py`` on a CPU through the loops of ``kernels.py``, one node of the graph each.

numba (the extra ``fast``) compiles the loops when the first scan runs, which takes some ten seconds, and keeps them in
``$NUMBA_CACHE_DIR``. The functions have the arguments and results of ``selective_scan`` and ``decayed_attention`` in
``scan.py``, whose plain tensor operations are their slow twins and serve wherever ``applies`` is False.

Shape suffixes: as in ``kernels.py``.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@lru_cache
def installed() -> bool:
    """Whether numba is there. It is not imported."""
    return find_spec("numba") is not None


def missing() -> str:
    """The line that tells the user that numba is missing; "" where it is installed."""
    advice = "pip install 'lit-memory[fast]' makes a training step of ARMT, Mamba and RWKV faster on a CPU"
    return "" if installed() else f"numba is not installed: {advice}"


def applies(state: Tensor) -> bool:
    """Whether a recurrence from this state can run compiled: on a CPU in fp32 or fp64, no vmap, no torch.compile."""
    transformed = torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()
    return (
        state.device.type == "cpu" and state.dtype in (torch.float32, torch.float64) and not transformed and installed()
    )


def _kernels() -> Any:
    from lit_memory.memory import kernels

    return kernels


def arrays(*tensors: Tensor) -> list[Any]:
    """The tensors as contiguous numpy arrays, which share their memory where they are contiguous."""
    return [t.detach().contiguous().numpy() for t in tensors]


def _starts(state_BX: Tensor, tokens: int) -> Tensor:
    """Room for the state before every chunk."""
    chunks = -(-tokens // _kernels().CHUNK)
    return state_BX.new_empty(len(state_BX), chunks, *state_BX.shape[1:])


def _new(*tensors: Tensor) -> list[Tensor]:
    """Contiguous tensors of these shapes, to be written to."""
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTE: Tensor, delta_BTE: Tensor, A_NE: Tensor, B_BTN: Tensor, C_BTN: Tensor, state_BNE: Tensor
    ):
        y_BTE, last_BNE = _new(x_BTE, state_BNE)
        starts_BSNE = _starts(state_BNE, x_BTE.shape[1])
        inputs = arrays(x_BTE, delta_BTE, A_NE, B_BTN, C_BTN, state_BNE)
        _kernels().selective_forward(*inputs, *arrays(y_BTE, starts_BSNE, last_BNE))
        ctx.save_for_backward(x_BTE, delta_BTE, A_NE, B_BTN, C_BTN, starts_BSNE)
        return y_BTE, last_BNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        *inputs, starts_BSNE = ctx.saved_tensors
        found = _new(*inputs, grads[1])
        _kernels().selective_backward(*arrays(*inputs, starts_BSNE, *grads), *arrays(*found))
        return tuple(found)


class _DecayedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r_BTK, k_BTK, v_BTV, decay_BTK, state_BKV):
        o_BTV, last_BKV = _new(v_BTV, state_BKV)
        starts_BSKV = _starts(state_BKV, r_BTK.shape[1])
        inputs = arrays(r_BTK, k_BTK, v_BTV, decay_BTK, state_BKV)
        _kernels().attention_forward(*inputs, *arrays(o_BTV, starts_BSKV, last_BKV))
        ctx.save_for_backward(r_BTK, k_BTK, v_BTV, decay_BTK, starts_BSKV)
        return o_BTV, last_BKV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        *inputs, starts_BSKV = ctx.saved_tensors
        found = _new(*inputs, grads[1])
        _kernels().attention_backward(*arrays(*inputs, starts_BSKV, *grads), *arrays(*found))
        return tuple(found)


def selective_scan(
    x_BTE: Tensor, delta_BTE: Tensor, A_EN: Tensor, B_BTN: Tensor, C_BTN: Tensor, state_BEN: Tensor
) -> tuple[Tensor, Tensor]:
    """``scan.selective_scan`` of tensors in one precision."""
    y_BTE, last_BNE = _SelectiveScan.apply(x_BTE, delta_BTE, A_EN.mT, B_BTN, C_BTN, state_BEN.mT)
    return y_BTE, last_BNE.mT.contiguous()


def decayed_attention(
    r_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, decay_BTHK: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """``scan.decayed_attention`` of tensors in one precision, without its bonus."""
    heads = state_BHKV.shape[1]
    inputs = (t.transpose(1, 2).flatten(0, 1) for t in (r_BTHK, k_BTHK, v_BTHV, decay_BTHK))
    o_BTV, last_BKV = _DecayedAttention.apply(*inputs, state_BHKV.flatten(0, 1))
    return o_BTV.unflatten(0, (-1, heads)).transpose(1, 2), last_BKV.unflatten(0, (-1, heads))
