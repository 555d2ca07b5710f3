"""Reports from before report.json, read back from their pages: table.csv, verdict.json, table.md and README.md.

What those do not say stays unknown: the x values of the training, times, and the scores of samples. How the figure was
drawn, and the words for title and arms, are in the project's experiment of that name. ``saved.load`` reads newer
reports.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_memory.plan.reading import extended
from lit_memory.plan.sections import ReportConfig
from lit_memory.report.markdown import tables
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Results
from lit_memory.report.saved import TABLE, read_table
from lit_memory.util.provenance import EXPERIMENTS

CAPTION = re.compile(r"^(?P<y>.+), mean ± standard deviation over seeds; columns: (?P<x>.+)$", re.MULTILINE)
"""The line above table.md."""
MODEL = re.compile(r"\bmodel\.name: (\w+)")
STATE = re.compile(r"(?P<floats>[\d,]+)( \+ (?P<growth>[\d,]+) a (?P<unit>\w+))?( \((?P<whole>[\d,]+) at .+\))?$")
"""A cell of the column "state floats": ``256 + 512 a segment (256,256 at 500)``."""


def read_old(folder: Path, verdict: Mapping[str, Any]) -> Results:
    """The results of an old report. verdict: its verdict.json. Raises ConfigError, OSError or
    one of ``saved.DAMAGED``."""
    page, table = ((folder / name).read_text(encoding="utf-8") for name in ("README.md", "table.md"))
    cells = read_table(folder / TABLE)
    caption = CAPTION.search(table)
    if not cells or caption is None:
        raise ValueError("no values or no caption")
    tree = _file(verdict["experiment"])
    config = _config(tree, list(dict.fromkeys(metric for _, metric, _, _ in cells)))
    config.x_label, config.y_label = caption["x"], caption["y"]
    settings = next((rows for header, *rows in tables(page) if header == ["arm", "settings"]), [])
    sizes = _sizes(tables(table)[0])
    runs = [run | sizes.get(run["arm"], {}) for run in verdict["runs"]]
    names = ("experiment", "scale", "paper", "arms", "seeds", "modified")
    plan = ReportPlan(
        **{name: verdict[name] for name in names},
        x_values=list(dict.fromkeys(x for _, _, x, _ in cells)),
        config=config,
        expect=[],
        title=tree.get("title", ""),
        labels=tree.get("labels", {}),
        settings=dict(settings),
        runs=runs,
    )
    return with_models(Results(plan, cells))


def with_models(results: Results) -> Results:
    """With the architectures of the arms: of reports that do not say them, the names of the models in the settings."""
    plan = results.plan
    if plan.models:
        return results
    models = {arm: match[1] for arm, text in plan.settings.items() if (match := MODEL.search(text))}
    return replace(results, plan=replace(plan, models=models))


def _file(experiment: str) -> dict[str, Any]:
    """The project's experiment of that name; {} without one."""
    path = EXPERIMENTS / f"{experiment}.yaml"
    return extended(path) if path.is_file() else {}


def _config(tree: Mapping[str, Any], metrics: list[str]) -> ReportConfig:
    """How the figure was drawn, as far as the experiment still has the metric."""
    section = tree.get("report", {})
    return ReportConfig(**section) if section.get("y") in metrics else ReportConfig(y=metrics[0])


def _sizes(table: list[list[str]]) -> dict[str, dict[str, Any]]:
    """Arm -> the sizes of its model, as a run has them."""
    header, *rows = table
    found = {}
    for row in rows:
        state = STATE.match(row[header.index("state floats")])
        if state is None:  # a dash: not known
            continue
        floats, growth, whole = (_number(state[name]) for name in ("floats", "growth", "whole"))
        sizes: dict[str, Any] = {"state_floats": floats}
        if growth:
            sizes |= {"state_growth": growth, "growth_unit": state["unit"]}
            sizes |= {"segments": (whole - floats) / growth} if whole is not None and floats is not None else {}
        found[row[0]] = sizes
    return found


def _number(text: str | None) -> int | None:
    return None if text is None else int(text.replace(",", ""))
