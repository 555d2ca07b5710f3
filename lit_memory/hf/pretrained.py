"""Folders of models: ours, saved and loaded, and pretrained decoders that get a memory.

A folder holds config.json (``model_type`` "lit_memory", the name of the architecture, its ``Config``) and
model.safetensors, with the weights' names in ``auto.py``'s LitMemoryForCausalLM, so that
``transformers.AutoModelForCausalLM`` reads and writes the same folders. A file of one import lets it do so, with
``trust_remote_code=True``, where nobody has imported ``lit_memory.hf``; we never run it.
"""

import os
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from json import dumps
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from lit_memory.hf.bert import bert_weights, read_bert, token_pieces
from lit_memory.hf.card import GENERATION, save_generation, save_tokenizer, write_card
from lit_memory.hf.huggingface import MODEL_TYPES, load_huggingface
from lit_memory.hf.present import PRESENT_TYPES, load_present
from lit_memory.hf.reading import (
    STEMS,
    check_model_type,
    check_weights,
    errors_from,
    is_bare,
    read_json,
    read_weights,
    tie,
)
from lit_memory.hf.reference import load_bare
from lit_memory.models.decoder import BackboneConfig
from lit_memory.models.inherited import check_same
from lit_memory.recurrence import SegmentRecurrent
from lit_memory.registry import MODELS, build_config, load_class
from lit_memory.text import tokenizers
from lit_memory.util import files, hub
from lit_memory.util.checks import FieldError, check_types, fits, nearest, preview

MODEL_TYPE = "lit_memory"
HF_CLASS = "LitMemoryForCausalLM"
AUTO_FILE = "lit_memory_auto.py"
AUTO_CODE = """# The classes of this model are those of the package lit-memory.
from lit_memory.hf import LitMemoryConfig, LitMemoryForCausalLM
"""
AUTO_MAP = {"AutoConfig": "lit_memory_auto.LitMemoryConfig", "AutoModelForCausalLM": f"lit_memory_auto.{HF_CLASS}"}
PREFIX = "model."
"""The attribute of ``HF_CLASS`` that holds the model."""
BACKBONE = {f.name for f in fields(BackboneConfig)}
FREE = ("dropout", "wrap_pos")
"""Fields of ``BackboneConfig`` that a pretrained decoder leaves open."""
FETCHED = ["config.json", GENERATION, "model*.safetensors", "model.safetensors.index.json"]
"""Files of a model on the Hugging Face hub that are downloaded."""


def registered_name(cls: type) -> str | None:
    """The name by which a class is registered, if it is."""
    path = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, registered in MODELS.items() if registered == path), None)


def architecture(cls: type) -> str:
    """The name by which a class is registered. Raises ValueError for another class."""
    if name := registered_name(cls):
        return name
    raise ValueError(f"{cls.__name__} is not registered: expected one of {', '.join(MODELS)}; add it to MODELS")


def shared_weights(model: nn.Module) -> dict[str, str]:
    """Tied parameters: every further name of a parameter -> its first, such as a head that is the token embedding."""
    first: dict[int, str] = {}
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            shared[name] = kept
    return shared


def save_pretrained(
    model: SegmentRecurrent,
    folder: str | os.PathLike[str],
    segment_len: int | None = None,
    tokenizer: Any = None,
) -> None:
    """Write ``model`` to ``folder``, which is created where needed; an earlier model there is replaced.

    Each file is complete or absent, and config.json comes last. README.md is written where there is none.
    segment_len: tokens per segment for Hugging Face's interface where a call gives none; default: one segment for all.
    tokenizer: a tokenizer of transformers, or a folder with one; default: that beside the weights that ``model`` was
        loaded from, if there is one.
    Raises ValueError for a class that is not registered.
    """
    arch, shared, folder = architecture(type(model)), shared_weights(model), Path(folder)
    state = model.state_dict()
    weights = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in state.items() if name not in shared}
    config = {
        "model_type": MODEL_TYPE,
        "architectures": [HF_CLASS],
        "arch": arch,
        "settings": asdict(model.config),
        "segment_len": segment_len,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "tie_word_embeddings": bool(shared),
        "auto_map": AUTO_MAP,
    }
    with files.replacing(folder / "model.safetensors") as file:
        safetensors.torch.save_file(weights, file.name, metadata={"format": "pt"})
    files.write(folder / AUTO_FILE, AUTO_CODE.encode())
    source: Any = getattr(model, "source", None)
    tokenizer = source if tokenizer is None else tokenizer
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
        save_generation(source if source and (Path(source) / GENERATION).is_file() else tokenizer, folder)
    write_card(model, arch, folder, segment_len)
    files.write(folder / "config.json", (dumps(config, indent=2) + "\n").encode())


