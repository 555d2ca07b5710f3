"""A training step of every architecture, forward and backward, at the sizes of the scale cpu of an experiment.

Where the models of one paper have an experiment with arms of their own sizes, these are taken; all others get the sizes
of ``SIZES`` on the same task.
"""

from functools import cache, partial
from typing import Any

import torch

from benchmarks.work import PROJECT, Settings, Timed, Work, known, placed

SIZES = {
    "layers": 2,
    "width": 64,
    "heads": 2,
    "head_width": 32,
    "ff_width": 256,
    "memory_tokens": 4,
    "window": 64,
    "chunk": 16,
}
LINES = {"larimar": "memreasoner_larimar", "memreasoner": "memreasoner_babi"}
"""Models that read lines -> an experiment that trains them; all others read associative retrieval's segments."""


@cache
def planned(experiment: str) -> list[Any]:
    """All runs of an experiment at the scale cpu."""
    from lit_memory.plan.experiment import load

    return load(PROJECT / "experiments" / f"{experiment}.yaml").at("cpu").plan()


def settings(model: str) -> Settings:
    """Sections of the experiment's arm with this model."""
    from lit_memory.registry import load_class

    specs = planned(LINES.get(model, "armt_rewrite"))
    spec = next((spec for spec in specs if spec.model["name"] == model), specs[0])
    chosen = spec.model
    if chosen["name"] != model:
        chosen = {"name": model, "vocab_size": chosen["vocab_size"], **known(load_class("model", model).Config, SIZES)}
    return {"model": chosen, "task": spec.task, "size": spec.train["batch_size"], "bptt": spec.train["bptt"]}


def step(settings: Settings, tiny: bool) -> Timed:
    from lit_memory.lit import LIT_MODULES
    from lit_memory.registry import build, load_class

    model, task = (dict(settings[section]) for section in ("model", "task"))
    if tiny and "pairs" in task:
        task |= {"pairs": 3, "test_pairs": [3]}
    sampler: Any = build("task", {"name": task["name"], **known(load_class("task", task["name"]).Config, task)})
    batch = placed(sampler.batch(0, "train", 0, 2 if tiny else settings["size"]), settings)
    name = model["name"]
    options = known(load_class("model", name).Config, model) | {"vocab_size": sampler.vocab_size}
    torch.manual_seed(0)
    module = placed(LIT_MODULES[name](**options, bptt=settings["bptt"]), settings)

    def run() -> None:
        module.loss(batch).backward()
        module.zero_grad()

    segments = () if not isinstance(batch.context, tuple) else batch.context
    read = sum((part[0] if isinstance(part, tuple) else part).numel() for part in (*segments, batch.ids_BT))
    return Timed(run, read)


def works() -> dict[str, Work]:
    from lit_memory.registry import MODELS

    return {f"step/{name}": Work({"ours": step}, partial(settings, name)) for name in MODELS}
