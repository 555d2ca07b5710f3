"""The corpus in ``data/``: byte for byte what it says, read as if unpacked, and split without a leak."""

import hashlib
import json
import lzma
import os
from functools import partial
from pathlib import Path

import pytest

from lit_memory.cli import main
from lit_memory.tasks.babi.files import FILES, LABELS, SHIPPED_STORIES, load, parse
from lit_memory.text import shipped
from lit_memory.text.corpus import SOURCES, SPLITS, check_texts, load_corpus
from lit_memory.text.shipped import SHIPPED, folder_of
from lit_memory.util.inputs import plain_name, read_text, text_files
from lit_memory.util.provenance import PROJECT

DATA = PROJECT / "data"
ORIGINALS = Path(os.environ.get("LIT_MEMORY_SHARED") or Path(__file__).parents[2] / "shared") / "data"
TEXTS = [name for name in SHIPPED if name in SOURCES]
SUMS = {name: digest for digest, name in map(str.split, (DATA / "SHA256SUMS").read_text().splitlines())}


@pytest.fixture(scope="module")
def contents():
    """Name in SHA256SUMS -> content."""
    paths = [path for name in SHIPPED.values() for path in sorted((DATA / name).rglob("*")) if path.is_file()]
    return {
        str(plain_name(path).relative_to(DATA)): (lzma.decompress if path.suffix == ".xz" else bytes)(path.read_bytes())
        for path in paths
    }


def test_every_file_is_the_listed_one(contents):
    assert {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()} == SUMS


def test_the_corpus_is_small_and_described(contents):
    """At most 10 MB; a row of SOURCES.md for every file, with its sizes."""
    rows = (DATA / "SOURCES.md").read_text()
    packed = [path for folder in SHIPPED.values() for path in (DATA / folder).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in packed) < 10_000_000
    for path in packed:
        size = len(contents[str(plain_name(path).relative_to(DATA))])
        assert f"| `{path.relative_to(DATA)}` | {size:,} | {path.stat().st_size:,} |" in rows


def test_the_files_are_those_that_we_were_given(contents):
    """But for WikiText-2, whose files have their official names here, and bAbI's, which lie one folder higher."""
    if not ORIGINALS.is_dir():
        pytest.skip("../shared is absent")
    for name, content in contents.items():
        folder, _, rest = name.partition("/")
        places = {
            "books": [rest],
            "babi": [f"en-10k/{rest}", rest],
            "wikitext-2": [rest.removeprefix("wiki.").replace(".tokens", ".txt")],
        }[folder]
        found = [path for place in places if (path := ORIGINALS / folder.replace("-", "") / place).is_file()]
        assert found and found[0].read_bytes() == content, name


# Packed files


