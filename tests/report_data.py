"""A plan of an experiment and its results, as the tests of reports and figures need them."""

import pandas as pd

from lit_memory.plan.sections import ReportConfig
from lit_memory.report.plan import ReportPlan

ARMS, SEEDS, XS = ["gamma", "no_gamma"], [0, 1, 2], [50, 100, 200, 500]
PAPER = {
    "title": "Associative Recurrent Memory Transformer",
    "arxiv": "2407.04841",
    "item": "Figure 5a",
    "claim": "without gamma, recall fails",
}
EXPECT = ["gamma[200] - no_gamma[200] > 0.2", "abs(gamma[first] - no_gamma[first]) < 0.05"]


def make_plan(arms=ARMS, seeds=SEEDS, xs=XS, config=None, expect=EXPECT, **changes):
    size = {"parameters": 501248, "state_floats": 18720}
    runs = [{"arm": a, "seed": s, "key": f"key{s}", "run_id": f"{a}-{s}"} | size for a in arms for s in seeds]
    fields = {
        "experiment": "armt_ablation_gamma",
        "scale": "cpu",
        "paper": PAPER,
        "runs": runs,
        "train_x": 50,
    } | changes
    return ReportPlan(
        arms=list(arms),
        seeds=list(seeds),
        x_values=list(xs),
        config=config or ReportConfig(),
        expect=list(expect),
        **fields,
    )


def make_frame(arms=ARMS, seeds=SEEDS, xs=XS, metric="exact_match", value=None):
    """gamma stays at 0.99, the others fall with x; seeds differ by 0.01."""
    value = value or (lambda arm, seed, x: 0.99 + 0.001 * seed if arm == "gamma" or x <= 50 else 30 / x + 0.01 * seed)
    rows = [(arm, seed, x, metric, value(arm, seed, x)) for arm in arms for seed in seeds for x in xs]
    return pd.DataFrame(rows, columns=["arm", "seed", "x", "metric", "value"])
