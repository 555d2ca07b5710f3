"""Where a call of the command writes and reads: its root and its MLflow server, checked before anything is created.
Standard library."""

import os
import stat
from pathlib import Path
from tempfile import gettempdir
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from lit_memory.plan.errors import ConfigError
from lit_memory.util.checks import nearest

SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
"""Stores that MLflow 3 can write to. Its folders of text files are retired: it refuses to open one."""
TIMEOUT = 5.0
"""Seconds that a server has for its first answer; MLflow by itself tries for minutes."""
HEADER = b"SQLite format 3\0"


def check_root(root: Path, source: str, write: bool) -> None:
    """Raise ConfigError unless ``root`` is a folder or can become one; with ``write``, one that may be written to."""

    def error(message: str) -> ConfigError:
        where, key = ("command line", source) if source.startswith("--") else (source, "")
        return ConfigError(where, key, message)

    for folder in (root, *root.parents):
        try:
            mode = folder.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue  # what is above decides
        except (OSError, ValueError) as problem:
            raise error(f"{root}: {reason(problem)}; expected a folder") from None
        if not stat.S_ISDIR(mode):
            raise error(f"{folder} is a file; expected a folder")
        if write and not os.access(folder, os.W_OK | os.X_OK):
            raise error(f"{folder} may not be written to; expected a folder of yours")
        return


def make_root(root: Path) -> None:
    """Create the root. Raises ConfigError where the file system refuses, which may know more than its permissions
    tell."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(
            "command line", "--root", f"{root}: {reason(problem)}; expected a folder that can be created"
        ) from None


def font_cache(root: Path) -> None:
    """Have matplotlib keep its list of fonts below the root in place of the home folder, before Lightning imports
    it."""
    os.environ.setdefault("MPLCONFIGDIR", str(root / "checkpoints" / ".matplotlib"))


def kernel_cache() -> None:
    """Name a folder that exists for torch's compiled kernels, of which we have none: torch creates one as soon as a
    model is built on the device "meta", and a plan or a wrong file must leave nothing behind."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", gettempdir())


def reason(problem: Exception) -> str:
    """Why the operating system said no, without the path and the number."""
    return getattr(problem, "strerror", None) or str(problem)


def check_store(root: Path, uri: str) -> None:
    """Raise ConfigError for a tracking URI that MLflow cannot use, as far as can be told without MLflow and without the
    network."""
    scheme = urlsplit(uri).scheme.partition("+")[0] if "://" in uri else uri
    if uri and scheme not in SCHEMES:
        raise ConfigError(
            "MLFLOW_TRACKING_URI",
            "",
            f"{uri!r}: expected sqlite:///FILE or http://HOST:PORT; {nearest(scheme, SCHEMES)}",
        )
    if scheme in ("http", "https") and not urlsplit(uri).hostname:
        raise ConfigError("MLFLOW_TRACKING_URI", "", f"{uri!r}: names no host; expected {scheme}://HOST:PORT")
    path = database(root, uri)
    if path is None:
        return
    where = "MLFLOW_TRACKING_URI" if uri else str(path)
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

    By urllib, which knows the proxies of the environment as MLflow does. An answer such as 401 or 404 is one of
    somebody who lives.
    """
    if not uri.startswith(("http://", "https://")):
        return
    try:
        urlopen(Request(f"{uri.rstrip('/')}/health"), timeout=TIMEOUT).close()
    except HTTPError as problem:
        problem.close()
        if problem.code < 500:
            return
        raise ConfigError(
            "MLFLOW_TRACKING_URI",
            "",
            f"{uri}: the server answers {problem.code} {problem.reason}; expected an MLflow server",
        ) from None
    except (OSError, ValueError) as problem:
        why = (
            reason(problem.reason)
            if isinstance(problem, URLError) and isinstance(problem.reason, Exception)
            else reason(problem)
        )
        raise ConfigError(
            "MLFLOW_TRACKING_URI",
            "",
            f"{uri}: no server answers ({why}); start one with `mlflow server` or unset the variable",
        ) from None
