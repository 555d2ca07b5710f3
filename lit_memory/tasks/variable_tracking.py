"""Variable tracking: chains of assignments, of which a question asks for all variables that have one value.

Paper:     Hsieh et al. 2024, arXiv 2404.06654 (RULER); Das, Ko, Dai et al. 2025 (MemReasoner), sections 4.1 and B.4
    (spec 5).
Reference: github.com/NVIDIA/RULER, variable_tracking; none of MemReasoner is public.

    lines    [VAR DDDDD = 13075] [VAR FFFFF = 19367] [VAR ZZZZZ = VAR FFFFF] [VAR YYYYY = VAR DDDDD] [... assigned the
    value 13075]
             tails: Answer: ... they are:  DDDDD EOS    Answer: ... they are:  YYYYY EOS
    text     [Memorize ... VAR DDDDD = 13075 ... VAR YYYYY = VAR DDDDD  Question: ... Answer: ... they are:  DDDDD,
    YYYYY EOS]

    rules          variables of a chain    names               chains
    memreasoner    hops                    a letter, 5 times   2, 4, 6, 8 or 10 statements, each as often
    ruler          hops + 1                5 letters           1

A statement that copies a variable never comes before the one that gives it its value. With ``tokens`` a line of noise,
that of RULER, lies between statements as often as it fits, or sentences of books do. Tail h of lines, and hop h of
``meta["support"]``, is the h-th variable of the chain.

Deviations
1. Names and values of a sample are distinct; RULER's may repeat. A hash of the value that is asked for decides the
   split.
2. RULER's worked example before the question is left out, as models are trained on the task, and the note is in our
   words.
3. "Chains of length 2 to 10" are taken for the number of statements, which alone gives the published longest episode of
   14 lines.
4. To the word tokenizer, digits and RULER's names are spelled: it has no end of words.
5. Empty lines, one for every two statements after the first two, are in training alone, where there is no noise.

Shape suffixes: N statements.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.random import PCG64, Generator
from torch import Tensor

from lit_memory.tasks.babi.files import split_of
from lit_memory.tasks.episodes import (
    CITE,
    Episode,
    Episodes,
    EpisodesConfig,
    Place,
    Texts,
    between,
    encoded_rows,
    mixed,
)
from lit_memory.tasks.needle import LINE, load_hay, repeated_line, string_match_all
from lit_memory.text.haystack import Haystack
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.fields import added
from lit_memory.util.seeds import mixed_seed

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NOTE = "[INST] Memorize the chain(s) of variable assignment in the following text, and track them."
VALUE, COPY = "VAR {} = {}", "VAR {} = VAR {}"
QUESTION = "Question: Find all variables that are assigned the value {} in the text above. [/INST]"
PREFIX = "Answer: According to the chain(s) of variable assignment in the text above, {} variables are assigned the value {}, they are:"
SHORT_QUESTION = "[INST] Question: Find all variables that are assigned the value {} [/INST]"
SHORT_PREFIX = (
    "Answer: According to the chain(s) of variable assignment, {} variables are assigned the value {}, they are:"
)
LENGTHS = (2, 4, 6, 8, 10)
"""Statements of a sample of MemReasoner's."""
NAME = re.compile(r"\b[A-Z]{5}\b|\b[A-Z](?: [A-Z]){4}\b")
VOCABULARY = (NOTE, VALUE, QUESTION, PREFIX, CITE, LINE, *LETTERS, *(5 * letter for letter in LETTERS), *"0123456789")
"""All that the word tokenizer has to know."""


