"""A stream of random tokens through every model of constant state, without gradients: what its end costs beside its
beginning. "after a million" times the same work as "beginning", and its peak memory is that of the whole stream."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.work import Settings, Timed, Work, known, placed

MODELS = ("rmt", "armt", "tarm", "mamba", "rwkv", "lmm", "mac", "mag", "mal")
VOCAB, SEGMENT, TOKENS, MILLION = 1000, 512, 2**14, 2**20
SIZES = {"vocab_size": VOCAB, "layers": 2, "width": 64, "heads": 4, "window": 64, "chunk": 16, "memory_tokens": 8}


def read(settings: Settings, tiny: bool, name: str, before: int = 0) -> Timed:
    """before: tokens that have been read when the measurement begins."""
    from lit_memory.recurrence import unroll
    from lit_memory.registry import build, load_class

    model = placed(build("model", {"name": name, **known(load_class("model", name).Config, SIZES)}), settings)
    draws = torch.Generator().manual_seed(0)

    def segments(tokens: int) -> Iterator[torch.Tensor]:
        drawn = (torch.randint(VOCAB, (1, SEGMENT), generator=draws) for _ in range(tokens // SEGMENT))
        return (placed(ids_BT, settings) for ids_BT in drawn)

    @torch.no_grad()
    def advance(state, tokens: int):
        return unroll(model, segments(tokens), state=state, keep=0).state

    tokens = 2 * SEGMENT if tiny else TOKENS
    state = advance(None, min(before, tokens) if tiny else before) if before else None
    return Timed(lambda: advance(state, tokens), tokens)


def works() -> dict[str, Work]:
    return {
        f"stream/{name}": Work(
            {"beginning": partial(read, name=name), "after a million": partial(read, name=name, before=MILLION)}
        )
        for name in MODELS
    }
