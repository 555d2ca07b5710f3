"""Tables in Markdown. Standard library only."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, padded so that it reads as plain text too."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "".join(f"| {line} |\n" for line in lines)


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a text that ``markdown`` wrote, each with its header as first row."""
    blocks = [list(lines) for found, lines in groupby(text.splitlines(), lambda line: line.startswith("| ")) if found]
    return [[_cells(lines[0]), *map(_cells, lines[2:])] for lines in blocks if len(lines) > 1]


def _cells(line: str) -> list[str]:
    """The cells of one line of a table."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
