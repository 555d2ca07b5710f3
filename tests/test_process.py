"""The command as a process: its output, Ctrl-C at any moment, its fork server, shared memory, and its second start."""

import ctypes
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
import records
import stand_in
import test_faults as faults
import yaml

from lit_memory.cli import main
from lit_memory.lit import LIT_DATA
from lit_memory.lit.data import WORKER_SECONDS
from lit_memory.run import receipt
from lit_memory.run.engine import parameters
from lit_memory.run.launchers import local as launch
from lit_memory.run.launchers.base import Interrupted, LauncherDied
from lit_memory.run.options import Options, parse_options
from lit_memory.run.sweep import Sweep
from lit_memory.run.tracking import Tracker
from lit_memory.util import files
from lit_memory.util.streams import Lenient, settle

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]
RUN = Path(__file__).parents[1] / "run.py"


def call(*argv) -> int:
    return main([str(a) for a in argv])


# Output


def ascii_terminal(tmp_path):
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


def full_disk(tmp_path):
    return open("/dev/full", "w")


def closed_pipe(tmp_path):
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def closed_file(tmp_path):
    stream = io.StringIO()
    stream.close()
    return stream


def nothing(tmp_path):
    return None


@pytest.mark.parametrize("make", [ascii_terminal, full_disk, closed_pipe, closed_file, nothing])
def test_what_cannot_be_printed_ends_no_run(write, root, tmp_path, monkeypatch, inline, unsaved_figures, make):
    """The runs of both arms finish, the report is written, and the exit code is that of the work."""
    stream = make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        code = call(write(), "--root", root)
        settle()  # without which closing fails
    assert code == 0 and sorted(faults.statuses(root).values()) == ["FINISHED"] * 3
    assert json.loads((root / "reports/tiny/verdict.json").read_text(encoding="utf-8"))["verdict"] == "INCONCLUSIVE"
    if make is ascii_terminal:
        shown = stream.buffer.getvalue().decode("ascii")
        assert "+ a seed 0 finished" in shown and "INCONCLUSIVE" in shown and "+/-" in shown
        assert shown.replace("/runs?", "").count("?") == 1, "of the undecided line alone"
    if stream is not None:
        stream.close()


def test_plain_characters():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Lenient(stream).write("✓ ✗ ≤250 – 1 ± 2 … 界 \udcff")
    stream.flush()
    assert stream.buffer.getvalue() == b"+ x <=250 - 1 +/- 2 ... ? ?"
    utf8 = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    Lenient(utf8).write("✓ \udcff")  # a name of a file that is no UTF-8
    utf8.flush()
    assert utf8.buffer.getvalue() == "✓ ?".encode()


@pytest.mark.parametrize(
    ("shell", "environment"),
    [
        ("--list", {"LANG": "C", "PYTHONIOENCODING": "ascii"}),
        ("--list", {"PYTHONUTF8": "0", "LC_ALL": "POSIX"}),
        ("--list > /dev/full", {}),
        ("--list 2> /dev/full >&2", {}),
        ("--list | head -1", {}),
        ("--list >&-", {}),
        ("--help > /dev/full", {}),
    ],
)
def test_output_of_a_real_process(tmp_path, shell, environment):
    command = f"set -o pipefail; {sys.executable} {RUN} {shell}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=os.environ | environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    if environment:
        assert b"armt_ablation_gamma" in done.stdout and done.stdout.isascii()
    assert os.listdir(tmp_path) == []


