"""The language of expectations: what a line says in numbers, and that it can say nothing else."""

import pandas as pd
import pytest

from lit_memory.plan.claims import check_expect, parse
from lit_memory.report.verdict import INCOMPLETE, NOT_REPRODUCED, REPRODUCED, evaluate, std

ARMS, XS = ["gamma", "no_gamma"], [50, 100, 200, 500]
EXPECT = ["gamma[200] - no_gamma[200] > 0.2", "abs(gamma[first] - no_gamma[first]) < 0.05"]


def answer(line, cells, seeds=3):
    """``evaluate`` over {arm: {x: values}} of one metric."""
    return evaluate(
        line, lambda arm, metric, x: cells.get(arm if metric is None else f"{arm}.{metric}", {}).get(x, []), XS, seeds
    )


CELLS = {
    "a": {50: [0.9, 1.0, 1.1], 100: [0.5, 0.5, 0.5], 500: [0.4, 0.4, 0.4]},
    "b": {50: [float("nan"), 1.0, 1.0], 100: [0.2, 0.2, 0.2]},
    "a.capacity": {50: [40, 40, 40]},
    "c": {50: [1.0]},
    "d": {50: [0.9], 100: [0.85], 200: [0.7], 500: [0.9]},
}


@pytest.mark.parametrize(
    ("line", "close"),
    [
        ("a[50] > 0.95", True),
        ("a[50] < 0.95", True),
        ("a[50] > 0.85", False),
        ("0 < a[50] < 1.05", True),
        ("a[100] > 0.4999", False),
        ("a[50] - a[100] > 0.45", True),
        ("a[50] - a[50] > -0.05", False),
        ("b[50] > 0", False),
        ("c[50] > 0.99", False),
    ],
)
def test_sides_as_close_as_the_seeds_are_told(line, close):
    """By the spread of a side as a whole: what all seeds share cancels. Nothing is said of unfinished runs."""
    assert answer(line, CELLS).numbers.endswith(" (within one std of the seeds)") == close


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
        ("reach(d[first], 0.9) >= 2", REPRODUCED, "2.000 >= 2 ✓"),  # what comes after the fall does not count
        ("reach(d[first], 0.7) > reach(d[50], 1)", REPRODUCED, "10.000 > 1.000 ✓"),
        ("reach(d[200], 0.9) / 2 > 1.25", NOT_REPRODUCED, "2.500 / 2 = 1.250 > 1.25 ✗"),
        ("reach(d[first], 1.1) > 1", NOT_REPRODUCED, "nan > 1 ✗"),
    ],
)
def test_how_far_a_result_reaches(line, verdict, numbers):
    claim = answer(line, CELLS, seeds=1)
    assert (claim.verdict, claim.numbers) == (verdict, numbers)


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
        check_expect([EXPECT[0], line], ARMS, XS)
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
        check_expect([line], ARMS, XS, metrics=["exact_match", "capacity"])
    assert str(error.value).startswith(f"expect[0] {line!r}: {message}")


def test_good_lines_pass():
    check_expect([*EXPECT, "gamma.any_metric[last] > 1", "gamma[-2] + gamma[0.5] > 1"], ARMS, [*XS, -2, 0.5])
    assert parse("  a[1] > 2\n").ops
