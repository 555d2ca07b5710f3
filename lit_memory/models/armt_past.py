"""A sliding window between the segments of ARMT: every layer keeps keys and values of the last tokens before a segment.

Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at 3da7f48, ``src/armt_sw.py``.

The rows of a segment are ``[sink; tokens; memory tokens]``, the first of which is optional. Token i of a segment sees,
beside the rows of its segment up to its own, the P - i last tokens before the segment; memory tokens see all P, and the
sink sees none. Keys stay rotated to their places in their own segments, as in the reference, so that a token sees the
one at its own place in the segment before as if at distance 0.

Shape suffixes: B batch, R rows, T tokens, P tokens kept, D width, H heads of queries, G heads of keys and values, K
head width; A_BKD and z_BK as in ``associative.py``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.memory.associative import AssociativeState
from lit_memory.models.attention import attention_mask, rotate
from lit_memory.models.parts import newest_keys


class PastState(NamedTuple):
    """The memory of one layer, keys and values of the tokens before the segment, and which of them are real."""

    A_BKD: Tensor
    z_BK: Tensor
    k_BGPK: Tensor
    v_BGPK: Tensor
    real_BP: Tensor


def empty(memory: AssociativeState, config: Any) -> PastState:
    """The state before the first segment, around an empty memory."""
    batch, kept = len(memory.z_BK), config.past_tokens
    keys = memory.z_BK.new_zeros(batch, config.kv_heads or config.heads, kept, config.head_width)
    real_BP = torch.zeros(batch, kept, dtype=torch.bool, device=keys.device)
    return PastState(*memory, keys, keys.clone(), real_BP)


def attend(
    block: Any, rows_BRD: Tensor, state: PastState, mask_BT: Tensor | None, front: int, behind: int
) -> tuple[Tensor, PastState]:
    """Rows after the ``Block``, and the state with the tokens among them.

    mask_BT: True at real tokens. front, behind: rows before and after the tokens.
    """
    attention, past = block.attention, state[2:]
    if len(rows_BRD) > len(state.z_BK):  # several samples in a row read one state
        past = [x.repeat_interleave(len(rows_BRD) // len(state.z_BK), dim=0) for x in past]
    tokens, padded = slice(front, rows_BRD.shape[1] - behind), mask_BT is not None
    if mask_BT is None:
        mask_BT = rows_BRD.new_ones(rows_BRD[:, tokens].shape[:2], dtype=torch.bool)
    q, k, v = attention.heads(attention.qkv(block.norm1(rows_BRD)))
    if attention.rotary:
        q, k = (rotate(x, attention.rotary, attention.base) for x in (q, k))
    all_k, all_v = (torch.cat([old.to(new.dtype), new], dim=2) for old, new in zip(past, (k, v), strict=False))
    seen = torch.cat([sees_past(past[2], mask_BT.shape[1], front, behind), own_rows(mask_BT, front, behind)], dim=-1)
    rows_BRD = block.join(rows_BRD, attention.mix(q, all_k, all_v, seen))
    kept, batch = state.real_BP.shape[1], len(state.z_BK)
    if batch < len(rows_BRD):
        return rows_BRD, state
    k, v = (torch.cat([old, new[:, :, tokens].to(old.dtype)], dim=2) for old, new in zip(past, (k, v), strict=False))
    k, v, real_BP = newest_keys(k, v, torch.cat([past[2], mask_BT], dim=1), kept, padded)
    return rows_BRD, state._replace(k_BGPK=k, v_BGPK=v, real_BP=real_BP)


def sees_past(real_BP: Tensor, tokens: int, front: int, behind: int) -> Tensor:
    """(B, 1, R, P): True at the kept tokens that a row sees."""
    places = torch.arange(tokens, device=real_BP.device)
    first_R = torch.cat([places.new_full((front,), real_BP.shape[1]), places, places.new_zeros(behind)])
    window_RP = torch.arange(real_BP.shape[1], device=real_BP.device) >= first_R[:, None]
    return window_RP & real_BP[:, None, None]


def own_rows(mask_BT: Tensor, front: int, behind: int) -> Tensor:
    """(B, 1, R, R): True at the rows of its segment that a row sees."""
    mask_BR = F.pad(mask_BT, (front, behind), value=True)
    return attention_mask(mask_BR, mask_BR.shape[1])
