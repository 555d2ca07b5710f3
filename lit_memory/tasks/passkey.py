"""Passkey, magic number and San Francisco: complete a sentence of a haystack from its first words.

Paper:     Nelson et al. 2024, Needle in the haystack for memory based large language models, arXiv 2407.01437, section
           3 (spec 6.1, 6.3); after Mohtashami and Jaggi 2023, arXiv 2305.16300, and
           github.com/gkamradt/LLMTest_NeedleInAHaystack.
Reference: none is public.

    lines    [The pass key is 9054.] ... [The grass is green.] ... [The pass key is]    tail: The pass key is  9054 EOS
    text     [... The pass key is 9054. ... What is the pass key? The pass key is 9054 EOS]

    needle           sentence                                              hay                        recall
    passkey          The pass key is K. (and two more)                     five sentences, repeated   K is in the answer
    magic            The magic number is K.                                books                      K is in the answer
    san_francisco    The best thing to do in San Francisco is eat a        books                      ROUGE-L recall
                     sandwich and sit in Dolores Park on a sunny day.

Every sentence is a line. The question is the beginning of the needle, so that a model whose keys are prefixes of lines
finds it by the same words. A context has at most ``tokens`` tokens: whole repetitions of the five sentences, or
consecutive sentences of books, cut at the end.

Deviations
1. The note in front of a passkey is in our words. Books take the place of essays, without sentences that have digits,
   as in ``needle.py``.
2. A hash assigns every number to a split, except for numbers of one digit, of which there are too few. The sentence
   about San Francisco is in all splits: a model that was trained on it needs no haystack.
3. Numbers are spelled digit by digit for the word tokenizer. A model generates at most 16 tokens (published: 10 for a
   passkey), or as many as the answer has.
4. The published model is trained on text of all kinds; a small one may learn to write numbers from the needles of
   ``train_digits``.

Shape suffixes: F facts.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from lit_memory.tasks.base import numpy_generator
from lit_memory.tasks.episodes import CITE, EpisodeConfig, EpisodeSample, EpisodeTask, Texts
from lit_memory.tasks.lines import encode_lines
from lit_memory.tasks.needle import LINE, VALUES, load_hay
from lit_memory.tasks.placement import Placement
from lit_memory.text.corpus import sentences
from lit_memory.text.haystack import Haystack
from lit_memory.text.tokenizers import Tokenizer
from lit_memory.util.checks import FieldError
from lit_memory.util.fields import added
from lit_memory.util.seeds import split_of

NOTE = (
    "Something important is hidden in a lot of text that does not matter.",
    "Find it and keep it in mind.",
    "You will be asked for it at the end.",
)
PASSKEY = ("The pass key is {}.", "Remember it.", "{} is the pass key.")
QUESTION = "What is the pass key?"
SAN_FRANCISCO = "eat a sandwich and sit in Dolores Park on a sunny day"
PROMPTS = {
    "passkey": "The pass key is",
    "magic": "The magic number is",
    "san_francisco": "The best thing to do in San Francisco is",
}
VOCABULARY = (*NOTE, *PASSKEY, QUESTION, SAN_FRANCISCO, *PROMPTS.values(), CITE, LINE, *"0123456789")
"""Texts whose words the word tokenizer has to know."""


class Passkey(EpisodeTask):
    """Complete the one sentence that matters. ``recall``: of the number, or of the words about San Francisco."""

    metrics = ("recall", "exact_match")
    visible = ("depth",)

    words = VOCABULARY

    @dataclass
    class Config(EpisodeConfig):
        """Settings of the passkey. ``haystack`` is the hay of magic and san_francisco."""

        tokens: int = 1024
        needle: Literal["passkey", "magic", "san_francisco"] = "passkey"
        digits: int = 5
        """Digits of a number, the first of which is not 0."""
        train_digits: list[int] = added([])
        """Values of ``digits`` in training and validation, drawn for every number; default: ``digits``."""
        depth: int | None = None
        """Percent of the hay before the needle; default: drawn."""
        test_digits: list[int] = field(default_factory=list)
        """Values of ``digits`` in the test, in place of ``test_tokens``."""
        test_depth: list[int] = field(default_factory=list)
        """Values of ``depth`` in the test, in place of ``test_tokens``."""

        def __post_init__(self) -> None:
            super().__post_init__()
            for name, digits in (("digits", [self.digits]), ("train_digits", self.train_digits)):
                if not all(1 <= n <= 15 for n in digits):
                    raise FieldError(name, getattr(self, name), "expected 1 to 15")
            if self.depth is not None and not 0 <= self.depth <= 100:
                raise FieldError("depth", self.depth, "expected 0 to 100 percent")

    @property
    def new_tokens(self) -> int:
        c = self.config
        if c.needle == "san_francisco":
            return max(16, len(self.tokenizer.encode(f" {SAN_FRANCISCO}")) + 1)
        return max(16, c.digits + (1 if c.tokenizer == "word" else 2))  # a space before them, and EOS

    @property
    def reads_hay(self) -> bool:
        return self.config.needle != "passkey"

    def samples(self, seed: int, split: str, step: int, size: int) -> list[EpisodeSample]:
        rng = numpy_generator(seed, f"passkey/{split}", step)
        return [self.plant(self.draw_answer(split, rng), split, rng) for _ in range(size)]

    def draw_answer(self, split: str, rng: Generator) -> str:
        """Draw a number of the split, spelled for the word tokenizer; or the words about San Francisco."""
        c, digits = self.config, self.config.digits
        if c.train_digits and split != "test":
            digits = c.train_digits[int(rng.integers(len(c.train_digits)))]
        if c.needle == "san_francisco":
            return SAN_FRANCISCO
        number = VALUES["number"](rng, digits)
        while digits > 1 and split_of(number) != split:
            number = VALUES["number"](rng, digits)
        return " ".join(number) if c.tokenizer == "word" else number

    def plant(self, answer: str, split: str, rng: Generator) -> EpisodeSample:
        """Draw the hay, and where the sentence with the answer lies."""
        c, prompt = self.config, PROMPTS[self.config.needle]
        depth = int(rng.integers(101)) if c.depth is None else c.depth
        note, needle, question = (NOTE, PASSKEY, [QUESTION]) if c.needle == "passkey" else ((), [f"{prompt} {{}}."], [])
        needle = [text.format(answer) for text in needle]
        last = question if c.layout == "lines" else []  # in text, the question is in the tail
        facts = encode_lines(self.tokenizer, [*note, *needle, *last])
        fact_tokens = sum(map(len, facts[: len(note) + len(needle)]))
        if fact_tokens > c.tokens:
            raise FieldError("tokens", c.tokens, f"expected at least {fact_tokens}, those of the sentences that matter")
        hay, position, room, gap = self.draw_hay(c.tokens - fact_tokens, depth, split, rng)
        gaps_F = np.repeat([0, gap, room], [len(note), len(needle), len(last)])
        texts = Texts(" ".join([*question, prompt]), prompt, prompt, [answer])
        placement = Placement(facts, gaps_F, hay, position, room)
        return self.make_sample(placement, [len(note)], texts, split, [*needle, f"{position} {gap}"])

    def draw_hay(self, room: int, depth: int, split: str, rng: Generator) -> tuple[Haystack, int, int, int]:
        """The hay, the position where it begins, its tokens (at most ``room``) and those before the needle."""
        if books := self.books(split):
            position = books.random_start(rng)
            whole = books.sentences(position, room + 1) - 1
            return books, position, room, books.offset(position, whole * depth // 100)
        hay = filler(self.tokenizer)
        blocks = room // len(hay)
        return hay, 0, blocks * len(hay), blocks * depth // 100 * len(hay)

    def prose(self, split: str) -> Haystack:
        return load_hay(self.tokenizer, self.config.haystack, self.config.books, split)

    def books(self, split: str) -> Haystack | None:
        return None if self.config.needle == "passkey" else self.prose(split)

    def meta(self, samples: list[EpisodeSample]) -> dict[str, Tensor]:
        """Adds the digits of the number, and ``depth``, percent of the hay before the needle."""
        digits = [sum(map(str.isdigit, self.tokenizer.decode(sample.answer[:-1]))) for sample in samples]
        depths = [depth_of(sample) if self.config.depth is None else self.config.depth for sample in samples]
        return super().meta(samples) | {"digits": torch.tensor(digits), "depth": torch.tensor(depths)}

    def score_answer(self, target: str, answer: str, ended: bool, question: str) -> dict[str, float]:
        recall = rouge_l_recall(answer, target) if self.config.needle == "san_francisco" else float(target in answer)
        said, stop, _ = answer.partition(".")  # a model that has learnt lines ends them so, and never by EOS
        return super().score_answer(target, said, ended or bool(stop), question) | {"recall": recall}


def depth_of(sample: EpisodeSample) -> int:
    """Percent of the hay that lies before the needle, rounded."""
    needle, hay = sample.support[0], sample.context_len - sum(map(len, sample.facts))
    before = int(sample.starts_F[needle]) - sum(map(len, sample.facts[:needle]))
    return round(100 * before / max(hay, 1))


def rouge_l_recall(answer: str, target: str) -> float:
    """Words of the longest common subsequence of two texts, as a share of the target's words. Case-insensitive.

    Source: ROUGE-L of Lin 2004, section 3 (spec 6.3).
    """
    answer_words, target_words = (re.findall(r"\w+", text.lower()) for text in (answer, target))
    longest = [0] * (len(target_words) + 1)  # of the answer's words so far and the first i words of the target
    for word in answer_words:
        before = longest[:]
        for i, other in enumerate(target_words):
            longest[i + 1] = before[i] + 1 if word == other else max(before[i + 1], longest[i])
    return longest[-1] / len(target_words)


@lru_cache(maxsize=8)
def filler(tokenizer: Tokenizer) -> Haystack:
    """The five sentences around a passkey, repeated without end."""
    rows = encode_lines(tokenizer, sentences(LINE))
    return Haystack(np.concatenate(rows), np.cumsum([0, *map(len, rows[:-1])]))
