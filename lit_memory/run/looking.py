"""What the memories of finished runs do while they read the test, for ``report.memory``, from their last weights.

Imports Lightning, which costs seconds.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_memory.lit.modules import LitMemory
from lit_memory.lit.views import measure
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.report.plan import ReportPlan
from lit_memory.report.saved import MEMORY, Seen, load
from lit_memory.run.build import build, build_data, build_module
from lit_memory.run.checkpoint import CheckpointError
from lit_memory.run.saving import VerifiedCheckpoints
from lit_memory.run.starts import at_hand, weights_of
from lit_memory.run.training import naming_misfit
from lit_memory.run.worklist import WorkList
from lit_memory.util.checks import first_line
from lit_memory.util.views import VIEWS

if TYPE_CHECKING:
    from lit_memory.run.tracking import Run, Tracker


def memories(
    work: WorkList, tracker: "Tracker", shown: Sequence[RunSpec], plan: ReportPlan, folder: Path
) -> dict[Seen, Any]:
    """What ``report.memory`` shows: measured with the weights of the runs or, where these are gone, as the last report
    of the same runs in ``folder`` has it."""
    found = look_at(shown, work.runs, tracker, work.sweep.root, plan.visible)
    measured = {(view, arm, seed) for view, _, arm, seed in found}
    kept = kept_memories(folder, plan, tracker)
    return found | {seen: of for seen, of in kept.items() if (seen[0], *seen[2:]) not in measured}


def kept_memories(folder: Path, plan: ReportPlan, tracker: "Tracker") -> dict[Seen, Any]:
    """The arrays of the report in a folder that are of views and runs of this plan."""
    if not (folder / MEMORY).is_file():
        return {}
    try:
        before = load(folder)
    except ConfigError as error:
        tracker.warn(f"{first_line(error)}; it is measured anew")
        return {}
    known, runs = ({(run["arm"], run["seed"], run["key"]) for run in of.runs} for of in (before.plan, plan))
    same = {(arm, seed) for arm, seed, _ in known & runs}
    return {seen: of for seen, of in before.memory.items() if seen[0] in plan.visible and seen[2:] in same}


def look_at(
    specs: Sequence[RunSpec],
    runs: Mapping[str, "Run"],
    tracker: "Tracker",
    root: Path,
    visible: Mapping[str, Sequence[str]],
) -> dict[Seen, Any]:
    """(view, name, arm, seed) -> an array of numbers (``lit.views``), of the finished runs whose weights are there.

    visible: view -> the arms that allow it. The weights of other code than today's give a warning and no numbers.
    """
    found: dict[Seen, Any] = {}
    for spec in specs:
        views, run = views_of(spec, specs, visible), runs.get(spec.key)
        if not views or run is None or run.status != "FINISHED":
            continue
        with undisturbed(spec.train["threads"]):
            needed = any(VIEWS[view].weights for view in views)
            module = trained_module(spec, run, root, tracker) if needed else None
            seen = measure(module, build_data(spec), [view for view in views if module or not VIEWS[view].weights])
        found |= {(view, name, spec.arm, spec.seed): of.numpy() for (view, name), of in seen.items()}
    return found


def views_of(spec: RunSpec, specs: Sequence[RunSpec], visible: Mapping[str, Sequence[str]]) -> list[str]:
    """The views of a run that its arm allows; of some, the first seed stands for all."""
    first = spec.seed == specs[0].seed
    return [view for view, arms in visible.items() if spec.arm in arms and (first or VIEWS[view].every_seed)]


def trained_module(spec: RunSpec, run: "Run", root: Path, tracker: "Tracker") -> LitMemory | None:
    """A run's model with the weights that its test had; None where they are gone or do not fit."""
    try:
        if spec.start is not None and not spec.stages:  # it tested the weights of another run
            start = tracker.find(spec.start.key)
            there = start is not None and start.status == "FINISHED" and at_hand(spec.start, start, root)
            return build(spec, root)[0] if there else None
        path = weights_of(spec, run, root)
        if path is None:
            return None
        module = build_module(spec)
        with naming_misfit(path):
            module.load_state_dict(VerifiedCheckpoints().load_checkpoint(path)["state_dict"])
        return module
    except (CheckpointError, ValueError) as error:
        tracker.warn(f"memory of {spec.arm} seed {spec.seed}: {first_line(error)}")
        return None


@contextlib.contextmanager
def undisturbed(threads: int) -> Iterator[None]:
    """So many threads within the block; torch's random numbers and threads are afterwards as they were."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)
