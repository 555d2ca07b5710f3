"""Needle in a haystack: where the needle lies, that it alone tells the value, and what counts as right."""

import re
import tracemalloc

import numpy as np
import pytest
import torch

from lit_memory import NeedleData
from lit_memory.tasks.needle import DEPTHS, KEY_OR_VALUE, LINE, NOTE, Needle, load_hay, string_match_all

S = 128  # tokens of a segment
SPLITS = ("train", "valid", "test")
CASES = [
    {"variant": "pk"},
    {"variant": "n"},
    {"variant": "w", "segment_len": 150},
    {"variant": "w", "value": "word", "note": False},
    {"variant": "pk", "tokenizer": "char", "digits": 5, "margin": 190, "segment_len": 400},
]
cases = pytest.mark.parametrize("config", CASES, ids=lambda c: "-".join(map(str, c.values())))
NEEDLE = re.compile(r"One of the special magic (\w+)s for (\S+(?: - \S+)?) is: ([^.]+)\.")
ASKED = re.compile(
    r"What is the special magic (\w+) for (.+) mentioned in the provided text\? "
    r"The special magic \1 for \2 mentioned in the provided text is"
)


def make(**config) -> Needle:
    return Needle(
        Needle.Config(**{"segments": 4, "segment_len": S, "margin": 68, "books": 2, "vocab_size": 1024, **config})
    )


def told(task, batch):
    """Per sample its context, question and answer as text, read from the batch."""
    tokenizer, context = task.tokenizer, [list(segment) for segment in batch.context]
    for i, (ids, targets, asked, prompt) in enumerate(
        zip(batch.ids_BT, batch.targets_BT, batch.meta["question_start"], batch.meta["answer_start"], strict=True)
    ):
        row = np.concatenate([*(s[i] for s in context if i < len(s)), ids[:asked]])
        answer = targets[targets != -100]
        assert answer[-1] == tokenizer.eos_id and (ids[prompt + len(answer) :] == tokenizer.pad_id).all()
        yield (
            tokenizer.decode(row.tolist()),
            tokenizer.decode(ids[asked:prompt].tolist()).strip(),
            tokenizer.decode(answer[:-1].tolist()).strip(),
        )


@cases
@pytest.mark.parametrize("split", SPLITS)
def test_oracle(config, split):
    """Whoever finds the one needle knows the answer: key and value are in it alone, and it is whole."""
    task = make(vary=0.5, **config)
    batch = task.batch(0, split, 0, 30)
    values = []
    for context, asked, answer in told(task, batch):
        ((kind, key, value),) = NEEDLE.findall(context)
        assert ASKED.fullmatch(asked).groups() == (kind, key) and value == answer and kind == task.config.kind
        rest = NEEDLE.sub("", context)
        assert key not in rest and value not in rest and not re.search(r"\d", rest)
        assert context.strip().startswith(NOTE.format(kind=kind)) == task.config.note
        values.append(value)
    assert len(set(values)) == 30
    right = batch.targets_BT.masked_fill(batch.targets_BT == -100, 7)
    assert {k: v.tolist() for k, v in task.score(right, batch).items()} == {name: [1.0] * 30 for name in task.metrics}


@cases
def test_blind_solver(config):
    """A value of another sample is never right."""
    task = make(**config)
    batch = task.batch(0, "valid", 0, 50)
    other = batch.targets_BT.clone()
    for row, targets in zip(other, batch.targets_BT.roll(1, 0), strict=True):
        count = min(int((row != -100).sum()), int((targets != -100).sum()))
        row[row != -100] = torch.cat([targets[targets != -100][:count], row[row != -100][count:]])
    assert all(score.sum() == 0 for score in task.score(other, batch).values())


@cases
def test_the_budget_is_exact(config):
    """A context has T tokens; its needle is in front of a sentence, or behind the last whole one; without it the hay is
    in one piece."""
    task = make(**config)
    for segments in (2, 3, 9):
        for sample in task.at(segments=segments).samples(0, "valid", 0, 20):
            tokens = segments * task.config.segment_len - task.config.margin
            row, start, end = (
                sample.read(0, sample.context_len),
                int(sample.starts_F[-1]),
                int(sample.starts_F[-1]) + len(sample.facts[-1]),
            )
            assert sample.context_len == len(row) == tokens and end <= tokens
            assert np.array_equal(row[start:end], sample.facts[-1])
            note = sum(map(len, sample.facts[:-1]))
            assert np.array_equal(
                np.concatenate([row[note:start], row[end:]]),
                sample.noise.tokens(sample.position, tokens - note - end + start),
            )
            assert (sample.position + start - note) % len(sample.noise) in sample.noise.starts_S


