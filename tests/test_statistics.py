"""How sure a line is: the bootstrap against scipy, against what is known analytically, and by simulation.

Simulated: seeds of two arms that differ by nothing, normal (sd 0.05) or bimodal (half of them solve the task, at 0.99,
the others stay at chance, at 0.06; sd 0.005), and the claim a > b. Of 1,000 experiments with 10,000 draws REPRODUCED
are, for 3, 5 and 10 seeds: 2.3, 2.0 and 2.4 % of the normal and 1.7, 0.8 and 3.2 % of the bimodal ones. Of normal ones
in which a is better by 0.1, two standard deviations, 29.7, 64.3 and 97.7 %.
"""

import itertools
import time

import numpy as np
import pytest
import scipy.stats

from lit_memory.report import verdict
from lit_memory.report.margins import Margin, holm, student_t
from lit_memory.report.statistics import DRAWS, RESAMPLES, Draws, Evidence, resampled_means
from lit_memory.report.verdict import FINER, INCONCLUSIVE, NOT_REPRODUCED, REPRODUCED, conclude, judge


def evidence(values, scores=None, samples=0):
    """Of {arm: values}, all at x = 1; scores: {arm: one array per seed}; samples: of a share."""
    columns = {(arm, "y"): of_seeds for arm, of_seeds in (scores or {}).items()}
    seeds, tested = len(next(iter(values.values()))), lambda arm, metric, x: samples
    return Evidence(lambda arm, metric, x: values[arm], [1], seeds, "y", lambda x: columns, samples=tested)


def with_scores(scores, samples=0):
    """Evidence in which every value is the mean of its scores."""
    return evidence({arm: [s.mean() for s in of_seeds] for arm, of_seeds in scores.items()}, scores, samples)


def margin_of(found, line="a - b"):
    """The margin of ``a > 0`` or ``a > b``."""
    draws = Draws(found)
    values = draws.mean("a", None, 1) - (draws.mean("b", None, 1) if "b" in line else 0)
    return Margin(float(values[0]), values[1:], found.seeds, draws.turns)


SEEDS = np.random.default_rng(5).normal(0.5, 0.1, 8)


def test_one_level_agrees_with_scipy():
    """Percentiles of the mean of 8 seeds, and of the difference of two arms that share them, to Monte Carlo error."""
    other = np.random.default_rng(9).normal(0.4, 0.1, 8)
    cases = [
        (margin_of(evidence({"a": SEEDS}), "a"), (SEEDS,), lambda a, axis: a.mean(axis=axis)),
        (
            margin_of(evidence({"a": SEEDS, "b": other})),
            (SEEDS, other),
            lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis),
        ),
    ]
    for margin, data, statistic in cases:
        theirs = scipy.stats.bootstrap(
            data, statistic, paired=True, n_resamples=DRAWS, method="percentile", rng=np.random.default_rng(0)
        )
        ours = np.quantile(margin.draws, [0.025, 0.975])
        assert ours == pytest.approx([*theirs.confidence_interval], abs=0.12 * theirs.standard_error)
        assert margin.draws.std() == pytest.approx(theirs.standard_error, rel=0.03)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("level", [0.05, 0.01])
def test_the_t_part_agrees_with_scipy(count, level):
    """Of a mean over seeds it is Student's own interval, to the Monte Carlo error of 10,000 draws; and its p value that
    of a paired t test."""
    values, other = SEEDS[:count], np.random.default_rng(50 + count).normal(0.45, 0.1, count)
    margin = margin_of(evidence({"a": values, "b": other}))
    sem = scipy.stats.sem(values - other)
    low, high = scipy.stats.t.interval(1 - level, count - 1, loc=margin.estimate, scale=sem)
    assert margin.errors[0] == pytest.approx(sem, rel=0.03)
    ours = margin.interval(level)
    assert ours[0] <= low + 0.03 * (high - low) and ours[1] >= high - 0.03 * (high - low)
    assert ours == pytest.approx((low, high), abs=0.1 * (high - low))  # with so few seeds the percentiles are inside
    assert margin.p_value == pytest.approx(scipy.stats.ttest_rel(values, other).pvalue, abs=0.02)
    assert student_t(1 - level / 2, count) == pytest.approx(scipy.stats.t.ppf(1 - level / 2, count - 1))


