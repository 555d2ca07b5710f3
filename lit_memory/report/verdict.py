"""The verdict on a claim: the lines of ``plan.claims`` folded over the measured values, and over draws of them.

A line of ``expect`` is decided where the interval of its margin (see ``margins``) lies on one side of 0, at the
level of Holm's correction over all lines of ``expect``. A requirement and a verified property hold by the mean over
seeds. A comparison with NaN does not hold, and decides nothing. A requirement that fails bars the lines about its
arms, and all lines where it is about what no line names; a claim is refuted by any line that is not barred.
"""

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lit_memory.plan.claims import KINDS, Ref, calls, conditions, parse, refs
from lit_memory.report.fold import Fold, digits_of, in_numbers, measured, used
from lit_memory.report.margins import LEVEL, POWER, LineMargin, holm
from lit_memory.report.statistics import DRAWS, Draws, Evidence

LEAST_SEEDS, LEAST_OF_ABLATION = 5, 10
"""Seeds of a comparison that decides, and of an ablation, which an experiment's name says; fewer are exploratory."""

CLOSE, FINER = 0.02, 10
"""A line whose interval ends this near to 0, as a share of its width, is judged by so many times as many draws: what
draws leave to chance is not to decide it."""
STD_SHARE = 0.5
"""Of its level, at which a line with std is judged: by a few seeds a spread looks small just where its own error does,
so that at the whole level twice as many of such lines are wrong as should be (tests/test_statistics.py)."""

REPRODUCED, NOT_REPRODUCED = "REPRODUCED", "NOT REPRODUCED"
INCONCLUSIVE, INCOMPLETE = "INCONCLUSIVE", "INCOMPLETE"
NOT_CHECKED, COMPARISON = "NOT CHECKED", "COMPARISON"
"""Of a run that the command line changed so that it cannot answer the claims; of an experiment that has none."""
VERDICTS = (REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE, INCOMPLETE)
NO_NUMBER = "a result is not a number"
NOT_JUDGED = "NOT JUDGED"
"""Of a line of ``expect`` that a requirement bars."""
SIGNS = {REPRODUCED: "✓", NOT_REPRODUCED: "✗", INCONCLUSIVE: "?"}


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
    """Of a requirement and a property: REPRODUCED if it holds, NOT REPRODUCED if not."""
    numbers: str
    """The line with numbers in the place of references."""
    kind: str = "claim"
    """One of ``KINDS``."""
    holds: bool = False
    """By the mean over seeds, which decides no claim."""
    sides: tuple[float, ...] = ()
    """The values between the comparison signs."""
    margin: float = math.nan
    """By how much it holds: left - right in the direction of the sign, of a chain the smallest."""
    interval: tuple[float, float] | None = None
    """Of the margin; None for requirements and properties, and where there is none."""
    level: float | None = None
    """1 - confidence of the interval: the level at which Holm's correction judged the line."""
    p: float | None = None
    """Two-sided, of a margin of 0."""
    detectable: float | None = None
    """The margin that four in five experiments with these seeds and samples would have told from 0."""
    resampled: str = ""
    """What was drawn for the interval: "seeds and samples", "seeds alone", or something between."""
    reason: str = ""
    """Why it is undecided."""

    @property
    def in_words(self) -> str:
        """The line for a terminal, with its kind where it is no claim, its numbers, and the margin if it has one."""
        kind, margin = "" if self.kind == "claim" else f"{self.kind} ", f"  (margin {self.shown_margin})"
        return f"{kind}{self.line}:  {self.numbers}{margin if self.interval else ''}"

    @property
    def shown_margin(self) -> str:
        """``0.586, 98.3 % interval 0.21 to 0.96``, or the margin alone."""
        if self.interval is None or self.level is None:
            return f"{self.margin:.3g}"
        low, high = self.interval
        return f"{self.margin:.3g}, {100 * (1 - self.level):.3g} % interval {low:.3g} to {high:.3g}"


