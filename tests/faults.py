"""What the tests of faults share: forks and commands with a fault built in, and what a root looks like after it."""

import contextlib
import ctypes
import errno
import importlib
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from lit_memory.cli import main
from lit_memory.run import checkpoint, register
from lit_memory.run.engine import run_one
from lit_memory.run.launchers import local as launch
from lit_memory.run.tracking import Tracker

NOLOAD = "ignore:The ``noload`` loader strategy"
"""MLflow's own use of SQLAlchemy."""

PROJECT = Path(__file__).resolve().parent.parent
RUN = PROJECT / "run.py"

# Two stages; validations and checkpoints at steps 3, 4 (end of stage 1), 7 and 9 (end of stage 2).
STAGED = (
    "train.stages=[{task.pairs: 1, steps: 4}, {task.pairs: 3, steps: 5}]",
    "train.valid_every=3",
    "model.dropout=0.2",
    "train.lr=1e-2",
)

PLACES = {
    "first step": ("lit_memory.lit.callbacks.finite:FiniteGuard.on_before_backward", 1),
    "middle of a stage": ("lit_memory.lit.callbacks.seed:StepSeed.on_train_batch_start", 6),
    "update of the weights": ("lit_memory.lit.callbacks.finite:FiniteGuard.on_before_optimizer_step", 8),
    "stage change": ("lit_memory.lit.callbacks.curriculum:Curriculum.enter", 2),
    "validation": ("lit_memory.lit.modules:LitMemory.validation_step", 2),
    "validation is logged": ("lit_memory.run.journal:Journal.log", 3),
    "checkpoint begins": ("lit_memory.run.saving:save", 1),
    "checkpoint half written": ("lit_memory.run.checkpoint:Hashing.write", 40),
    "first checkpoint without its checksum": ("lit_memory.util.files:write", 1),
    "checkpoint without its checksum": ("lit_memory.util.files:write", 2),
    "checkpoint before it is renamed": ("os:replace", 4),
    "old checkpoint is removed": ("lit_memory.run.checkpoint:remove", 1),
    "the last checkpoint": ("lit_memory.run.saving:save", 4),
    "the last checkpoint of two": ("lit_memory.run.saving:save", 2),
    "training is over": ("lit_memory.run.journal:Journal.tag", 1),
    "test": ("lit_memory.lit.modules:LitMemory.test_step", 2),
    "test metrics are written": ("lit_memory.run.journal:Journal.finish", 1),
    "before FINISHED": ("lit_memory.run.journal:Journal.end", 1),
    "metrics are sent": ("lit_memory.run.tracking:Tracker.write", 2),
    "FINISHED is sent": ("lit_memory.run.tracking:Tracker.end", 1),
}
"""A phase -> place and call, for ``at``."""
TELLING = (
    "middle of a stage",
    "stage change",
    "checkpoint half written",
    "checkpoint without its checksum",
    "old checkpoint is removed",
    "test metrics are written",
    "metrics are sent",
    "FINISHED is sent",
)
"""Those of which each leaves something of its own behind; at the others a run is killed in slow tests."""

LONG = ["train.steps=100000", "train.valid_every=100000"]
"""No validation comes within the test: what is saved is saved because of the signal."""


def at(place, count, action):
    """Do ``action`` at the ``count``-th call of "module:function" or "module:Class.method", before the call itself."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    target = importlib.import_module(module)
    for owner in owners:
        target = getattr(target, owner)
    inner, calls = getattr(target, name), []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            action()
        return inner(*args, **kwargs)

    setattr(target, name, call)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def no_room(size):
    """No file may grow beyond ``size`` bytes from now on."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def slow(*values):
    """Parameters of a test that ``pytest -m slow`` has."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


HANGS = 300
"""Seconds after which a fork is killed: a thread of this process may have held a lock of a library when it forked."""


def forked(work, *faults, log=None):
    """Run ``work()`` in a fork of this process, with faults (place, count, action). Returns a function that waits for
    the fork, which takes ``takes`` seconds at least, and returns its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if not pid:
        code = 1
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started us in the background
        try:
            if log:
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            for fault in faults:
                at(*fault)
            code = work() or 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(kill_after=None, takes=0.0):
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + takes + HANGS
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                deadline = math.inf
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(ended[1])

    wait.pid = pid
    return wait


def fork_command(file, root, log, *flags, before=lambda: None):
    """The command as a fork of this process, in a session of its own. Its children fork, too: imports would take most
    of the time. before: called in the fork at its start."""

    def call():
        os.setsid()
        before()
        fork = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method: fork
        launch.forkserver.ensure_running = lambda: None
        return main([str(file), "--root", str(root), *flags])

    return forked(call, log=log)


def train(spec, root, tags=None):
    tracker = Tracker(root)
    run_one(spec, root, tracker.uri, tracker.parent(spec.experiment, spec.scale, {}), tags or {}, lambda message: None)


