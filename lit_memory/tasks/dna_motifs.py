"""The synthetic stand-in for DNA sets: two motifs in a random background.

In a sequence of class 1 motif A is followed by motif B at a distance of 20 to 120 bases, on either strand. Class 0 has
them in the wrong order, or one with shuffled letters, so that both classes have the same bases (deviation 1 of
``dna.py``).

Shape suffixes: B batch, L bases of a sample.
"""

from functools import lru_cache

import numpy as np
from numpy.random import Generator

from lit_memory.tasks.base import numpy_generator

MOTIFS = np.array([[0, 2, 3, 1, 0, 3, 1, 2], [3, 1, 0, 2, 2, 0, 3, 1]])
"""Motifs A and B, as bases; both have each base twice."""
WIDTH = MOTIFS.shape[1]
NEAREST, FARTHEST = 20, 120
"""Bases between A and B."""
C, G = 1, 2
"""Bases C and G, as numbers."""


@lru_cache(maxsize=1)
def background() -> np.ndarray:
    """Cumulative probabilities (64, 4) of a base after three others.

    The row's index is 16 * last base + 4 * the one before + the one before that. Every row is random, and G after C is
    rare, as in a genome.
    """
    table = numpy_generator(0, "dna/background", 0).dirichlet([4.0] * 4, size=64)
    table[16 * C : 16 * (C + 1), G] *= 0.25
    return (table / table.sum(1, keepdims=True)).cumsum(1)


def draw_background(rng: Generator, size: int, length: int) -> np.ndarray:
    """Draw bases (B, L) from a Markov chain of order 3."""
    cumulative, last_B, draws_LB1 = background(), rng.integers(64, size=size), rng.random((length, size, 1))
    out_LB = np.empty((length, size), np.int64)
    for i, draw_B1 in enumerate(draws_LB1):
        out_LB[i] = (draw_B1 > cumulative[last_B, :3]).sum(1)
        last_B = out_LB[i] * 16 + last_B // 4
    return out_LB.T


def reverse_complement(bases: np.ndarray) -> np.ndarray:
    """The other strand, read in its own direction. N is not allowed."""
    return 3 - bases[..., ::-1]


def plant_motifs(rng: Generator, bases_L: np.ndarray, label: int) -> None:
    """Write the motifs of class ``label`` into a sequence, in place."""
    pair = list(MOTIFS)
    if not label:
        pair = pair[::-1]
        if rng.random() < 0.5:  # shuffle the letters of one motif
            shuffled = rng.integers(2)
            pair[shuffled] = rng.permutation(pair[shuffled])
    for i, motif in enumerate(pair):
        if rng.random() < 0.5:
            pair[i] = motif.copy()
            pair[i][rng.integers(WIDTH)] = rng.integers(4)
    gap = rng.integers(NEAREST, min(FARTHEST, len(bases_L) - 2 * WIDTH) + 1)
    start = rng.integers(len(bases_L) - 2 * WIDTH - gap + 1)
    if rng.random() < 0.5:
        pair = [reverse_complement(motif) for motif in pair[::-1]]
    for motif, first in zip(pair, (start, start + WIDTH + gap), strict=True):
        bases_L[first : first + WIDTH] = motif


def has_pair(bases_BL: np.ndarray) -> np.ndarray:
    """Mask (B,) of the sequences that have A before B at the right distance, on either strand.

    Each motif may have one wrong base.
    """
    found_B = np.zeros(len(bases_BL), bool)
    for strand_BL in (bases_BL, reverse_complement(bases_BL)):
        windows = np.lib.stride_tricks.sliding_window_view(strand_BL, WIDTH, axis=1)
        a, b = ((windows == motif).sum(-1) >= WIDTH - 1 for motif in MOTIFS)
        count = np.pad(b.cumsum(1), ((0, 0), (1, 0)))  # occurrences of B before every position
        first = np.minimum(np.arange(a.shape[1]) + WIDTH + NEAREST, a.shape[1])
        last = np.minimum(first + FARTHEST - NEAREST + 1, a.shape[1])
        found_B |= (a & (count[:, last] > count[:, first])).any(1)
    return found_B


def draw_motifs(length: int, seed: int, split: str, step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw bases (B, L) and classes (B,) of the stand-in. Sequences whose class changed by chance are drawn again."""
    rng = numpy_generator(seed, f"dna/{split}", step)
    class_B, bases_BL = rng.integers(2, size=size), np.empty((size, length), np.int64)
    wrong = np.arange(size)
    while len(wrong):
        bases_BL[wrong] = draw_background(rng, len(wrong), length)
        for i in wrong:
            plant_motifs(rng, bases_BL[i], class_B[i])
        wrong = wrong[has_pair(bases_BL[wrong]) != class_B[wrong]]
    return bases_BL, class_B
