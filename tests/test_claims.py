"""The language of expectations: what a line says in numbers, and that it can say nothing else."""

import ast
import dataclasses
import math
import re

import numpy as np
import pandas as pd
import pytest

from lit_memory.plan.claims import alternatives, check_lines, conditions, parse
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import parse as parse_file
from lit_memory.plan.measured import check_requirement
from lit_memory.report.fold import Fold
from lit_memory.report.statistics import Draws, Evidence
from lit_memory.report.verdict import (
    COMPARISON,
    INCOMPLETE,
    INCONCLUSIVE,
    NOT_JUDGED,
    NOT_REPRODUCED,
    REPRODUCED,
    conclude,
    judge,
    measure,
    std,
)

ARMS, XS = ["gamma", "no_gamma"], [50, 100, 200, 500]
EXPECT = ["gamma[200] - no_gamma[200] > 0.2", "abs(gamma[first] - no_gamma[first]) < 0.05"]


def evidence(cells, seeds=3):
    """Of {arm: {x: values}} of one metric, or {arm.metric: ...}."""
    return Evidence(
        lambda arm, metric, x: cells.get(arm if metric is None else f"{arm}.{metric}", {}).get(x, []), XS, seeds
    )


def answer(line, cells, seeds=3):
    """The line by the mean over seeds."""
    return measure(line, "expect", evidence(cells, seeds))


CELLS = {
    "a": {50: [0.9, 1.0, 1.1], 100: [0.5, 0.5, 0.5], 500: [0.4, 0.4, 0.4]},
    "b": {50: [float("nan"), 1.0, 1.0], 100: [0.2, 0.2, 0.2]},
    "a.capacity": {50: [40, 40, 40]},
    "c": {50: [1.0]},
    "d": {50: [0.9], 100: [0.85], 200: [0.7], 500: [0.9]},
}


@pytest.mark.parametrize(
    ("line", "verdict", "numbers"),
    [
        ("a[100] - b[100] > 0.2", REPRODUCED, "0.500 - 0.200 = 0.300 > 0.2 ✓"),
        ("a[100] - b[100] > 0.4", NOT_REPRODUCED, "0.500 - 0.200 = 0.300 > 0.4 ✗"),
        ("abs(b[100] - a[100]) <= 0.31", REPRODUCED, "abs(0.200 - 0.500) = 0.300 <= 0.31 ✓"),
        ("0.3 < a[100] < 0.6", REPRODUCED, "0.3 < 0.500 < 0.6 ✓"),
        ("0.3 < a[100] < 0.4", NOT_REPRODUCED, "0.3 < 0.500 < 0.4 ✗"),
        ("std(a[50]) >= 0.09", REPRODUCED, "0.100 >= 0.09 ✓"),
        ("a[50] - a[last] > 2 * std(a[50])", REPRODUCED, "1.000 - 0.400 = 0.600 > 2 * 0.100 = 0.200 ✓"),
        (
            "max(a[100], b[100]) - min(a[100], b[100]) < 1",
            REPRODUCED,
            "max(0.500, 0.200) - min(0.500, 0.200) = 0.300 < 1 ✓",
        ),
        ("-(a[first] + 1) / 2 < 0", REPRODUCED, "-(1.000 + 1) / 2 = -1.000 < 0 ✓"),
        ("a.capacity[50] > 30", REPRODUCED, "40.000 > 30 ✓"),
        ("a[100] > 0.4999", REPRODUCED, "0.500000 > 0.4999 ✓"),  # closer than three digits show
        ("a[100] >= 0.5", REPRODUCED, "0.500 >= 0.5 ✓"),
        ("a[100] > 0.5", NOT_REPRODUCED, "0.500 > 0.5 ✗"),
        ("b[50] > 0", NOT_REPRODUCED, "nan > 0 ✗"),
        ("b[50] <= 2", NOT_REPRODUCED, "nan <= 2 ✗"),
        ("min(2, b[50]) > 1", NOT_REPRODUCED, "min(2, nan) = nan > 1 ✗"),
        ("a[50] / (a[100] - a[100]) > 1", NOT_REPRODUCED, "1.000 / (0.500 - 0.500) = nan > 1 ✗"),
        ("c[50] > 0.5", INCOMPLETE, "1.000 > 0.5 ✓ so far (1 of 3 seeds)"),
        ("a[50] - b[last] > b[200]", INCOMPLETE, "no result of b[last], b[200]"),
        ("b.capacity[50] > 1", INCOMPLETE, "no result of b.capacity[50]"),
        ("std(c[50]) < 1", INCOMPLETE, "std needs at least two seeds"),
        ("reach(a[50], 0.3) < 1", INCOMPLETE, "no result of a[200]"),
        ("a[50] > reach(c[50], 0.9)", INCOMPLETE, "no result of c[100], c[200], c[500]"),
    ],
)
def test_a_line_in_numbers(line, verdict, numbers):
    claim = answer(line, CELLS)
    assert (claim.verdict, claim.numbers) == (verdict, numbers)


