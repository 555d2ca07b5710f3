"""The root folder of a command, checked before anything is created, and the folders of its reports. Standard
library."""

import hashlib
import json
import os
import platform
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.report.catalogue import is_complete
from lit_memory.run.options import Options
from lit_memory.util.files import os_reason
from lit_memory.util.provenance import default_root

CONTENTS = ("checkpoints", "reports", "mlruns", "mlflow.db", "mlflow.db.lock")
"""What a command writes to below its root."""


def root_of(options: Options) -> Path:
    """The folder that the command writes to. Raises ConfigError for one that it cannot write to."""
    if options.root == "":
        raise ConfigError("command line", "--root", "'': expected a folder")
    root = Path(options.root).absolute() if options.root else default_root()
    check_root(root, "--root" if options.root else "LIT_MEMORY_ROOT", write=not options.dry_run)
    return root


def check_root(root: Path, source: str, write: bool) -> None:
    """Raise ConfigError unless ``root`` is a folder or can become one.

    source: the flag or environment variable that names it.
    write: whether the folder must be writable.
    """

    def error(message: str) -> ConfigError:
        where, key = ("command line", source) if source.startswith("--") else (source, "")
        return ConfigError(where, key, message)

    if any("\ud800" <= c <= "\udfff" for c in str(root)):  # bytes that Python could not decode
        raise error(f"{str(root)!r}: expected a name in UTF-8: MLflow writes it as text")
    for folder in (root, *root.parents):
        try:
            mode = folder.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue  # its parents decide
        except (OSError, ValueError) as problem:
            raise error(f"{root}: {os_reason(problem)}; expected a folder") from None
        if not stat.S_ISDIR(mode):
            raise error(f"{folder} is a file; expected a folder")
        if write:
            for path in (folder, *(root / name for name in CONTENTS if (root / name).exists())):
                kind, mode = ("folder", os.W_OK | os.X_OK) if path.is_dir() else ("file", os.W_OK)
                if not os.access(path, mode):
                    raise error(f"{path} may not be written to; expected a {kind} of yours")
        return


def make_root(root: Path) -> None:
    """Create the root. Raises ConfigError where the file system refuses in spite of its permissions."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        message = f"{root}: {os_reason(problem)}; expected a folder that can be created"
        raise ConfigError("command line", "--root", message) from None


def location(root: Path) -> str:
    """A root on this machine, by its one name without links, as a tag. Locks of runs that were started elsewhere cannot
    be seen from here."""
    return f"{platform.node()}:{os.path.realpath(root)}".replace("'", "_")


def set_caches(root: Path) -> None:
    """Keep matplotlib's font cache and the code that numba has compiled below the root, not in the home folder. Must
    come before the import of Lightning, which imports matplotlib."""
    os.environ.setdefault("MPLCONFIGDIR", str(root / "checkpoints" / ".matplotlib"))
    os.environ.setdefault("NUMBA_CACHE_DIR", str(root / "checkpoints" / ".numba"))


def set_kernel_cache() -> None:
    """Point torch's cache of compiled kernels at an existing folder.

    We compile none, but torch creates the folder as soon as a model is built on the device "meta", and a plan or a
    wrong file must leave nothing behind.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", gettempdir())


@dataclass(frozen=True)
class ReportFolders:
    """Where the reports of an experiment at one scale go."""

    complete: Path
    incomplete: Path
    """For a report with missing runs, while the one in ``complete`` has none."""

    def target(self, whole: bool) -> Path:
        """The folder of a new report. whole: it misses no run."""
        return self.complete if whole or not is_complete(self.complete) else self.incomplete


def check_name(experiment: str, file: str) -> None:
    """Raise ConfigError for a name that is not the file's: a copy of a file would replace the reports of the first."""
    own = Path(file).stem
    if experiment != own:
        reason = f"{experiment!r}: the reports of another file may have this name"
        raise ConfigError(file, "experiment", f"{reason}; expected that of this file, {own}")


def setting(scale: str, changes: Mapping[str, Any]) -> str:
    """The name of a scale, with a checksum of the changes of the command line where there are some: what has reports,
    and a parent run in MLflow, of its own."""
    checksum = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()
    return f"{scale}-modified-{checksum[:6]}" if changes else scale


def report_folders(
    root: Path, experiment: str, scale: str, changes: Mapping[str, Any], default_scale: bool
) -> ReportFolders:
    """``reports/<experiment>`` for the default scale without changes of the command line; a folder below it for every
    other scale and every set of changes."""
    folder, name = root / "reports" / experiment, setting(scale, changes)
    complete = folder if default_scale and not changes else folder / name
    return ReportFolders(complete, folder / f"{name}-incomplete")
