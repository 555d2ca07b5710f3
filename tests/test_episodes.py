"""Episodes: what is true of every task that has lines, and of their lines whatever the task."""

import tracemalloc

import numpy as np
import pytest
import torch

from lit_memory.lit import LIT_DATA
from lit_memory.recurrence import state_tensors, unroll
from lit_memory.registry import load_class
from lit_memory.tasks.lines import Lines, cut_sentences
from lit_memory.tasks.placement import merge_in_order

SMALL = {"books": 2, "vocab_size": 1024, "line_tokens": 32, "segment_lines": 8}
EPISODES = ("memreasoner", "variable_tracking", "passkey")
CASES = [
    ("memreasoner", {"task": "qa2"}),
    ("memreasoner", {"task": "qa2", "tokens": 300}),
    ("memreasoner", {"task": "qa1", "tokens": 200, "noise": "soft"}),
    ("variable_tracking", {"hops": 2}),
    ("variable_tracking", {"rules": "ruler", "tokens": 300}),
    ("variable_tracking", {"hops": 1, "tokens": 300, "noise": "books"}),
    ("passkey", {"tokens": 300}),
    ("passkey", {"tokens": 300, "needle": "magic"}),
    ("passkey", {"tokens": 300, "needle": "san_francisco"}),
]
cases = pytest.mark.parametrize(
    ("name", "config"), CASES, ids=lambda c: c if isinstance(c, str) else "-".join(map(str, c.values()))
)


def make(name, **config):
    cls = load_class("task", name)
    return cls(cls.Config(**{**SMALL, **config}))


def lines_of(task, batch):
    """Per sample the tokens of its lines, the question last; None where there is no line yet."""
    length, samples = task.config.line_tokens, [[] for _ in batch.ids_BT]
    for ids, mask in batch.context:
        for lines, row, real in zip(samples, ids, mask, strict=True):
            for line, on in zip(row.split(length), real.split(length), strict=True):
                assert on.tolist() == sorted(on.tolist(), reverse=True) and (line[~on] == task.tokenizer.pad_id).all()
                lines.append(line[on].tolist() or None)
    return samples


def texts_of(task, batch):
    """Per sample its lines as text, "" for an empty one, without those that stand in front for none."""
    for lines in lines_of(task, batch):
        first = next(i for i, line in enumerate(lines) if line)
        assert all(lines[first:])
        yield ["" if line == [task.tokenizer.pad_id] else task.tokenizer.decode(line) for line in lines[first:]]


def right_answers(task, batch):
    """What a model generates that gives every answer of a test with one tail, (B, new_tokens)."""
    right_BN = torch.full((len(batch.ids_BT), task.new_tokens), task.tokenizer.pad_id)
    for row, targets in zip(right_BN, batch.targets_BT, strict=True):
        answer = targets[targets != -100]
        row[: len(answer)] = answer
    return right_BN


def tails_of(task, batch):
    """Per sample and tail what stands before the answer, and the answer, as text."""
    tokenizer, length = task.tokenizer, batch.segment_len
    for ids, targets in zip(batch.ids_BT, batch.targets_BT, strict=True):
        tails = []
        for part, wanted in zip(ids.split(length), targets.split(length), strict=True):
            answer = wanted[wanted != -100].tolist()
            assert not answer or answer[-1] == tokenizer.eos_id
            before = part[: int((wanted != -100).nonzero()[0])].tolist() if answer else part.tolist()
            tails.append((tokenizer.decode(before).strip(), tokenizer.decode(answer[:-1]).strip()))
        yield tails


def naive_lines(sample, most):
    """Token by token: a line ends before a sentence, before and behind a fact, and where it is full."""
    starts = set(sample.noise.starts_S.tolist()) if sample.noise else set()
    lines, at, position = [], 0, sample.position
    facts = list(zip(sample.starts_F.tolist(), sample.facts, strict=True))
    fresh = True
    while at < sample.context_len or facts:
        if facts and facts[0][0] == at:
            fact = facts.pop(0)[1].tolist()
            lines += [fact[i : i + most] for i in range(0, len(fact), most)] or [[]]
            at, fresh = at + len(fact), True
            continue
        token = int(sample.noise.tokens(position, 1)[0])
        if fresh or position % len(sample.noise) in starts or len(lines[-1]) == most:
            lines.append([])
        lines[-1].append(token)
        at, position, fresh = at + 1, position + 1, False
    return lines


