"""One merged tree to validated ``model``, ``task`` and ``train`` sections; imports torch with their classes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lit_memory.plan.errors import ConfigError, dotted
from lit_memory.plan.sections import TrainConfig
from lit_memory.plan.strict import strict
from lit_memory.plan.trainer import check_trainer, devices_of, parts_of
from lit_memory.registry import REGISTRIES, RegistrationError, initial_settings, load_class, sketched, weights_of
from lit_memory.util.checks import FieldError, check_cuts, field_name, nearest

STAGE_KEYS = ("steps", "batch_size", "until", "needed")


@dataclass
class Resolver:
    """Validates one merged tree. An error names the layer that set the wrong value."""

    file: str
    arm: str
    origin: dict[str, str]
    """Dotted key, or section -> the layer that set it."""
    decided: dict[str, Any] = field(default_factory=dict)
    """Fields of the model that the weights decide that it starts from."""

    def where(self, key: str) -> str:
        """The origin of a dotted key: the layer that set it, or a mapping that it lies in; else the arm."""
        key = key.partition("[")[0]
        while key and key not in self.origin:
            key = key.rpartition(".")[0]
        return self.origin.get(key, f"{self.file} (arm {self.arm})")

    def error(self, section: str, name: str, message: str) -> ConfigError:
        key = dotted(section, name)
        return ConfigError(self.where(key), key, message)

    def resolve(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The three sections as plain data, every default filled in. Raises ConfigError."""
        train = strict(TrainConfig, tree["train"], self.where, "train")
        try:
            check_trainer(train.trainer)
        except FieldError as error:
            raise self.error("train", error.name, error.expected) from None
        task_class, task = self.registered("task", tree["task"])  # imports torch
        model_class, model = self.registered("model", self.with_initial(train.init, tree["model"]))
        sampler = task_class(task)
        try:
            sampler.test_conditions()
            _ = sampler.vocab_size, sampler.segment_len, sampler.tokens
        except (ValueError, NotImplementedError) as error:
            raise self.error("task", field_name(error), str(error)) from None
        self.check_together(model, sampler)
        self.check_losses(train, model_class)
        self.check_schedule(train, model_class, model)
        self.check_replay(train, model_class, sampler)
        self.check_stream(train, sampler)
        self.check_parts(train, sampler)
        self.check_test(train, model, sampler)
        self.check_in_order(train, sampler)
        self.check_frozen(train, {"name": tree["model"]["name"], **asdict(model)})
        for i, stage in enumerate(train.stages):
            self.check_stage(f"stages[{i}]", stage, task_class.metrics)
            staged = self.staged(f"stages[{i}]", stage, task_class, task)
            self.check_together(model, staged)
            self.check_cuts("cuts", train.cuts, staged)
        return {
            "model": {"name": tree["model"]["name"], **asdict(model)},
            "task": {"name": tree["task"]["name"], **asdict(task)},
            "train": asdict(train),
        }

    def with_initial(self, init: Any, values: dict[str, Any]) -> dict[str, Any]:
        """The model's section, with what the weights decide that it starts from."""
        named = init if isinstance(init, dict) else {"decoder": init}
        if not named.get("decoder"):
            return values
        cls, given = self.class_of("model", values), {name.removesuffix("?"): value for name, value in values.items()}
        try:
            self.decided = initial_settings(cls, init, given)
        except (ValueError, FileNotFoundError) as error:
            section, name = ("model", field_name(error)) if field_name(error) in given else ("train", "init")
            raise self.error(section, name, str(error)) from None
        return self.decided | values

    def class_of(self, kind: str, values: dict[str, Any]) -> Any:
        """The class that a section names."""
        name = values.get("name")
        if not isinstance(name, str):
            known = f"expected one of {', '.join(REGISTRIES[kind])}"
            reason = f"{kind}: {{...}} is the whole section, and {kind}.<field>: one field" if values else ""
            raise self.error(kind, "name", "; ".join(filter(None, [known, reason])))
        try:
            return load_class(kind, name)
        except KeyError as error:
            raise self.error(kind, "name", f"{error.args[0]} (one of yours needs imports: [its_file.py])") from None
        except RegistrationError as error:
            raise self.error(kind, "name", error.args[0]) from None

    def registered(self, kind: str, values: dict[str, Any]) -> tuple[type, Any]:
        """The class that a section names, and its configuration."""
        cls = self.class_of(kind, values)
        try:
            others: Any = [load_class(kind, other) for other in REGISTRIES[kind]]
        except RegistrationError as error:
            raise self.error(kind, "name", error.args[0]) from None
        settings = {k: v for k, v in values.items() if k != "name"}
        return cls, strict(cls.Config, settings, self.where, kind, [other.Config for other in others])

    def check_together(self, model: Any, sampler: Any) -> None:
        """Fill in vocabulary and inputs, and check that the task fits the model."""
        input_dim = getattr(sampler, "input_dim", 0)
        model.inputs = model.inputs or input_dim
        if model.inputs != input_dim:
            numbers = f"a token of the task has {input_dim} numbers"
            raise self.error("model", "inputs", f"{model.inputs}: {numbers}; expected 0, which takes the task's")
        model.vocab_size = model.vocab_size or sampler.vocab_size
        if model.vocab_size < sampler.vocab_size:
            ids = f"the task has {sampler.vocab_size} token ids"
            if "vocab_size" in self.decided:
                theirs = f"its model has {model.vocab_size} token ids, and {ids}"
                raise self.error("train", "init", f"{theirs}; expected its tokenizer, task.tokenizer, or fewer ids")
            raise self.error("model", "vocab_size", f"{model.vocab_size}: {ids}; expected 0 (the task's) or more")
        try:
            if sampler.segment_len is not None:
                model.check_segment(sampler.segment_len)
        except ValueError as error:
            more = "; train.init decides it" if field_name(error) in self.decided else ""
            raise self.error("model", field_name(error), f"{error}{more}") from None

    def check_losses(self, train: TrainConfig, model_class: Any) -> None:
        """Check the weights of the losses against the losses of the model."""
        loss_names = getattr(model_class, "loss_names", ())
        for name, weight in train.losses.items():
            if name not in loss_names:
                known = f"{model_class.__name__} has one loss; expected none"
                if loss_names:
                    known = nearest(name, loss_names)
                raise self.error("train", f"losses.{name}", f"unknown loss; {known}")
            if type(weight) not in (int, float) or not 0 <= weight < math.inf:
                raise self.error("train", f"losses.{name}", f"{weight}: expected a finite number, 0 or more")
            train.losses[name] = float(weight)

    def check_frozen(self, train: TrainConfig, model: dict[str, Any]) -> None:
        """Check that the model has the frozen parts, and others to train."""
        if not train.frozen:
            return
        found = sketched(model)
        try:
            frozen = weights_of(found, train.frozen)
        except ValueError as error:
            raise self.error("train", "frozen", str(error)) from None
        if len(frozen) == len(list(found.parameters())):
            expected = "nothing is left to train; expected fewer parts, or steps: 0"
            raise self.error("train", "frozen", f"{train.frozen}: {expected}")

    def check_schedule(self, train: TrainConfig, model_class: type, model: Any) -> None:
        """Check the order of computation against the model."""
        if train.unroll_schedule == "layer":
            reason = None
            if not hasattr(model_class, "read_layer"):
                reason = f"a layer of {model_class.__name__} does not read ahead of the next one"
            elif train.precision == "bf16-mixed":
                reason = "it has no mixed precision"
            elif getattr(model, "dropout", 0):
                reason = f"model.dropout={model.dropout} would draw other numbers"
            if reason:
                raise self.error("train", "unroll_schedule", f"'layer': {reason}; expected 'sequential' or 'auto'")
        if train.unroll_schedule != "diagonal":
            return
        if not hasattr(model_class, "layers"):
            reason = f"{model_class.__name__} passes memory from the top layer down"
            raise self.error("train", "unroll_schedule", f"'diagonal': {reason}; expected 'sequential'")
        if train.bptt is not None:
            raise self.error("train", "bptt", f"{train.bptt}: expected none with unroll_schedule 'diagonal'")

    def check_replay(self, train: TrainConfig, model_class: Any, sampler: Any) -> None:
        """Check that a training step can be recorded."""
        if not train.replay:
            return
        reason = None
        if train.accelerator == "cpu":
            reason = "kernels are recorded on a GPU alone; expected train.accelerator: cuda with it"
        elif getattr(model_class, "looks_at_numbers", False):
            reason = f"{model_class.__name__} looks at numbers of a batch on the CPU; expected false"
        elif devices_of(train.trainer) > 1:
            reason = "devices add their gradients while these are computed, not after a replay; expected one device"
        elif train.checkpoint_segments is not None:
            reason = "what is computed again looks at the state of the random numbers; expected no checkpoint_segments"
        elif getattr(sampler, "stream", False):
            reason = "the memory of a stream goes on from batch to batch; expected false"
        if reason:
            raise self.error("train", "replay", f"true: {reason}")

    def check_stream(self, train: TrainConfig, sampler: Any) -> None:
        """Check the limits of a stream, whose memory goes on from batch to batch."""
        if not getattr(sampler, "stream", False):
            return
        segments = sampler.written + 1
        if (train.bptt or 0) > segments:
            most = f"a batch of the stream has {segments} segments, and no gradient leaves it"
            expected = "expected that many at most, or more task.segments"
            raise self.error("train", "bptt", f"{train.bptt}: {most}; {expected}")
        for i, stage in enumerate(train.stages):
            for key in stage.keys() - {"steps", "until", "needed"}:
                reason = "a stage of a stream cannot change what its memory comes from"
                raise self.error("train", f"stages[{i}].{key}", f"{reason}; expected steps, until and needed alone")

    def check_parts(self, train: TrainConfig, sampler: Any) -> None:
        """Check the sizes of batches against the devices that read them, and the batches that are accumulated."""
        devices, parts = devices_of(train.trainer), parts_of(train.trainer)
        sizes = {f"stages[{i}].batch_size": stage.get("batch_size", 0) for i, stage in enumerate(train.stages)}
        if 0 in sizes.values() or not sizes:  # of a stage without its own
            sizes = {"batch_size": train.batch_size, **sizes}
        for name, size in sizes.items():
            if type(size) is int and size % parts:
                read = f"the batch of an optimizer step is read in {parts} parts, by devices={devices}"
                raise self.error("train", name, f"{size}: {read}; expected a multiple of {parts}")
        if train.eval_batch_size < devices:
            read = f"{devices} devices read parts of every batch of a test"
            raise self.error("train", "eval_batch_size", f"{train.eval_batch_size}: {read}; expected {devices} or more")
        if parts > devices and getattr(sampler, "stream", False):
            name = "trainer.accumulate_grad_batches"
            reason = "a batch of a stream continues the one before it, and is read whole"
            raise self.error("train", name, f"{parts // devices}: {reason}; expected 1")

    def check_test(self, train: TrainConfig, model: Any, sampler: Any) -> None:
        """Check the sizes of the test against its values, and its own segment lengths against task and model."""
        try:
            sampler.test_sizes(train.test_size)
        except ValueError as error:
            raise self.error("train", "test_size", str(error)) from None
        for name, cuts in (("cuts", train.cuts), ("test_cuts", train.test_cuts)):
            self.check_cuts(name, cuts, sampler)
            for length in cuts:
                try:
                    model.check_segment(length or longest_context(sampler))
                except ValueError as error:
                    raise self.error("train", name, f"{cuts}: {error}") from None

    def check_in_order(self, train: TrainConfig, sampler: Any) -> None:
        """Check that batches of samples that are read in order have a part for every device."""
        sizes = {"valid": [train.valid_size], "test": sampler.test_sizes(train.test_size)}
        for split in filter(getattr(sampler, "in_order", lambda split: False), sizes):
            for samples in sizes[split]:
                try:
                    sampler.equal_batches(split, samples, train.eval_batch_size, devices_of(train.trainer))
                except FieldError as error:
                    raise self.error("train", error.name, str(error)) from None

    def check_cuts(self, name: str, cuts: Sequence[int], sampler: Any) -> None:
        """Check that the contexts of a task, as it is or in a stage, may be cut where they are to be."""
        try:
            check_cuts(name, cuts, sampler)
        except FieldError as error:
            raise self.error("train", name, f"{cuts}: {error.expected}") from None

    def check_stage(self, where: str, stage: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Check the keys and values of one stage, the task's fields aside."""
        for key, value in stage.items():
            name = f"{where}.{key}"
            if key in ("steps", "batch_size") and (type(value) is not int or value < 1):
                raise self.error("train", name, f"{value!r}: expected a whole number of at least 1")
            if key == "until":
                self.check_until(name, value, metrics)
            if key == "needed" and (type(value) is not bool or (value and not stage.get("until"))):
                raise self.error("train", name, f"{value!r}: expected true, in a stage that has an until, or false")
            if key.startswith("task.test_"):
                raise self.error("train", name, "a stage does not change the test; expected another field of the task")
            if key not in STAGE_KEYS and (not key.startswith("task.") or key.endswith("?")):
                raise self.error("train", name, f"unknown key; {nearest(key, [*STAGE_KEYS, 'task.<field>'])}")

    def check_until(self, where: str, value: Any, metrics: Sequence[str]) -> None:
        """Check the metrics that end a stage."""
        if not isinstance(value, dict) or any(type(number) not in (int, float) for number in value.values()):
            expected = f"expected {{metric: number}}, for example {{{metrics[0]}: 0.99}}"
            raise self.error("train", where, f"{value!r}: {expected}")
        for metric in value:
            if metric not in metrics:
                raise self.error("train", f"{where}.{metric}", f"unknown metric; {nearest(metric, metrics)}")

    def staged(self, where: str, stage: Mapping[str, Any], task_class: Any, task: Any) -> Any:
        """The task of one stage."""
        changes = {k.removeprefix("task."): v for k, v in stage.items() if k.startswith("task.")}
        try:
            return task_class(strict(task_class.Config, asdict(task) | changes, self.where, "task"))
        except ConfigError as error:
            raise self.error("train", where, str(error).partition(": ")[2]) from None


def longest_context(sampler: Any) -> int:
    """Tokens of the longest context that a test writes."""
    return max(task.written * task.segment_len for _, task in sampler.test_conditions())
