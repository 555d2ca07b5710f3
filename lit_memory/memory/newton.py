"""The iteration X <- 2X - XAX towards a pseudo-inverse, as one node of the graph.

Its gradient is that of the iteration itself, step by step, so that it is exact for any number of steps. The slow twin
is the same loop in plain tensor operations, which also serves under functorch's transforms. Doubling does not round,
and sums are taken in the twin's order, so that both give the same bits with MKL.

Shape suffixes: X any leading dimensions (one in the node), R rows and D columns of a matrix.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_memory.memory.precision import outside_autocast

SLACK = 0.01
"""How far below 0 an eigenvalue of a product may be before it counts as one that diverges."""


def plain_newton(A_XRD: Tensor, X_XDR: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The loop in plain tensor operations."""
    product = A_XRD.new_zeros(())
    for _ in range(steps):
        product = A_XRD @ X_XDR
        X_XDR = 2 * X_XDR - X_XDR @ product
    return X_XDR, product.detach()


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
    if torch._C._are_functorch_transforms_active():
        return plain_newton(A_XRD, X_XDR, steps)
    flat = A_XRD.reshape(-1, rows, columns), X_XDR.reshape(-1, columns, rows)
    X, product = _Newton.apply(*flat, steps)  # pyright: ignore[reportGeneralTypeIssues]
    return X.view(X_XDR.shape), product.view(*A_XRD.shape[:-2], rows, rows)


def diverges(product_XRR: Tensor, steps: int) -> bool:
    """Whether so many steps from a multiple c of A^T have left their way: ``product_XRR`` is that of the last one.

    The next product, 2P - P^2, has the eigenvalues 1 - (1 - c s^2)^(2^steps) of the singular values s of A: in [0, 1]
    where c s^2 is at most 2, else below 0. That they are not is what a Cholesky decomposition finds out.
    """
    slack = SLACK + 4 * 2**steps * torch.finfo(product_XRR.dtype).eps  # rounding errors double with every step
    with torch.no_grad():
        next_XRR = 2 * product_XRR - product_XRR @ product_XRR
        next_XRR.diagonal(dim1=-2, dim2=-1).add_(slack)
        failed_X = torch.linalg.cholesky_ex(next_XRR).info != 0
        return bool(failed_X.any()) or not bool(next_XRR.isfinite().all())
