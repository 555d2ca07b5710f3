"""The loss of hidden states, by the head's own method where it has one, or block by block, or in parts.

Shape suffixes: N tokens of any sample, D width, V vocabulary, b tokens of a block.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_memory.recurrence.calls import hooked
from lit_memory.recurrence.protocol import SegmentRecurrent
from lit_memory.recurrence.state import at_least_single

BLOCK = 2**19
"""Logits of a block: 2 MB of fp32, which stay in the cache of a core."""
MAX_LOGITS = 2**25
"""Logits that are held at a time where only losses or predictions are wanted: 128 MB of fp32."""


class LossHead:
    """A head with a loss of its own, which needs fewer logits than the vocabulary has tokens."""

    logits_per_token: int

    def losses(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Cross-entropy (N,) of the target ids."""
        raise NotImplementedError


def head_of(model: SegmentRecurrent) -> Any:
    """The head of the model's decoder; None where it has neither."""
    return getattr(getattr(model, "decoder", None), "head", None)


def loss_head(model: SegmentRecurrent) -> LossHead | None:
    """The head of the model's decoder, if it has a loss of its own."""
    head = head_of(model)
    return head if isinstance(head, LossHead) else None


def logits_per_token(model: SegmentRecurrent) -> int:
    """Logits per token; bounds the memory of the loss."""
    head = loss_head(model)
    return model.config.vocab_size if head is None else head.logits_per_token


def rows_at_once(model: SegmentRecurrent) -> int:
    """Hidden states whose logits are held at a time."""
    return max(1, MAX_LOGITS // logits_per_token(model))


def logits_loss(logits_NV: Tensor, targets_N: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of target ids (N,) in at least single precision: in half precision a mean has three digits, and a
    sum of many overflows. ``reduction`` as in torch."""
    return F.cross_entropy(at_least_single(logits_NV), targets_N, reduction=reduction)


def cross_entropy(model: SegmentRecurrent, hidden_ND: Tensor, targets_N: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of target ids (N,) given hidden states. ``reduction``: "mean", of none 0; or "none" (N,).

    More logits than a block are computed by blocks, where ``plain_table`` allows it; more than ``MAX_LOGITS`` in parts,
    and once more in the backward pass.
    """
    count, rows = len(targets_N), rows_at_once(model)
    if reduction == "mean":
        if count * logits_per_token(model) > BLOCK and (table_VD := plain_table(model, hidden_ND)) is not None:
            return by_blocks(hidden_ND, table_VD, targets_N, hidden_ND.new_ones(count)) / count
        if count > rows:
            return cross_entropy(model, hidden_ND, targets_N, "none").sum() / count
        reduction = "mean" if count else "sum"
    if count <= rows:
        return part_loss(model, hidden_ND, targets_N, reduction)
    parts = [
        checkpoint(part_loss, model, hidden, targets, "none", use_reentrant=False, preserve_rng_state=False)
        for hidden, targets in zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
    ]
    return torch.cat(parts)


def part_loss(model: SegmentRecurrent, hidden_ND: Tensor, targets_N: Tensor, reduction: str) -> Tensor:
    """``cross_entropy`` from all logits at once. ``reduction``: "mean", "sum" or "none"."""
    if (head := loss_head(model)) is None:
        return logits_loss(model.logits(hidden_ND), targets_N, reduction)
    losses_N = head.losses(hidden_ND, targets_N)
    return losses_N if reduction == "none" else getattr(losses_N, reduction)()


def weighted_cross_entropy(model: SegmentRecurrent, hidden_ND: Tensor, targets_N: Tensor, weight_N: Tensor) -> Tensor:
    """Sum of weight * cross-entropy of target ids (N,), whose gradient passes to hidden states and head."""
    if (table_VD := plain_table(model, hidden_ND)) is None:
        return (cross_entropy(model, hidden_ND, targets_N, "none") * weight_N).sum()
    return by_blocks(hidden_ND, table_VD, targets_N, weight_N)


def plain_table(model: SegmentRecurrent, hidden_ND: Tensor) -> Tensor | None:
    """The weights (V, D) of the model's head where logits are a product with them alone, on a CPU, and torch neither
    traces nor transforms the program; else None."""
    head = head_of(model)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    if type(head) is not nn.Linear or head.bias is not None or type(model).logits is not SegmentRecurrent.logits:
        return None
    on_cpu = hidden_ND.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    exact = head.weight.dtype == hidden_ND.dtype in (torch.float32, torch.float64)
    return head.weight if on_cpu and exact and not hooked(head) else None


def by_blocks(hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor, weight_N: Tensor) -> Tensor:
    """``BlockedLoss``, with gradients where torch wants some."""
    return BlockedLoss.apply(hidden_ND, table_VD, targets_N, weight_N, torch.is_grad_enabled())


class BlockedLoss(torch.autograd.Function):
    """``weighted_cross_entropy`` by a product with a table, a block of tokens at a time.

    The gradients of a block are computed while its logits are in the cache, so that no array of all logits is ever
    written to memory, read and filled again. ``wanted``: whether there will be a backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor, weight_N: Tensor, wanted: bool
    ) -> Tensor:
        total, rows = hidden_ND.new_zeros(()), max(1, BLOCK // len(table_VD))
        room_bV = hidden_ND.new_empty(min(rows, len(hidden_ND)), len(table_VD))
        of_hidden_ND, of_table_VD = torch.empty_like(hidden_ND), torch.zeros_like(table_VD)
        parts = (t.split(rows) for t in (hidden_ND, targets_N.unsqueeze(1), weight_N.unsqueeze(1), of_hidden_ND))
        for hidden_bD, target_b1, weight_b1, of_hidden_bD in zip(*parts, strict=True):
            logits_bV = torch.mm(hidden_bD, table_VD.t(), out=room_bV[: len(hidden_bD)])
            most_b1, chosen_b1 = logits_bV.amax(1, keepdim=True), logits_bV.gather(1, target_b1)
            shares_bV = logits_bV.sub_(most_b1).exp_()
            sum_b1 = shares_bV.sum(1, keepdim=True)
            total += ((sum_b1.log() + most_b1 - chosen_b1) * weight_b1).sum()
            if wanted and any(ctx.needs_input_grad):
                errors_bV = shares_bV.mul_(weight_b1 / sum_b1).scatter_add_(1, target_b1, -weight_b1)
                torch.mm(errors_bV, table_VD, out=of_hidden_bD)
                if ctx.needs_input_grad[1]:
                    of_table_VD.addmm_(errors_bV.t(), hidden_bD)
        ctx.save_for_backward(of_hidden_ND, of_table_VD)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *(of_input * grad if needed else None for of_input, needed in grads), None, None, None
