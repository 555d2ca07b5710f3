"""What the project writes to MLflow and reads back."""

import dataclasses
import math

import pytest
import records
import yaml

from lit_memory.plan.sections import ReportConfig
from lit_memory.run import checkpoint
from lit_memory.run.frame import results_frame, validations
from lit_memory.run.journal import Journal
from lit_memory.run.outbox import Outbox
from lit_memory.run.search import pages
from lit_memory.run.tracking import PARENT, Tracker, default_uri

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy


@pytest.fixture
def tracker(root):
    return Tracker(root)


@pytest.fixture
def start(tracker, make_spec):
    """``start(seed)`` opens the run of a seed: its spec and run id."""
    parent = tracker.parent("tiny", "default", {})

    def open_run(seed=0):
        spec = dataclasses.replace(make_spec(), seed=seed)
        return spec, tracker.start(spec, tracker.find(spec.key), parent, {"commit": "abc"}, {"seed": seed})

    return open_run


def test_default_uri(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert default_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert default_uri(tmp_path) == "http://server:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert default_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"


def test_the_tracker_takes_the_environment_unless_told(root, make_root, monkeypatch):
    other = make_root("other")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{other}/mlflow.db")
    assert Tracker(root).uri.text == f"sqlite:///{other}/mlflow.db"
    assert Tracker(root, f"sqlite:///{root}/mlflow.db").uri.text == f"sqlite:///{root}/mlflow.db"


def test_one_parent_per_experiment_and_scale(tracker):
    first = tracker.parent("tiny", "cpu", {"paper": "2407.04841"})
    assert tracker.parent("tiny", "cpu", {}) == first
    assert len({first, tracker.parent("tiny", "paper", {}), tracker.parent("other", "cpu", {})}) == 3
    run = tracker.client.get_run(first)
    assert run.info.run_name == "tiny (cpu)"
    expected = {"lit.kind": "experiment", "lit.experiment": "tiny", "lit.scale": "cpu", "lit.paper": "2407.04841"}
    assert expected.items() <= run.data.tags.items()


def test_a_child_knows_its_parent_and_its_key(tracker, make_spec):
    spec, parent = make_spec(), tracker.parent("tiny", "default", {})
    run = tracker.client.get_run(tracker.start(spec, None, parent, {"commit": "abc"}, {"lr": 0.1}))
    assert run.info.run_name == spec.name and run.info.status == "RUNNING" and run.data.params == {"lr": "0.1"}
    expected = {
        "kind": "run",
        "key": spec.key,
        "experiment": "tiny",
        "arm": "a",
        "scale": "default",
        "seed": "0",
        "point": "",
        "commit": "abc",
    }
    assert all(run.data.tags.get(f"lit.{k}", "") == v for k, v in expected.items()) and run.data.tags[PARENT] == parent
    assert run.info.artifact_uri.startswith((tracker.root / "mlruns" / "tiny").as_uri())


def test_parameters_are_logged_in_full(tracker, make_spec):
    """Lightning cuts them to 250 characters; MLflow takes 6,000."""
    params = {"stages": "x" * 5999, "trainer": "y" * 7000}
    run = tracker.client.get_run(tracker.start(make_spec(), None, tracker.parent("tiny", "default", {}), {}, params))
    assert run.data.params == {"stages": "x" * 5999, "trainer": "y" * 6000}


@pytest.mark.parametrize("status", ["RUNNING", "FAILED", "KILLED"])
def test_a_resumed_run_goes_on_in_the_same_run(tracker, start, status):
    spec, run_id = start()
    records.log(tracker, run_id, {"train/loss": 1.0}, 3)
    if status != "RUNNING":
        tracker.tag(run_id, {"error": "out of memory"})
        tracker.end(run_id, status)
    assert tracker.find(spec.key).status == status
    assert start()[1] == run_id
    run = tracker.find(spec.key)
    assert (run.run_id, run.status, run.metrics) == (
        run_id,
        "RUNNING",
        {"train/loss": 1.0},
    ) and "lit.error" not in run.tags
    assert start(1)[1] != run_id


def test_results_are_rows_with_x_as_their_step(tracker, start):
    spec, run_id = start()
    rows = [("exact_match", 2, 0.5), ("exact_match", 500, 0.25), ("loss", 2, math.nan), ("loss", 500, 1e-9)]
    records.log(tracker, run_id, {"valid/loss": 3.0}, 7)
    records.finish(tracker, run_id, rows, {"steps": 7, "seconds": 1.5})
    run = tracker.find(spec.key)
    assert run.status == "FINISHED" and run.metrics["steps"] == 7 and run.metrics["valid/loss"] == 3.0
    found = {(name, x): value for name, x, value in tracker.results(run)}
    assert found == pytest.approx({(name, x): value for name, x, value in rows}, nan_ok=True)
    history = tracker.client.get_metric_history(run_id, "test/exact_match")
    assert [(m.step, m.value) for m in history] == [(2, 0.5), (500, 0.25)]


def test_a_run_is_linked_to_its_data_and_its_model(root, make_spec, tree):
    """Runs with the same task share their data sets; a run that trains nothing has none to train on, and no model."""
    tracker = Tracker(root)
    checkpoint.save(checkpoint.path_of(make_spec().folder(root), 7), lambda file: file.write(b"x"))
    sets, whole = [], make_spec()
    tested = dataclasses.replace(whole, train=whole.train | {"steps": 0, "stages": []})
    for spec in (whole, make_spec("model.layers=3"), make_spec("task.pairs=1"), tested):
        story = Journal(spec.folder(root))
        story.begin({}, {"lr": 0.1})
        story.finish([], {"result/loss at 2": 0.5})
        (outbox := Outbox(spec, root, lambda: tracker)).send()
        outbox.lease.end()
        run = tracker.client.get_run(outbox.run_id)
        sets.append({i.dataset.name.split()[1]: i.dataset.digest for i in run.inputs.dataset_inputs})
        assert len(run.outputs.model_outputs) == bool(spec.stages)
    assert sets[0] == sets[1] and not {*sets[0].values()} & {*sets[2].values()} and [*sets[3]] == ["test"]
    models = tracker.client.search_logged_models([run.info.experiment_id], order_by=[{"field_name": "name"}])
    (model,) = (model for model in models if model.tags["lit.key"] == whole.key)
    assert len(models) == 3 and (model.name, model.model_type) == ("a-s0", "armt")
    assert model.params["memory_dim"] == str(whole.model["memory_dim"])
    assert (root / model.tags["lit.weights"]).read_bytes() == b"x" and model.metrics[0].value == 0.5


def test_finished_is_written_last(tracker, start, monkeypatch):
    spec, run_id = start()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(tracker.client, "log_batch", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("disk full")))
        records.finish(tracker, run_id, [("exact_match", 2, 0.5)], {})
    assert tracker.find(spec.key).status == "RUNNING"


