"""Time that stands still, jumps or is short: stopped processes, a clock that is set, a database that many write to."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import records
from faults import (
    NOLOAD,
    PLACES,
    alive,
    assert_same,
    at,
    fork_command,
    forked,
    integrity,
    is_stopped,
    outcome,
    slow,
    start,
    statuses,
    wait_for,
)
from sqlalchemy.engine.default import DefaultDialect

from lit_memory.run.options import parse_options
from lit_memory.run.outbox import Outbox
from lit_memory.run.sweep import Sweep
from lit_memory.run.tracking import Tracker

pytestmark = [pytest.mark.usefixtures("warm", "unsaved_figures"), pytest.mark.filterwarnings(NOLOAD)]

HAMMER_SECONDS = float(os.environ.get("LIT_MEMORY_HAMMER_SECONDS", "45"))
BUSY_SECONDS = 20
"""How long MLflow waits for SQLite's lock."""


@pytest.fixture
def disturbed(file, root, tmp_path):
    """``disturbed(*flags, before=...)``: ``fork_command``, whose processes end with the test, however that ends."""
    waits = []

    def begin(*flags, before):
        waits.append(fork_command(file, root, tmp_path / "log", *flags, before=before))
        return waits[-1]

    yield begin
    for wait in waits:
        for pid in alive(wait.pid):
            os.kill(pid, signal.SIGKILL)


def specs_of(file, root):
    return Sweep.prepare(parse_options([str(file), "--root", str(root)])).specs


def check_equal(file, root, expected):
    """Rows, weights and the table of two roots."""
    for spec in specs_of(file, root):
        assert_same(outcome(spec, root), outcome(spec, expected))
    assert integrity(root) == ("ok", [])
    tables = [(place / "reports/tiny/table.csv").read_bytes() for place in (root, expected)]
    assert tables[0] == tables[1]


@pytest.fixture
def expected(file, make_root, tmp_path):
    """A root with the runs of ``file``, which nothing disturbed."""
    root = make_root("expected")
    assert fork_command(file, root, tmp_path / "expected.log")() == 0
    return root


# Stopped


