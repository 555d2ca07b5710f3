"""What the parent run in MLflow shows of a report: a description to read, and a metric for every arm."""

import math
from dataclasses import dataclass, field

from lit_memory.report.page import join_blocks, paper_claim
from lit_memory.report.results import Report, Results
from lit_memory.report.verdict import mean
from lit_memory.util.metrics import named_at

MOST_X = 20
"""Values of x with a metric each; of more, the first and the last have one."""
MOST_METRICS = 1000
"""What MLflow takes in one call."""


@dataclass(frozen=True)
class Summary:
    """What is shown of one report."""

    verdict: str
    note: str = ""
    """Its description: claim, verdict and table, in Markdown."""
    metrics: dict[str, float] = field(default_factory=dict)
    """"arm/metric at x" -> mean over seeds."""
    modified: str = ""
    """What the command line changed; "" for nothing."""


def of_report(results: Results, report: Report) -> Summary:
    """The summary of the report of an experiment."""
    plan, y = results.plan, results.plan.config.y
    shown = plan.x_values if len(plan.x_values) <= MOST_X else [plan.x_values[0], plan.x_values[-1]]
    means = {named_at(f"{arm}/{y}", x): mean(results.values(arm, None, x)) for arm in plan.arms for x in shown}
    known = [(name, value) for name, value in means.items() if math.isfinite(value)]
    modified = " ".join(plan.modified)
    changed = f"Changed on the command line: `{modified}`" if modified else ""
    verdict = " ".join(filter(None, [f"**{report.verdict}** at {plan.setting}{report.scope}.", report.reason]))
    note = join_blocks([f"### {plan.heading}", verdict, changed, paper_claim(plan.paper), report.table])
    return Summary(report.verdict, note, dict(known[:MOST_METRICS]), modified)


def of_marks(report: Report) -> Summary:
    """The summary of a report of marks."""
    return Summary(report.verdict, join_blocks([f"**{report.verdict}**", report.table]))
