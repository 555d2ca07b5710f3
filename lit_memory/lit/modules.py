"""``LitMemory``: the LightningModule of every architecture.

``LitARMT(width=64, ...)`` takes the fields of ``ARMT.Config`` and the settings of the optimizer as keyword arguments.

Shape suffixes: B batch, T tokens, N scored positions, D width, V vocabulary.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lit_memory.lit.describe import KeywordSignature, settings
from lit_memory.lit.devices import OnDevices
from lit_memory.lit.diagnostics import Diagnostics, diagnostics_of
from lit_memory.lit.losses import hidden_loss, losses_and_predictions
from lit_memory.lit.optimized import Optimized
from lit_memory.lit.plain import AnyBatch, TokenMetrics, as_batch
from lit_memory.lit.reads import Reads
from lit_memory.lit.schedule import SCHEDULES
from lit_memory.lit.scores import Mean, Means
from lit_memory.registry import build_config, load_class
from lit_memory.tasks.base import Task
from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import ContinuousTokens, LossScored, Prompted
from lit_memory.util.checks import FieldError, check_least
from lit_memory.util.metrics import Condition, MetricName


class LitMemory(Reads, Optimized, OnDevices):
    """Trains one segment-recurrent model: cross-entropy, or squared error of numbers, on the scored positions.

    It reads ``Batch``es, dictionaries with ``input_ids`` and ``labels``, or pairs of both, from any data source. A
    ``LitData`` also gives its task, which scores predictions; without a task, a validation and a test log the loss, the
    accuracy and the perplexity of single tokens. All other arguments are fields of the model's ``Config``. Raises
    TypeError for an argument that the model does not have, and ValueError for a value that it may not have; the
    training raises ValueError for an unknown part in ``frozen``.

    lr: Learning rate of AdamW.
    weight_decay: Weight decay of AdamW, on all weights that the model does not exempt.
    schedule: "constant", "linear" or "cosine"; the last two fall to ``final_lr`` times lr after the last step.
    warmup: Steps of a linear warm-up; below 1, a share of the steps (``max_steps`` of the Trainer, or a stage's).
    final_lr: Learning rate after the last step, as a share of lr.
    frozen: Parts of the model that keep their weights, "encoder" or "decoder.tokens"; None: no part.
    bptt: Segments that gradients cross; None: all.
    unroll_schedule: Order of computation, see ``unroll``.
    checkpoint_segments: Segments of a group that is computed again on the way back; None: nothing is.
    replay: On a GPU, launch the kernels of a training step as one CUDA graph for every shape of batches.
    segment_len: Tokens per segment of a dictionary's sequences; None: the whole sequence.
    """

    model_name: ClassVar[str]
    __signature__ = KeywordSignature()

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
        unroll_schedule: str = "auto",
        checkpoint_segments: int | None = None,
        replay: bool = False,
        segment_len: int | None = None,
        **model: Any,
    ) -> None:
        super().__init__()
        self.model_class: Any = load_class("model", self.model_name)
        build_config(self.model_class.Config, model)  # a wrong name fails here, not in fit()
        check_least(0, lr=lr, weight_decay=weight_decay, warmup=warmup, final_lr=final_lr)
        if schedule not in SCHEDULES:
            raise FieldError("schedule", schedule, f"expected one of {', '.join(SCHEDULES)}")
        if replay and self.model_class.looks_at_numbers:
            reason = f"{self.model_class.__name__} looks at numbers of a batch on the CPU; expected False"
            raise FieldError("replay", replay, reason)
        self.save_hyperparameters()
        self.model: Any = None
        self.diagnostics: Diagnostics | None = None
        self.token_metrics: dict[int, TokenMetrics] = {}  # dataloader -> metrics where there is no task
        if model.get("vocab_size"):
            self.configure_model()

    def setup(self, stage: str) -> None:
        """Check that a model of given sizes reads what the data has, and leave ``log`` out of what ``torch.compile``
        traces: Dynamo fails on what Lightning 2.6 does there."""
        for _, task in self.conditions("train"):
            if self.model is not None:
                check_tokens(self.model.config, task)
        if getattr(self, "_compiler_ctx", None):
            self.log: Any = torch.compiler.disable(self.log)

    @classmethod
    def config_class(cls) -> type | None:
        """The ``Config`` of the model; None for a base class without a model."""
        return load_class("model", cls.model_name).Config if hasattr(cls, "model_name") else None

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *, revision: str | None = None, **options: Any) -> Self:
        """The module around a pretrained model, to be trained further.

        options: the settings of the module (``lr``, ``bptt``, ...), and flags of the model. Other arguments and errors:
        those of ``lit_memory.hf.pretrained.from_pretrained``.
        """
        own = {name: value for name, value in options.items() if name in settings(cls)}
        flags = {name: value for name, value in options.items() if name not in own}
        model: Any = load_class("model", cls.model_name)
        model = model.from_pretrained(source, revision=revision, **flags)
        with torch.device("meta"):  # its weights are those of the pretrained one
            module = cls(**own, **{f.name: getattr(model.config, f.name) for f in fields(model.config)})
        module.model = model.train()
        return module

    # The data

    def conditions(self, split: str) -> list[tuple[Condition | None, Task]]:
        """(test condition, task) of every dataloader of a split; [] for a data source that has no tasks."""
        data: Any = getattr(self.trainer, "datamodule", None)
        return data.conditions(split) if hasattr(data, "conditions") else []

    def as_batch(self, batch: AnyBatch) -> Batch:
        return as_batch(batch, self.hparams["segment_len"])

    # The model

    def configure_model(self) -> None:
        """Build the model. Lightning calls it when the data is known."""
        if self.model is not None:
            return
        options = {k: v for k, v in self.hparams.items() if k in self.model_class.Config.__dataclass_fields__}
        if not options.get("vocab_size"):
            tasks = [task for _, task in self.conditions("train")]
            if not tasks:
                raise FieldError("vocab_size", 0, "expected the number of token ids, as the data has no task")
            options["vocab_size"] = self.hparams["vocab_size"] = tasks[0].vocab_size
            if isinstance(tasks[0], ContinuousTokens):
                options["inputs"] = self.hparams["inputs"] = tasks[0].input_dim
        self.model = self.model_class(self.model_class.Config(**options))

    # Training

    def training_step(self, batch: AnyBatch, batch_idx: int) -> Tensor:
        batch = self.as_batch(batch)
        loss = self.loss(batch) * batch.share
        self.log_losses({"loss": loss}, len(batch.ids_BT))
        return loss

    # Validation and test

    def evaluate(self, batch: Batch, task: Task) -> Means:
        """Loss and the task's metrics.

        If the batch has prompts, the model also answers them freely; a metric of the same name from these answers
        replaces the one from single predictions.
        """
        state = self.read_context(batch)
        hidden_ND, targets_N = self.read_targets(batch, state)
        scored_BT = batch.scored_BT
        if isinstance(task, LossScored):
            losses_N = hidden_loss(self.model, hidden_ND, targets_N, "none")
            loss_BT = losses_N.new_full(scored_BT.shape, math.nan)
            loss_BT[scored_BT] = losses_N
            values = task.score_losses(loss_BT, batch)
            return {name: Mean.of_tokens(value_N, scored_BT) for name, value_N in values.items() if len(value_N)}
        losses_N, predicted_N = losses_and_predictions(self.model, hidden_ND, targets_N)
        scores = task.score(at_scored(predicted_N, batch), batch)
        if batch.prompt_B is not None and isinstance(task, Prompted):
            scores |= task.score_text(self.generate_answers(batch, state, task), batch)
        means = {"loss": Mean(losses_N.mean(), len(losses_N))}
        means |= {name: Mean.of_samples(scores_B) for name, scores_B in scores.items()}
        return means | self.memory_metrics(batch, state)

    def generate_answers(self, batch: Batch, state: Any, task: Prompted) -> Tensor:
        """Tokens that the model generates after the prompts of a batch, (B, new_tokens). state: after the context."""
        assert batch.prompt_B is not None
        mask_BT = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device) < batch.prompt_B[:, None]
        options = {"segment_len": batch.segment_len, "mask_BT": mask_BT, "state": state, "stop": task.stop_id}
        return self.model.generate(batch.ids_BT, task.new_tokens, **options)

    def memory_metrics(self, batch: Batch, state: Any) -> Means:
        """Metrics of the memory itself, which ``evaluate`` adds to the task's. Default: none."""
        return {}

    def evaluate_tokens(self, batch: Batch, loader: int) -> None:
        """Add a batch without a task to the metrics of its dataloader."""
        if loader not in self.token_metrics:
            self.token_metrics[loader] = TokenMetrics(self.model.config.vocab_size, self.device)
        hidden_ND, targets_N = self.read_targets(batch, self.read_context(batch))
        self.token_metrics[loader].update(*losses_and_predictions(self.model, hidden_ND, targets_N), targets_N)

    def log_batch(self, batch: AnyBatch, split: str, loader: int) -> dict[str, Tensor]:
        """Log ``split/metric``, with ``@condition`` for a condition of a test. Returns metric -> the scores of the
        samples, for those that have some."""
        batch, conditions = self.as_batch(batch), self.conditions(split)
        if not conditions:
            self.evaluate_tokens(batch, loader)
            return {}
        condition, task = conditions[loader]
        for name, mean in (means := self.evaluate(batch, task)).items():
            metric = MetricName.parse(name)._replace(split=split, condition=condition)
            if split == "test" or metric.place is None:  # curves along a context are for the test
                self.log_mean(str(metric), mean.value, mean.weight)
        return {name: mean.scores_B for name, mean in means.items() if mean.scores_B is not None}

    def log_split(self, split: str) -> None:
        """Log the metrics of a task that follow from its means over the split; without a task, the means of tokens."""
        self.finish_means()
        for condition, task in self.conditions(split):
            named = [(MetricName.parse(name), value) for name, value in self.trainer.callback_metrics.items()]
            means = {
                str(metric._replace(split="", condition=None)): float(value)
                for metric, value in named
                if (metric.split, metric.condition) == (split, condition)
            }
            added = task.summarize(means)
            lost = set(task.metrics) - {MetricName.parse(name).name for name in (*means, *added)}
            if means and lost:
                reason = "neither score nor summarize gave it"
                raise FieldError("metrics", ", ".join(sorted(lost)), f"{reason}; expected {', '.join(means)}")
            names = [name for name in task.metrics if name in added]
            self.log_dict({str(MetricName(name, split, condition)): added[name] for name in names}, **self.synced)
        for loader, metrics in self.token_metrics.items():
            condition = loader if len(self.token_metrics) > 1 else None
            for name, value in metrics.compute().items():
                self.log(str(MetricName(name, split, condition)), value, **self.synced)
        self.token_metrics = {}

    def on_validation_epoch_start(self) -> None:
        first = self.loggers and self.global_rank == 0  # the samples of one device will do
        self.diagnostics = diagnostics_of(self.model) if first else None

    def validation_step(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch = self.as_batch(batch)
        self.log_batch(batch, "valid", dataloader_idx)
        if self.diagnostics and dataloader_idx == 0:
            self.diagnostics.update(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log_split("valid")
        if self.diagnostics:
            self.log_dict({str(MetricName(n, "valid")): value for n, value in self.diagnostics.compute().items()})

    def test_step(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        return self.log_batch(batch, "test", dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self.log_split("test")

    # Prediction

    def predict_step(self, batch: AnyBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """What the model predicts at the scored positions of a batch, each from the tokens before it: ids (B, T) with
        -100 elsewhere, or numbers (B, T, H) with NaN elsewhere."""
        batch = self.as_batch(batch)
        hidden_ND, targets_N = self.read_targets(batch, self.read_context(batch))
        return at_scored(losses_and_predictions(self.model, hidden_ND, targets_N)[1], batch)


def at_scored(predicted_N: Tensor, batch: Batch) -> Tensor:
    """The targets of a batch, with predictions in their places."""
    predicted_BT = batch.targets_BT.clone()
    predicted_BT[batch.scored_BT] = predicted_N
    return predicted_BT


def check_tokens(config: Any, task: Task) -> None:
    """Raise FieldError for a model that cannot read the tokens of a task."""
    numbers = task.input_dim if isinstance(task, ContinuousTokens) else 0
    if (inputs := getattr(config, "inputs", 0)) != numbers:
        raise FieldError("inputs", inputs, f"expected {numbers}, the numbers of a token of the task")
    if config.vocab_size < task.vocab_size:
        raise FieldError("vocab_size", config.vocab_size, f"expected {task.vocab_size} or more, the task's token ids")
