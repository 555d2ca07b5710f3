"""What the command line makes unanswerable is not checked, and an experiment without claims is a comparison."""

import json

import pytest

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import parse
from lit_memory.plan.measured import answerable, check_report
from lit_memory.report.gallery import counts, shown_verdicts
from lit_memory.report.verdict import VERDICTS, conclude

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]


@pytest.fixture
def run(root, inline, unsaved_figures, capsys):
    """``run(*argv)``: the command trains in this process; what it printed, and verdict.json."""

    def call(*argv):
        assert main([*argv, "--root", str(root)]) == 0
        (path,) = root.glob("reports/**/verdict.json")
        return capsys.readouterr().out, json.loads(path.read_text()), path.parent

    return call


def test_a_smoke_test_is_not_checked(run, write):
    """Few steps and other lengths on the command line: the numbers are there, and neither verdict is said."""
    file = write(
        expect=["a[4] > 2", "a[last] >= 0"],
        verify=["a[2] > 2"],
        report={"x": "test_pairs", "state_x": 4},
    )
    printed, verdict, folder = run(file, "train.steps=2", "task.test_pairs=[2,3]")
    assert verdict["verdict"] == "NOT CHECKED" and printed.count("NOT CHECKED") == 1 and "REPRODUCED" not in printed
    assert (
        "a[4] > 2 (a[4] is not tested); a[last] >= 0 (a[last] is not tested); trained for 2 steps in place of 6."
        in printed
    )
    assert [claim["line"] for claim in verdict["claims"]] == ["a[first] >= 0", "a[2] > 2"]
    assert "**NOT CHECKED** at scale" in (folder / "README.md").read_text() and "-modified-" in folder.name


def test_a_comparison_has_a_ranking(run, write, tree):
    """Without a paper and without lines the report ranks the arms, and shows no empty section of a paper."""
    for key in ("paper", "expect", "requires"):
        del tree[key]
    printed, verdict, folder = run(write())
    assert verdict["verdict"] == "COMPARISON" and "By exact match at 4, mean over seeds: 1. " in printed
    assert verdict["paper"]["title"] == "" and "the paper" not in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("edits", "overrides", "reasons"),
    [
        ({}, ["train.lr=0.1"], []),
        ({}, ["train.steps=60"], []),
        ({}, ["train.steps=5"], ["trained for 5 steps in place of 6"]),
        ({}, ["train.stages=[{steps: 2}, {steps: 2}]"], ["trained for 4 steps in place of 6"]),
        (
            {"arms": {"a": {}, "b": {"train.stages": [{"steps": 6}]}}},
            ["train.steps=5"],
            ["a trained for 5 steps in place of 6"],
        ),
        (
            {},
            ["task.test_pairs=[4]"],
            ["`a[2] + b[last] >= 0` (a[2] is not tested)", "`a[first] >= 0` (a[first] is not tested)"],
        ),
        ({}, ["task.test_pairs=[2]"], ["`a[2] + b[last] >= 0` (b[last] is not tested)"]),
        (
            {"requires": ["b[2] > 0"], "expect": ["a[4] > 0"]},
            ["task.test_pairs=[4]"],
            ["`b[2] > 0` (b[2] is not tested)"],
        ),
        ({"requires": [], "expect": []}, ["train.steps=5"], []),
        (
            {"requires": [], "expect": ["reach(a[2], 0.9) >= 2"]},
            ["task.test_pairs=[2]"],
            ["`reach(a[2], 0.9) >= 2` (a[2] to 4 is not tested)"],
        ),
    ],
)
def test_what_the_command_line_leaves(tree, edits, overrides, reasons):
    experiment = parse(tree | edits, "tiny.yaml").at()
    specs = experiment.plan(overrides)
    left = answerable(experiment, specs, [override.partition("=")[0] for override in overrides])
    assert left.unchecked == reasons
    check_report(left, specs)


def test_a_wrong_line_stays_an_error(tree):
    """Of the file itself: nothing but an x that is no longer tested is forgiven."""
    for line in ("c[2] > 0", "a[2] >", "a.exat_match[2] > 0"):
        experiment = parse(tree | {"expect": [line]}, "tiny.yaml").at()
        specs = experiment.plan(["train.lr=0.1"])
        with pytest.raises(ConfigError, match="expect"):
            check_report(answerable(experiment, specs, ["train.lr"]), specs)


def test_missing_runs_come_first():
    """INCOMPLETE before NOT CHECKED, and that before a comparison."""
    assert conclude([], ["a seed 0"], ["why"])[0] == "INCOMPLETE"
    assert conclude([], [], ["why"]) == ("NOT CHECKED", "The command line leaves the claim without an answer: why.")
    assert conclude([], []) == ("COMPARISON", "")


def test_the_gallery_counts_comparisons_where_there_are_some():
    class Card:
        def __init__(self, verdict):
            self.verdict, self.paper_key, self.paper_title = verdict, "", "Without a paper"

    assert shown_verdicts([Card("REPRODUCED")]) == list(VERDICTS)
    cards = [Card("REPRODUCED"), Card("COMPARISON")]
    assert shown_verdicts(cards) == [*VERDICTS, "COMPARISON"]
    assert counts(cards) == [["Without a paper", 1, 0, 0, 0, 1, 2], ["all", 1, 0, 0, 0, 1, 2]]  # type: ignore[arg-type]
