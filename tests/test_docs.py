"""What the README and docs/ show is true: commands, Python, links, promises, and the tables of claims."""

import json
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from lit_memory.plan.experiment import load
from lit_memory.plan.measured import check_report, x_values
from lit_memory.recurrence import unroll
from lit_memory.registry import _SOURCES, MODELS, TASKS
from lit_memory.report.catalogue import read, read_verdict, scales_of
from lit_memory.run.options import parser

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
}
SNIPPETS = {
    f"{page}-{i}": code
    for page, text in PAGES.items()
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}
MODEL, TASK = SNIPPETS["docs/extending.md-0"], SNIPPETS["docs/extending.md-1"]
REPORTS = [found for folder in sorted(ROOT.glob("reports/*/")) if (found := scales_of(folder))]
"""The folders of an experiment's reports: of the first scale that has one, and of others."""
PAPERS = {
    "armt": "[ARMT](https://arxiv.org/abs/2407.04841)",
    "rmt": "[RMT](https://arxiv.org/abs/2207.06881)",
    "tarm": "TARM (Vigneswaran 2023, a course report)",
    "titans": "[Titans](https://arxiv.org/abs/2501.00663)",
    "larimar": "Larimar ([2403.11901](https://arxiv.org/abs/2403.11901), [needles](https://arxiv.org/abs/2407.01437))",
    "memreasoner": "MemReasoner (Das et al. 2025)",
    "deltanet": "[DeltaNet](https://arxiv.org/abs/2406.06484)",
}
"""What the names of experiments begin with -> the paper."""
VERDICTS = ("REPRODUCED", "NOT REPRODUCED", "INCONCLUSIVE")
"""Of complete reports."""
AFTER_A_TEST = re.compile(r"after (a|the) (test|report)|after tests|had been seen|test-like")
"""What caveats say of settings that a test had a part in."""


@pytest.fixture(autouse=True)
def _registries():
    """What a page registers is gone after its test."""
    tables: list[dict] = [MODELS, TASKS, _SOURCES]
    before = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


def claims_table() -> str:
    """The table of claims, as the reports have it."""
    lines = ["| paper, item | claim | verdict | command |", "|---|---|---|---|"]
    for folders in REPORTS:
        report = read_verdict(folders[0])
        name, paper = report["experiment"], report["paper"]
        source = f"{paper['arxiv'] or paper['title'].partition(':')[0]}, {paper['item']}"
        links = []
        for folder in folders:
            place = "" if folder.name == name else f"at `{folder.name}` "
            links.append(
                f"{place}[{read_verdict(folder)['verdict']}](../{folder.relative_to(ROOT)}/README.md){limits(folder)}"
            )
        verdict = "; ".join(links)
        scale = f" --scale {folders[0].name}" * (folders[0].name != name)
        lines.append(f"| {source} | {paper['claim']} | {verdict} | `python run.py experiments/{name}.yaml{scale}` |")
    return "\n".join(lines)


def limits(folder) -> str:
    """What limits a verdict that decides something: few seeds, and settings that a test had a part in."""
    found, plan = read_verdict(folder), read(folder / "report.json")
    if found["verdict"] == "INCONCLUSIVE":
        return ""
    few = [f"{len(found['seeds'])} seeds"] if found["exploratory"] and "seeds" in found else []
    caveats = " ".join(plan.get("config", {}).get("caveats", []))
    after = ["after a test"] if AFTER_A_TEST.search(caveats) else []
    fresh = re.findall(r"[A-Z ]*[A-Z] by the seeds that did not choose", found.get("scope", ""))
    limited = [*few, *after, *fresh]
    return f" ({', '.join(limited)})" if limited else ""


