"""SIGTERM of a run: put off until the run is saved."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Termination:
    """SIGTERM ends a run with SystemExit: at once, or when the work that must not be broken off is done.

    It counts once. The command that sends it may be gone before the run is closed, and then it comes again
    (``launchers.local.end_with_parent``).
    """

    def __init__(self, obeyed: bool = True) -> None:
        """obeyed: False for a process that another one ends."""
        self.obeyed = obeyed
        self.installed = False
        self.requested = False
        """SIGTERM has come."""
        self.deferred = False
        """It waits for the present work."""

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle SIGTERM in this block; in other threads than the main one nothing is handled."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, self.installed = signal.signal(signal.SIGTERM, self.request), True
        try:
            yield
        finally:
            if not self.requested:
                signal.signal(signal.SIGTERM, before)

    def reinstall(self) -> None:
        """Take the place of Lightning's handler, which would end the training before the run can be saved."""
        if self.installed:
            signal.signal(signal.SIGTERM, self.request)

    def request(self, number: int, frame: Any) -> None:
        """The handler of the signal."""
        if self.requested or not self.obeyed:
            return
        self.requested = True
        if not self.deferred:
            self.exit()

    def defer(self, wanted: bool) -> None:
        """Let SIGTERM wait, or no longer. Raises SystemExit where it has come and no longer waits."""
        self.deferred = wanted
        if self.requested and not wanted:
            self.exit()

    def exit(self) -> None:
        raise SystemExit(128 + signal.SIGTERM)