def from_pretrained(
    cls: type[SegmentRecurrent],
    source: str | os.PathLike[str],
    revision: str | None = None,
    encoder: str | os.PathLike[str] | None = None,
    **flags: Any,
) -> Any:
    """The model of class ``cls`` in a folder, in eval mode and in the precision of its weights.

    source: a folder that ``save_pretrained`` wrote, with ``flags`` as changes of its ``Config``; for ARMT one that its
        authors' present code wrote (``present.py``); or a folder with a pretrained decoder, which gets a new memory
        (``load_huggingface``, which explains ``flags``). A name that is no folder is looked up on the Hugging Face hub,
        or in its cache alone with ``HF_HUB_OFFLINE=1``.
    revision: a branch, a tag or a commit on the hub; ``name@commit`` says it in one word.
    encoder: for a line-reading model around a pretrained decoder: a BERT, without a revision, that becomes its encoder
        (``bert_weights``). Both have their tokenizers beside their weights; lines are cut by the decoder's.
    Raises FileNotFoundError for a missing folder, file or name, TypeError for an unknown flag and ValueError for
    anything else that does not fit.
    """
    folder = locate(source, revision)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json; expected a folder that save_pretrained wrote")
    model = _from_folder(cls, folder, encoder, flags)
    model.source = folder  # of the tokenizer, for save_pretrained
    return model


def _from_folder(cls: Any, folder: Path, encoder: str | os.PathLike[str] | None, flags: dict[str, Any]) -> Any:
    """``from_pretrained`` of a folder."""
    with errors_from(folder):
        config = read_json(folder / "config.json")
        whole = config.get("model_type") in (MODEL_TYPE, *PRESENT_TYPES)
        if whole and encoder is not None:
            raise FieldError("encoder", str(encoder), "expected none with a whole model; leave it out")
        if config.get("model_type") == MODEL_TYPE:
            return _load(cls, folder, config, flags)
        if whole and registered_name(cls) == "armt":
            return load_present(folder, flags)
        check_model_type(config.get("model_type"), (*MODEL_TYPES, MODEL_TYPE))
    if encoder is None:
        return load_huggingface(folder, architecture(cls), **flags)
    return _load_with_encoder(cls, folder, encoder, flags)


def _load_with_encoder(cls: Any, folder: Path, encoder: str | os.PathLike[str], flags: Mapping[str, Any]) -> Any:
    """A line-reading model around the decoder in ``folder``, with a BERT as its encoder."""
    if "encoder_width" not in {f.name for f in fields(cls.Config)}:
        raise FieldError("encoder", str(encoder), f"{architecture(cls)} has no encoder; leave it out")
    bert = locate(encoder)
    sizes, theirs = read_bert(bert)
    for name, size in sizes.items():
        if flags.get(name, size) != size:
            raise FieldError(name, flags[name], f"expected {size}, as in {encoder}")
    model: Any = load_huggingface(folder, architecture(cls), **{**flags, **sizes})
    own = model.encoder.state_dict()
    pieces = token_pieces(folder, bert, model.config.vocab_size)
    with errors_from(bert):
        weights = bert_weights(own, theirs, *pieces)
        check_weights(weights, own)
    model.encoder.load_state_dict(weights)
    return model


