"""Tiny double-precision models that all tests share. Whatever is registered in ``lit_memory.registry.MODELS`` is
tested."""

import contextlib
import dataclasses
import os
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from filelock import FileLock
from servers import mariadb, mlflow_server, postgres, serve  # noqa: F401

from lit_memory.recurrence import Grouped, LayerRecurrent
from lit_memory.registry import MODELS, load_class
from lit_memory.run.launchers.local import LocalLauncher, Process
from lit_memory.tasks import babilong, language_modeling, needle, planted_facts

VOCAB = 19
TINY = {
    "vocab_size": VOCAB,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "rotary_fraction": 0.5,
    "init_std": 0.2,
    "embedding_std": 1.0,
    "memory_tokens": 2,
    "memory_dim": 4,
    "value_std": 0.5,  # W_v is 0 by default, and an ARMT that remembers nothing would pass many tests
    "zero_init": False,  # nor one that computes nothing
    "window": 7,
    "window_detach": False,
    "head_width": 8,
    "ff_width": 32,
    "mem_len": 7,
    "mem_detach": False,
    "dropout": 0.0,
    "latent_width": 8,
    "slots": 6,
    "readout": "soft",  # of the nearest line alone the others would be independent
    "test_readout": "soft",
    "chunk": 3,  # segments of 5 tokens are two chunks
}


def _config_fields(name: str) -> set[str]:
    return {f.name for f in dataclasses.fields(load_class("model", name).Config)}


VARIANTS = {
    "gpt2": {"window": 0},  # absolute positions, which allow no window
    "llama": {"heads": 4, "kv_heads": 2, "ff_mult": 1.5},  # grouped queries
}
# Every registered model, and its variants with other backbones.
CASES = [(name, {}) for name in MODELS]
CASES += [
    (name, {"family": family, **extra})
    for family, extra in VARIANTS.items()
    for name in MODELS
    if "family" in _config_fields(name)
]
TEXT_ONLY = {"larimar", "memreasoner"}
"""Models that read no numbers."""
LAYERED = [(name, extra) for name, extra in CASES if issubclass(load_class("model", name), LayerRecurrent)]

EVERY_FAMILY = {"armt"}
"""Models whose tests run with every family of backbones; other pairs of a model and a family are slow tests."""


ROW = {"rmt", "armt"}
"""Models of which the tests with the mark ``row`` are run by default; of the others they are slow tests. Of a cross
product of models and settings that is one full column and two full rows: every model has the settings without the mark,
and one model whose recurrence lies in its layers and one whose does not have all settings."""


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("row") and not any(
            case in [*ROW, *((name, {}) for name in ROW)] for case in item.callspec.params.values()
        ):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(0))


def row(*values):
    """Values of a parameter with the mark ``row``."""
    return pytest.param(*values, marks=pytest.mark.row)


def _params(cases):
    """Parameters of a fixture, with their ids."""
    return [
        pytest.param(
            (name, extra),
            id="-".join([name, *([extra["family"]] if extra else [])]),
            marks=[pytest.mark.slow] if extra and name not in EVERY_FAMILY else [],
        )
        for name, extra in cases
    ]


def build_model(name: str, defaults: dict | None = None, **overrides):
    """A fresh tiny model in fp64. Fields that it does not have are left out of TINY and ``defaults``, but not of
    ``overrides``."""
    cls = load_class("model", name)
    values = {k: v for k, v in {**TINY, **(defaults or {})}.items() if k in _config_fields(name)}
    torch.manual_seed(0)
    return cls(cls.Config(**{**values, **overrides})).double()


GROUPED = [
    (name, extra)
    for name, extra in CASES
    if issubclass(load_class("model", name), Grouped) and not build_model(name, extra).refuses_groups()
]


