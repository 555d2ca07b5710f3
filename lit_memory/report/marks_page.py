"""Writes the report of a summary of marks: figure, table.csv, table.md, verdict.json and README.md."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_memory.report.figures import saved
from lit_memory.report.markdown import markdown
from lit_memory.report.marks import MARKS, Mark, Summary, thresholds
from lit_memory.report.names import head, lay_out, legend
from lit_memory.report.page import join_blocks, paper_claim
from lit_memory.report.results import Report
from lit_memory.report.style import AGREEMENT, DPI, GREY, STYLE, UNSURE, WIDTH
from lit_memory.report.verdict import INCOMPLETE, INCONCLUSIVE, NOT_REPRODUCED, REPRODUCED, exploratory
from lit_memory.util import files

Marks = Mapping[tuple[str, str], Mark]
"""(ability, arm) -> mark."""


def render_marks(summary: Summary, root: Path, command: str) -> Report:
    """Write the report into root/reports; ``command`` is shown on its page."""
    marks = summary.marks()
    missing = [f"reports/{name}: {_command(name)}" for name in summary.missing]
    verdict, reports = _verdict(marks), [source.results for source in summary.read]
    seeds = [len(results.plan.seeds) for results in reports if results is not None]
    scope = "" if verdict == INCOMPLETE else exploratory(summary.name, min(seeds))
    report = Report(verdict, [], missing, _table(summary, marks), scope)
    texts = {
        "table.csv": _csv(summary, marks),
        "table.md": report.table,
        "verdict.json": _verdict_json(summary, report),
        "README.md": _page(summary, report, marks, command),
    }
    contents = _figure(summary, report, marks) | {name: text.encode() for name, text in texts.items()}
    return replace(report, paths=files.write_all(root / "reports" / summary.name / summary.scale, contents))


def _command(name: str) -> str:
    """What makes a report of a name, or of name/scale."""
    experiment, _, scale = name.partition("/")
    return f"python run.py experiments/{experiment}.yaml" + f" --scale {scale}" * bool(scale)


def _verdict(marks: Marks) -> str:
    """REPRODUCED if every mark is surely the paper's, of those that the paper has; NOT REPRODUCED if one surely is
    not, whichever other it is. One of an ability that a model did not learn to show is not sure."""
    found = [mark for mark in marks.values() if mark.paper != "?"]
    if not found or any(mark.agrees is None and mark.learnt for mark in found):
        return INCOMPLETE
    if any(mark.refuted for mark in found):
        return NOT_REPRODUCED
    return REPRODUCED if all(mark.sure for mark in found) else INCONCLUSIVE


def _figure(summary: Summary, report: Report, marks: Marks) -> dict[str, bytes]:
    models = summary.config.models
    cells = {(ability, models[arm]): mark for (ability, arm), mark in marks.items()}
    incomplete = f" · {INCOMPLETE}" if report.verdict == INCOMPLETE else ""
    status = f"{summary.scale_shown} ({summary.evidence}) · in brackets the paper's marks{incomplete}"
    return draw_marks(summary.title or summary.name, status, cells)


def draw_marks(title: str, status: str, cells: Marks) -> dict[str, bytes]:
    """figure.png and figure.pdf of a table of marks by (row, column)."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height = 0.9 + 0.42 * len({row for row, _ in cells})
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        _draw_cells(figure.add_subplot(), cells)
        top = head(figure, title, status)
        patches = [Patch(facecolor=color, label=words) for color, words in AGREEMENT.values()]
        if any(map(_is_unsure, cells.values())):
            patches.append(Patch(facecolor=GREY, edgecolor="white", hatch=UNSURE, label="not sure"))
        legend(figure, patches, height + top)
        lay_out(figure, top)
        return saved({"figure": figure})


def _is_unsure(mark: Mark) -> bool:
    return mark.agrees is not None and not mark.sure