def outcome(spec, root):
    """Weights, all metric rows (metric, step, value), and the status of the one run of a key."""
    tracker = Tracker(root)
    run = tracker.find(spec.key)
    rows = sorted(
        (m.key, m.step, m.value) for name in run.metrics for m in tracker.client.get_metric_history(run.run_id, name)
    )
    timings = ("seconds", "train_seconds", "peak_memory_mb", "time/seconds")
    weights = torch.load(checkpoint.saved(spec.folder(root))[0], weights_only=True)["state_dict"]
    return weights, [row for row in rows if row[0] not in timings], run.status


def assert_same(found, expected):
    assert found[1:] == expected[1:]
    assert found[0].keys() == expected[0].keys() and all(torch.equal(v, expected[0][k]) for k, v in found[0].items())


def undisturbed(spec, root):
    """The seconds that a run takes, and its outcome."""
    started = time.monotonic()
    assert forked(lambda: train(spec, root))() == 0
    return {"seconds": time.monotonic() - started, "outcome": outcome(spec, root)}


def last_line(path):
    return path.read_text().strip().splitlines()[-1]


def mount(*arguments):
    """In a fork: mount something that no other process sees. Raises OSError where that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    for command in (["mount", "--make-rprivate", "/"], ["mount", *map(str, arguments)]):
        if subprocess.run(command, capture_output=True).returncode:
            raise OSError(errno.EPERM, " ".join(command))


def small_disk(place, database, spare):
    """In a fork: a file system of its own at ``place``, with the database and ``spare`` KiB. Raises OSError where that
    is not permitted."""
    mount("-t", "tmpfs", "-o", "size=8m", "none", place)
    shutil.copy(database, place / "mlflow.db")
    with open(place / "filler", "wb") as filler:
        filler.write(bytes(shutil.disk_usage(place).free - 1024 * spare))


NOT_PERMITTED = 77
"""Exit code of a fork that may not do what its test needs."""


def permitted(work, *arguments, **settings):
    """``forked(work)``, and its exit code. Skips the test where ``work`` raises OSError before it begins."""
    code = forked(work, *arguments, **settings)()
    if code == NOT_PERMITTED:
        pytest.skip("mounting a file system is not permitted here")
    return code


def statuses(root):
    """Run id -> status of all runs of a root, or of a database, but those of the leases, read without MLflow."""
    query = "select run_uuid, status from runs join experiments using (experiment_id) where experiments.name not like ?"
    with contextlib.closing(sqlite3.connect(root if root.is_file() else root / "mlflow.db")) as database:
        return dict(database.execute(query, [f"{register.NAME}%"]))


def integrity(root):
    """What SQLite thinks of the database, and how often each metric row is there more than once.

    A parent run has means over the runs so far, so that their values change with the number of runs.
    """
    parents = "select run_uuid from tags where key = 'lit.kind' and value = 'experiment'"
    value = f"case when run_uuid in ({parents}) then value end"
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as database:
        twice = database.execute(
            f"select key, step, count(*) from metrics group by run_uuid, key, step, {value} having count(*) > 1"
        ).fetchall()
        return database.execute("pragma integrity_check").fetchone()[0], twice


def start(file, root, tmp_path, *flags):
    """``run.py`` in a session of its own."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "LIT_MEMORY_ROOT")}
    argv = [sys.executable, "-u", str(RUN), str(file), "--root", str(root), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(argv, cwd=tmp_path, env=environment, **pipes)


def wait_for(condition, process=None, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and (process is None or process.poll() is None) and time.monotonic() < deadline:
        time.sleep(0.02)


def alive(session):
    """Live processes of a session (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number = stat.read_text().rpartition(")")[2].split()[:4]
            if int(number) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def is_stopped(pid):
    """Whether SIGSTOP has stopped a process (Linux)."""
    return "(stopped)" in Path(f"/proc/{pid}/status").read_text()


def training(text):
    """The arms that have told of a step."""
    return {line.split()[0] for line in text.splitlines() if "stage 1/1" in line}


def two_experiments(tree, tmp_path):
    """Files of two experiments that share an arm."""
    paths = []
    for name, arms in (
        ("one", {"a": {}, "b": {"model.gamma": "off"}}),
        ("two", {"a": {}, "c": {"model.memory_dim": 8}}),
    ):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(tree | {"experiment": name, "arms": arms, "expect": []}))
    return paths


def check_both(root):
    assert integrity(root) == ("ok", [])
    assert sorted(statuses(root).values()) == ["FINISHED"] * 5  # a, b, c and two parents: every key once
    tables = {name: (root / f"reports/{name}/table.csv").read_text() for name in ("one", "two")}
    assert [line for line in tables["one"].splitlines() if line.startswith("a,")] == [
        line for line in tables["two"].splitlines() if line.startswith("a,")
    ]
