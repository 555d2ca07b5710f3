"""Weights from elsewhere into our models: the reference code's checkpoints and Hugging Face's GPT-2, GPT-NeoX and Mamba.

Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de (names of the weights), transformers 5.

Both ways in are one: the weights get canonical names (the reference's, without its ``memory_cell.`` and ``model.``), a ``Layout``
says which of them an architecture needs and where they go, and ``backbone.import_decoder`` converts the decoder. All is strict: a
weight that is missing, left over or of another shape is an error, and so is a setting that our decoder does not compute.

No checkpoint of the reference tells nu, gamma, norm_eps and rotary_fraction: pass them where they differ from our defaults. One
trained with ``wrap_pos`` looks like any other, but numbers its memory rows differently and is not supported.
"""

import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lit_memory.backbone import BUFFERS, _block_names, import_decoder
from lit_memory.recurrence import SegmentRecurrent
from lit_memory.registry import build_config, load_class, nearest

HEAD = "lm_head.weight"
CONV1D = ("qkv.weight", "out.weight", "up.weight", "down.weight")  # Hugging Face's GPT-2 keeps these as (in, out)


@dataclass(frozen=True)
class Layout:
    """Where the weights of an architecture are: our names -> the reference's."""

    ours: str = "block."
    """What stands between a layer and its block in our names."""
    theirs: str = "layer."
    model: Mapping[str, str] = field(default_factory=dict)
    """Weights of the architecture itself, outside the layers."""
    layer: Mapping[str, str] = field(default_factory=dict)
    """Those inside every layer."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Config field -> the weight whose first dimension it is; ``{}`` stands for the first layer."""
    ignored: tuple[str, ...] = ()
    """Weights that the reference stores and never uses."""


_RMT = Layout("", "", model={"memory": "memory"}, sizes={"memory_tokens": "memory"})
_ARMT = {"to_query.weight": "W_mq.weight", "to_key.weight": "W_mk.weight", "to_value.weight": "W_mv.weight"}
_ARMT |= {"to_beta.weight": "W_mb.weight", "to_beta.bias": "W_mb.bias"}
LAYOUTS = {
    "transformer": Layout(theirs=""),
    "rmt": _RMT,
    "tarm": _RMT,
    "prmt": Layout(layer={"memory": "memory"}, sizes={"memory_tokens": "{}.memory"}, ignored=("memory",)),  # see Deviations in prmt.py
    "armt": Layout(model={"memory": "memory"}, layer=_ARMT, sizes={"memory_tokens": "memory", "memory_dim": "{}.W_mq.weight"}),
}


@dataclass(frozen=True)
class Family:
    """A decoder of Hugging Face: the names of its weights, and the settings with which ours computes the same."""

    name: str
    layers: str
    tokens: str
    norm: str
    positions: str | None
    norm_eps: str
    dropouts: tuple[str, ...]
    settings: Mapping[str, tuple[Any, ...]]
    """Setting -> the values that our decoder implements."""


