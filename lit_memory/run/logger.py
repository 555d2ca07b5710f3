"""Lightning's logger: metrics as rows of a run in MLflow."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from lit_memory.run.tracking import Tracker


class TrackingLogger(Logger):
    """Writes ``train/*`` and ``valid/*`` to one MLflow run; the results of the test are recorded at its end."""

    def __init__(self, tracker: Tracker, run_id: str) -> None:
        super().__init__()
        self.tracker, self.run_id = tracker, run_id
        self.rows: list[tuple[dict[str, float], int]] = []
        """(values, step) of everything logged so far; checkpoints keep it."""

    def restore(self, rows: list[tuple[dict[str, float], int]]) -> None:
        """Log the rows of a checkpoint that MLflow does not have: the run may have been deleted there."""
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
            self.rows.append((values, (step or 0) + 1))  # Lightning passes the index of the last step
            self.tracker.log(self.run_id, *self.rows[-1])

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine logs the whole configuration, of which Lightning would cut values to 250 characters."""
