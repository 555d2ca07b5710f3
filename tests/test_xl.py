"""Transformer-XL against section 3.3 of its paper written out: positions, cache, receptive field, sizes. All
comparisons are in fp64."""

import copy

import pytest
import torch
from torch.nn import functional as F

from lit_memory.models.attention import attention_mask
from lit_memory.models.relative import blend, by_distance, score, sinusoids, weight_first
from lit_memory.models.xl import XL, XLState
from lit_memory.recurrence import cross_entropy, state_tensors, unroll
from lit_memory.recurrence.loss import logits_per_token

N = 5  # tokens per segment


def grads(tensors, parameters):
    """Gradients of a random functional of all tensors."""
    generator = torch.Generator().manual_seed(3)
    loss = sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in tensors)
    return torch.autograd.grad(loss, list(parameters), materialize_grads=True)


def slow_layer(block, x, visible, clamp):
    """Equations (1) to (3) for one sample: every pair (i, j) has a distance, a sinusoid and a score of its own;
    ``visible[i]`` lists the j."""
    width, out = x.shape[1], []
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    split = lambda rows: rows.unflatten(-1, (block.heads, -1))  # noqa: E731
    keys, values = (split(t) for t in block.key_value(x).chunk(2, dim=-1))
    for i, row in enumerate(x):
        q, scores = split(block.query(row)), []
        for j in visible[i]:
            angle = min(i - j, clamp or len(x)) * frequency
            r = split(block.distance(torch.cat([angle.sin(), angle.cos()])))
            scores.append((q * keys[j] + q * r + block.u_HK * keys[j] + block.v_HK * r).sum(-1) / q.shape[-1] ** 0.5)
        p = torch.stack(scores).softmax(0)
        y = sum(weight[:, None] * values[j] for weight, j in zip(p, visible[i], strict=True))
        a = F.layer_norm(row + block.out(y.flatten()), (width,), block.norm1.weight, block.norm1.bias)
        up, _, _, down, _ = block.feed_forward
        out.append(F.layer_norm(a + down(up(a).relu()), (width,), block.norm2.weight, block.norm2.bias))
    return torch.stack(out)


