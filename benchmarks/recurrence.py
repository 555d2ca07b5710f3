"""ARMT's training step: queries that share a memory against copies of it, and the diagonal against the sequential
schedule.

Prints one line per comparison: median seconds of both, and their ratio.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from lit_memory.models.armt import ARMT
from lit_memory.recurrence import SegmentRecurrent, unroll
from lit_memory.tasks.associative_retrieval import AssociativeRetrieval


class Copies(ARMT):
    """ARMT whose readers get a copy of the memory each."""

    share = SegmentRecurrent.share


def compare(name: str, ours: Callable[[], None], other: Callable[[], None], rounds: int) -> None:
    """Time both in turn after one warm-up each."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 1):
        for run, taken in zip((ours, other), times, strict=True):
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i:
                taken.append(time.perf_counter() - start)
    a, b = (statistics.median(t) for t in times)
    print(f"{name:60} {a:8.4f} s against {b:8.4f} s, ratio {b / a:5.2f}")


def training_step(model: ARMT, batch, schedule: str = "sequential") -> Callable[[], None]:
    def run() -> None:
        out = unroll(
            model, batch.ids_BT, batch.segment_len, read_only=batch.read_only, keep=batch.read_only, schedule=schedule
        )
        model.logits(out.hidden_BTD).square().mean().backward()
        model.zero_grad()

    return run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--device", default="cpu")
    args = arguments.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    config = ARMT.Config(vocab_size=19, layers=4, width=64, heads=2, memory_tokens=1, memory_dim=32, value_std=0.05)
    torch.manual_seed(0)
    ours = ARMT(config).to(args.device)
    copies = Copies(config).to(args.device)
    copies.load_state_dict(ours.state_dict())
    for pairs, queries, size in ((2, 4, 64), (20, 4, 32), (2, 16, 64)):
        task = AssociativeRetrieval(AssociativeRetrieval.Config(pairs=pairs, queries=queries))
        batch = task.batch(0, "train", 0, size).to(torch.device(args.device))
        shape = f"{pairs} pairs, {queries} queries, batch {size}"
        compare(
            f"{shape}: shared memory against copies",
            training_step(ours, batch),
            training_step(copies, batch),
            args.rounds,
        )
    for size in (1, 32):
        batch = task.at(pairs=32, queries=1).batch(0, "train", 0, size).to(torch.device(args.device))
        sequential, diagonal = training_step(ours, batch), training_step(ours, batch, "diagonal")
        compare(f"32 segments, 4 layers, batch {size}: diagonal against sequential", diagonal, sequential, args.rounds)


if __name__ == "__main__":
    main()
