"""Reports along the training: validations as the x axis, steps to a threshold, roughness, and what is refused."""

import csv
import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from report_data import ARMS, SEEDS, make_frame, make_plan

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import parse
from lit_memory.plan.measured import check_report
from lit_memory.plan.sections import ReportConfig
from lit_memory.report.charts import charts
from lit_memory.report.curves import curve_metrics
from lit_memory.report.figures import curve_figure
from lit_memory.report.render import render, write
from lit_memory.report.saved import load
from lit_memory.run.engine import run_one
from lit_memory.run.frame import validations
from lit_memory.run.tracking import Tracker

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy


def test_curve_metrics_worked_values():
    """The first step that is good enough, and the spread of the changes of the loss in the second half."""
    values, losses = {30: 40.0, 10: 90.0, 20: 50.0, 40: 55.0}, {10: 9.0, 20: 5.0, 30: 4.0, 40: 4.5, 50: 3.0, 60: 3.0}
    assert curve_metrics(values, losses, lambda v: v <= 50) == {
        "steps_to": 20,
        "roughness": pytest.approx(1.0606602),
    }  # of -1.5 and 0: 4.5, 3, 3
    assert math.isnan(curve_metrics(values, losses, lambda v: v <= 39)["steps_to"]) and math.isnan(
        curve_metrics({1: 1.0}, {1: 1.0}, bool)["roughness"]
    )


@pytest.fixture
def experiment(tree):
    """A file whose report is about the validations of two arms, one of which learns nothing."""
    sizes = {"layers": 1, "width": 16, "heads": 2, "memory_tokens": 1}
    task = {
        "name": "language_modeling",
        "books": 1,
        "tokenizer": "char",
        "segments": 2,
        "segment_len": 16,
        "stream": True,
    }
    train = {
        "steps": 12,
        "batch_size": 4,
        "lr": 1e-2,
        "valid_every": 2,
        "valid_size": 16,
        "test_size": 8,
        "eval_batch_size": 4,
    }
    tree["base"] = {"model": {"name": "tarm", **sizes}, "task": task, "train": train}
    tree["arms"] = {"tarm": {}, "still": {"model.name": "rmt", "train.lr": 0.0}}
    tree["report"] = {"x": "step", "y": "perplexity", "columns": 3, "threshold": 200.0}
    tree["expect"] = [
        "tarm[last] < still[last]",
        "tarm.steps_to[last] < 13",
        "tarm.roughness[first] > still.roughness[first]",
    ]
    tree["requires"] = ["still[last] > 0"]
    tree["expect"] += [
        "tarm.test_perplexity[last] < still.test_perplexity[last]",
        "tarm.variance_ratio[6] > 0",
        "still.loss[2] > 0",
    ]
    return tree


