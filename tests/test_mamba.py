"""Mamba against its specification (spec 8), and what it shares with RWKV and DeltaNet: any segmentation, and masked
tokens that are skipped."""

import pytest
import torch
from conftest import assert_twins
from torch.nn import functional as F

from lit_memory.memory.scan import selective_scan
from lit_memory.models.mamba import DELTA, Mamba
from lit_memory.recurrence import state_tensors, unroll

TOKEN_RECURRENT = ["mamba", "rwkv", "deltanet", "gated_deltanet"]
CUTS = [[23], [1, 22], [2, 2, 19], [7, 1, 1, 9, 5], [3] * 7 + [2]]


def same(a, b, tol=1e-10):
    return all(
        torch.allclose(x, y, rtol=tol, atol=tol) for x, y in zip(state_tensors(a), state_tensors(b), strict=True)
    )


def read(model, ids, lengths, masks=None):
    """Hidden states and final state, segment by segment."""
    state, hidden = model.init_state(len(ids)), []
    parts = [None] * len(lengths) if masks is None else masks.split(lengths, dim=1)
    for part, mask in zip(ids.split(lengths, dim=1), parts, strict=True):
        out, state = model.step(state, part, mask)
        hidden.append(out)
    return torch.cat(hidden, dim=1), state


@pytest.mark.parametrize("name", TOKEN_RECURRENT)
@pytest.mark.parametrize("lengths", CUTS[1:], ids=str)
def test_chunk(build, tokens, name, lengths):
    """T-MAMBA-chunk, T-RWKV-chunk: any split equals the full scan, in hidden states, final state and all gradients."""
    model, ids = build(name), tokens(2, 23)
    runs = [read(model, ids, cut) for cut in (lengths, [23])]
    assert same(runs[0], runs[1])
    found = []
    for hidden, state in runs:
        draw = torch.Generator().manual_seed(0)
        loss = sum(
            (t * torch.randn(t.shape, generator=draw, dtype=t.dtype)).sum() for t in (hidden, *state_tensors(state))
        )
        found.append(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", TOKEN_RECURRENT)
def test_step(build, tokens, name):
    """T-MAMBA-step, T-RWKV-step: token by token equals the scan."""
    model, ids = build(name), tokens(2, 23)
    assert same(read(model, ids, [1] * 23), read(model, ids, [23]))


@pytest.mark.parametrize("name", TOKEN_RECURRENT)
@pytest.mark.parametrize("lengths", CUTS, ids=str)
def test_masked_tokens_do_not_exist(build, tokens, name, lengths):
    """Wherever the padding is and however the sequence is cut, hidden states and final state are those of the real
    tokens alone."""
    model, ids = build(name), tokens(4, 23)
    mask = torch.rand(4, 23, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[1], mask[2], mask[3] = torch.arange(23) < 10, torch.arange(23) >= 10, False
    hidden, state = read(model, ids, lengths, mask)
    assert hidden.isfinite().all()
    for i in range(4):
        mine = model.reorder(state, torch.tensor([i]))
        alone = (
            read(model, ids[i, mask[i]][None], [int(mask[i].sum())])
            if mask[i].any()
            else (hidden[:1, :0], model.init_state(1))
        )
        assert same(hidden[i, mask[i]][None], alone[0]) and same(mine, alone[1])


@pytest.mark.parametrize("name", TOKEN_RECURRENT)
def test_reading_leaves_the_state(build, tokens, name):
    """write=False gives the same hidden states and the very same state."""
    model, ids = build(name), tokens(2, 9)
    state = unroll(model, tokens(2, 5)).state
    (writing, new), (reading, old) = (model.step(state, ids, write=w) for w in (True, False))
    assert torch.equal(writing, reading) and not same(new, state)
    assert all(a is b for a, b in zip(state_tensors(old), state_tensors(state), strict=True))


@pytest.mark.parametrize("name", TOKEN_RECURRENT)
def test_the_state_holds_no_more_than_its_own_memory(build, tokens, name):
    """No part of the state is a view that keeps a segment, or a chunk of states, alive."""
    model = build(name)
    for t in state_tensors(unroll(model, tokens(2, 50), 40).state):
        assert t.untyped_storage().nbytes() == t.numel() * t.element_size()


@pytest.mark.parametrize("name", TOKEN_RECURRENT)
def test_residual_stream_is_fp32_under_bf16_weights(build, tokens, name):
    model, seen = build(name).bfloat16(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, args, out: seen.append(out[0].dtype))
    assert unroll(model, tokens(1, 3)).hidden_BTD.dtype == torch.bfloat16 and seen == [torch.float32] * 2


def test_the_scan_is_outside_of_autocast(build, tokens, monkeypatch):
    """Its products of matrices would be in bf16."""
    model, seen = build("mamba").float(), []
    monkeypatch.setattr(
        "lit_memory.models.mamba.selective_scan",
        lambda *args: seen.append(torch.is_autocast_enabled("cpu")) or selective_scan(*args),
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert all(
            t.dtype == torch.float32 for t in state_tensors(unroll(model, tokens(2, 20)).state)
        ) and torch.is_autocast_enabled("cpu")
    assert seen == [False] * len(model.layers)


def test_conv(build, tokens):
    """T-MAMBA-conv: the first taps-1 tokens of a segment see the inputs that the state keeps, also where segments are
    shorter than that."""
    model, ids, seen = build("mamba", layers=1), tokens(2, 12), []
    model.layers[0].x_proj.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    read(model, ids, [12])
    for length in (1, 2, 3, 5):
        del seen[1:]
        read(model, ids, [length] * (12 // length) + [12 % length] * (12 % length > 0))
        assert torch.allclose(torch.cat(seen[1:], 1), seen[0], rtol=1e-12, atol=1e-12)
    state = unroll(model, ids[:, :6]).state
    del seen[1:]
    model.step((state[0]._replace(conv_BJE=torch.zeros_like(state[0].conv_BJE)),), ids[:, 6:])
    moved = (seen[1] - seen[0][:, 6:]).abs().amax((0, 2)) > 1e-6
    assert moved.tolist() == [True] * 3 + [False] * 3


def naive_layer(layer, rows, conv, h):
    """Spec 8 for one token at a time: rows (B, T, D), conv (B, taps-1, E), h (B, E, N)."""
    c, outs = layer.config, []
    for row in rows.unbind(1):
        normed = row / (row.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * layer.norm.weight
        x, gate = (layer.in_proj.weight @ normed.mT).mT.split(c.channels, -1)
        window = torch.cat([conv, x[:, None]], 1)
        conv = window[:, 1:]
        x = F.silu((window * layer.conv1d.weight[:, 0].mT).sum(1) + layer.conv1d.bias)
        small, b, cc = (x @ layer.x_proj.weight.mT).split([c.rank, c.state_dim, c.state_dim], -1)
        delta = F.softplus(small @ layer.dt_proj.weight.mT + layer.dt_proj.bias)
        h = torch.exp(-delta[:, :, None] * layer.A_log.exp()) * h + (delta * x)[:, :, None] * b[:, None]
        y = (h * cc[:, None]).sum(-1) + layer.D * x
        outs.append(row + (y * F.silu(gate)) @ layer.out_proj.weight.mT)
    return torch.stack(outs, 1), conv, h


@pytest.mark.parametrize(
    "settings",
    [{}, {"conv_taps": 1, "expand": 1, "dt_rank": 3, "state_dim": 2, "norm_eps": 0.1}],
    ids=["default", "other"],
)
def test_slow_twin(build, tokens, settings):
    """Two segments equal spec 8 written out for one token at a time: hidden states, states and all gradients
    (1e-10)."""
    model, ids = build("mamba", tie_embeddings=False, **settings), tokens(2, 10)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    rows, slow = model.decoder.tokens(ids), []
    for layer, (conv, h) in zip(model.layers, model.init_state(2), strict=True):
        rows, conv, h = naive_layer(layer, rows, conv, h)
        slow += [conv, h]
    scale = (rows.square().mean(-1, keepdim=True) + model.config.norm_eps).rsqrt()
    slow = [model.decoder.head(rows * scale * model.decoder.norm.weight), *slow]
    hidden, state = read(model, ids, [4, 6])
    fast = [model.logits(hidden), *state_tensors(state)]
    assert_twins(fast, slow, model, 1e-9)


def test_sizes():
    """Spec 8 and 14: mamba-130m and the tiny model of associative retrieval; width * expand * (state_dim + 3) state
    floats per layer."""

    def count(**sizes):
        with torch.device("meta"):
            return sum(p.numel() for p in Mamba(Mamba.Config(**sizes)).parameters())

    assert count(vocab_size=50_280, layers=24, width=768) == 129_135_360
    assert count(vocab_size=128, layers=4, width=128, state_dim=32) == 532_096
    model = Mamba(Mamba.Config(vocab_size=128, state_dim=32))
    assert model.state_floats(model.init_state(3)) == 4 * 256 * (32 + 3)


def test_init():
    """Spec 8: A = -(1..N) in every channel, D = 1, Delta of a token of zeros log-uniform in ``DELTA``, W_Delta uniform
    in +-R^-1/2."""
    layer = Mamba(Mamba.Config(vocab_size=3, width=512, layers=1)).layers[0]
    assert torch.allclose(-layer.A_log.exp(), -torch.arange(1.0, 17).expand(1024, -1)) and bool((layer.D == 1).all())
    log_delta = F.softplus(layer.dt_proj.bias.double()).log()
    low, high = torch.tensor(DELTA, dtype=torch.float64).log()
    assert low - 1e-3 <= log_delta.min() and log_delta.max() <= high + 1e-3
    assert abs(log_delta.mean() - (low + high) / 2) < 0.15 and abs(log_delta.std() - (high - low) / 12**0.5) < 0.1
    assert 0.97 < layer.dt_proj.weight.abs().max() * 32**0.5 <= 1
