"""Quadratic equations: what a sample says is true, as likely as in the paper, and its own text alone leads from step to
step; free-running scores.

The solver here reads the equation as text and shares nothing with the sampler.
"""

import re
from collections import Counter

import pytest
import torch
from torch.nn.functional import cross_entropy

from lit_memory import LitRMT, LitXL
from lit_memory.recurrence import unroll
from lit_memory.tasks import quadratic
from lit_memory.tasks.base import generator
from lit_memory.tasks.quadratic import Quadratic, encode, equation, solution, split_of

SYMBOLS = ["", "?", *"0123456789+-*/^=()xD;,"]


def make(**config):
    return Quadratic(Quadratic.Config(**config))


def cells(ids_T):
    """The six cells of a sample as text."""
    return ["".join(SYMBOLS[i] for i in cell) for cell in ids_T.view(6, 30).tolist()]


def coefficients(text):
    """a, b, c of ``a*x^2+b*x+c=0``."""
    found = dict.fromkeys(("x^2", "x", ""), 0)
    left, _, right = text.partition("=")
    for sign, number, power in re.findall(r"([+-]?)(\d*)\*?(x\^2|x|)", left):
        if number or power:
            found[power] += int(f"{sign}{number or 1}")
    assert right == "0"
    return list(found.values())


def solve(text):
    """All six cells from the first one."""
    factor, *others = coefficients(text)
    assert not any(n % factor for n in others)
    b, c = (n // factor for n in others)
    square = b * b - 4 * c
    terms = [f"{n:+}*{power}".replace("+1*", "+").replace("-1*", "-") for n, power in ((1, "x^2"), (b, "x")) if n] + [
        f"{c:+}"
    ] * bool(c)
    found = [text, "".join(terms).lstrip("+") + "=0", f"D={abs(b)}^2-4*1*{c}={square}"]
    if square < 0:
        return [*found, "", "", ""]
    root = round(square**0.5)
    assert root * root == square
    low, high = (-b - root) // 2, (-b + root) // 2
    assert low * low + b * low + c == high * high + b * high + c == 0
    found[2] += f"={root}^2"
    return [*found, f"x=({-b}-{root})/2={low}", f"x=({-b}+{root})/2={high}", f"{low},{high}" if root else f"{low}"]


@pytest.mark.parametrize("max_root", [2, 10, 100])
def test_oracle(max_root):
    """Spec 12.9: whoever solves the equation in step 1 knows every other token, padding included; no step is longer
    than a cell."""
    task = make(max_root=max_root)
    for split in ("train", "valid", "test"):
        batch = task.batch(0, split, 0, 300)
        solved = encode([cell for row in batch.ids_BT for cell in solve(cells(row)[0])]).view(300, 180)
        scores = task.score(solved, batch) | task.score_text(solved[:, 30:], batch)
        assert scores.keys() == set(task.metrics) and all(bool((values == 1).all()) for values in scores.values())
        roots = [int(root) for row in batch.ids_BT for root in cells(row)[5].split(",") if root]
        assert all(abs(root) < max_root for root in roots)


def test_blind_solver():
    """Without the equation, "no roots" is right as often as there are none, one time in five; the answer to another
    equation hardly ever."""
    task = make()
    batch = task.batch(0, "test", 0, 2000)
    said = batch.ids_BT[:, 30:].roll(1, 0)
    empty = task.score_text(torch.zeros_like(said), batch)
    assert abs(empty["answer_accuracy"].mean() - 0.2) < 3 * (0.16 / 2000) ** 0.5 and not empty["token_accuracy"].any()
    rooted = batch.ids_BT[:, -30] != 0
    assert task.score_text(said, batch)["answer_accuracy"][rooted].mean() < 0.01


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (
            (-6, -4, -60),
            "-6*x^2+24*x+360=0 | x^2-4*x-60=0 | D=4^2-4*1*-60=256=16^2 | x=(4-16)/2=-6 | x=(4+16)/2=10 | -6,10",
        ),  # spec 7.1
        (
            (-8, 154, 5673),
            "-8*x^2-1232*x-45384=0 | x^2+154*x+5673=0 | D=154^2-4*1*5673=1024=32^2 | "
            "x=(-154-32)/2=-93 | x=(-154+32)/2=-61 | -93,-61",
        ),
        ((1, 0, 0), "x^2=0 | x^2=0 | D=0^2-4*1*0=0=0^2 | x=(0-0)/2=0 | x=(0+0)/2=0 | 0"),
        ((-1, -1, 0), "-x^2+x=0 | x^2-x=0 | D=1^2-4*1*0=1=1^2 | x=(1-1)/2=0 | x=(1+1)/2=1 | 0,1"),
        ((1, 0, -1), "x^2-1=0 | x^2-1=0 | D=0^2-4*1*-1=4=2^2 | x=(0-2)/2=-1 | x=(0+2)/2=1 | -1,1"),
        ((2, 1, 5), "2*x^2+2*x+10=0 | x^2+x+5=0 | D=1^2-4*1*5=-19 |  |  | "),
    ],
)
def test_worked_examples(monkeypatch, numbers, text):
    """Spec 7.1: no zero terms, no factor of one, a plus in front of later terms only; ids and padding; all but step 1
    is scored."""
    assert solution(*numbers) == text.split(" | ") == solve(equation(*numbers))
    monkeypatch.setattr(Quadratic, "draw", lambda *_: torch.tensor([numbers]))
    batch = make().batch(0, split_of(equation(*numbers)), 0, 1)
    expected = [SYMBOLS.index(character) for cell in text.split(" | ") for character in cell]
    assert cells(batch.ids_BT[0]) == text.split(" | ") and batch.ids_BT[batch.ids_BT != 0].tolist() == expected
    assert batch.targets_BT.tolist() == [[-100] * 30 + batch.ids_BT[0, 30:].tolist()]
    assert (make().vocab_size, SYMBOLS.index(";"), SYMBOLS.index(",")) == (24, 22, 23)


