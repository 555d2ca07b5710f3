"""On a GPU (``pytest -m gpu``): the same numbers as on the CPU, and training that runs."""

import pytest
import torch
from test_delta import delta_inputs, values_and_gradients
from test_lit import make_data, make_double
from test_replay import REPLAYED, train

from lit_memory.lit import LIT_DATA, LIT_MODULES
from lit_memory.memory import delta, scan
from lit_memory.recurrence import GrowingState, LayerRecurrent, map_state, replay, unroll
from lit_memory.registry import MODELS, load_class

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("name", MODELS)
def test_same_as_cpu(name, build):
    """Hidden states, state and gradients in fp64 agree with the CPU's to 1e-9."""
    model, ids = build(name), torch.randint(19, (3, 24))

    def outcome(device):
        model.zero_grad()  # before the move, which takes gradients along, those in hand as well
        model.to(device)
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
    torch.testing.assert_close(
        unroll(model, ids, 6, schedule="diagonal").hidden_BTD,
        unroll(model, ids, 6, schedule="sequential").hidden_BTD,
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_replay_slow_twin(name, masked, build, monkeypatch):
    """The kernels of a segment, recorded once and launched for every further one, give what one segment after the other
    gives; for every model that does not look at numbers."""
    model, total = build(name).cuda(), replay.WORTH + 4
    ids = torch.randint(19, (3, 6 * total)).cuda()
    ends = torch.tensor([[6 * total], [7 * 6 + 2], [6]], device="cuda")
    mask = torch.arange(6 * total, device="cuda") < ends if masked else None
    graphs, recorded = [], replay.recorded
    monkeypatch.setattr(replay, "recorded", lambda *work: graphs.append(1) or recorded(*work))
    with torch.no_grad():
        out = unroll(model, ids, 6, mask_BT=mask)
        expected = unroll(model, ids, 6, mask_BT=mask, schedule="sequential")
    assert graphs or model.looks_at_numbers or isinstance(model, GrowingState)
    torch.testing.assert_close(out.hidden_BTD, expected.hidden_BTD, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.state, expected.state, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("task", ["associative_retrieval", "babilong"])
@pytest.mark.parametrize("schedule", ["auto", "sequential", "diagonal"])
@pytest.mark.parametrize("name", REPLAYED)
def test_training_steps_slow_twin(name, schedule, task, monkeypatch):
    """The kernels of a training step, recorded once and launched for every further batch of the shape: the losses and
    gradients of steps launched one by one."""
    layered = issubclass(load_class("model", name), LayerRecurrent)
    if schedule == "diagonal" and (not layered or task == "babilong"):
        pytest.skip(f"{name} has no diagonal schedule, or none with masks")
    data = make_data(LIT_DATA[task])
    batches = [data.task.batch(0, "train", step, 3).to("cuda") for step in range(12)]
    if task == "associative_retrieval":
        batches[1::2] = [batch.recut([7]) for batch in batches[1::2]]
    found, graphs, recorded = [], [], replay.recorded
    monkeypatch.setattr(replay, "recorded", lambda *work: graphs.append(1) or recorded(*work))
    for options in ({}, {"replay": True}):
        torch.manual_seed(0)
        module = make_double(LIT_MODULES[name], data, unroll_schedule=schedule, **options).cuda()
        found.append(train(module, batches))
    assert graphs
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_bf16_autocast(name, build):
    """Under bf16 autocast the hidden states are finite, the state stays in fp32, and a replay changes nothing."""
    model, ids = build(name).float().cuda(), torch.randint(19, (3, 6 * replay.WORTH)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = unroll(model, ids[:, :24], 6)
        with torch.no_grad():
            found, expected = (unroll(model, ids, 6, schedule=schedule) for schedule in ("auto", "sequential"))
    assert out.hidden_BTD.isfinite().all()
    map_state(
        lambda t: pytest.fail(f"state in {t.dtype}") if t.is_floating_point() and t.dtype != torch.float32 else t,
        out.state,
    )
    torch.testing.assert_close(tuple(found), tuple(expected))


def test_mamba_kernel_slow_twin(monkeypatch):
    """The reference's kernel, with a state that is not zero: values, final state and all gradients are those of our
    scan."""
    pytest.importorskip("mamba_ssm", reason="needs mamba-ssm")
    shapes = [(2, 70, 64), (2, 70, 64), (64, 16), (2, 70, 16), (2, 70, 16), (2, 64, 16)]
    x, delta, A, B, C, state = (torch.randn(shape, device="cuda") for shape in shapes)
    inputs = [t.requires_grad_() for t in (x, delta.abs() / 10, -A.exp(), B, C, state)]
    weights, found = [torch.randn_like(t) for t in (x, state)], []
    assert scan._kernel() is not None
    for kernel in (scan._kernel(), None):
        monkeypatch.setattr(scan, "_kernel", lambda kernel=kernel: kernel)
        out = scan.selective_scan(*inputs)
        loss = sum((t * w).sum() for t, w in zip(out, weights, strict=True))
        found.append([*out, *torch.autograd.grad(loss, inputs)])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("decays", [False, True], ids=["plain", "gated"])
def test_delta_kernels_slow_twin(decays, monkeypatch):
    """The reference's kernels in bf16, with a state that is not zero: values, final state and all gradients are those
    of our chunks in fp32, up to bf16's rounding."""
    pytest.importorskip("fla", reason="needs flash-linear-attention")
    inputs = delta_inputs(150, decays, torch.bfloat16, H=4, K=32, V=64, device="cuda")
    inputs[4] = inputs[4].detach().float().requires_grad_()
    if decays:
        inputs[5] = inputs[5].detach().float().requires_grad_()
    kernels, seen = delta._kernels(), []
    assert kernels is not None
    spies = delta.Kernels(*(lambda f=f, **options: seen.append(1) or f(**options) for f in kernels))
    monkeypatch.setattr(delta, "_kernels", lambda: spies)
    fast = values_and_gradients(delta.delta_rule, inputs)
    monkeypatch.setattr(delta, "_kernels", lambda: None)
    slow = values_and_gradients(delta.delta_rule, inputs)
    assert seen == [1]
    for a, b in zip(fast, slow, strict=True):
        assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()
