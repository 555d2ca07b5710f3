"""How figures look: colours, markers, sizes. Plain values, without matplotlib."""

from typing import Any

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito, distinct for the colour-blind, without the yellow that disappears on white."""
MARKERS = (("o", 6), ("s", 5.5), ("^", 6.5), ("D", 5.5), ("v", 6.5), ("X", 7.5), ("P", 7.5))
"""Shape, and the size at which all look equally large."""
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
GREY = "#595959"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "text.parse_math": False,  # labels come from the YAML: a lone dollar sign must not end a report
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
SEED_POINT = {"ls": "", "marker": ".", "ms": 5, "mew": 0, "alpha": 0.45, "zorder": 1.8}
WIDTH, HEIGHT = 7.0, 3.9
"""Inches, the height without the legend. Shown 700 pixels wide, a point of type is 1.4 pixels."""
DPI = 200
SMALL = 9.5
"""Size of the type of remarks."""
AGREEMENT = {
    True: ("#D9F0E3", "as in the paper"),
    False: ("#FBE0D2", "not as in the paper"),
    None: ("#EFEFEF", "not comparable"),
}
"""Background and legend of a mark, by whether it agrees with the paper's; None if they cannot be compared."""


def arm_look(i: int) -> dict[str, Any]:
    """Colour, marker and line of the i-th arm, as arguments of ``Axes.plot``."""
    marker, size = MARKERS[(i + i // len(COLORS)) % len(MARKERS)]
    line = {"color": COLORS[i % len(COLORS)], "ls": DASHES[i % len(DASHES)], "lw": 1.8}
    return line | {"marker": marker, "ms": size, "mec": "white", "mew": 0.7}


def text_color(color: str) -> tuple[float, ...]:
    """A colour of the palette, dark enough for text."""
    return tuple(0.65 * int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
