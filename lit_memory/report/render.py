"""A plan and its FINISHED runs in, a folder out: figure.png, figure.pdf, table.csv, table.md, verdict.json and
README.md; state.png and state.pdf where the report asks for y against the floats of state, time.png and time.pdf where
it asks for times.

``render`` is pure apart from the files it writes: no clock, no search for runs, no torch, no mlflow. What the plan asks
for and the runs do not have yet is named, and the verdict stays INCOMPLETE until it is there. table.csv and the figures
depend on the plan and the measured values alone, so the same experiment gives the same bytes; ``TIMES``, which differ
from run to run, are in no table.csv. The language of ``expect`` lines is in ``plan.claims``.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_memory.plan.claims import check_expect
from lit_memory.plan.paper import paper_rows
from lit_memory.plan.sections import STEP, TIMES, ReportConfig
from lit_memory.report.figures import OPTIONAL, draw, label, short
from lit_memory.report.markdown import markdown
from lit_memory.report.paper import section
from lit_memory.report.verdict import INCOMPLETE, NOT_REPRODUCED, REPRODUCED, Claim, evaluate, mean, std
from lit_memory.util import files


@dataclass(frozen=True)
class ReportPlan:
    """What a report needs to know of a plan."""

    experiment: str
    scale: str
    paper: dict[str, str]
    """title, arxiv, item, claim."""
    arms: list[str]
    seeds: list[int]
    x_values: list[float]
    config: ReportConfig
    expect: list[str]
    modified: list[str] = field(default_factory=list)
    """Overrides of the command line; empty if the YAML ran as it is."""
    train_x: float | None = None
    """The largest x seen in training."""
    paper_x: float | None = None
    """The largest x that the scale "paper" tests, where this is another scale."""
    settings: dict[str, str] = field(default_factory=dict)
    """What every arm is, see ``arm_settings``."""
    deviations: list[str] = field(default_factory=list)
    """What differs from the paper's set-up."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """arm, seed; where known also key, status, run_id, parameters, state_floats, state_growth, growth_unit, segments
    (that the test at ``state_x`` writes; of a state that grows), samples (of the test, a number for every x), steps,
    stage_steps, seconds."""
    command: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    """git commit, dirty, versions, hardware, date."""

    def __post_init__(self) -> None:
        if self.config.log_x and min(self.x_values) < 0:
            raise ValueError(f"log_x: expected values of {self.config.x} of 0 or more, got {min(self.x_values):g}")
        self.config.state_value(self.x_values)

    @property
    def state_x(self) -> float | None:
        """The x of the second figure, if there is one."""
        return self.config.state_value(self.x_values)

    def sizes(self, arm: str) -> dict[str, Any]:
        """The facts of the arm's runs that are the same in all of them, from the first one that has them."""
        return next(
            (
                run
                for run in self.runs
                if run["arm"] == arm and not run.keys().isdisjoint({"parameters", "state_floats"})
            ),
            {},
        )

    def samples(self, arm: str) -> list[int]:
        """Contexts of the test at every x, of one seed; empty as long as no run tells."""
        return next((run["samples"] for run in self.runs if run["arm"] == arm and "samples" in run), [])

    def state(self, arm: str) -> float | None:
        """Floats of state that one sample carries when the test at ``state_x`` asks; None as long as no run tells."""
        sizes = self.sizes(arm)
        floats, growth, segments = (sizes.get(name) for name in ("state_floats", "state_growth", "segments"))
        return floats if floats is None or not growth else None if segments is None else floats + growth * segments


