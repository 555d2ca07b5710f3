"""Checkpoints of the papers' authors into our models.

Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de (names of the weights), and at
           3da7f48 (folders of ``src/armt.py``; ``present.py`` reads them).

The checkpoints of aa145de do not contain wrap_pos, nu, gamma, norm_eps, rotary_fraction and rotary_base: pass them
where they differ from our defaults.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_memory.hf.decoders import build_model
from lit_memory.hf.families import FAMILIES
from lit_memory.hf.mamba import build_mamba
from lit_memory.hf.names import ARMT_LAYOUT, OUTER, Layout, canonical_weights
from lit_memory.hf.present import load_present
from lit_memory.hf.reading import errors_from, look_up, read_file, read_weights
from lit_memory.recurrence import SegmentRecurrent
from lit_memory.registry import MODELS
from lit_memory.util.checks import FieldError

_RMT = Layout(model={"memory": "memory"}, sizes={"memory_tokens": "memory"})
LAYOUTS = {
    "transformer": Layout(),
    "rmt": _RMT,
    "tarm": _RMT,
    "prmt": Layout(  # see Deviations in prmt.py
        wrapper="layer.", layer={"memory": "memory"}, sizes={"memory_tokens": "{}.memory"}, ignored=("memory",)
    ),
    "armt": ARMT_LAYOUT,
}
"""Registered name of an architecture -> where the reference keeps its weights."""
UNSHOWN = ("norm_eps", "rotary_fraction", "rotary_base")
"""Fields of ``BackboneConfig`` that weights alone do not show."""


def load_reference(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    arch: str | None = None,
    backbone: str | None = None,
    n_head: int | None = None,
    **flags: Any,
) -> SegmentRecurrent:
    """The model of a checkpoint that the reference code wrote, in eval mode and in the checkpoint's own precision.

    source: a .safetensors file; a .bin, .pt or .pth file with a state_dict (tensors only, no code is run); the
        state_dict; or a folder with config.json, as ``src/armt.py`` at 3da7f48 writes it, which decides all but
        ``dropout``.
    arch: "transformer", "rmt", "prmt", "armt", "tarm" (RMT's weights) or "mamba". The reference's names of other
        architectures are not known here.
    backbone: "gpt2", "neox", "llama" or "qwen2"; Mamba has none.
    n_head: number of attention heads, which cannot be read off the weights. All other sizes can, and so can the number
        of layers.
    flags: further fields of the model's ``Config``, such as ``gamma="off"``. ``tie_embeddings`` defaults to what the
        weights show.
    Raises FileNotFoundError for a missing file, TypeError for an unknown flag and ValueError for anything else that
    does not fit.
    """
    if isinstance(source, (str, os.PathLike)) and Path(source).is_dir():
        given = {"arch": arch, "backbone": backbone, "n_head": n_head}
        with errors_from(source):
            for name, value in given.items():
                if value is not None and (Path(source) / "config.json").is_file():
                    raise FieldError(name, value, "expected no such argument, config.json decides it; leave it out")
            return load_present(Path(source), flags)
    if arch is None:
        raise FieldError("arch", arch, f"expected one of {', '.join(LAYOUTS)}, mamba; a folder with config.json has it")
    if arch != "mamba":
        return _load_decoder(source, arch, backbone, n_head, flags)
    if backbone is not None or n_head is not None:
        raise ValueError(
            f"backbone={backbone!r}, n_head={n_head}: expected None for both, as Mamba has neither; leave them out"
        )
    with errors_from(_name(source)):
        return build_mamba(_weights(source), {}, flags)


def load_bare(folder: Path, arch: str, config: Any, flags: Mapping[str, Any]) -> SegmentRecurrent:
    """The model of a folder with weights alone (``load_reference``), with the settings that they do not show.

    config: of our model. flags: its fields that a pretrained decoder leaves open.
    """
    shown = LAYOUTS[arch].sizes if arch in LAYOUTS else ()
    own = {name: value for name, value in flags.items() if name not in shown}
    family = getattr(config, "family", None)
    if family is not None:
        own |= {name: getattr(config, name) for name in UNSHOWN}
        named = next(name for name, of in FAMILIES.items() if of.name == family)
        own |= {"backbone": named, "n_head": config.heads}
    with errors_from(folder):
        return load_reference(read_weights(folder), arch=arch, **own)


def _load_decoder(source: Any, arch: str, backbone: str | None, n_head: int | None, flags: Any) -> SegmentRecurrent:
    """``load_reference`` of an architecture around a decoder."""
    if arch in MODELS and arch not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise FieldError(
            "arch",
            arch,
            f"the names of its weights in the reference code are not known here; expected one of {known}, mamba",
        )
    layout = look_up("arch", arch, {**LAYOUTS, "mamba": None})
    family = look_up("backbone", str(backbone), FAMILIES)
    if n_head is None:
        raise FieldError("n_head", n_head, "expected the number of attention heads, which the weights do not show")
    weights = _weights(source)
    with errors_from(_name(source)):
        canonical = canonical_weights(weights, family.stem)
        weights = {name: tensor for name, tensor in canonical.items() if name not in layout.ignored}
        layer = re.compile(rf"{re.escape(OUTER[family.name]['layers'])}\.(\d+)\.")
        layers = {m[1] for name in weights if (m := layer.match(name))}  # a gap between layers: missing weights
        fixed = {"heads": n_head, "layers": max(1, len(layers)), "tie_embeddings": flags.pop("tie_embeddings", None)}
        return build_model(arch, family, weights, fixed, flags, layout).eval()


def _name(source: Any) -> Any:
    """The source as messages name it."""
    return source if isinstance(source, (str, os.PathLike)) else "state_dict"


def _weights(source: Any) -> Any:
    """The content of a file; anything else as it is."""
    return read_file(Path(source)) if isinstance(source, (str, os.PathLike)) else source
