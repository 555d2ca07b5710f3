"""Models whose weights nobody draws, for their size alone."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Undrawn(TorchFunctionMode):
    """Within it the functions of ``torch.nn.init`` leave a tensor as it is, and so does a factor; what is drawn, a unit
    matrix and a standard deviation have any numbers.

    On the device "meta" a tensor has no numbers, and yet each of them takes a millisecond: torch works out the shape of
    a normal distribution in Python. For that of a product torch imports its compiler, which takes two seconds.
    """

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == torch.nn.init.__name__:
            return kwargs["tensor"]
        if func is torch.randn:
            return torch.empty(*args, **kwargs)
        if func is torch.eye:
            return torch.empty(args[0], args[-1], **kwargs)
        if func is torch.Tensor.std:
            return 1.0
        if func is torch.Tensor.mul and args[0].is_floating_point() and not isinstance(args[1], torch.Tensor):
            return args[0]
        return func(*args, **kwargs)
