"""The kinds of figures that a report can draw. The only file that imports matplotlib, and that inside ``draw``.

A kind is one function from results to an ``Axes``: it says how the arms look, while ``draw`` owns what all figures share (style,
title, labels, reference lines, legend, bytes). Nothing touches pyplot or leaves a trace in matplotlib's global state, and the
same results give the same bytes.
"""

import io
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lit_memory.expect import mean, std

if TYPE_CHECKING:
    from lit_memory.report import Results

LABELS = {"pairs": "key-value pairs written", "exact_match": "exact match", "capacity": "capacity (pairs kept)"}
SHARES = {"exact_match"}
"""Metrics from 0 to 1, drawn on that range."""
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
METADATA = {"png": {"Software": None}, "pdf": {"CreationDate": None}}


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
    """figure.png and figure.pdf of the results; ``status`` stands under the title."""
    from matplotlib import style
    from matplotlib.figure import Figure

    plan, config = results.plan, results.plan.config
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=200, layout="constrained")
        axes = figure.add_subplot()
        KINDS[config.kind](axes, results)
        axes.set_ylabel(label(config.y, config.y_label))
        if config.chance is not None:
            axes.axhline(config.chance, color=GREY, lw=1, ls=(0, (4, 3)), zorder=1.5, label=f"chance ({config.chance:.3g})")
        if config.log_y:
            axes.set_yscale("log")
        elif config.y in SHARES:
            axes.set_ylim(-0.03, 1.04)
        if not results.cells:
            axes.text(0.5, 0.5, "no finished runs yet", transform=axes.transAxes, ha="center", va="center", color=GREY)
        axes.set_title(plan.experiment, loc="left", fontsize=12, fontweight="bold", pad=22)
        axes.annotate(status, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", fontsize=9.5, color=GREY)
        _legend(figure, axes)
        return {f"figure.{suffix}": _bytes(figure, suffix) for suffix in METADATA}


def _legend(figure: Any, axes: Any) -> None:
    """Below the axes, where it covers no data, in as many columns as fit; the figure grows by its rows, so the axes keep their height."""
    handles, names = axes.get_legend_handles_labels()
    for columns in range(min(len(names), 5), 0, -1):
        legend = figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=2.8, columnspacing=1.6)
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
        means, spreads = [mean(g) for g in groups], [std(g) for g in groups]
        low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=look["color"], alpha=0.15, lw=0)
        axes.plot([x for x, g in zip(xs, groups, strict=True) for _ in g], [v for g in groups for v in g], color=look["color"], **SEED)
        axes.plot(xs, means, **look, label=name)
    if plan.train_x is not None:
        axes.axvline(plan.train_x, color=GREY, lw=1.2, ls=(0, (1, 2)), zorder=1.5, label=f"trained on up to {short(plan.train_x)}")
    if config.identity:
        curve = [xs[0] + (xs[-1] - xs[0]) * i / 200 for i in range(201)]
        axes.plot(curve, curve, color=GREY, lw=1, zorder=1.5, label="all kept (y = x)")
    _x_axis(axes, xs, plan.train_x, config.log_x)
    axes.set_xlabel(label(config.x.removeprefix("test_"), config.x_label))


def _x_axis(axes: Any, xs: list[float], train_x: float | None, log: bool) -> None:
    """Limits that hold every x, finished or not; a tick at every tested x, a label where it touches no more important one."""
    scale = math.log if log else float
    ends = sorted(scale(x) for x in (*xs, train_x) if x is not None)
    low, span = ends[0] - 0.03 * (ends[-1] - ends[0]), 1.06 * (ends[-1] - ends[0])
    if log:
        axes.set_xscale("log")
    axes.set_xlim(*(math.exp(end) if log else end for end in (low, low + span)))
    labels = dict.fromkeys(xs, "")
    for x in (xs[-1], xs[0], *(x for x in xs if x == train_x), *xs):
        gaps = [(abs(scale(x) - scale(other)) / span, len(text)) for other, text in labels.items() if text and other != x]
        if all(gap > 0.009 * (len(short(x)) + length + 1) for gap, length in gaps):
            labels[x] = short(x)
    axes.set_xticks(xs, labels.values())
    axes.minorticks_off()


def _dots(axes: Any, results: "Results") -> None:
    """The arms side by side with error bars: what a line shows where the test has a single x."""
    config, x = results.plan.config, results.plan.x_values[0]
    names = []
    for i, (look, name, (group,)) in enumerate(_arms(results, [x])):
        axes.errorbar([i], [mean(group)], [std(group)], color=look["color"], ls="", elinewidth=1.6, capsize=5, capthick=1.6)
        axes.plot([i], [mean(group)], **look | {"mew": 0})
        axes.plot([i + 0.02 * len(results.plan.arms)] * len(group), group, color=look["color"], **SEED)
        names.append(name.replace(" (", "\n("))
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_xlabel(f"{label(config.x.removeprefix('test_'), config.x_label)}: {short(x)}")


def _arms(results: "Results", xs: list[float]) -> Iterator[tuple[dict[str, Any], str, list[list[float]]]]:
    """Every arm of the plan: its look, which does not depend on what is finished, its name in the legend, its values at every x."""
    seeds = len(results.plan.seeds)
    for i, arm in enumerate(results.plan.arms):
        groups = [results.values(arm, None, x) for x in xs]
        finished = min(map(len, groups))
        color, (marker, size), dash = (options[n % len(options)] for options, n in ((COLORS, i), (MARKERS, i + i // len(COLORS)), (DASHES, i)))
        look = {"color": color, "marker": marker, "ls": dash, "lw": 1.8, "ms": size, "mec": "white", "mew": 0.7}
        yield look, arm if finished == seeds else f"{arm} ({finished} of {seeds} seeds)", groups


KINDS: dict[str, Callable[[Any, "Results"], None]] = {"line": _line}
