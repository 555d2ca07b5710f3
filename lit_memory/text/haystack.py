"""Haystacks: tokenized books from which a context of any length is a slice.

Source: the noise sampler of BABILong (arXiv 2407.04841, appendix C; spec 3.3), with the reference's minimum of ten
    tokens to a sentence.

Deviations
1. All books are tokenized once and kept as one array on disk, memory-mapped, so that processes share it. The reference
   cuts, splits and tokenizes passages anew for every sample.
2. A context is one run of consecutive sentences from a uniformly drawn one. The reference draws places in books, and
   goes on from a queue of sentences that it shares between samples.
3. Beyond the last sentence comes the first again, so that a place and a length say all about a context, of whatever
   length.
4. Every sentence starts with a space, which matters to subword tokenizers, as in newer versions of BABILong; the
   reference has none.

Shape suffixes: N tokens of the haystack, T tokens of a context, S sentences of the haystack, K sentences of a context.
"""

import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from lit_memory.text.corpus import SENTENCE_END, Corpus, cached, content_key, sentences
from lit_memory.text.tokenizers import Tokenizer

FORMAT = 1
"""To be raised when the same corpus, tokenizer and settings give other arrays."""


@dataclass(frozen=True, eq=False)
class Haystack:
    """Sentences in a ring: position p is token p modulo N. Positions may be of any size, so that contexts have no end.

    tokens_N: token ids, uint16 or int32, read-only. starts_S: int64 positions where sentences start, ascending from 0.
    """

    tokens_N: np.ndarray
    starts_S: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens_N)

    def repeats(self, budget: int) -> bool:
        """Whether a context of ``budget`` tokens has passages twice."""
        return budget > len(self)

    def remarks(self, budgets: Mapping[str, int]) -> list[str]:
        """What a reader of a test has to know about contexts of so many tokens, by what they are called: which are
        longer than the haystack."""
        told = [
            f"up to {-(-budget // len(self))} times at {name}"
            for name, budget in budgets.items()
            if self.repeats(budget)
        ]
        return (
            [f"The haystack of the test has {len(self):,} tokens, so that its sentences come {', '.join(told)}."]
            if told
            else []
        )

    def place(self, rng: np.random.Generator) -> int:
        """The position of a uniformly drawn sentence: all that is random about a context."""
        return int(self.starts_S[rng.integers(len(self.starts_S))])

    def take(self, budget: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A context of exactly ``budget`` tokens: ``read`` from a random place."""
        return self.read(self.place(rng), budget)

    def stream(self, rng: np.random.Generator, chunk: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """A context without end, in reads of ``chunk`` tokens: put together, they are what ``take`` returns for the
        same ``rng``."""
        position = self.place(rng)
        while True:
            yield self.read(position, chunk)
            position += chunk

    def read(self, position: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """``tokens`` and the offsets in them of sentence starts, (K,)."""
        return self.tokens(position, count), self.offset(position, np.arange(self.sentences(position, count)))

    def tokens(self, position: int, count: int) -> np.ndarray:
        """``count`` tokens from ``position`` on, (T,), a view where they lie in one piece."""
        if count < 1:
            raise ValueError(f"{count} tokens of a haystack: expected at least 1")
        start = position % len(self)
        laps, stop = divmod(start + count, len(self))
        tokens_T = self.tokens_N[start : start + count]
        if laps:
            tokens_T = np.concatenate([tokens_T, *[self.tokens_N] * (laps - 1), self.tokens_N[:stop]])
        return tokens_T

    def sentences(self, position: int, count: int) -> int:
        """How many sentences start among the ``count`` tokens from ``position`` on. Reads none of them."""
        return self._before(position + count) - self._before(position)

    @overload
    def offset(self, position: int, k: int) -> int: ...
    @overload
    def offset(self, position: int, k: np.ndarray) -> np.ndarray: ...
    def offset(self, position: int, k: int | np.ndarray) -> int | np.ndarray:
        """Tokens from ``position`` to the k-th sentence start that is not before it, counted from 0."""
        laps, sentence = np.divmod(self._before(position) + k, len(self.starts_S))
        offsets = laps * len(self) + self.starts_S[sentence] - position
        return offsets if isinstance(k, np.ndarray) else int(offsets)

    def _before(self, position: int) -> int:
        """Sentence starts before ``position``, from the first lap on."""
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

    min_tokens: shorter sentences are left out. without: groups of words; a sentence with a word of every group is left
        out, whatever the case, so that none states a fact about somebody (names) and somewhere (places). leading_space:
        one in front of every sentence.
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
    groups = [re.compile(rf"\b(?:{'|'.join(map(re.escape, group)) or '(?!)'})\b", re.IGNORECASE) for group in without]
    books, lengths = [], []
    for text in corpus.texts():
        wanted = [
            sentence
            for sentence in sentences(text)
            if not groups or not all(group.search(sentence) for group in groups)
        ]
        kept = [
            ids
            for ids in tokenizer.encode_batch([" " * leading_space + sentence for sentence in wanted])
            if len(ids) >= min_tokens
        ]
        if kept:
            books.append(np.concatenate(kept))
            lengths += map(len, kept)
    if not books:
        raise ValueError(
            f"{corpus.name}: no sentence left of min_tokens={min_tokens} tokens or more; expected longer text, or a smaller min_tokens"
        )
    return np.concatenate(books), np.cumsum(lengths) - lengths


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()
