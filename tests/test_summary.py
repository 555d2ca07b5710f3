"""MLflow as people look at it: the parent run tells what was found, and runs have a number for every condition."""

import pytest

from lit_memory.cli import main
from lit_memory.run.folders import setting
from lit_memory.run.options import Options
from lit_memory.run.search import search
from lit_memory.run.tracking import NOTE, Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy


def parent_of(tracker, *flags):
    """The parent run of the tiny experiment with changes of the command line."""
    changes = Options(overrides=flags).changes
    return tracker.client.get_run(tracker.parent("tiny", setting("default", changes), {}))


def test_what_mlflow_shows(root, inline, unsaved_figures, write, capsys):
    """Description and metrics of the parent, columns of the runs, the experiment's kind, the page's address."""
    file = write()
    assert main([file, "train.steps=2", "--root", str(root)]) == 0
    printed, tracker = capsys.readouterr().out, Tracker(root)
    parent = parent_of(tracker, "train.steps=2")
    experiment = tracker.client.get_experiment(parent.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    page = f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning"
    assert printed.splitlines()[-1] == f"page     {page}"
    assert set(parent.data.metrics) == {f"{arm}/exact_match at {x}" for arm in "ab" for x in (2, 4)}
    note = parent.data.tags[NOTE]
    for text in ("### tiny", "**NOT CHECKED** at scale `default` (toy)", "`train.steps=2`", "Claim: a recalls", "| a "):
        assert text in note
    assert parent.data.tags["lit.modified"] == "train.steps=2" and parent.data.tags["lit.verdict"] == "NOT CHECKED"
    (runs,) = search(tracker.client, "tags.`lit.kind` = 'run'")
    assert len(runs) == 2
    for run in runs:
        assert run.tags["lit.modified"] == "train.steps=2"
        arm, tested = run.tags["lit.arm"], {(name, x): value for name, x, value in tracker.results(run)}
        for x in (2, 4):
            value = run.metrics[f"result/exact_match at {x}"]
            assert value == tested["exact_match", x] == parent.data.metrics[f"{arm}/exact_match at {x}"]
        assert not any(" at " in name for name, _ in tested)  # they are no results of their own
    assert main([file, "train.steps=2", "--root", str(root)]) == 0  # from the receipt, with the same last lines
    assert capsys.readouterr().out.splitlines()[-2:] == printed.splitlines()[-2:]


def test_every_report_has_a_parent_of_its_own(root, inline, unsaved_figures, write, monkeypatch):
    """With the provenance of the command that made it; one with missing runs leaves a complete one alone."""
    file, tracker = write(), Tracker(root)
    for flags in ([], ["train.steps=2"]):
        assert main([file, *flags, "--root", str(root)]) == 0
    parent = parent_of(tracker)
    assert parent.data.tags["lit.verdict"] == "INCONCLUSIVE" and parent.data.tags["lit.modified"] == ""
    assert parent_of(tracker, "train.steps=2").data.tags["lit.verdict"] == "NOT CHECKED"
    names = {item.path for item in tracker.client.list_artifacts(parent.info.run_id, "report")}
    assert names == {f"report/{path.name}" for path in (root / "reports/tiny").iterdir() if path.is_file()}
    write(arms={"a": {}, "c": {"train.lr": 0.1}}, expect=[])
    assert main([file, "--root", str(root), "--report"]) == 0
    assert parent_of(tracker).data.tags["lit.verdict"] == "INCONCLUSIVE"
    monkeypatch.setattr("lit_memory.run.tracking.provenance", lambda: {"commit": "another"})
    assert main([file, "--root", str(root)]) == 0
    assert parent_of(tracker).data.tags["lit.commit"] == "another"
