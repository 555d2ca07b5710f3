"""One call of the command: what to run, what is finished already, and what the report needs. Prints nothing."""

import argparse
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from lit_memory.plan.deviations import differences
from lit_memory.plan.errors import ConfigError, naming_changes
from lit_memory.plan.experiment import Experiment, ScaledExperiment, load
from lit_memory.plan.measured import check_report, metrics, sizes, x_values
from lit_memory.plan.merging import parse_override, split_arm
from lit_memory.plan.runspec import RunSpec, key_folder
from lit_memory.plan.sections import STEP, TIMES
from lit_memory.registry import build, load_class
from lit_memory.report.catalogue import is_complete, read_verdict
from lit_memory.run import checkpoint
from lit_memory.run.places import check_root, check_server, check_store, database, font_cache, kernel_cache, make_root
from lit_memory.util import files
from lit_memory.util.checks import nearest
from lit_memory.util.provenance import PROJECT, cores, default_root, gpu, provenance


@dataclass
class Job:
    """One call of the command: which runs of which experiment, and where."""

    whole: Experiment
    """With all its scales."""
    experiment: ScaledExperiment
    """At the scale that was asked for."""
    overrides: list[str]
    everything: list[RunSpec]
    """All runs of the scale; the report wants to know what is missing."""
    specs: list[RunSpec]
    """The runs that were asked for."""
    sizes: dict[str, dict[str, int]]
    """Key -> ``registry.model_size``."""
    root: Path
    args: argparse.Namespace
    runs: dict[str, Any] = field(default_factory=dict)
    """What MLflow knows: key -> tracking.Run."""

    @classmethod
    def prepare(cls, args: argparse.Namespace) -> "Job":
        """Read and check everything; nothing is written. Raises ConfigError."""
        whole = load(args.experiment)
        args.default_scale = args.scale is None or args.scale == whole.default_scale
        experiment = whole.at(args.scale)
        if args.jobs is not None and args.jobs < 1:
            raise ConfigError("command line", "--jobs", f"{args.jobs}: expected at least 1")
        root = root_of(args)
        check_store(root, os.environ.get("MLFLOW_TRACKING_URI") or "")
        kernel_cache()
        with naming_changes(experiment.file, args.overrides):
            specs = experiment.plan(args.overrides)  # from here on with torch
            check_report(experiment, specs)
            sized = sizes(experiment, specs)
        arms = chosen("--arms", args.arms, list(experiment.arms), str)
        seeds = chosen("--seeds", args.seeds, experiment.seeds, int)
        return cls(
            whole,
            experiment,
            args.overrides,
            specs,
            [s for s in specs if s.arm in arms and s.seed in seeds],
            sized,
            root,
            args,
        )

    @property
    def scale(self) -> str:
        return self.experiment.scale

    @property
    def jobs(self) -> int:
        """Runs at a time: as asked, or as many as the cores allow; one where a run takes a GPU."""
        train = self.specs[0].train
        limit = max(1, cores() // train["threads"]) if train["accelerator"] == "cpu" else 1
        return min(self.args.jobs or limit, max(1, len(self.specs)))

    @property
    def where(self) -> str:
        """This root on this machine: the runs whose locks can be seen from here."""
        return f"{platform.node()}:{self.root}".replace("'", "_")

    @property
    def changes(self) -> dict[str, Any]:
        """What the command line sets."""
        return dict(map(parse_override, self.overrides))

    @property
    def report_folder(self) -> Path:
        """reports/<experiment> for the first scale as the YAML has it; a folder below for everything else, and for
        every set of changes."""
        folder = self.root / "reports" / self.experiment.experiment
        return folder if self.args.default_scale and not self.changes else folder / self.place

    @property
    def incomplete_folder(self) -> Path:
        """Where a report goes that misses runs while the one in ``report_folder`` misses none."""
        return self.root / "reports" / self.experiment.experiment / f"{self.place}-incomplete"

    @property
    def place(self) -> str:
        """The scale, with a checksum of what the command line changes."""
        checksum = hashlib.sha256(json.dumps(self.changes, sort_keys=True).encode()).hexdigest()
        return f"{self.scale}-modified-{checksum[:6]}" if self.changes else self.scale

    def open_tracker(self) -> Any:
        """The tracker, or None where there is no database yet: a dry run creates nothing."""
        uri = os.environ.get("MLFLOW_TRACKING_URI") or ""
        path = database(self.root, uri)
        return None if path is not None and not path.is_file() else new_tracker(self.root)

    def look_up(self, tracker: Any) -> None:
        if tracker is not None:
            keys = list(dict.fromkeys(s.key for spec in self.everything for s in with_starts(spec)))
            self.runs = {key: run for key, run in zip(keys, tracker.find_all(keys), strict=True) if run is not None}

    def close_stale(self, tracker: Any) -> None:
        """Mark runs KILLED whose process is gone without a word (kill -9, a crash of the machine): their lock is
        free."""
        for run in tracker.running(self.where):
            folder = key_folder(self.root, run.tags["lit.key"])
            if not checkpoint.locked(folder):
                tracker.end(run.run_id, "KILLED")

    def retire(self, tracker: Any, specs: Sequence[RunSpec]) -> None:
        """Forget runs and their checkpoints, so that they start anew."""
        for spec in specs:
            if spec.key in self.runs:
                tracker.retire(self.runs[spec.key].run_id)
            checkpoint.clear(spec.folder(self.root))

    def todo(self) -> list[RunSpec]:
        """What there is to run, in order: runs that others start from come first, and arms with equal settings are one
        run."""
        if self.args.report:
            return []
        wanted = [s for s in self.specs if self.args.fresh or self.status(s) != "finished"]
        todo: dict[str, RunSpec] = {}
        for spec in wanted:
            for each in with_starts(spec):
                if each is spec or self.status(each) != "finished":
                    todo.setdefault(each.key, each)
        return list(todo.values())

    def check_machine(self, todo: Sequence[RunSpec]) -> None:
        """Raise ConfigError for a run that asks for a GPU where there is none."""
        wanting = [spec for spec in todo if spec.train["accelerator"] == "cuda"]
        if wanting and not gpu():
            with naming_changes(self.experiment.file, self.overrides):
                where = f"{self.experiment.file} (scale {self.scale}, arm {wanting[0].arm})"
                raise ConfigError(
                    where,
                    "train.accelerator",
                    "'cuda': torch finds no GPU on this machine; expected cpu, or another --scale",
                )

    def status(self, spec: RunSpec) -> str:
        """finished, running (in another process), failed, to resume, or new; all but the first are run."""
        run, folder = self.runs.get(spec.key), spec.folder(self.root)
        if run is not None and run.status == "FINISHED":
            return "finished"
        if checkpoint.locked(folder):
            return "running"
        failed = run is not None and run.status == "FAILED"
        return "failed" if failed else "to resume" if checkpoint.saved(folder) else "new"

    def headline(self, todo: Sequence[RunSpec]) -> str:
        """What will happen, in one line."""
        counts = {
            name: sum(self.status(s) == name for s in self.specs)
            for name in ("finished", "running", "failed", "to resume", "new")
        }
        parts = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        seconds = [self.estimate(s) for s in todo]
        known = [s for s in seconds if s is not None]
        time_left = (
            f"; about {duration(sum(known) / len(known) * len(todo) / min(self.jobs, len(todo)))}" if known else ""
        )
        first = len({s.key for s in todo} - {s.key for s in self.specs})
        what = f"{len(self.specs)} run{'s' if len(self.specs) != 1 else ''}: {parts}" + (
            f"; {first} of other experiments to train first" if first else ""
        )
        modified = f", modified: {' '.join(self.overrides)}" if self.overrides else ""
        return f"[bold]{self.experiment.experiment}[/] (scale {self.scale}{modified}): {what}{time_left}"

    def note(self) -> str:
        """What a changed ``train.steps`` does not change, in one line; "" where it changes all."""
        own = {i for spec in self.specs for i, stage in enumerate(spec.train["stages"], 1) if "steps" in stage}
        if not own or "train.steps" not in self.changes:
            return ""
        return f"stages with steps of their own: {', '.join(map(str, sorted(own)))}; train.stages=[] trains in one"

    def estimate(self, spec: RunSpec) -> float | None:
        """Seconds of a run: what the same arm took here, or took for the report that came with the project."""
        alike = [s for s in self.everything if (s.experiment, s.arm) == (spec.experiment, spec.arm)]
        own = [r.metrics["seconds"] for s in alike if (r := self.runs.get(s.key)) and "seconds" in r.metrics]
        if own:
            return sum(own) / len(own)
        shipped = PROJECT / "reports" / spec.experiment / ("" if self.args.default_scale else self.scale)
        if self.overrides:
            return None
        runs = [r for r in read_verdict(shipped).get("runs", []) if r["arm"] == spec.arm and r.get("seconds")]
        return sum(r["seconds"] for r in runs) / len(runs) if runs else None

    def selected(self) -> dict[str, str]:
        """The grid point of every arm: the best mean over seeds of the last validation; test results play no part."""
        task = load_class("task", self.everything[0].task["name"])
        metric, best_of = f"valid/{task.metrics[0]}", min if task.metrics[0] in task.lower else max
        points: dict[str, dict[str, list[float]]] = {}
        for spec in self.everything:
            run = self.runs.get(spec.key)
            if run is not None and run.status == "FINISHED" and metric in run.metrics:
                points.setdefault(spec.arm, {}).setdefault(spec.point, []).append(run.metrics[metric])
        best = {
            arm: best_of(scores, key=lambda point, scores=scores: mean(scores[point])) for arm, scores in points.items()
        }
        return {arm: best.get(arm, next(self.experiment.grid_points(arm))[0]) for arm in self.experiment.arms}

    def report(self, tracker: Any) -> Any:
        """Write the report of all finished runs of the plan, also into the parent run. Returns the ``report.Report``.

        Of several commands that end at the same time, one after another: the last one knows most, and MLflow gets no
        half-written file. One that misses runs leaves a complete one alone; one that misses none removes what stood in
        for it.
        """
        from lit_memory.report.render import render
        from lit_memory.run.tracking import frame

        with checkpoint.lock(self.root / "checkpoints" / ".report"):
            self.look_up(tracker)
            points = self.selected()
            shown = [spec for spec in self.everything if spec.point == points[spec.arm]]
            whole = all(self.status(spec) == "finished" for spec in shown)
            folder = self.report_folder if whole or not is_complete(self.report_folder) else self.incomplete_folder
            files.sweep(folder)
            rows = frame(tracker, shown, self.runs, self.experiment.report)
            rows = rows[
                rows["metric"].isin([*metrics(self.experiment, shown), *TIMES])
            ]  # a curve has another x than the rest
            done = render(self.report_plan(shown), rows, folder)
            if whole and self.incomplete_folder.is_dir():
                shutil.rmtree(self.incomplete_folder)
            parent = tracker.parent(self.experiment.experiment, self.scale, {})
            tracker.publish(parent, folder, done.verdict)
        return done

    def report_plan(self, shown: Sequence[RunSpec]) -> Any:
        """What the report needs to know; ``shown`` are the runs of the selected grid points."""
        from lit_memory.report.results import ReportPlan
        from lit_memory.report.settings import arm_settings

        e = self.experiment
        own = {arm: values | split_arm(e.settings, arm)[1] | e.axes(arm) for arm, values in e.arms.items()}
        return ReportPlan(
            experiment=e.experiment,
            scale=self.scale,
            modified=self.overrides,
            paper=vars(e.paper),
            train_x=self.train_x(),
            paper_x=self.paper_x(),
            settings=arm_settings(own, shown),
            arms=list(e.arms),
            seeds=e.seeds,
            x_values=x_values(e, self.everything),
            config=e.report,
            expect=e.expect,
            deviations=[
                *self.deviations(),
                *self.remarks(),
                *(f"`{arm}`: {point}, chosen on validation data" for arm, point in self.selected().items() if point),
            ],
            runs=[self.run_facts(s) for s in shown],
            command=" ".join(
                [
                    "python run.py",
                    self.args.experiment,
                    *self.overrides,
                    *([] if self.args.default_scale else ["--scale", self.scale]),
                ]
            ),
            provenance=self.origin(),
        )

    def train_x(self) -> float | None:
        """The largest x that any arm was trained on: of the values of ``train_<field>``, if the task has them, else of
        the field itself."""
        axis = self.experiment.report.x
        if axis == STEP:
            return None
        field = axis.removeprefix("test_")
        trained = [s.trained.task | stage["task"] for s in self.everything for stage in s.trained.stages]
        if field == axis:
            return max(
                x
                for task in {json.dumps(task): task for task in trained}.values()
                for x in build("task", task).places(axis)
            )
        seen = [x for task in trained for x in task.get(f"train_{field}") or [task.get(field)] if x is not None]
        return max(seen, default=None)

    def deviations(self) -> list[str]:
        """Settings that differ from those of the scale "paper"."""
        return differences(self.everything, self.paper_specs) if self.paper_specs else []

    def paper_x(self) -> float | None:
        """The largest value that the test has at the scale "paper"."""
        return (
            max(x_values(self.experiment, self.paper_specs))
            if self.paper_specs and self.experiment.report.x.startswith("test_")
            else None
        )

    @cached_property
    def paper_specs(self) -> list[RunSpec]:
        """The runs of the scale "paper", where that is another one."""
        return [] if self.scale == "paper" or "paper" not in self.whole.scales else self.whole.at("paper").plan()

    def remarks(self) -> list[str]:
        """What the finished runs tell about their tests, each line once."""
        found = (run.tags.get("lit.remarks", "").splitlines() for run in self.runs.values() if run.status == "FINISHED")
        return list(dict.fromkeys(line for lines in found for line in lines))

    def origin(self) -> dict[str, str]:
        """Commit, versions and hardware of the finished runs, each once; a run that was resumed may have several by
        itself."""
        tags = [run.tags for run in self.runs.values() if run.status == "FINISHED"]
        names = ("commit", "dirty", "versions", "hardware")
        found = {
            name: dict.fromkeys(part for t in tags for part in t.get(f"lit.{name}", "").split("; ") if part)
            for name in names
        }
        return {name: "; ".join(values) or "unknown" for name, values in found.items()} if tags else provenance()

    def run_facts(self, spec: RunSpec) -> dict[str, Any]:
        run = self.runs.get(spec.key)
        facts = {
            "arm": spec.arm,
            "point": spec.point,
            "seed": spec.seed,
            "key": spec.key[:8],
            "status": self.status(spec),
        }
        facts["samples"] = build("task", spec.task).test_sizes(spec.train["test_size"])
        if run is None:
            return facts
        sizes: dict[str, Any] = {
            k: int(run.params[k]) for k in ("parameters", "state_floats", "state_growth") if k in run.params
        }
        if sizes.get("state_growth"):
            sizes |= {"growth_unit": load_class("model", spec.model["name"]).growth_unit}
        totals = {k: run.metrics[k] for k in ("steps", "seconds", "peak_memory_mb") if k in run.metrics}
        stages = [int(n) for n in run.tags.get("lit.stage_steps", "").split()]
        x = self.experiment.report.state_value(x_values(self.experiment, self.everything))
        if x is not None and sizes.get("state_growth"):
            sizes["segments"] = build("task", {**spec.task, self.experiment.report.x.removeprefix("test_"): x}).written
        return (
            facts
            | sizes
            | totals
            | {"stage_steps": stages, "run_id": run.run_id, "error": run.tags.get("lit.error", "")}
        )


def with_starts(spec: RunSpec) -> list[RunSpec]:
    """A run, and before it those that it starts from."""
    return [*(with_starts(spec.start) if spec.start else []), spec]


def new_tracker(root: Path) -> Any:
    """The tracker of a root that may be new."""
    check_server(os.environ.get("MLFLOW_TRACKING_URI") or "")
    make_root(root)
    font_cache(root)
    from lit_memory.run.tracking import Tracker

    return Tracker(root)


def root_of(args: argparse.Namespace) -> Path:
    """Where the command writes. Raises ConfigError for a place where it cannot."""
    if args.root == "":
        raise ConfigError("command line", "--root", "'': expected a folder")
    root = Path(args.root).absolute() if args.root else default_root()
    check_root(root, "--root" if args.root else "LIT_MEMORY_ROOT", write=not args.dry_run)
    return root


def chosen(flag: str, text: str | None, valid: Sequence, kind: type) -> list:
    """The values of a comma-separated flag, or all. Raises ConfigError for one that the experiment does not have."""
    if text is None:
        return list(valid)
    names = {str(v): v for v in valid}
    for item in text.split(","):
        if item not in names:
            raise ConfigError("command line", flag, f"unknown value {item!r}; {nearest(item, names)}")
    return [names[item] for item in text.split(",")]


def duration(seconds: float) -> str:
    """3 s, 4 min, 2.5 h."""
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
