"""Writes the report of a plan: figures, table.csv, table.md, verdict.json and README.md.

``render`` is pure apart from the files that it writes: no clock, no search for runs. Runs without results are named,
and the verdict stays INCOMPLETE until they are finished. table.csv and the figures depend on the plan and the measured
values alone, so the same experiment gives the same bytes; ``TIMES``, which differ from run to run, are not in
table.csv.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_memory.plan.claims import check_expect
from lit_memory.report.figures import OPTIONAL, draw
from lit_memory.report.labels import count
from lit_memory.report.page import page
from lit_memory.report.results import Report, ReportPlan, Results
from lit_memory.report.tables import csv_table, main_table
from lit_memory.report.verdict import INCOMPLETE, NOT_REPRODUCED, REPRODUCED, Claim, evaluate
from lit_memory.util import files


def render(plan: ReportPlan, frame: Any, out_dir: str | Path) -> Report:
    """Write the report of ``plan`` into ``out_dir``.

    frame: long DataFrame of FINISHED runs with columns arm, seed, x, metric, value; it may be empty, and rows outside
        the plan are ignored.

    All files are staged first, then renamed, README.md last: none is ever half-written. state.* and time.* of an
    earlier report are removed if the plan has none.
    """
    check_expect(plan.expect, plan.arms, plan.x_values)
    results = Results.from_frame(plan, frame)
    claims = [evaluate(line, results.values, plan.x_values, len(plan.seeds)) for line in plan.expect]
    missing = results.missing()
    report = Report(_verdict(claims, missing), claims, missing, main_table(results), _scope(plan))
    texts = {
        "table.csv": csv_table(results),
        "table.md": report.table,
        "verdict.json": _verdict_json(plan, report),
        "README.md": page(plan, report, results),
    }
    contents = draw(results, _status(plan, report)) | {name: text.encode() for name, text in texts.items()}
    unused = [name for name in OPTIONAL if name not in contents]
    return replace(report, paths=files.write_all(Path(out_dir), contents, without=unused))


def _verdict(claims: Sequence[Claim], missing: Sequence[str]) -> str:
    """REPRODUCED if every claim holds; INCOMPLETE without claims, or while a result is missing."""
    verdicts = {claim.verdict for claim in claims}
    if missing or not claims or INCOMPLETE in verdicts:
        return INCOMPLETE
    return NOT_REPRODUCED if NOT_REPRODUCED in verdicts else REPRODUCED


def _scope(plan: ReportPlan) -> str:
    """The limit of a verdict whose test does not reach as far as the paper's; "" if it does."""
    tested = max(plan.x_values)
    if plan.paper_x is None or plan.paper_x <= tested:
        return ""
    return f", tested up to {count(tested)} (paper: {count(plan.paper_x)})"


def _status(plan: ReportPlan, report: Report) -> str:
    """The line below the title of a figure."""
    scale = f"scale {plan.scale}, modified" if plan.modified else f"scale {plan.scale}"
    seeds = f"mean ± std of {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "1 seed"
    return " · ".join([scale, seeds, *[INCOMPLETE] * (report.verdict == INCOMPLETE)])


def _verdict_json(plan: ReportPlan, report: Report) -> str:
    """verdict.json, read by the list of all experiments; its seconds also serve to estimate the time of the next
    run."""
    content = {name: getattr(plan, name) for name in ("experiment", "scale", "modified", "paper", "arms", "seeds")}
    content |= {"verdict": report.verdict, "missing": report.missing}
    content["claims"] = [vars(claim) | {"sides": _finite(claim.sides)} for claim in report.claims]
    content["runs"] = [{name: run.get(name) for name in ("arm", "seed", "steps", "seconds")} for run in plan.runs]
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(values: Sequence[float]) -> list[float | None]:
    """Numbers that JSON can hold: None for NaN and infinity."""
    return [value if math.isfinite(value) else None for value in values]
