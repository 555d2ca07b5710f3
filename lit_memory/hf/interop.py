"""Weights from elsewhere into our models: the reference code's checkpoints and Hugging Face's GPT-2, GPT-NeoX, Llama,
Qwen2, Mamba and, as an encoder of lines, BERT.

Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de (names of the weights),
    transformers 5.

Both ways in are one: the weights get canonical names (Hugging Face's, with what the reference adds to them), a
``Layout`` says which of them an architecture has besides its decoder, and ``backbone`` names and converts those of the
decoder. All is strict: a weight that is missing, left over or of another shape is an error, and so is a setting that
our decoder does not compute.

No checkpoint of the reference tells wrap_pos, nu, gamma, norm_eps, rotary_fraction and rotary_base: pass them where
they differ from our defaults.
"""

import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lit_memory.models.decoder import BUFFERS, CONV1D, OUTER, block_names, convert
from lit_memory.recurrence import SegmentRecurrent
from lit_memory.registry import MODELS, build_config, load_class
from lit_memory.util.checks import FieldError, nearest

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Layout:
    """Where the reference keeps the weights of an architecture: our names -> its."""

    wrapper: str = ""
    """What stands between a layer and its block in its names."""
    model: Mapping[str, str] = field(default_factory=dict)
    """Weights of the architecture itself, outside the layers."""
    layer: Mapping[str, str] = field(default_factory=dict)
    """Those inside every layer."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Config field -> the weight whose first dimension it is; ``{}`` stands for the first layer."""
    ignored: tuple[str, ...] = ()
    """Weights that the reference stores and never uses."""


_RMT = Layout(model={"memory": "memory"}, sizes={"memory_tokens": "memory"})
_ARMT = {"to_query.weight": "W_mq.weight", "to_key.weight": "W_mk.weight", "to_value.weight": "W_mv.weight"}
_ARMT |= {"to_beta.weight": "W_mb.weight", "to_beta.bias": "W_mb.bias"}
LAYOUTS = {
    "transformer": Layout(),
    "rmt": _RMT,
    "tarm": _RMT,
    "prmt": Layout(
        "layer.", layer={"memory": "memory"}, sizes={"memory_tokens": "{}.memory"}, ignored=("memory",)
    ),  # see Deviations in prmt.py
    "armt": Layout(
        "layer.",
        model={"memory": "memory"},
        layer=_ARMT,
        sizes={"memory_tokens": "memory", "memory_dim": "{}.W_mq.weight"},
    ),
}


@dataclass(frozen=True)
class Family:
    """A decoder of Hugging Face, and the settings with which ours computes the same."""

    model_type: str
    """Hugging Face's name of the family."""
    name: str
    """Ours."""
    norm_eps: str
    dropouts: tuple[str, ...]
    settings: Mapping[str, tuple[Any, ...]]
    """Setting -> the values that our decoder implements."""

    @property
    def stem(self) -> str:
        """What the names of its weights begin with."""
        return OUTER[self.name]["layers"].partition(".")[0]


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
        norm_eps="rms_norm_eps",
        dropouts=(),
        settings={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "qwen2": Family(
        model_type="qwen2",
        name="llama",
        norm_eps="rms_norm_eps",
        dropouts=(),
        settings={"hidden_act": ("silu",), "use_sliding_window": (False,)},
    ),
}


