"""RMT-R against spec 4 written out: what it retrieves, from what, and how its state grows. All comparisons are in
fp64."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F

from lit_memory.models.rmt_r import RMTR
from lit_memory.recurrence import state_tensors, unroll
from lit_memory.registry import build as build_task
from lit_memory.registry import model_size

N, M, D = 5, 2, 16  # tokens per segment; memory tokens and width of the tiny model
VARIANTS = list(itertools.product(["full", "top_1"], ["code", "paper"]))
variants = pytest.mark.parametrize(("retrieval", "formula"), VARIANTS)


def grads(tensors, parameters):
    """Gradients of a random functional of all tensors."""
    generator = torch.Generator().manual_seed(3)
    loss = sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in tensors)
    return torch.autograd.grad(loss, list(parameters), materialize_grads=True)


def slow_retrieve(retrieval, memory, past):
    """Equations (1) and (2) for one sample, one memory row at a time, from the past memories themselves."""
    code, rows = retrieval.code, []
    queries, past = (
        F.layer_norm(x, (D,), n.weight, n.bias) if code else x
        for x, n in ((memory, retrieval.norm_query), (past, retrieval.norm_past))
    )
    key, value = retrieval.to_past(past).split(D, dim=-1)
    for row, query in zip(memory, queries, strict=True):
        scores = key @ retrieval.to_query(query) / D**0.5
        p = (scores * 1e5 if retrieval.top_1 else scores).softmax(0)
        r = retrieval.out(p @ value)
        if code:
            norm, up, _, down, _ = retrieval.feed_forward
            r = r + row
            r = r + down(F.gelu(up(norm(r))))
        rows.append(r)
    return torch.stack(rows)


def naive(model, ids):
    """Spec 4, one sample at a time, with the memories in a list: hidden states, last memory, and all past memories."""
    outs = []
    for sample in ids:
        memory, past, hidden = model.memory[:M], [], []
        if model.config.formula == "paper":
            past.append(memory)
        for part in sample.split(N):
            found = slow_retrieve(model.retrieval, memory, torch.cat(past)) if past else model.memory[M:]
            rows = torch.cat([memory, found, model.decoder.tokens(part), memory])[None]
            for block in model.decoder.layers:
                rows = block(rows)
            rows = model.decoder.norm(rows)[0]
            hidden.append(rows[2 * M : -M])
            memory = rows[-M:]
            past.append(memory)
        outs.append((torch.cat(hidden), memory, torch.cat(past)))
    return [torch.stack(ts) for ts in zip(*outs, strict=True)]


@variants
def test_rmtr_kvcache(build, tokens, retrieval, formula):
    """T-RMTR-kvcache: keys and values that are kept equal those computed anew from the past memories in every segment,
    as spec 4 has it: hidden states, final state and all gradients."""
    model, ids = build("rmt_r", retrieval=retrieval, formula=formula), tokens(3, 4 * N)
    hidden, memory, past = naive(model, ids)
    slow, out = [hidden, memory, model.retrieval.keys_values(past)], unroll(model, ids, N)
    fast = [out.hidden_BTD, out.state.memory_BMD, out.state.past_BPE]
    assert (
        all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(fast, slow, strict=True))
        and out.state.valid_BP.all()
    )
    for a, b in zip(grads(fast, model.parameters()), grads(slow, model.parameters()), strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-8)


def test_rmtr_first(build, tokens):
    """T-RMTR-first: the first segment does not depend on the retrieval's weights, the second does."""
    model, ids = build("rmt_r"), tokens(2, 2 * N)
    before = unroll(model, ids, N).hidden_BTD
    for parameter in model.retrieval.parameters():
        torch.nn.init.normal_(parameter)
    after = unroll(model, ids, N).hidden_BTD
    assert torch.equal(after[:, :N], before[:, :N]) and not torch.allclose(after[:, N:], before[:, N:], atol=1e-3)
    paper = build("rmt_r", formula="paper")
    before = unroll(paper, ids[:, :N]).hidden_BTD
    paper.retrieval.out.weight.data.mul_(2)
    assert not torch.allclose(
        unroll(paper, ids[:, :N]).hidden_BTD, before, atol=1e-3
    )  # in the paper M_0 is a past state


