"""ARMT as its authors run it today, against numbers of their code, and their checkpoints.

``fixtures/armt_present`` was made by ``src/armt.py`` of RodkinIvan/associative-recurrent-memory-transformer at 3da7f48
(transformers 5.23, fp64, its rotary tables, RMS norms and softmax in fp64 as in ``test_interop.exact``): a tiny model
per family with random weights, saved by its ``save_pretrained``; ``ids``, five segments of which the last is short;
logits and states of the cases below, and the gradient of the sum of ``dlogits * logits`` over the first three. GPT-2's
table of positions repeats after every segment, as there positions go on and here begin anew; its gradient is folded.
The cases ``window`` and ``sink`` are those of ``src/armt_sw.py`` with the same weights, and a ``sink``; ``window.grad``
are the gradients of the second one on Llama.
"""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from test_interop import refused

from lit_memory import ARMT, generate, load_reference, unroll
from lit_memory.hf.names import NORMS
from lit_memory.hf.pretrained import from_pretrained as load_by_class
from lit_memory.models.armt import PRESENT
from lit_memory.registry import load_class

FIXTURES = Path(__file__).parent / "fixtures" / "armt_present"
EXPECTED = safetensors.torch.load_file(FIXTURES / "expected.safetensors")
FAMILIES = ["gpt2", "neox", "llama", "gemma"]
SETTINGS = {
    "clip": {},
    "off": {"correction": False},
    "delta": {"use_denom": False},
    "some": {"wrap_layers": [False, True]},
}
"""Case -> what config.json says."""
FLAGS = {"clip": {}, "off": {"gamma": "off"}, "delta": {"use_denom": False}}
"""The same as fields of ``ARMT.Config``."""


def weights_of(family):
    return safetensors.torch.load_file(FIXTURES / family / "model.safetensors")


def folder(tmp_path, family, weights=None, base=None, **settings):
    """A checkpoint of the authors with other settings."""
    path = shutil.copytree(FIXTURES / family, tmp_path / "checkpoint", dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text()) | settings
    config["base_model_config"] = config["base_model_config"] | (base or {})
    (path / "config.json").write_text(json.dumps(config))
    if weights is not None:
        safetensors.torch.save_file(weights, path / "model.safetensors")
    return path


def by_weights(family, weights=None, **flags):
    """The model of a file of weights, whose settings are named by hand."""
    flags = {"norm_eps": 1e-6 if family in ("llama", "gemma") else 1e-5, **PRESENT, **flags}
    return load_reference(weights or weights_of(family), arch="armt", backbone=family, n_head=2, **flags)


def compare(model, family, case, schedule, atol=1e-10):
    """Logits and states, relative to the largest number, against those of the authors. Returns the logits."""
    hidden, state = unroll(model, EXPECTED["ids"], 4, schedule=schedule)
    ours = {"logits": model.logits(hidden)}
    for i, layer in enumerate(state):
        held = {"A": layer.A_BKD} | ({"z": layer.z_BK} if model.config.use_denom else {})
        ours |= {f"{name}.{i}": t for name, t in held.items() if t.numel()}
    theirs = {
        name.removeprefix(f"{family}.{case}."): t
        for name, t in EXPECTED.items()
        if name.startswith(f"{family}.{case}.")
    }
    assert ours.keys() == theirs.keys()
    for name, t in theirs.items():
        torch.testing.assert_close(ours[name], t, rtol=0, atol=atol * max(1.0, t.abs().max().item()))
    return ours["logits"]


