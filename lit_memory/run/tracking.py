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
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# MLflow 3 reports usage unless told otherwise, and configures itself at import.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # with the password of the URI
# It would try a server that is away for minutes; ``outbox.py`` tries again, and nothing else waits.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER", "false")

from mlflow import MlflowClient, entities
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.db.utils import create_sqlalchemy_engine
from sqlalchemy import Engine, event
from sqlalchemy.exc import DatabaseError

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run import database
from lit_memory.run.artifacts import Artifacts
from lit_memory.run.experiments import Experiments
from lit_memory.run.journal import Row, TimedRow, merged
from lit_memory.run.lineage import Lineage
from lit_memory.run.register import NAME as LEASES
from lit_memory.run.register import Checked, Register
from lit_memory.run.search import PAGE, TAG, Run, finished_among, of_keys, search
from lit_memory.run.summary import Summary
from lit_memory.run.uri import StoreURI
from lit_memory.util import files
from lit_memory.util.checks import first_line
from lit_memory.util.provenance import provenance

logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # else prints the traceback of what it raises
logging.getLogger("alembic").setLevel(logging.WARNING)

PARENT = "mlflow.parentRunId"
"""MLflow's own tag, by which its pages nest runs."""
NOTE = "mlflow.note.content"
"""MLflow's own tag: the description of a run, Markdown."""
LONGEST_NOTE = 4900
"""Characters of a description: MLflow takes 5000 in a tag's value."""
LONGEST_PARAMETER = 6000
"""Characters that MLflow takes."""
LARGEST_BATCH = 1000
"""Metrics that MLflow takes in one call."""


def default_uri(root: Path) -> str:
    """``MLFLOW_TRACKING_URI``, or a database below ``root``, where a plain ``mlflow ui`` finds it."""
    return os.environ.get("MLFLOW_TRACKING_URI") or database.uri_of(root / "mlflow.db")


