"""Simulator of bAbI QA1 to QA5, with the rules of v1.2 and of lua; ``files.py`` gives the sources.

A story draws events until one is possible, states it as a fact, and asks a question when one can be answered. The
answers come from a ``Reader``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from numpy.random import Generator

from lit_memory.tasks.babi.reader import FACTS, GIFTS, OPPOSITE, VERBS, Event, Reader, interpret

Rules = Literal["v1.2", "lua"]
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OBJECTS = ("apple", "football", "milk")
"""Objects, in the order in which v1.2 looks for one to give."""
ACTORS = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Mary", "Fred", "Bill", "Jeff")
"""Actors of v1.2's QA5, in the order in which it looks for a recipient."""
ACTS = {
    "qa1": ("move",),
    "qa2": ("move", "get", "drop"),
    "qa3": ("move", "get", "drop"),
    "qa5": ("move", "get", "drop", "give"),
}
WINDOW = 5
"""v1.2 asks about one of the last ``WINDOW`` facts."""


@dataclass(frozen=True)
class Question:
    """One question with the facts before it.

    facts: all facts before the question in its story.
    support: indices into ``facts``, in the order of the files (QA2: get or drop, move; QA3: get or drop, move to the
        place in the question, move before that).
    earlier: for each earlier question of the story, the number of facts before it.
    """

    facts: tuple[str, ...]
    text: str
    answer: str
    support: tuple[int, ...]
    earlier: tuple[int, ...] = field(default=(), repr=False)


class Draws:
    """Random choices, from random numbers drawn in blocks: one call of numpy per choice would take most of the time."""

    def __init__(self, rng: Generator) -> None:
        self.rng, self.block = rng, []

    def uniform(self) -> float:
        """A number from 0 to 1."""
        if not self.block:
            self.block = self.rng.random(256).tolist()
        return self.block.pop()

    def pick(self, options: Sequence[Any]) -> Any:
        """One of the options, each with the same probability."""
        return options[int(self.uniform() * len(options))]

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        """The items in random order."""
        return sorted(items, key=lambda _: self.uniform())


class World:
    """State of one story. is_in: actor -> place, object -> place or holder. new: facts since the last question."""

    rules: Rules

    def __init__(self, task: str, draws: Draws) -> None:
        self.task, self.draws, self.acts = task, draws, ACTS[task]
        self.reader, self.facts, self.new = Reader(), [], 0
        self.is_in: dict[str, str] = {}

    def draw(self) -> Event | None:
        """Draw an event; None if it is not possible."""
        raise NotImplementedError

    def fact(self, event: Event, verb: str) -> str:
        """Sentence that states an event."""
        raise NotImplementedError

    def ask(self) -> str | None:
        """Draw a question; None if there is none yet."""
        return getattr(self, self.task)()

    def step(self, unless: Callable[[Event], bool] = lambda event: False) -> None:
        """Draw events until one is possible and ``unless`` is false for it; apply it and add its fact."""
        while not (event := self.draw()) or unless(event):
            pass
        kind, actor, thing, to = event
        if kind == "move":
            self.is_in[actor] = thing
        else:
            self.is_in[thing] = {"get": actor, "drop": self.is_in[actor], "give": to}[kind]
        self.reader.read(event)
        self.facts.append(self.fact(event, self.draws.pick(VERBS[self.rules][kind])))
        self.new += 1

    def ask_gift(self, thing: str, last: str = "") -> str:
        """Draw a question about the latest gift of ``thing``: "What did ... give" with probability 1/3, each of the
        other four with 1/6."""
        gift = next(event for event in reversed(self.reader.events) if event.kind == "give" and event.thing == thing)
        what, *others = GIFTS
        return self.draws.pick((what, what, *others)).format(**gift._asdict(), last=last)


