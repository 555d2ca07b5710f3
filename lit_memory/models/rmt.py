"""RMT: recurrent memory transformer.

Paper:     Bulatov et al. 2022, Recurrent Memory Transformer, arXiv 2207.06881, section 3; as the baseline of arXiv
    2407.04841.
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de,
    ``modeling_rmt/language_modeling.py``.

The rows of a segment are ``[read memory; tokens; write memory]``; both memories are that of the previous segment. The
new memory is the output of the decoder, final norm included, at the write rows.

Deviations
1. Attention is plain causal, as in the reference on Hugging Face backbones (the Transformer-XL code of the first paper
   lets memory rows see each other).
2. Truncated back-propagation works (``unroll(bptt=...)``); the reference's ``k2`` has no effect.

Shape suffixes: S segments, B batch, T rows, M memory tokens, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.models import rmt_segments
from lit_memory.models.decoder import BackboneConfig, Decoder
from lit_memory.models.key_values import KeyValueCache, Piece
from lit_memory.recurrence import (
    Diagnosed,
    Grouped,
    SeparateWrite,
    State,
    advance,
    as_segment,
    state_options,
    state_tensors,
)
from lit_memory.util.checks import FieldError, at_least


def check_alpha(alpha: float) -> None:
    """Raise FieldError for a weight of the new memory outside of (0, 1]."""
    if not 0 < alpha <= 1:
        raise FieldError("alpha", alpha, "expected a number above 0, up to 1 (RMT)")


class TokenMemory(Diagnosed):
    """A model whose state begins with memory tokens (B, M, D).

    E_s = alpha * M_s + (1 - alpha) * E_(s-1), where M_s is the memory that segment s wrote. RMT has alpha = 1.
    """

    diagnosed: ClassVar = ("memory_change", "written_change", "variance_ratio")

    @torch.no_grad()
    def trace(
        self, segments: Sequence[Tensor | tuple[Tensor, Tensor | None]], state: State | None = None
    ) -> tuple[list[Tensor], State]:
        """The memory before the first segment and after each of them, and the last state. segments: ids (B, T), alone
        or with a mask that is True at real tokens; at least one."""
        parts = [as_segment(segment) for segment in segments]
        ids_BT = parts[0].ids_BT
        state = self.init_state(len(ids_BT), ids_BT.device) if state is None else state
        memories = [next(state_tensors(state))]
        for part in parts:
            state = advance(self, state, *part)
            memories.append(next(state_tensors(state)))
        return memories, state

    def diagnostics(self, memories: list[Tensor]) -> dict[str, Tensor]:
        """How erratic a memory is, from at least three memories E_0, E_1, ... of ``trace``.

        memory_change, written_change: root mean square (over samples, tokens and channels) of E_s - E_(s-1), and of
            M_s - M_(s-1); mean over s.
        variance_ratio: variance of E_s over that of M_s along the later half of s, where E_0 has faded, both averaged
            over samples, tokens and channels. alpha / (2 - alpha) if the M_s are independent and many.
        """
        memory_SBMD = torch.stack(memories)
        before_SBMD, alpha = memory_SBMD[:-1], getattr(self.config, "alpha", 1.0)
        written_SBMD = before_SBMD + memory_SBMD.diff(dim=0) / alpha

        def change(rows_SBMD: Tensor) -> Tensor:
            return rows_SBMD.diff(dim=0).square().mean((1, 2, 3)).sqrt().mean()

        averaged, written = (
            rows_SBMD[(len(written_SBMD) - 1) // 2 :].var(0).mean() for rows_SBMD in (memory_SBMD[1:], written_SBMD)
        )
        return dict(zip(self.diagnosed, (change(memory_SBMD), change(written_SBMD), averaged / written), strict=True))


class RMT(SeparateWrite, KeyValueCache, Grouped, TokenMemory):
    """Transformer that passes memory tokens from the top of one segment to the bottom of the next."""

    numbers = 2

    @dataclass
    class Config(BackboneConfig):
        memory_tokens: int = 32
        """Memory tokens; 0: no memory."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, self, "memory_tokens")

        def rows(self, segment_len: int) -> int:
            return segment_len + 2 * self.memory_tokens

    def __init__(self, config: "RMT.Config") -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config)
        self.memory = self.decoder.memory_tokens(config.memory_tokens)

    def init_state(self, batch, device=None, dtype=None):
        options = state_options(self, device, dtype)
        return self.memory.to(**options).expand(batch, -1, -1)

    @property
    def front(self) -> int:
        return self.config.rows(0) - self.config.memory_tokens

    def step(self, state, ids_BT, mask_BT=None, write=True):
        write_BMD = self.write_rows(state)
        hidden_BTD, new_BMD = self.segment(
            self.read_rows(state), write_BMD if write else write_BMD[:, :0], ids_BT, mask_BT
        )
        return hidden_BTD, self.written(state, new_BMD) if write else state

    def advance(self, state, ids_BT, mask_BT=None):
        if not self.config.memory_tokens:
            return self.step(state, ids_BT, mask_BT)[1]
        rows = self.read_rows(state), self.write_rows(state)
        return self.written(state, self.segment(*rows, ids_BT, mask_BT, hidden=False)[1])

    def refuses_groups(self, longest=0):
        return rmt_segments.refusal(self, longest) or super().refuses_groups(longest)

    def read_group(self, ids_SBT, state, mask_SBT, cuts, keep):
        return rmt_segments.read_group(self, ids_SBT, state, mask_SBT, cuts, keep)

    def read_rows(self, state: State) -> Tensor:
        """The rows in front of the tokens, of which the first are the write rows."""
        return state

    def write_rows(self, state: State) -> Tensor:
        """The rows behind the tokens."""
        return state

    def written(self, state: State, new_BMD: Tensor) -> State:
        """The state after a segment, from the outputs at its write rows."""
        return self.update(state, new_BMD.to(state.dtype))

    def segment(
        self, read_BMD: Tensor, write_BMD: Tensor, ids_BT: Tensor, mask_BT: Tensor | None, hidden: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Decoder outputs at the tokens and at the write rows (which may be none) of ``[read; tokens; write]``.

        hidden: without, the tokens have none.
        """
        tokens_BTD = self.decoder.tokens(ids_BT)
        rows_BTD = torch.cat([read_BMD.to(tokens_BTD.dtype), tokens_BTD, write_BMD.to(tokens_BTD.dtype)], dim=1)
        start, written = read_BMD.shape[1], write_BMD.shape[1]
        mask = None if mask_BT is None else F.pad(mask_BT, (start, written), value=True)
        rows_BTD = self.decoder.add_positions(rows_BTD, start, written)
        hidden_BTD = self.decoder.run(rows_BTD, mask, None if hidden else written)
        end = hidden_BTD.shape[1] - written
        # A view would keep the whole segment alive.
        return hidden_BTD[:, start if hidden else 0 : end], hidden_BTD[:, end:].clone()

    def read_tokens(self, state, piece, rows_BTD):
        for block in self.decoder.layers:
            rows_BTD = piece.through(block, rows_BTD)
        return rows_BTD

    def memory_rows(self, piece: Piece, rows_BMD: Tensor, wrapped: int) -> Tensor:
        """Outputs of the decoder at memory rows."""
        rows_BMD = rows_BMD.to(self.decoder.tokens.weight.dtype)
        return self.decoder.norm(self.read_tokens(None, piece, piece.add_positions(self.decoder, rows_BMD, 0, wrapped)))

    def read_memory(self, state, opened, live_B):
        if not self.front:
            return opened
        piece = Piece(opened, self.front, live_B * self.front)
        self.memory_rows(piece, self.read_rows(state), 0)
        return piece.done()

    def write_memory(self, state, opened):
        rows_BMD = self.write_rows(state)
        if rows_BMD.shape[1]:
            rows_BMD = self.memory_rows(Piece(opened, rows_BMD.shape[1]), rows_BMD, self.front)
        return self.written(state, rows_BMD)

    def update(self, old_BMD: Tensor, new_BMD: Tensor) -> Tensor:
        """The memory of the next segment, from that of this segment and the one that it wrote."""
        return new_BMD
