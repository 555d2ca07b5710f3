"""The stages of a run."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import lightning as L

from lit_memory.lit.data import LitData


class Curriculum(L.Callback):
    """Walks through the stages of a run: each changes fields of the task and ends after its steps, or as soon as a
    validation reaches all metrics of its ``until``, from below or, if less is better, from above."""

    def __init__(self, stages: Sequence[Mapping[str, Any]], valid_every: int) -> None:
        self.stages, self.valid_every = stages, valid_every
        self.step = 0  # of the last validation: Lightning restores its own counter after on_fit_start
        self.history: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.history = state_dict["step"], state_dict["history"]

    @property
    def stage(self) -> int:
        """How many stages have ended."""
        return len(self.history)

    @property
    def bounds(self) -> list[int]:
        """Steps between stages: where the first one began, and where each that has ended did."""
        return [0, *(entry["step"] for entry in self.history)]

    @property
    def done(self) -> bool:
        return self.stage >= len(self.stages)

    def enter(self, data: Any, module: Any, step: int) -> None:
        """Set task, epoch length and schedule for what follows ``step``."""
        stage = self.stages[self.stage]
        data.set_task(data.whole_task.at(**stage["task"]) if stage["task"] else data.whole_task)
        data.batch_size = stage["batch_size"]
        began = self.bounds[-1]
        data.epoch_steps = min(self.valid_every, stage["steps"] - (step - began))
        module.span = (began, stage["steps"])

    def on_fit_start(self, trainer, pl_module):
        if self.done:
            trainer.should_stop = True
        else:
            self.enter(pl_module.data, pl_module, self.step)

    def on_validation_end(self, trainer, pl_module):
        self.step = trainer.global_step
        stage, data = self.stages[self.stage], cast(LitData, pl_module.data)
        reached = {name: float(trainer.callback_metrics[f"valid/{name}"]) for name in stage["until"]}
        solved = bool(reached) and all(
            data.task.better(name, reached[name], goal) for name, goal in stage["until"].items()
        )
        if solved or trainer.global_step - self.bounds[-1] >= stage["steps"]:
            self.history = [
                *self.history,
                {"stage": self.stage, "task": stage["task"], "step": trainer.global_step, "solved": solved},
            ]
        if self.done:
            trainer.should_stop = True
        else:
            self.enter(pl_module.data, pl_module, trainer.global_step)
