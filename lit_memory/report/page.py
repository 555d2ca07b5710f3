"""The README.md of a report: verdict and figure first, then everything that is needed to check them."""

from collections.abc import Mapping
from typing import Any

from lit_memory.plan.paper import paper_rows
from lit_memory.plan.sections import TIMES
from lit_memory.report.budget import budget_table, unequal
from lit_memory.report.curves import shows_shares, steps_table
from lit_memory.report.grid import broke_down, stopped_at
from lit_memory.report.labels import count, label, seeds_shown, short
from lit_memory.report.markdown import markdown
from lit_memory.report.paper import section
from lit_memory.report.plan import ReportPlan
from lit_memory.report.results import Report, Results
from lit_memory.report.statistics import DRAWS
from lit_memory.report.tables import time_table
from lit_memory.report.verdict import INCONCLUSIVE, NOT_JUDGED, NOT_REPRODUCED, REPRODUCED
from lit_memory.report.views import known_views, unknown_runs
from lit_memory.util.views import VIEWS

MARGINS = """Margin: left minus right in the direction of the sign, of a chain the smallest. Its interval is the wider
of Student's t and a bootstrap of {draws:,} draws over {what}, at the level at which Holm's correction over all
lines judges it."""
REQUIRED = "Required before the claim can be judged, by the mean over seeds:"
VERIFIED = "Verified properties, by the mean over seeds; they hold by construction, and no verdict rests on them alone:"
FILES = """Every seed and metric: [table.csv](table.csv). For papers: [table.tex](table.tex) and the reproducibility
sheet [sheet.md](sheet.md)."""
HOLDS = {REPRODUCED: "yes", NOT_REPRODUCED: "no", INCONCLUSIVE: "undecided", NOT_JUDGED: "not judged"}
"""Verdict of a line -> whether it holds."""


def page(plan: ReportPlan, report: Report, results: Results) -> str:
    """README.md."""
    blocks = [
        *_head(plan, report),
        paper_claim(plan.paper),
        "![The figure of this report; its numbers are in the table below.](figure.png)",
        _state_figure(plan),
        _curves(results),
        line_tables(report),
        f"## Arms\n\n{arm_table(plan)}" if plan.settings else "",
        _tuning(plan, report),
        _numbers(results, report),
        _times(results),
        _memories(results),
        *_beside_the_paper(plan),
        f"## Notes\n\n{plan.config.notes.strip()}" if plan.config.notes else "",
        f"## Budget\n\n{budget_table(plan)}" if plan.runs else "",
        "## Runs\n\n" + _runs(plan),
        "## How to reproduce\n\n" + origin_list(plan),
    ]
    return join_blocks(blocks)


def join_blocks(blocks: list[str]) -> str:
    """Paragraphs of Markdown as one text; empty ones are left out."""
    return "\n\n".join(block.strip() for block in blocks if block) + "\n"


def paper_claim(paper: Mapping[str, str]) -> str:
    """The paper with a link, its table or figure, and its claim; "" without a paper."""
    title = paper.get("title", "")
    if not title:
        return ""
    link = f"[{title}](https://arxiv.org/abs/{paper['arxiv']})" if paper.get("arxiv") else title
    return f"{link}, {paper.get('item', '')}. Claim: {paper.get('claim', '').rstrip('.')}."


def _beside_the_paper(plan: ReportPlan) -> list[str]:
    """What the paper reports and what deviates from it; without a paper, what a reader must know of the runs."""
    if not plan.paper.get("title"):
        return ["## What else to know\n\n" + deviation_list(plan)] if plan.deviations else []
    reported = section(paper_rows(plan.config.paper_values, plan.config.paper_rows))
    deviates = "## What deviates from the paper's set-up\n\n" + deviation_list(plan)
    return ["## What the paper reports\n\n" + reported, deviates]


