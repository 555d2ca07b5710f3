"""The families of Hugging Face's decoders that ours computes, and what their configurations say about it.

Reference: Hugging Face transformers 5.

A setting that our decoder does not compute is an error.
"""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lit_memory.hf.names import OUTER
from lit_memory.models.backbone import GATED, ROTATED, TIED
from lit_memory.util.checks import FieldError, fits, preview


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face decoders, and the settings with which our decoder computes the same."""

    model_type: str
    """Hugging Face's name of the family."""
    name: str
    """Our name, ``BackboneConfig.family``."""
    settings: Mapping[str, tuple[Any, ...]]
    """Setting -> the values that our decoder implements."""
    norm_eps: str = "rms_norm_eps"
    """Hugging Face's name of the setting."""
    dropouts: tuple[str, ...] = ()
    """Hugging Face's dropout rates, which ours has as one."""
    later_gemma: bool = False
    """A Gemma after the first one, whose layers are of two kinds."""

    @property
    def stem(self) -> str:
        """The prefix of its weights' names."""
        return OUTER[self.name]["layers"].partition(".")[0]


GEMMA = {"attention_bias": (False,), "use_bidirectional_attention": (None, False)}
"""Settings of all Gemmas; the first one has another name for its activation."""
FAMILIES = {
    "gpt2": Family(
        model_type="gpt2",
        name="gpt2",
        norm_eps="layer_norm_epsilon",
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        settings={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
    "gptj": Family(
        model_type="gptj",
        name="gptj",
        norm_eps="layer_norm_epsilon",
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        settings={"activation_function": ("gelu_new", "gelu_pytorch_tanh")},
    ),
    "neox": Family(
        model_type="gpt_neox",
        name="gpt_neox",
        norm_eps="layer_norm_eps",
        dropouts=("attention_dropout", "hidden_dropout"),
        settings={"hidden_act": ("gelu",), "use_parallel_residual": (True,), "attention_bias": (True,)},
    ),
    "llama": Family(
        model_type="llama",
        name="llama",
        settings={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "qwen2": Family(
        model_type="qwen2",
        name="llama",
        settings={"hidden_act": ("silu",), "use_sliding_window": (False,)},
    ),
    "qwen3": Family(
        model_type="qwen3",
        name="llama",
        settings={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    ),
    "gemma": Family(
        model_type="gemma",
        name="gemma",
        settings={"hidden_act": ("gelu_pytorch_tanh",), **GEMMA},
    ),
}
FAMILIES |= {
    name: Family(
        model_type=model_type,
        name="gemma",
        settings={"hidden_activation": ("gelu_pytorch_tanh",), **GEMMA},
        later_gemma=True,
    )
    for name, model_type in (("gemma2", "gemma2"), ("gemma3", "gemma3_text"))
}


def decoder_settings(config: Any, family: Family, dropout: float | None) -> dict[str, Any]:
    """Config fields from a Hugging Face configuration; ``dropout`` replaces its rates.

    Raises FieldError for a setting that our decoder does not compute, ValueError for several dropout rates.
    """
    _check_settings(config, family, dropout)
    settings = {
        "heads": config.num_attention_heads,
        "layers": config.num_hidden_layers,
        "norm_eps": getattr(config, family.norm_eps),
        "tie_embeddings": config.tie_word_embeddings,
    }
    if family.later_gemma:
        settings |= _later_gemma(config)
    elif rope := getattr(config, "rope_parameters", None):
        settings["rotary_base"] = float(_rope_number(rope, "rope_theta", None, math.inf))
        settings["rotary_fraction"] = _rope_number(rope, "partial_rotary_factor", 1.0, 1.0)
    elif family.name == "gptj":
        settings["rotary_fraction"] = _rotary_fraction(config)
    head_dim = getattr(config, "head_dim", None)
    usual = head_dim is None or head_dim * config.num_attention_heads == config.hidden_size
    settings["head_dim"] = None if usual else head_dim
    rates = {getattr(config, name) for name in family.dropouts} or {0.0}
    if dropout is not None:
        rates = {dropout}
    if len(rates) > 1:
        names, values = ", ".join(family.dropouts), preview(map(str, rates))
        raise ValueError(f"{names} are {values}: expected the same rate for all; pass dropout=")
    return {**settings, "dropout": rates.pop()}


def _later_gemma(config: Any) -> dict[str, Any]:
    """Config fields of Gemma 2 and 3 that the decoders before them lack."""
    if not 0 < config.query_pre_attn_scalar < math.inf:
        raise FieldError("query_pre_attn_scalar", config.query_pre_attn_scalar, "expected more than 0")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if not 0 <= (getattr(config, name) or 0) < math.inf:
            raise FieldError(name, getattr(config, name), "expected 0 or more")
    scale, default = config.query_pre_attn_scalar**-0.5, config.head_dim**-0.5
    settings = {
        "query_scale": None if scale == default else scale,
        "score_cap": config.attn_logit_softcapping or 0.0,
        "logit_cap": config.final_logit_softcapping or 0.0,
        "span": config.sliding_window if "sliding_attention" in config.layer_types else 0,
    }
    if not fits(settings["span"], int) or settings["span"] < 0:
        raise FieldError("sliding_window", settings["span"], "expected a whole number of 0 or more")
    ropes = _ropes(config)
    bases = [float(_rope_number(rope, "rope_theta", None, math.inf)) for rope in ropes]
    fractions = {_rope_number(rope, "partial_rotary_factor", 1.0, 1.0) for rope in ropes}
    if len(fractions) > 1:
        raise FieldError("partial_rotary_factor", sorted(fractions), "expected one for all layers")
    settings |= {"rotary_base": bases[0]} if len({*bases}) == 1 else {"rotary_bases": bases}
    return settings | {"rotary_fraction": fractions.pop()}


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The settings of the rotation of every layer."""
    rope = config.rope_parameters
    nested = "rope_type" not in rope
    return [rope[kind] if nested else rope for kind in config.layer_types]


def described(config: Any, family: Family) -> dict[str, Any]:
    """All config fields of a Hugging Face decoder but its dropout, from its configuration alone, without the values
    that are ours by default. Raises FieldError for a setting that our decoder does not compute."""
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    width, settings = config.hidden_size, decoder_settings(config, family, 0.0)
    settings |= {"family": family.name, "vocab_size": config.vocab_size, "width": width}
    settings |= {"ff_mult": inner / width if inner else 4.0}
    if family.name == "gpt2":
        settings["positions"] = config.n_positions
    if family.name in GATED:
        settings |= {"kv_heads": config.num_key_value_heads, "qkv_bias": family.model_type == "qwen2"}
        settings["qk_norm"] = family.model_type in ("qwen3", "gemma3_text")
        settings["post_norms"] = family.later_gemma
    usual = {"tie_embeddings": family.name in TIED, "kv_heads": config.num_attention_heads}
    usual |= {"qkv_bias": False, "qk_norm": False, "head_dim": None, "query_scale": None, "post_norms": False}
    usual |= {"score_cap": 0.0, "logit_cap": 0.0, "span": 0}
    usual |= {"rotary_fraction": ROTATED[family.name], "dropout": 0.0}
    return {name: value for name, value in settings.items() if name not in usual or usual[name] != value}


def check_width(config: Any, family: Family, weights: Mapping[str, Tensor]) -> None:
    """Raise FieldError where a Hugging Face configuration has another width, or other heads, than the weights, by
    canonical name."""
    table = weights.get(f"{OUTER[family.name]['tokens']}.weight")
    if table is not None and table.dim() == 2 and table.shape[1] != config.hidden_size:
        name = config.attribute_map.get("hidden_size", "hidden_size")
        raise FieldError(name, config.hidden_size, f"expected {table.shape[1]}, as in the weights; check them")
    queries, width = weights.get(f"{OUTER[family.name]['layers']}.0.self_attn.q_proj.weight"), config.hidden_size
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
    if queries is not None and head_dim is not None and head_dim * heads not in (width, len(queries)):
        expected = f"expected {len(queries)} / {heads} heads, as in the weights; check them"
        raise FieldError("head_dim", head_dim, expected)


def _rotary_fraction(config: Any) -> float:
    """The share of a head that GPT-J rotates. Raises FieldError for a number of channels that it cannot."""
    head, dims = config.hidden_size // config.num_attention_heads, config.rotary_dim
    if not fits(dims, int) or dims % 2 or not 0 < dims <= head:
        raise FieldError("rotary_dim", dims, f"expected an even number from 2 to {head}, the width of a head")
    return dims / head


def _rope_number(rope: Mapping[str, Any], name: str, default: float | None, most: float) -> float:
    """A number of ``rope_parameters``. Raises FieldError unless it is above 0 and at most ``most``."""
    value = rope.get(name, default)
    if not fits(value, float) or not 0 < value <= most:
        expected = f"expected a number above 0{f' and at most {most:g}' if most < math.inf else ''}"
        raise FieldError(name, value, expected, reprlib.repr(value))
    return value


def _check_settings(config: Any, family: Family, dropout: float | None) -> None:
    """Raise FieldError for a setting with which Hugging Face computes something else than our decoder."""
    supported = {name: (getattr(config, name), values) for name, values in family.settings.items()}
    if rope := getattr(config, "rope_parameters", None):
        kinds = [one.get("rope_type") for one in (_ropes(config) if family.later_gemma else [rope])]
        supported["rope_type"] = (next((kind for kind in kinds if kind != "default"), "default"), ("default",))
    if family.name in GATED and dropout is None:  # theirs acts on attention weights alone, ours on more
        supported["attention_dropout"] = (config.attention_dropout, (0.0,))
    for name, (value, values) in supported.items():
        if value not in values:
            expected = " or ".join(map(repr, values))
            raise FieldError(name, value, f"expected {expected}; the decoder here computes nothing else")
