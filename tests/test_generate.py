"""The open segment: what models keep of it, against reading all of it again."""

import copy
import sys

import pytest
import torch
from conftest import CASES, _params, build_model, row

from lit_memory.models.key_values import GROWTH
from lit_memory.recurrence import (
    Divisible,
    GrowingState,
    Incremental,
    Rereading,
    generate,
    map_state,
    pack,
    read_on,
    read_prompts,
    reader,
    unroll,
)

N = 5
LENGTHS = [1, 4, N, N + 1, 2 * N + 3]  # of prompts

FLAGS = {
    "rmt-none": ("rmt", {"memory_tokens": 0}),
    "rmt-wrapped": ("rmt", {"family": "gpt2", "wrap_pos": True}),
    "rmt_r-wrapped": ("rmt_r", {"family": "gpt2", "wrap_pos": True}),
    "rmt_r-paper": ("rmt_r", {"formula": "paper"}),
    "prmt-wrapped": ("prmt", {"family": "gpt2", "wrap_pos": True}),
    "armt-wrapped": ("armt", {"family": "gpt2", "wrap_pos": True}),
    "armt-recall": ("armt", {"recall_on_mem_rows": False, "memory_layers": [1]}),
    "transformer-alone": ("transformer", {"window": 0}),
    "mac-long": ("mac", {"long_tokens": 2, "causal_read": False}),
    "mac-prefix": ("mac", {"write_prefix": True}),
    "lmm-gates": ("lmm", {"per_chunk_gates": True}),
    "larimar-lines": ("larimar", {"line_tokens": 2}),
    "memreasoner-lines": ("memreasoner", {"line_tokens": 2}),
    "memreasoner-alone": ("memreasoner", {"memory": False, "line_tokens": 2}),
}


def keeps(model):
    """Whether the model reads less than the whole segment, or the whole memory, again."""
    found = reader(model)
    return isinstance(found, Incremental) or bool(found.grain) or isinstance(model, GrowingState)


FAST = [(case, extra) for case, extra in CASES if keeps(build_model(case, extra))]


@pytest.fixture(params=[*_params(FAST), *(pytest.param(case, id=name) for name, case in FLAGS.items())])
def fast(request):
    """Every registered model that keeps something of the open segment, with its backbones, and flags that matter."""
    name, extra = request.param
    model = build_model(name, None, **extra) if request.param in FLAGS.values() else build_model(name, extra)
    return model.eval()


def from_scratch(model):
    """The slow twin: reads the whole open segment, and the memory, with every piece."""
    twin = Rereading(model)
    twin.grain, twin.inner = 0, lambda state: ()
    return twin


def steps_of(model, monkeypatch, how, *args, **options):
    """The tokens that ``generate`` makes, and the hidden states (steps, B, 1, D) that they come from."""
    seen, logits = [], model.logits
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["lit_memory.recurrence.generate"], "reader", how)
        patch.setattr(model, "logits", lambda hidden: seen.append(hidden) or logits(hidden))
        return generate(model, *args, **options), torch.stack(seen)


@pytest.mark.parametrize("segment_len", [N, row(None)])
def test_twin(fast, tokens, monkeypatch, segment_len):
    """In a ragged batch whose samples fill their segments at different times, tokens and hidden states are those of
    reading the open segment from its start (1e-10)."""
    ids = tokens(len(LENGTHS), max(LENGTHS))
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    options = {"segment_len": segment_len, "mask_BT": mask}
    new, hidden = steps_of(fast, monkeypatch, reader, ids, 2 * N + 4, **options)
    slow, expected = steps_of(fast, monkeypatch, from_scratch, ids, 2 * N + 4, **options)
    assert torch.equal(new, slow) and torch.allclose(hidden, expected, rtol=1e-10, atol=1e-10)


class Running(Divisible):
    """A sum of all tokens: a state that is one tensor."""

    grain = 2

    def init_state(self, batch, device=None, dtype=None):
        return torch.zeros(batch, 1, dtype=torch.float64)

    def step(self, state, ids_BT, mask_BT=None, write=True):
        rows_BT = ids_BT if mask_BT is None else ids_BT * mask_BT
        hidden_BT1 = state[:, None] + rows_BT.double().cumsum(1).unsqueeze(-1)
        return hidden_BT1, hidden_BT1[:, -1] if write else state


def test_a_state_that_is_one_tensor(tokens):
    """Samples begin a new segment while others go on."""
    ids, live, model = tokens(2, 8), torch.tensor([True, False]), Running()
    read, state = reader(model), model.init_state(2)
    _, opened = read.extend(state, read.begin(state), ids[:, :3])
    closed = read.close(state, opened, live)
    hidden, _ = read.extend(closed, read.begin(closed, opened, live), ids[:, 3:5])
    assert torch.equal(hidden, ids.double().cumsum(1)[:, 3:5].unsqueeze(-1))


