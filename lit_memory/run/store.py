"""The MLflow store of a command: checked before MLflow is imported, as far as that is possible, then opened."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lit_memory.plan.errors import ConfigError
from lit_memory.run.database import is_whole, relocate
from lit_memory.run.folders import check_root, make_root, set_caches
from lit_memory.run.server import check_server
from lit_memory.run.uri import VARIABLE, StoreURI

if TYPE_CHECKING:
    from lit_memory.run.tracking import Tracker

Warn = Callable[[str], None]
HEADER = b"SQLite format 3\0"


def check_store(root: Path, uri: StoreURI) -> None:
    """Raise ConfigError for a tracking URI that MLflow cannot use. Needs neither MLflow nor the network."""
    uri.check()
    path = database(root, uri)
    if path is None:
        return
    where = VARIABLE if uri.text else str(path)
    if path.is_dir():
        raise ConfigError(where, "", f"{path} is a folder; expected the file of an SQLite database")
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(len(HEADER))
        if start and start != HEADER:  # SQLite takes an empty file for a new database
            raise ConfigError(where, "", f"{path} is not an SQLite database; expected MLflow's, or no file")
    elif uri.text:
        check_root(path.parent, where, write=False)


def database(root: Path, uri: StoreURI) -> Path | None:
    """The SQLite file behind a tracking URI; None for a server."""
    return uri.file if uri.text else root / "mlflow.db"


def open_tracker(root: Path, warn: Warn = lambda line: None, dry_run: bool = False) -> "Tracker":
    """The tracker of a root, which is created where it does not exist. Raises ConfigError.

    The artifacts of a root with a database of its own are looked for below it, wherever it lay before. warn: receives
    what the user should know. dry_run: change nothing.
    """
    uri = StoreURI.of_environment()
    check_store(root, uri)
    check_server(uri)
    if not dry_run:
        make_root(root)
    set_caches(root)
    from lit_memory.run.tracking import Tracker

    tracker = Tracker(root, warn=warn)
    path = tracker.uri.file
    if path is not None and path.parent.resolve() == root.resolve() and not dry_run:
        relocate(path)
    return tracker


def find_tracker(root: Path, warn: Warn = lambda line: None, dry_run: bool = False) -> "Tracker | None":
    """``open_tracker`` where there is a database already, else None: a dry run creates nothing."""
    path = database(root, StoreURI.of_environment())
    return open_tracker(root, warn, dry_run) if path is None or is_whole(path) else None
