"""Each architecture against its paper: reduction identities, naive twins, worked sizes; every knob; precision.

All comparisons are in fp64 on the tiny models of ``conftest.py``, unless a test is about precision.
"""

import copy
import dataclasses
import functools
import typing

import pytest
import torch
from conftest import TINY, VOCAB, build_model, row
from torch.nn import functional as F

from lit_memory.hf.huggingface import load_huggingface
from lit_memory.models.armt import ARMT
from lit_memory.models.attention import attention_mask, rotate
from lit_memory.models.decoder import BackboneConfig, Decoder
from lit_memory.recurrence import state_tensors, unroll
from lit_memory.registry import MODELS, load_class, model_size, sketch

N = 5  # tokens per segment
MEMORY = ["rmt", "rmt_r", "prmt", "armt", "tarm"]


def grads(loss, parameters):
    return torch.autograd.grad(loss, list(parameters), materialize_grads=True)


def weighted(tensor, seed=3):
    """A random functional: the plain sum of normalised hidden states is constant."""
    return (tensor * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=tensor.dtype)).sum()


# --- backbone


def hugging_face(family, config):
    """A tiny Hugging Face model of the same sizes, with random weights (biases and norms included)."""
    import transformers as hf

    sizes = {"vocab_size": config.vocab_size, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    if family == "gpt2":
        theirs = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **sizes))
    else:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": config.rotary_fraction}
        theirs = hf.GPTNeoXForCausalLM(
            hf.GPTNeoXConfig(
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                rope_parameters=rope,
                **sizes,
            )
        )
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return theirs.double().eval()


@pytest.mark.parametrize(
    ("family", "rotary_fraction"), [("gpt2", 0.5), ("gpt_neox", 0.5), ("gpt_neox", 0.4)]
)  # 0.4: an odd number of channels
def test_rmt_hf(build, tokens, family, rotary_fraction):
    """T-RMT-hf: with read memory only, RMT is prompt tuning of the Hugging Face model whose weights it imports."""
    model, ids = build("rmt", family=family, positions=64, rotary_fraction=rotary_fraction), tokens(2, 9)
    theirs = hugging_face(family, model.config)
    model.decoder.load_state_dict(load_huggingface(theirs, "rmt").decoder.state_dict())
    rows = torch.cat([model.memory.expand(2, -1, -1), theirs.get_input_embeddings()(ids)], dim=1)
    prompted = theirs(inputs_embeds=rows).logits[:, model.config.memory_tokens :]
    hidden, _ = model.step(model.init_state(2), ids, write=False)
    assert torch.allclose(
        model.logits(hidden), prompted, rtol=1e-5, atol=1e-5
    )  # Hugging Face computes its rotary table in fp32


@pytest.mark.parametrize("dims", [6, 5])
def test_rotate_slow_twin(dims):
    """Channel pairs (i, i+3) turn by position * 10000^(-2i/dims), the others stay; an odd number is rounded up to whole
    pairs."""
    x = torch.randn(7, 10, dtype=torch.float64)
    out = rotate(x[None, None], dims)[0, 0]
    for position in range(7):
        for i in range(3):
            angle = torch.tensor(position * 10000 ** (-2 * i / dims), dtype=torch.float64)
            turned = torch.complex(x[position, i], x[position, i + 3]) * torch.polar(torch.ones_like(angle), angle)
            assert torch.allclose(torch.view_as_real(turned), out[position, [i, i + 3]])
    assert torch.equal(out[:, 6:], x[:, 6:])


def test_attention_mask_worked_example():
    """Two rows over three keys of which the first is padding: causal, no padding, and every row sees itself."""
    assert attention_mask(torch.tensor([[False, True, False]]), 2).int().tolist() == [[[[0, 1, 0], [0, 1, 1]]]]


def test_parameter_counts():
    """Spec 1 and 6.5: tiny NeoX 826,112, or 562,944 at ff_mult 2; ARMT adds 98,820 and its 4 memory tokens; GPT-2 small
    124,439,808."""

    def count(module):
        return sum(p.numel() for p in module.parameters())

    with torch.device("meta"):
        assert count(Decoder(BackboneConfig(vocab_size=128))) == 826_112
        assert count(Decoder(BackboneConfig(vocab_size=128, ff_mult=2))) == 562_944
        gpt2 = BackboneConfig(family="gpt2", vocab_size=50257, layers=12, width=768, heads=12)
        assert count(Decoder(gpt2)) == 124_439_808
    assert count(ARMT(ARMT.Config(vocab_size=128))) == 826_112 + 98_820 + 4 * 128


def test_position_table_is_checked(build, tokens):
    """A segment longer than the position table raises, in the configuration and at run time; the message says what to
    do."""
    model = build("rmt", family="gpt2", positions=8)
    model.config.check_segment(4)
    for too_long in (lambda: model.config.check_segment(5), lambda: unroll(model, tokens(1, 5))):
        with pytest.raises(ValueError, match=r"position.*segment"):
            too_long()
    build("rmt", positions=8).config.check_segment(500)


