"""What every launcher does: start runs in their order, hear of their progress, and end them all when a signal comes.

A launcher prints nothing; ``Launcher.events`` yields what happens.
"""

import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run.uri import StoreURI

NEWS_SECONDS = 60.0
"""Seconds after which the progress of a run is news again."""


class LauncherDied(Exception):
    """What starts the runs and hears of their ends is gone, and all runs with it. Its text says what it was."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM came; all children have ended. No ``Exception``: a library that is being called when the signal
    comes must not take it for an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Child:
    """A run that has been started, with its latest progress."""

    spec: RunSpec
    progress: dict[str, Any] = field(default_factory=dict)
    """The latest of each value that the run has sent, see ``lit.callbacks.progress.Send``."""
    failure: str = ""
    started: float = field(default_factory=time.monotonic)
    age_at_news: float = 0.0

    @property
    def exitcode(self) -> int | None:
        """0 for a run that ended well; None before its end."""
        raise NotImplementedError

    @property
    def where(self) -> str:
        """Where it is, as its cluster says; "" on this machine."""
        return ""

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


class Launcher(ABC):
    """Runs specs, at most ``jobs`` at a time; one that starts from another's weights after that."""

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
        self.waiting, self.running, self.total, self.jobs = list(specs), list[Any](), len(specs), jobs
        self.root, self.uri, self.parents, self.tags = root, uri, parents, tags
        self.handlers: dict[int, Any] = {}
        """Signal -> handler before ``events``."""
        self.signalled = 0
        """The signal that has come."""

    @abstractmethod
    def start_ready(self) -> None:
        """Start what may start: ``waiting`` becomes ``running``. Raises LauncherDied."""

    @abstractmethod
    def receive(self) -> list[tuple[Any, dict[str, Any]]]:
        """The messages of the running children within half a second; one that has ended leaves ``running`` with the
        message "end". Raises LauncherDied."""

    @abstractmethod
    def stop(self) -> None:
        """End all children; their last checkpoints are on disk."""

    @property
    def done(self) -> int:
        """Runs that have ended, well or not."""
        return self.total - len(self.waiting) - len(self.running)

    @property
    def left(self) -> bool:
        """Whether there are runs that have not ended."""
        return bool(self.running or self.waiting)

    def events(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Start everything and yield the messages of the children; the last event of each is "end". Raises
        Interrupted, LauncherDied, and ConfigError for what a cluster refuses."""
        with self.signals():
            try:
                while self.waiting or self.running:
                    if self.signalled:  # and what was being called has swallowed the exception
                        raise Interrupted(self.signalled)
                    self.start_ready()
                    yield from self.receive()
            except (Interrupted, LauncherDied, ConfigError):
                self.stop()
                raise

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM raise Interrupted in this block."""
        self.handlers |= {number: signal.signal(number, self.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

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
