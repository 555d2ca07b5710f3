"""Lightning's logger: metrics as rows of a run's journal."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from lit_memory.run.journal import Journal


class TrackingLogger(Logger):
    """Logs ``train/*`` and ``valid/*``; the results of the test are recorded at the end of the run."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal

    @property
    def name(self) -> str:
        return "lit-memory"

    @property
    def version(self) -> str:
        return self.journal.path.parent.name

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = {k: float(v) for k, v in metrics.items() if k.startswith(("train/", "valid/"))}
        if values:
            self.journal.log(values, (step or 0) + 1)  # Lightning passes the index of the last step

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine logs the whole configuration, of which Lightning would cut values to 250 characters."""
