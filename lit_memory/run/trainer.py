"""Lightning's Trainer as every run uses it."""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import profilers
from lightning.pytorch.plugins.environments import LightningEnvironment

from lit_memory.lit.callbacks.finite import FiniteGuard
from lit_memory.lit.callbacks.seed import StepSeed
from lit_memory.plan.runspec import RunSpec
from lit_memory.run.saving import VerifiedCheckpoints

USELESS = (
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    "You're resuming from a checkpoint that ended before the epoch ended.*",  # our data is a function of the step
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    "The `srun` command is available on your system.*",  # our launchers start the runs
)
"""Lightning's warnings that do not concern our runs."""
PROFILERS = {
    "simple": profilers.SimpleProfiler,
    "advanced": profilers.AdvancedProfiler,
    "pytorch": profilers.PyTorchProfiler,
}


def make_trainer(spec: RunSpec, folder: Path, logger: Any, *callbacks: L.Callback) -> L.Trainer:
    """Lightning's Trainer with our epochs, checkpoints and guards.

    A Lightning epoch is the stretch between two validations; callbacks end the training. folder: where a profiler
    writes ``*-profile.txt``.
    """
    t = spec.train
    arguments = dict(t["trainer"])
    devices = arguments.pop("devices", 1)
    if "profiler" in arguments:  # Lightning's own would log its report, which nobody sees
        arguments["profiler"] = PROFILERS[arguments["profiler"]](dirpath=folder, filename="profile")
    return L.Trainer(
        default_root_dir=folder,
        max_epochs=-1,
        accelerator=t["accelerator"],
        devices=devices,
        precision=t["precision"],
        gradient_clip_val=t["clip_norm"] or t["clip_value"] or None,
        gradient_clip_algorithm="value" if t["clip_value"] else "norm",
        deterministic=True,
        logger=logger,
        callbacks=[*callbacks, StepSeed(spec.seed), FiniteGuard(spec.arm)],
        plugins=[VerifiedCheckpoints(), LightningEnvironment()],  # in a job of Slurm, Slurm's would handle signals
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=t["valid_every"],
        inference_mode=False,
        **arguments,
    )


def silence_lightning() -> None:
    """Hide Lightning's banners and the warnings that do not concern our runs."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for message in USELESS:
        warnings.filterwarnings("ignore", message=message)
