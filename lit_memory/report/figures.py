"""The figures of a report: y against x, y against the floats of state, times against x, and the training.

matplotlib is imported inside functions. Nothing touches pyplot or matplotlib's global state, and the same results give
the same bytes.
"""

import io
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from lit_memory.report.axes import Axis, set_x_axis, train_x_on_axis
from lit_memory.report.curves import draw_curves, draw_reached, shows_shares
from lit_memory.report.grid import broke_down, draw_grid, stopped_at, swept
from lit_memory.report.labels import balanced, short
from lit_memory.report.names import Drawn, Name, below_title, head, lay_out, legend, name_ends, thin_ticks
from lit_memory.report.paper import points
from lit_memory.report.results import Results
from lit_memory.report.series import RELATIVE, are_wide, draw_bar, draw_spread, floors, relative, series_of, show_values
from lit_memory.report.states import draw_states, has_equal
from lit_memory.report.style import (
    COLUMN,
    DPI,
    GREY,
    HEIGHT,
    PAPER,
    REFERENCE,
    SEED_POINT,
    SMALL,
    STYLE,
    WIDTH,
    spread_words,
    text_color,
)
from lit_memory.report.views import memory_figures
from lit_memory.util.views import VIEWS

METADATA = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
"""Format -> what matplotlib must not write into the file, as it changes."""
OPTIONAL = tuple(
    f"{name}.{suffix}"
    for name in ("state", "time", "curves", "grid", *(f"memory_{view}" for view in VIEWS))
    for suffix in METADATA
)
"""Files that only some reports have."""


def draw(results: Results) -> dict[str, bytes]:
    """figure.png and figure.pdf of the results, and state.*, time.*, curves.*, grid.* and memory_* if it has them. Of a
    claim about times, the figure shows these, and there is no time.*."""
    from matplotlib import style

    plan = results.plan
    with style.context(["default", STYLE]):
        lines = time_figure if plan.about_time else metric_figure
        figures = {"figure": lines(results)}
        if plan.state_x is not None:
            figures["state"] = state_figure(results, plan.state_x)
        if plan.times_apart:
            figures["time"] = time_figure(results)
        if results.learning:
            figures["curves"] = curve_figure(results)
        if plan.grid:
            figures["grid"] = grid_figure(results)
        figures |= memory_figures(results)
        column = {"figure_column": lines(results, COLUMN)}
        return saved(figures) | saved(column, METADATA.keys() & {"pdf"})


def line_figure(results: Results, width: float = WIDTH) -> Any:
    """The ``Figure`` of y against x, ``width`` inches wide; of a test with a single x, one row per arm."""
    plan = results.plan
    single = len(plan.x_values) == 1
    wide = not single and are_wide(results, sorted(plan.x_values))
    words = spread_words(len(plan.seeds), 0 if single else len(plan.arms), wide)
    if single:
        row = 0.3 if width > COLUMN else 0.4
        return _figure(_draw_rows, results, [words], width, 1.0 + row * len(plan.arms))
    return _figure(partial(_draw_lines, wide=wide), results, [words], width)


def state_figure(results: Results, x: float) -> Any:
    """The ``Figure`` of y at one tested x against the floats of state."""
    words = [f"{results.plan.x_label}: {short(x)}", spread_words(len(results.plan.seeds), 0)]
    words += ["equal states side by side"] * has_equal(results, x)
    return _figure(partial(draw_states, x=x), results, words)


def metric_figure(results: Results, width: float = WIDTH) -> Any:
    """The ``Figure`` of y against x, as ``report.relative_to`` asks for it."""
    return line_figure(relative(results), width)


def time_figure(results: Results, width: float = WIDTH) -> Any:
    """The ``Figure`` of the times against x."""
    return line_figure(results.of_time(results.plan.config.time), width)


def curve_figure(results: Results) -> Any:
    """The ``Figure`` of a metric along the training, every run by itself, or the share of runs that have reached the
    threshold."""
    plan = results.plan
    if shows_shares(plan):
        told = f"{len(plan.seeds)} runs an arm; steps count from the start, what is reached is of the last stage"
        return _figure(draw_reached, results, [told])
    staged = any(plan.last_stage(arm, seed) for arm in plan.arms for seed in plan.seeds)
    bold = "; bold: on the whole task, after easier stages" if staged else ""
    return _figure(draw_curves, results, [f"every run by itself{bold}"])