FAMILIES = {
    "gpt2": Family(
        name="gpt2",
        layers="transformer.h",
        tokens="transformer.wte.weight",
        norm="transformer.ln_f",
        positions="transformer.wpe.weight",
        norm_eps="layer_norm_epsilon",
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        settings={"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    ),
    "neox": Family(
        name="gpt_neox",
        layers="gpt_neox.layers",
        tokens="gpt_neox.embed_in.weight",
        norm="gpt_neox.final_layer_norm",
        positions=None,
        norm_eps="layer_norm_eps",
        dropouts=("attention_dropout", "hidden_dropout"),
        settings={"hidden_act": ("gelu",), "use_parallel_residual": (True,), "attention_bias": (True,)},
    ),
}


MAMBA = {"decoder.tokens.weight": "backbone.embeddings.weight", "decoder.norm.weight": "backbone.norm_f.weight", "decoder.head.weight": HEAD}
MAMBA_LAYER = {"norm.weight": "norm.weight"} | {
    name: f"mixer.{name}"
    for name in ("A_log", "D", "conv1d.bias", "conv1d.weight", "dt_proj.bias", "dt_proj.weight", "in_proj.weight", "out_proj.weight", "x_proj.weight")
}
MAMBA_SIZES = {
    "vocab_size": ("backbone.embeddings.weight", 0, 2),
    "width": ("backbone.embeddings.weight", 1, 2),
    "expand": ("backbone.layers.0.mixer.A_log", 0, 2),
    "state_dim": ("backbone.layers.0.mixer.A_log", 1, 2),
    "conv_taps": ("backbone.layers.0.mixer.conv1d.weight", 2, 3),
    "dt_rank": ("backbone.layers.0.mixer.dt_proj.weight", 1, 2),
}
"""Config field -> the weight and the dimension that it is (``expand``: times the width), and how many that weight has."""


def load_reference(
    source: str | os.PathLike[str] | Mapping[str, Tensor], *, arch: str, backbone: str | None = None, n_head: int | None = None, **flags: Any
) -> SegmentRecurrent:
    """The model of a checkpoint that the reference code wrote, in eval mode and in the checkpoint's own precision.

    source: a .safetensors file; a .bin, .pt or .pth file with a state_dict (tensors only, no code is run); or the state_dict.
    arch: "transformer", "rmt", "prmt", "armt", "tarm" (RMT's weights) or "mamba". backbone: "gpt2" or "neox"; Mamba has none.
    n_head: attention heads, which no weight tells. All other sizes, the number of layers too, are read off the weights.
    flags: further fields of the model's ``Config``, such as ``gamma="off"``. ``tie_embeddings`` defaults to what the weights show.
    Raises FileNotFoundError for a missing file, TypeError for an unknown flag and ValueError for anything else that does not fit.
    """
    if arch == "mamba":
        if backbone is not None or n_head is not None:
            raise ValueError(f"backbone={backbone!r}, n_head={n_head}: expected None for both, as Mamba has neither; leave them out")
        with _about(source if isinstance(source, (str, os.PathLike)) else "state_dict"):
            return _mamba(_read_file(Path(source)) if isinstance(source, (str, os.PathLike)) else source, {}, flags)
    layout, family = _lookup("arch", arch, {**LAYOUTS, "mamba": None}), _lookup("backbone", str(backbone), FAMILIES)
    if n_head is None:
        raise ValueError("n_head=None: expected the number of attention heads, which no weight tells")
    weights = _read_file(Path(source)) if isinstance(source, (str, os.PathLike)) else source
    with _about(source if isinstance(source, (str, os.PathLike)) else "state_dict"):
        weights = {name: tensor for name, tensor in _canonical(weights).items() if name not in layout.ignored}
        layers = {m[1] for name in weights if (m := re.match(rf"{re.escape(family.layers)}\.(\d+)\.", name))}  # a gap: missing weights
        fixed = {"heads": n_head, "layers": max(1, len(layers)), "tie_embeddings": flags.pop("tie_embeddings", None)}
        return _build(arch, layout, family, weights, fixed, flags).eval()


def load_huggingface(source: Any, arch: str = "transformer", **flags: Any) -> SegmentRecurrent:
    """One of our architectures around a Hugging Face GPT-2 or GPT-NeoX, its memory freshly initialised, or a Mamba; in eval mode.

    source: a ``GPT2LMHeadModel`` or ``GPTNeoXForCausalLM`` (its weights are copied), or a folder with config.json and weights.
        With ``arch="mamba"``: a ``MambaForCausalLM``, or its folder.
    flags: fields of the model's ``Config``, such as ``memory_tokens=10``. Sizes, norm_eps, rotary_fraction and tying are those of
        ``source``, and so is ``dropout`` unless given.
    Raises FileNotFoundError for a missing folder or file, TypeError for an unknown flag and ValueError for anything else that does
    not fit, settings included with which Hugging Face computes something else.
    """
    layout = None if arch == "mamba" else replace(_lookup("arch", arch, {**LAYOUTS, "mamba": None}), theirs="", model={}, layer={}, sizes={})
    is_folder = isinstance(source, (str, os.PathLike))
    if not is_folder and not hasattr(source, "config"):
        raise TypeError(f"source is a {type(source).__name__}: expected a Hugging Face model or a folder; for a state_dict use load_reference")
    config, weights = _read_folder(Path(source)) if is_folder else (source.config, source.state_dict())
    with _about(source if is_folder else type(source).__name__):
        if layout is None or config.model_type == "mamba":
            if layout is not None or config.model_type != "mamba":
                raise ValueError(f"model_type={config.model_type!r}, arch={arch!r}: expected 'mamba' for both or for neither; check arch and source")
            return _mamba(weights, _mamba_settings(config), flags)
        family = next((f for f in FAMILIES.values() if f.name == config.model_type), None)
        if family is None:
            raise ValueError(f"model_type={config.model_type!r}: expected one of {', '.join(f.name for f in FAMILIES.values())}")
        weights, stem = _canonical(weights), family.layers.partition(".")[0]
        if not any(name.startswith(f"{stem}.") for name in weights):  # saved without its head, like the first GPT-2
            weights = {name if name == HEAD else f"{stem}.{name}": tensor for name, tensor in weights.items()}
        model: Any = _build(arch, layout, family, weights, _settings(config, family, flags.pop("dropout", None)), flags)
    if "memory" in LAYOUTS[arch].model:  # its scale is that of the embeddings, which were random until now
        model.memory = model.decoder.memory_tokens(model.config.memory_tokens)
    return model.eval()


def _build(arch: str, layout: Layout, family: Family, weights: dict[str, Tensor], fixed: dict[str, Any], flags: dict[str, Any]) -> SegmentRecurrent:
    """A model with ``weights``; what ``layout`` does not name keeps its init. ``fixed``: fields that no flag may change."""
    dtypes = {tensor.dtype for tensor in weights.values()}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"weights of type {_some(map(str, dtypes))}: expected one floating-point type; convert them")
    fixed["tie_embeddings"] = _tie(weights, family, fixed["tie_embeddings"])
    decoder, memory = _names(layout, family, fixed["layers"])
    names = decoder | memory
    for problem, wrong in (("missing weights", set(names.values()) - set(weights)), ("surplus weights", set(weights) - set(names.values()))):
        if wrong:
            raise ValueError(f"{problem}: {_some(wrong)}; expected those of arch={arch!r} on {family.name}: check arch, backbone and where they come from")
    fixed |= {"family": family.name, **_sizes(weights, layout, family)}
    for name in flags.keys() & fixed.keys():
        raise ValueError(f"{name}={flags[name]!r}: expected no such flag, the source decides it ({fixed[name]!r}); leave it out")
    cls = load_class("model", arch)
    model = cls(build_config(cls.Config, fixed | flags)).to(dtypes.pop())
    fresh = model.state_dict()
    for ours, theirs in names.items():
        expected = tuple(fresh[ours].shape)[:: -1 if family.name == "gpt2" and ours.endswith(CONV1D) else 1]
        if weights[theirs].shape != expected:
            raise ValueError(f"{theirs} has shape {tuple(weights[theirs].shape)}: expected {expected} as in the other weights; check them and the heads")
    plain = {theirs.replace(f".{layout.theirs}", ".", 1): weights[theirs] for theirs in decoder.values()}
    imported = import_decoder(plain, family.name, fixed["heads"])
    state = {ours: imported[ours.removeprefix("decoder.").replace(f".{layout.ours}", ".", 1)] for ours in decoder}
    state |= {ours: weights[theirs] for ours, theirs in memory.items()}
    model.load_state_dict(state if layout is LAYOUTS[arch] else fresh | state)
    return model


def _mamba_settings(config: Any) -> dict[str, Any]:
    """Config fields from a Hugging Face configuration. Raises ValueError for an activation that our Mamba does not compute."""
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act={config.hidden_act!r}: expected 'silu'; Mamba here computes nothing else")
    return {"norm_eps": config.layer_norm_epsilon, "tie_embeddings": config.tie_word_embeddings}


def _mamba(weights: Any, fixed: dict[str, Any], flags: dict[str, Any]) -> SegmentRecurrent:
    """A Mamba with ``weights``, which may lack the head where it is tied. ``fixed``: fields that no flag may change."""
    weights = {name.replace("backbone.embedding.", "backbone.embeddings."): t for name, t in _canonical(weights).items()}  # mamba_ssm's name
    if not any(name.startswith("backbone.") for name in weights):  # saved without its head
        weights = {f"backbone.{name}": t for name, t in weights.items()}
    tokens = weights.get(MAMBA["decoder.tokens.weight"])
    if tokens is not None and fixed.setdefault("tie_embeddings", HEAD not in weights or torch.equal(weights[HEAD], tokens)):
        weights.setdefault(HEAD, tokens)
    layers = {m[1] for name in weights if (m := re.match(r"backbone\.layers\.(\d+)\.", name))}
    names = MAMBA | {f"decoder.layers.{i}.{ours}": f"backbone.layers.{i}.{theirs}" for i in range(max(1, len(layers))) for ours, theirs in MAMBA_LAYER.items()}
    for problem, wrong in (("missing weights", set(names.values()) - set(weights)), ("surplus weights", set(weights) - set(names.values()))):
        if wrong:
            raise ValueError(f"{problem}: {_some(wrong)}; expected those of a Mamba without biases in its projections: check where they come from")
    dtypes = {tensor.dtype for tensor in weights.values()}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"weights of type {_some(map(str, dtypes))}: expected one floating-point type; convert them")
    for name, _, dims in MAMBA_SIZES.values():
        if weights[name].dim() != dims or not weights[name].numel():
            raise ValueError(f"{name} has shape {tuple(weights[name].shape)}: expected {dims} dimensions; check the weights")
    fixed |= {"layers": len(layers)} | {size: weights[name].shape[dim] for size, (name, dim, _) in MAMBA_SIZES.items()}
    if fixed["expand"] % fixed["width"]:
        raise ValueError(f"{fixed['expand']} channels: expected a multiple of the width {fixed['width']}; others are not supported")
    fixed["expand"] //= fixed["width"]
    for name in flags.keys() & fixed.keys():
        raise ValueError(f"{name}={flags[name]!r}: expected no such flag, the source decides it ({fixed[name]!r}); leave it out")
    cls = load_class("model", "mamba")
    model = cls(build_config(cls.Config, fixed | flags)).to(dtypes.pop())
    for ours, fresh in model.state_dict().items():
        if weights[names[ours]].shape != fresh.shape:
            raise ValueError(f"{names[ours]} has shape {tuple(weights[names[ours]].shape)}: expected {tuple(fresh.shape)} as in the other weights; check them")
    model.load_state_dict({ours: weights[theirs] for ours, theirs in names.items()})
    return model.eval()


