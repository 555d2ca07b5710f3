"""Files that users name: regular ones with UTF-8 text, packed as ``.xz`` or not, or an error of one line with the file,
the line and what was expected; and the digest of what they hold. Standard library only."""

import csv
import hashlib
import io
import lzma
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from lit_memory.util import files
from lit_memory.util.files import os_reason

PACKED = ".xz"
"""End of the name of a file that is read through ``lzma``."""
KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
BEGINNINGS = {
    b"\x1f\x8b": "a gzip archive; unpack it",
    b"BZh": "a bzip2 archive; unpack it",
    b"\xfd7zXZ\0": "an xz archive; unpack it",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8",
}
"""First bytes of a file -> what it is in place of UTF-8 text."""


def missing(path: str | Path, kind: int = stat.S_IFDIR) -> str:
    """Why a user cannot read the folder (or with S_IFREG the file) of this name, in words; "" if it can be read."""
    what = "folder" if kind == stat.S_IFDIR else "file"
    try:
        found = stat.S_IFMT(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return f"no such {what}"
    except (OSError, ValueError) as error:  # no permission, a name that is too long, a circle of links, NUL
        return os_reason(error)
    if found != kind:
        return f"is {KINDS[found]}"
    return "" if os.access(path, os.R_OK | (os.X_OK if kind == stat.S_IFDIR else 0)) else "Permission denied"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ValueError, in one line, if the block cannot read ``path``. What is no regular file is not even opened:
    nobody may ever write to a pipe, and a device has no end."""
    try:
        found = stat.S_IFMT(path.stat().st_mode)
        if found != stat.S_IFREG:
            raise ValueError(f"{path}: is {KINDS[found]}; expected a file")
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({os_reason(error)}); expected a file of yours") from None
    except MemoryError:
        raise ValueError(f"{path}: does not fit into memory; expected a smaller file") from None


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with its line ends as they are and without a byte order mark. A file whose name ends
    with ``PACKED`` is unpacked in memory.

    Raises ValueError that names the file and the line, for another archive, bytes that are not UTF-8 and NUL.
    """
    with reading(path):
        content = path.read_bytes()
        if path.suffix == PACKED:
            content = _unpacked(content, path)
    for beginning, what in BEGINNINGS.items():
        if content.startswith(beginning):
            raise ValueError(f"{path}: is {what}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what, position = "not UTF-8 text", error.start
    else:
        what, position = "not text", content.find(0)
        if position < 0:
            return text
    line, byte = content.count(b"\n", 0, position) + 1, f"byte {position:,} of the file is {content[position]:#04x}"
    raise ValueError(f"{path}:{line}: {what} ({byte}); convert the file, or take it away")


def _unpacked(content: bytes, path: Path) -> bytes:
    try:
        return lzma.decompress(content, lzma.FORMAT_XZ)
    except lzma.LZMAError as error:
        raise ValueError(f"{path}: not a whole {PACKED} file ({error}); expected one that xz has packed") from None


def plain_name(path: Path) -> Path:
    """The path of a file without ``PACKED``."""
    return path.with_suffix("") if path.suffix == PACKED else path


def text_files(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder whose plain names match, packed or not, in the order of these names. Of one that is there
    twice the plain file."""
    found = {plain_name(path): path for path in folder.glob(pattern + PACKED)}
    found |= {path: path for path in folder.glob(pattern)}
    return [found[name] for name in sorted(found)]


def read_table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of every row of a CSV file, the names of the columns first; lines without fields are left out.

    Raises ValueError that names the file and the line, for a file without rows, for names that occur twice, for a row
    with more or fewer fields than names and for a quotation mark that is not closed.
    """
    csv.field_size_limit(sys.maxsize)  # a gene is longer than the 131,072 characters of the csv module
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    names, line = list[str](), 1
    try:
        for row in reader:
            if not names:
                names = row
                if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
                    raise ValueError(f"{path}:{line}: two columns are called {twice!r:.80}; expected different names")
            if row and len(row) != len(names):
                expected = f"expected {len(names)} fields, as many as there are names of columns"
                raise ValueError(f"{path}:{line}: {expected}; got {len(row)}")
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{line}: not CSV ({error}); expected fields between commas") from None
    if not names:
        raise ValueError(f"{path}:1: expected the names of the columns; the file is empty")


def digest(path: Path) -> str:
    """Digest of what a file holds, or of all files in a folder with their names: not of hidden ones and ``*.md``.

    A file that keeps its size and time is read once in a process. Raises ValueError for one that cannot be read.
    """
    if path.is_file():
        return _digest(path)
    parts = [(file.relative_to(path).as_posix(), _digest(file)) for file in sorted(_below(path))]
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _digest(path: Path) -> str:
    with reading(path):
        found = path.stat()
        return _digest_of(path, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest_of(path: Path, *stamp: int) -> str:
    return files.digest(path)


def _below(folder: Path) -> Iterator[Path]:
    """The files of ``digest``. Links are followed; in a circle of them each folder counts once."""
    seen = set[str]()
    for where, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(where)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(where, name) for name in names if not name.startswith(".") and not name.endswith(".md"))
        yield from (path for path in paths if path.is_file())
