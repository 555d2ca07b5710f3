"""The kinds of figures that a report can draw. The only file that imports matplotlib, and that inside functions.

A kind is one function from results to an ``Axes``: it says how the arms look, while ``draw`` owns what all figures
share (style, title, labels, reference lines, legend, bytes). Beside the figure of its kind, a report may have
``_state``, y at one tested x against the floats of state, and one of its kind with seconds for y. Nothing touches
pyplot or leaves a trace in matplotlib's global state, and the same results give the same bytes.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_memory.report.placing import Box, place
from lit_memory.report.verdict import mean, std

if TYPE_CHECKING:
    from lit_memory.report.render import ReportPlan, Results

LABELS = {
    "pairs": "key-value pairs written",
    "exact_match": "exact match",
    "capacity": "capacity (pairs kept)",
    "seconds": "seconds per context",
    "train_tokens_per_s": "training, tokens a second",
}
LABELS |= {
    "bits_per_byte": "bits per byte",
    "segment_bits_per_byte": "bits per byte",
    "segment_loss": "loss (nats per token)",
}
LABELS |= {"step": "optimizer steps", "loss": "loss (nats per token)"}
SHARES = {
    "exact_match",
    "exact_set",
    "babilong_compare",
    "string_match_all",
    "recall",
    "accuracy",
    "token_accuracy",
    "answer_accuracy",
}
"""Metrics from 0 to 1, drawn on that range."""
LOWER = {"perplexity", "bits_per_byte", "loss", "segment_bits_per_byte", "segment_loss", "mse", "mae"}
"""Metrics of which less is better."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito, distinct for the colour-blind, without the yellow that disappears on white."""
MARKERS = (("o", 6), ("s", 5.5), ("^", 6.5), ("D", 5.5), ("v", 6.5), ("X", 7.5), ("P", 7.5))
"""With the size at which they look alike."""
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
GREY = "#595959"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "text.parse_math": False,  # labels come from the YAML: a lone dollar sign must not end a report
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
SEED = {"ls": "", "marker": ".", "ms": 5, "mew": 0, "alpha": 0.45, "zorder": 1.8}
WIDTH, HEIGHT = 7.0, 3.9
"""Inches, the height without the legend. Shown 700 pixels wide, a point of type is 1.4 pixels."""
NAMES = 9.5
"""Size of the names beside points."""
FAR = 12
"""Points of type between a point and a name that needs a line to it."""
METADATA = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
OPTIONAL = tuple(f"{name}.{suffix}" for name in ("state", "time") for suffix in METADATA)
"""Files that only some reports have."""


def label(name: str, words: str = "") -> str:
    """What an axis says: ``words`` where given, else the words for the field or metric ``name``."""
    return words or LABELS.get(name, name.replace("_", " "))


