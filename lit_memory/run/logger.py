"""Lightning's metrics, as rows of a run in MLflow."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from lit_memory.run.tracking import Tracker


class TrackingLogger(Logger):
    """Lightning's metrics, written to one MLflow run in batches of one database transaction per validation."""

    def __init__(self, tracker: Tracker, run_id: str) -> None:
        super().__init__()
        self.tracker, self.run_id = tracker, run_id
        self.rows: list[tuple[dict[str, float], int]] = []  # all that was logged; kept in checkpoints

    def restore(self, rows: list[tuple[dict[str, float], int]]) -> None:
        """Log again what MLflow does not have: the run may have been deleted there."""
        self.rows = rows
        for values, step in rows:
            self.tracker.log(self.run_id, values, step)

    @property
    def name(self) -> str:
        return "lit-memory"

    @property
    def version(self) -> str:
        return self.run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = {k: float(v) for k, v in metrics.items() if k.startswith(("train/", "valid/"))}
        if values:
            self.rows.append((values, (step or 0) + 1))  # Lightning tells the index of the last step
            self.tracker.log(self.run_id, *self.rows[-1])

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The engine logs the whole configuration itself; Lightning would cut its values to 250 characters."""
