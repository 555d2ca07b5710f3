"""The layers of Titans' four models, and their attention, fusion and feed-forward.

Paper:     Behrouz et al. 2025, Titans: learning to memorize at test time, arXiv 2501.00663, sections 3.3 and 4.
Reference: none by the authors; ``titans/models.py`` lists the deviations.

Padding is at the end of the rows, as everywhere in a ``TokenRecurrent``: causal rows do not see it, and states skip it.

Shape suffixes: B batch, T tokens, D width, H heads of attention, K head width, P rows of a prefix, W kept rows of a
window, C channels of keys and values together, N blocks, S keys of a block.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.attention import rotate
from lit_memory.models.parts import FeedForward, RMSNorm, last_rows
from lit_memory.models.titans.memory import MemoryState, NeuralMemory


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
        rotated = rotate(F.pad(q, (0, 0, first, 0)), self.head_width)[:, :, first:]
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


class Fusion(nn.Module):
    """a (*) b of section 4: both are normalised with learned weights, then one gates the other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm_a, self.norm_b = (RMSNorm(config.width, config.norm_eps) for _ in range(2))
        self.fusion = config.fusion

    def forward(self, a_BTD: Tensor, b_BTD: Tensor) -> Tensor:
        a_BTD, b_BTD = self.norm_a(a_BTD), self.norm_b(b_BTD)
        return a_BTD * b_BTD.sigmoid() if self.fusion == "sigmoid_m" else F.silu(a_BTD * b_BTD)


