"""What some families of tasks add to ``Task``.

Shape suffixes: B batch, T tokens, N generated tokens.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lit_memory.tasks.base import Task, generator
from lit_memory.tasks.batch import Batch
from lit_memory.util.checks import FieldError


class FiniteSplits(Task):
    """A task whose splits have an end, so that every sample has a number.

    Training draws samples with replacement; validation and test take them in order, each at most once.
    """

    def count(self, split: str) -> int | None:
        """Number of samples in a split; None if these settings generate samples without end."""
        raise NotImplementedError

    def take(self, split: str, numbers: Sequence[int]) -> Batch:
        """The samples with these numbers, 0 to ``count - 1``."""
        raise NotImplementedError

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        count = self.count(split)
        if count is None:
            raise NotImplementedError
        return self.take(split, torch.randint(count, (size,), generator=generator(seed, split, step)).tolist())


class ReadInOrder(Task):
    """A task that may read the samples of a split in order.

    Batch k then holds samples ``k * size`` to ``(k + 1) * size - 1``, so that all batches need the same size.
    """

    def in_order(self, split: str) -> bool:
        """Whether these settings read the split in order."""
        raise NotImplementedError

    def equal_batches(self, split: str, samples: int, most: int, devices: int) -> int:
        """Size of the batches of ``samples`` samples: the largest divisor of that number, at most ``most``.

        Raises FieldError if ``devices`` devices, each of which reads a part of every batch, are more than that.
        """
        size = max(n for n in range(1, most + 1) if samples % n == 0)
        if size < devices:
            few = f"in equal batches of at most eval_batch_size={most}: of {size}, for {devices} devices"
            raise FieldError(f"{split}_size", samples, f"read in order, {few}; expected a multiple of {most}")
        return size


class Streamed(Task):
    """A task whose batches may continue each other, with a memory that is carried over (``Batch.continues``)."""

    @property
    def stream(self) -> bool:
        """Whether these settings stream."""
        raise NotImplementedError

    def stream_steps(self, split: str, size: int) -> int:
        """Number of batches of ``size`` samples until the stream starts again."""
        raise NotImplementedError


class ContinuousTokens(Task):
    """A task whose tokens are vectors of numbers instead of ids.

    ``Batch.ids_BT`` is (B, T, input_dim). ``Batch.targets_BT`` is (B, T, H), nan at positions that are not scored;
    ``vocab_size`` is the largest H. The loss is the squared error, and ``score`` gets the predicted numbers (B, T, H).
    """

    @property
    def input_dim(self) -> int:
        """Numbers per token."""
        raise NotImplementedError


class LossScored(Task):
    """A task whose metrics come from the loss of every token: ``score_losses`` takes the place of ``score``."""

    def score_losses(self, loss_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Values to average under each name, each (n,) for any n, one sample after the other; "loss" is one of the
        names.

        loss_BT: loss at every scored position, nan elsewhere.
        """
        raise NotImplementedError


class Prompted(Task):
    """A task whose test lets the model generate an answer after a prompt (``Batch.prompt_B``)."""

    new_tokens: int = 10
    """Most tokens that the model generates."""

    @property
    def stop_id(self) -> int | tuple[int, ...]:
        """Token, or tokens of which the first to appear, that ends an answer; (): all ``new_tokens`` are generated."""
        raise NotImplementedError

    def score_text(self, generated_BN: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Metrics per sample, each (B,), from the ``new_tokens`` tokens that were generated after the prompts."""
        raise NotImplementedError


class Curved(Task):
    """A task that has metrics along an axis within one test: a curve, with one value per position.

    The value at a position is logged as ``metric[position]``.
    """

    curves: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Axis -> the metrics along it."""

    def curve_positions(self, axis: str) -> list[int]:
        """Positions along one of the axes of ``curves``."""
        raise NotImplementedError

    def x_values(self, x: str) -> list:
        """Positions of a curve (of the last condition, if the test has several), or values of ``test_<field>``."""
        return self.test_conditions()[-1][1].curve_positions(x) if x in self.curves else super().x_values(x)


class FreeSegments(Task):
    """A task that may write its contexts in segments of any length (``Batch.recut``)."""

    any_segments: ClassVar[bool] = True
