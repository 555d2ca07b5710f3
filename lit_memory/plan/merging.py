"""Settings laid over each other: dotted keys, whole sections, settings of one arm, and overrides."""

import copy
import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.parsing import SCALED
from lit_memory.plan.runspec import SECTIONS
from lit_memory.plan.strict import DEEPEST, problems, too_deep
from lit_memory.util.checks import first_line, nearest


def merged(
    base: Mapping[str, Any], layers: Iterable[tuple[str, Mapping[str, Any]]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The sections ``base`` under all layers, and the origin of every dotted key that a layer sets.

    layers: (origin, dotted settings) of each; later ones win. Raises ConfigError for a key of no section.
    """
    tree, origin = copy.deepcopy(dict(base)), {}
    for where, layer in layers:
        for key, value in layer.items():
            apply(tree, key, value, where)
            if key in SECTIONS:  # the settings before it are gone
                origin = {k: v for k, v in origin.items() if not k.startswith(f"{key}.")}
            origin[key.rstrip("?")] = where
    return tree, origin


def apply(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set one dotted key, or replace one whole section, in place. Raises ConfigError."""
    section, _, name = key.partition(".")
    if section not in SECTIONS or (not name and not isinstance(value, dict)):
        expected = "expected model.<field>, task.<field>, train.<field> or a whole section"
        if not name and section in SECTIONS:
            raise ConfigError(where, key, f"{value!r:.80}: expected a mapping, the whole section, or {section}.<field>")
        known = (*SECTIONS, *SCALED, "report", "arms", "extends") if "(scale " in where else SECTIONS
        raise ConfigError(where, key, f"{expected}; {nearest(section, known)}")
    if not name:
        tree[section] = copy.deepcopy(value)
        return
    old = tree[section]
    old.pop(name if name.endswith("?") else f"{name}?", None)
    old[name] = copy.deepcopy(value)


def split_arm(values: Mapping[str, Any], arm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a scale or a grid for all arms, and those for one arm (``arms.<arm>.<key>``)."""
    prefix = f"arms.{arm}."
    common = {k: v for k, v in values.items() if not k.startswith("arms.")}
    return common, {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def parse_override(text: str) -> tuple[str, Any]:
    """("model.width", 64) from ``model.width=64``; values are YAML. Several, with commas and without brackets or quotes
    around them, are a tuple: the points of a grid. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[\w.]+\??", key):
        raise ConfigError("command line", text, "expected key=value, for example train.lr=1e-3")
    try:
        parsed = copy.deepcopy(_plain(value))
    except (RecursionError, OmegaConfBaseException, YAMLError, ValueError) as error:
        if too_deep(error):
            raise ConfigError("command line", key, f"nested more than {DEEPEST} deep") from None
        raise ConfigError("command line", key, f"value {value!r} is not YAML ({first_line(error)})") from None
    for place, problem in problems(parsed, ""):
        raise ConfigError("command line", key + place.removeprefix("value"), problem)
    plain = parsed["value"]
    if isinstance(plain, str) and "," in plain and value.strip()[0] not in "'\"":
        points = tuple(parse_override(f"{key}={part}")[1] for part in plain.split(","))
        if any(points.index(point) < i for i, point in enumerate(points)):
            raise ConfigError("command line", key, f"{value}: expected different values for a grid")
        return key, points
    return key, plain


@lru_cache(maxsize=256)
def _plain(value: str) -> Any:
    """A value of the command line as YAML has it, below "value". Every experiment of a command reads the same few."""
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))


def point_name(settings: Mapping[str, Any]) -> str:
    """The name of a grid point, which also names folders: "lr0.1-layers2"; "" without a grid."""
    return folder_name("-".join(f"{k.rpartition('.')[2].rstrip('?')}{v}" for k, v in settings.items()))


def folder_name(text: str) -> str:
    """``text`` if a folder may have that name, else its plain characters and a checksum: values of a grid may be paths,
    lists or long."""
    if len(text) <= 80 and re.fullmatch(r"(\w[\w.+=-]*)?", text, re.ASCII):
        return text
    rest, checksum = re.sub(r"[^\w.+=-]+", "_", text, flags=re.ASCII), hashlib.sha256(text.encode()).hexdigest()
    return f"{rest[:70]}-{checksum[:8]}"
