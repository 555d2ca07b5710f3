"""Folders of models: ours, written and read, and pretrained decoders that get a memory.

A folder holds config.json (``model_type`` "lit_memory", the name of the architecture, its ``Config``) and
model.safetensors, with the names that the Hugging Face shell in ``hub.py`` has, so that
``transformers.AutoModelForCausalLM`` reads and writes the same folders.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from json import dumps
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from lit_memory.hf.interop import (
    about,
    bert_sizes,
    bert_weights,
    check_names,
    load_huggingface,
    read_json,
    read_weights,
    some,
)
from lit_memory.models.decoder import BackboneConfig
from lit_memory.recurrence import LayerRecurrent, SegmentRecurrent
from lit_memory.registry import MODELS, build_config, load_class
from lit_memory.util import files
from lit_memory.util.checks import FieldError, nearest

MODEL_TYPE = "lit_memory"
SHELL = "LitMemoryForCausalLM"
PREFIX = "model."  # the shell's attribute for the model
BACKBONE = {f.name for f in fields(BackboneConfig)}
CHOSEN = ("dropout", "wrap_pos")
"""Settings of a decoder that its weights leave open."""
FETCHED = ["config.json", "model*.safetensors", "model.safetensors.index.json"]


def architecture(cls: type) -> str:
    """The name that a class is registered by. Raises ValueError for another class."""
    for name, place in MODELS.items():
        if place == f"{cls.__module__}:{cls.__qualname__}":
            return name
    raise ValueError(f"{cls.__name__} is not registered: expected one of {', '.join(MODELS)}; add it to MODELS")


def shared_weights(model: nn.Module) -> dict[str, str]:
    """Second names of parameters that have several -> their first, such as a head that is the token embedding."""
    first: dict[int, str] = {}
    names = [
        (name, first.setdefault(id(parameter), name))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    return {name: kept for name, kept in names if name != kept}


def save_pretrained(model: SegmentRecurrent, folder: str | os.PathLike[str], segment_len: int | None = None) -> None:
    """Write ``model`` to ``folder``, which is made where it is missing; an earlier model there is replaced.

    Each file is complete or not there, and config.json comes last. segment_len: what the Hugging Face shell cuts its
    inputs to where a call does not say; default: not at all. Raises ValueError for a class that is not in ``MODELS``.
    """
    arch, doubles, folder = architecture(type(model)), shared_weights(model), Path(folder)
    weights = {
        f"{PREFIX}{name}": tensor.contiguous() for name, tensor in model.state_dict().items() if name not in doubles
    }
    config = {
        "model_type": MODEL_TYPE,
        "architectures": [SHELL],
        "arch": arch,
        "settings": asdict(model.config),
        "segment_len": segment_len,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "tie_word_embeddings": bool(doubles),
    }
    with files.replacing(folder / "model.safetensors") as file:
        safetensors.torch.save_file(weights, file.name, metadata={"format": "pt"})
    files.write(folder / "config.json", (dumps(config, indent=2) + "\n").encode())


def from_pretrained(
    cls: type[SegmentRecurrent],
    source: str | os.PathLike[str],
    revision: str | None = None,
    encoder: str | os.PathLike[str] | None = None,
    **flags: Any,
) -> Any:
    """The model of class ``cls`` in a folder, in eval mode and in the precision of its weights.

    source: a folder that ``save_pretrained`` wrote, with ``flags`` as changes of its ``Config``; or a folder with a
        pretrained decoder, which gets a new memory (``load_huggingface``, which says what ``flags`` may hold). A name
        that is no folder is looked up on the Hugging Face hub, or in its cache alone with ``HF_HUB_OFFLINE=1``;
        ``revision`` pins a branch, a tag or a commit there.
    encoder: for a model that reads lines, around a pretrained decoder: a BERT, without a revision, that becomes its
        encoder (``bert_weights``). Both have their tokenizers beside their weights; lines are cut by the decoder's.
    Raises FileNotFoundError for a missing folder, file or name, TypeError for an unknown flag and ValueError for all
    else that does not fit.
    """
    folder = locate(source, revision)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json; expected a folder that save_pretrained wrote")
    with about(folder):
        config = read_json(folder / "config.json")
        if config.get("model_type") == MODEL_TYPE:
            if encoder is not None:
                raise FieldError(
                    "encoder", str(encoder), "expected none with a model of ours, which has one; leave it out"
                )
            return _load(cls, folder, config, flags)
    if encoder is None:
        return load_huggingface(folder, architecture(cls), **flags)
    if "encoder_width" not in {f.name for f in fields(cls.Config)}:  # type: ignore[attr-defined]
        raise FieldError("encoder", str(encoder), f"{architecture(cls)} has no encoder; leave it out")
    bert = locate(encoder)
    sizes = bert_sizes(bert)
    for name, size in sizes.items():
        if flags.get(name, size) != size:
            raise FieldError(name, flags[name], f"expected {size}, as in {encoder}")
    model: Any = load_huggingface(folder, architecture(cls), **{**flags, **sizes})
    own = model.encoder.state_dict()
    weights = bert_weights(own, bert, *pieces(folder, bert, model.config.vocab_size))
    with about(bert):
        check_weights(weights, own)
    model.encoder.load_state_dict(weights)
    return model


def pieces(folder: Path, bert: Path, vocab_size: int) -> tuple[list[list[int]], int]:
    """For every token of a decoder the ids of the pieces that BERT's tokenizer cuts its text into, its unknown one
    where that is nothing; and [CLS]."""
    from lit_memory.text.tokenizers import pretrained_tokenizer

    ours, theirs = (pretrained_tokenizer(str(path)) for path in (folder, bert))
    if None in (theirs.unk_token_id, theirs.cls_token_id):
        raise ValueError(f"{bert}: a tokenizer without [UNK] or [CLS]; expected that of a BERT")
    texts = ours.batch_decode([[i] for i in range(min(vocab_size, len(ours)))], clean_up_tokenization_spaces=False)
    found = theirs(texts, add_special_tokens=False).input_ids + [[]] * (
        vocab_size - len(texts)
    )  # a table may have more rows than there are tokens
    return [ids or [theirs.unk_token_id] for ids in found], theirs.cls_token_id


SAME = ("family", "layers", "width", "heads", "vocab_size", "norm_eps", "rotary_base")
"""What weights do not tell, or not in words."""


def start_from(
    model: SegmentRecurrent, source: str | os.PathLike[str], encoder: str | os.PathLike[str] | None = None
) -> None:
    """Give a fresh model the weights of a pretrained one; a memory that those do not have is drawn anew.

    source, encoder: what ``from_pretrained`` takes. Raises ValueError where the model that they describe is another
        than ``model``, and its errors.
    """
    cls, wanted = type(model), model.config
    flags = (
        {}
        if architecture(cls) == "mamba"
        else {f.name: getattr(wanted, f.name) for f in fields(wanted) if f.name not in BACKBONE or f.name in CHOSEN}
    )
    folder = locate(source)
    ours = (
        read_json(folder / "config.json").get("model_type") == MODEL_TYPE
        if (folder / "config.json").is_file()
        else False
    )
    found = from_pretrained(cls, folder, encoder=encoder, **({} if ours else flags))
    for name in SAME:
        theirs, own = getattr(found.config, name, None), getattr(wanted, name, None)
        if theirs != own:
            raise FieldError(
                "init",
                str(source),
                f"its {name} is {theirs!r}, that of the model {own!r}; expected the same, set model.{name}",
            )
    weights = found.state_dict()
    check_weights(weights, model.state_dict())
    model.load_state_dict(weights)


def locate(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a path or of a name on the hub. Raises FileNotFoundError if there is none."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    name = str(source)
    if isinstance(source, Path) or folder.exists() or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise FileNotFoundError(
            f"{name}: no such folder; expected one with config.json and weights, or a name on the Hugging Face hub"
        )
    from huggingface_hub import snapshot_download

    from lit_memory.text import tokenizers

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*FETCHED, *tokenizers.FETCHED]))
    except Exception as error:  # no network, no such name, no permission: the library has a class for each
        kind = type(error).__name__
        raise FileNotFoundError(
            f"{name}: no such folder, and nothing of that name in reach on the Hugging Face hub ({kind}); check the name"
        ) from error


def _load(
    cls: type[SegmentRecurrent], folder: Path, config: Mapping[str, Any], flags: Mapping[str, Any]
) -> SegmentRecurrent:
    arch, settings = config.get("arch"), config.get("settings")
    if arch not in MODELS or not isinstance(settings, dict):
        raise ValueError(
            f"arch={arch!r} in config.json: expected a registered architecture and its settings; {nearest(str(arch), MODELS)}"
        )
    found: Any = load_class("model", arch)
    if cls not in (found, SegmentRecurrent, LayerRecurrent):
        raise ValueError(
            f"arch={arch!r} in config.json: expected {architecture(cls)!r}; use {found.__name__}.from_pretrained"
        )
    if unknown := settings.keys() - {f.name for f in fields(found.Config)}:
        raise ValueError(
            f"settings {some(unknown)} in config.json: {arch} has none of that name; load it with the version that wrote it"
        )
    model = found(build_config(found.Config, {**settings, **flags}))
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in read_weights(folder).items()}
    fresh, doubles = model.state_dict(), shared_weights(model)
    weights |= {name: weights[kept] for name, kept in doubles.items() if kept in weights}
    check_weights(weights, fresh)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(weights[name].dtype)
    model.load_state_dict(weights)
    return model.eval()


def check_weights(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError for missing and surplus weights, and for one of another shape."""
    check_names(weights, expected.keys(), "that config.json asks for")
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(weights[name].shape)}: expected {tuple(tensor.shape)} after config.json and the flags"
            )
