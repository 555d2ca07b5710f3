"""Tasks: pure samplers that an oracle solves and a blind solver does not. Registered tasks are covered by an entry in
    TASK_CASES.

A solver sees ``ids_BT`` with the answers removed (-1), and returns the ids at the scored positions.
"""

import itertools

import pytest
import torch

from lit_memory.registry import TASKS, load_class
from lit_memory.tasks.associative_retrieval import AssociativeRetrieval, capacity
from lit_memory.tasks.batch import Batch, exact_match
from lit_memory.tasks.mixins import FiniteSplits, Streamed
from lit_memory.tasks.quadratic import Quadratic
from lit_memory.testing.tasks import (
    batches_are_pure,
    batches_are_well_formed,
    batches_move,
    conditions_vary_one_field,
    right_answers_score_best,
    rows,
)

TASK_CASES = {
    "associative_retrieval": [
        {"mode": "remember", "pairs": 5, "key_size": 2, "vary": 1.0},
        {"mode": "remember", "pairs": 16, "test_pairs": [4, 16], "value_size": 2},
        {"mode": "rewrite", "pairs": 12, "vary": 0.5, "queries": 3},
        {"pairs": 6, "queries": 2, "vary": 0.5, "together": "pairs"},
        {"pairs": 6, "queries": 2, "together": "all"},
        {"mode": "rewrite", "pairs": 40, "key_size": 2, "value_size": 3, "legacy_ids": True},
    ],
    "mqar": [
        {"vocabulary": 64, "length": 32, "pairs": 8, "segment_len": 8, "test_pairs": [4, 8]},
        {"vocabulary": 8192, "length": 64, "pairs": 4, "filler": "random"},
    ],
    "babilong": [
        {"task": "qa1", "segments": 8, "segment_len": 48, "books": 2, "vocab_size": 512, "test_segments": [2, 8]},
        {
            "task": "qa5",
            "segments": 9,
            "segment_len": 32,
            "margin": 12,
            "books": 2,
            "vocab_size": 256,
            "vary": 0.5,
            "test_segments": [9],
        },
    ],
    "needle": [
        {
            "variant": "pk",
            "digits": 4,
            "note": False,
            "segments": 8,
            "segment_len": 64,
            "margin": 38,
            "books": 2,
            "vocab_size": 512,
            "test_segments": [2, 8],
        },
        {
            "variant": "w",
            "segments": 7,
            "segment_len": 160,
            "books": 2,
            "vocab_size": 512,
            "vary": 0.5,
            "test_segments": [7],
        },
    ],
    "memreasoner": [
        {
            "task": "qa2",
            "tokens": 150,
            "line_tokens": 12,
            "segment_lines": 8,
            "segment_len": 24,
            "books": 2,
            "vocab_size": 512,
            "test_tokens": [0, 150],
        },
        {
            "task": "qa2",
            "layout": "text",
            "tokens": 200,
            "noise": "soft",
            "segment_len": 32,
            "margin": 16,
            "books": 2,
            "vocab_size": 256,
        },
    ],
    "variable_tracking": [
        {
            "hops": 2,
            "statements": 8,
            "line_tokens": 24,
            "segment_lines": 8,
            "segment_len": 40,
            "books": 2,
            "vocab_size": 512,
            "test_statements": [4, 8],
        },
        {
            "rules": "ruler",
            "layout": "text",
            "tokens": 400,
            "segment_len": 96,
            "margin": 90,
            "books": 2,
            "vocab_size": 512,
            "test_tokens": [200, 400],
        },
    ],
    "passkey": [
        {
            "digits": 9,
            "line_tokens": 20,
            "segment_lines": 8,
            "tokens": 200,
            "segment_len": 24,
            "books": 2,
            "vocab_size": 512,
            "test_digits": [2, 9],
        },
        {
            "needle": "magic",
            "layout": "text",
            "tokens": 250,
            "segment_len": 40,
            "margin": 16,
            "books": 2,
            "vocab_size": 512,
            "test_depth": [0, 100],
        },
    ],
    "time_series": [
        {"horizon": 24, "test_horizon": [7, 24], "patch": 12, "segment_len": 1},
        {"lookback": 48, "horizon": 5, "segment_len": 1},
    ],
    "dna": [
        {"length": 60, "segment_len": 8, "test_length": [50, 60]},
        {"length": 60, "segment_len": 7, "next_base": True},
    ],
    "language_modeling": [
        {"segments": 4, "segment_len": 16, "books": 1, "vocab_size": 512, "test_segments": [2, 4], **more}
        for more in ({}, {"stream": True})
    ],
    "quadratic": [{"test_max_root": [10, 100]}, {"max_root": 30, "segment_len": 180}],
    "algorithmic": [
        {"test_length": [5, 24]},
        {"task": "reverse", "symbols": 8},
        {"task": "associative", "length": 4, "segment_len": 5},
    ],
}
CASES = [(name, config) for name, configs in TASK_CASES.items() for config in configs]


