"""The loop over the segments of a chunk in one layer of ARMT, forward and backward by hand; see ``armt_segments.py``.

What the segments have of a kind lies in one tensor, so that gradients of weights are one product for the chunk, and
nothing is copied together.

Shape suffixes: S segments, B batch, T token rows, M memory rows, R = T + M, A rows that recall (T or R), C channels of
a key, D width, H heads of queries, keys and values together, P head width, E = H P, G = C + D + 1, K features of a key.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_memory.memory.associative_chunk import Chunk, Flags
from lit_memory.memory.associative_compiled import CompiledChunk
from lit_memory.models.by_hand import Linear, Norm, Rotation, Tape, Weights
from lit_memory.models.rows_by_hand import feed_forward


class Shape(NamedTuple):
    """What the loop has to know of its layer, besides weights."""

    flags: Flags
    memory_tokens: int
    channels: int
    family: str
    heads: int
    kv_heads: int
    rotary: int
    base: float
    eps: float
    compiled: bool
    """Whether the memory runs through compiled loops."""


class Given(NamedTuple):
    """Tensors that enter a chunk.

    x_SBAD: rows that recall. queries_SBAC: channels of their queries. Where memory rows do not recall, their queries,
    keys and values (S, B, M, H*P) and their residual (S, B, M, D), which for a parallel block has the feed-forward, are
    known beforehand. hidden_SBMR: True where a memory row may not look. live_SB: 0 for a sample that has ended.
    """

    x_SBAD: Tensor
    queries_SBAC: Tensor
    A_BKD: Tensor
    z_BK: Tensor
    qkv_SBME: Tensor | None
    residual_SBMD: Tensor | None
    hidden_SBMR: Tensor | None
    live_SB: Tensor | None


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
        return self._joined(torch.bmm(p, v), batch)

    def _joined(self, y: Tensor, batch: int) -> Tensor:
        return y.view(batch, self.heads, self.count, -1).transpose(1, 2).flatten(2)

    def _heads(self, qkv_BRHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries of the last rows, those that share keys side by side, and keys and values: (B*G, ..., K)."""
        rows, g = qkv_BRHK.shape[1], self.kv_heads
        q, k, v = qkv_BRHK.transpose(1, 2).split([self.heads, g, g], dim=1)
        k, v = (x.reshape(-1, rows, x.shape[-1]) for x in (k, v))
        return q.narrow(2, rows - self.count, self.count).reshape(len(k), -1, k.shape[-1]) * k.shape[-1] ** -0.5, k, v

    def backward(self, dy_BMD: Tensor, dqkv_BRHK: Tensor, tape: Tape) -> Tensor:
        """The output again. dqkv: where the gradient of all queries, keys and values belongs."""
        (qkv_BRHK, p), h, g, m = tape.pop(), self.heads, self.kv_heads, self.count
        q, k, v = self._heads(qkv_BRHK)
        batch, (_, rows, width) = len(dy_BMD), k.shape
        dy = dy_BMD.view(batch, m, h, width).transpose(1, 2).reshape(q.shape)
        dscore = torch.ops.aten._softmax_backward_data(torch.bmm(dy, v.mT), p, -1, p.dtype)
        dq, dk, dv = dqkv_BRHK.transpose(1, 2).split([h, g, g], dim=1)
        dq.narrow(2, 0, rows - m).zero_()
        torch.mul(torch.bmm(dscore, k).view(batch, h, m, width), width**-0.5, out=dq.narrow(2, rows - m, m))
        dk.copy_(torch.bmm(dscore.mT, q).view(dk.shape))
        dv.copy_(torch.bmm(p.mT, dy).view(dv.shape))
        return self._joined(torch.bmm(p, v), batch)


