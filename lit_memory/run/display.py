"""What the command shows, as rich renderables. Prints nothing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import load_class
from lit_memory.report.catalogue import list_experiments
from lit_memory.run.launchers.base import Child, Launcher
from lit_memory.run.sweep import Sweep
from lit_memory.run.worklist import DONE, WorkList
from lit_memory.util.provenance import cores

MANY = 1000
"""Lines for which a table of rich takes seconds."""


def duration(seconds: float) -> str:
    """3 s, 4 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def counted(number: int, noun: str) -> str:
    """1 run, 2 runs."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def names(specs: Sequence[RunSpec]) -> str:
    """a seed 0, b seed 0."""
    return ", ".join(f"{spec.arm} {spec.point}".strip() + f" seed {spec.seed}" for spec in specs)


def headline(work: WorkList, todo: Sequence[RunSpec]) -> str:
    """What the command is about to do, in one line with rich's markup."""
    sweep, selected = work.sweep, work.selected
    overrides = " ".join(sweep.options.overrides)
    modified = f", modified: {escape(overrides)}" if overrides else ""
    statuses = ", ".join(f"{count} {status}" for status, count in work.counts(selected).items() if count)
    line = f"[bold]{sweep.name}[/] (scale {sweep.scale}{modified}): {counted(len(selected), 'run')}: {statuses}"
    if sweep.options.fresh and (again := sum(work.status(spec) in DONE for spec in todo)):
        line += f"; {again} of them to train again"
    others = {spec.key for spec in todo} - {spec.key for spec in selected}
    if others:
        line += f"; {len(others)} of other experiments to train first"
    if waiting := len(
        {(spec.arm, spec.seed) for spec in sweep.selected} - {(spec.arm, spec.seed) for spec in selected}
    ):
        line += f"; then {waiting} at the points that these choose"
    left = work.seconds_left(todo)
    return line if left is None else f"{line}; about {duration(left)}"


def note_on_stages(sweep: Sweep) -> str:
    """The stages that a changed ``train.steps`` does not change, in one line; "" where there are none."""
    if "train.steps" not in sweep.options.changed:
        return ""
    stages = {i for spec in sweep.selected for i, stage in enumerate(spec.train["stages"], 1) if "steps" in stage}
    numbers = ", ".join(map(str, sorted(stages)))
    return f"stages with steps of their own: {numbers}; train.stages=[] trains in one" if stages else ""


def note_on_twins(twins: Mapping[str, str]) -> str:
    """What two processes without a lease have left, in one line; "" where there is nothing. twins: of the Tracker."""
    runs, rows = (sum(what == kind for what in twins.values()) for kind in ("run", "rows"))
    found = [f"{counted(runs, 'key')} with several finished runs"] * (runs > 0)
    found += [f"{counted(rows, 'run')} with rows twice"] * (rows > 0)
    return f"the tracking store has {' and '.join(found)}; the oldest of each counts" if found else ""


def list_table() -> Table:
    """The project's experiments, a line each: name, verdict, level of evidence, minutes of all runs on this machine,
    without those that they start from, and, as far as it fits, the paper and its item."""
    table = Table(box=None, header_style="bold", expand=True)
    for name in ("experiment", "verdict", "evidence"):
        table.add_column(name, no_wrap=True)
    table.add_column("minutes", no_wrap=True, justify="right")
    table.add_column("paper item", no_wrap=True, ratio=1)
    for name, item, verdict, level, seconds in list_experiments():
        minutes = f"{seconds / 60 / cores():,.0f}" if seconds else "–"
        table.add_row(name, verdict or "–", level or "–", minutes, escape(item))
    return table


