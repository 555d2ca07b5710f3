"""YAML -> Experiment -> list of RunSpec: strict validation, scales, arms, grid, seeds, overrides, keys.

Merge order, later wins: base, scale, arm, grid, command line, seed. Keys are dotted (``model.width``) or nested; a
trailing ``?`` (``model.memory_dim?``) applies the value only where the arm's model or task has the field. A whole
section may be replaced (``model: {name: rmt, ...}``). In a scale and in a grid, ``arms.<arm>.<key>`` addresses one arm,
``arms.<a>,<b>.<key>`` several; a scale's ``seeds``, ``grid`` and ``expect`` replace the experiment's own, and its
``report`` changes keys of that. ``extends: other`` starts from the file beside
it: sections, scales, paper and report are taken over key by key; arms (with what scales say of them), grid, seeds and
    claims as a whole.

Nothing here imports torch or mlflow; torch comes in with the registered configurations when a plan is made.
"""

import ast
import copy
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_memory.plan.claims import check_expect
from lit_memory.plan.config import DEEPEST, ConfigError, PaperConfig, TrainConfig, first_line, problems, strict
from lit_memory.registry import REGISTRIES, build, load_class, model_size, sketch, weights_of
from lit_memory.report.curves import OF_A_RUN, STEP
from lit_memory.report.render import TIMES, ReportConfig
from lit_memory.util.checks import field_name, nearest

LARGEST_FILE = 1_000_000
MOST_RUNS = 10_000
KEY_VERSION = 1
"""Part of every key; raise it when a change of the code changes the numbers."""
ADDED: dict[str, Any] = {
    "train.test_cuts": [],
    "task.train_digits": [],
    "train.init": "",
    "train.timed_steps": 0,
    "train.losses": {},
    "train.frozen": [],
    "model.inputs": 0,
    "model.cutoffs": [],
    "model.bos_id": -1,
    "model.encoder_width": 0,
    "model.encoder_heads": 0,
    "model.test_readout": "hard",
    "task.stream": False,
    "task.value_digits": 5,
    "task.one_tail": False,
    "task.apart": 0,
    "task.eval_set": "",
    "task.eval_revision": None,
    "task.eval_length": None,
    "task.test_eval_length": [],
}
"""Settings that came after ``KEY_VERSION``, with the value for what was done before: at that value they leave keys as
they were."""


Changes = Sequence[tuple[str, Any]]
"""Dotted keys and their values, of the command line."""


def key_folder(root: Path, key: str) -> Path:
    """The folder of all that a key leaves on disk."""
    return root / "checkpoints" / key[:16]


@dataclass(frozen=True)
class RunSpec:
    """One run, fully resolved: plain data, picklable, enough for ``engine.run_one``."""

    experiment: str
    scale: str
    arm: str
    point: str
    """The grid point, "" without a grid."""
    seed: int
    model: dict[str, Any]
    task: dict[str, Any]
    train: dict[str, Any]
    start: "RunSpec | None" = None
    """The run whose weights it starts from (``train.init``), which has been trained."""

    @property
    def key(self) -> str:
        """Identity of everything that changes the numbers; names and reports are outside."""
        sections = {
            section: {k: v for k, v in getattr(self, section).items() if (f"{section}.{k}", v) not in ADDED.items()}
            for section in SECTIONS
        }
        if self.start is not None:
            sections["train"]["init"] = {"run": self.start.key}
        content = {"version": KEY_VERSION, **sections, "seed": self.seed}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """What MLflow and the display call the run."""
        return f"{self.arm}{'-' + self.point if self.point else ''}-s{self.seed}-{self.key[:8]}"

    def folder(self, root: Path) -> Path:
        """Where the run keeps its checkpoints, its lock and its log: one place per key, as several experiments may
        share it."""
        return key_folder(root, self.key)

    @property
    def stages(self) -> list[dict[str, Any]]:
        """Stages with their steps, batch size, ``until`` and the fields of the task that they change; none where
        nothing is trained."""
        stages = self.train["stages"] or [{}] * (self.train["steps"] > 0)
        return [
            {
                "steps": s.get("steps", self.train["steps"]),
                "until": s.get("until", {}),
                "batch_size": s.get("batch_size", self.train["batch_size"]),
                "task": {k.removeprefix("task."): v for k, v in s.items() if k.startswith("task.")},
            }
            for s in stages
        ]

    @property
    def validations(self) -> list[int]:
        """Steps after which a validation comes, if no stage ends early."""
        found, first = [], 0
        for stage in self.stages:
            end = first + stage["steps"]
            found += [*range(first + self.train["valid_every"], end, self.train["valid_every"]), end]
            first = end
        return found

    @property
    def trained(self) -> "RunSpec":
        """The run that its weights are from: this one, or where nothing is trained the one that it starts from."""
        return self if self.stages or self.start is None else self.start

    def config(self) -> dict[str, Any]:
        """Everything as nested plain data."""
        return asdict(self)


