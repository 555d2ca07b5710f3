"""DeltaNet and Gated DeltaNet against their papers; what they share with Mamba is tested in ``test_mamba.py``."""

import pytest
import torch
from conftest import assert_twins
from torch.nn import functional as F

from lit_memory.memory.delta import delta_rule
from lit_memory.models.deltanet import DeltaLayer, DeltaNet, GatedDeltaNet
from lit_memory.recurrence import state_tensors, unroll

BOTH = pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def naive_head(layer, x, gates, S):
    """One token of one head: output and memory. x: q, k and v behind the convolution."""
    q, k, v = (F.silu(part) for part in x)
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    beta, decay, gate = gates
    S = decay[:, None, None] * S
    S = S + (beta[:, None] * k)[:, :, None] * (v - (k[:, :, None] * S).sum(1))[:, None]
    o = (q[:, :, None] * S).sum(1) / k.shape[-1] ** 0.5
    return rms(o, layer.out_norm.weight, layer.config.norm_eps) * gate, S


def naive_layer(layer, rows, conv, memory):
    """A layer for one token at a time and head by head: rows (B, T, D), conv (B, taps-1, C), memory (B, H, K, V)."""
    c, outs = layer.config, []
    K, V, H = c.key_width, c.value_width, c.heads
    for row in rows.unbind(1):
        projected = rms(row, layer.norm.weight, c.norm_eps) @ layer.in_proj.weight.mT
        window = torch.cat([conv, projected[:, None, : c.channels]], 1)
        conv = window[:, 1:]
        qkv = (window * layer.conv1d.weight[:, 0].mT).sum(1)
        rest, found, new = projected[:, c.channels :], [], []
        for h in range(H):
            x = [qkv[:, start : start + n] for start, n in ((h * K, K), (H * K + h * K, K), (2 * H * K + h * V, V))]
            beta = rest[:, h].sigmoid() * (2 if c.negative_eigenvalues else 1)
            decay, first = torch.ones_like(beta), H
            if layer.A_log is not None:
                decay = torch.exp(-layer.A_log[h].exp() * F.softplus(rest[:, H + h] + layer.dt_bias[h]))
                first = 2 * H
            gate = F.silu(rest[:, first + h * V :][:, :V]) if c.output_gate else 1
            o, S = naive_head(layer, x, (beta, decay, gate), memory[:, h])
            found.append(o)
            new.append(S)
        row = row + torch.cat(found, -1) @ layer.out_proj.weight.mT
        memory = torch.stack(new, 1)
        if layer.feed_forward is not None:
            ff = layer.feed_forward
            gate, up = (rms(row, ff.norm.weight, c.norm_eps) @ ff.up.weight.mT).chunk(2, -1)
            row = row + (F.silu(gate) * up) @ ff.down.weight.mT
        outs.append(row)
    return torch.stack(outs, 1), conv, memory


OTHER = {"conv_taps": 1, "heads": 1, "expand_k": 0.5, "expand_v": 2, "norm_eps": 0.1, "ff_mult": 0}


@BOTH
@pytest.mark.parametrize("settings", [{}, OTHER, {"negative_eigenvalues": True, "output_gate": True}], ids=str)
def test_slow_twin(build, tokens, name, settings):
    """Two segments equal the layer written out for one token at a time: hidden states, states and all gradients."""
    model, ids = build(name, **settings), tokens(2, 10)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    rows, slow = model.decoder.tokens(ids), []
    for layer, (conv, memory) in zip(model.layers, model.init_state(2), strict=True):
        rows, conv, memory = naive_layer(layer, rows, conv, memory)
        slow += [conv, memory]
    slow = [rms(rows, model.decoder.norm.weight, model.config.norm_eps) @ model.decoder.head.weight.mT, *slow]
    out = unroll(model, ids, 6, schedule="sequential")
    fast = [model.logits(out.hidden_BTD), *state_tensors(out.state)]
    assert_twins(fast, slow, model, 1e-9)


def test_sizes():
    """The papers' widths: K = V in DeltaNet; keys of 3/4 and values of 3/2 of the width, 6 width^2 parameters in Gated
    DeltaNet's mixer. Floats of state: the memory, and taps - 1 inputs of the convolution."""
    plain, gated = DeltaNet.Config(width=2048, heads=16), GatedDeltaNet.Config(width=2048, heads=6)
    assert (plain.key_width, plain.value_width) == (128, 128) and (gated.key_width, gated.value_width) == (256, 512)
    with torch.device("meta"):
        layer = GatedDeltaNet(GatedDeltaNet.Config(vocab_size=2, width=2048, heads=6, layers=1)).layers[0]
    matrices = sum(p.numel() for n, p in layer.named_parameters() if n in ("in_proj.weight", "out_proj.weight"))
    assert matrices == 6 * 2048**2 + 2 * 6 * 2048
    model = DeltaNet(DeltaNet.Config(vocab_size=128, width=64, layers=2))
    assert model.state_floats(model.init_state(3)) == 2 * (2 * 32 * 32 + 3 * 3 * 64)


def test_init():
    """Decays as in the reference: rates up to 16, steps log-uniform from 0.001 to 0.1; both without weight decay."""
    model = GatedDeltaNet(GatedDeltaNet.Config(vocab_size=3, width=512, heads=128, layers=1))
    layer = model.layers[0]
    steps = F.softplus(layer.dt_bias.double())
    assert 0 < layer.A_log.exp().min() < 1 < 15 < layer.A_log.exp().max() <= 16
    assert 0.99e-3 <= steps.min() < 2e-3 and 0.05 < steps.max() <= 0.101
    assert model.no_weight_decay == {"decoder.layers.0.A_log", "decoder.layers.0.dt_bias"}
    assert not DeltaNet(DeltaNet.Config(vocab_size=3, layers=1)).no_weight_decay


@BOTH
def test_the_rule_is_outside_of_autocast(build, tokens, name, monkeypatch):
    """Its products of matrices would be in bf16."""
    model, seen = build(name).float(), []

    def spy(*args):
        seen.append(torch.is_autocast_enabled("cpu"))
        return delta_rule(*args)

    monkeypatch.setattr("lit_memory.models.deltanet.delta_rule", spy)
    with torch.autocast("cpu", torch.bfloat16):
        state = unroll(model, tokens(2, 20)).state
        assert torch.is_autocast_enabled("cpu")
    assert all(t.dtype == torch.float32 for t in state_tensors(state)) and seen == [False] * len(model.layers)


@BOTH
def test_segments_are_read_as_one_sequence(build, tokens, name, monkeypatch):
    """A layer runs once for many segments, and once for each where the gradient is cut."""
    model, calls = build(name), []
    mix = DeltaLayer.mix  # a hook would see every segment
    monkeypatch.setattr(DeltaLayer, "mix", lambda *args: calls.append(args[1].shape[1]) or mix(*args))
    unroll(model, tokens(2, 40), 4, schedule="auto")
    assert calls == [40, 40]
    calls.clear()
    unroll(model, tokens(2, 40), 4, schedule="auto", bptt=3)
    assert calls == [4] * 7 + [12] + [4] * 7 + [12]
