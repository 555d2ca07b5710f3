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

from lit_memory.memory.neural import ACTIVATIONS, Activation, NeuralState, shortening, surprise


class Coefficients(NamedTuple):
    """The coefficients of (8) and (9) for every chunk. Minus signs and theta are included."""

    read_XNTJ: Tensor
    inside_XNTT: Tensor
    write_XNTJ: Tensor
    carry_XNJJ: Tensor


class Form(NamedTuple):
    """activation: "silu" or "gelu". normalized: steps are shortened by ``shortening``. write: without, the last chunk
    leaves no state, which is then None."""

    activation: str
    normalized: bool
    write: bool


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
            read_V = [read[..., j : j + 1] * (x @ part) for j, part in enumerate(V)]
            new.append(
                [
                    sum(carry[:, i, j, None, None] * part for j, part in enumerate(V))
                    + (a * write[..., i : i + 1]).mT @ h
                    for i in range(len(V))
                ]
            )
            x = sum(read_V) + ((x @ a.mT) * inside) @ h
        state = NeuralState(*(tuple(part) for part in zip(*new, strict=True)), *(() if state.S else [()]))
        outputs.append(x)
    scale_XNT1 = torch.stack(scales, 1) if form.normalized else None
    return Passed(torch.stack(outputs, 1), state if form.write else None, scale_XNT1)


class Layer(NamedTuple):
    """One layer of the memory on one chunk, as the backward pass needs it. Without an activation behind the layer, z
    and t are None."""

    V_XJIO: Tensor
    """The layer's part of the state."""
    a_XTI: Tensor
    """Inputs of the keys."""
    z_XTO: Tensor | None
    """What the layer makes of them."""
    t_XTO: Tensor | None
    """The gradient of the inner loss behind the activation."""
    g_XTO: Tensor
    """The gradient in front of it."""
    x_XTI: Tensor
    """Inputs of the queries."""
    y_XTO: Tensor
    """What the layer makes of them."""
    P_XTT: Tensor
    """x a^T."""


class _Chunks(torch.autograd.Function):
    """``plain_chunks`` as one node: (q, k, target, *table, *M, *S) -> (o, scale, *M, *S)."""

    @staticmethod
    def forward(ctx: Any, form: Form, *inputs: Tensor):
        (q, k, target, *table), weights = inputs[:7], inputs[7:]
        act, parts = ACTIVATIONS[form.activation], table[0].shape[-1]
        depth = len(weights) // parts
        V = [torch.stack(weights[layer::depth], 1) for layer in range(depth)]
        kept, outputs, scales = [], [], []
        rows = list(zip(*(t.unbind(1) for t in (q, k, target, *table)), strict=True))
        for n, (x, key, value, *row) in enumerate(rows):
            found = list(surprises(act, [layer[:, 0] for layer in V], key, value))
            scales.append(shortening([f[0] for f in found], [f[-1] for f in found]) if form.normalized else None)
            last = n + 1 == len(rows) and not form.write
            for layer, factors in enumerate(found):
                x = act.function(x) if layer else x
                kept += (V[layer], *factors, x)
                h = factors[-1] if scales[-1] is None else factors[-1] * scales[-1]
                x, P, V[layer] = read_write(V[layer], factors[0], h, x, row, last)
                kept += (x, P)
            outputs.append(x)
        ctx.form, ctx.depth = form, depth
        ctx.set_materialize_grads(False)
        scale = torch.stack(scales, 1) if form.normalized else None
        if scale is not None:
            ctx.mark_non_differentiable(scale)
        ctx.save_for_backward(*inputs, scale, *kept)
        new = [layer[:, j].clone() for j in range(parts) for layer in V] if form.write else []
        return torch.stack(outputs, 1), scale, *new

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():  # it is differentiated itself
            return _plain_backward(ctx, grads)
        parts = ctx.saved_tensors[3].shape[-1]
        count = 7 + ctx.depth * parts
        (q, k, target, *table), scale = ctx.saved_tensors[:7], ctx.saved_tensors[count]
        kept = ctx.saved_tensors[count + 1 :]
        size = len(Layer._fields)
        layers = [Layer(*kept[at : at + size]) for at in range(0, len(kept), size)]
        chunks, act = q.shape[1], ACTIVATIONS[ctx.form.activation]
        dV = first_dV(layers[: ctx.depth], grads[2:], parts)
        dtable = [torch.zeros_like(t) for t in table]
        rows, drows = (list(zip(*(t.unbind(1) for t in group), strict=True)) for group in (table, dtable))
        outs = [None] * chunks if grads[0] is None else grads[0].unbind(1)
        scales = [None] * chunks if scale is None else scale.unbind(1)
        dq, dk, dtarget = [], [], []
        for n in reversed(range(chunks)):
            own = layers[n * ctx.depth : (n + 1) * ctx.depth]
            dx, da, dh, dy = None, [], [], outs[n]
            for i in reversed(range(ctx.depth)):
                layer = own[i]
                h = layer.g_XTO if scales[n] is None else layer.g_XTO * scales[n]
                dx, one_da, one_dh, dV[i] = read_write_backward(layer, h, rows[n], drows[n], dy, dV[i])
                da.append(one_da)
                dh.append(one_dh)
                dy = act.backward(dx, own[i - 1].y_XTO) if i and dx is not None else None
            da, dh = da[::-1], dh[::-1]
            if scales[n] is not None:
                dh = shortening_backward(own, scales[n], da, dh)
            dtarget.append(surprises_backward(act, own, da, dh, dV))
            dk.append(da[0])
            dq.append(dx)
        dqs = None if grads[0] is None else torch.stack(dq[::-1], 1)
        dstate = [layer[:, j] for j in range(parts) for layer in dV]
        return None, dqs, torch.stack(dk[::-1], 1), torch.stack(dtarget[::-1], 1), *dtable, *dstate


