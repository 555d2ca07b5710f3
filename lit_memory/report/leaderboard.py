"""The leaderboard: every architecture on every task, from the runs of the reports and nothing else.

A row is a report and a column an architecture. Where several arms have the same architecture, a cell has the range of
their means, and none is chosen. Every value is a mean over seeds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lit_memory.plan.sections import STEP
from lit_memory.report.cards import Card
from lit_memory.report.charts import Chart, rounded, shown_look, shown_series, state_ticks
from lit_memory.report.labels import count, is_share, short
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Results
from lit_memory.report.series import series_of
from lit_memory.report.states import StateAxis
from lit_memory.report.style import looks
from lit_memory.report.verdict import mean

DIGITS = (1, 2, 5)
"""Of the ticks in a decade."""


@dataclass(frozen=True)
class Row:
    """The architectures of one report."""

    card: Card
    results: Results
    arms: dict[str, list[str]]
    """Architecture -> its arms."""

    @property
    def plan(self) -> ReportPlan:
        return self.results.plan

    @property
    def ends(self) -> list[float]:
        """The first and the last tested x; along a training, its end alone."""
        xs = sorted(self.plan.x_values)
        return xs[-1:] if self.plan.config.x == STEP else list(dict.fromkeys((xs[0], xs[-1])))

    @property
    def metric(self) -> str:
        """``exact match``, with a remark if less is better."""
        return f"{self.plan.y_label}{' (less is better)' if self.plan.less_is_better(self.plan.config.y) else ''}"

    @property
    def lengths(self) -> str:
        """``key-value pairs written: 50 → 500``."""
        return f"{self.plan.x_label}: {' → '.join(map(short, self.ends))}"

    def value(self, architecture: str) -> str:
        """The metric at both ends: ``1.000 → 0.994``; of several arms the range. "" if no arm has this architecture."""
        arms = self.arms.get(architecture, [])
        return " → ".join(_range([mean(self.results.values(arm, None, x)) for arm in arms]) for x in self.ends if arms)

    def state(self, architecture: str) -> str:
        """The floats of state that a sample carries; a dash if nobody knows."""
        arms = self.arms.get(architecture, [])
        known = sorted(floats for arm in arms if (floats := self.plan.state_size(arm)) is not None)
        sizes = [" to ".join(map(count, dict.fromkeys((known[0], known[-1]))))] if known else []
        return ", ".join(sizes + ["grows"] * any(map(self.plan.grows, arms))) or "–"


def board(cards: Sequence[Card]) -> tuple[list[str], list[Row]]:
    """The architectures, those of most reports first, and a row for every report that trains, but for
    those whose claim is about times alone: their models need not have learnt anything."""
    rows = []
    for card in cards:
        arms: dict[str, list[str]] = {}
        for arm, architecture in _architectures(card).items():
            arms.setdefault(architecture, []).append(arm)
        if card.results is not None and arms and not card.results.plan.about_time:
            rows.append(Row(card, card.results, arms))
    names = sorted({name for row in rows for name in row.arms})
    return sorted(names, key=lambda name: -sum(name in row.arms for row in rows)), rows


def _architectures(card: Card) -> dict[str, str]:
    """Arm -> the name of its model, of the arms where the report says it."""
    plan = card.results.plan if card.results is not None else None
    return {arm: name for arm, name in zip(plan.arms, plan.architectures, strict=True) if name} if plan else {}


def _range(values: Sequence[float]) -> str:
    """``0.994``, or ``0.060 to 0.073`` of several arms; a dash where none is finished."""
    known = sorted(value for value in values if math.isfinite(value))
    shown = (
        dict.fromkeys(f"{value:.3f}" if value < 100 else f"{value:,.1f}" for value in (known[0], known[-1]))
        if known
        else ()
    )
    return " to ".join(shown) or "–"


def board_charts(rows: Sequence[Row]) -> list[Chart]:
    """Every arm of every report whose metric is a share, in the colour of its architecture: at the last x against the
    floats of state, and at every x against x as a multiple of the largest x of its training."""
    shares = [row for row in rows if is_share(row.plan.config.y)]
    names = sorted({name for row in shares for name in row.arms})
    own = {name: shown_look(look) for name, look in zip(names, looks(names), strict=True)}
    charts = [_against_state(shares), _against_length(shares)]
    for chart in charts:
        chart |= {"y": "share of right answers", "log": False, "share": True}
        for shown in chart["series"]:
            shown["look"] = own[shown["group"]]
    return charts


def _against_state(rows: Sequence[Row]) -> Chart:
    known = [(*found, floats) for found in _arms(rows) if (floats := found[0].plan.state_size(found[2])) is not None]
    states = [floats for *_, floats in known]
    axis, shown = StateAxis.around(states), []
    for row, architecture, arm, floats in known:
        x = row.ends[-1]
        text = f"{count(floats)} floats; {row.plan.x_label}: {short(x)}"
        shown.append(_series(row, architecture, arm, [(math.log10(floats) if floats else axis.zero, x, text)]))
    x_label = "floats of state that one sample carries; at the longest test of each report"
    return {
        "id": "state",
        "name": "State",
        "x": x_label,
        "ticks": state_ticks(axis, states),
        "series": shown,
        "guides": [],
    }


def _against_length(rows: Sequence[Row]) -> Chart:
    shown, positions = [], [0.0]
    for row, architecture, arm in _arms(rows):
        trained = row.plan.train_x
        if trained and row.plan.config.x != STEP:
            label, xs = row.plan.x_label, [x for x in sorted(row.plan.x_values) if x > 0]
            at = [(math.log10(x / trained), x, f"{x / trained:.3g} times; {label}: {short(x)}") for x in xs]
            shown.append(_series(row, architecture, arm, at))
            positions += [position for position, _, _ in at]
    guides = [{"name": "trained up to here", "x": 0.0}]
    x_label = "tested length (or pairs, digits, …), as a multiple of the largest in the training"
    return {
        "id": "length",
        "name": "Length",
        "x": x_label,
        "ticks": _ratio_ticks(positions),
        "series": shown,
        "guides": guides,
    }


def _arms(rows: Sequence[Row]) -> Iterator[tuple[Row, str, str]]:
    """(row, architecture, arm) of every arm."""
    yield from ((row, architecture, arm) for row in rows for architecture, arms in row.arms.items() for arm in arms)


def _series(row: Row, architecture: str, arm: str, at: Sequence[tuple[float, float, str]]) -> Chart:
    """An arm among those of all reports, with the report that it is from."""
    seeds = len(row.plan.seeds)
    origin = f"{row.card.name}, {row.card.evidence}, {seeds} seed{'s' * (seeds > 1)}"
    own = next(series for series in series_of(row.results, [x for _, x, _ in at]) if series.arm == arm)
    found = shown_series(row.plan, own, [(position, text) for position, _, text in at])
    where = {"group": architecture, "card": row.card.anchor, "crowd": True}
    return found | {"name": f"{found['name']} ({origin})"} | where


def _ratio_ticks(positions: Sequence[float]) -> list[list[Any]]:
    """1, 2 and 5 of every decade within the positions, or the decades alone if there are many."""
    low, high = min(positions) - 0.02, max(positions) + 0.02
    digits = DIGITS if high - low < 3 else DIGITS[:1]
    values = [digit * 10.0**decade for decade in range(math.floor(low), math.ceil(high) + 1) for digit in digits]
    return [[rounded(math.log10(x)), f"{x:g}"] for x in values if low <= math.log10(x) <= high]
