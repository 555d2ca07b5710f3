"""The names of what a figure shows: at the ends of lines where there is room, else in a legend below the axes."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lit_memory.report.labels import balanced
from lit_memory.report.results import Results
from lit_memory.report.style import GREY, SMALL, TITLE
from lit_memory.report.verdict import INCOMPLETE

LINE = 1.25 * SMALL
"""Points from one line of text to the next."""
FARTHEST = 1.6 * LINE
"""Points that a name may lie above or below the end of its line."""
LETTERS = 24
"""Of a line of a name beside the axes."""


class Name(NamedTuple):
    """A name for the end of a line."""

    text: str
    x: float
    y: float
    """The end of the line, in data."""
    color: str = GREY


class Drawn(NamedTuple):
    """What a figure shows and has to name."""

    handles: list[Any]
    """Of the arms, whose names are their labels."""
    ends: list[Name]
    """Of the lines of the arms; of fewer arms than there are where the legend has to name them."""
    references: list[Name]
    """Of lines that are no arm."""
    paper: bool = False
    """Whether there are values of the paper."""


def below_title(results: Results, *words: str) -> str:
    """The line below the title: the scale, ``words`` on what the figure shows, and whether runs are missing."""
    plan = results.plan
    scale = plan.setting.replace("`", "") + (", modified" if plan.modified else "")
    return " · ".join([scale, *words, *[INCOMPLETE] * bool(results.missing())])


def head(figure: Any, title: str, status: str) -> float:
    """Title and status above everything else, which begins so many inches below the upper edge."""
    width, height = figure.get_size_inches()
    title = balanced(title, int(width * 72 / (0.61 * TITLE)))
    status = "\n".join(balanced(line, int(width * 72 / (0.52 * SMALL))) for line in status.split("\n"))
    above = 1.3 * TITLE * (1 + title.count("\n"))
    inches = (8 + above + LINE * (1 + status.count("\n")) + 4) / 72
    figure.set_figheight(height + inches)
    at = {"xycoords": "figure fraction", "textcoords": "offset points", "va": "top", "annotation_clip": False}
    for text, down, look in (
        (title, 8, {"fontsize": TITLE, "fontweight": "bold"}),
        (status, 8 + above, {"fontsize": SMALL, "color": GREY}),
    ):
        note = figure.axes[0].annotate(text, (0, 1), (8, -down), linespacing=1.3, **at, **look)
        note.set_in_layout(False)
    return inches


def name_ends(axes: Any, names: Sequence[Name], wide: bool = False) -> bool:
    """Write names beside the axes, each as near to its end as the others let it, or to the border that its line leaves
    the axes by; False, and none, if one would be too far away. wide: however far."""
    if not names:
        return True
    least, most = axes.get_ylim()
    names = [name._replace(y=min(max(name.y, least), most)) for name in names]
    texts = [balanced(name.text, LETTERS) for name in names]
    heights = [LINE * (1 + text.count("\n")) for text in texts]
    scale = 72 / axes.figure.dpi
    ends = [axes.transData.transform((name.x, name.y))[1] * scale for name in names]
    places = spread(ends, heights)
    low, high = axes.bbox.y0 * scale, axes.bbox.y1 * scale
    if not wide and any(abs(place - end) > FARTHEST for place, end in zip(places, ends, strict=True)):
        return False
    for name, text, end, place in zip(names, texts, ends, places, strict=True):
        straight = abs(place - end) < 1
        leader = {"arrowstyle": "-", "lw": 0.6, "color": name.color, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            text,
            (name.x, name.y),
            (1.02, (place - low) / (high - low)),
            textcoords="axes fraction",
            va="center",
            fontsize=SMALL,
            color=name.color,
            arrowprops=None if straight else leader | {"relpos": (0, 0.5)},
            annotation_clip=False,
        )
    return True


def spread(ends: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Places near ``ends``, in their order, at which things of these heights do not overlap: each group that touches
    has its middle where the middle of its ends is."""
    order = sorted(range(len(ends)), key=lambda i: ends[i])
    groups: list[list[int]] = []
    places = list(ends)

    def stack(group: list[int]) -> None:
        total = sum(heights[i] for i in group)
        at = sum(ends[i] for i in group) / len(group) - total / 2
        for i in group:
            places[i] = at + heights[i] / 2
            at += heights[i]

    for i in order:
        groups.append([i])
        while len(groups) > 1:
            below, above = groups[-2][-1], groups[-1][0]
            if places[above] - places[below] >= (heights[above] + heights[below]) / 2 - 1e-9:
                break
            groups[-2:] = [groups[-2] + groups[-1]]
            stack(groups[-1])
    return places


def lay_out(figure: Any, top: float) -> None:
    """Compute the layout of all but the uppermost ``top`` inches."""
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - top / figure.get_figheight()))
    figure.draw_without_rendering()


def legend(figure: Any, handles: Sequence[Any], height: float) -> None:
    """Below the axes, in as many columns as fit; the figure grows by its rows, so the axes keep their height.

    height: inches of the figure without it.
    """
    for columns in range(min(len(handles), 5), 0, -1):
        shown = figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=columns,
            handlelength=2.8,
            columnspacing=1.6,
            fontsize=SMALL,
        )
        box = shown.get_window_extent()
        if box.width < figure.bbox.width or columns == 1:
            figure.set_figheight(height + box.height / figure.dpi)
            break
        shown.remove()


def thin_ticks(axes: Any) -> None:
    """Hide the labels of the x axis that would run into the next one; the last one stays."""
    shown = [label for label in axes.get_xticklabels() if label.get_text()]
    shown.sort(key=lambda label: label.get_position()[0])
    room, gap = math.inf, SMALL / 2 * axes.figure.dpi / 72
    for label in reversed(shown):
        box = label.get_window_extent()
        label.set_visible(box.x1 <= room)
        room = box.x0 - gap if label.get_visible() else room
