"""Runs as tasks of a Ray cluster, an existing one or one of this machine. Needs the extra ``ray``.

Facts of Ray 2.60 that shape this file: a worker gets the environment of its node and not the command's, and has
handlers of its own for SIGTERM; so that the run has a process of its own (``work.Work``). A task whose node is lost
starts again on another, where the run goes on from its last checkpoint. A task ends with the process that has started
it: here an actor on the head node, which ends with the command, or with ``--detach`` does not.
"""

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run.launchers.base import LauncherDied
from lit_memory.run.launchers.remote import Job, RemoteLauncher
from lit_memory.run.launchers.work import Work
from lit_memory.util.checks import nearest
from lit_memory.util.child import child_environment

SETTINGS = {
    "address": None,
    "num_cpus": None,
    "num_gpus": None,
    "resources": None,
    "max_retries": 3,
    "autoscales": False,
}
"""Settings of ``launch: {ray: …}``. address: of the cluster, "auto" for one of this machine; None starts one. num_cpus,
num_gpus, resources: of a run; None is its threads, and the GPUs that it takes. max_retries: starts after lost
nodes. autoscales: the cluster starts the nodes that runs need, so what it has now says nothing."""
NAMESPACE = "lit-memory"
HEAD = {"node:__internal_head__": 0.001}
"""The resource that only the head node has."""
FORGOTTEN = 1, "Ray knows nothing of it any more"
LOOK = 1.0
"""Seconds between two looks at the tasks."""
PATIENCE = 60.0
"""Seconds that the head node has for an answer."""


class Keeper:
    """The actor that has started tasks, and knows them by the keys of their runs."""

    def __init__(self) -> None:
        self.tasks: dict[str, Any] = {}

    def submit(self, works: Mapping[str, Work], options: Mapping[str, Any], after: str) -> None:
        """Start tasks. after: key of the run that must have ended before; "" for none."""
        import ray

        for key, work in works.items():
            self.tasks[key] = ray.remote(**options)(train).remote(work, self.tasks.get(after))

    def outcomes(self) -> dict[str, tuple[int | None, str]]:
        """Key -> ``Job.outcome``."""
        import ray

        left = list(self.tasks.values())
        ended = set(ray.wait(left, num_returns=len(left), timeout=0)[0] if left else ())
        return {key: outcome(task) if task in ended else (None, "") for key, task in self.tasks.items()}

    def cancel(self, key: str) -> None:
        import ray

        ray.cancel(self.tasks[key])


def outcome(task: Any) -> tuple[int, str]:
    """How a task has ended."""
    import ray
    from ray.exceptions import RayError

    try:
        code: Any = ray.get(task)
    except RayError as error:
        return 1, f"Ray: {type(error).__name__}: {str(error).splitlines()[0]}"
    return code, f"its process ended with code {code}"


def train(work: Work, before: Any) -> int:
    """The task: runs on a worker. before: the result of the run that it waits for; Ray starts it when that is there."""
    return work()