def grid_figure(results: Results) -> Any:
    """The ``Figure`` of the last validation against what was tuned."""
    chosen_by = "the seeds that choose" if results.plan.tune_seeds else "seeds"
    seeds = f"mean over {chosen_by}, dots: every seed; " if len(results.plan.seeds) > 1 else ""
    others = "of the other settings the best; " if len(swept(results.plan)) > 1 else ""
    broke, stopped = any(map(broke_down, results.plan.grid)), any(map(stopped_at, results.plan.grid))
    reasons = " or ".join(["broke down"] * broke + ["stopped at a stage"] * stopped)
    lost = f"; ×: {reasons}" if reasons else ""
    return _figure(draw_grid, results, [f"{others}{seeds}rings: chosen{lost}"])


def _figure(
    draw_data: Callable[[Any, Results], Drawn],
    results: Results,
    words: Collection[str],
    width: float = WIDTH,
    height: float = HEIGHT,
) -> Any:
    """A figure with what all of them share around the data: title, names at the ends of lines or a legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    drawn = draw_data(axes, results)
    if not results.cells:
        axes.text(0.5, 0.5, "no finished runs yet", transform=axes.transAxes, ha="center", va="center", color=GREY)
    # a paper has a caption
    top = 0.0 if width == COLUMN else head(figure, results.plan.heading, below_title(results, *words))
    lay_out(figure, top)
    names = [*drawn.ends, *drawn.references]
    at_ends = width > COLUMN and len(drawn.ends) == len(drawn.handles) and name_ends(axes, names)
    handles = [] if at_ends else list(drawn.handles)
    if drawn.paper:
        label = f"{results.plan.config.paper_label}, hollow"
        handles += axes.plot([], [], color=GREY, marker="o", mec=GREY, **PAPER, label=label)
    legend(figure, handles, height + top)
    lay_out(figure, top)
    if not at_ends:
        name_ends(axes, drawn.references, wide=True)
    for one in figure.axes:
        thin_ticks(one)
    return figure


def saved(figures: Mapping[str, Any], suffixes: Collection[str] | None = None) -> dict[str, bytes]:
    """Name -> the content of NAME.png and NAME.pdf, or of ``suffixes``; the same figure gives the same bytes."""
    contents = {}
    for name, figure in figures.items():
        for suffix in METADATA if suffixes is None else suffixes:
            figure.savefig(file := io.BytesIO(), format=suffix, metadata=METADATA[suffix])
            contents[f"{name}.{suffix}"] = file.getvalue()
    return contents


def _draw_lines(axes: Any, results: Results, wide: bool) -> Drawn:
    """Mean over seeds against x, with every seed as a faint line, or a band of confidence where there are enough. wide:
    see ``has_bands``."""
    plan, config, xs = results.plan, results.plan.config, sorted(results.plan.x_values)
    train_x, own = train_x_on_axis(plan, xs), points(plan)
    axis = Axis.of([*xs, *([] if train_x is None else [train_x])], config.log_x)
    drawn = Drawn([], [], [], bool(own))
    for series in series_of(results, xs):
        draw_spread(axes, axis, config.y, xs, series, len(plan.arms), wide=wide)
        drawn.handles.extend(axes.plot(*axis.curve(xs, series.means), **series.look, label=series.name))
        end, last = series.means[-1], axis.position(xs[-1])
        if math.isfinite(end) and (end > 0 or not config.log_y):
            drawn.ends.append(Name(series.name, last, end, text_color(series.look["color"])))
        if series.arm in own:
            look = {name: series.look[name] for name in ("color", "marker", "ms")} | PAPER
            axes.plot(*axis.curve(*zip(*own[series.arm], strict=True)), **look, mec=look["color"])
    if config.identity:
        curve = [xs[0] + (xs[-1] - xs[0]) * i / 200 for i in range(201)]
        axes.plot(list(map(axis.position, curve)), curve, **REFERENCE)
        drawn.references.append(Name("all kept (y = x)", axis.position(xs[-1]), xs[-1]))
    for name, means in floors(results, xs):
        axes.plot(*axis.curve(xs, means), **REFERENCE)
        drawn.references.append(Name(name, axis.position(xs[-1]), means[-1]))
    if config.chance is not None and (config.chance > 0 or not config.log_y):
        axes.axhline(config.chance, **REFERENCE)
        drawn.references.append(Name(f"chance {config.chance:.3g}", axis.position(xs[-1]), config.chance))
    unbounded = config.y == RELATIVE or plan.less_is_better(config.y)
    cut = _cut_outlier(axes, results, xs) if unbounded and not config.log_y else None
    set_x_axis(axes, axis, xs, train_x)
    if train_x is not None:
        _draw_vertical(axes, axis.position(train_x), f"trained on up to {short(train_x)}")
    axes.set_xlabel(balanced(plan.x_label, int(72 * axes.figure.get_figwidth() / 7)))
    show_values(axes.yaxis, plan)
    return drawn._replace(ends=[end for end in drawn.ends if end.text != cut], handles=_without(drawn.handles, cut))


def _without(handles: list[Any], name: str | None) -> list[Any]:
    return [handle for handle in handles if handle.get_label() != name]


def _draw_vertical(axes: Any, position: float, text: str) -> None:
    """A reference line with its name above the axes, where no data are."""
    axes.axvline(position, **REFERENCE)
    low, high = axes.get_xlim()
    share = (position - low) / (high - low)
    side = "left" if share < 0.2 else "right" if share > 0.8 else "center"
    where = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(text, (position, 1), (0, 3), ha=side, va="bottom", fontsize=SMALL, color=GREY, **where)


def _cut_outlier(axes: Any, results: Results, xs: list[float]) -> str | None:
    """End the y axis before an arm that lies, or ends, far above or below all others and would press them into one
    line; its numbers stand at the border. Its name; None if there is none."""
    ranges = []
    for series in series_of(results, xs):
        values = [v for group in series.groups for v in group if math.isfinite(v)]
        if values:
            ranges.append((min(values), max(values), series))
    for up in (True, False) if len(ranges) > 2 else ():
        *others, (least, most, series) = sorted(ranges, key=lambda r: r[1] if up else -r[0])
        low, high = min(low for low, *_ in others), max(high for _, high, _ in others)
        span, gap = high - low, least - high if up else low - most
        reach = most - high if up else low - least
        if span > 0 and (gap > 2 * span or reach > 4 * span):
            axes.set_ylim(low - (0.05 if up else 0.2) * span, high + (0.2 if up else 0.05) * span)
            means = [value for value in series.means if math.isfinite(value)]
            shown = f"{min(means):.3g} to {max(means):.3g}".replace("-", "−")
            look = {"fontsize": SMALL, "color": text_color(series.look["color"]), "ha": "right"}
            look |= {"y": 0.98, "va": "top"} if up else {"y": 0.02, "va": "bottom"}
            axes.text(0.99, s=f"{series.name} {'↑' if up else '↓'} {shown}", transform=axes.transAxes, **look)
            return series.name
    return None


def _draw_rows(axes: Any, results: Results) -> Drawn:
    """A row per arm, with its seeds and their mean: the figure of a test with a single x."""
    plan, x, names = results.plan, results.plan.x_values[0], []
    own, y = points(plan), plan.config.y
    for i, series in enumerate(series_of(results, [x])):
        (group,), look = series.groups, series.look
        draw_bar(axes, i, y, group, look["color"], across=True)
        axes.plot(series.means, [i], **look | {"ls": "", "mew": 0})
        if len(series.seeds) > 1:
            axes.plot(group, [i + 0.22] * len(group), color=look["color"], **SEED_POINT)
        for _, value in own.get(series.arm, ()):
            paper = {name: look[name] for name in ("color", "marker", "ms")} | PAPER
            axes.plot([value], [i - 0.22], **paper | {"ls": ""}, mec=look["color"])
        names.append(series.name)
    points_wide = 72 * axes.figure.get_figwidth()
    names = [balanced(name, int(0.4 * points_wide / (0.55 * SMALL))) for name in names]
    axes.set_yticks(range(len(names)), names, fontsize=SMALL)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    show_values(axes.xaxis, plan)
    if plan.config.chance is not None:
        _draw_vertical(axes, plan.config.chance, f"chance {plan.config.chance:.3g}")
    where = balanced(f"({plan.x_label}: {short(x)})", int(points_wide / 9))
    axes.set_xlabel(f"{plan.y_label}\n{where}" if "\n" in where else f"{plan.y_label}   {where}")
    return Drawn([], [], [], bool(own))
