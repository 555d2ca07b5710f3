"""The report of a sweep: what it needs to know of the plan and of the runs, and where it goes."""

import json
import math
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_memory.plan.deviations import differences
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.measured import evidence, metrics, stops, visible, x_values
from lit_memory.plan.merging import split_arm
from lit_memory.plan.runspec import RunSpec
from lit_memory.plan.sections import STEP, TIMES
from lit_memory.registry import build, load_class
from lit_memory.report.labels import MINIMIZED, seeds_shown
from lit_memory.report.marks import Summary
from lit_memory.report.marks_page import render_marks
from lit_memory.report.plan import ReportPlan
from lit_memory.report.redraw import stated
from lit_memory.report.render import write
from lit_memory.report.results import Report, Results
from lit_memory.report.settings import arm_settings
from lit_memory.run import checkpoint
from lit_memory.run.frame import results_frame, stage_steps, validations
from lit_memory.run.options import Options
from lit_memory.run.scores import read_scores
from lit_memory.run.selection import SETTLED, Selection, chosen
from lit_memory.run.summary import of_marks, of_report
from lit_memory.run.sweep import Sweep
from lit_memory.run.worklist import WorkList, with_starts
from lit_memory.util import files
from lit_memory.util.checks import first_line
from lit_memory.util.provenance import EXPERIMENTS, provenance

if TYPE_CHECKING:
    from lit_memory.run.tracking import Run, Tracker

ORIGIN = ("commit", "dirty", "versions", "hardware")
SIZES = ("parameters", "state_floats", "state_growth")
TOTALS = ("steps", "seconds", "peak_memory_mb", "broke_down")


def write_report(work: WorkList, tracker: "Tracker") -> Report:
    """Write the report of all finished runs of the sweep, also into its parent run in MLflow.

    A report with missing runs leaves a complete one alone; a complete one replaces what was there for it. The lock
    makes commands that end together write one after the other, so that the last one knows all runs, and MLflow copies
    no half-written file.
    """
    sweep, report = work.sweep, work.sweep.experiment.report
    with checkpoint.lock(sweep.root / "checkpoints" / ".report"):
        work.refresh(tracker)
        shown = chosen(sweep.experiment, sweep.specs, work.runs)  # before any test is read
        whole = all(work.status(spec) == "finished" for spec in shown)
        whole = whole and all(work.status(spec) in SETTLED for spec in work.wanted)
        folder = sweep.report_folders.target(whole)
        files.remove_staged(folder)
        every = results_frame(tracker, sweep.specs, work.runs, report)
        rows = of_runs(every, shown)
        shown_metrics = [*metrics(sweep.experiment, shown), *TIMES]
        curves = validations(tracker, shown, work.runs, report) if report.curves and report.x != STEP else {}
        plan = report_plan(work, shown, every)
        scores = read_scores(tracker, shown, work.runs, sweep.root, report, plan.x_values)
        try:
            results = Results.from_frame(plan, rows[rows["metric"].isin(shown_metrics)], scores)
        except ValueError as error:
            raise ConfigError(str(folder), "", first_line(error)) from None
        memory = {}
        if report.memory:
            from lit_memory.run.looking import memories  # imports Lightning, which costs seconds

            memory = memories(work, tracker, shown, plan, folder)
        done = write(replace(results, validations=curves, memory=memory), folder)
        if whole and sweep.report_folders.incomplete.is_dir():
            shutil.rmtree(sweep.report_folders.incomplete)
        if folder == sweep.report_folders.complete:
            tracker.publish(tracker.parent(sweep.name, sweep.setting, {}), folder, of_report(results, done))
    return done


def write_marks(summary: Summary, options: Options, root: Path, tracker: "Tracker") -> Report:
    """Write the report of marks over other experiments' reports, also into its parent run in MLflow."""
    scale = f" --scale {options.scale}" if options.scale else ""
    report = render_marks(summary, root, f"python run.py {options.experiment}{scale}")
    tracker.publish(tracker.parent(summary.name, summary.scale or "default", {}), report.folder, of_marks(report))
    return report


def of_runs(rows: Any, specs: Sequence[RunSpec]) -> Any:
    """The rows of a DataFrame of ``results_frame`` that belong to some runs."""
    points = {(spec.arm, spec.seed): spec.point for spec in specs}
    found = zip(rows["arm"], rows["seed"], rows["point"], strict=True)
    return rows.loc[[points.get((arm, seed)) == point for arm, seed, point in found]]


