"""Names and layouts of decoder weights: ours beside those of Hugging Face and of the reference code.

Both ways in, ``load_huggingface`` and ``load_reference``, bring the weights to canonical names: Hugging Face's, and
beside them what the reference adds for a memory. ``weight_names`` maps ours to these, ``convert`` maps the tensors.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lit_memory.models.backbone import GATED, UNBIASED

HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
"""GPT-J's."""
OWN_HEAD = ("gptj", "gpt_neox")
"""Families whose head is its own unless it is said to be the token embedding."""
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Endings of the causal-mask and rotary buffers of old checkpoints."""
OUTER = {
    "gpt2": {
        "tokens": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "layers": "transformer.h",
    },
    "gptj": {"tokens": "transformer.wte", "norm": "transformer.ln_f", "layers": "transformer.h"},
    "gpt_neox": {"tokens": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "layers": "gpt_neox.layers"},
    "llama": {"tokens": "model.embed_tokens", "norm": "model.norm", "layers": "model.layers"},
}
OUTER["gemma"] = OUTER["llama"]
"""Family -> our module names in a decoder -> Hugging Face's."""
INNER = {
    "gpt2": {
        "norm1": ["ln_1"],
        "attention.qkv": ["attn.c_attn"],
        "attention.out": ["attn.c_proj"],
        "norm2": ["ln_2"],
        "up": ["mlp.c_fc"],
        "down": ["mlp.c_proj"],
    },
    "gptj": {
        "norm1": ["ln_1"],
        "attention.qkv": ["attn.q_proj", "attn.k_proj", "attn.v_proj"],
        "attention.out": ["attn.out_proj"],
        "norm2": ["ln_1"],
        "up": ["mlp.fc_in"],
        "down": ["mlp.fc_out"],
    },
    "gpt_neox": {
        "norm1": ["input_layernorm"],
        "attention.qkv": ["attention.query_key_value"],
        "attention.out": ["attention.dense"],
        "norm2": ["post_attention_layernorm"],
        "up": ["mlp.dense_h_to_4h"],
        "down": ["mlp.dense_4h_to_h"],
    },
    "llama": {
        "norm1": ["input_layernorm"],
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.q_norm": ["self_attn.q_norm"],
        "attention.k_norm": ["self_attn.k_norm"],
        "attention.out": ["self_attn.o_proj"],
        "norm2": ["post_attention_layernorm"],
        "up": ["mlp.up_proj"],
        "down": ["mlp.down_proj"],
        "gate": ["mlp.gate_proj"],
    },
    "bert": {
        "norm1": ["attention.output.LayerNorm"],
        "attention.qkv": ["attention.self.query", "attention.self.key", "attention.self.value"],
        "attention.out": ["attention.output.dense"],
        "norm2": ["output.LayerNorm"],
        "up": ["intermediate.dense"],
        "down": ["output.dense"],
    },
}
INNER["gemma"] = INNER["llama"]
INNER["gemma2"] = INNER["gemma"] | {
    "norm2": ["pre_feedforward_layernorm"],
    "post1": ["post_attention_layernorm"],
    "post2": ["post_feedforward_layernorm"],
}
"""Family -> our module names in a ``Block`` -> Hugging Face's; several of theirs are joined to one matrix."""
OPTIONAL = ("attention.q_norm", "attention.k_norm")
"""Modules that only some checkpoints of a family have."""
NORMS = ("norm.weight", "norm1.weight", "norm2.weight", "post1.weight", "post2.weight")
"""Endings of our names of the norms that Hugging Face's Gemma stores as their difference from 1."""
CONV1D = ("attention.qkv.weight", "attention.out.weight", "up.weight", "down.weight")
"""Endings of our names of the weights that Hugging Face's GPT-2 stores as (in, out)."""


@dataclass(frozen=True)
class Layout:
    """Names of the weights that an architecture of the reference code has besides its decoder: ours -> the
    reference's."""

    wrapper: str = ""
    """The name between a layer and its block in the reference."""
    model: Mapping[str, str] = field(default_factory=dict)
    """Weights of the architecture itself, outside the layers."""
    layer: Mapping[str, str] = field(default_factory=dict)
    """Weights inside every layer."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Config field -> the weight whose first dimension it is; ``{}`` stands for the first layer."""
    layers: Sequence[int] = ()
    """Layers that have the weights of ``layer``; default: all."""
    ignored: tuple[str, ...] = ()
    """Weights that the reference stores and never uses."""


ARMT_LAYOUT = Layout(
    wrapper="layer.",
    model={"memory": "memory"},
    layer={
        "to_query.weight": "W_mq.weight",
        "to_key.weight": "W_mk.weight",
        "to_value.weight": "W_mv.weight",
        "to_beta.weight": "W_mb.weight",
        "to_beta.bias": "W_mb.bias",
    },
    sizes={"memory_tokens": "memory", "memory_dim": "{}.W_mq.weight"},
)
"""Both of the authors' codes for ARMT."""


