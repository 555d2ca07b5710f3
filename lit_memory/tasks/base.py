"""The base class of all tasks. What only some of them need is in ``mixins.py``.

Shape suffixes: B batch, T tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from numpy.random import PCG64, Generator
from torch import Tensor

from lit_memory.tasks.batch import Batch
from lit_memory.util.checks import FieldError
from lit_memory.util.seeds import mixed_seed


def generator(seed: int, split: str, step: int) -> torch.Generator:
    """CPU generator that depends on its arguments alone: the same numbers on any machine and in any process."""
    return torch.Generator().manual_seed(mixed_seed(seed, split, step))


def numpy_generator(seed: int, split: str, step: int) -> Generator:
    """``generator`` for what numpy draws."""
    return Generator(PCG64(mixed_seed(seed, split, step)))


class Task:
    """A sampler without state, and the metrics of its samples.

    ``batch(seed, split, step, size)`` returns the same bits for the same arguments, whatever was drawn before.
    ``score`` returns one value per sample; a metric is their mean over a split, exact for batches of any size.
    ``summarize`` adds metrics that are computed from these means.

    ``Config`` is a dataclass with the task's settings. Its ``test_<field>`` lists the values of ``<field>`` that the
    test visits; ``test_<field>`` is then an x axis of figures.
    """

    Config: ClassVar[type]
    metrics: ClassVar[tuple[str, ...]] = ("exact_match",)
    """Metrics of validation and test, from ``score`` or ``summarize``. The first one selects grid points."""
    minimized_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics for which less is better."""
    derived: ClassVar[tuple[str, ...]] = ()
    """Further metrics that ``summarize`` adds to a test."""
    tells_answers: ClassVar[bool] = True
    """Whether the ids have the targets at their places, so that later tokens see them."""
    visible: ClassVar[tuple[str, ...]] = ()
    """The views (``util.views.VIEWS``) that a report can ask for: "depth" of samples that tell it in ``Batch.meta``."""

    sources: ClassVar[Mapping[str, Collection[str]]] = {}
    """Fields that may name a file or a folder of the user -> the names that mean something else there. What it holds
    is part of a run's key."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to ``vocab_size - 1``."""
        raise NotImplementedError(f"{type(self).__name__} lacks vocab_size")

    @property
    def segment_len(self) -> int | None:
        """Tokens per segment if the task fixes it, else None."""
        raise NotImplementedError(f"{type(self).__name__} lacks segment_len")

    @property
    def written(self) -> int:
        """Segments of the longest sample that a model writes; read-only segments do not count."""
        raise NotImplementedError(f"{type(self).__name__} lacks written")

    @property
    def tokens(self) -> int:
        """Tokens of the longest sample, in whole segments."""
        return (self.written + 1) * (self.segment_len or 1)

    @property
    def material(self) -> str:
        """What the test reads that no program made, for the evidence level of a report: "text" (books, articles) or
        "data" (measurements); "" where all of it is generated."""
        return ""

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        """Draw ``size`` samples of ``split``: "train", "valid" or "test"."""
        raise NotImplementedError(f"{type(self).__name__} lacks batch")

    def check_files(self) -> None:
        """Read the files on this machine that the settings name, so that wrong ones are told before a run starts; fetch
        and write nothing. Raises ValueError and FileNotFoundError, in one line. Default: there are none."""

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Metrics per sample, each (B,), from the predicted id at every scored position (any id elsewhere)."""
        raise NotImplementedError(f"{type(self).__name__} lacks score")

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics computed from the means over a whole split, an estimated capacity for example. Default: none."""
        return {}

    def remarks(self) -> list[str]:
        """Caveats for readers of the test's results that the configuration does not show, one line each."""
        return []

    @classmethod
    def better(cls, metric: str, value: float, than: float) -> bool:
        """Whether ``value`` of a metric is better than another one or equal to it."""
        return value <= than if metric in cls.minimized_metrics else value >= than

    def at(self, **changes: Any) -> Self:
        """Copy of the task with other settings: a stage of a curriculum, or one condition of a test."""
        return type(self)(replace(self.config, **changes))

    def test_axis(self) -> tuple[str, list]:
        """Name of the field that the test varies, and its values. Default: the task's own value alone."""
        for name, values in vars(self.config).items():
            if name.startswith("test_"):
                axis = name.removeprefix("test_")
                return axis, values or [getattr(self.config, axis)]
        example = "such as test_length: list[int] = field(default_factory=list): what a test visits"
        raise ValueError(f"{type(self).__name__}.Config has no test_<field>; expected one, {example}")

    def test_conditions(self) -> list[tuple[int | float, Self]]:
        """Pairs (x, task) for every value of the test's axis. Raises FieldError for a value that is not allowed."""
        axis, values = self.test_axis()
        try:
            return [(value, self.at(**{axis: value})) for value in values]
        except FieldError as error:
            raise FieldError(f"test_{error.name}", error.value, error.expected) from None

    def test_sizes(self, test_size: int | Sequence[int]) -> list[int]:
        """Number of samples per test condition, from one number for all conditions or one for each.

        Raises FieldError for a list of another length.
        """
        values = self.test_axis()[1]
        sizes = [test_size] * len(values) if isinstance(test_size, int) else list(test_size)
        if len(sizes) != len(values):
            raise FieldError(
                "test_size", sizes, f"expected one number, or {len(values)} of them, one for each of {values}"
            )
        return sizes

    def x_values(self, x: str) -> list:
        """Values of an x axis ``test_<field>``; [] for an axis that the task does not have."""
        axis, values = self.test_axis()
        return values if x == f"test_{axis}" else []
