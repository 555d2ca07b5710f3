"""Names, ranges and numbers as figures, tables and pages show them."""

import math
import re
import textwrap
from collections.abc import Sequence

from lit_memory.report.verdict import mean, std

LABELS = {
    "pairs": "key-value pairs written",
    "exact_match": "exact match",
    "capacity": "capacity (pairs kept)",
    "seconds": "seconds per context",
    "train_tokens_per_s": "training, tokens a second",
    "bits_per_byte": "bits per byte",
    "segment_bits_per_byte": "bits per byte",
    "segment_loss": "loss (nats per token)",
    "loss": "loss (nats per token)",
    "step": "optimizer steps",
    "lr": "learning rate",
}
SHARES = {
    "exact_match",
    "exact_set",
    "babilong_compare",
    "string_match_all",
    "recall",
    "accuracy",
    "token_accuracy",
    "answer_accuracy",
    "forced_answer_accuracy",
    "forced_token_accuracy",
    "hop1_support",
    "hop2_support",
}
"""Metrics from 0 to 1, each the share of a test's samples; figures show that range."""
MINIMIZED = {
    "loss",
    "perplexity",
    "bits_per_byte",
    "segment_loss",
    "segment_bits_per_byte",
    "mse",
    "mae",
    "repeat_mse",
    "repeat_mae",
    "season_mse",
    "season_mae",
    "linear_mse",
    "linear_mae",
    "steps",
    "later_steps",
    "steps_to",
}
"""Metrics where lower is better; the tasks have them too, but a report imports no task."""


def is_share(metric: str) -> bool:
    """Whether a metric is one of ``SHARES``, of a result or of the tests along a training (``test_accuracy``)."""
    return metric.removeprefix("test_") in SHARES


def label(name: str, words: str = "") -> str:
    """The axis label of a field or metric: ``words`` if given, else an entry of ``LABELS``, else the name in words."""
    return words or LABELS.get(name, name.replace("_", " "))


def decimals(value: float | None) -> str:
    """A value as table.csv has it."""
    return "" if value is None else f"{value:.6f}"


def rounded(value: float) -> float:
    """A value as it is read from table.csv."""
    return float(decimals(value))


def balanced(text: str, width: int) -> str:
    """A text in as few lines of ``width`` letters as it needs, of about equal length. A number keeps its "%"."""
    text = re.sub(r"(\d) %", "\\1\u00a0%", text)  # a no-break space
    rows, longest = len(textwrap.wrap(text, width)), max(1, *map(len, text.split(" ")))
    widths = range(min(longest, width), width + 1)
    return textwrap.fill(text, next(least for least in widths if len(textwrap.wrap(text, least)) <= rows))


def short(x: float) -> str:
    """A tested value in its usual notation: 50, 0.5, 64k, 1M; from a billion on three digits."""
    if abs(x) >= 1e9:
        return f"{x:.3g}"
    for unit, size, least in (("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(x) >= least and x % (size / 10) == 0:
            return f"{x / size:g}{unit}"
    return f"{x:,.0f}" if x == int(x) else f"{x:g}"


def seeds_shown(seeds: Sequence[int]) -> str:
    """seed 0; seeds 0, 1."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def count(number: float | None) -> str:
    """A whole number with commas; a dash for None."""
    return "–" if number is None else f"{number:,.0f}"


def mean_interval(metric: str, values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean over seeds, by Student's t; of a share within 0 and 1. NaN without seeds, and of
    one seed."""
    if len(values) < 2:
        return math.nan, math.nan
    from lit_memory.report.margins import LEVEL, student_t

    middle, half = mean(values), student_t(1 - LEVEL / 2, len(values)) * std(values) / math.sqrt(len(values))
    low, high = middle - half, middle + half
    return (max(low, min(0.0, middle)), min(high, max(1.0, middle))) if is_share(metric) else (low, high)


def mean_std(values: Sequence[float], mean_format: str = ".3f", std_format: str = ".3f") -> str:
    """``0.991 ± 0.001``; the mean alone for one value, a dash for none."""
    if not values:
        return "–"
    average = format(mean(values), mean_format)
    return f"{average} ± {std(values):{std_format}}" if len(values) > 1 else average
