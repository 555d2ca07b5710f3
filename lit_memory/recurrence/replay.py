"""Segments on a GPU, without gradients, by replay: the kernels of one segment are recorded as a CUDA graph, which is
launched again for every further segment of that shape.

A segment of a small model is some hundred kernels of a few microseconds each, and a CPU takes longer to launch them
than a GPU to run them. A whole graph is launched at once: a segment of 512 tokens and four layers of ARMT takes 1.4 ms
in place of 6 to 11 (H200; 8 samples as 1), and a recording some 25 ms.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_memory.recurrence.protocol import SegmentRecurrent, hooked
from lit_memory.recurrence.segment import Segment, read_segment
from lit_memory.recurrence.state import State, map_state, state_tensors

FIRST = 3
"""Segments of a shape that are read as they are, before the next one is recorded: kernels are chosen and tables filled
then, which must not be part of a recording."""
WORTH = 16
"""Segments below which a recording costs more than its replays save."""


def replays(model: SegmentRecurrent) -> bool:
    """Whether segments can be recorded now: on a GPU, without gradients, where nobody else has to see the calls."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    if not on_gpu or model.looks_at_numbers or torch.is_grad_enabled():
        return False
    return not any(hooked(part) for part in model.modules())


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """The kernels that ``work`` launches, ready to be launched; they have not run yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


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
        if self.count <= FIRST:
            return read_segment(self.model, state, segment, wanted)
        if self.recording is None:
            self.recording = Recording(self.model, state, segment, wanted)
        return self.recording(state, segment)
