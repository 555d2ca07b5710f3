"""Streams: all texts of a corpus as one sequence of tokens, for language modelling.

Source: the usual packing, as in the scripts of arXiv 2407.04841 for WikiText-103 (spec 8.1), which join all lines.

Deviations
1. The tokenizer's end token follows every text (book, article, page), since what came before does not help to predict
   the next one.

Shape suffixes: N tokens of the stream.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lit_memory.text.corpus import Corpus, cached, content_key
from lit_memory.text.tokenizers import Tokenizer

FORMAT = 1
"""Version of the arrays; to be raised when the same corpus and tokenizer give other ones."""


@dataclass(frozen=True, eq=False)
class Stream:
    """The tokens of all texts."""

    tokens_N: np.ndarray
    """Token ids, uint16 or int32, read-only."""
    num_bytes: int
    """Length of the texts in UTF-8, including what the tokenizer drops."""

    def __len__(self) -> int:
        return len(self.tokens_N)


def build_stream(corpus: Corpus, tokenizer: Tokenizer, cache: Path) -> Stream:
    """The stream of a corpus, memory-mapped from ``cache`` if it has been built before. Building it takes four bytes of
    memory per token.

    Raises ValueError for a corpus without text.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32

    def build() -> list[bytes]:
        parts, num_bytes = [], 0
        for text in corpus.texts():
            parts.append(np.append(tokenizer.encode(text), tokenizer.eos_id).astype(dtype).tobytes())
            num_bytes += len(text.encode())
        if not num_bytes:
            raise ValueError(f"{corpus.name}: expected text, found none")
        return [b"".join(parts), str(num_bytes).encode()]

    folder = cache / f"stream-{content_key('stream', FORMAT, corpus.key, tokenizer.key)}"
    tokens, num_bytes = cached(folder, ["tokens.bin", "bytes.txt"], build)
    return Stream(np.asarray(np.memmap(tokens, dtype, mode="r")), int(num_bytes.read_bytes()))
