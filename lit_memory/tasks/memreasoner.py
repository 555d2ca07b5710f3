"""bAbI as MemReasoner reads it: every fact is a line, and so is every sentence of what hides the facts.

Paper:     Das, Ko, Dai et al. 2025, Can memory-augmented language models generalize on reasoning-in-a-haystack tasks?,
           sections 4.1 and B.1 to B.3 (spec 4).
Reference: none is public.

    lines    [Mary moved to the bathroom.] [] [Sandra went to the hallway.] [Where is Mary?]    tail: Mary is in the
    bathroom EOS text     [Mary moved to the bathroom. Sandra went to the hallway. Where is Mary? bathroom EOS]

    test                      settings
    bAbI                      tokens: 0
    BABILong                  test_tokens: [1000, ...]
    BABILong-soft             and noise: soft
    other places              eval_places: other
    from two hops to one      task: qa2, eval_task: qa1

An empty line stands where an earlier question of the story was. Soft noise are sentences of bAbI's own kind, "Mary
moved to the garden.", which keep the answer: behind the move that settles it, they tell of other people. Splits are
disjoint as in ``babilong.py``.

Deviations
1. The tail has no BOS: a model with ``bos_id`` begins with one, here as in the lines that it learns to write.
2. Contexts of sentences of books are ours, as in ``babilong.py`` (published: BABILong's own samples); there are no
   empty lines in them.
3. Soft noise ends before the sentence that would exceed ``tokens``. What is said of an object is "The milk is in the",
   with its article.
4. Text has no token that asks for the answer: it follows the question.
5. Stories of the simulator do not come twice (published: 10,000, seen 200 times), so that a share of told ones is not
   learnt by heart. Of a folder's stories those that do not fit into ``tokens`` are passed over for the next ones, which
   may then come twice.

Shape suffixes: P sentences of soft noise.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Literal

import numpy as np
from numpy.random import PCG64, Generator

from lit_memory.tasks.babi.files import WORDS, questions
from lit_memory.tasks.babi.reader import Reader, event_of
from lit_memory.tasks.babi.world import ACTORS, PLACES, Question
from lit_memory.tasks.babilong import RULES, TRIES, load_noise
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
from lit_memory.text.corpus import check_source
from lit_memory.text.haystack import Haystack
from lit_memory.text.tokenizers import Tokenizer
from lit_memory.util.checks import FieldError
from lit_memory.util.seeds import mixed_seed

OTHER = {
    "office": "library",
    "garden": "garage",
    "kitchen": "cafe",
    "bathroom": "attic",
    "bedroom": "basement",
    "hallway": "gym",
}
"""Place -> the one that ``eval_places: other`` has instead."""
PLACE = re.compile(rf"\b({'|'.join(PLACES)})\b")
SOFT = [
    f"{who} {verb} to the {place}."
    for who in ACTORS
    for verb in ("moved", "went", "journeyed", "travelled", "went back")
    for place in PLACES
]
"""All sentences of soft noise, actor by actor."""
SUBJECT = re.compile(r"Where is (.+)\?")
PROMPT = "{} is in the"
HOPS = {"qa1": 1, "qa2": 2}
"""Supporting facts of a question."""


class BabiEpisodes(Episodes):
    """Answer a question about where a person or an object is. ``accuracy``: the first word is right."""

    metrics = ("exact_match", "accuracy")

    words = (*WORDS, *OTHER.values(), PROMPT, CITE)

    @dataclass
    class Config(EpisodesConfig):
        """With ``tokens``, facts lie in so many tokens of noise."""

        task: Literal["qa1", "qa2"] = "qa1"
        stories: str = "v1.2"
        """Rules of the simulator, v1.2 or lua; or a folder with the files of bAbI."""
        noise: Literal["books", "soft"] = "books"
        """What is between the facts: sentences of ``haystack``, or of bAbI's kind."""
        empty_lines: bool = True
        """Earlier questions of a story are empty lines, but between sentences of books."""
        eval_task: Literal["same", "qa1", "qa2"] = "same"
        """Questions of the test: those of ``task``, or of another one."""
        eval_places: Literal["same", "other"] = "same"
        """Places of the test: those of the training, or six that it does not have."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_source("stories", self.stories, RULES)

    def in_parts(self, split: str) -> bool:
        return self.config.stories not in RULES

    def samples(self, seed: int, split: str, step: int, size: int) -> list[Episode]:
        c = self.config
        rng = Generator(PCG64(mixed_seed(seed, f"memreasoner/{split}", step)))
        stream = questions(self.asked(split), seed, split, step, size, c.stories)
        return [self.placed(*self.fitting(stream, split), split, rng) for _ in range(size)]

    def prose(self, split: str) -> Haystack:
        return load_noise(self.tokenizer, self.config.haystack, self.config.books, split, True)

    def books(self, split: str) -> Haystack | None:
        return self.prose(split) if self.config.noise == "books" else None

    def asked(self, split: str) -> str:
        """The task that a split asks."""
        return self.config.task if split != "test" or self.config.eval_task == "same" else self.config.eval_task

    def fitting(self, stream: Iterator[Question], split: str) -> tuple[Question, list[np.ndarray]]:
        """The next question whose facts fit into ``tokens``, and the tokens of its facts."""
        c = self.config
        for question in islice(stream, TRIES):
            if split == "test" and c.eval_places == "other":
                question = elsewhere(question)
            if c.empty_lines and not (c.tokens and c.noise == "books"):
                question = with_gaps(question)
            facts = encoded_rows(self.tokenizer, question.facts)
            if not c.tokens or sum(map(len, facts)) <= c.tokens:
                return question, facts
        raise FieldError(
            "tokens",
            c.tokens,
            f"no question among {TRIES} has facts that fit into it; raise it, or 0 for the facts alone",
        )

    def placed(self, question: Question, facts: list[np.ndarray], split: str, rng: Generator) -> Episode:
        c, support, subject = self.config, question.support, subject_of(question, self.asked(split))
        place = Place(facts, np.zeros(len(facts), np.int64))
        if c.tokens and c.noise == "soft":
            facts, support = self.softened(question, facts, rng)
            place = Place(facts, np.zeros(len(facts), np.int64))
        elif books := self.books(split) if c.tokens else None:
            place = between(facts, c.tokens, books, rng)
        prompt = PROMPT.format(subject[0].upper() + subject[1:])
        texts = Texts(question.text, question.text, prompt, [question.answer])
        return self.episode(place, support, texts, split, [*question.facts, question.text])

    def softened(
        self, question: Question, facts: list[np.ndarray], rng: Generator
    ) -> tuple[list[np.ndarray], tuple[int, ...]]:
        """Facts between soft noise, and which of the lines support the answer.

        To put sentence after sentence into a gap drawn from all gaps there are is Polya's urn: the share that lies
        behind the settling move has a beta distribution, and on either side of it all orders of facts and sentences are
        as likely.
        """
        settled, kinds = question.support[-1], len(SOFT) // len(ACTORS)
        said, rows = soft_noise(self.tokenizer, question.answer in OTHER.values())
        room, who = self.config.tokens - sum(map(len, facts)), ACTORS.index(event_of(question.facts[settled]).actor)
        most = room // min(map(len, rows))
        behind_P = rng.random(most) < rng.beta(len(facts) - settled, settled + 1)
        who_P = np.where(behind_P, who + rng.integers(1, len(ACTORS), most), rng.integers(0, len(ACTORS), most)) % len(
            ACTORS
        )
        soft_P = who_P * kinds + rng.integers(0, kinds, most)
        fit = int(np.searchsorted(np.cumsum([len(rows[i]) for i in soft_P]), room, side="right"))
        soft_P, behind_P = soft_P[:fit] + len(facts), behind_P[:fit]
        before = mixed(np.arange(settled), soft_P[~behind_P], rng)
        behind = mixed(np.arange(settled + 1, len(facts)), soft_P[behind_P], rng)
        order = [*before.tolist(), settled, *behind.tolist()]
        texts, tokens = [*question.facts, *said], [*facts, *rows]
        check_answer([texts[i] for i in order], question)
        return [tokens[i] for i in order], tuple(order.index(fact) for fact in question.support)

    def judge(self, target: str, said: str, ended: bool, question: str) -> dict[str, float]:
        first = re.match(r"\W*(\w*)", said)
        return super().judge(target, said, ended, question) | {"accuracy": float(bool(first) and first[1] == target)}  # type: ignore[index]


def subject_of(question: Question, task: str) -> str:
    """Whom or what a question is about. Raises ValueError for one of another kind than the task's."""
    found, hops = SUBJECT.fullmatch(question.text), HOPS[task]
    if not found or len(question.support) != hops:
        raise ValueError(
            f"question={question.text!r} with {len(question.support)} supporting facts: expected 'Where is ...?' with {hops}, as in {task}"
        )
    return found[1]