def make(name="associative_retrieval", **config):
    cls = load_class("task", name)
    if "pairs" in config:
        config.setdefault("test_pairs", [config["pairs"]])
    return cls(cls.Config(**config))


def case_ids(cases):
    return ["-".join(map(str, config.values())) for _, config in cases]


@pytest.fixture(params=CASES, ids=case_ids(CASES))
def task(request):
    name, config = request.param
    return make(name, **config)


RETRIEVAL = [case for case in CASES if case[0] == "associative_retrieval"]


@pytest.fixture(params=RETRIEVAL, ids=case_ids(RETRIEVAL))
def retrieval(request):
    name, config = request.param
    return make(name, **config)


def questions(batch):
    """What a solver may see."""
    return torch.cat([*batch.context, batch.ids_BT.masked_fill(batch.targets_BT != -100, -1)], dim=1)


def parse(task, batch):
    """Per sample: written (key, value) pairs in order, and asked keys, as tuples of ids. Written from the format of
    spec 1.1."""
    sep, gen, eos = (100, 101, 102) if task.config.legacy_ids else (16, 17, 18)
    for ids in questions(batch).tolist():
        pairs, asked = [], []
        for i in range(0, len(ids), task.pair_len):
            segment = ids[i : i + task.pair_len]
            if gen in segment:
                asked.append(tuple(segment[: segment.index(gen)]))
                assert set(segment[segment.index(gen) + 1 :]) == {-1} and not set(segment) & {sep, eos}
            else:
                assert not asked and segment[-1] == eos and segment.count(sep) == 1
                pairs.append((tuple(segment[: segment.index(sep)]), tuple(segment[segment.index(sep) + 1 : -1])))
        yield pairs, asked


def solve(task, batch, answer):
    """Exact match of ``answer(pairs, key)`` -> value digits."""
    predicted, eos = torch.zeros_like(batch.ids_BT), batch.ids_BT[0, -1]
    for row, (pairs, asked) in zip(predicted, parse(task, batch), strict=True):
        for position, key in enumerate(asked):
            end = len(row) - (len(asked) - 1 - position) * task.pair_len
            row[end - task.config.value_size - 1 : end] = torch.tensor([*answer(pairs, key), eos])
    return task.score(predicted, batch)["exact_match"].mean().item()


# --- every registered task


def test_every_task_has_cases():
    """A registered task has to be listed here."""
    assert TASK_CASES.keys() == TASKS.keys()


def test_batch_is_pure(task):
    """The same arguments give the same bits whatever was drawn before; another seed, split or step gives other
    samples."""
    batches_are_pure(task)


def test_batch_is_well_formed(task):
    """Ids lie in the vocabulary, targets repeat the ids, and the last ``read_only`` segments hold all of them."""
    batches_are_well_formed(task)


def test_splits_are_disjoint(task):
    """No sample of one split, of 300 each, occurs in another; nor twice in its own, equations aside. Numbered samples
    are tested with their task."""
    if isinstance(task, FiniteSplits) and (task.count("train") is not None or isinstance(task, Streamed)):
        return
    seen = []
    for split in ("train", "valid", "test"):
        drawn = [row for step in range(3) for row in rows(task.batch(0, split, step, 100))]
        seen += dict.fromkeys(drawn) if isinstance(task, Quadratic) else drawn
    longest = max(map(len, seen))
    enough = min(6 * (task.segment_len or longest), longest)  # with few pairs, chance repeats some
    samples = [s for s in seen if len(s) >= enough]
    assert len(samples) > 500 and len(set(samples)) == len(samples)


def test_batch_to_device(task):
    """``Batch.to`` moves every tensor and keeps the rest."""
    batches_move(task)


def test_test_conditions(task):
    """One task per value of ``test_<field>``, equal to the task in every other field."""
    conditions_vary_one_field(task)
    axis, values = task.test_axis()
    conditions = task.test_conditions()
    assert [x for x, _ in conditions] == values
    for x, condition in conditions:
        assert (condition.batch(0, "test", 0, 2).meta[axis] == x).all()


