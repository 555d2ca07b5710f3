"""What a benchmark is made of."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

PROJECT = Path(__file__).resolve().parents[1]
Settings = dict[str, Any]
Placed = TypeVar("Placed", bound=Any)


class Timed(NamedTuple):
    """One piece of work, ready to be repeated."""

    run: Callable[[], object]
    tokens: int
    """Tokens that one run reads."""


class Skipped(Exception):
    """A way cannot be measured here; says why."""


Way = Callable[[Settings, bool], Timed]
"""(settings, tiny) -> the work; settings: those of the work, and the ``device``; tiny: at sizes that show that it runs,
for the tests. Raises Skipped."""


@dataclass(frozen=True)
class Work:
    """The same work, done in several ways."""

    ways: Mapping[str, Way]
    """Name -> how it is done; the first is ours, and another commit is compared by it."""
    settings: Callable[[], Settings] = dict
    """Settings of all ways, from this commit's code: plain data, as another commit gets them too."""


def need(package: str) -> None:
    """Raise Skipped unless a package is installed."""
    if importlib.util.find_spec(package) is None:
        raise Skipped(f"{package} is not installed")


def need_file(variable: str, what: str) -> Path:
    """The file that an environment variable names. Raises Skipped."""
    path = Path(os.environ.get(variable, ""))
    if not path.is_file():
        raise Skipped(f"${variable} names no file; expected {what}")
    return path


def device_of(settings: Settings) -> str:
    """The device on which a way does its work."""
    return settings.get("device", "cpu")


def placed(thing: Placed, settings: Settings) -> Placed:
    """A model, a tensor or a batch on the device of the work."""
    return thing.to(device_of(settings))


def known(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a dataclass has fields for: an older commit lacks some."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in values.items() if name in names}
