"""The neural memory on one chunk, forward and backward, by hand: the parts of the node of ``neural_node.py``.

Paper:     Behrouz et al. 2025, Titans, arXiv 2501.00663, section 3.2. Equations (8) and (9) are in ``neural_node.py``.

Gradients have the names of what they belong to, with a d in front. With c = M(k) - v, the surprise of layer l is the
outer product of a_l and g_l, of which g_l = act'(z_l) t_l, t_l = g_{l+1} W_{l+1}^T, and the last g is c. So the
gradients of the surprises reach z through act'' as well.

Shape suffixes: X samples times heads, N chunks, T tokens of a chunk, J parts of the state (M, and S with momentum), K
width of keys and queries, V width of values, I and O inputs and outputs of a layer of the memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_memory.memory.neural import Activation, shortening


class Coefficients(NamedTuple):
    """The coefficients of (8) and (9) for every chunk. Minus signs and theta are included."""

    read_XNTJ: Tensor
    inside_XNTT: Tensor
    write_XNTJ: Tensor
    carry_XNJJ: Tensor


class Row(NamedTuple):
    """The coefficients of one chunk, ready to be multiplied with."""

    read_XTJ1: Tensor
    inside_XTT: Tensor
    write_XTJ1: Tensor
    own_XJ11: Tensor
    """What a part keeps of itself."""
    other_X11: Tensor
    """What M takes of S; without S there is nothing in it."""


def rows_of(table: Coefficients) -> list[Row]:
    """The coefficients of every chunk."""
    read, inside, write, carry = table
    own, other = carry.diagonal(dim1=2, dim2=3)[..., None, None], carry[:, :, :1, 1:]
    parts = (read.unsqueeze(-1), inside, write.unsqueeze(-1), own, other)
    return [Row(*row) for row in zip(*(t.unbind(1) for t in parts), strict=True)]


class Layer(NamedTuple):
    """One layer of the memory on one chunk, as the backward pass needs it. The last layer has neither z nor t."""

    V_XJIO: Tensor
    """The layer's part of the state."""
    a_XTI: Tensor
    """Inputs of the keys."""
    z_XTO: Any
    """What the layer makes of them."""
    t_XTO: Any
    """The gradient of the inner loss behind the activation."""
    g_XTO: Tensor
    """The gradient in front of it."""
    x_XTI: Tensor
    """Inputs of the queries."""
    y_XTO: Tensor
    """What the layer makes of them."""
    P_XTT: Tensor
    """x a^T."""


def one_chunk(
    act: Activation, normalized: bool, V: list[Tensor], q: Tensor, k: Tensor, target: Tensor, row: Row, write: bool
) -> tuple[Tensor | None, list[Layer], list[Tensor]]:
    """(8) and (9): the factors of ``normalized``, the layers, and V behind the chunk; as it was without ``write``."""
    found = surprises(act, [layer[:, 0] for layer in V], k, target)
    scale = shortening([f[0] for f in found], [f[-1] for f in found]) if normalized else None
    layers, new, x = [], [], q
    for V_XJIO, (a, z, t, g) in zip(V, found, strict=True):
        x = act.function(x) if layers else x
        h = g if scale is None else g * scale
        y = torch.bmm(joined(x, row.read_XTJ1), V_XJIO.flatten(1, 2))
        P = torch.bmm(x, a.mT)
        y.baddbmm_(P * row.inside_XTT, h)
        layers.append(Layer(V_XJIO, a, z, t, g, x, y, P))
        if write:
            V_XJIO = V_XJIO * row.own_XJ11
            if V_XJIO.shape[1] > 1:
                V_XJIO[:, 0].addcmul_(layers[-1].V_XJIO[:, 1], row.other_X11)
            V_XJIO.flatten(1, 2).baddbmm_(joined(a, row.write_XTJ1).mT, h)
        new.append(V_XJIO)
        x = y
    return scale, layers, new


