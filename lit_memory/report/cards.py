"""The reports below a root, one ``Card`` each: what the gallery shows of them."""

import base64
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.report.budget import all_runs, core_seconds
from lit_memory.report.catalogue import is_of_today, read_verdict, report_folders
from lit_memory.report.labels import label
from lit_memory.report.markdown import tables
from lit_memory.report.results import Results
from lit_memory.report.saved import DAMAGED, load
from lit_memory.util.checks import first_line

COMMAND = re.compile(r"^```bash\n(.+)\n```$", re.MULTILINE)
JUDGED = re.compile(r"^\*\*[A-Z ]+\*\*(.*)$", re.MULTILINE)
"""The line of a page that has the verdict, and what follows it there."""
COLORS = 128


@dataclass(frozen=True)
class Picture:
    """A figure that can stand inside a page."""

    url: str
    width: int
    height: int

    @classmethod
    def of(cls, path: Path) -> "Picture":
        """A picture in ``COLORS`` colours: a third of the bytes, and no loss that one sees. Raises OSError."""
        from PIL import Image

        with Image.open(io.BytesIO(path.read_bytes())) as image:
            small, file = image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE), io.BytesIO()
        small.save(file, "PNG", optimize=True)
        return cls(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}", small.width, small.height)


@dataclass(frozen=True)
class Card:
    """One report."""

    name: str
    """Its folder below reports/: ``armt_rewrite``, or ``armt_rewrite/gpu`` for another scale."""
    title: str
    """With its scale, where that is another than the first."""
    paper: Mapping[str, str]
    """title, arxiv, item, claim."""
    verdict: str
    judged: str
    """What the page says behind the verdict: scale, limits, reason; Markdown."""
    exploratory: bool
    """Whether it rests on too few seeds; not stated by old reports."""
    earlier: bool
    """Whether the file of the experiment plans other runs today, or the code computes something else in them."""
    evidence: str
    """``toy``, ``real text`` or ``paper scale``; "not stated" by old reports."""
    seeds: int | None
    """How many were planned; None of a summary of marks, which trains nothing."""
    minutes: float | None
    """Of all runs that were timed, with one core each; None if none was."""
    command: str
    lines: list[dict[str, Any]]
    """The judged lines, as verdict.json has them."""
    tables: list[list[list[str]]]
    """Of table.md, header first."""
    figure: Picture
    results: Results | None
    """None of a summary of marks."""

    @property
    def page(self) -> str:
        """The link to its page from reports/."""
        return f"{self.name}/README.md"

    @property
    def anchor(self) -> str:
        return self.name.replace("/", "-")

    @property
    def caveats(self) -> list[str]:
        """What a reader must know first."""
        return [] if self.results is None else self.results.plan.config.caveats

    @property
    def paper_key(self) -> str:
        """What the reports of one paper share; its title may be spelled in several ways."""
        return self.paper.get("arxiv") or self.paper["title"].casefold()

    @property
    def paper_title(self) -> str:
        return self.paper["title"] or "Without a paper"

    @property
    def words(self) -> str:
        """What a search for words looks through."""
        arms = self.results.plan.settings.values() if self.results else ()
        shown = (self.name, self.title, *self.paper.values(), self.verdict, self.evidence, *arms)
        return " ".join(shown).lower()

    @property
    def figure_text(self) -> str:
        """What the figure shows, for who does not see it."""
        if self.results is None:
            return f"{self.title}: a table of marks; it is also below in words."
        plan = self.results.plan
        shown = label(plan.config.time) if plan.about_time else plan.y_label
        return f"{self.title}: {shown} against {plan.x_label}; the numbers are in the table below."


def read_cards(reports: Path, warn: Callable[[str], None]) -> list[Card]:
    """All reports of a folder in the order of their names. One that cannot be read is left out, and ``warn`` gets a
    line on it."""
    cards = []
    for folder in report_folders(reports):
        try:
            cards.append(_card(reports, folder))
        except ConfigError as error:
            warn(f"left out of the gallery: {error}")
        except OSError as error:
            warn(f"left out of the gallery: {folder}: {error.filename or 'figure.png'} cannot be read")
        except (*DAMAGED, AttributeError) as error:
            warn(f"left out of the gallery: {folder}: damaged ({first_line(error)}); --report writes it anew")
    return cards


def _card(reports: Path, folder: Path) -> Card:
    verdict = read_verdict(folder)
    page, table = ((folder / name).read_text(encoding="utf-8") for name in ("README.md", "table.md"))
    command, judged = COMMAND.search(page), JUDGED.search(page)
    results = load(folder) if "arms" in verdict else None
    runs = all_runs(results.plan.grid, results.plan.runs) if results else []
    keys = {run["key"] for run in runs if run.get("key")}
    seconds = core_seconds(runs) if results else None
    name = folder.relative_to(reports).as_posix()
    title = verdict.get("title") or (results.plan.heading if results else verdict["experiment"])
    return Card(
        name=name,
        title=f"{title} · scale {folder.name}" if "/" in name else title,
        paper=verdict["paper"],
        verdict=verdict["verdict"],
        judged=judged[1].lstrip(", ").strip() if judged else "",
        exploratory=bool(verdict.get("exploratory")),
        earlier=is_of_today(verdict["experiment"], verdict["scale"], keys) is False,
        evidence=verdict.get("evidence") or "not stated",
        seeds=len(verdict["seeds"]) if "seeds" in verdict else None,
        minutes=None if seconds is None else seconds / 60,
        command=command[1] if command else "",
        lines=verdict.get("claims", []),
        tables=tables(table),
        figure=Picture.of(folder / "figure.png"),
        results=results,
    )
