"""The language of ``expect:`` lines, in which an experiment states the paper's claim.

    line = sum (< | <= | > | >=) sum ...             one comparison; 0.2 < a[1] < 0.5 is allowed
    sum  = + - * / and unary minus over terms and parentheses
    term = number | ref | std(ref) | reach(ref, share) | abs(sum) | min(sum, sum, ...) | max(sum, sum, ...)
    ref  = arm[x] | arm.metric[x]                    mean over seeds; x is a tested number, first or last
    reach(ref, share)                                how many times its x the mean stays at share * ref or more, at all
    tested x up to there

    gamma[200] - no_gamma[200] > 0.2
    armt[50] - rmt[50] > std(armt[50]) + std(rmt[50])

    reach(armt[first], 0.9) > reach(rmt[first], 0.9)

std is the sample standard deviation over seeds (ddof = 1). A comparison with NaN does not hold. Where two sides differ
by less than one of them does from seed to seed, the numbers say so; the verdict does not change. Lines are parsed by
``ast`` and folded over a list of allowed nodes; nothing reaches ``eval``. Standard library only.
"""

import ast
import copy
import difflib
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

REPRODUCED, NOT_REPRODUCED, INCOMPLETE = "REPRODUCED", "NOT REPRODUCED", "INCOMPLETE"
GRAMMAR = (
    "a line holds arm[x], arm.metric[x], numbers, + - * /, abs(), min(), max(), std(arm[x]) and reach(arm[x], 0.9)"
)
MAX_LENGTH = 400
COMPARE = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max}


class Ref(NamedTuple):
    """``arm[x]`` or ``arm.metric[x]``; metric None is the metric of the figure, x may be "first" or "last"."""

    arm: str
    metric: str | None
    x: float | str

    def __str__(self) -> str:
        return f"{self.arm}{'.' + self.metric if self.metric else ''}[{self.x if isinstance(self.x, str) else format(self.x, 'g')}]"


@dataclass(frozen=True)
class Claim:
    """One line, whether it holds, and the same line in numbers. ``sides`` are the values between the comparison
    signs."""

    line: str
    verdict: str
    numbers: str
    sides: tuple[float, ...] = ()


def check_expect(
    lines: Sequence[str], arms: Sequence[str], x_values: Sequence[float], metrics: Collection[str] | None = None
) -> None:
    """Raise ValueError, in one line, for what no run of this plan could answer. ``metrics`` None leaves names of
    metrics unchecked."""
    for i, line in enumerate(lines):
        try:
            refs = list(_refs(parse(line)))
            for ref in refs:
                _require(ref.arm, "arm", arms)
                if ref.metric and metrics is not None:
                    _require(ref.metric, "metric", metrics)
                if isinstance(ref.x, float):
                    _require_x(ref, ref.x, x_values)
            if not refs:
                raise ValueError("the line compares no result; expected at least one arm[x]")
        except ValueError as error:
            raise ValueError(f"expect[{i}] {line!r:.90}: {error}") from None


