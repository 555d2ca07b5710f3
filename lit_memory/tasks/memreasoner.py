"""bAbI as MemReasoner reads it: every fact is a line, and so is every sentence of the noise.

Paper:     Das, Ko, Dai et al. 2025, Can memory-augmented language models generalize on reasoning-in-a-haystack tasks?,
           sections 4.1 and B.1 to B.3 (spec 4).
Reference: none is public.

    lines    [Mary moved to the bathroom.] [] [Sandra went to the hallway.] [Where is Mary?]
             tail: Mary is in the bathroom EOS
    text     [Mary moved to the bathroom. Sandra went to the hallway. Where is Mary? bathroom EOS]

    test                      settings
    bAbI                      tokens: 0
    BABILong                  test_tokens: [1000, ...]
    BABILong-soft             and noise: soft
    other places              eval_places: other
    from two hops to one      task: qa2, eval_task: qa1

An empty line takes the place of an earlier question of the story. Soft noise consists of bAbI's own kind of sentences,
"Mary moved to the garden.", and keeps the answer: after the move that settles it, the noise is about other people.
Splits are disjoint as in ``babilong.py``.

Deviations
1. The tail has no BOS: a model with ``bos_id`` begins with one, here as in the lines that it learns to write.
2. Contexts with sentences of books are our own, as in ``babilong.py`` (published: BABILong's samples); they have no
   empty lines.
3. Soft noise ends before the sentence that would exceed ``tokens``. The prompt about an object, "The milk is in the",
   has its article.
4. Layout "text" has no token between question and answer.
5. Stories of the simulator do not repeat (published: 10,000, seen 200 times), so that the supervised share of them
   cannot be memorised. Stories of a folder that do not fit into ``tokens`` are skipped for the next ones, which may
   then repeat.
6. ``renamed`` is ours: the published models know more words than the answers from their pretraining.

Shape suffixes: P sentences of soft noise.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator

from lit_memory.tasks.babi.files import SHIPPED_STORIES, WORDS, check_stories, questions
from lit_memory.tasks.babi.reader import Reader, event_of
from lit_memory.tasks.babi.world import ACTORS, PLACES, Question
from lit_memory.tasks.babilong import RULES, TRIES, load_noise
from lit_memory.tasks.base import numpy_generator
from lit_memory.tasks.episodes import CITE, EpisodeConfig, EpisodeSample, EpisodeTask, Texts
from lit_memory.tasks.extras import places_of_noise
from lit_memory.tasks.lines import encode_lines
from lit_memory.tasks.mixins import ReadInOrder
from lit_memory.tasks.placement import Placement, merge_in_order, place_between
from lit_memory.text.corpus import check_source
from lit_memory.text.haystack import Haystack
from lit_memory.text.tokenizers import Tokenizer
from lit_memory.util.checks import FieldError
from lit_memory.util.fields import added

OTHER_PLACES = {
    "office": "library",
    "garden": "garage",
    "kitchen": "cafe",
    "bathroom": "attic",
    "bedroom": "basement",
    "hallway": "gym",
}
"""Place -> the one that replaces it with ``eval_places: other``."""
RESERVED = {*PLACES, *OTHER_PLACES.values()}
"""Places that no question of the training has in place of its own."""
PLACE = re.compile(rf"\b({'|'.join(PLACES)})\b")
SOFT_SENTENCES = [
    f"{who} {verb} to the {place}."
    for who in ACTORS
    for verb in ("moved", "went", "journeyed", "travelled", "went back")
    for place in PLACES
]
"""All sentences of soft noise, actor by actor."""
SUBJECT = re.compile(r"Where is (.+)\?")
PROMPT = "{} is in the"
HOPS = {"qa1": 1, "qa2": 2}
"""Number of supporting facts of a question."""


class BabiEpisodes(EpisodeTask, ReadInOrder):
    """Answer a question about where a person or an object is. ``accuracy``: the first word is right."""

    metrics = ("exact_match", "accuracy")
    sources: ClassVar = {**EpisodeTask.sources, "stories": (*RULES, SHIPPED_STORIES)}

    words = (*WORDS, *OTHER_PLACES.values(), PROMPT, CITE)

    @dataclass
    class Config(EpisodeConfig):
        """Settings of bAbI as episodes."""

        task: Literal["qa1", "qa2"] = "qa1"
        stories: str = "v1.2"
        """Rules of the simulator, v1.2 or lua; or the files of bAbI: shipped-babi, or a folder."""
        noise: Literal["books", "soft"] = "books"
        """Noise between the facts: sentences of ``haystack``, or of bAbI's own kind."""
        empty_lines: bool = True
        """Earlier questions of a story become empty lines, except between sentences of books."""
        eval_task: Literal["same", "qa1", "qa2"] = "same"
        """Questions of the test: those of ``task``, or of another bAbI task."""
        eval_places: Literal["same", "other"] = "same"
        """Places of the test: those of the training, or six others."""
        renamed: float = added(0.0)
        """Share of the training's questions whose places are others of the noise, six for each, none of which a test
        has: from six places alone, a small model learns six answers, and not to write what it has found."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_source("stories", self.stories, (*RULES, SHIPPED_STORIES))
            if not 0 <= self.renamed <= 1:
                raise FieldError("renamed", self.renamed, "expected a share from 0 to 1")
            if self.renamed and self.noise == "soft":
                raise FieldError("renamed", self.renamed, "expected 0 with noise: soft, which has the six places")

    def check_files(self) -> None:
        super().check_files()
        for task in {self.config.task, self.babi_task("test")}:
            check_stories(self.config.stories, task)

    def in_order(self, split: str) -> bool:
        return self.config.stories not in RULES

    @property
    def reads_hay(self) -> bool:
        return self.config.noise == "books" and self.config.tokens > 0

    def samples(self, seed: int, split: str, step: int, size: int) -> list[EpisodeSample]:
        c = self.config
        rng = numpy_generator(seed, f"memreasoner/{split}", step)
        stream = questions(self.babi_task(split), seed, split, step, size, c.stories)
        if split == "train" and c.renamed:
            stream = self.with_renamed(stream, numpy_generator(seed, "renamed/train", step))
        return [self.plant(*self.next_fitting(stream, split), split, rng) for _ in range(size)]

    def with_renamed(self, stream: Iterator[Question], rng: Generator) -> Iterator[Question]:
        """Questions of which a share, ``renamed``, is about other places of the noise."""
        places = [place for place in places_of_noise(self.config.mentioned) if place not in RESERVED]
        for question in stream:
            chosen = rng.permutation(places)[: len(PLACES)]
            new = {old: str(place) for old, place in zip(PLACES, chosen, strict=True)}
            yield with_places(question, new) if rng.random() < self.config.renamed else question

    def prose(self, split: str) -> Haystack:
        return load_noise(self.tokenizer, self.config.haystack, self.config.books, split, True)

    def books(self, split: str) -> Haystack | None:
        return self.prose(split) if self.config.noise == "books" else None

    def babi_task(self, split: str) -> str:
        """The bAbI task of a split's questions."""
        return self.config.task if split != "test" or self.config.eval_task == "same" else self.config.eval_task

    def next_fitting(self, stream: Iterator[Question], split: str) -> tuple[Question, list[np.ndarray]]:
        """The next question whose facts fit into ``tokens``, and the tokens of its facts."""
        c = self.config
        for question in islice(stream, TRIES):
            if split == "test" and c.eval_places == "other":
                question = with_places(question, OTHER_PLACES)
            if c.empty_lines and not (c.tokens and c.noise == "books"):
                question = with_empty_facts(question)
            facts = encode_lines(self.tokenizer, question.facts)
            if not c.tokens or sum(map(len, facts)) <= c.tokens:
                return question, facts
        expected = f"no question among {TRIES} has facts that fit into it; raise it, or 0 for the facts alone"
        raise FieldError("tokens", c.tokens, expected)

    def plant(self, question: Question, facts: list[np.ndarray], split: str, rng: Generator) -> EpisodeSample:
        """Sample of a question whose facts lie in noise, if there is any."""
        c, support, subject = self.config, question.support, subject_of(question, self.babi_task(split))
        if c.tokens and c.noise == "soft":
            facts, support = self.add_soft_noise(question, facts, rng)
        placement = Placement(facts, np.zeros(len(facts), np.int64))
        if c.tokens and (books := self.books(split)):
            placement = place_between(facts, c.tokens, books, rng)
        prompt = PROMPT.format(subject[0].upper() + subject[1:])
        texts = Texts(question.text, question.text, prompt, [question.answer])
        return self.make_sample(placement, support, texts, split, [*question.facts, question.text])

    def add_soft_noise(
        self, question: Question, facts: list[np.ndarray], rng: Generator
    ) -> tuple[list[np.ndarray], tuple[int, ...]]:
        """Lines of the facts and soft noise, and the indices of the lines that support the answer.

        Equivalent to inserting sentence after sentence into a uniformly drawn gap, which is Polya's urn: the share of
        sentences after the settling move has a beta distribution, and on either side of the move all orders of facts
        and sentences have the same probability.
        """
        settled, actors = question.support[-1], len(ACTORS)
        kinds, settler = len(SOFT_SENTENCES) // actors, ACTORS.index(event_of(question.facts[settled]).actor)
        soft_texts, soft_rows = soft_noise(self.tokenizer, question.answer in OTHER_PLACES.values())
        room = self.config.tokens - sum(map(len, facts))
        most = room // min(map(len, soft_rows))
        after_P = rng.random(most) < rng.beta(len(facts) - settled, settled + 1)
        others_P, anyone_P = rng.integers(1, actors, most), rng.integers(0, actors, most)
        actor_P = np.where(after_P, settler + others_P, anyone_P) % actors
        soft_P = actor_P * kinds + rng.integers(0, kinds, most)
        fit = int(np.searchsorted(np.cumsum([len(soft_rows[i]) for i in soft_P]), room, side="right"))
        soft_P, after_P = soft_P[:fit] + len(facts), after_P[:fit]
        before = merge_in_order(np.arange(settled), soft_P[~after_P], rng)
        after = merge_in_order(np.arange(settled + 1, len(facts)), soft_P[after_P], rng)
        order = [*before.tolist(), settled, *after.tolist()]
        texts, rows = [*question.facts, *soft_texts], [*facts, *soft_rows]
        check_answer([texts[i] for i in order], question)
        return [rows[i] for i in order], tuple(order.index(fact) for fact in question.support)

    def score_answer(self, target: str, answer: str, ended: bool, question: str) -> dict[str, float]:
        words = re.findall(r"\w+", answer)
        accuracy = float(words[:1] == [target])
        return super().score_answer(target, answer, ended, question) | {"accuracy": accuracy}


