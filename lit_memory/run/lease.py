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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
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
    """A lease that this process holds, or will ask for before it writes. A thread of its own renews it."""

    def __init__(self, register: "Register", key: str, folder: Path) -> None:
        """folder: of the run, which remembers the owner."""
        self.register, self.key, self.folder = register, key, folder
        self.owner = f"{platform.node()}:{folder} {uuid4().hex}"
        self.name = ""
        """Of its entry; "" before it is taken."""
        self.beats, self.confirmed = 0, clock()
        self.lost = ""
        """Why it cannot be had any more."""
        self.ended, self.marking = threading.Event(), threading.Lock()

    def take(self, before: Claim | None) -> bool:
        """Take the lease behind ``before``; False where another process is faster. Raises the store's error."""
        name = f"{self.key}.{before.number + 1 if before else 1}"
        remember(self.folder, before.owner if before else "", self.owner)
        self.confirmed = clock()
        if self.register.settle(name, self.owner) != self.owner:
            return False
        self.name = name
        threading.Thread(target=self.keep, daemon=True).start()
        return True

    def renew(self) -> None:
        """Give a sign of life. Raises LeaseLost, and the store's error where it is away."""
        started = clock()
        with self.marking:
            if self.ended.is_set():
                return
            self.beats += 1
            self.register.mark(self.name, str(self.beats))
        claim = newest(*self.register.page(self.key)).get(self.key)
        if claim is not None and claim.owner != self.owner:
            self.lost = f"this process gave no sign of life for {EXPIRES:.0f} s, and {claim.place} trains its run now"
            self.raise_if_lost()
        self.confirmed = started

    def raise_if_lost(self) -> None:
        """Raise LeaseLost if the lease is known to be lost. Asks nobody: cheap enough for every step."""
        if self.lost:
            raise LeaseLost(f"{self.lost}; run the same command again to wait for the result")

    def check(self) -> None:
        """Make sure that the lease is held, before a write. Raises LeaseLost, and the store's error where it is
        away."""
        self.raise_if_lost()
        if not self.name:
            self.take_now()
        elif clock() - self.confirmed > SURE:
            self.renew()

    def take_now(self) -> None:
        """Take the lease of a run that began while the store was away. Raises LeaseLost where another process has
        it."""
        before = newest(*self.register.page(self.key)).get(self.key)
        if not available(before, self.folder) or not self.take(before):
            owner = before.place if before else "another process"
            self.lost = f"while the tracking store did not answer, {owner} began to train this run"
            self.raise_if_lost()

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
        if self.name and not self.lost and clock() - self.confirmed < SURE:
            with contextlib.suppress(*self.register.Error), self.marking:  # no sign of life on its way comes after it
                self.register.mark(self.name, FREE)
                (self.folder / "lease").unlink(missing_ok=True)


@contextlib.contextmanager
def held(register: "Register", key: str, folder: Path, send: "Send") -> Iterator[Lease]:
    """Hold the lease of a key; wait for another process that has it. Where the store is away, the lease is taken when
    its ``check`` is first called.

    folder: of the run, whose lock the caller holds. send: is told once of the wait.
    """
    lease = Lease(register, key, folder)
    try:
        with contextlib.suppress(*register.Error):
            wait_for(lease, newest(*register.page(key)).get(key), send)
        yield lease
    finally:
        lease.end()


def wait_for(lease: Lease, seen: Claim | None, send: "Send") -> None:
    """Take a lease as soon as it can be had. seen: the newest one of its key."""
    watched, told = 0.0, False
    while True:
        expired = watched >= EXPIRES
        if expired or available(seen, lease.folder):
            with contextlib.suppress(*lease.register.Error):
                if lease.take(seen):
                    if expired:
                        await_end(lease.register, lease.key, seen)
                    return
        elif not told:
            send({"event": "waiting"})
            told = True
        looked = time.monotonic()
        time.sleep(POLL)
        try:
            now = newest(*lease.register.page(lease.key)).get(lease.key)
        except lease.register.Error:
            watched = 0.0  # the owner could not renew it either
            continue
        # If this process was stopped itself, the owner may have been, too: that time does not count.
        watched = watched + min(time.monotonic() - looked, 2 * POLL) if now == seen else 0.0
        seen = now


def available(claim: Claim | None, folder: Path) -> bool:
    """Whether a lease may be taken at once by who holds the lock of ``folder``."""
    return claim is None or claim.free or remembers(folder, claim.owner)


def await_end(register: "Register", key: str, before: Claim | None) -> None:
    """Wait until the owner of an expired lease must know of its end, if it has come back in the last moment."""
    beat = None
    with contextlib.suppress(*register.Error):
        beat = register.page(key)[1].get(f"{key}.{before.number}" if before else "", "")
    if before is None or beat != before.beat:
        time.sleep(EXPIRES)


def release_dead(register: "Register", key: str, folder: Path) -> bool:
    """Give back the lease of a process of ``folder`` that has died. False if the key has a living owner, as far as can
    be known."""
    try:
        with checkpoint.acquired(folder) if folder.is_dir() else contextlib.nullcontext():
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
    with files.naming(folder / "lease"):
        (folder / "lease").write_text("\n".join([place(folder), *known, ""]))


def remembers(folder: Path, owner: str) -> bool:
    """Whether ``owner`` was a process that held the lock of ``folder``: who holds that now knows that it is dead."""
    return owner in owners(folder)


def owners(folder: Path) -> list[str]:
    """The owners that are known to have held the lock of ``folder``."""
    try:
        where, *known = (folder / "lease").read_text().split("\n")[:-1]  # a half-written line names nobody
    except (OSError, ValueError):
        return []
    return known if where == place(folder) else []


def place(folder: Path) -> str:
    """What tells a folder from its copies, here or on another machine."""
    return f"{platform.node()} {folder.stat().st_ino}"
