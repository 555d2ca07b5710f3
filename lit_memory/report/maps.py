"""Figures of what one memory holds and retrieves, panel by panel: associative matrices, and the lines of hops."""

import textwrap
from typing import Any

from lit_memory.report.names import LETTERS
from lit_memory.report.results import Results
from lit_memory.report.style import DPI, GREY, SMALL, WIDTH, darker, looks
from lit_memory.report.views import finished

COLUMNS = 3
"""Most panels side by side."""
RING = {"ls": "", "marker": "o", "ms": 9, "mfc": "none", "mec": GREY, "mew": 1}
HOPS = ("o", "s", "^", "D")
"""Marker of every hop."""


def matrices(results: Results, view: str) -> Any:
    """A heat map per arm, in the colours from minus to plus its largest entry."""
    arms, seed = shown_arms(results, view, "A"), results.plan.seeds[0]
    figure, grid = arm_panels(results, arms, 2.3)
    for axes, arm in zip(grid, arms, strict=True):
        matrix = results.memory[view, "A", arm, seed]
        largest = float(abs(matrix).max()) or 1.0
        image = axes.imshow(matrix / largest, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_title(f"{axes.get_title()}\nlargest entry {largest:.3g}", fontsize=SMALL)
        axes.set_xlabel("channel of a value", fontsize=SMALL)
        axes.grid(visible=False)
    grid[0].set_ylabel("feature of a key", fontsize=SMALL)
    bar = figure.colorbar(image, ax=grid, shrink=0.8, pad=0.01)
    bar.set_label("share of the largest entry", fontsize=SMALL)
    return finished(figure, [], results, view, [f"seed {seed}"])


def hops(results: Results, view: str) -> Any:
    """The lines of every sample in a row, with those that its hops retrieve."""
    arms, seed = shown_arms(results, view, "retrieved"), results.plan.seeds[0]
    figure, grid = arm_panels(results, arms, 2.3)
    colors = dict(zip(results.plan.arms, looks(results.plan.architectures), strict=True))
    handles = {}
    for axes, arm in zip(grid, arms, strict=True):
        lines, support = results.memory[view, "lines", arm, seed], results.memory.get((view, "support", arm, seed))
        rows = range(1, len(lines) + 1)
        axes.barh(rows, lines, left=0.5, height=0.5, color="#EEEEEE", zorder=0)
        if support is not None:
            handles["supports the answer"] = draw_lines(axes, rows, support.T.tolist(), RING)
        of_hops = results.memory[view, "retrieved", arm, seed].T.tolist()
        for i, found in enumerate(of_hops):
            color = darker(colors[arm]["color"], 1 - 0.6 * i / max(1, len(of_hops) - 1))
            look = {"ls": "", "marker": HOPS[i % len(HOPS)], "ms": 4.5, "color": color, "mew": 0}
            handles.setdefault(f"hop {i + 1}", draw_lines(axes, rows, [found], look))
        axes.set_yticks(rows)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_xlabel("line of the context", fontsize=SMALL)
    grid[0].set_ylabel("test context", fontsize=SMALL)
    for name, handle in handles.items():
        handle.set_label(name)
    return finished(figure, list(handles.values()), results, view, [f"seed {seed}"])


def draw_lines(axes: Any, rows: Any, columns: list[list[float]], look: dict[str, Any]) -> Any:
    """A marker at every line; 0 is none."""
    points = [(line, row) for lines in columns for row, line in zip(rows, lines, strict=True) if line > 0]
    return axes.plot(*zip(*points, strict=True) if points else ([], []), **look)[0]


def shown_arms(results: Results, view: str, name: str) -> list[str]:
    """The arms of which the first seed is known."""
    return [arm for arm in results.plan.arms if (view, name, arm, results.plan.seeds[0]) in results.memory]


def arm_panels(results: Results, arms: list[str], height: float) -> tuple[Any, list[Any]]:
    """A figure with a panel for every arm, ``height`` inches high."""
    from matplotlib.figure import Figure

    rows = -(-len(arms) // COLUMNS)
    columns = -(-len(arms) // rows)
    figure = Figure(figsize=(WIDTH, 0.4 + height * rows), dpi=DPI, layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, arm in zip(grid, arms, strict=False):
        axes.set_title(textwrap.fill(results.plan.shown(arm), LETTERS), fontsize=SMALL)
    for axes in grid[len(arms) :]:
        axes.remove()
    return figure, grid[: len(arms)]
