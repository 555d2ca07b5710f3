"""The data of interactive figures: what the pictures of a report show, as plain values that JSON can hold.

A chart is {id, name, x, y, log, share, ticks, series, guides}. x and y are labels, log and share say how y is drawn, a
tick is [position, text]. A series is {name, group, look, line, points, seeds, paper}: a point is [position, mean, std,
low, high, text of x], with None where there is none: std and the interval low to high need several seeds; ``seeds`` has
one list of values per seed, aligned with the points, ``paper`` the paper's points [position, value]. A guide is a grey
line {name, and x, y or points}. The x axis is linear in the positions, as that of the picture is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lit_memory.report.axes import Axis, train_x_on_axis
from lit_memory.report.curves import curve_config, reached_label, share_reached, shows_shares
from lit_memory.report.labels import count, is_share, mean_interval, short
from lit_memory.report.paper import points
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Results
from lit_memory.report.series import Series, floors, relative, series_of
from lit_memory.report.states import StateAxis
from lit_memory.report.style import LEAST_FOR_BAND, looks
from lit_memory.report.verdict import mean, std

POINTS = {"o": "circle", "s": "rect", "^": "triangle", "v": "triangle", "<": "triangle", ">": "triangle"}
POINTS |= {"D": "rectRot", "d": "rectRot", "X": "crossRot", "P": "cross", "h": "rectRounded", "p": "rectRounded"}
POINTS |= {"*": "star", (4, 1, 0): "star", (6, 1, 0): "star", "H": "rectRounded", "8": "circle"}
"""matplotlib's marker -> the nearest of Chart.js's points."""
TURNS = {"v": 180, "<": 270, ">": 90}
Chart = dict[str, Any]
At = Sequence[tuple[float, str]]
"""Position and text of every x."""


def charts(results: Results) -> list[Chart]:
    """The figure, y against the floats of state where those are known, and times and training where they are. Of a
    claim about times, these come first."""
    plan = results.plan
    xs = sorted(plan.x_values)
    found = [_figure(relative(results), xs)]
    found += _state(results, xs[-1] if plan.state_x is None else plan.state_x)
    times = list(_times(results, xs))
    return [*(times + found if plan.about_time else found + times), *_training(results)]


def shown_look(look: Mapping[str, Any]) -> Chart:
    """Colour, point and dashes of an arm, as in the pictures."""
    dashes = [] if look["ls"] == "-" else [round(2 * part, 1) for part in look["ls"][1]]
    point, turn = POINTS[look["marker"]], TURNS.get(look["marker"], 0)
    return {"color": look["color"], "point": point, "turn": turn, "dash": dashes}


def shown_series(plan: ReportPlan, series: Series, at: At) -> Chart:
    """One arm; what is no number is left out."""
    found, rows = [], []
    for (position, text), group, row in zip(at, series.groups, zip(*series.seeds, strict=True), strict=True):
        if not math.isfinite(average := mean(group)):
            continue
        interval = mean_interval(plan.config.y, group) if len(group) >= LEAST_FOR_BAND else (math.nan, math.nan)
        found.append([*map(rounded, (position, average, std(group), *interval)), text])
        rows.append([*map(rounded, row)])
    seeds = [list(column) for column in zip(*rows, strict=True)]
    shown = {"name": series.name, "group": series.name, "look": shown_look(series.look), "line": len(at) > 1}
    return shown | {"points": found, "seeds": seeds, "paper": []}


def rounded(value: float | None) -> float | None:
    """Six digits; None for what is no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _chart(plan: ReportPlan, x: str, ticks: list[list[Any]], series: list[Chart], guides: list[Chart]) -> Chart:
    """A figure, with what all have: the line of chance."""
    config = plan.config
    if config.chance is not None:
        guides = [{"name": f"chance ({config.chance:.3g})", "y": config.chance}, *guides]
    share = is_share(config.y) and not config.log_y
    shown = {"id": "figure", "name": "Figure", "x": x, "y": plan.y_label, "log": config.log_y, "share": share}
    return shown | {"ticks": ticks, "series": series, "guides": guides}


def _figure(results: Results, xs: list[float]) -> Chart:
    """y against x; of a test with a single x, the arms side by side."""
    plan, own = results.plan, points(results.plan)
    if len(xs) == 1:
        label = f"{plan.x_label}: {short(xs[0])}"
        ticks = [[i, plan.shown(arm)] for i, arm in enumerate(plan.arms)]
        shown = [shown_series(plan, series, [(i, label)]) for i, series in enumerate(series_of(results, xs))]
        for i, (arm, series) in enumerate(zip(plan.arms, shown, strict=True)):
            series["paper"] = [[i, rounded(y)] for _, y in own.get(arm, ())]
        return _chart(plan, label, ticks, shown, [])
    train_x, guides = train_x_on_axis(plan, xs), []
    axis = Axis.of([*xs, *([] if train_x is None else [train_x])], plan.config.log_x)
    at = [(axis.position(x), f"{plan.x_label}: {x:,.10g}") for x in xs]
    shown = [shown_series(plan, series, at) for series in series_of(results, xs)]
    for arm, series in zip(plan.arms, shown, strict=True):
        series["paper"] = [[rounded(axis.position(x)), rounded(y)] for x, y in own.get(arm, ())]
    if train_x is not None:
        guides.append({"name": f"trained on up to {short(train_x)}", "x": rounded(axis.position(train_x))})
    for name, means in floors(results, xs):
        reached = zip(xs, means, strict=True)
        guides.append({"name": name, "points": [[rounded(axis.position(x)), rounded(y)] for x, y in reached]})
    if plan.config.identity:
        curve = [xs[0] + (xs[-1] - xs[0]) * i / 60 for i in range(61)]
        guides.append({"name": "all kept (y = x)", "points": [[rounded(axis.position(x)), rounded(x)] for x in curve]})
    return _chart(plan, plan.x_label, [[rounded(axis.position(x)), short(x)] for x in xs], shown, guides)