@dataclass(frozen=True)
class Report:
    """What ``render`` found and wrote."""

    verdict: str
    claims: list[Claim]
    missing: list[str]
    table: str
    """table.md."""
    scope: str = ""
    """What the verdict does not speak of: the part of the paper's test that is left out."""
    paths: dict[str, Path] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What a terminal shows: table, claims in numbers, verdict."""
        claims = [f"{claim.line}:  {claim.numbers}" for claim in self.claims]
        missing = f"; missing: {'; '.join(self.missing)}" if self.missing else ""
        return "\n".join([self.table, *claims, self.verdict + self.scope + missing])


class Results:
    """The measured values that the plan asks for: ``values(arm, metric, x)``, in the order of the plan's seeds."""

    def __init__(self, plan: ReportPlan, frame: Any) -> None:
        self.plan = plan
        self.cells: dict[tuple[str, str, float, int], float] = {}
        for arm, seed, x, metric, value in frame[["arm", "seed", "x", "metric", "value"]].itertuples(index=False):
            if arm not in plan.arms or seed not in plan.seeds or x not in plan.x_values:
                continue
            cell = (arm, metric, float(x), int(seed))
            if cell in self.cells:
                raise ValueError(f"two finished runs of arm {arm}, seed {seed} both report {metric} at x={x:g}")
            self.cells[cell] = float(value)
        self.metrics = [plan.config.y, *sorted({metric for _, metric, _, _ in self.cells} - {plan.config.y, *TIMES})]

    def of_time(self, metric: str) -> "Results":
        """The values of one of ``TIMES`` alone, as what a figure shows."""
        other = copy(self)
        config = replace(self.plan.config, y=metric, y_label="", log_y=True, chance=None, identity=False)
        other.plan = replace(self.plan, config=config, train_x=None)
        other.cells = {cell: value for cell, value in self.cells.items() if cell[1] == metric}
        return other

    def seeds(self, arm: str, metric: str | None, x: float) -> list[float | None]:
        """One value per planned seed, None where it is missing."""
        return [self.cells.get((arm, metric or self.plan.config.y, float(x), seed)) for seed in self.plan.seeds]

    def values(self, arm: str, metric: str | None, x: float) -> list[float]:
        return [v for v in self.seeds(arm, metric, x) if v is not None]

    def missing(self) -> list[str]:
        """Every planned run without its results, in words."""
        status = {(run["arm"], run["seed"]): run.get("status") for run in self.plan.runs}
        found: dict[tuple[str, str], list[str]] = {}
        for arm in self.plan.arms:
            for i, seed in enumerate(self.plan.seeds):
                absent = [x for x in self.plan.x_values if self.seeds(arm, None, x)[i] is None]
                where = "" if len(absent) == len(self.plan.x_values) else f" at {', '.join(map(short, absent))}"
                state = status.get((arm, seed)) or "finished"
                if absent:
                    found.setdefault((arm, where + (f" ({state})" if state.lower() != "finished" else "")), []).append(
                        str(seed)
                    )
        return [f"{arm} seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}{rest}" for (arm, rest), seeds in found.items()]


def arm_settings(own: Mapping[str, Mapping[str, Any]], specs: Sequence[Any]) -> dict[str, str]:
    """What every arm is, in the words of the YAML: its model, what it sets and another arm has otherwise, and the run
    it starts from.

    own: arm -> what the YAML sets for it; the values are those of its runs (RunSpec).
    """
    runs = {spec.arm: spec for spec in reversed(specs)}

    def value(arm: str, key: str) -> str:
        section, _, name = key.partition(".")
        return json.dumps(getattr(runs[arm], section).get(name), ensure_ascii=False).replace('"', "")

    told = {}
    for arm, values in own.items():
        keys = [
            f"{key}.{name}" if "." not in key else key
            for key, value in values.items()
            for name in (value if "." not in key else [""])
        ]
        init = runs[arm].train["init"]
        start = init.get("run", "") if isinstance(init, dict) else ""
        keys = [
            key
            for key in dict.fromkeys(key.rstrip("?") for key in keys)
            if key != "model.name" and not (start and key == "train.init")
        ]
        shown = [
            f"{key}: {value(arm, key)}"
            for key in ["model.name", *(key for key in keys if len({value(other, key) for other in runs}) > 1)]
        ]
        told[arm] = f"`{', '.join(shown)}`" + (
            f", starts from `{start if '/' in start else f'{runs[arm].experiment}/{start}'}`" if start else ""
        )
    return told


