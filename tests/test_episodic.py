"""The episodic memory as pure functions: the named facts of spec 11.4, a slow twin of every fast path, gradients, bad
input.

All comparisons are in fp64 unless a test is about precision. B episodes, N lines, K slots, C width of a latent.
"""

import itertools

import pytest
import torch

from lit_memory.memory import episodic
from lit_memory.memory.episodic import (
    NEWTON_SCALE,
    EpisodicState,
    add,
    empty,
    forget,
    gaussian_keys,
    keys,
    nearest,
    one_hot_keys,
    pinv,
    read,
    read_nearest,
    write,
)
from lit_memory.memory.newton import newton

DOUBLE = {"dtype": torch.float64}
EXACT = ["svd", "newton_safe"]
SOLVERS = ["newton", *EXACT]
STEPS = 30  # of newton_safe where a test asks for 1e-9


def draw(*shape, scale=1.0):
    return torch.randn(*shape, **DOUBLE) * scale


def close(a, b, tol=1e-9):
    return torch.allclose(a, b, rtol=tol, atol=tol)


def base(slots=6, width=8):
    """M_0 as the reference starts it: eye(K, C)."""
    return torch.eye(slots, width, **DOUBLE)[None]


def lines_in_span(batch=2, lines=4, slots=6, width=8):
    """Latents in the span of ``base``."""
    return draw(batch, lines, slots) @ base(slots, width)


def slow_pinv(A, solver, steps):
    """One matrix, entry by entry where it is short."""
    scale = NEWTON_SCALE
    if solver == "newton_safe":
        column, row = max(sum(abs(a) for a in c) for c in A.T.tolist()), max(sum(abs(a) for a in r) for r in A.tolist())
        scale = 1 / (column * row)
    X = A.T * scale
    for _ in range(steps):
        X = 2 * X - torch.einsum("ij,jk,kl->il", X, A, X)
    return X


# --- pseudo-inverse


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 1)], ids=str)
def test_pinv_slow_twin(shape, solver):
    """Batched, and by way of the smaller product, equals one matrix at a time; the exact solvers meet all four
    conditions of Penrose."""
    A = draw(2, 3, *shape)
    X = pinv(A, solver, STEPS) if solver == "newton_safe" else pinv(A, solver)
    for b, i in itertools.product(range(2), range(3)):
        twin = (
            torch.linalg.pinv(A[b, i])
            if solver == "svd"
            else slow_pinv(A[b, i], solver, STEPS if solver == "newton_safe" else 15)
        )
        assert close(X[b, i], twin)
    if solver in EXACT:
        assert close(A @ X @ A, A) and close(X @ A @ X, X) and close((A @ X).mT, A @ X) and close((X @ A).mT, X @ A)


