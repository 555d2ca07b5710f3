"""Shared base of the models that are recurrent in every token: Mamba, RWKV and Titans.

The transformers of this package remember from segment to segment, these models from token to token. A segment is only a
piece of the sequence: any segmentation gives the same hidden states (in Titans, any that cuts between chunks), and
masked tokens are skipped.

Shape suffixes: B batch, T tokens, S kept rows and then T new ones, D width, C channels, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_memory.models.decoder import embedding
from lit_memory.recurrence import Divisible, LayerRecurrent
from lit_memory.util.checks import FieldError, at_least, check_layers
from lit_memory.util.fields import added


@dataclass
class TokenRecurrentConfig:
    """Sizes that all of these models have."""

    vocab_size: int = 0
    """Number of token ids; 0 takes the task's."""
    inputs: int = added(0)
    """Numbers per token, in a task of numbers in place of token ids; 0 takes the task's."""
    layers: int = 4
    width: int = 128
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        at_least(1, self, "layers", "width")
        check_layers(self, "layers")
        at_least(0, self, "vocab_size", "inputs", "norm_eps")

    def rows(self, segment_len: int) -> int:
        """Rows that one segment occupies: its tokens."""
        return segment_len

    def check_segment(self, segment_len: int) -> None:
        """Segments of any length fit: there is no position table."""


class Stack(nn.Module):
    """Embedding, layers, final norm and head."""

    def __init__(self, config: TokenRecurrentConfig, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise FieldError("vocab_size", config.vocab_size, "expected at least 1 (0 is filled in from the task)")
        self.tokens = embedding(config)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)


def last_rows(window_BSC: Tensor, count: int, mask_BT: Tensor | None) -> Tensor:
    """The last ``count`` real rows of ``count`` kept rows and then T new ones, whose padding is at the end."""
    if mask_BT is None:
        return window_BSC[:, window_BSC.shape[1] - count :].clone()  # a view would keep the whole segment alive
    rows_BC = mask_BT.sum(1, keepdim=True) + torch.arange(count, device=mask_BT.device)
    return window_BSC.gather(1, rows_BC.unsqueeze(-1).expand(-1, -1, window_BSC.shape[2]))


class TokenRecurrent(Divisible, LayerRecurrent):
    """A ``LayerRecurrent`` model that skips masked tokens. Its layers get rows and masks with padding at the end."""

    grain = 1

    def step(self, state, ids_BT, mask_BT=None, write=True):
        if mask_BT is None:
            return super().step(state, ids_BT, None, write)
        order_BT = mask_BT.logical_not().to(torch.uint8).argsort(dim=1, stable=True)  # real tokens first
        hidden_BTD, state = super().step(state, ids_BT.gather(1, order_BT), mask_BT.gather(1, order_BT), write)
        return hidden_BTD.gather(1, order_BT.argsort(1).unsqueeze(-1).expand_as(hidden_BTD)), state

    def embed(self, ids_BT, write=True):
        rows_BTD = self.decoder.tokens(ids_BT)
        return rows_BTD.to(torch.promote_types(rows_BTD.dtype, torch.float32))  # the residual stream is at least fp32

    def finish(self, rows_BTD, write=True):
        norm = self.decoder.norm
        return norm(rows_BTD.to(norm.weight.dtype))
