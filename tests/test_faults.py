"""Runs that cannot be lost: what happens when a process dies, a disk fills up, a file rots or two commands meet.

Faults hit real processes: a fork of the test runs the engine or the command with the fault built in, and ends by it. Tests that
take longer than a minute are marked slow; the normal suite holds a short version of each.
"""

import contextlib
import importlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lit_memory import checkpoint, files, launch
from lit_memory.cli import main, parser
from lit_memory.config import ConfigError
from lit_memory.engine import run_one
from lit_memory.experiment import load, parse, parse_override
from lit_memory.job import Job
from lit_memory.tracking import Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy

PROJECT = Path(__file__).resolve().parent.parent
RUN = PROJECT / "run.py"

# Two stages; validations and checkpoints at steps 3, 4 (end of stage 1), 7 and 9 (end of stage 2).
STAGED = ("train.stages=[{task.pairs: 1, steps: 4}, {task.pairs: 3, steps: 5}]", "train.valid_every=3", "model.dropout=0.2", "train.lr=1e-2")


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


def forked(work, *faults, log=None):
    """Run ``work()`` in a fork of this process, with faults (place, count, action). Returns a function that waits for the fork and
    returns its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if not pid:
        code = 1
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

    def wait(kill_after=None):
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    wait.pid = pid
    return wait


def train(spec, root, tags=None):
    tracker = Tracker(root)
    run_one(spec, root, tracker.uri, tracker.parent(spec.experiment, spec.scale, {}), tags or {}, lambda message: None)


def outcome(spec, root):
    """Weights, all metric rows (metric, step, value), and the status of the one run of a key."""
    tracker = Tracker(root)
    run = tracker.find(spec.key)
    rows = sorted((m.key, m.step, m.value) for name in run.metrics for m in tracker.client.get_metric_history(run.run_id, name))
    timings = ("seconds", "train_seconds", "peak_memory_mb")
    weights = torch.load(checkpoint.saved(spec.folder(root))[0], weights_only=True)["state_dict"]
    return weights, [row for row in rows if row[0] not in timings], run.status


def assert_same(found, expected):
    assert found[1:] == expected[1:]
    assert found[0].keys() == expected[0].keys() and all(torch.equal(v, expected[0][k]) for k, v in found[0].items())


WHOLE = {}


@pytest.fixture
def whole(make_spec, make_root):
    """A run that nothing disturbed: its spec, its outcome and the seconds that it took (once for all tests)."""
    spec = make_spec(*STAGED)
    if not WHOLE:
        root, started = make_root("whole"), time.monotonic()
        assert forked(lambda: train(spec, root))() == 0
        WHOLE.update(seconds=time.monotonic() - started, outcome=outcome(spec, root))
    return spec, WHOLE


@pytest.fixture
def file(tree, tmp_path):
    """The tiny experiment as a file: two arms, one seed."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


# Killed


PLACES = {
    "first step": ("lit_memory.engine:FiniteGuard.on_before_backward", 1),
    "middle of a stage": ("lit_memory.engine:StepSeed.on_train_batch_start", 6),
    "update of the weights": ("lit_memory.engine:FiniteGuard.on_before_optimizer_step", 8),
    "stage change": ("lit_memory.engine:Curriculum.enter", 2),
    "validation": ("lit_memory.lit.modules:LitMemory.validation_step", 2),
    "validation is logged": ("lit_memory.tracking:Tracker.log", 3),
    "checkpoint begins": ("lit_memory.engine:save", 1),
    "checkpoint half written": ("lit_memory.checkpoint:Hashing.write", 40),
    "checkpoint without its checksum": ("lit_memory.files:write", 2),
    "checkpoint before it is renamed": ("os:replace", 4),
    "old checkpoint is removed": ("lit_memory.checkpoint:remove", 1),
    "the last checkpoint": ("lit_memory.engine:save", 4),
    "the last checkpoint of two": ("lit_memory.engine:save", 2),
    "training is over": ("lit_memory.tracking:Tracker.tag", 1),
    "test": ("lit_memory.lit.modules:LitMemory.test_step", 2),
    "test metrics are written": ("lit_memory.tracking:Tracker.finish", 1),
    "before FINISHED": ("lit_memory.tracking:Tracker.end", 1),
}


