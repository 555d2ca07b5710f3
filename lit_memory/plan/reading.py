"""Files to plain trees: reading YAML safely, and ``extends`` between files and between the scales of a file.

``extends: other`` at the top starts from the file ``other.yaml`` of the same folder, or of the project: sections,
scales, paper, report and labels are taken over key by key; arms (with what scales set for them, and the labels of those
that are gone), grid, seeds, paper_curves and each list of lines as a whole, the lines for every scale of the other
file; the title stays behind. ``arms: [a, b]`` are these arms of the other file, with all that it sets for them; in a
scale, those of all arms that it compares.
``extends: cpu`` in a scale starts from that scale, key by key: of the same file, and where the file that this one
extends has no scale of that name, of that file as well.
"""

import copy
import io
import itertools
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_memory.plan.claims import KINDS
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.strict import DEEPEST, too_deep
from lit_memory.util.checks import first_line, nearest
from lit_memory.util.provenance import EXPERIMENTS

LARGEST_FILE = 1_000_000
WHOLE = ("arms", "grid", "paper_curves")
"""Mappings of a file that replace those of the file that it extends."""


def read(path: Path) -> Any:
    """The content of a YAML as plain data. Raises ConfigError.

    Nothing in it is executed or looked up: tags that name Python objects are unknown, and interpolations stay text,
    which ``parse`` refuses.
    """
    try:
        if not path.is_file():
            raise _no_file(path)
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise ConfigError(str(path), "", f"more than {LARGEST_FILE:,} bytes; expected an experiment")
        return copy.deepcopy(_content(text.decode("utf-8-sig")))
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from None
    except (RecursionError, OmegaConfBaseException, YAMLError, ValueError) as error:
        if too_deep(error):
            raise ConfigError(str(path), "", f"not valid YAML: nested more than {DEEPEST} deep") from None
        # ValueError: not UTF-8, or a number of thousands of digits
        mark = getattr(error, "problem_mark", None)
        problem = (getattr(error, "problem", None) or first_line(error)).partition(". See http")[0]
        raise ConfigError(f"{path}:{mark.line + 1}" if mark else str(path), "", f"not valid YAML: {problem}") from None


@lru_cache(maxsize=256)
def _content(text: str) -> Any:
    """The content of a YAML. Experiments extend and start from the same few files, and OmegaConf takes its time."""
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))


def _no_file(path: Path) -> ConfigError:
    """The error of a path that is no file, with the nearest YAML beside it."""
    folder = path if path.is_dir() else path.parent
    others = [str(p) for p in sorted(folder.glob("*.yaml"))] if folder.is_dir() else []
    what = "is a folder, expected a file" if path.is_dir() else "no such file"
    return ConfigError(str(path), "", what + (f"; {nearest(str(path), others)}" if others else ""))


def extended(path: Path, *above: Path) -> Any:
    """The content of a YAML, laid over the file that it extends. Raises ConfigError.

    above: the files that extend this one.
    """
    tree = read(path)
    if not isinstance(tree, dict):
        return tree  # parse refuses it
    starts = {}
    if tree.get("scales") is None:
        tree.pop("scales", None)
    if isinstance(tree.get("scales"), dict):
        starts = {scale: v.get("extends") for scale, v in tree["scales"].items() if isinstance(v, dict)}
        tree["scales"] = extended_scales(tree["scales"], str(path))
    if "grid" in tree:
        tree["grid"] = each_arm(tree["grid"], str(path), "grid")
    if isinstance(tree.get("arms"), dict):
        for arm, settings in tree["arms"].items():
            in_order(settings, str(path), f"arms.{arm}")
    if "extends" not in tree:
        return tree
    name = tree.pop("extends")
    file_name(name, str(path), "extends")
    other = beside(path, name, "extends")
    if other in (path, *above):
        raise ConfigError(str(path), "extends", f"{name!r} extends this file; expected no circle")
    below = extended(other, path, *above)
    if not isinstance(below, dict):
        raise ConfigError(str(other), "", "expected a mapping: an experiment")
    below = left(below, tree, str(path), str(other))
    if isinstance(tree.get("arms"), list):  # they are all that is left
        del tree["arms"]
    below["scales"] |= inherited_scales(below["scales"], starts)
    return overlaid(below, tree, 2)