def judge(
    lines: Mapping[str, Sequence[str]], evidence: Evidence, level: float = LEVEL, draws: int = DRAWS
) -> list[Claim]:
    """The verdicts on the lines of every section, in the order of ``KINDS``.

    lines: section -> its lines. level: of all claims together.
    """
    found = {section: [measure(line, section, evidence) for line in lines.get(section, ())] for section in KINDS}
    complete = [claim for claim in found["expect"] if claim.verdict != INCOMPLETE]
    if complete:
        decided = _judged(complete, Draws(evidence, draws), level)
        if any(_close(claim) for claim in decided):
            decided = _judged(complete, Draws(evidence, FINER * draws), level)
        barred = _barred(complete, found["requires"], evidence)
        judged = iter([replace(c, verdict=NOT_JUDGED) if c.line in barred else c for c in decided])
        found["expect"] = [claim if claim.verdict == INCOMPLETE else next(judged) for claim in found["expect"]]
    return [claim for section in KINDS for claim in found[section]]


def _judged(claims: Sequence[Claim], drawn: Draws, level: float) -> list[Claim]:
    """The lines of ``expect``, each at the level of Holm's correction over all of them."""
    trees = [parse(claim.line) for claim in claims]
    margins = [Fold(drawn).line_margin(tree) for tree in trees]
    shares = [STD_SHARE if any(calls(tree, "std")) else 1.0 for tree in trees]
    adjusted = holm([min(1.0, m.p_value / share) for m, share in zip(margins, shares, strict=True)], level)
    levels = [one * share for one, share in zip(adjusted, shares, strict=True)]
    return [_decided(*parts, drawn) for parts in zip(claims, margins, levels, strict=True)]


def _close(claim: Claim) -> bool:
    """Whether other draws might decide a line otherwise."""
    low, high = claim.interval or (0.0, 0.0)
    return 0 < min(abs(low), abs(high)) < CLOSE * (high - low)


def measure(line: str, section: str, evidence: Evidence) -> Claim:
    """Whether a line holds by the mean over seeds. INCOMPLETE while one of its results lacks a seed, or if it takes the
    std of one seed."""
    kind, tree, fold = KINDS[section], parse(line), Fold(Draws(evidence, 0))
    finished = {str(ref): len(evidence.values(*fold.at(ref))) for ref in used(tree, fold)}
    if absent := [name for name, n in finished.items() if not n]:
        return Claim(line, INCOMPLETE, f"no result of {', '.join(absent)}", kind)
    if any(finished[str(ref)] < 2 for call in calls(tree, "std") for ref in refs(call)):
        return Claim(line, INCOMPLETE, "std needs at least two seeds", kind)
    sides = tuple(measured(fold.value(node)) for node in (tree.left, *tree.comparators))
    holds = not _failing(tree, fold)
    verdict = REPRODUCED if holds else NOT_REPRODUCED
    numbers = f"{in_numbers(tree, replace(fold, digits=digits_of(sides)))} {SIGNS[verdict]}"
    if (least := min(finished.values())) < evidence.seeds:
        verdict, numbers = INCOMPLETE, f"{numbers} so far ({least} of {evidence.seeds} seeds)"
    return Claim(line, verdict, numbers, kind, holds, sides, fold.margin([tree]).estimate)


def _failing(tree: ast.Compare, fold: Fold) -> list[ast.Compare]:
    """The conditions of a line that do not hold by the mean over seeds."""
    parts = [(part, fold.margin([part]).estimate) for part in conditions(tree)]
    return [part for part, gap in parts if not (gap > 0 or (gap == 0 and isinstance(part.ops[0], ast.LtE)))]


def _barred(claims: Sequence[Claim], requirements: Sequence[Claim], evidence: Evidence) -> set[str]:
    """The lines of ``claims`` that a requirement bars: one that fails bars those about its arms, of a ``min(...) >=``
    those below, and all lines where it is about an arm that no line names."""
    about = {claim.line: _arms([parse(claim.line)]) for claim in claims}
    named = frozenset[str]().union(*about.values())
    fold, bars = Fold(Draws(evidence, 0)), list[frozenset[str]]()
    for line in (need.line for need in requirements if need.verdict == NOT_REPRODUCED):
        failing = _arms(_failing(parse(line), fold))
        bars.append(failing if failing and failing <= named else named)
    return {line for line, arms in about.items() if any(arms & bar for bar in bars)}


def _arms(trees: Iterable[ast.AST]) -> frozenset[str]:
    return frozenset(ref.arm for tree in trees for ref in refs(tree))


