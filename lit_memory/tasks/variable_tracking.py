"""Variable tracking: chains of assignments, and a question about all variables that have one value.

Paper:     Hsieh et al. 2024, arXiv 2404.06654 (RULER); Das, Ko, Dai et al. 2025 (MemReasoner), sections 4.1 and B.4
    (spec 5).
Reference: github.com/NVIDIA/RULER, variable_tracking; none of MemReasoner is public.

    lines    [VAR DDDDD = 13075] [VAR FFFFF = 19367] [VAR ZZZZZ = VAR FFFFF] [VAR YYYYY = VAR DDDDD]
             [... assigned the value 13075]
             tails: Answer: ... they are:  DDDDD EOS    Answer: ... they are:  YYYYY EOS
    text     [Memorize ... VAR DDDDD = 13075 ... VAR YYYYY = VAR DDDDD
              Question: ... Answer: ... they are:  DDDDD, YYYYY EOS]

    rules          variables of a chain    names               chains
    memreasoner    hops                    a letter, 5 times   as many as give 2, 4, 6, 8 or 10 statements
    ruler          hops + 1                5 letters           1

A statement that copies a variable never comes before the one that assigns its value. With ``tokens``, RULER's line of
noise is repeated between statements as often as it fits, or there are sentences of books. Tail h in layout "lines", and
hop h of ``meta["support"]``, is the h-th variable of the chain.

Deviations
1. Names and values of a sample are distinct; RULER's may repeat. A hash assigns the value in the question to a split.
2. RULER's worked example before the question is left out, as models are trained on the task, and the note is in our
   words.
3. "Chains of length 2 to 10" is read as the number of statements: only then has the longest episode the published 14
   lines.
4. Numbers and RULER's names are spelled letter by letter for the word tokenizer, as no vocabulary can hold all of them.
5. Empty lines, one for every two statements after the first two, occur only in training and without noise.

Shape suffixes: F facts, N statements.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from lit_memory.tasks.base import numpy_generator
from lit_memory.tasks.episodes import CITE, EpisodeConfig, EpisodeSample, EpisodeTask, Texts
from lit_memory.tasks.lines import encode_lines
from lit_memory.tasks.needle import LINE, load_hay, repeated_line, string_match_all
from lit_memory.tasks.placement import Placement, merge_in_order, place_between
from lit_memory.text.haystack import Haystack
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.fields import added
from lit_memory.util.seeds import split_of

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NOTE = "[INST] Memorize the chain(s) of variable assignment in the following text, and track them."
VALUE, COPY = "VAR {} = {}", "VAR {} = VAR {}"
QUESTION = "Question: Find all variables that are assigned the value {} in the text above. [/INST]"
PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {} variables are assigned the value "
    "{}, they are:"
)
SHORT_QUESTION = "[INST] Question: Find all variables that are assigned the value {} [/INST]"
SHORT_PREFIX = (
    "Answer: According to the chain(s) of variable assignment, {} variables are assigned the value {}, they are:"
)
LENGTHS = (2, 4, 6, 8, 10)
"""Numbers of statements in the samples of MemReasoner."""
NAME = re.compile(r"\b[A-Z]{5}\b|\b[A-Z](?: [A-Z]){4}\b")
VOCABULARY = (NOTE, VALUE, QUESTION, PREFIX, CITE, LINE, *LETTERS, *(5 * letter for letter in LETTERS), *"0123456789")
"""Texts whose words the word tokenizer has to know."""


class VariableTracking(EpisodeTask):
    """Answer with all variables that have a value.

    exact_set: share of answers with exactly these variables. string_match_all: share of the variables in the answer.
    """

    metrics = ("exact_set", "string_match_all")

    words = VOCABULARY

    @dataclass
    class Config(EpisodeConfig):
        """Settings of variable tracking. ``haystack`` is the noise with ``noise: books``."""

        margin: int = 96
        rules: Literal["memreasoner", "ruler"] = "memreasoner"
        hops: int = 0
        """Statements from the first variable of a chain to the last one (ruler; 0: 4), or variables of a chain
        (memreasoner; 0: 1)."""
        statements: int = 0
        """Statements per sample; 0: drawn (memreasoner), or those of one chain (ruler)."""
        eval_hops: int = 0
        """Hops of the test; 0: ``hops``."""
        value_digits: int = added(5)
        """Digits of a value; fewer digits are easier, for a curriculum."""
        noise: Literal["line", "books"] = "line"
        """Noise between the statements: RULER's line, or sentences of ``haystack``."""
        one_tail: bool = added(False)
        """In layout "lines", one tail has all variables of a chain as its answer, for a model that reads once. Default:
        one tail per variable, answered hop by hop."""
        note: bool = True
        """Begin a text with a note about what is to be done."""
        test_statements: list[int] = field(default_factory=list)
        """Values of ``statements`` in the test, in place of ``test_tokens``."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, self, "hops", "eval_hops", "statements")
            at_least(2, self, "value_digits")
            for split in ("train", "test"):
                self.check_chains(split)

        def check_chains(self, split: str) -> None:
            """Raise FieldError if a split's statements are no whole number of chains, or names or values run out."""
            counts, chain_len = self.statement_counts(split), self.chain_len(split)
            if wrong := [n for n in counts if n % chain_len]:
                name = "eval_hops" if split == "test" and self.eval_hops else "hops"
                name = "statements" if self.statements else name
                expected = f"{wrong[0]} statements are no whole number of chains of {chain_len}; expected a multiple"
                raise FieldError(name, getattr(self, name), expected)
            chains, most = max(counts) // chain_len, 9 * 10 ** (self.value_digits - 1)
            if chains > most:
                more = f"expected more for {chains} chains; there are {most} values"
                raise FieldError("value_digits", self.value_digits, more)
            if self.rules == "memreasoner" and max(counts) > len(LETTERS):
                raise FieldError("statements", self.statements, f"expected at most {len(LETTERS)}, one to a letter")

        def chain_len(self, split: str) -> int:
            """Variables per chain."""
            hops = (split == "test" and self.eval_hops) or self.hops
            return (hops or 4) + 1 if self.rules == "ruler" else hops or 1

        def statement_counts(self, split: str) -> tuple[int, ...]:
            """Possible numbers of statements of a sample."""
            if self.statements:
                return (self.statements,)
            return LENGTHS if self.rules == "memreasoner" else (self.chain_len(split),)

    @property
    def new_tokens(self) -> int:
        of_name = 6 if self.config.tokenizer == "word" else 7  # letters and a comma, which a space may follow
        return max(30, of_name * self.config.chain_len("test"))

    @property
    def reads_hay(self) -> bool:
        return self.config.noise == "books" and self.config.tokens > 0

    def samples(self, seed: int, split: str, step: int, size: int) -> list[EpisodeSample]:
        counts = self.config.statement_counts(split)
        rng = numpy_generator(seed, f"variable_tracking/{split}", step)
        return [self.draw(counts[rng.integers(len(counts))], split, rng) for _ in range(size)]

    def draw(self, count: int, split: str, rng: Generator) -> EpisodeSample:
        """Draw a sample with ``count`` statements, and a question about the value of its first chain."""
        c, length = self.config, self.config.chain_len(split)
        names, values = self.draw_names(count, rng), self.draw_values(count // length, split, rng)
        chains = np.repeat(np.arange(count // length), length)
        position_N = np.argsort(rng.permutation(chains), kind="stable")  # of statement n; a chain stays in order
        statements = [""] * count
        for n, position in enumerate(position_N.tolist()):
            first = n % length == 0
            value, copy = VALUE.format(names[n], values[n // length]), COPY.format(names[n], names[n - 1])
            statements[position] = value if first else copy
        support = position_N[:length].tolist()
        key = [*statements, values[0]]
        if split == "train" and c.rules == "memreasoner" and not c.tokens:
            lines = merge_in_order(np.arange(count), np.full(max(count // 2 - 1, 0), -1), rng).tolist()
            statements, support = ["" if n < 0 else statements[n] for n in lines], [lines.index(n) for n in support]
        question = f"{QUESTION.format(values[0])} {PREFIX.format(length, values[0])}"
        answers = [", ".join(names[:length])] if c.one_tail else names[:length]
        texts = Texts(question, SHORT_QUESTION.format(values[0]), SHORT_PREFIX.format(length, values[0]), answers)
        return self.make_sample(*self.place_facts(statements, support, split, rng), texts, split, key)

    def draw_names(self, count: int, rng: Generator) -> list[str]:
        """Draw distinct names of variables, spelled for the tokenizer."""
        if self.config.rules == "memreasoner":
            return [5 * LETTERS[i] for i in rng.permutation(len(LETTERS))[:count]]
        names: dict[str, None] = {}
        while len(names) < count:
            names["".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=5))] = None
        return [self.spell(name) for name in names]

    def draw_values(self, count: int, split: str, rng: Generator) -> list[str]:
        """Draw distinct numbers, the first of which belongs to the split."""
        values: dict[int, None] = {}
        least = 10 ** (self.config.value_digits - 1)
        while len(values) < count:
            value = int(rng.integers(least, 10 * least))
            if values or split_of(str(value)) == split:
                values[value] = None
        return [self.spell(str(value)) for value in values]

    def spell(self, text: str) -> str:
        """Text with spaces between its characters for the word tokenizer."""
        return " ".join(text) if self.config.tokenizer == "word" else text

    def prose(self, split: str) -> Haystack:
        return load_hay(self.tokenizer, self.config.haystack, self.config.books, split)

    def books(self, split: str) -> Haystack | None:
        return self.prose(split) if self.config.noise == "books" else None

    def place_facts(
        self, statements: list[str], support: list[int], split: str, rng: Generator
    ) -> tuple[Placement, list[int]]:
        """Placement of the note, if there is one, and the statements; and indices of the supporting facts."""
        c = self.config
        note = encode_lines(self.tokenizer, [NOTE] * self.has_note)
        facts, room = encode_lines(self.tokenizer, statements), c.tokens - sum(map(len, note))
        if c.tokens and (short := sum(map(len, facts)) - room) > 0:
            least = f"expected at least {c.tokens + short}, those of the statements, or 0 for no noise"
            raise FieldError("tokens", c.tokens, least)
        if not c.tokens:
            placement = Placement(facts, np.zeros(len(facts), np.int64))
        elif books := self.books(split):
            placement = place_between(facts, room, books, rng)
        else:
            line = repeated_line(self.tokenizer)
            lines = (room - sum(map(len, facts))) // len(line)
            gaps_F = np.sort(rng.choice(lines + 1, len(facts), replace=lines < len(facts)))
            placement = Placement(facts, gaps_F * len(line), line, 0, lines * len(line))
        gaps_F = np.concatenate([np.zeros(len(note), np.int64), placement.gaps_F])
        return placement._replace(facts=[*note, *facts], gaps_F=gaps_F), [n + len(note) for n in support]

    @property
    def has_note(self) -> bool:
        """Whether contexts begin with a note."""
        return self.config.note and self.config.layout == "text"

    def meta(self, samples: list[EpisodeSample]) -> dict[str, Tensor]:
        """Adds the number of statements."""
        counts = [sum(len(fact) > 0 for fact in sample.facts) - self.has_note for sample in samples]
        return super().meta(samples) | {"statements": torch.tensor(counts)}

    def score_answer(self, target: str, answer: str, ended: bool, question: str) -> dict[str, float]:
        names = NAME.findall(target)
        return {
            "exact_set": float(set(NAME.findall(answer)) == set(names)),
            "string_match_all": string_match_all(answer, names),
        }
