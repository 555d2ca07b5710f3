"""Tasks that plant facts in a long text and ask about them: BABILong, needles, episodes.

    context                                  tail
    [noise ... fact ... noise, T tokens]     question answer EOS      T = segments * segment_len - margin

The last segment, which the model reads without writing, holds the end of the context and the tail; the answer and EOS
are scored. A test generates its contexts segment by segment while they are read.

Shape suffixes: B batch, b samples of a batch that have begun, S tokens of a segment, T tokens, N generated tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from lit_memory.tasks.base import Task
from lit_memory.tasks.batch import Batch, Segment
from lit_memory.tasks.mixins import Prompted
from lit_memory.tasks.samples import Sample, full_segment, tail_segment, until
from lit_memory.text.corpus import SOURCES, SPLITS, check_source, check_texts, load_corpus
from lit_memory.text.tokenizers import (
    BUILT_IN,
    UNKNOWN,
    VOCAB_SIZE,
    Tokenizer,
    build_tokenizer,
    check_tokenizer,
    vocabulary_size,
)
from lit_memory.util.checks import FieldError, at_least, one_of
from lit_memory.util.provenance import cache_folder

ROUND = 8
"""Outside of a test, the last segment of a batch is as wide as its longest sample, rounded up to a multiple of this, so
that few different shapes occur."""


@lru_cache(maxsize=16)
def load_tokenizer(task: type[Task], name: str, vocab_size: int, source: str, books: int | None) -> Tokenizer:
    """Tokenizer of a task. ``word`` and ``bpe`` are trained on the training books of ``source``.

    The word tokenizer always knows the task's ``words``.
    """
    corpus, words = load_corpus(source, "train", books), getattr(task, "words", ())
    return build_tokenizer(name, corpus, cache_folder(), vocab_size, words)


@dataclass
class TextConfig:
    """Settings of the text, and of the segments in which it is read."""

    segment_len: int = 512
    margin: int = 20
    """Tokens reserved at the end of the last segment for the question, the answer and everything else in the tail."""
    haystack: str = "noise"
    """"noise", synthetic English; "shipped-books"; a folder of books; or a data set on the hub (pg19, wikitext-...),
    see ``text.load_corpus``."""
    books: int | None = None
    """Maximum number of books per split; default: all of a folder, 50 of noise, 100 of pg19."""
    tokenizer: str = "word"
    """word, char, bpe, gpt2, or any folder or name on the hub; not wikitext, to which a word and the full stop behind
    it are one."""
    vocab_size: int = VOCAB_SIZE
    """Most token ids of the tokenizers word and bpe; the tokenizer in a folder has its own."""
    vocabulary: str = ""
    """Source of the text that the tokenizers word and bpe are trained on; default: ``haystack``. A trained model keeps
    its own."""

    def __post_init__(self) -> None:
        one_of(self)
        at_least(1, self, "segment_len", "margin", "vocab_size", "books")
        check_source("haystack", self.haystack)
        check_source("vocabulary", self.vocabulary or self.haystack)
        check_tokenizer(self.tokenizer)
        if self.tokenizer == "wikitext":
            glued = "expected another one: in a fact a full stop stands behind a word, which it then does not know"
            raise FieldError("tokenizer", self.tokenizer, glued)

    def check_margin(self) -> None:
        """Raise FieldError if the margin leaves no room for the context in the last segment."""
        if self.margin >= self.segment_len:
            raise FieldError("margin", self.margin, f"expected less than segment_len={self.segment_len}")


@dataclass
class PlantedFactsConfig(TextConfig):
    """Settings of a text whose length is given in segments."""

    segments: int = 8
    """Segments per sample; with ``vary`` the maximum."""
    vary: float = 0.0
    """Share of training samples whose number of segments is drawn from 1 to ``segments``, independently."""
    test_segments: list[int] = field(default_factory=list)
    """Values of ``segments`` in the test; default: ``segments``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_margin()
        if not 0 <= self.vary <= 1:
            raise FieldError("vary", self.vary, "expected a share from 0 to 1")