def _state(results: Results, x: float) -> Iterator[Chart]:
    """y at one x against the floats of state; nothing if no arm's state is known. Arms whose test stops before x are
    left out."""
    plan = results.plan
    tested = [arm for arm in plan.arms if x in plan.tested(arm)]
    states = {arm: floats for arm in tested if (floats := plan.state_size(arm)) is not None}
    if not states:
        return
    axis, sizes = StateAxis.around(list(states.values())), list(states.values())
    positions, shown = dict(zip(states, axis.positions(sizes), strict=True)), []
    for series in series_of(results, [x]):
        if series.arm in states:
            at = [(positions[series.arm], f"{count(states[series.arm])} floats")]
            shown.append(shown_series(plan, series, at))
    guides: list[Chart] = [{"name": f"all kept ({short(x)})", "y": x}] if plan.config.identity else []
    title = f"floats of state that one sample carries ({plan.x_label}: {short(x)})"
    yield _chart(plan, title, state_ticks(axis, sizes), shown, guides) | {"id": "state", "name": "State"}


def state_ticks(axis: StateAxis, states: Sequence[float]) -> list[list[Any]]:
    """Powers of ten, and 0 left of them."""
    zero: list[list[Any]] = [[rounded(axis.zero), "0"]] if 0 in states else []
    return zero + [[decade, short(10.0**decade)] for decade in range(axis.low, axis.high + 1)] * any(states)


def _times(results: Results, xs: list[float]) -> Iterator[Chart]:
    """The times against x; nothing where none are known."""
    name = results.plan.config.time
    if not name or name not in {metric for _, metric, _, _ in results.cells}:
        return
    yield {**_figure(results.of_time(name), xs), "id": "time", "name": "Time"}


def _training(results: Results) -> Iterator[Chart]:
    """Every run along its training, or how many have reached the threshold; nothing if the report does not show it."""
    plan, runs = results.plan, {}
    if not results.learning:
        return
    if shows_shares(plan):
        yield _reached(results)
        return
    metric = next(metric for _, metric, _, _ in results.learning)
    for (arm, _, step, seed), value in sorted(results.learning.items()):
        if math.isfinite(value):
            runs.setdefault((arm, seed), []).append([step, rounded(value), None, None, None, f"step {step:,.0f}"])
    found = {"line": True, "small": True, "paper": []}
    shown = [
        found
        | {"name": f"{plan.shown(arm)}, seed {seed}", "group": plan.shown(arm), "look": shown_look(look)}
        | {"points": runs[arm, seed], "seeds": [[point[1] for point in runs[arm, seed]]]}
        for arm, look in zip(plan.arms, looks(plan.architectures), strict=True)
        for seed in plan.seeds
        if (arm, seed) in runs
    ]
    last = max(step for _, _, step, _ in results.learning)
    ticks = [[last * i / 5, f"{last * i / 5:,.0f}"] for i in range(6)]
    own = replace(plan, config=curve_config(plan, metric))
    training = {"id": "training", "name": "Training", "y": f"{own.y_label} on validation data"}
    yield _chart(own, "optimizer steps", ticks, shown, []) | training


def _reached(results: Results) -> Chart:
    """The share of an arm's runs that have reached the threshold by a step."""
    plan, position, shown, seen = results.plan, Axis(log=True).position, [], set()
    for arm, look in zip(plan.arms, looks(plan.architectures), strict=True):
        steps, shares = zip(*share_reached(results, arm), strict=True)
        corners = sorted(zip([*steps, *steps[1:]], [*shares, *shares[:-1]], strict=True))
        points = [[rounded(position(x)), rounded(y), None, None, None, f"step {x:,.0f}"] for x, y in corners]
        series = {"name": plan.shown(arm), "group": plan.shown(arm), "look": shown_look(look), "line": True}
        shown.append(series | {"small": True, "points": points, "seeds": [], "paper": []})
        seen |= {*steps}
    decades = range(math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen))))
    round_steps = [part * 10**decade for decade in decades for part in (1, 2, 5)]
    ticks = [[rounded(position(step)), short(step)] for step in round_steps if min(seen) <= step <= max(seen)]
    own = replace(plan, config=replace(plan.config, y_label=reached_label(plan), log_y=False, chance=None))
    reached = {"id": "reached", "name": "Training", "share": True}
    return _chart(own, "optimizer steps", ticks, shown, []) | reached
