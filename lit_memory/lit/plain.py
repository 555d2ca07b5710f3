"""Data without a task: batches as dictionaries, and metrics of single tokens.

Shape suffixes: B batch, T tokens, N scored tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lit_memory.tasks.batch import Batch
from lit_memory.util.checks import FieldError

AnyBatch = Batch | Mapping[str, Tensor] | Sequence[Tensor]
"""A ``Batch``, a dictionary with ``input_ids`` and ``labels``, or a pair of both (``as_batch``)."""
EXPECTED = "expected a Batch, a dictionary with input_ids and labels, or a pair (input_ids, labels)"


def as_batch(batch: AnyBatch, segment_len: int | None) -> Batch:
    """A ``Batch``, or one made of a dictionary with ``input_ids`` (B, T) and ``labels`` (B, T), or of a pair of both.

    As in transformers, label t is the token at t, which is predicted from the tokens before it, and -100 is not scored.
    An ``attention_mask`` (B, T) may only mark padding on the right, which no scored token reads. Other keys are
    ignored.
    segment_len: tokens per segment of such a batch; None: one segment.
    Raises FieldError for a batch of another kind, for padding on the left, and for labels that are shifted already.
    """
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        batch = {"input_ids": batch[0], "labels": batch[1]}
    if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= set(batch):
        shown = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise FieldError("batch", batch, EXPECTED, shown)
    ids_BT, targets_BT, mask_BT = batch["input_ids"], batch["labels"].clone(), batch.get("attention_mask")
    if mask_BT is not None and bool((mask_BT.bool().int().diff(dim=1) > 0).any()):
        raise FieldError("attention_mask", mask_BT, "expected padding on the right alone", "padding on the left")
    if _shifted(ids_BT, targets_BT):
        expected = "expected the token at t as label t; the module shifts them itself"
        raise FieldError("labels", targets_BT, expected, "the token at t + 1 as label t")
    targets_BT[:, 0] = -100  # nothing comes before it
    return Batch(ids_BT, targets_BT, segment_len)


def _shifted(ids_BT: Tensor, labels_BT: Tensor) -> bool:
    """Whether every label is the id of the next token, and not that of its own."""
    if ids_BT.shape != labels_BT.shape or ids_BT.shape[1] < 2:
        return False
    return torch.equal(labels_BT[:, :-1], ids_BT[:, 1:]) and not torch.equal(labels_BT, ids_BT)


class TokenMetrics:
    """Loss, accuracy and perplexity of all scored tokens of one dataloader; of numbers the loss alone."""

    # Tasks' metrics are logged as weighted means by ``self.log`` (a torchmetrics Metric inside Lightning): a MeanMetric
    # keeps fp32 sums of fp64 losses, so that the numbers of a double-precision run would change.

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.loss = MeanMetric().to(device)
        self.accuracy = MulticlassAccuracy(max(2, vocab_size), average="micro").to(device)

    def update(self, losses_N: Tensor, predicted_N: Tensor, targets_N: Tensor) -> None:
        """Add the tokens of a batch, which may have none. losses_N: cross-entropies."""
        if not len(targets_N):
            return
        self.loss.update(losses_N)
        if not targets_N.is_floating_point():
            self.accuracy.update(predicted_N, targets_N)

    def compute(self) -> dict[str, Tensor]:
        """Means over all tokens so far."""
        loss = self.loss.compute()
        if not self.accuracy.update_called:
            return {"loss": loss}
        return {"loss": loss, "accuracy": self.accuracy.compute(), "perplexity": loss.exp()}
