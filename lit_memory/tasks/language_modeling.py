"""Language modelling in windows of text, with a memory that is empty at the start of each, or in streams, with a memory
that goes on.

Paper:     Rodkin et al. 2024, arXiv 2407.04841, the figure of WikiText-103 by segment; Behrouz et al. 2025, arXiv
           2501.00663, tables 1 and 5, figure 7 (perplexity, also against length); Bulatov et al. 2022, arXiv
           2207.06881, and TARM: streams; spec 8, 9.
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de, its WikiText scripts; of streams,
    github.com/booydar/LM-RMT.

    text     t0 t1 t2 ...                                        all books of a split, each with its end token
    window   [s, s + segments * segment_len)                     read segment by segment; every token but the first is
    scored training s is any place; validation and test: 0, stride, 2 * stride, ...

    stream   c = batch size columns of L tokens each, L = (tokens - 1) // c in training, where a place that is drawn for
             every epoch is the text's first; rounded up in validation and test. Batch k reads window k of every column
             and predicts all tokens that follow one

    perplexity = exp(CE)    bits per byte = CE / ln 2 * tokens / bytes, both of the split    CE: nats, mean over all
    scored tokens

The token at a segment's beginning is predicted from the end of the segment before, and counts as one of its own
segment.

Deviations
1. A training window begins at any token, drawn with replacement; the reference's begin at multiples of 128, and it
   reads all once per epoch.
2. Validation and test windows lie side by side by default, so that no token is scored twice; the reference's stride is
   a segment (``stride``).
3. The first token of every segment but the first counts (the reference's curve leaves out all of them, its total none).
4. No text is dropped: the last window ends in padding that is not scored. One token alone, which nothing predicts, is
   left out.
5. A stream's epochs begin at different places, so that seeds differ (reference: at the first token). Of its training
   text less than a window per column is left out, of the others nothing.
6. A stream's batch is ``segments`` segments, which gradients cross; the reference's is one, and the D before it are
   read again for their gradients.
7. ``<unk>`` of WikiText is text like any other; the reference makes it GPT-2's end of text in WikiText-103, not in
   WikiText-2.

Shape suffixes: B batch, T tokens of a window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lit_memory.tasks.base import Batch, Task, generator
from lit_memory.tasks.planted_facts import load_tokenizer
from lit_memory.text.corpus import check_source, load_corpus
from lit_memory.text.stream import Stream, build_stream
from lit_memory.text.tokenizers import ByteTokenizer, Tokenizer
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.fields import added
from lit_memory.util.provenance import cache_folder


class LanguageModeling(Task):
    """Predict every token of a window of text."""

    metrics = ("perplexity", "bits_per_byte")
    lower = metrics
    curves: ClassVar = {"segment": ("segment_loss", "segment_bits_per_byte")}
    scores_losses = True

    @dataclass
    class Config:
        source: str = "noise"
        """Synthetic English; a folder of books or of WikiText; or a set of the hub, wikitext-..., fineweb-edu or pg19,
        see ``text.load_corpus``."""
        books: int | None = None
        """Most books (articles, pages) of a split; default: all of a folder and of WikiText, 50 of noise, 100,000 of
        FineWeb-Edu."""
        tokenizer: str = "word"
        """word, wikitext (words between spaces, line by line), char, bpe, gpt2, or any folder or name on the hub. Bits
        per byte mean little with words, which leave out white space and rare ones."""
        vocab_size: int = 4096
        """Token ids at most; those of char are 259."""
        vocabulary: str = ""
        """Where the text comes from that word and bpe are trained on; default: ``source``. A trained model keeps its
        own."""
        segments: int = 8
        """Segments of a window."""
        segment_len: int = 128
        stride: int | None = None
        """Tokens from the beginning of one window of validation and test to that of the next; default: all of the
        window."""
        stream: bool = added(False)
        """Whether a batch holds the next window of every column of the text and goes on with the memory of the batch
        before."""
        test_segments: list[int] = field(default_factory=list)
        """Segments of the windows that the test visits; default: ``segments``."""

        def __post_init__(self) -> None:
            at_least(1, self, "books", "vocab_size", "segments", "segment_len", "stride")
            if self.stream and self.stride:
                raise FieldError("stride", self.stride, "expected none for a stream, whose windows follow each other")
            if self.window < 2:
                raise FieldError(
                    "segment_len",
                    self.segment_len,
                    "expected at least 2 tokens in a window, of which the first is not scored",
                )
            check_source("source", self.source)
            check_source("vocabulary", self.vocabulary or self.source)

        @property
        def window(self) -> int:
            """Tokens of a window."""
            return self.segments * self.segment_len

    @property
    def vocab_size(self) -> int:
        return ByteTokenizer.vocab_size if self.config.tokenizer == "char" else self.config.vocab_size

    @property
    def segment_len(self) -> int:
        return self.config.segment_len

    @property
    def written(self) -> int:
        return self.config.segments - 1  # what the last one writes is read by none

    @property
    def tokenizer(self) -> Tokenizer:
        c = self.config
        found = load_tokenizer(type(self), c.tokenizer, c.vocab_size, c.vocabulary or c.source, c.books)
        if found.vocab_size > self.vocab_size:
            raise FieldError(
                "vocab_size",
                c.vocab_size,
                f"expected at least {found.vocab_size}, the ids of tokenizer {c.tokenizer!r}",
            )
        return found

    def text(self, split: str) -> Stream:
        """The tokens of a split. Raises ValueError for a text that is shorter than a window."""
        c = self.config
        text = load_text(c.source, split, c.books, self.tokenizer)
        if len(text) < c.window:
            name = f"{c.source}, split {split}"
            raise FieldError(
                "segments",
                c.segments,
                f"a window has {c.window:,} tokens, all of {name}, {len(text):,}; expected fewer, or more text",
            )
        return text

    def stride(self, split: str) -> int:
        """Tokens from one window to the next."""
        return 1 if split == "train" else self.config.stride or self.config.window

    @property
    def stream(self) -> bool:
        return self.config.stream

    def stream_steps(self, split: str, size: int) -> int:
        length = self.column(split, size)
        return length // self.config.window if split == "train" else -(-length // self.config.window)

    def column(self, split: str, size: int) -> int:
        """Tokens that are predicted in each of ``size`` columns. Raises ValueError for a text whose columns have no
        window."""
        c, tokens = self.config, len(self.text(split)) - 1
        if tokens // size < c.window:
            name = f"{c.source}, split {split}, in {size:,} columns"
            raise FieldError(
                "segments",
                c.segments,
                f"a window has {c.window:,} tokens, a column of {name}, {tokens // size:,}; expected fewer, or more text",
            )
        return tokens // size if split == "train" else -(-tokens // size)

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        if not self.stream:
            return super().batch(seed, split, step, size)
        text, column, window = self.text(split), self.column(split, size), self.config.window
        epoch, k = divmod(step, self.stream_steps(split, size))
        first = int(torch.randint(len(text), (), generator=generator(seed, split, epoch))) if split == "train" else 0
        inside = np.arange(k * window, (k + 1) * window + 1)  # places in a column, of which the first is read only
        places_BT = np.arange(size)[:, None] * column + inside
        real_BT = (inside <= column) & ((places_BT < len(text)) | (split == "train"))
        ids_BT = np.where(
            real_BT, text.tokens_N[(first + places_BT) % len(text)].astype(np.int64), self.tokenizer.pad_id
        )
        targets_BT = np.where(real_BT & (inside > inside[0]), ids_BT, -100)
        return self.joined(text, ids_BT, targets_BT, k > 0)

    def count(self, split: str) -> int | None:
        if self.stream:
            return None
        tokens, stride = len(self.text(split)), self.stride(split)
        return len(range(0, min(tokens - self.config.window + stride, tokens - 1), stride))

    def take(self, split: str, numbers: Sequence[int]) -> Batch:
        text, length, stride = self.text(split), self.config.window, self.stride(split)
        ids_BT = np.full((len(numbers), length), self.tokenizer.pad_id, np.int64)
        targets_BT = np.full_like(ids_BT, -100)
        for i, number in enumerate(numbers):
            tokens = text.tokens_N[number * stride : number * stride + length]
            ids_BT[i, : len(tokens)] = tokens
            targets_BT[i, 1 : len(tokens)] = tokens[1:]
        return self.joined(text, ids_BT, targets_BT)

    def joined(self, text: Stream, ids_BT: np.ndarray, targets_BT: np.ndarray, continues: bool | None = None) -> Batch:
        """A batch of tokens of a text."""
        size = len(ids_BT)
        meta = {
            "segments": torch.full((size,), self.config.segments),
            "bytes_per_token": torch.full((size,), text.num_bytes / len(text)),
        }
        return Batch(
            torch.from_numpy(ids_BT), torch.from_numpy(targets_BT), self.segment_len, meta=meta, continues=continues
        )

    def score_losses(self, loss_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        bits_BT = loss_BT / math.log(2) / batch.meta["bytes_per_token"][:, None]
        scored_BT, s = batch.scored_BT, self.segment_len
        values = {"loss": loss_BT[scored_BT], "bits_per_byte": bits_BT[scored_BT]}
        for i in self.places("segment"):
            own = scored_BT[:, i * s : (i + 1) * s]
            values[f"segment_loss[{i}]"] = loss_BT[:, i * s : (i + 1) * s][own]
            values[f"segment_bits_per_byte[{i}]"] = bits_BT[:, i * s : (i + 1) * s][own]
        return values

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(means["loss"], 700.0))}  # beyond, exp has no floating-point number

    def places(self, axis: str) -> list[int]:
        """Segments are counted from 0, as those of the paper's figure; a stream has no first one."""
        return [] if self.stream else list(range(self.config.segments))


@lru_cache(maxsize=16)
def load_text(source: str, split: str, books: int | None, tokenizer: Tokenizer) -> Stream:
    """All texts of a split."""
    return build_stream(load_corpus(source, split, books), tokenizer, cache_folder())
