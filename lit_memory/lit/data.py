"""A LightningDataModule per task.

``AssociativeRetrievalData(pairs=50, ...)`` takes the fields of the task's ``Config`` and the loaders' settings. Loaders
index whole
batches: item k of a loader is the task's batch of step k, so that resuming takes one integer and no random state.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import lightning as L
from torch.utils.data import DataLoader, Dataset

from lit_memory.registry import TASKS, build_config, load_class
from lit_memory.tasks.base import Task
from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import FiniteSplits, FreeSegments, ReadInOrder, Streamed
from lit_memory.util.checks import FieldError

EVALUATION_SEED = 0
"""Validation and test samples are the same for every training seed."""


class Steps(Dataset):
    """Batches ``first, first + 1, ...`` of a task's split, ``samples`` samples in all (the last batch may be smaller);
    ``cuts``: see ``Batch.recut``. With ``count``, that of the split, the samples are not drawn: they lie at equal
        distances, in order."""

    def __init__(
        self,
        task: Task,
        seed: int,
        split: str,
        batch_size: int,
        samples: int,
        first: int = 0,
        cuts: Sequence[int] = (),
        count: int | None = None,
    ) -> None:
        self.task, self.seed, self.split, self.count = task, seed, split, count
        self.batch_size, self.first, self.cuts = batch_size, first, cuts
        self.samples = samples if count is None else min(samples, count)

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.batch_size
        size = min(self.batch_size, self.samples - start)
        if self.count is None or not isinstance(self.task, FiniteSplits):
            batch = self.task.batch(self.seed, self.split, self.first + index, size)
        else:
            batch = self.task.take(self.split, [i * self.count // self.samples for i in range(start, start + size)])
        return batch.recut(self.cuts) if self.cuts else batch


class LitData(L.LightningDataModule):
    """Batches of one task.

    seed: of the training samples. batch_size: contexts per training batch. epoch_steps: optimizer steps between two
    validations. valid_size, test_size: contexts per validation, and per condition of the test (or a list, with a number
    for each), at most; of a stream in whole batches.
    eval_batch_size: contexts per batch of both. test_cuts: tokens of the segments in which the test writes its contexts
        (``Batch.recut``); default: the task's.
    workers: processes that draw training batches (0: the main one); the bits are the same for any number.
    All other arguments are fields of the task's ``Config``.
    """

    task_name: ClassVar[str]

    def __init__(
        self,
        *,
        seed: int = 0,
        batch_size: int = 64,
        epoch_steps: int = 100,
        valid_size: int = 256,
        test_size: int | Sequence[int] = 1000,
        eval_batch_size: int = 250,
        test_cuts: Sequence[int] = (),
        workers: int = 0,
        **task: Any,
    ) -> None:
        super().__init__()
        task_class = load_class("task", self.task_name)
        self.task: Task = task_class(build_config(task_class.Config, task))
        if test_cuts and not isinstance(self.task, FreeSegments):
            raise FieldError("test_cuts", test_cuts, "the contexts of this task cannot be cut anew; expected none")
        self.whole_task = self.task
        self.test_conditions = self.task.test_conditions()
        self.seed, self.batch_size, self.epoch_steps, self.workers = seed, batch_size, epoch_steps, workers
        self.valid_size, self.eval_batch_size, self.test_cuts = valid_size, eval_batch_size, test_cuts
        self.test_sizes = self.task.test_sizes(test_size)

    def set_task(self, task: Task) -> None:
        """Train and validate on ``task`` from the next epoch on (a stage of a curriculum); the test stays as it was."""
        self.task = task

    def setup(self, stage: str) -> None:
        """Find out how many samples there are, so that what is wrong with the data of a test is told before the
        training, not after it."""
        evaluated = [(self.task, "valid"), *((task, "test") for _, task in self.test_conditions)]
        for task, split, size in [
            (self.task, "train", self.batch_size),
            *((*pair, self.eval_batch_size) for pair in evaluated),
        ]:
            if isinstance(task, Streamed) and task.stream:
                task.stream_steps(split, size)
            elif isinstance(task, FiniteSplits):
                task.count(split)

    def train_dataloader(self) -> DataLoader:
        step, per_step = 0, 1  # an optimizer step reads one batch per device and accumulation
        if self.trainer:
            step, per_step = self.trainer.global_step, self.trainer.accumulate_grad_batches * self.trainer.world_size
            if isinstance(self.task, Streamed) and self.task.stream and self.trainer.world_size > 1:
                raise ValueError(
                    f"devices: {self.trainer.world_size} of them would each skip the batches of the others; expected 1 for a stream"
                )
        steps = Steps(
            self.task,
            self.seed,
            "train",
            self.batch_size,
            self.batch_size * self.epoch_steps * per_step,
            step * per_step,
        )
        return DataLoader(steps, batch_size=None, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        return self._evaluation(self.task, "valid", self.valid_size, ())

    def test_dataloader(self) -> list[DataLoader]:
        return [
            self._evaluation(task, "test", size, self.test_cuts)
            for size, (_, task) in zip(self.test_sizes, self.test_conditions, strict=True)
        ]

    def _evaluation(self, task: Task, split: str, samples: int, cuts: Sequence[int]) -> DataLoader:
        size = self.eval_batch_size
        if isinstance(task, ReadInOrder) and task.in_order(split):  # all batches need the same size
            size = max(n for n in range(1, size + 1) if samples % n == 0)
        if isinstance(task, Streamed) and task.stream:  # whole batches up to the end of the text
            samples = size * min(max(1, samples // size), task.stream_steps(split, size))
        count = task.count(split) if isinstance(task, FiniteSplits) else None
        return DataLoader(Steps(task, EVALUATION_SEED, split, size, samples, cuts=cuts, count=count), batch_size=None)


class AssociativeRetrievalData(LitData):
    """Remember and Rewrite of the ARMT paper."""

    task_name = "associative_retrieval"


class BABILongData(LitData):
    """Questions of bAbI whose facts lie between the sentences of books; a test may ask those of a distributed set
    (``eval_set``)."""

    task_name = "babilong"

    def prepare_data(self) -> None:
        """Fetch what the test reads from a set, so that one out of reach or too small is told before the training."""
        tasks: list[Any] = [task for _, task in self.test_conditions if task.config.eval_set]
        for task, size in zip(tasks, self.test_sizes, strict=bool(tasks)):
            task.rows(size - 1, 1)


class BabiData(BABILongData):
    """bAbI: ``BABILongData`` without noise unless told otherwise."""

    def __init__(self, *, segments: int = 0, **options: Any) -> None:
        super().__init__(segments=segments, **options)


class NeedleData(LitData):
    """A number, word or uuid that one sentence of a long text has told."""

    task_name = "needle"


class MemReasonerData(LitData):
    """bAbI as an episode of lines, or the same as text: with sentences of books or of bAbI's own kind between the
    facts, or other places in the test."""

    task_name = "memreasoner"


class VariableTrackingData(LitData):
    """All variables to which chains of assignments give one value, as lines or as text."""

    task_name = "variable_tracking"


class PasskeyData(LitData):
    """A passkey, a magic number or a sentence about San Francisco in a haystack, as lines or as text."""

    task_name = "passkey"


class DNAData(LitData):
    """Classes of DNA sequences: GenomicsBenchmarks, or a stand-in with motifs."""

    task_name = "dna"


class LanguageModelingData(LitData):
    """Windows of text: books, WikiText, FineWeb-Edu, or synthetic prose."""

    task_name = "language_modeling"


class QuadraticData(LitData):
    """Quadratic equations of the RMT paper, solved step by step."""

    task_name = "quadratic"


class AlgorithmicData(LitData):
    """Copy, reverse and associative retrieval of the RMT paper."""

    task_name = "algorithmic"


class TimeSeriesData(LitData):
    """Forecasts of time series: ETT, a CSV file, or a stand-in."""

    task_name = "time_series"


_EPISODES = (MemReasonerData, VariableTrackingData, PasskeyData)
_ALL = (
    AlgorithmicData,
    AssociativeRetrievalData,
    BABILongData,
    DNAData,
    LanguageModelingData,
    NeedleData,
    QuadraticData,
    TimeSeriesData,
    *_EPISODES,
)
_OWN = {c.task_name: c for c in _ALL}
LIT_DATA: dict[str, type[LitData]] = {
    name: _OWN.get(name) or type("LitData", (LitData,), {"task_name": name}) for name in TASKS
}
"""Registered name of a task -> its LightningDataModule, the common one where none is written for it."""
