"""Variable tracking: an evaluator of assignments answers every sample, and what counts as right."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
from test_episodes import SMALL, right_answers, tails_of, texts_of

from lit_memory.tasks.needle import LINE
from lit_memory.tasks.variable_tracking import NAME, NOTE, VariableTracking

STATEMENT = re.compile(r"VAR ((?:[A-Z] ?){5}) = (VAR (?:[A-Z] ?){5}|(?:\d ?){5})")
ASKED = re.compile(r"Question: Find all variables that are assigned the value ((?:\d ?){5})")
CASES = [
    {"hops": 1},
    {"hops": 2},
    {"hops": 2, "tokens": 400},
    {"hops": 2, "eval_hops": 1, "statements": 6, "tokens": 250, "noise": "books"},
    {"rules": "ruler"},
    {"rules": "ruler", "hops": 2, "statements": 9, "tokens": 300},
    {"hops": 2, "tokenizer": "char", "line_tokens": 96, "segment_len": 160},
]
cases = pytest.mark.parametrize("config", CASES, ids=lambda c: "-".join(map(str, c.values())))


def make(**config) -> VariableTracking:
    return VariableTracking(VariableTracking.Config(**{**SMALL, **config}))


def evaluate(statements, value):
    """The variables with a value, in the order in which they get it; a copy before what it copies is an error."""
    known = {}
    for name, given in statements:
        known[name.strip()] = known[given.removeprefix("VAR ").strip()] if given.startswith("VAR") else given.strip()
    return [name for name, own in known.items() if own == value], known


@cases
@pytest.mark.parametrize("split", ["train", "test"])
def test_oracle_of_lines(config, split):
    """Whoever evaluates the lines says the variable of every tail; support is where each one is stated; names and
    values are distinct."""
    task = make(**config, supporting=1.0)
    batch, length = task.batch(0, split, 0, 25), task.config.chain_len(split)
    assert batch.read_only == length
    for texts, tails, support in zip(
        texts_of(task, batch), tails_of(task, batch), batch.meta["support"].tolist(), strict=True
    ):
        texts = [text.strip() for text in texts]
        statements = [found.groups() for found in map(STATEMENT.fullmatch, texts) if found]
        value = ASKED.search(texts[-1])[1].strip()
        wanted, known = evaluate(statements, value)
        assert [answer for _, answer in tails] == wanted and len(wanted) == length == len(support)
        assert len(known) == len(statements) and len(set(known.values())) == len(statements) // length
        assert [STATEMENT.fullmatch(texts[-1 - back])[1].strip() for back in support] == wanted
        assert all(f"{length} variables are assigned the value {value}, they are:" in prompt for prompt, _ in tails)
        rest = {text for text in texts[:-1] if not STATEMENT.fullmatch(text)}
        assert rest <= {"", LINE} or config.get("noise") == "books"
        if split == "train" and task.config.rules == "memreasoner" and not task.config.tokens:
            assert texts.count("") == len(statements) // 2 - 1
        else:
            assert "" not in texts


@cases
def test_oracle_of_text(config):
    """Note, statements and noise, question, all variables, EOS."""
    task = make(
        **{
            **config,
            "layout": "text",
            **({"segment_len": 500, "margin": 450} if "tokenizer" in config else {"segment_len": 160}),
        }
    )
    note = task.tokenizer.decode(task.tokenizer.encode(NOTE).tolist())
    for split in ("train", "test"):
        batch, samples = task.batch(0, split, 0, 12), sorted(task.samples(0, split, 0, 12), key=lambda s: -s.segments)
        for sample, ((prompt, answer),) in zip(samples, tails_of(task, batch), strict=True):
            context = task.tokenizer.decode(sample.read(0, sample.context_len).tolist()).strip()
            assert context.startswith(note)
            value = ASKED.search(prompt)[1].strip()
            assert answer == ", ".join(evaluate([found.groups() for found in STATEMENT.finditer(context)], value)[0])
            assert prompt.endswith("they are:")
    (bare,) = task.at(note=False).samples(0, "train", 0, 1)
    assert note not in task.tokenizer.decode(bare.read(0, bare.context_len).tolist())


def test_worked_example(monkeypatch):
    """Spec 5.2: four lines, of which the first and the last give DDDDD and YYYYY their value."""
    monkeypatch.setattr(VariableTracking, "draw_names", lambda *_: ["DDDDD", "YYYYY", "FFFFF", "ZZZZZ"])
    monkeypatch.setattr(VariableTracking, "draw_values", lambda *_: ["1 3 0 7 5", "1 9 3 6 7"])
    task, seen = make(hops=2, statements=4), set()
    for step in range(40):
        batch = task.batch(0, "test", step, 1)
        (texts,), (tails,) = texts_of(task, batch), tails_of(task, batch)
        seen.add((*texts[:-1], *batch.meta["support"][0].tolist()))
        assert [answer for _, answer in tails] == ["DDDDD", "YYYYY"]
        assert texts[-1] == "[ INST] Question: Find all variables that are assigned the value 1 3 0 7 5 [ / INST]"
    assert (
        "VAR DDDDD = 1 3 0 7 5",
        "VAR FFFFF = 1 9 3 6 7",
        "VAR ZZZZZ = VAR FFFFF",
        "VAR YYYYY = VAR DDDDD",
        4,
        1,
    ) in seen
    assert len(seen) == 6  # orders in which no variable is copied before it has a value


def test_blind_solver():
    """Saying the two letters that are most frequent in training scores as often as chance has it."""
    task = make(hops=2, statements=4)
    wanted = {
        split: [" ".join(answer for _, answer in tails) for tails in tails_of(task, task.batch(0, split, 0, 400))]
        for split in ("train", "valid")
    }
    said = " ".join(name for name, _ in Counter(" ".join(wanted["train"]).split()).most_common(2))
    for targets in wanted.values():
        scores = [task.score_answer(target, said, True, "") for target in targets]
        assert (
            np.mean([s["exact_set"] for s in scores]) < 0.02
            and abs(np.mean([s["string_match_all"] for s in scores]) - 2 / 26) < 0.04
        )


@pytest.mark.parametrize(
    ("target", "said", "exact", "part"),
    [
        ("AAAAA BBBBB", " BBBBB, AAAAA", 1, 1),
        ("AAAAA BBBBB", "AAAAA and CCCCC", 0, 0.5),
        ("AAAAA BBBBB", "AAAAA BBBBB CCCCC", 0, 1),
        ("AAAAA", "it is AAAAA. AAAAA", 1, 1),
        ("AAAAA", "AAAAAA", 0, 1),
        ("X Y Z Q R A B C D E", "A B C D E, X Y Z Q R", 1, 1),
        ("X Y Z Q R", "", 0, 0),
    ],
)
def test_metrics(target, said, exact, part):
    """exact_set wants these variables and no other, in any order; string_match_all the share of them."""
    assert make().score_answer(target, said, True, "") == {"exact_set": exact, "string_match_all": part}


def test_sizes():
    """MemReasoner has 2, 4, 6, 8 or 10 statements, each as often, and the longest episode has 14 lines before the
    question (spec 5.2)."""
    for hops in (1, 2):
        batch = make(hops=hops).batch(0, "train", 0, 500)
        counts = Counter(batch.meta["statements"].tolist())
        assert set(counts) == {2, 4, 6, 8, 10} and sum((n - 100) ** 2 / 100 for n in counts.values()) < 25
        assert max(map(len, texts_of(make(hops=hops), batch))) == 15
    assert set(make(rules="ruler").batch(0, "train", 0, 9).meta["statements"].tolist()) == {5}
    assert set(
        make(rules="ruler", layout="text", segment_len=160).batch(0, "train", 0, 9).meta["statements"].tolist()
    ) == {5}


def test_noise_fills_the_context():
    """Whole lines of noise, as many as fit; nothing is between statements without ``tokens``."""
    task = make(hops=2, statements=4, tokens=400)
    for sample in task.samples(0, "valid", 0, 20):
        assert sample.context_len <= 400 < sample.context_len + len(sample.noise)
    assert all(sample.noise is None for sample in make(hops=2).samples(0, "valid", 0, 5))


def test_splits_share_no_value():
    task = make(hops=1, statements=2)
    seen = [
        {ASKED.search(texts[-1])[1] for texts in texts_of(task, task.batch(0, split, 0, 400))}
        for split in ("train", "valid", "test")
    ]
    assert (
        all(len(values) > 300 for values in seen)
        and not seen[0] & seen[1]
        and not seen[0] & seen[2]
        and not seen[1] & seen[2]
    )


@pytest.mark.parametrize("digits", [2, 5])
def test_values_have_so_many_digits(digits):
    task = make(hops=1, statements=10, value_digits=digits)
    for sample in task.samples(0, "train", 0, 20):
        values = [re.sub(r"\D", "", line) for line in (task.tokenizer.decode(fact) for fact in sample.facts) if line]
        assert len(set(values)) == 10 and all(len(value) == digits and value[0] != "0" for value in values)


def test_one_tail_answers_all():
    """The same samples; what the tails of all hops answer stands in one, behind their prompt."""
    each, one = (make(hops=2, statements=4, one_tail=joined) for joined in (False, True))
    pairs = [tails_of(task, task.batch(0, "test", 0, 8)) for task in (each, one)]
    for several, joined in zip(*pairs, strict=True):
        assert joined == [(several[0][0], ", ".join(answer for _, answer in several))]
    batch = one.batch(0, "test", 0, 8)
    assert batch.read_only == 1 and one.score(batch.targets_BT, batch)["exact_set"].all()


@pytest.mark.parametrize(
    ("field", "other"),
    [
        *(("rules", "ruler"), ("hops", 2), ("statements", 6), ("eval_hops", 2), ("value_digits", 3)),
        *(("one_tail", True), ("noise", "books"), ("note", False), ("layout", "text"), ("tokens", 300)),
    ],
)
def test_every_knob_matters(field, other):
    given = {
        "segment_len": 160,
        "margin": 120,
        "layout": "text" if field == "note" else "lines",
        "tokens": 400 if field == "noise" else 0,
    }
    given["hops"] = 2 if field == "one_tail" else 1
    split = "test" if field == "eval_hops" else "train"
    a, b = (make(**{**given, **c}).batch(0, split, 1, 4) for c in ({}, {field: other}))
    parts = [[t for p in (*x.context, x.ids_BT) for t in (p if isinstance(p, tuple) else (p,))] for x in (a, b)]
    assert len(parts[0]) != len(parts[1]) or not all(torch.equal(one, two) for one, two in zip(*parts, strict=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rules": "vt"}, "rules='vt': expected one of memreasoner, ruler"),
        ({"noise": "essays"}, "noise='essays': expected one of line, books"),
        ({"hops": -1}, "hops=-1: expected 0 or more"),
        ({"hops": 3}, "hops=3: 2 statements are no whole number of chains of 3; expected a multiple"),
        ({"eval_hops": 3}, "eval_hops=3: 2 statements are no whole number of chains of 3; expected a multiple"),
        (
            {"hops": 2, "statements": 5},
            "statements=5: 5 statements are no whole number of chains of 2; expected a multiple",
        ),
        ({"value_digits": 1}, "value_digits=1: expected at least 2"),
        (
            {"rules": "ruler", "hops": 1, "statements": 182, "value_digits": 2},
            "value_digits=2: expected more for 91 chains; there are 90 values",
        ),
        ({"statements": 27}, "statements=27: expected at most 26, one to a letter"),
        ({"layout": "text", "margin": 200}, "margin=200: expected less than segment_len=128"),
        ({"test_tokens": [100], "test_statements": [2]}, "test_statements=[2]: a test varies one field"),
    ],
)
def test_wrong_settings(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"tokens": 10, "statements": 2},
            "tokens=10: expected at least 16, those of the statements, or 0 for no noise",
        ),
        (
            {"segment_len": 20},
            "segment_len=20: expected at least 30, the tokens of a question or prompt, its answer and EOS",
        ),
        ({"layout": "text", "margin": 40, "statements": 2}, "margin=40: expected at least"),
        ({"line_tokens": 12}, "line_tokens=12: expected at least 22, the tokens of a question"),
    ],
)
def test_what_a_batch_tells(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**config).batch(0, "train", 0, 4)


def test_golden_sample():
    """The sampler never changes silently: old results would no longer be comparable."""
    task = make(hops=2, statements=4)
    (texts,) = texts_of(task, task.batch(0, "train", 0, 1))
    assert (
        " | ".join(texts[:-1])
        == "VAR KKKKK = 1 9 0 1 4 | VAR LLLLL = VAR KKKKK | VAR VVVVV = 4 6 5 2 9 |  | VAR GGGGG = VAR VVVVV"
    )


def test_names():
    assert NAME.findall("AAAAA BBBBBB A B C D E Ab C") == ["AAAAA", "A B C D E"]


@pytest.mark.parametrize("tokenizer", ["word", "char", "bpe"])
@pytest.mark.parametrize("hops", [4, 8])
def test_there_is_room_for_the_whole_answer(tokenizer, hops):
    """A model that generates all variables of a chain is right by every metric, with any tokenizer."""
    sizes = {"segment_len": 900, "margin": 800, "line_tokens": 300, "vocab_size": 512}
    task = make(rules="ruler", hops=hops, layout="text", tokenizer=tokenizer, **sizes)
    batch = task.batch(0, "test", 0, 4)
    right_BN = right_answers(task, batch)
    assert all((values == 1).all() for values in task.score_text(right_BN, batch).values())
