"""What the benchmarks measure with: the seconds of a call, and the most memory that a process has had."""

import time
from collections.abc import Callable
from pathlib import Path


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def highest() -> float:
    """MiB that this process has had at most (Linux). ``ru_maxrss`` would begin at what the process had that started
    it."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