def _require(name: str, kind: str, known: Collection[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(
            f"no {kind} {name!r}; {kind}s: {_join(known)}" + (f" (did you mean {near[0]!r}?)" if near else "")
        )


def _require_x(ref: Ref, x: float, tested: Sequence[float]) -> None:
    if x not in tested:
        raise ValueError(
            f"{ref}: {x:g} is not tested; tested: {_join(tested)} (nearest: {min(tested, key=lambda t: abs(t - x)):g})"
        )


def _join(items: Collection) -> str:
    return ", ".join(str(item) for item in items)


def parse(line: str) -> ast.Compare:
    """The tree of a line, every node of it allowed. Raises ValueError."""
    if not isinstance(line, str) or len(line) > MAX_LENGTH:
        raise ValueError(f"expected a comparison, a text of at most {MAX_LENGTH} characters")
    try:
        tree = ast.parse(line.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"syntax: {error.msg} (column {error.offset}); {GRAMMAR}") from None
    if not isinstance(tree, ast.Compare):
        raise ValueError("expected one comparison (<, <=, >, >=) per line, as in a[1] - b[1] > 0.1")
    if any(type(op) not in COMPARE for op in tree.ops):
        raise ValueError("only <, <=, > and >= compare; for equality write abs(a - b) < tolerance")
    for side in (tree.left, *tree.comparators):
        _allow(side)
    return tree


def _allow(node: ast.expr) -> None:
    """Raise ValueError unless ``node`` is a sum of the grammar."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and abs(value) < 1e300:
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _allow(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            _allow(left)
            _allow(right)
        case ast.Call(func=ast.Name(id="std"), args=[ast.Subscript() as ref], keywords=[]):
            _ref(ref)
        case ast.Call(
            func=ast.Name(id="reach"), args=[ast.Subscript() as ref, ast.Constant(value=int() | float())], keywords=[]
        ):
            _ref(ref)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS and (
            len(args) == 1 if name == "abs" else len(args) > 1
        ):
            for arg in args:
                _allow(arg)
        case ast.Subscript():
            _ref(node)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not allowed; {GRAMMAR}")


def _ref(node: ast.Subscript) -> Ref:
    match node.value:
        case ast.Name(id=arm):
            metric = None
        case ast.Attribute(value=ast.Name(id=arm), attr=metric):
            pass
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not allowed; expected arm[x] or arm.metric[x]")
    match node.slice:
        case ast.Name(id="first" | "last" as x):
            return Ref(arm, metric, x)
        case (
            ast.Constant(value=int() | float() as x)
            | ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as x))
        ) if not isinstance(x, bool):
            return Ref(arm, metric, float(ast.literal_eval(node.slice)))
    raise ValueError(f"{ast.unparse(node)!r}: x must be a tested number, first or last")


def _refs(tree: ast.AST) -> Iterator[Ref]:
    return map(
        _ref,
        sorted(
            (node for node in ast.walk(tree) if isinstance(node, ast.Subscript)),
            key=lambda node: (node.lineno, node.col_offset),
        ),
    )


def mean(values: Sequence[float]) -> float:
    """Mean over seeds; NaN without values."""
    return sum(values) / len(values) if values else math.nan


def std(values: Sequence[float]) -> float:
    """Sample standard deviation over seeds (ddof = 1); NaN for fewer than two values."""
    center = mean(values)
    return math.hypot(*(v - center for v in values)) / math.sqrt(len(values) - 1) if len(values) > 1 else math.nan


Lookup = Callable[[str, str | None, float], Sequence[float]]
"""(arm, metric or None, x) -> the values of the finished seeds."""


@dataclass(frozen=True)
class _Fold(ast.NodeTransformer):
    """The values of a tree, and the tree as text with numbers in the place of results."""

    results: Lookup
    x_values: Sequence[float]
    digits: int = 3

    def x(self, ref: Ref) -> float:
        """The tested value that a reference names."""
        ends = {"first": self.x_values[0], "last": self.x_values[-1]}
        return ends[ref.x] if isinstance(ref.x, str) else ref.x

    def seeds(self, ref: Ref) -> Sequence[float]:
        """What the finished seeds measured."""
        return self.results(ref.arm, ref.metric, self.x(ref))

    def way(self, ref: Ref) -> list[Ref]:
        """The same result at every tested x from that of ``ref`` on."""
        return [ref._replace(x=x) for x in sorted(self.x_values) if x >= self.x(ref)]

    def reach(self, ref: Ref, share: float) -> float:
        """The largest x on the way before the mean falls below ``share`` of what it is at ``ref``, over that of
        ``ref``; NaN if it does so at once."""
        least, start = share * mean(self.seeds(ref)), self.x(ref)
        on = list(itertools.takewhile(lambda on: mean(self.seeds(on)) >= least, self.way(ref)))
        return self.x(on[-1]) / start if on and start else math.nan

    def value(self, node: ast.expr) -> float:
        """The number that a sum comes to. Division by zero and min or max with NaN are NaN."""
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.UnaryOp(operand=operand):
                return -self.value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.value(left), self.value(right)
                return math.nan if isinstance(op, ast.Div) and b == 0 else ARITHMETIC[type(op)](a, b)
            case ast.Subscript():
                return mean(self.seeds(_ref(node)))
            case ast.Call(func=ast.Name(id="std"), args=[ast.Subscript() as ref]):
                return std(self.seeds(_ref(ref)))
            case ast.Call(func=ast.Name(id="reach"), args=[ast.Subscript() as ref, share]):
                return self.reach(_ref(ref), self.value(share))
            case ast.Call(func=ast.Name(id=name), args=args):
                numbers = [self.value(arg) for arg in args]
                return math.nan if any(map(math.isnan, numbers)) else FUNCTIONS[name](*numbers)
        raise TypeError(f"{type(node).__name__} passed the parser")

    def text(self, side: ast.expr) -> str:
        """``0.998 - 0.412 = 0.586``, or the number alone where there is nothing to compute."""
        numbers = self.visit(copy.deepcopy(side))
        return ast.unparse(numbers) + (
            f" = {self.value(side):.{self.digits}f}" if isinstance(numbers, ast.BinOp | ast.Call) else ""
        )

    def visit_Subscript(self, node: ast.Subscript) -> ast.Name:
        return ast.Name(f"{self.value(node):.{self.digits}f}")

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return (
            ast.Name(f"{self.value(node):.{self.digits}f}")
            if _calls(node, "std", "reach")
            else self.generic_visit(node)
        )


def _calls(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _close(nodes: Sequence[ast.expr], fold: _Fold, seeds: int) -> bool:
    """Whether two sides that are compared differ by less than one of them does from seed to seed (sample standard
    deviation)."""
    alone = [replace(fold, results=lambda *ref, i=i: fold.results(*ref)[i : i + 1]) for i in range(seeds)]
    sides = [(fold.value(node), std([one.value(node) for one in alone])) for node in nodes]
    return any(abs(a - b) < spread for (a, s), (b, t) in itertools.pairwise(sides) for spread in (s, t))


def evaluate(line: str, results: Lookup, x_values: Sequence[float], seeds: int) -> Claim:
    """Does the line hold? INCOMPLETE while one of its results lacks one of ``seeds`` seeds, or if it takes the std of
    one seed."""
    tree = parse(line)
    fold = _Fold(results, x_values)
    refs = [
        *_refs(tree),
        *(on for call in ast.walk(tree) if _calls(call, "reach") for ref in _refs(call) for on in fold.way(ref)),
    ]
    finished = {str(ref): len(fold.seeds(ref)) for ref in refs}
    if absent := [name for name, n in finished.items() if not n]:
        return Claim(line, INCOMPLETE, f"no result of {_join(absent)}")
    if any(len(fold.seeds(ref)) < 2 for call in ast.walk(tree) if _calls(call, "std") for ref in _refs(call)):
        return Claim(line, INCOMPLETE, "std needs at least two seeds")
    nodes = [tree.left, *tree.comparators]
    sides = tuple(fold.value(node) for node in nodes)
    holds = all(COMPARE[type(op)][1](a, b) for op, a, b in zip(tree.ops, sides[:-1], sides[1:], strict=True))
    gaps = [abs(a - b) for a, b in itertools.pairwise(sides) if a != b]
    fold = replace(fold, digits=next((d for d in (3, 6) if not any(gap < 2 * 10**-d for gap in gaps)), 9))
    words = [
        word for op, node in zip(tree.ops, nodes[1:], strict=True) for word in (COMPARE[type(op)][0], fold.text(node))
    ]
    partial = min(finished.values()) < seeds
    remark = (
        f" so far ({min(finished.values())} of {seeds} seeds)"
        if partial
        else " (within one std of the seeds)"
        if _close(nodes, fold, seeds)
        else ""
    )
    text = " ".join([fold.text(nodes[0]), *words, "✓" if holds else "✗"]) + remark
    return Claim(line, INCOMPLETE if partial else REPRODUCED if holds else NOT_REPRODUCED, text, sides)
