"""The two attentions of Titans' models: over segments with what the memory recalls, and over a window.

Paper:     Behrouz et al. 2025, Titans: learning to memorize at test time, arXiv 2501.00663, section 4.
Reference: none by the authors; ``titans/models.py`` lists the deviations.

Padding is at the end of the rows, as everywhere in a ``TokenRecurrent``.

Shape suffixes: B batch, T tokens, D width, H heads of attention, K head width, P rows of a prefix, W kept rows of a
window, C channels of keys and values together, N blocks, S keys of a block.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.attention import rotate
from lit_memory.models.parts import last_rows


class Attention(nn.Module):
    """Attention with rotary positions, over a prefix that every row sees without positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_width, self.window = config.width // config.heads, config.window
        self.query, self.out = (nn.Linear(config.width, config.width, bias=False) for _ in range(2))
        self.key_value = nn.Linear(config.width, 2 * config.width, bias=False)

    def split(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (B, H, T, K)."""
        return x_BTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def keys_values(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.halves(self.key_value(x_BTD))

    def halves(self, kv_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, T, K) from their channels side by side."""
        k_BTD, v_BTD = kv_BTC.chunk(2, dim=-1)
        return self.split(k_BTD), self.split(v_BTD)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, first: int, prefix_BPD: Tensor | None) -> Tensor:
        """Outputs (B, H, T, K) of queries that start at position ``first``, over keys that are rotated already.

        Every query is used twice: rotated, against the keys of rows, and as it is, against those of the prefix.
        """
        rotated = rotate(q, self.head_width, first=first)
        if prefix_BPD is None:
            return F.scaled_dot_product_attention(rotated, k, v, attn_mask=mask)
        pk, pv = (t.expand(len(q), -1, -1, -1) for t in self.keys_values(prefix_BPD))
        k = torch.cat([F.pad(pk, (self.head_width, 0)), F.pad(k, (0, self.head_width))], dim=2)
        mask = F.pad(mask, (pk.shape[2], 0), value=True)
        return F.scaled_dot_product_attention(
            torch.cat([rotated, q], dim=-1), k, torch.cat([pv, v], dim=2), attn_mask=mask, scale=self.head_width**-0.5
        )


class SegmentAttention(Attention):
    """Causal attention within one segment, over ``[prefix; recalled; rows]``.

    ``recalled`` has one row for each row, at the same position.
    """

    def forward(
        self, q_BTD: Tensor, kv_BTC: Tensor, prefix_BPD: Tensor | None, recalled_BTD: Tensor | None = None
    ) -> Tensor:
        """Output (B, T, D) of rows of which ``query`` and ``key_value`` are given."""
        tokens = q_BTD.shape[1]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q_BTD.device).tril()
        k, v = self.halves(kv_BTC)
        k = rotate(k, self.head_width)
        if recalled_BTD is not None:
            recalled_k, recalled_v = self.keys_values(recalled_BTD)
            k, v = torch.cat([rotate(recalled_k, self.head_width), k], dim=2), torch.cat([recalled_v, v], dim=2)
            mask = torch.cat([mask, mask], dim=1)
        y = self.attend(self.split(q_BTD), k, v, mask, 0, prefix_BPD)
        return self.out(y.transpose(1, 2).flatten(2))

    def attend_prefix(self, prefix_BPD: Tensor) -> Tensor:
        """Causal attention within the prefix."""
        y = F.scaled_dot_product_attention(
            self.split(self.query(prefix_BPD)), *self.keys_values(prefix_BPD), is_causal=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class WindowState(NamedTuple):
    """Unrotated keys and values of the last W = window-1 rows, and which of them are real (at first: none)."""

    kv_BWC: Tensor
    real_BW: Tensor


class WindowAttention(Attention):
    """Every row sees itself, the window-1 rows before it and the prefix."""

    def first_state(self, **options: Any) -> WindowState:
        """The state of one sample that has read nothing."""
        old = self.window - 1
        return WindowState(
            torch.zeros(1, old, 2 * self.out.in_features, **options),
            torch.zeros(1, old, dtype=torch.bool, device=options["device"]),
        )

    def forward(
        self, x_BTD: Tensor, past: WindowState, mask_BT: Tensor | None, prefix_BPD: Tensor | None = None
    ) -> tuple[Tensor, WindowState]:
        """Output (B, T, D) and next state, in time linear in T.

        Rows are cut into blocks of at most ``window``, which see their own keys and the W before.
        """
        tokens, old = x_BTD.shape[1], self.window - 1
        block = min(self.window, tokens)
        real_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device) if mask_BT is None else mask_BT
        kv_BSC = torch.cat([past.kv_BWC.to(x_BTD.dtype), self.key_value(x_BTD)], dim=1)
        real_BS = torch.cat([past.real_BW, real_BT], dim=1)
        new = WindowState(
            last_rows(kv_BSC, old, mask_BT).to(past.kv_BWC.dtype),
            last_rows(real_BS.unsqueeze(-1), old, mask_BT).squeeze(-1),
        )
        missing = -tokens % block
        q_BNTD = F.pad(self.query(x_BTD), (0, 0, 0, missing)).unflatten(1, (-1, block))
        kv_BNSC = F.pad(kv_BSC, (0, 0, 0, missing)).unfold(1, old + block, block).mT
        real_BNS = F.pad(real_BS, (0, missing)).unfold(1, old + block, block)
        ones = torch.ones(block, old + block, dtype=torch.bool, device=x_BTD.device)  # row r is key r + old
        itself = ones.triu(old).tril(old)  # so that padding stays finite
        mask = ((ones.triu().tril(old) & real_BNS.unsqueeze(2)) | itself).flatten(0, 1).unsqueeze(1)
        k, v = (self.split(part) for part in kv_BNSC.flatten(0, 1).chunk(2, dim=-1))
        q = self.split(q_BNTD.flatten(0, 1))
        y = self.attend(q, rotate(k, self.head_width), v, mask, old, prefix_BPD)
        y_BTD = y.transpose(1, 2).flatten(2).unflatten(0, q_BNTD.shape[:2]).flatten(1, 2)[:, :tokens]
        return self.out(y_BTD), new
