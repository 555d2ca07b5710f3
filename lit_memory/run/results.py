"""What a run has measured, as rows and numbers for MLflow."""

import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lit_memory.lit.data import LitData
from lit_memory.run.tracking import Row


@dataclass(frozen=True)
class Results:
    """What a run has measured."""

    rows: Iterable[Row]
    """Of the test."""
    totals: Mapping[str, float]
    """Steps, seconds and memory of the whole run."""
    times: Iterable[Row]
    """Of the test and of timed steps, measured by the clock: no two runs of a key have the same."""


def collect(metrics: Mapping[str, Any], data: LitData) -> list[tuple[str, float, float]]:
    """(metric, x, value) rows from Lightning's ``test/<metric>@<x>``, with what the task derives from them.
    ``metric[place]`` is a value of a curve, whose x is its place; a test with several conditions has the curve of its
    last one."""
    out = []
    for x, task in data.test_conditions:
        means = {
            name.removeprefix("test/").removesuffix(f"@{x}"): float(v)
            for name, v in metrics.items()
            if name.endswith(f"@{x}")
        }
        for name, value in (means | task.summarize(means)).items():
            metric, on_curve, place = name.removesuffix("]").partition("[")
            if not on_curve or x == data.test_conditions[-1][0]:
                out.append((metric, int(place) if on_curve else x, value))
    return out


def peak_memory_mb() -> float:
    """Largest resident size of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes, Linux kilobytes
