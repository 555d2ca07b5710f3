"""Grids: the points of a command line, the choice by validation alone, and what a report shows of all points."""

import csv
import dataclasses
import json
import math
import re

import pytest
import records
import yaml
from matplotlib.text import Text
from plans import plan
from report_data import make_frame, make_plan

from lit_memory import report as reports
from lit_memory.cli import main
from lit_memory.plan.experiment import parse
from lit_memory.plan.merging import parse_override
from lit_memory.plan.sections import ReportConfig
from lit_memory.report import figures
from lit_memory.report.budget import budget_table, unequal
from lit_memory.report.figures import grid_figure
from lit_memory.report.render import render, write
from lit_memory.report.results import Results
from lit_memory.report.settings import arm_settings
from lit_memory.run import reporting
from lit_memory.run.selection import chosen, wanted
from lit_memory.run.tracking import Run, Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
RATES = [0.1, 0.2, 0.4]


# Grids of the command line


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.lr=1e-3,3e-3", (1e-3, 3e-3)),
        ("train.lr= 1, 2", (1, 2)),
        ("model.gamma=clip,off", ("clip", False)),  # YAML, as everywhere
        ("task.test_pairs=[2,4]", [2, 4]),
        ("task.stories='a,b'", "a,b"),
        ("model={name: rmt, layers: 1}", {"name": "rmt", "layers": 1}),
    ],
)
def test_commas_make_a_grid(text, value):
    """Unless brackets, braces or quotes are around them."""
    found = parse_override(text)[1]
    assert found == value and type(found) is type(value)


def test_a_grid_of_the_command_line(tree):
    """Of all arms, in place of the file's axes for the key; its runs are those of a file with the same grid."""
    file = {"grid": {"arms.b.train.lr": [0.5, 0.6], "train.steps": [5, 6]}}
    specs = plan(tree, file, ["train.lr=0.1,0.2", "model.layers=2"])
    assert {(s.arm, s.point) for s in specs} == {
        (a, f"steps{n}-lr{lr}") for a in "ab" for n in (5, 6) for lr in RATES[:2]
    }
    same = plan(tree, {"grid": {"train.steps": [5, 6], "train.lr": [0.1, 0.2]}, "base/model/layers": 2})
    assert [spec.key for spec in specs] == [spec.key for spec in same]
    assert [spec.point for spec in plan(tree, file, ["train.lr=1,2", "train.lr=0.3,0.4"])][:2] == [
        "steps5-lr0.3",
        "steps5-lr0.4",
    ]


def test_a_command_line_trains_and_reports_a_grid(inline, unsaved_figures, root, write, capsys):
    """As a change of its own, with a report that has every point."""
    argv = [write(arms={"a": {}}, expect=[], requires=[]), "train.lr=1e-3,1e-2", "train.steps=3", "--root", str(root)]
    assert main(argv) == 0
    assert "2 runs: 2 new" in capsys.readouterr().out
    (folder,) = (root / "reports" / "tiny").glob("*-modified-*")
    rows = table(folder)
    assert [(row["train.lr"], row["status"], row["steps"]) for row in rows] == [
        ("0.001", "finished", "3"),
        ("0.01", "finished", "3"),
    ]
    assert [row["chosen"] for row in rows].count("yes") == 1
    assert main(argv) == 0 and "2 runs: 2 finished" in capsys.readouterr().out


# The choice


class Unread(dict):
    """Metrics of a run whose test may not be read."""

    def __getitem__(self, name):
        assert not name.startswith("test/"), "a test was read before the choice"
        return super().__getitem__(name)

    def get(self, name, default=None):
        assert not name.startswith("test/"), "a test was read before the choice"
        return super().get(name, default)

    def items(self):
        raise AssertionError("all metrics were read before the choice")

    values = items


def runs_of(specs, validated, status="FINISHED", metric="exact_match"):
    """Runs with these validations (metric, loss), and tests that would choose otherwise."""
    found = {}
    for spec in specs:
        value, loss = validated[spec.seed, spec.train["lr"]]
        metrics = {f"valid/{metric}": value, "valid/loss": loss, f"test/{metric}": -value, "test/loss": -loss}
        found[spec.key] = Run("id", status, metrics=Unread(metrics))
    return found


