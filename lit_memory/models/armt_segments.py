"""A chunk of segments in one layer of ARMT, as one node of the graph with a backward pass by hand.

Only the memory goes on from segment to segment. So the loop recalls, makes queries, keys and values of all rows, and
attends, feeds forward and writes at the memory rows alone. What the token rows do with their attention and feed-forward
is left to the caller, for all segments at once. The slow twin is ``ARMTLayer.forward``, segment after segment.

Shape suffixes: S segments, B batch, T token rows, M memory rows, R = T + M, A rows that recall (T or R), C channels of
a key, D width, H heads of queries, keys and values together, P head width, K features of a key, E = H P.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lit_memory.memory import compiled
from lit_memory.memory.associative import AssociativeState
from lit_memory.memory.associative_chunk import Flags
from lit_memory.memory.precision import outside_autocast
from lit_memory.models.armt_cell import Cell, Given, Shape
from lit_memory.models.attention import attention_mask
from lit_memory.models.plain import modules_of
from lit_memory.models.rows_by_hand import finished, weights_of
from lit_memory.recurrence import detach, select_state

CHUNK, CHUNK_FLOATS = 16, 5 << 22
"""Segments of a chunk for the compiled loops, and floats of A that these hold on the way back: 80 MiB in fp32.
Between chunks A is kept, too, so that small chunks hold more."""
WORTH = 1 << 18
"""Floats of A, over all segments, below which numba's start costs more than its loops save."""


def parts(layers: Iterable[Any]) -> Iterator[nn.Module]:
    """The modules whose weights are read here."""
    for layer in layers:
        yield from modules_of(layer.block)
        if layer.remembers:
            yield from (layer.to_query, layer.to_key, layer.to_value, layer.to_beta)


class Segments(torch.autograd.Function):
    """``Cell`` over all segments of a chunk, as one node."""

    @staticmethod
    def forward(ctx, shape: Shape, training: bool, *tensors):
        given, weights = Given(*tensors[: len(Given._fields)]), tensors[len(Given._fields) :]
        cell = Cell(shape, given, weights, training)
        for s in range(len(given.x_SBAD)):
            cell.forward(s)
        if training:
            ctx.cell = cell  # and not ``save_for_backward``: most of what it keeps are no inputs or outputs
            ctx.save_for_backward(*tensors)
        heads = shape.heads + 2 * shape.kv_heads, -1
        rows = cell.rows_SBAD[:, :, : cell.tokens], cell.qkv_SBRE[:, :, : cell.tokens].unflatten(-1, heads)
        # detached: an output that the cell itself holds would lead back to it, and nobody would free either
        return tuple(part.detach() for part in (*rows, cell.left_SBMD, *cell.memory.state()))

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, *grads):
        *given, dA, dz = grads
        cell, ctx.cell = ctx.cell, None
        if cell is None:
            raise RuntimeError("schedule='layer' allows one backward pass; use schedule='sequential' to run it again")
        _ = ctx.saved_tensors  # raises if somebody has changed one in place since
        cell.begin_backward(dA, dz)
        for s, part in reversed(list(enumerate(zip(*given, strict=True)))):
            cell.backward(s, *part)
        return None, None, *cell.finish_backward()


def shape_of(c: Any, compiled: bool) -> Shape:
    """The ``Shape`` of a layer, from the configuration of its model."""
    flags = Flags(*(getattr(c, name) for name in Flags._fields))
    sizes = c.memory_tokens, c.memory_dim, c.family, c.heads, c.kv_heads or c.heads
    return Shape(flags, *sizes, c.rotary_dims, c.rotary_base, c.norm_eps, compiled)


