"""Where and with what a run is made: commit, versions, hardware. Standard library; torch only to name a GPU."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
"""The folder of the checkout: the default root."""


def default_root() -> Path:
    """Where runs, reports and cached data go unless the command says otherwise: ``$LIT_MEMORY_ROOT`` or the project's
    folder."""
    return Path(os.environ.get("LIT_MEMORY_ROOT") or PROJECT).absolute()


def cache_folder() -> Path:
    """What can be made again from data: trained tokenizers, tokenized books."""
    return default_root() / "data" / "cache"


def git(*arguments: str) -> str:
    """Output of a git command in the project's folder, "" where there is no git or no repository."""
    try:
        return subprocess.run(
            ["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def provenance() -> dict[str, str]:
    """Where and with what a run is made."""
    packages = " ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "mlflow"))
    changed = git("status", "--porcelain", "--", "lit_memory", "experiments", "run.py")
    return {
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "dirty": str(bool(changed)).lower(),
        "versions": f"lit-memory {version('lit-memory')}, Python {platform.python_version()}, {packages}",
        "hardware": hardware(),
    }


def cores() -> int:
    """Cores that this process may use, which a batch system or ``taskset`` makes fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> str:
    """Processor, cores and GPU."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        model = next(
            (
                line.partition(":")[2].strip()
                for line in cpuinfo.read_text().splitlines()
                if line.startswith("model name")
            ),
            "",
        )
    return ", ".join(filter(None, [model or platform.machine(), f"{cores()} cores", gpu()]))


def gpu() -> str:
    """The name of the first GPU, "" where torch finds none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
