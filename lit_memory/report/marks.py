"""A table of marks over the reports of other experiments: which model has which ability, by stated thresholds.

    marks:
      paper_values: armt_table2_abilities   # the paper's marks; condition: ability, arm: the paper's name of a model
      models: {mamba: Mamba, armt: ARMT}    # arm of the experiments -> the paper's name
      abilities:
        Memory Capacity:
          experiment: armt_remember             # or one for each: {mamba: armt_remember_mamba, armt: armt_remember}
          requires: model.exact_match[5] >= 0.9
          "+": model.capacity[last] >= 10
          "++": model.capacity[last] >= 50

A mark has one claim in the language of ``expect``, or a list of them; ``model`` stands for every arm in turn. A model
gets the strongest mark whose claims hold by the mean over seeds, "-" if none does, "?" while a result is missing, and
"? not learnt" where a line of ``requires`` fails: a test that a model has not learnt shows no lack of an ability. The
verdict asks whether every mark is the paper's, of those that the paper has: NOT REPRODUCED where the intervals exclude
one of the paper's, at the level of 5 % over all marks; else INCONCLUSIVE where one was not learnt, or the interval of a
claim contains its threshold. Nothing is trained: the numbers come from the report of an experiment, below the root or
as shipped with the project.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_memory.plan.claims import check_lines
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import ScaledExperiment, load
from lit_memory.plan.measured import TOY, evidence, x_values
from lit_memory.plan.paper import paper_rows
from lit_memory.plan.parsing import paper_section, title
from lit_memory.plan.reading import extended, file_name, mapping
from lit_memory.plan.runspec import RunSpec
from lit_memory.plan.sections import PaperConfig
from lit_memory.plan.strict import strict
from lit_memory.report import saved
from lit_memory.report.margins import LEVEL
from lit_memory.report.results import Results
from lit_memory.report.verdict import INCOMPLETE, NOT_REPRODUCED, REPRODUCED, Claim, judge
from lit_memory.util.checks import nearest
from lit_memory.util.provenance import PROJECT

MARKS = ("++", "+")
"""From the strongest on."""
KEYS = ("extends", "experiment", "title", "paper", "marks")
OF_AN_ABILITY = ("experiment", "requires", *MARKS)


@dataclass
class MarksConfig:
    """The ``marks:`` section."""

    models: dict[str, str]
    abilities: dict[str, dict[str, Any]]
    paper_values: str = ""
    notes: str = ""


@dataclass(frozen=True)
class Source:
    """Another experiment at one scale, and its report."""

    name: str
    """``name``, or ``name/scale`` for a scale that the file names."""
    experiment: ScaledExperiment
    results: Results | None
    """None if there is none yet."""

    @cached_property
    def planned(self) -> list[float]:
        """The values of the report's x axis; one run shows them, as all arms are tested alike."""
        return x_values(self.experiment, _of_one_arm(self.experiment))


@dataclass(frozen=True)
class Mark:
    """One ability of one model: as measured and as the paper has it."""

    mark: str
    paper: str
    claims: list[Claim]
    """One per threshold, and one per requirement."""
    learnt: bool = True
    """Whether the requirements hold."""
    sure: bool = True
    """Whether their intervals decide that it is this one."""
    excluded: frozenset[str] = frozenset()
    """Marks that their intervals exclude."""

    @property
    def agrees(self) -> bool | None:
        """Whether measurement and paper agree; None if one of them is "?"."""
        return None if "?" in (self.mark, self.paper) else self.mark == self.paper

    @property
    def refuted(self) -> bool:
        """Whether it surely is not the paper's."""
        return self.agrees is False and (self.sure or self.paper in self.excluded)

    @property
    def measured(self) -> str:
        """The mark, with a remark if it is not sure."""
        if not self.learnt:
            return f"{self.mark} not learnt"
        return self.mark if self.sure else f"{self.mark} perhaps"

    def __str__(self) -> str:
        return f"{self.measured} ({self.paper})"


