"""The grid of a report: every point that was tried, as a table, as grid.csv and as a figure, and which were chosen."""

import csv
import io
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lit_memory.plan.sections import STEP
from lit_memory.report.axes import Axis, set_x_axis
from lit_memory.report.curves import curve_config
from lit_memory.report.labels import is_share, label, mean_std, seeds_shown, short
from lit_memory.report.markdown import markdown
from lit_memory.report.names import Drawn, Name
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Results
from lit_memory.report.series import show_values
from lit_memory.report.style import SEED_POINT, SMALL, looks, text_color
from lit_memory.report.verdict import mean

FILE = "grid.csv"
RING = {"ls": "", "marker": "o", "ms": 11, "mfc": "none", "mew": 1.2, "zorder": 2.4}
"""Around the validation of a point that a seed has chosen."""


def swept(plan: ReportPlan) -> list[str]:
    """The keys that grids sweep, in their order."""
    return list(dict.fromkeys(key for run in plan.grid for key in run["settings"]))


def grid_csv(plan: ReportPlan) -> str:
    """grid.csv: one row for every run of every point. Empty: not measured; nan: measured as not a number."""
    keys, file = swept(plan), io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    metrics = [f"valid_{plan.select}", *["valid_loss"] * (plan.select != "loss")]
    tests = [f"{plan.config.y}@{x:.10g}" for x in plan.x_values]
    some_stop = any(map(stopped_at, plan.grid))
    facts = ["seed", "status", "chosen", "steps", *["stopped_at"] * some_stop]
    writer.writerow(["arm", *(key.rstrip("?") for key in keys), *facts, *metrics, *tests])
    for run in plan.grid:
        validated = [run["valid"], *[run["valid_loss"]] * (plan.select != "loss")]
        tested = run["test"] or [None] * len(plan.x_values)
        numbers = [("" if value is None else repr(value)) for value in (*validated, *tested)]
        if run["status"] == "finished":
            numbers = [number or "nan" for number in numbers]
        steps = "" if run.get("steps") is None else f"{run['steps']:.0f}"
        settings = (_value(run, key) for key in keys)
        facts = [run["seed"], run["status"], "yes" * run["chosen"], steps, *[stopped_at(run)] * some_stop]
        writer.writerow([run["arm"], *settings, *facts, *numbers])
    return file.getvalue()


def _value(run: Mapping[str, Any], key: str) -> str:
    """A swept value as JSON without quotes; "" in an arm that does not sweep it."""
    return json.dumps(run["settings"][key]).replace('"', "") if key in run["settings"] else ""


def grid_table(plan: ReportPlan) -> str:
    """Every point with its validation and its test, one per row; "" without a grid."""
    if not plan.grid:
        return ""
    keys, rows = swept(plan), []
    shown, some_stop = sorted({0, len(plan.x_values) - 1}), any(map(stopped_at, plan.grid))
    for runs in _points(plan):
        finished = [run for run in runs if run["status"] == "finished"]
        valid = [run["valid"] for run in finished if _is_comparable(run) and run["seed"] in _choosers(plan)]
        tests = [[run["test"][i] for run in finished if run["test"] and run["test"][i] is not None] for i in shown]
        counts = f"{len(finished)} of {len(runs)}", f"{sum(run['chosen'] for run in runs)} of {len(runs)}"
        settings = (_value(runs[0], key) or "–" for key in keys)
        stages = [", ".join(filter(None, map(stopped_at, finished))) or "–"] * some_stop
        rows.append([plan.shown(runs[0]["arm"]), *settings, *stages, mean_std(valid), *map(mean_std, tests), *counts])
    along = plan.config.x == STEP
    tested = [f"{'step' if along else 'test'} {short(plan.x_values[i])}" for i in shown]
    names = [*(key.rstrip("?") for key in keys), *["stopped at stage"] * some_stop]
    header = ["arm", *names, "validation", *tested, "runs", "chosen by"]
    chooser = (
        f"{seeds_shown(plan.tune_seeds)} chose a point for all" if plan.tune_seeds else "every seed chooses a point"
    )
    caption = (
        f"Tuning: {label(plan.select)} of the last validation, by which {chooser}, and {plan.y_label} "
        f"{'along the training' if along else 'of the test'},\nmean ± standard deviation over seeds"
    )
    if plan.tune_seeds:
        caption += ", the validation's over those that chose"
    if some_stop:
        caption += ".\nA run that stopped at a stage has no validation here, and loses to any that came further"
    return f"{caption}\n\n{markdown(header, rows)}"


