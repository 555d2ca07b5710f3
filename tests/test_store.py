"""The store of a root: how it is created, opened and moved, on SQLite and on real servers."""

import contextlib
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
import records
import yaml
from conftest import TINY_EXPERIMENT
from faults import die, forked
from mlflow import MlflowClient

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import parse
from lit_memory.run import database
from lit_memory.run.folders import check_root
from lit_memory.run.store import find_tracker, open_tracker
from lit_memory.run.tracking import Tracker, default_uri

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]

RUN = Path(__file__).resolve().parent.parent / "run.py"
STATEMENT = "alembic.ddl.impl:DefaultImpl._exec"
"""Is called for every change of a schema that MLflow makes."""
STATEMENTS = 400
"""How often at least; a test checks it."""
SHARES = [(i + 0.5) / 20 for i in range(20)]
"""Moments of a creation. The short version has two."""
ODD_NAMES = ["q?x=1", "a b", "50%", "%3F", "#1", "it's", 'say "x"', "größe 数", "two\nlines", "a&b;c", "[x]*", "a@b:c"]

OPENED = ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC")
CALLS = "open,openat,creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir"
QUOTED = re.compile(r'"((?:[^"\\\\]|\\\\.)*)"')


def spread(shares, short=2):
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
    records.finish(tracker, run_id, [("exact_match", 2, 0.5)], {"steps": 1})
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
    interrupted = (1, -signal.SIGINT)  # where the tests run in the background of a shell, Python has no handler
    assert killed() in ((-signal.SIGKILL,) if end is die else interrupted)
    recorded(empty_root, spec)
    assert sorted(p.name for p in empty_root.iterdir()) == ["mlflow.db", "mlflow.db.lock", "mlruns"]


@pytest.mark.parametrize("share", spread(SHARES))
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
    from alembic.ddl.impl import DefaultImpl

    calls = []
    inner = DefaultImpl._exec
    monkeypatch.setattr(DefaultImpl, "_exec", lambda *args, **kw: calls.append(1) or inner(*args, **kw))
    empty_root.mkdir()
    Tracker(empty_root)
    assert STATEMENTS <= len(calls) <= STATEMENTS * 1.3


def test_an_empty_file_becomes_a_database(empty_root, spec):
    """With the journal of a creation that ended in its first write, which SQLite would play back."""
    empty_root.mkdir()
    for name in ("mlflow.db", "mlflow.db-journal", "mlflow.db.new", "mlflow.db.new-journal"):
        (empty_root / name).touch()
    recorded(empty_root, spec)
    assert sorted(p.name for p in empty_root.iterdir()) == ["mlflow.db", "mlflow.db.lock", "mlruns"]


def test_a_database_with_experiments_is_never_set_aside(root):
    """One of an older MLflow is not half-made: its owner upgrades it."""
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as connection, connection:
        connection.execute("delete from alembic_version")
        connection.execute("create table _alembic_tmp_datasets (a int)")
    assert not database.half_made(root / "mlflow.db")
    with pytest.raises(ConfigError, match=r"^MLflow: cannot use sqlite"):
        Tracker(root)
    assert not list(root.glob("*half-made*"))


# Names


def places(root):
    """The artifact places in a root's database, of experiments and runs."""
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as connection:
        found = "select artifact_location from experiments where name <> 'Default' union select artifact_uri from runs"
        rows = connection.execute(found)
        return [database.local_path(place) for (place,) in rows]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_root_may_have_any_name(tmp_path, make_root, spec, monkeypatch, name):
    """All that is written lies below it, and its URI stands in a shell as it is printed."""
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    make_root(name)
    root = tmp_path / name
    uri = default_uri(root)
    assert database.local_path(recorded(root, spec)).is_relative_to(root)
    assert [p.name for p in (root / "mlruns").rglob("*.yaml")] == ["config.yaml"]
    assert shlex.split(uri) == [uri] and Tracker(tmp_path / "another", uri).find(spec.key).status == "FINISHED"
    assert open_tracker(root).find(spec.key).status == "FINISHED"
    assert all(place.is_relative_to(root) for place in places(root))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "working"]) and not list(working.iterdir())


@pytest.mark.parametrize("name", ODD_NAMES[:1])
def test_the_command_with_such_a_name(tmp_path, empty_root, write, inline, unsaved_figures, monkeypatch, capsys, name):
    """From an empty folder to the report, as a relative path."""
    file = write(arms={"a": {}}, expect=[])
    monkeypatch.chdir(tmp_path)
    assert main([file, "--root", name]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["tiny.yaml", name])
    assert sorted(p.name for p in (tmp_path / name).iterdir()) == WRITTEN
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("runs")]
    uri = shlex.split(line)[-1]
    assert Tracker(tmp_path / "x", uri).client.get_experiment_by_name("tiny") is not None


WRITTEN = ["checkpoints", "mlflow.db", "mlflow.db.lock", "mlruns", "reports"]


