"""Folders of models: round trips, pretrained decoders that get a memory, working offline, and wrong inputs."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import build_model
from test_interop import BACKBONES, IDS, hugging_face, hugging_face_mamba, logits, refused

from lit_memory.hf import pretrained
from lit_memory.hf.huggingface import load_huggingface
from lit_memory.hf.pretrained import save_pretrained, shared_weights
from lit_memory.models.decoder import Block, Decoder
from lit_memory.recurrence import LayerRecurrent, SegmentRecurrent
from lit_memory.registry import MODELS, load_class

ROOT = Path(__file__).parents[1]


def equal(a, b):
    """The same weights, bit for bit and in the same precision."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(t.dtype == b[name].dtype and torch.equal(t, b[name]) for name, t in a.items())


def around_a_decoder(name):
    """Whether a registered architecture is built around one of our plain decoders."""
    decoder = getattr(build_model(name), "decoder", None)
    return isinstance(decoder, Decoder) and any(isinstance(part, Block) for part in decoder.modules())


WRAPPING = [name for name in MODELS if around_a_decoder(name)]


def test_round_trip(model, tmp_path):
    """Every registered model comes back as it was: class, configuration, weights, precision and tied weights; in eval
    mode."""
    for folder in (tmp_path / "new" / "folder", tmp_path):  # made where it is missing
        model.save_pretrained(folder)
        for cls in (type(model), SegmentRecurrent):
            again = cls.from_pretrained(str(folder))
            assert type(again) is type(model) and again.config == model.config and equal(again, model)
            assert shared_weights(again) == shared_weights(model) and not again.training
            assert all(parameter.requires_grad for parameter in again.parameters())
    written = ["README.md", "config.json", "lit_memory_auto.py", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == written
    model.half().save_pretrained(tmp_path)
    assert equal(type(model).from_pretrained(tmp_path), model)


def test_a_head_of_its_own_is_not_dropped(tmp_path):
    """Where the settings say that it is the token embedding."""
    for name in ("armt", "mamba"):
        model = build_model(name, tie_embeddings=False)
        model.save_pretrained(tmp_path / name)
        refused(
            ValueError,
            ("head", "tied", "untie them"),
            type(model).from_pretrained,
            tmp_path / name,
            tie_embeddings=True,
        )
    hugging_face_mamba(tie_word_embeddings=False).save_pretrained(tmp_path / "theirs")
    _edit(tmp_path / "theirs", tie_word_embeddings=True)
    refused(ValueError, ("lm_head", "tied"), load_class("model", "mamba").from_pretrained, tmp_path / "theirs")


def test_mixed_precision_comes_back(tmp_path):
    model = build_model("armt").bfloat16()
    model.memory.data = model.memory.data.float()
    model.save_pretrained(tmp_path)
    assert equal(type(model).from_pretrained(tmp_path), model)


def test_flags_change_the_configuration(tmp_path):
    model = build_model("armt")
    model.save_pretrained(tmp_path)
    cls = type(model)
    off = cls.from_pretrained(tmp_path, gamma="off")
    assert off.config == dataclasses.replace(model.config, gamma="off") and equal(off, model)
    refused(ValueError, (str(tmp_path), "gamma"), cls.from_pretrained, tmp_path, gamma="of")
    refused(ValueError, (str(tmp_path), "memory", "(2, 16)", "(3, 16)"), cls.from_pretrained, tmp_path, memory_tokens=3)
    refused(ValueError, (str(tmp_path), "missing", "layers.2"), cls.from_pretrained, tmp_path, layers=3)
    refused(ValueError, (str(tmp_path), "surplus", "layers.1"), cls.from_pretrained, tmp_path, layers=1)
    refused(TypeError, ("gama", "gamma"), cls.from_pretrained, tmp_path, gama="off")
    other = load_class("model", "rmt")
    refused(ValueError, (str(tmp_path), "'armt'", "'rmt'", "ARMT.from_pretrained"), other.from_pretrained, tmp_path)
    assert type(LayerRecurrent.from_pretrained(tmp_path)) is cls


def test_only_registered_classes_are_saved(tmp_path):
    class Mine(load_class("model", "rmt")):
        pass

    refused(ValueError, ("Mine", "MODELS"), Mine(build_model("rmt").config).save_pretrained, tmp_path)
    refused(
        ValueError, "SegmentRecurrent is not registered", SegmentRecurrent.from_pretrained, _folder(tmp_path, "gpt2")
    )


def _folder(tmp_path, backbone, **settings):
    hugging_face(backbone, **settings).save_pretrained(tmp_path / backbone)
    return tmp_path / backbone


@pytest.mark.parametrize("backbone", BACKBONES)
def test_pretrained_decoders_get_a_memory(tmp_path, backbone):
    """A Hugging Face folder, which has no tokenizer, serves every architecture around a decoder; its own folder serves
    as well."""
    folder = _folder(tmp_path, backbone)
    assert sorted(os.listdir(folder)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert {"transformer", "rmt", "prmt", "armt", "tarm"} <= set(WRAPPING)
    for name in WRAPPING:
        cls = load_class("model", name)
        flags = {"memory_tokens": 3} if "memory_tokens" in cls.Config.__dataclass_fields__ else {}
        torch.manual_seed(0)
        model = cls.from_pretrained(folder, **flags)
        torch.manual_seed(0)
        assert type(model) is cls and equal(model, load_huggingface(folder, name, **flags)) and not model.training
        model.save_pretrained(tmp_path / "ours")
        assert torch.equal(logits(cls.from_pretrained(tmp_path / "ours")), logits(model))


def test_memory_sizes(tmp_path):
    folder, armt, rmt = _folder(tmp_path, "gpt2"), load_class("model", "armt"), load_class("model", "rmt")
    model = armt.from_pretrained(folder, memory_tokens=5, memory_dim=6)
    assert model.memory.shape == (5, 16) and model.layers[0].to_key.weight.shape == (6, 16)
    refused(
        ValueError, (str(folder), "memory_tokens=0: expected at least 1"), armt.from_pretrained, folder, memory_tokens=0
    )
    plain = load_class("model", "transformer").from_pretrained(folder)
    assert torch.equal(logits(rmt.from_pretrained(folder, memory_tokens=0)), logits(plain))
    ids = IDS.repeat(1, 3)  # 36 tokens, and 20 positions
    assert model.generate(ids, 4, segment_len=10).shape == (2, 4)
    refused(
        ValueError, ("36 rows", "20", "shorter segments"), model.generate, ids, 4
    )  # one segment of prompt and continuation: too long
    small = rmt.from_pretrained(folder, memory_tokens=2)
    refused(ValueError, ("40 rows", "20", "shorter segments"), small.step, small.init_state(2), ids)


BERT_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "mary", "went", "bath", "##room", "."]
DECODER_WORDS = ["<eos>", "Mary", "went", "bathroom", ".", "\ufffd", *(f"word{i}" for i in range(6, 20))]
"""The decoder's vocabulary; its table has rows for three more."""


def make_bert(tmp_path, words=BERT_WORDS, cls_token="[CLS]"):
    """A folder with a tiny BERT in fp64 whose every weight is random, and its tokenizer; the model."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    sizes = {
        "vocab_size": len(BERT_WORDS),
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 48,
    }
    model = BertModel(BertConfig(**sizes, max_position_embeddings=11, layer_norm_eps=1e-5)).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4, generator=generator)
    model.save_pretrained(tmp_path / "bert")
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", cls_token=cls_token).save_pretrained(
        tmp_path / "bert"
    )
    return tmp_path / "bert", model


def make_decoder(tmp_path):
    """A folder with a tiny GPT-2 and a tokenizer of words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({word: i for i, word in enumerate(DECODER_WORDS)}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path / "gpt2")
    return _folder(tmp_path, "gpt2")


@pytest.mark.parametrize("name", ["larimar", "memreasoner"])
@pytest.mark.parametrize("old", [False, True])
def test_bert_becomes_the_encoder(tmp_path, name, old):
    """Where every token is one piece, latents are those of BERT's pooled rows; a token of two pieces has the mean of
    their embeddings, and what BERT drops is unknown to it. ``old``: a file with a head, a prefix and TensorFlow's names
    of norms."""
    (bert, theirs), decoder, cls = make_bert(tmp_path), make_decoder(tmp_path), load_class("model", name)
    if old:
        weights = {
            f"bert.{k}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
            for k, t in theirs.state_dict().items()
        }
        safetensors.torch.save_file(weights | {"cls.predictions.bias": torch.zeros(9)}, bert / "model.safetensors")
    model = cls.from_pretrained(decoder, encoder=bert, latent_width=12)
    assert (model.config.encoder_width, model.config.encoder_layers, model.config.encoder_heads) == (12, 2, 3)
    model.encoder.to_latent.weight.data = torch.eye(12).double()
    lines, pieces = torch.tensor([[1, 2, 4], [4, 1, 1]]), torch.tensor([[2, 4, 5, 8], [2, 8, 4, 4]])
    with torch.no_grad():
        assert torch.allclose(model.encode(lines), theirs(pieces).pooler_output, atol=1e-12)
        rows = theirs.embeddings.word_embeddings.weight
        assert torch.allclose(model.encoder.tokens.weight[3], rows[6:8].mean(0)) and torch.equal(
            model.encoder.tokens.weight[[5, 22]], rows[[1, 1]]
        )
        fresh = pretrained.from_pretrained(cls, decoder, latent_width=12)
        assert torch.equal(model.decoder.tokens.weight, fresh.decoder.tokens.weight) and fresh.encoder.tokens is None
    model.save_pretrained(tmp_path / "ours")
    assert equal(cls.from_pretrained(tmp_path / "ours"), model)
    fresh = cls(model.config)
    pretrained.start_from(fresh, decoder, bert)
    drawn = {"encoder.to_latent.weight", "encoder.positions.weight"}
    for key, tensor in fresh.state_dict().items():
        if key.startswith(("decoder.", "encoder.")) and key not in drawn:
            assert torch.equal(tensor, model.state_dict()[key].float()), key


@pytest.mark.parametrize(("family", "ff_mult"), [("llama", 2.5), ("gptj", 4.0)])
def test_other_decoders_with_an_encoder(family, ff_mult, tmp_path):
    """The feed-forwards of the encoder are BERT's, whatever the decoder's are."""
    (bert, _), decoder = make_bert(tmp_path), make_decoder(tmp_path)
    folder = _folder(tmp_path, family)
    for path in decoder.glob("tokenizer*"):
        path.rename(folder / path.name)
    model = load_class("model", "memreasoner").from_pretrained(folder, encoder=bert, latent_width=8)
    assert model.config.ff_mult == ff_mult and model.encoder.layers[0].up.weight.shape == (48, 12)


def test_wrong_encoders(tmp_path):
    (bert, _), decoder, larimar, rmt = (
        make_bert(tmp_path),
        make_decoder(tmp_path),
        load_class("model", "larimar"),
        load_class("model", "rmt"),
    )
    refused(ValueError, ("rmt has no encoder",), rmt.from_pretrained, decoder, encoder=bert, memory_tokens=2)
    refused(
        ValueError,
        (f"{decoder}", "model_type='gpt2': expected bert"),
        larimar.from_pretrained,
        decoder,
        encoder=decoder,
    )
    refused(
        ValueError,
        ("encoder_width=24: expected 12, as in", "bert"),
        larimar.from_pretrained,
        decoder,
        encoder=bert,
        encoder_width=24,
    )
    refused(FileNotFoundError, ("no/such",), larimar.from_pretrained, decoder, encoder=Path("no/such"))
    larimar.from_pretrained(decoder).save_pretrained(tmp_path / "ours")
    refused(ValueError, ("expected none with a whole model",), larimar.from_pretrained, tmp_path / "ours", encoder=bert)
    _edit(bert, hidden_act="relu")
    refused(ValueError, ("hidden_act='relu'",), larimar.from_pretrained, decoder, encoder=bert)
    _edit(bert, hidden_act="gelu", num_hidden_layers=3)
    refused(
        ValueError, ("missing weights", "encoder.layer.2", "3 layers"), larimar.from_pretrained, decoder, encoder=bert
    )
    _edit(bert, num_hidden_layers=2, hidden_size=24)
    refused(
        ValueError, ("has shape", "expected rows of 24 as in the model"), larimar.from_pretrained, decoder, encoder=bert
    )
    _edit(bert, hidden_size=12)
    for changes, message in (
        ({"cls_token": None}, "without [UNK] or [CLS]"),
        ({"words": [*BERT_WORDS, "word6"]}, "has 9 rows, and the tokenizer an id 9"),
    ):
        make_bert(tmp_path, **changes)
        refused(ValueError, (str(bert), message), larimar.from_pretrained, decoder, encoder=bert)
    (bert / "tokenizer.json").unlink()
    refused(FileNotFoundError, ("tokenizer", str(bert)), larimar.from_pretrained, decoder, encoder=bert)


def test_architectures_without_a_decoder_are_refused(tmp_path):
    folder = _folder(tmp_path, "llama")
    for name in set(MODELS) - set(WRAPPING):
        for call in (partial(load_huggingface, arch=name), load_class("model", name).from_pretrained):
            refused(ValueError, (str(folder), f"{name!r}", "llama"), call, folder)


def test_mamba_comes_from_its_own_folders(tmp_path):
    """``Mamba.from_pretrained`` on a folder of Hugging Face's, with or without its head, and on what it then writes;
    flags that change no weight pass."""
    mamba = load_class("model", "mamba")
    for tied in (True, False):
        theirs = hugging_face_mamba(tie_word_embeddings=tied)
        theirs.save_pretrained(tmp_path / "theirs")
        model = mamba.from_pretrained(tmp_path / "theirs")
        with torch.no_grad():
            torch.testing.assert_close(
                logits(model, 5), theirs(IDS).logits.double(), rtol=0, atol=1e-5
            )  # Hugging Face computes its norms in fp32
        assert type(model) is mamba and equal(model, load_huggingface(theirs, "mamba")) and not model.training
        model.save_pretrained(tmp_path / "ours")
        again = mamba.from_pretrained(tmp_path / "ours")
        assert again.config == model.config and equal(again, model)
        assert torch.equal(again.generate(IDS, 5, segment_len=4), model.generate(IDS, 5))
    assert not mamba.from_pretrained(tmp_path / "theirs", wd_all=False).config.wd_all
    refused(
        ValueError, (str(tmp_path), "width=32", "leave it out"), mamba.from_pretrained, tmp_path / "theirs", width=32
    )
    refused(TypeError, "'memory_tokens'", mamba.from_pretrained, tmp_path / "theirs", memory_tokens=3)
    (tmp_path / "theirs" / "model.safetensors").unlink()
    refused(FileNotFoundError, "model.safetensors", mamba.from_pretrained, tmp_path / "theirs")


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mamba"])
def test_no_memory_goes_around_a_mamba(tmp_path, name):
    """``ARMT.from_pretrained`` and the like on a folder with a Mamba: one line that names both."""
    hugging_face_mamba().save_pretrained(tmp_path)
    refused(
        ValueError,
        (str(tmp_path), "model_type='mamba'", f"arch={name!r}", "check arch and source"),
        load_class("model", name).from_pretrained,
        tmp_path,
    )


# --- what is wrong with a folder


def _edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _cut(folder, share):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def _reshape(folder, name):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(
        weights | {name: torch.cat([weights[name], weights[name][:1]])}, folder / "model.safetensors"
    )


def _shard(folder, lost):
    hugging_face("llama").save_pretrained(folder, max_shard_size="5KB")
    (folder / "model.safetensors").unlink()
    if lost:
        next(folder.glob("*00002-of*")).unlink()


BOTH = [  # (what happens to a folder, error, words)
    (lambda f: (f / "config.json").unlink(), FileNotFoundError, ("config.json", "save_pretrained")),
    (lambda f: (f / "config.json").write_text("{"), ValueError, ("config.json", "save_pretrained")),
    (lambda f: (f / "config.json").write_text("[]"), ValueError, ("config.json", "list", "object")),
    (lambda f: _edit(f, model_type="bert"), ValueError, ("model_type='bert'", "gpt2, gptj, gpt_neox, llama")),
    (lambda f: _edit(f, model_type=None), ValueError, "model_type=None"),
    (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "model.safetensors"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), ValueError, ("model.safetensors", "cannot be read")),
    *[
        (lambda f, share=share: _cut(f, share), ValueError, ("model.safetensors", "cannot be read"))
        for share in (0.01, 0.5, 0.99)
    ],
]
OURS = [
    *BOTH,
    (lambda f: _edit(f, arch="amrt"), ValueError, ("arch='amrt'", "did you mean 'armt'")),
    (lambda f: _edit(f, settings=None), ValueError, ("settings", "arch")),
    (lambda f: _edit(f, settings={"colour": "red"}), ValueError, ("colour", "armt")),
    (lambda f: _reshape(f, "model.memory"), ValueError, ("memory", "(3, 16)", "(2, 16)")),
]
THEIRS = [
    *BOTH,
    (lambda f: _edit(f, num_attention_heads=3), ValueError, "config.json"),
    (lambda f: _edit(f, num_hidden_layers=3), ValueError, ("missing", "layers.2")),
    (lambda f: _edit(f, tie_word_embeddings=True), ValueError, ("lm_head", "tied")),
    (
        lambda f: _reshape(f, "model.layers.1.self_attn.k_proj.weight"),
        ValueError,
        ("layers.1.self_attn.k_proj.weight", "(9, 16)", "(8, 16)"),
    ),
    (lambda f: _shard(f, lost=True), FileNotFoundError, "model-00002-of"),
    (
        lambda f: (_shard(f, lost=False), (f / "model.safetensors.index.json").write_text("{}")),
        ValueError,
        "weight_map",
    ),
]


