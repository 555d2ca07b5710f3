"""One causal decoder for the GPT-2, GPT-NeoX and Llama families, the backbone of every transformer here.

Papers:    Radford et al. 2019 (GPT-2); Black et al. 2022, arXiv 2204.06745 (GPT-NeoX); Touvron et al. 2023, arXiv
           2302.13971 (Llama); Ainslie et al. 2023, arXiv 2305.13245 (grouped queries); Yang et al. 2024, arXiv
           2407.10671 (Qwen2: a Llama with ``qkv_bias``).
Reference: the Hugging Face implementations; ``lit_memory/hf`` imports their weights.

Deviations
1. Queries, keys and values come from one matrix, its rows in this order and each ordered (heads, head width), in all
   families; the import permutes and joins.
2. Rotary tables are computed in fp64 and rounded to the activations' type, RMS norms in the activations' type or above
   (Hugging Face computes both in fp32, fp64 models included).
3. ``embedding_std`` is the init of token and position embeddings; default: that of the other weights, ``init_std``.
4. ``dropout`` acts on embeddings, attention weights and both branches in all families (Hugging Face's Llama: attention
   only).

Shape suffixes: B batch, T rows, S keys (cached rows, then the T rows), D width, H heads, G heads of keys and values, K
head width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.attention import attention_mask, rotate, split_heads
from lit_memory.util.checks import FieldError, at_least, check_layers, one_of
from lit_memory.util.fields import added

ROTATED = {"gpt2": 0.0, "gpt_neox": 0.25, "llama": 1.0}
"""Family -> the share of a head that is rotated by default."""


@dataclass
class BackboneConfig:
    """Sizes of the decoder. Defaults: the tiny GPT-NeoX of the ARMT paper's associative retrieval (spec 1)."""

    family: Literal["gpt2", "gpt_neox", "llama"] = "gpt_neox"
    vocab_size: int = 0
    """Number of token ids; 0 takes the task's."""
    inputs: int = added(0)
    """Numbers per token, in a task of numbers in place of token ids; 0 takes the task's."""
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int | None = None
    """Heads of keys and values, each shared by heads / kv_heads queries; default: as many as ``heads``."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values; default: yes, but no for llama (Qwen2 has them)."""
    ff_mult: float = 4.0
    """Feed-forward width over width, rounded. The paper's "about 500k parameters" fits 2, its code has 4."""
    positions: int = 1024
    """Rows of the position table (gpt2 only): the longest segment, memory rows included."""
    wrap_pos: bool = False
    """Tokens start at position 0, and memory rows have own rows of the table, behind ``positions`` (gpt2 only)."""
    rotary_fraction: float | None = None
    """Fraction of each head that is rotated (not gpt2); default: 1/4 for gpt_neox, 1 for llama."""
    rotary_base: float = 10_000.0
    """Channel pair i of n turns by rotary_base^(-i/n) per position ("rope_theta"; not gpt2)."""
    tie_embeddings: bool | None = None
    """Output head = token embedding; default: yes for gpt2, no for the others."""
    dropout: float = 0.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    embedding_std: float | None = None

    def __post_init__(self) -> None:
        one_of(self)
        at_least(1, self, "layers", "width", "heads", "kv_heads", "positions")
        at_least(0, self, "inputs", "vocab_size")
        check_layers(self, "layers")
        if self.width % self.heads:
            raise FieldError("width", self.width, f"expected a multiple of heads={self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise FieldError("kv_heads", self.kv_heads, f"expected a divisor of heads={self.heads}")
        if self.ff_width < 1:
            raise FieldError("ff_mult", self.ff_mult, "expected at least one feed-forward channel")
        if self.wrap_pos and self.family != "gpt2":
            raise FieldError("wrap_pos", self.wrap_pos, f"{self.family} has no position table; use family: gpt2")
        if not 0 <= (self.rotary_fraction or 0) <= 1:
            raise FieldError("rotary_fraction", self.rotary_fraction, "expected a number from 0 to 1")
        if self.rotary_base <= 0:
            raise FieldError("rotary_base", self.rotary_base, "expected more than 0")
        if self.rotary_dims + self.rotary_dims % 2 > self.head_width:
            raise FieldError(
                "rotary_fraction",
                self.rotary_fraction,
                f"rotated channels come in pairs, but a head has {self.head_width}; lower it",
            )
        if not 0 <= self.dropout < 1:
            raise FieldError("dropout", self.dropout, "expected a number from 0 up to, but not including, 1")
        at_least(0, self, "norm_eps", "init_std", "embedding_std")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def ff_width(self) -> int:
        return round(self.ff_mult * self.width)

    @property
    def rotary_dims(self) -> int:
        """Channels of a head that are rotated. An odd number is rounded up, at its own frequencies (as in Hugging
        Face)."""
        default = ROTATED[self.family]
        share = default if self.rotary_fraction is None or self.family == "gpt2" else self.rotary_fraction
        return int(self.head_width * share)

    def rows(self, segment_len: int) -> int:
        """Rows that one segment occupies, memory rows included."""
        return segment_len

    def check_segment(self, segment_len: int) -> None:
        """Raise FieldError if a segment does not fit the position table."""
        rows = segment_len if self.wrap_pos else self.rows(segment_len)
        if self.family == "gpt2" and rows > self.positions:
            raise FieldError(
                "positions",
                self.positions,
                f"a segment of {segment_len} tokens takes {rows} rows; raise positions or use family: gpt_neox",
            )


class Attention(nn.Module):
    """Causal self-attention. Keys that the caller has cached come in front of its own."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.rows = [config.width, *2 * [(config.kv_heads or config.heads) * config.head_width]]
        self.grouped = self.rows[1] < config.width
        self.rotary, self.base = config.rotary_dims, config.rotary_base
        self.dropout = config.dropout
        llama = config.family == "llama"
        self.qkv = nn.Linear(
            config.width, sum(self.rows), bias=not llama if config.qkv_bias is None else config.qkv_bias
        )
        self.out = nn.Linear(config.width, config.width, bias=not llama)

    def forward(
        self, x_BTD: Tensor, mask: Tensor | None = None, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output (B, T, D), and all keys and values (B, G, S, K), unrotated, for the caller to cache.

        mask: that of ``attention_mask``; None is plain causal attention. past: cached keys and values.
        """
        q, k, v = split_heads(self.qkv(x_BTD), self.rows, self.head_width)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        keys = k
        if self.rotary:  # cached keys are rotated anew: only differences of positions count
            old = k.shape[2] - q.shape[2]
            k = rotate(k, self.rotary, self.base)
            q = F.pad(q, (0, 0, old, 0)) if old else q
            q = rotate(q, self.rotary, self.base)[:, :, old:]
        return self.mix(q, k, v, mask), keys, v

    def mix(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, causal: bool = True) -> Tensor:
        """Output (B, T, D) of rotated queries and keys. Without mask, row t sees t+1 keys if ``causal``, else all."""
        drop, causal = self.dropout if self.training else 0.0, causal and mask is None
        y = F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, mask, drop, causal, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).flatten(2))


