"""Titans' four models against section 4 written out slowly; causality, splits, padding, persistent tokens, diagnostics
and bad input.

What every registered model must do is tested in ``test_recurrence.py`` and ``test_models.py``; all here is in fp64 as
well.
"""

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch.nn import functional as F

import lit_memory
from lit_memory.lit import LIT_MODULES
from lit_memory.lit.diagnostics import written_segments
from lit_memory.memory.neural import Gates, NeuralState, by_token, recall
from lit_memory.models.attention import rotate
from lit_memory.models.parts import L2_EPS, l2_normalized
from lit_memory.models.titans.models import LMM, MAC, MAL
from lit_memory.recurrence import state_tensors, unroll
from lit_memory.tasks.batch import Batch

TITANS = ["lmm", "mac", "mag", "mal"]
MAC_FLAGS = [
    {},
    {"long_tokens": 2},
    {"causal_read": False},
    {"write_prefix": True},
    {"long_tokens": 2, "write_prefix": True, "persistent": 0},
    {"persistent": 0},
]
CASES = [(name, {}) for name in TITANS] + [("mac", flags) for flags in MAC_FLAGS[1:]]
CASES += [
    ("mag", {"persistent": 0}),
    ("mal", {"persistent": 0}),
    ("lmm", {"persistent": 0, "ff_mult": 0, "momentum": False, "forget": False, "conv_taps": 0}),
]
MORE = {
    "memory_heads": 2,
    "memory_depth": 3,
    "per_chunk_gates": True,
    "half_loss": False,
    "damped": False,
    "output_gate": "sigmoid",
    "memory_residual": True,
}
CASES += [
    ("mag", {**MORE, "fusion": "silu_prod", "theta_max": 0.1}),
    ("lmm", {**MORE, "normalized": False, "memory_activation": "gelu", "overshoot": 1.0}),
    ("lmm", {"exact": True, "memory_depth": 1}),
    ("mac", {"exact": True, "memory_depth": 1, "memory_heads": 2, "momentum": False, "memory_residual": True}),
]
cases = pytest.mark.parametrize(("name", "flags"), CASES, ids=["-".join([name, *flags]) for name, flags in CASES])


def same(a, b, tol=1e-10):
    return all(
        torch.allclose(x, y, rtol=tol, atol=tol) for x, y in zip(state_tensors(a), state_tensors(b), strict=True)
    )


def read(model, ids, lengths, masks=None, state=None):
    """Hidden states and final state, segment by segment."""
    state, hidden = model.init_state(len(ids)) if state is None else state, []
    parts = [None] * len(lengths) if masks is None else masks.split(lengths, dim=1)
    for part, mask in zip(ids.split(lengths, dim=1), parts, strict=True):
        out, state = model.step(state, part, mask)
        hidden.append(out)
    return torch.cat(hidden, dim=1), state