def test_right_answers_score_best(task):
    """The first metric is better for the targets than for other ids."""
    right_answers_score_best(task)


# --- associative retrieval: oracles


def test_oracle(retrieval):
    """The value at the last occurrence of the key is always right."""
    for split in ("train", "valid", "test"):
        assert solve(retrieval, retrieval.batch(0, split, 0, 100), lambda pairs, key: dict(pairs)[key]) == 1.0


@pytest.mark.parametrize("mode", ["remember", "rewrite"])
def test_blind_solver(mode):
    """Guessing a digit, or repeating a value that was written under another key, scores about chance, 1/16."""
    task = make(mode=mode, pairs=10, test_pairs=[10])
    batch = task.batch(0, "test", 0, 4000)
    three_sigma = 3 * (1 / 16 * 15 / 16 / 4000) ** 0.5
    other = solve(task, batch, lambda pairs, key: next((v for k, v in pairs if k != key), (0,)))
    for score in (*(solve(task, batch, lambda pairs, key, d=d: (d,)) for d in (0, 15)), other):
        assert abs(score - 1 / 16) < three_sigma


def test_rewrite_needs_the_last_value():
    """The first value of a key is wrong as often as keys repeat with another value."""
    task = make(mode="rewrite", pairs=40)
    assert solve(task, task.batch(0, "test", 0, 500), lambda pairs, key: dict(reversed(pairs))[key]) < 0.4


def test_answer_needs_eos():
    """A right value without EOS is no match, and neither is one wrong digit; other positions do not count."""
    task = make(pairs=3, value_size=2)
    batch = task.batch(0, "test", 0, 4)
    right = batch.targets_BT.masked_fill(batch.targets_BT == -100, 7)
    assert task.score(right, batch)["exact_match"].tolist() == [1, 1, 1, 1]
    for sample, position in ((0, -1), (1, -2), (2, -3)):
        right[sample, position] = (right[sample, position] + 1) % 16
    right[3, -4] = 5
    assert task.score(right, batch)["exact_match"].tolist() == [0, 0, 0, 1]


def test_exact_match_counts_answers():
    """With several queries the score is the share of right answers; without segments the whole sequence is one
    answer."""
    ids = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3]])
    targets, predicted = torch.tensor([[-100, 1, -100, 3]] * 2), torch.tensor([[0, 1, 0, 3], [0, 1, 0, 4]])
    assert exact_match(predicted, Batch(ids, targets, segment_len=2, read_only=2)).tolist() == [1.0, 0.5]
    assert exact_match(predicted, Batch(ids, targets)).tolist() == [1.0, 0.0]


# --- associative retrieval: format and sampling


@pytest.mark.parametrize(
    ("mode", "key_size", "keys", "values", "asked", "expected"),
    [
        ("remember", 2, [37, 112, 28], [9, 3, 9], 1, "5 2 S 9 E 0 7 S 3 E 12 1 S 9 E 0 7 G 3 E"),
        ("rewrite", 1, [4, 7, 4], [1, 5, 2], 2, "4 S 1 E 7 S 5 E 4 S 2 E 4 G 2 E"),
    ],
)
def test_worked_example(monkeypatch, mode, key_size, keys, values, asked, expected):
    """Spec 1.9: layout of the segments, digits least significant first, targets on the query's value and EOS."""
    task = make(mode=mode, key_size=key_size, pairs=3)
    monkeypatch.setattr(AssociativeRetrieval, "_keys", lambda *_: torch.tensor([keys]))
    monkeypatch.setattr(AssociativeRetrieval, "_queries", lambda *_: torch.tensor([[asked]]))
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor([values]))
    batch = task.batch(0, "test", 0, 1)
    ids = [{"S": 16, "G": 17, "E": 18}.get(t) or int(t) for t in expected.split()]
    assert batch.ids_BT.tolist() == [ids]
    assert batch.targets_BT.tolist() == [[-100] * (len(ids) - 2) + ids[-2:]]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"mode": "remember", "pairs": 3, "key_size": 2}, "13 7 16 12 18 12 3 16 14 18 13 10 16 7 18 12 3 17 14 18"),
        (
            {"mode": "rewrite", "pairs": 4, "vary": 1.0, "queries": 2, "value_size": 2},
            "9 16 6 2 18 12 16 3 8 18 9 17 6 2 18 12 17 3 8 18",
        ),
    ],
)
def test_golden_sample(config, expected):
    """The sampler never changes silently: old results would no longer be comparable."""
    assert make(**config).batch(0, "train", 0, 2).ids_BT[0].tolist() == [int(t) for t in expected.split()]


