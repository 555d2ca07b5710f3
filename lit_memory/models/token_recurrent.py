"""Shared base of the models that are recurrent in every token: Mamba, RWKV, DeltaNet and Titans.

The transformers of this package remember from segment to segment, these models from token to token. A segment is only a
piece of the sequence: any segmentation gives the same hidden states (in Titans, any that cuts between chunks), and
masked tokens are skipped.

Shape suffixes: S segments, B batch, T tokens, R rows of a segment, D width.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from lit_memory.models.decoder import embedding
from lit_memory.recurrence import Divisible, LayerMajor, LayerRecurrent, at_least_single, detach
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


def real_first(mask_BT: Tensor) -> Tensor:
    """The order of rows in which real tokens come first."""
    return mask_BT.logical_not().to(torch.uint8).argsort(dim=1, stable=True)


def in_order(rows: Tensor, order_BT: Tensor) -> Tensor:
    """Rows (B, T, ...) in another order."""
    return rows.gather(1, order_BT.view(*order_BT.shape, *[1] * (rows.dim() - 2)).expand_as(rows))


class TokenRecurrent(Divisible, LayerRecurrent):
    """A ``LayerRecurrent`` model that skips masked tokens. Its layers get rows and masks with padding at the end."""

    grain = 1

    def step(self, state, ids_BT, mask_BT=None, write=True):
        if not ids_BT.shape[1]:
            return self.finish(self.embed(ids_BT)), state
        if mask_BT is None:
            return super().step(state, ids_BT, None, write)
        order_BT = real_first(mask_BT)
        hidden_BTD, state = super().step(state, in_order(ids_BT, order_BT), in_order(mask_BT, order_BT), write)
        return in_order(hidden_BTD, order_BT.argsort(1)), state

    def embed(self, ids_BT, write=True):
        return at_least_single(self.decoder.tokens(ids_BT))  # so is the residual stream

    def finish(self, rows_BTD, write=True):
        norm = self.decoder.norm
        return norm(rows_BTD.to(norm.weight.dtype))


class ReadsAhead(TokenRecurrent, LayerMajor):
    """A ``TokenRecurrent`` model of which a layer reads many segments as one sequence.

    ``layer.advance(rows, state)`` is the state that ``layer(rows, state)`` leaves, for rows that nobody reads.

    Titans has its own way, as a segment begins a chunk.
    """

    def refuses_groups(self, longest: int = 0) -> str | None:
        return self.refuses_hooks()

    def read_layer(self, layer, rows_SBRD, state, mask_SBT, cuts, keep):
        total, found = len(rows_SBRD), []
        if not rows_SBRD.shape[2]:
            return rows_SBRD[total - keep :], state
        for begin, end in pairwise(sorted({0, *cuts, total})):
            state = detach(state) if begin in cuts else state
            rows_BTD = joined(rows_SBRD[begin:end])
            if not keep and mask_SBT is None:
                state = layer.advance(rows_BTD, state)
            elif mask_SBT is None:
                rows_BTD, state = layer(rows_BTD, state)
            else:
                mask_BT = joined(mask_SBT[begin:end])
                order_BT = real_first(mask_BT)
                rows_BTD, state = layer(in_order(rows_BTD, order_BT), state, in_order(mask_BT, order_BT))
                rows_BTD = in_order(rows_BTD, order_BT.argsort(1))
            found.append(rows_BTD.unflatten(1, (end - begin, -1)).transpose(0, 1))
        rows_SBRD = torch.cat(found) if len(found) > 1 else found[0]
        return rows_SBRD[total - keep :], state


def joined(rows_SBT: Tensor) -> Tensor:
    """Rows (S, B, T, ...) of all segments as one sequence, (B, S T, ...)."""
    return rows_SBT.transpose(0, 1).flatten(1, 2)
