"""Distributed sets of BABILong samples, which a test may use instead of its own.

Source: arXiv 2406.10149; RMT-team/babilong (100 samples per task and length), RMT-team/babilong-1k-samples and any set
        with their columns. On the hub a configuration is a length ("0k", "64k", "1M") and a split is a task ("qa1").
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from stat import S_IFREG
from tempfile import TemporaryDirectory
from typing import Any

from lit_memory.util.checks import FieldError
from lit_memory.util.inputs import missing, reading

COLUMNS = ("input", "question", "target")
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Suffix of a file -> its format in ``datasets.load_dataset``."""


def part_name(length: int) -> str:
    """Name of a length in a set: 0k, 64k, 1M. Raises FieldError for a length without a name."""
    unit, letter = (10**6, "M") if length >= 10**6 else (1000, "k")
    if length < 0 or length % unit:
        expected = "expected thousands, or millions from 1000000 on, as the parts of a set are named (0k, 64k, 1M)"
        raise FieldError("eval_length", length, expected)
    return f"{length // unit}{letter}"


def check_set(source: str, lengths: Sequence[int]) -> None:
    """Raise FieldError for a set that is neither local nor a name on the hub, and for lengths that do not fit it."""
    if bool(source) != bool(lengths):
        expected = "expected lengths where eval_set is set, [0, 1000] for 0k and 1k, and none elsewhere"
        raise FieldError("test_eval_length", list(lengths), expected)
    if not source:
        return
    path = Path(source)
    on_hub = path.suffix not in READERS and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source, re.ASCII)
    why = missing(path) and missing(path, S_IFREG)
    if why and (why != "no such file" or not on_hub):
        what, example = why.replace("file", "file or folder"), "RMT-team/babilong for example"
        raise FieldError("eval_set", source, f"{what}; expected one, or a name on the Hugging Face hub, {example}")
    if path.is_file() and path.suffix not in READERS:
        expected = f"expected {', '.join(READERS)}, a folder, or a name on the Hugging Face hub"
        raise FieldError("eval_set", source, expected)
    if is_whole(path) and len(lengths) > 1:
        expected = f"expected one length, as {source} is one; a folder has a part for each (1k/qa1.jsonl)"
        raise FieldError("test_eval_length", list(lengths), expected)


def is_whole(path: Path) -> bool:
    """Whether a path holds the samples of one task and length: a file, or a folder of ``Dataset.save_to_disk``."""
    return path.is_file() or (path / "state.json").is_file()


@lru_cache(maxsize=16)
def load_set(source: str, length: int, task: str, revision: str | None, cache: Path) -> tuple[Any, str]:
    """Rows of a task at a length, a memory-mapped ``datasets.Dataset``, and their origin for error messages.

    source: a name on the hub, at ``revision``; a folder with a part for every length, ``64k/qa1.jsonl``, ``.json``,
        ``.parquet`` or the folder ``64k`` that ``DatasetDict.save_to_disk`` wrote; or one such part, whatever its name.
    cache: folder for the files that ``datasets`` prepares.
    Raises FileNotFoundError for a set out of reach, and ValueError for a file that is no set, with the reason in one
    line.
    """
    name, part = part_name(length), local_part(Path(source), length, task)
    if part is None and Path(source).is_dir():
        raise FileNotFoundError(
            f"{source}: no {name}/{task}; expected {name}/{task}.jsonl, .json, .parquet or a folder of save_to_disk"
        )
    origin = f"{source} {name} {task}" if part is None else str(part)
    try:
        rows = _read(source, name, task, revision, part, str(cache))
    except Exception as error:  # network, missing part, permission, broken file: the library has a class for each
        reason = f"{type(error).__name__}: {str(error.__cause__ or error).partition(chr(10))[0]:.200}"
        if part is None:
            raise FileNotFoundError(
                f"{origin}: not in reach on the Hugging Face hub ({reason}); check name and network, or give a folder"
            ) from error
        raise ValueError(f"{origin}: cannot be read ({reason}); expected samples with {', '.join(COLUMNS)}") from error
    for column in COLUMNS:
        if column not in rows.column_names:
            raise ValueError(
                f"{origin}: no column {column!r}; expected {', '.join(COLUMNS)}, got {', '.join(rows.column_names)}"
            )
    return rows, origin


def check_rows(source: str, length: int, task: str) -> None:
    """Read all samples of a task at a length if the set lies on this machine; nothing that ``datasets`` prepares for
    that is kept. Raises ValueError and FileNotFoundError."""
    if Path(source).exists():
        with TemporaryDirectory() as cache:
            rows, origin = load_set.__wrapped__(source, length, task, None, Path(cache))
            for i in range(len(rows)):
                sample_row(rows, i, origin)


def local_part(source: Path, length: int, task: str) -> Path | None:
    """Path of the samples of a task at a length; None if there are none on this machine."""
    if is_whole(source):
        return source
    paths = [source / part_name(length) / f"{task}{suffix}" for suffix in ("", *READERS)]
    return next((path for path in paths if path.exists()), None)


def _read(source: str, name: str, task: str, revision: str | None, part: Path | None, cache: str) -> Any:
    """``datasets.Dataset`` of a local part, or of the hub if it is None."""
    from datasets import disable_progress_bars, load_dataset, load_dataset_builder, load_from_disk
    from datasets.utils import logging

    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)  # what it logs, it raises as well
    if part is None:
        # A folder of its own for every task: what is there once, ``datasets`` takes for all tasks of the length.
        builder: Any = load_dataset_builder(source, name, revision=revision, cache_dir=str(Path(cache, task)))
        if files := builder.config.data_files:  # none of a set that it finds in its cache alone, without a network
            if task not in files:
                raise FileNotFoundError(f"no {task}; there are {', '.join(files)}")
            builder.config.data_files = {task: files[task]}
        builder.download_and_prepare(verification_mode="no_checks")  # they ask for all tasks
        return builder.as_dataset(split=task)
    if part.is_dir():
        return load_from_disk(str(part))
    with reading(part):
        part.open("rb").close()
    return load_dataset(READERS[part.suffix], data_files=str(part), split="train", cache_dir=cache)


def sample_row(rows: Any, i: int, origin: str) -> dict[str, str]:
    """Row ``i`` of a set, stripped of white space at its ends. Raises ValueError for a value that is no text."""
    row = rows[i]
    for column in COLUMNS:
        if not isinstance(row[column], str):
            raise ValueError(f"{origin}, sample {i + 1}: {column} is {row[column]!r:.80}; expected text")
    return {column: row[column].strip() for column in COLUMNS}
