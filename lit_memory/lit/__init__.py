"""Lightning: a module per architecture, a data module per task."""

from lit_memory.lit.data import (  # noqa: F401
    AlgorithmicData,
    AssociativeRetrievalData,
    BabiData,
    BABILongData,
    DNAData,
    LanguageModelingData,
    MemReasonerData,
    NeedleData,
    PasskeyData,
    QuadraticData,
    TimeSeriesData,
    VariableTrackingData,
)
from lit_memory.lit.episodic import LitLarimar, LitMemReasoner
from lit_memory.lit.modules import (
    LitARMT,
    LitLMM,
    LitMAC,
    LitMAG,
    LitMAL,
    LitMamba,
    LitMemory,
    LitPRMT,
    LitRMT,
    LitRMTR,
    LitRMTXL,
    LitRWKV,
    LitTARM,
    LitTransformer,
    LitXL,
)
from lit_memory.registry import MODELS

_ALL = (
    LitTransformer,
    LitXL,
    LitRMT,
    LitRMTXL,
    LitRMTR,
    LitPRMT,
    LitARMT,
    LitTARM,
    LitLarimar,
    LitMemReasoner,
    LitMamba,
    LitRWKV,
    LitLMM,
    LitMAC,
    LitMAG,
    LitMAL,
)
_OWN = {c.model_name: c for c in _ALL}
LIT_MODULES: dict[str, type[LitMemory]] = {
    name: _OWN.get(name) or type("LitMemory", (LitMemory,), {"model_name": name}) for name in MODELS
}
"""Registered name of an architecture -> its LightningModule, the common one where none is written for it."""
