"""The command: flags -> plan -> execute -> report. The only file that prints.

Exit codes: 0 done, 1 a run failed (the others finished), 2 wrong file or command line, 130 and 143 interrupted.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from lit_memory.config import ConfigError
from lit_memory.experiment import Experiment, RunSpec, differences, load
from lit_memory.launch import Child, Interrupted, Launch
from lit_memory.provenance import PROJECT, provenance
from lit_memory.registry import model_size, nearest


class Parser(argparse.ArgumentParser):
    """Errors as ConfigErrors: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("command line", "", f"{message}; see --help")


def parser() -> Parser:
    """The command's flags (frozen by a test)."""
    p = Parser(prog="run.py", description="Train, evaluate and compare with the paper: one YAML, one table or figure.", allow_abbrev=False)
    p.add_argument("experiment", metavar="EXPERIMENT.yaml")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all arms, for example train.lr=1e-3")
    p.add_argument("--scale", metavar="NAME", help="one of the experiment's scales (default: its first)")
    p.add_argument("--arms", metavar="A,B", help="run these arms only")
    p.add_argument("--seeds", metavar="0,1", help="run these seeds only")
    p.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: as many as the cores allow)")
    p.add_argument("--root", type=Path, metavar="DIR", help="where checkpoints/, reports/ and mlflow.db go (default: $LIT_MEMORY_ROOT or the project's folder)")
    p.add_argument("--dry-run", action="store_true", help="print the plan and do nothing")
    p.add_argument("--report", action="store_true", help="draw the report of what is finished and train nothing")
    p.add_argument("--fresh", action="store_true", help="train again what is finished; the old runs stay in MLflow, retired")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    console, errors = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        args = parser().parse_intermixed_args(argv)
        job = Job.prepare(args)
    except ConfigError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        return 2
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    return job.run(console, errors)


