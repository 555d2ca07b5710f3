"""Backward passes by hand in the precision of their forward passes."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def outside_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of the ``backward(ctx, *grads)`` of a node whose forward pass is outside of autocast: so is it, where
    somebody calls ``loss.backward()`` inside."""

    @wraps(backward)
    def found(ctx: Any, *grads: Any) -> Any:
        device = next((grad.device.type for grad in grads if grad is not None), "meta")
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return backward(ctx, *grads)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return found
