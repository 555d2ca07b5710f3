"""``--detach``, ``--cancel``, and commands that come and go while a cluster has their runs. The cluster is a stand-in
that runs what it is told to, in this process."""

import json
import re
from types import SimpleNamespace

import pytest

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.run.engine import run_one
from lit_memory.run.launchers import choice, remote
from lit_memory.run.launchers.choice import Choice
from lit_memory.run.launchers.remote import RECORD, Job, RemoteLauncher, recorded
from lit_memory.run.launchers.work import MESSAGES, NOT_SHARED, MessageFile
from lit_memory.run.options import Options
from lit_memory.run.uri import StoreURI

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy


class StandInJob(Job):
    def __init__(self, cluster, number):
        self.cluster, self.number, self.name = cluster, number, f"job {number}"

    def look(self):
        return self.cluster.outcomes.get(self.number, (None, f"job {self.number} waits"))

    def cancel(self):
        self.cluster.outcomes.setdefault(self.number, (1, "cancelled"))

    def record(self):
        return {"number": self.number}


class StandIn(RemoteLauncher):
    name = "slurm"
    works, outcomes, batches = [], {}, []

    @staticmethod
    def check(settings, file, detach):
        pass

    def connect(self):
        pass

    def needs(self, spec):
        return spec.model["gamma"]

    def submit(self, works, after):
        self.works += works
        self.batches.append(([work.spec.arm for work in works], after and after.number))
        return [StandInJob(self, len(self.works) - len(works) + i) for i in range(len(works))]

    def find(self, record):
        return None if self.outcomes.get(record["number"]) == "forgotten" else StandInJob(self, record["number"])

    @classmethod
    def train(cls, number):
        """Do the work of a job, as ``work.main`` does."""
        work = cls.works[number]
        messages = MessageFile(work.spec.folder(work.root) / MESSAGES)
        messages.send({"event": "machine", "name": "node7"})
        run_one(*work.arguments[:5], messages.send)

    @classmethod
    def finish(cls, number, code=0, reason=""):
        cls.outcomes[number] = code, reason


@pytest.fixture
def cluster(monkeypatch):
    for name, value in (("works", []), ("outcomes", {}), ("batches", [])):
        monkeypatch.setattr(StandIn, name, value)
    monkeypatch.setattr(remote, "POLL", 0.0)
    monkeypatch.setattr(choice, "load", lambda name: StandIn)
    monkeypatch.setattr(choice, "find_spec", lambda name: True)
    return StandIn


@pytest.fixture
def command(file, root, capsys, unsaved_figures):
    """``command(*flags)``: exit code, output and errors."""

    def call(*flags):
        code = main([str(file), "--root", str(root), "--launcher", "slurm", *flags])
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, errors=captured.err)

    return call


def records(root):
    return sorted(json.loads(path.read_bytes())["job"]["number"] for path in root.rglob(RECORD))


def test_the_same_command_hands_over_says_where_and_reports(cluster, command, root):
    first = command("--detach")
    assert first.code == 0 and "2 runs: 2 new" in first.out
    assert "a s0  job 0 waits" in first.out and "b s0  job 1 waits" in first.out and "--cancel ends them" in first.out
    assert records(root) == [0, 1] and not (root / "reports").exists()

    cluster.train(0)
    cluster.finish(0)
    second = command("--detach")
    assert second.code == 0 and "2 runs: 1 finished, 1 submitted" in second.out and "job 1 waits" in second.out
    assert records(root) == [1] and len(cluster.works) == 2 and not (root / "reports").exists()

    cluster.train(1)
    again = command("--detach")  # nobody needs to have heard of the end of a job whose run is finished
    assert again.code == 0 and "2 runs: 2 finished" in again.out and "\nreport " in again.out
    assert not records(root) and len(cluster.works) == 2
    assert not [path for path in root.rglob("*") if path.name in (RECORD, MESSAGES, "launched")]


def test_a_command_that_waits_takes_over_what_another_has_submitted(cluster, command, root, monkeypatch):
    command("--detach", "--arms", "a")
    submit, taken = cluster.submit, []

    def settled(self, works, after):
        taken.append([child.job.number for child in self.running])
        jobs = submit(self, works, after)
        for number in (0, 1):
            cluster.train(number)
            cluster.finish(number)
        return jobs

    monkeypatch.setattr(cluster, "submit", settled)
    done = command()
    assert done.code == 0 and taken == [[0]] and "2 runs: 1 submitted, 1 new" in done.out
    assert "a seed 0 finished" in done.out and "b seed 0 finished" in done.out and "\nreport " in done.out


