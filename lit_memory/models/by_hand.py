"""Parts of a ``Block`` with backward passes by hand, for a loop over segments.

A part has ``forward`` and ``backward`` per segment: the first puts on a tape what the second takes from it, in the
opposite order, to pass the gradient of the part's input on. ``weight_grads`` is for all segments together: ``Linear``
and ``Norm`` keep what they need for one product in place of one for every segment; their ``Summed`` forms add segment
by segment, which keeps nothing.

Shape suffixes: B batch, R rows, M memory rows (the last of R), H heads, G heads of keys and values, K head width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.models.attention import rotary_table

Weights = tuple[Tensor | None, ...]
Tape = list[tuple[Tensor, ...]]


class Linear:
    """x W^T + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.inputs: list[Tensor] = []
        self.grads: list[Tensor] = []

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        tape.append((x,))
        return F.linear(x, self.weight, self.bias)

    def backward(self, dy: Tensor, tape: Tape) -> Tensor:
        self.collect(dy, *tape.pop())
        return torch.matmul(dy, self.weight)

    def collect(self, dy: Tensor, x: Tensor) -> None:
        self.inputs.append(x)
        self.grads.append(dy)

    def weight_grads(self) -> Weights:
        dy, x = (torch.stack(parts[::-1]).flatten(0, -2) for parts in (self.grads, self.inputs))
        return dy.mT @ x, None if self.bias is None else dy.sum(0)


class Summed:
    """Gradients of weights that are added up, segment by segment."""

    sums: Weights = (None, None)

    def weight_grads(self) -> Weights:
        sums, self.sums = self.sums, (None, None)
        return sums


class SummedLinear(Summed, Linear):
    """``Linear`` that adds the gradients of its weights up."""

    def collect(self, dy: Tensor, x: Tensor) -> None:
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
        weight, bias = self.sums
        weight = dy.mT @ x if weight is None else weight.addmm_(dy.mT, x)
        if self.bias is not None:
            bias = dy.sum(0) if bias is None else bias.add_(dy.sum(0))
        self.sums = weight, bias


class Norm:
    """Layer norm, or RMS norm where there is no bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps
        self.left: list[tuple[Tensor, ...]] = []
        self.grads: list[Tensor] = []

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        """Keeps the input, and its mean (not for RMS norm) and 1 / deviation."""
        if self.bias is None:
            rstd = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            tape.append((x, rstd))
            return x * rstd * self.weight
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        tape.append((x, mean, rstd))
        return y

    def backward(self, dy: Tensor, tape: Tape) -> Tensor:
        saved = tape.pop()
        self.collect(dy, saved)
        if self.bias is not None:
            return self._layer_norm(dy, saved, [True, False, False])[0]
        x, rstd = saved
        g = dy * self.weight
        return rstd * (g - x * (rstd.square() * (g * x).mean(-1, keepdim=True)))

    def collect(self, dy: Tensor, saved: tuple[Tensor, ...]) -> None:
        self.left.append(saved)
        self.grads.append(dy)

    def weight_grads(self) -> Weights:
        dy = torch.stack(self.grads)
        return self.grads_of(dy, tuple(torch.stack(parts) for parts in zip(*self.left, strict=True)))

    def grads_of(self, dy: Tensor, saved: tuple[Tensor, ...]) -> Weights:
        if self.bias is not None:
            return self._layer_norm(dy, saved, [False, True, True])[1:]
        x, rstd = saved
        return (dy * x * rstd).flatten(0, -2).sum(0), None

    def _layer_norm(self, dy: Tensor, saved: tuple[Tensor, ...], wanted: list[bool]) -> Any:
        backward: Any = torch.ops.aten.native_layer_norm_backward
        x, mean, rstd = saved
        return backward(dy, x, x.shape[-1:], mean, rstd, self.weight, self.bias, wanted)


class SummedNorm(Summed, Norm):
    """``Norm`` that adds the gradients of its weights up."""

    def backward(self, dy: Tensor, tape: Tape) -> Tensor:
        if self.bias is None:
            return super().backward(dy, tape)
        dx, *new = self._layer_norm(dy, tape.pop(), [True, True, True])
        self.add(new)
        return dx

    def collect(self, dy: Tensor, saved: tuple[Tensor, ...]) -> None:
        self.add(self.grads_of(dy, saved))

    def add(self, new: Sequence[Tensor | None]) -> None:
        self.sums = tuple(b if a is None or b is None else a.add_(b) for a, b in zip(self.sums, new, strict=True))


class Activation(NamedTuple):
    """A function and its gradient, ``backward(dy, x)``."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def activation(family: str) -> Activation:
    """The activation of a family of decoders."""
    if family == "llama":
        return Activation(F.silu, torch.ops.aten.silu_backward)
    form = "tanh" if family == "gpt2" else "none"
    return Activation(
        lambda x: F.gelu(x, approximate=form), lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate=form)
    )


