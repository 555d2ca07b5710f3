"""The project's experiments by name, and what their reports say."""

import functools
import json
from pathlib import Path

import pytest

from lit_memory.cli import main
from lit_memory.plan import reading
from lit_memory.plan.errors import ConfigError
from lit_memory.report import catalogue
from lit_memory.report.catalogue import find_experiment, list_experiments
from lit_memory.run import display, worklist
from lit_memory.run.options import parse_options
from lit_memory.run.sweep import Sweep
from lit_memory.run.worklist import WorkList
from lit_memory.util.provenance import cores

ROOT = Path(__file__).parents[1]
LIST_ONCE = functools.cache(list_experiments)
"""Reading all experiments takes seconds."""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A project with one experiment, and a working folder beside it with files of its own."""
    monkeypatch.setattr(catalogue, "PROJECT", tmp_path / "project")
    monkeypatch.setattr(catalogue, "EXPERIMENTS", tmp_path / "project/experiments")
    monkeypatch.setattr(reading, "EXPERIMENTS", tmp_path / "project/experiments")
    for folder, names in {"project/experiments": ["gamma", "both"], "cwd": ["mine", "both"], "cwd/gamma": []}.items():
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / folder / f"{name}.yaml").touch()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("mine.yaml", "mine.yaml"),
        ("mine", "mine.yaml"),
        ("both", "both.yaml"),
        ("gamma", "PROJECT/gamma.yaml"),
        ("gamma.yaml", "PROJECT/gamma.yaml"),
        ("no/gamma.yaml", "no/gamma.yaml"),
    ],
)
def test_a_name_leads_to_a_file(folders, text, found):
    """A file of the working folder comes first; a folder is no file."""
    assert find_experiment(text) == Path(found.replace("PROJECT", str(folders / "project/experiments")))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gama", "did you mean 'gamma'?"),
        ("gama.yaml", "did you mean 'gamma.yaml'?"),
        ("mnie.yaml", "did you mean 'mine.yaml'?"),
        ("x", "expected a file, or a name that --list shows"),
    ],
)
def test_the_error_of_a_wrong_name_has_the_nearest(folders, text, hint):
    with pytest.raises(ConfigError) as caught:
        find_experiment(text)
    assert str(caught.value) == f"{text}: no such file; {hint}"


@pytest.mark.parametrize("folder", [ROOT, ROOT / "tests"])
@pytest.mark.parametrize("name", ["armt_ablation_gamma", "armt_ablation_gamma.yaml"])
def test_the_command_takes_a_name(name, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main([name, "--root", str(tmp_path), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("armt_ablation_gamma (scale cpu): 20 runs: 20 new")


RUNS = [{"arm": "a", "seconds": 90.0}, {"arm": "b", "seconds": 30.5}]


@pytest.mark.parametrize(
    ("report", "row"),
    [
        (
            {"verdict": "REPRODUCED", "evidence": "toy", "missing": [], "runs": RUNS},
            ("REPRODUCED", "toy", 120.5),
        ),
        (
            {"verdict": "INCOMPLETE", "missing": ["a seed 0"], "runs": [RUNS[0] | {"seconds": None}, RUNS[1]]},
            ("INCOMPLETE", "", 30.5),
        ),
        ({"verdict": "NOT REPRODUCED", "missing": []}, ("NOT REPRODUCED", "", 0)),
        (None, ("", "", 0)),
    ],
    ids=["complete", "incomplete", "marks", "none"],
)
def test_the_list_has_what_the_reports_say(folders, report, row):
    """``both`` takes the paper over from ``gamma``."""
    (folders / "project/experiments/gamma.yaml").write_text("paper: {title: A paper, item: Figure 1, claim: one}")
    (folders / "project/experiments/both.yaml").write_text("extends: gamma\npaper: {claim: another}")
    (folders / "project/reports/gamma").mkdir(parents=True)
    if report is not None:
        (folders / "project/reports/gamma/verdict.json").write_text(json.dumps(report))
    assert list_experiments() == [
        ("both", "A paper, Figure 1", "", "", 0),
        ("gamma", "A paper, Figure 1", *row),
    ]


def test_the_time_of_the_list_has_all_points_of_a_grid(folders):
    (folders / "project/experiments/gamma.yaml").write_text("paper: {title: A paper, item: Figure 1, claim: one}")
    report = folders / "project/reports/gamma"
    report.mkdir(parents=True)
    (report / "verdict.json").write_text(json.dumps({"verdict": "REPRODUCED", "runs": RUNS}))
    grid = [{"arm": "a", "seconds": 60, "threads": 2}, {"arm": "a", "seconds": None}]
    (report / "report.json").write_text(json.dumps({"grid": grid, "runs": RUNS}))
    assert list_experiments()[-1][-1] == 120 + 30.5  # an arm has no grid


def test_the_list_has_another_scale_where_the_first_has_no_report(folders):
    (folders / "project/experiments/gamma.yaml").write_text("paper: {title: A paper, item: Figure 1, claim: one}")
    report = folders / "project/reports/gamma"
    (report / "gpu").mkdir(parents=True)
    (report / "gpu/verdict.json").write_text(json.dumps({"verdict": "REPRODUCED"}))
    (report / "gpu/report.json").write_text(json.dumps({"runs": RUNS[:1]}))
    assert list_experiments()[-1][2:] == ("REPRODUCED", "gpu", 90)
    (report / "verdict.json").write_text(json.dumps({"verdict": "INCONCLUSIVE"}))
    assert list_experiments()[-1][2:] == ("INCONCLUSIVE", "", 0)


def test_papers_of_the_list(folders):
    """A file may have none; what is there must be one."""
    (folders / "project/experiments/gamma.yaml").write_text("a: 1")
    (folders / "project/experiments/both.yaml").write_text("extends: gamma")
    assert list_experiments() == [("both", "", "", "", 0), ("gamma", "", "", "", 0)]
    (folders / "project/experiments/both.yaml").write_text("paper: 1")
    with pytest.raises(ConfigError, match=r"both\.yaml: paper: 1: expected a mapping"):
        list_experiments()


@pytest.mark.parametrize("argv", [["--list"], ["armt_ablation_gamma", "--list"]])
def test_the_command_lists_all_experiments(argv, capsys, monkeypatch):
    monkeypatch.setattr(display, "list_experiments", LIST_ONCE)
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["experiment", *(path.stem for path in sorted((ROOT / "experiments").glob("*.yaml")))]
    (gamma,) = (line for line in lines if line.startswith(" armt_ablation_gamma "))
    report = json.loads((ROOT / "reports/armt_ablation_gamma/verdict.json").read_text())
    minutes = f"{sum(run['seconds'] for run in report['runs']) / 60 / cores():.0f}"
    assert gamma.split()[1:4] == [report["verdict"], report.get("evidence", "–"), minutes]


@pytest.mark.parametrize("name", ["armt_mamba_segments", "larimar_needle_depth", "tarm_stability"])
def test_the_list_and_the_plan_agree_on_the_time(name, tmp_path):
    """With as many runs at a time as there are cores; the plan counts the runs that these start from as well."""
    work = WorkList(Sweep.prepare(parse_options([name, "--root", str(tmp_path), "--jobs", str(cores())])))
    own = [spec for spec in work.todo() if spec.experiment == name]
    listed = next(seconds for listed, *_, seconds in LIST_ONCE() if listed == name) / cores()
    assert work.seconds_left(own) == pytest.approx(listed, rel=1e-6)


@pytest.mark.parametrize(("steps", "seconds"), [(900, 60.0), (0, None)])
def test_a_report_tells_of_the_time_of_runs_that_trained_as_well(steps, seconds, tmp_path, monkeypatch):
    """A report of before, whose runs tested weights of others, says nothing about training some."""
    name = "armt_mamba_segments"
    report = tmp_path / "reports" / name / "verdict.json"
    report.parent.mkdir(parents=True)
    work = WorkList(Sweep.prepare(parse_options([name, "--root", str(tmp_path)])))
    spec = work.todo()[0]
    report.write_text(json.dumps({"runs": [{"arm": spec.arm, "seed": 0, "steps": steps, "seconds": 60.0}]}))
    monkeypatch.setattr(worklist, "PROJECT", tmp_path)
    assert work.seconds(spec) == seconds
