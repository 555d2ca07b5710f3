"""Fine-tuning by YAML: ``train.init`` fills the model, a tokenizer brings its size, and the plan checks both."""

import dataclasses
import json
import shutil

import pytest
import torch
import yaml
from conftest import build_model
from huggingface_hub import constants
from safetensors.torch import save_file
from test_interop import BACKBONES, SETTINGS, hugging_face, hugging_face_mamba, reference_weights
from test_pretrained import make_bert, make_decoder
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_memory.cli import main
from lit_memory.hf.huggingface import load_huggingface
from lit_memory.hf.initial import initial_settings
from lit_memory.hf.reference import load_reference
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import parse
from lit_memory.recurrence import unroll
from lit_memory.registry import load_class
from lit_memory.run.build import build
from lit_memory.tasks.language_modeling import LanguageModeling
from lit_memory.text.tokenizers import size_in
from lit_memory.util.provenance import PROJECT

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
ARMT = load_class("model", "armt")
WORDS = ["<eos>", "<unk>", "GEN", *(f"w{i}" for i in range(3, 20))]


@pytest.mark.parametrize(("backbone", "settings"), [*SETTINGS, *((name, {}) for name in BACKBONES)])
def test_fields_are_those_of_the_loaded_model(tmp_path, backbone, settings):
    """Known from config.json alone, they make the model that the weights make."""
    theirs = hugging_face(backbone, **settings)
    theirs.config.save_pretrained(tmp_path)
    loaded = load_huggingface(theirs, "armt", memory_tokens=3, dropout=0.0)
    planned = ARMT(ARMT.Config(memory_tokens=3, **initial_settings(ARMT, str(tmp_path))))
    names = {f.name for f in dataclasses.fields(ARMT.Config)} - {"tie_embeddings", "kv_heads", "qkv_bias"}
    differing = [n for n in names if getattr(planned.config, n) != getattr(loaded.config, n)]
    assert {n for n in differing if n != "rotary_fraction"} == set()
    assert planned.config.rotary_dims == loaded.config.rotary_dims
    assert (planned.decoder.head.weight is planned.decoder.tokens.weight) is loaded.config.tie_embeddings
    shapes = {name: t.shape for name, t in planned.state_dict().items()}
    assert shapes == {name: t.shape for name, t in loaded.state_dict().items()}


