"""An experiment as its file has it, the experiment at one scale, and the list of its runs.

Merge order, later wins: base, scale, arm, grid, command line, seed. Keys are dotted (``model.width``) or nested; a
trailing ``?`` (``model.memory_dim?``) applies the value only where the arm's model or task has the field. A whole
section may be replaced (``model: {name: rmt, ...}``). In a scale and in a grid, ``arms.<arm>.<key>`` addresses one arm,
``arms.<a>,<b>.<key>`` several; a scale's ``seeds``, ``grid``, ``expect``, ``requires`` and ``verify`` replace the
experiment's own, and its ``report`` changes keys of the experiment's. For ``extends`` see ``reading``, for ``imports``
the module of that name.

Nothing here imports torch or mlflow; torch comes in with the registered configurations when a plan is made.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lit_memory.plan.claims import KINDS
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.imports import import_files, user_code
from lit_memory.plan.merging import merged, parse_override, point_name, split_arm
from lit_memory.plan.parsing import parsed
from lit_memory.plan.reading import extended, file_name, mapping
from lit_memory.plan.resolve import Resolver
from lit_memory.plan.runspec import RunSpec
from lit_memory.plan.sections import PaperConfig, ReportConfig
from lit_memory.plan.strict import strict
from lit_memory.util.checks import nearest

MOST_RUNS = 10_000
Changes = Sequence[tuple[str, Any]]
"""Dotted keys and their values, from the command line."""


def load(path: str | Path) -> "Experiment":
    """Read and check an experiment file. Raises ConfigError: one line with file, key and what was expected."""
    return parse(extended(Path(path)), str(path))


def parse(tree: Any, file: str) -> "Experiment":
    """The experiment from the plain content of its file. Raises ConfigError."""
    return Experiment(file, **parsed(tree, file))


@dataclass
class Experiment:
    """An experiment as its file has it, with all scales. ``at`` gives the experiment at one of them."""

    file: str
    experiment: str
    title: str
    """The subject of the claim in words; "" for none."""
    labels: dict[str, str]
    """Arm -> words for it, of those that have some."""
    paper: PaperConfig
    base: dict[str, Any]
    """The three sections that all arms share."""
    scales: dict[str, dict[str, Any]]
    """Scale -> dotted settings, with ``seeds``, ``grid``, ``report`` and lines of its own; the first is the default."""
    arms: dict[str, dict[str, Any]]
    """Arm -> dotted settings."""
    grid: dict[str, list]
    """Dotted key -> the values of the cross product."""
    seeds: list[int]
    report: ReportConfig
    expect: list[str]
    """Claims, in the language of ``claims``."""
    requires: list[str]
    """What must hold before the claims can be judged."""
    verify: list[str]
    """What holds by construction, which is no evidence for the paper."""
    imports: list[str]
    """Python files of the user that register models and tasks; relative ones lie beside this one."""

    @property
    def default_scale(self) -> str:
        return next(iter(self.scales))

    def at(self, scale: str | None = None) -> "ScaledExperiment":
        """The experiment at one scale (default: the first). Raises ConfigError."""
        scale = self.default_scale if scale is None else scale
        if scale not in self.scales:
            raise ConfigError(self.file, "--scale", f"unknown scale {scale!r}; {nearest(scale, self.scales)}")
        settings, report = dict(self.scales[scale]), self.report
        if "report" in settings:
            report = self.scaled_report(scale, settings.pop("report"))
        return ScaledExperiment(
            file=self.file,
            experiment=self.experiment,
            title=self.title,
            labels=self.labels,
            scale=scale,
            paper=self.paper,
            base=self.base,
            arms=self.arms,
            grid=settings.pop("grid", self.grid),
            seeds=settings.pop("seeds", self.seeds),
            report=report,
            imports=self.imports,
            **{section: settings.pop(section, getattr(self, section)) for section in KINDS},
            settings=settings,
        )

    def scaled_report(self, scale: str, changes: Any) -> ReportConfig:
        """The report's configuration with the changes of one scale."""
        where = f"{self.file} (scale {scale})"
        values = asdict(self.report) | mapping(changes, where, "report")
        return strict(ReportConfig, values, lambda key: where, "report")


