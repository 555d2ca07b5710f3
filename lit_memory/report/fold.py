"""A line of ``plan.claims`` folded over the measured values, and over draws of them, 10,000 at once."""

import ast
import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lit_memory.plan.claims import ARITHMETIC, COMPARE, Ref, alternatives, calls, conditions, reference, refs
from lit_memory.report.margins import LineMargin, Margin
from lit_memory.report.statistics import Draws

ROUNDING = 1e-6
"""Share of the largest number of a line up to which two sides are equal: results are kept in single precision."""


@dataclass(frozen=True)
class Fold(ast.NodeTransformer):
    """The value of a tree, as measured and in every draw, and its text with numbers in the place of references."""

    drawn: Draws
    digits: int = 3

    def at(self, ref: Ref) -> tuple[str, str | None, float]:
        """Arm, metric and the tested value that a reference names."""
        xs = self.drawn.evidence.x_values
        ends = {"first": xs[0], "last": xs[-1]}
        return ref.arm, ref.metric, float(ends[ref.x] if isinstance(ref.x, str) else ref.x)

    def values(self, ref: Ref) -> Sequence[float]:
        """The values of the finished seeds."""
        return self.drawn.evidence.values(*self.at(ref))

    def onwards(self, ref: Ref) -> list[Ref]:
        """The same result at every tested x from that of ``ref`` on."""
        *_, first = self.at(ref)
        return [ref._replace(x=float(x)) for x in sorted(self.drawn.evidence.x_values) if x >= first]

    def reach(self, ref: Ref, share: float) -> Any:
        """The x, as a multiple of that of ``ref``, at which the mean falls below ``share`` of its value at ``ref``; NaN
        where that is at once."""
        import numpy as np

        onwards = [self.at(on) for on in self.onwards(ref)]
        xs, means = [x for *_, x in onwards], np.stack([self.drawn.mean(*on) for on in onwards])
        if not xs[0]:
            return np.full(means.shape[1], math.nan)
        places, least = np.log(xs) if xs[0] > 0 else np.array(xs), share * means[0]
        fallen = ~(means >= least)
        falls, first = fallen.any(axis=0), fallen.argmax(axis=0)
        column, before = np.arange(means.shape[1]), np.maximum(first - 1, 0)
        above, below = means[before, column], means[first, column]
        part = np.where(falls & (first > 0), (above - least) / (above - below), math.nan)
        place = places[before] + part * (places[first] - places[before])
        return np.where(falls, np.exp(place) if xs[0] > 0 else place, xs[-1]) / xs[0]

    def value(self, node: ast.expr) -> Any:
        """The values of a sum: one as measured, then one of every draw; or a number alone. Division by zero and min or
        max with NaN are NaN."""
        import numpy as np

        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            return self._value(node)

    def _value(self, node: ast.expr) -> Any:
        import numpy as np

        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.UnaryOp(operand=operand):
                return -self._value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._value(left), self._value(right)
                if isinstance(op, ast.Div):
                    a, b = np.where(np.equal(b, 0), math.nan, a), np.where(np.equal(b, 0), 1.0, b)
                return ARITHMETIC[type(op)](a, b)
            case ast.Subscript():
                return self.drawn.mean(*self.at(reference(node)))
            case ast.Call(func=ast.Name(id="std"), args=[ast.Subscript() as ref]):
                return self.drawn.std(*self.at(reference(ref)))
            case ast.Call(func=ast.Name(id="reach"), args=[ast.Subscript() as ref, ast.Constant(value=share)]):
                return self.reach(reference(ref), share)  # pyright: ignore[reportArgumentType]
            case ast.Call(func=ast.Name(id="abs"), args=[argument]):
                return abs(self._value(argument))
            case ast.Call(func=ast.Name(id=name), args=args):
                values = np.broadcast_arrays(*map(self._value, args))
                return np.min(values, axis=0) if name == "min" else np.max(values, axis=0)
        raise TypeError(f"{type(node).__name__} passed the parser")

    def line_margin(self, tree: ast.Compare) -> LineMargin:
        """By how much a line holds, and its conditions and alternatives."""
        whole, parts, ways = self.margin([tree]), conditions(tree), alternatives(tree)
        each = [self.margin([part]) for part in parts] if len(parts) > 1 else [whole]
        return LineMargin(whole, each, [self.margin(way) for way in ways] if len(ways) > 1 else [whole])

    def margin(self, trees: Sequence[ast.Compare]) -> Margin:
        """By how much all of some comparisons hold, as measured and in every draw."""
        import numpy as np

        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            every = np.empty(1 + self.drawn.count)  # a comparison of numbers has no draws
            gaps = np.broadcast_arrays(every, *(gap for tree in trees for gap in self._gaps(tree)))
            margins = np.min(gaps[1:], axis=0)
        return Margin(float(margins[0]), margins[1:], self.drawn.evidence.seeds, self.drawn.turns)

    def _gaps(self, tree: ast.Compare) -> Iterator[Any]:
        """By how much every link of a chain holds; 0 where its sides are equal but for the rounding of what was
        measured, which is in single precision."""
        import numpy as np

        nodes = [tree.left, *tree.comparators]
        sides, least = [self.value(node) for node in nodes], ROUNDING * max(map(self._size, nodes))
        for op, (a, b) in zip(tree.ops, itertools.pairwise(sides), strict=True):
            gap = b - a if isinstance(op, ast.Lt | ast.LtE) else a - b
            yield np.where(abs(gap) <= least, 0.0, gap)

    def _size(self, node: ast.expr) -> float:
        """How large the numbers are of which rounding is left in a sum: those of a difference, rather than itself."""
        match node:
            case ast.UnaryOp(operand=operand):
                return self._size(operand)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._size(left), self._size(right)
                if isinstance(op, ast.Add | ast.Sub):
                    return max(a, b)
                x, y = (abs(measured(self.value(side))) for side in (left, right))
                return max(a * y, b * x) if isinstance(op, ast.Mult) else max(a / y, b * x / y**2) if y else 0.0
            case ast.Call(func=ast.Name(id="abs" | "min" | "max"), args=args):
                return max(map(self._size, args))
        return abs(measured(self.value(node)))

    def text(self, side: ast.expr) -> str:
        """``0.998 - 0.412 = 0.586``, or the number alone where there is nothing to compute."""
        numbers = self.visit(copy.deepcopy(side))
        text = ast.unparse(numbers)
        return f"{text} = {self.number(side)}" if isinstance(numbers, ast.BinOp | ast.Call) else text

    def number(self, node: ast.expr) -> str:
        """The measured value of a sum."""
        return f"{measured(self.value(node)):.{self.digits}f}"

    def visit_Subscript(self, node: ast.Subscript) -> ast.Name:
        return ast.Name(self.number(node))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in ("std", "reach"):
            return ast.Name(self.number(node))
        return self.generic_visit(node)


def measured(value: Any) -> float:
    """The measured one of the values of a sum, or a number as it is."""
    return value if isinstance(value, float) else float(value[0])


def used(tree: ast.Compare, fold: Fold) -> list[Ref]:
    """Every result that a line needs; a ``reach`` needs all tested x from its own on."""
    reached = [ref for call in calls(tree, "reach") for ref in refs(call)]
    return refs(tree) + [on for ref in reached for on in fold.onwards(ref)]


def digits_of(sides: Sequence[float]) -> int:
    """Decimals with which sides that differ look different: 3, 6 or 9."""
    gaps = [abs(a - b) for a, b in itertools.pairwise(sides) if abs(a - b) > ROUNDING * max(abs(a), abs(b))]
    return next((digits for digits in (3, 6) if not any(gap < 2 * 10**-digits for gap in gaps)), 9)


def in_numbers(tree: ast.Compare, fold: Fold) -> str:
    """A line in numbers: "0.998 - 0.412 = 0.586 > 0.2"."""
    words = [fold.text(tree.left)]
    for op, node in zip(tree.ops, tree.comparators, strict=True):
        words += [COMPARE[type(op)][0], fold.text(node)]
    return " ".join(words)