@dataclass
class Experiment:
    """A parsed YAML. ``plan`` makes the runs."""

    file: str
    experiment: str
    paper: PaperConfig
    base: dict[str, Any]
    scales: dict[str, dict[str, Any]]
    arms: dict[str, dict[str, Any]]
    grid: dict[str, list]
    seeds: list[int]
    report: ReportConfig
    expect: list[str]
    others: dict[tuple[str, str], "Experiment"] = field(default_factory=dict, compare=False, repr=False)
    """What ``beside`` has read: (name, scale) -> experiment."""

    def scale_names(self) -> list[str]:
        return list(self.scales)

    def at(self, scale: str | None = None) -> "Experiment":
        """The experiment at one scale (default: the first), what the scale has of ``seeds``, ``expect``, ``grid`` and
        ``report`` in place. Raises ConfigError."""
        scale = next(iter(self.scales)) if scale is None else scale
        if scale not in self.scales:
            raise ConfigError(self.file, "--scale", f"unknown scale {scale!r}; {nearest(scale, self.scales)}")
        values = dict(self.scales[scale])
        own = {name: values.pop(name) for name in ("seeds", "expect", "grid") if name in values}
        if "report" in values:
            where, changes = f"{self.file} (scale {scale})", values.pop("report")
            own["report"] = strict(
                ReportConfig, asdict(self.report) | mapping(changes, where, "report"), lambda key: where, "report"
            )
        return replace(self, scales={scale: values}, **own)

    def plan(self, overrides: Sequence[str] = ()) -> list[RunSpec]:
        """All runs of the (first) scale, arm by arm, seed by seed. Raises ConfigError."""
        changes = [parse_override(text) for text in overrides]
        count = len(self.seeds) * sum(math.prod(map(len, self.axes(arm).values())) for arm in self.arms)
        if count > MOST_RUNS:
            raise ConfigError(
                self.file, "grid" if self.grid else "seeds", f"{count:.4g} runs; expected at most {MOST_RUNS}"
            )
        specs = []
        for arm in self.arms:
            for point, settings in self.grid_points(arm):
                specs += self.specs(arm, point, settings, self.seeds, changes)
        return specs

    def specs(
        self,
        arm: str,
        point: str,
        settings: Mapping[str, Any],
        seeds: Sequence[int],
        changes: Changes,
        above: Sequence[str] = (),
    ) -> list[RunSpec]:
        """The runs of one arm at one point of its grid, with those that they start from. ``above``: the arms that start
        from this one."""
        scale, name = next(iter(self.scales)), f"{self.experiment}/{arm}"
        run = self.resolve(scale, arm, settings, changes)
        starts: Sequence[RunSpec | None] = [None] * len(seeds)
        init = run["train"]["init"]
        if isinstance(init, dict) and "run" in init:
            starts = self.starts(init["run"], name, seeds, changes, [*above, name])
        return [
            RunSpec(self.experiment, scale, arm, point, seed, **run, start=start)
            for seed, start in zip(seeds, starts, strict=True)
        ]

    def starts(
        self, wanted: str, arm: str, seeds: Sequence[int], changes: Changes, above: Sequence[str]
    ) -> list[RunSpec]:
        """The runs that ``train.init`` of an arm names, one for every seed. Changes of the command line are for this
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

    def axes(self, arm: str) -> dict[str, list]:
        """The grid of one arm: what all arms share, and its own."""
        common, own = split_arm(self.grid, arm)
        return common | own

    def grid_points(self, arm: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, settings) of every point of the cross product of an arm's grid; ("", {}) without a grid."""
        axes = self.axes(arm)
        for values in itertools.product(*axes.values()):
            settings = dict(zip(axes, values, strict=True))
            yield point_name("-".join(f"{k.rpartition('.')[2].rstrip('?')}{v}" for k, v in settings.items())), settings

    def beside(self, name: str) -> "Experiment":
        """Another experiment of the same folder, at the same scale; it is read once. Raises ConfigError."""
        key = name, next(iter(self.scales))
        if key not in self.others:
            self.others[key] = load(Path(self.file).with_name(f"{name}.yaml")).at(key[1])
        return self.others[key]

    def resolve(self, scale: str, arm: str, point: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        """Validated model, task and train sections of one arm."""
        tree = copy.deepcopy(self.base)
        scaled, own = split_arm(self.scales[scale], arm)
        layers = [
            (f"{self.file} (scale {scale})", scaled),
            (f"{self.file} (arm {arm})", self.arms[arm]),
            (f"{self.file} (scale {scale}, arm {arm})", own),
            (f"{self.file} (grid)", point),
            ("command line", dict(changes)),
        ]
        origin = {}
        for where, layer in layers:
            for key, value in layer.items():
                apply(tree, key, value, where)
                if key in SECTIONS:  # what was set before is gone
                    origin = {k: v for k, v in origin.items() if not k.startswith(f"{key}.")}
                origin[key.rstrip("?")] = where
        return Resolver(self.file, arm, origin).resolve(tree)

    def test_values(self, specs: Sequence[RunSpec]) -> list:
        """The x axis: values of the report's ``test_<field>``, places of a curve, or the steps of the validations, the
        same in every run. Raises ConfigError."""
        axis = self.report.x
        tasks = [build("task", spec.task) for spec in specs]
        values = [spec.validations for spec in specs] if axis == STEP else [task.x_values(axis) for task in tasks]
        known = ", ".join([f"test_{tasks[0].test_axis()[0]}", *tasks[0].curves]) + f" or {STEP}"
        if axis == STEP and any(stage["until"] for spec in specs for stage in spec.stages):
            raise ConfigError(
                self.file,
                "report.x",
                f"{axis!r}: a stage with until ends nobody knows when; expected stages of fixed steps",
            )
        if not values[0]:
            raise ConfigError(
                self.file,
                "report.x",
                f"{axis!r} is not what the test of {specs[0].task['name']} varies; expected {known}",
            )
        if any(v != values[0] for v in values):
            raise ConfigError(
                self.file, "report.x", f"{axis!r} has not the same values in every arm; expected {known} with the same"
            )
        if len(set(values[0])) < len(values[0]):
            raise ConfigError(self.file, f"task.{axis}", f"{values[0]}: expected different values")
        if not all(type(v) is int for v in values[0]):
            raise ConfigError(
                self.file,
                f"task.{axis}",
                f"{values[0]}: expected whole numbers (they are the steps of MLflow's metrics)",
            )
        return values[0]

    def metrics(self, specs: Sequence[RunSpec]) -> list[str]:
        """What there is along the report's x axis, times aside."""
        task = load_class("task", specs[0].task["name"])
        models = [load_class("model", name) for name in dict.fromkeys(spec.model["name"] for spec in specs)]
        if self.report.x == STEP:
            diagnosed = dict.fromkeys(name for model in models for name in getattr(model, "diagnosed", ()))
            return [*task.metrics, "loss", *(f"test_{name}" for name in (*task.metrics, "loss")), *OF_A_RUN, *diagnosed]
        if self.report.x in task.curves:
            return [*task.curves[self.report.x], "steps"]
        return [
            *task.metrics,
            *task.derived,
            "loss",
            "steps",
            *dict.fromkeys(name for model in models for name in getattr(model, "tested", ())),
        ]

    def check_report(self, specs: Sequence[RunSpec]) -> None:
        """Raise ConfigError if a figure or a claim names a metric, an arm or an x that the plan does not have."""
        metrics, times = self.metrics(specs), TIMES if self.report.x.startswith("test_") else ()
        if self.report.y in TIMES:
            raise ConfigError(
                self.file,
                "report.y",
                f"{self.report.y!r} is measured anew by every run; expected time: {self.report.y} beside another metric",
            )
        if self.report.y not in metrics:
            raise ConfigError(
                self.file, "report.y", f"unknown metric {self.report.y!r}; {nearest(self.report.y, metrics)}"
            )
        x_values = self.test_values(specs)
        for name, wanted in (("time", bool(self.report.time)), ("state_x", self.report.state_x is not None)):
            if wanted and not times:
                raise ConfigError(
                    self.file,
                    f"report.{name}",
                    f"{getattr(self.report, name)}: expected none where x={self.report.x} is no test_<field>",
                )
        try:
            self.report.state_value(x_values)
        except ValueError as error:
            raise ConfigError(self.file, "report.state_x", str(error)) from None
        if self.report.threshold is not None and self.report.x != STEP:
            raise ConfigError(
                self.file,
                "report.threshold",
                f"{self.report.threshold}: expected none where x={self.report.x} is not {STEP}",
            )
        try:
            check_expect(self.expect, list(self.arms), x_values, [*metrics, *times])
        except ValueError as error:
            raise ConfigError(self.file, "expect", str(error)) from None

    def sizes(self, specs: Sequence[RunSpec]) -> dict[str, dict[str, int]]:
        """``model_size`` of every run, by its key. Raises ConfigError for a model that no memory could hold."""
        models: dict[str, dict[str, int]] = {}
        for spec in specs:
            model = json.dumps(spec.model)
            try:
                models[model] = models.get(model) or model_size(spec.model)
            except RuntimeError as error:
                raise ConfigError(
                    f"{self.file} (arm {spec.arm})",
                    "model",
                    f"cannot be built; expected smaller sizes ({first_line(error)})",
                ) from None
            except ValueError as error:
                raise ConfigError(f"{self.file} (arm {spec.arm})", f"model.{field_name(error)}", str(error)) from None
        return {spec.key: models[json.dumps(spec.model)] for spec in specs}


def point_name(text: str) -> str:
    """``text`` if a folder may be called so, else what is left of it and a checksum: values of a grid may be paths,
    lists or long."""
    if len(text) <= 80 and re.fullmatch(r"(\w[\w.+=-]*)?", text, re.ASCII):
        return text
    rest, checksum = re.sub(r"[^\w.+=-]+", "_", text, flags=re.ASCII), hashlib.sha256(text.encode()).hexdigest()
    return f"{rest[:70]}-{checksum[:8]}"


SECTIONS = ("model", "task", "train")
STAGE_KEYS = ("steps", "batch_size", "until")
OURS = {
    **dict.fromkeys(
        ("max_epochs", "reload_dataloaders_every_n_epochs", "num_sanity_val_steps", "deterministic", "inference_mode"),
        "",
    ),
    **dict.fromkeys(
        (
            "logger",
            "callbacks",
            "plugins",
            "enable_checkpointing",
            "enable_progress_bar",
            "enable_model_summary",
            "default_root_dir",
        ),
        "",
    ),
    **{
        "max_steps": "steps",
        "log_every_n_steps": "valid_every",
        "check_val_every_n_epoch": "valid_every",
        "val_check_interval": "valid_every",
    },
    **{
        "accelerator": "accelerator",
        "precision": "precision",
        "gradient_clip_val": "clip_norm",
        "gradient_clip_algorithm": "clip_norm",
    },
}
"""Arguments of lightning.Trainer that make a run what its key says, and the field of ``train`` that stands for each."""


def trainer_arguments() -> list[str]:
    """Names of the arguments of lightning.Trainer, from its source: to import it takes longer than a wrong file may."""
    found = find_spec("lightning")
    assert found and found.submodule_search_locations, "lightning is a dependency of this package"
    source = Path(found.submodule_search_locations[0], "pytorch", "trainer", "trainer.py")
    cls = next(
        node
        for node in ast.parse(source.read_bytes()).body
        if isinstance(node, ast.ClassDef) and node.name == "Trainer"
    )
    init = next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return [argument.arg for argument in (*init.args.args[1:], *init.args.kwonlyargs)]


def split_arm(values: Mapping[str, Any], arm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a scale or a grid, what all arms get, and what one arm gets (``arms.<arm>.<key>``)."""
    prefix = f"arms.{arm}."
    common = {k: v for k, v in values.items() if not k.startswith("arms.")}
    return common, {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def apply(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set one dotted key, or replace one whole section, in place."""
    section, _, name = key.partition(".")
    if section not in SECTIONS or (not name and not isinstance(value, dict)):
        raise ConfigError(
            where,
            key,
            f"expected model.<field>, task.<field>, train.<field> or a whole section; {nearest(section, SECTIONS)}",
        )
    if not name:
        tree[section] = copy.deepcopy(value)
        return
    old = tree[section]
    old.pop(name if name.endswith("?") else f"{name}?", None)
    old[name] = copy.deepcopy(value)


def parse_override(text: str) -> tuple[str, Any]:
    """("model.width", 64) from ``model.width=64``; values are YAML. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[\w.]+\??", key):
        raise ConfigError("command line", text, "expected key=value, for example train.lr=1e-3")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except RecursionError:
        raise ConfigError("command line", key, f"nested more than {DEEPEST} deep") from None
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError("command line", key, f"value {value!r} is not YAML ({first_line(error)})") from None
    for place, problem in problems(parsed, ""):
        raise ConfigError("command line", key + place.removeprefix("value"), problem)
    return key, parsed["value"]  # type: ignore[index,call-overload]


@dataclass
class Resolver:
    """Turns one merged tree into validated plain sections, and says where a wrong value came from."""

    file: str
    arm: str
    origin: dict[str, str]

    def where(self, key: str) -> str:
        section, key = key.partition(".")[0], key.partition("[")[0]
        return self.origin.get(key, self.origin.get(section, f"{self.file} (arm {self.arm})"))

    def error(self, section: str, name: str, message: str) -> ConfigError:
        return ConfigError(self.where(f"{section}.{name}"), f"{section}.{name}", message)

    def resolve(self, tree: dict[str, Any]) -> dict[str, Any]:
        train = strict(TrainConfig, tree["train"], self.where, "train")
        self.check_trainer(train)
        task_class, task = self.registered("task", tree["task"])  # imports torch
        model_class, model = self.registered("model", tree["model"])
        sampler = task_class(task)
        try:
            sampler.test_conditions()
        except ValueError as error:
            raise self.error("task", field_name(error), str(error)) from None
        self.check_together(model, sampler)
        self.check_losses(train, model_class)
        self.check_schedule(train, model_class)
        self.check_stream(train, sampler)
        self.check_test(train, model, sampler)
        self.check_frozen(train, {"name": tree["model"]["name"], **asdict(model)})
        for i, stage in enumerate(train.stages):
            self.check_stage(i, stage, model, task_class, task)
        return {
            "model": {"name": tree["model"]["name"], **asdict(model)},
            "task": {"name": tree["task"]["name"], **asdict(task)},
            "train": asdict(train),
        }

    def registered(self, kind: str, values: dict[str, Any]) -> tuple[type, Any]:
        name = values.get("name")
        if not isinstance(name, str):
            raise self.error(kind, "name", f"expected one of {', '.join(REGISTRIES[kind])}")
        try:
            cls = load_class(kind, name)
        except KeyError as error:
            raise self.error(kind, "name", error.args[0]) from None
        others = [load_class(kind, other).Config for other in REGISTRIES[kind]]
        return cls, strict(cls.Config, {k: v for k, v in values.items() if k != "name"}, self.where, kind, others)

    def check_together(self, model: Any, sampler: Any) -> None:
        """Fill in vocabulary and inputs, and check that the task fits the model."""
        model.inputs = model.inputs or sampler.inputs
        if model.inputs != sampler.inputs:
            raise self.error(
                "model",
                "inputs",
                f"{model.inputs}: a token of the task has {sampler.inputs} numbers; expected 0, which takes the task's",
            )
        if not model.vocab_size:
            model.vocab_size = sampler.vocab_size
        if model.vocab_size < sampler.vocab_size:
            raise self.error(
                "model",
                "vocab_size",
                f"{model.vocab_size}: the task has {sampler.vocab_size} token ids; expected 0 (the task's) or more",
            )
        try:
            if sampler.segment_len is not None:
                model.check_segment(sampler.segment_len)
        except ValueError as error:
            raise self.error("model", field_name(error), str(error)) from None

    def check_losses(self, train: TrainConfig, model_class: Any) -> None:
        """Check the losses that are weighed against those that the model has."""
        loss_names = getattr(model_class, "loss_names", ())
        for name, weight in train.losses.items():
            if name not in loss_names:
                known = (
                    nearest(name, loss_names) if loss_names else f"{model_class.__name__} has one loss; expected none"
                )
                raise self.error("train", f"losses.{name}", f"unknown loss; {known}")
            if type(weight) not in (int, float) or not 0 <= weight < math.inf:
                raise self.error("train", f"losses.{name}", f"{weight}: expected a finite number, 0 or more")
            train.losses[name] = float(weight)

    def check_frozen(self, train: TrainConfig, model: dict[str, Any]) -> None:
        """Check that the parts that are frozen are parts of the model."""
        if not train.frozen:
            return
        found = sketch(model)
        try:
            frozen = weights_of(found, train.frozen)
        except ValueError as error:
            raise self.error("train", "frozen", str(error)) from None
        if len(frozen) == len(list(found.parameters())):
            raise self.error(
                "train", "frozen", f"{train.frozen}: nothing is left to train; expected fewer parts, or steps: 0"
            )

    def check_schedule(self, train: TrainConfig, model_class: type) -> None:
        """Check the order of computation against the model."""
        if train.unroll_schedule == "diagonal":
            if not hasattr(model_class, "layers"):
                raise self.error(
                    "train",
                    "unroll_schedule",
                    f"'diagonal': {model_class.__name__} passes memory from the top layer down; expected 'sequential'",
                )
            if train.bptt is not None:
                raise self.error("train", "bptt", f"{train.bptt}: expected none with unroll_schedule 'diagonal'")

    def check_stream(self, train: TrainConfig, sampler: Any) -> None:
        """Check what a stream, whose memory goes on from batch to batch, does not allow."""
        if sampler.stream and (train.bptt or 0) > sampler.written + 1:
            most = f"a batch of the stream has {sampler.written + 1} segments, and no gradient leaves it"
            raise self.error(
                "train", "bptt", f"{train.bptt}: {most}; expected that many at most, or more task.segments"
            )
        for i, stage in enumerate(train.stages if sampler.stream else ()):
            for key in stage.keys() - {"steps", "until"}:
                raise self.error(
                    "train",
                    f"stages[{i}].{key}",
                    "a stage of a stream cannot change what its memory comes from; expected steps and until alone",
                )

    def check_test(self, train: TrainConfig, model: Any, sampler: Any) -> None:
        """Check the sizes of the test against its values, and segments of its own against task and model."""
        try:
            sampler.test_sizes(train.test_size)
        except ValueError as error:
            raise self.error("train", "test_size", str(error)) from None
        if train.test_cuts and not sampler.any_segments:
            raise self.error(
                "train", "test_cuts", f"{train.test_cuts}: the contexts of this task cannot be cut anew; expected none"
            )
        for length in train.test_cuts:
            try:
                model.check_segment(
                    length or max(task.written * task.segment_len for _, task in sampler.test_conditions())
                )
            except ValueError as error:
                raise self.error("train", "test_cuts", f"{train.test_cuts}: {error}") from None

    def check_trainer(self, train: TrainConfig) -> None:
        """Check extra arguments against Lightning's Trainer."""
        names = trainer_arguments() if train.trainer else ()
        for name in train.trainer:
            if name not in names:
                raise self.error(
                    "train", f"trainer.{name}", f"not an argument of lightning.Trainer; {nearest(name, names)}"
                )
            if name in OURS:
                own = OURS[name] and f"; set train.{OURS[name]} instead"
                raise self.error(
                    "train", f"trainer.{name}", f"the engine sets this argument itself{own or '; leave it out'}"
                )

    def check_stage(self, i: int, stage: Mapping[str, Any], model: Any, task_class: type, task: Any) -> None:
        where = f"stages[{i}]"
        for key, value in stage.items():
            if key in ("steps", "batch_size") and (type(value) is not int or value < 1):
                raise self.error("train", f"{where}.{key}", f"{value!r}: expected a whole number of at least 1")
            if key == "until" and not (
                isinstance(value, dict) and all(type(v) in (int, float) for v in value.values())
            ):
                raise self.error(
                    "train",
                    f"{where}.until",
                    f"{value!r}: expected {{metric: number}}, for example {{{task_class.metrics[0]}: 0.99}}",
                )
            for metric in stage["until"] if key == "until" else ():
                if metric not in task_class.metrics:
                    raise self.error(
                        "train", f"{where}.until.{metric}", f"unknown metric; {nearest(metric, task_class.metrics)}"
                    )
            if key not in STAGE_KEYS and not key.startswith("task."):
                raise self.error(
                    "train", f"{where}.{key}", f"unknown key; {nearest(key, [*STAGE_KEYS, 'task.<field>'])}"
                )
        changes = {k.removeprefix("task."): v for k, v in stage.items() if k.startswith("task.")}
        try:
            staged = strict(task_class.Config, asdict(task) | changes, self.where, "task")
        except ConfigError as error:
            raise self.error("train", where, str(error).partition(": ")[2]) from None
        self.check_together(model, task_class(staged))


WHOLE = ("arms", "grid")
"""Mappings of a file that replace those of the one that it extends."""
TOP_KEYS = ("experiment", "paper", "base", "scales", "arms", "grid", "seeds", "report", "expect")


def load(path: str | Path) -> Experiment:
    """Read and check an experiment file. Raises ConfigError: one line with file, key, what was expected."""
    return parse(extended(Path(path)), str(path))


def extended(path: Path, *above: Path) -> Any:
    """The content of a YAML, over that of the one that it extends; what it says of several arms
    (``arms.<a>,<b>.<key>``) is said of each."""
    tree = read(path)
    if not isinstance(tree, dict):
        return tree
    if isinstance(tree.get("scales"), dict):
        tree["scales"] = {
            scale: each_arm(values, str(path), f"scales.{scale}") for scale, values in tree["scales"].items()
        }
    if "grid" in tree:
        tree["grid"] = each_arm(tree["grid"], str(path), "grid")
    if "extends" not in tree:
        return tree
    name = tree.pop("extends")
    file_name(name, str(path), "extends")
    other = path.with_name(f"{name}.yaml")
    if other in (path, *above):
        raise ConfigError(str(path), "extends", f"{name!r} extends this file; expected no circle")
    below = extended(other, path, *above)
    if not isinstance(below, dict):
        raise ConfigError(str(other), "", "expected a mapping: an experiment")
    if "arms" in tree:  # what is said of the old ones goes with them
        below["scales"] = {
            scale: split_arm(values, "")[0]
            for scale, values in mappings(below.get("scales"), str(other), "scales").items()
        }
    below.pop("experiment", None)  # names a folder of its own
    return overlaid(below, tree, 2)


def each_arm(values: Any, file: str, where: str) -> Any:
    """A scale or a grid with ``arms.<a>,<b>.<key>`` taken apart, so that a file that extends this one may change one of
    them. Raises ConfigError."""
    if not isinstance(values, dict):
        return values  # parse will say what it is
    out: dict[Any, Any] = {}
    for key, value in values.items():
        names, dot, below = str(key).removeprefix("arms.").partition(".")
        several = str(key).startswith("arms.") and "," in names
        for one in [f"arms.{name.strip()}{dot}{below}" for name in names.split(",")] if several else [key]:
            if {one, f"{one}?", str(one).removesuffix("?")} & out.keys():
                raise ConfigError(file, f"{where}.{one}", f"said twice, once by {key}; expected once")
            out[one] = each_arm(value, file, f"{where}.grid") if one == "grid" else value
    return out


def overlaid(below: dict[str, Any], tree: dict[str, Any], depth: int) -> dict[str, Any]:
    """``tree`` over ``below``, key by key, so many mappings deep; what is alone of its kind replaces the other as a
    whole."""
    both = [k for k, v in tree.items() if k not in WHOLE and isinstance(v, dict) and isinstance(below.get(k), dict)]
    deeper = {k: overlaid(below[k], tree[k], depth - 1) for k in both if depth}
    return below | tree | deeper


def read(path: Path) -> Any:
    """The content of a YAML as plain data. Nothing in it is executed or looked up: tags that name Python objects are
    unknown, and interpolations stay text, which ``parse`` refuses."""
    try:
        if not path.is_file():
            folder = path if path.is_dir() else path.parent
            others = [str(p) for p in sorted(folder.glob("*.yaml"))] if folder.is_dir() else []
            what = "is a folder, expected a file" if path.is_dir() else "no such file"
            raise ConfigError(str(path), "", what + (f"; {nearest(str(path), others)}" if others else ""))
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise ConfigError(str(path), "", f"more than {LARGEST_FILE:,} bytes; expected an experiment")
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text.decode("utf-8-sig"))))
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(str(path), "", f"not valid YAML: nested more than {DEEPEST} deep") from None
    except (
        OmegaConfBaseException,
        YAMLError,
        ValueError,
    ) as error:  # ValueError: not UTF-8, a number of thousands of digits
        mark = getattr(error, "problem_mark", None)
        problem = (getattr(error, "problem", None) or first_line(error)).partition(". See http")[0]
        raise ConfigError(f"{path}:{mark.line + 1}" if mark else str(path), "", f"not valid YAML: {problem}") from None


