"""Time series: forecast the next numbers of a channel from the last ones.

Paper:     Behrouz et al. 2025, Titans, arXiv 2501.00663, section 5.7 and table 3; its protocol is that of the field
    (spec 9).
Data:      ETT of Zhou et al. 2021, Informer, arXiv 2012.07436; the tokens are patches of single channels as in Nie et
           al. 2023, PatchTST, arXiv 2211.14730.

    patch 1   patch 2   ...   patch lookback/patch   answer          scored at the answer: ``horizon`` numbers at once

Every column has mean 0 and variance 1 on the rows of the training part. MSE and MAE are means over all windows,
channels and steps of these numbers. ETT is split into 12, 4 and 4 months, all else 7:1:2. A window belongs to the part
that its forecast lies in: the look-back of the first windows of validation and test reaches into the part before.

Deviations
1. One model forecasts the longest horizon, and the test visits shorter ones, ``test_horizon``, by its first steps; the
   protocol has a model for each (``horizon`` alone gives that).
2. A sample is one channel; models with channels as tokens or mixing them see more.
3. Windows are shifted by their mean (``center``), but not scaled as in reversible instance normalisation: that leaves
   the errors as they are.
4. Without a download there is a stand-in, ``seasons``: mixtures of seasons, an AR(2), level shifts and noise, and a
   last channel that repeats, in seven of ten rows, its value of 300 rows before, which only a longer look-back or a
   memory can know.

Shape suffixes: B batch, T tokens (patches, then the answer), N numbers of a patch, H steps of a forecast, R rows, C
channels.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import numpy as np
import torch
from numpy.random import PCG64, Generator
from torch import Tensor

from lit_memory.tasks.base import Batch, Task
from lit_memory.util import files
from lit_memory.util.checks import FieldError, at_least, nearest
from lit_memory.util.provenance import cache_folder
from lit_memory.util.seeds import mixed_seed

URL = "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/{}.csv"
ETT = {"ETTh1": 24, "ETTh2": 24, "ETTm1": 96, "ETTm2": 96}
"""Source -> rows of a day."""
DAY = 24
"""Rows of a season of the naive forecast."""
ROWS, CHANNELS, LAG = 17_420, 7, 300
"""Sizes of the stand-in, those of ETTh1, and the rows after which its last channel repeats itself."""


class TimeSeries(Task):
    """Forecast ``horizon`` numbers of one channel. ``repeat`` and ``season`` errors are those of forecasts that repeat
    the last number or day."""

    metrics = ("mse", "mae", "repeat_mse", "repeat_mae", "season_mse", "season_mae")
    lower = metrics

    @dataclass
    class Config:
        source: str = "seasons"
        """seasons, the stand-in; ETTh1, ETTh2, ETTm1 or ETTm2, from GitHub; or a CSV file, whose columns of numbers are
        the channels."""
        lookback: int = 96
        """Numbers that a model reads."""
        horizon: int = 96
        """Numbers that it forecasts."""
        patch: int = 8
        """Numbers of a token."""
        segment_len: int = 0
        """Tokens of a segment; 0: all."""
        center: bool = True
        """Subtract the mean of the look-back from look-back and forecast."""
        test_horizon: list[int] = field(default_factory=list)
        """Shorter horizons that the test visits; default: ``horizon``."""

        def __post_init__(self) -> None:
            at_least(1, self, "horizon", "patch", "lookback")
            at_least(0, self, "segment_len")
            if self.lookback % self.patch or self.lookback < DAY:
                raise FieldError(
                    "lookback", self.lookback, f"expected a multiple of patch={self.patch} of at least {DAY}, a day"
                )
            if self.source not in ("seasons", *ETT) and not Path(self.source).is_file():
                raise FieldError("source", self.source, f"no such file; {nearest(self.source, ['seasons', *ETT])}")

    @property
    def vocab_size(self) -> int:
        return self.config.horizon

    @property
    def inputs(self) -> int:
        return self.config.patch

    @property
    def segment_len(self) -> int:
        return self.config.segment_len or self.config.lookback // self.config.patch + 1

    @property
    def written(self) -> int:
        return self.config.lookback // self.config.patch // self.segment_len

    def test_conditions(self):
        if (longest := max(self.config.test_horizon, default=0)) > self.config.horizon:
            raise FieldError(
                "test_horizon", longest, f"expected at most horizon={self.config.horizon}, which the model forecasts"
            )
        return super().test_conditions()

    def part(self, split: str) -> "Part":
        """Rows of a split. Raises ValueError where they are too few."""
        c = self.config
        series = load_series(c.source)
        start, end = series.borders[split]
        first = max(start, c.lookback)
        if (windows := end - first - c.horizon + 1) < 1:
            raise ValueError(
                f"{c.source}: rows {start} to {end} are those of split {split!r}, too few for lookback={c.lookback} and horizon={c.horizon}; expected more rows"
            )
        return Part(series.numbers_CR, first, windows)

    def count(self, split: str) -> int:
        part = self.part(split)
        return part.windows * len(part.numbers_CR)

    def take(self, split: str, numbers: Sequence[int]) -> Batch:
        c, part, size = self.config, self.part(split), len(numbers)
        channel_B, window_B = np.divmod(np.asarray(numbers), part.windows)
        rows_BR = (part.first + window_B)[:, None] + np.arange(-c.lookback, c.horizon)
        numbers_BR = torch.from_numpy(part.numbers_CR[channel_B[:, None], rows_BR])
        past_BR, future_BH = numbers_BR.split([c.lookback, c.horizon], dim=1)
        if c.center:
            mean_B1 = past_BR.mean(1, keepdim=True)
            past_BR, future_BH = past_BR - mean_B1, future_BH - mean_B1
        answer_B1N = torch.zeros(size, 1, c.patch)
        ids_BTN = torch.cat([past_BR.unflatten(1, (-1, c.patch)), answer_B1N], dim=1)
        targets_BTH = torch.full((*ids_BTN.shape[:2], c.horizon), math.nan)
        targets_BTH[:, -1] = future_BH
        meta = {
            "horizon": torch.full((size,), c.horizon),
            "channel": torch.from_numpy(channel_B),
            "row": torch.from_numpy(part.first + window_B),
        }
        return Batch(ids_BTN, targets_BTH, self.segment_len, meta=meta)

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        past_BR, future_BH = batch.ids_BT[:, :-1].flatten(1), batch.targets_BT[:, -1]
        forecasts = {
            "": predicted_BT[:, -1],
            "repeat_": repeat_last(past_BR, self.config.horizon),
            "season_": repeat_day(past_BR, self.config.horizon),
        }
        errors = {name: forecast_BH - future_BH for name, forecast_BH in forecasts.items()}
        return {f"{name}mse": e.square().mean(1) for name, e in errors.items()} | {
            f"{name}mae": e.abs().mean(1) for name, e in errors.items()
        }


def repeat_last(past_BR: Tensor, horizon: int) -> Tensor:
    """The last number, (B, H) times."""
    return past_BR[:, -1:].expand(-1, horizon)


def repeat_day(past_BR: Tensor, horizon: int) -> Tensor:
    """The last ``DAY`` numbers in turn, (B, H)."""
    return past_BR[:, -DAY:][:, torch.arange(horizon, device=past_BR.device) % DAY]


class Series(NamedTuple):
    """Normalised columns, and the first row and the end of every split."""

    numbers_CR: np.ndarray
    borders: dict[str, tuple[int, int]]


class Part(NamedTuple):
    """What a split takes its windows from: forecasts begin at ``first`` and each of the ``windows - 1`` rows after
    it."""

    numbers_CR: np.ndarray
    first: int
    windows: int


def borders(name: str, rows: int) -> dict[str, tuple[int, int]]:
    """First row and end of every split: 12, 4 and 4 months of 30 days for ETT and the stand-in, else 7:1:2."""
    if day := ETT.get(name, 24 if name == "seasons" else 0):
        train, valid, end = 360 * day, 480 * day, 600 * day
        if rows >= end:
            return {"train": (0, train), "valid": (train, valid), "test": (valid, end)}
    train, test = int(rows * 0.7), int(rows * 0.2)
    return {"train": (0, train), "valid": (train, rows - test), "test": (rows - test, rows)}


@lru_cache(maxsize=4)
def load_series(source: str) -> Series:
    """A source, normalised by its training rows. A column that is constant there is shifted only."""
    columns_CR = seasons() if source == "seasons" else read_csv(fetch(source) if source in ETT else Path(source))
    parts = borders(source if source in ETT else Path(source).stem, columns_CR.shape[1])
    known = columns_CR[:, : parts["train"][1]]
    if not known.shape[1]:
        raise ValueError(f"{source}: {columns_CR.shape[1]} rows, none of them for training; expected more")
    std_C1 = known.std(1, keepdims=True)
    return Series(
        ((columns_CR - known.mean(1, keepdims=True)) / np.where(std_C1 > 0, std_C1, 1)).astype(np.float32), parts
    )


def fetch(name: str) -> Path:
    """A CSV file of ETT, downloaded once."""
    path = cache_folder() / f"{name}.csv"
    if not path.is_file():
        try:
            with urlopen(URL.format(name), timeout=30) as answer:
                files.write(path, answer.read())
        except OSError as error:
            raise FileNotFoundError(
                f"{name}: {URL.format(name)} is not in reach ({error}); check the network, or name a CSV file"
            ) from error
    return path


def read_csv(path: Path) -> np.ndarray:
    """The columns of numbers, (C, R); a first column of dates is left out. Raises ValueError that names file, line and
    column."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        names = next(reader, [])
        rows = [(reader.line_num, row) for row in reader if row]
    if not rows or len(rows[0][1]) != len(names):
        raise ValueError(f"{path}: expected a line of {len(names)} names of columns, then lines of as many numbers")
    chosen = [i for i, text in enumerate(rows[0][1]) if i or _number(text) is not None]
    if not chosen:
        raise ValueError(f"{path}: no column of numbers; expected at least one, beside a first one of dates")
    out_RC = np.empty((len(rows), len(chosen)))
    for r, (line, row) in enumerate(rows):
        for c, i in enumerate(chosen):
            number = _number(row[i]) if i < len(row) else None
            if number is None:
                raise ValueError(
                    f"{path}:{line}: column {names[i]!r} has {row[i] if i < len(row) else ''!r}; expected a number, as no value may be missing"
                )
            out_RC[r, c] = number
    return out_RC.T


