"""Measurements of the benchmarks: seconds of a call, and the peak memory of the process."""

import time
from collections.abc import Callable
from pathlib import Path


def seconds(run: Callable[[], None]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def highest() -> float:
    """Peak resident memory of this process in MiB (Linux). ``ru_maxrss`` would include the parent's at the fork."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