@pytest.mark.parametrize(
    ("line", "verdict", "numbers"),
    [
        # What comes after the fall does not count: 100 * 2 ** (0.04 / 0.15), as a multiple of 50.
        ("reach(d[first], 0.9) >= 2.4", REPRODUCED, "2.406 >= 2.4 ✓"),
        ("reach(d[first], 0.7) > reach(d[50], 1)", REPRODUCED, "10.000 > 1.000 ✓"),
        ("reach(d[200], 0.9) / 2 > 1.25", NOT_REPRODUCED, "2.500 / 2 = 1.250 > 1.25 ✗"),
        ("reach(d[first], 1.1) > 1", NOT_REPRODUCED, "nan > 1 ✗"),
    ],
)
def test_how_far_a_result_reaches(line, verdict, numbers):
    claim = answer(line, CELLS, seeds=1)
    assert (claim.verdict, claim.numbers) == (verdict, numbers)


def test_the_reach_is_linear_where_an_x_is_not_positive():
    cells = {"a": {-1.0: [1.0], 0.0: [1.0], 4.0: [0.5]}}
    found = Evidence(lambda arm, metric, x: cells[arm][x], [-1, 0, 4], 1)
    assert measure("reach(a[first], 0.75) < 0", "expect", found).sides == (-2.0, 0.0)
    assert measure("reach(a[0], 0.75) > 0", "expect", found).numbers == "nan > 0 ✗"  # no multiple of 0


SOLVED = {
    "good": {50: [0.99, 0.98, 0.99], 100: [0.95, 0.97, 0.96]},
    "poor": {50: [0.4, 0.38, 0.41], 100: [0.3, 0.28, 0.29]},
    "same": {50: [0.5, 0.5, 0.5], 100: [0.5, 0.5, 0.5]},
    "wild": {50: [0.9, 0.1, 0.95], 100: [0.2, 0.9, 0.3]},
    "lost": {50: [0.9, float("nan"), 0.9]},
}