ACTIVATIONS = {"gpt2": partial(nn.GELU, "tanh"), "gpt_neox": nn.GELU, "llama": nn.SiLU}


def norm(config: BackboneConfig) -> nn.Module:
    """The norm of the family: RMS norm for llama, else layer norm."""
    return (nn.RMSNorm if config.family == "llama" else nn.LayerNorm)(config.width, config.norm_eps)


class Block(nn.Module):
    """Pre-norm transformer layer: attention, then the feed-forward.

    GPT-NeoX adds both to the same input. Llama's feed-forward is gated.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.parallel = config.family == "gpt_neox"
        llama = config.family == "llama"
        self.norm1 = norm(config)
        self.attention = Attention(config)
        self.norm2 = norm(config)
        self.up = nn.Linear(config.width, config.ff_width, bias=not llama)
        self.activation = ACTIVATIONS[config.family]()
        self.down = nn.Linear(config.ff_width, config.width, bias=not llama)
        self.gate = nn.Linear(config.width, config.ff_width, bias=False) if llama else None
        self.dropout = nn.Dropout(config.dropout)

    def feed_forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.norm2(x_BTD)
        up = self.up(x_BTD)
        inner = self.activation(up) if self.gate is None else self.activation(self.gate(x_BTD)) * up
        return self.dropout(self.down(inner))

    def attend(self, x_BTD: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        """``forward`` that also returns keys and values."""
        y, keys, values = self.attention(self.norm1(x_BTD), mask, past)
        return self.join(x_BTD, y), keys, values

    def join(self, x_BTD: Tensor, attended_BTD: Tensor) -> Tensor:
        """The block's output, from its input and that of its attention."""
        y_BTD = x_BTD + self.dropout(attended_BTD)
        return y_BTD + self.feed_forward(x_BTD if self.parallel else y_BTD)

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x_BTD, mask, None)[0]


