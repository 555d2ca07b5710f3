"""How sure the difference of a line is: the interval from its draws, its p value, and Holm's correction.

The interval is the wider, at each end, of two, of which both know that a spread over n seeds is itself uncertain, and
the error of the samples is not:
    (a) the percentiles of the draws at level Phi(-h / s) instead of alpha / 2, with s their standard deviation
        (the expanded percentile interval; Hesterberg 2015, What Teachers Should Know About the Bootstrap, 5.3)
    (b) estimate ± h, with h^2 = t^2 n / (n - 1) A + z^2 B
where A and B are the variances of the draws that seeds and samples make, t the quantile 1 - alpha / 2 of Student's
distribution with n - 1 degrees of freedom and z the normal one. Without samples h is that of Student's interval; both
half-widths are added like errors, as in modified large-sample intervals (Graybill and Wang 1980), which simulated
experiments leave at most as often as alpha says, whatever A / B. The plain percentiles of 3 to 10 seeds are far too
narrow: with 3 seeds, one experiment in eight would differ from itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

LEVEL = 0.05
POWER = 0.8
LEAST_P = 1e-15
"""No p value is told that is smaller."""


@dataclass(frozen=True)
class Margin:
    """By how much something holds: left - right in the direction of its sign."""

    estimate: float
    draws: Any
    """(count,): what every draw would have."""
    seeds: int
    turns: int = 1
    """The draws i, i + turns, i + 2 turns, ... have the same samples; 1: seeds alone differ."""

    @cached_property
    def errors(self) -> tuple[float, float]:
        """Standard errors that seeds and samples leave; 0 of both if all draws are equal, NaN with one seed or a draw
        that is no number. The n seeds of a draw differ less than seeds do."""
        if self.seeds < 2:
            return math.nan, math.nan
        if self.draws.min() == self.draws.max():
            return 0.0, 0.0
        rows = self.draws[: len(self.draws) // self.turns * self.turns].reshape(-1, self.turns)
        whole = float(self.draws.var())
        of_seeds = min(whole, float(rows.var(axis=0, ddof=1).mean())) if self.turns > 1 else whole
        return (of_seeds * self.seeds / (self.seeds - 1)) ** 0.5, (whole - of_seeds) ** 0.5

    def half(self, level: float) -> float:
        """Half of the width of interval (b)."""
        of_seeds, of_samples = self.errors
        return math.hypot(student_t(1 - level / 2, self.seeds) * of_seeds, normal(1 - level / 2) * of_samples)

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.estimate) and all(map(math.isfinite, self.errors))

    @property
    def p_value(self) -> float:
        """Two-sided, of a margin of 0: the level at which interval (b) ends there. If all draws are equal, 0, or 1 if
        they are 0; 1 without an interval."""
        from scipy.optimize import brentq

        if not self.known or not self.estimate:
            return 1.0
        if not any(self.errors):
            return 0.0
        if self.half(LEAST_P) <= abs(self.estimate):
            return LEAST_P
        found: Any = brentq(lambda p: self.half(math.exp(p)) - abs(self.estimate), math.log(LEAST_P), 0.0)
        return math.exp(found)

    def interval(self, level: float) -> tuple[float, float]:
        """The interval of confidence 1 - level; a point if all draws are equal."""
        import numpy as np
        from scipy.special import ndtr

        if not any(self.errors):
            return self.estimate, self.estimate
        half = self.half(level)
        tail = float(ndtr(-half / self.draws.std()))
        low, high = (float(end) for end in np.quantile(self.draws, [tail, 1 - tail]))
        return min(low, self.estimate - half), max(high, self.estimate + half)

    def detectable(self, level: float) -> float:
        """The margin that four in five such experiments would have told from 0."""
        return self.half(level) + self.half(2 * (1 - POWER))


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


def normal(share: float) -> float:
    """The quantile of the normal distribution."""
    from scipy.special import ndtri

    return float(ndtri(share))


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
