"""MemReasoner: hops against a twin that loops over samples and lines, the named facts of spec 12.7, the model without
    memory, bad input.

All comparisons are in fp64 on tiny models. The contract of all models is in ``test_recurrence.py``, flags are in
``test_models.py``.
"""

import pytest
import torch
from torch.nn import functional as F

from lit_memory.memory import episodic
from lit_memory.models.episodic.larimar import Larimar
from lit_memory.models.episodic.episode import Episode
from lit_memory.models.episodic.memreasoner import MemReasoner, sinusoids
from lit_memory.recurrence import generate, unroll

N, V, C = 5, 19, 8  # tokens per line, vocabulary, width of a latent
TINY = {
    "vocab_size": V,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "latent_width": C,
    "slots": 12,
    "init_std": 0.3,
    "embedding_std": 1.0,
    "positions": 32,
}
ALL = ["none", "gru", "sinusoidal", "sinusoidal_from_end"]


def make(cls=MemReasoner, **config):
    torch.manual_seed(0)
    model = cls(
        cls.Config(
            **{**TINY, "line_tokens": N, **({"solver": "svd", "hops": 2} if cls is MemReasoner else {}), **config}
        )
    ).double()
    if cls is MemReasoner and model.config.memory:
        model.W_q.data += 0.3 * torch.randn(C, C)
    return model


def ids_of(batch, lines, seed=7):
    return torch.randint(V, (batch, lines * N), generator=torch.Generator().manual_seed(seed))