def test_packed_files_are_read_as_the_plain_ones(tmp_path):
    """The same texts in the same splits; a file that is there twice is read once."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder in (plain, packed):
        (folder / "train").mkdir(parents=True)
        (folder / "test").mkdir()
    names = [f"train/{letter}" for letter in "abcdefghijklmnop"] + ["test/x", "test/y"]
    for name in names:
        (plain / f"{name}.txt").write_text(f"The book {name}.\r\n")
        (packed / f"{name}.txt.xz").write_bytes(lzma.compress((plain / f"{name}.txt").read_bytes()))
    (packed / "train" / "a.txt").write_bytes((plain / "train" / "a.txt").read_bytes())
    for split in SPLITS:
        texts = list(load_corpus(str(packed), split).texts())
        assert texts and texts == list(load_corpus(str(plain), split).texts())
    assert [path.name for path in text_files(packed / "train", "[ab].txt")] == ["a.txt", "b.txt.xz"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lzma.compress(b"text")[:-9], ":.*not a whole .xz file"),
        (b"text", ":.*not a whole .xz file"),
        (lzma.compress(b"text\n\xff"), ":2: not UTF-8 text"),
    ],
    ids=["cut", "not packed", "not text"],
)
def test_damaged_packed_files(tmp_path, content, says):
    (tmp_path / "x.txt.xz").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / 'x.txt.xz'}{says}") as caught:
        read_text(tmp_path / "x.txt.xz")
    assert "\n" not in str(caught.value)


# Names


def test_names_stand_for_folders_of_the_repository(monkeypatch, tmp_path):
    """Of a wheel, for those in the folder of runs; where there are none, one line says where they belong."""
    assert all(folder_of(name) == DATA / folder for name, folder in SHIPPED.items())
    assert folder_of("shipped-books/") == Path("shipped-books") and folder_of(str(tmp_path)) == tmp_path
    monkeypatch.setattr(shipped, "PROJECT", tmp_path / "share")
    monkeypatch.setenv("LIT_MEMORY_ROOT", str(tmp_path))
    for name, folder in SHIPPED.items():
        with pytest.raises(FileNotFoundError, match=f"^{name}: no folder {tmp_path / 'data' / folder}; a wheel"):
            folder_of(name)
        (tmp_path / "data" / folder).mkdir(parents=True)
        assert folder_of(name) == tmp_path / "data" / folder


@pytest.mark.parametrize("name", TEXTS)
def test_shipped_text_is_checked_like_a_folder(name, monkeypatch, tmp_path):
    check_texts(name, ("valid", "test"))
    monkeypatch.setattr(shipped, "PROJECT", tmp_path)
    monkeypatch.setenv("LIT_MEMORY_ROOT", str(tmp_path))
    check_texts.cache_clear()
    with pytest.raises(FileNotFoundError, match=name):
        check_texts(name, ("valid", "test"))


# Splits


@pytest.mark.parametrize(
    ("name", "counts", "end"), [(TEXTS[0], (13, 1, 3), ". "), (TEXTS[1], (629, 60, 64), "\n")], ids=TEXTS
)
def test_no_text_is_in_two_splits(name, counts, end):
    """Nor a sentence of a book, or a paragraph of WikiText, of 25 words or more."""
    texts = [list(load_corpus(name, split).texts()) for split in SPLITS]
    assert tuple(map(len, texts)) == counts
    long = [{s for text in part for s in text.split(end) if len(s.split()) >= 25} for part in texts]
    for train, valid, test in (map(set, texts), long):
        assert train and valid and test
        assert not train & valid and not train & test and not valid & test


LEFT = {"qa1": 8965, "qa2": 8997, "qa3": 1730, "qa4": 6569, "qa5": 8999}
"""Questions of training, as data/SOURCES.md has them."""


@pytest.mark.parametrize("task", FILES)
def test_no_question_of_the_test_is_trained_on(task):
    """Facts and question together; the test has its whole file, in order."""
    splits = {split: load(SHIPPED_STORIES, task, split) for split in SPLITS}
    asked = {split: {(q.facts, q.text) for q in questions} for split, questions in splits.items()}
    assert not asked["train"] & asked["test"] and not asked["valid"] & (asked["test"] | asked["train"])
    (path,) = text_files(DATA / "babi", f"{FILES[task]}_test.txt")
    assert splits["test"] == tuple(q for story in parse(path) for q in story) and len(splits["test"]) == 1000
    assert len(splits["train"]) == LEFT[task] and f"{LEFT[task]:,}" in (DATA / "SOURCES.md").read_text()
    assert {q.answer for questions in splits.values() for q in questions} == set(LABELS[task])


# Experiments

TINY = ["train.steps=5", "train.valid_every=5", "train.valid_size=4", "train.test_size=4", "train.batch_size=4"]
TINY += ["train.eval_batch_size=4", "train.stages=[]", "task.books=1", "task.vocab_size=1024", "task.segments?=2"]
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "arm", "more"),
    [
        ("armt_babilong_qa1", "armt", ["task.test_segments=[2, 3]"]),
        ("tarm_wikitext", "tarm", ["task.books=20", "model.cutoffs=[200, 500]"]),
        slow("armt_wikitext", "armt", ["task.books=20", "task.test_segments=[2]"]),
        slow("memreasoner_babi", "pretrained", ["task.test_tokens=[0, 110]"]),
        slow("memreasoner_babi", "rmt", ["task.test_tokens=[0, 300]"]),
        slow("titans_babilong", "mac", ["task.test_segments=[2, 3]"]),
    ],
    ids=["babilong", "stream", "windows", "lines", "text", "titans"],
)
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
@pytest.mark.usefixtures("inline", "unsaved_figures")
def test_a_real_scale_trains_and_reports(name, arm, more, root, capsys):
    """One arm for five steps, with tokens of few texts."""
    file = str(PROJECT / "experiments" / f"{name}.yaml")
    flags = ["--scale", "real", "--arms", arm, "--seeds", "0", "--root", str(root)]
    changes = dict(text.split("=", 1) for text in (*TINY, *more))
    assert main([file, *map("=".join, changes.items()), *flags]) == 0, capsys.readouterr().err
    (verdict,) = (json.loads(path.read_text()) for path in root.glob("reports/**/verdict.json"))
    assert verdict["scale"] == "real" and verdict["evidence"] == "real text"