def block_names(family: str, weights: Collection[str], prefix: str = "") -> dict[str, list[str]]:
    """Weights of our ``Block`` -> Hugging Face's.

    weights: the names in a checkpoint, the block's with ``prefix``; they show whether queries, keys and values of a
        Llama have biases (Qwen2) and norms (Qwen3).
    """
    names = {}
    normed = any(name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")) for name in weights)
    posts = family == "gemma" and any(name.endswith("feedforward_layernorm.weight") for name in weights)
    for ours, theirs in INNER["gemma2" if posts else family].items():
        if ours in OPTIONAL and not normed:
            continue
        names[f"{ours}.weight"] = [f"{prefix}{name}.weight" for name in theirs]
        biases = [f"{prefix}{name}.bias" for name in theirs]
        unbiased = family in (UNBIASED if ours.startswith("attention.") else GATED)
        if not unbiased or (ours == "attention.qkv" and any(name in weights for name in biases)):
            names[f"{ours}.bias"] = biases
    return names


def weight_names(family: str, layers: int, weights: Collection[str], layout: Layout) -> dict[str, list[str]]:
    """Weights of a model of ours around a decoder -> the canonical names of their parts.

    Blocks are named as in a plain ``Decoder``: an architecture that wraps them has ``block.`` after the number of the
    layer. ``weights``: the canonical names in the checkpoint.
    """
    outer = OUTER[family]
    names = {f"decoder.{ours}.weight": [f"{theirs}.weight"] for ours, theirs in outer.items() if ours != "layers"}
    names["decoder.head.weight"] = [HEAD]
    if family == "gptj":
        names["decoder.head.bias"] = [HEAD_BIAS]
    if family not in GATED:
        names["decoder.norm.bias"] = [f"{outer['norm']}.bias"]
    for i in range(layers):
        layer = f"{outer['layers']}.{i}."
        for ours, theirs in block_names(family, weights, f"{layer}{layout.wrapper}").items():
            names[f"decoder.layers.{i}.{ours}"] = theirs
        for ours, name in layout.layer.items() if i in (layout.layers or range(layers)) else ():
            names[f"decoder.layers.{i}.{ours}"] = [f"{layer}{name}"]
    for ours, name in layout.model.items():
        names[ours] = [name]
    return names


def convert(tensors: list[Tensor], ours: str, family: str, heads: int, rotary_dims: int = 0) -> Tensor:
    """Our weight, whose name ends with ``ours``, from Hugging Face's.

    rotary_dims: channels of a head that are rotated, for GPT-J.
    """
    if family == "gptj" and "attention.qkv" in ours:
        tensors = [*(_unpaired(rows, heads, rotary_dims) for rows in tensors[:2]), tensors[2]]
    tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if family == "gpt2" and ours.endswith(CONV1D):
        tensor = tensor.mT
    if family == "gemma" and ours.endswith(NORMS):
        tensor = tensor + 1
    if family == "gpt_neox" and "attention.qkv" in ours:  # heads are interleaved: (H, 3, K, ...)
        tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return tensor.contiguous()


def _unpaired(rows: Tensor, heads: int, dims: int) -> Tensor:
    """Rows of queries or keys whose first ``dims`` channels of a head are pairs side by side; ours are ``dims`` / 2
    apart."""
    turned, rest = rows.unflatten(0, (heads, -1)).split([dims, rows.shape[0] // heads - dims], dim=1)
    return torch.cat([turned[:, ::2], turned[:, 1::2], rest], dim=1).flatten(0, 1)


def canonical_weights(weights: Any, stem: str) -> dict[str, Tensor]:
    """Weights by canonical name, without ``BUFFERS``; PRMT's (1, M, D) memories become (M, D).

    Prefixes that wrappers add (the reference's ``memory_cell.`` and ``model.``) are dropped, and every name but those
    of the head and of the reference's memory gets ``stem``, the family's own prefix, which a model saved without its
    head lacks. Raises ValueError for what is no state_dict and for two weights of one name.
    """
    if not isinstance(weights, Mapping):
        raise ValueError(f"a {type(weights).__name__}: expected a state_dict; pass that")
    canonical: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            kind = type(tensor).__name__
            raise ValueError(f"{name!r} is of type {kind}: expected a state_dict of tensors only; pass that part")
        if name.endswith(BUFFERS):
            continue
        key = re.sub(rf"^(memory_cell\.)?(model\.)*({stem}\.)?", "", name)
        key = key.replace("embed_out.", "lm_head.")  # NeoX's head in files and before transformers 5
        if key not in (HEAD, HEAD_BIAS, "memory", "sink"):
            key = f"{stem}.{key}"
        if key in canonical:
            raise ValueError(f"two weights are named {key}: expected one, with or without a prefix; drop the other")
        is_prmt_memory = key.endswith("memory") and tensor.dim() == 3 and len(tensor) == 1
        canonical[key] = tensor[0] if is_prmt_memory else tensor
    return canonical