# Ctrl-C


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def interrupt(moment, tmp_path, *argv):
    """Ctrl-C when the command has worked for so many seconds: a slow machine is as far as a fast one by then. Returns
    its exit code and what it said, or None where it was faster."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, str(RUN), *map(str, argv)], cwd=tmp_path, **pipes)
    while process.poll() is None and cpu_seconds(process.pid) < moment:
        time.sleep(0.002)
    if process.poll() is not None:
        process.communicate()
        return None
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    faults.wait_for(lambda: not faults.alive(process.pid), seconds=60)
    assert faults.alive(process.pid) == []
    return process.returncode, err


@pytest.mark.parametrize("moment", [0.05, 0.1, 0.25])
def test_ctrl_c_while_python_imports(tmp_path, moment):
    found = interrupt(moment, tmp_path, "--list")
    assert found == (130, "")


@pytest.mark.slow
def test_ctrl_c_at_twenty_two_moments(write, root, tmp_path):
    """From the first moment of the imports to the training: 130, at most one line, and a later command goes on."""
    seen = {}
    for i in range(22):
        moment = 0.05 + 0.35 * i
        seen[moment] = interrupt(moment, tmp_path, write(), "--root", root, *faults.LONG)
    print(seen)
    told = [found for found in seen.values() if found is not None]
    assert len(told) >= 15 and all(code == 130 and err.count("\n") <= 1 for code, err in told), seen
    assert all("Traceback" not in err for _, err in told)
    done = subprocess.run([sys.executable, str(RUN), write(), "--root", str(root)], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


# The fork server


@pytest.fixture
def make_launch(monkeypatch, tmp_path):
    """``make_launch(arms, jobs)``: a launcher of stand-ins with a fork server of its own."""
    monkeypatch.setattr(launch, "run_child", stand_in.run_child)
    monkeypatch.setattr(launch, "GRACE", 2.0)
    monkeypatch.setattr(launch, "preloaded", lambda specs: [])
    common = {"start": None, "experiment": "tiny"}
    return lambda arms, jobs: launch.LocalLauncher(
        [SimpleNamespace(arm=a, name=a, key=a, **common) for a in arms], jobs, tmp_path, "", {"tiny": ""}, {}
    )


def lives(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def kill_fork_server():
    pid = forkserver._forkserver._forkserver_pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_fork_server_that_dies_takes_all_runs_with_it(make_launch):
    """While children train, one of which is deaf to SIGTERM."""
    runs, pids = make_launch(["hang", "deaf"], 2), []
    with pytest.raises(LauncherDied):
        for child, event in runs.events():
            pids = [other.process.pid for other in runs.running]
            if child.spec.arm == "deaf" and event.get("stage") == 3:
                kill_fork_server()
    assert len(pids) == 2 and not any(map(lives, pids))


def test_a_fork_server_that_dies_between_runs_is_started_again(make_launch):
    runs, ended = make_launch(["a", "b"], 1), []
    for child, event in runs.events():
        if event["event"] == "end":
            ended.append((child.spec.arm, child.process.exitcode))
            kill_fork_server()
    assert ended == [("a", 0), ("b", 0)]


def test_new_processes_do_not_see_ctrl_c(make_launch):
    """A terminal sends it to all; the fork server would end with a traceback while it imports."""
    make_launch([], 1)
    status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
    assert int(status.partition("SigBlk:")[2].split()[0], 16) >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_temporary_folder_may_be_too_long_for_a_socket(root, tmp_path, tree, monkeypatch, capsys):
    """It is named before a run begins."""

    def refuse():
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(forkserver, "ensure_running", refuse)
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert main([str(file), "--root", str(root)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: TMPDIR") and "too long for a socket" in err and err.count("\n") == 1
    assert not list((root / "checkpoints").glob("*/*.ckpt"))


def test_a_signal_that_was_swallowed_counts(make_launch):
    """A destructor, or a library that takes every error for its own, may be what is called when it comes."""
    runs = make_launch(["hang"], 1)
    with pytest.raises(Interrupted) as caught:
        for _, event in runs.events():
            if event.get("stage") == 2:
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(10)
                except BaseException as error:
                    assert not isinstance(error, Exception)
    assert caught.value.number == signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 1, 4, 8, 15])
def test_kill_9_of_the_fork_server_of_a_command(write, root, tmp_path, delay):
    """While it imports, and while runs train: one line, exit 1, and the same command ends the work."""
    process = faults.start(write(), root, tmp_path, "--jobs", "2", *faults.LONG)
    servers = lambda: [pid for pid in faults.alive(process.pid) if is_fork_server(pid, process.pid)]  # noqa: E731
    faults.wait_for(servers, process, 120)
    time.sleep(delay)
    os.kill(servers()[0], signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in out + err and err.count("\n") == 1 and process.returncode == 1, (out, err)
    assert err.startswith("✗ the process that starts the runs was killed") and faults.alive(process.pid) == []
    assert "RUNNING" not in faults.statuses(root).values()
    done = subprocess.run([sys.executable, str(RUN), write(), "--root", str(root)], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


def is_fork_server(pid, parent):
    """Not one of its children, which have the same command line."""
    try:
        own = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(parent)
        return own and b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# Shared memory


def small_shared_memory(kib):
    """In a fork: a /dev/shm of its own. Raises OSError where that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS: no other process sees what is mounted
        raise OSError(ctypes.get_errno(), "unshare")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", "/dev/shm"]
    for command in (["mount", "--make-rprivate", "/"], mount):
        if subprocess.run(command, capture_output=True).returncode:
            raise OSError(errno.EPERM, " ".join(command))


