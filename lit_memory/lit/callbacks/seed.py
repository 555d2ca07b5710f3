"""The random numbers of a training step."""

import lightning as L
import torch

from lit_memory.util.seeds import mixed_seed


class StepSeed(L.Callback):
    """Random numbers of a training step (dropout) depend on (seed, step) alone, and on the part of its batch that is
    read."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        part = batch_idx % trainer.accumulate_grad_batches * trainer.world_size + trainer.global_rank
        torch.manual_seed(mixed_seed(self.seed, f"dropout{part or ''}", trainer.global_step))