def test_the_percentiles_are_expanded():
    """Where they lie outside of the t interval, as of draws with a long tail, the interval ends there (Hesterberg's
    level, by scipy's distributions)."""
    draws = np.random.default_rng(0).exponential(1.0, DRAWS) ** 3
    margin = Margin(1.0, draws, 10)
    t = scipy.stats.t.ppf(0.975, 9)
    tail = scipy.stats.norm.cdf(-t * np.sqrt(10 / 9))
    half = t * np.sqrt(10 / 9) * draws.std()
    assert margin.interval(0.05) == pytest.approx((1 - half, max(1 + half, np.quantile(draws, 1 - tail))))
    assert margin.interval(0.05)[1] > 1 + half and tail < 0.01


def test_holm_agrees_with_adjusted_p_values():
    """Reference: the largest of (m - rank) p so far, at most 1, compared with the level."""
    rng = np.random.default_rng(0)
    for m in (1, 2, 3, 7):
        for _ in range(200):
            p = list(rng.choice([0.0, 0.001, 0.01, 0.02, 0.04, 0.3, 1.0], m) * rng.choice([1, rng.random()]))
            order = np.argsort(p, kind="stable")
            adjusted = np.empty(m)
            adjusted[order] = np.maximum.accumulate([(m - rank) * p[i] for rank, i in enumerate(order)])
            levels = holm(p, 0.05)
            assert [p_i <= level for p_i, level in zip(p, levels, strict=True)] == [*(adjusted <= 0.05)]
    assert holm([0.2, 0.001, 0.02], 0.06) == [0.06, 0.02, 0.03]
    assert holm([0.2, 0.001, 0.05], 0.06) == [0.03, 0.02, 0.03]  # after the first that is not refuted, its level


