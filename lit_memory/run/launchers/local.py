"""Child processes on this machine: every run has one, so that a crash or a full memory ends one run only."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Protocol

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import REGISTRIES
from lit_memory.run.launchers.base import Child, Launcher, LauncherDied
from lit_memory.run.uri import StoreURI
from lit_memory.util import files
from lit_memory.util.child import child_environment, environment
from lit_memory.util.streams import Lenient

GRACE = 6.5
"""Seconds that children get to end their step, save and close their runs after a signal; with ``outbox.PATIENCE``,
ten at most."""
DIED = "the process that starts the runs was killed, or had no memory left"
LOST = 255
"""What ``multiprocessing`` takes for the exit code of every child of a fork server that has died."""


class Sender(Protocol):
    """Where the messages of a run go: a pipe, or a file."""

    def send(self, message: dict[str, Any], /) -> None: ...


@dataclass
class Process(Child):
    """A run in a process of its own."""

    process: Any = None
    connection: Any = None

    @property
    def exitcode(self) -> int | None:
        return self.process.exitcode

    @property
    def dead(self) -> bool:
        """Whether the process has ended and all that it said is received. After the end of the fork server only its
        closed pipe tells."""
        code = self.process.exitcode
        if code in (None, LOST):
            return code == LOST and self.connection.closed
        return self.connection.closed or not self.connection.poll()

    def next_message(self) -> dict[str, Any] | None:
        """The next message, which must be there; None where the pipe is closed."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.connection.close()
            return None

    def signal(self, number: int) -> None:
        """Send a signal; ``multiprocessing`` sends none to the children of a dead fork server."""
        if not self.dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


def run_child(
    spec: RunSpec, root: Path, uri: StoreURI, parent: str, tags: Mapping[str, str], connection: Sender
) -> None:
    """The work of a child process. Progress and failure go through ``connection``, all other output to the run's log
    file."""
    multiprocessing.current_process().daemon = False  # a daemon may not have processes, as train.workers needs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=end_with_parent, daemon=True).start()

    sending = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with sending, contextlib.suppress(OSError):  # the parent is gone; end_with_parent ends this process in a moment
            connection.send(message)

    os.environ["LIT_MEMORY_ROOT"] = str(root)  # for the caches of tasks
    logged = False
    try:
        spec.provide_code()
        folder = spec.folder(root)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = Lenient(sys.stdout), Lenient(sys.stderr)
        logged = True
        from lit_memory.run.engine import run_one

        run_one(spec, root, uri, parent, tags, send)
    except BaseException as error:
        uri.clean(error)
        message = files.storage_problem(error, root) or f"{type(error).__name__}: {error}".replace("\n", " ")
        send({"event": "failed", "message": message})
        with contextlib.suppress(OSError):
            if logged:  # else it would go to the terminal
                traceback.print_exc()
        raise SystemExit(1) from None


def preloaded(specs: Iterable[RunSpec]) -> list[str]:
    """What the fork server imports once for all runs: all that trains one, our models and tasks of the plan among it. A
    file of the user is each run's own to import."""
    targets = {REGISTRIES[kind][getattr(spec, kind)["name"]] for spec in specs for kind in REGISTRIES}
    modules = {target.partition(":")[0] for target in targets if target.startswith("lit_memory.")}
    return ["lit_memory.run.engine", *sorted(modules)]


def end_with_parent() -> None:
    """End this process by SIGTERM when its parent is gone: nobody is left to hear the result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """New processes never see Ctrl-C, which a terminal sends to all of a command; this one sees it after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalLauncher(Launcher):
    """Child processes of a fork server."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.context = multiprocessing.get_context("forkserver")
        self.start_fork_server()

    def start_fork_server(self) -> None:
        """Start the process that imports torch and Lightning once for all children, unless it runs, and return at
        once. It imports lit_memory from where this one did: Python before 3.13 starts it without our ``sys.path``."""
        self.context.set_forkserver_preload(preloaded(self.waiting))
        resource_tracker.ensure_running()  # by itself, as it unblocks SIGINT
        with environment(child_environment(os.environ)), without_ctrl_c():
            try:
                forkserver.ensure_running()
            except OSError as error:
                if "path too long" not in str(error):  # so says Python of a socket's name of more than 100 characters
                    raise
                raise ConfigError(
                    "TMPDIR", "", f"{gettempdir()} is too long for a socket; name a shorter one"
                ) from None

    def start_ready(self) -> None:
        while len(self.running) < self.jobs and (spec := self.next_ready()):
            self.running.append(self.start(spec))
            self.waiting.remove(spec)

    def next_ready(self) -> RunSpec | None:
        """The first spec that waits for no other; None where all do."""
        left = {spec.key for spec in (*self.waiting, *(child.spec for child in self.running))}
        return next((spec for spec in self.waiting if spec.start is None or spec.start.key not in left), None)

    def start(self, spec: RunSpec) -> Process:
        """Start a run. Raises LauncherDied."""
        self.start_fork_server()  # anew where it died while nothing ran
        here, there = self.context.Pipe(duplex=False)
        arguments = (*self.arguments(spec), there)
        process = self.context.Process(target=run_child, args=arguments, daemon=True, name=spec.name)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise LauncherDied(DIED) from error
        finally:
            there.close()
        return Process(spec, process=process, connection=here)

    def receive(self) -> list[tuple[Process, dict[str, Any]]]:
        received = []
        ends = [child.process.sentinel for child in self.running if child.process.exitcode is None]
        ready = wait([*(child.connection for child in self.running), *ends], timeout=0.5)
        for child in list(self.running):
            message = child.next_message() if child.connection in ready else None
            if message is not None:
                received.append((child, child.receive(message)))
                continue
            if child.connection.closed:
                child.process.join()
            if child.process.exitcode == LOST:
                raise LauncherDied(DIED)
            if child.dead:
                self.running.remove(child)
                received.append((child, {"event": "end"}))
        return received

    def stop(self) -> None:
        """By force after ``GRACE`` seconds."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in self.running:
                child.signal(number)
            deadline = time.monotonic() + GRACE
            while (left := [child for child in self.running if not child.dead]) and time.monotonic() < deadline:
                for child in left:
                    while not child.connection.closed and child.connection.poll():
                        child.next_message()
                time.sleep(0.02)
