"""A receipt: what a command showed when all its runs were finished and reported.

As long as nothing changes, the same command shows it again. To plan the runs and to draw the report once more would
import torch and matplotlib, for nothing. Nothing has changed if the command line, the YAMLs and our code are the same
bytes, MLflow still has the runs, FINISHED, and the files of the report are as they were written.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from lit_memory.report.results import Report
from lit_memory.run.folders import location
from lit_memory.run.options import Options
from lit_memory.run.store import check_store, find_tracker
from lit_memory.run.uri import StoreURI
from lit_memory.run.worklist import WorkList
from lit_memory.util import files
from lit_memory.util.code import digest
from lit_memory.util.inputs import digest as digest_of_data
from lit_memory.util.provenance import EXPERIMENTS, package_files

if TYPE_CHECKING:
    from lit_memory.run.tracking import Tracker

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "lightning", "mlflow", "matplotlib")


@dataclass(frozen=True)
class Receipt:
    """What was shown, and what must not have changed."""

    inputs: str
    """Digest of the command line, the YAMLs and our code."""
    parent: str
    """Id of the parent run, which has a copy of the report."""
    runs: dict[str, str]
    """Key -> id of the FINISHED run, of the whole plan."""
    folder: str
    """The folder of the report, below the root."""
    digests: dict[str, str]
    """File of the report -> digest."""
    lines: list[str]
    """What the command says of the plan."""
    text: str
    """``Report.text``."""
    code: dict[str, str] = field(default_factory=dict)
    """File of the user -> digest, of those that define what the runs use."""
    data: dict[str, str] = field(default_factory=dict)
    """File or folder of the user -> digest, of those that the runs read."""


def inputs(options: Options) -> str:
    """Digest of what makes a plan and a report, besides the runs.

    An experiment may extend and start from any other of its folder and of the project. Must come before the YAMLs are
    read.
    """
    digest = hashlib.sha256(repr((options, platform.python_version(), *map(version, LIBRARIES))).encode())
    for path in sources(Path(options.experiment).absolute()):
        digest.update(f"\0{path}\0".encode("utf-8", "surrogateescape"))
        digest.update(files.digest(path).encode())
    return digest.hexdigest()


def sources(experiment: Path) -> Iterator[Path]:
    """The file of an experiment, whatever its ending, the YAMLs beside it and of the project, and the files of our
    package."""
    yamls = [path for folder in (experiment.parent, EXPERIMENTS) for path in sorted(folder.glob("*.yaml"))]
    found = dict.fromkeys((experiment, *yamls))
    yield from (path for path in found if path.is_file() and os.access(path, os.R_OK))
    yield from package_files(PACKAGE)


def path_of(options: Options, root: Path) -> Path:
    """The file of the receipt of a command: one for every command line."""
    name = hashlib.sha256(repr(options).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return root / "checkpoints" / ".receipts" / f"{name}.json"


def keep(work: WorkList, tracker: "Tracker", report: Report, inputs: str, lines: list[str]) -> None:
    """Write the receipt of a command; none where a run is missing.

    inputs: at the start of the command. lines: what it would say if it were given again.
    """
    sweep, folder, specs = work.sweep, report.folder, work.wanted
    ids = {spec.key: work.runs[spec.key].run_id for spec in specs if work.status(spec) == "finished"}
    if sweep.options.report or report.missing or any(spec.key not in ids for spec in specs):
        return
    parent = tracker.parent(sweep.name, sweep.setting, {})
    code, data = (
        {source["file"]: source["digest"] for spec in work.specs for source in getattr(spec, name).values()}
        for name in ("code", "files")
    )
    place = str(folder.relative_to(sweep.root))
    made = Receipt(inputs, parent, ids, place, digests(folder), lines, report.text, code=code, data=data)
    files.write(path_of(sweep.options, sweep.root), json.dumps(asdict(made), indent=1).encode())


def valid(options: Options, root: Path, now: str, warn: Callable[[str], None]) -> "tuple[Receipt, Tracker] | None":
    """The receipt of a command that has nothing to do, with the open store; else None, and the plan must be made.

    now: ``inputs``. warn: receives what the user should know of the store. A run that MLflow calls RUNNING here may be
    dead, which needs a plan, too.
    """
    path = path_of(options, root)
    o = options
    if o.dry_run or o.fresh or o.report or o.cancel or o.bundle or not path.is_file():
        return None
    try:
        receipt = Receipt(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):  # damaged, or of another version
        return None
    folder = root / receipt.folder
    if receipt.inputs != now or digests(folder) != receipt.digests or not unchanged(receipt):
        return None
    check_store(root, StoreURI.of_environment())
    tracker = find_tracker(root, warn, False)
    if tracker is None or not tracker.finished({**receipt.runs, "": receipt.parent}) or tracker.running(location(root)):
        return None
    return receipt, tracker


def unchanged(receipt: Receipt) -> bool:
    """Whether the files of the user have their digests; nothing is imported."""
    try:
        code = all(digest(Path(file)) == before for file, before in receipt.code.items())
        return code and all(digest_of_data(Path(file)) == before for file, before in receipt.data.items())
    except ValueError:  # gone, or no Python any more: the plan will tell
        return False


def digests(folder: Path) -> dict[str, str]:
    """File -> digest, of the report in a folder; reports at other scales lie in folders below it."""
    return {path.name: files.digest(path) for path in sorted(folder.glob("[!.]*")) if path.is_file()}
