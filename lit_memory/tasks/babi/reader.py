"""The sentences of bAbI QA1 to QA5, and a reader that answers its questions from the facts alone.

Paper:     Weston et al. 2015, arXiv 1502.05698; the data and their two generators are described in ``files.py``.

The reader answers all 35,925 questions of QA1 to QA4 in the distributed files, with their supports, and 99.8 % of QA5,
where the labels of the others are wrong (deviation 1 of ``files.py``).
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from lit_memory.util.checks import FieldError

Answer = tuple[str, tuple[int, ...]]
"""An answer and its supports, as indices of facts."""

OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
VERBS = {
    "v1.2": {
        "move": ("moved to", "went to", "went back to", "journeyed to", "travelled to"),
        "get": ("got", "took", "grabbed", "picked up"),
        "drop": ("dropped", "discarded", "put down", "left"),
        "give": ("gave", "handed", "passed"),
    },
    "lua": {
        "move": ("moved to", "went to", "journeyed to", "travelled to"),
        "get": ("got", "took", "grabbed"),
        "drop": ("dropped", "put down", "let go of"),
        "give": ("gave",),
    },
}
FACTS = {
    "move": "{actor} {verb} the {thing}.",
    "get": "{actor} {verb} the {thing}{there}.",
    "drop": "{actor} {verb} the {thing}{there}.",
    "give": "{actor} {verb} the {thing} to {to}.",
    "lua give": "{actor} {verb} {to} the {thing}.",
    "relation": "The {actor} is {verb} of the {thing}.",
}
GIFTS = {
    "What did {actor} give to {to}{last}?": "thing",
    "Who gave the {thing}{last}?": "actor",
    "Who gave the {thing} to {to}{last}?": "actor",
    "Who received the {thing}{last}?": "to",
    "Who did {actor} give the {thing} to{last}?": "to",
}
"""Question about a gift -> the part of the event that is its answer."""


class Event(NamedTuple):
    """Meaning of a fact: ``actor`` moves to, gets, drops or gives (``to`` whom) the ``thing``.

    In QA4: the place ``actor`` lies ``kind`` (north) of the place ``thing``.
    """

    kind: str
    actor: str
    thing: str
    to: str = ""


class Stop(NamedTuple):
    """A known place of an object: where event ``move`` led the actor who took the object in event ``taken``.

    The move may be before or after the object was taken.
    """

    taken: int
    move: int


class Reader:
    """Knowledge after some facts, which answers questions. Numbers are indices into ``events``.

    moves: actor -> latest move.
    taken: object -> latest get or gift.
    touched: object -> latest get, gift or drop.
    trail: object -> its stops, each at another place than the one before.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.moves: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        self.touched: dict[str, int] = {}
        self.trail: dict[str, list[Stop]] = {}
        self._holder: dict[str, str] = {}

    def read(self, event: Event) -> None:
        """Add the event of a fact to the knowledge."""
        now, (kind, actor, thing, to) = len(self.events), event
        self.events.append(event)
        if kind == "move":
            self.moves[actor] = now
            for held, holder in self._holder.items():
                if holder == actor:
                    self._stop(held, now)
        elif kind == "drop":
            self.touched[thing] = now
            self._holder.pop(thing, None)
        elif kind in ("get", "give"):
            self.touched[thing] = self.taken[thing] = now
            self._holder[thing] = taker = to or actor
            if taker in self.moves:
                self._stop(thing, self.moves[taker])

    def _stop(self, thing: str, move: int) -> None:
        """Add the goal of event ``move`` to the trail of an object."""
        trail = self.trail.setdefault(thing, [])
        if trail and self.place(trail[-1]) == self.events[move].thing:
            trail.pop()
        trail.append(Stop(self.taken[thing], move))

    def place(self, stop: Stop) -> str:
        """Name of the place of a stop."""
        return self.events[stop.move].thing

    def answer(self, question: str) -> Answer:
        """Answer and supports, in the order of the files.

        Raises FieldError for a question of another kind, or one that the facts do not answer.
        """
        for pattern, rule in _RULES:
            if match := pattern.fullmatch(question):
                if answer := rule(self, **match.groupdict()):
                    return answer
                raise FieldError("question", question, f"its {len(self.events)} facts do not answer it")
        raise FieldError("question", question, "expected one of bAbI's QA1 to QA5, such as 'Where is Mary?'")

    def where(self, actor: str) -> Answer | None:
        """QA1: the place to which the actor moved last."""
        move = self.moves.get(actor)
        return None if move is None else (self.events[move].thing, (move,))

    def find(self, thing: str) -> Answer | None:
        """QA2: the place to which the holder moved last, or last before the drop; None if it is unknown."""
        trail = self.trail.get(thing)
        if not trail or trail[-1].taken != self.taken[thing]:
            return None
        return self.place(trail[-1]), (self.touched[thing], trail[-1].move)

    def before(self, thing: str, place: str) -> Answer | None:
        """QA3: the place where the object was last before ``place``.

        There is a fourth support if another actor held it there.
        """
        trail = self.trail.get(thing, [])
        for old, new in zip(trail[-2::-1], trail[:0:-1], strict=True):
            if self.place(new) == place:
                fourth = (old.taken,) if old.taken != new.taken else ()
                return self.place(old), (self.touched[thing], new.move, old.move, *fourth)
        return None

    def beside(self, way: str, place: str) -> Answer | None:
        """QA4: the place that lies ``way`` (north) of ``place``, by one fact."""
        for i, (kind, one, other, _) in enumerate(self.events):
            if (kind, other) == (way, place):
                return one, (i,)
            if (kind, one) == (OPPOSITE[way], place):
                return other, (i,)
        return None

    def gift(self, wanted: str, **known: str) -> Answer | None:
        """QA5: the part ``wanted`` of the latest gift whose other parts are ``known``."""
        for i in range(len(self.events) - 1, -1, -1):
            event = self.events[i]
            if event.kind == "give" and all(getattr(event, part) == value for part, value in known.items()):
                return getattr(event, wanted), (i,)
        return None


