"""Models of Hugging Face's GPT-2, GPT-J, GPT-NeoX, Llama, Qwen2 and 3, Gemma 1 to 3 and Mamba into ours.

Reference: Hugging Face transformers 5.
"""

import os
from pathlib import Path
from typing import Any

from lit_memory.hf.decoders import build_model
from lit_memory.hf.families import FAMILIES, check_width, decoder_settings
from lit_memory.hf.mamba import build_mamba, mamba_settings
from lit_memory.hf.names import canonical_weights
from lit_memory.hf.reading import check_model_type, errors_from, look_up, read_config, read_weights
from lit_memory.recurrence import SegmentRecurrent
from lit_memory.registry import MODELS

MODEL_TYPES = (*(family.model_type for family in FAMILIES.values()), "mamba")


def load_huggingface(source: Any, arch: str = "transformer", **flags: Any) -> SegmentRecurrent:
    """One of our architectures around a Hugging Face decoder (``families.FAMILIES``), its memory freshly initialised,
    or a Mamba; in eval mode.

    source: a ``...ForCausalLM`` or ``GPT2LMHeadModel`` (its weights are copied), or a folder with config.json and
        weights.
    flags: fields of the model's ``Config``, such as ``memory_tokens=10``. Sizes, norm_eps, rotation and tying are those
        of ``source``, and so is ``dropout`` unless given. With ``wrap_pos`` the position table grows by fresh rows for
        the memory.
    Raises FileNotFoundError for a missing folder or file, TypeError for an unknown flag and ValueError for anything
    else that does not fit, such as a setting that our decoder does not compute.
    """
    is_folder = isinstance(source, (str, os.PathLike))
    if not is_folder and not hasattr(source, "config"):
        kind = type(source).__name__
        raise TypeError(
            f"source is a {kind}: expected a Hugging Face model or a folder; for a state_dict use load_reference"
        )
    look_up("arch", arch, MODELS)
    with errors_from(source if is_folder else type(source).__name__):
        if is_folder:
            config, weights = read_config(Path(source), MODEL_TYPES), read_weights(Path(source))
        else:
            config, weights = source.config, source.state_dict()
        return _convert(config, weights, arch, flags)


def _convert(config: Any, weights: Any, arch: str, flags: dict[str, Any]) -> SegmentRecurrent:
    """``load_huggingface`` of a configuration and a state_dict."""
    model_type = config.model_type
    if "mamba" in (arch, model_type):
        if arch != model_type:
            raise ValueError(
                f"model_type={model_type!r}, arch={arch!r}: "
                "expected 'mamba' for both or for neither; check arch and source"
            )
        return build_mamba(weights, mamba_settings(config), flags)
    check_model_type(model_type, MODEL_TYPES)
    family = next(family for family in FAMILIES.values() if family.model_type == model_type)
    canonical = canonical_weights(weights, family.stem)
    check_width(config, family, canonical)
    settings = decoder_settings(config, family, flags.pop("dropout", None))
    model: Any = build_model(arch, family, canonical, settings, flags)
    for name, rows in [*model.named_parameters(recurse=False)]:
        if name in ("memory", "sink"):
            # its scale is that of the embeddings, which were random when it was drawn
            setattr(model, name, model.decoder.memory_tokens(len(rows)))
    return model.eval()