class Numbers(nn.Linear):
    """Embedding of tokens of N numbers: (B, T, N) -> (B, T, D)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))


def embedding(config: Any) -> nn.Embedding | Numbers:
    """Embedding of token ids (B, T), or of ``config.inputs`` numbers per token (B, T, N)."""
    return Numbers(config.inputs, config.width) if config.inputs else nn.Embedding(config.vocab_size, config.width)


class Decoder(nn.Module):
    """Embeddings, layers, final norm and head. Architectures wire its parts; ``forward`` is the plain model.

    layer: builds one layer from the configuration: a ``Block``, or a module that contains one.
    """

    def __init__(self, config: BackboneConfig, layer: Callable[[Any], nn.Module] = Block) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise FieldError("vocab_size", config.vocab_size, "expected at least 1 (0 is filled in from the task)")
        self.config = config
        self.tokens = embedding(config)
        wrapped = config.rows(0) if config.wrap_pos else 0  # the rows of an empty segment are those of the memory
        self.positions = nn.Embedding(config.positions + wrapped, config.width) if config.family == "gpt2" else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(layer(config) for _ in range(config.layers))
        self.norm = norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.reset_parameters()
        tie = config.family == "gpt2" if config.tie_embeddings is None else config.tie_embeddings
        if tie and not config.inputs:
            self.head.weight = self.tokens.weight

    def reset_parameters(self) -> None:
        """Blocks and head N(0, init_std), embeddings N(0, embedding_std), biases 0, norms 1."""
        embedding_std = self.config.init_std if self.config.embedding_std is None else self.config.embedding_std
        for module in self.modules():
            if isinstance(module, nn.Embedding | Numbers):
                nn.init.normal_(module.weight, std=embedding_std)
            elif isinstance(module, Block):
                for linear in (part for part in module.modules() if isinstance(part, nn.Linear)):
                    nn.init.normal_(linear.weight, std=self.config.init_std)
                    if linear.bias is not None:
                        nn.init.zeros_(linear.bias)
        nn.init.normal_(self.head.weight, std=self.config.init_std)

    def memory_tokens(self, count: int) -> nn.Parameter:
        """A new parameter (count, D), N(0, s), s the standard deviation of the token embeddings (as the reference)."""
        table = self.tokens.weight.detach()
        return nn.Parameter(torch.randn(count, self.config.width, dtype=table.dtype, device=table.device) * table.std())

    def add_positions(self, rows_BTD: Tensor, before: int = 0, after: int = 0) -> Tensor:
        """Rows with positions 0..T-1, if the family has absolute ones, and dropout. Raises ValueError beyond the table.

        before, after: how many of the first and of the last rows are memory, which matters with ``wrap_pos``.
        """
        if self.positions is not None:
            table, size = self.positions.weight, self.config.positions
            before, after = (before, after) if self.config.wrap_pos else (0, 0)
            count = rows_BTD.shape[1] - before - after
            if count > size:
                raise ValueError(
                    f"{count} rows in one segment, but the position table has {size}: use shorter segments"
                )
            positions_TD = table[:count]
            if before + after:
                wrapped = table[size : size + before + after]
                positions_TD = torch.cat([wrapped[:before], positions_TD, wrapped[before:]])
            rows_BTD = rows_BTD + positions_TD
        return self.dropout(rows_BTD)

    def run(self, rows_BTD: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """All layers and the final norm on embedded rows."""
        mask = None if mask_BT is None else attention_mask(mask_BT, rows_BTD.shape[1])
        for layer in self.layers:
            rows_BTD = layer(rows_BTD, mask)
        return self.norm(rows_BTD)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the plain decoder."""
        return self.head(self.run(self.add_positions(self.tokens(ids_BT)), mask_BT))
