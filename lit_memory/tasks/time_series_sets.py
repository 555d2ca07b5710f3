"""Data of the time series task: ETT, CSV files, and a synthetic stand-in.

Source: ETT of Zhou et al. 2021, Informer, arXiv 2012.07436; the stand-in is described in ``time_series.py`` (spec 9).

Shape suffixes: R rows, C channels.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import numpy as np
from numpy.random import Generator

from lit_memory.tasks.base import numpy_generator
from lit_memory.util import files
from lit_memory.util.inputs import read_table
from lit_memory.util.provenance import cache_folder

URL = "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/{}.csv"
ETT = {"ETTh1": 24, "ETTh2": 24, "ETTm1": 96, "ETTm2": 96}
"""Source -> rows per day."""
COLUMNS = b"date,HUFL,HULL,MUFL,MULL,LUFL,LULL"
"""The names of all columns but the last, with which every file of ETT begins."""
DAYS = 600
"""Days of ETT that are read."""
ROWS, CHANNELS, LAG = 17_420, 7, 300
"""Rows and channels of the stand-in, as in ETTh1, and the rows after which its last channel repeats itself."""


class Series(NamedTuple):
    """Normalised channels. ``borders``: split -> its first row and the row after its last."""

    numbers_CR: np.ndarray
    borders: dict[str, tuple[int, int]]


def borders(name: str, rows: int) -> dict[str, tuple[int, int]]:
    """Split -> its first row and the row after its last.

    12, 4 and 4 months of 30 days for ETT and the stand-in, else 7:1:2 of the rows.
    """
    if day := ETT.get(name, 24 if name == "seasons" else 0):
        train, valid, end = 360 * day, 480 * day, DAYS * day
        if rows >= end:
            return {"train": (0, train), "valid": (train, valid), "test": (valid, end)}
    train, test = int(rows * 0.7), int(rows * 0.2)
    return {"train": (0, train), "valid": (train, rows - test), "test": (rows - test, rows)}


@lru_cache(maxsize=4)
def load_series(source: str) -> Series:
    """Load a source and normalise it by its training rows. A channel that is constant there is only shifted."""
    columns_CR = seasons() if source == "seasons" else read_csv(fetch(source) if source in ETT else Path(source))
    stem = Path(source).stem
    parts = borders(stem if source == "seasons" or stem in ETT else "", columns_CR.shape[1])
    train_CR = columns_CR[:, : parts["train"][1]]
    if not train_CR.shape[1]:
        raise ValueError(f"{source}: {columns_CR.shape[1]} rows, none of them for training; expected more")
    with np.errstate(over="ignore", invalid="ignore"):
        mean_C1, std_C1 = train_CR.mean(1, keepdims=True), train_CR.std(1, keepdims=True)
        numbers_CR = ((columns_CR - mean_C1) / np.where(std_C1 > 0, std_C1, 1)).astype(np.float32)
    if not (np.isfinite(std_C1).all() and np.isfinite(numbers_CR).all()):
        largest = f"the largest number is {np.abs(columns_CR).max():.3g}"
        raise ValueError(f"{source}: {largest}; expected numbers that are finite after squaring and normalising")
    return Series(numbers_CR, parts)


def fetch(name: str) -> Path:
    """Path of a CSV file of ETT, downloaded once. Raises FileNotFoundError as ``download`` does."""
    path = cache_folder() / f"{name}.csv"
    if not path.is_file():
        files.write(path, download(name))
    return path


def download(name: str) -> bytes:
    """A CSV file of ETT. Raises FileNotFoundError if the network does not answer, or answers something else, such as a
    page to sign in."""
    url, advice = URL.format(name), "check the network, or name a CSV file"
    try:
        with urlopen(url, timeout=30) as answer:
            content: bytes = answer.read()
    except (OSError, HTTPException) as error:
        raise FileNotFoundError(f"{name}: {url} is not in reach ({error}); {advice}") from error
    lines, least = content.count(b"\n"), DAYS * ETT[name]
    if not content.startswith(COLUMNS) or lines <= least:
        expected = f"expected {COLUMNS.decode()} and more than {least} lines"
        raise FileNotFoundError(
            f"{name}: {url} begins with {content[:40]!r} and has {lines} lines; {expected}; {advice}"
        )
    return content


def read_csv(path: Path) -> np.ndarray:
    """Columns of numbers in a CSV file, (C, R), without a first column of dates or of row numbers without a name.

    Raises ValueError that names file, line and column.
    """
    (_, names), *rows = read_table(path)
    if not rows:
        raise ValueError(f"{path}:2: expected lines of {len(names)} numbers below the names of the columns; got none")
    numbered = [*map(str, range(len(names)))]  # as pandas names what has no names
    if names != numbered and all(_number(name) is not None for name in names):
        raise ValueError(f"{path}:1: has numbers, {', '.join(names):.80}; expected the names of the columns")
    dates = not names[0].strip() or all(_number(row[0]) is None for _, row in rows)
    chosen = [*range(int(dates), len(names))]
    if not chosen:
        raise ValueError(f"{path}: no column of numbers; expected at least one, beside a first one of dates")
    out_RC = np.empty((len(rows), len(chosen)))
    for r, (line, row) in enumerate(rows):
        for c, i in enumerate(chosen):
            number = _number(row[i])
            if number is None:
                expected = "expected a number, as no value may be missing"
                raise ValueError(f"{path}:{line}: column {names[i]!r:.80} has {row[i]!r:.80}; {expected}")
            out_RC[r, c] = number
    return out_RC.T


def _number(text: str) -> float | None:
    """The finite number that a text spells, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def autoregression(rng: Generator, *weights: float) -> Iterator[float]:
    """Autoregressive process: x_t = sum of w_i x_(t-i) + N(0, 1), starting from zeros."""
    past = [0.0] * len(weights)
    while True:
        past = [sum(w * x for w, x in zip(weights, past, strict=True)) + rng.standard_normal(), *past[:-1]]
        yield past[0]


@lru_cache(maxsize=1)
def seasons() -> np.ndarray:
    """The synthetic stand-in of spec 9, (C, R): always the same numbers."""
    rng, row_R = numpy_generator(0, "time_series/seasons", 0), np.arange(ROWS)

    def process(*weights: float) -> np.ndarray:
        values = autoregression(rng, *weights)
        return np.array([next(values) for _ in range(ROWS)])

    periods = (24, 168, 12 * int(rng.integers(3, 7)))
    waves = [np.sin(2 * np.pi * (row_R / period + rng.random())) * np.exp(0.05 * process(0.995)) for period in periods]
    shifts = np.zeros(ROWS)
    for row in rng.integers(ROWS, size=5):
        shifts[row:] += rng.standard_normal()
    latents = [part / part.std() for part in (*waves, process(1.6, -0.65), shifts)]
    out_CR = np.empty((CHANNELS, ROWS))
    for c in range(CHANNELS - 1):
        chosen = rng.permutation(len(latents))[:3]
        out_CR[c] = sum(rng.standard_normal() * latents[i] for i in chosen) + 0.3 * rng.standard_normal(ROWS)
    memory_R, kept_R = rng.standard_normal(ROWS), rng.random(ROWS) < 0.7
    for r in range(LAG, ROWS):
        if kept_R[r]:
            memory_R[r] = memory_R[r - LAG]
    out_CR[-1] = memory_R
    return out_CR
