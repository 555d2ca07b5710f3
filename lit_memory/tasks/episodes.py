"""What tasks share whose samples are episodes of lines, for models that remember lines; and the same samples as plain
text, for all others.

    layout "lines"    context: [line] [line] ... [line] [question], each left-aligned in line_tokens columns    tail:
    prompt answer EOS layout "text"     as ``hidden.py`` has it: [line line ... line question answer EOS]

A line is a fact, or a sentence of the noise between facts, cut after every ``line_tokens`` tokens. A fact without
tokens is an empty line: one pad token that is real. Episodes end together: a shorter one begins with lines that have no
real token.

Of a share of the training samples a model is told which lines support the answer: ``meta["support"]`` (B, H) counts
them back from the question (1: the line before it; 0: not told), hop by hop. Nothing learns from validation and test,
so there it is told for all. As text, a training sample of the share has a second tail that asks for the facts
themselves; another sample has the tail, too, without targets.

Source: Das, Ko, Dai et al. 2025 (MemReasoner), sections 4 and B; Nelson et al. 2024, arXiv 2407.01437, section 3 (spec
    4.1, 4.2, 6).

Shape suffixes: B batch, L tokens of a line, F facts, H hops, N tokens of an answer, X lines of a batch.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.random import PCG64, Generator
from torch import Tensor

from lit_memory.tasks.base import Batch
from lit_memory.tasks.planted_facts import Asked, Hidden, Sample, TextConfig, encoded, padded, tail, until
from lit_memory.text.haystack import Haystack
from lit_memory.text.tokenizers import UNKNOWN, Tokenizer
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.fields import added
from lit_memory.util.seeds import mixed_seed

CITE = "Supporting facts:"
"""Follows a question that asks for the facts themselves."""
NOTHING = np.empty(0, np.int32)


@dataclass
class EpisodesConfig(TextConfig):
    """The margin is for what text asks and answers; ``line_tokens`` and ``segment_lines`` are for lines, where
    ``segment_len`` holds prompt, answer and EOS."""

    segment_len: int = 128
    margin: int = 48
    layout: Literal["lines", "text"] = "lines"
    tokens: int = 0
    """Tokens of a context, facts included; 0: the facts alone."""
    line_tokens: int = 64
    """Columns of a line (L); a longer sentence is cut there."""
    segment_lines: int = 16
    """Lines of a segment."""
    supporting: float = 0.0
    """Share of the training samples of which the supporting facts are told, chosen by a hash of their text."""
    apart: int = added(0)
    """Sentences of books that come with every training sample of lines, in no context (published: about one), for
    models that learn to write lines."""
    test_tokens: list[int] = field(default_factory=list)
    """Tokens of the contexts that the test visits; default: ``tokens``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout == "text":
            self.check_margin()
        at_least(0, self, "tokens", "apart")
        at_least(1, self, "line_tokens", "segment_lines")
        if not 0 <= self.supporting <= 1:
            raise FieldError("supporting", self.supporting, "expected a share from 0 to 1")
        if len(axes := [name for name, values in vars(self).items() if name.startswith("test_") and values]) > 1:
            raise FieldError(
                axes[1], getattr(self, axes[1]), f"a test varies one field; expected none where {axes[0]} is given"
            )


class Place(NamedTuple):
    """Where the facts of a context lie: between ``room`` tokens of noise from ``position`` on, behind so many of them
    each."""

    facts: Sequence[np.ndarray]
    gaps_F: np.ndarray
    noise: Haystack | None = None
    position: int = 0
    room: int = 0


class Texts(NamedTuple):
    """What is asked of a context: ``question`` in text, ``line`` and ``prompt`` in lines; one answer to a tail of
    lines, all of them in one of text."""

    question: str
    line: str
    prompt: str
    answers: Sequence[str]


@dataclass(frozen=True, eq=False)
class Episode(Sample):
    """A sample that may also be read as lines. line: tokens of the question. support: numbers of the facts that support
    the answer, hop by hop."""

    line: np.ndarray = field(default_factory=NOTHING.copy)
    support: Sequence[int] = ()
    told: bool = False


