"""Child processes: their environment, and how they hear of the end of their parent. Standard library only."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2]
"""Where this package lies."""


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment of this process, and of those that it starts, for this block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Python imports lit_memory from where this process did: a copy in the working directory,
    or an installed one, would run in place of this one."""
    paths = filter(None, [str(PACKAGES), environment.get("PYTHONPATH")])
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def wait_for_the_end_of(parent: int, poll: float) -> None:
    """Return when the process that started this one is gone; it is looked for every ``poll`` seconds."""
    while os.getppid() == parent:
        time.sleep(poll)
