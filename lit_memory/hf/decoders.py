"""Decoders of Hugging Face: their weights into our architectures. Their settings are in ``families``.

Reference: Hugging Face transformers 5.

Everything is strict: a weight that is missing, surplus or of another shape is an error.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from lit_memory.hf.families import Family
from lit_memory.hf.names import CONV1D, HEAD, OUTER, OWN_HEAD, Layout, block_names, convert, weight_names
from lit_memory.hf.reading import check_dims, check_names, merge_flags, shared_dtype, tie
from lit_memory.models.backbone import GATED
from lit_memory.recurrence import SegmentRecurrent
from lit_memory.registry import build_config, load_class
from lit_memory.util.checks import FieldError, preview


def build_model(
    arch: str,
    family: Family,
    weights: dict[str, Tensor],
    fixed: Mapping[str, Any],
    flags: Mapping[str, Any],
    layout: Layout | None = None,
) -> SegmentRecurrent:
    """The architecture ``arch`` around a decoder, in the precision of its weights.

    weights: by canonical name. fixed: config fields that the source decides, and no flag may change. layout: where the
        weights of the memory are; default: there are none, and the memory keeps its fresh initialisation.
    """
    has_memory, layout = layout is not None, layout or Layout()
    dtype = shared_dtype(weights)
    fixed = {**fixed, "tie_embeddings": _tie_head(weights, family, fixed["tie_embeddings"])}
    names = weight_names(family.name, fixed["layers"], weights, layout)
    needed = {name for theirs in names.values() for name in theirs}
    check_names(weights, needed, f"of arch={arch!r} on {family.name}: check arch, backbone and where they come from")
    cls: Any = load_class("model", arch)
    fixed = {"family": family.name, **_sizes(weights, layout, family, fixed), **fixed}
    config = _config(cls, arch, family, fixed, flags)
    if config.wrap_pos and has_memory:  # the table of the source has the positions of the memory as well
        config = replace(config, positions=config.positions - config.rows(0))
    model = cls(config).to(dtype)
    fresh = model.state_dict()
    if config.wrap_pos and not has_memory:
        table = names["decoder.positions.weight"][0]
        memory_rows = fresh["decoder.positions.weight"][config.positions :].to(weights[table].device)
        weights[table] = torch.cat([weights[table], memory_rows])
    names = {_in_block(ours, fresh): theirs for ours, theirs in names.items()}
    if unknown := set(names) - set(fresh):
        raise FieldError("arch", arch, f"no {preview(unknown)}; expected {_around(family)}")
    state = _state(weights, names, fresh, config)
    model.load_state_dict(state if has_memory else {**fresh, **state})
    return model


def _tie_head(weights: dict[str, Tensor], family: Family, wanted: bool | None) -> bool:
    """Whether head and token embedding are one weight; if so, ``weights`` gets the head that a file may leave out."""
    tokens = f"{OUTER[family.name]['tokens']}.weight"
    if tokens not in weights or wanted is False or (wanted is None and family.name in OWN_HEAD):
        return bool(wanted)
    if not wanted:
        return torch.equal(weights.setdefault(HEAD, weights[tokens]), weights[tokens])
    tie(weights, HEAD, tokens)
    return True


def _sizes(weights: Mapping[str, Tensor], layout: Layout, family: Family, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The config fields that the weights decide. fixed: those that are known."""
    outer = OUTER[family.name]
    first = f"{outer['layers']}.0"
    block = block_names(family.name, weights, f"{first}.{layout.wrapper}")
    vocab_size, width = check_dims(weights, f"{outer['tokens']}.weight", 2)
    ff_width = check_dims(weights, block["up.weight"][0], 2)[1 if family.name == "gpt2" else 0]
    if not width:
        raise ValueError(f"{outer['tokens']}.weight has no columns: expected at least 1")
    sizes = {"vocab_size": vocab_size, "width": width, "ff_mult": ff_width / width}
    if "positions" in outer:
        sizes["positions"] = check_dims(weights, f"{outer['positions']}.weight", 2)[0]
    if family.name in GATED:
        query_rows, key_rows = (check_dims(weights, name, 2)[0] for name in block["attention.qkv.weight"][:2])
        sizes["head_dim"] = None if query_rows == width else query_rows // fixed["heads"]
        sizes["kv_heads"] = key_rows * fixed["heads"] // max(query_rows, 1)
        sizes |= {"qkv_bias": "attention.qkv.bias" in block, "qk_norm": "attention.q_norm.weight" in block}
        sizes["post_norms"] = "post1.weight" in block
    for name, weight in layout.sizes.items():
        sizes[name] = check_dims(weights, weight.format(first), 2)[0]
    return sizes


def _config(cls: Any, arch: str, family: Family, fixed: Mapping[str, Any], flags: Mapping[str, Any]) -> Any:
    """The configuration of class ``cls``. Raises FieldError for an architecture without a decoder."""
    values = merge_flags(fixed, flags)
    if missing := {"family", "wrap_pos"} - {f.name for f in fields(cls.Config)}:
        raise FieldError("arch", arch, f"no {preview(missing)} in its configuration; expected {_around(family)}")
    return build_config(cls.Config, values)


def _around(family: Family) -> str:
    """The architectures that can have a decoder of the family, for messages."""
    return f"an architecture around a {family.model_type} decoder"


def _in_block(name: str, fresh: Mapping[str, Tensor]) -> str:
    """The name of a decoder's weight in a model, whose layers are blocks or contain one named ``block``."""
    wrapped = re.sub(r"^(decoder\.layers\.\d+\.)", r"\1block.", name)
    return wrapped if wrapped in fresh else name


def _state(
    weights: Mapping[str, Tensor], names: Mapping[str, list[str]], fresh: Mapping[str, Tensor], config: Any
) -> dict[str, Tensor]:
    """Our weights of ``names``, converted. Raises ValueError for one of another shape than in the ``fresh`` model."""
    state = {}
    for ours, theirs in names.items():
        _check_shapes(weights, ours, theirs, fresh[ours].shape, config)
        state[ours] = convert([weights[name] for name in theirs], ours, config.family, config.heads, config.rotary_dims)
    return state


def _check_shapes(weights: Mapping[str, Tensor], ours: str, theirs: list[str], shape: torch.Size, config: Any) -> None:
    """Raise ValueError for a weight that is not of our shape, or, where queries, keys and values make up ours, does not
    have its rows of it."""
    rows = [shape[0]]
    if len(theirs) > 1:
        query_rows = config.heads * config.head_width
        key_rows = (shape[0] - query_rows) // 2
        rows = [query_rows, key_rows, key_rows]
    transposed = config.family == "gpt2" and ours.endswith(CONV1D)
    for name, count in zip(theirs, rows, strict=True):
        expected = (count, *shape[1:])
        if transposed:
            expected = expected[::-1]
        if weights[name].shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(weights[name].shape)}: "
                f"expected {expected} as in the other weights; check them and the heads"
            )
