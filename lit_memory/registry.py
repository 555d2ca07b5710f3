"""Names to classes, and keyword arguments to configurations. Imports nothing heavy by itself.

Classes are named as text, so that a wrong name in a YAML fails before torch is imported. Ours stand in ``MODELS`` and
``TASKS``. Others join them by ``register_model`` and ``register_task`` above a class, or as entry points of an
installed package in the groups ``lit_memory.models`` and ``lit_memory.tasks``.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lit_memory.util import code
from lit_memory.util.checks import FieldError, nearest
from lit_memory.util.names import load

Class = TypeVar("Class", bound=type)

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
    "deltanet": "lit_memory.models.deltanet:DeltaNet",
    "gated_deltanet": "lit_memory.models.deltanet:GatedDeltaNet",
    "lmm": "lit_memory.models.titans.models:LMM",
    "mac": "lit_memory.models.titans.models:MAC",
    "mag": "lit_memory.models.titans.models:MAG",
    "mal": "lit_memory.models.titans.models:MAL",
}
"""Name of an architecture -> its class, built as ``Model(Model.Config(...))``. A new one needs no other line."""
TASKS = {
    "algorithmic": "lit_memory.tasks.algorithmic:Algorithmic",
    "associative_retrieval": "lit_memory.tasks.associative_retrieval:AssociativeRetrieval",
    "mqar": "lit_memory.tasks.mqar:MQAR",
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
OFFERED = {"model": ("init_state", "step", "logits"), "task": ("batch", "score", "at", "test_conditions", "test_sizes")}
"""What a class has at least, beside its ``Config``."""
FIELDS = {"model": ("vocab_size", "inputs"), "task": ()}
"""Fields that a ``Config`` has at least."""
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
    discover()
    registry = REGISTRIES[kind]
    if name not in registry:
        raise KeyError(f"unknown {kind} {name!r}; {nearest(name, registry)}")
    try:
        return load(registry[name])
    except (ImportError, AttributeError) as error:
        if (kind, name) not in _PACKAGES:
            raise
        where = f"{registry[name]} of the package {_PACKAGES[kind, name]}"
        raise RegistrationError(f"{kind} {name!r}: {where} cannot be imported ({error})") from None


class RegistrationError(ValueError):
    """A class or a file that cannot be registered, in one line."""


class Source(NamedTuple):
    """The file that defines a registered class of a user."""

    file: Path
    digest: str
    """``util.code.digest`` when it was imported."""


_SOURCES: dict[tuple[str, str], Source | None] = {}
"""(kind, name) -> the file of a class of a user, None for one that no file defines. Ours are not here."""
_PACKAGES: dict[tuple[str, str], str] = {}
"""(kind, name) -> the installed package that has it as an entry point."""


def register_model(name: str) -> Callable[[Class], Class]:
    """A decorator that registers a model: ``model: {name: <name>}`` is then this class. Raises RegistrationError for a
    name or a class name that is taken, and for a class that is no model."""
    return lambda cls: _register("model", name, cls)


def register_task(name: str) -> Callable[[Class], Class]:
    """A decorator that registers a task: ``task: {name: <name>}`` is then this class. Raises RegistrationError for a
    name or a class name that is taken, and for a class that is no task."""
    return lambda cls: _register("task", name, cls)


def _register(kind: str, name: str, cls: Class) -> Class:
    lacking = [method for method in OFFERED[kind] if not callable(getattr(cls, method, None))]
    config: Any = getattr(cls, "Config", None)
    named = {f.name for f in fields(config)} if is_dataclass(config) else set()
    if not is_dataclass(config) or ("__dataclass_fields__" not in vars(config) and get_annotations(cls.Config)):
        lacking.insert(0, "a Config with @dataclass above it")
    elif wanted := [name for name in FIELDS[kind] if name not in named]:
        lacking.append(f"{', '.join(wanted)} in its Config (BackboneConfig has them)")
    elif kind == "model" and not hasattr(config, "check_segment"):
        lacking.append("check_segment(segment_len) in its Config (BackboneConfig has it)")
    if lacking:
        raise RegistrationError(f"{cls.__name__} is no {kind}: it lacks {', '.join(lacking)}")
    if "." in cls.__qualname__:
        raise RegistrationError(f"{cls.__qualname__}: expected a class at the top of its file")
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    source = None if file is None else Source(Path(file).absolute(), code.digest(Path(file).absolute()))
    before = _SOURCES.get((kind, name))
    again = (kind, name) in _SOURCES and (before and before.file) == (source and source.file)
    _add(kind, name, f"{cls.__module__}:{cls.__name__}", again)
    _SOURCES[kind, name] = source
    return cls


def _add(kind: str, name: str, target: str, again: bool = False) -> None:
    """Add a line to a registry. again: the same file is imported once more, by another name."""
    registry = REGISTRIES[kind]
    if not isinstance(name, str) or not name.isidentifier():
        raise RegistrationError(f"{kind} {name!r}: expected a name of letters, digits and '_'")
    if name in registry and not again and registry[name] != target:
        raise RegistrationError(f"{kind} {name!r} exists already ({registry[name]}); choose another name")
    taken = {class_name(path): path for other in REGISTRIES.values() for path in other.values()}
    own = class_name(target)
    if not again and taken.get(own, target) != target:
        raise RegistrationError(f"{kind} {name!r}: a class {own} exists already ({taken[own]}); rename the class")
    registry[name] = target


@cache
def discover() -> None:
    """Add the entry points of installed packages, once. Raises RegistrationError for a name that is taken."""
    from importlib.metadata import entry_points

    points = entry_points()  # one scan of all packages
    for kind, registry in REGISTRIES.items():
        for point in points.select(group=f"lit_memory.{kind}s"):
            package = point.dist.name if point.dist else "?"
            if registry.get(point.name) == point.value:
                continue
            try:
                _add(kind, point.name, point.value)
            except RegistrationError as error:
                raise RegistrationError(f"entry point of the package {package}: {error}") from None
            _PACKAGES[kind, point.name] = package


def source_of(kind: str, name: str) -> Source | None:
    """The file of a registered class of a user; None for one of ours. Raises RegistrationError for a class that no file
    defines, and for a file that has changed since it was imported."""
    if (kind, name) in _PACKAGES:
        file = Path(sys.modules[load_class(kind, name).__module__].__file__ or "").absolute()
        return Source(file, code.digest(file))
    if (kind, name) not in _SOURCES:
        return None
    source = _SOURCES[kind, name]
    if source is None:
        reason = "was registered in a shell or a notebook, which no other process can import"
        raise RegistrationError(f"{kind} {name!r} {reason}; expected a file, and imports: [that file]")
    if code.digest(source.file) != source.digest:
        raise RegistrationError(f"{source.file} has changed since it was imported; start again")
    return source


def import_file(path: Path) -> None:
    """Import a Python file that registers models or tasks. Raises RegistrationError, in one line."""
    try:
        own, name = code.sources(path), code.importable(path)
    except ValueError as error:
        raise RegistrationError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    try:
        import_module(name)
    except RegistrationError as error:
        raise RegistrationError(f"{code.place(error, path)}: {error}") from None
    except (Exception, SystemExit) as error:  # whatever the code of a user raises
        raise RegistrationError(f"{code.place(error, path)}: {type(error).__name__}: {error}") from None
    if not any(source and source.file in own for source in _SOURCES.values()):
        expected = "expected @register_model(name) or @register_task(name) above a class"
        raise RegistrationError(f"{path}: registers nothing; {expected}")


def provide(kind: str, name: str, source: Source) -> None:
    """Register a class of a user in a process that another one started. Raises RegistrationError."""
    discover()
    if name not in REGISTRIES[kind]:
        import_file(source.file)
    found = source_of(kind, name)
    if found is None or found.digest != source.digest:
        raise RegistrationError(f"{source.file} has changed since the command began; give it again")


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
    """``build`` of a model without allocating its weights or drawing them."""
    import torch

    with torch.device("meta"), load("lit_memory.models.undrawn:Undrawn")():
        return build("model", settings)


def sketched(settings: Mapping[str, Any]) -> Any:
    """``sketch``, kept: the arms of a plan ask for the same few."""
    return _sketched(load_class("model", settings["name"]), json.dumps(settings))


@lru_cache(maxsize=64)
def _sketched(cls: type, settings: str) -> Any:
    """``sketch`` of a section as JSON. cls: the class of its name, which a user may register anew."""
    return sketch(json.loads(settings))


def model_size(settings: Mapping[str, Any]) -> dict[str, int]:
    """Parameters, floats of the fresh state and those that every segment adds, without allocating the weights."""
    model = sketch(settings)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "state_floats": model.state_floats(model.init_state(1)),
        "state_growth": getattr(model, "state_growth", 0),
    }


def initial_settings(cls: type, init: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a model's configuration that ``train.init`` decides (``lit_memory.hf.initial``). Raises
    FileNotFoundError or ValueError for weights that do not fit, FieldError for a given field that differs."""
    settings = load("lit_memory.hf.initial:initial_settings")(cls, init)
    load("lit_memory.hf.initial:check_initial")(settings, given, init)
    return settings


def check_inherited(settings: Mapping[str, Any], start: Mapping[str, Any]) -> None:
    """Raise ValueError where a model cannot take over the weights of another one."""
    if settings != start:
        load("lit_memory.models.inherited:check_inherited")(sketched(settings), sketched(start))


def inherited(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a model that takes over those of another one, by name (``lit_memory.models.inherited``). Raises
    ValueError where they do not fit."""
    return load("lit_memory.models.inherited:inherited")(own, theirs)


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