def test_a_name_that_is_not_text():
    """MLflow could not name its artifacts."""
    with pytest.raises(ConfigError, match=r"^command line: --root: .*expected a name in UTF-8"):
        check_root(Path(os.fsdecode(b"/tmp/\xff")), "--root", write=True)


@pytest.mark.slow
def test_mlflow_shows_a_root_with_such_a_name(tmp_path, make_root, spec, serve):
    """The printed ``mlflow ui`` line works, artifacts included, also after a move."""
    root = make_root("before")
    recorded(root, spec)
    moved = tmp_path / "q?x=1 #2"
    shutil.move(root, moved)
    tracker = open_tracker(moved)
    server = serve(tracker.uri.text)
    run_id = Tracker(tmp_path / "x", server.uri).find(spec.key).run_id
    with urllib.request.urlopen(f"{server.uri}/get-artifact?path=config.yaml&run_id={run_id}") as answer:
        assert yaml.safe_load(answer.read()) == spec.config()


# Moved and copied


@pytest.mark.parametrize("copied", [False, True])
def test_a_root_may_be_moved_and_copied(tmp_path, make_root, write, inline, unsaved_figures, copied):
    """Old artifacts are found below the new place, new ones are written there, and the old place stays as it was."""
    root, new, file = make_root("old"), tmp_path / "new place", write(arms={"a": {}}, expect=[])
    assert forked(lambda: main([file, "--root", str(root)]))() == 0  # not in this process: MLflow keeps places of runs
    shutil.copytree(root, new) if copied else shutil.move(root, new)
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    reports = set(new.glob("mlruns/tiny/*/artifacts/report/*"))
    for path in reports:
        path.unlink()
    write(arms={"a": {}, "b": {"model.gamma": "off"}}, expect=[])
    assert main([file, "--root", str(new)]) == 0
    assert set(new.glob("mlruns/tiny/*/artifacts/report/*")) == reports
    assert len(list(new.glob("mlruns/tiny/*/artifacts/config.yaml"))) == 2
    tracker = Tracker(new)
    for run in tracker.client.search_runs([tracker.experiments.id_of("tiny")]):
        names = [item.path for item in tracker.client.list_artifacts(run.info.run_id)]
        assert names in (["config.yaml", "scores.npz"], ["report"]) and "lit.artifacts" not in run.data.tags
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before
    assert all(place.is_relative_to(new) for place in places(new))


def test_a_dry_run_moves_nothing(tmp_path, make_root, write, spec):
    root = make_root("old")
    recorded(root, spec)
    shutil.move(root, tmp_path / "new")
    before = (tmp_path / "new" / "mlflow.db").read_bytes()
    assert main([write(), "--root", str(tmp_path / "new"), "--dry-run"]) == 0
    assert (tmp_path / "new" / "mlflow.db").read_bytes() == before


def test_artifacts_lie_beside_their_database(tmp_path, make_root, spec):
    """Of two roots with one SQLite file; and what an older commit put below a root that is not ours is left alone."""
    shared, mine, old = make_root("shared"), tmp_path / "mine", tmp_path / "old"
    uri = default_uri(shared)
    assert database.local_path(recorded(mine, spec, uri)).is_relative_to(shared / "mlruns" / "tiny")
    tracker = Tracker(mine, uri)
    number = tracker.client.create_experiment("theirs", artifact_location=(old / "mlruns" / "theirs").as_uri())
    run_id = tracker.client.create_run(number).info.run_id
    tracker.files.add_folder(run_id, shared / "mlruns")
    assert "outside" in tracker.client.get_run(run_id).data.tags["lit.artifacts"]
    assert not old.exists() and not mine.exists()


def test_what_lies_elsewhere_is_not_relocated(root, spec):
    """Artifacts on a server, and experiments that somebody keeps at another place."""
    recorded(root, spec)
    client = Tracker(root).client
    elsewhere = ["s3://bucket/mlruns/one", "file:///data/other/two", "mlflow-artifacts:/mlruns/three"]
    for i, place in enumerate(elsewhere):
        client.create_experiment(f"e{i}", artifact_location=place)
    database.relocate(root / "mlflow.db")
    assert [client.get_experiment_by_name(f"e{i}").artifact_location for i in range(3)] == elsewhere


def test_an_experiment_of_the_user_follows_its_artifacts(tmp_path, root, spec):
    """It is relocated only where they are gone from the old place and lie at the new one."""
    recorded(root, spec)
    client, old, new = Tracker(root).client, tmp_path / "other/mlruns/theirs", root / "mlruns/theirs"
    client.create_experiment("theirs", artifact_location=old.as_uri())
    steps = [lambda: old.mkdir(parents=True), new.mkdir, old.rmdir]
    for step, place in zip(steps, (old, old, new), strict=True):
        step()
        database.relocate(root / "mlflow.db")
        assert client.get_experiment_by_name("theirs").artifact_location == place.as_uri()


# Deleted in MLflow


