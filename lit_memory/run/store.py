"""The MLflow store of a command: checked before MLflow is imported, as far as that is possible, then opened."""

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from lit_memory.plan.errors import ConfigError
from lit_memory.run.folders import check_root, make_root, set_font_cache
from lit_memory.util.checks import nearest
from lit_memory.util.files import os_reason

if TYPE_CHECKING:
    from lit_memory.run.tracking import Tracker

SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
"""Stores that MLflow 3 can write to. It refuses its old folders of text files."""
TIMEOUT = 5.0
"""Seconds that a server has for its first answer; MLflow itself would try for minutes."""
HEADER = b"SQLite format 3\0"
VARIABLE = "MLFLOW_TRACKING_URI"


def uri_of_environment() -> str:
    """``MLFLOW_TRACKING_URI``; "" is the default, a database below the root."""
    return os.environ.get(VARIABLE) or ""


def check_store(root: Path, uri: str) -> None:
    """Raise ConfigError for a tracking URI that MLflow cannot use. Needs neither MLflow nor the network."""
    scheme = urlsplit(uri).scheme.partition("+")[0] if "://" in uri else uri
    if uri and scheme not in SCHEMES:
        hint = nearest(scheme, SCHEMES)
        raise ConfigError(VARIABLE, "", f"{uri!r}: expected sqlite:///FILE or http://HOST:PORT; {hint}")
    if scheme in ("http", "https") and not urlsplit(uri).hostname:
        raise ConfigError(VARIABLE, "", f"{uri!r}: names no host; expected {scheme}://HOST:PORT")
    path = database(root, uri)
    if path is None:
        return
    where = VARIABLE if uri else str(path)
    if path.is_dir():
        raise ConfigError(where, "", f"{path} is a folder; expected the file of an SQLite database")
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(len(HEADER))
        if start and start != HEADER:  # SQLite takes an empty file for a new database
            raise ConfigError(where, "", f"{path} is not an SQLite database; expected MLflow's, or no file")
    elif uri:
        check_root(path.parent, where, write=False)


def database(root: Path, uri: str) -> Path | None:
    """The SQLite file behind a tracking URI; None for a server."""
    if not uri:
        return root / "mlflow.db"
    return Path(uri.partition(":///")[2]) if uri.startswith("sqlite") else None


def check_server(uri: str) -> None:
    """Raise ConfigError if nothing answers at an http(s) URI, or what answers is broken. Other URIs pass.

    An answer such as 401 or 404 comes from a living server. urllib uses the proxies of the environment, as MLflow does.
    """
    if not uri.startswith(("http://", "https://")):
        return
    try:
        urlopen(Request(f"{uri.rstrip('/')}/health"), timeout=TIMEOUT).close()
    except HTTPError as problem:
        problem.close()
        if problem.code < 500:
            return
        answer = f"the server answers {problem.code} {problem.reason}"
        raise ConfigError(VARIABLE, "", f"{uri}: {answer}; expected an MLflow server") from None
    except (OSError, ValueError) as problem:
        inner = problem.reason if isinstance(problem, URLError) else problem
        why = os_reason(inner if isinstance(inner, Exception) else problem)
        advice = "start one with `mlflow server` or unset the variable"
        raise ConfigError(VARIABLE, "", f"{uri}: no server answers ({why}); {advice}") from None


def open_tracker(root: Path) -> "Tracker":
    """The tracker of a root, which is created where it does not exist. Raises ConfigError."""
    check_server(uri_of_environment())
    make_root(root)
    set_font_cache(root)
    from lit_memory.run.tracking import Tracker

    return Tracker(root)


def find_tracker(root: Path) -> "Tracker | None":
    """``open_tracker`` where there is a database already, else None: a dry run creates nothing."""
    path = database(root, uri_of_environment())
    return None if path is not None and not path.is_file() else open_tracker(root)
