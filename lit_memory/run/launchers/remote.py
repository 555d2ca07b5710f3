"""Runs on other machines that share the root: the command's end, what every cluster needs.

What a cluster has of a run, its job, is on record in the run's folder: the command may end before the job, and any
later one takes it over. ``work.py`` is the end that trains.
"""

import contextlib
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run.launchers.base import Child, Launcher
from lit_memory.run.launchers.local import GRACE
from lit_memory.run.launchers.work import MESSAGES, NOT_SHARED, POLL, TOKEN, Work
from lit_memory.run.uri import StoreURI
from lit_memory.util import files

RECORD = "job.json"
"""The job of a run, from its submission until a command has heard of its end."""
ARRAY = 1000
"""Runs that are handed over at once, at most: what Slurm takes by default."""
NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "fuse.sshfs")
"""File systems on which SQLite's locks do not hold."""


class Job(ABC):
    """What a cluster has of a run."""

    name: str
    """What the cluster's users call it."""
    ended: tuple[int | None, str] = (None, "")

    def outcome(self) -> tuple[int | None, str]:
        """The exit code, None before the end, and what the cluster says of it; the cluster is asked until then."""
        if self.ended[0] is None:
            self.ended = self.look()
        return self.ended

    @property
    def settled(self) -> bool:
        """Whether the outcome is sure for now; a state that lasts a moment is not."""
        return True

    @abstractmethod
    def look(self) -> tuple[int | None, str]:
        """Ask the cluster for the ``outcome``."""

    @abstractmethod
    def cancel(self) -> None:
        """End the run, which saves itself, or take it out of the queue; nothing where it has ended."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """What ``RemoteLauncher.find`` needs to know, as JSON."""


@dataclass
class Remote(Child):
    """A run on another machine."""

    job: Any = None
    """A ``Job``."""
    path: Path = Path()
    read: int = 0
    """Bytes of the file of messages that have been read."""
    machine: str = ""
    ours: bool = True
    """Whether this command has submitted it, and so ends it with itself."""

    @property
    def exitcode(self) -> int | None:
        code, reason = self.job.outcome()
        if code == NOT_SHARED:
            reason = f"the machine that got it does not see {self.path.parent}; expected a root that all machines share"
        elif code and self.failure.startswith("SystemExit"):  # its answer to the cluster's signal
            reason = f"{self.job.name} was ended from outside; the run has saved itself"
        if code and (not self.failure or self.failure.startswith("SystemExit")):
            self.failure = reason
        return code

    @property
    def where(self) -> str:
        return " on ".join(filter(None, (self.job.outcome()[1], self.machine)))

    def messages(self) -> list[dict[str, Any]]:
        """What has been sent since the last call, in whole lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.read)
                lines, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self.read += len(lines) + (len(lines) > 0)
        found = [message for line in lines.splitlines() if (message := message_of(line))]
        self.machine = next((m["name"] for m in reversed(found) if m["event"] == "machine"), self.machine)
        return [self.receive(message) for message in found]


