"""Time series: forecast the next values of a channel from its past.

Paper:     Behrouz et al. 2025, Titans, arXiv 2501.00663, section 5.7 and table 3; its protocol is that of the field
    (spec 9).
Data:      ETT of Zhou et al. 2021, Informer, arXiv 2012.07436; the tokens are patches of single channels as in Nie et
           al. 2023, PatchTST, arXiv 2211.14730.

    patch 1   patch 2   ...   patch lookback/patch   answer          scored at the answer: ``horizon`` numbers at once

Every channel is normalised to mean 0 and variance 1 on the training rows. MSE and MAE are means over all windows,
channels and steps of the normalised numbers. ETT is split into 12, 4 and 4 months, all else 7:1:2. A window belongs to
the split of its forecast: the look-back of the first windows of validation and test reaches into the split before.

Deviations
1. One model forecasts the longest horizon, and the test evaluates shorter ones, ``test_horizon``, on its first steps;
   the protocol trains a model for each (``horizon`` alone gives that).
2. A sample is one channel; models with channels as tokens or mixing them see more.
3. Windows are shifted by their mean (``center``), but not scaled as in reversible instance normalisation, so that the
   errors keep their scale.
4. Without a download there is a synthetic stand-in, ``seasons``: mixtures of seasons, an AR(2), level shifts and noise,
   and a last channel that repeats, in seven of ten rows, its value of 300 rows before, which only a longer look-back or
   a memory can know.

Shape suffixes: B batch, T tokens (patches, then the answer), N numbers per patch, H steps of a forecast, R rows,
C channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from stat import S_IFREG
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import ContinuousTokens, FiniteSplits
from lit_memory.tasks.time_series_sets import ETT, load_series
from lit_memory.text.corpus import SPLITS
from lit_memory.util.checks import FieldError, at_least, nearest
from lit_memory.util.inputs import missing


class TimeSeries(FiniteSplits, ContinuousTokens):
    """Forecast the next ``horizon`` numbers of one channel.

    repeat_mse, repeat_mae: errors of a forecast that repeats the last number.
    season_mse, season_mae: errors of a forecast that repeats the last day.
    linear_mse, linear_mae: errors of the linear forecast of least squares on the windows of the training.
    """

    metrics = ("mse", "mae", "repeat_mse", "repeat_mae", "season_mse", "season_mae", "linear_mse", "linear_mae")
    minimized_metrics = metrics
    sources: ClassVar = {"source": ("seasons", *ETT)}

    @dataclass
    class Config:
        source: str = "seasons"
        """seasons, the stand-in; ETTh1, ETTh2, ETTm1 or ETTm2, from GitHub; or a CSV file, whose columns of numbers are
        the channels."""
        lookback: int = 96
        """Numbers that the model reads."""
        horizon: int = 96
        """Numbers that the model forecasts."""
        patch: int = 8
        """Numbers per token."""
        segment_len: int = 0
        """Tokens per segment; 0: the whole sample."""
        center: bool = True
        """Subtract the mean of the look-back from look-back and forecast."""
        test_horizon: list[int] = field(default_factory=list)
        """Values of ``horizon`` in the test, at most ``horizon``; default: ``horizon``."""

        def __post_init__(self) -> None:
            at_least(1, self, "horizon", "patch", "lookback")
            at_least(0, self, "segment_len")
            if self.lookback % self.patch or self.lookback < self.day:
                expected = f"expected a multiple of patch={self.patch} of at least {self.day}, a day"
                raise FieldError("lookback", self.lookback, expected)
            if self.source not in ("seasons", *ETT) and (why := missing(self.source, S_IFREG)):
                raise FieldError("source", self.source, f"{why}; {nearest(self.source, ['seasons', *ETT])}")

        @property
        def day(self) -> int:
            """Rows of a day, the season of the naive forecast; 24, as of hours, where it is not known."""
            return ETT.get(Path(self.source).stem, 24)

    @property
    def material(self) -> str:
        return "" if self.config.source == "seasons" else "data"

    @property
    def vocab_size(self) -> int:
        return self.config.horizon

    @property
    def input_dim(self) -> int:
        return self.config.patch

    @property
    def segment_len(self) -> int:
        return self.config.segment_len or self.config.lookback // self.config.patch + 1

    @property
    def written(self) -> int:
        return self.config.lookback // self.config.patch // self.segment_len

    def test_conditions(self) -> list[tuple[int | float, Self]]:
        if (longest := max(self.config.test_horizon, default=0)) > self.config.horizon:
            most = f"expected at most horizon={self.config.horizon}, which the model forecasts"
            raise FieldError("test_horizon", longest, most)
        return super().test_conditions()

    def part(self, split: str) -> "Part":
        """Windows of a split. Raises ValueError for a split with too few rows."""
        c = self.config
        series = load_series(c.source)
        start, end = series.borders[split]
        first = max(start, c.lookback)
        if (windows := end - first - c.horizon + 1) < 1:
            raise ValueError(
                f"{c.source}: rows {start} to {end} are those of split {split!r}, too few for "
                f"lookback={c.lookback} and horizon={c.horizon}; expected more rows"
            )
        return Part(series.numbers_CR, first, windows)

    def check_files(self) -> None:
        for split in SPLITS if self.config.source not in ("seasons", *ETT) else ():
            self.part(split)

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

    def linear(self, past_BR: Tensor) -> Tensor:
        """Forecast (B, H) of one linear map from the look-back, the same for all channels."""
        c = self.config
        weights_RH = torch.from_numpy(linear_map(c.source, c.lookback, c.horizon, c.center)).to(past_BR)
        return past_BR @ weights_RH[:-1] + weights_RH[-1]

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        past_BR, future_BH = batch.ids_BT[:, :-1].flatten(1), batch.targets_BT[:, -1]
        forecasts = {
            "": predicted_BT[:, -1],
            "repeat_": repeat_last(past_BR, self.config.horizon),
            "season_": repeat_day(past_BR, self.config.horizon, self.config.day),
            "linear_": self.linear(past_BR),
        }
        errors = {name: forecast_BH - future_BH for name, forecast_BH in forecasts.items()}
        return {f"{name}mse": e.square().mean(1) for name, e in errors.items()} | {
            f"{name}mae": e.abs().mean(1) for name, e in errors.items()
        }


@cache
def linear_map(source: str, lookback: int, horizon: int, center: bool) -> np.ndarray:
    """The linear map (look-back + 1, H) of least squares from every window of the training to its forecast; its last
    row is the intercept."""
    part = TimeSeries(TimeSeries.Config(source, lookback, horizon, patch=1)).part("train")
    first, last = part.first - lookback, part.first + part.windows + horizon - 1
    gram, products = np.zeros((lookback + 1, lookback + 1)), np.zeros((lookback + 1, horizon))
    for numbers_R in part.numbers_CR[:, first:last].astype(np.float64):
        windows_BR = np.lib.stride_tricks.sliding_window_view(numbers_R, lookback + horizon)
        past_BR, future_BH = windows_BR[:, :lookback], windows_BR[:, lookback:]
        if center:
            mean_B1 = past_BR.mean(1, keepdims=True)
            past_BR, future_BH = past_BR - mean_B1, future_BH - mean_B1
        past_BR = np.concatenate([past_BR, np.ones((len(past_BR), 1))], axis=1)
        gram, products = gram + past_BR.T @ past_BR, products + past_BR.T @ future_BH
    return np.linalg.pinv(gram, rcond=1e-10, hermitian=True) @ products  # centred numbers sum to 0: no inverse


def repeat_last(past_BR: Tensor, horizon: int) -> Tensor:
    """Forecast (B, H) that repeats the last number."""
    return past_BR[:, -1:].expand(-1, horizon)


def repeat_day(past_BR: Tensor, horizon: int, day: int) -> Tensor:
    """Forecast (B, H) that repeats the last ``day`` numbers."""
    return past_BR[:, -day:][:, torch.arange(horizon, device=past_BR.device) % day]


class Part(NamedTuple):
    """The windows of one split: forecasts begin at row ``first`` and at each of the next ``windows - 1`` rows."""

    numbers_CR: np.ndarray
    first: int
    windows: int