@pytest.mark.parametrize("name", MODELS)
def test_a_sketch_has_the_sizes_of_the_model(build, name):
    """Weights that are neither allocated nor drawn, and the state that is made of them."""
    model = build(name).float()
    settings = {"name": name, **dataclasses.asdict(model.config)}
    drawn, sizes = sketch(settings), model_size(settings)
    shapes = [
        [(key, t.shape, t.dtype) for key, t in each.state_dict(keep_vars=True).items()] for each in (drawn, model)
    ]
    assert shapes[0] == shapes[1] and all(p.is_meta for p in drawn.parameters())
    states = [[(t.shape, t.dtype) for t in state_tensors(each.init_state(1))] for each in (drawn, model)]
    assert states[0] == states[1] and sizes["state_floats"] == model.state_floats(model.init_state(1))


@pytest.mark.parametrize("name", MODELS)
def test_config_rows(build, tokens, name):
    """``Config.rows`` is the number of rows that really enter the first layer."""
    model, seen = build(name), []
    model.decoder.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    unroll(model, tokens(1, N))
    assert seen == [model.config.rows(N)]


def test_decoder_needs_a_vocabulary():
    """vocab_size 0 means "the task's" and must be filled in before a model is built."""
    with pytest.raises(ValueError, match="vocab_size=0"):
        Decoder(BackboneConfig())


# --- Transformer with a window


def test_sliding_window(build, tokens):
    """T-SW: a window that covers the sequence reproduces full causal attention, whatever the segments; a shorter one
    does not."""
    ids = tokens(2, 23)
    full = unroll(build("transformer", window=0), ids).hidden_BTD
    for segment_len in (1, 4, 23):
        assert torch.allclose(
            unroll(build("transformer", window=22), ids, segment_len).hidden_BTD, full, rtol=1e-10, atol=1e-10
        )
    assert not torch.allclose(unroll(build("transformer", window=6), ids, 4).hidden_BTD, full, atol=1e-3)


@pytest.mark.parametrize(("name", "size"), [("transformer", "window"), ("xl", "mem_len")])
@pytest.mark.parametrize("count", [2, 4, 7, 12])
def test_padding_takes_no_place_in_a_window(build, name, size, count):
    """A short segment and its padding leave what the segment alone leaves: the next tokens see its last ones, at their
    distance."""
    model = build(name, **{size: count})
    ids = torch.arange(1, 13)[None] % model.config.vocab_size
    state = model.step(model.init_state(1), ids[:, :5])[1]
    alone = model.step(model.step(state, ids[:, 5:8])[1], ids[:, 8:])[0]
    padded, mask = F.pad(ids[:, 5:8], (0, 3)), torch.tensor([[True] * 3 + [False] * 3])
    _, state = model.step(state, padded, mask)
    seen = model.step(state, ids[:, 8:])[0]
    assert torch.allclose(seen, alone, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(seen, model.step(model.init_state(1), ids[:, 8:])[0], atol=1e-3)


@pytest.mark.parametrize("window", [0, 1, 3, 8])
def test_window_slow_twin(build, tokens, window):
    """A window equals one full pass in which each token sees its segment and the ``window`` tokens before the
    segment."""
    ids, position = tokens(2, 4 * N), torch.arange(4 * N)
    model = build("transformer", window=window)
    start = position // N * N
    visible = (position[None] <= position[:, None]) & (position[None] >= start[:, None] - window)
    rows = model.decoder.tokens(ids)
    for layer in model.decoder.layers:
        rows = layer.block(rows, visible)
    assert torch.allclose(unroll(model, ids, N).hidden_BTD, model.decoder.norm(rows), rtol=1e-10, atol=1e-10)


# --- RMT


def test_rmt_m0(build, tokens):
    """T-RMT-m0: without memory tokens RMT reads every segment by itself."""
    model, ids = build("rmt", memory_tokens=0), tokens(2, 3 * N)
    apart = [model.decoder.run(model.decoder.add_positions(model.decoder.tokens(part))) for part in ids.split(N, dim=1)]
    assert torch.equal(unroll(model, ids, N, schedule="sequential").hidden_BTD, torch.cat(apart, dim=1))


@pytest.mark.parametrize("name", MEMORY)
def test_rmt_one_seg(build, tokens, name):
    """T-RMT-one-seg, T-ARMT-genmode: the write rows do not change what the tokens of their segment see; write=False
    returns the state as it was."""
    model, ids = build(name), tokens(2, N)
    state = model.init_state(2)
    (writing, new), (reading, old) = (model.step(state, ids, write=w) for w in (True, False))
    assert torch.allclose(writing, reading, rtol=1e-12, atol=1e-12)
    assert not torch.equal(next(state_tensors(new)), next(state_tensors(state)))
    assert all(a is b for a, b in zip(state_tensors(old), state_tensors(state), strict=True))


def naive_rmt(model, ids, after_norm=True):
    """Spec 3, written out; ``after_norm=False`` carries the memory from before the final norm."""
    m, memory, hidden = len(model.memory), model.memory.expand(len(ids), -1, -1), []
    for part in ids.split(N, dim=1):
        rows = torch.cat([memory, model.decoder.tokens(part), memory], dim=1)
        for block in model.decoder.layers:
            rows = block(rows)
        normed = model.decoder.norm(rows)
        memory = (normed if after_norm else rows)[:, -m:]
        hidden.append(normed[:, m:-m])
    return torch.cat(hidden, dim=1), memory


def test_rmt_slow_twin(build, tokens):
    """RMT equals spec 3 written out: rows, cut, and the memory that is carried after the final norm."""
    model, ids = build("rmt"), tokens(2, 3 * N)
    hidden, memory = naive_rmt(model, ids)
    out = unroll(model, ids, N)
    assert torch.allclose(out.hidden_BTD, hidden, rtol=1e-10) and torch.allclose(out.state, memory, rtol=1e-10)
    assert model.state_floats(out.state) == 2 * 16


# --- PRMT


@pytest.mark.parametrize("after_norm", [False, True])
def test_prmt_l1(build, tokens, after_norm):
    """T-PRMT-L1: one layer of PRMT is RMT if and only if RMT carries its memory from before the final norm."""
    prmt, rmt, ids = build("prmt", layers=1), build("rmt", layers=1), tokens(2, 3 * N)
    rmt.decoder.load_state_dict(
        {
            k.replace("layers.0.block.", "layers.0."): v
            for k, v in prmt.decoder.state_dict().items()
            if "memory" not in k
        }
    )
    rmt.memory.data.copy_(prmt.layers[0].memory)
    hidden, memory = naive_rmt(rmt, ids, after_norm)
    out = unroll(prmt, ids, N)
    assert (
        torch.allclose(out.hidden_BTD, hidden, atol=1e-10)
        == torch.allclose(out.state[0], memory, atol=1e-10)
        == (not after_norm)
    )


def test_prmt_local(build, tokens):
    """T-PRMT-local: the memory of layer l depends on no layer above l, in any segment."""
    model, ids = build("prmt", layers=3), tokens(2, 4 * N)
    before = unroll(model, ids, N).state
    with torch.no_grad():
        model.layers[1].block.up.weight.mul_(1.5)
    after = unroll(model, ids, N).state
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, False]
    assert model.state_floats(after) == 3 * 2 * 16


