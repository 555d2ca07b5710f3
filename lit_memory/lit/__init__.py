"""Lightning: a module per architecture, a data module per task."""

from lit_memory.lit.lines import LitLarimar, LitMemReasoner
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
LIT_MODULES: dict[str, type[LitMemory]] = {c.model_name: c for c in _ALL}
"""Registered name of an architecture -> its LightningModule."""
