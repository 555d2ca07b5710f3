"""ARMT on associative retrieval: training step and forward pass beside the published code, and the schedules of ours.

``$ARMT_REFERENCE`` names the published file ``modeling_amt/language_modeling.py`` of the repository
RodkinIvan/associative-recurrent-memory-transformer (commit aa145de).
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.work import Settings, Timed, Way, Work, need, need_file, placed

VOCAB, SEGMENT = 19, 3
SIZES: dict[str, Any] = {"layers": 4, "width": 128, "heads": 4, "memory_tokens": 4, "memory_dim": 32}


def reads(tiny: bool) -> Tensor:
    """Rows of 50 writes and a question, in segments of 3 tokens."""
    return torch.randint(VOCAB, (2 if tiny else 64, SEGMENT * (4 if tiny else 51)))


def timed(logits: Callable[[Tensor], Tensor], model: nn.Module, ids: Tensor, backward: bool) -> Timed:
    """A pass over ``ids`` whose loss is that of the last token."""

    def run() -> None:
        with torch.set_grad_enabled(backward):
            loss = F.cross_entropy(logits(ids).float(), ids[:, -1])
        if backward:
            loss.backward()
            model.zero_grad()

    return Timed(run, ids.numel())


def ours(settings: Settings, tiny: bool, backward: bool = True) -> Timed:
    from lit_memory.models.armt import ARMT
    from lit_memory.recurrence import unroll

    model = placed(ARMT(ARMT.Config(vocab_size=VOCAB, family="gpt_neox", value_std=0.05, **SIZES)), settings)

    def logits(ids: Tensor) -> Tensor:
        return model.logits(unroll(model, ids, SEGMENT, keep=1).hidden_BTD[:, -2])

    return timed(logits, model, placed(reads(tiny), settings), backward)


class Tupled(nn.Module):
    """A layer that returns a tuple, as the published code expects; transformers 5 returns a tensor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **options: Any):
        out = self.layer(hidden_states, **options)
        return (out,) if torch.is_tensor(out) else out


class Untupled(nn.Module):
    """The published layer as transformers 5 calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any):
        return self.inner(hidden_states=hidden_states, **options)[0]


def published(settings: Settings, tiny: bool, backward: bool = True) -> Timed:
    need("transformers")
    file = need_file("ARMT_REFERENCE", "the published modeling_amt/language_modeling.py")
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sys.modules.setdefault("wandb", types.ModuleType("wandb"))  # imported there, and not needed
    spec: Any = importlib.util.spec_from_file_location("published_armt", file)
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    width, layers, ids = SIZES["width"], SIZES["layers"], placed(reads(tiny), settings)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    base = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=VOCAB, num_attention_heads=SIZES["heads"], use_cache=False, **sizes)
    )
    base.gpt_neox.layers = nn.ModuleList(Tupled(layer) for layer in base.gpt_neox.layers)
    memory = SIZES["memory_tokens"], SIZES["memory_dim"]
    cell = code.AssociativeMemoryCell(base, *memory, layers_attr="gpt_neox.layers", wrap_pos=False)
    for i, layer in enumerate(cell.layers):
        nn.init.normal_(layer.W_mv.weight, std=0.05)
        cell.layers[i] = Untupled(layer)
    segments = ids.shape[1] // SEGMENT
    model = code.AssociativeRecurrentWrapper(cell, segment_size=SEGMENT, max_n_segments=segments, vary_n_segments=False)
    scored = torch.zeros_like(ids, dtype=torch.bool)
    scored[:, -2:-1] = True

    def logits(ids: Tensor) -> Tensor:
        return model(ids, labels=ids, labels_mask=scored, attention_mask=torch.ones_like(ids))["logits"][:, -2]

    return timed(logits, placed(model, settings), ids, backward)


def retrieval(settings: Settings, tiny: bool, **options: Any) -> Timed:
    """A training step of a small model on 20 pairs and 4 questions."""
    from lit_memory.models.armt import ARMT
    from lit_memory.recurrence import unroll
    from lit_memory.tasks.associative_retrieval import AssociativeRetrieval

    task = AssociativeRetrieval(AssociativeRetrieval.Config(pairs=3 if tiny else 20, queries=4))
    batch = placed(task.batch(0, "train", 0, 2 if tiny else 32), settings)
    sizes: dict[str, Any] = {"layers": 4, "width": 64, "heads": 2, "memory_tokens": 1, "memory_dim": 32}
    model = placed(ARMT(ARMT.Config(vocab_size=task.vocab_size, value_std=0.05, **sizes)), settings)

    def run() -> None:
        read_only = batch.read_only
        out = unroll(model, batch.ids_BT, batch.segment_len, read_only=read_only, keep=read_only, **options)
        model.logits(out.hidden_BTD).square().mean().backward()
        model.zero_grad()

    return Timed(run, batch.ids_BT.numel())


def text(settings: Settings, tiny: bool, **options: Any) -> Timed:
    """A forward pass over a text of 16 segments of 512 tokens."""
    from lit_memory.models.armt import ARMT
    from lit_memory.recurrence import unroll

    sizes: dict[str, Any] = {"layers": 4, "width": 128, "heads": 2, "memory_tokens": 10, "memory_dim": 64}
    model = placed(ARMT(ARMT.Config(vocab_size=VOCAB, value_std=0.05, **sizes)), settings)
    length = 5 if tiny else 512
    ids = placed(torch.randint(VOCAB, (1, 16 * length)), settings)

    def run() -> None:
        with torch.no_grad():
            unroll(model, ids, length, **options)

    return Timed(run, ids.numel())


def works() -> dict[str, Work]:
    def both(backward: bool) -> Work:
        return Work({"ours": partial(ours, backward=backward), "published code": partial(published, backward=backward)})

    def by_schedule(way: Way) -> Work:
        named = {schedule: partial(way, schedule=schedule) for schedule in ("sequential", "layer", "diagonal")}
        return Work({"default": way, **named})

    schedules = {"armt/schedules": by_schedule(retrieval), "armt/text": by_schedule(text)}
    return {"armt/step": both(True), "armt/forward": both(False), **schedules}