@pytest.mark.parametrize("formula", ["code", "paper"])
def test_rmtr_top1(build, tokens, formula):
    """T-RMTR-top1: top_1 retrieves the value of the row with the highest score, for every memory row."""
    model = build("rmt_r", retrieval="top_1", formula=formula)
    state, retrieval = unroll(model, tokens(3, 6 * N), N).state, model.retrieval
    state = state._replace(
        memory_BMD=torch.randn(3, M, D).double(), past_BPE=torch.randn_like(state.past_BPE)
    )  # what a fresh model writes is much alike
    key, value = state.past_BPE.split(D, dim=-1)
    best = (retrieval.to_query(retrieval.norm_query(state.memory_BMD)) @ key.mT).argmax(-1)
    found = retrieval.out(torch.stack([v[i] for v, i in zip(value, best, strict=True)]))
    if formula == "code":
        found = found + state.memory_BMD
        found = found + retrieval.feed_forward(found)
    assert torch.allclose(model.retrieve(state), found, rtol=1e-10, atol=1e-10)
    assert len(best.unique()) > 3


@variants
def test_rmtr_perm(build, tokens, retrieval, formula):
    """T-RMTR-perm: the order of the past memories does not matter; which they are does."""
    model, ids = build("rmt_r", retrieval=retrieval, formula=formula), tokens(2, 5 * N)
    state = unroll(model, ids[:, : 4 * N], N).state
    order = torch.randperm(state.past_BPE.shape[1], generator=torch.Generator().manual_seed(1))
    mixed = state._replace(past_BPE=state.past_BPE[:, order], valid_BP=state.valid_BP[:, order])
    (hidden, new), (expected, kept) = model.step(mixed, ids[:, 4 * N :]), model.step(state, ids[:, 4 * N :])
    assert torch.allclose(hidden, expected, rtol=1e-10, atol=1e-10) and torch.allclose(
        new.memory_BMD, kept.memory_BMD, rtol=1e-10, atol=1e-10
    )
    other = model.step(state._replace(past_BPE=state.past_BPE.flip(0)), ids[:, 4 * N :])[0]
    assert not torch.allclose(other, expected, atol=1e-4)


def test_rmtr_state_grows(build, tokens):
    """Spec 14 with keys and values in place of memories: m D floats, and 2 m D more with every segment that was
    written."""
    model, ids = build("rmt_r"), tokens(3, 7 * N)
    for segments in (1, 4, 7):
        assert model.state_floats(unroll(model, ids[:, : segments * N], N).state) == (1 + 2 * segments) * M * D
    assert model.state_floats(unroll(model, ids, N, read_only=3).state) == (1 + 2 * 4) * M * D
    size = model_size({"name": "rmt_r", "vocab_size": 19, "width": D, "heads": 2, "memory_tokens": M})
    assert (size["state_floats"], size["state_growth"]) == (M * D, 2 * M * D)


@pytest.mark.parametrize(("pairs", "queries"), [(1, 1), (6, 3)])
def test_the_state_of_a_report_is_the_state_that_a_test_ends_with(build, pairs, queries):
    """What the figure of accuracy against state shows: fresh floats, and growth times the segments that the test
    writes."""
    task = build_task("task", {"name": "associative_retrieval", "pairs": pairs, "queries": queries})
    model, batch = build("rmt_r"), task.batch(0, "test", 0, 2)
    state = unroll(model, batch.ids_BT, batch.segment_len, read_only=batch.read_only).state
    assert model.state_floats(state) == model.state_floats(model.init_state(1)) + model.state_growth * task.written


def test_rmtr_write_false(build, tokens):
    """Without write nothing is added, and the very same state comes back."""
    model, ids = build("rmt_r"), tokens(2, 3 * N)
    state = unroll(model, ids[:, N:], N).state
    hidden, same = model.step(state, ids[:, :N], write=False)
    assert same is state and torch.allclose(hidden, model.step(state, ids[:, :N])[0], rtol=1e-12, atol=1e-12)


def test_rmtr_padded_segments_are_not_retrieved(build, tokens):
    """What a sample would have written in segments of pure padding is never read, and ``reorder`` drops it once nobody
    else needs it."""
    model, ids = build("rmt_r"), tokens(2, 5 * N)
    mask = torch.ones(2, 5 * N, dtype=torch.bool)
    mask[0, :N] = mask[0, 2 * N : 3 * N] = False
    state = unroll(model, ids, N, mask_BT=mask).state
    assert state.valid_BP.view(2, 5, M).all(2).tolist() == [[False, True, False, True, True], [True] * 5]
    alone = unroll(model, torch.cat([ids[:1, N : 2 * N], ids[:1, 3 * N :]], dim=1), N).state
    trimmed = model.reorder(state, torch.tensor([0]))
    assert all(
        torch.allclose(a, b, rtol=1e-12) for a, b in zip(state_tensors(trimmed), state_tensors(alone), strict=True)
    )
    assert model.reorder(state, torch.tensor([0, 1])).past_BPE.shape == state.past_BPE.shape
    poisoned = state._replace(past_BPE=state.past_BPE.masked_fill(~state.valid_BP[..., None], 1e6))
    assert torch.equal(model.step(poisoned, ids[:, :N])[0], model.step(state, ids[:, :N])[0])