@dataclass
class ScaledExperiment:
    """An experiment at one scale. ``plan`` makes its runs."""

    file: str
    experiment: str
    title: str
    labels: dict[str, str]
    scale: str
    paper: PaperConfig
    base: dict[str, Any]
    settings: dict[str, Any]
    """Dotted settings of the scale, ``arms.<arm>.<key>`` among them."""
    arms: dict[str, dict[str, Any]]
    grid: dict[str, list]
    seeds: list[int]
    report: ReportConfig
    expect: list[str]
    requires: list[str]
    verify: list[str]
    imports: list[str]
    unchecked: list[str] = field(default_factory=list)
    """Why the command line leaves the claims without an answer, see ``measured.answerable``."""
    others: dict[str, "ScaledExperiment"] = field(default_factory=dict, compare=False, repr=False)
    """Experiments of the same folder at the same scale that ``beside`` has read, by name."""

    def plan(self, overrides: Sequence[str] = ()) -> list[RunSpec]:
        """All runs, arm by arm, point by point, seed by seed. Raises ConfigError."""
        changes = [parse_override(text) for text in overrides]
        points = sum(math.prod(map(len, self.axes(arm).values())) for arm in self.arms)
        count = len(self.seeds) * points
        if count > MOST_RUNS:
            key = "grid" if self.grid else "seeds"
            raise ConfigError(self.file, key, f"{count:.4g} runs; expected at most {MOST_RUNS}")
        specs = []
        for arm in self.arms:
            for point, settings in self.grid_points(arm):
                specs += self.specs(arm, point, settings, self.seeds, changes)
        return specs

    def axes(self, arm: str) -> dict[str, list]:
        """The grid of one arm: the axes that all arms share, and its own."""
        common, own = split_arm(self.grid, arm)
        return common | own

    def grid_points(self, arm: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, settings) of every point of the cross product of an arm's grid; ("", {}) without a grid."""
        axes = self.axes(arm)
        for values in itertools.product(*axes.values()):
            settings = dict(zip(axes, values, strict=True))
            yield point_name(settings), settings

    def specs(
        self,
        arm: str,
        point: str,
        settings: Mapping[str, Any],
        seeds: Sequence[int],
        changes: Changes,
        above: Sequence[str] = (),
    ) -> list[RunSpec]:
        """The runs of one arm at one point of its grid, with the runs that they start from.

        above: the arms that start from this one.
        """
        import_files(self.file, self.imports)
        run, name = self.resolve(arm, settings, changes), f"{self.experiment}/{arm}"
        code = user_code(f"{self.file} (arm {arm})", run)
        starts: Sequence[RunSpec | None] = [None] * len(seeds)
        init = run["train"]["init"]
        if isinstance(init, dict) and "run" in init:
            starts = self.starts(init["run"], name, seeds, changes, [*above, name])
        return [
            RunSpec(self.experiment, self.scale, arm, point, seed, **run, start=start, code=code)
            for seed, start in zip(seeds, starts, strict=True)
        ]

    def starts(
        self, wanted: str, arm: str, seeds: Sequence[int], changes: Changes, above: Sequence[str]
    ) -> list[RunSpec]:
        """The runs that ``train.init`` of an arm names, one for every seed. Changes of the command line apply to this
        experiment alone."""
        where, (other, _, source) = f"{self.file} (arm {arm.rpartition('/')[2]})", wanted.rpartition("/")

        def wrong(message: str) -> ConfigError:
            return ConfigError(where, "train.init", f"{{run: {wanted}}}: {message}")

        found = self
        if other and other != self.experiment:
            file_name(other, where, "train.init")
            found = self.beside(other)
        if source not in found.arms:
            raise wrong(f"no such arm; {nearest(source, found.arms)}")
        if found.axes(source):
            raise wrong("that arm has a grid; expected one of which every seed has one run")
        if f"{found.experiment}/{source}" in above:
            raise wrong("it starts from this arm itself; expected no circle")
        return [spec.trained for spec in found.specs(source, "", {}, seeds, changes if found is self else (), above)]

    def beside(self, name: str) -> "ScaledExperiment":
        """Another experiment of the same folder, at the same scale. Raises ConfigError."""
        if name not in self.others:
            self.others[name] = load(Path(self.file).with_name(f"{name}.yaml")).at(self.scale)
        return self.others[name]

    def resolve(self, arm: str, point: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        """The validated model, task and train sections of one arm at one point of its grid. Raises ConfigError."""
        common, own = split_arm(self.settings, arm)
        layers = [
            (f"{self.file} (scale {self.scale})", common),
            (f"{self.file} (arm {arm})", self.arms[arm]),
            (f"{self.file} (scale {self.scale}, arm {arm})", own),
            (f"{self.file} (grid)", point),
            ("command line", dict(changes)),
        ]
        tree, origin = merged(self.base, layers)
        return Resolver(self.file, arm, origin).resolve(tree)
