"""What a report is made from and what it concludes: the plan, the measured values, the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_memory.plan.sections import TIMES, ReportConfig
from lit_memory.report.labels import label, short
from lit_memory.report.verdict import Claim


@dataclass(frozen=True)
class ReportPlan:
    """The part of an experiment's plan that its report needs."""

    experiment: str
    scale: str
    paper: dict[str, str]
    """title, arxiv, item, claim."""
    arms: list[str]
    seeds: list[int]
    x_values: list[float]
    config: ReportConfig
    expect: list[str]
    modified: list[str] = field(default_factory=list)
    """Overrides of the command line; empty if the YAML ran as it is."""
    train_x: float | None = None
    """The largest x seen in training."""
    paper_x: float | None = None
    """The largest x that the scale "paper" tests, if this is another scale."""
    settings: dict[str, str] = field(default_factory=dict)
    """Arm -> its settings in Markdown, see ``settings.arm_settings``."""
    deviations: list[str] = field(default_factory=list)
    """Differences from the paper's set-up."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """arm, seed; if known also key, status, run_id, parameters, state_floats, state_growth, growth_unit, segments
    (written before the test at ``state_x`` reads; for a growing state), samples (of the test, one number per x), steps,
    stage_steps, seconds."""
    command: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    """git commit, dirty, versions, hardware, date."""

    def __post_init__(self) -> None:
        if self.config.log_x and min(self.x_values) < 0:
            raise ValueError(f"log_x: expected values of {self.config.x} of 0 or more, got {min(self.x_values):g}")
        self.config.state_value(self.x_values)

    @property
    def x_label(self) -> str:
        """The label of the x axis."""
        return label(self.config.x.removeprefix("test_"), self.config.x_label)

    @property
    def y_label(self) -> str:
        """The label of the y axis."""
        return label(self.config.y, self.config.y_label)

    @property
    def state_x(self) -> float | None:
        """The x of the state figure; None if the report has none."""
        return self.config.state_value(self.x_values)

    def sizes(self, arm: str) -> dict[str, Any]:
        """Sizes of the arm's model, the same in all its runs; {} if no run has them yet."""
        for run in self.runs:
            if run["arm"] == arm and ("parameters" in run or "state_floats" in run):
                return run
        return {}

    def samples(self, arm: str) -> list[int]:
        """Test contexts of one seed, one number per x; empty if no run has them yet."""
        return next((run["samples"] for run in self.runs if run["arm"] == arm and "samples" in run), [])

    def grows(self, arm: str) -> bool:
        """Whether the state of the arm grows with the context."""
        return bool(self.sizes(arm).get("state_growth"))

    def state_size(self, arm: str) -> float | None:
        """Floats of state per sample when the test at ``state_x`` reads it; None if no run has them yet."""
        sizes = self.sizes(arm)
        floats, segments = sizes.get("state_floats"), sizes.get("segments")
        if floats is None or not self.grows(arm):
            return floats
        return None if segments is None else floats + sizes["state_growth"] * segments


@dataclass(frozen=True)
class Report:
    """The outcome of a report, and its files."""

    verdict: str
    claims: list[Claim]
    missing: list[str]
    table: str
    """table.md."""
    scope: str = ""
    """Limits of the verdict: the part of the paper's test that was left out."""
    paths: dict[str, Path] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The summary for a terminal: table, claims in numbers, verdict."""
        claims = [f"{claim.line}:  {claim.numbers}" for claim in self.claims]
        missing = f"; missing: {'; '.join(self.missing)}" if self.missing else ""
        return "\n".join([self.table, *claims, self.verdict + self.scope + missing])


@dataclass(frozen=True)
class Results:
    """The measured values of a plan, by arm, metric, x and seed."""

    plan: ReportPlan
    cells: Mapping[tuple[str, str, float, int], float]

    @classmethod
    def from_frame(cls, plan: ReportPlan, frame: Any) -> "Results":
        """Read a long DataFrame (arm, seed, x, metric, value); rows outside the plan are ignored. Raises ValueError for
        two values of one cell."""
        cells: dict[tuple[str, str, float, int], float] = {}
        for arm, seed, x, metric, value in frame[["arm", "seed", "x", "metric", "value"]].itertuples(index=False):
            if arm not in plan.arms or seed not in plan.seeds or x not in plan.x_values:
                continue
            cell = (arm, metric, float(x), int(seed))
            if cell in cells:
                raise ValueError(f"two finished runs of arm {arm}, seed {seed} both report {metric} at x={x:g}")
            cells[cell] = float(value)
        return cls(plan, cells)

    @property
    def metrics(self) -> list[str]:
        """The metrics of table.csv: that of the figure, then the others by name, without ``TIMES``."""
        y = self.plan.config.y
        return [y, *sorted({metric for _, metric, _, _ in self.cells} - {y, *TIMES})]

    def of_time(self, metric: str) -> "Results":
        """The values of one of ``TIMES``, as the metric of a figure."""
        config = replace(self.plan.config, y=metric, y_label="", log_y=True, chance=None, identity=False)
        cells = {cell: value for cell, value in self.cells.items() if cell[1] == metric}
        return Results(replace(self.plan, config=config, train_x=None), cells)

    def by_seed(self, arm: str, metric: str | None, x: float) -> list[float | None]:
        """One value per planned seed, None if it is missing; metric None is that of the figure."""
        return [self.cells.get((arm, metric or self.plan.config.y, float(x), seed)) for seed in self.plan.seeds]

    def values(self, arm: str, metric: str | None, x: float) -> list[float]:
        """The values of the finished seeds, in the order of the plan."""
        return [value for value in self.by_seed(arm, metric, x) if value is not None]

    def missing(self) -> list[str]:
        """Planned runs without results, seeds with the same gap together: ``gamma seeds 0, 1 at 500 (failed)``."""
        status = {(run["arm"], run["seed"]): run.get("status") for run in self.plan.runs}
        gaps: dict[tuple[str, str], list[str]] = {}
        for arm in self.plan.arms:
            for seed in self.plan.seeds:
                absent = [x for x in self.plan.x_values if (arm, self.plan.config.y, float(x), seed) not in self.cells]
                if not absent:
                    continue
                where = "" if len(absent) == len(self.plan.x_values) else f" at {', '.join(map(short, absent))}"
                state = status.get((arm, seed)) or "finished"
                reason = "" if state.lower() == "finished" else f" ({state})"
                gaps.setdefault((arm, where + reason), []).append(str(seed))
        return [f"{arm} seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}{gap}" for (arm, gap), seeds in gaps.items()]
