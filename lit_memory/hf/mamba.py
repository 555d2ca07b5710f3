"""Mamba: weights and settings of Hugging Face's and of the reference code's into ours.

Reference: Hugging Face transformers 5; github.com/state-spaces/mamba (``mamba_ssm``), whose embedding has another name.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_memory.hf.names import HEAD, canonical_weights
from lit_memory.hf.reading import check_dims, check_names, merge_flags, shared_dtype, tie
from lit_memory.recurrence import SegmentRecurrent
from lit_memory.registry import build_config, load_class
from lit_memory.util.checks import FieldError

OUTER = {
    "decoder.tokens.weight": "backbone.embeddings.weight",
    "decoder.norm.weight": "backbone.norm_f.weight",
    "decoder.head.weight": HEAD,
}
"""Our names outside the layers -> Hugging Face's."""
MIXER = (
    "A_log",
    "D",
    "conv1d.bias",
    "conv1d.weight",
    "dt_proj.bias",
    "dt_proj.weight",
    "in_proj.weight",
    "out_proj.weight",
    "x_proj.weight",
)
"""Weights of a layer that Hugging Face has in its ``mixer``."""
SIZES = {
    "vocab_size": ("backbone.embeddings.weight", 0, 2),
    "width": ("backbone.embeddings.weight", 1, 2),
    "expand": ("backbone.layers.0.mixer.A_log", 0, 2),
    "state_dim": ("backbone.layers.0.mixer.A_log", 1, 2),
    "conv_taps": ("backbone.layers.0.mixer.conv1d.weight", 2, 3),
    "dt_rank": ("backbone.layers.0.mixer.dt_proj.weight", 1, 2),
}
"""Config field -> a weight, the dimension whose size the field is (``expand``: times the width), and how many
dimensions the weight has."""


def mamba_settings(config: Any) -> dict[str, Any]:
    """Config fields from a Hugging Face configuration. Raises FieldError for an activation that our Mamba does not
    compute."""
    if config.hidden_act not in ("silu", "swish"):
        raise FieldError("hidden_act", config.hidden_act, "expected 'silu'; Mamba here computes nothing else")
    return {"norm_eps": config.layer_norm_epsilon, "tie_embeddings": config.tie_word_embeddings}


def build_mamba(weights: Any, fixed: Mapping[str, Any], flags: Mapping[str, Any]) -> SegmentRecurrent:
    """A Mamba with ``weights``, in their precision and in eval mode.

    weights: a state_dict, which may lack the head where it is tied. fixed: config fields that the source decides, and
        no flag may change.
    """
    canonical = canonical_weights(weights, "backbone")
    weights = {name.replace("backbone.embedding.", "backbone.embeddings."): t for name, t in canonical.items()}
    fixed = {**fixed, **_tie_head(weights, fixed)}
    layers = {m[1] for name in weights if (m := re.match(r"backbone\.layers\.(\d+)\.", name))}
    names = _weight_names(max(1, len(layers)))
    check_names(
        weights, set(names.values()), "of a Mamba without biases in its projections: check where they come from"
    )
    dtype = shared_dtype(weights)
    fixed = {**fixed, "layers": len(layers), **_sizes(weights)}
    cls = load_class("model", "mamba")
    model = cls(build_config(cls.Config, merge_flags(fixed, flags))).to(dtype)
    for ours, fresh in model.state_dict().items():
        name = names[ours]
        if weights[name].shape != fresh.shape:
            raise ValueError(
                f"{name} has shape {tuple(weights[name].shape)}: "
                f"expected {tuple(fresh.shape)} as in the other weights; check them"
            )
    model.load_state_dict({ours: weights[theirs] for ours, theirs in names.items()})
    return model.eval()


def _weight_names(layers: int) -> dict[str, str]:
    """Our names -> Hugging Face's."""
    names = dict(OUTER)
    for i in range(layers):
        ours, theirs = f"decoder.layers.{i}", f"backbone.layers.{i}"
        names[f"{ours}.norm.weight"] = f"{theirs}.norm.weight"
        names |= {f"{ours}.{name}": f"{theirs}.mixer.{name}" for name in MIXER}
    return names


def _tie_head(weights: dict[str, Tensor], fixed: Mapping[str, Any]) -> dict[str, bool]:
    """``tie_embeddings`` as ``fixed`` has it or the weights show it, which get the head that a file may leave out;
    nothing without an embedding, which is an error later. Raises ValueError for a head of its own where they are tied.
    """
    tokens = OUTER["decoder.tokens.weight"]
    if tokens not in weights:
        return {}
    tied = fixed.get("tie_embeddings", HEAD not in weights or torch.equal(weights[HEAD], weights[tokens]))
    if tied:
        tie(weights, HEAD, tokens)
    return {"tie_embeddings": tied}


def _sizes(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """The config fields that the weights decide."""
    sizes = {}
    for field, (name, dim, dims) in SIZES.items():
        shape = check_dims(weights, name, dims)
        if 0 in shape:
            raise ValueError(f"{name} has shape {tuple(shape)}: expected at least 1 everywhere; check the weights")
        sizes[field] = shape[dim]
    channels, width = sizes["expand"], sizes["width"]
    if channels % width:
        raise ValueError(f"{channels} channels: expected a multiple of the width {width}; others are not supported")
    return {**sizes, "expand": channels // width}
