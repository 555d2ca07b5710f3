"""Which points of a grid a report shows: one for every arm and seed, chosen by the last validation of its runs.

Nothing here reads a test. What a report shows of the other points, their tests included, is read after the choice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_memory.plan.experiment import ScaledExperiment
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import load_class

if TYPE_CHECKING:
    from lit_memory.run.tracking import Run

SETTLED = ("finished", "failed")
"""Statuses of a point that may be chosen, or lost because its training broke down; any other keeps a report waiting."""


@dataclass(frozen=True)
class Selection:
    """How the points of a grid are compared."""

    metric: str
    """Of the last validation."""
    minimized: bool

    @classmethod
    def of(cls, experiment: ScaledExperiment, specs: Sequence[RunSpec]) -> "Selection":
        """By the experiment's ``select``, or else the first metric of its task."""
        task = load_class("task", specs[0].task["name"])
        metric = experiment.select or task.metrics[0]
        return cls(metric, metric == "loss" or metric in task.minimized_metrics)

    def validated(self, run: "Run | None") -> tuple[float | None, float | None]:
        """The metric and the loss of the last validation of a finished run; None where there is none."""
        if run is None or run.status != "FINISHED":
            return None, None
        return run.metrics.get(f"valid/{self.metric}"), run.metrics.get("valid/loss")

    def rank(self, run: "Run | None") -> tuple[bool, float, float]:
        """Less is better: a finished run, the metric, and where that is equal the loss. NaN is worse than anything."""
        value, loss = (math.inf if v is None or math.isnan(v) else v for v in self.validated(run))
        finished = run is not None and run.status == "FINISHED"
        return not finished, value if self.minimized or value == math.inf else -value, loss


def chosen(experiment: ScaledExperiment, specs: Sequence[RunSpec], runs: Mapping[str, "Run"]) -> list[RunSpec]:
    """The runs that a report shows: of every arm and seed that with the best last validation, and of equally good ones
    the first in the order of the grid. Without a finished run, it is the first point."""
    selection, groups = Selection.of(experiment, specs), dict[tuple[str, int], list[RunSpec]]()
    for spec in specs:
        groups.setdefault((spec.arm, spec.seed), []).append(spec)
    return [min(group, key=lambda spec: selection.rank(runs.get(spec.key))) for group in groups.values()]