def stopped_at(run: Mapping[str, Any]) -> str:
    """The stage that a run did not solve, and with which it stopped; "" if it did not stop."""
    return f"{len(run['stage_steps'])} of {run['stages']}" if "stages" in run else ""


def broke_down(run: Mapping[str, Any]) -> bool:
    """Whether the training of a run ended with a number that is not finite."""
    return run["status"] == "broke down" or "broke_down" in run


def is_lost(run: Mapping[str, Any]) -> bool:
    """Whether a run that has ended has no validation on the task of the last stage."""
    return broke_down(run) or bool(stopped_at(run))


def _choosers(plan: ReportPlan) -> list[int]:
    """The seeds that choose; where some do for all, the others have trained the chosen point alone."""
    return plan.tune_seeds or plan.seeds


def _is_comparable(run: Mapping[str, Any]) -> bool:
    """Whether a run has a validation on the task of the last stage."""
    return run["valid"] is not None and not stopped_at(run)


def _points(plan: ReportPlan) -> Iterator[list[dict[str, Any]]]:
    """The runs of every point of every arm."""
    points: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in plan.grid:
        points.setdefault((run["arm"], run["point"]), []).append(run)
    yield from points.values()


def draw_grid(axes: Any, results: Results) -> Drawn:
    """The last validation against every swept key, one panel for each and one line per arm: the mean over the
    seeds that choose of the best that the other keys allow. Dots are seeds; rings are what was chosen. Where the worst
    values are, "2 ×" are two runs that broke down or stopped at a stage, and "↑ 9.1" is a mean far off."""
    plan, keys = results.plan, swept(results.plan)
    config = curve_config(plan, plan.select)
    panels, drawn, most = _panels(axes, len(keys)), Drawn([], [], []), _worst_shown(plan)
    for key, panel in zip(keys, panels, strict=True):
        draw_key(panel, plan, key, drawn, most)
        panel.set_xlabel(label(key.rstrip("?").rpartition(".")[2]))
    values = [y for panel in panels for line in panel.lines for y in line.get_ydata()]
    show_values(axes.yaxis, replace(plan, config=config))
    if is_share(plan.select):
        _look_close(axes, values)
    elif max(values, default=0.0) > most:
        low, high = min(values), max(y for y in values if y <= most)
        axes.set_ylim(low - 0.1 * (high - low), high + 0.5 * (high - low))
    axes.set_ylabel(f"{axes.get_ylabel()}, validation")
    handles = drawn.handles[: len(drawn.handles) // len(keys)]
    return drawn._replace(handles=handles, ends=drawn.ends if len(keys) == 1 else [])


def _look_close(axes: Any, shares: Sequence[float]) -> None:
    """Where all shares lie in a small part of the axis, show that part: small differences choose."""
    low, high = min(shares, default=0.0), max(shares, default=1.0)
    if high - low < 0.25:
        margin = max(0.15 * (high - low), 0.015)
        axes.set_ylim(low - margin, high + margin)
        axes.set_yticks([tick for tick in axes.get_yticks() if low - margin <= tick <= 1])


def _worst_shown(plan: ReportPlan) -> float:
    """The worst validation that a figure of losses or perplexities shows in its place: ten times as far from the best
    as half of them are. Where more is better, all are."""
    values = sorted(run["valid"] for run in plan.grid if _is_comparable(run))
    if not plan.less_is_better(plan.select) or not values:
        return math.inf
    return values[0] + 10 * (statistics.median(values) - values[0])


def _panels(axes: Any, count: int) -> list[Any]:
    """``axes`` and others beside it, with the same y axis."""
    places = axes.figure.add_gridspec(1, count)
    axes.set_subplotspec(places[0])
    others = [axes.figure.add_subplot(places[i], sharey=axes) for i in range(1, count)]
    for other in others:
        other.tick_params(labelleft=False)
    return [axes, *others]


def draw_key(axes: Any, plan: ReportPlan, key: str, drawn: Drawn, most: float) -> None:
    """The validations against one swept key, worse means than ``most`` as a number; handles and ends of the lines go to
    ``drawn``."""
    runs = [run for run in plan.grid if key in run["settings"]]
    axis, places = _axis(key, [run["settings"][key] for run in runs])
    tuned, seeds, marked = [run["arm"] for run in plan.grid], _choosers(plan), Counter[float]()
    for arm, look in zip(plan.arms, looks(plan.architectures), strict=True):
        own = [run for run in runs if run["arm"] == arm and _is_comparable(run)]
        groups = {place: _at_the_best(plan, own, key, value) for value, place in places}
        choosing = {place: [group[seed] for seed in group if seed in seeds] for place, group in groups.items()}
        curve = [(place, mean(values)) for place, values in choosing.items() if values]
        if arm in tuned:
            line = axis.curve(*zip(*curve, strict=True)) if curve else ([], [])
            drawn.handles.extend(axes.plot(*line, **look, label=plan.shown(arm)))
        for place, group in groups.items():
            axes.plot([axis.position(place)] * len(group), list(group.values()), color=look["color"], **SEED_POINT)
        rings = [(axis.position(_place(places, run["settings"][key])), run["valid"]) for run in own if run["chosen"]]
        axes.plot(*zip(*rings, strict=True) if rings else ([], []), mec=look["color"], **RING)
        lost = [_place(places, run["settings"][key]) for run in runs if run["arm"] == arm and is_lost(run)]
        off = [(place, f"↑ {y:.3g}") for place, y in curve if y > most]
        for place, text in (*off, *((place, f"{times} ×") for place, times in Counter(lost).items())):
            _mark_lost(axes, plan, axis.position(place), text, marked[place], text_color(look["color"]))
            marked[place] += 1
        if curve:
            x, y = curve[-1]
            drawn.ends.append(Name(plan.shown(arm), axis.position(x), y, text_color(look["color"])))
    shown = [place for _, place in places]
    if _are_numbers([value for value, _ in places]):
        set_x_axis(axes, axis, shown, None)
    else:
        axes.set_xticks(shown, [json.dumps(value).replace('"', "") for value, _ in places])
        axes.set_xlim(-0.3, len(places) - 0.7)
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.04 * (high - low), high + 0.04 * (high - low))  # for rings at the ends


