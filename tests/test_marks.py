"""Marks over the reports of other experiments."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from report_data import make_plan

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.report.marks import Summary, has_marks
from lit_memory.report.marks_page import render_marks
from lit_memory.report.results import Results
from lit_memory.report.saved import plan_json
from lit_memory.run.tracking import Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
ROOT = Path(__file__).parents[1]
SUMMARIES = [path for path in sorted((ROOT / "experiments").glob("*.yaml")) if "\nmarks:" in path.read_text()]


@pytest.fixture
def folder(tree, root, monkeypatch):
    """An experiment ``tiny`` with arms a and b, its report for two seeds, and a summary of it; nothing comes with the
    project."""
    monkeypatch.setattr("lit_memory.report.marks.PROJECT", root / "project")
    tree |= {"experiment": "tiny", "seeds": [0, 1]}
    tree["base"]["task"]["test_pairs"] = [2, 4]
    (root / "tiny.yaml").write_text(yaml.safe_dump(tree))
    rows = [
        "arm,x,metric,mean,std,n,seed_0,seed_1",
        "a,2,exact_match,0.95,0,2,0.9,1.0",
        "a,4,exact_match,0.9,0,2,0.9,0.9",
    ]
    rows += ["b,2,exact_match,0.5,0,2,0.4,0.6", "b,4,exact_match,0.5,0,1,0.5,"]
    (root / "reports" / "tiny").mkdir(parents=True)
    (root / "reports" / "tiny" / "table.csv").write_text("\n".join(rows) + "\n")
    plan = make_plan(["a", "b"], [0, 1], [2, 4], expect=[])
    (root / "reports" / "tiny" / "report.json").write_text(plan_json(Results(plan, {})))
    return root


def write(folder, **changes):
    abilities = {
        "Working Memory": {"experiment": "tiny", "+": "model[2] >= 0.4", "++": ["model[2] >= 0.9", "model[4] >= 0.9"]},
        "Length extrapolation": {"experiment": "tiny", "+": "model[last] >= 0.8"},
    }
    marks = {"paper_values": "armt_table2_abilities", "models": {"a": "ARMT", "b": "RMT"}, "abilities": abilities}
    tree = {
        "experiment": "marks",
        "paper": {"title": "A paper", "item": "Table 2", "claim": "a has more"},
        "marks": marks | changes,
    }
    (folder / "marks.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return str(folder / "marks.yaml")


def test_a_report_of_a_named_scale(folder):
    """It is read at that scale whatever the summary's, and missing by its name where there is none."""
    tree = yaml.safe_load((folder / "tiny.yaml").read_text()) | {"scales": {"cpu": {}, "big": {}}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    table = folder / "reports" / "tiny" / "big" / "table.csv"
    abilities = {"LM": {"experiment": "tiny/big", "+": "model[2] >= 0.9"}}
    file = write(folder, abilities=abilities)
    assert Summary.load(file, folder).missing == ["tiny/big"]
    report = render_marks(Summary.load(file, folder), folder, "run.py")
    assert report.missing == ["reports/tiny/big: python run.py experiments/tiny.yaml --scale big"]
    table.parent.mkdir()
    shutil.copy(table.parents[1] / "report.json", table.parent)
    table.write_text((table.parents[1] / "table.csv").read_text().replace("0.4,0.6", "0.9,1.0"))
    for scale in (None, "cpu"):
        found = Summary.load(file, folder, scale)
        assert [found.mark("LM", arm).mark for arm in "ab"] == ["+", "+"]
        assert found.scale_shown == "scale big" and found.names == ["tiny/big"]


def test_the_first_arm_may_start_from_another_one(folder):
    tree = yaml.safe_load((folder / "tiny.yaml").read_text())
    tree["arms"] = {"a": {"train.init": {"run": "b"}}, "b": {}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    assert Summary.load(write(folder), folder).evidence == "toy"


def test_a_mark_is_the_strongest_whose_lines_hold(folder):
    found = Summary.load(write(folder), folder)
    cells = {(a, arm): found.mark(a, arm) for a in found.config.abilities for arm in "ab"}
    assert {key: (cell.mark, cell.paper, cell.agrees) for key, cell in cells.items()} == {
        ("Working Memory", "a"): ("++", "+", False),
        ("Working Memory", "b"): ("+", "+", True),
        ("Length extrapolation", "a"): ("+", "++", False),
        ("Length extrapolation", "b"): ("?", "+", None),  # it lacks a seed
    }
    assert [claim.numbers for claim in cells["Length extrapolation", "a"].claims] == ["0.900 >= 0.8 ✓"]


@pytest.mark.parametrize(
    ("least", "seeds", "verdict"),
    [
        ({"+": "model[2] >= 0.4"}, "1.0,1.0", "REPRODUCED, exploratory (2 seeds)"),
        ({"++": "model[2] >= 0.4"}, "1.0,1.0", "NOT REPRODUCED, exploratory (2 seeds)"),
        ({"+": "model[2] >= 0.4"}, "0.4,1.0", "INCONCLUSIVE, exploratory (2 seeds)"),
        ({"+": "model[2] >= 0.4", "++": "model[2] >= 1"}, "0.4,1.0", "INCONCLUSIVE, exploratory (2 seeds)"),
        ({"+": "model[4] >= 0.4"}, "1.0,1.0", "INCOMPLETE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_verdict_compares_with_the_paper(unsaved_figures, folder, capsys, least, seeds, verdict):
    """Through the command, which trains nothing; the report lies on the disk and in MLflow. Where two seeds of both
    models agree, the marks are sure."""
    table = folder / "reports" / "tiny" / "table.csv"
    table.write_text(table.read_text().replace("0.9,1.0", seeds).replace("0.4,0.6", seeds))
    path = write(folder, abilities={"Working Memory": {"experiment": "tiny"} | least})
    assert main([path, "--root", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "marks (scale default): from 1 report, 0 missing" in out and verdict in out.splitlines()
    written = folder / "reports" / "marks"
    assert {p.name for p in written.iterdir()} == {
        "README.md",
        "figure.png",
        "figure.pdf",
        "table.csv",
        "table.md",
        "verdict.json",
    }
    verdict, _, scope = verdict.partition(",")
    page = (written / "README.md").read_text()
    assert f"**{verdict}** at scale default (toy){',' * bool(scope)}{scope}" in page
    assert ("+ perhaps |" in page) == (verdict == "INCONCLUSIVE")
    assert json.loads((written / "verdict.json").read_text())["verdict"] == verdict
    tracker = Tracker(folder)
    assert tracker.client.get_run(tracker.parent("marks", "default", {})).data.tags["lit.verdict"] == verdict


@pytest.mark.parametrize(("strongest", "verdict"), [(0.8, "INCONCLUSIVE"), (90, "NOT REPRODUCED")])
def test_the_papers_mark_may_be_excluded(unsaved_figures, folder, strongest, verdict):
    """Where intervals exclude the paper's two ticks, it does not matter whether there is one or none."""
    table = folder / "reports" / "tiny" / "table.csv"
    table.write_text(table.read_text().replace("0.9,1.0", "0.4,1.0"))
    lines = {"+": "model[2] >= 0.4", "++": f"model[2] >= {strongest}"}
    abilities = {"Length extrapolation": {"experiment": "tiny"} | lines}
    summary = Summary.load(write(folder, abilities=abilities), folder)
    mark = summary.mark("Length extrapolation", "a")
    assert (mark.measured, mark.paper, mark.refuted) == ("+ perhaps", "++", verdict == "NOT REPRODUCED")
    assert render_marks(summary, folder, "").verdict == verdict
    page = (folder / "reports" / "marks" / "README.md").read_text()
    assert ("than the paper's: Length extrapolation of ARMT." in page) == mark.refuted


def test_a_mark_that_holds_for_sure_excludes_the_weaker_ones(folder):
    """Also where a stronger one is open."""
    lines = {"+": "model[4] >= 0.8", "++": "model[2] >= 0.9"}
    summary = Summary.load(write(folder, abilities={"Working Memory": {"experiment": "tiny"} | lines}), folder)
    mark = summary.mark("Working Memory", "a")
    assert (mark.measured, mark.excluded) == ("++ perhaps", {"-"})


@pytest.mark.parametrize(
    ("requires", "mark", "verdict"),
    [
        ("model[2] >= 0.4", "+", "REPRODUCED"),
        ("model[2] >= 0.9", "? not learnt", "INCONCLUSIVE"),
        (["model[2] >= 0.4", "model.loss[2] < 9"], "?", "INCOMPLETE"),
    ],
)
def test_a_test_that_was_not_learnt_shows_no_lack(unsaved_figures, folder, requires, mark, verdict):
    """The paper's minus is not confirmed by a model that fails what is required; what was not measured is missing."""
    table = folder / "reports" / "tiny" / "table.csv"
    table.write_text(table.read_text().replace("0.9,1.0", "1.0,1.0").replace("0.4,0.6", "0.5,0.5"))
    abilities = {"Working Memory": {"experiment": "tiny", "requires": requires, "+": "model[2] >= 0.4"}}
    summary = Summary.load(write(folder, abilities=abilities), folder)
    assert summary.marks()["Working Memory", "b"].measured == mark and summary.evidence == "toy"
    assert render_marks(summary, folder, "").verdict == verdict
    page = (folder / "reports" / "marks" / "README.md").read_text()
    assert page.startswith("# marks · toy\n") and f"| RMT   | {mark} " in page


def test_a_report_that_does_not_exist_yet_is_named(folder, capsys):
    (folder / "reports" / "tiny" / "report.json").unlink()
    assert main([write(folder), "--root", str(folder), "--dry-run"]) == 0
    assert not (folder / "reports" / "marks").exists()
    done = render_marks(Summary.load(write(folder), folder), folder, "")
    assert done.paths["figure.png"].read_bytes().startswith(b"\x89PNG")
    assert done.missing == ["reports/tiny: python run.py experiments/tiny.yaml"] and "? (+)" in done.table


def test_every_model_may_have_an_experiment_of_its_own(folder):
    """A mark comes from the experiment of its model, which the page names with the models that it is for."""
    other = yaml.safe_load((folder / "tiny.yaml").read_text())
    other |= {"experiment": "other", "arms": {"b": {}}, "expect": ["b[2] > 0.1"], "requires": ["b[2] > 0"]}
    (folder / "other.yaml").write_text(yaml.safe_dump(other))
    (folder / "reports/other").mkdir()
    table = "arm,x,metric,mean,std,n,seed_0,seed_1\nb,2,exact_match,0.9,0,2,0.9,0.9\nb,4,exact_match,0.2,0,2,0.2,0.2\n"
    (folder / "reports/other/table.csv").write_text(table)
    shutil.copy(folder / "reports/tiny/report.json", folder / "reports/other")
    recall = {"experiment": {"a": "tiny", "b": "other"}, "+": "model[2] >= 0.8"}
    path = write(folder, abilities={"Working Memory": recall, "LM": {"experiment": "tiny", "+": "model[2] >= 0.8"}})
    found = Summary.load(path, folder)
    marks = {key: mark.mark for key, mark in found.marks().items()}
    working = {("Working Memory", "a"): "+", ("Working Memory", "b"): "+"}
    assert marks == working | {("LM", "a"): "+", ("LM", "b"): "-"} and found.names == ["tiny", "other"]
    page = render_marks(found, folder, "").paths["README.md"].read_text()
    assert "`tiny` (ARMT), `other` (RMT)" in page and "| LM | `tiny` |" in re.sub(" +", " ", page)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"abilities": {"A": {"experiment": {"a": "tiny"}, "+": "model[2] > 0"}}},
            "marks.abilities.A.experiment: expected one experiment, or one for each of a, b",
        ),
        ({"models": {"c": "ARMT"}}, "marks.abilities.Working Memory: expect[0] 'c[2] >= 0.9': no arm 'c'"),
        (
            {"abilities": {"A": {"experiment": "tiny"}}},
            'marks.abilities.A: expected an experiment and at least one of "+" and "++"',
        ),
        ({"abilities": {"A": {"experiment": "tiny", "+++": "model[2] > 0"}}}, "marks.abilities.A.+++: unknown key"),
        ({"abilities": {"A": {"experiment": "tinny", "+": "model[2] > 0"}}}, "no such file; did you mean"),
        ({"abilities": {"A": {"experiment": "tiny", "+": "model[3] > 0"}}}, "a[3]: 3 is not tested"),
        ({"paper_values": "nothing"}, "marks: paper_values=nothing: expected one of"),
        ({"models": []}, "marks.models: "),
        (
            {"abilities": {"A": {"experiment": "tiny", "requires": "c[2] > 0", "+": "model[2] > 0"}}},
            "marks.abilities.A: expect[0] 'c[2] > 0': no arm 'c'",
        ),
        (
            {"abilities": {"A": {"experiment": "tiny", "requires": "model[2] > 0"}}},
            'marks.abilities.A: expected an experiment and at least one of "+" and "++"',
        ),
    ],
)
def test_wrong_files(folder, changes, message):
    with pytest.raises(ConfigError) as caught:
        Summary.load(write(folder, **changes), folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", [["--arms", "a"], ["--fresh"], ["train.lr=1"]])
def test_flags_of_training_are_refused(folder, capsys, flag):
    assert main([write(folder), "--root", str(folder), *flag]) == 2
    assert "reads the reports of other experiments and trains nothing; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("scale", ["cpu", "gpu", "paper"])
@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.stem)
def test_every_summary_fits_its_experiments(path, scale, tmp_path):
    assert has_marks(path)
    found = Summary.load(str(path), tmp_path, scale)
    conditions = {ability for ability, _ in found.paper_marks}
    assert found.name == path.stem and set(found.config.abilities) <= conditions
    assert set(found.config.models.values()) <= {arm for _, arm in found.paper_marks}
