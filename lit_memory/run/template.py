"""``--new NAME``: an experiment to start from."""

from pathlib import Path

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.reading import file_name
from lit_memory.util import files
from lit_memory.util.files import os_reason

TEXT = Path(__file__).with_name("template.yaml")


def write_template(name: str) -> str:
    """Write NAME.yaml to the working folder, a comparison that trains in a minute; returns a line on it. Raises
    ConfigError for a name that is no name of an experiment, and where the file exists."""
    name = name.removesuffix(".yaml")
    file_name(name, "command line", "--new")
    path = Path(f"{name}.yaml")
    if path.exists():
        raise ConfigError("command line", "--new", f"{path} exists already; expected another name")
    try:
        files.write(path, TEXT.read_text(encoding="utf-8").replace("NAME", name).encode())
    except OSError as error:
        raise ConfigError("command line", "--new", f"{path} cannot be written: {os_reason(error)}") from None
    return f"{path}; start it: lit-memory run {name}"