def test_a_report_along_the_training(unsaved_figures, experiment, root, tmp_path, capsys):
    """The curves of the validations as they were logged, what follows from them, and the test at the end."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(experiment))
    tracker, specs = Tracker(root), parse(experiment, "tiny.yaml").at().plan()
    for spec in specs:
        run_one(spec, root, tracker.uri, tracker.parent(spec.experiment, spec.scale, {}), {}, lambda message: None)
    assert main([str(path), "--root", str(root), "--report"]) == 0
    out = capsys.readouterr().out
    assert "INCONCLUSIVE" in out and "✗" not in out and re.search(r"\| arm +\| 2 +\| 6 +\| 12 +\| seeds", out)
    with (root / "reports" / "tiny" / "table.csv").open() as file:
        table = {
            (row["arm"], int(row["x"]), row["metric"]): float(row["mean"])
            for row in csv.DictReader(file)
            if row["mean"]
        }
    assert {x for _, x, _ in table} == {*range(2, 13, 2)}
    for spec in specs:
        run = tracker.find(spec.key)
        of_run = validations(tracker, [spec], {spec.key: run}, ReportConfig(y="capacity"))
        for name in ("perplexity", "loss", "memory_change"):
            logged = {m.step: m.value for m in tracker.client.get_metric_history(run.run_id, f"valid/{name}")}
            assert {x: table[spec.arm, x, name] for x in logged} == pytest.approx(logged, abs=1e-5) and set(logged) == {
                *range(2, 13, 2)
            }
            if name == "perplexity":  # capacity is not validated; this is the task's first metric
                assert of_run == {(spec.arm, name, x, spec.seed): value for x, value in logged.items()}
        assert (
            table[spec.arm, 2, "test_perplexity"]
            == table[spec.arm, 12, "test_perplexity"]
            == pytest.approx(run.metrics["test/perplexity"], abs=1e-5)
        )
    assert table["tarm", 2, "roughness"] > table["still", 2, "roughness"] == 0 and math.isnan(
        table["still", 2, "steps_to"]
    )
    page = (root / "reports" / "tiny" / "README.md").read_text()
    assert "steps to a perplexity of 200" in page and "perplexity of the test" in page
    path.write_text(yaml.safe_dump(experiment | {"report": experiment["report"] | {"threshold": 1.0}}))
    assert main([str(path), "--root", str(root), "--report"]) in (0, 1) and "nan: a seed" in page
    page = (root / "reports" / "tiny" / "README.md").read_text()
    assert "perplexity of the test" in page and "steps to" not in page and "nan: a seed" not in page


STAGED = [{"arm": arm, "seed": seed, "stage_steps": [100, 300]} for arm in ARMS for seed in SEEDS]
VALIDATED = {
    (arm, "exact_match", float(step), seed): min(
        1.0, step % 100 / 100 + (step // 100) * (0.2 if arm == "gamma" else 0.1)
    )
    for arm in ARMS
    for seed in SEEDS
    for step in range(20, 401 - 100 * seed, 20)
}


def test_the_figure_of_the_training_and_the_steps_to_a_threshold(tmp_path):
    """Only the last stage counts, as those before have easier tasks; a run that ends earlier is drawn as far as it
    came. The folder of the report is enough to draw both again."""
    plan = make_plan(config=ReportConfig(curves=True, threshold=0.95, chance=0.0625), runs=STAGED)
    render(plan, make_frame(), tmp_path, validations=VALIDATED)
    page = (tmp_path / "README.md").read_text()
    assert "## Along the training" in page and "(curves.png)" in page and "[curves.pdf](curves.pdf)" in page
    assert "| gamma | 180 ± 0 | 3 of 3 | 180, 180, 180 |" in re.sub(" +", " ", page)
    assert "| no_gamma | 280 ± 0 | 2 of 3 | 280, 280, never |" in re.sub(" +", " ", page)
    again = load(tmp_path)
    assert again.validations == VALIDATED and (tmp_path / "curves.csv").read_text().count("\n") == 1 + len(VALIDATED)
    axes = curve_figure(again).axes[0]
    drawn = {
        (float(x), float(y)) for line in axes.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    assert {(step, value) for (_, _, step, _), value in VALIDATED.items()} <= drawn
    texts = [text.get_text() for text in axes.texts]
    assert any("bold" in text for text in texts) and "chance 0.0625" in texts
    last = max(cell for cell in VALIDATED if cell[0] == "gamma")
    (told,) = curve_figure(replace(again, validations=VALIDATED | {last: math.nan})).legends
    assert "gamma" in [text.get_text() for text in told.get_texts()]
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write(again, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    render(make_plan(), make_frame(), tmp_path)
    assert not [path for path in tmp_path.iterdir() if "curves" in path.name]


def test_of_many_seeds_the_figure_shows_shares_of_runs(unsaved_figures, tmp_path):
    """Eleven runs an arm, of which every second one gets there: each is a step of the line, those that never do are
    missing at its end; with ten, runs are drawn by themselves."""
    for count in (10, 11):
        runs = [{"arm": arm, "seed": seed, "stage_steps": [100]} for arm in ARMS for seed in range(count)]
        config = ReportConfig(curves=True, threshold=0.95)
        values = {
            (arm, "exact_match", 100.0 + 10 * seed + late, seed): 1.0 - seed % 2 * 0.5
            for late, arm in enumerate(ARMS, start=1)
            for seed in range(count)
        }
        render(make_plan(config=config, runs=runs, seeds=range(count)), make_frame(), tmp_path, validations=values)
        lines = curve_figure(load(tmp_path)).axes[0].lines
        assert len(lines) == (2 if count == 11 else 2 * (2 * count + 2))
        shares = "share of runs that have reached" in (tmp_path / "README.md").read_text()
        assert shares == (count == 11)
    chart = charts(load(tmp_path))[-1]
    for late, (line, series) in enumerate(zip(lines, chart["series"], strict=True), start=1):
        first, *steps = line.get_xdata()
        assert [first, *steps] == [100.0 + late, *(100.0 + 10 * seed + late for seed in range(0, 11, 2)), 202.0]
        assert [*line.get_ydata()] == pytest.approx([*(i / 11 for i in range(7)), 6 / 11])
        corners = [(10**x, y) for x, y, *_ in series["points"]]
        assert corners[0] == pytest.approx((100 + late, 0), rel=1e-4) and corners[-1][1] == pytest.approx(6 / 11)
        assert all(a == pytest.approx(c) or b == d for (a, b), (c, d) in pairwise(corners))  # no slopes
    assert [text for _, text in chart["ticks"]] == ["200"] and chart["id"] == "reached"


def test_of_an_arm_that_never_gets_there_the_figure_shows_none(unsaved_figures, tmp_path):
    runs = [{"arm": arm, "seed": seed, "stage_steps": [100]} for arm in ARMS for seed in range(11)]
    values = {(arm, "exact_match", 100.0, seed): float(arm == ARMS[0]) for arm in ARMS for seed in range(11)}
    config = ReportConfig(curves=True, threshold=0.95)
    render(make_plan(config=config, runs=runs, seeds=range(11)), make_frame(), tmp_path, validations=values)
    one, other = curve_figure(load(tmp_path)).axes[0].lines
    assert max(one.get_ydata()) == 1 and not any(other.get_ydata())
    first = {cell: value for cell, value in values.items() if cell[0] == ARMS[0]}  # the other has yet to run
    render(make_plan(config=config, runs=runs, seeds=range(11)), make_frame(), tmp_path, validations=first)
    one, other = curve_figure(load(tmp_path)).axes[0].lines
    assert max(one.get_ydata()) == 1 and not any(other.get_ydata())


def test_a_report_whose_validations_nobody_knows_has_no_figure_of_them(tmp_path):
    render(make_plan(config=ReportConfig(curves=True)), make_frame(), tmp_path)
    assert "curves" not in (tmp_path / "README.md").read_text() and not list(tmp_path.glob("curves*"))


@pytest.mark.parametrize(
    ("settings", "report", "message"),
    [
        (
            {"stages": [{"until": {"perplexity": 9.0}}]},
            {},
            "report.x: 'step': a stage with until ends nobody knows when; expected stages of fixed steps",
        ),
        (
            {},
            {"x": "test_segments"},
            "report.threshold: 200.0: expected none where x=test_segments is not step, without curves",
        ),
        ({}, {"y": "perplexty"}, "report.y: unknown metric 'perplexty'; did you mean 'perplexity'"),
        ({}, {"floors": {"los": "a"}}, "report.floors.los: unknown metric 'los'; did you mean 'loss'"),
        ({}, {"state_x": "last"}, "report.state_x: last: expected none where x=step"),
        ({"valid_every": 5}, {}, r"expect: .*6 is not tested; tested: 5, 10, 12"),
    ],
)
def test_what_such_a_report_does_not_allow(experiment, settings, report, message):
    experiment["base"]["train"] |= settings
    experiment["report"] |= report
    found = parse(experiment, "tiny.yaml").at()
    with pytest.raises(ConfigError, match=message):
        check_report(found, found.plan())


def test_arms_have_the_same_validations(experiment):
    """Several stages have one after the last step of each."""
    found = parse(experiment | {"arms": {"tarm": {}, "still": {"train.steps": 11}}}, "tiny.yaml").at()
    with pytest.raises(ConfigError, match="has not the same values in every arm"):
        check_report(found, found.plan())
    experiment["base"]["train"]["stages"] = [{"steps": 4}, {"steps": 6}]
    experiment["base"]["train"]["valid_every"] = 3
    assert parse(experiment, "tiny.yaml").at().plan()[0].validations == [3, 4, 7, 10]
