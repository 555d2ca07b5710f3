"""The language of ``expect:``, ``requires:`` and ``verify:`` lines: the paper's claim, what must hold before it can be
judged, and what holds by construction.

    line = sum (< | <= | > | >=) sum ...             one comparison; 0.2 < a[1] < 0.5 is allowed
    sum  = + - * / and unary minus over terms and parentheses
    term = number | ref | std(ref) | reach(ref, share) | abs(sum) | min(sum, sum, ...) | max(sum, sum, ...)
    ref  = arm[x] | arm.metric[x]                    mean over seeds; x is a tested number, first or last

    gamma[200] - no_gamma[200] > 0.2
    armt[50] - rmt[50] > std(armt[50]) + std(rmt[50])
    reach(armt[first], 0.9) > reach(rmt[first], 0.9)

std is the sample standard deviation over seeds (ddof = 1). reach is the multiple of the ref's x at which the mean falls
below share * ref, interpolated between tested x (linear in log x, or in x where one is 0 or less); that of the last x
where it never does. Lines are parsed by ``ast``, and every node must be one of a few; nothing
reaches ``eval``. ``report.verdict`` evaluates them. Standard library only.
"""

import ast
import difflib
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

GRAMMAR = (
    "a line holds arm[x], arm.metric[x], numbers, + - * /, abs(), min(), max(), std(arm[x]) and reach(arm[x], 0.9)"
)
MAX_LENGTH = 400
KINDS = {"expect": "claim", "requires": "requirement", "verify": "property"}
"""Section of an experiment -> what one of its lines is."""
COMPARE = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
"""Node -> its sign and what it asks."""
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
FUNCTIONS = ("abs", "min", "max")


class Ref(NamedTuple):
    """``arm[x]`` or ``arm.metric[x]``; metric None is the metric of the figure, x may be "first" or "last"."""

    arm: str
    metric: str | None
    x: float | str

    def __str__(self) -> str:
        name = f"{self.arm}.{self.metric}" if self.metric else self.arm
        return f"{name}[{self.x if isinstance(self.x, str) else format(self.x, 'g')}]"


def check_lines(
    lines: Sequence[str],
    arms: Sequence[str],
    x_values: Sequence[float],
    metrics: Collection[str] | None = None,
    section: str = "expect",
    stops: Mapping[str, int] | None = None,
) -> None:
    """Raise ValueError, in one line, for a line that no run of this plan can answer.

    metrics: the known names; None leaves them unchecked. section: one of ``KINDS``. stops: arm -> how many of the first
    x values it has, of the arms that do not have all.
    """
    for i, line in enumerate(lines):
        try:
            found, reached = refs(tree := parse(line)), [ref for call in calls(tree, "reach") for ref in refs(call)]
            for ref in found:
                _require(ref.arm, "arm", arms)
                if ref.metric and metrics is not None:
                    _require(ref.metric, "metric", metrics)
                stop = (stops or {}).get(ref.arm)
                if stop is not None and (ref.x == "last" or ref in reached):
                    raise ValueError(
                        f"{ref}: the test of {ref.arm} ends at {x_values[stop - 1]:g}; expected that number"
                    )
                if isinstance(ref.x, float):
                    _require_x(ref, ref.x, x_values[:stop])
            if not found:
                raise ValueError("the line compares no result; expected at least one arm[x]")
        except ValueError as error:
            raise ValueError(f"{section}[{i}] {line!r:.90}: {error}") from None


def untested(line: str, x_values: Sequence[float], planned: Sequence[float]) -> list[str]:
    """The references of a line to an x that is not tested.

    planned: the x values of the experiment as its file has it, in which "first" and "last" are what the line means.
    """
    ends = {"first": 0, "last": -1}
    tree, gone = parse(line), list[str]()
    for call in calls(tree, "reach") if x_values[-1] != planned[-1] else ():
        gone += [f"{ref} to {planned[-1]:g}" for ref in refs(call)]
    for ref in refs(tree):
        if isinstance(ref.x, str):
            gone += [str(ref)] * (x_values[ends[ref.x]] != planned[ends[ref.x]])
        elif ref.x not in x_values:
            gone.append(str(ref))
    return gone


