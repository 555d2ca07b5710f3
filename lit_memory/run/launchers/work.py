"""A run on another machine: the end that trains.

A cluster starts a ``Work``, which has the run trained in a process of its own: signals, environment and threads are
then Python's, whatever the cluster's own process does with them. Messages go back through a file in the run's folder,
so that they outlive the command that started the run; ``remote.py`` reads them.
"""

import json
import os
import pickle
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_memory.plan.runspec import RunSpec
from lit_memory.run.launchers.local import GRACE, run_child
from lit_memory.run.uri import StoreURI
from lit_memory.util import files
from lit_memory.util.child import child_environment, wait_for_the_end_of
from lit_memory.util.provenance import hardware

MESSAGES = "messages.jsonl"
"""What a run has sent, one message a line."""
TOKEN = "launched"
"""A file in the run's folder by which another machine knows that it sees the same folder, and is the one that was asked
last."""
NOT_SHARED = 3
"""The exit code of a run on a machine that does not see the root."""
INHERITED = ("MLFLOW_", "LIT_MEMORY_", "HF_", "NUMBA_", "MPLCONFIGDIR", "TORCHINDUCTOR_")
"""Beginnings of the environment variables that a run gets from the command."""
POLL = 0.5
"""Seconds between two looks at the parent."""


@dataclass
class Work:
    """A run that a cluster starts, once or, where it was preempted, again."""

    spec: RunSpec
    root: Path
    uri: StoreURI
    parent: str
    tags: Mapping[str, str]
    token: str
    environment: dict[str, str] = field(default_factory=lambda: inherited(os.environ))
    cwd: str = field(default_factory=os.getcwd)
    """Of the command: paths of settings, and of the store, may be relative to it."""
    process: Any = None

    def __call__(self) -> int:
        """Train on this machine; returns the exit code."""
        command = [sys.executable, "-m", "lit_memory.run.launchers.work"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env=child_environment(os.environ | self.environment),
            cwd=self.cwd if os.path.isdir(self.cwd) else None,
        )
        try:
            self.process.communicate(pickle.dumps(self.arguments))  # by stdin: an argument is seen by every user
        except BaseException:
            self.end()
            raise
        return self.process.returncode

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.spec, self.root, self.uri, self.parent, self.tags, self.token

    def end(self) -> None:
        """End the training; its last checkpoint is on disk.

        A handler of signals may call it while ``__call__`` waits for the process, and holds the lock of ``Popen.wait``.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + GRACE
            if not ended(self.process.pid):
                os.kill(self.process.pid, number)
            while not ended(self.process.pid) and time.monotonic() < deadline:
                time.sleep(0.02)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"process": None}


def ended(pid: int) -> bool:
    """Whether a child process has ended; leaves its exit code to ``Popen``."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # and somebody has heard of it
        return True


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a run needs of the environment of the command; a cluster need not pass it on."""
    return {name: value for name, value in environment.items() if name.startswith(INHERITED)}


class MessageFile:
    """The sending end: has ``send``, as a pipe has."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def send(self, message: dict[str, Any]) -> None:
        with self.path.open("ab", buffering=0) as file:  # opened anew, so that a network file system shows it to all
            files.append(file, json.dumps(message).encode() + b"\n")


def end_with(parent: int) -> None:
    """End this process by SIGTERM when ``parent`` is gone: another machine may have its run by then."""
    wait_for_the_end_of(parent, POLL)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """The process of a run."""
    spec, root, uri, parent, tags, token = pickle.load(sys.stdin.buffer)
    spec.provide_code()  # the key, and so the folder, needs the classes
    folder = spec.folder(root)
    try:
        shared = (folder / TOKEN).read_text() == token
    except OSError:
        shared = False
    if not shared:
        raise SystemExit(NOT_SHARED)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    messages = MessageFile(folder / MESSAGES)
    messages.send({"event": "machine", "name": platform.node()})
    run_child(spec, root, uri, parent, {**tags, "hardware": hardware()}, messages)


if __name__ == "__main__":
    main()
