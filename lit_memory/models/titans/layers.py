"""The layers of Titans' four models, and the fusion of memory and attention.

Paper:     Behrouz et al. 2025, Titans: learning to memorize at test time, arXiv 2501.00663, sections 3.3 and 4.
Reference: none by the authors; ``titans/models.py`` lists the deviations.

Padding is at the end of the rows, as everywhere in a ``TokenRecurrent``: causal rows do not see it, and states skip it.

Shape suffixes: B batch, T tokens, D width, K head width of the memory, P rows of a prefix, C channels of keys and
values together, X samples times heads, J kept inputs of the convolution.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.parts import FeedForward, RMSNorm
from lit_memory.models.titans.attention import SegmentAttention, WindowAttention, WindowState
from lit_memory.models.titans.memory import MemoryState, NeuralMemory


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
