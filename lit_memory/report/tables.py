"""The tables of a report: table.csv, table.md and times."""

import csv
import io
import math
from collections.abc import Sequence

from lit_memory.plan.sections import STEP
from lit_memory.report.labels import count, decimals, mean_std, short
from lit_memory.report.markdown import markdown
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Results
from lit_memory.report.verdict import mean, std

CURVES = """After the training, mean ± standard deviation over seeds. Roughness: standard deviation of the change of \
the validation loss from one
validation to the next, in the second half of the training."""
NEVER = " nan: a seed has never come that far."


def csv_table(results: Results) -> str:
    """All metrics, in the order of the plan. Empty: not measured; nan: measured as not a number."""
    plan, file = results.plan, io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["arm", "x", "metric", "mean", "std", "n", *(f"seed_{seed}" for seed in plan.seeds)])
    for arm in plan.arms:
        for x in plan.x_values:
            for metric in results.metrics:
                values = results.values(arm, metric, x)
                average = decimals(mean(values) if values else None)
                spread = decimals(std(values) if len(values) > 1 else None)
                seeds = map(decimals, results.by_seed(arm, metric, x))
                writer.writerow([arm, f"{x:.10g}", metric, average, spread, len(values), *seeds])
    return file.getvalue()


def main_table(results: Results) -> str:
    """table.md: the metric of the figure, one arm per row and one tested value per column."""
    plan, rows = results.plan, []
    shown = shown_columns(plan)
    differ = any(len(set(plan.samples(arm))) > 1 for arm in plan.arms)
    for arm in plan.arms:
        groups = [results.values(arm, None, x) for x in shown]
        samples = [_sample_count(plan.samples(arm))] if differ else []
        finished = [len(group) for x, group in zip(shown, groups, strict=True) if x in plan.tested(arm)]
        seeds = f"{min(finished)} of {len(plan.seeds)}"
        sizes = [count(plan.sizes(arm).get("parameters")), _state_cell(plan, arm)]
        rows.append([plan.shown(arm), *map(mean_std, groups), *samples, seeds, *sizes])
    caption = f"{plan.y_label}, mean ± standard deviation over seeds; columns: {plan.x_label}"
    header = ["arm", *map(short, shown), *["samples"] * differ, "seeds", "parameters", "state floats"]
    return f"{caption}\n\n{markdown(header, rows)}{_curve_table(results)}"


def ranking(results: Results) -> str:
    """The arms by the metric of the figure at the last tested value, the best first, in a sentence."""
    plan, last = results.plan, results.plan.x_values[-1]
    values = {arm: mean(results.values(arm, None, last)) for arm in plan.arms if last in plan.tested(arm)}
    sign = 1 if plan.less_is_better(plan.config.y) else -1
    order = sorted(values, key=lambda arm: (math.isnan(values[arm]), sign * values[arm]))
    ranks = [1 + [values[other] for other in order].index(values[arm]) for arm in order]  # equal ones share one
    shown = ", ".join(f"{i}. {plan.shown(arm)} {values[arm]:.3g}" for i, arm in zip(ranks, order, strict=True))
    return f"By {plan.y_label} at {short(last)}, mean over seeds: {shown}."


def shown_columns(plan: ReportPlan) -> list[float]:
    """The tested values that the table shows: all, or ``columns`` of them at equal distances."""
    last, most = len(plan.x_values) - 1, plan.config.columns or len(plan.x_values)
    if last < most:
        return plan.x_values
    return [plan.x_values[round(i * last / (most - 1))] for i in range(most)]


def _state_cell(plan: ReportPlan, arm: str) -> str:
    """Floats of state: ``256``, or ``256 + 512 a segment (51,456 at 100)`` if it grows."""
    sizes = plan.sizes(arm)
    state = count(sizes.get("state_floats"))
    if plan.grows(arm):
        state += f" + {count(sizes['state_growth'])} a {sizes.get('growth_unit', 'segment')}"
        if plan.state_x is not None:
            state += f" ({count(plan.state_size(arm))} at {short(plan.state_x)})"
    return state


def _curve_table(results: Results) -> str:
    """Summary of the training, one arm per row, if x is the training step; "" otherwise."""
    plan, config = results.plan, results.plan.config
    if config.x != STEP:
        return ""
    titles = {
        f"test_{config.y}": f"{plan.y_label} of the test",
        "steps_to": f"steps to a {plan.y_label} of {config.threshold or 0:g}",
        "roughness": "roughness of the loss",
    }
    columns = {}
    for metric, title in titles.items():
        groups = [results.values(arm, metric, plan.x_values[-1]) for arm in plan.arms]
        if any(math.isfinite(mean(group)) for group in groups):
            columns[title] = [mean_std(group, ".4g", ".2g") for group in groups]
    if not columns:
        return ""
    rows = [[plan.shown(arm), *(cells[i] for cells in columns.values())] for i, arm in enumerate(plan.arms)]
    table = markdown(["arm", *columns], rows)
    return f"\n{CURVES}{NEVER if 'nan' in table else ''}\n\n{table}"


def _sample_count(samples: Sequence[int]) -> str:
    """One number if all are equal, else all of them."""
    return ", ".join(map(str, samples if len(set(samples)) > 1 else samples[:1]))


def time_table(results: Results) -> str:
    """The times of the report, one arm per row and one tested value per column."""
    plan, rows = results.plan, []
    for arm in plan.arms:
        times = [results.values(arm, plan.config.time, x) for x in plan.x_values]
        rows.append([plan.shown(arm), *(mean_std(of_x, ".3g", ".2g") for of_x in times)])
    return markdown(["arm", *map(short, plan.x_values)], rows)