@pytest.mark.parametrize(
    ("lines", "verdict", "each"),
    [
        ({"expect": ["good[50] > poor[50]"]}, REPRODUCED, "✓"),
        ({"expect": ["good[50] < poor[50]"]}, NOT_REPRODUCED, "✗"),
        ({"expect": ["good[50] > poor[50]", "wild[50] > poor[50]"]}, INCONCLUSIVE, "✓?"),
        ({"expect": ["good[50] < poor[50]", "wild[50] > poor[50]"]}, NOT_REPRODUCED, "✗?"),
        ({"expect": ["same[50] >= 0.4", "same[50] > 0.4"]}, REPRODUCED, "✓✓"),
        ({"expect": ["same[50] < 0.4"]}, NOT_REPRODUCED, "✗"),
        ({"expect": ["same[50] >= 0.5", "abs(same[50] - same[100]) <= 0"]}, INCONCLUSIVE, "??"),
        ({"expect": ["same[50] > 0.5"]}, INCONCLUSIVE, "?"),
        ({"expect": ["lost[50] > 0"]}, INCONCLUSIVE, "?"),
        ({"expect": ["good[50] > poor[50]"], "requires": ["poor[50] > 0.3"]}, REPRODUCED, "✓✓"),
        ({"expect": ["good[50] > poor[50]"], "requires": ["min(good[50], poor[50]) > 0.9"]}, INCONCLUSIVE, "✓✗"),
        ({"expect": ["good[50] < poor[50]"], "requires": ["poor[50] > 0.9"]}, INCONCLUSIVE, "✗✗"),
        # A requirement bars the lines about its arms, and all lines if it is about what none of them names.
        (
            {"expect": ["good[50] < 0.5", "poor[50] > 0"], "requires": ["min(good[50], poor[50]) > 0.9"]},
            NOT_REPRODUCED,
            "✗✓✗",
        ),
        (
            {"expect": ["good[50] > 0.5", "poor[50] < 0"], "requires": ["min(good[50], poor[50]) > 0.9"]},
            INCONCLUSIVE,
            "✓✗✗",
        ),
        (
            {"expect": ["good[50] > 0.5", "poor[50] > 0"], "requires": ["min(good[50], poor[50]) > 0.9"]},
            INCONCLUSIVE,
            "✓✓✗",
        ),
        ({"expect": ["good[50] < 0.5", "poor[50] > 0"], "requires": ["same[50] > 0.9"]}, INCONCLUSIVE, "✗✓✗"),
        (
            {"expect": ["good[50] < 0.5", "poor[50] > 0"], "requires": ["min(good[50], same[50]) > 0.9"]},
            INCONCLUSIVE,
            "✗✓✗",
        ),
        ({"expect": ["good[50] < 0.5", "poor[50] > 0"], "requires": ["lost[50] > 0"]}, INCONCLUSIVE, "✗✓✗"),
        ({"expect": ["good[50] > poor[50]"], "requires": ["wild[50] > 0.6"]}, REPRODUCED, "✓✓"),  # by the mean
        ({"expect": ["good[50] > poor[50]"], "requires": ["lost[50] > 0"]}, INCONCLUSIVE, "✓✗"),
        ({"expect": ["good[50] > poor[50]"], "verify": ["abs(same[50] - same[100]) <= 0"]}, REPRODUCED, "✓✓"),
        ({"expect": ["good[50] > poor[50]"], "verify": ["good[50] < 0.5"]}, INCONCLUSIVE, "✓✗"),
        ({"requires": ["poor[50] > 0.9"], "verify": ["good[50] < 0.5"]}, INCONCLUSIVE, "✗✗"),
        ({"verify": ["same[50] >= 0.5"]}, INCONCLUSIVE, "✓"),
        ({}, COMPARISON, ""),
        ({"expect": ["good[50] > poor[50]"], "requires": ["good[500] > 0"]}, INCOMPLETE, "✓ "),
    ],
)
def test_the_verdict_of_all_lines(lines, verdict, each):
    claims = judge(lines, evidence(SOLVED))
    found, reason = conclude(claims, [])
    signs = "".join(claim.numbers[-1] if claim.numbers[-1] in "✓✗?" else " " for claim in claims)
    assert (found, signs) == (verdict, each)
    if lines.keys() == {"requires", "verify"}:
        assert reason == "What should hold by construction does not: `good[50] < 0.5`."
    elif any(claim.kind == "requirement" and not claim.holds for claim in claims) and verdict == INCONCLUSIVE:
        assert reason.startswith(f"A requirement fails, so that the claim cannot be judged: `{lines['requires'][0]}`")
    assert conclude(claims, ["good seed 1"])[0] == INCOMPLETE


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("a[1] - b[1] > 0.5", ["0.5 < a[1] - b[1]"]),
        ("0.2 < a[1] <= min(b[1], c[1])", ["0.2 < a[1]", "a[1] <= b[1]", "a[1] <= c[1]"]),
        ("min(a[1], b[1]) >= max(c[1], 2)", ["c[1] <= a[1]", "2 <= a[1]", "c[1] <= b[1]", "2 <= b[1]"]),
        ("max(a[1], b[1]) > min(c[1], 2)", ["min(c[1], 2) < max(a[1], b[1])"]),
        ("-min(a[1], b[1]) < 1", ["-a[1] < 1", "-b[1] < 1"]),
        (
            "a[1] - max(b[1], c[1]) > 2 * min(b[1], 3)",
            ["2 * min(b[1], 3) < a[1] - b[1]", "2 * min(b[1], 3) < a[1] - c[1]"],
        ),
        ("max(min(a[1], b[1]), c[1]) > 1", ["1 < max(a[1], c[1])", "1 < max(b[1], c[1])"]),
        ("a[1] / max(b[1], c[1]) > abs(min(a[1], b[1]))", ["abs(min(a[1], b[1])) < a[1] / max(b[1], c[1])"]),
    ],
)
def test_the_conditions_of_a_line(line, parts):
    """Their terms in another order say the same."""
    assert sorted(map(ast.unparse, conditions(parse(line)))) == sorted(parts)


