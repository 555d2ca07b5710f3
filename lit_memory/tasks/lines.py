"""The context of a sample as lines, for models that read and remember lines.

A line is a fact, or a sentence of the noise between facts, cut after every ``line_tokens`` tokens. A fact without
tokens is an empty line.

Shape suffixes: F facts, S sentences of a haystack.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from lit_memory.tasks.samples import Sample, encode_texts
from lit_memory.text.haystack import Haystack
from lit_memory.text.tokenizers import Tokenizer

NO_TOKENS = np.empty(0, np.int32)


class Lines:
    """The context of a sample as lines of at most ``line_tokens`` tokens, readable from any line on.

    A context is a sequence of parts: noise, fact, noise, ..., fact, noise. Some of the noise may be empty.
    """

    def __init__(self, sample: Sample, line_tokens: int) -> None:
        self.sample, self.line_tokens = sample, line_tokens
        self.noise = cut_sentences(sample.noise, line_tokens) if sample.noise else None
        lengths_F = np.array([len(fact) for fact in sample.facts], np.int64)
        noise_before_F = sample.starts_F - (np.cumsum(lengths_F) - lengths_F)
        noise_len = sample.context_len - int(lengths_F.sum())
        offsets = [0, *noise_before_F.tolist(), noise_len]
        self.edges = [sample.position + offset for offset in offsets]
        """Positions in the haystack between which the parts of noise lie."""
        counts = np.empty(2 * len(lengths_F) + 1, np.int64)  # lines of every part
        counts[::2] = [self.count_noise(start, stop) for start, stop in pairwise(self.edges)]
        counts[1::2] = np.maximum(1, -(-lengths_F // line_tokens))
        self.firsts = np.concatenate([[0], np.cumsum(counts)])
        """First line of every part, and the number of lines."""

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def line_of(self, fact: int) -> int:
        """Index of the first line of a fact."""
        return int(self.firsts[2 * fact + 1])

    def count_noise(self, start: int, stop: int) -> int:
        """Number of lines of the noise from position ``start`` to ``stop``; a line begins at ``start``."""
        return 0 if self.noise is None or start == stop else 1 + self.noise.sentences(start + 1, stop - start - 1)

    def read(self, first: int, count: int) -> list[np.ndarray]:
        """Tokens of lines ``first`` to ``first + count - 1``; an empty line has none."""
        part, rows = int(np.searchsorted(self.firsts, first, side="right")) - 1, []
        while len(rows) < count:
            start, stop = map(int, self.firsts[part : part + 2])
            skip = first + len(rows) - start
            rows += self.read_part(part, skip, min(stop - start - skip, count - len(rows)))
            part += 1
        return rows

    def read_part(self, part: int, skip: int, count: int) -> list[np.ndarray]:
        """``count`` lines of a fact or of the noise between two facts, after its first ``skip`` lines."""
        if part % 2:
            fact, length = self.sample.facts[part // 2], self.line_tokens
            return [fact[k * length : (k + 1) * length] for k in range(skip, skip + count)]
        if self.noise is None or not count:
            return []
        start, stop = self.edges[part // 2], self.edges[part // 2 + 1]
        # Starts of the lines skip, ..., skip + count. Line 0 begins at ``start``, line k > 0 with the k-th sentence.
        starts = start + 1 + self.noise.offset(start + 1, np.arange(skip, skip + count + 1) - 1)
        starts[0] = start if skip == 0 else starts[0]
        starts[-1] = min(starts[-1], stop)
        tokens = self.noise.tokens(int(starts[0]), int(starts[-1] - starts[0]))
        return [tokens[a:b] for a, b in pairwise((starts - starts[0]).tolist())]


@lru_cache(maxsize=8)
def cut_sentences(noise: Haystack, most: int) -> Haystack:
    """Haystack with the same tokens, whose sentences are cut after every ``most`` tokens."""
    lengths_S = np.diff(noise.starts_S, append=len(noise))
    pieces_S = -(-lengths_S // most)
    nth = np.arange(pieces_S.sum()) - np.repeat(np.cumsum(pieces_S) - pieces_S, pieces_S)
    return Haystack(noise.tokens_N, np.repeat(noise.starts_S, pieces_S) + most * nth)


def encode_lines(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Tokens of every text by itself; none for an empty text."""
    rows = iter(encode_texts(tokenizer, [text for text in texts if text], leading_space=True))
    return [next(rows) if text else NO_TOKENS for text in texts]
