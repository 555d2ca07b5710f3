"""What the seeds and the samples of a test leave open: draws of a hierarchical bootstrap.

A draw picks as many seeds as there are, with replacement, the same for all arms and x, as a plan has one list of seeds:
arms are compared within seeds. It picks the samples of a test, with replacement, the same for all arms, metrics and
seeds, as all of them read the same test: what its samples leave open, more seeds do not settle. Where the scores of the
samples are not known it picks seeds alone, and where all of them are the same there is nothing to pick: a share then
varies as one that so many samples have measured, with half a success and half a failure added to them (Jeffreys), by a
normal number that all seeds have in common, as if arms were not paired.

Draws take turns in reading the picks of samples, ``Draws.turns`` of them: those of one turn differ by their seeds
alone, by which ``margins`` tells what is left open by seeds from what is left open by samples.

numpy draws, 10,000 draws of a line at once. ``scipy.stats.bootstrap`` and rliable (Agarwal et al. 2021) have one level,
no pairing of both and percentiles alone; the tests compare one level with the former.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DRAWS = 10_000
RESAMPLES = 2_000
"""Means of resampled test samples, per test; the draws take turns in reading them."""
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
    samples: Callable[[str, str | None, float], int] = lambda arm, metric, x: 0
    """(arm, metric, x) -> how many samples have measured a share; 0 where that is not known, and of what is none."""


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
        self._turn = np.arange(count) % self.turns

    @property
    def turns(self) -> int:
        """How many picks of samples there are: the draws i, i + turns, i + 2 turns, ... read the same one."""
        return max(1, min(RESAMPLES, self.count // 5))

    def seeds(self, arm: str, metric: str | None, x: float) -> Any:
        """(seeds, 1 + count): the measured values, then those of every draw."""
        import numpy as np

        values = np.array(self.evidence.values(arm, metric, x), dtype=float)
        if not self.count:
            return values[:, None]
        table = self.table(arm, metric, x)
        drawn = values[self._picks] if table is None else table[self._picks, self._turn]
        if table is None or table.min() == table.max():
            drawn = drawn + self._unseen(float(values.mean()), arm, metric, x)
        return np.concatenate([values[:, None], drawn], axis=1)

    def _unseen(self, mean: float, arm: str, metric: str | None, x: float) -> Any:
        """(count,): what the samples of a test leave open of a share, in all seeds; 0 of anything else. The share is
        drawn by Jeffreys' rule, from a beta distribution with half a success and half a failure more."""
        from scipy.special import betaincinv, ndtr

        if not (samples := self.evidence.samples(arm, metric, x)) or not 0 <= mean <= 1:
            return 0.0
        where = ndtr(self._standard(arm, metric, x))
        return betaincinv(mean * samples + 0.5, (1 - mean) * samples + 0.5, where)[self._turn] - mean

    def _standard(self, arm: str, metric: str | None, x: float) -> Any:
        """(turns,): standard normal numbers of a result."""
        from numpy.random import PCG64, Generator

        name = f"{arm}/{metric or self.evidence.metric}/{x:.17g}/samples"
        return Generator(PCG64([GENERATOR, zlib.crc32(name.encode())])).standard_normal(self.turns)

    def mean(self, arm: str, metric: str | None, x: float) -> Any:
        """(1 + count,): means over seeds, drawn once, as the conditions of a line name the same results. One seed after
        the other is added, so that equal values have equal means."""
        if (arm, metric, x) not in self._means:
            values = self.seeds(arm, metric, x)
            self._means[arm, metric, x] = sum(values) / len(values)
        return self._means[arm, metric, x]

    def std(self, arm: str, metric: str | None, x: float) -> Any:
        """(1 + count,): sample standard deviations over seeds."""
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
