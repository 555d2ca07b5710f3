"""Folders of our models behind Hugging Face's interface: who writes and uploads which files, and what must be there."""

import os
import subprocess
import sys
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch
import yaml
from conftest import VOCAB, build_model
from test_hf_tools import N, shell_of
from test_interop import hugging_face
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline

import lit_memory.hf
from lit_memory.hf.pretrained import registered_name, shared_weights
from lit_memory.registry import MODELS

WORDS = ["<eos>", "<unk>", *(f"w{i}" for i in range(2, VOCAB))]
AUTO = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__ == "lit_memory.hf.auto", type(model)
model.save_pretrained(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
"""


def test_a_folder_names_its_classes(tmp_path):
    """Who trusts a folder needs no import of ours, whoever wrote it; no copy of our code lies in it."""
    build_model("armt").save_pretrained(tmp_path / "ours")
    command = [sys.executable, "-c", AUTO, str(tmp_path / "ours"), str(tmp_path / "theirs")]
    subprocess.run(command, check=True, env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")})
    for folder in ("ours", "theirs"):
        assert [path.name for path in (tmp_path / folder).glob("*.py")] == ["lit_memory_auto.py"]


def fresh():
    """A shell that no folder holds yet."""
    return lit_memory.LitMemoryForCausalLM(lit_memory.LitMemoryConfig("rmt", {"vocab_size": VOCAB}))


def test_an_upload_has_the_file_of_its_classes(tmp_path, monkeypatch):
    """``push_to_hub`` sends what is written while it runs."""
    api = Mock()
    monkeypatch.setattr("transformers.utils.hub._hf_api", api)
    monkeypatch.setattr("transformers.modeling_utils.create_and_tag_model_card", Mock())
    fresh().save_pretrained(tmp_path, push_to_hub=True, repo_id="mine")
    sent = {operation.path_in_repo for operation in api.create_commit.call_args.kwargs["operations"]}
    assert sent == {"config.json", "generation_config.json", "lit_memory_auto.py", "model.safetensors"}


def test_only_the_main_process_writes(tmp_path):
    fresh().save_pretrained(tmp_path, is_main_process=False)
    assert not [*tmp_path.iterdir()]


def test_a_folder_of_a_model_from_a_configuration(model, tokens, tmp_path):
    """It has every weight of the model, those that are tied included, whoever wrote it."""
    arch, ids = registered_name(type(model)), tokens(2, 2 * N)
    shell = lit_memory.LitMemoryForCausalLM(lit_memory.LitMemoryConfig(arch, asdict(model.config), N)).eval()
    shell.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, shell(ids).logits)
    assert shared_weights(again.model) == shared_weights(model)


def test_a_folder_must_hold_all_weights(tmp_path):
    """Where transformers would warn and go on with random weights, an error of one line names them."""
    build_model("armt").save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    for layers, problem in (("3", "missing_keys"), ("1", "unexpected_keys")):
        (tmp_path / "config.json").write_text(config.replace('"layers": 2', f'"layers": {layers}'))
        with pytest.raises(ValueError, match=rf"^[^\n]*{problem}: model.decoder.layers[^\n]*config.json asks for$"):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_weights_are_not_offloaded(tmp_path):
    """What lies on the disk comes to a device when its module is called; memories are read without."""
    pytest.importorskip("accelerate", reason="needs the extra peft")
    build_model("armt").save_pretrained(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"^[^\n]*mine: device_map offloads model\.[^\n]*expected all weights on dev"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "mine", device_map={"": "disk"}, offload_folder=tmp_path / "disk"
        )


# Tokenizer, model card, and how to generate


def save_words(folder):
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_the_tokenizer_goes_along(tmp_path):
    """From a pretrained decoder to the model around it, and to what is made of that; or as an argument."""
    hugging_face("gpt2", vocab_size=VOCAB).save_pretrained(tmp_path / "decoder")
    tokenizer = save_words(tmp_path / "decoder")
    model = lit_memory.ARMT.from_pretrained(tmp_path / "decoder", memory_tokens=2, memory_dim=4)
    model.save_pretrained(tmp_path / "mine")
    model = lit_memory.ARMT.from_pretrained(tmp_path / "mine")
    model.save_pretrained(tmp_path / "mine")
    model.save_pretrained(tmp_path / "again")
    lit_memory.ARMT(model.config).save_pretrained(tmp_path / "given", tokenizer=tokenizer)
    lit_memory.ARMT(model.config).save_pretrained(tmp_path / "named", tokenizer=tmp_path / "mine")
    lit_memory.ARMT(model.config).save_pretrained(tmp_path / "none")
    for folder in ("mine", "again", "given", "named"):
        found = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert found("w3 w4 w2").input_ids == [3, 4, 2] and found.chat_template == tokenizer.chat_template
    assert not (tmp_path / "none" / "tokenizer.json").exists()
    model.source = tmp_path / "gone"
    with pytest.warns(UserWarning, match=r"gone: the tokenizer's folder is gone; save it to .*last yourself$"):
        model.save_pretrained(tmp_path / "last")
    assert lit_memory.ARMT.from_pretrained(tmp_path / "last").memory.equal(model.memory)


def test_a_pipeline(tmp_path):
    """``pipeline("text-generation")`` on a folder that has all that it needs."""
    save_words(tmp_path)
    shell = shell_of(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path), device="cpu")
    (found,) = pipe("w3 w4 w5", max_new_tokens=2 * N, do_sample=False, return_full_text=False)
    new = shell.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2 * N, do_sample=False, eos_token_id=0)[0, 3:]
    assert found["generated_text"].split() == [WORDS[i] for i in new]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_card(tmp_path, name):
    """Both ways of saving write it; one that is there stays."""
    shell = shell_of(tmp_path / "ours", name)
    shell.save_pretrained(tmp_path / "theirs")
    text = (tmp_path / "ours" / "README.md").read_text()
    assert text.replace("/ours", "") == (tmp_path / "theirs" / "README.md").read_text().replace('"theirs"', '"ours"')
    head = yaml.safe_load(text.split("---")[1])
    assert head["tags"] == ["lit-memory", name] and head["pipeline_tag"] == "text-generation"
    count = sum(p.numel() for p in shell.model.parameters())
    assert f"| parameters | {count:,} |" in text and "5 tokens at a time" in text
    (tmp_path / "ours" / "README.md").write_text("my own words")
    shell.model.save_pretrained(tmp_path / "ours")
    assert (tmp_path / "ours" / "README.md").read_text() == "my own words"


def test_generation_ends_where_the_decoders_does(tmp_path):
    """The id that ends a text goes along, from the decoder's generation_config.json or config.json, or a tokenizer."""
    ids = {"bos_token_id": 1, "eos_token_id": 36, "pad_token_id": 0}
    for name in ("both", "config"):
        hugging_face("gpt2", vocab_size=VOCAB, **ids).save_pretrained(tmp_path / name)
    (tmp_path / "config" / "generation_config.json").unlink()
    save_words(tmp_path / "config")
    for name in ("both", "config"):
        model = lit_memory.ARMT.from_pretrained(tmp_path / name, memory_tokens=2, memory_dim=4)
        model.save_pretrained(tmp_path / "mine")
        lit_memory.ARMT.from_pretrained(tmp_path / "mine").save_pretrained(tmp_path / "again")
        for folder in ("mine", "again"):
            shell = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            found = shell.generation_config
            assert {key: getattr(found, key) for key in ids} == ids
    with torch.no_grad():
        logits = shell(torch.tensor([[3, 4, 5]])).logits[0, -1]
    shell.generation_config.eos_token_id = int(logits.argmax())
    assert shell.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=6, do_sample=False).shape[1] == 4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "config")
    lit_memory.ARMT(model.config).save_pretrained(tmp_path / "given", tokenizer=tokenizer)
    given = AutoModelForCausalLM.from_pretrained(tmp_path / "given").generation_config
    assert given.eos_token_id == tokenizer.eos_token_id is not None