MODEL_TYPES = (*(family.model_type for family in FAMILIES.values()), "mamba")
MAMBA = {
    "decoder.tokens.weight": "backbone.embeddings.weight",
    "decoder.norm.weight": "backbone.norm_f.weight",
    "decoder.head.weight": HEAD,
}
MAMBA_LAYER = {"norm.weight": "norm.weight"} | {
    name: f"mixer.{name}"
    for name in (
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
}
MAMBA_SIZES = {
    "vocab_size": ("backbone.embeddings.weight", 0, 2),
    "width": ("backbone.embeddings.weight", 1, 2),
    "expand": ("backbone.layers.0.mixer.A_log", 0, 2),
    "state_dim": ("backbone.layers.0.mixer.A_log", 1, 2),
    "conv_taps": ("backbone.layers.0.mixer.conv1d.weight", 2, 3),
    "dt_rank": ("backbone.layers.0.mixer.dt_proj.weight", 1, 2),
}
"""Config field -> the weight and the dimension that it is (``expand``: times the width), and how many that weight
has."""


def load_reference(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    arch: str,
    backbone: str | None = None,
    n_head: int | None = None,
    **flags: Any,
) -> SegmentRecurrent:
    """The model of a checkpoint that the reference code wrote, in eval mode and in the checkpoint's own precision.

    source: a .safetensors file; a .bin, .pt or .pth file with a state_dict (tensors only, no code is run); or the
        state_dict.
    arch: "transformer", "rmt", "prmt", "armt", "tarm" (RMT's weights) or "mamba"; of others the reference's names are
        not known here.
    backbone: "gpt2", "neox", "llama" or "qwen2"; Mamba has none.
    n_head: attention heads, which no weight tells. All other sizes, the number of layers too, are read off the weights.
    flags: further fields of the model's ``Config``, such as ``gamma="off"``. ``tie_embeddings`` defaults to what the
        weights show.
    Raises FileNotFoundError for a missing file, TypeError for an unknown flag and ValueError for anything else that
    does not fit.
    """
    is_file = isinstance(source, (str, os.PathLike))
    if arch == "mamba":
        if backbone is not None or n_head is not None:
            raise ValueError(
                f"backbone={backbone!r}, n_head={n_head}: expected None for both, as Mamba has neither; leave them out"
            )
        with about(source if is_file else "state_dict"):
            return _mamba(_read_file(Path(source)) if is_file else source, {}, flags)
    if arch in MODELS and arch not in LAYOUTS:
        raise FieldError(
            "arch",
            arch,
            f"the names of its weights in the reference code are not known here; expected one of {', '.join(LAYOUTS)}, mamba",
        )
    layout, family = _lookup("arch", arch, {**LAYOUTS, "mamba": None}), _lookup("backbone", str(backbone), FAMILIES)
    if n_head is None:
        raise ValueError("n_head=None: expected the number of attention heads, which no weight tells")
    weights = _read_file(Path(source)) if is_file else source
    with about(source if is_file else "state_dict"):
        weights = {
            name: tensor for name, tensor in _canonical(weights, family.stem).items() if name not in layout.ignored
        }
        layers = {
            m[1] for name in weights if (m := re.match(rf"{re.escape(OUTER[family.name]['layers'])}\.(\d+)\.", name))
        }  # a gap: missing weights
        fixed = {"heads": n_head, "layers": max(1, len(layers)), "tie_embeddings": flags.pop("tie_embeddings", None)}
        return _build(arch, layout, family, weights, fixed, flags).eval()


def load_huggingface(source: Any, arch: str = "transformer", **flags: Any) -> SegmentRecurrent:
    """One of our architectures around a Hugging Face GPT-2, GPT-NeoX, Llama or Qwen2, its memory freshly initialised,
    or a Mamba; in eval mode.

    source: a ``...ForCausalLM`` or ``GPT2LMHeadModel`` (its weights are copied), or a folder with config.json and
        weights.
    flags: fields of the model's ``Config``, such as ``memory_tokens=10``. Sizes, norm_eps, rotation and tying are those
        of ``source``, and so is ``dropout`` unless given. With ``wrap_pos`` the position table grows by fresh rows for
        the memory.
    Raises FileNotFoundError for a missing folder or file, TypeError for an unknown flag and ValueError for anything
    else that does not fit, settings included with which Hugging Face computes something else.
    """
    is_folder = isinstance(source, (str, os.PathLike))
    if not is_folder and not hasattr(source, "config"):
        raise TypeError(
            f"source is a {type(source).__name__}: expected a Hugging Face model or a folder; for a state_dict use load_reference"
        )
    _lookup("arch", arch, MODELS)
    with about(source if is_folder else type(source).__name__):
        config, weights = _read_folder(Path(source)) if is_folder else (source.config, source.state_dict())
        if "mamba" in (arch, config.model_type):
            if arch != config.model_type:
                raise ValueError(
                    f"model_type={config.model_type!r}, arch={arch!r}: expected 'mamba' for both or for neither; check arch and source"
                )
            return _mamba(weights, _mamba_settings(config), flags)
        family = _family(config.model_type)
        model: Any = _build(
            arch,
            Layout(),
            family,
            _canonical(weights, family.stem),
            _settings(config, family, flags.pop("dropout", None)),
            flags,
        )
    if "memory" in dict(
        model.named_parameters(recurse=False)
    ):  # its scale is that of the embeddings, which were random until now
        model.memory = model.decoder.memory_tokens(len(model.memory))
    return model.eval()


BERT = {"norm": "embeddings.LayerNorm", "pooler": "pooler.dense"}
BERT_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
BERT_SIZES = {
    "encoder_layers": "num_hidden_layers",
    "encoder_width": "hidden_size",
    "encoder_heads": "num_attention_heads",
}


def bert_sizes(folder: Path) -> dict[str, int]:
    """The settings of a model whose encoder has the sizes of a Hugging Face BERT. Raises ValueError for what is no
    BERT, or one with another activation."""
    with about(folder):
        config = _read_config(folder, ("bert",))
        if config.hidden_act != "gelu":
            raise FieldError("hidden_act", config.hidden_act, "expected 'gelu'; the encoder here computes nothing else")
        return {ours: getattr(config, theirs) for ours, theirs in BERT_SIZES.items()}


def bert_weights(
    own: Mapping[str, Tensor], folder: Path, pieces: Sequence[Sequence[int]], cls_id: int
) -> dict[str, Tensor]:
    """Weights for an ``Encoder`` of lines of the sizes ``bert_sizes``, from a Hugging Face BERT as published: with its
    pooler, and with or without the heads of its pre-training.

    own: the encoder's weights, of which ``to_latent`` and positions that BERT has not are kept. pieces: for every token
        of the model, the ids of the
    pieces that BERT's tokenizer cuts its text into. The token's embedding is the mean of theirs, as the lines that we
    read have one tokenizer, the decoder's. cls_id: the token of which ``Encoder.cls`` is the embedding. Sentence types
    are folded into the positions, all being of the first type. Raises ValueError for weights of another model.
    """
    layers = sum(name.endswith("attention.qkv.weight") for name in own)
    names = {f"{ours}.{kind}": [f"{theirs}.{kind}"] for ours, theirs in BERT.items() for kind in ("weight", "bias")}
    tables = [f"embeddings.{name}.weight" for name in BERT_TABLES]
    with about(folder):
        weights = {}
        for name, tensor in read_weights(folder).items():  # older files have TensorFlow's names of norms, and a head
            name = (
                name.removeprefix("bert.")
                .replace("LayerNorm.gamma", "LayerNorm.weight")
                .replace("LayerNorm.beta", "LayerNorm.bias")
            )
            if not name.startswith("cls.") and not name.endswith("position_ids"):
                weights[name] = tensor
        for i in range(layers):
            names |= {
                f"layers.{i}.{ours}": theirs
                for ours, theirs in block_names("bert", weights, f"encoder.layer.{i}.").items()
            }
        check_names(
            weights,
            {*tables, *(name for theirs in names.values() for name in theirs)},
            f"of a BERT with {layers} layers: check encoder_layers",
        )
        for name in tables:
            if weights[name].shape[1:] != own["cls"].shape:
                raise ValueError(
                    f"{name} has shape {tuple(weights[name].shape)}: expected rows of {len(own['cls'])} as in the model; check encoder_width"
                )
        words_VD, places_PD, types_KD = (weights[name] for name in tables)
        if (most := max(cls_id, *(i for ids in pieces for i in ids))) >= len(words_VD):
            raise ValueError(
                f"{tables[0]} has {len(words_VD)} rows, and the tokenizer an id {most}; expected the tokenizer of these weights"
            )
        counts_N = torch.tensor([len(ids) for ids in pieces])
        flat, token = (
            torch.tensor([i for ids in pieces for i in ids]),
            torch.arange(len(pieces)).repeat_interleave(counts_N),
        )
        state = {
            **own,
            **{ours: convert([weights[name] for name in theirs], ours, "bert", 0) for ours, theirs in names.items()},
        }
        state["cls"] = words_VD[cls_id]
        state["tokens.weight"] = words_VD.new_zeros(own["tokens.weight"].shape).index_add(
            0, token, words_VD[flat]
        ) / counts_N.unsqueeze(1)
        state["positions.weight"] = torch.cat([places_PD + types_KD[0], own["positions.weight"][len(places_PD) :]])[
            : len(own["positions.weight"])
        ]
    return state


def _family(model_type: Any) -> Family:
    check_type(model_type, MODEL_TYPES)
    return next(f for f in FAMILIES.values() if f.model_type == model_type)


def check_type(model_type: Any, types: Sequence[str]) -> None:
    """Raise ValueError for a model of Hugging Face that is of none of these types."""
    if model_type not in types:
        raise FieldError("model_type", model_type, f"expected {'one of ' * (len(types) > 1)}{', '.join(types)}")


def _build(
    arch: str, layout: Layout, family: Family, weights: dict[str, Tensor], fixed: dict[str, Any], flags: dict[str, Any]
) -> SegmentRecurrent:
    """A model with ``weights``; what ``layout`` does not name keeps its init. ``fixed``: fields that no flag may
    change."""
    dtype = _dtype(weights)
    fixed["tie_embeddings"] = _tie(weights, family, fixed["tie_embeddings"])
    decoder, memory = _names(layout, family, fixed["layers"], weights)
    needed = {name for theirs in (*decoder.values(), *memory.values()) for name in theirs}
    check_names(weights, needed, f"of arch={arch!r} on {family.name}: check arch, backbone and where they come from")
    cls: Any = load_class("model", arch)
    complete = layout is LAYOUTS.get(arch)  # else the memory is new
    config = _config(
        cls,
        arch,
        family,
        {"family": family.name, **_sizes(weights, layout, family, fixed["heads"])} | fixed,
        flags,
        complete,
    )
    model = cls(config).to(dtype)
    fresh = model.state_dict()
    if config.wrap_pos and not complete:
        table = decoder["decoder.positions.weight"][0]
        weights[table] = torch.cat(
            [weights[table], fresh["decoder.positions.weight"][config.positions :].to(weights[table].device)]
        )
    inside = "block." if any(name.startswith("decoder.layers.0.block.") for name in fresh) else ""
    names = {ours.format(inside): theirs for ours, theirs in decoder.items()} | memory
    if unknown := set(names) - set(fresh):
        raise ValueError(
            f"arch={arch!r} has no {some(unknown)}: expected an architecture around a {family.model_type} decoder"
        )
    for ours, theirs in names.items():
        _check_shapes(weights, ours, theirs, fresh[ours].shape, config)
    state = {
        ours: convert([weights[name] for name in theirs], ours, family.name, fixed["heads"])
        for ours, theirs in names.items()
    }
    model.load_state_dict(state if complete else fresh | state)
    return model


def check_names(weights: Iterable[str], needed: Set[str], which: str) -> None:
    """Raise ValueError for missing and surplus weights; ``which`` ends the sentence "expected those ..."."""
    for problem, wrong in (("missing weights", needed - set(weights)), ("surplus weights", set(weights) - needed)):
        if wrong:
            raise ValueError(f"{problem}: {some(wrong)}; expected those {which}")


def _dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The one floating-point type of all weights. Raises ValueError."""
    dtypes = {tensor.dtype for tensor in weights.values()}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"weights of type {some(map(str, dtypes))}: expected one floating-point type; convert them")
    return dtypes.pop()


def _merge(fixed: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """What the source decides and the flags. Raises ValueError for a flag that the source decides."""
    for name in flags.keys() & fixed.keys():
        raise FieldError(
            name, flags[name], f"expected no such flag, the source decides it ({fixed[name]!r}); leave it out"
        )
    return fixed | flags


def _mamba_settings(config: Any) -> dict[str, Any]:
    """Config fields from a Hugging Face configuration. Raises ValueError for an activation that our Mamba does not
    compute."""
    if config.hidden_act not in ("silu", "swish"):
        raise FieldError("hidden_act", config.hidden_act, "expected 'silu'; Mamba here computes nothing else")
    return {"norm_eps": config.layer_norm_epsilon, "tie_embeddings": config.tie_word_embeddings}


def _mamba(weights: Any, fixed: dict[str, Any], flags: dict[str, Any]) -> SegmentRecurrent:
    """A Mamba with ``weights``, which may lack the head where it is tied. ``fixed``: fields that no flag may change."""
    weights = {
        name.replace("backbone.embedding.", "backbone.embeddings."): t
        for name, t in _canonical(weights, "backbone").items()
    }  # mamba_ssm's name
    tokens = weights.get(MAMBA["decoder.tokens.weight"])
    if tokens is not None and fixed.setdefault(
        "tie_embeddings", HEAD not in weights or torch.equal(weights[HEAD], tokens)
    ):
        weights.setdefault(HEAD, tokens)
    layers = {m[1] for name in weights if (m := re.match(r"backbone\.layers\.(\d+)\.", name))}
    names = MAMBA | {
        f"decoder.layers.{i}.{ours}": f"backbone.layers.{i}.{theirs}"
        for i in range(max(1, len(layers)))
        for ours, theirs in MAMBA_LAYER.items()
    }
    check_names(
        weights, set(names.values()), "of a Mamba without biases in its projections: check where they come from"
    )
    dtype = _dtype(weights)
    for name, _, dims in MAMBA_SIZES.values():
        if weights[name].dim() != dims or not weights[name].numel():
            raise ValueError(
                f"{name} has shape {tuple(weights[name].shape)}: expected {dims} dimensions; check the weights"
            )
    fixed |= {"layers": len(layers)} | {size: weights[name].shape[dim] for size, (name, dim, _) in MAMBA_SIZES.items()}
    if fixed["expand"] % fixed["width"]:
        raise ValueError(
            f"{fixed['expand']} channels: expected a multiple of the width {fixed['width']}; others are not supported"
        )
    fixed["expand"] //= fixed["width"]
    cls = load_class("model", "mamba")
    model = cls(build_config(cls.Config, _merge(fixed, flags))).to(dtype)
    for ours, fresh in model.state_dict().items():
        if weights[names[ours]].shape != fresh.shape:
            raise ValueError(
                f"{names[ours]} has shape {tuple(weights[names[ours]].shape)}: expected {tuple(fresh.shape)} as in the other weights; check them"
            )
    model.load_state_dict({ours: weights[theirs] for ours, theirs in names.items()})
    return model.eval()


def _config(cls: Any, arch: str, family: Family, fixed: dict[str, Any], flags: dict[str, Any], complete: bool) -> Any:
    """The configuration, from what the source decides and the flags. ``complete``: the source has the positions of the
    memory as well."""
    merged = _merge(fixed, flags)
    if missing := {"family", "wrap_pos"} - {f.name for f in fields(cls.Config)}:
        raise ValueError(
            f"arch={arch!r} has no {some(missing)} in its configuration: expected an architecture around a {family.model_type} decoder"
        )
    config = build_config(cls.Config, merged)
    return replace(config, positions=config.positions - config.rows(0)) if config.wrap_pos and complete else config


def _check_shapes(weights: Mapping[str, Tensor], ours: str, theirs: list[str], shape: torch.Size, config: Any) -> None:
    """Raise ValueError for a weight that is not of our shape, or of its share of the rows where several make up
    ours."""
    shared = (shape[0] - config.width) // 2
    for name, rows in zip(theirs, (config.width, shared, shared) if len(theirs) > 1 else (shape[0],), strict=True):
        expected = (rows, *shape[1:])[:: -1 if config.family == "gpt2" and ours.endswith(CONV1D) else 1]
        if weights[name].shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(weights[name].shape)}: expected {expected} as in the other weights; check them and the heads"
            )


def _names(
    layout: Layout, family: Family, layers: int, weights: Mapping[str, Tensor]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Our names -> canonical ones, of the decoder, with {} for what stands between a layer and its block, and of the
    memory."""
    outer = dict(OUTER[family.name])
    stem = outer.pop("layers")
    decoder = {
        f"decoder.{ours}.weight": [f"{theirs}.weight"]
        for ours, theirs in {**outer, "head": HEAD.removesuffix(".weight")}.items()
    }
    if family.name != "llama":
        decoder["decoder.norm.bias"] = [f"{outer['norm']}.bias"]
    memory = {ours: [theirs] for ours, theirs in layout.model.items()}
    for i in range(layers):
        block = block_names(family.name, weights, f"{stem}.{i}.{layout.wrapper}")
        decoder |= {f"decoder.layers.{i}.{{}}{ours}": theirs for ours, theirs in block.items()}
        memory |= {f"decoder.layers.{i}.{ours}": [f"{stem}.{i}.{theirs}"] for ours, theirs in layout.layer.items()}
    return decoder, memory


def _canonical(weights: Any, stem: str) -> dict[str, Tensor]:
    """Weights by canonical name, without ``BUFFERS``; PRMT's (1, M, D) memories become (M, D).

    Of the prefixes that wrappers add (the reference's ``memory_cell.`` and ``model.``) and that a model saved without
    its head lacks, all names but those of the head and of the reference's memory keep ``stem``, the family's own.
    """
    if not isinstance(weights, Mapping):
        raise ValueError(f"a {type(weights).__name__}: expected a state_dict; pass that")
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise ValueError(
                f"{name!r} is of type {type(tensor).__name__}: expected a state_dict of tensors only; pass that part"
            )
        if name.endswith(BUFFERS):
            continue
        key = re.sub(rf"^(memory_cell\.)?(model\.)*({stem}\.)?", "", name).replace(
            "embed_out.", "lm_head."
        )  # NeoX's head, old and in files
        key = key if key in (HEAD, "memory") else f"{stem}.{key}"
        if key in out:
            raise ValueError(f"two weights are named {key}: expected one, with or without a prefix; drop the other")
        out[key] = tensor[0] if key.endswith("memory") and tensor.dim() == 3 and len(tensor) == 1 else tensor
    return out


def _tie(weights: dict[str, Tensor], family: Family, wanted: bool | None) -> bool:
    """Whether head and token embedding are one weight; if so, ``weights`` gets the head that a file may leave out."""
    tokens = f"{OUTER[family.name]['tokens']}.weight"
    if tokens not in weights or wanted is False or (wanted is None and family.name == "gpt_neox"):
        return bool(wanted)
    same = torch.equal(weights.setdefault(HEAD, weights[tokens]), weights[tokens])
    if wanted and not same:
        raise ValueError(f"{HEAD} differs from {tokens}: expected equal ones as the embeddings are tied; untie them")
    return same


def _sizes(weights: Mapping[str, Tensor], layout: Layout, family: Family, heads: int) -> dict[str, Any]:
    """The config fields that the weights decide."""

    def shape(name: str, dims: int = 2) -> torch.Size:
        if weights[name].dim() != dims:
            raise ValueError(
                f"{name} has shape {tuple(weights[name].shape)}: expected {dims} dimensions; check the weights"
            )
        return weights[name].shape

    outer = OUTER[family.name]
    first = f"{outer['layers']}.0"
    block = block_names(family.name, weights, f"{first}.{layout.wrapper}")
    vocab_size, width = shape(f"{outer['tokens']}.weight")
    inner = shape(block["up.weight"][0])[1 if family.name == "gpt2" else 0]
    if not width:
        raise ValueError(f"{outer['tokens']}.weight has no columns: expected at least 1")
    sizes = {"vocab_size": vocab_size, "width": width, "ff_mult": inner / width}
    if "positions" in outer:
        sizes["positions"] = shape(f"{outer['positions']}.weight")[0]
    if family.name == "llama":
        sizes |= {
            "kv_heads": shape(block["attention.qkv.weight"][1])[0] * heads // width,
            "qkv_bias": "attention.qkv.bias" in block,
        }
    return sizes | {name: shape(weight.format(first))[0] for name, weight in layout.sizes.items()}


def _settings(config: Any, family: Family, dropout: float | None) -> dict[str, Any]:
    """Config fields from a Hugging Face configuration. Raises ValueError for a setting that our decoder does not
    compute."""
    found = {name: (getattr(config, name), values) for name, values in family.settings.items()}
    fixed = {
        "heads": config.num_attention_heads,
        "layers": config.num_hidden_layers,
        "norm_eps": getattr(config, family.norm_eps),
    }
    if rope := getattr(config, "rope_parameters", None):
        found["rope_type"] = (rope["rope_type"], ("default",))
        fixed |= {"rotary_base": float(rope["rope_theta"]), "rotary_fraction": rope.get("partial_rotary_factor", 1.0)}
    if family.name == "llama":
        found["head_dim"] = (
            getattr(config, "head_dim", None),
            (None, config.hidden_size // config.num_attention_heads),
        )
        if dropout is None:
            found["attention_dropout"] = (
                config.attention_dropout,
                (0.0,),
            )  # ours would drop more than attention weights
    for name, (value, supported) in found.items():
        if value not in supported:
            raise FieldError(
                name, value, f"expected {' or '.join(map(repr, supported))}; the decoder here computes nothing else"
            )
    rates = {getattr(config, name) for name in family.dropouts} or {0.0} if dropout is None else {dropout}
    if len(rates) > 1:
        raise ValueError(
            f"{', '.join(family.dropouts)} are {some(map(str, rates))}: expected the same rate for all; pass dropout="
        )
    return fixed | {"tie_embeddings": config.tie_word_embeddings, "dropout": rates.pop()}


def _read_file(path: Path) -> Any:
    """What a file of weights holds. Pickles are read with ``weights_only``, so that they run no code."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a .safetensors, .bin, .pt or .pth file")
    if path.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
        raise ValueError(f"{path}: unknown type of file; expected .safetensors, .bin, .pt or .pth")
    try:
        return (
            safetensors.torch.load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, "cpu", weights_only=True)
        )
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: corrupt, or more than tensors (none of it was run); expected a state_dict as torch.save writes it"
        ) from error
    except Exception as error:  # a broken file fails in many ways, depending on where it is cut
        raise ValueError(
            f"{path}: cannot be read ({type(error).__name__}); expected a file of weights: fetch or save it again"
        ) from error


def _read_folder(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Configuration and weights that Hugging Face's ``save_pretrained`` wrote."""
    return _read_config(folder, MODEL_TYPES), read_weights(folder)


def _read_config(folder: Path, types: Sequence[str]) -> Any:
    """The configuration of a folder that Hugging Face's ``save_pretrained`` wrote, of one of these ``types``."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder}: expected a folder with config.json and weights, as save_pretrained writes it"
        )
    check_type(read_json(folder / "config.json").get("model_type"), types)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers reports a broken configuration in many ways
        raise ValueError(
            f"config.json cannot be used ({type(error).__name__}); expected that of {some(types)}"
        ) from error


def read_weights(folder: Path) -> dict[str, Any]:
    """The weights in a folder, in one file or in several with an index. Raises FileNotFoundError for a file that is
    missing."""
    stems = ("model.safetensors", "pytorch_model.bin")
    name = next((n for stem in stems for n in (stem, f"{stem}.index.json") if (folder / n).is_file()), None)
    if name is None:
        raise FileNotFoundError(
            f"{folder}: expected a folder with weights, {' or '.join(stems)}, as save_pretrained writes it"
        )
    parts = [name]
    if name.endswith(".json"):
        places = read_json(folder / name).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"{name} has no weight_map: expected an index that save_pretrained wrote")
        parts = sorted({str(part) for part in places.values()})
    return {name: tensor for part in parts for name, tensor in _read_file(folder / Path(part).name).items()}


def read_json(path: Path) -> dict[str, Any]:
    """An object in a .json file. Raises ValueError if it holds something else."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path.name} cannot be read as .json ({type(error).__name__}); expected one that save_pretrained wrote"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path.name} holds a {type(found).__name__}: expected an object, as save_pretrained writes it"
        )
    return found


@contextmanager
def about(source: Any) -> Iterator[None]:
    """Errors about the values of weights and settings name where these come from."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _lookup(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; {nearest(name, table)}")
    return table[name]


def some(names: Iterable[str], limit: int = 6) -> str:
    """The first names of a list that may be long."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
