"""Checks that configurations share: ``ValueError("name=value: expected ...")``, the form that ``config.strict`` finds
the field in.

Standard library only; a field that is None passes.
"""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin


def at_least(least: int, config: Any, *names: str) -> None:
    """Raise ValueError for a field of ``config`` that is, or in a list has, less than ``least``: 1 for a count, 0 for a
    size or a rate."""
    for name in names:
        value = getattr(config, name)
        if any(n is not None and n < least for n in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{name}={value}: expected {f'at least {least}' if least else '0 or more'}")


def one_of(config: Any) -> None:
    """Raise ValueError for a ``Literal`` field whose value is none of those that it lists."""
    for field in fields(config):
        if get_origin(field.type) is Literal and getattr(config, field.name) not in get_args(field.type):
            raise ValueError(
                f"{field.name}={getattr(config, field.name)!r}: expected one of {', '.join(get_args(field.type))}"
            )
