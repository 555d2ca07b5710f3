"""Memory-augmented long-context transformers: models, tasks and the experiments of five papers.

Public names follow from the registry: for every model its class and ``Lit<class>``, for every task its class and
``<class>Data``. They are imported when they are first used, so that ``import lit_memory`` costs nothing.
``import lit_memory.hf`` registers our models with the Auto classes of transformers.
"""

from typing import Any

from lit_memory.registry import MODELS, TASKS, class_name, discover, lit_names
from lit_memory.util.names import load

_LIT = "lit_memory.lit"
_FUNCTIONS_AND_SHELL = {
    "unroll": "lit_memory.recurrence:unroll",
    "generate": "lit_memory.recurrence:generate",
    "load_reference": "lit_memory.hf.reference:load_reference",
    "load_huggingface": "lit_memory.hf.huggingface:load_huggingface",
    "register_model": "lit_memory.registry:register_model",
    "register_task": "lit_memory.registry:register_task",
    "load_experiment": "lit_memory.plan.experiment:load",
    "LitMemoryConfig": "lit_memory.hf.auto:LitMemoryConfig",
    "LitMemoryForCausalLM": "lit_memory.hf.auto:LitMemoryForCausalLM",
}


def _public() -> dict[str, str]:
    """Public name -> ``module:attribute``."""
    classes = {class_name(path): path for path in (*MODELS.values(), *TASKS.values())}
    return _FUNCTIONS_AND_SHELL | classes | {name: f"{_LIT}:{name}" for name in (*lit_names(), "BabiData")}


__all__ = sorted(_public())


def __getattr__(name: str) -> Any:
    path = _public().get(name)
    if path is None and not name.startswith("_"):
        discover()  # a package may have it as an entry point
        path = _public().get(name)
    if path is None:
        raise AttributeError(f"module 'lit_memory' has no attribute {name!r}")
    return load(path)


def __dir__() -> list[str]:
    return sorted(_public())
