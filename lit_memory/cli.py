"""The command: flags -> plan -> run -> report. The only file that prints.

Exit codes: 0 done, 1 a run failed (the others finished), 2 wrong file or command line, 130 and 143 interrupted.
"""

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.report.catalogue import find_experiment
from lit_memory.report.marks import Summary, has_marks
from lit_memory.report.marks_page import render_marks
from lit_memory.report.results import Report
from lit_memory.run.checkpoint import saved
from lit_memory.run.display import LiveLines, counted, duration, headline, list_table, names, note_on_stages, plan_table
from lit_memory.run.folders import root_of
from lit_memory.run.launchers.local import Child, Interrupted, LocalLauncher
from lit_memory.run.options import Options
from lit_memory.run.outbox import PATIENCE, away_line, deliver, waiting, within
from lit_memory.run.reporting import write_report
from lit_memory.run.store import find_tracker, open_tracker
from lit_memory.run.sweep import Sweep
from lit_memory.run.worklist import WorkList
from lit_memory.util.files import disk_full
from lit_memory.util.provenance import provenance

if TYPE_CHECKING:
    from lit_memory.run.tracking import Tracker

FLAGS: dict[str, dict[str, Any]] = {
    "--scale": {"metavar": "NAME", "help": "one of the experiment's scales (default: its first)"},
    "--arms": {"metavar": "A,B", "help": "run these arms only"},
    "--seeds": {"metavar": "0,1", "help": "run these seeds only"},
    "--jobs": {"metavar": "N", "type": int, "help": "runs at a time (default: as many as the cores allow)"},
    "--root": {
        "metavar": "DIR",
        "help": "where checkpoints/, reports/ and mlflow.db go (default: $LIT_MEMORY_ROOT or the project's folder)",
    },
}
SWITCHES = {
    "--dry-run": "print the plan and do nothing",
    "--report": "draw the report of what is finished and train nothing",
    "--fresh": "train again what is finished; the old runs stay in MLflow, retired",
    "--list": "print the project's experiments with their verdicts and do nothing",
}


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
    experiment = "a file, or the name of one of the project's experiments"
    p.add_argument("experiment", metavar="EXPERIMENT.yaml", nargs="?", help=experiment)
    p.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all arms, for example train.lr=1e-3")
    for flag, settings in FLAGS.items():
        p.add_argument(flag, **settings)
    for flag, text in SWITCHES.items():
        p.add_argument(flag, action="store_true", help=text)
    return p


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Options of a command line, ``sys.argv`` by default. Raises ConfigError; SystemExit after ``--help``."""
    given = vars(parser().parse_intermixed_args(argv))
    if given["list"]:
        return Options(list=True)
    if given["experiment"] is None:
        raise ConfigError("command line", "EXPERIMENT.yaml", "missing; expected a file, or a name that --list shows")
    given["experiment"] = short(find_experiment(given["experiment"]))
    given["overrides"] = tuple(given["overrides"])
    for name in ("arms", "seeds"):
        given[name] = None if given[name] is None else tuple(given[name].split(","))
    return Options(**given)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    console, errors = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    root = None
    try:
        options = parse_options(argv)
        if options.list:
            console.print(list_table())
            return 0
        if has_marks(Path(options.experiment)):
            return summarize(options, console)
        sweep = Sweep.prepare(options)
        root = sweep.root
        return run(sweep, console, errors)
    except ConfigError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        return 2
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except KeyboardInterrupt:  # before or after the runs; during them Execution handles it
        return 130
    except Exception as error:
        message = (root and disk_full(error, root)) or away_line(error)
        if message is None:
            raise
        errors.print(f"[bold red]error:[/] {escape(message)}")
        return 1


def run(sweep: Sweep, console: Console, errors: Console) -> int:
    """Announce what is to be done, do it, and report; returns the exit code."""
    options, work, tracker = sweep.options, WorkList(sweep), find_tracker(sweep.root)
    if tracker is not None:
        if not options.dry_run:
            send_waiting(work, tracker, console, errors)
        work.refresh(tracker)
    todo = work.todo()
    console.print(headline(work, todo), highlight=False, soft_wrap=True)
    if options.dry_run:
        console.print(plan_table(work))
    if note := note_on_stages(sweep):
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    if options.dry_run:
        return 0
    sweep.check_gpu(todo)
    tracker = tracker or open_tracker(sweep.root)
    work.close_stale(tracker)
    code = 0
    if todo:
        if options.fresh:
            work.retire(tracker, todo)
        code = Execution(work, tracker, todo, console, errors).run()
    if code < 128:
        code = code or int(not send_waiting(work, tracker, console, errors))
        print_report(write_report(work, tracker), console)
        console.print(f"runs     mlflow ui --backend-store-uri {tracker.uri}", highlight=False, soft_wrap=True)
    return code


def send_waiting(work: WorkList, tracker: "Tracker", console: Console, errors: Console) -> bool:
    """Send what ended runs have left on disk, and say so; returns whether nothing is left."""
    root = work.sweep.root
    before = waiting(work.specs, root)
    reason = deliver(before, root, tracker) if before else ""
    left = waiting(before, root)
    if sent := [spec for spec in before if spec not in left]:
        console.print(f"sent     what waited on disk: {names(sent)}", highlight=False, soft_wrap=True)
    if left:
        line = f"what waits on disk for the tracking store ({reason}): {names(left)}; the same command sends it"
        errors.print(f"[yellow]warning:[/] {escape(line)}", highlight=False)
    return not left


def summarize(options: Options, console: Console) -> int:
    """Write the report of marks over other experiments' reports; there is nothing to train."""
    useless = {
        "key=value": options.overrides,
        "--arms": options.arms,
        "--seeds": options.seeds,
        "--fresh": options.fresh,
    }
    for flag, value in useless.items():
        if value:
            message = f"{options.experiment} reads the reports of other experiments and trains nothing; leave it out"
            raise ConfigError("command line", flag, message)
    root = root_of(options)
    summary = Summary.load(options.experiment, root, options.scale)
    counts = f"from {counted(len(summary.names), 'report')}, {len(summary.missing)} missing"
    console.print(f"[bold]{summary.name}[/] ({summary.scale_shown}): {counts}", highlight=False)
    if options.dry_run:
        return 0
    scale = f" --scale {options.scale}" if options.scale else ""
    report = render_marks(summary, root, f"python run.py {options.experiment}{scale}")
    tracker = open_tracker(root)
    parent = tracker.parent(summary.name, summary.scale or "default", {})
    tracker.publish(parent, report.paths["README.md"].parent, report.verdict)
    print_report(report, console)
    return 0