def identical(a, b):
    """Two nested structures with tensors are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(identical, a, b)) if isinstance(a, list | tuple) else a == b


def assert_twins(fast, slow, model, tolerance):
    """Tensors of both are equal to 1e-10, and the gradients of all weights of the model through them to
    ``tolerance``."""
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(fast, slow, strict=True))
    draws = [torch.randn_like(t) for t in slow]
    found = [
        torch.autograd.grad(sum((t * d).sum() for t, d in zip(ts, draws, strict=True)), list(model.parameters()))
        for ts in (fast, slow)
    ]
    assert all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(*found, strict=True))


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    if torch.are_deterministic_algorithms_enabled():  # Lightning's Trainer(deterministic=True) leaves it on
        torch.use_deterministic_algorithms(False)  # which imports torch._inductor: seconds, so not in every process
    torch.manual_seed(0)


@pytest.fixture
def build():
    """``build(name, **config)``: a fresh tiny model in fp64; same name, same weights."""
    return build_model


@pytest.fixture(params=_params(CASES))
def model(request):
    """Every registered model, with a backbone of every family."""
    name, extra = request.param
    return build_model(name, extra)


@pytest.fixture(params=_params(LAYERED))
def layered(request):
    """Every registered model whose recurrence lies inside its layers; three layers."""
    name, extra = request.param
    return build_model(name, extra, layers=3)


@pytest.fixture(params=_params(GROUPED))
def grouped(request):
    """Every registered model that reads segments in groups; three layers."""
    name, extra = request.param
    return build_model(name, extra, layers=3)


@pytest.fixture
def tokens():
    """``tokens(batch, length)``: random ids, the same in every test."""

    def draw(batch: int, length: int) -> torch.Tensor:
        return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(7))

    return draw


TINY_EXPERIMENT = """
experiment: tiny
paper: {title: A paper, item: Figure 1, claim: a recalls what b forgets}
base:
  model: {name: armt, layers: 1, width: 16, heads: 2, memory_tokens: 1, memory_dim: 4}
  task: {name: associative_retrieval, pairs: 2, test_pairs: [2, 4]}
  train: {steps: 6, batch_size: 4, valid_every: 3, valid_size: 4, test_size: 8, eval_batch_size: 4}
arms: {a: {}, b: {model.gamma: "off"}}
seeds: [0]
report: {x: test_pairs}
expect: ["a[2] + b[last] >= 0"]
requires: ["a[first] >= 0"]
"""


@pytest.fixture
def tree():
    """The content of an experiment that trains in a second."""
    return yaml.safe_load(TINY_EXPERIMENT)


@pytest.fixture
def make_spec(tree):
    """``make_spec("train.steps=8", ...)``: the first run of the tiny experiment, changed."""
    from lit_memory.plan.experiment import parse

    return lambda *overrides: parse(tree, "tiny.yaml").at().plan(overrides)[0]


class _Hostile:
    """Makes the folder ``proof`` when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


@pytest.fixture
def hostile_checkpoint(tmp_path):
    """``hostile_checkpoint(path)`` writes a checkpoint that makes a folder when it is unpickled; returns that
    folder."""

    def write(path):
        proof = tmp_path / "executed"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state_dict": {}, "callbacks": _Hostile(proof)}, path)
        return proof

    return write


