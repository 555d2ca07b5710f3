"""Replay on a GPU: kernels are recorded as a CUDA graph, and launched again at once. Those of one segment, without
gradients, for every further segment of its shape (``Replay``); those of a training step, with its backward pass, for
every further batch of its shape (``ReplayedLoss``).

A segment of a small model is some hundred kernels of a few microseconds each, and a CPU takes longer to launch them
than a GPU to run them. A whole graph is launched at once: a segment of 512 tokens and four layers of ARMT takes 1.4 ms
in place of 6 to 11 (H200; 8 samples as 1), and a recording some 25 ms.

Shape suffixes: B batch, T tokens, D width.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_memory.recurrence.calls import hooked
from lit_memory.recurrence.protocol import SegmentRecurrent
from lit_memory.recurrence.segment import Segment, read_segment
from lit_memory.recurrence.state import State, map_state, state_tensors
from lit_memory.util.checks import first_line

FIRST = 3
"""Segments of a shape that are read as they are, before the next one is recorded: kernels are chosen and tables filled
then, which must not be part of a recording."""
SHAPES = 128
"""Shapes of training batches whose recordings are kept."""
WORTH = 16
"""Segments below which a recording costs more than its replays save."""


def replays(model: SegmentRecurrent) -> bool:
    """Whether segments can be recorded now: on a GPU, without gradients, where nobody else has to see the calls."""
    if not can_record(next(model.parameters())) or model.looks_at_numbers or torch.is_grad_enabled():
        return False
    return not any(hooked(part) for part in model.modules())


def can_record(tensor: Tensor) -> bool:
    """Whether kernels that work on a tensor can be recorded, where nobody records or compiles this call itself."""
    return tensor.is_cuda and not (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing())


def recorded(work: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """The kernels that ``work`` launches, ready to be launched; they have not run yet.

    They are recorded on the current stream; in place of the default one, which cannot be recorded, on one of torch's.
    pool: memory that recordings share of which one runs at a time.
    """
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream = None if current == torch.cuda.default_stream() else current
    recording = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")  # other threads may pin memory
    with torch.cuda.stream(current), recording:  # torch leaves the stream of a recording that fails as the current one
        work()
    return graph.replay


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Compute on another stream, after what was asked for before and before what will be; None: on the current one."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def memory_pool() -> Any:
    """A new ``pool``."""
    return torch.cuda.graph_pool_handle()


class Recording:
    """``read_segment`` for one shape. Its tensors stay where they are; the state is overwritten by the next segment."""

    def __init__(self, model: SegmentRecurrent, state: State, segment: Segment, wanted: bool) -> None:
        self.state = map_state(torch.clone, state)
        mask_BT = None if segment.mask_BT is None else segment.mask_BT.clone()
        self.segment = Segment(segment.ids_BT.clone(), mask_BT)
        self.hidden_BTD: Tensor | None = None

        def work() -> None:
            self.hidden_BTD, new = read_segment(model, self.state, self.segment, wanted)
            new = map_state(torch.clone, new)  # some of it may be a view of the state that is overwritten
            map_state(Tensor.copy_, self.state, new)

        self.replay = recorded(work)

    def __call__(self, state: State, segment: Segment) -> tuple[Tensor | None, State]:
        if state is not self.state:
            map_state(Tensor.copy_, self.state, state)
        for kept, given in zip(self.segment, segment, strict=True):
            if kept is not None and given is not None:
                kept.copy_(given)
        self.replay()
        return None if self.hidden_BTD is None else self.hidden_BTD.clone(), self.state


class Replay:
    """``read_segment`` of one sequence, by replay from the fourth segment of a shape on."""

    def __init__(self, model: SegmentRecurrent) -> None:
        self.model, self.shape, self.count = model, None, 0
        self.recording: Recording | None = None

    def __call__(self, state: State, segment: Segment, wanted: bool) -> tuple[Tensor | None, State]:
        tensors = *state_tensors(state), *(t for t in segment if t is not None)
        shape = wanted, [(t.shape, t.dtype) for t in tensors]
        if shape != self.shape:
            self.shape, self.count, self.recording = shape, 0, None
        self.count += 1
        if self.count > FIRST and self.recording is None and not self.model.looks_at_numbers:
            try:
                self.recording = Recording(self.model, state, segment, wanted)
            except RuntimeError as error:  # of torch: a model that somebody else wrote waits for a number
                self.model.looks_at_numbers = True
                reason = f"a segment of {type(self.model).__name__} cannot be recorded ({first_line(error)})"
                warnings.warn(f"{reason}; all are read as they are, as with looks_at_numbers = True", stacklevel=2)
        if self.recording is None:
            return read_segment(self.model, state, segment, wanted)
        return self.recording(state, segment)


class LossRecording:
    """A loss of inputs of one shape, and its gradients. Its tensors stay where they are."""

    def __init__(self, loss: Callable[[State], Tensor], inputs: State, weights: Sequence[Tensor], pool: Any) -> None:
        self.inputs = map_state(torch.clone, inputs)
        self.loss, self.grads = torch.empty(()), ()

        def work() -> None:
            found = loss(self.inputs)
            self.grads = torch.autograd.grad(found, weights, allow_unused=True)
            self.loss = found.detach()

        self.replay = recorded(work, pool)


class OfRecording(torch.autograd.Function):
    """The loss of a ``LossRecording`` as a node of the graph; its gradients are there until the next replay."""

    @staticmethod
    def forward(ctx: Any, recording: LossRecording, *weights: Tensor) -> Tensor:
        recording.replay()
        ctx.grads = recording.grads
        return recording.loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if grad is None else grad * dloss for grad in ctx.grads)


class ReplayedLoss:
    """Losses of ``weights`` by replay, from the fourth batch of a shape on, for the last ``SHAPES`` shapes.

    On a GPU all are on one stream of their own: as long as somebody holds the last loss, gradients of a weight are
    summed on the stream of that loss, and a recording cannot wait for another stream.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.stream = torch.cuda.Stream() if weights[0].is_cuda else None
        self.counts: dict[Any, int] = {}
        self.recordings: dict[Any, LossRecording] = {}
        self.pool: Any = None

    def __call__(self, loss: Callable[[State], Tensor], inputs: State, kind: Any) -> Tensor:
        """``loss(inputs)``, to be followed by its backward pass before the next call.

        inputs: a pytree of tensors, all that differs between batches of one shape. kind: hashable, what else the
        computation depends on.
        """
        shapes = tuple((t.shape, t.dtype) for t in state_tensors(inputs))
        key = kind, shapes, tuple(weight.data_ptr() for weight in self.weights)  # they may be moved
        count = self.counts[key] = self.counts.get(key, 0) + 1
        with on_stream(self.stream):
            if count <= FIRST:
                return loss(inputs)
            return OfRecording.apply(self.recording(key, loss, inputs), *self.weights)  # type: ignore[no-any-return]

    def recording(self, key: Any, loss: Callable[[State], Tensor], inputs: State) -> LossRecording:
        """The recording for these shapes, new or with these inputs."""
        if key in self.recordings:
            recording = self.recordings[key]
            map_state(Tensor.copy_, recording.inputs, inputs)
            return recording
        if len(self.recordings) == SHAPES:
            self.recordings.pop(next(iter(self.recordings)))
        self.pool = self.pool or memory_pool()
        try:
            recording = LossRecording(loss, inputs, self.weights, self.pool)
        except RuntimeError as error:
            reason = f"a training step cannot be recorded ({first_line(error)})"
            raise RuntimeError(f"replay: {reason}; expected false for this model") from error
        self.recordings[key] = recording
        return recording
