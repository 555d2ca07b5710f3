"""The registry of benchmarks."""

from benchmarks import armt, babilong, generate, mamba, steps, stream, titans
from benchmarks.work import Work

WORKS: dict[str, Work] = {
    name: work
    for part in (steps, armt, mamba, titans, stream, babilong, generate)
    for name, work in part.works().items()
}
"""Name -> work. A new one is a line of its file's ``works``."""