NAN = float("nan")
VALIDATED = {
    "every seed by itself": ([(0.1, 1), (0.9, 1), (0.5, 1)], [(0.9, 1), (0.1, 1), (0.5, 1)], [0.2, 0.1]),
    "the loss of equal ones": ([(1, 0.3), (1, 0.1), (1, 0.2)], [(1, 0.1), (0.5, 0.0), (1, 0.2)], [0.2, 0.1]),
    "the first of the same": ([(1, 0.1), (1, 0.1), (0, 0)], [(0, 0), (1, 0.1), (1, 0.1)], [0.1, 0.2]),
    "not a number": ([(NAN, 0), (0.1, NAN), (0.1, 2)], [(NAN, NAN), (NAN, 0), (NAN, 0)], [0.4, 0.2]),
}


@pytest.mark.parametrize(("first", "second", "best"), VALIDATED.values(), ids=VALIDATED)
def test_validation_chooses_per_seed_and_reads_no_test(tree, first, second, best):
    tree |= {"grid": {"train.lr": RATES}, "seeds": [0, 1]}
    experiment = parse(tree, "tiny.yaml").at()
    specs = experiment.plan()
    validated = {(seed, lr): v for seed, of in enumerate((first, second)) for lr, v in zip(RATES, of, strict=True)}
    shown = chosen(experiment, specs, runs_of(specs, validated))
    assert [(s.arm, s.seed, s.train["lr"]) for s in shown] == [(a, s, best[s]) for a in "ab" for s in (0, 1)]


@pytest.mark.parametrize(("select", "best"), [("", 0.4), ("loss", 0.1), ("exact_match", 0.4)])
def test_another_metric_may_choose(tree, select, best):
    experiment = parse(tree | {"grid": {"train.lr": RATES}, "select": select}, "tiny.yaml").at()
    specs = experiment.plan()
    validated = {(0, lr): (lr, lr) for lr in RATES}
    assert chosen(experiment, specs, runs_of(specs, validated))[0].train["lr"] == best


def test_a_run_that_has_not_finished_is_not_chosen(tree):
    experiment = parse(tree | {"grid": {"train.lr": RATES}}, "tiny.yaml").at()
    specs = experiment.plan()
    validated = {(0, lr): (1 - lr, lr) for lr in RATES}
    assert chosen(experiment, specs, runs_of(specs, validated, "RUNNING"))[0].point == "lr0.1"
    runs = runs_of(specs[:1], validated, "FAILED") | runs_of(specs[1:], validated)
    assert chosen(experiment, specs, runs)[0].point == "lr0.2"


def test_a_run_that_broke_down_is_not_chosen(tree):
    experiment = parse(tree | {"grid": {"train.lr": RATES}}, "tiny.yaml").at()
    specs = experiment.plan()
    runs = runs_of(specs, {(0, lr): (lr, 0.0) for lr in RATES})
    for spec in specs:
        dict.update(runs[spec.key].metrics, {"broke_down": 3.0} if spec.train["lr"] == 0.4 else {})
    assert chosen(experiment, specs, runs)[0].train["lr"] == 0.2


def test_who_came_further_is_better(tree):
    """Where a run ends with a stage that it does not solve, its last validation is of an easier task."""
    experiment = parse(tree | {"grid": {"train.lr": RATES}}, "tiny.yaml").at()
    specs = experiment.plan()
    runs = runs_of(specs, {(0, lr): (lr, 0.0) for lr in RATES})
    for spec in specs:
        dict.update(runs[spec.key].metrics, {"stage": 1.0 if spec.train["lr"] == 0.4 else 2.0})
    assert chosen(experiment, specs, runs)[0].train["lr"] == 0.2


# One choice for all seeds

OF_SEEDS = {0.1: (1.0, 0.0), 0.2: (0.8, 0.7), 0.4: (0.1, 0.9)}
"""Rate -> the validations of seeds 0 and 1, of which each by itself would choose another rate than both together."""


@pytest.fixture
def several(tree):
    """An experiment in which two of four seeds tune arm a, and its runs."""
    tree |= {"grid": {"arms.a.train.lr": RATES}, "seeds": [0, 1, 2, 3], "tune_seeds": [0, 1]}
    experiment = parse(tree, "tiny.yaml").at()
    return experiment, experiment.plan()


def tuning_runs(specs):
    found = [spec for spec in specs if spec.arm == "a" and spec.seed in (0, 1)]
    return runs_of(found, {(s.seed, s.train["lr"]): (OF_SEEDS[s.train["lr"]][s.seed], 1.0) for s in found})