def test_the_line():
    """The hay of ``pk`` is one line, again and again."""
    task = make(variant="pk", note=False, segments=2)
    ((context, *_),) = told(task, task.batch(0, "train", 0, 1))
    assert (LINE + " ").startswith(NEEDLE.sub("", context).replace("  ", " ").replace(LINE + " ", "").strip())


def test_depths():
    """All 40 depths occur, each as often; ``meta`` tells how much of the hay comes before the needle."""
    task = make(segments=200)
    depths = task.meta(task.samples(0, "valid", 0, 800))["depth"]
    nearest = np.abs(depths.numpy()[:, None] - DEPTHS).argmin(1)
    assert len(DEPTHS) == 40 and set(nearest.tolist()) == set(range(40))
    assert depths.min() == 0 and 99 < depths.max() <= 100 and abs(float(depths.mean()) - 50) < 4
    (sample,), depth = task.samples(0, "valid", 0, 1), task.batch(0, "valid", 0, 1).meta["depth"]
    assert depth == pytest.approx(
        100 * (sample.starts_F[1] - len(sample.facts[0])) / (sample.context_len - sum(map(len, sample.facts))), rel=1e-5
    )


@pytest.mark.parametrize("config", [{"digits": 2}, {"variant": "w", "value": "word"}], ids=["digits", "words"])
def test_splits_share_no_value_and_no_sentence(config):
    task, seen = make(**config), {}
    unknown = task.tokenizer.encode("qqqq")[0]
    for split in SPLITS:
        hay = load_hay(task.tokenizer, "noise", 2, split)
        seen[split] = {answer for _, _, answer in told(task, task.batch(0, split, 0, 300))}
        assert len(seen[split]) > (5 if "digits" in config else 250)
        seen[split] |= {
            tuple(row) for row in np.split(hay.tokens_N, hay.starts_S[1:]) if len(row) > 20 and unknown not in row
        }
    assert not seen["train"] & seen["valid"] and not seen["train"] & seen["test"] and not seen["valid"] & seen["test"]


def test_books_lose_what_could_be_a_needle(tmp_path):
    """Sentences with digits or hyphened words are left out; text of one's own is hay like any other."""
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        text = (
            f"The quick zebra of {split} jumped over ten lazy giraffes in Africa today. "
            "In 1745 there were 1 2 3 of them, it is said. "
        )
        for book in range(3):
            (tmp_path / split / f"{book}.txt").write_text(
                (text + "A well-known zebra is what everybody in town would like to see. ") * 30
            )
    task = make(haystack=str(tmp_path), books=None)
    for context, *_ in told(task, task.batch(0, "test", 0, 3)):
        assert context.count("quick zebra") > 10 and "of them" not in context and "town" not in context
    assert (
        KEY_OR_VALUE.search("In 1745")
        and KEY_OR_VALUE.search("well-known")
        and not KEY_OR_VALUE.search("he said - at last -")
    )


def test_a_test_is_a_stream():
    """What a test reads segment by segment is what is built at once, and 500,000 tokens take no more memory than a
    few."""
    task = make(segments=6)
    streamed, built = (
        task.batch(0, "test", 0, 3),
        [sample.read(0, sample.context_len) for sample in task.samples(0, "test", 0, 3)],
    )
    assert not isinstance(streamed.context, tuple) and streamed.prompt_B is not None
    whole = torch.cat([*streamed.context, streamed.ids_BT], dim=1)
    for row, expected in zip(whole, built, strict=True):
        assert np.array_equal(row[: len(expected)], expected)
    batch = make(segments=3906).batch(0, "test", 0, 1)
    tracemalloc.start()
    for s, _ in enumerate(batch.context):
        if s == 100:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert s == 3904 and peak - before < 2e6


