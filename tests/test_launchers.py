"""Launchers of clusters: what goes there and comes back, wrong settings, and real clusters (slow)."""

import contextlib
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from servers import free_port

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.run import checkpoint
from lit_memory.run.launchers import choice, remote, slurm, work
from lit_memory.run.launchers.choice import Choice
from lit_memory.run.launchers.remote import Remote
from lit_memory.run.launchers.work import MESSAGES, NOT_SHARED, TOKEN, MessageFile, Work
from lit_memory.run.options import Options
from lit_memory.run.uri import StoreURI

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]
PROJECT = Path(__file__).parents[1]


# What goes there and comes back


def test_messages_come_back_in_whole_lines(tmp_path, make_spec):
    sent = [{"event": "progress", "stage": 1, "step": k} for k in range(3)]
    child, file = Remote(make_spec(), path=tmp_path / MESSAGES), MessageFile(tmp_path / MESSAGES)
    assert child.messages() == []
    file.send(sent[0])
    file.send(sent[1])
    half = json.dumps(sent[2])
    with child.path.open("a") as out:
        out.write(half[:9])
    assert [message["step"] for message in child.messages()] == [0, 1] and child.messages() == []
    with child.path.open("a") as out:
        out.write(half[9:] + "\n")
    assert [message["step"] for message in child.messages()] == [2] and child.progress["step"] == 2


