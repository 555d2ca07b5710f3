"""Settings in which a plan differs from the paper's."""

from collections.abc import Sequence
from typing import Any

from lit_memory.plan.runspec import SECTIONS, RunSpec


def differences(specs: Sequence[RunSpec], reference: Sequence[RunSpec]) -> list[str]:
    """Settings of a plan that differ from those of the same arms in ``reference``, the paper's scale.

    One line each, with its arms unless all of them differ alike.
    """
    theirs = {spec.arm: spec for spec in reversed(reference)}
    ours = {spec.arm: spec for spec in reversed(specs)}
    lines: dict[str, list[str]] = {}
    for arm, spec in ours.items():
        for section in SECTIONS:
            mine, paper = getattr(spec, section), getattr(theirs[arm], section)
            for name in mine | paper:
                if mine.get(name) != paper.get(name):
                    line = f"`{section}.{name}`: {_shown(paper.get(name))} → {_shown(mine.get(name))}"
                    lines.setdefault(line, []).append(arm)
    order = list(ours).index
    return [
        line if len(arms) == len(ours) else f"{line} ({', '.join(sorted(arms, key=order))})"
        for line, arms in lines.items()
    ]


def _shown(value: Any) -> str:
    """A setting as text; of stages, what they train on and how long."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "; ".join(map(_stage, value))
    return str(value)


def _stage(stage: dict[str, Any]) -> str:
    return ", ".join(f"{k.removeprefix('task.')} {v}" for k, v in stage.items() if k != "until")
