"""Our models as Hugging Face's: Auto classes in every order of import, logits, loss, padding and generate."""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, build_model, row
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils import generic

import lit_memory.hf
from lit_memory.hf.cache import CACHE, SegmentCache
from lit_memory.recurrence import generate, unroll

N = 5


@pytest.fixture
def shell(model, tmp_path, monkeypatch):
    """Every registered model, loaded by AutoModelForCausalLM from a folder that we wrote, with no name in it that
    transformers calls deprecated."""
    monkeypatch.setattr(generic.logger, "warning_once", pytest.fail)
    model.save_pretrained(tmp_path, segment_len=N)
    return AutoModelForCausalLM.from_pretrained(tmp_path)


def test_auto_classes(shell, model, tokens, tmp_path):
    """Weights, precision, logits and loss are the model's; what the shell writes, both read."""
    ids = tokens(2, 2 * N + 3)
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    assert type(shell) is lit_memory.LitMemoryForCausalLM and not shell.training and shell.dtype == torch.float64
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is lit_memory.LitMemoryConfig and (config.segment_len, config.vocab_size) == (N, VOCAB)
    out, expected = shell(ids, labels=labels), model.logits(unroll(model, ids, N).hidden_BTD)
    assert torch.allclose(out.logits, expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(out.loss, F.cross_entropy(expected[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    out.loss.backward()
    assert shell.get_input_embeddings().weight.grad.any()
    assert torch.allclose(
        shell(ids, segment_len=4).logits, model.logits(unroll(model, ids, 4).hidden_BTD), rtol=1e-12, atol=1e-12
    )
    assert shell(ids).loss is None and len(shell(ids, return_dict=False)) == 1
    shell.save_pretrained(tmp_path / "again")
    for again in (
        type(model).from_pretrained(tmp_path / "again"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "again").model,
    ):
        assert (
            all(torch.equal(t, again.state_dict()[name]) for name, t in model.state_dict().items())
            and again.config == model.config
        )


def test_padding(shell, tokens):
    """A sample that is padded on the left or on the right gives what it gives alone."""
    ids, mask = tokens(3, 2 * N + 3), torch.ones(3, 2 * N + 3, dtype=torch.long)
    mask[0, :4] = mask[1, -6:] = 0
    logits = shell(ids, attention_mask=mask).logits
    for i in range(3):
        real = mask[i].bool()
        assert torch.allclose(logits[i, real], shell(ids[i : i + 1, real]).logits[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["rmt", "mamba"])
@torch.no_grad()
def test_export(name, tokens):
    """Without a mask nothing looks at numbers, so that ``torch.export`` sees all of the graph."""
    model, ids = build_model(name), tokens(2, 2 * N + 3)
    config = lit_memory.LitMemoryConfig(name, asdict(model.config), segment_len=N)
    shell = lit_memory.LitMemoryForCausalLM(config).double().eval()
    found, expected = torch.export.export(shell, (ids,)).module()(ids).logits, shell(ids).logits
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(shell(ids, attention_mask=torch.ones_like(ids)).logits, expected)


def test_generate_of_hugging_face_is_ours(shell, model, tokens):
    """Greedy search, left padding and another segment length included; beams too find nothing less likely."""
    ids, mask = tokens(3, 2 * N + 2), torch.ones(3, 2 * N + 2, dtype=torch.long)
    mask[0, :4] = mask[1, :1] = 0
    options = {"max_new_tokens": 7, "attention_mask": mask, "pad_token_id": 0}
    theirs = shell.generate(ids, do_sample=False, **options)[:, 2 * N + 2 :]
    assert torch.equal(theirs, generate(model, ids, 7, segment_len=N, mask_BT=mask))
    theirs = shell.generate(ids, do_sample=False, segment_len=4, **options)[:, 2 * N + 2 :]
    assert torch.equal(theirs, model.generate(ids, 7, segment_len=4, mask_BT=mask))


class Streamer:
    """Collects what ``generate`` streams."""

    def __init__(self):
        self.parts = []

    def put(self, value):
        self.parts.append(value.reshape(value.shape[0], -1) if value.dim() > 1 else value[:, None])

    def end(self):
        self.parts = torch.cat(self.parts, dim=1)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "do_sample": False},
        row({"do_sample": True, "num_return_sequences": 2}),
        row({"do_sample": True, "num_beams": 2, "repetition_penalty": 1.3}),
    ],
    ids=["beams", "samples", "sampled beams"],
)
def test_the_cache_changes_nothing(shell, tokens, options):
    """With the cache, and with every step from scratch, ``generate`` gives the same tokens, left padding included."""
    ids, mask = tokens(3, 2 * N + 2), torch.ones(3, 2 * N + 2, dtype=torch.long)
    mask[0, :4] = mask[1, :1] = 0
    found = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        more = {"max_new_tokens": N + 2, "attention_mask": mask, "pad_token_id": 0, "use_cache": use_cache}
        found.append(shell.generate(ids, **more, **options))
    assert torch.equal(*found)


def test_a_stream(shell, tokens):
    """A streamer gets the tokens of the result."""
    streamer = Streamer()
    out = shell.generate(tokens(1, 2 * N + 2), max_new_tokens=4, do_sample=False, pad_token_id=0, streamer=streamer)
    assert torch.equal(streamer.parts, out)


@torch.no_grad()
def test_forward_with_a_cache(shell, tokens):
    """Logits in pieces are those of one call; a cache serves a second ``generate``; what does not fit is told."""
    ids, mask = tokens(2, 3 * N), torch.ones(2, 3 * N, dtype=torch.long)
    mask[0, :2] = 0
    full = shell(ids, attention_mask=mask).logits
    out = shell(ids[:, : N + 2], attention_mask=mask[:, : N + 2], use_cache=True)
    assert torch.allclose(out.logits[mask[:, : N + 2].bool()], full[:, : N + 2][mask[:, : N + 2].bool()])
    more = shell(ids[:, N + 2 :], attention_mask=mask, cache=out[CACHE], logits_to_keep=3)
    assert torch.allclose(more.logits, full[:, -3:]) and more[CACHE].get_seq_length() == 3 * N
    assert CACHE not in shell(ids) and shell(ids, logits_to_keep=1, use_cache=True).logits.shape[1] == 1
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    again = shell.generate(ids, **{CACHE: shell(ids[:, :N], mask[:, :N], use_cache=True)[CACHE]}, **options)
    assert torch.equal(again, shell.generate(ids, **options))
    for name in ("cache", "past_key_values"):
        mine = SegmentCache()
        assert shell(ids, **{name: mine})[CACHE] is mine and mine.get_seq_length() == 3 * N
    assert not mine.is_croppable  # or on Apple's GPUs ``generate`` takes a token back
    with pytest.raises(NotImplementedError, match="a memory does not forget single tokens"):
        mine.crop(1)
    with pytest.raises(TypeError, match="is a DynamicCache: expected a SegmentCache"):
        shell(ids, cache=DynamicCache())
    with pytest.raises(TypeError, match=f"two names of the same: give {CACHE}"):
        shell(ids, cache=mine, past_key_values=mine)
    with pytest.raises(ValueError, match="no padding in tokens after a cache"):
        shell(ids[:, :1], attention_mask=torch.zeros(2, 1), cache=mine)
    with pytest.raises(ValueError, match="stateful"):
        shell.generate(ids[:1], prompt_lookup_num_tokens=2, max_new_tokens=2, pad_token_id=0)


def test_gradient_checkpointing(shell, tokens):
    """Segments are computed again on the way back: the same loss and gradients."""
    ids, found = tokens(2, 3 * N), []
    shell.train()
    for again in (False, True):
        if again:
            shell.activation_checkpointing_enable()
        assert shell.gradient_checkpointing is again
        shell.zero_grad()
        loss = shell(ids, labels=ids).loss
        loss.backward()
        found.append([loss, *(p.grad for p in shell.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 1
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("count", [VOCAB + 3, VOCAB - 4])
@pytest.mark.parametrize(("name", "tied"), [("armt", True), ("rmt", False), ("mamba", True)])
def test_other_vocabularies(tokens, tmp_path, name, tied, count):
    """Old tokens keep their logits; the folder, the settings and what is tied follow."""
    build_model(name, tie_embeddings=tied).save_pretrained(tmp_path, segment_len=N)
    shell = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids, kept = tokens(2, 2 * N) % (VOCAB - 4), min(count, VOCAB)
    before = shell(ids).logits
    assert shell.resize_token_embeddings(count) is shell.get_input_embeddings()
    assert torch.allclose(shell(ids).logits[..., :kept], before[..., :kept], rtol=1e-12)
    assert (shell.get_output_embeddings().weight is shell.get_input_embeddings().weight) is tied
    shell.save_pretrained(tmp_path / "other")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    assert again.config.vocab_size == again.model.config.vocab_size == count
    assert torch.equal(again(ids).logits, shell(ids).logits)


def test_a_vocabulary_that_an_encoder_shares(tmp_path):
    build_model("larimar", encoder_width=16).save_pretrained(tmp_path)
    shell = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"encoder\.tokens\.weight depend on vocab_size"):
        shell.resize_token_embeddings(VOCAB + 1)


def test_from_configuration():
    """A new model from a configuration alone, for training with Hugging Face's tools."""
    config = lit_memory.LitMemoryConfig(
        arch="rmt", settings={"vocab_size": 9, "layers": 1, "width": 8, "heads": 2, "memory_tokens": 3}
    )
    shell = AutoModelForCausalLM.from_config(config)
    assert type(shell.model) is lit_memory.RMT and shell.model.memory.shape == (3, 8) and shell.model.memory.any()


ORDERS = {
    "ours first": "import lit_memory.hf\nimport transformers",
    "theirs first": "import transformers\nimport lit_memory.hf",
    "Auto classes first": "from transformers import AutoConfig, AutoModelForCausalLM\nimport lit_memory.hf",
    "through a model": "from lit_memory import ARMT\nARMT.from_pretrained(sys.argv[1])",
    "through the shell": "import lit_memory\nassert lit_memory.LitMemoryConfig",
}
USE = """
import sys, torch, transformers
assert transformers.AutoConfig.from_pretrained(sys.argv[1]).arch == "armt"
shell = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert shell(torch.ones(1, 3).long()).logits.shape == (1, 3, 19)
import lit_memory
config = lit_memory.LitMemoryConfig("rmt", {"vocab_size": 9})
assert transformers.AutoModelForCausalLM.from_config(config).model.config.vocab_size == 9
"""


FORKS = """
import os, sys
import torch._dynamo  # what both packages stand on costs seconds, and is imported once
assert not {"transformers", "lit_memory"} & set(sys.modules)
for code in sys.argv[2:]:
    pid = os.fork()
    if not pid:
        exec(code)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """The exit code of each order of import, in a fork of its own, and the errors of all."""
    folder = tmp_path_factory.mktemp("armt")
    build_model("armt").save_pretrained(folder)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    codes = [f"{order}\n{USE}" for order in ORDERS.values()]
    run = subprocess.run([sys.executable, "-c", FORKS, folder, *codes], env=environment, capture_output=True, text=True)
    return dict(zip(ORDERS, run.stdout.split(), strict=True)), run.stderr


@pytest.mark.parametrize("order", ORDERS)
def test_registration_in_every_order_of_import(order, orders):
    """AutoConfig and AutoModelForCausalLM know our folders once ``lit_memory.hf`` has been imported, by whatever."""
    codes, errors = orders
    assert codes[order] == "0", errors
