"""Runs in MLflow: the only file that imports it.

One parent run per experiment and scale, one child per key for its whole life: a resumed run goes on in the same MLflow
run, and a run that several experiments share (same key) is trained once. FINISHED is written last, after the test
metrics, so that it marks a complete run. Metrics ``train/*`` and ``valid/*`` have the optimizer step as their step,
``test/*`` and ``time/*`` the x of the figure; ``time/*`` is measured, and no two runs of a key have the same.
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
from lit_memory.plan.sections import STEP, ReportConfig
from lit_memory.registry import load_class
from lit_memory.report.curves import curve_metrics
from lit_memory.util import files

logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").setLevel(
    logging.CRITICAL
)  # prints the traceback, on a full disk say, of what it raises as well
logging.getLogger("alembic").setLevel(logging.WARNING)

Row = tuple[str, float, float]
"""Metric, x, value."""
TAG = "lit."
PARENT = "mlflow.parentRunId"


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
    """All that the project writes to and reads from MLflow."""

    def __init__(self, root: Path, uri: str | None = None) -> None:
        """``root``: folder of artifacts and of the default database. Raises ConfigError for a store that does not
        open."""
        self.root, self.uri = root, uri or default_uri(root)
        try:
            with self._creation_lock():
                self.client = MlflowClient(tracking_uri=self.uri)
                self.client.search_experiments(max_results=1)
        except (
            MlflowException,
            DatabaseError,
            ImportError,
        ) as error:  # no server of MLflow, an older schema, a driver that is not installed
            if files.disk_full(error, root):
                raise
            raise ConfigError("MLflow", "", f"cannot use {self.uri}: {first_line(error)}") from None
        self.known: dict[str, set[tuple[str, int]]] = {}  # (metric, step) that a resumed run has logged already

    @contextlib.contextmanager
    def _creation_lock(self) -> Iterator[None]:
        """First starts on a new SQLite database race in its migrations: let one process create it."""
        if not self.uri.startswith("sqlite:///"):
            yield
            return
        path = Path(self.uri.removeprefix("sqlite:///"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            yield

    def experiment_id(self, name: str) -> str:
        """Id of the MLflow experiment ``name``, created where it does not exist."""
        found = self.client.get_experiment_by_name(name)
        if found is None:
            with self._creation_lock():
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    return self.client.create_experiment(name, artifact_location=(self.root / "mlruns" / name).as_uri())
        return found.experiment_id

    def _search(self, *filters: str) -> Iterator[list[Run]]:
        """What every filter finds, the newest first."""
        ids = [e.experiment_id for e in self.client.search_experiments(view_type=ViewType.ACTIVE_ONLY)]
        for text in filters:
            runs = self.client.search_runs(ids, text, order_by=["attributes.start_time DESC"], max_results=1000)
            yield [Run(r.info.run_id, r.info.status, r.data.params, r.data.metrics, r.data.tags) for r in runs]

    def find(self, key: str) -> Run | None:
        """The run of a key, if there is one: the FINISHED one, else the newest."""
        return self.find_all([key])[0]

    def find_all(self, keys: Sequence[str]) -> list[Run | None]:
        """``find`` of every key."""
        found = self._search(*(f"tags.`{TAG}key` = '{key}' and tags.`{TAG}kind` = 'run'" for key in keys))
        return [next((r for r in runs if r.status == "FINISHED"), runs[0] if runs else None) for runs in found]

    def retire(self, run_id: str) -> None:
        """Take a run out of all plans and reports; it stays in MLflow."""
        self.client.set_tag(run_id, f"{TAG}kind", "retired")

    def parent(self, experiment: str, scale: str, tags: Mapping[str, str]) -> str:
        """Run id of the parent of an experiment's runs at one scale, created where it does not exist."""
        query = f"tags.`{TAG}kind` = 'experiment' and tags.`{TAG}experiment` = '{experiment}' and tags.`{TAG}scale` = '{scale}'"
        experiment_id = self.experiment_id(experiment)
        with self._creation_lock():
            (runs,) = self._search(query)
            if runs:
                return runs[0].run_id
            own = {"kind": "experiment", "experiment": experiment, "scale": scale}
            run_id = self._create(
                experiment_id, f"{experiment} ({scale})", {f"{TAG}{k}": v for k, v in (own | dict(tags)).items()}
            )
            self.client.update_run(run_id, status="SCHEDULED")  # it groups runs and never runs itself
            return run_id

    def running(self, where: str) -> list[Run]:
        """Runs, started at ``where``, that have not ended as far as MLflow knows."""
        (runs,) = self._search(
            f"tags.`{TAG}kind` = 'run' and tags.`{TAG}where` = '{where}' and attributes.status = 'RUNNING'"
        )
        return runs

    def _create(self, experiment_id: str, name: str, tags: dict[str, str]) -> str:
        return self.client.create_run(experiment_id, tags=tags, run_name=name).info.run_id

    def start(
        self, spec: RunSpec, run: Run | None, parent: str, tags: Mapping[str, str], params: Mapping[str, Any]
    ) -> str:
        """Open the run of a key, a new one or the interrupted one (``run``), and mark it RUNNING. Returns its id.

        A new run gets the resolved experiment as the artifact ``config.yaml``.
        """
        own = {
            "kind": "run",
            "key": spec.key,
            "experiment": spec.experiment,
            "arm": spec.arm,
            "scale": spec.scale,
            "seed": str(spec.seed),
            "point": spec.point,
        }
        if run is not None:
            self.client.update_run(run.run_id, status="RUNNING")
            told = {name: run.tags.get(f"{TAG}{name}", "") for name in tags}
            self.tag(run.run_id, {k: v if k == "where" or v in told[k] else f"{told[k]}; {v}" for k, v in tags.items()})
            history = (m for name in run.metrics for m in self.client.get_metric_history(run.run_id, name))
            self.known[run.run_id] = {(m.key, m.step) for m in history}
            if f"{TAG}error" in run.tags:
                self.client.delete_tag(run.run_id, f"{TAG}error")
            return run.run_id
        all_tags = {f"{TAG}{k}": v for k, v in (own | dict(tags)).items()} | {PARENT: parent}
        run_id = self._create(self.experiment_id(spec.experiment), spec.name, all_tags)
        self.client.log_batch(run_id, params=[Param(k, str(v)[:6000]) for k, v in params.items()])
        self.client.log_dict(run_id, spec.config(), "config.yaml")
        return run_id

    def log(self, run_id: str, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of one step."""
        self._log(run_id, ((name, step, value) for name, value in metrics.items()))

    def _log(self, run_id: str, rows: Iterable[tuple[str, int, float]]) -> None:
        """(metric, step, value) rows, without those that the run logged before it was interrupted: they are the
        same."""
        now, known = get_current_time_millis(), self.known.get(run_id, ())
        if new := [Metric(name, value, now, step) for name, step, value in rows if (name, step) not in known]:
            self.client.log_batch(run_id, new)

    def tag(self, run_id: str, tags: Mapping[str, Any]) -> None:
        self.client.log_batch(run_id, tags=[RunTag(f"{TAG}{k}", str(v)) for k, v in tags.items()])

    def finish(
        self, run_id: str, results: Iterable[Row], totals: Mapping[str, float], times: Iterable[Row] = ()
    ) -> None:
        """Write the test's rows, the totals and the rows of measured times at once, then FINISHED."""
        rows = [
            (f"{prefix}{name}", int(x), value)
            for prefix, part in (("test/", results), ("time/", times))
            for name, x, value in part
        ]
        self._log(run_id, rows + [(k, 0, v) for k, v in totals.items()])
        self.end(run_id, "FINISHED")

    def end(self, run_id: str, status: str) -> None:
        """Status FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run_id, status)

    def write_folder(self, run_id: str, folder: Path) -> None:
        """All files of a folder as artifacts below ``report/``."""
        self.client.log_artifacts(run_id, str(folder), artifact_path="report")

    def publish(self, run_id: str, folder: Path, verdict: str) -> None:
        """A report into the parent run, which ends with it."""
        self.write_folder(run_id, folder)
        self.tag(run_id, {"verdict": verdict})
        self.end(run_id, "FINISHED")

    def results(self, run: Run, prefix: str = "test/") -> list[Row]:
        """(metric, x, value) rows of a run's test; those of its times have the ``prefix`` "time/"."""
        names = [name for name in run.metrics if name.startswith(prefix)]
        return [
            (name.removeprefix(prefix), m.step, m.value)
            for name in names
            for m in self.client.get_metric_history(run.run_id, name)
        ]


def curve_rows(tracker: Tracker, spec: RunSpec, run: Run, report: ReportConfig) -> list[Row]:
    """(metric, step, value) rows of a run's validations; what its whole curve and its last test have come to is the
    same at every step."""
    rows = tracker.results(run, "valid/")
    found = {name: {int(x): value for metric, x, value in rows if metric == name} for name in (report.y, "loss")}
    task, threshold = load_class("task", spec.task["name"]), report.threshold
    whole = curve_metrics(
        found[report.y], found["loss"], lambda value: threshold is not None and task.better(report.y, value, threshold)
    )
    tested = tracker.results(run)
    last = max(x for _, x, _ in tested)
    whole |= {f"test_{name}": value for name, x, value in tested if x == last}
    return rows + [(name, x, value) for name, value in whole.items() for x in found["loss"]]


def frame(tracker: Tracker, specs: Sequence[RunSpec], runs: Mapping[str, Run], report: ReportConfig) -> Any:
    """Long-format DataFrame (arm, point, seed, x, metric, value) of the FINISHED runs of a plan; x is what the report's
    axis has.

    The metric ``steps``, the same at every x of a run, counts its optimizer steps.
    """
    from pandas import DataFrame

    columns = ["arm", "point", "seed", "x", "metric", "value"]
    done = [(spec, runs[spec.key]) for spec in specs if spec.key in runs and runs[spec.key].status == "FINISHED"]
    rows = []
    for spec, run in done:
        if report.x == STEP:
            rows += [
                (spec.arm, spec.point, spec.seed, x, metric, value)
                for metric, x, value in curve_rows(tracker, spec, run, report)
            ]
            continue
        results = tracker.results(run)
        steps = [("steps", x, run.metrics["steps"]) for x in dict.fromkeys(x for _, x, _ in results)]
        rows += [
            (spec.arm, spec.point, spec.seed, x, metric, value)
            for metric, x, value in results + steps + tracker.results(run, "time/")
        ]
    return DataFrame(rows, columns=columns)
