"""Runs as jobs of Slurm, through submitit. Needs the extra ``slurm``.

A job that reaches its time limit, or is preempted, saves its run, is requeued by submitit and goes on bit for bit. What
submitit takes for an end, but is none (``PREEMPTED``, ``REQUEUED``, a ``TIMEOUT`` that is being requeued), is waited
for here. States come from ``squeue``, one call for all jobs, as ``sacct`` needs an accounting database.
"""

import contextlib
import io
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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
        self.job, self.state, self.name = job, state, f"Slurm job {job.job_id}"
        self.since: float | None = None
        """When it was first seen to have ended without a result."""

    @property
    def settled(self) -> bool:
        return self.since is None or self.ended[0] is not None

    def look(self) -> tuple[int | None, str]:
        state = self.state(self.job)
        if state == "PENDING":
            self.since = None
            return None, f"{self.name} is PENDING"
        if result := self.result():
            kind, value = result
            if kind == "success":
                return value, f"{self.name}: its process ended with code {value}"
            return 1, f"{self.name}: {str(value).strip().splitlines()[-1]}"
        if state not in ENDED:
            self.since = None
            return None, f"{self.name} is {state}"
        self.since = self.since or time.monotonic()
        if time.monotonic() - self.since < PATIENCE and state != "CANCELLED":
            return None, f"{self.name} is {state}, perhaps to be requeued"
        return 1, f"{self.name} ended as {state}; log: {self.job.paths.stderr}"

    def result(self) -> tuple[str, Any] | None:
        """How its work has ended, and what it has returned; None without a result, and for one that a full disk cut
        short."""
        if self.job.paths.result_pickle.exists():
            with contextlib.suppress(EOFError, pickle.UnpicklingError):
                return self.job._get_outcome_and_result()
        return None

    def cancel(self) -> None:
        with contextlib.suppress(Exception):  # it has ended
            if cluster_of(self.job) == "local":
                os.kill(int(self.job.job_id), signal.SIGINT)
            else:
                self.job.cancel(check=False)

    def record(self) -> dict[str, Any]:
        return {"id": self.job.job_id, "folder": str(self.job.paths.folder), "cluster": cluster_of(self.job)}


class SlurmLauncher(RemoteLauncher):
    """Slurm decides where and when: an array of jobs for all runs with the same needs."""

    name = "slurm"

    @staticmethod
    def check(settings: Mapping[str, Any], file: str, detach: bool) -> None:
        """Raise ConfigError for unknown settings, and where there is no Slurm."""
        try:
            executor_of(settings, Path(gettempdir()))
        except (NameError, TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise ConfigError(file, "slurm", str(error).splitlines()[0]) from None

    def connect(self) -> None:
        self.looked = -LOOK
        self.states: dict[str, str] = {}
        """Job -> its state, as of the last look."""
        self.queues = self.settings.get("cluster") != "local"

    def needs(self, spec: RunSpec) -> tuple[int, int]:
        """Cores and GPUs."""
        return spec.threads, spec.devices * (spec.train["accelerator"] == "cuda")

    def submit(self, works: Sequence[Work], after: Job | None) -> list[SlurmJob]:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        first = works[0].spec
        name = (first.experiment if len(works) > 1 else first.name).replace(" ", "_")
        own = {"name": name, **dict(zip(("cpus_per_task", "gpus_per_node"), self.needs(first), strict=True))}
        settings = {**own, **self.settings}
        if isinstance(after, SlurmJob):
            others = settings.get("slurm_additional_parameters", {})
            wait = ",".join(filter(None, (others.get("dependency"), f"afterany:{after.job.job_id}")))
            settings["slurm_additional_parameters"] = {**others, "dependency": wait}
        # It has what the jobs get, passwords of the environment as well.
        folder = self.root / "checkpoints" / f".slurm-{os.getuid()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        executor = executor_of(settings, folder)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises
                jobs = executor.submit_array([Requeued(work) for work in works])
        except (FailedJobError, FailedSubmissionError) as error:
            reason = next((line for line in str(error).splitlines() if "error:" in line), str(error).splitlines()[-1])
            raise ConfigError("command line", "--launcher", f"slurm: {reason.strip()}") from None
        return [SlurmJob(job, self.state) for job in jobs]

    def find(self, record: Mapping[str, Any]) -> SlurmJob | None:
        import submitit

        job_class = submitit.LocalJob if record["cluster"] == "local" else submitit.SlurmJob
        job = job_class(record["folder"], record["id"])
        known = job.paths.result_pickle.exists() or self.state(job) != "GONE"
        return SlurmJob(job, self.state) if known else None

    def state(self, job: Any) -> str:
        """The state of a job of submitit, at most ``LOOK`` seconds old."""
        if cluster_of(job) == "local":
            return job.state if job._process else local_state(int(job.job_id))
        if time.monotonic() - self.looked >= LOOK:
            command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i %T"]
            answer = subprocess.run(command, capture_output=True, text=True)
            if answer.returncode:  # slurmctld is away; what was known holds
                return self.states.get(job.job_id, "UNKNOWN")
            self.states = dict(line.split() for line in answer.stdout.splitlines())
            self.looked = time.monotonic()
        return self.states.get(job.job_id, "GONE")


def cluster_of(job: Any) -> str:
    """'local' for a process of this machine, else 'slurm'."""
    return "local" if hasattr(job, "_process") else "slurm"


def local_state(pid: int) -> str:
    """The state of a process that another command of this machine has started."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "GONE"
    return "RUNNING"


def executor_of(settings: Mapping[str, Any], folder: Path) -> Any:
    """submitit's executor with all settings; nothing is written before the first job."""
    import submitit

    known = SETTINGS | dict(settings)
    executor = submitit.AutoExecutor(folder / "%j", known["cluster"], slurm_max_num_timeout=known["requeues"])
    others = {name: value for name, value in known.items() if name not in SETTINGS}
    executor.update_parameters(timeout_min=known["time"], **others)
    return executor
