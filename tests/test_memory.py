"""The associative memory as pure functions: facts of the papers, worked examples, and a slow twin of every flag.

K features of a key, D width of a value. One-hot keys of length c stand for orthogonal keys.
"""

import itertools

import pytest
import torch
from torch.nn import functional as F

from lit_memory.memory import associative
from lit_memory.memory.associative import AssociativeState, dpfp, dpfp_backward, empty, read, write

DOUBLE = {"dtype": torch.float64}
EPS = {"eps": 1e-2, "gamma_eps": 3e-2}
FLAGS = [
    {"update": u, "gamma": g, "gamma_detach": d, "beta_on_z": b, "use_denom": use, "denom_floor": floor, **EPS}
    for u, g, d, b, (use, floor) in itertools.product(
        ("batch", "sequential"),
        ("clip", "raw", "off"),
        (True, False),
        (False, True),
        ((True, 0.0), (True, 0.7), (False, 0.0)),
    )
]


def flag_name(flags):
    return "-".join(str(v) for v in flags.values())


def rows(*values):
    """(1, M, C) in fp64."""
    return torch.tensor([values], **DOUBLE)


def remember(*pairs, state=None, keys=4, beta=1.0, **flags):
    """Write (key, value) pairs one segment at a time."""
    state = state or empty(1, keys, len(pairs[0][1]), **DOUBLE)
    for phi, v in pairs:
        state = write(state, rows(phi), rows(v), torch.full((1, 1, 1), beta, **DOUBLE), **flags)
    return state


def one_hot(i, size=4, length=2.0):
    return [length * (j == i) for j in range(size)]


def random_inputs(batch=2, tokens=3, keys=5, width=2):
    """A memory in use, keys, values and strengths, with gradients. The last z is negative, so that gamma is clipped at
    1 as well as at 0."""
    A, z, phi = (
        torch.randn(batch, keys, width, **DOUBLE),
        torch.rand(batch, keys, **DOUBLE) + 0.2,
        torch.rand(batch, tokens, keys, **DOUBLE) * 2,
    )
    z[-1].neg_()
    v, beta = torch.randn(batch, tokens, width, **DOUBLE), torch.rand(batch, tokens, 1, **DOUBLE)
    return [t.requires_grad_() for t in (A, z, phi, v, beta)]


def slow_dpfp(x, nu):
    r = torch.cat([F.relu(x), F.relu(-x)], dim=-1)
    n = r.shape[-1]
    return torch.stack([r[..., i] * r[..., (i - j) % n] for j in range(1, nu + 1) for i in range(n)], dim=-1)


def slow_write(A, z, phi, v, beta, *, update, gamma, gamma_detach, beta_on_z, eps, gamma_eps, use_denom, denom_floor):
    """The update equations of the paper, one sample, one token and one scalar at a time."""
    A, z = list(A.unbind(0)), list(z.unbind(0))
    for b in range(len(A)):
        seen_A, seen_z = A[b], z[b]
        for k, value, strength in zip(phi[b], v[b], beta[b, :, 0], strict=True):
            if update == "sequential":
                seen_A, seen_z = A[b], z[b]
            den = (seen_z * k).sum() + eps
            share = 1 - den / (k.dot(k) + gamma_eps) if gamma != "off" and seen_z.any() else torch.ones((), **DOUBLE)
            if denom_floor and den < denom_floor * k.norm() * seen_z.norm():
                den = denom_floor * k.norm() * seen_z.norm()
            den = den if use_denom else torch.ones(())
            if gamma == "clip":
                share = share * (share > 0) if share < 1 else torch.ones((), **DOUBLE)
            share = share.detach() if gamma_detach else share
            A[b] = A[b] + strength * torch.outer(k, value - (seen_A * k[:, None]).sum(0) / den)
            z[b] = z[b] + share * (strength if beta_on_z else 1) * k * use_denom
    return torch.stack(A), torch.stack(z)


# --- the feature map


@pytest.mark.parametrize("nu", [1, 2, 3, 7])
def test_dpfp_slow_twin(nu):
    """phi = concat_j r * roll(r, j): the fast form equals the definition entry by entry, bit for bit."""
    x = torch.randn(2, 3, 4, **DOUBLE)
    assert torch.equal(dpfp(x, nu), slow_dpfp(x, nu))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("nu", [1, 2, 3, 5])
