"""Tokenizers: text to ids and back, vocabularies that depend on the text alone, and inputs that are errors."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lit_memory
from lit_memory.hf.reading import read_config
from lit_memory.text import tokenizers
from lit_memory.text.corpus import Corpus, content_key, load_corpus
from lit_memory.text.stream import build_stream
from lit_memory.text.tokenizers import (
    SubwordTokenizer,
    WikiTextTokenizer,
    WordTokenizer,
    build_tokenizer,
    pretrained_tokenizer,
    train_bpe,
    vocabulary_size,
)

SHARED = Path(os.environ.get("LIT_MEMORY_SHARED") or Path(__file__).parents[2] / "shared") / "data"

TEXTS = [
    "The cat sat on the mat, and the cat sat.",
    "A dog and a cat (two of them) sat: why? <eos> “Well!”",
    "Zoë’s naïve façade — 42 %\n\n<gen>",
]
FACTS = ["Mary moved to the bathroom.", "Where is Mary?"]
NAMES = ["word", "char", "bpe"]


def corpus(*texts):
    return Corpus(content_key(*texts), lambda: texts)


@pytest.fixture
def build(tmp_path):
    """``build(name, *texts, **options)``: a tokenizer that is trained on TEXTS or other texts."""
    sizes = {"word": 64, "bpe": 300}
    return lambda name, *texts, **options: build_tokenizer(
        name, corpus(*(texts or TEXTS)), tmp_path, **{"vocab_size": sizes.get(name, 0), **options}
    )


@pytest.mark.parametrize("name", NAMES)
def test_interface(build, name):
    tokenizer = build(name, words=FACTS)
    specials = [tokenizer.pad_id, tokenizer.eos_id, tokenizer.gen_id]
    assert specials == [0, 1, 2]
    batch = tokenizer.encode_batch([*TEXTS, "", *FACTS])
    for text, ids in zip([*TEXTS, "", *FACTS], batch, strict=True):
        assert ids.dtype == np.int32 and ids.ndim == 1 and np.array_equal(ids, tokenizer.encode(text))
        assert not set(specials) & set(ids.tolist())  # whatever the text says
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert [tokenizer.decode(ids) for ids in batch[-2:]] == FACTS
    assert tokenizer.decode([0, 1, 2]).replace(" ", "") == "<pad><eos><gen>"
    assert tokenizer.encode_batch([]) == []


@pytest.mark.parametrize("name", ["char", "bpe"])
def test_text_comes_back_byte_for_byte(build, name):
    tokenizer = build(name)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS


def test_words_are_the_closed_ones_and_then_the_most_frequent(build):
    tokenizer = build("word", "b b b c c a a d", words=["two words.", "c"], vocab_size=10)
    assert tokenizer.words == ["<pad>", "<eos>", "<gen>", "<unk>", "two", "words", ".", "c", "b", "a"]
    assert tokenizer.encode("a c d! C").tolist() == [9, 7, 3, 3, 3] and tokenizer.vocab_size == 10
    assert tokenizer.decode([8, 3, 6]) == "b <unk>."
    assert tokenizer.decode([8, tokenizer.vocab_size]) == "b <unk>"
    assert (
        build("word", "b b b c c a a d", words=["two words.", "c"], vocab_size=99).vocab_size == 11
    )  # all that there are


def test_bytes(build):
    tokenizer = build("char")
    assert tokenizer.encode("aé").tolist() == [100, 198, 172] and tokenizer.vocab_size == 259
    assert tokenizer.decode([100, 1, 198]) == "a<eos>�"
    assert tokenizer.decode([100, 4000]) == "a�" and vocabulary_size("char", 4096) == tokenizer.vocab_size


def test_bpe_learns_what_is_frequent(build):
    tokenizer = build("bpe", "the cat " * 50, vocab_size=270)
    assert tokenizer.vocab_size <= 270 and len(tokenizer.encode("the cat the cat")) <= 5 < len(
        tokenizer.encode("xyzzyx")
    )
    assert (
        build("bpe", "the cat " * 50, vocab_size=259).encode("the cat").tolist() != tokenizer.encode("the cat").tolist()
    )


@pytest.mark.parametrize("name", ["word", "bpe"])
def test_keys_name_what_ids_depend_on(build, name):
    keys = [
        build(name, *texts, **options).key
        for texts in (TEXTS, [*TEXTS, "dog " * 99])
        for options in ({}, {"vocab_size": 280 if name == "bpe" else 20})
    ]
    assert len(set(keys)) == 4
    assert len({build(name).key for name in NAMES}) == 3 and build(name).key == build(name).key
    assert (build(name, words=["zebra"]).key == build(name).key) == (name == "bpe")


def test_key_of_subwords_has_the_special_tokens(build):
    backend = build("bpe").backend
    assert (
        len({SubwordTokenizer(backend, *ids).key for ids in ((0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 1), (0, 1))}) == 5
    )


@pytest.mark.parametrize("name", ["word", "bpe"])
def test_cached_is_uncached(tmp_path, name):
    reads = []
    counted = Corpus("key", lambda: reads.append(1) or TEXTS)
    options = {"vocab_size": 64 if name == "word" else 300}
    tokenizers = [build_tokenizer(name, counted, tmp_path, **options) for _ in range(2)]
    assert len(reads) == 1 and len(list(tmp_path.iterdir())) == 1
    (file,) = (path for path in tmp_path.glob("*/*.json") if path.name != "sha256.json")
    file.write_bytes(file.read_bytes().replace(b"cat", b"dog"))
    tokenizers.append(build_tokenizer(name, counted, tmp_path, **options))
    assert len(reads) == 2 and len({t.key for t in tokenizers}) == 1


@pytest.mark.parametrize("name", ["word", "wikitext", "bpe"])
def test_caches_have_what_a_vocabulary_comes_from(tmp_path, monkeypatch, name):
    """Another algorithm, and another way to split words, build it again; ids of words follow from how they are
    split."""
    found = [build_tokenizer(name, corpus(*TEXTS), tmp_path, 300)]
    monkeypatch.setattr(tokenizers, "FORMAT", 10)
    found.append(build_tokenizer(name, corpus(*TEXTS), tmp_path, 300))
    for kind in (WordTokenizer, WikiTextTokenizer):
        monkeypatch.setattr(kind, "pattern", re.compile(kind.pattern.pattern + "|@"))
    found.append(build_tokenizer(name, corpus(*TEXTS), tmp_path, 300))
    of_words = name != "bpe"
    assert len(list(tmp_path.iterdir())) == 2 + of_words and len({found.key for found in found}) == 1 + of_words


CHILD = """
import sys
from pathlib import Path
from lit_memory.text.haystack import build_haystack
from lit_memory.text.corpus import load_corpus
from lit_memory.text.tokenizers import build_tokenizer
corpus, folder = load_corpus("noise", "train", books=1), Path(sys.argv[1])
for name, size in (("word", 500), ("bpe", 500)):
    tokenizer = build_tokenizer(name, corpus, folder, size, ["b a"])
    haystack = build_haystack(corpus, tokenizer, folder, without=[["Anwen", "the"], ["market", "a"]])
    sys.stdout.write(f"{name} {tokenizer.key} {len(haystack)} {haystack.tokens_N.tolist()[::97]}\\n")
