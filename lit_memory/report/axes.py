"""Scales, limits and ticks of a figure's axes."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lit_memory.report.labels import short
from lit_memory.report.plan import ReportPlan
from lit_memory.report.style import GREY


class Axis(NamedTuple):
    """An x axis: where a value lies on it. On a logarithmic one, 0 lies left of a break."""

    log: bool
    zero: float | None = None
    """The position of 0 on a logarithmic axis that shows it."""

    @classmethod
    def of(cls, xs: Sequence[float], log: bool) -> "Axis":
        """The axis that shows these values, none of which is below 0 if it is logarithmic."""
        if not log or min(xs) > 0:
            return cls(log)
        logs = [math.log10(x) for x in xs if x > 0] or [0.0]
        return cls(log, min(logs) - max(0.15, 0.14 * (max(logs) - min(logs))))

    def position(self, x: float) -> float:
        """Where ``x`` is drawn."""
        if not self.log:
            return float(x)
        return math.log10(x) if x > 0 or self.zero is None else self.zero

    def curve(self, xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
        """Positions and values of a line through these points, which the break of the axis interrupts."""
        points = [(self.position(x), y) for x, y in zip(xs, ys, strict=True)]
        if self.zero is not None and len(xs) > 1 and xs[0] == 0:
            points.insert(1, (self.middle(xs), math.nan))
        return [x for x, _ in points], [y for _, y in points]

    def middle(self, xs: Sequence[float]) -> float:
        """The position of the break."""
        return (self.position(0) + min((self.position(x) for x in xs if x > 0), default=self.position(0) + 1)) / 2


def train_x_on_axis(plan: ReportPlan, xs: Sequence[float]) -> float | None:
    """The largest x of the training; None if it is 0, or so small that it would leave a quarter of the axis empty."""
    if not plan.train_x:
        return None
    position = Axis.of([*xs, plan.train_x], plan.config.log_x).position
    empty = position(xs[0]) - position(plan.train_x)
    return plan.train_x if empty <= 0.25 * (position(xs[-1]) - position(xs[0])) else None


def set_x_axis(axes: Any, axis: Axis, xs: Sequence[float], train_x: float | None) -> None:
    """Show every x, finished or not, with a tick at every tested x, and a label where there is room for it."""
    shown = [*xs, *([] if train_x is None else [train_x])]
    positions = sorted(map(axis.position, shown))
    span = 1.06 * (positions[-1] - positions[0])
    axes.set_xlim(positions[0] - 0.03 / 1.06 * span, positions[-1] + 0.03 / 1.06 * span)
    axes.set_xticks(list(map(axis.position, xs)), tick_labels(xs, train_x, axis, span))
    if axis.zero is not None and len(shown) > 1:
        draw_break(axes, axis.middle(shown), span)


def tick_labels(xs: Sequence[float], train_x: float | None, axis: Axis, span: float) -> list[str]:
    """A label for every x, "" where it would touch a more important one: of equal steps every n-th from the last on,
    else the ends, then the x of the training. Of a fraction three digits."""
    labels, texts = dict.fromkeys(xs, ""), {x: short(float(f"{x:.3g}") if abs(x) < 1 else x) for x in xs}

    def fit(x: float, other: float) -> bool:
        room = 0.012 * (len(texts[x]) + len(texts[other]) + 1)
        return x == other or abs(axis.position(x) - axis.position(other)) / span > room

    steps = {round((later - x) / (xs[-1] - xs[0]), 6) for x, later in itertools.pairwise(xs)}
    if not axis.log and len(steps) == 1 and train_x not in xs:
        strides = (xs[::-n] for n in range(1, len(xs) + 1))
        shown = next(some for some in strides if all(fit(*pair) for pair in itertools.pairwise(some)))
        return [texts[x] * (x in shown) for x in xs]
    for x in (xs[-1], xs[0], *(x for x in xs if x == train_x), *xs):
        if all(fit(x, other) for other, label in labels.items() if label):
            labels[x] = texts[x]
    return list(labels.values())


def draw_break(axes: Any, middle: float, span: float) -> None:
    """Two strokes across the line of the x axis, and a gap in it between them."""
    ends, where = [middle - 0.006 * span, middle + 0.006 * span], {"transform": axes.get_xaxis_transform()}
    axes.plot(ends, [0, 0], color="white", lw=3, zorder=2.6, clip_on=False, **where)
    stroke = {"marker": [(-0.5, -1), (0.5, 1)], "ms": 9, "mec": GREY, "mew": 1}
    axes.plot(ends, [0, 0], ls="", **stroke, zorder=2.7, clip_on=False, **where)


def set_log(axis: Any) -> None:
    """A logarithmic axis with plain numbers: 1, 2 and 5 of every decade, or the decades alone if there are many."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes, name = axis.axes, axis.axis_name
    getattr(axes, f"set_{name}scale")("log")
    low, high = getattr(axes, f"get_{name}lim")()
    if low <= 0:  # there is nothing to show
        low, high = getattr(axes, f"set_{name}lim")(0.1, 1)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_major_formatter(lambda y, _: short(y))
    axis.set_minor_formatter(NullFormatter())