def render(plan: ReportPlan, frame: Any, out_dir: str | Path) -> Report:
    """Write the report of ``plan`` into ``out_dir``.

    frame: long DataFrame of FINISHED runs, columns arm, seed, x, metric, value. Rows outside the plan are ignored, and
        it may be
    empty. No file is ever half-written: all are staged first, then renamed, README.md last. A second figure that the
    plan does not want any more is removed.
    """
    check_expect(plan.expect, plan.arms, plan.x_values)
    results = Results(plan, frame)
    claims = [evaluate(line, results.values, plan.x_values, len(plan.seeds)) for line in plan.expect]
    missing, verdicts = results.missing(), {claim.verdict for claim in claims}
    verdict = (
        INCOMPLETE
        if missing or not claims or INCOMPLETE in verdicts
        else NOT_REPRODUCED
        if NOT_REPRODUCED in verdicts
        else REPRODUCED
    )
    scope = (
        f", tested up to {_count(max(plan.x_values))} (paper: {_count(plan.paper_x)})"
        if (plan.paper_x or 0) > max(plan.x_values)
        else ""
    )
    report = Report(verdict, claims, missing, _table(results), scope)
    texts = {
        "table.csv": _csv(results),
        "table.md": report.table,
        "verdict.json": _json(plan, report),
        "README.md": _readme(plan, report, results),
    }
    contents = draw(results, _status(plan, report)) | {name: text.encode() for name, text in texts.items()}
    return replace(
        report,
        paths=files.write_all(Path(out_dir), contents, without=[name for name in OPTIONAL if name not in contents]),
    )


def _status(plan: ReportPlan, report: Report) -> str:
    """The line under the figure's title."""
    seeds = f"mean ± std of {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "1 seed"
    return f"scale {plan.scale}{', modified' if plan.modified else ''} · {seeds}{' · INCOMPLETE' if report.verdict == INCOMPLETE else ''}"


def _table(results: Results) -> str:
    """The y metric in Markdown: an arm per row, a tested value per column; with the samples of the test where they
    differ."""
    plan, config, rows = results.plan, results.plan.config, []
    last, most = len(plan.x_values) - 1, config.columns or len(plan.x_values)
    shown = plan.x_values if last < most else [plan.x_values[round(i * last / (most - 1))] for i in range(most)]
    differ = any(len(set(plan.samples(arm))) > 1 for arm in plan.arms)
    for arm in plan.arms:
        groups = [results.values(arm, None, x) for x in shown]
        run = plan.sizes(arm)
        cells = [f"{mean(g):.3f}" + (f" ± {std(g):.3f}" if len(g) > 1 else "") if g else "–" for g in groups]
        state = _count(run.get("state_floats")) + (
            f" + {_count(run['state_growth'])} a {run.get('growth_unit', 'segment')}" if run.get("state_growth") else ""
        )
        if run.get("state_growth") and plan.state_x is not None:
            state += f" ({_count(plan.state(arm))} at {short(plan.state_x)})"
        samples = [_numbers(plan.samples(arm))] if differ else []
        rows.append(
            [
                arm,
                *cells,
                *samples,
                f"{min(map(len, groups))} of {len(plan.seeds)}",
                _count(run.get("parameters")),
                state,
            ]
        )
    columns = label(config.x.removeprefix("test_"), config.x_label)
    caption = f"{label(config.y, config.y_label)}, mean ± standard deviation over seeds; columns: {columns}"
    header = ["arm", *map(short, shown), *["samples"] * differ, "seeds", "parameters", "state floats"]
    return f"{caption}\n\n{markdown(header, rows)}{_curves(results)}"


def _curves(results: Results) -> str:
    """What the training has come to, if x is its step: an arm per row."""
    plan, config = results.plan, results.plan.config
    if config.x != STEP:
        return ""
    y = label(config.y, config.y_label)
    words = {
        f"test_{config.y}": f"{y} of the test",
        "steps_to": f"steps to a {y} of {config.threshold or 0:g}",
        "roughness": "roughness of the loss",
    }
    columns = {name: [results.values(arm, name, plan.x_values[-1]) for arm in plan.arms] for name in words}
    shown = {words[name]: groups for name, groups in columns.items() if any(math.isfinite(mean(g)) for g in groups)}
    if not shown:
        return ""
    cells = [
        [f"{mean(g):.4g}" + (f" ± {std(g):.2g}" if len(g) > 1 else "") if g else "–" for g in groups]
        for groups in shown.values()
    ]
    table = markdown(["arm", *shown], [list(row) for row in zip(plan.arms, *cells, strict=True)])
    return f"\n{CURVES}{NEVER if 'nan' in table else ''}\n\n{table}"