def test_legacy_ids():
    """The reference's special ids and vocabulary; otherwise the same sample."""
    new, old = (make(mode="rewrite", pairs=6, legacy_ids=flag) for flag in (False, True))
    ids = new.batch(0, "train", 0, 4).ids_BT
    assert torch.equal(old.batch(0, "train", 0, 4).ids_BT, torch.where(ids >= 16, ids + 84, ids))
    assert (new.vocab_size, old.vocab_size) == (19, 128)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([0], [20]),
        ([4], [4] * 5),
        ([6], [6, 6, 6, 2]),
        ([12, 1], [12] + [1] * 8),
        ([8, 3, 0], [8, 3, 9]),
        ([50, 1], [20]),
    ],
)
def test_recut(lengths, expected):
    """What is written becomes context in other segments; the questions, their targets and their score stay."""
    batch = make(mode="rewrite", pairs=5, queries=2).batch(0, "test", 0, 3)
    assert batch.recut(()) is batch
    cut = batch.recut(lengths)
    assert [part.shape[1] for part in cut.context] == expected and cut.ids_BT.shape[1] == 8
    assert torch.equal(torch.cat([*cut.context, cut.ids_BT], dim=1), batch.ids_BT)
    assert (cut.segment_len, cut.read_only) == (4, 2) and torch.equal(cut.targets_BT, batch.targets_BT[:, -8:])
    assert (batch.targets_BT[:, :-8] == -100).all() and torch.equal(exact_match(cut.ids_BT, cut), torch.ones(3))


@pytest.mark.parametrize(("together", "written"), [("nothing", [4] * 5), ("pairs", [20]), ("all", [28])])
def test_what_stands_together(together, written):
    """The same samples with all pairs in one segment, and with the queries there as well; nobody may cut these anew."""
    task, apart = make(pairs=5, queries=2, together=together), make(pairs=5, queries=2).batch(0, "test", 0, 3)
    batch = task.batch(0, "test", 0, 3)
    assert [segment.shape[1] for segment in batch.written()] == written
    assert torch.equal(torch.cat([*batch.context, batch.ids_BT], dim=1), apart.ids_BT)
    assert torch.equal(batch.targets_BT[:, -8:], apart.targets_BT[:, -8:])
    assert (batch.read_only, task.any_segments) == (0 if together == "all" else 2, together == "nothing")


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("together", ["nothing", "pairs", "all"])
def test_tokens_are_those_of_a_sample(together, queries):
    task = make(pairs=50, queries=queries, together=together)
    batch = task.batch(0, "test", 0, 1)
    assert task.tokens == batch.ids_BT.shape[1] + sum(part.shape[1] for part in batch.context)


@pytest.mark.parametrize("key_size", [1, 2])
def test_remember_keys_are_unique(key_size):
    """Remember draws keys without replacement, up to all 16 of them, and every key is drawn."""
    task = make(mode="remember", pairs=16, key_size=key_size)
    drawn = [[key for key, _ in pairs] for pairs, _ in parse(task, task.batch(0, "train", 0, 400))]
    assert all(len(set(keys)) == 16 for keys in drawn)
    assert len(set(itertools.chain(*drawn))) == 16**key_size


@pytest.mark.parametrize("mode", ["remember", "rewrite"])
def test_queries_are_uniform_over_keys(mode):
    """Each distinct key of a sample is asked equally often, however often it was written (chi-square over its rank of
    last occurrence)."""
    task, counts = make(mode=mode, pairs=6, queries=8), torch.zeros(6, 6)
    for pairs, asked in parse(task, task.batch(0, "train", 0, 1500)):
        last = list(dict.fromkeys(key for key, _ in reversed(pairs)))
        for key in asked:
            counts[len(last) - 1, last.index(key)] += 1
    for distinct in range(3, 7):
        observed = counts[distinct - 1, :distinct]
        expected = observed.sum() / distinct
        assert (
            observed.sum() == 0 or ((observed - expected) ** 2 / expected).sum() < 25
        )  # 5 degrees of freedom: p = 1e-4
    assert counts[5].sum() > 500 and (mode == "remember") == (counts[:5].sum() == 0)


