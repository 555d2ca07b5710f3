"""What a ``Block`` does with single rows, with a backward pass by hand that keeps little.

Norm and activation are computed again on the way back, and in ``Finish`` what the feed-forward's first products give as
well.

Shape suffixes: N rows in any shape, D width, E heads of queries times head width, F width of the feed-forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_memory.memory.precision import outside_autocast
from lit_memory.models.by_hand import Activation, Linear, Norm, activation
from lit_memory.models.plain import modules_of


class RowFeedForward:
    """Norm, up (and gate), activation, down.

    inner: outputs of up (and gate), (N, F) each, to be filled by the forward pass. dinner: their gradients, and dnormed
    (N, D) that of the norm's output, to be filled by the backward pass.
    """

    def __init__(self, norm: Norm, up: Linear, down: Linear, gate: Linear | None, act: Activation) -> None:
        self.norm, self.down, self.act = norm, down, act
        self.gated, self.inward = gate is not None, [up] if gate is None else [up, gate]

    def room(self, x_ND: Tensor) -> list[Tensor]:
        """Room for ``inner``, or ``dinner``."""
        return [x_ND.new_empty(*x_ND.shape[:-1], len(linear.weight)) for linear in self.inward]

    def enter(self, x_ND: Tensor, inner: list[Tensor]) -> Sequence[Tensor]:
        """Fills ``inner`` in. Returns what the norm leaves for the way back."""
        normed_ND, *left = self.norm.normalized(x_ND)
        for linear, out_NF in zip(self.inward, inner, strict=True):
            linear.apply(normed_ND, out_NF)
        return left

    def leave(self, inner: list[Tensor]) -> Tensor:
        return self.down.apply(self.activated(inner))

    def activated(self, inner: list[Tensor]) -> Tensor:
        return self.act.forward(inner[1]) * inner[0] if self.gated else self.act.forward(inner[0])

    def backward(
        self,
        dy_ND: Tensor,
        x_ND: Tensor,
        left: Sequence[Tensor],
        inner: list[Tensor],
        dinner: list[Tensor],
        dnormed_ND: Tensor,
    ) -> Tensor:
        """Gradient of x."""
        dup_NF = self.down.back(dy_ND, dinner[0])
        if self.gated:
            up_NF, gate_NF = inner
            torch.mul(dup_NF, up_NF, out=dinner[1])
            self.act.backward_(dinner[1], gate_NF)
            dup_NF.mul_(self.act.forward(gate_NF))
            torch.add(self.inward[1].back(dinner[1]), self.inward[0].back(dup_NF), out=dnormed_ND)
        else:
            self.act.backward_(dup_NF, inner[0])
            self.inward[0].back(dup_NF, dnormed_ND)
        return self.norm.back(dnormed_ND, x_ND, left)

    def weight_grads(
        self, dy_ND: Tensor, x_ND: Tensor, inner: list[Tensor], dinner: list[Tensor]
    ) -> list[Tensor | None]:
        """Of up, down and gate, weight and bias each."""
        normed_ND = self.norm.normalized(x_ND)[0]
        up, *gate = (linear.grads(d_NF, normed_ND) for linear, d_NF in zip(self.inward, dinner, strict=True))
        parts = up, self.down.grads(dy_ND, self.activated(inner)), *(gate or [(None, None)])
        return [grad for part in parts for grad in part]


def feed_forward(family: str, eps: float, weights: tuple[Any, ...]) -> RowFeedForward:
    """weights: of norm2, up, down and gate, weight and bias each."""
    norm, normb, up, upb, down, downb, gate, gateb = weights
    gated = None if gate is None else Linear(gate, gateb)
    return RowFeedForward(Norm(norm, normb, eps), Linear(up, upb), Linear(down, downb), gated, activation(family))


def weights_of(block: Any) -> list[Tensor | None]:
    """Weight and bias of ``modules_of`` and of the gate, None for those that the block does not have."""
    modules = [*modules_of(block), *([None] if block.gate is None else [])]
    return [getattr(module, name, None) for module in modules for name in ("weight", "bias")]


class Finish(torch.autograd.Function):
    """``Block.join`` of what attention has found, before its projection. Rows of the weights: out, then those of
    ``feed_forward``."""

    @staticmethod
    def forward(ctx, family: str, eps: float, x_ND, attended_NE, *weights):
        out, ff = Linear(*weights[:2]), feed_forward(family, eps, weights[2:])
        y_ND = x_ND + out.apply(attended_NE)
        fed_ND, inner = x_ND if family == "gpt_neox" else y_ND, ff.room(x_ND)
        ff.enter(fed_ND, inner)
        ctx.family, ctx.eps = family, eps
        ctx.save_for_backward(fed_ND, attended_NE, *weights)
        return y_ND + ff.leave(inner)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, *grads):
        (dy_ND,), (x_ND, attended_NE, *weights) = grads, ctx.saved_tensors
        out, ff = Linear(*weights[:2]), feed_forward(ctx.family, ctx.eps, tuple(weights[2:]))
        inner, dinner, dnormed_ND = ff.room(x_ND), ff.room(x_ND), torch.empty_like(x_ND)
        left = ff.enter(x_ND, inner)
        dx_ND = dy_ND + ff.backward(dy_ND, x_ND, left, inner, dinner, dnormed_ND)
        dout_ND = dy_ND if ctx.family == "gpt_neox" else dx_ND
        parts = out.grads(dout_ND, attended_NE), ff.norm.grads(dnormed_ND, x_ND, left)
        fed = ff.weight_grads(dy_ND, x_ND, inner, dinner)
        return None, None, dx_ND, out.back(dout_ND), *(grad for part in parts for grad in part), *fed


def finished(block: Any, x_ND: Tensor, attended_NE: Tensor, config: Any) -> Tensor:
    """``block.join(x, block.attention.out(attended))``. Gated feed-forwards are left to autograd."""
    if block.gate is not None:
        return block.join(x_ND, block.attention.out(attended_NE))
    return Finish.apply(config.family, config.norm_eps, x_ND, attended_NE, *weights_of(block)[4:])
