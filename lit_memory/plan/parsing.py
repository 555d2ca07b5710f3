"""The plain content of an experiment file, checked section by section. Settings themselves are checked by a plan."""

import re
from collections.abc import Mapping
from typing import Any

from lit_memory.plan.claims import KINDS
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.reading import check_names, file_name, mapping, mappings
from lit_memory.plan.runspec import SECTIONS
from lit_memory.plan.sections import PaperConfig, ReportConfig
from lit_memory.plan.strict import problems, strict
from lit_memory.util.checks import nearest

RUNS = ("base", "scales", "arms", "grid", "select", "seeds", "tune_seeds")
TOP_KEYS = ("experiment", "paper", *RUNS, "report", *KINDS, "title", "labels", "imports")
SCALED = ("seeds", "tune_seeds", "grid", *KINDS)
"""What a scale may say in place of the experiment; its ``report`` changes keys of the experiment's, and its ``arms``
are some of them."""
REQUIRED = ("experiment", "base", "arms", "seeds", "report")


def parsed(tree: Any, file: str) -> dict[str, Any]:
    """The fields of an ``Experiment`` from the content of its file. Raises ConfigError."""
    check_top(tree, file)
    file_name(tree["experiment"], file, "experiment")
    fields = {
        "experiment": tree["experiment"],
        "title": title(tree, file),
        "base": base_sections(tree["base"], file),
        "arms": named_arms(tree["arms"], file),
        "scales": named_scales(tree.get("scales"), file),
        "paper": paper_section(tree, file),
        "grid": mapping({} if tree.get("grid") is None else tree["grid"], file, "grid"),
        "select": _words(tree.get("select", ""), file, "select"),
        "report": strict(ReportConfig, mapping(tree["report"], file, "report"), lambda key: file, "report"),
        "seeds": tree["seeds"],
        "tune_seeds": [] if tree.get("tune_seeds") is None else tree["tune_seeds"],
        "imports": named_files(tree.get("imports"), file),
        **{section: [] if tree.get(section) is None else tree[section] for section in KINDS},
    }
    if not fields["arms"]:
        raise ConfigError(file, "arms", "expected at least one arm")
    fields["labels"] = named_labels(tree.get("labels"), fields["arms"], file)
    check_runs({name: fields[name] for name in SCALED}, fields["arms"], file, "")
    for scale, values in fields["scales"].items():
        check_runs(values, fields["arms"], file, f"scales.{scale}.")
    return fields


def check_top(tree: Any, file: str) -> None:
    """Check that a file is a mapping with known keys, all that are required, and plain finite values."""
    if not isinstance(tree, dict):
        raise ConfigError(file, "", f"expected a mapping with the keys {', '.join(TOP_KEYS)}")
    for key in tree:
        if key not in TOP_KEYS:
            raise ConfigError(file, str(key), f"unknown key; {nearest(str(key), (*TOP_KEYS, 'extends'))}")
    for key, problem in problems(tree, ""):
        raise ConfigError(file, key, problem)
    for key in REQUIRED:
        if key not in tree:
            raise ConfigError(file, key, "missing")


