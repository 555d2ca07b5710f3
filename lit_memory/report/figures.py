"""The figures of a report: y against x, y against the floats of state, times against x, and the table of marks.

matplotlib is imported inside functions. Nothing touches pyplot or matplotlib's global state, and the same results give
the same bytes.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from lit_memory.report.axes import StateAxis, set_log_y, set_x_axis, train_x_on_axis
from lit_memory.report.labels import MINIMIZED, SHARES, short
from lit_memory.report.results import ReportPlan, Results
from lit_memory.report.style import (
    AGREEMENT,
    DPI,
    GREY,
    HEIGHT,
    SEED_POINT,
    SMALL,
    STYLE,
    WIDTH,
    arm_look,
    text_color,
)
from lit_memory.report.verdict import mean, std

METADATA = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
"""Format -> what matplotlib must not write into the file, as it changes."""
OPTIONAL = tuple(f"{name}.{suffix}" for name in ("state", "time") for suffix in METADATA)
"""Files that only some reports have."""


class Series(NamedTuple):
    """An arm in a figure."""

    arm: str
    name: str
    """In the legend."""
    look: dict[str, Any]
    """Arguments of ``Axes.plot``; they do not depend on which runs are finished."""
    groups: list[list[float]]
    """For every x, the values of the finished seeds."""


def draw(results: Results, status: str) -> dict[str, bytes]:
    """figure.png and figure.pdf of the results, and state.* and time.* if the report has them; ``status`` stands below
    the title."""
    from matplotlib import style

    plan = results.plan
    with style.context(["default", STYLE]):
        figures = {"figure": line_figure(results, status)}
        if plan.state_x is not None:
            figures["state"] = state_figure(results, plan.state_x, status)
        if plan.config.time and not results.summaries:
            figures["time"] = line_figure(results.of_time(plan.config.time), status)
        return {f"{name}.{suffix}": _save(figure, suffix) for name, figure in figures.items() for suffix in METADATA}


def line_figure(results: Results, status: str) -> Any:
    """The ``Figure`` of y against x."""
    return _figure(_draw_lines, results, status)


def state_figure(results: Results, x: float, status: str) -> Any:
    """The ``Figure`` of y at one tested x against the floats of state."""
    return _figure(partial(_draw_states, x=x), results, f"{results.plan.x_label}: {short(x)}\n{status}")


def _figure(draw_data: Callable[[Any, Results], None], results: Results, status: str) -> Any:
    """A figure with what all of them share around the data: title, labels, the line of chance, legend."""
    from matplotlib.figure import Figure

    plan, config = results.plan, results.plan.config
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    draw_data(axes, results)
    axes.set_ylabel(plan.y_label)
    if config.chance is not None:
        axes.axhline(config.chance, color=GREY, lw=1, ls=(0, (4, 3)), zorder=1.5, label=f"chance ({config.chance:.3g})")
    if config.log_y:
        set_log_y(axes)
    elif config.y in SHARES:
        axes.set_ylim(-0.03, 1.04)
    if not results.cells:
        axes.text(0.5, 0.5, "no finished runs yet", transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_title(plan.experiment, loc="left", fontsize=12, fontweight="bold", pad=22 + 14 * status.count("\n"))
    _draw_status(axes, status, above=8)
    _draw_legend(figure, axes)
    return figure


def _draw_status(axes: Any, status: str, above: float) -> None:
    """A remark between title and axes, ``above`` points over the axes."""
    axes.annotate(
        status, (0, 1), (0, above), xycoords="axes fraction", textcoords="offset points", fontsize=SMALL, color=GREY
    )


def _draw_legend(figure: Any, axes: Any) -> None:
    """Below the axes, in as many columns as fit; the figure grows by its rows, so the axes keep their height."""
    handles, names = axes.get_legend_handles_labels()
    for columns in range(min(len(names), 5), 0, -1):
        legend = figure.legend(
            handles, names, loc="outside lower center", ncols=columns, handlelength=2.8, columnspacing=1.6
        )
        box = legend.get_window_extent()
        if box.width < figure.bbox.width or columns == 1:
            figure.set_figheight(HEIGHT + box.height / figure.dpi)
            break
        legend.remove()


def _save(figure: Any, suffix: str) -> bytes:
    """The content of the file; the same figure gives the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format=suffix, metadata=METADATA[suffix])
    return file.getvalue()