def test_prmt_nograd(build, tokens):
    """T-PRMT-nograd: what is embedded at the memory rows is overwritten and gets no gradient, and so PRMT has no unused
    parameter."""
    model, ids = build("prmt"), tokens(2, N)
    rows = model.embed(ids).detach().requires_grad_()
    hidden = rows
    for layer, state in zip(model.layers, model.init_state(2), strict=True):
        hidden, _ = layer(hidden, state)
    (grad,) = grads(weighted(model.finish(hidden)), [rows])
    assert not grad[:, :2].any() and not grad[:, -2:].any() and (grad[:, 2:-2].abs().amax(-1) > 0).all()
    named = dict(model.named_parameters())
    loss = weighted(model.logits(unroll(model, tokens(2, 2 * N), N).hidden_BTD))
    assert all(g.any() for g in grads(loss, named.values()))


# --- ARMT


def slow_phi(x, nu):
    r = torch.cat([F.relu(x), F.relu(-x)])
    return torch.cat([r * torch.roll(r, j) for j in range(1, nu + 1)])


def slow_armt_layer(layer, rows, A, z, m, sequential, eps, nu):
    """Spec 6.2 for one sample: recall row by row, block, write token by token. rows (T, D), A (K, D), z (K)."""
    recalled = []
    for h in rows:
        q = slow_phi(layer.to_query.weight @ h, nu)
        recalled.append(h + A.T @ q / (z @ q + eps))
    rows = layer.block(torch.stack(recalled)[None])[0]
    first, new_A, new_z = not z.any(), A, z
    for written in rows[-m:]:
        if sequential:
            A, z, first = new_A, new_z, not new_z.any()
        k, v = slow_phi(layer.to_key.weight @ written, nu), layer.to_value.weight @ written
        beta = 1 / (1 + torch.exp(-(layer.to_beta.weight @ written + layer.to_beta.bias)))
        den = z @ k + eps
        gamma = 1.0 if first else min(max(1 - den.item() / (k @ k + eps).item(), 0.0), 1.0)
        new_A = new_A + beta * k[:, None] * (v - A.T @ k / den)[None, :]
        new_z = new_z + gamma * k
    return rows, new_A, new_z