def shake(model, std=0.3):
    """Weights in which everything matters: alpha near 0.05, since a deep memory that forgets half of all with every
    token is soon empty."""
    generator = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p.data.copy_(std * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    for layer in model.layers:
        layer.memory.to_gates.bias.data.chunk(3)[0].sub_(3)
        for W in layer.memory.M:
            W.data.mul_(2)
    return model


# --- slow twins


def slow_norm(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def slow_queries(m, x, qkv, part):
    """Of one of q, k, v: heads, silu, unit length but for v; a list of (B, T, K)."""
    heads = F.silu(qkv.chunk(3, -1)[part]).chunk(m.config.memory_heads, -1)
    return [h / (h.square().sum(-1, keepdim=True) + 1e-6).sqrt() if part < 2 else h for h in heads]


def slow_memory(m, rows, state, causal=True):
    """Spec 10.1: LMM(rows) and the next (conv, M, S); M and S are lists over heads of tuples over layers."""
    c, (conv, M, S) = m.config, state
    x = slow_norm(rows, m.norm)
    qkv = x @ m.qkv.weight.T
    if c.conv_taps:
        window = torch.cat([conv, qkv], 1)
        qkv = sum(window[:, i : i + qkv.shape[1]] * m.conv1d.weight[:, 0, i] for i in range(c.conv_taps))
        conv = window[:, window.shape[1] - (c.conv_taps - 1) :]
    x_gates = torch.stack([x[:, t - t % c.chunk if c.per_chunk_gates else t] for t in range(x.shape[1])], 1)
    alpha, eta, theta = (x_gates @ m.to_gates.weight.T + m.to_gates.bias).sigmoid().chunk(3, -1)
    alpha = alpha if c.forget else 0 * alpha
    theta = (
        theta
        * (min(1, c.overshoot / (1 if c.exact else c.chunk)) if c.theta_max is None else c.theta_max)
        * (1 if c.half_loss else 2)
        * ((1 - eta) if c.damped and c.momentum else 1)
    )
    q, k, v = (slow_queries(m, x, qkv, part) for part in range(3))
    outs, new_M, new_S = [], [], []
    form = {"activation": c.memory_activation, "residual": c.memory_residual}
    rule = {"normalized": c.normalized, "exact": c.exact}
    for h in range(c.memory_heads):
        gates = Gates((1 - alpha[..., h]).log(), eta[..., h].log(), theta[..., h])
        one = by_token(NeuralState(M[h], S[h]), q[h], k[h], v[h], gates, c.chunk, **rule, **form)
        outs.append(one.o_XTV if causal else recall(M[h], q[h], **form))
        new_M.append(one.state.M)
        new_S.append(one.state.S)
    gate = x @ m.to_output_gate.weight.T
    o = slow_norm(torch.cat(outs, -1), m.out_norm) * (F.silu(gate) if c.output_gate == "silu" else gate.sigmoid())
    return o @ m.out.weight.T, (conv, new_M, new_S)


def slow_blank(m, batch):
    c = m.config
    M = [tuple(W[h].expand(batch, -1, -1) for W in m.M) for h in range(c.memory_heads)]
    S = [tuple(torch.zeros_like(W) for W in head) if c.momentum else () for head in M]
    return torch.zeros(batch, max(c.conv_taps - 1, 0), 3 * c.width, dtype=torch.float64), M, S


def slow_attention(a, asking, keys, visible, prefix=None, asking_at=None, keys_at=None):
    """One query and head at a time: rows ``asking`` at positions ``asking_at`` over rows ``keys`` at ``keys_at``, of
    which query i sees ``visible[i]``, and over a prefix without positions."""
    K, outs = a.head_width, []
    q, (k, v) = asking @ a.query.weight.T, (keys @ a.key_value.weight.T).chunk(2, -1)
    prefix = keys[:, :0] if prefix is None else prefix
    pk, pv = (prefix @ a.key_value.weight.T).chunk(2, -1)

    def turn(x, at):
        return rotate(
            torch.zeros(1, 1, at + 1, K, dtype=x.dtype).index_put((torch.tensor(0),) * 2 + (torch.tensor(at),), x), K
        )[0, 0, at]

    for b in range(len(q)):
        for i in range(q.shape[1]):
            heads = []
            for h in range(0, q.shape[2], K):
                part, at = slice(h, h + K), i if asking_at is None else asking_at[i]
                scores = [q[b, i, part] @ row[part] for row in pk[b]]
                scores += [
                    turn(q[b, i, part], at) @ turn(k[b, j, part], j if keys_at is None else keys_at[j])
                    for j in visible[i]
                ]
                p = (torch.stack(scores) / K**0.5).softmax(0)
                heads.append(p @ torch.cat([pv[b, :, part], v[b, visible[i], part]]))
            outs.append(torch.cat(heads))
    return torch.stack(outs).view(*q.shape) @ a.out.weight.T


def slow_fusion(f, a, b):
    a, b = slow_norm(a, f.norm_a), slow_norm(b, f.norm_b)
    return a * b.sigmoid() if f.fusion == "sigmoid_m" else F.silu(a * b)


def slow_mac(layer, rows, state):
    """Spec 10.5, MAC, hazards repaired."""
    c, m, outs = layer.config, layer.memory, []
    for part in rows.split(c.window, 1):
        B, T = part.shape[:2]
        x = slow_norm(part, layer.norm)

        def ask(rows, memory=state):
            heads = slow_queries(m, None, torch.cat([rows @ m.qkv.weight[: c.width].T] * 3, -1), 0)
            h = torch.cat(
                [recall(memory[1][i], q, c.memory_activation, c.memory_residual) for i, q in enumerate(heads)], -1
            )
            return slow_norm(h, layer.norm)

        prefix = [slow_norm(layer.persistent_1PD, layer.norm).expand(B, -1, -1)] if c.persistent else []
        if c.long_tokens:
            prefix.append(ask(slow_norm(layer.long_1PD, layer.norm).expand(B, -1, -1)))
        prefix = torch.cat(prefix, 1) if prefix else None
        keys, at = (x, range(T)) if c.long_tokens else (torch.cat([ask(x), x], 1), [*range(T), *range(T)])
        visible = [[j for j in range(len(at)) if at[j] <= i] for i in range(T)]
        y = slow_attention(layer.attention, x, keys, visible, prefix, keys_at=list(at))
        if c.write_prefix:
            among = [prefix[:, : i + 1] for i in range(prefix.shape[1])]
            rows_p = [slow_attention(layer.attention, p[:, -1:], p[:, :0], [[]], p) for p in among]
            _, state = slow_memory(m, torch.cat(rows_p, 1), state)
        out, state = slow_memory(m, y, state, c.causal_read)
        outs.append(part + slow_fusion(layer.fusion, y, out))
    return torch.cat(outs, 1), state


def slow_window(layer, seen, new, prefix=None):
    """Attention of the last ``new`` of all rows so far over the window and the prefix, at absolute positions."""
    x, total = slow_norm(seen, layer.norm), seen.shape[1]
    asking = range(total - new, total)
    visible = [list(range(max(0, t - layer.config.window + 1), t + 1)) for t in asking]
    return slow_attention(layer.attention, x[:, total - new :], x, visible, prefix, list(asking))


def slow_model(model, ids, lengths):
    """Hidden states, and per layer the memory's final state, of a model that reads segments of these lengths."""
    name, c, B = type(model).__name__, model.config, len(ids)
    states, histories = (
        [slow_blank(layer.memory, B) for layer in model.layers],
        [torch.zeros(B, 0, c.width, dtype=torch.float64) for _ in model.layers],
    )
    for i, layer in enumerate(model.layers if c.persistent and name != "MAC" else []):
        p = layer.persistent_1PD.expand(B, -1, -1)
        out, states[i] = slow_memory(layer.memory, p, states[i])
        histories[i] = p + out if name == "MAL" else histories[i]
    hidden = []
    for part in ids.split(lengths, 1):
        rows = model.decoder.tokens.weight[part]
        for i, layer in enumerate(model.layers):
            if name == "MAC":
                rows, states[i] = slow_mac(layer, rows, states[i])
            else:
                out, states[i] = slow_memory(layer.memory, rows, states[i])
                before, rows = rows, rows + out
                if name != "LMM":
                    histories[i] = torch.cat([histories[i], before if name == "MAG" else rows], 1)
                if name == "MAG":
                    prefix = slow_norm(layer.persistent_1PD, layer.norm).expand(B, -1, -1) if c.persistent else None
                    rows = before + slow_fusion(
                        layer.fusion, slow_window(layer, histories[i], part.shape[1], prefix), out
                    )
                if name == "MAL":
                    rows = rows + slow_window(layer, histories[i], part.shape[1])
            if c.ff_mult:
                gate, up = (slow_norm(rows, layer.feed_forward.norm) @ layer.feed_forward.up.weight.T).chunk(2, -1)
                rows = rows + (F.silu(gate) * up) @ layer.feed_forward.down.weight.T
        hidden.append(slow_norm(rows, model.decoder.norm))
    return torch.cat(hidden, 1), states


@cases
def test_slow_twin(build, tokens, name, flags):
    """Two segments, chunks of 3 and windows of 4, equal spec 10 written out: hidden states, memory and all
    gradients."""
    model, ids = shake(build(name, {"window": 4}, **flags)), tokens(2, 11)
    slow_hidden, slow_states = slow_model(model, ids, [6, 5])
    hidden, state = read(model, ids, [6, 5])
    memories = [s.memory if hasattr(s, "memory") else s for s in state]
    fast, slow = [hidden], [slow_hidden]
    for mine, (conv, M, S) in zip(memories, slow_states, strict=True):
        fast += [mine.conv_BJC, *mine.M, *mine.S]
        slow += [conv, *(torch.stack(heads, 1) for part in (M, S) for heads in zip(*part, strict=True))]
    assert len(fast) == len(slow) and all(
        torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(fast, slow, strict=True)
    )
    draws = [torch.randn_like(t) for t in slow]
    grads = [
        torch.autograd.grad(
            sum((t * d).sum() for t, d in zip(ts, draws, strict=True)), list(model.parameters()), materialize_grads=True
        )
        for ts in (fast, slow)
    ]
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-9) for a, b in zip(*grads, strict=True))


