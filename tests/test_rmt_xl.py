"""RMT and TARM on Transformer-XL against spec 3 and 7 written out: rows, cache, memory, averages, truncated gradients.
All comparisons are in fp64."""

import itertools

import pytest
import torch
from test_xl import grads, slow_layer

from lit_memory.models.rmt_xl import RMTXL
from lit_memory.recurrence import state_tensors, unroll

N, M = 5, 2  # tokens per segment, memory tokens


def slow(model, ids, alpha=1.0, mem_len=7):
    """One sample and one row at a time: [cached tokens; read memory; tokens; write memory]. Hidden states and the
    memories E_0, E_1, ..."""
    hidden, memories = [], []
    for sample in ids:
        memory, caches, outs, own = (
            model.memory,
            [torch.empty(0, 16, dtype=torch.float64) for _ in model.decoder.layers],
            [],
            [model.memory],
        )
        for part in sample.split(N):
            rows = torch.cat([memory, model.decoder.tokens.weight[part] * 4, memory])  # the square root of the width
            for i, layer in enumerate(model.decoder.layers):
                seen = torch.cat([caches[i], rows])
                old = len(caches[i])
                caches[i] = torch.cat([caches[i], rows[M:-M]])[-mem_len:] if mem_len else caches[i]
                out = slow_layer(layer.block, seen, [[*range(j + 1)] for j in range(len(seen))], model.config.clamp_len)
                rows = out[old:]
            memory = alpha * rows[-M:] + (1 - alpha) * memory
            outs.append(rows[M:-M])
            own.append(memory)
        hidden.append(torch.cat(outs))
        memories.append(torch.stack(own))
    return torch.stack(hidden), torch.stack(memories)


@pytest.mark.parametrize(("mem_len", "alpha"), [(0, 1.0), (7, 1.0), (3, 0.3)])
def test_rmt_xl_slow_twin(build, tokens, mem_len, alpha):
    """Hidden states, memory and all gradients, which cross segments through the memory and through a cache that is not
    detached."""
    model, ids = build("rmt_xl", mem_len=mem_len, alpha=alpha), tokens(2, 3 * N)
    with torch.no_grad():
        model.memory.normal_()
    fast, (hidden, memories) = unroll(model, ids, N), slow(model, ids, alpha, mem_len)
    assert torch.allclose(fast.hidden_BTD, hidden, rtol=1e-10, atol=1e-10) and torch.allclose(
        fast.state.memory_BMD, memories[:, -1], rtol=1e-10, atol=1e-10
    )
    for a, b in zip(grads([fast.hidden_BTD], model.parameters()), grads([hidden], model.parameters()), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_rmt_xl_m0(build, tokens):
    """T-RMT-m0: without memory tokens it is Transformer-XL, and without a cache every segment is read by itself."""
    model, ids = build("rmt_xl", memory_tokens=0), tokens(2, 3 * N)
    xl = build("xl")
    xl.load_state_dict({name: value for name, value in model.state_dict().items() if name != "memory"})
    expected = unroll(xl, ids, N, schedule="sequential").hidden_BTD
    assert torch.equal(unroll(model, ids, N).hidden_BTD, expected)
    alone = build("rmt_xl", memory_tokens=0, mem_len=0)
    assert torch.equal(
        unroll(alone, ids, N).hidden_BTD,
        torch.cat([unroll(alone, part).hidden_BTD for part in ids.split(N, dim=1)], dim=1),
    )


def test_rmt_xl_one_seg(build, tokens):
    """T-RMT-one-seg: write rows change nothing for the tokens before them; without writing the state is as it was."""
    model, ids = build("rmt_xl"), tokens(2, N)
    state = unroll(model, ids, N).state
    (writing, new), (reading, old) = (model.step(state, ids, write=w) for w in (True, False))
    assert torch.allclose(writing, reading, rtol=1e-12, atol=1e-12) and old is state
    assert not any(
        torch.equal(a, b) for a, b in zip(state_tensors(new), state_tensors(old), strict=True) if a.is_floating_point()
    )


def embedded(model, ids):
    """The loss of the last segment by the embeddings of all tokens, and those of every segment."""
    rows = model.decoder.tokens(ids).detach().requires_grad_()
    parts = iter(rows.split(N, dim=1))
    model.decoder.tokens.forward = lambda part: next(parts)
    return rows


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_rmt_xl_grad(build, tokens, depth, alpha):
    """T-RMT-grad, with BPTT over D segments: the loss of the last segment has a gradient at the D before it, and
    exactly none further back. With a detached cache only the memory carries it."""
    model, ids = build("rmt_xl", alpha=alpha, mem_detach=True), tokens(1, 4 * N)
    rows = embedded(model, ids)
    hidden = unroll(model, ids, N, bptt=depth + 1).hidden_BTD[:, -N:]
    reached = torch.autograd.grad((hidden * torch.randn_like(hidden)).sum(), rows)[0].abs().amax(2)[0] > 0
    assert reached.split(N)[-depth - 1 :] and all(
        part.all() == (4 - i <= depth + 1) == part.any() for i, part in enumerate(reached.split(N))
    )
    cut = build("rmt_xl", alpha=alpha, mem_detach=True, memory_tokens=0)
    rows = embedded(cut, ids)
    assert not torch.autograd.grad(unroll(cut, ids, N).hidden_BTD[:, -N:].square().sum(), rows)[0][:, :-N].any()


def test_tarm_xl_alpha1(build, tokens):
    """T-TARM-alpha1: with alpha = 1 the average is what was written, bit for bit."""
    model, ids = build("rmt_xl"), tokens(2, 3 * N)
    written = []
    model.decoder.layers[-1].register_forward_hook(lambda _, args, out: written.append(out[0][:, -M:]))
    assert model.config.alpha == 1.0 and torch.equal(unroll(model, ids, N).state.memory_BMD, written[-1])


def test_tarm_xl_alpha0(build, tokens):
    """T-TARM-alpha0: without a weight for what is new the memory never changes, and without a cache segments are
    independent."""
    model, ids = build("rmt_xl", mem_len=0), tokens(2, 3 * N)
    model.config.alpha = 0.0
    out = unroll(model, ids, N)
    assert torch.equal(out.state.memory_BMD, model.init_state(2).memory_BMD)
    assert torch.equal(
        out.hidden_BTD, torch.cat([unroll(model, part).hidden_BTD for part in ids.split(N, dim=1)], dim=1)
    )


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 0.7])
def test_tarm_xl_closed(build, tokens, alpha):
    """T-TARM-closed, T-TARM-path: E_s = (1-a)^s E_0 + sum_i a (1-a)^(s-i) M_i with the M_i that the model wrote, and
    the gradients say the same."""
    model, written = build("rmt_xl", alpha=alpha), []

    def cut(_, args, out):
        written.append(out[0].detach().requires_grad_())  # what is written depends on nothing any more
        return written[-1], out[1]

    model.decoder.layers[-1].register_forward_hook(cut)
    first, ids = model.init_state(2), tokens(2, 5 * N)
    memory = unroll(model, ids, N).state.memory_BMD
    weights = [alpha * (1 - alpha) ** (4 - i) for i in range(5)]
    closed = (1 - alpha) ** 5 * first.memory_BMD + sum(w * m[:, -M:] for w, m in zip(weights, written, strict=True))
    assert torch.allclose(memory, closed, rtol=1e-12)
    for weight, grad in zip(weights, torch.autograd.grad(memory.sum(), written), strict=True):
        assert torch.allclose(grad[:, -M:], torch.full_like(grad[:, -M:], weight)) and not grad[:, :-M].any()