def test_a_lost_job_is_told_once_and_then_submitted_again(cluster, command, root):
    command("--detach")
    cluster.train(1)
    cluster.finish(1)
    cluster.finish(0, 1, "job 0 ended as NODE_FAIL")
    told = command("--detach")
    assert told.code == 1 and "✗ a seed 0 failed" in told.errors and "job 0 ended as NODE_FAIL" in told.errors
    assert "INCOMPLETE" in told.out and not records(root)
    assert command("--detach").code == 0 and records(root) == [2] and cluster.works[2].spec.arm == "a"


def test_a_job_that_the_cluster_has_forgotten_is_submitted_again(cluster, command, root):
    command("--detach", "--arms", "a")
    fresh = command("--fresh", "--detach", "--arms", "a")
    assert fresh.code == 2 and re.search(r"--fresh: a cluster has a-s0-\w+; end it with --cancel first", fresh.errors)
    cluster.outcomes[0] = "forgotten"
    again = command("--detach", "--arms", "a")
    assert again.code == 0 and not again.errors and records(root) == [1]


def test_cancel_ends_all_jobs_and_starts_none(cluster, command, root):
    command("--detach", "--arms", "a")
    ended = command("--cancel")
    assert ended.code == 0 and "a s0  cancelled: job 0 waits" in ended.out and "1 run cancelled" in ended.out
    assert not records(root) and len(cluster.works) == 1 and cluster.outcomes[0][0] == 1
    assert "0 runs cancelled" in command("--cancel").out
    command("--detach", "--arms", "a")
    assert records(root) == [1]


@pytest.mark.parametrize("ours", [True, False])
def test_an_end_of_the_command_ends_its_own_jobs_alone(cluster, make_spec, root, ours):
    spec = make_spec()
    rest = ([spec], 9, root, StoreURI(""), {"tiny": "parent"}, {})
    first = StandIn(*rest, settings={})
    first.hand_over()
    launcher = first if ours else StandIn(*rest, settings={})
    assert [child.ours for child in launcher.running] == [ours] and not launcher.waiting
    launcher.stop()
    assert (0 in cluster.outcomes) == ours and bool(recorded(spec.folder(root))) != ours


def test_runs_with_the_same_needs_are_one_array_behind_what_they_start_from(cluster, tree, root):
    from lit_memory.plan.experiment import parse

    init = {"train.init": {"run": "a"}}
    tree["arms"] = {"x": init, "y": {**init, "model.gamma": "off"}, "z": init, "a": {}, "b": {"model.gamma": "off"}}
    specs = parse(tree, "tiny.yaml").at().plan()
    launcher = StandIn(specs, 9, root, StoreURI(""), {"tiny": "parent"}, {}, settings={})
    launcher.hand_over()
    assert cluster.batches == [(["a"], None), (["x", "z"], 0), (["y"], 0), (["b"], None)]
    limited = StandIn([specs[3]], 0, root / "other", StoreURI(""), {"tiny": "parent"}, {}, settings={})
    limited.hand_over()
    assert not limited.running and limited.left


def test_a_signal_waits_until_a_job_is_on_record(cluster, make_spec, root, monkeypatch):
    import os
    import signal

    from lit_memory.run.launchers.base import Interrupted

    submit = cluster.submit

    def interrupted(self, works, after):
        os.kill(os.getpid(), signal.SIGTERM)
        return submit(self, works, after)

    monkeypatch.setattr(cluster, "submit", interrupted)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    launcher = StandIn([make_spec()], 9, root, StoreURI(""), {"tiny": "parent"}, {}, settings={})
    try:
        with pytest.raises(Interrupted):
            launcher.hand_over()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert records(root) == [0]


def test_a_root_that_no_worker_sees_is_wrong_input(cluster, command, root, monkeypatch):
    submit = cluster.submit

    def blind(self, works, after):
        for number in range(len(works)):
            cluster.finish(number, NOT_SHARED)
        return submit(self, works, after)

    monkeypatch.setattr(cluster, "submit", blind)
    wrong = command()
    assert wrong.code == 2 and wrong.errors.count("\n") == 1
    assert "--root: the machine that got it does not see" in wrong.errors and not records(root)


BAD = {
    "detached here": (("detach",), "local", "--detach: runs of this machine end with their command; use nohup or tmux"),
    "cancelled here": (("cancel",), "local", "--cancel: runs of this machine end with their command; use nohup"),
    "counted": (("detach", "jobs"), "slurm", "--jobs: --detach: nobody is left to count them; limit them in the"),
}


@pytest.mark.parametrize("name", BAD)
def test_flags_that_make_no_sense_are_one_line(name, cluster, tmp_path):
    flags, launcher, expected = BAD[name]
    with pytest.raises(ConfigError) as error:
        Choice.of(Options(launcher=launcher, **dict.fromkeys(flags, 1)), tmp_path, StoreURI(""))
    assert expected in str(error.value) and "\n" not in str(error.value)
