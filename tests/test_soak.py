"""Two hundred runs under random signals end as two hundred that nobody disturbed.

A hook in every process of a command (hooks/sitecustomize.py) tells which phase it is in, so that a signal finds the
short phases as often as the long ones. Some commands are real ones, with a fork server; the others are forks of the
test, whose start takes no time.
"""

import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from faults import (
    NOLOAD,
    PROJECT,
    RUN,
    STAGED,
    alive,
    assert_same,
    fork_command,
    integrity,
    outcome,
    statuses,
    wait_for,
)

from lit_memory.plan.merging import parse_override
from lit_memory.run.options import parse_options
from lit_memory.run.sweep import Sweep

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.filterwarnings(NOLOAD)]

HOOKS = PROJECT / "tests/hooks"
hooks = importlib.util.module_from_spec(
    spec := importlib.util.spec_from_file_location("hooks", HOOKS / "sitecustomize.py")
)
spec.loader.exec_module(hooks)
RUNS = int(os.environ.get("LIT_MEMORY_SOAK_RUNS", "200"))
SEED = int(os.environ.get("LIT_MEMORY_SOAK_SEED", "0"))
PER_COMMAND = 20
"""Runs of one command, which share its start."""
REAL = 4
"""One command in so many is run.py."""
ATTACKS = {True: 12, False: 24}
"""Signals that a real command, or a fork, and its successors meet before they are left alone."""
PAUSE = 1.0
"""Mean seconds between a signal and the wait for the next phase."""
HELD = 1.5
"""Most seconds between SIGSTOP and SIGCONT."""

REPORT = "report"
PHASES = {
    "start of a process": 3.0,
    "start of a run": 0.5,
    "training": 0.05,
    "validation": 0.02,
    "checkpoint": 0.02,
    "MLflow write": 0.02,
    "test": 0.05,
    "end of a run": 0.02,
    REPORT: 1.0,
}
"""Phase -> most seconds from its begin to the signal."""
SIGNALS = {
    "SIGINT": (signal.SIGINT,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGKILL": (signal.SIGKILL,),
    "SIGSTOP+SIGCONT": (signal.SIGSTOP, signal.SIGCONT),
}
TARGETS = ("command", "run", "fork server", "group")


class Ears:
    """Hears the phases of all processes."""

    def __init__(self, path):
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))

    def wait(self, wanted, process, seconds):
        """The process that has entered a phase, and the phase, as soon as ``wanted(phase)``; None where that does not
        happen, or the command ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(TimeoutError):
                pid, _, phase = self.socket.recv(100).decode().partition(" ")
                if wanted(phase):
                    return int(pid), phase
        return None

    def drain(self):
        """Forget what was told before."""
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self.socket.recv(100):
                pass
        self.socket.settimeout(0.1)

    def close(self):
        self.socket.close()


class Fork:
    """A fork of the test as ``subprocess`` shows a process."""

    def __init__(self, wait):
        self.pid, self.collect, self.returncode = wait.pid, wait, None

    def poll(self):
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                self.returncode = self.collect() if info else None
        return self.returncode

    def wait(self, timeout):
        wait_for(lambda: self.poll() is not None, seconds=timeout)
        assert self.returncode is not None, "it hangs"
        return self.returncode


def run_command(file, root, ears, log, real):
    """The command in a session of its own. log: receives what it says."""
    if not real:
        return Fork(fork_command(file, root, log, "--jobs", "2", before=hooks.tell_all))
    environment = os.environ | {"PYTHONPATH": f"{HOOKS}{os.pathsep}{PROJECT}"}
    argv = [sys.executable, "-u", str(RUN), str(file), "--root", str(root), "--jobs", "2"]
    with log.open("w") as output:
        return subprocess.Popen(argv, env=environment, stdout=output, stderr=output, start_new_session=True)


def read(pid, name):
    """A file of /proc; b"" where the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def parent_of(pid):
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else None


def pids(target, session, told):
    """The processes that a signal goes to. told: the one that entered the phase."""
    everybody = alive(session)
    if target in ("group", "command"):
        return everybody if target == "group" else [session]
    helpers = [pid for pid in everybody if parent_of(pid) == session and b"multiprocessing." in read(pid, "cmdline")]
    servers = [pid for pid in helpers if b"forkserver" in read(pid, "cmdline")]
    if target == "fork server":
        return servers
    runs = [pid for pid in everybody if pid not in (session, *helpers)]
    return [told] if told in runs else runs[:1]


def send(numbers, receivers, held):
    for i, number in enumerate(numbers):
        time.sleep(held * (i > 0))
        for pid in receivers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Attacks:
    """Signals at random times of all phases. A phase that was met less often than the one that is waited for is taken
    when it comes: some last long, others come once a command."""

    def __init__(self, ears, seed):
        self.ears, self.draw = ears, random.Random(seed)
        self.sent = Counter()
        """(signal, target, phase) -> number."""

    def count(self, phase):
        return sum(n for kind, n in self.sent.items() if kind[2] == phase)

    def next(self, process, last):
        """One signal, and a pause. last: it comes while the report is drawn. Returns whether there was one."""
        aim = REPORT if last else self.draw.choice(list(PHASES))
        self.ears.drain()
        met = self.ears.wait(
            lambda phase: phase == aim or (not last and self.count(phase) < self.count(aim)),
            process,
            seconds=300.0 if last else 3.0,
        )
        if met is None:
            return False
        told, phase = met
        time.sleep(self.draw.uniform(0, PHASES[phase]))
        name, target = self.draw.choice(list(SIGNALS)), self.draw.choice(TARGETS)
        receivers = pids(target, process.pid, told)
        if process.poll() is not None or not receivers:
            return False
        send(SIGNALS[name], receivers, self.draw.uniform(0.1, HELD))
        self.sent[name, target, phase] += 1
        time.sleep(self.draw.expovariate(1 / PAUSE))
        return True


