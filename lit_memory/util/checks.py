"""Checks that configurations share, and the error of a field that fails one. Standard library only."""

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin


class FieldError(ValueError):
    """A field or an argument has a value that it may not have.

    name: the field. value: what it has. expected: what was expected, in words; with ``shown`` the text of the value
    where its ``repr`` is not what a user should see.
    """

    def __init__(self, name: str, value: Any, expected: str, shown: str | None = None) -> None:
        super().__init__(f"{name}={repr(value) if shown is None else shown}: {expected}")
        self.name, self.value, self.expected = name, value, expected


def field_name(error: Exception) -> str:
    """The field that an error is about; "" where it does not say."""
    return error.name if isinstance(error, FieldError) else ""


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest valid one, or all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(str(name), valid, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(valid) or '(none)'}"


def at_least(least: int, config: Any, *names: str) -> None:
    """Raise FieldError for a field of ``config`` that is below ``least``, or a list with such an item. None passes.

    least: 1 for a count, 0 for a size or a rate.
    """
    for name in names:
        value = getattr(config, name)
        if any(n is not None and n < least for n in (value if isinstance(value, list) else [value])):
            raise FieldError(name, value, f"expected {f'at least {least}' if least else '0 or more'}")


def one_of(config: Any) -> None:
    """Raise FieldError for a ``Literal`` field whose value is none of those that it lists."""
    for field in fields(config):
        value = getattr(config, field.name)
        if get_origin(field.type) is Literal and value not in get_args(field.type):
            raise FieldError(field.name, value, f"expected one of {', '.join(get_args(field.type))}")
