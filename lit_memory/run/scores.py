"""scores.npz of a run: what the test measured, sample by sample. Its SHA-256 is a tag of the run."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.plan.sections import STEP, ReportConfig
from lit_memory.report.results import Cell
from lit_memory.report.scores import NAME, pack, unpack
from lit_memory.util.checks import first_line

if TYPE_CHECKING:
    from lit_memory.run.tracking import Run, Tracker


def scores_file(scores: Mapping[tuple[str, float], Any]) -> bytes:
    """The file, from (metric, x) -> one number per sample."""
    return pack({f"{metric}/{x:.17g}": of_x for (metric, x), of_x in scores.items()})


def read_scores(
    tracker: "Tracker",
    specs: Sequence[RunSpec],
    runs: Mapping[str, "Run"],
    root: Path,
    report: ReportConfig,
    x_values: Sequence[float],
) -> dict[Cell, Any]:
    """The scores of the test samples of the FINISHED runs of a plan, at the x of its report.

    A run from before there were scores has none. In a report along the training, the test's are those of its last
    step. Raises ConfigError for a damaged file.
    """
    found: dict[Cell, Any] = {}
    for spec in specs:
        run = runs.get(spec.key)
        content = None if run is None or run.status != "FINISHED" else read_file(tracker, spec, run, root)
        tested = {} if content is None else unpack(content)
        places = {name: name.rpartition("/") for name in tested}
        last = max((float(x) for *_, x in places.values()), default=0.0)
        for name, (metric, _, x) in places.items():
            if report.x != STEP:
                found[spec.arm, metric, float(x), spec.seed] = tested[name]
            elif float(x) == last:
                found[spec.arm, f"test_{metric}", float(x_values[-1]), spec.seed] = tested[name]
    return found


def read_file(tracker: "Tracker", spec: RunSpec, run: "Run", root: Path) -> bytes | None:
    """scores.npz of a run: of its folder, else of the store; None where it has none. Raises ConfigError for another
    one than it wrote."""
    path, digest = spec.folder(root) / NAME, run.own_tags.get(NAME)
    if digest is None:
        return None
    try:
        content = path.read_bytes() if path.is_file() else tracker.files.read(run.run_id, NAME)
    except (OSError, *tracker.Error) as error:
        name = f"{spec.arm} {spec.point}".strip()
        lost = f"the scores of {name} seed {spec.seed} cannot be read ({first_line(error)})"
        tracker.warn(f"{lost}; intervals of its results do without them")
        return None
    if hashlib.sha256(content).hexdigest() != digest:
        place, otherwise = str(path), "its copy in MLflow is read"
        if not path.is_file():
            place, otherwise = f"{NAME} of run {run.run_id} in MLflow", "intervals do without them"
        problem = "damaged (its checksum does not match)"
        raise ConfigError(place, "", f"{problem}; expected the file as the run wrote it; remove it, and {otherwise}")
    return content
