"""Files that tasks read, as hostile as files can be: a run is told in one line, before anything starts, or works."""

import gzip
import os
import random
import shutil
import socket
import string
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_bad_input import CORPUS, check, place, tree  # noqa: F401  place is a fixture

from lit_memory.cli import main
from lit_memory.plan.experiment import load
from lit_memory.registry import build
from lit_memory.run.build import build_data
from lit_memory.run.store import open_tracker
from lit_memory.util.inputs import BEGINNINGS, read_table, read_text

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
STORY = "1 Mary moved to the bathroom.\n2 John went to the hallway.\n3 Where is Mary? \tbathroom\t1\n"
TASKS = {
    "series": ("data/x.csv", {"name": "time_series", "source": "data/x.csv", "lookback": 24, "horizon": 4}),
    "dna table": ("data/train.csv", {"name": "dna", "source": "data", "length": 8}),
    "dna lines": ("data/train/pos/1.txt", {"name": "dna", "source": "data", "length": 8}),
    "text": (
        "data/train.txt",
        {"name": "language_modeling", "source": "data", "tokenizer": "char", "segments": 1, "segment_len": 8},
    ),
    "wiki": (
        "data/wiki.train.tokens",
        {"name": "language_modeling", "source": "data", "tokenizer": "wikitext", "segments": 1, "segment_len": 8},
    ),
    "books": (
        "data/train/a.txt",
        {"name": "babilong", "haystack": "data", "segments": 1, "segment_len": 64, "margin": 12},
    ),
    "stories": (
        "data/qa1_single-supporting-fact_train.txt",
        {"name": "babilong", "stories": "data", "segments": 0, "segment_len": 64, "margin": 12},
    ),
    "set": (
        "data/0k/qa1.jsonl",
        {"name": "babilong", "eval_set": "data", "test_eval_length": [0], "segment_len": 64, "margin": 12},
    ),
}
"""Kind -> the file that is hostile, and the task that reads it."""
PROSE = " Somebody walked slowly along the river and looked at all of the old boats .\n"
GOOD = {
    "series": {"data/x.csv": "date,a,b\n" + "".join(f"d{i},{i % 7},{i % 5}\n" for i in range(300))},
    "dna table": {
        f"data/{part}.csv": "seq,label\n" + "ACGT,p\nTTTT,q\nAAA,p\nCC,q\n" * 9 for part in ("train", "test")
    },
    "dna lines": {
        f"data/{part}/{c}/1.txt": "ACGT\nTTT\nGG\n" * 9 for part in ("train", "test") for c in ("pos", "neg")
    },
    "text": {f"data/{part}.txt": PROSE * 9 for part in ("train", "valid", "test")},
    "wiki": {f"data/wiki.{part}.tokens": " = Boats =\n" + PROSE * 9 for part in ("train", "valid", "test")},
    "books": {f"data/{part}/a.txt": PROSE * 9 for part in ("train", "valid", "test")},
    "stories": {f"data/qa1_single-supporting-fact_{part}.txt": STORY * 20 for part in ("train", "test")},
    "set": {"data/0k/qa1.jsonl": '{"input": "Mary left.", "question": "Where is Mary?", "target": "hall"}\n' * 9},
}
AXES = {"time_series": "horizon", "dna": "length", "language_modeling": "segments", "babilong": "segments"}


class Started(Exception):
    """Everything was found right; the next thing would be the database."""


@pytest.fixture
def make(place, monkeypatch):  # noqa: F811
    """``make(kind)``: the experiment of a kind with good files; returns the path of the one that is to be hostile."""

    def started(*arguments):
        raise Started

    def write(kind):
        path, task = TASKS[kind]
        for name, text in GOOD[kind].items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        axis = "test_eval_length" if "eval_set" in task else f"test_{AXES[task['name']]}"
        content = yaml.safe_load(CORPUS["good"])
        content["base"]["task"], content["report"], content["expect"] = task, {"x": axis, "y": "loss"}, []
        content["arms"] = {"a": {}}
        Path("tiny.yaml").write_text(yaml.safe_dump(content))
        return Path(path)

    monkeypatch.setattr("lit_memory.cli.open_tracker", started)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return write


def outcome(capsys):
    """ "" where a run would start, else the one line of the error."""
    try:
        code = main(["tiny.yaml", "--root", "root"])
    except Started:
        return ""
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) <= 1020, err
    return err.removeprefix("error: ").removesuffix("\n")


def test_good_files_are_good(make, capsys):
    for kind in TASKS:
        make(kind)
        assert outcome(capsys) == "", kind


@pytest.mark.parametrize("kind", TASKS)
def test_the_key_has_what_the_files_hold(make, kind):
    path, field = make(kind), next(name for name, value in TASKS[kind][1].items() if "data" in str(value))

    def key():
        return load("tiny.yaml").at().plan()[0].key

    first, content = key(), path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    Path("data", "README.md").write_text("not read")
    Path("data", ".hidden").write_text("neither")
    os.symlink(".", Path("data", "circle"))
    assert key() == first  # other times on the disk, and files that no task reads
    path.write_bytes(content + content[-30:])
    assert key() != first
    spec = load("tiny.yaml").at().plan()[0]
    assert [*spec.files] == [f"task.{field}"] and spec.files[f"task.{field}"]["file"] == os.path.abspath(
        TASKS[kind][1][field]
    )


