"""Figures of what memories do, from the numbers of ``lit.views``: one for each view of ``report.memory``."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from lit_memory.report.axes import Axis, set_log
from lit_memory.report.labels import short
from lit_memory.report.names import below_title, head, lay_out, legend
from lit_memory.report.results import Results
from lit_memory.report.series import Series, draw_spread, show_values
from lit_memory.report.style import DPI, GREY, REFERENCE, SMALL, WIDTH, looks, spread_words
from lit_memory.report.verdict import mean
from lit_memory.util.names import load
from lit_memory.util.views import VIEWS

SEGMENT = "segment"
"""The name of the places along a context; all others are shown."""
TRAINED = "dashed: training length"
ROW = 1.9
"""Inches of a row of panels."""
MARKS = 6
"""Markers of a line, which has values at far more places."""
DEPTHS = [10.0, 30.0, 50.0, 70.0, 90.0]
"""Middles of the fifths of a context, in percent."""
WORDS = {
    "A": "norm of the\nassociative matrix A",
    "z": "norm of the\nnormaliser z",
    "h": "norm of the state h",
    "S": "norm of the state S",
    "M": "norm of the memory's\nweights M",
    "overlap": "cosine with\nearlier keys",
    "beta": "β, strength\nof a write",
    "gamma": "γ, share of a key\nthat is new to z",
    "alpha": "α, share that\nis forgotten",
    "eta": "η, momentum\nthat is kept",
    "theta": "θ, length of\na step",
}
"""Name of what lies along a context -> the label of its axis, in the order of the panels."""


def memory_figures(results: Results) -> dict[str, Any]:
    """Name of a file -> ``Figure``, of every view that is known of some arm."""
    return {f"memory_{view}": load(VIEWS[view].drawn)(results, view) for view in known_views(results)}


def known_views(results: Results) -> list[str]:
    """The views of the report that are known of some arm."""
    known = {view for view, *_ in known_runs(results)}
    return [view for view in results.plan.config.memory if view in known]


def known_runs(results: Results) -> set[tuple[str, str, int]]:
    """(view, arm, seed) of what is known; answers by depth need scores as well."""
    return {
        (view, arm, seed)
        for view, name, arm, seed in results.memory
        if name != SEGMENT and (view != "depth" or scored(results, arm, seed) is not None)
    }


def unknown_runs(results: Results, view: str) -> dict[str, list[int]]:
    """Arm -> the seeds of its finished runs of which a view that the arm allows is not known."""
    plan, known, found = results.plan, known_runs(results), {}
    seeds = plan.seeds if VIEWS[view].every_seed else plan.seeds[:1]
    for run in plan.runs:
        arm, seed = run["arm"], run["seed"]
        allowed = arm in plan.visible.get(view, plan.arms) and seed in seeds
        if allowed and run.get("status") == "finished" and (view, arm, seed) not in known:
            found.setdefault(arm, []).append(seed)
    return found


def norm(results: Results, view: str) -> Any:
    """Norms along the context."""
    return along(results, view, show_norms)


def overlap(results: Results, view: str) -> Any:
    """Cosines along the context."""
    return along(results, view, show_shares)


def gates(results: Results, view: str) -> Any:
    """Gates along the context."""
    return along(results, view, show_gates)


def depth(results: Results, view: str) -> Any:
    """The metric of the report by the depth of the fact, in fifths of the context."""
    plan, handles = results.plan, []
    figure, ((axes,),) = panels(1, 1)
    for arm, look in zip(plan.arms, looks(plan.architectures), strict=True):
        seeds = [means for seed in plan.seeds if (means := by_depth(results, arm, seed))]
        if seeds:
            series = Series(arm, plan.shown(arm) + few_seeds(len(seeds), plan.seeds), look, seeds)
            draw_spread(axes, Axis(log=False), plan.config.y, DEPTHS, series, len(plan.arms))
            handles += axes.plot(DEPTHS, series.means, **look, label=series.name)
    words = [spread_words(len(plan.seeds), len(plan.arms))]
    if plan.config.chance is not None:
        axes.axhline(plan.config.chance, **REFERENCE)
        words.append(f"dashed: chance {plan.config.chance:.3g}")
    axes.set_xticks(DEPTHS, [f"{x - 10:.0f} to {x + 10:.0f}" for x in DEPTHS])
    axes.set_xlabel("place of the fact, % of the context before it")
    show_values(axes.yaxis, plan)
    return finished(figure, handles, results, view, words)


def by_depth(results: Results, arm: str, seed: int) -> list[float | None]:
    """The mean score of the samples in every fifth of the context, None where there is none; [] if not known."""
    scores = scored(results, arm, seed)
    if scores is None:
        return []
    places = results.memory["depth", "depth", arm, seed]
    fifths = [min(int(place // 20), 4) for place in places]
    groups = [[float(s) for s, of in zip(scores, fifths, strict=True) if of == i] for i in range(5)]
    return [mean(group) if group else None for group in groups]


def scored(results: Results, arm: str, seed: int) -> Any:
    """The scores of the samples whose depth is known; None where either is not."""
    x = results.memory.get(("depth", "x", arm, seed))
    return None if x is None else results.scores.get((arm, results.plan.config.y, float(x[0]), seed))


def along(results: Results, view: str, show: Callable[[Any], None]) -> Any:
    """What lies along the context: a row of panels for each name, a column for each layer that is shown.

    show: sets range and scale of the y axis that a row shares.
    """
    known = {name for of, name, *_ in results.memory if of == view}
    names = [name for name in WORDS if name in known]
    depths = {arm: of.shape[1] for (v, name, arm, _), of in results.memory.items() if v == view and name != SEGMENT}
    columns, handles = layers_shown(list(depths.values())), {}
    figure, grid = panels(len(names), len(columns))
    for row, name in zip(grid, names, strict=True):
        for axes, layer_of in zip(row, columns.values(), strict=True):
            handles |= draw_layer(axes, results, view, name, layer_of)
        row[0].set_ylabel(WORDS[name], fontsize=SMALL)
        show(row[0])
    for axes, title in zip(grid[0], columns, strict=True):
        axes.set_title(title, fontsize=SMALL, color=GREY)
    for axes in grid[-1]:
        axes.set_xlabel("segments read", fontsize=SMALL)
    show_segments(grid[-1][0], results)
    spread = spread_words(len(results.plan.seeds), len(results.plan.arms))
    words = [spread, TRAINED] if trained_segments(results) else [spread]
    return finished(figure, list(handles.values()), results, view, words)


def layers_shown(depths: Sequence[int]) -> dict[str, Callable[[int], int]]:
    """Title of a column -> index of its layer in an arm with so many layers: all layers where there are few, as many in
    every arm; else first, middle and last."""
    if len({*depths}) == 1 and depths[0] <= 3:
        return {f"layer {i + 1} of {depths[0]}": lambda _, i=i: i for i in range(depths[0])}
    return {
        "first layer": lambda count: 0,
        "middle layer": lambda count: count // 2,
        "last layer": lambda count: count - 1,
    }


def panels(rows: int, columns: int) -> tuple[Any, Any]:
    """A figure and its grid of axes, which share x, and y within a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.5 + ROW * rows), dpi=DPI, layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False)


