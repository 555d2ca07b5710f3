"""The folder of a run: its checkpoints, written whole, with a checksum beside them, verified before they are read; and
its lock.

``step-00000250.ckpt`` holds the run after 250 steps, ``step-00000250.ckpt.sha256`` its digest. The digest is there
first, so that a checkpoint without one, or with another one, is damaged. The two newest stay.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from lit_memory.util import files

KEEP = 2


class CheckpointError(Exception):
    """A checkpoint that must not be read."""


def lock(folder: Path) -> FileLock:
    """Held by the one process that trains the run of this folder; free as soon as that process is gone."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / "lock")


def locked(folder: Path) -> bool:
    """Whether a process trains the run of this folder now. Creates nothing."""
    if not (folder / "lock").is_file():
        return False
    try:
        with FileLock(folder / "lock", blocking=False):
            return False
    except Timeout:
        return True


class Hashing:
    """A file whose digest grows as it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, content) -> int:
        self.sha256.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        self.file.flush()


def place(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:08d}.ckpt"


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    return sorted(folder.glob("step-*.ckpt"), reverse=True)


def digest_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def save(path: Path, write: Callable[[Hashing], None]) -> None:
    """Put a checkpoint at ``path``, which ``write`` fills, then remove all but the newest ones.

    A failure, a full disk say, leaves the others as they were.
    """
    with files.replacing(path) as file:
        hashing = Hashing(file)
        write(hashing)
        path.unlink(missing_ok=True)  # a damaged one of the same step
        files.write(digest_file(path), hashing.sha256.hexdigest().encode())
    for old in saved(path.parent)[KEEP:]:
        remove(old)


def remove(path: Path) -> None:
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
    """The newest intact checkpoint, None where there is none yet; ``warn`` is told of every damaged one that was passed
    over.

    Raises CheckpointError if all are damaged: what to do with them is for the user to say.
    """
    found = saved(folder)
    for path in found:
        if not damaged(path):
            return path
        if path is not found[-1]:
            warn(f"{path}: damaged (its checksum does not match); going on from an older one")
    if found:
        raise CheckpointError(
            f"{found[0]}: damaged (its checksum does not match), and no older one is intact; delete it, or use --fresh, to train anew"
        )
    return None
