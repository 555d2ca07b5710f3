"""Who owns a key in a store: the process that holds its lease.

The file lock of a run's folder (``checkpoint.lock``) keeps the processes of one root apart, and the operating system
frees it with the process. Roots that share a store cannot see each other's locks; leases keep them apart.

Lease n of a key is an entry ``<key>.n`` of the store's register, whose value, written once, names the owner. The owner
counts up the mark beside it (its heartbeat) and ends it with ``FREE``. A process that wants the key waits while the
heartbeat goes on. It takes lease n + 1 when lease n is free, when its owner is known to be dead, or when its heartbeat
has stood still for ``EXPIRES`` seconds of watching. No clock is compared with that of another machine.

An owner that was stopped (SIGSTOP, a closed lid) may have lost its lease. It asks before it writes anything whenever
its heartbeat was last confirmed ``SURE`` seconds ago: by then nobody can have waited for ``EXPIRES`` seconds. In order
that one of the two sees the other, the owner writes its heartbeat before it looks for a newer lease, and the successor
takes the lease before it looks at the old heartbeat again. A store that is away does not end a lease: nobody else can
take it there.
"""

import contextlib
import platform
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self
from uuid import uuid4

from filelock import Timeout

from lit_memory.run import checkpoint
from lit_memory.util import files

if TYPE_CHECKING:
    from lit_memory.lit.callbacks.progress import Send
    from lit_memory.run.register import Register

EXPIRES = 60.0
"""Seconds without a heartbeat after which others may take a lease."""
RENEWED = 15.0
"""Seconds between two heartbeats."""
SURE = 40.0
"""Seconds after a heartbeat in which nobody can have taken the lease."""
POLL = 1.0
"""Seconds between two looks at the lease of another process."""
FREE = "free"


class LeaseLost(RuntimeError):
    """Another process owns the key now; this one must not write any more."""


@dataclass(frozen=True)
class Claim:
    """The newest lease of a key."""

    number: int
    owner: str
    """"<machine>:<folder> <id>"."""
    beat: str
    """The heartbeat, ``FREE``, or "" before the first one."""

    @property
    def free(self) -> bool:
        return self.beat == FREE

    @property
    def place(self) -> str:
        """Machine and folder of the owner."""
        return self.owner.rpartition(" ")[0]


def clock() -> float:
    """Seconds that also pass while this process or the whole machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def newest(entries: Mapping[str, str], marks: Mapping[str, str]) -> dict[str, Claim]:
    """The newest lease of every key."""
    found: dict[str, Claim] = {}
    for name, owner in entries.items():
        key, _, number = name.rpartition(".")
        if number.isdigit() and (key not in found or int(number) > found[key].number):
            found[key] = Claim(int(number), owner, marks.get(name, ""))
    return found


class Lease:
    """A lease that this process holds. A thread of its own renews it."""

    def __init__(self, register: "Register", key: str, number: int, folder: Path) -> None:
        """folder: of the run, which remembers the owner."""
        self.register, self.key, self.folder = register, key, folder
        self.name, self.owner = f"{key}.{number}", f"{platform.node()}:{folder} {uuid4().hex}"
        self.beats, self.confirmed = 0, clock()
        self.lost = ""
        """Machine and folder of the new owner."""
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def renew(self) -> None:
        """Give a sign of life. Raises LeaseLost, and the store's error where it is away."""
        started = clock()
        self.beats += 1
        self.register.mark(self.name, str(self.beats))
        claim = newest(*self.register.page(self.key)).get(self.key)
        if claim is not None and claim.owner != self.owner:
            self.lost = claim.place
            self.raise_if_lost()
        self.confirmed = started

    def raise_if_lost(self) -> None:
        """Raise LeaseLost if the lease is known to be lost. Asks nobody: cheap enough for every step."""
        if self.lost:
            reason = f"this process gave no sign of life for {EXPIRES:.0f} s, and {self.lost} trains its run now"
            raise LeaseLost(f"{reason}; run the same command again to wait for the result")

    def check(self) -> None:
        """Make sure that the lease is held, before a write. Raises LeaseLost, and the store's error where it is
        away."""
        self.raise_if_lost()
        if clock() - self.confirmed > SURE:
            self.renew()

    def keep(self) -> None:
        """Renew the lease until it ends or is lost: the work of the thread."""
        while not self.ended.wait(RENEWED):
            try:
                self.renew()
            except LeaseLost:
                return
            except self.register.Error:
                continue  # the store is away, so nobody else can take the lease

    def end(self) -> None:
        """Give the lease back. Where the store is away, it expires."""
        self.ended.set()
        if not self.lost and clock() - self.confirmed < SURE:
            with contextlib.suppress(*self.register.Error):
                self.register.mark(self.name, FREE)
                (self.folder / "lease").unlink(missing_ok=True)


