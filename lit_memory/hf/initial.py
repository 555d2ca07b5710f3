"""What the folders of ``train.init`` decide about a model, known before any weight is read."""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lit_memory.hf.bert import SIZES
from lit_memory.hf.families import FAMILIES, described
from lit_memory.hf.huggingface import MODEL_TYPES
from lit_memory.hf.pretrained import BACKBONE, FREE, MODEL_TYPE, architecture, locate, read_settings
from lit_memory.hf.reading import check_model_type, errors_from, is_bare, read_config, read_json
from lit_memory.util import hub
from lit_memory.util.checks import FieldError


def initial_settings(cls: Any, init: str | Mapping[str, str]) -> dict[str, Any]:
    """Fields of ``cls.Config`` that the initial weights decide; {} where they are not in a folder.

    init: a folder; a name on the Hugging Face hub with its commit, whose config.json comes from the cache or is
        fetched; or a name without one, which is not asked, as its answers change. Or {"decoder": ..., "encoder": ...}
        of them.
    Raises FileNotFoundError for what is none of them or not in reach, and ValueError for weights that do not fit.
    """
    named = {"decoder": init} if isinstance(init, str) else init
    settings = _of_decoder(cls, named["decoder"])
    if "encoder" in named and (folder := _folder(named["encoder"])):
        with errors_from(folder):
            config = read_config(folder, ("bert",))
        settings |= {ours: getattr(config, theirs) for ours, theirs in SIZES.items()}
    return settings


def check_initial(settings: Mapping[str, Any], given: Mapping[str, Any], init: Any) -> None:
    """Raise FieldError for a given field that differs from that of the initial weights and cannot."""
    for name in (settings.keys() & given.keys() & {*BACKBONE, *SIZES}) - {*FREE, "init_std", "embedding_std"}:
        if settings[name] != given[name]:
            expected = f"expected {settings[name]!r}, as in {init}; leave it out"
            raise FieldError(name, given[name], expected)


def _of_decoder(cls: Any, source: str) -> dict[str, Any]:
    folder = _folder(source)
    if folder is None:
        return {}
    with errors_from(folder):
        config = read_json(folder / "config.json")
        if config.get("model_type") == MODEL_TYPE:
            found, settings = read_settings(config.get("arch"), config.get("settings"))
            if found is not cls:
                raise FieldError("arch", config["arch"], f"expected {architecture(cls)!r}, as model.name")
            return settings
        check_model_type(config.get("model_type"), (*MODEL_TYPES, MODEL_TYPE))
        has_decoder = "family" in {f.name for f in fields(cls.Config)}
        if (config["model_type"] == "mamba") == has_decoder:
            expected = "expected a folder with a model that this architecture can be built around"
            raise FieldError("model_type", config["model_type"], f"{architecture(cls)}: {expected}")
        if not has_decoder:
            return {}
        family = next(family for family in FAMILIES.values() if family.model_type == config["model_type"])
        return described(read_config(folder, MODEL_TYPES), family)


def _folder(source: str) -> Path | None:
    """The folder with config.json; None for a name on the hub without a commit, and for bare weights of the papers'
    authors, which decide nothing. Raises FileNotFoundError for anything else, and ValueError for what is no commit."""
    folder = Path(source)
    if hub.is_name(source):
        file = hub.pinned_file(source, "config.json") if hub.is_pinned(source) else None
        return file and file.parent
    if not os.path.isdir(folder):  # False for what is too long for a path
        raise FileNotFoundError(f"{source}: no such folder; expected one with config.json and weights")
    if is_bare(folder):
        return None
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json; expected a folder that save_pretrained wrote")
    return folder


def fetch_initial(init: str | Mapping[str, str]) -> None:
    """Have the weights that ``train.init`` names on the hub in its cache, once for all runs. Raises FileNotFoundError
    where they are not in reach."""
    for source in {"decoder": init}.values() if isinstance(init, str) else init.values():
        if hub.is_name(source):
            locate(source)
