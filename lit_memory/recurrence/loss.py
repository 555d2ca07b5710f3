"""The loss of hidden states, by the head's own method where it has one.

Shape suffixes: N tokens of any sample, D width, V vocabulary.
"""

from torch import Tensor
from torch.nn import functional as F

from lit_memory.recurrence.protocol import SegmentRecurrent


class LossHead:
    """A head with a loss of its own, which needs fewer logits than the vocabulary has tokens."""

    logits_per_token: int

    def losses(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Cross-entropy (N,) of the target ids."""
        raise NotImplementedError


def loss_head(model: SegmentRecurrent) -> LossHead | None:
    """The head of the model's decoder, if it has a loss of its own."""
    head = getattr(getattr(model, "decoder", None), "head", None)
    return head if isinstance(head, LossHead) else None


def logits_per_token(model: SegmentRecurrent) -> int:
    """Logits per token; bounds the memory of the loss."""
    head = loss_head(model)
    return model.config.vocab_size if head is None else head.logits_per_token


def cross_entropy(model: SegmentRecurrent, hidden_ND: Tensor, targets_N: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of target ids (N,) given hidden states. ``reduction``: "mean", "sum" or "none" (N,)."""
    head = loss_head(model)
    if head is None:
        return F.cross_entropy(model.logits(hidden_ND), targets_N, reduction=reduction)
    losses_N = head.losses(hidden_ND, targets_N)
    if reduction == "none":
        return losses_N
    return losses_N.sum() if reduction == "sum" else losses_N.mean()
