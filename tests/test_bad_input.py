"""Wrong files and command lines: every case of bad_input.yaml, some of them as processes of their own, what only looks
wrong, and data that cannot be read (more of that in test_corpus.py, test_babi.py and test_babilong_sets.py)."""

import dataclasses
import http.server
import inspect
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import lightning
import pytest
import yaml

from lit_memory import BABILongData
from lit_memory.cli import main
from lit_memory.plan import experiment, reading
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import parse
from lit_memory.plan.merging import folder_name
from lit_memory.plan.sections import TrainConfig
from lit_memory.plan.trainer import FREE, OURS, REFUSED
from lit_memory.run import server as server_check
from lit_memory.run import trainer
from lit_memory.run.tracking import Tracker
from lit_memory.tasks import babilong

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
CORPUS = yaml.load(  # with libyaml where it is: every worker reads it
    Path(__file__).with_name("bad_input.yaml").read_text(encoding="utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
CASES = CORPUS["cases"]
RUN = Path(__file__).parents[1] / "run.py"
LIMIT = 6.0
"""Seconds from the start of the process to its end, on a machine that may be busy; idle it is a second or two."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working folder but for a few files; the environment names no other place and no proxy."""
    for name in ("MLFLOW_TRACKING_URI", "LIT_MEMORY_ROOT", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "cwd"
    (folder / "folder").mkdir(parents=True)
    for name, text in {"tiny.yaml": CORPUS["good"], "other.yaml": "", "garbage.db": "no database at all\n"}.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


def prepare(case, place):
    """Writes the case's file; returns its arguments."""
    text = CORPUS["good"]
    if "change" in case:
        assert text.count(case["change"]) >= 1, "the good file has no such text"
        text = text.replace(case["change"], case["to"], 1)
    if "file" in case:
        text = "".join(
            [
                case["file"],
                *(case.get(part, "") * case.get("times", 0) for part in ("then", "last")),
                case.get("end", ""),
            ]
        )
    text += case.get("add", "")
    (place / "tiny.yaml").write_bytes(bytes(case["bytes"]) if "bytes" in case else text.encode())
    return (
        case["alone"]
        if "alone" in case
        else ["tiny.yaml", *([] if "root" in case else ["--root", "root"]), *case.get("argv", [])]
    )


def tree(folder):
    """Every path below a folder, with size and time of its last change."""
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def check(case, place, err):
    """One line, the golden one: its parts between … in this order, from the beginning to the end."""
    first, *parts = case["says"].replace("CWD", str(place)).split("…")
    line = err.removeprefix("error: ").removesuffix("\n")
    assert err.startswith("error: ") and err.count("\n") == 1 and len(line) <= 1010
    if not parts:
        assert line == first
    rest = line.removeprefix(first)
    assert line.startswith(first) and line.endswith(parts[-1] if parts else ""), line
    for part in filter(None, parts):
        assert part in rest, line
        rest = rest.partition(part)[2]


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_told_in_one_line_and_leaves_nothing(place, monkeypatch, capsys, name):
    case = CASES[name]
    argv = prepare(case, place)
    for variable, value in case.get("env", {}).items():
        monkeypatch.setenv(variable, value)
    before, start = tree(place.parent), time.monotonic()
    assert main(argv) == 2
    took = time.monotonic() - start
    out, err = capsys.readouterr()
    assert out == "" and took < LIMIT
    check(case, place, err)
    assert tree(place.parent) == before


PROCESSES = [
    "missing file",
    "unknown key",
    "zero steps",
    "heads",
    "database that is text",
]
HEAVY = ("lightning", "mlflow", "matplotlib", "pandas", "transformers")
WATCH = f"""
import runpy, sys
sys.path.insert(0, {str(RUN.parent)!r})
try:
    runpy.run_path({str(RUN)!r}, run_name="__main__")
finally:
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    assert not heavy, heavy
"""


@pytest.mark.parametrize("name", PROCESSES)
def test_real_processes_answer_in_time_and_import_nothing_heavy(place, name):
    case = CASES[name]
    argv = prepare(case, place)
    before, start = tree(place.parent), time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", WATCH, *argv], env=os.environ | case.get("env", {}), capture_output=True, text=True
    )
    took = time.monotonic() - start
    assert (run.returncode, run.stdout) == (2, ""), run.stderr
    check(case, place, run.stderr)
    assert tree(place.parent) == before and took < 4 * LIMIT


def test_the_good_file_is_good(place, capsys):
    """Or every case would fail for its sake."""
    assert main(["tiny.yaml", "--root", "root", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "2 runs: 2 new" in out and err == "" and not (place / "root").exists()
    assert len(CASES) >= 60


def test_a_database_of_garbage_below_the_root(place, capsys):
    (place / "root").mkdir()
    (place / "root" / "mlflow.db").write_bytes(os.urandom(4096))
    before = tree(place)
    assert main(["tiny.yaml", "--root", "root"]) == 2
    path = f"{place}/root/mlflow.db"
    error = f"error: {path}: {path} is not an SQLite database; expected MLflow's, or no file\n"
    assert capsys.readouterr().err == error
    assert tree(place) == before


def test_a_database_with_a_good_beginning(root):
    """SQLAlchemy's error, in one line."""
    (root / "mlflow.db").write_bytes((root / "mlflow.db").read_bytes()[:100] + b"garbage" * 1000)
    with pytest.raises(ConfigError, match=r"^MLflow: cannot use sqlite:///.*: .*sqlite3.DatabaseError"):
        Tracker(root)


class Broken(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.server.answer is None:
            self.server.hang.wait(20)
        self.send_response(self.server.answer or 503)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args):
        """Nothing on stderr."""


@pytest.fixture
def server():
    """An HTTP server that answers with the status ``answer``, or not at all."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        server.daemon_threads, server.answer, server.hang = True, 503, threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.hang.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "why"),
    [(503, "the server answers 503 Service Unavailable"), (None, "no server answers (timed out)"), (404, "cannot use")],
)
def test_a_server_that_does_not_work(place, server, monkeypatch, capsys, answer, why):
    uri = f"http://127.0.0.1:{server.server_port}"
    server.answer = answer
    monkeypatch.setattr(server_check, "TIMEOUT", 0.3)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    start = time.monotonic()
    assert main(["tiny.yaml", "--root", "root", "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and uri in err and why in err and time.monotonic() - start < 10


def test_a_server_that_is_not_there(place, server, monkeypatch, capsys):
    uri = f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    before, start = tree(place), time.monotonic()
    assert main(["tiny.yaml", "--root", "root", "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        f"error: MLFLOW_TRACKING_URI: {uri}: no server answers (Connection refused); "
        "start one with `mlflow server` or unset the variable\n"
    )
    assert tree(place) == before and time.monotonic() - start < LIMIT


def test_a_root_that_cannot_be_created(place, capsys):
    """A kernel's own file system refuses even root."""
    if not Path("/proc").is_dir():
        pytest.skip("no /proc")
    assert main(["tiny.yaml", "--root", "/proc/no/such"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: command line: --root: /proc") and err.count("\n") == 1


def test_a_folder_that_may_not_be_written(place, monkeypatch, capsys):
    """A dry run only reads."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(["tiny.yaml", "--root", "folder/root"]) == 2
    assert (
        capsys.readouterr().err
        == f"error: command line: --root: {place}/folder may not be written to; expected a folder of yours\n"
    )
    assert main(["tiny.yaml", "--root", "folder/root", "--dry-run"]) == 0


def test_the_size_is_read_no_further_than_needed(place, monkeypatch):
    monkeypatch.setattr(reading, "LARGEST_FILE", len(CORPUS["good"]))
    experiment.load("tiny.yaml")
    (place / "tiny.yaml").write_text(CORPUS["good"] + "\n")
    with pytest.raises(ConfigError, match="bytes; expected an experiment"):
        experiment.load("tiny.yaml")


def test_a_byte_order_mark_is_no_mistake(place):
    (place / "tiny.yaml").write_bytes(b"\xef\xbb\xbf" + CORPUS["good"].encode())
    assert experiment.load("tiny.yaml").experiment == "tiny"


@pytest.mark.parametrize("text", ["x/../../y", "..", "/etc", "a" * 81, "a\0b", "[{'steps': 3}]", "é", "a b"])
def test_points_of_a_grid_are_plain_names(text):
    name = folder_name(text)
    assert "/" not in name and name not in (".", "..") and name.isascii() and name.isprintable() and len(name) <= 80
    assert name != folder_name(f"{text} ") and folder_name("lr0.1-layers2") == "lr0.1-layers2"


def test_folders_stay_below_the_root(tree_of, tmp_path):
    grid = {"train.trainer": [{"devices": ["../../../x"]}, {"devices": ["/x"]}]}
    specs = parse(tree_of(grid=grid), "tiny.yaml").at().plan()
    folders = {spec.folder(tmp_path).resolve() for spec in specs}
    assert len(folders) == len({spec.point for spec in specs}) * 2 == 4
    assert all(folder.parent == tmp_path / "checkpoints" and len(folder.name) == 16 for folder in folders)


@pytest.fixture
def tree_of():
    return lambda **top: yaml.safe_load(CORPUS["good"]) | top


def test_the_engine_sets_what_a_file_may_not(make_spec, tmp_path):
    """An argument that the engine sets and the list forgot would end every run with a TypeError."""
    seen = {}

    def spy(**arguments):
        seen.update(arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.L, "Trainer", spy)
        trainer.make_trainer(make_spec(), tmp_path, False)
    assert set(seen) - {"devices", "strategy"} <= set(OURS) and seen["default_root_dir"] == tmp_path


def test_every_argument_of_the_trainer_is_classified():
    """Free, ours or refused; a new Lightning has to be read before its arguments reach a run."""
    names = [*FREE, *OURS, *REFUSED]
    assert sorted(names) == sorted(inspect.signature(lightning.Trainer).parameters)
    assert {field for field in OURS.values() if field} <= {field.name for field in dataclasses.fields(TrainConfig)}


GOOD_VALUES = {"accumulate_grad_batches": 2, "detect_anomaly": True, "profiler": "simple", "strategy": "ddp"}


@pytest.mark.parametrize("name", sorted({*FREE, *OURS, *REFUSED}))
def test_an_argument_of_the_trainer_is_taken_or_told(tree_of, name):
    """What a result could depend on the clock by, or skip its test by, is refused with the reason."""
    setting = tree_of(grid={"train.trainer": [{name: GOOD_VALUES.get(name, 1)}]})
    if name in FREE:
        assert parse(setting, "tiny.yaml").at().plan()[0].train["trainer"] == {name: GOOD_VALUES.get(name, 1)}
        return
    reason = REFUSED.get(name) or (f"set train.{OURS[name]} instead" if OURS[name] else "leave it out")
    with pytest.raises(ConfigError) as caught:
        parse(setting, "tiny.yaml").at().plan()
    assert str(caught.value).startswith(f"tiny.yaml (grid): train.trainer.{name}: ")
    assert str(caught.value).endswith(reason) and "\n" not in str(caught.value)


# Data, which a run reads after its file has been found right

DATA_FILES = {
    "empty books": (
        {},
        {"haystack": ""},
        "FOLDER: no .txt file for split 'train'; expected books in it, or in FOLDER/train and FOLDER/test",
    ),
    "binary book": (
        {"train/a.txt": b"\x89PNG\r\n"},
        {"haystack": ""},
        "FOLDER/train/a.txt:1: not UTF-8 text (byte 0 of the file is 0x89); convert the file, or take it away",
    ),
    "NUL in a book": (
        {"train.txt": b"text\0"},
        {"haystack": ""},
        "FOLDER/train.txt:1: not text (byte 4 of the file is 0x00); convert the file, or take it away",
    ),
    "books without text": (
        {"train.txt": b"\n", "test.txt": b""},
        {"haystack": ""},
        "FOLDER, split train: no sentence left of 10 tokens or more",
    ),
    "no stories": (
        {},
        {"stories": ""},
        "FOLDER: no qa1_single-supporting-fact_train.txt; expected the files of bAbI, en-10k for example",
    ),
    "corrupt story": (
        {"qa1_single-supporting-fact_train.txt": b"1 Mary moved to the garden.\n2 Where is Mary garden\n"},
        {"stories": ""},
        "FOLDER/qa1_single-supporting-fact_train.txt:2: expected 'ID fact.' or 'ID question?<tab>answer<tab>ID ...'; "
        "got '2 Where is Mary garden'",
    ),
    "contexts below the facts": (
        {},
        {"task": "qa3", "segment_len": 32, "tokens_per_fact": 1},
        "segments=1: no question of qa3 among 50 has facts that",
    ),
    "no network": (
        {},
        {"haystack": "pg19"},
        "pg19: emozilla/pg19 is not in reach on the Hugging Face hub (ConnectionError); check the network",
    ),
    "no network for a set": (
        {},
        {"eval_set": "a/b", "test_eval_length": [0]},
        "a/b 0k qa1: not in reach on the Hugging Face hub (ConnectionError: offline",
    ),
    "no network for a tokenizer": (
        {},
        {"tokenizer": "gpt2"},
        "tokenizer 'gpt2': expected word, wikitext, char, bpe, a folder with a tokenizer, or a name in reach",
    ),
}


@pytest.mark.parametrize("name", DATA_FILES)
def test_data_that_cannot_be_read_is_told_in_one_line(tmp_path, monkeypatch, name):
    """As the first batch of a training would; the engine writes the same line beside the run."""

    def offline(*_, **__):
        raise ConnectionError("offline\nand more")

    monkeypatch.setattr("datasets.load_dataset", offline)
    monkeypatch.setattr("datasets.load_dataset_builder", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    monkeypatch.setattr(babilong, "TRIES", 50)
    files, settings, says = DATA_FILES[name]
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    settings = {field: str(tmp_path) if value == "" else value for field, value in settings.items()}
    data = BABILongData(
        **{"segments": 1, "segment_len": 64, "margin": 12, "books": 1, "vocabulary": "noise", **settings}
    )
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        data.prepare_data()
        next(iter(data.train_dataloader()))
    assert str(caught.value).startswith(says.replace("FOLDER", str(tmp_path))) and "\n" not in str(caught.value)
