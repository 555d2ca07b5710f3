"""A million tokens through every model of constant state: what the end of a stream costs, against its beginning.

Each model reads random tokens, segment after segment and without gradients, in a process of its own. Prints a table:
floats of the state, MiB that the process had grown by at most after the first sixteenth of the stream and after all of
it, tokens/s in the first and the last sixteenth, their ratio, and the largest number in the state at the end.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields

import torch
from measure import highest

from lit_memory.recurrence import state_tensors, unroll
from lit_memory.registry import build, load_class

MODELS = ("rmt", "armt", "tarm", "mamba", "rwkv", "lmm", "mac", "mag", "mal")
PARTS, VOCAB = 16, 1000
SIZES = {"vocab_size": VOCAB, "layers": 2, "width": 64, "heads": 4, "window": 64, "chunk": 16, "memory_tokens": 8}


@torch.no_grad()
def stream(name: str, tokens: int, segment_len: int) -> str:
    """The row of one model."""
    known = {f.name for f in fields(load_class("model", name).Config)}
    model = build("model", {"name": name, **{k: v for k, v in SIZES.items() if k in known}})
    draws = torch.Generator().manual_seed(0)

    def segments(count: int) -> Iterator[torch.Tensor]:
        return (torch.randint(VOCAB, (1, segment_len), generator=draws) for _ in range(count))

    state = unroll(model, segments(2), keep=0).state
    before, speeds, grown, each = highest(), [], [], tokens // segment_len // PARTS
    for _ in range(PARTS):
        start = time.perf_counter()
        state = unroll(model, segments(each), state=state, keep=0).state
        speeds.append(each * segment_len / (time.perf_counter() - start))
        grown.append(highest() - before)
    largest = max(t.abs().max().item() for t in state_tensors(state) if t.is_floating_point() and t.numel())
    floats = model.state_floats(state)
    memory = f"{grown[0]:9.1f} {grown[-1]:9.1f}"
    speed = f"{speeds[0]:9,.0f} {speeds[-1]:9,.0f} {speeds[-1] / speeds[0]:6.2f}"
    return f"{name:6} | {floats:12,} | {memory} | {speed} | {largest:9.1f}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=MODELS)
    arguments.add_argument("--tokens", type=int, default=2**20)
    arguments.add_argument("--segment-len", type=int, default=512)
    arguments.add_argument(
        "--one", action="store_true", help="print the row of one model and end (for the script itself)"
    )
    args = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.one:
        print(stream(args.models[0], args.tokens, args.segment_len))
        return
    setting = f"one CPU core, width {SIZES['width']}, torch {torch.__version__}"
    print(f"{args.tokens:,} tokens in segments of {args.segment_len} on {setting}")
    memory, speed = f"{'MiB, 1/16':>9} {'MiB, all':>9}", f"{'tokens/s':>9} {'at end':>9} {'ratio':>6}"
    print(f"{'':6} | {'state floats':>12} | {memory} | {speed} | {'largest':>9}")
    for name in args.models:
        options = ["--one", "--models", name, "--tokens", str(args.tokens), "--segment-len", str(args.segment_len)]
        print(
            subprocess.run([sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True, check=True).stdout,
            end="",
            flush=True,
        )


if __name__ == "__main__":
    main()
