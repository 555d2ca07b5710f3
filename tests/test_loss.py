"""The cross-entropy of a plain head, block by block, against logits of all tokens at once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_memory.recurrence import cross_entropy, logits_loss, weighted_cross_entropy
from lit_memory.recurrence import loss as module
from lit_memory.recurrence.loss import BlockedLoss, plain_table
from lit_memory.recurrence.protocol import SegmentRecurrent

VOCAB, WIDTH = 11, 6


class Model(SegmentRecurrent):
    """A head, and nothing else."""

    def __init__(self, head: nn.Module | None = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.decoder = nn.Module()
        self.decoder.head = (head or nn.Linear(WIDTH, VOCAB, bias=False)).to(dtype)


def inputs(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden_ND = 3 * torch.randn(count, WIDTH, generator=generator, dtype=dtype)
    targets_N = torch.randint(VOCAB, (count,), generator=generator)
    return hidden_ND.requires_grad_(), targets_N, torch.randint(4, (count,), generator=generator).to(dtype)


def at_once(model, hidden_ND, targets_N, weight_N):
    logits_NV = model.logits(hidden_ND)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return (F.cross_entropy(logits_NV, targets_N, reduction="none") * weight_N).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "block"), [(1, 1), (7, 1), (7, 3 * VOCAB), (7, 7 * VOCAB), (40, 100), (0, 100)])
def test_blocks_are_the_whole(count, block, dtype, monkeypatch):
    """Value and gradients, of one block and of several, the last one smaller."""
    monkeypatch.setattr(module, "BLOCK", block)
    model, (hidden_ND, *rest) = Model(dtype=dtype), inputs(count, dtype)
    wanted = [hidden_ND, model.decoder.head.weight]
    losses = [f(model, hidden_ND, *rest) for f in (weighted_cross_entropy, at_once)]
    assert type(losses[0].grad_fn).__name__ == "BlockedLossBackward"
    found, expected = ((loss, *torch.autograd.grad(2.5 * loss, wanted)) for loss in losses)
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)


def test_gradients_are_right():
    hidden_ND, targets_N, weight_N = inputs(5)
    table_VD = Model().decoder.head.weight
    assert torch.autograd.gradcheck(
        lambda *given: BlockedLoss.apply(*given, targets_N, weight_N, True), (hidden_ND, table_VD)
    )


@pytest.mark.parametrize("block", [100, 40 * VOCAB])
def test_a_mean_by_blocks(block, monkeypatch):
    """Of more logits than a block."""
    monkeypatch.setattr(module, "BLOCK", block)
    model, (hidden_ND, targets_N, _) = Model(), inputs(40)
    found = cross_entropy(model, hidden_ND, targets_N)
    torch.testing.assert_close(found, F.cross_entropy(model.logits(hidden_ND), targets_N))
    assert ("Div" in type(found.grad_fn).__name__) == (block == 100)


def test_the_mean_of_nothing_is_nothing():
    """A part of a batch may have no scored position; its gradients are 0, of the head as well."""
    model, (hidden_ND, targets_N, _) = Model(), inputs(0)
    loss = cross_entropy(model, hidden_ND, targets_N)
    loss.backward()
    assert loss == 0 and (model.decoder.head.weight.grad == 0).all() and hidden_ND.grad is not None


def test_half_precision_is_that_of_the_logits_alone():
    logits_NV = 8 * torch.randn(4096, VOCAB, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    targets_N = torch.zeros(4096, dtype=torch.long)
    for reduction in ("mean", "sum", "none"):
        wanted = F.cross_entropy(logits_NV.float(), targets_N, reduction=reduction)
        assert torch.equal(logits_loss(logits_NV, targets_N, reduction), wanted)


def test_without_gradients_none_are_computed(monkeypatch):
    model, given, products = Model(), inputs(5), []
    monkeypatch.setattr(torch, "mm", lambda *args, mm=torch.mm, **options: products.append(1) or mm(*args, **options))
    with torch.no_grad():
        weighted_cross_entropy(model, *given)
    assert len(products) == 1


def test_a_transformed_program():
    """torch.func differentiates the logits of all tokens."""
    model, (hidden_ND, *rest) = Model(), inputs(7)
    found = torch.func.grad(lambda hidden: weighted_cross_entropy(model, hidden, *rest))(hidden_ND)
    (wanted,) = torch.autograd.grad(weighted_cross_entropy(model, hidden_ND, *rest), hidden_ND)
    torch.testing.assert_close(found, wanted)


def test_only_what_is_wanted_gets_a_gradient():
    """A frozen head, and no gradients at all."""
    model, given = Model(), inputs(5)
    model.requires_grad_(False)
    weighted_cross_entropy(model, *given).backward()
    assert model.decoder.head.weight.grad is None and given[0].grad is not None
    with torch.no_grad():
        torch.testing.assert_close(weighted_cross_entropy(model, *given), at_once(model, *given))


class Doubled(Model):
    def logits(self, hidden_BTD):
        return 2 * super().logits(hidden_BTD)


class Other(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


@pytest.mark.parametrize("kind", ["bias", "subclass", "logits", "hook", "autocast", "half"])
def test_anything_else_is_computed_at_once(kind):
    """A head that is more than a product, a hook that has to be called, and precisions that have rules of their own."""
    heads = {"bias": nn.Linear(WIDTH, VOCAB), "subclass": Other(WIDTH, VOCAB, bias=False)}
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    model = (Doubled if kind == "logits" else Model)(heads.get(kind), dtype)
    hidden_ND, *rest = inputs(5, dtype)
    calls = []
    if kind == "hook":
        model.decoder.head.register_forward_hook(lambda *_: calls.append(1))
    with torch.autocast("cpu", enabled=kind == "autocast"):
        assert plain_table(model, hidden_ND) is None
        found = weighted_cross_entropy(model, hidden_ND, *rest)
        assert torch.equal(found, at_once(model, hidden_ND, *rest)) and len(calls) == 2 * (kind == "hook")
