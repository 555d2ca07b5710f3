"""``imports:`` of an experiment: Python files of the user that register models and tasks.

They are imported when a plan is made, never by reading an experiment.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.registry import RegistrationError, import_file, source_of
from lit_memory.util.checks import nearest
from lit_memory.util.inputs import missing


def import_files(file: str, imports: Sequence[str]) -> None:
    """Import the files that an experiment names, relative to its own place. Raises ConfigError."""
    folder = Path(file).absolute().parent
    for text in imports:
        path = Path(os.path.normpath(folder / text))
        if reason := missing(path, stat.S_IFREG):
            others = [str(other.relative_to(folder)) for other in sorted(folder.glob("*.py"))]
            hint = f"; {nearest(text, others)}" if others else ""
            raise ConfigError(file, "imports", f"{path}: {reason}{hint}")
        try:
            import_file(path)
        except RegistrationError as error:
            raise ConfigError(file, "imports", str(error)) from None


def user_code(where: str, run: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Section -> file and digest of the code that a user has brought for it (``RunSpec.code``). Raises ConfigError.

    run: the resolved sections.
    """
    found = {}
    for kind in ("model", "task"):
        try:
            source = source_of(kind, run[kind]["name"])
        except RegistrationError as error:
            raise ConfigError(where, f"{kind}.name", str(error)) from None
        if source is not None:
            found[kind] = {"file": str(source.file), "digest": source.digest}
    return found
