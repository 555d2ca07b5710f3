"""The LightningModule and the LightningDataModule of a run, and the weights that it starts from."""

from pathlib import Path

import torch

from lit_memory.lit import LIT_DATA, LIT_MODULES
from lit_memory.lit.data import LitData
from lit_memory.lit.modules import LitMemory
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import inherited
from lit_memory.run import checkpoint
from lit_memory.run.saving import VerifiedCheckpoints


def build(spec: RunSpec, root: Path | None = None) -> tuple[LitMemory, LitData]:
    """The LightningModule and the LightningDataModule of a run.

    The weights are drawn from its seed, or are those of ``train.init``. root: folder with the checkpoints of the run
    that it starts from; without it, these weights are drawn, too.
    """
    module = build_module(spec)
    init = spec.train["init"]
    if spec.start is not None:
        if root is not None:
            load_run(module, spec.start, root)
    elif init:
        from lit_memory.hf.pretrained import start_from  # imports transformers, which costs a second

        names = init if isinstance(init, dict) else {"decoder": init}
        start_from(module.model, names["decoder"], names.get("encoder"))
    return module, build_data(spec)


def build_module(spec: RunSpec) -> LitMemory:
    """The LightningModule of a run, with weights drawn from its seed."""
    t = spec.train
    model = {k: v for k, v in spec.model.items() if k != "name"}
    optimizer = {k: t[k] for k in ("lr", "weight_decay", "schedule", "warmup", "final_lr", "bptt", "unroll_schedule")}
    optimizer |= {k: t[k] for k in ("checkpoint_segments", "replay")}
    optimizer["frozen"] = t["frozen"] or None  # None leaves it out of checkpoints
    losses = {f"{name}_loss": weight for name, weight in t["losses"].items()}
    torch.manual_seed(spec.seed)
    return LIT_MODULES[spec.model["name"]](**optimizer, **losses, **model)


def build_data(spec: RunSpec) -> LitData:
    """The LightningDataModule of a run."""
    t = spec.train
    task = {k: v for k, v in spec.task.items() if k != "name"}
    names = ("batch_size", "valid_size", "test_size", "eval_batch_size", "cuts", "test_cuts", "workers")
    loaders = {k: t[k] for k in names}
    return LIT_DATA[spec.task["name"]](seed=spec.seed, epoch_steps=t["valid_every"], **loaders, **task)


def load_run(module: LitMemory, start: RunSpec, root: Path) -> None:
    """Load the last weights of another run into a fresh model.

    Parts that only one of the two models has (a memory, a GRU that gives lines their order) stay as they were drawn, or
    are left behind. Raises FileNotFoundError where the run has no checkpoint, ValueError for weights that do not fit.
    """
    setting = f"init={{run: {start.experiment}/{start.arm}}}"
    path = checkpoint.newest(start.folder(root), lambda text: None)
    if path is None:
        where = f"of its seed {start.seed} in {start.folder(root)}"
        raise FileNotFoundError(f"{setting}: no checkpoint {where}; run it first")
    saved = VerifiedCheckpoints().load_checkpoint(path)["state_dict"]
    theirs = {name.removeprefix("model."): weight for name, weight in saved.items()}
    try:
        weights = inherited(module.model.state_dict(), theirs)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None
    module.model.load_state_dict(weights)
