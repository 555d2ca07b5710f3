"""A table in Markdown."""

from collections.abc import Sequence
from typing import Any


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, padded so that it reads as plain text too."""
    lines = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return (
        "\n".join(
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )
        + "\n"
    )