@pytest.mark.parametrize(("mem_len", "clamp_len"), [(7, 0), (3, 0), (0, 0), (7, 4), (20, 1)])
def test_xl_slow_twin(build, tokens, mem_len, clamp_len):
    """One full pass in which each token sees its segment and the ``mem_len`` tokens before the segment: values and all
    gradients."""
    model, ids = build("xl", mem_len=mem_len, clamp_len=clamp_len), tokens(2, 3 * N + 2)
    for bias in (model.layers[0].block.u_HK, model.layers[0].block.v_HK):
        torch.nn.init.normal_(bias)
    visible = [range(max(0, i // N * N - mem_len), i + 1) for i in range(ids.shape[1])]
    slow = []
    for sample in ids:
        rows = model.decoder.tokens.weight[sample] * 4  # the square root of the width
        for layer in model.layers:
            rows = slow_layer(layer.block, rows, visible, clamp_len)
        slow.append(rows)
    fast, slow = unroll(model, ids, N).hidden_BTD, torch.stack(slow)
    assert torch.allclose(fast, slow, rtol=1e-10, atol=1e-10)
    for a, b in zip(grads([fast], model.parameters()), grads([slow], model.parameters()), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def published_layer(layer, x, state):
    """The published order of (1): keys and values of all cached rows are projected anew in every segment that reads
    them."""
    block, mask = layer.block, torch.cat([state.mask_BW, torch.ones(x.shape[:2], dtype=torch.bool)], dim=1)
    rows, split = torch.cat([state.rows_BWD, x], dim=1), lambda t: t.unflatten(-1, (block.heads, -1)).transpose(1, 2)
    (k, v), q = map(split, block.key_value(rows).chunk(2, dim=-1)), split(block.query(x))
    r = split(block.distance(sinusoids(rows.shape[1], x.shape[2], block.clamp, x.device, x.dtype))[None])
    distant = by_distance((q + block.v_HK[:, None]) @ r.mT) / q.shape[-1] ** 0.5
    y = F.scaled_dot_product_attention(
        q + block.u_HK[:, None], k, v, distant.masked_fill(~attention_mask(mask, x.shape[1]), -torch.inf)
    )
    a = block.norm1(x + block.out(y.transpose(1, 2).flatten(2)))
    kept = torch.cat([state.rows_BWD, x.detach() if layer.detach else x], dim=1)
    return block.norm2(a + block.feed_forward(a)), XLState(kept[:, x.shape[1] :], mask[:, x.shape[1] :])


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("segment_len", [1, N, 20])
def test_xl_published_twin(build, tokens, segment_len, detach):
    """Hidden states, final cache and all gradients are those of the published order, short segments and long ones: with
    a detached cache too W_kv learns from cached rows, those that an earlier batch of a stream has left included."""
    model, ids = build("xl", mem_detach=detach), tokens(2, 45)
    start = unroll(build("xl", mem_detach=True, init_std=0.3), ids[:, :N]).state
    fast, slow, state = unroll(model, ids, segment_len, state=start), [], start
    for part in ids.split(segment_len, dim=1):
        rows, states = model.embed(part), []
        for layer, before in zip(model.layers, state, strict=True):
            rows, after = published_layer(layer, rows, before)
            states.append(after)
        slow, state = [*slow, rows], states
    fast, slow = (
        [fast.hidden_BTD, *state_tensors(fast.state)],
        [torch.cat(slow, dim=1), *(t for layer in state for t in layer)],
    )
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(fast, slow, strict=True))
    fast, slow = ([t for t in ts if t.requires_grad] for ts in (fast, slow))
    assert len(fast) == len(slow) == (1 if detach else 3)
    for a, b in zip(grads(fast, model.parameters()), grads(slow, model.parameters()), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_xl_products_slow_twin():
    """Where the weight goes first, the products are the sums that their docstrings say, and so are the gradients."""
    q, p, weight, rows = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 4, 3, 5), (2, 4, 3, 7), (4, 5, 6), (2, 7, 6))
    )
    projected = torch.stack([rows @ head.mT for head in weight], dim=1)  # (B, H, S, K)
    fast = [score(q, weight, rows), blend(p, weight, rows)]
    slow = [q @ projected.mT, p @ projected]
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(fast, slow, strict=True))
    for a, b in zip(grads(fast, [q, p, weight, rows]), grads(slow, [q, p, weight, rows]), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("first", [True, False])
def test_xl_weight_order(build, tokens, monkeypatch, first):
    """A segment gives the same, with the same gradients, whichever product comes first."""
    model, ids, found = build("xl", mem_len=7), tokens(2, 3 * N), []
    for order in (first, None):
        if order is not None:
            monkeypatch.setattr("lit_memory.models.xl.weight_first", lambda *_, order=order: order)
        out = unroll(model, ids, N)
        found.append([out.hidden_BTD, *grads([out.hidden_BTD], model.parameters())])
        monkeypatch.undo()
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("queries", "rows", "width", "head_width", "first"),
    [
        (4, 10**6, 64, 32, True),
        (63, 10**6, 64, 32, True),
        (65, 10**6, 64, 32, False),
        (150, 10**6, 410, 41, False),
        (11, 11, 64, 32, False),
        (3, 195, 64, 32, True),
    ],
)
def test_xl_weight_first(queries, rows, width, head_width, first):
    """The cheaper order: short segments that see many rows have the weight on their queries, the 16 x 410 model and
    what sees no more than itself on the rows."""
    assert weight_first(queries, rows, head_width, width) == first


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("segment_len", [1, 4, 10])
def test_xl_exact(build, tokens, layers, segment_len):
    """T-XL-exact: with a cache of all previous tokens the output is that of the full context, whatever the segments,
    and so are the gradients if they may enter the cache; with a shorter cache it is not."""
    model, ids = build("xl", layers=layers, mem_len=22), tokens(2, 23)
    full, cut = unroll(model, ids).hidden_BTD, unroll(model, ids, segment_len).hidden_BTD
    assert torch.allclose(cut, full, rtol=1e-10, atol=1e-10)
    for a, b in zip(grads([cut], model.parameters()), grads([full], model.parameters()), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(
        unroll(build("xl", layers=layers, mem_len=5), ids, segment_len).hidden_BTD, full, atol=1e-3
    )


@pytest.mark.parametrize(("layers", "mem_len", "segment_len"), [(1, 4, 4), (2, 4, 4), (3, 4, 4), (2, 8, 4), (3, 2, 1)])
def test_xl_receptive_field(build, tokens, layers, mem_len, segment_len):
    """T-XL-exact: L layers reach L * mem_len tokens back from the start of a segment, and no further."""
    model, ids = build("xl", layers=layers, mem_len=mem_len), tokens(1, 28)
    embedded = model.decoder.tokens(ids).detach().requires_grad_()
    model.decoder.tokens.forward = lambda part: next(parts)
    parts = iter(embedded.split(segment_len, dim=1))
    hidden = unroll(model, ids, segment_len, schedule="sequential").hidden_BTD[:, -segment_len:]
    reached = torch.autograd.grad((hidden * torch.randn_like(hidden)).sum(), embedded)[0][0].abs().amax(1) > 0
    first = 28 - segment_len - layers * mem_len
    assert reached.tolist() == [i >= first for i in range(28)]


def test_xl_mem0(build, tokens):
    """Spec 1: without a cache every segment is read by itself, and nothing is carried."""
    model, ids = build("xl", mem_len=0), tokens(2, 3 * N)
    apart = [unroll(model, part).hidden_BTD for part in ids.split(N, dim=1)]
    assert (
        torch.equal(unroll(model, ids, N).hidden_BTD, torch.cat(apart, dim=1))
        and model.state_floats(model.init_state(2)) == 0
    )


def test_xl_detach(build, tokens):
    """The cache is detached by default: the same values, and no gradient from one segment to the one before."""
    assert XL.Config.mem_detach is True
    ids = torch.arange(3).repeat_interleave(N)[None]
    for detach in (True, False):
        model = build("xl", mem_detach=detach, tie_embeddings=False)
        hidden = unroll(model, ids, N).hidden_BTD
        (grad,) = grads([hidden[:, -N:]], [model.decoder.tokens.weight])
        assert grad[2].any() and grad[:2].any() != detach
        assert torch.equal(hidden, unroll(build("xl", mem_detach=not detach, tie_embeddings=False), ids, N).hidden_BTD)


def test_xl_cache_holds_the_inputs_of_each_layer(build, tokens):
    """Spec 1 and 14: mem_len rows of D floats per layer, the last inputs that it had; write=False leaves the state as
    it was."""
    model, ids, seen = build("xl"), tokens(2, 3 * N), [[], []]
    for layer, inputs in zip(model.layers, seen, strict=True):
        layer.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
    state = unroll(model, ids, N).state
    for (rows, mask), inputs in zip(state, seen, strict=True):
        assert torch.equal(rows, torch.cat(inputs, dim=1)[:, -7:]) and mask.all()
    assert model.state_floats(state) == 2 * 7 * 16
    same = model.step(state, ids[:, :N], write=False)[1]
    assert all(a is b for a, b in zip(same, state, strict=True))


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 6), (4, 4), (3, 8)])
def test_by_distance_slow_twin(rows, keys):
    """Row t has column j at distance (S - T + t) - j, for every j that does not follow it."""
    x = torch.randn(2, 3, rows, keys)
    out = by_distance(x)
    for t in range(rows):
        for j in range(keys - rows + t + 1):
            assert torch.equal(out[..., t, j], x[..., t, keys - 1 - (keys - rows + t - j)])


