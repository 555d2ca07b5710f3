"""Signatures and docstrings of classes that take the fields of a ``Config`` as keyword arguments."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from inspect import Parameter, Signature
from itertools import pairwise
from typing import Any

ENTRY = re.compile(r"^(\w+): ", re.MULTILINE)
"""Where a class docstring begins to describe an argument: the name and a colon at the start of a line."""


class KeywordSignature:
    """The ``__signature__`` of a class whose ``__init__`` takes ``**options``: every argument, with its default.

    It is computed when it is read, so that a class costs nothing and a subclass has a signature of its own.
    """

    def __get__(self, instance: Any, owner: Any) -> Signature | None:
        if instance is not None or owner.config_class() is None:
            return None  # inspect goes on as if there were no ``__signature__``
        return Signature(list(arguments(owner).values()))


def arguments(cls: Any) -> dict[str, Parameter]:
    """Keyword arguments of a class by name: those of its ``__init__`` methods, loss weights, fields of its
    ``Config``."""
    own: dict[str, Parameter] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base):
            found = inspect.signature(base.__init__).parameters.values()
            own |= {p.name: p for p in found if p.kind is Parameter.KEYWORD_ONLY}
    for name, weight in getattr(cls, "default_losses", {}).items():
        own[f"{name}_loss"] = keyword(f"{name}_loss", weight, float)
    config = cls.config_class()
    for field in fields(config) if config else ():  # type: ignore[arg-type]
        own.setdefault(field.name, keyword(field.name, default_of(field), field.type))
    return own


def settings(cls: Any) -> set[str]:
    """The keyword arguments of a class that are no fields of its ``Config``."""
    return set(arguments(cls)) - {field.name for field in fields(cls.config_class())}


def keyword(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def default_of(field: Field) -> Any:
    """Default of a dataclass field; ``Parameter.empty`` for one that has to be given."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default


def docstring(cls: Any, summary: str) -> str:
    """``summary``, then every keyword argument as in numpy's docstrings: type, default, and what is written about
    it."""
    texts = dict(entry for base in reversed(cls.__mro__) for entry in described(base))
    texts |= {name: text for name, text in field_docs(cls.config_class()).items() if name not in texts}
    lines = [summary, "", "Arguments, all by keyword:", ""]
    for name, parameter in arguments(cls).items():
        lines.append(f"{name} :{str(parameter).removeprefix(name).removeprefix(':')}")
        if name in texts:
            lines.append(textwrap.indent(texts[name], "    "))
    return "\n".join(lines)


def prose(doc: str | None) -> str:
    """The part of a docstring before its description of arguments."""
    return ENTRY.split(inspect.cleandoc(doc or ""), maxsplit=1)[0].strip()


def described(cls: type) -> Iterator[tuple[str, str]]:
    """(argument, text) of every entry ``argument: text`` in a class docstring; a text goes on in indented lines."""
    if not hasattr(cls, "config_class"):
        return  # a class of Lightning or torch
    _, *parts = ENTRY.split(inspect.cleandoc(vars(cls).get("__doc__") or ""))
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        first, *rest = text.split("\n\n")[0].splitlines()
        yield name, "\n".join([first, *(line.strip() for line in rest)])


@cache
def field_docs(config: type | None) -> dict[str, str]:
    """Field -> the docstring below it, of a dataclass and its bases; {} where Python has no source."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__ if config else ()):
        if not is_dataclass(base):
            continue
        try:
            source = inspect.getsource(base)
        except OSError:
            continue
        (tree,) = ast.parse(textwrap.dedent(source)).body
        for field, text in pairwise(getattr(tree, "body", [])):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text(text):
                found[field.target.id] = inspect.cleandoc(text.value.value)
    return found


def is_text(node: Any) -> bool:
    """Whether a statement is a string and nothing else."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
