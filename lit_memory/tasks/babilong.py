"""BABILong: the facts of one bAbI question, hidden in order between the sentences of a book.

Paper:     Kuratov et al. 2024, arXiv 2406.10149; as in Rodkin et al. 2024, arXiv 2407.04841, section 4.2 and appendix C
    (spec 3).
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de; github.com/booydar/babilong (the
    metric).

    context                                                            tail
    [noise ... fact ... noise ... fact ... noise, exactly T tokens]    question GEN answer EOS      T = segments *
    segment_len - margin

The last segment, which the model reads without writing, holds the end of the context and the tail; the answer and EOS
are scored.

Deviations
1. Stories are simulated and noise is placed when a batch is asked for, as a function of (seed, split, step): the
   reference shares one generator between its workers, which then draw the same noise.
2. Splits are disjoint by construction: a hash of facts and question decides the split of a simulated sample, and books
   belong to one split.
3. White space within a sentence of noise is one space: line ends would tell noise from facts.
4. A long sample is a slice of the cached tokens of the books, with the facts let in; a test reads it segment by segment
   and never builds it. Passages repeat where the books are shorter than the context.
5. A test may take its samples from a distributed set instead (``eval_set``, ``babilong_sets.py``). Their contexts are
   tokenized as ours are, sentence by sentence without line ends, and have any length: the first segment is then short,
   and padded under a mask.

Shape suffixes: B batch, b samples that have begun, T tokens, S tokens of a segment, F facts, N tokens of an answer.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal

import numpy as np
from numpy.random import PCG64, Generator

from lit_memory.tasks.babi.files import FEWEST_FACTS, PEOPLE, PLACES, WORDS, Question, labels_of, questions
from lit_memory.tasks.babilong_sets import check_set, load_set, part_name, sample_row
from lit_memory.tasks.planted_facts import Hidden, HiddenConfig, Sample, encoded
from lit_memory.text.corpus import check_source, load_corpus, sentences
from lit_memory.text.haystack import Haystack, build_haystack
from lit_memory.text.tokenizers import Tokenizer
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.fields import added
from lit_memory.util.provenance import cache_folder
from lit_memory.util.seeds import mixed_seed

RULES = tuple(FEWEST_FACTS)


class BABILong(Hidden):
    """Answer a bAbI question whose facts lie between the sentences of books."""

    metrics = ("exact_match", "babilong_compare")

    words = WORDS

    @dataclass
    class Config(HiddenConfig):
        """With 0 segments, a sample is facts alone, in one segment ("0k"); the margin is for question, GEN, answer and
        EOS."""

        task: Literal["qa1", "qa2", "qa3", "qa4", "qa5"] = "qa1"
        tokens_per_fact: int = 5
        """Questions with more than T / tokens_per_fact - 1 facts are left out (ARMT 5, Mamba 10)."""
        stories: str = "v1.2"
        """Rules of the simulator, v1.2 or lua; or a folder with the files of bAbI."""
        leading_space: bool = True
        """A space in front of every fact and every sentence (the ARMT code has none)."""
        facts_from: float = 0.0
        facts_to: float = 1.0
        """Facts lie in this part of the context."""
        eval_set: str = added("")
        """A set of samples that the test takes in place of its own, on the hub (RMT-team/babilong) or local: see
        ``babilong_sets.load_set``."""
        eval_revision: str | None = added(None)
        """Branch, tag or commit of ``eval_set`` on the hub."""
        eval_length: int | None = added(None)
        """What the samples of ``eval_set`` are called by: 64000 for 64k, 1000000 for 1M. Set by the test."""
        test_eval_length: list[int] = added([])
        """The lengths of ``eval_set`` that the test visits, in place of ``test_segments``."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, self, "segments")
            at_least(1, self, "tokens_per_fact")
            check_source("stories", self.stories, RULES)
            least = FEWEST_FACTS.get(self.stories, {}).get(self.task, 1)
            if (self.segment_len - self.margin) // self.tokens_per_fact <= least:
                raise FieldError(
                    "segment_len",
                    self.segment_len,
                    f"too short for {least} facts, the fewest of {self.task}; raise it or lower tokens_per_fact",
                )
            if not 0 <= self.facts_from < self.facts_to <= 1:
                raise FieldError(
                    "facts_to", self.facts_to, f"expected more than facts_from={self.facts_from}, both from 0 to 1"
                )
            check_set(self.eval_set, self.test_eval_length)
            part_name(self.eval_length or 0)

    @property
    def written(self) -> int:
        """Of an ``eval_set``, what its name says: its samples differ."""
        c = self.config
        return max((c.segments if c.eval_length is None else -(-c.eval_length // c.segment_len)) - 1, 0)

    def test_axis(self) -> tuple[str, list]:
        return ("eval_length", self.config.test_eval_length) if self.config.eval_set else super().test_axis()

    def remarks(self) -> list[str]:
        """Where contexts of the test are longer than the haystack, and so have sentences more than once."""
        c = self.config
        budgets = {
            task.config.segments: task.config.segments * c.segment_len - c.margin for _, task in self.test_conditions()
        }
        if c.eval_set or not any(budgets):
            return []
        noise = load_noise(self.tokenizer, c.haystack, c.books, "test", c.leading_space)
        return noise.remarks({f"{segments} segments": budget for segments, budget in budgets.items()})

    def in_parts(self, split: str) -> bool:
        return self.config.stories not in RULES or (split == "test" and bool(self.config.eval_set))

    def samples(self, seed: int, split: str, step: int, size: int) -> list[Sample]:
        """Samples in the order in which they are drawn."""
        c = self.config
        if split == "test" and c.eval_set:
            return [self.distributed(row) for row in self.rows(step * size, size)]
        rng = Generator(PCG64(mixed_seed(seed, f"babilong/{split}", step)))
        noise = load_noise(self.tokenizer, c.haystack, c.books, split, c.leading_space) if c.segments else None
        stream = questions(c.task, seed, split, step, size, c.stories)
        return [self.place(self.fitting(stream, n), n, noise, rng) for n in self.draw_segments(split, size, rng)]

    def rows(self, first: int, count: int) -> list[dict[str, str]]:
        """Rows ``first .. first + count`` of ``eval_set``, as they are. Raises ValueError where there are fewer."""
        c = self.config
        rows, place = load_set(c.eval_set, c.eval_length or 0, c.task, c.eval_revision, cache_folder() / "sets")
        if first + count > len(rows):
            raise ValueError(f"{place}: {len(rows)} samples, and number {first + count} is asked for; lower test_size")
        return [sample_row(rows, i, place) for i in range(first, first + count)]

    def distributed(self, row: dict[str, str]) -> Sample:
        """A row of ``eval_set`` as a sample without noise, whose context is one fact."""
        c = self.config
        context = np.concatenate(encoded(self.tokenizer, sentences(row["input"]), c.leading_space))
        full = max(len(context) - (c.segment_len - c.margin), 0)
        return Sample(
            None,
            0,
            [context],
            np.zeros(1, np.int64),
            1 - (-full // c.segment_len),
            len(context),
            *self.tail(row["question"], row["target"]),
        )

    def fitting(self, stream: Iterator[Question], segments: int) -> tuple[Question, list[np.ndarray]]:
        """The next question whose facts fit into so many segments, and the tokens of the facts."""
        c = self.config
        tokens = max(segments, 1) * c.segment_len - c.margin
        most, room = tokens // c.tokens_per_fact - 1, int(tokens * c.facts_to) - int(tokens * c.facts_from)
        for question in islice(stream, TRIES):
            if len(question.facts) <= most:
                facts = encoded(self.tokenizer, question.facts, c.leading_space)
                if sum(map(len, facts)) <= room:
                    return question, facts
        raise FieldError(
            "segments",
            segments,
            f"no question of {c.task} among {TRIES} has facts that fit into {tokens} tokens; raise segments or segment_len",
        )

    def place(
        self, chosen: tuple[Question, list[np.ndarray]], segments: int, noise: Haystack | None, rng: Generator
    ) -> Sample:
        """Draw where the noise begins and which gaps between its sentences hold the facts."""
        question, facts = chosen
        lengths = np.array([len(fact) for fact in facts])
        told, position, gaps_F = int(lengths.sum()), 0, np.zeros(len(facts), np.int64)
        tokens = segments * self.config.segment_len - self.config.margin if noise else told
        if noise:
            position = noise.place(rng)
            chosen_F = np.sort(rng.integers(*self.gaps(noise, position, tokens, told), len(facts)))
            gaps_F = np.minimum(noise.offset(position, chosen_F), tokens - told)
        starts_F = gaps_F + np.cumsum(lengths) - lengths
        return Sample(
            noise, position, facts, starts_F, max(segments, 1), tokens, *self.tail(question.text, question.answer)
        )

    def tail(self, question: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the question with GEN, and of the answer with EOS."""
        asked, told = encoded(self.tokenizer, [question, answer], self.config.leading_space)
        if len(asked) + len(told) + 2 > self.config.margin:
            raise FieldError(
                "margin",
                self.config.margin,
                f"expected at least {len(asked) + len(told) + 2}, the tokens of a question, GEN, its answer and EOS",
            )
        return np.append(asked, self.tokenizer.gen_id), np.append(told, self.tokenizer.eos_id)

    def gaps(self, noise: Haystack, position: int, tokens: int, told: int) -> tuple[int, int]:
        """From which gap on, and before which, facts may lie: gap k is in front of sentence k, and one more at the end
        of the context."""
        c = self.config
        first = noise.sentences(position, math.ceil(tokens * c.facts_from))
        last = noise.sentences(position, int(tokens * c.facts_to) - told) + (c.facts_to == 1)
        if first >= last:
            raise FieldError(
                "facts_to",
                c.facts_to,
                f"no sentence begins between {c.facts_from} and it in {tokens} tokens; widen the range",
            )
        return first, last

    def judge(self, target: str, said: str, ended: bool, question: str) -> dict[str, float]:
        found = babilong_compare(target, said, question, labels_of(self.config.task, self.config.stories))
        return super().judge(target, said, ended, question) | {"babilong_compare": float(found)}


TRIES = 10_000
"""Questions that are looked at for one that fits."""


def babilong_compare(target: str, output: str, question: str, labels: Sequence[str]) -> bool:
    """Whether the labels in the first sentence of ``output``, those of the question left out, are ``target`` and no
    other.

    Source: spec 3.8, the metric of the BABILong repository.
    """
    said = re.split(r"\.|<context>|<example>|question", output.lower())[0]
    asked = question.lower()
    return {label for label in map(str.lower, labels) if label in said and label not in asked} == {target.lower()}


@lru_cache(maxsize=16)
def load_noise(tokenizer: Tokenizer, haystack: str, books: int | None, split: str, leading_space: bool) -> Haystack:
    """The sentences of a split's books, without those that might state a fact."""
    return build_haystack(
        load_corpus(haystack, split, books),
        tokenizer,
        cache_folder(),
        without=(PEOPLE, PLACES),
        leading_space=leading_space,
    )