def report_plan(work: WorkList, shown: Sequence[RunSpec], rows: Any = None) -> ReportPlan:
    """What the report needs to know.

    shown: the runs of the selected grid points. rows: the DataFrame of all finished runs; None without any.
    """
    sweep, e = work.sweep, work.sweep.experiment
    settings = {arm: own | split_arm(e.settings, arm)[1] | e.axes(arm) for arm, own in e.arms.items()}
    selection, values = Selection.of(e, sweep.specs), sweep.x_values
    return ReportPlan(
        experiment=e.experiment,
        evidence=evidence(e, sweep.specs, bool(sweep.options.overrides)),
        scale=sweep.scale,
        modified=list(sweep.options.overrides),
        train_x=train_x(e.report.x, sweep.specs),
        paper_x=paper_x(sweep),
        models={spec.arm: architecture(spec.model) for spec in shown},
        settings=arm_settings(settings, shown),
        visible=visible(e, sweep.specs),
        arms=list(e.arms),
        seeds=e.seeds,
        x_values=values,
        stops=stops(e, sweep.specs),
        minimized=minimized(sweep.specs),
        select=selection.metric,
        tune_seeds=e.tune_seeds,
        grid=grid_facts(work, shown, selection, {} if rows is None else tested(rows, e.report.y, values)),
        **stated(e),
        unchecked=e.unchecked,
        deviations=deviations(work, shown),
        runs=[run_facts(work, spec) for spec in shown],
        command=command(sweep),
        provenance=origin(work.finished) | own_files(sweep.specs),
    )


def minimized(specs: Sequence[RunSpec]) -> list[str]:
    """The metrics of the tasks where lower is better, of those that reports do not know by name."""
    tasks = [load_class("task", spec.task["name"]) for spec in specs]
    return sorted({metric for task in tasks for metric in task.minimized_metrics} - MINIMIZED)


def architecture(model: Mapping[str, Any]) -> str:
    """The architecture of a model: its registered name, but for the settings that make another one of it."""
    match model:
        case {"name": "rmt_xl", "alpha": alpha}:
            return "rmt" if alpha == 1 else "tarm"
        case {"name": "xl", "mem_len": 0}:
            return "transformer"
    return model["name"]


def train_x(axis: str, specs: Sequence[RunSpec]) -> float | None:
    """The largest x that any arm was trained on.

    axis: ``test_<field>`` of the task, which was trained on the values of ``train_<field>`` or else of ``<field>``; or
    a curve, which ends with the training contexts.
    """
    if axis == STEP:
        return None
    field = axis.removeprefix("test_")
    tasks = [spec.trained.task | stage["task"] for spec in specs for stage in spec.trained.stages]
    seen: list[float] = []
    for task in {json.dumps(task): task for task in tasks}.values():
        if field == axis:
            seen += build("task", task).curve_positions(axis)
        else:
            seen += task.get(f"train_{field}") or [task.get(field)]
    return max((x for x in seen if x is not None), default=None)


def paper_x(sweep: Sweep) -> float | None:
    """The largest x that is tested at the scale "paper", where this is another scale."""
    if not sweep.paper_specs or not sweep.experiment.report.x.startswith("test_"):
        return None
    return max(x_values(sweep.experiment, sweep.paper_specs))


def deviations(work: WorkList, shown: Sequence[RunSpec]) -> list[str]:
    """Settings that differ from the scale "paper", remarks of the runs on their tests, and the selected grid points.

    shown: the runs of the selected grid points.
    """
    sweep = work.sweep
    settings = differences(sweep.specs, sweep.paper_specs) if sweep.paper_specs else []
    remarks = [line for run in work.finished for line in run.tags.get("lit.remarks", "").splitlines()]
    return [*settings, *dict.fromkeys(remarks), *choices(shown)]


def choices(shown: Sequence[RunSpec]) -> list[str]:
    """A line for every arm with a grid: its selected points, and of which seeds if there are several."""
    seeds: dict[str, dict[str, list[int]]] = {}
    for spec in shown:
        if spec.point:
            seeds.setdefault(spec.arm, {}).setdefault(spec.point, []).append(spec.seed)
    lines = []
    for arm, points in seeds.items():
        of_seeds = [f"{p} ({seeds_shown(own)})" for p, own in points.items()]
        lines.append(f"`{arm}`: {', '.join(of_seeds if len(points) > 1 else points)}, chosen on validation data")
    return lines


def tested(rows: Any, metric: str, values: Sequence[float]) -> dict[tuple[str, str, int], list[float | None]]:
    """(arm, point, seed) -> the metric of the figure at every x, None where it is not a number."""
    found: dict[tuple[str, str, int], dict[float, float]] = {}
    for row in rows[rows["metric"] == metric].itertuples(index=False):
        found.setdefault((row.arm, row.point, row.seed), {})[row.x] = row.value
    return {run: [finite(of_x.get(x)) for x in values] for run, of_x in found.items()}


