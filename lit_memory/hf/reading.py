"""Files of weights and their configurations, and the checks that all formats share.

Every error is one line: what is wrong, what was expected, and, through ``errors_from``, the source.
"""

import json
import math
import pickle
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lit_memory.util.checks import LARGEST, MOST_LAYERS, FieldError, fits, nearest, preview

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
STEMS = ("model.safetensors", "pytorch_model.bin")
"""Files with the weights of a folder, in the order of preference; each may be split, with an index."""

LAYERS = {"num_hidden_layers", "n_layer"}
HEADS = {"num_attention_heads", "n_head"}
WIDTHS = {"hidden_size", "n_embd"}
EPSILONS = {"layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"}
DTYPES = {"dtype", "torch_dtype"}
"""What Hugging Face's families call these fields in config.json."""


@contextmanager
def errors_from(source: Any) -> Iterator[None]:
    """A ValueError inside this context names ``source``, such as a file or a folder."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def is_bare(folder: Path) -> bool:
    """Whether a folder has weights and no config.json, as the papers' authors share theirs."""
    return not (folder / "config.json").is_file() and any((folder / stem).is_file() for stem in STEMS)


def look_up(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """``table[name]``. Raises ValueError with the nearest name; ``kind`` is what the names stand for."""
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; {nearest(name, table)}")
    return table[name]


def check_names(weights: Iterable[str], needed: Set[str], which: str) -> None:
    """Raise ValueError for missing and surplus weights. ``which`` completes the message "expected those ..."."""
    names = set(weights)
    for problem, wrong in (("missing weights", needed - names), ("surplus weights", names - needed)):
        if wrong:
            raise ValueError(f"{problem}: {preview(wrong)}; expected those {which}")


def check_weights(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError for missing and surplus weights, and for a weight of another shape."""
    check_names(weights, expected.keys(), "that config.json asks for")
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(weights[name].shape)}: "
                f"expected {tuple(tensor.shape)} after config.json and the flags"
            )


def tie(weights: dict[str, Tensor], name: str, kept: str) -> None:
    """Give ``name`` the weight of ``kept``, with which it is tied, where a file leaves it out. Raises ValueError where
    it has another one."""
    if not torch.equal(weights.setdefault(name, weights[kept]), weights[kept]):
        raise ValueError(f"{name} differs from {kept}: expected equal ones as they are tied; untie them")


def check_dims(weights: Mapping[str, Tensor], name: str, dims: int) -> torch.Size:
    """The shape of a weight. Raises ValueError unless it has ``dims`` dimensions."""
    shape = weights[name].shape
    if len(shape) != dims:
        raise ValueError(f"{name} has shape {tuple(shape)}: expected {dims} dimensions; check the weights")
    return shape


def check_model_type(model_type: Any, types: Sequence[str]) -> None:
    """Raise FieldError for a Hugging Face model that is of none of these types."""
    if model_type not in types:
        raise FieldError("model_type", model_type, f"expected {'one of ' * (len(types) > 1)}{', '.join(types)}")


def check_fields(content: Mapping[str, Any]) -> None:
    """Raise FieldError for what no model of Hugging Face has, before transformers makes lists of that size."""
    for names, most in ((LAYERS, MOST_LAYERS), (HEADS, LARGEST), (WIDTHS, LARGEST)):
        for name in names & content.keys():
            value = content[name]
            if not fits(value, int) or not 1 <= value <= most:
                raise FieldError(name, value, f"expected a whole number from 1 to {most}", reprlib.repr(value))
    for name in EPSILONS & content.keys():
        if not fits(content[name], float) or content[name] < 0:
            raise FieldError(name, content[name], "expected a number, 0 or more", reprlib.repr(content[name]))
    for width, heads in product(WIDTHS & content.keys(), HEADS & content.keys()):
        if content[width] % content[heads]:
            raise FieldError(width, content[width], f"expected a multiple of {heads}={content[heads]} in config.json")
    for name in DTYPES & content.keys():
        value = content[name]
        known = isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
        if value is not None and not known:
            raise FieldError(name, value, "expected a type of numbers, such as 'float32'", reprlib.repr(value))


def shared_dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The floating-point type that all weights have. Raises ValueError where they differ or hold no such numbers."""
    dtypes = {tensor.dtype for tensor in weights.values()}
    if not dtypes:
        raise ValueError("no weights: expected those of a model; check where they come from")
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        types = preview(map(str, dtypes))
        raise ValueError(f"weights of type {types}: expected one floating-point type; convert them")
    return dtypes.pop()


def merge_flags(fixed: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the source decides, and the caller's. Raises FieldError for a flag that the source decides."""
    for name in flags.keys() & fixed.keys():
        raise FieldError(
            name, flags[name], f"expected no such flag, the source decides it ({fixed[name]!r}); leave it out"
        )
    return {**fixed, **flags}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a .json file, whose numbers are finite and whose keys are there once. Raises ValueError if it holds
    something else."""
    try:
        found = json.loads(path.read_text(), object_pairs_hook=_object)
    except FieldError as error:
        raise ValueError(f"{path.name}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path.name} cannot be read as .json ({type(error).__name__}); expected one that save_pretrained wrote"
        ) from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"{path.name} holds a {kind}: expected an object, as save_pretrained writes it")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a .json file. Raises FieldError for a key that is there twice, and for a number that is not finite:
    it would pass every comparison, and spoil what is computed with it."""
    found = dict(pairs)
    for name, value in pairs:
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise FieldError(name, value, "expected a finite number")
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise FieldError(
                name, found[name], f"expected it once, it is there {count} times", reprlib.repr(found[name])
            )
    return found


def read_config(folder: Path, types: Sequence[str]) -> Any:
    """The Hugging Face configuration of a folder, of one of these model types.

    Raises FileNotFoundError for a folder without config.json and ValueError for one that transformers cannot use.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder}: expected a folder with config.json and weights, as save_pretrained writes it"
        )
    return parse_config(read_json(folder / "config.json"), types)


def parse_config(content: Mapping[str, Any], types: Sequence[str]) -> Any:
    """The Hugging Face configuration that config.json holds, of one of these model types. Raises ValueError where
    transformers cannot use it."""
    check_model_type(content.get("model_type"), types)
    check_fields(content)
    rope = content.get("rope_parameters")
    for name, kind in rope.items() if isinstance(rope, dict) else ():
        if name.endswith("_attention") and not isinstance(kind, dict):
            raise FieldError(name, kind, "expected an object", reprlib.repr(kind))
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**content)
    except Exception as error:  # transformers reports a broken configuration in many ways
        why = " ".join(str(error).split())[:200]  # it names the field
        raise ValueError(
            f"config.json cannot be used ({type(error).__name__}: {why}); expected that of {preview(types)}"
        ) from error


def read_file(path: Path) -> Any:
    """The content of a file of weights. Pickles are read with ``weights_only``, so that they run no code."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a .safetensors, .bin, .pt or .pth file")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: unknown type of file; expected .safetensors, .bin, .pt or .pth")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return torch.load(path, "cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: corrupt, or more than tensors (none of it was run); expected a state_dict as torch.save writes it"
        ) from error
    except Exception as error:  # a broken file fails in many ways, depending on where it is cut
        kind = type(error).__name__
        raise ValueError(
            f"{path}: cannot be read ({kind}); expected a file of weights: fetch or save it again"
        ) from error


def read_weights(folder: Path) -> dict[str, Any]:
    """The weights in a folder, from one file or from several with an index. Raises FileNotFoundError where one is
    missing."""
    candidates = [name for stem in STEMS for name in (stem, f"{stem}.index.json")]
    name = next((name for name in candidates if (folder / name).is_file()), None)
    if name is None:
        raise FileNotFoundError(
            f"{folder}: expected a folder with weights, {' or '.join(STEMS)}, as save_pretrained writes it"
        )
    parts = {name}
    if name.endswith(".json"):
        part_of_weight = read_json(folder / name).get("weight_map")
        if not isinstance(part_of_weight, dict):
            raise ValueError(f"{name} has no weight_map: expected an index that save_pretrained wrote")
        parts = {str(part) for part in part_of_weight.values()}
    weights = {}
    for part in sorted(parts):
        found = read_file(folder / Path(part).name)
        if not isinstance(found, Mapping):
            raise ValueError(
                f"{part} holds a {type(found).__name__}: expected a state_dict, as save_pretrained writes it"
            )
        weights |= found
    return weights
