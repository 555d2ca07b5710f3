"""Whether modules are those that a model was built with, where their weights are read and they are not called: in the
backward passes by hand, and where a part of a weight is enough."""

from collections.abc import Iterable

from torch import nn

from lit_memory.recurrence import hooked

PLAIN = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Conv1d)
"""Modules whose weights say all; what derives from them may compute something else."""


def modules_of(block: nn.Module) -> list[nn.Module]:
    """The modules with weights of a block: norm1, qkv, out, norm2, up, down (and gate)."""
    names = ("norm1", "attention.qkv", "attention.out", "norm2", "up", "down")
    gate = getattr(block, "gate", None)
    return [*(block.get_submodule(name) for name in names), *([] if gate is None else [gate])]


def replaced(modules: Iterable[nn.Module]) -> str | None:
    """Why modules have no backward pass by hand: another library has put its own in their place (``peft``, for example,
    adds low-rank matrices to what a layer computes). None if they have one."""
    others = [type(module).__name__ for module in modules if type(module) not in PLAIN]
    return f"{others[0]} is none of its own layers" if others else None


def is_plain(module: nn.Module) -> bool:
    """Whether a module computes what its weights say, and nobody waits for its calls."""
    return type(module) in PLAIN and not hooked(module)