CURVES = """After the training, mean ± standard deviation over seeds. Roughness: standard deviation of the change of the validation loss from one
validation to the next, in the second half of the training."""
NEVER = " nan: a seed has never come that far."


def _numbers(samples: Sequence[int]) -> str:
    """One number if all are equal, else all."""
    return ", ".join(map(str, samples if len(set(samples)) > 1 else samples[:1]))


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a probability of which ``share`` of ``n`` trials came true. Source: Wilson 1927."""
    z2 = 1.959964**2 / n
    middle, half = (share + z2 / 2) / (1 + z2), math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
    return middle - half, middle + half


def _intervals(results: Results) -> str:
    """Wilson intervals in Markdown: an arm per row, a tested value per column."""
    plan, rows = results.plan, []
    for arm in plan.arms:
        groups = [results.values(arm, None, x) for x in plan.x_values]
        if samples := plan.samples(arm):
            bounds = [wilson(mean(g), len(g) * n) if g else None for g, n in zip(groups, samples, strict=True)]
            rows.append(
                [
                    arm,
                    *("{:.3f} to {:.3f}".format(*b) if b else "–" for b in bounds),
                    f"{_numbers(samples)} x {min(map(len, groups))} seeds",
                ]
            )
    return markdown(["arm", *map(short, plan.x_values), "samples"], rows)


def _csv(results: Results) -> str:
    """All metrics with a fixed number of digits, in the order of the plan. Empty is missing, nan was measured."""
    plan, file = results.plan, io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["arm", "x", "metric", "mean", "std", "n", *(f"seed_{seed}" for seed in plan.seeds)])
    for arm in plan.arms:
        for x in plan.x_values:
            for metric in results.metrics:
                values = results.values(arm, metric, x)
                numbers = [
                    mean(values) if values else None,
                    std(values) if len(values) > 1 else None,
                    *results.seeds(arm, metric, x),
                ]
                average, spread, *single = ("" if v is None else f"{v:.6f}" for v in numbers)
                writer.writerow([arm, f"{x:.10g}", metric, average, spread, len(values), *single])
    return file.getvalue()


def _times(results: Results) -> str:
    """The report's times in Markdown: an arm per row, a tested value per column."""
    plan, rows = results.plan, []
    for arm in plan.arms if plan.config.time else ():
        groups = [results.values(arm, plan.config.time, x) for x in plan.x_values]
        rows.append(
            [arm, *(f"{mean(g):.3g}" + (f" ± {std(g):.2g}" if len(g) > 1 else "") if g else "–" for g in groups)]
        )
    return markdown(["arm", *map(short, plan.x_values)], rows) if rows else ""


def _json(plan: ReportPlan, report: Report) -> str:
    """The verdict for programs, such as the one that lists all claims; with seconds, which tell how long the next run
    takes."""
    head = {name: getattr(plan, name) for name in ("experiment", "scale", "modified", "paper", "arms", "seeds")}
    claims = [
        vars(claim) | {"sides": [side if math.isfinite(side) else None for side in claim.sides]}
        for claim in report.claims
    ]
    runs = [{name: run.get(name) for name in ("arm", "seed", "steps", "seconds")} for run in plan.runs]
    content = head | {"verdict": report.verdict, "missing": report.missing, "claims": claims, "runs": runs}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _count(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}"


