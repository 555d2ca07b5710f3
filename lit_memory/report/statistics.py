"""How sure the difference of a line is: a hierarchical bootstrap, the interval from it, and Holm's correction.

A draw picks as many seeds as there are, with replacement, the same for all arms and x, as a plan has one list of seeds:
arms are compared within seeds. It picks the samples of a test, with replacement, the same for all arms, metrics and
seeds, as all of them read the same test: what its samples leave open, more seeds do not settle. Where the scores of the
samples are not known, it picks seeds alone. Of old times even the seeds are not known, but their mean and standard
deviation: a draw takes a normal one, as if arms were not paired.

The interval is the wider, at each end, of two:
    (a) the percentiles of the draws at level Phi(-sqrt(n / (n - 1)) t) instead of alpha / 2
        (the expanded percentile interval; Hesterberg 2015, What Teachers Should Know About the Bootstrap, 5.3)
    (b) estimate ± t sqrt(n / (n - 1)) * standard deviation of the draws
with n seeds and t the quantile 1 - alpha / 2 of Student's distribution with n - 1 degrees of freedom. The plain
percentiles of 3 to 10 seeds are far too narrow: with 3 seeds, one experiment in eight would differ from itself.

numpy draws and folds, 10,000 draws of a line at once; scipy has Student's and the normal distribution. Its own
``scipy.stats.bootstrap`` and rliable (Agarwal et al. 2021) have one level, no pairing of both and percentiles alone;
the tests compare one level with the former.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

DRAWS = 10_000
RESAMPLES = 2_000
"""Means of resampled test samples, per test; the draws take turns in reading them."""
LEVEL = 0.05
POWER = 0.8
GENERATOR = 23
"""Seed of all draws: the same results have the same intervals."""
BLOCK = 500_000
"""Samples that are picked at a time."""
Column = tuple[str, str]
"""(arm, metric)."""


@dataclass(frozen=True)
class Evidence:
    """What lines are judged by."""

    values: Callable[[str, str | None, float], Sequence[float]]
    """(arm, metric or None for the figure's, x) -> the values of the finished seeds, in the order of the plan."""
    x_values: Sequence[float]
    seeds: int
    """How many seeds are planned."""
    metric: str = ""
    """That of the figure."""
    scores: Callable[[float], Mapping[Column, Sequence[Any]]] = lambda x: {}
    """x -> the scores of the test samples, of all that are known: one 1-D array per seed."""
    summary: Callable[[str, str | None, float], tuple[float, float] | None] = lambda arm, metric, x: None
    """(arm, metric, x) -> mean and standard deviation over all planned seeds, where the seeds were not kept."""

    def finished(self, arm: str, metric: str | None, x: float) -> int:
        """How many seeds a result has."""
        return self.seeds if self.summary(arm, metric, x) else len(self.values(arm, metric, x))


class Draws:
    """What the seeds measured, and what every draw of them would have.

    count: 0 gives the measured values alone, also where seeds are missing.
    """

    def __init__(self, evidence: Evidence, count: int = DRAWS) -> None:
        import numpy as np
        from numpy.random import PCG64

        self.evidence, self.count, n = evidence, count, evidence.seeds
        self._tables: dict[float, dict[Column, Any]] = {}
        self._means: dict[tuple[str, str | None, float], Any] = {}
        bits = PCG64(GENERATOR).random_raw(n * count).reshape(n, count)
        self._picks = (bits % n).astype(np.int64)
        self._turns = np.arange(count)[None, :] % RESAMPLES

    def seeds(self, arm: str, metric: str | None, x: float) -> Any:
        """(seeds, 1 + count): the measured values, then those of every draw."""
        import numpy as np

        values = np.array(self.evidence.values(arm, metric, x), dtype=float)
        if not self.count:
            return values[:, None]
        table = self.table(arm, metric, x)
        drawn = values[self._picks] if table is None else table[self._picks, self._turns]
        return np.concatenate([values[:, None], drawn], axis=1)

    def mean(self, arm: str, metric: str | None, x: float) -> Any:
        """(1 + count,): means over seeds, drawn once, as the conditions of a line name the same results."""
        if (arm, metric, x) not in self._means:
            self._means[arm, metric, x] = self._mean(arm, metric, x)
        return self._means[arm, metric, x]

    def _mean(self, arm: str, metric: str | None, x: float) -> Any:
        """One seed after the other, so that equal values have equal means."""
        if told := self.evidence.summary(arm, metric, x):
            return self._normal(*told, f"{arm}/{metric}/{x:.17g}")
        values = self.seeds(arm, metric, x)
        return sum(values) / len(values)

    def _normal(self, mean: float, std: float, name: str) -> Any:
        """(1 + count,): means of seeds that were not kept, drawn from a normal distribution of their own. They spread
        as those of picked seeds do, with a variance of (n - 1) / n of what the seeds say."""
        import numpy as np
        from numpy.random import PCG64, Generator

        n = self.evidence.seeds
        drawn = Generator(PCG64([GENERATOR, zlib.crc32(name.encode())])).standard_normal(self.count)
        return mean + std * (n - 1) ** 0.5 / n * np.concatenate([[0.0], drawn])

    def std(self, arm: str, metric: str | None, x: float) -> Any:
        """(1 + count,): sample standard deviations over seeds."""
        import numpy as np

        if told := self.evidence.summary(arm, metric, x):
            return np.full(1 + self.count, told[1])
        values = self.seeds(arm, metric, x)
        center = sum(values) / len(values)
        return (sum((values - center) ** 2) / (len(values) - 1)) ** 0.5

    def table(self, arm: str, metric: str | None, x: float) -> Any | None:
        """(seeds, RESAMPLES): means of resampled scores; None where the scores are not known."""
        if x not in self._tables:
            self._tables[x] = self._resampled(x)
        return self._tables[x].get((arm, metric or self.evidence.metric))

    def _resampled(self, x: float) -> dict[Column, Any]:
        """The tables of all columns with scores at ``x``. Those of equally many samples share the picks, as they have
        read the same test, whatever order the columns come in."""
        import numpy as np
        from numpy.random import PCG64, Generator

        scores, place = dict(sorted(self.evidence.scores(x).items())), list(self.evidence.x_values).index(x)
        tables = {column: np.empty((self.evidence.seeds, RESAMPLES)) for column in scores}
        sizes: dict[int, list[tuple[Column, int]]] = {}
        for column, of_seeds in scores.items():
            for seed, of_seed in enumerate(of_seeds):
                sizes.setdefault(len(of_seed), []).append((column, seed))
        for size, cells in sizes.items():
            stacked = np.stack([scores[column][seed] for column, seed in cells], axis=1)
            means = resampled_means(stacked, Generator(PCG64([GENERATOR, place, size])))
            for (column, seed), of_column in zip(cells, means.T, strict=True):
                tables[column][seed] = of_column
        return tables


def resampled_means(scores: Any, rng: Any) -> Any:
    """(samples, columns) -> (RESAMPLES, columns): means of as many samples, picked with replacement."""
    import numpy as np

    count = len(scores)
    rows = max(1, BLOCK // count)
    blocks = []
    for begin in range(0, RESAMPLES, rows):
        here = min(rows, RESAMPLES - begin)
        picks = rng.integers(count, size=(here, count)) + count * np.arange(here)[:, None]
        blocks.append(np.bincount(picks.ravel(), minlength=here * count).reshape(here, count) @ scores / count)
    return np.concatenate(blocks)


@dataclass(frozen=True)
class Margin:
    """By how much something holds: left - right in the direction of its sign."""

    estimate: float
    draws: Any
    """(count,): what every draw would have."""
    seeds: int

    @cached_property
    def error(self) -> float:
        """Standard error: that of the draws for n seeds, which differ less than the seeds themselves; 0 if all draws
        are equal, NaN with one seed or a draw that is no number."""
        if self.seeds < 2:
            return math.nan
        if self.draws.min() == self.draws.max():
            return 0.0
        return float(self.draws.std()) * (self.seeds / (self.seeds - 1)) ** 0.5

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.estimate) and math.isfinite(self.error)

    @property
    def p_value(self) -> float:
        """Two-sided, of a margin of 0, from interval (b). If all draws are equal, 0, or 1 if they are 0; 1 without an
        interval."""
        from scipy.special import stdtr

        if not self.known or not self.estimate:
            return 1.0
        return 2 * float(stdtr(self.seeds - 1, -abs(self.estimate) / self.error)) if self.error else 0.0

    def interval(self, level: float) -> tuple[float, float]:
        """The interval of confidence 1 - level; a point if all draws are equal."""
        import numpy as np
        from scipy.special import ndtr

        if not self.error:
            return self.estimate, self.estimate
        t = student_t(1 - level / 2, self.seeds)
        tail = float(ndtr(-t * (self.seeds / (self.seeds - 1)) ** 0.5))
        low, high = (float(end) for end in np.quantile(self.draws, [tail, 1 - tail]))
        return min(low, self.estimate - t * self.error), max(high, self.estimate + t * self.error)

    def detectable(self, level: float) -> float:
        """The margin that four in five such experiments would have told from 0."""
        return (student_t(1 - level / 2, self.seeds) + student_t(POWER, self.seeds)) * self.error


@dataclass(frozen=True)
class LineMargin:
    """By how much a line holds, whose min and max take the luckiest or unluckiest of several noisy results.

    That choice is biased, and the more results there are, the more. So what a line says is decided by margins without
    that choice, and the level is shared among them: a line fails if one of its conditions does, and holds if one of its
    alternatives does.
    """

    whole: Margin
    conditions: Sequence[Margin]
    """Of the comparisons of which all must hold: the whole is the smallest of them."""
    alternatives: Sequence[Margin]
    """Of the sets of comparisons of which one must hold: the whole is the largest of them."""

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return all(margin.known for margin in (self.whole, *self.conditions, *self.alternatives))

    @property
    def p_value(self) -> float:
        """Two-sided, of a margin of 0: the smallest of those that decide, times their number where it is corrected."""
        positive = self.whole.estimate > 0
        margins = self.alternatives if positive else self.conditions
        found = [margin.p_value for margin in margins if (margin.estimate > 0) == positive]
        return min(1.0, min(found, default=1.0) / share_of(margins)) if self.known else 1.0

    def interval(self, level: float) -> tuple[float, float]:
        """The interval of confidence 1 - level."""
        lows = [margin.interval(level * share_of(self.alternatives))[0] for margin in self.alternatives]
        highs = [margin.interval(level * share_of(self.conditions))[1] for margin in self.conditions]
        return max(lows), min(highs)


def share_of(margins: Sequence[Margin]) -> float:
    """What each of some margins has of a level: one or two have all of it, as they can be wrong on one side alone."""
    return min(1.0, 2 / len(margins))


def student_t(share: float, seeds: int) -> float:
    """The quantile of Student's distribution with ``seeds`` - 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(seeds - 1, share))


def holm(p_values: Sequence[float], level: float) -> list[float]:
    """The level at which Holm's step-down judges every hypothesis: it is refuted if its p is at most that.

    The smallest p is judged at level / m, the next at level / (m - 1), ...; all after the first that is not refuted at
    the level of that one, at which they are not refuted either.
    """
    levels, at, refuted = [0.0] * len(p_values), 0.0, True
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        at = level / (len(p_values) - rank) if refuted else at
        levels[i], refuted = at, refuted and p_values[i] <= at
    return levels
