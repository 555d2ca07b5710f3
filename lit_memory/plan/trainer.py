"""``train.trainer``: extra arguments of lightning.Trainer, and those that a file must not set."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from lit_memory.util.checks import FieldError, nearest

OURS = {
    "max_epochs": "",
    "reload_dataloaders_every_n_epochs": "",
    "num_sanity_val_steps": "",
    "deterministic": "",
    "inference_mode": "",
    "logger": "",
    "callbacks": "",
    "plugins": "",
    "enable_checkpointing": "",
    "enable_progress_bar": "",
    "enable_model_summary": "",
    "default_root_dir": "",
    "max_steps": "steps",
    "log_every_n_steps": "valid_every",
    "check_val_every_n_epoch": "valid_every",
    "val_check_interval": "valid_every",
    "accelerator": "accelerator",
    "precision": "precision",
    "gradient_clip_val": "clip_norm",
    "gradient_clip_algorithm": "clip_norm",
}
"""Arguments of lightning.Trainer that the engine sets -> the field of ``train`` that stands for each, "" where none
does."""


@cache
def trainer_arguments() -> tuple[str, ...]:
    """The names of the arguments of lightning.Trainer."""
    import lightning

    return tuple(inspect.signature(lightning.Trainer).parameters)


def check_trainer(arguments: Mapping[str, Any]) -> None:
    """Raise FieldError, named ``trainer.<argument>``, for an argument that Trainer does not have or the engine sets.

    Lightning is imported only if there are arguments, as that takes seconds.
    """
    names = trainer_arguments() if arguments else ()
    for name, value in arguments.items():
        if name not in names:
            raise FieldError(f"trainer.{name}", value, f"not an argument of lightning.Trainer; {nearest(name, names)}")
        if name in OURS:
            own = f"set train.{OURS[name]} instead" if OURS[name] else "leave it out"
            raise FieldError(f"trainer.{name}", value, f"the engine sets this argument itself; {own}")
