"""Runs that cannot be lost: what happens when a process dies, a disk fills up, a file rots or two commands meet.

Faults hit real processes: a fork of the test runs the engine or the command with the fault built in, and ends by it.
Tests that take longer than a minute are marked slow; the normal suite holds a short version of each.
"""

import contextlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean, median

import pytest
import records
import torch
import yaml
from faults import (
    LONG,
    NOLOAD,
    NOT_PERMITTED,
    PLACES,
    PROJECT,
    RUN,
    STAGED,
    TELLING,
    alive,
    assert_same,
    check_both,
    die,
    fork_command,
    forked,
    integrity,
    last_line,
    no_room,
    outcome,
    permitted,
    slow,
    small_disk,
    start,
    statuses,
    train,
    training,
    two_experiments,
    undisturbed,
    wait_for,
)

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import load, parse
from lit_memory.plan.merging import parse_override
from lit_memory.registry import MODELS, load_class
from lit_memory.run import checkpoint
from lit_memory.run.engine import parameters, run_one
from lit_memory.run.frame import results_frame
from lit_memory.run.launchers import local as launch
from lit_memory.run.options import parse_options
from lit_memory.run.sweep import Sweep
from lit_memory.run.tracking import Tracker
from lit_memory.run.worklist import WorkList
from lit_memory.util import files
from lit_memory.util.provenance import cores

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.filterwarnings(NOLOAD)]


# Killed


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[] if place in TELLING else pytest.mark.slow) for place in PLACES]
)
def test_kill_9_in_every_phase(whole, root, place):
    spec, expected = whole
    assert forked(lambda: train(spec, root), (*PLACES[place], die))() == -signal.SIGKILL
    assert forked(lambda: train(spec, root))() == 0
    assert_same(outcome(spec, root), expected["outcome"])
    assert not list(spec.folder(root).glob(".*"))


def kill_at_random(spec, expected, make_root, kills, seed):
    """So many kills at random times within the time that a whole run takes; a run that came to its end is compared, and
    a new one begins. Returns how many runs that took."""
    draw, killed, runs = random.Random(seed), 0, 0
    while killed < kills:
        root, code = make_root(f"killed{runs}"), None
        while code != 0:
            code = forked(lambda root=root: train(spec, root))(
                kill_after=draw.uniform(0, expected["seconds"]) if killed < kills else None
            )
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
        assert_same(outcome(spec, root), expected["outcome"])
        runs += 1
    return runs


