"""LightningModules of models that read lines: losses of their own, an answer from every hop, and which lines were
found.

Shape suffixes: B batch, T tokens, N lines, X real lines of a batch, H hops, R tails, C width of a latent.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.lit.modules import LitMemory
from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import Prompted
from lit_memory.util.checks import FieldError

OF_SUPPORT = {"support", "support_autoencoding"}
"""Losses that reconstruct supporting lines."""


class Asked(NamedTuple):
    """The episode of a batch's context, and what its questions find (``Readouts``): None where not all that is left to
    read are tails."""

    state: Any
    found: Any


class LitLines(LitMemory):
    """A ``LitMemory`` that weighs several losses: ``<name>_loss`` is the weight of ``losses()[name]``, for the model's
    ``loss_names``.

    Where all that follows a context are its tails (``Batch.read_only``), the memory is read once for all of them. One
    tail is answered by the last hop; as many tails as there are hops by one hop each; with one hop it answers all.
    Validation and test add ``lines``, how many the memory holds, the question aside, and ``hop<i>_support``: the share
    of the samples of which ``meta["support"]`` (B, H) tells the line that supports hop i, counted back from the
    question, whose hop i finds it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.loss_names: tuple[str, ...] = self.model_class.loss_names  # type: ignore[attr-defined]
        weights = {f"{name}_loss": self.hparams[f"{name}_loss"] for name in self.loss_names}
        for name, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise FieldError(name, weight, "expected a finite number, 0 or more")
        if not any(weights.values()):
            raise FieldError(
                "answer_loss",
                self.hparams["answer_loss"],
                f"expected more than 0 for it or for another one of {', '.join(weights)}",
            )
        self.wanted = [name for name in self.loss_names if weights[f"{name}_loss"]]

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The losses that have a weight, by name; there is one for every batch."""
        raise NotImplementedError

    def weighted(self, losses: dict[str, Tensor]) -> Tensor:
        return torch.stack([self.hparams[f"{name}_loss"] * loss for name, loss in losses.items()]).sum()

    def loss(self, batch: Batch) -> Tensor:
        return self.weighted(self.losses(batch))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses = self.losses(batch)
        total = self.weighted(losses)
        for name, loss in {"loss": total, **{f"{name}_loss": loss for name, loss in losses.items()}}.items():
            self.log(f"train/{name}", loss, batch_size=len(batch.ids_BT))
        return total

    def read(self, batch: Batch) -> Asked:
        state = super().read(batch)
        tails = batch.read_only * (batch.segment_len or 0) == batch.ids_BT.shape[1]
        return Asked(
            state,
            self.model.readouts(state)
            if state is not None and tails and getattr(self.model.config, "memory", True)
            else None,
        )

    def tails(self, batch: Batch, asked: Asked) -> tuple[Batch, Any]:
        """A batch with a sample for every tail, and the state that each of them is answered from; the batch and its
        state if nothing is found."""
        if asked.found is None:
            return batch, asked.state
        tails, hops = batch.read_only, asked.found.latents_BHC.shape[1]
        if 1 not in (tails, hops) and tails != hops:
            raise FieldError(
                "read_only", tails, f"expected 1 tail, which the last hop answers, or {hops}, one for each hop"
            )
        latents_BRC = (
            asked.found.latents_BHC if tails == hops else asked.found.latents_BHC[:, -1:].expand(-1, tails, -1)
        )
        ids_XT, targets_XT = (t.unflatten(1, (tails, -1)).flatten(0, 1) for t in (batch.ids_BT, batch.targets_BT))
        prompt_X = None if batch.prompt_B is None else batch.prompt_B.repeat_interleave(tails)
        alone = replace(
            batch, ids_BT=ids_XT, targets_BT=targets_XT, segment_len=None, read_only=1, context=(), prompt_B=prompt_X
        )
        return alone, self.model.state_from_latents(latents_BRC.flatten(0, 1))

    def answers(self, batch: Batch, state: Asked) -> tuple[Tensor, Tensor, Tensor]:
        hidden_ND, targets_N, _ = super().answers(*self.tails(batch, state))
        return hidden_ND, targets_N, batch.scored_BT

    def say(self, batch: Batch, state: Asked, task: Prompted) -> Tensor:
        """(B, R * new_tokens): what is said after the prompt of every tail."""
        said = super().say(*self.tails(batch, state), task)
        return said.unflatten(0, (len(batch.ids_BT), -1)).flatten(1)

    def diagnose(self, batch: Batch, state: Asked) -> dict[str, tuple[Tensor, int]]:
        if state.found is None:
            return {}
        support_BH, age_BN = batch.meta.get("support"), state.found.age_BN
        out = {"lines": ((age_BN > 0).sum(1).float().mean(), len(age_BN))}
        if support_BH is None:
            return out
        for h, (support_B, nearest_B) in enumerate(
            zip(support_BH.unbind(1), state.found.nearest_BH.unbind(1), strict=False)
        ):
            told_B = support_B > 0
            if count := int(told_B.sum()):
                out[f"hop{h + 1}_support"] = ((nearest_B == support_B)[told_B].float().mean(), count)
        return out

    def lines(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The lines that a training batch has the model write, and their masks, (B, N, T). Raises ValueError for a
        batch without any."""
        if not (segments := batch.written()):
            raise ValueError(
                "lines: expected a batch that has the model write some, but it has tails alone; leave only answer_loss"
            )
        cut = [self.model.cut(*(segment if isinstance(segment, tuple) else (segment,))) for segment in segments]
        size, length = len(batch.ids_BT), max(ids_BNT.shape[2] for ids_BNT, _ in cut)
        ids, masks = (
            [F.pad(t, (0, length - t.shape[2], 0, 0, 0, size - len(t))) for t in parts]
            for parts in zip(*cut, strict=True)
        )
        return torch.cat(ids, dim=1), torch.cat(masks, dim=1)

    @staticmethod
    def with_apart(batch: Batch, ids_BNT: Tensor, mask_BNT: Tensor) -> tuple[Tensor, Tensor]:
        """Lines of the contexts of a batch behind those of ``Batch.auxiliary_lines``, if it has any."""
        if batch.auxiliary_lines is None:
            return ids_BNT, mask_BNT
        apart = (F.pad(t, (0, ids_BNT.shape[2] - t.shape[2])) for t in batch.auxiliary_lines)
        ids_BNT, mask_BNT = (torch.cat(both, dim=1) for both in zip(apart, (ids_BNT, mask_BNT), strict=True))
        return ids_BNT, mask_BNT