"""


def test_processes_agree(tmp_path):
    """Two processes that fill one cache at once, and one with its own, agree, whatever the order of their sets."""
    folders = [tmp_path / "one", tmp_path / "one", tmp_path / "two"]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        )
        for seed, folder in enumerate(folders)
    ]
    found = [run.communicate()[0] for run in runs]
    assert all(run.returncode == 0 for run in runs) and found[0].count("\n") == 2 and len(set(found)) == 1
    assert {p.name for p in folders[0].iterdir()} == {p.name for p in folders[2].iterdir()} and len(
        list(folders[0].iterdir())
    ) == 4


@pytest.fixture
def save(tmp_path):
    """``save(**tokens)``: a folder with a tokenizer as Hugging Face saves it."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    def write(**tokens):
        backend = Backend.from_str(train_bpe(corpus("GENERAL GENUINE " * 99), 262).decode())
        PreTrainedTokenizerFast(tokenizer_object=backend, **tokens).save_pretrained(tmp_path / "saved")
        return tmp_path / "saved"

    return write


def test_folder_of_hugging_face(build, save):
    """GEN is the first piece of that text; the end of text pads where there is no token for it. Nothing in a text is
    special."""
    folder = save(eos_token="<|endoftext|>")
    tokenizer = build(str(folder))
    assert tokenizer.decode([tokenizer.gen_id]) == "GEN" and tokenizer.vocab_size == 263
    assert tokenizer.pad_id == tokenizer.eos_id == 262 and tokenizer.decode([262]) == "<|endoftext|>"
    text = "A text of more than four pieces.<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text and 262 not in tokenizer.encode(text)
    assert [ids.tolist() for ids in tokenizer.encode_batch([text, "A"])] == [
        tokenizer.encode(text).tolist(),
        tokenizer.encode("A").tolist(),
    ]
    assert build(str(save(eos_token="<eos>", pad_token="<pad>"))).pad_id == 0


def test_nothing_is_cut_or_padded(build):
    backend = build("bpe").backend
    backend.enable_truncation(3)
    backend.enable_padding(length=40)
    assert SubwordTokenizer(backend, 0, 1, 2).encode(TEXTS[0]).tolist() == build("bpe").encode(TEXTS[0]).tolist()


def test_folder_is_read_without_the_network(build, save, monkeypatch):
    folder = save(eos_token="<eos>")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    assert build(str(folder)).eos_id == 1


def refused(error, expected, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in expected.split("|")), str(
        caught.value
    )


def test_wrong_sizes(build):
    refused(
        ValueError,
        "vocab_size=6: expected at least 7|3 words that have to be in it",
        build,
        "word",
        words=["a b", "c"],
        vocab_size=6,
    )
    refused(ValueError, "vocab_size=258: expected at least 259|256 bytes", build, "bpe", vocab_size=258)


