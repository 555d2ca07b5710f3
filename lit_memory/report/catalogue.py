"""The project's experiments by name, and the verdicts of their reports."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import load
from lit_memory.plan.parsing import paper_section
from lit_memory.plan.reading import extended, mapping
from lit_memory.report.budget import all_runs, core_seconds
from lit_memory.report.verdict import INCOMPLETE
from lit_memory.util.provenance import EXPERIMENTS, PROJECT

APART = ("-incomplete", "-modified-")
"""Parts of the names of folders that are left out: their runs are not the experiment as its file states it."""


def folders() -> tuple[Path, Path]:
    """Where an experiment is looked for by its name: the working directory, then the project's."""
    return Path(), EXPERIMENTS


def experiment_names() -> list[str]:
    """The experiments that can be named, without .yaml."""
    return [path.stem for folder in folders() for path in sorted(folder.glob("*.yaml"))]


def find_experiment(text: str) -> Path:
    """The file of an experiment, from a path or the name of a project's experiment, with or without .yaml. Raises
    ConfigError for an unknown name."""
    given, *others = (folder / f"{text}{end}" for folder in folders() for end in ("", ".yaml"))
    found = next((path for path in (given, *others) if path.is_file()), given)
    if not found.exists() and found.parent == Path():
        ending = ".yaml" if text.endswith(".yaml") else ""
        names = [f"{name}{ending}" for name in experiment_names()]
        close = get_close_matches(text, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "expected a file, or a name that --list shows"
        raise ConfigError(text, "", f"no such file; {hint}")
    return found


def read_verdict(folder: Path) -> dict[str, Any]:
    """The verdict.json of a report; {} without one."""
    return read(folder / "verdict.json")


def read(path: Path) -> dict[str, Any]:
    """The content of a JSON file; {} without one."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def is_complete(folder: Path) -> bool:
    """Whether a folder has a report that misses no run and comes to a verdict."""
    found = read_verdict(folder)
    return found.get("verdict", INCOMPLETE) != INCOMPLETE and not found["missing"]


def is_of_today(name: str, scale: str, keys: set[str]) -> bool | None:
    """Whether today's file of an experiment plans the runs of a report, by the first figures of their keys: a run of
    other settings, or of a version of a task or model that computes something else, has another key. None where no
    such file is known or it cannot be read."""
    try:
        experiment = load(find_experiment(name))
        planned = {spec.key for spec in experiment.at(scale).plan()} if scale in experiment.scales else set()
    except ConfigError:
        return None
    return all(any(long.startswith(key) for long in planned) for key in keys)


def report_folders(reports: Path) -> list[Path]:
    """The folders of all reports, of every scale, in the order of their names. reports: of a root, or of one experiment
    for its scales but the first."""
    found = [path.parent for pattern in ("*/verdict.json", "*/*/verdict.json") for path in reports.glob(pattern)]
    return [folder for folder in sorted(found) if not any(part in folder.name for part in APART)]


def scales_of(folder: Path) -> list[Path]:
    """The reports of an experiment, from its folder in reports/: that of the first scale, if there is one, before the
    others."""
    own = [folder] if (folder / "verdict.json").is_file() else []
    return own + report_folders(folder)


def list_experiments() -> list[tuple[str, str, str, str, float]]:
    """Name, paper with its item, verdict, level of evidence and core-seconds of all runs, those of a grid included, for
    every project experiment.

    All but the first two are those of the report in the project's reports/, at the first scale or, where that has none,
    at another one, whose name then stands for the level of evidence; "" and 0 without one.
    """
    rows = []
    for path in sorted(EXPERIMENTS.glob("*.yaml")):
        folder = PROJECT / "reports" / path.stem
        shown, *_ = [*scales_of(folder), folder]
        found, plan = read_verdict(shown), read(shown / "report.json")
        paper = paper_section(mapping(extended(path), str(path), ""), str(path))
        seconds = core_seconds(all_runs(plan.get("grid", []), plan.get("runs") or found.get("runs", []))) or 0
        item = ", ".join(filter(None, [paper.arxiv or paper.title.partition(":")[0], paper.item]))
        level = found.get("evidence", "") if shown == folder else shown.name
        rows.append((path.stem, item, found.get("verdict", ""), level, seconds))
    return rows