# --- causality, splits


@cases
@pytest.mark.parametrize("lengths", [[14], [4, 8, 2]], ids=str)
def test_causal(build, tokens, name, flags, lengths):
    """T-TIT-causal-MAC, T-TIT-causal-MAG, T-TIT-causal-MAL, T-CAUSAL: another token at j changes nothing before j,
    within a chunk, across chunks and segments of attention, and in every variant."""
    model, ids = shake(build(name, {"window": 4}, **flags)), tokens(1, 14)
    before = read(model, ids, lengths)[0]
    for j in (0, 2, 5, 8, 13):
        other = ids.clone()
        other[:, j] = (ids[:, j] + 1) % 19
        moved = (read(model, other, lengths)[0] - before).abs().amax((0, 2))
        assert (moved[:j] < 1e-12).all() and moved[j] > 1e-3 and (moved[j + 1 : j + 2] > 1e-9).all()


@cases
def test_split(build, tokens, name, flags):
    """T-TIT-split: cut at multiples of chunk and segment of attention, a sequence gives what one pass does: hidden
    states, state, gradients."""
    model, ids, found = shake(build(name, {"window": 6, "chunk": 3}, **flags)), tokens(2, 24), []
    for cut in ([24], [12, 12], [6, 18], [6, 6, 12], [18, 6], [6] * 4):
        hidden, state = read(model, ids, cut)
        draw = torch.Generator().manual_seed(0)
        loss = sum(
            (t * torch.randn(t.shape, generator=draw, dtype=t.dtype)).sum()
            for t in (hidden, *state_tensors(state))
            if t.is_floating_point()
        )
        found.append(((hidden, state), torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)))
    for values, grads in found[1:]:
        assert same(values, found[0][0]) and same(grads, found[0][1], 1e-9)


