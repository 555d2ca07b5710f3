"""LightningModules of models that read lines: several losses, an answer from every hop, and the lines that were found.

Shape suffixes: B batch, T tokens, N lines, X real lines of a batch, H hops, R tails, C width of a latent.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.lit.losses import hidden_loss
from lit_memory.lit.modules import AnyBatch, LitMemory
from lit_memory.lit.scores import Mean, Means
from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import Prompted
from lit_memory.util.checks import FieldError

SUPPORT_LOSSES = {"support", "support_autoencoding"}
"""Losses that reconstruct supporting lines."""


class Recall(NamedTuple):
    """The memory after a context, and what the questions read from it (``Readouts``).

    readouts: None where something other than tails is left to read.
    """

    state: Any
    readouts: Any


class LitLines(LitMemory):
    """Trains a model that has several losses (``loss_names``), each with a weight of its own, ``<name>_loss``.

    Where nothing but tails follows a context (``Batch.read_only``), the memory is read once for all of them. One tail
    is answered by the last hop; as many tails as there are hops by one hop each; if there is one hop, it answers all.
    Validation and test add ``lines``, the lines that the memory holds besides the question, and ``hop<i>_support``:
    the share of the samples whose hop i finds its supporting line, among those whose ``meta["support"]`` (B, H) has
    that line, counted back from the question.
    """

    default_losses: ClassVar[Mapping[str, float]] = {"answer": 1.0}
    """Loss -> its default weight, for the losses of ``model_class.loss_names``; "answer" is the task's own loss."""

    def __init__(self, **options: Any) -> None:
        weights = {f"{name}_loss": weight for name, weight in self.default_losses.items()}
        options = weights | options  # Lightning reads the hyper-parameters from this variable
        super().__init__(**{name: value for name, value in options.items() if name not in weights})
        self.loss_weights = {name: options[f"{name}_loss"] for name in self.default_losses}
        for name, weight in self.loss_weights.items():
            if not 0 <= weight < math.inf:
                raise FieldError(f"{name}_loss", weight, "expected a finite number, 0 or more")
        if not any(self.loss_weights.values()):
            names = ", ".join(weights)
            expected = f"expected more than 0 for it or for another one of {names}"
            raise FieldError("answer_loss", self.loss_weights["answer"], expected)
        self.active_losses = [name for name, weight in self.loss_weights.items() if weight]

    # Losses

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The losses that have a weight, by name; at least one for every batch. Default: the task's own, and those of
        ``model.losses`` on all lines that a batch writes."""
        found = {}
        if "answer" in self.active_losses:
            found["answer"] = self.answer_loss(batch, self.read_context(batch))
        if self.active_losses != ["answer"]:
            lines = self.with_auxiliary_lines(batch, *self.written_lines(batch))
            found |= self.model.losses(*lines, names=self.active_losses)
        return found

    def answer_loss(self, batch: Batch, state: Recall) -> Tensor:
        """The task's own loss."""
        hidden_ND, targets_N = self.read_targets(batch, state)
        return hidden_loss(self.model, hidden_ND, targets_N)

    def weighted_sum(self, losses: dict[str, Tensor]) -> Tensor:
        return torch.stack([self.loss_weights[name] * loss for name, loss in losses.items()]).sum()

    def loss(self, batch: Batch) -> Tensor:
        return self.weighted_sum(self.losses(batch))

    def training_step(self, batch: AnyBatch, batch_idx: int) -> Tensor:
        batch = self.as_batch(batch)
        losses = self.losses(batch)
        if "answer" in losses:  # the others are means over lines, of which all parts of a batch have about as many
            losses["answer"] = losses["answer"] * batch.share
        total = self.weighted_sum(losses)
        named = {f"{name}_loss": losses.get(name) for name in self.loss_weights}
        self.log_losses({"loss": total, **named}, len(batch.ids_BT))
        return total

    # Reading a batch

    def read_context(self, batch: Batch) -> Recall:
        state = super().read_context(batch)
        only_tails = batch.read_only * (batch.segment_len or 0) == batch.ids_BT.shape[1]
        if state is None or not only_tails or not getattr(self.model.config, "memory", True):
            return Recall(state, None)
        return Recall(state, self.model.readouts(state))

    def split_tails(self, batch: Batch, recall: Recall) -> tuple[Batch, Any]:
        """A batch with a sample for every tail, and the state that each of them is answered from; without readouts the
        batch itself and its state."""
        if recall.readouts is None:
            return batch, recall.state
        latents_BHC, tails = recall.readouts.latents_BHC, batch.read_only
        hops = latents_BHC.shape[1]
        if 1 not in (tails, hops) and tails != hops:
            expected = f"expected 1 tail, which the last hop answers, or {hops}, one for each hop"
            raise FieldError("read_only", tails, expected)
        latents_BRC = latents_BHC if tails == hops else latents_BHC[:, -1:].expand(-1, tails, -1)
        ids_XT, targets_XT = (t.unflatten(1, (tails, -1)).flatten(0, 1) for t in (batch.ids_BT, batch.targets_BT))
        prompt_X = None if batch.prompt_B is None else batch.prompt_B.repeat_interleave(tails)
        changes = {"segment_len": None, "read_only": 1, "context": (), "prompt_B": prompt_X}
        split = replace(batch, ids_BT=ids_XT, targets_BT=targets_XT, **changes)
        return split, self.model.state_from_latents(latents_BRC.flatten(0, 1))

    def read_targets(self, batch: Batch, state: Recall) -> tuple[Tensor, Tensor]:
        return super().read_targets(*self.split_tails(batch, state))

    def generate_answers(self, batch: Batch, state: Recall, task: Prompted) -> Tensor:
        """Tokens that the model generates after the prompts of all tails, (B, R * new_tokens)."""
        generated = super().generate_answers(*self.split_tails(batch, state), task)
        return generated.unflatten(0, (len(batch.ids_BT), -1)).flatten(1)

    def memory_metrics(self, batch: Batch, state: Recall) -> Means:
        if state.readouts is None:
            return {}
        age_BN, nearest_BH = state.readouts.age_BN, state.readouts.nearest_BH
        means = {"lines": Mean.of_samples((age_BN > 0).sum(1).float())}
        support_BH = batch.meta.get("support")
        if support_BH is None:
            return means
        for hop in range(min(support_BH.shape[1], nearest_BH.shape[1])):
            support_B = support_BH[:, hop]
            supervised_B = support_B > 0
            if supervised_B.any():
                hits_X = (nearest_BH[:, hop] == support_B)[supervised_B]
                means[f"hop{hop + 1}_support"] = Mean.of_samples(hits_X.float())
        return means

    # Lines

    def written_lines(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The lines that a training batch has the model write, and their masks, (B, N, T). Raises ValueError for a
        batch without any."""
        segments = batch.written()
        if not segments:
            expected = "expected a batch that has the model write some, but it has tails alone; leave only answer_loss"
            raise ValueError(f"lines: {expected}")
        parts = [self.model.cut(*(segment if isinstance(segment, tuple) else (segment,))) for segment in segments]
        size, length = len(batch.ids_BT), max(ids_BNT.shape[2] for ids_BNT, _ in parts)

        def joined(tensors: list[Tensor]) -> Tensor:
            """All segments side by side, with empty lines for the samples that a segment lacks."""
            padded = [F.pad(t, (0, length - t.shape[2], 0, 0, 0, size - len(t))) for t in tensors]
            return torch.cat(padded, dim=1)

        return joined([ids_BNT for ids_BNT, _ in parts]), joined([mask_BNT for _, mask_BNT in parts])

    @staticmethod
    def with_auxiliary_lines(batch: Batch, ids_BNT: Tensor, mask_BNT: Tensor) -> tuple[Tensor, Tensor]:
        """Lines of the contexts of a batch behind its auxiliary lines (``Batch.auxiliary_lines``), if it has any."""
        if batch.auxiliary_lines is None:
            return ids_BNT, mask_BNT
        missing = ids_BNT.shape[2] - batch.auxiliary_lines[0].shape[2]
        apart_ids_BNT, apart_mask_BNT = (F.pad(t, (0, missing)) for t in batch.auxiliary_lines)
        return torch.cat([apart_ids_BNT, ids_BNT], dim=1), torch.cat([apart_mask_BNT, mask_BNT], dim=1)


class LitLarimar(LitLines):
    """LightningModule of ``Larimar``: a decoder that a latent from an episodic memory conditions.

    The published pre-training has the weights 0 for answers, then 1, 1, 1 and 0.5. Default: answers alone.

    answer_loss: Weight of the task's own loss.
    memory_loss: Weight of reconstructing every line from what its latent reads out of the memory.
    autoencoding_loss: Weight of reconstructing every line from its own latent.
    language_loss: Weight of reconstructing every line from a zero latent.
    keys_loss: Weight of the KL term of the keys; 0 with one-hot keys, which have no distribution.
    """

    model_name = "larimar"
    default_losses: ClassVar[Mapping[str, float]] = {
        "answer": 1.0,
        "memory": 0.0,
        "autoencoding": 0.0,
        "language": 0.0,
        "keys": 0.0,
    }

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.loss_weights["keys"] and options.get("keys") == "one_hot":
            expected = "one-hot keys have no distribution of their own; expected 0"
            raise FieldError("keys_loss", self.loss_weights["keys"], expected)


class LitMemReasoner(LitLines):
    """LightningModule of ``MemReasoner``: Larimar with ordered lines, hops and an unordered readout.

    The paper does not print its weights.

    answer_loss: Weight of the task's own loss, every tail from its hop.
    order_loss: delta, of finding the supporting lines, on the samples that have supervision (SF).
    autoencoding_loss: rho, of reconstructing every written or auxiliary line from its own latent (the paper: as many
        chunks of Wikipedia alone).
    support_loss: alpha_SF, of reconstructing the supporting lines from what their hops find.
    support_autoencoding_loss: beta_SF, of reconstructing the supporting lines from their own latents (SF*).
    """

    model_name = "memreasoner"
    default_losses: ClassVar[Mapping[str, float]] = {
        "answer": 1.0,
        "order": 1.0,
        "autoencoding": 0.0,
        "support": 0.0,
        "support_autoencoding": 0.0,
    }

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        active = set(self.active_losses)
        if active == {"autoencoding"}:
            return self.reconstructions(batch, Recall(None, None), None, active)
        recall, support_BH = self.read_context(batch), batch.meta.get("support")
        if recall.readouts is None or support_BH is None or not bool(support_BH.any()):
            active -= {"order", *SUPPORT_LOSSES}
        found = {}
        if "answer" in active or not active:  # for a batch that no loss is about, the answers, whose weight is 0
            found["answer"] = self.answer_loss(batch, recall)
        if support_BH is not None and active & {"order", *SUPPORT_LOSSES}:
            found["order"] = self.model.order_loss(recall.readouts, support_BH)  # also checks that the lines are there
        if active & {"autoencoding", *SUPPORT_LOSSES}:
            found |= self.reconstructions(batch, recall, support_BH, active)
        return {name: found[name] for name in self.loss_weights if name in found and name in active | {"answer"}}

    def reconstructions(
        self, batch: Batch, recall: Recall, support_BH: Tensor | None, active: set[str]
    ) -> dict[str, Tensor]:
        """The active losses that reconstruct lines."""
        ids_BNT, mask_BNT = self.written_lines(batch)
        found = {}
        if "autoencoding" in active:
            all_ids_BNT, all_mask_BNT = self.with_auxiliary_lines(batch, ids_BNT, mask_BNT)
            known = self.known_latents(recall, mask_BNT, all_ids_BNT.shape[1])
            lines = all_ids_BNT.flatten(0, 1), all_mask_BNT.flatten(0, 1)
            found["autoencoding"] = self.model.autoencoding(*lines, known)
        if support_BH is not None and active & SUPPORT_LOSSES:
            real_BN = mask_BNT.any(-1)
            sample, hop = support_BH.nonzero(as_tuple=True)
            question = real_BN.sum(1).cumsum(0)[sample] - 1  # the last line of a sample, among the real ones
            line = question - support_BH[sample, hop]
            ids_XT, mask_XT = ids_BNT[real_BN][line], mask_BNT[real_BN][line]
            if "support" in active:
                latents_XC = recall.readouts.latents_BHC[sample, hop]
                found["support"] = self.model.reconstruction(ids_XT, mask_XT, latents_XC)
            if "support_autoencoding" in active:
                found["support_autoencoding"] = self.model.autoencoding(ids_XT, mask_XT)
        return found

    def known_latents(self, recall: Recall, mask_BNT: Tensor, columns: int) -> tuple[Tensor, Tensor] | None:
        """The latents (K, C) that the memory has of the written lines, and their indices among all lines of a batch,
        ``columns`` a sample, of which the written ones come last. None where gradients would not reach the encoder."""
        if recall.readouts is None or self.hparams["bptt"]:
            return None
        real_BN = mask_BNT.any(-1)
        index_K = F.pad(real_BN, (columns - real_BN.shape[1], 0)).flatten().nonzero().squeeze(1)
        return index_K, recall.state.lines_BNE[recall.state.real_BN]
