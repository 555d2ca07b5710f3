"""Runs on other machines that share the root: what every cluster needs.

A cluster starts a ``Work``, which has the run trained in a process of its own: signals, environment and threads are
then Python's, whatever the cluster's own process does with them. Messages come back through a file in the run's folder,
so that they outlive the command that started the run.
"""

import contextlib
import json
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run.launchers.base import Child, Launcher, import_path
from lit_memory.run.launchers.local import GRACE, run_child
from lit_memory.run.uri import StoreURI
from lit_memory.util import files

MESSAGES = "messages.jsonl"
"""What a run has sent, one message a line."""
TOKEN = "launched"
"""A file in the run's folder by which another machine knows that it sees the same folder."""
NOT_SHARED = 3
"""The exit code of a run on a machine that does not see the root."""
INHERITED = ("MLFLOW_", "LIT_MEMORY_", "HF_", "NUMBA_", "MPLCONFIGDIR", "TORCHINDUCTOR_")
"""Beginnings of the environment variables that a run gets from the command."""
POLL = 0.5
"""Seconds between two looks at the files and at the cluster."""
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "fuse.sshfs")
"""File systems on which SQLite's locks do not hold."""


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
    process: Any = None

    def __call__(self) -> int:
        """Train on this machine; returns the exit code."""
        env = os.environ | self.environment | import_path()
        command = [sys.executable, "-m", "lit_memory.run.launchers.remote"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
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
        """End the training; its last checkpoint is on disk."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"process": None}


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a run needs of the environment of the command; a cluster need not pass it on."""
    return {name: value for name, value in environment.items() if name.startswith(INHERITED)}


class MessageFile:
    """The sending end: has ``send``, as a pipe has."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message) + "\n"
        with self.path.open("ab") as file:  # opened anew, so that a network file system shows it to the others
            file.write(line.encode())


class Job(ABC):
    """What a cluster has of a run."""

    ended: tuple[int | None, str] = (None, "")

    def outcome(self) -> tuple[int | None, str]:
        """The exit code, None before the end, and what the cluster says of it; the cluster is asked until then."""
        if self.ended[0] is None:
            self.ended = self.look()
        return self.ended

    @abstractmethod
    def look(self) -> tuple[int | None, str]:
        """Ask the cluster for the ``outcome``."""

    @abstractmethod
    def cancel(self) -> None:
        """End the run, which saves itself, or take it out of the queue; nothing where it has ended."""


@dataclass
class Remote(Child):
    """A run on another machine."""

    job: Any = None
    """A ``Job``."""
    path: Path = Path()
    read: int = 0
    """Bytes of the file of messages that have been read."""

    @property
    def exitcode(self) -> int | None:
        code, reason = self.job.outcome()
        if code == NOT_SHARED:
            reason = f"the machine that got it does not see {self.path.parent}; expected a root that all machines share"
        if code and (not self.failure or self.failure.startswith("SystemExit")):  # its answer to the cluster's signal
            self.failure = reason
        return code

    def messages(self) -> list[dict[str, Any]]:
        """What has been sent since the last call, in whole lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.read)
                lines, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self.read += len(lines) + (len(lines) > 0)
        return [self.receive(json.loads(line)) for line in lines.splitlines()]


class RemoteLauncher(Launcher):
    """Runs of a cluster, whose machines share the root."""

    @abstractmethod
    def submit(self, work: Work, spec: RunSpec) -> Job:
        """Hand a run to the cluster. Raises LauncherDied."""

    def start(self, spec: RunSpec) -> Remote:
        folder, token = spec.folder(self.root), secrets.token_hex(8)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MESSAGES).unlink(missing_ok=True)
        files.write(folder / TOKEN, token.encode())
        return Remote(spec, job=self.submit(Work(*self.arguments(spec), token), spec), path=folder / MESSAGES)

    def receive(self) -> list[tuple[Remote, dict[str, Any]]]:
        time.sleep(POLL)
        received = []
        for child in list(self.running):
            ended = child.exitcode is not None  # asked first: what was sent before the end is then all there
            received += [(child, message) for message in child.messages()]
            if ended:
                self.running.remove(child)
                child.path.unlink(missing_ok=True)
                received.append((child, {"event": "end"}))
        return received

    def stop(self) -> None:
        """What has not ended ``GRACE`` seconds after its cancelling is the cluster's to end."""
        for child in self.running:
            child.job.cancel()
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and any(child.exitcode is None for child in self.running):
            time.sleep(POLL / 5)


def check_shared(root: Path, uri: StoreURI, flag: str) -> None:
    """Raise ConfigError where many machines would write to one SQLite file on a network file system."""
    kind = file_system(root)
    if uri.scheme in ("", "sqlite") and kind in NETWORK:
        advice = "set MLFLOW_TRACKING_URI to the address of a server"
        message = f"{root} lies on {kind}, where the locks of SQLite do not hold; {advice}"
        raise ConfigError("command line", flag, message)


def file_system(path: Path, table: Path = Path("/proc/mounts")) -> str:
    """The kind of the file system of a path, by the longest mount point above it; "" where nothing says so."""
    try:
        mounts = [line.split()[1:3] for line in table.read_text().splitlines()]
    except OSError:
        return ""
    above = [(point, kind) for point, kind in mounts if path.is_relative_to(point)]
    return max(above, key=lambda mount: len(mount[0]), default=("", ""))[1]


def end_with(parent: int) -> None:
    """End this process by SIGTERM when ``parent`` is gone: another machine may have its run by then."""
    while os.getppid() == parent:
        time.sleep(POLL)
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
    run_child(spec, root, uri, parent, tags, MessageFile(folder / MESSAGES))


if __name__ == "__main__":
    main()
