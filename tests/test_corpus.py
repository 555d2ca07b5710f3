"""Books by source and split, their sentences, and the cache."""

import io
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lit_memory.text import noise as noise_module
from lit_memory.text.corpus import HUB, SPLITS, cached, content_key, load_corpus, sentences
from lit_memory.text.shipped import folder_of
from lit_memory.text.tokenizers import WORD
from lit_memory.util.inputs import read_text

SHARED = Path(os.environ.get("LIT_MEMORY_SHARED") or Path(__file__).parents[2] / "shared") / "data"


def folder(root: Path, **contents: str) -> Path:
    """``folder(root, train__a="text")`` writes root/train/a.txt."""
    for name, text in contents.items():
        path = root / f"{name.replace('__', '/')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def texts(source, split, **options) -> list[str]:
    return list(load_corpus(str(source), split, **options).texts())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        (
            "“Stop!”  she said.\n(He did.)\tShe 'left.' Then",
            ["“Stop!”", "she said.", "(He did.)", "She 'left.'", "Then"],
        ),
        ("A line\nbreak.Not here, 3.14 or e.g.this", ["A line break.Not here, 3.14 or e.g.this"]),
        ("Mr. Smith... went", ["Mr.", "Smith...", "went"]),
        (" \n ", [""]),
    ],
)
def test_sentences(text, found):
    assert sentences(text) == found


def test_real_books_have_the_sentences_of_the_specification():
    """Spec 3.3 for books/train: 85.5 k sentences, 1.97 M words and marks, 73 % of ten or more, median 18, 95 % below
    61; 1,145 name a person of bAbI, 10 a place too. The counts are exact; words are counted within 1 %, as the
    specification leaves its way of counting open."""
    if not (SHARED / "books").is_dir():
        pytest.skip("../shared/data/books is absent")
    found = [
        s
        for path in sorted((SHARED / "books" / "train").glob("*.txt"))
        for s in sentences(path.read_text(encoding="utf-8"))
    ]
    lengths = np.array([len(WORD.findall(s)) for s in found])
    assert len(found) == 85_542 and lengths.sum() == pytest.approx(1.97e6, rel=0.01)
    assert (
        np.mean(lengths >= 10) == pytest.approx(0.73, abs=0.015)
        and np.median(lengths) == 18
        and np.percentile(lengths, 95) == 61
    )
    named = [s for s in found if re.search(r"\b(Mary|John|Sandra|Daniel|Bill|Fred|Jeff)\b", s)]
    assert (
        len(named) == 1145
        and sum(bool(re.search(r"\b(bathroom|bedroom|garden|hallway|kitchen|office)\b", s)) for s in named) == 10
    )


def test_noise_by_split():
    books = [texts("noise", split, books=2) for split in SPLITS]
    assert len({text for split in books for text in split}) == 6
    assert texts("noise", "train", books=1) == books[0][:1]
    assert len(texts("noise", "test")) == 50


def test_folder_with_splits(tmp_path):
    """Some of the training books are for validation, in whatever order the files are listed."""
    source = folder(
        tmp_path,
        readme="no book",
        test__x="X",
        test__y="Y",
        **{f"train__{name}": name.upper() for name in "abcdefghijklmnopqrstu"},
    )
    train, valid, test = (texts(source, split) for split in SPLITS)
    assert (
        len(train) == 19
        and len(valid) == 2
        and sorted(train + valid) == list("ABCDEFGHIJKLMNOPQRSTU")
        and test == ["X", "Y"]
    )
    assert texts(source, "test", books=1) == ["X"]
    folder(tmp_path, valid__z="Z")
    assert texts(source, "valid") == ["Z"] and sorted(texts(source, "train")) == sorted(train + valid)


def test_folder_with_a_file_per_split(tmp_path):
    words = " ".join(map(str, range(1000)))
    source = folder(tmp_path, train=words, test="test text")
    (train,), (valid,), (test,) = (texts(source, split) for split in SPLITS)
    assert (
        train + valid == words
        and len(valid) / len(words) == pytest.approx(0.1, abs=0.01)
        and train.endswith(" ")
        and test == "test text"
    )
    folder(tmp_path, valid="valid text")
    assert texts(source, "valid") == ["valid text"] and texts(source, "train") == [words]


def test_flat_folder(tmp_path):
    """Whole books go to a split by a hash of their names; two books are cut."""
    source = folder(tmp_path / "many", **{name: name.upper() for name in "abcdefghij"})
    found = {split: texts(source, split) for split in SPLITS}
    assert {split: len(part) for split, part in found.items()} == {"train": 8, "valid": 1, "test": 1}
    assert sorted(text for part in found.values() for text in part) == list("ABCDEFGHIJ")
    words = " ".join(map(str, range(1000)))
    parts = [texts(folder(tmp_path / "two", a=words, b=words.replace("1", "x")), split) for split in SPLITS]
    assert "".join(part[0] for part in parts) == words and [len(part) for part in parts] == [2, 2, 2]
    assert [round(len(part[0]) / len(words), 1) for part in parts] == [0.8, 0.1, 0.1]


