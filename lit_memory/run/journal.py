"""What a run tells the tracking store: ``journal.jsonl`` in its folder, which is written first and sent later.

One line per message, in JSON: ``begin`` (a process starts the run or goes on with it), ``rows`` of metrics, ``tags``,
``files`` beside it, ``status`` (how the run ended), and that again with ``sent``, once the store has everything before
it. The holder of the run's lock appends; nothing is ever changed. Rows keep the time at which they were logged: the
store knows a row by its run, metric, step, value and time, so that one that is sent twice is there once.
"""

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_memory.util import files

NAME = "journal.jsonl"
Row = tuple[str, float, float]
"""Metric, x, value."""
TimedRow = tuple[str, int, float, int]
"""Metric, step, value, milliseconds since 1970."""


@dataclass
class Messages:
    """What some lines of a journal come to."""

    end: int
    """Bytes of the file up to the end of these lines."""
    origin: dict[str, str] = field(default_factory=dict)
    """Tags of the processes that trained the run, "first; second" where they differ."""
    params: dict[str, str] = field(default_factory=dict)
    rows: list[TimedRow] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """File of the run's folder -> its SHA-256."""
    status: str = ""
    """The last one; "" where these lines do not change it."""
    began: float = math.inf
    """When the first of them was written, in seconds since 1970."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the message of one more line."""
        self.began = min(self.began, line["time"] / 1000)
        if "sent" in line:
            return
        if "begin" in line:
            self.origin = merged(self.origin, line["begin"])
            self.params, self.status = line["params"], "RUNNING"
            self.tags.pop("error", None)
        self.rows += [(name, step, value, line["time"]) for name, step, value in line.get("rows", [])]
        self.tags |= line.get("tags", {})
        self.files |= line.get("files", {})
        self.status = line.get("status", self.status)


def merged(before: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    """Tags that keep old values beside new ones, "old; new", but for ``where``, which is replaced."""
    found = dict(before)
    for name, value in tags.items():
        parts = [*before.get(name, "").split("; "), *value.split("; ")]
        found[name] = value if name == "where" else "; ".join(dict.fromkeys(filter(None, parts)))
    return found


def read(folder: Path, start: int = 0) -> Messages:
    """The messages of a run from byte ``start`` on, up to the first line that is no whole message."""
    found = Messages(start)
    try:
        with (folder / NAME).open("rb") as file:
            file.seek(start)
            lines = file.readlines()
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            message = json.loads(line[:-1] if line.endswith(b"\n") else b"")
            Messages(0).add(message)  # raises before anything of it counts
        except (ValueError, TypeError, KeyError, AttributeError):  # the power failed, or the disk was full or is broken
            break
        found.add(message)
        found.end += len(line)
    return found


def last(folder: Path) -> dict[str, Any]:
    """The last line of a journal that is whole, without reading the others; {} where there is none."""
    try:
        with (folder / NAME).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 10_000))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            return found if isinstance(found := json.loads(line), dict) else {}
    return {}


def waits(folder: Path) -> bool:
    """Whether a run has told something that the store may not have."""
    return (folder / NAME).is_file() and "sent" not in last(folder)


def complete(folder: Path) -> bool:
    """Whether a run is complete on disk, whatever the store has of it."""
    line = last(folder)
    return line.get("status") == "FINISHED" and ("sent" in line or ended(folder))


def ended(folder: Path) -> bool:
    """Whether the journal of a run that waits says how it ended, and nothing before that is damaged."""
    return read(folder).status not in ("", "RUNNING")


def clear(folder: Path) -> None:
    """Remove the journal of a run."""
    (folder / NAME).unlink(missing_ok=True)


class Journal:
    """Writes the messages of one run; only for the holder of the run's lock."""

    def __init__(self, folder: Path, notify: Callable[[], None] = lambda: None) -> None:
        """folder: of the run. notify: called after every message."""
        self.path, self.notify = folder / NAME, notify
        folder.mkdir(parents=True, exist_ok=True)
        before = read(folder)
        if self.path.exists():
            os.truncate(self.path, before.end)
        self.logged = {row[:2] for row in before.rows}
        """(metric, step) of all rows. A run that goes on from a checkpoint computes some of them again."""
        self.began = min(before.began, time.time())
        """When the run began, in seconds since 1970."""

    def begin(self, tags: Mapping[str, str], params: Mapping[str, Any]) -> None:
        """A process starts the run, or goes on with it. tags: of this process. params: of the run."""
        self._append({"begin": dict(tags), "params": {name: str(value) for name, value in params.items()}})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of one step; those that were logged before are left out."""
        self._log((name, step, value) for name, value in metrics.items())

    def _log(self, rows: Iterable[tuple[str, int, float]]) -> None:
        new = [row for row in rows if row[:2] not in self.logged]
        if new:
            self._append({"rows": new})
            self.logged.update(row[:2] for row in new)

    def tag(self, tags: Mapping[str, Any]) -> None:
        """Set tags of the run."""
        self._append({"tags": {name: str(value) for name, value in tags.items()}})

    def attach(self, name: str, content: bytes) -> None:
        """Write a file of the run, which goes to the store too."""
        files.write(self.path.with_name(name), content)
        self._append({"files": {name: hashlib.sha256(content).hexdigest()}})

    def finish(self, results: Iterable[Row], totals: Mapping[str, float], times: Iterable[Row] = ()) -> None:
        """Log the rows of the test, the totals and the measured times, then FINISHED."""
        self._log(result_rows(results, totals, times))
        self.end("FINISHED")

    def end(self, status: str) -> None:
        """End the run with the status FINISHED, FAILED or KILLED."""
        self._append({"status": status})

    def sync(self) -> None:
        """Put everything on the disk. Comes before a checkpoint: what it does not repeat must survive the power."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def _append(self, message: dict[str, Any]) -> None:
        append(self.path, message)
        self.notify()


def result_rows(
    results: Iterable[Row], totals: Mapping[str, float], times: Iterable[Row]
) -> list[tuple[str, int, float]]:
    """(metric, step, value) rows of a test, which has x as the step."""
    rows = [(f"test/{name}", int(x), value) for name, x, value in results]
    rows += [(f"time/{name}", int(x), value) for name, x, value in times]
    return rows + [(name, 0, value) for name, value in totals.items()]


def append(path: Path, message: Mapping[str, Any]) -> None:
    """``files.append`` of a message with its time. A last line that is not whole, as the power failed, is removed."""
    line = json.dumps({**message, "time": time.time_ns() // 1_000_000}).encode() + b"\n"
    with files.naming(path), path.open("ab+", buffering=0) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 1))
        if file.read(1) not in (b"", b"\n"):
            os.truncate(path, read(path.parent).end)
        files.append(file, line)