def plan_table(work: WorkList, width: int | None) -> Table | Text:
    """The selected runs: arm, seed, sizes, steps, key, status, time. Of ``MANY`` lines as plain ones.

    width: of the terminal; one too narrow gets no floats of state, then no parameters, then no steps. None is a file,
    which gets all in plain lines.
    """
    names, rows = ("arm", "seed", "parameters", "state floats", "steps", "key", "status", "time"), list[list[str]]()
    for spec in work.selected:
        seconds = work.seconds(spec)
        last = (steps_shown(spec), spec.key[:8], work.status(spec), duration(seconds) if seconds else "?")
        rows.append([f"{spec.arm} {spec.point}".strip(), str(spec.seed), *sizes_shown(work.sweep, spec), *last])
    if width is None or len(rows) >= MANY:
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        lines = [f" {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in (names, *rows)]
        return Text("\n".join(lines))
    table = Table(box=None, header_style="bold")
    header, *shown = fitting([names, *rows], width, spare=(3, 2, 4))
    for name in header:
        table.add_column(name, no_wrap=True)
    for row in shown:
        table.add_row(*row)
    return table


def fitting(rows: Iterable[Sequence[str]], width: int, spare: Sequence[int]) -> list[tuple[str, ...]]:
    """The rows without as many of the ``spare`` columns, the first of them first, as a terminal is too narrow for.
    Every column has two spaces beside it."""
    columns = dict(enumerate(zip(*rows, strict=True)))
    for number in spare:
        if sum(max(map(len, column)) + 2 for column in columns.values()) > width:
            del columns[number]
    return list(zip(*columns.values(), strict=True))


def sizes_shown(sweep: Sweep, spec: RunSpec) -> tuple[str, str]:
    """Parameters, and floats of state: "32 + 64 a segment" where the state grows."""
    size = sweep.sizes[spec.key]
    state = f"{size['state_floats']:,}"
    if size["state_growth"]:
        state += f" + {size['state_growth']:,} a {load_class('model', spec.model['name']).growth_unit}"
    return f"{size['parameters']:,}", state


def steps_shown(spec: RunSpec) -> str:
    """Optimizer steps; "≤" where a stage may end early."""
    limit = "≤" if any(stage["until"] for stage in spec.stages) else ""
    return f"{limit}{sum(stage['steps'] for stage in spec.stages):,}"


class LiveLines:
    """One line per running process, and below them how many runs there are."""

    def __init__(
        self, launcher: Launcher, experiment: str, seconds: Mapping[str, float | None], again: str = "the same command"
    ) -> None:
        """experiment: the one whose name is left out. seconds: key -> estimated seconds of a run. again: the command
        that goes on with the runs (``Options.again``)."""
        self.launcher, self.experiment, self.seconds, self.again = launcher, experiment, seconds, again

    def name(self, spec: RunSpec) -> str:
        """Arm and grid point, behind the name of the experiment where that is another one."""
        other = "" if spec.experiment == self.experiment else f"{spec.experiment}/"
        return f"{other}{spec.arm} {spec.point}".strip()

    def line(self, child: Child) -> tuple[str, ...]:
        """Six columns: run, stage, step, loss, metric, time."""
        p, name, took = child.progress, f"{self.name(child.spec)} s{child.spec.seed}", f"{duration(child.age)} so far"
        if not p or p["event"] == "waiting":
            return (name, "another process trains it" if p else child.where or "starting", "", "", "", took)
        if p["event"] == "testing":
            return (name, "testing", *self.test_columns(p), took)
        stage, step = f"stage {p['stage']}/{p['stages']}", f"step {p['step']}/{p['steps']}"
        loss = f"loss {p['loss']:.3f}" if "loss" in p else ""
        metric = f"{p['metric_name']} {p['metric']:.3f}" if "metric" in p else ""
        left = (self.seconds.get(child.spec.key) or 0) - child.age
        return (name, stage, step, loss, metric, f"{took}, about {duration(left)} left" if left > 0 else took)

    def places(self) -> Iterator[str]:
        """Where every run is that a cluster has, a line each, and what to do next; nothing where none is left."""
        for child in self.launcher.running:
            yield "  ".join(filter(None, dict.fromkeys((*self.line(child), child.where))))
        for spec in self.launcher.waiting:
            yield f"{self.name(spec)} s{spec.seed}  waits for another run; {self.again} hands it over"
        if self.launcher.left:
            left = counted(len(self.launcher.running), "run")
            yield f"{left} submitted; {self.again} says where, and reports in the end; --cancel ends them"

    def cancelled(self) -> Iterator[str]:
        """The runs that a cluster has and that are being cancelled."""
        for child in self.launcher.running:
            yield f"{self.name(child.spec)} s{child.spec.seed}  cancelled: {child.where}"
        number = counted(len(self.launcher.running), "run")
        yield f"{number} cancelled; the same command without --cancel goes on"

    def test_columns(self, p: Mapping[str, Any]) -> tuple[str, str, str]:
        """Share of the test that has been read, its speed, and the time that is left."""
        if "share" not in p:
            return ("", "", "")
        left = p["tokens"] * (1 / p["share"] - 1) / p["tokens_per_s"]
        return (f"{p['share']:.0%}", f"{p['tokens_per_s']:,.0f} tokens/s", f"about {duration(left)} left")

    def live(self, console: Console) -> Live:
        """All lines, kept up to date in a terminal."""
        return Live(
            console=console,
            refresh_per_second=2,
            transient=True,
            get_renderable=lambda: self.renderable(console.width),
            auto_refresh=console.is_terminal,
        )

    def renderable(self, width: int) -> Group:
        """All lines. A terminal too narrow for them gets no loss, and then no step."""
        rows = fitting(map(self.line, self.launcher.running), width + 2, spare=(3, 2))  # a grid has none at its end
        table = Table.grid(*(Column(no_wrap=True) for _ in next(iter(rows), ())), padding=(0, 2))
        for row in rows:
            table.add_row(*row)
        done, total, waiting = self.launcher.done, self.launcher.total, len(self.launcher.waiting)
        return Group(table, f"{done} of {total} done, {waiting} waiting")