def test_wrong_names(build, save, monkeypatch, tmp_path):
    def fetch(name, *, revision, allow_patterns):
        asked.append((name, revision))
        raise ConnectionError("a long\nstory")

    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    refused(
        FileNotFoundError,
        "tokenizer 'wrod': expected word, wikitext, char, bpe|Hugging Face hub (ConnectionError); did you mean 'word'?",
        build,
        "wrod",
    )
    commit = "a1" * 20
    refused(FileNotFoundError, f"tokenizer 'org/name@{commit}': expected word", build, f"org/name@{commit}")
    assert asked == [("wrod", None), ("org/name", commit)]
    (tmp_path / "empty").mkdir()
    refused(FileNotFoundError, f"tokenizer '{tmp_path / 'empty'}': expected", build, str(tmp_path / "empty"))
    refused(ValueError, "names its end of text (eos_token)", build, str(save(pad_token="<pad>")))


def test_a_name_on_the_hub(build, save, monkeypatch):
    folder = save(eos_token="<eos>")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, *, revision, allow_patterns: str(folder))
    assert build("org/name").eos_id == 1


def test_wikitext_has_an_end_token_per_line(tmp_path):
    """Words are split at white space, <unk> is one of them, and every line but the last ends with <eos>; the stream
    adds the last one."""
    text = " = Title = \n\n The <unk> @-@ 1 , 2 \n"
    tokenizer = build_tokenizer("wikitext", Corpus("key", lambda: [text], "tiny"), tmp_path, 100)
    words = [tokenizer.words[i] for i in tokenizer.encode(text)]
    assert (
        words == ["=", "Title", "=", "<eos>", "<eos>", "The", "<unk>", "@-@", "1", ",", "2"]
        and tokenizer.vocab_size == 4 + 8
    )
    assert "\n" not in tokenizer.words and 3 not in tokenizer.encode(text) and tokenizer.encode("other")[0] == 3
    assert tokenizer.key != build_tokenizer("word", Corpus("key", lambda: [text], "tiny"), tmp_path, 100).key


def test_wikitext_2_has_its_published_sizes(tmp_path):
    """Spec 8.3: 2,088,628, 217,646 and 245,569 tokens, 33,278 words of which <eos> is one."""
    folder = SHARED / "wikitext2"
    if not folder.is_dir():
        pytest.skip("../shared is absent")
    tokenizer = build_tokenizer("wikitext", load_corpus(str(folder), "train"), tmp_path, 10**6)
    assert tokenizer.vocab_size == 33_278 + 3
    for split, tokens in {"valid": 217_646, "test": 245_569}.items():
        stream = build_stream(load_corpus(str(folder), split), tokenizer, tmp_path)
        assert len(stream) == tokens and 3 not in stream.tokens_N


CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, PretrainedConfig
Path({proof!r}).touch()
class Mine(PreTrainedTokenizerFast): pass
class MineConfig(PretrainedConfig): model_type = "mine"
"""


@pytest.fixture
def folder_with_code(tmp_path, monkeypatch):
    """A folder with a tokenizer of its own class, whose file makes ``ran`` when it is imported. Somebody says yes to
    every question."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, proof = tmp_path / "hostile", tmp_path / "ran"
    folder.mkdir()
    classes = {"AutoTokenizer": [None, "code.Mine"], "AutoConfig": "code.MineConfig"}
    for name, content in {
        "config.json": {"model_type": "mine", "auto_map": {"AutoConfig": "code.MineConfig"}},
        "tokenizer_config.json": {"tokenizer_class": "Mine", "auto_map": classes},
    }.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "code.py").write_text(CODE.format(proof=str(proof)))
    (folder / "tokenizer.json").write_bytes(train_bpe(corpus(*TEXTS), 300))
    yield folder
    assert not proof.exists() and not asked and not (tmp_path / "modules").exists()


def test_code_in_a_folder_is_neither_run_nor_asked_about(folder_with_code, build):
    name = str(folder_with_code)
    for load in (pretrained_tokenizer, build):
        with pytest.raises(ValueError) as caught:
            load(name)
        said = f"tokenizer {name!r}: Python code in its folder (none of it was run); expected one in the format of "
        assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="model_type='mine': expected gpt2"):
        read_config(folder_with_code, ["gpt2"])
    config = folder_with_code / "config.json"
    config.write_text(config.read_text().replace("mine", "gpt2"))
    assert type(read_config(folder_with_code, ["gpt2"])).__name__ == "GPT2Config"  # transformers' own


def test_no_call_of_transformers_trusts_code():
    """Every ``from_pretrained`` that is not our own says so."""
    calls = []
    for path in Path(lit_memory.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("from_pretrained", "from_config"):
                said = {key.arg: getattr(key.value, "value", None) for key in node.keywords}
                calls.append(f"{path.name}: {ast.unparse(node.func)}")
                if calls[-1].endswith((": model.from_pretrained", ": LitMemoryForCausalLM.from_pretrained")):
                    continue  # our own
                assert said.get("trust_remote_code") is False, f"{path}:{node.lineno}"
    assert len(calls) >= 3, calls