@pytest.mark.parametrize(
    ("line", "ways"),
    [
        ("a[1] - b[1] > 0.5", ["0.5 < a[1] - b[1]"]),
        ("1 < max(a[1], b[1]) <= c[1]", ["1 < a[1], max(a[1], b[1]) <= c[1]", "1 < b[1], max(a[1], b[1]) <= c[1]"]),
        ("a[1] - min(b[1], c[1]) > 0.5", ["0.5 < a[1] - b[1]", "0.5 < a[1] - c[1]"]),
        ("min(a[1], b[1]) / 2 < 1 + c[1]", ["a[1] / 2 < 1 + c[1]", "b[1] / 2 < 1 + c[1]"]),
        ("max(min(a[1], b[1]), c[1]) > 1", ["1 < min(a[1], b[1])", "1 < c[1]"]),
    ],
)
def test_the_alternatives_of_a_line(line, ways):
    found = [", ".join(map(ast.unparse, way)) for way in alternatives(parse(line))]
    assert sorted(found) == sorted(ways)


def test_a_line_is_its_worst_condition_and_its_best_alternative():
    """In every draw, for lines at random."""
    rng, xs = np.random.default_rng(0), [1.0]
    values = {arm: list(rng.normal(0.5, 0.1, 4)) for arm in "abc"}
    fold = Fold(Draws(Evidence(lambda arm, metric, x: values[arm], xs, 4), 50))

    def term(depth):
        kind = rng.integers(6) if depth else 5
        parts = [term(depth - 1) for _ in range(2)] if kind < 5 else []
        texts = ["min({}, {})", "max({}, {})", "({} - {})", "({} + 0.5 * {})", "(-{} + {} / 2)"]
        return texts[kind].format(*parts) if kind < 5 else rng.choice(["a[1]", "b[1]", "c[1]", "0.5"])

    for _ in range(100):
        line = f"{term(3)} > {term(2)} - a[1]"
        margin = fold.line_margin(parse(line[:400]))
        assert margin.whole.draws == pytest.approx(np.min([m.draws for m in margin.conditions], axis=0), abs=2e-6), line
        assert margin.whole.draws == pytest.approx(np.max([m.draws for m in margin.alternatives], axis=0), abs=2e-6), (
            line
        )


def test_sides_that_differ_by_rounding_are_equal():
    """Results are means in single precision: they hold where equality does, and decide nothing."""
    single = {arm: {50: [float(np.float32(value))] * 3} for arm, value in {"a": 0.9, "b": 0.7, "c": 0.8}.items()}
    lines = {
        "expect": ["a[50] - c[50] >= 0.1", "b[50] > 0.7"],
        "requires": ["a[50] >= 0.9"],
        "verify": ["b[50] <= 0.7"],
    }
    claims = judge(lines, evidence(single))
    assert [claim.verdict for claim in claims] == [INCONCLUSIVE, INCONCLUSIVE, REPRODUCED, REPRODUCED]
    assert [claim.reason for claim in claims[:2]] == ["both sides are equal in every draw"] * 2
    assert claims[2].numbers == "0.900 >= 0.9 ✓"


def test_the_rounding_of_a_ratio_is_its_own():
    """Not that of the large numbers that it divides."""
    fast = evidence({"a": {50: [5e5] * 3}, "b": {50: [1e6] * 3}})
    lines = ["a[50] / b[50] >= 0.9", "0.5 >= 0.4 * b[50] / a[50]", "0.9 * b[50] - a[50] <= 0", "2 * a[50] <= b[50]"]
    verdicts = [claim.verdict for claim in judge({"verify": lines}, fast)]
    assert verdicts == [NOT_REPRODUCED, NOT_REPRODUCED, NOT_REPRODUCED, REPRODUCED]


