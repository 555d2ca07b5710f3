"""The folder of a run: its lock, and its checkpoints, which are written whole and verified before they are read.

``step-00000250.ckpt`` holds the run after 250 steps, ``step-00000250.ckpt.sha256`` its digest. The digest is written
first, so that a checkpoint without one, or with another one, is damaged. The two newest checkpoints are kept.
"""

import contextlib
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from filelock import FileLock, Timeout

from lit_memory.util import files

if TYPE_CHECKING:
    from lit_memory.lit.callbacks.progress import Send

KEEP = 2
"""Checkpoints that are kept: an older one serves where the newest is damaged."""


BRIEFLY = 0.2
"""Seconds in which a lock that is in use may become free: who asks for it (``locked``) has it for a moment."""


class CheckpointError(Exception):
    """A checkpoint that must not be read."""


def lock(folder: Path) -> FileLock:
    """The lock of a run, held by the process that trains it. The operating system frees it with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / "lock")


def acquired(folder: Path) -> AbstractContextManager[object]:
    """Hold the lock of a run in a block. Raises Timeout where another process trains it."""
    return lock(folder).acquire(timeout=BRIEFLY, poll_interval=BRIEFLY / 20)


@contextlib.contextmanager
def held(folder: Path, send: "Send") -> Iterator[None]:
    """Hold the lock of a run; wait for another process that trains it. send: is told of the wait."""
    own = lock(folder)
    try:
        own.acquire(blocking=False)
    except Timeout:
        send({"event": "waiting"})
        own.acquire()
    try:
        yield
    finally:
        own.release()


def locked(folder: Path) -> bool:
    """Whether a process trains the run of this folder now. Needs no right to write, and does not keep others from
    asking the same."""
    with contextlib.suppress(FileNotFoundError), (folder / "lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # filelock, which opens a file to write, holds LOCK_EX
        except BlockingIOError:
            return True
    return False


class Hashing:
    """A file that computes its digest while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, content) -> int:
        self.sha256.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        self.file.flush()


def path_of(folder: Path, step: int) -> Path:
    """The file of the checkpoint after ``step`` steps."""
    return folder / f"step-{step:08d}.ckpt"


def digest_file(path: Path) -> Path:
    """The file with the digest of a checkpoint."""
    return path.with_name(f"{path.name}.sha256")


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    return sorted(folder.glob("step-*.ckpt"), reverse=True)


def save(path: Path, write: Callable[[Hashing], None]) -> None:
    """Write a checkpoint, then remove all but the newest ones.

    write: fills the file. If it fails, on a full disk for example, the other checkpoints stay as they were.
    """
    with files.replacing(path) as file:
        hashing = Hashing(file)
        write(hashing)
        path.unlink(missing_ok=True)  # a damaged one of the same step
        files.write(digest_file(path), hashing.sha256.hexdigest().encode())
    for old in saved(path.parent)[KEEP:]:
        remove(old)


def remove(path: Path) -> None:
    """Remove a checkpoint and its digest."""
    path.unlink(missing_ok=True)
    digest_file(path).unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Remove all checkpoints of a run."""
    for path in saved(folder):
        remove(path)


def damaged(path: Path) -> bool:
    """Whether a checkpoint differs from what was written."""
    digest = digest_file(path)
    return not digest.is_file() or digest.read_bytes() != files.digest(path).encode()


def newest(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint; None where there is no checkpoint.

    warn: receives a message for every damaged one that is passed over. Raises CheckpointError if all are damaged: the
    user decides what to do with them.
    """
    found = saved(folder)
    for path in found:
        if not damaged(path):
            return path
        if path is not found[-1]:
            warn(f"{path}: damaged (its checksum does not match); going on from an older one")
    if found:
        problem = "damaged (its checksum does not match), and no older one is intact"
        raise CheckpointError(f"{found[0]}: {problem}; delete it, or use --fresh, to train anew")
    return None
