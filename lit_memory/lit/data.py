"""``LitData``: the LightningDataModule of every task.

``AssociativeRetrievalData(pairs=50, ...)`` takes the fields of the task's ``Config`` and the settings of the loaders as
keyword arguments. Loaders index whole batches: item k of a loader is the task's batch of step k, so that resuming takes
one integer and no random state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from lit_memory.lit.describe import KeywordSignature
from lit_memory.registry import build_config, load_class
from lit_memory.tasks.base import Task
from lit_memory.tasks.batch import Batch, Segment
from lit_memory.tasks.mixins import FiniteSplits, ReadInOrder, Streamed
from lit_memory.util.checks import FieldError, check_cuts, check_least
from lit_memory.util.metrics import Condition

EVALUATION_SEED = 0
"""Validation and test samples are the same for every training seed."""
WORKER_SECONDS = 600.0
"""Seconds that a worker has for a batch, the tokenizing of books included. One that has died silently, or was stopped,
would be waited for without an end."""
SegmentHook = Callable[[Segment], None]
"""Is called with a segment as soon as it is read."""


class Reader(NamedTuple):
    """Who reads the batches of an optimizer step: one of ``world`` devices, in ``accumulated`` parts."""

    rank: int = 0
    world: int = 1
    accumulated: int = 1


WHOLE = Reader()


class Steps(Dataset):
    """Batches ``first, first + 1, ...`` of a task's split, ``samples`` samples in all; the last batch may be smaller.

    reader: gets a part of every batch (``Batch.part``), or several in a row, of the same samples for any number of
    readers. A process draws a batch once for its parts, see ``whole``.
    cuts: tokens of the segments of the contexts (``Batch.recut``). count: samples of a split that has an end; they are
    not drawn, but taken at equal distances, in order. on_segment: is called with every segment of a context that is
    made while it is read.
    """

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
        on_segment: SegmentHook | None = None,
        reader: Reader = WHOLE,
    ) -> None:
        self.task, self.seed, self.split, self.count = task, seed, split, count
        self.batch_size, self.first, self.cuts, self.on_segment = batch_size, first, cuts, on_segment
        self.samples = samples if count is None else min(samples, count)
        self.reader = reader
        self.drawn: tuple[int, Batch] | None = None

    def __len__(self) -> int:
        batches = -(-self.samples // self.batch_size)
        last = self.samples - (batches - 1) * self.batch_size
        return (batches - (last <= self.reader.rank)) * self.reader.accumulated  # the last may be too small for all

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        whole, part = divmod(index, self.reader.accumulated)
        world = self.reader.world
        batch = self.whole(whole).part(part * world + self.reader.rank, world * self.reader.accumulated)
        if self.on_segment and not isinstance(batch.context, tuple):
            batch = replace(batch, context=watched(batch.context, self.on_segment))
        # Where shared memory is full, a worker has to say so here: later, as the batch is sent, a thread would lose it.
        return batch.mapped(Tensor.share_memory_) if get_worker_info() else batch

    def whole(self, index: int) -> Batch:
        """A whole batch. It is kept for its other parts, unless its context is generated: that can be read only
        once."""
        if self.drawn is None or self.drawn[0] != index:
            batch = self.draw(index)
            if self.reader.accumulated == 1 or not isinstance(batch.context, tuple):
                return batch
            self.drawn = index, batch
        return self.drawn[1]

    def draw(self, index: int) -> Batch:
        """A whole batch, drawn anew."""
        start = index * self.batch_size
        size = min(self.batch_size, self.samples - start)
        if self.count is None or not isinstance(self.task, FiniteSplits):
            batch = self.task.batch(self.seed, self.split, self.first + index, size)
        else:
            batch = self.task.take(self.split, [i * self.count // self.samples for i in range(start, start + size)])
        return batch.recut(self.cuts)


def watched(segments: Iterator[Segment] | Any, on_segment: SegmentHook) -> Iterator[Segment]:
    """The same segments; each is shown to ``on_segment`` when it is made."""
    for segment in segments:
        on_segment(segment)
        yield segment


def loader(steps: Steps, **options: Any) -> DataLoader:
    """A loader of whole items, of which Lightning leaves none out on several devices: the items are parts already."""
    sampler = DistributedSampler(steps, num_replicas=1, rank=0, shuffle=False) if steps.reader.world > 1 else None
    return DataLoader(steps, batch_size=None, sampler=sampler, **options)


class LitData(L.LightningDataModule):
    """Gives the batches of one task to a Trainer. All other arguments are fields of the task's ``Config``.

    seed: Seed of the training samples.
    batch_size: Contexts of an optimizer step, on all devices and in all accumulated batches; a multiple of both.
    epoch_steps: Optimizer steps between two validations. They are an epoch of Lightning, and every epoch has samples of
        its own.
    valid_size: Most contexts per validation; of a stream in whole batches.
    test_size: Most contexts per condition of the test, or a list with a number for each.
    eval_batch_size: Contexts per batch of a validation and a test, on all devices. What a task draws anew for every
        batch, it draws otherwise for batches of another size. Samples that a task reads in order are in batches of
        the largest divisor of their number up to it: of one sample, where that is a larger prime.
    cuts: Tokens of the segments in which contexts are written (``Batch.recut``); (): those of the task.
    test_cuts: Those of the test alone; (): ``cuts``.
    workers: Processes that draw training batches, 0: the main one; the bits are the same for any number. The parts of a
        batch that is accumulated go to the workers in turn, and each draws the whole batch for its own: only more
        workers than parts are faster than one.
    """

    task_name: ClassVar[str]
    __signature__ = KeywordSignature()

    def __init__(
        self,
        *,
        seed: int = 0,
        batch_size: int = 64,
        epoch_steps: int = 100,
        valid_size: int = 256,
        test_size: int | Sequence[int] = 1000,
        eval_batch_size: int = 250,
        cuts: Sequence[int] = (),
        test_cuts: Sequence[int] = (),
        workers: int = 0,
        **task: Any,
    ) -> None:
        super().__init__()
        task_class = load_class("task", self.task_name)
        self.task: Task = task_class(build_config(task_class.Config, task))
        check_least(1, batch_size=batch_size, epoch_steps=epoch_steps, eval_batch_size=eval_batch_size)
        for name, lengths in (("cuts", cuts), ("test_cuts", test_cuts)):
            check_cuts(name, lengths, self.task)
        self.whole_task = self.task
        self.test_conditions = self.task.test_conditions()
        self.seed, self.batch_size, self.epoch_steps, self.workers = seed, batch_size, epoch_steps, workers
        self.valid_size, self.eval_batch_size = valid_size, eval_batch_size
        self.cuts, self.test_cuts = cuts, test_cuts or cuts
        self.test_sizes = self.task.test_sizes(test_size)
        self.on_test_segment: SegmentHook | None = None

    @classmethod
    def config_class(cls) -> type | None:
        """The ``Config`` of the task; None for a base class without a task."""
        return load_class("task", cls.task_name).Config if hasattr(cls, "task_name") else None

    def conditions(self, split: str) -> Sequence[tuple[Condition | None, Task]]:
        """(test condition, task) of every dataloader of a split."""
        return self.test_conditions if split == "test" else [(None, self.task)]

    def set_stage(self, changes: Mapping[str, Any], batch_size: int, epoch_steps: int) -> None:
        """Begin a stage of a curriculum: from the next epoch on, train and validate on the task with other fields. The
        test stays as it is."""
        self.task = self.whole_task.at(**changes) if changes else self.whole_task
        check_cuts("cuts", self.cuts, self.task)
        self.batch_size, self.epoch_steps = batch_size, epoch_steps

    def setup(self, stage: str) -> None:
        """Count the samples of all splits, and draw one of every other test, so that a test that cannot be drawn fails
        before the training, not after it."""
        trainer: Any = self.trainer
        if stage == "fit" and trainer and not trainer.overfit_batches:
            # A loader has the steps of one epoch: Lightning would read the same ones in every epoch.
            trainer.reload_dataloaders_every_n_epochs = trainer.reload_dataloaders_every_n_epochs or 1
        splits = [(self.task, "train", self.batch_size), (self.task, "valid", self.eval_batch_size)]
        splits += [(task, "test", self.eval_batch_size) for _, task in self.test_conditions]
        for task, split, size in splits:
            if isinstance(task, Streamed) and task.stream:
                task.stream_steps(split, size)
            elif isinstance(task, FiniteSplits):
                task.count(split)
            elif split == "test":
                self._draw_one(task)

    def _draw_one(self, task: Task) -> None:
        """Draw a sample of a test. Raises FieldError that names the field of the user."""
        try:
            task.batch(EVALUATION_SEED, "test", 0, 1)
        except FieldError as error:
            listed = getattr(self.whole_task.config, f"test_{error.name}", None)
            raise FieldError(f"test_{error.name}" if listed else error.name, error.value, error.expected) from None

    def train_dataloader(self) -> DataLoader:
        reader, step = self._reader(), 0
        if self.trainer:
            step = self.trainer.global_step
            reader = reader._replace(accumulated=self.trainer.accumulate_grad_batches)
        if isinstance(self.task, Streamed) and self.task.stream and reader.accumulated > 1:
            reason = "a batch of a stream continues the one before it, and is read whole; expected 1"
            raise FieldError("accumulate_grad_batches", reader.accumulated, reason)
        parts = reader.world * reader.accumulated
        if self.batch_size % parts:
            read = f"read in {parts} parts, by devices={reader.world}; expected a multiple of {parts}"
            raise FieldError("batch_size", self.batch_size, read)
        samples = self.batch_size * self.epoch_steps
        steps = Steps(
            self.task, self.seed, "train", self.batch_size, samples, first=step, reader=reader, cuts=self.cuts
        )
        return loader(steps, num_workers=self.workers, timeout=WORKER_SECONDS if self.workers else 0)

    def _reader(self) -> Reader:
        """Which device of the Trainer reads."""
        return Reader(self.trainer.global_rank, self.trainer.world_size) if self.trainer else WHOLE

    def val_dataloader(self) -> DataLoader:
        return self._evaluation(self.task, "valid", self.valid_size, cuts=self.cuts)

    def test_dataloader(self) -> list[DataLoader]:
        options = {"cuts": self.test_cuts, "on_segment": self.on_test_segment}
        return [
            self._evaluation(task, "test", size, **options)
            for size, (_, task) in zip(self.test_sizes, self.test_conditions, strict=True)
        ]

    def predict_dataloader(self) -> list[DataLoader]:
        """The test's."""
        return self.test_dataloader()

    def longest_test(self) -> tuple[Condition, Steps]:
        """The condition of the test with the longest contexts, the last of several, and its batches."""
        i = self._longest()
        x, task = self.test_conditions[i]
        return x, self._steps(task, "test", self.test_sizes[i], cuts=self.test_cuts)

    def test_samples(self, count: int) -> Batch:
        """Samples of the longest test as one batch, at most ``count``: the same ones at every call."""
        i = self._longest()
        count = min(count, self.test_sizes[i])
        return self._steps(self.test_conditions[i][1], "test", count, count, cuts=self.test_cuts)[0]

    def _longest(self) -> int:
        tokens = [task.tokens for _, task in self.test_conditions]
        return max(range(len(tokens)), key=lambda i: (tokens[i], i))

    def _evaluation(self, task: Task, split: str, samples: int, **options: Any) -> DataLoader:
        return loader(self._steps(task, split, samples, reader=self._reader(), **options))

    def _steps(self, task: Task, split: str, samples: int, size: int = 0, **options: Any) -> Steps:
        """The batches of an evaluation, of ``size`` samples; 0: of ``eval_batch_size``."""
        size = size or self.eval_batch_size
        if isinstance(task, ReadInOrder) and task.in_order(split):
            size = task.equal_batches(split, samples, size, options.get("reader", WHOLE).world)
        if isinstance(task, Streamed) and task.stream:  # whole batches up to the end of the text
            samples = size * min(max(1, samples // size), task.stream_steps(split, size))
        count = task.count(split) if isinstance(task, FiniteSplits) else None
        return Steps(task, EVALUATION_SEED, split, size, samples, count=count, **options)
