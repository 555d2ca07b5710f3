"""Models whose weights nobody draws, for their size alone."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Undrawn(TorchFunctionMode):
    """Within it the functions of ``torch.nn.init`` leave a tensor as it is.

    On the device "meta" a tensor has no numbers, and yet each of them takes a millisecond: torch works out the shape of
    a normal distribution in Python.
    """

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drawn = getattr(func, "__module__", "") == torch.nn.init.__name__
        return kwargs["tensor"] if drawn else func(*args, **kwargs)