def first_dV(layers, grads, parts):
    depth = len(layers)
    if all(g is None for g in grads):
        return [None] * depth
    found = []
    for i, layer in enumerate(layers):
        own = grads[i::depth]
        zero = torch.zeros_like(layer.V_XJIO[:, 0])
        found.append(torch.stack([zero if g is None else g for g in own], 1))
    return found


def joined(rows_XTI: Tensor, weights_XTJ: Tensor) -> Tensor:
    """The rows, times every one of their weights, side by side: (X, T, J I)."""
    return (rows_XTI.unsqueeze(2) * weights_XTJ.unsqueeze(-1)).flatten(2)


def joined_backward(drows: Tensor, rows_XTI: Tensor, weights_XTJ: Tensor, dweights_XTJ: Tensor) -> Tensor:
    """The gradient of the rows; that of the weights is added. The gradient of what was joined is used up."""
    drows_XTJI = drows.unflatten(2, (weights_XTJ.shape[-1], -1))
    dweights_XTJ.add_((drows_XTJI * rows_XTI.unsqueeze(2)).sum(-1))
    return drows_XTJI.mul_(weights_XTJ.unsqueeze(-1)).sum(2)


def read_write(V_XJIO, a_XTI, h_XTO, x_XTI, row, last):
    """(8) and (9) of a layer: y, P, and V after the chunk, or, after the last one, as it was."""
    read, inside, write, carry = row
    y = torch.bmm(joined(x_XTI, read), V_XJIO.flatten(1, 2))
    P = torch.bmm(x_XTI, a_XTI.mT)
    y.baddbmm_(P * inside, h_XTO)
    if last:
        return y, P, V_XJIO
    new = V_XJIO * diagonal(carry)
    if new.shape[1] > 1:
        new[:, 0].addcmul_(V_XJIO[:, 1], carry[:, :1, 1:])
    new.flatten(1, 2).baddbmm_(joined(a_XTI, write).mT, h_XTO)
    return y, P, new


def diagonal(carry_XJJ: Tensor) -> Tensor:
    """(X, J, 1, 1)."""
    return carry_XJJ.diagonal(dim1=1, dim2=2)[:, :, None, None]


def plus(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left, right) if total is None else total.baddbmm_(left, right)


def read_write_backward(layer: Layer, h, row, drow, dy, dnew):
    V, a, x, P = layer.V_XJIO, layer.a_XTI, layer.x_XTI, layer.P_XTT
    (read, inside, write, carry), (dread, dinside, dwrite, dcarry) = row, drow
    dx = da = dh = dV = None
    if dnew is not None:
        dV = dnew * diagonal(carry)
        if dV.shape[1] > 1:
            dV[:, 1].addcmul_(dnew[:, 0], carry[:, :1, 1:])
        dcarry += torch.bmm(dnew.flatten(2), V.flatten(2).mT)
        dnew = dnew.flatten(1, 2)
        da = joined_backward(torch.bmm(h, dnew.mT), a, write, dwrite)
        dh = torch.bmm(joined(a, write), dnew)
    if dy is not None:
        dPi = torch.bmm(dy, h.mT)
        dinside.addcmul_(dPi, P)
        dx = joined_backward(torch.bmm(dy, V.flatten(1, 2).mT), x, read, dread)
        dh = plus(dh, (P * inside).mT, dy)
        dP = dPi.mul_(inside)
        dx.baddbmm_(dP, a)
        da = plus(da, dP.mT, x)
        dV = plus(None if dV is None else dV.flatten(1, 2), joined(x, read).mT, dy).view_as(V)
    return dx, da, dh, dV