def _require(name: str, kind: str, known: Collection[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"no {kind} {name!r}; {kind}s: {', '.join(known)}{hint}")


def _require_x(ref: Ref, x: float, tested: Sequence[float]) -> None:
    if x not in tested:
        nearest = min(tested, key=lambda t: abs(t - x))
        raise ValueError(f"{ref}: {x:g} is not tested; tested: {', '.join(map(str, tested))} (nearest: {nearest:g})")


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
        case ast.BinOp(op=ast.Div(), right=ast.Constant(value=0)):
            raise ValueError(f"{ast.unparse(node)!r} divides by 0")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            _allow(left)
            _allow(right)
        case ast.Call(func=ast.Name(id="std"), args=[ast.Subscript() as ref], keywords=[]):
            reference(ref)
        case ast.Call(
            func=ast.Name(id="reach"),
            args=[ast.Subscript() as ref, ast.Constant(value=int() | float() as share)],
            keywords=[],
        ):
            reference(ref)
            if share <= 0:
                raise ValueError(f"{ast.unparse(node)!r}: expected a share above 0")
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS and (
            len(args) == 1 if name == "abs" else len(args) > 1
        ):
            for arg in args:
                _allow(arg)
        case ast.Subscript():
            reference(node)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not allowed; {GRAMMAR}")


def reference(node: ast.Subscript) -> Ref:
    """The reference that a subscript is. Raises ValueError for another subscript."""
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


def refs(tree: ast.AST) -> list[Ref]:
    """The references of a line, or of a part of it, from left to right."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    return [reference(node) for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset))]


def conditions(tree: ast.Compare) -> list[ast.Compare]:
    """The comparisons of which a line says that all hold: every link of a chain, and of min(a, b) >= c and max(a, b) <=
    c one for each term."""
    found = []
    for low, sign, high in _links(tree):
        found += [ast.Compare(a, [sign], [b]) for a in _terms(low, "max") for b in _terms(high, "min")]
    return found


def alternatives(tree: ast.Compare) -> list[list[ast.Compare]]:
    """The sets of comparisons of which a line says that one holds, in all its parts: of max(a, b) >= c and min(a, b) <=
    c one for each term."""
    ways = []
    for low, sign, high in _links(tree):
        ways.append([ast.Compare(a, [sign], [b]) for a in _terms(low, "min") for b in _terms(high, "max")])
    return [list(way) for way in itertools.product(*ways)]


def _links(tree: ast.Compare) -> Iterator[tuple[ast.expr, ast.cmpop, ast.expr]]:
    """The links of a chain: the side that is to be lower, < or <=, and the other."""
    for op, (left, right) in zip(tree.ops, itertools.pairwise((tree.left, *tree.comparators)), strict=True):
        sign = ast.Lt() if isinstance(op, ast.Lt | ast.Gt) else ast.LtE()
        yield (left, sign, right) if isinstance(op, ast.Lt | ast.LtE) else (right, sign, left)


def _terms(node: ast.expr, name: str) -> list[ast.expr]:
    """The sums of which a sum is the min or the max (``name``): one for each term of that function, and of the other
    where a sign turns it. What is divided by a result, or multiplied with one, or within abs, stays as it is."""
    other = "max" if name == "min" else "min"
    match node:
        case ast.Call(func=ast.Name(id="min" | "max" as called), args=args):
            parts = [_terms(arg, name) for arg in args]
            if called == name:
                return list(itertools.chain(*parts))
            return [ast.Call(node.func, list(terms), []) for terms in itertools.product(*parts)]
        case ast.UnaryOp(op=sign, operand=operand):
            return [ast.UnaryOp(sign, term) for term in _terms(operand, other)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            rights = _terms(right, other if isinstance(op, ast.Sub) else name)
            return [ast.BinOp(a, op, b) for a in _terms(left, name) for b in rights]
        case ast.BinOp(left=ast.Constant() as factor, op=ast.Mult() as op, right=right):
            return [ast.BinOp(factor, op, term) for term in _terms(right, name)]
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as op, right=ast.Constant() as factor):
            return [ast.BinOp(term, op, factor) for term in _terms(left, name)]
    return [node]


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """The calls of one function in a line, or in a part of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node
