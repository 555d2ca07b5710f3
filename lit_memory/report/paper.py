"""The paper's own values in a report: in the layout of the measured values where that can be."""

import itertools
from collections.abc import Sequence

from lit_memory.report.markdown import markdown

IMAGE = "printed only as an image"
"""Beginning of the note of a row whose values cannot be read."""


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