class Cell:
    """The loop over the segments of a chunk, forward and from the end. training: whether there is a way back."""

    def __init__(self, shape: Shape, given: Given, weights: tuple[Any, ...], training: bool) -> None:
        self.shape, self.given = shape, given
        n1, n1b, qkv, qkvb, out, outb, *fed, kvb, kvbb = weights
        self.norm, self.to_qkv, self.out = Norm(n1, n1b, shape.eps), Linear(qkv, qkvb), Linear(out, outb)
        self.ff, self.to_written = feed_forward(shape.family, shape.eps, tuple(fed)), Linear(kvb, kvbb)
        self.attention = MemoryAttention(shape.heads, shape.kv_heads, shape.memory_tokens)
        segments, batch, asking, width = given.x_SBAD.shape
        self.tokens = asking - (shape.memory_tokens if given.qkv_SBME is None else 0)
        rows = self.tokens + shape.memory_tokens
        self.rotation = Rotation.of(rows, shape.rotary, shape.base, given.x_SBAD)
        chunk = CompiledChunk if shape.compiled else Chunk
        self.memory = chunk(given.A_BKD, given.z_BK, given.queries_SBAC, shape.memory_tokens, shape.flags)
        self.parallel = shape.family == "gpt_neox"
        self.feeds = not (self.parallel and given.qkv_SBME is not None)
        new, memory = given.x_SBAD.new_empty, (batch, shape.memory_tokens)
        self.rows_SBAD, self.left_SBMD = new(given.x_SBAD.shape), new(segments, *memory, width)
        self.qkv_SBRE = new(segments, batch, rows, len(qkv))
        self.tape: Tape = []
        kept = segments if training else 1  # what only the way back reads
        self.mid_SBMD = None if self.parallel else new(kept, *memory, width)
        self.inner = self.ff.room(new(kept, *memory, width)) if self.feeds else []
        self.training, self.kept = training, kept

    def residual(self, s: int) -> Tensor:
        """What the block adds to: memory rows after their recall; with their feed-forward if that is known."""
        given = self.given.residual_SBMD
        return self.rows_SBAD[s, :, self.tokens :] if given is None else given[s]

    def forward(self, s: int) -> None:
        """Fills in recalled rows, their rotated queries, keys and values, and memory rows that leave the block."""
        shape, given, at = self.shape, self.given, s % self.kept
        rows_BAD = self.memory.recall(s, given.x_SBAD[s], self.rows_SBAD[s])
        (normed_BAD, *left_over), qkv_BRE = self.norm.normalized(rows_BAD), self.qkv_SBRE[s]
        if given.qkv_SBME is None:
            self.to_qkv.apply(normed_BAD, qkv_BRE)
        else:
            torch.cat([self.to_qkv.apply(normed_BAD), given.qkv_SBME[s]], dim=1, out=qkv_BRE)
        heads = shape.heads + shape.kv_heads
        qkv_BRHP = qkv_BRE.unflatten(-1, (heads + shape.kv_heads, -1))
        if self.rotation is not None:
            self.rotation.turn_(qkv_BRHP[:, :, :heads])
        hidden = None if given.hidden_SBMR is None else given.hidden_SBMR[s]
        attended_BME = self.attention.forward(qkv_BRHP, hidden, self.tape)
        self.tape.append(tuple(left_over))
        residual, left = self.residual(s), self.left_SBMD[s]
        torch.add(residual, self.out.apply(attended_BME), out=left)
        if self.feeds:
            if self.mid_SBMD is not None:
                residual = self.mid_SBMD[at].copy_(left)
            inner = [part[at] for part in self.inner]
            self.tape.append(tuple(self.ff.enter(residual, inner)))
            left += self.ff.leave(inner)
        if not self.training:
            self.tape.clear()
        self.memory.write(self.to_written.apply(left), None if given.live_SB is None else given.live_SB[s])

    def begin_backward(self, dA_BKD: Tensor, dz_BK: Tensor) -> None:
        self.memory.begin_backward(dA_BKD, dz_BK)
        self.drows_SBAD, self.dnormed_SBAD = torch.empty_like(self.rows_SBAD), torch.empty_like(self.rows_SBAD)
        self.dqkv_SBRE, self.dleft_SBMD = torch.empty_like(self.qkv_SBRE), torch.empty_like(self.left_SBMD)
        self.dmid_SBMD = self.dleft_SBMD if self.parallel else torch.empty_like(self.left_SBMD)
        self.dinner, self.dfed_SBMD = [torch.empty_like(part) for part in self.inner], torch.empty_like(self.left_SBMD)
        self.attended: list[Tensor] = []
        self.dresidual: list[Tensor] = []
        self.dwritten: list[Tensor] = []

    def backward(self, s: int, dtokens_BTD: Tensor, dqkv_BTHP: Tensor, dleft_BMD: Tensor) -> None:
        """Fills in the gradients of what segment s was given."""
        shape, tokens, dleft = self.shape, self.tokens, self.dleft_SBMD[s]
        self.dwritten.append(self.memory.write_backward())
        torch.add(dleft_BMD, self.to_written.back(self.dwritten[-1]), out=dleft)
        dresidual, dmid = dleft, self.dmid_SBMD[s]
        if self.feeds:
            inner, dinner = ([part[s] for part in parts] for parts in (self.inner, self.dinner))
            x_BMD = self.residual(s) if self.mid_SBMD is None else self.mid_SBMD[s]
            dresidual = dleft + self.ff.backward(dleft, x_BMD, self.tape.pop(), inner, dinner, self.dfed_SBMD[s])
            dmid = dmid if self.parallel else dmid.copy_(dresidual)
        left_over, dqkv = self.tape.pop(), self.dqkv_SBRE[s].unflatten(-1, dqkv_BTHP.shape[2:])
        self.attended.append(self.attention.backward(self.out.back(dmid), dqkv, self.tape))
        dqkv[:, :tokens] += dqkv_BTHP
        if self.rotation is not None:
            self.rotation.turn_(dqkv[:, :, : shape.heads + shape.kv_heads], back=True)
        rows, drows = self.rows_SBAD[s], self.drows_SBAD[s]
        dnormed = self.to_qkv.back(self.dqkv_SBRE[s, :, : rows.shape[1]], self.dnormed_SBAD[s])
        dx = self.norm.back(dnormed, rows, left_over)
        torch.add(dx[:, :tokens], dtokens_BTD, out=drows[:, :tokens])
        if self.given.qkv_SBME is None:
            torch.add(dx[:, tokens:], dresidual, out=drows[:, tokens:])
        else:
            self.dresidual.append(dresidual)
        self.memory.recall_backward(s, drows)

    def finish_backward(self) -> tuple[Tensor | None, ...]:
        """Gradients of ``Given``, and of the weights."""
        dA, dz, dqueries = self.memory.finish_backward()
        asking, known = self.rows_SBAD.shape[2], (None, None)
        if self.given.qkv_SBME is not None:
            known = self.dqkv_SBRE[:, :, asking:], torch.stack(self.dresidual[::-1])
        return self.drows_SBAD, dqueries, dA, dz, *known, None, None, *self.weight_grads()

    def weight_grads(self) -> list[Tensor | None]:
        normed, rows, given = self.norm.normalized(self.rows_SBAD)[0], self.rows_SBAD, self.given.residual_SBMD
        dqkv, attended = self.dqkv_SBRE[:, :, : rows.shape[2]], torch.stack(self.attended[::-1])
        parts = [norm_grads(self.norm, self.dnormed_SBAD, rows), self.to_qkv.grads(dqkv, normed)]
        parts.append(self.out.grads(self.dmid_SBMD, attended))
        fed: list[Tensor | None] = [None] * 8
        if self.feeds:
            x_SBMD = rows[:, :, self.tokens :] if given is None else given
            x_SBMD = x_SBMD if self.mid_SBMD is None else self.mid_SBMD
            fed = [*norm_grads(self.ff.norm, self.dfed_SBMD, x_SBMD)]
            fed += self.ff.weight_grads(self.dleft_SBMD, x_SBMD, self.inner, self.dinner)
        written = self.to_written.grads(torch.stack(self.dwritten[::-1]), self.left_SBMD)
        return [*(grad for part in parts for grad in part), *fed, *written]


def norm_grads(norm: Norm, dy: Tensor, x: Tensor) -> Weights:
    """Gradients of the weights, summed from the last segment on."""
    dy, x = dy.flip(0), x.flip(0)
    return norm.grads(dy, x, norm.normalized(x)[1:])