def test_dpfp_backward(nu, normalize):
    """By hand as by autograd, also where the rolls go beyond half of the ring."""
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    phi = dpfp(x, nu, normalize)
    dphi = torch.randn_like(phi)
    (expected,) = torch.autograd.grad(phi, x, dphi)
    assert torch.allclose(dpfp_backward(dphi, x.detach(), nu, normalize), expected, rtol=1e-12, atol=1e-12)


def test_dpfp_worked_example():
    """x = (1, -2): r = (1, 0, 0, 2); r * roll(r, 1) = (1*2, 0, 0, 2*0); roll 2 meets zeros only."""
    assert dpfp(rows([1.0, -2.0]), nu=2).tolist() == [[[2.0, 0, 0, 0, 0, 0, 0, 0]]]


def test_dpfp_facts():
    """Spec 6.1: non-negative, of degree two, about a quarter non-zero, random keys have a cosine of 0.11-0.12, common
    sign changes cancel."""
    x, y = torch.randn(2, 1, 4000, 32, **DOUBLE)
    phi_x, phi_y = dpfp(x), dpfp(y)
    assert (phi_x >= 0).all()
    assert torch.allclose(dpfp(3 * x), 9 * phi_x, rtol=1e-12)
    assert abs((phi_x > 0).double().mean() - 0.25) < 0.01
    assert 0.11 < F.cosine_similarity(phi_x, phi_y, dim=-1).mean() < 0.12
    assert torch.allclose((dpfp(-x) * dpfp(-y)).sum(-1), (phi_x * phi_y).sum(-1), rtol=1e-12)


def test_dpfp_normalize():
    """normalize: unit length and the same direction; zero stays zero instead of NaN."""
    x = torch.cat([torch.randn(1, 5, 4, **DOUBLE), torch.zeros(1, 1, 4, **DOUBLE)], dim=1)
    unit, phi = dpfp(x, normalize=True), dpfp(x)
    assert torch.allclose(unit[0, :5].norm(dim=-1), torch.ones(5, **DOUBLE))
    assert torch.allclose(unit * phi.norm(dim=-1, keepdim=True), phi)
    assert not unit[0, 5].any()


# --- the paper's facts


def test_armt_rewrite():
    """T-ARMT-rewrite: writing a key again with beta 1 leaves z alone and replaces the value."""
    key = one_hot(1)
    first = remember((key, [5.0, -3.0]))
    second = remember((key, [7.0, 2.0]), state=first)
    assert torch.equal(second.z_BK, first.z_BK)
    assert torch.allclose(read(second, rows(key)), rows([7.0, 2.0]), atol=2e-5)
    assert torch.allclose(read(first, rows(key)), rows([5.0, -3.0]), atol=2e-5)


@pytest.mark.parametrize("n", [10, 500])
def test_armt_nogamma(n):
    """T-ARMT-nogamma: without gamma alternating +-1 fade like 0.5/n and a repeated value decays to beta/(1+beta); with
    gamma neither does."""
    key = one_hot(0)
    signs = [(key, [(-1.0) ** i]) for i in range(n)]
    faded, kept = read(remember(*signs, gamma="off"), rows(key)), read(remember(*signs), rows(key))
    assert abs(abs(faded.item()) * n - 0.5) < 0.1
    assert abs(kept.item() - signs[-1][1][0]) < 1e-4
    same = [(key, [1.0])] * n
    assert abs(read(remember(*same, gamma="off"), rows(key)).item() - 0.5) < 0.6 / n
    assert abs(read(remember(*same), rows(key)).item() - 1) < 1e-4


def test_armt_gamma1():
    """T-ARMT-gamma1: gamma = 1 is the plain delta rule with a summed normaliser."""
    pairs = [(torch.rand(4).tolist(), torch.randn(3).tolist()) for _ in range(6)]
    state = remember(*pairs, beta=0.6, gamma="off", eps=1e-9)
    A, z = torch.zeros(4, 3, **DOUBLE), torch.zeros(4, **DOUBLE)
    for phi, v in pairs:
        phi, v = torch.tensor(phi, **DOUBLE), torch.tensor(v, **DOUBLE)
        old = phi @ A / (z @ phi) if z.any() else torch.zeros(3, **DOUBLE)
        A, z = A + 0.6 * torch.outer(phi, v - old), z + phi
    assert torch.allclose(state.A_BKD[0], A, rtol=1e-6) and torch.allclose(state.z_BK[0], z)


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_armt_orth(overlap):
    """T-ARMT-orth: for orthogonal keys the batch update equals the sequential one; for overlapping keys it does not."""
    phi = 2 * torch.eye(3, **DOUBLE)[None]
    phi[0, 2, 0] = overlap
    start = remember((one_hot(0, 3), [1.0, 4.0]), (one_hot(2, 3), [2.0, 2.0]), keys=3)
    v, beta = torch.randn(1, 3, 2, **DOUBLE), torch.rand(1, 3, 1, **DOUBLE)
    batch, sequential = (write(start, phi, v, beta, update=u) for u in ("batch", "sequential"))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(batch, sequential, strict=True)) == (overlap == 0)


