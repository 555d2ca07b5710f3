"""Checks of tasks: their batches and their scores.

Shape suffixes: B batch, T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_memory.tasks.base import Task
from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import ContinuousTokens, FiniteSplits, LossScored, Prompted
from lit_memory.util.checks import require


def check_task(cls: Any, **config: Any) -> None:
    """Check a class of tasks: that batches are a function of their arguments, well formed and different in every split,
    and that right answers score best. config: settings of the task. Raises AssertionError."""
    task = cls(cls.Config(**config))
    for check in TASK_CHECKS:
        check(task)


def rows(batch: Batch) -> list[tuple]:
    """Every sample as one tuple of its ids, or numbers, context included."""
    context = [(segment[0] if isinstance(segment, tuple) else segment).tolist() for segment in batch.context]
    own = batch.ids_BT.flatten(1).tolist()
    return [tuple(i for s in context if b < len(s) for i in s[b]) + tuple(ids) for b, ids in enumerate(own)]


def batches_are_pure(task: Task) -> None:
    """The same arguments give the same bits whatever was drawn before; another seed, split or step gives others."""
    first = task.batch(0, "train", 3, 8)
    before = torch.get_rng_state()
    task.batch(9, "test", 9, 2)
    again = type(task)(task.config).batch(0, "train", 3, 8)
    require(torch.equal(torch.get_rng_state(), before), "batch draws from torch's global generator: use generator()")
    equal = rows(first) == rows(again) and torch.equal(first.targets_BT.nan_to_num(), again.targets_BT.nan_to_num())
    require(equal and same_meta(first.meta, again.meta), "batch with the same arguments gives other samples")
    for seed, split, step in [(1, "train", 3), (0, "valid", 3), (0, "test", 3), (0, "train", 4)]:
        other = task.batch(seed, split, step, 8)
        differs = other.ids_BT.shape != first.ids_BT.shape or not torch.equal(other.ids_BT, first.ids_BT)
        require(differs, f"seed {seed}, {split}, step {step} gives the samples of seed 0, train, step 3")


def same_meta(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def batches_are_well_formed(task: Task) -> None:
    """Ids lie in the vocabulary, targets repeat the ids where the task says so, and the last ``read_only`` segments
    hold all of them."""
    for split in ("train", "valid", "test"):
        batch = task.batch(0, split, 0, 16)
        scored = batch.scored_BT
        require(len(batch.ids_BT) == 16 and all(len(v) == 16 for v in batch.meta.values()), f"{split}: not 16 samples")
        require(bool(scored.any(1).all()), f"{split}: a sample has no target")
        read = batch.read_only * (batch.segment_len or 0)
        place = f"the first token of the {'read-only segments' if read else 'sample'}"
        require(not scored[:, -read].any(), f"{split}: {place} is scored, and nothing predicts it")
        if isinstance(task, ContinuousTokens):
            sizes = batch.ids_BT.shape[2], batch.targets_BT.shape[2], batch.segment_len
            require(sizes == (task.input_dim, task.vocab_size, task.segment_len), f"{split}: wrong sizes {sizes}")
            continue
        low, high = int(batch.ids_BT.min()), int(batch.ids_BT.max())
        require(low >= 0 and high < task.vocab_size, f"{split}: ids {low} to {high}, vocab_size {task.vocab_size}")
        told, expected = torch.equal(batch.targets_BT[scored], batch.ids_BT[scored]), "expected tells_answers = False"
        require(told or not task.tells_answers, f"{split}: a target is not the id there; {expected}")
        length = batch.segment_len
        shorter = split != "test" and batch.read_only and length and task.segment_len and length < task.segment_len
        require(length == task.segment_len or bool(shorter), f"{split}: segment_len {length}, not {task.segment_len}")
        require(not read or not scored[:, :-read].any(), f"{split}: a target before the read-only segments")


def splits_are_disjoint(task: Task) -> None:
    """No sample of one split, of 300 each, occurs in another. Samples with numbers are the task's own affair."""
    if isinstance(task, FiniteSplits):
        return
    seen: dict[tuple, str] = {}
    for split in ("train", "valid", "test"):
        for row in [row for step in range(3) for row in rows(task.batch(0, split, step, 100))]:
            other = seen.setdefault(row, split)
            require(other == split, f"a sample of {split} is one of {other}, too: are there only a few?")


def batches_move(task: Task) -> None:
    """``Batch.to`` moves every tensor and keeps the rest."""
    batch = task.batch(0, "train", 0, 2)
    moved = batch.to(torch.device("meta"))
    found = {t.device.type for t in (moved.ids_BT, moved.targets_BT, *moved.meta.values())}
    kept = (moved.segment_len, moved.read_only, moved.meta.keys()) == (
        batch.segment_len,
        batch.read_only,
        batch.meta.keys(),
    )
    require(found == {"meta"} and kept, "Batch.to leaves a part of the batch behind")


def conditions_vary_one_field(task: Task) -> None:
    """One task per value of ``test_<field>``, equal to the task in every other field."""
    axis, values = task.test_axis()
    conditions = task.test_conditions()
    require([x for x, _ in conditions] == values, f"test_{axis}={values}, but the test visits others")
    for x, condition in conditions:
        expected = {**vars(task.config), axis: x}
        require(vars(condition.config) == expected, f"test_{axis}: the test at {x} changes other fields, too")


def right_answers_score_best(task: Task) -> None:
    """``score`` gives one number per sample for the metrics that it names, and the first is best for right answers."""
    if isinstance(task, LossScored):
        return
    batch, metric = task.batch(0, "test", 0, 16), task.metrics[0]
    if isinstance(task, ContinuousTokens) or batch.targets_BT.is_floating_point():
        return
    right_BT = batch.targets_BT.clamp(min=0)
    right, wrong = (task.score(ids_BT, batch) for ids_BT in (right_BT, (right_BT + 1) % task.vocab_size))
    for name, values_B in right.items():
        require(values_B.shape == (16,), f"score: {name} has shape {tuple(values_B.shape)}, not one number per sample")
    given = {*right, *task.summarize({name: float(values_B.double().mean()) for name, values_B in right.items()})}
    if isinstance(task, Prompted):
        given |= {*task.score_text(right_BT[:, :1].expand(-1, task.new_tokens), batch)}
    lost = [name for name in task.metrics if name not in given]
    require(not lost, f"metrics names {', '.join(lost)}, which neither score nor summarize gives")
    if metric in right:
        best, other = (float(scores[metric].double().mean()) for scores in (right, wrong))
        better = best != other and task.better(metric, best, other)
        require(better, f"{metric} is {best:.3g} for right answers and {other:.3g} for wrong ones")


TASK_CHECKS: Sequence[Callable[[Any], None]] = (
    batches_are_pure,
    batches_are_well_formed,
    splits_are_disjoint,
    batches_move,
    conditions_vary_one_field,
    right_answers_score_best,
)
