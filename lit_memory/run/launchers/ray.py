"""Runs as tasks of a Ray cluster, an existing one or one of this machine. Needs the extra ``ray``.

Facts of Ray 2.60 that shape this file: a worker gets the environment of its node and not the command's, and has
handlers of its own for SIGTERM; so that the run has a process of its own (``remote.Work``). A task whose node is lost
starts again on another, where the run goes on from its last checkpoint. A task ends with its driver.
"""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run.launchers.base import LauncherDied, import_path
from lit_memory.run.launchers.remote import Job, RemoteLauncher, Work
from lit_memory.util.checks import nearest

SETTINGS = {"address": None, "num_cpus": None, "num_gpus": None, "resources": None, "max_retries": 3}
"""Settings of ``launch: {ray: …}``. address: of the cluster, "auto" for one of this machine; None starts one. num_cpus,
num_gpus: of a run; None is its threads, and one GPU where it takes any. max_retries: starts after lost nodes."""


class Task(Job):
    """A task of Ray."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def look(self) -> tuple[int | None, str]:
        import ray
        from ray.exceptions import RayError

        if not ray.wait([self.reference], timeout=0)[0]:
            return None, ""
        try:
            code: Any = ray.get(self.reference)
        except RayError as error:
            return 1, f"Ray: {type(error).__name__}: {str(error).splitlines()[0]}"
        return code, f"its process ended with code {code}"

    def cancel(self) -> None:
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            ray.cancel(self.reference)


class RayLauncher(RemoteLauncher):
    """Ray decides where and when; a run waits until its cores and GPUs are free."""

    @staticmethod
    def check(settings: Mapping[str, Any], file: str) -> None:
        """Raise ConfigError for unknown settings, and where there is no cluster at the address."""
        for name in settings:
            if name not in SETTINGS:
                raise ConfigError(file, f"ray.{name}", f"unknown; {nearest(name, list(SETTINGS))}")
        if settings.get("address") is not None:
            connect(settings["address"], file)

    def __init__(self, *arguments: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(*arguments)
        self.settings = SETTINGS | dict(settings)
        if self.settings["address"] is None:
            connect(None, "command line")

    def submit(self, work: Work, spec: RunSpec) -> Task:
        import ray
        from ray.exceptions import RaySystemError

        cpus, gpus = self.settings["num_cpus"], self.settings["num_gpus"]
        options = {
            "num_cpus": spec.train["threads"] if cpus is None else cpus,
            "num_gpus": int(spec.train["accelerator"] == "cuda") if gpus is None else gpus,
            "resources": self.settings["resources"],
            "max_retries": self.settings["max_retries"],
            "name": spec.name,
        }
        try:
            return Task(ray.remote(**options)(train).remote(work))
        except RaySystemError as error:
            raise LauncherDied(f"Ray: {error}") from None


def train(work: Work) -> int:
    """The task: runs on a worker."""
    return work()


def connect(address: str | None, file: str) -> None:
    """Connect to a cluster, or start one. Raises ConfigError that names ``file``."""
    import ray

    try:
        ray.init(
            address=address,
            runtime_env={"env_vars": import_path()},
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address is None else None,
            ignore_reinit_error=True,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        message = f"{address}: {reason}; expected the address of a Ray cluster that runs, or none to start one here"
        raise ConfigError(file, "ray.address", message) from None
