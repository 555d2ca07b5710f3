"""The stages of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L

from lit_memory.util.metrics import MetricName


class Curriculum(L.Callback):
    """Trains through the stages of a run.

    A stage changes fields of the task. It ends after its steps, or as soon as a validation reaches all metrics of its
    ``until``: from below or, if less is better, from above. One that is ``needed`` and does not is the last, as is one
    in which the training breaks down. The data module has to be a ``LitData``.
    """

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
        """Number of stages that have ended."""
        return len(self.history)

    @property
    def bounds(self) -> list[int]:
        """First step of the first stage, and the step at which each ended stage ended."""
        return [0, *(entry["step"] for entry in self.history)]

    @property
    def done(self) -> bool:
        stopped = bool(self.history) and self.stages[self.stage - 1]["needed"] and not self.history[-1]["solved"]
        return self.broke_down or stopped or self.stage >= len(self.stages)

    @property
    def broke_down(self) -> bool:
        """Whether the training ended with a number that was not finite."""
        return bool(self.history) and self.history[-1].get("broke_down", False)

    def enter(self, data: Any, module: Any, step: int) -> None:
        """Set up data and module for what follows ``step``, or for the rest of a stage that a resumed run is in."""
        stage, first_step = self.stages[self.stage], self.bounds[-1]
        steps_left = stage["steps"] - (step - first_step)
        data.set_stage(stage["task"], stage["batch_size"], epoch_steps=min(self.valid_every, steps_left))
        module.set_stage(first_step, stage["steps"])

    def on_fit_start(self, trainer: Any, pl_module):
        if not self.done:
            self.enter(trainer.datamodule, pl_module, self.step)
            return
        trainer.should_stop = True
        if self.history:  # a run that was interrupted before its test: what times the training reads the last stage
            last = self.stages[self.stage - 1]
            trainer.datamodule.set_stage(last["task"], last["batch_size"], self.valid_every)

    def on_validation_end(self, trainer: Any, pl_module):
        self.step = trainer.global_step
        stage = self.stages[self.stage]
        solved = self.solved(trainer, stage["until"])
        if solved or self.step - self.bounds[-1] >= stage["steps"]:
            self.end_stage(solved=solved)
        if self.done:
            trainer.should_stop = True
        else:
            self.enter(trainer.datamodule, pl_module, self.step)

    def break_down(self, step: int) -> None:
        """End the training after ``step`` steps, in the middle of a stage."""
        self.step = step
        self.end_stage(solved=False, broke_down=True)

    def end_stage(self, **facts: bool) -> None:
        entry = {"stage": self.stage, "task": self.stages[self.stage]["task"], "step": self.step}
        self.history = [*self.history, entry | facts]

    @staticmethod
    def solved(trainer: Any, goals: Mapping[str, float]) -> bool:
        """Whether the last validation has reached every goal; False without any."""
        values = {name: float(trainer.callback_metrics[str(MetricName(name, "valid"))]) for name in goals}
        better = trainer.datamodule.task.better
        return bool(goals) and all(better(name, values[name], goal) for name, goal in goals.items())
