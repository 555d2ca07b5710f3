"""Writes the report of a plan: figures, tables, verdict.json, README.md, and what it can be drawn from again.

``render`` is pure apart from the files that it writes: no clock, no search for runs. Runs without results are named,
and the verdict stays INCOMPLETE until they are finished. table.csv and the figures depend on the plan and the measured
values alone, so the same experiment gives the same bytes; ``TIMES``, which differ from run to run, are in report.json.
What ``saved.load`` reads from a report's folder gives its verdict.json byte for byte.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_memory.plan.claims import check_lines
from lit_memory.report.figures import OPTIONAL, draw
from lit_memory.report.grid import FILE as GRID
from lit_memory.report.grid import grid_csv, grid_table
from lit_memory.report.labels import count
from lit_memory.report.latex import latex_table
from lit_memory.report.page import page
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Cell, Report, Results
from lit_memory.report.saved import (
    MEMORY,
    PLAN,
    SCORES,
    VALIDATIONS,
    memory_npz,
    plan_json,
    scores_npz,
    validations_csv,
)
from lit_memory.report.sheet import sheet
from lit_memory.report.tables import csv_table, main_table, ranking
from lit_memory.report.verdict import COMPARISON, INCOMPLETE, NOT_CHECKED, conclude, exploratory, judge
from lit_memory.util import files


def render(
    plan: ReportPlan,
    frame: Any,
    out_dir: str | Path,
    scores: Mapping[Cell, Any] | None = None,
    validations: Mapping[Cell, float] | None = None,
) -> Report:
    """Write the report of ``plan`` into ``out_dir``.

    frame: long DataFrame of FINISHED runs with columns arm, seed, x, metric, value; it may be empty, and rows outside
        the plan are ignored.
    scores: (arm, metric, x, seed) -> the scores of the test samples, of which the value is the mean; where they are
        not known, intervals do without them, see ``statistics``.
    validations: (arm, metric, step, seed) -> the metric of ``report.curves`` along the training.
    """
    return write(replace(Results.from_frame(plan, frame, scores), validations=validations or {}), out_dir)


def write(results: Results, out_dir: str | Path, table: bytes | None = None) -> Report:
    """Write the report of some results into ``out_dir``.

    table: table.csv as it is, of a report that is drawn again: it rounds, so its means cannot be computed again.

    All files are staged first, then renamed, README.md last: none is ever half-written. state.*, time.*, curves.*,
    grid.*, memory* and scores.npz of an earlier report are removed if this one has none.
    """
    plan, missing = results.plan, results.missing()
    for section, lines in plan.lines.items():
        check_lines(lines, plan.arms, plan.x_values, section=section, stops=plan.stops)
    claims = judge(plan.lines, results.evidence)
    verdict, reason = conclude(claims, missing, plan.unchecked)
    if verdict == COMPARISON:
        reason = ranking(results)
    scope, fresh = "", ""
    if verdict not in (INCOMPLETE, NOT_CHECKED):
        scope, fresh = exploratory(plan.experiment, len(plan.seeds)), by_fresh_seeds(results)
    if fresh not in ("", verdict):
        scope += f", {fresh} by the seeds that did not choose"
    table_md = "\n".join(filter(None, [main_table(results), grid_table(plan)]))
    report = Report(verdict, claims, missing, table_md, scope + _scope(plan), reason, fresh)
    texts = {
        "table.csv": csv_table(results),
        "table.md": report.table,
        PLAN: plan_json(results),
        "verdict.json": _verdict_json(plan, report),
        "table.tex": latex_table(results),
    }
    contents = draw(results) | ({SCORES: scores_npz(results.scores)} if results.scores else {})
    texts |= {VALIDATIONS: validations_csv(results.validations)} if results.validations else {}
    contents |= {MEMORY: memory_npz(results.memory)} if results.memory else {}
    texts |= {GRID: grid_csv(plan)} if plan.grid else {}
    contents |= {name: text.encode() for name, text in texts.items()} | ({"table.csv": table} if table else {})
    contents["sheet.md"] = sheet(plan, report, contents).encode()
    contents["README.md"] = page(plan, report, results).encode()
    unused = [name for name in (*OPTIONAL, SCORES, VALIDATIONS, GRID, MEMORY) if name not in contents]
    return replace(report, paths=files.write_all(Path(out_dir), contents, without=unused))


def by_fresh_seeds(results: Results) -> str:
    """The verdict by the seeds that chose no point of a grid: that of one that did is taken where its run was seen to
    do well in validation. "" where all or none choose, or where there are no lines."""
    plan = results.plan
    if not plan.fresh_seeds or not any(plan.lines.values()):
        return ""
    alone = replace(results, plan=replace(plan, seeds=plan.fresh_seeds))
    return conclude(judge(plan.lines, alone.evidence), [])[0]


def _scope(plan: ReportPlan) -> str:
    """The limit of a verdict whose test does not reach as far as the paper's; "" if it does."""
    tested = max(plan.x_values)
    if plan.paper_x is None or plan.paper_x <= tested:
        return ""
    return f", tested up to {count(tested)} (paper: {count(plan.paper_x)})"


def _verdict_json(plan: ReportPlan, report: Report) -> str:
    """verdict.json, read by the list of all experiments; its seconds also serve to estimate the time of the next
    run."""
    content = {name: getattr(plan, name) for name in ("experiment", "scale", "modified", "paper", "arms", "seeds")}
    content |= {"title": plan.title, "evidence": plan.evidence, "verdict": report.verdict, "reason": report.reason}
    content |= {"exploratory": "exploratory" in report.scope, "scope": report.scope.removeprefix(", ")}
    content |= {"missing": report.missing, "claims": [_plain(vars(claim)) for claim in report.claims]}
    content["runs"] = [{name: run.get(name) for name in ("arm", "seed", "steps", "seconds")} for run in plan.runs]
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """What JSON can hold: None for NaN and infinity, and nine digits, as the last ones depend on the machine."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value