def test_some_seeds_choose_for_all(several):
    experiment, specs = several
    shown = chosen(experiment, specs, tuning_runs(specs))
    assert [(spec.arm, spec.point, spec.seed) for spec in shown] == [
        (arm, point, seed) for arm, point in (("a", "lr0.2"), ("b", "")) for seed in range(4)
    ]


def test_the_other_seeds_wait_for_the_choice(several):
    """They train the chosen point alone, as soon as all runs that choose have ended, well or not."""
    experiment, specs = several
    runs = tuning_runs(specs)

    def needed():
        settled = lambda spec: spec.key in runs and runs[spec.key].status in ("FINISHED", "FAILED")  # noqa: E731
        return {(s.arm, s.point, s.seed) for s in wanted(experiment, specs, runs, settled)}

    before = {("a", f"lr{rate}", seed) for rate in RATES for seed in (0, 1)} | {("b", "", seed) for seed in range(4)}
    assert needed() == before | {("a", "lr0.2", 2), ("a", "lr0.2", 3)}
    best = next(spec for spec in specs if (spec.point, spec.seed) == ("lr0.2", 1))
    runs[best.key] = dataclasses.replace(runs[best.key], status="FAILED")
    assert needed() == before | {("a", "lr0.1", 2), ("a", "lr0.1", 3)}
    runs[best.key] = dataclasses.replace(runs[best.key], status="RUNNING")
    assert needed() == before


def test_arms_that_share_runs_choose_by_themselves(tree):
    """What one arm has chosen is not wanted of another one, though it is the same run."""
    grid = {"arms.a.train.lr": [0.1, 0.4], "arms.c.train.lr": RATES}
    tree |= {"arms": {"a": {}, "c": {}}, "grid": grid, "seeds": [0, 1, 2], "tune_seeds": [0, 1]}
    experiment = parse(tree | {"expect": [], "requires": []}, "tiny.yaml").at()
    specs = experiment.plan()
    tuning = [spec for spec in specs if spec.arm == "c" and spec.seed < 2]  # arm a has the same keys
    runs = runs_of(tuning, {(s.seed, s.train["lr"]): (OF_SEEDS[s.train["lr"]][s.seed], 1.0) for s in tuning})
    needed = wanted(experiment, specs, runs, lambda spec: True)
    assert [(s.arm, s.point) for s in needed if s.seed == 2] == [("a", "lr0.1"), ("c", "lr0.2")]