def _readme(plan: ReportPlan, report: Report, results: Results) -> str:
    """The report as a page: verdict and figure first, then everything that is needed to check it."""
    missing = "; ".join(report.missing)
    changed = ", ".join(f"`{m}`" for m in plan.modified)
    claims = [
        [f"`{c.line}`", c.numbers, {REPRODUCED: "yes", NOT_REPRODUCED: "no"}.get(c.verdict, "unknown")]
        for c in report.claims
    ]
    times = _times(results)
    pages = {"figure": True, "state": plan.state_x is not None, "time": bool(plan.config.time)}
    prints = ", ".join(f"[{name}.pdf]({name}.pdf)" for name, wanted in pages.items() if wanted)
    blocks = [
        f"# {plan.experiment}",
        f"> **MODIFIED RUN**: changed on the command line: {changed}. What follows holds for the changed set-up only."
        if changed
        else "",
        f"**{report.verdict}** at scale `{plan.scale}`{report.scope}"
        + (f". Missing: {missing}." if missing else "" if claims else ". The experiment states no claim to check."),
        claim_of(plan.paper),
        "![The figure of this report; its numbers are in the table below.](figure.png)",
        _second_figure(plan),
        markdown(["expected", "measured", "holds"], claims) if claims else "",
        "## Arms\n\n" + markdown(["arm", "settings"], [list(item) for item in plan.settings.items()])
        if plan.settings
        else "",
        "## Numbers\n\n" + report.table + "\nEvery seed and metric: [table.csv](table.csv). For print: " + prints + ".",
        f"{INTERVALS}\n\n{_intervals(results)}" if plan.config.intervals else "",
        f"## Time\n\n{_time(plan.config.time)}\n\n{times}" if times else "",
        "## What the paper reports\n\n" + section(paper_rows(plan.config.paper_values, plan.config.paper_rows)),
        "## What deviates from the paper's set-up\n\n"
        + ("\n".join(f"- {d}" for d in plan.deviations) or "None stated."),
        f"## Notes\n\n{plan.config.notes.strip()}" if plan.config.notes else "",
        "## Runs\n\n" + _runs(plan),
        "## How to reproduce\n\n"
        + (f"```bash\n{plan.command}\n```\n\n" if plan.command else "")
        + _provenance(plan.provenance),
    ]
    return "\n\n".join(block.strip() for block in blocks if block) + "\n"


def claim_of(paper: dict[str, str]) -> str:
    """What is to be reproduced, with a link: title, arxiv, item and claim."""
    link = (
        f"[{paper['title']}](https://arxiv.org/abs/{paper['arxiv']})" if paper.get("arxiv") else paper.get("title", "")
    )
    return f"{link}, {paper.get('item', '')}. Claim: {paper.get('claim', '').rstrip('.')}."


INTERVALS = "95 % Wilson intervals of the same numbers, with the samples of all seeds taken together:"


def _time(name: str) -> str:
    """The figure of times, and how to read it."""
    return f"![{label(name)}; the numbers are in the table below.](time.png)\n\n" + (
        f"{TIMES[name]}, mean ± standard deviation over seeds. They are measured, on the hardware\n"
        f"below and with whatever else ran there, so every run has others; in MLflow they are `time/{name}`."
    )


def _second_figure(plan: ReportPlan) -> str:
    """The figure of y against the floats of state, and how to read it."""
    if plan.state_x is None:
        return ""
    y, x = label(plan.config.y, plan.config.y_label), label(plan.config.x.removeprefix("test_"), plan.config.x_label)
    grown = (
        " A state that grows is counted as it is when that test asks."
        if any(plan.sizes(arm).get("state_growth") for arm in plan.arms)
        else ""
    )
    return (
        f"![{y} at {short(plan.state_x)} against the floats of state; the numbers are in the table below.](state.png)\n\n"
        + (
            f"{y} against the floats of state that one sample carries from segment to segment; {x}: {short(plan.state_x)}.{grown}"
        )
    )


def _runs(plan: ReportPlan) -> str:
    rows = []
    for run in plan.runs:
        steps = _count(run.get("steps")) + (
            f" ({' + '.join(map(_count, run['stage_steps']))})" if len(run.get("stage_steps") or ()) > 1 else ""
        )
        key, run_id = (f"`{run[name]}`" if run.get(name) else "–" for name in ("key", "run_id"))
        rows.append([run["arm"], run["seed"], run.get("status") or "–", steps, _count(run.get("seconds")), key, run_id])
    return (
        markdown(["arm", "seed", "status", "steps (per stage)", "seconds", "key", "run id"], rows) if rows else "None."
    )


def _provenance(provenance: dict[str, Any]) -> str:
    """A list, with nested dictionaries on one line."""
    flat = {
        key: ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        for key, value in provenance.items()
    }
    return "\n".join(
        f"- {key.replace('_', ' ')}: {('no', 'yes')[value] if isinstance(value, bool) else value}"
        for key, value in flat.items()
    )