def acquire(register: "Register", key: str, folder: Path, send: "Send") -> Lease:
    """Take the lease of a key as soon as it can be had.

    folder: of the run, whose lock the caller holds. send: is told once of the wait.
    """
    seen, watched, told = newest(*register.page(key)).get(key), 0.0, False
    while True:
        expired = watched >= EXPIRES
        if seen is None or seen.free or expired or remembers(folder, seen.owner):
            lease = take(register, key, seen, folder)
            if lease is not None:
                if expired:
                    await_end(register, key, seen)
                return lease
        elif not told:
            send({"event": "waiting"})
            told = True
        looked = time.monotonic()
        time.sleep(POLL)
        try:
            now = newest(*register.page(key)).get(key)
        except register.Error:
            watched = 0.0  # the owner could not renew it either
            continue
        # If this process was stopped itself, the owner may have been, too: that time does not count.
        watched = watched + min(time.monotonic() - looked, 2 * POLL) if now == seen else 0.0
        seen = now


def claimed(register: "Register", key: str, folder: Path) -> Lease | None:
    """Take the lease of a key now; None where a process of another root has it.

    folder: of the run, whose lock the caller holds.
    """
    seen = newest(*register.page(key)).get(key)
    return take(register, key, seen, folder) if seen is None or seen.free or remembers(folder, seen.owner) else None


def take(register: "Register", key: str, before: Claim | None, folder: Path) -> Lease | None:
    """Take the lease behind ``before``; None where another process is faster."""
    lease = Lease(register, key, before.number + 1 if before else 1, folder)
    remember(folder, before.owner if before else "", lease.owner)
    with contextlib.suppress(*register.Error):
        if register.settle(lease.name, lease.owner) == lease.owner:
            threading.Thread(target=lease.keep, daemon=True).start()
            return lease
    return None


def await_end(register: "Register", key: str, before: Claim | None) -> None:
    """Wait until the owner of an expired lease must know of its end, if it has come back in the last moment."""
    _, marks = register.page(key)
    if before is not None and marks.get(f"{key}.{before.number}", "") != before.beat:
        time.sleep(EXPIRES)


def release_dead(register: "Register", key: str, folder: Path) -> bool:
    """Give back the lease of a process of ``folder`` that has died. False if the key has a living owner, as far as can
    be known."""
    try:
        with checkpoint.lock(folder).acquire(blocking=False) if folder.is_dir() else contextlib.nullcontext():
            claim = newest(*register.page(key)).get(key)
            if claim is None or claim.free:
                return True
            if not remembers(folder, claim.owner):
                return False
            register.mark(f"{key}.{claim.number}", FREE)
            return True
    except Timeout:
        return False


def remember(folder: Path, before: str, owner: str) -> None:
    """Note that ``owner`` is a process that holds the lock of ``folder``, before it takes the lease of ``before``,
    which stays noted in case it never comes to that."""
    folder.mkdir(parents=True, exist_ok=True)
    known = [before, owner] if remembers(folder, before) else [owner]
    files.write(folder / "lease", "\n".join([place(folder), *known]).encode())


def remembers(folder: Path, owner: str) -> bool:
    """Whether ``owner`` was a process that held the lock of ``folder``: who holds that now knows that it is dead."""
    return owner in owners(folder)


def owners(folder: Path) -> list[str]:
    """The owners that are known to have held the lock of ``folder``."""
    try:
        where, *known = (folder / "lease").read_text().splitlines()
    except (OSError, ValueError):
        return []
    return known if where == place(folder) else []


def place(folder: Path) -> str:
    """What tells a folder from its copies, here or on another machine."""
    return f"{platform.node()} {folder.stat().st_ino}"
