"""BABILong: the facts of one bAbI question, planted in order between the sentences of books.

Paper:     Kuratov et al. 2024, arXiv 2406.10149; as in Rodkin et al. 2024, arXiv 2407.04841, section 4.2 and appendix C
    (spec 3).
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de; github.com/booydar/babilong (the
    metric).

    context                                                            tail
    [noise ... fact ... noise ... fact ... noise, exactly T tokens]    question GEN answer EOS
    T = segments * segment_len - margin

The last segment, which the model reads without writing, holds the end of the context and the tail; the answer and EOS
are scored.

Deviations
1. Stories are simulated and noise is drawn for every batch, as a function of (seed, split, step): the reference shares
   one generator between its workers, which then draw the same noise.
2. Splits are disjoint by construction: a hash of facts and question assigns a simulated sample to a split, and every
   book belongs to one split.
3. White space within a sentence of noise is one space: line ends would distinguish noise from facts.
4. A long sample is a slice of the cached tokens of the books, with the facts inserted; a test reads it segment by
   segment and never holds all of it. Passages repeat if the books are shorter than the context.
5. A test may use the samples of a distributed set instead (``eval_set``, ``babilong_sets.py``). Their contexts are
   tokenized like ours, sentence by sentence without line ends, and have any length: the first segment is then short,
   and padded under a mask.
6. Of stories from files, a batch begins at question step * size and passes over those whose facts do not fit, so that
   the next one may ask some of its questions again (of 200 of qa2 in 8 segments of 64 tokens, one; of qa3, twenty).
7. With ``short_stories``, a simulated story is asked a question that fits, where it has one; the reference draws one of
   the whole story's questions, and another story if that does not fit.
8. Noise has long sentences for a narrow ``facts_from`` to ``facts_to``, too; facts that find no gap are passed over.
9. Questions that do not fit are left out, as in the reference, whose 16,000 tokens have room for all. In segments of 64
   tokens, short tests then ask other questions: 200 of v1.2's qa3 have 41 facts on average, at most 82, in 8 segments,
   and 52, at most 232, in 32 or more. Of its qa1, qa2 and qa5, tests of 8 segments and more ask the same.

Shape suffixes: F facts.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from lit_memory.tasks.babi.files import (
    FEWEST_FACTS,
    PEOPLE,
    SHIPPED_STORIES,
    WORDS,
    check_stories,
    labels_of,
    questions,
)
from lit_memory.tasks.babi.world import PLACES, Question
from lit_memory.tasks.babilong_sets import check_rows, check_set, load_set, part_name, sample_row
from lit_memory.tasks.base import numpy_generator
from lit_memory.tasks.mixins import ReadInOrder
from lit_memory.tasks.planted_facts import PlantedFacts, PlantedFactsConfig
from lit_memory.tasks.samples import QuestionAnswer, Sample, encode_texts
from lit_memory.text.corpus import check_source, load_corpus, sentences
from lit_memory.text.haystack import Haystack, build_haystack
from lit_memory.text.tokenizers import Tokenizer
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.fields import added
from lit_memory.util.provenance import cache_folder

RULES = tuple(FEWEST_FACTS)
"""Names of the rules of the simulator."""
BEGINNINGS = 100
"""Beginnings of the noise that are drawn until one has room for facts where they may lie."""
TRIES = 10_000
"""Maximum number of questions that are drawn to find one that fits."""


class BABILong(PlantedFacts, ReadInOrder):
    """Answer a bAbI question whose facts lie between the sentences of books."""

    metrics = ("exact_match", "babilong_compare")
    visible = ("depth",)
    sources: ClassVar = {**PlantedFacts.sources, "stories": (*RULES, SHIPPED_STORIES), "eval_set": ()}

    words = WORDS

    @dataclass
    class Config(PlantedFactsConfig):
        """Settings of BABILong. With ``segments`` 0, a sample is facts without noise, in one segment ("0k"). ``margin``
        is for question, GEN, answer and EOS."""

        task: Literal["qa1", "qa2", "qa3", "qa4", "qa5"] = "qa1"
        tokens_per_fact: int = 5
        """Questions with more than T / tokens_per_fact - 1 facts are left out (ARMT 5, Mamba 10)."""
        stories: str = "v1.2"
        """Rules of the simulator, v1.2 or lua; or the files of bAbI: shipped-babi, or a folder."""
        short_stories: bool = added(False)
        """End a simulated story where the context has no room for the facts of a further question. Default: draw all
        five questions, of which one is chosen, and leave it out if it does not fit; most are, where contexts are short,
        which takes longer than a training step."""
        leading_space: bool = True
        """Put a space in front of every fact and every sentence (the ARMT code does not)."""
        facts_from: float = 0.0
        """Share of the context after which facts may lie."""
        facts_to: float = 1.0
        """Share of the context before which facts lie."""
        eval_set: str = added("")
        """Distributed set whose samples the test uses, on the hub (RMT-team/babilong) or local: see
        ``babilong_sets.load_set``. Default: the test draws its own samples."""
        eval_revision: str | None = added(None)
        """Branch, tag or commit of ``eval_set`` on the hub."""
        eval_length: int | None = added(None)
        """Nominal length of the samples of ``eval_set``: 64000 for 64k, 1000000 for 1M. Set by the test."""
        test_eval_length: list[int] = added([])
        """Values of ``eval_length`` in the test, in place of ``test_segments``."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, self, "segments")
            at_least(1, self, "tokens_per_fact")
            check_source("stories", self.stories, (*RULES, SHIPPED_STORIES))
            least = FEWEST_FACTS.get(self.stories, {}).get(self.task, 1)
            if (self.segment_len - self.margin) // self.tokens_per_fact <= least:
                expected = f"too short for {least} facts, the fewest of {self.task}; raise it or lower tokens_per_fact"
                raise FieldError("segment_len", self.segment_len, expected)
            if not 0 <= self.facts_from < self.facts_to <= 1:
                expected = f"expected more than facts_from={self.facts_from}, both from 0 to 1"
                raise FieldError("facts_to", self.facts_to, expected)
            check_set(self.eval_set, self.test_eval_length)
            part_name(self.eval_length or 0)

    def check_files(self) -> None:
        super().check_files()
        check_stories(self.config.stories, self.config.task)
        for length in self.config.test_eval_length:
            check_rows(self.config.eval_set, length, self.config.task)

    @property
    def material(self) -> str:
        return "text" if self.config.eval_set else super().material  # the distributed sets have PG19

    @property
    def reads_hay(self) -> bool:
        return self.config.segments > 0

    @property
    def written(self) -> int:
        """Segments before the last one; of an ``eval_set``, by its nominal length, as its samples differ."""
        c = self.config
        segments = c.segments if c.eval_length is None else -(-c.eval_length // c.segment_len)
        return max(segments - 1, 0)

    def test_axis(self) -> tuple[str, list]:
        return ("eval_length", self.config.test_eval_length) if self.config.eval_set else super().test_axis()

    def remarks(self) -> list[str]:
        """Names the contexts of the test that are longer than the haystack, so that sentences repeat."""
        c = self.config
        segments = dict.fromkeys(task.config.segments for _, task in self.test_conditions())
        if c.eval_set or not any(segments):
            return []
        noise = load_noise(self.tokenizer, c.haystack, c.books, "test", c.leading_space)
        return noise.remarks({f"{n} segments": n * c.segment_len - c.margin for n in segments})

    def in_order(self, split: str) -> bool:
        return self.config.stories not in RULES or (split == "test" and bool(self.config.eval_set))

    def samples(self, seed: int, split: str, step: int, size: int) -> list[Sample]:
        c = self.config
        if split == "test" and c.eval_set:
            return [self.from_row(row) for row in self.rows(step * size, size)]
        rng = numpy_generator(seed, f"babilong/{split}", step)
        noise = load_noise(self.tokenizer, c.haystack, c.books, split, c.leading_space) if c.segments else None
        segments = self.draw_segments(split, size, rng)
        most = self.most_facts(max(segments)) if c.short_stories else math.inf
        stream = questions(c.task, seed, split, step, size, c.stories, most)
        return [self.next_planted(stream, n, noise, rng) for n in segments]

    def rows(self, first: int, count: int) -> list[dict[str, str]]:
        """Rows ``first`` to ``first + count - 1`` of ``eval_set``. Raises ValueError if the set has fewer."""
        c = self.config
        rows, source = load_set(c.eval_set, c.eval_length or 0, c.task, c.eval_revision, cache_folder() / "sets")
        if first + count > len(rows):
            raise ValueError(f"{source}: {len(rows)} samples, and number {first + count} is asked for; lower test_size")
        return [sample_row(rows, i, source) for i in range(first, first + count)]

    def from_row(self, row: dict[str, str]) -> Sample:
        """Sample of a row of ``eval_set``: without noise, as its whole context is one fact."""
        c = self.config
        context = np.concatenate(encode_texts(self.tokenizer, sentences(row["input"]), c.leading_space))
        segments = 1 - (-max(len(context) - (c.segment_len - c.margin), 0) // c.segment_len)
        tail = self.tail(row["question"], row["target"])
        return Sample(None, 0, [context], np.zeros(1, np.int64), segments, len(context), *tail)

    def room(self, segments: int) -> int:
        """Tokens of a context of ``segments`` segments; of one of facts alone (0), at most."""
        return max(segments, 1) * self.config.segment_len - self.config.margin

    def most_facts(self, segments: int) -> int:
        """Facts of a question that ``segments`` segments have room for, roughly."""
        return self.room(segments) // self.config.tokens_per_fact - 1

    def next_fitting(self, stream: Iterator[Question], segments: int) -> tuple[Question, list[np.ndarray]]:
        """The next question whose facts fit into ``segments`` segments, and the tokens of its facts."""
        c = self.config
        tokens, most = self.room(segments), self.most_facts(segments)
        room = int(tokens * c.facts_to) - int(tokens * c.facts_from)
        for question in islice(stream, TRIES):
            if len(question.facts) <= most:
                facts = encode_texts(self.tokenizer, question.facts, c.leading_space)
                if sum(map(len, facts)) <= room:
                    return question, facts
        fewer = f"has facts that fit into {tokens} tokens; raise segments or segment_len"
        raise FieldError("segments", segments, f"no question of {c.task} among {TRIES} {fewer}")

    def next_planted(self, stream: Iterator[Question], segments: int, noise: Haystack | None, rng: Generator) -> Sample:
        """The sample of the next question whose facts fit and find a place."""
        for _ in range(BEGINNINGS):
            if sample := self.plant(*self.next_fitting(stream, segments), segments, noise, rng):
                return sample
        start, tokens = self.config.facts_from, self.room(segments)
        wider = f"no sentence begins between {start} and it in {tokens} tokens; widen the range"
        raise FieldError("facts_to", self.config.facts_to, wider)

    def plant(
        self, question: Question, facts: list[np.ndarray], segments: int, noise: Haystack | None, rng: Generator
    ) -> Sample | None:
        """Draw where the noise begins and which gaps between its sentences hold the facts; None where no gap can."""
        lengths = np.array([len(fact) for fact in facts])
        fact_tokens, position, gaps_F = int(lengths.sum()), 0, np.zeros(len(facts), np.int64)
        tokens = self.room(segments) if noise else fact_tokens
        if noise:
            place = self.draw_place(noise, tokens, fact_tokens, rng)
            if place is None:
                return None
            position, first, last = place
            chosen_F = np.sort(rng.integers(first, last, len(facts)))
            gaps_F = np.minimum(noise.offset(position, chosen_F), tokens - fact_tokens)
        starts_F = gaps_F + np.cumsum(lengths) - lengths
        tail = self.tail(question.text, question.answer)
        return Sample(noise, position, facts, starts_F, max(segments, 1), tokens, *tail, support=question.support)

    def meta(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Adds ``depth``, percent of the context before the earliest supporting fact; not of an ``eval_set``."""
        if not all(sample.support for sample in samples):
            return super().meta(samples)
        depths = [100 * sample.starts_F[min(sample.support)] / sample.context_len for sample in samples]
        return super().meta(samples) | {"depth": torch.tensor(depths, dtype=torch.float32)}

    def tail(self, question: str, answer: str) -> QuestionAnswer:
        """Tokens of the question with GEN, and of the answer with EOS."""
        question_ids, answer_ids = encode_texts(self.tokenizer, [question, answer], self.config.leading_space)
        self.check_words(answer_ids, answer)
        needed = len(question_ids) + len(answer_ids) + 2
        if needed > self.config.margin:
            least = f"expected at least {needed}, the tokens of a question, GEN, its answer and EOS"
            raise FieldError("margin", self.config.margin, least)
        return np.append(question_ids, self.tokenizer.gen_id), np.append(answer_ids, self.tokenizer.eos_id)

    def draw_place(self, noise: Haystack, tokens: int, fact_tokens: int, rng: Generator) -> tuple[int, ...] | None:
        """Draw where the context begins in the noise: where a sentence begins in the part that may hold facts. Also
        the first gap there and the one after the last; None where facts of this length find none. Gap k is in front of
        sentence k of the noise; another one is at the end of the context."""
        c = self.config
        for _ in range(BEGINNINGS):
            position = noise.random_start(rng)
            first = noise.sentences(position, math.ceil(tokens * c.facts_from))
            last = noise.sentences(position, int(tokens * c.facts_to) - fact_tokens) + (c.facts_to == 1)
            if first < last:
                return position, first, last
        return None

    def score_answer(self, target: str, answer: str, ended: bool, question: str) -> dict[str, float]:
        right = babilong_compare(target, answer, question, labels_of(self.config.task, self.config.stories))
        return super().score_answer(target, answer, ended, question) | {"babilong_compare": float(right)}


def babilong_compare(target: str, output: str, question: str, labels: Sequence[str]) -> bool:
    """Whether the only label in the first sentence of ``output`` is ``target``; labels in the question do not count.

    Source: spec 3.8, the metric of the BABILong repository.
    """
    sentence = re.split(r"\.|<context>|<example>|question", output.lower())[0]
    named = {label for label in map(str.lower, labels) if label in sentence and label not in question.lower()}
    return named == {target.lower()}


@lru_cache(maxsize=16)
def load_noise(tokenizer: Tokenizer, haystack: str, books: int | None, split: str, leading_space: bool) -> Haystack:
    """Sentences of a split's books, without those that might state a fact."""
    return build_haystack(
        load_corpus(haystack, split, books),
        tokenizer,
        cache_folder(),
        without=(PEOPLE, PLACES),
        leading_space=leading_space,
    )
