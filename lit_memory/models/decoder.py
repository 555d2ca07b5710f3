"""One causal decoder for GPT-2, GPT-J, GPT-NeoX, Llama and Gemma, the backbone of every transformer here.

Papers:    Radford et al. 2019 (GPT-2); Wang and Komatsuzaki 2021 (GPT-J); Black et al. 2022, arXiv 2204.06745
           (GPT-NeoX); Touvron et al. 2023, arXiv 2302.13971 (Llama); Ainslie et al. 2023, arXiv 2305.13245 (grouped
           queries); Yang et al. 2024, arXiv 2407.10671 (Qwen2: a Llama with ``qkv_bias``), and 2025, arXiv 2505.09388
           (Qwen3: one with ``qk_norm``); Gemma Team 2024, arXiv 2403.08295 (Gemma), 2408.00118 (Gemma 2) and 2025,
           2503.19786 (Gemma 3, its text).
Reference: the Hugging Face implementations; ``lit_memory/hf`` imports their weights.

Deviations
1. Queries, keys and values come from one matrix, its rows in this order and each ordered (heads, head width), in all
   families; the import permutes and joins.
2. Rotary tables are computed in fp64 and rounded to the activations' type, RMS norms in the activations' type or above
   (Hugging Face computes both in fp32, fp64 models included).
3. ``embedding_std`` is the init of token and position embeddings; default: that of the other weights, ``init_std``.
4. Gemma's norms have the weight w where Hugging Face's have 1 + w; the import adds the 1.
5. The sliding windows of Gemma 2 and 3 are not computed: ``span`` refuses segments that are longer, for which they
   would matter.
6. ``dropout`` acts on embeddings, attention weights and both branches in all families (Hugging Face's Llama: attention
   only).
7. GPT-J's rotated channels come in the order of the other families; the import permutes the rows of queries and keys.
   Its one norm a layer, ``norm1`` and ``norm2`` here, is computed for attention and feed-forward each.

Shape suffixes: B batch, T rows, S keys (cached rows, then the T rows), D width, H heads, G heads of keys and values, K
head width, V vocabulary, E channels of queries, keys and values together.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_memory.models.attention import attention_mask, last_rows, rotate, split_heads
from lit_memory.models.backbone import GATED, PARALLEL, TIED, UNBIASED, BackboneConfig
from lit_memory.util.checks import FieldError


class Attention(nn.Module):
    """Causal self-attention. Keys that the caller has cached come in front of its own."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.rows = [n * config.head_width for n in (config.heads, *2 * (config.kv_heads or config.heads,))]
        self.grouped = self.rows[1] < self.rows[0]
        self.rotary, self.base = config.rotary_dims, config.rotary_base
        self.dropout, self.scale, self.cap, self.span = (
            config.dropout,
            config.query_scale,
            config.score_cap,
            config.span,
        )
        biased = config.family not in UNBIASED
        self.qkv = nn.Linear(config.width, sum(self.rows), biased if config.qkv_bias is None else config.qkv_bias)
        self.out = nn.Linear(self.rows[0], config.width, biased)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_width, config.norm_eps) if config.qk_norm else None for _ in range(2)
        )

    def heads(self, qkv_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, heads, T, K) of the outputs of ``qkv``, not rotated yet."""
        q, k, v = split_heads(qkv_BTE, self.rows, self.head_width)
        return q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k), v

    def forward(
        self,
        x_BTD: Tensor,
        mask: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
        last: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output (B, T, D), and all keys and values (B, G, S, K), unrotated, for the caller to cache.

        mask: that of ``attention_mask``; None is plain causal attention. past: cached keys and values. last: number of
        last rows that have an output; default all.
        """
        q, k, v = self.heads(self.qkv(x_BTD))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        keys = k
        if last is not None:
            q = q[:, :, q.shape[2] - last :]
            mask = last_rows(last, k.shape[2], k.device) if mask is None else mask[..., mask.shape[-2] - last :, :]
        if self.rotary:  # cached keys are rotated anew: only differences of positions count
            q = rotate(q, self.rotary, self.base, k.shape[2] - q.shape[2])
            k = rotate(k, self.rotary, self.base)
        return self.mix(q, k, v, mask), keys, v

    def mix(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, causal: bool = True) -> Tensor:
        """Output (B, T, D) of rotated queries and keys. Without mask, row t sees t+1 keys if ``causal``, else all."""
        return self.out(self.attended(q_BHTK, k_BGSK, v_BGSK, mask, causal))

    def attended(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, causal: bool = True
    ) -> Tensor:
        """``mix`` before its projection, (B, T, H*K)."""
        if self.span and k_BGSK.shape[2] > self.span:
            raise ValueError(f"{k_BGSK.shape[2]} rows in one segment, but span={self.span}: use shorter segments")
        drop, causal = self.dropout if self.training else 0.0, causal and mask is None
        options = {"scale": self.scale, "enable_gqa": self.grouped}
        attend = capped_attention(self.cap) if self.cap else F.scaled_dot_product_attention
        y = attend(q_BHTK, k_BGSK, v_BGSK, mask, drop, causal, **options)
        return y.transpose(1, 2).flatten(2)


