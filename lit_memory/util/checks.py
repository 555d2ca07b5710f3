"""Checks that configurations share, and the error of a field that fails one. Standard library only."""

import difflib
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST = 2**31 - 1
"""Largest whole number of a field that comes from a file."""

MOST_LAYERS = 1000

SHOWN = 6
"""Names in a message."""


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


def preview(names: Iterable[str]) -> str:
    """The first names of a sorted list, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def at_least(least: int, config: Any, *names: str) -> None:
    """Raise FieldError for a field of ``config`` that is below ``least`` or not finite, or a list with such an item.
    None passes.

    least: 1 for a count, 0 for a size or a rate.
    """
    for name in names:
        value = getattr(config, name)
        if any(n is not None and not least <= n < math.inf for n in (value if isinstance(value, list) else [value])):
            raise FieldError(name, value, f"expected {f'at least {least}' if least else '0 or more'}")


def check_least(least: int, **arguments: float | None) -> None:
    """Raise FieldError for an argument below ``least``. None passes."""
    for name, value in arguments.items():
        if value is not None and value < least:
            raise FieldError(name, value, f"expected {least} or more")


def check_cuts(name: str, lengths: Sequence[int], task: Any = None) -> None:
    """Raise FieldError for ``lengths`` in which contexts, or those of ``task``, cannot be cut (``Batch.recut``). name:
    of their field."""
    if task is not None and lengths and not getattr(task, "any_segments", False):
        raise FieldError(name, lengths, "the contexts of this task cannot be cut anew; expected none")
    if any(n < 0 for n in lengths) or 0 in lengths[:-1]:
        expected = "expected numbers of tokens, of which the last may be 0, for all that is left"
        raise FieldError(name, lengths, expected)


def check_layers(config: Any, *names: str) -> None:
    """Raise FieldError for a number of layers that is no plan but a loop without end."""
    for name in names:
        if getattr(config, name) > MOST_LAYERS:
            raise FieldError(name, getattr(config, name), f"expected at most {MOST_LAYERS}")


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Field of a dataclass -> its annotation, in a file with ``from __future__ import annotations`` as well."""
    try:
        found = get_type_hints(cls)
    except NameError:  # of what only type checkers import
        found = {}
    return {field.name: found.get(field.name, field.type) for field in fields(cls)}


def one_of(config: Any) -> None:
    """Raise FieldError for a ``Literal`` field whose value is none of those that it lists."""
    for name, kind in field_types(type(config)).items():
        value = getattr(config, name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise FieldError(name, value, f"expected one of {', '.join(get_args(kind))}")


def check_types(cls: type, values: Mapping[str, Any]) -> None:
    """Raise FieldError for a value from a file whose type is not that of its field in the dataclass ``cls``."""
    for name, kind in field_types(cls).items():
        if name in values and not fits(values[name], kind):
            raise FieldError(name, values[name], f"expected {type_in_words(kind)}", shown=reprlib.repr(values[name]))


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of a file has the type of an annotation. A whole number is a number, too; True is neither, and
    numbers are finite and at most ``LARGEST`` where they are whole."""
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, each) for each in get_args(kind))
    if get_origin(kind) is Literal:
        return isinstance(value, str | bool) and value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(fits(item, *get_args(kind)) for item in value)
    if kind is int or (kind is float and type(value) is int):
        return type(value) is int and abs(value) <= LARGEST
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    return kind is Any or isinstance(value, kind)


def type_in_words(kind: Any) -> str:
    """An annotation as a user reads it."""
    words = {int: f"a whole number of at most {LARGEST}", float: "a finite number", bool: "true or false"}
    words |= {str: "a text", NoneType: "null"}
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(type_in_words, get_args(kind)))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is list:
        return f"a list, each {type_in_words(*get_args(kind))}"
    return words.get(kind, str(kind))


def require(condition: bool, message: str) -> None:
    """Raise AssertionError, with or without ``python -O``."""
    if not condition:
        raise AssertionError(message)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its type if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