def finite(value: float | None) -> float | None:
    """None for what is not a finite number."""
    return value if value is not None and math.isfinite(value) else None


def grid_facts(
    work: WorkList,
    shown: Sequence[RunSpec],
    selection: Selection,
    tests: Mapping[tuple[str, str, int], Sequence[float | None]],
) -> list[dict[str, Any]]:
    """What the report shows of every run of the arms with a grid, see ``ReportPlan.grid``. tests: see ``tested``."""
    e, facts, selected = work.sweep.experiment, [], {(spec.arm, spec.seed): spec.point for spec in shown}
    points = {arm: dict(e.grid_points(arm)) for arm in e.arms}
    for spec in work.wanted:
        if spec.point:
            value, loss = map(finite, selection.validated(work.runs.get(spec.key)))
            own = {"settings": points[spec.arm][spec.point], "valid": value}
            finished = work.status(spec) == "finished"
            own |= {"chosen": finished and selected[spec.arm, spec.seed] == spec.point, "valid_loss": loss}
            own |= {"test": list(tests.get((spec.arm, spec.point, spec.seed), []))}
            facts.append(run_facts(work, spec) | own)
    return facts


def command(sweep: Sweep) -> str:
    """The command that makes the report: of an experiment of the project from its folder, of another one from that of
    its file."""
    scale = [] if sweep.is_default_scale else ["--scale", sweep.scale]
    ours = Path(sweep.options.experiment).resolve().parent == EXPERIMENTS.resolve()
    start = ["python", "run.py"] if ours else ["lit-memory", "run"]
    root = [] if ours or sweep.options.root is None else ["--root", sweep.options.root]
    return shlex.join([*start, sweep.options.experiment, *sweep.options.overrides, *scale, *root])


def own_files(specs: Iterable[RunSpec]) -> dict[str, Any]:
    """The files of the user that the runs have imported, with their digests; {} without any."""
    found = {Path(code["file"]).name: code["digest"][:12] for spec in specs for code in spec.code.values()}
    return {"imports": found} if found else {}


def origin(finished: Iterable["Run"]) -> dict[str, str]:
    """Commit, versions and hardware of the finished runs, each once. A resumed run may have several itself."""
    tags = [run.tags for run in finished]
    if not tags:
        return provenance()
    found = {}
    for name in ORIGIN:
        parts = [part for of_run in tags for part in of_run.get(f"lit.{name}", "").split("; ") if part]
        found[name] = "; ".join(dict.fromkeys(parts)) or "unknown"
    return found


def run_facts(work: WorkList, spec: RunSpec) -> dict[str, Any]:
    """What the report shows of one run, see ``ReportPlan.runs``."""
    facts = {"arm": spec.arm, "point": spec.point, "seed": spec.seed, "key": spec.key[:8], "status": work.status(spec)}
    facts["threads"] = spec.train["threads"]
    if work.sweep.experiment.report.memory and not (spec.train["cuts"] or spec.train["test_cuts"]):
        trained = (build("task", spec.trained.task | stage["task"]) for stage in spec.trained.stages)
        facts["trained_segments"] = max((task.written for task in trained), default=0)
    facts["most_steps"] = sum(stage["steps"] for run in with_starts(spec) for stage in run.stages)
    facts["samples"] = build("task", spec.task).test_sizes(spec.train["test_size"])
    run = work.runs.get(spec.key)
    if run is None:
        return facts
    facts |= {name: int(run.params[name]) for name in SIZES if name in run.params}
    if facts.get("state_growth"):
        facts |= growth_facts(work.sweep, spec)
    facts |= {name: run.metrics[name] for name in TOTALS if name in run.metrics}
    stages = stage_steps(run)
    if 0 < len(stages) < len(spec.stages):
        facts["stages"] = len(spec.stages)
    return facts | {"stage_steps": stages, "run_id": run.run_id, "error": run.tags.get("lit.error", "")}


def growth_facts(sweep: Sweep, spec: RunSpec) -> dict[str, Any]:
    """What a growing state grows by, and how often in the test at the report's ``state_x``."""
    experiment = sweep.experiment
    facts = {"growth_unit": load_class("model", spec.model["name"]).growth_unit}
    x = experiment.report.state_value(sweep.x_values)
    if x is not None:
        field = experiment.report.x.removeprefix("test_")
        facts["segments"] = build("task", {**spec.task, field: x}).written
    return facts