def test_statistics():
    """Spec 7.1: shares of equations without roots and with one, of factors, of zero roots, of what is drawn twice;
    longest cells."""
    drawn = make().draw(200_000, generator(0, "statistics", 0))
    k, b, c = drawn.T
    square, rooted = b * b - 4 * c, b * b >= 4 * c

    def share(which_N):
        return float(which_N.float().mean())

    assert abs(share(rooted) - 0.8) < 0.005 and abs(share(square == 0) - 0.004) < 0.001
    assert (
        abs(share(k < 0) - 0.5) < 0.005
        and [abs(share(k.abs() == n) - (1 / 18 if n in (1, 10) else 1 / 9)) < 0.005 for n in range(1, 11)]
        == [True] * 10
    )
    assert abs(len(set(map(tuple, drawn.tolist()))) / 200_000 - 0.85) < 0.005
    low = (-b - square.clamp(min=0).double().sqrt().round().long()) // 2
    roots = torch.stack([low, -b - low])[:, rooted]
    assert roots.abs().max() == 99 and (2 * low + b + square.clamp(min=0).double().sqrt())[rooted].abs().max() < 1e-6
    assert (
        abs(share(roots == 0) - 0.01) < 0.001 and abs(share(roots == 7) - 0.005) < 0.001
    )  # the interval (-1, 1) ends at zero
    assert (
        b[~rooted].min() == 0
        and b[~rooted].max() == 199
        and c[~rooted].max() == 9999
        and abs(b[~rooted].float().mean() - 99.5) < 2
    )
    middle = (c[~rooted] - b[~rooted] ** 2 / 4) / (9999 - b[~rooted] ** 2 / 4)
    assert abs(middle.mean() - 0.5) < 0.01 and middle.min() > 0
    longest = [
        max(map(len, steps)) for steps in zip(*(solution(*numbers) for numbers in drawn[:20_000].tolist()), strict=True)
    ]
    assert [m - 2 <= n <= m for n, m in zip(longest, (22, 16, 28, 17, 17, 7), strict=True)] == [True] * 6


@pytest.mark.parametrize("max_root", [2, 100])
def test_splits(max_root):
    """A hash decides: the same equation is always of the same split, 10 of 13 are for training, 1 for validation; no
    split is empty."""
    texts = {equation(*numbers) for numbers in make(max_root=max_root).draw(20_000, generator(0, "splits", 0)).tolist()}
    counts = Counter(map(split_of, texts))
    expected = {"train": 10 / 13, "valid": 1 / 13, "test": 2 / 13}
    assert (
        all(
            abs(counts[split] / len(texts) - share) < (0.02 if max_root == 100 else 0.1)
            for split, share in expected.items()
        )
        and len(counts) == 3
    )
    for split in expected:
        assert {split_of(cells(row)[0]) for row in make(max_root=max_root).batch(0, split, 0, 50).ids_BT} == {split}