def test_workers_draw_the_same_bits():
    drawn = []
    for workers in (0, 1, 2):
        data = NeedleData(
            segments=2, segment_len=S, margin=68, books=2, vocab_size=1024, batch_size=3, epoch_steps=3, workers=workers
        )
        drawn.append(
            [
                (batch.ids_BT, batch.targets_BT, *batch.context, *batch.meta.values())
                for batch in data.train_dataloader()
            ]
        )
    assert all(
        torch.equal(a, b)
        for other in drawn[1:]
        for one, two in zip(drawn[0], other, strict=True)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize(
    ("said", "wanted", "score"), [("it is 1 2 3.", ["1 2 3"], 1), ("Red-Hat", ["red-hat", "x"], 0.5), ("", ["1"], 0)]
)
def test_string_match_all(said, wanted, score):
    assert string_match_all(said, wanted) == score


def test_metrics_of_what_a_model_says():
    """Exact match wants the value, EOS and nothing else; string_match_all the value anywhere before EOS."""
    task = make(segments=2)
    batch, tokenizer = task.batch(0, "test", 0, 6), task.tokenizer
    answers = [answer for *_, answer in told(task, batch)]
    texts = [answers[0], f"it is {answers[1]}.", answers[2][:-1], answers[3], "", f"{answers[4]}"]
    said = torch.full((6, task.new_tokens), tokenizer.pad_id)
    for row, text, end in zip(said, texts, [True, True, True, False, True, True], strict=True):
        ids = [*tokenizer.encode(" " + text).tolist(), *[tokenizer.eos_id] * end]
        row[: len(ids)] = torch.tensor(ids)
    scores = task.score_text(said, batch)
    assert scores["string_match_all"].tolist() == [1, 1, 0, 1, 0, 0]
    assert scores["exact_match"].tolist() == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("variant", "pk"),
        ("value", "word"),
        ("digits", 5),
        ("note", False),
        ("segments", 3),
        ("segment_len", 160),
        ("margin", 91),
        ("vary", 1.0),
        ("haystack", "books"),
        ("books", 1),
        ("tokenizer", "bpe"),
        ("vocab_size", 900),
        ("vocabulary", "books"),
    ],
)
def test_every_knob_matters(field, other, tmp_path):
    """Each field of the configuration changes the batch."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text(
            "The quick brown zebras jumped over ten lazy giraffes in Africa today. " * 60
        )
    a, b = (
        make(**{"margin": 90, "segment_len": 150, **c}).batch(0, "train", 1, 4)
        for c in ({}, {field: str(tmp_path) if other == "books" else other})
    )
    parts = [(*a.context, a.ids_BT), (*b.context, b.ids_BT)]
    assert len(parts[0]) != len(parts[1]) or not all(torch.equal(one, two) for one, two in zip(*parts, strict=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"variant": "x"}, "variant='x': expected one of pk, n, w"),
        ({"value": "numbers"}, "value='numbers': expected one of auto, number, word, uuid"),
        ({"digits": 0}, "digits=0: expected 2 to 40"),
        ({"segments": 0}, "segments=0: expected at least 1"),
        (
            {"segments": 1, "segment_len": 100},
            "segments=1: 32 tokens are too few for note and needle, which take 46; raise segments or segment_len",
        ),
        ({"vary": 1.0, "segment_len": 100}, "segments=1: 32 tokens are too few"),
        ({"margin": 37}, "margin=37: expected at least 38, the tokens of a question"),
        ({"margin": S}, f"margin={S}: expected less than segment_len={S}"),
        ({"vary": 1.5}, "vary=1.5: expected a share from 0 to 1"),
        ({"haystack": "no/such/folder"}, "haystack='no/such/folder': no such folder"),
    ],
)
def test_wrong_settings(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**config)


def test_a_tokenizer_that_needs_more_room():
    """How many tokens a text has is known of words; of others, when they are drawn."""
    with pytest.raises(ValueError, match=r"margin=68: expected at least 1\d\d"):
        make(tokenizer="char").batch(0, "train", 0, 1)
    with pytest.raises(ValueError, match=r"segments=1: 66 tokens are too few for note and needle"):
        make(tokenizer="char", margin=190, segment_len=256, segments=1).batch(0, "train", 0, 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"variant": "pk", "digits": 3},
            "One of the special magic numbers for bright - vicarage is: 8 0 1. "
            "The grass is green. The sky is blue. The sun 8 0 1",
        ),
        (
            {"variant": "w", "value": "word"},
            "One of the special magic words for bright - vicarage is: strange - nursery. "
            '" We were six painters then, and not one of us strange - nursery',
        ),
    ],
)
def test_golden_sample(config, expected):
    """The sampler never changes silently: old results would no longer be comparable."""
    task = make(note=False, segments=1, segment_len=96, **config)
    ((context, _, answer),) = told(task, task.batch(0, "train", 0, 1))
    assert f"{context} {answer}" == expected
