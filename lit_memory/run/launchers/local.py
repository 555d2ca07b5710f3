"""Child processes on this machine: every run has one, so that a crash or a full memory ends one run only.

Prints nothing; ``LocalLauncher.events`` yields what happens.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lit_memory.plan.runspec import RunSpec
from lit_memory.run.uri import StoreURI
from lit_memory.util import files
from lit_memory.util.streams import Lenient

GRACE = 6.5
"""Seconds that children get to end their step, save and close their runs after a signal; with ``outbox.PATIENCE``,
ten at most."""
NEWS_SECONDS = 60.0
"""Seconds after which the progress of a run is news again."""
PRELOAD = ["lit_memory.run.engine"]
"""What the fork server imports once for all runs."""
LOST = 255
"""What ``multiprocessing`` takes for the exit code of every child of a fork server that has died."""


class ServerDied(Exception):
    """The fork server is gone, which starts the children and hears of their ends; all children have ended."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM came; all children have ended. No ``Exception``: a library that is being called when the signal
    comes must not take it for an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Child:
    """A run in a process of its own, with its latest progress."""

    spec: RunSpec
    process: Any
    connection: Connection
    progress: dict[str, Any] = field(default_factory=dict)
    """The latest of each value that the run has sent, see ``lit.callbacks.progress.Send``."""
    failure: str = ""
    started: float = field(default_factory=time.monotonic)
    age_at_news: float = 0.0

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def receive(self, message: dict[str, Any]) -> dict[str, Any]:
        """Keep a message; returns it with ``news``, whether a log should have a line for it: for a new stage or phase,
        and for the progress every ``NEWS_SECONDS``."""
        if message["event"] == "failed":
            self.failure = message["message"]
        if message["event"] not in ("progress", "testing", "waiting"):
            return message
        new = any(message[k] != self.progress.get(k) for k in ("event", "stage") if k in message)
        news = new or self.age - self.age_at_news >= NEWS_SECONDS
        if news:
            self.age_at_news = self.age
        self.progress = self.progress | message
        return message | {"news": news}

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
    spec: RunSpec, root: Path, uri: StoreURI, parent: str, tags: Mapping[str, str], connection: Connection
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


def end_with_parent() -> None:
    """End this process by SIGTERM when its parent is gone: nobody is left to hear the result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def this_package_first() -> Iterator[None]:
    """New processes import lit_memory from where this one did.

    Python before 3.13 starts the fork server without our ``sys.path``: a copy in the working directory, or an installed
    one, would run in place of this one.
    """
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


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """New processes never see Ctrl-C, which a terminal sends to all of a command; this one sees it after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalLauncher:
    """Runs specs in child processes, at most ``jobs`` at a time; one that starts from another's weights after that."""

    def __init__(
        self,
        specs: Sequence[RunSpec],
        jobs: int,
        root: Path,
        uri: StoreURI,
        parents: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        """root, uri, tags: as in ``engine.run_one``. parents: experiment -> id of the parent run."""
        self.waiting, self.running, self.total, self.jobs = list(specs), list[Child](), len(specs), jobs
        self.root, self.uri, self.parents, self.tags = root, uri, parents, tags
        self.handlers: dict[int, Any] = {}
        """Signal -> handler before ``events``."""
        self.signalled = 0
        """The signal that has come."""
        self.context = multiprocessing.get_context("forkserver")
        self.start_fork_server()

    def start_fork_server(self) -> None:
        """Start the process that imports torch and Lightning once for all children, unless it runs, and return at
        once."""
        self.context.set_forkserver_preload(PRELOAD)
        resource_tracker.ensure_running()  # by itself, as it unblocks SIGINT
        with this_package_first(), without_ctrl_c():
            forkserver.ensure_running()

    @property
    def done(self) -> int:
        """Runs that have ended, well or not."""
        return self.total - len(self.waiting) - len(self.running)

    def events(self) -> Iterator[tuple[Child, dict[str, Any]]]:
        """Start everything and yield the messages of the children; the last event of each is "end". Raises
        Interrupted, and ServerDied."""
        self.handlers |= {number: signal.signal(number, self.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.waiting or self.running:
                if self.signalled:  # and what was being called has swallowed the exception
                    raise Interrupted(self.signalled)
                while len(self.running) < self.jobs and (spec := self.next_ready()):
                    self.start(spec)
                    self.waiting.remove(spec)
                yield from self.receive()
        except (Interrupted, ServerDied):
            self.stop()
            raise
        finally:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def next_ready(self) -> RunSpec | None:
        """The first spec that waits for no other; None where all do."""
        left = {spec.key for spec in (*self.waiting, *(child.spec for child in self.running))}
        return next((spec for spec in self.waiting if spec.start is None or spec.start.key not in left), None)

    def arguments(self, spec: RunSpec) -> tuple[RunSpec, Path, StoreURI, str, Mapping[str, str]]:
        """The arguments of ``run_one``, without ``send``."""
        return spec, self.root, self.uri, self.parents[spec.experiment], self.tags

    def interrupt(self, number: int, frame: Any) -> None:
        """The handler of SIGINT and SIGTERM. A second signal ends this process at once, whatever is being closed by
        then."""
        for each in self.handlers:
            signal.signal(each, signal.SIG_DFL)
        self.handlers.clear()  # nobody puts back a handler that would break off the closing in the middle
        self.signalled = number
        raise Interrupted(number)

    def start(self, spec: RunSpec) -> None:
        """Start the process of a run. Raises ServerDied."""
        self.start_fork_server()  # anew where it died while nothing ran
        here, there = self.context.Pipe(duplex=False)
        arguments = (*self.arguments(spec), there)
        process = self.context.Process(target=run_child, args=arguments, daemon=True, name=spec.name)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise ServerDied from error
        finally:
            there.close()
        self.running.append(Child(spec, process, here))

    def receive(self) -> list[tuple[Child, dict[str, Any]]]:
        """The messages of the children within half a second. Raises ServerDied."""
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
                raise ServerDied
            if child.dead:
                self.running.remove(child)
                received.append((child, {"event": "end"}))
        return received

    def stop(self) -> None:
        """End all children, by force after ``GRACE`` seconds; their last checkpoints are on disk."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in self.running:
                child.signal(number)
            deadline = time.monotonic() + GRACE
            while (left := [child for child in self.running if not child.dead]) and time.monotonic() < deadline:
                for child in left:
                    while not child.connection.closed and child.connection.poll():
                        child.next_message()
                time.sleep(0.02)
