"""The iteration X <- 2X - XAX towards a pseudo-inverse, as one node of the graph.

Its gradient is that of the iteration itself, step by step, so that it is exact for any number of steps. The slow twin
is the same loop in plain tensor operations. Doubling does not round, and sums are taken in the twin's order, so that
both give the same bits with MKL.

Shape suffixes: X any leading dimensions (one in the node), R rows and D columns of a matrix.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_memory.memory.precision import outside_autocast


class _Newton(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A_XRD: Tensor, X_XDR: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        kept, product = [A_XRD], A_XRD.new_zeros(())
        for _ in range(steps):
            product = torch.bmm(A_XRD, X_XDR)
            kept += [X_XDR, product]
            X_XDR = torch.baddbmm(X_XDR, X_XDR, product, beta=2, alpha=-1)
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(product)
        return X_XDR, product

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor):
        A_XRD, *kept = ctx.saved_tensors
        dX_XDR, dA_XRD = grads[0], torch.zeros_like(A_XRD)
        for X_XDR, product in zip(kept[-2::-2], kept[::-2], strict=True):
            minus_XRR = torch.bmm(X_XDR.mT, dX_XDR)  # of the product, up to the sign
            dX_XDR = torch.baddbmm(dX_XDR, dX_XDR, product.mT, beta=2, alpha=-1)
            dX_XDR.baddbmm_(A_XRD.mT, minus_XRR, alpha=-1)
            dA_XRD.baddbmm_(minus_XRR, X_XDR.mT, alpha=-1)
        return dA_XRD, dX_XDR, None


def newton(A_XRD: Tensor, X_XDR: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """X after so many steps from ``X_XDR``, and the product of the last one, AX or XA by its smaller size.

    The product has no gradient.
    """
    rows, columns = A_XRD.shape[-2:]
    if rows > columns:
        X, product = newton(A_XRD.mT, X_XDR.mT, steps)
        return X.mT, product.mT
    flat = A_XRD.reshape(-1, rows, columns), X_XDR.reshape(-1, columns, rows)
    X, product = _Newton.apply(*flat, steps)  # pyright: ignore[reportGeneralTypeIssues]
    return X.view(X_XDR.shape), product.view(*A_XRD.shape[:-2], rows, rows)