def short(x: float) -> str:
    """A tested value as people write it: 50, 0.5, 64k, 1M."""
    for unit, size, least in (("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(x) >= least and x % (size / 10) == 0:
            return f"{x / size:g}{unit}"
    return f"{x:,.0f}" if x == int(x) else f"{x:g}"


def draw(results: "Results", status: str) -> dict[str, bytes]:
    """figure.png and figure.pdf of the results, and state.* and time.* where the plan wants them; ``status`` stands
    under the title."""
    from matplotlib import style

    plan, config = results.plan, results.plan.config
    with style.context(["default", STYLE]):
        figures = {"figure": _figure(_line, results, status)}
        if (x := plan.state_x) is not None:
            condition = f"{label(config.x.removeprefix('test_'), config.x_label)}: {short(x)}"
            figures["state"] = _figure(partial(_state, x=x), results, f"{condition}\n{status}")
            _name_points(figures["state"], results, x)
        if config.time:
            figures["time"] = _figure(_line, results.of_time(config.time), status)
        return {f"{name}.{suffix}": _bytes(figure, suffix) for name, figure in figures.items() for suffix in METADATA}


AGREES = {True: "#D9F0E3", False: "#FBE0D2", None: "#EFEFEF"}
"""Ground of a mark that is, or is not, the paper's, or that cannot be compared."""


def draw_marks(name: str, status: str, marks: Mapping[tuple[str, str], tuple[str, bool | None]]) -> dict[str, bytes]:
    """figure.png and figure.pdf of a table: (row, column) -> what stands there, and whether it agrees with the paper,
    see ``AGREES``."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    rows, columns = (list(dict.fromkeys(part)) for part in zip(*marks, strict=True))
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH, 1.6 + 0.5 * len(rows)), dpi=200, layout="constrained")
        axes = figure.add_subplot(xlim=(0, len(columns)), ylim=(len(rows), 0))
        for (row, column), (text, agrees) in marks.items():
            x, y = columns.index(column), rows.index(row)
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=AGREES[agrees], edgecolor="white", lw=2))
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=12)
        axes.set_xticks([i + 0.5 for i in range(len(columns))], columns)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
        axes.tick_params(length=0, labelsize=10.5, labeltop=True, labelbottom=False)
        axes.spines[:].set_visible(False)
        axes.grid(False)
        axes.set_title(f"{name}\n", loc="left", fontsize=12, fontweight="bold", pad=16)
        axes.annotate(
            status, (0, 1), (0, 26), xycoords="axes fraction", textcoords="offset points", fontsize=9.5, color=GREY
        )
        words = {True: "as in the paper", False: "not as in the paper", None: "not comparable"}
        figure.legend(
            [Patch(facecolor=AGREES[key]) for key in words], words.values(), loc="outside lower center", ncols=3
        )
        return {f"figure.{suffix}": _bytes(figure, suffix) for suffix in METADATA}


def _figure(paint: Callable[[Any, "Results"], None], results: "Results", status: str) -> Any:
    """What all figures share, around the axes that ``paint`` fills."""
    from matplotlib.figure import Figure

    plan, config = results.plan, results.plan.config
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    paint(axes, results)
    axes.set_ylabel(label(config.y, config.y_label))
    if config.chance is not None:
        axes.axhline(config.chance, color=GREY, lw=1, ls=(0, (4, 3)), zorder=1.5, label=f"chance ({config.chance:.3g})")
    if config.log_y:
        _log_y(axes)
    elif config.y in SHARES:
        axes.set_ylim(-0.03, 1.04)
    if not results.cells:
        axes.text(0.5, 0.5, "no finished runs yet", transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_title(plan.experiment, loc="left", fontsize=12, fontweight="bold", pad=22 + 14 * status.count("\n"))
    axes.annotate(
        status, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", fontsize=9.5, color=GREY
    )
    _legend(figure, axes)
    return figure


def _log_y(axes: Any) -> None:
    """A logarithmic axis with plain numbers: 1, 2 and 5 of every decade, or the decades alone where there are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if low <= 0:  # there is nothing to show
        low, high = axes.set_ylim(0.1, 1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Any, axes: Any) -> None:
    """Below the axes, where it covers no data, in as many columns as fit; the figure grows by its rows, so the axes
    keep their height."""
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


def _bytes(figure: Any, suffix: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=suffix, metadata=METADATA[suffix])
    return file.getvalue()


def _line(axes: Any, results: "Results") -> None:
    """Mean over seeds against x, with a band of one standard deviation and the single seeds as faint points."""
    plan, config = results.plan, results.plan.config
    xs = sorted(plan.x_values)
    if len(xs) == 1:
        return _dots(axes, results)
    for look, name, groups in _arms(results, xs):
        low, high = zip(*(_band(config.y, group) for group in groups), strict=True)
        axes.fill_between(xs, low, high, color=look["color"], alpha=0.15, lw=0)
        axes.plot(
            [x for x, g in zip(xs, groups, strict=True) for _ in g],
            [v for g in groups for v in g],
            color=look["color"],
            **SEED,
        )
        axes.plot(xs, [mean(g) for g in groups], **look, label=name)
    train_x = _train_x(plan, xs)
    if train_x is not None:
        axes.axvline(
            train_x, color=GREY, lw=1.2, ls=(0, (1, 2)), zorder=1.5, label=f"trained on up to {short(train_x)}"
        )
    if config.identity:
        curve = [xs[0] + (xs[-1] - xs[0]) * i / 200 for i in range(201)]
        axes.plot(curve, curve, color=GREY, lw=1, zorder=1.5, label="all kept (y = x)")
    if config.y in LOWER and not config.log_y:
        _cut(axes, results, xs)
    _x_axis(axes, xs, train_x, config.log_x)
    axes.set_xlabel(label(config.x.removeprefix("test_"), config.x_label))


def _band(metric: str, values: list[float]) -> tuple[float, float]:
    """Mean minus and plus one standard deviation, of a share no further than a share can be; NaN for fewer than two
    values."""
    middle, spread = mean(values), std(values)
    low, high = middle - spread, middle + spread
    return (max(low, min(0.0, middle)), min(high, max(1.0, middle))) if metric in SHARES else (low, high)


def _bar(axes: Any, at: float, metric: str, values: list[float], color: str) -> None:
    """An error bar of the band."""
    middle, (low, high) = mean(values), _band(metric, values)
    axes.errorbar(
        [at], [middle], [[middle - low], [high - middle]], color=color, ls="", elinewidth=1.6, capsize=5, capthick=1.6
    )


def _cut(axes: Any, results: "Results", xs: list[float]) -> None:
    """Where one arm lies far above all others, which its curve would press into one line, the axis ends above those,
    and its numbers stand there."""
    ends = {}
    for look, name, groups in _arms(results, xs):
        means = [mean(group) for group in groups if math.isfinite(mean(group))]
        values = [v for group in groups for v in (*group, *_band(results.plan.config.y, group)) if math.isfinite(v)]
        if means:
            ends[name] = min(values), max(values), f"{name} ↑ {min(means):.3g} to {max(means):.3g}", _ink(look["color"])
    if len(ends) < 3:
        return
    *others, worst = sorted(ends, key=lambda name: ends[name][1])
    low, high = min(ends[name][0] for name in others), ends[others[-1]][1]
    least, _, text, color = ends[worst]
    if least - high > 2 * (high - low) > 0:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.2 * (high - low))
        axes.text(0.99, 0.98, text, transform=axes.transAxes, ha="right", va="top", fontsize=NAMES, color=color)


def _scale(xs: list[float], log: bool) -> tuple[Callable[[float], float], Callable[[float], float], float]:
    """From a value to its place on the axis and back; and where the axis is linear up to, if 0 is on a logarithmic
    one."""
    if (
        log and min(xs) == 0
    ):  # which has no logarithm: asinh is linear up to the smallest other one, and then logarithmic
        positive = min((x for x in xs if x > 0), default=1.0)
        return (lambda x: math.asinh(x / positive)), (lambda y: positive * math.sinh(y)), positive
    return (math.log, math.exp, 0.0) if log else (float, float, 0.0)


def _train_x(plan: "ReportPlan", xs: list[float]) -> float | None:
    """The largest x seen in training, but for 0, which is no length, and for one that would leave a quarter of the axis
    empty."""
    if not plan.train_x:
        return None
    scale, _, _ = _scale([*xs, plan.train_x], plan.config.log_x)
    return plan.train_x if scale(xs[0]) - scale(plan.train_x) <= 0.25 * (scale(xs[-1]) - scale(xs[0])) else None


def _x_axis(axes: Any, xs: list[float], train_x: float | None, log: bool) -> None:
    """Limits that hold every x, finished or not; a tick at every tested x, a label where it touches no more important
    one."""
    shown = [*xs, *([] if train_x is None else [train_x])]
    scale, back, linear = _scale(shown, log)
    if linear:
        axes.set_xscale("asinh", linear_width=linear)
    elif log:
        axes.set_xscale("log")
    ends = sorted(map(scale, shown))
    low, span = ends[0] - 0.03 * (ends[-1] - ends[0]), 1.06 * (ends[-1] - ends[0])
    axes.set_xlim(back(low), back(low + span))
    labels = dict.fromkeys(xs, "")
    for x in (xs[-1], xs[0], *(x for x in xs if x == train_x), *xs):
        gaps = [
            (abs(scale(x) - scale(other)) / span, len(text)) for other, text in labels.items() if text and other != x
        ]
        if all(gap > 0.009 * (len(short(x)) + length + 1) for gap, length in gaps):
            labels[x] = short(x)
    axes.set_xticks(xs, labels.values())
    axes.minorticks_off()


def _dots(axes: Any, results: "Results") -> None:
    """The arms side by side with error bars: what a line shows where the test has a single x."""
    config, x = results.plan.config, results.plan.x_values[0]
    names, room = [], 75 // len(results.plan.arms)  # characters of the names' size that an arm has room for
    for i, (look, name, (group,)) in enumerate(_arms(results, [x])):
        _bar(axes, i, results.plan.config.y, group, look["color"])
        axes.plot([i], [mean(group)], **look | {"mew": 0})
        axes.plot([i + 0.02 * len(results.plan.arms)] * len(group), group, color=look["color"], **SEED)
        names.append(
            "\n".join(
                line if len(line) < room else line.replace("_", "_\n") for line in name.replace(" (", "\n(").split("\n")
            )
        )
    longest = max(len(line) for name in names for line in name.split("\n"))
    axes.set_xticks(range(len(names)), names, size=STYLE["font.size"] * min(1.0, room / longest))
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_xlabel(f"{label(config.x.removeprefix('test_'), config.x_label)}: {short(x)}")


def _arms(results: "Results", xs: list[float]) -> Iterator[tuple[dict[str, Any], str, list[list[float]]]]:
    """Every arm of the plan: its look, which does not depend on what is finished, its name in the legend, its values at
    every x."""
    seeds = len(results.plan.seeds)
    for i, arm in enumerate(results.plan.arms):
        groups = [results.values(arm, None, x) for x in xs]
        finished = min(map(len, groups))
        color, (marker, size), dash = (
            options[n % len(options)] for options, n in ((COLORS, i), (MARKERS, i + i // len(COLORS)), (DASHES, i))
        )
        look = {"color": color, "marker": marker, "ls": dash, "lw": 1.8, "ms": size, "mec": "white", "mew": 0.7}
        yield look, arm if finished == seeds else f"{arm} ({finished} of {seeds} seeds)", groups


class Point(NamedTuple):
    """An arm in the second figure."""

    look: dict[str, Any]
    name: str
    floats: float
    """Of state."""
    y: float
    seeds: list[float]


class Decades(NamedTuple):
    """The axis of floats of state: powers of ten from ``low`` to ``high``, and a place for 0 left of a break."""

    low: int
    high: int

    @classmethod
    def around(cls, states: list[float]) -> "Decades":
        logs = [math.log10(floats) for floats in states if floats > 0] or [0.0]
        return cls(math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1))

    @property
    def zero(self) -> float:
        return self.low - max(0.4, 0.15 * (self.high - self.low))

    @property
    def gap(self) -> float:
        """Where the axis is broken."""
        return (self.zero + self.low) / 2

    def at(self, floats: float) -> float:
        return math.log10(floats) if floats > 0 else self.zero


def _points(results: "Results", x: float) -> tuple[list[Point], list[tuple[dict[str, Any], str]]]:
    """The arms that can be drawn against their state, and look and name, with the reason, of those that cannot."""
    plan, points, absent = results.plan, [], []
    for arm, (look, name, (seeds,)) in zip(plan.arms, _arms(results, [x]), strict=True):
        floats, y, look = plan.state(arm), mean(seeds), look | {"ls": ""}
        if not seeds:
            absent.append((look, name))
        elif floats is None:
            absent.append((look, f"{name}: unknown state"))
        elif not math.isfinite(y) or (plan.config.log_y and y <= 0):
            absent.append((look, f"{name}: {y:.3g}"))
        else:
            points.append(
                Point(look, f"{name}, grows" if plan.sizes(arm).get("state_growth") else name, floats, y, seeds)
            )
    return points, absent


def _state(axes: Any, results: "Results", x: float) -> None:
    """y at the tested ``x`` against the floats of state that one sample carries there. The legend names the arms
    without a point."""
    points, absent = _points(results, x)
    decades = _state_axis(axes, points)
    for point in points:
        at, color = decades.at(point.floats), point.look["color"]
        _bar(axes, at, results.plan.config.y, point.seeds, color)
        axes.plot([at], [point.y], **point.look)
        axes.plot([at] * len(point.seeds), point.seeds, color=color, **SEED)
    for look, name in absent:
        axes.plot([], [], **look, label=name)
    if results.plan.config.identity:
        axes.axhline(x, color=GREY, lw=1, zorder=1.5, label=f"all kept ({short(x)})")
    axes.set_xlabel("floats of state that one sample carries")


def _state_axis(axes: Any, points: list[Point]) -> Decades:
    """Ticks and limits; where an arm carries nothing, two strokes mark that the axis is broken left of the decades."""
    states = [point.floats for point in points]
    decades = Decades.around(states)
    low, high, start, ticks = decades.low, decades.high, float(decades.low), {}
    if any(states):
        ticks = {float(decade): short(10.0**decade) for decade in range(low, high + 1)}
        axes.set_xticks(
            [decade + math.log10(digit) for decade in range(low, high) for digit in range(2, 10)], minor=True
        )
    if 0 in states:
        start, ends, along = (
            decades.zero,
            [decades.gap + sign * 0.006 * (high - decades.zero) for sign in (-1, 1)],
            axes.get_xaxis_transform(),
        )
        ticks[start] = "0"
        axes.plot(ends, [0, 0], color="white", lw=3, zorder=2.6, transform=along, clip_on=False)
        axes.plot(
            ends,
            [0, 0],
            ls="",
            marker=[(-0.5, -1), (0.5, 1)],
            ms=9,
            mec=GREY,
            mew=1,
            zorder=2.7,
            transform=along,
            clip_on=False,
        )
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlim(start - 0.04 * (high - start), high + 0.04 * (high - start))
    return decades


def _name_points(figure: Any, results: "Results", x: float) -> None:
    """Write every arm's name beside its point, in its colour; where a crowd pushes a name away, a line leads to the
    point.

    Places depend on where the points lie on the page. So the figure is laid out first, and keeps that layout.
    """
    (axes,), (points, _) = figure.axes, _points(results, x)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    scale = 72 / figure.dpi  # from here on in points, the unit of type
    frame = Box(*(float(side) * scale for side in axes.bbox.extents))
    taken, spots = _taken(axes, results, points, frame, scale)
    boxes = place(spots, [_size(axes, point.name, scale) for point in points], taken, frame.grown(-3), gap=7)
    here = {"transform": axes.transAxes, "clip_on": False}
    for point, spot, box in zip(points, spots, boxes, strict=True):
        left, middle = frame.share(box.x0, (box.y0 + box.y1) / 2)
        axes.text(left, middle, point.name, va="center", fontsize=NAMES, color=_ink(point.look["color"]), **here)
        end = box.nearest(*spot)
        if math.dist(spot, end) > FAR and not any(other.crossed(spot, end) for other in boxes if other is not box):
            axes.plot(
                *zip(frame.share(*spot), frame.share(*end), strict=True),
                color=point.look["color"],
                lw=0.9,
                zorder=1.7,
                **here,
            )


def _ink(color: str) -> tuple[float, ...]:
    """A colour of the palette, dark enough to be read as type."""
    return tuple(0.65 * int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _taken(
    axes: Any, results: "Results", points: list[Point], frame: Box, scale: float
) -> tuple[list[Box], list[tuple[float, float]]]:
    """What no name may cover (points with their error bars, horizontal lines, the break of the axis), and where the
    points lie."""
    config, decades = results.plan.config, Decades.around([point.floats for point in points])

    def page(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y))
        return float(across) * scale, float(up) * scale

    spots = [page(decades.at(point.floats), point.y) for point in points]
    lines = [
        page(0, y)[1]
        for y in (config.chance, results.plan.state_x if config.identity else None)
        if y is not None and (y > 0 or not config.log_y)
    ]
    taken = [Box(frame.x0, y - 1, frame.x1, y + 1) for y in lines]
    for (x, y), point in zip(spots, points, strict=True):
        band = _band(config.y, point.seeds) if len(point.seeds) > 1 else ()
        ends = [page(0, v)[1] for v in (*band, *point.seeds) if v > 0 or not config.log_y]
        taken.append(Box(x - 6, min(y - 4, *ends), x + 6, max(y + 4, *ends)))
    if any(point.floats == 0 for point in points):
        x = page(decades.gap, points[0].y)[0]
        taken.append(Box(x - 7, frame.y0, x + 7, frame.y0 + 7))
    return taken, spots


def _size(axes: Any, name: str, scale: float) -> tuple[float, float]:
    """Width and height of a name, and a little air."""
    text = axes.text(0, 0, name, fontsize=NAMES)
    box = text.get_window_extent()
    text.remove()
    return float(box.width) * scale + 1, float(box.height) * scale + 1