def chunk_size(rows_BRD: Tensor, A_BKD: Tensor, compiled: bool) -> int:
    """Segments of a chunk.

    The compiled loops hold A of all segments of a chunk on the way back. For the others a read through as many factors
    as a quarter of the K features costs about as much as one through the matrix, which a chunk saves, as it saves a
    write of the matrix with every segment.
    """
    if compiled:
        return min(CHUNK, max(1, CHUNK_FLOATS // A_BKD.numel()))
    return max(1, A_BKD.shape[1] // (4 * rows_BRD.shape[1]))


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

    hidden_SBMR: Tensor | None
    live_SB: Tensor | None

    @classmethod
    def of(cls, rows_SBRD: Tensor, mask_SBT: Tensor | None, memory_tokens: int) -> "Masks":
        """mask_SBT: True at real tokens."""
        segments, rows, m = len(rows_SBRD), rows_SBRD.shape[2], memory_tokens
        if mask_SBT is not None:
            seen = attention_mask(F.pad(mask_SBT.flatten(0, 1), (0, m), value=True), m)[:, 0]
            return cls(~seen.unflatten(0, mask_SBT.shape[:2]), mask_SBT.any(2).to(rows_SBRD.dtype))
        if m == 1:
            return cls(None, None)
        ahead_MR = torch.ones(m, rows, dtype=torch.bool, device=rows_SBRD.device).triu(rows - m + 1)
        return cls(ahead_MR.expand(segments, 1, m, rows), None)

    def part(self, begin: int, end: int) -> "Masks":
        return Masks(*(None if x is None else x[begin:end] for x in self))


def read_chunk(
    layer: Any, x_SBRD: Tensor, state: AssociativeState, masks: Masks, loops: bool
) -> tuple[list[Tensor], Any]:
    """``Segments`` on the rows of a layer: token rows after their recall, their queries, keys and values, memory rows
    after the block; and the state."""
    c, block = layer.config, layer.block
    qkv, residual, asking = None, None, x_SBRD
    if not c.recall_on_mem_rows:
        asking, memory = x_SBRD.split([x_SBRD.shape[2] - c.memory_tokens, c.memory_tokens], dim=2)
        qkv = block.attention.qkv(block.norm1(memory))
        residual = memory + block.feed_forward(memory) if block.parallel else memory
    key_value_beta = torch.cat([layer.to_key.weight, layer.to_value.weight, layer.to_beta.weight])
    bias = F.pad(layer.to_beta.bias, (c.memory_dim + c.width, 0))
    given = Given(asking, layer.to_query(asking), *state, qkv, residual, *masks)
    *rows, A_BKD, z_BK = Segments.apply(
        shape_of(c, loops), torch.is_grad_enabled(), *given, *weights_of(block), key_value_beta, bias
    )
    return rows, AssociativeState(A_BKD, z_BK if c.use_denom else state.z_BK)


def read_layer(
    layer: Any,
    rows_SBRD: Tensor,
    state: AssociativeState,
    mask_SBT: Tensor | None,
    cuts: frozenset[int],
    keep: int,
) -> tuple[Tensor, AssociativeState]:
    """``LayerMajor.read_layer`` for a layer of ARMT."""
    if state.A_BKD.dtype != rows_SBRD.dtype:
        return one_by_one(layer, rows_SBRD, state, mask_SBT, cuts, keep)
    c, total, done = layer.config, len(rows_SBRD), []
    masks = Masks.of(rows_SBRD, mask_SBT, c.memory_tokens)
    loops = compiled.applies(state.A_BKD) and total * state.A_BKD.numel() >= WORTH
    ranges = bounds(total, cuts, chunk_size(rows_SBRD[0], state.A_BKD, loops))
    for (begin, end), part in zip(ranges, rows_SBRD.split([end - begin for begin, end in ranges]), strict=True):
        state = detach(state) if begin in cuts else state
        (tokens, qkv, memory), state = read_chunk(layer, part, state, masks.part(begin, end), loops)
        unread = min(max(total - keep - begin, 0), end - begin)
        if unread < end - begin:
            real = None if mask_SBT is None else mask_SBT[begin + unread : end].flatten(0, 1)
            rows = finish_rows(layer, tokens[unread:].flatten(0, 1), qkv[unread:].flatten(0, 1), real)
            done.append(torch.cat([rows.unflatten(0, memory[unread:].shape[:2]), memory[unread:]], dim=2))
    return torch.cat(done) if done else rows_SBRD[:0], state


def finish_rows(layer: Any, x_BTD: Tensor, qkv_BTHP: Tensor, mask_BT: Tensor | None) -> Tensor:
    """What the block does with token rows, which see no memory row, once their queries, keys and values are known."""
    c, block = layer.config, layer.block
    kv_heads = c.kv_heads or c.heads
    q, k, v = qkv_BTHP.transpose(1, 2).split([c.heads, kv_heads, kv_heads], dim=1)
    mask = None if mask_BT is None else attention_mask(mask_BT, mask_BT.shape[1])
    return finished(block, x_BTD, block.attention.attended(q, k, v, mask), c)


def one_by_one(
    layer: Any, rows_SBRD: Tensor, state: AssociativeState, mask_SBT: Tensor | None, cuts: frozenset[int], keep: int
) -> tuple[Tensor, AssociativeState]:
    """``read_layer`` by the layer itself, for a state in another precision than the rows."""
    found = []
    for s, rows_BRD in enumerate(rows_SBRD):
        state, mask_BT = detach(state) if s in cuts else state, None if mask_SBT is None else mask_SBT[s]
        rows_BRD, new = layer(rows_BRD, state, mask_BT)
        state = new if mask_BT is None else select_state(mask_BT.any(1), new, state)
        found.append(rows_BRD)
    return rows_SBRD[:0] if not keep else torch.stack(found[-keep:]), state
