"""The settings of every arm, in the words of the YAML."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def arm_settings(own: Mapping[str, Mapping[str, Any]], specs: Sequence[Any]) -> dict[str, str]:
    """Arm -> Markdown: its model, its settings that differ between arms, and the run whose weights it starts from.

    What the YAML says of an arm comes first, then what it says of others and this one has as well, with other values.

    own: arm -> the overrides of the YAML.
    specs: the runs of every arm that are shown.
    """
    runs = {spec.arm: [other for other in specs if other.arm == spec.arm] for spec in specs}
    said = dict.fromkeys(key for overrides in own.values() for key in _dotted_keys(overrides))
    unequal = [key for key in said if len({_values(r, key) for r in runs.values() if _has(r[0], key)}) > 1]
    shown = {}
    for arm, overrides in own.items():
        start = _start(runs[arm][0])
        keys = dict.fromkeys(_dotted_keys(overrides))
        differing = [key for key in keys if len({_values(of_arm, key) for of_arm in runs.values()}) > 1]
        differing += [key for key in unequal if key not in keys and _values(runs[arm], key) not in ("null", "")]
        hidden = {"model.name", "train.init"} if start else {"model.name"}
        settings = ["model.name", *(key for key in differing if key not in hidden)]
        text = ", ".join(f"{key}: {_values(runs[arm], key)}" for key in settings)
        shown[arm] = f"`{text}`, starts from `{start}`" if start else f"`{text}`"
    return shown


def _has(spec: Any, key: str) -> bool:
    section, _, name = key.partition(".")
    return name in getattr(spec, section)


def _dotted_keys(overrides: Mapping[str, Any]) -> Iterator[str]:
    """``model.gamma`` of ``{"model.gamma?": ...}`` and of ``{"model": {"gamma": ...}}``."""
    for key, value in overrides.items():
        if "." in key:
            yield key.rstrip("?")
        else:
            yield from (f"{key}.{name}".rstrip("?") for name in value)


def _values(specs: Sequence[Any], key: str) -> str:
    """The values of the runs of an arm; several where their seeds chose different points of a grid."""
    return " or ".join(dict.fromkeys(_value(spec, key) for spec in specs))


def _value(spec: Any, key: str) -> str:
    """A value of a run as JSON without quotes."""
    section, _, name = key.partition(".")
    return json.dumps(getattr(spec, section).get(name), ensure_ascii=False).replace('"', "")


def _start(spec: Any) -> str:
    """The run whose weights a run starts from, as ``experiment/arm``; "" for none."""
    init = spec.train["init"]
    start = init.get("run", "") if isinstance(init, dict) else ""
    return start if "/" in start or not start else f"{spec.experiment}/{start}"
