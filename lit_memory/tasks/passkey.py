"""Passkey, magic number and San Francisco: a sentence in a haystack is to be completed from its first words.

Paper:     Nelson et al. 2024, Needle in the haystack for memory based large language models, arXiv 2407.01437, section
           3 (spec 6.1, 6.3); after Mohtashami and Jaggi 2023, arXiv 2305.16300, and
           github.com/gkamradt/LLMTest_NeedleInAHaystack.
Reference: none is public.

    lines    [The pass key is 9054.] ... [The grass is green.] ... [The pass key is]    tail: The pass key is  9054 EOS
    text     [... The pass key is 9054. ... What is the pass key? The pass key is 9054 EOS]

    needle           sentence                                                   hay                       recall
    passkey          The pass key is K. (and two more)                          five sentences, repeated  K is a part of
    what is said magic            The magic number is K.                                     books
    the same san_francisco    The best thing to do in San Francisco is eat a sandwich    books
                     ROUGE-L recall and sit in Dolores Park on a sunny day.

Every sentence is a line. The question is the beginning of the needle, so that a model whose keys are prefixes of lines
finds it by the same words. A context has at most ``tokens`` tokens: whole repetitions of the five sentences, or a run
of the sentences of books that is cut at the end.

Deviations
1. What stands in front of a passkey is in our words. Books take the place of essays, without sentences that have
   digits, as in ``needle.py``.
2. A hash of a number decides its split, but of one digit, of which there are too few. The sentence about San Francisco
   is in all splits: a model that was trained on it needs no haystack.
3. To the word tokenizer, digits are spelled. A model says at most 16 tokens (published: 10 for a passkey), as many as
   San Francisco takes.
4. The published model is trained on text of all kinds; a small one may learn to write numbers from the needles of
   ``train_digits``.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.random import PCG64, Generator
from torch import Tensor

from lit_memory.tasks.babi.files import split_of
from lit_memory.tasks.episodes import CITE, Episode, Episodes, EpisodesConfig, Place, Texts, encoded_rows
from lit_memory.tasks.needle import LINE, VALUES, load_hay
from lit_memory.text.corpus import sentences
from lit_memory.text.haystack import Haystack
from lit_memory.text.tokenizers import Tokenizer
from lit_memory.util.checks import FieldError
from lit_memory.util.fields import added
from lit_memory.util.seeds import mixed_seed

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
"""All that the word tokenizer has to know."""


class Passkey(Episodes):
    """Complete the one sentence that matters. ``recall``: of the number, or of the words about San Francisco."""

    metrics = ("recall", "exact_match")
    new_tokens = 16

    words = VOCABULARY

    @dataclass
    class Config(EpisodesConfig):
        """The haystack is that of magic and san_francisco."""

        tokens: int = 1024
        needle: Literal["passkey", "magic", "san_francisco"] = "passkey"
        digits: int = 5
        """Of a number, whose first one is not 0."""
        train_digits: list[int] = added([])
        """Digits of the numbers in training and validation, one of these for every number; default: ``digits``."""
        depth: int | None = None
        """Percent of the hay in front of the needle; default: drawn."""
        test_digits: list[int] = field(default_factory=list)
        """Digits of the numbers that the test visits, in place of ``test_tokens``."""
        test_depth: list[int] = field(default_factory=list)
        """Depths of the needle that the test visits, in place of ``test_tokens``."""

        def __post_init__(self) -> None:
            super().__post_init__()
            for name, digits in (("digits", [self.digits]), ("train_digits", self.train_digits)):
                if not all(1 <= n <= 15 for n in digits):
                    raise FieldError(name, getattr(self, name), "expected 1 to 15")
            if self.depth is not None and not 0 <= self.depth <= 100:
                raise FieldError("depth", self.depth, "expected 0 to 100 percent")

    def samples(self, seed: int, split: str, step: int, size: int) -> list[Episode]:
        rng = Generator(PCG64(mixed_seed(seed, f"passkey/{split}", step)))
        return [self.hide(split, rng) for _ in range(size)]

    def hide(self, split: str, rng: Generator) -> Episode:
        """Draw a number and where the sentence with it lies."""
        c, answer, prompt = self.config, SAN_FRANCISCO, PROMPTS[self.config.needle]
        digits = (
            c.train_digits[int(rng.integers(len(c.train_digits)))] if c.train_digits and split != "test" else c.digits
        )
        while c.needle != "san_francisco":
            answer = VALUES["number"](rng, digits)
            if digits == 1 or split_of((), answer) == split:
                break
        depth = int(rng.integers(101)) if c.depth is None else c.depth
        spelled = " ".join(answer) if c.tokenizer == "word" and c.needle != "san_francisco" else answer
        note, needle, question = (NOTE, PASSKEY, [QUESTION]) if c.needle == "passkey" else ((), [f"{prompt} {{}}."], [])
        needle, ends = [text.format(spelled) for text in needle], question if c.layout == "lines" else []
        facts = encoded_rows(self.tokenizer, [*note, *needle, *ends])
        if (told := sum(map(len, facts[: len(note) + len(needle)]))) > c.tokens:
            raise FieldError("tokens", c.tokens, f"expected at least {told}, those of the sentences that matter")
        hay, position, room, gap = self.gap(c.tokens - told, depth, split, rng)
        gaps_F = np.repeat([0, gap, room], [len(note), len(needle), len(ends)])
        texts = Texts(" ".join([*question, prompt]), prompt, prompt, [spelled])
        return self.episode(
            Place(facts, gaps_F, hay, position, room), [len(note)], texts, split, [*needle, f"{position} {gap}"]
        )

    def gap(self, room: int, depth: int, split: str, rng: Generator) -> tuple[Haystack, int, int, int]:
        """Hay, where it begins, how many tokens of it there are, and how many of them lie in front of the needle."""
        if books := self.books(split):
            position = books.place(rng)
            whole = books.sentences(position, room + 1) - 1
            return books, position, room, books.offset(position, whole * depth // 100)
        hay = filler(self.tokenizer)
        blocks = room // len(hay)
        return hay, 0, blocks * len(hay), blocks * depth // 100 * len(hay)

    def prose(self, split: str) -> Haystack:
        return load_hay(self.tokenizer, self.config.haystack, self.config.books, split)

    def books(self, split: str) -> Haystack | None:
        return None if self.config.needle == "passkey" else self.prose(split)

    def meta(self, samples: list[Episode]) -> dict[str, Tensor]:
        """With digits, and the percent of hay that is in front of the needle, to a whole number."""
        hay = [
            (int(s.starts_F[s.support[0]]) - sum(map(len, s.facts[: s.support[0]])), s.context - sum(map(len, s.facts)))
            for s in samples
        ]
        depths = [
            self.config.depth if self.config.depth is not None else round(100 * before / max(all_of_it, 1))
            for before, all_of_it in hay
        ]
        digits = [sum(map(str.isdigit, self.tokenizer.decode(s.answer[:-1]))) for s in samples]
        return super().meta(samples) | {"digits": torch.tensor(digits), "depth": torch.tensor(depths)}

    def judge(self, target: str, said: str, ended: bool, question: str) -> dict[str, float]:
        recall = rouge_l_recall(said, target) if self.config.needle == "san_francisco" else float(target in said)
        return super().judge(target, said, ended, question) | {"recall": recall}


def rouge_l_recall(said: str, wanted: str) -> float:
    """Words of the longest common subsequence of two texts, as a share of the words of ``wanted``, whatever the case.

    Source: ROUGE-L of Lin 2004, section 3 (spec 6.3).
    """
    ours, theirs = (re.findall(r"\w+", text.lower()) for text in (said, wanted))
    longest = [0] * (len(theirs) + 1)  # of the words of ``said`` so far and the first words of ``wanted``
    for word in ours:
        before = longest[:]
        for i, other in enumerate(theirs):
            longest[i + 1] = before[i] + 1 if word == other else max(before[i + 1], longest[i])
    return longest[-1] / len(theirs)


@lru_cache(maxsize=8)
def filler(tokenizer: Tokenizer) -> Haystack:
    """The five sentences that are repeated around a passkey."""
    rows = encoded_rows(tokenizer, sentences(LINE))
    return Haystack(np.concatenate(rows), np.cumsum([0, *map(len, rows[:-1])]))
