"""The arms of a figure: their names, looks and values, and how a figure shows several seeds and an axis of values."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from lit_memory.report.axes import Axis, set_log
from lit_memory.report.labels import balanced, is_share, mean_interval
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Results
from lit_memory.report.style import LEAST_FOR_BAND, SEED_LINE, has_bands, looks
from lit_memory.report.verdict import mean

RELATIVE = "relative"
"""The metric of a figure that is relative to an arm: per cent, whatever is compared."""


class Series(NamedTuple):
    """An arm in a figure."""

    arm: str
    name: str
    look: dict[str, Any]
    """Arguments of ``Axes.plot``; they do not depend on which runs are finished."""
    seeds: list[list[float | None]]
    """For every seed, the values at every x; None where there is none, NaN where it is no number."""

    @property
    def groups(self) -> list[list[float]]:
        """For every x, the values of the finished seeds."""
        return [[value for value in of_x if value is not None] for of_x in zip(*self.seeds, strict=True)]

    @property
    def means(self) -> list[float]:
        return [mean(group) for group in self.groups]


def series_of(results: Results, xs: list[float]) -> Iterator[Series]:
    """Every arm of the plan, finished or not."""
    plan = results.plan
    for arm, look in zip(plan.arms, looks(plan.architectures), strict=True):
        by_x = [results.by_seed(arm, None, x) for x in xs]
        seeds = [list(own) for own in zip(*by_x, strict=True)]
        wanted = [len(own) - own.count(None) for x, own in zip(xs, by_x, strict=True) if x in plan.tested(arm)]
        finished = min(wanted, default=len(plan.seeds))  # of an arm that is not asked for any, none is missing
        name = plan.shown(arm)
        name = name if finished == len(plan.seeds) else f"{name} ({finished} of {len(plan.seeds)} seeds)"
        yield Series(arm, name, look, seeds)


def floors(results: Results, xs: list[float]) -> Iterator[tuple[str, list[float]]]:
    """Words and mean at every x of what ``report.floors`` asks for; nothing before a run of the first arm finished."""
    arm = results.plan.arms[0]
    for metric, name in results.plan.config.floors.items():
        groups = [results.values(arm, metric, x) for x in xs]
        if all(groups):
            yield name, [mean(group) for group in groups]


def relative(results: Results) -> Results:
    """The results of the figure: their y in per cent of that of the arm ``relative_to``, or as they are."""
    plan, config = results.plan, results.plan.config
    if not config.relative_to:
        return results
    cells = {}
    for (arm, metric, x, seed), value in results.cells.items():
        other = results.cells.get((config.relative_to, metric, x, seed))
        if metric == config.y:
            cells[arm, RELATIVE, x, seed] = 100 * (value / other - 1) if other else math.nan
    label = f"{plan.y_label}: difference from {plan.shown(config.relative_to)} in %"
    changed = replace(
        config, y=RELATIVE, y_label=label, log_y=False, chance=None, identity=False, floors={}, paper_curves={}
    )
    return Results(replace(plan, config=changed), cells)


def show_values(axis: Any, plan: ReportPlan) -> None:
    """The axis of the metric: its name, and its range or scale."""
    axis.set_label_text(balanced(plan.y_label, 34) if axis.axis_name == "y" else plan.y_label)
    if plan.config.log_y:
        set_log(axis)
    elif is_share(plan.config.y):
        getattr(axis.axes, f"set_{axis.axis_name}lim")(-0.03, 1.04)


def draw_bar(axes: Any, x: float, metric: str, values: list[float], color: str, across: bool = False) -> None:
    """An error bar of the interval where there are enough seeds."""
    if len(values) < LEAST_FOR_BAND:
        return
    middle, (low, high) = mean(values), mean_interval(metric, values)
    ends, look = [[middle - low], [high - middle]], {"color": color, "ls": "", "elinewidth": 1.6, "capsize": 4}
    if across:
        axes.errorbar([middle], [x], xerr=ends, **look)
    else:
        axes.errorbar([x], [middle], yerr=ends, **look)


def are_wide(results: Results, xs: list[float]) -> bool:
    """Whether the interval of a share is wider than half of the axis, as that of seeds of which some have learnt a task
    and others not: seen one by one they say more."""
    metric = results.plan.config.y
    groups = [group for series in series_of(results, xs) for group in series.groups] if is_share(metric) else []
    return any(high - low > 0.5 for low, high in (mean_interval(metric, group) for group in groups))


def draw_spread(
    axes: Any,
    axis: Axis,
    metric: str,
    xs: list[float],
    series: Series,
    arms: int,
    marker: str = SEED_LINE["marker"],
    wide: bool = False,
) -> None:
    """The seeds of a line, in a figure of so many arms: a band if it ``has_bands``, which explains ``wide``, else a
    faint line for each."""
    color = series.look["color"]
    if has_bands(len(series.seeds), arms, wide):
        low, high = zip(*(mean_interval(metric, group) for group in series.groups), strict=True)
        axes.fill_between(
            axis.curve(xs, low)[0], axis.curve(xs, low)[1], axis.curve(xs, high)[1], color=color, alpha=0.16, lw=0
        )
    elif len(series.seeds) > 1:
        for seed in series.seeds:
            values = [math.nan if value is None else value for value in seed]
            axes.plot(*axis.curve(xs, values), color=color, **SEED_LINE | {"marker": marker})
