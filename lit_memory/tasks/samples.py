"""Samples whose context is too long to hold: any part of it can be read, and rows of tokens become tensors.

Shape suffixes: B batch, b samples of a batch that have begun, S tokens of a segment, F facts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lit_memory.tasks.batch import Segment
from lit_memory.text.haystack import Haystack
from lit_memory.text.tokenizers import Tokenizer

QuestionAnswer = tuple[np.ndarray, np.ndarray]
"""Tokens of a question, with everything else before the answer, and of the answer, with EOS."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Facts in a haystack, and a question about them. Holds what it takes to read any part of the context.

    noise: the haystack; None for facts alone. position: where the context begins in the haystack.
    facts: tokens of each fact. starts_F: offsets of the facts in the context.
    segments: number of segments. context_len: tokens of the context.
    question: tokens of the question, with everything else before the answer. answer: tokens of the answer, with EOS.
    more: further questions, each in a read-only segment of its own; an answer without tokens is not scored.
    support: indices of the facts that support the answer, hop by hop; () if they are not known.
    """

    noise: Haystack | None
    position: int
    facts: list[np.ndarray]
    starts_F: np.ndarray
    segments: int
    context_len: int
    question: np.ndarray
    answer: np.ndarray
    more: Sequence[QuestionAnswer] = ()
    support: Sequence[int] = ()

    @property
    def questions(self) -> list[QuestionAnswer]:
        """The question with its answer, and then ``more``."""
        return [(self.question, self.answer), *self.more]

    @cached_property
    def ends_F(self) -> np.ndarray:
        """Offsets behind the facts in the context."""
        return self.starts_F + np.array([len(fact) for fact in self.facts], np.int64)

    @cached_property
    def before_F(self) -> np.ndarray:
        """Tokens of all facts before each, and of all (F + 1,)."""
        return np.cumsum([0, *map(len, self.facts)])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens ``start`` to ``start + count - 1`` of the context."""
        out, now, end = np.empty(count, np.int64), start, start + count
        i = int(np.searchsorted(self.ends_F, start, side="right"))
        while now < end:
            upcoming = int(self.starts_F[i]) if i < len(self.facts) else end
            if now < upcoming and self.noise:
                stop, position = min(upcoming, end), self.position + now - int(self.before_F[i])
                out[now - start : stop - start] = self.noise.tokens(position, stop - now)
            else:
                stop = min(int(self.ends_F[i]), end)
                out[now - start : stop - start] = self.facts[i][now - upcoming : stop - upcoming]
                i += 1
            now = stop
        return out

    def segment(self, k: int, segment_len: int, margin: int) -> np.ndarray:
        """Tokens of the context in segment ``k``.

        Segments are aligned at the end: the last one leaves ``margin`` tokens free, and the first one may be short.
        """
        first = self.context_len - (segment_len - margin) - (self.segments - 1 - k) * segment_len
        start, stop = max(first, 0), min(first + segment_len, self.context_len)
        return self.read(start, stop - start)


def pad_rows(rows: Sequence[np.ndarray], length: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens, left-aligned in ``length`` columns (b, length), and a mask of the real tokens."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(length) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = np.concatenate(rows)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def full_segment(rows: Sequence[np.ndarray], segment_len: int, pad_id: int) -> Segment:
    """Rows of tokens as one segment (b, S), with a mask if some are short.

    Short rows are always padded to a full segment: memory tokens, for example, which a model appends to a segment, are
    then at the same position as in training, and no sample depends on the others of its batch.
    """
    ids_bS, mask_bS = pad_rows(rows, segment_len, pad_id)
    return ids_bS if mask_bS.all() else (ids_bS, mask_bS)


def tail_segment(
    starts: Sequence[np.ndarray], questions: Sequence[QuestionAnswer], segment_len: int, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Read-only segment (B, S) and its targets: the last tokens of the context, a question and its answer."""
    ids_BS = np.full((len(questions), segment_len), pad_id, np.int64)
    targets_BS = np.full_like(ids_BS, -100)
    for row, targets, start, (question, answer) in zip(ids_BS, targets_BS, starts, questions, strict=True):
        prompt = len(start) + len(question)
        row[: prompt + len(answer)] = np.concatenate([start, question, answer])
        targets[prompt : prompt + len(answer)] = answer
    return torch.from_numpy(ids_BS), torch.from_numpy(targets_BS)


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], leading_space: bool) -> list[np.ndarray]:
    """Token ids of every text by itself."""
    return tokenizer.encode_batch([f" {text}" if leading_space else text for text in texts])


def until(ids: list[int], stop: int) -> tuple[list[int], bool]:
    """Ids before the first ``stop``, and whether there is one."""
    return (ids[: ids.index(stop)], True) if stop in ids else (ids, False)
