"""What the folders of ``train.init`` decide about a model, known before any weight is read."""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lit_memory.hf.bert import SIZES
from lit_memory.hf.families import FAMILIES, described
from lit_memory.hf.huggingface import MODEL_TYPES
from lit_memory.hf.pretrained import BACKBONE, FREE, MODEL_TYPE, architecture, on_the_hub, read_settings
from lit_memory.hf.reading import check_model_type, errors_from, read_config, read_json
from lit_memory.util.checks import FieldError


def initial_settings(cls: Any, init: str | Mapping[str, str]) -> dict[str, Any]:
    """Fields of ``cls.Config`` that the initial weights decide; {} where they are not in a folder.

    init: a folder, or a name on the Hugging Face hub, which is not asked; or {"decoder": ..., "encoder": ...} of them.
    Raises FileNotFoundError for what is neither, and ValueError for a folder that does not fit.
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


def _folder(source: str | os.PathLike[str]) -> Path | None:
    """The folder of a path; None for a name that may be on the hub. Raises FileNotFoundError for anything else."""
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder}: no config.json; expected a folder that save_pretrained wrote")
        return folder
    if not on_the_hub(source):
        raise FileNotFoundError(f"{source}: no such folder; expected one with config.json and weights")
    return None
