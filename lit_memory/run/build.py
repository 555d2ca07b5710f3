"""The LightningModule and LightningDataModule of a run, and the weights that it starts from."""

from pathlib import Path

import torch

from lit_memory.hf.pretrained import check_weights, start_from
from lit_memory.lit import LIT_MODULES
from lit_memory.lit.data import LIT_DATA, LitData
from lit_memory.lit.modules import LitMemory
from lit_memory.plan.runspec import RunSpec
from lit_memory.run import checkpoint
from lit_memory.run.saving import VerifiedCheckpoints


def build(spec: RunSpec, root: Path | None = None) -> tuple[LitMemory, LitData]:
    """The LightningModule and LightningDataModule of a run, with weights drawn from its seed, or those of
    ``train.init``; of another run's if there is a ``root`` with its checkpoints."""
    t = spec.train
    model = {k: v for k, v in spec.model.items() if k != "name"}
    optimizer = {k: t[k] for k in ("lr", "weight_decay", "schedule", "warmup", "final_lr", "bptt", "unroll_schedule")}
    optimizer["frozen"] = t["frozen"] or None  # a checkpoint of a run without is plain
    torch.manual_seed(spec.seed)
    losses = {f"{name}_loss": weight for name, weight in t["losses"].items()}
    module = LIT_MODULES[spec.model["name"]](**optimizer, **losses, **model)
    if spec.start is None and t["init"]:
        init = t["init"] if isinstance(t["init"], dict) else {"decoder": t["init"]}
        start_from(module.model, init["decoder"], init.get("encoder"))
    elif spec.start is not None and root is not None:
        start_from_run(module, spec.start, root)
    task = {k: v for k, v in spec.task.items() if k != "name"}
    loaders = {k: t[k] for k in ("batch_size", "valid_size", "test_size", "eval_batch_size", "test_cuts", "workers")}
    data = LIT_DATA[spec.task["name"]](seed=spec.seed, epoch_steps=t["valid_every"], **loaders, **task)
    return module, data


def start_from_run(module: LitMemory, start: RunSpec, root: Path) -> None:
    """Give a fresh model the weights that a run ended with. Parts that only one of the two has, such as ways to tell
    the order of lines, stay as they were drawn from the seed, or are left behind.

    Raises FileNotFoundError where the run has left none, ValueError for weights of another model.
    """
    path = checkpoint.newest(start.folder(root), lambda text: None)
    if path is None:
        raise FileNotFoundError(
            f"init={{run: {start.experiment}/{start.arm}}}: no checkpoint of its seed {start.seed} in {start.folder(root)}; run it first"
        )
    theirs, own = VerifiedCheckpoints().load_checkpoint(path)["state_dict"], module.state_dict()
    common = {part_of(name) for name in theirs} & {part_of(name) for name in own}
    weights = {name: tensor for name, tensor in theirs.items() if part_of(name) in common}
    weights |= {name: tensor for name, tensor in own.items() if part_of(name) not in common}
    try:
        check_weights(weights, own)
    except ValueError as error:
        raise ValueError(f"init={{run: {start.experiment}/{start.arm}}}: {error}") from None
    module.load_state_dict(weights)


def part_of(name: str) -> str:
    """The part of a model that a weight of its LightningModule belongs to: ``model.decoder.norm.weight`` to decoder."""
    return name.split(".")[1]
