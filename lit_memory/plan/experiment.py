"""An experiment as its file has it, the experiment at one scale, and the list of its runs.

Merge order, later wins: base, scale, arm, grid, command line, seed. Keys are dotted (``model.width``); a trailing ``?``
(``model.memory_dim?``) applies the value only where the arm's model or task has the field. The name of a section alone
replaces it as a whole (``model: {name: rmt, ...}``). In a scale and in a grid, ``arms.<arm>.<key>`` addresses one arm,
``arms.<a>,<b>.<key>`` several; what a scale has of ``SCALED`` replaces the experiment's own, its ``report`` changes
keys of the experiment's, and its ``arms`` are some of them. Several values on the command line (``train.lr=1e-3,3e-3``)
are an axis of the grid, in place of the file's for that key. For ``extends`` see ``reading``, for ``imports`` the
module of that name.

Nothing here imports torch or mlflow; torch comes in with the registered configurations when a plan is made.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lit_memory.plan.contents import user_files
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.imports import import_files, user_code
from lit_memory.plan.merging import merged, parse_override, point_name, split_arm
from lit_memory.plan.parsing import SCALED, parsed
from lit_memory.plan.reading import beside, extended, file_name, mapping, only, over
from lit_memory.plan.resolve import Resolver
from lit_memory.plan.runspec import RunSpec
from lit_memory.plan.sections import PaperConfig, ReportConfig
from lit_memory.plan.strict import strict
from lit_memory.registry import check_inherited
from lit_memory.util.checks import nearest

MOST_RUNS = 10_000
Changes = Sequence[tuple[str, Any]]
"""Dotted keys and their values, from the command line."""


def load(path: str | Path) -> "Experiment":
    """Read and check an experiment file. Raises ConfigError: one line with file, key and what was expected."""
    return parse(extended(Path(path)), str(path))


def parse(tree: Any, file: str) -> "Experiment":
    """The experiment from the plain content of its file. Raises ConfigError."""
    return Experiment(file=file, **parsed(tree, file))


@dataclass(kw_only=True)
class Shared:
    """What an experiment says at every scale, unless the scale says it otherwise."""

    file: str
    experiment: str
    title: str
    """The subject of the claim in words; "" for none."""
    labels: dict[str, str]
    """Arm -> words for it, of those that have some."""
    paper: PaperConfig
    base: dict[str, Any]
    """The three sections that all arms share."""
    arms: dict[str, dict[str, Any]]
    """Arm -> dotted settings."""
    grid: dict[str, list]
    """Dotted key -> the values of the cross product."""
    select: str
    """Metric of the last validation that chooses among the points of a grid; "" for the task's first."""
    seeds: list[int]
    tune_seeds: list[int]
    """Seeds that choose one point for all seeds of an arm; []: every seed chooses its own."""
    report: ReportConfig
    expect: list[str]
    """Claims, in the language of ``claims``."""
    requires: list[str]
    """What must hold before the claims can be judged."""
    verify: list[str]
    """What holds by construction, which is no evidence for the paper."""
    imports: list[str]
    """Python files of the user that register models and tasks; relative ones lie beside this one."""