def test_what_is_shown_agrees_with_what_is_decided():
    """The interval of a line contains 0 if and only if the line is undecided."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        values = {arm: rng.normal(0.1 * i, 0.1, 5) for i, arm in enumerate("abcd")}
        pairs = [f"{a}[1] > {b}[1]" for a, b in itertools.pairwise("dcba")]
        for claim in judge({"expect": pairs}, evidence(values), draws=1000):
            low, high = claim.interval
            assert claim.verdict == (REPRODUCED if low > 0 else NOT_REPRODUCED if high < 0 else INCONCLUSIVE)
            assert low < claim.margin < high and (claim.p <= claim.level or claim.verdict == INCONCLUSIVE)


def test_arms_are_compared_within_seeds():
    """What a seed does to both arms cancels."""
    margin = margin_of(evidence({"a": SEEDS + 0.1 + 0.001 * np.arange(8), "b": SEEDS}))
    assert margin.errors[0] == pytest.approx(0.001 * np.std(np.arange(8), ddof=1) / 8**0.5, rel=0.03)


def binary(rng, seeds, share, count=400):
    return [(rng.random(count) < share).astype(float) for _ in range(seeds)]


def graded(rng, seeds, share, count=400):
    return [rng.normal(share, 0.3, count) for _ in range(seeds)]


def crossed(table):
    """The variance of a draw of rows and of columns of a table, both with replacement."""
    n, count = table.shape
    rest = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    by_rows, by_columns = np.var(table.mean(axis=1)) / n, np.var(table.mean(axis=0)) / count
    return by_rows + by_columns + np.mean(rest**2) / (n * count)


@pytest.mark.parametrize("scores", [binary, graded])
def test_samples_are_drawn_for_all_seeds_at_once(scores):
    """The variance of the draws is that between seeds, that of the samples, which more seeds do not lessen, and what is
    left when both are taken away: what samples have in common in all seeds stays."""
    rng = np.random.default_rng(3)
    common = scores(rng, 1, 0.6)[0]
    seeds = [np.where(rng.random(400) < 0.2, of, common) for of in scores(rng, 4, 0.6)]  # most are equal
    found, table = with_scores({"a": seeds}), np.stack(seeds)
    between, samples = np.var(table.mean(axis=1)) / 4, np.var(table.mean(axis=0)) / 400
    assert samples > 2 * np.mean([s.var() / 400 for s in seeds]) / 4  # or the test would not see it
    assert margin_of(found, "a").draws.var() == pytest.approx(crossed(table), rel=0.08)
    alone = margin_of(evidence({"a": [s.mean() for s in seeds]}), "a").draws.var()
    assert alone == pytest.approx(between, rel=0.05)


@pytest.mark.parametrize("scores", [binary, graded])
def test_arms_are_compared_within_samples(scores):
    """Both have read the same test: what a sample does to both cancels. Tests of other sizes are other tests."""
    rng = np.random.default_rng(4)
    a = scores(rng, 5, 0.5)
    b = [np.where(rng.random(len(s)) < 0.1, 1 - s, s) for s in a]  # one answer in ten differs
    assert margin_of(with_scores({"a": a, "b": b})).draws.var() == pytest.approx(crossed(np.subtract(a, b)), rel=0.08)
    halves = [s[:200] for s in b]
    samples = np.mean(a, axis=0).var() / 400 + np.mean(halves, axis=0).var() / 200
    assert margin_of(with_scores({"a": a, "b": halves})).draws.var() > samples > 1.5 * crossed(np.subtract(a, b))


def test_samples_are_picked_with_replacement():
    """The means of resamples have the covariance of a mean of so many samples."""
    scores = np.stack(binary(np.random.default_rng(0), 3, 0.3), axis=1)
    means = resampled_means(scores, np.random.default_rng(1))
    assert means.shape == (RESAMPLES, 3) and means.mean(axis=0) == pytest.approx(scores.mean(axis=0), abs=0.002)
    assert np.cov(means.T) == pytest.approx(np.cov(scores.T, ddof=0) / len(scores), abs=0.1 * means[:, 0].var())


def test_equal_draws_are_a_point():
    """Ten equal values of 0.1 have a mean with a rounding error, the same in all draws; with one seed nothing is known,
    nor with a value that is no number."""
    margin = margin_of(evidence({"a": [0.1] * 10}), "a")
    assert margin.interval(0.05) == (margin.estimate, margin.estimate)
    assert margin.errors == (0, 0) and margin.p_value == 0
    same = with_scores({"a": [np.ones(50)] * 3})
    assert margin_of(same, "a").interval(0.05) == (1.0, 1.0)
    for values in ([0.5], [0.5, float("nan"), 0.5]):
        margin = margin_of(evidence({"a": values}), "a")
        assert not margin.known and margin.p_value == 1


@pytest.mark.parametrize("kept", [True, False], ids=["scores", "no scores"])
def test_equal_shares_are_no_certainty(kept):
    """Five seeds that answer all of 100 questions may miss one in a hundred, and not one in ten. What is no share is as
    equal as it looks."""
    ones = {"a": [np.ones(100)] * 5}
    found = with_scores(ones, samples=100) if kept else evidence({"a": [1.0] * 5}, samples=100)
    lines = ["a[1] >= 0.95", "a[1] > 0.99"]
    easy, hard = judge({"expect": lines}, found)
    assert (easy.verdict, hard.verdict) == (REPRODUCED, INCONCLUSIVE)
    low, _ = margin_of(found, "a").interval(0.05)
    assert 1 - low == pytest.approx(1 - scipy.stats.beta.ppf(0.025, 100.5, 0.5), rel=0.1)
    likely, rare = judge({"expect": ["a[1] >= 0.98"]}, found), judge({"expect": ["a[1] >= 0.97"]}, found)
    assert likely[0].verdict == INCONCLUSIVE, (
        "where two in a hundred are missed, a test without one has a chance of 13 %"
    )
    assert rare[0].verdict == REPRODUCED, "of 5 %; two-sided at 5 %, Jeffreys' limit is 0.975"
    assert [claim.verdict for claim in judge({"expect": lines}, evidence({"a": [1.0] * 5}))] == [REPRODUCED] * 2


@pytest.mark.parametrize("kept", [True, False], ids=["scores", "no scores"])
@pytest.mark.parametrize("agree", [0.9, 0.5, 0.0])
@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_has_the_difference(seeds, agree, kept):
    """Of two equal arms whose seeds all read one test of 200 samples, in 95 of 100 experiments; by seeds alone it would
    be 69 and 37, with 3 and 5 seeds that agree on 90 % of them."""
    rng, found = np.random.default_rng(4), 0
    for _ in range(200):
        common = {arm: rng.random(200) < 0.7 for arm in "ab"}
        scores = {
            arm: [np.where(rng.random(200) < agree, common[arm], rng.random(200) < 0.7) + 0.0 for _ in range(seeds)]
            for arm in "ab"
        }
        means = {arm: [one.mean() for one in of_arm] for arm, of_arm in scores.items()}
        margin = margin_of(with_scores(scores) if kept else evidence(means, samples=200))
        low, high = margin.interval(0.05)
        found += low <= 0 <= high
    assert found >= 185  # 95 % would be 190 ± 3


def test_seeds_and_samples_add_like_errors():
    """Student's quantile is for the spread over seeds, the normal one for the samples, of which there are many: three
    seeds that agree are as sure as their test."""
    scores = (np.arange(400) < 240) + 0.0
    alike = margin_of(with_scores({"a": [scores] * 3}), "a")
    assert alike.errors == pytest.approx((0, (0.6 * 0.4 / 400) ** 0.5), abs=0.001)
    low, high = alike.interval(0.05)
    assert high - low == pytest.approx(2 * 1.96 * (0.6 * 0.4 / 400) ** 0.5, rel=0.05)
    differ = margin_of(with_scores({"a": [np.roll(scores, 133 * i) for i in range(3)]}), "a")
    assert differ.errors[0] < 0.02 and differ.errors[1] < 0.012
    for margin in (alike, differ):
        half = np.hypot(scipy.stats.t.ppf(0.99, 2) * margin.errors[0], scipy.stats.norm.ppf(0.99) * margin.errors[1])
        assert margin.half(0.02) == pytest.approx(half)
        shifted = Margin(half, margin.draws, 3, margin.turns)
        assert shifted.p_value == pytest.approx(0.02, rel=0.01)


def test_a_metric_that_is_named_is_that_of_the_figure():
    """Its chance is the same: nothing is left of a difference from itself."""
    found = evidence({"a": [0.5, 0.6, 0.7]}, samples=100)
    drawn = Draws(found)
    assert (drawn.mean("a", None, 1) == drawn.mean("a", "y", 1)).all()


def test_a_line_near_a_decision_has_more_draws(monkeypatch):
    """So that the draws' own chance does not decide it; one that is clear has the usual ones."""
    values, counts = {"a": [0.5, 0.6, 0.7], "b": [0.1, 0.2, 0.2]}, []
    bound = 0.43333333 - margin_of(evidence(values)).half(0.05)
    monkeypatch.setattr(verdict, "Draws", lambda found, count: counts.append(count) or Draws(found, count))
    judge({"expect": [f"a[1] - b[1] > {bound:.6f}"]}, evidence(values))
    judge({"expect": ["a[1] - b[1] > -2"]}, evidence(values))
    assert [count for count in counts if count] == [DRAWS, FINER * DRAWS, DRAWS]


