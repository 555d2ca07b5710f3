"""Metrics of a whole training curve, for reports with the x axis ``step``. Standard library only."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import nan

from lit_memory.report.verdict import std


def curve_metrics(
    values: Mapping[int, float], losses: Mapping[int, float], reached: Callable[[float], bool]
) -> dict[str, float]:
    """``plan.sections.OF_A_RUN`` from the validations of one run, step -> value.

    steps_to: the first step at which ``values``, those of the figure, have ``reached`` the report's threshold; NaN if
        never.
    roughness: the standard deviation of the change of the loss from one validation to the next, in the second half of
        the run, where its trend is small.
    """
    steps_to = next((float(step) for step, value in sorted(values.items()) if reached(value)), nan)
    late = [loss for _, loss in sorted(losses.items())][len(losses) // 2 :]
    return {"steps_to": steps_to, "roughness": std([new - old for old, new in pairwise(late)])}
