"""Language modelling in windows of text, or in streams whose memory is carried from batch to batch.

Paper:     Rodkin et al. 2024, arXiv 2407.04841, the figure of WikiText-103 by segment; Behrouz et al. 2025, arXiv
           2501.00663, tables 1 and 5, figure 7 (perplexity, also against length); Bulatov et al. 2022, arXiv
           2207.06881, and TARM: streams; spec 8, 9.
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de, its WikiText scripts; of streams,
           github.com/booydar/LM-RMT.

    text     t0 t1 t2 ...                         all books of a split, each followed by the end token
    window   [s, s + segments * segment_len)      read segment by segment; every token but the first is scored
                                                  training: s is random; validation and test: 0, stride, 2 * stride, ...
    stream   one column of L tokens per sample    batch k holds window k of every column, and predicts every token that
                                                  has a predecessor
                                                  training: L = (tokens - 1) // batch size, and every epoch begins at a
                                                  random token; validation and test: L is rounded up

    perplexity = exp(CE)      CE in nats, the mean over all scored tokens
    bits per byte = CE / ln 2 * tokens / bytes, both of the split

The first token of a segment is predicted from the end of the previous one, and counts for its own segment.

Deviations
1. A training window begins at any token, drawn with replacement; the reference's begin at multiples of 128, and it
   reads each once per epoch.
2. Validation and test windows lie side by side by default, so that no token is scored twice; the reference's stride is
   a segment (``stride``).
3. The first token of every segment but the first counts (the reference leaves them out of its curve, but not out of its
   total).
4. No text is dropped: the last window is padded, and the padding is not scored. A single last token, which nothing
   predicts, is left out.
5. The epochs of a stream begin at different tokens, so that seeds differ (reference: at the first token). Less than a
   window per column of the training text is left out, and nothing of the others.
6. A batch of a stream has ``segments`` segments, and gradients cross them; the reference's has one, and the D segments
   before it are read again for their gradients.
7. ``<unk>`` of WikiText is ordinary text; the reference makes it GPT-2's end of text in WikiText-103, not in
   WikiText-2.

Shape suffixes: B batch, T tokens of a window, N tokens of a text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lit_memory.tasks.base import generator
from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import Curved, FiniteSplits, LossScored, Streamed
from lit_memory.tasks.planted_facts import load_tokenizer
from lit_memory.text.corpus import SOURCES, SPLITS, check_source, check_texts, load_corpus
from lit_memory.text.stream import Stream, build_stream
from lit_memory.text.tokenizers import BUILT_IN, VOCAB_SIZE, Tokenizer, check_tokenizer, vocabulary_size
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.fields import added
from lit_memory.util.metrics import MetricName
from lit_memory.util.provenance import cache_folder


class LanguageModeling(FiniteSplits, Streamed, LossScored, Curved):
    """Predict every token of a window of text."""

    metrics = ("perplexity", "bits_per_byte")
    minimized_metrics = metrics
    sources: ClassVar = {"source": SOURCES, "vocabulary": SOURCES, "tokenizer": BUILT_IN}
    curves: ClassVar = {"segment": ("segment_loss", "segment_bits_per_byte")}

    @dataclass
    class Config:
        source: str = "noise"
        """"noise", synthetic English; "shipped-wikitext-2" or "shipped-books"; a folder of books or of WikiText; or a
        data set on the hub (wikitext-..., fineweb-edu, pg19), see ``text.load_corpus``."""
        books: int | None = None
        """Maximum number of books (articles, pages) per split; default: all of a folder and of WikiText, 50 of noise,
        100,000 of FineWeb-Edu."""
        tokenizer: str = "word"
        """word, wikitext (words between spaces, line by line), char, bpe, gpt2, or any folder or name on the hub. Bits
        per byte mean little with words: white space and rare words are lost."""
        vocab_size: int = VOCAB_SIZE
        """Most token ids of the tokenizers word and bpe; char has 259, the tokenizer in a folder its own."""
        vocabulary: str = ""
        """Source of the text that the tokenizers word and bpe are trained on; default: ``source``. A trained model
        keeps its own."""
        segments: int = 8
        """Segments per window."""
        segment_len: int = 128
        """Tokens per segment; 0, with ``window``: a window is one segment."""
        window: int = added(0)
        """Tokens of a window, in place of ``segments``; its last segment may be short."""
        stride: int | None = None
        """Tokens between the beginnings of two windows of validation and test; default: the length of a window."""
        stream: bool = added(False)
        """Every batch holds the next window of every column of the text, and continues with the memory that the
        previous batch left."""
        test_segments: list[int] = field(default_factory=list)
        """Values of ``segments`` in the test; default: ``segments``."""
        test_window: list[int] = added([])
        """Values of ``window`` in the test, in place of ``test_segments``."""

        def __post_init__(self) -> None:
            at_least(1, self, "books", "vocab_size", "segments", "stride")
            at_least(0, self, "window")
            at_least(0 if self.window else 1, self, "segment_len")
            if self.test_window and (self.test_segments or not self.window):
                expected = "expected window beside it, and no test_segments"
                raise FieldError("test_window", self.test_window, expected)
            if self.stream and self.stride:
                raise FieldError("stride", self.stride, "expected none for a stream, whose windows follow each other")
            if self.length < 2:
                least = "expected at least 2 tokens in a window, of which the first is not scored"
                raise FieldError("window" if self.window else "segment_len", self.window or self.segment_len, least)
            check_source("source", self.source)
            check_source("vocabulary", self.vocabulary or self.source)
            check_tokenizer(self.tokenizer)

        @property
        def length(self) -> int:
            """Tokens per window."""
            return self.window or self.segments * self.segment_len

        @property
        def segment_count(self) -> int:
            """Segments per window."""
            return -(-self.length // (self.segment_len or self.length))

        @property
        def size_field(self) -> str:
            """The field that decides the length of a window."""
            return "window" if self.window else "segments"

    @property
    def vocab_size(self) -> int:
        return vocabulary_size(self.config.tokenizer, self.config.vocab_size)

    @property
    def segment_len(self) -> int | None:
        return self.config.segment_len or None

    @property
    def tokens(self) -> int:
        return self.config.length

    @property
    def material(self) -> str:
        return "" if self.config.source == "noise" else "text"

    @property
    def written(self) -> int:
        return self.config.segment_count - 1  # what the last segment writes is never read

    def test_axis(self) -> tuple[str, list]:
        """``segments``; ``window`` where that decides the length of a window."""
        axis = self.config.size_field
        return axis, getattr(self.config, f"test_{axis}") or [getattr(self.config, axis)]

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the text. Raises FieldError if it has more than ``vocab_size`` ids."""
        c = self.config
        tokenizer = load_tokenizer(type(self), c.tokenizer, c.vocab_size, c.vocabulary or c.source, c.books)
        if tokenizer.vocab_size > self.vocab_size:
            least = f"expected at least {tokenizer.vocab_size}, the ids of tokenizer {c.tokenizer!r}"
            raise FieldError("vocab_size", c.vocab_size, least)
        return tokenizer

    def check_files(self) -> None:
        check_texts(self.config.source, SPLITS, self.config.books)
        check_texts(self.config.vocabulary or self.config.source, ("train",), self.config.books)

    def text(self, split: str) -> Stream:
        """Tokens of a split. Raises FieldError for a text that is shorter than a window."""
        c = self.config
        text = load_text(c.source, split, c.books, self.tokenizer)
        if len(text) < c.length:
            found = f"all of {c.source}, split {split}, {len(text):,}; expected fewer, or more text"
            raise FieldError(c.size_field, getattr(c, c.size_field), f"a window has {c.length:,} tokens, {found}")
        return text

    def stride(self, split: str) -> int:
        """Tokens between the beginnings of two windows."""
        return 1 if split == "train" else self.config.stride or self.config.length

    @property
    def stream(self) -> bool:
        return self.config.stream

    def stream_steps(self, split: str, size: int) -> int:
        length = self.column_len(split, size)
        return length // self.config.length if split == "train" else -(-length // self.config.length)

    def column_len(self, split: str, size: int) -> int:
        """Predicted tokens in each of ``size`` columns. Raises FieldError for columns shorter than a window."""
        c, tokens = self.config, len(self.text(split)) - 1
        if tokens // size < c.length:
            column = f"a column of {c.source}, split {split}, in {size:,} columns, {tokens // size:,}"
            expected = f"a window has {c.length:,} tokens, {column}; expected fewer, or more text"
            raise FieldError(c.size_field, getattr(c, c.size_field), expected)
        return tokens // size if split == "train" else -(-tokens // size)

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        if not self.stream:
            return super().batch(seed, split, step, size)
        text, column_len, window = self.text(split), self.column_len(split, size), self.config.length
        epoch, k = divmod(step, self.stream_steps(split, size))
        first = int(torch.randint(len(text), (), generator=generator(seed, split, epoch))) if split == "train" else 0
        offsets_T = np.arange(k * window, (k + 1) * window + 1)  # in a column; the first token is read but not scored
        positions_BT = np.arange(size)[:, None] * column_len + offsets_T
        real_BT = (offsets_T <= column_len) & ((positions_BT < len(text)) | (split == "train"))
        tokens_BT = text.tokens_N[(first + positions_BT) % len(text)].astype(np.int64)
        ids_BT = np.where(real_BT, tokens_BT, self.tokenizer.pad_id)
        targets_BT = np.where(real_BT & (offsets_T > offsets_T[0]), ids_BT, -100)
        return self.make_batch(text, ids_BT, targets_BT, k > 0)

    def count(self, split: str) -> int | None:
        if self.stream:
            return None
        tokens, stride = len(self.text(split)), self.stride(split)
        return len(range(0, min(tokens - self.config.length + stride, tokens - 1), stride))

    def take(self, split: str, numbers: Sequence[int]) -> Batch:
        text, length, stride = self.text(split), self.config.length, self.stride(split)
        ids_BT = np.full((len(numbers), length), self.tokenizer.pad_id, np.int64)
        targets_BT = np.full_like(ids_BT, -100)
        for i, number in enumerate(numbers):
            tokens = text.tokens_N[number * stride : number * stride + length]
            ids_BT[i, : len(tokens)] = tokens
            targets_BT[i, 1 : len(tokens)] = tokens[1:]
        return self.make_batch(text, ids_BT, targets_BT)

    def make_batch(
        self, text: Stream, ids_BT: np.ndarray, targets_BT: np.ndarray, continues: bool | None = None
    ) -> Batch:
        """Batch of windows of a text."""
        size = len(ids_BT)
        meta = {
            "segments": torch.full((size,), self.config.segment_count),
            "bytes_per_token": torch.full((size,), text.num_bytes / len(text)),
        }
        ids, targets = torch.from_numpy(ids_BT), torch.from_numpy(targets_BT)
        return Batch(ids, targets, self.segment_len, meta=meta, continues=continues)

    def score_losses(self, loss_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        bits_BT = loss_BT / math.log(2) / batch.meta["bytes_per_token"][:, None]
        scored_BT, s = batch.scored_BT, self.segment_len or self.tokens
        values = {"loss": loss_BT[scored_BT], "bits_per_byte": bits_BT[scored_BT]}
        for i in self.curve_positions("segment"):
            columns = slice(i * s, (i + 1) * s)
            own = scored_BT[:, columns]
            values[str(MetricName("segment_loss", place=i))] = loss_BT[:, columns][own]
            values[str(MetricName("segment_bits_per_byte", place=i))] = bits_BT[:, columns][own]
        return values

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(means["loss"], 700.0))}  # exp overflows beyond

    def curve_positions(self, axis: str) -> list[int]:
        """Segments, counted from 0 as in the paper's figure; a stream has no first segment and so no curve."""
        return [] if self.stream else list(range(self.config.segment_count))


@lru_cache(maxsize=16)
def load_text(source: str, split: str, books: int | None, tokenizer: Tokenizer) -> Stream:
    """All texts of a split, as one stream of tokens."""
    return build_stream(load_corpus(source, split, books), tokenizer, cache_folder())
