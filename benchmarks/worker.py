"""``python -m benchmarks.worker WORK WAY``: one way of doing some work, in a process of its own.

Reads a line of JSON, {"settings", "tiny"}, runs the work at tiny sizes and once at its own, and answers with {"tokens",
"flops"}, the floating-point operations of its matrix products, or {"skipped"}. Every further line is answered by
{"seconds", "rate"}: what a run took, and the machine's matrix products per second just before it. The end of the input
is answered by {"peak"}, MiB that the process grew by at most.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.work import Skipped, Timed

SIDE = 768


def seconds(run) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def resident(field: str) -> float:
    """MiB of ``VmRSS``, the memory of this process, or of ``VmHWM``, its peak (Linux)."""
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) / 1024


def forget_peak() -> float:
    """Let the peak begin anew; returns the memory of this process."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def matrix_rate() -> float:
    """Operations per second of a matrix product that one core's caches hold."""
    a, b = torch.ones(2, SIDE, SIDE)
    return 2 * SIDE**3 / min(seconds(lambda: a @ b) for _ in range(3))


def prepare(name: str, way: str, request: dict[str, Any]) -> Timed:
    from benchmarks.works import WORKS

    if name not in WORKS:
        raise Skipped("this commit does not have it")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    return WORKS[name].ways[way](request["settings"], request["tiny"])


def main(name: str, way: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    request = json.loads(sys.stdin.readline())
    try:
        prepare(name, way, request | {"tiny": True}).run()  # what is imported, compiled and cached at first
        work = prepare(name, way, request)
    except Skipped as reason:
        answer(skipped=str(reason))
        return
    matrix_rate()
    before = forget_peak()
    with FlopCounterMode(display=False) as counter:
        work.run()
    answer(tokens=work.tokens, flops=counter.get_total_flops())
    for _ in sys.stdin:
        rate = matrix_rate()
        answer(seconds=seconds(work.run), rate=rate)
    answer(peak=resident("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
