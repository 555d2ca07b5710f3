"""bAbI as episodes: what the lines say, soft noise, other places, and what is wrong in a configuration."""

import os
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from test_episodes import SMALL, lines_of, tails_of, texts_of

from lit_memory.tasks import memreasoner
from lit_memory.tasks.babi.files import load, parse, questions
from lit_memory.tasks.babi.reader import event_of, interpret
from lit_memory.tasks.babi.world import PLACES, Question
from lit_memory.tasks.memreasoner import OTHER_PLACES, SOFT_SENTENCES, BabiEpisodes, with_empty_facts

DATA = (
    Path(os.environ.get("LIT_MEMORY_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    / "data"
    / "babi"
    / "en-10k"
)
FACT = re.compile(r"(?:Daniel|John|Mary|Sandra) [a-z ]+\.")


def make(**config) -> BabiEpisodes:
    return BabiEpisodes(BabiEpisodes.Config(**{**SMALL, "line_tokens": 16, **config}))


CASES = [
    {"task": "qa1"},
    {"task": "qa2"},
    {"task": "qa2", "stories": "lua"},
    {"task": "qa2", "tokens": 300},
    {"task": "qa2", "tokens": 300, "noise": "soft"},
    {"task": "qa2", "eval_task": "qa1", "tokens": 150, "noise": "soft", "eval_places": "other"},
    {"task": "qa2", "tokenizer": "char", "line_tokens": 48, "segment_len": 64},
]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("config", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_oracle(config, split):
    """Whoever reads the lines that are facts answers every question; the prompt names whom it is about; support says
    which lines settle it."""
    task = make(**config, supporting=1.0)
    batch = task.batch(0, split, 0, 30)
    asked = "qa1" if split == "test" and "eval_task" in config else config["task"]
    for texts, [(prompt, answer)], support in zip(
        texts_of(task, batch), tails_of(task, batch), batch.meta["support"].tolist(), strict=True
    ):
        texts = [text.strip() for text in texts]
        facts = [text for text in texts if FACT.fullmatch(text)]
        subject = texts[-1].removeprefix("Where is ").removesuffix("?")
        assert interpret(facts, texts[-1])[0] == answer
        assert prompt.strip() == f"{subject[0].upper()}{subject[1:]} is in the"
        supporting = [texts[-1 - back] for back in support]
        assert supporting == [facts[i] for i in interpret(facts, texts[-1])[1]] and len(supporting) == (
            1 if asked == "qa1" else 2
        )


def test_blind_solver():
    """The most frequent answer of the training, given without reading, is right once in six."""
    task = make(task="qa2")
    answers = {
        split: [tails[0][1] for tails in tails_of(task, task.batch(0, split, 0, 600))] for split in ("train", "valid")
    }
    ((guess, _),) = Counter(answers["train"]).most_common(1)
    for split, given in answers.items():
        assert set(given) == set(PLACES) and abs(given.count(guess) / 600 - 1 / 6) < 0.05, split


def test_text_is_what_the_contract_says():
    """Facts, question, answer and EOS; and with the share the question for the facts."""
    task = make(task="qa2", layout="text", segment_len=128, supporting=1.0)
    ((first, second),) = tails_of(task, task.batch(0, "train", 3, 1))
    context, asked = first[0].rsplit(" Where", 1)
    facts = FACT.findall(context)
    answer, support = interpret(facts, f"Where{asked}")
    assert " ".join(facts) == context and first[1] == answer
    assert second == (f"{context} Where{asked} Supporting facts:", " ".join(facts[i] for i in support))


STORY = """1 Mary moved to the bathroom.
2 Sandra journeyed to the bedroom.
3 Mary got the football there.
4 John went to the kitchen.
5 Mary went back to the kitchen.
6 Mary went back to the garden.
7 Where is the football? \tgarden\t3 6
8 Sandra went back to the office.
9 John moved to the office.
10 Where is the football? \tgarden\t3 6
11 Sandra moved to the hallway.
12 Where is the football? \tgarden\t3 6
"""


def test_earlier_questions_are_empty_lines(tmp_path):
    """Spec 2.13 and 4.1: line k of an episode is line k of the file, where a question is empty; supports are the
    file's."""
    for part in ("train", "test"):
        (tmp_path / f"qa2_two-supporting-facts_{part}.txt").write_text(STORY * 20)
    task, seen = make(task="qa2", stories=str(tmp_path), tokens=0), set()
    lines = [re.sub(r"^\d+ |\t.*$", "", line).strip() for line in STORY.splitlines()]
    batch = task.batch(0, "test", 0, 12)
    for texts, support in zip(texts_of(task, batch), batch.meta["support"].tolist(), strict=True):
        assert texts[:-1] == ["" if "?" in line else line for line in lines[: len(texts) - 1]]
        assert [len(texts) - back for back in support] == [3, 6]
        seen.add(len(texts))
    assert seen == {7, 10, 12}
    bare = make(task="qa2", stories=str(tmp_path), empty_lines=False)
    assert all("" not in texts for texts in texts_of(bare, bare.batch(0, "test", 0, 12)))
    assert [q.earlier for q in parse(tmp_path / "qa2_two-supporting-facts_test.txt")[0]] == [(), (6,), (6, 8)]
    with pytest.raises(
        ValueError,
        match=r"tokens=9: no question among 50 has facts that fit into it; raise it, or 0 for the facts alone",
    ):
        make(task="qa2", stories=str(tmp_path), tokens=9).batch(0, "test", 0, 1)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the files of bAbI in ../shared or LIT_MEMORY_SHARED")
@pytest.mark.parametrize(("name", "longest"), [("qa1", 14), ("qa2", 72)])
def test_longest_episodes_of_the_files(name, longest):
    """Spec 4.1: lines of the longest training episode; 0 to 4 empty lines, exactly as often each."""
    samples = load(str(DATA), name, "train")
    assert max(len(with_empty_facts(question).facts) for question in samples) == longest
    assert set(Counter(len(question.earlier) for question in samples).values()) == {len(samples) // 5}


@pytest.fixture(autouse=True)
def _few_tries(monkeypatch):
    monkeypatch.setattr(memreasoner, "TRIES", 50)


def test_empty_lines_are_spread_evenly():
    """0 to 4 of them, each as often (spec 4.1); books have none between their sentences."""
    counts = Counter(texts.count("") for texts in texts_of(make(), make().batch(0, "valid", 0, 600)))
    assert set(counts) == set(range(5)) and sum((n - 120) ** 2 / 120 for n in counts.values()) < 25
    task = make(tokens=100)
    assert all("" not in texts for texts in texts_of(task, task.batch(0, "valid", 0, 20)))


# --- soft noise

EXAMPLE = Question(
    (
        "Mary travelled to the office.",
        "Sandra went to the bedroom.",
        "Sandra moved to the hallway.",
        "Daniel journeyed to the garden.",
        "Sandra discarded the football.",
        "Daniel went back to the kitchen.",
    ),
    "Where is the football?",
    "hallway",
    (4, 2),
)


def softened(task, question, rng):
    facts = task.tokenizer.encode_batch([f" {fact}" for fact in question.facts])
    return [task.tokenizer.decode(line) for line in task.add_soft_noise(question, facts, rng)[0]]


def test_worked_example_of_soft_noise(monkeypatch):
    """Spec 4.3: before the move to the hallway anybody moves, behind it anybody but Sandra; what was there stays in
    order."""
    monkeypatch.setattr(memreasoner, "check_answer", lambda *_: None)  # nobody got the football here
    task, rng = make(noise="soft", tokens=120), np.random.Generator(np.random.PCG64(0))
    before, behind = Counter(), Counter()
    for _ in range(200):
        lines = softened(task, EXAMPLE, rng)
        at = [i for i, line in enumerate(lines) if line == EXAMPLE.facts[2]][-1]
        kept = iter(lines)
        assert all(fact in kept for fact in EXAMPLE.facts)
        assert 114 <= sum(len(task.tokenizer.encode(line)) for line in lines) <= 120
        extra = [(i, line) for i, line in enumerate(lines) if line not in EXAMPLE.facts]
        assert all(line in SOFT_SENTENCES for _, line in extra)
        for i, line in extra:
            (before if i < at else behind)[line.split()[0]] += 1
    assert set(before) == {"Daniel", "John", "Mary", "Sandra"} and set(behind) == {"Daniel", "John", "Mary"}


def test_soft_noise_lies_as_if_put_in_one_by_one():
    """The slow twin: every sentence goes into a gap drawn from all that there are. Its share behind the third line, and
    where facts lie, agree."""
    rng, task = np.random.Generator(np.random.PCG64(1)), make(noise="soft", tokens=120)
    moves = Question(
        tuple(f"{who} moved to the office." for who in ("Mary", "John", "Daniel")), "Where is John?", "office", (1,)
    )

    def naive(count):
        lines = [0, 1, 2]
        for _ in range(count):
            lines.insert(int(rng.integers(len(lines) + 1)), -1)
        return [lines.index(i) for i in range(3)]

    ours = []
    for _ in range(1500):
        order = task.add_soft_noise(moves, [np.array([i, 900, 900, 900, 900, 900]) for i in range(3)], rng)[0]
        where = [
            next(i for i, line in enumerate(order) if len(line) == 6 and line[1] == 900 and line[0] == n)
            for n in range(3)
        ]
        ours.append(np.array(where) / len(order))
        count = len(order) - 3
    theirs = np.array([np.array(naive(count)) / (count + 3) for _ in range(1500)])
    assert np.allclose(np.mean(ours, 0), theirs.mean(0), atol=0.02) and np.allclose(
        np.std(ours, 0), theirs.std(0), atol=0.02
    )


@pytest.mark.parametrize("name", ["qa1", "qa2"])
def test_soft_noise_keeps_every_answer(name):
    """The interpreter answers each question as before; a changed one is refused."""
    task = make(task=name, noise="soft", tokens=400)
    for question in islice(questions(name, 0, "test", 0, 100), 100):
        question = with_empty_facts(question)
        facts = memreasoner.encode_lines(task.tokenizer, question.facts)
        lines, support = task.add_soft_noise(question, facts, np.random.Generator(np.random.PCG64(2)))
        texts = [task.tokenizer.decode(line) for line in lines]
        assert interpret(list(filter(None, texts)), question.text)[0] == question.answer
        assert [texts[i] for i in support] == [question.facts[i] for i in question.support]
    with pytest.raises(
        ValueError,
        match=r"question='Where is Mary\?': soft noise changed its answer from garden to office; expected the same",
    ):
        memreasoner.check_answer(
            ["Mary moved to the garden.", "Mary moved to the office."], Question((), "Where is Mary?", "garden", ())
        )


# --- other places, other tasks


@pytest.mark.parametrize("config", [{}, {"tokens": 120, "noise": "soft"}])
def test_other_places(config):
    """A bijection; no old word is left in the test, and training keeps the old ones. Everything else stays."""
    assert (
        set(OTHER_PLACES) == set(PLACES)
        and len(set(OTHER_PLACES.values())) == 6
        and not set(OTHER_PLACES) & set(OTHER_PLACES.values())
    )
    same, other = make(task="qa2", **config), make(task="qa2", eval_places="other", **config)
    back = {new: old for old, new in OTHER_PLACES.items()}
    for ours, theirs in zip(
        texts_of(other, other.batch(0, "test", 0, 20)), texts_of(same, same.batch(0, "test", 0, 20)), strict=True
    ):
        assert not set(" ".join(ours).replace(".", "").split()) & set(PLACES)
        assert [" ".join(back.get(word.rstrip("."), word.rstrip(".")) for word in text.split()) for text in ours] == [
            t.replace(".", "") for t in theirs
        ]
    a, b = same.batch(0, "train", 0, 4), other.batch(0, "train", 0, 4)
    assert torch.equal(a.ids_BT, b.ids_BT) and all(map(torch.equal, a.context[0], b.context[0]))
    answers = {tails[0][1] for tails in tails_of(other, other.batch(0, "test", 0, 60))}
    assert answers == set(OTHER_PLACES.values())


@pytest.mark.parametrize("layout", ["lines", "text"])
def test_renamed_places(layout):
    """Half of the questions of the training are about places of the noise, which are those of no test and named by no
    phrase; else they are as they were. Validation and test stay the same."""
    noise = {"haystack": "noise", "tokenizer": "word", "vocab_size": 2048, "books": None}  # which knows the places
    config = {"task": "qa2", "layout": layout, "apart": 1, **noise}
    plain, task = make(**config), make(**config, renamed=0.5, mentioned=["the cellar"])
    stream = list(islice(questions("qa2", 1, "train", 2, 100), 100))
    found = list(islice(task.with_renamed(iter(stream), np.random.default_rng(0)), 100))
    changed, seen = 0, set()
    for old, new in zip(stream, found, strict=True):
        words, others = (re.findall(r"\w+", " ".join((*q.facts, q.text, q.answer))) for q in (old, new))
        names = {a: b for a, b in zip(words, others, strict=True) if a in PLACES}
        changed += names != {a: a for a in names}
        assert [names.get(word, word) for word in words] == others and len({*names.values()}) == len(names)
        assert old.support == new.support and new.answer == names[old.answer]
        seen |= {b for a, b in names.items() if a != b}
    assert 35 <= changed <= 65 and len(seen) > 30 and not seen & {*PLACES, *OTHER_PLACES.values(), "cellar"}
    for split in ("train", "valid", "test"):
        before, after = (list(one.batch(1, split, 2, 8).context) for one in (plain, task))
        same = len(before) == len(after) and all(map(torch.equal, before[0], after[0]))
        assert same == (split != "train")
    for given in ({"renamed": 1.5}, {"renamed": 0.5, "noise": "soft", "tokens": 50}):
        with pytest.raises(ValueError, match="renamed"):
            make(**given)


def test_the_test_may_ask_another_task():
    """From two hops to one: the training has objects, the test asks for people."""
    task = make(task="qa2", eval_task="qa1")
    kinds = [
        {event_of(text).kind for texts in texts_of(task, task.batch(0, split, 0, 20)) for text in texts[:-1] if text}
        for split in ("train", "test")
    ]
    assert kinds == [{"move", "get", "drop"}, {"move"}]
    assert [task.batch(0, split, 0, 2).meta["support"].shape[1] for split in ("valid", "test")] == [2, 1]


def test_accuracy_is_the_first_word():
    task = make()
    batch, tokenizer = task.batch(0, "test", 0, 4), task.tokenizer
    answers = [tails[0][1] for tails in tails_of(task, batch)]
    said = torch.full((4, task.new_tokens), tokenizer.pad_id)
    for row, text, end in zip(
        said,
        [answers[0], f"{answers[1]} garden", f"the {answers[2]}", answers[3]],
        [True, True, True, False],
        strict=True,
    ):
        ids = [*tokenizer.encode(text).tolist(), *[tokenizer.eos_id] * end]
        row[: len(ids)] = torch.tensor(ids)
    scores = task.score_text(said, batch)
    assert scores["accuracy"].tolist() == [1, 1, 0, 1] and scores["exact_match"].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("task", "qa1"),
        ("stories", "lua"),
        ("noise", "soft"),
        ("empty_lines", False),
        ("eval_task", "qa1"),
        ("eval_places", "other"),
        ("layout", "text"),
        ("tokens", 120),
        ("line_tokens", 12),
        ("segment_lines", 3),
        ("segment_len", 90),
        ("margin", 40),
        ("supporting", 0.5),
        ("mentioned", ["the library"]),
        ("haystack", "books"),
        ("books", 1),
        ("tokenizer", "bpe"),
        ("vocab_size", 300),
        ("vocabulary", "books"),
    ],
)
def test_every_knob_matters(field, other, tmp_path):
    """Each field of the configuration changes the batch."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text(
            "The quick brown zebras jumped over ten lazy giraffes in Africa today. " * 60
        )
    given = {"task": "qa2", "segment_len": 80}
    given |= {"tokens": 150} if field in ("noise", "haystack", "books", "vocab_size", "vocabulary") else {}
    given |= {"layout": "text", "tokens": 150} if field == "margin" else {}
    given |= {"layout": "text"} if field == "mentioned" else {}
    given |= {"line_tokens": 32} if field == "tokenizer" else {}
    split = "test" if field.startswith("eval_") else "train"
    a, b = (
        make(**{**given, **c}).batch(0, split, 1, 4)
        for c in ({}, {field: str(tmp_path) if other == "books" else other})
    )
    parts = [
        [
            t
            for p in (*x.context, x.ids_BT, x.meta.get("support", x.ids_BT))
            for t in (p if isinstance(p, tuple) else (p,))
        ]
        for x in (a, b)
    ]
    assert len(parts[0]) != len(parts[1]) or not all(torch.equal(one, two) for one, two in zip(*parts, strict=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"task": "qa3"}, "task='qa3': expected one of qa1, qa2"),
        ({"layout": "rows"}, "layout='rows': expected one of lines, text"),
        ({"noise": "hard"}, "noise='hard': expected one of books, soft"),
        ({"eval_places": "new"}, "eval_places='new': expected one of same, other"),
        ({"tokens": -1}, "tokens=-1: expected 0 or more"),
        ({"line_tokens": 0}, "line_tokens=0: expected at least 1"),
        ({"segment_lines": 0}, "segment_lines=0: expected at least 1"),
        ({"supporting": 1.5}, "supporting=1.5: expected a share from 0 to 1"),
        ({"layout": "text", "margin": 128}, "margin=128: expected less than segment_len=128"),
        ({"stories": "no/such/folder"}, "stories='no/such/folder': no such folder"),
        ({"haystack": "no/such/folder"}, "haystack='no/such/folder': no such folder"),
        ({"mentioned": ["the attic"]}, "mentioned=['the attic']: expected none where apart is 0"),
        ({"eval_task": "qa4"}, "eval_task='qa4': expected one of same, qa1, qa2"),
    ],
)
def test_wrong_settings(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"segment_len": 5},
            "segment_len=5: expected at least 6, the tokens of a question or prompt, its answer and EOS",
        ),
        ({"layout": "text", "margin": 5}, "margin=5: expected at least 6"),
        ({"layout": "text", "margin": 7, "mentioned": ["the attic"]}, "margin=7: expected at least"),
        ({"line_tokens": 3}, "line_tokens=3: expected at least 6, the tokens of a question or a supporting fact"),
        (
            {"tokens": 9},
            "tokens=9: no question among 50 has facts that fit into it; raise it, or 0 for the facts alone",
        ),
        ({"tokens": 100, "haystack": "FOLDER"}, "no .txt file for split 'train'"),
        ({"stories": "FOLDER"}, "no qa1_single-supporting-fact_train.txt; expected the files of bAbI"),
    ],
)
def test_what_a_batch_tells(config, message, tmp_path):
    config = {key: str(tmp_path) if value == "FOLDER" else value for key, value in config.items()}
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        make(**config, **({} if "vocabulary" in config or "haystack" not in config else {"vocabulary": "noise"})).batch(
            0, "train", 0, 4
        )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "2 Where is Mary?\tspaceship\t1",
            "answer='spaceship': tokenizer 'word' has no such word; "
            "expected one of task and vocabulary, or another tokenizer",
        ),
        (
            "2 Who is Mary?\tgarden\t1",
            "question='Who is Mary?' with 1 supporting facts: expected 'Where is ...?' with 1, as in qa1",
        ),
        (
            "2 Mary left.\n3 Where is Mary?\tgarden\t1 2",
            "question='Where is Mary?' with 2 supporting facts: expected 'Where is ...?' with 1, as in qa1",
        ),
        ("2 Where is John?\tgarden\t1", "question='Where is John?': soft noise changed its answer from garden to "),
        ("2 Mary left.\n3 Where is Mary?\tgarden\t1", "fact='Mary left.': expected one of bAbI's QA1 to QA5"),
    ],
)
def test_stories_that_make_no_sense(line, message, tmp_path):
    """Stories of one's own: unknown words, questions of another kind, questions without an answer."""
    for part in ("train", "test"):
        (tmp_path / f"qa1_single-supporting-fact_{part}.txt").write_text(f"1 Mary moved to the garden.\n{line}\n" * 12)
    task = make(
        stories=str(tmp_path),
        **({"noise": "soft", "tokens": 180} if message.startswith("fact") or "soft" in message else {}),
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        task.batch(0, "train", 0, 1)


def test_golden_sample():
    """The sampler never changes silently: old results would no longer be comparable."""
    task = make(task="qa1", tokens=40, noise="soft")
    batch = task.batch(0, "train", 1, 1)
    (texts,) = texts_of(task, batch)
    told = (
        "Mary went to the hallway. | Mary travelled to the kitchen. | John journeyed to the bedroom. |  | "
        "John moved to the hallway. | Daniel travelled to the kitchen. | John moved to the bathroom. | Where is John?"
    )
    assert " | ".join(texts) == told and len(lines_of(task, batch)[0]) == 8