@pytest.mark.slow
def test_kill_9_at_random_times(whole, make_root):
    kill_at_random(*whole, make_root, kills=4, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_kill_9_at_twenty_random_times(make_spec, make_root, name):
    """Every registered model."""
    known = {field.name for field in fields(load_class("model", name).Config)}
    size = {
        "layers": 1,
        "width": 16,
        "heads": 2,
        "memory_tokens": 1,
        "memory_dim": 4,
        "head_width": 8,
        "ff_width": 32,
        "dropout": 0.2,
    }
    overrides = [o for o in STAGED if not o.startswith("model.")]
    model = {"name": name} | {k: v for k, v in size.items() if k in known}
    spec = make_spec(f"model={yaml.safe_dump(model, default_flow_style=True)}", *overrides)
    expected = undisturbed(spec, make_root("whole"))
    runs = kill_at_random(spec, expected, make_root, kills=20, seed=list(MODELS).index(name))
    print(f"{name}: 20 kills in {runs} runs of {expected['seconds']:.1f} s")


@pytest.mark.parametrize(
    "place",
    [
        ("lit_memory.util.files:write", 4),
        *slow(("lit_memory.report.render:main_table", 1), ("lit_memory.util.files:write", 1), ("os:replace", 9)),
    ],
)
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
    """kill -9 leaves RUNNING behind; whatever command comes next here sets it right, but not while a process holds the
    lock."""
    sweep = Sweep.prepare(parse_options([str(file), "--root", str(root)]))
    spec, log = sweep.specs[0], tmp_path / "log"
    report = lambda: main([str(file), "--root", str(root), "--report"])  # noqa: E731
    assert (
        forked(lambda: train(spec, root, {"where": sweep.location}), (*PLACES["the last checkpoint of two"], die))()
        == -signal.SIGKILL
    )
    with checkpoint.lock(spec.folder(root)):
        assert forked(report, log=log)() == 0
        assert (
            sorted(statuses(root).values()) == ["FINISHED", "RUNNING"]
            and "missing: a seed 0 (running)" in log.read_text()
        )
    assert forked(report, log=log)() == 0
    assert (
        sorted(statuses(root).values()) == ["FINISHED", "KILLED"]
        and "INCOMPLETE; missing: a seed 0 (to resume)" in log.read_text()
    )


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
            checkpoint.save(checkpoint.path_of(folder, step), lambda file: torch.save({"w": torch.randn(30)}, file))
        newest, older = checkpoint.saved(folder)
        target = newest if i % 5 else checkpoint.digest_file(newest)
        corrupt(target, ("bit", "truncated", "empty", "zeros")[i % 4], draw)
        warnings = []
        assert checkpoint.newest(folder, warnings.append) == older and warnings == [
            f"{newest}: damaged (its checksum does not match); going on from an older one"
        ]
        corrupt(older, "bit", draw)
        with pytest.raises(
            checkpoint.CheckpointError, match=f"{newest}: damaged .* no older one is intact; delete it, or use --fresh"
        ):
            checkpoint.newest(folder, warnings.append)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A crash of the machine, which no test can cause, must not leave a name without its content."""
    synced = set()
    fsync, replace = os.fsync, os.replace

    def note(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def check(source, target):
        assert os.stat(source).st_ino in synced, f"{target} is renamed before it is synced"
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    checkpoint.save(checkpoint.path_of(tmp_path, 3), lambda file: file.write(b"x"))
    files.write_all(tmp_path, {"table.csv": b"1", "figure.png": b"2"})
    assert len(synced) == 4 and len(list(tmp_path.iterdir())) == 4


def test_the_two_newest_checkpoints_stay(tmp_path):
    for step in (3, 5, 12, 100):
        checkpoint.save(checkpoint.path_of(tmp_path, step), lambda file: file.write(b"x"))
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
    assert [m["message"] for m in messages if m["event"] == "warning"] == [
        f"{newest}: damaged (its checksum does not match); going on from an older one"
    ]
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
    path = checkpoint.path_of(spec.folder(root), 3)
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


FULL = {
    "checkpoint": ("lit_memory.run.saving:save", 2, 20_000),
    "checksum": ("lit_memory.util.files:write", 2, 10),
    "metrics": ("lit_memory.run.journal:Journal.log", 3, 10_000),
    "test metrics": ("lit_memory.run.journal:Journal.finish", 1, 10_000),
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
    assert "no room to write it, " in message and message.endswith(
        " bytes are free; make room and run the same command again"
    )
    assert all(not checkpoint.damaged(path) for path in checkpoint.saved(spec.folder(root)))
    assert checkpoint.saved(spec.folder(root)) and not list(spec.folder(root).glob(".*"))
    assert forked(lambda: train(spec, root))() == 0
    assert_same(outcome(spec, root), expected["outcome"])


def test_two_machines_write_one_file_at_once(tmp_path):
    """Of a folder that they share, by processes of the same number: one of them is kept, whole."""
    path = tmp_path / "tokens.bin"
    with files.replacing(path) as one, files.replacing(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() in (b"one", b"other") and [*tmp_path.iterdir()] == [path]


def test_a_full_disk_leaves_the_old_report(file, root, tmp_path):
    log, folder = tmp_path / "log", root / "reports/tiny"
    call = lambda: main([str(file), "--root", str(root), "--report"])  # noqa: E731
    assert forked(call, log=log)() == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert forked(call, ("lit_memory.util.files:write_all", 1, no_room(5000)), log=log)() == 1
    assert (
        last_line(log).startswith(f"error: {folder}/")
        and "no room to write it" in last_line(log)
        and "Traceback" not in log.read_text()
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def fill_up(file, root, database, tmp_path, spare):
    """The command on a disk with ``spare`` KiB, and again with room: exit codes, what the first said, and the table."""
    first, table = tmp_path / f"first{spare}", tmp_path / f"table{spare}"

    def work():
        try:
            small_disk(root, database, spare)
        except OSError:
            return NOT_PERMITTED
        code = fork_command(file, root, first)()
        os.remove(root / "filler")
        again = fork_command(file, root, tmp_path / f"second{spare}")()
        shutil.copy(root / "reports/tiny/table.csv", table)
        return 10 * code + again

    code = permitted(work)
    return divmod(code, 10), first.read_text(), table.read_bytes()


def check_small_disks(file, make_root, database, tmp_path, spares):
    """How many commands failed. Whatever file the disk is full at, nothing is lost and the message says it."""
    failed, whole = 0, make_root("whole")
    assert fork_command(file, whole, tmp_path / "log")() == 0
    (tmp_path / "small").mkdir()
    for spare in spares:
        (code, again), text, table = fill_up(file, tmp_path / "small", database, tmp_path, spare)
        failed += code
        assert again == 0 and code in (0, 1) and "Traceback" not in text, (spare, text)
        assert ("no room to write it" in text) == (code == 1), (spare, text)
        assert table == (whole / "reports/tiny/table.csv").read_bytes(), spare
    return failed


@pytest.mark.slow
def test_a_small_disk(file, make_root, _database, tmp_path):
    """A file system with so many KiB left fills up where it will; with room again, the same command ends as if nothing
    had been."""
    assert check_small_disks(file, make_root, _database, tmp_path, [30, 400]) == 2


@pytest.mark.slow
def test_thirty_small_disks(file, make_root, _database, tmp_path):
    failed = check_small_disks(file, make_root, _database, tmp_path, range(8, 8 + 30 * 40, 40))
    print(f"{failed} of 30 commands met a full disk")
    assert failed >= 10


# Several commands at once


def test_three_processes_and_one_key(whole, root):
    """On a new database, which they create together: one trains, the others wait and find it FINISHED."""
    spec, expected = whole
    (root / "mlflow.db").unlink()
    waits = [forked(lambda: train(spec, root)) for _ in range(3)]
    assert [wait() for wait in waits] == [0, 0, 0]
    assert_same(outcome(spec, root), expected["outcome"])
    assert integrity(root) == ("ok", []) and sorted(statuses(root).values()) == ["FINISHED", "SCHEDULED"]


def test_commands_that_end_together_report_one_after_another(file, root, tmp_path):
    """MLflow's copy of the folder must not meet files that another command has staged and renames, and what a killed
    one left is removed."""
    folder = root / "reports/tiny"
    folder.mkdir(parents=True)
    (folder / ".verdict.json.4711.tmp").touch()
    with checkpoint.lock(root / "checkpoints/.report"):
        wait = fork_command(file, root, tmp_path / "log", "--report")
        wait_for(lambda: "2 runs" in (tmp_path / "log").read_text() if (tmp_path / "log").exists() else False)
        time.sleep(1)
        assert [path.name for path in folder.iterdir()] == [".verdict.json.4711.tmp"]
    assert wait() == 0, (tmp_path / "log").read_text()
    copied = {path.name for path in (root / "mlruns").rglob("report/*")}
    assert copied == set(os.listdir(folder)) >= {"README.md", "verdict.json"} and not list(root.rglob(".*.tmp"))


@pytest.mark.slow
def test_eight_commands_at_once(tree, root, tmp_path):
    """Seven of one experiment and one of another that shares an arm with it, on a new database."""
    (root / "mlflow.db").unlink()
    one, two = two_experiments(tree, tmp_path)
    processes = [start(two if i == 7 else one, root, tmp_path, "--jobs", "2") for i in range(8)]
    outputs = [process.communicate(timeout=900) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, outputs
    check_both(root)


@pytest.mark.slow
@pytest.mark.parametrize("again", range(4))
def test_eight_commands_meet_again_and_again(tree, root, tmp_path, again):
    """The same with forks, which lose no time with imports and so meet at every place."""
    if again % 2:
        (root / "mlflow.db").unlink()
    one, two = two_experiments(tree, tmp_path)
    waits = [fork_command(two if i == 7 else one, root, tmp_path / f"log{i}", "--jobs", "2") for i in range(8)]
    assert [wait() for wait in waits] == [0] * 8, [(tmp_path / f"log{i}").read_text() for i in range(8)]
    check_both(root)


# Repeatability


def test_a_run_has_loader_workers(file, root, tmp_path):
    """Processes of a process of the command."""
    log = tmp_path / "log"
    assert fork_command(file, root, log, "--arms", "a", "train.workers=1")() == 0, log.read_text()
    assert sorted(statuses(root).values()) == ["FINISHED", "FINISHED"]


@pytest.mark.slow
def test_the_table_depends_on_the_experiment_alone(file, make_root, tmp_path):
    """One or two jobs, zero or two loader workers, a cold start or one after a kill: the same bytes."""
    tables = set()
    for i, (flags, kill) in enumerate(
        [
            (("--jobs", "1"), False),
            (("--jobs", "2"), True),
            (("train.workers=2",), False),
            (("train.workers=2", "--jobs", "1"), True),
        ]
    ):
        root = make_root(f"r{i}")
        if kill:
            process = start(file, root, tmp_path, *flags)
            wait_for(lambda root=root: list(root.rglob("*.ckpt")), process)
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            assert process.returncode == -signal.SIGKILL
        process = start(file, root, tmp_path, *flags)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, (out, err)
        copies = list(root.rglob("table.csv"))  # the report's, and MLflow's
        assert len(copies) == 2
        tables |= {path.read_bytes() for path in copies}
    assert len(tables) == 1


# Signals


@pytest.mark.parametrize(
    ("numbers", "codes"),
    [
        ([signal.SIGINT], [130]),
        ([signal.SIGTERM], [143]),
        ([signal.SIGINT, signal.SIGINT], [-signal.SIGINT, 130]),  # 130: the children were faster than the second signal
        ([signal.SIGKILL], [-signal.SIGKILL]),
    ],
    ids=["ctrl-c", "sigterm", "ctrl-c-twice", "kill-9-of-the-command"],
)
def test_a_signal_ends_everything_and_leaves_a_checkpoint(file, root, tmp_path, numbers, codes):
    """The signal goes to the command only, as from a batch system; its children follow, each after its step and a
    checkpoint."""
    log = tmp_path / "log"
    log.touch()
    wait = fork_command(file, root, log, "--jobs", "2", *LONG)
    wait_for(lambda: training(log.read_text()) == {"a", "b"})
    sent = time.monotonic()
    for i, number in enumerate(numbers):
        time.sleep(0.1 * i)
        os.kill(wait.pid, number)
    code = wait()
    assert code in codes and time.monotonic() - sent < 30, log.read_text()  # six seconds on an idle machine
    assert_all_ended_and_saved(wait.pid, root, command="SCHEDULED" if code < 0 else "KILLED")
    assert "Traceback" not in log.read_text()


def test_sigterm_counts_once(whole, root):
    """A run hears of its end from the command and, when that is gone, from ``end_with_parent``: it is closed
    nevertheless, and goes on."""
    spec, expected = whole
    end = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    faults = [(*PLACES[place], end) for place in ("middle of a stage", "checkpoint half written", "before FINISHED")]
    assert forked(lambda: train(spec, root), *faults)() == 1
    assert Tracker(root).find(spec.key).status == "KILLED"
    assert forked(lambda: train(spec, root))() == 0
    assert_same(outcome(spec, root), expected["outcome"])


def assert_all_ended_and_saved(session, root, command):
    wait_for(lambda: not alive(session), seconds=10)
    assert alive(session) == []
    assert len(list(root.rglob("*.ckpt"))) == 2 and not any(map(checkpoint.damaged, root.rglob("*.ckpt")))
    assert sorted(statuses(root).values()) == sorted(["KILLED", "KILLED", command])


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c"),
        # a minute of imports; kill-9-of-the-command above is the same with forks
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="kill-9", marks=pytest.mark.slow),
    ],
)
def test_run_py_and_its_fork_server_end(file, root, tmp_path, number, code):
    """Ctrl-C as a terminal sends it, to every process of the command, runs and fork server; and the end of the command
    alone."""
    process = start(file, root, tmp_path, "--jobs", "2", *LONG)
    lines = ""
    while training(lines) != {"a", "b"}:
        line = process.stdout.readline()
        assert line, process.communicate()
        lines += line
    os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
    out, err = process.communicate(timeout=60)  # six seconds on an idle machine
    assert process.returncode == code, (out, err)
    assert_all_ended_and_saved(process.pid, root, command="SCHEDULED" if code < 0 else "KILLED")
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_deleted_run_makes_the_verdict_incomplete(file, root, tmp_path):
    log, specs = tmp_path / "log", Sweep.prepare(parse_options([str(file), "--root", str(root)])).specs
    report = lambda: main([str(file), "--root", str(root), "--report"])  # noqa: E731
    assert [forked(lambda spec=spec: train(spec, root))() for spec in specs] == [0, 0]
    assert forked(report, log=log)() == 0 and "\nINCONCLUSIVE" in log.read_text()
    expected = outcome(specs[1], root)
    tracker = Tracker(root)
    tracker.client.delete_run(tracker.find(specs[1].key).run_id)
    assert forked(report, log=log)() == 0 and "INCOMPLETE; missing: b seed 0 (to resume)" in log.read_text()
    assert forked(lambda: train(specs[1], root))() == 0
    assert_same(outcome(specs[1], root), expected)  # what was logged comes back from the checkpoint
    assert forked(report, log=log)() == 0 and "\nINCONCLUSIVE" in log.read_text()


# Security

TAGS = [
    "!!python/object/apply:os.mkdir [PROOF]",
    "!!python/object/new:os.mkdir [PROOF]",
    "!!python/object/apply:os.mkdir {args: [PROOF]}",
]


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
    assert str(caught.value).startswith("tiny.yaml: report.notes: '${oc.env:SECRET}'") and "hidden" not in str(
        caught.value
    )
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


TELEMETRY = """
from lit_memory.run import tracking
import mlflow.telemetry.utils as utils
utils._is_ci_env_or_testing = lambda: False
print(utils.is_telemetry_disabled())
"""


@pytest.mark.parametrize(("given", "disabled"), [({}, "True"), ({"MLFLOW_DISABLE_TELEMETRY": "false"}, "False")])
def test_telemetry_is_off_as_mlflow_sees_it(given, disabled):
    """MLflow also keeps silent under pytest and in CI; what it does elsewhere counts."""
    from mlflow.telemetry import utils

    silent = ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "PYTEST_CURRENT_TEST", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in silent} | given
    assert hasattr(utils, "_is_ci_env_or_testing"), "MLflow has changed; look again at how it decides"
    run = subprocess.run(
        [sys.executable, "-c", TELEMETRY], cwd=PROJECT, env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == disabled
    assert "MLFLOW_DISABLE_TELEMETRY" in (PROJECT / "docs/experiments.md").read_text()


# Soak


def footprint(pid):
    """Resident megabytes and open files of a process and its helpers (the fork server; not the runs, which are that
    one's children)."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    sizes = [int(Path(f"/proc/{n}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024 for n in pids]
    return sum(sizes), sum(len(os.listdir(f"/proc/{n}/fd")) for n in pids)


@pytest.mark.slow
def test_two_hundred_runs(tree, root, tmp_path):
    """One sweep: the command does not grow, nothing is left open or behind, and a run costs little beside its training
    and its test."""
    (tmp_path / "soak.yaml").write_text(yaml.safe_dump(tree | {"experiment": "soak", "seeds": list(range(100))}))
    scratch, jobs = tmp_path / "scratch", min(2, cores())  # runs that share a core would measure each other
    scratch.mkdir()
    argv = [sys.executable, "-u", str(RUN), str(tmp_path / "soak.yaml"), "--root", str(root), "--jobs", str(jobs)]
    pipes = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(argv, env=os.environ | {"TMPDIR": str(scratch)}, cwd=tmp_path, **pipes)
    first, test, ended, used, lines = [], [], [], [], []
    with process.stdout:
        for line in process.stdout:
            lines.append(line)
            told = re.match(r"[ab] s\d+  (stage 1/1|testing)|✓", line)
            if told and told[1]:
                (test if told[1] == "testing" else first).append(time.monotonic())
            elif told:
                ended.append(time.monotonic())
                used.append(footprint(process.pid))
    assert process.wait() == 0 and (len(first), len(test), len(ended)) == (200, 200, 200), "".join(lines)
    # A run starts when an earlier one ends, and means need not know which: start to first step, and test to end.
    before = mean(first[10:]) - mean(ended[10 - jobs : -jobs])
    after = mean(ended[10:]) - mean(test[10:])
    sizes, opened = zip(*used[10:], strict=True)
    print(f"{jobs} at a time: growth {max(sizes) - sizes[0]:.1f} MB of {sizes[0]:.0f}")
    print(f"files {opened[0]} to {opened[-1]} (at most {max(opened)})")
    print(f"{before:.2f} s from start to first step, {after:.2f} s for test and end")
    print(f"{(ended[-1] - ended[9]) / 190:.2f} s between ends")
    assert max(sizes) - sizes[0] <= 20 and opened[-1] <= opened[0] + 2 and before + after <= 2
    assert not list(scratch.iterdir()) and not list(root.rglob(".*.tmp")) and alive(process.pid) == []
    assert integrity(root) == ("ok", []) and sorted(statuses(root).values()) == ["FINISHED"] * 201


@pytest.mark.slow
def test_a_report_among_a_thousand_runs(tree, root, tmp_path):
    """What the report of 12 runs asks the database takes a second at most, with 1,000 runs there."""
    (tmp_path / "many.yaml").write_text(yaml.safe_dump(tree | {"experiment": "many", "seeds": list(range(6))}))
    sweep = Sweep.prepare(parse_options([str(tmp_path / "many.yaml"), "--root", str(root)]))
    tracker, (spec, *_), work = Tracker(root), sweep.specs, WorkList(sweep)
    parent = tracker.parent("many", "default", {})
    others = [replace(spec, seed=seed) for seed in range(1000, 1000 + 1000 - len(sweep.specs))]
    for one in [*sweep.specs[:6], *others, *sweep.specs[6:]]:
        run_id = tracker.start(one, None, parent, {"where": sweep.location}, parameters(one))
        for step in (3, 6):
            records.log(tracker, run_id, {"train/loss": 1.0, "valid/loss": 1.0, "valid/exact_match": 0.5}, step)
        results = [(name, x, 0.5) for name in ("exact_match", "capacity", "loss") for x in (2, 4)]
        records.finish(tracker, run_id, results, {"steps": 6, "seconds": 1.0}, [("seconds", x, 0.1) for x in (2, 4)])
    assert len(statuses(root)) == 1001
    times = []
    for _ in range(3):
        started = time.monotonic()
        fresh = Tracker(root)
        opened = time.monotonic()
        work.refresh(fresh)
        table = results_frame(fresh, sweep.specs, work.runs, sweep.experiment.report)
        assert len(work.runs) == 12 and len(table) == 12 * 5 * 2
        times.append((time.monotonic() - opened, opened - started))
    print("look-up and frame, opening:", ", ".join(f"{query:.2f} s, {opening:.2f} s" for query, opening in times))
    assert median(query for query, _ in times) <= 1
