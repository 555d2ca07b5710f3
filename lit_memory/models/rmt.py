"""RMT: recurrent memory transformer.

Paper:     Bulatov et al. 2022, Recurrent Memory Transformer, arXiv 2207.06881, section 3; as the baseline of arXiv 2407.04841.
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de, ``modeling_rmt/language_modeling.py``.

The rows of a segment are ``[read memory; tokens; write memory]``, both memories being what the previous segment left. The new
memory is what the whole decoder, final norm included, made of the write rows.

Deviations
1. Attention is plain causal, as in the reference on Hugging Face backbones (the Transformer-XL code of the first paper lets
   memory rows see each other).
2. Truncated back-propagation works (``unroll(bptt=...)``); the reference's ``k2`` has no effect.

Shape suffixes: B batch, T rows, M memory tokens, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.backbone import BackboneConfig, Decoder
from lit_memory.recurrence import SegmentRecurrent


class RMT(SegmentRecurrent):
    """Transformer that passes memory tokens from the top of one segment to the bottom of the next."""

    @dataclass
    class Config(BackboneConfig):
        memory_tokens: int = 32
        """Carried rows; 0 reads every segment by itself."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.memory_tokens < 0:
                raise ValueError(f"memory_tokens={self.memory_tokens}: expected 0 or more")

        def rows(self, segment_len: int) -> int:
            return segment_len + 2 * self.memory_tokens

    def __init__(self, config: "RMT.Config") -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config)
        self.memory = self.decoder.memory_tokens(config.memory_tokens)

    def init_state(self, batch, device=None, dtype=None):
        options = self.state_options(device, dtype)
        return self.memory.to(**options).expand(batch, -1, -1)

    def step(self, state, ids_BT, mask_BT=None, write=True):
        tokens_BTD = self.decoder.tokens(ids_BT)
        memory_BMD = state.to(tokens_BTD.dtype)
        m, written = self.config.memory_tokens, self.config.memory_tokens if write else 0
        rows = [memory_BMD, tokens_BTD, memory_BMD] if write else [memory_BMD, tokens_BTD]
        mask = None if mask_BT is None else F.pad(mask_BT, (m, written), value=True)
        hidden_BTD = self.decoder.run(self.decoder.place(torch.cat(rows, dim=1), m, written), mask)
        end = hidden_BTD.shape[1] - written
        return hidden_BTD[:, m:end], self.update(state, hidden_BTD[:, end:].to(state.dtype)) if write else state

    def update(self, old_BMD: Tensor, new_BMD: Tensor) -> Tensor:
        """The memory that the next segment gets, from the one that this segment got and the one that it wrote."""
        return new_BMD
