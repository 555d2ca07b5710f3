"""Our Mamba against Hugging Face's MambaForCausalLM (its path without kernels): forward and training step by length.

Prints a table: median seconds of both and their ratio. ``--limit`` skips what would take Hugging Face longer, by
extrapolation.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable

import torch
from measure import seconds
from transformers import MambaConfig, MambaForCausalLM
from transformers import logging as transformers_logging

from lit_memory.hf.huggingface import load_huggingface
from lit_memory.recurrence import unroll

BATCH, LAYERS, WIDTH, VOCAB = 8, 2, 64, 128
LENGTHS = (64, 128, 256, 384, 512, 1024, 2048)


def medians(ours: Callable[[], None], other: Callable[[], None] | None, rounds: int) -> tuple[float, float | None]:
    """Both in turn, after one warm-up each; one round where the other takes more than a few seconds."""
    ours()
    if other is None:
        return statistics.median(seconds(ours) for _ in range(rounds)), None
    if (first := seconds(other)) > 5:
        return statistics.median(seconds(ours) for _ in range(rounds)), first
    times = [(seconds(ours), seconds(other)) for _ in range(rounds)]
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    return a, b


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--limit", type=float, default=60, help="seconds that one run of Hugging Face's may take")
    args = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    theirs = MambaForCausalLM(
        MambaConfig(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, use_cache=False)
    )
    ours = load_huggingface(theirs, arch="mamba")

    def ours_logits(ids: torch.Tensor) -> torch.Tensor:
        return ours.logits(unroll(ours, ids).hidden_BTD)

    def forward(logits: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                logits(ids)

        return run

    def step(
        logits: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module, ids: torch.Tensor
    ) -> Callable[[], None]:
        def run() -> None:
            torch.nn.functional.cross_entropy(logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            model.zero_grad()

        return run

    def row(times: tuple[float, float | None]) -> str:
        a, b = times
        return f"{a:9.4f} {'skipped':>9} {'':>7}" if b is None else f"{a:9.4f} {b:9.4f} {b / a:6.1f}x"

    print(f"seconds on one CPU core, batch {BATCH}, {LAYERS} layers, width {WIDTH}, torch {torch.__version__}")
    columns = f"{'ours':>9} {'HF':>9} {'ratio':>7}"
    print(f"{'':>6} | {'forward':^27} | {'training step':^27}\n{'T':>6} | {columns} | {columns}")
    previous: tuple[int, float] | None = None
    for length in LENGTHS:
        ids = torch.randint(VOCAB, (BATCH, length))
        difference = (ours_logits(ids) - theirs(ids).logits).abs().max().item()
        if difference > 1e-4:
            raise RuntimeError(f"logits differ by {difference}: expected the same model")
        forward_times = medians(forward(ours_logits, ids), forward(lambda x: theirs(x).logits, ids), args.rounds)
        # Hugging Face's backward is quadratic
        expected = 0.0 if previous is None else previous[1] * (length / previous[0]) ** 2
        other = None if expected > args.limit else step(lambda x: theirs(x).logits, theirs, ids)
        step_times = medians(step(ours_logits, ours, ids), other, args.rounds)
        if step_times[1] is not None:
            previous = length, step_times[1]
        print(f"{length:6} | {row(forward_times)} | {row(step_times)}", flush=True)
    print(f"skipped: Hugging Face's step would take more than {args.limit:g} s")


if __name__ == "__main__":
    main()
