"""Runs in MLflow: the only file that imports it.

One parent run per experiment and scale, and one child run per key for its whole life: a resumed run goes on in the same
MLflow run, and a run that several experiments share (same key) is trained once. FINISHED is written last, after the
test metrics, so that it marks a complete run.

Metrics ``train/*`` and ``valid/*`` have the optimizer step as their MLflow step, ``test/*`` and ``time/*`` the x of the
figure. ``time/*`` is measured by the clock: no two runs of a key have the same.
"""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# MLflow 3 reports usage unless told otherwise, and configures itself at import.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.utils.time import get_current_time_millis
from sqlalchemy.exc import DatabaseError

from lit_memory.plan.errors import ConfigError, first_line
from lit_memory.plan.runspec import RunSpec
from lit_memory.util import files

logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # else prints the traceback of what it raises
logging.getLogger("alembic").setLevel(logging.WARNING)

Row = tuple[str, float, float]
"""Metric, x, value."""
TAG = "lit."
"""Prefix of our tags."""
PARENT = "mlflow.parentRunId"
"""MLflow's own tag, by which its pages nest runs."""
LONGEST_PARAMETER = 6000
"""Characters that MLflow takes."""


def default_uri(root: Path) -> str:
    """``MLFLOW_TRACKING_URI``, or a database below ``root``, where a plain ``mlflow ui`` finds it."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


@dataclass
class Run:
    """What MLflow knows about one key."""

    run_id: str
    status: str
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


class Tracker:
    """Everything that the project writes to MLflow and reads from it."""

    def __init__(self, root: Path, uri: str | None = None) -> None:
        """Open the store. Raises ConfigError where that fails.

        root: folder of artifacts and of the default database. uri: the store, ``default_uri`` by default.
        """
        self.root, self.uri = root, uri or default_uri(root)
        try:
            with self._creation_lock():
                self.client = MlflowClient(tracking_uri=self.uri)
                self.client.search_experiments(max_results=1)
        except (MlflowException, DatabaseError, ImportError) as error:
            # no server of MLflow, an older schema, a driver that is not installed
            if files.disk_full(error, root):
                raise
            raise ConfigError("MLflow", "", f"cannot use {self.uri}: {first_line(error)}") from None
        self.logged: dict[str, set[tuple[str, int]]] = {}
        """Run id -> (metric, step) that a resumed run logged before."""

    @contextlib.contextmanager
    def _creation_lock(self) -> Iterator[None]:
        """Let one process at a time create a SQLite database: first starts race in its migrations."""
        if not self.uri.startswith("sqlite:///"):
            yield
            return
        path = Path(self.uri.removeprefix("sqlite:///"))
        if path.exists() and not os.access(path, os.W_OK):  # nobody creates anything there: a plan may be all right
            yield
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            yield

    def experiment_id(self, name: str) -> str:
        """Id of the MLflow experiment ``name``, created where it does not exist."""
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        with self._creation_lock():
            found = self.client.get_experiment_by_name(name)  # another process may have been first
            if found is not None:
                return found.experiment_id
            return self.client.create_experiment(name, artifact_location=(self.root / "mlruns" / name).as_uri())

    def _search(self, *filters: str) -> Iterator[list[Run]]:
        """The runs of every filter, the newest first."""
        ids = [e.experiment_id for e in self.client.search_experiments(view_type=ViewType.ACTIVE_ONLY)]
        for text in filters:
            runs = self.client.search_runs(ids, text, order_by=["attributes.start_time DESC"], max_results=1000)
            yield [Run(r.info.run_id, r.info.status, r.data.params, r.data.metrics, r.data.tags) for r in runs]

    def find(self, key: str) -> Run | None:
        """The run of a key: the FINISHED one, else the newest. None where there is none."""
        return self.find_all([key])[0]

    def find_all(self, keys: Sequence[str]) -> list[Run | None]:
        """``find`` of every key."""
        found = self._search(*(f"tags.`{TAG}key` = '{key}' and tags.`{TAG}kind` = 'run'" for key in keys))
        return [next((r for r in runs if r.status == "FINISHED"), runs[0] if runs else None) for runs in found]

    def retire(self, run_id: str) -> None:
        """Take a run out of all plans and reports; it stays in MLflow."""
        self.client.set_tag(run_id, f"{TAG}kind", "retired")

    def parent(self, experiment: str, scale: str, tags: Mapping[str, str]) -> str:
        """Id of the parent run of an experiment at one scale, created where it does not exist."""
        own = {"kind": "experiment", "experiment": experiment, "scale": scale}
        query = " and ".join(f"tags.`{TAG}{name}` = '{value}'" for name, value in own.items())
        experiment_id = self.experiment_id(experiment)
        with self._creation_lock():
            (runs,) = self._search(query)
            if runs:
                return runs[0].run_id
            run_id = self._create(experiment_id, f"{experiment} ({scale})", prefixed(own | dict(tags)))
            self.client.update_run(run_id, status="SCHEDULED")  # it groups runs and never runs itself
            return run_id

    def running(self, where: str) -> list[Run]:
        """Runs that were started at ``where`` (``Sweep.location``) and have status RUNNING."""
        tags = f"tags.`{TAG}kind` = 'run' and tags.`{TAG}where` = '{where}'"
        (runs,) = self._search(f"{tags} and attributes.status = 'RUNNING'")
        return runs

    def _create(self, experiment_id: str, name: str, tags: dict[str, str]) -> str:
        return self.client.create_run(experiment_id, tags=tags, run_name=name).info.run_id

    def start(
        self, spec: RunSpec, run: Run | None, parent: str, tags: Mapping[str, str], params: Mapping[str, Any]
    ) -> str:
        """Mark the run of a key RUNNING and return its id.

        run: the interrupted run of the key, which goes on; None for a new one, which gets the resolved experiment as
        the artifact ``config.yaml``. parent: id of its parent run. tags, params: of a new run.
        """
        if run is not None:
            self._resume(run, tags)
            return run.run_id
        own = {
            "kind": "run",
            "key": spec.key,
            "experiment": spec.experiment,
            "arm": spec.arm,
            "scale": spec.scale,
            "seed": str(spec.seed),
            "point": spec.point,
        }
        all_tags = prefixed(own | dict(tags)) | {PARENT: parent}
        run_id = self._create(self.experiment_id(spec.experiment), spec.name, all_tags)
        self.client.log_batch(run_id, params=[Param(k, str(v)[:LONGEST_PARAMETER]) for k, v in params.items()])
        with self._storing(run_id):
            self.client.log_dict(run_id, spec.config(), "config.yaml")
        return run_id

    def _resume(self, run: Run, tags: Mapping[str, str]) -> None:
        """Open an interrupted run. Tags keep old values beside new ones, "old; new", but for ``where``."""
        self.client.update_run(run.run_id, status="RUNNING")
        merged = {}
        for name, value in tags.items():
            before = run.tags.get(f"{TAG}{name}", "")
            merged[name] = value if name == "where" else before if value in before else f"{before}; {value}"
        self.tag(run.run_id, merged)
        history = (m for name in run.metrics for m in self.client.get_metric_history(run.run_id, name))
        self.logged[run.run_id] = {(m.key, m.step) for m in history}
        if f"{TAG}error" in run.tags:
            self.client.delete_tag(run.run_id, f"{TAG}error")

    def log(self, run_id: str, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of one step."""
        self._log(run_id, ((name, step, value) for name, value in metrics.items()))

    def _log(self, run_id: str, rows: Iterable[tuple[str, int, float]]) -> None:
        """Log (metric, step, value) rows, in one database transaction. Those that the run logged before it was
        interrupted are the same and left out."""
        now, logged = get_current_time_millis(), self.logged.get(run_id, ())
        new = [Metric(name, value, now, step) for name, step, value in rows if (name, step) not in logged]
        if new:
            self.client.log_batch(run_id, new)

    def tag(self, run_id: str, tags: Mapping[str, Any]) -> None:
        """Set tags, whose names get our prefix."""
        self.client.log_batch(run_id, tags=[RunTag(f"{TAG}{k}", str(v)) for k, v in tags.items()])

    def finish(
        self, run_id: str, results: Iterable[Row], totals: Mapping[str, float], times: Iterable[Row] = ()
    ) -> None:
        """Write the rows of the test, the totals and the measured times at once, then FINISHED."""
        rows = [(f"test/{name}", int(x), value) for name, x, value in results]
        rows += [(f"time/{name}", int(x), value) for name, x, value in times]
        self._log(run_id, rows + [(name, 0, value) for name, value in totals.items()])
        self.end(run_id, "FINISHED")

    def end(self, run_id: str, status: str) -> None:
        """End a run with the status FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run_id, status)

    def write_folder(self, run_id: str, folder: Path) -> None:
        """Store all files of a folder as artifacts below ``report/``."""
        with self._storing(run_id):
            self.client.log_artifacts(run_id, str(folder), artifact_path="report")

    @contextlib.contextmanager
    def _storing(self, run_id: str) -> Iterator[None]:
        """Tag the run where artifacts cannot be stored: MLflow keeps absolute paths, which a root that was moved may
        no longer have. Raises OSError for a full disk."""
        try:
            yield
        except OSError as error:
            if files.disk_full(error, self.root):
                raise
            self.tag(run_id, {"artifacts": f"not stored: {error}"})

    def publish(self, run_id: str, folder: Path, verdict: str) -> None:
        """Store a report in the parent run, and end that."""
        self.write_folder(run_id, folder)
        self.tag(run_id, {"verdict": verdict})
        self.end(run_id, "FINISHED")

    def results(self, run: Run, prefix: str = "test/") -> list[Row]:
        """(metric, x, value) rows of a run's test. prefix: "time/" for its times, "valid/" for its validations."""
        rows: list[Row] = []
        for name in run.metrics:
            if name.startswith(prefix):
                history = self.client.get_metric_history(run.run_id, name)
                rows += [(name.removeprefix(prefix), m.step, m.value) for m in history]
        return rows


def prefixed(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags as MLflow has them."""
    return {f"{TAG}{name}": value for name, value in tags.items()}