def shared_folder(tmp_path_factory, name: str) -> Path:
    """A temporary folder of all workers together."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory, request):
    """Tokenizers and tokenized books of the tests lie in one temporary folder; what numba compiles stays for the next
    tests."""
    folder = shared_folder(tmp_path_factory, "cache")
    with pytest.MonkeyPatch.context() as patch:
        if "NUMBA_CACHE_DIR" not in os.environ:
            kept = getattr(request.config, "cache", None)  # none with pytest -p no:cacheprovider
            patch.setenv("NUMBA_CACHE_DIR", str(kept.mkdir("numba") if kept else folder / "numba"))
        for module in (babilong, planted_facts, language_modeling, needle):
            patch.setattr(module, "cache_folder", lambda: folder)
        yield


def no_syncs(connection, record):
    """SQLite does not wait for the disk: a fifth of the time of a tiny run. A process that is killed loses nothing by
    that, only a machine that loses its power."""
    if isinstance(connection, sqlite3.Connection):
        with contextlib.suppress(sqlite3.DatabaseError):  # a damaged file is SQLAlchemy's to tell
            connection.execute("pragma synchronous = off")


@pytest.fixture(scope="session")
def _database(tmp_path_factory):
    """An empty MLflow database. Its creation takes seconds: one for all workers."""
    from sqlalchemy import Engine, event

    from lit_memory.run.tracking import Tracker

    event.listen(Engine, "connect", no_syncs)

    root = shared_folder(tmp_path_factory, "database")
    with FileLock(root / "created.lock"):
        if not (root / "created").exists():
            Tracker(root, f"sqlite:///{root / 'mlflow.db'}")
            (root / "created").touch()
    return root / "mlflow.db"


@pytest.fixture
def make_root(tmp_path, _database, monkeypatch):
    """``make_root(name)``: a folder for runs, with a database of its own; the environment names no other place."""
    for name in ("MLFLOW_TRACKING_URI", "LIT_MEMORY_ROOT", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def make(name: str = "root"):
        (tmp_path / name).mkdir()
        shutil.copy(_database, tmp_path / name / "mlflow.db")
        return tmp_path / name

    return make


@pytest.fixture
def root(make_root):
    return make_root()


class InlineLauncher(LocalLauncher):
    """Runs in this process, one after another."""

    def start_fork_server(self):
        pass

    def events(self):
        from lit_memory.run.engine import run_one

        while self.waiting:
            child, messages = Process(self.waiting.pop(0), process=SimpleNamespace(exitcode=0)), []
            self.running.append(child)
            try:
                run_one(*self.arguments(child.spec), messages.append)
            except (ArithmeticError, RuntimeError) as error:
                child.failure, child.process.exitcode = f"{type(error).__name__}: {error}", 1
            for message in messages:
                yield child, child.receive(message)
            self.running.remove(child)
            yield child, {"event": "end"}


@pytest.fixture
def inline(monkeypatch):
    """The command trains in this process, and starts no other."""
    monkeypatch.setattr("lit_memory.run.launchers.local.LocalLauncher", InlineLauncher)


@pytest.fixture
def unsaved_figures(monkeypatch):
    """Figures of reports are made, but not laid out, and their files stay a word: that takes most of the time of a
    report."""

    def words(figures, suffixes=("png", "pdf")):
        return {f"{name}.{suffix}": suffix.encode() for name in figures for suffix in suffixes}

    monkeypatch.setattr("lit_memory.report.figures.saved", words)
    monkeypatch.setattr("lit_memory.report.figures.lay_out", lambda figure, top: None)


@pytest.fixture
def write(tree, tmp_path):
    """``write(**top)``: the tiny experiment as a file, with other values at its top level."""

    def make(**top):
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(tree | top, sort_keys=False))
        return str(path)

    return make


@pytest.fixture
def no_training(monkeypatch):
    """The command fails where it would train."""
    monkeypatch.setattr("lit_memory.cli.Execution", lambda *args: pytest.fail("something was trained"))


@pytest.fixture(scope="session")
def warm(tmp_path_factory, _database):
    """A run and a report in this process: what the first ones import and build, every fork would have to do again."""
    from faults import train

    from lit_memory.cli import main
    from lit_memory.plan.experiment import parse

    root = tmp_path_factory.mktemp("warm")
    shutil.copy(_database, root)
    tree = yaml.safe_load(TINY_EXPERIMENT)
    train(parse(tree, "tiny.yaml").at().plan()[0], root)
    (root / "tiny.yaml").write_text(yaml.safe_dump(tree))
    assert main([str(root / "tiny.yaml"), "--root", str(root), "--report"]) == 0


WHOLE = {}


@pytest.fixture
def whole(make_spec, make_root):
    """A run that nothing disturbed: its spec, its outcome and the seconds that it took (once for all tests)."""
    from faults import STAGED, undisturbed

    spec = make_spec(*STAGED)
    if not WHOLE:
        WHOLE.update(undisturbed(spec, make_root("whole")))
    return spec, WHOLE


@pytest.fixture
def file(tree, tmp_path):
    """The tiny experiment as a file: two arms, one seed."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
