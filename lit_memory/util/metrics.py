"""The names that metrics have in Lightning and in MLflow. Standard library only."""

import re
from typing import NamedTuple, Self

Condition = int | float
"""Value of the field that a test varies: the x of a figure."""
PATTERN = re.compile(
    r"(?:(?P<split>\w+)/)?(?P<name>.+?)(?:\[(?P<place>\d+)\])?(?:@(?P<condition>-?\d+(?:\.\d+)?(?:e[-+]?\d+)?))?"
)


class MetricName(NamedTuple):
    """Name of one number, written as ``split/name[place]@condition``.

    name: what is measured, "loss". split: "train", "valid" or "test" ("": not given). condition: value of the field
    that the test varies. place: place on a curve along the context, each with a value of its own (``Task.curves``).
    """

    name: str
    split: str = ""
    condition: Condition | None = None
    place: int | None = None

    def __str__(self) -> str:
        split = f"{self.split}/" if self.split else ""
        place = "" if self.place is None else f"[{self.place}]"
        condition = "" if self.condition is None else f"@{self.condition}"
        return f"{split}{self.name}{place}{condition}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``. What has another form is a name and nothing else."""
        found = PATTERN.fullmatch(text)
        if not found:
            return cls(text)
        split, name, place, condition = found.group("split", "name", "place", "condition")
        return cls(name, split or "", number(condition), int(place) if place else None)


def named_at(name: str, condition: Condition) -> str:
    """ "exact_match at 500": one number of a test by the name that MLflow shows. Whole numbers are written out, as its
    names may not have the + of 1e+06."""
    return f"{name} at {int(condition) if condition == int(condition) else f'{condition:g}'}"


def number(text: str | None) -> Condition | None:
    """The number that a text shows; whole ones are integers, which may be too long for a float."""
    if text is None:
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)
