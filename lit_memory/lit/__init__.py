"""Lightning: a module for every registered model, and a data module for every registered task.

``LitARMT`` and ``AssociativeRetrievalData`` follow from the registry. A class is made when it is first used, so that
importing this package imports no model and no task.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from lit_memory.lit.data import LitData
from lit_memory.lit.describe import docstring, prose
from lit_memory.lit.lines import LitLines
from lit_memory.lit.modules import LitMemory
from lit_memory.registry import lit_names, load_class

_WRITTEN = {
    "LitLarimar": "lit_memory.lit.lines",
    "LitMemReasoner": "lit_memory.lit.lines",
    "BABILongData": "lit_memory.lit.babilong",
    "BabiData": "lit_memory.lit.babilong",
}
"""Classes that do more than their base, and where they are written; all others are made."""


@cache
def lit_class(name: str) -> type:
    """The Lightning class with a public name."""
    if name in _WRITTEN:
        written: Any = getattr(import_module(_WRITTEN[name]), name)
        written.__doc__ = docstring(written, prose(written.__doc__))
        return written
    kind, registered = lit_names()[name]
    target: Any = load_class(kind, registered)
    namespace: dict[str, Any] = {"__module__": __name__, f"{kind}_name": registered}
    if kind == "task":
        base, what = LitData, "LightningDataModule"
    elif losses := getattr(target, "loss_names", ()):
        base, what = LitLines, "LightningModule"
        namespace["default_losses"] = {loss: float(loss == "answer") for loss in losses}
    else:
        base, what = LitMemory, "LightningModule"
    made: Any = type(name, (base,), namespace)
    made.__doc__ = docstring(made, f"{what} of ``{target.__name__}``.\n\n{prose(target.__doc__)}")
    return made


class _Classes(Mapping):
    """Registered name -> Lightning class, which is made when it is looked up."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def names(self) -> dict[str, str]:
        """Registered name -> public name."""
        return {registered: name for name, (kind, registered) in lit_names().items() if kind == self.kind}

    def __getitem__(self, registered: str) -> Any:
        return lit_class(self.names[registered])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


LIT_MODULES: Mapping[str, type[LitMemory]] = _Classes("model")
"""Registered name of an architecture -> its LightningModule."""
LIT_DATA: Mapping[str, type[LitData]] = _Classes("task")
"""Registered name of a task -> its LightningDataModule."""


def __getattr__(name: str) -> type:
    if name not in _WRITTEN and name not in lit_names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lit_class(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *lit_names(), *_WRITTEN})
