"""MLflow as people look at it: the parent run tells what was found, and runs have a number for every condition."""

import pytest

from lit_memory.cli import main
from lit_memory.run.search import search
from lit_memory.run.tracking import NOTE, Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy


def test_what_mlflow_shows(root, inline, unsaved_figures, write, capsys):
    """Description and metrics of the parent, columns of the runs, the experiment's kind, the page's address."""
    file = write()
    assert main([file, "train.steps=2", "--root", str(root)]) == 0
    printed, tracker = capsys.readouterr().out, Tracker(root)
    parent = tracker.client.get_run(tracker.parent("tiny", "default", {}))
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
