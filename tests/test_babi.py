"""bAbI: the simulator against the statistics of the distributed files (spec 2.9) and against its rules, written out
slowly; the reader, the parser, the samples.

``understood`` and what follows it share no code with the package. Tests of the files need ``../shared`` or
LIT_MEMORY_SHARED.
"""

import hashlib
import itertools
import math
import os
import re
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lit_memory import BABILongData, MemReasonerData
from lit_memory.tasks.babi.files import FEWEST_FACTS, FILES, LABELS, WORDS, load, parse, questions, simulate
from lit_memory.tasks.babi.reader import interpret
from lit_memory.tasks.babi.world import Draws, Lua, draw_story
from lit_memory.util.checks import FieldError
from lit_memory.util.seeds import split_of

DATA = (
    Path(os.environ.get("LIT_MEMORY_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    / "data"
    / "babi"
    / "en-10k"
)
GENERATORS = ("v1.2", "lua")
OBJECTS, PLACES = ("apple", "football", "milk"), ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
GIFT_FORMS = (
    "What did _ give to _ ?",
    "Who gave the _ ?",
    "Who gave the _ to _ ?",
    "Who received the _ ?",
    "Who did _ give the _ to ?",
)
NAMES = {*OBJECTS, *PLACES, *OPPOSITE, "John", "Mary", "Sandra", "Daniel", "Bill", "Fred", "Jeff"}
BOTH = [(task, generator) for generator in GENERATORS for task in FILES]


def split_of_sample(facts, question):
    return split_of("\n".join((*facts, question)))


@cache
def simulated(task, generator="v1.2", count=2000):
    rng = np.random.default_rng(5)
    return [simulate(task, rng, generator) for _ in range(count)]


@cache
def files(task, *kinds):
    if not DATA.is_dir():
        pytest.skip("../shared is absent")
    return [
        story for kind in kinds for path in sorted(DATA.glob(f"{FILES[task]}_{kind}*.txt")) for story in parse(path)
    ]


@cache
def understood(fact):
    """(kind, actor, thing, recipient) from the words of a fact, for both generators."""
    words = fact.rstrip(".").removesuffix(" there").split()
    after = words[words.index("the") + 1] if "the" in words else ""
    if "is" in words:
        return words[3], words[1], words[-1], ""
    if words[1] in ("gave", "handed", "passed"):
        return "give", words[0], after, words[-1] if words[2] == "the" else words[2]
    kind = (
        "move" if after in PLACES else "drop" if words[1] in ("dropped", "discarded", "put", "left", "let") else "get"
    )
    return kind, words[0], after, ""


def moves(events, actor, start, stop):
    """Indices of an actor's moves in events[start:stop]."""
    return [i for i in range(start, stop) if events[i][:2] == ("move", actor)]


def possible(task, facts):
    """Every question that v1.2 may ask after these facts, as (text, answer, support): spec 2.6, word by word."""
    events = [understood(fact) for fact in facts]
    window, found = range(max(0, len(events) - 5), len(events)), set()
    for f in window:
        kind, actor, thing, to = events[f]
        if task == "qa1":
            last = moves(events, actor, 0, len(events))[-1]
            found.add((f"Where is {actor}?", events[last][2], (last,)))
        if task == "qa5" and kind == "give":
            t = max(i for i, event in enumerate(events) if event[0] == "give" and event[2] == thing)
            _, actor, thing, to = events[t]
            pair = max(
                i for i, event in enumerate(events) if event[0] == "give" and (event[1], event[3]) == (actor, to)
            )
            found.add((f"What did {actor} give to {to}?", events[pair][2], (pair,)))
            found |= {(f"Who gave the {thing}?", actor, (t,)), (f"Who gave the {thing} to {to}?", actor, (t,))}
            found |= {(f"Who received the {thing}?", to, (t,)), (f"Who did {actor} give the {thing} to?", to, (t,))}
        if task in ("qa2", "qa3") and kind in ("get", "drop"):
            t = max(i for i, event in enumerate(events) if event[0] in ("get", "drop") and event[2] == thing)
            kind, actor, _, _ = events[t]
            if task == "qa2":
                trips = moves(events, actor, t, len(events)) if kind == "get" else moves(events, actor, 0, t)
                found |= {(f"Where is the {thing}?", events[trips[-1]][2], (t, trips[-1]))} if trips else set()
                continue
            got = t if kind == "get" else max(i for i in range(t) if events[i][0] == "get" and events[i][2] == thing)
            phase = moves(events, actor, got, len(events) if kind == "get" else t)
            for place in {events[i][2] for i in phase}:
                i = max(i for i, move in enumerate(phase) if events[move][2] == place)
                if i:
                    answer = events[phase[i - 1]][2]
                    found.add((f"Where was the {thing} before the {place}?", answer, (t, phase[i], phase[i - 1])))
    return found


def asked_and_missed(task, stories):
    """Of all moments when v1.2 may ask: how often it asks what the rules allow, asks something else, and does not
    ask."""
    counts = Counter()
    for story in stories:
        asked = {len(q.facts): (q.text, q.answer, q.support) for q in story}
        for end in range(2, len(story[-1].facts) + 1, 2):
            allowed = possible(task, story[-1].facts[:end])
            if end in asked or allowed:
                counts["missed" if end not in asked else "right" if asked[end] in allowed else "wrong"] += 1
    return counts


@pytest.mark.parametrize("task", ["qa1", "qa2", "qa3", "qa5"])
def test_slow_twin(task):
    """A question is asked after two facts, and after two more again, exactly when the rules allow one, and it is one of
    those."""
    counts = asked_and_missed(task, simulated(task)[:100])
    assert counts == {"right": 500}, counts


@pytest.mark.parametrize("task", ["qa1", "qa2", "qa3", "qa5"])
def test_the_rules_are_those_of_the_files(task):
    """The files ask all that the rules of spec 2.6 allow and nothing else, but for the wrong labels of QA5, and for 1 %
    of QA3."""
    counts = asked_and_missed(task, files(task, "test"))
    assert counts["right"] + counts["wrong"] == 1000
    assert counts["wrong"] <= {"qa5": 2}.get(task, 0) and counts["missed"] <= {"qa3": 10}.get(task, 0), counts


# Spec 2.9, the distributed training files. Places are in alphabetical order; QA3's answers were counted on 385 stories,
# and are uniform in the limit.
TABLE = {
    "qa1": {
        "length": [6.00, 10.0],
        "fact": [6.2, 29.0],
        "sizes": [21, 7, 2],
        "histogram": [0.2, 0.2, 0.2, 0.2, 0.2, 0],
        "new": [1],
        "newest": [0.452, 0.290, 0.133, 0.086, 0.040],
        "acts": [1],
        "forms": [1],
        "answers": [0.173, 0.164, 0.166, 0.166, 0.164, 0.166],
        "actors": [0.25] * 4,
    },
    "qa2": {
        "length": [15.58, 22.0],
        "fact": [6.1, 28.6],
        "sizes": [35, 7, 2],
        "quantiles": [4, 10, 14, 20, 30],
        "histogram": [
            0.0104,
            0.0452,
            0.0682,
            0.0872,
            0.0955,
            0.1068,
            0.1049,
            0.1006,
            0.0886,
            0.0746,
            0.0605,
            0.0460,
            0.0327,
            0.0234,
        ],
        "new": [0.581, 0.153, 0.093, 0.059],
        "newest": [0.417, 0.262, 0.158, 0.101, 0.062],
        "drop first": [0.688],
        "acts": [0.650, 0.198, 0.152, 0],
        "forms": [1],
        "answers": [0.158, 0.176, 0.177, 0.173, 0.155, 0.161],
        "actors": [0.25] * 4,
        "there": [1, 0.205],
    },
    "qa3": {
        "length": [51.03, 74.0],
        "fact": [5.9, 27.6],
        "sizes": [36, 7, 4],
        "quantiles": [12, 26, 44, 66, 114],
        "new": [0.434, 0.055, 0.047, 0.039],
        "newest": [0.403, 0.255, 0.161, 0.104, 0.078],
        "drop first": [0.79],
        "acts": [0.633, 0.190, 0.177, 0],
        "forms": [1],
        "answers": [1 / 6] * 6,
        "actors": [0.25] * 4,
        "there": [0.20, 0.205],
    },
    "qa4": {
        "length": [2, 2],
        "fact": [8, 35.2],
        "sizes": [17, 8, 2],
        "histogram": [1],
        "newest": [0.501, 0.499],
        "forms": [0.502, 0.498],
        "answers": [0.168, 0.164, 0.159, 0.166, 0.171, 0.171],
        "ways": [0.25] * 4,
    },
    "qa5": {
        "length": [20.05, 27.3],
        "fact": [6.2, 28.0],
        "sizes": [41, 7, 2],
        "quantiles": [6, 10, 16, 26, 46],
        "histogram": [
            0.0094,
            0.0323,
            0.0572,
            0.0764,
            0.0871,
            0.0868,
            0.0820,
            0.0756,
            0.0686,
            0.0585,
            0.0516,
            0.0455,
            0.0382,
            0.0347,
        ],
        "new": [0.708, 0.045, 0.042, 0.037],
        "newest": [0.428, 0.224, 0.154, 0.111, 0.083],
        "acts": [0.559, 0.169, 0.117, 0.155],
        "forms": [0.336, 0.170, 0.167, 0.165, 0.163],
        "answers": [*[0] * 6, 0.159, 0.175, 0.145, 0.185, 0.137, 0.108, 0.091],
        "actors": [0.25] * 4,
        "given": [0.408, 0.330, 0.262],
        "recipients": [0.277, 0.262, 0.240, 0.220],
        "two given": [0.033],
        "there": [1, 0.205],
    },
}


def shares(items, *keys):
    """Share of each key."""
    counts = Counter(items)
    return [counts[key] / max(counts.total(), 1) for key in keys]


@cache
def tokens(text):
    return tuple(re.findall(r"\w+|[^\w\s]", text))


@cache
def form(text):
    """A sentence without its names."""
    return " ".join("_" if token in NAMES else token for token in tokens(text))


def statistics(stories):
    """The rows of the table."""
    questions = [q for story in stories for q in story]
    facts = [fact for story in stories for fact in story[-1].facts]
    events = [understood(fact) for fact in facts]
    lengths = [len(q.facts) for q in questions]
    texts = {*facts, *(q.text for q in questions), *(q.answer for q in questions)}
    words = {token for text in texts for token in tokens(text)}
    endings = [(event[0], fact.endswith(" there.")) for fact, event in zip(facts, events, strict=True)]
    return {
        "length": [np.mean(lengths), np.mean([len(story[-1].facts) for story in stories])],
        "fact": [np.mean([len(tokens(fact)) for fact in facts]), np.mean([len(fact) for fact in facts])],
        "sizes": [len(words), max(len(tokens(fact)) for fact in facts), min(lengths)],
        "quantiles": np.percentile(lengths, [5, 25, 50, 75, 95]),
        "histogram": shares(lengths, *range(2, 30, 2)),
        "new": shares(
            [b - a for story in stories for a, b in itertools.pairwise([0, *(len(q.facts) for q in story)])], 2, 4, 6, 8
        ),
        "newest": shares([len(q.facts) - 1 - max(q.support) for q in questions], 0, 1, 2, 3, 4),
        "drop first": shares([understood(q.facts[q.support[0]])[0] for q in questions], "drop"),
        "acts": shares([event[0] for event in events], "move", "get", "drop", "give"),
        "forms": sorted(shares([form(q.text) for q in questions], *{form(q.text) for q in questions}), reverse=True),
        "answers": shares([q.answer for q in questions], *PLACES, "Bill", "Fred", "Jeff", "Mary", *OBJECTS),
        "actors": shares([event[1] for event in events], *{event[1] for event in events}),
        "ways": shares([event[0] for event in events], "north", "south", "east", "west"),
        "given": shares([event[2] for event in events if event[0] == "give"], *OBJECTS),
        "recipients": shares([event[3] for event in events if event[0] == "give"], "Mary", "Fred", "Bill", "Jeff"),
        "two given": [
            np.mean([len({e[2] for e in map(understood, q.facts[-5:]) if e[0] == "give"}) > 1 for q in questions])
        ],
        "there": [shares([there for kind, there in endings if kind == act], True)[0] for act in ("get", "drop")],
    }


@pytest.mark.parametrize("task", TABLE)
def test_table(task):
    """Spec 2.9 on 2,000 stories (QA4 10,000): each probability within 0.02, each mean within 5 % (QA3 8 %), quantiles
    within 8 % and two facts."""
    found = statistics(simulated(task, count=10_000 if task == "qa4" else 2000))
    relative = {"length": 0.08 if task == "qa3" else 0.05, "quantiles": 0.08, "fact": 0.05}
    for row, expected in TABLE[task].items():
        absolute = {"sizes": 0, "length": 0, "fact": 0, "quantiles": 2}.get(row, 0.02)
        assert list(found[row])[: len(expected)] == pytest.approx(expected, rel=relative.get(row, 0), abs=absolute), row


@pytest.mark.parametrize("task", TABLE)
def test_rows_are_counted_as_the_table_counts_them(task):
    """The training files have the numbers of spec 2.9, to about the printed digits."""
    found = statistics(files(task, "train"))
    for row, expected in TABLE[task].items():
        if (task, row) != ("qa3", "answers"):
            assert list(found[row])[: len(expected)] == pytest.approx(
                expected, rel=0.01 if row in ("length", "fact") else 0, abs=0.008
            ), row


@pytest.mark.parametrize("facts", [2, 4, 6, 8, 10])
def test_newest_support_of_qa1(facts):
    """Spec 2.9's row by question number. It was counted on 2,000 questions each, with standard errors of 0.01; as a
    fact is drawn from the window and its actor asked for, the exact shares follow from all sequences of actors."""
    window, exact = min(facts, 5), Counter()
    for actors in itertools.product(range(4), repeat=window):
        exact.update(actors[::-1].index(actor) for actor in actors)
    expected = [exact[i] / exact.total() for i in range(window)]
    for stories, error in ((simulated("qa1", count=10_000), 0.015), (files("qa1", "train"), 0.03)):
        found = shares(
            [len(q.facts) - 1 - q.support[0] for story in stories for q in story if len(q.facts) == facts],
            *range(window),
        )
        assert found == pytest.approx(expected, abs=error)


@pytest.mark.parametrize("task", ["qa2", "qa5"])
def test_verbs_are_equally_frequent(task):
    """Spec 2.3: every form of an act, "there" or not, within 0.02 of the others."""
    facts = [fact for story in simulated(task) for fact in story[-1].facts]
    forms = {"move": 5, "get": 4, "drop": 4, "give": 3}
    for kind, count in forms.items():
        found = [form(fact).replace(" there", "") for fact in facts if understood(fact)[0] == kind]
        if found or task == "qa5":
            assert shares(found, *set(found)) == pytest.approx([1 / count] * count, abs=0.02)


def known_states(facts, start=()):
    """(event, places of actors, places or holders of objects) before every fact, as far as a reader knows them, who may
    know the ``start``."""
    at, lies = start or ({}, {})
    for fact in facts:
        event = understood(fact)
        yield event, at, lies
        kind, actor, thing, to = event
        if kind == "move":
            at = {**at, actor: thing}
        elif kind in ("get", "give"):
            lies = {**lies, thing: to or actor}
        else:
            lies = {**{k: v for k, v in lies.items() if k != thing}, **({thing: at[actor]} if actor in at else {})}


def test_acts_given_the_state():
    """Spec 2.9: an actor who can move or get gets in 0.548 of the cases; who can move or drop, drops in 0.557; a
    possible gift is made in 0.423."""
    hands, gifts = {(0, 1): [], (1, 0): []}, []
    for story in simulated("qa2"):
        for (kind, actor, *_), at, lies in known_states(story[-1].facts):
            if actor in at and len(lies) == 3:
                held, here = list(lies.values()).count(actor), list(lies.values()).count(at[actor])
                hands.get((held, here), []).append(kind)
    for story in simulated("qa5"):
        for (kind, *_), at, lies in known_states(story[-1].facts):
            if any(holder in at and list(at.values()).count(at[holder]) > 1 for holder in lies.values()):
                gifts.append(kind)
    assert shares(hands[0, 1], "get", "move") == pytest.approx([0.548, 0.452], abs=0.02)
    assert shares(hands[1, 0], "drop", "move") == pytest.approx([0.557, 0.443], abs=0.02)
    assert shares(gifts, "give") == pytest.approx([0.423], abs=0.02)


@pytest.mark.parametrize(("task", "generator"), [case for case in BOTH if case[0] != "qa4"])
def test_stories_are_possible(task, generator):
    """Everyone moves elsewhere, gets what lies there, drops and gives what they hold, and gives to those who are there;
    v1.2 makes the first gift of those that are possible (spec 2.4); lua starts as its world file says."""
    start = (
        {"Daniel": "hallway", "John": "kitchen", "Mary": "bedroom", "Sandra": "garden"},
        {"apple": "kitchen", "football": "garden", "milk": "kitchen"},
    )
    for story in simulated(task, generator, 300):
        for (kind, actor, thing, to), at, lies in known_states(story[-1].facts, start if generator == "lua" else ()):
            here = at.get(actor)
            if kind == "move":
                assert thing != here
            elif kind == "get":
                assert lies.get(thing) not in NAMES - {*PLACES} and (here is None or lies.get(thing, here) == here)
            else:
                assert lies[thing] == actor and to != actor
            if kind == "give" and generator == "v1.2" and len(at) == 4:
                first = next(
                    (o, b)
                    for o in OBJECTS
                    if lies.get(o) in at
                    for b in ("Mary", "Fred", "Bill", "Jeff")
                    if b != lies[o] and at[b] == at[lies[o]]
                )
                assert (thing, to) == first
            if kind == "give" and here and to in at:
                assert at[to] == here


@pytest.mark.parametrize(("task", "rules"), [case for case in BOTH if case != ("qa3", "lua")])
@pytest.mark.parametrize("most", [12, 30])
def test_a_short_story_is_the_beginning_of_a_whole_one(task, rules, most):
    """lua rejects whole stories of QA3 for their last question."""
    begun = 0
    for seed in range(50):
        short, whole = (draw_story(task, rules, Draws(np.random.default_rng(seed)), n) for n in (most, math.inf))
        assert short and all(len(question.facts) <= most for question in short)
        if fitting := [question for question in whole if len(question.facts) <= most]:
            assert short == fitting
            begun += 1
    assert begun


def test_questions_of_short_stories():
    some = list(islice(questions("qa5", 0, "train", 0, 64, "lua", most=15), 64))
    assert max(len(question.facts) for question in some) <= 15 and len({question.facts for question in some}) == 64
    with pytest.raises(FieldError, match="most=2: expected at least 3, the fewest facts of a question of qa5"):
        questions("qa5", 0, "train", 0, 64, "lua", most=2)


def test_qa4_has_few_samples():
    """Spec 2.12: 10,000 samples of QA4 are about 5,213 distinct ones."""
    assert len({q for story in simulated("qa4", count=10_000) for q in story}) == pytest.approx(5213, rel=0.02)


@pytest.mark.parametrize("generator", GENERATORS)
def test_qa4_stories(generator):
    """Two neighbours on opposite sides of a centre; a fact's subject is asked for in two forms, by lua its other place
    as well."""
    kinds = Counter()
    for (q,) in simulated("qa4", generator):
        events = [understood(fact) for fact in q.facts]
        (center,) = {events[0][1], events[0][2]} & {events[1][1], events[1][2]}
        sides = {way if one != center else OPPOSITE[way] for way, one, _, _ in events}
        assert sides in ({"north", "south"}, {"east", "west"}) and len({x for event in events for x in event[1:3]}) == 3
        way, one, other, _ = events[q.support[0]]
        subject = q.answer == one
        if not subject:
            way, one, other = OPPOSITE[way], other, one
        assert q.answer == one and q.text in (
            f"What is {way} of the {other}?",
            f"What is the {other} {OPPOSITE[way]} of?",
        )
        kinds[subject, q.text.endswith("of?")] += 1
    expected = {(True, False), (True, True)} if generator == "v1.2" else set(itertools.product([True, False], repeat=2))
    assert set(kinds) == expected and shares(kinds.elements(), *kinds) == pytest.approx(
        [1 / len(expected)] * len(expected), abs=0.03
    )


@pytest.mark.parametrize("task", FILES)
def test_lua_stories(task):
    """Spec 2.10: its own verbs, no window, and its own moments to ask."""
    stories = simulated(task, "lua", 300)
    questions = [q for story in stories for q in story]
    forms = {form(fact) for q in questions for fact in q.facts}
    moved = {f"_ {verb} the _ ." for verb in ("moved to", "went to", "journeyed to", "travelled to")}
    hands = {f"_ {verb} the _ ." for verb in ("got", "took", "grabbed", "dropped", "put down", "let go of")}
    more = {"qa1": set(), "qa5": hands | {"_ gave _ the _ ."}}.get(task, hands)
    assert forms == ({"The _ is _ of the _ ."} if task == "qa4" else moved | more)
    new = [b - a for story in stories for a, b in itertools.pairwise([0, *(len(q.facts) for q in story)])]
    age = [len(q.facts) - 1 - max(q.support) for q in questions]
    assert task == "qa4" or max(age) >= 5
    if task == "qa1":
        asked = [q.text for q in questions if len(q.facts) == 10]
        assert set(new) == {2} and shares(asked, *set(asked)) == pytest.approx([0.25] * 4, abs=0.08)
    if task in ("qa2", "qa3"):
        later = [b - a for story in stories for a, b in itertools.pairwise([len(q.facts) for q in story])]
        assert min(new) == 3 and shares(later, 3, 4, 5) == pytest.approx([1 / 2, 1 / 4, 1 / 8], abs=0.06)
    if task == "qa3":
        assert all(
            len(set(q.support)) == 3 and q.text.endswith(f"before the {understood(q.facts[q.support[1]])[2]}?")
            for q in questions
        )
    if task == "qa5":
        assert min(new) == 2 and shares(age, *range(6)) == pytest.approx([1 / 6] * 6, abs=0.04)
        assert {form(q.text) for q in questions} == {text.replace(" ?", " last ?") for text in GIFT_FORMS}
        for q in questions:
            gift, *rest = [understood(fact) for fact in q.facts[q.support[0] :]]
            assert gift[0] == "give" and all(
                event[2] != gift[2] and (event[1], event[3]) != (gift[1], gift[3]) for event in rest
            )


def tries(world, rng):
    """Spec 2.10: an act, and then up to a hundred random actors, things and recipients, until they make an event that
    is possible."""
    kind = rng.choice(["move", "get", "drop", "give"])
    for _ in range(100):
        actor, to = rng.choice(["Daniel", "John", "Mary", "Sandra"], 2)
        thing = rng.choice(PLACES if kind == "move" else OBJECTS)
        where, here = world.is_in.get(thing), world.is_in[actor]
        if {
            "move": thing != here,
            "get": where == here,
            "drop": where == actor,
            "give": where == actor != to and world.is_in[to] == here,
        }[kind]:
            return kind, actor, thing, to if kind == "give" else ""
    return None


def test_lua_draws_as_by_tries():
    """One draw among the possible events has the distribution of a hundred tries: also the 12 % of gifts that they miss
    if one is possible."""
    world = Lua("qa5", Draws(np.random.default_rng(0)))
    world.is_in |= {
        "John": "garden",
        "Mary": "garden",
        "Sandra": "kitchen",
        "football": "John",
        "milk": "Sandra",
        "Daniel": "office",
    }
    rng = np.random.default_rng(1)
    fast, slow = Counter(world.draw() for _ in range(20_000)), Counter(tries(world, rng) for _ in range(4_000))
    assert set(fast) == set(slow) and {event[1:] for event in slow if event and event[0] == "give"} == {
        ("John", "football", "Mary")
    }
    assert shares(fast.elements(), *fast) == pytest.approx(shares(slow.elements(), *fast), abs=0.02)


# --- reading


@pytest.mark.parametrize(("task", "generator"), BOTH)
def test_reader_on_simulated_stories(task, generator):
    """Answers and supports, 100 %; all words are in ``WORDS``, and v1.2's answers are ``LABELS``."""
    questions = [q for story in simulated(task, generator, 300) for q in story]
    assert all(interpret(q.facts, q.text) == (q.answer, q.support) for q in questions)
    assert {token for q in questions for text in (*q.facts, q.text, q.answer) for token in tokens(text)} <= set(WORDS)
    assert generator == "lua" or tuple(sorted({q.answer for q in questions})) == LABELS[task]


def test_words():
    """Each occurs in a story."""
    questions = [q for task, generator in BOTH for story in simulated(task, generator, 300) for q in story]
    assert sorted(
        {token for q in questions for text in (*q.facts, q.text, q.answer) for token in tokens(text)}
    ) == list(WORDS)


@pytest.mark.parametrize("task", FILES)
def test_reader_on_the_files(task):
    """The real questions: answers and supports of QA1 to QA4, all; of QA5 99.8 %, as the labels of 22 of 11,000 are
    wrong (spec 2.12)."""
    questions = [q for story in files(task, "train", "test") for q in story]
    assert len(questions) == (2925 if task == "qa3" else 11_000)
    wrong = [q for q in questions if interpret(q.facts, q.text) != (q.answer, q.support)]
    assert len(wrong) == (22 if task == "qa5" else 0) and all(q.text.startswith("What did") for q in wrong)


EXAMPLE = """\
1 Mary moved to the bathroom.
2 Sandra journeyed to the bedroom.
3 Mary got the football there.
4 John went to the kitchen.
5 Mary went back to the kitchen.
6 Mary went back to the garden.
7 Where is the football? \tgarden\t3 6
"""


def test_example(tmp_path):
    """Spec 2.13: nothing can be asked after 2 or 4 facts."""
    (tmp_path / "x.txt").write_text(EXAMPLE)
    (((q),),) = parse(tmp_path / "x.txt")
    assert (q.text, q.answer, q.support) == ("Where is the football?", "garden", (2, 5)) and interpret(
        q.facts, q.text
    ) == ("garden", (2, 5))
    assert [possible("qa2", q.facts[:end]) for end in (2, 4, 6)] == [
        set(),
        set(),
        {("Where is the football?", "garden", (2, 5))},
    ]
    assert interpret(q.facts, "Where is Mary?") == ("garden", (5,))
    assert interpret(q.facts, "Where was the football before the garden?") == ("kitchen", (2, 5, 4))
    assert interpret(q.facts, "Where was the football before the kitchen?") == ("bathroom", (2, 4, 0))


HANDED_ON = (
    "Fred went to the office.",
    "Fred got the milk there.",
    "Bill journeyed to the office.",
    "Fred gave Bill the milk.",
    "Bill went to the garden.",
)


@pytest.mark.parametrize(
    ("facts", "question", "expected"),
    [
        (HANDED_ON, "Where is the milk?", ("garden", (3, 4))),
        (HANDED_ON, "Where was the milk before the garden?", ("office", (3, 4, 2))),
        (HANDED_ON, "Who received the milk last?", ("Bill", (3,))),
        (
            ("Mary went to the attic.", "John got the cup.", "John went to the attic.", "John left the cup there."),
            "Where is the cup?",
            ("attic", (3, 2)),
        ),
        (
            ("Al took the pen.", "Al went to the gym.", "Al left the pen.", "Bo took the pen.", "Bo went to the pub."),
            "Where was the pen before the pub?",
            ("gym", (3, 4, 1, 0)),
        ),
        (("The attic is north of the gym.",), "What is south of the attic?", ("gym", (0,))),
        (("The attic is north of the gym.",), "What is the gym south of?", ("attic", (0,))),
    ],
)
def test_reader_by_hand(facts, question, expected):
    """Other names, and mixtures that no generator makes: a gift in QA2 and QA3, an object that changed hands between
    two places."""
    assert interpret(facts, question) == expected


@pytest.mark.parametrize(
    ("facts", "question", "message"),
    [
        (("Mary ate the apple.",), "Where is Mary?", "fact='Mary ate the apple.': expected one of bAbI's QA1 to QA5"),
        (HANDED_ON, "Why?", "question='Why?': expected one of bAbI's QA1 to QA5"),
        (HANDED_ON, "Where is Mary?", "question='Where is Mary?': its 5 facts do not answer it"),
        (("John took the milk.",), "Where is the milk?", "its 1 facts do not answer it"),
        (HANDED_ON, "Where was the milk before the office?", "its 5 facts do not answer it"),
        ((), "What is north of the garden?", "its 0 facts do not answer it"),
        (HANDED_ON, "What did Bill give to Fred?", "its 5 facts do not answer it"),
    ],
)
def test_reader_refuses(facts, question, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        interpret(facts, question)


# --- files


def written(stories, space=" "):
    """The text of a distributed file."""
    lines = []
    for story in stories:
        where, shown = {}, 0
        for q in story:
            for i in range(shown, len(q.facts)):
                where[i] = len(where) + story.index(q) + 1
                lines.append(f"{where[i]} {q.facts[i]}")
            shown = len(q.facts)
            support = " ".join(str(where[i]) for i in q.support)
            lines.append(f"{shown + story.index(q) + 1} {q.text}{space}\t{q.answer}\t{support}")
    return "".join(line + "\n" for line in lines)


@pytest.mark.parametrize(("task", "generator"), BOTH)
@pytest.mark.parametrize("space", [" ", ""])
def test_written_stories_are_read_back(tmp_path, task, generator, space):
    stories = simulated(task, generator, 300)[:100]
    path = tmp_path / "x.txt"
    path.write_text(written(stories, space))
    assert parse(path) == stories
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    assert parse(str(path)) == stories


@pytest.mark.parametrize("task", FILES)
def test_files_are_written_back(task):
    """What is parsed is all that the file holds."""
    (path,) = DATA.glob(f"{FILES[task]}_test.txt") if files(task, "test") else ()
    assert written(parse(path), "" if task == "qa4" else " ") == path.read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("4 John", "6 John", ":4: expected ID 4; got 6"),
        ("1 Mary", "2 Mary", ":1: expected ID 1; got 2"),
        ("5 Mary", "1 Mary", ":5: expected ID 5; got 1"),
        ("\tgarden\t3 6\n", "\tgarden\t3 6\n9 Mary moved to the office.\n", ":8: expected ID 8 or 1; got 9"),
        (
            "\tgarden\t",
            " garden ",
            ":7: expected 'ID fact.' or 'ID question?<tab>answer<tab>ID ...'; "
            "got '7 Where is the football?  garden 3 6'",
        ),
        ("\tgarden\t3 6", "", ":7: expected 'ID fact.' or"),
        ("\t3 6", "\t", ":7: expected 'ID fact.' or"),
        ("3 Mary got", "Mary got", ":3: expected 'ID fact.' or"),
        ("\n3 Mary", "\n\n3 Mary", ":3: expected 'ID fact.' or"),
        ("3 6", "3 7", ":7: expected supports to be IDs of facts above the question; got 7"),
        ("3 6", "3 60", ":7: expected supports to be IDs of facts above the question; got 60"),
        (
            "3 6\n",
            "3 6\n8 Where is Mary?\tgarden\t7\n",
            ":8: expected supports to be IDs of facts above the question; got 7",
        ),
        ("7 Where is the football? \tgarden\t3 6\n", "", ":6: expected a question at the end of the story"),
        ("4 John went", "4 John\udcff went", ":4: not UTF-8 text (byte "),
        (EXAMPLE, "", ":1: expected stories of bAbI; the file is empty"),
    ],
)
def test_corrupt_files(tmp_path, old, new, message):
    """One line that names file and line number, and what was expected there."""
    path = tmp_path / "x.txt"
    path.write_bytes(EXAMPLE.replace(old, new).encode(errors="surrogateescape"))
    with pytest.raises(ValueError) as error:
        parse(path)
    assert str(error.value).startswith(f"{path}{message}") and "\n" not in str(error.value)


# --- samples


DIGESTS = {
    "v1.2": {
        "qa1": "ba954660b0b8",
        "qa2": "9a8075fe9b46",
        "qa3": "ade21851262b",
        "qa4": "1e87a21ed312",
        "qa5": "7e5723f6484c",
    },
    "lua": {
        "qa1": "3778af416766",
        "qa2": "4667fe142176",
        "qa3": "08e817e91d53",
        "qa4": "a40995e38126",
        "qa5": "11efa200180d",
    },
}


def samples(task, seed, split, step, size, stories="v1.2"):
    return list(itertools.islice(questions(task, seed, split, step, size, stories), size))


def digest(found):
    return hashlib.sha256(repr(found).encode()).hexdigest()[:12]


@pytest.mark.parametrize(("task", "generator"), BOTH)
def test_samples_are_a_function_of_their_arguments(task, generator):
    """The same bits on any machine and in any process; another seed, split or step gives others, and a larger size only
    more of them."""
    found = samples(task, 0, "train", 0, 8, generator)
    assert found == samples(task, 0, "train", 0, 8, generator) and len(found) == 8
    assert digest(found) == DIGESTS[generator][task]
    others = [
        samples(task, seed, split, step, 8, generator)
        for seed, split, step in ((1, "train", 0), (0, "valid", 0), (0, "test", 0), (0, "train", 1))
    ]
    assert all(a != b for a, b in itertools.combinations([found, *others], 2))
    assert samples(task, 0, "train", 0, 3, generator) == found[:3] and samples(task, 0, "train", 0, 0, generator) == []


@pytest.mark.parametrize("task", FILES)
def test_splits_are_disjoint(task):
    """Also where there are few samples, as of QA4; and no two have a question of the same story."""
    drawn = {
        split: {(q.facts, q.text) for q in samples(task, 0, split, 0, 150)} for split in ("train", "valid", "test")
    }
    assert all(split_of_sample(*sample) == split for split, found in drawn.items() for sample in found)
    starts = [{facts[:4] for facts, _ in found if len(facts) >= 4} for found in drawn.values()]
    assert not any(a & b for sets in (drawn.values(), starts) for a, b in itertools.combinations(sets, 2))


def test_shares_of_the_splits():
    """80, 10 and 10 %."""
    assert shares(
        [split_of_sample(q.facts, q.text) for s in simulated("qa2") for q in s], "train", "valid", "test"
    ) == pytest.approx([0.8, 0.1, 0.1], abs=0.02)
    assert [
        split_of_sample(("Mary moved to the garden.",), f"Where is {name}?") for name in ("Mary", "John", "Bill")
    ] == [
        "valid",
        "train",
        "train",
    ]


@pytest.mark.parametrize("split", ["train", "test"])
def test_samples_are_any_question_of_a_story(split):
    """The split changes no distribution: all five questions of QA1 are as frequent, as many facts as in 2,000 stories
    of QA2."""
    assert shares([len(q.facts) for q in samples("qa1", 3, split, 0, 2000)], 2, 4, 6, 8, 10) == pytest.approx(
        [0.2] * 5, abs=0.03
    )
    assert np.mean([len(q.facts) for q in samples("qa2", 3, split, 0, 1000)]) == pytest.approx(15.7, rel=0.07)


@pytest.mark.parametrize(("task", "generator"), BOTH)
def test_fewest_facts(task, generator):
    """No question has fewer, and some have no more; but of lua's QA5 one story in thousands begins with a move, a get
    and a gift."""
    shortest = min(len(q.facts) for story in simulated(task, generator, 300) for q in story)
    assert shortest == FEWEST_FACTS[generator][task] or (
        (task, generator) == ("qa5", "lua") and shortest > FEWEST_FACTS[generator][task]
    )


@pytest.fixture
def folder(tmp_path):
    """Files of 30 training and 5 test stories of QA1."""
    for part, stories in (("train", 30), ("test", 5)):
        (tmp_path / f"{FILES['qa1']}_{part}.txt").write_text(written(simulated("qa1", "v1.2", 35)[-stories:], " "))
    return tmp_path


@pytest.mark.parametrize("data_class", [BABILongData, MemReasonerData])
def test_every_question_of_a_folder_is_asked_once(folder, data_class):
    """Also where the batches would leave a rest."""
    small = {"segments": 0} if data_class is BABILongData else {"layout": "text"}
    size = len(load(str(folder), "qa1", "test"))
    data = data_class(task="qa1", stories=str(folder), test_size=size, eval_batch_size=size // 2 + 1, books=1, **small)
    (loader,) = data.test_dataloader()
    asked = [tuple(ids.tolist()) for batch in loader for ids in batch.ids_BT]
    whole = data.task.batch(0, "test", 0, size)
    assert (
        len(loader) > 1 and len(asked) == size and sorted(asked) == sorted(tuple(ids.tolist()) for ids in whole.ids_BT)
    )


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("data_class", [BABILongData, MemReasonerData])
def test_every_device_has_a_part_of_every_batch_in_order(folder, data_class, split):
    """100 samples in equal batches of at most 3 are batches of 2, of which a third device would have none."""
    small = {"segments": 0} if data_class is BABILongData else {"layout": "text"}
    sizes = {"valid_size": 99, "test_size": 99, "eval_batch_size": 3, f"{split}_size": 100}
    data = data_class(task="qa1", stories=str(folder), books=1, **small, **sizes)
    loaders = {"valid": data.val_dataloader, "test": data.test_dataloader}
    for devices, rank in ((2, 1), (3, 2)):
        data.trainer = SimpleNamespace(world_size=devices, global_rank=rank)
        for name, loader in loaders.items():
            if devices == 2 or name != split:
                loader()
                continue
            told = f"{split}_size=100: read in order, in equal batches of at most eval_batch_size=3: of 2, for 3"
            with pytest.raises(ValueError, match=f"{told} devices; expected a multiple of 3"):
                loader()


def test_questions_of_a_folder(folder):
    """Every question of a split once, in another order each time, whatever the size of the batches; valid is the last
    tenth of the training stories."""
    sizes = {"train": 27 * 5, "valid": 3 * 5, "test": 5 * 5}
    for split, size in sizes.items():
        whole = samples("qa1", 0, split, 0, size, str(folder))
        again = [q for step in range(size // 5) for q in samples("qa1", 0, split, step, 5, str(folder))]
        assert whole == again and sorted(whole, key=repr) == sorted(load(str(folder), "qa1", split), key=repr)
        later = samples("qa1", 0, split, 1, size, str(folder))
        assert (
            later != whole
            and sorted(later, key=repr) == sorted(whole, key=repr)
            and samples("qa1", 1, split, 0, size, str(folder)) != whole
        )
    assert load(str(folder), "qa1", "train") + load(str(folder), "qa1", "valid") == tuple(
        q for s in parse(folder / f"{FILES['qa1']}_train.txt") for q in s
    )
    with pytest.raises(FileNotFoundError, match=r"no qa2_two-supporting-facts_train\.txt; expected the files of bAbI"):
        questions("qa2", 0, "train", 0, 1, str(folder))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: questions("qa6", 0, "train", 0, 1), "task='qa6': expected one of qa1, qa2, qa3, qa4, qa5"),
        (lambda: questions("qa1", 0, "dev", 0, 1), "split='dev': expected one of train, valid, test"),
        (lambda: simulate("qa6", np.random.default_rng(0)), "task='qa6': expected one of qa1, qa2, qa3, qa4, qa5"),
        (lambda: simulate("qa1", np.random.default_rng(0), "v1"), "generator='v1': expected one of v1.2, lua"),
    ],
)
def test_wrong_names(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