class RemoteLauncher(Launcher):
    """Runs of a cluster, whose machines share the root. ``running`` are those that the cluster has, from this command
    or an earlier one."""

    name: str
    """As in ``--launcher``."""
    queues = True
    """Whether the cluster itself holds back a run until the one that it starts from has ended."""

    def __init__(self, *arguments: Any, settings: Mapping[str, Any], detach: bool = False) -> None:
        """arguments: as in ``Launcher``. settings: of the launch file. detach: the jobs go on without this command."""
        super().__init__(*arguments)
        self.settings, self.detach, self.submitting = settings, detach, False
        self.heard = False
        """Whether any run has begun."""
        self.connect()
        self.adopt()

    @abstractmethod
    def connect(self) -> None:
        """Open the cluster. Raises ConfigError."""

    @abstractmethod
    def needs(self, spec: RunSpec) -> Hashable:
        """What a run needs of a machine; runs with the same are handed over together."""

    @abstractmethod
    def submit(self, works: Sequence[Work], after: Job | None) -> Sequence[Job]:
        """Hand runs with the same needs to the cluster, which starts them when another run has ended.

        Raises ConfigError for what the cluster refuses, and LauncherDied.
        """

    @abstractmethod
    def find(self, record: Mapping[str, Any]) -> Job | None:
        """The job of a ``Job.record``; None where the cluster has forgotten it, and nobody knows how it ended."""

    def adopt(self) -> None:
        """Take over the jobs of earlier commands."""
        waiting, self.waiting = self.waiting, []
        for spec in waiting:
            found = recorded(spec.folder(self.root))
            job = self.find(found["job"]) if found.get("launcher") == self.name else None
            if job is None:
                self.waiting.append(spec)
                continue
            begun, path = time.monotonic() - (time.time() - found["time"]), spec.folder(self.root) / MESSAGES
            self.running.append(Remote(spec, started=begun, job=job, path=path, ours=False))

    def start_ready(self) -> None:
        """Hand over all runs that the limit allows; those that start from another's weights wait in the cluster."""
        while batch := self.next_batch():
            works = [self.work(spec) for spec in batch]
            after = next((child.job for child in self.running if child.spec.key == start_key(batch[0])), None)
            with self.undisturbed():
                for work, job in zip(works, self.submit(works, after), strict=True):
                    folder = work.spec.folder(self.root)
                    record = {"launcher": self.name, "time": time.time(), "job": job.record()}
                    files.write(folder / RECORD, json.dumps(record).encode())
                    self.running.append(Remote(work.spec, job=job, path=folder / MESSAGES, ours=not self.detach))
                handed = {spec.key for spec in batch}
                self.waiting = [spec for spec in self.waiting if spec.key not in handed]

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """A signal waits for the end of the block: no job without its record."""
        self.submitting = True
        try:
            yield
        finally:
            self.submitting = False
            if self.signalled:
                self.interrupt(self.signalled, None)

    def interrupt(self, number: int, frame: Any) -> None:
        if self.submitting:
            self.signalled = number
        else:
            super().interrupt(number, frame)

    def hand_over(self) -> None:
        """``start_ready``, of which a signal leaves no job without its record. Raises Interrupted."""
        with self.signals():
            self.start_ready()

    def next_batch(self) -> list[RunSpec]:
        """The first runs that can be handed over together: with the same needs, and behind the same other run."""
        queued = {spec.key for spec in self.waiting} | {c.spec.key for c in self.running if not self.queues}
        free = [spec for spec in self.waiting if start_key(spec) not in queued]
        kinds = [(self.needs(spec), start_key(spec)) for spec in free]
        batch = [spec for spec, kind in zip(free, kinds, strict=True) if kind == kinds[0]]
        return batch[: max(0, min(ARRAY, self.jobs - len(self.running)))]

    def work(self, spec: RunSpec) -> Work:
        """What the cluster gets of a run."""
        folder, token = spec.folder(self.root), secrets.token_hex(8)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MESSAGES).unlink(missing_ok=True)
        files.write(folder / TOKEN, token.encode())
        return Work(*self.arguments(spec), token)

    def receive(self) -> list[tuple[Remote, dict[str, Any]]]:
        """Raises ConfigError where the first word from the cluster is that it does not see the root."""
        time.sleep(POLL)
        received = []
        for child in list(self.running):
            ended = child.exitcode is not None  # asked first: what was sent before the end is then all there
            received += [(child, message) for message in child.messages()]
            self.heard = self.heard or bool(child.read)
            if ended:
                self.running.remove(child)
                forget(child.spec.folder(self.root))
                received.append((child, {"event": "end"}))
            if child.exitcode == NOT_SHARED and child.ours and not self.heard:
                raise ConfigError("command line", "--root", child.failure)
        return received

    def settle(self) -> list[tuple[Remote, dict[str, Any]]]:
        """What is to be heard until it is sure of every job whether it has ended."""
        received = self.receive()
        while not all(child.job.settled for child in self.running):
            received += self.receive()
        return received

    def stop(self, adopted: bool = False) -> None:
        """End the jobs of this command. What has not ended ``GRACE`` seconds after its cancelling is the cluster's to
        end.

        adopted: end those of earlier commands, too; otherwise they go on, and leave ``running``.
        """
        self.running = [child for child in self.running if child.ours or adopted]
        for child in self.running:
            child.job.cancel()
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and any(child.exitcode is None for child in self.running):
            time.sleep(POLL / 5)
        for child in self.running:
            forget(child.spec.folder(self.root))


def start_key(spec: RunSpec) -> str:
    """The key of the run that a run starts from; "" where there is none."""
    return spec.start.key if spec.start else ""


def recorded(folder: Path) -> dict[str, Any]:
    """The record of the job of a run; {} where there is none."""
    try:
        return json.loads((folder / RECORD).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a full disk left it empty
        return {}


def message_of(line: bytes) -> dict[str, Any]:
    """The message of a line; {} for a line of another kind, as a broken disk may have it."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "event" in found else {}


def forget(folder: Path) -> None:
    """Remove what a job has left in the folder of its run."""
    for name in (RECORD, MESSAGES, TOKEN):
        (folder / name).unlink(missing_ok=True)


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