def paper_section(tree: Mapping[str, Any], file: str) -> PaperConfig:
    """The ``paper:`` section of a file. Raises ConfigError."""
    return strict(PaperConfig, mapping(tree.get("paper"), file, "paper"), lambda key: file, "paper")


def parse(tree: Any, file: str) -> Experiment:
    """An Experiment from the plain content of a file. Raises ConfigError."""
    if not isinstance(tree, dict):
        raise ConfigError(file, "", f"expected a mapping with the keys {', '.join(TOP_KEYS)}")
    for key in tree:
        if key not in TOP_KEYS:
            raise ConfigError(file, str(key), f"unknown key; {nearest(str(key), TOP_KEYS)}")
    for key, problem in problems(tree, ""):
        raise ConfigError(file, key, problem)
    for key in ("experiment", "paper", "base", "arms", "seeds", "report"):
        if key not in tree:
            raise ConfigError(file, key, "missing")
    file_name(tree["experiment"], file, "experiment")
    base = mapping(tree["base"], file, "base")
    for section in SECTIONS:
        base[section] = mapping(base.get(section, {}), file, f"base.{section}")
    for section in base:
        if section not in SECTIONS:
            raise ConfigError(file, f"base.{section}", f"unknown section; {nearest(section, SECTIONS)}")
    arms = mappings(tree["arms"], file, "arms")
    for arm in arms:
        if not re.fullmatch(r"[A-Za-z_]\w{0,63}", arm, re.ASCII):
            raise ConfigError(
                file, f"arms.{arm}", "expected a name of at most 64 letters, digits and '_' (claims refer to it)"
            )
    scales = mappings(tree.get("scales"), file, "scales") or {"default": {}}
    for scale in scales:
        file_name(scale, file, f"scales.{scale}")
        if kept := re.search(r"-(modified|incomplete)\b", scale):
            raise ConfigError(
                file,
                f"scales.{scale}",
                f"a name with '{kept[0]}' is kept for reports of changed or missing runs; expected another",
            )
    experiment = Experiment(
        file=file,
        experiment=tree["experiment"],
        paper=paper_section(tree, file),
        base=base,
        scales=scales,
        arms=arms,
        grid=mapping({} if tree.get("grid") is None else tree["grid"], file, "grid"),
        seeds=tree["seeds"],
        report=strict(ReportConfig, mapping(tree["report"], file, "report"), lambda key: file, "report"),
        expect=[] if tree.get("expect") is None else tree["expect"],
    )
    check_lists(experiment)
    return experiment


