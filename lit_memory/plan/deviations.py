"""Settings in which a plan differs from the paper's."""

from collections.abc import Sequence
from typing import Any

from lit_memory.plan.runspec import SECTIONS, RunSpec


def differences(specs: Sequence[RunSpec], reference: Sequence[RunSpec]) -> list[str]:
    """Settings of a plan that differ from those of the same arms in ``reference``, the paper's scale.

    One line each, with its arms unless all of them differ alike; of what a grid sweeps, all its values. Arms that the
    reference does not have are left out.
    """
    theirs, ours = _by_arm(reference), _by_arm(specs)
    ours = {arm: found for arm, found in ours.items() if arm in theirs}
    lines: dict[str, list[str]] = {}
    for arm, found in ours.items():
        for section, name in sorted(found | theirs[arm], key=lambda key: SECTIONS.index(key[0])):
            mine, paper = (values.get((section, name), [None]) for values in (found, theirs[arm]))
            if mine != paper:
                line = f"`{section}.{name}`: {_listed(paper)} → {_listed(mine)}"
                lines.setdefault(line, []).append(arm)
    order = list(ours).index
    return [
        line if len(arms) == len(ours) else f"{line} ({', '.join(sorted(arms, key=order))})"
        for line, arms in lines.items()
    ]


def _by_arm(specs: Sequence[RunSpec]) -> dict[str, dict[tuple[str, str], list[Any]]]:
    """Arm -> (section, name) -> the different values of its runs, in their order."""
    found: dict[str, dict[tuple[str, str], list[Any]]] = {}
    for spec in specs:
        of_arm = found.setdefault(spec.arm, {})
        for section in SECTIONS:
            for name, value in getattr(spec, section).items():
                values = of_arm.setdefault((section, name), [])
                if value not in values:
                    values.append(value)
    return found


def _listed(values: Sequence[Any]) -> str:
    """A setting, or those of a grid."""
    return _shown(values[0]) if len(values) == 1 else f"best of {', '.join(map(_shown, values))}"


def _shown(value: Any) -> str:
    """A setting as text; of stages, what they train on, how long, and until when."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "; ".join(map(_stage, value))
    return "none" if value in ("", [], {}, None) else str(value)


def _stage(stage: dict[str, Any]) -> str:
    parts = [f"{k.removeprefix('task.')} {v}" for k, v in stage.items() if k not in ("until", "needed")]
    parts += [f"until {metric} {value}" for metric, value in (stage.get("until") or {}).items()]
    return ", ".join(parts) or "unchanged"
