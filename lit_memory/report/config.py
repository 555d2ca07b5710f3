"""The ``report:`` section of an experiment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lit_memory.plan.paper import paper_rows
from lit_memory.util.checks import FieldError

TIMES = {
    "seconds": "Seconds of wall clock that the test takes per context, reading and answering",
    "train_tokens_per_s": "Tokens a second of training, forward and backward, on as many contexts of the tested length "
    "as have the tokens of a training batch",
}
"""What a run measures by the clock at every x of the test, and what it is; the second one with
``train.timed_steps``."""


@dataclass
class ReportConfig:
    """The ``report:`` section of an experiment."""

    kind: Literal["line"] = "line"
    x: str = "test_pairs"
    """test_<field>: what the test varies is the x axis; the axis of one of the task's curves; or step, for the
    validations along the training."""
    y: str = "exact_match"
    """The metric of the figure, and of ``arm[x]`` in ``expect``."""
    hue: Literal["arm"] = "arm"
    band: Literal["std"] = "std"
    """Mean over seeds, plus and minus one sample standard deviation."""
    x_label: str = ""
    """Words and units for the axis; "" takes them from labels.LABELS, or else the field's name."""
    y_label: str = ""
    log_x: bool = False
    """A logarithmic axis, which begins with a linear part where 0 is on it."""
    log_y: bool = False
    chance: float | None = None
    """y of blind guessing, drawn as a horizontal line."""
    intervals: bool = False
    """A table of 95 % Wilson intervals beside the first; y is a share of right answers."""
    identity: bool = False
    """Draw y = x: all that was written is kept."""
    state_x: int | str | None = None
    """Draw y at this tested value against the floats of state, too: a tested number, first or last; None for no second
    figure."""
    time: Literal["", "seconds", "train_tokens_per_s"] = ""
    """Show one of ``TIMES``, in a table and a figure of its own."""
    paper_values: str = ""
    """A file of lit_memory/paper_values without .csv; "" for none."""
    paper_rows: list[str] = field(default_factory=list)
    """Beginnings of "table: condition" ("Fig 2b", "Table 1: QA1") that select rows of that file; empty for all."""
    columns: int | None = None
    """Most values of x that the table shows, at equal distances, the first and the last among them; default: all.
    table.csv has all."""
    threshold: float | None = None
    """With x: step, the first step at which y is that good is the metric steps_to."""
    notes: str = ""
    """Markdown for the report."""

    def __post_init__(self) -> None:
        if isinstance(self.state_x, str) and self.state_x not in ("first", "last"):
            shown = f"{self.state_x!r:.80}"
            raise FieldError("state_x", self.state_x, "expected a tested number without quotes, first or last", shown)
        if self.columns is not None and self.columns < 2:
            raise FieldError("columns", self.columns, "expected at least 2, or none for all")
        paper_rows(self.paper_values, self.paper_rows)

    def state_value(self, x_values: Sequence[float]) -> float | None:
        """Which of the tested values ``state_x`` names. Raises ValueError for one that is not tested."""
        x = (
            {"first": x_values[0], "last": x_values[-1]}[self.state_x]
            if isinstance(self.state_x, str)
            else self.state_x
        )
        if x is not None and x not in x_values:
            raise FieldError(
                "state_x", x, f"expected one of the tested values {', '.join(map(str, x_values))}, first or last"
            )
        return x
