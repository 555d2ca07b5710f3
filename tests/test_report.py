"""Reports: verdicts, tables, pages, and that nothing is ever half-written."""

import csv
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from report_data import ARMS, EXPECT, PAPER, XS, make_frame, make_plan

from lit_memory.plan.experiment import load
from lit_memory.plan.paper import paper_rows
from lit_memory.plan.runspec import RunSpec
from lit_memory.plan.sections import ReportConfig
from lit_memory.report import figures, saved
from lit_memory.report.charts import charts
from lit_memory.report.render import render
from lit_memory.report.series import series_of
from lit_memory.report.settings import arm_settings
from lit_memory.report.verdict import COMPARISON, INCOMPLETE, INCONCLUSIVE, NOT_REPRODUCED, REPRODUCED
from lit_memory.run import reporting
from lit_memory.run.options import Options
from lit_memory.run.sweep import Sweep
from lit_memory.run.worklist import WorkList
from lit_memory.util import files

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without figures, which take most of the time, for tests of words and numbers."""
    monkeypatch.setattr("lit_memory.report.render.draw", lambda *args: {})


@pytest.fixture
def png_only(monkeypatch):
    """Figures as small PNGs alone, for tests that compare their bytes."""
    monkeypatch.setattr(figures, "METADATA", {"png": figures.METADATA["png"]})
    monkeypatch.setattr(figures, "DPI", 50)


WITH_STATE = ReportConfig(chance=0.0625, state_x=200)


@pytest.fixture(scope="session")
def complete(tmp_path_factory):
    """The files of a report with all its figures, rendered once."""
    return render(make_plan(config=WITH_STATE), make_frame(), tmp_path_factory.mktemp("report")).paths


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("drop", "missing", "verdict"),
    [
        (lambda f: f.arm == "nobody", [], REPRODUCED),
        (lambda f: (f.arm == "gamma") & (f.seed == 2), ["gamma seed 2"], INCOMPLETE),
        (lambda f: f.arm == "no_gamma", ["no_gamma seeds 0, 1, 2"], INCOMPLETE),
        (lambda f: (f.seed == 1) & (f.x == 500), ["gamma seed 1 at 500", "no_gamma seed 1 at 500"], INCOMPLETE),
        (lambda f: f.seed >= 0, ["gamma seeds 0, 1, 2", "no_gamma seeds 0, 1, 2"], INCOMPLETE),
    ],
    ids=["complete", "a seed", "an arm", "one x", "everything"],
)
def test_what_is_missing_is_named(tmp_path, drop, missing, verdict):
    frame = make_frame()
    found = render(make_plan(), frame[~drop(frame)], tmp_path)
    assert (found.verdict, found.missing) == (verdict, missing)
    page = (tmp_path / "README.md").read_text()
    assert f"**{verdict}** at scale `cpu`" in page and all(m in page for m in missing)
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == verdict


def test_an_arm_that_stops_early(tmp_path):
    """Nothing is missing of it, its seeds are counted where it is tested, and a report that is drawn again knows it."""
    frame = make_frame()
    plan = make_plan(stops={"no_gamma": 3}, config=ReportConfig(state_x="last"))
    found = render(plan, frame[~((frame.arm == "no_gamma") & (frame.x == 500))], tmp_path)
    assert (found.verdict, found.missing) == (REPRODUCED, [])
    assert "| – " in (row := next(row for row in found.table.splitlines() if "no_gamma" in row)) and "3 of 3" in row
    assert saved.load(tmp_path).plan.stops == {"no_gamma": 3}
    shown = {chart["name"]: [series["name"] for series in chart["series"]] for chart in charts(saved.load(tmp_path))}
    assert shown["State"] == ["gamma"] and (tmp_path / "state.png").is_file()
    names = [series.name for series in series_of(saved.load(tmp_path), plan.x_values)]
    assert names == ["gamma", "no_gamma"]
    late = render(plan, frame[~((frame.arm == "no_gamma") & (frame.x >= 200))], tmp_path)
    assert late.missing == ["no_gamma seeds 0, 1, 2 at 200"]


@pytest.mark.usefixtures("undrawn")
def test_a_seed_that_is_no_number_is_not_left_out_of_a_mean(tmp_path):
    """An arm of which one diverged would look as good as the others."""
    frame = make_frame()
    frame.loc[(frame.arm == "gamma") & (frame.x == 200) & (frame.seed == 1), "value"] = float("nan")
    render(make_plan(), frame, tmp_path)
    gamma, _ = series_of(saved.load(tmp_path), [50, 200])
    assert [math.isnan(mean) for mean in gamma.means] == [False, True] and gamma.name == "gamma"


@pytest.mark.usefixtures("undrawn")
def test_verdicts_of_complete_runs(tmp_path):
    nan = make_frame()
    nan.loc[(nan.arm == "gamma") & (nan.x == 200) & (nan.seed == 1), "value"] = float("nan")
    cases = [
        (make_plan(expect=[*EXPECT, "no_gamma[last] > 0.9"]), make_frame(), NOT_REPRODUCED),
        (make_plan(), nan, INCONCLUSIVE),
    ]
    cases += [
        (make_plan(expect=[]), make_frame(), COMPARISON),
        (make_plan(requires=["no_gamma[50] > 0.9"]), make_frame(), REPRODUCED),
        (make_plan(requires=["no_gamma[500] > 0.9"]), make_frame(), INCONCLUSIVE),
        (make_plan(verify=["no_gamma[500] > 0.9"]), make_frame(), INCONCLUSIVE),
        (make_plan(expect=["gamma.capacity[50] > 1"]), make_frame(), INCOMPLETE),
    ]
    for plan, frame, verdict in cases:
        assert render(plan, frame, tmp_path).verdict == verdict
    with pytest.raises(ValueError, match="no arm 'armt'"):
        render(make_plan(expect=["armt[50] > 0"]), make_frame(), tmp_path)
    with pytest.raises(ValueError, match=r"requires\[0\] 'armt\[50\] > 0': no arm 'armt'"):
        render(make_plan(requires=["armt[50] > 0"]), make_frame(), tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_the_verdict_by_seeds_that_did_not_choose(tmp_path):
    """It stands beside that of all seeds where it is another one. Two that never fail cannot say that of the rest."""
    line, grid = ["gamma[200] > no_gamma[200]"], [{"arm": "gamma", "point": "0", "settings": {}, "status": "finished"}]
    told = {"valid": 1.0, "valid_loss": 0.1, "seed": 0, "chosen": True, "test": []}
    plan = make_plan(expect=line, seeds=range(5), tune_seeds=[0, 1], grid=[grid[0] | told])
    cases = {0.0: ("NOT REPRODUCED", ", NOT REPRODUCED by the seeds that did not choose"), 0.9: ("REPRODUCED", "")}
    for other, (verdict, scope) in cases.items():
        frame = make_frame(seeds=range(5), value=lambda arm, seed, x, other=other: value_of(arm, seed, other))
        found = render(plan, frame, tmp_path)
        assert found.fresh == verdict and found.scope.endswith(scope)
        assert f"By seeds 2, 3, 4 alone the verdict is {verdict}." in (tmp_path / "README.md").read_text()
    assert render(make_plan(expect=line), make_frame(), tmp_path).fresh == ""


def value_of(arm, seed, other):
    """gamma is far above no_gamma where a seed chose, and at ``other`` for the rest."""
    return 0.3 + 0.01 * seed if arm == "no_gamma" else 5.0 + 0.01 * seed if seed < 2 else other + 0.011 * seed


@pytest.mark.usefixtures("undrawn")
def test_failed_runs_are_named_with_their_status(tmp_path):
    runs = [{"arm": "gamma", "seed": 0, "status": None}, {"arm": "no_gamma", "seed": 2, "status": "FAILED"}]
    frame = make_frame()
    found = render(make_plan(runs=runs), frame[(frame.arm == "gamma") | (frame.seed < 2)], tmp_path)
    assert found.missing == ["no_gamma seed 2 (FAILED)"]
    assert found.text.endswith("seeds)\nINCOMPLETE; missing: no_gamma seed 2 (FAILED)") and found.table in found.text


@pytest.mark.usefixtures("undrawn")
def test_the_verdict_for_programs(tmp_path):
    runs = [{"arm": "gamma", "seed": 0, "status": "finished", "steps": 3000.0, "seconds": 61.7}]
    render(make_plan(runs=runs, modified=["train.lr=1"]), make_frame(), tmp_path)
    found = json.loads((tmp_path / "verdict.json").read_text())
    assert [found[key] for key in ("experiment", "scale", "modified", "paper", "verdict")] == [
        "armt_ablation_gamma",
        "cpu",
        ["train.lr=1"],
        PAPER,
        REPRODUCED,
    ]
    assert found["runs"] == [{"arm": "gamma", "seed": 0, "steps": 3000.0, "seconds": 61.7}]
    claim = found["claims"][0]
    low, high = claim.pop("interval")
    assert 0.58 < low < claim["margin"] < high < 0.68 and 0 < claim.pop("p") < claim.pop("detectable") < 0.1
    assert claim == {
        "line": EXPECT[0],
        "verdict": REPRODUCED,
        "numbers": "0.991 - 0.160 = 0.831 > 0.2 ✓",
        "kind": "claim",
        "holds": True,
        "sides": [0.831, 0.2],
        "margin": 0.631,
        "level": 0.05,  # the other line has no doubt and took 0.025
        "resampled": "seeds alone",
        "reason": "",
    }
    assert found["exploratory"] is True and found["reason"] == ""


@pytest.mark.usefixtures("png_only")
def test_rows_outside_the_plan_change_nothing_and_twice_is_an_error(tmp_path):
    frame, other = make_frame(), make_frame(arms=["other"], seeds=[7], xs=[7])
    render(make_plan(), frame, tmp_path / "a")
    render(make_plan(), pd.concat([other, frame.sample(frac=1, random_state=0)]), tmp_path / "b")
    for name in ("table.csv", "figure.png", "README.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(ValueError, match="two finished runs of arm gamma, seed 0"):
        render(make_plan(), pd.concat([frame, frame[:1]]), tmp_path)


def test_the_same_results_give_the_same_bytes(complete, tmp_path):
    """In another process too; what the page and the verdict alone show changes no other file."""
    plan = make_plan(config=WITH_STATE)
    runs = [run | {"run_id": "x", "seconds": 3.0} for run in plan.runs]
    changed = dataclasses.replace(plan, provenance={"date": "tomorrow"}, runs=runs)
    paths = render(changed, make_frame(), tmp_path / "changed").paths
    differing = [name for name, path in complete.items() if path.read_bytes() != paths[name].read_bytes()]
    assert differing == ["report.json", "verdict.json", "sheet.md", "README.md"]
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from report_data import ReportConfig, make_frame, make_plan
from lit_memory.report.render import render
render(make_plan(config=ReportConfig(chance=0.0625, state_x=200)), make_frame(), {str(tmp_path / "again")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONHASHSEED": "5"})
    assert all((tmp_path / "again" / name).read_bytes() == path.read_bytes() for name, path in complete.items())


@pytest.mark.usefixtures("undrawn")
def test_tables(tmp_path):
    frame = pd.concat([make_frame(), make_frame(metric="capacity", xs=[50, 100, 200], value=lambda arm, seed, x: x)])
    found = render(make_plan(), frame[(frame.arm == "gamma") | (frame.seed == 0)], tmp_path)
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert [(r["arm"], r["x"], r["metric"]) for r in rows] == [
        (a, str(x), m) for a in ARMS for x in XS for m in ("exact_match", "capacity")
    ]
    first = {"arm": "gamma", "x": "50", "metric": "exact_match", "mean": "0.991000", "std": "0.001000", "n": "3"}
    assert rows[0] == first | {"seed_0": "0.990000", "seed_1": "0.991000", "seed_2": "0.992000"}
    assert rows[8] | {"mean": "", "seed_0": ""} == {
        "arm": "no_gamma",
        "x": "50",
        "metric": "exact_match",
        "n": "1",
    } | dict.fromkeys(("mean", "std", "seed_0", "seed_1", "seed_2"), "")
    assert rows[-1]["n"] == "0" and rows[-1]["mean"] == ""
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in found.table.splitlines() if line.startswith("|")
    ]
    assert lines[0] == ["arm", "50", "100", "200", "500", "seeds", "parameters", "state floats"]
    assert lines[2] == ["gamma", *["0.991 ± 0.001"] * 4, "3 of 3", "501,248", "18,720"]
    assert lines[3][:2] + lines[3][-3:] == ["no_gamma", "0.990", "1 of 3", "501,248", "18,720"]
    assert (tmp_path / "table.md").read_text() == found.table


@pytest.mark.usefixtures("undrawn")
def test_a_state_that_grows_says_so(tmp_path):
    plan = make_plan()
    plan.runs[3]["state_growth"] = 1024
    rows = [
        line.split("|")[-2].strip()
        for line in render(plan, make_frame(), tmp_path).table.splitlines()
        if line.startswith("|")
    ]
    assert rows[2:] == ["18,720", "18,720 + 1,024 a segment"]
    plan.config.state_x, plan.runs[3]["segments"] = 200, 200
    assert "| 18,720 + 1,024 a segment (223,520 at 200) |" in render(plan, make_frame(), tmp_path).table
    assert (plan.state_size("gamma"), plan.state_size("no_gamma")) == (18720, 18720 + 200 * 1024)
    assert "A state that grows is counted as it is when that test asks." in (tmp_path / "README.md").read_text()
    del plan.runs[3]["segments"]
    assert plan.state_size("no_gamma") is None


@pytest.mark.usefixtures("png_only")
def test_times_have_a_table_and_a_figure_and_are_in_no_csv(tmp_path):
    times = make_frame(["gamma"], xs=[50, 100], metric="seconds", value=lambda arm, seed, x: x * (1 + seed) / 1000)
    frame = pd.concat([make_frame(), times])
    plan = make_plan(
        config=ReportConfig(time="seconds"), expect=[*EXPECT, "gamma.seconds[100] < 3 * gamma.seconds[50]"]
    )
    found = render(plan, frame, tmp_path)
    page = (tmp_path / "README.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.partition("## Time")[2].partition("\n## ")[0].splitlines()
        if line[:1] == "|"
    ]
    assert rows[0] == ["arm", "50", "100", "200", "500"]
    assert rows[2:] == [["gamma", "0.1 ± 0.05", "0.2 ± 0.1", "–", "–"], ["no_gamma", "–", "–", "–", "–"]]
    assert "(time.png)" in page and "[time.pdf](time.pdf)" in page
    assert (found.verdict, found.claims[-1].numbers) == (
        INCONCLUSIVE,
        "0.200 < 3 * 0.100 = 0.300 ?",
    )
    render(make_plan(), make_frame(), tmp_path / "without")
    for name in ("table.csv", "table.md", "figure.png"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    assert (
        "Time" not in (tmp_path / "without" / "README.md").read_text()
        and not (tmp_path / "without" / "time.png").exists()
    )
    render(make_plan(), frame, tmp_path)  # a report that does not want times any more
    assert not list(tmp_path.glob("time.*"))


@pytest.mark.usefixtures("png_only")
def test_the_figure_of_a_claim_about_times_shows_them(tmp_path):
    """The picture that other reports have beside that of their metric."""
    frame = pd.concat([make_frame(), make_frame(metric="seconds", value=lambda arm, seed, x: x * (1 + seed))])
    lines, config = ["gamma.seconds[100] < 3 * gamma.seconds[50]"], ReportConfig(time="seconds")
    for name, expect in {"apart": [*EXPECT, *lines], "alone": lines}.items():
        render(make_plan(config=config, expect=expect), frame, tmp_path / name)
    apart, alone = tmp_path / "apart", tmp_path / "alone"
    assert (alone / "figure.png").read_bytes() == (apart / "time.png").read_bytes()
    assert not (alone / "time.png").exists()
    page = (alone / "README.md").read_text()
    assert "time.png" not in page and "time.pdf" not in page and "## Time" in page
    first, second = ([chart["name"] for chart in charts(saved.load(folder))] for folder in (apart, alone))
    assert first[0] != second[0] == "Time" and sorted(first) == sorted(second)


@pytest.mark.usefixtures("undrawn")
def test_the_page(tmp_path):
    config = ReportConfig(
        paper_values="armt_text_and_figures", paper_rows=["Fig appendix rewrite", "text: Rewrite"], notes="A note."
    )
    run = {
        "arm": "gamma",
        "seed": 0,
        "key": "0a1b2c3d",
        "status": "FINISHED",
        "run_id": "f00",
        "steps": 3000,
        "stage_steps": [1000, 2000],
        "seconds": 61.7,
    }
    changes = {
        "command": "python run.py e.yaml",
        "provenance": {"git_commit": "0decc7f", "dirty": True, "versions": {"torch": "2.13", "lightning": "2.6.6"}},
    }
    render(
        make_plan(config=config, runs=[run], deviations=["2 layers"], modified=["train.steps=3000"], **changes),
        make_frame(),
        tmp_path,
    )
    page = (tmp_path / "README.md").read_text()
    wanted = [
        "**MODIFIED RUN**",
        "`train.steps=3000`",
        "**REPRODUCED** at scale `cpu`, exploratory (3 seeds)",
        "(https://arxiv.org/abs/2407.04841), Figure 5a",
        "![",
        "figure.png",
    ]
    wanted += [
        "generalisation factor",
        "- averaged over 3 runs",
        "- Fig appendix rewrite ablation (with/without gamma): printed only as an image.",
        "- 2 layers",
        "A note.",
        "3,000 (1,000 + 2,000)",
        "`0a1b2c3d`",
        "`f00`",
    ]
    wanted += ["python run.py e.yaml", "git commit: 0decc7f", "dirty: yes", "torch 2.13, lightning 2.6.6"]
    places = [page.find(text) for text in wanted]
    assert places == sorted(places) and places[0] > 0
    assert page.index("REPRODUCED") < 600 and "`gamma[200] - no_gamma[200] > 0.2`" in page
    render(make_plan(runs=[run | {"broke_down": 2500.0}]), make_frame(), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "the weights before it were tested: gamma (seed 0 after 2,500 steps)." in page
    assert "3,000 (1,000 + 2,000), broke down" in page
    render(make_plan(), make_frame(), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert (
        "broke down" not in page and "MODIFIED" not in page and "Notes" not in page and "No values of the paper" in page
    )


def test_a_failure_leaves_the_old_report(unsaved_figures, tmp_path, monkeypatch):
    render(make_plan(), make_frame(), tmp_path)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(old) == [
        "README.md",
        "figure.pdf",
        "figure.png",
        "figure_column.pdf",
        "report.json",
        "sheet.md",
        "table.csv",
        "table.md",
        "table.tex",
        "verdict.json",
    ]

    def fail(*_):
        raise OSError("no space left on device")

    for broken in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(files.os, broken, fail)
            render(make_plan(scale="gpu"), make_frame(seeds=[0]), tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old


def test_the_state_figure_is_a_file(complete):
    assert {"state.png", "state.pdf"} <= complete.keys()
    assert all(path.stat().st_size > 1000 for name, path in complete.items() if "state" in name)


def test_the_state_figure_comes_and_goes(unsaved_figures, tmp_path):
    without = render(make_plan(), make_frame(), tmp_path).paths
    page = (tmp_path / "README.md").read_text()
    assert "state.p" not in page
    with_state = render(make_plan(config=ReportConfig(state_x="last")), make_frame(), tmp_path).paths
    assert sorted(with_state.keys() - without) == ["state.pdf", "state.png"]
    shown = (tmp_path / "README.md").read_text()
    wanted = [
        "(figure.png)",
        "(state.png)",
        "carries from segment to segment; key-value pairs written: 500.",
        "## Numbers",
        "[state.pdf](state.pdf)",
    ]
    positions = [shown.find(text) for text in wanted]
    assert positions == sorted(positions) and positions[0] > 0
    render(make_plan(), make_frame(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(without)
    assert (tmp_path / "README.md").read_text() == page


def test_the_section_of_the_yaml_is_strict():
    schema = OmegaConf.structured(ReportConfig)
    config = OmegaConf.to_object(
        OmegaConf.merge(schema, {"chance": 0.0625, "paper_values": "armt_text_and_figures", "paper_rows": ["Fig 2b"]})
    )
    assert isinstance(config, ReportConfig) and [
        row["table"][:6] for row in paper_rows(config.paper_values, config.paper_rows)
    ] == ["Fig 2b"]
    for wrong in ({"kind": "pie"}, {"chnce": 1}, {"log_x": "maybe"}, {"state_x": 0.5}, {"state_x": True}):
        with pytest.raises(OmegaConfBaseException):
            OmegaConf.merge(schema, wrong)
    wrong = [
        ({"paper_values": "armt"}, "expected one of armt_table1_babilong"),
        ({"paper_rows": ["Fig 2b"]}, "name the file"),
        ({"state_x": "lst"}, "state_x='lst': expected a tested number without quotes, first or last"),
    ]
    for fields, message in [
        *wrong,
        (
            {"paper_values": "armt_text_and_figures", "paper_rows": ["Fig 9"]},
            "no row of .* starts with 'Fig 9'; tables: text;",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            ReportConfig(**fields)
    with pytest.raises(ValueError, match="log_x: expected values of test_pairs of 0 or more, got -1"):
        make_plan(xs=[-1, 1], config=ReportConfig(log_x=True))
    with pytest.raises(
        ValueError, match="state_x=7: expected one of the tested values 50, 100, 200, 500, first or last"
    ):
        make_plan(config=ReportConfig(state_x=7))
    assert [make_plan(config=ReportConfig(state_x=x)).state_x for x in (None, "first", "last", 100)] == [
        None,
        50,
        500,
        100,
    ]


@pytest.mark.usefixtures("undrawn")
def test_a_verdict_says_how_far_it_reaches(tmp_path):
    for paper_x, scope in [(None, ""), (500, ""), (400, ""), (128000, ", tested up to 500 (paper: 128,000)")]:
        found = render(make_plan(paper_x=paper_x), make_frame(), tmp_path)
        scope = f", exploratory (3 seeds){scope}"
        assert f"**REPRODUCED** at scale `cpu`{scope}\n" in (
            tmp_path / "README.md"
        ).read_text() and found.text.endswith(f"\nREPRODUCED{scope}")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("name", "seeds", "told"), [("a", 4, True), ("a", 5, False), ("a_ablation", 9, True)])
def test_too_few_seeds_are_told(tmp_path, name, seeds, told):
    plan = make_plan(seeds=range(seeds), experiment=name)
    assert render(plan, make_frame(seeds=range(seeds)), tmp_path).scope == f", exploratory ({seeds} seeds)" * told
    assert render(plan, make_frame(seeds=[0]), tmp_path).text.partition("\nINCOMPLETE")[2].startswith("; missing")


@pytest.mark.usefixtures("undrawn")
def test_words_for_people(tmp_path):
    """Title, level of evidence and caveats are the first lines; arms have labels where people read, and their ids in
    table.csv, beside settings and runs."""
    caveats = ["Chosen on test-like data: the **decay**.", "One seed."]
    words = {"title": "What gamma is for", "labels": {"gamma": "with gamma"}, "evidence": "toy"}
    plan = make_plan(config=ReportConfig(caveats=caveats), settings={"gamma": "`a`", "no_gamma": "`b`"}, **words)
    render(plan, make_frame(), tmp_path)
    page, found = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "verdict.json").read_text())
    lines = [line for line in page.splitlines() if line]
    assert lines[:2] == ["# What gamma is for · toy", "Experiment `armt_ablation_gamma`"]
    assert lines[2].startswith("**REPRODUCED** at scale `cpu` (toy), exploratory (3 seeds)")
    assert lines[3:6] == [f"> {caveats[0]}", ">", f"> {caveats[1]}"]
    assert (found["title"], found["evidence"], found["scope"]) == (words["title"], "toy", "exploratory (3 seeds)")
    table, rows = (tmp_path / "table.md").read_text(), (tmp_path / "table.csv").read_text()
    assert "| with gamma " in table and "| no_gamma " in table and "| gamma " not in table
    assert "gamma,50," in rows and "with gamma" not in rows
    assert "| with gamma | `gamma` " in page and "| no_gamma " in page
    render(make_plan(settings={"gamma": "`a`"}), make_frame(), tmp_path)
    assert (tmp_path / "README.md").read_text().startswith("# armt_ablation_gamma\n")


@pytest.mark.usefixtures("undrawn")
def test_the_page_has_claims_requirements_and_properties_apart(tmp_path):
    lines = {"expect": [EXPECT[0], "no_gamma[100] > 0.3"], "requires": ["gamma[50] > 0.9"], "verify": ["gamma[50] > 0"]}
    found = render(make_plan(**lines), make_frame(), tmp_path)
    head = (tmp_path / "README.md").read_text().partition("Every seed and metric")[0]
    reason = found.claims[1].reason
    wanted = [
        f"**INCONCLUSIVE** at scale `cpu`, exploratory (3 seeds). Undecided: `no_gamma[100] > 0.3` ({reason}).",
        "| expected ",
        "| margin ",
        "0.631, 97.5 % interval 0.",
        "| undecided |",
        "10,000 draws over seeds alone",
        "Required before the claim can be judged",
        "| `gamma[50] > 0.9` | 0.991 > 0.9 ✓ | yes ",
        "Verified properties",
        "| `gamma[50] > 0` | 0.991 > 0 ✓ | yes ",
    ]
    places = [head.find(text) for text in wanted]
    assert places == sorted(places) and places[0] > 0, dict(zip(wanted, places, strict=True))
    assert "requirement gamma[50] > 0.9:  0.991 > 0.9 ✓\n" in found.text and "(margin 0.631, 97.5 % inter" in found.text


@pytest.mark.usefixtures("undrawn")
def test_arms_in_the_words_of_the_yaml(tmp_path):
    """What all arms share is left out, what one of them says is shown of all that have it, values are those of the
    runs, a run that weights come from is named."""
    model = {"name": "armt", "gamma": "clip", "layers": 2, "heads": 4}
    models = {"armt": model, "raw": model | {"gamma": "raw"}, "mamba": {"name": "mamba", "layers": 4, "state_dim": 16}}
    inits = {"armt": "", "raw": {"run": "armt"}, "mamba": {"decoder": "gpt2"}}
    runs = [
        RunSpec("e", "cpu", arm, "", seed, models[arm], {"pairs": 8}, {"init": inits[arm], "lr": 0.1})
        for arm in models
        for seed in (0, 1)
    ]
    own = {"armt": {}, "raw": {"train.init": inits["raw"], "model.gamma?": "raw", "task.pairs": 8}}
    own["mamba"] = {"model": models["mamba"], "train.init": inits["mamba"]}
    settings = arm_settings(own, runs)
    assert (
        settings["armt"] == "`model.name: armt, model.gamma: clip, model.layers: 2`"
        and settings["raw"] == "`model.name: armt, model.gamma: raw, model.layers: 2`, starts from `e/armt`"
    )
    assert settings["mamba"] == "`model.name: mamba, model.layers: 4, model.state_dim: 16, train.init: {decoder: gpt2}`"
    render(make_plan(settings=settings), make_frame(), tmp_path)
    section = (
        (tmp_path / "README.md").read_text().partition("## Arms\n\n")[2].partition("\n\n## Numbers")[0].splitlines()
    )
    assert [line.split("|")[1].strip() for line in section] == [
        "arm",
        section[1].split("|")[1].strip(),
        *settings,
    ] and settings["raw"] in section[3]


def test_importing_report_loads_nothing_heavy():
    heavy = {"torch", "lightning", "mlflow", "pandas", "numpy", "matplotlib", "omegaconf"}
    subprocess.run(
        [sys.executable, "-c", f"import sys, lit_memory.report; assert not {heavy!r} & set(sys.modules)"], check=True
    )


@pytest.mark.usefixtures("undrawn")
def test_fewer_samples_at_some_values(tmp_path):
    """The table says how many there are."""
    plan = make_plan()
    plan = dataclasses.replace(plan, runs=[run | {"samples": [200, 200, 50, 10]} for run in plan.runs])
    table = render(plan, make_frame(), tmp_path).table
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert [row[5] for row in rows[:1] + rows[2:]] == ["samples", "200, 200, 50, 10", "200, 200, 50, 10"]


def test_the_plan_that_a_report_gets(tmp_path):
    """How far the paper tests, where that is another scale; values of an arm as its scale and its grid have them."""

    lines = {"requires": ["a[0] > 0"], "verify": ["a[1] > 0"]}

    def report_plan(name, scale):
        whole = load(EXPERIMENTS / f"{name}.yaml")
        specs = whole.at(scale).plan()
        sweep = Sweep(Options(name), whole, dataclasses.replace(whole.at(scale), **lines), specs, specs, {}, tmp_path)
        point = "lr0.003-weight_decay0.001"
        return reporting.report_plan(WorkList(sweep), [spec for spec in specs if spec.point in ("", point)])

    plan = report_plan("memreasoner_babilong", "cpu")
    assert (plan.expect, plan.lines | lines) == (plan.lines["expect"], plan.lines)
    assert (
        plan.paper_x == 128000
        and plan.settings["memreasoner_iu"]
        == "`model.name: memreasoner, model.update_lines: 6, task.layout: lines, task.segment_len: 16, "
        "task.margin: 48, model.layers: 2`, starts from `memreasoner_babi/memreasoner`"
    )
    assert report_plan("armt_rwkv", "paper").paper_x is None is report_plan("tarm_stability", "cpu").paper_x
    assert report_plan("armt_rwkv", "cpu").settings == {
        "armt": "`model.name: armt, train.lr: 0.001, train.weight_decay: 0.1`",
        "shared": "`model.name: rwkv, train.lr: 0.001, train.weight_decay: 0.1`",
        "tuned": "`model.name: rwkv, train.lr: 0.003, train.weight_decay: 0.001`",
    }