def conclude(claims: Sequence[Claim], missing: Sequence[str], unchecked: Sequence[str] = ()) -> tuple[str, str]:
    """The verdict of a report, and its reason in a sentence; "" where the lines say it all.

    Where a property fails that holds by construction, the code is at fault, and nothing is concluded. Of the lines of
    ``expect`` those that are judged can refute. unchecked: reasons why no claim can be answered.
    """
    if missing or any(claim.verdict == INCOMPLETE for claim in claims):
        return INCOMPLETE, ""
    if unchecked:
        return NOT_CHECKED, f"The command line leaves the claim without an answer: {'; '.join(unchecked)}."
    if not claims:
        return COMPARISON, ""
    found = {kind: [c for c in claims if c.kind == kind and c.verdict != REPRODUCED] for kind in KINDS.values()}
    unknown = [replace(claim, reason=NO_NUMBER) for claim in found["property"] if math.isnan(claim.margin)]
    if unknown:
        return INCONCLUSIVE, _told(unknown, "what should hold by construction cannot be judged")
    if found["property"]:
        return INCONCLUSIVE, _told(found["property"], "what should hold by construction does not")
    if refuted := [claim for claim in found["claim"] if claim.verdict == NOT_REPRODUCED]:
        apart = [_told(found["requirement"], "a requirement about other arms fails")] * bool(found["requirement"])
        return NOT_REPRODUCED, " ".join([_told(refuted, "with confidence the opposite holds"), *apart])
    if found["requirement"]:
        return INCONCLUSIVE, _told(found["requirement"], "a requirement fails, so that the claim cannot be judged")
    if found["claim"]:
        return INCONCLUSIVE, _told(found["claim"], "undecided")
    if not any(claim.kind == "claim" for claim in claims):
        return INCONCLUSIVE, "The experiment states no claim to judge."
    return REPRODUCED, ""


def _told(claims: Sequence[Claim], what: str) -> str:
    """A sentence on some lines."""
    lines = [f"`{claim.line}`" + (f" ({claim.reason})" if claim.reason else "") for claim in claims]
    return f"{what[0].upper()}{what[1:]}: {', '.join(lines)}."


def _decided(claim: Claim, margin: LineMargin, level: float, drawn: Draws) -> Claim:
    """A claim of which all results are there, with its interval and what follows from it."""
    numbers = claim.numbers.rstrip("".join(SIGNS.values()))
    if not margin.known:
        reason = f"{NO_NUMBER}, so there is no interval" if drawn.evidence.seeds > 1 else "one seed has no interval"
        return replace(claim, verdict=INCONCLUSIVE, numbers=numbers + SIGNS[INCONCLUSIVE], reason=reason)
    tree = parse(claim.line)
    low, high = margin.interval(level)
    strict = any(isinstance(op, ast.Lt | ast.Gt) for op in tree.ops)
    verdict, reason, detectable = INCONCLUSIVE, "", margin.whole.detectable(level)
    if low == high == 0:
        reason = "both sides are equal in every draw"
        if any(calls(tree, "reach")):
            reason = "both sides carry to the end of the test, or equally far in every draw; a longer test may differ"
    elif low > 0 or (low == 0 and not strict):
        verdict = REPRODUCED
    elif high < 0 or (high == 0 and strict):
        verdict = NOT_REPRODUCED
    else:
        reason = f"{POWER:.0%} of such experiments would see a margin of {detectable:.3g}".replace("%", " %")
    return replace(
        claim,
        verdict=verdict,
        numbers=numbers + SIGNS[verdict],
        interval=(low, high),
        level=level,
        p=margin.p_value,
        detectable=detectable,
        resampled=_resampled(used(tree, Fold(drawn)), Fold(drawn)),
        reason=reason,
    )


def _resampled(results: Iterable[Ref], fold: Fold) -> str:
    """What was drawn for the interval of a line."""
    places, evidence = [fold.at(ref) for ref in results], fold.drawn.evidence
    known = [fold.drawn.table(*place) is not None for place in places]
    if all(known):
        return "seeds and samples"
    if all(scored or evidence.samples(*place) for scored, place in zip(known, places, strict=True)):
        return "seeds, with the binomial error of the samples"
    return "seeds and a part of the samples" if any(known) else "seeds alone"


def exploratory(experiment: str, seeds: int) -> str:
    """A remark on a verdict of too few seeds; "" if they suffice."""
    least = LEAST_OF_ABLATION if "ablation" in experiment else LEAST_SEEDS
    return f", exploratory ({seeds} seed{'s' * (seeds > 1)})" if seeds < least else ""
