"""What a paper prints, as ``paper_values/*.csv`` have it, and how a report shows it: laid out as the measured values
where that can be."""

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path

from lit_memory.report.markdown import markdown
from lit_memory.util.checks import FieldError

PAPER_VALUES = Path(__file__).parents[1] / "paper_values"


def paper_rows(values: str, starts: Sequence[str] = ()) -> list[dict[str, str]]:
    """The rows of a file of the paper's numbers, of those alone whose table and condition begin with one of ``starts``
    if there are any; none of no file. Raises ValueError for a file or a row that does not exist."""
    if not values:
        if starts:
            raise ValueError("paper_rows without paper_values: name the file")
        return []
    names = sorted(p.stem for p in PAPER_VALUES.glob("*.csv"))
    if values not in names:  # not is_file(): a name with .. would lead elsewhere
        raise FieldError("paper_values", values, f"expected one of {', '.join(names)}", f"{values:.80}")
    path = PAPER_VALUES / f"{values}.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row | {"id": f"{row['table']}: {row['condition']}"} for row in csv.DictReader(file)]
    for start in starts:
        if not any(row["id"].startswith(start) for row in rows):
            raise ValueError(
                f"paper_rows: no row of {path.name} starts with {start!r}; tables: {'; '.join(dict.fromkeys(r['table'] for r in rows))}"
            )
    return [row for row in rows if row["id"].startswith(tuple(starts) or "")]


def section(rows: Sequence[dict[str, str]]) -> str:
    """The paper's own values, laid out as ours where they can be; what it prints as an image is named, not guessed."""
    images = dict.fromkeys(f"- {row['table']}: {row['note']}." for row in rows if row["note"].startswith(IMAGE))
    found = [row for row in rows if not row["note"].startswith(IMAGE)]
    tables = {
        name: [row for row in found if row["table"] == name] for name in dict.fromkeys(row["table"] for row in found)
    }
    grids = {name: _grid(own) for name, own in tables.items()}
    rest = [
        [row["table"], row["arm"], row["condition"], row["metric"], _value(row)]
        for row in found
        if not grids[row["table"]]
    ]
    notes = [f"- {_noted(found, note)}{note}." for note in dict.fromkeys(row["note"] for row in found) if note]
    blocks = [
        *filter(None, grids.values()),
        markdown(["where", "model", "condition", "metric", "value"], rest) if rest else "",
        "\n".join([*notes, *images]),
    ]
    return (
        "\n\n".join(block.strip() for block in blocks if block)
        or "No values of the paper are attached to this experiment."
    )


IMAGE = "printed only as an image"
"""How the note of a row begins whose values nobody can read."""


def _value(row: dict[str, str]) -> str:
    return row["value"] + (f" ± {row['std']}" if row["std"] else "") or "–"


def _grid(rows: list[dict[str, str]]) -> str:
    """One table of the paper with a model per row and a condition per column; "" if models do not share two conditions,
    or one has two values of one."""
    metrics = dict.fromkeys(row["metric"] for row in rows)
    cells = {
        (row["arm"], ", ".join([row["condition"], *[row["metric"]] * (len(metrics) > 1)])): _value(row) for row in rows
    }
    arms, columns = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    if len(cells) < len(rows) or sum(sum((arm, column) in cells for arm in arms) > 1 for column in columns) < 2:
        return ""
    same = itertools.takewhile(
        lambda words: len(set(words)) == 1, zip(*(column.split()[:-1] for column in columns), strict=False)
    )
    common = " ".join(words[0] for words in same)
    caption = ", ".join([rows[0]["table"], *list(metrics) * (len(metrics) == 1)]) + (
        f"; columns: {common.rstrip(';,')}" if common else ""
    )
    shown = [[arm, *(cells.get((arm, column), "–") for column in columns)] for arm in arms]
    return f"{caption}\n\n{markdown(['model', *(column.removeprefix(common).strip() for column in columns)], shown)}"


def _noted(rows: list[dict[str, str]], note: str) -> str:
    """What a note is about, in as few words as tell it from the other rows; "" if it is about all."""
    own, others = ([row for row in rows if (row["note"] == note) is same] for same in (True, False))
    for names in (["table"], ["arm"], ["condition"], ["arm", "condition"]):
        places = dict.fromkeys(" ".join(row[name] for name in names) for row in own)
        if not places.keys() & {" ".join(row[name] for name in names) for row in others}:
            break
    return f"{', '.join(places)}: " if others else ""