@dataclass
class Summary:
    """A checked YAML with a ``marks:`` section, at one scale of the experiments that it reads."""

    file: str
    name: str
    title: str
    """In words; "" for none."""
    paper: PaperConfig
    config: MarksConfig
    scale: str
    """Of all experiments; "" is the default of each."""
    sources: dict[tuple[str, str], Source] = field(default_factory=dict)
    """(ability, arm) -> the experiment that the mark comes from."""

    @classmethod
    def load(cls, path: str, root: Path, scale: str | None = None) -> "Summary":
        """Read and check a file, and the reports of the experiments that it names. Raises ConfigError."""
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
        summary = cls(path, tree["experiment"], title(tree, path), paper, config, scale or "")
        read: dict[str, Source] = {}
        for ability, line in config.abilities.items():
            for arm, name in summary._experiments(ability, line).items():
                source = read[name] = read.get(name) or summary._source(name, root)
                claims = [text for mark in ("requires", *MARKS) for text in thresholds(line, mark, arm)]
                try:
                    check_lines(claims, list(source.experiment.arms), source.planned)
                except ValueError as error:
                    raise ConfigError(path, f"marks.abilities.{ability}", str(error)) from None
                summary.sources[ability, arm] = source
        return summary

    def _experiments(self, ability: str, line: Mapping[str, Any]) -> dict[str, str]:
        """Arm -> the name of the experiment that shows whether it has an ability, with the scale that the file says."""
        where, arms = f"marks.abilities.{ability}", list(self.config.models)
        for key in ("experiment", *line):
            if key not in OF_AN_ABILITY:
                raise ConfigError(self.file, f"{where}.{key}", f"unknown key; {nearest(key, OF_AN_ABILITY)}")
        if "experiment" not in line or not any(mark in line for mark in MARKS):
            raise ConfigError(self.file, where, 'expected an experiment and at least one of "+" and "++"')
        named = line["experiment"]
        of_arm: dict[str, Any] = dict(named) if isinstance(named, dict) else dict.fromkeys(arms, named)
        if of_arm.keys() != {*arms}:
            expected = f"expected one experiment, or one for each of {', '.join(arms)}"
            raise ConfigError(self.file, f"{where}.experiment", expected)
        for name in of_arm.values():
            file_name(name.partition("/")[0] if isinstance(name, str) else name, self.file, f"{where}.experiment")
        return of_arm

    def _source(self, name: str, root: Path) -> Source:
        """An experiment and its report. name: with a scale behind a slash, it is read at that one, whatever the
        summary's."""
        file, _, scale = name.partition("/")
        whole = load(Path(self.file).with_name(f"{file}.yaml"))
        scale = scale or self.scale
        experiment = whole.at(scale or None)
        folder = "" if scale == whole.default_scale else scale
        report = Path("reports", experiment.experiment, folder)
        for path in (root / report, PROJECT / report):
            if (path / saved.PLAN).is_file():
                return Source(name, experiment, saved.load(path))
        return Source(name, experiment, None)

    def marks(self) -> dict[tuple[str, str], Mark]:
        """(ability, arm) -> mark, in the order of the file."""
        config = self.config
        return {(ability, arm): self.mark(ability, arm) for ability in config.abilities for arm in config.models}

    def mark(self, ability: str, arm: str) -> Mark:
        """The strongest mark whose claims hold."""
        source, line = self.sources[ability, arm], self.config.abilities[ability]
        paper = self.paper_marks.get((ability, self.config.models[arm]), "?")
        if source.results is None:
            return Mark("?", paper, [])
        texts = [text for mark in MARKS for text in thresholds(line, mark, arm)]
        required = thresholds(line, "requires", arm)
        claims = judge({"expect": texts, "requires": required}, source.results.evidence, LEVEL / self.cells)
        if any(claim.kind == "requirement" and claim.verdict != REPRODUCED for claim in claims):
            incomplete = any(claim.verdict == INCOMPLETE for claim in claims)
            return Mark("?", paper, claims, learnt=incomplete, sure=incomplete)
        by_line = {claim.line: claim for claim in claims if claim.kind == "claim"}
        found_of = {mark: [by_line[text] for text in thresholds(line, mark, arm)] for mark in filter(line.get, MARKS)}
        held = [mark for mark, found in found_of.items() if all(claim.verdict == REPRODUCED for claim in found)]
        weaker, sure = [*found_of, "-"], True
        excluded = frozenset(weaker[weaker.index(held[0]) + 1 :] if held else ())
        for mark, found in found_of.items():
            verdicts = {claim.verdict for claim in found}
            if all(claim.holds or claim.verdict == INCOMPLETE for claim in found):
                sure = sure and verdicts == {REPRODUCED}
                return Mark("?" if INCOMPLETE in verdicts else mark, paper, claims, sure=sure, excluded=excluded)
            if NOT_REPRODUCED in verdicts:
                excluded |= {mark}
            else:
                sure = False
        return Mark("-", paper, claims, sure=sure, excluded=excluded)

    @property
    def cells(self) -> int:
        """How many marks there are."""
        return len(self.config.abilities) * len(self.config.models)

    @cached_property
    def paper_marks(self) -> dict[tuple[str, str], str]:
        """(ability, the paper's name of a model) -> the paper's mark."""
        return {(row["condition"], row["arm"]): row["value"] for row in paper_rows(self.config.paper_values)}

    @property
    def read(self) -> list[Source]:
        """The experiments that it reads."""
        return list({source.name: source for source in self.sources.values()}.values())

    @property
    def names(self) -> list[str]:
        """The names of the experiments that it reads."""
        return [source.name for source in self.read]

    @property
    def missing(self) -> list[str]:
        """The experiments without a report yet."""
        return [source.name for source in self.read if source.results is None]

    @property
    def scale_shown(self) -> str:
        return f"scale {', '.join(dict.fromkeys(source.experiment.scale for source in self.read))}"

    @cached_property
    def evidence(self) -> str:
        """The least of the levels of evidence of the experiments."""
        levels = {evidence(s.experiment, _of_one_arm(s.experiment), False) for s in self.read}
        return TOY if TOY in levels else ", ".join(sorted(levels))


def has_marks(path: Path) -> bool:
    """Whether a YAML is a summary, which may be wrong in any other way."""
    tree = extended(path)
    return isinstance(tree, dict) and "marks" in tree


def _of_one_arm(experiment: ScaledExperiment) -> list[RunSpec]:
    """The runs of the first arm and seed, which may start from one of another arm."""
    first, of_one_seed = next(iter(experiment.arms)), replace(experiment, seeds=experiment.seeds[:1])
    return [spec for spec in of_one_seed.plan() if spec.arm == first]


def thresholds(line: Mapping[str, Any], mark: str, arm: str) -> list[str]:
    """The claims of a mark (or ``requires``) for one arm; none if the ability has no such mark."""
    texts = line.get(mark, [])
    return [re.sub(r"\bmodel\b", arm, str(text)) for text in (texts if isinstance(texts, list) else [texts])]
