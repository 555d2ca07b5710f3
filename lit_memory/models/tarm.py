"""TARM: token averaging recurrent memory transformer.

Paper:     Vigneswaran 2023, TARM (course report), "Methodology: TARM"; built on RMT (arXiv 2207.06881).
Reference: none published.

``E_0`` is the learned initial memory and ``E_s = alpha * M_s + (1 - alpha) * E_{s-1}``, where M_s is what segment s
wrote. E takes the place of RMT's memory in the read and in the write rows.

Deviations (the report leaves them open)
1. Gradients flow through ``E_{s-1}`` as far as they flow through RMT's memory.
2. The write rows of a segment hold E as well.

Shape suffixes: B batch, M memory tokens, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_memory.models.rmt import RMT, check_alpha


class TARM(RMT):
    """RMT with an exponential moving average over its memory tokens."""

    @dataclass
    class Config(RMT.Config):
        alpha: float = 0.2
        """Weight of the new memory, above 0 (where the memory would never change), up to 1 (RMT)."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_alpha(self.alpha)

    def update(self, old_BMD: Tensor, new_BMD: Tensor) -> Tensor:
        return torch.lerp(old_BMD, new_BMD, self.config.alpha)
