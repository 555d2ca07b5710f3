"""One run, as a story: build, resume, fit, test, record.

``run_one`` needs nothing but a RunSpec, a folder and a tracking URI. Item k of the data is a function of (seed, split,
k), and so are the random numbers of step k: a run goes on bit for bit from any of its checkpoints.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.lit.callbacks.progress import Send
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import model_size
from lit_memory.report.scores import NAME as SCORES
from lit_memory.run import checkpoint, machine
from lit_memory.run.journal import Journal, clear
from lit_memory.run.outbox import Outbox, sending
from lit_memory.run.results import Results, collect, columns, peak_memory_mb, sample_scores
from lit_memory.run.scores import scores_file
from lit_memory.run.starts import provide_start
from lit_memory.run.tracking import Tracker, monitors
from lit_memory.run.trainer import silence_lightning
from lit_memory.run.training import trained
from lit_memory.run.uri import StoreURI
from lit_memory.util.provenance import as_of_now, code_changes


def run_one(spec: RunSpec, root: Path, uri: StoreURI, parent: str, tags: Mapping[str, str], send: Send) -> None:
    """Train, test and record one run; returns at once if its key is FINISHED.

    root: folder of checkpoints and reports. uri: of MLflow. parent: id of the parent run. tags: of a new run. send:
    receives progress. Raises what goes wrong, after recording it.
    """
    silence_lightning()
    spec.provide_code()

    def warn(text: str) -> None:
        send({"event": "warning", "message": text})

    with checkpoint.held(spec.folder(root), send):
        outbox = Outbox(spec, root, lambda: Tracker(root, uri, warn), parent)
        with outbox.owning(send):
            if outbox.finished():
                return
            own = as_of_now(tags)
            tell_changes(outbox, tags, own, send)
            if not checkpoint.saved(outbox.folder):
                clear(outbox.folder)  # it starts anew, and logs all its rows anew
            with sending(outbox, send) as journal:
                journal.begin(own, parameters(spec))
                with recording_errors(journal, uri):
                    provide_start(spec, root, outbox, send)
                    with measuring(spec, journal, tags, outbox.raise_if_lost) as check:
                        results = train_and_test(spec, root, journal, check, send)
                    journal.attach(SCORES, scores_file(results.scores))
                    journal.finish(results.rows, results.totals, results.times)


def train_and_test(spec: RunSpec, root: Path, journal: Journal, check: Callable[[], None], send: Send) -> Results:
    """Train from the newest checkpoint through all stages, then test on the whole task.

    check: is called before every batch and raises to end the run.
    """
    with trained(spec, root, journal, check, send) as done:
        data, saver = done.data, done.saver
        train_seconds, steps = saver.seconds, done.trainer.global_step
        record_stages(journal, done.curriculum)
        journal.tag({"remarks": "\n".join(data.whole_task.remarks())})
        send({"event": "testing"})
        done.test()
    totals = {
        "steps": steps,
        "train_seconds": train_seconds,
        "seconds": saver.seconds,
        "peak_memory_mb": peak_memory_mb(),
    }
    rows = collect(done.trainer.callback_metrics, data)
    totals |= columns(rows, data)
    return Results(rows, totals, done.timer.rows, sample_scores(done.scores.scores, rows, data))


@contextlib.contextmanager
def measuring(
    spec: RunSpec, journal: Journal, tags: Mapping[str, str], check: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """``check`` with the system metrics that ``tags`` ask for; one more sample at the end."""
    if machine.TAG not in tags:
        yield check
        return
    metrics = machine.SystemMetrics(journal, float(tags[machine.TAG]), monitors(machine.on_gpu(spec)))
    yield metrics.before(check)
    metrics.sample()


@contextlib.contextmanager
def recording_errors(journal: Journal, uri: StoreURI) -> Iterator[None]:
    """Record what ends the block before it is raised: KILLED for a signal, else FAILED."""
    try:
        yield
    except BaseException as error:
        uri.clean(error)
        status = "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"
        with contextlib.suppress(Exception):  # on a full disk nothing can be written; the error is raised all the same
            journal.tag({"error": f"{type(error).__name__}: {error}"[:5000]})
            journal.end(status)
        raise


def record_stages(journal: Journal, curriculum: Curriculum) -> None:
    """Record when each stage ended, whether it was solved, its number of steps, and the step at which training broke
    down."""
    for entry in curriculum.history:
        journal.log({"stage": entry["stage"], "stage_solved": float(entry["solved"])}, entry["step"])
    steps = [str(end - start) for start, end in pairwise(curriculum.bounds)]
    journal.tag({"stage_steps": " ".join(steps)})
    if curriculum.broke_down:
        journal.log({"broke_down": float(curriculum.step)}, curriculum.step)


def tell_changes(outbox: Outbox, tags: Mapping[str, str], own: Mapping[str, str], send: Send) -> None:
    """Warn of code or libraries that are others than those with which an interrupted run has come so far, or than those
    with which the command began. tags: of the command. own: of this process."""
    spec = outbox.spec
    run = f"{f'{spec.arm} {spec.point}'.strip()} seed {spec.seed}"
    begun = [(run, "its numbers", outbox.origin()), ("the command", "the numbers of its later runs", tags)]
    for who, what, before in begun:
        if changes := code_changes(before, own):
            problem = f"{who} goes on with other code than it began with ({changes})"
            advice = f"{what} may differ from those of either; --fresh trains anew"
            send({"event": "warning", "message": f"{problem}; {advice}"})


def parameters(spec: RunSpec) -> dict[str, Any]:
    """The configuration as MLflow parameters with dotted names, and the size of the model."""
    found: dict[str, Any] = {}
    for section in ("model", "task", "train"):
        found |= {f"{section}.{name}": value for name, value in getattr(spec, section).items()}
    found |= model_size(spec.model) | {"seed": spec.seed, "arm": spec.arm}
    if spec.start:
        found["start"] = f"{spec.start.arm} of {spec.start.experiment}, key {spec.start.key}"
    return found
