"""The figure of y against the floats of state."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lit_memory.report.axes import draw_break
from lit_memory.report.labels import short
from lit_memory.report.names import Drawn, Name
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Results
from lit_memory.report.series import Series, draw_bar, series_of, show_values
from lit_memory.report.style import REFERENCE, SEED_POINT
from lit_memory.report.verdict import mean


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
            step = min(0.022, 0.08 / equal) * length
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
            draw_break(axes, (self.zero + self.low) / 2, self.high - self.zero)
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_xlim(start - 0.04 * (self.high - start), self.high + 0.04 * (self.high - start))


def has_equal(results: Results, x: float) -> bool:
    """Whether the figure of states at ``x`` has arms with states of one size."""
    sizes = states_shown(results.plan, series_of(results, [x])).values()
    return len({*sizes}) < len(sizes)


def states_shown(plan: ReportPlan, all_series: Iterable[Series]) -> dict[str, float]:
    """The floats of state of every arm that has a point."""
    return {series.arm: plan.state_size(series.arm) or 0.0 for series in all_series if _has_point(plan, series)}


def draw_states(axes: Any, results: Results, x: float) -> Drawn:
    """y at the tested ``x`` against the floats of state per sample there; the legend also names arms without a
    point."""
    plan, all_series = results.plan, list(series_of(results, [x]))
    states = states_shown(plan, all_series)
    sizes = list(states.values())
    axis = StateAxis.around(sizes)
    axis.show(axes, sizes)
    positions, drawn = dict(zip(states, axis.positions(sizes), strict=True)), Drawn([], [], [])
    for series in all_series:
        (group,), look, at = series.groups, series.look | {"ls": "", "mew": 0}, []
        if series.arm in positions:
            at = [positions[series.arm]]
            draw_bar(axes, at[0], plan.config.y, group, look["color"])
            axes.plot(at * len(group), group, color=look["color"], **SEED_POINT)
        drawn.handles.extend(axes.plot(at, [mean(group)] * len(at), **look, label=_state_label(plan, series)))
    right = axes.get_xlim()[1]
    for y, text in ((x if plan.config.identity else None, "all kept"), (plan.config.chance, "chance")):
        if y is not None and (y > 0 or not plan.config.log_y):
            axes.axhline(y, **REFERENCE)
            drawn.references.append(Name(f"{text} {y:.3g}", right, y))
    axes.set_xlabel("floats of state that one sample carries")
    show_values(axes.yaxis, plan)
    return drawn


def _has_point(plan: ReportPlan, series: Series) -> bool:
    """Whether an arm has a state and a mean that the state figure can show."""
    (y,) = series.means
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