def _draw_cells(axes: Any, cells: Marks) -> None:
    """A coloured cell per mark, row names on the left, column names above."""
    from matplotlib.patches import Rectangle

    rows, columns = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    for (row, column), mark in cells.items():
        x, y = columns.index(column), rows.index(row)
        color, _ = AGREEMENT[mark.agrees]
        hatch = UNSURE if _is_unsure(mark) else None
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", lw=2, hatch=hatch))
        axes.text(x + 0.5, y + 0.5, str(mark), ha="center", va="center", fontsize=12)
    axes.set_xticks([i + 0.5 for i in range(len(columns))], columns)
    axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
    axes.tick_params(length=0, labelsize=10.5, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.grid(False)


def _table(summary: Summary, marks: Marks) -> str:
    """table.md: one ability per row and one model per column."""
    models = summary.config.models
    rows = [[ability, *(str(marks[ability, arm]) for arm in models)] for ability in summary.config.abilities]
    table = markdown(["ability", *models.values()], rows)
    return f"Marks as measured, in brackets those of the paper\n\n{table}"


def _csv(summary: Summary, marks: Marks) -> str:
    file, models = io.StringIO(), summary.config.models
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["ability", "model", "measured", "paper"])
    writer.writerows([ability, models[arm], mark.mark, mark.paper] for (ability, arm), mark in marks.items())
    return file.getvalue()


def _verdict_json(summary: Summary, report: Report) -> str:
    content = {
        "experiment": summary.name,
        "scale": summary.scale,
        "paper": vars(summary.paper),
        "title": summary.title,
        "evidence": summary.evidence,
        "verdict": report.verdict,
        "exploratory": "exploratory" in report.scope,
        "missing": report.missing,
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _page(summary: Summary, report: Report, marks: Marks, command: str) -> str:
    """README.md: verdict and figure first, then the numbers behind every mark."""
    refuted = [f"{ability} of {summary.config.models[arm]}" for (ability, arm), mark in marks.items() if mark.refuted]
    remarks = []
    if report.verdict == NOT_REPRODUCED:
        remarks.append(f"With confidence another mark than the paper's: {', '.join(refuted)}")
    if report.missing:
        remarks.append(f"Missing: {'; '.join(report.missing)}")
    said = "".join(f". {remark}" for remark in remarks) + "." * bool(remarks)
    notes = summary.config.notes.strip()
    blocks = [
        f"# {summary.title or summary.name} · {summary.evidence}",
        f"Experiment `{summary.name}`",
        f"**{report.verdict}** at {summary.scale_shown} ({summary.evidence}){report.scope}{said}",
        paper_claim(vars(summary.paper)),
        "![The marks of this report, in brackets those of the paper.](figure.png)",
        _thresholds(summary),
        _numbers(summary, marks),
        f"## Notes\n\n{notes}" if notes else "",
        f"## How to reproduce\n\n```bash\n{command}\n```",
    ]
    return join_blocks(blocks)


def _thresholds(summary: Summary) -> str:
    """The claims of every mark, from the weakest on."""
    weakest_first, rows = ("requires", *reversed(MARKS)), []
    for ability, line in summary.config.abilities.items():
        claims = [[f"`{text}`" for text in thresholds(line, mark, "model")] for mark in weakest_first]
        rows.append([ability, _experiments(summary, ability), *map(", ".join, claims)])
    table = markdown(["ability", "experiment", "required", *(f"`{mark}`" for mark in reversed(MARKS))], rows)
    rule = (
        "A mark is the strongest whose line holds in the report of the experiment, by the mean over seeds; `-` if\n"
        'none does. "perhaps": the interval of a line contains its threshold. "not learnt": the model fails what is\n'
        "required, so that the test says nothing about the ability."
    )
    return f"## Thresholds\n\n{rule}\n\n{table}"


def _experiments(summary: Summary, ability: str) -> str:
    """The experiments of an ability, and of which models where there are several."""
    models: dict[str, list[str]] = {}
    for arm, shown in summary.config.models.items():
        models.setdefault(summary.sources[ability, arm].name, []).append(shown)
    if len(models) == 1:
        return f"`{next(iter(models))}`"
    return ", ".join(f"`{name}` ({', '.join(shown)})" for name, shown in models.items())


def _numbers(summary: Summary, marks: Marks) -> str:
    """Every mark with its thresholds in numbers."""
    rows = []
    for (ability, arm), mark in marks.items():
        numbers = "; ".join(f"`{claim.line}`: {claim.numbers}" for claim in mark.claims)
        model = summary.config.models[arm]
        rows.append([ability, model, mark.measured, mark.paper, numbers or "no results yet"])
    return "## Numbers\n\n" + markdown(["ability", "model", "measured", "paper", "thresholds in numbers"], rows)
