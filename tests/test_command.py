"""The command in a process of its own, which trains in further ones: nothing here shares imports with pytest.

One sweep of ``run.py`` serves many tests. It has no network, no HOME and a source tree that is read-only, and is
started from another folder.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import InlineLauncher
from faults import alive, fork_command, wait_for
from test_cli import REPORT, call, files, statuses

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
PROJECT = Path(__file__).resolve().parents[1]
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
    """The command that gives a process its own network, which is empty, and its own mounts; [] where the system forbids
    it."""
    check = "mount --bind /tmp /tmp && mount -o remount,ro,bind /"
    for flags in (["-n", "-m"], ["-r", "-n", "-m"]):
        command = ["unshare", *flags, "sh", "-c"]
        try:
            if subprocess.run([*command, check], capture_output=True).returncode == 0:
                return command
        except OSError:
            break
    return []


@pytest.fixture(scope="module")
def confined(tmp_path_factory):
    """``call(*argv)`` runs Python without a network, on a source tree that cannot be written to, in an empty working
    folder, without HOME.

    Where the system has namespaces, nothing but ``base`` can be written to. Elsewhere a poisoned socket stands for the
    missing network and permissions for the mounts, which stop everyone but root: then ``holds`` is false.
    """
    base = tmp_path_factory.mktemp("f")
    for name in ("cwd", "root", "tmp", "source", "poison"):
        (base / name).mkdir()
    shutil.copytree(PROJECT / "lit_memory", base / "source/lit_memory")  # with bytecode: nobody may write it there
    shutil.copy(PROJECT / "run.py", base / "source")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(base / "source"),
        "LIT_MEMORY_ROOT": str(base / "root"),
        "TMPDIR": str(base / "tmp"),
    }
    kept = ("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "PYTHONPYCACHEPREFIX")
    environment |= {name: os.environ[name] for name in kept if name in os.environ}
    prefix = namespaces()
    if prefix:
        prefix = [*prefix, ISOLATED, "sh", str(base)]
    else:
        (base / "poison/sitecustomize.py").write_text(POISON)
        environment["PYTHONPATH"] += f":{base / 'poison'}"
        for path in (base / "source", *(base / "source").rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)

    def call(*argv):
        options = {"cwd": base / "cwd", "env": environment, "capture_output": True, "text": True, "timeout": 600}
        return subprocess.run([*prefix, sys.executable, "-u", *map(str, argv)], **options)

    holds = bool(prefix) or os.geteuid() != 0
    yield SimpleNamespace(base=base, call=call, namespaces=bool(prefix), holds=holds)
    for path in (base / "source", *(base / "source").rglob("*")):
        path.chmod(0o755)


def listing(folder):
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


SWEEP = {"steps": 120, "batch_size": 4, "valid_every": 30, "valid_size": 8, "test_size": 16, "lr": 1e-3}
FINISHED = {}


@pytest.fixture
def sweep_file(tree, write):
    """Two arms of a second each, dropout included."""
    return write(base=tree["base"] | {"train": SWEEP, "model": tree["base"]["model"] | {"dropout": 0.1}})


@pytest.fixture
def finished(confined, sweep_file, _database):
    """A plan and a sweep of ``run.py``, once for all tests: outputs, and what lay in the folders before and after."""
    if not FINISHED:
        base, root = confined.base, confined.base / "root"
        source = listing(base / "source")
        dry = confined.call(base / "source/run.py", sweep_file, "--dry-run")
        left = {name: sorted(os.listdir(base / name)) for name in ("cwd", "root", "tmp")}
        shutil.copy(_database, root)
        run = confined.call(base / "source/run.py", sweep_file, "--jobs", "2")
        FINISHED.update(root=root, source=source, dry=dry, left=left, run=run)
        FINISHED["table"] = (root / "reports/tiny/table.csv").read_bytes()
    return SimpleNamespace(**FINISHED)


def test_the_confinement_confines(confined):
    """Or the next test would pass for nothing."""
    if not confined.holds:
        pytest.skip("root may write everywhere, and this system forbids it namespaces of its own")
    base = confined.base
    elsewhere = [Path.home(), "/"] if confined.namespaces else []
    run = confined.call("-c", PROBE, base / "source", base / "source/lit_memory", *elsewhere)
    assert (run.stdout, run.stderr) == ("101\n", "")


def test_a_whole_run_writes_below_its_root_only(confined, finished):
    if not confined.holds:
        pytest.skip("root may write everywhere, and this system forbids it namespaces of its own")
    base = confined.base
    assert (finished.dry.returncode, finished.dry.stderr) == (0, "") and "2 runs: 2 new" in finished.dry.stdout
    assert finished.left == {"cwd": [], "root": [], "tmp": []}
    assert finished.run.returncode == 0, finished.run
    assert {name: sorted(os.listdir(base / name)) for name in ("cwd", "tmp")} == {"cwd": [], "tmp": []}
    assert listing(base / "source") == finished.source


def test_a_whole_sweep(finished):
    root, run = finished.root, finished.run
    assert (run.returncode, run.stderr) == (0, ""), run
    lines = run.stdout.splitlines()
    assert lines[0] == "tiny (scale default): 2 runs: 2 new"
    assert sum("✓ " in line for line in lines) == 2
    assert any("stage 1/1" in line for line in lines) and any("testing" in line for line in lines)
    assert "INCONCLUSIVE, exploratory (1 seed)" in lines
    assert f"runs     mlflow ui --backend-store-uri sqlite:///{root}/mlflow.db" in lines
    assert f"report   {root}/reports/tiny/README.md" in lines
    assert statuses(root) == {"parent": "FINISHED", "a": "FINISHED", "b": "FINISHED"} and files(root) == REPORT
    artifacts = {path.name for path in (root / "mlruns").rglob("report/*")}
    assert artifacts == set(REPORT)
    assert sorted(p.name for p in root.iterdir()) == ["checkpoints", "mlflow.db", "mlflow.db.lock", "mlruns", "reports"]
    kept = [
        "journal.jsonl",
        "lock",
        "log.txt",
        "scores.npz",
        *(f"step-{n:08d}.ckpt{end}" for n in (90, 120) for end in ("", ".sha256")),
    ]
    assert [sorted(p.name for p in folder.iterdir()) for folder in (root / "checkpoints").glob("[!.]*")] == [kept, kept]
    assert all(path.read_text() == "" for path in root.rglob("log.txt"))


def test_the_same_command_again_trains_nothing(finished, sweep_file, no_training, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.root.rglob("*.ckpt")}
    assert call(sweep_file, "--root", finished.root) == 0
    assert capsys.readouterr().out.startswith("tiny (scale default): 2 runs: 2 finished\n")
    assert (finished.root / "reports/tiny/table.csv").read_bytes() == finished.table
    assert {path: path.stat().st_mtime_ns for path in finished.root.rglob("*.ckpt")} == before


def test_another_root_gives_the_same_bytes(finished, sweep_file, root, inline):
    """In this process, one after the other, in place of two processes at a time."""
    assert call(sweep_file, "--root", root) == 0
    assert (root / "reports/tiny/table.csv").read_bytes() == finished.table


def test_an_interrupted_sweep_goes_on(finished, sweep_file, root, tmp_path, monkeypatch, capsys):
    """Of forks; ``test_run_py_and_its_fork_server_end`` interrupts run.py itself."""
    log = tmp_path / "log"
    wait = fork_command(sweep_file, root, log, "--jobs", "2")
    wait_for(lambda: list(root.rglob("*.ckpt")), seconds=240)
    os.killpg(wait.pid, signal.SIGINT)
    started = time.monotonic()
    assert (wait(), time.monotonic() - started < 20) == (130, True), log.read_text()
    assert "interrupted; run the same command again to go on (exit 130)" in log.read_text()
    assert "Traceback" not in log.read_text()
    found = statuses(root)
    assert found.pop("parent") == "KILLED" and found and set(found.values()) == {"KILLED"}
    wait_for(lambda: not alive(wait.pid), seconds=5)
    assert alive(wait.pid) == []
    monkeypatch.setattr("lit_memory.run.launchers.local.LocalLauncher", InlineLauncher)
    assert call(sweep_file, "--root", root) == 0
    assert " to resume" in capsys.readouterr().out.splitlines()[0]
    assert (root / "reports/tiny/table.csv").read_bytes() == finished.table
    assert statuses(root) == {"parent": "FINISHED", "a": "FINISHED", "b": "FINISHED"}


LAUNCH = """
import sys
from pathlib import Path
from lit_memory.run.launchers.local import LocalLauncher
from lit_memory.run.uri import StoreURI

