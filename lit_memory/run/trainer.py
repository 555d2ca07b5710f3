"""Lightning's Trainer as every run uses it."""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import profilers
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lit_memory.lit.callbacks.finite import FiniteGuard
from lit_memory.lit.callbacks.seed import StepSeed
from lit_memory.plan.runspec import RunSpec
from lit_memory.run.ranks import ALONE, Rank
from lit_memory.run.saving import VerifiedCheckpoints

USELESS = (
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    "You're resuming from a checkpoint that ended before the epoch ended.*",  # our data is a function of the step
    "`broadcast_buffers` is deprecated.*",  # its successor is not in the oldest torch that we allow
    "It is recommended to use `self.log.*sync_dist=True.*",  # of the diagnostics, which one device computes
    "find_unused_parameters=True was specified in DDP constructor, but did not find any.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
)
"""Lightning's warnings that do not concern our runs."""
PROFILERS = {
    "simple": profilers.SimpleProfiler,
    "advanced": profilers.AdvancedProfiler,
    "pytorch": profilers.PyTorchProfiler,
}


class Placed(ClusterEnvironment):
    """Tells Lightning which rank this process is. No other environment is asked: in a job of Slurm, Slurm's would
    handle signals."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise NotImplementedError("the ranks have met before")

    @property
    def main_port(self) -> int:
        raise NotImplementedError("the ranks have met before")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.rank.world

    def global_rank(self) -> int:
        return self.rank.number

    def local_rank(self) -> int:
        return self.rank.number

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        assert size == self.rank.world

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.rank.number


class OneProcessEach(DDPStrategy):
    """DDP in processes that run already, with the threads that they have."""

    def _configure_launcher(self) -> None:
        """None: Lightning's would run the whole command once more for each device."""


def strategy_of(world: int) -> Strategy | str:
    """Lightning's strategy for so many devices."""
    if world == 1:
        return "auto"
    # Frozen weights, and those that a stage leaves out, have no gradient. No model has buffers that training changes.
    return OneProcessEach(find_unused_parameters=True, broadcast_buffers=False)


def make_trainer(spec: RunSpec, folder: Path, logger: Any, *callbacks: L.Callback, rank: Rank = ALONE) -> L.Trainer:
    """Lightning's Trainer with our epochs, checkpoints and guards.

    A Lightning epoch is the stretch between two validations; callbacks end the training. folder: where a profiler
    writes ``*-profile.txt``. rank: of this process.
    """
    t = spec.train
    arguments = {name: value for name, value in t["trainer"].items() if name != "strategy"}
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
        strategy=strategy_of(rank.world),
        plugins=[VerifiedCheckpoints(), Placed(rank)],
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
