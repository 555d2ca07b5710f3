"""Child processes: every run has one, so that a crash or a full memory ends one arm only.

Prints nothing; ``Launch.events`` tells what happens.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lit_memory.plan.runspec import RunSpec
from lit_memory.util import files

GRACE = 8.0
"""Seconds that children get to end their step, save and close their runs after a signal."""
TOLD_EVERY = 60.0
"""Seconds after which the place where a run is counts as news."""


class Interrupted(Exception):
    """SIGINT or SIGTERM came; all children have ended."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Child:
    """A run in its own process, and the last that it told."""

    spec: RunSpec
    process: Any
    connection: Connection
    progress: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    started: float = field(default_factory=time.monotonic)
    told: float = 0.0
    """Its age at the last news."""

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def hear(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take in a message; adds ``news`` to what a log has a line for: a new stage or phase, and where a run is,
        every ``TOLD_EVERY`` seconds."""
        if message["event"] == "failed":
            self.failure = message["message"]
        elif message["event"] in ("progress", "testing", "waiting"):
            new = any(message[k] != self.progress.get(k) for k in ("event", "stage") if k in message)
            news = new or self.age - self.told >= TOLD_EVERY
            self.told = self.age if news else self.told
            self.progress = self.progress | message
            return message | {"news": news}
        return message


def run_child(
    spec: RunSpec, root: Path, uri: str, parent: str, tags: Mapping[str, str], connection: Connection
) -> None:
    """What a child process does: progress and the outcome go through ``connection``, all other output to the run's log
    file."""
    multiprocessing.current_process().daemon = (
        False  # that is for the parent's end; a daemon could not have train.workers
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=follow, daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the parent is gone; follow() ends this process in a moment
            connection.send(message)

    os.environ["LIT_MEMORY_ROOT"] = str(root)  # for the caches of tasks
    try:
        path = spec.folder(root)
        path.mkdir(parents=True, exist_ok=True)
        with (path / "log.txt").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        from lit_memory.run.engine import run_one

        run_one(spec, root, uri, parent, tags, send)
    except BaseException as error:
        told = files.disk_full(error, root)
        send({"event": "failed", "message": told or f"{type(error).__name__}: {error}".replace("\n", " ")})
        with contextlib.suppress(OSError):
            traceback.print_exc()
        raise SystemExit(1) from None


def follow() -> None:
    """End this process, as by SIGTERM, when the one that asked for it is gone: nobody is left to hear the result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def this_package_first() -> Iterator[None]:
    """New processes import lit_memory from where this one did. Python before 3.13 starts the fork server without our
    ``sys.path``, and a copy that lies in the working directory, or is installed, would run in place of this one."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    paths = [str(Path(__file__).resolve().parents[3]), before["PYTHONPATH"]]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Launch:
    """Runs specs, at most ``jobs`` at a time; one that starts from another's weights when that has ended."""

    def __init__(
        self,
        specs: Sequence[RunSpec],
        jobs: int,
        root: Path,
        uri: str,
        parents: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        self.waiting, self.running, self.total, self.jobs = list(specs), list[Child](), len(specs), jobs
        self.root, self.uri, self.parents, self.tags = root, uri, parents, tags
        self.handlers: dict[int, Any] = {}
        self.context = multiprocessing.get_context("forkserver")  # imports torch once for all children
        self.context.set_forkserver_preload(["lit_memory.run.engine"])
        with this_package_first():
            forkserver.ensure_running()

    @property
    def done(self) -> int:
        """Runs that have ended, well or not."""
        return self.total - len(self.waiting) - len(self.running)

    def events(self) -> Iterator[tuple[Child, dict[str, Any]]]:
        """Start everything and yield what the children tell; the last event of each is "end". Raises Interrupted."""
        self.handlers |= {number: signal.signal(number, self.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.waiting or self.running:
                while len(self.running) < self.jobs and (spec := self.next()):
                    self.start(spec)
                    self.waiting.remove(spec)
                yield from self.listen()
        except Interrupted:
            self.stop()
            raise
        finally:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def next(self) -> RunSpec | None:
        """The first that waits for no other; None where all do."""
        left = {spec.key for spec in (*self.waiting, *(child.spec for child in self.running))}
        return next((spec for spec in self.waiting if spec.start is None or spec.start.key not in left), None)

    def arguments(self, spec: RunSpec) -> tuple[RunSpec, Path, str, str, Mapping[str, str]]:
        """What ``run_one`` needs to know of a run."""
        return spec, self.root, self.uri, self.parents[spec.experiment], self.tags

    def interrupt(self, number: int, frame: Any) -> None:
        for each in self.handlers:
            signal.signal(each, signal.SIG_DFL)  # a second signal ends at once, whatever is being closed by then
        self.handlers.clear()  # so nobody puts back a handler that would break off the closing in the middle
        raise Interrupted(number)

    def start(self, spec: RunSpec) -> None:
        here, there = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=run_child, args=(*self.arguments(spec), there), daemon=True, name=spec.name
        )
        process.start()
        there.close()
        self.running.append(Child(spec, process, here))

    def listen(self) -> list[tuple[Child, dict[str, Any]]]:
        """What the children say within half a second."""
        heard = []
        ready = wait([child.connection for child in self.running], timeout=0.5)
        for child in [c for c in self.running if c.connection in ready]:
            try:
                heard.append((child, child.hear(child.connection.recv())))
            except EOFError:
                child.process.join()
                self.running.remove(child)
                heard.append((child, {"event": "end"}))
        return heard

    def stop(self) -> None:
        """End all children; their last checkpoints are on disk."""
        for child in self.running:
            child.process.terminate()
        deadline = time.monotonic() + GRACE
        for child in self.running:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
