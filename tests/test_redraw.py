"""Reports that are drawn again from their folders: the numbers stay, the words and the rules are those of today."""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pandas
import pytest
import yaml
from report_data import make_frame, make_plan

from lit_memory.cli import main
from lit_memory.plan.sections import ReportConfig
from lit_memory.report.latex import best_arm, escaped, latex_table
from lit_memory.report.redraw import redraw_all
from lit_memory.report.render import render
from lit_memory.report.results import Results
from lit_memory.report.saved import scores_npz
from lit_memory.report.statistics import Draws
from lit_memory.report.tables import ranking

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]
FILES = ("README.md", "verdict.json", "report.json", "table.md", "table.tex", "sheet.md", "figure.png")
LINES = {"expect": ["a[2] - b[2] > 0.2"], "requires": ["a[2] >= 0.5"], "scales": {"cpu": {}}}


@pytest.fixture
def root(tmp_path):
    """A folder for reports, without a store."""
    return tmp_path / "root"


@pytest.fixture
def drawn(write, root):
    """The file of an experiment with a finished report below ``root``, and the folder of that."""
    plan = make_plan(["a", "b"], xs=[2, 4], expect=LINES["expect"], requires=LINES["requires"], experiment="tiny")
    frame = make_frame(["a", "b"], xs=[2, 4], value=lambda arm, seed, x: (0.9 if arm == "a" else 0.3) + seed / 70)
    other = make_frame(["a", "b"], xs=[2, 4], metric="capacity", value=lambda arm, seed, x: 1 / 3 + seed / 7 + x)
    folder = root / "reports" / "tiny"
    render(plan, pandas.concat([frame, other]), folder)
    return write(**LINES), folder


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def again(file, root):
    return list(redraw_all([Path(file)], root))


def test_the_file_of_today_decides(drawn, root, write, tmp_path, capsys):
    """A command judges by changed lines, with the numbers that are there; a second one changes nothing."""
    _, folder = drawn
    before = contents(folder)
    paper = {"title": "T", "item": "Figure 0", "claim": "a is better."}
    file = write(**LINES | {"expect": ["b[2] - a[2] > 0.2"]}, paper=paper, labels={"a": "the better one"})
    assert main(["--redraw", file, "--root", str(root)]) == 0
    assert capsys.readouterr().out.endswith("tiny: REPRODUCED -> NOT REPRODUCED\n")
    after = contents(folder)
    assert after["table.csv"] == before["table.csv"] and set(after) == set(before)
    page = after["README.md"].decode()
    assert "b[2] - a[2] > 0.2" in page and "Figure 0" in page and "the better one" in page
    assert main(["--redraw", file, "--root", str(root)]) == 0
    assert contents(folder) == after


def test_an_arm_that_the_file_has_no_more_keeps_its_label(drawn, root, write):
    """One that the file has loses a label with it."""
    _, folder = drawn
    again(write(**LINES, labels={"a": "the better one", "b": "the other one"}), root)
    again(write(**LINES | {"expect": ["a[2] >= 0.6"]}, arms={"a": {}}), root)
    page = (folder / "README.md").read_text()
    assert "the other one" in page and "the better one" not in page


def test_a_table_stays_as_it_is(drawn, root):
    """It rounds: means that are computed from it again may differ in the last digit."""
    file, folder = drawn
    table = folder / "table.csv"
    table.write_text(table.read_text().replace("0.476190", "0.476191", 1))
    before = table.read_bytes()
    again(file, root)
    assert table.read_bytes() == before


def test_another_metric_for_a_while_loses_nothing(write, root):
    """Scores and exact values of a metric that figure and lines leave are those of before when they come back."""
    plan = make_plan(["a", "b"], xs=[2, 4], expect=LINES["expect"], requires=LINES["requires"], experiment="tiny")
    frame = make_frame(["a", "b"], xs=[2, 4], value=lambda arm, seed, x: (seed + (arm == "a")) / 3)
    loss = make_frame(["a", "b"], xs=[2, 4], metric="loss", value=lambda arm, seed, x: 1 / 7)
    answers = {seed: [1.0] * seed + [0.0] * (3 - seed) for seed in range(4)}
    cells = [(arm, "exact_match", x, seed) for arm in "ab" for x in (2, 4) for seed in range(3)]
    scores = {cell: answers[cell[3] + (cell[0] == "a")] for cell in cells}
    folder = root / "reports" / "tiny"
    render(plan, pandas.concat([frame, loss]), folder, scores=scores)
    file = write(**LINES)
    again(file, root)
    before = contents(folder)
    for _ in range(2):
        again(write(**LINES | {"report": {"x": "test_pairs", "y": "loss"}}), root)
    again(write(**LINES), root)
    assert contents(folder) == before and "scores.npz" in before


