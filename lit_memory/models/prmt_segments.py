"""Write rows of PRMT, segment after segment in one layer, each as one node of the graph with a backward pass by hand.

Weights get the gradients that all segments together have for them from one node at the end. The slow twin is
``PRMTLayer.write_rows``.

Shape suffixes: B batch, T tokens, M memory rows, R = M + T + M rows of a segment, E channels of queries, keys and
values together, D width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_memory.memory.precision import outside_autocast
from lit_memory.models.by_hand import Rotation, Tape
from lit_memory.models.plain import modules_of
from lit_memory.models.rmt_segments import Layer, with_gradients


class Writer:
    """A block at the write rows of segments of one shape."""

    def __init__(self, block: Any, config: Any, rows: tuple[int, int, int]) -> None:
        c, self.rows = config, rows
        rotation = Rotation.of(sum(rows), c.rotary_dims, block.attention.base, block.norm1.weight)
        self.layer = Layer(block, c, rotation)

    def forward(self, memory_BMD: Tensor, qkv_BTE: Tensor, hidden_MR: Tensor) -> tuple[Tensor, Tensor, Tape]:
        tape: Tape = []
        known_BME, kept_BMD = self.layer.enter(memory_BMD, self.rows[0], tape)
        qkv_BRE = torch.cat([known_BME, qkv_BTE, known_BME], dim=1)
        return self.layer.leave(qkv_BRE, kept_BMD, hidden_MR, tape), known_BME, tape

    def backward(self, dnew_BMD: Tensor, dknown_BME: Tensor, tape: Tape) -> tuple[Tensor, Tensor]:
        dqkv_BRE, dkept_BMD = self.layer.leave_backward(dnew_BMD, tape)
        front, dqkv_BTE, behind = dqkv_BRE.split(self.rows, dim=1)
        return self.layer.enter_backward(front + behind + dknown_BME, dkept_BMD, tape), dqkv_BTE

    def weight_grads(self) -> list[Tensor | None]:
        return self.layer.weight_grads()


class Written(torch.autograd.Function):
    """``Writer`` on one segment."""

    @staticmethod
    def forward(ctx, writer: Writer, ended, memory_BMD, qkv_BTE, hidden_MR):
        new_BMD, known_BME, ctx.tape = writer.forward(memory_BMD, qkv_BTE, hidden_MR)
        ctx.writer = writer
        ctx.save_for_backward(memory_BMD, qkv_BTE)
        return new_BMD, known_BME

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, *grads):
        if not ctx.tape:
            raise RuntimeError("schedule='auto' allows one backward pass; use schedule='sequential' to run it again")
        _ = ctx.saved_tensors  # raises if somebody has changed one in place since
        return None, grads[0].new_zeros(()), *ctx.writer.backward(*grads, ctx.tape), None


def writer(block: Any, config: Any, tokens: int) -> Any:
    """``PRMTLayer.write_rows`` by hand for segments of so many tokens, with hidden rows (B or 1, M, R) as its mask:
    -inf where a row may not look, else 0."""
    rows = config.memory_tokens, tokens, config.memory_tokens
    parts, ended = with_gradients(Writer(block, config, rows), modules_of(block))
    return lambda memory_BMD, qkv_BTE, hidden_MR: Written.apply(parts, ended, memory_BMD, qkv_BTE, hidden_MR)
