"""MLflow's system metrics on request, by MLflow's own variables."""

from types import SimpleNamespace

import pytest

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.run import machine
from lit_memory.run.engine import run_one
from lit_memory.run.journal import Journal, read
from lit_memory.run.tracking import Tracker

pytest.importorskip("psutil", reason="MLflow's system metrics need psutil")
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy


@pytest.fixture
def run(root, make_spec, monkeypatch):
    """``run(environment)``: train the tiny experiment; returns what MLflow has of it."""

    def train(environment):
        spec, tracker = make_spec(), Tracker(root)
        tags = machine.requested([spec], environment)
        run_one(spec, root, tracker.uri, tracker.parent("tiny", "default", {}), tags, lambda message: None)
        return tracker.find(spec.key), spec

    return train


def test_system_metrics_on_request(run, root):
    """They are metrics of the run, as MLflow names them, and no part of its key."""
    found, spec = run({machine.ENABLE: "true", machine.INTERVAL: "0.001"})
    names = {name for name in found.metrics if name.startswith("system/")}
    expected = {"cpu_utilization_percentage", "system_memory_usage_megabytes", "disk_usage_percentage"}
    assert {f"system/{name}" for name in expected} <= names and found.tags["lit.system_metrics"] == "0.001"
    assert 0 <= found.metrics["system/cpu_utilization_percentage"] <= 100
    steps = [step for name, step, *_ in read(spec.folder(root)).rows if name in names]
    assert min(steps) >= 0 and max(steps) < 1000  # seconds since the run began
    assert found.status == "FINISHED"


def test_no_system_metrics_without_request(run):
    found, _ = run({})
    assert not any(name.startswith("system/") for name in found.metrics) and "lit.system_metrics" not in found.tags


def test_samples_are_apart(tmp_path, monkeypatch):
    """Batches in between take none, and a run that goes on counts from its first beginning."""
    now = [1000.0]
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    journal = Journal(tmp_path)
    journal.began = now[0]
    monitor = SimpleNamespace(collect_metrics=int, aggregate_metrics=lambda: {"cpu": now[0]}, clear_metrics=int)
    calls = []
    before = machine.SystemMetrics(journal, 10, [monitor]).before(lambda: calls.append(now[0]))
    for now[0] in (1000, 1009, 1010, 1012, 1025):
        before()
    assert [row[:3] for row in read(tmp_path).rows] == [("system/cpu", 10, 1010), ("system/cpu", 25, 1025)]
    assert len(calls) == 5
    began = read(tmp_path).began
    assert began < float("inf") and Journal(tmp_path).began == began


@pytest.mark.parametrize(
    ("environment", "missing", "message"),
    [
        (
            {machine.ENABLE: "true"},
            "psutil",
            "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING: MLflow's system metrics need the package psutil; pip install "
            "psutil, or unset MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING",
        ),
        ({machine.ENABLE: "yes"}, "", "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING: 'yes': expected true or false"),
        (
            {machine.ENABLE: "1", machine.INTERVAL: "0"},
            "",
            "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL: '0': expected a number of seconds above 0",
        ),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(
    write, tmp_path, monkeypatch, capsys, environment, missing, message
):
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == missing else name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([write(), "--root", str(tmp_path / "root"), "--dry-run"]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "root").exists()


def test_a_gpu_needs_its_package(make_spec, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: 1)
    monkeypatch.setattr(machine, "find_spec", lambda name: name if name == "psutil" else None)
    spec = make_spec("train.accelerator=cuda")
    with pytest.raises(ConfigError, match=r"need the package nvidia-ml-py; pip install nvidia-ml-py, or unset"):
        machine.requested([spec], {machine.ENABLE: "true"})
    assert machine.requested([make_spec()], {machine.ENABLE: "true"}) == {"system_metrics": "10"}
