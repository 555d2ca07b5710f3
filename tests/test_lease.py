"""One owner of a key per tracking store: several roots, one store, processes that stop, die and come back."""

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from typing import ClassVar
from urllib.request import urlopen

import pytest
import torch
import yaml
from conftest import TINY_EXPERIMENT
from faults import PLACES, die, fork_command, forked, is_stopped, outcome, wait_for

from lit_memory.cli import main
from lit_memory.plan.experiment import parse
from lit_memory.run import checkpoint, lease, register
from lit_memory.run.engine import run_one
from lit_memory.run.lease import Lease, LeaseLost
from lit_memory.run.tracking import Tracker

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]

STAGED = ("train.stages=[{task.pairs: 1, steps: 4}, {task.pairs: 3, steps: 5}]", "train.valid_every=3")


def quiet(message):
    pass


def train(spec, root, send=quiet):
    tracker = Tracker(root)
    tags = {"where": f"here:{root}"}
    run_one(spec, root, tracker.uri, tracker.parent(spec.experiment, spec.scale, {}), tags, send)


@pytest.fixture
def store(make_root, monkeypatch):
    """One database that all roots use."""
    folder = make_root("store")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    return folder


@pytest.fixture
def roots(store, tmp_path):
    """``roots(n)``: so many folders without databases."""

    def make(number):
        folders = [tmp_path / f"root{i}" for i in range(number)]
        for folder in folders:
            folder.mkdir()
        return folders

    return make


