"""Memory-augmented long-context transformers: models, tasks and the experiments of five papers.

Public names follow from the registry: for every model its class and ``Lit<class>``, for every task its class and
``<class>Data``. They are imported when they are first used, so that ``import lit_memory`` costs nothing.
``import lit_memory.hf`` registers our models with the Auto classes of transformers.
"""

from importlib import import_module
from typing import Any

from lit_memory.registry import MODELS, TASKS

_OTHERS = {
    "unroll": "lit_memory.recurrence:unroll",
    "generate": "lit_memory.recurrence:generate",
    "load_reference": "lit_memory.hf.reference:load_reference",
    "load_huggingface": "lit_memory.hf.huggingface:load_huggingface",
    "load_experiment": "lit_memory.plan.experiment:load",
    "LitMemoryConfig": "lit_memory.hf.auto:LitMemoryConfig",
    "LitMemoryForCausalLM": "lit_memory.hf.auto:LitMemoryForCausalLM",
    "BabiData": "lit_memory.lit:BabiData",
}
_DATA_NAMES = {"BabiEpisodes": "MemReasonerData"}
"""Class of a task -> its data module, where that is not ``<class>Data``."""


def _public() -> dict[str, str]:
    """Public name -> ``module:attribute``."""
    public = dict(_OTHERS)
    for path in MODELS.values():
        name = path.partition(":")[2]
        public |= {name: path, f"Lit{name}": f"lit_memory.lit:Lit{name}"}
    for path in TASKS.values():
        name = path.partition(":")[2]
        data = _DATA_NAMES.get(name, f"{name}Data")
        public |= {name: path, data: f"lit_memory.lit:{data}"}
    return public


__all__ = sorted(_public())


def __getattr__(name: str) -> Any:
    path = _public().get(name)
    if path is None:
        raise AttributeError(f"module 'lit_memory' has no attribute {name!r}")
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(_public())
