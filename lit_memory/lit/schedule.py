"""The learning rate as a function of the optimizer step."""

import math

SCHEDULES = ("constant", "linear", "cosine")


def relative_rate(step: int, first_step: int, steps: float, schedule: str, warmup: float, final_lr: float) -> float:
    """Learning rate of a step, as a share of the largest one.

    step: counted from the start of the run. first_step, steps: of the present stage, or of the whole run.
    schedule: "constant", or "linear" or "cosine", which fall from 1 at the first step of the stage to ``final_lr``
    after its last. warmup: steps of the run in which the rate grows, times what the schedule has; below 1, a share of
    the steps of every stage.
    Raises ValueError where a share of the steps is wanted and ``steps`` is infinite.
    """
    if math.isinf(steps) and (schedule != "constant" or 0 < warmup < 1):
        raise ValueError(
            f"schedule={schedule!r}, warmup={warmup}: a share of the steps needs Trainer(max_steps=...) or max_epochs"
        )
    in_stage = step - first_step
    done, of = (in_stage, warmup * steps) if warmup < 1 else (step, warmup)
    factor = min(1.0, (done + 1) / of) if of > 0 else 1.0
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: expected one of {', '.join(SCHEDULES)}")
    if schedule != "constant":
        share = min(1.0, in_stage / steps)
        fallen = share if schedule == "linear" else (1 - math.cos(math.pi * share)) / 2
        factor *= 1 - (1 - final_lr) * fallen
    return factor