@dataclass(kw_only=True)
class Experiment(Shared):
    """An experiment as its file has it, with all scales. ``at`` gives the experiment at one of them."""

    scales: dict[str, dict[str, Any]]
    """Scale -> dotted settings, with ``seeds``, ``grid``, ``report`` and lines of its own; the first is the default."""

    @property
    def default_scale(self) -> str:
        return next(iter(self.scales))

    def at(self, scale: str | None = None) -> "ScaledExperiment":
        """The experiment at one scale (default: the first). Raises ConfigError."""
        scale = self.default_scale if scale is None else scale
        if scale not in self.scales:
            raise ConfigError(self.file, "--scale", f"unknown scale {scale!r}; {nearest(scale, self.scales)}")
        settings = dict(self.scales[scale])
        arms = settings.pop("arms", list(self.arms))
        shared = {each.name: getattr(self, each.name) for each in fields(Shared)}
        shared |= {key: settings.pop(key) for key in SCALED if key in settings}
        whole = shared | {"report": asdict(self.report), "scales": {scale: settings}}
        found = only(whole, arms, self.file, self.file)
        settings = found.pop("scales")[scale]
        found["report"] = self.scaled_report(scale, found["report"], settings.pop("report", {}))
        return ScaledExperiment(**found, scale=scale, settings=settings)

    def scaled_report(self, scale: str, report: Mapping[str, Any], changes: Any) -> ReportConfig:
        """The report's configuration with the changes of one scale."""
        where = f"{self.file} (scale {scale})"
        return strict(ReportConfig, {**report, **mapping(changes, where, "report")}, lambda key: where, "report")


