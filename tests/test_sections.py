"""Typed sections: strict merging, the checks of TrainConfig, and errors of one line."""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Literal

import pytest

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.sections import PaperConfig, TrainConfig
from lit_memory.plan.strict import strict
from lit_memory.util.checks import FieldError, first_line


@dataclass
class Section:
    """One field of each kind that the sections of an experiment have."""

    count: int = 1
    share: float = 0.5
    flag: bool = False
    word: str = ""
    mode: Literal["raw", "off"] = "raw"
    limit: int | None = None
    items: list[int] = field(default_factory=lambda: [3])

    def __post_init__(self) -> None:
        if self.count < 1:
            raise FieldError("count", self.count, "expected at least 1")
        if self.count > 9:
            raise ValueError("too many\nof them")


@dataclass
class Other:
    extra: int = 0


def make(others=(), **values):
    return strict(Section, values, lambda key: f"<{key}>", "part", others)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        (
            {"count": 2, "mode": "off", "limit": 4, "items": [1, 2]},
            {"count": 2, "mode": "off", "limit": 4, "items": [1, 2]},
        ),
        ({"share": 1}, {"share": 1.0}),
        ({"limit": None, "items": []}, {"limit": None, "items": []}),
        ({"count?": 2}, {"count": 2}),
        ({"extra?": 2}, {}),
        ({"count": 2, "count?": 3}, {"count": 3}),
    ],
)
def test_strict_builds_plain_instances(values, expected):
    built = make([Other], **values)
    assert dataclasses.asdict(built) == dataclasses.asdict(Section()) | expected
    assert type(built) is Section and type(built.items) is list and type(built.share) is float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuont": 2}, "<part.cuont>: part.cuont: unknown key; did you mean 'count'?"),
        ({"zzz": 2}, "<part.zzz>: part.zzz: unknown key; expected one of count, share, flag, word, mode, limit, items"),
        ({"ekstra?": 2}, "<part.ekstra>: part.ekstra: unknown key; expected one of"),
        ({1: 2}, "<part.1>: part.1: unknown key; expected one of"),
        (
            {"count": "two"},
            "<part.count>: part.count: Value 'two' of type 'str' could not be converted to Integer (got 'two')",
        ),
        ({"count": 1.5}, "<part.count>: part.count: Value '1.5'"),
        ({"count": True}, "<part.count>: part.count: Value 'True'"),
        ({"count": None}, "<part.count>: part.count: field 'count' is not Optional"),
        ({"flag": "maybe"}, "<part.flag>: part.flag: Value 'maybe' is not a valid bool"),
        ({"word": 2407.1}, "<part.word>: part.word: wrong type: write text in quotes and numbers without (got 2407.1)"),
        ({"mode": "Raw"}, "<part.mode>: part.mode: Invalid value 'Raw', expected one of ['raw', 'off']"),
        ({"mode": False}, "<part.mode>: part.mode: Invalid value 'False', expected one of ['raw', 'off']"),
        ({"items": 3}, "<part.items>: part.items: expected a list, write part.items=[3] (got 3)"),
        ({"items": {"a": 3}}, "<part.items>: part.items: Invalid value assigned: dict is not a ListConfig"),
        ({"items": ["x"]}, "<part.items>: part.items: Value 'x' of type 'str' could not be converted to Integer"),
        ({"count": 0}, "<part.count>: part.count: count=0: expected at least 1"),
        ({"count": 10}, "<part>: part: too many of them"),
        (
            {"count": "???"},
            "<part.count>: part.count: Structured config of type `Section` has missing mandatory value: count",
        ),
        (
            {"count": "${nothing}"},
            "part.count: count='${nothing}': '${' asks for an interpolation; expected the value itself",
        ),
    ],
)
def test_strict_names_the_place_and_the_key(values, message):
    with pytest.raises(ConfigError) as caught:
        strict(Section, values, lambda key: f"<{key}>", "part", [Other])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_fields_are_named():
    with pytest.raises(ConfigError, match=r"^x\.yaml: paper\.item: .*missing mandatory value: item"):
        strict(PaperConfig, {"title": "t", "claim": "c"}, lambda key: "x.yaml", "paper")


def test_a_config_error_is_one_line():
    assert str(ConfigError("command\nline", "a\nb", "c\nd")) == "command line: a b: c d"
    assert str(ConfigError("x.yaml", "", "no such file")) == "x.yaml: no such file"
    assert first_line(ValueError("\n one\ntwo")) == "one" and first_line(ValueError()) == "ValueError"


AT_LEAST_ONE = ("steps", "batch_size", "valid_every", "valid_size", "test_size", "eval_batch_size", "threads", "bptt")
NOT_NEGATIVE = ("lr", "weight_decay", "warmup", "clip_norm", "clip_value", "final_lr", "workers")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [(name, value, "at least 1") for name in AT_LEAST_ONE for value in (0, -1)]
    + [(name, value, "a finite number, 0 or more") for name in NOT_NEGATIVE for value in (-1, math.nan, math.inf)],
)
def test_numbers_of_the_training_are_checked(name, value, expected):
    with pytest.raises(ValueError, match=rf"^{name}={value}: expected {expected}"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize("value", [[0], [8, -1]])
def test_sizes_of_the_test_are_checked(value):
    with pytest.raises(ValueError, match=rf"^test_size={re.escape(str(value))}: expected at least 1"):
        TrainConfig(test_size=value)
    assert TrainConfig(test_size=[8, 1]).test_size == [8, 1]


def test_only_one_kind_of_clipping():
    with pytest.raises(ValueError, match=r"^clip_value=0\.5: .*choose one"):
        TrainConfig(clip_norm=1.0, clip_value=0.5)


def test_contexts_of_a_step_that_nobody_times():
    with pytest.raises(ValueError, match=r"^timed_contexts=4: expected 0 where timed_steps is 0"):
        TrainConfig(timed_contexts=4)


@pytest.mark.parametrize("name", ["cuts", "test_cuts"])
@pytest.mark.parametrize("value", [[-1], [0, 1], [4, 0, 0]])
def test_segment_lengths_are_checked(value, name):
    with pytest.raises(
        ValueError, match=rf"^{name}={re.escape(str(value))}: expected numbers of tokens, of which the last may be 0"
    ):
        TrainConfig(**{name: value})
    for right in ([200, 1], [4, 0]):
        assert getattr(TrainConfig(**{name: right}), name) == right


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"lr": 0.0, "weight_decay": 0.0, "bptt": 1, "workers": 0},
        {"lr": 1e30, "clip_norm": 1.0},
        {"clip_value": 1.0},
    ],
)
def test_what_the_training_allows(values):
    assert dataclasses.asdict(TrainConfig(**values)).items() >= values.items()