def test_the_command_trains_anew_when_a_file_changes(make, root, inline, unsaved_figures, monkeypatch, capsys):
    """The second command has nothing to do; after a change of the text the third one trains again."""
    monkeypatch.setattr("lit_memory.cli.open_tracker", open_tracker)
    path = make("text")
    for changed, trained in ((False, 1), (False, 0), (True, 1)):
        if changed:
            path.write_text(PROSE * 10)
        assert main(["tiny.yaml", "--root", str(root), "train.steps=2", "train.test_size=2"]) == 0
        assert capsys.readouterr().out.count("finished in") == trained


def test_a_stage_may_name_files(make):
    make("text")
    shutil.copytree("data", "other")
    keys = set()
    for text in ("a", "b"):
        Path("other", "train.txt").write_text(PROSE * 9 + text)
        spec = load("tiny.yaml").at().plan(["train.stages=[{}, {task.source: other}]"])[0]
        assert [*spec.files] == ["task.source", "train.stages[1].task.source"]
        keys.add(spec.key)
    assert len(keys) == 2


def test_a_name_that_is_also_a_folder_is_the_name(make):
    """ "noise" is synthetic English, whatever lies in the working directory."""
    make("text")
    key = [load("tiny.yaml").at().plan(["task.source=noise"])[0].key]
    for content in "ab":
        Path("noise").mkdir(exist_ok=True)
        Path("noise", "train.txt").write_text(content)
        key.append(load("tiny.yaml").at().plan(["task.source=noise"])[0].key)
    assert len(set(key)) == 1


def socket_at(path):
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 108 characters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


NOT_FILES = {
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "socket": socket_at,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "circle of links": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing"),
}
"""What a hostile file is -> how it is made."""


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("what", NOT_FILES)
def test_what_is_no_file_is_not_opened(make, capsys, kind, what):
    """A pipe would hang, a device has no end. An entry that a folder may as well not have counts as missing."""
    path = make(kind)
    path.unlink()
    NOT_FILES[what](path)
    before = tree(Path.cwd())
    line = outcome(capsys)
    assert line.startswith("tiny.yaml (") and "task" in line and "data" in line and "expected" in line
    assert tree(Path.cwd()) == before


HOSTILE = {
    "empty": b"",
    "one byte": b"A",
    "one line end": b"\n",
    "million empty lines": b"\n" * 10**6,
    "NUL": b"A\0B\n",
    "only NUL": b"\0" * 1000,
    "not UTF-8": b"AC\xff\xfe\n",
    "UTF-16": "ACGT\nACGT\n".encode("utf-16"),
    "UTF-32": "ACGT\nACGT\n".encode("utf-32"),
    "gzip": gzip.compress(b"ACGT\n" * 99),
    "zip": b"PK\x03\x04" + bytes(range(256)),
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "line of 10 MB": b"A" * 10**7,
    "escape codes": b"\x1b[2J\x1b]0;x\x07\n" * 9,
}
HARMLESS = {("text", name) for name in ("one byte", "line of 10 MB", "escape codes")}
HARMLESS |= {(kind, name) for kind in ("wiki", "books") for _, name in HARMLESS}
HARMLESS |= {("dna lines", name) for name in ("one byte", "line of 10 MB")}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("name", HOSTILE)
def test_content_that_no_task_expects(make, capsys, kind, name):
    path = make(kind)
    path.write_bytes(HOSTILE[name])
    before = tree(Path.cwd())
    line = outcome(capsys)
    assert bool(line) == ((kind, name) not in HARMLESS), line
    if line:
        assert line.startswith("tiny.yaml (") and ": task: data" in line, line
    assert tree(Path.cwd()) == before


@pytest.mark.parametrize("name", CORPUS["data"])
def test_every_case_of_a_data_file(make, place, capsys, name):  # noqa: F811
    case = CORPUS["data"][name]
    path = make(case["of"])
    text = GOOD[case["of"]][str(path)]
    if "change" in case:
        assert case["change"] in text
        text = text.replace(case["change"], case["to"], 1)
    path.write_bytes((case.get("file", text) + case.get("add", "")).encode())
    line = outcome(capsys)
    if case["says"]:
        check({"says": f"tiny.yaml (scale default, arm a): {case['says']}"}, place, f"error: {line}\n")
    else:
        assert line == ""
        data = build_data(load("tiny.yaml").at().plan()[0])
        data.setup("fit")
        next(iter(data.train_dataloader()))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("kind", TASKS)
def test_line_ends_of_any_system(make, capsys, kind, end):
    path = make(kind)
    path.write_bytes(GOOD[kind][str(path)].replace("\n", end).encode())
    line = outcome(capsys)
    assert line == "" or (kind, end) == ("set", "\r")


