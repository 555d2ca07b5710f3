"""On a GPU (``pytest -m gpu``): the same numbers as on the CPU, and training that runs."""

import pytest
import torch

from lit_memory.models import MODELS
from lit_memory.recurrence import LayerRecurrent, map_state, unroll

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("name", MODELS)
def test_same_as_cpu(name, build):
    """Hidden states, state and gradients in fp64 agree with the CPU's to 1e-9."""
    model, ids = build(name), torch.randint(19, (3, 24))

    def outcome(device):
        model.to(device).zero_grad()
        out = unroll(model, ids.to(device), 6, read_only=1)
        out.hidden_BTD.square().mean().backward()
        grads = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        return out.hidden_BTD.detach().cpu(), map_state(lambda t: t.detach().cpu(), out.state), grads

    (h1, s1, g1), (h2, s2, g2) = outcome("cpu"), outcome("cuda")
    torch.testing.assert_close(h2, h1, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(s2, s1, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(g2, g1, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_diagonal_on_cuda(name, build):
    """The diagonal schedule agrees with the sequential one on the GPU as well."""
    model, ids = build(name).cuda(), torch.randint(19, (3, 24)).cuda()
    if not isinstance(model, LayerRecurrent):
        pytest.skip(f"{name} has no diagonal schedule")
    torch.testing.assert_close(unroll(model, ids, 6, schedule="diagonal").hidden_BTD, unroll(model, ids, 6).hidden_BTD, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_bf16_autocast(name, build):
    """Under bf16 autocast the hidden states are finite and the state stays in fp32."""
    model, ids = build(name).float().cuda(), torch.randint(19, (3, 24)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = unroll(model, ids, 6)
    assert out.hidden_BTD.isfinite().all()
    map_state(lambda t: pytest.fail(f"state in {t.dtype}") if t.is_floating_point() and t.dtype != torch.float32 else t, out.state)