def draw_layer(axes: Any, results: Results, view: str, name: str, layer_of: Callable[[int], int]) -> dict[str, Any]:
    """One name in one layer of every arm that has it. Arm -> the handle of its line."""
    plan, handles = results.plan, {}
    for arm, look in zip(plan.arms, looks(plan.architectures), strict=True):
        runs = [seed for seed in plan.seeds if (view, name, arm, seed) in results.memory]
        if not runs:
            continue
        arrays = [results.memory[view, name, arm, seed] for seed in runs]
        seeds = [of[:, layer_of(of.shape[1])].astype(float).tolist() for of in arrays]
        xs = results.memory[view, SEGMENT, arm, runs[0]].astype(float).tolist()
        places = [i for i in range(len(xs)) if all(math.isfinite(seed[i]) for seed in seeds)]
        if not places:
            continue
        xs, seeds = [xs[i] for i in places], [[seed[i] for i in places] for seed in seeds]
        series = Series(arm, plan.shown(arm) + few_seeds(len(runs), plan.seeds), look, seeds)
        draw_spread(axes, Axis(log=False), name, xs, series, len(plan.arms), marker="")
        handles[arm] = axes.plot(xs, series.means, **look, label=series.name, markevery=marked(xs))[0]
    return handles


def few_seeds(known: int, planned: Sequence[int]) -> str:
    """What the name of an arm adds where not all seeds are known."""
    return "" if known == len(planned) else f" ({known} of {len(planned)} seeds)"


def marked(xs: Sequence[float]) -> list[int]:
    """Places of the markers of a line, at about equal distances on a logarithmic axis, with the last."""
    wanted = [xs[-1] * (xs[0] / xs[-1]) ** (i / MARKS) for i in range(MARKS + 1)] if xs else []
    return sorted({min(range(len(xs)), key=lambda i: abs(xs[i] - x)) for x in wanted})


def trained_segments(results: Results) -> int:
    """Segments of the longest context of the training; 0 if that is not known."""
    return max((run.get("trained_segments") or 0 for run in results.plan.runs), default=0)


def show_segments(axes: Any, results: Results) -> None:
    """The x axis of a column of panels, and the longest context of the training."""
    from matplotlib.ticker import LogLocator, NullLocator

    if results.plan.config.log_x:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda x, _: short(x))
    trained = trained_segments(results)
    if 0 < trained < axes.get_xlim()[1]:
        for panel in axes.get_shared_x_axes().get_siblings(axes):
            panel.axvline(trained, **REFERENCE)


def show_norms(axes: Any) -> None:
    """The y axis of a row of norms: logarithmic where they differ by far."""
    row = axes.get_shared_y_axes().get_siblings(axes)
    values = [y for panel in row for line in panel.get_lines() for y in line.get_ydata() if y > 0]
    if values and max(values) > 20 * min(values):
        set_log(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)


def show_shares(axes: Any) -> None:
    """The y axis of a row of shares."""
    axes.set_ylim(-0.03, 1.04)


def show_gates(axes: Any) -> None:
    """The y axis of a row of gates, of which some are shares and some are small steps."""
    row = axes.get_shared_y_axes().get_siblings(axes)
    if max((y for panel in row for line in panel.get_lines() for y in line.get_ydata()), default=1) > 0.2:
        show_shares(axes)
    else:
        axes.set_ylim(bottom=0)


def finished(figure: Any, handles: Sequence[Any], results: Results, view: str, words: Sequence[str]) -> Any:
    """The figure with its title and what it shows above, and the names of its arms below."""
    height = figure.get_figheight()
    top = head(figure, results.plan.heading, f"{VIEWS[view].words}\n{below_title(results, *words)}")
    lay_out(figure, top)
    legend(figure, handles, height + top)
    lay_out(figure, top)
    return figure
