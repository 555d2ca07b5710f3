"""The store of a root: how it is created, opened and moved, on SQLite and on real servers."""

import contextlib
import multiprocessing
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from conftest import TINY_EXPERIMENT
from mlflow import MlflowClient
from servers import free_port
from test_faults import at, die, forked

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import parse
from lit_memory.run import database
from lit_memory.run.folders import check_root
from lit_memory.run.store import find_tracker, open_tracker
from lit_memory.run.tracking import Tracker, default_uri

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy

RUN = Path(__file__).resolve().parent.parent / "run.py"
STATEMENT = "alembic.ddl.impl:DefaultImpl._exec"
"""Is called for every change of a schema that MLflow makes."""
STATEMENTS = 380
"""How often at least; a test checks it."""
SHARES = [(i + 0.5) / 20 for i in range(20)]
"""Moments of a creation. The short version has three."""
ODD_NAMES = ["q?x=1", "a b", "50%", "%3F", "#1", "it's", 'say "x"', "größe 数", "two\nlines", "a&b;c", "[x]*", "a@b:c"]


def spread(shares, short=3):
    """Parameters of a test, of which all but a few are slow."""
    few = shares[:: -(-len(shares) // short)]
    return [share if share in few else pytest.param(share, marks=pytest.mark.slow) for share in shares]


@pytest.fixture
def empty_root(tmp_path, make_root):
    """A root without a database; the environment names no other place."""
    return tmp_path / "new"


@pytest.fixture
def spec():
    return parse(yaml.safe_load(TINY_EXPERIMENT), "tiny.yaml").at().plan()[0]


def recorded(root, spec, uri=None):
    """Open the store, train nothing and finish the run of ``spec``; returns its artifacts' URI."""
    tracker = Tracker(root, uri)
    parent = tracker.parent(spec.experiment, spec.scale, {})
    run_id = tracker.start(spec, tracker.find(spec.key), parent, {}, {"seed": 0})
    tracker.finish(run_id, [("exact_match", 2, 0.5)], {"steps": 1})
    return tracker.client.get_run(run_id).info.artifact_uri


def as_before(root):
    """Create the database in its place, as commits before this one did."""
    MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}").search_experiments(max_results=1)


# Creation


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("end", [die, interrupt])
@pytest.mark.parametrize("share", spread(SHARES))
def test_a_creation_that_is_broken_off(empty_root, spec, share, end):
    """By kill -9 or Ctrl-C: the next command works, and nothing of the first one is left."""
    empty_root.mkdir()
    killed = forked(lambda: Tracker(empty_root) and 0, (STATEMENT, int(share * STATEMENTS), end))
    assert killed() == (-signal.SIGKILL if end is die else 1)
    assert not (empty_root / "mlflow.db").exists() and find_tracker(empty_root) is None
    recorded(empty_root, spec)
    assert sorted(p.name for p in empty_root.iterdir()) == ["mlflow.db", "mlflow.db.lock", "mlruns"]


@pytest.mark.parametrize("share", spread(SHARES, 2))
def test_a_database_that_was_half_made_before(empty_root, spec, share):
    """In its place, as commits before this one left it: it is set aside, and said in one line."""
    empty_root.mkdir()
    assert forked(lambda: as_before(empty_root), (STATEMENT, int(share * STATEMENTS), die))() == -signal.SIGKILL
    path, lines = empty_root / "mlflow.db", []
    assert database.half_made(path) and find_tracker(empty_root, dry_run=True) is None
    open_tracker(empty_root, lines.append)
    recorded(empty_root, spec)
    (line,) = lines
    assert str(path) in line and "mlflow.db.half-made-1" in line and "\n" not in line
    assert database.half_made(empty_root / "mlflow.db.half-made-1") and not database.half_made(path)
    open_tracker(empty_root, lines.append)
    assert len(lines) == 1


def test_a_creation_has_as_many_statements(empty_root, monkeypatch):
    """The tests above hit it from its beginning to its end."""
    calls = []
    at(STATEMENT, -1, die)
    from alembic.ddl.impl import DefaultImpl

    inner = DefaultImpl._exec
    monkeypatch.setattr(DefaultImpl, "_exec", lambda *args, **kw: calls.append(1) or inner(*args, **kw))
    empty_root.mkdir()
    started = time.monotonic()
    Tracker(empty_root)
    print(f"{len(calls)} statements in {time.monotonic() - started:.1f} s")
    assert STATEMENTS <= len(calls) <= STATEMENTS * 1.3
