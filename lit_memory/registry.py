"""Names to classes, and keyword arguments to configurations. Imports nothing heavy by itself."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from lit_memory.models import MODELS
from lit_memory.tasks import TASKS
from lit_memory.util.checks import FieldError, nearest

REGISTRIES = {"model": MODELS, "task": TASKS}


def load_class(kind: str, name: str) -> type:
    """The class registered as ``name``; ``kind`` is "model" or "task". Raises KeyError with the nearest name."""
    registry = REGISTRIES[kind]
    if name not in registry:
        raise KeyError(f"unknown {kind} {name!r}; {nearest(name, registry)}")
    module, _, attribute = registry[name].partition(":")
    return getattr(import_module(module), attribute)


def build_config(cls: type, values: Mapping[str, Any]) -> Any:
    """``cls(**values)``. Raises TypeError with the nearest field for an unknown one."""
    names = [f.name for f in fields(cls)]
    for name in values:
        if name not in names:
            raise TypeError(f"unknown argument {name!r}; {nearest(name, names)}")
    return cls(**values)


def build(kind: str, settings: Mapping[str, Any]) -> Any:
    """The model or task that a resolved section describes: its ``name`` and the fields of its ``Config``."""
    cls = load_class(kind, settings["name"])
    return cls(cls.Config(**{k: v for k, v in settings.items() if k != "name"}))


def sketch(settings: Mapping[str, Any]) -> Any:
    """``build`` of a model without allocating its weights."""
    import torch

    with torch.device("meta"):
        return build("model", settings)


def model_size(settings: Mapping[str, Any]) -> dict[str, int]:
    """Parameters, floats of the fresh state and those that every segment adds, without allocating the weights."""
    model = sketch(settings)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "state_floats": model.state_floats(model.init_state(1)),
        "state_growth": model.state_growth,
    }


def weights_of(model: Any, parts: Iterable[str]) -> dict[str, Any]:
    """The weights in parts of a model, "encoder" or "decoder.tokens", by name. Raises ValueError for a part that has
    none."""
    named, found = dict(model.named_parameters()), {}
    for part in parts:
        own = {name: weight for name, weight in named.items() if f"{name}.".startswith(f"{part}.")}
        if not own:
            known = dict.fromkeys(".".join(name.split(".")[:depth]) for depth in (1, 2) for name in named)
            raise FieldError("frozen", part, f"the model has no weights of that name; {nearest(part, known)}")
        found |= own
    return found