def test_twin_in_single_precision(fast, tokens, monkeypatch):
    ids, fast = tokens(2, 2 * N + 2), fast.float()
    options = {"segment_len": N}
    _, hidden = steps_of(fast, monkeypatch, reader, ids, 1, **options)
    _, expected = steps_of(fast, monkeypatch, from_scratch, ids, 1, **options)
    assert hidden.dtype == torch.float32 and torch.allclose(hidden, expected, rtol=1e-5, atol=1e-5)


def test_closing_writes_what_a_step_writes(fast, tokens):
    """Read in pieces of 1, 3 and 1 tokens: the state is that of one step, for the samples that close; the others keep
    theirs, and begin nothing."""
    ids, live = tokens(3, 2 * N), torch.tensor([True, False, True])
    state, read = unroll(fast, ids[:, :N]).state, reader(fast)
    opened, parts = read.begin(state), []
    with torch.no_grad():
        for piece in ids[:, N:].split([1, 3, 1], dim=1):
            hidden, opened = read.extend(state, opened, piece)
            parts.append(hidden)
        expected, new = fast.step(state, ids[:, N:])
        closed = read.close(state, opened, live)
    assert torch.allclose(torch.cat(parts, dim=1), expected, rtol=1e-10, atol=1e-10)
    for chosen, source in ((live, new), (~live, state)):
        idx = chosen.nonzero()[:, 0]
        close = []
        map_state(
            lambda a, b, close=close: close.append(torch.allclose(a.double(), b.double(), rtol=1e-10, atol=1e-10)) or a,
            fast.reorder(closed, idx),
            fast.reorder(source, idx),
        )
        assert all(close)


@pytest.mark.parametrize("name", ["transformer", "rmt", "prmt", "armt"])
def test_a_token_is_read_once(build, tokens, name):
    """Rows through a layer: the prompt's open segment, a row for every new token, and memory where a segment ends."""
    model, rows = build(name, window=0) if name == "transformer" else build(name), []
    layer = model.decoder.layers[0]
    (layer if name == "rmt" else layer.block).attention.qkv.register_forward_hook(
        lambda _, __, out: rows.append(out.shape[1])
    )
    front, behind = {"transformer": (0, 0), "armt": (0, 2)}.get(name, (2, 2))
    generate(model, tokens(2, 3), N, segment_len=N)
    ended = [behind, front] if behind or front else []  # as the third new token begins the next segment
    expected = [front, 3, 1, 1, *ended, 1, 1]
    assert rows == [count for count in expected if count]


@pytest.mark.parametrize("last", [False, row(True)])
def test_prompts_and_what_follows(model, tokens, last):
    """``read_prompts`` and ``read_on``, in pieces that cross segments, give the hidden states of ``unroll``."""
    ids = tokens(2, 4 * N + 2)
    mask = torch.ones(2, 2 * N + 3, dtype=torch.bool)
    mask[1, 4:] = False
    with torch.no_grad():
        prompts = pack(ids[:, : 2 * N + 3], mask)
        hidden, position = read_prompts(model, prompts, N, last=last)
        more, position = read_on(model, position, ids[:, 2 * N + 3 :])
        for i, length in enumerate((2 * N + 3, 4)):
            whole = torch.cat([ids[i, :length], ids[i, 2 * N + 3 :]])[None]
            full = unroll(model, whole, N).hidden_BTD[0]
            first = hidden[i, :1] if last else hidden[i, :length]
            assert torch.allclose(first, full[length - 1 : length] if last else full[:length], rtol=1e-10, atol=1e-10)
            assert torch.allclose(more[i], full[length:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["xl", "mamba", "armt"])
def test_short_integers(build, tokens, name):
    model, ids = build(name).eval(), tokens(2, N + 2)
    assert torch.equal(generate(model, ids.int(), 6, segment_len=N), generate(model, ids, 6, segment_len=N))


def test_a_cache_grows(build, tokens):
    """A segment that outgrows the first columns of its cache, in the middle of a piece."""
    model = build("rmt").eval()
    ids = tokens(1, GROWTH + 40)
    with torch.no_grad():
        first, position = read_prompts(model, pack(ids[:, : GROWTH - 9]), None, last=False)
        more, _ = read_on(model, position, ids[:, GROWTH - 9 :])
        expected = unroll(model, ids).hidden_BTD
    assert torch.allclose(torch.cat([first, more], dim=1), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weights", ["autocast", "bf16"])
def test_bf16(model, tokens, weights):
    """In bf16, by autocast or in the weights, a ragged batch is read piece by piece near what fp32 makes of it."""
    model, ids = model.float().eval(), tokens(2, 4 * N)
    mask = torch.arange(2 * N + 3) < torch.tensor([2 * N + 3, 4])[:, None]
    low = copy.deepcopy(model).bfloat16() if weights == "bf16" else model

    def read(one):
        with torch.no_grad():
            _, position = read_prompts(one, pack(ids[:, : 2 * N + 3], mask), N)
            return read_on(one, position, ids[:, 2 * N + 3 :])[0].float()

    exact = read(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == "autocast"):
        assert generate(low, ids[:, : 2 * N + 3], 4, segment_len=N, mask_BT=mask).shape == (2, 4)
        assert 0 < (read(low) - exact).norm() / exact.norm() < 0.1
