"""Reports drawn again from their own folders, by the rules and the words of today. Nothing is trained or measured.

The numbers, the runs and the settings are those of report.json, table.csv and scores.npz; the claim, its lines, labels
and the looks of the figure are those that the experiment's file has now. An arm that it has no more keeps its label.
table.csv stays as it is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_memory.plan.claims import KINDS, check_lines
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import Experiment, ScaledExperiment, load
from lit_memory.plan.measured import check_requirement, without_untested
from lit_memory.report.catalogue import read_verdict
from lit_memory.report.marks import Summary, has_marks
from lit_memory.report.marks_page import render_marks
from lit_memory.report.plan import ReportPlan
from lit_memory.report.render import write
from lit_memory.report.results import Report, Results
from lit_memory.report.saved import PLAN, TABLE
from lit_memory.report.saved import load as saved
from lit_memory.util.provenance import EXPERIMENTS


def stated(experiment: ScaledExperiment) -> dict[str, Any]:
    """What the file of an experiment says of its report, besides what is run: fields of ``ReportPlan``."""
    e = experiment
    lines = {section: getattr(e, section) for section in KINDS}
    return lines | {"paper": vars(e.paper), "title": e.title, "labels": e.labels, "config": e.report}


def redraw_all(paths: Iterable[Path], root: Path) -> Iterator[tuple[Path, str, str]]:
    """Draw the reports of some experiments again, at all scales; those of marks last, as they read the others.

    paths: files of experiments; none: all of the project that have a report below ``root``. Yields the folder and the
    verdicts before and after. Raises ConfigError for a file or a report that cannot be used.
    """
    found = list(paths)
    if not found:
        names = sorted(EXPERIMENTS.glob("*.yaml"))
        found = [path for path in names if (root / "reports" / path.stem / "verdict.json").is_file()]
    if not found:
        raise ConfigError(str(root / "reports"), "", "no report of a project experiment; expected one to redraw")
    for path in sorted(found, key=has_marks):
        yield from _marks(path, root) if has_marks(path) else _plain(path, root)


def redraw(folder: Path, experiment: Experiment) -> Report:
    """Draw the report in a folder again. Raises ConfigError."""
    results = saved(folder)
    scaled = experiment.at(results.plan.scale)
    plan = _checked(results, scaled)
    return write(replace(results, plan=plan), folder, table=(folder / TABLE).read_bytes())


def _checked(results: Results, scaled: ScaledExperiment) -> ReportPlan:
    """The plan with what the file says now, without the lines that the command line had left without an answer. Raises
    ConfigError for lines and figures that its numbers do not serve."""
    check_requirement(scaled)
    plan, section = results.plan, "report"
    _check_axes(results, scaled)
    try:
        now = stated(scaled)
        gone = {arm: label for arm, label in plan.labels.items() if arm not in scaled.arms}
        now |= {"labels": gone | now["labels"]}
        if plan.unchecked:
            kept = {line for lines in plan.lines.values() for line in lines}
            now |= {section: [line for line in now[section] if line in kept] for section in KINDS}
        if plan.modified:
            now["config"] = without_untested(now["config"], plan.x_values)
        plan = replace(plan, **now)
        for section, lines in plan.lines.items():
            check_lines(lines, plan.arms, plan.x_values, section=section, stops=plan.stops)
    except ValueError as error:
        raise ConfigError(scaled.file, section, f"{error} (in the report that is drawn again)") from None
    return plan


def _check_axes(results: Results, scaled: ScaledExperiment) -> None:
    """Raise ConfigError for an axis that was not measured, and for a figure relative to an arm that was not run."""
    plan, now = results.plan, scaled.report
    known = {"x": [plan.config.x], "y": results.metrics, "relative_to": ["", *plan.arms]}
    for name, values in known.items():
        if (value := getattr(now, name)) not in values:
            kept = ", ".join(filter(None, values))
            message = f"{value!r}: the report that is drawn again has {kept} alone; --report writes it anew"
            raise ConfigError(scaled.file, f"report.{name}", message)


def _plain(path: Path, root: Path) -> Iterator[tuple[Path, str, str]]:
    experiment = load(path)
    home = root / "reports" / experiment.experiment
    for folder in sorted(file.parent for file in home.rglob(PLAN)) or [home]:
        before = read_verdict(folder).get("verdict", "none")
        yield folder, before, redraw(folder, experiment).verdict


def _marks(path: Path, root: Path) -> Iterator[tuple[Path, str, str]]:
    summary = Summary.load(str(path), root)
    folder = root / "reports" / summary.name
    before = read_verdict(folder).get("verdict", "none")
    yield folder, before, render_marks(summary, root, f"python run.py experiments/{path.name}").verdict