@pytest.mark.parametrize("place", PLACES)
def test_kill_9_in_every_phase(whole, root, place):
    spec, expected = whole
    assert forked(lambda: train(spec, root), (*PLACES[place], die))() == -signal.SIGKILL
    assert forked(lambda: train(spec, root))() == 0
    assert_same(outcome(spec, root), expected["outcome"])
    assert not list(spec.folder(root).glob(".*"))


def kill_at_random(whole, root, tries, seed):
    """Kill again and again, at random times within the time that a whole run took; then let it end."""
    spec, expected = whole
    draw, killed = random.Random(seed), 0
    for _ in range(tries):
        code = forked(lambda: train(spec, root))(kill_after=draw.uniform(0, 0.7 * expected["seconds"]))
        killed += code == -signal.SIGKILL
    assert forked(lambda: train(spec, root))() == 0
    assert_same(outcome(spec, root), expected["outcome"])
    return killed


def test_kill_9_at_random_times(whole, root):
    assert kill_at_random(whole, root, tries=4, seed=0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kill_9_at_twenty_random_times(whole, root, seed):
    assert kill_at_random(whole, root, tries=4, seed=seed + 1) > 0


@pytest.mark.parametrize("place", [("lit_memory.report:_table", 1), ("lit_memory.files:write", 1), ("lit_memory.files:write", 4), ("os:replace", 9)])
def test_kill_9_while_the_report_is_drawn(file, root, place, tmp_path):
    call = lambda: main([str(file), "--root", str(root), "--report"])  # noqa: E731
    assert forked(call, log=tmp_path / "log")() == 0
    folder = root / "reports/tiny"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert forked(call, (*place, die))() == -signal.SIGKILL
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert forked(call, log=tmp_path / "log")() == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")} == before


def test_a_dead_run_is_closed_by_the_next_command(file, root, tmp_path):
    """kill -9 leaves RUNNING behind; whatever command comes next here sets it right, but not while a process holds the lock."""
    job = Job.prepare(parser().parse_args([str(file), "--root", str(root)]))
    spec, log = job.specs[0], tmp_path / "log"
    report = lambda: main([str(file), "--root", str(root), "--report"])  # noqa: E731
    assert forked(lambda: train(spec, root, {"where": job.where}), (*PLACES["the last checkpoint of two"], die))() == -signal.SIGKILL
    with checkpoint.lock(spec.folder(root)):
        assert forked(report, log=log)() == 0
        assert sorted(statuses(root).values()) == ["FINISHED", "RUNNING"] and "missing: a seed 0 (running)" in log.read_text()
    assert forked(report, log=log)() == 0
    assert sorted(statuses(root).values()) == ["FINISHED", "KILLED"] and "INCOMPLETE; missing: a seed 0 (to resume)" in log.read_text()


# Checkpoints


def corrupt(path, kind, draw):
    content = bytearray(path.read_bytes())
    if kind == "bit":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "truncated":
        del content[draw.randrange(len(content)) :]
    elif kind == "empty":
        content.clear()
    elif kind == "zeros":
        start = draw.randrange(len(content) - 1)
        length = draw.randrange(1, len(content) - start)
        content[start : start + length] = bytes(length) if any(content[start : start + length]) else b"\1" * length
    path.write_bytes(content)


def test_a_hundred_corruptions_are_all_seen(tmp_path):
    draw = random.Random(0)
    for i in range(100):
        folder = tmp_path / str(i)
        for step in (3, 7):
            checkpoint.save(checkpoint.place(folder, step), lambda file: torch.save({"w": torch.randn(30)}, file))
        newest, older = checkpoint.saved(folder)
        target = newest if i % 5 else checkpoint.digest_file(newest)
        corrupt(target, ("bit", "truncated", "empty", "zeros")[i % 4], draw)
        warnings = []
        assert checkpoint.newest(folder, warnings.append) == older and warnings == [
            f"{newest}: damaged (its checksum does not match); going on from an older one"
        ]
        corrupt(older, "bit", draw)
        with pytest.raises(checkpoint.CheckpointError, match=f"{newest}: damaged .* no older one is intact; delete it, or use --fresh"):
            checkpoint.newest(folder, warnings.append)


def test_the_two_newest_checkpoints_stay(tmp_path):
    for step in (3, 5, 12, 100):
        checkpoint.save(checkpoint.place(tmp_path, step), lambda file: file.write(b"x"))
    assert [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000100.ckpt", "step-00000012.ckpt"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".ckpt", ".ckpt", ".sha256", ".sha256"]
    checkpoint.clear(tmp_path)
    assert not list(tmp_path.iterdir()) and checkpoint.newest(tmp_path, print) is None


def test_a_damaged_checkpoint_costs_a_warning_and_no_more(whole, root):
    spec, expected = whole
    assert forked(lambda: train(spec, root), (*PLACES["test"], die))() == -signal.SIGKILL
    newest = checkpoint.saved(spec.folder(root))[0]
    corrupt(newest, "bit", random.Random(0))
    messages = []
    tracker = Tracker(root)
    run_one(spec, root, tracker.uri, "", {}, messages.append)
    assert [m["message"] for m in messages if m["event"] == "warning"] == [f"{newest}: damaged (its checksum does not match); going on from an older one"]
    assert_same(outcome(spec, root), expected["outcome"])


def test_damaged_checkpoints_without_an_intact_one_fail_the_run(whole, root):
    spec, _ = whole
    assert forked(lambda: train(spec, root), (*PLACES["validation"], die))() == -signal.SIGKILL
    (only,) = checkpoint.saved(spec.folder(root))
    corrupt(only, "truncated", random.Random(0))
    with pytest.raises(checkpoint.CheckpointError, match=f"{only}: damaged"):
        train(spec, root)
    assert Tracker(root).find(spec.key).status == "FAILED"


def test_a_hostile_checkpoint_is_refused(whole, root, hostile_checkpoint):
    """Its checksum is right, and it would run code."""
    spec, _ = whole
    path = checkpoint.place(spec.folder(root), 3)
    proof = hostile_checkpoint(path)
    checkpoint.digest_file(path).write_text(files.digest(path))
    with pytest.raises(checkpoint.CheckpointError, match=f"{path}: not a checkpoint of plain tensors and numbers"):
        train(spec, root)
    assert not proof.exists() and path.is_file()


# Disk full


def iter_messages(reader):
    with contextlib.suppress(EOFError):
        while True:
            yield reader.recv()


def last_line(path):
    return path.read_text().strip().splitlines()[-1]


FULL = {
    "checkpoint": ("lit_memory.engine:save", 2, 20_000),
    "checksum": ("lit_memory.files:write", 2, 10),
    "metrics": ("lit_memory.tracking:Tracker.log", 3, 10_000),
    "test metrics": ("lit_memory.tracking:Tracker.finish", 1, 10_000),
}


@pytest.mark.parametrize("place", FULL)
def test_a_full_disk_loses_nothing(whole, root, tmp_path, place):
    """As the child process of a command meets it."""
    spec, expected = whole
    where, count, size = FULL[place]

    reader, writer = multiprocessing.Pipe(duplex=False)

    def child():
        tracker = Tracker(root)
        launch.run_child(spec, root, tracker.uri, tracker.parent("tiny", "default", {}), {}, writer)

    assert forked(child, (where, count, no_room(size)))() == 1
    writer.close()
    message = next(m for m in iter_messages(reader) if m["event"] == "failed")["message"]
    assert message.startswith(str(spec.folder(root) if "check" in place else root))
    assert "no room to write it, " in message and message.endswith(" bytes are free; make room and run the same command again")
    assert all(not checkpoint.damaged(path) for path in checkpoint.saved(spec.folder(root)))
    assert checkpoint.saved(spec.folder(root)) and not list(spec.folder(root).glob(".*"))
    assert forked(lambda: train(spec, root))() == 0
    assert_same(outcome(spec, root), expected["outcome"])


def test_a_full_disk_leaves_the_old_report(file, root, tmp_path):
    log, folder = tmp_path / "log", root / "reports/tiny"
    call = lambda: main([str(file), "--root", str(root), "--report"])  # noqa: E731
    assert forked(call, log=log)() == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert forked(call, ("lit_memory.files:write_all", 1, no_room(5000)), log=log)() == 1
    assert last_line(log).startswith(f"error: {folder}/") and "no room to write it" in last_line(log) and "Traceback" not in log.read_text()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


TMPFS = """
mount -t tmpfs -o size={size} none {root} || exit 77
cp {database} {root}/mlflow.db
dd if=/dev/zero of={root}/filler bs=1024 count={filler} 2>/dev/null
{command} > {log}.1 2>&1; echo "code $?" >> {log}.1
rm {root}/filler
{command} > {log}.2 2>&1; echo "code $?" >> {log}.2
cp {root}/reports/tiny/table.csv {log}.csv
"""


@pytest.mark.slow
@pytest.mark.parametrize("spare", [30, 150, 400])
def test_a_small_disk(file, root, make_root, _database, tmp_path, spare):
    """A file system with ``spare`` KiB left fills up where it will; with room again, the same command ends as if nothing had been."""
    place, log = tmp_path / "small", tmp_path / "log"
    place.mkdir()
    command = f"{sys.executable} {RUN} {file} --root {place}"
    filler = 4096 - spare - os.path.getsize(_database) // 1024
    script = TMPFS.format(size="4096k", root=place, database=_database, filler=filler, command=command, log=log)
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("mounting a file system is not permitted here")
    first, second = Path(f"{log}.1").read_text(), Path(f"{log}.2").read_text()
    assert first.endswith("code 1\n") and "no room to write it" in first and "Traceback" not in first
    assert second.endswith("code 0\n")
    subprocess.run([sys.executable, str(RUN), str(file), "--root", str(root)], check=True, capture_output=True)
    assert Path(f"{log}.csv").read_bytes() == (root / "reports/tiny/table.csv").read_bytes()


# Several commands at once


def statuses(root):
    """Run id -> status of all runs of a root, read without MLflow."""
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as database:
        return dict(database.execute("select run_uuid, status from runs"))


def integrity(root):
    """What SQLite thinks of the database, and how often each metric row is there more than once."""
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as database:
        twice = database.execute("select key, step, count(*) from metrics group by run_uuid, key, step having count(*) > 1").fetchall()
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


def test_three_processes_and_one_key(whole, root):
    """On a new database, which they create together: one trains, the others wait and find it FINISHED."""
    spec, expected = whole
    (root / "mlflow.db").unlink()
    waits = [forked(lambda: train(spec, root)) for _ in range(3)]
    assert [wait() for wait in waits] == [0, 0, 0]
    assert_same(outcome(spec, root), expected["outcome"])
    assert integrity(root) == ("ok", []) and sorted(statuses(root).values()) == ["FINISHED", "SCHEDULED"]


@pytest.mark.slow
def test_eight_commands_at_once(tree, root, tmp_path):
    """Seven of one experiment and one of another that shares an arm with it, on a new database."""
    (root / "mlflow.db").unlink()
    for name, arms in (("one", {"a": {}, "b": {"model.gamma": "off"}}), ("two", {"a": {}, "c": {"model.memory_dim": 8}})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree | {"experiment": name, "arms": arms, "expect": []}))
    processes = [start(tmp_path / f"{'two' if i == 7 else 'one'}.yaml", root, tmp_path, "--jobs", "2") for i in range(8)]
    outputs = [process.communicate(timeout=900) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, outputs
    assert integrity(root) == ("ok", [])
    assert sorted(statuses(root).values()) == ["FINISHED"] * 5  # a, b, c and two parents: every key once
    tables = {name: (root / f"reports/{name}/table.csv").read_text() for name in ("one", "two")}
    assert [line for line in tables["one"].splitlines() if line.startswith("a,")] == [line for line in tables["two"].splitlines() if line.startswith("a,")]


# Repeatability


@pytest.mark.slow
def test_the_table_depends_on_the_experiment_alone(file, make_root, tmp_path):
    """One or two jobs, zero or two loader workers, a cold start or one after a kill: the same bytes."""
    tables = set()
    for i, (flags, kill) in enumerate(
        [(("--jobs", "1"), False), (("--jobs", "2"), True), (("train.workers=2",), False), (("train.workers=2", "--jobs", "1"), True)]
    ):
        root = make_root(f"r{i}")
        if kill:
            process = start(file, root, tmp_path, *flags)
            wait_for(lambda root=root: list(root.rglob("*.ckpt")), process)
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        process = start(file, root, tmp_path, *flags)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, (out, err)
        (table,) = root.rglob("table.csv")
        tables.add(table.read_bytes())
    assert len(tables) == 1


# Signals


def alive(session):
    """Live processes of a session (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number = stat.read_text().rpartition(")")[2].split()[:4]
            if int(number) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


LONG = ["train.steps=100000", "train.valid_every=100000"]
"""No validation comes within the test: what is saved is saved because of the signal."""


@pytest.mark.parametrize(
    ("signals", "codes", "status"),
    [
        ([signal.SIGINT], [130], "KILLED"),
        ([signal.SIGTERM], [143], "KILLED"),
        ([signal.SIGINT, signal.SIGINT], [-signal.SIGINT, 130], "KILLED"),  # 130: the children were faster than the second signal
        ([signal.SIGKILL], [-signal.SIGKILL], "KILLED"),
    ],
    ids=["ctrl-c", "sigterm", "ctrl-c-twice", "kill-9-of-the-command"],
)
def test_a_signal_ends_everything_and_leaves_a_checkpoint(file, root, tmp_path, signals, codes, status):
    """The signal goes to the command only, as from a batch system; its children follow, each after its step and a checkpoint."""
    process = start(file, root, tmp_path, "--jobs", "2", *LONG)
    training = set()
    while training != {"a", "b"}:
        line = process.stdout.readline()
        training |= {line.split()[0]} if "stage 1/1" in line else set()
    sent = time.monotonic()
    for i, number in enumerate(signals):
        time.sleep(0.1 * i)
        process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode in codes and time.monotonic() - sent < 10, (process.returncode, out, err)
    wait_for(lambda: not alive(process.pid), seconds=10)
    assert alive(process.pid) == [] and "Traceback" not in err
    assert len(list(root.rglob("*.ckpt"))) == 2 and not any(map(checkpoint.damaged, root.rglob("*.ckpt")))
    assert sorted(statuses(root).values()) == sorted([status, status, "SCHEDULED" if process.returncode < 0 else "KILLED"])


def test_a_deleted_run_makes_the_verdict_incomplete(file, root, tmp_path):
    log, specs = tmp_path / "log", Job.prepare(parser().parse_args([str(file), "--root", str(root)])).specs
    report = lambda: main([str(file), "--root", str(root), "--report"])  # noqa: E731
    assert [forked(lambda spec=spec: train(spec, root))() for spec in specs] == [0, 0]
    assert forked(report, log=log)() == 0 and "\nREPRODUCED" in log.read_text()
    expected = outcome(specs[1], root)
    tracker = Tracker(root)
    tracker.client.delete_run(tracker.find(specs[1].key).run_id)
    assert forked(report, log=log)() == 0 and "INCOMPLETE; missing: b seed 0 (to resume)" in log.read_text()
    assert forked(lambda: train(specs[1], root))() == 0
    assert_same(outcome(specs[1], root), expected)  # what was logged comes back from the checkpoint
    assert forked(report, log=log)() == 0 and "\nREPRODUCED" in log.read_text()


# Security

TAGS = ["!!python/object/apply:os.mkdir [PROOF]", "!!python/object/new:os.mkdir [PROOF]", "!!python/object/apply:os.mkdir {args: [PROOF]}"]


@pytest.mark.parametrize("tag", TAGS)
def test_yaml_executes_nothing(tree, tmp_path, tag):
    proof = tmp_path / "executed"
    text = tag.replace("PROOF", str(proof))
    yaml.unsafe_load(text)
    assert proof.exists(), "the attack does not work at all"
    proof.rmdir()
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree).replace("a recalls what b forgets", text))
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(path)
    with pytest.raises(ConfigError, match="is not YAML"):
        parse_override(f"model.width={text}")
    assert not proof.exists()


def test_yaml_reads_no_environment(tree, monkeypatch):
    """The same file means the same on every machine, and a report quotes no secret."""
    monkeypatch.setenv("SECRET", "hidden")
    tree["report"]["notes"] = "${oc.env:SECRET}"
    with pytest.raises(ConfigError) as caught:
        parse(tree, "tiny.yaml")
    assert str(caught.value).startswith("tiny.yaml: report.notes: '${oc.env:SECRET}'") and "hidden" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_override("model.name=${oc.env:SECRET}")
    assert "hidden" not in str(caught.value)


def test_plans_and_reports_open_no_checkpoint(tree, root, tmp_path, make_spec, hostile_checkpoint, capsys):
    path = make_spec().folder(root) / "step-00000003.ckpt"
    proof = hostile_checkpoint(path)
    torch.load(path, weights_only=False)
    assert proof.exists(), "the attack does not work at all"
    proof.rmdir()
    before = path.read_bytes()
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree))
    for flag in ("--dry-run", "--report"):
        assert main([str(file), "--root", str(root), flag]) == 0
        assert "1 to resume" in capsys.readouterr().out
        assert not proof.exists() and path.read_bytes() == before


# Footprint

ISOLATED = """
set -e
mount --bind "$1" "$1"
mount -o remount,ro,bind /
mount --bind "$1/source" "$1/source"
mount -o remount,ro,bind "$1/source"
cd "$1/cwd"
shift
exec "$@"
"""
POISON = """
import socket

def refuse(self, address):
    if self.family != socket.AF_UNIX:
        raise OSError(101, "Network is unreachable")
    return connect(self, address)

connect, socket.socket.connect = socket.socket.connect, refuse
"""
PROBE = """
import pathlib, socket, sys
for place in sys.argv[1:]:
    try:
        pathlib.Path(place, ".lit-memory-probe").touch()
        print("wrote", place)
    except OSError:
        pass
try:
    socket.create_connection(("192.0.2.1", 80), timeout=2)
except OSError as error:
    print(error.errno)
"""


def namespaces():
    """The command that gives a process its own network, which is empty, and its own mounts; [] where the system forbids it."""
    for flags in (["-n", "-m"], ["-r", "-n", "-m"]):
        command = ["unshare", *flags, "sh", "-c"]
        try:
            if subprocess.run([*command, "mount --bind /tmp /tmp && mount -o remount,ro,bind /"], capture_output=True).returncode == 0:
                return command
        except OSError:
            break
    return []


@pytest.fixture(scope="module")
def confined(tmp_path_factory, _database):
    """``call(*argv)`` runs Python without a network, on a source tree that cannot be written to, in an empty working folder, without HOME.

    Where the system has namespaces, nothing but ``base`` can be written to. Elsewhere a poisoned socket stands for the missing
    network and permissions for the mounts, which stop everyone but root.
    """
    base = tmp_path_factory.mktemp("f")
    for name in ("cwd", "root", "tmp", "source", "poison"):
        (base / name).mkdir()
    shutil.copytree(PROJECT / "lit_memory", base / "source/lit_memory", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "run.py", base / "source")
    shutil.copy(_database, base / "root")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(base / "source"), "LIT_MEMORY_ROOT": str(base / "root"), "TMPDIR": str(base / "tmp")}
    environment |= {name: os.environ[name] for name in ("OMP_NUM_THREADS", "LD_LIBRARY_PATH") if name in os.environ}
    prefix = namespaces()
    if prefix:
        prefix = [*prefix, ISOLATED, "sh", str(base)]
    elif os.geteuid() == 0:
        pytest.skip("root may write everywhere, and this system forbids it namespaces of its own")
    else:
        (base / "poison/sitecustomize.py").write_text(POISON)
        environment["PYTHONPATH"] += f":{base / 'poison'}"
        for path in (base / "source", *(base / "source").rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)

    def call(*argv):
        return subprocess.run([*prefix, sys.executable, *argv], cwd=base / "cwd", env=environment, capture_output=True, text=True)

    yield SimpleNamespace(base=base, call=call, namespaces=bool(prefix))
    for path in (base / "source", *(base / "source").rglob("*")):
        path.chmod(0o755)


def listing(folder):
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_the_confinement_confines(confined):
    """Or the next test would pass for nothing."""
    places = [str(confined.base / "source"), str(confined.base / "source/lit_memory"), *([str(Path.home()), "/"] if confined.namespaces else [])]
    run = confined.call("-c", PROBE, *places)
    assert (run.stdout, run.stderr) == ("101\n", "")


def test_a_whole_run_writes_below_its_root_only(confined, tree, tmp_path):
    base = confined.base
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    source, before = listing(base / "source"), listing(base / "root")
    run = confined.call(str(base / "source/run.py"), str(file), "--dry-run")
    assert (run.returncode, run.stderr) == (0, "") and "2 runs: 2 new" in run.stdout
    assert os.listdir(base / "tmp") == [] and set(listing(base / "root")) - {"mlflow.db.lock"} == set(before)
    run = confined.call(str(base / "source/run.py"), str(file))
    assert (run.returncode, run.stderr) == (0, ""), run
    assert "REPRODUCED" in run.stdout.splitlines()
    assert sorted(path.name for path in (base / "root").iterdir()) == ["checkpoints", "mlflow.db", "mlflow.db.lock", "mlruns", "reports"]
    assert {path.name for path in (base / "root/reports/tiny").iterdir()} >= {"README.md", "figure.png", "table.csv", "verdict.json"}
    assert {name: sorted(os.listdir(base / name)) for name in ("cwd", "tmp")} == {"cwd": [], "tmp": []}
    assert listing(base / "source") == source


TELEMETRY = "from lit_memory import tracking; from mlflow.telemetry.utils import is_telemetry_disabled; print(is_telemetry_disabled())"


@pytest.mark.parametrize(("given", "disabled"), [({}, "True"), ({"MLFLOW_DISABLE_TELEMETRY": "false"}, "False")])
def test_telemetry_is_off_as_mlflow_sees_it(given, disabled):
    """MLflow also keeps silent under pytest and in CI; what it does elsewhere counts."""
    from mlflow.telemetry import utils

    silent = ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "PYTEST_CURRENT_TEST", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in silent} | given
    code = TELEMETRY.replace("print", "import mlflow.telemetry.utils as u; u._is_ci_env_or_testing = lambda: False; print")
    assert hasattr(utils, "_is_ci_env_or_testing"), "MLflow has changed; look again at how it decides"
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == disabled
    assert "MLFLOW_DISABLE_TELEMETRY" in (PROJECT / "README.md").read_text()


# Soak


@pytest.mark.slow
def test_two_hundred_runs(tree, root, tmp_path):
    """One sweep: the parent does not grow, nothing is left open or behind, and a run costs little beside its training."""
    (tmp_path / "soak.yaml").write_text(yaml.safe_dump(tree | {"seeds": list(range(100))}))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch)}
    argv = [sys.executable, "-u", str(RUN), str(tmp_path / "soak.yaml"), "--root", str(root), "--jobs", "2"]
    process = subprocess.Popen(argv, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    sizes, opened, times = [], [], []
    for line in process.stdout:
        if "✓" in line:
            status = Path(f"/proc/{process.pid}/status").read_text()
            sizes.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)
            opened.append(len(list(Path(f"/proc/{process.pid}/fd").iterdir())))
            times.append(time.monotonic())
    assert process.wait() == 0 and len(sizes) == 200
    overhead = (times[-1] - times[10]) / (len(times) - 11) * 2  # two at a time; the training itself is milliseconds
    print(f"growth {sizes[-1] - sizes[10]:.1f} MB, {overhead:.2f} s a run, files {opened[10]} to {opened[-1]}")
    assert sizes[-1] - sizes[10] <= 20 and opened[-1] <= opened[10] + 2 and overhead <= 2
    assert not list(scratch.iterdir())