@pytest.mark.parametrize(("update", "eps", "nu"), [("batch", 1e-5, 3), ("sequential", 1e-5, 3), ("batch", 0.1, 2)])
def test_armt_slow_twin(build, tokens, update, eps, nu):
    """ARMT equals spec 6.2 written out for one sample and one token at a time: hidden states, (A, z) and all gradients
    (1e-10)."""
    model, ids = build("armt", update=update, eps=eps, nu=nu), tokens(2, 4 * N)
    hidden, states = [], []
    for sample in ids:
        memories, outs = (
            [
                (torch.zeros(8 * nu, 16, dtype=torch.float64), torch.zeros(8 * nu, dtype=torch.float64))
                for _ in model.layers
            ],
            [],
        )
        for part in sample.split(N):
            rows = torch.cat([model.decoder.tokens(part), model.memory])
            for i, layer in enumerate(model.layers):
                rows, *memories[i] = slow_armt_layer(
                    layer, rows, *memories[i], m=2, sequential=update == "sequential", eps=eps, nu=nu
                )
            outs.append(model.decoder.norm(rows[:-2]))
        hidden.append(torch.cat(outs))
        states.append([t for memory in memories for t in memory])
    slow, out = [torch.stack(hidden), *map(torch.stack, zip(*states, strict=True))], unroll(model, ids, N)
    fast = [out.hidden_BTD, *state_tensors(out.state)]
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(fast, slow, strict=True))
    fast_grads, slow_grads = (grads(sum(map(weighted, ts)), model.parameters()) for ts in (fast, slow))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(fast_grads, slow_grads, strict=True))


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_armt_zero_init(build, tokens, family):
    """T-ARMT-zero-init: a fresh model is the backbone on [tokens; memory] for any number of segments, bit for bit."""
    model, ids = build("armt", family=family, value_std=0.0), tokens(2, 4 * N)
    apart = []
    for part in ids.split(N, dim=1):
        rows = model.decoder.add_positions(
            torch.cat([model.decoder.tokens(part), model.memory.expand(2, -1, -1)], dim=1)
        )
        for layer in model.layers:
            rows = layer.block(rows)
        apart.append(model.decoder.norm(rows)[:, :N])
    assert torch.equal(unroll(model, ids, N, schedule="sequential").hidden_BTD, torch.cat(apart, dim=1))
    assert not torch.equal(unroll(build("armt", family=family), ids, N).hidden_BTD[:, N:], torch.cat(apart[1:], dim=1))


def test_armt_initgrad(build, tokens):
    """T-ARMT-initgrad: with W_v = 0 the gradient reaches W_v alone; once W_v has moved, also W_q, W_k and w_beta."""
    model, ids = build("armt", value_std=0.0), tokens(2, 3 * N)
    parts = [
        layer.get_parameter(f"to_{part}.weight") for layer in model.layers for part in ("value", "query", "key", "beta")
    ]
    for moved in (False, True):
        found = [bool(g.any()) for g in grads(weighted(unroll(model, ids, N).hidden_BTD), parts)]
        assert found == [True, moved, moved, moved] * 2
        for value in parts[::4]:
            torch.nn.init.normal_(value, std=0.5)


def test_armt_first_skip(build, tokens):
    """T-ARMT-first-skip: recall on the first segment gives exactly 0, so doing it equals skipping it."""
    model, ids = build("armt"), tokens(2, N)
    rows = model.embed(ids)
    for layer, state in zip(model.layers, model.init_state(2), strict=True):
        assert not layer.recall(rows, state, 2).any()
        rows = layer.block(rows)
    assert torch.equal(unroll(model, ids, schedule="sequential").hidden_BTD, model.finish(rows))


@pytest.mark.parametrize("change", [{"eps": 0.5}, {"denom_floor": 0.9}, {"use_denom": False}], ids=str)
def test_armt_flags_reach_recall_and_write(build, tokens, change):
    """The flags that recall and write share act on both."""
    default, other = build("armt"), build("armt", **change)
    rows, state = default.embed(tokens(2, N)), unroll(default, tokens(2, 4 * N), N).state[0]
    (recall_a, write_a), (recall_b, write_b) = (
        (m.layers[0].recall(rows, state, 2), m.layers[0].memorize(rows[:, -2:], state)) for m in (default, other)
    )
    assert not torch.allclose(recall_a, recall_b, rtol=1e-3) and not torch.allclose(
        write_a.A_BKD, write_b.A_BKD, rtol=1e-3
    )


def test_armt_recall_on_mem_rows(build, tokens):
    """recall_on_mem_rows=False adds nothing to the memory rows and changes nothing for the tokens."""
    for flag in (True, False):
        model = build("armt", recall_on_mem_rows=flag)
        rows, state = model.embed(tokens(2, N)), unroll(model, tokens(2, N)).state[0]
        recalled, everywhere = model.layers[0].recall(rows, state, 2), model.layers[0].recall(rows, state, 0)
        assert torch.equal(recalled[:, :N], everywhere[:, :N]) and recalled[:, :N].any()
        assert torch.equal(recalled[:, N:], everywhere[:, N:] if flag else torch.zeros(2, 2, 16, dtype=torch.float64))


def test_armt_state_size(build, tokens):
    """Spec 6.7: 6 * memory_dim * (width + 1) floats per layer; the default sizes of the paper carry 4 * 24,768."""
    model = build("armt")
    assert model.state_floats(unroll(model, tokens(1, N)).state) == 2 * 6 * 4 * (16 + 1)
    paper = ARMT(ARMT.Config(vocab_size=19))
    assert paper.state_floats(paper.init_state(1)) == 4 * 24_768


# --- TARM


def test_tarm_alpha1(build, tokens):
    """T-TARM-alpha1: alpha = 1 is RMT, bit for bit."""
    tarm, rmt, ids = build("tarm", alpha=1.0), build("rmt"), tokens(2, 4 * N)
    tarm.load_state_dict(rmt.state_dict())
    (a, state_a), (b, state_b) = unroll(tarm, ids, N), unroll(rmt, ids, N)
    assert torch.equal(a, b) and torch.equal(state_a, state_b)


def test_tarm_alpha0(build, tokens):
    """T-TARM-alpha0: alpha = 0 never changes the memory, so the segments are independent of each other."""
    model, ids = build("tarm"), tokens(2, 3 * N)
    model.config.alpha = 0.0
    out = unroll(model, ids, N, schedule="sequential")
    apart = [unroll(model, part, schedule="sequential").hidden_BTD for part in ids.split(N, dim=1)]
    assert torch.equal(out.state, model.init_state(2)) and torch.equal(out.hidden_BTD, torch.cat(apart, dim=1))