def _head(plan: ReportPlan, report: Report) -> list[str]:
    """Title, a warning if the command line changed settings, the verdict, and what it has to be read with."""
    changed = ", ".join(f"`{override}`" for override in plan.modified)
    warning = (
        f"> **MODIFIED RUN**: changed on the command line: {changed}. What follows holds for the changed set-up only."
    )
    verdict = f"**{report.verdict}** at {plan.setting}{report.scope}"
    if report.missing:
        verdict += f". Missing: {'; '.join(report.missing)}."
    elif report.reason:
        verdict += f". {report.reason}"
    remarks = [*plan.config.caveats, unequal(plan), breakdowns(plan)]
    caveats = "\n>\n".join(f"> {remark}" for remark in remarks if remark)
    return [f"# {title(plan)}", f"Experiment `{plan.experiment}`", warning if changed else "", verdict, caveats]


def breakdowns(plan: ReportPlan) -> str:
    """The runs whose training broke down, and which were tested all the same; "" without any."""
    broken: dict[str, list[str]] = {}
    for run in plan.runs:
        if "broke_down" in run:
            steps = f"seed {run['seed']} after {count(run['broke_down'])} steps"
            broken.setdefault(plan.shown(run["arm"]), []).append(steps)
    ended = "ended with a number that is not finite, and the weights before it were tested"
    told = [f"{arm} ({', '.join(seeds)})" for arm, seeds in broken.items()]
    return f"**The training of some runs** {ended}: {'; '.join(told)}." if broken else ""


def title(plan: ReportPlan) -> str:
    """The subject of the claim, and the level of evidence."""
    return " · ".join(filter(None, [plan.heading, plan.evidence]))


def line_tables(report: Report) -> str:
    """Every line in numbers: the claims with their intervals, then requirements and verified properties."""
    rows: dict[str, list[list[str]]] = {}
    for claim in report.claims:
        margin = [claim.shown_margin if claim.interval else "–"] if claim.kind == "claim" else []
        row = [f"`{claim.line}`", claim.numbers, *margin, HOLDS.get(claim.verdict, "unknown")]
        rows.setdefault(claim.kind, []).append(row)
    resampled = " or ".join(dict.fromkeys(claim.resampled for claim in report.claims if claim.resampled))
    margins = MARGINS.format(draws=DRAWS, what=resampled)
    blocks = {
        "claim": (["expected", "measured", "margin", "holds"], "", margins if resampled else ""),
        "requirement": (["required", "measured", "holds"], REQUIRED, ""),
        "property": (["property", "measured", "holds"], VERIFIED, ""),
    }
    shown = [
        (above, markdown(head, rows[kind]), below) for kind, (head, above, below) in blocks.items() if kind in rows
    ]
    return "\n\n".join(text.strip() for block in shown for text in block if text)


def arm_table(plan: ReportPlan) -> str:
    """The settings of every arm."""
    names = [[plan.shown(arm), f"`{arm}`"] if plan.labels else [arm] for arm in plan.settings]
    rows = [[*name, settings] for name, settings in zip(names, plan.settings.values(), strict=True)]
    header = ["arm", *["id"] * bool(plan.labels), "settings"]
    return markdown(header, rows) if rows else ""


def _numbers(results: Results, report: Report) -> str:
    """The table of the figure, and links to table.csv and the PDFs."""
    plan, curves = results.plan, ["curves"] * bool(results.learning)
    names = ["figure", *["state"] * (plan.state_x is not None), *["time"] * plan.times_apart, *curves]
    names += ["grid"] * bool(plan.grid)
    prints = ", ".join(f"[{name}.pdf]({name}.pdf)" for name in names)
    return f"## Numbers\n\n{report.table}\n{FILES} For print: {prints}."


def _state_figure(plan: ReportPlan) -> str:
    """The figure of y against the floats of state, with an explanation; "" if the report has none."""
    if plan.state_x is None:
        return ""
    x, y = short(plan.state_x), plan.y_label
    grows = any(map(plan.grows, plan.arms))
    grown = " A state that grows is counted as it is when that test asks." if grows else ""
    return (
        f"![{y} at {x} against the floats of state; the numbers are in the table below.](state.png)\n\n"
        f"{y} against the floats of state that one sample carries from segment to segment; {plan.x_label}: {x}.{grown}"
    )


def _curves(results: Results) -> str:
    """The figure of the training and the steps that it takes; "" if the report has none."""
    if not results.learning:
        return ""
    shares = "The share of runs that have reached the threshold, along the training."
    shown = shares if shows_shares(results.plan) else "Validations along the training of every run."
    image = f"![{shown}](curves.png)"
    return f"## Along the training\n\n{image}\n\n{steps_table(results)}"