class FeedForward:
    """Norm, up (and gate), activation, down."""

    def __init__(self, norm: Norm, up: Linear, down: Linear, gate: Linear | None, act: Activation) -> None:
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


class MemoryAttention:
    """Attention of the last M of R rows to all rows up to themselves. Their queries, keys and values lie side by side
    as (B, R, H + 2G, K), rotated already."""

    def __init__(self, heads: int, kv_heads: int, count: int) -> None:
        self.heads, self.kv_heads, self.count = heads, kv_heads, count

    def forward(self, qkv_BRHK: Tensor, hidden_BMR: Tensor | None, tape: Tape) -> Tensor:
        """(B, M, H*K). hidden: True where a row may not look; (B or 1, M, R), None if all may."""
        batch, rows, m = len(qkv_BRHK), qkv_BRHK.shape[1], self.count
        q, k, v = self._heads(qkv_BRHK)
        score = torch.bmm(q, k.mT)
        if hidden_BMR is not None:
            score.view(batch, -1, m, rows).masked_fill_(hidden_BMR.unsqueeze(1), -torch.inf)
        p = score.softmax(-1)
        tape.append((qkv_BRHK, p))
        return torch.bmm(p, v).view(batch, self.heads, m, -1).transpose(1, 2).flatten(2)

    def _heads(self, qkv_BRHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries of the last rows, those that share keys side by side, and keys and values: (B*G, ..., K)."""
        rows, g = qkv_BRHK.shape[1], self.kv_heads
        q, k, v = qkv_BRHK.transpose(1, 2).split([self.heads, g, g], dim=1)
        k, v = (x.reshape(-1, rows, x.shape[-1]) for x in (k, v))
        return q.narrow(2, rows - self.count, self.count).reshape(len(k), -1, k.shape[-1]) * k.shape[-1] ** -0.5, k, v

    def backward(self, dy_BMD: Tensor, tape: Tape) -> Tensor:
        """Gradient of all queries, keys and values, (B, R, H + 2G, K)."""
        (qkv_BRHK, p), h, g, m = tape.pop(), self.heads, self.kv_heads, self.count
        q, k, v = self._heads(qkv_BRHK)
        batch, (_, rows, width) = len(dy_BMD), k.shape
        dy = dy_BMD.view(batch, m, h, width).transpose(1, 2).reshape(q.shape)
        dscore = torch.ops.aten._softmax_backward_data(torch.bmm(dy, v.mT), p, -1, p.dtype)
        dqkv = q.new_zeros(batch, rows, h + 2 * g, width)
        dq, dk, dv = dqkv.transpose(1, 2).split([h, g, g], dim=1)
        torch.mul(torch.bmm(dscore, k).view(batch, h, m, width), width**-0.5, out=dq.narrow(2, rows - m, m))
        dk.copy_(torch.bmm(dscore.mT, q).view(dk.shape))
        dv.copy_(torch.bmm(p.mT, dy).view(dv.shape))
        return dqkv


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
