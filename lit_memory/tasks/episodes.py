"""Tasks whose samples are episodes of lines, for models that remember lines; for all others, the same samples as text.

    layout "lines"    context: [line] [line] ... [line] [question], each left-aligned in line_tokens columns
                      tail:    prompt answer EOS
    layout "text"     [line line ... line question answer EOS], as in ``planted_facts.py``

A line is a fact, or a sentence of the noise between facts, cut after every ``line_tokens`` tokens. An empty line is one
pad token that counts as real. Episodes of a batch end together: a shorter one begins with lines without real tokens.

A share of the training samples is supervised: the model learns which lines support the answer. ``meta["support"]``
(B, H) has for every hop the distance of the supporting line from the question (1: the line before it; 0: no
supervision). Validation and test always have it, as nothing is trained on them. In layout "text", a training sample
has a second tail if ``supporting`` is positive: it asks for the facts themselves, and is scored if the sample is
supervised.

Source: Das, Ko, Dai et al. 2025 (MemReasoner), sections 4 and B; Nelson et al. 2024, arXiv 2407.01437, section 3 (spec
        4.1, 4.2, 6).

Shape suffixes: B batch, L tokens of a line, F facts, H hops, N generated tokens, X lines of a batch.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_memory.tasks.batch import Batch
from lit_memory.tasks.extras import Extras
from lit_memory.tasks.lines import NO_TOKENS, Lines
from lit_memory.tasks.placement import Placement
from lit_memory.tasks.planted_facts import TextConfig
from lit_memory.tasks.samples import QuestionAnswer, Sample, encode_texts, pad_rows, tail_segment, until
from lit_memory.text.haystack import Haystack
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.fields import added

CITE = "Supporting facts:"
"""Text after a question that asks for the facts themselves."""


@dataclass
class EpisodeConfig(TextConfig):
    """Settings of episodes.

    ``margin`` is for the tail in layout "text". In layout "lines", ``segment_len`` is for prompt, answer and EOS.
    """

    segment_len: int = 128
    margin: int = 48
    layout: Literal["lines", "text"] = "lines"
    tokens: int = 0
    """Tokens of a context, facts included; 0: facts without noise."""
    line_tokens: int = 64
    """Columns of a line (L); longer sentences are cut there. Facts that support an answer have to fit."""
    segment_lines: int = 16
    """Lines per segment."""
    supporting: float = 0.0
    """Share of training samples that are supervised with their supporting facts, chosen by a hash of their text."""
    apart: int = added(0)
    """Auxiliary lines per training sample in layout "lines": sentences of books outside the context, for models that
    learn to write lines (published: about one)."""
    mentioned: list[str] = added([])
    """Noun phrases, such as "the library", that the test has as places of the story and no sample of the training; the
    sentences of books may have their words. In layout "lines" every other auxiliary line is a sentence that mentions
    one and tells nothing, or a fact about others (``extras.py``); in layout "text" a training sample has a further
    tail, such a sentence from its first token on."""
    test_tokens: list[int] = field(default_factory=list)
    """Values of ``tokens`` in the test; default: ``tokens``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout == "text":
            self.check_margin()
        at_least(0, self, "tokens", "apart")
        at_least(1, self, "line_tokens", "segment_lines")
        if not 0 <= self.supporting <= 1:
            raise FieldError("supporting", self.supporting, "expected a share from 0 to 1")
        if self.mentioned and self.layout == "lines" and not self.apart:
            raise FieldError(
                "mentioned", self.mentioned, "expected none where apart is 0: auxiliary lines mention them"
            )
        axes = self.test_fields()
        if len(axes) > 1:
            expected = f"a test varies one field; expected none where {axes[0]} is given"
            raise FieldError(axes[1], getattr(self, axes[1]), expected)

    def test_fields(self) -> list[str]:
        """Fields ``test_...`` that have values."""
        return [name for name, values in vars(self).items() if name.startswith("test_") and values]


class Texts(NamedTuple):
    """Question and answers of an episode.

    question: in layout "text". line, prompt: in layout "lines", the last line of the context and the prompt of a tail.
    answers: one per tail in layout "lines", joined in layout "text".
    """

    question: str
    line: str
    prompt: str
    answers: Sequence[str]


@dataclass(frozen=True, eq=False)
class EpisodeSample(Sample):
    """A sample that can also be read as lines.

    line: tokens of the question's line. supervised: whether the model learns which facts support the answer.
    """

    line: np.ndarray = field(default_factory=NO_TOKENS.copy)
    supervised: bool = False