def start_from(
    model: SegmentRecurrent, source: str | os.PathLike[str], encoder: str | os.PathLike[str] | None = None
) -> None:
    """Give a fresh model the weights of a pretrained one; a memory that those do not have is drawn anew.

    source, encoder: as in ``from_pretrained``, or a folder with weights alone, as the papers' authors name them
        (``reference.py``). Raises its errors, and ValueError where the pretrained model differs
        from ``model``.
    """
    cls, config = type(model), model.config
    folder = locate(source)
    flags = {} if architecture(cls) == "mamba" or _is_ours(folder) else _new_fields(config)
    if is_bare(folder) and encoder is None:
        found: Any = load_bare(folder, architecture(cls), config, flags)
    else:
        found = from_pretrained(cls, folder, encoder=encoder, **flags)
    try:
        check_same(config, found.config)
    except ValueError as error:
        raise FieldError("init", str(source), str(error)) from None
    weights = found.state_dict()
    check_weights(weights, model.state_dict())
    model.load_state_dict(weights)


def _is_ours(folder: Path) -> bool:
    """Whether ``save_pretrained`` wrote the folder."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("model_type") == MODEL_TYPE


def _new_fields(config: Any) -> dict[str, Any]:
    """The fields of a configuration that a pretrained decoder leaves open."""
    names = [f.name for f in fields(config) if f.name not in BACKBONE or f.name in FREE]
    return {name: getattr(config, name) for name in names}


def locate(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a path, or of a name on the Hugging Face hub, at ``revision`` or as ``name@commit``. Raises
    FileNotFoundError if there is none, and ValueError for what is no commit."""
    folder, name = Path(source), str(source)
    if folder.is_dir():
        return folder
    if not hub.is_name(source):
        raise FileNotFoundError(
            f"{name}: no such folder; expected one with config.json and weights, or a name on the Hugging Face hub"
        )
    hub.split(name)
    try:
        found = hub.snapshot(name, [*FETCHED, *tokenizers.FETCHED], revision)
        return found if (found / "config.json").is_file() else hub.snapshot(name, [*STEMS], revision)
    except Exception as error:  # no network, no such name, no permission: the library has a class for each
        kind = type(error).__name__
        raise FileNotFoundError(
            f"{name}: no such folder, and {hub.OUT_OF_REACH} ({kind}); {hub.advice(name)}"
        ) from error


def read_settings(arch: Any, settings: Any) -> tuple[Any, dict[str, Any]]:
    """The class of an architecture and its settings, as config.json has them. Raises ValueError for what is none."""
    if not isinstance(arch, str) or arch not in MODELS:
        hint = nearest(str(arch), MODELS)
        expected = f"expected a registered architecture in config.json; {hint}; import the file of one of yours first"
        raise FieldError("arch", arch, expected, shown=reprlib.repr(arch))
    if not isinstance(settings, dict):
        expected = "expected the settings of the architecture in config.json"
        raise FieldError("settings", settings, expected, shown=reprlib.repr(settings))
    found: Any = load_class("model", arch)
    if unknown := settings.keys() - {f.name for f in fields(found.Config)}:
        raise ValueError(
            f"settings {preview(unknown)} in config.json: {arch} has none of that name; "
            "load it with the version that wrote it"
        )
    check_types(found.Config, settings)
    return found, settings


def _load(cls: Any, folder: Path, config: Mapping[str, Any], flags: Mapping[str, Any]) -> SegmentRecurrent:
    """The model in a folder that ``save_pretrained`` wrote. It is built when its weights fit: nothing is allocated for
    sizes that only config.json has."""
    found, settings = read_settings(config.get("arch"), config.get("settings"))
    if registered_name(cls) not in (None, config["arch"]) or not issubclass(found, cls):
        expected = f"expected {architecture(cls)!r} in config.json; use {found.__name__}.from_pretrained"
        raise FieldError("arch", config["arch"], expected)
    built = build_config(found.Config, {**settings, **flags})
    try:
        with torch.device("meta"):
            sketch = found(built)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # tensors of sizes that no number can count
        largest = max((n for n in vars(built) if fits(vars(built)[n], float)), key=lambda n: vars(built)[n])
        kind = type(error).__name__
        raise FieldError(
            largest, vars(built)[largest], f"the settings make no model ({kind}); expected less"
        ) from error
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in read_weights(folder).items()}
    for name, kept in shared_weights(sketch).items():
        if kept in weights:
            tie(weights, name, kept)
    check_weights(weights, sketch.state_dict())
    model = found(built)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(weights[name].dtype)
    model.load_state_dict(weights)
    return model.eval()
