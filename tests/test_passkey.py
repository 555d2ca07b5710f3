"""Passkey, magic number, San Francisco: where the needle lies, that it alone tells, and what counts as right."""

import re
from types import SimpleNamespace

import pytest
import torch
from test_episodes import SMALL, right_answers, tails_of, texts_of

from lit_memory.run.reporting import train_x
from lit_memory.tasks.needle import LINE
from lit_memory.tasks.passkey import NOTE, SAN_FRANCISCO, Passkey, rouge_l_recall

NEEDLES = {
    "passkey": re.compile(r"The pass key is ([\d ]+)\."),
    "magic": re.compile(r"The magic number is ([\d ]+)\."),
    "san_francisco": re.compile(r"The best thing to do in San Francisco is ([^.]+)\."),
}
CASES = [
    {},
    {"digits": 1, "depth": 0},
    {"digits": 12, "depth": 100, "tokens": 200},
    {"needle": "magic", "digits": 3},
    {"needle": "san_francisco"},
    {"needle": "magic", "tokenizer": "char", "line_tokens": 200, "segment_len": 64, "margin": 60},
]
cases = pytest.mark.parametrize("config", CASES, ids=lambda c: "-".join(map(str, c.values())))


def make(**config) -> Passkey:
    return Passkey(Passkey.Config(**{**SMALL, "tokens": 300, **config}))


@cases
@pytest.mark.parametrize("split", ["train", "test"])
def test_oracle_of_lines(config, split):
    """One line is the needle, and what it says is the answer; the question is how the line begins, and so is the
    tail."""
    task = make(**config)
    batch, pattern = task.batch(0, split, 0, 20), NEEDLES[task.config.needle]
    for texts, ((prompt, answer),) in zip(texts_of(task, batch), tails_of(task, batch), strict=True):
        texts = [text.strip() for text in texts]
        ((at, found),) = [(i, found[1]) for i, text in enumerate(texts) if (found := pattern.fullmatch(text))]
        assert (
            found == answer
            and texts[-1] == prompt
            and texts[at].startswith(prompt)
            and answer not in " ".join(texts[:at])
        )
        if task.config.needle == "passkey":
            block = re.findall(r"[^.]+\.", LINE)
            assert (
                texts[:3] == list(NOTE)
                and texts[at + 1 : at + 3] == ["Remember it.", f"{answer} is the pass key."]
                and texts[-2] == "What is the pass key?"
            )
            rest = texts[3:at] + texts[at + 3 : -2]
            assert rest == [line.strip() for line in block] * (len(rest) // 5) and (at - 3) % 5 == 0


@cases
def test_oracle_of_text(config):
    """The same, as text; a passkey is asked for in a whole sentence first."""
    task = make(**config, layout="text")
    pattern = NEEDLES[task.config.needle]
    for split in ("train", "test"):
        batch, samples = task.batch(0, split, 0, 12), sorted(task.samples(0, split, 0, 12), key=lambda s: -s.segments)
        for sample, ((prompt, answer),) in zip(samples, tails_of(task, batch), strict=True):
            assert pattern.findall(task.tokenizer.decode(sample.read(0, sample.context_len).tolist())) == [answer]
            assert re.search(
                r"(What is the pass key\? The pass key is|The magic number is"
                r"|The best thing to do in San Francisco is)$",
                prompt,
            )
            assert sample.context_len <= task.config.tokens


@pytest.mark.parametrize("needle", NEEDLES)
def test_lines_do_not_depend_on_length_and_depth(needle):
    """Claim L1: a longer passkey context has the same distinct lines; the needle is the same sentence wherever it
    lies."""
    short, long = (make(needle=needle, tokens=n, depth=d) for n, d in ((200, 10), (900, 80)))
    lines = [set(next(texts_of(task, task.batch(0, "test", 0, 1)))) for task in (short, long)]
    if needle == "passkey":
        assert {line for line in lines[0] if not re.search(r"\d", line)} == {
            line for line in lines[1] if not re.search(r"\d", line)
        }
    assert all(sum(bool(NEEDLES[needle].fullmatch(line)) for line in part) == 1 for part in lines)


@pytest.mark.parametrize("needle", NEEDLES)
def test_depths(needle):
    """So much of the hay, to a sentence or block, is in front of the needle; all depths are drawn."""
    for depth in (0, 30, 100):
        task = make(needle=needle, depth=depth, tokens=3000)
        for sample in task.samples(0, "valid", 0, 5):
            hay = sample.context_len - sum(map(len, sample.facts))
            before = int(sample.starts_F[sample.support[0]]) - sum(map(len, sample.facts[: sample.support[0]]))
            assert abs(before / hay - depth / 100) < 0.03
        assert set(task.batch(0, "valid", 0, 5).meta["depth"].tolist()) == {depth}
    drawn = make(needle=needle, tokens=3000).batch(0, "valid", 0, 300).meta["depth"]
    assert abs(float(drawn.float().mean()) - 50) < 6 and drawn.min() < 5 and drawn.max() > 95


def test_splits_share_no_number():
    task = make(digits=3, tokens=100)
    seen = [
        {tails[0][1] for tails in tails_of(task, task.batch(0, split, 0, 300))} for split in ("train", "valid", "test")
    ]
    assert (
        all(len(values) > 50 for values in seen)
        and not seen[0] & seen[1]
        and not seen[0] & seen[2]
        and not seen[1] & seen[2]
    )


def test_numbers_of_several_lengths():
    """All of ``train_digits`` in training and validation, each where its hash says; those of a test are as long as it
    asks."""
    task, tests = make(train_digits=[1, 2, 4], tokens=100), {}
    for split in ("train", "valid", "test"):
        batch = (
            task.at(test_digits=[2, 4]).test_conditions()[1][1].batch(0, split, 0, 60)
            if split == "test"
            else task.batch(0, split, 0, 60)
        )
        answers = [tails[0][1].replace(" ", "") for tails in tails_of(task, batch)]
        tests[split] = {answer for answer in answers if len(answer) > 1}
        assert set(map(len, answers)) == ({4} if split == "test" else {1, 2, 4}) and batch.meta["digits"].tolist() == [
            *map(len, answers)
        ]
    assert not tests["train"] & tests["valid"] and not tests["train"] & tests["test"]
    seen = SimpleNamespace(
        trained=SimpleNamespace(task={"digits": 3, "train_digits": [1, 8, 2]}, stages=[{"task": {"tokens": 64}}])
    )
    assert train_x("test_digits", [seen]) == 8
    with pytest.raises(ValueError, match=r"train_digits=\[3, 0\]: expected 1 to 15"):
        make(train_digits=[3, 0])


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("eat a sandwich in Dolores Park", 6 / 12),
        (SAN_FRANCISCO.upper() + "!", 1),
        ("sunny day a on Park", 2 / 12),
        ("a a a a", 2 / 12),
        ("nothing", 0),
        ("", 0),
    ],
)
def test_rouge_l_recall(said, score):
    """Spec 6.3: the longest common subsequence of words, of which the answer has 12."""
    assert rouge_l_recall(said, SAN_FRANCISCO) == pytest.approx(score)