def test_keys_name_the_content(tmp_path, monkeypatch):
    source = folder(tmp_path, a="A text.", b="B text.", c="C text.")
    keys = {load_corpus(str(source), split).key for split in SPLITS}
    folder(tmp_path, a="a text.", b="b text.", c="c text.")
    keys |= {load_corpus(str(source), split).key for split in SPLITS}
    keys |= {load_corpus("noise", split, books).key for split in SPLITS for books in (None, 7)}
    keys |= {load_corpus("pg19", split, books).key for split in SPLITS for books in (None, 7)}
    keys |= {load_corpus(name, split).key for name in HUB for split in SPLITS if name != "pg19"}
    assert len(keys) == 6 + 6 + 6 + 18
    old = load_corpus("noise", "train").key
    monkeypatch.setattr(noise_module, "PARAGRAPHS", 3)
    assert load_corpus("noise", "train").key != old


@pytest.fixture
def hub(monkeypatch):
    """A hub of books that contain their split and number, and lines of WikiText; returns the list of requests."""
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        if config is None or "wikitext" not in config:
            return ({"short_book_title": "?", "text": f"{split} {i}"} for i in range(1000))
        lines = ["", " = A = \n", " text \n", " = = part = = \n", " text \n", " = B = \n", " text \n"]
        return ({"text": line} for line in lines)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_pg19(hub):
    train, valid, test = (texts("pg19", split, books=30) for split in SPLITS)
    assert (
        valid == [f"train {i}" for i in range(3)]
        and train == [f"train {i}" for i in range(3, 33)]
        and test == [f"test {i}" for i in range(30)]
    )
    assert hub == [("emozilla/pg19", None, part, True) for part in ("train", "train", "test")]
    assert len(texts("pg19", "train")) == 100


def test_wikitext(hub):
    articles = [" \n = A = \n text \n = = part = = \n text \n", " = B = \n text \n"]
    assert texts("wikitext-2-v1", "valid") == articles
    assert texts("wikitext-103-raw-v1", "test", books=1) == articles[:1]
    assert hub == [
        ("Salesforce/wikitext", "wikitext-2-v1", "validation", True),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", "test", True),
    ]


def test_the_hub_has_the_articles_of_the_files(hub, monkeypatch):
    """A blank line of the files is a row without text on the hub: both give 4,358 lines. What an earlier version, which
    lost them, has cached is built again."""
    path = folder_of("shipped-wikitext-2") / "wiki.test.tokens.xz"
    rows = [{"text": line if line.strip() else ""} for line in io.StringIO(read_text(path))]
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *args, **options: rows)
    found = texts("wikitext-2-v1", "test")
    assert found == texts("shipped-wikitext-2", "test") and "".join(found).count("\n") == 4358
    assert load_corpus("wikitext-2-v1", "test").key != content_key(HUB["wikitext-2-v1"], "test", None)


def test_fineweb(hub):
    """FineWeb-Edu has only a training split; its first pages become validation and test."""
    parts = [texts("fineweb-edu", split, books=30) for split in ("valid", "test", "train")]
    assert [text for part in parts for text in part] == [f"train {i}" for i in range(36)] and list(map(len, parts)) == [
        3,
        3,
        30,
    ]
    assert hub == [("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True)] * 3
    assert texts("fineweb-edu-100bt", "valid", books=10) == ["train 0"] and hub[-1][1] == "sample-100BT"


def test_the_files_of_wikitext(tmp_path):
    """A folder with the official files has the articles that the hub has, line ends of any kind kept."""
    lines = [" \n", " = A = \n", " text \x0b = no title \n", " = = part = = \n", " = B = \n", " text \n"]
    for split in SPLITS:
        (tmp_path / f"wiki.{split}.tokens").write_text("".join(lines).replace("text", split))
    for split in SPLITS:
        articles = [f" \n = A = \n {split} \x0b = no title \n = = part = = \n", f" = B = \n {split} \n"]
        assert texts(tmp_path, split) == articles and texts(tmp_path, split, books=1) == articles[:1]
    corpus = load_corpus(str(tmp_path), "test")
    assert (
        list(corpus.texts()) == list(corpus.texts())
        and corpus.key != load_corpus(str(tmp_path), "test", 1).key != load_corpus(str(tmp_path), "valid", 1).key
    )
    (tmp_path / "wiki.test.tokens").rename(tmp_path / "wiki.test.raw")
    assert len(texts(tmp_path, "test")) == 2


def refused(error, words, source, split="train", **options):
    """The error is one line that contains the words."""
    with pytest.raises(error) as caught:
        texts(source, split, **options)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words.split("|")), str(
        caught.value
    )


def test_wrong_sources(tmp_path):
    refused(
        ValueError,
        "source='nois'|no such folder|noise, shipped-books, shipped-|did you mean 'noise'?",
        "nois",
    )
    refused(ValueError, "source='/no/folder'|no such folder", "/no/folder")
    refused(ValueError, "split='dev'|train, valid, test", "noise", split="dev")
    refused(ValueError, "books=0|at least 1", "noise", books=0)
    refused(FileNotFoundError, f"{tmp_path}: no .txt file for split 'train'|{tmp_path / 'train'}", tmp_path)
    folder(tmp_path, test__a="A")
    refused(FileNotFoundError, f"{tmp_path}: no .txt file for split 'valid'", tmp_path, split="valid")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"text \xff\xfe", ":1: not UTF-8 text (byte 5 of the file is 0xff)"),
        (b"text\0", ":1: not text (byte 4 of the file is 0x00)"),
    ],
)
def test_binary_files(tmp_path, content, words):
    folder(tmp_path, train__a="A", train__b="B")
    (tmp_path / "train" / "picture.txt").write_bytes(content)
    refused(ValueError, f"{tmp_path / 'train' / 'picture.txt'}{words}|or take it away", tmp_path)


