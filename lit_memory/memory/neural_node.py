"""The neural memory over the chunks of a sequence: by plain operations, and as one node of the graph.

Paper:     Behrouz et al. 2025, Titans, arXiv 2501.00663, section 3.2. Equations (1) to (4) are in ``neural.py``, (5) to
           (7) in ``neural_chunk.py``.

With V_1 = M and V_2 = S at the start of a chunk, or V_1 = M alone without momentum, (5) and (6) are

(8) x M_t = sum_i read_ti (x V_i) + sum_{j<=t} inside_tj (x . a_j) g_j^T
(9) V_i after the chunk = sum_j carry_ij V_j + sum_t write_ti a_t g_t^T

``plain_chunks`` computes these lines as they stand, for whatever transforms functions: vmap, torch.compile, second
derivatives. ``_Chunks`` computes them for all others as one node, whose backward pass is written out: a third of the
operations that autograd would need, and no graph. It keeps the factors of the chunks, and V at the start of each.

Shape suffixes: X samples times heads, N chunks, T tokens of a chunk, J parts of the state (M, and S with momentum), K
width of keys and queries, V width of values, I and O inputs and outputs of a layer of the memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_memory.memory.neural import ACTIVATIONS, NeuralState, shortening, surprise
from lit_memory.memory.neural_by_hand import Coefficients, Layer, one_chunk, one_chunk_backward, rows_of
from lit_memory.memory.precision import outside_autocast


class Form(NamedTuple):
    """activation: "silu" or "gelu". normalized: steps are shortened by ``shortening``. write: without, the last chunk
    leaves no state, which is then None. keep: a backward pass may follow."""

    activation: str
    normalized: bool
    write: bool
    keep: bool = True


class Passed(NamedTuple):
    """Outputs of all chunks, without a residual, the state behind them, and the factors of ``normalized`` if on."""

    o_XNTV: Tensor
    state: NeuralState | None
    scale_XNT1: Tensor | None


def chunks(
    form: Form, state: NeuralState, q_XNTK: Tensor, k_XNTK: Tensor, target_XNTV: Tensor, table: Coefficients
) -> Passed:
    """The chunks one after the other, by (8) and (9). target: values, less the keys where M(x) has the residual x."""
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return plain_chunks(form, state, q_XNTK, k_XNTK, target_XNTV, table)
    form = form._replace(keep=torch.is_grad_enabled())
    o_XNTV, scale_XNT1, *weights = _Chunks.apply(form, q_XNTK, k_XNTK, target_XNTV, *table, *state.M, *state.S)
    depth = len(state.M)
    new = NeuralState(tuple(weights[:depth]), tuple(weights[depth:])) if form.write else None
    return Passed(o_XNTV, new, scale_XNT1)


def plain_chunks(
    form: Form, state: NeuralState, q_XNTK: Tensor, k_XNTK: Tensor, target_XNTV: Tensor, table: Coefficients
) -> Passed:
    """``chunks`` by operations that autograd and functorch follow."""
    outputs, scales = [], []
    for q, k, target, *row in zip(*(t.unbind(1) for t in (q_XNTK, k_XNTK, target_XNTV, *table)), strict=True):
        inputs, grads = surprise(state.M, k, target, form.activation)
        if form.normalized:
            scales.append(shortening(inputs, grads))
            grads = [g * scales[-1] for g in grads]
        read, inside, write, carry = row
        x, new = q, []
        parts = [list(layer) for layer in zip(*filter(None, state), strict=True)]
        for layer, (V, a, h) in enumerate(zip(parts, inputs, grads, strict=True)):
            x = ACTIVATIONS[form.activation].function(x) if layer else x
            read_V = [weight * (x @ part) for weight, part in zip(read.split(1, -1), V, strict=True)]
            x = sum(read_V) + ((x @ a.mT) * inside) @ h
            written = [(a * weight).mT @ h for weight in write.split(1, -1)]
            carried = (carry[:, :, :, None, None] * torch.stack(V, 1).unsqueeze(1)).sum(2).unbind(1)
            new.append([old + step for old, step in zip(carried, written, strict=True)])
        M, *S = zip(*new, strict=True)
        state = NeuralState(M, *(S or [()]))
        outputs.append(x)
    scale_XNT1 = torch.stack(scales, 1) if form.normalized else None
    return Passed(torch.stack(outputs, 1), state if form.write else None, scale_XNT1)


class _Chunks(torch.autograd.Function):
    """``plain_chunks`` as one node: (q, k, target, *table, *M, *S) -> (o, scale, *M, *S)."""

    @staticmethod
    def forward(ctx: Any, form: Form, *inputs: Tensor):
        (q, k, target), table, weights = inputs[:3], Coefficients(*inputs[3:7]), inputs[7:]
        act, parts = ACTIVATIONS[form.activation], table.read_XNTJ.shape[-1]
        depth = len(weights) // parts
        V = [torch.stack(weights[layer::depth], 1) for layer in range(depth)]
        kept, outputs, scales, rows = [], [], [], rows_of(table)
        tokens = zip(q.unbind(1), k.unbind(1), target.unbind(1), strict=True)
        for n, (row, chunk) in enumerate(zip(rows, tokens, strict=True)):
            scale, layers, V = one_chunk(act, form.normalized, V, *chunk, row, form.write or n + 1 < len(rows))
            kept += [t for layer in layers for t in layer if form.keep]
            outputs.append(layers[-1].y_XTO)
            scales.append(scale)
        ctx.form, ctx.depth = form, depth
        ctx.set_materialize_grads(False)
        scale = torch.stack(scales, 1) if form.normalized else None
        if scale is not None:
            ctx.mark_non_differentiable(scale)
        ctx.save_for_backward(*inputs, scale, *kept)
        new = [layer[:, j].clone() for j in range(parts) for layer in V] if form.write else []
        return torch.stack(outputs, 1), scale, *new

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor | None):
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        saved, depth = ctx.saved_tensors, ctx.depth
        parts = saved[3].shape[-1]
        count = 7 + depth * parts
        inputs, scale, kept = saved[:count], saved[count], saved[count + 1 :]
        if torch.is_grad_enabled():  # this pass is to be differentiated itself
            return None, *differentiable_backward(ctx.form, depth, inputs, ctx.needs_input_grad[1:], grads)
        size, act = len(Layer._fields), ACTIVATIONS[ctx.form.activation]
        layers = [Layer(*kept[at : at + size]) for at in range(0, len(kept), size)]
        chunks: list[Any] = [layers[at : at + depth] for at in range(0, len(layers), depth)]
        dV: list[Any] = state_grads(chunks[0], grads[2:])
        table = Coefficients(*inputs[3:7])
        dtable = [torch.zeros_like(t) for t in table]
        drows = list(zip(*(t.unbind(1) for t in dtable), strict=True))
        dys = [None] * len(chunks) if grads[0] is None else grads[0].unbind(1)
        scales = [None] * len(chunks) if scale is None else scale.unbind(1)
        found = []
        for one in zip(chunks[::-1], scales[::-1], rows_of(table)[::-1], drows[::-1], dys[::-1], strict=True):
            *tokens, dV = one_chunk_backward(act, *one, dV)
            found.append(tokens)
        tokens = [None if one[0] is None else torch.stack(one[::-1], 1) for one in zip(*found, strict=True)]
        return None, *tokens, *dtable, *(dW[:, j] for j in range(parts) for dW in dV)


def state_grads(layers: list[Layer], grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The gradients of V behind the last chunk from those of M and S; None if there are none."""
    if all(grad is None for grad in grads):
        return [None] * len(layers)
    zeros = [torch.zeros_like(layer.V_XJIO[:, 0]) for layer in layers]
    own = [grads[i :: len(layers)] for i in range(len(layers))]
    return [torch.stack([zero if g is None else g for g in gs], 1) for zero, gs in zip(zeros, own, strict=True)]


def differentiable_backward(
    form: Form, depth: int, inputs: tuple[Tensor, ...], wanted: tuple[bool, ...], grads: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """The gradients of the inputs that are wanted, through ``plain_chunks``, with a graph."""
    state = NeuralState(inputs[7 : 7 + depth], inputs[7 + depth :])
    q, k, target, *table = inputs[:7]
    passed = plain_chunks(form, state, q, k, target, Coefficients(*table))
    outputs = [passed.o_XNTV, *(() if passed.state is None else (*passed.state.M, *passed.state.S))]
    pairs = [(o, g) for o, g in zip(outputs, (grads[0], *grads[2:]), strict=True) if g is not None]
    leaves = [t for t, one in zip(inputs, wanted, strict=True) if one]
    outs, weights = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, leaves, weights, create_graph=True, materialize_grads=True))
    return [next(found) if one else None for one in wanted]