def test_sinusoids_are_clamped():
    """Distances fall to 0; those beyond the clamp count as the clamp."""
    options = (torch.device("cpu"), torch.float64)
    table, clamped = sinusoids(9, 4, 0, *options), sinusoids(9, 4, 3, *options)
    assert (
        torch.equal(table[-1], torch.tensor([0.0, 0, 1, 1], dtype=torch.float64))
        and table[-3, 0] == torch.tensor(2.0).double().sin()
    )
    assert torch.equal(clamped[5:], table[5:]) and torch.equal(clamped[:5], table[5].expand(5, -1))


def test_xl_parameter_count(build):
    """Spec 1: the default model has 1,877,016 parameters with the 24 symbols of the quadratic equations; u and v are
    one pair for all layers."""
    with torch.device("meta"):
        assert sum(p.numel() for p in XL(XL.Config(vocab_size=24)).parameters()) == 1_877_016
    model = copy.deepcopy(build("xl"))
    assert all(
        layer.block.u_HK is model.layers[0].block.u_HK and layer.block.v_HK is model.layers[0].block.v_HK
        for layer in model.layers
    )


def test_xl_width_of_wikitext():
    """Sizes that no multiple gives, those of the 16 x 410 model, build, and heads need not fill the width."""
    with torch.device("meta"):
        model = XL(
            XL.Config(vocab_size=1000, layers=16, width=410, heads=10, head_width=41, ff_width=2100, mem_len=150)
        )
    assert model.state_floats(model.init_state(1, device=torch.device("meta"))) == 16 * 150 * 410
    with pytest.raises(ValueError, match="width=411: expected an even number"):
        XL.Config(width=411)


