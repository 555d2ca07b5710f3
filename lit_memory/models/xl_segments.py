"""Segments of a Transformer-XL that one layer reads at once.

What a layer keeps for later segments are its inputs, so that with the inputs of all segments at hand none waits for
another. A row sees its own segment up to itself, and the W rows before the segment: those of the cache and of earlier
segments, as one sequence. Where the cache is detached, gradients enter the rows of the own segment alone, so that these
have keys and values of their own; one softmax is over both. A band of W keys is computed as a full matrix, so that
blocks of segments have about W rows. The slow twin is ``XLLayer.forward``, which also reads what has a mask.

Shape suffixes: S segments, B batch, T rows of a segment, N = S T rows of a block, W cached rows, U rows that may be
seen (cached ones, then those of the block), D width, H heads, K head width.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lit_memory.models.attention import last_rows
from lit_memory.models.relative import by_distance
from lit_memory.models.token_recurrent import joined
from lit_memory.recurrence import detach, select_state


def read_layer(
    layer: Any, rows_SBTD: Tensor, state: Any, mask_SBT: Tensor | None, cuts: frozenset[int], keep: int
) -> tuple[Tensor, Any]:
    """``LayerMajor.read_layer`` of XL."""
    total, tokens = len(rows_SBTD), rows_SBTD.shape[2]
    if not tokens:
        return rows_SBTD[total - keep :], state
    size = 2 + state.rows_BWD.shape[1] // tokens if mask_SBT is None else 1
    ends, found = {*range(0, total, size), total - keep, *cuts, total}, [rows_SBTD[:0]]
    for begin, end in pairwise(sorted(ends)):
        state, block_SBTD = detach(state) if begin in cuts else state, rows_SBTD[begin:end]
        wanted = begin >= total - keep
        if mask_SBT is None:
            found += [read_block(layer, block_SBTD, state)] if wanted else []
            state = layer.cached(joined(block_SBTD), state)
        else:
            out_BTD, state = read_masked(layer, block_SBTD[0], state, mask_SBT[begin], wanted)
            found += [out_BTD.unsqueeze(0)] if wanted else []
    return torch.cat(found), state


def read_masked(layer: Any, rows_BTD: Tensor, state: Any, mask_BT: Tensor, wanted: bool) -> tuple[Tensor, Any]:
    """One segment with a mask: the samples that have ended keep their cache."""
    if wanted:
        rows_BTD, new = layer(rows_BTD, state, mask_BT)
    else:
        new = layer.cached(rows_BTD, state, mask_BT)
    return rows_BTD, select_state(mask_BT.any(1), new, state)


def cut(x_BHNK: Tensor, tokens: int) -> Tensor:
    """Rows by segments, (B, H, S, T, K)."""
    return x_BHNK.unflatten(2, (-1, tokens))


def read_block(layer: Any, rows_SBTD: Tensor, state: Any) -> Tensor:
    """Outputs (S, B, T, D) of segments that follow the cache; the numbers are those of ``xl.py``."""
    block, x_BND, (segments, _, tokens, _) = layer.block, joined(rows_SBTD), rows_SBTD.shape
    unused = int(state.mask_BW.any(0).logical_not().cumprod(0).sum())  # the oldest rows, real in no sample
    seen_BUD = torch.cat([state.rows_BWD[:, unused:].to(x_BND.dtype), x_BND.detach() if layer.detach else x_BND], dim=1)
    content, position = block.queries(x_BND)
    key, value = block.keys_values(seen_BUD)  # (1)
    own_key, own_value = (cut(y_BHNK, tokens) for y_BHNK in block.keys_values(x_BND))
    r_HUK = block.distances(seen_BUD.shape[1], x_BND)
    hidden = hidden_rows(state.mask_BW, unused, segments, tokens)
    far_BHNU = by_distance(torch.einsum("bhnk,huk->bhnu", position, r_HUK))
    score_BHNU = (content @ key.mT + far_BHNU).masked_fill(hidden, -torch.inf)
    near_BHSTT = by_distance(torch.einsum("bhstk,huk->bhstu", cut(position, tokens), r_HUK[:, -tokens:]))
    ahead_TT = ~last_rows(tokens, tokens, x_BND.device)
    own_BHSTT = (cut(content, tokens) @ own_key.mT + near_BHSTT).masked_fill(ahead_TT, -torch.inf)
    p = torch.cat([score_BHNU, own_BHSTT.flatten(2, 3)], dim=-1).softmax(-1)  # (2)
    p_BHNU, p_BHNT = p.split([seen_BUD.shape[1], tokens], dim=-1)
    y_BHNK = p_BHNU @ value + (cut(p_BHNT, tokens) @ own_value).flatten(2, 3)
    y_BND = block.leave(x_BND, y_BHNK.transpose(1, 2).flatten(2))
    return y_BND.unflatten(1, (segments, tokens)).transpose(0, 1)


def hidden_rows(real_BW: Tensor, unused: int, segments: int, tokens: int) -> Tensor:
    """(B, 1, N, U), True where a row does not see another one outside of its segment. unused: rows of the cache that
    are left out."""
    window, device = real_BW.shape[1], real_BW.device
    start_N = torch.arange(segments, device=device).repeat_interleave(tokens) * tokens + window
    row_U = torch.arange(unused, window + segments * tokens, device=device)
    seen_NU = (row_U < start_N[:, None]) & (row_U >= start_N[:, None] - window)
    real_BU = torch.cat([real_BW[:, unused:], real_BW.new_ones(len(real_BW), segments * tokens)], dim=1)
    return ~(seen_NU & real_BU[:, None, None])
