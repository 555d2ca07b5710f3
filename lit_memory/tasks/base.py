"""What every task offers, and the random numbers that all of them use.

Shape suffixes: B batch, T tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lit_memory.util.checks import FieldError
from lit_memory.util.seeds import mixed_seed

Segment = Tensor | tuple[Tensor, Tensor]
"""Token ids (b, T), or a pair of them and a mask that is True at real tokens."""


def generator(seed: int, split: str, step: int) -> torch.Generator:
    """A CPU generator that depends on its arguments alone: the same bits on any machine, in any process, in any
    order."""
    return torch.Generator().manual_seed(mixed_seed(seed, split, step))


@dataclass
class Batch:
    """What a model reads and what it is asked.

    ids_BT: token ids. targets_BT: the id at every position that is scored, -100 elsewhere; position p is predicted from
        p-1. Numbers in place of ids: see ``Task.inputs``.
    segment_len: tokens per segment where the task fixes it (None: the whole sequence).
    read_only: the last ``read_only`` segments ask and do not write; if positive, all targets lie in them.
    meta: numbers per sample (B,) that say what kind of sample it is.
    context: segments (b, T) that are read before ``ids_BT``, each a part of a sample that may be too long to hold: a
        tuple, or an iterable that makes them as it goes, once, some with a mask. Samples are ordered so that the
        longest come first: b grows up to B.
    prompt_B: tokens of ``ids_BT`` that an evaluation gives to the model, which then goes on by itself (``score_text``);
        None: it does not.
    continues: whether the samples go on where those of the batch before have ended, with the memory that those have
        left (False: they begin). The last token of such a batch is only predicted; the next one begins with it. None:
        the batch stands alone.
    apart: lines (B, n, L) that are in no context, and a mask that is True at real tokens, for models that learn to
        write lines. None: there are none.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    segment_len: int | None = None
    read_only: int = 0
    meta: dict[str, Tensor] = field(default_factory=dict)
    context: Iterable[Segment] = ()
    prompt_B: Tensor | None = None
    continues: bool | None = None
    apart: tuple[Tensor, Tensor] | None = None

    @property
    def scored_BT(self) -> Tensor:
        """True at the positions that are scored."""
        return self.targets_BT != -100 if self.targets_BT.dim() == 2 else ~self.targets_BT[..., 0].isnan()

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """The same batch on ``device``."""
        move = partial(Tensor.to, device=device, non_blocking=non_blocking)
        moved: dict[str, Any] = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        if self.apart is not None:
            moved["apart"] = move(self.apart[0]), move(self.apart[1])
        context = (tuple(map(move, part)) if isinstance(part, tuple) else move(part) for part in self.context)
        return replace(
            self,
            **moved,
            meta={k: move(v) for k, v in self.meta.items()},
            context=tuple(context) if isinstance(self.context, tuple) else context,
        )

    def written(self) -> list[Segment]:
        """The segments that the samples write: ``context``, which is read if it is an iterator, and those of ``ids_BT``
        before the read-only ones."""
        written_BT = self.ids_BT[:, : self.ids_BT.shape[1] - self.read_only * (self.segment_len or 0)]
        length = written_BT.shape[1]
        return [*self.context, *(written_BT.split(self.segment_len or length, dim=1) if length else ())]

    def recut(self, lengths: Sequence[int]) -> "Batch":
        """The same batch, whose written tokens become ``context`` in segments of ``lengths``: the last one repeats, 0
        is all that is left.

        For a batch of a task with ``any_segments``: one tensor with read-only segments of ``segment_len`` at its end.
        """
        asked = self.read_only * (self.segment_len or 0)
        left, cuts = self.ids_BT.shape[1] - asked, []
        written_BT, asked_BT = self.ids_BT.split([left, asked], dim=1)
        while left:
            length = lengths[min(len(cuts), len(lengths) - 1)]
            cuts.append(min(length or left, left))
            left -= cuts[-1]
        return replace(
            self, ids_BT=asked_BT, targets_BT=self.targets_BT[:, -asked:], context=written_BT.split(cuts, dim=1)
        )


