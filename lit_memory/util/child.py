"""The environment of child processes. Standard library only."""

import os
from collections.abc import Mapping
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2]
"""Where this package lies."""


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Python imports lit_memory from where this process did: a copy in the working directory,
    or an installed one, would run in place of this one."""
    paths = filter(None, [str(PACKAGES), environment.get("PYTHONPATH")])
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