def test_the_same_evidence_has_the_same_intervals():
    scores = {arm: binary(np.random.default_rng(i), 3, 0.5) for i, arm in enumerate("ab")}
    first, second = (judge({"expect": ["a[1] > b[1]"]}, with_scores(scores)) for _ in range(2))
    assert first == second and first[0].resampled == "seeds and samples"
    turned = with_scores(dict(reversed(scores.items())))
    assert judge({"expect": ["a[1] > b[1]"]}, turned) == first, "a redrawn report has its columns in another order"
    part = evidence({arm: [s.mean() for s in of_seeds] for arm, of_seeds in scores.items()}, {"a": scores["a"]})
    assert judge({"expect": ["a[1] > b[1]"]}, part)[0].resampled == "seeds and a part of the samples"


@pytest.mark.parametrize("scores", [binary, graded])
def test_a_report_is_judged_in_half_a_second(scores):
    """Ten lines, four arms, two x, ten seeds, 1,000 samples a test: the best of three, in seconds of the processor."""
    rng = np.random.default_rng(0)
    columns = {x: {(arm, "y"): scores(rng, 10, 0.5, 1000) for arm in "abcd"} for x in (1, 2)}

    def values(arm, metric, x):
        return [s.mean() for s in columns[x][arm, "y"]]

    lines = [f"{a}[{x}] - min({b}[1], {b}[2]) > 0.1" for x in (1, 2) for a, b in ("ab", "bc", "cd", "da", "ac")]
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        claims = judge({"expect": lines}, Evidence(values, [1, 2], 10, "y", columns.__getitem__))
        seconds.append(time.process_time() - begin)
    assert len(claims) == 10 and {claim.resampled for claim in claims} == {"seeds and samples"}
    assert min(seconds) < 0.5


def normal(rng, seeds, better):
    return rng.normal(0.5 + better, 0.05, seeds), rng.normal(0.5, 0.05, seeds)


def bimodal(rng, seeds, better):
    """Half of the seeds solve the task, the others stay at chance."""
    a, b = (np.where(rng.random(seeds) < share, 0.99, 0.06) for share in (0.5 + better, 0.5))
    return a + rng.normal(0, 0.005, seeds), b + rng.normal(0, 0.005, seeds)


def verdicts(sample, seeds, better=0.0, experiments=1000, draws=DRAWS, line="a[1] > b[1]"):
    """Share of simulated experiments with every verdict."""
    rng, found = np.random.default_rng(1), []
    for _ in range(experiments):
        a, b = sample(rng, seeds, better)
        found.append(conclude(judge({"expect": [line]}, evidence({"a": a, "b": b}), draws=draws), [])[0])
    return {verdict: found.count(verdict) / experiments for verdict in (REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE)}


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("sample", [normal, bimodal])
def test_no_difference_is_seldom_reproduced(sample, seeds):
    """200 experiments with 200 draws."""
    found = verdicts(sample, seeds, experiments=200, draws=200)
    assert found[REPRODUCED] <= 0.05 and found[INCONCLUSIVE] >= 0.9


