"""Losses and predictions at the scored positions.

Shape suffixes: N scored positions, D width, V vocabulary, H numbers of a forecast.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.recurrence import at_least_single, cross_entropy, logits_loss, rows_at_once


def predictions(outputs_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The likeliest ids (N,). If the targets are numbers (N, H): the first H outputs."""
    if targets_N.is_floating_point():
        return outputs_NV[:, : targets_N.shape[1]].to(targets_N.dtype)
    return outputs_NV.argmax(-1)


def losses_and_predictions(model: Any, hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Every loss and ``predictions`` from hidden states, of which the logits are computed once."""
    rows, found = rows_at_once(model), []
    for hidden, targets in zip(hidden_ND.split(rows), targets_N.split(rows), strict=True):
        outputs = model.logits(hidden)
        found.append((loss_of(outputs, targets, "none"), predictions(outputs, targets)))
    losses, predicted = zip(*found, strict=True)
    return torch.cat(losses), torch.cat(predicted)


def loss_of(outputs_NV: Tensor, targets_N: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of ids (N,), or squared error of numbers (N, H), in at least single precision; ``reduction`` as in
    torch, but that the mean of no numbers is 0."""
    if not targets_N.is_floating_point():
        return logits_loss(outputs_NV, targets_N, reduction)
    found = at_least_single(outputs_NV[:, : targets_N.shape[1]])
    reduction = "sum" if reduction == "mean" and not len(targets_N) else reduction
    return F.mse_loss(found, targets_N.to(found.dtype), reduction=reduction)


def hidden_loss(model: Any, hidden_ND: Tensor, targets_N: Tensor, reduction: str = "mean") -> Tensor:
    """``loss_of`` from hidden states: the mean, or every loss (N,) for ``reduction`` "none". Where there are many
    logits, not all of them are held."""
    if targets_N.is_floating_point():
        return loss_of(model.logits(hidden_ND), targets_N, reduction)
    return cross_entropy(model, hidden_ND, targets_N, reduction)
