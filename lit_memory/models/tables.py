"""Tables that depend on sizes alone, such as the cosines of positions: each is computed once."""

from collections.abc import Callable
from functools import lru_cache, partial, update_wrapper
from typing import Generic, ParamSpec, TypeVar

import torch
from torch._guards import detect_fake_mode

P = ParamSpec("P")
R = TypeVar("R")


class Kept(Generic[P, R]):
    """A function that makes tensors of its arguments, whose last ``maxsize`` results are kept.

    One that is first made during validation must serve training as well, so that none is an inference tensor. And while
    torch traces with tensors that have no values (``torch.export``), none is kept, nor taken from those that are.
    """

    def __init__(self, make: Callable[P, R], maxsize: int) -> None:
        update_wrapper(self, make)
        self.make = torch.inference_mode(False)(make)
        self.kept = lru_cache(maxsize)(self.make)
        self.cache_clear = self.kept.cache_clear

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or detect_fake_mode() is not None:
            return self.make(*args, **kwargs)
        return self.kept(*args, **kwargs)  # type: ignore[arg-type]


def table(maxsize: int) -> Callable[[Callable[P, R]], Kept[P, R]]:
    """Decorator that makes ``Kept`` of a function."""
    return partial(Kept, maxsize=maxsize)
