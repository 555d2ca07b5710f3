"""Parts of a ``Block`` with backward passes by hand, for a loop over segments.

``Linear`` and ``Norm`` keep nothing: the caller has what their gradients need; a frozen weight of ``Linear`` gets none.
Their ``Summed`` forms, and what is built of these, have ``forward`` and ``backward`` per segment, which share a tape,
and ``weight_grads`` for all segments together.

Shape suffixes: B batch, R rows, M memory rows (the last of R), H heads, G heads of keys and values, K head width, C
last rows that have an output, E channels of queries, keys and values together, D width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.models.attention import rotary_table

Weights = tuple[Tensor | None, ...]
Tape = list[tuple[Tensor, ...]]


def learns(weight: Tensor | None) -> bool:
    """Whether there is a weight that is not frozen."""
    return weight is not None and weight.requires_grad


class Linear:
    """x W^T + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """out: where the result belongs; default: a new tensor."""
        if out is None:
            return F.linear(x, self.weight, self.bias)
        x, rows = x.flatten(0, -2), out.view(-1, out.shape[-1])
        if self.bias is None:
            torch.mm(x, self.weight.mT, out=rows)
        else:
            torch.addmm(self.bias, x, self.weight.mT, out=rows)
        return out

    def back(self, dy: Tensor, out: Tensor | None = None) -> Tensor:
        """Gradient of x."""
        if out is None:
            return torch.matmul(dy, self.weight)
        torch.mm(dy.flatten(0, -2), self.weight, out=out.view(-1, out.shape[-1]))
        return out

    def grads(self, dy: Tensor, x: Tensor) -> Weights:
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
        return dy.mT @ x if learns(self.weight) else None, dy.sum(0) if learns(self.bias) else None