def test_rmtr_gradient_with_an_empty_past_is_finite(build, tokens):
    """A sample that has written nothing while others have: the rows that it may not read make no NaN in the backward
    pass."""
    model, mask = build("rmt_r"), torch.ones(2, 3 * N, dtype=torch.bool)
    mask[0, : 2 * N] = False
    out = unroll(model, tokens(2, 3 * N), N, mask_BT=mask)
    assert all(g.isfinite().all() for g in grads([out.hidden_BTD], model.parameters()))


@pytest.mark.parametrize("bptt", [1, 2])
def test_rmtr_truncation(build, tokens, bptt):
    """The query is part of reading and always trained; key and value are part of writing and need two segments."""
    model = build("rmt_r")
    hidden = unroll(model, tokens(2, 4 * N), N, bptt=bptt).hidden_BTD[:, -N:]
    query, past = grads([hidden], [model.retrieval.to_query.weight, model.retrieval.to_past.weight])
    assert query.any() and past.any() == (bptt == 2)


def test_rmtr_top1_in_bf16(build, tokens):
    """Scores are scaled and compared in the state's precision: with bf16 weights exactly one row is retrieved."""
    model = build("rmt_r", retrieval="top_1").bfloat16()
    state = unroll(model, tokens(2, 6 * N), N).state
    marked = state._replace(
        past_BPE=torch.cat([state.past_BPE[..., :D], torch.eye(6 * M, D).expand(2, -1, -1)], dim=-1)
    )
    model.retrieval.out.weight.data.copy_(torch.eye(D))
    model.retrieval.feed_forward[3].weight.data.zero_()
    marks = model.retrieve(marked).float() - state.memory_BMD.bfloat16().float()
    assert state.past_BPE.dtype == torch.float32
    assert torch.allclose(marks.sort(-1).values, torch.eye(D)[-1].expand_as(marks), atol=0.02)


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "gptj", "llama"])
def test_rmtr_activation_and_dropout_are_the_backbones(build, tokens, family):
    """Spec 4: the backbone's activation; dropout on p (but not for top_1), after W_O and after the feed-forward."""
    for retrieval, expected in (("full", 3), ("top_1", 2)):
        model = build("rmt_r", family=family, retrieval=retrieval, dropout=0.5)
        assert repr(model.retrieval.feed_forward[2]) == repr(model.decoder.layers[0].activation)
        calls, state = [], unroll(model, tokens(2, 2 * N), N).state
        for module in model.retrieval.modules():
            if isinstance(module, torch.nn.Dropout):
                module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model.retrieve(state)
        assert len(calls) == expected


def test_rmtr_parameter_count():
    """Spec 4: about 131.55M on GPT-2 small with 16 memory tokens, of which the retrieval has 7.1M."""
    with torch.device("meta"):
        model = RMTR(RMTR.Config(family="gpt2", vocab_size=50257, layers=12, width=768, heads=12))
    retrieval = sum(p.numel() for p in model.retrieval.parameters())
    assert (
        retrieval == 7_089_408
        and sum(p.numel() for p in model.parameters()) == 124_439_808 + 2 * 16 * 768 + retrieval == 131_553_792
    )


def test_rmtr_init(build):
    """The 2m learned rows start like embeddings, the projections like the backbone's, biases at 0."""
    model = build("rmt_r", width=64, memory_tokens=100, init_std=0.05)
    assert model.memory.shape == (200, 64) and model.memory.std().item() == pytest.approx(
        model.decoder.tokens.weight.std().item(), rel=0.1
    )
    for name, parameter in model.retrieval.named_parameters():
        if "norm" in name or name.startswith("feed_forward.0"):
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight"))))
        elif name.endswith("weight"):
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1)
        else:
            assert not parameter.any()
    assert not copy.deepcopy(build("rmt_r", formula="paper")).retrieval.to_query.bias