def test_armt_dup():
    """T-ARMT-dup: the same key twice in one segment of an empty memory recalls the mean; sequentially, the second
    value."""
    phi, v, beta = rows(one_hot(1), one_hot(1)), rows([4.0], [10.0]), torch.ones(1, 2, 1, **DOUBLE)
    recalled = [
        read(write(empty(1, 4, 1, **DOUBLE), phi, v, beta, update=u), rows(one_hot(1))).item()
        for u in ("batch", "sequential")
    ]
    assert recalled == pytest.approx([7.0, 10.0], abs=1e-4)


def test_armt_const():
    """T-ARMT-const: if all values are v, every query that overlaps a written key recalls v."""
    state = remember(*[(one_hot(i), [3.0, -1.0]) for i in range(3)])
    queries = torch.rand(1, 20, 4, **DOUBLE)
    assert torch.allclose(read(state, queries), rows(*[[3.0, -1.0]] * 20), atol=1e-4)


def test_armt_capacity():
    """T-ARMT-capacity: as many orthogonal keys as there are features (6 * memory_dim = 24) are all recalled, after 24
    writes."""
    values = torch.randn(24, 3, **DOUBLE)
    state = remember(*[(one_hot(i, 24), values[i].tolist()) for i in range(24)], keys=24)
    assert torch.allclose(read(state, 2 * torch.eye(24, **DOUBLE)[None])[0], values, atol=1e-4)


def test_armt_clipping_hazard():
    """Spec 6.6: keys (10,0), then (1,1): gamma clips to 0 and query (0,1) gets 2 over eps. Three flags prevent it, each
    by its own means."""
    keys, values, query = torch.tensor([[10.0, 0.0], [1.0, 1.0]]), [[1.0], [3.0]], rows([0.0, 1.0])
    state = remember(*zip(keys.tolist(), values, strict=True), keys=2)
    assert state.z_BK.tolist() == [[10.0, 0.0]]
    assert read(state, query).item() == pytest.approx(2e5, rel=1e-4)
    assert read(state, query, denom_floor=0.1).item() == pytest.approx(2, rel=1e-4)
    assert read(state, query, use_denom=False).item() == pytest.approx(2, rel=1e-4)
    unit = remember(*zip(F.normalize(keys).tolist(), values, strict=True), keys=2)
    assert read(unit, query).item() == pytest.approx(6.83, rel=1e-3)


def test_empty_memory():
    """An empty memory recalls exactly 0, and its first write counts in full (gamma 1), even of a sample beside one that
    is in use."""
    phi, v, beta = torch.rand(2, 1, 4, **DOUBLE), torch.randn(2, 1, 3, **DOUBLE), torch.ones(2, 1, 1, **DOUBLE)
    used = remember((one_hot(0, length=9.0), [1.0, 1.0, 1.0]))
    state = AssociativeState(*(torch.cat([torch.zeros_like(t), t]) for t in used))
    assert not read(state, phi)[0].any() and read(state, phi)[1].all()
    written = write(state, phi, v, beta)
    assert torch.equal(written.z_BK[0], phi[0, 0])
    assert not torch.equal(written.z_BK[1] - state.z_BK[1], phi[1, 0])


@pytest.mark.parametrize("beta_on_z", [False, True])
def test_a_key_that_is_almost_nothing_is_the_first(beta_on_z):
    """The key behind it is not the first one, although their lengths add up to its own."""
    phi = torch.tensor([[[1e-9, 0.0], [1.0, 0.5]]], **DOUBLE)
    state = AssociativeState(torch.zeros(1, 2, 3, **DOUBLE), torch.zeros(1, 2, **DOUBLE))
    flags = {"gamma": "raw", "beta_on_z": beta_on_z, **EPS}
    rest = torch.randn(1, 2, 3, **DOUBLE), torch.tensor([[[0.5], [0.9]]], **DOUBLE)
    flags |= {"gamma_detach": False, "use_denom": True, "denom_floor": 0.0, "update": "sequential"}
    slow = slow_write(*state, phi, *rest, **flags)
    assert all(map(torch.allclose, write(state, phi, *rest, **flags), slow))


