"""Mappings to dataclasses, strictly: unknown keys, wrong types and failed checks are errors of one line."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_origin

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_memory.plan.errors import ConfigError, dotted
from lit_memory.util.checks import LARGEST, field_name, field_types, first_line, nearest

DEEPEST = 20
"""Levels of lists and mappings in a file; a stage's ``until`` is the sixth."""


def too_deep(error: Exception) -> bool:
    """Whether a text is nested deeper than its parser goes. PyYAML 6.0.4 has a bound of its own."""
    return isinstance(error, RecursionError) or "maximum nesting depth" in str(error)


def problems(value: Any, key: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """(dotted key, message) for everything that no value may be: an interpolation, NaN or infinite, huge, or nested
    without end.

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


def strict(
    cls: type, values: Mapping[str, Any], where: Callable[[str], str], section: str, others: Sequence[type] = ()
) -> Any:
    """An instance of the dataclass ``cls`` from plain values. Values are converted to the types of the fields.

    section: the first part of every dotted key in an error.
    where(key): the origin of the value, for the error.
    others: dataclasses that stand beside ``cls``. A key with a trailing ``?`` is ignored if one of them has the field
        and ``cls`` has not.

    Raises ConfigError for an unknown key, a wrong type, a missing value or a failed check of ``cls``.
    """

    def error(name: str, message: str) -> ConfigError:
        key = dotted(section, name)
        return ConfigError(where(key), key, message)

    names = field_names(cls)
    values = _applicable(values, names, others)
    for name, value in values.items():
        if name not in names:
            raise error(name, _unknown(section, name, names, others))
        for key, problem in problems(value, name):
            raise error(name, f"{key}={problem}")
    settings = _fresh(cls, error)
    for name, value in values.items():
        try:
            settings[name] = converted(cls, name, value)
        except FutureWarning:
            raise error(name, f"wrong type: write text in quotes and numbers without (got {value!r})") from None
        except OmegaConfBaseException as problem:
            raise error(name, _wrong_type(cls, section, name, value, problem)) from None
    for name, value in settings.items():
        if isinstance(value, str) and value == MISSING:
            raise error(name, f"Structured config of type `{cls.__name__}` has missing mandatory value: {name}")
    try:
        return cls(**settings)
    except ValueError as problem:  # from __post_init__
        name = field_name(problem)
        raise error(name if name.partition(".")[0] in names else "", str(problem)) from None


@cache
def field_names(cls: type) -> tuple[str, ...]:
    """The names of a dataclass's fields, in order."""
    return tuple(f.name for f in fields(cls))


def _unknown(section: str, name: str, names: Sequence[str], others: Sequence[type]) -> str:
    """What to do about a key that a dataclass does not have, and perhaps one of the others."""
    elsewhere = any(name in field_names(other) for other in others)
    return f"unknown key; {nearest(name, names)}" + f"; {section}.{name}? counts where it is known" * elsewhere


def _applicable(values: Mapping[str, Any], names: Sequence[str], others: Sequence[type]) -> dict[str, Any]:
    """Values by the names of their fields, without those that are meant for the fields of other classes alone."""
    found = {}
    for key, value in values.items():
        name = str(key).removesuffix("?")  # YAML reads 1 and off as other things than text
        optional = name != str(key)
        if optional and name not in names and any(name in field_names(other) for other in others):
            continue
        found[name] = value
    return found


_CONVERTED: dict[tuple[type, str, str], Any] = {}
"""(class, field, value as text) -> the converted value. The arms and stages of a plan repeat a few values very
often."""


def converted(cls: type, name: str, value: Any) -> Any:
    """A value as the type of a field wants it: 1 becomes 1.0 in a field of floats.

    Raises OmegaConfBaseException for a wrong type, and FutureWarning for a conversion that loses something, such as
    2407.10 to "2407.1".
    """
    key = cls, name, repr(value)
    if key not in _CONVERTED:
        config = OmegaConf.masked_copy(_schema(cls), [name])  # of one field: a copy of all of them takes milliseconds
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            config[name] = float(value) if type(value) is int and _is_float(cls, name) else value
        missing = OmegaConf.is_missing(config, name)
        item = MISSING if missing else config[name]
        _CONVERTED[key] = OmegaConf.to_container(item, throw_on_missing=True) if OmegaConf.is_config(item) else item
    return copy.deepcopy(_CONVERTED[key])


@cache
def _schema(cls: type) -> Any:
    return OmegaConf.structured(cls)


@cache
def _defaults(cls: type) -> dict[str, Any]:
    """The default of every field, converted; ``MISSING`` where there is none."""
    return OmegaConf.to_container(_schema(cls))  # type: ignore[return-value]


def _fresh(cls: type, error: Callable[[str, str], ConfigError]) -> dict[str, Any]:
    """A copy of the defaults. error: for a field of a type that YAML does not have."""
    try:
        return copy.deepcopy(_defaults(cls))
    except (OmegaConfBaseException, NameError) as problem:
        raise error("", f"{cls.__qualname__}: {first_line(problem)}; expected fields of types that YAML has") from None


def _is_float(cls: type, name: str) -> bool:
    return field_types(cls).get(name) is float


def _wrong_type(cls: type, section: str, name: str, value: Any, problem: Exception) -> str:
    """The message of a value that OmegaConf refuses."""
    kind = field_types(cls)[name]
    what = first_line(problem)
    if get_origin(kind) is list and isinstance(value, str | int | float):
        what = f"expected a list, write {section}.{name}=[{value}]"
    elif isinstance(value, bool) and get_origin(kind) is Literal:
        what += "; YAML reads on, off, yes and no as true or false: write them in quotes, on a command line '\"off\"'"
    return f"{what} (got {value!r})"