def test_a_report_that_the_command_line_changed(write, root, inline, capsys):
    """It stays without the lines that it cannot answer, and the reports after it are drawn."""
    report = {"x": "test_pairs", "y": "exact_match", "state_x": 4}
    file = write(expect=["b[4] > 2", "a[first] >= 0"], requires=["a[2] >= 0"], verify=[], report=report)
    assert main([file, "--root", str(root), "task.test_pairs=[2,3]", "train.steps=2"]) == 0
    (folder,) = (root / "reports").glob("tiny/*")
    (_, before, after) = again(file, root)[0]
    assert before == after == "NOT CHECKED"
    assert [claim["line"] for claim in json.loads((folder / "verdict.json").read_text())["claims"]] == [
        "a[first] >= 0",
        "a[2] >= 0",
    ]


@pytest.mark.parametrize(
    ("metric", "minimized", "best"),
    [
        ("exact_match", [], "a"),
        ("test_loss", [], "b"),
        ("steps", [], "b"),
        ("my_error", [], "a"),
        ("my_error", ["my_error"], "b"),
    ],
)
def test_the_best_arm_comes_first(metric, minimized, best):
    """Of metrics where lower is better, those of a task from elsewhere too."""
    plan = make_plan(["a", "b"], xs=[2], config=ReportConfig(y=metric), expect=[], minimized=minimized)
    frame = make_frame(["a", "b"], xs=[2], metric=metric, value=lambda arm, seed, x: (arm == "a") + seed / 9)
    results = Results.from_frame(plan, frame)
    tied = dataclasses.replace(results, cells=dict.fromkeys(results.cells, 0.5))
    assert all(f"1. {results.plan.shown(arm)} 0.5" in ranking(tied) for arm in results.plan.arms)
    stopped = make_plan(["a", "b"], xs=[1, 2], config=ReportConfig(y=metric), expect=[], stops={"b": 1})
    assert f"seeds: 1. {stopped.shown('a')} " in ranking(Results.from_frame(stopped, frame[frame.arm == "a"]))
    assert "nan" not in ranking(Results.from_frame(stopped, frame[frame.arm == "a"]))
    assert f"1. {best} " in ranking(results) and best_arm(results, Draws(results.evidence), 2) == best


def damage(folder):
    (folder / "scores.npz").write_bytes(b"PK\3\4")


def forget(folder):
    (folder / "report.json").unlink()