def test_golden_sample():
    """The sampler never changes silently: old results would no longer be comparable."""
    assert cells(make().batch(0, "train", 0, 2).ids_BT[0])[0] == "5*x^2-605*x+18200=0"
    assert cells(make(max_root=10).batch(0, "test", 0, 2).ids_BT[0])[0] == "7*x^2-56*x=0"


def test_scores():
    """Padding behind the answer counts for the answer and not for tokens; steps before the last do not count for the
    answer."""
    task = make()
    batch = task.batch(0, "valid", 0, 3)
    real = (batch.ids_BT[:, 30:] != 0).sum(1)
    said = batch.ids_BT[:, 30:].clone()
    said[0, -1], said[1, 0] = 5, 0
    scores = task.score_text(said, batch)
    assert scores["answer_accuracy"].tolist() == [0, 1, 1]
    assert scores["token_accuracy"].tolist() == pytest.approx([1, 1 - 1 / int(real[1]), 1])
    forced = task.score(torch.cat([torch.full((3, 30), 7), said], dim=1), batch)
    assert all(torch.equal(forced[f"forced_{name}"], values) for name, values in scores.items())


@pytest.mark.parametrize(("lit", "segment_len"), [(LitRMT, 30), (LitRMT, 180), (LitRMT, 50), (LitXL, 30)])
def test_free_running(monkeypatch, lit, segment_len):
    """A slow twin: what counts is what the model makes of its own cells and memory. Read again as a whole, cut into the
    same segments, what it wrote is at every place the likeliest token; the forced scores are those of the right
    cells."""
    task, said = make(max_root=10, segment_len=segment_len), []
    torch.manual_seed(0)
    module = lit(vocab_size=24, width=16, heads=2, layers=1, init_std=0.5).double().eval()
    score_text = task.score_text
    monkeypatch.setattr(task, "score_text", lambda said_BN, batch: said.append(said_BN) or score_text(said_BN, batch))
    batch = task.batch(0, "valid", 0, 3)
    with torch.no_grad():
        found, scores = module.evaluate(batch, task), {}
        for name, ids_BT in (("", torch.cat([batch.ids_BT[:, :30], said[-1]], dim=1)), ("forced_", batch.ids_BT)):
            state, likeliest = module.model.init_state(3), []
            for segment in ids_BT.split(segment_len, dim=1):
                hidden, state = module.model.step(state, segment)
                likeliest.append(module.model.logits(hidden).argmax(-1))
            likeliest = torch.cat(likeliest, dim=1)[:, 29:-1]
            assert name or torch.equal(likeliest, said[-1])
            scores |= {f"{name}{metric}": value for metric, value in score_text(likeliest, batch).items()}
        right = unroll(module.model, batch.ids_BT, segment_len).hidden_BTD[:, 29:-1]
        loss = cross_entropy(module.model.logits(right).flatten(0, 1), batch.ids_BT[:, 30:].flatten())
    assert {name: float(value) for name, (value, *_) in found.items() if name != "loss"} == pytest.approx(
        {k: float(v.mean()) for k, v in scores.items()}
    )
    assert float(found["loss"][0]) == pytest.approx(float(loss))
    assert len(set(said[-1].flatten().tolist())) > 3  # the model says more than one thing


def test_training_has_no_prompts():
    """Validation and test know where a model goes on by itself; how a sample is cut changes nothing in it."""
    whole, steps = make(segment_len=180), make()
    assert steps.batch(0, "train", 0, 2).prompt_B is None and steps.batch(0, "test", 0, 2).prompt_B.tolist() == [30, 30]
    assert torch.equal(whole.batch(0, "train", 0, 4).ids_BT, steps.batch(0, "train", 0, 4).ids_BT)
    assert [(task.segment_len, task.written) for task in (whole, steps, make(segment_len=50))] == [
        (180, 0),
        (30, 5),
        (50, 3),
    ]
    assert steps.new_tokens == quadratic.SCORED == 150


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"segment_len": 0}, "segment_len=0: expected at least 1"),
        ({"segment_len": 181}, "segment_len=181: expected at most 180"),
        ({"max_root": 1}, "max_root=1: expected at least 2"),
        ({"max_root": 101}, "max_root=101: expected at most 100, as a step has 30 characters"),
    ],
)
def test_invalid_config(config, message):
    """One line that names the field and what is expected."""
    with pytest.raises(ValueError, match=message):
        Quadratic.Config(**config)
    if "max_root" in config:
        with pytest.raises(ValueError, match=f"test_{message}"):
            make(test_max_root=[config["max_root"]]).test_conditions()
