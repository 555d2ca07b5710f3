"""The state of the line-reading models, an episode: lines in the order in which they were read.

Samples with fewer lines are padded in front. The first column is never a real line: it stands for the question of a
sample that has no line yet. What is not real is zero.

Shape suffixes: B batch, T tokens, N lines, H reads, C width of a latent, E width of an entry: latent and key.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.recurrence import map_state


class Episode(NamedTuple):
    """All lines so far. The newest is the question.

    lines_BNE: latent of every line, and behind it a key if the model has keys.
    real_BN: True at real lines.
    ids_BNT: tokens of every line, -1 where there is none; T is 0 in a model that needs no tokens.
    age_BN: number of real lines after each, 0 for the question. A deduplicated line keeps the age of its first
        occurrence.
    """

    lines_BNE: Tensor
    real_BN: Tensor
    ids_BNT: Tensor
    age_BN: Tensor


class Readouts(NamedTuple):
    """What a question reads from the lines before it.

    latents_BHC: latents of H reads, one after the other.
    nearest_BH: age of the line nearest to each read: 1 for the line before the question, 0 if there is no line.
    distances_BHN: distance of each read to every line, inf to columns that are no line.
    age_BN: age of every column, 0 where it is no line.
    """

    latents_BHC: Tensor
    nearest_BH: Tensor
    distances_BHN: Tensor
    age_BN: Tensor


def single_line(lines_B1E: Tensor, real: bool, tokens: int) -> Episode:
    """Episodes of one line each, with space for ``tokens`` tokens, which are unknown."""
    size = lines_B1E.shape[:2]
    real_B1 = lines_B1E.new_full(size, real, dtype=torch.bool)
    ids_B1T = real_B1.new_full((*size, tokens), -1, dtype=torch.int64)
    return Episode(lines_B1E, real_B1, ids_B1T, real_B1.new_zeros(size, dtype=torch.int64))


def before_question(state: Episode) -> Episode:
    """The lines before the question; one that is not real if there is none."""
    return map_state(lambda t: t[:, :-1], pad_lines(state, max(2, state.real_BN.shape[1])))


def readouts_of(latents_BHC: Tensor, distances_BHN: Tensor, real_BN: Tensor, age_BN: Tensor) -> Readouts:
    """Readouts of these latents, from the distances of the reads to the lines."""
    nearest_BH = age_BN.gather(1, distances_BHN.argmin(-1))
    return Readouts(latents_BHC, nearest_BH, distances_BHN.masked_fill(~real_BN.unsqueeze(1), torch.inf), age_BN)


def ages(real_BN: Tensor) -> Tensor:
    """Number of real lines after each real line; 0 at the others."""
    return (real_BN.flip(1).cumsum(1).flip(1) - 1) * real_BN


def shift_ages(state: Episode, real_BN: Tensor) -> Episode:
    """The same episodes after more lines, of which these are real."""
    return state._replace(age_BN=state.age_BN + real_BN.sum(1, keepdim=True) * state.real_BN)


def gather_lines(state: Episode, columns_BN: Tensor) -> Episode:
    """The lines in these columns."""
    rows_B1 = torch.arange(len(columns_BN), device=columns_BN.device)[:, None]
    return map_state(lambda t: t[rows_B1, columns_BN], state)


def pad_lines(state: Episode, lines: int) -> Episode:
    """The same episodes with ``lines`` columns: the missing ones are added in front and not real."""
    missing = lines - state.real_BN.shape[1]
    return Episode(
        F.pad(state.lines_BNE, (0, 0, missing, 0)),
        F.pad(state.real_BN, (missing, 0)),
        F.pad(state.ids_BNT, (0, 0, missing, 0), value=-1),
        F.pad(state.age_BN, (missing, 0)),
    )


def drop_leading_padding(state: Episode) -> Episode:
    """The same episodes without first columns that no sample needs. One that is not real stays."""
    real_BN = state.real_BN
    first = int(F.pad(real_BN.any(0), (0, 1), value=True).byte().argmax())
    start = max(0, min(first - 1, real_BN.shape[1] - 1))
    return map_state(lambda t: t[:, start:], state)
