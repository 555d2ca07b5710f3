"""Our models in the hands of torch's own tools: export, ``functional_call``, transforms; and with layers put in place
of ours."""

import pytest
import torch
from conftest import TEXT_ONLY, build_model
from torch import nn

from lit_memory.models.attention import last_rows, rotary_table
from lit_memory.models.relative import sinusoids
from lit_memory.recurrence import unroll
from lit_memory.registry import MODELS

N = 5


class Reading(nn.Module):
    """Reads one segment."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model.step(self.model.init_state(len(ids)), ids)[0]


SEEN = [name for name in MODELS if name not in TEXT_ONLY]  # those look at numbers
FEW = {"transformer", "xl", "mac"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.slow]) for n in SEEN])
def test_export_leaves_nothing_behind(name, tokens):
    """What is cached while torch traces with tensors without values would be found by every later call."""
    for cached in (rotary_table, last_rows, sinusoids):
        cached.cache_clear()
    module, ids = Reading(build_model(name)).eval(), tokens(2, N)
    exported = torch.export.export(module, (ids,), strict=False).module()
    assert torch.allclose(exported(ids), module(ids), rtol=1e-12, atol=1e-12)
    hidden = unroll(module.model, ids, 2, keep=1).hidden_BTD
    assert type(hidden) is torch.Tensor and bool(hidden.isfinite().all())


class Adapted(nn.Module):
    """A linear layer and what an adapter adds to it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.in_features = base, base.in_features
        self.added = nn.Linear(base.in_features, base.out_features, bias=False).to(base.weight.dtype)
        nn.init.normal_(self.added.weight, std=0.1)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, input):
        return self.base(input) + self.added(input)


def adapt(model):
    """Put an adapter in the place of every linear layer; returns the weights of a model that has it merged in."""
    merged = model.state_dict()
    for path, linear in [(path, part) for path, part in model.named_modules() if type(part) is nn.Linear]:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Adapted(linear))
        merged[f"{path}.weight"] = linear.weight + model.get_submodule(path).added.weight
    return {key: value.detach() for key, value in merged.items()}


@pytest.mark.parametrize("schedule", ["sequential", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_used_everywhere(name, tokens, schedule):
    """A model whose linear layers another library has replaced computes what one with the merged weights does, and
    trains what was added."""
    model, merged = (build_model(name, {"tie_embeddings": False}).eval() for _ in range(2))
    merged.load_state_dict(adapt(model))
    ids = tokens(2, 3 * N)
    for length in (2, N):
        out, wanted = (unroll(one, ids, length, schedule=schedule) for one in (model, merged))
        assert torch.allclose(out.hidden_BTD, wanted.hidden_BTD, rtol=1e-10, atol=1e-10)
    model.logits(out.hidden_BTD).square().sum().backward()
    trained = [part for part in model.modules() if isinstance(part, Adapted) and part.base.weight.grad is not None]
    assert trained and all(part.added.weight.grad is not None for part in trained)