def _names(layout: Layout, family: Family, layers: int) -> tuple[dict[str, str], dict[str, str]]:
    """Our names -> canonical ones: the decoder's, and the memory's."""
    decoder = {"decoder.tokens.weight": family.tokens, "decoder.head.weight": HEAD}
    decoder |= {"decoder.norm.weight": f"{family.norm}.weight", "decoder.norm.bias": f"{family.norm}.bias"}
    decoder |= {"decoder.positions.weight": family.positions} if family.positions else {}
    memory = dict(layout.model)
    for i in range(layers):
        for ours, theirs in _block_names(family.name).items():
            for kind in ("weight", "bias"):
                decoder[f"decoder.layers.{i}.{layout.ours}{ours}.{kind}"] = f"{family.layers}.{i}.{layout.theirs}{theirs}.{kind}"
        memory |= {f"decoder.layers.{i}.{ours}": f"{family.layers}.{i}.{theirs}" for ours, theirs in layout.layer.items()}
    return decoder, memory


def _canonical(weights: Any) -> dict[str, Tensor]:
    """Weights by canonical name, without ``BUFFERS``; PRMT's (1, M, D) memories become (M, D)."""
    if not isinstance(weights, Mapping):
        raise ValueError(f"a {type(weights).__name__}: expected a state_dict; pass that")
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise ValueError(f"{name!r} is of type {type(tensor).__name__}: expected a state_dict of tensors only; pass that part")
        if name.endswith(BUFFERS):
            continue
        key = name.removeprefix("memory_cell.").removeprefix("model.").replace("embed_out.", "lm_head.")  # NeoX's head, old and in files
        if key in out:
            raise ValueError(f"two weights are named {key}: expected one, with or without a prefix; drop the other")
        out[key] = tensor[0] if key.endswith(".memory") and tensor.dim() == 3 and len(tensor) == 1 else tensor
    return out


