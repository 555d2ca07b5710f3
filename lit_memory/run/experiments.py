"""The MLflow experiments of a store: one per YAML, created where it does not exist, restored where it was deleted.

Does not import MLflow; ``tracking.Tracker`` gives it the client.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

KIND = {"mlflow.experimentKind": "custom_model_development"}
"""MLflow's own tag, by which its pages show runs with parameters and metrics first, and no traces."""


class Experiments:
    """The experiments of a store by their names."""

    def __init__(
        self,
        client: Any,
        error: type[Exception],
        lock: Callable[[], AbstractContextManager[None]],
        artifacts: Path,
        warn: Callable[[str], None],
    ) -> None:
        """client: of MLflow. error: what it raises. lock: keeps others from creating one at the same time. artifacts:
        the folder of new experiments' artifacts. warn: receives what the user should know."""
        self.client, self.error, self.lock = client, error, lock
        self.artifacts, self.warn = artifacts, warn

    def id_of(self, name: str) -> str:
        """Id of an experiment, created where it does not exist, and restored where it was deleted."""
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            self.restore([name])
            return found.experiment_id
        with self.lock():
            found = self.client.get_experiment_by_name(name)  # another process may have been first
            if found is not None:
                return found.experiment_id
            try:
                place = (self.artifacts / name).as_uri()
                return self.client.create_experiment(name, artifact_location=place, tags=KIND)
            except self.error as error:  # a server of MLflow has no lock for us
                found = self.client.get_experiment_by_name(name)
                if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS" or found is None:
                    raise
                return found.experiment_id

    def restore(self, names: Iterable[str], dry_run: bool = False) -> None:
        """Restore the experiments that were deleted in MLflow, with their runs; ``warn`` gets a line for each.

        dry_run: give the lines alone.
        """
        for name in names:
            found = self.client.get_experiment_by_name(name)
            if found is None or found.lifecycle_stage != "deleted":
                continue
            if not dry_run:
                self.client.restore_experiment(found.experiment_id)
            done = "this command, without --dry-run, restores" if dry_run else "restored"
            self.warn(f"experiment {name} was deleted in MLflow; {done} it with all its runs")
