"""The command: flags, exit codes, plans, report folders, and whole sweeps with real processes."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import records
import stand_in
import yaml
from rich.console import Console

from lit_memory import cli
from lit_memory.cli import main
from lit_memory.plan.measured import x_values
from lit_memory.registry import model_size
from lit_memory.run.display import LiveLines, duration, plan_table
from lit_memory.run.journal import Journal, read
from lit_memory.run.launchers import base
from lit_memory.run.launchers import local as launch
from lit_memory.run.launchers.base import Child, Interrupted
from lit_memory.run.launchers.local import LocalLauncher
from lit_memory.run.options import Options, parse_options, parser, short
from lit_memory.run.reporting import origin, report_plan
from lit_memory.run.sweep import Sweep
from lit_memory.run.tracking import Run, Tracker
from lit_memory.run.worklist import WorkList
from lit_memory.util.provenance import cache_folder

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
RUN = Path(__file__).parents[1] / "run.py"
COLUMNS = ["arm", "seed", "parameters", "state floats", "steps", "key", "status", "time"]
REPORT = [
    *["README.md", "figure.pdf", "figure.png", "figure_column.pdf", "report.json", "scores.npz", "sheet.md"],
    *["table.csv", "table.md", "table.tex", "verdict.json"],
]


def prepare(*argv) -> Sweep:
    return Sweep.prepare(parse_options([str(a) for a in argv]))


def known(sweep) -> WorkList:
    """The work list of a sweep whose runs have finished, as far as MLflow knows."""
    sizes = {spec.key: {k: str(v) for k, v in model_size(spec.model).items()} for spec in sweep.specs}
    return WorkList(sweep, {key: Run("id", "FINISHED", params) for key, params in sizes.items()})


def call(*argv) -> int:
    return main([str(a) for a in argv])


# Flags and errors


def test_the_flags_are_frozen():
    """A new flag needs a good reason; a reader has to remember them."""
    flags = {(action.option_strings or [action.dest])[-1]: action.nargs for action in parser()._actions}
    assert flags == {
        "--help": 0,
        "experiment": "?",
        "overrides": "*",
        "--scale": None,
        "--arms": None,
        "--seeds": None,
    } | {
        "--jobs": None,
        "--launcher": None,
        "--launch": None,
        "--root": None,
        "--bundle": None,
        "--detach": 0,
        "--cancel": 0,
        "--dry-run": 0,
        "--report": 0,
        "--fresh": 0,
        "--redraw": 0,
        "--list": 0,
        "--gallery": 0,
        "--new": None,
    }
    assert all(action.help for action in parser()._actions)


BAD = {
    "no file": ([], "command line: EXPERIMENT.yaml: missing; expected a file, or a name that --list shows"),
    "missing file": (["no.yaml"], "no.yaml: no such file"),
    "unknown flag": (["FILE", "--sclae", "x"], "command line: unrecognized arguments: --sclae"),
    "abbreviated flag": (["FILE", "--arm", "a"], "command line: unrecognized arguments: --arm"),
    "flag without value": (["FILE", "--scale"], "command line: argument --scale: expected one argument"),
    "unknown scale": (["FILE", "--scale", "gpu"], "--scale: unknown scale 'gpu'"),
    "unknown arm": (["FILE", "--arms", "a,bb"], "command line: --arms: unknown value 'bb'; did you mean 'b'?"),
    "no arm": (["FILE", "--arms", ""], "command line: --arms: unknown value ''; expected one of a, b"),
    "unknown seed": (["FILE", "--seeds", "0,7"], "command line: --seeds: unknown value '7'; expected one of 0"),
    "seed that is no number": (["FILE", "--seeds", "x"], "command line: --seeds: unknown value 'x'; expected one of 0"),
    "no jobs": (["FILE", "--jobs", "0"], "command line: --jobs: 0: expected at least 1"),
    "jobs that are no number": (["FILE", "--jobs", "x"], "command line: argument --jobs: invalid int value: 'x'"),
    "root that is a file": (["FILE", "--root", "FILE"], "is a file; expected a folder"),
    "override without a value": (["FILE", "model.width"], "command line: model.width: expected key=value"),
    "unknown override": (
        ["FILE", "--dry-run", "model.widht=8"],
        "command line: model.widht: unknown key; did you mean 'width'?",
    ),
    "override of a field that another model has": (
        ["FILE", "--dry-run", "model.state_dim=8"],
        "; model.state_dim? counts where it is known",
    ),
    "gallery of one experiment": (
        ["FILE", "--gallery"],
        "command line: --gallery: shows all reports, so leave ",
    ),
    "gallery with a flag": (
        ["--gallery", "--dry-run"],
        "command line: --gallery: shows all reports, so leave --dry-run out",
    ),
    "redraw with a flag": (
        ["FILE", "--redraw", "--scale", "cpu"],
        "command line: --redraw: draws the reports of all scales again, so leave --scale out",
    ),
    "gallery without reports": (
        ["--gallery"],
        "root/reports: no report that can be shown; expected some that run.py",
    ),
    "markup": (["FILE", "[/red]=1"], "command line: [/red]=1: expected key=value"),
    "two lines": (["FILE", "a\nb"], "command line: a b: expected key=value"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(write, tmp_path, monkeypatch, capsys, name):
    argv, expected = BAD[name]
    file, root = write(), tmp_path / "root"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_MEMORY_ROOT", str(root))
    assert main([file if a == "FILE" else a for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and expected in err
    assert os.listdir(tmp_path) == ["tiny.yaml"]


@pytest.mark.parametrize(
    "extra", [["no.yaml"], ["tiny.yaml", "--sclae"], ["tiny.yaml", "train.lr=-1"]], ids=["file", "flag", "value"]
)
def test_bad_input_in_a_real_process(write, tmp_path, extra):
    write()
    run = subprocess.run(
        [sys.executable, str(RUN), *extra, "--root", "root"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith("error: ") and "Traceback" not in run.stderr and os.listdir(tmp_path) == ["tiny.yaml"]


@pytest.mark.parametrize("flags", [["train.accelerator=cuda"], ["--scale", "gpu"]])
def test_a_run_without_its_gpu_does_not_start(write, tmp_path, monkeypatch, capsys, no_training, flags):
    """One line and nothing on the disk; what can be planned here may run elsewhere."""
    monkeypatch.setattr("lit_memory.run.sweep.gpus", lambda: 0)
    argv = [write(scales={"cpu": {}, "gpu": {"train.accelerator": "cuda"}}), "--root", tmp_path / "root", *flags]
    assert call(*argv, "--dry-run") == 0 and call(*argv) == 2
    place = "(scale gpu, arm a)" if "gpu" in flags else "(scale cpu, arm a, with train.accelerator=cuda)"
    assert capsys.readouterr().err.endswith(
        f"{place}: train.accelerator: 'cuda': torch finds no GPU on this machine; expected cpu, or another --scale\n"
    )
    assert os.listdir(tmp_path) == ["tiny.yaml"]


def test_help(capsys):
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert "--dry-run" in out and "key=value" in out and err == ""


# Plans


def test_a_dry_run_shows_how_a_state_grows(write, tmp_path, capsys, no_training):
    arms = {"a": {}, "c": {"model": {"name": "rmt_r", "layers": 1, "width": 16, "heads": 2, "memory_tokens": 2}}}
    assert call(write(arms=arms, expect=["c[2] >= 0"]), "--root", tmp_path / "root", "--dry-run") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith((" a ", " c "))]
    assert ["32 + 64 a segment" in row for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("width", "left_out"), [(90, ()), (70, ("state floats",)), (60, ("state floats", "parameters"))]
)
def test_a_plan_shows_whole_words_in_a_narrow_terminal(width, left_out, write, tmp_path):
    file = write(arms={"a": {}}, grid={"train.weight_decay": [0.125, 0.25]}, expect=["a[2] >= 0"])
    sized = Console(file=io.StringIO(), width=width)
    sized.print(plan_table(WorkList(prepare(file, "--root", tmp_path / "root")), width), soft_wrap=True)
    rows = sized.file.getvalue().splitlines()
    header, first, *_ = (re.split(" {2,}", row.strip()) for row in rows)
    assert header == [name for name in COLUMNS if name not in left_out]
    assert "…" not in "".join(rows) and first[0] == "a weight_decay0.125"


def test_a_plan_in_a_file_has_all_columns(write, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    file = write(arms={"a": {}}, grid={"train.weight_decay": [0.125, 0.25]}, expect=["a[2] >= 0"])
    assert call(file, "--root", tmp_path / "root", "--dry-run") == 0
    _, header, first, _ = (re.split(" {2,}", row.strip()) for row in capsys.readouterr().out.splitlines())
    assert header == COLUMNS and first[0] == "a weight_decay0.125" and len(first) == len(COLUMNS)


def test_what_a_state_grows_by(write, tmp_path, capsys, no_training):
    """A memory of lines grows by lines, in plans and in reports."""
    lines = {
        "name": "larimar",
        "width": 16,
        "heads": 2,
        "layers": 1,
        "encoder_layers": 1,
        "latent_width": 8,
        "line_tokens": 32,
    }
    file = write(
        base={"model": lines, "task": {"name": "passkey", "books": 1}},
        arms={"a": {}},
        report={"x": "test_tokens", "y": "recall"},
        expect=[],
    )
    assert call(file, "--root", tmp_path / "root", "--dry-run") == 0
    assert "8 + 8 a line" in " ".join(capsys.readouterr().out.split())
    sweep = prepare(file, "--root", tmp_path / "root")
    assert [run["growth_unit"] for run in report_plan(known(sweep), sweep.specs).runs] == ["line"]


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        (["train.steps=7"], ["stages with steps of their own: 1, 3; train.stages=[] trains in one"]),
        (["train.steps=7", "train.stages=[]"], []),
        (["train.steps=7", "--arms", "a"], []),
        (["train.lr=1"], []),
    ],
)
def test_a_plan_tells_which_stages_keep_their_steps(write, tmp_path, capsys, no_training, flags, noted):
    arms = {"a": {}, "b": {"train.stages": [{"steps": 2}, {"task.pairs": 1}, {"steps": 3}]}}
    assert call(write(arms=arms), "--root", tmp_path / "root", "--dry-run", *flags) == 0
    assert [line for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith(" ")] == noted


@pytest.mark.parametrize("uri", ["", "sqlite:///{root}/elsewhere.db"])
def test_a_dry_run_creates_nothing(write, tmp_path, monkeypatch, capsys, no_training, uri):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(root=tmp_path))
    assert call(write(seeds=[0, 3]), "--root", tmp_path / "root", "--dry-run", "--fresh") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny (scale default): 4 runs: 4 new"
    rows = [line.split() for line in lines if line.startswith((" a ", " b "))]
    keys = [spec.key[:8] for spec in prepare(write(seeds=[0, 3])).specs]
    assert [(r[0] + r[1], *r[4:7]) for r in rows] == [
        (name, "6", key, "new") for name, key in zip(["a0", "a3", "b0", "b3"], keys, strict=True)
    ]
    size = model_size(prepare(write()).specs[0].model)
    assert {(r[2].replace(",", ""), r[3].replace(",", "")) for r in rows} == {
        (str(size["parameters"]), str(size["state_floats"]))
    }
    assert os.listdir(tmp_path) == ["tiny.yaml"]


@pytest.mark.parametrize(
    ("flags", "runs"),
    [
        ([], "a0 a3 b0 b3"),
        (["--arms", "b"], "b0 b3"),
        (["--arms", "b,a"], "a0 a3 b0 b3"),
        (["--seeds", "3"], "a3 b3"),
        (["--arms", "a", "--seeds", "3"], "a3"),
    ],
)
def test_arms_and_seeds_select_runs(write, flags, runs):
    sweep = prepare(write(seeds=[0, 3]), *flags)
    assert " ".join(f"{s.arm}{s.seed}" for s in sweep.selected) == runs and len(sweep.specs) == 4


def test_the_report_has_the_remarks_of_the_runs(write, root):
    """Each once; an unfinished run has no say."""
    sweep, tracker = prepare(write(seeds=[0, 1]), "--root", root), Tracker(root)
    parent = tracker.parent("tiny", "default", {})
    for spec, line in zip(sweep.specs, ("One.\nTwo.", "Two.", "Three."), strict=False):
        run_id = tracker.start(spec, None, parent, {}, {})
        tracker.tag(run_id, {"remarks": line})
        tracker.end(run_id, "KILLED" if line == "Three." else "FINISHED")
    work = WorkList(sweep)
    work.refresh(tracker)
    assert report_plan(work, sweep.specs).deviations == ["One.", "Two."]


def test_the_headline_counts_what_is_finished_and_what_is_left(write, root, capsys):
    file = write(seeds=[0, 1])
    tracker = Tracker(root)
    finished, started, failed = prepare(file).specs[:3]
    parent = tracker.parent("tiny", "default", {})
    records.finish(
        tracker,
        tracker.start(finished, None, parent, {}, {}),
        [("exact_match", 2, 0.5)],
        {"steps": 6, "seconds": 120.0},
    )
    tracker.end(tracker.start(started, None, parent, {}, {}), "KILLED")
    tracker.end(tracker.start(failed, None, parent, {}, {}), "FAILED")
    started.folder(root).mkdir(parents=True)
    (started.folder(root) / "step-00000003.ckpt").touch()
    for flags, expected in {
        (): "4 runs: 1 finished, 1 failed, 1 to resume, 1 new; about 2 min",
        ("--seeds", "0"): "2 runs: 1 finished, 1 failed",
        ("--arms", "a", "--seeds", "1"): "1 run: 1 to resume; about 2 min",
        ("train.steps=7",): "4 runs: 4 new",
    }.items():
        assert call(file, "--root", root, "--dry-run", "--jobs", "3", *flags) == 0
        line = capsys.readouterr().out.splitlines()[0]
        where = ", modified: train.steps=7" if "train.steps=7" in flags else ""
        assert line == f"tiny (scale default{where}): {expected}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (3, "3 s"),
        (89, "89 s"),
        (90, "2 min"),
        (240, "4 min"),
        (5399, "90 min"),
        (5400, "1.5 h"),
        (36000, "10.0 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ([], "tiny"),
        (["--scale", "cpu"], "tiny"),
        (["--arms", "a"], "tiny"),
        (["--scale", "paper"], "tiny/paper"),
        (["train.steps=7"], "tiny/cpu-modified-a2941f"),
        (["train.steps=8"], "tiny/cpu-modified-22c282"),
        (["train.steps=7", "train.lr=1e-2"], "tiny/cpu-modified-23e8a7"),
        (["train.lr=0.01", "train.steps=7"], "tiny/cpu-modified-23e8a7"),
        (["--scale", "paper", "train.steps=7"], "tiny/paper-modified-a2941f"),
    ],
)
def test_other_scales_and_modified_runs_have_their_own_report(write, tmp_path, flags, folder):
    """One for each set of changes, in whatever order; below all of them one for what misses runs."""
    folders = prepare(write(scales={"cpu": {}, "paper": {}}), "--root", tmp_path, *flags).report_folders
    assert folders.complete == tmp_path / "reports" / folder
    name = "cpu" if folder == "tiny" else folders.complete.name
    assert folders.incomplete == tmp_path / "reports" / "tiny" / f"{name}-incomplete"


@pytest.mark.parametrize(("state_x", "segments"), [(None, None), ("first", 2), ("last", 4), (4, 4)])
def test_a_state_that_grows_is_reported_as_it_is_at_the_chosen_x(write, tmp_path, state_x, segments):
    arms = {"a": {"model": {"name": "rmt_r", "width": 16, "heads": 2, "memory_tokens": 1}}, "b": {}}
    sweep = prepare(write(arms=arms, report={"x": "test_pairs", "state_x": state_x}), "--root", tmp_path)
    plan = report_plan(known(sweep), sweep.specs)
    assert [run.get("segments") for run in plan.runs if run["arm"] == "a"] == [segments] * len(sweep.experiment.seeds)
    assert plan.state_x == segments and plan.state_size("a") == (16 + segments * 32 if segments else None)
    assert not any("segments" in run for run in plan.runs if run["arm"] == "b")


def test_the_axis_of_a_report_is_made_once(write, tmp_path, monkeypatch):
    """Not anew for every run."""
    arms = {"a": {"model": {"name": "rmt_r", "width": 16, "heads": 2, "memory_tokens": 1}}}
    report = {"x": "test_pairs", "state_x": "last"}
    sweep = prepare(write(arms=arms, expect=[], seeds=[0, 1, 2], report=report), "--root", tmp_path)
    seen = []
    monkeypatch.setattr("lit_memory.run.sweep.x_values", lambda *arguments: seen.append(1) or x_values(*arguments))
    assert report_plan(known(sweep), sweep.specs).x_values == [2, 4] and seen == [1]


@pytest.mark.parametrize(
    ("flags", "jobs"),
    [
        ([], 4),
        (["--seeds", "0"], 2),
        (["train.threads=4"], 2),
        (["train.threads=16"], 1),
        (["train.accelerator=auto"], 1),
        (["--jobs", "3"], 3),
        (["--jobs", "99"], 6),
    ],
)
def test_jobs_follow_the_cores(write, monkeypatch, flags, jobs):
    monkeypatch.setattr("lit_memory.run.sweep.cores", lambda: 8 if "train.threads=4" in flags else 4)
    assert prepare(write(seeds=[0, 1, 2]), *flags).jobs == jobs


def test_the_root_is_the_flag_then_the_environment_then_the_project(write, tmp_path, monkeypatch):
    monkeypatch.delenv("LIT_MEMORY_ROOT", raising=False)
    assert prepare(write()).root == RUN.parent
    monkeypatch.setenv("LIT_MEMORY_ROOT", str(tmp_path / "a"))
    assert prepare(write()).root == tmp_path / "a" and prepare(write(), "--root", tmp_path / "b").root == tmp_path / "b"


# Whole sweeps


def test_data_and_caches_of_the_command_lie_below_its_root(write, tmp_path, monkeypatch):
    """As those of its runs do; another command of the same process has its own."""
    monkeypatch.setenv("LIT_MEMORY_ROOT", str(tmp_path / "other"))
    seen = []
    monkeypatch.setattr("lit_memory.cli.run", lambda *arguments: seen.append(cache_folder()) or 0)
    for flags in (["--root", str(tmp_path / "a")], []):
        assert main([write(), *flags]) == 0
    assert seen == [tmp_path / "a/data/cache", tmp_path / "other/data/cache"]


def statuses(root):
    """Arm -> status of all runs, and the status of the parent."""
    client = Tracker(root).client
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return {r.data.tags.get("lit.arm", "parent"): r.info.status for r in runs if "lit.kind" in r.data.tags}


def files(root):
    return sorted(path.name for path in (root / "reports" / "tiny").iterdir())


@pytest.mark.slow
def test_a_failing_arm_leaves_the_other_alone(write, root, capsys):
    """In real child processes."""
    file = write(arms={"a": {}, "b": {"train.lr": 1e30}})
    assert call(file, "--root", root, "--jobs", 2) == 1
    out, err = capsys.readouterr()
    assert "✓ a seed 0 finished" in out and "INCOMPLETE; missing: b seed 0 (failed)" in out and files(root) == REPORT
    assert err.startswith("✗ b seed 0 failed") and err.count("\n") == 1
    assert all(
        part in err for part in ("NonFinite: ", "at step 1, stage 1 of 1, arm b, lr 1e+30", "lower train.lr", "log.txt")
    )
    assert statuses(root) == {"parent": "FINISHED", "a": "FINISHED", "b": "FAILED"}
    spec = prepare(file, "--arms", "b").selected[0]
    assert "at step 1, stage 1 of 1, arm b, lr 1e+30" in Tracker(root).find(spec.key).tags["lit.error"]
    assert "NonFinite" in (spec.folder(root) / "log.txt").read_text()


@pytest.mark.usefixtures("unsaved_figures")
def test_a_part_of_a_plan_is_incomplete(write, root, inline, capsys):
    file = write()
    assert call(file, "--root", root, "--arms", "a") == 0
    assert "INCOMPLETE; missing: b seed 0" in capsys.readouterr().out
    assert call(file, "--root", root) == 0
    out = capsys.readouterr().out
    assert (
        "2 runs: 1 finished, 1 new" in out
        and out.count("✓ b seed 0 finished") == out.count(" finished in ") == 1
        and "\nINCONCLUSIVE, exploratory (1 seed)\n" in out
    )


@pytest.mark.usefixtures("unsaved_figures")
@pytest.mark.parametrize("flags", [[], ["train.steps=4"]])
def test_what_misses_runs_leaves_a_complete_report_alone(write, make_root, inline, capsys, flags):
    """As in a clone of the project, whose reports are complete while its MLflow knows no run."""
    file, root, clone = write(), make_root("root"), make_root("clone")
    assert call(file, "--root", root, "--report", *flags) == 0 and call(file, "--root", root, *flags) == 0
    folders = prepare(file, "--root", clone, *flags).report_folders
    assert not prepare(file, "--root", root, *flags).report_folders.incomplete.exists()
    shutil.copytree(root / "reports", clone / "reports")
    complete = (folders.complete / "verdict.json").read_bytes()
    for part in (["--report"], ["--arms", "a"]):
        capsys.readouterr()
        assert call(file, "--root", clone, *part, *flags) == 0
        out = capsys.readouterr().out
        assert "INCOMPLETE; missing: " in out and f"report   {folders.incomplete}/README.md\n" in out
        assert (folders.complete / "verdict.json").read_bytes() == complete and b"INCOMPLETE" not in complete
        without = {"scores.npz"} if part == ["--report"] else set()  # nothing has run
        assert {path.name for path in folders.incomplete.iterdir()} == {*REPORT} - without
    assert call(file, "--root", clone, *flags) == 0
    assert f"report   {folders.complete}/README.md\n" in capsys.readouterr().out
    assert not folders.incomplete.exists() and json.loads((folders.complete / "verdict.json").read_text())[
        "verdict"
    ] == ("NOT CHECKED" if flags else "INCONCLUSIVE")


@pytest.mark.usefixtures("unsaved_figures")
def test_a_run_that_another_starts_from_is_trained_first_and_once(write, tree, root, tmp_path, inline, capsys):
    """It belongs to its own experiment; what starts from it and trains nothing tests the same weights."""
    first, starts = write(), {"train.init": {"run": "tiny/b"}, "train.steps": 0, "model.gamma": "off"}
    later = tmp_path / "later.yaml"
    later.write_text(
        yaml.safe_dump(tree | {"experiment": "later", "arms": {"y": starts}, "expect": [], "requires": []})
    )
    assert call(later, "--root", root) == 0
    out = capsys.readouterr().out
    assert out.startswith("later (scale default): 1 run: 1 new; 1 of other experiments to train first\n")
    assert (
        out.index("✓ tiny/b seed 0") < out.index("✓ y seed 0")
        and statuses(root).items() >= {"b": "FINISHED", "y": "FINISHED"}.items()
    )
    tracker, specs = Tracker(root), [*prepare(first).specs[1:], *prepare(later).specs]
    source, tested = (tracker.find(spec.key) for spec in specs)
    assert tracker.results(source) == tracker.results(tested) and (
        source.metrics["steps"],
        tested.metrics["steps"],
    ) == (6, 0)
    assert (
        source.tags["lit.experiment"] == "tiny" and tested.params["start"] == f"b of tiny, key {source.tags['lit.key']}"
    )
    assert call(first, "--root", root) == 0 and call(later, "--root", root) == 0
    out = capsys.readouterr().out
    assert "2 runs: 1 finished, 1 new" in out and "1 run: 1 finished\n" in out and out.count("finished in") == 1


def test_todo_has_every_run_once_behind_what_it_starts_from(write, tmp_path):
    arms = {"y": {"train.init": {"run": "b"}, "train.steps": 0}, "z": {"train.init": {"run": "b"}}, "b": {}, "c": {}}
    todo = WorkList(prepare(write(arms=arms, expect=[], requires=[], seeds=[0, 1]), "--root", tmp_path)).todo()
    assert [f"{spec.arm}{spec.seed}" for spec in todo] == ["b0", "y0", "b1", "y1", "z0", "z1"]  # c is b


def test_what_starts_from_a_run_that_failed_fails(write, root, inline, capsys):
    arms = {"a": {"train.lr": 1e30}, "y": {"train.init": {"run": "a"}, "train.steps": 0}}
    assert call(write(arms=arms, expect=[]), "--root", root) == 1
    errors = " ".join(capsys.readouterr().err.split())
    assert (
        "✗ a seed 0 failed" in errors
        and "RuntimeError: init: the run that it starts from, a of tiny, seed 0, has not finished" in errors
    )


@pytest.mark.parametrize("flag", ["--report", "--cancel"])
def test_fresh_does_not_go_with_what_trains_nothing(write, root, flag, capsys):
    assert call(write(), "--root", root, "--fresh", flag) == 2
    assert f"--fresh: trains again, and {flag} trains nothing" in capsys.readouterr().err


@pytest.mark.usefixtures("unsaved_figures")
def test_a_mistake_at_the_scale_paper_is_told_before_the_training(write, root, inline, capsys):
    """The report compares with that scale."""
    file = write(scales={"cpu": {}, "paper": {"model.widht": 3}})
    assert main([str(file), "--root", str(root)]) == 2
    assert "(scale paper): model.widht: unknown key" in capsys.readouterr().err
    assert not (root / "checkpoints").exists()


def test_report_draws_and_fresh_trains_again(write, root, inline, capsys, monkeypatch):
    file = write()
    assert call(file, "--root", root, "--report") == 0
    assert "INCOMPLETE" in capsys.readouterr().out and statuses(root) == {"parent": "FINISHED"}
    assert call(file, "--root", root, "train.steps=4") == 0 and call(file, "--root", root) == 0
    specs = prepare(file).specs
    first, table = [Tracker(root).find(s.key).run_id for s in specs], (root / "reports/tiny/table.csv").read_bytes()
    capsys.readouterr()
    assert call(file, "--root", root, "--fresh", "--arms", "a") == 0
    told = capsys.readouterr().out
    assert "1 run: 1 finished; 1 of them to train again" in told and told.count(" finished in ") == 1
    second = [Tracker(root).find(s.key).run_id for s in specs]
    assert (
        first[0] != second[0]
        and first[1] == second[1]
        and Tracker(root).client.get_run(first[0]).data.tags["lit.kind"] == "retired"
    )
    assert (root / "reports/tiny/table.csv").read_bytes() == table
    page = (prepare(file, "--root", root, "train.steps=4").report_folders.complete / "README.md").read_text()
    assert "MODIFIED RUN" in page and "`train.steps=4`" in page


@pytest.mark.parametrize("place", ["checkpoint.clear", "journal.clear", "Tracker.retire"])
def test_fresh_that_is_broken_off(write, root, inline, monkeypatch, unsaved_figures, place):
    """The runs stay finished, or are trained anew: none has the numbers of another one."""
    file = write(arms={"a": {}}, expect=[])
    assert call(file, "--root", root) == 0
    (spec,), tracker = prepare(file).specs, Tracker(root)
    before = tracker.results(tracker.find(spec.key))
    path = spec.folder(root) / "journal.jsonl"
    path.write_text(path.read_text().replace('"test/loss", 2, ', '"test/loss", 2, 99'))
    with monkeypatch.context() as patch:
        module = "tracking" if place.startswith("Tracker") else "worklist"
        patch.setattr(f"lit_memory.run.{module}.{place}", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        assert call(file, "--root", root, "--fresh") == 130
    assert call(file, "--root", root) == 0
    assert tracker.results(tracker.find(spec.key)) == before


def test_a_run_without_a_checkpoint_begins_a_new_journal(write, root, inline, unsaved_figures):
    spec = prepare(write(arms={"a": {}}, expect=[])).specs[0]
    Journal(spec.folder(root)).log({"test/loss": 99.0}, 2)
    assert call(write(arms={"a": {}}, expect=[]), "--root", root) == 0
    assert [value for name, _, value, _ in read(spec.folder(root)).rows if name == "test/loss" and value == 99] == []


def test_fresh_leaves_what_others_start_from(write, tmp_path, root, inline, capsys):
    """A half-trained run of another experiment that a fresh one starts from goes on; nobody has selected it."""
    first = Path(write())
    two = yaml.safe_load(first.read_text()) | {"experiment": "two", "expect": [], "requires": [], "seeds": [0]}
    two["arms"] = {"c": {"train.init": {"run": "tiny/a"}}}
    (first.parent / "two.yaml").write_text(yaml.safe_dump(two))
    work = WorkList(prepare(str(first.parent / "two.yaml"), "--root", root, "--fresh"))
    start, own = work.todo()
    for spec in (start, own):
        Journal(spec.folder(root)).log({"train/loss": 1.0}, 1)
    work.retire(Tracker(root), work.todo())
    assert [bool(read(spec.folder(root)).rows) for spec in (start, own)] == [True, False]


@pytest.mark.parametrize(("flags", "again"), [((), "the same command again"), (("--fresh",), "without --fresh again")])
def test_what_goes_on_is_said_truly(flags, again, make_launch, capsys):
    """``--fresh`` would begin once more."""
    runs = make_launch(["hang"], 1)
    execution = cli.Execution.__new__(cli.Execution)
    execution.console, execution.errors, execution.launcher = Console(), Console(stderr=True, width=200), runs
    execution.work = SimpleNamespace(sweep=SimpleNamespace(options=parse_options(["armt_ablation_gamma", *flags])))

    def interrupt():
        raise Interrupted(signal.SIGINT)

    execution.watch, execution.kill = interrupt, lambda: None
    assert execution.run() == 130
    assert (
        f"interrupted; run the same command {again.removeprefix('the same command ')} to go on"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--list", "--jobs", "0"], "--list: shows all experiments, so leave --jobs out"),
        (["--new", "foo", "--fresh"], "--new: writes a template, so leave --fresh out"),
        (["--new", "foo", "--root", "x"], "--new: writes a template, so leave --root out"),
        (["--list", "--root", "x"], "--list: shows all experiments, so leave --root out"),
        (["--new", ""], "--new: '': expected a name"),
        (["armt_abilities", "--jobs", "0", "--dry-run"], "--jobs: .*armt_abilities.yaml reads the reports of others?"),
        (["armt_abilities", "--launcher", "slurm"], "--launcher: .*reads the reports of other"),
        (
            ["armt_ablation_gamma", "--detach", "--cancel"],
            "--detach: hands runs over, and --cancel ends them; leave one out",
        ),
        (["armt_ablation_gamma", "--bundle", ""], "--bundle: '': expected a file"),
        (["armt_ablation_gamma", "train.steps=3", "train.steps=4"], "train.steps: said twice; expected once"),
        (
            ["armt_ablation_gamma", "model.memory_dim=3", "model.memory_dim?=4"],
            r"model.memory_dim\?: said twice; expected once",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nothing_is_ignored(argv, says, capsys):
    assert main(argv) == 2
    assert re.search(f"command line: {says}", capsys.readouterr().err)


def test_jobs_look_at_every_run(write, monkeypatch):
    """At most threads as there are cores, and one run at a time where any takes a GPU."""
    monkeypatch.setattr("lit_memory.run.sweep.cores", lambda: 8)
    arms = {"a": {}, "b": {"train.threads": 4}}
    assert prepare(write(arms=arms, expect=[])).jobs == 2
    assert prepare(write(arms={"a": {}, "b": {"train.accelerator": "auto"}}, expect=[])).jobs == 1


@pytest.mark.parametrize("name", ["a [old]", "x [/b]"])
def test_paths_are_printed_as_they_are(write, tmp_path, inline, unsaved_figures, capsys, name):
    assert main([str(write()), "--root", str(tmp_path / name), "--report"]) == 0
    assert f"{tmp_path / name}/reports/tiny/README.md" in capsys.readouterr().out


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert short(tmp_path / "a") == str(tmp_path / "a")


# Child processes


@pytest.fixture
def make_launch(monkeypatch, tmp_path):
    """``make_launch(arms, jobs)``: a launcher of stand-ins."""
    monkeypatch.setattr(launch, "run_child", stand_in.run_child)
    monkeypatch.setattr(launch, "GRACE", 2.0)
    monkeypatch.setattr(launch, "preloaded", lambda specs: [])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    common = {"start": None, "experiment": "tiny"}
    yield lambda arms, jobs: LocalLauncher(
        [SimpleNamespace(arm=a, name=a, key=a, **common) for a in arms], jobs, tmp_path, "", {"tiny": ""}, {}
    )
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_events_tell_news_and_how_each_child_ended(make_launch):
    handler, runs, most = signal.getsignal(signal.SIGINT), make_launch(["a", "crash", "b"], 2), 0
    seen = {}
    for child, event in runs.events():
        most = max(most, len(runs.running))
        seen.setdefault(child.spec.arm, []).append(event.get("news", child.process.exitcode))
    assert seen == {
        "a": [True, False, True, 0],
        "b": [True, False, True, 0],
        "crash": [True, False, True, -signal.SIGKILL],
    }
    assert most == 2 and runs.done == runs.total == 3 and signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(("width", "parts"), [(120, ["step 52/200", "loss 0.037"]), (100, ["step 52/200"]), (80, [])])
def test_every_run_has_one_line_that_fits(monkeypatch, width, parts):
    """With the time that it has taken, and where an estimate knows it the time that is left."""
    monkeypatch.setattr(base.time, "monotonic", lambda: 100.0)
    told = {
        "event": "progress",
        "stage": 5,
        "stages": 5,
        "step": 52,
        "steps": 200,
        "loss": 0.037,
        "metric_name": "exact_match",
        "metric": 1.0,
    }
    specs = [
        SimpleNamespace(experiment="tiny", arm=arm, point="", seed=0, key=arm)
        for arm in ("gamma", "memreasoner_iu", "slow")
    ]
    console = Console(width=width, force_terminal=True, no_color=True, highlight=False)
    running = [Child(spec, told, started=40.0) for spec in specs]
    launcher = SimpleNamespace(running=running, waiting=specs[:1], done=2, total=6)
    lines = LiveLines(launcher, "tiny", {"gamma": 180.0, "memreasoner_iu": None, "slow": 30.0})
    with console.capture() as captured:
        console.print(lines.renderable(width))
    common = ["stage 5/5", *parts, "exact_match 1.000"]
    assert [re.split(" {2,}", line.strip()) for line in captured.get().splitlines()] == [
        ["gamma s0", *common, "60 s so far, about 2 min left"],
        ["memreasoner_iu s0", *common, "60 s so far"],
        ["slow s0", *common, "60 s so far"],
        ["2 of 6 done, 1 waiting"],
    ]


def test_what_is_news(monkeypatch):
    """A log gets a line for every stage and phase, and one a minute from each run; a terminal shows all."""
    now = [100.0]
    monkeypatch.setattr(base.time, "monotonic", lambda: now[0])
    child, told = Child(None), []
    for second, message in enumerate(
        ["waiting", "progress 1", "progress 1", "progress 2", "testing", "testing", *["testing"] * 130]
    ):
        event, *stage = message.split()
        now[0] = 100.0 + second
        told += [second] * child.receive({"event": event} | ({"stage": int(stage[0])} if stage else {}))["news"]
    assert told == [0, 1, 3, 4, 64, 124]


def test_a_run_waits_for_the_one_that_it_starts_from(make_launch):
    runs, ended = make_launch(["a", "b", "c", "d"], 4), []
    for spec, start in zip(runs.waiting, (2, None, None, 2), strict=True):
        spec.start = start and runs.waiting[start]
    for child, event in runs.events():
        if event["event"] == "end":
            ended.append(child.spec.arm)
        assert child.spec.arm not in "ad" or "c" in ended
    assert sorted(ended) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_children(make_launch, number):
    """And nobody puts Python's handlers back, which would break off the closing of runs: a second signal ends the
    command at once."""
    runs = make_launch(["hang"], 1)
    with pytest.raises(Interrupted) as caught:
        for _, event in runs.events():
            if event["event"] == "progress" and event["stage"] == 2:
                os.kill(os.getpid(), number)
                next(iter(runs.receive()), None)
    assert caught.value.number == number
    assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    runs.stop()
    assert not any(child.process.is_alive() for child in runs.running)


def test_a_child_that_does_not_end_is_killed(make_launch):
    runs = make_launch(["deaf"], 1)
    with pytest.raises(Interrupted):
        for _, event in runs.events():
            if event.get("stage") == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    runs.stop()
    assert [child.process.exitcode for child in runs.running] == [-signal.SIGKILL]


def test_a_signal_while_a_line_is_printed(make_launch, capsys):
    """The exception then does not pass through the generator that usually ends the children."""

    def fail(child):
        raise Interrupted(signal.SIGINT)

    runs, closed = make_launch(["hang"], 1), []
    execution = cli.Execution.__new__(cli.Execution)
    execution.console, execution.errors, execution.launcher, execution.failed = Console(), Console(stderr=True), runs, 0
    execution.tracker, execution.parent = SimpleNamespace(end=lambda *args: None), "parent"
    execution.work = SimpleNamespace(sweep=SimpleNamespace(options=Options()))
    execution.close = lambda spec, status: closed.append((status, runs.running[0].process.is_alive()))
    execution.lines = SimpleNamespace(line=fail, live=lambda console: contextlib.nullcontext())
    assert execution.run() == 130
    assert closed == [("KILLED", False)] and "run the same command again" in capsys.readouterr().err


def test_origins_are_told_once():
    """A run that was resumed under another commit has both in one tag."""
    tags = [
        {"lit.commit": "a; b", "lit.dirty": "false"},
        {"lit.commit": "b", "lit.dirty": "false"},
        {"lit.commit": "c; a"},
    ]
    runs = {str(i): Run(str(i), "FINISHED", tags=t) for i, t in enumerate(tags)}
    work = WorkList(None, runs | {"k": Run("k", "KILLED", tags={"lit.commit": "d"})})
    assert origin(work.finished) == {
        "commit": "a; b; c",
        "dirty": "false",
        "versions": "unknown",
        "hardware": "unknown",
    }