@pytest.mark.parametrize("alpha", [0.2, 0.7])
def test_tarm_closed(build, tokens, alpha):
    """T-TARM-closed: E_s = (1-a)^s E_0 + sum_i a (1-a)^(s-i) M_i, with the M_i that the model itself wrote."""
    model, written = build("tarm", alpha=alpha), []
    update = model.update
    model.update = lambda old, new: written.append(new) or update(old, new)
    state = unroll(model, tokens(2, 5 * N), N).state
    closed = (1 - alpha) ** 5 * model.init_state(2) + sum(
        alpha * (1 - alpha) ** (4 - i) * m for i, m in enumerate(written)
    )
    assert len(written) == 5 and torch.allclose(state, closed, rtol=1e-12)


@pytest.mark.parametrize(("alpha", "ratio"), [(0.2, 0.111), (0.7, 0.538)])
def test_tarm_variance(build, alpha, ratio):
    """T-TARM-variance: of independent M_s the stationary variance ratio is alpha / (2 - alpha)."""
    model = build("tarm", alpha=alpha)
    average = torch.zeros(40_000, 1, 1)
    for _ in range(60):
        average = model.update(average, torch.randn(40_000, 1, 1))
    assert average.var().item() == pytest.approx(ratio, rel=0.03)


def test_tarm_path(build):
    """T-TARM-path: dE_s / dM_i = a (1-a)^(s-i)."""
    model, memory = build("tarm", alpha=0.2), torch.randn(6, 1, 2, 16, dtype=torch.float64, requires_grad=True)
    average = torch.zeros(1, 2, 16, dtype=torch.float64)
    for written in memory:
        average = model.update(average, written)
    (grad,) = grads(average.sum(), [memory])
    expected = torch.tensor([0.2 * 0.8 ** (5 - i) for i in range(6)], dtype=torch.float64)
    assert torch.allclose(grad, expected[:, None, None, None].expand_as(grad))


# --- every knob


