"""``python -m benchmarks.budget``: what the whole project costs at the scale of the papers, by arithmetic.

Nothing is trained or measured. Operations of a training are 6 for every parameter and token, upper bounds where a stage
may end early; GPU-hours are these at a sustained speed that the reader chooses, without tests. Storage is two
checkpoints with AdamW's two moments, in fp32. What several experiments share is counted once, where it comes first.
"""

import argparse
import json
import sys
from functools import cache
from pathlib import Path

from lit_memory.plan.experiment import load
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import build, model_size
from lit_memory.report.marks import has_marks
from lit_memory.run.worklist import with_starts

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
HEADER = ("experiment", "runs", "at once", "parameters", "tokens", "PFLOP", "GPU-hours", "GB")
"""At once: the most runs that wait for none of the others; parameters: of the largest."""


def tokens(spec: RunSpec) -> int:
    """The tokens that a run trains on at most."""
    contexts = ((s["steps"] * s["batch_size"], build("task", spec.task | s["task"])) for s in spec.stages)
    return sum(count * task.tokens for count, task in contexts)


@cache
def parameters(model: str) -> int:
    """Of a model section as JSON."""
    return model_size(json.loads(model))["parameters"]


def row(specs: list[RunSpec], tflops: float) -> list[float]:
    """The numbers of ``HEADER`` of some runs."""
    sizes = [parameters(json.dumps(spec.model)) for spec in specs]
    read = [tokens(spec) for spec in specs]
    operations = sum(6 * size * count for size, count in zip(sizes, read, strict=True))
    keys = {spec.key for spec in specs}
    free = sum(spec.start is None or spec.start.key not in keys for spec in specs)
    stored = sum(2 * 3 * 4 * size for size, spec in zip(sizes, specs, strict=True) if spec.stages)
    hours = operations / (tflops * 1e12) / 3600
    return [len(specs), free, max(sizes, default=0), sum(read), operations / 1e15, hours, stored / 1e9]


def shown(numbers: list[float]) -> str:
    """The cells of a line."""
    return " | ".join(f"{n:,.0f}" if n >= 10 or n == int(n) else f"{n:.2g}" for n in numbers)


def lines(files: list[Path], scale: str, tflops: float) -> list[str]:
    """The table, in Markdown, with the sum of all experiments that have the scale."""
    found, seen = [f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}"], set[str]()
    totals = [0.0] * (len(HEADER) - 1)
    for file in files:
        experiment = load(file)
        if scale not in experiment.scales:
            continue
        specs = [run for spec in experiment.at(scale).plan() for run in with_starts(spec)]
        new = list({spec.key: spec for spec in specs if spec.key not in seen}.values())
        seen |= {spec.key for spec in new}
        numbers = row(new, tflops)
        totals = [max(a, b) if i == 2 else a + b for i, (a, b) in enumerate(zip(totals, numbers, strict=True))]
        found.append(f"| `{file.stem}` | {shown(numbers)} |")
    return [*found, f"| all | {shown(totals)} |"]


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    arguments.add_argument("files", nargs="*", type=Path, help="experiments (default: all of the project)")
    arguments.add_argument("--scale", default="paper")
    arguments.add_argument("--tflops", type=float, default=100.0, help="sustained speed of a GPU")
    args = arguments.parse_args()
    files = args.files or sorted(path for path in EXPERIMENTS.glob("*.yaml") if not has_marks(path))
    sys.stdout.write("\n".join(lines(files, args.scale, args.tflops)) + "\n")


if __name__ == "__main__":
    main()
