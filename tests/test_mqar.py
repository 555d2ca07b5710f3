"""Multi-query associative recall: the format of the paper, an oracle that is right, and solvers that cannot be."""

import pytest
import torch

from lit_memory.tasks.mqar import MQAR
from lit_memory.util.checks import FieldError

PUBLISHED = [(64, 4), (128, 8), (256, 16), (512, 64)]


def make(**config):
    return MQAR(MQAR.Config(**config))


def read(task, batch):
    """Per sample: pairs, then (slot, query, place of its value), from the ids without answers."""
    count = task.config.pairs
    for ids, scored in zip(batch.ids_BT.masked_fill(batch.scored_BT, -1).tolist(), batch.scored_BT, strict=True):
        pairs = list(zip(ids[: 2 * count : 2], ids[1 : 2 * count : 2], strict=True))
        places = scored.nonzero().flatten().tolist()
        yield pairs, [((place - 1) // 2 - count, ids[place - 1], place) for place in places]


def accuracy(task, batch, answer):
    """Of ``answer(pairs, query)`` -> value."""
    predicted = torch.zeros_like(batch.ids_BT)
    for row, (pairs, asked) in zip(predicted, read(task, batch), strict=True):
        for _, query, place in asked:
            row[place] = answer(pairs, query)
    return task.score(predicted, batch)["accuracy"].mean().item()


@pytest.mark.parametrize("filler", ["zero", "random"])
@pytest.mark.parametrize(("length", "pairs"), PUBLISHED)
def test_format_and_oracle(length, pairs, filler):
    """At the published settings: disjoint keys and values, each once; every key is asked once, in a slot of its own;
    the rest is filler; looking up the key is always right."""
    task = make(length=length, pairs=pairs, filler=filler)
    batch = task.batch(0, "train", 0, 20)
    assert batch.ids_BT.shape == (20, length) and task.vocab_size == 8192 and task.segment_len is None
    for ids, (written, asked) in zip(batch.ids_BT.tolist(), read(task, batch), strict=True):
        keys, values = zip(*written, strict=True)
        assert len({*keys}) == len({*values}) == pairs
        assert all(1 <= key < 4096 for key in keys) and all(4096 <= value < 8192 for value in values)
        assert sorted(query for _, query, _ in asked) == sorted(keys)
        rest = [slot for slot in range(length // 2 - pairs) if slot not in {slot for slot, _, _ in asked}]
        blank = {token for slot in rest for token in ids[2 * (pairs + slot) :][:2]}
        assert blank == {0} if filler == "zero" else len(blank) > len(rest) / 2
    assert accuracy(task, batch, lambda written, query: dict(written)[query]) == 1.0


def test_blind_solvers():
    """A value of the sample under another key is never right; any of its values is right once in ``pairs``; and no
    answer stands behind a query, which would leave fewer for the next."""
    task = make(length=64, pairs=8, vocabulary=64)
    batch = task.batch(0, "test", 0, 1000)
    assert not batch.ids_BT[batch.scored_BT].any() and (batch.targets_BT[batch.scored_BT] >= 32).all()
    assert accuracy(task, batch, lambda written, query: next(v for k, v in written if k != query)) == 0.0
    assert accuracy(task, batch, lambda written, query: written[0][1]) == pytest.approx(1 / 8)
    assert accuracy(task, batch, lambda written, query: dict(written)[query] - 1) == 0.0


@pytest.mark.parametrize("exponent", [0.01, 0.5, 1.0])
def test_power_law_of_the_slots(exponent):
    """The slot of the first key has a weight of g^(exponent - 1): that is drawn first. A share of the sum for each of
    the first slots and for the last half, to four standard deviations."""
    task = make(length=128, pairs=8, exponent=exponent)
    batch = task.batch(0, "train", 0, 4000)
    first = torch.tensor([next(s for s, q, _ in asked if q == pairs[0][0]) for pairs, asked in read(task, batch)])
    weight = torch.arange(1, 57).double() ** (exponent - 1)
    share = weight / weight.sum()
    for part in ([0], [1], [2], list(range(28, 56))):
        expected, found = share[part].sum().item(), torch.isin(first, torch.tensor(part)).double().mean().item()
        assert abs(found - expected) < 4 * (expected * (1 - expected) / 4000) ** 0.5


@pytest.mark.parametrize(
    ("filler", "expected"),
    [
        ("zero", "2 15 5 13 2 0 0 0 5 0 0 0 0 0 0 0"),
        ("random", "2 15 5 13 2 3 14 12 5 14 6 7 3 10 5 4"),
    ],
)
def test_golden_sample(filler, expected):
    """The sampler never changes silently: old results would no longer be comparable."""
    batch = make(vocabulary=16, length=16, pairs=2, filler=filler).batch(0, "train", 0, 2)
    assert batch.ids_BT[0].tolist() == [int(token) for token in expected.split()]


def test_score_counts_queries_alone():
    """A share of the sample's queries; what is predicted elsewhere does not count."""
    task = make(vocabulary=64, length=32, pairs=4)
    batch = task.batch(0, "test", 0, 3)
    predicted = batch.targets_BT.masked_fill(~batch.scored_BT, 9)
    places = batch.scored_BT[1].nonzero().flatten()
    predicted[1, places[:3]] = 0
    assert task.score(predicted, batch)["accuracy"].tolist() == [1.0, 0.25, 1.0]


@pytest.mark.parametrize(("segment_len", "written"), [(0, 0), (8, 7), (24, 2), (64, 0)])
def test_segments(segment_len, written):
    """The samples are the same however they are cut; what the last segment writes is never read."""
    task = make(length=64, pairs=8, segment_len=segment_len)
    batch, whole = (t.batch(0, "test", 0, 2) for t in (task, make(length=64, pairs=8)))
    assert torch.equal(batch.ids_BT, whole.ids_BT) and task.written == written
    assert batch.segment_len == (segment_len or None)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("pairs", 17, "expected at most 16 in length=64"),
        ("pairs", 0, "at least 1"),
        ("length", 33, "even"),
        ("vocabulary", 9, "even"),
        ("vocabulary", 2, "at least 4"),
        ("vocabulary", 18, "expected at most 8, the keys of vocabulary=18"),
        ("exponent", -1.0, "0 or more"),
        ("segment_len", -1, "0 or more"),
        ("filler", "blank", "expected one of zero, random"),
    ],
)
def test_invalid(field, value, words):
    with pytest.raises(FieldError, match=words):
        make(**({"length": 64, "pairs": 9, field: value}))


def test_weights_of_slots_are_finite():
    with pytest.raises(ValueError, match="exponent=11: expected at most 10"):
        make(exponent=11)
    assert make(exponent=10).batch(0, "train", 0, 2).ids_BT.shape == (2, 512)