def test_svd_goes_on_in_double(monkeypatch):
    """LAPACK's SVD has ended two runs of ``larimar_facts``: it does not converge on every matrix of low rank."""
    A, exact = (draw(2, 6, 3) @ draw(2, 3, 5)).float(), torch.linalg.pinv

    def gives_up(matrix, **options):
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("linalg.svd: (Batch element 1): The algorithm failed to converge")
        return exact(matrix, **options)

    expected = pinv(A, "svd")
    monkeypatch.setattr(torch.linalg, "pinv", gives_up)
    assert pinv(A, "svd").dtype == torch.float32 and torch.allclose(pinv(A, "svd"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 5, 3), (4, 4), (2, 3, 4, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_newton_slow_twin(shape, dtype, tolerance):
    """The node of the graph against the loop that it stands for: the result and both gradients."""
    A, found = torch.randn(shape, dtype=dtype), []
    for way in ("node", "loop"):
        a, x = A.clone().requires_grad_(), (A.mT / 20).requires_grad_()
        if way == "node":
            y = newton(a, x, 6)[0]
        else:
            y = x
            for _ in range(6):
                y = 2 * y - y @ a @ y
        found.append([y, *torch.autograd.grad(y.sin().sum(), (a, x))])
    assert all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(*found, strict=True))


def test_lar_newton():
    """T-LAR-newton: 15 steps invert a singular value s up to the factor 1 - (1 - 5e-4 s^2)^(2^15), whose values the
    spec lists."""
    values = torch.tensor([0.1, 0.25, 0.5, 1.0, 3.0, 63.2], **DOUBLE)
    left, right = torch.linalg.qr(draw(6, 6))[0], torch.linalg.qr(draw(9, 6))[0]
    A = left * values @ right.mT
    gain = (left.mT @ A @ pinv(A) @ left).diagonal()
    assert close(gain, 1 - (1 - NEWTON_SCALE * values.square()) ** 2**15)
    assert gain[:4].tolist() == pytest.approx([0.15, 0.64, 0.98, 1.0], abs=5e-3)
    short = (left.mT @ A @ pinv(A, steps=7) @ left).diagonal()
    assert close(short, 1 - (1 - NEWTON_SCALE * values.square()) ** 2**7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [1, 3, 7, 15])
@pytest.mark.parametrize("value", [63.5, 80.0, 1e4])
def test_newton_diverges_loudly(value, steps, dtype):
    """Spec 11.2: above 63.2 the published iteration diverges, which is an error, be it one matrix of a batch;
    newton_safe does not."""
    A = torch.stack([torch.eye(3), torch.diag(torch.tensor([1.0, 2.0, value]))]).to(dtype)
    with pytest.raises(ValueError, match=r"solver='newton': the iteration diverges.*63\.2.*newton_safe"):
        pinv(A, steps=steps)
    safe = pinv(A, "newton_safe", 60) @ A
    assert torch.allclose(safe, torch.eye(3, dtype=dtype).expand(2, -1, -1), atol=1e-5)


@pytest.mark.parametrize("steps", [1, 3, 7, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_newton_is_allowed_up_to_its_bound(steps, dtype):
    """With singular values from 0 to 63.2, and directions that the matrix does not have, nothing diverges."""
    values = torch.linspace(0, 63.2, 33, dtype=torch.float64)
    left, right = torch.linalg.qr(draw(40, 33))[0], torch.linalg.qr(draw(50, 33))[0]
    assert pinv((left * values @ right.mT).to(dtype), steps=steps).isfinite().all()


def test_newton_under_transforms():
    """vmap and a derivative by functorch, which follow no node of ours, get the loop."""
    A = draw(3, 4, 5)
    X = A.mT / 20
    wanted = newton(A, X, 6)[0]
    assert close(torch.func.vmap(lambda a, x: newton(a, x, 6)[0])(A, X), wanted)
    a = A.clone().requires_grad_()
    (expected,) = torch.autograd.grad(newton(a, X, 6)[0].sin().sum(), a)
    assert close(torch.func.grad(lambda a: newton(a, X, 6)[0].sin().sum())(A), expected)


def test_newton_safe_against_newton():
    """Spec 11.2: for a smallest singular value of 0.24 newton is 38 % off, newton_safe exact to rounding."""
    left, right = torch.linalg.qr(draw(5, 5))[0], torch.linalg.qr(draw(7, 5))[0]
    values = torch.tensor([0.24, 0.5, 0.8, 1.0, 1.2], **DOUBLE)
    A, inverse = left * values @ right.mT, right / values @ left.mT
    error = [((pinv(A, solver) - inverse) @ left[:, 0]).norm() * 0.24 for solver in ("newton", "newton_safe")]
    assert error[0] == pytest.approx(0.38, abs=0.01) and error[1] < 1e-13


def test_rcond_leaves_small_singular_values_out():
    A = torch.diag(torch.tensor([1.0, 1e-3], **DOUBLE))
    assert close(pinv(A, "svd").diagonal(), torch.tensor([1.0, 1e3], **DOUBLE))
    assert close(pinv(A, "svd", rcond=1e-2).diagonal(), torch.tensor([1.0, 0.0], **DOUBLE))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("repeated", [False, True], ids=["distinct", "repeated"])
def test_pinv_gradcheck(solver, repeated):
    """Gradients equal finite differences, for equal singular values as well: torch's pinv does not differentiate the
    decomposition."""
    A = (torch.eye(2, 3, **DOUBLE) if repeated else draw(2, 3)).expand(2, -1, -1).clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a: pinv(a, solver, 6), A)


def test_unknown_solver():
    with pytest.raises(ValueError, match=r"solver='qr': expected 'newton'"):
        pinv(draw(2, 2), "qr")


# --- write and read


@pytest.mark.parametrize("solver", EXACT)
def test_lar_orth_w(solver):
    """T-LAR-orthW: latents in the span of M_0, no more than slots, are read back as they were written; other queries
    are projected on their span."""
    Z = lines_in_span()
    state = write(keys(Z, base(), solver, STEPS), Z, solver, STEPS)
    assert close(read(state, keys(Z, state.M_BKC, solver, STEPS)), Z)
    query = draw(2, 3, 8)
    onto = torch.linalg.qr(Z.mT)[0]
    assert close(read(state, keys(query, state.M_BKC, solver, STEPS)), query @ onto @ onto.mT)


@pytest.mark.parametrize("solver", SOLVERS)
def test_lar_rowperm(solver):
    """T-LAR-rowperm: the order in which an episode is written does not matter."""
    Z, order = lines_in_span(), torch.tensor([2, 0, 3, 1])
    for a, b in zip(*(write(keys(z, base(), solver), z, solver) for z in (Z, Z[:, order])), strict=True):
        assert close(a, b)


@pytest.mark.parametrize("lines", [3, 6, 11])
def test_write_slow_twin(lines):
    """One least-squares problem after another, for fewer lines than slots, as many, and more."""
    W, Z = draw(3, lines, 6), draw(3, lines, 4)
    state = write(W, Z, "svd")
    for w, z, M, gram in zip(W, Z, *state, strict=True):
        assert close(M, torch.linalg.lstsq(w, z, driver="gelsd").solution)
        assert close(gram, sum(torch.outer(row, row) for row in w))


def test_padded_lines_are_absent():
    """A line with a key of zeros changes nothing, whatever its latent."""
    W, Z = draw(2, 4, 6), draw(2, 5, 8)
    padded = torch.cat([W, torch.zeros(2, 1, 6, **DOUBLE)], dim=1)
    for solver in SOLVERS:
        for a, b in zip(write(padded, Z, solver), write(W, Z[:, :4], solver), strict=True):
            assert close(a, b)


@pytest.mark.parametrize("solver", SOLVERS)
def test_write_and_read_gradcheck(solver):
    """Gradients reach latents, M_0 and query through both pseudo-inverses."""
    Z, M_0, query = (t.requires_grad_() for t in (draw(1, 2, 4), draw(1, 3, 4), draw(1, 1, 4)))

    def recall(Z, M_0, query):
        state = write(keys(Z, M_0, solver, 8), Z, solver, 8)
        return read(state, keys(query, state.M_BKC, solver, 8, 1e-6))

    assert torch.autograd.gradcheck(recall, (Z, M_0, query))


# --- sequential write and forget


@pytest.mark.parametrize("parts", [[1] * 9, [4, 5], [9], [2, 3, 4]], ids=str)
@pytest.mark.parametrize("slots", [4, 9, 12])
def test_lar_seq(slots, parts):
    """T-LAR-seq: lines written in any parts equal one batch write, for more lines than slots and for fewer (G without
    an inverse)."""
    W, Z = draw(2, 9, slots), draw(2, 9, 5)
    state = empty(2, slots, 5, **DOUBLE)
    for w, z in zip(W.split(parts, dim=1), Z.split(parts, dim=1), strict=True):
        state = add(state, w, z)
    assert all(close(a, b) for a, b in zip(state, write(W, Z, "svd"), strict=True))


@pytest.mark.parametrize("slots", [4, 9, 12])
def test_lar_forget(slots):
    """T-LAR-forget: forgetting restores the memory before, also where the rank falls, down to an empty memory."""
    W, Z = draw(2, 9, slots), draw(2, 9, 5)
    state = write(W, Z, "svd")
    for before, left in itertools.pairwise((9, 7, 6, 2, 0)):
        state = forget(state, W[:, left:before], Z[:, left:before])
        assert all(close(a, b, 1e-8) for a, b in zip(state, write(W[:, :left], Z[:, :left], "svd"), strict=True))
    assert not read(state, draw(2, 1, slots)).abs().max() > 1e-8


def test_long_history_is_forgotten():
    """400 lines, forgotten in parts down to one and then none: rounding of the many does not pass for a key of the
    few."""
    W, Z = draw(2, 400, 4), draw(2, 400, 3)
    state = write(W, Z, "svd")
    for before, left in itertools.pairwise((400, 100, 5, 1)):
        state = forget(state, W[:, left:before], Z[:, left:before])
    assert close(read(state, W[:, :1]), Z[:, :1], 1e-6)
    assert not forget(state, W[:, :1], Z[:, :1]).M_BKC.any()


def test_add_is_the_published_update():
    """Where G has an inverse: M <- M +- G^-1 W'^T (Z' - W' M) with the new G (spec 11.1)."""
    W, Z = draw(1, 9, 4), draw(1, 9, 5)
    for revise, sign in ((add, 1), (forget, -1)):
        state = write(W, Z, "svd")
        w, z = W[:, :2], Z[:, :2]
        gram = state.gram_BKK + sign * w.mT @ w
        expected = state.M_BKC + sign * torch.linalg.solve(gram, w.mT @ (z - w @ state.M_BKC))
        assert close(revise(state, w, z).M_BKC, expected)


def test_add_gradcheck():
    W, Z = draw(1, 4, 3).requires_grad_(), draw(1, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda w, z: add(write(w[:, :3], z[:, :3], "svd"), w[:, 3:], z[:, 3:]).M_BKC, (W, Z)
    )


def test_rare_line_survives_common_ones():
    """A slot that was written once stays beside one that was written a million times, in fp32: the Gram matrix is in
    fp64."""
    W = torch.tensor([[[1e3, 0.0], [0.0, 1.0]]])
    state = add(empty(1, 2, 1), W, W @ torch.tensor([[[3.0], [7.0]]]))
    assert torch.allclose(state.M_BKC, torch.tensor([[[3.0], [7.0]]])) and state.M_BKC.dtype == torch.float32


def test_forgetting_what_was_not_written():
    with pytest.raises(ValueError, match=r"forget: these lines were not written.*expected"):
        forget(write(draw(2, 2, 4), draw(2, 2, 3), "svd"), draw(2, 1, 4), draw(2, 1, 3))


# --- distances and keys


def test_distances_slow_twin(monkeypatch):
    """Blocks of any size give the same bits as one pair at a time."""
    x, y = draw(2, 3, 5), draw(2, 7, 5)
    whole = episodic.squared_distances(x, y)
    monkeypatch.setattr(episodic, "BLOCK", 70)
    assert torch.equal(episodic.squared_distances(x, y), whole)
    for b, i, j in itertools.product(range(2), range(3), range(7)):
        assert close(whole[b, i, j], sum((x[b, i, c] - y[b, j, c]) ** 2 for c in range(5)), 1e-14)


def test_distances_of_near_duplicates():
    """Spec 11.3: fp32 tells apart long latents that differ in their last digits; |x|^2 + |y|^2 - 2xy does not."""
    x = 100 + torch.rand(1, 1, 64)
    y = torch.cat([x + 2e-4, x + 1e-4], dim=1)
    assert nearest(x, y).item() == 1
    exact = (x.double().unsqueeze(2) - y.double().unsqueeze(1)).square().sum(-1)
    assert torch.allclose(episodic.squared_distances(x, y).double(), exact, rtol=1e-5)
    expanded = x.square().sum(-1, keepdim=True) + y.square().sum(-1)[:, None] - 2 * x @ y.mT
    assert not torch.allclose(expanded.double(), exact, rtol=0.5)


def test_nearest_ties_and_padding():
    """Of equal distances the first counts; what is not real is never chosen."""
    slots = torch.tensor([[[0.0], [2.0], [2.0], [0.5]]])
    query, real = torch.tensor([[[1.9], [1.0], [0.2]]]), torch.tensor([[True, False, True, False]])
    assert nearest(query, slots).tolist() == [[1, 3, 0]] and nearest(query, slots, real).tolist() == [[2, 0, 0]]
    assert one_hot_keys(query, slots, real).tolist() == [[[0, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]]
    assert not gaussian_keys(query, slots, 1.0, real)[..., [1, 3]].any()


def test_lar_kernel():
    """T-LAR-kernel: Gaussian keys with a bandwidth towards 0 are one-hot keys, however small; wide ones are uniform;
    sums are 1."""
    query, slots = draw(2, 3, 5), draw(2, 7, 5)
    for bandwidth in (1e-2, 1e-30, 1e-300):
        assert close(gaussian_keys(query, slots, bandwidth), one_hot_keys(query, slots))
    assert close(gaussian_keys(query, slots, 1e9), torch.full((2, 3, 7), 1 / 7, **DOUBLE))
    soft = gaussian_keys(query, slots, 0.7)
    slow = torch.tensor(
        [[[-(q - s).square().sum() / 0.98 for s in ss] for q in qs] for qs, ss in zip(query, slots, strict=True)],
        **DOUBLE,
    ).exp()
    assert close(soft, slow / slow.sum(-1, keepdim=True))
    with pytest.raises(ValueError, match=r"bandwidth=0\.0: expected more than 0"):
        gaussian_keys(query, slots, 0.0)


@pytest.mark.parametrize("solver", EXACT)
def test_lar_onehot(solver):
    """T-LAR-onehot: with one-hot keys the slots are the latents; duplicates are averaged, unused slots are zero."""
    key_memory, Z = draw(1, 5, 4), draw(1, 4, 8)
    W = one_hot_keys(key_memory[:, [3, 0, 3, 1]] + 1e-3, key_memory)
    M = write(W, Z, solver, STEPS).M_BKC
    expected = torch.stack(
        [Z[0, 1], Z[0, 3], torch.zeros(8, **DOUBLE), (Z[0, 0] + Z[0, 2]) / 2, torch.zeros(8, **DOUBLE)]
    )
    assert close(M[0], expected)
    assert close(
        read(EpisodicState(M, empty(1, 5, 8).gram_BKK), one_hot_keys(key_memory[:, 3:4], key_memory))[0, 0], expected[3]
    )


@pytest.mark.parametrize("ragged", [False, True])
def test_read_nearest_slow_twin(ragged):
    """The shortcut equals keys, write and read with a slot per line, and a loop; duplicates and ragged episodes
    included; so do gradients."""
    slots, Z, query = draw(2, 6, 4), draw(2, 6, 3).requires_grad_(), draw(2, 5, 4)
    slots[:, 4] = slots[:, 1]
    query[:, 0] = slots[:, 1] + 1e-3
    real = torch.tensor([[True] * 6, [False, True, True, True, not ragged, True]]) if ragged else None
    fast = read_nearest(query, slots, Z, real)
    W = one_hot_keys(slots, slots, real) * (1 if real is None else real.unsqueeze(-1))
    slow = read(write(W, Z, "svd"), one_hot_keys(query, slots, real))
    assert close(fast, slow)
    weights = torch.randn_like(fast)
    assert close(*(torch.autograd.grad((weights * t).sum(), Z)[0] for t in (fast, slow)))
    for b, q in itertools.product(range(2), range(5)):
        lines = [n for n in range(6) if real is None or real[b, n]]
        distances = {n: (query[b, q] - slots[b, n]).norm().item() for n in lines}
        best = min(lines, key=lambda n: distances[n])
        assert close(
            fast[b, q], torch.stack([Z[b, n] for n in lines if torch.equal(slots[b, n], slots[b, best])]).mean(0)
        )


def passkey(repeats, place, seed=0):
    """Keys and latents of a passkey context: five filler sentences again and again, and the needle in one place."""
    generator = torch.Generator().manual_seed(seed)
    sentence = torch.randn(6, 2, 16, generator=generator)
    order = [0, 1, 2, 3, 4] * repeats
    order.insert(place, 5)
    return sentence[order, 0][None], sentence[order, 1][None], sentence[5]


def test_lar_length():
    """T-LAR-length: repeating filler changes no bit of what is read, whether it is the needle or the filler itself."""
    for number, query in ((5, passkey(1, 0)[2][0]), (2, passkey(1, 0)[0][0, 3])):
        found = [read_nearest((query + 1e-3)[None, None], *passkey(repeats, 0)[:2]) for repeats in (1, 7, 333)]
        assert all(torch.equal(f, found[0]) for f in found), number
    needle = passkey(1, 0)[2]
    assert torch.equal(read_nearest(needle[0][None, None] + 1e-3, *passkey(333, 100)[:2])[0, 0], needle[1])


def test_lar_perm():
    """T-LAR-perm: the read does not depend on the order of the lines, nor on where the needle is."""
    query = passkey(1, 0)[2][0][None, None]
    found = [read_nearest(query, *passkey(9, place)[:2]) for place in (0, 17, 45)]
    assert all(torch.equal(f, found[0]) for f in found)
    slots, Z, order = draw(2, 6, 4), draw(2, 6, 3), torch.randperm(6)
    assert torch.equal(read_nearest(slots, slots, Z), read_nearest(slots, slots[:, order], Z[:, order]))


# --- bad input


@pytest.mark.parametrize("solver", SOLVERS)
def test_empty_episode(solver):
    """Nothing written: the memory is zero and so is what is read; but nothing is nearest, which is an error that names
    the episode."""
    state = write(draw(2, 0, 6), draw(2, 0, 8), solver)
    assert state.M_BKC.shape == (2, 6, 8) and not state.M_BKC.any() and not state.gram_BKK.any()
    assert not read(state, keys(draw(2, 3, 8), state.M_BKC, solver)).any()
    assert all(torch.equal(a, b) for a, b in zip(add(state, draw(2, 0, 6), draw(2, 0, 8)), state, strict=True))
    for call in (nearest, one_hot_keys):
        with pytest.raises(ValueError, match=r"episode 0: expected at least one line.*write before reading"):
            call(draw(2, 1, 8), draw(2, 0, 8))
    with pytest.raises(ValueError, match=r"episode 1: expected at least one line"):
        read_nearest(draw(2, 1, 8), draw(2, 3, 8), draw(2, 3, 8), torch.tensor([[True] * 3, [False] * 3]))


@pytest.mark.parametrize("solver", EXACT)
def test_more_lines_than_slots(solver):
    """The memory is the best fit: no other comes nearer, and the error is orthogonal to the keys."""
    Z = draw(2, 20, 8)
    W = keys(Z, base(), solver, STEPS)
    state = write(W, Z, solver, STEPS)
    error = Z - read(state, W)
    assert (error.norm(dim=(1, 2)) > 1).all() and close(W.mT @ error, torch.zeros(2, 6, 8, **DOUBLE))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_latent_that_is_no_number(bad):
    """Writing names episode and line, whatever the solver; reading by distance says what is wrong as well."""
    W, Z = draw(2, 3, 6), draw(2, 3, 8)
    Z[1, 2, 4] = bad
    for call in (
        lambda: write(W, Z, "svd"),
        lambda: write(W, Z),
        lambda: add(write(W, draw(2, 3, 8)), W, Z),
        lambda: write(Z[..., :6], Z),
    ):
        with pytest.raises(ValueError, match=r"line 2 of episode 1: expected a finite latent"):
            call()
    with pytest.raises(ValueError, match=r"NaN or infinite; check the encoder"):
        nearest(torch.full((2, 1, 8), bad, **DOUBLE), Z[:, :2])
    with pytest.raises(ValueError, match=r"read_nearest: expected a finite latent.*check the encoder"):
        read_nearest(W[:, 2:], W, Z)
    assert nearest(draw(2, 1, 8), Z, torch.tensor([[True] * 3, [True, True, False]])).max() < 3


@pytest.mark.parametrize("solver", EXACT)
def test_rank_deficient_memory(solver):
    """Duplicate lines, and lines that others span, are read back as they were written; nothing else is invented."""
    Z = lines_in_span(lines=2)
    Z = torch.cat([Z, Z, Z.sum(1, keepdim=True)], dim=1)
    state = write(keys(Z, base(), solver, 20), Z, solver, 20)
    assert torch.linalg.matrix_rank(state.M_BKC, rtol=1e-8).tolist() == [2, 2]
    assert close(read(state, keys(Z, state.M_BKC, solver, 20, 1e-8)), Z, 1e-7)


@pytest.mark.parametrize("solver", SOLVERS)
def test_fp32_follows_fp64(solver):
    """What is read in fp32 is right to 1e-5, rank-deficient episodes included."""
    Z = lines_in_span(lines=3).repeat(1, 2, 1)

    def recall(Z, base):
        state = write(keys(Z, base, solver), Z, solver)
        return read(state, keys(Z, state.M_BKC, solver))

    low, exact = recall(Z.float(), base().float()), recall(Z, base())
    assert low.dtype == torch.float32 and torch.allclose(low.double(), exact, atol=1e-5)


def test_functions_stand_alone():
    """The functions leave their arguments as they were."""
    inputs = [draw(2, 3, 6), draw(2, 3, 8), draw(2, 1, 6), draw(2, 1, 8)]
    before = [t.clone() for t in inputs]
    state = write(*inputs[:2], "svd")
    kept = [t.clone() for t in state]
    forget(add(state, *inputs[2:]), *inputs[2:])
    read_nearest(inputs[1], inputs[1], inputs[0])
    assert all(torch.equal(a, b) for a, b in zip([*inputs, *state], [*before, *kept], strict=True))
    assert [t.shape for t in empty(2, 5, 3)] == [(2, 5, 3), (2, 5, 5)]