QUESTIONS: dict[str, Callable[..., Answer | None]] = {
    "Where is {actor}?": Reader.where,
    "Where is the {thing}?": Reader.find,
    "Where was the {thing} before the {place}?": Reader.before,
    "What is {way} of the {place}?": Reader.beside,
    "What is the {place} {way} of?": lambda reader, place, way: reader.beside(OPPOSITE[way], place),
    **{template: partial(Reader.gift, wanted=part) for template, part in GIFTS.items()},
}
"""Template of a question -> the method that answers it."""


def _pattern(template: str, verbs: Sequence[str] = ()) -> re.Pattern[str]:
    """Pattern of the sentences of a template. Its groups are the fields, except for "verb", "there" and "last"."""
    fields = {
        "verb": f"(?:{'|'.join(verbs)})",
        "there": "(?: there)?",
        "last": "(?: last)?",
        "way": f"(?P<way>{'|'.join(OPPOSITE)})",
    }

    def group(field: re.Match[str]) -> str:
        return fields.get(field[1], rf"(?P<{field[1]}>\w+)")

    return re.compile(re.sub(r"\\\{(\w+)\\}", group, re.escape(template)))


_RULES = [(_pattern(template), rule) for template, rule in QUESTIONS.items()]
_EVENTS = [(kind, _pattern(FACTS[kind], VERBS["v1.2"][kind] + VERBS["lua"][kind])) for kind in VERBS["v1.2"]]
_EVENTS += [
    ("give", _pattern(FACTS["lua give"], VERBS["lua"]["give"])),
    *((way, _pattern(FACTS["relation"], [way])) for way in OPPOSITE),
]


def event_of(fact: str) -> Event:
    """The event that a fact states. Raises FieldError for a sentence that neither generator writes."""
    for kind, pattern in _EVENTS:
        if match := pattern.fullmatch(fact):
            return Event(kind, **match.groupdict())
    raise FieldError("fact", fact, "expected one of bAbI's QA1 to QA5, such as 'Mary went to the garden.'")


def interpret(facts: Sequence[str], question: str) -> Answer:
    """Answer and supports of a question, from the facts alone.

    Raises FieldError for other sentences than bAbI's, and for a question that the facts do not answer.
    """
    reader = Reader()
    for fact in facts:
        reader.read(event_of(fact))
    return reader.answer(question)
