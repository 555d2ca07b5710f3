"""Figures: every arm is named, nothing overlaps, every option shows. They are looked at as objects, not as files."""

import itertools

import pandas as pd
import pytest
from report_data import SEEDS, XS, make_frame, make_plan

from lit_memory.plan.sections import ReportConfig
from lit_memory.registry import REGISTRIES, load_class
from lit_memory.report import figures
from lit_memory.report.axes import StateAxis
from lit_memory.report.labels import MINIMIZED, label, short
from lit_memory.report.results import Results
from lit_memory.report.style import MARKERS, STYLE, arm_look


@pytest.fixture(autouse=True)
def _style():
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def line_figure(plan, frame):
    return figures.line_figure(Results.from_frame(plan, frame), "scale cpu")


def line_axes(plan, frame):
    return line_figure(plan, frame).axes[0]


def state_figure(plan, frame):
    return figures.state_figure(Results.from_frame(plan, frame), plan.state_x, "scale cpu")


def legend_texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


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
    words = legend_texts(figure) + [text.get_text() for text in axes.get_xticklabels()]
    assert all(any(word.replace("_\n", "_").startswith(arm) for word in words) for arm in plan.arms)
    boxes = [text.get_window_extent() for text in axes.get_xticklabels() if text.get_text()]
    assert len(boxes) >= 1 and not any(a.x1 > b.x0 for a, b in itertools.pairwise(boxes))
    check_legends(figure)
    assert axes.get_position().height * figure.get_figheight() > 2.5
    lines = [line for line in axes.lines if line.get_label() in plan.arms]
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(looks) in (0, len(lines))


def check_legends(figure):
    """Legends lie inside the figure, below the axes."""
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
    figure = figures.line_figure(Results.from_frame(plan, frame).of_time("seconds"), "scale cpu")
    figure.draw_without_rendering()
    axes = figure.axes[0]
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
def test_the_length_of_the_training_leaves_no_empty_axis(xs, train_x, log_x, shown):
    plan = make_plan(xs=xs, train_x=train_x, expect=[], config=ReportConfig(log_x=log_x))
    figure = line_figure(plan, make_frame(xs=xs))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert (f"trained on up to {train_x:,}" in {line.get_label() for line in axes.lines}) == shown
    positions = axes.transAxes.inverted().transform(axes.transData.transform([(x, 0.5) for x in xs]))[:, 0]
    assert positions[0] < 0.25 and positions[-1] - positions[0] > 0.4


@pytest.mark.parametrize("xs", [XS, [50]], ids=["band", "bar"])
@pytest.mark.parametrize(("y", "ends"), [("exact_match", (0.0, 1.0)), ("capacity", (1 / 3 - 0.57735, 2 / 3 + 0.57735))])
def test_bands_of_shares_stay_between_0_and_1(xs, y, ends):
    """One arm has 0, 0 and 1, the other one 1, 1 and 0: 0.333 and 0.667 with a standard deviation of 0.577."""
    frame = make_frame(xs=xs, metric=y, value=lambda arm, seed, x: float((seed == 2) == (arm == "gamma")))
    axes = line_axes(make_plan(xs=xs, expect=[], config=ReportConfig(y=y)), frame)
    paths = [path for collection in axes.collections for path in collection.get_paths()]
    heights = [y for path in paths for y in path.vertices[:, 1]]
    assert (min(heights), max(heights)) == pytest.approx(ends, abs=1e-4)


def test_an_arm_far_above_the_others_is_cut_where_less_is_better():
    """Its numbers, the least and the largest mean, stand at the border; curves that meet the others' range, or of which
    more is better, stay."""

    def look(far, y="perplexity", arms=("a", "b", "c")):
        start = {"a": 9.0, "b": 10.0, "c": far}
        frame = make_frame(arms, metric=y, value=lambda arm, seed, x: start[arm] + x / 1000 + 0.01 * seed)
        axes = line_axes(make_plan(arms, expect=[], config=ReportConfig(y=y)), frame)
        return axes.get_ylim()[1], [text.get_text() for text in axes.texts if "↑" in text.get_text()]

    high, texts = look(22.0)
    assert 10.6 < high < 11 and texts == ["c ↑ 22.1 to 22.5"]
    for kept in (look(12.0), look(22.0, y="capacity"), look(22.0, arms=("a", "c")), look(float("nan"))):
        assert not kept[1] and kept[0] > 10
    assert look(12.0)[0] > 12 and look(22.0, y="capacity")[0] > 22


@pytest.mark.parametrize("name", REGISTRIES["task"])
def test_minimized_metrics_are_those_of_the_tasks(name):
    task = load_class("task", name)
    for metric in {*task.metrics, *itertools.chain(*getattr(task, "curves", {}).values())}:
        assert (metric in MINIMIZED) == bool(task.minimized_metrics), metric


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
    known = [marker for marker, _ in MARKERS]
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
        assert text.startswith(arm) and (handle.get_color(), handle.get_marker()) == looks(i)
    points = markers(axes)
    assert [(point.get_color(), point.get_marker()) for point in points] == [looks(plan.arms.index(a)) for a in drawn]
    spots = [axes.transData.transform(point.get_xydata()[0]) for point in points]
    assert all(axes.bbox.contains(*spot) for spot in spots)
    for (a, left), (b, right) in itertools.combinations(zip(drawn, spots, strict=True), 2):
        if plan.state_size(a) == plan.state_size(b):
            assert abs(right[0] - left[0]) * 72 / figure.dpi > 3  # points of type; a marker is 6 wide
    assert ticks is None or [t.get_text() for t in axes.get_xticklabels()] == ticks
    check_legends(figure)
    assert axes.get_position().height * figure.get_figheight() > 2.4


def looks(i):
    return arm_look(i)["color"], arm_look(i)["marker"]


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


def test_axes_speak_in_words():
    axes = line_axes(make_plan(), make_frame())
    title = axes.get_title(loc="left")
    words = ("key-value pairs written", "exact match", "armt_ablation_gamma")
    assert (axes.get_xlabel(), axes.get_ylabel(), title) == words
    assert [t.get_text() for t in axes.get_xticklabels()] == ["50", "100", "200", "500"]
    assert axes.get_ylim() == (-0.03, 1.04)
    values = {0.5: "0.5", 1000: "1,000", 4096: "4,096", 16000: "16k", 128e3: "128k", 1e6: "1M", 2.5e6: "2.5M"}
    assert {x: short(x) for x in values} == values
    assert label("noise_level") == "noise level"


def test_every_knob_of_the_figure_shows():
    def look(config=None, **changes):
        frame = pd.concat([make_frame(), make_frame(metric="capacity")])
        figure = line_figure(make_plan(config=ReportConfig(**(config or {})), **changes), frame)
        axes = figure.axes[0]
        names = tuple(legend_texts(figure))
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
