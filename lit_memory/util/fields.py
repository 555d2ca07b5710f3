"""Dataclass fields with a history. Standard library only."""

from dataclasses import MISSING, field, fields
from functools import cache
from typing import Any


def added(default: Any, before: Any = MISSING) -> Any:
    """A field that joined its configuration after the first runs were made.

    before: what was done before the field existed; default: ``default``. A run with this value keeps the key that it
        had without the field.
    """
    metadata = {"added": default if before is MISSING else before}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@cache
def added_fields(cls: type) -> dict[str, Any]:
    """The fields of a dataclass that are declared with ``added``, with the value for what was done before."""
    return {f.name: f.metadata["added"] for f in fields(cls) if "added" in f.metadata}
