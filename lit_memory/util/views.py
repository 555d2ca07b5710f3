"""The registry of views, figures of what a memory does: ``lit`` measures them, ``report`` draws them, a plan asks for
them. Code is named as text and imported when it is needed.
"""

from typing import NamedTuple


class View(NamedTuple):
    """A figure of what a memory does (``report.memory``). Models and tasks name those that they allow (``visible``)."""

    measured: str
    """What measures it on the longest test."""
    drawn: str
    """What draws it, from these numbers alone."""
    words: str
    """What it shows, in a sentence."""
    unknown: str = "the weights are gone"
    """Why it may not be known of a finished run."""
    weights: bool = True
    """Whether it needs the trained weights."""
    every_seed: bool = True
    """Without: the first seed stands for all."""


VIEWED = 8
"""Samples of the test that a view shows, or averages over."""
VIEWS = {
    "norm": View(
        "lit_memory.lit.views:Norm",
        "lit_memory.report.views:norm",
        f"Norm of the memory along the context, mean of {VIEWED} test contexts",
    ),
    "overlap": View(
        "lit_memory.lit.views:Overlap",
        "lit_memory.report.views:overlap",
        f"Cosine of the keys phi(k) of a segment with all keys before it, mean of {VIEWED} test contexts",
    ),
    "gates": View(
        "lit_memory.lit.views:Gates",
        "lit_memory.report.views:gates",
        f"Gates of what is written along the context, mean of {VIEWED} test contexts",
    ),
    "map": View(
        "lit_memory.lit.views:Map",
        "lit_memory.report.maps:matrices",
        "The associative matrix A of the last layer after one test context: features of keys by channels of values",
        every_seed=False,
    ),
    "hops": View(
        "lit_memory.lit.views:Hops",
        "lit_memory.report.maps:hops",
        f"The line that every hop retrieves, in {VIEWED} test contexts",
        every_seed=False,
    ),
    "depth": View(
        "lit_memory.lit.views:Depth",
        "lit_memory.report.views:depth",
        "Answers by the depth of the fact in the longest context of the test",
        "the samples do not tell where the fact lies, or have no scores of their own",
        weights=False,
    ),
}
"""Name of a view -> where it is measured and drawn."""
