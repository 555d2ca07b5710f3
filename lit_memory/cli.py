"""The command: flags -> plan -> run -> report. The only file that prints.

Exit codes: 0 done, 1 a run failed (the others finished), 2 wrong file or command line, 130 and 143 interrupted.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.markup import escape

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.report.gallery import write_gallery
from lit_memory.report.marks import Summary, has_marks
from lit_memory.report.redraw import redraw_all
from lit_memory.run import bundle, display, receipt
from lit_memory.run.checkpoint import saved
from lit_memory.run.delivery import deliver, waiting
from lit_memory.run.display import LiveLines, counted, duration, names
from lit_memory.run.folders import check_name, root_of
from lit_memory.run.launchers.base import Child, Interrupted, LauncherDied
from lit_memory.run.launchers.remote import RemoteLauncher
from lit_memory.run.options import Options, flags_of, parse_options, short
from lit_memory.run.outbox import PATIENCE, away_line
from lit_memory.run.reporting import write_marks, write_report
from lit_memory.run.server import within
from lit_memory.run.store import find_tracker, open_tracker
from lit_memory.run.sweep import Sweep
from lit_memory.run.template import write_template
from lit_memory.run.uri import StoreURI
from lit_memory.run.worklist import WorkList
from lit_memory.util.child import environment
from lit_memory.util.files import storage_problem
from lit_memory.util.streams import Lenient

if TYPE_CHECKING:
    from lit_memory.run.tracking import Tracker


def main(argv: Sequence[str] | None = None, words: bool = False) -> int:
    """Run the command line; returns the exit code. words: it begins with one of ``options.WORDS``."""
    console = Console(file=cast(IO[str], Lenient(sys.stdout)))
    errors = Console(file=cast(IO[str], Lenient(sys.stderr)), soft_wrap=True, highlight=False)
    root = None
    try:
        options = parse_options(flags_of(sys.argv[1:] if argv is None else argv) if words else argv)
        if options.list or options.new:
            console.print(display.list_table() if options.list else write_template(options.new), highlight=False)
            return 0
        root = root_of(options)
        with environment({"LIT_MEMORY_ROOT": str(root)}):
            return act(options, root, console, errors)
    except ConfigError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        return 2
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except KeyboardInterrupt:  # before or after the runs; during them Execution handles it
        return 130
    except Exception as error:
        StoreURI.of_environment().clean(error)
        message = (root and storage_problem(error, root)) or away_line(error)
        if message is None:
            raise
        errors.print(f"[bold red]error:[/] {escape(message)}")
        return 1


def act(options: Options, root: Path, console: Console, errors: Console) -> int:
    """Do what needs a root; returns the exit code."""
    if options.gallery:
        summary, paths = write_gallery(root, warner(errors))
        say(console, summary, *map(short, paths.values()))
        return 0
    if options.redraw is not None:
        for folder, before, after in redraw_all(options.redraw, root):
            say(console, f"{short(folder)}: {before} -> {after}")
        return 0
    if has_marks(Path(options.experiment)):
        return summarize(options, root, console, errors)
    inputs = receipt.inputs(options)
    if found := receipt.valid(options, root, inputs, warner(errors)):
        repeat(*found, root, console)
        return 0
    return run(Sweep.prepare(options), inputs, console, errors)


def repeat(found: receipt.Receipt, tracker: "Tracker", root: Path, console: Console) -> None:
    """Show what the last command showed; nothing has changed since."""
    console.print(*filter(None, found.lines), sep="\n", highlight=False, soft_wrap=True)
    print_report(found.text, root / found.folder, console)
    print_store(tracker, Path(found.folder).parts[1], console)


def run(sweep: Sweep, inputs: str, console: Console, errors: Console) -> int:
    """Announce what is to be done, do it, and report; returns the exit code. inputs: for the receipt."""
    options, work, warn = sweep.options, WorkList(sweep), warner(errors)
    if options.bundle:
        say(console, bundle.take(work))
    tracker = open_tracker(sweep.root, warn) if options.bundle else find_tracker(sweep.root, warn, options.dry_run)
    if tracker is not None:
        tracker.restore(work.experiments, options.dry_run)
        if not options.dry_run:
            send_waiting(work, tracker, console, errors)
        work.refresh(tracker)
    todo = work.todo()
    if not options.dry_run:
        sweep.check_machine(todo)
    console.print(display.headline(work, todo), highlight=False, soft_wrap=True)
    if options.dry_run:
        console.print(display.plan_table(work, console.width if console.is_terminal else None), soft_wrap=True)
    if note := display.note_on_stages(sweep):
        say(console, note)
    if options.dry_run:
        warn_of_twins(tracker, errors)
        return 0
    list(sweep.paper_specs)  # a mistake at that scale would end the report
    tracker = tracker or open_tracker(sweep.root, warn)
    work.close_stale(tracker)
    code, left = 0, 0
    try:
        while todo and code < 128 and not left:
            execution = Execution(work, tracker, todo, console, errors)
            code, left = max(code, execution.run()), execution.launcher.left
            todo = work.later(todo, tracker)
        if code < 128 and not left:
            code = int(not conclude(work, tracker, (inputs, note), console, errors)) or code
    finally:  # a report that fails, or a store that is away, takes no run with it
        if options.bundle:
            say(console, *bundle.keep(work, warn))
    return code


def conclude(work: WorkList, tracker: "Tracker", told: tuple[str, str], console: Console, errors: Console) -> bool:
    """Send, report, and say where all is; returns whether all is sent. told: inputs and note, for the receipt."""
    sent, report = send_waiting(work, tracker, console, errors), write_report(work, tracker)
    receipt.keep(work, tracker, report, told[0], [display.headline(work, []), escape(told[1])])
    print_report(report.text, report.folder, console)
    warn_of_twins(tracker, errors)
    print_store(tracker, work.sweep.name, console)
    return sent


def say(console: Console, *lines: str) -> None:
    """Print lines as they are: brackets in them, of a path for example, are no markup."""
    if lines:
        console.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)


def warner(errors: Console) -> Callable[[str], None]:
    """A function that prints a warning."""
    hide = StoreURI.of_environment().hide
    return lambda text: errors.print(f"[yellow]warning:[/] {escape(hide(text))}", highlight=False)


def send_waiting(work: WorkList, tracker: "Tracker", console: Console, errors: Console) -> bool:
    """Send what ended runs have left on disk, and say so; returns whether nothing is left."""
    root = work.sweep.root
    before = waiting(work.specs, root)
    if len(before) > 20:  # it takes a while
        console.print(f"sending  {len(before)} runs that wait on disk", highlight=False)
    reason = deliver(before, root, tracker) if before else ""
    left = waiting(before, root)
    if sent := [spec for spec in before if spec not in left]:
        console.print(f"sent     what waited on disk: {names(sent)}", highlight=False, soft_wrap=True)
    if left:
        line = f"what waits on disk for the tracking store ({reason}): {names(left)}"
        warner(errors)(f"{line}; {work.sweep.options.again} sends it")
    return not left


def warn_of_twins(tracker: "Tracker | None", errors: Console) -> None:
    """Say what the store has twice."""
    if tracker is not None and (note := display.note_on_twins(tracker.twins)):
        warner(errors)(note)


def summarize(options: Options, root: Path, console: Console, errors: Console) -> int:
    """Write the report of marks over other experiments' reports; there is nothing to train."""
    options.check_trains_nothing()
    summary = Summary.load(options.experiment, root, options.scale)
    check_name(summary.name, options.experiment)
    counts = f"from {counted(len(summary.names), 'report')}, {len(summary.missing)} missing"
    console.print(f"[bold]{summary.name}[/] ({summary.scale_shown}): {counts}", highlight=False)
    if options.dry_run:
        return 0
    tracker = open_tracker(root, warner(errors))
    report = write_marks(summary, options, root, tracker)
    print_report(report.text, report.folder, console)
    return 0