def test_xl_init(build):
    """Weights, embeddings, u and v N(0, init_std); biases 0; norms 1."""
    for name, parameter in build("xl", width=64, init_std=0.05, head_width=64, tie_embeddings=False).named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight"))))
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15)


def test_xl_inference_mode_leaves_no_trace(build, tokens):
    """Validation under ``inference_mode`` at a new length does not break training at that length (cached sinusoids)."""
    sinusoids.cache_clear()
    model, ids = build("xl"), tokens(1, 13)
    with torch.inference_mode():
        unroll(model, ids, 13)
    unroll(model, ids, 13).hidden_BTD.square().sum().backward()
    assert model.layers[0].block.distance.weight.grad.any()


# Adaptive softmax


@pytest.mark.parametrize("name", ["xl", "rmt_xl"])
def test_adaptive_losses_slow_twin(build, tokens, name):
    """They are the cross-entropy of the log-probabilities of all tokens, which sum to one, and so are their
    gradients."""
    model, ids = build(name, tie_embeddings=False, cutoffs=[5, 11]), tokens(2, 3 * N)
    hidden = unroll(model, ids, N).hidden_BTD[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()
    log_p = model.logits(hidden)
    assert {bool(group.any()) for group in (targets < 5, (targets >= 5) & (targets < 11), targets >= 11)} == {True}
    assert log_p.shape == (len(targets), 19) and torch.allclose(
        log_p.exp().sum(-1), torch.ones(len(targets), dtype=torch.float64)
    )
    assert torch.equal(model.logits(hidden.view(2, -1, 16)), log_p.view(2, -1, 19))
    hidden = hidden.detach().requires_grad_()
    for reduction in ("none", "sum", "mean"):
        fast, slow = (
            cross_entropy(model, hidden, targets, reduction),
            F.cross_entropy(model.logits(hidden), targets, reduction=reduction),
        )
        assert torch.allclose(fast, slow, rtol=1e-12)
        for a, b in zip(
            *(grads([loss], [hidden, *model.decoder.head.parameters()]) for loss in (fast, slow)), strict=True
        ):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert torch.equal(
        model.generate(ids[:, : 2 * N], 1, segment_len=N)[:, 0], log_p.view(2, -1, 19)[:, 2 * N - 1].argmax(-1)
    )


def test_adaptive_losses_take_fewer_scores(build):
    """With a full softmax, V of a token; with clusters those of the frequent ones and one for each cluster. No weight
    is as long as the vocabulary."""
    model = build("xl", tie_embeddings=False, cutoffs=[5, 11])
    assert (logits_per_token(build("xl")), logits_per_token(model)) == (19, 5 + 2)
    assert {tuple(p.shape) for name, p in model.named_parameters() if "head" in name} == {
        (7, 16),
        (16, 16),
        (6, 16),
        (8, 16),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cutoffs_under_autocast(build, tokens, dtype):
    """The head keeps the precision of its weights."""
    model, ids = build("xl", tie_embeddings=False, cutoffs=[5, 11]).float(), tokens(2, N)
    with torch.autocast("cpu", dtype):
        hidden_ND = unroll(model, ids).hidden_BTD.flatten(0, 1)
        loss, logits_NV = cross_entropy(model, hidden_ND, ids.flatten()), model.logits(hidden_ND)
    assert loss.dtype == logits_NV.dtype == torch.float32
    torch.testing.assert_close(loss, cross_entropy(model, hidden_ND.float(), ids.flatten()))


@pytest.mark.parametrize(
    ("cutoffs", "message"),
    [
        ([5, 5], "ids that rise"),
        ([11, 5], "ids that rise"),
        ([0, 5], "ids that rise"),
        ([-1], "0 or more"),
        ([5, 19], "ids below vocab_size=19"),
    ],
)
def test_wrong_cutoffs(build, cutoffs, message):
    """Tied embeddings are wrong with any."""
    with pytest.raises(
        ValueError, match=r"^cutoffs=\[5\]: an adaptive softmax has weights of its own; expected tie_embeddings: false"
    ):
        build("xl", cutoffs=[5])
    with pytest.raises(ValueError, match=rf"^cutoffs=.*: expected {message}"):
        build("xl", tie_embeddings=False, cutoffs=cutoffs)