def _series(results: Results, xs: list[float]) -> Iterator[Series]:
    """Every arm of the plan, finished or not."""
    seeds = len(results.plan.seeds)
    for i, arm in enumerate(results.plan.arms):
        groups = [results.values(arm, None, x) for x in xs]
        finished = min(map(len, groups))
        name = arm if finished == seeds else f"{arm} ({finished} of {seeds} seeds)"
        yield Series(arm, name, arm_look(i), groups)


def _draw_lines(axes: Any, results: Results) -> None:
    """Mean over seeds against x, with a band of one standard deviation and the single seeds as faint points."""
    plan, config = results.plan, results.plan.config
    xs = sorted(plan.x_values)
    if len(xs) == 1:
        return _draw_dots(axes, results)
    for series in _series(results, xs):
        color = series.look["color"]
        low, high = zip(*(_band(config.y, group) for group in series.groups), strict=True)
        axes.fill_between(xs, low, high, color=color, alpha=0.15, lw=0)
        seeds = [(x, value) for x, group in zip(xs, series.groups, strict=True) for value in group]
        axes.plot([x for x, _ in seeds], [value for _, value in seeds], color=color, **SEED_POINT)
        axes.plot(xs, [mean(group) for group in series.groups], **series.look, label=series.name)
    train_x = train_x_on_axis(plan, xs)
    if train_x is not None:
        name = f"trained on up to {short(train_x)}"
        axes.axvline(train_x, color=GREY, lw=1.2, ls=(0, (1, 2)), zorder=1.5, label=name)
    if config.identity:
        curve = [xs[0] + (xs[-1] - xs[0]) * i / 200 for i in range(201)]
        axes.plot(curve, curve, color=GREY, lw=1, zorder=1.5, label="all kept (y = x)")
    if config.y in MINIMIZED and not config.log_y:
        _cut_outlier(axes, results, xs)
    set_x_axis(axes, xs, train_x, config.log_x)
    axes.set_xlabel(plan.x_label)


def _band(metric: str, values: list[float]) -> tuple[float, float]:
    """Mean minus and plus one standard deviation, for a share cut at 0 and 1; NaN for fewer than two values."""
    middle, spread = mean(values), std(values)
    low, high = middle - spread, middle + spread
    return (max(low, min(0.0, middle)), min(high, max(1.0, middle))) if metric in SHARES else (low, high)


def _draw_bar(axes: Any, x: float, metric: str, values: list[float], color: str) -> None:
    """An error bar of the band."""
    middle, (low, high) = mean(values), _band(metric, values)
    axes.errorbar(
        [x], [middle], [[middle - low], [high - middle]], color=color, ls="", elinewidth=1.6, capsize=5, capthick=1.6
    )


def _cut_outlier(axes: Any, results: Results, xs: list[float]) -> None:
    """End the y axis below an arm that lies far above all others and would press them into one line; its numbers stand
    at the border."""
    ends = []
    for series in _series(results, xs):
        means = [mean(group) for group in series.groups if math.isfinite(mean(group))]
        values = [v for group in series.groups for v in (*group, *_band(results.plan.config.y, group))]
        values = [v for v in values if math.isfinite(v)]
        if means:
            ends.append((max(values), min(values), means, series))
    if len(ends) < 3:
        return
    *others, (_, least, means, series) = sorted(ends, key=lambda end: end[0])
    low, high = min(other[1] for other in others), others[-1][0]
    if least - high > 2 * (high - low) > 0:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.2 * (high - low))
        text, color = f"{series.name} ↑ {min(means):.3g} to {max(means):.3g}", text_color(series.look["color"])
        axes.text(0.99, 0.98, text, transform=axes.transAxes, ha="right", va="top", fontsize=SMALL, color=color)


