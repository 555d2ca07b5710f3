"""Titans' neural memory beside titans-pytorch's ``NeuralMemory`` (the extra ``bench``): a training step.

All map rows (4, 1024, 128) to rows with chunks of 64 tokens, two layers in the memory, one head and momentum. "memory"
is what both have: norm, projections, gates and memory; "layer" is our whole layer, with convolutions, output gate and
output projection besides. Theirs has one alpha and eta a chunk and reads the memory of the chunk before, where ours has
them for every token and reads the memory right after it; that takes about twice the arithmetic. Theirs is run with
``batch_size`` equal to the chunk, which takes the surprise at the weights of the chunk's start as ours does, and with
its default, which takes that of the whole sequence at the first weights.

"titans/matrix" is our whole layer with a memory of one layer, whose tokens may have surprises of their own (``exact``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.work import Settings, Timed, Work, need, placed

BATCH, TOKENS, WIDTH, CHUNK, DEPTH = 4, 1024, 128, 64, 2


def step(settings: Settings, tiny: bool, read: Callable[[Tensor], Tensor]) -> Timed:
    rows = placed(torch.randn(*((1, 2 * CHUNK) if tiny else (BATCH, TOKENS)), WIDTH), settings)
    return Timed(lambda: read(rows).square().mean().backward(), rows[..., 0].numel())


def layer(settings: Settings, tiny: bool, **flags: Any) -> Timed:
    from lit_memory.models.titans.memory import NeuralMemory
    from lit_memory.models.titans.models import LMM

    config = LMM.Config(**{"width": WIDTH, "chunk": CHUNK, "memory_depth": DEPTH, **flags})
    memory = placed(NeuralMemory(config), settings)

    def read(rows: Tensor) -> Tensor:
        blank = memory.first_state(device=rows.device, dtype=rows.dtype)
        M, S = (tuple(W.expand(len(rows), -1, -1, -1) for W in part) for part in (blank.M, blank.S))
        return memory(rows, type(blank)(blank.conv_BJC.expand(len(rows), -1, -1), M, S)).out_BTD

    return step(settings, tiny, read)


def memory(settings: Settings, tiny: bool, expand: int) -> Timed:
    from lit_memory.memory import neural
    from lit_memory.memory.neural_chunk import by_chunk
    from lit_memory.models.parts import unfold_heads
    from lit_memory.models.titans.memory import NeuralMemory
    from lit_memory.models.titans.models import LMM

    config = LMM.Config(width=WIDTH, chunk=CHUNK, memory_depth=DEPTH, memory_expand=expand, conv_taps=0)
    parts = placed(NeuralMemory(config), settings)

    def read(rows: Tensor) -> Tensor:
        x = parts.norm(rows)
        M = tuple(W.expand(len(rows), -1, -1) for W in parts.M)
        state = neural.NeuralState(M, tuple(torch.zeros_like(W) for W in M))
        q, k, v = parts.queries_keys_values(parts.qkv(x), rows.dtype)
        return unfold_heads(by_chunk(state, q, k, v, parts.gates(x, rows.dtype), CHUNK, normalized=True).o_XTV, 1)

    return step(settings, tiny, read)


def theirs(settings: Settings, tiny: bool, expand: int, batch_size: int | None) -> Timed:
    need("titans_pytorch")
    from titans_pytorch import NeuralMemory  # type: ignore[import-not-found]

    inner = {"depth": DEPTH, "expansion_factor": float(expand)}
    model = NeuralMemory(dim=WIDTH, chunk_size=CHUNK, batch_size=batch_size, heads=1, default_model_kwargs=inner)
    model = placed(model, settings)
    return step(settings, tiny, lambda rows: model(rows)[0])


def works() -> dict[str, Work]:
    matrix = {
        "each token its surprise (chunks of 32)": {"chunk": 32, "exact": True},
        "a surprise for 32 tokens": {"chunk": 32},
        "chunks of one token": {"chunk": 1},
    }
    ways = {name: partial(layer, memory_depth=1, **flags) for name, flags in matrix.items()}
    return {"titans/matrix": Work(ways)} | {
        f"titans/{expand * WIDTH}": Work(
            {
                "memory": partial(memory, expand=expand),
                "layer": partial(layer, memory_expand=expand),
                "titans-pytorch, same chunk": partial(theirs, expand=expand, batch_size=CHUNK),
                "titans-pytorch, default": partial(theirs, expand=expand, batch_size=None),
            }
        )
        for expand in (1, 4)
    }
