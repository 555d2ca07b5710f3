"""Our models in the hands of torch's own tools: export, ``functional_call``, transforms; and with layers put in place
of ours."""

import copy

import pytest
import torch
from conftest import TEXT_ONLY, build_model
from torch import nn

from lit_memory.memory import compiled
from lit_memory.memory.newton import newton
from lit_memory.memory.scan import plain_selective_scan
from lit_memory.models.attention import last_rows, rotary_table
from lit_memory.models.relative import sinusoids
from lit_memory.recurrence import LayerRecurrent, unroll
from lit_memory.registry import MODELS, load_class

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
    """A linear layer, or a convolution, and what an adapter adds to it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.in_features = base, getattr(base, "in_features", None)
        self.added = copy.deepcopy(base)
        self.added.bias = None
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
    """Put an adapter in the place of every linear layer and convolution; returns the weights of a model that has it
    merged in."""
    merged = model.state_dict()
    for path, linear in [(path, part) for path, part in model.named_modules() if type(part) in (nn.Linear, nn.Conv1d)]:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Adapted(linear))
        merged[f"{path}.weight"] = linear.weight + model.get_submodule(path).added.weight
    return {key: value.detach() for key, value in merged.items()}


@pytest.mark.parametrize("schedule", ["sequential", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_used_everywhere(name, tokens, schedule):
    """A model whose layers another library has replaced computes what one with the merged weights does, and
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


@pytest.mark.parametrize("forward", ["inside", "outside"])
@pytest.mark.parametrize("name", MODELS)
def test_backward_inside_of_autocast(name, tokens, forward, monkeypatch):
    """``loss.backward()`` inside of autocast, too, has gradients; torch's own products are then in bf16, which ours in
    full precision are not."""
    monkeypatch.setattr(compiled, "installed", lambda: False)
    model, ids, found = build_model(name).float().eval(), tokens(2, 3 * N), []
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=forward == "inside"):
            loss = model.logits(unroll(model, ids, N).hidden_BTD).float().square().mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found.append(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))
    error, size = (sum(t.square().sum() for t in ts) for ts in (map(torch.sub, *found), found[0]))
    assert error**0.5 < 0.02 * size**0.5 and (name != "mamba" or forward == "outside" or error == 0)


def test_backward_by_hand_is_outside_of_autocast():
    """The iteration and the scan have the same gradients, bit by bit, wherever the backward pass is asked for."""
    A = torch.randn(2, 3, 4, requires_grad=True)
    state, steps = torch.randn(2, 3, 4, requires_grad=True), [torch.rand(2, 6, 3), torch.rand(2, 6, 3)]
    others = torch.rand(2, 6, 4), torch.rand(2, 6, 4)
    for leaf, make in (
        (A, lambda: newton(A, A.mT * 0.1, 3)[0]),
        (state, lambda: plain_selective_scan(*steps, -torch.rand(3, 4).add(0.1), *others, state)[0]),
    ):
        torch.manual_seed(0)
        loss = make().square().sum()
        grads = []
        for inside in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                grads.append(torch.autograd.grad(loss, leaf, retain_graph=True)[0])
        assert torch.equal(*grads)


class Losing(nn.Module):
    """Reads segments in the default order, and gives a loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return unroll(self.model, ids, N).hidden_BTD.square().mean()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "memreasoner"])  # its GRU is torch's, without
def test_functional_call(name, tokens):
    """Other weights, as plain tensors, and gradients by ``torch.func``: those of the model that has these weights."""
    module, other, ids = Losing(build_model(name).eval()), Losing(build_model(name).eval()), tokens(2, 3 * N)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.01 * torch.randn_like(weight)
    weights = {key: weight.detach() for key, weight in other.named_parameters()}
    wanted = torch.autograd.grad(other(ids), list(other.parameters()), materialize_grads=True)
    assert torch.allclose(torch.func.functional_call(module, weights, (ids,)), other(ids), rtol=1e-12, atol=1e-12)
    found = torch.func.grad(lambda weights: torch.func.functional_call(module, weights, (ids,)))(weights)
    for grad, expected in zip(found.values(), wanted, strict=True):
        assert torch.allclose(grad, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in MODELS if issubclass(load_class("model", name), LayerRecurrent)])
def test_hooks_are_called(name, tokens):
    """In the default order hooks of layers see every segment, as they do in the order of the definition."""
    model, calls = build_model(name).eval(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: calls.append(args[0].shape))
    seen = []
    for schedule in ("sequential", "auto"):
        calls.clear()
        unroll(model, tokens(2, 3 * N), N, keep=1, schedule=schedule)
        seen.append(list(calls))
    assert seen[0] == seen[1]