def test_rouge_equals_the_naive_one():
    def naive(a, b):
        if not a or not b:
            return 0
        return 1 + naive(a[1:], b[1:]) if a[0] == b[0] else max(naive(a[1:], b), naive(a, b[1:]))

    words = ["a", "b", "c", "a", "d", "b", "a", "c"]
    for i in range(1, 60):
        said, wanted = words[i % 5 : i % 5 + 5] + words[: i % 4], words[i % 3 : i % 7 + 3] or ["z"]
        assert rouge_l_recall(" ".join(said), " ".join(wanted)) == naive(said, wanted) / len(wanted)


def test_recall_and_exact_match():
    """A number counts wherever it is said; exact match wants it, and then EOS or the full stop of a
    line, whatever is written behind that."""
    task = make(digits=3)
    batch, tokenizer = task.batch(0, "test", 0, 6), task.tokenizer
    answers = [tails[0][1] for tails in tails_of(task, batch)]
    said = torch.full((6, task.new_tokens), tokenizer.pad_id)
    texts = [answers[0], f"the key is {answers[1]}.", answers[2][:-2], answers[3], f"{answers[4]}.", f"{answers[5]}. 9"]
    for row, text, end in zip(said, texts, [True, True, True, False, True, False], strict=True):
        ids = [*tokenizer.encode(text).tolist(), *[tokenizer.eos_id] * end]
        row[: len(ids)] = torch.tensor(ids)
    scores = task.score_text(said, batch)
    assert scores["recall"].tolist() == [1, 1, 0, 1, 1, 1] and scores["exact_match"].tolist() == [1, 0, 0, 0, 1, 1]


