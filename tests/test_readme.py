"""What the README shows is true: its commands, its Python, its links, and its table of claims."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from lit_memory.cli import parser
from lit_memory.plan.experiment import load
from lit_memory.plan.measured import check_report, x_values

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def claims_table() -> str:
    """The README's table of claims, as the reports have it."""
    lines = ["| paper, item | claim | verdict | command |", "|---|---|---|---|"]
    for path in sorted(ROOT.glob("reports/*/verdict.json")):
        report = json.loads(path.read_text())
        name, paper = report["experiment"], report["paper"]
        source = f"{paper['arxiv'] or paper['title'].partition(':')[0]}, {paper['item']}"
        verdict = f"[{report['verdict']}](reports/{name}/README.md)"
        lines.append(f"| {source} | {paper['claim']} | {verdict} | `python run.py experiments/{name}.yaml` |")
    return "\n".join(lines)


def test_claims():
    """The table is what reports/*/verdict.json say; a failure prints the table to paste."""
    shown = re.search(r"<!-- claims[^>]*-->\n(.*?)\n<!-- /claims -->", README, re.DOTALL)
    assert shown, "the README has no table of claims"
    assert shown.group(1) == claims_table(), f"paste this table into the README:\n{claims_table()}"


def test_two_commands():
    """Two commands set everything up; the first runs the main experiment, the second passes the tests."""
    commands = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert commands == [
        "pip install -e . && python run.py experiments/armt_ablation_gamma.yaml\n",
        "pip install -e '.[test]' && pytest\n",
    ]


@pytest.mark.parametrize("command", sorted(set(re.findall(r"experiments/\w+\.yaml", README))))
def test_experiments_exist(command):
    """Every experiment that the README names is there."""
    assert (ROOT / command).is_file()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links(link):
    """Every file that the README links or shows is there."""
    assert (ROOT / link).exists()


def test_promises():
    """Every test that stands behind "What happens when a run dies" is there."""
    names = set(re.findall(r"`(test_\w+)`", README.partition("## What happens")[2].partition("\n## ")[0]))
    tests = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    assert len(names) > 10 and not [name for name in names if f"def {name}(" not in tests]


def test_usage():
    """The usage line has exactly the command's flags."""
    usage = re.search(r"python run.py EXPERIMENT.yaml (.*)", README).group(1)
    flags = {option for action in parser()._actions for option in action.option_strings} - {"-h", "--help"}
    assert set(re.findall(r"--[\w-]+", usage)) == flags


@pytest.mark.parametrize("i", range(len(SNIPPETS)))
def test_snippets_run(i, tmp_path, monkeypatch):
    """All Python in the README runs as it stands there, but for the number of training steps."""
    monkeypatch.chdir(tmp_path)
    code = re.sub(r"max_steps=\d+", "max_steps=3", SNIPPETS[i])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # hints about workers and loggers
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        exec(compile(code, f"README.md snippet {i}", "exec"), {"__name__": "readme"})


def test_the_experiment_plans(tmp_path):
    """The YAML in the README is one: every scale, arm and claim."""
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "my_gamma.yaml"
    path.write_text(text)
    for scale, width, rate in (("cpu", 64, 1e-3), ("gpu", 256, 3e-4)):
        experiment = load(path).at(scale)
        specs = experiment.plan()
        check_report(experiment, specs)
        assert [spec.arm for spec in specs[::3]] == ["raw", "off", "rmt"] and x_values(experiment, specs) == [
            5,
            10,
            20,
        ]
        assert (specs[0].model["width"], specs[0].train["lr"], specs[3].train["lr"], specs[6].train["lr"]) == (
            width,
            rate,
            rate,
            1e-3,
        )


def test_new_model_and_task_fit_together():
    """The model and the task of the two "add" sections work with the package's loop and metric."""
    names: dict = {"__name__": "readme"}
    for snippet in SNIPPETS[-2:]:
        exec(snippet, names)
    from lit_memory.recurrence import unroll

    task = names["Copy"](names["Copy"].Config(length=4, test_length=[4, 8]))
    batch = task.batch(0, "train", 0, 3)
    model = names["Average"](names["Average"].Config(vocab_size=task.vocab_size, layers=1, width=16, heads=2))
    out = unroll(model, batch.ids_BT, 3)
    assert out.hidden_BTD.shape == (3, 9, 16)
    assert torch.equal(task.score(batch.ids_BT, batch)["exact_match"], torch.ones(3))
    assert [x for x, _ in task.test_conditions()] == [4, 8]


OURS = """
experiment: ours
paper: {title: T, item: I, claim: C}
base:
  model: {name: average, layers: 1, width: 16, heads: 2}
  task: {name: copying, length: 4, test_length: [4, 8]}
  train: {steps: 4, batch_size: 4, lr: 1.0e-3, valid_every: 2, valid_size: 4, test_size: 4}
scales: {cpu: {}}
arms: {average: {}}
seeds: [0]
report: {x: test_length, y: exact_match}
expect: ["average[last] >= 0"]
"""
RUN = """
import sys
from pathlib import Path
from lit_memory.registry import MODELS
from lit_memory.registry import TASKS
MODELS["average"], TASKS["copying"] = "average:Average", "copying:Copy"
from lit_memory.run.engine import run_one
from lit_memory.plan.experiment import load
from lit_memory.run.tracking import Tracker
root = Path.cwd()
(spec,), tracker = load("ours.yaml").at("cpu").plan(), Tracker(root)
run_one(spec, root, tracker.uri, tracker.parent("ours", "cpu", {}), {}, lambda message: None)
print(sorted(tracker.results(tracker.find(spec.key))))
"""


def test_a_new_model_and_task_run(tmp_path):
    """One line in each registry is all that a run of the two "add" sections needs."""
    for name, text in {
        "average.py": SNIPPETS[-2],
        "copying.py": SNIPPETS[-1],
        "ours.yaml": OURS,
        "run.py": RUN,
    }.items():
        (tmp_path / name).write_text(text)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "('exact_match', 4," in done.stdout and "('exact_match', 8," in done.stdout
