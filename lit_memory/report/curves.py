"""The training of the runs of a report: metrics of a validation curve, their figure, and the steps to a threshold."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import isfinite, nan
from typing import Any

from lit_memory.plan.sections import STEP, ReportConfig
from lit_memory.report.axes import set_log
from lit_memory.report.labels import MINIMIZED, mean_std, short
from lit_memory.report.markdown import markdown
from lit_memory.report.names import Drawn, Name
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Results
from lit_memory.report.series import show_values
from lit_memory.report.style import REFERENCE, looks, text_color
from lit_memory.report.verdict import mean, std

MOST_CURVES = 10
"""Seeds up to which a figure shows every run along its training."""


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


def shows_shares(plan: ReportPlan) -> bool:
    """Whether the figure of the training shows how many runs have reached the threshold, not the runs themselves."""
    return plan.config.threshold is not None and len(plan.seeds) > MOST_CURVES


def draw_curves(axes: Any, results: Results) -> Drawn:
    """Every run along its training. Its last stage, on the whole task, is bold; earlier ones are on easier tasks."""
    plan, drawn = results.plan, Drawn([], [], [])
    metric, runs = next(metric for _, metric, _, _ in results.learning), {}
    for (arm, _, step, seed), value in sorted(results.learning.items()):
        runs.setdefault((arm, seed), []).append((step, value))
    for arm, look in zip(plan.arms, looks(plan.architectures), strict=True):
        line = {"color": look["color"], "ls": look["ls"]}
        for seed in plan.seeds:
            begin, curve = plan.last_stage(arm, seed), runs.get((arm, seed), [])
            axes.plot(*zip(*curve, strict=True) if curve else ([], []), **line, lw=0.8, alpha=0.6)
            late = [(step, value) for step, value in curve if step >= begin]
            axes.plot(*zip(*late, strict=True) if late else ([], []), **line, lw=1.3)
        last = [curve[-1] for (of, _), curve in runs.items() if of == arm]
        axes.plot([step for step, _ in last], [value for _, value in last], **look | {"ls": ""})
        step, value = map(mean, zip(*last, strict=True)) if last else (nan, nan)
        if isfinite(value):
            drawn.ends.append(Name(plan.shown(arm), step, value, text_color(look["color"])))
        drawn.handles.extend(axes.plot([], [], **look, label=plan.shown(arm)))
    config = curve_config(plan, metric)
    if config.chance is not None:
        axes.axhline(config.chance, **REFERENCE)
        drawn.references.append(Name(f"chance {config.chance:.3g}", axes.get_xlim()[1], config.chance))
    axes.set_xlabel("optimizer steps")
    axes.xaxis.set_major_formatter(lambda step, _: short(step))
    show_values(axes.yaxis, replace(plan, config=config))
    axes.set_ylabel(f"{axes.get_ylabel()}, validation")
    return drawn


def share_reached(results: Results, arm: str) -> list[tuple[float, float]]:
    """Step and share of the arm's runs that have reached the threshold by then, for every run that does, from none
    before the first to the end of the longest training; none of an arm without validations."""
    found = steps_to_threshold(results, arm)
    steps = sorted(step for step in found.values() if step is not None)
    end = max(step for _, _, step, _ in results.learning)
    shares = [i / max(1, len(found)) for i in range(len(steps) + 1)]
    return list(zip([*(steps[:1] or [end]), *steps, end], [*shares, shares[-1]], strict=True))


def reached_label(plan: ReportPlan) -> str:
    """What ``share_reached`` is, in words."""
    return f"share of runs that have reached {plan.config.threshold:g}"


def draw_reached(axes: Any, results: Results) -> Drawn:
    """The share of an arm's runs that have reached the threshold by a step: many runs by themselves are one blot."""
    plan, drawn = results.plan, Drawn([], [], [])
    for arm, look in zip(plan.arms, looks(plan.architectures), strict=True):
        line = {name: look[name] for name in ("color", "ls", "lw")} | {"label": plan.shown(arm)}
        curve = share_reached(results, arm)
        drawn.handles.extend(axes.step(*zip(*curve, strict=True), where="post", **line))
        drawn.ends.append(Name(plan.shown(arm), *curve[-1], text_color(look["color"])))
    set_log(axes.xaxis)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(reached_label(plan))
    return drawn


def curve_config(plan: ReportPlan, metric: str) -> ReportConfig:
    """The config of a figure of this metric along the training."""
    own, same = plan.config, metric == plan.config.y
    chance, y_label = (own.chance, own.y_label) if same else (None, "")
    log_y = metric in MINIMIZED or (own.log_y and same)
    return replace(own, x=STEP, y=metric, x_label="", y_label=y_label, log_y=log_y, chance=chance, identity=False)


def steps_to_threshold(results: Results, arm: str) -> dict[int, float | None]:
    """Seed -> the step at which its last stage first validates the report's threshold; None if it never does. Seeds
    without a validation are left out."""
    plan, given = results.plan, results.plan.config.threshold
    threshold = nan if given is None else given  # nothing reaches NaN
    less = plan.less_is_better(next(metric for _, metric, _, _ in results.learning))
    begins = {seed: plan.last_stage(arm, seed) for seed in plan.seeds}
    validated = {seed for of, _, _, seed in results.learning if of == arm}
    good: dict[int, list[float]] = {seed: [] for seed in plan.seeds if seed in validated}
    for (of, _, step, seed), value in results.learning.items():
        if of == arm and step > begins[seed] and (value <= threshold if less else value >= threshold):
            good[seed].append(step)
    return {seed: min(steps, default=None) for seed, steps in good.items()}


def steps_table(results: Results) -> str:
    """Steps until the last stage of a run first validates ``threshold``, one arm per row; "" without a threshold."""
    plan, threshold, rows = results.plan, results.plan.config.threshold, []
    if threshold is None:
        return ""
    for arm in plan.arms:
        found = steps_to_threshold(results, arm)
        first = [step for step in found.values() if step is not None]
        every = ["never" if step is None else f"{step:,.0f}" for step in found.values()]
        reached = f"{len(first)} of {len(found)}"
        rows.append([plan.shown(arm), mean_std(first, ",.0f", ",.0f"), reached, ", ".join(every)])
    header = ["arm", f"steps to {threshold:g}", "seeds that reach it", "every seed"]
    caption = (
        f"Steps until the last stage of the training first validates {threshold:g}, mean ± standard deviation over\n"
        "the seeds that come that far."
    )
    return f"{caption}\n\n{markdown(header, rows)}"