@cases
@pytest.mark.parametrize("most", [5, 32])
def test_lines_equal_the_naive_ones(name, config, most):
    """Also where they are read from the middle, in parts of any length."""
    for sample in make(name, **config).samples(3, "valid", 1, 4):
        expected, lines = naive_lines(sample, most), Lines(sample, most)
        assert len(lines) == len(expected) and max(map(len, expected)) <= most
        for count in (1, 3, len(lines)):
            read = [
                line.tolist()
                for first in range(0, len(lines), count)
                for line in lines.read(first, min(count, len(lines) - first))
            ]
            assert read == expected
        for i, fact in enumerate(sample.facts):
            assert expected[lines.line_of(i)] == fact[:most].tolist()


def test_cut_is_the_same_tokens():
    noise = make("memreasoner", tokens=300).samples(0, "train", 0, 1)[0].noise
    pieces = cut_sentences(noise, 7)
    lengths = np.diff(pieces.starts_S, append=len(noise))
    assert (
        pieces.tokens_N is noise.tokens_N
        and lengths.max() == 7
        and lengths.min() >= 1
        and set(noise.starts_S) <= set(pieces.starts_S)
    )
    assert len(pieces.starts_S) == sum(-(-n // 7) for n in np.diff(noise.starts_S, append=len(noise)))


@cases
def test_lines_and_text_are_the_same_sample(name, config):
    """Same facts, noise, question and answer; text has a note of variable tracking in front, and asks for the passkey
    behind the hay."""
    ways = [
        make(name, **config, layout=layout, segment_len=160, **({"note": False} if name == "variable_tracking" else {}))
        for layout in ("lines", "text")
    ]
    batches = [task.batch(0, "valid", 0, 6) for task in ways]
    pad, asked = ways[0].tokenizer.pad_id, {}
    for lines, tails in zip(lines_of(ways[0], batches[0]), tails_of(ways[0], batches[0]), strict=True):
        asked[tuple(t for line in lines[:-1] if line for t in line if t != pad)] = ", ".join(
            answer for _, answer in tails
        )
    samples = sorted(ways[1].samples(0, "valid", 0, 6), key=lambda sample: -sample.segments)
    behind = (
        ways[1].tokenizer.encode(" What is the pass key?").tolist()
        if name == "passkey" and "needle" not in config
        else []
    )
    for sample, ((_, answer),) in zip(samples, tails_of(ways[1], batches[1]), strict=True):
        assert asked[tuple(sample.read(0, sample.context_len).tolist() + behind)] == answer


@cases
def test_text_is_read_in_segments(name, config):
    """Contexts, where samples begin and end, and the last segment, joined, are the context; short segments are padded
    under a mask."""
    task = make(name, **config, layout="text", segment_len=128)
    for split in ("train", "test"):
        batch, samples = (
            task.batch(0, split, 0, 6),
            sorted(task.samples(0, split, 0, 6), key=lambda sample: -sample.segments),
        )
        assert isinstance(batch.context, tuple) == (split == "train")
        rows = [[] for _ in samples]
        for part in batch.context:
            ids, mask = part if isinstance(part, tuple) else (part, torch.ones_like(part, dtype=torch.bool))
            assert ids.shape[1] == 128
            for row, own, real in zip(rows, ids, mask, strict=False):
                row += own[real].tolist()
        for row, sample, ids, asked in zip(rows, samples, batch.ids_BT, batch.meta["question_start"], strict=True):
            assert row + ids[:asked].tolist() == sample.read(0, sample.context_len).tolist()


@pytest.mark.parametrize("layout", ["lines", "text"])
@pytest.mark.parametrize(
    ("name", "config"),
    [("memreasoner", {"noise": "books"}), ("variable_tracking", {"rules": "ruler"}), ("passkey", {})],
    ids=EPISODES,
)
def test_a_test_is_a_stream(name, config, layout):
    """Memory does not grow with the length: 1,000,000 tokens here, within 1 MB."""
    task = make(name, **config, layout=layout, tokens=1_000_000, segment_lines=200, segment_len=4096)
    batch, seen = task.batch(0, "test", 0, 1), 0
    assert not isinstance(batch.context, tuple) and (batch.prompt_B == batch.meta["answer_start"]).all()
    tracemalloc.start()
    for s, part in enumerate(batch.context):
        seen += int(part[1].sum()) if isinstance(part, tuple) else part.numel()
        if s == 2:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - before < 1e6 and 0.99e6 < seen < 1.0001e6


@cases
def test_support_is_where_it_says(name, config):
    """The lines that ``support`` counts back to are the facts, hop by hop; in training only of the share that is
    told."""
    for split, share, all_told in (("train", 0.0, False), ("train", 1.0, True), ("valid", 0.0, True)):
        task = make(name, **config, supporting=share)
        batch, samples = task.batch(0, split, 0, 8), task.samples(0, split, 0, 8)
        for lines, sample, support in zip(lines_of(task, batch), samples, batch.meta["support"].tolist(), strict=True):
            found = [lines[-1 - back] if back else None for back in support]
            assert found == [sample.facts[i].tolist() if all_told else None for i in sample.support]


def test_the_supporting_share_is_a_fixed_hash():
    """The same samples are told whatever else is drawn, and a small share is a part of a larger one."""
    tasks = [make("memreasoner", supporting=share) for share in (0.1, 0.4)]
    told = [
        torch.cat([task.batch(0, "train", step, 500).meta["support"][:, 0] > 0 for step in range(2)]) for task in tasks
    ]
    assert abs(float(told[0].float().mean()) - 0.1) < 0.03 and abs(float(told[1].float().mean()) - 0.4) < 0.05
    assert (told[0] <= told[1]).all()


@cases
def test_text_asks_for_the_facts(name, config):
    """A second tail asks for the supporting facts, in training alone; it is scored where they are told."""
    task = make(name, **config, layout="text", segment_len=160, supporting=0.5)
    batch, samples = (
        task.batch(0, "train", 0, 12),
        sorted(task.samples(0, "train", 0, 12), key=lambda sample: -sample.segments),
    )
    assert batch.read_only == 2 and task.batch(0, "valid", 0, 2).read_only == 1
    told = 0
    for (_, (asked, facts)), sample in zip(tails_of(task, batch), samples, strict=True):
        expected = " ".join(task.tokenizer.decode(sample.facts[i].tolist()) for i in sample.support)
        assert facts == (expected if sample.supervised else "") and "Supporting facts:" in asked
        told += sample.supervised
    assert 0 < told < 12


@pytest.mark.parametrize("layout", ["lines", "text"])
@pytest.mark.parametrize("name", EPISODES)
def test_workers_draw_the_same_bits(name, layout):
    drawn = []
    for workers in (0, 1, 2):
        data = LIT_DATA[name](
            **SMALL,
            layout=layout,
            tokens=200,
            segment_len=128,
            supporting=0.5,
            batch_size=3,
            epoch_steps=2,
            workers=workers,
        )
        parts = [[*b.context, b.ids_BT, b.targets_BT, *b.meta.values()] for b in data.train_dataloader()]
        drawn.append([t for part in parts for t in part for t in (t if isinstance(t, tuple) else (t,))])
    assert all(torch.equal(a, b) for other in drawn[1:] for a, b in zip(drawn[0], other, strict=True))


@cases
def test_answers_count_tail_by_tail(name, config):
    """What is said after every prompt counts, up to its EOS; exact match wants EOS."""
    task = make(name, **config)
    batch = task.batch(0, "test", 0, 4)
    said = torch.full((4, batch.read_only, task.new_tokens), task.tokenizer.pad_id)
    for row, targets in zip(said, batch.targets_BT, strict=True):
        for part, wanted in zip(row, targets.split(batch.segment_len), strict=True):
            answer = wanted[wanted != -100]
            part[: len(answer)] = answer
            part[len(answer) :] = answer[0]
    assert {k: v.tolist() for k, v in task.score_text(said.flatten(1), batch).items()} == {
        k: [1.0] * 4 for k in task.metrics
    }
    right = batch.targets_BT.masked_fill(batch.targets_BT == -100, 7)
    assert {k: v.tolist() for k, v in task.score(right, batch).items()} == {k: [1.0] * 4 for k in task.metrics}
    if batch.read_only > 1:
        assert task.score_text(said[:, 0], batch)["exact_set"].sum() == 0
    nothing = task.score_text(torch.full((4, 3), task.tokenizer.eos_id), batch)
    assert all(value.sum() == 0 for value in nothing.values())


def test_mergers():
    """Each row in its order, and any merger as likely as another."""
    rng, counts = np.random.Generator(np.random.PCG64(0)), {}
    for _ in range(3000):
        out = merge_in_order(np.array([0, 1]), np.array([8, 9]), rng).tolist()
        counts[tuple(out)] = counts.get(tuple(out), 0) + 1
    assert len(counts) == 6 and all(a.index(0) < a.index(1) and a.index(8) < a.index(9) for a in counts)
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 25


@pytest.mark.parametrize("name", EPISODES)
def test_what_a_test_varies(name):
    """``test_tokens``, or another list of the task; only one of them."""
    task = make(name, test_tokens=[0, 400] if name != "passkey" else [100, 400])
    assert task.test_axis() == ("tokens", task.config.test_tokens) and make(name).test_axis() == (
        "tokens",
        [make(name).config.tokens],
    )
    for other in {"variable_tracking": ["statements"], "passkey": ["digits", "depth"]}.get(name, []):
        task = make(name, **{f"test_{other}": [2, 4]})
        assert task.test_axis() == (other, [2, 4]) and all(
            (t.batch(0, "test", 0, 3).meta[other] == x).all() for x, t in task.test_conditions()
        )
        with pytest.raises(
            ValueError, match=rf"test_{other}=\[2\]: a test varies one field; expected none where test_tokens is given"
        ):
            make(name, **{f"test_{other}": [2], "test_tokens": [200]})


def test_books_that_repeat_say_so():
    for name, config in (
        ("memreasoner", {}),
        ("variable_tracking", {"noise": "books"}),
        ("passkey", {"needle": "magic"}),
    ):
        task = make(name, **config, books=1)
        size = len(task.books("test"))
        told = (
            f"The haystack of the test has {size:,} tokens, so that its sentences come up to 3 times at "
            f"{2 * size + 1:,} tokens."
        )
        assert (
            task.at(test_tokens=[100, 2 * size + 1]).remarks() == [told] and task.at(test_tokens=[100]).remarks() == []
        )
    assert make("passkey", tokens=10**9).remarks() == make("memreasoner", noise="soft", tokens=10**9).remarks() == []


@pytest.mark.parametrize("name", ["rmt", "mamba", "larimar"])
def test_a_tuple_of_segments_may_have_masks(build, name):
    """``unroll`` reads a training context as it reads the iterator of a test."""
    task = make("memreasoner", task="qa2", layout="text", segment_len=64)
    batch = task.batch(0, "train", 0, 6)
    assert any(isinstance(part, tuple) for part in batch.context)
    model = build(name, vocab_size=task.vocab_size)
    expected, found = (
        unroll(model, context, keep=0, schedule="sequential").state for context in (iter(batch.context), batch.context)
    )
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(expected), state_tensors(found), strict=True))