def surprises(act: Activation, M: list[Tensor], k: Tensor, target: Tensor):
    """a, z, t and g of every ``Layer``."""
    a, z = [k], []
    for W in M[:-1]:
        z.append(torch.bmm(a[-1], W))
        a.append(act.function(z[-1]))
    t: list[Tensor | None] = [None]
    g = [torch.baddbmm(target, a[-1], M[-1], beta=-1)]
    for W, before in zip(M[:0:-1], z[::-1], strict=True):
        t.append(torch.bmm(g[-1], W.mT))
        g.append(act.backward(t[-1], before))
    return zip(a, [*z, None], t[::-1], g[::-1], strict=True)


def surprises_backward(act: Activation, layers: list[Layer], da: list[Tensor], dg: list[Tensor], dV: list[Tensor]):
    """The gradient of the target. Those of the layers' inputs and of V are added to ``da`` and ``dV``; dg is used up."""
    left, right = [[layer.a_XTI] for layer in layers], [[] for _ in layers]  # the factors of what M gets
    dz = []
    for i, layer in enumerate(layers[:-1]):
        above = layers[i + 1]
        dt = act.backward(dg[i], layer.z_XTO)
        dz.append(act.curve(layer.z_XTO).mul_(layer.t_XTO).mul_(dg[i]))
        dg[i + 1].baddbmm_(dt, above.V_XJIO[:, 0])
        left[i + 1].append(dt)
        right[i + 1].append(above.g_XTO)
    for i in reversed(range(len(layers))):
        layer = layers[i]
        out = dg[-1] if i + 1 == len(layers) else dz[i].add_(act.backward(da[i + 1], layer.z_XTO))
        right[i].insert(0, out)
        dV[i][:, 0].add_(torch.bmm(torch.cat(left[i], 1).mT, torch.cat(right[i], 1)))
        da[i].baddbmm_(out, layer.V_XJIO[:, 0].mT)
    return dg[-1].neg()


def shortening_backward(layers: list[Layer], scale, da: list[Tensor], dh: list[Tensor]) -> list[Tensor]:
    """The gradients of g from those of ``shortening`` times g, in place. Those of a are added."""
    dscale = torch.stack([(d * layer.g_XTO).sum(-1, keepdim=True) for d, layer in zip(dh, layers, strict=True)]).sum(0)
    of_a, of_g = ([(x * x).sum(-1, keepdim=True) for x in xs] for xs in zip(*((l.a_XTI, l.g_XTO) for l in layers)))
    weight = torch.where(scale < 1, -2 * dscale * scale.square(), 0) / (of_g[-1] + 1e-20)
    of_a[-1] = of_a[-1] - scale.reciprocal()  # rho has the error as its denominator
    for i, layer in enumerate(layers):
        dh[i].mul_(scale).addcmul_(layer.g_XTO, weight * of_a[i])
        da[i].addcmul_(layer.a_XTI, weight * of_g[i])
    return dh


def _plain_backward(ctx, grads):
    """The backward pass through ``plain_chunks``, which can be differentiated."""
    parts = ctx.saved_tensors[3].shape[-1]
    count = 7 + ctx.depth * parts
    inputs = ctx.saved_tensors[:count]
    (q, k, target, *table), weights = inputs[:7], inputs[7:]
    state = NeuralState(tuple(weights[: ctx.depth]), tuple(weights[ctx.depth :]))
    wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad[1:], strict=True) if needed]
    passed = plain_chunks(ctx.form, state, q, k, target, Coefficients(*table))
    outs = [passed.o_XNTV, *(() if passed.state is None else (*passed.state.M, *passed.state.S))]
    pairs = [(o, g) for o, g in zip(outs, (grads[0], *grads[2:]), strict=True) if g is not None]
    found = iter(
        torch.autograd.grad(
            [o for o, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, materialize_grads=True
        )
    )
    return None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:])
