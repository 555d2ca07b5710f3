"""Copy, reverse and associative retrieval: worked examples, oracles, blind solvers, free-running scores."""

import pytest
import torch

from lit_memory import LitRMT
from lit_memory.tasks.algorithmic import Algorithmic

TASKS = {
    "copy": {"length": 24},
    "reverse": {"length": 12, "symbols": 8},
    "associative": {"length": 4, "segment_len": 5},
}


def make(task="copy", **config):
    return Algorithmic(Algorithmic.Config(task=task, **{**TASKS[task], **config}))


def solve(task, ids):
    """The answer, read off the tokens in front of it."""
    if task.config.task == "associative":
        assert ids[-1] == 10 and 11 <= ids[-2] <= 36
        pairs = dict(zip(ids[:-2:2], ids[1:-2:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == task.config.length and set(pairs.values()) <= set(range(10))
        return [pairs[ids[-2]]]
    assert ids[-1] == 1 and min(ids[:-1]) >= 2
    return ids[:-1] * 2 if task.config.task == "copy" else ids[-2::-1]


@pytest.mark.parametrize("name", TASKS)
def test_oracle(name):
    """What is scored follows from what comes before."""
    task = make(name)
    for split in ("train", "valid", "test"):
        batch = task.batch(0, split, 0, 100)
        given = batch.ids_BT[:, : task.prompt_len]
        solved = torch.cat([given, torch.tensor([solve(task, ids) for ids in given.tolist()])], dim=1)
        scores = task.score(solved, batch) | task.score_text(solved[:, task.prompt_len :], batch)
        assert scores.keys() == set(task.metrics) and all(bool((values == 1).all()) for values in scores.values())


@pytest.mark.parametrize("name", TASKS)
def test_blind_solver(name):
    """The same symbol everywhere is right by chance: one in as many as there are symbols, 10, or 8."""
    task = make(name)
    batch, symbols = task.batch(0, "test", 0, 2000), task.config.symbols
    answers = 2000 * (1 if name == "associative" else task.config.length)
    for symbol in (0, symbols - 1):
        said = torch.full((2000, task.new_tokens), symbol + (0 if name == "associative" else 2))
        assert (
            abs(task.score_text(said, batch)["token_accuracy"].mean() - 1 / symbols)
            < 3 * (1 / symbols / answers) ** 0.5
        )


@pytest.mark.parametrize(
    ("name", "config", "segments", "expected"),
    [
        ("copy", {"length": 3, "segment_len": 3}, [3, 3, 3, 1], "3 9 5 1 3 9 5 3 9 5"),
        ("reverse", {"length": 3, "segment_len": 2}, [2, 2, 2, 1], "3 9 5 1 5 9 3"),
        ("associative", {"length": 3, "segment_len": 5}, [5, 4], "12 7 36 0 11 3 36 10 0"),
    ],
)
def test_worked_examples(monkeypatch, name, config, segments, expected):
    """Spec 7.2, 7.3: input, START and answer; all of the answer is scored. The last token begins a segment that nothing
    is predicted from."""
    ids = torch.tensor([[int(n) for n in expected.split()]])
    task = make(name, **config)
    monkeypatch.setattr(
        Algorithmic, "draw", lambda self, *_: (ids[:, : self.prompt_len - 1], ids[:, self.prompt_len :])
    )
    batch = task.batch(0, "test", 0, 1)
    assert torch.equal(batch.ids_BT, ids) and batch.targets_BT.tolist() == [
        [-100] * task.prompt_len + ids[0, task.prompt_len :].tolist()
    ]
    assert solve(task, ids[0, : task.prompt_len].tolist()) == ids[
        0, task.prompt_len :
    ].tolist() and batch.prompt_B.tolist() == [task.prompt_len]
    assert [part.shape[1] for part in ids.split(task.segment_len, dim=1)] == segments
    assert task.written == len(segments) - 1 - (segments[-1] == 1) and task.new_tokens == ids.shape[1] - task.prompt_len


@pytest.mark.parametrize(
    ("name", "tokens", "answer", "vocabulary", "start"),
    [("copy", 73, 48, 12, 1), ("reverse", 49, 24, 12, 1), ("associative", 11, 1, 37, 10)],
)
def test_sizes_of_the_paper(name, tokens, answer, vocabulary, start):
    """Spec 7.2, 7.3: 72, 48 and 10 tokens that something is predicted from, 48, 24 and 1 scored; vocabularies."""
    task = make(name, length=4 if name == "associative" else 24, symbols=10)
    batch = task.batch(0, "train", 0, 300)
    assert (
        batch.ids_BT.shape[1] == tokens
        and (batch.targets_BT != -100).sum(1).tolist() == [answer] * 300
        and batch.prompt_B is None
    )
    assert task.vocab_size == vocabulary and task.start_id == start
    assert set(batch.ids_BT.flatten().tolist()) == set(range(vocabulary)) - ({0} if name != "associative" else set())


def test_queries_are_uniform():
    """Every pair is asked as often."""
    rows = make("associative").batch(0, "train", 0, 4000).ids_BT.tolist()
    asked = torch.tensor([row[:8:2].index(row[8]) for row in rows]).bincount(minlength=4)
    assert abs(asked / 4000 - 0.25).max() < 0.03


@pytest.mark.parametrize(
    ("name", "expected"),
    [("copy", "8 4 11 1 8 4 11 8 4 11"), ("reverse", "8 4 11 1 11 4 8"), ("associative", "12 8 15 3 32 5 32 10 5")],
)
def test_golden_sample(name, expected):
    """The sampler never changes silently: old results would no longer be comparable."""
    assert make(name, length=3, symbols=10).batch(0, "train", 0, 2).ids_BT[0].tolist() == [
        int(n) for n in expected.split()
    ]


@pytest.mark.parametrize("name", ["copy", "reverse"])
@pytest.mark.parametrize("segment_len", [5, 4, 13])
def test_free_running(monkeypatch, name, segment_len):
    """A slow twin: what the model wrote over the borders of segments is, read again, at every place the likeliest
    token."""
    task, said = make(name, length=4, symbols=10, segment_len=segment_len), []
    torch.manual_seed(0)
    module = LitRMT(vocab_size=12, width=16, heads=2, layers=1, memory_tokens=3, init_std=0.5).double().eval()
    score_text = task.score_text
    monkeypatch.setattr(task, "score_text", lambda said_BN, batch: said.append(said_BN) or score_text(said_BN, batch))
    batch = task.batch(0, "valid", 0, 5)
    with torch.no_grad():
        found = module.evaluate(batch, task)
        state, likeliest = module.model.init_state(5), []
        for segment in torch.cat([batch.ids_BT[:, :5], said[-1]], dim=1).split(segment_len, dim=1):
            hidden, state = module.model.step(state, segment)
            likeliest.append(module.model.logits(hidden).argmax(-1))
    assert torch.equal(torch.cat(likeliest, dim=1)[:, 4:-1], said[-1]) and len(set(said[-1].flatten().tolist())) > 3
    assert float(found["token_accuracy"][0]) == pytest.approx(float((said[-1] == batch.ids_BT[:, 5:]).float().mean()))
    assert "forced_token_accuracy" in found


@pytest.mark.parametrize("field", ["task", "length", "symbols", "segment_len"])
def test_every_knob_matters(field):
    """Each field of the configuration changes the batch."""
    other = {"task": "reverse", "length": 7, "symbols": 5, "segment_len": 6}[field]
    a, b = (make(**{"length": 6, **change}).batch(0, "train", 1, 4) for change in ({}, {field: other}))
    assert a.segment_len != b.segment_len or a.ids_BT.shape != b.ids_BT.shape or not torch.equal(a.ids_BT, b.ids_BT)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"task": "sort"}, "task='sort': expected one of copy, reverse, associative"),
        ({"length": 0}, "length=0: expected at least 1"),
        ({"segment_len": 0}, "segment_len=0: expected at least 1"),
        ({"symbols": 1}, "symbols=1: expected at least 2"),
        (
            {"task": "associative"},
            "length=24: expected at most 10, as no letter and none of symbols=10 comes twice; the paper has 4",
        ),
        ({"task": "associative", "length": 27, "symbols": 40}, "length=27: expected at most 26"),
    ],
)
def test_invalid_config(config, message):
    """One line that names the field and what is expected."""
    with pytest.raises(ValueError, match=message):
        Algorithmic.Config(**config)
    if set(config) == {"length"}:
        with pytest.raises(ValueError, match=f"test_{message}"):
            make(test_length=[config["length"]]).test_conditions()