def with_gaps(question: Question) -> Question:
    """The same question with an empty fact where an earlier one was asked."""
    facts = list(question.facts)
    for above in reversed(question.earlier):
        facts.insert(above, "")
    return replace(
        question,
        facts=tuple(facts),
        support=tuple(i + sum(above <= i for above in question.earlier) for i in question.support),
    )


def moved(text: str) -> str:
    """The same text about other places."""
    return PLACE.sub(lambda found: OTHER[found[0]], text)


def elsewhere(question: Question) -> Question:
    """The same question about other places."""
    *facts, text, answer = map(moved, (*question.facts, question.text, question.answer))
    return replace(question, facts=tuple(facts), text=text, answer=answer)


def check_answer(facts: Sequence[str], question: Question) -> None:
    """Raise ValueError where these facts, of which some may be empty, have another answer than the question's."""
    reader = Reader()
    for fact in filter(None, facts):
        reader.tell(known_event(fact))
    if (found := reader.answer(question.text)[0]) != question.answer:
        raise FieldError(
            "question",
            question.text,
            f"soft noise changed its answer from {question.answer} to {found}; expected the same",
        )


known_event = lru_cache(maxsize=4096)(event_of)


@lru_cache(maxsize=8)
def soft_noise(tokenizer: Tokenizer, other: bool) -> tuple[list[str], list[np.ndarray]]:
    """The sentences of ``SOFT``, of other places if wanted, and their tokens."""
    texts = [moved(text) for text in SOFT] if other else SOFT
    return texts, encoded_rows(tokenizer, texts)
