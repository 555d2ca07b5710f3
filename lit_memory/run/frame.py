"""The results of finished runs as one table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_memory.plan.runspec import RunSpec
from lit_memory.plan.sections import STEP, ReportConfig
from lit_memory.registry import load_class
from lit_memory.report.curves import curve_metrics
from lit_memory.report.results import Cell

if TYPE_CHECKING:
    from lit_memory.run.tracking import Row, Run, Tracker

COLUMNS = ("arm", "point", "seed", "x", "metric", "value")


def results_frame(tracker: "Tracker", specs: Sequence[RunSpec], runs: Mapping[str, "Run"], report: ReportConfig) -> Any:
    """Long-format DataFrame (``COLUMNS``) of the FINISHED runs of a plan; x is the report's axis.

    The metric ``steps``, the same at every x of a run, counts its optimizer steps, and ``later_steps`` those after its
    first stage, for runs that have more than one.
    """
    from pandas import DataFrame

    rows = []
    done = finished(specs, runs)
    tracker.read_ahead([run for _, run in done], ("valid/", "test/") if report.x == STEP else ("test/", "time/"))
    for spec, run in done:
        of_run = curve_rows(tracker, spec, run, report) if report.x == STEP else result_rows(tracker, run)
        rows += [(spec.arm, spec.point, spec.seed, x, metric, value) for metric, x, value in of_run]
    return DataFrame(rows, columns=list(COLUMNS))


def validations(
    tracker: "Tracker", specs: Sequence[RunSpec], runs: Mapping[str, "Run"], report: ReportConfig
) -> dict[Cell, float]:
    """(arm, metric, step, seed) -> the values of FINISHED runs along their training, for ``report.curves``: of the
    figure's metric, or of the first of the task if that one is not validated."""
    found: dict[Cell, float] = {}
    done = finished(specs, runs)
    tracker.read_ahead([run for _, run in done], ("valid/",))
    for spec, run in done:
        rows = tracker.results(run, "valid/")
        validated, first = {metric for metric, _, _ in rows}, load_class("task", spec.task["name"]).metrics[0]
        metric = report.y if report.y in validated else first
        found |= {(spec.arm, metric, float(x), spec.seed): value for name, x, value in rows if name == metric}
    return found


def finished(specs: Sequence[RunSpec], runs: Mapping[str, "Run"]) -> list[tuple[RunSpec, "Run"]]:
    """The FINISHED runs of a plan."""
    found = [(spec, runs[spec.key]) for spec in specs if spec.key in runs]
    return [(spec, run) for spec, run in found if run.status == "FINISHED"]


def stage_steps(run: "Run") -> list[int]:
    """Optimizer steps of every stage that a run began; [] while they are not known."""
    return [int(steps) for steps in run.tags.get("lit.stage_steps", "").split()]


def result_rows(tracker: "Tracker", run: "Run") -> "Iterator[Row]":
    """(metric, x, value) rows of a run's test, its optimizer steps and its times."""
    results, later = tracker.results(run), stage_steps(run)[1:]
    yield from results
    for x in dict.fromkeys(x for _, x, _ in results):
        yield "steps", x, run.metrics["steps"]
        if later:
            yield "later_steps", x, float(sum(later))
    yield from tracker.results(run, "time/")


def curve_rows(tracker: "Tracker", spec: RunSpec, run: "Run", report: ReportConfig) -> "Iterator[Row]":
    """(metric, step, value) rows of a run's validations. What is measured once a run, over its whole curve or by its
    test, is the same at every step."""
    rows = tracker.results(run, "valid/")
    yield from rows
    curves: dict[str, dict[int, float]] = {report.y: {}, "loss": {}}
    for metric, step, value in rows:
        if metric in curves:
            curves[metric][int(step)] = value
    task, threshold = load_class("task", spec.task["name"]), report.threshold

    def reached(value: float) -> bool:
        return threshold is not None and task.better(report.y, value, threshold)

    once = curve_metrics(curves[report.y], curves["loss"], reached)
    tested = tracker.results(run)
    last = max(x for _, x, _ in tested)
    once |= {f"test_{name}": value for name, x, value in tested if x == last}
    for name, value in once.items():
        yield from ((name, step, value) for step in curves["loss"])