def beside(path: Path, name: str, key: str) -> Path:
    """The file of an experiment that another one names by ``key``: beside it, or the project's. Raises ConfigError."""
    for folder in (path.parent, EXPERIMENTS):
        if (found := folder / f"{name}.yaml").is_file():
            return found
    names = [file.stem for folder in (path.parent, EXPERIMENTS) for file in sorted(folder.glob("*.yaml"))]
    raise ConfigError(str(path), key, f"{name!r}: no such file here or in the project; {nearest(name, names)}")


def left(below: dict[str, Any], tree: Mapping[str, Any], file: str, other: str) -> dict[str, Any]:
    """What the content ``tree`` of ``file`` takes over from the content ``below`` of ``other``: no name, no title, no
    lines of one scale where it has such of all scales, and of the arms those that it names or, beside arms of its own,
    none, with all that is said of them. Raises ConfigError."""
    lines, arms = KINDS.keys() & tree.keys(), tree.get("arms")
    below = {key: value for key, value in below.items() if key not in ("experiment", "title")}
    scales = mappings(below.get("scales"), other, "scales")
    below["scales"] = {scale: {k: v for k, v in own.items() if k not in lines} for scale, own in scales.items()}
    if isinstance(arms, list):
        return only(below, arms, file, other)
    if "arms" in tree:
        old = mapping(below.get("arms") or {}, other, "arms")
        labels = mapping(below.get("labels") or {}, other, "labels")
        below["scales"] = {scale: without(values, old) for scale, values in below["scales"].items()}
        if "grid" in below:
            below["grid"] = without(below["grid"], old)
        below["labels"] = {arm: text for arm, text in labels.items() if isinstance(arms, dict) and arm in arms}
    return below


def only(below: dict[str, Any], names: list[Any], file: str, other: str) -> dict[str, Any]:
    """The content ``below`` of ``other`` with those of its arms that ``file`` names, in that order. Raises
    ConfigError."""
    arms = mapping(below.get("arms") or {}, other, "arms")
    check_names(names, arms, file, "arms", f" in {other}")
    gone = arms.keys() - set(names)
    scales = mappings(below.get("scales"), other, "scales")
    labels = mapping(below.get("labels") or {}, other, "labels")
    below |= {
        "arms": {name: arms[name] for name in names},
        "scales": {scale: without(values, gone) for scale, values in scales.items()},
        "labels": {arm: text for arm, text in labels.items() if arm not in gone},
    }
    if "grid" in below:
        below["grid"] = without(below["grid"], gone)
    if "report" in below:
        below["report"] = uncurved(below["report"], gone)
    return below


def check_names(names: Any, arms: Collection[str], file: str, key: str, where: str = "") -> None:
    """Raise ConfigError unless ``names`` is a list of some of ``arms``, which are those ``where``."""
    if not isinstance(names, list) or not names:
        raise ConfigError(file, key, f"{names!r:.80}: expected a list of arms, for example [{', '.join([*arms][:2])}]")
    for i, name in enumerate(names):
        if not isinstance(name, str) or name not in arms:
            raise ConfigError(file, key, f"no arm {name!r:.80}{where}; {nearest(str(name), arms)}")
        if name in names[:i]:
            raise ConfigError(file, key, f"{name!r} is said twice; expected once")


def without(settings: Any, gone: Collection[str]) -> Any:
    """A scale or a grid without what it says of some arms."""
    if not isinstance(settings, dict):
        return settings  # parse refuses it
    kept = {}
    for key, value in settings.items():
        section, _, rest = str(key).partition(".")
        if key == "arms" and isinstance(value, list):
            value = [arm for arm in value if not isinstance(arm, str) or arm not in gone]
            if not value:
                continue
        if key == "report":
            value = uncurved(value, gone)
        if section != "arms" or rest.partition(".")[0] not in gone:
            kept[key] = without(value, gone) if key == "grid" else value
    return kept


def uncurved(report: Any, gone: Collection[str]) -> Any:
    """A ``report`` without the curves of the paper for some arms."""
    if not isinstance(report, dict) or not isinstance(curves := report.get("paper_curves"), dict):
        return report  # parse refuses another kind
    return report | {"paper_curves": {arm: start for arm, start in curves.items() if arm not in gone}}


