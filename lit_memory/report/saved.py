"""The files from which a report can be drawn again: report.json, table.csv and scores.npz.

report.json: the plan, and the values "arm/metric/x/seed" that table.csv rounds though the verdict rests on them, or
leaves out: times, which no two runs share. scores.npz: one array "arm/metric/x/seed" of the scores of the test samples.
curves.csv: the validations along the training, memory.npz: arrays "view/name/arm/seed" of what memories do, where the
report shows them.
"""

import csv
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.sections import TIMES, ReportConfig
from lit_memory.report.labels import rounded
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Cell, Results
from lit_memory.report.scores import NAME as SCORES
from lit_memory.report.scores import pack, unpack
from lit_memory.util.checks import first_line, nearest
from lit_memory.util.provenance import PROJECT

PLAN, TABLE, VALIDATIONS, MEMORY = "report.json", "table.csv", "curves.csv", "memory.npz"
Seen = tuple[str, str, str, int]
"""(view, name, arm, seed) of an array of memory.npz."""
DAMAGED = (ValueError, KeyError, TypeError, EOFError, IndexError, zipfile.BadZipFile, zlib.error, csv.Error)
"""What a file that is not as it was written makes its readers raise; text that is not UTF-8 is a ValueError."""


def plan_json(results: Results) -> str:
    """report.json: the plan, with the values that table.csv does not have exactly."""
    cells = sorted(results.cells.items())
    exact = [(cell, value) for cell, value in cells if cell[1] not in TIMES and rounded(value) != value]
    times = [(cell, value) for cell, value in cells if cell[1] in TIMES]
    values = {_name(cell): value for cell, value in exact + times if math.isfinite(value)}
    content = asdict(results.plan) | {"values": values}
    for name in ("unchecked", "stops", "minimized"):
        if not content[name]:
            del content[name]
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def scores_npz(scores: Mapping[Cell, Any]) -> bytes:
    """scores.npz."""
    return pack({_name(cell): found for cell, found in scores.items()})


def memory_npz(memory: Mapping[Seen, Any]) -> bytes:
    """memory.npz."""
    return pack({"/".join(map(str, seen)): found for seen, found in memory.items()})


def validations_csv(validations: Mapping[Cell, float]) -> str:
    """curves.csv."""
    rows = [
        (arm, seed, f"{step:.10g}", metric, repr(v)) for (arm, metric, step, seed), v in sorted(validations.items())
    ]
    return "".join(",".join(map(str, row)) + "\n" for row in [("arm", "seed", "step", "metric", "value"), *rows])


def load(report: str | Path) -> Results:
    """What a report was made from: its plan, the measured values and the scores of the samples.

    report: a folder, or the name of a report in reports/ of this folder or of the project ("armt_rewrite", or
        "armt_rewrite/gpu" for another scale).

    Raises ConfigError, in one line with the file, for a report that is not there or is damaged.
    """
    folder = _folder(report)
    if not (folder / PLAN).is_file():
        expected = "expected a report that has one; run.py EXPERIMENT --report writes it anew"
        raise ConfigError(str(folder / PLAN), "", f"no such file; {expected}")
    plan, exact = _read(folder / PLAN, _plan)
    cells = _read(folder / TABLE, _cells) | exact
    scores = _read(folder / SCORES, _scores) if (folder / SCORES).is_file() else {}
    validations = _read(folder / VALIDATIONS, _validations) if (folder / VALIDATIONS).is_file() else {}
    memory = _read(folder / MEMORY, _memory) if (folder / MEMORY).is_file() else {}
    try:
        return replace(Results.of(plan, cells, scores, validations), memory=memory)
    except ValueError as error:
        raise ConfigError(str(folder / SCORES), "", first_line(error)) from None


def read_table(path: Path) -> dict[Cell, float]:
    """The values of a table.csv. Raises ConfigError."""
    return _read(path, _cells)


def _folder(report: str | Path) -> Path:
    """The folder of a report. Raises ConfigError."""
    homes = (Path("reports"), PROJECT / "reports")
    found = [path for path in (Path(report), *(home / report for home in homes)) if path.is_dir()]
    if not found:
        names = [path.name for home in homes if home.is_dir() for path in sorted(home.iterdir()) if path.is_dir()]
        raise ConfigError(str(report), "", f"no such report; {nearest(str(report), names)}")
    return next((path for path in found if (path / PLAN).is_file()), found[-1])


def _read(path: Path, parse: Any) -> Any:
    """What ``parse`` makes of a file. Raises ConfigError."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from None
    except DAMAGED as error:
        reason = f"damaged ({first_line(error)})"
        raise ConfigError(str(path), "", f"{reason}; expected the file as a report wrote it") from None


def _plan(content: bytes) -> tuple[ReportPlan, dict[Cell, float]]:
    """The plan and the values of report.json."""
    plan = json.loads(content)
    values = {_cell(name): float(value) for name, value in plan.pop("values").items()}
    return ReportPlan(**plan | {"config": ReportConfig(**plan["config"])}), values


def _cells(content: bytes) -> dict[Cell, float]:
    """The values of table.csv."""
    cells = {}
    for row in csv.DictReader(content.decode().splitlines(), strict=True):
        for name, value in row.items():
            if name.startswith("seed_") and value != "":
                cells[row["arm"], row["metric"], float(row["x"]), int(name.removeprefix("seed_"))] = float(value)
    return cells


def _validations(content: bytes) -> dict[Cell, float]:
    """The values of curves.csv."""
    rows = csv.DictReader(content.decode().splitlines(), strict=True)
    return {(row["arm"], row["metric"], float(row["step"]), int(row["seed"])): float(row["value"]) for row in rows}


def _scores(content: bytes) -> dict[Cell, Any]:
    """The arrays of scores.npz."""
    return {_cell(name): found for name, found in unpack(content).items()}


def _memory(content: bytes) -> dict[Seen, Any]:
    """The arrays of memory.npz."""
    named = {tuple(name.split("/")): found for name, found in unpack(content).items()}
    return {(view, name, arm, int(seed)): found for (view, name, arm, seed), found in named.items()}


def _name(cell: Cell) -> str:
    arm, metric, x, seed = cell
    return f"{arm}/{metric}/{x:.17g}/{seed}"


def _cell(name: str) -> Cell:
    arm, metric, x, seed = name.split("/")
    return arm, metric, float(x), int(seed)
