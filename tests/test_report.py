"""Reports: verdicts, tables, figures, pages, and that nothing is ever half-written."""

import argparse
import csv
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_memory.plan.experiment import RunSpec, load
from lit_memory.plan.paper import paper_rows
from lit_memory.registry import load_class
from lit_memory.report import figures
from lit_memory.report import render as report
from lit_memory.report.marks import Summary
from lit_memory.report.placing import Box, place
from lit_memory.report.render import INCOMPLETE, NOT_REPRODUCED, REPRODUCED, ReportConfig, ReportPlan, Results, render
from lit_memory.run.job import Job

ARMS, SEEDS, XS = ["gamma", "no_gamma"], [0, 1, 2], [50, 100, 200, 500]
PAPER = {
    "title": "Associative Recurrent Memory Transformer",
    "arxiv": "2407.04841",
    "item": "Figure 5a",
    "claim": "without gamma, recall fails",
}
EXPECT = ["gamma[200] - no_gamma[200] > 0.2", "abs(gamma[first] - no_gamma[first]) < 0.05"]


def make_plan(arms=ARMS, seeds=SEEDS, xs=XS, config=None, expect=EXPECT, **changes):
    size = {"parameters": 501248, "state_floats": 18720}
    runs = [{"arm": a, "seed": s, "key": f"key{s}", "run_id": f"{a}-{s}"} | size for a in arms for s in seeds]
    fields = {
        "experiment": "armt_ablation_gamma",
        "scale": "cpu",
        "paper": PAPER,
        "runs": runs,
        "train_x": 50,
    } | changes
    return ReportPlan(
        arms=list(arms),
        seeds=list(seeds),
        x_values=list(xs),
        config=config or ReportConfig(),
        expect=list(expect),
        **fields,
    )


