"""The sentences of bAbI QA1 to QA5, and a reader that answers its questions from the facts alone.

Paper:     Weston et al. 2015, arXiv 1502.05698; the data and their two generators are described in ``babi.py``.

A reader answers all 35,925 questions of QA1 to QA4 in the files that were at hand, with their supports, and 99.8 % of
QA5, where the other labels are wrong (deviation 1 of ``babi.py``).
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
"""Questions about a gift, and the part of it that they ask for."""


class Event(NamedTuple):
    """What a fact says: ``actor`` moves to, gets, drops or gives (``to`` whom) the ``thing``. QA4: ``actor`` lies
    ``kind`` (north) of ``thing``."""

    kind: str
    actor: str
    thing: str
    to: str = ""


class Stop(NamedTuple):
    """A known place of an object: where event ``move`` led the one who had taken the object, or was about to, in event
    ``taken``."""

    taken: int
    move: int


class Reader:
    """What is known after some facts. Numbers are indices into ``events``.

    moves: actor -> latest move. taken: object -> latest get or gift. touched: object -> latest get, gift or drop.
        trail: object ->
    its stops, each at another place than the one before.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.moves: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        self.touched: dict[str, int] = {}
        self.trail: dict[str, list[Stop]] = {}
        self._holder: dict[str, str] = {}

    def tell(self, event: Event) -> None:
        """Read a fact."""
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
        trail = self.trail.setdefault(thing, [])
        if trail and self.place(trail[-1]) == self.events[move].thing:
            trail.pop()
        trail.append(Stop(self.taken[thing], move))

    def place(self, stop: Stop) -> str:
        return self.events[stop.move].thing

    def answer(self, question: str) -> Answer:
        """Answer and supports, in the order of the files. Raises ValueError for another question, or one that the facts
        leave open."""
        for pattern, read in _READS:
            if match := pattern.fullmatch(question):
                if found := read(self, **match.groupdict()):
                    return found
                raise FieldError("question", question, f"its {len(self.events)} facts do not answer it")
        raise FieldError("question", question, "expected one of bAbI's QA1 to QA5, such as 'Where is Mary?'")

    def where(self, actor: str) -> Answer | None:
        """QA1: the place to which the actor moved last."""
        move = self.moves.get(actor)
        return None if move is None else (self.events[move].thing, (move,))

    def find(self, thing: str) -> Answer | None:
        """QA2: the place to which its holder moved last, or last before the drop; None if that was never said."""
        trail = self.trail.get(thing)
        if not trail or trail[-1].taken != self.taken[thing]:
            return None
        return self.place(trail[-1]), (self.touched[thing], trail[-1].move)

    def before(self, thing: str, place: str) -> Answer | None:
        """QA3: the place from which it last came to ``place``. If another had it there, a fourth support says so."""
        trail = self.trail.get(thing, [])
        for old, new in zip(trail[-2::-1], trail[:0:-1], strict=True):
            if self.place(new) == place:
                return self.place(old), (self.touched[thing], new.move, old.move) + (old.taken,) * (
                    old.taken != new.taken
                )
        return None

    def beside(self, way: str, place: str) -> Answer | None:
        """QA4: what is ``way`` of ``place``, by one fact."""
        for i, (kind, one, other, _) in enumerate(self.events):
            if (kind, other) == (way, place):
                return one, (i,)
            if (kind, one) == (OPPOSITE[way], place):
                return other, (i,)
        return None

    def gift(self, asked: str, **known: str) -> Answer | None:
        """QA5: the part ``asked`` of the latest gift whose other parts are ``known``."""
        for i in range(len(self.events) - 1, -1, -1):
            event = self.events[i]
            if event.kind == "give" and all(getattr(event, part) == value for part, value in known.items()):
                return getattr(event, asked), (i,)
        return None


QUESTIONS: dict[str, Callable[..., Answer | None]] = {
    "Where is {actor}?": Reader.where,
    "Where is the {thing}?": Reader.find,
    "Where was the {thing} before the {place}?": Reader.before,
    "What is {way} of the {place}?": Reader.beside,
    "What is the {place} {way} of?": lambda reader, place, way: reader.beside(OPPOSITE[way], place),
    **{template: partial(Reader.gift, asked=part) for template, part in GIFTS.items()},
}
"""All questions, and how they are answered."""


def _pattern(template: str, verbs: Sequence[str] = ()) -> re.Pattern[str]:
    """What matches the sentences of a template; its groups are the template's fields, without "verb", "there" and
    "last"."""
    fields = {
        "verb": f"(?:{'|'.join(verbs)})",
        "there": "(?: there)?",
        "last": "(?: last)?",
        "way": f"(?P<way>{'|'.join(OPPOSITE)})",
    }
    return re.compile(
        re.sub(r"\\\{(\w+)\\}", lambda field: fields.get(field[1], rf"(?P<{field[1]}>\w+)"), re.escape(template))
    )


_READS = [(_pattern(template), read) for template, read in QUESTIONS.items()]
_EVENTS = [(kind, _pattern(FACTS[kind], VERBS["v1.2"][kind] + VERBS["lua"][kind])) for kind in VERBS["v1.2"]]
_EVENTS += [
    ("give", _pattern(FACTS["lua give"], VERBS["lua"]["give"])),
    *((way, _pattern(FACTS["relation"], [way])) for way in OPPOSITE),
]


def event_of(fact: str) -> Event:
    """What a fact says. Raises ValueError for a sentence that neither generator writes."""
    for kind, pattern in _EVENTS:
        if match := pattern.fullmatch(fact):
            return Event(kind, **match.groupdict())
    raise FieldError("fact", fact, "expected one of bAbI's QA1 to QA5, such as 'Mary went to the garden.'")


def interpret(facts: Sequence[str], question: str) -> Answer:
    """Answer and supports from the facts alone. Raises ValueError, in one line, for what ``event_of`` or
    ``Reader.answer`` refuses."""
    reader = Reader()
    for fact in facts:
        reader.tell(event_of(fact))
    return reader.answer(question)