class Spec:
    name = experiment = key = "a"
    start = None
    model, task = {"name": "armt"}, {"name": "associative_retrieval"}

    def folder(self, root):
        return root

    def provide_code(self):
        pass

if __name__ == "__main__":
    launcher = LocalLauncher([Spec()], 1, Path(sys.argv[1]), StoreURI(""), {"a": ""}, {})
    for child, event in launcher.events():
        print(event["event"], child.failure)
"""


def test_children_run_the_code_that_was_called(tmp_path):
    """Another copy lies in the working directory, and another one may be installed; neither is what runs.

    A script in place of ``run.py``, which would import torch and MLflow first, launches a run with an engine that says
    where it lies.
    """
    for name in ("called", "cwd"):
        shutil.copytree(
            PROJECT / "lit_memory", tmp_path / name / "lit_memory", ignore=shutil.ignore_patterns("__pycache__")
        )
        engine = tmp_path / name / "lit_memory" / "run" / "engine.py"
        engine.write_text(f"def run_one(*args):\n    raise RuntimeError('this is the engine of {name}')\n")
    (tmp_path / "called/run.py").write_text(LAUNCH)
    argv = [sys.executable, str(tmp_path / "called/run.py"), str(tmp_path / "root")]
    run = subprocess.run(argv, cwd=tmp_path / "cwd", capture_output=True, text=True)
    expected = "RuntimeError: this is the engine of called"
    assert run.stdout.splitlines() == [f"failed {expected}", f"end {expected}"], run


HEAVY = ("torch._dynamo", "sympy", "lightning", "mlflow", "transformers", "pandas", "matplotlib")
FIRST_LINE = f"""
import os, runpy, sys

def first(text):
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    print(text, *heavy, file=sys.stderr, flush=True)
    os._exit(len(heavy))

sys.stdout.write = first
sys.path.insert(0, {str(PROJECT)!r})
runpy.run_path({str(PROJECT / "run.py")!r}, run_name="__main__")
"""


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
@pytest.mark.parametrize("name", ["armt_ablation_gamma", "memreasoner_ablation_memory", "tarm_quadratic"])
def test_the_first_line_waits_for_nothing_but_torch(tmp_path, name, flags):
    """What most models of a plan are made of is known from torch alone, without its compiler; the process ends at its
    first line."""
    argv = [sys.executable, "-c", FIRST_LINE, f"experiments/{name}.yaml", "--root", str(tmp_path), *flags]
    run = subprocess.run(argv, cwd=PROJECT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert run.returncode == 0 and f"{name} (scale cpu): " in run.stderr, run.stderr
