"""The protocol of segment-recurrent models, their states, and the only loops over segments.

This package is the one door: import from ``lit_memory.recurrence``, not from its files.
"""

from lit_memory.recurrence.generate import Prompts, generate, pack, sample_token
from lit_memory.recurrence.looking import looks
from lit_memory.recurrence.loss import LossHead, cross_entropy, logits_per_token
from lit_memory.recurrence.protocol import (
    Compiled,
    Diagnosed,
    GrowingState,
    LayerMajor,
    LayerRecurrent,
    Look,
    NoWeightDecay,
    SegmentRecurrent,
    SeparateWrite,
    SeveralLosses,
    SharedRead,
    Visible,
)
from lit_memory.recurrence.state import (
    State,
    append_samples,
    batch_size,
    detach,
    full_precision,
    map_state,
    select_state,
    state_options,
    state_tensors,
)
from lit_memory.recurrence.unroll import Unrolled, expand_state, segment_lengths, unroll

__all__ = [
    "Compiled",
    "Diagnosed",
    "GrowingState",
    "LayerMajor",
    "LayerRecurrent",
    "Look",
    "LossHead",
    "NoWeightDecay",
    "Prompts",
    "SegmentRecurrent",
    "SeparateWrite",
    "SeveralLosses",
    "SharedRead",
    "State",
    "Unrolled",
    "Visible",
    "append_samples",
    "batch_size",
    "cross_entropy",
    "detach",
    "expand_state",
    "full_precision",
    "generate",
    "logits_per_token",
    "looks",
    "map_state",
    "pack",
    "sample_token",
    "segment_lengths",
    "select_state",
    "state_options",
    "state_tensors",
    "unroll",
]
