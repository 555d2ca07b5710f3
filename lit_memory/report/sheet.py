"""sheet.md: the reproducibility sheet of a report, in the order of a report for the ML Reproducibility Challenge.

What only people can tell (what was easy, what was difficult, what the authors answered) is left to them.
"""

import hashlib
from collections.abc import Mapping

from lit_memory.plan.claims import KINDS
from lit_memory.report.budget import budget_table, unequal
from lit_memory.report.grid import grid_table
from lit_memory.report.labels import count, short
from lit_memory.report.markdown import markdown
from lit_memory.report.page import arm_table, deviation_list, join_blocks, line_tables, origin_list, paper_claim, title
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Report

HASHED = ("table.csv", "scores.npz", "grid.csv")
"""The files that the verdict rests on."""
UNHEARD = """Left to the people who did it: what was easy, what was difficult, communication with the original
authors."""


def sheet(plan: ReportPlan, report: Report, contents: Mapping[str, bytes]) -> str:
    """The sheet. contents: the files of the report."""
    blocks = [
        f"# Reproducibility sheet: {title(plan)}",
        "## Scope of reproducibility",
        paper_claim(plan.paper),
        *_lines(plan),
        f"Evidence: {plan.setting}{report.scope}.",
        "## Methodology\n\n### Models",
        _models(plan),
        "### Data",
        _data(plan),
        "### Hyperparameters\n\nWhat the experiment's file says of single arms, where they differ; it has the rest.",
        arm_table(plan),
        grid_table(plan),
        "Differences from the paper's set-up:",
        deviation_list(plan),
        "### Set-up and code",
        origin_list(plan),
        "### Computational requirements",
        unequal(plan),
        budget_table(plan),
        f"## Results\n\n**{report.verdict}**. {report.reason}",
        line_tables(report),
        "The files that this rests on:",
        _files(contents),
        f"## Discussion\n\n{UNHEARD}",
    ]
    return join_blocks(blocks)


def _lines(plan: ReportPlan) -> list[str]:
    """The lines of every kind, with what they are."""
    plural = {"claim": "Claims", "requirement": "Requirements", "property": "Verified properties"}
    return [
        f"{plural[kind]}:\n\n" + "\n".join(f"- `{line}`" for line in plan.lines[section])
        for section, kind in KINDS.items()
        if plan.lines[section]
    ]


def _models(plan: ReportPlan) -> str:
    sizes = {arm: plan.sizes(arm) for arm in plan.arms}
    rows = [[plan.shown(arm), count(s.get("parameters")), count(s.get("state_floats"))] for arm, s in sizes.items()]
    return markdown(["arm", "parameters", "state floats"], rows)


def _data(plan: ReportPlan) -> str:
    """What the test varies, and how much of it there is."""
    tested = f"{plan.x_label}: {', '.join(map(short, plan.x_values))}"
    trained = "" if plan.train_x is None else f" (training: up to {short(plan.train_x)})"
    sizes = {tuple(found) for arm in plan.arms if (found := plan.samples(arm))}
    samples = " or ".join(sorted({", ".join(map(count, dict.fromkeys(found))) for found in sizes})) or "unknown"
    same = ", the same for all arms and seeds" if len(sizes) == 1 else ""
    return f"- {tested}{trained}\n- test contexts per x and seed{same}: {samples}"


def _files(contents: Mapping[str, bytes]) -> str:
    none = "none: the scores of single samples were not kept"
    rows = [
        [name, f"`{hashlib.sha256(contents[name]).hexdigest()}`" if name in contents else none]
        for name in HASHED
        if name in contents or name != "grid.csv"
    ]
    return markdown(["file", "SHA-256"], rows)