def one_chunk_backward(
    act: Activation, layers: list[Layer], scale: Tensor | None, row: Row, drow: Any, dy: Tensor | None, dV: list[Any]
) -> tuple[Tensor | None, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k and target, and of V in front of the chunk. Those of the coefficients are added to ``drow``.

    dy: gradient of the chunk's output, dV: of V behind it; None for zeros, but not both.
    """
    dx, da, dh, new = None, [], [], []
    for i in reversed(range(len(layers))):
        layer = layers[i]
        h = layer.g_XTO if scale is None else layer.g_XTO * scale
        dx, da_XTI, dh_XTO, dV_XJIO = layer_backward(layer, h, row, drow, dy, dV[i])
        da.insert(0, da_XTI)
        dh.insert(0, dh_XTO)
        new.insert(0, dV_XJIO)
        dy = act.backward(dx, layers[i - 1].y_XTO) if i and dx is not None else None
    if scale is not None:
        shortening_backward(layers, scale, da, dh)
    surprises_backward(act, layers, da, dh, new)
    return dx, da[0], dh[-1].neg(), new


def layer_backward(layer: Layer, h: Tensor, row: Row, drow: Any, dy: Tensor | None, dnew: Tensor | None):
    """Gradients of x, a, h and V of one layer, from those of y and of V behind the chunk."""
    V, a, x, P = layer.V_XJIO, layer.a_XTI, layer.x_XTI, layer.P_XTT
    dread, dinside, dwrite, dcarry = drow
    dx = da = dh = dV = None
    if dnew is not None:
        dV = dnew * row.own_XJ11
        if dV.shape[1] > 1:
            dV[:, 1].addcmul_(dnew[:, 0], row.other_X11)
        dcarry += torch.bmm(dnew.flatten(2), V.flatten(2).mT)
        dnew = dnew.flatten(1, 2)
        da = joined_backward(torch.bmm(h, dnew.mT), a, row.write_XTJ1, dwrite)
        dh = torch.bmm(joined(a, row.write_XTJ1), dnew)
        dV = dV.flatten(1, 2)
    if dy is not None:
        dmixed = torch.bmm(dy, h.mT)
        dinside.addcmul_(dmixed, P)
        dP = dmixed.mul_(row.inside_XTT)
        dx = joined_backward(torch.bmm(dy, V.flatten(1, 2).mT), x, row.read_XTJ1, dread).baddbmm_(dP, a)
        da = plus(da, dP.mT, x)
        dh = plus(dh, (P * row.inside_XTT).mT, dy)
        dV = plus(dV, joined(x, row.read_XTJ1).mT, dy)
    return dx, da, dh, dV.view_as(V)  # type: ignore[union-attr]


def joined(rows_XTI: Tensor, weights_XTJ1: Tensor) -> Tensor:
    """The rows times every one of their weights, side by side: (X, T, J I). Of all chunks at once as of one."""
    return (rows_XTI.unsqueeze(-2) * weights_XTJ1).flatten(-2)


def joined_backward(djoined: Tensor, rows_XTI: Tensor, weights_XTJ1: Tensor, dweights_XTJ: Tensor) -> Tensor:
    """The gradient of the rows; that of the weights is added to ``dweights``. ``djoined`` is used up."""
    djoined_XTJI = djoined.unflatten(2, (weights_XTJ1.shape[2], -1))
    dweights_XTJ += (djoined_XTJI * rows_XTI.unsqueeze(2)).sum(-1)
    return djoined_XTJI.mul_(weights_XTJ1).sum(2)


def plus(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left right, in place; nothing is 0."""
    return torch.bmm(left, right) if total is None else total.baddbmm_(left, right)


def surprises(act: Activation, M: list[Tensor], k: Tensor, target: Tensor) -> list[Any]:
    """a, z, t and g of every ``Layer``."""
    a, z = [k], []
    for W in M[:-1]:
        z.append(torch.bmm(a[-1], W))
        a.append(act.function(z[-1]))
    g, t = [torch.baddbmm(target, a[-1], M[-1], beta=-1)], []
    for W, before in zip(M[:0:-1], z[::-1], strict=True):
        t.append(torch.bmm(g[-1], W.mT))
        g.append(act.backward(t[-1], before))
    return list(zip(a, [*z, None], [*t[::-1], None], g[::-1], strict=True))


def surprises_backward(
    act: Activation, layers: list[Layer], da: list[Tensor], dg: list[Tensor], dV: list[Tensor]
) -> None:
    """Complete ``dg``, ``da`` and ``dV`` by what the surprises make of them, in place, so that dg[-1] is the gradient
    of what the memory returns for the keys."""
    dz, factors = [], [[] for _ in layers]
    for i, layer in enumerate(layers[:-1]):
        above = layers[i + 1]
        dt = act.backward(dg[i], layer.z_XTO)
        dz.append(act.curve(layer.z_XTO).mul_(layer.t_XTO).mul_(dg[i]))
        dg[i + 1].baddbmm_(dt, above.V_XJIO[:, 0])
        factors[i + 1].append((dt, above.g_XTO))
    dz.append(dg[-1])
    for i in reversed(range(len(layers))):
        layer = layers[i]
        if i + 1 < len(layers):
            dz[i] += act.backward(da[i + 1], layer.z_XTO)
        left, right = zip((layer.a_XTI, dz[i]), *factors[i], strict=True)
        dV[i][:, 0] += torch.bmm(torch.cat(left, 1).mT, torch.cat(right, 1))  # into a slice, bmm would go one by one
        da[i].baddbmm_(dz[i], layer.V_XJIO[:, 0].mT)


def shortening_backward(layers: list[Layer], scale: Tensor, da: list[Tensor], dh: list[Tensor]) -> None:
    """Make ``dh`` the gradients of g, and add those of a to ``da``, in place. h is g times ``shortening``."""
    of_a = [layer.a_XTI.square().sum(-1, keepdim=True) for layer in layers]
    of_g = [layer.g_XTO.square().sum(-1, keepdim=True) for layer in layers]
    dscale = torch.cat([(d * layer.g_XTO).sum(-1, keepdim=True) for d, layer in zip(dh, layers, strict=True)], -1)
    drho = dscale.sum(-1, keepdim=True) * torch.where(scale < 1, -2 * scale.square(), 0) / (of_g[-1] + 1e-20)
    of_a[-1] = of_a[-1] - scale.reciprocal()  # rho has the error as its denominator
    for i, layer in enumerate(layers):
        dh[i].mul_(scale).addcmul_(layer.g_XTO, drho * of_a[i])
        da[i].addcmul_(layer.a_XTI, drho * of_g[i])
