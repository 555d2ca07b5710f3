"""RWKV-5 against its specification (spec 9); what it shares with Mamba is tested in ``test_mamba.py``."""

import pytest
import torch
from conftest import assert_twins

from lit_memory.models.rwkv import RWKV
from lit_memory.recurrence import state_tensors, unroll


def norm(x, weight, bias, eps):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps).sqrt() * weight + bias


def naive_layer(layer, rows, last_time, last_channel, S, eps):
    """Spec 9 for one token at a time: rows (B, T, D), last tokens (B, D), S (B, H, K, V)."""
    time, channel, outs = layer.time, layer.channel, []
    heads = time.heads
    for row in rows.unbind(1):
        x = norm(row, layer.norm1.weight, layer.norm1.bias, eps)
        r, k, v, g = (x * mu + last_time * (1 - mu) for mu in time.mix_4D)
        last_time = x
        r, k, v = (
            (m.weight @ t.mT).mT.unflatten(-1, (heads, -1))
            for m, t in ((time.receptance, r), (time.key, k), (time.value, v))
        )
        outer = k[..., None] * v[..., None, :]
        o = torch.einsum("bhk,bhkv->bhv", r, S + time.bonus_HK[..., None] * outer)
        S = torch.exp(-torch.exp(time.decay_HK))[..., None] * S + outer
        o = norm(o / 8, time.norm.weight.view(heads, -1), time.norm.bias.view(heads, -1), eps).flatten(1)
        gate = g @ time.gate.weight.mT
        row = row + (o * gate * gate.sigmoid()) @ time.out.weight.mT
        x = norm(row, layer.norm2.weight, layer.norm2.bias, eps)
        k, r = (x * mu + last_channel * (1 - mu) for mu in channel.mix_2D)
        last_channel = x
        hidden = (k @ channel.key.weight.mT).clamp(min=0) ** 2
        outs.append(row + (r @ channel.receptance.weight.mT).sigmoid() * (hidden @ channel.value.weight.mT))
    return torch.stack(outs, 1), last_time[:, None], last_channel[:, None], S


@pytest.mark.parametrize("heads", [1, 4])
def test_slow_twin(build, tokens, heads):
    """Three segments equal spec 9 written out for one token at a time: logits, states and all gradients (1e-10)."""
    model, ids = build("rwkv", heads=heads), tokens(2, 10)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    eps, slow = model.config.norm_eps, []
    rows = norm(model.decoder.tokens(ids), model.embed_norm.weight, model.embed_norm.bias, eps)
    for layer, (time, channel, S) in zip(model.layers, model.init_state(2), strict=True):
        rows, *state = naive_layer(layer, rows, time[:, 0], channel[:, 0], S, eps)
        slow += state
    final = model.decoder.norm
    slow = [norm(rows, final.weight, final.bias, eps) @ model.decoder.head.weight.mT, *slow]
    out = unroll(model, ids, 4)
    fast = [model.logits(out.hidden_BTD), *state_tensors(out.state)]
    assert_twins(fast, slow, model, 1e-8)


def test_w1(build, tokens):
    """T-RWKV-w1: with w = 1 and u = 1 in a layer, its memory is the plain sum of k^T v, and whatever came first weighs
    as much as the last."""
    model, ids = build("rwkv", layers=1), tokens(2, 9)
    time = model.layers[0].time
    torch.nn.init.constant_(time.decay_HK, -1e4)
    torch.nn.init.ones_(time.bonus_HK)
    seen = {}
    for name in ("key", "value", "receptance"):
        getattr(time, name).register_forward_hook(
            lambda _, args, out, name=name: seen.__setitem__(name, out.unflatten(-1, (2, -1)))
        )
    time.norm.register_forward_hook(lambda _, args, out: seen.__setitem__("o", args[0] * 8))
    S = unroll(model, ids).state[0].memory_BHKV
    assert torch.allclose(S, torch.einsum("bthk,bthv->bhkv", seen["key"], seen["value"]), rtol=1e-10, atol=1e-10)
    scores = torch.einsum("bthk,bshk->bhts", seen["receptance"], seen["key"]).tril()
    attention = torch.einsum("bhts,bshv->bthv", scores, seen["value"])
    assert torch.allclose(seen["o"].view_as(attention), attention, rtol=1e-10, atol=1e-10)


def test_a_fresh_model_computes_nothing(build, tokens):
    """The reference's init: every layer starts as the identity, and the gradient reaches only what leads onto the
    residual stream."""
    model, ids = build("rwkv", zero_init=True), tokens(2, 7)
    rows = model.embed(ids)
    out = unroll(model, ids).hidden_BTD
    assert torch.equal(out, model.decoder.norm(rows))
    named = {k: p for k, p in model.named_parameters() if k.startswith("decoder.layers.0.")}
    grads = torch.autograd.grad((out * torch.randn_like(out)).sum(), list(named.values()), materialize_grads=True)
    assert {k.removeprefix("decoder.layers.0.") for k, g in zip(named, grads, strict=True) if g.any()} == {
        "time.out.weight",
        "channel.value.weight",
    }


def test_sizes():
    """Spec 9 and 14: width * key width + 2 * width state floats per layer; the feed-forward is 3.5 times the width, in
    multiples of 32."""
    model = RWKV(RWKV.Config(vocab_size=19))
    assert model.state_floats(model.init_state(3)) == 4 * (128 * 64 + 2 * 128)
    assert model.layers[0].channel.key.weight.shape == (448, 128)
    assert RWKV.Config(width=100, heads=1).inner == 320


def test_init():
    """Decays run from slow to fast over the channels, within (0, 1), and token shifts keep more of the token in deeper
    layers."""
    model = RWKV(RWKV.Config(vocab_size=19))
    first, last = model.layers[0].time, model.layers[-1].time
    for layer in (first, last):
        w = torch.exp(-torch.exp(layer.decay_HK)).flatten().detach()
        assert (
            bool((w.diff() <= 0).all())
            and w[0].item() == pytest.approx(0.99752, abs=1e-5)
            and w[-1].item() == pytest.approx(0.6922, abs=1e-4)
        )
    assert bool((last.mix_4D[1, 1:] > first.mix_4D[1, 1:]).all()) and not first.mix_4D[:, 0].any()