TITANS = ["lmm", "mac", "mag", "mal"]
# (models, their settings, other values): each flip must be visible in sizes, logits or gradients.
FLIPS: list[tuple[list[str], dict[str, object], dict[str, object]]] = [
    (["transformer"], {"window": 0}, {"head_dim": 6, "qk_norm": True}),
    (["transformer"], {"window": 0, "family": "llama"}, {"family": "gemma", "post_norms": True}),
    (["transformer"], {"window": 0}, {"query_scale": 0.1, "score_cap": 0.1, "logit_cap": 0.1}),
    (["transformer"], {"window": 0}, {"rotary_bases": [2.0, 500.0]}),
    (["transformer"], {"window": 0}, {"family": "gpt2", "tie_embeddings": True, "dropout": 0.5, "norm_eps": 0.5}),
    (
        ["transformer"],
        {},
        {
            "vocab_size": 23,
            "layers": 3,
            "width": 24,
            "heads": 4,
            "ff_mult": 2,
            "rotary_fraction": 0.25,
            "init_std": 0.3,
            "embedding_std": 0.5,
            "window": 3,
            "window_detach": True,
        },
    ),
    (["transformer"], {"family": "gpt2", "window": 0}, {"positions": 40}),
    (["transformer"], {"family": "llama"}, {"kv_heads": 1, "qkv_bias": True, "rotary_base": 500.0, "ff_mult": 1.5}),
    (MEMORY, {"family": "gpt2"}, {"wrap_pos": True}),
    (["rmt"], {}, {"memory_tokens": 3}),
    (["rmt_r"], {}, {"memory_tokens": 3, "retrieval": "top_1", "formula": "paper", "dropout": 0.5, "norm_eps": 0.5}),
    (["prmt"], {}, {"memory_tokens": 3}),
    (
        ["armt"],
        {},
        {
            "memory_tokens": 3,
            "memory_dim": 5,
            "nu": 2,
            "update": "sequential",
            "gamma": "off",
            "beta_on_z": True,
            "eps": 0.5,
            "denom_floor": 0.9,
            "normalize_phi": True,
            "use_denom": False,
            "recall_on_mem_rows": False,
            "value_std": 0.2,
            "gamma_eps": 0.5,
            "beta_init": 1.0,
            "memory_layers": [1],
        },
    ),
    (["armt"], {}, {"gamma": "raw"}),
    (["armt"], {"past_tokens": 3}, {"past_tokens": 5, "sink": True}),
    (["tarm"], {}, {"memory_tokens": 3, "alpha": 0.7}),
    (
        ["xl", "rmt_xl"],
        {},
        {
            "vocab_size": 23,
            "layers": 3,
            "width": 24,
            "heads": 4,
            "head_width": 6,
            "ff_width": 24,
            "mem_len": 3,
            "clamp_len": 4,
            "tie_embeddings": False,
            "dropout": 0.5,
            "norm_eps": 0.5,
            "init_std": 0.3,
            "mem_detach": True,
        },
    ),
    (["rmt_xl"], {}, {"alpha": 0.7, "memory_tokens": 3}),
    (["xl", "rmt_xl"], {"tie_embeddings": False}, {"cutoffs": [5, 11]}),
    (
        ["larimar"],
        {},
        {
            "encoder_layers": 1,
            "latent_width": 7,
            "slots": 3,
            "keys": "one_hot",
            "line_tokens": 3,
            "pad_id": 3,
            "bos_id": 3,
            "solver": "svd",
            "solver_steps": 3,
            "past": False,
            "embedding": False,
            "write_noise": 0.1,
            "read_noise": 0.1,
            "encoder_width": 12,
            "encoder_heads": 4,
        },
    ),
    (
        ["memreasoner"],
        {},
        {
            "encoder_width": 12,
            "encoder_heads": 4,
            "encoder_layers": 1,
            "latent_width": 6,
            "slots": 3,
            "line_tokens": 3,
            "pad_id": 3,
            "bos_id": 3,
            "solver": "newton",
            "solver_steps": 3,
            "past": False,
            "embedding": False,
            "write_noise": 0.1,
            "read_noise": 0.1,
            "temporal": "none",
            "gru_layers": 2,
            "bidirectional": False,
            "hops": 2,
            "readout": "st",
            "temperature": 0.3,
            "test_readout": "hard",
        },
    ),
    (["memreasoner"], {}, {"temporal": "sinusoidal"}),
    (["larimar"], {"keys": "gaussian"}, {"bandwidth": 0.3, "prefix_tokens": 2}),
    (["larimar"], {"line_tokens": 1, "keys": "gaussian"}, {"distinct": True}),
    (["memreasoner"], {"temporal": "sinusoidal"}, {"temporal": "sinusoidal_from_end"}),
    (["memreasoner"], {"hops": 3}, {"alpha": 3.0, "tolerance": 0.5, "test_alpha": 3.0, "update_lines": 2}),
    (["memreasoner"], {"line_tokens": 5}, {"memory": False}),
    (["armt"], {"gamma": "raw"}, {"gamma_detach": False}),
    (
        ["mamba"],
        {},
        {
            "state_dim": 3,
            "expand": 3,
            "conv_taps": 2,
            "dt_rank": 2,
            "norm_eps": 0.5,
            "tie_embeddings": False,
            "embedding_std": 0.5,
            "wd_all": False,
        },
    ),
    (
        ["deltanet", "gated_deltanet"],
        {},
        {
            "heads": 4,
            "expand_k": 0.5,
            "expand_v": 2.0,
            "conv_taps": 2,
            "negative_eigenvalues": True,
            "ff_mult": 2.0,
            "norm_eps": 0.5,
            "tie_embeddings": True,
            "init_std": 0.5,
            "embedding_std": 0.5,
        },
    ),
    (["deltanet"], {}, {"output_gate": True}),
    (["gated_deltanet"], {}, {"output_gate": False}),
    (["rwkv"], {}, {"heads": 4, "ff_mult": 4.0, "norm_eps": 0.5, "embedding_std": 0.5, "zero_init": True}),
    (
        TITANS,
        {},
        {
            "vocab_size": 23,
            "layers": 3,
            "width": 24,
            "norm_eps": 0.5,
            "persistent": 3,
            "chunk": 2,
            "memory_depth": 1,
            "memory_expand": 2,
            "memory_heads": 2,
            "memory_activation": "gelu",
            "memory_residual": True,
            "memory_std": 0.1,
            "momentum": False,
            "forget": False,
            "conv_taps": 0,
            "per_chunk_gates": True,
            "half_loss": False,
            "theta_max": 0.1,
            "damped": False,
            "normalized": False,
            "alpha_init": 0.1,
            "eta_init": 0.9,
            "theta_init": 0.1,
            "output_gate": "sigmoid",
            "ff_mult": 0,
            "tie_embeddings": True,
            "embedding_std": 0.5,
        },
    ),
    (["mac", "mag", "mal"], {}, {"heads": 4, "window": 3}),
    (["mac"], {}, {"fusion": "silu_prod", "long_tokens": 2, "causal_read": False, "write_prefix": True}),
    (["mag"], {}, {"fusion": "silu_prod"}),
    (TITANS, {"memory_depth": 1, "theta_max": 0.3}, {"exact": False}),
]


def observe(name, model, training=True):
    """Sizes and who is spared by weight decay, logits (dropout on, fixed noise) and the gradient of the last segment's
    loss."""
    model.train(training)
    segments = 4 if name in TITANS else 8  # they are slow, and many; gamma of ARMT leaves [0, 1] late
    ids = torch.randint(VOCAB, (2, segments * N), generator=torch.Generator().manual_seed(7))
    torch.manual_seed(1)
    logits = model.logits(unroll(model, ids, N).hidden_BTD)
    gradient = torch.cat([g.flatten() for g in grads(weighted(logits[:, -N:]), model.parameters())])
    return (
        [(p.shape, name in getattr(model, "no_weight_decay", ())) for name, p in model.named_parameters()],
        logits,
        gradient,
    )


@functools.cache
def unflipped(name, settings, training):
    """A model before the flip, and what is observed of it."""
    model = build_model(name, **dict(settings))
    return model, observe(name, model, training)


