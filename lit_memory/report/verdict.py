"""The verdict on a claim: a line of ``plan.claims`` folded over the measured values.

A comparison with NaN does not hold. Where two sides differ by less than one of them does from seed to seed, the numbers
say so; the verdict does not change. Standard library only.
"""

import ast
import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lit_memory.plan.claims import ARITHMETIC, COMPARE, FUNCTIONS, Ref, calls, parse, reference, refs

REPRODUCED, NOT_REPRODUCED, INCOMPLETE = "REPRODUCED", "NOT REPRODUCED", "INCOMPLETE"


def mean(values: Sequence[float]) -> float:
    """Mean over seeds; NaN without values."""
    return sum(values) / len(values) if values else math.nan


def std(values: Sequence[float]) -> float:
    """Sample standard deviation over seeds (ddof = 1); NaN for fewer than two values."""
    center = mean(values)
    return math.hypot(*(v - center for v in values)) / math.sqrt(len(values) - 1) if len(values) > 1 else math.nan


@dataclass(frozen=True)
class Claim:
    """The verdict on one line."""

    line: str
    verdict: str
    numbers: str
    """The line with numbers in the place of references."""
    sides: tuple[float, ...] = ()
    """The values between the comparison signs."""


Lookup = Callable[[str, str | None, float], Sequence[float]]
"""(arm, metric or None for the figure's, x) -> the values of the finished seeds."""


@dataclass(frozen=True)
class _Fold(ast.NodeTransformer):
    """The value of a tree, and its text with numbers in the place of references."""

    results: Lookup
    x_values: Sequence[float]
    digits: int = 3

    def x(self, ref: Ref) -> float:
        """The tested value that a reference names."""
        ends = {"first": self.x_values[0], "last": self.x_values[-1]}
        return ends[ref.x] if isinstance(ref.x, str) else ref.x

    def seeds(self, ref: Ref) -> Sequence[float]:
        """The values of the finished seeds."""
        return self.results(ref.arm, ref.metric, self.x(ref))

    def onwards(self, ref: Ref) -> list[Ref]:
        """The same result at every tested x from that of ``ref`` on."""
        return [ref._replace(x=x) for x in sorted(self.x_values) if x >= self.x(ref)]

    def reach(self, ref: Ref, share: float) -> float:
        """The last x, as a multiple of that of ``ref``, before the mean falls below ``share`` of its value at ``ref``;
        NaN if it does so at once."""
        least, start = share * mean(self.seeds(ref)), self.x(ref)
        kept = list(itertools.takewhile(lambda at: mean(self.seeds(at)) >= least, self.onwards(ref)))
        return self.x(kept[-1]) / start if kept and start else math.nan

    def value(self, node: ast.expr) -> float:
        """The value of a sum. Division by zero and min or max with NaN are NaN."""
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.UnaryOp(operand=operand):
                return -self.value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.value(left), self.value(right)
                return math.nan if isinstance(op, ast.Div) and b == 0 else ARITHMETIC[type(op)](a, b)
            case ast.Subscript():
                return mean(self.seeds(reference(node)))
            case ast.Call(func=ast.Name(id="std"), args=[ast.Subscript() as ref]):
                return std(self.seeds(reference(ref)))
            case ast.Call(func=ast.Name(id="reach"), args=[ast.Subscript() as ref, share]):
                return self.reach(reference(ref), self.value(share))
            case ast.Call(func=ast.Name(id=name), args=args):
                numbers = [self.value(arg) for arg in args]
                return math.nan if any(map(math.isnan, numbers)) else FUNCTIONS[name](*numbers)
        raise TypeError(f"{type(node).__name__} passed the parser")

    def text(self, side: ast.expr) -> str:
        """``0.998 - 0.412 = 0.586``, or the number alone where there is nothing to compute."""
        numbers = self.visit(copy.deepcopy(side))
        text = ast.unparse(numbers)
        return f"{text} = {self.value(side):.{self.digits}f}" if isinstance(numbers, ast.BinOp | ast.Call) else text

    def visit_Subscript(self, node: ast.Subscript) -> ast.Name:
        return ast.Name(f"{self.value(node):.{self.digits}f}")

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in ("std", "reach"):
            return ast.Name(f"{self.value(node):.{self.digits}f}")
        return self.generic_visit(node)


def evaluate(line: str, results: Lookup, x_values: Sequence[float], seeds: int) -> Claim:
    """Whether a line holds. INCOMPLETE while one of its results lacks one of ``seeds`` seeds, or if it takes the std of
    one seed."""
    tree = parse(line)
    fold = _Fold(results, x_values)
    finished = {str(ref): len(fold.seeds(ref)) for ref in _used(tree, fold)}
    if absent := [name for name, n in finished.items() if not n]:
        return Claim(line, INCOMPLETE, f"no result of {', '.join(absent)}")
    if any(len(fold.seeds(ref)) < 2 for call in calls(tree, "std") for ref in refs(call)):
        return Claim(line, INCOMPLETE, "std needs at least two seeds")
    nodes = [tree.left, *tree.comparators]
    sides = tuple(fold.value(node) for node in nodes)
    compared = zip(tree.ops, itertools.pairwise(sides), strict=True)
    holds = all(COMPARE[type(op)][1](a, b) for op, (a, b) in compared)
    least = min(finished.values())
    remark = ""
    if least < seeds:
        remark = f" so far ({least} of {seeds} seeds)"
    elif _close(nodes, fold, seeds):
        remark = " (within one std of the seeds)"
    numbers = f"{_numbers(tree, replace(fold, digits=_digits(sides)))} {'✓' if holds else '✗'}{remark}"
    verdict = REPRODUCED if holds else NOT_REPRODUCED
    return Claim(line, INCOMPLETE if least < seeds else verdict, numbers, sides)


def _used(tree: ast.Compare, fold: _Fold) -> list[Ref]:
    """Every result that a line needs; a ``reach`` needs all tested x from its own on."""
    reached = [ref for call in calls(tree, "reach") for ref in refs(call)]
    return refs(tree) + [on for ref in reached for on in fold.onwards(ref)]


def _close(nodes: Sequence[ast.expr], fold: _Fold, seeds: int) -> bool:
    """Whether two compared sides differ by less than one of them does from seed to seed (sample standard deviation)."""
    single = [replace(fold, results=lambda *ref, i=i: fold.results(*ref)[i : i + 1]) for i in range(seeds)]
    sides = [(fold.value(node), std([one.value(node) for one in single])) for node in nodes]
    return any(abs(a - b) < spread for (a, s), (b, t) in itertools.pairwise(sides) for spread in (s, t))


def _digits(sides: Sequence[float]) -> int:
    """Decimals with which sides that differ look different: 3, 6 or 9."""
    gaps = [abs(a - b) for a, b in itertools.pairwise(sides) if a != b]
    return next((digits for digits in (3, 6) if not any(gap < 2 * 10**-digits for gap in gaps)), 9)


def _numbers(tree: ast.Compare, fold: _Fold) -> str:
    """A line in numbers: "0.998 - 0.412 = 0.586 > 0.2"."""
    words = [fold.text(tree.left)]
    for op, node in zip(tree.ops, tree.comparators, strict=True):
        words += [COMPARE[type(op)][0], fold.text(node)]
    return " ".join(words)
