"""Memory-augmented long-context transformers: models, tasks and the experiments of five papers.

Names are imported when they are first used, so that ``import lit_memory`` costs nothing.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "Transformer": "lit_memory.models.transformer",
    "XL": "lit_memory.models.xl",
    "RMT": "lit_memory.models.rmt",
    "RMTR": "lit_memory.models.rmt_r",
    "PRMT": "lit_memory.models.prmt",
    "ARMT": "lit_memory.models.armt",
    "TARM": "lit_memory.models.tarm",
    "Mamba": "lit_memory.models.mamba",
    "RWKV": "lit_memory.models.rwkv",
    "LitTransformer": "lit_memory.lit.modules",
    "LitXL": "lit_memory.lit.modules",
    "LitRMT": "lit_memory.lit.modules",
    "LitRMTR": "lit_memory.lit.modules",
    "LitPRMT": "lit_memory.lit.modules",
    "LitARMT": "lit_memory.lit.modules",
    "LitTARM": "lit_memory.lit.modules",
    "LitMamba": "lit_memory.lit.modules",
    "LitRWKV": "lit_memory.lit.modules",
    "AssociativeRetrieval": "lit_memory.tasks.associative_retrieval",
    "AssociativeRetrievalData": "lit_memory.lit.data",
    "unroll": "lit_memory.recurrence",
    "generate": "lit_memory.recurrence",
    "load_reference": "lit_memory.interop",
    "load_huggingface": "lit_memory.interop",
    "load_experiment": "lit_memory.experiment",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'lit_memory' has no attribute {name!r}")
    module = import_module(_NAMES[name])
    return module.load if name == "load_experiment" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