def test_a_property_that_is_no_number_refutes_nothing():
    cells = {"a": {50: [0.9, 0.91, 0.92]}, "b": {50: [math.nan, 1.0, 1.0]}}
    verdict, reason = conclude(judge({"expect": ["a[50] > 0.5"], "verify": ["b[50] <= 1"]}, evidence(cells)), [])
    assert verdict == INCONCLUSIVE
    assert reason == "What should hold by construction cannot be judged: `b[50] <= 1` (a result is not a number)."


def test_a_verdict_names_the_requirement_that_does_not_bar_it():
    lines = {"expect": ["good[50] < 0.5", "poor[50] > 0"], "requires": ["min(good[50], poor[50]) > 0.9"]}
    _, reason = conclude(judge(lines, evidence(SOLVED)), [])
    assert reason == (
        "With confidence the opposite holds: `good[50] < 0.5`. "
        "A requirement about other arms fails: `min(good[50], poor[50]) > 0.9`."
    )
    first, second, _ = judge(lines, evidence(SOLVED))
    assert (first.verdict, second.verdict) == (NOT_REPRODUCED, NOT_JUDGED)
    wider = judge(lines | {"requires": ["same[50] > 0.9"]}, evidence(SOLVED))
    assert [claim.verdict for claim in wider[:2]] == [NOT_JUDGED] * 2


def test_a_line_says_what_it_rests_on():
    clear, unclear, needed = judge(
        {"expect": ["good[50] > poor[50]", "wild[50] > poor[50]"], "requires": ["good[50] > 0.9"]}, evidence(SOLVED)
    )
    assert (clear.kind, clear.level, clear.resampled, clear.reason) == ("claim", 0.025, "seeds alone", "")
    assert clear.margin == pytest.approx(0.59) and 0 < clear.interval[0] < 0.59 < clear.interval[1] < 1.18
    assert clear.shown_margin.startswith("0.59, 97.5 % interval 0.5")
    assert unclear.level == 0.05 and unclear.interval[0] < 0 < unclear.interval[1] and unclear.holds
    assert unclear.reason == f"80 % of such experiments would see a margin of {unclear.detectable:.3g}"
    assert conclude([clear, unclear, needed], [])[1] == f"Undecided: `{unclear.line}` ({unclear.reason})."
    assert (needed.kind, needed.verdict, needed.interval, needed.level) == ("requirement", REPRODUCED, None, None)
    (one,) = judge({"expect": ["good[50] > 0"]}, evidence({"good": {50: [0.9]}}, seeds=1))
    assert (one.verdict, one.numbers, one.reason) == (INCONCLUSIVE, "0.900 > 0 ?", "one seed has no interval")


def test_a_reach_that_the_test_ends_decides_nothing():
    kept = {arm: {x: [1.0, 0.9, 1.0] for x in XS} for arm in "ab"}
    lines = ["reach(a[50], 0.9) > reach(b[50], 0.9)", "reach(a[50], 0.9) >= 4"]
    tie, least = judge({"expect": lines}, evidence(kept))
    assert (tie.verdict, tie.interval) == (INCONCLUSIVE, (0.0, 0.0)) and "a longer test" in tie.reason
    assert (least.verdict, least.interval) == (REPRODUCED, (6.0, 6.0))


def test_claims_without_a_requirement(tree):
    experiment = parse_file(tree | {"requires": ["a[2] >= 0.5"]}, "tiny.yaml").at()
    assert experiment.expect
    check_requirement(experiment)
    check_requirement(dataclasses.replace(experiment, expect=[], requires=[]))
    with pytest.raises(
        ConfigError, match=r"^tiny\.yaml: requires: missing beside the lines of expect; expected what mu"
    ):
        check_requirement(dataclasses.replace(experiment, requires=[]))


def test_std_is_that_of_a_sample():
    assert std([1.0, 2.0, 4.0]) == pytest.approx(pd.Series([1.0, 2.0, 4.0]).std(ddof=1))


