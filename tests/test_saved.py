"""What a report leaves for redrawing: its plan, the very numbers, and the scores of the samples."""

import json
import zipfile

import numpy as np
import pandas as pd
import pytest
from report_data import ARMS, EXPECT, SEEDS, XS, make_frame, make_plan

from lit_memory import report
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.sections import ReportConfig
from lit_memory.report.render import render, write
from lit_memory.report.results import Results
from lit_memory.report.saved import scores_npz

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without figures, which take most of the time."""
    monkeypatch.setattr("lit_memory.report.render.draw", lambda *args: {})


def sampled(metric="exact_match", count=30):
    """Scores of 0 and 1 for every cell, and the frame of their means, thirds with no end among them."""
    rng = np.random.default_rng(0)
    share = {"gamma": 0.95, "no_gamma": 0.3}
    cells = [(arm, metric, x, seed) for arm in ARMS for x in XS for seed in SEEDS]
    scores = {cell: (rng.random(count) < share[cell[0]]).astype(float) for cell in cells}
    rows = [(arm, seed, x, metric, scores[arm, metric, x, seed].mean()) for arm, metric, x, seed in cells]
    return scores, pd.DataFrame(rows, columns=["arm", "seed", "x", "metric", "value"])


LINES = {
    "expect": [
        *EXPECT,
        "reach(gamma[50], 0.5) > 2",
        "gamma.seconds[100] < 3 * gamma.seconds[50]",
        "gamma.loss[50] < 1",
    ],
    "requires": ["gamma[50] >= 0.9"],
    "verify": ["gamma.loss[100] > 0"],
}


def everything():
    """A plan with lines of every kind, and results of which some are times, numbers without end and not numbers."""
    scores, frame = sampled()
    times = make_frame(["gamma"], xs=[50, 100], metric="seconds", value=lambda arm, seed, x: x * (1 + seed) / 3000)
    losses = make_frame(metric="loss", value=lambda arm, seed, x: float("nan") if x == 500 else 0.1 + seed / 7 / x)
    config = ReportConfig(time="seconds", state_x="last", threshold=None)
    runs = [{"arm": "gamma", "seed": 0, "samples": [30] * 4, "stage_steps": [1, 2], "seconds": 61.7, "parameters": 7}]
    plan = make_plan(config=config, runs=runs, provenance={"dirty": False, "versions": {"torch": "2"}}, **LINES)
    return plan, pd.concat([frame, times, losses]), scores


def test_a_report_is_judged_again_from_its_folder(tmp_path):
    """Byte for byte, with all the other files but the figures, which come from the same results."""
    plan, frame, scores = everything()
    done = render(plan, frame, tmp_path / "first", scores)
    assert {claim.resampled for claim in done.claims} == {"", "seeds and samples", "seeds alone"}
    results = report.load(tmp_path / "first")
    assert results.plan == plan
    again = write(results, tmp_path / "second")
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == [
        "README.md",
        "report.json",
        "scores.npz",
        "sheet.md",
        "table.csv",
        "table.md",
        "table.tex",
        "verdict.json",
    ]
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
    assert again.claims == done.claims or any(claim.margin != claim.margin for claim in done.claims)


def test_without_scores_seeds_alone_are_drawn(tmp_path):
    plan, frame, scores = everything()
    render(plan, frame, tmp_path, scores)
    with_scores = json.loads((tmp_path / "verdict.json").read_text())["claims"][0]
    render(plan, frame, tmp_path)
    assert not (tmp_path / "scores.npz").exists()
    without = json.loads((tmp_path / "verdict.json").read_text())["claims"][0]
    assert (with_scores["resampled"], without["resampled"]) == ("seeds and samples", "seeds alone")
    assert with_scores["interval"] != without["interval"] and "over seeds alone" in (tmp_path / "README.md").read_text()
    assert not report.load(tmp_path).scores


def test_only_what_figure_and_lines_use_is_kept(tmp_path):
    scores, frame = sampled()
    other = {("gamma", "capacity", 50, 0): np.ones(3), ("nobody", "exact_match", 50, 0): np.ones(3)}
    found = Results.from_frame(make_plan(), frame, scores | other | {("gamma", "exact_match", 7, 0): np.ones(3)})
    assert found.scores.keys() == {(arm, metric, float(x), seed) for arm, metric, x, seed in scores}
    used = make_plan(expect=["gamma.capacity[50] > 0"])
    rows = make_frame(["gamma"], [0], [50], "capacity", lambda arm, seed, x: 1.0)
    kept = Results.from_frame(used, pd.concat([frame, rows]), scores | other).scores
    assert ("gamma", "capacity", 50.0, 0) in kept


def test_a_report_keeps_six_digits_of_a_score(tmp_path):
    """Those that it is judged by; a kept score is kept as it is, so that a report is judged again by the same."""
    fine = np.random.default_rng(0).normal(size=2000) * 10.0 ** np.arange(-3, 5).repeat(250)
    cell = ("gamma", "exact_match", 50.0, 0)
    frame = make_frame(["gamma"], [0], [50], value=lambda arm, seed, x: fine.mean())
    kept = Results.from_frame(make_plan(), frame, {cell: fine}).scores
    assert np.abs(kept[cell] / fine - 1).max() < 1e-6 and (kept[cell] != fine).any()
    assert (Results.from_frame(make_plan(), frame, kept).scores[cell] == kept[cell]).all()
    assert len(scores_npz(kept)) < 0.6 * len(scores_npz({cell: fine}))
    odd = np.array([0.0, 1.0, -3.0, 65535.0, np.inf, np.nan])
    broken = make_frame(["gamma"], [0], [50], value=lambda arm, seed, x: float("nan"))
    np.testing.assert_array_equal(Results.from_frame(make_plan(), broken, {cell: odd}).scores[cell], odd)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.zeros(30), "their mean is 0, but the result is "),
        (np.full(30, np.nan), "their mean is nan, but the result is "),
        (np.zeros((2, 3)), r"shape \(2, 3\); expected one number per sample"),
        ([], r"shape \(0,\); expected one number per sample"),
    ],
)
def test_scores_of_another_test_are_an_error(wrong, message):
    scores, frame = sampled()
    scores["gamma", "exact_match", 50, 1] = wrong
    with pytest.raises(ValueError, match=f"^scores of arm gamma, seed 1, exact_match at x=50: {message}"):
        Results.from_frame(make_plan(), frame, scores)


def test_the_file_of_scores(tmp_path):
    """The same bytes at any time and in any order; scores of 0 and 1 take little room, others are exact."""
    scores = sampled(count=1000)[0] | {("gamma", "loss", 50.0, 0): np.arange(3) / 7}
    content = scores_npz(scores)
    assert content == scores_npz(dict(reversed(scores.items()))) and len(content) < 450 * len(scores)
    (tmp_path / "scores.npz").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "scores.npz") as file:
        assert {info.date_time for info in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    with np.load(tmp_path / "scores.npz") as arrays:
        assert arrays["gamma/exact_match/50/0"].dtype == np.uint8
        assert [*arrays["gamma/loss/50/0"]] == [0, 1 / 7, 2 / 7]


def damage(folder, name, change):
    (folder / name).write_bytes(change((folder / name).read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scores.npz", lambda old: old[:200], "scores.npz: damaged (File is not a zip file); expected the file as a"),
        ("scores.npz", lambda old: b"", "scores.npz: damaged (No data left in file); expected the file as a report"),
        ("scores.npz", lambda old: b"hello", "scores.npz: damaged ("),
        ("scores.npz", lambda old: old[:110] + b"????" + old[114:], "scores.npz: damaged ("),
        (
            "scores.npz",
            lambda old: scores_npz({("gamma", "exact_match", 50.0, 0): np.zeros(9)}),
            "their mean is 0, but",
        ),
        ("table.csv", lambda old: old.replace(b"seed_0", b"seed_x"), "table.csv: damaged (invalid literal for int()"),
        ("table.csv", lambda old: old.replace(b",3,", b",3,x", 1), "table.csv: damaged (could not convert string"),
        ("table.csv", lambda old: b"\xff" + old, "table.csv: damaged ('utf-8' codec can't decode"),
        ("table.csv", lambda old: old.replace(b"arm,", b"harm,"), "table.csv: damaged ('arm')"),
        ("report.json", lambda old: old[:100], "report.json: damaged ("),
        ("report.json", lambda old: b"[]", "report.json: damaged ("),
        ("report.json", lambda old: old.replace(b'"seeds"', b'"sead"', 1), "unexpected keyword argument 'sead'"),
        ("report.json", lambda old: old.replace(b'"x": "test', b'"z": "test', 1), "unexpected keyword argument 'z'"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(tmp_path, name, change, message):
    plan, frame, scores = everything()
    render(plan, frame, tmp_path, scores)
    damage(tmp_path, name, change)
    with pytest.raises(ConfigError) as caught:
        report.load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / name)) and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_report_by_its_name(tmp_path, monkeypatch):
    """In reports/ of this folder before that of the project; an old report is told apart from none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_memory.report.saved.PROJECT", tmp_path / "project")
    (tmp_path / "project" / "reports" / "both").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"both.report\.json: no such file; expected a report that has one; run\.py"):
        report.load("both")
    render(make_plan(), make_frame(), tmp_path / "project" / "reports" / "both")
    assert report.load("both").plan == make_plan()
    render(make_plan(scale="gpu"), make_frame(), tmp_path / "reports" / "both")
    assert report.load("both").plan.scale == "gpu"
    render(make_plan(scale="paper"), make_frame(), tmp_path / "reports" / "both" / "paper")
    assert report.load("both/paper").plan.scale == "paper"
    with pytest.raises(ConfigError, match=r"^bot: no such report; did you mean 'both'\?$"):
        report.load("bot")


def test_numbers_keep_all_their_digits(tmp_path):
    """table.csv has six decimals, report.json the others of what the verdict rests on."""
    frame = make_frame(seeds=[0, 1, 2], value=lambda arm, seed, x: [0.5, 1 / 3, float("nan")][seed])
    render(make_plan(), frame, tmp_path)
    first = (tmp_path / "table.csv").read_text().splitlines()[1]
    assert first.endswith(",0.500000,0.333333,nan")
    loaded = report.load(tmp_path)
    assert loaded.values("gamma", None, 50)[:2] == [0.5, 1 / 3]
