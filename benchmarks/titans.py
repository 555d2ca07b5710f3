"""Our neural memory of Titans against titans-pytorch's ``NeuralMemory`` (extra ``bench``): a training step, forward and
backward.

All map rows (4, 1024, 128) to rows with chunks of 64 tokens, two layers in the memory, one head and momentum. "memory"
is what both have: norm, projections, gates and memory. "layer" is our whole layer, with convolutions, output gate and
output projection besides. Theirs has one alpha and eta a chunk and reads the memory of the chunk before, where ours has
them for every token and reads the memory right after it; that takes about twice the arithmetic. Theirs is run with
``batch_size`` equal to the chunk, which takes the surprise at the weights of the chunk's start as ours does, and with
its default, which takes that of the whole sequence at the first weights.

Prints a table: median seconds of all in turn, the ratios of theirs to ours, and the MiB that a process grows by in such
a step.
"""

import argparse
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch
from measure import highest, seconds
from torch import Tensor

from lit_memory.memory import neural
from lit_memory.memory.neural_chunk import by_chunk
from lit_memory.models.titans.memory import NeuralMemory, unfold_heads
from lit_memory.models.titans.models import LMM

BATCH, TOKENS, WIDTH, CHUNK, DEPTH = 4, 1024, 128, 64, 2


def layer(expand: int) -> Callable[[Tensor], Tensor]:
    memory = NeuralMemory(LMM.Config(width=WIDTH, chunk=CHUNK, memory_depth=DEPTH, memory_expand=expand))

    def run(rows: Tensor) -> Tensor:
        blank = memory.first_state(device=rows.device, dtype=rows.dtype)
        M, S = (tuple(W.expand(len(rows), -1, -1, -1) for W in part) for part in (blank.M, blank.S))
        return memory(rows, type(blank)(blank.conv_BJC.expand(len(rows), -1, -1), M, S)).out_BTD

    return run


def memory(expand: int, normalized: bool = True) -> Callable[[Tensor], Tensor]:
    parts = NeuralMemory(LMM.Config(width=WIDTH, chunk=CHUNK, memory_depth=DEPTH, memory_expand=expand, conv_taps=0))

    def run(rows: Tensor) -> Tensor:
        x = parts.norm(rows)
        M = tuple(W.expand(len(rows), -1, -1) for W in parts.M)
        state = neural.NeuralState(M, tuple(torch.zeros_like(W) for W in M))
        q, k, v = parts.heads(parts.qkv(x), rows.dtype)
        return unfold_heads(by_chunk(state, q, k, v, parts.gates(x, rows.dtype), CHUNK, normalized=normalized).o_XTV, 1)

    return run


def theirs(expand: int, batch_size: int | None) -> Callable[[Tensor], Tensor]:
    from titans_pytorch import NeuralMemory as Theirs  # type: ignore[import-not-found]

    model = Theirs(
        dim=WIDTH,
        chunk_size=CHUNK,
        batch_size=batch_size,
        heads=1,
        default_model_kwargs={"depth": DEPTH, "expansion_factor": float(expand)},
    )
    return lambda rows: model(rows)[0]


MAKERS: dict[str, Callable[[int], Callable[[Tensor], Tensor]]] = {
    "memory": memory,
    "memory, not normalized": partial(memory, normalized=False),
    "layer": layer,
    f"theirs, batch_size {CHUNK}": partial(theirs, batch_size=CHUNK),
    "theirs, default": partial(theirs, batch_size=None),
}


def step(run: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    run(rows).square().mean().backward()


def peak(run: Callable[[Tensor], Tensor]) -> float:
    """MiB that this process grows by when it takes two steps, after one on a single chunk."""
    step(run, torch.randn(BATCH, CHUNK, WIDTH))
    before = highest()
    for _ in range(2):
        step(run, torch.randn(BATCH, TOKENS, WIDTH))
    return highest() - before


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=11)
    arguments.add_argument(
        "--peak", nargs=2, metavar=("WHO", "EXPAND"), help="print the peak of one and end (for the script itself)"
    )
    args = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if args.peak:
        print(peak(MAKERS[args.peak[0]](int(args.peak[1]))))
        return
    sizes = f"rows ({BATCH}, {TOKENS}, {WIDTH}), chunk {CHUNK}, depth {DEPTH}"
    print(f"training step on one CPU core, {sizes}, torch {torch.__version__}")
    ratios = f"{'over memory':>11} {'over layer':>10}"
    rows = torch.randn(BATCH, TOKENS, WIDTH)
    for expand in (1, 4):
        print(f"inner width {expand * WIDTH:18} | {'seconds':>7} {ratios} | {'MiB':>5} {ratios}")
        runs = {who: partial(step, make(expand), rows) for who, make in MAKERS.items()}
        times = [{who: seconds(run) for who, run in runs.items()} for _ in range(args.rounds + 1)][1:]
        took = {who: statistics.median(row[who] for row in times) for who in runs}
        grew = {
            who: float(
                subprocess.run(
                    [sys.executable, __file__, "--peak", who, str(expand)], capture_output=True, check=True
                ).stdout
            )
            for who in runs
        }
        for who in runs:
            columns = [
                f"{cost[who]:{width}.{digits}f} {cost[who] / cost['memory']:10.2f}x {cost[who] / cost['layer']:9.2f}x"
                for cost, width, digits in ((took, 7, 3), (grew, 5, 0))
            ]
            print(f"{who:30} | {' | '.join(columns)}", flush=True)


if __name__ == "__main__":
    main()