class Tasks:
    """The tasks of a ``Keeper``, from here."""

    def __init__(self, actor: Any, name: str) -> None:
        self.actor: Any | None = actor
        """None when it has ended."""
        self.name, self.looked = name, -LOOK
        self.known: dict[str, tuple[int | None, str]] = {}

    def submit(self, works: Mapping[str, Work], options: Mapping[str, Any], after: str) -> None:
        """``Keeper.submit``. Raises RayError."""
        import ray

        assert self.actor is not None
        ray.get(self.actor.submit.remote(works, options, after), timeout=PATIENCE)
        self.looked = -LOOK

    def outcome(self, key: str) -> tuple[int | None, str]:
        """``Job.outcome`` of a key, at most ``LOOK`` seconds old. The actor ends with the last task."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        if self.actor is not None and time.monotonic() - self.looked >= LOOK:
            try:
                self.known = ray.get(self.actor.outcomes.remote(), timeout=PATIENCE)
            except GetTimeoutError:
                return None, "Ray does not answer"
            except RayError:
                self.actor, self.known = None, {k: known for k, known in self.known.items() if known[0] is not None}
            self.looked = time.monotonic()
            if self.actor is not None and all(code is not None for code, _ in self.known.values()):
                ray.kill(self.actor)
                self.actor = None
        return self.known.get(key, FORGOTTEN)


class Task(Job):
    """A task of Ray."""

    name = "Ray's task"

    def __init__(self, tasks: Tasks, key: str) -> None:
        self.tasks, self.key = tasks, key

    def look(self) -> tuple[int | None, str]:
        code, reason = self.tasks.outcome(self.key)
        return code, reason or "handed to Ray"

    def cancel(self) -> None:
        if self.tasks.actor is not None and self.outcome()[0] is None:
            self.tasks.actor.cancel.remote(self.key)

    def record(self) -> dict[str, Any]:
        return {"keeper": self.tasks.name, "key": self.key}


class RayLauncher(RemoteLauncher):
    """Ray decides where and when; a run waits until its cores and GPUs are free."""

    name = "ray"

    @staticmethod
    def check(settings: Mapping[str, Any], file: str, detach: bool) -> None:
        """Raise ConfigError for unknown settings, and where there is no cluster at the address."""
        for name in settings:
            if name not in SETTINGS:
                raise ConfigError(file, f"ray.{name}", f"unknown; {nearest(name, list(SETTINGS))}")
        if settings.get("address") is not None:
            connect(settings["address"], file)
        elif detach:
            message = "missing; a Ray that this command starts would end with it: expected the address of a cluster"
            raise ConfigError(file, "ray.address", message)

    def connect(self) -> None:
        self.settings = SETTINGS | dict(self.settings)
        if self.settings["address"] is None:
            connect(None, "command line")
        self.keepers: dict[str, Tasks] = {}
        self.own = ""
        """Name of the keeper of this command's tasks."""

    def needs(self, spec: RunSpec) -> tuple[float, float]:
        """Cores and GPUs."""
        cpus, gpus = self.settings["num_cpus"], self.settings["num_gpus"]
        own = spec.threads, spec.devices * (spec.train["accelerator"] == "cuda")
        return own[0] if cpus is None else cpus, own[1] if gpus is None else gpus

    def submit(self, works: Sequence[Work], after: Job | None) -> list[Task]:
        from ray.exceptions import RayError

        cpus, gpus = self.needs(works[0].spec)
        resources = self.settings["resources"] or {}
        self.check_nodes({"CPU": cpus, "GPU": gpus, **resources})
        options = {"num_cpus": cpus, "num_gpus": gpus, "resources": resources}
        options |= {"max_retries": self.settings["max_retries"], "name": works[0].spec.experiment}
        if isinstance(after, Task) and after.tasks.actor is not None:
            tasks, before = after.tasks, after.key  # only their keeper has what a task can wait for
        else:
            tasks, before = self.keeper(), ""
        try:
            new = {work.spec.key: work for work in works}
            tasks.submit(new, options, before)
        except RayError as error:
            raise LauncherDied(f"Ray: {str(error).splitlines()[0]}") from None
        return [Task(tasks, work.spec.key) for work in works]

    def check_nodes(self, needs: Mapping[str, float]) -> None:
        """Raise ConfigError for needs that no node can meet: Ray would wait for one without a word."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for name, need in needs.items():
            most = max((node.get(name, 0) for node in nodes), default=0)
            if need > most and not self.settings["autoscales"]:
                message = f"a run needs {need:g} {name}, and no node has more than {most:g}"
                advice = "expected less in the launch file, or 'autoscales: true' where nodes come when they are needed"
                raise ConfigError("command line", "--launcher", f"ray: {message}; {advice}")

    def keeper(self) -> Tasks:
        """The keeper of this command's tasks."""
        import ray

        if not self.own or self.keepers[self.own].actor is None:
            self.own = secrets.token_hex(8)
            lifetime = "detached" if self.detach else None
            options = {"name": self.own, "namespace": NAMESPACE, "lifetime": lifetime, "num_cpus": 0, "resources": HEAD}
            self.keepers[self.own] = Tasks(ray.remote(**options)(Keeper).remote(), self.own)
        return self.keepers[self.own]

    def find(self, record: Mapping[str, Any]) -> Task | None:
        import ray

        name = record["keeper"]
        if name not in self.keepers:
            try:
                self.keepers[name] = Tasks(ray.get_actor(name, namespace=NAMESPACE), name)
            except ValueError:  # it has ended, or the cluster is another one
                return None
        return Task(self.keepers[name], record["key"])


def connect(address: str | None, file: str) -> None:
    """Connect to a cluster, or start one. Raises ConfigError that names ``file``."""
    import ray

    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            runtime_env={"env_vars": child_environment({"PYTHONPATH": os.environ.get("PYTHONPATH", "")})},
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address is None else None,
            ignore_reinit_error=True,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        message = f"{address}: {reason}; expected the address of a Ray cluster that runs, or none to start one here"
        raise ConfigError(file, "ray.address", message) from None
