"""The x values, metrics and sizes of the runs of a plan, and the check of figures and claims against them."""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from lit_memory.plan.claims import KINDS, calls, check_lines, parse, refs, untested
from lit_memory.plan.errors import ConfigError, dotted
from lit_memory.plan.experiment import ScaledExperiment
from lit_memory.plan.reading import read
from lit_memory.plan.runspec import RunSpec
from lit_memory.plan.sections import OF_A_RUN, STEP, STEPS_TO, TIMES, TRAIN_SPEED, ReportConfig
from lit_memory.registry import REGISTRIES, build, load_class, model_size
from lit_memory.util.checks import field_name, first_line, nearest

PAPER, TOY = "paper", "toy"
"""The scale of a paper's own settings (``paper_<name>`` for a variant of them); the level of evidence of synthetic text
and small models."""


def x_values(experiment: ScaledExperiment, specs: Sequence[RunSpec]) -> list:
    """The x axis of the report: values of the test's ``test_<field>``, of which an arm may have the first ones alone
    (``stops``); or, the same in every run, places of a curve, or the steps of the validations. Raises ConfigError."""
    axis = experiment.report.x
    tasks = {json.dumps(spec.task): spec.task for spec in specs}
    samplers = [build("task", task) for task in tasks.values()]
    if axis == STEP:
        _check_fixed_stages(experiment, specs)
        values = [spec.validations for spec in specs]
    else:
        values = [sampler.x_values(axis) for sampler in samplers]
    known = ", ".join([f"test_{samplers[0].test_axis()[0]}", *getattr(samplers[0], "curves", {})]) + f" or {STEP}"
    _check_values(experiment, values, specs[0].task["name"], known)
    return max(values, key=len)


def stops(experiment: ScaledExperiment, specs: Sequence[RunSpec]) -> dict[str, int]:
    """Arm -> how many of the first x values its test has, of those arms that do not have all. Raises ConfigError for an
    arm whose runs have different ones."""
    total, found = len(x_values(experiment, specs)), dict[str, int]()
    if not experiment.report.x.startswith("test_"):
        return found
    for spec in {(spec.arm, json.dumps(spec.task)): spec for spec in specs}.values():
        count = len(build("task", spec.task).x_values(experiment.report.x))
        if found.setdefault(spec.arm, count) != count:
            reason = (
                f"{experiment.report.x!r} has not the same values at every point of the grid; expected no axis of it"
            )
            raise ConfigError(f"{experiment.file} (arm {spec.arm})", "grid", reason)
    return {arm: count for arm, count in found.items() if count < total}


def _check_fixed_stages(experiment: ScaledExperiment, specs: Sequence[RunSpec]) -> None:
    """Raise ConfigError where nobody knows the steps of the validations."""
    if any(stage["until"] for spec in specs for stage in spec.stages):
        reason = "a stage with until ends nobody knows when; expected stages of fixed steps"
        raise ConfigError(experiment.file, "report.x", f"{STEP!r}: {reason}")


def _check_values(experiment: ScaledExperiment, values: Sequence[list], task: str, known: str) -> None:
    """Raise ConfigError unless all runs have the same x values, or the first of a test's, all different whole numbers.

    known: the axes that the task has, as text.
    """
    file, axis, first = experiment.file, experiment.report.x, max(values, key=len)
    if not all(values):
        raise ConfigError(file, "report.x", f"{axis!r} is not what the test of {task} varies; expected {known}")
    if any(v != (first[: len(v)] if axis.startswith("test_") else first) for v in values):
        expected = f"expected {known} with the same, or with the first ones of a test_<field>"
        raise ConfigError(file, "report.x", f"{axis!r} has not the same values in every arm; {expected}")
    if len(set(first)) < len(first):
        raise ConfigError(file, f"task.{axis}", f"{first}: expected different values")
    if not all(type(v) is int for v in first):
        expected = "expected whole numbers (they are the steps of MLflow's metrics)"
        raise ConfigError(file, f"task.{axis}", f"{first}: {expected}")


