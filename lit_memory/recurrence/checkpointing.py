"""Segment checkpointing: keep the states at the boundaries of groups of segments, and compute a group again on the way
back.

``torch.utils.checkpoint`` frees what is saved by ``save_for_backward`` alone; a node that keeps lists of its own (the
layer-major schedule) would hold them all. Here the first pass has no graph at all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_memory.recurrence.protocol import SegmentRecurrent
from lit_memory.recurrence.state import State, detach, map_state, state_tensors

Run = Callable[[State], tuple[list[Tensor], State]]


def checkpointed(model: SegmentRecurrent, run: Run, state: State) -> tuple[list[Tensor], State]:
    """``run(state)``, hidden states of some segments and the state after them, in the memory of its results.

    run: reads segments with ``model``, and no other parameters.
    """
    if not torch.is_grad_enabled():
        return run(state)
    shape: list[State] = []
    parts = list(state_tensors(state))

    def flat(*tensors: Tensor) -> list[Tensor]:
        hidden, new = run(rebuilt(state, iter(tensors)))
        shape[:] = [detach(new)]
        return [*hidden, *state_tensors(new)]

    parameters = [p for p in model.parameters() if p.requires_grad]
    results = Checkpoint.apply(flat, len(parts), *parts, *parameters)
    count = len(results) - len(list(state_tensors(shape[0])))
    return list(results[:count]), rebuilt(shape.pop(), iter(results[count:]))


def rebuilt(state: State, tensors: Iterator[Tensor]) -> State:
    """A state of the structure of ``state``."""
    return map_state(lambda _: next(tensors), state)


@contextmanager
def as_before(device: torch.device, rng: list[Tensor], autocast: tuple[bool, torch.dtype]):
    """The random numbers and the precision of the first pass."""
    generators = generators_of(device)
    now = [generator.get_state() for generator in generators]
    try:
        for generator, state in zip(generators, rng, strict=True):
            generator.set_state(state)
        with torch.autocast(device.type, dtype=autocast[1], enabled=autocast[0]):
            yield
    finally:
        for generator, state in zip(generators, now, strict=True):
            generator.set_state(state)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """What dropout draws from."""
    cuda = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *cuda]


class Checkpoint(torch.autograd.Function):
    """``run(*states)`` without a graph, and with one in the backward pass."""

    @staticmethod
    def forward(ctx, run: Callable[..., list[Tensor]], count: int, *tensors: Tensor):
        device = tensors[0].device
        ctx.run, ctx.count = run, count
        ctx.rng = [generator.get_state() for generator in generators_of(device)]
        ctx.autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        ctx.save_for_backward(*tensors)
        results = tuple(
            result.clone() if any(result is t for t in tensors) else result for result in run(*tensors[:count])
        )
        torch.clear_autocast_cache()  # torch 2.9 would keep casts of the weights that have no history
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        states, parameters = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        states = [t.detach().requires_grad_(t.is_floating_point()) for t in states]
        with torch.enable_grad(), as_before(states[0].device, ctx.rng, ctx.autocast):
            results = ctx.run(*states)
        pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if result.requires_grad]
        if not pairs:  # a state that is detached, as Transformer-XL's
            return None, None, *(None for _ in (*states, *parameters))
        wanted = [t for t in (*states, *parameters) if t.requires_grad]
        outputs, inner = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, inner, allow_unused=True))
        return None, None, *(next(found) if t.requires_grad else None for t in (*states, *parameters))
