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
