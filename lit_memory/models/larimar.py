"""Larimar: an encoder of lines, an episodic memory of their latents, and a decoder that one latent conditions.

Paper:     Das et al. 2024, Larimar: Large language models with episodic memory control, arXiv 2403.11901, section 3; Nelson et al. 2024,
           Needle in the haystack for memory based large language models, arXiv 2407.01437, section 2. The memory is in ``memory/episodic.py``.
Reference: the code of arXiv 2403.11901 as spec 11 describes it; none of arXiv 2407.01437 is public.

A segment is one line of text, or several of ``line_tokens`` tokens. The state is the episode: the latents of all lines so far, the newest
of which is the question. With Z the latents of the lines before it, z its own, and memory and keys as in ``memory/episodic.py``,

(1) z = W_z tanh(W_p h + b), h what the encoder makes of a [CLS] row in front of the line         ``encode``
(2) z_r = read(write(Z), z)                                                                     ``read``
(3) a segment is decoded with W_M z_r, one key and value per layer, at a position before its tokens, and with W_e z_r added to the
    embedding of each of them                                                                   ``decode``
(4) its lines then join the episode                                                             ``write``

So what is asked goes into the last line of a context, and what is to be said into the segment after it: causal, as whatever conditions a
segment comes from earlier ones. Where no line is before the question there is nothing to read, and z_r = z: an auto-encoder, or a model
without memory. Before the first line z_r = 0.

Deviations
1. Lines are stored and (2) writes all of them at once when it reads, which is the published write of an episode; the state grows by a
   latent a line. A memory of constant size (``episodic.add``) has the same M with solver "svd".
2. Encoder and decoder have one width, one table of token embeddings and one tokenizer (published: BERT-large and GPT-2-large), and the encoder
   no embedding of sentence types, as all are of one type.
3. The encoder gives the latent alone; the published one also gives a log-variance, which nothing uses.
4. The variance of keys is a setting (published: learned by one of five kinds of networks, the largest of them 15 % of the model).
5. Noise is off by default (published: 1e-6 or 1e-4 in training; 0 in arXiv 2407.01437) and only in training.
6. ``keys`` "one_hot" and "gaussian" take the lines themselves for the key memory: a slot per line, as in arXiv 2407.01437.

Shape suffixes: B batch, T tokens, N lines, Q queries, X lines of a batch, D width, C width of a latent, E latent and key, K slots.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.backbone import BackboneConfig, Block, Decoder, attention_mask
from lit_memory.checks import at_least
from lit_memory.memory import episodic
from lit_memory.recurrence import SegmentRecurrent


class Episode(NamedTuple):
    """Latents of all lines (with ``prefix_tokens`` and keys behind them), the newest last, and which of them are real.

    The first is not: it stands for the question of a sample that has no line yet. Samples with fewer lines are padded in front. What is not
    real is zero.
    """

    lines_BNE: Tensor
    real_BN: Tensor


class EncoderBlock(Block):
    """BERT's layer: every row sees all, and norms follow the residual sums."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.activation = nn.GELU()

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None) -> Tensor:
        x_BTD = self.norm1(x_BTD + self.dropout(self.attention(x_BTD, mask)[0]))
        return self.norm2(x_BTD + self.dropout(self.down(self.activation(self.up(x_BTD)))))


class Encoder(nn.Module):
    """(1), with a table of token embeddings that is passed in."""

    def __init__(self, config: "Larimar.Config") -> None:
        super().__init__()
        c = config
        block = BackboneConfig("gpt2", width=c.width, heads=c.heads, ff_mult=c.ff_mult, dropout=c.dropout, norm_eps=c.norm_eps)
        self.cls = nn.Parameter(torch.randn(c.width) * c.init_std)
        self.positions = nn.Embedding(1 + c.positions, c.width)
        self.norm = nn.LayerNorm(c.width, c.norm_eps)
        self.dropout = nn.Dropout(c.dropout)
        self.layers = nn.ModuleList(EncoderBlock(block) for _ in range(c.encoder_layers))
        self.pooler = nn.Linear(c.width, c.width)
        self.to_latent = nn.Linear(c.width, c.latent_width, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=c.init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens_XTD: Tensor, mask_XT: Tensor) -> Tensor:
        """Latents (X, C) of embedded lines. Raises ValueError for lines beyond the position table."""
        lines, length = mask_XT.shape
        if length >= len(self.positions.weight):
            raise ValueError(f"{length} tokens in one line, but the encoder has {len(self.positions.weight) - 1} positions: use line_tokens or raise positions")
        rows_XTD = torch.cat([self.cls.expand(lines, 1, -1), tokens_XTD], dim=1) + self.positions.weight[: length + 1]
        rows_XTD = self.dropout(self.norm(rows_XTD))
        mask = F.pad(mask_XT, (1, 0), value=True)[:, None, None]
        for layer in self.layers:
            rows_XTD = layer(rows_XTD, mask)
        return self.to_latent(self.pooler(rows_XTD[:, 0]).tanh())


