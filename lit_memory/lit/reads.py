"""How a ``LitMemory`` reads a batch: the context, the scored positions, and the loss of a training step.

Shape suffixes: B batch, T tokens, N scored positions, D width.
"""

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_memory.lit.devices import gathered
from lit_memory.lit.losses import hidden_loss
from lit_memory.recurrence import ReplayedLoss, Unrolled, can_record, map_state, state_tensors, unroll
from lit_memory.tasks.batch import Batch


def replayable(batch: Batch) -> bool:
    """Whether the loss of a batch depends on its tensors alone: it is none of a stream, and has them all."""
    return batch.continues is None and isinstance(batch.context, tuple)


def scored_rows(batch: Batch, read: slice) -> tuple[Tensor, Tensor]:
    """Where the scored positions of a batch are predicted, as rows of the hidden states (B * T, D) of the tokens
    ``read``, and their targets (N,). Raises ValueError for a target that nothing read predicts."""
    sample_N, place_N = batch.scored_BT.nonzero(as_tuple=True)
    first, end, _ = read.indices(batch.ids_BT.shape[1])
    if len(place_N) and (place := int(place_N.min())) <= first:
        reason = f"a target at token {place}, where those behind token {first} alone are predicted"
        raise ValueError(f"targets_BT: {reason}; expected -100 up to there")
    return sample_N * (end - first) + place_N - 1 - first, batch.targets_BT[sample_N, place_N]


def filled_up(part_N: Tensor) -> Tensor:
    """With zeros behind, to one of four lengths between two powers of two."""
    step = max(1, (1 << len(part_N).bit_length()) // 8)
    return torch.cat([part_N, part_N.new_zeros(-len(part_N) % step, *part_N.shape[1:])])


class Reads(L.LightningModule):
    """Reads batches with a ``model``, in the order of ``unroll_schedule``."""

    model: Any
    devices: int

    def __init__(self) -> None:
        super().__init__()
        self.carried: dict[bool, list[Tensor]] = {}  # training or not -> the state after the last batch of a stream
        self.replayed: ReplayedLoss | None = None

    # The state that a stream carries from batch to batch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Cloned: of a slice, torch would save all that it is cut from.
        own = [tensor.clone() for tensor in self.carried.get(True, [])]
        checkpoint["carried"] = own if self.devices == 1 else gathered([tensor.cpu() for tensor in own])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        carried = checkpoint.get("carried", [])
        parts = carried if carried and isinstance(carried[0], list) else [carried]  # of several devices, or of one
        fits = len(parts) == self.devices
        if any(parts) and self._trainer and not fits:
            reason = f"the memory of its stream is that of {len(parts)} devices"
            raise ValueError(f"checkpoint: {reason}; expected those of {self.devices}, which train it here")
        self.carried = {True: parts[self.global_rank] if fits else []}

    def carried_state(self, batch: Batch) -> Any:
        """The detached state after the last batch of the stream that ``batch`` continues; None where it begins one.
        Validations and tests have a stream of their own."""
        if not batch.continues:
            return None
        carried = iter(self.carried.get(self.training, []))
        return map_state(lambda like: next(carried).to(like.device), self.model.init_state(len(batch.ids_BT)))

    def read_context(self, batch: Batch) -> Any:
        """The state after the batch's context, or the carried one of a stream; None without both."""
        if batch.context == ():
            return self.carried_state(batch)
        if not isinstance(batch.context, tuple) and not self.training:  # in constant memory, without gradients
            schedule = "sequential" if self.hparams["unroll_schedule"] == "sequential" else "auto"
            return unroll(self.model, batch.context, keep=0, schedule=schedule).state
        bptt = self.hparams["bptt"] and max(self.hparams["bptt"] - 1, 1)  # what follows is one segment more
        return unroll(self.model, batch.context, keep=0, bptt=bptt, **self.order()).state

    def order(self) -> dict[str, Any]:
        return {"schedule": self.hparams["unroll_schedule"], "checkpoint_segments": self.hparams["checkpoint_segments"]}

    def read(self, batch: Batch, ids_BT: Tensor, state: Any) -> Unrolled:
        """Hidden states of the segments that hold the targets of a batch, and the state after it."""
        return unroll(
            self.model,
            ids_BT,
            batch.segment_len,
            state=state,
            read_only=batch.read_only,
            keep=batch.read_only or None,
            bptt=self.hparams["bptt"],
            **self.order(),
        )

    def read_targets(self, batch: Batch, state: Any) -> tuple[Tensor, Tensor]:
        """Hidden states (N, D) that predict the scored positions, and their targets (N,). state: after the context."""
        if batch.continues is None:
            hidden_BTD = self.read(batch, batch.ids_BT, state).hidden_BTD
            row_N, targets_N = scored_rows(batch, slice(-hidden_BTD.shape[1], None))
        else:  # the last token of a stream's batch is the first of the next one
            hidden_BTD, after = self.read(batch, batch.ids_BT[:, :-1], state)
            self.carried[self.training] = [tensor.detach() for tensor in state_tensors(after)]
            row_N, targets_N = scored_rows(batch, slice(-1))
        return hidden_BTD.flatten(0, 1)[row_N], targets_N

    def loss(self, batch: Batch) -> Tensor:
        """The loss that training minimises."""
        if self.hparams["replay"] and can_record(batch.ids_BT) and replayable(batch):
            return self.replayed_loss(batch)
        hidden_ND, targets_N = self.read_targets(batch, self.read_context(batch))
        return hidden_loss(self.model, hidden_ND, targets_N)

    def replayed_loss(self, batch: Batch) -> Tensor:
        """``loss`` by replay.

        Batches get few shapes: all samples are in every segment, and the scored positions, found before, are filled up.
        """
        weights = [p for p in self.model.parameters() if p.requires_grad]
        if self.replayed is None or list(map(id, weights)) != list(map(id, self.replayed.weights)):
            self.replayed = ReplayedLoss(weights)  # a callback may have unfrozen some
        batch = batch.level()
        kept = batch.read_only * (batch.segment_len or 0)
        row_N, targets_N = scored_rows(batch, slice(-kept or None, None))
        weight_N = torch.full_like(row_N, 1 / max(len(row_N), 1), dtype=self.replayed.weights[0].dtype)

        def loss(inputs: tuple[Any, ...]) -> Tensor:
            ids_BT, context, row_N, targets_N, weight_N = inputs
            fixed = replace(batch, ids_BT=ids_BT, context=context)
            hidden_ND = self.read(fixed, ids_BT, self.read_context(fixed)).hidden_BTD.flatten(0, 1)[row_N]
            losses_N = hidden_loss(self.model, hidden_ND, targets_N, "none").reshape(len(row_N), -1).mean(1)
            return (losses_N * weight_N).sum()

        scored = tuple(filled_up(part) for part in (row_N, targets_N, weight_N))
        kind = batch.segment_len, batch.read_only, torch.is_autocast_enabled(batch.ids_BT.device.type)
        return self.replayed(loss, (batch.ids_BT, batch.context, *scored), kind)
