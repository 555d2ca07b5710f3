"""Runs as jobs of Slurm, through submitit. Needs the extra ``slurm``.

A job that reaches its time limit, or is preempted, saves its run, is requeued by submitit and goes on bit for bit. What
submitit takes for an end, but is none (``PREEMPTED``, ``REQUEUED``, a ``TIMEOUT`` that is being requeued), is waited
for here. States come from ``squeue``, one call for all jobs, as ``sacct`` needs an accounting database.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run.launchers.remote import Job, RemoteLauncher, Work

SETTINGS = {"cluster": "slurm", "time": 240, "requeues": 100}
"""Settings of ``launch: {slurm: …}`` with defaults. cluster: "slurm", or "local" for processes of this machine.
time: minutes of a job. requeues: how often a job may reach that. All others are submitit's (partition, mem_gb,
gpus_per_node, cpus_per_task, slurm_array_parallelism, slurm_additional_parameters …)."""
ENDED = (
    *("COMPLETED", "FINISHED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "INTERRUPTED", "GONE"),
)
"""States of a job that has ended, unless it is being requeued. GONE: Slurm has forgotten it."""
LOOK = 5.0
"""Seconds between two calls of ``squeue``."""
PATIENCE = 60.0
"""Seconds that an ended state must last without a result: a requeued job shows it for a moment, and a network file
system shows the result late."""


class Requeued:
    """What Slurm runs: ``Work``, with the method that submitit calls before a requeue."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __call__(self) -> int:
        return self.work()

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        self.work.end()
        return DelayedSubmission(Requeued(self.work))


class SlurmJob(Job):
    """A job of submitit."""

    def __init__(self, job: Any, state: Callable[[Any], str]) -> None:
        """job: submitit's. state: tells its state."""
        self.job, self.state = job, state
        self.since: float | None = None
        """When it was first seen to have ended without a result."""

    def look(self) -> tuple[int | None, str]:
        if self.job.paths.result_pickle.exists():
            kind, value = self.job._get_outcome_and_result()
            if kind == "success":
                return value, f"its process ended with code {value}"
            return 1, f"Slurm job {self.job.job_id}: {str(value).strip().splitlines()[-1]}"
        state = self.state(self.job)
        if state not in ENDED:
            self.since = None
            return None, ""
        self.since = self.since or time.monotonic()
        if time.monotonic() - self.since < PATIENCE and state != "CANCELLED":
            return None, ""
        return 1, f"Slurm job {self.job.job_id} ended as {state}; log: {self.job.paths.stderr}"

    def cancel(self) -> None:
        with contextlib.suppress(Exception):  # it has ended
            self.job.cancel(check=False)


class SlurmLauncher(RemoteLauncher):
    """Slurm decides where and when."""

    @staticmethod
    def check(settings: Mapping[str, Any], file: str) -> None:
        """Raise ConfigError for unknown settings, and where there is no Slurm."""
        try:
            executor_of(settings, Path(gettempdir()))
        except (NameError, TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise ConfigError(file, "slurm", str(error).splitlines()[0]) from None

    def __init__(self, *arguments: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(*arguments)
        self.settings = settings
        self.looked = -LOOK
        self.states: dict[str, str] = {}
        """Job -> its state, as of the last look."""
        self.executor = executor_of(settings, self.root / "checkpoints" / ".slurm")

    def submit(self, work: Work, spec: RunSpec) -> SlurmJob:
        gpus = int(spec.train["accelerator"] == "cuda")
        needs = {"name": spec.name.replace(" ", "_"), "cpus_per_task": spec.train["threads"], "gpus_per_node": gpus}
        self.executor.update_parameters(**{name: n for name, n in needs.items() if name not in self.settings})
        return SlurmJob(self.executor.submit(Requeued(work)), self.state)

    def state(self, job: Any) -> str:
        """The state of a job of submitit, at most ``LOOK`` seconds old."""
        if self.executor.cluster == "local":
            return job.state
        if time.monotonic() - self.looked >= LOOK:
            command = ["squeue", "--me", "--noheader", "--states=all", "--format=%A %T"]
            answer = subprocess.run(command, capture_output=True, text=True)
            if answer.returncode:  # slurmctld is away; what was known holds
                return self.states.get(job.job_id, "UNKNOWN")
            self.states = dict(line.split() for line in answer.stdout.splitlines())
            self.looked = time.monotonic()
        return self.states.get(job.job_id, "GONE")


def executor_of(settings: Mapping[str, Any], folder: Path) -> Any:
    """submitit's executor with all settings; nothing is written before the first job."""
    import submitit

    known = SETTINGS | dict(settings)
    executor = submitit.AutoExecutor(folder / "%j", known["cluster"], slurm_max_num_timeout=known["requeues"])
    others = {name: value for name, value in known.items() if name not in SETTINGS}
    executor.update_parameters(timeout_min=known["time"], **others)
    return executor
