"""Attention at relative positions as functions of tensors; the numbers are those of ``xl.py``.

Paper:     Dai et al. 2019, Transformer-XL, arXiv 1901.02860, section 3.3 and appendix B.

Shape suffixes: B batch, T rows, S rows that they see, of which they are the last, D width, H heads, K head width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.models.tables import table


@table(maxsize=64)
def sinusoids(length: int, width: int, clamp: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """R_n of the distances n = length-1, ..., 0, clamped to ``clamp`` (0: no limit), (length, D)."""
    distance = torch.arange(length - 1, -1, -1, device=device, dtype=torch.float64).clamp(max=clamp or length)
    angle = distance[:, None] * 10_000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(dtype)


def by_distance(x_BHTS: Tensor) -> Tensor:
    """Shift columns from distances n = S-1, ..., 0 to the keys that are n before each row.

    Columns of keys after a row are arbitrary.
    """
    rows, keys = x_BHTS.shape[-2:]
    padded = F.pad(x_BHTS, (1, 0)).flatten(-2).unflatten(-1, (keys + 1, rows))
    return padded[..., 1:, :].flatten(-2).unflatten(-1, (rows, keys))


def weight_first(queries: int, rows: int, head_width: int, width: int) -> bool:
    """Whether it costs less to apply W of a head to ``queries`` rows than to the ``rows`` that they see.

    Multiplications: T K D + T D S, against S D K + T K S.
    """
    return queries * width * (head_width + rows) < rows * head_width * (width + queries)


def score(q_BHTK: Tensor, weight_HKD: Tensor, rows_BSD: Tensor) -> Tensor:
    """q_i . (W row_j) for every pair and head, (B, H, T, S): W of the queries first."""
    heads, queries = q_BHTK.shape[1:3]
    return ((q_BHTK @ weight_HKD).flatten(1, 2) @ rows_BSD.mT).unflatten(1, (heads, queries))


def blend(p_BHTS: Tensor, weight_HKD: Tensor, rows_BSD: Tensor) -> Tensor:
    """W (sum over j of p_ij row_j) in every head, (B, H, T, K): W of the sums last."""
    heads, queries = p_BHTS.shape[1:3]
    return (p_BHTS.flatten(1, 2) @ rows_BSD).unflatten(1, (heads, queries)) @ weight_HKD.mT


def probabilities(score_BHTS: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the rows where ``mask`` is True (2)."""
    return score_BHTS.masked_fill(~mask, -torch.inf).softmax(-1)