def test_a_deleted_experiment_is_restored(root, write, inline, unsaved_figures, capsys, monkeypatch):
    """By the same command, with a line, and nothing is trained again."""
    file = write(arms={"a": {}}, expect=[])
    assert main([file, "--root", str(root)]) == 0
    tracker = Tracker(root)
    number = tracker.experiments.id_of("tiny")
    tracker.client.delete_experiment(number)
    capsys.readouterr()
    assert main([file, "--root", str(root), "--dry-run"]) == 0
    assert capsys.readouterr().err.count("warning: experiment tiny was deleted in MLflow; this command") == 1
    assert tracker.client.get_experiment(number).lifecycle_stage == "deleted"
    monkeypatch.setattr("lit_memory.cli.Execution", lambda *args: pytest.fail("something was trained"))
    assert main([file, "--root", str(root)]) == 0
    out, err = capsys.readouterr()
    assert err == "warning: experiment tiny was deleted in MLflow; restored it with all its runs\n"
    assert "1 run: 1 finished" in out and tracker.client.get_experiment(number).lifecycle_stage == "active"


def test_an_experiment_that_is_deleted_meanwhile(root, spec):
    """Restored by whoever needs it next."""
    lines = []
    tracker = Tracker(root, warn=lines.append)
    tracker.client.delete_experiment(tracker.experiments.id_of("tiny"))
    assert not lines and tracker.parent("tiny", "default", {}) and len(lines) == 1


# Servers


def create_at_once(root, uri, spec, count=3):
    """Open a fresh store in several processes at once and record a run in each; returns their exit codes."""
    barrier = multiprocessing.get_context("fork").Barrier(count)

    def work(i):
        barrier.wait(60)
        tracker = Tracker(root / str(i), uri)
        tracker.start(spec, None, tracker.parent("tiny", "default", {}), {}, {"i": i})

    waits = [forked(lambda i=i: work(i), log=root / f"{i}.txt") for i in range(count)]
    return [wait() for wait in waits], [(root / f"{i}.txt").read_text()[-500:] for i in range(count)]


def check_shared(root, uri, spec):
    codes, logs = create_at_once(root, uri, spec)
    assert codes == [0, 0, 0], logs
    client = Tracker(root / "x", uri).client
    assert sorted(e.name for e in client.search_experiments()) == ["Default", "tiny"]
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert sorted(run.data.tags["lit.kind"] for run in runs) == ["experiment", "run", "run", "run"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
@pytest.mark.parametrize("attempt", range(3))
def test_three_commands_at_once_on_a_fresh_database(tmp_path, request, spec, kind, attempt):
    check_shared(tmp_path, request.getfixturevalue(kind).fresh(), spec)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES[2::5])
def test_kill_9_while_postgres_gets_its_tables(tmp_path, postgres, spec, share):
    """Its transactions end with the process, and so does the lock."""
    uri = postgres.fresh()
    killed = forked(lambda: Tracker(tmp_path, uri) and 0, (STATEMENT, int(share * STATEMENTS), die))
    assert killed() == -signal.SIGKILL
    assert recorded(tmp_path, spec, uri)


@pytest.mark.slow
def test_three_commands_at_once_on_a_server_of_mlflow(tmp_path, mlflow_server, spec):
    codes, logs = create_at_once(tmp_path, mlflow_server.uri, spec)
    assert codes == [0, 0, 0], logs


# Nothing is written elsewhere


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="no strace")
@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_a_command_writes_below_its_root_alone(tmp_path, write, monkeypatch, request):
    """And to the system's temporary folder: not to the home, the working directory or the source tree."""
    caches = ("MPLCONFIGDIR", "NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    for name in ("MLFLOW_TRACKING_URI", "LIT_MEMORY_ROOT", *caches):
        monkeypatch.delenv(name, raising=False)
    for name in ("home", "working"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    temporary = Path(tempfile.mkdtemp(prefix="t"))  # its path is short, as a socket's must be
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # else Python keeps what it compiles
    command = [sys.executable, RUN, write(), "--root", tmp_path / "q?x=1"]
    trace = ["strace", "-f", "--seccomp-bpf", "-qq", "-y", "-e", f"trace={CALLS}", "-o", tmp_path / "trace"]
    done = subprocess.run([*trace, *command], cwd=tmp_path / "working", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    allowed = tuple(map(str, (tmp_path / "q?x=1", temporary, "/dev/", "/proc/")))
    written = set(written_paths((tmp_path / "trace").read_text(), tmp_path / "working"))
    assert any(path.endswith("mlflow.db") for path in written)
    assert not [path for path in written if not path.startswith(allowed)]


def written_paths(trace, working):
    """The paths that a trace's successful calls created, changed or removed."""
    for line in trace.splitlines():
        if re.search(r" = -1 E|unfinished|\+\+\+|---", line):
            continue
        call = line.split("(")[0].split()[-1]
        if call.startswith("open") and not any(flag in line for flag in OPENED):
            continue
        folder = re.search(r"\((?:AT_FDCWD|\d+)<([^>]*)>", line)
        for name in QUOTED.findall(line):
            yield os.path.join(folder[1] if folder else str(working), name)
