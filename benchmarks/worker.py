"""``python -m benchmarks.worker WORK WAY``: one way of doing some work, in a process of its own.

Reads a line of JSON, {"settings", "tiny"}, runs the work at tiny sizes and once at its own, and answers with {"tokens",
"flops"}, the floating-point operations of its matrix products, or {"skipped"}. Every further line is answered by
{"seconds", "rate"}: what a run took, and the device's matrix products per second just before it. The end of the input
is answered by {"peak"}, MiB by which the process, or what it has on the GPU, grew at most.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.work import Skipped, Timed, device_of

SIDE = {"cpu": 768, "cuda": 8192}
"""Rows of a matrix that keeps a device busy, and that the caches of a core hold."""


def seconds(run, device: str) -> float:
    """Wall-clock time of one call, until the device has done it."""
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def resident(field: str) -> float:
    """MiB of ``VmRSS``, the memory of this process, or of ``VmHWM``, its peak (Linux)."""
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) / 1024


def forget_peak(device: str) -> float:
    """Let the peak begin anew; returns the memory of this process, or what it has on the GPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(device: str) -> float:
    """MiB at most since ``forget_peak``."""
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else resident("VmHWM")


def yardstick(device: str) -> Callable[[], float]:
    """Measures operations per second of a matrix product in fp32. It allocates nothing, so that it is in no peak."""
    side = SIDE[device]
    a, b, product = torch.rand(3, side, side, device=device)
    return lambda: 2 * side**3 / min(seconds(lambda: torch.mm(a, b, out=product), device) for _ in range(3))


def prepare(name: str, way: str, request: dict[str, Any]) -> Timed:
    from benchmarks.works import WORKS

    if device_of(request["settings"]) == "cuda" and not torch.cuda.is_available():
        raise Skipped("torch finds no GPU")
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
    device = device_of(request["settings"])
    try:
        first = prepare(name, way, request | {"tiny": True})
        first.run()  # what is imported, compiled and cached at first
        with FlopCounterMode(display=False):
            first.run()  # and what counting imports
        work = prepare(name, way, request)
    except Skipped as reason:
        answer(skipped=str(reason))
        return
    matrix_rate = yardstick(device)
    matrix_rate()
    before = forget_peak(device)
    with FlopCounterMode(display=False) as counter:
        work.run()
    answer(tokens=work.tokens, flops=counter.get_total_flops())
    for _ in sys.stdin:
        rate = matrix_rate()
        answer(seconds=seconds(work.run, device), rate=rate)
    answer(peak=peak(device) - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
