"""Data modules of BABILong and bAbI."""

from typing import Any

from lit_memory.lit.data import LitData


class BABILongData(LitData):
    """Questions of bAbI whose facts lie between the sentences of books; a test may read a distributed set
    (``eval_set``)."""

    task_name = "babilong"

    def prepare_data(self) -> None:
        """Fetch what the test reads from a set, so that a set out of reach or too small fails before the training."""
        tasks: list[Any] = [task for _, task in self.test_conditions if task.config.eval_set]
        for task, size in zip(tasks, self.test_sizes, strict=bool(tasks)):
            task.rows(size - 1, 1)


class BabiData(BABILongData):
    """Questions of bAbI without noise: ``BABILongData`` with ``segments=0``."""

    def __init__(self, *, segments: int = 0, **options: Any) -> None:
        super().__init__(segments=segments, **options)