@pytest.mark.parametrize(("kib", "size"), [(64, 4000), (8, 4)], ids=["batches", "queues"])
def test_full_shared_memory_is_named(write, root, tmp_path, kib, size):
    """Not the disk of the root, and nothing waits for a batch that was lost."""
    log = tmp_path / "log"

    def work():
        try:
            small_shared_memory(kib)
        except OSError:
            return 77
        signal.alarm(100)
        flags = ("--arms", "a", "train.workers=1", f"train.batch_size={size}")
        return faults.fork_command(write(), root, log, *flags)()

    code = faults.forked(work)()
    if code == 77:
        pytest.skip("mounting a file system is not permitted here")
    text = log.read_text()
    assert code == 1 and "Traceback" not in text, text
    assert "✗ a seed 0 failed" in text and "/dev/shm: no room to write it, " in text
    assert "bytes are free; give it more, or set train.workers=0, and run the same command again" in text


def test_an_error_without_a_name_blames_the_fullest_place(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(files, "SHARED", tmp_path / "shm")
    usage = lambda path: SimpleNamespace(free=12 if path == tmp_path / "shm" else 81 * 2**30)  # noqa: E731
    monkeypatch.setattr(files.shutil, "disk_usage", usage)
    unnamed = OSError(errno.ENOSPC, "No space left on device")
    assert files.disk_full(unnamed, tmp_path).startswith(
        f"{tmp_path}/shm: no room to write it, 12 bytes are free; give"
    )
    named = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))
    assert files.disk_full(named, tmp_path).startswith(f"{tmp_path}/file: no room to write it, 86,973,087,744 bytes")


@pytest.mark.parametrize(("workers", "limit"), [(0, 0), (2, WORKER_SECONDS)])
def test_workers_have_a_time_limit(workers, limit):
    loader = LIT_DATA["associative_retrieval"](workers=workers).train_dataloader()
    assert (loader.num_workers, loader.timeout) == (workers, limit)


def test_a_batch_of_a_worker_is_the_same():
    for index, batch in enumerate(LIT_DATA["associative_retrieval"](workers=1, epoch_steps=2).train_dataloader()):
        own = LIT_DATA["associative_retrieval"](epoch_steps=2).train_dataloader().dataset[index]
        assert batch.ids_BT.equal(own.ids_BT)
        assert batch.targets_BT.equal(own.targets_BT) and all(batch.meta[k].equal(v) for k, v in own.meta.items())
        assert batch.ids_BT.is_shared()


# The second start


@pytest.fixture
def done(write, root, inline, unsaved_figures, capsys):
    """A plan that is finished and reported: its file, and what the command says when it is given again."""
    file = write()
    assert call(file, "--root", root) == 0
    kept = list((root / "checkpoints/.receipts").iterdir())
    assert len(kept) == 1
    capsys.readouterr()
    return file


@pytest.fixture
def no_plan(monkeypatch):
    """``no_plan()``: whether the command, given again, plans anew."""

    def planned(*argv):
        seen = []
        prepare = Sweep.prepare
        with monkeypatch.context() as patch:
            note = lambda options: seen.append(1) or prepare(options)  # noqa: E731
            patch.setattr("lit_memory.cli.Sweep.prepare", note)
            assert call(*argv) == 0
        return not seen

    return planned


def test_a_finished_plan_shows_the_same_again(done, root, no_plan, capsys):
    before = {path: path.read_bytes() for path in (root / "reports").rglob("*") if path.is_file()}
    assert no_plan(done, "--root", root)
    short = capsys.readouterr().out
    shutil.rmtree(root / "checkpoints/.receipts")
    assert not no_plan(done, "--root", root)
    assert capsys.readouterr().out == short and "2 runs: 2 finished\n" in short and "\nINCONCLUSIVE" in short
    assert {path: path.read_bytes() for path in before} == before


def test_a_finished_plan_needs_neither_torch_nor_matplotlib(done, root, tmp_path):
    """As ``run.py`` would be given again: the receipt knows its command line."""
    code = "import sys; from lit_memory.cli import main; code = main(sys.argv[1:])\n"
    code += "heavy = {'torch', 'lightning', 'matplotlib', 'transformers'} & {*sys.modules}; assert not heavy, heavy"
    argv = [sys.executable, "-c", code, done, "--root", str(root)]
    again = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(RUN.parent)})
    assert again.returncode == 0 and "2 runs: 2 finished" in again.stdout, again.stderr


