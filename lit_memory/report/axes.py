"""Scales, limits and ticks of a figure's axes."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lit_memory.report.labels import short
from lit_memory.report.results import ReportPlan
from lit_memory.report.style import GREY


class Scale(NamedTuple):
    """Where a value lies on an axis."""

    position: Callable[[float], float]
    value: Callable[[float], float]
    """The inverse of ``position``."""
    linear_width: float = 0.0
    """End of the linear part of a logarithmic axis that shows 0."""

    @classmethod
    def of(cls, xs: Sequence[float], log: bool) -> "Scale":
        """A linear or logarithmic axis for these values. 0 has no logarithm: with it, the axis is asinh, which is
        linear up to the smallest other value and logarithmic from there."""
        if not log:
            return cls(float, float)
        if min(xs) != 0:
            return cls(math.log, math.exp)
        width = min((x for x in xs if x > 0), default=1.0)
        return cls(lambda x: math.asinh(x / width), lambda y: width * math.sinh(y), width)


def train_x_on_axis(plan: ReportPlan, xs: Sequence[float]) -> float | None:
    """The largest x of the training; None if it is 0, or so small that it would leave a quarter of the axis empty."""
    if not plan.train_x:
        return None
    position = Scale.of([*xs, plan.train_x], plan.config.log_x).position
    empty = position(xs[0]) - position(plan.train_x)
    return plan.train_x if empty <= 0.25 * (position(xs[-1]) - position(xs[0])) else None


def set_x_axis(axes: Any, xs: Sequence[float], train_x: float | None, log: bool) -> None:
    """Show every x, finished or not, with a tick at every tested x, and a label where there is room for it."""
    shown = [*xs, *([] if train_x is None else [train_x])]
    scale = Scale.of(shown, log)
    if scale.linear_width:
        axes.set_xscale("asinh", linear_width=scale.linear_width)
    elif log:
        axes.set_xscale("log")
    positions = sorted(map(scale.position, shown))
    length = positions[-1] - positions[0]
    low, span = positions[0] - 0.03 * length, 1.06 * length
    axes.set_xlim(scale.value(low), scale.value(low + span))
    axes.set_xticks(xs, _tick_labels(xs, train_x, scale, span))
    axes.minorticks_off()


def _tick_labels(xs: Sequence[float], train_x: float | None, scale: Scale, span: float) -> list[str]:
    """A label for every x, "" where it would touch a more important one: the ends, then the x of the training."""
    labels = dict.fromkeys(xs, "")
    for x in (xs[-1], xs[0], *(x for x in xs if x == train_x), *xs):
        text = short(x)
        others = [(other, label) for other, label in labels.items() if label and other != x]
        if all(
            abs(scale.position(x) - scale.position(other)) / span > 0.009 * (len(text) + len(label) + 1)
            for other, label in others
        ):
            labels[x] = text
    return list(labels.values())


def set_log_y(axes: Any) -> None:
    """A logarithmic y axis with plain numbers: 1, 2 and 5 of every decade, or the decades alone if there are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if low <= 0:  # there is nothing to show
        low, high = axes.set_ylim(0.1, 1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
    axes.yaxis.set_minor_formatter(NullFormatter())


class StateAxis(NamedTuple):
    """An x axis of floats of state: powers of ten from ``low`` to ``high``, and 0 left of a break in the axis."""

    low: int
    high: int

    @classmethod
    def around(cls, states: Sequence[float]) -> "StateAxis":
        """The decades that hold all states."""
        logs = [math.log10(floats) for floats in states if floats > 0] or [0.0]
        low = math.floor(min(logs))
        return cls(low, max(math.ceil(max(logs)), low + 1))

    @property
    def zero(self) -> float:
        """The position of 0."""
        return self.low - max(0.4, 0.15 * (self.high - self.low))

    def positions(self, states: Sequence[float]) -> list[float]:
        """Where to draw these states; equal ones side by side, as their points could hide each other."""
        length, shown = self.high - (self.zero if 0 in states else self.low), []
        for i, floats in enumerate(states):
            equal, rank = states.count(floats), states[:i].count(floats)
            step = min(0.022, 0.07 / equal) * length
            exact = math.log10(floats) if floats > 0 else self.zero
            shown.append(exact + (rank - (equal - 1) / 2) * step)
        return shown

    def show(self, axes: Any, states: Sequence[float]) -> None:
        """Set ticks and limits for these states; with a 0 among them, draw the break."""
        start, ticks = float(self.low), {}
        if any(states):
            ticks = {float(decade): short(10.0**decade) for decade in range(self.low, self.high + 1)}
            decades = range(self.low, self.high)
            minor = [decade + math.log10(digit) for decade in decades for digit in range(2, 10)]
            axes.set_xticks(minor, minor=True)
        if 0 in states:
            start = self.zero
            ticks[start] = "0"
            self._draw_break(axes)
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_xlim(start - 0.04 * (self.high - start), self.high + 0.04 * (self.high - start))

    def _draw_break(self, axes: Any) -> None:
        """Two strokes between 0 and the decades, and a gap in the line of the axis between them."""
        middle, half = (self.zero + self.low) / 2, 0.006 * (self.high - self.zero)
        ends, where = [middle - half, middle + half], {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(ends, [0, 0], color="white", lw=3, zorder=2.6, **where)
        stroke = {"marker": [(-0.5, -1), (0.5, 1)], "ms": 9, "mec": GREY, "mew": 1}
        axes.plot(ends, [0, 0], ls="", **stroke, zorder=2.7, **where)