@pytest.mark.parametrize(("spoil", "error", "words"), OURS)
def test_broken_folders_of_ours(tmp_path, spoil, error, words):
    build_model("armt").save_pretrained(tmp_path)
    spoil(tmp_path)
    refused(
        error,
        (str(tmp_path), *([words] if isinstance(words, str) else words)),
        load_class("model", "armt").from_pretrained,
        tmp_path,
    )


@pytest.mark.parametrize(("spoil", "error", "words"), THEIRS)
def test_broken_folders_of_hugging_face(tmp_path, spoil, error, words):
    folder = _folder(tmp_path, "llama")
    spoil(folder)
    refused(
        error,
        (str(folder), *([words] if isinstance(words, str) else words)),
        load_class("model", "armt").from_pretrained,
        folder,
    )


def test_shards(tmp_path):
    folder = _folder(tmp_path, "llama")
    whole = load_class("model", "transformer").from_pretrained(folder)
    _shard(folder, lost=False)
    assert equal(load_class("model", "transformer").from_pretrained(folder), whole)


@pytest.mark.parametrize("name", [Path("nothing"), "./nothing", "a/b/c", "/nothing", "config.json"])
def test_paths_that_are_no_folder(tmp_path, monkeypatch, name):
    """Such a path is never looked up on the hub."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").touch()
    refused(FileNotFoundError, "no such folder", load_class("model", "armt").from_pretrained, name)


def test_saving_is_atomic(tmp_path, monkeypatch):
    """A failure while writing leaves the model that was there, and no other file."""
    model = build_model("rmt")
    model.save_pretrained(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(weights, path, metadata):
        Path(path).write_bytes(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(pretrained.safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(build_model("armt"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


OFFLINE = """
import sys
import torch
from lit_memory import ARMT
folder, ours = sys.argv[1:]
model = ARMT.from_pretrained(folder, memory_tokens=2, memory_dim=4)
model.save_pretrained(ours)
cached = ARMT.from_pretrained("someone/tiny", memory_tokens=2, memory_dim=4)
same = cached.decoder.state_dict()
assert all(torch.equal(t, same[name]) for name, t in model.decoder.state_dict().items() if "block" in name)
from transformers import AutoModelForCausalLM
assert AutoModelForCausalLM.from_pretrained(ours)(torch.ones(1, 3).long()).logits.shape == (1, 3, 23)
for name in ("someone/missing", "missing"):
    try:
        ARMT.from_pretrained(name)
    except FileNotFoundError as error:
        assert name in str(error) and "no such folder" in str(error) and "\\n" not in str(error), error
    else:
        raise AssertionError(name)
"""


def test_offline(tmp_path):
    """With HF_HUB_OFFLINE=1: local folders, names that are in the cache, and one line for others."""
    folder, commit = _folder(tmp_path, "gpt2"), "0" * 40
    cache = tmp_path / "home" / "hub" / "models--someone--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    (cache / "snapshots").mkdir()
    folder.rename(cache / "snapshots" / commit)
    folder.symlink_to(cache / "snapshots" / commit)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", OFFLINE, folder, tmp_path / "ours"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
