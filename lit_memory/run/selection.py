"""Which points of a grid a report shows, chosen by the last validation of the runs: one for every arm and seed, or one
for every arm where the experiment has ``tune_seeds``.

Nothing here reads a test. What a report shows of the other points, their tests included, is read after the choice.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_memory.plan.experiment import ScaledExperiment
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import load_class

if TYPE_CHECKING:
    from lit_memory.run.tracking import Run

SETTLED = ("finished", "broke down")
"""Statuses of a point that may be chosen, or has lost; any other keeps a report waiting."""


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

    def rank(self, run: "Run | None") -> tuple[bool, float, float, float]:
        """Less is better: a finished run whose training did not break down, that came to a later stage (some are
        ``needed``), the metric, and where that is equal the loss. NaN is worse than anything."""
        value, loss = (math.inf if v is None or math.isnan(v) else v for v in self.validated(run))
        finished = run is not None and run.status == "FINISHED" and "broke_down" not in run.metrics
        stage = run.metrics.get("stage", 0.0) if run is not None else 0.0
        return not finished, -stage, value if self.minimized or value == math.inf else -value, loss

    def mean_rank(self, runs: "Sequence[Run | None]") -> tuple[float, ...]:
        """The means of ``rank``: a point with a run that has not finished is worse than any that has none."""
        return tuple(sum(column) / len(runs) for column in zip(*map(self.rank, runs), strict=True))


def chosen(experiment: ScaledExperiment, specs: Sequence[RunSpec], runs: Mapping[str, "Run"]) -> list[RunSpec]:
    """The runs that a report shows: of every arm and seed that with the best last validation, or of every arm those
    with the best mean over ``tune_seeds``. Of equally good ones, and without a finished run, it is the first in the
    order of the grid."""
    selection, tuning = Selection.of(experiment, specs), experiment.tune_seeds
    groups: dict[tuple[str, int | None], dict[str, list[RunSpec]]] = {}
    for spec in specs:
        points = groups.setdefault((spec.arm, None if tuning else spec.seed), {})
        points.setdefault(spec.point, []).append(spec)

    def rank(point: Sequence[RunSpec]) -> tuple[float, ...]:
        return selection.mean_rank([runs.get(spec.key) for spec in point if not tuning or spec.seed in tuning])

    return [spec for points in groups.values() for spec in min(points.values(), key=rank)]


def wanted(
    experiment: ScaledExperiment,
    specs: Sequence[RunSpec],
    runs: Mapping[str, "Run"],
    settled: Callable[[RunSpec], bool],
) -> list[RunSpec]:
    """The runs that a report needs, as far as that is known.

    Without ``tune_seeds`` that is all. Else it is every point with these seeds, and with the others the chosen point of
    an arm as soon as every run that chooses is settled.
    """
    tuning = experiment.tune_seeds
    if not tuning:
        return list(specs)
    best = {spec.arm: spec.point for spec in chosen(experiment, specs, runs)}
    undecided = {spec.arm for spec in specs if spec.seed in tuning and not settled(spec)}

    def needed(spec: RunSpec) -> bool:
        decided = not spec.point or (spec.arm not in undecided and spec.point == best[spec.arm])
        return spec.seed in tuning or decided

    return list(filter(needed, specs))
