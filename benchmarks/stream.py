"""A stream of random tokens through every model of constant state, without gradients: what its end costs beside its
beginning, and small batches of short segments a group ahead beside one by one. "after a million" measures the same work
as "beginning": neither its time nor its peak has the million tokens before it."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.work import Settings, Timed, Work, known, placed

MODELS = ("rmt", "armt", "tarm", "mamba", "rwkv", "lmm", "mac", "mag", "mal")
VOCAB, SEGMENT, TOKENS, MILLION = 1000, 512, 2**14, 2**20
SIZES = {"vocab_size": VOCAB, "layers": 2, "width": 64, "heads": 4, "window": 64, "chunk": 16, "memory_tokens": 8}


def read(
    settings: Settings,
    tiny: bool,
    name: str,
    before: int = 0,
    samples: int = 1,
    segment: int = SEGMENT,
    schedule: str = "auto",
) -> Timed:
    """before: tokens of a sample that have been read when the measurement begins. schedule: of ``unroll``."""
    from lit_memory.recurrence import unroll
    from lit_memory.registry import build, load_class

    model = placed(build("model", {"name": name, **known(load_class("model", name).Config, SIZES)}), settings)
    model.requires_grad_(False)  # torch's counter of operations fails on parameters that modules get without gradients
    draws = torch.Generator().manual_seed(0)

    def segments(tokens: int) -> Iterator[torch.Tensor]:
        drawn = (torch.randint(VOCAB, (samples, segment), generator=draws) for _ in range(tokens // segment))
        return (placed(ids_BT, settings) for ids_BT in drawn)

    @torch.no_grad()
    def advance(state, tokens: int):
        return unroll(model, segments(tokens), state=state, keep=0, schedule=schedule).state

    tokens = 2 * segment if tiny else TOKENS // samples
    state = advance(None, min(before, tokens) if tiny else before) if before else None
    return Timed(lambda: advance(state, tokens), samples * tokens)


def works() -> dict[str, Work]:
    ends = {
        f"stream/{name}": Work(
            {"beginning": partial(read, name=name), "after a million": partial(read, name=name, before=MILLION)}
        )
        for name in MODELS
    }
    small = {name: partial(read, name=name, samples=4, segment=64) for name in MODELS}
    return ends | {
        f"ahead/{name}": Work({"a group ahead": way, "one by one": partial(way, schedule="sequential")})
        for name, way in small.items()
    }