class LitLarimar(LitLines):
    """Decoder that a latent from an episodic memory conditions.

    answer_loss: weight of the task's own loss. memory_loss, autoencoding_loss, language_loss, keys_loss: those of
        ``Larimar.losses`` on all lines
    that a batch writes, the published pre-training with weights 1, 1, 1 and 0.5 (and 0 for answers). Default: answers
    alone.
    """

    model_name = "larimar"

    def __init__(
        self,
        *,
        answer_loss: float = 1.0,
        memory_loss: float = 0.0,
        autoencoding_loss: float = 0.0,
        language_loss: float = 0.0,
        keys_loss: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if keys_loss and options.get("keys") == "one_hot":
            raise FieldError("keys_loss", keys_loss, "one-hot keys have no distribution of their own; expected 0")

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        out = {}
        if "answer" in self.wanted:
            hidden_ND, targets_N, _ = self.answers(batch, self.read(batch))
            out["answer"] = self.cross_entropy(hidden_ND, targets_N)
        if self.wanted != ["answer"]:
            out |= self.model.losses(*self.with_apart(batch, *self.lines(batch)), names=self.wanted)
        return out


class LitMemReasoner(LitLines):
    """Larimar with ordered lines, hops and an unordered readout.

    answer_loss: weight of the task's own loss, every tail from its hop. order_loss: delta, of
        ``MemReasoner.order_loss`` on the samples of which
    supporting lines are told (SF). autoencoding_loss: rho, of reconstructing every line that a batch writes, or that
    comes apart, from its own latent; in the paper, of as many chunks of Wikipedia alone. support_loss,
    support_autoencoding_loss: alpha_SF and beta_SF, of reconstructing the supporting lines from what their hops find,
        and from their own latents (SF*). The paper tells no weight.
    """

    model_name = "memreasoner"

    def __init__(
        self,
        *,
        answer_loss: float = 1.0,
        order_loss: float = 1.0,
        autoencoding_loss: float = 0.0,
        support_loss: float = 0.0,
        support_autoencoding_loss: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        wanted = set(self.wanted)
        if wanted == {"autoencoding"}:
            return self.reconstructions(batch, Asked(None, None), None, wanted)
        asked, told_BH = self.read(batch), batch.meta.get("support")
        if asked.found is None or told_BH is None or not bool(told_BH.any()):
            wanted -= {"order", *OF_SUPPORT}
        out = {}
        if "answer" in wanted or not wanted:  # of a batch that no loss is about, the answers, whose weight is 0
            hidden_ND, targets_N, _ = self.answers(batch, asked)
            out["answer"] = self.cross_entropy(hidden_ND, targets_N)
        if told_BH is not None and wanted & {"order", *OF_SUPPORT}:
            out["order"] = self.model.order_loss(asked.found, told_BH)  # which also checks that the lines are there
        if wanted & {"autoencoding", *OF_SUPPORT}:
            out |= self.reconstructions(batch, asked, told_BH, wanted)
        return {name: out[name] for name in self.loss_names if name in out and name in wanted | {"answer"}}

    def reconstructions(
        self, batch: Batch, asked: Asked, told_BH: Tensor | None, wanted: set[str]
    ) -> dict[str, Tensor]:
        """Those of the losses that reconstruct lines."""
        ids_BNT, mask_BNT = self.lines(batch)
        real_BN, out = mask_BNT.any(-1), {}
        if "autoencoding" in wanted:
            out["autoencoding"] = self.model.autoencoding(
                *(t.flatten(0, 1) for t in self.with_apart(batch, ids_BNT, mask_BNT))
            )
        if told_BH is not None and wanted & OF_SUPPORT:
            b, hop = told_BH.nonzero(as_tuple=True)
            x = real_BN.sum(1).cumsum(0)[b] - 1 - told_BH[b, hop]  # the question is the last line of a sample
            ids_XT, mask_XT = ids_BNT[real_BN][x], mask_BNT[real_BN][x]
            if "support" in wanted:
                out["support"] = self.model.reconstruction(ids_XT, mask_XT, asked.found.latents_BHC[b, hop])
            if "support_autoencoding" in wanted:
                out["support_autoencoding"] = self.model.autoencoding(ids_XT, mask_XT)
        return out