def test_a_source_that_is_too_long_for_a_path(make_spec):
    """It may be a name on the hub, which nobody asks before the training, and is else told in a line."""
    assert make_spec(f"train.init={'x' * 300}").files == {}
    with pytest.raises(ConfigError, match=r"train\.init: .*no such folder; expected one with config\.json and weights"):
        make_spec(f"train.init=/{'x' * 300}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a Llama and its tokenizer of 20 words; the model has three ids more."""
    folder = tmp_path_factory.mktemp("llama")
    hugging_face("llama", num_key_value_heads=1, rms_norm_eps=1e-3, max_position_embeddings=64).float().save_pretrained(
        folder
    )
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


def tuning(folder, **model):
    """An experiment as a user writes it: a memory, a task, a folder."""
    return {
        "experiment": "tuning",
        "base": {
            "model": {"name": "armt", "memory_tokens": 2, "memory_dim": 4, **model},
            "task": {
                "name": "language_modeling",
                "source": "noise",
                "books": 2,
                "tokenizer": str(folder),
                "segments": 2,
                "segment_len": 8,
            },
            "train": {"init": str(folder), "steps": 2, "batch_size": 2, "valid_size": 2, "test_size": 2},
        },
        "arms": {"tuned": {}},
        "seeds": [0],
        "report": {"x": "test_segments", "y": "loss"},
    }


def test_a_folder_fills_the_model(llama):
    """Neither backbone nor vocabulary stand in the file; the run is made of the folder's weights."""
    (spec,) = parse(tuning(llama), "tuning.yaml").at().plan()
    wanted = {"family": "llama", "layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "norm_eps": 1e-3, "ff_mult": 2.5}
    wanted |= {"vocab_size": 23, "memory_tokens": 2, "tie_embeddings": None, "dropout": 0.0}
    assert wanted.items() <= spec.model.items()
    module, data = build(spec)
    theirs = load_class("model", "transformer").from_pretrained(llama).state_dict()
    assert all(torch.equal(module.model.state_dict()[name], tensor) for name, tensor in theirs.items())
    assert data.task.vocab_size == 20 and int(data.task.batch(0, "train", 0, 2).ids_BT.max()) < 20
    given = tuning(llama, family="llama", layers=2, dropout=0.5)
    assert parse(given, "tuning.yaml").at().plan()[0].model["dropout"] == 0.5
    (again,) = parse(tuning(llama, **{"layers?": 2}), "tuning.yaml").at().plan()
    assert again.key == spec.key


def test_a_folder_of_ours_fills_the_memory_too(tmp_path):
    build_model("armt", gamma="off").save_pretrained(tmp_path)
    tree = tuning(tmp_path, value_std=0.0)
    tree["base"]["task"] = {"name": "associative_retrieval", "pairs": 2, "test_pairs": [2]}
    tree["base"]["model"] = {"name": "armt"}
    tree["report"] = {}
    tree["base"]["model"]["vocab_size"] = 19
    (spec,) = parse(tree, "tuning.yaml").at().plan()
    assert (spec.model["gamma"], spec.model["memory_tokens"], spec.model["width"]) == ("off", 2, 16)


def test_an_encoder_fills_its_sizes(tmp_path):
    (bert, _), decoder = make_bert(tmp_path), make_decoder(tmp_path)
    found = initial_settings(load_class("model", "larimar"), {"decoder": str(decoder), "encoder": str(bert)})
    assert (found["encoder_width"], found["encoder_layers"], found["encoder_heads"]) == (12, 2, 3)
    assert found["family"] == "gpt2" and found["positions"] == 20


def test_memreasoner_around_a_tiny_gptj(llama, tmp_path, monkeypatch):
    """memreasoner_gptj with folders of its formats in place of six billion parameters: planned, loaded, trained on."""
    decoder, (bert, _) = make_decoder(tmp_path), make_bert(tmp_path)
    hugging_face("gptj").float().save_pretrained(decoder)
    theirs = load_huggingface(decoder)
    tree = yaml.safe_load((PROJECT / "experiments" / "memreasoner_gptj.yaml").read_text())
    model, task, train = (tree["base"][section] for section in ("model", "task", "train"))
    model |= {"layers": 2, "width": 16, "heads": 2, "latent_width": 8, "slots": 8, "rotary_fraction": 0.75}
    model |= {"encoder_layers": 2, "encoder_width": 12, "encoder_heads": 3}
    task |= {"tokenizer": str(llama), "vocab_size": 23, "haystack": "noise", "test_tokens": [0]}
    train |= {"accelerator": "cpu", "precision": "32-true"}
    tree["arms"]["pretrained"]["train.init"] = {"decoder": str(decoder), "encoder": str(bert)}
    tree["seeds"] = [0]
    pretrained, one, two = parse(tree, "tiny.yaml").at().plan()
    assert pretrained.model["family"] == "gptj" and {one.start.key, two.start.key} == {pretrained.key}
    module, data = build(pretrained)
    weights = module.model.decoder.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.decoder.state_dict().items())
    monkeypatch.setattr(module, "log", lambda *args, **options: None)  # there is no trainer
    loss = module.training_step(data.task.batch(0, "train", 0, 2), 0)
    loss.backward()
    assert loss.isfinite() and module.model.decoder.head.bias.grad.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.usefixtures("inline", "unsaved_figures")
def test_the_whole_command(llama, root, tmp_path, capsys):
    """From a YAML of a dozen lines to a table, in this process; a dry run before it."""
    path = tmp_path / "tuning.yaml"
    path.write_text(json.dumps(tuning(llama)))
    assert main([str(path), "--root", str(root), "--dry-run"]) == 0
    assert "tuned" in capsys.readouterr().out
    assert main([str(path), "--root", str(root)]) == 0
    assert "tuned" in capsys.readouterr().out


def _replace(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_the_key_has_what_the_folder_holds(llama, tmp_path):
    """Other weights of the same shape, and another run. What says how the folder came about does not count."""

    def planned():
        (spec,) = parse(tuning(tmp_path / "llama"), "tuning.yaml").at().plan()
        return spec

    shutil.copytree(llama, tmp_path / "llama")
    before = planned()
    assert [*before.files] == ["task.tokenizer", "train.init"] and planned().key == before.key
    (tmp_path / "llama" / "README.md").write_text("a model card")
    assert planned().key == before.key
    hugging_face("llama", num_key_value_heads=1, rms_norm_eps=1e-3, max_position_embeddings=64).save_pretrained(
        tmp_path / "llama"
    )
    after = planned()
    assert after.model == before.model and after.key != before.key


def test_what_does_not_fit_is_told_by_the_plan(llama, tmp_path):
    """One line, before anything starts."""

    def message(tree, **changes):
        for key, value in changes.items():
            tree["base"]["task" if key in ("tokenizer", "segment_len") else "train"][key] = value
        with pytest.raises(ConfigError) as info:
            parse(tree, "tuning.yaml").at().plan()
        assert "\n" not in str(info.value)
        return str(info.value)

    assert message(tuning(llama, layers=3)).endswith(f"model.layers: layers=3: expected 2, as in {llama}; leave it out")
    assert "train.init: ./none: no such folder; expected one with config.json" in message(tuning(llama), init="./none")
    (tmp_path / "empty").mkdir()
    assert "empty: no config.json; expected a folder that" in message(tuning(llama), init=str(tmp_path / "empty"))
    wanted = "train.init: its model has 23 token ids, and the task has 4096 token ids; expected its tokenizer, task."
    assert wanted in message(tuning(llama), tokenizer="word")
    hugging_face_mamba().save_pretrained(tmp_path / "mamba")
    wanted = "model_type='mamba': armt: expected a folder with a model that this architecture can be built around"
    assert wanted in message(tuning(llama), init=str(tmp_path / "mamba"))
    hugging_face("gpt2").save_pretrained(tmp_path / "gpt2")
    found = message(tuning(llama), init=str(tmp_path / "gpt2"), segment_len=64)
    assert "model.positions: positions=20: a segment of 64 tokens" in found and "train.init decides it" in found
    _replace(tmp_path / "gpt2", activation_function="relu")
    assert "activation_function='relu': expected 'gelu_new'" in message(tuning(llama), init=str(tmp_path / "gpt2"))
    build_model("rmt").save_pretrained(tmp_path / "ours")
    wanted = "train.init: " + f"{tmp_path / 'ours'}: arch='rmt': expected 'armt', as model.name"
    assert wanted in message(tuning(llama), init=str(tmp_path / "ours"))


def test_names_on_the_hub_are_not_looked_up(llama):
    tree = tuning(llama, vocab_size=23)
    tree["base"]["train"]["init"] = "somebody/something"
    assert parse(tree, "tuning.yaml").at().plan()[0].model["layers"] == 4


COMMIT = "0123456789" * 4
NAME = "somebody/tiny"


@pytest.fixture
def cache(llama, tmp_path, monkeypatch):
    """``cache(commit)``: the folder of the Llama in a cache of the hub, which is all that there is of a hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    size_in.cache_clear()

    def fill(commit):
        snapshots = tmp_path / "hub" / "models--somebody--tiny" / "snapshots"
        snapshots.mkdir(parents=True, exist_ok=True)
        shutil.copytree(llama, snapshots / commit)

    return fill


def test_a_name_with_its_commit_is_a_folder(llama, cache):
    """It fills the section and brings the tokenizer's size, from the cache; the commit is part of the key."""
    cache(COMMIT)
    named = tuning(f"{NAME}@{COMMIT}")
    (spec,), (known,) = (parse(tree, "tuning.yaml").at().plan() for tree in (named, tuning(llama)))
    assert spec.model == known.model and spec.train["init"] == f"{NAME}@{COMMIT}"
    task = LanguageModeling(LanguageModeling.Config(**{k: v for k, v in spec.task.items() if k != "name"}))
    assert task.vocab_size == 20 and task.tokenizer.vocab_size == 20
    module, _ = build(spec)
    loaded = load_huggingface(llama, "armt", memory_tokens=2, memory_dim=4)
    assert torch.equal(module.model.decoder.tokens.weight, loaded.decoder.tokens.weight)
    cache("f" * 40)
    (other,) = parse(tuning(f"{NAME}@{'f' * 40}"), "tuning.yaml").at().plan()
    assert other.key != spec.key


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (
            f"{NAME}@{COMMIT}",
            f"{NAME}@{COMMIT}: config.json is neither in the cache of the Hugging Face hub nor in reach "
            f"(LocalEntryNotFoundError); check the name, or get it where there is a network: "
            f"hf download {NAME} --revision {COMMIT}",
        ),
        (
            f"{NAME}@main",
            f"{NAME}@main: expected the 40 hexadecimal digits of a commit after @, as the hub shows them; a branch "
            "moves",
        ),
    ],
)
@pytest.mark.usefixtures("cache")
def test_a_name_that_is_not_in_reach(init, message, tmp_path, capsys):
    """The plan tells, in one line."""
    path = tmp_path / "tuning.yaml"
    tree = tuning(init)
    tree["base"]["task"]["tokenizer"] = "char"
    path.write_text(json.dumps(tree))
    assert main([str(path), "--root", str(tmp_path / "root"), "--dry-run"]) == 2
    assert capsys.readouterr().err == f"error: {path} (arm tuned): train.init: {message}\n"
    tree["base"]["task"]["tokenizer"] = init
    del tree["base"]["train"]["init"]
    path.write_text(json.dumps(tree))
    assert main([str(path), "--root", str(tmp_path / "root"), "--dry-run"]) == 2
    assert message.replace("config.json", "tokenizer.json") in capsys.readouterr().err