@dataclass(kw_only=True)
class ScaledExperiment(Shared):
    """An experiment at one scale. ``plan`` makes its runs."""

    scale: str
    settings: dict[str, Any]
    """Dotted settings of the scale, ``arms.<arm>.<key>`` among them."""
    unchecked: list[str] = field(default_factory=list)
    """Why the command line leaves the claims without an answer, see ``measured.answerable``."""
    swept: dict[str, list] = field(default_factory=dict)
    """Axes of the command line, for all arms; each replaces the file's axis of that key."""
    others: dict[str, "ScaledExperiment"] = field(default_factory=dict, compare=False, repr=False)
    """Experiments of the same folder at the same scale that ``beside`` has read, by name."""

    def plan(self, overrides: Sequence[str] = ()) -> list[RunSpec]:
        """All runs, arm by arm, point by point, seed by seed. Raises ConfigError."""
        found = self.sweeping(overrides)
        if found.swept != self.swept:
            return found.plan(overrides)
        changes = {key: value for key, value in map(parse_override, overrides) if key not in self.swept}
        points = sum(math.prod(map(len, self.axes(arm).values())) for arm in self.arms)
        count = len(self.seeds) * points
        if count > MOST_RUNS:
            key = "grid" if self.grid else "seeds"
            raise ConfigError(self.file, key, f"{count:.4g} runs; expected at most {MOST_RUNS}")
        import_files(self.file, self.imports)
        specs = []
        for arm in self.arms:
            self.check_axes(arm, changes)
            seen: dict[str, dict[str, Any]] = {}
            for point, settings in self.grid_points(arm):
                found = self.specs(arm, point, settings, self.seeds, list(changes.items()))
                self.check_new(arm, settings, seen.setdefault(found[0].key, settings))
                specs += found
        return specs

    def sweeping(self, overrides: Sequence[str]) -> "ScaledExperiment":
        """With the axes of a command line. Raises ConfigError."""
        changes = dict(map(parse_override, overrides))
        return replace(self, swept={key: list(values) for key, values in changes.items() if isinstance(values, tuple)})

    def check_axes(self, arm: str, changes: Mapping[str, Any]) -> None:
        """Raise ConfigError for a change of the command line that would make all points of an axis one."""
        for key, values in self.axes(arm).items():
            for changed in changes:
                if len(values) > 1 and f"{key.rstrip('?')}.".startswith(f"{changed.rstrip('?')}."):
                    listed = ",".join(map(str, values))
                    reason = f"the grid of arm {arm} has {len(values)} values of {key}, which would be one"
                    expected = f"expected no such change, or another grid, for example {key}={listed}"
                    raise ConfigError("command line", changed, f"{reason}; {expected}")

    def check_new(self, arm: str, point: Mapping[str, Any], same: Mapping[str, Any]) -> None:
        """Raise ConfigError for a point of a grid whose runs are those of another one, ``same``."""
        if same is not point:
            key = next(key for key in point if point[key] != same[key])
            reason = f"{same[key]!r} and {point[key]!r} are the same run, as this arm has no such field"
            expected = f"expected arms.<arm>.{key.rstrip('?')}, for the arms that have it"
            raise ConfigError(f"{self.file} (arm {arm})", f"grid.{key}", f"{reason}; {expected}")

    def axes(self, arm: str) -> dict[str, list]:
        """The grid of one arm: the axes that all arms share, its own, and those of the command line."""
        common, own = split_arm(self.grid, arm)
        spelled = {key.rstrip("?"): key for key in own}  # its axis takes the place of that of the same field
        return over({spelled.get(key.rstrip("?"), key): axis for key, axis in common.items()} | own, self.swept)

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
        run, name = self.resolve(arm, settings, changes), f"{self.experiment}/{arm}"
        where = f"{self.file} (arm {arm})"
        brought = {"code": user_code(where, run), "files": user_files(where, run)}
        starts: Sequence[RunSpec | None] = [None] * len(seeds)
        init = run["train"]["init"]
        if isinstance(init, dict) and "run" in init:
            starts = self.starts(init["run"], name, run["model"], seeds, changes, [*above, name])
        return [
            RunSpec(self.experiment, self.scale, arm, point, seed, **run, start=start, **brought)
            for seed, start in zip(seeds, starts, strict=True)
        ]

    def starts(
        self,
        wanted: str,
        arm: str,
        model: Mapping[str, Any],
        seeds: Sequence[int],
        changes: Changes,
        above: Sequence[str],
    ) -> list[RunSpec]:
        """The runs that ``train.init`` of an arm names, one for every seed. Changes of the command line apply to this
        experiment alone. Raises ConfigError where the arm's model cannot take over their weights."""
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
        specs = found.specs(source, "", {}, seeds, changes if found is self else (), above)
        starts = [spec.trained for spec in specs]
        try:
            for start in starts[:1]:  # seeds have the same model
                check_inherited(model, start.model)
        except ValueError as error:
            raise wrong(str(error)) from None
        return starts

    def beside(self, name: str) -> "ScaledExperiment":
        """Another experiment of the same folder or of the project, at the same scale. Raises ConfigError."""
        if name not in self.others:
            self.others[name] = other = load(beside(Path(self.file), name, "train.init")).at(self.scale)
            import_files(other.file, other.imports)
        return self.others[name]

    def resolve(self, arm: str, point: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        """The validated model, task and train sections of one arm at one point of its grid. Raises ConfigError."""
        common, own = split_arm(self.settings, arm)
        swept = {key: value for key, value in point.items() if key in self.swept}
        layers = [
            (f"{self.file} (scale {self.scale})", common),
            (f"{self.file} (arm {arm})", self.arms[arm]),
            (f"{self.file} (scale {self.scale}, arm {arm})", own),
            (f"{self.file} (grid)", {key: value for key, value in point.items() if key not in swept}),
            ("command line", dict(changes) | swept),
        ]
        try:
            return self.resolved(arm, layers)
        except ConfigError as error:
            key = next((key for key in swept if error.parts[1] == key.rstrip("?")), None)
            if key is not None:
                self.check_no_list(arm, layers, key)
            raise

    def resolved(self, arm: str, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
        """The validated sections of one arm under all layers. Raises ConfigError."""
        tree, origin = merged(self.base, layers)
        return Resolver(self.file, arm, origin).resolve(tree)

    def check_no_list(self, arm: str, layers: Sequence[tuple[str, Mapping[str, Any]]], key: str) -> None:
        """Raise ConfigError if the points of an axis of the command line are rather one value: a list."""
        try:
            self.resolved(arm, [*layers, ("command line", {key: self.swept[key]})])
        except ConfigError:
            return
        name, values = key.rstrip("?"), ",".join(map(str, self.swept[key]))
        message = f"{values} is a grid; expected a list, write {name}=[{values}]"
        raise ConfigError("command line", name, message) from None