def subject_of(question: Question, task: str) -> str:
    """Person or object that a question is about. Raises ValueError for a question of another kind than the task's."""
    match, hops, found = SUBJECT.fullmatch(question.text), HOPS[task], len(question.support)
    if not match or found != hops:
        expected = f"expected 'Where is ...?' with {hops}, as in {task}"
        raise ValueError(f"question={question.text!r} with {found} supporting facts: {expected}")
    return match[1]


def with_empty_facts(question: Question) -> Question:
    """The same question with an empty fact in place of every earlier question of the story."""
    facts = list(question.facts)
    for above in reversed(question.earlier):
        facts.insert(above, "")
    support = tuple(i + sum(above <= i for above in question.earlier) for i in question.support)
    return replace(question, facts=tuple(facts), support=support)


def rename_places(text: str, places: Mapping[str, str]) -> str:
    """The same text with other places: those of bAbI -> the others."""
    return PLACE.sub(lambda match: places[match[0]], text)


def with_places(question: Question, places: Mapping[str, str]) -> Question:
    """The same question with other places."""
    *facts, text, answer = (rename_places(text, places) for text in (*question.facts, question.text, question.answer))
    return replace(question, facts=tuple(facts), text=text, answer=answer)


def check_answer(facts: Sequence[str], question: Question) -> None:
    """Raise FieldError if these facts have another answer than the question's. Empty facts are ignored."""
    reader = Reader()
    for fact in filter(None, facts):
        reader.read(cached_event(fact))
    answer, _ = reader.answer(question.text)
    if answer != question.answer:
        change = f"soft noise changed its answer from {question.answer} to {answer}; expected the same"
        raise FieldError("question", question.text, change)


cached_event = lru_cache(maxsize=4096)(event_of)


@lru_cache(maxsize=8)
def soft_noise(tokenizer: Tokenizer, other: bool) -> tuple[list[str], list[np.ndarray]]:
    """``SOFT_SENTENCES`` and their tokens; ``other``: with other places."""
    texts = [rename_places(text, OTHER_PLACES) for text in SOFT_SENTENCES] if other else SOFT_SENTENCES
    return texts, encode_lines(tokenizer, texts)