def test_l2_normalized():
    """Value, and first and second derivatives; a row of zeros is left as it is."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    assert torch.allclose(l2_normalized(x), x / (x.square().sum(-1, keepdim=True) + L2_EPS).sqrt(), rtol=1e-14, atol=0)
    x[0, 0] = 0
    assert not l2_normalized(x)[0, 0].any()
    assert torch.autograd.gradcheck(l2_normalized, x.requires_grad_()) and torch.autograd.gradgradcheck(
        l2_normalized, x[1:].detach().requires_grad_()
    )


def test_elsewhere_a_split_starts_a_new_chunk(build, tokens):
    """Cut inside a chunk, the hidden states after the cut differ."""
    model, ids = shake(build("lmm")), tokens(2, 12)
    (a, _), (b, _) = read(model, ids, [12]), read(model, ids, [4, 8])
    assert torch.allclose(a[:, :4], b[:, :4], rtol=1e-12) and not torch.allclose(a[:, 5:], b[:, 5:], atol=1e-6)


def test_exact_is_a_chunk_of_one_token(build, tokens):
    """With ``exact`` any chunk and any cut give what chunks of one token do, under the same longest step."""
    ids, flags = tokens(2, 12), {"memory_depth": 1}
    expected = read(shake(build("lmm", chunk=1, **flags)), ids, [12])
    for chunk, cut in ((1, [12]), (5, [12]), (5, [1, 7, 4]), (64, [2, 10])):
        assert same(read(shake(build("lmm", chunk=chunk, exact=True, **flags)), ids, cut), expected)


@pytest.mark.parametrize(
    ("flags", "exact"),
    [({}, False), ({"memory_depth": 1}, True), ({"memory_depth": 1, "per_chunk_gates": True}, False)],
)
def test_a_matrix_is_exact_by_default(build, flags, exact):
    c = build("lmm", chunk=8, **flags).config
    assert c.exact is exact and c.theta_limit == (1 if exact else 1 / 2)
    assert build("lmm", **{**flags, "exact": False}).config.exact is False


@pytest.mark.parametrize("name", ["mag", "mal"])
@pytest.mark.parametrize("window", [1, 2, 5, 9, 40])
def test_window_whatever_the_segments(build, tokens, name, window):
    """With chunks of one token, any way of cutting gives the same: windows shorter and longer than segments, and of one
    token."""
    model, ids = shake(build(name, window=window, chunk=1)), tokens(2, 23)
    whole = read(model, ids, [23])
    for cut in ([1] * 23, [2, 2, 19], [7, 1, 1, 9, 5], [22, 1]):
        assert same(read(model, ids, cut), whole)


# --- padding


@cases
def test_masked_tokens_do_not_exist(build, tokens, name, flags):
    """Wherever the padding is, hidden states and state are those of the real tokens alone."""
    model, ids = shake(build(name, {"window": 4}, **flags)), tokens(4, 13)
    mask = torch.rand(4, 13, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[1], mask[2], mask[3] = torch.arange(13) < 5, torch.arange(13) >= 5, False
    hidden, state = read(model, ids, [13], mask)
    assert hidden.isfinite().all()
    for i in range(4):
        mine = model.reorder(state, torch.tensor([i]))
        alone = (
            read(model, ids[i, mask[i]][None], [int(mask[i].sum())])
            if mask[i].any()
            else (hidden[:1, :0], model.init_state(1))
        )
        assert same(hidden[i, mask[i]][None], alone[0]) and same(mine, alone[1])


@cases
def test_reading_leaves_the_state(build, tokens, name, flags):
    """write=False gives the same hidden states and the very same state; an empty segment changes nothing either."""
    model, ids = build(name, **flags), tokens(2, 9)
    state = unroll(model, tokens(2, 5)).state
    (writing, new), (reading, old) = (model.step(state, ids, write=w) for w in (True, False))
    assert torch.equal(writing, reading) and not same(new, state)
    assert all(a is b for a, b in zip(state_tensors(old), state_tensors(state), strict=True))
    nothing, left = model.step(state, ids[:, :0])
    assert nothing.shape == (2, 0, 16) and same(left, state, 0)


# --- persistent tokens, convolution, state


@pytest.mark.parametrize("name", ["lmm", "mal"])
def test_persistent_tokens_are_read_first(build, tokens, name):
    """T-TIT-persist: they make the state that a layer is in after it has read them as rows of a chunk of their own;
    with none the layer starts from a blank state and has no such parameter."""
    layer = shake(build(name, {"window": 9}, layers=1, persistent=3)).layers[0]
    rows, options = torch.randn(2, 6, 16, dtype=torch.float64), {"device": torch.device("cpu"), "dtype": torch.float64}
    blank, first = (list(state_tensors(state(**options))) for state in (layer.empty_state, layer.first_state))
    assert not all(torch.equal(a, b) for a, b in zip(blank, first, strict=True))
    out, state = layer(rows[:1], layer.first_state(**options))
    whole, whole_state = layer(torch.cat([layer.persistent_1PD, rows[:1]], 1), layer.empty_state(**options))
    assert torch.allclose(out, whole[:, 3:], rtol=1e-10, atol=1e-12) and same(state, whole_state)
    none = build(name, persistent=0)
    assert not any("persistent" in n for n, _ in none.named_parameters())
    assert same(none.layers[0].first_state(**options), none.layers[0].empty_state(**options), 0)


@pytest.mark.parametrize("name", ["mac", "mag"])
def test_persistent_tokens_are_seen_from_everywhere(build, tokens, name):
    """T-TIT-persist: without a memory that learns, the last token's gradient reaches them beyond window and
    segments."""
    model = shake(build(name, layers=1, theta_max=0.0, window=2))
    hidden, _ = read(model, tokens(1, 12), [6, 6])
    (grad,) = torch.autograd.grad(
        (hidden[:, -1] * torch.randn(16, dtype=torch.float64)).sum(), model.layers[0].persistent_1PD
    )
    assert (grad.abs().amax(-1) > 1e-9).all()


def test_noconv(build, tokens):
    """T-TIT-noconv: a kernel that is 1 at the current token equals no convolution."""
    delta, without = build("mag"), build("mag", conv_taps=0)
    delta.load_state_dict(without.state_dict(), strict=False)
    for layer in delta.layers:
        layer.memory.conv1d.weight.data.zero_()[..., -1] = 1
    ids = tokens(2, 12)
    (a, state), (b, plain) = read(delta, ids, [6, 6]), read(without, ids, [6, 6])
    assert torch.allclose(a, b, rtol=1e-12) and all(
        same(x.memory.M, y.memory.M) for x, y in zip(state, plain, strict=True)
    )
    assert state[0].memory.conv_BJC.shape == (2, 3, 48) and plain[0].memory.conv_BJC.numel() == 0


def test_state_size():
    """Spec 14: 2 P + 3 (taps - 1) width floats per layer for LMM, P without momentum; 524,288 weights at width 512 and
    depth 2; attention adds window - 1 keys and values. Constant in length: ``test_state_floats`` of
    ``test_recurrence.py``."""
    with torch.device("meta"):

        def floats(cls, **sizes):
            model = cls(cls.Config(vocab_size=7, layers=3, **sizes))
            return model.state_floats(model.init_state(2))

        P = 2 * 512 * 512
        assert P == 524_288 and floats(LMM, width=512) == floats(MAC, width=512) == 3 * (2 * P + 3 * 3 * 512)
        assert floats(LMM, width=512, momentum=False, conv_taps=0) == 3 * P
        assert floats(LMM, width=512, memory_depth=3, memory_expand=2) == 3 * (
            2 * (2 * 512 * 1024 + 1024 * 1024) + 9 * 512
        )
        assert floats(LMM, width=512, memory_heads=4, memory_depth=1) == 3 * (2 * 4 * 128 * 128 + 9 * 512)
        assert floats(MAL, width=512, window=100) == 3 * (2 * P + 9 * 512 + 99 * 2 * 512)


@pytest.mark.parametrize("name", TITANS)
def test_the_state_holds_no_more_than_its_own_memory(build, tokens, name):
    """No part of the state is a view that keeps a segment alive."""
    for t in state_tensors(unroll(build(name), tokens(2, 50), 40).state):
        assert t.untyped_storage().nbytes() == t.numel() * t.element_size()


@cases
def test_every_parameter_is_used(build, tokens, name, flags):
    """No parameter is without a gradient once two segments are read."""
    model = shake(build(name, **flags))
    loss = (model.logits(read(model, tokens(2, 12), [6, 6])[0]) * torch.randn(2, 12, 19, dtype=torch.float64)).sum()
    assert all(g.any() for g in torch.autograd.grad(loss, list(model.parameters())))


def test_init(build):
    """Gates of a row of zeros are those of the configuration, theta_max is 4 / chunk, and M_0 has Xavier's deviation or
    its own."""
    for memory_std, expected in ((None, (2 / (64 + 128)) ** 0.5), (0.5, 0.5)):
        model = build(
            "lmm",
            width=128,
            memory_heads=2,
            memory_expand=2,
            memory_std=memory_std,
            eta_init=0.75,
            chunk=8,
            damped=False,
        )
        memory = model.layers[0].memory
        log_keep, log_eta, theta = memory.gates(torch.zeros(3, 5, 128, dtype=torch.float64), torch.float64)
        assert log_keep.shape == (6, 5) and torch.allclose(
            1 - log_keep.exp(), torch.full_like(log_keep, 1e-4), rtol=1e-6
        )
        assert torch.allclose(log_eta.exp(), torch.full_like(log_eta, 0.75)) and torch.allclose(
            theta, torch.full_like(theta, 0.5 * 4 / 8)
        )
        assert all(W.std().item() == pytest.approx(expected, rel=0.05) for W in memory.M)


@pytest.mark.parametrize("name", TITANS)
def test_residual_stream_is_fp32_under_bf16_weights(build, tokens, name):
    model, seen = build(name).bfloat16(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, args, out: seen.append(out[0].dtype))
    assert unroll(model, tokens(1, 3)).hidden_BTD.dtype == torch.bfloat16 and seen == [torch.float32] * 2


@pytest.mark.parametrize("name", TITANS)
def test_a_long_stream(build, name):
    """4,000 tokens of a text with few words: finite, and norms that stay where they are."""
    model, draws = build(name, chunk=20).float(), torch.Generator().manual_seed(0)
    norms = []
    with torch.no_grad():
        state = model.init_state(1)
        for _ in range(4):
            out = unroll(model, (torch.randint(3, (1, 200), generator=draws) for _ in range(5)), state=state, keep=1)
            state = out.state
            norms.append(max(t.norm().item() for t in state_tensors(state) if t.is_floating_point()))
    assert out.hidden_BTD.isfinite().all() and max(norms) < 2 * norms[0]


# --- diagnostics


@pytest.mark.parametrize("name", TITANS)
def test_diagnostics(build, tokens, name):
    """Norms of the final state, mean gates and the clipped share, per layer; nothing stays on the model."""
    model, ids = shake(build(name)), tokens(3, 12)
    found, state = model.diagnostics(ids, 6), unroll(model, ids, 6).state
    assert set(found) == {
        f"{n}.{i}" for n in ("M_norm", "S_norm", "alpha", "eta", "theta", "clipped") for i in range(2)
    }
    for i, layer_state in enumerate(state):
        memory = layer_state.memory if hasattr(layer_state, "memory") else layer_state
        for key, part in (("M_norm", memory.M), ("S_norm", memory.S)):
            expected = torch.stack([torch.cat([W[b].flatten() for W in part]).norm() for b in range(3)]).mean()
            assert found[f"{key}.{i}"].item() == pytest.approx(expected.item())
    assert all(0 < found[f"{key}.0"] < 1 for key in ("alpha", "eta", "theta", "clipped"))
    assert not any(layer.memory._forward_hooks for layer in model.layers)
    first, last = (
        ids[:1, :6],
        (ids[:2, 6:], torch.arange(6) < torch.tensor([[6], [4]])),
    )  # the second sample begins late and ends early
    grown, alone = model.diagnostics((first, last)), [model.diagnostics(ids[:1], 6), model.diagnostics(ids[1:2, 6:10])]
    for key in ("alpha.0", "eta.1", "theta.1", "clipped.0"):
        assert grown[key].item() == pytest.approx((12 * alone[0][key].item() + 4 * alone[1][key].item()) / 16)
    plain = build(name, momentum=False, forget=False, theta_max=0.0, normalized=False).diagnostics(ids)
    assert all(plain[f"{key}.1"] == 0 for key in ("S_norm", "alpha", "theta", "clipped"))


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*smaller than the logging interval",
    "ignore:.*LeafSpec.* is deprecated",
)
@pytest.mark.parametrize("logger", [True, False])
def test_diagnostics_are_logged_where_there_is_a_logger(tmp_path, logger):
    """Once a validation, from what its first batch writes; without a logger they are not computed."""
    module = lit_memory.LitMAC(width=16, layers=1)
    data = lit_memory.AssociativeRetrievalData(
        pairs=3, batch_size=4, valid_size=6, test_size=4, eval_batch_size=4, epoch_steps=2
    )
    quiet = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    log = L.pytorch.loggers.CSVLogger(tmp_path) if logger else False
    trainer = L.Trainer(accelerator="cpu", max_steps=2, logger=log, **quiet)
    trainer.fit(module, data)
    assert ("valid/M_norm.0" in trainer.callback_metrics) == logger and "valid/loss" in trainer.callback_metrics
    if logger:
        first = next(iter(data.val_dataloader()))
        expected = module.model.diagnostics(first.ids_BT[:, : -first.segment_len], first.segment_len)["M_norm.0"]
        assert float(trainer.callback_metrics["valid/M_norm.0"]) == pytest.approx(float(expected), rel=1e-4)


def test_what_is_diagnosed():
    """The context and what comes before the questions, of the first samples; the one segment of a batch that writes
    none."""
    ids, mask = torch.arange(24).view(2, 12), torch.ones(2, 6, dtype=torch.bool)
    context = (ids[:1, :6], (ids[:, 6:], mask))
    batch = Batch(ids, ids, 6, read_only=1, context=context)
    first, (second, real), third = written_segments(batch, 1)
    assert (
        torch.equal(first, ids[:1, :6])
        and torch.equal(second, ids[:1, 6:])
        and torch.equal(real, mask[:1])
        and torch.equal(third, ids[:1, :6])
    )
    (alone,) = written_segments(replace(batch, context=(), read_only=2), 2)
    assert torch.equal(alone, ids[:, :6])


# --- bad input


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("lmm", {"memory_depth": 0}, "memory_depth=0: expected at least 1"),
        ("lmm", {"chunk": 0}, "chunk=0: expected at least 1"),
        ("lmm", {"exact": True}, "exact=True: expected memory_depth 1 and no per_chunk_gates with it, or false"),
        ("mac", {"window": 0}, "window=0: expected at least 1"),
        ("mac", {"heads": 16}, "heads=16: expected heads of an even width"),
        (
            "mac",
            {"write_prefix": True, "persistent": 0},
            "write_prefix=True: expected a prefix; set persistent or long_tokens",
        ),
        ("lmm", {"eta_init": 1.0}, "eta_init=1.0: expected a number between 0 and 1"),
    ],
)
def test_wrong_settings(build, name, settings, message):
    with pytest.raises(ValueError, match=message):
        build(name, **settings)


@pytest.mark.parametrize("name", TITANS)
def test_sizes_that_do_not_fit_each_other(build, tokens, name):
    """A window or chunk longer than the segment is that of the segment, and a chunk that does not divide it leaves a
    short one."""
    ids = tokens(2, 12)
    for sizes, equal in (({"chunk": 100}, {"chunk": 6}), ({"chunk": 4}, None)):
        model = shake(build(name, {"window": 100}, theta_max=0.2, **sizes))
        hidden, state = read(model, ids, [6, 6])
        assert hidden.shape == (2, 12, 16) and hidden.isfinite().all()
        if equal:
            other = shake(build(name, {"window": 100}, theta_max=0.2, **equal))
            assert same((hidden, state), read(other, ids, [6, 6]))


@pytest.mark.parametrize("name", TITANS)
def test_weight_decay_spares_the_biases_of_the_gates(name):
    """It would pull them to gates of one half. Everything else that is trained is decayed."""
    module = LIT_MODULES[name](vocab_size=8, layers=2, width=8, weight_decay=0.1)
    decayed, spared = module.configure_optimizers().param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0)
    assert [id(p) for p in spared["params"]] == [id(layer.memory.to_gates.bias) for layer in module.model.layers]
