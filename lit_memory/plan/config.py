"""Typed sections of an experiment file, and the errors of wrong ones. Imports nothing heavy."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_memory.util.checks import FieldError, at_least, field_name, nearest

LONGEST = 1000
"""Characters of a message: some values that it quotes have no end."""
DEEPEST = 20
"""Levels of lists and mappings in a file; a stage's ``until`` is the sixth."""
LARGEST = 2**31 - 1
"""Of any number that counts something, seeds included."""


class ConfigError(Exception):
    """A wrong experiment file or command line, told in one line."""

    def __init__(self, where: str, key: str, message: str) -> None:
        self.parts = where, key, message
        text = ": ".join(part for part in (where, key, message) if part).replace("\n", " ")
        text = "".join(
            c if c.isprintable() else ascii(c)[1:-1] for c in text
        )  # a NUL or an escape code must not reach the terminal
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST - 300]} … {text[-290:]}")


@dataclass
class PaperConfig:
    """Which claim of which paper the experiment tests."""

    title: str
    item: str
    claim: str
    arxiv: str = ""


@dataclass
class TrainConfig:
    """How one run is trained and evaluated. Counts are optimizer steps and contexts."""

    steps: int = 10_000
    """Most steps of a stage; a stage may have its own. 0, where ``init`` names a run: that run's weights are tested as
    they are."""
    batch_size: int = 64
    init: Any = ""
    """What the model's weights come from. A folder, or a name on the Hugging Face hub: a pretrained decoder, which gets
    a fresh memory, or a model of ours. {decoder: A, encoder: B}: such a decoder and, for a model that reads lines, a
    BERT. {run: arm}, or {run: experiment/arm} for an experiment beside this one: the run of that arm with the same
    scale and seed, which is trained first, once for all that start from it.
    Default: all weights are drawn from the seed."""
    lr: float = 3e-4
    weight_decay: float = 1e-3
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """In every stage, from lr to final_lr * lr: in a line (the reference's over twice the steps is final_lr 0.5), or
    along half a cosine."""
    final_lr: float = 0.5
    warmup: float = 0
    """From 1 on: steps at the start of the run. Below 1: a share of every stage's steps, at the start of each."""
    clip_norm: float = 0.0
    """Largest gradient norm; 0: no limit."""
    clip_value: float = 0.0
    """Largest gradient entry; 0: no limit."""
    losses: dict[str, Any] = field(default_factory=dict)
    """Weights of the losses of a model that has several (its ``loss_names``); default: those of its LightningModule."""
    frozen: list[str] = field(default_factory=list)
    """Parts of the model that stay as they are, by the names of their weights: [encoder, decoder.tokens]."""
    bptt: int | None = None
    """Segments that gradients cross; default: all."""
    unroll_schedule: Literal["sequential", "diagonal"] = "sequential"
    stages: list[dict[str, Any]] = field(default_factory=list)
    """Curriculum: each stage is {task.<field>: value, steps: N, batch_size: B, until: {metric: value}}; it ends after N
        steps, or
    earlier, at the first validation on which every metric of ``until`` is reached. Default: one stage on the task as it
    is."""
    valid_every: int = 100
    """Steps between two validations; also the work that a killed run can lose."""
    valid_size: int = 256
    test_size: int | list[int] = 1000
    """One number for all values of the test, or a list with one for each: fewer where contexts are longest."""
    eval_batch_size: int = 250
    test_cuts: list[int] = field(default_factory=list)
    """Tokens of the segments in which a test writes its contexts, where not those of the task: the last one repeats,
    and 0 is all that is left. [0] reads in one pass, [200, 1] token by token after the first 200."""
    timed_steps: int = 0
    """Training steps that are timed after the training at every value of the test, for a report with ``time:
    train_tokens_per_s``."""
    workers: int = 0
    threads: int = 1
    """CPU threads of a run. Part of the key: sums depend on it in the last bit."""
    precision: Literal["32-true", "64-true", "bf16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "cuda"] = "cpu"
    trainer: dict[str, Any] = field(default_factory=dict)
    """More arguments of lightning.Trainer (strategy, devices, num_nodes, accumulate_grad_batches, ...)."""

    def __post_init__(self) -> None:
        named = self.init if isinstance(self.init, dict) else {}
        known = isinstance(self.init, str) or {*named} in ({"decoder", "encoder"}, {"run"})
        if not known or not all(isinstance(name, str) for name in named.values()):
            raise FieldError(
                "init",
                self.init,
                "expected a folder, a name on the hub, {decoder: name, encoder: name}, {run: arm} or {run: experiment/arm}",
            )
        if self.steps or "run" not in named:
            at_least(1, self, "steps")
        at_least(1, self, "batch_size", "bptt", "valid_every", "valid_size", "test_size", "eval_batch_size", "threads")
        for name in ("lr", "weight_decay", "warmup", "clip_norm", "clip_value", "final_lr", "workers", "timed_steps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise FieldError(name, getattr(self, name), "expected a finite number, 0 or more")
        if any(n < 0 for n in self.test_cuts) or 0 in self.test_cuts[:-1]:
            raise FieldError(
                "test_cuts",
                self.test_cuts,
                "expected numbers of tokens, of which the last may be 0, for all that is left",
            )
        if self.clip_norm and self.clip_value:
            raise FieldError("clip_value", self.clip_value, "expected 0 where clip_norm is set; choose one")


@contextmanager
def naming_changes(file: str, overrides: Sequence[str]) -> Iterator[None]:
    """An error that blames the file also says what the command line has changed in it."""
    try:
        yield
    except ConfigError as error:
        where, key, message = error.parts
        if not overrides or not where.startswith(file):
            raise
        place = where.removesuffix(")") + (", " if where.endswith(")") else " (")
        raise ConfigError(f"{place}with {' '.join(overrides)})", key, message) from None


def problems(value: Any, key: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """(dotted key, message) of what no value of a YAML may be: an interpolation, nan or infinite, huge, nested without
    end.

    OmegaConf takes ``${...}`` for an order to look something up, in the environment for example; an experiment must be
    what its file says, on every machine.
    """
    if depth > DEEPEST:
        yield key, f"nested more than {DEEPEST} deep"
    elif isinstance(value, str) and "${" in value:
        yield key, f"{value!r}: '${{' asks for an interpolation; expected the value itself"
    elif isinstance(value, float) and not math.isfinite(value):
        yield key, f"{value}: expected a finite number"
    elif isinstance(value, int) and abs(value) > LARGEST:
        yield key, f"{str(value) if abs(value) < 1e20 else 'a huge number'}: expected a number of at most {LARGEST}"
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from problems(name, f"{key}.{name}".lstrip("."), depth + 1)
            yield from problems(item, f"{key}.{name}".lstrip("."), depth + 1)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from problems(item, f"{key}[{i}]", depth + 1)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def strict(
    cls: type, values: Mapping[str, Any], where: Callable[[str], str], section: str, others: Sequence[type] = ()
) -> Any:
    """An instance of the dataclass ``cls``. A key with a trailing ``?`` is left out where ``cls`` does not have it, but
    one of ``others`` has to.

    Raises ConfigError for an unknown key, a wrong type or a failed check; ``where(key)`` tells where the value came
    from.
    """
    names = [f.name for f in fields(cls)]
    values = {str(k): v for k, v in values.items()}  # YAML reads 1 and off as other things than text
    elsewhere = {f"{f.name}?" for other in others for f in fields(other)} - {f"{name}?" for name in names}
    values = {k.removesuffix("?"): v for k, v in values.items() if k not in elsewhere}
    floats = {f.name for f in fields(cls) if f.type in (float, "float")}
    lists = {f.name for f in fields(cls) if str(f.type).startswith("list[")}

    def error(name: str, message: str) -> ConfigError:
        key = f"{section}.{name}" if name else section
        return ConfigError(where(key), key, message)

    for name in values:
        if name not in names:
            raise error(name, f"unknown key; {nearest(name, names)}")
        for key, problem in problems(values[name], name):
            raise error(name, f"{key}={problem}")
    config = OmegaConf.structured(cls)
    for name, value in values.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)  # conversions, such as 2407.10 to "2407.1"
                config[name] = float(value) if name in floats and type(value) is int else value
        except FutureWarning:
            raise error(name, f"wrong type: write text in quotes and numbers without (got {value!r})") from None
        except OmegaConfBaseException as problem:
            alone = name in lists and isinstance(value, str | int | float)
            what = f"expected a list, write {section}.{name}=[{value}]" if alone else first_line(problem)
            raise error(name, f"{what} (got {value!r})") from None
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as problem:
        raise error(str(problem.key or ""), first_line(problem)) from None
    except ValueError as problem:  # from __post_init__
        name = field_name(problem)
        raise error(name if name in names else "", str(problem)) from None