def counts_table() -> str:
    """Experiments and verdicts per paper, as experiments/ and the reports have them."""
    lines = [
        "| paper | experiments | reproduced | not reproduced | inconclusive | no report yet |",
        "|---|---|---|---|---|---|",
    ]
    names = [path.stem for path in ROOT.glob("experiments/*.yaml")]
    reports = [read_verdict(folder) for folder, *_ in REPORTS]
    for start, paper in PAPERS.items():
        found = Counter(report["verdict"] for report in reports if report["experiment"].startswith(f"{start}_"))
        planned = sum(name.startswith(f"{start}_") for name in names)
        assert set(found) <= set(VERDICTS)
        counts = [planned, *(found[verdict] for verdict in VERDICTS), planned - found.total()]
        lines.append(f"| {paper} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def marked(name: str) -> re.Pattern[str]:
    """A table of a page between its marks; the group is the table."""
    return re.compile(rf"<!-- {name}[^>]*-->\n(.*?)\n<!-- /{name} -->", re.DOTALL)


@pytest.mark.parametrize(
    ("page", "name", "table"), [("README.md", "counts", counts_table), ("docs/claims.md", "claims", claims_table)]
)
def test_tables_of_verdicts(page, name, table):
    """The tables are what reports/*/verdict.json say; a failure prints the table to paste."""
    shown = marked(name).search(PAGES[page])
    assert shown, f"{page} has no table of {name}"
    assert shown.group(1) == table(), f"paste this table into {page}:\n{table()}"


def test_the_readme_is_short():
    assert PAGES["README.md"].count("\n") <= 150


def test_every_experiment_belongs_to_a_paper():
    assert {path.stem.partition("_")[0] for path in ROOT.glob("experiments/*.yaml")} == set(PAPERS)


def test_two_commands():
    """Two commands set everything up; the first runs the main experiment, the second passes the tests."""
    commands = re.findall(r"```bash\n(.*?)```", PAGES["README.md"], re.DOTALL)
    first = "pip install -e . && python run.py experiments/armt_ablation_gamma.yaml\n"
    assert commands == [first, "pip install -e '.[test]' && pytest\n"]


@pytest.mark.parametrize("page", PAGES)
def test_experiments_exist(page):
    """Every experiment that a page names is there."""
    for name in re.findall(r"experiments/\w+\.yaml", PAGES[page]):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    """Every file that a page links or shows is there."""
    for link in re.findall(r"\]\(([^)#:]+)\)", PAGES[page]):
        assert ((ROOT / page).parent / link).exists(), link


def test_findings():
    """Every number and verdict of "What was found" is that of the report it links."""
    page = PAGES["docs/findings.md"]
    places = dict(re.findall(r"^\[(\w+)\]: (\S+)$", page, re.MULTILINE))
    shown = re.findall(r"\[([^\]]+)\]\[(\w+)\]", page)
    assert len(shown) > 50 and {name for _, name in shown} == set(places)
    for text, name in shown:
        report = ROOT / "docs" / places[name]
        if text in VERDICTS:
            verdict = json.loads(report.with_name("verdict.json").read_text())["verdict"]
            assert text == verdict, f"{name}: {text}; expected {verdict}"
        else:
            assert re.search(rf"(?<![\d.]){re.escape(text)}(?![\d.]\d)", report.read_text()), f"{name}: no {text}"


def test_promises():
    """Every test that stands behind "What happens when a run dies" is there."""
    names = set(re.findall(r"`(test_\w+)`", PAGES["docs/reliability.md"]))
    tests = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    assert len(names) > 10 and not [name for name in names if f"def {name}(" not in tests]


def test_usage():
    """The usage lines have exactly the command's flags."""
    usage = re.search(r"python run.py EXPERIMENT.yaml (.*?)```", PAGES["docs/experiments.md"], re.DOTALL).group(1)
    flags = {option for action in parser()._actions for option in action.option_strings} - {"-h", "--help"}
    assert set(re.findall(r"--[\w-]+", usage)) == flags


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_run(name, tmp_path, monkeypatch):
    """All Python on the pages runs as it stands there, but for the number of training steps."""
    monkeypatch.chdir(tmp_path)
    if "import peft" in SNIPPETS[name] or "from peft" in SNIPPETS[name]:
        pytest.importorskip("peft", reason="needs the extra peft")
    code = re.sub(r"max_steps=\d+", "max_steps=3", SNIPPETS[name])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # hints about workers and loggers
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing. is deprecated")  # peft asks for it
        warnings.filterwarnings("ignore", message=".*pin_memory.*no accelerator")
        exec(compile(code, name, "exec"), {"__name__": "page"})


def test_the_experiment_plans(tmp_path):
    """The YAMLs of the page are some: every scale, arm and claim of the first, and the second, which tunes its arms."""
    text, tuned = re.findall(r"```yaml\n(.*?)```", PAGES["docs/experiments.md"], re.DOTALL)
    path = tmp_path / "my_gamma.yaml"
    path.write_text(text)
    path.with_stem("my_gamma_tuned").write_text(tuned)
    experiment = load(path.with_stem("my_gamma_tuned")).at()
    check_report(experiment, experiment.plan())
    assert len(experiment.plan()) == 3 * 5 * 6 and experiment.select == "exact_match"
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
    """The model and the task of docs/extending.md work with the package's loop and metric; tests/test_own_code.py runs
    their experiment."""
    names: dict = {"__name__": "page"}
    for snippet in (MODEL, TASK):
        exec(snippet, names)
    task = names["Copy"](names["Copy"].Config(length=4, test_length=[4, 8]))
    batch = task.batch(0, "train", 0, 3)
    model = names["Average"](names["Average"].Config(vocab_size=task.vocab_size, layers=1, width=16, heads=2))
    out = unroll(model, batch.ids_BT, 3)
    assert out.hidden_BTD.shape == (3, 10, 16)
    assert torch.equal(task.score(batch.ids_BT, batch)["exact_match"], torch.ones(3))
    assert [x for x, _ in task.test_conditions()] == [4, 8]
