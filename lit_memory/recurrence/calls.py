"""Who sees or changes the calls of a model's modules, so that they cannot be left out or done together."""

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