def make_frame(arms=ARMS, seeds=SEEDS, xs=XS, metric="exact_match", value=None):
    """gamma stays at 0.99, the others fall with x; seeds differ by 0.01."""
    value = value or (lambda arm, seed, x: 0.99 + 0.001 * seed if arm == "gamma" or x <= 50 else 30 / x + 0.01 * seed)
    rows = [(arm, seed, x, metric, value(arm, seed, x)) for arm in arms for seed in seeds for x in xs]
    return pd.DataFrame(rows, columns=["arm", "seed", "x", "metric", "value"])


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without figures, which take most of the time, for tests of words and numbers."""
    monkeypatch.setattr("lit_memory.report.render.draw", lambda *args: {})


@pytest.mark.parametrize(
    ("drop", "missing", "verdict"),
    [
        (lambda f: f.arm == "nobody", [], REPRODUCED),
        (lambda f: (f.arm == "gamma") & (f.seed == 2), ["gamma seed 2"], INCOMPLETE),
        (lambda f: f.arm == "no_gamma", ["no_gamma seeds 0, 1, 2"], INCOMPLETE),
        (lambda f: (f.seed == 1) & (f.x == 500), ["gamma seed 1 at 500", "no_gamma seed 1 at 500"], INCOMPLETE),
        (lambda f: f.seed >= 0, ["gamma seeds 0, 1, 2", "no_gamma seeds 0, 1, 2"], INCOMPLETE),
    ],
    ids=["complete", "a seed", "an arm", "one x", "everything"],
)
def test_what_is_missing_is_named(tmp_path, drop, missing, verdict):
    frame = make_frame()
    found = render(make_plan(), frame[~drop(frame)], tmp_path)
    assert (found.verdict, found.missing) == (verdict, missing)
    page = (tmp_path / "README.md").read_text()
    assert f"**{verdict}** at scale `cpu`" in page and all(m in page for m in missing)
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == verdict


@pytest.mark.usefixtures("undrawn")
def test_verdicts_of_complete_runs(tmp_path):
    nan = make_frame()
    nan.loc[(nan.arm == "gamma") & (nan.x == 200) & (nan.seed == 1), "value"] = float("nan")
    cases = [
        (make_plan(expect=[*EXPECT, "no_gamma[last] > 0.9"]), make_frame(), NOT_REPRODUCED),
        (make_plan(), nan, NOT_REPRODUCED),
    ]
    cases += [
        (make_plan(expect=[]), make_frame(), INCOMPLETE),
        (make_plan(expect=["gamma.capacity[50] > 1"]), make_frame(), INCOMPLETE),
    ]
    for plan, frame, verdict in cases:
        assert render(plan, frame, tmp_path).verdict == verdict
    with pytest.raises(ValueError, match="no arm 'armt'"):
        render(make_plan(expect=["armt[50] > 0"]), make_frame(), tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_failed_runs_are_named_with_their_status(tmp_path):
    runs = [{"arm": "gamma", "seed": 0, "status": None}, {"arm": "no_gamma", "seed": 2, "status": "FAILED"}]
    frame = make_frame()
    found = render(make_plan(runs=runs), frame[(frame.arm == "gamma") | (frame.seed < 2)], tmp_path)
    assert found.missing == ["no_gamma seed 2 (FAILED)"]
    assert found.text.endswith("seeds)\nINCOMPLETE; missing: no_gamma seed 2 (FAILED)") and found.table in found.text


@pytest.mark.usefixtures("undrawn")
def test_the_verdict_for_programs(tmp_path):
    runs = [{"arm": "gamma", "seed": 0, "status": "finished", "steps": 3000.0, "seconds": 61.7}]
    render(make_plan(runs=runs, modified=["train.lr=1"]), make_frame(), tmp_path)
    found = json.loads((tmp_path / "verdict.json").read_text())
    assert [found[key] for key in ("experiment", "scale", "modified", "paper", "verdict")] == [
        "armt_ablation_gamma",
        "cpu",
        ["train.lr=1"],
        PAPER,
        REPRODUCED,
    ]
    assert found["runs"] == [{"arm": "gamma", "seed": 0, "steps": 3000.0, "seconds": 61.7}]
    claim = found["claims"][0]
    assert claim == {
        "line": EXPECT[0],
        "verdict": REPRODUCED,
        "numbers": "0.991 - 0.160 = 0.831 > 0.2 ✓",
        "sides": [pytest.approx(0.831), 0.2],
    }


def test_rows_outside_the_plan_change_nothing_and_twice_is_an_error(tmp_path):
    frame, other = make_frame(), make_frame(arms=["other"], seeds=[7], xs=[7])
    render(make_plan(), frame, tmp_path / "a")
    render(make_plan(), pd.concat([other, frame.sample(frac=1, random_state=0)]), tmp_path / "b")
    for name in ("table.csv", "figure.png", "README.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(ValueError, match="two finished runs of arm gamma, seed 0"):
        render(make_plan(), pd.concat([frame, frame[:1]]), tmp_path)


def test_the_same_results_give_the_same_bytes(tmp_path):
    plan = make_plan(config=ReportConfig(chance=0.0625, state_x=200))
    changed = make_plan(
        config=plan.config,
        provenance={"date": "tomorrow"},
        runs=[run | {"run_id": "x", "seconds": 3.0} for run in plan.runs],
    )
    first, second = (
        render(plan, make_frame(), tmp_path / "a").paths,
        render(changed, make_frame(), tmp_path / "b").paths,
    )
    assert [name for name in first if first[name].read_bytes() != second[name].read_bytes()] == [
        "verdict.json",
        "README.md",
    ]
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_report as t; "
    program += "t.render(t.make_plan(config=t.ReportConfig(chance=0.0625, state_x=200)), "
    subprocess.run(
        [sys.executable, "-c", program + f"t.make_frame(), {str(tmp_path / 'c')!r})"],
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "5"},
    )
    assert all((tmp_path / "c" / name).read_bytes() == path.read_bytes() for name, path in first.items())


@pytest.mark.usefixtures("undrawn")
def test_tables(tmp_path):
    frame = pd.concat([make_frame(), make_frame(metric="capacity", xs=[50, 100, 200], value=lambda arm, seed, x: x)])
    found = render(make_plan(), frame[(frame.arm == "gamma") | (frame.seed == 0)], tmp_path)
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert [(r["arm"], r["x"], r["metric"]) for r in rows] == [
        (a, str(x), m) for a in ARMS for x in XS for m in ("exact_match", "capacity")
    ]
    first = {"arm": "gamma", "x": "50", "metric": "exact_match", "mean": "0.991000", "std": "0.001000", "n": "3"}
    assert rows[0] == first | {"seed_0": "0.990000", "seed_1": "0.991000", "seed_2": "0.992000"}
    assert rows[8] | {"mean": "", "seed_0": ""} == {
        "arm": "no_gamma",
        "x": "50",
        "metric": "exact_match",
        "n": "1",
    } | dict.fromkeys(("mean", "std", "seed_0", "seed_1", "seed_2"), "")
    assert rows[-1]["n"] == "0" and rows[-1]["mean"] == ""
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in found.table.splitlines() if line.startswith("|")
    ]
    assert lines[0] == ["arm", "50", "100", "200", "500", "seeds", "parameters", "state floats"]
    assert lines[2] == ["gamma", *["0.991 ± 0.001"] * 4, "3 of 3", "501,248", "18,720"]
    assert lines[3][:2] + lines[3][-3:] == ["no_gamma", "0.990", "1 of 3", "501,248", "18,720"]
    assert (tmp_path / "table.md").read_text() == found.table


@pytest.mark.usefixtures("undrawn")
def test_a_state_that_grows_says_so(tmp_path):
    plan = make_plan()
    plan.runs[3]["state_growth"] = 1024
    rows = [
        line.split("|")[-2].strip()
        for line in render(plan, make_frame(), tmp_path).table.splitlines()
        if line.startswith("|")
    ]
    assert rows[2:] == ["18,720", "18,720 + 1,024 a segment"]
    plan.config.state_x, plan.runs[3]["segments"] = 200, 200
    assert "| 18,720 + 1,024 a segment (223,520 at 200) |" in render(plan, make_frame(), tmp_path).table
    assert (plan.state("gamma"), plan.state("no_gamma")) == (18720, 18720 + 200 * 1024)
    assert "A state that grows is counted as it is when that test asks." in (tmp_path / "README.md").read_text()
    del plan.runs[3]["segments"]
    assert plan.state("no_gamma") is None


def test_times_have_a_table_and_a_figure_and_are_in_no_csv(tmp_path):
    times = make_frame(["gamma"], xs=[50, 100], metric="seconds", value=lambda arm, seed, x: x * (1 + seed) / 1000)
    frame = pd.concat([make_frame(), times])
    plan = make_plan(
        config=ReportConfig(time="seconds"), expect=[*EXPECT, "gamma.seconds[100] < 3 * gamma.seconds[50]"]
    )
    found = render(plan, frame, tmp_path)
    page = (tmp_path / "README.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.partition("## Time")[2].partition("\n## ")[0].splitlines()
        if line[:1] == "|"
    ]
    assert rows[0] == ["arm", "50", "100", "200", "500"]
    assert rows[2:] == [["gamma", "0.1 ± 0.05", "0.2 ± 0.1", "–", "–"], ["no_gamma", "–", "–", "–", "–"]]
    assert "(time.png)" in page and "[time.pdf](time.pdf)" in page
    assert (found.verdict, found.claims[-1].numbers) == (
        REPRODUCED,
        "0.200 < 3 * 0.100 = 0.300 ✓ (within one std of the seeds)",
    )
    render(make_plan(), make_frame(), tmp_path / "without")
    for name in ("table.csv", "table.md", "figure.png"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    assert (
        "Time" not in (tmp_path / "without" / "README.md").read_text()
        and not (tmp_path / "without" / "time.png").exists()
    )
    render(make_plan(), frame, tmp_path)  # a report that does not want times any more
    assert not list(tmp_path.glob("time.*"))


@pytest.mark.usefixtures("undrawn")
def test_the_page(tmp_path):
    config = ReportConfig(
        paper_values="armt_text_and_figures", paper_rows=["Fig appendix rewrite", "text: Rewrite"], notes="A note."
    )
    run = {
        "arm": "gamma",
        "seed": 0,
        "key": "0a1b2c3d",
        "status": "FINISHED",
        "run_id": "f00",
        "steps": 3000,
        "stage_steps": [1000, 2000],
        "seconds": 61.7,
    }
    changes = {
        "command": "python run.py e.yaml",
        "provenance": {"git_commit": "0decc7f", "dirty": True, "versions": {"torch": "2.13", "lightning": "2.6.6"}},
    }
    render(
        make_plan(config=config, runs=[run], deviations=["2 layers"], modified=["train.steps=3000"], **changes),
        make_frame(),
        tmp_path,
    )
    page = (tmp_path / "README.md").read_text()
    wanted = [
        "**MODIFIED RUN**",
        "`train.steps=3000`",
        "**REPRODUCED**",
        "(https://arxiv.org/abs/2407.04841), Figure 5a",
        "![",
        "figure.png",
    ]
    wanted += [
        "generalisation factor",
        "- averaged over 3 runs",
        "- Fig appendix rewrite ablation (with/without gamma): printed only as an image.",
        "- 2 layers",
        "A note.",
        "3,000 (1,000 + 2,000)",
        "`0a1b2c3d`",
        "`f00`",
    ]
    wanted += ["python run.py e.yaml", "git commit: 0decc7f", "dirty: yes", "torch 2.13, lightning 2.6.6"]
    places = [page.find(text) for text in wanted]
    assert places == sorted(places) and places[0] > 0
    assert page.index("REPRODUCED") < 600 and "`gamma[200] - no_gamma[200] > 0.2`" in page
    render(make_plan(), make_frame(), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "MODIFIED" not in page and "Notes" not in page and "No values of the paper" in page


def test_a_failure_leaves_the_old_report(tmp_path, monkeypatch):
    render(make_plan(), make_frame(), tmp_path)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(old) == ["README.md", "figure.pdf", "figure.png", "table.csv", "table.md", "verdict.json"]

    def fail(*_):
        raise OSError("no space left on device")

    for broken in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(report.files.os, broken, fail)
            render(make_plan(scale="gpu"), make_frame(seeds=[0]), tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old


@pytest.fixture
def drawn(monkeypatch):
    """draw(plan, frame) -> the Figure before it is saved."""
    caught = []

    def catch(figure, suffix):
        figure.draw_without_rendering()
        caught.append(figure)
        return b""

    monkeypatch.setattr(figures, "_bytes", catch)

    def draw(plan, frame):
        figures.draw(Results(plan, frame), "scale cpu")
        return caught[-1]

    return draw


SIX = ["armt", "prmt", "rmt", "mamba", "titans_mac", "transformer_xl"]
LONG = ["rmt_copy", "rmt_reverse", "xl_copy", "xl_reverse", "transformer_copy", "transformer_reverse"]
SEVEN = ["pretrained", "memreasoner", "memreasoner_sf", "rmt", "rmt_sf", "mamba", "mamba_sf"]
FIGURES = {
    "two arms": (make_plan(), make_frame()),
    "six arms": (make_plan(SIX, expect=[]), make_frame(SIX)),
    "nine long names": (make_plan([f"an_arm_with_quite_a_long_name_{i}" for i in range(9)], expect=[]), make_frame([])),
    "one x": (make_plan(SIX, xs=[50], expect=[]), make_frame(SIX[:5], xs=[50])),
    "one x, long names": (make_plan(LONG, xs=[50], expect=[]), make_frame(LONG, xs=[50])),
    "one x, seven names": (make_plan(SEVEN, xs=[50], expect=[]), make_frame(SEVEN, xs=[50])),
    "one seed": (make_plan(seeds=[0]), make_frame(seeds=[0])),
    "partial": (make_plan(), make_frame(["gamma"], seeds=[0])),
    "empty": (make_plan(config=ReportConfig(y="capacity", identity=True, log_y=True)), make_frame([])),
    "all nan": (make_plan(), make_frame(value=lambda *_: float("nan"))),
    "capacity": (
        make_plan(config=ReportConfig(y="capacity", identity=True)),
        make_frame(metric="capacity", value=lambda arm, seed, x: min(x, 60) + seed),
    ),
    "crowded": (
        make_plan(xs=[1, 2, 3, 5, 8, 10, 20, 50, 100000, 1000000], expect=[]),
        make_frame(xs=[1, 2, 3, 1000000]),
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_name_every_arm_and_nothing_leaves_or_overlaps(drawn, name):
    plan, frame = FIGURES[name]
    figure = drawn(plan, frame)
    axes, frame_box = figure.axes[0], figure.bbox
    words = [text.get_text() for legend in figure.legends for text in legend.get_texts()] + [
        t.get_text() for t in axes.get_xticklabels()
    ]
    assert all(any(word.replace("_\n", "_").startswith(arm) for word in words) for arm in plan.arms)
    boxes = [text.get_window_extent() for text in axes.get_xticklabels() if text.get_text()]
    assert len(boxes) >= 1 and not any(a.x1 > b.x0 for a, b in itertools.pairwise(boxes))
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= frame_box.x1 and box.y1 <= axes.get_tightbbox().y0 + 1
    assert axes.get_position().height * figure.get_figheight() > 2.5
    looks = {
        (line.get_color(), line.get_marker(), line.get_linestyle())
        for line in axes.lines
        if line.get_label() in plan.arms
    }
    assert len(looks) in (0, len([line for line in axes.lines if line.get_label() in plan.arms]))


@pytest.mark.parametrize(
    ("frame", "labels"),
    [
        (make_frame(metric="seconds", value=lambda arm, seed, x: x / 1000), ["0.05", "0.1", "0.2", "0.5"]),
        (make_frame(metric="seconds", value=lambda arm, seed, x: 0.03 + x / 1e5), ["0.03", "0.035"]),
        (make_frame(metric="seconds", value=lambda arm, seed, x: x**4 / 1e6), ["10", "1,000", "10k"]),
        (make_frame(), []),
    ],
    ids=["a decade", "less", "many", "none measured"],
)
def test_the_figure_of_times(drawn, frame, labels):
    """Seconds on a logarithmic axis with plain numbers, without chance and training length."""
    config = ReportConfig(time="seconds", chance=0.5, identity=True)
    axes = drawn(make_plan(config=config), frame).axes[0]
    assert axes.get_ylabel() == "seconds per context" and axes.get_yscale() == "log"
    shown = {text.get_text() for text in axes.get_yticklabels() + axes.get_yminorticklabels()}
    assert shown >= set(labels) and not any("$" in text for text in shown)
    assert not {line.get_label() for line in axes.lines} & {"chance (0.5)", "trained on up to 50", "all kept (y = x)"}


@pytest.mark.parametrize(
    ("xs", "train_x", "log_x", "shown"),
    [
        (XS, 50, True, True),
        (XS, 30, True, True),  # a factor of 1.7 before one of 10
        (XS, 9, True, False),
        (XS, 9, False, True),
        ([0, 250, 4000], 0, True, False),
        ([0, 250, 4000], 0, False, False),
        ([0, 250, 4000], 250, True, True),
        (XS, 5000, True, True),
    ],
)
def test_the_length_of_the_training_leaves_no_empty_axis(drawn, xs, train_x, log_x, shown):
    axes = drawn(
        make_plan(xs=xs, train_x=train_x, expect=[], config=ReportConfig(log_x=log_x)), make_frame(xs=xs)
    ).axes[0]
    assert (f"trained on up to {train_x:,}" in {line.get_label() for line in axes.lines}) == shown
    places = axes.transAxes.inverted().transform(axes.transData.transform([(x, 0.5) for x in xs]))[:, 0]
    assert places[0] < 0.25 and places[-1] - places[0] > 0.4


@pytest.mark.parametrize("xs", [XS, [50]], ids=["band", "bar"])
@pytest.mark.parametrize(("y", "ends"), [("exact_match", (0.0, 1.0)), ("capacity", (1 / 3 - 0.57735, 2 / 3 + 0.57735))])
def test_bands_of_shares_stay_between_0_and_1(drawn, xs, y, ends):
    """One arm has 0, 0 and 1, the other one 1, 1 and 0: 0.333 and 0.667 with a standard deviation of 0.577."""
    frame = make_frame(xs=xs, metric=y, value=lambda arm, seed, x: float((seed == 2) == (arm == "gamma")))
    axes = drawn(make_plan(xs=xs, expect=[], config=ReportConfig(y=y)), frame).axes[0]
    paths = [path for collection in axes.collections for path in collection.get_paths()]
    heights = [y for path in paths for y in path.vertices[:, 1]]
    assert (min(heights), max(heights)) == pytest.approx(ends, abs=1e-4)


def test_an_arm_far_above_the_others_is_cut_where_less_is_better(drawn):
    """Its numbers, the least and the largest mean, stand at the border; curves that meet the others' range, or of which
    more is better, stay."""

    def look(far, y="perplexity", arms=("a", "b", "c")):
        start = {"a": 9.0, "b": 10.0, "c": far}
        frame = make_frame(arms, metric=y, value=lambda arm, seed, x: start[arm] + x / 1000 + 0.01 * seed)
        axes = drawn(make_plan(arms, expect=[], config=ReportConfig(y=y)), frame).axes[0]
        return axes.get_ylim()[1], [text.get_text() for text in axes.texts if "↑" in text.get_text()]

    high, texts = look(22.0)
    assert 10.6 < high < 11 and texts == ["c ↑ 22.1 to 22.5"]
    for kept in (look(12.0), look(22.0, y="capacity"), look(22.0, arms=("a", "c")), look(float("nan"))):
        assert not kept[1] and kept[0] > 10
    assert look(12.0)[0] > 12 and look(22.0, y="capacity")[0] > 22


def test_figures_know_of_which_metrics_less_is_better():
    for path in sorted(Path(report.__file__).parents[1].glob("experiments/*.yaml")):
        if not Summary.wanted(str(path)):
            experiment = load(path)
            task = load_class("task", experiment.base["task"]["name"])
            known = {*task.metrics, *getattr(task, "curves", {}).get(experiment.report.x, ())}
            if experiment.report.y in known:
                assert (experiment.report.y in figures.LOWER) == bool(task.minimized_metrics), path.stem


# Arm -> floats of state, floats that a segment adds, y.
STATES = {
    "armt": (24960, 0, 0.99),
    "prmt": (512, 0, 0.13),
    "rmt": (256, 0, 0.13),
    "rmt_r": (256, 512, 0.55),
    "mamba": (35840, 0, 0.62),
    "rwkv": (33280, 0, 0.60),
    "xl": (8192, 0, 0.1),
    "window": (0, 0, 0.065),
    "transformer": (0, 0, 0.06),
}
LAST = {"state_x": "last", "chance": 0.0625}


def state_case(states, config=None, drop=lambda f: f.seed < 0, seeds=SEEDS, value=None):
    """A plan and a frame whose arms have these states."""
    sizes = {
        arm: {"state_floats": floats, "state_growth": growth, "segments": 500}
        for arm, (floats, growth, _) in states.items()
    }
    runs = [{"arm": arm, "seed": seed} | sizes[arm] for arm in states for seed in seeds]
    plan = make_plan(list(states), seeds, config=ReportConfig(**(config or LAST)), expect=[], runs=runs)
    frame = make_frame(
        list(states), seeds, metric=plan.config.y, value=value or (lambda arm, seed, x: states[arm][2] + 0.01 * seed)
    )
    return plan, frame[~drop(frame)]


# Plan and frame, the arms that have a point, the labels of the ticks.
DECADES = ["100", "1,000", "10k", "100k", "1M"]
STATE_FIGURES = {
    "nine arms": (state_case(STATES), list(STATES), [*DECADES, "0"]),
    "no zero": (state_case({arm: STATES[arm] for arm in ("armt", "rmt")}), ["armt", "rmt"], DECADES[:4]),
    "only zeros": (
        state_case({arm: STATES[arm] for arm in ("window", "transformer")}),
        ["window", "transformer"],
        ["0"],
    ),
    "one state": (state_case({"a": (1000, 0, 0.5)}), ["a"], ["1,000", "10k"]),
    "one seed": (state_case(STATES, seeds=[0]), list(STATES), [*DECADES, "0"]),
    "all in one place": (
        state_case({f"arm_{i}": (256, 0, 0.5) for i in range(9)}),
        [f"arm_{i}" for i in range(9)],
        DECADES[:2],
    ),
    "nine long names": (state_case({f"an_arm_with_quite_a_long_name_{i}": (0, 0, 1.0) for i in range(9)}), None, ["0"]),
    "capacity": (
        state_case(
            STATES,
            {"y": "capacity", "identity": True, "chance": 0.0, "state_x": 500},
            value=lambda a, s, x: STATES[a][2] * x,
        ),
        None,
        None,
    ),
    "partial": (
        state_case(STATES, drop=lambda f: f.arm.isin(["rmt", "window", "transformer"]) | (f.seed == 2)),
        [*list(STATES)[:2], *list(STATES)[3:7]],
        None,
    ),
    "empty": (state_case(STATES, drop=lambda f: f.seed >= 0), [], []),
    "all nan": (state_case(STATES, value=lambda *_: float("nan")), [], []),
    "log y": (
        state_case(STATES, LAST | {"log_y": True}, value=lambda a, s, x: 0.0 if a == "xl" else 10.0 ** -len(a)),
        [a for a in STATES if a != "xl"],
        None,
    ),
    "zero chance, log y": (state_case(STATES, {"state_x": 500, "log_y": True, "chance": 0.0}), None, None),
}


def markers(axes):
    """The lines that are one point with the marker of an arm."""
    known = [marker for marker, _ in figures.MARKERS]
    return [line for line in axes.lines if line.get_marker() in known and len(line.get_xdata()) == 1]


@pytest.mark.parametrize("name", STATE_FIGURES)
def test_the_second_figure_names_every_arm_where_nothing_overlaps(drawn, name):
    (plan, frame), points, ticks = STATE_FIGURES[name]
    figure = drawn(plan, frame)
    axes, points = figure.axes[0], plan.arms if points is None else points
    names = {
        text.get_text(): text.get_window_extent() for text in axes.texts if text.get_text().startswith(tuple(plan.arms))
    }
    legend = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert len(names) == len(points) and all(any(text.startswith(arm) for text in names) for arm in points)
    assert all(any(text.startswith(arm) for text in legend) for arm in plan.arms if arm not in points)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(names.values(), 2))
    spots = [axes.transData.transform(line.get_xydata()[0]) for line in markers(axes)]
    assert len(spots) == len(points) and not any(box.contains(*spot) for box in names.values() for spot in spots)
    assert all(
        box.x0 >= axes.bbox.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= axes.bbox.y0 and box.y1 <= axes.bbox.y1
        for box in names.values()
    )
    assert ticks is None or [t.get_text() for t in axes.get_xticklabels()] == ticks
    assert axes.get_position().height * figure.get_figheight() > 2.4


def test_the_second_figure_shows_the_chosen_x_in_the_looks_of_the_first(drawn):
    plan, frame = state_case(STATES, LAST, value=lambda arm, seed, x: x / 1000 + 0.01 * seed)
    for state_x, y, position in [("first", 0.06, 256 + 500 * 512), (200, 0.21, 256 + 500 * 512)]:
        plan.config.state_x = state_x
        lines = markers(drawn(plan, frame).axes[0])
        assert [line.get_ydata()[0] for line in lines] == [pytest.approx(y)] * 9
        assert 10 ** lines[3].get_xdata()[0] == pytest.approx(position)
        looks = [(look["color"], look["marker"]) for look, _, _ in figures._arms(Results(plan, frame), plan.x_values)]
        assert [(line.get_color(), line.get_marker()) for line in lines] == looks
    del plan.runs[0]["state_floats"], plan.runs[1]["state_floats"], plan.runs[2]["state_floats"]
    assert "armt: unknown state" in [text.get_text() for text in drawn(plan, frame).legends[0].get_texts()]


def test_the_second_figure_comes_and_goes(tmp_path):
    without = render(make_plan(), make_frame(), tmp_path).paths
    page = (tmp_path / "README.md").read_text()
    second = render(make_plan(config=ReportConfig(state_x="last")), make_frame(), tmp_path).paths
    assert sorted(second.keys() - without) == ["state.pdf", "state.png"] and all(
        path.stat().st_size > 1000 for path in second.values() if "state" in path.name
    )
    told = (tmp_path / "README.md").read_text()
    wanted = [
        "(figure.png)",
        "(state.png)",
        "carries from segment to segment; key-value pairs written: 500.",
        "## Numbers",
        "[state.pdf](state.pdf)",
    ]
    assert (
        [told.find(text) for text in wanted] == sorted(told.find(text) for text in wanted)
        and wanted[0] in told
        and "state.p" not in page
    )
    render(make_plan(), make_frame(), tmp_path)
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == sorted(without)
        and (tmp_path / "README.md").read_text() == page
    )


def test_names_find_a_place():
    frame = Box(0, 0, 100, 60)
    alone = place([(50, 30)], [(20, 10)], [], frame, gap=5)
    assert alone == [Box(55, 25, 75, 35)] and place([(90, 30)], [(20, 10)], [], frame, gap=5) == [Box(65, 25, 85, 35)]
    wall = Box(52, 0, 100, 60)
    assert place([(50, 30)], [(20, 10)], [wall], frame, gap=5) == [Box(25, 25, 45, 35)]
    boxes = place([(50, 30)] * 9, [(20, 8)] * 9, [Box(46, 26, 54, 34)], frame, gap=5)
    assert all(box.inside(frame) for box in boxes) and not any(a.hits(b) for a, b in itertools.combinations(boxes, 2))
    assert len(place([(50, 30)] * 40, [(20, 10)] * 40, [], frame, gap=5)) == 40
    assert len(place([(50, 30)], [(200, 100)], [], frame, gap=5)) == 1 and place([], [], [], frame, gap=5) == []
    assert wall.crossed((0, 0), (60, 30)) and not wall.crossed((0, 0), (50, 60)) and wall.nearest(0, 70) == (52, 60)


def test_axes_speak_in_words(drawn):
    axes = drawn(make_plan(), make_frame()).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")) == (
        "key-value pairs written",
        "exact match",
        "armt_ablation_gamma",
    )
    assert [t.get_text() for t in axes.get_xticklabels()] == ["50", "100", "200", "500"] and axes.get_ylim() == (
        -0.03,
        1.04,
    )
    assert [figures.short(x) for x in (0.5, 1000, 4096, 16000, 128e3, 1e6, 2.5e6)] == [
        "0.5",
        "1,000",
        "4,096",
        "16k",
        "128k",
        "1M",
        "2.5M",
    ]
    assert figures.label("noise_level") == "noise level"


def test_every_knob_of_the_figure_shows(drawn):
    def look(config=None, **changes):
        figure = drawn(
            make_plan(config=ReportConfig(**(config or {})), **changes),
            pd.concat([make_frame(), make_frame(metric="capacity")]),
        )
        axes = figure.axes[0]
        names = tuple(text.get_text() for text in figure.legends[0].get_texts())
        return names, axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale(), axes.get_yscale()

    knobs = [
        {},
        {"x": "test_length"},
        {"y": "capacity"},
        {"x_label": "updates"},
        {"y_label": "recall"},
        {"log_x": True},
        {"log_y": True},
        {"chance": 0.1},
    ]
    looks = [look(knob) for knob in [*knobs, {"identity": True}]] + [look(train_x=None)]
    assert len(set(looks)) == len(looks)


def test_the_section_of_the_yaml_is_strict():
    schema = OmegaConf.structured(ReportConfig)
    config = OmegaConf.to_object(
        OmegaConf.merge(schema, {"chance": 0.0625, "paper_values": "armt_text_and_figures", "paper_rows": ["Fig 2b"]})
    )
    assert isinstance(config, ReportConfig) and [
        row["table"][:6] for row in paper_rows(config.paper_values, config.paper_rows)
    ] == ["Fig 2b"]
    for wrong in ({"kind": "pie"}, {"chnce": 1}, {"log_x": "maybe"}, {"state_x": 0.5}, {"state_x": True}):
        with pytest.raises(OmegaConfBaseException):
            OmegaConf.merge(schema, wrong)
    wrong = [
        ({"paper_values": "armt"}, "expected one of armt_table1_babilong"),
        ({"paper_rows": ["Fig 2b"]}, "name the file"),
        ({"state_x": "lst"}, "state_x='lst': expected a tested number without quotes, first or last"),
    ]
    for fields, message in [
        *wrong,
        (
            {"paper_values": "armt_text_and_figures", "paper_rows": ["Fig 9"]},
            "no row of .* starts with 'Fig 9'; tables: text;",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            ReportConfig(**fields)
    with pytest.raises(ValueError, match="log_x: expected values of test_pairs of 0 or more, got -1"):
        make_plan(xs=[-1, 1], config=ReportConfig(log_x=True))
    with pytest.raises(
        ValueError, match="state_x=7: expected one of the tested values 50, 100, 200, 500, first or last"
    ):
        make_plan(config=ReportConfig(state_x=7))
    assert [make_plan(config=ReportConfig(state_x=x)).state_x for x in (None, "first", "last", 100)] == [
        None,
        50,
        500,
        100,
    ]


@pytest.mark.usefixtures("undrawn")
def test_a_verdict_says_how_far_it_reaches(tmp_path):
    for paper_x, scope in [(None, ""), (500, ""), (400, ""), (128000, ", tested up to 500 (paper: 128,000)")]:
        found = render(make_plan(paper_x=paper_x), make_frame(), tmp_path)
        assert f"**REPRODUCED** at scale `cpu`{scope}\n" in (
            tmp_path / "README.md"
        ).read_text() and found.text.endswith(f"\nREPRODUCED{scope}")


def test_arms_in_the_words_of_the_yaml(tmp_path, monkeypatch):
    """What all arms share is left out, values are those of the runs, a run that weights come from is named."""
    model = {"name": "armt", "gamma": "clip", "layers": 2, "heads": 4}
    models = {"armt": model, "raw": model | {"gamma": "raw"}, "mamba": {"name": "mamba", "layers": 4, "state_dim": 16}}
    inits = {"armt": "", "raw": {"run": "armt"}, "mamba": {"decoder": "gpt2"}}
    runs = [
        RunSpec("e", "cpu", arm, "", seed, models[arm], {"pairs": 8}, {"init": inits[arm], "lr": 0.1})
        for arm in models
        for seed in (0, 1)
    ]
    own = {"armt": {}, "raw": {"train.init": inits["raw"], "model.gamma?": "raw", "task.pairs": 8}}
    own["mamba"] = {"model": models["mamba"], "train.init": inits["mamba"]}
    settings = report.arm_settings(own, runs)
    assert (
        settings["armt"] == "`model.name: armt`"
        and settings["raw"] == "`model.name: armt, model.gamma: raw`, starts from `e/armt`"
    )
    assert settings["mamba"] == "`model.name: mamba, model.layers: 4, model.state_dim: 16, train.init: {decoder: gpt2}`"
    monkeypatch.setattr("lit_memory.report.render.draw", lambda *args: {})
    render(make_plan(settings=settings), make_frame(), tmp_path)
    section = (
        (tmp_path / "README.md").read_text().partition("## Arms\n\n")[2].partition("\n\n## Numbers")[0].splitlines()
    )
    assert [line.split("|")[1].strip() for line in section] == [
        "arm",
        section[1].split("|")[1].strip(),
        *settings,
    ] and settings["raw"] in section[3]


def test_importing_report_loads_nothing_heavy():
    heavy = {"torch", "lightning", "mlflow", "pandas", "numpy", "matplotlib", "omegaconf"}
    subprocess.run(
        [sys.executable, "-c", f"import sys, lit_memory.report; assert not {heavy!r} & set(sys.modules)"], check=True
    )


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(0.5, 100, 0.4038, 0.5962), (1.0, 10, 0.7225, 1.0), (0.0, 10, 0.0, 0.2775), (0.99, 600, 0.9783, 0.9954)],
)
def test_wilson_intervals(share, n, low, high):
    """By hand: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    assert report.wilson(share, n) == pytest.approx((low, high), abs=2e-4)