@pytest.mark.parametrize(
    ("name", "config"),
    [("memreasoner", {}), ("memreasoner", {"noise": "soft"}), ("variable_tracking", {}), ("passkey", {})],
)
def test_auxiliary_lines(name, config):
    """Sentences of the training books, cut like lines, beside the same samples; only in training and as lines."""
    task, without = make(name, **config, apart=2, line_tokens=24), make(name, **config, line_tokens=24)
    pieces = cut_sentences(task.prose("train"), 24)
    known = {tuple(piece.tolist()) for piece in np.split(pieces.tokens_N, pieces.starts_S[1:])}
    batch, other, plain = task.batch(3, "train", 5, 4), task.batch(3, "train", 6, 4), without.batch(3, "train", 5, 4)
    ids_BNL, mask_BNL = batch.auxiliary_lines
    assert ids_BNL.shape == mask_BNL.shape == (4, 2, 24)
    rows = zip(ids_BNL.flatten(0, 1), mask_BNL.flatten(0, 1), strict=True)
    lines = {tuple(line[real].tolist()) for line, real in rows}
    assert lines <= known and len(lines) > 4 and (ids_BNL[~mask_BNL] == task.tokenizer.pad_id).all()
    assert torch.equal(ids_BNL, task.batch(3, "train", 5, 4).auxiliary_lines[0])
    assert not torch.equal(ids_BNL, other.auxiliary_lines[0])
    assert torch.equal(batch.ids_BT, plain.ids_BT) and plain.auxiliary_lines is None
    assert task.batch(3, "valid", 5, 4).auxiliary_lines is None
    assert task.at(layout="text", segment_len=160).batch(3, "train", 5, 4).auxiliary_lines is None
    assert all(part.is_meta for part in batch.to(torch.device("meta")).auxiliary_lines)


def test_full_lines_have_the_type_of_other_ids():
    """Rows without padding come from the haystack, whose tokens are of a smaller type that torch can hardly compute
    with."""
    task = make("memreasoner", apart=1, line_tokens=8, vocab_size=256)
    batches = (task.batch(0, "train", step, 1) for step in range(50))
    batch = next(batch for batch in batches if batch.auxiliary_lines[1].all())
    ids_BNL, _ = batch.auxiliary_lines
    assert ids_BNL.dtype == torch.int64
    assert torch.cat([batch.context[0][0].view(1, -1, 8), ids_BNL], dim=1).dtype == torch.int64


def test_segments_that_are_written():
    """About as many as a context takes."""
    assert make("memreasoner", layout="text", tokens=1000, segment_len=100, margin=20).written == 10
    assert [make("memreasoner", tokens=n, segment_len=100).written for n in (0, 1000)] == [0, 10]
