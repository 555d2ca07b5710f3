"""States of segment-recurrent models: pytrees of tensors, and what can be done with any of them.

A state is a tensor or a (named) tuple of states. Every tensor has the samples as its first dimension.

Shape suffixes: B samples.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

State = Any  # a tensor, or a (named) tuple of States


def map_state(fn: Callable[..., Tensor], state: State, *others: State) -> State:
    """Apply ``fn`` to every tensor of a state, and to the tensors at the same position in ``others``."""
    if isinstance(state, Tensor):
        return fn(state, *others)
    items = [map_state(fn, *parts) for parts in zip(state, *others, strict=True)]
    return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)


def state_tensors(state: State) -> Iterator[Tensor]:
    """All tensors of a state, in order. Raises TypeError for what is no state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from state_tensors(part)
    else:
        raise TypeError(f"a state has a {type(state).__name__}; expected tensors in (named) tuples, samples first")


def batch_size(state: State) -> int:
    """Number of samples in a state."""
    return len(next(state_tensors(state)))


def detach(state: State) -> State:
    """The same values without their graph."""
    return map_state(Tensor.detach, state)


def select_state(live_B: Tensor, new: State, old: State) -> State:
    """State ``new`` for the samples that are live, ``old`` for the others. Both have the same shapes."""
    return map_state(lambda a, b: torch.where(live_B.view(-1, *[1] * (a.dim() - 1)), a, b), new, old)


def append_samples(state: State, others: State) -> State:
    """The samples of ``state``, then those of ``others``, in the precision of ``state``."""
    return map_state(lambda a, b: torch.cat([a, b.to(a.dtype)]), state, others)


def state_options(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """``device`` and ``dtype`` of new state tensors. Defaults: those of the parameters, but never below fp32."""
    weight = next(module.parameters())
    return {"device": device or weight.device, "dtype": dtype or torch.promote_types(weight.dtype, torch.float32)}


def at_least_single(x: Tensor) -> Tensor:
    """``x`` in single precision where it has less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def full_precision(device: torch.device) -> AbstractContextManager:
    """A context without autocast, for computations in the precision of a state.

    Device "meta", on which sizes are counted, has no autocast to switch off.
    """
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()