@pytest.mark.usefixtures("undrawn")
def test_the_table_of_intervals(tmp_path):
    """Samples of all seeds count together; without the option, or what a test has read, there is none."""
    plan = make_plan(config=ReportConfig(intervals=True))
    plan = dataclasses.replace(plan, runs=[run | {"samples": [200] * 4} for run in plan.runs])
    frame = make_frame()
    render(plan, frame[~((frame.arm == "no_gamma") & (frame.seed == 2))], tmp_path)
    page = (tmp_path / "README.md").read_text()
    low, high = report.wilson(0.991, 600)
    assert f"| gamma    | {low:.3f} to {high:.3f} |" in page and "200 x 3 seeds" in page and "200 x 2 seeds" in page
    assert "| samples |" not in (tmp_path / "table.md").read_text()
    render(make_plan(), frame, tmp_path)
    assert "Wilson" not in (tmp_path / "README.md").read_text()


def test_fewer_samples_at_some_values(tmp_path):
    """Intervals count those of their own value, and both tables say how many there are."""
    plan = make_plan(config=ReportConfig(intervals=True))
    plan = dataclasses.replace(plan, runs=[run | {"samples": [200, 200, 50, 10]} for run in plan.runs])
    table = render(plan, make_frame(), tmp_path).table
    page = (tmp_path / "README.md").read_text()
    cells = ["{:.3f} to {:.3f}".format(*report.wilson(0.991, 3 * n)) for n in (200, 200, 50, 10)]
    assert f"| gamma    | {' | '.join(cells)} | 200, 200, 50, 10 x 3 seeds |" in page
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert [row[5] for row in rows[:1] + rows[2:]] == ["samples", "200, 200, 50, 10", "200, 200, 50, 10"]


def test_what_an_experiment_tells_its_report(tmp_path):
    """How far the paper tests, where that is another scale; values of an arm as its scale and its grid have them."""

    def told(name, scale):
        whole = load(Path(report.__file__).parents[1] / "experiments" / f"{name}.yaml")
        specs = whole.at(scale).plan()
        job = Job(
            whole,
            whole.at(scale),
            [],
            specs,
            specs,
            {},
            tmp_path,
            argparse.Namespace(experiment=name, default_scale=True),
        )
        return job.report_plan([spec for spec in specs if spec.point in ("", "lr0.003")])

    plan = told("memreasoner_babilong", "cpu")
    assert (
        plan.paper_x == 128000
        and plan.settings["memreasoner_iu"]
        == "`model.name: memreasoner, model.update_lines: 6`, starts from `memreasoner_babi/memreasoner`"
    )
    assert told("armt_rwkv", "paper").paper_x is None is told("tarm_stability", "cpu").paper_x
    assert told("armt_rwkv", "cpu").settings == {
        "shared": "`model.name: rwkv`",
        "tuned": "`model.name: rwkv, train.lr: 0.003`",
    }
