"""Segments of a Transformer-XL in blocks against segment after segment, in fp64; its dropout."""

import pytest
import torch
from test_xl import N, grads

from lit_memory.models.parts import Dropout
from lit_memory.recurrence import state_tensors, unroll


@pytest.mark.parametrize("extra", [{}, {"mem_detach": False}, {"clamp_len": 2}], ids=str)
@pytest.mark.parametrize("mem_len", [1, 6, 40])
@pytest.mark.parametrize(
    "options", [{}, {"keep": 2}, {"keep": 0}, {"bptt": 2}, {"masked": True}, {"masked": True, "keep": 2}], ids=str
)
def test_xl_blocks_slow_twin(build, tokens, mem_len, extra, options):
    """Segments that a layer reads at once equal segment after segment: hidden states, caches and all gradients; also
    from a cache of which some rows are real."""
    model, ids, found = build("xl", mem_len=mem_len, layers=3, **extra), tokens(2, 8 * N + 2), []
    options = dict(options)
    if options.pop("masked", False):
        mask = torch.rand(2, 7 * N + 2, generator=torch.Generator().manual_seed(0)) > 0.2
        mask[0, 3 * N :] = False
        options["mask_BT"] = mask
    for schedule in ("layer", "sequential"):
        state = model.step(model.init_state(2), ids[:, :N])[1]
        out = unroll(model, ids[:, N:], N, state=state, schedule=schedule, **options)
        results = [t.double() for t in (out.hidden_BTD, *state_tensors(out.state))]
        with_grad = [t for t in results if t.requires_grad]
        found.append([*results, *(grads(with_grad, model.parameters()) if with_grad else [])])
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("p", [0.1, 0.7])
def test_dropout(p):
    """Means of the kept share, of the values and of the gradients; other draws in every call, none in evaluation."""
    torch.manual_seed(0)
    x, dropout = torch.ones(300, 1001, requires_grad=True), Dropout(p)
    y = dropout(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, grad) and set(y.unique().tolist()) == {0.0, y.max().item()}
    assert y.max().item() == pytest.approx(1 / (1 - p)) and y.mean().item() == pytest.approx(1, abs=0.02)
    assert (y > 0).float().mean(0).std().item() == pytest.approx((p * (1 - p) / 300) ** 0.5, rel=0.1)
    assert not torch.equal(dropout(x), y) and dropout.eval()(x) is x
    torch.manual_seed(0)
    assert torch.equal(dropout.train()(x), y)