def extended_scales(scales: Mapping[Any, Any], file: str) -> dict[Any, Any]:
    """The scales of one file, each over the scale that it extends, with ``arms.<a>,<b>.<key>`` taken apart."""
    given = {scale: {} if values is None else values for scale, values in scales.items()}
    own = {scale: each_arm(values, file, f"scales.{scale}") for scale, values in given.items()}

    def whole(scale: Any, above: tuple[Any, ...] = ()) -> Any:
        values = own[scale]
        if not isinstance(values, dict) or "extends" not in values:
            return values
        other, where = values["extends"], f"scales.{scale}.extends"
        if not isinstance(other, str) or other not in own:
            raise ConfigError(file, where, f"no scale {other!r} in this file; {nearest(other, map(str, own))}")
        if other in (scale, *above):
            raise ConfigError(file, where, f"{other!r} extends this scale; expected no circle")
        below = mappings({other: whole(other, (scale, *above))}, file, "scales")[other]
        return over(below, {key: value for key, value in values.items() if key != "extends"})

    return {scale: whole(scale) for scale in own}


def inherited_scales(below: Mapping[Any, Any], starts: Mapping[Any, Any]) -> dict[Any, Any]:
    """What scales that only the upper file has start from below: its own version of the scale that they extend.

    starts: scale of the upper file -> the scale that it extends, or None.
    """
    found = {}
    for scale, other in starts.items():  # in the order of the file
        if scale in below:
            continue
        while other in starts and other not in below:
            other = starts[other]
        if other in below:
            found[scale] = below[other]
    return found


def each_arm(values: Any, file: str, where: str) -> Any:
    """A scale or a grid with ``arms.<a>,<b>.<key>`` taken apart, so that a file that extends this one may change one of
    the arms. Raises ConfigError."""
    if not isinstance(values, dict):
        return values  # parse refuses it
    out: dict[Any, Any] = {}
    for key, value in values.items():
        names, dot, below = str(key).removeprefix("arms.").partition(".")
        several = str(key).startswith("arms.") and "," in names
        for one in [f"arms.{name.strip()}{dot}{below}" for name in names.split(",")] if several else [key]:
            if {one, f"{one}?", str(one).removesuffix("?")} & out.keys():
                raise ConfigError(file, f"{where}.{one}", f"said twice, once by {key}; expected once")
            out[one] = each_arm(value, file, f"{where}.grid") if one == "grid" else value
    in_order(out, file, where)
    return out


def in_order(settings: Any, file: str, where: str) -> None:
    """Refuse one field of a section that stands before the whole section, which would replace it. Raises
    ConfigError."""
    if not isinstance(settings, dict):
        return  # parse refuses it
    places = {str(key): place for place, key in enumerate(settings)}
    for key, place in places.items():
        for section in itertools.accumulate(key.split("."), "{}.{}".format):
            if places.get(section, place) > place:
                message = f"dropped by the whole section {section} behind it; expected it behind the section, or inside"
                raise ConfigError(file, f"{where}.{key}", message)


def overlaid(below: dict[str, Any], tree: dict[str, Any], depth: int) -> dict[str, Any]:
    """``tree`` over ``below``, key by key down to ``depth`` levels of mappings; anything else replaces as a whole."""
    both = [k for k, v in tree.items() if k not in WHOLE and isinstance(v, dict) and isinstance(below.get(k), dict)]
    if not depth:
        return over(below, tree)
    return below | tree | {k: overlaid(below[k], tree[k], depth - 1) for k in both}


def over(below: dict[Any, Any], settings: dict[Any, Any]) -> dict[Any, Any]:
    """Settings over those below, and behind them: of settings that meet, the later one wins; of ``report``, key by
    key."""
    said = {str(key).removesuffix("?") for key in settings}
    both = {key: value for key, value in below.items() if str(key).removesuffix("?") not in said} | settings
    if isinstance(below.get("report"), dict) and isinstance(settings.get("report"), dict):
        both["report"] = below["report"] | settings["report"]
    return both


def file_name(name: Any, file: str, key: str) -> None:
    """Raise ConfigError unless ``name`` is one plain component of a path, short enough for every file system."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][\w-]{0,63}", name, re.ASCII):
        message = f"{name!r:.80}: expected letters, digits, '_' and '-', 64 at most (it names folders)"
        raise ConfigError(file, key, message)


def mappings(value: Any, file: str, key: str) -> dict[str, dict[str, Any]]:
    """A mapping of mappings, in which nothing (``cpu:``) stands for an empty one. Raises ConfigError."""
    named = mapping({} if value is None else value, file, key)
    return {name: mapping({} if item is None else item, file, f"{key}.{name}") for name, item in named.items()}


def mapping(value: Any, file: str, key: str) -> dict[str, Any]:
    """``value`` if it is a mapping whose keys are text. Raises ConfigError."""
    if not isinstance(value, dict):
        raise ConfigError(file, key, f"{value!r}: expected a mapping")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(file, f"{key}.{name}", f"{name!r} is not text; put the key in quotes")
    return value