def _draw_dots(axes: Any, results: Results) -> None:
    """The arms side by side with error bars: the figure of a test with a single x."""
    plan, x = results.plan, results.plan.x_values[0]
    arms, names = len(plan.arms), []
    room = 75 // arms  # characters of the names' size per arm
    for i, series in enumerate(_series(results, [x])):
        (group,), color = series.groups, series.look["color"]
        _draw_bar(axes, i, plan.config.y, group, color)
        axes.plot([i], [mean(group)], **series.look | {"mew": 0})
        axes.plot([i + 0.02 * arms] * len(group), group, color=color, **SEED_POINT)
        names.append(_wrapped(series.name, room))
    longest = max(len(line) for name in names for line in name.split("\n"))
    axes.set_xticks(range(arms), names, size=STYLE["font.size"] * min(1.0, room / longest))
    axes.set_xlim(-0.6, arms - 0.4)
    axes.set_xlabel(f"{plan.x_label}: {short(x)}")


def _wrapped(name: str, room: int) -> str:
    """A name on several lines: the count of seeds on its own, and a break at every underscore of a line without
    room."""
    lines = name.replace(" (", "\n(").split("\n")
    return "\n".join(line if len(line) < room else line.replace("_", "_\n") for line in lines)


def _draw_states(axes: Any, results: Results, x: float) -> None:
    """y at the tested ``x`` against the floats of state per sample there; the legend also names arms without a
    point."""
    plan, all_series = results.plan, list(_series(results, [x]))
    states = {series.arm: plan.state_size(series.arm) or 0.0 for series in all_series if _has_point(plan, series)}
    sizes = list(states.values())
    axis = StateAxis.around(sizes)
    axis.show(axes, sizes)
    positions = dict(zip(states, axis.positions(sizes), strict=True))
    for series in all_series:
        (group,), look, at = series.groups, series.look | {"ls": "", "mew": 0}, []
        if series.arm in positions:
            at = [positions[series.arm]]
            _draw_bar(axes, at[0], plan.config.y, group, look["color"])
            axes.plot(at * len(group), group, color=look["color"], **SEED_POINT)
        axes.plot(at, [mean(group)] * len(at), **look, label=_state_label(plan, series))
    if plan.config.identity:
        axes.axhline(x, color=GREY, lw=1, zorder=1.5, label=f"all kept ({short(x)})")
    axes.set_xlabel("floats of state that one sample carries")


def _has_point(plan: ReportPlan, series: Series) -> bool:
    """Whether an arm has a state and a mean that the state figure can show."""
    y = mean(series.groups[0])
    return plan.state_size(series.arm) is not None and math.isfinite(y) and (y > 0 or not plan.config.log_y)


def _state_label(plan: ReportPlan, series: Series) -> str:
    """The arm in the legend of the state figure, with the reason if it has no point."""
    (group,), name = series.groups, series.name
    if not group:
        return name  # it counts the seeds
    if plan.state_size(series.arm) is None:
        return f"{name}: unknown state"
    if not _has_point(plan, series):
        return f"{name}: {mean(group):.3g}"
    return f"{name}, grows" if plan.grows(series.arm) else name


def draw_marks(name: str, status: str, marks: Mapping[tuple[str, str], tuple[str, bool | None]]) -> dict[str, bytes]:
    """figure.png and figure.pdf of a table of marks: (row, column) -> text, and whether it agrees with the paper."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = list(dict.fromkeys(row for row, _ in marks))
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH, 1.6 + 0.5 * len(rows)), dpi=DPI, layout="constrained")
        axes = figure.add_subplot()
        _draw_cells(axes, marks)
        axes.set_title(f"{name}\n", loc="left", fontsize=12, fontweight="bold", pad=16)
        _draw_status(axes, status, above=26)
        patches = [Patch(facecolor=color) for color, _ in AGREEMENT.values()]
        words = [text for _, text in AGREEMENT.values()]
        figure.legend(patches, words, loc="outside lower center", ncols=3)
        return {f"figure.{suffix}": _save(figure, suffix) for suffix in METADATA}


def _draw_cells(axes: Any, marks: Mapping[tuple[str, str], tuple[str, bool | None]]) -> None:
    """A coloured cell per mark, row names on the left, column names above."""
    from matplotlib.patches import Rectangle

    rows, columns = (list(dict.fromkeys(part)) for part in zip(*marks, strict=True))
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    for (row, column), (text, agrees) in marks.items():
        x, y = columns.index(column), rows.index(row)
        color, _ = AGREEMENT[agrees]
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", lw=2))
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=12)
    axes.set_xticks([i + 0.5 for i in range(len(columns))], columns)
    axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
    axes.tick_params(length=0, labelsize=10.5, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.grid(False)
