"""Segments of RMT, TARM and RMT-R, each as one node of the graph with a backward pass by hand.

The memory goes through all layers, so that segment follows segment. What enters the first layer is known before,
though: what the block does with single rows (norm and queries, keys, values; and for a parallel block its feed-forward)
is done for the tokens of all segments at once, and for memory rows that stand in front of the tokens and behind them
once. The top layer has outputs at its last rows alone. Weights get their gradients from one node at the end. The slow
twin is ``RMT.segment``.

Shape suffixes: S segments, B batch, T tokens, F fresh rows (memory, as it enters), R rows of a segment, C last rows, D
width, E channels of queries, keys and values together.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lit_memory.memory.precision import outside_autocast
from lit_memory.models.attention import attention_mask
from lit_memory.models.by_hand import (
    FeedForward,
    LastAttention,
    Rotation,
    SummedLinear,
    SummedNorm,
    Tape,
    activation,
)
from lit_memory.models.plain import modules_of, replaced
from lit_memory.recurrence import State, detach, select_samples

LONGEST = 512
"""Tokens of the longest segment that is worth it: all scores of attention are held."""


def refusal(model: Any, longest: int) -> str | None:
    """Why the segments of a model have no backward pass by hand; None if they have one."""
    decoder, c = model.decoder, model.config
    precision = decoder.norm.weight.dtype
    if not c.memory_tokens:
        return "it has no memory"
    if c.family == "gpt2" or c.special:
        return f"its blocks ({', '.join(c.special or [c.family])}) have no backward pass by hand"
    if torch.compiler.is_compiling():
        return "a compiler traces the module's own step"
    if longest > LONGEST:
        return f"its segments have more than {LONGEST} tokens"
    if decoder.norm.weight.device.type != "cpu":
        return "its backward pass by hand is for the CPU"
    if precision != torch.promote_types(precision, torch.float32):
        return "its weights are less precise than its state"
    return replaced(all_modules(decoder))


def all_modules(decoder: Any) -> list[Any]:
    """The modules with weights of all blocks, and the final norm."""
    blocks = (getattr(layer, "block", layer) for layer in decoder.layers)
    return [*(part for block in blocks for part in modules_of(block)), decoder.norm]


def weights_of(module: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias."""
    return module.weight, getattr(module, "bias", None)


def last(x_BRD: Tensor, count: int) -> Tensor:
    """The last rows."""
    return x_BRD if count == x_BRD.shape[1] else x_BRD.narrow(1, x_BRD.shape[1] - count, count)


class Layer:
    """A ``Block`` in two halves: what a row becomes on its own, and with the rows before it."""

    def __init__(self, block: Any, config: Any, rotation: Rotation | None) -> None:
        c = config
        norm1, qkv, out, norm2, up, down, *gate = map(weights_of, modules_of(block))
        self.norm, self.qkv, self.out = SummedNorm(*norm1, c.norm_eps), SummedLinear(*qkv), SummedLinear(*out)
        parts = SummedNorm(*norm2, c.norm_eps), SummedLinear(*up), SummedLinear(*down)
        self.ff = FeedForward(*parts, SummedLinear(*gate[0]) if gate else None, activation(c.family))
        self.attention = LastAttention(c.heads, c.kv_heads or c.heads, rotation)
        self.parallel = block.parallel

    def enter(self, x_BRD: Tensor, count: int, tape: Tape) -> tuple[Tensor, Tensor]:
        """Queries, keys and values (B, R, E) of rows, and what is added to the attention of the last ``count`` rows."""
        qkv_BRE = self.qkv.forward(self.norm.forward(x_BRD, tape), tape)
        last_BCD = last(x_BRD, count)
        return qkv_BRE, last_BCD + self.ff.forward(last_BCD, tape) if self.parallel else last_BCD

    def enter_backward(self, dqkv_BRE: Tensor, dlast_BCD: Tensor, tape: Tape) -> Tensor:
        dlast_BCD = dlast_BCD + self.ff.backward(dlast_BCD, tape) if self.parallel else dlast_BCD
        dx_BRD = self.norm.backward(self.qkv.backward(dqkv_BRE, tape), tape)
        last(dx_BRD, dlast_BCD.shape[1]).add_(dlast_BCD)
        return dx_BRD

    def leave(self, qkv_BRE: Tensor, last_BCD: Tensor, hidden_BCR: Tensor, tape: Tape) -> Tensor:
        """The block at the last C rows."""
        y_BCD = self.out.forward(self.attention.forward(qkv_BRE, hidden_BCR, tape), tape).add_(last_BCD)
        return y_BCD if self.parallel else y_BCD + self.ff.forward(y_BCD, tape)

    def leave_backward(self, dy_BCD: Tensor, tape: Tape) -> tuple[Tensor, Tensor]:
        if not self.parallel:
            dy_BCD = dy_BCD + self.ff.backward(dy_BCD, tape)
        return self.attention.backward(self.out.backward(dy_BCD, tape), tape), dy_BCD

    def weight_grads(self) -> list[Tensor | None]:
        parts = [self.norm, self.qkv, self.out, self.ff.norm, self.ff.up, self.ff.down, self.ff.gate]
        return [grad for part in parts if part is not None for grad in part.weight_grads()]


