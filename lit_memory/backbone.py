"""One causal decoder for the GPT-2 and GPT-NeoX families, the backbone of every transformer here.

Papers:    Radford et al. 2019 (GPT-2); Black et al. 2022, arXiv 2204.06745 (GPT-NeoX).
Reference: the Hugging Face implementations; weights are exchanged by ``import_decoder``.

Deviations
1. Queries, keys and values come from one matrix ordered (3, heads, head width) in both families; the import permutes.
2. Rotary tables are computed in fp64 and rounded to the activations' type (Hugging Face computes them in fp32).
3. ``embedding_std`` sets the init of token and position embeddings apart from that of the other weights. Default: ``init_std``.

Shape suffixes: B batch, T rows, S keys (cached rows, then the T rows), D width, H heads, K head width, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class BackboneConfig:
    """Sizes of the decoder. The defaults are the tiny GPT-NeoX of the ARMT paper's associative retrieval (spec 1)."""

    family: Literal["gpt2", "gpt_neox"] = "gpt_neox"
    vocab_size: int = 0
    """Number of token ids; 0 takes the task's."""
    layers: int = 4
    width: int = 128
    heads: int = 4
    ff_mult: int = 4
    """Feed-forward width over width. The paper's "about 500k parameters" fits 2, its code has 4."""
    positions: int = 1024
    """Rows of the position table (gpt2 only): the longest segment, memory rows included."""
    rotary_fraction: float = 0.25
    """Share of each head that is rotated (gpt_neox only)."""
    tie_embeddings: bool | None = None
    """Output head = token embedding; default: yes for gpt2, no for gpt_neox."""
    dropout: float = 0.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    embedding_std: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if get_origin(field.type) is Literal and getattr(self, field.name) not in get_args(field.type):
                raise ValueError(f"{field.name}={getattr(self, field.name)!r}: expected one of {', '.join(get_args(field.type))}")
        for name in ("layers", "width", "heads", "ff_mult", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.layers > 1000:
            raise ValueError(f"layers={self.layers}: expected at most 1000")
        if self.width % self.heads:
            raise ValueError(f"width={self.width}: expected a multiple of heads={self.heads}")
        if not 0 <= self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction={self.rotary_fraction}: expected a number from 0 to 1")
        if self.family == "gpt_neox" and self.rotary_dims + self.rotary_dims % 2 > self.width // self.heads:
            raise ValueError(f"rotary_fraction={self.rotary_fraction}: rotated channels come in pairs, but a head has {self.width // self.heads}; lower it")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: expected a number from 0 up to, but not including, 1")
        for name in ("norm_eps", "init_std", "embedding_std"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected 0 or more")

    @property
    def rotary_dims(self) -> int:
        """Channels of a head that are rotated. Of an odd number one more is, at the frequencies of the odd one (as in Hugging Face)."""
        return 0 if self.family == "gpt2" else int(self.width // self.heads * self.rotary_fraction)

    def rows(self, segment_len: int) -> int:
        """Rows that one segment occupies, memory included."""
        return segment_len

    def check_segment(self, segment_len: int) -> None:
        """Raise ValueError if a segment does not fit the position table."""
        if self.family == "gpt2" and self.rows(segment_len) > self.positions:
            raise ValueError(
                f"positions={self.positions}: a segment of {segment_len} tokens takes {self.rows(segment_len)} rows; raise positions or use family: gpt_neox"
            )


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # a table first made during validation must serve training as well
def rotary_table(length: int, dims: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0..length-1, each (length, dims). Source: Su et al. 2021, arXiv 2104.09864."""
    frequency = 10_000.0 ** (-torch.arange(0, dims, 2, device=device, dtype=torch.float64) / dims)
    angle = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequency.repeat(2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BHTK: Tensor, dims: int) -> Tensor:
    """Rotary embedding of the first ``dims`` channels at positions 0..T-1."""
    cos, sin = rotary_table(x_BHTK.shape[-2], dims, x_BHTK.device, x_BHTK.dtype)
    dims = cos.shape[-1]  # rounded up to even
    head, rest = x_BHTK[..., :dims], x_BHTK[..., dims:]
    left, right = head.chunk(2, dim=-1)
    return torch.cat([head * cos + torch.cat([-right, left], dim=-1) * sin, rest], dim=-1)


def attention_mask(mask_BS: Tensor, rows: int) -> Tensor:
    """(B, 1, T, S) mask for the last ``rows`` of S causal rows whose keys are valid where ``mask_BS`` is True.

    Every row may see itself, so that rows of pure padding stay finite.
    """
    keys = mask_BS.shape[1]
    causal = torch.ones(rows, keys, dtype=torch.bool, device=mask_BS.device).tril(keys - rows)
    itself = torch.eye(keys, dtype=torch.bool, device=mask_BS.device)[keys - rows :]
    return (causal & mask_BS[:, None, None, :]) | itself


class Attention(nn.Module):
    """Causal self-attention; keys that were cached by the caller come in front of its own."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.rotary = config.rotary_dims
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Output (B, T, D), and all keys and values (B, H, S, K), unrotated, for the caller to cache.

        ``mask``: from ``attention_mask``; None is plain causal attention.
        """
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        keys = k
        if self.rotary:  # cached keys are rotated anew: only differences of positions count
            old = k.shape[2] - q.shape[2]
            k = rotate(k, self.rotary)
            q = rotate(F.pad(q, (0, 0, old, 0)), self.rotary)[:, :, old:] if old else rotate(q, self.rotary)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=drop)
        return self.out(y.transpose(1, 2).flatten(2)), keys, v


class Block(nn.Module):
    """Pre-norm transformer layer: GPT-2 runs attention, then the feed-forward; GPT-NeoX adds both to the same input."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.parallel = config.family == "gpt_neox"
        self.norm1 = nn.LayerNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, config.norm_eps)
        self.up = nn.Linear(config.width, config.ff_mult * config.width)
        self.activation = nn.GELU("tanh" if config.family == "gpt2" else "none")
        self.down = nn.Linear(config.ff_mult * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def feed_forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.down(self.activation(self.up(self.norm2(x_BTD)))))

    def attend(self, x_BTD: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """``forward`` that also returns keys and values."""
        y, keys, values = self.attention(self.norm1(x_BTD), mask, past)
        y = self.dropout(y)
        out = x_BTD + y + self.feed_forward(x_BTD) if self.parallel else (h := x_BTD + y) + self.feed_forward(h)
        return out, keys, values

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x_BTD, mask, None)[0]


class Decoder(nn.Module):
    """Embeddings, layers, final norm and head. Architectures wire its parts; ``forward`` is the plain model.

    ``layer`` builds one layer from the configuration: a ``Block``, or a module that contains one.
    """

    def __init__(self, config: BackboneConfig, layer: Callable[[Any], nn.Module] = Block) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError(f"vocab_size={config.vocab_size}: expected at least 1 (0 is filled in from the task)")
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.positions, config.width) if config.family == "gpt2" else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.reset_parameters()
        tie = config.family == "gpt2" if config.tie_embeddings is None else config.tie_embeddings
        if tie:
            self.head.weight = self.tokens.weight

    def reset_parameters(self) -> None:
        """Blocks and head N(0, init_std), embeddings N(0, embedding_std), biases 0, norms 1."""
        embedding_std = self.config.init_std if self.config.embedding_std is None else self.config.embedding_std
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=embedding_std)
            elif isinstance(module, Block):
                for linear in (module.attention.qkv, module.attention.out, module.up, module.down):
                    nn.init.normal_(linear.weight, std=self.config.init_std)
                    nn.init.zeros_(linear.bias)
        nn.init.normal_(self.head.weight, std=self.config.init_std)

    def memory_tokens(self, count: int) -> nn.Parameter:
        """A new (count, D) parameter, N(0, s) with s the standard deviation of the token embeddings (the reference's init)."""
        table = self.tokens.weight.detach()
        return nn.Parameter(torch.randn(count, self.config.width, dtype=table.dtype, device=table.device) * table.std())

    def place(self, rows_BTD: Tensor) -> Tensor:
        """Add positions 0..T-1 where the family has absolute ones. Raises ValueError beyond the table."""
        if self.positions is not None:
            if rows_BTD.shape[1] > self.positions.num_embeddings:
                raise ValueError(f"{rows_BTD.shape[1]} rows in one segment, but the position table has {self.positions.num_embeddings}: use shorter segments")
            rows_BTD = rows_BTD + self.positions.weight[: rows_BTD.shape[1]]
        return self.dropout(rows_BTD)

    def run(self, rows_BTD: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """All blocks and the final norm on rows that are already embedded."""
        mask = None if mask_BT is None else attention_mask(mask_BT, rows_BTD.shape[1])
        for layer in self.layers:
            rows_BTD = layer(rows_BTD, mask)
        return self.norm(rows_BTD)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the plain decoder."""
        return self.head(self.run(self.place(self.tokens(ids_BT)), mask_BT))


BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Endings of the causal-mask and rotary buffers of old checkpoints."""


def _block_names(family: str) -> dict[str, str]:
    """Our module names inside a block -> Hugging Face's."""
    if family == "gpt2":
        names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    else:
        names = ("input_layernorm", "attention.query_key_value", "attention.dense", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    return dict(zip(("norm1", "attention.qkv", "attention.out", "norm2", "up", "down"), names, strict=True))


def import_block(weights: Mapping[str, Tensor], family: str, heads: int) -> dict[str, Tensor]:
    """State dict of our ``Block`` from that of one Hugging Face layer (GPT-2's ``h.0`` or NeoX's ``layers.0``)."""
    out = {}
    for ours, theirs in _block_names(family).items():
        for kind in ("weight", "bias"):
            tensor = weights[f"{theirs}.{kind}"]
            if family == "gpt2" and tensor.dim() == 2:  # Conv1D keeps (in, out)
                tensor = tensor.mT
            if family == "gpt_neox" and ours == "attention.qkv":  # heads are interleaved: (H, 3, K, ...)
                tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            out[f"{ours}.{kind}"] = tensor.contiguous()
    return out


def import_decoder(weights: Mapping[str, Tensor], family: str, heads: int) -> dict[str, Tensor]:
    """State dict of our ``Decoder`` from that of a Hugging Face ``GPT2LMHeadModel`` or ``GPTNeoXForCausalLM``.

    ``BUFFERS`` are dropped. A GPT-2 without a head has the token embedding as its head. Raises KeyError for a missing weight,
    ValueError for one that has no place here.
    """
    stem, layer, tokens, norm = ("transformer", "h", "wte", "ln_f") if family == "gpt2" else ("gpt_neox", "layers", "embed_in", "final_layer_norm")
    left = {name: tensor for name, tensor in weights.items() if not name.endswith(BUFFERS)}
    if "embed_out.weight" in left:  # NeoX's head in files and before transformers 5
        left["lm_head.weight"] = left.pop("embed_out.weight")
    out = {"tokens.weight": left.pop(f"{stem}.{tokens}.weight")}
    out["head.weight"] = left.pop("lm_head.weight", out["tokens.weight"]) if family == "gpt2" else left.pop("lm_head.weight")
    if family == "gpt2":
        out["positions.weight"] = left.pop(f"{stem}.wpe.weight")
    for kind in ("weight", "bias"):
        out[f"norm.{kind}"] = left.pop(f"{stem}.{norm}.{kind}")
    count = 1 + max(int(name.split(".")[2]) for name in left if name.startswith(f"{stem}.{layer}."))
    for i in range(count):
        prefix = f"{stem}.{layer}.{i}."
        block = {name.removeprefix(prefix): left.pop(name) for name in list(left) if name.startswith(prefix)}
        out |= {f"layers.{i}.{name}": tensor for name, tensor in import_block(block, family, heads).items()}
        surplus = set(block) - {f"{theirs}.{kind}" for theirs in _block_names(family).values() for kind in ("weight", "bias")}
        left |= {prefix + name: block[name] for name in surplus}
    if left:
        raise ValueError(f"weights without a place in the {family} decoder: {', '.join(sorted(left))}")
    return out
