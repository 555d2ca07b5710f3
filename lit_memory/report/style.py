"""How figures look: colours, markers, sizes. Plain values, without matplotlib."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

ARCHITECTURES = {
    "armt": ("#0072B2", "o", 6),
    "prmt": ("#B5221F", "^", 6.5),
    "rmt": ("#009E73", "s", 5.5),
    "rmt_r": ("#880044", "v", 6.5),
    "tarm": ("#446611", "d", 6.5),
    "mamba": ("#D55E00", "X", 7.5),
    "rwkv": ("#11BBEE", "P", 7.5),
    "deltanet": ("#000066", "D", 5.5),
    "gated_deltanet": ("#BBBB88", (6, 1, 0), 8.5),
    "transformer": ("#662288", "h", 6.5),
    "xl": ("#3A1FD1", "p", 6.5),
    "lmm": ("#8C8CFF", "<", 6.5),
    "mac": ("#8A3F63", ">", 6.5),
    "mag": ("#8811FF", (4, 1, 0), 8),
    "mal": ("#D8AA00", "*", 9),
    "larimar": ("#3355BB", "H", 6.5),
    "memreasoner": ("#C77CC7", "8", 6),
}
"""Architecture -> its colour, marker and the size at which all look equally large, in every figure of the project.
Colours that meet in a figure differ for the colour-blind as well (in OKLab by 0.08, under Machado's simulations)."""
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
    "hatch.linewidth": 3,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
SEED_LINE = {"lw": 0.9, "marker": ".", "ms": 3.5, "mew": 0, "alpha": 0.45, "zorder": 1.9}
SEED_POINT = {"ls": "", "marker": ".", "ms": 5, "mew": 0, "alpha": 0.5, "zorder": 1.9}
REFERENCE = {"color": GREY, "lw": 1, "ls": (0, (4, 3)), "zorder": 1.5}
PAPER = {"ls": (0, (2, 2)), "lw": 1.2, "mfc": "none", "mew": 1.3, "zorder": 2.2}
"""The paper's own values: hollow, dashed, in the colour and with the marker of the arm."""
LEAST_FOR_BAND, MOST_BANDS = 5, 6
"""Seeds from which on a figure has a band of confidence for each of up to so many arms; else seeds are shown one by
one."""
WIDTH, HEIGHT, COLUMN = 7.0, 3.3, 3.25
"""Inches, the height without title and legend. Shown 700 pixels wide, a point of type is 1.4 pixels."""
DPI = 200
TITLE, SMALL = 12, 9
"""Sizes of the type of the title, and of remarks and names."""
AGREEMENT = {
    True: ("#D9F0E3", "as in the paper"),
    False: ("#FBE0D2", "not as in the paper"),
    None: ("#EFEFEF", "not comparable"),
}
"""Background and legend of a mark, by whether it agrees with the paper's; None if they cannot be compared."""
UNSURE = "///"
"""Hatching of the background of a mark that may be another."""


def looks(models: Sequence[str]) -> list[dict[str, Any]]:
    """Colour, marker and line of arms with these architectures, as arguments of ``Axes.plot``.

    Of several arms with one architecture, each is darker than the one before, with another line; of more than four, two
    and two have a colour and a marker, which are those of architectures that the figure does not have. So has an
    unknown architecture, or "".
    """
    free = [name for name in ARCHITECTURES if name not in models]
    own = iter(free * len(models) or ARCHITECTURES)
    named = [model if model in ARCHITECTURES else next(own) for model in models]
    counts, seen, found, lent = Counter(named), Counter(), [], {}
    for name in named:
        rank, seen[name] = seen[name], seen[name] + 1
        alike = counts[name]
        if alike > len(DASHES):
            pair = (name, rank // 2)
            if pair not in lent:
                lent[pair] = name if rank < 2 else next(own)
            name, rank, alike = lent[pair], rank % 2, 2
        color, marker, size = ARCHITECTURES[name]
        step = min(0.35, 0.55 / max(1, alike - 1))
        line = {"color": darker(color, 1 - rank * step), "ls": DASHES[rank % len(DASHES)], "lw": 1.8}
        found.append(line | {"marker": marker, "ms": size, "mec": "white", "mew": 0.7})
    return found


def darker(color: str, share: float) -> str:
    """A colour with this share of its light."""
    return "#" + "".join(f"{round(share * int(color[i : i + 2], 16)):02X}" for i in (1, 3, 5))


def text_color(color: str) -> str:
    """A colour of the table, dark enough for text."""
    return darker(color, 0.65)


def has_bands(seeds: int, arms: int, wide: bool = False) -> bool:
    """Whether a figure of so many seeds and arms shows intervals. wide: they would hide its lines."""
    return seeds >= LEAST_FOR_BAND and arms <= MOST_BANDS and not wide


def spread_words(seeds: int, lines: int, wide: bool = False) -> str:
    """What a figure shows of so many seeds; lines: those of its arms, 0 where it shows points with bars. wide: see
    ``has_bands``."""
    if seeds == 1:
        return "1 seed"
    interval = f"{'band' if lines else 'bar'}: 95 % interval of the mean"
    shown = interval if has_bands(seeds, lines, wide) else "faint: every seed"
    return f"mean of {seeds} seeds, {shown}"