def test_find_prefers_what_is_finished(tracker, start):
    spec, run_id = start()
    records.finish(tracker, run_id, [], {})
    tags = tracker.client.get_run(run_id).data.tags
    newer = tracker.client.create_run(
        tracker.experiments.id_of("tiny"), tags={k: v for k, v in tags.items() if k.startswith("lit.")}
    )
    assert newer.info.run_id != run_id and tracker.find(spec.key).run_id == run_id
    assert tracker.find("no such key") is None


def test_a_store_with_more_experiments_than_a_page(tracker, start, monkeypatch):
    """Others may have made a thousand since ours, on a server of a team."""
    found = tracker.client.search_experiments
    pages_of_two = lambda max_results=2, **options: found(max_results=min(2, max_results), **options)  # noqa: E731
    monkeypatch.setattr(tracker.client, "search_experiments", pages_of_two)
    spec, run_id = start()
    records.finish(tracker, run_id, [], {})
    for name in "abcd":
        tracker.client.create_experiment(name)
    assert tracker.find(spec.key).run_id == run_id
    assert tracker.parent("tiny", "default", {}) == tracker.parent("tiny", "default", {})
    assert [e.name for e in pages(tracker.client.search_experiments)][:4] == [*"dcba"]


def test_a_retired_run_is_out_of_all_plans(tracker, start):
    spec, run_id = start()
    records.finish(tracker, run_id, [("exact_match", 2, 0.5)], {"steps": 1})
    tracker.retire(run_id)
    assert tracker.find(spec.key) is None and tracker.client.get_run(run_id).info.status == "FINISHED"
    again, new_id = start()
    assert again == spec and new_id != run_id and tracker.find(spec.key).run_id == new_id