def flips():
    """(model, field, other value, settings) of FLIPS, and of every field of a model that FLIPS does not have."""
    listed = [(name, f, value, given) for names, given, other in FLIPS for name in names for f, value in other.items()]
    shared = {f.name for f in dataclasses.fields(BackboneConfig)} | {"inputs"}  # of these, tests/test_time_series.py
    known = {(name, field) for name, field, *_ in listed}
    for name in MODELS:
        own = [f for f in dataclasses.fields(load_class("model", name).Config) if f.name not in shared]
        listed += [(name, f.name, another(TINY.get(f.name, f.default)), {}) for f in own if (name, f.name) not in known]
    return listed


def another(value):
    """Some other value of a field. One that is no number has to be added to FLIPS."""
    assert isinstance(value, int | float), value
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2 + 0.1


@pytest.mark.parametrize(("name", "field", "value", "settings"), flips())
def test_every_knob_matters(build, name, field, value, settings):
    """A flipped field changes what the model computes, and nothing else was changed: weights of equal shape are the
    same."""
    training = field not in ("test_alpha", "test_readout", "update_lines")
    default, (sizes, logits, gradient) = unflipped(name, tuple(settings.items()), training)
    flipped = build(name, **{**settings, field: value})
    assert getattr(default.config, field) != value
    if not field.endswith(("_std", "_init")):
        weights = default.state_dict()
        own = flipped.state_dict()
        flipped.load_state_dict(
            {k: weights[k] if k in weights and weights[k].shape == v.shape else v for k, v in own.items()}
        )
    other_sizes, other_logits, other_gradient = observe(name, flipped, training)
    if sizes == other_sizes:
        changed = not torch.allclose(logits, other_logits, atol=1e-6)
        assert changed != field.endswith("_detach")
        assert changed or not torch.allclose(gradient, other_gradient, atol=1e-6)


INVALID = [
    *[
        ("transformer", field, 0)
        for field in ("layers", "width", "heads", "kv_heads", "ff_mult", "positions", "rotary_base")
    ],
    *[
        ("transformer", field, -1.0)
        for field in ("rotary_fraction", "dropout", "norm_eps", "init_std", "embedding_std")
    ],
    *[("transformer", field, 1.5) for field in ("rotary_fraction", "dropout")],
    ("transformer", "width", 15),
    ("transformer", "kv_heads", 3),
    ("transformer", "wrap_pos", True),
    ("transformer", "window", -1),
    ("transformer", "vocab_size", -1),
    ("rmt", "memory_tokens", -1),
    ("prmt", "memory_tokens", 0),
    ("rmt_r", "memory_tokens", 0),
    *[("xl", field, 0) for field in ("layers", "width", "heads", "head_width", "ff_width", "vocab_size")],
    *[("xl", field, -1) for field in ("mem_len", "clamp_len", "norm_eps", "init_std", "dropout")],
    ("xl", "width", 15),
    ("xl", "dropout", 1.0),
    *[("tarm", "alpha", value) for value in (-0.1, 0.0, 1.1)],
    *[("rmt_xl", "alpha", value) for value in (-0.1, 0.0, 1.1)],
    ("rmt_xl", "memory_tokens", -1),
    *[("larimar", field, 0) for field in ("encoder_layers", "latent_width", "slots", "solver_steps", "bandwidth")],
    *[("larimar", field, -1) for field in ("prefix_tokens", "line_tokens", "write_noise", "read_noise")],
    *[("larimar", "bos_id", value) for value in (-2, VOCAB)],
    *[
        ("memreasoner", field, value)
        for field, value in (("encoder_width", -1), ("encoder_width", 13), ("encoder_heads", 3))
    ],
    *[("memreasoner", field, 0) for field in ("gru_layers", "hops", "temperature")],
    *[("memreasoner", field, -1) for field in ("tolerance", "alpha", "test_alpha", "update_lines")],
    ("memreasoner", "latent_width", 7),
    ("memreasoner", "memory", False),
    ("larimar", "distinct", True),
    *[("armt", field, 0) for field in ("memory_tokens", "memory_dim", "nu", "eps")],
    *[("armt", field, -1.0) for field in ("eps", "denom_floor", "value_std", "gamma_eps", "past_tokens")],
    ("armt", "nu", 8),
    *[("mamba", field, 0) for field in ("layers", "width", "state_dim", "expand", "conv_taps")],
    *[("mamba", field, -1) for field in ("vocab_size", "norm_eps", "dt_rank", "embedding_std")],
    *[("rwkv", field, 0) for field in ("layers", "width", "heads", "ff_mult")],
    *[("rwkv", field, -1.0) for field in ("vocab_size", "norm_eps", "embedding_std", "ff_mult")],
    ("rwkv", "width", 15),
    *[("deltanet", field, 0) for field in ("layers", "width", "heads", "conv_taps", "expand_k", "expand_v")],
    *[("deltanet", field, -1) for field in ("vocab_size", "norm_eps", "ff_mult", "init_std", "embedding_std")],
    *[("deltanet", field, 0.7) for field in ("expand_k", "expand_v")],
    *[("lmm", field, 0) for field in ("layers", "width", "chunk", "memory_depth", "memory_expand", "memory_heads")],
    *[
        ("lmm", field, -1)
        for field in (
            "vocab_size",
            "norm_eps",
            "persistent",
            "conv_taps",
            "memory_std",
            "theta_max",
            "overshoot",
            "ff_mult",
            "embedding_std",
        )
    ],
    *[("lmm", field, value) for field in ("alpha_init", "eta_init", "theta_init") for value in (0.0, 1.0)],
    *[(name, field, 0) for name in ("mac", "mag", "mal") for field in ("heads", "window")],
    ("lmm", "memory_heads", 3),
    ("mac", "heads", 3),
    ("mac", "long_tokens", -1),
]
INVALID += [  # every field that is a choice
    (name, field, "bogus")
    for name in MODELS
    for field, kind in typing.get_type_hints(load_class("model", name).Config).items()
    if typing.get_origin(kind) is typing.Literal
]


