"""Distributed sets of BABILong: samples that somebody else has put together, for a test beside that on our own.

Source: arXiv 2406.10149; RMT-team/babilong (100 samples of a task and length), RMT-team/babilong-1k-samples and
        whatever has their columns. On the hub a configuration is a length by name ("0k", "64k", "1M") and a split is a
        task ("qa1").
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lit_memory.util.checks import FieldError

COLUMNS = ("input", "question", "target")
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Suffix of a file -> what reads it."""


def part_name(length: int) -> str:
    """What the samples of a length are called: 0k, 64k, 1M. Raises ValueError for a length that has no such name."""
    unit, letter = (10**6, "M") if length >= 10**6 else (1000, "k")
    if length < 0 or length % unit:
        raise FieldError(
            "eval_length",
            length,
            "expected thousands, or millions from 1000000 on, as the parts of a set are named (0k, 64k, 1M)",
        )
    return f"{length // unit}{letter}"


def check_set(source: str, lengths: Sequence[int]) -> None:
    """Raise ValueError for a set that is neither here nor named as one of the hub, and for lengths that do not fit
    it."""
    if bool(source) != bool(lengths):
        raise FieldError(
            "test_eval_length",
            list(lengths),
            "expected lengths where eval_set is set, [0, 1000] for 0k and 1k, and none elsewhere",
        )
    path, whole = Path(source), source and is_whole(Path(source))
    if (
        source
        and not path.exists()
        and (path.suffix in READERS or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source, re.ASCII))
    ):
        raise FieldError(
            "eval_set",
            source,
            "no such file or folder; expected one, or a name on the Hugging Face hub, RMT-team/babilong for example",
        )
    if path.is_file() and path.suffix not in READERS:
        raise FieldError(
            "eval_set", source, f"expected {', '.join(READERS)}, a folder, or a name on the Hugging Face hub"
        )
    if whole and len(lengths) > 1:
        raise FieldError(
            "test_eval_length",
            list(lengths),
            f"expected one length, as {source} is one; a folder has a part for each (1k/qa1.jsonl)",
        )


def is_whole(path: Path) -> bool:
    """Whether a path is a single list of samples: a file, or what ``Dataset.save_to_disk`` wrote."""
    return path.is_file() or (path / "state.json").is_file()


@lru_cache(maxsize=16)
def load_set(source: str, length: int, task: str, revision: str | None, cache: Path) -> tuple[Any, str]:
    """The rows of a task at a length, a memory-mapped ``datasets.Dataset``, and where they come from, for messages.

    source: a name on the hub, at ``revision``; a folder with a part for every length, ``64k/qa1.jsonl``, ``.json``,
        ``.parquet`` or the folder ``64k`` that ``DatasetDict.save_to_disk`` wrote; or one such part, whatever its name.
    cache: folder of what ``datasets`` prepares.
    Raises FileNotFoundError for a set out of reach, and ValueError for a file that is no set, with the reason in one
    line.
    """
    name, whole = part_name(length), Path(source)
    part = (
        whole
        if is_whole(whole)
        else next((p for s in ("", *READERS) if (p := whole / name / f"{task}{s}").exists()), None)
    )
    if part is None and whole.is_dir():
        raise FileNotFoundError(
            f"{source}: no {name}/{task}; expected {name}/{task}.jsonl, .json, .parquet or a folder of save_to_disk"
        )
    place = f"{source} {name} {task}" if part is None else str(part)
    try:
        rows = _read(source, name, task, revision, part, str(cache))
    except (
        Exception
    ) as error:  # no network, no such part, no permission, a broken file: the library has a class for each
        told = f"{type(error).__name__}: {str(error.__cause__ or error).partition(chr(10))[0]:.200}"
        if part is None:
            raise FileNotFoundError(
                f"{place}: not in reach on the Hugging Face hub ({told}); check name and network, or give a folder"
            ) from error
        raise ValueError(f"{place}: cannot be read ({told}); expected samples with {', '.join(COLUMNS)}") from error
    for column in COLUMNS:
        if column not in rows.column_names:
            raise ValueError(
                f"{place}: no column {column!r}; expected {', '.join(COLUMNS)}, got {', '.join(rows.column_names)}"
            )
    return rows, place


def _read(source: str, name: str, task: str, revision: str | None, part: Path | None, cache: str) -> Any:
    from datasets import load_dataset, load_from_disk

    if part is None:
        return load_dataset(source, name, split=task, revision=revision, cache_dir=cache)
    if part.is_dir():
        return load_from_disk(str(part))
    return load_dataset(READERS[part.suffix], data_files=str(part), split="train", cache_dir=cache)


def sample_row(rows: Any, i: int, place: str) -> dict[str, str]:
    """Row ``i`` of a set, ends stripped. Raises ValueError for a value that is no text."""
    row = rows[i]
    for column in COLUMNS:
        if not isinstance(row[column], str):
            raise ValueError(f"{place}, sample {i + 1}: {column} is {row[column]!r:.80}; expected text")
    return {column: row[column].strip() for column in COLUMNS}
