"""Objects named as text, so that a lower layer can offer what a higher one defines without importing it."""

from importlib import import_module
from typing import Any


def load(name: str) -> Any:
    """The object that ``"package.module:attribute"`` names. Its module is imported when it is first needed."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