def file_name(name: Any, file: str, key: str) -> None:
    """Raise ConfigError unless ``name`` is one plain component of a path, short enough for every file system."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][\w-]{0,63}", name, re.ASCII):
        raise ConfigError(
            file, key, f"{name!r:.80}: expected letters, digits, '_' and '-', 64 at most (it names folders)"
        )


def mappings(value: Any, file: str, key: str) -> dict[str, dict[str, Any]]:
    """A mapping of mappings; what is left empty is an empty one."""
    named = mapping({} if value is None else value, file, key)
    return {name: mapping({} if item is None else item, file, f"{key}.{name}") for name, item in named.items()}


def mapping(value: Any, file: str, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(file, key, f"{value!r}: expected a mapping")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(file, f"{key}.{name}", f"{name!r} is not text; put the key in quotes")
    return value


def check_lists(e: Experiment) -> None:
    """Seeds, claims, grid values and the arms that scales address."""
    if not e.arms:
        raise ConfigError(e.file, "arms", "expected at least one arm")
    for where, values in [
        ("", {"seeds": e.seeds, "expect": e.expect, "grid": e.grid}),
        *((f"scales.{s}.", v) for s, v in e.scales.items()),
    ]:
        seeds, expect, grid = values.get("seeds", [0]), values.get("expect", []), values.get("grid", {})
        if (
            not isinstance(seeds, list)
            or not seeds
            or any(type(s) is not int or s < 0 for s in seeds)
            or len(set(seeds)) < len(seeds)
        ):
            raise ConfigError(
                e.file, f"{where}seeds", f"{seeds!r}: expected a list of different whole numbers, for example [0, 1, 2]"
            )
        if not isinstance(expect, list) or not all(isinstance(line, str) for line in expect):
            raise ConfigError(
                e.file, f"{where}expect", f"{expect!r}: expected a list of claims, for example 'gamma[200] > 0.95'"
            )
        for key, points in mapping(grid, e.file, f"{where}grid").items():
            if (
                not isinstance(points, list)
                or not points
                or any(points.index(point) < i for i, point in enumerate(points))
            ):
                raise ConfigError(e.file, f"{where}grid.{key}", f"{points!r}: expected a list of different values")
        for key in (k for k in (*values, *grid) if k.startswith("arms.")):
            _, arm, *below = key.split(".")
            if arm not in e.arms:
                raise ConfigError(e.file, f"{where}{key}", f"unknown arm {arm!r}; {nearest(arm, e.arms)}")
            if not below:
                raise ConfigError(
                    e.file,
                    f"{where}{key}",
                    f"expected arms.{arm}.<section>.<field>, for example arms.{arm}.model.width",
                )


def differences(specs: Sequence[RunSpec], reference: Sequence[RunSpec]) -> list[str]:
    """Settings of a plan that differ from those of the same arms in ``reference`` (the paper's scale), one line each.

    A setting that differs alike in all arms is told once.
    """

    def told(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):  # stages
            return "; ".join(
                ", ".join(f"{k.removeprefix('task.')} {v}" for k, v in stage.items() if k != "until") for stage in value
            )
        return str(value)

    theirs = {spec.arm: spec for spec in reversed(reference)}
    lines: dict[str, list[str]] = {}
    arms = {spec.arm: spec for spec in reversed(specs)}
    for arm, spec in arms.items():
        for section in SECTIONS:
            ours, paper = getattr(spec, section), getattr(theirs[arm], section)
            for name in ours | paper:
                if ours.get(name) != paper.get(name):
                    lines.setdefault(
                        f"`{section}.{name}`: {told(paper.get(name))} → {told(ours.get(name))}", []
                    ).append(arm)
    return [
        line if len(names) == len(arms) else f"{line} ({', '.join(sorted(names, key=list(arms).index))})"
        for line, names in lines.items()
    ]