def test_rmt_xl_state_and_init(build):
    """m * D floats and L * W * D of the cache; the first memory is one row N(0, 1), M times; TARM has no parameter more
    than RMT."""
    model = build("rmt_xl", memory_tokens=3, width=64, alpha=0.2)
    assert model.state_floats(model.init_state(2)) == 3 * 64 + 2 * 7 * 64
    assert torch.equal(model.memory, model.memory[:1].expand(3, -1)) and model.memory[0].std().item() == pytest.approx(
        1, rel=0.3
    )
    with torch.device("meta"):
        sizes = {"vocab_size": 1000, "layers": 16, "width": 410, "heads": 10, "head_width": 41, "ff_width": 2100}
        counts = [
            sum(p.numel() for p in RMTXL(RMTXL.Config(memory_tokens=m, alpha=a, **sizes)).parameters())
            for m, a in [(0, 1.0), (10, 1.0), (10, 0.2)]
        ]
    assert counts[1] == counts[2] == counts[0] + 4100


# Diagnostics


@pytest.mark.parametrize(
    ("name", "alpha"), [("tarm", 0.2), ("tarm", 0.7), ("rmt_xl", 0.2), ("rmt_xl", 1.0), ("rmt", None)]
)
def test_diagnostics_slow_twin(build, tokens, name, alpha):
    """From what the model itself wrote; RMT's memory is what was written."""
    model, ids = build(name, **({} if alpha is None else {"alpha": alpha})), tokens(3, 6 * N)
    segments = ids.split(N, 1)
    memories, _ = model.trace(segments)
    assert len(memories) == 7 and torch.allclose(
        memories[-1], next(state_tensors(unroll(model, ids, N, schedule="sequential").state)), rtol=0, atol=1e-12
    )
    again, _ = model.trace(segments[2:], model.trace(segments[:2])[1])
    assert all(torch.equal(a, b) for a, b in zip(again, memories[2:], strict=True))
    ended = (segments[0], torch.tensor([True, False, True])[:, None].expand(3, N))  # of three samples the second
    before, after = model.trace([ended])[0]
    assert torch.equal(after[1], before[1]) and torch.equal(after[[0, 2]], memories[1][[0, 2]])
    found, a = model.diagnostics(memories), alpha or 1.0
    written = [(new - (1 - a) * old) / a for old, new in itertools.pairwise(memories)]
    for key, series in {"memory_change": memories, "written_change": written}.items():
        steps = [((new - old) ** 2).mean().sqrt() for old, new in itertools.pairwise(series)]
        assert found[key].item() == pytest.approx(sum(steps).item() / len(steps))
    variances = [((torch.stack(s) - sum(s) / 4) ** 2).sum(0).mean() / 3 for s in (memories[3:], written[2:])]
    assert found["variance_ratio"].item() == pytest.approx((variances[0] / variances[1]).item())
    assert (abs(found["variance_ratio"].item() - 1) < 1e-9) == (a == 1.0)


@pytest.mark.parametrize(("alpha", "ratio"), [(0.2, 0.111), (0.7, 0.538), (1.0, 1.0)])
def test_tarm_xl_variance(build, alpha, ratio):
    """T-TARM-variance: of independent M_s the diagnosed ratio is alpha / (2 - alpha)."""
    model, memories = build("rmt_xl", alpha=alpha), [torch.zeros(50, 2, 16, dtype=torch.float64)]
    for _ in range(800):
        memories.append(torch.lerp(memories[-1], torch.randn_like(memories[0]), alpha))
    found = model.diagnostics(memories)
    assert found["variance_ratio"].item() == pytest.approx(ratio, rel=0.05) and found[
        "written_change"
    ].item() == pytest.approx(2**0.5, rel=0.01)