def answerable(experiment: ScaledExperiment, specs: Sequence[RunSpec], changed: Collection[str]) -> ScaledExperiment:
    """The experiment as changes of the command line leave it: without the lines and the figure about an x that is no
    longer tested, and with the reasons (``unchecked``) why no verdict can follow.

    specs: the changed plan. changed: the keys of the changes, without ?. Raises ConfigError.
    """
    values, lines, reasons = x_values(experiment, specs), dict[str, list[str]](), list[str]()
    judged = any(getattr(experiment, section) for section in KINDS)
    moved = judged and any(key.startswith("task") for key in changed)
    stepped = judged and not {"train", "train.steps", "train.stages"}.isdisjoint(changed)
    plan = experiment.plan() if moved or stepped else []
    planned = x_values(experiment, plan) if moved else values
    for section in KINDS:
        try:
            gone = {line: untested(line, values, planned) for line in getattr(experiment, section)}
        except ValueError:
            return experiment  # check_report says which line is wrong
        lines[section] = [line for line, absent in gone.items() if not absent]
        reasons += [f"`{line}` ({', '.join(absent)} is not tested)" for line, absent in gone.items() if absent]
    if stepped:
        reasons += shortened(plan, specs)
    return replace(experiment, report=without_untested(experiment.report, values), unchecked=reasons, **lines)


def without_untested(report: ReportConfig, values: Sequence) -> ReportConfig:
    """A report without the figure of states, if that is about an x that is not among the tested ``values``."""
    return replace(report, state_x=None) if type(report.state_x) is int and report.state_x not in values else report


def shortened(before: Sequence[RunSpec], after: Sequence[RunSpec]) -> list[str]:
    """Which arms take fewer optimizer steps than before, in words; those with the same numbers together."""
    found: dict[tuple[int, int], list[str]] = {}
    planned, left = most_steps(before), most_steps(after)
    for arm, steps in left.items():
        if steps < planned.get(arm, steps):
            found.setdefault((steps, planned[arm]), []).append(arm)
    return [
        f"{'' if len(arms) == len(left) else ', '.join(arms) + ' '}trained for {steps:,} steps in place of {most:,}"
        for (steps, most), arms in found.items()
    ]


def most_steps(specs: Sequence[RunSpec]) -> dict[str, int]:
    """Arm -> the optimizer steps of its longest run."""
    found: dict[str, int] = {}
    for spec in specs:
        found[spec.arm] = max(found.get(spec.arm, 0), sum(stage["steps"] for stage in spec.stages))
    return found


def metrics(experiment: ScaledExperiment, specs: Sequence[RunSpec]) -> list[str]:
    """The metrics along the report's x axis, without ``TIMES``."""
    axis, task = experiment.report.x, load_class("task", specs[0].task["name"])
    models = [load_class("model", name) for name in dict.fromkeys(spec.model["name"] for spec in specs)]
    if axis == STEP:
        tested = [f"test_{name}" for name in (*task.metrics, "loss")]
        diagnosed = dict.fromkeys(name for model in models for name in getattr(model, "diagnosed", ()))
        return [*task.metrics, "loss", *tested, *OF_A_RUN, *diagnosed]
    steps = ["steps", *["later_steps"] * all(len(spec.stages) > 1 for spec in specs)]
    curves = getattr(task, "curves", {})
    if axis in curves:
        return [*curves[axis], *steps]
    tested = dict.fromkeys(name for model in models for name in getattr(model, "tested", ()))
    return [*task.metrics, *task.derived, "loss", *steps, *tested]


