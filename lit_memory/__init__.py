"""Memory-augmented long-context transformers: models, tasks and the experiments of five papers.

Names are imported when they are first used, so that ``import lit_memory`` costs nothing. The Auto classes of
transformers know our models once both packages have been imported, in either order.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any

_NAMES = {
    "Transformer": "lit_memory.models.transformer",
    "XL": "lit_memory.models.xl",
    "RMT": "lit_memory.models.rmt",
    "RMTXL": "lit_memory.models.rmt_xl",
    "RMTR": "lit_memory.models.rmt_r",
    "PRMT": "lit_memory.models.prmt",
    "ARMT": "lit_memory.models.armt",
    "TARM": "lit_memory.models.tarm",
    "Larimar": "lit_memory.models.episodic.larimar",
    "MemReasoner": "lit_memory.models.episodic.memreasoner",
    "Mamba": "lit_memory.models.mamba",
    "RWKV": "lit_memory.models.rwkv",
    "LMM": "lit_memory.models.titans.models",
    "MAC": "lit_memory.models.titans.models",
    "MAG": "lit_memory.models.titans.models",
    "MAL": "lit_memory.models.titans.models",
    "LitTransformer": "lit_memory.lit.modules",
    "LitXL": "lit_memory.lit.modules",
    "LitRMT": "lit_memory.lit.modules",
    "LitRMTXL": "lit_memory.lit.modules",
    "LitRMTR": "lit_memory.lit.modules",
    "LitPRMT": "lit_memory.lit.modules",
    "LitARMT": "lit_memory.lit.modules",
    "LitTARM": "lit_memory.lit.modules",
    "LitLarimar": "lit_memory.lit.episodic",
    "LitMemReasoner": "lit_memory.lit.episodic",
    "LitMamba": "lit_memory.lit.modules",
    "LitRWKV": "lit_memory.lit.modules",
    "LitLMM": "lit_memory.lit.modules",
    "LitMAC": "lit_memory.lit.modules",
    "LitMAG": "lit_memory.lit.modules",
    "LitMAL": "lit_memory.lit.modules",
    "AssociativeRetrieval": "lit_memory.tasks.associative_retrieval",
    "AssociativeRetrievalData": "lit_memory.lit.data",
    "BABILong": "lit_memory.tasks.babilong",
    "BABILongData": "lit_memory.lit.data",
    "BabiData": "lit_memory.lit.data",
    "Needle": "lit_memory.tasks.needle",
    "NeedleData": "lit_memory.lit.data",
    "BabiEpisodes": "lit_memory.tasks.memreasoner",
    "MemReasonerData": "lit_memory.lit.data",
    "VariableTracking": "lit_memory.tasks.variable_tracking",
    "VariableTrackingData": "lit_memory.lit.data",
    "Passkey": "lit_memory.tasks.passkey",
    "PasskeyData": "lit_memory.lit.data",
    "DNA": "lit_memory.tasks.dna",
    "DNAData": "lit_memory.lit.data",
    "LanguageModeling": "lit_memory.tasks.language_modeling",
    "LanguageModelingData": "lit_memory.lit.data",
    "Quadratic": "lit_memory.tasks.quadratic",
    "QuadraticData": "lit_memory.lit.data",
    "Algorithmic": "lit_memory.tasks.algorithmic",
    "AlgorithmicData": "lit_memory.lit.data",
    "TimeSeries": "lit_memory.tasks.time_series",
    "TimeSeriesData": "lit_memory.lit.data",
    "unroll": "lit_memory.recurrence",
    "generate": "lit_memory.recurrence",
    "load_reference": "lit_memory.hf.interop",
    "load_huggingface": "lit_memory.hf.interop",
    "LitMemoryConfig": "lit_memory.hf.autoclasses",
    "LitMemoryForCausalLM": "lit_memory.hf.shell",
    "load_experiment": "lit_memory.plan.experiment",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'lit_memory' has no attribute {name!r}")
    module = import_module(_NAMES[name])
    return module.load if name == "load_experiment" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__


class _AfterAutoClasses:
    """A finder that finds nothing itself: it has the modules of transformers' Auto classes followed by
    ``autoclasses.register``.

    transformers has no entry point for that, and importing it here would cost those who do not need it seconds.
    """

    modules = ("transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto")

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in cls.modules:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path[sys.meta_path.index(cls) + 1 :])  # type: ignore[arg-type]
        spec: Any = next((spec for spec in others if spec), None)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                cls.register(name)

            spec.loader.exec_module = execute_and_register
        return spec

    @staticmethod
    def register(name: str) -> None:
        import_module("lit_memory.hf.autoclasses").register(name)


for _module in _AfterAutoClasses.modules:
    if _module in sys.modules:
        _AfterAutoClasses.register(_module)
sys.meta_path.insert(0, _AfterAutoClasses)  # type: ignore[arg-type]