@pytest.fixture
def quick(monkeypatch):
    """Leases that expire within seconds."""
    for name, seconds in {"EXPIRES": 3.0, "RENEWED": 0.3, "SURE": 1.5, "POLL": 0.1}.items():
        monkeypatch.setattr(lease, name, seconds)


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory, _database):
    """What a first run imports, every fork would have to import again."""
    root = tmp_path_factory.mktemp("warm")
    shutil.copy(_database, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        train(parse(yaml.safe_load(TINY_EXPERIMENT), "tiny.yaml").at().plan()[0], root)


def runs(store):
    """(arm, status) of all runs with a key, and the metric rows that are there more than once; read without MLflow."""
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as database:
        arms = database.execute(
            "select t.value, r.status from runs r join tags t using (run_uuid) where t.key = 'lit.arm'"
        ).fetchall()
        twice = database.execute(
            "select key, step, count(*) from metrics group by run_uuid, key, step having count(*) > 1"
        ).fetchall()
    return sorted(arms), twice


def claims(store):
    """The newest lease of every key."""
    return lease.newest(*Tracker(store).register.read())


# The register


def test_an_entry_is_written_once_by_eight_processes_that_also_make_the_register(store, tmp_path):
    start = tmp_path / "start"

    def settle(i):
        entries = Tracker(store).register
        wait_for(start.exists)
        for n in range(5):
            (tmp_path / f"{i}.{n}").write_text(entries.settle(f"key.{n}", f"process {i}"))

    waits = [forked(lambda i=i: settle(i)) for i in range(8)]
    time.sleep(0.5)
    start.touch()
    assert [wait() for wait in waits] == [0] * 8
    for n in range(5):
        assert len({(tmp_path / f"{i}.{n}").read_text() for i in range(8)}) == 1
    client = Tracker(store).client
    assert [e.name for e in client.search_experiments() if e.name.startswith(register.NAME)] == [register.NAME]
    entries, _ = Tracker(store).register.read()
    assert {name for name in entries if name.startswith("key.")} == {f"key.{n}" for n in range(5)}


def test_what_a_user_deletes_of_the_register_comes_back(store):
    tracker = Tracker(store)
    assert tracker.register.settle("key.1", "a") == "a"
    for delete in (
        lambda: tracker.client.delete_experiment(tracker.client.get_experiment_by_name(register.NAME).experiment_id),
        lambda: [tracker.client.delete_run(run_id) for run_id in tracker.register.pages.values()],
    ):
        delete()
        with pytest.raises(tracker.register.Error):
            tracker.register.mark("key.1", "1")
        tracker.register.mark("key.1", "2")
        assert tracker.register.settle("key.1", "b") == "a" and tracker.register.page("key.1")[1]["key.1"] == "2"


def test_plans_create_no_register(store):
    assert Tracker(store).register.read() == ({}, {})
    assert Tracker(store).client.get_experiment_by_name(register.NAME) is None


# Roots that share a store


@pytest.mark.parametrize("number", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_roots_that_share_a_store_train_a_key_once(make_spec, store, roots, number):
    spec = make_spec(*STAGED)
    waits = [forked(lambda root=root: train(spec, root)) for root in roots(number)]
    assert [wait() for wait in waits] == [0] * number
    assert runs(store) == ([("a", "FINISHED")], [])
    assert claims(store)[spec.key].free


@pytest.fixture
def server(store, tmp_path, monkeypatch):
    """The same over HTTP: two machines know of each other through the server only."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    argv += ["--backend-store-uri", f"sqlite:///{store}/mlflow.db"]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)

    def answers():
        with contextlib.suppress(OSError):
            urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return True
        return False

    wait_for(answers, process)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    yield store
    os.killpg(process.pid, signal.SIGTERM)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 8])
def test_roots_that_share_a_server_train_a_key_once(make_spec, server, roots, number, tmp_path):
    spec = make_spec(*STAGED)
    waits = [forked(lambda root=r: train(spec, root), log=tmp_path / r.name / "log") for r in roots(number)]
    logs = lambda: [path.read_text() for path in tmp_path.glob("root*/log")]  # noqa: E731
    assert [wait() for wait in waits] == [0] * number, logs()
    assert runs(server) == ([("a", "FINISHED")], [])
    assert claims(server)[spec.key].free


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 8])
def test_commands_of_several_roots_report_the_same(tree, store, roots, tmp_path, number):
    """Half of them belong to another experiment that shares an arm."""
    files = [tmp_path / f"{name}.yaml" for name in ("one", "two")]
    for file, arms in zip(
        files, ({"a": {}, "b": {"model.gamma": "off"}}, {"a": {}, "c": {"model.memory_dim": 8}}), strict=True
    ):
        file.write_text(yaml.safe_dump(tree | {"experiment": file.stem, "arms": arms, "expect": []}))
    folders = roots(number)
    waits = [fork_command(files[i % 2], root, tmp_path / f"log{i}", "--jobs", "2") for i, root in enumerate(folders)]
    assert [wait() for wait in waits] == [0] * number, [(tmp_path / f"log{i}").read_text() for i in range(number)]
    assert runs(store) == ([("a", "FINISHED"), ("b", "FINISHED"), ("c", "FINISHED")], [])
    for i in range(2):
        assert len({(root / f"reports/{files[i].stem}/table.csv").read_bytes() for root in folders[i::2]}) == 1


def test_a_plan_says_that_another_root_trains_a_run(write, make_spec, store, roots, capsys):
    here, there = roots(2)
    spec = make_spec()
    with lease.held(Tracker(store).register, spec.key, spec.folder(there), quiet):
        assert main([write(), "--root", str(here), "--dry-run"]) == 0
        assert "2 runs: 1 running, 1 new" in capsys.readouterr().out
    assert main([write(), "--root", str(here), "--dry-run"]) == 0
    assert "2 runs: 2 new" in capsys.readouterr().out


# Processes that die


def test_a_killed_run_resumes_at_once_below_its_root(make_spec, store, roots, monkeypatch):
    monkeypatch.setattr(lease, "EXPIRES", 1e9)
    spec, (root,) = make_spec(*STAGED), roots(1)
    for place in ("validation", "checkpoint half written", "before FINISHED"):
        assert forked(lambda: train(spec, root), (*PLACES[place], die))() == -signal.SIGKILL
        assert not claims(store)[spec.key].free
    train(spec, root)
    assert runs(store) == ([("a", "FINISHED")], []) and claims(store)[spec.key].number == 4


def test_another_root_takes_over_when_the_lease_expires(make_spec, store, roots, quick):
    spec, (dead, root), told = make_spec(*STAGED), roots(2), []
    assert forked(lambda: train(spec, dead), (*PLACES["validation"], die))() == -signal.SIGKILL
    started = time.monotonic()
    train(spec, root, told.append)
    assert time.monotonic() - started > lease.EXPIRES and told[0] == {"event": "waiting"}
    assert runs(store) == ([("a", "FINISHED")], [])


def test_a_copied_root_proves_nothing(make_spec, store, roots, tmp_path):
    """The owner may live below the original."""
    spec, (root,) = make_spec(), roots(1)
    entries = Tracker(store).register
    with lease.held(entries, spec.key, spec.folder(root), quiet) as own:
        shutil.copytree(root, tmp_path / "copy")
        assert lease.remembers(spec.folder(root), own.owner)
        assert not lease.remembers(spec.folder(tmp_path / "copy"), own.owner)
        assert not lease.release_dead(entries, spec.key, spec.folder(tmp_path / "copy"))
        with checkpoint.lock(spec.folder(root)):
            assert not lease.release_dead(entries, spec.key, spec.folder(root))
    assert claims(store)[spec.key].free


def test_a_command_frees_what_its_dead_runs_held(write, make_spec, store, roots, monkeypatch):
    """And closes no run that another root has taken over."""
    spec, (root, other) = make_spec(), roots(2)
    assert forked(lambda: train(spec, root), (*PLACES["validation"], die))() == -signal.SIGKILL
    tracker = Tracker(store)
    monkeypatch.setattr("lit_memory.run.sweep.Sweep.location", f"here:{root}")
    key, folder = spec.key, spec.folder(root)
    number = claims(store)[key].number
    with lease.held(tracker.register, key, spec.folder(other), quiet) if number > 1 else contextlib.nullcontext():
        assert main([write(), "--root", str(root), "--report"]) == 0
    assert claims(store)[key].free and tracker.find(key).status == "KILLED"
    tracker.client.update_run(tracker.find(key).run_id, status="RUNNING")
    with lease.held(tracker.register, key, spec.folder(other), quiet):
        assert not lease.release_dead(tracker.register, key, folder)
        assert main([write(), "--root", str(root), "--report"]) == 0
        assert tracker.find(key).status == "RUNNING" and not claims(store)[key].free


def test_sigterm_gives_the_lease_back(make_spec, store, roots):
    spec, (root,) = make_spec(*STAGED), roots(1)
    end = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    assert forked(lambda: train(spec, root), (*PLACES["middle of a stage"], end))() == 1
    assert claims(store)[spec.key].free and not (spec.folder(root) / "lease").exists()


# Processes that stop and come back


SLOW = ("validation is logged", "test")


def stop(store):
    """SIGSTOP once the threads of this process have written what they have; again, until the file ``go`` is there."""
    while not (store / "go").exists():
        with contextlib.closing(sqlite3.connect(store / "mlflow.db", timeout=60, isolation_level=None)) as database:
            for _ in range(3):  # what waits for its turn now has had it then
                database.execute("begin immediate")
                database.execute("rollback")
                time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_until_stopped(pid, store):
    """Until ``stop`` has stopped the process while none of its threads locks the store, which nobody could use then."""
    for _ in range(10):
        wait_for(lambda: is_stopped(pid))
        assert is_stopped(pid)
        try:
            with contextlib.closing(sqlite3.connect(store / "mlflow.db", timeout=0.2)) as database:
                return database.execute("begin immediate")
        except sqlite3.OperationalError:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)
    pytest.fail("the store is locked at every stop")


def go_on(pid, store):
    (store / "go").touch()
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "place",
    ["middle of a stage", "before FINISHED", *(pytest.param(place, marks=pytest.mark.slow) for place in SLOW)],
)
def test_a_stopped_run_that_lost_its_lease_writes_nothing(make_spec, store, roots, quick, tmp_path, place):
    spec, (stopped, root), log = make_spec(*STAGED), roots(2), tmp_path / "log"
    wait = forked(lambda: train(spec, stopped), (*PLACES[place], lambda: stop(store)), log=log)
    wait_until_stopped(wait.pid, store)
    train(spec, root)
    expected = runs(store), outcome(spec, root)[1:]
    go_on(wait.pid, store)
    assert wait() == 1
    lines = log.read_text().splitlines()
    assert len(lines) == 1 and lines[0].startswith("LeaseLost: ") and str(root) in lines[0]
    assert (runs(store), outcome(spec, root)[1:]) == expected and expected[0] == ([("a", "FINISHED")], [])


def test_a_stop_without_a_successor_costs_nothing(make_spec, store, roots, quick):
    spec, (root,) = make_spec(*STAGED), roots(1)
    wait = forked(lambda: train(spec, root), (*PLACES["validation"], lambda: stop(store)))
    wait_until_stopped(wait.pid, store)
    time.sleep(2 * lease.SURE)
    go_on(wait.pid, store)
    assert wait() == 0 and runs(store) == ([("a", "FINISHED")], [])


class Away(Exception):
    pass


class Entries:
    """A register in memory, which may be away."""

    Error = (Away,)

    def __init__(self):
        self.entries, self.marks, self.away = {}, {}, False

    def settle(self, name, value):
        self.page(name)
        return self.entries.setdefault(name, value)

    def mark(self, name, value):
        self.page(name)
        self.marks[name] = value

    def page(self, name):
        if self.away:
            raise Away
        return dict(self.entries), dict(self.marks)


@pytest.fixture
def entries():
    return Entries()


def test_a_store_that_is_away_ends_no_lease(entries, tmp_path, quick):
    with lease.held(entries, "key", tmp_path, quiet) as own:
        entries.away = True
        time.sleep(2 * lease.SURE)
        own.raise_if_lost()  # training goes on
        with pytest.raises(Away):  # as the write itself would
            own.check()
        entries.away = False
        own.check()
        entries.settle("key.2", "there:/root 4711")
        with pytest.raises(LeaseLost, match=r"there:/root trains its run now; run the same command again"):
            own.renew()
        with pytest.raises(LeaseLost):
            own.raise_if_lost()
    assert entries.marks["key.1"] != lease.FREE


def test_no_time_counts_while_the_store_is_away(entries, tmp_path, quick):
    """Its owner could not renew the lease either."""
    entries.settle("key.1", "there:/root 4711")
    started, told = time.monotonic(), []
    back, page = started + lease.EXPIRES + 1, entries.page

    def page_when_back(name):
        entries.away = bool(told) and time.monotonic() < back
        return page(name)

    entries.page = page_when_back
    with lease.held(entries, "key", tmp_path, told.append):
        assert told == [{"event": "waiting"}] and time.monotonic() - back >= lease.EXPIRES - 2 * lease.POLL


def test_an_owner_that_comes_back_in_the_last_moment_has_time_to_notice(entries, tmp_path, quick):
    """Its heartbeat arrives between the last look of the other process and its claim."""
    before = lease.Claim(1, "there:/root 4711", "17")
    entries.entries["key.1"], entries.marks["key.1"] = before.owner, "18"
    started = time.monotonic()
    lease.await_end(entries, "key", before)
    assert time.monotonic() - started >= lease.EXPIRES > lease.SURE
    entries.marks["key.1"] = "17"
    started = time.monotonic()
    lease.await_end(entries, "key", before)
    assert time.monotonic() - started < 1


def test_one_of_two_that_see_a_lease_expire_gets_it(entries, tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    leases = [Lease(entries, "key", folder) for folder in folders]
    assert [each.take(None) for each in leases] == [True, False]
    leases[0].end()
    assert entries.marks == {"key.1": lease.FREE}


def test_a_run_that_begins_while_the_store_is_away_takes_its_lease_later(entries, tmp_path):
    for owner in ("", "there:/root 4711"):
        entries.away = True
        with lease.held(entries, "key", tmp_path, quiet) as own:
            with pytest.raises(Away):
                own.check()
            own.raise_if_lost()
            entries.away = False
            if owner:
                entries.settle("key.2", owner)
                with pytest.raises(LeaseLost, match=r"did not answer, there:/root began to train this run; run the"):
                    own.check()
            else:
                own.check()
                assert entries.entries == {"key.1": own.owner}
    assert entries.marks == {"key.1": lease.FREE}


def test_a_newer_lease_ends_a_run_before_its_next_write(make_spec, store, roots):
    """Also where nothing has to be asked: the thread has seen it."""
    spec, (root,) = make_spec(), roots(1)
    tracker = Tracker(store)
    with lease.held(tracker.register, spec.key, spec.folder(root), quiet) as own:
        tracker.guard(own.check)
        tracker.experiments.id_of("tiny")
        tracker.register.settle(f"{spec.key}.2", "there:/root 4711")
        with pytest.raises(LeaseLost):
            own.renew()
        with pytest.raises(LeaseLost):
            tracker.experiments.id_of("other")
    assert Tracker(store).client.get_experiment_by_name("other") is None


# Stores that have twins


def test_a_store_with_twins_is_read_with_one_warning(write, make_spec, root, inline, unsaved_figures, capsys):
    """Two finished runs of a key, and rows that are there twice, as roots without leases have left them."""
    assert main([write(), "--root", str(root)]) == 0
    capsys.readouterr()
    assert main([write(), "--root", str(root), "--report"]) == 0
    expected, quiet_errors = capsys.readouterr()
    assert "warning" not in quiet_errors
    table = (root / "reports/tiny/table.csv").read_bytes()
    tracker, spec = Tracker(root), make_spec()
    oldest = tracker.find(spec.key)
    once = {name: tracker.client.get_metric_history(oldest.run_id, name) for name in oldest.metrics}
    tags = {k: v for k, v in oldest.tags.items() if k.startswith("lit.")}
    twin = tracker.client.create_run(tracker.experiments.id_of("tiny"), tags=tags).info.run_id
    for run_id in (oldest.run_id, twin):
        for name in oldest.metrics:
            for m in once[name]:
                value = 2 * m.value if name.startswith("time/") else m.value
                tracker.client.log_metric(run_id, name, value, timestamp=m.timestamp + 1000, step=m.step)
    tracker.end(twin, "FINISHED")
    assert main([write(), "--root", str(root), "--report"]) == 0
    out, errors = capsys.readouterr()
    assert out == expected and (root / "reports/tiny/table.csv").read_bytes() == table
    assert errors.count("warning") == 1 and "1 key with several finished runs" in errors
    assert Tracker(root).find(spec.key).run_id == oldest.run_id


def test_no_sign_of_life_comes_after_the_end(quick, tmp_path):
    """One that is on its way on a slow server is waited for."""

    class Slow:
        Error = (OSError,)
        entries: ClassVar = {}
        marks: ClassVar = {}
        on_its_way = threading.Event()

        def settle(self, name, owner):
            return self.entries.setdefault(name, owner)

        def mark(self, name, value):
            if value != lease.FREE:
                self.on_its_way.set()
                time.sleep(0.5)
            self.marks[name] = value

        def page(self, key):
            return self.entries, self.marks

    register = Slow()
    own = Lease(register, "key", tmp_path)
    assert own.take(None) and register.on_its_way.wait(5)
    own.end()
    time.sleep(1)
    assert register.marks == {"key.1": lease.FREE}


# Weights of a run that was trained elsewhere


@pytest.fixture
def pair(tree):
    """A run, and one that starts from its weights."""
    arms = {"a": {"train.lr": 0.01}, "b": {"train.init": {"run": "a"}, "train.lr": 0.02}}
    return parse(tree | {"arms": arms, "expect": []}, "tiny.yaml").at().plan()


@pytest.mark.parametrize("visible", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_starts_from_one_that_was_trained_below_another_root(pair, store, roots, visible):
    """Its last checkpoint is copied from there, or it is trained again; its record stays as it is."""
    (source, spec), (whole, there, here), told = pair, roots(3), []
    assert forked(lambda: train(source, there))() == 0
    record = outcome(source, there)[1:]
    if not visible:
        there.rename(there.with_name("elsewhere"))
    train(spec, here, told.append)
    assert runs(store) == ([("a", "FINISHED"), ("b", "FINISHED")], [])
    assert outcome(source, here)[1:] == record
    warnings = [message["message"] for message in told if message["event"] == "warning"]
    assert len(warnings) == (not visible) and all("a of tiny, seed 0: its weights are not below" in w for w in warnings)
    found = outcome(spec, here)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{whole}/mlflow.db"
    shutil.copy(store / "mlflow.db", whole / "mlflow.db")
    tracker = Tracker(whole)
    for one in pair:
        tracker.retire(tracker.find(one.key).run_id)
        assert forked(lambda one=one: train(one, whole))() == 0
    expected = outcome(spec, whole)
    assert found[1:] == expected[1:]
    assert all(torch.equal(found[0][name], tensor) for name, tensor in expected[0].items())


@pytest.mark.parametrize("lose", [lambda path: path.write_bytes(b"damaged"), checkpoint.remove])
def test_a_last_checkpoint_is_not_passed_over_for_an_older_one(pair, store, roots, lose):
    """The weights of an earlier step are other weights, as of a training for the weights alone that was stopped."""
    (source, spec), (root,) = pair, roots(1)
    train(source, root)
    newest, older = checkpoint.saved(source.folder(root))
    before = outcome(source, root)[0]
    lose(newest)
    train(spec, root)
    assert checkpoint.saved(source.folder(root)) == [newest, older]
    again = outcome(source, root)[0]
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