def check_report(experiment: ScaledExperiment, specs: Sequence[RunSpec]) -> None:
    """Raise ConfigError if a figure or a claim names a metric, an arm or an x that the plan does not have."""
    file, report, known = experiment.file, experiment.report, metrics(experiment, specs)
    times = TIMES if report.x.startswith("test_") else ()
    if report.y in TIMES:
        reason = f"{report.y!r} is measured anew by every run"
        raise ConfigError(file, "report.y", f"{reason}; expected time: {report.y} beside another metric")
    for name, metric in [("y", report.y), *((f"floors.{metric}", metric) for metric in report.floors)]:
        if metric not in known:
            raise ConfigError(file, f"report.{name}", f"unknown metric {metric!r}; {nearest(metric, known)}")
    values = x_values(experiment, specs)
    for name, wanted in (("time", bool(report.time)), ("state_x", report.state_x is not None)):
        if wanted and not times:
            expected = f"expected none where x={report.x} is no test_<field>"
            raise ConfigError(file, f"report.{name}", f"{getattr(report, name)}: {expected}")
    try:
        report.state_value(values)
    except ValueError as error:
        raise ConfigError(file, "report.state_x", str(error)) from None
    if report.threshold is not None and report.x != STEP and not report.curves:
        expected = f"expected none where x={report.x} is not {STEP}, without curves"
        raise ConfigError(file, "report.threshold", f"{report.threshold}: {expected}")
    check_select(experiment, specs)
    visible(experiment, specs)
    named = {"relative_to": [report.relative_to] if report.relative_to else [], "paper_curves": report.paper_curves}
    for name, arms in named.items():
        for arm in arms:
            if arm not in experiment.arms:
                reason = f"unknown arm {arm!r}; {nearest(arm, experiment.arms)}"
                raise ConfigError(file, f"report.{name}", reason)
    ends = stops(experiment, specs)
    for section in KINDS:
        try:
            lines = getattr(experiment, section)
            check_lines(lines, list(experiment.arms), values, [*known, *times], section, ends)
        except ValueError as error:
            raise ConfigError(file, section, f"{error}{taken_over(file, section)}") from None
    if not experiment.unchecked:
        check_requirement(experiment)
        check_measured(experiment, specs)


def taken_over(file: str, section: str) -> str:
    """What to do about a wrong line that a file does not state itself; "" where it does."""
    tree = read(Path(file)) if Path(file).is_file() else {}
    scales = tree.get("scales") or {}
    if "extends" not in tree or any(section in (stated or {}) for stated in (tree, *scales.values())):
        return ""
    return f"; it is one of {tree['extends']}: write {section} anew, [] for none"


def check_measured(experiment: ScaledExperiment, specs: Sequence[RunSpec]) -> None:
    """Raise ConfigError for a figure or a line about what no run measures: a time without timed steps, the steps to no
    threshold, or the deviation of one seed."""
    file, report = experiment.file, experiment.report
    untimed = [spec.arm for spec in specs if not spec.train["timed_steps"]]
    if report.time == TRAIN_SPEED and len(untimed) == len(specs):
        raise ConfigError(file, "report.time", f"{report.time} needs train.timed_steps; expected some")
    for section in KINDS:
        for i, line in enumerate(getattr(experiment, section)):
            tree, where, problem = parse(line), f"{section}[{i}]", ""
            for ref in refs(tree):
                if ref.metric == TRAIN_SPEED and ref.arm in untimed:
                    problem = f"{ref} needs train.timed_steps in arm {ref.arm}; expected some"
                if ref.metric == STEPS_TO and report.threshold is None:
                    problem = f"{ref} needs report.threshold; expected a number"
            if any(calls(tree, "std")) and len(experiment.seeds) < 2:
                problem = "one seed has no std; expected two seeds or more"
            if problem:
                raise ConfigError(file, where, f"{line!r:.90}: {problem}")


