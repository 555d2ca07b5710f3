"""What attention layers share: rotary positions and masks.

Paper:     Su et al. 2021, RoFormer, arXiv 2104.09864.

Shape suffixes: B batch, T rows, S keys (cached rows, then the T rows), H heads, K head width, E channels of queries,
keys and values together.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lit_memory.models.tables import table


@table(maxsize=64)
def rotary_table(
    length: int, dims: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0..length-1, each (length, dims)."""
    frequency = base ** (-torch.arange(0, dims, 2, device=device, dtype=torch.float64) / dims)
    angle = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequency.repeat(2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BHTK: Tensor, dims: int, base: float = 10_000.0, first: int = 0) -> Tensor:
    """Rotary embedding of the first ``dims`` channels at positions first..first+T-1."""
    cos, sin = rotary_table(first + x_BHTK.shape[-2], dims, base, x_BHTK.device, x_BHTK.dtype)
    return turn(x_BHTK, cos[first:], sin[first:])


def turn(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by rows of a ``rotary_table``, (T, dims) or (B, 1, T, dims). Back, with ``-sin``."""
    dims = cos.shape[-1]  # rounded up to even
    head, rest = x_BHTK[..., :dims], x_BHTK[..., dims:]
    left, right = head.chunk(2, dim=-1)
    return torch.cat([head * cos + torch.cat([-right, left], dim=-1) * sin, rest], dim=-1)


def split_heads(qkv_BTE: Tensor, widths: Sequence[int], head_width: int) -> Iterator[Tensor]:
    """Queries, keys and values (B, heads, T, K) from their channels side by side, ``widths`` of each."""
    return (part.unflatten(-1, (-1, head_width)).transpose(1, 2) for part in qkv_BTE.split(widths, dim=-1))


@table(maxsize=16)
def last_rows(rows: int, keys: int, device: torch.device) -> Tensor:
    """(T, S), True at the keys that the last T of S causal rows see."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)


def attention_mask(mask_BS: Tensor, rows: int) -> Tensor:
    """(B, 1, T, S) mask of the last ``rows`` of S causal rows, whose keys are valid where ``mask_BS`` is True.

    Every row may see itself, so that rows of pure padding stay finite.
    """
    keys = mask_BS.shape[1]
    causal = torch.ones(rows, keys, dtype=torch.bool, device=mask_BS.device).tril(keys - rows)
    itself = torch.eye(keys, dtype=torch.bool, device=mask_BS.device)[keys - rows :]
    return (causal & mask_BS[:, None, None, :]) | itself