@pytest.mark.parametrize(("family", "schedule"), [*((f, "sequential") for f in FAMILIES), ("neox", "layer")])
def test_logits_states_and_gradients_are_the_authors(family, schedule):
    summed, prefix = {}, f"{family}.grad."
    for case, flags in FLAGS.items():
        model = by_weights(family, **flags)
        (compare(model, family, case, schedule) * EXPECTED["dlogits"]).sum().backward()
        for name, parameter in model.named_parameters():
            summed[name] = summed.get(name, 0) + parameter.grad
    # their gradients come to our names and shapes as weights do
    grads = {name.removeprefix(prefix): t for name, t in EXPECTED.items() if name.startswith(prefix)}
    imported = by_weights(family, grads)
    assert summed.keys() == dict(imported.named_parameters()).keys()
    for name, expected in imported.named_parameters():
        shift = 1 if family == "gemma" and name.endswith(NORMS) else 0
        torch.testing.assert_close(summed[name], expected.detach() - shift, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("flag", PRESENT)
def test_every_field_of_present_matters(flag):
    """Without one of them the numbers are others; the gate's start alone is a matter of fresh models."""
    model = by_weights("neox", **{flag: getattr(ARMT.Config, flag)})
    if flag == "beta_init":
        fresh = ARMT(ARMT.Config(vocab_size=11, layers=1, **PRESENT))
        assert fresh.layers[0].to_beta.bias.item() == 1 and not ARMT.Config().beta_init
        return
    with pytest.raises(AssertionError):
        compare(model, "neox", "clip", "sequential")


CHECKPOINTS = [(family, case) for family in FAMILIES[1:] for case in FLAGS] + [("llama", "some")]


@pytest.mark.parametrize(("family", "case"), CHECKPOINTS)
def test_checkpoints_of_the_authors(tmp_path, family, case):
    weights = weights_of(family)
    if case == "some":
        weights = {name: t for name, t in weights.items() if ".0.W_m" not in name}
    model = load_reference(folder(tmp_path, family, weights, **SETTINGS[case]))
    assert not model.training
    with torch.no_grad():
        compare(model, family, case, "sequential")
    for name, value in {**PRESENT, "memory_layers": [1] if case == "some" else [], **FLAGS.get(case, {})}.items():
        assert getattr(model.config, name) == value


def test_docs_name_the_fields_of_present():
    page = Path(__file__).parents[1] / "docs" / "huggingface.md"
    fields = ", ".join(f"model.{name}: {json.dumps(value)}" for name, value in PRESENT.items())
    assert f"today: {{{fields}}}" in page.read_text()


def test_they_are_saved_as_ours(tmp_path):
    model = load_reference(folder(tmp_path, "llama", **SETTINGS["off"]))
    model.save_pretrained(tmp_path / "mine", segment_len=4)
    with torch.no_grad():
        compare(ARMT.from_pretrained(tmp_path / "mine"), "llama", "off", "layer")


def test_memory_in_its_own_precision(tmp_path):
    """A decoder in fp32 with a memory in fp64, and the other way round."""
    for base, memory in (
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        weights = {
            name: t.to(memory if ".W_m" in name or name == "memory" else base)
            for name, t in weights_of("llama").items()
        }
        model = load_reference(folder(tmp_path, "llama", weights))
        assert model.layers[0].to_beta.bias.dtype == model.memory.dtype == memory
        assert {p.dtype for p in (*model.layers[0].block.parameters(), *model.decoder.norm.parameters())} == {base}
        with torch.no_grad():
            hidden, state = unroll(model, EXPECTED["ids"], 4, schedule="auto")
            written = model.generate(EXPECTED["ids"], 3, segment_len=4)
        assert hidden.dtype == base and state[0].A_BKD.dtype == memory and written.shape == (2, 3)
        if base != torch.bfloat16:
            torch.testing.assert_close(model.logits(hidden).double(), EXPECTED["llama.clip.logits"], rtol=0, atol=1e-4)


def test_gemma_scaled_all_of_its_inputs_before_transformers_5_4(tmp_path):
    weights = weights_of("gemma")
    weights["memory"] = weights["memory"] / 8**0.5
    with torch.no_grad():
        scaled = load_reference(folder(tmp_path, "gemma", weights, transformers_version="5.3.0"))
        compare(scaled, "gemma", "clip", "sequential")
    later = load_reference(folder(tmp_path, "gemma", weights, transformers_version="5.10"))
    assert torch.equal(later.memory, weights["memory"])
    refused(ValueError, "transformers_version", load_reference, folder(tmp_path, "gemma", transformers_version=None))


WRONG = [
    ({"model_type": "rmt"}, "model_type='rmt'"),
    ({"model_type": "armt_sw"}, "use_sink=None"),
    ({"model_type": "armt_sw", "use_sink": True}, "missing weights: sink"),
    ({"model_type": "armt_sw", "use_sink": False, "segment_size": None}, "segment_size=None"),
    ({"model_type": "armt_sw", "base": {"model_type": "gemma2"}}, "rotations go on"),
    ({"num_mem_tokens": 3}, "memory"),
    ({"num_mem_tokens": "2"}, "num_mem_tokens='2'"),
    ({"d_mem": 4}, "W_mq"),
    ({"correction": None}, "correction=None"),
    ({"use_denom": 1}, "use_denom=1"),
    ({"wrap_layers": [True]}, "wrap_layers"),
    ({"wrap_layers": [False, False]}, "wrap_layers"),
    ({"wrap_layers": [True, False]}, "surplus"),
    ({"segment_alignment": "right"}, "segment_alignment='right'"),
    ({"base": {"model_type": "gpt2"}}, "positions go on"),
    ({"base": {"model_type": "bert"}}, "model_type='bert'"),
    ({"base": {"num_hidden_layers": 3}}, "missing"),
    ({"base": {"hidden_act": "relu"}}, "hidden_act"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG, ids=str)
def test_what_does_not_fit_is_told(tmp_path, settings, words):
    path = folder(tmp_path, "llama", **settings)
    refused(ValueError, (str(path), words), load_reference, path)


def test_arguments_of_a_folder(tmp_path):
    path = folder(tmp_path, "llama")
    assert load_reference(path, dropout=0.5).config.dropout == 0.5
    again = ARMT.from_pretrained(path)
    assert again.config == load_reference(path).config and again.source == path
    refused(ValueError, ("encoder='bert'", "leave it out"), load_by_class, ARMT, path, encoder="bert")
    refused(ValueError, "model_type='armt'", load_by_class, load_class("model", "rmt"), path)
    for flag in ({"arch": "armt"}, {"backbone": "llama"}, {"n_head": 2}, {"gamma": "off"}, {"memory_tokens": 2}):
        refused(ValueError, (next(iter(flag)), "leave it out"), load_reference, path, **flag)
    refused(ValueError, ("arch=None", "armt"), load_reference, path / "model.safetensors")
    (path / "config.json").unlink()
    refused(FileNotFoundError, "config.json", load_reference, path)


# the sliding window between segments


def windowed(tmp_path, family, case):
    """The authors' checkpoint with a window, with or without the sink."""
    sink = {"sink": EXPECTED["sink"]} if case == "sink" else {}
    settings = {"model_type": "armt_sw", "use_sink": case == "sink"}
    return load_reference(folder(tmp_path, family, weights_of(family) | sink, **settings))


@pytest.mark.parametrize("schedule", ["auto", "diagonal"])
@pytest.mark.parametrize("case", ["window", "sink"])
@pytest.mark.parametrize("family", ["neox", "llama"])
def test_window_is_the_authors(tmp_path, family, case, schedule):
    model = windowed(tmp_path, family, case)
    logits = compare(model, family, case, schedule)
    if (family, case) == ("llama", "sink"):
        (logits * EXPECTED["dlogits"]).sum().backward()
        grads = {n.removeprefix("window.grad."): t for n, t in EXPECTED.items() if n.startswith("window.grad.")}
        path = folder(tmp_path, family, grads, model_type="armt_sw", use_sink=True)
        for name, expected in load_reference(path).named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, expected.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sink", [False, True])
def test_window_slow_twin(build, tokens, sink):
    """With an empty memory, and without rotations, it is one pass over all rows under one mask, whatever the lengths of
    segments and window."""
    for past in (3, 5, 8):
        model = build("armt", family="gpt2", past_tokens=past, sink=sink, value_std=0.0)
        ids, places = tokens(2, 18), []
        for s, segment in enumerate(ids.split(5, dim=1)):
            places += (
                [(s, "sink", 0)] * sink + [(s, "token", i) for i in range(segment.shape[1])] + [(s, "memory", 0)] * 2
            )
        token = [(s, i, 5 * s + i) for s, kind, i in places if kind == "token"]
        sees = torch.eye(len(places), dtype=torch.bool)
        for row, (s, kind, i) in enumerate(places):
            first = {"sink": 99, "token": 5 * s - past + i, "memory": 5 * s - past}[kind]
            for column, (t, other, j) in enumerate(places):
                earlier = other == "token" and t < s and 5 * t + j >= first
                sees[row, column] |= (t == s and column <= row) or earlier
        rows = torch.cat([model.embed(segment) for segment in ids.split(5, dim=1)], dim=1)
        for layer in model.layers:
            rows = layer.block(rows, sees)
        kept = [row for row, (_, kind, _) in enumerate(places) if kind == "token"]
        assert len(token) == len(kept) == 18
        expected = model.decoder.norm(rows[:, kept])
        torch.testing.assert_close(unroll(model, ids, 5).hidden_BTD, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layers", [[], [1]])
def test_window_streams_and_is_read_by_several(build, tokens, tmp_path, layers):
    """State in and out, readers of one state, padding, bf16, saved folders, and generation, which reads the open
    segment again."""
    model, ids = build("armt", past_tokens=4, sink=True, memory_layers=layers, **PRESENT).eval(), tokens(2, 20)
    whole, first = unroll(model, ids, 5), unroll(model, ids[:, :10], 5)
    rest = unroll(model, ids[:, 10:], 5, state=first.state)
    assert torch.equal(torch.cat([first.hidden_BTD, rest.hidden_BTD], dim=1), whole.hidden_BTD)
    read = unroll(model, ids, 5, read_only=2).hidden_BTD[:, 10:]
    alone = [model.step(first.state, part, write=False)[0] for part in ids[:, 10:].split(5, dim=1)]
    torch.testing.assert_close(read, torch.cat(alone, dim=1), rtol=1e-10, atol=1e-10)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 7:10] = False
    padded = ids.where(mask, 0), ids.where(mask, 1)
    one, other = (unroll(model, part, 5, mask_BT=mask).hidden_BTD[mask] for part in padded)
    assert torch.equal(one, other)
    new = generate(model, ids[:, :12], 4, segment_len=5)
    for i in range(4):
        hidden = unroll(model, torch.cat([ids[:, :12], new[:, :i]], dim=1), 5).hidden_BTD[:, -1]
        assert torch.equal(model.logits(hidden).argmax(-1), new[:, i])
    model.save_pretrained(tmp_path, segment_len=5)
    assert torch.equal(unroll(ARMT.from_pretrained(tmp_path), ids, 5).hidden_BTD, whole.hidden_BTD)
    low = unroll(model.bfloat16(), ids, 5)
    assert low.hidden_BTD.isfinite().all() and low.state[0].k_BGPK.dtype == torch.float32