def episode(lines, batch=2, seed=3, scale=1.0):
    """Random latents of so many lines and a question."""
    Z = scale * torch.randn(batch, lines + 2, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    real = torch.arange(lines + 2).expand(batch, -1) > 0
    age = torch.arange(lines + 1, -1, -1).expand(batch, -1) * real
    return Episode(Z * real.unsqueeze(-1), real, torch.full((batch, lines + 2, 0), -1), age)


def close(a, b, tol=1e-10):
    return torch.allclose(a, b, rtol=tol, atol=tol)


def naive_gru(gru, Z):
    """Cho et al. 2014, line by line, in both directions."""
    sides, H = [], gru.hidden_size
    for suffix, lines in (("", Z), ("_reverse", Z.flip(0)))[: 1 + gru.bidirectional]:
        W, U, b, c = (getattr(gru, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        h, rows = torch.zeros(H, dtype=Z.dtype), []
        for z in lines:
            x, s = W @ z + b, U @ h + c
            reset, kept = (x[: 2 * H] + s[: 2 * H]).sigmoid().split(H)
            h = (1 - kept) * torch.tanh(x[2 * H :] + reset * s[2 * H :]) + kept * h
            rows.append(h)
        sides.append(torch.stack(rows[::-1] if suffix else rows))
    return torch.cat(sides, dim=1)


def naive(model, Z, asked, alpha):
    """Algorithm 1 for one sample: the chosen line of every hop, its latent, and what was read."""
    c, n = model.config, len(Z)
    places = torch.arange(n) if c.temporal == "sinusoidal" else torch.arange(n - 1, -1, -1)
    waves = torch.tensor(
        [
            [(torch.sin if j % 2 == 0 else torch.cos)(p / torch.tensor(1e4) ** (j // 2 * 2 / C)) for j in range(C)]
            for p in places
        ]
    )
    ordered = {"none": lambda: Z, "gru": lambda: naive_gru(model.gru, Z)}.get(c.temporal, lambda: Z + waves)()
    M = torch.linalg.pinv(ordered @ torch.linalg.pinv(model.M_0)) @ ordered
    reads, chosen = [], []
    for _ in range(c.hops):
        reads.append(model.W_q @ asked @ torch.linalg.pinv(M) @ M)
        chosen.append(int((ordered - reads[-1]).norm(dim=1).argmin()))
        asked = asked + alpha * reads[-1]
    return chosen, Z[chosen], torch.stack(reads)


# --- hops


@pytest.mark.parametrize("temporal", ALL)
def test_step_slow_twin(temporal):
    """Sample by sample, line by line, hop by hop: what is read, which lines are chosen, what is decoded; ragged samples
    included."""
    model, ids, asked = make(temporal=temporal, alpha=2.0), ids_of(3, 7), ids_of(3, 1, seed=1)
    mask = torch.arange(7).repeat_interleave(N) >= torch.tensor([[0], [3], [5]])  # 6, 3 and 1 lines before the question
    state = unroll(model, ids, mask_BT=mask).state
    found, hidden = model.readouts(state), model.step(state, asked, write=False)[0]
    for b, first in enumerate((0, 3, 5)):
        Z = model.encode(ids[b].view(7, N))[first:]
        chosen, latents, _ = naive(model, Z[:-1], Z[-1], 2.0)
        assert found.nearest_BH[b].tolist() == [len(Z) - 1 - i for i in chosen] and close(found.latents_BHC[b], latents)
        assert close(hidden[b], model.decode(asked[b : b + 1], latents[-1:])[0])
        assert found.age_BN[b].tolist() == [0] * (8 - len(Z)) + list(range(len(Z) - 1, 0, -1))


def test_gradients_of_the_default_reach_all():
    """Answers alone train everything: encoder, GRU, M_0, W_q, decoder."""
    model, ids = make(), ids_of(2, 6)
    model.step(unroll(model, ids).state, ids[:, :N])[0].square().sum().backward()
    assert all(
        p.grad is not None and p.grad.any() for name, p in model.named_parameters() if name != "decoder.head.weight"
    )


@pytest.mark.parametrize("solver", ["svd", "newton_safe"])
def test_mr_proj(solver):
    """T-MR-proj: for no more lines than slots, what is read is the projection onto the span of the lines, and a line
    finds itself."""
    model, state = make(temporal="none", hops=1, solver=solver, solver_steps=40), episode(5)
    model.W_q.data = torch.eye(C).double()
    Z = state.lines_BNE[:, 1:-1]
    projection = torch.linalg.pinv(Z) @ Z
    asked = state.lines_BNE[:, -1]
    reads, _ = model.read_hops(asked, Z, state.real_BN[:, 1:-1])
    assert close(reads[:, 0], (asked.unsqueeze(1) @ projection)[:, 0], 1e-7)
    for i in range(5):
        assert close(model.read_hops(Z[:, i], Z, state.real_BN[:, 1:-1])[0][:, 0], Z[:, i], 1e-7)
        again = state._replace(lines_BNE=torch.cat([state.lines_BNE[:, :-1], Z[:, i : i + 1]], dim=1))
        assert model.readouts(again).nearest_BH.tolist() == [[5 - i]] * 2


@pytest.mark.parametrize("temporal", ALL)
def test_mr_hopscale(temporal):
    """T-MR-hopscale: with W_q = I every hop reads (1 + alpha) times what the one before read; with another W_q it
    turns."""
    model, state = make(temporal=temporal, alpha=3.0, hops=3), episode(5)
    Z, real = state.lines_BNE[:, 1:-1], state.real_BN[:, 1:-1]
    turned, _ = model.read_hops(state.lines_BNE[:, -1], Z, real)
    model.W_q.data = torch.eye(C).double()
    reads, _ = model.read_hops(state.lines_BNE[:, -1], Z, real)
    assert close(reads[:, 1:], 4 * reads[:, :-1]) and F.cosine_similarity(turned[:, 0], turned[:, 1]).max() < 0.99


def test_one_hop_without_order_is_larimar():
    """Without P, with one hop and W_q = I, what is read is what Larimar reads."""
    model, larimar, state = make(temporal="none", hops=1), make(Larimar, solver="svd"), episode(6)
    model.W_q.data = torch.eye(C).double()
    larimar.M_0.data = model.M_0.data = torch.randn(12, C).double()
    assert close(
        model.read_hops(state.lines_BNE[:, -1], state.lines_BNE[:, 1:-1], state.real_BN[:, 1:-1])[0][:, 0],
        larimar.read(state),
    )
    found = larimar.readouts(state)
    assert torch.equal(found.latents_BHC[:, 0], larimar.read(state))
    assert found.nearest_BH.tolist() == [
        [6 - int(i)] for i in (state.lines_BNE[:, 1:-1] - larimar.read(state)[:, None]).norm(dim=-1).argmin(1)
    ]


def test_tolerance():
    """Hops end, sample by sample, with the first readout that moved by less than tau; the hops that are left repeat
    it."""
    state = episode(5)
    state.lines_BNE[1, -1] *= 0.01
    moving, stopped = (
        make(hops=4, tolerance=tau).read_hops(state.lines_BNE[:, -1], state.lines_BNE[:, 1:-1], state.real_BN[:, 1:-1])[0]
        for tau in (0.0, 0.1)
    )
    steps = (moving[:, 1:] - moving[:, :-1]).norm(dim=-1)
    assert steps[0].min() > 0.1 > steps[1, 0]
    assert torch.equal(stopped[0], moving[0])
    assert all(torch.equal(stopped[1, h], moving[1, min(h, 1)]) for h in range(4))


def test_alpha_of_the_test():
    """``test_alpha`` holds outside of training alone."""
    state = episode(5)
    plain, both = make(alpha=1.0), make(alpha=1.0, test_alpha=8.0)
    asked = (state.lines_BNE[:, -1], state.lines_BNE[:, 1:-1], state.real_BN[:, 1:-1])
    assert torch.equal(plain.read_hops(*asked)[0], both.read_hops(*asked)[0]) and torch.equal(
        plain.read_hops(*asked)[0], plain.eval().read_hops(*asked)[0]
    )
    assert torch.equal(both.eval().read_hops(*asked)[0], make(alpha=8.0).read_hops(*asked)[0])


# --- order


@pytest.mark.parametrize("temporal", ALL)
def test_mr_order(temporal):
    """T-MR-order: another order of the lines changes their ordered latents, but not without P; there the same line is
    found."""
    model, state, order = make(temporal=temporal), episode(5), torch.tensor([3, 0, 4, 2, 1])
    Z, real = state.lines_BNE[:, 1:-1], state.real_BN[:, 1:-1]
    kept, moved = model.encode_order(Z, real)[:, order], model.encode_order(Z[:, order], real)
    assert close(kept, moved) == (temporal == "none")
    if temporal == "none":
        shuffled = state._replace(
            lines_BNE=torch.cat([state.lines_BNE[:, :1], Z[:, order], state.lines_BNE[:, -1:]], dim=1)
        )
        assert torch.equal(model.readouts(shuffled).latents_BHC, model.readouts(state).latents_BHC)


def test_mr_fromend():
    """T-MR-fromend: lines in front change no code of the last lines, counted from the end; counted from the start they
    move all."""
    Z = torch.zeros(1, 7, C, dtype=torch.float64)
    real = torch.ones(1, 7, dtype=torch.bool)
    for temporal, same in (("sinusoidal_from_end", True), ("sinusoidal", False)):
        model = make(temporal=temporal)
        long, short = model.encode_order(Z, real), model.encode_order(Z[:, 3:], real[:, 3:])
        assert torch.equal(long[:, 3:], short) == same
        assert torch.equal(long[:, :4], short) != same
    assert sinusoids(torch.tensor([[0]]), 5, torch.float64).tolist() == [[[0, 1, 0, 1, 0]]]


@pytest.mark.parametrize(("temporal", "bidirectional"), [(t, True) for t in ALL] + [("gru", False)])
def test_mr_pad(temporal, bidirectional):
    """T-MR-pad: what is no line, in front or between lines, changes no answer, for a GRU in either direction as well
    (the paper's moves it)."""
    model, state = make(temporal=temporal, bidirectional=bidirectional, gru_layers=2), episode(4)
    plain = model.readouts(state)
    for columns in ([0, 0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 0, 3, 0, 4, 5]):
        wide = Episode(*(t[:, columns] for t in state))
        found = model.readouts(wide)
        assert close(found.latents_BHC, plain.latents_BHC) and torch.equal(found.nearest_BH, plain.nearest_BH)
        places = [i for i, c in enumerate(columns[:-1]) if c]
        assert (
            close(found.distances_BHN[..., places], plain.distances_BHN[..., 1:])
            and found.distances_BHN[..., 0].isinf().all()
        )


# --- readout


def test_mr_st():
    """T-MR-st: forward, straight-through is the hard choice, bit for bit; backward it is the soft one, and the hard one
    trains neither P nor W_q."""
    state, weights = episode(5), torch.randn(2, 2, C, dtype=torch.float64)
    out, grad = {}, {}
    for readout in ("hard", "st", "soft"):
        model = make(readout=readout)
        lines = state.lines_BNE.clone().requires_grad_()
        out[readout] = model.readouts(state._replace(lines_BNE=lines)).latents_BHC
        grad[readout] = torch.autograd.grad(
            (out[readout] * weights).sum(), [model.W_q, model.gru.weight_ih_l0, lines], materialize_grads=True
        )
    assert torch.equal(out["st"], out["hard"]) and not close(out["soft"], out["hard"], 1e-2)
    assert all(close(a, b) and a.any() for a, b in zip(grad["st"][:2], grad["soft"][:2], strict=True))
    assert not grad["hard"][0].any() and not grad["hard"][1].any() and grad["hard"][2].any()


def test_mr_temp():
    """T-MR-temp: the soft readout becomes the hard one as the temperature falls to 0, and the mean of all lines as it
    rises."""
    state, hard = episode(5), make(readout="hard").readouts(episode(5)).latents_BHC
    assert close(make(readout="soft", temperature=1e-4).readouts(state).latents_BHC, hard)
    errors = [(make(readout="soft", temperature=t).readouts(state).latents_BHC - hard).norm() for t in (1e-3, 0.1, 1.0)]
    assert errors == sorted(errors)
    mean = state.lines_BNE[:, 1:-1].mean(1, keepdim=True).expand_as(hard)
    assert close(make(readout="soft", temperature=1e9).readouts(state).latents_BHC, mean, 1e-7)


@pytest.mark.parametrize("readout", ["hard", "st", "soft"])
def test_readout_of_the_test(readout):
    """Outside of training the decoder gets the nearest line as it is, however the choice was trained; or "soft", if it
    is told so."""
    state, hard = episode(5), make(readout="hard").readouts(episode(5)).latents_BHC
    assert torch.equal(make(readout=readout, test_readout="hard").eval().readouts(state).latents_BHC, hard)
    soft = make(readout=readout, test_readout="soft").eval().readouts(state).latents_BHC
    assert torch.equal(soft, make(readout="soft").readouts(state).latents_BHC) and not close(soft, hard, 1e-2)


def test_all_hops_are_found_again():
    """``found`` is a state of which a given latent is read, bit for bit: every hop can be decoded by itself, token
    after token as well."""
    model, ids = make(), ids_of(2, 6)
    latents = model.readouts(unroll(model, ids).state).latents_BHC
    for h in range(2):
        state = model.state_from_latents(latents[:, h])
        assert torch.equal(model.read(state), latents[:, h]) and torch.equal(
            model.readouts(state).latents_BHC[:, -1], latents[:, h]
        )
        assert torch.equal(model.step(state, ids[:, :N], write=False)[0], model.decode(ids[:, :N], latents[:, h]))
        first = model.logits(model.decode(ids[:, :3], latents[:, h]))[:, -1].argmax(-1)
        assert torch.equal(generate(model, ids[:, :3], 2, state=state)[:, 0], first)


# --- the inference-time update


def test_mr_iu_all():
    """T-MR-iu-all: for no more lines than are kept the update does nothing, nor does it in training; that is each
    sample's own affair."""
    state = episode(6)
    plain = make().eval().readouts(state)
    for eta in (6, 7, 1000):
        assert all(torch.equal(a, b) for a, b in zip(make(update_lines=eta).eval().readouts(state), plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(make(update_lines=3).readouts(state), plain, strict=True))
    real = state.real_BN.clone()
    real[1, :4] = False
    ragged = state._replace(real_BN=real, lines_BNE=state.lines_BNE * real.unsqueeze(-1))
    assert close(
        make(update_lines=3).eval().readouts(ragged).latents_BHC[1], make().eval().readouts(ragged).latents_BHC[1]
    )


@pytest.mark.parametrize("temporal", ALL)
def test_update_slow_twin(temporal):
    """The lines nearest to the last readout, in their order, are all that is read the second time."""
    state, eta = episode(9), 4
    model = make(temporal=temporal, update_lines=eta).eval()
    first, found = make(temporal=temporal).eval().readouts(state), model.readouts(state)
    for b in range(2):
        kept = sorted(first.distances_BHN[b, -1].argsort()[:eta].tolist())
        columns = [0, *kept, 10]
        alone = model.readouts(Episode(*(t[b : b + 1, columns] for t in state)))
        assert close(found.latents_BHC[b], alone.latents_BHC[0]) and close(
            found.distances_BHN[b][:, kept], alone.distances_BHN[0][:, 1:]
        )
        assert found.distances_BHN[b].isfinite().sum() == 2 * eta
        assert torch.equal(found.nearest_BH[b], alone.nearest_BH[0]) and found.nearest_BH[b, -1] in [
            10 - column for column in kept
        ]
        assert not close(found.distances_BHN[b][:, kept], first.distances_BHN[b][:, kept], 1e-3)


# --- the order loss


def test_mr_lossorder():
    """T-MR-lossorder: 0 where the readout is the supporting line and the others are far; its value, and that it ignores
    what is not told."""
    model, state = make(), episode(4)
    found = model.readouts(state)
    far = found._replace(distances_BHN=torch.full_like(found.distances_BHN, 1e4))
    for b, (one, two) in enumerate(((1, 3), (4, 2))):
        far.distances_BHN[b, 0, 5 - one] = far.distances_BHN[b, 1, 5 - two] = 0
    support = torch.tensor([[1, 3], [4, 2]])
    assert model.order_loss(far, support) == 0
    terms = -(-found.distances_BHN).log_softmax(-1)
    expected = terms[0, 0, 4] + terms[0, 1, 2] + terms[1, 0, 1] + terms[1, 1, 3]
    assert close(model.order_loss(found, support), expected / 2)
    assert close(model.order_loss(found, torch.tensor([[1, 3], [0, 0]])), terms[0, 0, 4] + terms[0, 1, 2])
    assert close(model.order_loss(found, torch.tensor([[1], [0]])), terms[0, 0, 4])
    assert model.order_loss(found, torch.zeros(2, 2, dtype=torch.int64)) == 0
    with pytest.raises(ValueError, match=r"support=5 of sample 1: expected one of the 4 lines before its question"):
        model.order_loss(found, torch.tensor([[1, 3], [5, 2]]))
    with pytest.raises(ValueError, match=r"hops=2: 3 supporting lines are told; expected at least as many hops"):
        model.order_loss(found, torch.ones(2, 3, dtype=torch.int64))


def test_order_loss_trains():
    """A few steps on the order loss alone move the readouts towards the told lines."""
    model, ids, support = make(solver="newton_safe"), ids_of(4, 6), torch.tensor([[1, 5], [2, 4], [3, 3], [4, 1]])
    optimizer, losses = torch.optim.Adam(model.parameters(), 5e-3), []
    for _ in range(20):
        losses.append(model.order_loss(model.readouts(unroll(model, ids, keep=0).state), support))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


# --- without memory


def test_without_memory(monkeypatch):
    """The decoder reads the context in front of its own tokens, and the latent of the question; padding takes no
    place."""
    model = make(memory=False, pad_id=0)
    ids, tail = ids_of(2, 4).clamp(min=1), ids_of(2, 1, seed=1).clamp(min=1)
    mask = torch.arange(4 * N).expand(2, -1) % N < torch.tensor([[4], [3]])
    mask[1, :N] = False
    ids[0, N : 2 * N] = 0  # an empty line
    state, decode, seen = unroll(model, ids, 2 * N, mask_BT=mask).state, model.decode, []
    monkeypatch.setattr(model, "decode", lambda ids, *args: seen.append(ids.shape[1]) or decode(ids, *args))
    hidden = model.step(state, tail, write=False)[0]
    assert seen == [
        int((mask & (ids != 0)).sum(1).max()) + N
    ]  # columns that are padding in all samples take no time, nor a place in GPT-2's table
    for b in range(2):
        context = ids[b][mask[b] & (ids[b] != 0)]
        asked = ids[b, 3 * N :][mask[b, 3 * N :]]
        whole = model.decode(torch.cat([context, tail[b]])[None], model.encode(asked[None]))
        assert close(hidden[b], whole[0, -N:])
    assert model.state_floats(state) == 0 and not hasattr(model, "gru")
    short = tail[:, :3]
    assert torch.equal(
        generate(model, short, 2, state=state)[:, 0],
        model.logits(model.step(state, short, write=False)[0])[:, -1].argmax(-1),
    )
    with pytest.raises(ValueError, match=r"memory=False: expected True"):
        model.readouts(state)


# --- bad input


@pytest.mark.parametrize("temporal", ALL)
@pytest.mark.parametrize("solver", ["svd", "newton_safe"])
def test_empty_episode(temporal, solver):
    """Nothing before the question: its own latent, in every hop, from no line; also beside a sample that has lines.
    Gradients are finite."""
    model, ids = make(temporal=temporal, solver=solver, update_lines=2), ids_of(2, 4)
    assert not model.read(model.init_state(2)).any()
    mask = torch.ones(2, 4 * N, dtype=torch.bool)
    mask[1, : 3 * N] = False
    for mode in (True, False):
        found = model.train(mode).readouts(unroll(model, ids, mask_BT=mask).state)
        own = model.encode(ids[1:, 3 * N :])
        assert (
            close(found.latents_BHC[1], own.expand(2, -1))
            and found.nearest_BH[1].tolist() == [0, 0]
            and found.nearest_BH[0].all()
        )
        alone = model.readouts(unroll(model, ids[:1], mask_BT=mask[:1]).state)
        assert close(found.latents_BHC[:1], alone.latents_BHC)
        grads = torch.autograd.grad(found.latents_BHC.square().sum(), list(model.parameters()), materialize_grads=True)
        assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("temporal", ["none", "gru"])
def test_more_lines_than_slots(temporal):
    """40 lines in three slots: readouts of rank three at most, finite, and a line for every hop."""
    model = make(temporal=temporal, slots=3)
    asked, state = torch.randn(20, C).double(), episode(40, batch=1)
    lines, real = state.lines_BNE[:, 1:-1].expand(20, -1, -1), state.real_BN[:, 1:-1].expand(20, -1)
    reads, _ = model.read_hops(asked, lines, real)
    assert reads.isfinite().all() and torch.linalg.matrix_rank(reads[:, 0], rtol=1e-9) <= 3
    assert model.readouts(state).nearest_BH.min() >= 1


def test_latent_that_is_no_number():
    """A NaN is one line of error that names the line where it came from, not those that the GRU spread it to; that of a
    question as well."""
    for line, message in ((2, "line 2 of episode 1: expected a finite latent"), (-1, "distances: expected numbers")):
        state = episode(4)
        state.lines_BNE[1, line, 3] = float("nan")
        with pytest.raises(ValueError, match=rf"{message}.* check the encoder"):
            make().readouts(state)


@pytest.mark.parametrize("solver", ["svd", "newton", "newton_safe"])
def test_lines_that_are_alike(solver):
    """A memory without full rank: six times the same line reads what one such line reads, and of equal lines the first
    is chosen."""
    state = episode(6, scale=2.0)
    Z = state.lines_BNE[:, 1:2]
    alike = state._replace(
        lines_BNE=torch.cat([state.lines_BNE[:, :1], Z.expand(-1, 6, -1), state.lines_BNE[:, -1:]], dim=1)
    )
    model = make(temporal="none", solver=solver, solver_steps=30)
    found, real = model.readouts(alike), state.real_BN[:, 1:-1]
    assert close(found.latents_BHC, Z.expand(-1, 2, -1)) and found.nearest_BH.tolist() == [[6, 6]] * 2
    many, one = (
        model.read_hops(alike.lines_BNE[:, -1], Z.expand(-1, 6, -1), real)[0],
        model.read_hops(alike.lines_BNE[:, -1], Z, real[:, :1])[0],
    )
    assert close(many, one, 1e-5)


def test_long_episodes():
    """2,000 long lines: "newton" says that it diverges, the default does not, and what is read in fp32 is finite."""
    state = Episode(*(t.float() if t.is_floating_point() else t for t in episode(2000, scale=9.0)))
    found = make(temporal="sinusoidal", solver="newton_safe").float().eval().readouts(state)
    assert found.latents_BHC.isfinite().all()
    with pytest.raises(ValueError, match=r"solver='newton': the iteration diverges"):
        make(temporal="sinusoidal", solver="newton").float().readouts(state)
    assert episodic.distances(state.lines_BNE[:, -2:], state.lines_BNE).shape == (2, 2, 2002)
