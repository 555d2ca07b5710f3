"""``train.trainer``: which arguments of lightning.Trainer a file may set. Standard library only."""

from collections.abc import Callable, Mapping
from typing import Any

from lit_memory.util.checks import FieldError, nearest

PROFILERS = ("simple", "advanced", "pytorch")


def _count(value: Any) -> bool:
    return type(value) is int and value > 0


def _devices(value: Any) -> bool:
    if type(value) is not list:
        return _count(value)
    return len(value) == 1 or (bool(value) and all(type(n) is int for n in value) and len(set(value)) == len(value))


FREE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "devices": (_devices, "a number of devices, or a list of different ones"),
    "strategy": (lambda value: value == "ddp", "ddp"),
    "accumulate_grad_batches": (_count, "a whole number of at least 1"),
    "detect_anomaly": (lambda value: type(value) is bool, "true or false"),
    "profiler": (lambda value: value in PROFILERS, f"one of {', '.join(PROFILERS)}"),
}
"""Arguments that a file may set -> whether a value will do, and what is expected. The same value gives the same numbers
each time, and it is in the key of the run. Lightning itself checks the device, which depends on the machine."""
OURS = {
    "accelerator": "accelerator",
    "precision": "precision",
    "max_epochs": "steps",
    "min_epochs": "steps",
    "max_steps": "steps",
    "min_steps": "steps",
    "limit_val_batches": "valid_size",
    "limit_test_batches": "test_size",
    "val_check_interval": "valid_every",
    "check_val_every_n_epoch": "valid_every",
    "log_every_n_steps": "valid_every",
    "gradient_clip_val": "clip_norm",
    "gradient_clip_algorithm": "clip_norm",
    "callbacks": "",
    "default_root_dir": "",
    "deterministic": "",
    "enable_autolog_hparams": "",
    "enable_checkpointing": "",
    "enable_model_summary": "",
    "enable_progress_bar": "",
    "inference_mode": "",
    "logger": "",
    "num_sanity_val_steps": "",
    "plugins": "",
    "reload_dataloaders_every_n_epochs": "",
    "use_distributed_sampler": "",
}
"""Arguments that the engine decides -> the field of ``train`` that stands for each, "" where none does."""
REFUSED = {
    "num_nodes": "the devices of a run are those of one machine; --launcher starts many runs on many machines",
    "sync_batchnorm": "no model has batch normalisation; leave it out",
    "max_time": "the result would depend on the clock; train.steps bounds the training",
    "benchmark": "cuDNN would choose its kernels by the clock, and they change the last bits of a result",
    "fast_dev_run": "it cuts training and test to a few batches; use --dry-run, or train.steps and train.test_size",
    "barebones": "it switches off logging and checkpoints, so that nothing is left to compare or to resume",
    "limit_train_batches": "it moves the validations and stages; set train.steps and train.valid_every",
    "overfit_batches": "it trains and validates on the same few batches; set train.steps",
    "limit_predict_batches": "no run predicts; leave it out",
    "model_registry": "a run writes below its root and to MLflow alone; leave it out",
}
"""Arguments that no run has -> why. A FINISHED run has trained and tested as its file says, on any day."""


SHARDED = ("fsdp", "deepspeed", "xla", "model_parallel")
"""Beginnings of the strategies that cut a model into shards, which are gathered when its ``forward`` is called: our
loops over segments call other methods."""


def devices_of(arguments: Mapping[str, Any]) -> int:
    """Devices of a run."""
    devices = arguments.get("devices", 1)
    return len(devices) if isinstance(devices, list) else devices


def parts_of(arguments: Mapping[str, Any]) -> int:
    """Parts in which the batch of an optimizer step is read: devices, times batches that are accumulated."""
    return devices_of(arguments) * arguments.get("accumulate_grad_batches", 1)


def check_trainer(arguments: Mapping[str, Any]) -> None:
    """Raise FieldError, named ``trainer.<argument>``, for an argument that a file must not set, and for a value that
    one of ``FREE`` must not have."""
    for name, value in arguments.items():
        key = f"trainer.{name}"
        if name in OURS:
            own = f"set train.{OURS[name]} instead" if OURS[name] else "leave it out"
            raise FieldError(key, value, f"the engine sets this argument itself; {own}")
        if name in REFUSED:
            raise FieldError(key, value, f"refused: {REFUSED[name]}")
        if name not in FREE:
            hint = nearest(name, (*FREE, *OURS, *REFUSED))
            raise FieldError(key, value, f"not an argument of lightning.Trainer; {hint}")
        if name == "strategy" and str(value).startswith(SHARDED):
            reason = "it shards a model in its forward, which a loop over segments does not call"
            raise FieldError(
                key, value, f"{value!r}: {reason}; expected ddp, which keeps a whole model on every device"
            )
        fits, expected = FREE[name]
        if not fits(value):
            raise FieldError(key, value, f"{value!r}: expected {expected}")
