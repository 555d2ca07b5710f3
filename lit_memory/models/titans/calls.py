"""What the memories of Titans' layers did in one reading: their gates, and diagnostics of them.

A layer returns rows and a state, but no gates: hooks keep the outputs of its memory.

Shape suffixes: B batch, T tokens, H heads of the memory, X samples times heads, N rows of all heads and calls.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lit_memory.models.titans.memory import MemoryOutput


class MemoryCall(NamedTuple):
    """One segment that a memory has read: its mask (B, T), and the memory's output."""

    mask_BT: Tensor | None
    output: MemoryOutput


@contextlib.contextmanager
def recorded(layers: Iterable[Any]) -> Iterator[list[list[MemoryCall]]]:
    """The calls of the memory of every layer within the block."""
    calls: list[list[MemoryCall]] = []
    hooks: list[RemovableHandle] = []
    for layer in layers:
        calls.append([])
        hooks += record_calls(layer, calls[-1])
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def real_gates(calls: list[MemoryCall], batch: int) -> dict[str, Tensor]:
    """alpha, eta and theta (B, N) of all rows of all heads of one memory; NaN where a row is padding."""
    found: dict[str, list[Tensor]] = {"alpha": [], "eta": [], "theta": []}
    for mask_BT, output in calls:
        values = 1 - output.gates.log_keep_XT.exp(), output.gates.log_eta_XT.exp(), output.gates.theta_XT
        for name, value_XT in zip(found, values, strict=True):
            value_BHT = value_XT.unflatten(0, (batch, -1))
            if mask_BT is not None:
                value_BHT = value_BHT.masked_fill(~mask_BT.unsqueeze(1), math.nan)
            found[name].append(value_BHT.flatten(1))
    return {name: torch.cat(values, dim=1) for name, values in found.items()}


def record_calls(layer: Any, calls: list[MemoryCall]) -> list[RemovableHandle]:
    """Hooks that append to ``calls`` every call of a layer's memory, but for the persistent tokens of a first state."""
    pending: list[MemoryCall] = []

    def record(_: Any, args: tuple, output: MemoryOutput) -> None:
        pending.append(MemoryCall(args[2] if len(args) > 2 else None, output))

    return [
        layer.register_forward_pre_hook(lambda *_: pending.clear()),
        layer.memory.register_forward_hook(record),
        layer.register_forward_hook(lambda *_: calls.extend(pending)),
    ]


def memory_diagnostics(calls: list[MemoryCall]) -> dict[str, Tensor]:
    """``Titans.diagnostics`` of one memory, from its calls in order."""
    outs, last, real = [call.output for call in calls], calls[-1].output.state, []
    for mask_BT, out in calls:
        all_XT = torch.ones_like(out.gates.theta_XT, dtype=torch.bool)
        real.append(all_XT if mask_BT is None else mask_BT.repeat_interleave(len(all_XT) // len(mask_BT), dim=0))

    def real_ones(parts: Any) -> Tensor:
        return torch.cat([part_XT[real_XT] for part_XT, real_XT in zip(parts, real, strict=True)])

    def norm(weights: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([W.flatten(1).square().sum(1) for W in weights]).sum(0).sqrt().mean()

    log_keep, log_eta, theta = map(real_ones, zip(*(out.gates for out in outs), strict=True))
    scales = [out.scale_XT1.squeeze(-1) for out in outs if out.scale_XT1 is not None]
    return {
        "M_norm": norm(last.M),
        "S_norm": norm(last.S) if last.S else theta.new_zeros(()),
        "alpha": 1 - log_keep.exp().mean(),
        "eta": log_eta.exp().mean(),
        "theta": theta.mean(),
        "clipped": (real_ones(scales) < 1).to(theta.dtype).mean() if scales else theta.new_zeros(()),
    }
