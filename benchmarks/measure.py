"""Workers in alternation, and what they measured as a table."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.work import PROJECT, Work

SLOW = 20.0
"""Seconds of a run that is not repeated."""


class Failed(Exception):
    """A worker has ended with an error."""


@dataclass
class Measured:
    """What a worker has measured."""

    tokens: int = 0
    flops: int = 0
    peak: float = 0.0
    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    skipped: str = ""

    @property
    def share(self) -> float:
        """Matrix products per second, over those that the machine does."""
        return statistics.median(self.flops / s / rate for s, rate in zip(self.seconds, self.rates, strict=True))

    def ratio(self, ours: "Measured") -> float:
        """The median of what this takes over what ours takes, round by round."""
        return statistics.median(a / b for a, b in zip(self.seconds, ours.seconds, strict=False))

    @property
    def spread(self) -> float:
        """Half of the range between the quartiles, over the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / middle


class Worker:
    """A process with one way of doing some work; see ``worker.py``."""

    def __init__(self, name: str, way: str, tree: Path, settings: Any, tiny: bool, link: Path) -> None:
        """tree: folder with the ``lit_memory`` to use. link: folder with this ``benchmarks`` alone."""
        paths = [str(link), str(tree), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}
        self.name, self.found = f"{name} ({way})", Measured()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process; a full pipe would stop it
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", name, way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | {"LIT_MEMORY_ROOT": os.environ.get("LIT_MEMORY_ROOT", str(PROJECT))} | environment,
        )
        ready = self.ask(json.dumps({"settings": settings, "tiny": tiny}))
        for key, value in ready.items():
            setattr(self.found, key, value)

    def ask(self, line: str = "") -> dict[str, Any]:
        """Send a line; returns the answer. Raises Failed with the last line of what the process says."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self.process.stdout.readline()
        if not answer:
            with self.process, self.errors:  # it has ended, or is about to
                self.process.wait()
                self.errors.seek(0)
                lines = self.errors.read().strip().splitlines() or ["no message"]
            raise Failed(f"{self.name}: {lines[-1]}")
        return json.loads(answer)

    def round(self) -> None:
        """Measure one run."""
        answer = self.ask()
        self.found.seconds.append(answer["seconds"])
        self.found.rates.append(answer["rate"])

    def close(self) -> None:
        """End the process. Its peak is known afterwards."""
        if self.process.returncode is not None:
            return
        with self.errors:
            out, _ = self.process.communicate()
        if not self.found.skipped and out:
            self.found.peak = json.loads(out)["peak"]


def alternate(
    name: str, ways: Mapping[str, tuple[str, Path]], settings: Any, rounds: int, tiny: bool
) -> dict[str, Measured]:
    """Measure all ways in turn. ways: label -> (name of the way, folder with the ``lit_memory`` to use)."""
    with tempfile.TemporaryDirectory() as link, ExitStack() as stack:
        (Path(link) / "benchmarks").symlink_to(Path(__file__).parent)
        workers: dict[str, Worker] = {}
        for label, (way, tree) in ways.items():
            workers[label] = Worker(name, way, tree, settings, tiny, Path(link))
            stack.callback(workers[label].close)
        running = [worker for worker in workers.values() if not worker.found.skipped]
        for _ in range(rounds):
            for worker in running:
                worker.round()
            if any(worker.found.seconds[-1] > SLOW for worker in running):
                break  # more rounds would take too long
    return {label: worker.found for label, worker in workers.items()}


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(PROJECT), "worktree"]
        tree = Path(folder) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure(
    name: str, work: Work, rounds: int, base: tuple[str, Path] | None, tiny: bool, device: str = "cpu"
) -> dict[str, Measured]:
    """Our way beside the others; or beside ours at another commit. base: its name, and the folder with its files."""
    first = next(iter(work.ways))
    ways = {label: (label, PROJECT) for label in work.ways}
    if base is not None:
        ways = {"here": (first, PROJECT), base[0]: (first, base[1])}
    return alternate(name, ways, work.settings() | {"device": device}, rounds, tiny)


HEADER = """\
| work | way | seconds | ± | ratio | tokens/s | of matrix products | peak MiB |
|---|---|---:|---:|---:|---:|---:|---:|"""


def rows(name: str, found: Mapping[str, Measured]) -> list[str]:
    """The lines of the table about some work; ratios are to its first way."""
    lines, ours = [], next(iter(found.values()))
    for label, m in found.items():
        if m.skipped:
            lines.append(f"| {name} | {label} | skipped: {m.skipped} ||||||")
            continue
        median = statistics.median(m.seconds)
        columns = [f"{median:.4g}", f"{m.spread:.0%}", f"{m.ratio(ours):.2f}", f"{m.tokens / median:,.0f}"]
        columns += [f"{m.share:.1%}" if m.flops else "", f"{m.peak:.0f}"]
        lines.append(f"| {name} | {label} | {' | '.join(columns)} |")
    return lines
