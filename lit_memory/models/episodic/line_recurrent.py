"""Shared base of the line-reading models, Larimar and MemReasoner: encode lines, keep them, decode from one latent.

Source: section 3 of Das et al. 2024, arXiv 2403.11901, and its code as spec 11 describes it.

A segment is one line of text, or several of ``line_tokens`` tokens. The state is the episode: the latents of all lines
so far, the newest of which is the question. What the question reads from the lines before it, z_r, is up to the model
(``read``). With z the latent of a line,

(1) z = W_z tanh(W_p h + b), h the encoder's output at a [CLS] row in front of the line           ``encode``
(2) a segment is decoded with W_M z_r, one key and value per layer, at a position before its tokens, the first of which
    is ``bos_id`` if there is one, and with W_e z_r added to the embedding of each of them         ``decode``
(3) its lines then join the episode                                                                ``advance``

So the question is the last line of a context, and its answer is the segment after it: causal, as what conditions a
segment comes from earlier ones. Where no line is before the question there is nothing to read, and z_r = z: an
auto-encoder, or a model without memory. Before the first line z_r = 0.

Shape suffixes: B batch, T tokens, N lines, X lines of a batch, U different ones, S scored tokens, H reads, G heads of
keys and values, K head width, D width, C width of a latent, E latent and key.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.memory import episodic
from lit_memory.models.attention import attention_mask
from lit_memory.models.decoder import Block, Decoder
from lit_memory.models.episodic.encoder import Encoder, LinesConfig, group_by_width, unique_lines
from lit_memory.models.episodic.episode import (
    Episode,
    Readouts,
    ages,
    before_question,
    drop_leading_padding,
    gather_lines,
    pad_lines,
    readouts_of,
    shift_ages,
    single_line,
)
from lit_memory.recurrence import (
    Diagnosed,
    GrowingState,
    SeparateWrite,
    SeveralLosses,
    append_samples,
    at_least_single,
    map_state,
    select_state,
    state_options,
    weighted_cross_entropy,
)
from lit_memory.util.checks import FieldError


class ConditionedLayer(nn.Module):
    """A block whose rows also see one key and value, the same vector, at position 0."""

    def __init__(self, config: LinesConfig) -> None:
        super().__init__()
        self.block = Block(config)

    def forward(self, rows_BTD: Tensor, mask: Tensor | None, slot_BGK: Tensor | None) -> Tensor:
        if slot_BGK is None:
            return self.block(rows_BTD, mask)
        slot_BGTK = slot_BGK.unsqueeze(2)
        return self.block.attend(rows_BTD, mask, (slot_BGTK, slot_BGTK))[0]


class LineRecurrent(GrowingState, SeparateWrite, SeveralLosses, Diagnosed):
    """A model that reads lines. What a question reads from them is up to the subclass (``read``)."""

    numbers = 1
    looks_at_numbers = True  # which lines are equal
    visible = ("hops",)
    """The views (``util.views.VIEWS``) that a report can ask for."""
    kept_tokens: int = 0
    """Tokens of every line that the state holds."""
    growth_unit = "line"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = c = config
        self.decoder = Decoder(config, ConditionedLayer)
        self.encoder = Encoder(config)
        kv_width = (c.kv_heads or c.heads) * c.head_width
        self.to_past = nn.Linear(c.latent_width, c.layers * kv_width, bias=False) if c.past else None
        self.to_rows = nn.Linear(c.latent_width, c.width, bias=False) if c.embedding else None
        for linear in (self.to_past, self.to_rows):
            if linear is not None:
                nn.init.normal_(linear.weight, std=c.init_std)
        self.state_growth = c.latent_width

    # --- the state

    def init_state(self, batch, device=None, dtype=None):
        lines_BNE = torch.zeros(batch, 1, self.state_growth, **state_options(self, device, dtype))
        return self.single_line_state(lines_BNE, real=False)

    def single_line_state(self, lines_B1E: Tensor, real: bool) -> Episode:
        """The state of episodes of one line each, whose tokens are unknown."""
        return single_line(lines_B1E, real, self.kept_tokens)

    def state_from_latents(self, latents_BC: Tensor) -> Episode:
        """The state that reads these latents: that of questions with no line before them."""
        return self.single_line_state(latents_BC.unsqueeze(1), real=True)

    def read_once(self, state):
        return self.state_from_latents(self.read(state))

    def select_state(self, live_B, new, old):
        if bool(live_B.all()):  # a copy of the whole episode for every segment would take time quadratic in the lines
            return new
        return select_state(live_B, new, pad_lines(old, new.real_BN.shape[1]))

    def append_samples(self, state, others):
        return append_samples(state, pad_lines(others, state.real_BN.shape[1]))

    def reorder(self, state, idx):
        return drop_leading_padding(super().reorder(state, idx))

    # --- one segment

    def step(self, state, ids_BT, mask_BT=None, write=True):
        hidden_BTD = self.decode_state(state, ids_BT, mask_BT)
        return hidden_BTD, self.advance(state, ids_BT, mask_BT) if write else state

    def advance(self, state: Episode, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Episode:
        """(3): the episode with the lines of a segment. The last real one is the question now."""
        ids_BNT, mask_BNT = self.cut(ids_BT, mask_BT)
        real_BN = mask_BNT.any(-1)
        lines_BNE = self.lines(ids_BNT, mask_BNT).to(state.lines_BNE.dtype).masked_fill(~real_BN.unsqueeze(-1), 0)
        new = Episode(lines_BNE, real_BN, ids_BNT.masked_fill(~mask_BNT, -1)[..., : self.kept_tokens], ages(real_BN))
        if mask_BT is not None:  # columns that are no line go to the front, so that the last column is a line
            new = gather_lines(new, real_BN.byte().argsort(dim=1, stable=True))
        return map_state(lambda a, b: torch.cat([a, b], dim=1), shift_ages(state, real_BN), new)

    def cut(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The lines of a segment and their masks, (B, N, T). Raises FieldError for a segment that is an empty line."""
        if not (length := self.config.line_tokens or ids_BT.shape[1]):
            raise FieldError("ids_BT", tuple(ids_BT.shape), "a segment is a line; expected at least one token")
        mask_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT
        ids_BNT, mask_BNT = (F.pad(t, (0, -t.shape[1] % length)).unflatten(1, (-1, length)) for t in (ids_BT, mask_BT))
        return ids_BNT, mask_BNT

    def lines(self, ids_BNT: Tensor, mask_BNT: Tensor) -> Tensor:
        """Entries of lines in the episode, (B, N, E), at least in fp32."""
        lines_XE = self.encode(ids_BNT.flatten(0, 1), mask_BNT.flatten(0, 1))
        return at_least_single(lines_XE).unflatten(0, ids_BNT.shape[:2])

    def decode_state(self, state: Episode, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Hidden states (B, T, D) of a segment that comes after the lines of a state."""
        return self.decode(ids_BT, self.read(state), mask_BT)

    def read(self, state: Episode) -> Tensor:
        """z_r, what the newest line reads from those before it, (B, C); its own latent if there is none."""
        raise NotImplementedError

    def readouts(self, state: Episode) -> Readouts:
        """The reads of a question and their nearest lines. Default: one read, and its distances to the latents."""
        lines_BNE, real_BN, _, age_BN = before_question(state)
        empty_B1, read_B1C = ~real_BN.any(1, keepdim=True), self.read(state).unsqueeze(1)
        latents_BNC = lines_BNE[..., : read_B1C.shape[-1]]
        distances_B1N = episodic.distances(read_B1C.detach(), latents_BNC.detach(), real_BN | empty_B1)
        return readouts_of(read_B1C, distances_B1N, real_BN, age_BN)

    def add_noise(self, x: Tensor, std: float) -> Tensor:
        """``x`` with Gaussian noise in training."""
        return x + std * torch.randn_like(x) if std and self.training else x

    # --- (1), the encoder

    def encode(self, ids_XT: Tensor, mask_XT: Tensor | None = None) -> Tensor:
        """(1): latents (X, C) of lines; a line without a token that counts has one, too.

        Repeated lines are encoded once, except with dropout.
        """
        real_XT = ids_XT != self.config.pad_id
        real_XT = real_XT if mask_XT is None else real_XT & mask_XT
        if self.training and self.config.dropout:
            return self.encode_rows(ids_XT, real_XT)
        ids_UT, real_UT, index_X, _ = unique_lines(ids_XT, real_XT)
        return self.encode_distinct(ids_UT, real_UT)[index_X]

    def encode_distinct(self, ids_UT: Tensor, real_UT: Tensor) -> Tensor:
        """(1) of lines that are all different, each in columns of its own width."""
        groups = group_by_width(real_UT)
        latents = [self.encode_rows(ids_UT[index, :width], real_UT[index, :width]) for index, width in groups]
        return torch.cat(latents)[torch.cat([index for index, _ in groups]).argsort()]

    def encode_rows(self, ids_XT: Tensor, real_XT: Tensor) -> Tensor:
        """(1) of lines as they are."""
        return self.encoder((self.encoder.tokens or self.decoder.tokens)(ids_XT), real_XT)

    # --- (2), the decoder

    def with_bos(self, x_BT: Tensor, value: int) -> Tensor:
        """``x`` with a column ``value`` in front, if there is a ``bos_id``."""
        return F.pad(x_BT, (1, 0), value=value) if self.config.bos_id >= 0 else x_BT

    def decode(self, ids_BT: Tensor, latent_BC: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """(2): hidden states (B, T, D) of tokens, conditioned on a latent."""
        begun_BT = self.with_bos(ids_BT, self.config.bos_id)
        mask_BT = None if mask_BT is None else self.with_bos(mask_BT, True)
        return self.decode_with_bos(begun_BT, latent_BC, mask_BT)[:, begun_BT.shape[1] - ids_BT.shape[1] :]

    def decode_with_bos(self, ids_BT: Tensor, latent_BC: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """``decode`` of tokens ``with_bos``, with a hidden state for ``bos_id`` as well."""
        c = self.config
        rows_BTD, mask = self.decoder.tokens(ids_BT), None
        latent_BC, slots = latent_BC.to(rows_BTD.dtype), [None] * c.layers
        if self.to_rows is not None:
            rows_BTD = rows_BTD + self.to_rows(latent_BC).unsqueeze(1)
        if self.to_past is None:
            rows_BTD = self.decoder.add_positions(rows_BTD)
            mask = None if mask_BT is None else attention_mask(mask_BT, ids_BT.shape[1])
        else:
            slots = self.to_past(latent_BC).unflatten(-1, (c.layers, -1, c.head_width)).unbind(1)
            rows_BTD = self.decoder.add_positions(F.pad(rows_BTD, (0, 0, 1, 0)))[:, 1:]  # the slot has position 0
            valid_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT
            mask = attention_mask(F.pad(valid_BT, (1, 0), value=True), ids_BT.shape[1])
        for layer, slot_BGK in zip(self.decoder.layers, slots, strict=True):
            rows_BTD = layer(rows_BTD, mask, None if slot_BGK is None else slot_BGK.to(rows_BTD.dtype))
        return self.decoder.norm(rows_BTD)

    # --- losses of lines

    def reconstruction(
        self, ids_XT: Tensor, mask_XT: Tensor, latents_XC: Tensor, counts_X: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy of the tokens of lines, each given a latent and the tokens before it in its line.

        The first token of a line is scored only if there is a ``bos_id``. 0 if no token is scored. counts_X: weight of
        every line; default: 1.
        """
        real_XT = self.with_bos(mask_XT & (ids_XT != self.config.pad_id), True)
        ids_XT = self.with_bos(ids_XT, self.config.bos_id)
        hidden, targets, weights = [], [], []
        counts_X = real_XT.new_ones(len(real_XT), dtype=torch.int64) if counts_X is None else counts_X
        for index, width in group_by_width(real_XT):
            ids_UT, mask_UT = ids_XT[index, :width], real_XT[index, :width]
            scored_UT = mask_UT[:, 1:] & mask_UT[:, :-1]
            hidden.append(self.decode_with_bos(ids_UT, latents_XC[index], mask_UT)[:, :-1][scored_UT])
            targets.append(ids_UT[:, 1:][scored_UT])
            weights.append(counts_X[index].unsqueeze(1).expand_as(scored_UT)[scored_UT])
        hidden_SD = torch.cat(hidden)
        weight_S = torch.cat(weights).to(torch.promote_types(hidden_SD.dtype, torch.float32))
        total = weighted_cross_entropy(self, hidden_SD, torch.cat(targets), weight_S)
        return total / weight_S.sum().clamp(min=1)

    def autoencoding(self, ids_XT: Tensor, mask_XT: Tensor, known: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """``reconstruction`` of lines from their own latents. Repeated lines are decoded once, except with dropout.

        known: indices (K,) and latents (K, C) of lines that have been encoded, which is not done again; with dropout
            all are.
        """
        if self.training and self.config.dropout:
            return self.reconstruction(ids_XT, mask_XT, self.encode(ids_XT, mask_XT))
        ids_UT, real_UT, index_X, counts_U = unique_lines(ids_XT, mask_XT & (ids_XT != self.config.pad_id))
        if known is None:
            return self.reconstruction(ids_UT, real_UT, self.encode_distinct(ids_UT, real_UT), counts_U)
        index_K, latents_KC = known
        order_K, count = torch.arange(len(index_K), device=index_K.device), len(index_K)
        first_U = counts_U.new_full(counts_U.shape, count).scatter_reduce(0, index_X[index_K], order_K, "amin")
        new_U = first_U == count
        if bool(new_U.any()):
            latents_KC = torch.cat([latents_KC, self.encode_distinct(ids_UT[new_U], real_UT[new_U])])
            first_U = torch.where(new_U, count - 1 + new_U.cumsum(0), first_U)
        return self.reconstruction(ids_UT, real_UT, latents_KC[first_U], counts_U)