def print_report(report: Report, console: Console) -> None:
    """Print the table, the verdict and the page's path."""
    console.print(report.text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"report   {short(report.paths['README.md'])}", highlight=False, soft_wrap=True)


def short(path: Path) -> str:
    """A path as one would type it: relative if it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class Execution:
    """Trains runs in child processes and prints one line per run."""

    def __init__(
        self, work: WorkList, tracker: "Tracker", todo: Sequence[RunSpec], console: Console, errors: Console
    ) -> None:
        self.work, self.tracker, self.console, self.errors = work, tracker, console, errors
        self.failed, self.warnings = 0, set[str]()
        sweep, paper = work.sweep, work.sweep.experiment.paper
        tags = provenance() | {"paper": paper.arxiv or paper.title, "where": sweep.location}
        experiments = dict.fromkeys([sweep.name, *(spec.experiment for spec in todo)])
        parents = {name: tracker.parent(name, sweep.scale, tags) for name in experiments}
        self.parent = parents[sweep.name]
        self.launcher = LocalLauncher(todo, sweep.jobs, sweep.root, tracker.uri, parents, tags)
        seconds = {spec.key: work.seconds(spec) for spec in todo if not saved(spec.folder(sweep.root))}
        self.lines = LiveLines(self.launcher, sweep.name, seconds)

    def run(self) -> int:
        """Exit code: 0, 1 if a run failed, 130 or 143 if interrupted."""
        live = Live(
            console=self.console,
            refresh_per_second=2,
            transient=True,
            get_renderable=lambda: self.lines.renderable(self.console.width),
            auto_refresh=self.console.is_terminal,
        )
        try:
            with live:
                for child, event in self.launcher.events():
                    self.show(child, event)
        except Interrupted as signum:
            self.launcher.stop()  # the signal may have come while a line was printed, outside of events()
            specs = [child.spec for child in self.launcher.running]
            within(PATIENCE, lambda: self.close(specs, "KILLED"))
            code = 128 + signum.number
            self.errors.print(f"interrupted; run the same command again to go on (exit {code})", highlight=False)
            return code
        return int(self.failed > 0)

    def show(self, child: Child, event: Mapping[str, Any]) -> None:
        """Print what is worth a line. In a terminal the live display shows the progress."""
        if event["event"] == "end":
            self.end(child)
        elif event["event"] == "warning":
            if event["message"] in self.warnings:
                return  # several runs notice the same
            self.warnings.add(event["message"])
            self.errors.print(f"[yellow]warning:[/] {escape(event['message'])}", highlight=False)
        elif event.get("news") and not self.console.is_terminal:
            line = "  ".join(column for column in self.lines.line(child) if column)
            self.console.print(line, highlight=False, soft_wrap=True)

    def end(self, child: Child) -> None:
        """Print how a run ended; close it in MLflow if it failed."""
        name, took = f"{self.lines.name(child.spec)} seed {child.spec.seed}", duration(child.age)
        if child.process.exitcode == 0:
            count = f"{self.launcher.done} of {self.launcher.total}"
            self.console.print(f"[green]✓[/] {name} finished in {took} ({count})", highlight=False)
            return
        self.failed += 1
        reason = escape(child.failure or f"its process ended with code {child.process.exitcode}")
        log = short(child.spec.folder(self.work.sweep.root) / "log.txt")
        self.errors.print(f"[bold red]✗[/] {name} failed after {took}: {reason} (log: {log})")
        self.close([child.spec], "FAILED")

    def close(self, specs: Sequence[RunSpec], status: str) -> None:
        """End runs in MLflow whose processes could not do so themselves."""
        with contextlib.suppress(Exception):  # a full disk, or no store; the next command closes them
            deliver(specs, self.work.sweep.root, self.tracker, status)
            if status == "KILLED":
                self.tracker.end(self.parent, status)


if __name__ == "__main__":
    sys.exit(main())
