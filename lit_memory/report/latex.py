"""table.tex: the table of a report for a paper, in the style of booktabs, with the best arm of a column in bold where
intervals separate it from all others."""

from lit_memory.report.labels import mean_std, short
from lit_memory.report.margins import LEVEL, Margin, holm
from lit_memory.report.results import Results
from lit_memory.report.statistics import DRAWS, Draws
from lit_memory.report.tables import shown_columns
from lit_memory.report.verdict import mean

ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
ESCAPES |= {sign: rf"\{sign}" for sign in "&%$#_{}"}
ESCAPES |= {"–": "--", "→": r"$\to$", "·": r"$\cdot$", "≥": r"$\geq$", "≤": r"$\leq$", "×": r"$\times$"}


def escaped(text: str) -> str:
    """Text as LaTeX shows it."""
    return "".join(ESCAPES.get(sign, sign) for sign in text)


def latex_table(results: Results) -> str:
    """One arm per row and one tested value per column: mean ± standard deviation over seeds."""
    plan, xs = results.plan, shown_columns(results.plan)
    drawn = Draws(results.evidence, DRAWS)
    best = {x: best_arm(results, drawn, x) for x in xs}
    rows = []
    for arm in plan.arms:
        cells = [escaped(mean_std(results.values(arm, None, x))) for x in xs]
        bold = [rf"\textbf{{{cell}}}" if best[x] == arm else cell for x, cell in zip(xs, cells, strict=True)]
        rows.append(" & ".join([escaped(plan.shown(arm)), *bold]) + r" \\")
    return "\n".join(
        [
            rf"% {plan.experiment}, scale {plan.scale}: mean and standard deviation of {len(plan.seeds)} seeds.",
            rf"% Bold: the best, where a {100 * (1 - LEVEL):.0f} % interval (Holm) separates it from every other arm.",
            r"% Needs \usepackage{booktabs}.",
            rf"\begin{{tabular}}{{l{'r' * len(xs)}}}",
            r"\toprule",
            rf" & \multicolumn{{{len(xs)}}}{{c}}{{{escaped(plan.x_label)}}} \\",
            rf"\cmidrule(lr){{2-{len(xs) + 1}}}",
            " & ".join([escaped(plan.y_label), *map(short, xs)]) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def best_arm(results: Results, drawn: Draws, x: float) -> str | None:
    """The arm that is better than every other one at ``x``, of those whose seeds are all there; None where the interval
    of a difference does not decide."""
    plan = results.plan
    arms = [arm for arm in plan.arms if len(results.values(arm, None, x)) == len(plan.seeds)]
    if len(arms) < 2 or len(plan.seeds) < 2:
        return None
    sign = -1.0 if plan.less_is_better(plan.config.y) else 1.0
    best = max(arms, key=lambda arm: sign * mean(results.values(arm, None, x)))
    means = {arm: sign * drawn.mean(arm, None, x) for arm in arms}
    ahead = [means[best] - means[arm] for arm in arms if arm != best]
    margins = [Margin(float(gap[0]), gap[1:], len(plan.seeds), drawn.turns) for gap in ahead]
    levels = holm([margin.p_value for margin in margins], LEVEL)
    judged = zip(margins, levels, strict=True)
    return best if all(margin.known and margin.interval(level)[0] > 0 for margin, level in judged) else None