def test_work_goes_without_its_process_and_with_the_settings_of_mlflow(tmp_path, make_spec, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    monkeypatch.setenv("SECRET_OF_ANOTHER_PROGRAM", "x")
    work = Work(make_spec(), tmp_path, StoreURI(""), "", {}, "token")
    work.process = object()
    there = pickle.loads(pickle.dumps(work))
    assert there.process is None and there.spec == work.spec
    assert there.environment["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"
    assert "SECRET_OF_ANOTHER_PROGRAM" not in there.environment


def test_the_end_of_work_waits_for_no_lock_of_its_own_wait(tmp_path, make_spec):
    """A handler of a cluster's signal ends the run in the middle of ``Popen.wait``, which holds a lock."""
    work = Work(make_spec(), tmp_path, StoreURI(""), "", {}, "token")
    work.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with work.process._waitpid_lock:
        work.end()
    assert work.process.wait(0) == -signal.SIGTERM
    work.end()  # of a process that has ended


def test_a_machine_that_does_not_see_the_root_says_so(tmp_path, make_spec):
    """The folder is there, as every machine may have one of that name, but not what the command wrote into it."""
    spec = make_spec()
    folder = spec.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / TOKEN).write_text("of another command")
    assert Work(spec, tmp_path, StoreURI(""), "", {}, "token")() == NOT_SHARED
    child = Remote(spec, job=SimpleNamespace(outcome=lambda: (NOT_SHARED, "")), path=folder / MESSAGES)
    assert child.exitcode == NOT_SHARED
    assert re.fullmatch(
        r"the machine that got it does not see .*; expected a root that all machines share", child.failure
    )


class Submitted(SimpleNamespace):
    """A job of submitit in a state."""

    job_id = "7"

    def __init__(self, folder, result=None):
        paths = SimpleNamespace(result_pickle=folder / "result", stderr=folder / "log")
        if result is not None:
            paths.result_pickle.touch()
        super().__init__(paths=paths, _get_outcome_and_result=lambda: result)


def test_what_ends_a_slurm_job(tmp_path, monkeypatch):
    """Preemption and a time limit do not, as submitit requeues it; their states last a moment."""
    now, states = [100.0], []
    monkeypatch.setattr(slurm.time, "monotonic", lambda: now[0])
    job = slurm.SlurmJob(Submitted(tmp_path), lambda _: states[-1])
    for state in ("PENDING", "RUNNING", "PREEMPTED", "REQUEUED", "TIMEOUT", "RUNNING", "TIMEOUT"):
        states.append(state)
        assert job.outcome()[0] is None
        now[0] += slurm.PATIENCE - 1
    now[0] += 2
    assert job.outcome() == (1, f"Slurm job 7 ended as TIMEOUT; log: {tmp_path / 'log'}")
    assert slurm.SlurmJob(Submitted(tmp_path), lambda _: "CANCELLED").outcome()[0] == 1
    assert slurm.SlurmJob(Submitted(tmp_path, ("success", 0)), lambda _: "GONE").outcome()[0] == 0
    failed = slurm.SlurmJob(Submitted(tmp_path, ("error", "Traceback …\nMemoryError: too large\n")), lambda _: "FAILED")
    assert failed.outcome() == (1, "Slurm job 7: MemoryError: too large")
    cut = Submitted(tmp_path, ())
    cut._get_outcome_and_result = lambda: pickle.loads(b"")
    assert slurm.SlurmJob(cut, lambda _: "RUNNING").outcome() == (None, "Slurm job 7 is RUNNING")
    ended = f"Slurm job 7 ended as CANCELLED; log: {tmp_path / 'log'}"
    assert slurm.SlurmJob(cut, lambda _: "CANCELLED").outcome() == (1, ended)


# Wrong settings


BAD = {
    "unknown launcher": (None, "srum", "command line: --launcher: srum: unknown; did you mean 'slurm'?"),
    "no file": ("-", "ray", "No such file or directory; expected a YAML file like 'slurm: {partition: gpu}'"),
    "no YAML": ("slurm: {", "slurm", "expected a YAML file like 'slurm: {partition: gpu}'"),
    "no mapping": ("slurm: 3", "slurm", "expected launchers with their settings, like 'slurm: {partition: gpu}'"),
    "unknown part": ("slrm: {}", "slurm", "slrm: unknown launcher; did you mean 'slurm'?"),
    "other part": ("ray: {}", "slurm", "has no settings for --launcher slurm; expected such a part"),
    "unknown setting": ("slurm: {cluster: local, partitions: x}", "slurm", "slurm: .*partitions.*"),
    "no Slurm here": ("slurm: {}", "slurm", 'slurm: Could not detect "srun", are you indeed on a slurm cluster?'),
    "unknown setting of Ray": ("ray: {cpus: 2}", "ray", "ray.cpus: unknown; did you mean 'num_cpus'?"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_settings_are_one_line(name, tmp_path, monkeypatch):
    content, launcher, expected = BAD[name]
    monkeypatch.setenv("PATH", "")  # no srun
    monkeypatch.setattr(choice, "find_spec", lambda name: True)
    file = tmp_path / "launch.yaml"
    if content not in (None, "-"):
        file.write_text(content)
    options = Options(launcher=launcher, launch=None if content is None else str(file))
    with pytest.raises(ConfigError) as error:
        Choice.of(options, tmp_path, StoreURI(""))
    assert re.search(expected if ".*" in expected else re.escape(expected), str(error.value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("launcher", choice.PACKAGES)
def test_an_extra_that_is_not_installed_is_named(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"--launcher: {launcher}: needs the package .*lit-memory\[{launcher}\]'"):
        Choice.of(Options(launcher=launcher), tmp_path, StoreURI(""))


def test_a_launch_file_is_utf_8_in_every_locale(tmp_path):
    (tmp_path / "launch.yaml").write_text("slurm: {partition: größer}", encoding="utf-8")
    code = "from lit_memory.run.launchers.choice import settings_of; from lit_memory.run.options import Options; "
    code += "print(ascii(settings_of(Options(launch='launch.yaml', launcher='slurm'))))"
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(PROJECT),
    }
    read = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert read.stdout == "{'partition': 'gr\\xf6\\xdfer'}\n", read.stderr


def test_sqlite_on_a_network_file_system_is_refused(tmp_path):
    table = tmp_path / "mounts"
    table.write_text(f"/dev/a / ext4 rw 0 0\nserver:/home {tmp_path} nfs4 rw 0 0\n")
    assert remote.file_system(tmp_path / "root", table) == "nfs4" and remote.file_system(Path("/tmp"), table) == "ext4"
    assert remote.file_system(tmp_path, tmp_path / "none") == ""


def test_sqlite_on_nfs_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "file_system", lambda root: "nfs4")
    with pytest.raises(
        ConfigError, match="lies on nfs4, where the locks of SQLite do not hold; set MLFLOW_TRACKING_URI"
    ):
        remote.check_shared(tmp_path, StoreURI(""), "--launcher")
    remote.check_shared(tmp_path, StoreURI("http://127.0.0.1:5000"), "--launcher")


# Real clusters


@pytest.fixture
def tiny(tmp_path, tree):
    """The file of an experiment of two runs, one of which starts from the other's weights."""
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def table_of(root):
    return (root / "reports/tiny/table.csv").read_bytes()


def command(file, root, *flags):
    """The command in a process of its own."""
    argv = [sys.executable, PROJECT / "run.py", file, "--root", root, *flags]
    return subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def expected(tiny, tmp_path, inline):
    """The table of the same experiment, trained in this process."""
    assert main([str(tiny), "--root", str(tmp_path / "here")]) == 0
    return table_of(tmp_path / "here")


@pytest.mark.slow
def test_processes_of_submitit_give_the_same_table(tiny, tmp_path, expected):
    (tmp_path / "launch.yaml").write_text("slurm: {cluster: local, time: 10}")
    run = command(tiny, tmp_path / "root", "--launcher", "slurm", "--launch", tmp_path / "launch.yaml")
    out, _ = run.communicate(timeout=600)
    assert run.returncode == 0, out
    assert table_of(tmp_path / "root") == expected
    assert not list((tmp_path / "root").rglob(MESSAGES))


CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
RequeueExit=142
JobRequeue=1
KillWait=15
MinJobAge=300
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def cluster(tmp_path_factory, monkeypatch):
    """A real Slurm cluster of this machine, from Debian's packages ``slurmctld``, ``slurmd``, ``slurm-client`` and
    ``munge``."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "srun") if shutil.which(name, path=SBIN) is None]
    if missing or os.geteuid():
        pytest.skip(f"needs root, and Debian's packages of {', '.join(missing) or 'Slurm'}")
    folder = Path("/tmp") / f"slurm-{os.getpid()}"  # the path of a socket is short
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    host, ports = os.uname().nodename.partition(".")[0], [free_port(), free_port()]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, ports=ports, folder=folder, cores=os.cpu_count()))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setenv("PATH", SBIN)
    munge = ["--key-file", "key", "--socket", "munge.socket", "--pid-file", "munge.pid", "--log-file", "munge.log"]
    munge = ["munged", "-F", "--seed-file", folder / "seed", *(folder / x if i % 2 else x for i, x in enumerate(munge))]
    commands = [munge, ["slurmctld", "-D", "-f", conf], ["slurmd", "-D", "-N", host, "-f", conf]]
    with contextlib.ExitStack() as stack:
        for argv in commands:
            log = stack.enter_context((folder / f"{argv[0]}.txt").open("w"))
            daemon = subprocess.Popen(list(map(str, argv)), stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)
            time.sleep(1)
        for _ in range(120):
            if "idle" in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout:
                break
            time.sleep(0.5)
        else:
            pytest.fail("\n".join(path.read_text()[-2000:] for path in folder.glob("*.txt")))
        yield folder
        subprocess.run(["scancel", "--me"], check=False)
    shutil.rmtree(folder, ignore_errors=True)


SBIN = f"{os.environ['PATH']}:/usr/sbin:/usr/bin"


def queue():
    """Job -> state of the real Slurm."""
    answer = subprocess.run(["squeue", "-h", "--me", "-t", "all", "-o", "%A %T"], capture_output=True, text=True)
    return dict(line.split() for line in answer.stdout.splitlines())


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def weights(root):
    """Folder of a run -> its last weights."""
    newest = {path.parent.name: path for path in sorted(root.rglob("*.ckpt"))}
    return {name: torch.load(path, weights_only=True)["state_dict"] for name, path in newest.items()}


@pytest.mark.slow
def test_what_slurm_cancels_or_requeues_goes_on_bit_for_bit(cluster, tiny, tmp_path, inline):
    """The signal of the time limit comes in the middle of the training."""
    long = ("train.steps=600", "train.valid_every=20", "--arms", "a")
    assert main([str(tiny), "--root", str(tmp_path / "here"), *long]) == 0
    root, settings = tmp_path / "root", tmp_path / "launch.yaml"
    settings.write_text("slurm: {time: 60}")
    signals = (["scancel"], ["scancel", "--signal=USR2"])
    for number, (cancel, code) in enumerate(zip(signals, (1, 0), strict=True)):
        run = command(tiny, root, *long, "--launcher", "slurm", "--launch", settings)
        begun = len(list(root.rglob("*.ckpt"))) and max(path.stat().st_mtime for path in root.rglob("*.ckpt"))
        wait_until(lambda: any(path.stat().st_mtime > begun for path in root.rglob("*.ckpt")))  # noqa: B023
        (job,) = [job for job, state in queue().items() if state == "RUNNING"]
        subprocess.run([*cancel, job], check=True)
        out, _ = run.communicate(timeout=600)
        assert run.returncode == code, out
        ended = re.search(rf"Slurm job {job} (ended as CANCELLED|was ended from outside)", out)
        assert ("to resume" in out.splitlines()[0]) == bool(number) and bool(ended) == (not number)
    (log,) = (root / f"checkpoints/.slurm-{os.getuid()}" / job).glob("*_log.err")
    assert "JOB REQUEUE" in log.read_text()
    found, expected = weights(root), weights(tmp_path / "here")
    assert found.keys() == expected.keys() and len(found) == 1
    for name, state in expected.items():
        assert all(torch.equal(state[key], found[name][key]) for key in state)


@pytest.mark.slow
def test_ray_goes_on_where_a_node_is_lost(tree, tmp_path, inline):
    """24 runs are handed over, and one of two nodes dies while it trains some. Another command waits for the end."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    file, root, settings = tmp_path / "tiny.yaml", tmp_path / "root", tmp_path / "launch.yaml"
    file.write_text(yaml.safe_dump(tree | {"seeds": list(range(12))}))
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = nodes.add_node(num_cpus=1)
    try:
        settings.write_text(f"ray: {{address: '{nodes.address}', num_cpus: 1}}")
        flags = ("--launcher", "ray", "--launch", settings)
        out, _ = command(file, root, *flags, "--detach").communicate(timeout=300)
        assert "24 runs submitted" in out
        run = command(file, root, *flags)
        begun = lambda: {path.parent for path in root.rglob("step-*.ckpt")}  # noqa: E731
        wait_until(lambda: len(begun()) >= 4 or run.poll() is not None)
        nodes.remove_node(other, allow_graceful=False)
        out, _ = run.communicate(timeout=900)
        assert run.returncode == 0 and out.count(" finished in ") == 24, out
        gone, _ = command(file, root, *flags, "train.steps=90000", "--arms", "a", "--detach").communicate(timeout=300)
        wait_until(lambda: list(root.rglob(MESSAGES)))
        ended, _ = command(file, root, *flags, "train.steps=90000", "--arms", "a", "--cancel").communicate(timeout=300)
        assert "12 runs submitted" in gone and "12 runs cancelled" in ended
        wait_until(lambda: not any(checkpoint.locked(path) for path in (root / "checkpoints").glob("*")))
    finally:
        nodes.shutdown()
    runs_once(root, 24)
    assert main([str(file), "--root", str(tmp_path / "here")]) == 0
    assert table_of(root) == table_of(tmp_path / "here")


def runs_once(root, number):
    """Every key has one FINISHED run, and no row of it is there twice."""
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as store:
        of_keys = "select t.value, count(*) from tags t join runs r using (run_uuid) where t.key = 'lit.key' "
        keys = store.execute(of_keys + "and r.status = 'FINISHED' group by t.value").fetchall()
        of_runs = "select count(*) from metrics m join tags t using (run_uuid) where t.key = 'lit.key' "
        rows = store.execute(of_runs + "group by run_uuid, m.key, m.step").fetchall()
    assert len(keys) == number and {count for _, count in keys} == {1} and {count for (count,) in rows} == {1}


def test_half_a_message_spoils_no_other(tmp_path, make_spec, monkeypatch):
    """Of a disk that is full for a moment; and a line that a broken disk has left is no message."""
    child, file = Remote(make_spec(), path=tmp_path / MESSAGES), MessageFile(tmp_path / MESSAGES)
    file.send({"event": "progress", "stage": 1, "step": 1})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (child.path.stat().st_size + 9, limit[1]))
        with pytest.raises(OSError):
            file.send({"event": "progress", "stage": 1, "step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    with child.path.open("ab") as out:
        out.write(b'{"event": "prog\n17\n')
    file.send({"event": "progress", "stage": 1, "step": 3})
    assert [message["step"] for message in child.messages()] == [1, 3]
    (tmp_path / remote.RECORD).write_text("")
    assert remote.recorded(tmp_path) == {}


def test_work_begins_where_the_command_was_given(tmp_path, make_spec, monkeypatch):
    """Paths of settings and of the store may be relative; where that folder is not there, anywhere."""
    seen = []

    class Started:
        returncode = 0

        def __init__(self, command, cwd, **options):
            seen.append(cwd)

        def communicate(self, data):
            pass

    monkeypatch.setattr("lit_memory.run.launchers.work.subprocess.Popen", Started)
    monkeypatch.chdir(tmp_path)
    work = pickle.loads(pickle.dumps(Work(make_spec(), tmp_path, StoreURI(""), "", {}, "token")))
    monkeypatch.chdir("/")
    assert work() == 0
    work.cwd = str(tmp_path / "gone")
    assert work() == 0 and seen == [str(tmp_path), None]


def test_a_run_has_the_hardware_of_its_machine(tmp_path, make_spec, monkeypatch):
    spec, seen = make_spec(), []
    spec.folder(tmp_path).mkdir(parents=True)
    (spec.folder(tmp_path) / TOKEN).write_text("token")
    tags = {"hardware": "of the command", "commit": "a"}
    given = io.BytesIO(pickle.dumps(Work(spec, tmp_path, StoreURI(""), "", tags, "token").arguments))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=given))
    monkeypatch.setattr(work, "hardware", lambda: "of the cluster")
    monkeypatch.setattr(work, "end_with", lambda parent: None)
    monkeypatch.setattr(work, "run_child", lambda *arguments: seen.append(arguments[4]))
    work.main()
    assert seen == [{"hardware": "of the cluster", "commit": "a"}]


def test_what_jobs_get_is_nobody_elses(tmp_path, make_spec, monkeypatch):
    """It has the passwords of the environment."""
    modes = []

    class Executor:
        def submit_array(self, works):
            modes.append(stat.S_IMODE((tmp_path / f"checkpoints/.slurm-{os.getuid()}").stat().st_mode))
            return []

    monkeypatch.setattr(slurm, "executor_of", lambda settings, folder: Executor())
    launcher = slurm.SlurmLauncher.__new__(slurm.SlurmLauncher)
    launcher.root, launcher.settings = tmp_path, {}
    (tmp_path / f"checkpoints/.slurm-{os.getuid()}").mkdir(parents=True, mode=0o755)
    launcher.submit([Work(make_spec(), tmp_path, StoreURI(""), "", {}, "token")], None)
    assert modes == [0o700]
