"""The registry of architectures. Names are strings, so that a wrong name in a YAML fails before torch is imported.

A model file holds one class, derived from ``SegmentRecurrent``, with its configuration as the attribute ``Config``; it
is built as ``Model(Model.Config(...))``.
"""

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