# --- slow twin and gradients


@pytest.mark.parametrize("flags", FLAGS, ids=flag_name)
@pytest.mark.parametrize("start", ["used", "empty", "empty, and the first key is 0"])
def test_write_slow_twin(start, flags):
    """Every flag: the state and all gradients equal those of the token-by-token twin (fp64, 1e-10)."""
    inputs = random_inputs()
    if start != "used":
        inputs[:2] = [torch.zeros_like(t).requires_grad_() for t in inputs[:2]]
    if "0" in start:
        inputs[2].data[:, 0] = 0
    weights = torch.randn(2, 5, 2, **DOUBLE), torch.randn(2, 5, **DOUBLE)

    def outcome(state):
        loss = sum((w * t).sum() for w, t in zip(weights, state, strict=True))
        return [*state, *torch.autograd.grad(loss, inputs, materialize_grads=True)]

    fast, slow = (
        outcome(write(AssociativeState(*inputs[:2]), *inputs[2:], **flags)),
        outcome(slow_write(*inputs, **flags)),
    )
    for a, b in zip(fast, slow, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("flags", [f for f in FLAGS if not f["gamma_detach"]], ids=flag_name)
def test_write_gradcheck(flags):
    """Analytic gradients of the written state equal finite differences (a detached gamma is no derivative, so it is
    left out)."""
    assert torch.autograd.gradcheck(
        lambda A, z, *rest: tuple(write(AssociativeState(A, z), *rest, **flags)),
        random_inputs(batch=1, tokens=2, keys=3),
    )


@pytest.mark.parametrize("flags", [{}, {"denom_floor": 0.7}, {"use_denom": False}], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_read_gradcheck(flags, normalize):
    """Gradients of recall, through the feature map, equal finite differences."""
    A, z, _, _, _ = random_inputs(batch=1, keys=12)
    x = torch.randn(1, 2, 3, **DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda A, z, x: read(AssociativeState(A, z), dpfp(x, 2, normalize), **flags), (A, z, x)
    )


def test_armt_detach():
    """T-ARMT-detach: with gamma_detach the new z has the gradient of a constant gamma; without, it has more. The values
    are the same."""
    A, _, _, v, beta = random_inputs(tokens=1)
    z = torch.rand(2, 5, **DOUBLE, requires_grad=True)
    phi = (torch.rand(2, 1, 5, **DOUBLE) * 4 + 2).requires_grad_()  # longer than z, so that gamma lies inside (0, 1)
    held, free = (write(AssociativeState(A, z), phi, v, beta, gamma_detach=d).z_BK for d in (True, False))
    assert torch.equal(held, free)
    gamma = ((held - z) / phi[:, 0]).detach()
    assert ((gamma > 0) & (gamma < 1)).all()
    grad_phi, grad_z = torch.autograd.grad(held.sum(), (phi, z))
    assert torch.allclose(grad_phi[:, 0], gamma) and torch.equal(grad_z, torch.ones_like(z))
    assert not torch.allclose(torch.autograd.grad(free.sum(), phi)[0][:, 0], gamma)


@pytest.mark.parametrize(
    "change",
    [
        {"update": "sequential"},
        {"gamma": "raw"},
        {"gamma": "off"},
        {"beta_on_z": True},
        {"eps": 0.1},
        {"gamma_eps": 0.1},
        {"denom_floor": 3.0},
        {"use_denom": False},
    ],
    ids=str,
)
def test_write_flags_matter(change):
    """Every flag of ``write`` changes the state."""
    A, z, *rest = random_inputs()
    default, other = (write(AssociativeState(A, z), *rest, **flags) for flags in ({}, change))
    assert not all(torch.allclose(a, b) for a, b in zip(default, other, strict=True))


def test_functions_stand_alone():
    """The functions leave their inputs as they were."""
    inputs = [t.detach().clone() for t in random_inputs()]
    before = [t.clone() for t in inputs]
    write(AssociativeState(*inputs[:2]), *inputs[2:], update="sequential")
    read(AssociativeState(*inputs[:2]), inputs[2], denom_floor=0.5)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert [t.shape for t in associative.empty(2, 5, 3)] == [(2, 5, 3), (2, 5)]
