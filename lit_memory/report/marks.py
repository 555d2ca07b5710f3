"""A table of marks over the reports of other experiments: which model has which ability, by stated thresholds.

    marks:
      paper_values: armt_table2_abilities            # the paper's marks: condition is the ability, arm the paper's name
          of a model
      models: {mamba: Mamba, armt: ARMT}             # arm of the experiments -> the paper's name
      abilities:
        Memory Capacity: {experiment: armt_remember, "+": "model.capacity[last] >= 10", "++": "model.capacity[last] >=
        50"}

A mark has one line of ``plan.claims``, or a list of them; ``model`` stands for every arm in turn. An ability gets the
strongest mark whose lines hold, "-" if none does, "?" while a result is missing. The verdict asks whether every mark is
the paper's, where that is not "?". Nothing is trained: the numbers come from reports/<experiment>/table.csv, of this
root or as they came with the project. Imports neither torch nor mlflow.
"""

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_memory.plan.claims import check_expect
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import ScaledExperiment, load
from lit_memory.plan.measured import x_values
from lit_memory.plan.paper import paper_rows
from lit_memory.plan.parsing import paper_section
from lit_memory.plan.reading import extended, file_name, mapping
from lit_memory.plan.sections import PaperConfig
from lit_memory.plan.strict import strict
from lit_memory.report.figures import draw_marks
from lit_memory.report.markdown import markdown
from lit_memory.report.render import Report, claim_of
from lit_memory.report.verdict import INCOMPLETE, NOT_REPRODUCED, REPRODUCED, Claim, evaluate
from lit_memory.util import files
from lit_memory.util.checks import nearest
from lit_memory.util.provenance import PROJECT

MARKS = ("++", "+")
"""From the strongest on."""
KEYS = ("extends", "experiment", "paper", "marks")


@dataclass
class MarksConfig:
    """The ``marks:`` section."""

    models: dict[str, str]
    abilities: dict[str, dict[str, Any]]
    paper_values: str = ""
    notes: str = ""


@dataclass(frozen=True)
class Source:
    """Another experiment at one scale, and its table."""

    experiment: ScaledExperiment
    rows: list[dict[str, str]] = field(default_factory=list)
    """Of table.csv; empty where there is none yet."""

    @property
    def x_values(self) -> list[float]:
        return list(dict.fromkeys(float(row["x"]) for row in self.rows))

    @property
    def seeds(self) -> int:
        return sum(name.startswith("seed_") for name in self.rows[0])

    def values(self, arm: str, metric: str | None, x: float) -> list[float]:
        """What the finished seeds measured."""
        found = [
            r
            for r in self.rows
            if r["arm"] == arm and r["metric"] == (metric or self.experiment.report.y) and float(r["x"]) == x
        ]
        return [float(v) for row in found for name, v in row.items() if name.startswith("seed_") and v]


@dataclass(frozen=True)
class Cell:
    """One ability of one model."""

    mark: str
    paper: str
    claims: list[Claim]
    """One per threshold that was looked at."""

    @property
    def agrees(self) -> bool | None:
        """With the paper; None where it, or the measurement, says "?"."""
        return None if "?" in (self.mark, self.paper) else self.mark == self.paper

    def __str__(self) -> str:
        return f"{self.mark} ({self.paper})"


