"""A LightningModule per architecture.

``LitARMT(width=64, ...)`` takes the fields of ``ARMT.Config`` and the optimizer's settings as keyword arguments. All modules share
``LitMemory``: unroll over the batch's segments, cross-entropy on the positions that the task scores, the task's own metric.

Shape suffixes: B batch, T tokens, N scored positions, V vocabulary.
"""

import math
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.recurrence import unroll
from lit_memory.registry import build_config, load_class
from lit_memory.tasks.base import Batch


class LitMemory(L.LightningModule):
    """Trains one segment-recurrent model on the batches of a ``LitData``.

    lr, weight_decay: of AdamW. schedule: "constant" or "linear" (to ``final_lr`` times lr at the last step), both after a linear
    warm-up over ``warmup`` steps or, if below 1, that share of the steps (``max_steps`` of the Trainer). bptt: segments that gradients cross (None: all).
    unroll_schedule: "sequential" or "diagonal". All other arguments are fields of the model's ``Config``; ``vocab_size`` is
    taken from the data if it is not given. Raises TypeError for an argument that the model does not have.
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
        if model.get("vocab_size"):
            self.configure_model()

    def configure_model(self) -> None:
        """Build the model; a hook of Lightning that runs once the data is known."""
        if self.model is None:
            options = {k: v for k, v in self.hparams.items() if k in self.model_class.Config.__dataclass_fields__}
            if not options.get("vocab_size"):
                options["vocab_size"] = self.hparams["vocab_size"] = self.data.task.vocab_size
            self.model = self.model_class(self.model_class.Config(**options))

    @property
    def data(self) -> Any:
        """The ``LitData`` that the trainer runs on."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named, spared = dict(self.model.named_parameters()), self.model.undecayed
        groups: list[dict[str, Any]] = [{"params": [p for name, p in named.items() if name not in spared]}]
        if spared:
            groups.append({"params": [named[name] for name in named if name in spared], "weight_decay": 0.0})
        return torch.optim.AdamW(groups, lr=self.hparams["lr"], weight_decay=self.hparams["weight_decay"])

    def learning_rate(self, step: int) -> float:
        """Learning rate of a global step; a linear schedule, and a warm-up given as a share, restart with every stage."""
        h = self.hparams
        first, steps = self.span or (0, self.trainer.estimated_stepping_batches)
        if math.isinf(steps) and (h["schedule"] == "linear" or 0 < h["warmup"] < 1):
            raise ValueError(f"schedule={h['schedule']!r}, warmup={h['warmup']}: a share of the steps needs Trainer(max_steps=...) or max_epochs")
        in_stage = step - first
        done, warmup = (in_stage, h["warmup"] * steps) if h["warmup"] < 1 else (step, h["warmup"])
        factor = min(1.0, (done + 1) / warmup) if warmup > 0 else 1.0
        if h["schedule"] == "linear":
            factor *= 1 - (1 - h["final_lr"]) * min(1.0, in_stage / steps)
        return h["lr"] * factor

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.learning_rate(self.trainer.global_step)

    def read(self, batch: Batch) -> Any:
        """The state after the batch's context; None without one."""
        if batch.context == ():
            return None
        if not isinstance(batch.context, tuple):
            return unroll(self.model, batch.context, keep=0).state
        bptt = self.hparams["bptt"] and max(self.hparams["bptt"] - 1, 1)  # what follows is one segment more
        return unroll(self.model, batch.context, keep=0, bptt=bptt, schedule=self.hparams["unroll_schedule"]).state

    def answers(self, batch: Batch, state: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (N, V) and targets (N,) of the scored positions, and where those lie in (B, T); ``state`` is that of ``read``."""
        out = unroll(
            self.model,
            batch.ids_BT,
            batch.segment_len,
            state=state,
            read_only=batch.read_only,
            keep=batch.read_only or None,
            bptt=self.hparams["bptt"],
            schedule=self.hparams["unroll_schedule"],
        )
        scored_BT = batch.targets_BT != -100
        tail = scored_BT[:, scored_BT.shape[1] - out.hidden_BTD.shape[1] :]
        return self.model.logits(out.hidden_BTD[:, :-1][tail[:, 1:]]), batch.targets_BT[scored_BT], scored_BT

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits_NV, targets_N, _ = self.answers(batch, self.read(batch))
        loss = F.cross_entropy(logits_NV, targets_N)
        self.log("train/loss", loss, batch_size=len(batch.ids_BT))
        return loss

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Loss and the task's metrics, means over the batch. A batch with prompts is scored by what the model says, token after token."""
        task, state = self.data.task, self.read(batch)
        logits_NV, targets_N, scored_BT = self.answers(batch, state)
        if batch.prompt_B is None:
            predicted_BT = batch.targets_BT.clone()
            predicted_BT[scored_BT] = logits_NV.argmax(-1)
            scores = task.score(predicted_BT, batch)
        else:
            mask_BT = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device) < batch.prompt_B[:, None]
            options = {"segment_len": batch.segment_len, "mask_BT": mask_BT, "state": state, "stop": task.stop_id}
            scores = task.score_text(self.model.generate(batch.ids_BT, task.new_tokens, **options), batch)
        return {"loss": F.cross_entropy(logits_NV, targets_N)} | {name: value.mean() for name, value in scores.items()}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        for name, value in self.evaluate(batch).items():
            self.log(f"valid/{name}", value, batch_size=len(batch.ids_BT))

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs ``test/<metric>@<x>`` for every condition x of the test."""
        x = self.data.test_conditions[dataloader_idx][0]
        for name, value in self.evaluate(batch).items():
            self.log(f"test/{name}@{x}", value, batch_size=len(batch.ids_BT), add_dataloader_idx=False)


class LitTransformer(LitMemory):
    """Transformer without memory, or with a window of cached keys."""

    model_name = "transformer"


class LitXL(LitMemory):
    """Transformer-XL."""

    model_name = "xl"


class LitRMT(LitMemory):
    """Recurrent memory transformer."""

    model_name = "rmt"


class LitRMTR(LitMemory):
    """RMT with retrieval over its past memory states."""

    model_name = "rmt_r"


class LitPRMT(LitMemory):
    """Parallel-memory RMT."""

    model_name = "prmt"


class LitARMT(LitMemory):
    """Associative recurrent memory transformer."""

    model_name = "armt"


class LitTARM(LitMemory):
    """RMT with an average over its memory tokens."""

    model_name = "tarm"


class LitLarimar(LitMemory):
    """Decoder that a latent from an episodic memory conditions."""

    model_name = "larimar"


class LitMamba(LitMemory):
    """Selective state-space model."""

    model_name = "mamba"


class LitRWKV(LitMemory):
    """RWKV-5: linear attention with a decay per channel."""

    model_name = "rwkv"


class LitTitans(LitMemory):
    """A ``LitMemory`` that logs, as ``valid/<name>``, the ``diagnostics`` of its model on the first contexts of a validation.

    They are not computed without a logger.
    """

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        written = batch.ids_BT.shape[1] - batch.read_only * (batch.segment_len or 0)
        if batch_idx == 0 and self.loggers and written:
            found = self.model.diagnostics(batch.ids_BT[:16, :written], batch.segment_len)
            self.log_dict({f"valid/{name}": value for name, value in found.items()}, batch_size=1)


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


_ALL = (LitTransformer, LitXL, LitRMT, LitRMTR, LitPRMT, LitARMT, LitTARM, LitLarimar, LitMamba, LitRWKV, LitLMM, LitMAC, LitMAG, LitMAL)
LIT_MODULES: dict[str, type[LitMemory]] = {c.model_name: c for c in _ALL}
"""Registered name of an architecture -> its LightningModule."""