class VariableTracking(Episodes):
    """Say all variables that have a value. ``exact_set``: these and no other; ``string_match_all``: the share of them
    that is said."""

    metrics = ("exact_set", "string_match_all")
    new_tokens = 30

    words = VOCABULARY

    @dataclass
    class Config(EpisodesConfig):
        """The haystack is the noise of ``noise: books``."""

        margin: int = 96
        rules: Literal["memreasoner", "ruler"] = "memreasoner"
        hops: int = 0
        """Statements that lead from the first variable of a chain to its last (ruler), or variables of a chain
        (memreasoner); 0: 4 and 1."""
        statements: int = 0
        """Statements of a sample; 0: drawn (memreasoner), or a chain (ruler)."""
        eval_hops: int = 0
        """Hops of the test; 0: ``hops``."""
        value_digits: int = added(5)
        """Digits of a value; fewer are easier to tell apart, for a curriculum."""
        noise: Literal["line", "books"] = "line"
        """What is between the statements: RULER's line, or sentences of ``haystack``."""
        one_tail: bool = added(False)
        """Lines have one tail that all variables of a chain answer, for a model that reads once; default: a tail each,
        which a hop answers."""
        note: bool = True
        """A text begins with a note of what is to be done."""
        test_statements: list[int] = field(default_factory=list)
        """Statements of the samples that the test visits, in place of ``test_tokens``."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, self, "hops", "eval_hops", "statements")
            at_least(2, self, "value_digits")
            for split in ("train", "test"):
                name = (
                    "statements" if self.statements else "eval_hops" if split == "test" and self.eval_hops else "hops"
                )
                if wrong := [n for n in self.lengths(split) if n % self.chain(split)]:
                    chains = f"{wrong[0]} statements are no whole number of chains of {self.chain(split)}; expected a multiple"
                    raise FieldError(name, getattr(self, name), f"{chains}")
                if (chains := max(self.lengths(split)) // self.chain(split)) > (
                    most := 9 * 10 ** (self.value_digits - 1)
                ):
                    raise FieldError(
                        "value_digits", self.value_digits, f"expected more for {chains} chains; there are {most} values"
                    )
                if self.rules == "memreasoner" and max(self.lengths(split)) > len(LETTERS):
                    raise FieldError("statements", self.statements, f"expected at most {len(LETTERS)}, one to a letter")

        def chain(self, split: str) -> int:
            """Variables of a chain."""
            hops = (split == "test" and self.eval_hops) or self.hops
            return (hops or 4) + 1 if self.rules == "ruler" else hops or 1

        def lengths(self, split: str) -> tuple[int, ...]:
            """Numbers of statements that samples have."""
            return (
                (self.statements,)
                if self.statements
                else LENGTHS
                if self.rules == "memreasoner"
                else (self.chain(split),)
            )

    def samples(self, seed: int, split: str, step: int, size: int) -> list[Episode]:
        lengths = self.config.lengths(split)
        rng = Generator(PCG64(mixed_seed(seed, f"variable_tracking/{split}", step)))
        return [self.drawn(lengths[rng.integers(len(lengths))], split, rng) for _ in range(size)]

    def drawn(self, count: int, split: str, rng: Generator) -> Episode:
        """A sample with ``count`` statements, that asks for the value of its first chain."""
        c, length = self.config, self.config.chain(split)
        names, values = self.names(count, rng), self.values(count // length, split, rng)
        chains = np.repeat(np.arange(count // length), length)
        order_N = np.argsort(
            rng.permutation(chains), kind="stable"
        )  # place of statement n: those of a chain in their order
        statements = [""] * count
        for n, place in enumerate(order_N.tolist()):
            statements[place] = (
                VALUE.format(names[n], values[n // length]) if n % length == 0 else COPY.format(names[n], names[n - 1])
            )
        support = order_N[:length].tolist()
        key = [*statements, values[0]]
        if split == "train" and c.rules == "memreasoner" and not c.tokens:
            lines = mixed(np.arange(count), np.full(max(count // 2 - 1, 0), -1), rng).tolist()
            statements, support = ["" if n < 0 else statements[n] for n in lines], [lines.index(n) for n in support]
        question = f"{QUESTION.format(values[0])} {PREFIX.format(length, values[0])}"
        answers = [", ".join(names[:length])] if c.one_tail else names[:length]
        texts = Texts(question, SHORT_QUESTION.format(values[0]), SHORT_PREFIX.format(length, values[0]), answers)
        return self.episode(*self.place(statements, support, split, rng), texts, split, key)

    def names(self, count: int, rng: Generator) -> list[str]:
        """Distinct names of variables, as the tokenizer needs them."""
        if self.config.rules == "memreasoner":
            return [5 * LETTERS[i] for i in rng.permutation(len(LETTERS))[:count]]
        names: dict[str, None] = {}
        while len(names) < count:
            names["".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=5))] = None
        return [self.spelled(name) for name in names]

    def values(self, count: int, split: str, rng: Generator) -> list[str]:
        """Distinct numbers, of which the first is one of the split."""
        values: dict[int, None] = {}
        least = 10 ** (self.config.value_digits - 1)
        while len(values) < count:
            value = int(rng.integers(least, 10 * least))
            if values or split_of((), str(value)) == split:
                values[value] = None
        return [self.spelled(str(value)) for value in values]

    def spelled(self, text: str) -> str:
        return " ".join(text) if self.config.tokenizer == "word" else text

    def prose(self, split: str) -> Haystack:
        return load_hay(self.tokenizer, self.config.haystack, self.config.books, split)

    def books(self, split: str) -> Haystack | None:
        return self.prose(split) if self.config.noise == "books" else None

    def place(self, statements: list[str], support: list[int], split: str, rng: Generator) -> tuple[Place, list[int]]:
        """Where the statements lie, behind the note of a text, and which facts support the answer."""
        c = self.config
        note = encoded_rows(self.tokenizer, [NOTE] * (c.note and c.layout == "text"))
        facts, room = encoded_rows(self.tokenizer, statements), c.tokens - sum(map(len, note))
        if c.tokens and (short := sum(map(len, facts)) - room) > 0:
            raise FieldError(
                "tokens", c.tokens, f"expected at least {c.tokens + short}, those of the statements, or 0 for no noise"
            )
        if not c.tokens:
            place = Place(facts, np.zeros(len(facts), np.int64))
        elif books := self.books(split):
            place = between(facts, room, books, rng)
        else:
            line = repeated_line(self.tokenizer)
            lines = (room - sum(map(len, facts))) // len(line)
            gaps_F = np.sort(rng.choice(lines + 1, len(facts), replace=lines < len(facts)))
            place = Place(facts, gaps_F * len(line), line, 0, lines * len(line))
        behind = place._replace(
            facts=[*note, *facts], gaps_F=np.concatenate([np.zeros(len(note), np.int64), place.gaps_F])
        )
        return behind, [n + len(note) for n in support]

    def meta(self, samples: list[Episode]) -> dict[str, Tensor]:
        """With the number of statements."""
        counts = [
            sum(len(fact) > 0 for fact in sample.facts) - (self.config.note and self.config.layout == "text")
            for sample in samples
        ]
        return super().meta(samples) | {"statements": torch.tensor(counts)}

    def judge(self, target: str, said: str, ended: bool, question: str) -> dict[str, float]:
        wanted = NAME.findall(target)
        return {
            "exact_set": float(set(NAME.findall(said)) == set(wanted)),
            "string_match_all": string_match_all(said, wanted),
        }
