"""What a run has measured, as rows and numbers for MLflow."""

import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lit_memory.lit.data import LitData
from lit_memory.report.scores import close
from lit_memory.run.tracking import Row
from lit_memory.util.metrics import Condition, MetricName, named_at


@dataclass(frozen=True)
class Results:
    """What a run has measured."""

    rows: Iterable[Row]
    """Of the test."""
    totals: Mapping[str, float]
    """Steps, seconds and memory of the whole run."""
    times: Iterable[Row]
    """Of the test and of timed steps, measured by the clock: no two runs of a key have the same."""
    scores: Mapping[tuple[str, Condition], Any]
    """(metric, x) -> an array of the scores of the samples of the test, of which the result is the mean."""


def collect(metrics: Mapping[str, Any], data: LitData) -> list[tuple[str, Condition, float]]:
    """(metric, x, value) rows of a test, with the metrics that the task derives from them.

    metrics: Lightning's, by the text of a ``MetricName``. x: the test condition, or the place of a value on a curve; a
    test with several conditions has the curve of its last one.
    """
    tested = [(MetricName.parse(name), float(value)) for name, value in metrics.items()]
    last, _ = data.test_conditions[-1]
    rows = []
    for x, task in data.test_conditions:
        means = {
            str(metric._replace(split="", condition=None)): value
            for metric, value in tested
            if (metric.split, metric.condition) == ("test", x)
        }
        for name, value in (means | task.summarize(means)).items():
            metric = MetricName.parse(name)
            if metric.place is None:
                rows.append((metric.name, x, value))
            elif x == last:
                rows.append((metric.name, metric.place, value))
    return rows


def columns(rows: Iterable[Row], data: LitData) -> dict[str, float]:
    """ "result/exact_match at 500" -> value, of the task's metrics at every condition of the test: one number each, as
    MLflow's table of runs and its charts have them."""
    conditions, names = {x for x, _ in data.test_conditions}, data.whole_task.metrics
    return {named_at(f"result/{name}", x): value for name, x, value in rows if name in names and x in conditions}


def sample_scores(
    scores: Mapping[tuple[str, Condition], Any], rows: Iterable[Row], data: LitData
) -> dict[tuple[str, Condition], Any]:
    """The scores of samples of which a result of a test is the mean.

    A metric that the task derives from others has them where it is linear, a capacity but no perplexity.
    """
    results, found = {(metric, x): value for metric, x, value in rows}, dict(scores)
    for x, task in data.test_conditions:
        own = {name: scores[name, x].tolist() for name in task.metrics if (name, x) in scores}
        samples = [dict(zip(own, of_one, strict=True)) for of_one in zip(*own.values(), strict=True)]
        derived = [task.summarize(sample) for sample in samples] if task.derived else []
        for name in task.derived if derived else ():
            found[name, x] = torch.tensor([of_one[name] for of_one in derived], dtype=torch.float64).numpy()
    return {cell: of_x for cell, of_x in found.items() if cell in results and close(of_x, results[cell])}


def peak_memory_mb() -> float:
    """Largest resident size of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes, Linux kilobytes