def _mark_lost(axes: Any, plan: ReportPlan, x: float, text: str, row: int, color: Any) -> None:
    """Write at x, in the row so far from the edge of the worst values, what is not in its place."""
    edge, inwards = (1.0, -1) if plan.less_is_better(plan.select) else (0.0, 1)
    axes.annotate(
        text,
        (x, edge),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, inwards * (3 + 11 * row)),
        textcoords="offset points",
        ha="center",
        va="top" if edge else "bottom",
        color=color,
        fontsize=SMALL,
    )


def _axis(key: str, values: Sequence[Any]) -> tuple[Axis, list[tuple[Any, float]]]:
    """The axis of a swept key, and (value, x) of its values: numbers by their size, on a logarithmic axis where they
    are rates or span a decade; anything else in the order of the grid."""
    different = [value for i, value in enumerate(values) if value not in values[:i]]
    if not _are_numbers(different):
        return Axis(False), [(value, float(i)) for i, value in enumerate(different)]
    different.sort()
    above = [value for value in different if value > 0]
    log = different[0] >= 0 and bool(above) and (above[-1] >= 10 * above[0] or key.endswith(".lr"))
    return Axis.of(different, log), [(value, float(value)) for value in different]


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(type(value) in (int, float) for value in values)


def _place(places: Sequence[tuple[Any, float]], value: Any) -> float:
    return next(place for other, place in places if other == value)


def _at_the_best(plan: ReportPlan, runs: Sequence[Mapping[str, Any]], key: str, value: Any) -> dict[int, float]:
    """Seed -> its validation at the best of the points with this value of a key: its own where each seed chooses, else
    that by the mean over those that choose for all, which is not as good as the best of each."""
    sign = -1 if plan.less_is_better(plan.select) else 1
    own = [run for run in runs if run["settings"][key] == value]
    if not plan.tune_seeds:
        worst_first = sorted(own, key=lambda run: sign * run["valid"])
        return {run["seed"]: run["valid"] for run in worst_first}  # of a seed the last is kept
    points: dict[str, dict[int, float]] = {}
    for run in own:
        points.setdefault(run["point"], {})[run["seed"]] = run["valid"]

    def rank(point: Mapping[int, float]) -> tuple[int, float]:
        known = [point[seed] for seed in plan.tune_seeds if seed in point]
        return len(known), sign * mean(known) if known else -math.inf

    return max(points.values(), key=rank, default={})