@pytest.mark.parametrize(("name", "field", "value"), INVALID)
def test_invalid_config(build, name, field, value):
    """A value that makes no sense raises ValueError and names the field and the value."""
    with pytest.raises(ValueError, match=rf"{field}='?{value}"):
        build(name, **{field: value})


def test_invalid_combinations(build):
    """A rotated pair that does not fit the head, and a window without rotary positions, are refused."""
    with pytest.raises(ValueError, match=r"rotary_fraction=1.0.*head has 1"):
        build("transformer", heads=16, rotary_fraction=1.0)
    with pytest.raises(ValueError, match=r"window=7.*gpt_neox"):
        build("transformer", family="gpt2")


def test_invalid_memories_of_armt(build):
    """Layers that are none, and a key of zeros that would be divided by 0."""
    for layers in ([-1], [2], [1, 0], [1, 1]):
        with pytest.raises(ValueError, match=r"memory_layers=.*from 0 to 1"):
            build("armt", memory_layers=layers)
    with pytest.raises(ValueError, match=r"sink=True: .*past_tokens"):
        build("armt", sink=True)
    for flags in ({"gamma": "raw"}, {"gamma_detach": False}):
        with pytest.raises(ValueError, match=r"gamma_eps=0\.0: .*more than 0"):
            build("armt", gamma_eps=0.0, **flags)


def test_memory_starts_like_embeddings(build):
    """Spec 3 and 6.3: memory tokens are drawn with the standard deviation of the embedding table; W_v starts at 0
    unless told otherwise."""
    for std in (0.02, 1.0):
        for name in ("rmt", "tarm", "armt"):
            model = build(name, embedding_std=std, memory_tokens=400)
            assert model.memory.std().item() == pytest.approx(model.decoder.tokens.weight.std().item(), rel=0.05)
    assert not build("armt", value_std=0.0).layers[0].to_value.weight.any()


# --- precision


def test_fp32_follows_fp64(model, tokens):
    """fp32 agrees with fp64 to a few 1e-5 of the norm over eight segments (ARMT's small denominators amplify
    rounding)."""
    single, ids = copy.deepcopy(model).float(), tokens(2, 8 * N)
    out, exact = unroll(single, ids, N).hidden_BTD, unroll(model, ids, N).hidden_BTD
    assert out.dtype == torch.float32
    assert (out - exact).norm() < 5e-5 * exact.norm()


@pytest.mark.parametrize("gradients", [True, row(False)])
def test_every_tensor_is_on_the_device_of_the_model(model, tokens, gradients):
    """Forward and backward on a device without numbers, most of whose operations refuse a tensor of the CPU; tables
    that a pass on the CPU has left behind are not taken."""
    if model.looks_at_numbers:
        pytest.skip("looks at numbers, of which a device without any has none")
    for device in ("cpu", "meta"):
        model.zero_grad()
        model.to(device)
        with torch.set_grad_enabled(gradients):
            out = unroll(model, tokens(2, 3 * N).to(device), N, read_only=1)
            loss = model.logits(out.hidden_BTD).square().mean()
        if gradients:
            loss.backward()
    assert {t.device.type for t in [loss, *state_tensors(out.state)]} == {"meta"}


@pytest.mark.parametrize("weights", ["autocast", "bf16"])
def test_bf16(model, tokens, weights):
    """bf16, by autocast or in the weights: finite, near fp32, and the state stays fp32."""
    model, ids = model.float(), tokens(2, 3 * N)
    exact = unroll(model, ids, N).hidden_BTD
    low = copy.deepcopy(model).bfloat16() if weights == "bf16" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == "autocast"):
        out = unroll(low, ids, N)
        logits = low.logits(out.hidden_BTD)
    assert logits.isfinite().all() and logits.dtype == torch.bfloat16
    assert {t.dtype for t in state_tensors(out.state) if t.is_floating_point()} <= {torch.float32}
    error = (out.hidden_BTD.float() - exact).norm() / exact.norm()
    assert 0 < error < 0.1


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_state_precision(build, family):
    """The default state is at least fp32, and of the asked type where one is asked for."""
    for name in [*MEMORY, "xl"]:
        model = build(name, {"family": family})
        for weights, asked, expected in (
            (torch.bfloat16, None, torch.float32),
            (torch.float64, None, torch.float64),
            (torch.float32, torch.float64, torch.float64),
        ):
            assert {
                t.dtype for t in state_tensors(model.to(weights).init_state(1, dtype=asked)) if t.is_floating_point()
            } == {expected}
