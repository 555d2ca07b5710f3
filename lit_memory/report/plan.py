"""The part of an experiment's plan that its report needs."""

from dataclasses import dataclass, field
from typing import Any

from lit_memory.plan.claims import KINDS, parse, refs
from lit_memory.plan.sections import ReportConfig
from lit_memory.report.labels import MINIMIZED, label


@dataclass(frozen=True)
class ReportPlan:
    """Arms, seeds, lines and runs of an experiment at one scale, and the words for them."""

    experiment: str
    scale: str
    paper: dict[str, str]
    """title, arxiv, item, claim."""
    arms: list[str]
    seeds: list[int]
    x_values: list[float]
    config: ReportConfig
    expect: list[str]
    requires: list[str] = field(default_factory=list)
    verify: list[str] = field(default_factory=list)
    evidence: str = ""
    """Level of evidence, see ``plan.measured.evidence``; "" in old reports."""
    title: str = ""
    """The subject of the claim in words; "" for none."""
    labels: dict[str, str] = field(default_factory=dict)
    """Arm -> words for it, of those that have some."""
    modified: list[str] = field(default_factory=list)
    """Overrides of the command line; empty if the YAML ran as it is."""
    unchecked: list[str] = field(default_factory=list)
    """Why these overrides leave the claims without an answer; empty where they do not."""
    stops: dict[str, int] = field(default_factory=dict)
    """Arm -> how many of the first x values its test has, of the arms that do not have all."""
    train_x: float | None = None
    """The largest x seen in training."""
    paper_x: float | None = None
    """The largest x that the scale "paper" tests, if this is another scale."""
    models: dict[str, str] = field(default_factory=dict)
    """Arm -> the architecture, by which figures choose its colour."""
    settings: dict[str, str] = field(default_factory=dict)
    """Arm -> its settings in Markdown, see ``settings.arm_settings``."""
    deviations: list[str] = field(default_factory=list)
    """Differences from the paper's set-up."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """arm, seed; if known also key, status, run_id, parameters, state_floats, state_growth, growth_unit, segments
    (written before the test at ``state_x`` reads; for a growing state), trained_segments (of the longest contexts, for
    ``report.memory``), samples (of the test, one number per x), threads, steps, most_steps (that it may take, with
    those of the runs it starts from), stage_steps, stages (planned, of a run that stopped before the last), broke_down
    (the steps after which its training did), seconds."""
    minimized: list[str] = field(default_factory=list)
    """Metrics of tasks from elsewhere where lower is better, see ``less_is_better``."""
    select: str = ""
    """Metric of the last validation by which the points of a grid were chosen."""
    tune_seeds: list[int] = field(default_factory=list)
    """Seeds that chose one point for all seeds of an arm; [] where every seed chose its own."""
    grid: list[dict[str, Any]] = field(default_factory=list)
    """Every run of the arms with a grid, like ``runs``, with settings (swept key -> value), chosen, valid and
    valid_loss (of the last validation) and test (the figure's metric at every x); None for what is not a number."""
    visible: dict[str, list[str]] = field(default_factory=dict)
    """View of ``report.memory`` -> the arms that allow it."""
    command: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    """git commit, dirty, versions, hardware, date."""

    def __post_init__(self) -> None:
        if self.config.log_x and min(self.x_values) < 0:
            raise ValueError(f"log_x: expected values of {self.config.x} of 0 or more, got {min(self.x_values):g}")
        self.config.state_value(self.x_values)

    @property
    def lines(self) -> dict[str, list[str]]:
        """Section of ``claims.KINDS`` -> its lines."""
        return {section: getattr(self, section) for section in KINDS}

    def metrics_of(self, *sections: str) -> set[str]:
        """The metrics that the lines of some sections of ``claims.KINDS`` are about."""
        lines = [line for section in sections for line in self.lines[section]]
        return {ref.metric or self.config.y for line in lines for ref in refs(parse(line))}

    @property
    def fresh_seeds(self) -> list[int]:
        """The seeds that chose no point of a grid, where some chose for all."""
        return [seed for seed in self.seeds if seed not in self.tune_seeds] if self.tune_seeds else []

    @property
    def judged(self) -> set[str]:
        """The metrics of the figure and of all lines."""
        return {self.config.y} | self.metrics_of(*KINDS)

    @property
    def about_time(self) -> bool:
        """Whether the claim is about times alone, which the figure then shows in place of y."""
        return self.metrics_of("expect") == {self.config.time}

    @property
    def times_apart(self) -> bool:
        """Whether times have a figure of their own."""
        return bool(self.config.time) and not self.about_time

    @property
    def heading(self) -> str:
        """The title in words, else the name of the experiment."""
        return self.title or self.experiment

    @property
    def setting(self) -> str:
        """Scale and level of evidence: "scale `cpu` (toy)"."""
        return f"scale `{self.scale}`" + (f" ({self.evidence})" if self.evidence else "")

    def shown(self, arm: str) -> str:
        """An arm in words, else its name."""
        return self.labels.get(arm, arm)

    def tested(self, arm: str) -> list[float]:
        """The x values that the test of an arm has."""
        return self.x_values[: self.stops.get(arm)]

    @property
    def architectures(self) -> list[str]:
        """The architecture of every arm, "" where it is not known."""
        return [self.models.get(arm, "") for arm in self.arms]

    def less_is_better(self, metric: str) -> bool:
        """Whether lower is better, of a test or of a validation."""
        return metric.removeprefix("test_") in {*MINIMIZED, *self.minimized}

    def last_stage(self, arm: str, seed: int) -> int:
        """Steps of a run before the last stage; all of them if it stopped earlier, and 0 if they are not known."""
        found = (run for run in self.runs if (run["arm"], run["seed"]) == (arm, seed))
        run = next(found, {})
        steps = run.get("stage_steps") or []
        return sum(steps if "stages" in run else steps[:-1])

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
        """What is known of the arm's model and the same in all its runs; {} if no run has sizes yet."""
        known = [run for run in self.runs if run["arm"] == arm and ("parameters" in run or "state_floats" in run)]
        first = known[0] if known else {}
        return {name: value for name, value in first.items() if all(run.get(name, value) == value for run in known)}

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