def _tuning(plan: ReportPlan, report: Report) -> str:
    """The figure of what was tuned, and how points were chosen; "" without a grid."""
    if not plan.grid:
        return ""
    y = label(plan.select)
    failed = [f"{plan.shown(run['arm'])} {run['point']} seed {run['seed']}" for run in plan.grid if broke_down(run)]
    lost = f" Training broke down, so they are no candidates: {', '.join(failed)}." if failed else ""
    each = "Every arm and seed has the point of its grid with the best"
    if plan.tune_seeds:
        each = f"Every arm has the point of its grid that is best over {seeds_shown(plan.tune_seeds)}, by the mean"
    fresh = ""
    if report.fresh:
        fresh = (
            "\n\nA seed that chooses is judged where its own run was seen to do well, which flatters arms whose runs\n"
            f"differ. By {seeds_shown(plan.fresh_seeds)} alone the verdict is {report.fresh}."
        )
    return (
        f"## Tuning\n\n![{y} of the last validation against what was tuned.](grid.png)\n\n"
        f"{each} {y} of the last validation (where that is equal,\n"
        f"the least loss), chosen before any test is read.{lost} All points, with the tests of those that were not\n"
        f"chosen, are in the second table below; every run: [grid.csv](grid.csv).{fresh}"
    )


def _times(results: Results) -> str:
    """The figure and the table of times, with an explanation; "" if the report has none."""
    name = results.plan.config.time
    if not name:
        return ""
    figure = f"![{label(name)}; the numbers are in the table below.](time.png)\n\n"
    return (
        f"## Time\n\n{figure * results.plan.times_apart}"
        f"{TIMES[name]}, mean ± standard deviation over seeds. They are measured, on the hardware\n"
        f"below and with whatever else ran there, so every run has others; in MLflow they are `time/{name}`.\n\n"
        f"{time_table(results)}"
    )


def _memories(results: Results) -> str:
    """The figures of the memory, and the runs of which there is none; "" if the report asks for none."""
    known, blocks = known_views(results), []
    for view in results.plan.config.memory:
        words = f"{VIEWS[view].words}."
        if view in known:
            blocks.append(f"![{words}](memory_{view}.png)\n\n{words}")
        if unknown := unknown_runs(results, view):
            runs = "; ".join(f"{arm}, seed {', '.join(map(str, seeds))}" for arm, seeds in unknown.items())
            blocks.append(f"No `{view}` of these runs, as {VIEWS[view].unknown}: {runs}.")
    if known:
        blocks.append("The numbers: [memory.npz](memory.npz).")
    return "## Memory\n\n" + "\n\n".join(blocks) if blocks else ""


def deviation_list(plan: ReportPlan) -> str:
    """The differences from the paper's set-up."""
    return "\n".join(f"- {deviation}" for deviation in plan.deviations) or "None stated."


def _runs(plan: ReportPlan) -> str:
    """One row per run: status, steps, seconds and where to find it."""
    rows = []
    for run in plan.runs:
        steps, stages, stopped = count(run.get("steps")), run.get("stage_steps") or (), stopped_at(run)
        if len(stages) > 1 or stopped:
            steps += f" ({' + '.join(map(count, stages))}{f'; stopped at stage {stopped}' if stopped else ''})"
        if "broke_down" in run:
            steps += ", broke down"
        key, run_id = (f"`{run[name]}`" if run.get(name) else "–" for name in ("key", "run_id"))
        rows.append(
            [
                run["arm"],
                run["seed"],
                run.get("status") or "–",
                steps,
                count(run.get("seconds")),
                key,
                run_id,
            ]
        )
    header = ["arm", "seed", "status", "steps (per stage)", "seconds", "key", "run id"]
    return markdown(header, rows) if rows else "None."


def origin_list(plan: ReportPlan) -> str:
    """The command, and the code, libraries and hardware of the runs."""
    command = f"```bash\n{plan.command}\n```\n\n" if plan.command else ""
    lines = [f"- {name.replace('_', ' ')}: {_fact(value)}" for name, value in plan.provenance.items()]
    return command + "\n".join(lines)


def _fact(value: Any) -> str:
    """A value of the provenance: a dictionary on one line, yes or no for a bool."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
