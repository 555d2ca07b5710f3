"""What every arm of a report was given: settings that were tried, runs, optimizer steps, core-minutes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_memory.report.labels import count
from lit_memory.report.markdown import markdown
from lit_memory.report.plan import ReportPlan

UNEQUAL = 2
"""Times as much that one arm may have of what another one has, without a remark."""
MINUTES = "Core-minutes: wall time of training and test times the CPU threads of a run, whatever else ran there."
MOST = "At most: the steps that the stages allow, with those of the runs that an arm starts from."


@dataclass(frozen=True)
class Budget:
    """All runs of an arm, those of the points of its grid that were not chosen included."""

    settings: int
    """Points of its grid; 1 without one."""
    seeds: list[int]
    runs: int
    steps: int
    most: int | None
    """Steps that the runs were allowed to take; None where that is not known."""
    minutes: float


def budget(plan: ReportPlan, arm: str) -> Budget:
    """The budget of an arm."""
    runs = [run for run in all_runs(plan.grid, plan.runs) if run["arm"] == arm]
    tried = [run for run in plan.grid if run["arm"] == arm]
    most = [run.get("most_steps") for run in runs]
    return Budget(
        settings=max(1, len({str(run["settings"]) for run in tried})),
        seeds=list(dict.fromkeys(run["seed"] for run in runs)),
        runs=len(runs),
        steps=sum(run.get("steps") or 0 for run in runs),
        most=None if None in most else sum(steps or 0 for steps in most),
        minutes=(core_seconds(runs) or 0) / 60,
    )


def all_runs(grid: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs of all points of a grid, and those of the arms without one. grid, runs: of a ``ReportPlan``."""
    swept = {run["arm"] for run in grid}
    return [*grid, *(run for run in runs if run["arm"] not in swept)]


def core_seconds(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Wall time of training and test times the CPU threads of a run, of all; None where none was timed."""
    timed = [run["seconds"] * (run.get("threads") or 1) for run in runs if run.get("seconds") is not None]
    return sum(timed) if timed else None


def budget_table(plan: ReportPlan) -> str:
    """The budget of every arm, and of all; "" without runs."""
    if not plan.runs:
        return ""
    budgets = {plan.shown(arm): budget(plan, arm) for arm in plan.arms}
    known = all(b.most is not None for b in budgets.values())
    header = [*["settings tried"] * bool(plan.grid), "runs", "seeds", "steps", *["at most"] * known, "core-minutes"]
    rows = [[arm, *_cells(plan, b, known, ", ".join(map(str, b.seeds)))] for arm, b in budgets.items()]
    totals = (sum(getattr(b, name) or 0 for b in budgets.values()) for name in ("settings", "runs", "steps", "most"))
    settings, runs, steps, most = map(int, totals)
    whole = Budget(settings, [], runs, steps, most if known else None, sum(b.minutes for b in budgets.values()))
    note = f"{MOST} {MINUTES}" if known else MINUTES
    return f"{markdown(['arm', *header], [*rows, ['all', *_cells(plan, whole, known, '')]])}\n{note}"


def _cells(plan: ReportPlan, b: Budget, known: bool, seeds: str) -> Iterator[Any]:
    """The row of a budget behind its arm. known: whether the steps that were allowed are."""
    yield from [b.settings] * bool(plan.grid)
    yield from (b.runs, seeds, count(b.steps))
    yield from [count(b.most)] * known
    yield f"{b.minutes:,.1f}"


def unequal(plan: ReportPlan) -> str:
    """A remark in Markdown where an arm had more than ``UNEQUAL`` times the settings or the steps of another one, for
    each seed; "" otherwise, and where that is not known."""
    budgets = {plan.shown(arm): budget(plan, arm) for arm in plan.arms}
    if not plan.runs or any(b.most is None or not b.seeds for b in budgets.values()):
        return ""
    settings = {arm: b.settings for arm, b in budgets.items()}
    steps = {arm: (b.most or 0) // len(b.seeds) for arm, b in budgets.items()}
    remarks = []
    for what, of in (("settings tried", settings), ("steps allowed", steps)):
        most, least = max(of, key=of.__getitem__), min(of, key=of.__getitem__)
        if of[most] > UNEQUAL * of[least]:
            remarks.append(f"{of[most]:,} {what} for each seed of *{most}*, {of[least]:,} of *{least}*")
    kind = "tuning" if remarks and "tried" in remarks[0] else "training"
    return f"**Unequal {kind}**: {'; '.join(remarks)}." if remarks else ""