class LMMLayer(nn.Module):
    """The memory, then the feed-forward, both on a residual stream."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.persistent_1PD = (
            nn.Parameter(nn.init.normal_(torch.empty(1, config.persistent, config.width)))
            if config.persistent
            else None
        )
        self.memory = NeuralMemory(config)
        self.feed_forward = FeedForward(config) if config.ff_width else None

    def forward(
        self,
        rows_BTD: Tensor,
        state: Any,
        mask_BT: Tensor | None = None,
        write: bool = True,
        segment: int | None = None,
    ):
        """segment: rows of each of several segments that are read one after the other; default: all rows are one."""
        rows_BTD, new = self.mix(rows_BTD, state, mask_BT, segment, write)
        if self.feed_forward is not None:
            rows_BTD = rows_BTD + self.feed_forward(rows_BTD)
        return rows_BTD, new if write else state

    def mix(
        self, rows_BTD: Tensor, state: Any, mask_BT: Tensor | None, segment: int | None = None, write: bool = True
    ) -> tuple[Tensor, Any]:
        """The layer without its feed-forward: rows, and the next state if it writes."""
        out = self.memory(rows_BTD, state, mask_BT, segment=segment, write=write)
        return rows_BTD + out.out_BTD, out.state

    def empty_state(self, **options: Any) -> Any:
        """The state of one sample that has read nothing."""
        return self.memory.first_state(**options)

    def first_state(self, **options: Any) -> Any:
        """The state of one sample whose memory has read the persistent tokens."""
        state = self.empty_state(**options)
        return state if self.persistent_1PD is None else self.mix(self.persistent_1PD, state, None)[1]


class MACLayer(LMMLayer):
    """Segment by segment: recall, attention over [P; recalled; segment], then memory of its output (section 4.1)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.attention, self.fusion = SegmentAttention(config), Fusion(config)
        self.long_1PD = (
            nn.Parameter(nn.init.normal_(torch.empty(1, config.long_tokens, config.width)))
            if config.long_tokens
            else None
        )

    def first_state(self, **options: Any) -> MemoryState:
        return self.empty_state(**options)  # P is for attention

    def mix(
        self,
        rows_BTD: Tensor,
        state: MemoryState,
        mask_BT: Tensor | None,
        segment: int | None = None,
        write: bool = True,
    ) -> tuple[Tensor, MemoryState]:
        """Rows by eq. 21 to 25, and the next state. What needs no state is done for all segments at once."""
        c, x_BTD, tokens = self.config, self.norm(rows_BTD), rows_BTD.shape[1]
        segment = segment or tokens
        lengths = [min(c.window, segment - at) for at in range(0, segment, c.window)] * (tokens // segment)
        projected = [self.attention.query(x_BTD), self.attention.key_value(x_BTD)]
        if not c.long_tokens:
            projected.append(self.memory.own_queries(x_BTD, state))
        parts = zip(*(t.split(lengths, dim=1) for t in projected), strict=True)
        masks = [None] * len(lengths) if mask_BT is None else mask_BT.split(lengths, dim=1)
        attended, read = [], []
        for i, (part, mask) in enumerate(zip(parts, masks, strict=True)):
            y_BTD, o_BTD, state = self.segment(*part, state=state, mask_BT=mask, write=write or i + 1 < len(lengths))
            attended.append(y_BTD)
            read.append(o_BTD)
        y_BTD, o_BTD = torch.cat(attended, dim=1), torch.cat(read, dim=1)
        return rows_BTD + self.fusion(y_BTD, self.memory.output(o_BTD, self.memory.norm(y_BTD))), state

    def segment(
        self,
        q_BTD: Tensor,
        kv_BTC: Tensor,
        asked_XTK: Tensor | None = None,
        *,
        state: MemoryState,
        mask_BT: Tensor | None,
        write: bool,
    ) -> tuple[Tensor, Tensor, MemoryState]:
        """Attention's output y, what the memory has read at y, both (B, T, D), and the next state.

        q, kv: projections of the rows for attention. asked: those for the memory; default: ``long_tokens`` ask it.
        """
        c, prefix_BPD = self.config, self.prefix(state, q_BTD.dtype)
        recalled_BTD = None
        if asked_XTK is not None:
            recalled_BTD = self.norm(self.memory.recall(asked_XTK, state, q_BTD.dtype))  # eq. 21
        y_BTD = self.attention(q_BTD, kv_BTC, prefix_BPD, recalled_BTD)  # eq. 22 and 23
        if c.write_prefix and prefix_BPD is not None:
            real_BP = None if mask_BT is None else mask_BT.any(1, keepdim=True).expand(-1, prefix_BPD.shape[1])
            state = self.memory(self.attention.attend_prefix(prefix_BPD), state, real_BP).state
        out = self.memory(y_BTD, state, mask_BT, c.causal_read, write=write, project=False)  # eq. 24, 25
        return y_BTD, out.out_BTD, out.state

    def prefix(self, state: MemoryState, dtype: torch.dtype) -> Tensor | None:
        """[P; recalls of the learned queries], (B, P, D); None if there are neither."""
        batch = len(state.conv_BJC)
        parts = [] if self.persistent_1PD is None else [self.norm(self.persistent_1PD)]
        if self.long_1PD is not None:
            asked_XPK = self.memory.own_queries(self.norm(self.long_1PD).expand(batch, -1, -1), state)
            parts.append(self.norm(self.memory.recall(asked_XPK, state, dtype)))
        return torch.cat([part.expand(batch, -1, -1) for part in parts], dim=1) if parts else None


class HybridState(NamedTuple):
    """State of the memory, and of the window of attention."""

    memory: MemoryState
    window: WindowState


class HybridLayer(LMMLayer):
    """A memory and attention over a window."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm, self.attention = RMSNorm(config.width, config.norm_eps), WindowAttention(config)

    def empty_state(self, **options: Any) -> HybridState:
        return HybridState(self.memory.first_state(**options), self.attention.first_state(**options))

    def attend(
        self, rows_BTD: Tensor, past: WindowState, mask_BT: Tensor | None, prefix_1PD: Tensor | None = None
    ) -> tuple[Tensor, WindowState]:
        """Attention of normalised rows over their window and a normalised prefix."""
        return self.attention(self.norm(rows_BTD), past, mask_BT, None if prefix_1PD is None else self.norm(prefix_1PD))


class MAGLayer(HybridLayer):
    """The memory gates attention over a window (section 4.2)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.fusion = Fusion(config)

    def first_state(self, **options: Any) -> HybridState:
        state = self.empty_state(**options)
        if self.persistent_1PD is None:
            return state
        memory = self.memory(self.persistent_1PD, state.memory).state
        return HybridState(memory, state.window)  # attention sees P anyway

    def mix(
        self,
        rows_BTD: Tensor,
        state: HybridState,
        mask_BT: Tensor | None,
        segment: int | None = None,
        write: bool = True,
    ) -> tuple[Tensor, HybridState]:
        y_BTD, window = self.attend(rows_BTD, state.window, mask_BT, self.persistent_1PD)  # eq. 27
        out = self.memory(rows_BTD, state.memory, mask_BT, segment=segment, write=write)
        return rows_BTD + self.fusion(y_BTD, out.out_BTD), HybridState(out.state, window)  # eq. 28


class MALLayer(HybridLayer):
    """The memory, then attention over a window of its output (section 4.3)."""

    def mix(
        self,
        rows_BTD: Tensor,
        state: HybridState,
        mask_BT: Tensor | None,
        segment: int | None = None,
        write: bool = True,
    ) -> tuple[Tensor, HybridState]:
        out = self.memory(rows_BTD, state.memory, mask_BT, segment=segment, write=write)
        rows_BTD = rows_BTD + out.out_BTD  # eq. 30
        y_BTD, window = self.attend(rows_BTD, state.window, mask_BT)  # eq. 31
        return rows_BTD + y_BTD, HybridState(out.state, window)
