"""Runs as tasks of a Ray cluster, an existing one or one of this machine. Needs the extra ``ray``.

Facts of Ray 2.60 that shape this file: a worker gets the environment of its node and not the command's, and has
handlers of its own for SIGTERM; so that the run has a process of its own (``remote.Work``). A task whose node is lost
starts again on another, where the run goes on from its last checkpoint. A task ends with its driver.
"""

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run.launchers.base import LauncherDied
from lit_memory.run.launchers.remote import RemoteLauncher, Work
from lit_memory.util.checks import nearest

SETTINGS = {"address": None, "num_cpus": None, "num_gpus": None, "resources": None, "max_retries": 3}
"""Settings of ``launch: {ray: …}``. address: of the cluster, "auto" for one of this machine; None starts one. num_cpus,
num_gpus: of a run; None is its threads, and the GPUs that it takes. max_retries: starts after lost nodes."""


class Task:
    """A job of ``RemoteLauncher``."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self.ended: tuple[int | None, str] = (None, "")

    def outcome(self) -> tuple[int | None, str]:
        import ray
        from ray.exceptions import RayError

        if self.ended[0] is None and ray.wait([self.reference], timeout=0)[0]:
            try:
                code: Any = ray.get(self.reference)
                self.ended = code, f"its process ended with code {code}"
            except RayError as error:
                self.ended = 1, f"Ray: {type(error).__name__}: {str(error).splitlines()[0]}"
        return self.ended

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
        connect(settings.get("address"), file)

    def __init__(self, *arguments: Any, settings: dict[str, Any]) -> None:
        super().__init__(*arguments)
        self.settings = SETTINGS | settings

    def submit(self, work: Work, spec: RunSpec) -> Task:
        import ray
        from ray.exceptions import RaySystemError

        cpus, gpus = self.settings["num_cpus"], self.settings["num_gpus"]
        options = {
            "num_cpus": spec.threads if cpus is None else cpus,
            "num_gpus": spec.devices * (spec.train["accelerator"] == "cuda") if gpus is None else gpus,
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

    environment = {"PYTHONPATH": os.pathsep.join(filter(None, (package_folder(), os.environ.get("PYTHONPATH"))))}
    try:
        ray.init(
            address=address,
            runtime_env={"env_vars": environment},
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address is None else None,
            ignore_reinit_error=True,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        message = f"{address}: {reason}; expected the address of a Ray cluster that runs, or none to start one here"
        raise ConfigError(file, "ray.address", message) from None


def package_folder() -> str:
    """The folder from which a worker imports this package; its machine must see it or have it installed."""
    return str(Path(__file__).resolve().parents[3])