class ConditionedLayer(nn.Module):
    """A block whose rows also see one key and value, the same vector, at position 0."""

    def __init__(self, config: "Larimar.Config") -> None:
        super().__init__()
        self.block = Block(config)

    def forward(self, rows_BTD: Tensor, mask: Tensor | None, slot_BGK: Tensor | None) -> Tensor:
        if slot_BGK is None:
            return self.block(rows_BTD, mask)
        slot_BGTK = slot_BGK.unsqueeze(2)
        return self.block.attend(rows_BTD, mask, (slot_BGTK, slot_BGTK))[0]


class Larimar(SegmentRecurrent):
    """Decoder that one latent conditions, read from the latents of earlier lines."""

    @dataclass
    class Config(BackboneConfig):
        encoder_layers: int = 2
        latent_width: int = 64
        """C (published: 768)."""
        slots: int = 64
        """K, rows of M_0 with linear keys (published: 512)."""
        keys: Literal["linear", "one_hot", "gaussian"] = "linear"
        """How lines and questions are addressed: by coordinates in M_0 and M (arXiv 2403.11901), or by the nearest line (arXiv 2407.01437)."""
        bandwidth: float = 1.0
        """Of Gaussian keys."""
        prefix_tokens: int = 0
        """Keys are latents of the first so many tokens of a line; 0: of the whole line. Not with linear keys."""
        line_tokens: int = 0
        """Tokens of a line, of which a segment may have several; 0: a segment is one line."""
        pad_id: int = -1
        """Tokens with this id are not encoded; -1: there are none."""
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
                raise ValueError(f"inputs={self.inputs}: Larimar reads lines of text; expected 0")
            at_least(1, self, "encoder_layers", "latent_width", "slots", "solver_steps")
            at_least(0, self, "prefix_tokens", "line_tokens", "write_noise", "read_noise")
            at_least(-1, self, "pad_id")
            if not self.bandwidth > 0:
                raise ValueError(f"bandwidth={self.bandwidth}: expected more than 0; for the nearest line alone use keys: one_hot")
            if self.prefix_tokens and self.keys == "linear":
                raise ValueError(f"prefix_tokens={self.prefix_tokens}: linear keys are those of the latents themselves; use keys: one_hot or gaussian")
            if self.wrap_pos:
                raise ValueError(f"wrap_pos={self.wrap_pos}: a segment has no memory rows here; leave it out")
            if not (self.past or self.embedding):
                raise ValueError(f"past={self.past}: expected True where embedding is False, as nothing else reaches the decoder")

        def check_segment(self, segment_len: int) -> None:
            super().check_segment(segment_len + self.past)

    def __init__(self, config: "Larimar.Config") -> None:
        super().__init__()
        self.config = c = config
        self.decoder = Decoder(config, ConditionedLayer)
        self.encoder = Encoder(config)
        self.M_0 = nn.Parameter(torch.eye(c.slots, c.latent_width)) if c.keys == "linear" else None
        self.to_past = nn.Linear(c.latent_width, c.layers * (c.kv_heads or c.heads) * c.head_width, bias=False) if c.past else None
        self.to_rows = nn.Linear(c.latent_width, c.width, bias=False) if c.embedding else None
        for linear in (self.to_past, self.to_rows):
            if linear is not None:
                nn.init.normal_(linear.weight, std=c.init_std)
        self.state_growth = c.latent_width * (2 if c.prefix_tokens else 1)

    def init_state(self, batch, device=None, dtype=None):
        options = self.state_options(device, dtype)
        real_BN = torch.zeros(batch, 1, dtype=torch.bool, device=options["device"])
        return Episode(torch.zeros(batch, 1, self.state_growth, **options), real_BN)

    def step(self, state, ids_BT, mask_BT=None, write=True):
        hidden_BTD = self.decode(ids_BT, self.read(state), mask_BT)
        return hidden_BTD, self.write(state, ids_BT, mask_BT) if write else state

    def encode(self, ids_XT: Tensor, mask_XT: Tensor | None = None) -> Tensor:
        """(1): latents (X, C) of lines. A line without a token that counts has one, too."""
        real_XT = ids_XT != self.config.pad_id
        return self.encoder(self.decoder.tokens(ids_XT), real_XT if mask_XT is None else real_XT & mask_XT)

    def cut(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The lines of a segment and their masks, (B, N, T)."""
        length = self.config.line_tokens or ids_BT.shape[1]
        mask_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT
        ids_BNT, mask_BNT = (F.pad(t, (0, -t.shape[1] % length)).unflatten(1, (-1, length)) for t in (ids_BT, mask_BT))
        return ids_BNT, mask_BNT

    def lines(self, ids_BNT: Tensor, mask_BNT: Tensor) -> Tensor:
        """What lines leave in the episode, (B, N, E), at least in fp32."""
        prefix, ids_XT, mask_XT = self.config.prefix_tokens, ids_BNT.flatten(0, 1), mask_BNT.flatten(0, 1)
        parts = [self.encode(ids_XT, mask_XT)]
        if prefix:
            parts.append(self.encode(ids_XT[:, :prefix], mask_XT[:, :prefix]))
        lines_XE = torch.cat(parts, dim=-1)
        return lines_XE.to(torch.promote_types(lines_XE.dtype, torch.float32)).unflatten(0, ids_BNT.shape[:2])

    def write(self, state: Episode, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Episode:
        """(4): the episode with the lines of a segment; the last one is the question now. Lines without a real token are none."""
        ids_BNT, mask_BNT = self.cut(ids_BT, mask_BT)
        lines_BNE, real_BN = self.lines(ids_BNT, mask_BNT), mask_BNT.any(-1)
        if mask_BT is not None:
            order_BN = real_BN.byte().argsort(dim=1, stable=True)  # what is no line comes first, so that the last line is one
            lines_BNE, real_BN = lines_BNE.take_along_dim(order_BN.unsqueeze(-1), dim=1), real_BN.gather(1, order_BN)
        lines_BNE = lines_BNE.to(state.lines_BNE.dtype).masked_fill(~real_BN.unsqueeze(-1), 0)
        return Episode(torch.cat([state.lines_BNE, lines_BNE], dim=1), torch.cat([state.real_BN, real_BN], dim=1))

    def read(self, state: Episode) -> Tensor:
        """(2): what the newest line finds among those before it, (B, C); its own latent where there is none."""
        asked_BQE, lines_BNE, real_BN = state.lines_BNE[:, -1:], state.lines_BNE[:, :-1], state.real_BN[:, :-1]
        own_BC = asked_BQE[:, 0, : self.config.latent_width]
        if not lines_BNE.shape[1]:
            return own_BC
        alone_B1 = ~real_BN.any(1, keepdim=True)
        found_BQC = self.recall(asked_BQE, lines_BNE, real_BN | alone_B1)
        return torch.where(alone_B1, own_BC, found_BQC[:, 0])

    def recall(self, asked_BQE: Tensor, lines_BNE: Tensor, real_BN: Tensor) -> Tensor:
        """What questions find among the real ones of some lines, of which every sample has one, (B, Q, C)."""
        return self.address(asked_BQE, lines_BNE, real_BN)[0]

    def address(self, asked_BQE: Tensor, lines_BNE: Tensor, real_BN: Tensor) -> tuple[Tensor, Tensor | None]:
        """``recall``, and the keys of the questions (B, Q, K), which one-hot keys do not need."""
        c, C = self.config, self.config.latent_width
        Z_BNC, keys_BNC, asked_BQC = lines_BNE[..., :C], lines_BNE[..., -C:], asked_BQE[..., -C:]
        with _exact(lines_BNE.device):
            if c.keys == "one_hot":
                return episodic.read_nearest(asked_BQC, keys_BNC, Z_BNC, real_BN), None
            Z_BNC = self._noisy(Z_BNC, c.write_noise) * real_BN.unsqueeze(-1)
            if c.keys == "gaussian":
                W_BNK = episodic.gaussian_keys(keys_BNC, keys_BNC, c.bandwidth, real_BN) * real_BN.unsqueeze(-1)
                memory = episodic.write(W_BNK, Z_BNC, c.solver, c.solver_steps)
                w_BQK = episodic.gaussian_keys(asked_BQC, keys_BNC, c.bandwidth, real_BN)
            else:
                assert self.M_0 is not None
                W_BNK = episodic.keys(Z_BNC, self.M_0.to(Z_BNC.dtype).unsqueeze(0), c.solver, c.solver_steps)
                memory = episodic.write(W_BNK, Z_BNC, c.solver, c.solver_steps)
                w_BQK = episodic.keys(asked_BQC, memory.M_BKC, c.solver, c.solver_steps)
            w_BQK = self._noisy(w_BQK, c.read_noise)
            return episodic.read(memory, w_BQK), w_BQK

    def _noisy(self, x: Tensor, std: float) -> Tensor:
        return x + std * torch.randn_like(x) if std and self.training else x

    def decode(self, ids_BT: Tensor, latent_BC: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """(3): hidden states (B, T, D) of tokens that a latent conditions."""
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

    def losses(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> dict[str, Tensor]:
        """The published training losses of the lines of a segment: cross-entropies of their tokens, each from the ones before it in its line.

        memory: every line from what its own latent reads out of the memory of all. autoencoding: from its latent. language: from a zero latent.
        keys (not with one-hot keys): the KL term, 1/2 |w|^2 of the questions up to a constant, mean over the lines.
        """
        ids_BNT, mask_BNT = self.cut(ids_BT, mask_BT)
        lines_BNE, real_BN = self.lines(ids_BNT, mask_BNT), mask_BNT.any(-1)
        found_BNC, w_BNK = self.address(lines_BNE, lines_BNE, real_BN)
        own_BNC = lines_BNE[..., : self.config.latent_width]
        ids_XT, mask_XT = ids_BNT.flatten(0, 1), (mask_BNT & (ids_BNT != self.config.pad_id)).flatten(0, 1)
        scored_XT, out = mask_XT[:, 1:] & mask_XT[:, :-1], {}
        for name, latent_BNC in (("memory", found_BNC), ("autoencoding", own_BNC), ("language", torch.zeros_like(own_BNC))):
            hidden_XTD = self.decode(ids_XT, latent_BNC.flatten(0, 1), mask_XT)[:, :-1]
            out[name] = F.cross_entropy(self.logits(hidden_XTD[scored_XT]), ids_XT[:, 1:][scored_XT])
        if w_BNK is not None:
            out["keys"] = (w_BNK.square().sum(-1) / 2)[real_BN].mean()
        return out

    def choose(self, live_B, new, old):
        kept = self._padded(old, new.real_BN.shape[1])
        return Episode(torch.where(live_B[:, None, None], new.lines_BNE, kept.lines_BNE), torch.where(live_B[:, None], new.real_BN, kept.real_BN))

    def join(self, state, others):
        others = self._padded(others, state.real_BN.shape[1])
        return Episode(torch.cat([state.lines_BNE, others.lines_BNE.to(state.lines_BNE.dtype)]), torch.cat([state.real_BN, others.real_BN]))

    def reorder(self, state, idx):
        lines_BNE, real_BN = super().reorder(state, idx)
        first = int(F.pad(real_BN.any(0), (0, 1), value=True).byte().argmax())  # of the real lines; the one before stands for none
        start = max(0, min(first - 1, real_BN.shape[1] - 1))
        return Episode(lines_BNE[:, start:], real_BN[:, start:])

    @staticmethod
    def _padded(state: Episode, lines: int) -> Episode:
        """The same episodes with ``lines`` lines: those that are missing are added in front and not real."""
        missing = lines - state.real_BN.shape[1]
        return Episode(F.pad(state.lines_BNE, (0, 0, missing, 0)), F.pad(state.real_BN, (missing, 0)))


def _exact(device: torch.device):
    """No autocast, as pseudo-inverses need fp32; there is none to leave on "meta"."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()
