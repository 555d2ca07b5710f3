"""Where the facts of a context lie in its noise.

Shape suffixes: F facts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from lit_memory.text.haystack import Haystack


class Placement(NamedTuple):
    """Where the facts of a context lie.

    gaps_F: tokens of noise before each fact. The noise begins at ``position`` in the haystack and has ``room`` tokens.
    """

    facts: Sequence[np.ndarray]
    gaps_F: np.ndarray
    noise: Haystack | None = None
    position: int = 0
    room: int = 0


def place_between(facts: Sequence[np.ndarray], tokens: int, noise: Haystack, rng: Generator) -> Placement:
    """Place facts between random sentences of the noise, in a context of ``tokens`` tokens, as in BABILong."""
    position, room = noise.random_start(rng), tokens - sum(map(len, facts))
    gaps_F = np.sort(rng.integers(0, noise.sentences(position, room) + 1, len(facts)))
    return Placement(facts, np.minimum(noise.offset(position, gaps_F), room), noise, position, room)


def merge_in_order(first: np.ndarray, second: np.ndarray, rng: Generator) -> np.ndarray:
    """A random merger of two rows that keeps the order within each; all mergers have the same probability."""
    out = np.empty(len(first) + len(second), np.int64)
    from_first = np.zeros(len(out), bool)
    from_first[rng.choice(len(out), len(first), replace=False)] = True
    out[from_first], out[~from_first] = first, second
    return out
