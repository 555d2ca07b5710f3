"""The paper's own values in a report: in the layout of the measured values where that can be."""

import itertools
import re
from collections.abc import Sequence

from lit_memory.plan.paper import paper_rows
from lit_memory.report.labels import is_share
from lit_memory.report.markdown import markdown
from lit_memory.report.plan import ReportPlan

IMAGE = "printed only as an image"
"""Beginning of the note of a row whose values cannot be read."""


LENGTH = re.compile(r"(?:^|[ ;])(\d+(?:\.\d+)?)([kKM])$")
"""The length with which a condition ends: "QA1 single supporting fact; 64k"."""
UNITS = {"k": 1e3, "K": 2**10, "M": 1e6}


def points(plan: ReportPlan) -> dict[str, list[tuple[float, float]]]:
    """Arm -> the paper's points (x, y) for the figure of a plan, within the tested values of x and by x. Arms without
    any are left out."""
    config, low, high = plan.config, min(plan.x_values), max(plan.x_values)
    rows, found = paper_rows(config.paper_values, config.paper_rows), {}
    for arm, start in config.paper_curves.items():
        own = {}
        for row in rows:
            x, y = _place(row["condition"], plan), _measured(row, config.y)
            if f"{row['arm']}: {row['condition']}".startswith(start) and x is not None and y is not None:
                own[x] = y
        if own := {x: y for x, y in own.items() if low <= x <= high}:
            found[arm] = sorted(own.items())
    return found


def _place(condition: str, plan: ReportPlan) -> float | None:
    """The x of a condition; None for one without. A test with a single x asks all that conditions without one ask."""
    if length := LENGTH.search(condition):
        return float(length[1]) * UNITS[length[2]] / plan.config.paper_unit
    return float(plan.x_values[0]) if len(plan.x_values) == 1 else None


def _measured(row: dict[str, str], metric: str) -> float | None:
    """The value of a row in the unit of a metric; None if it is of another metric, or no number."""
    if not re.fullmatch(r"\d+(\.\d+)?", row["value"]):
        return None
    if is_share(metric) and row["metric"].split(" (")[0].endswith("%"):
        return round(float(row["value"]) / 100, 9)
    return float(row["value"]) if row["metric"].startswith(metric) else None


def section(rows: Sequence[dict[str, str]]) -> str:
    """The paper's values in Markdown: tables, a list of single values, notes, and the tables that are only images."""
    images = dict.fromkeys(f"- {row['table']}: {row['note']}." for row in rows if row["note"].startswith(IMAGE))
    found = [row for row in rows if not row["note"].startswith(IMAGE)]
    tables: dict[str, list[dict[str, str]]] = {}
    for row in found:
        tables.setdefault(row["table"], []).append(row)
    grids = {name: _grid(own) for name, own in tables.items()}
    single = [row for row in found if not grids[row["table"]]]
    rest = [[row["table"], row["arm"], row["condition"], row["metric"], _value(row)] for row in single]
    notes = [f"- {_subject(found, note)}{note}." for note in dict.fromkeys(row["note"] for row in found) if note]
    blocks = [
        *grids.values(),
        markdown(["where", "model", "condition", "metric", "value"], rest) if rest else "",
        "\n".join([*notes, *images]),
    ]
    shown = "\n\n".join(block.strip() for block in blocks if block)
    return shown or "No values of the paper are attached to this experiment."


def _value(row: dict[str, str]) -> str:
    return row["value"] + (f" ± {row['std']}" if row["std"] else "") or "–"


def _grid(rows: list[dict[str, str]]) -> str:
    """One table of the paper with a model per row and a condition per column.

    "" if the models share fewer than two conditions, or one of them has two values for one condition.
    """
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    several = len(metrics) > 1
    cells = {}
    for row in rows:
        column = f"{row['condition']}, {row['metric']}" if several else row["condition"]
        cells[row["arm"], column] = _value(row)
    arms = list(dict.fromkeys(arm for arm, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    shared = [column for column in columns if sum((arm, column) in cells for arm in arms) > 1]
    if len(cells) < len(rows) or len(shared) < 2:
        return ""
    common = _common_words(columns)
    caption = rows[0]["table"] if several else f"{rows[0]['table']}, {metrics[0]}"
    if common:
        caption += f"; columns: {common.rstrip(';,')}"
    head = ["model", *(column.removeprefix(common).strip() for column in columns)]
    shown = [[arm, *(cells.get((arm, column), "–") for column in columns)] for arm in arms]
    return f"{caption}\n\n{markdown(head, shown)}"


def _common_words(columns: Sequence[str]) -> str:
    """The first words that all columns share, without the last word of any."""
    words = zip(*(column.split()[:-1] for column in columns), strict=False)
    return " ".join(same[0] for same in itertools.takewhile(lambda same: len(set(same)) == 1, words))


def _subject(rows: list[dict[str, str]], note: str) -> str:
    """The subject of a note, in the fewest words that tell its rows from the others; "" if it is about all rows."""
    own = [row for row in rows if row["note"] == note]
    others = [row for row in rows if row["note"] != note]
    if not others:
        return ""
    subjects: dict[str, None] = {}
    for names in (["table"], ["arm"], ["condition"], ["arm", "condition"]):
        subjects = dict.fromkeys(" ".join(row[name] for name in names) for row in own)
        if not subjects.keys() & {" ".join(row[name] for name in names) for row in others}:
            break
    return f"{', '.join(subjects)}: "
