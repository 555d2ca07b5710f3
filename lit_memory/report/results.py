"""What a report is made from and what it concludes: the measured values, the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_memory.plan.sections import STEP, TIMES
from lit_memory.report.labels import is_share, rounded, seeds_shown, short
from lit_memory.report.plan import ReportPlan
from lit_memory.report.scores import kept_scores
from lit_memory.report.statistics import Evidence
from lit_memory.report.verdict import Claim

Cell = tuple[str, str, float, int]
"""(arm, metric, x, seed)."""


@dataclass(frozen=True)
class Report:
    """The outcome of a report, and its files."""

    verdict: str
    claims: list[Claim]
    missing: list[str]
    table: str
    """table.md."""
    scope: str = ""
    """Limits of the verdict: too few seeds, and the part of the paper's test that was left out."""
    reason: str = ""
    """Why the verdict is what it is, in a sentence of Markdown; "" where the lines say it all."""
    fresh: str = ""
    """The verdict by those seeds alone that chose no point of a grid; "" where all or none do."""
    paths: dict[str, Path] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.paths["README.md"].parent

    @property
    def text(self) -> str:
        """The summary for a terminal: table, claims in numbers, verdict."""
        claims = [claim.in_words for claim in self.claims]
        missing = f"; missing: {'; '.join(self.missing)}" if self.missing else ""
        reason = [self.reason.replace("`", "")] if self.reason else []
        return "\n".join([self.table, *claims, *reason, self.verdict + self.scope + missing])


