"""Figures: every arm is named, nothing overlaps, every option shows. They are looked at as objects, not as files."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from report_data import ARMS, SEEDS, XS, make_frame, make_plan

from lit_memory.plan.sections import ReportConfig
from lit_memory.registry import REGISTRIES, load_class
from lit_memory.report import figures
from lit_memory.report.axes import Axis, tick_labels
from lit_memory.report.labels import MINIMIZED, balanced, is_share, label, short
from lit_memory.report.names import spread
from lit_memory.report.paper import points
from lit_memory.report.results import Results
from lit_memory.report.series import relative
from lit_memory.report.states import StateAxis
from lit_memory.report.style import ARCHITECTURES, COLUMN, STYLE, looks, spread_words


@pytest.fixture(autouse=True)
def _style():
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def line_figure(plan, frame):
    return figures.line_figure(relative(Results.from_frame(plan, frame)))


def line_axes(plan, frame):
    return line_figure(plan, frame).axes[0]


def state_figure(plan, frame):
    return figures.state_figure(Results.from_frame(plan, frame), plan.state_x)


def legend_texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def all_texts(figure):
    """Whatever names something: legend, names beside the axes and along them, on one line."""
    axes = figure.axes[0]
    texts = [text.get_text() for text in (*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels())]
    return [text.replace("\n", " ") for text in (*legend_texts(figure), *texts)]


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
def test_figures_name_every_arm_and_nothing_leaves_or_overlaps(name):
    plan, frame = FIGURES[name]
    figure = line_figure(plan, frame)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert all(any(word.startswith(arm) for word in all_texts(figure)) for arm in plan.arms)
    boxes = [text.get_window_extent() for text in axes.get_xticklabels() if text.get_text()]
    assert len(boxes) >= 1 and not any(a.x1 > b.x0 for a, b in itertools.pairwise(boxes))
    check_legends(figure)
    assert axes.get_position().height * figure.get_figheight() > (
        2.4 if len(plan.x_values) > 1 else 0.3 * len(plan.arms)
    )
    lines = [line for line in axes.lines if line.get_label() in plan.arms]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) in (0, len(lines))
    assert all(text.get_fontsize() >= 8 for text in [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels()])


@pytest.mark.parametrize("xs", [XS, [50]], ids=["lines", "rows"])
def test_the_figure_of_a_column_keeps_half_its_width_for_the_data(xs):
    """Names of arms are below the axes, or in two lines beside their rows; the label of x is whole."""
    names = {arm: f"{arm}, a name of quite some length" for arm in ARMS}
    config = ReportConfig(x_label="tokens of noise between the facts of a story")
    plan = make_plan(xs=xs, labels=names, config=config, expect=[])
    figure = figures.line_figure(Results.from_frame(plan, make_frame(xs=xs)), COLUMN)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert axes.bbox.width > 0.5 * figure.bbox.width
    label = axes.xaxis.label.get_window_extent()
    assert label.x0 >= 0 and label.x1 <= figure.bbox.x1


def check_legends(figure):
    """Legends lie inside the figure, below the axes; names beside the axes overlap nothing and lie inside."""
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts if text.get_text()), key=lambda b: b.y0)
    for low, high in itertools.combinations(boxes, 2):
        assert not (low.y1 > high.y0 + 1 and low.x0 < high.x1 and high.x0 < low.x1)
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 + 1 for box in boxes)
    bottom = figure.axes[0].get_tightbbox().y0
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= bottom + 1


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
def test_the_figure_of_times(frame, labels):
    """Seconds on a logarithmic axis with plain numbers, without chance and training length."""
    plan = make_plan(config=ReportConfig(time="seconds", chance=0.5, identity=True))
    figure = figures.line_figure(Results.from_frame(plan, frame).of_time("seconds"))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert axes.get_ylabel() == "seconds per context" and axes.get_yscale() == "log"
    shown = {text.get_text() for text in axes.get_yticklabels() + axes.get_yminorticklabels()}
    assert shown >= set(labels) and not any("$" in text for text in shown)
    assert not {*all_texts(figure)} & {"chance 0.5", "trained on up to 50", "all kept (y = x)"}


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
def test_the_length_of_the_training_leaves_no_empty_axis(xs, train_x, log_x, shown):
    plan = make_plan(xs=xs, train_x=train_x, expect=[], config=ReportConfig(log_x=log_x))
    figure = line_figure(plan, make_frame(xs=xs))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert (f"trained on up to {train_x:,}" in all_texts(figure)) == shown
    axis = Axis.of([*xs, train_x] if shown else xs, log_x)
    places = [(axis.position(x), 0.5) for x in xs]
    positions = axes.transAxes.inverted().transform(axes.transData.transform(places))[:, 0]
    assert positions[0] < 0.25 and positions[-1] - positions[0] > 0.4


FIVE = [0, 1, 2, 3, 4]


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_sweep_of_five_seeds_that_has_just_begun(done):
    """An arm without a finished seed, or with one, has no band, and the figure is drawn."""
    plan, frame = make_plan(seeds=FIVE), make_frame(seeds=FIVE)
    figure = line_figure(plan, frame[(frame["arm"] == "gamma") | (frame["seed"] < done)])
    texts = [" ".join(text.get_text().split()) for text in figure.findobj(lambda part: hasattr(part, "get_text"))]
    assert f"no_gamma ({done} of 5 seeds)" in texts


@pytest.mark.parametrize(("xs", "part"), [(XS, 1), ([50], 0)], ids=["band", "bar"])
@pytest.mark.parametrize(("y", "ends"), [("exact_match", (0.0, 1.0)), ("capacity", (0.08 - 0.2221, 0.92 + 0.2221))])
def test_five_seeds_have_the_interval_of_their_mean(xs, part, y, ends):
    """One arm has four 0 and a 0.4, the other four 1 and a 0.6: 0.08 and 0.92 with a standard deviation of 0.179, and t
    is 2.776. That of a share ends at 0 and 1."""

    def value(arm, seed, x):
        return abs((arm == "gamma") - 0.4 * (seed == 2))

    frame = make_frame(seeds=FIVE, xs=xs, metric=y, value=value)
    axes = line_axes(make_plan(seeds=FIVE, xs=xs, expect=[], config=ReportConfig(y=y)), frame)
    paths = [path for collection in axes.collections for path in collection.get_paths()]
    reached = [place for path in paths for place in path.vertices[:, part]]
    assert (min(reached), max(reached)) == pytest.approx(ends, abs=1e-4)
    assert spread_words(5, 6 * part) == f"mean of 5 seeds, {'band' if part else 'bar'}: 95 % interval of the mean"


@pytest.mark.parametrize("xs", [XS, [50]], ids=["lines", "rows"])
def test_fewer_seeds_are_shown_one_by_one(xs):
    """Every value of every seed is somewhere in the figure, and there is no band."""
    axes = line_axes(make_plan(xs=xs), make_frame(xs=xs))
    assert not axes.collections and spread_words(3, 2) == "mean of 3 seeds, faint: every seed"
    drawn = {round(float(v), 6) for line in axes.lines for v in (line.get_ydata() if len(xs) > 1 else line.get_xdata())}
    assert {round(value, 6) for value in make_frame(xs=xs)["value"]} <= drawn


@pytest.mark.parametrize(("y", "banded"), [("exact_match", False), ("capacity", True)])
def test_seeds_that_learn_and_seeds_that_do_not_are_shown_one_by_one(y, banded):
    """Three seeds of five at 1 have an interval from 0 to 1, which would hide all lines."""
    plan = make_plan(seeds=FIVE, expect=[], config=ReportConfig(y=y))
    frame = make_frame(seeds=FIVE, metric=y, value=lambda arm, seed, x: float(seed > 1))
    figure = figures.line_figure(Results.from_frame(plan, frame))
    assert bool(figure.axes[0].collections) == banded
    shown = "band: 95 % interval of the mean" if banded else "faint: every seed"
    assert told_below_title(figure) == f"scale cpu · mean of 5 seeds, {shown}"


def test_many_arms_have_no_bands():
    """They would lie on each other."""
    arms = [f"a{i}" for i in range(7)]
    axes = line_axes(make_plan(arms, FIVE, XS, expect=[]), make_frame(arms, FIVE, XS))
    assert not axes.collections and spread_words(5, 7) == "mean of 5 seeds, faint: every seed"


def test_an_arm_far_from_the_others_is_cut_where_less_is_better():
    """Its numbers, the least and the largest mean, stand at the border; curves that meet the others' range, or of which
    more is better, stay."""

    def look(far, y="perplexity", arms=("a", "b", "c")):
        start = {"a": 9.0, "b": 10.0, "c": far}
        frame = make_frame(arms, metric=y, value=lambda arm, seed, x: start[arm] + x / 1000 + 0.01 * seed)
        assert not math.isnan(far) or frame["value"].isna().any()
        axes = line_axes(make_plan(arms, expect=[], config=ReportConfig(y=y)), frame)
        return axes.get_ylim()[1], [text.get_text() for text in axes.texts if {*"↑↓"} & {*text.get_text()}]

    high, texts = look(22.0)
    assert 10.6 < high < 11 and texts == ["c ↑ 22.1 to 22.5"]
    for kept in (look(12.0), look(22.0, y="capacity"), look(22.0, arms=("a", "c")), look(float("nan"))):
        assert not kept[1] and kept[0] > 10
    assert look(-20.0)[1] == ["c ↓ −19.9 to −19.5"]
    assert look(12.0)[0] > 12 and look(22.0, y="capacity")[0] > 22
    frame = make_frame("abc", metric="perplexity", value=lambda arm, seed, x: {"a": 9.0, "b": 10.0, "c": 22.0}[arm] + x)
    frame.loc[(frame.arm == "c") & (frame.x == XS[0]), "value"] = math.nan
    axes = line_axes(make_plan("abc", expect=[], config=ReportConfig(y="perplexity")), frame)
    assert not any("nan" in text.get_text() for text in axes.texts)
    frame["value"] = [
        10.0 + x / 10 if arm == "c" else 10.0 + x / 1000 for arm, x in zip(frame.arm, frame.x, strict=True)
    ]
    axes = line_axes(make_plan("abc", expect=[], config=ReportConfig(y="perplexity")), frame)
    texts = [text.get_text() for text in axes.texts]
    assert axes.get_ylim()[1] < 11 and "c ↑ 15 to 60" in texts  # it leaves the others


@pytest.mark.parametrize("name", REGISTRIES["task"])
def test_a_metric_of_a_task_is_a_share_or_less_of_it_is_better(name):
    task = load_class("task", name)
    for metric in {*task.metrics, *itertools.chain(*getattr(task, "curves", {}).values())}:
        assert (metric in MINIMIZED) == bool(task.minimized_metrics) != is_share(metric), metric
        assert is_share(f"test_{metric}") == is_share(metric)


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
    value = value or (lambda arm, seed, x: states[arm][2] + 0.01 * seed)
    frame = make_frame(list(states), seeds, metric=plan.config.y, value=value)
    return plan, frame[~drop(frame)]


# Plan and frame, the arms that have a point (None: all), the labels of the ticks (None: not looked at).
DECADES = ["100", "1,000", "10k", "100k", "1M"]
WITHOUT_MEMORY = {arm: STATES[arm] for arm in ("window", "transformer")}
STATE_FIGURES = {
    "nine arms": (state_case(STATES), None, [*DECADES, "0"]),
    "no zero": (state_case({arm: STATES[arm] for arm in ("armt", "rmt")}), ["armt", "rmt"], DECADES[:4]),
    "only zeros": (state_case(WITHOUT_MEMORY), ["window", "transformer"], ["0"]),
    "one state": (state_case({"a": (1000, 0, 0.5)}), ["a"], ["1,000", "10k"]),
    "one seed": (state_case(STATES, seeds=[0]), None, [*DECADES, "0"]),
    "all in one place": (state_case({f"arm_{i}": (256, 0, 0.5) for i in range(9)}), None, DECADES[:2]),
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
    known = [marker for _, marker, _ in ARCHITECTURES.values()]
    return [line for line in axes.lines if line.get_marker() in known and len(line.get_xdata()) == 1]


@pytest.mark.parametrize("name", STATE_FIGURES)
def test_the_state_figure_names_every_arm_and_no_equal_state_hides_another(name):
    (plan, frame), drawn, ticks = STATE_FIGURES[name]
    figure = state_figure(plan, frame)
    figure.draw_without_rendering()
    axes, drawn = figure.axes[0], plan.arms if drawn is None else drawn
    (legend,) = figure.legends
    for i, arm in enumerate(plan.arms):
        text, handle = legend.get_texts()[i].get_text(), legend.legend_handles[i]
        assert text.startswith(arm) and (handle.get_color(), handle.get_marker()) == look_of(plan, arm)
    points = markers(axes)
    assert [(point.get_color(), point.get_marker()) for point in points] == [look_of(plan, arm) for arm in drawn]
    spots = [axes.transData.transform(point.get_xydata()[0]) for point in points]
    assert all(axes.bbox.contains(*spot) for spot in spots)
    for (a, left), (b, right) in itertools.combinations(zip(drawn, spots, strict=True), 2):
        if plan.state_size(a) == plan.state_size(b):
            assert abs(right[0] - left[0]) * 72 / figure.dpi > 3  # points of type; a marker is 6 wide
    assert ticks is None or [t.get_text() for t in axes.get_xticklabels()] == ticks
    assert all(tick.get_visible() for tick in axes.get_xticklabels())
    check_legends(figure)
    assert axes.get_position().height * figure.get_figheight() > 2.4


def look_of(plan, arm):
    look = looks(plan.architectures)[plan.arms.index(arm)]
    return look["color"], look["marker"]


def test_equal_states_stand_side_by_side():
    axis = StateAxis.around([256, 1000])
    assert axis == (2, 3) and axis.positions([1000]) == [3]
    left, alone, right = axis.positions([1000, 256, 1000])
    assert alone == pytest.approx(2.40824) and (left + right) / 2 == pytest.approx(3)
    assert right - left == pytest.approx(0.022)  # of the length of the axis
    zeros = axis.positions([0, 1000, 0])
    assert sum(zeros[::2]) / 2 == pytest.approx(axis.zero) == pytest.approx(1.6)


def test_the_state_figure_shows_the_chosen_x_in_the_looks_of_the_first():
    plan, frame = state_case(STATES, LAST, value=lambda arm, seed, x: x / 1000 + 0.01 * seed)
    for state_x, y, position in [("first", 0.06, 256 + 500 * 512), (200, 0.21, 256 + 500 * 512)]:
        plan.config.state_x = state_x
        lines = markers(state_figure(plan, frame).axes[0])
        assert [line.get_ydata()[0] for line in lines] == [pytest.approx(y)] * 9
        assert 10 ** lines[3].get_xdata()[0] == pytest.approx(position)
        first = [line for line in line_axes(plan, frame).lines if line.get_label() in STATES]
        assert [(line.get_color(), line.get_marker()) for line in lines] == [
            (line.get_color(), line.get_marker()) for line in first
        ]
    del plan.runs[0]["state_floats"], plan.runs[1]["state_floats"], plan.runs[2]["state_floats"]
    texts = legend_texts(state_figure(plan, frame))
    assert "armt: unknown state" in texts and "rmt_r, grows" in texts and "rmt" in texts


def told_below_title(figure):
    (shown,) = (text for note in figure.axes[0].texts if "scale cpu" in (text := note.get_text()))
    return " ".join(shown.split())


def test_figures_say_what_they_show_of_the_seeds_and_what_is_missing():
    """Lines have a band, points of the same report a bar; a figure of which runs are missing says so."""
    plan, frame = state_case({arm: STATES[arm] for arm in ("armt", "rmt")}, LAST, seeds=FIVE)
    whole, part = (Results.from_frame(plan, rows) for rows in (frame, frame[1:]))
    line, state = (f"mean of 5 seeds, {look}: 95 % interval of the mean" for look in ("band", "bar"))
    assert told_below_title(figures.line_figure(whole)) == f"scale cpu · {line}"
    assert told_below_title(figures.line_figure(part)) == f"scale cpu · {line} · INCOMPLETE"
    at = f"scale cpu · {plan.x_label}: 500"
    assert told_below_title(figures.state_figure(whole, 500)) == f"{at} · {state}"
    assert told_below_title(figures.state_figure(part, 500)) == f"{at} · {state} · INCOMPLETE"
    equal = Results.from_frame(*state_case({"armt": STATES["armt"], "rmt": STATES["armt"]}, LAST, seeds=FIVE))
    assert told_below_title(figures.state_figure(equal, 500)) == f"{at} · {state} · equal states side by side"
    config = replace(plan.config, curves=True)
    trained = replace(part, plan=replace(plan, config=config), validations={("armt", "exact_match", 10, 0): 0.5})
    figure = figures.curve_figure(trained)
    assert told_below_title(figure) == "scale cpu · every run by itself · INCOMPLETE"
    modified = replace(part, plan=replace(plan, evidence="toy", modified=["train.steps"]))
    figure = figures.time_figure(replace(modified, cells={("armt", "seconds", 500.0, 0): 1.0}))
    assert told_below_title(figure).startswith("scale cpu (toy), modified · ")


def test_axes_speak_in_words():
    labels = {"gamma": "with the correction", "no_gamma": "without it"}
    axes = line_axes(make_plan(title="Gamma keeps rewrites apart", labels=labels), make_frame())
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key-value pairs written", "exact match")
    texts = {text.get_text() for text in axes.texts}
    assert {"Gamma keeps rewrites apart", "with the correction", "without it"} <= texts
    assert "armt_ablation_gamma" in {text.get_text() for text in line_axes(make_plan(), make_frame()).texts}
    assert [t.get_text() for t in axes.get_xticklabels()] == ["50", "100", "200", "500"]
    assert axes.get_ylim() == (-0.03, 1.04)
    values = {
        0.5: "0.5",
        1000: "1,000",
        4096: "4,096",
        16000: "16k",
        128e3: "128k",
        1e6: "1M",
        2.5e6: "2.5M",
        2e15: "2e+15",
    }
    assert {x: short(x) for x in values} == values
    assert label("noise_level") == "noise level"


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("difference from LMM in %", 22, ["difference", "from LMM in %"]),
        ("short", 20, ["short"]),
        ("", 20, [""]),
        ("one_name_without_a_space", 12, ["one_name_wit", "hout_a_space"]),
        ("a b c d", 7, ["a b c d"]),
        ("told 1 % of all", 9, ["told 1\u00a0%", "of all"]),
    ],
)
def test_lines_of_a_text_are_about_equally_long(text, width, lines):
    assert balanced(text, width).split("\n") == lines


def test_every_knob_of_the_figure_shows():
    def look(config=None, **changes):
        frame = pd.concat([make_frame(), make_frame(metric="capacity")])
        figure = line_figure(make_plan(config=ReportConfig(**(config or {})), **changes), frame)
        axes = figure.axes[0]
        ends = tuple(tuple(map(float, line.get_xdata())) for line in axes.lines if line.get_label() in ARMS)
        return tuple(all_texts(figure)), axes.get_xlabel(), axes.get_ylabel(), ends, axes.get_yscale()

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
    shown = [
        look(knob) for knob in [*knobs, {"identity": True}, {"floors": {"capacity": "naive"}}, {"relative_to": "gamma"}]
    ] + [look(train_x=None)]
    assert len(set(shown)) == len(shown)


# Simulations of full protanopia, deuteranopia and tritanopia on linear RGB: Machado, Oliveira and Fernandes 2009.
BLINDNESS = (
    [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
)
TO_LMS = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
TO_LAB = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
TOGETHER = (  # in some figure of the project
    "armt prmt rmt rmt_r mamba rwkv deltanet gated_deltanet transformer xl",
    "lmm mac mag mal mamba armt transformer rmt",
    "memreasoner rmt mamba larimar",
    "tarm rmt transformer xl",
)


def seen(color, view):
    """A colour in OKLab (Ottosson 2020), as ``view`` sees it."""
    share = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ np.clip(np.array(view) @ linear, 0, 1))


@pytest.mark.parametrize("names", TOGETHER)
def test_architectures_that_meet_differ_for_the_colour_blind(names):
    for a, b in itertools.combinations(names.split(), 2):
        apart = [np.linalg.norm(seen(ARCHITECTURES[a][0], v) - seen(ARCHITECTURES[b][0], v)) for v in BLINDNESS]
        assert min(apart) > 0.08, (a, b)


def test_every_architecture_has_one_look_in_all_figures():
    """A colour and a marker of its own; more arms of one are darker; an unknown one takes from nobody who is there."""
    assert {*ARCHITECTURES} == {*REGISTRIES["model"]} - {"rmt_xl"}  # that is RMT or TARM, see run.reporting
    assert len({color for color, *_ in ARCHITECTURES.values()}) == len(ARCHITECTURES)
    assert len({marker for _, marker, _ in ARCHITECTURES.values()}) == len(ARCHITECTURES)
    alone, first, second, third = *looks(["mamba"]), *looks(["mamba", "armt", "mamba"])
    assert alone == first and (alone["color"], alone["ls"]) != (third["color"], third["ls"])
    assert third["marker"] == alone["marker"] and second["color"] == ARCHITECTURES["armt"][0]
    many = looks(["lmm"] * 4)
    light = [sum(int(look["color"][i : i + 2], 16) for i in (1, 3, 5)) for look in many]
    assert light == sorted(light, reverse=True) and len({*light}) == 4 and len({look["marker"] for look in many}) == 1
    assert min(light) > 0.4 * max(light)
    more = looks(["lmm"] * 5 + ["mamba"] + ["lmm"] * 5)
    assert len({(look["color"], look["marker"]) for look in more}) == 11 and more[0] == looks(["lmm"])[0]
    assert more[0]["marker"] == more[1]["marker"] and len({look["marker"] for look in more}) == 6
    strange = looks(["new", "armt", "", "rmt"])
    assert len({look["color"] for look in strange}) == 4 and strange[1]["color"] == ARCHITECTURES["armt"][0]


@pytest.mark.parametrize("seed", range(5))
def test_names_keep_their_order_and_do_not_overlap(seed):
    """Those with room stay at their ends; all others are as near as two that only just touch."""
    rng = np.random.default_rng(seed)
    ends, heights = rng.uniform(0, 60, 6).tolist(), rng.choice([11.0, 22.0], 6).tolist()
    places, order = spread(ends, heights), np.argsort(ends)
    gaps = [places[b] - places[a] - (heights[a] + heights[b]) / 2 for a, b in itertools.pairwise(order)]
    assert min(gaps) > -1e-6
    assert spread([0.0, 100.0, 50.0], [11.0] * 3) == [0, 100, 50]
    assert spread([5.0, 5.0], [10.0, 10.0]) == [0, 10]


def test_labels_of_equal_steps_are_at_equal_distances():
    """Every n-th from the last on; others as they fit, the ends and the length of the training first."""
    steps = [float(x) for x in range(100, 2001, 100)]
    shown = [text for text in tick_labels(steps, None, Axis(False), 1900.0) if text]
    assert shown == ["200", "500", "800", "1,100", "1,400", "1,700", "2,000"]
    with_training = [text for text in tick_labels(steps, 1500.0, Axis(False), 1900.0) if text]
    assert with_training[0] == "100" and "1,500" in with_training and with_training[-1] == "2,000"
    assert tick_labels([4.0, 8.0], None, Axis(False), 4.0) == ["4", "8"]


def test_zero_lies_left_of_a_break_on_a_logarithmic_axis():
    """The line is interrupted there, and 250 to 1,000 is as far as 1,000 to 4,000."""
    xs = [0, 250, 1000, 4000]
    axis = Axis.of(xs, log=True)
    zero, *others = map(axis.position, xs)
    assert np.diff(others) == pytest.approx(math.log10(4)) and zero < others[0] - 0.1
    places, values = axis.curve(xs, [4, 3, 2, 1])
    assert places[0] < places[1] < places[2] and math.isnan(values[1]) and values[2:] == [3, 2, 1]
    assert Axis.of([0, 5], log=False).curve([0, 5], [1, 2]) == ([0, 5], [1, 2])
    axes = line_axes(make_plan(xs=xs, train_x=None, expect=[], config=ReportConfig(log_x=True)), make_frame(xs=xs))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "250", "1,000", "4,000"]
    assert sum(isinstance(line.get_marker(), list) for line in axes.lines) == 1  # the strokes


QA1 = {"armt": "ARMT (145M):", "mamba": "Mamba (130M):"}


def paper_plan(xs, curves=QA1, values="armt_table1_babilong", rows=("Table 1: QA1",), unit=512, **config):
    config = {"paper_values": values, "paper_rows": list(rows), "paper_curves": curves, "paper_unit": unit} | config
    return make_plan(list(curves), xs=xs, expect=[], config=ReportConfig(**config), models={a: a for a in curves})


def test_the_papers_points_lie_beside_ours():
    """64k tokens are 125 segments of 512. 500k are beyond the test, and an average over lengths has no place."""
    plan = paper_plan([1, 8, 256], log_x=True)
    assert points(plan) == {"armt": [(125, 1.0), (250, 0.999)], "mamba": [(125, 1.0), (250, 0.995)]}
    figure = line_figure(plan, make_frame(list(QA1), xs=[1, 8, 256]))
    assert "the paper's values, hollow" in legend_texts(figure)
    scaled = paper_plan([1, 8, 256], unit=2048, paper_label="scaled", log_x=True)
    assert [x for x, _ in points(scaled)["armt"]] == [31.25, 62.5, pytest.approx(500e3 / 2048)]
    assert "scaled, hollow" in legend_texts(line_figure(scaled, make_frame(list(QA1), xs=[1, 8, 256])))
    hollow = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "none" and len(line.get_xdata())]
    assert [line.get_color() for line in hollow] == [ARCHITECTURES[arm][0] for arm in QA1]
    assert points(paper_plan([1, 8])) == {} and points(paper_plan([1, 8, 256], y="loss")) == {}
    table = "memreasoner_table8_iu_task1"
    short = paper_plan([0, 2000], {"memreasoner": "MemReasoner-1.4B (bAbi) [without IU]:"}, table, [], 1, y="accuracy")
    assert points(short) == {"memreasoner": [(0, 0.97), (1000, 0.82), (2000, 0.73)]}
    two_k = paper_plan([4, 8], {"lmm": "Titans (LMM): S-NIAH-N"}, "titans_table2_sniah", [], y="string_match_all")
    assert [x for x, _ in points(two_k)["lmm"]] == [4, 8]  # 2K and 4K, of 1,024


def test_the_papers_point_of_a_single_test():
    """All that its conditions ask without a length; in a row of the arm."""
    curves = {"rmt": "RMT:", "mamba": "Mamba: bAbi location change; Task 2"}
    plan = paper_plan([0], curves, "memreasoner_table1_location_change", [], 1, y="accuracy")
    assert points(plan) == {"rmt": [(0, 0.006)], "mamba": [(0, 0.345)]}
    axes = line_axes(plan, make_frame(list(curves), xs=[0], metric="accuracy"))
    assert 0.345 in [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1]


def test_a_figure_relative_to_an_arm():
    """In per cent of the same seed's, and 0 for the arm itself; the results stay as they are."""
    value = {"a": 10.0, "b": 12.0, "c": 0.0}
    frame = make_frame(["a", "b", "c"], metric="perplexity", value=lambda arm, seed, x: value[arm] * (1 + seed))
    plan = make_plan(["a", "b", "c"], expect=[], config=ReportConfig(y="perplexity", relative_to="a", log_y=True))
    results = Results.from_frame(plan, frame)
    shown = relative(results)
    assert shown.values("b", None, 50) == pytest.approx([20, 20, 20]) and shown.values("a", None, 500) == [0, 0, 0]
    assert shown.plan.y_label == "perplexity: difference from a in %" and not shown.plan.config.log_y
    assert results.values("b", None, 50) == [12, 24, 36] and relative(shown).plan.config.relative_to == "a"
    share = make_plan(["a", "b"], expect=[], config=ReportConfig(relative_to="a"))
    near = make_frame(["a", "b"], value=lambda arm, seed, x: 0.5 + 0.1 * (arm == "b"))
    axes = figures.line_figure(relative(Results.from_frame(share, near))).axes[0]
    assert axes.get_ylim()[1] > 20  # per cent, not the shares from 0 to 1 that are compared
    by_zero = Results.from_frame(make_plan(["c", "b"], config=ReportConfig(y="perplexity", relative_to="c")), frame)
    assert all(map(math.isnan, relative(by_zero).cells.values())) and not relative(by_zero).missing()
