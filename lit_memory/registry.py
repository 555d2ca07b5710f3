"""Names to classes, and keyword arguments to configurations. Imports nothing heavy by itself.

Classes are named as text, so that a wrong name in a YAML fails before torch is imported.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from lit_memory.util.checks import FieldError, nearest
from lit_memory.util.names import load

MODELS = {
    "transformer": "lit_memory.models.transformer:Transformer",
    "xl": "lit_memory.models.xl:XL",
    "rmt": "lit_memory.models.rmt:RMT",
    "rmt_xl": "lit_memory.models.rmt_xl:RMTXL",
    "rmt_r": "lit_memory.models.rmt_r:RMTR",
    "prmt": "lit_memory.models.prmt:PRMT",
    "armt": "lit_memory.models.armt:ARMT",
    "tarm": "lit_memory.models.tarm:TARM",
    "larimar": "lit_memory.models.episodic.larimar:Larimar",
    "memreasoner": "lit_memory.models.episodic.memreasoner:MemReasoner",
    "mamba": "lit_memory.models.mamba:Mamba",
    "rwkv": "lit_memory.models.rwkv:RWKV",
    "lmm": "lit_memory.models.titans.models:LMM",
    "mac": "lit_memory.models.titans.models:MAC",
    "mag": "lit_memory.models.titans.models:MAG",
    "mal": "lit_memory.models.titans.models:MAL",
}
"""Name of an architecture -> its class, built as ``Model(Model.Config(...))``. A new one needs no other line."""
TASKS = {
    "algorithmic": "lit_memory.tasks.algorithmic:Algorithmic",
    "associative_retrieval": "lit_memory.tasks.associative_retrieval:AssociativeRetrieval",
    "babilong": "lit_memory.tasks.babilong:BABILong",
    "needle": "lit_memory.tasks.needle:Needle",
    "memreasoner": "lit_memory.tasks.memreasoner:BabiEpisodes",
    "variable_tracking": "lit_memory.tasks.variable_tracking:VariableTracking",
    "passkey": "lit_memory.tasks.passkey:Passkey",
    "dna": "lit_memory.tasks.dna:DNA",
    "language_modeling": "lit_memory.tasks.language_modeling:LanguageModeling",
    "quadratic": "lit_memory.tasks.quadratic:Quadratic",
    "time_series": "lit_memory.tasks.time_series:TimeSeries",
}
"""Name of a task -> its class, built as ``Task(Task.Config(...))``."""
REGISTRIES = {"model": MODELS, "task": TASKS}


class View(NamedTuple):
    """A figure of what a memory does (``report.memory``). Models and tasks name those that they allow (``visible``)."""

    measured: str
    """What measures it on the longest test."""
    drawn: str
    """What draws it, from these numbers alone."""
    words: str
    """What it shows, in a sentence."""
    unknown: str = "the weights are gone"
    """Why it may not be known of a finished run."""
    weights: bool = True
    """Whether it needs the trained weights."""
    every_seed: bool = True
    """Without: the first seed stands for all."""


VIEWED = 8
"""Samples of the test that a view shows, or averages over."""
VIEWS = {
    "norm": View(
        "lit_memory.lit.views:Norm",
        "lit_memory.report.views:norm",
        f"Norm of the memory along the context, mean of {VIEWED} test contexts",
    ),
    "overlap": View(
        "lit_memory.lit.views:Overlap",
        "lit_memory.report.views:overlap",
        f"Cosine of the keys phi(k) of a segment with all keys before it, mean of {VIEWED} test contexts",
    ),
    "gates": View(
        "lit_memory.lit.views:Gates",
        "lit_memory.report.views:gates",
        f"Gates of what is written along the context, mean of {VIEWED} test contexts",
    ),
    "map": View(
        "lit_memory.lit.views:Map",
        "lit_memory.report.maps:matrices",
        "The associative matrix A of the last layer after one test context: features of keys by channels of values",
        every_seed=False,
    ),
    "hops": View(
        "lit_memory.lit.views:Hops",
        "lit_memory.report.maps:hops",
        f"The line that every hop retrieves, in {VIEWED} test contexts",
        every_seed=False,
    ),
    "depth": View(
        "lit_memory.lit.views:Depth",
        "lit_memory.report.views:depth",
        "Answers by the depth of the fact in the longest context of the test",
        "the samples do not tell where the fact lies, or have no scores of their own",
        weights=False,
    ),
}
"""Name of a view -> where it is measured and drawn."""
DATA_NAMES = {"memreasoner": "MemReasonerData"}
"""Public names of data modules that are not made from the name of their task's class."""


def lit_names() -> dict[str, tuple[str, str]]:
    """Public name of every Lightning class -> kind and registered name: "LitARMT" -> ("model", "armt")."""
    modules = {f"Lit{class_name(target)}": ("model", name) for name, target in MODELS.items()}
    data = {DATA_NAMES.get(name, f"{class_name(target)}Data"): ("task", name) for name, target in TASKS.items()}
    return modules | data


def class_name(target: str) -> str:
    """The class in the value of a registry: "ARMT" of "lit_memory.models.armt:ARMT"."""
    return target.partition(":")[2]


def load_class(kind: str, name: str) -> type:
    """The class registered as ``name``; ``kind`` is "model" or "task". Raises KeyError with the nearest name."""
    registry = REGISTRIES[kind]
    if name not in registry:
        raise KeyError(f"unknown {kind} {name!r}; {nearest(name, registry)}")
    return load(registry[name])


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
        "state_growth": getattr(model, "state_growth", 0),
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