def capped_attention(cap: float) -> Callable[..., Tensor]:
    """``F.scaled_dot_product_attention``, which has no soft cap, with scores cap * tanh(score / cap)."""

    def attend(q_BHTK, k_BGSK, v_BGSK, mask, drop, causal, scale=None, enable_gqa=False):
        heads, rows, keys = q_BHTK.shape[1], q_BHTK.shape[2], k_BGSK.shape[2]
        k_BHSK, v_BHSK = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_BGSK, v_BGSK))
        scores = q_BHTK @ k_BHSK.mT * (q_BHTK.shape[3] ** -0.5 if scale is None else scale)
        scores = cap * torch.tanh(scores / cap)
        if causal:
            mask = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return F.dropout(scores.softmax(-1), drop) @ v_BHSK

    return attend


TANH = partial(nn.GELU, "tanh")
ACTIVATIONS = {"gpt2": TANH, "gptj": TANH, "gpt_neox": nn.GELU, "llama": nn.SiLU, "gemma": TANH}


def norm(config: BackboneConfig) -> nn.Module:
    """The norm of the family: RMS norm for llama and gemma, else layer norm."""
    return (nn.RMSNorm if config.family in GATED else nn.LayerNorm)(config.width, config.norm_eps)


class Block(nn.Module):
    """Pre-norm transformer layer: attention, then the feed-forward.

    GPT-NeoX and GPT-J add both to the same input, GPT-J after the same norm. Llama's and Gemma's feed-forwards are
    gated.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.parallel = config.family in PARALLEL
        gated = config.family in GATED
        self.norm1 = norm(config)
        self.attention = Attention(config)
        self.norm2 = self.norm1 if config.family == "gptj" else norm(config)
        self.up = nn.Linear(config.width, config.ff_width, bias=not gated)
        self.activation = ACTIVATIONS[config.family]()
        self.down = nn.Linear(config.ff_width, config.width, bias=not gated)
        self.gate = nn.Linear(config.width, config.ff_width, bias=False) if gated else None
        self.post1, self.post2 = (norm(config) if config.post_norms else nn.Identity() for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)

    def feed_forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.norm2(x_BTD)
        up = self.up(x_BTD)
        inner = self.activation(up) if self.gate is None else self.activation(self.gate(x_BTD)) * up
        return self.dropout(self.post2(self.down(inner)))

    def attend(
        self, x_BTD: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None, last: int | None = None
    ) -> tuple[Tensor, ...]:
        """``forward`` that also returns keys and values."""
        y, keys, values = self.attention(self.norm1(x_BTD), mask, past, last)
        return self.join(x_BTD[:, x_BTD.shape[1] - y.shape[1] :], y), keys, values

    def join(self, x_BTD: Tensor, attended_BTD: Tensor) -> Tensor:
        """The block's output, from its input and that of its attention."""
        y_BTD = x_BTD + self.dropout(self.post1(attended_BTD))
        return y_BTD + self.feed_forward(x_BTD if self.parallel else y_BTD)

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None, last: int | None = None) -> Tensor:
        """Output (B, T, D), or at the ``last`` rows alone. mask: that of ``attention_mask``."""
        return self.attend(x_BTD, mask, None, last)[0]


class Numbers(nn.Linear):
    """Embedding of tokens of N numbers: (B, T, N) -> (B, T, D)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))


class Scaled(nn.Embedding):
    """Embedding of token ids, times the square root of its width (Gemma)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embedding_dim**0.5


class Capped(nn.Linear):
    """A head whose logits have a soft cap."""

    cap: float

    def forward(self, input: Tensor) -> Tensor:
        return self.cap * torch.tanh(super().forward(input) / self.cap)


def embedding(config: Any) -> nn.Embedding | Numbers:
    """Embedding of token ids (B, T), or of ``config.inputs`` numbers per token (B, T, N)."""
    if getattr(config, "family", "") == "gemma" and not config.inputs:
        return Scaled(config.vocab_size, config.width)
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
        self.head = (Capped if config.logit_cap else nn.Linear)(
            config.width, config.vocab_size, config.family == "gptj"
        )
        if isinstance(self.head, Capped):
            self.head.cap = config.logit_cap
        for one, base in zip(self.layers, config.rotary_bases, strict=False):  # none where all have one base
            for part in (part for part in one.modules() if isinstance(part, Attention)):
                part.base = base
        self.reset_parameters()
        tie = config.family in TIED if config.tie_embeddings is None else config.tie_embeddings
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
        if self.head.bias is not None:
            nn.init.zeros_(self.head.bias)

    def memory_tokens(self, count: int) -> nn.Parameter:
        """A new parameter (count, D), N(0, s), s the standard deviation of the token embeddings (as the reference)."""
        table = self.tokens.weight.detach()
        std = table.std() * (self.config.width**0.5 if isinstance(self.tokens, Scaled) else 1)
        return nn.Parameter(torch.randn(count, self.config.width, dtype=table.dtype, device=table.device) * std)

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

    def run(self, rows_BTD: Tensor, mask_BT: Tensor | None = None, last: int | None = None) -> Tensor:
        """All layers and the final norm on embedded rows. last: number of last rows that are needed; default all."""
        mask = None if mask_BT is None else attention_mask(mask_BT, rows_BTD.shape[1])
        *layers, top = self.layers
        for layer in layers:
            rows_BTD = layer(rows_BTD, mask)
        if self.training and self.config.dropout:  # fewer rows would draw other numbers
            rows_BTD = top(rows_BTD, mask)
            return self.norm(rows_BTD if last is None else rows_BTD[:, rows_BTD.shape[1] - last :])
        return self.norm(top(rows_BTD, mask, last))

    def forward(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the plain decoder."""
        return self.head(self.run(self.add_positions(self.tokens(ids_BT)), mask_BT))