def _tie(weights: dict[str, Tensor], family: Family, wanted: bool | None) -> bool:
    """Whether head and token embedding are one weight; if so, ``weights`` gets the head that a file may leave out."""
    if family.tokens not in weights or wanted is False or (wanted is None and family.name != "gpt2"):
        return bool(wanted)
    same = torch.equal(weights.setdefault(HEAD, weights[family.tokens]), weights[family.tokens])
    if wanted and not same:
        raise ValueError(f"{HEAD} differs from {family.tokens}: expected equal ones as the embeddings are tied; untie them")
    return same


def _sizes(weights: Mapping[str, Tensor], layout: Layout, family: Family) -> dict[str, int]:
    """The config fields that the shapes of the weights decide."""

    def shape(name: str, dims: int) -> torch.Size:
        if weights[name].dim() != dims:
            raise ValueError(f"{name} has shape {tuple(weights[name].shape)}: expected {dims} dimensions; check the weights")
        return weights[name].shape

    first = f"{family.layers}.0"
    vocab_size, width = shape(family.tokens, 2)
    inner = shape(f"{first}.{layout.theirs}{_block_names(family.name)['up']}.bias", 1)[0]
    if not width or inner % width:
        raise ValueError(f"feed-forward width {inner}: expected a multiple of the width {width}; others are not supported")
    sizes = {"vocab_size": vocab_size, "width": width, "ff_mult": inner // width}
    sizes |= {"positions": shape(family.positions, 2)[0]} if family.positions else {}
    return sizes | {name: shape(weight.format(first), 2)[0] for name, weight in layout.sizes.items()}


def _settings(config: Any, family: Family, dropout: float | None) -> dict[str, Any]:
    """Config fields from a Hugging Face configuration. Raises ValueError for a setting that our decoder does not compute."""
    found = {name: (getattr(config, name), values) for name, values in family.settings.items()}
    fixed = {"heads": config.num_attention_heads, "layers": config.num_hidden_layers, "norm_eps": getattr(config, family.norm_eps)}
    if rope := getattr(config, "rope_parameters", None):
        found |= {"rope_type": (rope["rope_type"], ("default",)), "rope_theta": (rope["rope_theta"], (10_000.0,))}
        fixed["rotary_fraction"] = rope.get("partial_rotary_factor", 1.0)
    for name, (value, supported) in found.items():
        if value not in supported:
            raise ValueError(f"{name}={value!r}: expected {' or '.join(map(repr, supported))}; the decoder here computes nothing else")
    rates = {getattr(config, name) for name in family.dropouts} if dropout is None else {dropout}
    if len(rates) > 1:
        raise ValueError(f"{', '.join(family.dropouts)} are {_some(map(str, rates))}: expected the same rate for all; pass dropout=")
    return fixed | {"tie_embeddings": config.tie_word_embeddings, "dropout": rates.pop()}


def _read_file(path: Path) -> Any:
    """What a file of weights holds. Pickles are read with ``weights_only``, so that they run no code."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a .safetensors, .bin, .pt or .pth file")
    if path.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
        raise ValueError(f"{path}: unknown type of file; expected .safetensors, .bin, .pt or .pth")
    try:
        return safetensors.torch.load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: corrupt, or more than tensors (none of it was run); expected a state_dict as torch.save writes it") from error
    except Exception as error:  # a broken file fails in many ways, depending on where it is cut
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}); expected a file of weights: fetch or save it again") from error


def _read_folder(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Configuration and weights that ``save_pretrained`` wrote, the latter in one file or in several."""
    from transformers import AutoConfig

    stems = ("model.safetensors", "pytorch_model.bin")
    name = next((n for stem in stems for n in (stem, f"{stem}.index.json") if (folder / n).is_file()), None)
    if name is None or not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: expected a folder with config.json and {' or '.join(stems)}, as save_pretrained writes it")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        parts = sorted(set(json.loads((folder / name).read_text())["weight_map"].values())) if name.endswith(".json") else [name]
    except Exception as error:  # transformers reports a broken configuration in many ways
        raise ValueError(f"{folder}: the .json files cannot be read ({type(error).__name__}); expected those of a GPT-2 or GPT-NeoX") from error
    return config, {name: tensor for part in parts for name, tensor in _canonical(_read_file(folder / Path(part).name)).items()}


@contextmanager
def _about(source: Any) -> Iterator[None]:
    """Errors about the values of weights and settings name where these come from."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _lookup(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; {nearest(name, table)}")
    return table[name]


def _some(names: Iterable[str], limit: int = 6) -> str:
    """The first names of a list that may be long."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