@dataclass(frozen=True)
class Results:
    """The measured values of a plan, by arm, metric, x and seed."""

    plan: ReportPlan
    cells: Mapping[Cell, float]
    scores: Mapping[Cell, Any] = field(default_factory=dict)
    """The scores of the test samples behind a cell, of which it is the mean: 1-D arrays of float64. Of the metrics that
    figure and lines use; none where they are not known."""
    validations: Mapping[Cell, float] = field(default_factory=dict)
    """One metric along the training, for ``report.curves``: the x of a cell is the step."""
    memory: Mapping[tuple[str, str, str, int], Any] = field(default_factory=dict)
    """What ``report.memory`` shows: (view, name, arm, seed) -> an array of ``lit.views``."""

    @classmethod
    def from_frame(cls, plan: ReportPlan, frame: Any, scores: Mapping[Cell, Any] | None = None) -> "Results":
        """Read a long DataFrame (arm, seed, x, metric, value) and the ``scores`` of its samples; what is outside the
        plan is ignored, and what is not judged is kept as table.csv has it. Raises ValueError for two values of one
        cell, and for scores that are not those of theirs."""
        cells, judged = dict[Cell, float](), plan.judged
        for arm, seed, x, metric, value in frame[["arm", "seed", "x", "metric", "value"]].itertuples(index=False):
            if arm not in plan.arms or seed not in plan.seeds or x not in plan.x_values:
                continue
            cell = (arm, metric, float(x), int(seed))
            if cell in cells:
                raise ValueError(f"two finished runs of arm {arm}, seed {seed} both report {metric} at x={x:g}")
            cells[cell] = float(value) if metric in judged or metric in TIMES else rounded(float(value))
        return cls.of(plan, cells, {cell: found for cell, found in (scores or {}).items() if cell[1] in judged})

    @classmethod
    def of(
        cls,
        plan: ReportPlan,
        cells: Mapping[Cell, float],
        scores: Mapping[Cell, Any],
        validations: Mapping[Cell, float] | None = None,
    ) -> "Results":
        """With those of the ``scores`` that belong to a cell. Raises ValueError for wrong ones."""
        return cls(plan, cells, kept_scores(cells, scores) if scores else {}, validations or {})

    @property
    def metrics(self) -> list[str]:
        """The metrics of table.csv: that of the figure, then the others by name, without ``TIMES``."""
        y = self.plan.config.y
        return [y, *sorted({metric for _, metric, _, _ in self.cells} - {y, *TIMES})]

    @property
    def learning(self) -> Mapping[Cell, float]:
        """The validations of the figure of the training; none if the report has no such figure or does not know
        them."""
        config = self.plan.config
        if not config.curves:
            return {}
        return {c: v for c, v in self.cells.items() if c[1] == config.y} if config.x == STEP else self.validations

    def of_time(self, metric: str) -> "Results":
        """The values of one of ``TIMES`` as the metric of a figure."""
        config = replace(self.plan.config, y=metric, y_label="", log_y=True, chance=None, identity=False, floors={})
        cells = {cell: value for cell, value in self.cells.items() if cell[1] == metric}
        return Results(replace(self.plan, config=config, train_x=None), cells)

    def by_seed(self, arm: str, metric: str | None, x: float) -> list[float | None]:
        """One value per planned seed, None if it is missing; metric None is that of the figure."""
        return [self.cells.get((arm, metric or self.plan.config.y, float(x), seed)) for seed in self.plan.seeds]

    def values(self, arm: str, metric: str | None, x: float) -> list[float]:
        """The values of the finished seeds, in the order of the plan."""
        return [value for value in self.by_seed(arm, metric, x) if value is not None]

    @property
    def evidence(self) -> Evidence:
        """What the lines are judged by."""
        plan = self.plan
        return Evidence(
            self.values, plan.x_values, len(plan.seeds), plan.config.y, scores=self.scores_at, samples=self.samples
        )

    def samples(self, arm: str, metric: str | None, x: float) -> int:
        """How many samples of the test have measured a share; 0 where that is not known, and of what is no share."""
        xs, samples = self.plan.tested(arm), self.plan.samples(arm)
        if not is_share(metric or self.plan.config.y) or len(xs) != len(samples):
            return 0
        return dict(zip(xs, samples, strict=True)).get(x, 0)

    def scores_at(self, x: float) -> dict[tuple[str, str], list[Any]]:
        """(arm, metric) -> the scores of every planned seed, where all are known."""
        columns = dict.fromkeys((arm, metric) for arm, metric, at, _ in self.scores if at == x)
        cells = {column: [(*column, float(x), seed) for seed in self.plan.seeds] for column in columns}
        return {
            column: [self.scores[cell] for cell in of_seeds]
            for column, of_seeds in cells.items()
            if self.scores.keys() >= {*of_seeds}
        }

    def missing(self) -> list[str]:
        """Planned runs without results, seeds with the same gap together: ``gamma seeds 0, 1 at 500 (failed)``; and
        choices among the points of a grid that are not final, as points are left to run."""
        gaps: dict[tuple[str, str], list[int]] = {}
        for arm in self.plan.arms:
            for seed in self.plan.seeds:
                if (gap := self._missing(arm, seed)) is not None:
                    gaps.setdefault((arm, gap), []).append(seed)
        return [f"{arm} {seeds_shown(seeds)}{gap}" for (arm, gap), seeds in gaps.items()]

    def _missing(self, arm: str, seed: int) -> str | None:
        """What is missing of a seed of an arm: "" for all of it, None for nothing."""
        tested = self.plan.tested(arm)
        cells = {x: (arm, self.plan.config.y, float(x), seed) for x in tested}
        absent = [x for x, cell in cells.items() if cell not in self.cells]
        of_seed = [run for run in self.plan.grid if (run["arm"], run["seed"]) == (arm, seed)]
        left = [run["status"] for run in of_seed if run["status"] not in ("finished", "broke down")]
        if not absent:
            states = ", ".join(dict.fromkeys(left))
            return f" at {len(left)} of {len(of_seed)} grid points ({states})" if left else None
        where = "" if len(absent) == len(tested) else f" at {', '.join(map(short, absent))}"
        status = {(run["arm"], run["seed"]): run.get("status") for run in self.plan.runs}
        state = status.get((arm, seed)) or "finished"
        return where + ("" if state.lower() == "finished" else f" ({state})")