CHANGES = {
    "the experiment": lambda file, root: Path(file).write_text(Path(file).read_text() + "\n# changed\n"),
    "one beside it": lambda file, root: Path(file).with_name("other.yaml").write_text("x: 1"),
    "a file of the report": lambda file, root: (root / "reports/tiny/table.csv").write_text("x"),
    "a file of the report is gone": lambda file, root: (root / "reports/tiny/figure.png").unlink(),
    "a damaged receipt": lambda file, root: next((root / "checkpoints/.receipts").iterdir()).write_text("{"),
    "a dead run": lambda file, root: leave_running(root),
    "the parent is deleted": lambda file, root: delete_runs(root, "experiment"),
}


def leave_running(root):
    tracker = Tracker(root)
    tags = {"lit.kind": "run", "lit.key": "0" * 64, "lit.where": receipt.location(root)}
    tracker.client.create_run(tracker.experiments.id_of("tiny"), tags=tags)


def delete_runs(root, kind):
    tracker = Tracker(root)
    for run in tracker.client.search_runs([tracker.experiments.id_of("tiny")], f"tags.`lit.kind` = '{kind}'"):
        tracker.client.delete_run(run.info.run_id)


def test_what_has_changed_is_planned_again(done, root, no_plan):
    """One change after the other: each is planned again once, and leaves a finished plan."""
    for name, change in CHANGES.items():
        change(done, root)
        assert not no_plan(done, "--root", root), name
        assert no_plan(done, "--root", root), name
        assert "RUNNING" not in faults.statuses(root).values(), name


def test_a_file_of_any_ending_is_an_input(tmp_path):
    options = Options(experiment=str(tmp_path / "tiny.yml"))
    seen = {receipt.inputs(options)}
    for text in ("x: 1", "x: 2"):
        (tmp_path / "tiny.yml").write_text(text)
        seen |= {receipt.inputs(options), receipt.inputs(options)}
    assert len(seen) == 3


def test_other_code_or_flags_plan_again(done, root, no_plan, monkeypatch, tmp_path):
    assert not no_plan(done, "--root", root, "--report") and not no_plan(done, "--root", root, "--report")
    assert not no_plan(done, "--root", root, "--dry-run") and not no_plan(done, "--root", root, "--dry-run")
    assert no_plan(done, "--root", root)
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(receipt, "PACKAGE", tmp_path / "package")
    assert not no_plan(done, "--root", root)


def test_a_deleted_run_is_trained_again(done, root, no_plan, capsys):
    delete_runs(root, "run")
    assert not no_plan(done, "--root", root)
    assert capsys.readouterr().out.count(" finished in ") == 2 and no_plan(done, "--root", root)


def test_what_misses_runs_has_no_receipt(write, root, inline, unsaved_figures):
    assert (
        call(write(), "--root", root, "--arms", "a") == 0
        and call(write(arms={"a": {}}, expect=[]), "--root", root) == 0
    )
    receipts = [json.loads(path.read_text()) for path in (root / "checkpoints/.receipts").iterdir()]
    assert [len(each["runs"]) for each in receipts] == [1]


@pytest.mark.slow
def test_the_second_start_of_forty_runs(tree, root, tmp_path):
    """Their training is left out: what MLflow knows of them is written directly."""
    arms = {name: {"train.lr": 0.001 * (i + 1)} for i, name in enumerate("abcdefghij")}
    file = tmp_path / "forty.yaml"
    file.write_text(yaml.safe_dump(tree | {"experiment": "forty", "arms": arms, "seeds": [0, 1, 2, 3]}))
    sweep, tracker = Sweep.prepare(parse_options([str(file), "--root", str(root)])), Tracker(root)
    parent = tracker.parent("forty", sweep.scale, {})
    for spec in sweep.specs:
        run_id = tracker.start(spec, None, parent, {"where": sweep.location}, parameters(spec))
        rows = [(name, x, 0.5) for name in ("exact_match", "capacity", "loss") for x in (2, 4)]
        records.finish(tracker, run_id, rows, {"steps": 6, "seconds": 1.0}, [("seconds", x, 0.1) for x in (2, 4)])
    used = []
    for _ in range(4):
        before = os.times()
        argv = [sys.executable, str(RUN), str(file), "--root", str(root)]
        subprocess.run(argv, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        used.append(sum(after[2:4]) - sum(before[2:4]))
    print("CPU seconds of the first start and of later ones:", used)
    assert min(used[1:]) <= 0.6 * used[0]
