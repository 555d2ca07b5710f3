"""The protocol of segment-recurrent models, their states, and the only loops over segments."""

from lit_memory.recurrence.unroll import (
    LayerRecurrent,
    Prompts,
    SegmentRecurrent,
    State,
    Unrolled,
    choose,
    detach,
    full_precision,
    generate,
    map_state,
    pack,
    segment_lengths,
    state_tensors,
    unroll,
)

__all__ = [
    "LayerRecurrent",
    "Prompts",
    "SegmentRecurrent",
    "State",
    "Unrolled",
    "choose",
    "detach",
    "full_precision",
    "generate",
    "map_state",
    "pack",
    "segment_lengths",
    "state_tensors",
    "unroll",
]
