"""The command: flags -> plan -> execute -> report. The only file that prints.

Exit codes: 0 done, 1 a run failed (the others finished), 2 wrong file or command line, 130 and 143 interrupted.
"""

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import load_class
from lit_memory.report.catalogue import find_experiment, list_experiments
from lit_memory.report.marks import Summary, has_marks
from lit_memory.report.marks_page import render_marks
from lit_memory.run.checkpoint import locked, saved
from lit_memory.run.job import Job, duration, new_tracker, root_of
from lit_memory.run.launchers.local import Child, Interrupted, Launch
from lit_memory.util.files import disk_full
from lit_memory.util.provenance import provenance


class Parser(argparse.ArgumentParser):
    """Errors as ConfigErrors: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("command line", "", f"{message}; see --help")


def parser() -> Parser:
    """The command's flags (frozen by a test)."""
    p = Parser(
        prog="run.py",
        description="Train, evaluate and compare with the paper: one YAML, one table or figure.",
        allow_abbrev=False,
    )
    p.add_argument(
        "experiment",
        metavar="EXPERIMENT.yaml",
        nargs="?",
        help="a file, or the name of one of the project's experiments",
    )
    p.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all arms, for example train.lr=1e-3")
    p.add_argument("--scale", metavar="NAME", help="one of the experiment's scales (default: its first)")
    p.add_argument("--arms", metavar="A,B", help="run these arms only")
    p.add_argument("--seeds", metavar="0,1", help="run these seeds only")
    p.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: as many as the cores allow)")
    p.add_argument(
        "--root",
        metavar="DIR",
        help="where checkpoints/, reports/ and mlflow.db go (default: $LIT_MEMORY_ROOT or the project's folder)",
    )
    p.add_argument("--dry-run", action="store_true", help="print the plan and do nothing")
    p.add_argument("--report", action="store_true", help="draw the report of what is finished and train nothing")
    p.add_argument(
        "--fresh", action="store_true", help="train again what is finished; the old runs stay in MLflow, retired"
    )
    p.add_argument(
        "--list", action="store_true", help="print the project's experiments with their verdicts and do nothing"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    console, errors = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    job = None
    try:
        args = parser().parse_intermixed_args(argv)
        if args.list:
            console.print(list_table())
            return 0
        if args.experiment is None:
            raise ConfigError(
                "command line", "EXPERIMENT.yaml", "missing; expected a file, or a name that --list shows"
            )
        args.experiment = shown(find_experiment(args.experiment))
        if has_marks(Path(args.experiment)):
            return summarize(args, console)
        job = Job.prepare(args)
        return run(job, console, errors)
    except ConfigError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        return 2
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except KeyboardInterrupt:  # before or after the runs; during them Execution handles it
        return 130
    except Exception as error:
        told = job and disk_full(error, job.root)
        if told is None:
            raise
        errors.print(f"[bold red]error:[/] {escape(told)}")
        return 1


def run(job: Job, console: Console, errors: Console) -> int:
    """Say what will happen, do it, and report; returns the exit code."""
    tracker = job.open_tracker()
    job.look_up(tracker)
    todo = job.todo()
    console.print(job.headline(todo), highlight=False, soft_wrap=True)
    if job.args.dry_run:
        console.print(plan_table(job))
    if note := job.note():
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    if job.args.dry_run:
        return 0
    job.check_machine(todo)
    tracker = tracker or new_tracker(job.root)
    job.close_stale(tracker)
    code = 0
    if todo:
        if job.args.fresh:
            job.retire(tracker, todo)
        code = Execution(job, tracker, todo, console, errors).run()
    if code < 128:
        done = job.report(tracker)
        console.print(done.text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"report   {shown(done.paths['README.md'])}", highlight=False, soft_wrap=True)
        console.print(f"runs     mlflow ui --backend-store-uri {tracker.uri}", highlight=False, soft_wrap=True)
    return code


def summarize(args: argparse.Namespace, console: Console) -> int:
    """Write the report of marks over other experiments' reports; there is nothing to train."""
    for flag, value in {
        "key=value": args.overrides,
        "--arms": args.arms,
        "--seeds": args.seeds,
        "--fresh": args.fresh,
    }.items():
        if value:
            raise ConfigError(
                "command line",
                flag,
                f"{args.experiment} reads the reports of other experiments and trains nothing; leave it out",
            )
    root = root_of(args)
    summary = Summary.load(args.experiment, root, args.scale)
    count = f"{len(summary.names)} report{'s' if len(summary.names) != 1 else ''}"
    console.print(
        f"[bold]{summary.name}[/] ({summary.scale_shown}): from {count}, {len(summary.missing)} missing",
        highlight=False,
    )
    if args.dry_run:
        return 0
    command = f"python run.py {args.experiment}" + (f" --scale {args.scale}" if args.scale else "")
    done = render_marks(summary, root, command)
    tracker = new_tracker(root)
    tracker.publish(
        tracker.parent(summary.name, summary.scale or "default", {}), done.paths["README.md"].parent, done.verdict
    )
    console.print(done.text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"report   {shown(done.paths['README.md'])}", highlight=False, soft_wrap=True)
    return 0


def list_table() -> Table:
    """The project's experiments as a table: name, item of the paper, verdict, minutes of all its runs."""
    table = Table(box=None, header_style="bold")
    for name in ("experiment", "paper item", "verdict", "minutes"):
        table.add_column(name, no_wrap=name != "paper item", justify="right" if name == "minutes" else "left")
    for name, item, verdict, seconds in list_experiments():
        table.add_row(name, escape(item), verdict or "–", f"{seconds / 60:,.0f}" if seconds else "–")
    return table


def plan_table(job: Job) -> Table:
    """The plan as a table: arm, parameters, state floats, steps, key, status, time."""
    table = Table(box=None, header_style="bold")
    for name in ("arm", "seed", "parameters", "state floats", "steps", "key", "status", "time"):
        table.add_column(name, no_wrap=name in ("arm", "key", "status"))
    for spec in job.specs:
        size = job.sizes[spec.key]
        steps = sum(stage["steps"] for stage in spec.stages)
        least = "≤" if any(stage["until"] for stage in spec.stages) else ""
        seconds = job.estimate(spec)
        name = f"{spec.arm} {spec.point}".strip()
        growth = (
            f" + {size['state_growth']:,} a {load_class('model', spec.model['name']).growth_unit}"
            if size["state_growth"]
            else ""
        )
        sizes_shown = f"{size['parameters']:,}", f"{size['state_floats']:,}{growth}"
        table.add_row(
            name,
            str(spec.seed),
            *sizes_shown,
            f"{least}{steps:,}",
            spec.key[:8],
            job.status(spec),
            duration(seconds) if seconds else "?",
        )
    return table


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
        tags = provenance() | {"paper": job.experiment.paper.arxiv or job.experiment.paper.title, "where": job.where}
        own = job.experiment.experiment
        self.parents = {
            name: tracker.parent(name, job.scale, tags)
            for name in dict.fromkeys([own, *(spec.experiment for spec in todo)])
        }
        self.parent = self.parents[own]
        self.estimates = {spec.key: job.estimate(spec) for spec in todo if not saved(spec.folder(job.root))}
        self.launch = Launch(todo, job.jobs, job.root, tracker.uri, self.parents, tags)

    def run(self) -> int:
        """Exit code: 0, 1 if a run failed, 130 or 143 if interrupted."""
        try:
            with Live(
                console=self.console,
                refresh_per_second=2,
                transient=True,
                get_renderable=self.display,
                auto_refresh=self.console.is_terminal,
            ):
                for child, event in self.launch.events():
                    if event["event"] == "end":
                        self.end(child)
                    elif event["event"] == "warning":
                        self.errors.print(f"[yellow]warning:[/] {escape(event['message'])}", highlight=False)
                    elif event.get("news") and not self.console.is_terminal:
                        self.console.print(
                            "  ".join(part for part in self.line(child) if part), highlight=False, soft_wrap=True
                        )
        except Interrupted as signum:
            self.launch.stop()  # the signal may have come while a line was printed, outside of events()
            for child in self.launch.running:
                self.close(child.spec, "KILLED")
            self.tracker.end(self.parent, "KILLED")
            self.errors.print(
                f"interrupted; run the same command again to go on (exit {128 + signum.number})", highlight=False
            )
            return 128 + signum.number
        return int(self.failed > 0)

    def end(self, child: Child) -> None:
        name = f"{self.named(child.spec)} seed {child.spec.seed}"
        took = duration(child.age)
        if child.process.exitcode == 0:
            self.console.print(
                f"[green]✓[/] {name} finished in {took} ({self.launch.done} of {self.launch.total})", highlight=False
            )
            return
        self.failed += 1
        why = escape(child.failure or f"its process ended with code {child.process.exitcode}")
        self.errors.print(
            f"[bold red]✗[/] {name} failed after {took}: {why} (log: {shown(child.spec.folder(self.job.root) / 'log.txt')})"
        )
        self.close(child.spec, "FAILED")

    def close(self, spec: RunSpec, status: str) -> None:
        """End a run in MLflow whose process could not do so itself."""
        with contextlib.suppress(Exception):  # on a full disk; the next command closes it
            run = self.tracker.find(spec.key)
            if run is not None and run.status == "RUNNING" and not locked(spec.folder(self.job.root)):
                self.tracker.end(run.run_id, status)

    def named(self, spec: RunSpec) -> str:
        """Arm and grid point, with the experiment where it is another one's."""
        other = "" if spec.experiment == self.job.experiment.experiment else f"{spec.experiment}/"
        return f"{other}{spec.arm} {spec.point}".strip()

    def line(self, child: Child) -> tuple[str, ...]:
        """Columns of the live display: run, stage, step, loss, metric, time."""
        p, name, took = child.progress, f"{self.named(child.spec)} s{child.spec.seed}", f"{duration(child.age)} so far"
        if not p or p["event"] == "waiting":
            return (name, "another process trains it" if p else "starting", "", "", "", took)
        if p["event"] == "testing":
            return (name, "testing", *self.tested(p), took)
        stage, step = f"stage {p['stage']}/{p['stages']}", f"step {p['step']}/{p['steps']}"
        loss = f"loss {p['loss']:.3f}" if "loss" in p else ""
        metric = f"{p['metric_name']} {p['metric']:.3f}" if "metric" in p else ""
        left = (self.estimates.get(child.spec.key) or 0) - child.age
        return (name, stage, step, loss, metric, f"{took}, about {duration(left)} left" if left > 0 else took)

    def tested(self, p: Mapping[str, Any]) -> tuple[str, str, str]:
        """What share of a test has been read, how fast, and how long the rest will take."""
        if "share" not in p:
            return ("", "", "")
        left = p["tokens"] * (1 / p["share"] - 1) / p["tokens_per_s"]
        return (f"{p['share']:.0%}", f"{p['tokens_per_s']:,.0f} tokens/s", f"about {duration(left)} left")

    def display(self) -> Group:
        """A line for each run, in a narrow terminal without the loss and then without the step; and how many runs there
        are."""
        columns = list(zip(*map(self.line, self.launch.running), strict=True))
        for spare in (3, 2):
            if sum(max(map(len, column)) + 2 for column in columns) - 2 > self.console.width:
                del columns[spare]
        table = Table.grid(*(Column(no_wrap=True) for _ in columns), padding=(0, 2))
        for row in zip(*columns, strict=True):
            table.add_row(*row)
        return Group(table, f"{self.launch.done} of {self.launch.total} done, {len(self.launch.waiting)} waiting")


if __name__ == "__main__":
    sys.exit(main())