def test_byte_order_mark_is_no_text(tmp_path):
    folder(tmp_path, test="")
    (tmp_path / "test.txt").write_bytes("\ufeffText".encode())
    assert texts(tmp_path, "test") == ["Text"]


def test_hub_out_of_reach(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("a long\nstory")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    load_corpus("pg19", "train")  # its key needs no network
    refused(
        FileNotFoundError,
        "pg19: emozilla/pg19 is not in reach on the Hugging Face hub (ConnectionError)|folder of books",
        "pg19",
    )


def test_content_key():
    parts = [(), ("a",), ("a", "b"), ("ab",), ("a, b",), (1,), ("1",), (1.0,), (None,), ([],), (["a"],)]
    assert len({content_key(*p) for p in parts}) == len(parts)
    assert content_key("a", 1, ["b"]) == content_key("a", 1, ["b"]) and re.fullmatch("[0-9a-f]{32}", content_key())


def cache(path: Path, built: list, contents=(b"one", b"two")):
    def build():
        built.append(1)
        return contents

    return [p.read_bytes() for p in cached(path, ["a", "b"], build)]


def test_cache_is_built_once(tmp_path):
    built = []
    assert [cache(tmp_path / "x", built) for _ in range(3)] == [[b"one", b"two"]] * 3 and len(built) == 1
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["a", "b", "sha256.json"]


@pytest.mark.parametrize("name", ["a", "b", "sha256.json"])
@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b[:-1], lambda b: bytes([b[0] ^ 1]) + b[1:], lambda b: b + b"\n", None]
)
def test_damaged_cache_is_rebuilt(tmp_path, name, damage):
    built = []
    cache(tmp_path, built)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()
    assert cache(tmp_path, built) == [b"one", b"two"] and len(built) == 2
    assert cache(tmp_path, built) == [b"one", b"two"] and len(built) == 2


def test_a_failed_build_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        cached(tmp_path / "x", ["a"], lambda: [b"" * (1 // 0)])
    assert not (tmp_path / "x").exists()


def test_two_that_build_at_once(tmp_path):
    """The second process finds the cache complete when it has built its own; readers of the first files go on."""
    open_files = []

    def build():
        open_files.append(cached(tmp_path, ["a", "b"], lambda: [b"one", b"two"])[0].open("rb"))
        return [b"one", b"two"]

    assert [p.read_bytes() for p in cached(tmp_path, ["a", "b"], build)] == [b"one", b"two"]
    assert open_files[0].read() == b"one" and len(list(tmp_path.iterdir())) == 3
    open_files[0].close()


@pytest.mark.parametrize("text", ["ein\nWort\nje\nZeile\n" * 900, "\u4e00\u4e8c\u4e09\u56db\u4e94" * 3000])
def test_texts_without_spaces_are_split_as_others_are(tmp_path, text):
    """One word a line, and a writing that has no spaces: every split has its share, and nothing is lost."""
    (tmp_path / "book.txt").write_text(text)
    parts = ["".join(load_corpus(str(tmp_path), split).texts()) for split in ("train", "valid", "test")]
    assert "".join(parts) == text
    assert [round(len(part) / len(text), 1) for part in parts] == [0.8, 0.1, 0.1]
    if "\n" in text:
        assert all(part.startswith(("ein", "Wort", "je", "Zeile")) for part in parts)