class Lines:
    """The context of a sample as lines of at most ``most`` tokens; any of them can be read without those before it."""

    def __init__(self, sample: Sample, most: int) -> None:
        self.sample, self.most = sample, most
        self.noise = cut(sample.noise, most) if sample.noise else None
        lengths_F = np.array([len(fact) for fact in sample.facts], np.int64)
        before_F = sample.starts_F - (np.cumsum(lengths_F) - lengths_F)
        self.ends = [
            sample.position,
            *(sample.position + before_F).tolist(),
            sample.position + sample.context - int(lengths_F.sum()),
        ]
        counts = np.empty(2 * len(lengths_F) + 1, np.int64)  # of noise, a fact, noise, ..., a fact, noise
        counts[::2] = [self.between(a, b) for a, b in pairwise(self.ends)]
        counts[1::2] = np.maximum(1, -(-lengths_F // most))
        self.firsts = [0, *np.cumsum(counts).tolist()]

    def __len__(self) -> int:
        return self.firsts[-1]

    def number(self, fact: int) -> int:
        """The line that a fact is, or begins with."""
        return self.firsts[2 * fact + 1]

    def between(self, start: int, stop: int) -> int:
        """How many lines the noise from ``start`` to ``stop`` has; both begin one."""
        return 0 if self.noise is None or start == stop else 1 + self.noise.sentences(start + 1, stop - start - 1)

    def read(self, first: int, count: int) -> list[np.ndarray]:
        """Lines ``first .. first + count``; an empty one has no tokens."""
        part, rows = int(np.searchsorted(self.firsts, first, side="right")) - 1, []
        while len(rows) < count:
            skip = first + len(rows) - self.firsts[part]
            rows += self.part(part, skip, min(self.firsts[part + 1] - self.firsts[part] - skip, count - len(rows)))
            part += 1
        return rows

    def part(self, part: int, skip: int, count: int) -> list[np.ndarray]:
        """``count`` lines of a fact or of the noise between two, without its first ``skip``."""
        if part % 2:
            fact = self.sample.facts[part // 2]
            return [fact[k * self.most : (k + 1) * self.most] for k in range(skip, skip + count)]
        if self.noise is None or not count:
            return []
        start, stop = self.ends[part // 2], self.ends[part // 2 + 1]
        starts = (
            start + 1 + self.noise.offset(start + 1, np.arange(skip, skip + count + 1) - 1)
        )  # of line k > 0, and of the next one
        starts[0] = start if skip == 0 else starts[0]
        starts[-1] = min(starts[-1], stop)
        tokens, edges = self.noise.tokens(int(starts[0]), int(starts[-1] - starts[0])), (starts - starts[0]).tolist()
        return [tokens[a:b] for a, b in pairwise(edges)]


@lru_cache(maxsize=8)
def cut(noise: Haystack, most: int) -> Haystack:
    """The same tokens, whose sentences are cut after every ``most`` of them."""
    lengths_S = np.diff(noise.starts_S, append=len(noise))
    pieces_S = -(-lengths_S // most)
    nth = np.arange(pieces_S.sum()) - np.repeat(np.cumsum(pieces_S) - pieces_S, pieces_S)
    return Haystack(noise.tokens_N, np.repeat(noise.starts_S, pieces_S) + most * nth)


class Episodes(Hidden):
    """Answer from the lines of an episode. ``Config`` is an ``EpisodesConfig``; ``samples`` are ``Episode``s."""

    @property
    def written(self) -> int:
        """About as many as hold the tokens of a context; lines that are not full take more."""
        c = self.config
        return -(-(c.tokens if c.layout == "lines" else max(c.tokens - c.segment_len + c.margin, 0)) // c.segment_len)

    def test_axis(self) -> tuple[str, list]:
        """The field that has values, or ``tokens``."""
        given = [
            name.removeprefix("test_")
            for name, values in vars(self.config).items()
            if name.startswith("test_") and values
        ]
        axis = given[0] if given else "tokens"
        return axis, getattr(self.config, f"test_{axis}") or [self.config.tokens]

    def prose(self, split: str) -> Haystack:
        """The sentences of books, whatever is between the facts."""
        raise NotImplementedError

    def books(self, split: str) -> Haystack | None:
        """The sentences of books between the facts; None where there is other noise, or none."""
        raise NotImplementedError

    def remarks(self) -> list[str]:
        """Where contexts of the test are longer than the books, and so have sentences more than once."""
        lengths = dict.fromkeys(task.config.tokens for _, task in self.test_conditions())
        hay = self.books("test") if any(lengths) else None
        return hay.remarks({f"{tokens:,} tokens": tokens for tokens in lengths}) if hay else []

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        samples = self.samples(seed, split, step, size)
        if self.config.layout == "text":
            return self.laid_out(samples, split)
        batch = self.in_lines(samples, split)  # type: ignore[arg-type]
        return replace(batch, apart=self.apart(seed, step, size)) if split == "train" and self.config.apart else batch

    def apart(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Uniformly drawn sentences of the training's books, cut like lines: ids (B, n, L) and their mask."""
        c, rng = self.config, Generator(PCG64(mixed_seed(seed, "apart/train", step)))
        hay = cut(self.prose("train"), c.line_tokens)
        places = [hay.place(rng) for _ in range(size * c.apart)]
        ids_XL, mask_XL = rows_of(
            [hay.tokens(place, int(hay.offset(place, 1))) for place in places], c.line_tokens, self.tokenizer.pad_id
        )
        return ids_XL.unflatten(0, (size, -1)), mask_XL.unflatten(0, (size, -1))

    def in_lines(self, episodes: Sequence[Episode], split: str) -> Batch:
        """A batch in layout "lines"; a tail to every hop that has an answer of its own."""
        c = self.config
        views, prompts = (
            [Lines(episode, c.line_tokens) for episode in episodes],
            torch.tensor([len(episode.question) for episode in episodes]),
        )
        asked = zip(*([(episode.question, episode.answer), *episode.more] for episode in episodes), strict=True)
        ids, targets = zip(
            *(tail([NOTHING] * len(episodes), each, c.segment_len, self.tokenizer.pad_id) for each in asked),
            strict=True,
        )
        support = [
            [(len(v) - v.number(fact)) * e.told for fact in e.support] for v, e in zip(views, episodes, strict=True)
        ]
        meta = self.meta(episodes) | {
            "asked": torch.zeros_like(prompts),
            "prompt": prompts,
            "support": torch.tensor(support),
        }
        context, test = self.segments_of(episodes, views), split == "test"
        options = {"meta": meta, "context": context if test else tuple(context), "prompt_B": prompts if test else None}
        return Batch(torch.cat(ids, dim=1), torch.cat(targets, dim=1), c.segment_len, len(ids), **options)

    def segments_of(self, episodes: Sequence[Episode], views: Sequence[Lines]) -> Iterator[tuple[Tensor, Tensor]]:
        """The context, segment by segment: ids (B, lines * L) and their mask. The last line of the last one is the
        question."""
        c, pad_id = self.config, self.tokenizer.pad_id
        n, empty = c.segment_lines, np.array([pad_id])
        end = -(-(max(map(len, views)) + 1) // n) * n
        for first in range(0, end, n):
            rows_X = []
            for episode, view in zip(episodes, views, strict=True):
                start = first - (end - 1 - len(view))  # the number of the segment's first line
                shown = view.read(max(start, 0), max(min(start + n, len(view)) - max(start, 0), 0))
                shown = [row if len(row) else empty for row in shown] + [episode.line] * (start + n > len(view))
                rows_X += [NOTHING] * (n - len(shown)) + shown
            ids_XL, mask_XL = rows_of(rows_X, c.line_tokens, pad_id)
            yield ids_XL.view(len(episodes), -1), mask_XL.view(len(episodes), -1)

    def episode(self, place: Place, support: Sequence[int], texts: Texts, split: str, key: Sequence[str]) -> Episode:
        """A sample of facts in their places, and what is asked of it; by the texts of ``key`` it is told what supports
        the answer.

        Raises ValueError for what does not fit into a tail or a line, and for an answer with a word that the tokenizer
        does not have.
        """
        c, tokenizer, told = self.config, self.tokenizer, self.told(split, key)
        lengths = np.array([len(fact) for fact in place.facts], np.int64)
        context = place.room + int(lengths.sum())
        segments = 1 - (-max(context - c.segment_len + c.margin, 0) // c.segment_len)
        asked, more = (
            self.lines_asked(texts)
            if c.layout == "lines"
            else self.text_asked(texts, [place.facts[i] for i in support], split, told)
        )
        (line,) = encoded(tokenizer, [texts.line], leading_space=True)
        name, most = ("segment_len", c.segment_len) if c.layout == "lines" else ("margin", c.margin)
        if (needed := max(len(question) + len(answer) for question, answer in [asked, *more])) > most:
            raise FieldError(
                name, most, f"expected at least {needed}, the tokens of a question or prompt, its answer and EOS"
            )
        if c.layout == "lines" and len(line) > c.line_tokens:
            raise FieldError("line_tokens", c.line_tokens, f"expected at least {len(line)}, the tokens of a question")
        if c.tokenizer == "word" and any(UNKNOWN in answer for _, answer in [asked, *more[: len(texts.answers) - 1]]):
            told_by = "expected one of task and vocabulary, or another tokenizer"
            raise FieldError("answer", ", ".join(texts.answers), f"tokenizer 'word' has no such word; {told_by}")
        starts_F = place.gaps_F + np.cumsum(lengths) - lengths
        return Episode(
            place.noise,
            place.position,
            list(place.facts),
            starts_F,
            segments,
            context,
            *asked,
            more,
            line,
            support,
            told,
        )

    def lines_asked(self, texts: Texts) -> tuple[Asked, list[Asked]]:
        """A prompt and an answer for every tail of lines: the first one, and the others."""
        prompt, *answers = encoded(self.tokenizer, [texts.prompt, *texts.answers], leading_space=True)
        first, *others = [(prompt, np.append(answer, self.tokenizer.eos_id)) for answer in answers]
        return first, others

    def text_asked(
        self, texts: Texts, support: Sequence[np.ndarray], split: str, told: bool
    ) -> tuple[Asked, list[Asked]]:
        """Question and answer in text; and, in training with ``supporting``, the question for the facts, which is
        answered where they are told."""
        eos_id = self.tokenizer.eos_id
        question, cite, answer = encoded(
            self.tokenizer, [texts.question, f"{texts.line} {CITE}", ", ".join(texts.answers)], leading_space=True
        )
        facts = np.append(np.concatenate(support), eos_id)
        return (question, np.append(answer, eos_id)), [(cite, facts if told else NOTHING)] * (
            split == "train" and self.config.supporting > 0
        )

    def told(self, split: str, key: Sequence[str]) -> bool:
        """Whether a sample of these texts comes with its supporting facts."""
        digest = hashlib.blake2b("\n".join(key).encode(), digest_size=8, person=b"support").digest()
        return split != "train" or int.from_bytes(digest, "little") < self.config.supporting * 2**64

    def meta(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        return {"tokens": torch.full((len(samples),), self.config.tokens)}

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        shape = (len(predicted_BT), batch.read_only, -1)
        parts = [predicted_BT.view(shape), batch.scored_BT.view(shape)]
        return self.judged(
            [
                self.joined([tail[scored] for tail, scored in zip(*tails, strict=True)])
                for tails in zip(*parts, strict=True)
            ],
            batch,
        )

    def score_text(self, said_BN: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Of what was said after the first prompt, or after every one of R, (B, R * new_tokens): all of it counts as
        one answer."""
        tails = said_BN.unflatten(1, (-1, min(said_BN.shape[1], self.new_tokens)))
        return self.judged([self.joined(said) for said in tails], batch)

    def joined(self, said: Sequence[Tensor] | Tensor) -> Tensor:
        """What was said in several tails, each up to its EOS, with EOS at the end if all have one."""
        parts = [until(part.tolist(), self.tokenizer.eos_id) for part in said]
        tokens = [token for spoken, _ in parts for token in spoken]
        return torch.tensor(tokens + [self.tokenizer.eos_id] * all(ended for _, ended in parts))


def rows_of(rows: Sequence[np.ndarray], length: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens, left-aligned, and their mask."""
    part = padded(rows, length, pad_id)
    return part if isinstance(part, tuple) else (part, torch.ones_like(part, dtype=torch.bool))


def encoded_rows(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of every text by itself; of an empty one, none."""
    given = iter(encoded(tokenizer, [text for text in texts if text], leading_space=True))
    return [next(given) if text else NOTHING for text in texts]


def between(facts: Sequence[np.ndarray], tokens: int, noise: Haystack, rng: Generator) -> Place:
    """Facts in gaps between the sentences of a noise that is drawn, in a context of ``tokens``, as in BABILong."""
    position, room = noise.place(rng), tokens - sum(map(len, facts))
    gaps_F = np.sort(rng.integers(0, noise.sentences(position, room) + 1, len(facts)))
    return Place(facts, np.minimum(noise.offset(position, gaps_F), room), noise, position, room)


def mixed(ours: np.ndarray, theirs: np.ndarray, rng: Generator) -> np.ndarray:
    """The elements of two rows in one, each in its order, any merger as likely as another."""
    out = np.empty(len(ours) + len(theirs), np.int64)
    at = np.zeros(len(out), bool)
    at[rng.choice(len(out), len(ours), replace=False)] = True
    out[at], out[~at] = ours, theirs
    return out