FORBIDDEN = """gamma > 1|gamma[50]|gamma[50] == 1|gamma[50] != 1|gamma[50] > 1 and no_gamma[50] > 1|not gamma[50] > 1
gamma[50] ** 2 > 1|gamma[50] % 2 > 1
__import__('os').system('true') > 1|gamma.__class__.__base__[50] > 1|gamma[50].real > 1|(lambda: 1)() > gamma[50]
[x for x in (1,)] > gamma[50]
open('f')[50] > 1|reach(gamma[50]) > 1|reach(1, 0.9) > 1|reach(gamma[50], gamma[50]) > 1
gamma[50:100] > 1|gamma[50, 100] > 1|gamma[no_gamma] > 1|gamma['50'] > 1|gamma[True] > 1|gamma[50] > True
gamma[50] > 'a'|gamma[50] > 1j|gamma[50] > 1e999
std(gamma[50] + 1) > 1|std(1) > 1|abs() > 1|abs(gamma[50], 1) > 1|min(gamma[50]) > 1|max(*gamma[50]) > 1
abs(x=gamma[50]) > 1|round(gamma[50]) > 1
(x := gamma[50]) > 1|gamma[50] > 1 if 1 else 2|gamma[50] is 1|gamma[50] in [1]|(gamma[50] > 1) > 0|f'{gamma[50]}' > 1
1 < 2||(gamma[50] > 1|gamma[50] = 1
gamma[50] > 1; gamma[50] > 2|gamma[50] > \0|await gamma[50] > 1""".replace("\n", "|").split("|")


@pytest.mark.parametrize("line", [*FORBIDDEN, "gamma[50] > " + "1 + " * 200 + "1", 3])
def test_everything_else_is_refused_in_one_line(line):
    with pytest.raises(ValueError, match=r"^expect\[1\] ") as error:
        check_lines([EXPECT[0], line], ARMS, XS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gama[50] > 1", "no arm 'gama'; arms: gamma, no_gamma (did you mean 'gamma'?)"),
        ("gamma[75] > 1", "gamma[75]: 75 is not tested; tested: 50, 100, 200, 500 (nearest: 50)"),
        (
            "gamma.exat_match[50] > 1",
            "no metric 'exat_match'; metrics: exact_match, capacity (did you mean 'exact_match'?)",
        ),
        ("gamma[50] == 1", "only <, <=, > and >= compare; for equality write abs(a - b) < tolerance"),
        ("sum(gamma[50]) > 1", "'sum(gamma[50])' is not allowed; a line holds arm[x]"),
        ("gamma[middle] > 1", "'gamma[middle]': x must be a tested number, first or last"),
        ("1 < 2", "the line compares no result; expected at least one arm[x]"),
        ("(gamma[50] > 1", "syntax: '(' was never closed (column 1)"),
    ],
)
def test_messages_say_what_was_expected(line, message):
    with pytest.raises(ValueError) as error:
        check_lines([line], ARMS, XS, metrics=["exact_match", "capacity"], section="requires")
    assert str(error.value).startswith(f"requires[0] {line!r}: {message}")


def test_an_arm_that_stops_early():
    """Its lines name the tested number with which it ends."""
    stops = {"no_gamma": 2}
    check_lines(["gamma[last] > no_gamma[100]", "reach(gamma[50], 0.9) > no_gamma[first]"], ARMS, XS, stops=stops)
    for ref, message in (
        ("no_gamma[last]", r"no_gamma\[last\]: the test of no_gamma ends at 100; expected that number"),
        ("reach(no_gamma[50], 0.9)", r"no_gamma\[50\]: the test of no_gamma ends at 100; expected that number"),
        ("no_gamma[500]", r"no_gamma\[500\]: 500 is not tested; tested: 50, 100 \(nearest: 100\)"),
    ):
        with pytest.raises(ValueError, match=message):
            check_lines([f"{ref} > 1"], ARMS, XS, stops=stops)


def test_good_lines_pass():
    check_lines([*EXPECT, "gamma.any_metric[last] > 1", "gamma[-2] + gamma[0.5] > 1"], ARMS, [*XS, -2, 0.5])
    assert parse("  a[1] > 2\n").ops


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("d[50] / 0 > 1", "'d[50] / 0' divides by 0"),
        ("reach(d[first], 0) > 1", "expected a share above 0"),
    ],
)
def test_numbers_that_have_no_answer(line, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(line)