@pytest.mark.usefixtures("cache", "inline")
def test_weights_that_are_not_in_reach(llama, tmp_path, capsys, make_root):
    """A name without a commit is not asked by the plan, but before a run starts."""
    path = tmp_path / "tuning.yaml"
    tree = tuning(llama, vocab_size=23)
    tree["base"]["train"]["init"] = NAME
    path.write_text(json.dumps(tree))
    assert main([str(path), "--root", str(make_root()), "--dry-run"]) == 0
    assert main([str(path), "--root", str(tmp_path / "root")]) == 2
    error = capsys.readouterr().err
    assert f"train.init: {NAME}: no such folder, and neither in the cache" in error and error.count("\n") == 1
    assert f"hf download {NAME}\n" in error


def test_a_tokenizer_brings_its_size(llama, tmp_path):
    """That of a folder; a number that one writes counts, and must suffice."""

    def size(**options):
        return LanguageModeling(LanguageModeling.Config(source="noise", books=2, **options)).vocab_size

    assert (size(tokenizer=str(llama)), size(tokenizer=str(llama), vocab_size=32)) == (20, 32)
    assert (size(), size(tokenizer="char"), size(tokenizer="gpt2")) == (4096, 259, 4096)
    (tmp_path / "tokenizer.json").write_text("{")
    assert size(tokenizer=str(tmp_path)) == 4096
    small = LanguageModeling(LanguageModeling.Config(source="noise", books=2, tokenizer=str(llama), vocab_size=8))
    with pytest.raises(ValueError, match=r"^vocab_size=8: expected at least 20, the ids of tokenizer"):
        small.tokenizer  # noqa: B018


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_the_authors_are_tested_as_they_are(tmp_path, file, inline, unsaved_figures, make_root, capsys):
    """The experiment of their checkpoints on a tiny one: the run has the logits of ``load_reference``."""
    weights = {name: tensor.float() for name, tensor in reference_weights("armt", "gpt2").items()}
    (tmp_path / "theirs").mkdir()
    save = save_file if file.endswith("safetensors") else torch.save
    save({name: tensor.contiguous().clone() for name, tensor in weights.items()}, tmp_path / "theirs" / file)
    tree = yaml.safe_load((PROJECT / "experiments" / "armt_checkpoints.yaml").read_text())
    sizes = {"layers": 2, "width": 16, "heads": 2, "memory_tokens": 3, "memory_dim": 5, "positions": 20}
    tree["base"]["model"] |= sizes | {"vocab_size": 23, "dropout": 0.0}
    tree["base"]["task"] = {"name": "associative_retrieval", "pairs": 3, "test_pairs": [2, 4]}
    changed = {"init": str(tmp_path / "theirs"), "test_size": 4, "accelerator": "cpu", "precision": "32-true"}
    tree["base"]["train"] |= changed
    tree |= {"scales": {"paper": {}}, "requires": ["armt[first] >= 0"], "expect": ["armt[last] >= 0"]}
    tree["report"] = {"x": "test_pairs", "y": "exact_match"}
    (path := tmp_path / "armt_checkpoints.yaml").write_text(yaml.safe_dump(tree))
    root = make_root()
    assert main([str(path), "--root", str(root)]) == 0, capsys.readouterr().err
    (spec,) = parse(tree, str(path)).at().plan()
    model = build(spec, root)[0].model.eval()
    theirs = load_reference(weights, arch="armt", backbone="gpt2", n_head=2)
    ids = torch.randint(23, (2, 12), generator=torch.Generator().manual_seed(1))
    ours, expected = (m.logits(unroll(m, ids, 4).hidden_BTD) for m in (model, theirs))
    assert torch.equal(ours, expected)
