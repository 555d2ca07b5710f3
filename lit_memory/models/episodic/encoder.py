"""The encoder of the line-reading models: a BERT that makes one latent of a line of text.

Source: section 3 of Das et al. 2024, arXiv 2403.11901, and its code as spec 11 describes it.

Shape suffixes: T tokens, X lines of a batch, U different ones, D width, C width of a latent, B batch.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.decoder import BackboneConfig, Block
from lit_memory.util.checks import FieldError, at_least, check_layers
from lit_memory.util.fields import added


@dataclass
class LinesConfig(BackboneConfig):
    """Sizes of encoder, decoder and memory of a line-reading model."""

    encoder_layers: int = 2
    encoder_width: int = added(0)
    """Width of the encoder, which then has token embeddings of its own and, like every BERT, feed-forwards four times
    as wide (published: BERT-large's 1024). 0: the decoder's width, embeddings and ``ff_mult``."""
    encoder_heads: int = added(0)
    """Heads of the encoder (published: 16). 0: as many as the decoder has."""
    latent_width: int = 64
    """C (published: 768)."""
    slots: int = 64
    """K, rows of M_0 (published: 512)."""
    line_tokens: int = 0
    """Tokens of a line, of which a segment may have several. 0: a segment is one line."""
    pad_id: int = -1
    """Id of tokens that are not encoded. -1: there are none."""
    bos_id: int = added(-1)
    """Token that every decoded segment begins with. -1: none; then the first token of a line is given, and no latent
    has to hold it."""
    solver: Literal["newton", "newton_safe", "svd"] = "newton"
    solver_steps: int = 15
    """Steps of both Newton solvers (published: 15, 7 or 3)."""
    past: bool = True
    """Condition the decoder on a latent through keys and values (W_M)."""
    embedding: bool = True
    """Condition it through its embeddings (W_e; in the published code, not in the paper)."""
    write_noise: float = 0.0
    """Standard deviation of noise on written latents, in training."""
    read_noise: float = 0.0
    """Standard deviation of noise on the key of a question, in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inputs:
            raise FieldError("inputs", self.inputs, "this model reads lines of text; expected 0")
        at_least(1, self, "encoder_layers", "latent_width", "slots", "solver_steps")
        check_layers(self, "encoder_layers")
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
    """BERT's layer: every row sees all rows, and norms follow the residual sums."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.activation = nn.GELU()

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None) -> Tensor:
        x_BTD = self.norm1(x_BTD + self.dropout(self.attention(x_BTD, mask)[0]))
        return self.norm2(x_BTD + self.dropout(self.down(self.activation(self.up(x_BTD)))))


class Encoder(nn.Module):
    """z = W_z tanh(W_p h + b), with h the last layer's output at a [CLS] row in front of the line.

    ``tokens``: its own embeddings; None if it shares those of the decoder.
    """

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
                f"{length} tokens in one line, but the encoder has {len(self.positions.weight) - 1} positions: "
                "use line_tokens or raise positions"
            )
        rows_XTD = torch.cat([self.cls.expand(lines, 1, -1), tokens_XTD], dim=1) + self.positions.weight[: length + 1]
        rows_XTD = self.dropout(self.norm(rows_XTD))
        mask = F.pad(mask_XT, (1, 0), value=True)[:, None, None]
        for layer in self.layers:
            rows_XTD = layer(rows_XTD, mask)
        return self.to_latent(self.pooler(rows_XTD[:, 0]).tanh())


def unique_lines(ids_XT: Tensor, mask_XT: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each different line once: tokens and masks (U, T), the index (X,) of every line among them, and counts (U,)."""
    ids_UT, index_X, counts_U = ids_XT.masked_fill(~mask_XT, -1).unique(dim=0, return_inverse=True, return_counts=True)
    return ids_UT.clamp(min=0), ids_UT >= 0, index_X, counts_U


def group_by_width(mask_XT: Tensor) -> list[tuple[Tensor, int]]:
    """Lines grouped by the columns that they need: indices and number of columns of every group.

    Widths are powers of two from 8 on, up to all columns. What is computed of a line then depends on it alone, and not
    on the length of the lines beside it.
    """
    columns, device = mask_XT.shape[1], mask_XT.device
    widths = []
    while (width := 8 << len(widths)) < columns:
        widths.append(width)
    widths.append(columns)
    needed_X = (mask_XT * torch.arange(1, columns + 1, device=device)).amax(1)
    group_X = torch.bucketize(needed_X, torch.tensor(widths, device=device))
    return [((group_X == i).nonzero().squeeze(1), widths[i]) for i in group_X.unique().tolist()]
