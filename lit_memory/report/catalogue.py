"""The project's experiments: where a name leads, and what reports say. Imports nothing heavy."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.parsing import paper_section
from lit_memory.plan.reading import extended, mapping
from lit_memory.report.verdict import INCOMPLETE
from lit_memory.util.provenance import PROJECT


def located(text: str) -> Path:
    """The file of an experiment: a path, or the name of one of the project's, with or without .yaml. Raises ConfigError
    for a name that none has."""
    own = PROJECT / "experiments"
    given, *others = (folder / f"{text}{end}" for folder in (Path(), own) for end in ("", ".yaml"))
    found = next((path for path in (given, *others) if path.is_file()), given)
    if not found.exists() and found.parent == Path():
        ending = ".yaml" if text.endswith(".yaml") else ""
        names = [f"{path.stem}{ending}" for folder in (Path(), own) for path in sorted(folder.glob("*.yaml"))]
        close = get_close_matches(text, names, n=1)
        raise ConfigError(
            text,
            "",
            f"no such file; {f'did you mean {close[0]!r}?' if close else 'expected a file, or a name that --list shows'}",
        )
    return found


def verdict_of(folder: Path) -> dict[str, Any]:
    """What the verdict.json of a report says; {} where there is no report."""
    path = folder / "verdict.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def is_complete(folder: Path) -> bool:
    """Whether a report is there that misses nothing and comes to a verdict."""
    found = verdict_of(folder)
    return found.get("verdict", INCOMPLETE) != INCOMPLETE and not found["missing"]


def listing() -> list[tuple[str, str, str, float]]:
    """Of every experiment of the project: name, item of the paper, verdict of the report that came with it, "" without
    one, and seconds of its runs."""
    rows = []
    for path in sorted((PROJECT / "experiments").glob("*.yaml")):
        found = verdict_of(PROJECT / "reports" / path.stem)
        paper = paper_section(mapping(extended(path), str(path), ""), str(path))
        rows.append(
            (path.stem, paper.item, found.get("verdict", ""), sum(run["seconds"] or 0 for run in found.get("runs", [])))
        )
    return rows
