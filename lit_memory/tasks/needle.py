"""Needle in a haystack: one sentence that gives a key its value, hidden between sentences that do not matter (RULER's
S-NIAH).

Paper:     Hsieh et al. 2024, arXiv 2404.06654 (RULER); as in Behrouz et al. 2025, arXiv 2501.00663, section 5.3 and
    table 2 (spec 6.4).
Reference: github.com/NVIDIA/RULER, single_1 to single_3.

    context                                             tail
    [note ... hay ... needle ... hay, exactly T tokens]    question prefix value EOS      T = segments * segment_len -
    margin

    variant  RULER         hay                     value
    pk       niah_single_1 one line, repeated      number
    n        niah_single_2 books                   number
    w        niah_single_3 books                   uuid

Samples are laid out, streamed and prompted as ``hidden.py`` says: the value and EOS are scored, and a test has the
model say them.

Deviations
1. Keys and words are an adjective and a noun of ``text/lexicon.py``, 24,806 in all; the reference draws from the
   package wonderwords.
2. Splits are disjoint by construction: a hash of a value decides its split, and books belong to one split.
3. No sentence of the books has a digit or a hyphen between letters, so that values and keys are in the needle alone.
4. Words that are digits have no end: the word tokenizer reads numbers and uuids character by character.
5. The needle is in front of a sentence, or behind the last whole one: the k-th of S for depth k/S, of 40 depths from 0
   to 100 %. In ``pk`` a sentence is the whole line. White space is one space, where the reference ends the lines of
   ``pk``.
6. The note is in our words, and may be left out. Books take the place of essays, as in BABILong.
7. A model says at most 48 tokens, not 128: no value has more.

Shape suffixes: B batch, T tokens, N tokens of an answer.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from uuid import UUID

import numpy as np
import torch
from numpy.random import PCG64, Generator
from torch import Tensor

from lit_memory.tasks.babi.files import split_of
from lit_memory.tasks.planted_facts import Hidden, HiddenConfig, Sample, encoded
from lit_memory.text.corpus import Corpus, content_key, load_corpus, sentences
from lit_memory.text.haystack import Haystack, build_haystack
from lit_memory.text.lexicon import WORDS
from lit_memory.text.tokenizers import WORD, Tokenizer
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.provenance import cache_folder
from lit_memory.util.seeds import mixed_seed

NOTE = (
    "A special magic {kind} is hidden in the text below. Memorize it, for you will be asked for the {kind} at the end."
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
QUESTION = "What is the special magic {kind} for {key} mentioned in the provided text?"
PREFIX = "The special magic {kind} for {key} mentioned in the provided text is"
LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ADJECTIVES, NOUNS = WORDS["ADJ"].split(), [*WORDS["THING"].split(), *WORDS["PLACE"].split()]
KINDS = {"pk": "number", "n": "number", "w": "uuid"}
"""Variant -> kind of its values."""
VOCABULARY = (
    *(
        text.format(kind=kind, key="-", value="")
        for text in (NOTE, NEEDLE, QUESTION, PREFIX)
        for kind in ("number", "word", "uuid")
    ),
    LINE,
)
VOCABULARY = (*VOCABULARY, *ADJECTIVES, *NOUNS, *"0123456789abcdef")
"""All that the word tokenizer has to know."""
GIVEAWAY = re.compile(r"\d|\w-\w")
"""What no sentence of the hay has."""
DEPTHS = np.linspace(0, 100, 40).round().astype(int)
"""Percent of the sentences that come before the needle."""


class Needle(Hidden):
    """Say the value of a key that one sentence of a long text has told."""

    metrics = ("string_match_all", "exact_match")
    new_tokens = 48

    words = VOCABULARY

    @dataclass
    class Config(HiddenConfig):
        """The margin is for question, prefix, value and EOS; the haystack is the hay of n and w."""

        margin: int = 80
        variant: Literal["pk", "n", "w"] = "n"
        """Hay and value: a repeated line and a number, books and a number, or books and a uuid."""
        value: Literal["auto", "number", "word", "uuid"] = "auto"
        """A number; a word, of an adjective and a noun; a uuid; or that of ``variant``."""
        digits: int = 7
        """Of a number, whose first one is not 0."""
        note: bool = True
        """The context begins with a note that something is hidden in it."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, self, "segments")
            if not 2 <= self.digits <= 40:
                raise FieldError("digits", self.digits, "expected 2 to 40; with fewer, no split has values of its own")
            specimen = Generator(PCG64(0))
            *told, asked, answer = (
                len(WORD.findall(text))
                for text in self.texts(compound(specimen), VALUES[self.kind](specimen, self.digits))
            )
            self.fit(
                1 if self.vary else self.segments, sum(told), asked + answer + 1
            )  # exact for words; of other tokens there are no fewer

        @property
        def kind(self) -> str:
            """Of the values."""
            return KINDS[self.variant] if self.value == "auto" else self.value

        def texts(self, key: str, value: str) -> list[str]:
            """The note, unless it is left out, the needle, the question with its prefix, and the answer."""
            spelled = " ".join(value) if self.tokenizer == "word" and self.kind != "word" else value
            note, needle, *asked = (
                text.format(kind=self.kind, key=key, value=spelled) for text in (NOTE, NEEDLE, QUESTION, PREFIX)
            )
            return [*[note] * self.note, needle, " ".join(asked), spelled]

        def fit(self, segments: int, told: int, tail: int) -> None:
            """Raise ValueError where a context has no room for the ``told`` tokens of note and needle, or the margin
            for those of the tail."""
            if tail > self.margin:
                raise FieldError(
                    "margin",
                    self.margin,
                    f"expected at least {tail}, the tokens of a question, its prefix, the value and EOS",
                )
            if told > (tokens := segments * self.segment_len - self.margin):
                raise FieldError(
                    "segments",
                    segments,
                    f"{tokens} tokens are too few for note and needle, which take {told}; raise segments or segment_len",
                )

    def samples(self, seed: int, split: str, step: int, size: int) -> list[Sample]:
        c = self.config
        rng = Generator(PCG64(mixed_seed(seed, f"needle/{split}", step)))
        hay = (
            repeated_line(self.tokenizer) if c.variant == "pk" else load_hay(self.tokenizer, c.haystack, c.books, split)
        )
        return [self.hide(n, hay, split, rng) for n in self.draw_segments(split, size, rng)]

    def hide(self, segments: int, hay: Haystack, split: str, rng: Generator) -> Sample:
        """Draw a key, its value, where the hay begins, and which gap between its sentences holds the needle."""
        c, tokenizer = self.config, self.tokenizer
        key = value = compound(rng)
        while value == key or split_of((), value) != split:
            value = VALUES[c.kind](rng, c.digits)
        *facts, asked, answer = encoded(tokenizer, c.texts(key, value), leading_space=True)
        tokens, lengths = segments * c.segment_len - c.margin, [len(fact) for fact in facts]
        c.fit(segments, sum(lengths), len(asked) + len(answer) + 1)
        position, room = hay.random_start(rng), tokens - sum(lengths)
        whole = hay.sentences(position, room + 1) - 1
        gap = hay.offset(position, whole * int(rng.choice(DEPTHS)) // 100)
        starts_F = np.array([0, lengths[0] + gap] if c.note else [gap])
        return Sample(hay, position, facts, starts_F, segments, tokens, asked, np.append(answer, tokenizer.eos_id))

    def meta(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """With ``depth``, percent of the hay that comes before the needle."""
        hay_B = [max(1, sample.context - sum(map(len, sample.facts))) for sample in samples]
        before_B = [int(sample.starts_F[-1]) - sum(map(len, sample.facts[:-1])) for sample in samples]
        return super().meta(samples) | {"depth": 100 * torch.tensor(before_B) / torch.tensor(hay_B)}

    def judge(self, target: str, said: str, ended: bool, question: str) -> dict[str, float]:
        return super().judge(target, said, ended, question) | {"string_match_all": string_match_all(said, [target])}


def string_match_all(said: str, wanted: Sequence[str]) -> float:
    """Share of the ``wanted`` strings that are in ``said``, whatever the case. Source: spec 0, the metric of RULER."""
    return sum(text.lower() in said.lower() for text in wanted) / len(wanted)


def compound(rng: Generator) -> str:
    """An adjective and a noun, in one word."""
    return f"{ADJECTIVES[rng.integers(len(ADJECTIVES))]}-{NOUNS[rng.integers(len(NOUNS))]}"


VALUES: dict[str, Callable[[Generator, int], str]] = {
    "number": lambda rng, digits: "".join(map(str, [rng.integers(1, 10), *rng.integers(0, 10, digits - 1)])),
    "word": lambda rng, digits: compound(rng),
    "uuid": lambda rng, digits: str(UUID(bytes=rng.bytes(16), version=4)),
}
"""Kind -> what draws a value of it; a number has so many digits."""


@lru_cache(maxsize=16)
def load_hay(tokenizer: Tokenizer, haystack: str, books: int | None, split: str) -> Haystack:
    """The sentences of a split's books, without those that could be taken for a part of a needle."""
    corpus = load_corpus(haystack, split, books)
    kept = Corpus(
        content_key("hay", GIVEAWAY.pattern, corpus.key),
        lambda: (" ".join(s for s in sentences(text) if not GIVEAWAY.search(s)) for text in corpus.texts()),
        corpus.name,
    )
    return build_haystack(kept, tokenizer, cache_folder())


@lru_cache(maxsize=8)
def repeated_line(tokenizer: Tokenizer) -> Haystack:
    """The line of RULER's noise, again and again."""
    return Haystack(tokenizer.encode(" " + LINE), np.zeros(1, np.int64))