class Norm:
    """Layer norm, or RMS norm where there is no bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def normalized(self, x: Tensor) -> tuple[Tensor, ...]:
        """The output, and what is left of x: its mean (not for RMS norm) and 1 / deviation."""
        if self.bias is not None:
            return torch.native_layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        rstd = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * rstd * self.weight, rstd

    def back(self, dy: Tensor, x: Tensor, left: Sequence[Tensor]) -> Tensor:
        """Gradient of x."""
        if self.bias is not None:
            return self._layer_norm(dy, x, left, [True, False, False])[0]
        (rstd,) = left
        g = dy * self.weight
        return rstd * (g - x * (rstd.square() * (g * x).mean(-1, keepdim=True)))

    def grads(self, dy: Tensor, x: Tensor, left: Sequence[Tensor]) -> Weights:
        if self.bias is not None:
            return tuple(self._layer_norm(dy, x, left, [False, True, True])[1:])
        return (dy * x * left[0]).flatten(0, -2).sum(0), None

    def _layer_norm(self, dy: Tensor, x: Tensor, left: Sequence[Tensor], wanted: list[bool]) -> Any:
        backward: Any = torch.ops.aten.native_layer_norm_backward
        return backward(dy, x, x.shape[-1:], *left, self.weight, self.bias, wanted)


class Summed:
    """A part whose forward pass puts on a tape what its backward pass takes from it, in the opposite order. The
    gradients of its weights are added up, segment by segment."""

    sums: Weights = (None, None)

    def weight_grads(self) -> Weights:
        sums, self.sums = self.sums, (None, None)
        return sums


class SummedLinear(Summed, Linear):
    """``Linear`` with a tape."""

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        tape.append((x,))
        return self.apply(x)

    def backward(self, dy: Tensor, tape: Tape) -> Tensor:
        self.collect(dy, *tape.pop())
        return self.back(dy)

    def collect(self, dy: Tensor, x: Tensor) -> None:
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
        weight, bias = self.sums
        if learns(self.weight):
            weight = dy.mT @ x if weight is None else weight.addmm_(dy.mT, x)
        if learns(self.bias):
            bias = dy.sum(0) if bias is None else bias.add_(dy.sum(0))
        self.sums = weight, bias


class SummedNorm(Summed, Norm):
    """``Norm`` with a tape."""

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        y, *left = self.normalized(x)
        tape.append((x, *left))
        return y

    def backward(self, dy: Tensor, tape: Tape) -> Tensor:
        x, *left = tape.pop()
        if self.bias is None:
            self.add(self.grads(dy, x, left))
            return self.back(dy, x, left)
        dx, *new = self._layer_norm(dy, x, left, [True, True, True])
        self.add(new)
        return dx

    def add(self, new: Sequence[Tensor | None]) -> None:
        self.sums = tuple(b if a is None or b is None else a.add_(b) for a, b in zip(self.sums, new, strict=True))


class Activation(NamedTuple):
    """A function and its gradient. ``backward(dy, x)``; ``backward_`` puts it in the place of dy."""

    forward: Callable[[Tensor], Tensor]
    gradient: Any
    options: dict[str, str]

    def backward(self, dy: Tensor, x: Tensor) -> Tensor:
        return self.gradient(dy, x, **self.options)

    def backward_(self, dy: Tensor, x: Tensor) -> None:
        self.gradient.grad_input(dy, x, **self.options, grad_input=dy)


def activation(family: str) -> Activation:
    """The activation of a family of decoders."""
    if family == "llama":
        return Activation(F.silu, torch.ops.aten.silu_backward, {})
    options = {"approximate": "tanh" if family == "gpt2" else "none"}
    return Activation(partial(F.gelu, **options), torch.ops.aten.gelu_backward, options)


class FeedForward:
    """Norm, up (and gate), activation, down."""

    def __init__(
        self, norm: SummedNorm, up: SummedLinear, down: SummedLinear, gate: SummedLinear | None, act: Activation
    ) -> None:
        self.norm, self.up, self.down, self.gate, self.act = norm, up, down, gate, act

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        x = self.norm.forward(x, tape)
        up = self.up.forward(x, tape)
        if self.gate is None:
            tape.append((up,))
            return self.down.forward(self.act.forward(up), tape)
        gate = self.gate.forward(x, tape)
        tape.append((up, gate))
        return self.down.forward(self.act.forward(gate) * up, tape)

    def backward(self, dy: Tensor, tape: Tape) -> Tensor:
        dinner = self.down.backward(dy, tape)
        up, *gated = tape.pop()
        if self.gate is None:
            return self.norm.backward(self.up.backward(self.act.backward(dinner, up), tape), tape)
        (gate,) = gated
        dx = self.gate.backward(self.act.backward(dinner * up, gate), tape)
        dx = self.up.backward(dinner * self.act.forward(gate), tape) + dx
        return self.norm.backward(dx, tape)


class Rotation(NamedTuple):
    """Rotary positions of rows (B, R, heads, K), in place. cos, sin: (R, 1, dims), the sines with the sign of their
    half."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, rows: int, dims: int, base: float, like: Tensor) -> "Rotation | None":
        if not dims:
            return None
        cos, sin = rotary_table(rows, dims, base, like.device, like.dtype)
        left, right = sin.chunk(2, dim=-1)
        return cls(cos[:, None], torch.cat([-left, right], dim=-1)[:, None])

    def turn_(self, x_BRHK: Tensor, back: bool = False) -> None:
        part = x_BRHK[..., : self.cos.shape[-1]]
        swapped = part.roll(part.shape[-1] // 2, -1)
        part.mul_(self.cos).addcmul_(swapped, self.sin, value=-1.0 if back else 1.0)


class LastAttention:
    """Attention of the last C of R rows to all rows up to themselves, for segments that are short: all scores are held.

    Queries, keys and values lie side by side as (B, R, H + 2G, K), not rotated. Here heads come first, which makes one
    copy of three.
    """

    def __init__(self, heads: int, kv_heads: int, rotation: Rotation | None) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.parts = heads, kv_heads, kv_heads
        self.rotation = None if rotation is None else Rotation(*(table.squeeze(1) for table in rotation))

    def forward(self, qkv_BRE: Tensor, hidden_BCR: Tensor, tape: Tape) -> Tensor:
        """(B, C, H*K). hidden: -inf where a row may not look, else 0; the first dimension may be 1."""
        batch, rows, _ = qkv_BRE.shape
        count, shared = hidden_BCR.shape[1], self.heads // self.kv_heads
        qkv_HBRK = qkv_BRE.view(batch, rows, sum(self.parts), -1).permute(2, 0, 1, 3).contiguous()
        if self.rotation is not None:
            self.rotation.turn_(qkv_HBRK[: self.heads + self.kv_heads])
        q, k, v = qkv_HBRK.split(self.parts)
        q, k, v = self.folded(q.narrow(2, rows - count, count)), k.flatten(0, 1), v.flatten(0, 1)
        if shared > 1 or len(hidden_BCR) > 1:
            hidden_BCR = hidden_BCR.repeat(self.kv_heads if len(hidden_BCR) > 1 else 1, shared, 1)
        p = torch.baddbmm(hidden_BCR, q, k.mT, alpha=k.shape[-1] ** -0.5).softmax(-1)
        tape.append((q, k, v, p))
        return self.unfolded(torch.bmm(p, v), batch).permute(1, 2, 0, 3).flatten(2)

    def folded(self, x_HBCK: Tensor) -> Tensor:
        """(G B, H/G C, K): queries that share keys side by side."""
        if self.heads > self.kv_heads:
            x_HBCK = x_HBCK.unflatten(0, (self.kv_heads, -1)).transpose(1, 2).flatten(2, 3)
        return x_HBCK.flatten(0, 1)

    def unfolded(self, x: Tensor, batch: int) -> Tensor:
        """(H, B, C, K) of ``folded``."""
        if self.heads == self.kv_heads:
            return x.view(self.heads, batch, -1, x.shape[-1])
        x = x.view(self.kv_heads, batch, self.heads // self.kv_heads, -1, x.shape[-1])
        return x.transpose(1, 2).flatten(0, 1)

    def backward(self, dy_BCD: Tensor, tape: Tape) -> Tensor:
        """Gradient of all queries, keys and values, (B, R, E)."""
        (q, k, v, p), (batch, count, _) = tape.pop(), dy_BCD.shape
        rows, width = k.shape[1:]
        dy = self.folded(dy_BCD.view(batch, count, self.heads, width).permute(2, 0, 1, 3))
        dscore = torch.ops.aten._softmax_backward_data(torch.bmm(dy, v.mT), p, -1, p.dtype).mul_(width**-0.5)
        dqkv_HBRK = k.new_empty(sum(self.parts), batch, rows, width)
        dq, dk, dv = dqkv_HBRK.split(self.parts)
        if count < rows:
            dq.zero_()
        dq.narrow(2, rows - count, count).copy_(self.unfolded(torch.bmm(dscore, k), batch))
        torch.bmm(dscore.mT, q, out=dk.view(k.shape))
        torch.bmm(p.mT, dy, out=dv.view(v.shape))
        if self.rotation is not None:
            self.rotation.turn_(dqkv_HBRK[: self.heads + self.kv_heads], back=True)
        return dqkv_HBRK.permute(1, 2, 0, 3).flatten(2)
