"""What is finished of a sweep, what is left to do, and how long that takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec, key_folder
from lit_memory.report.catalogue import read_verdict
from lit_memory.run import checkpoint, journal, lease
from lit_memory.run.launchers.remote import forget, recorded
from lit_memory.run.selection import SETTLED, wanted
from lit_memory.run.sweep import Sweep
from lit_memory.util.provenance import PROJECT

if TYPE_CHECKING:
    from lit_memory.run.tracking import Run, Tracker

STATUSES = ("finished", "to send", "running", "submitted", "broke down", "failed", "to resume", "new")

DONE = ("finished", "to send")
"""Statuses of runs that have nothing left to train."""


@dataclass
class WorkList:
    """The runs of a sweep with their status."""

    sweep: Sweep
    runs: dict[str, "Run"] = field(default_factory=dict)
    """What MLflow knows: key -> run."""
    leases: dict[str, lease.Claim] = field(default_factory=dict)
    """Key -> its lease, where somebody holds it; read if there are runs that are not finished."""

    estimates: dict[tuple[str, str], float | None] = field(default_factory=dict)
    """(experiment, arm) -> ``seconds``, of those that were asked for since the last ``refresh``."""
    tried: set[str] = field(default_factory=set)
    """Keys of the runs that this command has trained, well or not."""

    @property
    def specs(self) -> list[RunSpec]:
        """The runs of the sweep and those that they start from, each once."""
        return list({run.key: run for spec in self.sweep.specs for run in with_starts(spec)}.values())

    def refresh(self, tracker: "Tracker") -> None:
        """Read the runs of the sweep, and those that they start from, from MLflow. A finished one stays as it is."""
        keys = [spec.key for spec in self.specs]
        known = {key: run for key, run in self.runs.items() if run.status == "FINISHED"}
        asked = [key for key in keys if key not in known]
        found = dict(zip(asked, tracker.find_all(asked), strict=True))
        self.runs, self.estimates = known | {key: run for key, run in found.items() if run is not None}, {}
        leases = lease.newest(*tracker.register.read()) if len(self.finished) < len(keys) else {}
        self.leases = {key: claim for key, claim in leases.items() if not claim.free}

    @property
    def experiments(self) -> list[str]:
        """The names of the experiments of its runs, and of those that they start from."""
        return list(dict.fromkeys(run.experiment for spec in self.sweep.specs for run in with_starts(spec)))

    @property
    def finished(self) -> list["Run"]:
        """What MLflow knows of the finished runs."""
        return [run for run in self.runs.values() if run.status == "FINISHED"]

    def status(self, spec: RunSpec) -> str:
        """One of ``STATUSES``. "running" means in another process, "to send" complete on disk, which MLflow does not
        know yet, "submitted" with a cluster, by this or an earlier command, "broke down" failed with a number that is
        not finite. All but the finished ones and those to send are trained."""
        run, folder = self.runs.get(spec.key), spec.folder(self.sweep.root)
        if run is not None and run.status == "FINISHED":
            return "finished"
        if self.trained_elsewhere(spec):
            return "running"
        if journal.complete(folder) and journal.waits(folder):
            return "to send"
        if recorded(folder):
            return "submitted"
        if run is not None and run.status == "FAILED":
            return "broke down" if run.tags.get("lit.error", "").startswith("NonFinite:") else "failed"
        return "to resume" if checkpoint.saved(folder) else "new"

    def trained_elsewhere(self, spec: RunSpec) -> bool:
        """Whether another process trains a run, below this root or another one."""
        folder = spec.folder(self.sweep.root)
        return checkpoint.locked(folder) or self.leased_elsewhere(spec.key, folder)

    def leased_elsewhere(self, key: str, folder: Path) -> bool:
        """Whether a process of another root has the lease of a key; it may have died without giving it back."""
        return key in self.leases and not lease.remembers(folder, self.leases[key].owner)

    @property
    def wanted(self) -> list[RunSpec]:
        """The runs that the report needs, as far as that is known, see ``selection.wanted``."""
        sweep = self.sweep
        return wanted(sweep.experiment, sweep.specs, self.runs, lambda spec: self.status(spec) in SETTLED)

    @property
    def selected(self) -> list[RunSpec]:
        """Those of them that the command line selects."""
        selected = {(spec.arm, spec.seed) for spec in self.sweep.selected}
        return [spec for spec in self.wanted if (spec.arm, spec.seed) in selected]

    def counts(self, specs: Sequence[RunSpec]) -> dict[str, int]:
        """Status -> number of runs."""
        found = [self.status(spec) for spec in specs]
        return {status: found.count(status) for status in STATUSES}

    def todo(self) -> list[RunSpec]:
        """The runs to train, each once, behind those that it starts from."""
        options = self.sweep.options
        if options.report:
            return []
        todo: dict[str, RunSpec] = {}
        for spec in self.selected:
            if self.status(spec) in DONE and not options.fresh:
                continue
            for run in with_starts(spec):
                if run is spec or self.status(run) not in DONE:
                    todo.setdefault(run.key, run)
        return list(todo.values())

    def later(self, done: Sequence[RunSpec], tracker: "Tracker") -> list[RunSpec]:
        """The runs to train behind ``done``, whose validations choose them; none that has been tried before."""
        self.tried |= {spec.key for spec in done}
        if not self.sweep.experiment.tune_seeds:
            return []
        self.refresh(tracker)
        return [spec for spec in self.todo() if spec.key not in self.tried]

    def seconds(self, spec: RunSpec) -> float | None:
        """Estimated seconds of a run: the mean of the same arm's runs here, or in the report that came with the
        project, if those train where this one does. None where neither is known."""
        arm = spec.experiment, spec.arm
        if arm not in self.estimates:
            self.estimates[arm] = self._estimate(spec)
        return self.estimates[arm]

    def _estimate(self, spec: RunSpec) -> float | None:
        same_arm = [s for s in self.sweep.specs if (s.experiment, s.arm) == (spec.experiment, spec.arm)]
        known = [self.runs[s.key].metrics for s in same_arm if s.key in self.runs]
        measured = [metrics["seconds"] for metrics in known if "seconds" in metrics]
        if not measured and not self.sweep.options.overrides:
            scale = "" if self.sweep.is_default_scale else self.sweep.scale
            shipped = read_verdict(PROJECT / "reports" / spec.experiment / scale).get("runs", [])
            same = [run for run in shipped if run["arm"] == spec.arm and bool(run.get("steps")) == bool(spec.stages)]
            measured = [run["seconds"] for run in same if run.get("seconds")]
        return sum(measured) / len(measured) if measured else None

    def seconds_left(self, todo: Sequence[RunSpec]) -> float | None:
        """Estimated seconds until ``todo`` is done; None where nothing is known of any of them."""
        known = [seconds for seconds in map(self.seconds, todo) if seconds is not None]
        if not known:
            return None
        unknown = (len(todo) - len(known)) * sum(known) / len(known)
        return (sum(known) + unknown) / min(self.sweep.jobs, len(todo))

    def close_stale(self, tracker: "Tracker") -> None:
        """Mark RUNNING runs KILLED whose lock is free: their process died by kill -9 or with the machine. Forget the
        jobs of finished runs."""
        for run in tracker.running(self.sweep.location):
            key = run.tags["lit.key"]
            if lease.release_dead(tracker.register, key, key_folder(self.sweep.root, key)):
                tracker.end(run.run_id, "KILLED")
        for spec in self.specs:
            if self.status(spec) in DONE:
                forget(spec.folder(self.sweep.root))

    def retire(self, tracker: "Tracker", todo: Sequence[RunSpec]) -> None:
        """Take runs out of plans and reports and remove their checkpoints, so that they start anew; not those that
        others start from, as nobody has selected them. Raises ConfigError for one that a cluster or another process
        has, before the first is gone."""
        selected = {spec.key for spec in self.selected}
        specs = [spec for spec in todo if spec.key in selected]
        for spec in specs:
            message = ""
            if recorded(spec.folder(self.sweep.root)):
                message = f"a cluster has {spec.name}; end it with --cancel first"
            elif self.trained_elsewhere(spec):
                message = f"another process trains {spec.name}; end it first"
            if message:
                raise ConfigError("command line", "--fresh", message)
        for spec in specs:
            checkpoint.clear(spec.folder(self.sweep.root))
            journal.clear(spec.folder(self.sweep.root))
            if spec.key in self.runs:  # last, so that a run of which something is left is still finished
                tracker.retire(self.runs.pop(spec.key).run_id)


def with_starts(spec: RunSpec) -> list[RunSpec]:
    """A run behind the runs that it starts from."""
    return [*(with_starts(spec.start) if spec.start else []), spec]
