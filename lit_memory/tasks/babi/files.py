"""bAbI QA1 to QA5: samples with a single question, from a simulator or from the distributed files.

Paper:     Weston et al. 2015, Towards AI-complete question answering: a set of prerequisite toy tasks, arXiv
           1502.05698.
Reference: v1.2, the distributed files tasks_1-20_v1-2, whose generator was never published; its rules were recovered
           from the files (spec 2.3 to 2.7). lua, its later rewrite github.com/facebook/bAbI-tasks (spec 2.10), has
           other verbs and asks at other times.

    Mary moved to the bathroom. Mary got the milk there. Mary went back to the garden. Mary travelled to the office.
    qa1  Where is Mary?                          office    support 3
    qa2  Where is the milk?                      office    support 1 3
    qa3  Where was the milk before the office?   garden    support 1 3 2
    The hallway is east of the bathroom. The bedroom is west of the bathroom.
    qa4  What is the bathroom east of?           bedroom   support 1
    Fred picked up the milk there. Fred gave the milk to Jeff.
    qa5  Who received the milk?                  Jeff      support 1

Deviations
1. The answer to "What did A give to B?" is A's latest gift to B. In 20 of 3,358 such questions of the files it is an
   earlier one.
2. A hash of its text assigns every sample to one split. In the files, 691 of QA4's 933 distinct test samples are also
   in the train file: of the files that we ship, training leaves those out.
3. Our choices for lua, where the spec leaves it open: an act is drawn before its actor and object; QA4 asks for either
   place of a fact, in two forms each; QA5 has v1.2's forms with v1.2's probabilities; an answer to QA3 has a fourth
   support if the object changed hands between the two places.
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

from numpy.random import Generator

from lit_memory.tasks.babi.reader import FACTS, OPPOSITE, QUESTIONS, VERBS, interpret
from lit_memory.tasks.babi.world import ACTORS, GIVERS, OBJECTS, PLACES, Draws, Question, Rules, draw_story
from lit_memory.tasks.base import numpy_generator
from lit_memory.text.shipped import folder_of
from lit_memory.util.checks import FieldError
from lit_memory.util.inputs import plain_name, read_text, text_files
from lit_memory.util.seeds import split_of

__all__ = [
    "FEWEST_FACTS",
    "FILES",
    "LABELS",
    "PEOPLE",
    "PLACES",
    "SHIPPED_STORIES",
    "WORDS",
    "Question",
    "check_stories",
    "interpret",
    "labels_of",
    "load",
    "parse",
    "questions",
    "simulate",
]

FILES = {
    "qa1": "qa1_single-supporting-fact",
    "qa2": "qa2_two-supporting-facts",
    "qa3": "qa3_three-supporting-facts",
    "qa4": "qa4_two-arg-relations",
    "qa5": "qa5_three-arg-relations",
}
"""Task -> beginning of the names of its files, which end with ``_train.txt`` or ``_test.txt``."""
LABELS = dict.fromkeys(FILES, PLACES) | {"qa5": tuple(sorted((*GIVERS, *OBJECTS)))}
"""Task -> all answers of v1.2; see ``labels_of``."""
_NAMES = (
    *PLACES,
    *OBJECTS,
    *ACTORS,
    *GIVERS,
    *OPPOSITE,
    *(verb for rules in VERBS.values() for verbs in rules.values() for verb in verbs),
)
_SENTENCES = re.sub(r"\{\w+\}", "", " ".join((*FACTS.values(), *QUESTIONS, *_NAMES, "there last")))
WORDS = tuple(sorted(set(re.findall(r"\w+|[^\w\s]", _SENTENCES))))
"""Every word and punctuation mark of all facts, questions and answers."""
PEOPLE = tuple(sorted({*ACTORS, *GIVERS}))
SPLITS = ("train", "valid", "test")
SHIPPED_STORIES = "shipped-babi"
"""Name of the files that the repository ships."""
FEWEST_FACTS = {
    "v1.2": {"qa1": 2, "qa2": 2, "qa3": 4, "qa4": 2, "qa5": 2},
    "lua": {"qa1": 2, "qa2": 3, "qa3": 3, "qa4": 2, "qa5": 3},
}
"""Rules -> task -> facts of the shortest question."""


def simulate(task: str, rng: Generator, generator: Rules = "v1.2") -> list[Question]:
    """Draw the questions of one story: one in QA4, five in the other tasks.

    ``rng`` is read in blocks of 256 numbers.
    """
    _require("task", task, FILES)
    _require("generator", generator, VERBS)
    return draw_story(task, generator, Draws(rng))


def labels_of(task: str, stories: str) -> tuple[str, ...]:
    """All answers of a task. In QA5, lua has ``ACTORS`` in place of ``GIVERS``."""
    return tuple(sorted((*ACTORS, *OBJECTS))) if (task, stories) == ("qa5", "lua") else LABELS[task]


def questions(
    task: str, seed: int, split: str, step: int, size: int, stories: str = "v1.2", most: float = math.inf
) -> Iterator[Question]:
    """Samples without end for batch ``step`` of ``size`` samples: a pure function of its arguments.

    most: facts after which a simulated story ends, so that it has no question with more of them; QA4 has two.
    stories: rules of the simulator, where every sample is from another story; or a folder with the distributed files
        (or their name, ``SHIPPED_STORIES``), where every question comes once before any comes again, in a new order
        each time. ``valid`` is the last tenth of the training stories there.
    Raises ValueError for an unknown task, split or folder, and for a corrupt file; FileNotFoundError for a missing
    file.
    """
    _require("task", task, FILES)
    _require("split", split, SPLITS)
    if stories in ("v1.2", "lua"):
        if most < (least := FEWEST_FACTS[stories][task]):
            raise FieldError("most", most, f"expected at least {least}, the fewest facts of a question of {task}")
        rng = numpy_generator(seed, f"{task}/{stories}/{split}", step)
        return _simulated(task, split, stories, Draws(rng), most)
    return _shuffled(stories_of(stories, task, split), seed, split, step * size)


def _simulated(task: str, split: str, rules: Rules, draws: Draws, most: float) -> Iterator[Question]:
    """One question of the split from each of endlessly many stories; stories without such a question are skipped."""
    while True:
        story = draws.shuffled(draw_story(task, rules, draws, most))
        # The hash is independent of the question, so the first question of the split in random order is as good as one
        # that was drawn first and kept if it belongs to the split.
        yield from islice((q for q in story if split_of("\n".join((*q.facts, q.text))) == split), 1)


def _shuffled(questions: Sequence[Question], seed: int, split: str, first: int) -> Iterator[Question]:
    """All questions again and again, in a new order each time, after the ``first`` ones."""
    lap, skip = divmod(first, len(questions))
    while True:
        order = numpy_generator(seed, f"order/{split}", lap).permutation(len(questions))
        yield from (questions[i] for i in order[skip:])
        lap, skip = lap + 1, 0


@lru_cache(maxsize=8)
def load(folder: str, task: str, split: str) -> tuple[Question, ...]:
    """Load the questions of one split from a folder of distributed files. Of the shipped ones, none is in two splits:
    what the test asks is left out of the others, and what validation asks out of training."""
    part = "test" if split == "test" else "train"
    paths = text_files(folder_of(folder), f"{FILES[task]}_{part}*.txt")
    if not paths:
        raise FileNotFoundError(
            f"{folder}: no {FILES[task]}_{part}.txt; expected the files of bAbI, en-10k for example"
        )
    stories = parse(min(paths, key=lambda path: len(plain_name(path).name)))
    held_out = -(-len(stories) // 10)
    if part == "train":
        stories = stories[-held_out:] if split == "valid" else stories[:-held_out]
    asked = {(q.facts, q.text) for later in _later(split, folder) for q in load(folder, task, later)}
    return tuple(q for story in stories for q in story if (q.facts, q.text) not in asked)


def _later(split: str, folder: str) -> tuple[str, ...]:
    """The splits whose questions a split of a folder leaves out. Folders of users stay as they are."""
    return SPLITS[SPLITS.index(split) + 1 :] if folder == SHIPPED_STORIES else ()


def stories_of(folder: str, task: str, split: str) -> tuple[Question, ...]:
    """``load``, of which some are left. Raises ValueError where none is."""
    if found := load(folder, task, split):
        return found
    raise ValueError(f"{folder}: no story of {task} for split {split!r}; expected more than one for training")


def check_stories(stories: str, task: str) -> None:
    """Read all files of a task, if ``stories`` is a folder. Raises ValueError and FileNotFoundError."""
    for split in SPLITS if stories not in VERBS else ():
        stories_of(stories, task, split)


def _require(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise FieldError(name, value, f"expected one of {', '.join(allowed)}")


_LINE = re.compile(
    r"(?P<id>\d{1,9}) "
    r"(?:(?P<fact>[^\t?]+\.)|(?P<question>[^\t]+\?) ?\t(?P<answer>\w+)\t(?P<support>\d{1,9}(?: \d{1,9})*))"
)


def parse(path: str | Path) -> list[list[Question]]:
    """Questions of every story of a distributed file.

    Raises ValueError that names file and line, and what was expected there.
    """
    stories: list[list[Question]] = []
    facts: list[str] = []
    index: dict[int, int] = {}  # ID of a line in the story -> index of its fact
    allowed, lines = [1], _lines(path)
    for number, text in enumerate(lines, start=1):
        if not (line := _LINE.fullmatch(text)):
            raise _corrupt(path, number, f"'ID fact.' or 'ID question?<tab>answer<tab>ID ...'; got {text[:80]!r}")
        here = int(line["id"])
        if here not in allowed:
            raise _corrupt(path, number, f"ID {' or '.join(map(str, allowed))}; got {here}")
        if here == 1:
            facts, index = [], {}
            stories.append([])
        allowed = [here + 1]
        if line["fact"]:
            index[here] = len(facts)
            facts.append(line["fact"])
            continue
        allowed.append(1)  # a story ends with a question
        support = [int(i) for i in line["support"].split()]
        if unknown := [i for i in support if i not in index]:
            raise _corrupt(path, number, f"supports to be IDs of facts above the question; got {unknown[0]}")
        earlier = tuple(len(question.facts) for question in stories[-1])
        stories[-1].append(
            Question(tuple(facts), line["question"], line["answer"], tuple(index[i] for i in support), earlier)
        )
    if 1 not in allowed:
        raise _corrupt(path, len(lines), "a question at the end of the story")
    return stories


def _lines(path: str | Path) -> list[str]:
    """Lines of a text file, which may end as on any system. Raises ValueError for an empty file and for what is no
    text."""
    text = read_text(Path(path)).replace("\r\n", "\n").replace("\r", "\n")
    if not text:
        raise _corrupt(path, 1, "stories of bAbI; the file is empty")
    return text.removesuffix("\n").split("\n")


def _corrupt(path: str | Path, number: int, expected: str) -> ValueError:
    return ValueError(f"{path}:{number}: expected {expected}")