@dataclass
class Job:
    """One call of the command: which runs of which experiment, and where."""

    experiment: Experiment
    overrides: list[str]
    everything: list[RunSpec]
    """All runs of the scale; the report wants to know what is missing."""
    specs: list[RunSpec]
    """The runs that were asked for."""
    root: Path
    args: argparse.Namespace
    runs: dict[str, Any] = field(default_factory=dict)
    """What MLflow knows: key -> tracking.Run."""

    @classmethod
    def prepare(cls, args: argparse.Namespace) -> "Job":
        """Read and check everything; nothing is written. Raises ConfigError."""
        loaded = load(args.experiment)
        args.default_scale = args.scale is None or args.scale == loaded.scale_names()[0]
        experiment = loaded.at(args.scale)
        specs = experiment.plan(args.overrides)
        experiment.check_report(specs)
        arms = chosen("--arms", args.arms, list(experiment.arms), str)
        seeds = chosen("--seeds", args.seeds, experiment.seeds, int)
        if args.jobs is not None and args.jobs < 1:
            raise ConfigError("command line", "--jobs", f"{args.jobs}: expected at least 1")
        root = (args.root or Path(os.environ.get("LIT_MEMORY_ROOT") or PROJECT)).absolute()
        if root.exists() and not root.is_dir():
            raise ConfigError("command line", "--root", f"{root} is a file; expected a folder")
        return cls(experiment, args.overrides, specs, [s for s in specs if s.arm in arms and s.seed in seeds], root, args)

    @property
    def scale(self) -> str:
        return next(iter(self.experiment.scales))

    @property
    def jobs(self) -> int:
        """Runs at a time: as asked, or as many as the cores allow; one where a run takes a GPU."""
        train = self.specs[0].train
        limit = max(1, (os.cpu_count() or 1) // train["threads"]) if train["accelerator"] == "cpu" else 1
        return min(self.args.jobs or limit, max(1, len(self.specs)))

    @property
    def report_folder(self) -> Path:
        """reports/<experiment> for the first scale as the YAML has it; a folder below for everything else."""
        folder = self.root / "reports" / self.experiment.experiment
        if self.overrides:
            return folder / f"{self.scale}-modified"
        return folder if self.args.default_scale else folder / self.scale

    def run(self, console: Console, errors: Console) -> int:
        tracker = self.open_tracker()
        self.look_up(tracker)
        todo = [] if self.args.report else [s for s in self.specs if self.args.fresh or self.status(s) != "finished"]
        console.print(self.headline(todo), highlight=False, soft_wrap=True)
        if self.args.dry_run:
            console.print(self.plan_table())
            return 0
        code = 0
        if todo:
            tracker = tracker or self.create_tracker()
            if self.args.fresh:
                self.retire(tracker, todo)
            code = Execution(self, tracker, todo, console, errors).run()
            self.look_up(tracker)
        if code < 128:
            self.report(tracker or self.create_tracker(), console)
        return code

    def open_tracker(self) -> Any:
        """The tracker, or None where there is no database yet: a dry run creates nothing."""
        uri = os.environ.get("MLFLOW_TRACKING_URI") or ""
        path = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else self.root / "mlflow.db"
        return None if (not uri or uri.startswith("sqlite:///")) and not path.is_file() else self.create_tracker()

    def create_tracker(self) -> Any:
        from lit_memory.tracking import Tracker

        self.root.mkdir(parents=True, exist_ok=True)
        return Tracker(self.root)

    def look_up(self, tracker: Any) -> None:
        if tracker is not None:
            self.runs = {s.key: run for s in self.everything if (run := tracker.find(s.key)) is not None}

    def retire(self, tracker: Any, specs: Sequence[RunSpec]) -> None:
        """Forget runs and their checkpoints, so that they start anew."""
        for spec in specs:
            if spec.key in self.runs:
                tracker.retire(self.runs[spec.key].run_id)
            (spec.folder(self.root) / "last.ckpt").unlink(missing_ok=True)

    def status(self, spec: RunSpec) -> str:
        """finished, to resume, or new."""
        run = self.runs.get(spec.key)
        if run is not None and run.status == "FINISHED":
            return "finished"
        return "to resume" if (spec.folder(self.root) / "last.ckpt").is_file() else "new"

    def headline(self, todo: Sequence[RunSpec]) -> str:
        """What will happen, in one line."""
        counts = {name: sum(self.status(s) == name for s in self.specs) for name in ("finished", "to resume", "new")}
        parts = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        seconds = [self.estimate(s) for s in todo]
        known = [s for s in seconds if s is not None]
        time_left = f"; about {duration(sum(known) / len(known) * len(todo) / min(self.jobs, len(todo)))}" if known else ""
        what = f"{len(self.specs)} run{'s' if len(self.specs) != 1 else ''}: {parts}"
        modified = f", modified: {' '.join(self.overrides)}" if self.overrides else ""
        return f"[bold]{self.experiment.experiment}[/] (scale {self.scale}{modified}): {what}{time_left}"

    def estimate(self, spec: RunSpec) -> float | None:
        """Seconds of a run: what the same arm took here, or took for the report that came with the project."""
        own = [r.metrics["seconds"] for s in self.everything if s.arm == spec.arm and (r := self.runs.get(s.key)) and "seconds" in r.metrics]
        if own:
            return sum(own) / len(own)
        shipped = PROJECT / "reports" / self.experiment.experiment / ("" if self.args.default_scale else self.scale) / "verdict.json"
        if not shipped.is_file() or self.overrides:
            return None
        runs = [r for r in json.loads(shipped.read_text()).get("runs", []) if r["arm"] == spec.arm and r.get("seconds")]
        return sum(r["seconds"] for r in runs) / len(runs) if runs else None

    def plan_table(self) -> Table:
        """The plan as a table: arm, parameters, state floats, steps, key, status, time."""
        table = Table("arm", "seed", "parameters", "state floats", "steps", "key", "status", "est. time", box=None, header_style="bold")
        sizes: dict[str, dict[str, int]] = {}
        for spec in self.specs:
            size = sizes.setdefault(f"{spec.arm}{spec.point}", model_size(spec.model))
            steps = sum(stage["steps"] for stage in spec.stages)
            least = "≤" if any(stage["until"] for stage in spec.stages) else ""
            seconds = self.estimate(spec)
            name = f"{spec.arm} {spec.point}".strip()
            row = (name, str(spec.seed), f"{size['parameters']:,}", f"{size['state_floats']:,}", f"{least}{steps:,}", spec.key[:8], self.status(spec))
            table.add_row(*row, duration(seconds) if seconds else "?")
        return table

    def report(self, tracker: Any, console: Console) -> None:
        """Draw the report of all finished runs of the plan, and print table, verdict and where to look."""
        from lit_memory import report
        from lit_memory.tracking import frame

        plan = self.report_plan()
        done = report.render(plan, frame(tracker, self.everything, self.runs), self.report_folder)
        parent = tracker.parent(self.experiment.experiment, self.scale, {})
        tracker.write_folder(parent, self.report_folder)
        tracker.tag(parent, {"verdict": done.verdict})
        tracker.end(parent, "FINISHED")
        console.print(done.text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"report   {shown(self.report_folder / 'README.md')}", highlight=False, soft_wrap=True)
        console.print(f"runs     mlflow ui --backend-store-uri {tracker.uri}", highlight=False, soft_wrap=True)

    def report_plan(self) -> Any:
        from lit_memory.report import ReportPlan

        e = self.experiment
        return ReportPlan(
            experiment=e.experiment,
            scale=self.scale,
            modified=self.overrides,
            paper=vars(e.paper),
            train_x=self.train_x(),
            arms=list(e.arms),
            seeds=e.seeds,
            x_values=e.test_values(self.everything),
            config=e.report,
            expect=e.expect,
            deviations=self.deviations(),
            runs=[self.run_facts(s) for s in self.everything],
            command=" ".join(["python run.py", self.args.experiment, *self.overrides, *([] if self.args.default_scale else ["--scale", self.scale])]),
            provenance=self.origin(),
        )

    def train_x(self) -> float | None:
        """The largest x that any arm was trained on."""
        axis = self.experiment.report.x.removeprefix("test_")
        return max((stage["task"].get(axis, s.task[axis]) for s in self.everything for stage in s.stages if axis in s.task), default=None)

    def deviations(self) -> list[str]:
        """Settings that differ from those of the scale "paper"."""
        everything = load(self.args.experiment)
        if self.scale == "paper" or "paper" not in everything.scales:
            return []
        return differences(self.everything, everything.at("paper").plan())

    def origin(self) -> dict[str, str]:
        """Commit, versions and hardware of the finished runs; all of them where they differ."""
        tags = [run.tags for run in self.runs.values() if run.status == "FINISHED"]
        found = {name: dict.fromkeys(t.get(f"lit.{name}", "") for t in tags) for name in ("commit", "dirty", "versions", "hardware")}
        return {name: "; ".join(v for v in values if v) or "unknown" for name, values in found.items()} if tags else provenance()

    def run_facts(self, spec: RunSpec) -> dict[str, Any]:
        run = self.runs.get(spec.key)
        facts = {"arm": spec.arm, "point": spec.point, "seed": spec.seed, "key": spec.key[:8], "status": self.status(spec)}
        if run is None:
            return facts
        sizes = {k: int(run.params[k]) for k in ("parameters", "state_floats") if k in run.params}
        totals = {k: run.metrics[k] for k in ("steps", "seconds", "peak_memory_mb") if k in run.metrics}
        return facts | sizes | totals | {"run_id": run.run_id, "error": run.tags.get("lit.error", "")}


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
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def shown(path: Path) -> str:
    """A path as one would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class Execution:
    """Runs a plan, with one line per run."""

    def __init__(self, job: Job, tracker: Any, todo: Sequence[RunSpec], console: Console, errors: Console) -> None:
        self.job, self.tracker, self.console, self.errors = job, tracker, console, errors
        self.failed = 0
        tags = provenance() | {"paper": job.experiment.paper.arxiv or job.experiment.paper.title}
        parent = tracker.parent(job.experiment.experiment, job.scale, tags)
        self.launch = Launch(todo, job.jobs, job.root, tracker.uri, parent, tags)

    def run(self) -> int:
        """Exit code: 0, 1 if a run failed, 130 or 143 if interrupted."""
        try:
            with Live(console=self.console, refresh_per_second=2, transient=True, get_renderable=self.display, auto_refresh=self.console.is_terminal):
                for child, event in self.launch.events():
                    if event["event"] == "end":
                        self.end(child)
                    elif event.get("news") and not self.console.is_terminal:
                        self.console.print("  ".join(part for part in self.line(child) if part), highlight=False)
        except Interrupted as signum:
            self.launch.stop()  # the signal may have come while a line was printed, outside of events()
            for child in self.launch.running:
                self.close(child.spec, "KILLED")
            self.errors.print(f"interrupted; run the same command again to go on (exit {128 + signum.number})", highlight=False)
            return 128 + signum.number
        return int(self.failed > 0)

    def end(self, child: Child) -> None:
        name = f"{child.spec.arm} {child.spec.point}".strip() + f" seed {child.spec.seed}"
        took = duration(child.age)
        if child.process.exitcode == 0:
            self.console.print(f"[green]✓[/] {name} finished in {took} ({self.launch.done} of {self.launch.total})", highlight=False)
            return
        self.failed += 1
        why = escape(child.failure or f"its process ended with code {child.process.exitcode}")
        self.errors.print(f"[bold red]✗[/] {name} failed after {took}: {why} (log: {shown(child.spec.folder(self.job.root) / 'log.txt')})")
        self.close(child.spec, "FAILED")

    def close(self, spec: RunSpec, status: str) -> None:
        """End a run in MLflow whose process could not do so itself."""
        run = self.tracker.find(spec.key)
        if run is not None and run.status == "RUNNING":
            self.tracker.end(run.run_id, status)

    def line(self, child: Child) -> tuple[str, ...]:
        """Columns of the live display: run, stage, step, loss, metric, time."""
        p, name = child.progress, f"{child.spec.arm} s{child.spec.seed}"
        if not p:
            return (name, "starting", "", "", "", duration(child.age))
        testing = p["event"] == "testing"
        stage = "testing" if testing else f"stage {p['stage']}/{p['stages']}"
        step = "" if testing else f"step {p['step']}/{p['steps']}"
        loss = f"loss {p['loss']:.3f}" if "loss" in p else ""
        metric = f"{p['metric_name']} {p['metric']:.3f}" if "metric" in p else ""
        return (name, stage, step, loss, metric, duration(child.age))

    def display(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for child in self.launch.running:
            table.add_row(*self.line(child))
        if self.launch.waiting:
            table.add_row(f"{len(self.launch.waiting)} waiting")
        return table


if __name__ == "__main__":
    sys.exit(main())
