"""The paper's own values, as ``paper_values/*.csv`` have them. Standard library only."""

import csv
from collections.abc import Sequence
from pathlib import Path

from lit_memory.util.checks import FieldError

PAPER_VALUES = Path(__file__).parents[1] / "paper_values"


def paper_rows(values: str, starts: Sequence[str] = ()) -> list[dict[str, str]]:
    """The rows of a file of the paper's values; [] without a file.

    values: name of the file, without .csv. starts: prefixes of "table: condition" that select rows; none selects all.
    Raises ValueError for a file that does not exist or a prefix that no row has.
    """
    if not values:
        if starts:
            raise ValueError("paper_rows without paper_values: name the file")
        return []
    names = sorted(p.stem for p in PAPER_VALUES.glob("*.csv"))
    if values not in names:  # not is_file(): a name with .. would lead elsewhere
        raise FieldError("paper_values", values, f"expected one of {', '.join(names)}", f"{values:.80}")
    path = PAPER_VALUES / f"{values}.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row | {"id": f"{row['table']}: {row['condition']}, {row['metric']}"} for row in csv.DictReader(file)]
    for start in starts:
        if not any(row["id"].startswith(start) for row in rows):
            tables = "; ".join(dict.fromkeys(row["table"] for row in rows))
            raise ValueError(f"paper_rows: no row of {path.name} starts with {start!r}; tables: {tables}")
    return [row for row in rows if row["id"].startswith(tuple(starts) or "")]