def _number(text: str) -> float | None:
    """A finite number, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# The stand-in


def autoregression(rng: Generator, *weights: float) -> Iterator[float]:
    """x_t = sum of w_i x_(t-i) + N(0, 1), from zeros."""
    past = [0.0] * len(weights)
    while True:
        past = [sum(w * x for w, x in zip(weights, past, strict=True)) + rng.standard_normal(), *past[:-1]]
        yield past[0]


@lru_cache(maxsize=1)
def seasons() -> np.ndarray:
    """The stand-in of spec 9, (C, R): the same numbers always."""
    rng, row_R = Generator(PCG64(mixed_seed(0, "time_series/seasons", 0))), np.arange(ROWS)

    def wander(*weights: float) -> np.ndarray:
        path = autoregression(rng, *weights)
        return np.array([next(path) for _ in range(ROWS)])

    periods = (24, 168, 12 * int(rng.integers(3, 7)))
    waves = [np.sin(2 * np.pi * (row_R / period + rng.random())) * np.exp(0.05 * wander(0.995)) for period in periods]
    shifts = np.zeros(ROWS)
    for at in rng.integers(ROWS, size=5):
        shifts[at:] += rng.standard_normal()
    latents = [part / part.std() for part in (*waves, wander(1.6, -0.65), shifts)]
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
