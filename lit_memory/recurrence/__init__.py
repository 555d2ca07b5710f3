"""The protocol of segment-recurrent models, their states, and the only loops over segments.

This package is the one door: import from ``lit_memory.recurrence``, not from its files.
"""

from lit_memory.recurrence.calls import hooked
from lit_memory.recurrence.generate import (
    Position,
    Prompts,
    generate,
    pack,
    read_on,
    read_prompts,
    reorder,
    sample_token,
)
from lit_memory.recurrence.layer_major import LayerMajor
from lit_memory.recurrence.looking import looks
from lit_memory.recurrence.loss import LossHead, cross_entropy, logits_loss, rows_at_once, weighted_cross_entropy
from lit_memory.recurrence.protocol import (
    Compiled,
    Diagnosed,
    Divisible,
    Grouped,
    GrowingState,
    Incremental,
    LayerRecurrent,
    Look,
    NoWeightDecay,
    SegmentRecurrent,
    SeparateWrite,
    SeveralLosses,
    SharedRead,
    Visible,
)
from lit_memory.recurrence.reading import Rereading, reader
from lit_memory.recurrence.replay import ReplayedLoss, can_record
from lit_memory.recurrence.segment import advance, as_segment, select_samples
from lit_memory.recurrence.state import (
    State,
    append_samples,
    at_least_single,
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
    "Divisible",
    "Grouped",
    "GrowingState",
    "Incremental",
    "LayerMajor",
    "LayerRecurrent",
    "Look",
    "LossHead",
    "NoWeightDecay",
    "Position",
    "Prompts",
    "ReplayedLoss",
    "Rereading",
    "SegmentRecurrent",
    "SeparateWrite",
    "SeveralLosses",
    "SharedRead",
    "State",
    "Unrolled",
    "Visible",
    "advance",
    "append_samples",
    "as_segment",
    "at_least_single",
    "batch_size",
    "can_record",
    "cross_entropy",
    "detach",
    "expand_state",
    "full_precision",
    "generate",
    "hooked",
    "logits_loss",
    "looks",
    "map_state",
    "pack",
    "read_on",
    "read_prompts",
    "reader",
    "reorder",
    "rows_at_once",
    "sample_token",
    "segment_lengths",
    "select_samples",
    "select_state",
    "state_options",
    "state_tensors",
    "unroll",
    "weighted_cross_entropy",
]
