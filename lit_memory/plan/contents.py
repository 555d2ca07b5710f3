"""Files and folders of the user that a run reads: what they hold is part of its key."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.registry import load_class
from lit_memory.util.inputs import digest


def user_files(where: str, run: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Setting -> file and digest of what the settings of a run name on this machine (``RunSpec.files``).

    What the hub has is not here: a name with its commit stands for its bytes. run: the resolved sections. Raises
    ConfigError.
    """
    found = {}
    for setting, value in named(run):
        try:
            found[setting] = {"file": str(Path(value).absolute()), "digest": digest(Path(value))}
        except ValueError as error:
            raise ConfigError(where, setting, str(error)) from None
    return found


def named(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(setting, value) of every setting that names a file or a folder."""
    settings = {f"task.{name}": value for name, value in run["task"].items()}
    for i, stage in enumerate(run["train"]["stages"]):
        settings |= {f"train.stages[{i}].{name}": value for name, value in stage.items()}
    for name, others in load_class("task", run["task"]["name"]).sources.items():
        for setting, value in settings.items():
            if setting.endswith(f"task.{name}") and value not in others and exists(value):
                yield setting, value
    init = run["train"]["init"]
    for part, value in init.items() if isinstance(init, dict) else [("", init)]:
        if part != "run" and exists(value):
            yield f"train.init.{part}".removesuffix("."), value


def exists(value: Any) -> bool:
    """Whether a setting is the path of something; "" is none, nor is what is too long for one."""
    return isinstance(value, str) and value != "" and os.path.exists(value)
