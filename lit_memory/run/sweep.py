"""The runs of one experiment at one scale. Prints and writes nothing."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lit_memory.plan.errors import ConfigError, naming_changes
from lit_memory.plan.experiment import Experiment, ScaledExperiment, load
from lit_memory.plan.measured import answerable, check_report, sizes, x_values
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import build
from lit_memory.run.folders import (
    ReportFolders,
    check_name,
    location,
    report_folders,
    root_of,
    set_kernel_cache,
    setting,
)
from lit_memory.run.launchers.choice import LOCAL, Choice
from lit_memory.run.machine import requested
from lit_memory.run.options import Options
from lit_memory.run.store import check_store
from lit_memory.run.uri import StoreURI
from lit_memory.util.checks import field_name, nearest
from lit_memory.util.provenance import cores, gpus, provenance


@dataclass(frozen=True)
class Sweep:
    """All runs of one experiment at one scale, and those that the command line selects."""

    options: Options
    whole: Experiment
    """With all its scales."""
    experiment: ScaledExperiment
    """At the scale of this sweep."""
    specs: list[RunSpec]
    """All runs of the scale; a report names those that are missing."""
    selected: list[RunSpec]
    """The runs of ``--arms`` and ``--seeds``."""
    sizes: dict[str, dict[str, int]]
    """Key -> ``registry.model_size``."""
    root: Path
    launcher: Choice = LOCAL
    measured: Mapping[str, str] = field(default_factory=dict)
    """Tags of runs whose system metrics are logged."""

    @classmethod
    def prepare(cls, options: Options) -> "Sweep":
        """Read and check the experiment; nothing is written. Raises ConfigError."""
        whole = load(options.experiment)
        check_name(whole.experiment, whole.file)
        experiment = whole.at(options.scale).sweeping(options.overrides)
        if options.jobs is not None and options.jobs < 1:
            raise ConfigError("command line", "--jobs", f"{options.jobs}: expected at least 1")
        root = root_of(options)
        check_store(root, StoreURI.of_environment())
        launcher = Choice.of(options, root, StoreURI.of_environment())
        set_kernel_cache()
        with naming_changes(experiment.file, options.overrides):
            specs = experiment.plan(options.overrides)  # imports torch
            if options.overrides:
                experiment = answerable(experiment, specs, options.changed)
            check_report(experiment, specs)
            sized = sizes(experiment, specs)
        arms = select("--arms", options.arms, list(experiment.arms))
        seeds = select("--seeds", options.seeds, list(map(str, experiment.seeds)))
        selected = [spec for spec in specs if spec.arm in arms and str(spec.seed) in seeds]
        return cls(options, whole, experiment, specs, selected, sized, root, launcher, requested(selected))

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return self.experiment.experiment

    @property
    def scale(self) -> str:
        return self.experiment.scale

    @property
    def is_default_scale(self) -> bool:
        return self.scale == self.whole.default_scale

    @property
    def jobs(self) -> int:
        """Runs at a time: ``--jobs``, or as many as the cores allow, one where a run takes a GPU; all of them on a
        cluster."""
        if not self.launcher.local:
            return self.options.jobs or sys.maxsize
        on_cpu = all(spec.train["accelerator"] == "cpu" for spec in self.selected)
        limit = max(1, cores() // max(spec.threads for spec in self.selected)) if on_cpu else 1
        return min(self.options.jobs or limit, len(self.selected))

    @property
    def location(self) -> str:
        return location(self.root)

    @property
    def tags(self) -> dict[str, str]:
        """Tags of its new runs."""
        paper = self.experiment.paper
        own = {"paper": paper.arxiv or paper.title, "where": self.location}
        return {**provenance(), **self.options.tags, **own, **self.measured}

    @property
    def setting(self) -> str:
        """The name of its parent run, see ``folders.setting``."""
        return setting(self.scale, self.options.changes)

    @property
    def report_folders(self) -> ReportFolders:
        return report_folders(self.root, self.name, self.scale, self.options.changes, self.is_default_scale)

    @cached_property
    def x_values(self) -> list:
        """The x axis of its report."""
        return x_values(self.experiment, self.specs)

    @cached_property
    def paper_specs(self) -> list[RunSpec]:
        """The runs of the scale "paper", where this is another scale."""
        return [] if self.scale == "paper" or "paper" not in self.whole.scales else self.whole.at("paper").plan()

    def check_machine(self, specs: Sequence[RunSpec]) -> None:
        """Raise ConfigError for what the runs need and this machine does not have: a GPU, files, pretrained weights."""
        self.check_gpu(specs)
        self.check_files(specs)
        self.fetch_weights(specs)

    def check_gpu(self, specs: Sequence[RunSpec]) -> None:
        """Raise ConfigError for a run that needs a GPU where there is none."""
        on_gpu = [spec for spec in specs if spec.train["accelerator"] == "cuda"]
        if not on_gpu or not self.launcher.local or gpus() >= max(spec.devices for spec in on_gpu):
            return
        where = f"{self.experiment.file} (scale {self.scale}, arm {on_gpu[0].arm})"
        message = "'cuda': torch finds no GPU on this machine; expected cpu, or another --scale"
        if gpus():
            message = (
                f"'cuda': {max(spec.devices for spec in on_gpu)} devices, but torch finds {gpus()} on this machine"
            )
        with naming_changes(self.experiment.file, self.options.overrides):
            raise ConfigError(where, "train.accelerator", message)

    def check_files(self, specs: Sequence[RunSpec]) -> None:
        """Raise ConfigError for a file of this machine that the tasks of the runs, with all their stages, cannot use.

        It may take a second for every 100 MB of text.
        """
        for spec in specs:
            where = f"{self.experiment.file} (scale {self.scale}, arm {spec.arm})"
            task = build("task", spec.task)
            for stage in [{}, *(stage["task"] for stage in spec.stages)]:
                try:
                    task.at(**stage).check_files()
                except (ValueError, OSError) as error:
                    key = ".".join(filter(None, ["task", field_name(error)]))
                    with naming_changes(self.experiment.file, self.options.overrides):
                        raise ConfigError(where, key, str(error)) from None

    def fetch_weights(self, specs: Sequence[RunSpec]) -> None:
        """Have what runs start from in the cache of the Hugging Face hub, once for all of them; on a cluster each run
        does so itself. Raises ConfigError for a name that is not in reach."""
        arms = {repr(spec.train["init"]): spec for spec in specs if self.launcher.local}
        for spec in arms.values():
            if spec.start is None and spec.train["init"]:
                from lit_memory.hf.initial import fetch_initial  # imports transformers, which costs a second

                try:
                    fetch_initial(spec.train["init"])
                except (ValueError, FileNotFoundError) as error:
                    where = f"{self.experiment.file} (scale {self.scale}, arm {spec.arm})"
                    raise ConfigError(where, "train.init", str(error)) from None


def select(flag: str, names: Sequence[str] | None, valid: Sequence[str]) -> Sequence[str]:
    """The names that a flag lists; all where it is not given. Raises ConfigError for one that is not ``valid``."""
    for name in names or ():
        if name not in valid:
            raise ConfigError("command line", flag, f"unknown value {name!r}; {nearest(name, valid)}")
    return valid if names is None else names
