"""The cache of our models in the hands of transformers: what they have read so far."""

from typing import Any

from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from lit_memory.recurrence import Position

CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"
"""What transformers calls the cache in outputs and in ``generate``: the second before 5.24."""


class SegmentCache(Cache):
    """The ``cache`` of our models: the memory, and what is kept of the open segment.

    position: how far the samples have been read; None: nothing yet. seen: columns that were read, padding included.
    """

    def __init__(self, position: Position | None = None, seen: int = 0) -> None:
        super().__init__(layers=[])
        self.position, self.seen = position, seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        """With a layer that is not linear, ``generate`` leaves out the columns of a prompt that the cache has seen."""
        return [False]

    @property
    def is_croppable(self) -> bool:
        return False

    def reset(self) -> None:
        self.position, self.seen = None, 0

    def crop(self, *_: Any) -> None:
        raise NotImplementedError("a memory does not forget single tokens: keep a copy of the cache from before them")


def the_cache(cache: Any, past_key_values: Any, use_cache: bool | None) -> Any:
    """The cache under either of its names, or a new one if ``use_cache``. Raises TypeError for two."""
    if cache is not None and past_key_values is not None:
        raise TypeError(f"cache and past_key_values are two names of the same: give {CACHE}")
    given = past_key_values if cache is None else cache
    return SegmentCache() if given is None and use_cache else given