AS_NOBODY = """
import os, stat, sys
from pathlib import Path
from lit_memory.util.inputs import missing, read_table, read_text
os.setuid(65534)
print(missing("folder"))
print(missing("folder/below"))
print(missing("x.csv", stat.S_IFREG))
for read in (read_text, lambda path: list(read_table(path))):
    try:
        read(Path("x.csv"))
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs root, to become another user")
def test_a_file_without_permission(place):  # noqa: F811
    """As another user, for whom permissions count."""
    Path("x.csv").touch(0o600)
    Path("folder").chmod(0o700)
    for folder in (Path.cwd(), *Path.cwd().parents):
        if "pytest" in str(folder):
            folder.chmod(folder.stat().st_mode | 0o055)
    run = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True)
    assert run.stdout.splitlines() == [
        *["Permission denied"] * 3,
        *["x.csv: cannot be read (Permission denied); expected a file of yours"] * 2,
    ], run.stderr


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("series", "source"),
        ("dna table", "source"),
        ("text", "source"),
        ("stories", "stories"),
        ("books", "haystack"),
        ("set", "eval_set"),
    ],
)
@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "/dev/zero", "pipe", "/dev/null/x", "circle", "\ud800", ""])
def test_names_that_are_no_files(make, capsys, kind, field, name):
    make(kind)
    os.mkfifo("pipe")
    Path("circle").symlink_to("circle")
    content = yaml.safe_load(Path("tiny.yaml").read_text())
    if kind == "set" and name == "":
        return  # no set at all
    content["base"]["task"][field] = name
    Path("tiny.yaml").write_text(yaml.safe_dump(content))
    line = outcome(capsys)
    assert line.startswith("tiny.yaml") and len(line) <= 1010


FUZZED = int(os.environ.get("FUZZED", "40"))
"""Files of each kind."""
PIECES = [
    ",",
    "\n",
    "\r",
    "\t",
    '"',
    ">",
    "1",
    "0 ",
    "-1",
    " ",
    "?",
    ".",
    "nan",
    "1e400",
    "=",
    "é",
    "\0",
    "\ufeff",
    "{",
    "}",
    "ACGT",
    "٣",
    "9" * 30,
]


def mangled(rng, text):
    """A text with a few cuts, copies, swaps and insertions."""
    for _ in range(rng.randint(1, 6)):
        i, j = sorted(rng.choices(range(len(text) + 1), k=2))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:i] + rng.choice(PIECES) * rng.randint(1, 3) + text[i:]
        elif kind == 1:
            text = text[:i] + text[min(j, i + 20) :]
        elif kind == 2:
            text = text[:i] + text[i : i + 30] + text[i:]
        elif kind == 3:
            text = text[:i] + rng.choice(string.printable) + text[i + 1 :]
        else:
            text = text[:i]
    return text


@pytest.mark.parametrize("kind", [kind for kind in TASKS if kind != "set"])
def test_mangled_files_are_told_or_work(make, kind):
    """Whatever passes the check also gives a training batch."""
    rng, path, told, works = random.Random(kind), make(kind), 0, 0
    spec = load("tiny.yaml").at().plan()[0]
    for _ in range(FUZZED):
        content = mangled(rng, GOOD[kind][str(path)]).encode()
        if rng.random() < 0.2:
            at = rng.randrange(len(content) + 1)
            content = content[:at] + rng.randbytes(3) + content[at:]
        path.write_bytes(content)
        forget()
        try:
            build("task", spec.task).check_files()
            data = build_data(spec)
            data.setup("fit")
            next(iter(data.train_dataloader()))
            works += 1
        except (ValueError, FileNotFoundError) as error:
            assert "\n" not in str(error) and any(
                word in str(error) for word in ("expected", "set it to", "convert", "unpack")
            )
            told += 1
    print(kind, told, works)
    assert works and told


def forget():
    """Empty the caches of what was read: within one process no file changes otherwise."""
    from lit_memory.tasks import babilong, dna_sets, language_modeling, planted_facts, time_series_sets
    from lit_memory.tasks.babi import files
    from lit_memory.text import corpus

    for cached in (
        babilong.load_noise,
        corpus.check_texts,
        dna_sets.load_sequences,
        files.load,
        language_modeling.load_text,
        planted_facts.load_tokenizer,
        time_series_sets.load_series,
    ):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _forget():
    forget()


def test_a_table(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b'\xef\xbb\xbfa,b\r\n"1\n2",' + b"A" * 200_000 + b"\n\n3,4\n")
    assert list(read_table(path)) == [(1, ["a", "b"]), (2, ["1\n2", "A" * 200_000]), (5, ["3", "4"])]


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_what_a_file_is_in_place_of_text(tmp_path, beginning):
    (tmp_path / "x.txt").write_bytes(beginning + b"rest")
    with pytest.raises(ValueError, match=rf"x\.txt: is {BEGINNINGS[beginning]}$"):
        read_text(tmp_path / "x.txt")
