"""Files that are whole or absent, and the messages for a full disk and for missing rights. Standard library only."""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from tempfile import gettempdir
from typing import BinaryIO
from uuid import uuid4

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk, or of a limit on the disk's use or on the sizes of files."""
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
"""Errors of a file that belongs to another user, or of a file system that is mounted read-only."""
SQLITE_FULL = ("database or disk is full", "disk I/O error")
"""SQLite's messages when it cannot write."""
SHARED = Path("/dev/shm")
"""Shared memory, through which the workers of a data loader send their batches."""
SHARED_FULL = ("unable to allocate shared memory", "out of shared memory", "killed by signal: Bus error")
"""torch's messages when there is none left; Linux kills a process that writes to memory that cannot be had."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends, and leaves no trace if the block fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = staging(path)
    try:
        with naming(path), staged.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def staging(path: Path) -> Path:
    """A name beside ``path`` that nobody else takes: machines that share a folder have processes of the same number."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp")


def write(path: Path, content: bytes) -> None:
    """Write a whole file at once."""
    with replacing(path) as file:
        file.write(content)


def write_all(folder: Path, contents: Mapping[str, bytes], without: Iterable[str] = ()) -> dict[str, Path]:
    """Write several files of a folder, or none: each is staged beside its path, then all are renamed in order.

    without: files that are removed afterwards, as none of the new ones mentions them. Returns name -> path.
    """
    staged = {name: staging(folder / name) for name in contents}
    try:
        for name, content in contents.items():
            with naming(folder / name):
                write(staged[name], content)
        for name in contents:
            os.replace(staged[name], folder / name)
        for name in without:
            (folder / name).unlink(missing_ok=True)
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)
    return {name: folder / name for name in contents}


def append(file: RawIOBase, line: bytes) -> None:
    """Append one line whole to a file without a buffer, or raise OSError and leave the file as it was. One call of the
    system writes it, so that no signal comes in between."""
    size, written = os.fstat(file.fileno()).st_size, 0
    try:
        while written < len(line):
            written += file.write(line[written:]) or 0
    except OSError:
        os.ftruncate(file.fileno(), size)
        raise


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block for the folder, and keep others out: around what reads a file and
    writes it anew. Leaves no file, or a hidden one where a network file system locks only what is open for writing."""
    try:
        place = _locked(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        place = _locked(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        yield
    finally:
        os.close(place)


def _locked(path: Path, flags: int) -> int:
    """A descriptor of a file or folder, with the lock that others wait for."""
    place = os.open(path, flags)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
    except BaseException:
        os.close(place)
        raise
    return place


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the operating system name ``path``: a failed write() names no file, and the user knows no staged
    files."""
    try:
        yield
    except Exception as error:
        for cause in chain(error):
            if isinstance(cause, OSError) and cause.errno is not None:
                cause.filename = str(path)
        raise


def remove_staged(folder: Path) -> None:
    """Remove the staged files of a killed process. Only for a folder that no other process writes to."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def disk_full(error: BaseException, root: Path) -> str | None:
    """One line with the path and the free bytes if ``error`` comes from a full disk (``FULL``) or from full shared
    memory; else None.

    root: named where the error does not name the file and no other place has less room.
    """
    for cause in chain(error):
        text = str(cause)
        if any(words in text for words in SHARED_FULL):
            path = SHARED
        elif isinstance(cause, OSError) and cause.errno in FULL:
            name = cause.filename2 or cause.filename  # of a copy, its target
            path = Path(os.fsdecode(name)) if name else fullest(root)
        elif any(words in text for words in SQLITE_FULL):
            path = root
        else:
            continue
        free = (
            f"{free_bytes(path):,} bytes are free{', but its file system may have no more files' * without_files(path)}"
        )
        advice = "give it more, or set train.workers=0," if path == SHARED else "make room"
        return f"{path}: no room to write it, {free}; {advice} and run the same command again"
    return None


def fullest(root: Path) -> Path:
    """The place with the least room of those where a file without a name may lie: locks and queues of processes are in
    shared memory."""
    return min((root, Path(gettempdir()), *[SHARED] * SHARED.is_dir()), key=free_bytes)


def existing(path: Path) -> Path:
    """``path``, or the first of its parents that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that has, or would have, ``path``."""
    return shutil.disk_usage(existing(path)).free


def without_files(path: Path) -> bool:
    """Whether the file system of ``path`` may have no more files."""
    system = os.statvfs(existing(path))
    return bool(system.f_files) and not system.f_favail


def refused(error: BaseException) -> str | None:
    """One line if ``error`` comes from a file that this user may not read or write (``REFUSED``); else None."""
    for cause in chain(error):
        if isinstance(cause, OSError) and cause.errno in REFUSED and cause.filename:
            path = os.fsdecode(cause.filename)
            return f"{path}: {os_reason(cause)}; expected a file or folder that this user may read and write"
    return None


def storage_problem(error: BaseException, root: Path) -> str | None:
    """One line for what only the user can set right, a full disk or missing rights; None for any other error."""
    return disk_full(error, root) or refused(error)


def os_reason(error: BaseException) -> str:
    """The operating system's words for an error, without the path and the number."""
    return getattr(error, "strerror", None) or str(error)