class PlantedFacts(Prompted):
    """Answer questions about facts that are planted in a long text.

    ``Config`` is a ``PlantedFactsConfig``, or a ``TextConfig`` in tasks that override ``written``.
    """

    sources: ClassVar = {"haystack": SOURCES, "vocabulary": SOURCES, "tokenizer": BUILT_IN}
    words: ClassVar[tuple[str, ...]]
    """Texts whose words the word tokenizer has to know."""

    def check_files(self) -> None:
        check_texts(self.config.haystack, SPLITS, self.config.books)
        check_texts(self.config.vocabulary or self.config.haystack, ("train",), self.config.books)

    @property
    def vocab_size(self) -> int:
        return vocabulary_size(self.config.tokenizer, self.config.vocab_size)

    @property
    def segment_len(self) -> int:
        return self.config.segment_len

    @property
    def written(self) -> int:
        return max(self.config.segments - 1, 0)

    @property
    def material(self) -> str:
        hay = self.config.haystack != "noise" and any(task.reads_hay for _, task in self.test_conditions())
        return "text" if hay else ""

    @property
    def reads_hay(self) -> bool:
        """Whether sentences of ``haystack`` lie between the facts."""
        return True

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of texts, questions and answers."""
        c = self.config
        return load_tokenizer(type(self), c.tokenizer, c.vocab_size, c.vocabulary or c.haystack, c.books)

    def samples(self, seed: int, split: str, step: int, size: int) -> list[Sample]:
        """Draw ``size`` samples of a split, in order."""
        raise NotImplementedError

    def draw_segments(self, split: str, size: int, rng: Generator) -> list[int]:
        """Draw the number of segments of each of ``size`` samples."""
        c = self.config
        varied = rng.random(size) < (c.vary if split == "train" else 0)
        return np.where(varied, rng.integers(min(c.segments, 1), c.segments + 1, size), c.segments).tolist()

    @property
    def stop_id(self) -> int:
        return self.tokenizer.eos_id

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        return self.lay_out(self.samples(seed, split, step, size), split)

    def check_answers(self, samples: Sequence[Sample], split: str) -> None:
        """Raise FieldError for an answer that is longer than what a model generates in a test."""
        longest = max(len(answer) for sample in samples for _, answer in sample.questions)
        if split == "test" and longest > self.new_tokens:
            most = f"an answer has {longest} of its tokens with EOS, and a model generates at most {self.new_tokens}"
            raise FieldError("tokenizer", self.config.tokenizer, f"{most}; expected another one")

    def check_words(self, answer_T: np.ndarray, text: str) -> None:
        """Raise FieldError for an answer with a word that the tokenizer does not know."""
        if self.config.tokenizer == "word" and UNKNOWN in answer_T:
            expected = "expected one of task and vocabulary, or another tokenizer"
            raise FieldError("answer", text, f"tokenizer 'word' has no such word; {expected}")

    def lay_out(self, samples: Sequence[Sample], split: str) -> Batch:
        """Batch of samples, the longest first. ``meta["drawn"]`` (B,) has the places in which they were drawn."""
        self.check_answers(samples, split)
        drawn, c = sorted(range(len(samples)), key=lambda i: -samples[i].segments), self.config
        samples = [samples[i] for i in drawn]
        starts = [sample.segment(sample.segments - 1, c.segment_len, c.margin) for sample in samples]
        # A test generates, which may take more room than the answer.
        length = c.segment_len if split == "test" else self.tail_width(starts, samples)
        ids, targets = [], []
        for questions in zip(*(sample.questions for sample in samples), strict=True):
            ids_BS, targets_BS = tail_segment(starts, questions, length, self.tokenizer.pad_id)
            ids.append(ids_BS)
            targets.append(targets_BS)
        question_B = torch.tensor([len(start) for start in starts])
        answer_B = question_B + torch.tensor([len(sample.question) for sample in samples])
        context = self.context_segments(samples) if samples[0].segments > 1 else ()
        return Batch(
            torch.cat(ids, dim=1),
            torch.cat(targets, dim=1),
            length,
            read_only=len(ids),
            meta=self.meta(samples)
            | {"question_start": question_B, "answer_start": answer_B, "drawn": torch.tensor(drawn)},
            context=context if split == "test" else tuple(context),
            prompt_B=answer_B if split == "test" else None,
        )

    def tail_width(self, starts: Sequence[np.ndarray], samples: Sequence[Sample]) -> int:
        """Tokens of the last segment that holds every tail: the longest, rounded up to a multiple of ``ROUND``."""
        longest = max(
            len(start) + len(question) + len(answer)
            for start, sample in zip(starts, samples, strict=True)
            for question, answer in sample.questions
        )
        return min(self.config.segment_len, -(-longest // ROUND) * ROUND)

    def meta(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Properties of the samples, each (B,): see ``Batch.meta``."""
        return {"segments": torch.tensor([sample.segments for sample in samples])}

    def context_segments(self, samples: Sequence[Sample]) -> Iterator[Segment]:
        """Segments (b, S) before the last one. Samples are ordered from the longest on, and all end together."""
        c, most = self.config, samples[0].segments
        for s in range(most - 1):
            begun = [sample for sample in samples if s >= most - sample.segments]
            parts = [sample.segment(s - most + sample.segments, c.segment_len, c.margin) for sample in begun]
            yield full_segment(parts, c.segment_len, self.tokenizer.pad_id)

    def score_answer(self, target: str, answer: str, ended: bool, question: str) -> dict[str, float]:
        """Metrics of one answer.

        target: the right answer. answer: what the model generated before EOS. ended: whether it generated EOS.
        """
        return {"exact_match": float(ended and answer.strip() == target)}

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        answers = [row[scored] for row, scored in zip(predicted_BT, batch.scored_BT, strict=True)]
        return self.score_answers(answers, batch)

    def score_text(self, generated_BN: Tensor, batch: Batch) -> dict[str, Tensor]:
        return self.score_answers(list(generated_BN), batch)

    def score_answers(self, answers: Sequence[Tensor], batch: Batch) -> dict[str, Tensor]:
        """Metrics per sample, each (B,), from the tokens of one answer per sample."""
        scores: dict[str, list[float]] = {name: [] for name in self.metrics}
        tokenizer = self.tokenizer
        ids_BT, targets_BT = batch.ids_BT.tolist(), batch.targets_BT.tolist()
        starts, stops = batch.meta["question_start"].tolist(), batch.meta["answer_start"].tolist()
        for answer, ids, targets, start, stop in zip(answers, ids_BT, targets_BT, starts, stops, strict=True):
            target = tokenizer.decode([t for t in targets if t not in (-100, tokenizer.eos_id)]).strip()
            tokens, ended = until(answer.tolist(), tokenizer.eos_id)
            question = tokenizer.decode(ids[start:stop])
            for name, value in self.score_answer(target, tokenizer.decode(tokens), ended, question).items():
                scores[name].append(value)
        return {name: torch.tensor(values, device=batch.ids_BT.device) for name, values in scores.items()}