class V12(World):
    """Rules of v1.2: spec 2.3 to 2.6."""

    rules = "v1.2"

    def __init__(self, task: str, draws: Draws) -> None:
        super().__init__(task, draws)
        self.actors = GIVERS if task == "qa5" else ACTORS
        self.is_in = {name: draws.pick(PLACES) for name in (*self.actors, *OBJECTS)}
        self.there = {"get": 0.2 if task == "qa3" else 1.0, "drop": 0.205}

    def draw(self) -> Event | None:
        """Draw an actor before the object, among those that can be got or dropped; a gift is the first possible one."""
        pick, is_in = self.draws.pick, self.is_in
        kind = pick(self.acts)
        if kind == "give":
            held = [(is_in[thing], thing) for thing in OBJECTS if is_in[thing] in self.actors]
            return next(
                (Event(kind, a, thing, to) for a, thing in held for to in GIVERS if to != a and is_in[to] == is_in[a]),
                None,
            )
        actor = pick(self.actors)
        if kind == "move":
            place = pick(PLACES)
            return Event(kind, actor, place) if place != is_in[actor] else None
        source = is_in[actor] if kind == "get" else actor
        things = [thing for thing in OBJECTS if is_in[thing] == source]
        return Event(kind, actor, pick(things)) if things else None

    def fact(self, event: Event, verb: str) -> str:
        there = " there" if event.kind in self.there and self.draws.uniform() < self.there[event.kind] else ""
        return FACTS[event.kind].format(**event._asdict(), verb=verb, there=there)

    def ask(self) -> str | None:
        """Draw a question after every second fact."""
        return None if self.new % 2 else super().ask()

    def recent(self, *kinds: str) -> list[Event]:
        """Events of these kinds among the last ``WINDOW``."""
        return [event for event in self.reader.events[-WINDOW:] if event.kind in kinds]

    def qa1(self) -> str:
        return f"Where is {self.draws.pick(self.recent('move')).actor}?"

    def qa2(self) -> str | None:
        """Ask about an object that was dropped after its holder moved, or whose holder moved after getting it."""
        events, find = self.reader.events, self.reader.find
        known = {thing: answer[1] for thing in OBJECTS if (answer := find(thing))}
        ready = {thing for thing, (touched, move) in known.items() if events[touched].kind == "drop" or move > touched}
        things = [event.thing for event in self.recent("get", "drop") if event.thing in ready]
        return f"Where is the {self.draws.pick(things)}?" if things else None

    def qa3(self) -> str | None:
        """Ask where an object was before one of the places to which its last holder carried it, except the first."""
        reader, pick = self.reader, self.draws.pick
        carried = {
            thing: [reader.place(stop) for stop in trail if stop.move > reader.taken[thing]]
            for thing, trail in reader.trail.items()
        }
        things = [event.thing for event in self.recent("get", "drop") if len(carried.get(event.thing, ())) > 1]
        if not things:
            return None
        places = carried[thing := pick(things)]
        return f"Where was the {thing} before the {pick([place for place in places if place in places[1:]])}?"

    def qa5(self) -> str | None:
        given = list(dict.fromkeys(event.thing for event in self.recent("give")))
        return self.ask_gift(self.draws.pick(given)) if given else None


LUA_START = {"apple": "kitchen", "football": "garden", "milk": "kitchen"}
LUA_START |= {"Daniel": "hallway", "John": "kitchen", "Mary": "bedroom", "Sandra": "garden"}
LUA_EVENTS = {
    kind: [
        Event(kind, *names)
        for names in product(ACTORS, PLACES if kind == "move" else OBJECTS, ACTORS if kind == "give" else [""])
    ]
    for kind in ACTS["qa5"]
}
LUA_MOVES = {(a, p): [e for e in LUA_EVENTS["move"] if e.actor == a and e.thing != p] for a in ACTORS for p in PLACES}
"""Actor, place -> the moves from there."""


