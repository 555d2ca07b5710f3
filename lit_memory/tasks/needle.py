"""Needle in a haystack: one sentence gives a key its value, between sentences that do not matter (RULER's S-NIAH).

Paper:     Hsieh et al. 2024, arXiv 2404.06654 (RULER); as in Behrouz et al. 2025, arXiv 2501.00663, section 5.3 and
           table 2 (spec 6.4).
Reference: github.com/NVIDIA/RULER, single_1 to single_3.

    context                                                tail
    [note ... hay ... needle ... hay, exactly T tokens]    question prefix value EOS
    T = segments * segment_len - margin

    variant  RULER         hay                     value
    pk       niah_single_1 one line, repeated      number
    n        niah_single_2 books                   number
    w        niah_single_3 books                   uuid

Samples are laid out as in ``planted_facts.py``: the value and EOS are scored, and in a test the model generates them.

Deviations
1. Keys and words are an adjective and a noun of ``text/lexicon.py``, 24,806 in all; the reference draws from the
   package wonderwords.
2. Splits are disjoint by construction: a hash assigns every value to a split, and every book belongs to one split.
3. No sentence of the books has a digit or a hyphen between letters, so that values and keys are in the needle alone.
4. The word tokenizer reads numbers and uuids character by character, as no vocabulary can hold all of them.
5. The needle is in front of a sentence, or after the last whole one: in front of the k-th of S for depth k/S, with 40
   depths from 0 to 100 %. In ``pk`` a sentence is the whole line. The lines of ``pk`` are separated by spaces; the
   reference has line ends.
6. The note is in our words, and may be left out. Books take the place of essays, as in BABILong.
7. A model generates at most 48 tokens, not 128: no value has more.

Shape suffixes: B batch.
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

from lit_memory.tasks.base import numpy_generator
from lit_memory.tasks.planted_facts import PlantedFacts, PlantedFactsConfig
from lit_memory.tasks.samples import Sample, encode_texts
from lit_memory.text.corpus import Corpus, content_key, load_corpus, sentences
from lit_memory.text.haystack import Haystack, build_haystack
from lit_memory.text.lexicon import WORDS
from lit_memory.text.tokenizers import WORD, Tokenizer
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.provenance import cache_folder
from lit_memory.util.seeds import split_of

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
TEMPLATES = [
    text.format(kind=kind, key="-", value="")
    for text in (NOTE, NEEDLE, QUESTION, PREFIX)
    for kind in ("number", "word", "uuid")
]
VOCABULARY = (*TEMPLATES, LINE, *ADJECTIVES, *NOUNS, *"0123456789abcdef")
"""Texts whose words the word tokenizer has to know."""
KEY_OR_VALUE = re.compile(r"\d|\w-\w")
"""Pattern of what only a key or a value has; sentences of the hay that match are left out."""
DEPTHS = np.linspace(0, 100, 40).round().astype(int)
"""Depths of the needle: percent of the sentences before it."""


class Needle(PlantedFacts):
    """Answer with the value of a key that one sentence of a long text states."""

    metrics = ("string_match_all", "exact_match")
    new_tokens = 48
    visible = ("depth",)

    words = VOCABULARY

    @dataclass
    class Config(PlantedFactsConfig):
        """Settings of the needle.

        ``margin`` is for question, prefix, value and EOS. ``haystack`` is the hay of the variants n and w.
        """

        margin: int = 80
        variant: Literal["pk", "n", "w"] = "n"
        """Hay and value: a repeated line and a number, books and a number, or books and a uuid."""
        value: Literal["auto", "number", "word", "uuid"] = "auto"
        """Kind of the value: a number; a word, made of an adjective and a noun; a uuid; or that of ``variant``."""
        digits: int = 7
        """Digits of a number, the first of which is not 0."""
        note: bool = True
        """Begin the context with a note that something is hidden in it."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, self, "segments")
            if not 2 <= self.digits <= 40:
                raise FieldError("digits", self.digits, "expected 2 to 40; with fewer, no split has values of its own")
            self.check_specimen()

        def check_specimen(self) -> None:
            """Raise FieldError if the texts of one sample do not fit."""
            rng = Generator(PCG64(0))
            texts = self.texts(draw_compound(rng), VALUES[self.kind](rng, self.digits))
            # Exact for words; other tokenizers need at least as many tokens.
            *facts, question, answer = (len(WORD.findall(text)) for text in texts)
            self.check_fit(1 if self.vary else self.segments, sum(facts), question + answer + 1)

        @property
        def kind(self) -> str:
            """Kind of the values: number, word or uuid."""
            return KINDS[self.variant] if self.value == "auto" else self.value

        def texts(self, key: str, value: str) -> list[str]:
            """Texts of a sample: the note if there is one, the needle, the question with its prefix, the answer."""
            spelled = " ".join(value) if self.tokenizer == "word" and self.kind != "word" else value
            note, needle, question, prefix = (
                text.format(kind=self.kind, key=key, value=spelled) for text in (NOTE, NEEDLE, QUESTION, PREFIX)
            )
            return [*[note] * self.note, needle, f"{question} {prefix}", spelled]

        def check_fit(self, segments: int, fact_tokens: int, tail: int) -> None:
            """Raise FieldError if note and needle do not fit into a context, or the tail into the margin."""
            if tail > self.margin:
                least = f"expected at least {tail}, the tokens of a question, its prefix, the value and EOS"
                raise FieldError("margin", self.margin, least)
            if fact_tokens > (tokens := segments * self.segment_len - self.margin):
                few = f"{tokens} tokens are too few for note and needle, which take {fact_tokens}"
                raise FieldError("segments", segments, f"{few}; raise segments or segment_len")

    @property
    def reads_hay(self) -> bool:
        return self.config.variant != "pk"

    def samples(self, seed: int, split: str, step: int, size: int) -> list[Sample]:
        c = self.config
        rng = numpy_generator(seed, f"needle/{split}", step)
        if c.variant == "pk":
            hay = repeated_line(self.tokenizer)
        else:
            hay = load_hay(self.tokenizer, c.haystack, c.books, split)
        return [self.plant(n, hay, split, rng) for n in self.draw_segments(split, size, rng)]

    def plant(self, segments: int, hay: Haystack, split: str, rng: Generator) -> Sample:
        """Draw a key, its value, where the hay begins, and which gap between its sentences holds the needle."""
        c, tokenizer = self.config, self.tokenizer
        key = value = draw_compound(rng)
        while value == key or split_of(value) != split:
            value = VALUES[c.kind](rng, c.digits)
        *facts, question, answer = encode_texts(tokenizer, c.texts(key, value), leading_space=True)
        tokens, lengths = segments * c.segment_len - c.margin, [len(fact) for fact in facts]
        c.check_fit(segments, sum(lengths), len(question) + len(answer) + 1)
        position, room = hay.random_start(rng), tokens - sum(lengths)
        whole = hay.sentences(position, room + 1) - 1
        gap = hay.offset(position, whole * int(rng.choice(DEPTHS)) // 100)
        starts_F = np.array([0, lengths[0] + gap] if c.note else [gap])
        return Sample(hay, position, facts, starts_F, segments, tokens, question, np.append(answer, tokenizer.eos_id))

    def meta(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Adds ``depth``, percent of the hay before the needle."""
        hay_B = [max(1, sample.context_len - sum(map(len, sample.facts))) for sample in samples]
        before_B = [int(sample.starts_F[-1]) - sum(map(len, sample.facts[:-1])) for sample in samples]
        return super().meta(samples) | {"depth": 100 * torch.tensor(before_B) / torch.tensor(hay_B)}

    def score_answer(self, target: str, answer: str, ended: bool, question: str) -> dict[str, float]:
        match = string_match_all(answer, [target])
        return super().score_answer(target, answer, ended, question) | {"string_match_all": match}


def string_match_all(answer: str, targets: Sequence[str]) -> float:
    """Share of the targets that occur in an answer, case-insensitive. Source: spec 0, the metric of RULER."""
    return sum(target.lower() in answer.lower() for target in targets) / len(targets)


def draw_compound(rng: Generator) -> str:
    """Draw an adjective and a noun, joined by a hyphen."""
    return f"{ADJECTIVES[rng.integers(len(ADJECTIVES))]}-{NOUNS[rng.integers(len(NOUNS))]}"


VALUES: dict[str, Callable[[Generator, int], str]] = {
    "number": lambda rng, digits: "".join(map(str, [rng.integers(1, 10), *rng.integers(0, 10, digits - 1)])),
    "word": lambda rng, digits: draw_compound(rng),
    "uuid": lambda rng, digits: str(UUID(bytes=rng.bytes(16), version=4)),
}
"""Kind -> function that draws a value; numbers have ``digits`` digits."""


@lru_cache(maxsize=16)
def load_hay(tokenizer: Tokenizer, haystack: str, books: int | None, split: str) -> Haystack:
    """Sentences of a split's books, without those that could be mistaken for a part of a needle."""
    corpus = load_corpus(haystack, split, books)
    kept = Corpus(
        content_key("hay", KEY_OR_VALUE.pattern, corpus.key),
        lambda: (" ".join(s for s in sentences(text) if not KEY_OR_VALUE.search(s)) for text in corpus.texts()),
        corpus.name,
    )
    return build_haystack(kept, tokenizer, cache_folder())


@lru_cache(maxsize=8)
def repeated_line(tokenizer: Tokenizer) -> Haystack:
    """The line of RULER's noise, repeated without end."""
    return Haystack(tokenizer.encode(" " + LINE), np.zeros(1, np.int64))