def test_one_command_tunes_and_goes_on(inline, unsaved_figures, root, write, capsys):
    """Then the report is whole, and the same command has nothing to do."""
    changes = {
        "arms": {"a": {}, "b": {}},
        "grid": {"arms.a.train.lr": [1e-3, 1e-2]},
        "seeds": [0, 1],
        "tune_seeds": [0],
    }
    argv = [write(**changes, expect=[], requires=[]), "--root", str(root)]
    assert main([*argv, "--dry-run"]) == 0
    assert "4 runs: 4 new; then 1 at the points that these choose" in capsys.readouterr().out
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.count("✓") == 5 and "INCOMPLETE" not in out
    folder = root / "reports" / "tiny"
    rows, page = table(folder), (folder / "README.md").read_text()
    assert [row["seed"] for row in rows if row["chosen"]] == ["0", "1"] and len(rows) == 3
    assert "Every arm has the point of its grid that is best over seed 0, by the mean exact match" in page
    assert "by which seed 0 chose a point for all" in page
    assert main([*argv, "--seeds", "0,1"]) == 0 and "5 runs: 5 finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tune_seeds": [4]}, "tune_seeds: 4: expected some of the seeds [0, 1]"),
        ({"tune_seeds": 0}, "tune_seeds: 0: expected a list of different whole numbers"),
        ({"grid": {}}, "tune_seeds: there is nothing to choose; expected a grid, or none"),
        ({"scales": {"small": {"tune_seeds": [0, 0]}}}, "scales.small.tune_seeds: [0, 0]: expected a list"),
    ],
    ids=str,
)
def test_wrong_seeds_of_a_tuning(root, write, capsys, changes, says):
    given = {"grid": {"train.lr": RATES}, "seeds": [0, 1], "tune_seeds": [0]} | changes
    assert main([write(**given), "--root", str(root), "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert not out and says in err and err.count("\n") == 1


# What a report shows


@pytest.fixture
def tuned(tree, root, tmp_path):
    """``tuned(statuses)``: the file of an experiment in which arm a has a grid and two seeds, with the runs in the
    store of ``root``. statuses: (rate, seed) -> status of runs that have not finished, by an error of the type
    ``cause``. Seed 0 validates best at 0.2,
    seed 1 at 0.4; the tests fall with the rate."""
    tree |= {"grid": {"arms.a.train.lr": RATES}, "seeds": [0, 1], "expect": [], "requires": []}
    path = tmp_path / "tiny.yaml"

    def make(statuses=None, cause="NonFinite"):
        path.write_text(yaml.safe_dump(tree))
        tracker = Tracker(root)
        parent = tracker.parent("tiny", "default", {})
        for spec in parse(tree, "tiny.yaml").at().plan():
            lr, statused = spec.train["lr"], statuses or {}
            status = statused.get((lr, spec.seed), "FINISHED")
            if status == "NEW":
                continue
            run_id = tracker.start(spec, None, parent, {}, {"parameters": 100, "state_floats": 10})
            value = 0.9 if lr == RATES[1 + spec.seed] else 0.5
            records.log(tracker, run_id, {"valid/exact_match": value, "valid/loss": lr}, 6)
            if status == "FINISHED":
                results = [(metric, x, 0.8 - lr - x / 100) for metric in ("exact_match", "loss") for x in (2, 4)]
                records.finish(tracker, run_id, results, {"steps": 6, "seconds": 60})
            else:
                tracker.tag(run_id, {"error": f"{cause}: it ended"})
                tracker.end(run_id, status)
        return str(path)

    return make


def table(folder):
    return list(csv.DictReader((folder / "grid.csv").read_text().splitlines()))


def test_a_report_shows_every_point_and_chooses_first(tuned, unsaved_figures, root, monkeypatch, capsys):
    """No test is read from the store before the choice, and tests would have chosen otherwise."""
    events, choose, results = [], reporting.chosen, Tracker.results

    def choosing(*args):
        events.append("choice")
        return choose(*args)

    def reading(self, run, prefix="test/"):
        events.append(prefix)
        return results(self, run, prefix)

    monkeypatch.setattr(reporting, "chosen", choosing)
    monkeypatch.setattr(Tracker, "results", reading)
    assert main([tuned(), "--root", str(root), "--report"]) == 0
    assert events.index("choice") == 0 and events.count("choice") == 1 and "test/" in events
    folder, out = root / "reports" / "tiny", capsys.readouterr().out
    rows = table(folder)
    assert {r["seed"]: r["train.lr"] for r in rows if r["chosen"]} == {"0": "0.2", "1": "0.4"} and len(rows) == 6
    for row in rows:
        assert float(row["exact_match@4"]) == 0.8 - float(row["train.lr"]) - 0.04
        assert row["valid_loss"] == row["train.lr"] and row["arm"] == "a"
    cells = reports.load(folder).by_seed("a", None, 2)
    assert cells == pytest.approx([0.8 - 0.2 - 0.02, 0.8 - 0.4 - 0.02])
    page, squeezed = (folder / "README.md").read_text(), re.sub(" +", " ", out)
    assert "| a | 0.2 | 0.700 ± 0.283 | 0.580 ± 0.000 | 0.560 ± 0.000 | 2 of 2 | 1 of 2 |" in squeezed
    assert "## Tuning" in page and "(grid.png)" in page and "[grid.pdf](grid.pdf)" in page
    assert "`model.name: armt, train.lr: 0.2 or 0.4, model.gamma: clip`" in page
    assert "- `a`: lr0.2 (seed 0), lr0.4 (seed 1), chosen on validation data" in page
    assert "> **Unequal tuning**: 3 settings tried for each seed of *a*, 1 of *b*; 18 steps allowed" in page
    budget = "| a | 3 | 6 | 0, 1 | 36 | 36 | 6.0 |"
    assert all(budget in re.sub(" +", " ", text) for text in (page, (folder / "sheet.md").read_text()))


def test_a_redrawn_report_keeps_its_points(tuned, root, monkeypatch):
    """And its bytes, those of the figure included."""
    monkeypatch.setattr(figures, "METADATA", {"png": figures.METADATA["png"]})
    monkeypatch.setattr(figures, "DPI", 50)
    file, folder = tuned(), root / "reports" / "tiny"
    assert main([file, "--root", str(root), "--report"]) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"grid.png", "grid.csv"} <= set(before)
    assert main(["--redraw", file, "--root", str(root)]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    results = reports.load(folder)
    write(dataclasses.replace(results, plan=dataclasses.replace(results.plan, grid=[])), folder)
    assert not [path for path in folder.iterdir() if path.name.startswith("grid")]


def test_a_grid_is_whole_before_a_verdict(tuned, unsaved_figures, root, capsys):
    """A choice among some of the points is none."""
    assert main([tuned({(0.1, 1): "NEW", (0.4, 0): "KILLED"}), "--root", str(root), "--report"]) == 0
    out = capsys.readouterr().out
    assert "INCOMPLETE; missing: " in out
    assert "INCOMPLETE; missing: a seeds 0, 1 at 1 of 3 grid points (new)\n" in out


def test_a_grid_of_which_nothing_has_finished(tuned, unsaved_figures, root, capsys):
    new = {(lr, seed): "NEW" for lr in (*RATES, 3e-4) for seed in (0, 1)}
    assert main([tuned(new), "--root", str(root), "--report"]) == 0
    out = capsys.readouterr().out
    assert "INCOMPLETE; missing: a seeds 0, 1 (new); b seeds 0, 1 (new)\n" in out
    assert not [row for row in table(root / "reports" / "tiny") if row["chosen"]]


def test_a_point_that_broke_down_has_lost(tuned, unsaved_figures, root, capsys):
    assert main([tuned({(0.4, 1): "FAILED"}), "--root", str(root), "--report"]) == 0
    assert "missing" not in capsys.readouterr().out
    rows = table(root / "reports" / "tiny")
    assert {r["seed"]: r["train.lr"] for r in rows if r["chosen"]} == {"0": "0.2", "1": "0.1"}
    lost = next(row for row in rows if row["status"] == "broke down")
    assert lost["exact_match@2"] == lost["valid_exact_match"] == ""
    assert "no candidates: a lr0.4 seed 1." in (root / "reports" / "tiny" / "README.md").read_text()


def test_a_point_that_failed_otherwise_is_waited_for(tuned, unsaved_figures, root, capsys):
    """A full disk or too little memory says nothing about its settings."""
    assert main([tuned({(0.4, 1): "FAILED"}, "OutOfMemoryError"), "--root", str(root), "--report"]) == 0
    assert "INCOMPLETE; missing: a seed 1 at 1 of 3 grid points (failed)\n" in capsys.readouterr().out
    assert "no candidates" not in (root / "reports" / "tiny" / "README.md").read_text()


def test_settings_and_sizes_that_seeds_do_not_share(tree):
    """All values are named, and a size that is not one number is none."""
    specs = plan(tree | {"seeds": [0, 1]}, {"grid": {"arms.b.model.layers": [1, 2]}})
    shown = [spec for spec in specs if not spec.point or spec.point == f"layers{1 + spec.seed}"]
    settings = arm_settings({"a": {}, "b": {"model.gamma": "off", "model.layers": [1, 2]}}, shown)
    assert settings["b"] == "`model.name: armt, model.gamma: off, model.layers: 1 or 2`"
    assert reporting.choices(shown) == ["`b`: layers1 (seed 0), layers2 (seed 1), chosen on validation data"]
    runs = [{"arm": "a", "seed": s, "parameters": 10 * s, "state_floats": 5} for s in (0, 1)]
    assert make_plan(["a"], runs=runs).sizes("a") == {"arm": "a", "state_floats": 5}


# Budgets


def budgeted(**arms):
    """A plan of arms with (settings, steps allowed in a run)."""
    runs = [
        {"arm": arm, "seed": seed, "steps": 50.0, "most_steps": most, "seconds": 30.0, "threads": 2}
        for arm, (_, most) in arms.items()
        for seed in (0, 1)
    ]
    grid = [
        run | {"point": f"lr{i}", "settings": {"train.lr": i}, "chosen": i == 0}
        for run in runs
        for i in range(arms[run["arm"]][0])
        if arms[run["arm"]][0] > 1
    ]
    return make_plan(list(arms), [0, 1], expect=[], runs=runs, grid=grid, labels={"a": "the first"})


@pytest.mark.parametrize(
    ("arms", "told"),
    [
        ({"a": (1, 100), "b": (1, 100)}, ""),
        ({"a": (2, 100), "b": (1, 100)}, ""),  # no more than twice as much
        ({"a": (3, 100), "b": (2, 100), "c": (3, 100)}, ""),
        (
            {"a": (3, 100), "b": (1, 100)},
            "**Unequal tuning**: 3 settings tried for each seed of *the first*, 1 of *b*; "
            "300 steps allowed for each seed of *the first*, 100 of *b*.",
        ),
        (
            {"a": (1, 100), "b": (1, 201)},
            "**Unequal training**: 201 steps allowed for each seed of *b*, 100 of *the first*.",
        ),
        (
            {"a": (1, 300), "b": (3, 100)},
            "**Unequal tuning**: 3 settings tried for each seed of *b*, 1 of *the first*.",
        ),
        ({"a": (1, 100), "b": (1, None)}, ""),  # not known
    ],
)
def test_unequal_budgets_are_told(arms, told):
    assert unequal(budgeted(**arms)) == told


def test_the_budget_counts_every_point():
    text = re.sub(" +", " ", budget_table(budgeted(a=(3, 100), b=(1, 100))))
    assert "| arm | settings tried | runs | seeds | steps | at most | core-minutes |" in text
    assert "| the first | 3 | 6 | 0, 1 | 300 | 600 | 6.0 |" in text and "| b | 1 | 2 | 0, 1 | 100 | 200 | 2.0 |" in text
    assert "| all | 4 | 8 | | 400 | 800 | 8.0 |" in text
    old = budget_table(make_plan(runs=[{"arm": "gamma", "seed": 0, "steps": 5}]))
    assert "| gamma | 1 | 0 | 5 | 0.0 |" in re.sub(" +", " ", old) and budget_table(make_plan(runs=[])) == ""


def test_what_an_arm_starts_from_counts(tree, root):
    """An arm that trains nothing has the steps of the run whose weights it tests."""
    tree["arms"]["b"] = {"train.init": {"run": "a"}, "train.steps": 0}
    specs = parse(tree, "tiny.yaml").at().plan()
    from lit_memory.run.options import Options
    from lit_memory.run.sweep import Sweep
    from lit_memory.run.worklist import WorkList

    whole = parse(tree, "tiny.yaml")
    work = WorkList(Sweep(Options("tiny.yaml"), whole, whole.at(), specs, specs, {}, root))
    assert [reporting.run_facts(work, spec)["most_steps"] for spec in specs] == [6, 6]


# The figure


def pointed(settings, valid, select="exact_match", **changes):
    """Results with runs of arm a at these settings, and their validations for each of two seeds."""
    grid = [
        {"arm": "a", "seed": seed, "point": str(i), "settings": own, "status": "finished", "valid": of_seed}
        | {"valid_loss": 0.5, "test": [0.5, None], "chosen": i == seed}
        for i, (own, values) in enumerate(zip(settings, valid, strict=True))
        for seed, of_seed in enumerate(values)
    ]
    frame = make_frame(["a", "b"], [0, 1], [2, 4], value=lambda arm, seed, x: 0.5)
    made = make_plan(["a", "b"], [0, 1], [2, 4], expect=[], grid=grid, select=select, config=ReportConfig(), **changes)
    return Results.from_frame(made, frame)


def lines_of(axes):
    return [line for line in axes.lines if line.get_label() == "a"]


def test_the_figure_against_a_rate():
    """The axis is logarithmic, whatever the range; a ring for what each seed has chosen."""
    results = pointed(
        [{"train.lr": 2e-3}, {"train.lr": 1e-3}, {"train.lr": 4e-3}], [(0.4, 0.6), (0.2, 0.3), (None, None)]
    )
    (axes,) = grid_figure(results).axes
    (line,) = lines_of(axes)
    assert line.get_xdata() == pytest.approx([-3, -2.69897]) and line.get_ydata() == pytest.approx([0.25, 0.5])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.001", "0.002", "0.004"]
    assert axes.get_xlabel() == "learning rate" and axes.get_ylabel() == "exact match, validation"
    rings = next(line for line in axes.lines if line.get_markersize() == 11 and len(line.get_xdata()))
    assert list(rings.get_ydata()) == [0.4, 0.3]


def test_the_figure_against_several_keys():
    """A panel for each: the best that the other keys allow, of words in the order of the grid."""
    settings = [{"train.lr": lr, "model.gamma": g} for lr in (0.1, 1.0) for g in ("raw", "off")]
    results = pointed(settings, [(4.0, 5.0), (3.0, 6.0), (2.0, 9.0), (8.0, 1.0)], "loss")
    left, right = grid_figure(results).axes
    assert lines_of(left)[0].get_ydata() == pytest.approx([4.0, 1.5])
    assert lines_of(right)[0].get_ydata() == pytest.approx([3.5, 2.0])
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["raw", "off"] and right.get_xlabel() == "gamma"
    assert left.get_yscale() == "log"  # of what is minimized, as in the figure of the training


def test_the_figure_has_the_point_that_is_best_for_all():
    """Where some seeds choose a point for all: not the best point of each, by which any value would look better."""
    settings = [{"train.lr": lr, "model.gamma": g} for lr in (0.1, 1.0) for g in ("raw", "off")]
    results = pointed(settings, [(4.0, 5.0), (3.0, 6.5), (2.0, 9.0), (8.0, 1.0)], "loss")
    results = dataclasses.replace(results, plan=dataclasses.replace(results.plan, tune_seeds=[0, 1]))
    left, right = grid_figure(results).axes
    assert lines_of(left)[0].get_ydata() == pytest.approx([4.5, 4.5])
    assert lines_of(right)[0].get_ydata() == pytest.approx([4.5, 4.5])
    dots = [y for line in left.lines if line.get_marker() == "." for y in line.get_ydata()]
    assert sorted(dots) == [1.0, 4.0, 5.0, 8.0]


@pytest.mark.parametrize(("worst", "limits"), [(0.9, (0.8855, 1.0045)), (0.2, (-0.03, 1.04))])
def test_the_figure_looks_close_at_small_differences(worst, limits):
    results = pointed([{"train.lr": 1e-3}, {"train.lr": 2e-3}], [(worst, 0.99), (0.99, 0.98)])
    (axes,) = grid_figure(results).axes
    assert axes.get_ylim() == pytest.approx(limits, abs=3e-3)


@pytest.mark.parametrize(("last", "shown"), [(13.0, True), (5.2, False)])
def test_a_mean_far_off_is_a_number_at_the_edge(last, shown):
    """So that the others can be told apart: the axis of losses ends before it, and its line leads there."""
    points = [(5.0, 5.02), (5.04, 5.06), (5.1, 5.12), (last, last)]
    results = pointed([{"train.lr": rate} for rate in (1e-3, 2e-3, 4e-3, 8e-3)], points, select="perplexity")
    figure = grid_figure(results)
    (axes,) = figure.axes
    marks = [text.get_text() for text in figure.findobj(Text) if text.get_text().startswith("↑")]
    assert marks == (["↑ 13"] if shown else []) and axes.get_ylim()[1] < 5.3
    assert lines_of(axes)[0].get_ydata()[-1] == pytest.approx(last)


def test_points_that_stopped_at_a_stage(tmp_path, monkeypatch):
    """They have the stage in place of a validation, which was on an easier task; the figure leaves them out."""
    monkeypatch.setattr("lit_memory.report.render.draw", lambda *args: {})
    results = pointed([{"train.lr": 1e-3}, {"train.lr": 2e-3}], [(0.9, 0.8), (0.25, 0.75)])
    results.plan.grid[0] |= {"stage_steps": [5], "stages": 3}
    found = render(results.plan, make_frame(["a", "b"], [0, 1], [2, 4], value=lambda *args: 0.5), tmp_path)
    rows = list(csv.DictReader((tmp_path / "grid.csv").read_text().splitlines()))
    assert [row["stopped_at"] for row in rows] == ["1 of 3", "", "", ""] and rows[0]["valid_exact_match"] == "0.9"
    table = re.sub(" +", " ", found.table)
    assert "| arm | learning rate | stopped at stage | validation |" in table.replace("train.lr", "learning rate")
    assert "| a | 0.001 | 1 of 3 | 0.800 |" in table and "| a | 0.002 | – | 0.500 ± 0.354 |" in table
    assert "has no validation here" in table
    results.plan.runs.append({"arm": "a", "seed": 0, "steps": 5, "stage_steps": [5], "stages": 3})
    render(results.plan, make_frame(["a", "b"], [0, 1], [2, 4], value=lambda *args: 0.5), tmp_path)
    assert "5 (5; stopped at stage 1 of 3)" in (tmp_path / "README.md").read_text()
    (axes,) = grid_figure(results).axes
    assert lines_of(axes)[0].get_ydata() == pytest.approx([0.8, 0.5])


def test_points_are_compared_over_the_seeds_that_choose(tmp_path, monkeypatch):
    """The others have trained the chosen point alone; they are dots, and their tests count."""
    monkeypatch.setattr("lit_memory.report.render.draw", lambda *args: {})
    results = pointed([{"train.lr": 1e-3}, {"train.lr": 2e-3}], [(0.9, 0.1), (0.25, None)], tune_seeds=[0])
    (axes,) = grid_figure(results).axes
    assert lines_of(axes)[0].get_ydata() == pytest.approx([0.9, 0.25])
    found = render(results.plan, make_frame(["a", "b"], [0, 1], [2, 4], value=lambda *args: 0.5), tmp_path)
    assert "| a | 0.001 | 0.900 | 0.500 ± 0.000 |" in re.sub(" +", " ", found.table)


@pytest.mark.parametrize(("select", "edge"), [("exact_match", 0.0), ("loss", 1.0)])
def test_runs_that_broke_down_are_marked(select, edge):
    """At the edge of the worst values, how many of an arm; the status says what the sign means."""
    results = pointed([{"train.lr": 1e-3}, {"train.lr": 2e-3}], [(0.9, 0.1), (0.25, None)], select=select)
    assert not crosses(grid_figure(results))
    for run in results.plan.grid[2:]:
        run |= {"status": "broke down", "valid": None, "valid_loss": None, "test": []}
    mark, status = crosses(grid_figure(results))
    assert mark.get_text() == "2 ×" and mark.xy == (math.log10(2e-3), edge)
    assert status.get_text().endswith("rings: chosen; ×: broke down")
    for run in results.plan.grid[:1]:
        run |= {"stages": 3, "stage_steps": [10, 20]}
    *_, status = crosses(grid_figure(results))
    assert len(crosses(grid_figure(results))) == 3
    assert status.get_text().endswith("rings: chosen; ×: broke down or stopped at a stage")


def crosses(figure):
    return [text for text in figure.findobj(Text) if "×" in text.get_text()]


def test_a_table_of_points_without_numbers(tmp_path, monkeypatch):
    """In the CSV, what is not a number is nan, and what was not measured is empty."""
    monkeypatch.setattr("lit_memory.report.render.draw", lambda *args: {})
    results = pointed([{"train.lr": 1}, {"model.gamma": "off"}], [(None, 0.5), (0.25, 1.0)])
    results.plan.grid[-1] |= {"status": "failed", "valid": None, "valid_loss": None, "test": []}
    found = render(results.plan, make_frame(["a", "b"], [0, 1], [2, 4], value=lambda *args: 0.5), tmp_path)
    rows = list(csv.reader((tmp_path / "grid.csv").read_text().splitlines()))
    measured = ["valid_exact_match", "valid_loss", "exact_match@2", "exact_match@4"]
    assert rows[0] == ["arm", "train.lr", "model.gamma", "seed", "status", "chosen", "steps", *measured]
    assert rows[1] == ["a", "1", "", "0", "finished", "yes", "", "nan", "0.5", "0.5", "nan"]
    assert rows[-1] == ["a", "", "off", "1", "failed", "yes", "", "", "", "", ""]
    assert "| a | 1 | – | 0.500 | 0.500 ± 0.000 | – | 2 of 2 | 1 of 2 |" in re.sub(" +", " ", found.table)
    assert json.loads((tmp_path / "report.json").read_text())["grid"] == results.plan.grid


@pytest.mark.parametrize(("common", "own"), [("model.layers?", "model.layers"), ("model.layers", "model.layers?")])
def test_an_arms_axis_replaces_that_of_the_same_field(tree, common, own):
    """With ? or without."""
    specs = plan(tree, {"grid": {common: [1, 2], f"arms.b.{own}": [3, 4]}})
    assert [(s.arm, s.model["layers"]) for s in specs] == [("a", 1), ("a", 2), ("b", 3), ("b", 4)]
