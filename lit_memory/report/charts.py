"""The data of interactive figures: what the pictures of a report show, as plain values that JSON can hold.

A chart is {id, name, x, y, log, share, ticks, series, guides}. x and y are labels, log and share say how y is drawn, a
tick is [position, text]. A series is {name, group, look, line, points, seeds}: a point is [position, mean, std, text of
x], with None for a std of one seed; ``seeds`` has one list of values per seed, aligned with the points. A guide is a
grey line {name, and x, y or points}. The x axis is linear in the positions, as that of the picture is.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from lit_memory.report.axes import Scale, StateAxis, train_x_on_axis
from lit_memory.report.labels import SHARES, count, short
from lit_memory.report.results import Results
from lit_memory.report.style import arm_look
from lit_memory.report.verdict import mean, std

POINTS = {"o": "circle", "s": "rect", "^": "triangle", "D": "rectRot", "v": "triangle", "X": "crossRot", "P": "cross"}
"""matplotlib's marker -> Chart.js's point style."""
Chart = dict[str, Any]


def charts(results: Results) -> list[Chart]:
    """The figure, y against the floats of state where those are known, and the times where they are."""
    plan = results.plan
    xs = sorted(plan.x_values)
    found = [_lines(results, xs) if len(xs) > 1 else _dots(results, xs[0])]
    found += state_chart(results, xs[-1] if plan.state_x is None else plan.state_x)
    if plan.config.time and any(metric == plan.config.time for _, metric, _, _ in results.cells):
        timed = results.of_time(plan.config.time)
        found.append((_lines(timed, xs) if len(xs) > 1 else _dots(timed, xs[0])) | {"id": "time", "name": "Time"})
    return found


def look(i: int, dashed: bool = True) -> Chart:
    """Colour, point and dashes of the i-th arm, as in the pictures."""
    found = arm_look(i)
    dashes = [round(2 * part, 1) for part in found["ls"][1]] if dashed and found["ls"] != "-" else []
    return {
        "color": found["color"],
        "point": POINTS[found["marker"]],
        "turn": 180 * (found["marker"] == "v"),
        "dash": dashes,
    }


def series(results: Results, arm: str, at: Sequence[tuple[float, float, str]]) -> Chart:
    """One arm. at: (position, x, text of x) of its points; those without a finished seed are left out."""
    points, rows = [], []
    for position, x, text in at:
        values = results.values(arm, None, x)
        if values and math.isfinite(mean(values)):
            spread = std(values) if len(values) > 1 else None
            points.append([rounded(position), rounded(mean(values)), rounded(spread), text])
            rows.append([rounded(value) for value in results.by_seed(arm, None, x)])
    i = results.plan.arms.index(arm)
    seeds = [list(column) for column in zip(*rows, strict=True)]
    return {"name": results.plan.shown(arm), "look": look(i), "line": len(at) > 1, "points": points, "seeds": seeds}


def rounded(value: float | None) -> float | None:
    """Six digits; None for what is no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _chart(results: Results, x: str, ticks: list[list[Any]], all_series: list[Chart], guides: list[Chart]) -> Chart:
    """The figure, with what all have: the line of chance."""
    plan, config = results.plan, results.plan.config
    if config.chance is not None:
        guides = [{"name": f"chance ({config.chance:.3g})", "y": config.chance}, *guides]
    share = config.y in SHARES and not config.log_y
    shown = {"id": "figure", "name": "Figure", "x": x, "y": plan.y_label, "log": config.log_y, "share": share}
    return shown | {"ticks": ticks, "series": all_series, "guides": guides}


def _lines(results: Results, xs: list[float]) -> Chart:
    """y against x."""
    plan, train_x = results.plan, train_x_on_axis(results.plan, xs)
    scale = Scale.of([*xs, *([] if train_x is None else [train_x])], plan.config.log_x)
    at = [(scale.position(x), x, f"{plan.x_label}: {x:,.10g}") for x in xs]
    guides: list[Chart] = []
    if train_x is not None:
        guides.append({"name": f"trained on up to {short(train_x)}", "x": rounded(scale.position(train_x))})
    if plan.config.identity:
        curve = [xs[0] + (xs[-1] - xs[0]) * i / 60 for i in range(61)]
        guides.append({"name": "all kept (y = x)", "points": [[rounded(scale.position(x)), rounded(x)] for x in curve]})
    ticks = [[rounded(scale.position(x)), short(x)] for x in xs]
    return _chart(results, plan.x_label, ticks, [series(results, arm, at) for arm in plan.arms], guides)


def _dots(results: Results, x: float) -> Chart:
    """The arms side by side: a test with a single x."""
    plan = results.plan
    ticks = [[i, plan.shown(arm)] for i, arm in enumerate(plan.arms)]
    found = [series(results, arm, [(i, x, f"{plan.x_label}: {short(x)}")]) for i, arm in enumerate(plan.arms)]
    return _chart(results, f"{plan.x_label}: {short(x)}", ticks, found, [])


def state_chart(results: Results, x: float) -> Iterator[Chart]:
    """y at one x against the floats of state; nothing if no arm's state is known."""
    plan = results.plan
    states = {arm: plan.state_size(arm) for arm in plan.arms}
    known = {arm: floats for arm, floats in states.items() if floats is not None}
    if not known:
        return
    axis = StateAxis.around(list(known.values()))
    positions = dict(zip(known, axis.positions(list(known.values())), strict=True))
    found = [series(results, arm, [(positions[arm], x, f"{count(known[arm])} floats")]) for arm in known]
    guides: list[Chart] = [{"name": f"all kept ({short(x)})", "y": x}] if plan.config.identity else []
    title = f"floats of state that one sample carries ({plan.x_label}: {short(x)})"
    yield _chart(results, title, state_ticks(axis, list(known.values())), found, guides) | {
        "id": "state",
        "name": "State",
    }


def state_ticks(axis: StateAxis, states: Sequence[float]) -> list[list[Any]]:
    """Powers of ten, and 0 left of them."""
    zero: list[list[Any]] = [[rounded(axis.zero), "0"]] if 0 in states else []
    return zero + [[decade, short(10.0**decade)] for decade in range(axis.low, axis.high + 1)] * any(states)
