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
from lit_memory.checks import at_least
from lit_memory.recurrence import SegmentRecurrent


class RMT(SegmentRecurrent):
    """Transformer that passes memory tokens from the top of one segment to the bottom of the next."""

    @dataclass
    class Config(BackboneConfig):
        memory_tokens: int = 32
        """Carried rows; 0 reads every segment by itself."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, self, "memory_tokens")

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
        hidden_BTD, new_BMD = self.segment(state, state if write else state[:, :0], ids_BT, mask_BT)
        return hidden_BTD, self.update(state, new_BMD.to(state.dtype)) if write else state

    def segment(self, read_BMD: Tensor, write_BMD: Tensor, ids_BT: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the decoder makes of the tokens and of the write rows (there may be none) in ``[read; tokens; write]``."""
        tokens_BTD = self.decoder.tokens(ids_BT)
        rows_BTD = torch.cat([read_BMD.to(tokens_BTD.dtype), tokens_BTD, write_BMD.to(tokens_BTD.dtype)], dim=1)
        start, written = read_BMD.shape[1], write_BMD.shape[1]
        mask = None if mask_BT is None else F.pad(mask_BT, (start, written), value=True)
        hidden_BTD = self.decoder.run(self.decoder.place(rows_BTD, start, written), mask)
        end = hidden_BTD.shape[1] - written
        return hidden_BTD[:, start:end], hidden_BTD[:, end:]

    def update(self, old_BMD: Tensor, new_BMD: Tensor) -> Tensor:
        """The memory that the next segment gets, from the one that this segment got and the one that it wrote."""
        return new_BMD
