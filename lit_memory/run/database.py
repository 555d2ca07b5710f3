"""The database behind an MLflow store, apart from MLflow: its URI, its lock, and an SQLite file that is whole.

MLflow makes an SQLite database in hundreds of steps. Ours is made beside its place and renamed when it is whole.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import url2pathname

from filelock import FileLock

from lit_memory.run.uri import StoreURI

ARTIFACTS = "mlruns"
"""The folder of artifacts beside an SQLite database."""
COMPANIONS = ("", "-journal", "-wal", "-shm")
"""Endings of the files that SQLite has for one database."""
WAIT = 600
"""Seconds that MySQL waits for a lock."""
OURS = """
select experiment_id from runs join tags using (run_uuid) where tags.key = 'lit.kind'
union select experiment_id from experiment_tags where key = 'lit.index'
"""
"""SQL for the experiments that have runs of ours, or the register of leases."""
LOCKS = {
    "postgresql": "select pg_advisory_xact_lock(7104106)",
    "mysql": f"select get_lock(sha1(concat('lit-memory ', database())), {WAIT})",
}
"""Kind of server -> SQL that waits for a lock on the database, which the server frees with the connection."""


def uri_of(path: Path) -> str:
    """The URI of an SQLite file, as SQLAlchemy 2.1 reads it: percent-encoded.

    In a name that needs it, the slashes are encoded too: MLflow makes the folders of a URI without decoding it.
    """
    plain = quote(str(path)) == str(path)
    return f"sqlite:///{path if plain else quote(str(path), safe='')}"


@contextmanager
def lock(uri: StoreURI, connect: Callable[[str], Any]) -> Iterator[None]:
    """Let one process at a time create something in a store. An MLflow server needs no lock: it is one process.

    connect: makes an SQLAlchemy engine of a URI.
    """
    path, statement = uri.file, LOCKS.get(uri.scheme)
    if path is not None and path.exists() and not os.access(path, os.W_OK):
        yield  # nobody creates anything there, but a plan can be read
    elif path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            yield
    elif statement:
        engine = connect(uri.text)
        try:
            with engine.connect() as connection:
                if connection.exec_driver_sql(statement).scalar() == 0:
                    raise TimeoutError(f"another process has held the database's lock for {WAIT} s")
                yield
        finally:
            engine.dispose()
    else:
        yield


def half_made(path: Path) -> bool:
    """Whether the creation of MLflow's tables was broken off: the first experiment is the last thing that it writes."""
    tables = ("experiments", "_alembic_tmp_experiments")
    query = f"select name from sqlite_master where type = 'table' and name in {tables}"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as database:
            found = [name for (name,) in database.execute(query)]
            rows = [database.execute(f"select 1 from {name} limit 1").fetchone() for name in found]
    except sqlite3.Error:  # absent, in use, or no database of SQLite: MLflow will say so
        return False
    return bool(found) and not any(rows)


def is_whole(path: Path) -> bool:
    """Whether there is a database at ``path`` that need not be created."""
    return path.is_file() and path.stat().st_size > 0 and not half_made(path)


def make_whole(path: Path, create: Callable[[Path], None], warn: Callable[[str], None]) -> None:
    """Let there be a whole database at ``path``; the caller holds its lock.

    create: makes one at another path. warn: receives a line if a half-made one was there, which gets another name.
    """
    if is_whole(path):
        return
    if half_made(path):
        aside = next(p for i in range(1, 10**6) if not (p := path.with_name(f"{path.name}.half-made-{i}")).exists())
        os.replace(path, aside)
        warn(f"{path}: its creation was broken off, so that it holds no run; it is {aside.name} now, beside a new one")
    new = path.with_name(f"{path.name}.new")
    remove(new)
    try:
        create(new)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        if not (path.is_file() and path.stat().st_size):  # else `mlflow ui`, which knows no lock, was faster
            remove(path)  # an empty file may have a journal, which SQLite would play back into the new one
            os.replace(new, path)
    finally:
        remove(new)


def remove(path: Path) -> None:
    """Remove an SQLite database with its journals."""
    for ending in COMPANIONS:
        path.with_name(path.name + ending).unlink(missing_ok=True)


def relocate(path: Path) -> None:
    """Let the artifacts of our experiments lie in ``ARTIFACTS`` beside their database.

    MLflow keeps absolute places: in a folder that was moved they are gone, and in a copy they are the original's. An
    experiment of the user follows where its artifacts are gone from the old place and lie at the new one.
    """
    home = (path.absolute().parent / ARTIFACTS).as_uri()
    with FileLock(f"{path}.lock"), closing(sqlite3.connect(path, timeout=20)) as database, database:
        rows = database.execute("select experiment_id, artifact_location from experiments").fetchall()
        places = {number: (str(old), f"{home}/{str(old).rpartition('/')[2]}") for number, old in rows}
        moved = {number: place for number, place in places.items() if has_moved(*place)}
        ours = {number for (number,) in database.execute(OURS)} if moved else set()
        for number, (old, new) in moved.items():
            if number not in ours and (is_there(old) or not is_there(new)):
                continue
            database.execute("update experiments set artifact_location = ? where experiment_id = ?", (new, number))
            database.execute(
                "update runs set artifact_uri = ? || substr(artifact_uri, ?)"
                " where experiment_id = ? and substr(artifact_uri, 1, ?) = ?",
                (new, len(old) + 1, number, len(old) + 1, f"{old}/"),
            )


def has_moved(old: str, new: str) -> bool:
    """Whether the place of an experiment is a folder in ``ARTIFACTS`` of this machine, and not the new one."""
    folder = old.rpartition("/")[0]
    return old != new and local_path(folder) is not None and folder.endswith(f"/{ARTIFACTS}")


def is_there(uri: str) -> bool:
    """Whether there is anything at an artifact URI of this machine."""
    place = local_path(uri)
    return place is not None and place.exists()


def local_path(uri: str) -> Path | None:
    """The path of an artifact URI; None for what lies on a server."""
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        return None
    return Path(url2pathname(parts.path) if parts.scheme else uri)