def noisy(rng, seeds, better):
    """One arm whose seeds differ, by as much as it is better."""
    return rng.normal(1.01, 1.0, seeds), rng.normal(0.0, 0.01, seeds)


@pytest.mark.parametrize("line", ["a[1] - b[1] > std(a[1]) + std(b[1])", "a[1] - b[1] <= std(a[1]) + std(b[1])"])
def test_a_spread_at_its_bound_seldom_decides(line):
    """200 experiments with 400 draws; 5 % would be 10 ± 3."""
    found = verdicts(noisy, 5, experiments=200, draws=400, line=line)
    assert max(found[REPRODUCED], found[NOT_REPRODUCED]) <= 0.065


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_a_test_that_all_seeds_share_is_no_evidence_of_its_own(share):
    """No difference, 200 samples, ten seeds of an arm that agree on this share of them: what is easier for one arm in
    this test alone decides nothing, however many seeds read it."""
    rng, found = np.random.default_rng(2), []
    for _ in range(100):
        common = {arm: rng.random(200) < 0.5 for arm in "ab"}
        seeds = {
            arm: [np.where(rng.random(200) < 0.9 * share, common[arm], rng.random(200) < 0.5) + 0.0 for _ in range(10)]
            for arm in "ab"
        }
        found.append(conclude(judge({"expect": ["a[1] > b[1]"]}, with_scores(seeds), draws=500), [])[0])
    assert found.count(INCONCLUSIVE) >= 95


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("min(a[1], b[1], c[1], d[1], e[1]) >= 0.5", NOT_REPRODUCED),
        ("max(a[1], b[1], c[1], d[1], e[1]) > 0.5", REPRODUCED),
        ("a[1] >= b[1] >= c[1] >= d[1] >= e[1]", NOT_REPRODUCED),
    ],
)
def test_the_best_and_the_worst_of_five_are_no_evidence(line, wrong):
    """Five equal arms: one in seven such lines was decided by the one that was luckiest."""
    rng, found = np.random.default_rng(3), []
    for _ in range(200):
        values = {arm: rng.normal(0.5, 0.05, 10) for arm in "abcde"}
        found.append(conclude(judge({"expect": [line]}, evidence(values), draws=500), [])[0])
    assert found.count(wrong) <= 13 and found.count(INCONCLUSIVE) >= 180  # 5 % would be 10 ± 3


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("sample", [normal, bimodal])
def test_no_difference_is_seldom_reproduced_in_full(sample, seeds):
    found = verdicts(sample, seeds)
    assert found[REPRODUCED] <= 0.05 and found[NOT_REPRODUCED] <= 0.05


@pytest.mark.parametrize(("seeds", "least", "most"), [(3, 0.2, 0.4), (5, 0.55, 0.75), (10, 0.93, 1)])
def test_power(seeds, least, most):
    """100 experiments of a difference of two standard deviations of a seed; none is refuted."""
    found = verdicts(normal, seeds, 0.1, experiments=100, draws=200)
    assert least <= found[REPRODUCED] <= most and not found[NOT_REPRODUCED]


def test_the_detectable_margin_is_detected():
    """In about four of five experiments, if it is the true one: with 10 seeds of known spread."""
    true = (student_t(0.975, 10) + student_t(0.8, 10)) * 0.05 * (2 / 10) ** 0.5
    found = verdicts(normal, 10, true, experiments=150, draws=200)
    assert 0.7 <= found[REPRODUCED] <= 0.9
    (claim,) = judge(
        {"expect": ["a[1] > b[1]"]}, evidence(dict(zip("ab", normal(np.random.default_rng(0), 10, 0), strict=True)))
    )
    error = (claim.interval[1] - claim.margin) / student_t(0.975, 10)
    assert claim.detectable == pytest.approx((student_t(0.975, 10) + student_t(0.8, 10)) * error, rel=0.05)


def test_an_equivalence_at_its_bound_is_seldom_reproduced():
    """abs() of a difference that is as large as the tolerance."""
    for seeds in (3, 10):
        found = verdicts(normal, seeds, 0.05, experiments=100, draws=200, line="abs(a[1] - b[1]) < 0.05")
        assert found[REPRODUCED] <= 0.05