def test_a_frame_holds_the_finished_runs_of_a_plan(tracker, start):
    opened = [start(seed) for seed in range(3)]
    for i, (_, run_id) in enumerate(opened[:2]):
        records.finish(tracker, run_id, [("exact_match", 2, 0.5 + i), ("exact_match", 4, 0.25)], {"steps": 6 + i})
    records.log(
        tracker, opened[2][1], {"test/exact_match": 0.9, "steps": 8}, 2
    )  # as if it had died between the results and FINISHED
    tracker.end(opened[2][1], "FAILED")
    specs = [spec for spec, _ in opened]
    runs = {spec.key: tracker.find(spec.key) for spec in specs}
    report = ReportConfig(x="test_pairs")
    table = results_frame(tracker, specs, runs, report)
    assert list(table.columns) == ["arm", "point", "seed", "x", "metric", "value"]
    rows = set(table.itertuples(index=False, name=None))
    assert {row for row in rows if row[4] == "exact_match"} == {
        ("a", "", s, x, "exact_match", 0.25 if x == 4 else 0.5 + s) for s in (0, 1) for x in (2, 4)
    }
    assert {row for row in rows if row[4] == "steps"} == {
        ("a", "", s, x, "steps", 6.0 + s) for s in (0, 1) for x in (2, 4)
    }
    assert "later_steps" not in {row[4] for row in rows}
    tracker.tag(opened[0][1], {"stage_steps": "4 1 1"})
    tracker.tag(opened[1][1], {"stage_steps": "7"})
    staged = results_frame(tracker, specs, {spec.key: tracker.find(spec.key) for spec in specs}, report)
    later = [row for row in staged.itertuples(index=False, name=None) if row[4] == "later_steps"]
    assert later == [("a", "", 0, x, "later_steps", 2.0) for x in (2, 4)]
    assert (
        set(results_frame(tracker, specs[1:], runs, report).seed) == {1}
        and results_frame(tracker, specs, {}, report).empty
    )


def test_curves_are_read_ahead(tracker, start, monkeypatch):
    """In one call per metric, not one per run."""
    opened = [start(seed) for seed in range(2)]
    for _, run_id in opened:
        records.log(tracker, run_id, {"valid/exact_match": 0.5}, 3)
        records.finish(tracker, run_id, [("exact_match", 2, 0.5)], {"steps": 6})
    specs = [spec for spec, _ in opened]
    runs = {spec.key: tracker.find(spec.key) for spec in specs}
    monkeypatch.setattr(tracker.client, "get_metric_history", lambda *arguments: pytest.fail("one call more"))
    found = validations(tracker, specs, runs, ReportConfig(x="test_pairs", y="exact_match"))
    assert found == {("a", "exact_match", 3.0, seed): 0.5 for seed in range(2)}


def test_tags_and_artifacts(tracker, root, start, tmp_path):
    spec, run_id = start()
    tracker.tag(run_id, {"verdict": "REPRODUCED", "error": "x" * 4000})
    tags = tracker.client.get_run(run_id).data.tags
    assert tags["lit.verdict"] == "REPRODUCED" and tags["lit.error"] == "x" * 4000
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "table.csv").write_text("a,b\n")
    tracker.files.add_folder(run_id, tmp_path / "report")
    files = {path.name: path.read_text() for path in (root / "mlruns" / "tiny").rglob("*") if path.is_file()}
    assert files.pop("table.csv") == "a,b\n"
    assert yaml.safe_load(files.pop("config.yaml")) == spec.config() and not files