def visible(experiment: ScaledExperiment, specs: Sequence[RunSpec]) -> dict[str, list[str]]:
    """View of ``report.memory`` -> the arms whose model or task allows it. Raises ConfigError where none does."""
    found: dict[str, list[str]] = {}
    for view in experiment.report.memory:
        arms = [spec.arm for spec in specs if any(view in views_of(kind, spec) for kind in REGISTRIES)]
        found[view] = list(dict.fromkeys(arms))
        if not found[view]:
            names = [(kind, name) for kind, registry in REGISTRIES.items() for name in registry]
            able = [f"{kind} {name}" for kind, name in names if view in views_of(kind, name)]
            problem = f"{view!r}: no arm has a model or a task that shows it"
            raise ConfigError(experiment.file, "report.memory", f"{problem}; expected one of {', '.join(able)}")
    return found


def views_of(kind: str, of: RunSpec | str) -> tuple[str, ...]:
    """The views that a model or a task allows; ``kind`` is "model" or "task", ``of`` its name or a run."""
    name = of if isinstance(of, str) else getattr(of, kind)["name"]
    return getattr(load_class(kind, name), "visible", ())


def check_requirement(experiment: ScaledExperiment) -> None:
    """Raise ConfigError for claims that nothing is required for: models may be compared that never learnt their
    task."""
    if experiment.expect and not experiment.requires:
        expected = "expected what must hold before it can be judged, for example 'min(a[first], b[first]) >= 0.9'"
        raise ConfigError(experiment.file, "requires", f"missing beside the lines of expect; {expected}")


def check_select(experiment: ScaledExperiment, specs: Sequence[RunSpec]) -> None:
    """Raise ConfigError if the metric that chooses among the points of a grid is none of a validation, or the seeds
    that choose are none of the experiment."""
    known = [*load_class("task", specs[0].task["name"]).metrics, "loss"]
    if experiment.select and experiment.select not in known:
        reason = f"unknown metric {experiment.select!r} of a validation; {nearest(experiment.select, known)}"
        raise ConfigError(experiment.file, "select", reason)
    for seed in experiment.tune_seeds:
        if seed not in experiment.seeds:
            raise ConfigError(experiment.file, "tune_seeds", f"{seed}: expected some of the seeds {experiment.seeds}")
    if experiment.tune_seeds and not any(spec.point for spec in specs):
        raise ConfigError(experiment.file, "tune_seeds", "there is nothing to choose; expected a grid, or none")


def evidence(experiment: ScaledExperiment, specs: Sequence[RunSpec], modified: bool) -> str:
    """How far results carry: "paper scale" (a paper's own settings, unchanged, of an experiment that names it), "real
    text" or "real data" (what every arm is tested on was not made by a program), or "toy". Derived, so that no change
    of a setting can overstate it.

    modified: whether the command line changed settings.
    """
    if experiment.paper.title and f"{experiment.scale}_".startswith(f"{PAPER}_") and not modified:
        return "paper scale"
    tasks = {json.dumps(spec.task): spec.task for spec in specs}
    materials = {build("task", task).material for task in tasks.values()}
    return TOY if "" in materials else " and ".join(f"real {material}" for material in sorted(materials))


def sizes(experiment: ScaledExperiment, specs: Sequence[RunSpec]) -> dict[str, dict[str, int]]:
    """``model_size`` of every run, by its key. Raises ConfigError for a model that no memory could hold."""
    found: dict[str, dict[str, int]] = {}
    by_key: dict[str, dict[str, int]] = {}
    for spec in specs:
        model, where = json.dumps(spec.model), f"{experiment.file} (arm {spec.arm})"
        try:
            found[model] = found.get(model) or model_size(spec.model)
        except RuntimeError as error:
            reason = "expected smaller sizes"
            if isinstance(error, RecursionError):
                reason = "it calls itself without end"
            elif "meta" in str(error):
                reason = "a plan builds it on torch's device meta, where a tensor has no numbers"
            raise ConfigError(where, "model", f"cannot be built; {reason} ({first_line(error)})") from None
        except ValueError as error:
            raise ConfigError(where, dotted("model", field_name(error)), str(error)) from None
        by_key[spec.key] = found[model]
    return by_key
