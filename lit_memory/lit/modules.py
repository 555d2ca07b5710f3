"""A LightningModule per architecture.

``LitARMT(width=64, ...)`` takes the fields of ``ARMT.Config`` and the optimizer's settings as keyword arguments. All
modules share
``LitMemory``: unroll over the batch's segments, cross-entropy (or, of numbers, squared error) on the positions that the
    task scores, its own metric.

Shape suffixes: B batch, T tokens, N scored positions, D width, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_memory.recurrence import cross_entropy, logits_per_token, map_state, state_tensors, unroll
from lit_memory.registry import build_config, load_class, weights_of
from lit_memory.tasks.base import Task
from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import ContinuousTokens, LossScored, Prompted

MOST_LOGITS = 2**25
"""How many are held at a time where all that is wanted of them is the loss: 128 MB of fp32."""
MOST_TRACED = 64
"""Memories of a stream that are diagnosed; the last batch may bring some more."""


def predicted(outputs_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The likeliest ids (N,); or numbers (N, H), where the targets are that, of which a model may say more."""
    return (
        outputs_NV[:, : targets_N.shape[1]].to(targets_N.dtype)
        if targets_N.is_floating_point()
        else outputs_NV.argmax(-1)
    )


def loss_of(outputs_NV: Tensor, targets_N: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of ids (N,), or squared error of numbers (N, H); with ``reduction`` as in torch."""
    if targets_N.is_floating_point():
        return F.mse_loss(outputs_NV[:, : targets_N.shape[1]], targets_N.to(outputs_NV.dtype), reduction=reduction)
    return F.cross_entropy(outputs_NV, targets_N, reduction=reduction)


class LitMemory(L.LightningModule):
    """Trains one segment-recurrent model on the batches of a ``LitData``.

    lr, weight_decay: of AdamW. schedule: "constant", "linear" or "cosine" (both to ``final_lr`` times lr at the last
        step), all after a linear
    warm-up over ``warmup`` steps or, if below 1, that share of the steps (``max_steps`` of the Trainer). frozen: parts
    of the model that keep their weights, "encoder" or "decoder.tokens" (None: none). bptt: segments that gradients
    cross (None: all).
    unroll_schedule: "sequential" or "diagonal". All other arguments are fields of the model's ``Config``;
        ``vocab_size`` and ``inputs``
    are taken from the data if the former is not given. Raises TypeError for an argument that the model does not have;
    its training raises ValueError for such a part.
    """

    model_name: ClassVar[str]

    def __init__(
        self,
        *,
        lr: float = 3e-4,
        weight_decay: float = 1e-3,
        schedule: str = "constant",
        warmup: float = 0,
        final_lr: float = 0.5,
        frozen: Sequence[str] | None = None,
        bptt: int | None = None,
        unroll_schedule: str = "sequential",
        **model: Any,
    ) -> None:
        super().__init__()
        self.model_class: type = load_class("model", self.model_name)
        build_config(self.model_class.Config, model)  # a wrong name fails here, not in fit()
        self.save_hyperparameters()
        self.model: Any = None
        self.span: tuple[int, int] | None = None  # first step and number of steps of the stage, set by a curriculum
        self.carried: dict[
            bool, list[Tensor]
        ] = {}  # training or not -> the state that the last batch of a stream has left
        if model.get("vocab_size"):
            self.configure_model()

    def configure_model(self) -> None:
        """Build the model; a hook of Lightning that runs once the data is known."""
        if self.model is None:
            options = {k: v for k, v in self.hparams.items() if k in self.model_class.Config.__dataclass_fields__}
            if not options.get("vocab_size"):
                options["vocab_size"] = self.hparams["vocab_size"] = self.data.task.vocab_size
                if isinstance(self.data.task, ContinuousTokens):
                    options["inputs"] = self.hparams["inputs"] = self.data.task.input_dim
            self.model = self.model_class(self.model_class.Config(**options))

    @property
    def data(self) -> Any:
        """The ``LitData`` that the trainer runs on."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        for weight in weights_of(self.model, self.hparams["frozen"] or ()).values():
            weight.requires_grad_(False)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        spared: set[str] = getattr(self.model, "no_weight_decay", set())
        groups: list[dict[str, Any]] = [{"params": [p for name, p in named.items() if name not in spared]}]
        if spared:
            groups.append({"params": [named[name] for name in named if name in spared], "weight_decay": 0.0})
        return torch.optim.AdamW(groups, lr=self.hparams["lr"], weight_decay=self.hparams["weight_decay"])

    def learning_rate(self, step: int) -> float:
        """Learning rate of a global step; a schedule that falls, and a warm-up given as a share, restart with every
        stage."""
        h = self.hparams
        first, steps = self.span or (0, self.trainer.estimated_stepping_batches)
        if math.isinf(steps) and (h["schedule"] != "constant" or 0 < h["warmup"] < 1):
            raise ValueError(
                f"schedule={h['schedule']!r}, warmup={h['warmup']}: a share of the steps needs Trainer(max_steps=...) or max_epochs"
            )
        in_stage = step - first
        done, warmup = (in_stage, h["warmup"] * steps) if h["warmup"] < 1 else (step, h["warmup"])
        factor = min(1.0, (done + 1) / warmup) if warmup > 0 else 1.0
        if h["schedule"] != "constant":
            share = min(1.0, in_stage / steps)
            fallen = share if h["schedule"] == "linear" else (1 - math.cos(math.pi * share)) / 2
            factor *= 1 - (1 - h["final_lr"]) * fallen
        return h["lr"] * factor

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.learning_rate(self.trainer.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["carried"] = [
            tensor.clone() for tensor in self.carried.get(True, [])
        ]  # of a slice, all that it is cut from would be saved

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.carried = {True: checkpoint.get("carried", [])}

    def resume(self, batch: Batch) -> Any:
        """The state that the batch before has left, detached, where this one goes on from it. Validations and tests
        have a stream of their own."""
        carried = iter(self.carried.get(self.training, []))
        return (
            map_state(lambda like: next(carried).to(like.device), self.model.init_state(len(batch.ids_BT)))
            if batch.continues
            else None
        )

    def read(self, batch: Batch) -> Any:
        """The state after the batch's context, or that a stream goes on from; None without one."""
        if batch.context == ():
            return self.resume(batch)
        if not isinstance(batch.context, tuple):
            return unroll(self.model, batch.context, keep=0).state
        bptt = self.hparams["bptt"] and max(self.hparams["bptt"] - 1, 1)  # what follows is one segment more
        return unroll(self.model, batch.context, keep=0, bptt=bptt, schedule=self.hparams["unroll_schedule"]).state

    def answers(self, batch: Batch, state: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states (N, D) that predict the scored positions, the targets (N,), and where those lie in (B, T);
        ``state`` is that of ``read``."""
        out = unroll(
            self.model,
            batch.ids_BT if batch.continues is None else batch.ids_BT[:, :-1],
            batch.segment_len,
            state=state,
            read_only=batch.read_only,
            keep=batch.read_only or None,
            bptt=self.hparams["bptt"],
            schedule=self.hparams["unroll_schedule"],
        )
        scored_BT = batch.scored_BT
        if batch.continues is not None:
            self.carried[self.training] = [tensor.detach() for tensor in state_tensors(out.state)]
            return out.hidden_BTD[scored_BT[:, 1:]], batch.targets_BT[scored_BT], scored_BT
        tail = scored_BT[:, scored_BT.shape[1] - out.hidden_BTD.shape[1] :]
        return out.hidden_BTD[:, :-1][tail[:, 1:]], batch.targets_BT[scored_BT], scored_BT

    def cross_entropy(self, hidden_ND: Tensor, targets_N: Tensor, reduction: str = "mean") -> Tensor:
        """The mean loss, or with ``reduction`` "none" every loss (N,). Where there are more than ``MOST_LOGITS``
        logits, they are computed part by part, and once more in the backward pass."""

        def loss(hidden_ND: Tensor, targets_N: Tensor, reduction: str) -> Tensor:
            if targets_N.is_floating_point():
                return loss_of(self.model.logits(hidden_ND), targets_N, reduction)
            return cross_entropy(self.model, hidden_ND, targets_N, reduction)

        rows = max(1, MOST_LOGITS // logits_per_token(self.model))
        if len(targets_N) <= rows:
            return loss(hidden_ND, targets_N, reduction)
        part = "sum" if reduction == "mean" else "none"
        pairs = zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
        losses = [
            checkpoint(loss, hidden, targets, part, use_reentrant=False, preserve_rng_state=False)
            for hidden, targets in pairs
        ]
        return torch.stack(losses).sum() / targets_N.numel() if reduction == "mean" else torch.cat(losses)

    def loss(self, batch: Batch) -> Tensor:
        """What training minimises."""
        hidden_ND, targets_N, _ = self.answers(batch, self.read(batch))
        return self.cross_entropy(hidden_ND, targets_N)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, batch_size=len(batch.ids_BT))
        return loss

    def evaluate(self, batch: Batch, task: Task) -> dict[str, tuple[Tensor, int]]:
        """Loss and the task's metrics: means over the batch, and the weights that they have in a mean over batches. Of
        a batch with prompts, what the model says by itself, token after token, is scored as well; where both scores
        have a name, that one counts."""
        state = self.read(batch)
        hidden_ND, targets_N, scored_BT = self.answers(batch, state)
        if isinstance(task, LossScored):
            losses_N = self.cross_entropy(hidden_ND, targets_N, "none")
            loss_BT = losses_N.new_full(scored_BT.shape, math.nan)
            loss_BT[scored_BT] = losses_N
            values = task.score_losses(loss_BT, batch)
            return {name: (value.mean(), len(value)) for name, value in values.items() if len(value)}
        logits_NV = self.model.logits(hidden_ND)
        predicted_BT = batch.targets_BT.clone()
        predicted_BT[scored_BT] = predicted(logits_NV, targets_N)
        scores = task.score(predicted_BT, batch)
        if batch.prompt_B is not None and isinstance(task, Prompted):
            scores |= task.score_text(self.say(batch, state, task), batch)
        means = {"loss": loss_of(logits_NV, targets_N)} | {name: value.mean() for name, value in scores.items()}
        return {name: (value, len(batch.ids_BT)) for name, value in means.items()} | self.diagnose(batch, state)

    def say(self, batch: Batch, state: Any, task: Prompted) -> Tensor:
        """What the model says after the prompts of a batch, token after token, (B, new_tokens); ``state`` is that of
        ``read``."""
        assert batch.prompt_B is not None
        mask_BT = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device) < batch.prompt_B[:, None]
        options = {"segment_len": batch.segment_len, "mask_BT": mask_BT, "state": state, "stop": task.stop_id}
        return self.model.generate(batch.ids_BT, task.new_tokens, **options)

    def diagnose(self, batch: Batch, state: Any) -> dict[str, tuple[Tensor, int]]:
        """More that ``evaluate`` returns, about what the model does with a batch. Default: nothing."""
        return {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        for name, (value, weight) in self.evaluate(batch, self.data.task).items():
            if "[" not in name:  # curves are for the test
                self.log(f"valid/{name}", value, batch_size=weight)

    def on_validation_epoch_end(self) -> None:
        self.log_summary(self.data.task, "valid/")

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs ``test/<metric>@<x>`` for every condition x of the test."""
        x, task = self.data.test_conditions[dataloader_idx]
        for name, (value, weight) in self.evaluate(batch, task).items():
            self.log(f"test/{name}@{x}", value, batch_size=weight, add_dataloader_idx=False)

    def on_test_epoch_end(self) -> None:
        for x, task in self.data.test_conditions:
            self.log_summary(task, "test/", f"@{x}")

    def log_summary(self, task: Task, prefix: str, suffix: str = "") -> None:
        """Log those of the task's metrics that follow from the means over a split, which have been logged under such
        names."""
        logged = {
            name: float(value)
            for name, value in self.trainer.callback_metrics.items()
            if name.startswith(prefix) and name.endswith(suffix)
        }
        found = task.summarize(
            {name.removeprefix(prefix).removesuffix(suffix): value for name, value in logged.items()}
        )
        self.log_dict({f"{prefix}{name}{suffix}": found[name] for name in task.metrics if name in found})


class LitTransformer(LitMemory):
    """Transformer without memory, or with a window of cached keys."""

    model_name = "transformer"


class LitXL(LitMemory):
    """Transformer-XL."""

    model_name = "xl"


class LitTokenMemory(LitMemory):
    """A ``LitMemory`` that logs, as ``valid/<name>``, the ``diagnostics`` of its model over the first segments of a
    validation.

    They are not computed without a logger.
    """

    def on_validation_epoch_start(self) -> None:
        self.traced: tuple[list[Tensor], Any] = [], None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        memories, state = self.traced
        read = batch.ids_BT.shape[1] - (batch.read_only * (batch.segment_len or 0) if batch.continues is None else 1)
        if self.loggers and read and len(memories) < MOST_TRACED and (batch_idx == 0 or batch.continues):
            more, state = self.model.trace(batch.ids_BT[:16, :read], batch.segment_len, state)
            self.traced = memories + more[bool(memories) :], state

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if len(self.traced[0]) > 2 and self.traced[0][0].numel():
            self.log_dict({f"valid/{name}": value for name, value in self.model.diagnostics(self.traced[0]).items()})


class LitRMT(LitTokenMemory):
    """Recurrent memory transformer."""

    model_name = "rmt"


class LitRMTXL(LitTokenMemory):
    """RMT or TARM on a Transformer-XL."""

    model_name = "rmt_xl"


class LitRMTR(LitMemory):
    """RMT with retrieval over its past memory states."""

    model_name = "rmt_r"


class LitPRMT(LitMemory):
    """Parallel-memory RMT."""

    model_name = "prmt"


class LitARMT(LitMemory):
    """Associative recurrent memory transformer."""

    model_name = "armt"


class LitTARM(LitTokenMemory):
    """RMT with an average over its memory tokens."""

    model_name = "tarm"


class LitMamba(LitMemory):
    """Selective state-space model."""

    model_name = "mamba"


class LitRWKV(LitMemory):
    """RWKV-5: linear attention with a decay per channel."""

    model_name = "rwkv"


class LitTitans(LitMemory):
    """A ``LitMemory`` that logs, as ``valid/<name>``, the ``diagnostics`` of its model on the first contexts of a
    validation.

    They are not computed without a logger.
    """

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if batch_idx == 0 and self.loggers:
            found = self.model.diagnostics(first_of(batch, 16))
            self.log_dict({f"valid/{name}": value for name, value in found.items()}, batch_size=1)


def first_of(batch: Batch, samples: int) -> tuple:
    """The segments that the first ``samples`` of a batch write, for ``unroll``; where they write none, the one that is
    read."""
    segments = batch.written() or [batch.ids_BT[:, : batch.segment_len]]
    return tuple(
        tuple(part[:samples] for part in segment) if isinstance(segment, tuple) else segment[:samples]
        for segment in segments
    )


class LitLMM(LitTitans):
    """Titans' neural memory without attention."""

    model_name = "lmm"


class LitMAC(LitTitans):
    """Titans, memory as context."""

    model_name = "mac"


class LitMAG(LitTitans):
    """Titans, memory as gate."""

    model_name = "mag"


class LitMAL(LitTitans):
    """Titans, memory as layer."""

    model_name = "mal"