def stop_once(mark):
    """Stop the first process that comes here; ``mark`` then has its id."""
    try:
        with open(mark, "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped(mark):
    """The process that ``stop_once`` has stopped; None before that."""
    text = mark.read_text() if mark.exists() else ""
    return int(text) if text and is_stopped(text) else None


@pytest.mark.parametrize("place", ["middle of a stage", *slow("checkpoint half written", "test")])
def test_a_stopped_run_holds_up_no_other(file, root, expected, tmp_path, disturbed, place):
    """SIGSTOP while the others train, then SIGCONT: nobody has noticed."""
    mark, log = tmp_path / "mark", tmp_path / "log"
    where, count = PLACES[place]

    def before():
        # Not while the run's other thread has the lock of the database, which is the subject of the next test.
        send, idle = Outbox.send, threading.Lock()

        def locked(*arguments):
            with idle:
                return send(*arguments)

        def stop():
            with idle:
                stop_once(mark)

        Outbox.send = locked
        at(where, min(count, 3), stop)

    wait = disturbed("--jobs", "2", before=before)
    wait_for(lambda: stopped(mark) and "finished in" in log.read_text())
    assert stopped(mark) and log.read_text().count("✓") == 1, log.read_text()
    os.kill(stopped(mark), signal.SIGCONT)
    assert wait() == 0, log.read_text()
    check_equal(file, root, expected)


@pytest.mark.slow
def test_a_run_stopped_while_it_writes_holds_up_no_other(file, root, expected, tmp_path, disturbed):
    """A process that is stopped in the middle of a transaction keeps SQLite's lock for longer than MLflow waits."""
    mark, log, inner = tmp_path / "mark", tmp_path / "log", DefaultDialect.do_commit

    def commit(self, connection):
        if getattr(connection, "in_transaction", False) and os.getpid() != os.getsid(0) and not mark.exists():
            stop_once(mark)
        inner(self, connection)

    def before():
        DefaultDialect.do_commit = commit

    wait = disturbed("--jobs", "2", before=before)
    wait_for(lambda: stopped(mark))
    time.sleep(BUSY_SECONDS + 10)  # what is tested is that time passes
    assert stopped(mark) and "failed" not in log.read_text(), log.read_text()
    os.kill(stopped(mark), signal.SIGCONT)
    assert wait() == 0, log.read_text()
    check_equal(file, root, expected)


@pytest.mark.slow
def test_a_signal_ends_what_is_stopped(file, root, expected, tmp_path, disturbed):
    """A stopped run can neither save nor hold up the end of its command."""
    mark, log = tmp_path / "mark", tmp_path / "log"
    where, count = PLACES["middle of a stage"]
    before = lambda: at(where, count, lambda: stop_once(mark))  # noqa: E731
    wait = disturbed(before=before)
    wait_for(lambda: stopped(mark))
    os.kill(wait.pid, signal.SIGTERM)
    assert wait() == 143 and alive(wait.pid) == [], log.read_text()
    assert fork_command(file, root, log)() == 0, log.read_text()
    check_equal(file, root, expected)


# The clock

SHIM = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *offset;
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    if (file >= 0) offset = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, clock, now);
    if (!code && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""
"""The clock of the wall, set by the seconds in a file. What measures time goes on, as on a machine whose clock is set;
libfaketime 0.9.10 breaks Python's sleep there."""


class Clock:
    def __init__(self, folder):
        (folder / "shim.c").write_text(SHIM)
        self.library, self.offset = folder / "shim.so", folder / "offset"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", self.library, folder / "shim.c"], check=True)
        self.offset.write_bytes(bytes(8))

    def set(self, hours):
        with self.offset.open("r+b") as file:
            file.write(int(3600 * hours).to_bytes(8, sys.byteorder, signed=True))

    def start(self, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(self.library))
            patch.setenv("CLOCK_OFFSET", str(self.offset))
            return start(*arguments)


@pytest.mark.skipif(not shutil.which("cc") or sys.platform != "linux", reason="needs Linux and a C compiler")
@pytest.mark.slow
def test_the_clock_is_set_back_and_forth(file, root, expected, tmp_path):
    """By hours and days, between commands and while they run: rows, weights and the table stay the same, and what is
    trained last counts."""
    clock, draw = Clock(tmp_path), random.Random(0)
    clock.set(72)
    process = clock.start(file, root, tmp_path, "--jobs", "2")
    wait_for(lambda: list(root.rglob("*.ckpt")), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    clock.set(-48)
    process = clock.start(file, root, tmp_path)
    while process.poll() is None:
        clock.set(draw.choice([-240, -10, -1, 0, 0.01, 1, 10, 72]))
        time.sleep(0.1)
    out, err = process.communicate()
    assert process.returncode == 0, (out, err)
    check_equal(file, root, expected)
    assert sorted(statuses(root).values()) == ["FINISHED"] * 3
    ids = {Tracker(root).find(spec.key).run_id for spec in specs_of(file, root)}
    clock.set(-24 * 365)
    process = clock.start(file, root, tmp_path, "--fresh")
    out, err = process.communicate()
    assert process.returncode == 0, (out, err)
    assert not ids & {Tracker(root).find(spec.key).run_id for spec in specs_of(file, root)}
    assert sorted(statuses(root).values()) == ["FINISHED"] * 5
    check_equal(file, root, expected)


# One database

STEPS = 20


def hammer(spec, root, number, deadline):
    """Runs without training, one after another, as fast as MLflow writes them. The number of them is the exit code."""
    tracker, done = Tracker(root), 0
    parent = tracker.parent(spec.experiment, spec.scale, {})
    while time.monotonic() < deadline or not done:
        one = replace(spec, seed=1000 * (number + 1) + done)
        assert tracker.find(one.key) is None
        run_id = tracker.start(one, None, parent, {"where": "here"}, {"model.width": 1})
        for step in range(STEPS):
            records.log(tracker, run_id, {"train/loss": 1.0, "valid/loss": 0.5}, step)
        records.finish(tracker, run_id, [("exact_match", x, 0.5) for x in (2, 4)], {"steps": STEPS})
        assert tracker.find(one.key).status == "FINISHED"
        done += 1
    return done


@pytest.mark.slow
def test_eight_processes_write_to_one_database(make_spec, root, tmp_path):
    """``LIT_MEMORY_HAMMER_SECONDS`` without a pause: no call fails, and every row is there once."""
    spec, deadline, counts = make_spec(), time.monotonic() + HAMMER_SECONDS, tmp_path / "counts"
    counts.mkdir()

    def work(number):
        (counts / str(number)).write_text(str(hammer(spec, root, number, deadline)))

    waits = [forked(lambda number=number: work(number), log=tmp_path / f"log{number}") for number in range(8)]
    assert [wait(takes=HAMMER_SECONDS) for wait in waits] == [0] * 8, [p.read_text() for p in tmp_path.glob("log*")]
    done = [int(path.read_text()) for path in sorted(counts.iterdir())]
    print(f"\n{HAMMER_SECONDS:.0f} s: {sum(done)} runs, {min(done)} to {max(done)} a process")
    assert integrity(root) == ("ok", [])
    assert sorted(statuses(root).values()) == ["FINISHED"] * sum(done) + ["SCHEDULED"]
    with sqlite3.connect(root / "mlflow.db") as database:
        (rows,) = database.execute("select count(*) from metrics").fetchone()
    database.close()
    assert rows == sum(done) * (2 * STEPS + 2 + 1)