def test_queries_are_independent():
    """Several queries of one context are drawn with replacement: they repeat, and they differ."""
    task = make(pairs=12, queries=4)
    asked = [len(set(keys)) for _, keys in parse(task, task.batch(0, "train", 0, 300))]
    assert {2, 3, 4} <= set(asked)


@pytest.mark.parametrize("vary", [0.0, 0.5, 1.0])
def test_vary(vary):
    """A share ``vary`` of the training batches keeps 1..pairs of the last pairs, uniformly; validation and test keep
    all."""
    task, whole = make(mode="rewrite", pairs=8, vary=vary), make(mode="rewrite", pairs=8)
    kept = []
    for step in range(400):
        batch = task.batch(0, "train", step, 2)
        kept.append(int(batch.meta["pairs"][0]))
        assert torch.equal(
            batch.ids_BT[:, : -task.segment_len], whole.batch(0, "train", step, 2).ids_BT[:, (8 - kept[-1]) * 4 : -4]
        )
    shorter = sum(n < 8 for n in kept) / 400
    assert abs(shorter - vary * 7 / 8) < 0.08 and set(kept) == (set(range(1, 9)) if vary else {8})
    assert all(
        (task.batch(0, split, step, 2).meta["pairs"] == 8).all() for split in ("valid", "test") for step in range(20)
    )


@pytest.mark.parametrize("field", ["mode", "pairs", "key_size", "value_size", "vary", "queries", "legacy_ids"])
def test_every_knob_matters(field):
    """Each field of the configuration changes the batch."""
    other = {
        "mode": "remember",
        "pairs": 5,
        "key_size": 2,
        "value_size": 2,
        "vary": 1.0,
        "queries": 2,
        "legacy_ids": True,
    }[field]
    a, b = (make(**{"pairs": 7, **change}).batch(0, "train", 1, 4).ids_BT for change in ({}, {field: other}))
    assert a.shape != b.shape or not torch.equal(a, b)


# --- capacity and errors


@pytest.mark.parametrize(
    ("score", "pairs", "expected"), [(0.5, 200, 93.333), (1 / 16, 200, 0), (1.0, 200, 200), (1.0, 7, 7)]
)
def test_capacity_worked_values(score, pairs, expected):
    """Spec 1.4: worked values; the summary of a task uses its own pairs and its 16^value_size values."""
    assert capacity(score, pairs, 16) == pytest.approx(expected, abs=1e-3)
    assert make(pairs=pairs).summarize({"exact_match": score}) == {"capacity": pytest.approx(expected, abs=1e-3)}


@pytest.mark.parametrize("value_size", [1, 2])
def test_capacity_is_the_inverse(value_size):
    """A model that keeps k of n pairs and guesses the others scores k/n + (n-k)/(n v), from which k is recovered."""
    n, v = 200, 16**value_size
    for k in (0, 31, 200):
        assert make(pairs=n, value_size=value_size).summarize({"exact_match": k / n + (n - k) / (n * v)})[
            "capacity"
        ] == pytest.approx(k)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *[({field: 0}, f"{field}=0") for field in ("pairs", "key_size", "value_size", "queries")],
        ({"key_size": 6}, "key_size=6: expected at most 5: all"),
        ({"mode": "forget"}, "mode='forget'"),
        ({"together": "keys"}, "together='keys'"),
        ({"vary": 1.5}, "vary=1.5"),
        ({"vary": -0.1}, "vary=-0.1"),
        ({"mode": "remember", "pairs": 17}, "pairs=17.*16 unique keys.*key_size"),
    ],
)
def test_invalid_config(config, message):
    """A value that makes no sense raises ValueError, names the field and says what to do."""
    with pytest.raises(ValueError, match=message):
        AssociativeRetrieval.Config(**config)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"test_pairs": [50, 0]}, "test_pairs=0"), ({"mode": "remember", "test_pairs": [17]}, "test_pairs=17.*16 unique")],
)
def test_invalid_test_conditions(config, message):
    """A stage of a curriculum may be smaller than the test, so the values of the test are checked when the test is laid
    out."""
    task = AssociativeRetrieval(AssociativeRetrieval.Config(pairs=5, **config))
    with pytest.raises(ValueError, match=message):
        task.test_conditions()


def test_default_test_condition():
    """Without ``test_pairs`` the test has as many pairs as the training."""
    assert [x for x, _ in AssociativeRetrieval(AssociativeRetrieval.Config(pairs=7)).test_conditions()] == [7]
