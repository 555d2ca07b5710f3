"""Where runs go, and what made them: commit, versions, hardware. Standard library; torch only to name a GPU."""

import hashlib
import os
import platform
import subprocess
import sysconfig
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_ABOVE = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (_ABOVE / "run.py").is_file()
"""Whether the package lies in a folder of its source, and not among installed ones."""
PROJECT = _ABOVE if IS_CHECKOUT else Path(sysconfig.get_path("data")) / "share" / "lit-memory"
"""The folder of the project's experiments: the checkout, or where a wheel puts them."""
EXPERIMENTS = PROJECT / "experiments"


def default_root() -> Path:
    """The folder of runs, reports and cached data without ``--root``: ``$LIT_MEMORY_ROOT``, the checkout's folder, or
    that in which an installed package is called."""
    return Path(os.environ.get("LIT_MEMORY_ROOT") or (PROJECT if IS_CHECKOUT else Path.cwd())).absolute()


def cache_folder() -> Path:
    """Folder of files that are made again when they are missing: trained tokenizers, tokenized books."""
    return default_root() / "data" / "cache"


def git(*arguments: str) -> str:
    """Output of a git command in the project's folder, "" where there is no git or no repository. Writes nothing."""
    if not IS_CHECKOUT:
        return ""  # an environment may lie in a repository of its user
    command = ["git", "--no-optional-locks", "-C", str(PROJECT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def provenance() -> dict[str, str]:
    """Commit, code, versions and hardware of this process, as tags of its runs."""
    names = ["torch", "lightning", "mlflow", "numpy", "tokenizers", *(["numba"] if find_spec("numba") else [])]
    packages = " ".join(f"{name} {version(name)}" for name in names)
    changed = git("status", "--porcelain", "--", "lit_memory", "experiments", "data", "run.py")
    return {
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "dirty": str(bool(changed)).lower(),
        "versions": f"lit-memory {version('lit-memory')}, Python {platform.python_version()}, {packages}",
        "hardware": hardware(),
        "code": code(),
    }


def as_of_now(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags of a command, for a run that begins after it: with a provenance of its own where the code is another by
    now."""
    return {**tags, **(provenance() if "code" in tags and code() != tags["code"] else {})}


def package_files(package: Path) -> list[Path]:
    """The files of our package, or of a copy of it, that results depend on."""
    return sorted(path for path in package.rglob("*") if path.suffix in (".py", ".csv"))


def code() -> str:
    """A hash of the package's code, which tells two states apart that no commit has."""
    parts = hashlib.sha256()
    for path in package_files(_ABOVE / "lit_memory"):
        parts.update(f"{path.relative_to(_ABOVE).as_posix()}\0".encode() + path.read_bytes())
    return parts.hexdigest()[:12]


def code_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between the code of two processes, by their ``provenance``: "commit a -> b; torch 2.4 -> 2.5".

    before: a run that went on several times has "old; new". Another machine is no other code.
    """
    parts: list[str] = []
    for name in ("commit", "dirty", "versions", "code"):
        old, new = before.get(name, "").rpartition("; ")[2], now.get(name, "")
        if old and new and old != new:
            both = set(old.split(", ")) & set(new.split(", "))
            old, new = (", ".join(part for part in text.split(", ") if part not in both) for text in (old, new))
            parts.append(f"{name} {old} -> {new}")
    return "; ".join(parts)


def cores() -> int:
    """Cores that this process may use: a batch system or ``taskset`` may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> str:
    """Processor, cores and GPU."""
    return ", ".join(filter(None, [processor() or platform.machine(), f"{cores()} cores", gpu()]))


def processor() -> str:
    """The name of the processor, "" where the system has no /proc/cpuinfo."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def gpus() -> int:
    """GPUs that torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu() -> str:
    """The name of the first GPU, "" where torch finds none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
