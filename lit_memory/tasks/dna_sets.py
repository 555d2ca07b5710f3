"""Labelled DNA sequences: the sets of GenomicsBenchmarks on the hub, and folders of files.

Source: Gresova et al. 2023, GenomicsBenchmarks, BMC Genomic Data 24:25 (spec 9).
"""

import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_memory.util.inputs import read_table, read_text

BASES = "ACGTN"
"""Their token ids are 0 to 4."""
SETS = (
    "human_enhancers_cohn",
    "human_enhancers_ensembl",
    "human_ensembl_regulatory",
    "human_nontata_promoters",
    "human_ocr_ensembl",
)
HUB = {name: f"katarinagresova/Genomic_Benchmarks_{name}" for name in SETS}
"""Source -> name on the Hugging Face hub."""
HELD_OUT = 10
"""One training sequence in ``HELD_OUT`` is for validation."""
SUFFIXES = (".txt", ".fa", ".fasta", ".fna", ".fas")
"""Of files with sequences, in upper or lower case."""
Record = tuple[np.ndarray, str]
"""Bases of a sequence, and its class."""


class Sequences(NamedTuple):
    """Sequences of one split, joined: sequence i is ``bases[starts[i] : starts[i + 1]]``."""

    bases: np.ndarray
    starts: np.ndarray
    classes: np.ndarray
    names: list[str]
    """Names of the classes."""


@lru_cache(maxsize=8)
def load_sequences(source: str, split: str, classes: int) -> Sequences:
    """Load the sequences of one split of a set on the hub or of a folder.

    A folder has, for train, test and maybe valid,
        train.csv             with the columns seq and label, or
        train/<class>/*       files with one sequence per line (.txt) or in FASTA format, also in folders below, or
        train/<class>.txt     (or another of ``SUFFIXES``) the same, with one file for each class.
    Classes are numbered in the order of their names in the training part.

    Raises ValueError for a character that is no base, a table without these columns and classes that do not fit;
    FileNotFoundError for missing files.
    """
    part = split if split != "valid" or _has(source, "valid") else "train"
    records = list(_fetch(source, part) if source in HUB else _read(Path(source), part))
    labels = {label for _, label in records}
    names = sorted(labels) if part == "train" else load_sequences(source, "train", classes).names
    if len(names) != classes:
        raise ValueError(
            f"{source}: has {len(names)} classes ({', '.join(names)}), but classes={classes}; set it to {len(names)}"
        )
    if strange := labels.difference(names):
        expected = f"expected those of the train part, {', '.join(names)}"
        raise ValueError(f"{source}: the {part} part has the class {min(strange)!r}; {expected}")
    if part == "train" and not _has(source, "valid"):
        records = [record for record in records if _held_out(record[0]) == (split == "valid")]
    if not records:
        raise ValueError(f"{source}: no sequences for split {split!r}; expected more than a few")
    sequences = [bases for bases, _ in records]
    starts = np.cumsum([0, *map(len, sequences)])
    return Sequences(np.concatenate(sequences), starts, np.array([names.index(label) for _, label in records]), names)


def _held_out(bases: np.ndarray) -> bool:
    return zlib.crc32(bases.tobytes()) % HELD_OUT == 0


CODES = np.full(256, 255, np.uint8)
CODES[list(BASES.encode() + BASES.lower().encode())] = [*range(len(BASES))] * 2


def encode(text: bytes, where: str) -> np.ndarray:
    """Bases of one line, upper or lower case. Raises ValueError that names file and column for other characters."""
    bases = CODES[np.frombuffer(text, np.uint8)]
    if len(wrong := np.flatnonzero(bases == 255)):
        before, rest = text[: wrong[0]].decode(errors="replace"), text[wrong[0] :].decode(errors="replace")
        raise ValueError(f"{where}: {rest[0]!r} at column {len(before) + 1}; expected A, C, G, T or N")
    return bases


def _has(source: str, part: str) -> bool:
    """Whether a folder has a part, "valid" for example."""
    return source not in HUB and bool([*Path(source).glob(f"{part}.csv"), *Path(source).glob(f"{part}/*")])


def _read(folder: Path, part: str) -> Iterator[Record]:
    """Sequences of a part of a folder, from a table or from files of lines."""
    if (table := folder / f"{part}.csv").is_file():
        yield from _read_table(table)
        return
    root = folder / part
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        expected = f"expected {part}.csv, or files in {part}/<class> that end in {', '.join(SUFFIXES)}"
        raise FileNotFoundError(f"{folder}: no sequences in {part}; {expected}")
    for path in paths:
        label = path.stem if path.parent == root else path.relative_to(root).parts[0]
        yield from ((bases, label) for bases in _read_lines(path))


def _read_lines(path: Path) -> Iterator[np.ndarray]:
    """Sequences of a file: one per line, or, in FASTA format, on the lines after each header with ``>``."""
    lines = read_text(path).encode().splitlines()
    fasta, parts, found = any(line.startswith(b">") for line in lines), [], False
    for number, line in enumerate(lines, start=1):
        header = line.startswith(b">")
        if line.strip() and not header:
            parts.append(encode(line.strip(), f"{path}:{number}"))
        if parts and (header or not fasta):
            yield np.concatenate(parts)
            parts, found = [], True
    if parts:
        yield np.concatenate(parts)
    elif not found:
        expected = f"expected a sequence {'below the header' if fasta else 'on every line'}"
        raise ValueError(f"{path}:{max(len(lines), 1)}: {expected}; the file has none")


def _read_table(path: Path) -> Iterator[Record]:
    """Sequences of a CSV file with the columns seq and label."""
    rows = read_table(path)
    _, columns = next(rows)
    if not {"seq", "label"} <= {*columns}:
        raise ValueError(f"{path}:1: has the columns {', '.join(columns):.200}; expected seq and label among them")
    for line, row in rows:
        sequence, label = row[columns.index("seq")], row[columns.index("label")]
        if not sequence or not label:
            raise ValueError(f"{path}:{line}: expected a sequence and a label")
        yield encode(sequence.encode(), f"{path}:{line}"), label


def _fetch(source: str, part: str) -> Iterator[Record]:
    """Sequences of a set of GenomicsBenchmarks on the hub."""
    from datasets import load_dataset

    try:
        rows: Any = load_dataset(HUB[source], split=part)
    except Exception as error:  # no network, no such name, no permission: the library has a class for each
        reason = f"is not in reach on the Hugging Face hub ({type(error).__name__})"
        raise FileNotFoundError(f"{source}: {HUB[source]} {reason}; check the network, or name a folder") from error
    for number, row in enumerate(rows):
        if not {"seq", "label"} <= row.keys():
            raise ValueError(f"{HUB[source]}: has the columns {', '.join(row)}; expected seq and label among them")
        yield encode(row["seq"].encode(), f"{HUB[source]}, {part}, row {number}"), str(row["label"])