@pytest.mark.parametrize(
    ("changes", "spoil", "message"),
    [
        ({"requires": ["c[2] >= 0.5"]}, None, "requires: requires[0] 'c[2] >= 0.5': no arm 'c'; arms: a, b"),
        (
            {"arms": {"a": {}, "b": {}, "c": {}}, "expect": ["c[2] > 0"]},
            None,
            "expect: expect[0] 'c[2] > 0': no arm 'c'; arms: a, b",
        ),
        ({"requires": []}, None, "requires: missing beside the lines of expect; expected what must hold before"),
        ({"expect": ["a[3] > 0"]}, None, "expect: expect[0] 'a[3] > 0'"),
        ({"report": {"state_x": 7}}, None, "state_x"),
        (
            {"report": {"x": "step"}},
            None,
            "report.x: 'step': the report that is drawn again has test_pairs alone; --report writes it anew",
        ),
        ({"report": {"y": "accuracy"}}, None, "report.y: 'accuracy': the report that is drawn again has exact_match, "),
        (
            {"arms": {"a": {}, "b": {}, "c": {}}, "report": {"relative_to": "c"}},
            None,
            "report.relative_to: 'c': the report that is drawn again has a, b alone; --report writes it anew",
        ),
        ({}, damage, "scores.npz: damaged ("),
        ({}, forget, "report.json: no such file; expected a report that has one; run.py EXPERIMENT --report writes it"),
    ],
    ids=[
        "arm of requires",
        "arm that did not run",
        "no requirement",
        "x",
        "state_x",
        "another axis",
        "another metric",
        "relative to an arm that did not run",
        "scores",
        "no plan",
    ],
)
def test_bad_input_is_one_line(drawn, root, write, capsys, changes, spoil, message):
    """And nothing is written."""
    _, folder = drawn
    file = write(**LINES | changes)
    if spoil:
        spoil(folder)
    before = contents(folder)
    assert main(["--redraw", file, "--root", str(root)]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
    assert contents(folder) == before


def test_nothing_to_redraw(root, capsys):
    assert main(["--redraw", "--root", str(root)]) == 2
    assert "no report of a project experiment; expected one to redraw" in capsys.readouterr().err
    assert main(["--redraw", "nothing", "--root", str(root)]) == 2
    assert "nothing: no such file" in capsys.readouterr().err


# For papers


def test_a_latex_table():
    """A cell per column, special signs escaped, and in bold what is surely the best: the least of a loss."""
    assert escaped(r"50 % of a_b & {c} ~^\ #$") == (
        r"50 \% of a\_b \& \{c\} \textasciitilde{}\textasciicircum{}\textbackslash{} \#\$"
    )

    def value(arm, seed, x):
        return (0.2 if arm == "a_1" else 0.6 if x == 2 else 0.2) + seed / 100

    arms = ["a_1", "b"]
    plan = make_plan(arms, xs=[2, 40000], config=ReportConfig(y="loss", y_label="loss & more"), labels={"b": "B 100 %"})
    tex = latex_table(Results.from_frame(plan, make_frame(arms, xs=[2, 40000], metric="loss", value=value)))
    rows = [line for line in tex.splitlines() if line.endswith(r"\\")][1:]
    assert rows == [
        r"loss \& more & 2 & 40k \\",
        r"a\_1 & \textbf{0.210 $\pm$ 0.010} & 0.210 $\pm$ 0.010 \\",
        r"B 100 \% & 0.610 $\pm$ 0.010 & 0.210 $\pm$ 0.010 \\",
    ]
    for part in (r"\begin{tabular}{lrr}", r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"):
        assert tex.count(part) == 1
    assert tex.isascii()


def test_nothing_is_bold_without_seeds():
    one = make_plan(["a", "b"], seeds=[0], xs=[2])
    frame = make_frame(["a", "b"], seeds=[0], xs=[2], value=lambda arm, seed, x: float(arm == "a"))
    assert "textbf" not in latex_table(Results.from_frame(one, frame))


ORDER = [
    "# Reproducibility sheet: armt_ablation_gamma",
    "## Scope of reproducibility",
    "## Methodology",
    "### Models",
    "### Data",
    "### Hyperparameters",
    "### Set-up and code",
    "### Computational requirements",
    "## Results",
    "## Discussion",
]


def test_the_sheet_has_what_the_challenge_asks_for(tmp_path):
    """In its order, with the hashes of the very files."""
    runs = [
        {"arm": arm, "seed": seed, "seconds": 90.0, "steps": 10, "threads": 2, "samples": [30] * 4}
        for arm in ("gamma", "no_gamma")
        for seed in range(3)
    ]
    plan = make_plan(runs=runs, deviations=["fewer layers"], command="python run.py x.yaml", requires=["gamma[50] > 0"])
    frame = make_frame()
    scores = {("gamma", "exact_match", 50.0, 0): [frame.value[0]] * 4}
    render(plan, frame, tmp_path, scores)
    sheet = (tmp_path / "sheet.md").read_text()
    assert re.findall(r"^#+ .*", sheet, flags=re.M) == ORDER
    for name in ("table.csv", "scores.npz"):
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() in sheet
    for part in ("| all      | 6    |         | 60    | 18.0         |", "- fewer layers", "`gamma[50] > 0`", ": 30"):
        assert part in sheet
    assert "[sheet.md](sheet.md)" in (tmp_path / "README.md").read_text()
    render(plan, frame, tmp_path)
    assert "the scores of single samples were not kept" in (tmp_path / "sheet.md").read_text()
    assert scores_npz(scores) not in contents(tmp_path).values()


def test_a_report_at_another_scale_is_drawn_by_it(drawn, root, tree, tmp_path):
    """Its lines are those of its scale, and a folder below that of the default one is found."""
    _, folder = drawn
    plan = make_plan(["a", "b"], xs=[2, 4], expect=["a[2] > 0"], experiment="tiny", scale="large")
    render(plan, make_frame(["a", "b"], xs=[2, 4], value=lambda *args: 0.5), folder / "large")
    scales = {**tree.get("scales", {}), "cpu": {}, "large": {"expect": ["a[4] < b[4]"]}}
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree | LINES | {"scales": scales}))
    assert [done[0].name for done in again(file, root)] == ["tiny", "large"]
    assert json.loads((folder / "large" / "verdict.json").read_text())["claims"][0]["line"] == "a[4] < b[4]"
