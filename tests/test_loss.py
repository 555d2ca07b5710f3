"""The weighted cross-entropy of a plain head, block by block, against logits of all tokens at once."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_memory.recurrence import loss as module
from lit_memory.recurrence import weighted_cross_entropy
from lit_memory.recurrence.loss import BlockedLoss, plain_table
from lit_memory.recurrence.protocol import SegmentRecurrent

VOCAB, WIDTH = 11, 6


class Model(SegmentRecurrent):
    """A head, and nothing else."""

    def __init__(self, head: nn.Module | None = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.head = (head or nn.Linear(WIDTH, VOCAB, bias=False)).to(dtype)


def inputs(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden_ND = 3 * torch.randn(count, WIDTH, generator=generator, dtype=dtype)
    targets_N = torch.randint(VOCAB, (count,), generator=generator)
    return hidden_ND.requires_grad_(), targets_N, torch.randint(4, (count,), generator=generator).to(dtype)


def at_once(model, hidden_ND, targets_N, weight_N):
    return (F.cross_entropy(model.logits(hidden_ND), targets_N, reduction="none") * weight_N).sum()


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
        lambda *given: BlockedLoss.apply(*given, targets_N, weight_N), (hidden_ND, table_VD)
    )


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