class EpisodeTask(Extras):
    """Answer questions about the lines of an episode.

    ``Config`` is an ``EpisodeConfig``, and ``samples`` returns ``EpisodeSample``s.
    """

    @property
    def written(self) -> int:
        """Segments of a context, roughly: lines that are not full take more."""
        c = self.config
        tokens = c.tokens if c.layout == "lines" else max(c.tokens - c.segment_len + c.margin, 0)
        return -(-tokens // c.segment_len)

    def test_axis(self) -> tuple[str, list]:
        """The ``test_`` field that has values, or ``tokens``."""
        given = self.config.test_fields()
        axis = given[0].removeprefix("test_") if given else "tokens"
        return axis, getattr(self.config, f"test_{axis}") or [self.config.tokens]

    def books(self, split: str) -> Haystack | None:
        """Sentences of books between the facts; None with other noise."""
        raise NotImplementedError

    def remarks(self) -> list[str]:
        """Names the contexts of the test that are longer than the books, so that sentences repeat."""
        lengths = dict.fromkeys(task.config.tokens for _, task in self.test_conditions())
        hay = self.books("test") if any(lengths) else None
        return hay.remarks({f"{tokens:,} tokens": tokens for tokens in lengths}) if hay else []

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        samples = self.samples(seed, split, step, size)
        if self.config.layout == "text":
            return self.lay_out(self.with_mentions(samples, seed, step) if split == "train" else samples, split)
        batch = self.lay_out_lines(samples, split)  # type: ignore[arg-type]
        if split != "train" or not self.config.apart:
            return batch
        return replace(batch, auxiliary_lines=self.auxiliary_lines(seed, step, size))

    def lay_out_lines(self, samples: Sequence[EpisodeSample], split: str) -> Batch:
        """Batch in layout "lines", with one tail for every answer of a sample."""
        self.check_answers(samples, split)
        c = self.config
        views = [Lines(sample, c.line_tokens) for sample in samples]
        prompt_B, starts = torch.tensor([len(sample.question) for sample in samples]), [NO_TOKENS] * len(samples)
        ids, targets = [], []
        for questions in zip(*(sample.questions for sample in samples), strict=True):
            ids_BS, targets_BS = tail_segment(starts, questions, c.segment_len, self.tokenizer.pad_id)
            ids.append(ids_BS)
            targets.append(targets_BS)
        support = [
            [(len(view) - view.line_of(fact)) * sample.supervised for fact in sample.support]
            for view, sample in zip(views, samples, strict=True)
        ]
        positions = {"question_start": torch.zeros_like(prompt_B), "answer_start": prompt_B}
        context = self.line_segments(samples, views)
        return Batch(
            torch.cat(ids, dim=1),
            torch.cat(targets, dim=1),
            c.segment_len,
            read_only=len(ids),
            meta=self.meta(samples) | positions | {"support": torch.tensor(support)},
            context=context if split == "test" else tuple(context),
            prompt_B=prompt_B if split == "test" else None,
        )

    def line_segments(
        self, samples: Sequence[EpisodeSample], views: Sequence[Lines]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Segments of the context: ids (B, segment_lines * L) and their mask. The question is the very last line."""
        c, pad_id = self.config, self.tokenizer.pad_id
        n, empty = c.segment_lines, np.array([pad_id])
        end = -(-(max(map(len, views)) + 1) // n) * n
        for first in range(0, end, n):
            rows_X = []
            for sample, view in zip(samples, views, strict=True):
                start = first - (end - 1 - len(view))  # the episode's line at the segment's first row; may be negative
                lines = view.read(max(start, 0), max(min(start + n, len(view)) - max(start, 0), 0))
                lines = [line if len(line) else empty for line in lines] + [sample.line] * (start + n > len(view))
                rows_X += [NO_TOKENS] * (n - len(lines)) + lines
            ids_XL, mask_XL = pad_rows(rows_X, c.line_tokens, pad_id)
            yield ids_XL.view(len(samples), -1), mask_XL.view(len(samples), -1)

    def make_sample(
        self, placement: Placement, support: Sequence[int], texts: Texts, split: str, key: Sequence[str]
    ) -> EpisodeSample:
        """Sample of placed facts, with its question.

        support: indices of the supporting facts. key: texts whose hash decides whether the sample is supervised.
        Raises FieldError for texts that do not fit into a tail or a line, and for an answer that the tokenizer cannot
        spell.
        """
        c, supervised = self.config, self.is_supervised(split, key)
        supporting = [placement.facts[i] for i in support]
        lengths = np.array([len(fact) for fact in placement.facts], np.int64)
        context_len = placement.room + int(lengths.sum())
        if c.layout == "lines":
            questions = self.line_questions(texts)
        else:
            questions = self.text_questions(texts, supporting if supervised else None, split)
        (line,) = encode_texts(self.tokenizer, [texts.line], leading_space=True)
        self.check_fit(questions, [line, *supporting], texts.answers)
        return EpisodeSample(
            placement.noise,
            placement.position,
            facts=list(placement.facts),
            starts_F=placement.gaps_F + np.cumsum(lengths) - lengths,
            segments=1 - (-max(context_len - c.segment_len + c.margin, 0) // c.segment_len),
            context_len=context_len,
            question=questions[0][0],
            answer=questions[0][1],
            more=questions[1:],
            line=line,
            support=support,
            supervised=supervised,
        )

    def check_fit(
        self, questions: Sequence[QuestionAnswer], lines: Sequence[np.ndarray], answers: Sequence[str]
    ) -> None:
        """Raise FieldError if a tail is too long, or one of the lines that must not be cut: that of the question and
        those of the supporting facts; or if an answer has a word without an id."""
        c = self.config
        self.check_room(questions)
        if c.layout == "lines" and (needed := max(map(len, lines))) > c.line_tokens:
            least = f"expected at least {needed}, the tokens of a question or a supporting fact"
            raise FieldError("line_tokens", c.line_tokens, least)
        for _, answer_T in questions[: len(answers)]:
            self.check_words(answer_T, ", ".join(answers))

    def check_room(self, questions: Sequence[QuestionAnswer]) -> None:
        """Raise FieldError if a tail is too long."""
        c = self.config
        name, most = ("segment_len", c.segment_len) if c.layout == "lines" else ("margin", c.margin)
        if (needed := max(len(question) + len(answer) for question, answer in questions)) > most:
            least = f"expected at least {needed}, the tokens of a question or prompt, its answer and EOS"
            raise FieldError(name, most, least)

    def line_questions(self, texts: Texts) -> list[QuestionAnswer]:
        """Prompt and answer of every tail in layout "lines"."""
        prompt, *answers = encode_texts(self.tokenizer, [texts.prompt, *texts.answers], leading_space=True)
        return [(prompt, np.append(answer, self.tokenizer.eos_id)) for answer in answers]

    def text_questions(self, texts: Texts, facts: Sequence[np.ndarray] | None, split: str) -> list[QuestionAnswer]:
        """Question and answer in layout "text"; in training with ``supporting`` also the question for the facts.

        facts: the supporting facts of a supervised sample, else None.
        """
        eos_id, given = self.tokenizer.eos_id, [texts.question, f"{texts.line} {CITE}", ", ".join(texts.answers)]
        question, cite, answer = encode_texts(self.tokenizer, given, leading_space=True)
        questions = [(question, np.append(answer, eos_id))]
        if split == "train" and self.config.supporting > 0:
            questions.append((cite, np.append(np.concatenate(facts), eos_id) if facts else NO_TOKENS))
        return questions

    def is_supervised(self, split: str, key: Sequence[str]) -> bool:
        """Whether a sample with these texts is supervised with its supporting facts."""
        digest = hashlib.blake2b("\n".join(key).encode(), digest_size=8, person=b"support").digest()
        return split != "train" or int.from_bytes(digest, "little") < self.config.supporting * 2**64

    def meta(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        return {"tokens": torch.full((len(samples),), self.config.tokens)}

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        shape = (len(predicted_BT), batch.read_only, -1)
        answers = []
        for tails, scored in zip(predicted_BT.view(shape), batch.scored_BT.view(shape), strict=True):
            answers.append(self.join_answers([tail[mask] for tail, mask in zip(tails, scored, strict=True)]))
        return self.score_answers(answers, batch)

    def score_text(self, generated_BN: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Metrics per sample; what was generated after several prompts, (B, R * new_tokens), counts as one answer."""
        tails = generated_BN.unflatten(1, (-1, min(generated_BN.shape[1], self.new_tokens)))
        return self.score_answers([self.join_answers(parts) for parts in tails], batch)

    def join_answers(self, answers: Sequence[Tensor] | Tensor) -> Tensor:
        """Tokens of several answers, each up to its EOS, as one; it ends with EOS if all of them have one."""
        parts = [until(answer.tolist(), self.tokenizer.eos_id) for answer in answers]
        tokens = [token for answer, _ in parts for token in answer]
        return torch.tensor(tokens + [self.tokenizer.eos_id] * all(ended for _, ended in parts))