def print_report(text: str, folder: Path, console: Console) -> None:
    """Print the table, the verdict and the page's path."""
    say(console, text, f"report   {short(folder / 'README.md')}")


def print_store(tracker: "Tracker", experiment: str, console: Console) -> None:
    """Print how to look at the runs, and the page of this experiment."""
    say(console, f"runs     {tracker.uri.viewer}", f"page     {tracker.page(experiment)}")


class Execution:
    """Trains runs in child processes and prints one line per run."""

    def __init__(
        self, work: WorkList, tracker: "Tracker", todo: Sequence[RunSpec], console: Console, errors: Console
    ) -> None:
        self.work, self.tracker, self.console, self.errors = work, tracker, console, errors
        self.failed, self.warnings = 0, set[str]()
        if work.sweep.options.fresh:
            work.retire(tracker, todo)
        sweep, tags = work.sweep, work.sweep.tags
        settings = dict.fromkeys((spec.experiment for spec in todo), sweep.scale) | {sweep.name: sweep.setting}
        parents = {name: tracker.parent(name, setting, tags) for name, setting in settings.items()}
        self.parent = parents[sweep.name]
        self.launcher = sweep.launcher.launcher(todo, sweep.jobs, sweep.root, tracker.uri, parents, tags)
        seconds = {spec.key: work.seconds(spec) for spec in todo if not saved(spec.folder(sweep.root))}
        self.lines = LiveLines(self.launcher, sweep.name, seconds, sweep.options.again)

    def run(self) -> int:
        """Exit code: 0, 1 if a run failed, 130 or 143 if interrupted."""
        options = self.work.sweep.options
        try:
            self.cancel() if options.cancel else self.detach() if options.detach else self.watch()
        except Interrupted as signum:
            self.launcher.stop()  # the signal may have come while a line was printed, outside of events()
            code = 128 + signum.number
            self.errors.print(f"interrupted; run {options.again} again to go on (exit {code})", highlight=False)
            self.kill()
            return code
        except LauncherDied as died:
            self.errors.print(f"[bold red]✗[/] {died}; run {options.again} again to go on", highlight=False)
            self.kill()
            return 1
        return int(self.failed > 0)

    def watch(self) -> None:
        """Wait for all runs."""
        with self.lines.live(self.console):
            for child, event in self.launcher.events():
                self.show(child, event)

    def detach(self) -> None:
        """Say how runs of earlier commands ended, hand over what nobody has, and say where every run is."""
        launcher = cast(RemoteLauncher, self.launcher)
        for child, event in launcher.settle():
            if event["event"] in ("end", "warning"):
                self.show(child, event)
        launcher.hand_over()
        say(self.console, *self.lines.places())

    def cancel(self) -> None:
        """End the runs that the cluster has."""
        say(self.console, *self.lines.cancelled())
        cast(RemoteLauncher, self.launcher).stop(adopted=True)
        self.kill()

    def kill(self) -> None:
        """Close what was still running when all was stopped."""
        specs = [child.spec for child in self.launcher.running]
        with contextlib.suppress(TimeoutError):
            within(PATIENCE, lambda: self.close(specs, "KILLED") or True)

    def show(self, child: Child, event: Mapping[str, Any]) -> None:
        """Print what is worth a line. In a terminal the live display shows the progress."""
        if event["event"] == "end":
            self.end(child)
        elif event["event"] == "warning":
            if event["message"] in self.warnings:
                return  # several runs notice the same
            self.warnings.add(event["message"])
            warner(self.errors)(event["message"])
        elif event.get("news") and not self.console.is_terminal:
            line = "  ".join(column for column in self.lines.line(child) if column)
            say(self.console, line)

    def end(self, child: Child) -> None:
        """Print how a run ended; close it in MLflow if it failed."""
        name, took = f"{self.lines.name(child.spec)} seed {child.spec.seed}", duration(child.age)
        if child.exitcode == 0:
            count = f"{self.launcher.done} of {self.launcher.total}"
            self.console.print(f"[green]✓[/] {name} finished in {took} ({count})", highlight=False)
            return
        self.failed += 1
        reason = escape(child.failure or f"its process ended with code {child.exitcode}")
        log = escape(short(child.spec.folder(self.work.sweep.root) / "log.txt"))
        self.errors.print(f"[bold red]✗[/] {name} failed after {took}: {reason} (log: {log})")
        self.close([child.spec], "FAILED")

    def close(self, specs: Sequence[RunSpec], status: str) -> None:
        """End runs in MLflow whose processes could not do so themselves."""
        with contextlib.suppress(Exception):  # a full disk, or no store; the next command closes them
            deliver(specs, self.work.sweep.root, self.tracker, status)
            if status == "KILLED":
                self.tracker.end(self.parent, status)
