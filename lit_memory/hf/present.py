"""Checkpoints of ARMT as its authors run it today: folders with config.json and weights.

Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at 3da7f48, ``src/armt.py`` and
           ``src/armt_sw.py``, which is the same with a sliding window between segments.

config.json holds the settings of the memory and, in ``base_model_config``, those of the decoder. The weights
have Hugging Face's names, with ``layer.`` in front of those of a block.
"""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lit_memory.hf.decoders import build_model
from lit_memory.hf.families import FAMILIES, check_width, decoder_settings
from lit_memory.hf.names import ARMT_LAYOUT, canonical_weights
from lit_memory.hf.reading import check_model_type, parse_config, read_json, read_weights, shared_dtype
from lit_memory.models.armt import PRESENT
from lit_memory.recurrence import SegmentRecurrent
from lit_memory.util.checks import FieldError, fits

PRESENT_TYPES = ("armt", "armt_sw")
"""``model_type`` of these folders, without and with a sliding window."""
SETTINGS = {
    "num_mem_tokens": int,
    "d_mem": int,
    "correction": bool,
    "use_denom": bool,
    "wrap_layers": list[bool] | None,
}
"""Settings of config.json that a memory follows from."""
WINDOW_SETTINGS = {"segment_size": int, "use_sink": bool}
"""Those of the sliding window."""
BASES = [family.model_type for family in FAMILIES.values() if family.model_type not in ("gpt2", "gptj")]
SCALED_INPUTS, UNSCALED_SINCE = ("gemma", "gemma2"), (5, 4)
"""Decoders that scaled all their inputs, memory tokens included, before this version of transformers."""


def load_present(folder: Path, flags: dict[str, Any]) -> SegmentRecurrent:
    """The model in a folder, in eval mode; decoder and memory have their own precisions.

    flags: fields of ``ARMT.Config`` that the folder does not decide, such as ``dropout``.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder}: expected a folder with config.json and weights, as save_pretrained writes it"
        )
    content = read_json(folder / "config.json")
    config = decoder_config(content)
    family = next(family for family in FAMILIES.values() if family.model_type == config.model_type)
    weights = canonical_weights(read_weights(folder), family.stem)
    check_width(config, family, weights)
    fixed = decoder_settings(config, family, flags.pop("dropout", None)) | memory_settings(content, config)
    sink = {"sink": "sink"} if fixed["sink"] else {}
    layout = replace(ARMT_LAYOUT, model={**ARMT_LAYOUT.model, **sink}, sizes={}, layers=fixed["memory_layers"])
    is_memory = re.compile(rf"memory|sink|.*\.({'|'.join(map(re.escape, layout.layer.values()))})")
    parts = [{name for name in weights if bool(is_memory.fullmatch(name)) is which} for which in (False, True)]
    own = [shared_dtype({name: weights[name] for name in part}) for part in parts]
    wide = torch.promote_types(*own)
    weights = {name: tensor.to(wide) for name, tensor in weights.items()}
    if family.model_type in SCALED_INPUTS and written_by(content) < UNSCALED_SINCE and "memory" in weights:
        weights["memory"] = weights["memory"] * config.hidden_size**0.5
    model = build_model("armt", family, weights, fixed, flags, layout)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(own[name in layout.model or name.endswith(tuple(layout.layer))])
    return model.eval()


def decoder_config(content: Mapping[str, Any]) -> Any:
    """The configuration of the decoder. Raises FieldError for what ours does not compute."""
    check_model_type(content.get("model_type"), PRESENT_TYPES)
    base = content.get("base_model_config")
    if not isinstance(base, dict):
        raise FieldError("base_model_config", base, "expected the configuration of a decoder", reprlib.repr(base))
    if base.get("model_type") == "gpt2":
        expected = f"its positions go on from segment to segment, ours begin anew; expected one of {', '.join(BASES)}"
        raise FieldError("model_type", "gpt2", expected)
    if content["model_type"] == "armt_sw" and "gemma" in str(base.get("model_type")):
        expected = "its rotations go on from segment to segment, ours begin anew; expected no Gemma with a window"
        raise FieldError("model_type", base["model_type"], expected)
    return parse_config(base, BASES)


def memory_settings(content: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Fields of ``ARMT.Config`` from config.json. Raises FieldError for a setting of another type, or that we do not
    compute."""
    windowed = content["model_type"] == "armt_sw"
    kinds = SETTINGS | (WINDOW_SETTINGS if windowed else {})
    found = {name: content.get(name) for name in kinds}
    for name, kind in kinds.items():
        if not fits(found[name], kind):
            raise FieldError(
                name, found[name], f"expected {getattr(kind, '__name__', kind)}", reprlib.repr(found[name])
            )
    wrapped = found["wrap_layers"] or [True] * config.num_hidden_layers
    if len(wrapped) != config.num_hidden_layers or not any(wrapped):
        expected = f"expected {config.num_hidden_layers} layers, of which one has a memory"
        raise FieldError("wrap_layers", wrapped, expected, reprlib.repr(wrapped))
    alignment = content.get("segment_alignment", "left")
    if alignment != "left":
        raise FieldError("segment_alignment", alignment, "expected 'left'", reprlib.repr(alignment))
    return {
        **PRESENT,
        "nu": 3,
        "memory_tokens": found["num_mem_tokens"],
        "memory_dim": found["d_mem"],
        "gamma": "clip" if found["correction"] else "off",
        "use_denom": found["use_denom"],
        "past_tokens": found["segment_size"] if windowed else 0,
        "sink": found["use_sink"] if windowed else False,
        "memory_layers": [] if all(wrapped) else [i for i, has in enumerate(wrapped) if has],
    }


def written_by(content: Mapping[str, Any]) -> tuple[int, ...]:
    """The version of transformers that wrote config.json. Raises FieldError where it does not say."""
    version = content.get("transformers_version")
    numbers = re.match(r"(\d+)\.(\d+)", str(version))
    if not numbers:
        expected = "expected the version that wrote it: it tells the scale of Gemma's memory tokens"
        raise FieldError("transformers_version", version, expected, reprlib.repr(version))
    return int(numbers[1]), int(numbers[2])