class Task:
    """A pure sampler and its metric.

    ``batch(seed, split, step, size)`` returns the same bits for the same arguments. A split may have an end
    (``count``): then validation and test take its samples in order, each at most once. ``Config.test_<field>`` lists
    the values of ``<field>`` that the test visits.

    Metrics are means over a whole split, exact for batches of any size: ``score`` returns one value per sample, from
    predicted ids; a task with ``scores_losses`` gets the loss at every position in place of them, and returns the
    values that are averaged, of any number, per name. ``summarize`` adds what follows from the means. The x axis of a
    figure is a field that the test varies, or the axis of one of
    ``curves``: metrics of which one test has a value at every place, under the name ``metric[place]``.
    """

    Config: ClassVar[type]
    metrics: ClassVar[tuple[str, ...]] = ("exact_match",)
    """Names of what validation and test measure, one by one or by ``summarize``; the first selects grid points and is
    shown while a run is on."""
    lower: ClassVar[tuple[str, ...]] = ()
    """Those of the metrics of which less is better."""
    derived: ClassVar[tuple[str, ...]] = ()
    """Names of what ``summarize`` adds to a test alone."""
    curves: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Axis -> the metrics along it; ``places`` has its values."""
    scores_losses: ClassVar[bool] = False
    """Whether ``score_losses`` takes the place of ``score``."""
    any_segments: ClassVar[bool] = False
    """Whether a test may write its contexts in segments of any length (``Batch.recut``)."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to ``vocab_size - 1``."""
        raise NotImplementedError

    @property
    def inputs(self) -> int:
        """Numbers that a token is made of. 0: tokens are ids. If positive, ``ids_BT`` is (B, T, inputs), ``targets_BT``
        is (B, T, H), nan where nothing is scored, ``vocab_size`` is the largest H, the loss is the squared error, and
        ``score`` gets what was predicted."""
        return 0

    @property
    def segment_len(self) -> int | None:
        """Tokens per segment where the task fixes it."""
        raise NotImplementedError

    @property
    def written(self) -> int:
        """Segments of the longest sample that a model reads and writes; questions do not count."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Tokens of the longest sample, as nearly as its segments tell."""
        return (self.written + 1) * (self.segment_len or 1)

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        """``size`` samples of ``split`` ("train", "valid" or "test"). Default: drawn, with replacement, from the
        ``count`` that there are."""
        count = self.count(split)
        if count is None:
            raise NotImplementedError
        return self.take(split, torch.randint(count, (size,), generator=generator(seed, split, step)).tolist())

    def count(self, split: str) -> int | None:
        """Samples of a split that has an end, each with a number; None for one that makes as many as are asked for."""
        return None

    def take(self, split: str, numbers: Sequence[int]) -> Batch:
        """The samples of these numbers, below ``count``."""
        raise NotImplementedError

    def in_parts(self, split: str) -> bool:
        """Whether batch k has the k-th part of what a split has in order, so that a validation or a test reads batches
        of one size."""
        return False

    @property
    def stream(self) -> bool:
        """Whether a batch goes on where the one before has ended (``Batch.continues``)."""
        return False

    def stream_steps(self, split: str, size: int) -> int:
        """Batches of ``size`` samples after which a stream begins anew."""
        raise NotImplementedError

    new_tokens: int = 10
    """Most tokens of what a model says to a batch with prompts."""

    @property
    def stop_id(self) -> int | tuple[int, ...]:
        """The token, or those of several that come first, that ends an answer; (): it ends after ``new_tokens``."""
        raise NotImplementedError

    def score_text(self, said_BN: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Metrics per sample, (B,), from the ``new_tokens`` tokens that a model said after the prompts of a batch that
        has them."""
        raise NotImplementedError

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Metrics per sample, (B,), from the predicted id at every target position (anything elsewhere)."""
        raise NotImplementedError

    def score_losses(self, loss_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        """What is averaged, (n,) for any n, from the loss at every target position (nan elsewhere); "loss" is one of
        the names."""
        raise NotImplementedError

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics that follow from the means over a whole split (an estimated capacity, say), to be added to them."""
        return {}

    def remarks(self) -> list[str]:
        """What a reader of the test's results has to know besides the configuration, a line each."""
        return []

    @classmethod
    def better(cls, metric: str, value: float, than: float) -> bool:
        """Whether a metric that is ``value`` is better than one that is ``than``, or as good."""
        return value <= than if metric in cls.lower else value >= than

    def places(self, axis: str) -> list[int]:
        """Where one test has values along the axis of one of ``curves``."""
        raise NotImplementedError

    def at(self, **changes: Any) -> Self:
        """The same task with other fields: a stage of a curriculum, or one condition of a test."""
        return type(self)(replace(self.config, **changes))

    def test_conditions(self) -> list[tuple[int | float, Self]]:
        """(x, task) of every value that the test visits. Raises ValueError for one that the task does not allow."""
        axis, values = self.test_axis()
        try:
            return [(value, self.at(**{axis: value})) for value in values]
        except FieldError as error:
            raise FieldError(f"test_{error.name}", error.value, error.expected) from None

    def test_sizes(self, test_size: int | Sequence[int]) -> list[int]:
        """Contexts at every value of the test, of which ``test_size`` has one number for all or one for each. Raises
        ValueError for another count."""
        values = self.test_axis()[1]
        sizes = [test_size] * len(values) if isinstance(test_size, int) else list(test_size)
        if len(sizes) != len(values):
            raise FieldError(
                "test_size", sizes, f"expected one number, or {len(values)} of them, one for each of {values}"
            )
        return sizes

    def x_values(self, x: str) -> list:
        """Where a figure with this x axis has values: those of ``test_<field>``, or the places of a curve; [] for an
        axis that the task does not have.

        A test with several conditions has the curve of its last one.
        """
        if x in self.curves:
            return self.test_conditions()[-1][1].places(x)
        axis, values = self.test_axis()
        return values if x == f"test_{axis}" else []

    def test_axis(self) -> tuple[str, list]:
        """Name of the field that the test varies, and its values (default: that of the task itself)."""
        for name, values in vars(self.config).items():
            if name.startswith("test_"):
                axis = name.removeprefix("test_")
                return axis, values or [getattr(self.config, axis)]
        raise ValueError(f"{type(self).__name__}.Config has no test_<field>")


def exact_match(predicted_BT: Tensor, batch: Batch) -> Tensor:
    """Share of a sample's answers that are right in every token, (B,). An answer is what one read-only segment is
    asked."""
    answers = max(batch.read_only, 1)
    length = batch.ids_BT.shape[1] if not batch.read_only else batch.read_only * (batch.segment_len or 0)
    targets, predicted = (t[:, -length:].unflatten(1, (answers, -1)) for t in (batch.targets_BT, predicted_BT))
    return ((predicted == targets) | (targets == -100)).all(-1).float().mean(-1)