@dataclass
class Summary:
    """A checked YAML with ``marks``, at one scale of the experiments that it reads."""

    file: str
    name: str
    paper: PaperConfig
    config: MarksConfig
    scale: str
    """Of all experiments; "" is the default of each."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Ability -> what its marks rest on."""

    @classmethod
    def wanted(cls, path: str) -> bool:
        """Whether a file is one of these; it may be wrong in any other way."""
        tree = extended(Path(path))
        return isinstance(tree, dict) and "marks" in tree

    @classmethod
    def load(cls, path: str, root: Path, scale: str | None = None) -> "Summary":
        """Read and check a file, and the tables of the experiments that it names. Raises ConfigError."""
        tree = extended(Path(path))
        for key in tree:
            if key not in KEYS:
                raise ConfigError(path, str(key), f"unknown key; {nearest(str(key), KEYS)}")
        for key in ("experiment", "paper"):
            if key not in tree:
                raise ConfigError(path, key, "missing")
        file_name(tree["experiment"], path, "experiment")
        paper = paper_section(tree, path)
        config = strict(MarksConfig, mapping(tree["marks"], path, "marks"), lambda key: path, "marks")
        try:
            paper_rows(config.paper_values)
        except ValueError as error:
            raise ConfigError(path, "marks", str(error)) from None
        made = cls(path, tree["experiment"], paper, config, scale or "")
        for ability, line in config.abilities.items():
            made.sources[ability] = made.source(ability, line, root)
        return made

    def source(self, ability: str, line: Mapping[str, Any], root: Path) -> Source:
        """Find the table of an ability, and check its thresholds against the experiment."""
        where = f"marks.abilities.{ability}"
        for key in ("experiment", *line):
            if key not in ("experiment", *MARKS):
                raise ConfigError(self.file, f"{where}.{key}", f"unknown key; {nearest(key, ('experiment', *MARKS))}")
        if "experiment" not in line or len(line) < 2:
            raise ConfigError(self.file, where, 'expected an experiment and at least one of "+" and "++"')
        file_name(line["experiment"], self.file, f"{where}.experiment")
        whole = load(Path(self.file).with_name(f"{line['experiment']}.yaml"))
        experiment = whole.at(self.scale or None)
        one = replace(
            experiment, arms=dict(list(experiment.arms.items())[:1]), seeds=experiment.seeds[:1]
        )  # all arms are tested alike
        values = x_values(experiment, one.plan())
        for arm in self.config.models:
            try:
                check_expect(
                    [text for mark in MARKS for text in thresholds(line, mark, arm)], list(experiment.arms), values
                )
            except ValueError as error:
                raise ConfigError(self.file, where, str(error)) from None
        part = Path(
            "reports", experiment.experiment, "" if self.scale == whole.default_scale else self.scale, "table.csv"
        )
        for path in (root / part, PROJECT / part):
            if path.is_file():
                return Source(experiment, list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())))
        return Source(experiment)

    def cell(self, ability: str, arm: str) -> Cell:
        """The strongest mark whose line holds."""
        source, line = self.sources[ability], self.config.abilities[ability]
        paper = self.paper_marks.get((ability, self.config.models[arm]), "?")
        claims: list[Claim] = []
        for mark in filter(line.get, MARKS if source.rows else ()):
            found = [
                evaluate(text, source.values, source.x_values, source.seeds) for text in thresholds(line, mark, arm)
            ]
            verdicts = {claim.verdict for claim in found}
            claims += found
            if NOT_REPRODUCED not in verdicts:
                return Cell("?" if INCOMPLETE in verdicts else mark, paper, claims)
        return Cell("-" if claims else "?", paper, claims)

    @cached_property
    def paper_marks(self) -> dict[tuple[str, str], str]:
        """(ability, the paper's name of a model) -> the paper's mark."""
        return {(row["condition"], row["arm"]): row["value"] for row in paper_rows(self.config.paper_values)}

    @property
    def names(self) -> list[str]:
        """The experiments that it reads."""
        return list(dict.fromkeys(source.experiment.experiment for source in self.sources.values()))

    @property
    def missing(self) -> list[str]:
        """Those of them that have no report yet."""
        return list(dict.fromkeys(source.experiment.experiment for source in self.sources.values() if not source.rows))

    def report(self, root: Path, command: str) -> Report:
        """Write figure, table, verdict and page, also into MLflow."""
        cells = {
            (ability, arm): self.cell(ability, arm) for ability in self.config.abilities for arm in self.config.models
        }
        agree = [cell.agrees for cell in cells.values() if cell.paper != "?"]
        verdict = INCOMPLETE if None in agree or not agree else REPRODUCED if all(agree) else NOT_REPRODUCED
        missing = [f"reports/{name}: python run.py experiments/{name}.yaml" for name in self.missing]
        shown = [
            [ability, *(str(cells[ability, arm]) for arm in self.config.models)] for ability in self.config.abilities
        ]
        table = "Marks as measured, in brackets those of the paper\n\n" + markdown(
            ["ability", *self.config.models.values()], shown
        )
        report = Report(verdict, [], missing, table)
        lines = [
            ["ability", "model", "measured", "paper"],
            *([a, self.config.models[arm], cell.mark, cell.paper] for (a, arm), cell in cells.items()),
        ]
        head = {
            "experiment": self.name,
            "scale": self.scale,
            "paper": vars(self.paper),
            "verdict": verdict,
            "missing": missing,
        }
        texts = {
            "table.csv": "".join(",".join(line) + "\n" for line in lines),
            "table.md": table,
            "verdict.json": json.dumps(head, indent=2, ensure_ascii=False) + "\n",
            "README.md": self.page(report, cells, command),
        }
        drawn = {(ability, self.config.models[arm]): (str(cell), cell.agrees) for (ability, arm), cell in cells.items()}
        contents = draw_marks(
            self.name,
            f"{self.scale_shown} · in brackets the paper's marks{' · INCOMPLETE' if verdict == INCOMPLETE else ''}",
            drawn,
        )
        folder = root / "reports" / self.name / self.scale
        return replace(
            report, paths=files.write_all(folder, contents | {name: text.encode() for name, text in texts.items()})
        )

    @property
    def scale_shown(self) -> str:
        scales = dict.fromkeys(source.experiment.scale for source in self.sources.values())
        return f"scale {', '.join(scales)}"

    def page(self, report: Report, cells: Mapping[tuple[str, str], Cell], command: str) -> str:
        """Verdict and figure first, then the numbers behind every mark."""
        rules, numbers = [], []
        for ability, line in self.config.abilities.items():
            texts = (", ".join(f"`{text}`" for text in thresholds(line, mark, "model")) for mark in reversed(MARKS))
            rules.append([ability, f"`{line['experiment']}`", *texts])
        for (ability, arm), cell in cells.items():
            why = "; ".join(f"`{claim.line}`: {claim.numbers}" for claim in cell.claims)
            numbers.append([ability, self.config.models[arm], cell.mark, cell.paper, why or "no results yet"])
        blocks = [
            f"# {self.name}",
            f"**{report.verdict}** at {self.scale_shown}"
            + (f". Missing: {'; '.join(report.missing)}." if report.missing else ""),
            claim_of(vars(self.paper)),
            "![The marks of this report, in brackets those of the paper.](figure.png)",
            "## Thresholds\n\nA mark is the strongest whose line holds in the report of the experiment; `-` if none does.\n\n"
            + markdown(["ability", "experiment", *(f"`{mark}`" for mark in reversed(MARKS))], rules),
            "## Numbers\n\n" + markdown(["ability", "model", "measured", "paper", "thresholds in numbers"], numbers),
            f"## Notes\n\n{self.config.notes.strip()}" if self.config.notes else "",
            f"## How to reproduce\n\n```bash\n{command}\n```",
        ]
        return "\n\n".join(block.strip() for block in blocks if block) + "\n"


def thresholds(line: Mapping[str, Any], mark: str, arm: str) -> list[str]:
    """The lines of a mark for one arm; none where it has no such mark."""
    texts = line.get(mark, [])
    return [re.sub(r"\bmodel\b", arm, str(text)) for text in (texts if isinstance(texts, list) else [texts])]