def test_blind_solver():
    """A number of another sample is never right."""
    task = make(needle="magic")
    batch = task.batch(0, "valid", 0, 40)
    other = batch.targets_BT.roll(1, 0)
    assert task.score(other, batch)["recall"].sum() == 0


@pytest.mark.parametrize(
    ("field", "other"),
    [("needle", "magic"), ("digits", 3), ("depth", 0), ("tokens", 400), ("haystack", "books"), ("books", 1)],
)
def test_every_knob_matters(field, other, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text(
            "The quick brown zebras jumped over ten lazy giraffes in Africa today. " * 60
        )
    given = {"needle": "magic"} if field in ("haystack", "books") else {}
    a, b = (
        make(**{**given, **c}).batch(0, "train", 1, 4)
        for c in ({}, {field: str(tmp_path) if other == "books" else other})
    )
    parts = [[t for p in (*x.context, x.ids_BT) for t in (p if isinstance(p, tuple) else (p,))] for x in (a, b)]
    assert len(parts[0]) != len(parts[1]) or not all(torch.equal(one, two) for one, two in zip(*parts, strict=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"needle": "password"}, "needle='password': expected one of passkey, magic, san_francisco"),
        ({"digits": 0}, "digits=0: expected 1 to 15"),
        ({"digits": 16}, "digits=16: expected 1 to 15"),
        ({"depth": 101}, "depth=101: expected 0 to 100 percent"),
        ({"tokens": -1}, "tokens=-1: expected 0 or more"),
        (
            {"test_digits": [2], "test_depth": [0]},
            "test_depth=[0]: a test varies one field; expected none where test_digits is given",
        ),
    ],
)
def test_wrong_settings(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**config)


def test_what_a_batch_tells(tmp_path):
    for config, message in (
        ({"tokens": 30}, "tokens=30: expected at least 5\\d, those of the sentences that matter"),
        ({"needle": "magic", "haystack": str(tmp_path), "vocabulary": "noise"}, "no .txt file for split 'train'"),
        (
            {"segment_len": 8},
            "segment_len=8: expected at least 10, the tokens of a question or prompt, its answer and EOS",
        ),
        (
            {"needle": "san_francisco", "line_tokens": 8},
            "line_tokens=8: expected at least 2\\d, the tokens of a question or a supporting fact",
        ),
        (
            {"digits": 8, "line_tokens": 8},
            "line_tokens=8: expected at least 13, the tokens of a question or a supporting fact",
        ),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            make(**config).batch(0, "train", 0, 2)


def test_golden_sample():
    """The sampler never changes silently: old results would no longer be comparable."""
    ((texts,), (tails,)) = (
        f(task, batch)
        for task in [make(needle="magic", tokens=40)]
        for batch in [task.batch(0, "train", 0, 1)]
        for f in (texts_of, tails_of)
    )
    told = (
        "The magic number is 8 1 6 2 9. | "
        "The <unk> of Galdale seemed heavy and heavy; the churchyard was stubborn in winter and honest in summer."
    )
    assert " | ".join(texts).startswith(told) and tails[0][1] == "8 1 6 2 9"


@pytest.mark.parametrize("layout", ["lines", "text"])
@pytest.mark.parametrize("config", [{"needle": "san_francisco"}, {"digits": 15}], ids=["san_francisco", "digits"])
@pytest.mark.parametrize("tokenizer", ["word", "char", "bpe"])
def test_there_is_room_for_the_whole_answer(tokenizer, config, layout):
    """A model that generates the right answer is right by every metric, with any tokenizer."""
    sizes = {"tokens": 900, "segment_len": 220, "margin": 200, "line_tokens": 200, "vocab_size": 512}
    task = make(tokenizer=tokenizer, layout=layout, **sizes, **config)
    batch = task.batch(0, "test", 0, 4)
    right_BN = right_answers(task, batch)
    assert all((values == 1).all() for values in task.score_text(right_BN, batch).values())
    for short in (1, 2):
        assert task.score_text(right_BN[:, :short], batch)["exact_match"].sum() == 0


def test_an_answer_that_is_too_long_is_told(monkeypatch):
    monkeypatch.setattr(Passkey, "new_tokens", 5)
    task = make(digits=12, tokens=200)
    assert task.batch(0, "train", 0, 2).ids_BT.shape[0] == 2  # only a test generates
    with pytest.raises(
        ValueError, match=r"tokenizer='word': an answer has 13 .* generates at most 5; expected another"
    ):
        task.batch(0, "test", 0, 2)
