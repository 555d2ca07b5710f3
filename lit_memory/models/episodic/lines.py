"""What models share that read lines: an encoder, the episode of its latents, and a decoder that one latent conditions.

Source: section 3 of Das et al. 2024, arXiv 2403.11901, and its code as spec 11 describes it.

A segment is one line of text, or several of ``line_tokens`` tokens. The state is the episode: the latents of all lines
so far, the newest of which is the question. What it finds among the lines before it, z_r, is up to the model
(``read``). With z the latent of a line,

(1) z = W_z tanh(W_p h + b), h what the encoder makes of a [CLS] row in front of the line         ``encode``
(2) a segment is decoded with W_M z_r, one key and value per layer, at a position before its tokens, the first of which
    is ``bos_id`` if there is one, and with W_e z_r added to the embedding of each of them
    ``decode``
(3) its lines then join the episode                                                             ``advance``

So what is asked goes into the last line of a context, and what is to be said into the segment after it: causal, as
whatever conditions a segment comes from earlier ones. Where no line is before the question there is nothing to read,
and z_r = z: an auto-encoder, or a model without memory. Before the first line z_r = 0.

Shape suffixes: B batch, T tokens, N lines, X lines of a batch, U different ones, S scored tokens, H reads, D width, C
width of a latent, E latent and key.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.memory import episodic
from lit_memory.models.decoder import BackboneConfig, Block, Decoder, attention_mask
from lit_memory.recurrence import SegmentRecurrent, map_state
from lit_memory.util.checks import FieldError, at_least
from lit_memory.util.fields import added


class Episode(NamedTuple):
    """Latents of all lines (with keys behind them if a model has those), the newest last, which of them are real, their
    tokens (B, N, T), and how many real lines have come after each: 0 after the question. Of a line that is kept once,
    all that have come after its first coming.

    The first is not real: it stands for the question of a sample that has no line yet. Samples with fewer lines are
    padded in front. What is not real is zero. Tokens are -1 where there is none; T is 0 in a model that needs no
    tokens.
    """

    lines_BNE: Tensor
    real_BN: Tensor
    ids_BNT: Tensor
    age_BN: Tensor


class Readouts(NamedTuple):
    """What a question finds: the latents of H reads, one after the other, and of every read the nearest of the lines
    before the question.

    A line is told by its age, which counts back from the question: 1 is the one before it; 0 where there is none.
    distances_BHN: from what was read to every line, inf to what is none. age_BN: of every column, 0 where it is no
        line.
    """

    latents_BHC: Tensor
    nearest_BH: Tensor
    distances_BHN: Tensor
    age_BN: Tensor


@dataclass
class LinesConfig(BackboneConfig):
    """Sizes of encoder, decoder and memory."""

    encoder_layers: int = 2
    encoder_width: int = added(0)
    """Width of the encoder, which then has a table of token embeddings of its own, and feed-forwards four times as
    wide, like every BERT (published: BERT-large's 1024); 0: the decoder's, its table and its ``ff_mult``."""
    encoder_heads: int = added(0)
    """0: as many as the decoder has (published: 16)."""
    latent_width: int = 64
    """C (published: 768)."""
    slots: int = 64
    """K, rows of M_0 (published: 512)."""
    line_tokens: int = 0
    """Tokens of a line, of which a segment may have several; 0: a segment is one line."""
    pad_id: int = -1
    """Tokens with this id are not encoded; -1: there are none."""
    bos_id: int = added(-1)
    """Token that the decoder begins with, whatever it decodes; -1: none, so that the first token of a line is given and
    no latent has to hold it."""
    solver: Literal["newton", "newton_safe", "svd"] = "newton"
    solver_steps: int = 15
    """Of both Newtons (published: 15, 7 or 3)."""
    past: bool = True
    """Condition the decoder on a latent through keys and values (W_M)."""
    embedding: bool = True
    """Condition it through its embeddings (W_e; in the published code, not in the paper)."""
    write_noise: float = 0.0
    """Standard deviation of what is added to latents that are written, in training."""
    read_noise: float = 0.0
    """Standard deviation of what is added to the key of a question, in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inputs:
            raise FieldError("inputs", self.inputs, "this model reads lines of text; expected 0")
        at_least(1, self, "encoder_layers", "latent_width", "slots", "solver_steps")
        at_least(0, self, "encoder_width", "encoder_heads", "line_tokens", "write_noise", "read_noise")
        at_least(-1, self, "pad_id", "bos_id")
        if self.vocab_size and self.bos_id >= self.vocab_size:
            raise FieldError("bos_id", self.bos_id, f"expected one of the {self.vocab_size} tokens, or -1 for none")
        width, heads = self.encoder_size
        if width % heads:
            name = "encoder_heads" if self.encoder_heads else "encoder_width"
            raise FieldError(
                name,
                getattr(self, name),
                f"expected a multiple of its heads for the width of the encoder, not {width} with {heads}",
            )
        if self.wrap_pos:
            raise FieldError("wrap_pos", self.wrap_pos, "a segment has no memory rows here; leave it out")
        if not (self.past or self.embedding):
            raise FieldError(
                "past", self.past, "expected True where embedding is False, as nothing else reaches the decoder"
            )

    @property
    def encoder_size(self) -> tuple[int, int]:
        """Width and heads of the encoder."""
        return self.encoder_width or self.width, self.encoder_heads or self.heads

    def check_segment(self, segment_len: int) -> None:
        super().check_segment(segment_len + self.past + (self.bos_id >= 0))


class EncoderBlock(Block):
    """BERT's layer: every row sees all, and norms follow the residual sums."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.activation = nn.GELU()

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None) -> Tensor:
        x_BTD = self.norm1(x_BTD + self.dropout(self.attention(x_BTD, mask)[0]))
        return self.norm2(x_BTD + self.dropout(self.down(self.activation(self.up(x_BTD)))))


class Encoder(nn.Module):
    """(1), of embedded tokens. ``tokens``: its own table of embeddings; without one it reads the decoder's."""

    def __init__(self, config: LinesConfig) -> None:
        super().__init__()
        c, (width, heads) = config, config.encoder_size
        ff_mult = 4.0 if c.encoder_width else c.ff_mult
        block = BackboneConfig(
            "gpt2", width=width, heads=heads, ff_mult=ff_mult, dropout=c.dropout, norm_eps=c.norm_eps
        )
        self.cls = nn.Parameter(torch.randn(width) * c.init_std)
        self.tokens = nn.Embedding(c.vocab_size, width) if c.encoder_width else None
        self.positions = nn.Embedding(1 + c.positions, width)
        self.norm = nn.LayerNorm(width, c.norm_eps)
        self.dropout = nn.Dropout(c.dropout)
        self.layers = nn.ModuleList(EncoderBlock(block) for _ in range(c.encoder_layers))
        self.pooler = nn.Linear(width, width)
        self.to_latent = nn.Linear(width, c.latent_width, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=c.init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens_XTD: Tensor, mask_XT: Tensor) -> Tensor:
        """Latents (X, C) of embedded lines. Raises ValueError for lines beyond the position table."""
        lines, length = mask_XT.shape
        if length >= len(self.positions.weight):
            raise ValueError(
                f"{length} tokens in one line, but the encoder has {len(self.positions.weight) - 1} positions: use line_tokens or raise positions"
            )
        rows_XTD = torch.cat([self.cls.expand(lines, 1, -1), tokens_XTD], dim=1) + self.positions.weight[: length + 1]
        rows_XTD = self.dropout(self.norm(rows_XTD))
        mask = F.pad(mask_XT, (1, 0), value=True)[:, None, None]
        for layer in self.layers:
            rows_XTD = layer(rows_XTD, mask)
        return self.to_latent(self.pooler(rows_XTD[:, 0]).tanh())


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


class LineRecurrent(SegmentRecurrent):
    """A model that reads lines; what a question finds among them is its own (``read``)."""

    kept_tokens: int = 0
    """Tokens of every line that the state holds."""
    growth_unit = "line"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = c = config
        self.decoder = Decoder(config, ConditionedLayer)
        self.encoder = Encoder(config)
        self.to_past = (
            nn.Linear(c.latent_width, c.layers * (c.kv_heads or c.heads) * c.head_width, bias=False) if c.past else None
        )
        self.to_rows = nn.Linear(c.latent_width, c.width, bias=False) if c.embedding else None
        for linear in (self.to_past, self.to_rows):
            if linear is not None:
                nn.init.normal_(linear.weight, std=c.init_std)
        self.state_growth = c.latent_width

    def init_state(self, batch, device=None, dtype=None):
        options = self.state_options(device, dtype)
        lines_BNE = torch.zeros(batch, 1, self.state_growth, **options)
        return self.alone(lines_BNE, real=False)

    def step(self, state, ids_BT, mask_BT=None, write=True):
        return self.decode_state(state, ids_BT, mask_BT), self.advance(state, ids_BT, mask_BT) if write else state

    def decode_state(self, state: Episode, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Hidden states (B, T, D) of a segment that comes after the lines of a state."""
        return self.decode(ids_BT, self.read(state), mask_BT)

    def read(self, state: Episode) -> Tensor:
        """z_r, what the newest line finds among those before it, (B, C); its own latent where there is none."""
        raise NotImplementedError

    def readouts(self, state: Episode) -> Readouts:
        """What is read, and what it lies next to. Default: one read, and its distances to the latents of the lines."""
        lines_BNE, real_BN, _, age_BN = self.before(state)
        alone_B1, read_B1C = ~real_BN.any(1, keepdim=True), self.read(state).unsqueeze(1)
        distances_B1N = episodic.distances(
            read_B1C.detach(), lines_BNE[..., : read_B1C.shape[-1]].detach(), real_BN | alone_B1
        )
        return self.located(read_B1C, distances_B1N, real_BN, age_BN)

    @staticmethod
    def before(state: Episode) -> Episode:
        """The lines before the question; one that is not real where there is none."""
        return map_state(lambda t: t[:, :-1], padded(state, max(2, state.real_BN.shape[1])))

    @staticmethod
    def located(latents_BHC: Tensor, distances_BHN: Tensor, real_BN: Tensor, age_BN: Tensor) -> Readouts:
        """Readouts of these latents, where what was read has these distances to the lines."""
        return Readouts(
            latents_BHC,
            age_BN.gather(1, distances_BHN.argmin(-1)),
            distances_BHN.masked_fill(~real_BN.unsqueeze(1), torch.inf),
            age_BN,
        )

    def found(self, latents_BC: Tensor) -> Episode:
        """The state of which these latents are what is read: that of questions with no line before them."""
        return self.alone(latents_BC.unsqueeze(1), real=True)

    def alone(self, lines_B1E: Tensor, real: bool) -> Episode:
        """Episodes of one line each, of which no tokens are known."""
        size = lines_B1E.shape[:2]
        real_B1 = lines_B1E.new_full(size, real, dtype=torch.bool)
        return Episode(
            lines_B1E,
            real_B1,
            real_B1.new_full((*size, self.kept_tokens), -1, dtype=torch.int64),
            real_B1.new_zeros(size, dtype=torch.int64),
        )

    def encode(self, ids_XT: Tensor, mask_XT: Tensor | None = None) -> Tensor:
        """(1): latents (X, C) of lines. A line without a token that counts has one, too. What is there several times is
        encoded once, but with dropout."""
        real_XT = ids_XT != self.config.pad_id
        real_XT = real_XT if mask_XT is None else real_XT & mask_XT
        if self.training and self.config.dropout:
            return self.encode_rows(ids_XT, real_XT)
        ids_UT, real_UT, place_X, _ = distinct(ids_XT, real_XT)
        return self.encode_distinct(ids_UT, real_UT)[place_X]

    def encode_distinct(self, ids_UT: Tensor, real_UT: Tensor) -> Tensor:
        """(1) of lines that are all different, each in columns of its own width."""
        parts = by_width(real_UT)
        latents = [self.encode_rows(ids_UT[numbers, :width], real_UT[numbers, :width]) for numbers, width in parts]
        return torch.cat(latents)[torch.cat([numbers for numbers, _ in parts]).argsort()]

    def encode_rows(self, ids_XT: Tensor, real_XT: Tensor) -> Tensor:
        """(1) of lines as they are."""
        return self.encoder((self.encoder.tokens or self.decoder.tokens)(ids_XT), real_XT)

    def cut(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The lines of a segment and their masks, (B, N, T)."""
        length = self.config.line_tokens or ids_BT.shape[1]
        mask_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT
        ids_BNT, mask_BNT = (F.pad(t, (0, -t.shape[1] % length)).unflatten(1, (-1, length)) for t in (ids_BT, mask_BT))
        return ids_BNT, mask_BNT

    def lines(self, ids_BNT: Tensor, mask_BNT: Tensor) -> Tensor:
        """What lines leave in the episode, (B, N, E), at least in fp32."""
        lines_XE = self.encode(ids_BNT.flatten(0, 1), mask_BNT.flatten(0, 1))
        return lines_XE.to(torch.promote_types(lines_XE.dtype, torch.float32)).unflatten(0, ids_BNT.shape[:2])

    def advance(self, state: Episode, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Episode:
        """(3): the episode with the lines of a segment; the last one is the question now. Lines without a real token
        are none."""
        ids_BNT, mask_BNT = self.cut(ids_BT, mask_BT)
        real_BN = mask_BNT.any(-1)
        lines_BNE = self.lines(ids_BNT, mask_BNT).to(state.lines_BNE.dtype).masked_fill(~real_BN.unsqueeze(-1), 0)
        new = Episode(lines_BNE, real_BN, ids_BNT.masked_fill(~mask_BNT, -1)[..., : self.kept_tokens], ages(real_BN))
        if mask_BT is not None:
            new = taken(
                new, real_BN.byte().argsort(dim=1, stable=True)
            )  # what is no line comes first, so that the last line is one
        return map_state(lambda a, b: torch.cat([a, b], dim=1), aged(state, real_BN), new)

    def noisy(self, x: Tensor, std: float) -> Tensor:
        return x + std * torch.randn_like(x) if std and self.training else x

    def begun(self, x_BT: Tensor, value: int) -> Tensor:
        """With a column in front for ``bos_id`` if there is one."""
        return F.pad(x_BT, (1, 0), value=value) if self.config.bos_id >= 0 else x_BT

    def decode(self, ids_BT: Tensor, latent_BC: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """(2): hidden states (B, T, D) of tokens that a latent conditions."""
        begun_BT = self.begun(ids_BT, self.config.bos_id)
        mask_BT = None if mask_BT is None else self.begun(mask_BT, True)
        return self.decode_begun(begun_BT, latent_BC, mask_BT)[:, begun_BT.shape[1] - ids_BT.shape[1] :]

    def decode_begun(self, ids_BT: Tensor, latent_BC: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """``decode`` of tokens that are ``begun``, with a hidden state for ``bos_id``, too."""
        c = self.config
        rows_BTD, mask = self.decoder.tokens(ids_BT), None
        latent_BC, slots = latent_BC.to(rows_BTD.dtype), [None] * c.layers
        if self.to_rows is not None:
            rows_BTD = rows_BTD + self.to_rows(latent_BC).unsqueeze(1)
        if self.to_past is None:
            rows_BTD = self.decoder.place(rows_BTD)
            mask = None if mask_BT is None else attention_mask(mask_BT, ids_BT.shape[1])
        else:
            slots = self.to_past(latent_BC).unflatten(-1, (c.layers, -1, c.head_width)).unbind(1)
            rows_BTD = self.decoder.place(F.pad(rows_BTD, (0, 0, 1, 0)))[:, 1:]  # the slot has position 0
            valid_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT
            mask = attention_mask(F.pad(valid_BT, (1, 0), value=True), ids_BT.shape[1])
        for layer, slot_BGK in zip(self.decoder.layers, slots, strict=True):
            rows_BTD = layer(rows_BTD, mask, None if slot_BGK is None else slot_BGK.to(rows_BTD.dtype))
        return self.decoder.norm(rows_BTD)

    def reconstruction(
        self, ids_XT: Tensor, mask_XT: Tensor, latents_XC: Tensor, counts_X: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy of the tokens of lines, each from a latent and what is before it in its line, ``bos_id``
        first; 0 where that is nothing.

        counts_X: how often a line counts; default: once.
        """
        real_XT = self.begun(mask_XT & (ids_XT != self.config.pad_id), True)
        ids_XT = self.begun(ids_XT, self.config.bos_id)
        hidden, targets, weights = [], [], []
        times_X = real_XT.new_ones(len(real_XT), dtype=torch.int64) if counts_X is None else counts_X
        for numbers, width in by_width(real_XT):
            ids_UT, mask_UT = ids_XT[numbers, :width], real_XT[numbers, :width]
            scored_UT = mask_UT[:, 1:] & mask_UT[:, :-1]
            hidden.append(self.decode_begun(ids_UT, latents_XC[numbers], mask_UT)[:, :-1][scored_UT])
            targets.append(ids_UT[:, 1:][scored_UT])
            weights.append(times_X[numbers].unsqueeze(1).expand_as(scored_UT)[scored_UT])
        loss_S = F.cross_entropy(self.logits(torch.cat(hidden)), torch.cat(targets), reduction="none")
        weight_S = torch.cat(weights).to(loss_S.dtype)
        return (loss_S * weight_S).sum() / weight_S.sum().clamp(min=1)

    def autoencoding(self, ids_XT: Tensor, mask_XT: Tensor) -> Tensor:
        """``reconstruction`` of lines from their own latents. What is there several times is decoded once, but with
        dropout."""
        if self.training and self.config.dropout:
            return self.reconstruction(ids_XT, mask_XT, self.encode(ids_XT, mask_XT))
        ids_UT, real_UT, _, counts_U = distinct(ids_XT, mask_XT & (ids_XT != self.config.pad_id))
        return self.reconstruction(ids_UT, real_UT, self.encode_distinct(ids_UT, real_UT), counts_U)

    def choose(self, live_B, new, old):
        if bool(
            live_B.all()
        ):  # an episode grows, and to copy all of it for every segment would take time that grows with its square
            return new
        return super().choose(live_B, new, padded(old, new.real_BN.shape[1]))

    def join(self, state, others):
        return super().join(state, padded(others, state.real_BN.shape[1]))

    def reorder(self, state, idx):
        return trimmed(super().reorder(state, idx))


def distinct(ids_XT: Tensor, mask_XT: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lines, each once: tokens and masks (U, T), which of them every line is (X,), and how often each was there
    (U,)."""
    ids_UT, place_X, counts_U = ids_XT.masked_fill(~mask_XT, -1).unique(dim=0, return_inverse=True, return_counts=True)
    return ids_UT.clamp(min=0), ids_UT >= 0, place_X, counts_U


def by_width(mask_XT: Tensor) -> list[tuple[Tensor, int]]:
    """Numbers of lines that need as many columns, and these columns: a power of two from 8 on, or all that there are.

    What is computed of a line then depends on it alone, and not on how long those beside it are.
    """
    columns, device = mask_XT.shape[1], mask_XT.device
    widths = [*(width for i in range(columns.bit_length()) if (width := 8 << i) < columns), columns]
    needed_X = (mask_XT * torch.arange(1, columns + 1, device=device)).amax(1)
    width_X = torch.bucketize(needed_X, torch.tensor(widths, device=device))
    return [((width_X == i).nonzero().squeeze(1), widths[i]) for i in width_X.unique().tolist()]


def ages(real_BN: Tensor) -> Tensor:
    """How many real lines come after each real one; 0 at the others."""
    return (real_BN.flip(1).cumsum(1).flip(1) - 1) * real_BN


def aged(state: Episode, real_BN: Tensor) -> Episode:
    """The same episodes after more lines, of which these are real."""
    return state._replace(age_BN=state.age_BN + real_BN.sum(1, keepdim=True) * state.real_BN)


def taken(state: Episode, columns_BN: Tensor) -> Episode:
    """The lines that are in these columns."""
    rows_B1 = torch.arange(len(columns_BN), device=columns_BN.device)[:, None]
    return map_state(lambda t: t[rows_B1, columns_BN], state)


def padded(state: Episode, lines: int) -> Episode:
    """The same episodes with ``lines`` lines: those that are missing are added in front and not real."""
    missing = lines - state.real_BN.shape[1]
    lines_BNE, real_BN, ids_BNT, age_BN = state
    ids_BNT = F.pad(ids_BNT, (0, 0, missing, 0), value=-1)
    return Episode(
        F.pad(lines_BNE, (0, 0, missing, 0)), F.pad(real_BN, (missing, 0)), ids_BNT, F.pad(age_BN, (missing, 0))
    )


def trimmed(state: Episode) -> Episode:
    """The same episodes without columns in front that no sample needs: one that is not real is left, for a sample that
    has no line."""
    real_BN = state.real_BN
    first = int(F.pad(real_BN.any(0), (0, 1), value=True).byte().argmax())
    start = max(0, min(first - 1, real_BN.shape[1] - 1))
    return map_state(lambda t: t[:, start:], state)