CODES = {0, 1, 130, 143, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL}
"""Done, a run was killed, interrupted; or interrupted before the command could handle it, or by two signals."""


EARLY = re.compile(r"Process \S+:\nTraceback (?:(?!Traceback).)*?Interrupted: \d+\n", re.S)
"""What a fork of the test says that a signal meets before its first line: it still has the handler of its command. The
processes of a real command come from a fork server, which has none."""


def disturbed(file, root, attacks, real):
    """The same command again and again, under attack, then left alone until it is done. Returns how often it began."""
    starts, met, code = 0, 0, None
    while code != 0:
        log = root.parent / f"{file.stem}.log{starts}"
        process = run_command(file, root, attacks.ears, log, real)
        starts += 1
        while process.poll() is None and met < ATTACKS[real]:
            met += attacks.next(process, last=met == ATTACKS[real] - 1)
        code = process.wait(timeout=300)
        wait_for(lambda session=process.pid: not alive(session), seconds=120)  # a fork server ends behind its imports
        said = log.read_text() if real else EARLY.sub("", log.read_text())
        assert code in CODES and "Traceback" not in said and alive(process.pid) == [], (code, said)
    return starts


def sweep_file(tree, folder, number):
    """The experiment of one command: ``PER_COMMAND`` runs that no other has."""
    base = tree["base"]
    for key, value in map(parse_override, STAGED):
        section, _, name = key.partition(".")
        base[section][name] = value
    seeds = list(range(number * PER_COMMAND // 2, (number + 1) * PER_COMMAND // 2))
    path = folder / f"soak{number}.yaml"
    path.write_text(yaml.safe_dump(tree | {"experiment": path.stem, "seeds": seeds}))
    return path


def summary(sent, index, names):
    """Counts of the attacks by signal or target, and phase."""
    width = max(map(len, names))
    lines = [f"{'':{width}}  " + "  ".join(PHASES) + "  all"]
    for name in names:
        counts = [sum(n for kind, n in sent.items() if (kind[index], kind[2]) == (name, phase)) for phase in PHASES]
        cells = [f"{n:{len(phase)}}" for n, phase in zip(counts, PHASES, strict=True)]
        lines.append(f"{name:{width}}  " + "  ".join(cells) + f"  {sum(counts):3}")
    return "\n".join(lines)


def quiet(files, make_root, tmp_path):
    """A root with the same runs, which nobody disturbed."""
    root = make_root("undisturbed")
    for file in files:
        assert fork_command(file, root, tmp_path / "quiet.log", "--jobs", "2")() == 0
    return root


def assert_equal(files, root, expected):
    """Rows, weights, statuses and tables of all runs."""
    specs = [spec for file in files for spec in Sweep.prepare(parse_options([str(file), "--root", str(root)])).specs]
    assert len(specs) == RUNS
    for spec in specs:
        assert_same(outcome(spec, root), outcome(spec, expected))
    assert integrity(root) == ("ok", [])
    assert sorted(statuses(root).values()) == ["FINISHED"] * (RUNS + len(files))
    for file in files:
        table = f"reports/{file.stem}/table.csv"
        assert (root / table).read_bytes() == (expected / table).read_bytes()
    assert not list(root.rglob(".*.tmp"))


@pytest.mark.slow
def test_two_hundred_runs_under_random_signals(tree, make_root, tmp_path, monkeypatch):
    """SIGINT, SIGTERM, SIGKILL, SIGSTOP and SIGCONT, to the command, a run, the fork server and the group, in every
    phase: rows, weights and tables are those of undisturbed runs."""
    files, root = [sweep_file(tree, tmp_path, n) for n in range(RUNS // PER_COMMAND)], make_root("disturbed")
    short = Path(tempfile.mkdtemp(prefix="soak"))  # the name of a socket has at most 107 characters
    monkeypatch.setenv("LIT_MEMORY_SOAK", str(short / "ears"))
    attacks, starts, began = Attacks(Ears(short / "ears"), SEED), Counter(), time.monotonic()
    try:
        for i, file in enumerate(files):
            starts["run.py" if i % REAL == REAL - 1 else "forks"] += disturbed(
                file, root, attacks, i % REAL == REAL - 1
            )
    finally:
        attacks.ears.close()
        shutil.rmtree(short)
        print(f"\n{RUNS} runs, seed {SEED}, commands: {dict(starts)}, {time.monotonic() - began:.0f} s")
        print(summary(attacks.sent, 0, SIGNALS), summary(attacks.sent, 1, TARGETS), sep="\n")
    assert_equal(files, root, quiet(files, make_root, tmp_path))
    assert all(attacks.count(phase) for phase in PHASES)