class Lua(World):
    """Rules of lua: spec 2.10. The kind of act is drawn first, then its actor, object and recipient."""

    rules = "lua"

    def __init__(self, task: str, draws: Draws) -> None:
        super().__init__(task, draws)
        self.is_in = LUA_START.copy()

    def draw(self) -> Event | None:
        """Draw an act and then one of its possible events.

        None with the probability that a hundred random events of the act are all impossible.
        """
        kind = self.draws.pick(self.acts)
        possible, count = self.possible(kind), len(LUA_EVENTS[kind])
        return self.draws.pick(possible) if self.draws.uniform() >= (1 - len(possible) / count) ** 100 else None

    def possible(self, kind: str) -> list[Event]:
        """The events of an act that can happen now. A story that is to be short costs dozens that are not."""
        is_in, events = self.is_in, LUA_EVENTS[kind]
        if kind == "move":
            return [event for actor in ACTORS for event in LUA_MOVES[actor, is_in[actor]]]
        if kind == "get":
            return [event for event in events if is_in[event.thing] == is_in[event.actor]]
        held = [event for event in events if is_in[event.thing] == event.actor != event.to]
        return held if kind == "drop" else [event for event in held if is_in[event.to] == is_in[event.actor]]

    def fact(self, event: Event, verb: str) -> str:
        return FACTS["lua give" if event.kind == "give" else event.kind].format(**event._asdict(), verb=verb, there="")

    def qa1(self) -> str | None:
        return f"Where is {self.draws.pick(list(self.reader.moves))}?" if self.new == 2 else None

    def qa2(self) -> str | None:
        known = [thing for thing in OBJECTS if self.reader.find(thing)]
        if not known or self.new < 3 or self.draws.uniform() >= 0.5:
            return None
        return f"Where is the {self.draws.pick(known)}?"

    def qa3(self) -> str | None:
        """Ask about the last change of place of an object."""
        moved = [thing for thing in OBJECTS if len(self.reader.trail.get(thing, ())) > 1]
        if not moved or self.new < 3 or self.draws.uniform() < 0.5:
            return None
        thing = self.draws.pick(moved)
        return f"Where was the {thing} before the {self.reader.place(self.reader.trail[thing][-1])}?"

    def qa5(self) -> str | None:
        """Ask about a gift, after up to five events without the object and without a gift between the same people."""
        gift = self.reader.events[-1]
        if gift.kind != "give" or self.new < 2:
            return None
        for _ in range(self.draws.pick(range(6))):
            self.step(
                unless=lambda event: event.thing == gift.thing or (event.actor, event.to) == (gift.actor, gift.to)
            )
        return self.ask_gift(gift.thing, " last")


def _row(rules: Rules, draws: Draws) -> list[Question]:
    """Story of QA4: three places in a row, two facts, and a question about one of them (spec 2.7)."""
    center, *ends = draws.shuffled(PLACES)[:3]
    way = draws.pick(list(OPPOSITE))
    facts = []
    for end, side in zip(ends, (way, OPPOSITE[way]), strict=True):
        facts.append(Event(side, end, center) if draws.uniform() < 2 / 3 else Event(OPPOSITE[side], center, end))
    facts = draws.shuffled(facts)
    kind, one, other, _ = draws.pick(facts)
    if rules == "lua" and draws.uniform() < 0.5:
        kind, one, other = OPPOSITE[kind], other, one
    question = draws.pick((f"What is {kind} of the {other}?", f"What is the {other} {OPPOSITE[kind]} of?"))
    texts = tuple(FACTS["relation"].format(actor=fact.actor, verb=fact.kind, thing=fact.thing) for fact in facts)
    return [Question(texts, question, *interpret(texts, question))]


def _draw_story(task: str, rules: Rules, draws: Draws, most: float) -> list[Question]:
    """Draw five questions of one story, or those with at most ``most`` facts; none if lua rejects it, because an answer
    of QA3 needs four supports."""
    world, questions = {"v1.2": V12, "lua": Lua}[rules](task, draws), []
    while len(questions) < 5 and len(world.facts) < most:
        world.step()
        if not (text := world.ask()) or len(world.facts) > most:
            continue
        earlier = tuple(len(question.facts) for question in questions)
        questions.append(Question(tuple(world.facts), text, *world.reader.answer(text), earlier=earlier))
        if len(questions[-1].support) > 3:
            return []
        world.new = 0
    return questions


def draw_story(task: str, rules: Rules, draws: Draws, most: float = math.inf) -> list[Question]:
    """Draw the questions of one story: five, or those of them with at most ``most`` facts; one in QA4."""
    if task == "qa4":
        return _row(rules, draws)
    while not (story := _draw_story(task, rules, draws, most)):
        pass
    return story
