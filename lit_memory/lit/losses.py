"""Losses and predictions at the scored positions, in parts where there are many logits.

Shape suffixes: N scored positions, D width, V vocabulary, H numbers of a forecast.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_memory.recurrence import cross_entropy, logits_per_token

MAX_LOGITS = 2**25
"""Logits that are held at a time where only losses or predictions are wanted: 128 MB of fp32."""


def rows_at_once(model: Any) -> int:
    """Hidden states whose logits are held at a time."""
    return max(1, MAX_LOGITS // logits_per_token(model))


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
    """Cross-entropy of ids (N,), or squared error of numbers (N, H); ``reduction`` as in torch."""
    if targets_N.is_floating_point():
        return F.mse_loss(outputs_NV[:, : targets_N.shape[1]], targets_N.to(outputs_NV.dtype), reduction=reduction)
    return F.cross_entropy(outputs_NV, targets_N, reduction=reduction)


def hidden_loss(model: Any, hidden_ND: Tensor, targets_N: Tensor, reduction: str = "mean") -> Tensor:
    """``loss_of`` from hidden states: the mean, or every loss (N,) for ``reduction`` "none".

    More than ``MAX_LOGITS`` logits are computed in parts, and once more in the backward pass.
    """

    def loss(hidden_ND: Tensor, targets_N: Tensor, reduction: str) -> Tensor:
        if targets_N.is_floating_point():
            return loss_of(model.logits(hidden_ND), targets_N, reduction)
        return cross_entropy(model, hidden_ND, targets_N, reduction)

    rows = rows_at_once(model)
    if len(targets_N) <= rows:
        return loss(hidden_ND, targets_N, reduction)
    of_part = "sum" if reduction == "mean" else "none"
    losses = [
        checkpoint(loss, hidden, targets, of_part, use_reentrant=False, preserve_rng_state=False)
        for hidden, targets in zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
    ]
    return torch.stack(losses).sum() / targets_N.numel() if reduction == "mean" else torch.cat(losses)
