"""Who sees or changes the calls of a model's modules, so that they cannot be left out or done together."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def autocasts(module: nn.Module) -> bool:
    """Whether autocast is on where the module is. On device "meta" there is none."""
    device = next(module.parameters()).device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def hooked(module: nn.Module) -> bool:
    """Whether somebody wants to know when a module is called."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in hooks)


@contextmanager
def no_graph(detached: bool) -> Iterator[None]:
    """Calls have no graph, where ``detached``. Torch 2.9 would keep the casts of weights that autocast makes in them,
    which have no history, for calls that train these weights."""
    if not (detached and torch.is_grad_enabled()):
        yield
        return
    with torch.no_grad():
        yield
    torch.clear_autocast_cache()
