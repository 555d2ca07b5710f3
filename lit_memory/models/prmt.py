"""PRMT: parallel-memory RMT, the ablation of ARMT without associations.

Paper:     Rodkin et al. 2024, arXiv 2407.04841, appendix C.2 (a figure; the code is the definition).
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de, ``modeling_rmt/experimental.py``.

The rows of a segment are ``[read memory; tokens; write memory]`` as in RMT, but each layer has a recurrence of its own:
it overwrites the memory rows with what it made of the write rows one segment ago.

Deviations
1. Rows are replaced by concatenation, not in place.
2. The memory rows that enter the first layer are zeros: the reference embeds a parameter there, which the first layer
   overwrites, so that it never gets a gradient.

Shape suffixes: B batch, T rows, M memory tokens, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.attention import attention_mask
from lit_memory.models.decoder import BackboneConfig, Block, Decoder
from lit_memory.recurrence import LayerRecurrent, state_options
from lit_memory.util.checks import at_least


class PRMTLayer(nn.Module):
    """A block between overwriting the memory rows and keeping what became of them."""

    def __init__(self, config: "PRMT.Config") -> None:
        super().__init__()
        self.memory_tokens = config.memory_tokens
        self.block = Block(config)
        self.memory = nn.Parameter(torch.randn(config.memory_tokens, config.width))

    def forward(self, rows_BTD: Tensor, state: Tensor, mask_BT: Tensor | None = None, write: bool = True):
        m, written = self.memory_tokens, self.memory_tokens if write else 0
        memory_BMD = state.to(rows_BTD.dtype)
        end = rows_BTD.shape[1] - written
        rows_BTD = torch.cat([memory_BMD, rows_BTD[:, m:end], memory_BMD[:, :written]], dim=1)
        mask = None if mask_BT is None else attention_mask(F.pad(mask_BT, (m, written), value=True), rows_BTD.shape[1])
        rows_BTD = self.block(rows_BTD, mask)
        return rows_BTD, rows_BTD[:, end:].to(state.dtype) if write else state


class PRMT(LayerRecurrent):
    """RMT with a recurrence in every layer and no association matrix."""

    @dataclass
    class Config(BackboneConfig):
        memory_tokens: int = 4

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, self, "memory_tokens")

        def rows(self, segment_len: int) -> int:
            return segment_len + 2 * self.memory_tokens

    def __init__(self, config: "PRMT.Config") -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config, PRMTLayer)

    def memories(self) -> list[Tensor]:
        """The learned initial memory of every layer, (M, D) each."""
        return [layer.get_parameter("memory") for layer in self.layers]

    def init_state(self, batch, device=None, dtype=None):
        options = state_options(self, device, dtype)
        return tuple(memory.to(**options).expand(batch, -1, -1) for memory in self.memories())

    def embed(self, ids_BT, write=True):
        before, after = self.config.memory_tokens, self.config.memory_tokens if write else 0
        return self.decoder.add_positions(F.pad(self.decoder.tokens(ids_BT), (0, 0, before, after)), before, after)

    def finish(self, rows_BTD, write=True):
        m = self.config.memory_tokens
        return self.decoder.norm(rows_BTD[:, m : rows_BTD.shape[1] - m if write else None])
