"""Writes reports/README.md and reports/index.html: every report below a root at one look, and the leaderboard.

index.html is one file that works offline: figures, data, style, script and the library that draws the interactive
figures (assets/SOURCES) are inside, and its policy forbids it to load anything. The same reports give the same bytes.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.report.cards import Card, read_cards
from lit_memory.report.charts import charts
from lit_memory.report.labels import count
from lit_memory.report.leaderboard import Row, board, board_charts
from lit_memory.report.markdown import markdown
from lit_memory.report.page import HOLDS, join_blocks
from lit_memory.report.verdict import COMPARISON, VERDICTS
from lit_memory.util import files

ASSETS = Path(__file__).with_name("assets")
LIBRARY = "chart.umd.min.js"
WHAT = "All reports at one look, with their figures to click on: [index.html](index.html), one file that works offline."
BOARD = """The metric of every report that is not about times alone, at its shortest and its longest test (→), and the
floats of state that one sample carries from segment to segment. Every value is a mean over the seeds of one report,
which its link leads to; reports differ in task, length and size of the models, so only the values of one row compare.
Where several arms of a report have the same architecture, their range is shown. *grows*: the state grows with the
context."""
EARLIER = """† Made by an earlier version of the experiment's file, or of code that computes something else today; its
page names the commit. Run anew, its numbers may differ."""


def write_gallery(root: Path, warn: Callable[[str], None]) -> tuple[str, dict[str, Path]]:
    """Write both files into root/reports; ``warn`` names the reports that cannot be read. Returns a line for the
    terminal, and name -> path. Raises ConfigError if there is no report."""
    reports = root / "reports"
    cards = read_cards(reports, warn)
    if not cards:
        raise ConfigError(
            str(reports), "", "no report that can be shown; expected some that run.py EXPERIMENT.yaml wrote"
        )
    architectures, rows = board(cards)
    texts = {"index.html": html(cards, architectures, rows), "README.md": readme(cards, architectures, rows)}
    verdicts = [card.verdict for card in cards]
    found = ", ".join(f"{verdicts.count(name)} {name}" for name in shown_verdicts(cards) if name in verdicts)
    summary = f"{len(cards)} report{'s' * (len(cards) > 1)}: {found}"
    return summary, files.write_all(reports, {name: text.encode() for name, text in texts.items()})


def readme(cards: Sequence[Card], architectures: Sequence[str], rows: Sequence[Row]) -> str:
    """README.md: counts, one row per report, the leaderboard."""
    header = ["experiment", "verdict", "evidence", "seeds", "core-minutes"]
    blocks = ["# Results", WHAT, markdown(["paper", *shown_verdicts(cards), "all"], counts(cards)), "## Experiments"]
    for key, title in papers(cards).items():
        of_paper = [
            [f"[{card.title}]({card.page})", _verdict(card), card.evidence, _seeds(card), _minutes(card)]
            for card in cards
            if card.paper_key == key
        ]
        blocks += [f"### {title}", markdown(header, of_paper)]
    blocks += [EARLIER] if any(card.earlier for card in cards) else []
    several, alone = compared(rows)
    names = [name for name in architectures if any(name in row.arms for row in several)]
    table = [[_report(row), row.metric, row.lengths, *(_cell(row, name) for name in names)] for row in several]
    blocks += ["## Leaderboard", BOARD, markdown(["report", "metric", "tested", *names], table) if table else ""]
    single = [[_report(row), row.metric, row.lengths, name, _cell(row, name)] for row in alone for name in row.arms]
    tested_alone = "Reports of one architecture:"
    blocks += (
        [tested_alone, markdown(["report", "metric", "tested", "architecture", "measured"], single)] if single else []
    )
    blocks += ["Written by `python run.py --gallery`; changes are lost."]
    return join_blocks(blocks)


def _report(row: Row) -> str:
    """The link to a report, with what its values rest on."""
    return f"[{row.card.name}]({row.card.page}) ({row.card.evidence}, seeds: {_seeds(row.card)})"


def _cell(row: Row, architecture: str) -> str:
    """A cell of the leaderboard in Markdown; "" if the report has no such architecture."""
    value = row.value(architecture)
    return f"[{value}]({row.card.page}), {row.state(architecture)}" if value else ""


def _verdict(card: Card) -> str:
    return card.verdict + ", exploratory" * card.exploratory + " †" * card.earlier


def _seeds(card: Card) -> str:
    return "–" if card.seeds is None else str(card.seeds)


def _minutes(card: Card) -> str:
    """Core-minutes; a dash where no run was timed."""
    return "–" if card.minutes is None else "< 1" if card.minutes < 1 else count(card.minutes)


def papers(cards: Sequence[Card]) -> dict[str, str]:
    """Key of a paper -> its title, in the order of the cards."""
    found: dict[str, str] = {}
    for card in cards:
        found.setdefault(card.paper_key, card.paper_title)
    return found


def counts(cards: Sequence[Card]) -> list[list[Any]]:
    """A row per paper and one for all: how many reports have each verdict."""
    groups = [(title, [card for card in cards if card.paper_key == key]) for key, title in papers(cards).items()]
    verdicts = [(title, [card.verdict for card in found]) for title, found in [*groups, ("all", cards)]]
    return [[title, *map(found.count, shown_verdicts(cards)), len(found)] for title, found in verdicts]


def shown_verdicts(cards: Sequence[Card]) -> list[str]:
    """The verdicts that an experiment of a paper can have, and those of others that occur."""
    return list(dict.fromkeys([*VERDICTS, *sorted({card.verdict for card in cards} & {COMPARISON})]))


def compared(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows that compare architectures, and those that have one alone."""
    return [row for row in rows if len(row.arms) > 1], [row for row in rows if len(row.arms) == 1]


def html(cards: Sequence[Card], architectures: Sequence[str], rows: Sequence[Row]) -> str:
    """index.html."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    several, alone = compared(rows)
    data: dict[str, Any] = {card.anchor: charts(card.results) for card in cards if card.results is not None}
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("gallery.html").render(
        cards=cards,
        papers=papers(cards),
        verdicts=shown_verdicts(cards),
        counts=counts(cards),
        evidence=sorted({card.evidence for card in cards}),
        architectures=[name for name in architectures if any(name in row.arms for row in several)],
        several=several,
        alone=alone,
        holds=HOLDS,
        seeds=_seeds,
        minutes=_minutes,
        earlier=EARLIER.removeprefix("† "),
        style=_asset("gallery.css"),
        script=_asset("gallery.js"),
        library=_asset(LIBRARY),
        licence=_asset("chart.LICENSE"),
        data=embedded({"cards": data, "board": board_charts(rows)}),
    )


def embedded(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    """A text to stand inside the page; without the name of a source map, which is not there."""
    return (ASSETS / name).read_text(encoding="utf-8").partition("\n//# sourceMappingURL=")[0]
