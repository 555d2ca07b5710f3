"""What a training batch has beside its samples: auxiliary lines, and sentences that mention given phrases.

A model that starts from nothing writes no word that its training never had, where the papers' models know it from
their pretraining. The mentions stand in for that. They say nothing about where anybody or anything is, and have common
words of ``noise.py`` around the phrase. As often, a sentence is like a fact of bAbI about people and places of the
noise, none of them a phrase: from six places alone, a small model learns six answers, and not to write what it reads.

Source: auxiliary lines: Das, Ko, Dai et al. 2025 (MemReasoner), section 4 (spec 4.2); mentions: ours.

Shape suffixes: B batch, n auxiliary lines of a sample, L tokens of a line, X lines of a batch, N
sentences.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.random import Generator
from torch import Tensor

from lit_memory.tasks.base import numpy_generator
from lit_memory.tasks.lines import cut_sentences, encode_lines
from lit_memory.tasks.planted_facts import PlantedFacts
from lit_memory.tasks.samples import QuestionAnswer, Sample, pad_rows
from lit_memory.text.haystack import Haystack
from lit_memory.text.lexicon import inflected
from lit_memory.text.tokenizers import Tokenizer

# X is the phrase; a word in capitals is a common one of its class.
TEMPLATES = """
X was ADJ in winter and ADJ in summer.
X seemed ADJ and ADJ to the PERSON.
X was known to most of the PERSON.s.
X reminded the PERSON of a ADJ THING.
X was worth more than COUNT THING.s.
It was only X, and a rather ADJ one.
What would become of X?
The PERSON never spoke of X.
Most of the PERSON.s preferred a ADJ THING to X.
There was nothing ADJ about X.
A ADJ PERSON had no ABSTRACT for X.
For COUNT years the PERSON.s spoke of X.
"""
SENTENCES = TEMPLATES.strip().splitlines()
FACTS = [f"The PERSON {verb} the PLACE." for verb in ("moved to", "went to", "journeyed to", "travelled to", "is in")]
COMMON = 8
"""Words of a class that mentions choose from: its most frequent."""
KNOWN = 64
"""Those that facts choose from."""
CLASS = re.compile(r"\b[A-Z]{2,}(\.s)?")


class Extras(PlantedFacts):
    """Text from which episodes learn beside what they are about. ``Config`` is an ``EpisodeConfig``."""

    def prose(self, split: str) -> Haystack:
        """Sentences of books, whatever the noise between the facts is."""
        raise NotImplementedError

    def auxiliary_lines(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Uniformly drawn sentences of the training books, cut like lines: ids (B, n, L) and their mask."""
        c, rng = self.config, numpy_generator(seed, "apart/train", step)
        hay = cut_sentences(self.prose("train"), c.line_tokens)
        positions = [hay.random_start(rng) for _ in range(size * c.apart)]
        rows = [hay.tokens(position, int(hay.offset(position, 1))) for position in positions]
        if c.mentioned:
            sentences = mentions(c.mentioned, self.tokenizer, seed, step, len(rows[::2]))
            rows[::2] = [sentence[: c.line_tokens] for sentence in sentences]
        ids_XL, mask_XL = pad_rows(rows, c.line_tokens, self.tokenizer.pad_id)
        return ids_XL.unflatten(0, (size, -1)), mask_XL.unflatten(0, (size, -1))

    def with_mentions(self, samples: Sequence[Sample], seed: int, step: int) -> Sequence[Sample]:
        """Samples in layout "text", each with a further tail if phrases are to be mentioned."""
        if not (phrases := self.config.mentioned):
            return samples
        sentences = mentions(phrases, self.tokenizer, seed, step, len(samples))
        tails = [as_tail(sentence, self.tokenizer.eos_id) for sentence in sentences]
        self.check_room(tails)
        return [replace(sample, more=(*sample.more, tail)) for sample, tail in zip(samples, tails, strict=True)]

    def check_room(self, questions: Sequence[QuestionAnswer]) -> None:
        """Raise FieldError if a tail is too long."""
        raise NotImplementedError


def mentions(phrases: Sequence[str], tokenizer: Tokenizer, seed: int, step: int, count: int) -> list[np.ndarray]:
    """Tokens of ``count`` sentences for a step of the training: mentions of the phrases and facts in turn."""
    rng = numpy_generator(seed, "mentions/train", step)
    chosen_N = rng.integers(len(phrases), size=count)
    sentences = [fact(phrases, rng) if n % 2 else mention(phrases[int(i)], rng) for n, i in enumerate(chosen_N)]
    return encode_lines(tokenizer, sentences)


def as_tail(sentence: np.ndarray, eos_id: int) -> QuestionAnswer:
    """A sentence as a tail: its first token is given, and the others are to be written."""
    return sentence[:1], np.append(sentence[1:], eos_id)


def mention(phrase: str, rng: Generator) -> str:
    """A sentence that mentions ``phrase``, a noun phrase: "the library"."""
    filled = CLASS.sub(lambda match: pick(common(match[0]), rng), pick(SENTENCES, rng))
    said = re.sub(r"\bX\b", lambda _: phrase, filled)
    said = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", said)
    return said[0].upper() + said[1:]


def fact(phrases: Sequence[str], rng: Generator) -> str:
    """A sentence about where somebody is, at a place that no phrase names."""
    words = {"PERSON": common("PERSON", KNOWN), "PLACE": places_of_noise(phrases)}
    return CLASS.sub(lambda match: pick(words[match[0]], rng), pick(FACTS, rng))


def places_of_noise(phrases: Sequence[str]) -> list[str]:
    """Common places of the noise that no phrase names."""
    named = {word for phrase in phrases for word in phrase.split()}
    return [place for place in common("PLACE", KNOWN) if place not in named]


def pick(options: Sequence[str], rng: Generator) -> str:
    """One of the options, each with the same probability."""
    return options[int(rng.integers(len(options)))]


@lru_cache
def common(name: str, count: int = COMMON) -> list[str]:
    """The most frequent words of ``CLASS`` or ``CLASS.ending``."""
    return inflected(name)[:count]
