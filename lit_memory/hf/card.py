"""What lies in a folder beside the weights for its readers: a model card, the tokenizer, and how to generate."""

import inspect
import json
import os
import shutil
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lit_memory.hf.reading import read_json
from lit_memory.recurrence import SegmentRecurrent
from lit_memory.registry import source_of
from lit_memory.text.tokenizers import FETCHED
from lit_memory.util import files

CARD, GENERATION = "README.md", "generation_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TEXT = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- lit-memory
- {arch}
---
# {title}

{about}

| | |
|---|---|
{rows}

`config.json` has all settings. It reads contexts of any length, {segments}, in constant memory:

```python
import lit_memory.hf  # pip install lit-memory
{own}from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")
```
"""


def write_card(model: SegmentRecurrent, arch: str, folder: Path, segment_len: int | None) -> None:
    """Write README.md to ``folder``, where there is none: somebody may have written more into it."""
    if (folder / CARD).exists():
        return
    config, names = model.config, ("family", "layers", "width", "heads", "vocab_size", "memory_tokens")
    sizes = {name: getattr(config, name) for name in names if hasattr(config, name)}
    sizes |= {"parameters": f"{sum(p.numel() for p in model.parameters()):,}"}
    sizes |= {"floats of state per sample": f"{model.state_floats(model.init_state(1)):,}"}
    text = TEXT.format(
        arch=arch,
        title=type(model).__name__,
        about=(inspect.getdoc(type(model)) or "").partition("\n")[0],
        rows="\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in sizes.items()),
        segments=f"{segment_len} tokens at a time" if segment_len else "in one segment unless `segment_len` is given",
        folder=folder.name,
        own=f"import {type(model).__module__}  # registers {arch}\n" if source_of("model", arch) else "",
    )
    files.write(folder / CARD, text.encode())


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Have a tokenizer beside a model.

    tokenizer: one of transformers, or a folder with the files of one. Warns where a folder is gone: the model itself is
    saved.
    """
    if not isinstance(tokenizer, str | os.PathLike):
        tokenizer.save_pretrained(folder)
        return
    source = Path(tokenizer)
    if not source.is_dir():
        warnings.warn(f"{source}: the tokenizer's folder is gone; save it to {folder} yourself", stacklevel=2)
    elif source.resolve() != folder.resolve():
        for path in tokenizer_files(source):
            with files.replacing(folder / path.name) as file, path.open("rb") as content:
                shutil.copyfileobj(content, file)


def save_generation(tokenizer: Any, folder: Path) -> None:
    """Have ``GENERATION`` beside a model, where ``generate`` finds the id that ends a text. Without one it never stops.

    tokenizer: as in ``save_tokenizer``; of a folder its own file counts, or else the ids in its config.json.
    """
    if not isinstance(tokenizer, str | os.PathLike):
        ids = {name: getattr(tokenizer, name, None) for name in SPECIAL_IDS}
    elif not (source := Path(tokenizer)).is_dir() or source.resolve() == folder.resolve():
        return
    elif (source / GENERATION).is_file():
        files.write(folder / GENERATION, (source / GENERATION).read_bytes())
        return
    else:
        config = read_json(source / "config.json") if (source / "config.json").is_file() else {}
        ids = {name: config.get(name) for name in SPECIAL_IDS}
    if known := {name: found for name, found in ids.items() if found is not None}:
        files.write(folder / GENERATION, (json.dumps(known, indent=2) + "\n").encode())


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder that are a tokenizer's."""
    patterns = [pattern for pattern in FETCHED if pattern != "config.json"]
    found = (path for path in folder.iterdir() if path.is_file())
    return sorted(path for path in found if any(fnmatch(path.name, pattern) for pattern in patterns))
