"""Haystacks: tokenized books from which a context of any length is a slice.

Source: the noise sampler of BABILong (arXiv 2407.04841, appendix C; spec 3.3), with the reference's minimum of ten
    tokens to a sentence.

Deviations
1. All books are tokenized once and kept as one memory-mapped array on disk, which processes share. The reference cuts,
   splits and tokenizes passages anew for every sample.
2. A context is a run of consecutive sentences from a uniformly drawn one. The reference draws positions in books, and
   goes on from a queue of sentences that samples share.
3. The first sentence follows the last, so that a position and a length define a context of any length.
4. Every sentence starts with a space, which matters to subword tokenizers, as in newer versions of BABILong; the
   reference has none.

Shape suffixes: N tokens of the haystack, T tokens of a context, S sentences of the haystack.
"""

import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from lit_memory.text.corpus import SENTENCE_END, Corpus, cached, content_key, sentences
from lit_memory.text.tokenizers import Tokenizer

FORMAT = 1
"""Version of the arrays; to be raised when the same corpus, tokenizer and settings give other ones."""


@dataclass(frozen=True, eq=False)
class Haystack:
    """Sentences in a ring: position p, of any size, is token p modulo N."""

    tokens_N: np.ndarray
    """Token ids, uint16 or int32, read-only."""
    starts_S: np.ndarray
    """Positions at which sentences start, int64, ascending from 0."""

    def __len__(self) -> int:
        return len(self.tokens_N)

    def repeats(self, budget: int) -> bool:
        """Whether a context of ``budget`` tokens contains a passage more than once."""
        return budget > len(self)

    def remarks(self, budgets: Mapping[str, int]) -> list[str]:
        """A remark for a report if contexts are longer than the haystack, else none.

        budgets: name of a test condition -> tokens of its contexts.
        """
        repeated = []
        for name, budget in budgets.items():
            if self.repeats(budget):
                repeated.append(f"up to {-(-budget // len(self))} times at {name}")
        if not repeated:
            return []
        return [f"The haystack of the test has {len(self):,} tokens, so that its sentences come {', '.join(repeated)}."]

    def random_start(self, rng: np.random.Generator) -> int:
        """The position of a uniformly drawn sentence, the only random thing about a context."""
        return int(self.starts_S[rng.integers(len(self.starts_S))])

    def tokens(self, position: int, count: int) -> np.ndarray:
        """``count`` tokens from ``position`` on, (T,); a view unless they go beyond the last token of the array."""
        if count < 1:
            raise ValueError(f"{count} tokens of a haystack: expected at least 1")
        start = position % len(self)
        laps, stop = divmod(start + count, len(self))
        tokens_T = self.tokens_N[start : start + count]
        if laps:
            tokens_T = np.concatenate([tokens_T, *[self.tokens_N] * (laps - 1), self.tokens_N[:stop]])
        return tokens_T

    def sentences(self, position: int, count: int) -> int:
        """Number of sentences that start among the ``count`` tokens from ``position`` on, without reading them."""
        return self._before(position + count) - self._before(position)

    @overload
    def offset(self, position: int, k: int) -> int: ...
    @overload
    def offset(self, position: int, k: np.ndarray) -> np.ndarray: ...
    def offset(self, position: int, k: int | np.ndarray) -> int | np.ndarray:
        """Tokens from ``position`` to the k-th sentence start at or after it, counted from 0."""
        laps, sentence = np.divmod(self._before(position) + k, len(self.starts_S))
        offsets = laps * len(self) + self.starts_S[sentence] - position
        return offsets if isinstance(k, np.ndarray) else int(offsets)

    def _before(self, position: int) -> int:
        """Number of sentence starts from position 0 up to ``position``."""
        laps, at = divmod(position, len(self))
        return laps * len(self.starts_S) + int(np.searchsorted(self.starts_S, at))


def build_haystack(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache: Path,
    min_tokens: int = 10,
    without: Sequence[Collection[str]] = (),
    leading_space: bool = True,
) -> Haystack:
    """The haystack of a corpus, from ``cache`` if it has been built before.

    min_tokens: shorter sentences are left out.
    without: groups of words, such as names and places. A sentence with a word of every group, in any case, is left out,
        so that none states a fact.
    leading_space: whether every sentence starts with a space.
    Raises ValueError if no sentence is left.
    """
    groups = [sorted({word.lower() for word in group}) for group in without]
    name = content_key(
        "haystack", FORMAT, corpus.key, tokenizer.key, SENTENCE_END.pattern, min_tokens, groups, leading_space
    )

    def build() -> list[bytes]:
        tokens_N, starts_S = tokenize(corpus, tokenizer, min_tokens, groups, leading_space)
        return [_npy(tokens_N.astype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32)), _npy(starts_S)]

    paths = cached(cache / f"haystack-{name}", ["tokens.npy", "starts.npy"], build)
    return Haystack(*(np.asarray(np.load(path, mmap_mode="r")) for path in paths))


def tokenize(
    corpus: Corpus, tokenizer: Tokenizer, min_tokens: int, without: Sequence[Collection[str]], leading_space: bool
) -> tuple[np.ndarray, np.ndarray]:
    """``tokens_N`` (int32) and ``starts_S`` of the sentences that are kept; see ``build_haystack``."""
    groups = [_any_of(group) for group in without]
    books, lengths = [], []
    for text in corpus.texts():
        wanted = sentences(text)
        if groups:
            wanted = [sentence for sentence in wanted if not all(group.search(sentence) for group in groups)]
        encoded = tokenizer.encode_batch([" " * leading_space + sentence for sentence in wanted])
        kept = [ids for ids in encoded if len(ids) >= min_tokens]
        if kept:
            books.append(np.concatenate(kept))
            lengths += map(len, kept)
    if not books:
        raise ValueError(
            f"{corpus.name}: no sentence left of {min_tokens} tokens or more; expected text with longer sentences"
        )
    return np.concatenate(books), np.cumsum(lengths) - lengths


def _any_of(words: Collection[str]) -> re.Pattern[str]:
    """A pattern of any of the words, in any case; of none, one that matches nothing."""
    alternatives = "|".join(map(re.escape, words)) or "(?!)"
    return re.compile(rf"\b(?:{alternatives})\b", re.IGNORECASE)


def _npy(array: np.ndarray) -> bytes:
    """The content of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()