def named_files(value: Any, file: str) -> list[str]:
    """``imports:``, the Python files of the user; [] for none. Raises ConfigError."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(
            file, "imports", f"{value!r:.80}: expected a list of Python files, for example [my_models.py]"
        )
    return value


def title(tree: Mapping[str, Any], file: str) -> str:
    """``title:`` of a file, "" for none. Raises ConfigError."""
    return _words(tree.get("title", ""), file, "title")


def named_labels(value: Any, arms: Mapping[str, Any], file: str) -> dict[str, str]:
    """``labels:``, the words for some of the arms. Raises ConfigError."""
    labels = mapping({} if value is None else value, file, "labels")
    for arm in labels:
        if arm not in arms:
            raise ConfigError(file, f"labels.{arm}", f"unknown arm {arm!r}; {nearest(arm, arms)}")
    for arm, text in labels.items():
        if not _words(text, file, f"labels.{arm}").strip():
            raise ConfigError(file, f"labels.{arm}", f"{text!r}: expected words for the arm")
    shown = [labels.get(arm, arm) for arm in arms]
    for arm, text in labels.items():
        if shown.count(text) > 1:
            raise ConfigError(file, f"labels.{arm}", f"{text!r}: another arm has the same; expected different words")
    return labels


def _words(value: Any, file: str, key: str) -> str:
    """A line of text. Raises ConfigError."""
    if not isinstance(value, str) or len(value.splitlines()) > 1:
        raise ConfigError(file, key, f"{value!r:.80}: expected a line of text")
    return value


def paper_section(tree: Mapping[str, Any], file: str) -> PaperConfig:
    """The ``paper:`` section of a file; without one, the experiment is a comparison of its own. Raises ConfigError."""
    if tree.get("paper") is None:
        return PaperConfig(title="", item="", claim="")
    return strict(PaperConfig, mapping(tree.get("paper"), file, "paper"), lambda key: file, "paper")


def base_sections(value: Any, file: str) -> dict[str, Any]:
    """``base:`` with all three sections, of which a file may leave out any."""
    base = mapping(value, file, "base")
    for section in SECTIONS:
        base[section] = mapping(base.get(section, {}), file, f"base.{section}")
    for section in base:
        if section not in SECTIONS:
            raise ConfigError(file, f"base.{section}", f"unknown section; {_section(section)}")
    return base


def _section(key: str) -> str:
    """What was expected in place of an unknown section of ``base:``."""
    section, dot, name = key.partition(".")
    return f"expected {section}: {{{name}: ...}}" if dot and section in SECTIONS else nearest(key, SECTIONS)


def named_arms(value: Any, file: str) -> dict[str, dict[str, Any]]:
    """``arms:``, each with a name that a claim can use."""
    arms = mappings(value, file, "arms")
    for arm in arms:
        if not re.fullmatch(r"[A-Za-z_]\w{0,63}", arm, re.ASCII):
            expected = "expected a name of at most 64 letters, digits and '_' (claims refer to it)"
            raise ConfigError(file, f"arms.{arm}", expected)
    return arms


def named_scales(value: Any, file: str) -> dict[str, dict[str, Any]]:
    """``scales:``, or one that is called default where a file has none."""
    scales = mappings(value, file, "scales") or {"default": {}}
    for scale in scales:
        file_name(scale, file, f"scales.{scale}")
        if kept := re.search(r"-(modified|incomplete)\b", scale):
            reason = f"a name with '{kept[0]}' is kept for reports of changed or missing runs"
            raise ConfigError(file, f"scales.{scale}", f"{reason}; expected another")
    return scales


def check_runs(values: Mapping[str, Any], arms: Mapping[str, Any], file: str, where: str) -> None:
    """Check seeds, claims, grid and named arms of the file itself (``where`` is "") or of one of its scales."""
    grid = values.get("grid", {})
    if "arms" in values:
        check_names(values["arms"], arms, file, f"{where}arms")
    for key in ("seeds", "tune_seeds"):
        seeds = values.get(key, [0])
        if not (_are_seeds(seeds) or (key == "tune_seeds" and seeds == [])):
            expected = "expected a list of different whole numbers, for example [0, 1, 2]"
            raise ConfigError(file, f"{where}{key}", f"{seeds!r}: {expected}")
    for section, kind in KINDS.items():
        lines = values.get(section, [])
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            kinds = kind.removesuffix("y") + ("ies" if kind.endswith("y") else "s")
            expected = f"expected a list of {kinds}, for example 'gamma[200] > 0.95'"
            raise ConfigError(file, f"{where}{section}", f"{lines!r}: {expected}")
    for key, points in mapping(grid, file, f"{where}grid").items():
        if not _differ(points):
            raise ConfigError(file, f"{where}grid.{key}", f"{points!r}: expected a list of different values")
    for key in (k for k in (*values, *grid) if k.startswith("arms.")):
        _, arm, *below = key.split(".")
        if arm not in arms:
            raise ConfigError(file, f"{where}{key}", f"unknown arm {arm!r}; {nearest(arm, arms)}")
        if not below:
            expected = f"expected arms.{arm}.<section>.<field>, for example arms.{arm}.model.width"
            raise ConfigError(file, f"{where}{key}", expected)


def _are_seeds(value: Any) -> bool:
    """Whether a value is a list of different whole numbers."""
    return _differ(value) and all(type(seed) is int and seed >= 0 for seed in value)


def _differ(value: Any) -> bool:
    """Whether a value is a list of different values, and not empty. They may be lists, which have no hash."""
    return isinstance(value, list) and bool(value) and not any(value.index(item) < i for i, item in enumerate(value))