class Tracker:
    """Everything that the project writes to MLflow and reads from it."""

    Error = (MlflowException, DatabaseError)
    """What its methods raise where the store does not do what it is asked."""

    def __init__(
        self, root: Path, uri: StoreURI | str | None = None, warn: Callable[[str], None] = lambda line: None
    ) -> None:
        """Open the store, which is created where it does not exist. Raises ConfigError where that fails.

        root: folder of artifacts and of the default database. uri: the store, ``default_uri`` by default. warn:
        receives what the user should know.
        """
        self.root, self.uri = root, uri if isinstance(uri, StoreURI) else StoreURI(uri or default_uri(root))
        self.warn, file = warn, self.uri.file
        self.artifacts = (root if file is None else file.parent).absolute() / database.ARTIFACTS
        """The folder of new experiments' artifacts."""
        self.uri.give_credentials()
        try:
            with self._creation_lock():
                if file is not None:
                    database.make_whole(file, self._create_database, warn)
                self.client = MlflowClient(tracking_uri=self.uri.address)
                self.client.search_experiments(max_results=1)
        # no server of MLflow, an older schema, a driver that is not installed: the libraries have a class for each
        except Exception as error:
            if files.disk_full(error, root):
                raise
            raise ConfigError("MLflow", "", f"cannot use {self.uri}: {self.uri.hide(first_line(error))}") from None
        self.logged: dict[str, set[tuple[str, int]]] = {}
        """Run id -> (metric, step) that a resumed run logged before."""
        self.experiments = Experiments(self.client, MlflowException, self._creation_lock, self.artifacts, warn)
        self.files = Artifacts(self.client, root, self.artifacts)
        self.lineage = Lineage(self.client, entities, self.Error)
        self.register = Register(self.client, self.Error, (self.artifacts / LEASES).as_uri())
        """What the processes that use this store agree on."""
        self.histories: dict[tuple[str, str], list[Metric]] = {}
        """(run id, metric) -> what ``read_ahead`` has read."""
        self.twins: dict[str, str] = {}
        """Run id -> what of a run is there twice: two processes without a lease trained it."""

    def guard(self, check: Callable[[], None]) -> None:
        """Call ``check`` before everything that is written from now on; it raises where nothing may be written."""
        checked = Checked(self.client, check)
        self.client = self.experiments.client = self.files.client = self.lineage.client = checked

    def _creation_lock(self) -> contextlib.AbstractContextManager[None]:
        """Let one process at a time create a database, an experiment or a parent run: first starts race."""
        return database.lock(self.uri, create_sqlalchemy_engine)

    def _create_database(self, path: Path) -> None:
        """Make MLflow's tables in a new SQLite file. If the machine dies meanwhile, nothing is lost with it: SQLite
        need not wait for the disk."""
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        def unsynced(connection: Any, record: Any) -> None:
            connection.execute("pragma synchronous = off")

        event.listen(Engine, "connect", unsynced)
        try:
            SqlAlchemyStore(database.uri_of(path), self.artifacts.as_uri())._dispose_engine()
        finally:
            event.remove(Engine, "connect", unsynced)

    def restore(self, names: Iterable[str], dry_run: bool = False) -> None:
        """Restore deleted experiments, see ``Experiments.restore``."""
        self.experiments.restore(names, dry_run)

    def find(self, key: str) -> Run | None:
        """The run of a key: the FINISHED one, else the newest. None where there is none."""
        return self.find_all([key])[0]

    def find_all(self, keys: Sequence[str]) -> list[Run | None]:
        """``find`` of every key."""
        return [self._counting(runs) for runs in of_keys(self.client, keys)]

    def _counting(self, runs: Sequence[Run]) -> Run | None:
        """The run that counts of those of a key, the newest first: the oldest FINISHED one, else the newest."""
        finished = [run for run in runs if run.status == "FINISHED"]
        if len(finished) > 1:
            self.twins[finished[-1].run_id] = "run"
        return finished[-1] if finished else runs[0] if runs else None

    def finished(self, ids: Mapping[str, str]) -> bool:
        """Whether all runs of a mapping from keys to ids are there, FINISHED and not retired. Key "" is the parent."""
        runs = finished_among(self.client, list(ids.values()))
        found = {(run.tags.get(f"{TAG}key", ""), run.run_id) for run in runs if run.tags.get(f"{TAG}kind") != "retired"}
        return found == set(ids.items())

    def retire(self, run_id: str) -> None:
        """Take a run out of all plans and reports; it stays in MLflow."""
        self.client.set_tag(run_id, f"{TAG}kind", "retired")

    def parent(self, experiment: str, scale: str, tags: Mapping[str, str]) -> str:
        """Id of the parent run of an experiment at one scale (``Sweep.setting``), created where it does not exist."""
        own = {"kind": "experiment", "experiment": experiment, "scale": scale}
        query = " and ".join(f"tags.`{TAG}{name}` = '{value}'" for name, value in own.items())
        experiment_id = self.experiments.id_of(experiment)
        with self._creation_lock():
            (runs,) = search(self.client, query)
            if runs:
                return runs[-1].run_id
            run_id = self._create(experiment_id, f"{experiment} ({scale})", prefixed(own | dict(tags)))
            self.client.update_run(run_id, status="SCHEDULED")  # it groups runs and never runs itself
            return run_id

    def running(self, where: str) -> list[Run]:
        """Runs that were started at ``where`` (``Sweep.location``) and have status RUNNING."""
        tags = f"tags.`{TAG}kind` = 'run' and tags.`{TAG}where` = '{where}'"
        (runs,) = search(self.client, f"{tags} and attributes.status = 'RUNNING'")
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
            if not run.params:
                self._describe(run.run_id, spec, params)
            return run.run_id
        own = {"kind": "run", "key": spec.key, "experiment": spec.experiment, "arm": spec.arm, "scale": spec.scale}
        own |= {"seed": str(spec.seed), "point": spec.point}
        all_tags = prefixed(own | dict(tags)) | {PARENT: parent}
        run_id = self._create(self.experiments.id_of(spec.experiment), spec.name, all_tags)
        self._describe(run_id, spec, params)
        return run_id

    def _describe(self, run_id: str, spec: RunSpec, params: Mapping[str, Any]) -> None:
        """Store the configuration of a run; the parameters are its last part."""
        self.files.store(run_id, lambda: self.client.log_dict(run_id, spec.config(), "config.yaml"))
        self.lineage.link_data(run_id, spec)
        self.client.log_batch(run_id, params=[Param(k, str(v)[:LONGEST_PARAMETER]) for k, v in params.items()])

    def _resume(self, run: Run, tags: Mapping[str, str]) -> None:
        """Open an interrupted run. Tags keep old values beside new ones, see ``merged``."""
        self.client.update_run(run.run_id, status="RUNNING")
        self.tag(run.run_id, {name: value for name, value in merged(run.own_tags, tags).items() if name in tags})
        history = (m for name in run.metrics for m in self.client.get_metric_history(run.run_id, name))
        self.logged[run.run_id] = {(m.key, m.step) for m in history}
        if f"{TAG}error" in run.tags:
            self.client.delete_tag(run.run_id, f"{TAG}error")

    def write(self, run_id: str, rows: Iterable[TimedRow]) -> None:
        """Log rows, but for those that the run logged before it was interrupted: they are the same."""
        logged = self.logged.get(run_id, ())
        new = [Metric(name, value, time, step) for name, step, value, time in rows if (name, step) not in logged]
        for i in range(0, len(new), LARGEST_BATCH):
            self.client.log_batch(run_id, new[i : i + LARGEST_BATCH])

    def tag(self, run_id: str, tags: Mapping[str, Any]) -> None:
        """Set tags, whose names get our prefix."""
        self.client.log_batch(run_id, tags=[RunTag(f"{TAG}{k}", str(v)) for k, v in tags.items()])

    def end(self, run_id: str, status: str) -> None:
        """End a run with the status FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run_id, status)

    def publish(self, run_id: str, folder: Path, summary: Summary) -> None:
        """Store a report in the parent run, with the provenance of this process, and end that."""
        self.files.add_folder(run_id, folder)
        self.tag(run_id, {"verdict": summary.verdict, "modified": summary.modified} | provenance())
        self.client.set_tag(run_id, NOTE, summary.note[:LONGEST_NOTE])
        now = time.time_ns() // 1_000_000
        with self._creation_lock():  # commands that end together have the same metrics
            known = self.client.get_run(run_id).data.metrics
            new = {name: value for name, value in summary.metrics.items() if known.get(name) != value}
            self.client.log_batch(run_id, [Metric(name, value, now, 0) for name, value in new.items()])
        self.end(run_id, "FINISHED")

    def page(self, experiment: str) -> str:
        """The address of an experiment in MLflow's pages; without a server, where ``mlflow ui`` shows it."""
        return self.uri.page(self.experiments.id_of(experiment))

    def read_ahead(self, runs: Sequence[Run], prefixes: tuple[str, ...]) -> None:
        """Read the metrics of many runs for ``results``, in one call per metric where a database is behind the client;
        a server has no such call."""
        self.histories = {}
        bulk = getattr(self.client._tracking_client.store, "get_metric_history_bulk", None)
        if bulk is None:
            return
        for name in {name for run in runs for name in run.metrics if name.startswith(prefixes)}:
            ids = [run.run_id for run in runs if name in run.metrics]
            for i in range(0, len(ids), PAGE):
                for found in bulk(ids[i : i + PAGE], name, sys.maxsize):
                    self.histories.setdefault((found.run_id, name), []).append(found)

    def results(self, run: Run, prefix: str = "test/") -> list[Row]:
        """(metric, x, value) rows of a run's test. prefix: "time/" for its times, "valid/" for its validations.

        Of rows that are there twice, the first one that was written counts.
        """
        rows: list[Row] = []
        for name in run.metrics:
            if name.startswith(prefix):
                history = self.histories.get((run.run_id, name)) or self.client.get_metric_history(run.run_id, name)
                first = {m.step: m for m in sorted(history, key=lambda m: m.timestamp, reverse=True)}
                if len(first) < len(history):
                    self.twins.setdefault(run.run_id, "rows")
                rows += [(name.removeprefix(prefix), m.step, m.value) for m in history if m is first[m.step]]
        return rows


def prefixed(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags as MLflow has them."""
    return {f"{TAG}{name}": value for name, value in tags.items()}


def monitors(gpu: bool) -> list[Any]:
    """MLflow's measurements of this machine, and of its GPUs."""
    from mlflow.system_metrics.metrics import cpu_monitor, disk_monitor, gpu_monitor, network_monitor

    found = [cpu_monitor.CPUMonitor(), disk_monitor.DiskMonitor(), network_monitor.NetworkMonitor()]
    return [*found, gpu_monitor.GPUMonitor()] if gpu else found