class Stack:
    """All layers and the final norm on segments of one shape. The last ``count`` rows have an output."""

    def __init__(self, decoder: Any, fresh: int, tokens: int, behind: int, count: int) -> None:
        c = decoder.config
        self.rows, self.count = (fresh, tokens, behind), count
        rotation = Rotation.of(sum(self.rows), c.rotary_dims, c.rotary_base, decoder.norm.weight)
        self.layers = [Layer(block, c, rotation) for block in decoder.layers]
        self.norm = SummedNorm(*weights_of(decoder.norm), c.norm_eps)

    def forward(self, fresh_BFD: Tensor, qkv_BTE: Tensor, kept_BTD: Tensor, hidden_RR: Tensor) -> tuple[Tensor, Tape]:
        """Outputs (B, C, D) after the final norm. hidden: (B or 1, R, R)."""
        tape: Tape = []
        entered = self.layers[0].enter(fresh_BFD, fresh_BFD.shape[1], tape)
        qkv, x = (self.joined(*pair) for pair in zip(entered, (qkv_BTE, kept_BTD), strict=True))
        for i, layer in enumerate(self.layers):
            count = self.count if layer is self.layers[-1] else sum(self.rows)
            if i:
                qkv, x = layer.enter(x, count, tape)
            x = layer.leave(qkv, last(x, count), last(hidden_RR, count), tape)
        return self.norm.forward(x, tape), tape

    def backward(self, dy_BCD: Tensor, tape: Tape) -> tuple[Tensor, Tensor, Tensor]:
        dx = self.norm.backward(dy_BCD, tape)
        for layer in self.layers[:0:-1]:
            dx = layer.enter_backward(*layer.leave_backward(dx, tape), tape)
        first = self.layers[0]
        dqkv, dx = first.leave_backward(dx, tape)
        (dqkv, dqkv_BTE), (dx, dkept_BTD) = self.parted(dqkv), self.parted(dx)
        return first.enter_backward(dqkv, dx, tape), dqkv_BTE, dkept_BTD

    def joined(self, fresh: Tensor, tokens: Tensor) -> Tensor:
        """The rows of a segment: the first fresh ones stand behind the tokens as well."""
        return torch.cat([fresh, tokens, fresh[:, : self.rows[2]]], dim=1)

    def parted(self, drows: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of what was ``joined``, from that of its last rows."""
        missing = sum(self.rows) - drows.shape[1]
        dfresh, dtokens, dbehind = (F.pad(drows, (0, 0, missing, 0)) if missing else drows).split(self.rows, dim=1)
        dfresh = dfresh.clone()
        dfresh[:, : self.rows[2]] += dbehind
        return dfresh, dtokens

    def weight_grads(self) -> list[Tensor | None]:
        return [grad for layer in self.layers for grad in layer.weight_grads()] + [*self.norm.weight_grads()]


class Gradients(torch.autograd.Function):
    """Gives weights the gradients that all segments together have for them. They all depend on its result, a scalar, so
    that its backward pass is run after theirs."""

    @staticmethod
    def forward(ctx, stack: Any, *weights):
        ctx.stack = stack
        ctx.save_for_backward(*weights)
        return weights[0].new_zeros(())

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # raises if somebody has changed one in place since
        return None, *ctx.stack.weight_grads()


def with_gradients(stack: Any, modules: Iterable[Any]) -> tuple[Any, Tensor]:
    """A stack, and the result of its ``Gradients``; it must not hold that itself, which would be a circle. modules:
    those of its weights, in the order of its ``weight_grads``."""
    ended: Any = Gradients.apply(stack, *(weight for module in modules for weight in weights_of(module)))
    return stack, ended


class Segment(torch.autograd.Function):
    """``Stack`` on one segment."""

    @staticmethod
    def forward(ctx, stack: Stack, ended, fresh_BFD, qkv_BTE, kept_BTD, hidden_RR):
        rows, ctx.tape = stack.forward(fresh_BFD, qkv_BTE, kept_BTD, hidden_RR)
        ctx.stack = stack
        ctx.save_for_backward(fresh_BFD, qkv_BTE, kept_BTD)
        return rows

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx, dy):
        if not ctx.tape:
            raise RuntimeError("schedule='auto' allows one backward pass; use schedule='sequential' to run it again")
        _ = ctx.saved_tensors  # as above
        return None, dy.new_zeros(()), *ctx.stack.backward(dy, ctx.tape), None


def read_group(
    model: Any, ids_SBT: Tensor, state: State, mask_SBT: Tensor | None, cuts: frozenset[int], keep: int
) -> tuple[list[Tensor], State]:
    """``Grouped.read_group`` of RMT, TARM and RMT-R."""
    total, tokens, behind = len(ids_SBT), ids_SBT.shape[2], model.config.memory_tokens
    rows = model.front, tokens, behind
    hidden, stacks, found = hidden_rows(mask_SBT, rows, model.decoder.norm.weight.detach()), {}, []
    given, modules = token_rows(model.decoder, ids_SBT), all_modules(model.decoder)
    for s, (qkv_BTE, kept_BTD) in enumerate(zip(*(part.unbind() for part in given), strict=True)):
        state = detach(state) if s in cuts else state
        count = behind + tokens * (s >= total - keep)
        if count not in stacks:
            stacks[count] = with_gradients(Stack(model.decoder, *rows, count), modules)
        stack, ended = stacks[count]
        fresh_BFD = model.read_rows(state).to(qkv_BTE.dtype)
        out_BCD: Any = Segment.apply(stack, ended, fresh_BFD, qkv_BTE, kept_BTD, hidden[s % len(hidden)])
        if count > behind:
            found.append(out_BCD[:, :tokens])
        new = model.written(state, last(out_BCD, behind))
        state = new if mask_SBT is None else select_samples(model, mask_SBT[s].any(1), new, state)
    return found, state


def token_rows(decoder: Any, ids_SBT: Tensor) -> tuple[Tensor, Tensor]:
    """What the first layer does with single rows, (S, B, T, E) and (S, B, T, D), of the tokens of all segments.

    Where the vocabulary is smaller than they are many, with each of its tokens once.
    """
    c, block = decoder.config, decoder.layers[0]
    few = not c.inputs and c.vocab_size < ids_SBT.numel()
    rows = decoder.tokens(torch.arange(c.vocab_size, device=ids_SBT.device) if few else ids_SBT)
    parts = block.attention.qkv(block.norm1(rows)), rows + block.feed_forward(rows) if block.parallel else rows
    return (F.embedding(ids_SBT, parts[0]), F.embedding(ids_SBT, parts[1])) if few else parts


def hidden_rows(mask_SBT: Tensor | None, rows: tuple[int, int, int], like: Tensor) -> list[Tensor]:
    """-inf where a row may not look, else 0: (B or 1, R, R) of every segment, or of all. mask_SBT: True at real
    tokens."""
    total = sum(rows)
    if mask_SBT is None:
        return [like.new_full((1, total, total), -torch.inf).triu(1)]
    mask = F.pad(mask_SBT, (rows[0], rows[2]), value=True)
    seen = [attention_mask(mask_BR, total)[:, 0] for mask_BR in mask.unbind()]
    return [like.new_zeros(()).masked_fill(~seen_BRR, -torch.inf) for seen_BRR in seen]
