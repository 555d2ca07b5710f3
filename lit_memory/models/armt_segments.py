"""A chunk of segments in one layer of ARMT, as one node of the graph with a backward pass by hand.

Only the memory goes on from segment to segment. So the loop recalls, makes queries, keys and values of all rows, and
attends, feeds forward and writes at the memory rows alone. What the token rows do with their attention and feed-forward
is left to the caller, for all segments at once. The slow twin is ``ARMTLayer.forward``, segment after segment.

Shape suffixes: B batch, S segments, T token rows, M memory rows, R = T + M, A rows that recall (T or R), C channels of
a key, D width, H heads of queries, keys and values together, P head width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lit_memory.memory.associative import AssociativeState
from lit_memory.memory.associative_chunk import Chunk, Flags
from lit_memory.models.attention import attention_mask
from lit_memory.models.by_hand import FeedForward, Linear, MemoryAttention, Norm, Rotation, activation
from lit_memory.models.decoder import Block
from lit_memory.recurrence import detach


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


class Given(NamedTuple):
    """Tensors that enter a chunk.

    x_BSAD: rows that recall. queries_BSAC: channels of their queries. Where memory rows do not recall, their queries,
    keys and values (B, S, M, H*P) and their residual (B, S, M, D), which for a parallel block has the feed-forward, are
    known beforehand. hidden_BSMR: True where a memory row may not look. live_BS: 0 for a sample that has ended.
    """

    x_BSAD: Tensor
    queries_BSAC: Tensor
    A_BKD: Tensor
    z_BK: Tensor
    qkv_BSME: Tensor | None
    residual_BSMD: Tensor | None
    hidden_BSMR: Tensor | None
    live_BS: Tensor | None


WEIGHTS = ("norm1", "attention.qkv", "attention.out", "norm2", "up", "down", "gate")


def weights_of(block: Block) -> list[Tensor | None]:
    """Weight and bias of every part of a block, in the order of ``WEIGHTS``."""
    modules = [block.gate if name == "gate" else block.get_submodule(name) for name in WEIGHTS]
    return [getattr(module, name, None) for module in modules for name in ("weight", "bias")]


class Cell:
    """The loop over the segments of a chunk, forward and from the end."""

    def __init__(self, shape: Shape, given: Given, weights: tuple[Any, ...]) -> None:
        self.shape, self.given = shape, given
        (n1, n1b, qkv, qkvb, out, outb, n2, n2b, up, upb, down, downb, gate, gateb, kvb, kvbb) = weights
        self.norm, self.qkv, self.out = Norm(n1, n1b, shape.eps), Linear(qkv, qkvb), Linear(out, outb)
        self.ff = FeedForward(
            Norm(n2, n2b, shape.eps),
            Linear(up, upb),
            Linear(down, downb),
            None if gate is None else Linear(gate, gateb),
            activation(shape.family),
        )
        self.key_value_beta = Linear(kvb, kvbb)
        self.attention = MemoryAttention(shape.heads, shape.kv_heads, shape.memory_tokens)
        self.tokens = given.x_BSAD.shape[2] - (shape.memory_tokens if given.qkv_BSME is None else 0)
        rows = self.tokens + shape.memory_tokens
        self.rotation = Rotation.of(rows, shape.rotary, shape.base, given.x_BSAD)
        self.memory = Chunk(given.A_BKD, given.z_BK, given.queries_BSAC, shape.memory_tokens, shape.flags)
        self.parallel = shape.family == "gpt_neox"
        self.feeds = not (self.parallel and given.qkv_BSME is not None)
        self.betas: list[Tensor] = []
        self.x = given.x_BSAD.unbind(1)
        self.known_qkv, self.residual, self.hidden = (
            None if x is None else x.unbind(1) for x in (given.qkv_BSME, given.residual_BSMD, given.hidden_BSMR)
        )

    def live(self, s: int) -> Tensor | None:
        return None if self.given.live_BS is None else self.given.live_BS[:, s, None, None]

    def forward(self, s: int) -> tuple[Tensor, Tensor, Tensor]:
        """Recalled token rows, their rotated queries, keys and values (B, T, H, P), and the memory rows that leave the
        block, of segment s."""
        shape = self.shape
        rows = self.x[s] + self.memory.recall(s)
        qkv = self.qkv.forward(self.norm.forward(rows))
        if self.known_qkv is not None:
            qkv = torch.cat([qkv, self.known_qkv[s]], dim=1)
        heads = shape.heads + shape.kv_heads
        qkv = qkv.unflatten(-1, (heads + shape.kv_heads, -1))
        if self.rotation is not None:
            self.rotation.turn_(qkv[:, :, :heads])
        attended = self.out.forward(self.attention.forward(qkv, None if self.hidden is None else self.hidden[s]))
        residual = rows[:, self.tokens :] if self.residual is None else self.residual[s]
        memory = residual + attended
        if self.feeds:
            memory = memory + self.ff.forward(residual if self.parallel else memory)
        key, value, beta = self.key_value_beta.forward(memory).split([shape.channels, memory.shape[-1], 1], dim=-1)
        self.betas.append(beta.sigmoid())
        self.memory.write(key, value, self.betas[-1], self.live(s))
        return rows[:, : self.tokens], qkv[:, : self.tokens], memory

    def backward(self, s: int, drows: Tensor, dqkv_tokens: Tensor, dmemory: Tensor) -> tuple[Tensor, ...]:
        """Gradients of what segment s was given: rows, and queries, keys and values and residual of memory rows."""
        shape, tokens = self.shape, self.tokens
        beta = self.betas.pop()
        dkey, dvalue, dbeta = self.memory.write_backward(self.live(s))
        dlogit = dbeta * beta * (1 - beta)
        dmemory = dmemory + self.key_value_beta.backward(torch.cat([dkey, dvalue, dlogit], dim=-1))
        dresidual, dattended = dmemory, dmemory
        if self.feeds:
            dfed = self.ff.backward(dmemory)
            dresidual = dmemory + dfed
            dattended = dmemory if self.parallel else dresidual
        dqkv = self.attention.backward(self.out.backward(dattended))
        dqkv[:, :tokens] += dqkv_tokens
        if self.rotation is not None:
            self.rotation.turn_(dqkv[:, :, : shape.heads + shape.kv_heads], back=True)
        dqkv = dqkv.flatten(2)
        asking = self.given.x_BSAD.shape[2]
        dx = self.norm.backward(self.qkv.backward(dqkv[:, :asking]))
        if asking > tokens:
            dx[:, tokens:] += dresidual
            dx[:, :tokens] += drows
        else:
            dx = dx + drows
        self.memory.recall_backward(s, dx)
        return dx, dqkv[:, asking:], dresidual

    def weight_grads(self) -> list[Tensor | None]:
        parts = [self.norm, self.qkv, self.out]
        grads = [grad for part in parts for grad in part.weight_grads()]
        ff = [self.ff.norm, self.ff.up, self.ff.down, self.ff.gate]
        for part in ff:
            grads += part.weight_grads() if part is not None and self.feeds else (None, None)
        return [*grads, *self.key_value_beta.weight_grads()]


class Segments(torch.autograd.Function):
    """``Cell`` over all segments of a chunk, as one node."""

    @staticmethod
    def forward(ctx, shape: Shape, *tensors):
        given, weights = Given(*tensors[: len(Given._fields)]), tensors[len(Given._fields) :]
        cell = Cell(shape, given, weights)
        tokens, qkv, memory = zip(*(cell.forward(s) for s in range(given.x_BSAD.shape[1])), strict=True)
        ctx.cell = cell  # and not ``save_for_backward``: what the parts keep are lists
        return torch.stack(tokens, 1), torch.stack(qkv, 1), torch.stack(memory, 1), *cell.memory.state()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        dtokens, dqkv, dmemory, dA, dz = grads
        cell, ctx.cell = ctx.cell, None
        if cell is None:
            raise RuntimeError("schedule='layer' allows one backward pass; use schedule='sequential' to run it again")
        cell.memory.begin_backward(dA, dz)
        given = enumerate(zip(dtokens.unbind(1), dqkv.unbind(1), dmemory.unbind(1), strict=True))
        parts = [cell.backward(s, *part) for s, part in reversed(list(given))][::-1]
        dx, dqkv_memory, dresidual = (torch.stack(part, 1) for part in zip(*parts, strict=True))
        dA, dz, dqueries = cell.memory.finish_backward()
        apart = cell.given.qkv_BSME is not None
        known = (dqkv_memory, dresidual) if apart else (None, None)
        return None, dx, dqueries, dA, dz, *known, None, None, *cell.weight_grads()


def shape_of(c: Any) -> Shape:
    """The ``Shape`` of a layer, from the configuration of its model."""
    flags = Flags(*(getattr(c, name) for name in Flags._fields))
    sizes = c.memory_tokens, c.memory_dim, c.family, c.heads, c.kv_heads or c.heads
    return Shape(flags, *sizes, c.rotary_dims, c.rotary_base, c.norm_eps)


def chunk_size(c: Any, rows: int) -> int:
    """Segments of a chunk, for a segment of ``rows``.

    A read through as many factors as a quarter of the K features costs about as much as one through the matrix, which
    a chunk saves, as it saves a write of the matrix with every segment.
    """
    reads = rows + c.memory_tokens if c.recall_on_mem_rows else rows
    return max(1, 2 * c.nu * c.memory_dim // (4 * reads))


def bounds(total: int, cuts: frozenset[int], size: int) -> list[tuple[int, int]]:
    """Begin and end of chunks of at most ``size`` segments, one of which begins at every cut."""
    found, begin = [], 0
    for end in range(1, total + 1):
        if end == total or end in cuts or end - begin == size:
            found.append((begin, end))
            begin = end
    return found


class Masks(NamedTuple):
    """``hidden`` and ``live`` of ``Given``, for all segments."""

    hidden_BSMR: Tensor | None
    live_BS: Tensor | None

    @classmethod
    def of(cls, rows_BSRD: Tensor, mask_BST: Tensor | None, memory_tokens: int) -> "Masks":
        """mask_BST: True at real tokens."""
        segments, rows, m = *rows_BSRD.shape[1:3], memory_tokens
        if mask_BST is not None:
            seen = attention_mask(F.pad(mask_BST.flatten(0, 1), (0, m), value=True), m)[:, 0]
            return cls(~seen.unflatten(0, mask_BST.shape[:2]), mask_BST.any(2).to(rows_BSRD.dtype))
        if m == 1:
            return cls(None, None)
        ahead_MR = torch.ones(m, rows, dtype=torch.bool, device=rows_BSRD.device).triu(rows - m + 1)
        return cls(ahead_MR.expand(1, segments, m, rows), None)

    def part(self, begin: int, end: int) -> "Masks":
        return Masks(*(None if x is None else x[:, begin:end] for x in self))


def read_chunk(layer: Any, x_BSRD: Tensor, state: AssociativeState, masks: Masks) -> tuple[list[Tensor], Any]:
    """``Segments`` on the rows of a layer: token rows after their recall, their queries, keys and values, memory rows
    after the block; and the state."""
    c, block = layer.config, layer.block
    qkv, residual, asking = None, None, x_BSRD
    if not c.recall_on_mem_rows:
        asking, memory = x_BSRD.split([x_BSRD.shape[2] - c.memory_tokens, c.memory_tokens], dim=2)
        qkv = block.attention.qkv(block.norm1(memory))
        residual = memory + block.feed_forward(memory) if block.parallel else memory
    key_value_beta = torch.cat([layer.to_key.weight, layer.to_value.weight, layer.to_beta.weight])
    bias = F.pad(layer.to_beta.bias, (c.memory_dim + c.width, 0))
    given = Given(asking, layer.to_query(asking), *state, qkv, residual, *masks)
    *rows, A_BKD, z_BK = Segments.apply(shape_of(c), *given, *weights_of(block), key_value_beta, bias)
    return rows, AssociativeState(A_BKD, z_BK if c.use_denom else state.z_BK)


def read_layer(
    layer: Any,
    rows_BSRD: Tensor,
    state: AssociativeState,
    mask_BST: Tensor | None,
    cuts: frozenset[int],
    keep: int,
) -> tuple[Tensor, AssociativeState]:
    """``LayerMajor.read_layer`` for a layer of ARMT."""
    c, total = layer.config, rows_BSRD.shape[1]
    masks, parts = Masks.of(rows_BSRD, mask_BST, c.memory_tokens), []
    for begin, end in bounds(total, cuts, chunk_size(c, rows_BSRD.shape[2])):
        state = detach(state) if begin in cuts else state
        rows, state = read_chunk(layer, rows_BSRD[:, begin:end], state, masks.part(begin, end))
        parts.append(rows)
    if not keep:
        return rows_BSRD[:, :0], state
    tokens, qkv, memory = (torch.cat(part, dim=1)[:, total - keep :] for part in zip(*parts, strict=True))
    mask = None if mask_BST is None else mask_BST[:, total - keep :].flatten(0, 1)
    done = finish_rows(layer, tokens.flatten(0, 1), qkv.flatten(0, 1), mask)
    return torch.cat([done.unflatten(0, tokens.shape[:2]), memory], dim=2), state


def finish_rows(layer: Any, x_BTD: Tensor, qkv_BTHP: Tensor, mask_BT: Tensor | None) -> Tensor:
    """What the block does with token rows, which see no memory row, once their queries, keys and values are known."""
    c, block = layer.config, layer.block
    kv_heads = c.kv_heads or c.heads
    q, k, v = qkv_BTHP.transpose(1, 2).split([c.heads, kv_heads, kv_heads], dim=1)
    mask = None if mask_BT is None else attention_mask(mask_BT, mask_BT.shape[1])
    return block.join(x_BTD, block.attention.mix(q, k, v, mask))
