"""One run: resuming bit for bit, stages, guards, schedules, and what a checkpoint holds."""

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from conftest import identical
from test_pretrained import make_bert, make_decoder

from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.lit.callbacks.finite import NonFinite
from lit_memory.lit.callbacks.progress import Progress
from lit_memory.lit.callbacks.timing import TestTimer
from lit_memory.lit.modules import LitMemory
from lit_memory.plan.experiment import parse
from lit_memory.registry import load_class
from lit_memory.run import engine, saving
from lit_memory.run.build import build
from lit_memory.run.checkpoint import saved
from lit_memory.run.engine import run_one
from lit_memory.run.saving import RunCheckpoint
from lit_memory.run.tracking import Tracker
from lit_memory.run.trainer import make_trainer, silence_lightning

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than the cores of a small machine
]

# Two stages whose steps are no multiple of valid_every: epochs end at steps 3, 4 (stage 1), 7 and 9 (stage 2).
STAGED = (
    "train.stages=[{task.pairs: 1, steps: 4}, {task.pairs: 3, steps: 5}]",
    "train.valid_every=3",
    "model.dropout=0.2",
    "train.lr=1e-2",
)


class Spy(L.Callback):
    """What a fit saw: (global step, pairs) per training batch and per validation, and learning rates."""

    def __init__(self):
        self.train, self.valid, self.ids, self.lr = [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.train.append((trainer.global_step, int(batch.meta["pairs"][0])))
        self.ids.append(batch.ids_BT)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.lr.append(optimizer.param_groups[0]["lr"])

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.valid.append((trainer.global_step, int(batch.meta["pairs"][0])))


@pytest.fixture
def fit(make_spec, tmp_path):
    """``fit("train.steps=8", ...)``: the engine's trainer without MLflow; returns trainer, module, curriculum and
    spy."""

    def run(*overrides, callbacks=(), resume=None):
        silence_lightning()
        spec = make_spec("train.valid_size=2", "train.test_size=2", *overrides)
        module, data = build(spec)
        curriculum, spy = Curriculum(spec.stages, spec.train["valid_every"]), Spy()
        trainer = make_trainer(
            spec, tmp_path / "fit", False, curriculum, spy, *callbacks, RunCheckpoint(tmp_path / "fit")
        )
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
        return trainer, module, curriculum, spy

    return run


def run(spec, root, send=lambda message: None):
    """``run_one`` with a database below ``root``; what MLflow knows then, and the rows of the test."""
    tracker = Tracker(root)
    run_one(spec, root, tracker.uri, tracker.parent(spec.experiment, spec.scale, {}), {}, send)
    found = tracker.find(spec.key)
    return found, tracker.results(found)


def checkpoint(spec, root):
    return torch.load(saved(spec.folder(root))[0], weights_only=True)


def history(root, run_id, name="valid/loss"):
    """(step, value) of all validations, each once; or of the training steps that are logged."""
    return sorted((m.step, m.value) for m in Tracker(root).client.get_metric_history(run_id, name))


# Resuming

WHOLE = {}


@pytest.fixture
def whole(make_spec, make_root):
    """The uninterrupted run: its spec, checkpoint, results and validation history (trained once)."""
    spec = make_spec(*STAGED)
    if not WHOLE:
        root = make_root("whole")
        found, rows = run(spec, root)
        WHOLE.update(checkpoint=checkpoint(spec, root), rows=rows, valid=history(root, found.run_id))
        WHOLE["train"] = history(root, found.run_id, "train/loss")
        WHOLE["scores"] = (spec.folder(root) / "scores.npz").read_bytes()
    return spec, WHOLE


@pytest.fixture
def stop_at(monkeypatch):
    """``stop_at(event, step)``: a ``send`` that is interrupted there, as by Ctrl-C. Training steps are told one by
    one."""
    monkeypatch.setattr(Progress, "on_train_batch_end", lambda self, trainer, *args: self.report(trainer))
    handler = signal.getsignal(signal.SIGINT)

    def make(event, step=None):
        def send(message):
            kind = message["event"] if message["event"] == "testing" else "valid" if "metric" in message else "train"
            if kind == event and step in (None, message.get("total_step")):
                raise KeyboardInterrupt

        return send

    yield make
    signal.signal(signal.SIGINT, handler)  # Lightning ignores SIGINT from the first one on


# Where the run stops, and the step of the checkpoint that it leaves (None: no checkpoint).
STOPS = [
    (("train", 1), None),
    (("valid", 3), None),
    (("train", 4), 3),
    (("valid", 4), 3),
    (("train", 5), 4),
    (("train", 8), 7),
    (("valid", 9), 7),
]
STOPS += [(("testing", None), 9)]
FIRST = ("train", 1), ("valid", 4), ("train", 8), ("testing", None)
"""Before, at and after a checkpoint, and behind the training; runs that stop elsewhere are slow tests."""


def or_slow(default, *values):
    """Values of a parameter, of a slow test unless ``default``."""
    return pytest.param(*values, marks=[] if default else [pytest.mark.slow])


@pytest.mark.parametrize(
    ("place", "step"),
    [or_slow(place in FIRST, place, step) for place, step in STOPS],
    ids=[f"{kind}-{step}" for (kind, step), _ in STOPS],
)
def test_an_interrupted_run_goes_on_bit_for_bit(whole, root, stop_at, place, step):
    spec, expected = whole
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(spec, root, stop_at(*place))
    killed = Tracker(root).find(spec.key)
    assert killed.status == "KILLED" and "lit.error" in killed.tags
    assert (step is None) == (not saved(spec.folder(root))) and (
        step is None or checkpoint(spec, root)["global_step"] == step
    )
    torch.manual_seed(123)
    finished, rows = run(spec, root)
    assert (finished.status, finished.run_id, finished.metrics["steps"]) == (
        "FINISHED",
        killed.run_id,
        9,
    ) and "lit.error" not in finished.tags
    found = checkpoint(spec, root)
    for part in ("state_dict", "optimizer_states", "global_step", "hyper_parameters"):
        assert identical(found[part], expected["checkpoint"][part]), part
    assert found["callbacks"]["Curriculum"] == expected["checkpoint"]["callbacks"]["Curriculum"]
    assert rows == expected["rows"]
    assert history(root, finished.run_id) == expected["valid"]
    kept = [f"step-{n:08d}.ckpt{end}" for n in (7, 9) for end in ("", ".sha256")]
    assert sorted(path.name for path in spec.folder(root).iterdir()) == ["journal.jsonl", "lock", "scores.npz", *kept]
    assert (spec.folder(root) / "scores.npz").read_bytes() == expected["scores"]


@pytest.mark.parametrize("step", [or_slow(step in (2, 6), step) for step in (2, 3, 6, 7, 8)])
def test_a_checkpoint_between_two_validations_serves_as_well(whole, root, stop_at, monkeypatch, step):
    """One step before the stop is saved, except where the step was the last before a validation."""
    spec, expected = whole
    monkeypatch.setattr(saving, "SAVE_SECONDS", -1.0)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(spec, root, stop_at("train", step))
    assert checkpoint(spec, root)["global_step"] == step - 1
    finished, rows = run(spec, root)
    assert rows == expected["rows"] and history(root, finished.run_id) == expected["valid"]
    assert all(
        identical(checkpoint(spec, root)[part], expected["checkpoint"][part])
        for part in ("state_dict", "optimizer_states", "global_step")
    )


KEPT = {1: 1, 2: 2, 3: 0, 4: 3, 5: 5, 6: 6, 7: 4}


@pytest.mark.parametrize(("step", "kept"), [or_slow(step in (3, 5, 6), step, kept) for step, kept in KEPT.items()])
def test_sigterm_ends_the_step_and_saves(whole, root, stop_at, monkeypatch, step, kept):
    """The last step before a validation is not saved by itself: what follows it would be lost. The loss of step 6, in
    the middle of a stage, is logged."""
    spec, expected = whole

    def terminate(self, trainer, module, *args):
        if trainer.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Progress, "on_before_backward", terminate, raising=False)
        run(spec, root)
    assert Tracker(root).find(spec.key).status == "KILLED"
    assert kept == (checkpoint(spec, root)["global_step"] if saved(spec.folder(root)) else 0)
    found, rows = run(spec, root)
    assert rows == expected["rows"] and history(root, found.run_id, "train/loss") == expected["train"]
    assert identical(checkpoint(spec, root)["state_dict"], expected["checkpoint"]["state_dict"])


def test_sigterm_between_two_steps_waits_for_the_next(whole, root, monkeypatch):
    """Lightning would end the training after the hooks of the batch, without a checkpoint."""
    spec, expected = whole
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(
            LitMemory, "on_train_batch_end", lambda self, *args: os.kill(os.getpid(), signal.SIGTERM)
        )  # comes after all callbacks
        run(spec, root)
    assert checkpoint(spec, root)["global_step"] == 2
    assert run(spec, root)[1] == expected["rows"] and identical(
        checkpoint(spec, root)["state_dict"], expected["checkpoint"]["state_dict"]
    )


@pytest.mark.parametrize("batch", [2, 3])
def test_sigterm_waits_for_all_batches_of_an_accumulated_step(make_spec, make_root, monkeypatch, batch):
    spec = make_spec("train.steps=4", "train.valid_every=4", "train.trainer={accumulate_grad_batches: 2}")
    whole, root = make_root("whole"), make_root()
    rows = run(spec, whole)[1]

    def terminate(self, batch_of_data, index):
        if index == batch:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(LitMemory, "on_train_batch_start", terminate)
        run(spec, root)
    assert checkpoint(spec, root)["global_step"] == 2
    assert run(spec, root)[1] == rows and identical(
        checkpoint(spec, root)["state_dict"], checkpoint(spec, whole)["state_dict"]
    )


def test_a_run_that_is_stopped_again_and_again(whole, root, stop_at):
    spec, expected = whole
    for place in [("train", 2), ("train", 4), ("train", 5), ("train", 6), ("train", 9), ("testing",)]:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run(spec, root, stop_at(*place))
    assert run(spec, root)[1] == expected["rows"] and identical(
        checkpoint(spec, root)["state_dict"], expected["checkpoint"]["state_dict"]
    )


def test_the_seed_decides_and_the_surroundings_do_not(whole, make_root, make_spec):
    spec, expected = whole
    torch.manual_seed(99)
    torch.rand(3)
    again, other = make_root("again"), dataclasses.replace(spec, seed=1)
    assert run(spec, again)[1] == expected["rows"] and identical(
        checkpoint(spec, again)["state_dict"], expected["checkpoint"]["state_dict"]
    )
    assert run(other, again)[0].run_id != Tracker(again).find(spec.key).run_id
    assert not identical(checkpoint(other, again)["state_dict"], expected["checkpoint"]["state_dict"])


def test_a_finished_run_is_not_run_again(whole, root, monkeypatch):
    spec, _ = whole
    first, rows = run(spec, root)
    shutil.rmtree(spec.folder(root))
    monkeypatch.setattr(engine, "train_and_test", lambda *args: pytest.fail("trained again"))
    again, same_rows = run(spec, root)
    assert (again.run_id, same_rows) == (first.run_id, rows)


def test_a_checkpoint_is_plain(whole):
    """``torch.load(weights_only=True)`` has read it; hyper-parameters and stages are numbers, names and lists."""
    spec, expected = whole
    saved = expected["checkpoint"]
    assert all(isinstance(v, int | float | str | list | None) for v in saved["hyper_parameters"].values())
    assert saved["hyper_parameters"].items() >= {k: v for k, v in spec.model.items() if k != "name"}.items()
    history = [
        {"stage": 0, "task": {"pairs": 1}, "step": 4, "solved": False},
        {"stage": 1, "task": {"pairs": 3}, "step": 9, "solved": False},
    ]
    assert saved["callbacks"]["Curriculum"]["history"] == history


def test_what_a_finished_run_has_recorded(whole, root):
    spec, _ = whole
    messages = []
    found, rows = run(spec, root, messages.append)
    assert {(name, x) for name, x, _ in rows} >= {("exact_match", 2), ("exact_match", 4), ("capacity", 2), ("loss", 4)}
    assert [step for step, _ in history(root, found.run_id)] == [3, 4, 7, 9]
    assert {
        "steps",
        "seconds",
        "train_seconds",
        "peak_memory_mb",
        "train/loss",
        "valid/exact_match",
        "stage",
        "stage_solved",
    } <= found.metrics.keys()
    assert found.params["train.stages"] == str(spec.train["stages"]) and found.params["model.gamma"] == "clip"
    assert int(found.params["parameters"]) == sum(v.numel() for v in checkpoint(spec, root)["state_dict"].values())
    messages = [m for m in messages if "share" not in m]  # a test that takes longer than a second tells more
    assert messages[-1] == {"event": "testing"}
    places = [(m["stage"], m["stages"], m["step"], m["steps"], m["total_step"]) for m in messages if "metric" in m]
    assert (
        places[0] == (1, 2, 3, 4, 3)
        and [p[4] for p in places] == [3, 4, 7, 9]
        and {m["metric_name"] for m in messages[:-1]} == {"exact_match"}
    )


def test_a_run_measures_its_test_and_nothing_else_depends_on_the_clock(make_spec, root):
    """Seconds per context at every x, beside the test's values; a test in other segments has times and a key of its
    own."""
    plain = make_spec("model={name: mamba, width: 16}")
    cut = make_spec("model={name: mamba, width: 16}", "train.test_cuts=[4, 1]")
    (first, rows), (second, others) = run(plain, root), run(cut, root)
    assert plain.key != cut.key and {name for name, _, _ in rows} == {"loss", "exact_match", "capacity"}
    assert {r[:2]: r[2] for r in rows} == pytest.approx({r[:2]: r[2] for r in others}, abs=1e-5)
    for found in (first, second):
        times = Tracker(root).results(found, "time/")
        assert [(name, x) for name, x, _ in times] == [("seconds", 2), ("seconds", 4)] and all(
            0 < value < found.metrics["seconds"] for _, _, value in times
        )


def test_losses_are_weighed(make_spec):
    plain, weighed = (
        make_spec("model={name: larimar, width: 16}", *more) for more in ([], ["train.losses={memory: 1, keys: 0.5}"])
    )
    assert plain.key != weighed.key
    for spec, expected in ((plain, (1, 0, 0)), (weighed, (1, 1, 0.5))):
        module, _ = build(spec)
        assert tuple(module.hparams[f"{name}_loss"] for name in ("answer", "memory", "keys")) == expected


def test_a_run_times_its_training_at_every_x(make_spec, root):
    """``timed_steps``: tokens a second, on batches of one size; nothing else changes, and the weights do not."""
    plain, timed = make_spec(), make_spec("train.timed_steps=1")
    (_, rows), (found, same) = run(plain, root), run(timed, root)
    assert plain.key != timed.key and rows == same
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(checkpoint(spec, root)["state_dict"].values() for spec in (plain, timed)), strict=True)
    )
    times = Tracker(root).results(found, "time/")
    assert [(name, x) for name, x, _ in times] == [
        ("seconds", 2),
        ("seconds", 4),
        ("train_tokens_per_s", 2),
        ("train_tokens_per_s", 4),
    ]


def test_a_training_that_was_over_is_timed_as_its_last_stage(fit):
    """By a run that was interrupted before its test."""
    stages = "train.stages=[{steps: 1}, {steps: 1, batch_size: 2, task.pairs: 3}]"
    trainer, *_ = fit(stages)
    again, *_ = fit(stages, resume=saved(Path(trainer.default_root_dir))[0])
    assert again.global_step == 2 and again.datamodule.batch_size == trainer.datamodule.batch_size == 2
    assert again.datamodule.task.config.pairs == trainer.datamodule.task.config.pairs == 3


@pytest.mark.parametrize("cuts", [(), [7]])
@pytest.mark.parametrize(("contexts", "read"), [(0, [6, 1]), (5, [5, 5])])  # 0: of 120 tokens
def test_the_speed_of_a_training_counts_all_but_the_first_step(monkeypatch, contexts, read, cuts):
    clock, sizes, cut = iter([10.0, 14.0, 20.0, 21.0]), [], []
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    weight = torch.nn.Parameter(torch.ones(()))

    def make_task(segments):
        batch = SimpleNamespace(to=lambda device: SimpleNamespace(ids_BT=torch.zeros(sizes[-1], 3)))
        batch.recut = lambda lengths: cut.append(lengths) or batch
        return SimpleNamespace(tokens=10 * segments, batch=lambda seed, split, step, size: sizes.append(size) or batch)

    conditions = [(2, make_task(2)), (8, make_task(8))]
    data = SimpleNamespace(test_conditions=conditions, whole_task=make_task(4), batch_size=3, seed=0, cuts=cuts)
    module = SimpleNamespace(
        device=torch.device("cpu"), loss=lambda batch: weight.square(), zero_grad=list, train=list, eval=list
    )
    timer = TestTimer(timed_steps=2, timed_contexts=contexts)
    precision = SimpleNamespace(forward_context=contextlib.nullcontext)
    timer.on_test_start(SimpleNamespace(precision_plugin=precision, datamodule=data), module)
    assert sizes == read and cut == [cuts, cuts]
    assert timer.rows == [("train_tokens_per_s", 2, 10.0 * read[0]), ("train_tokens_per_s", 8, 160.0 * read[1])]


def test_the_backward_pass_of_a_timed_step_is_outside_of_autocast():
    """As in a training: the passes that are written by hand compute in the precision of their inputs."""
    weight, seen = torch.nn.Parameter(torch.ones(2)), []
    weight.register_hook(lambda gradient: seen.append(torch.is_autocast_enabled("cpu")))

    def loss(batch):
        seen.append(torch.is_autocast_enabled("cpu"))
        return weight.square().sum()

    module = SimpleNamespace(device=torch.device("cpu"), loss=loss)
    TestTimer(timed_steps=1).seconds_per_step(module, None, lambda: torch.autocast("cpu", torch.bfloat16))
    assert seen == [True, False] * 2


def test_seconds_are_per_context(monkeypatch):
    """Of all batches of an x, however large each is, but the first of the test, which warms up, where another follows;
    what is between them does not count."""
    clock = iter([0.0, 9.0, 10.0, 13.0, 20.0, 21.0, 30.0, 30.5, 40.0, 41.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    module = SimpleNamespace(device=torch.device("cpu"))
    trainer = SimpleNamespace(datamodule=SimpleNamespace(test_conditions=[(50, None), (100, None)]))
    timer = TestTimer()
    for i, size, loader in [(0, 7, 0), (1, 6, 0), (2, 2, 0), (0, 5, 1), (1, 15, 1)]:
        batch = SimpleNamespace(ids_BT=torch.zeros(size, 3))
        timer.on_test_batch_start(trainer, module, batch, i, loader)
        timer.on_test_batch_end(trainer, module, None, batch, i, loader)
    assert timer.rows == [("seconds", 50, 0.5), ("seconds", 100, 0.1)]


@pytest.mark.parametrize("cut", ["[]", "[0]", "[5, 1]"])
def test_a_test_tells_what_share_it_has_read(make_spec, cut, monkeypatch):
    """All of it at the end, however its contexts are cut."""
    silence_lightning()
    spec = make_spec(f"train.test_cuts={cut}")
    module, data = build(spec)
    progress = Progress(lambda message: None, Curriculum(spec.stages, spec.train["valid_every"]), "exact_match")
    L.Trainer(
        accelerator="cpu", callbacks=[progress], logger=False, enable_checkpointing=False, enable_progress_bar=False
    ).test(module, data, verbose=False)
    assert progress.tokens_read == progress.test_tokens > 0


# Stages


def test_a_stage_may_have_its_own_batch_size(fit):
    trainer, _, _, spy = fit("train.stages=[{steps: 2, batch_size: 3}, {steps: 2}]", "train.valid_every=2")
    assert [len(ids) for ids in spy.ids] == [3, 3, 4, 4]
    assert torch.equal(spy.ids[3], trainer.datamodule.task.batch(0, "train", 3, 4).ids_BT)


def test_stages_end_at_their_cap_and_validate_on_their_own_task(fit):
    trainer, module, curriculum, spy = fit(*STAGED)
    assert spy.train == [(s, 1 if s < 4 else 3) for s in range(9)] and spy.valid == [(3, 1), (4, 1), (7, 3), (9, 3)]
    task = trainer.datamodule.whole_task
    for step, ids in enumerate(spy.ids):
        assert torch.equal(ids, task.at(pairs=1 if step < 4 else 3).batch(0, "train", step, 4).ids_BT)
    assert curriculum.done and trainer.global_step == 9 and not torch.is_inference(module.model.memory)


def test_progress_counts_the_steps_of_a_stage(make_spec, tmp_path):
    """From 0 in a new stage; of the last one, its number of steps when it has ended."""
    told = []
    run(make_spec(*STAGED, "train.valid_size=2", "train.test_size=2"), tmp_path, told.append)
    assert [(m["stage"], m["step"], m["steps"]) for m in told if "metric" in m] == [
        (1, 3, 4),
        (2, 0, 5),
        (2, 3, 5),
        (2, 5, 5),
    ]


@pytest.mark.parametrize(("until", "steps"), [("{exact_match: 0.0}", 3), ("{exact_match: 1.1}", 7)])
def test_a_stage_ends_as_soon_as_until_is_reached(fit, until, steps):
    _, _, curriculum, spy = fit(f"train.stages=[{{task.pairs: 1, steps: 7, until: {until}}}, {{steps: 2}}]")
    assert [(entry["step"], entry["solved"]) for entry in curriculum.history] == [
        (steps, steps == 3),
        (steps + 2, False),
    ]
    assert spy.train[steps - 1 : steps + 1] == [(steps - 1, 1), (steps, 2)] and len(spy.train) == steps + 2


@pytest.mark.parametrize(
    ("goal", "needed", "steps"), [(1.1, "true", [4]), (1.1, "false", [4, 6]), (0.0, "true", [3, 5])]
)
def test_a_training_ends_with_a_needed_stage_that_it_does_not_solve(fit, tmp_path, goal, needed, steps):
    """A run that has stopped stays so."""
    first = f"{{task.pairs: 1, steps: 4, until: {{exact_match: {goal}}}, needed: {needed}}}"
    trainer, _, curriculum, spy = fit(f"train.stages=[{first}, {{steps: 2}}]")
    assert [entry["step"] for entry in curriculum.history] == steps and trainer.global_step == steps[-1]
    again, _, curriculum, spy = fit(f"train.stages=[{first}, {{steps: 2}}]", resume=saved(tmp_path / "fit")[0])
    assert not spy.train and again.global_step == steps[-1] and curriculum.done


def test_what_is_recorded_of_a_run_that_stops(make_spec, root):
    """The test reads its weights on the whole task."""
    needed = "{steps: 2, until: {exact_match: 1.1}, needed: true}"
    stages = f"train.stages=[{{task.pairs: 1, steps: 2}}, {needed}, {{steps: 2}}]"
    found, rows = run(make_spec(stages, "train.valid_size=2", "train.test_size=2"), root)
    assert found.tags["lit.stage_steps"] == "2 2" and found.metrics["stage"] == 1 and found.metrics["steps"] == 4
    assert found.status == "FINISHED" and {x for _, x, _ in rows} == {2, 4}


@pytest.mark.parametrize(("steps", "validations"), [(6, [3, 6]), (7, [3, 6, 7]), (2, [2]), (1, [1])])
def test_the_last_epoch_of_a_run_may_be_short(fit, steps, validations):
    trainer, _, _, spy = fit(f"train.steps={steps}")
    assert trainer.global_step == steps and [step for step, _ in spy.valid] == validations


def test_a_finished_training_resumes_to_nothing(fit, tmp_path):
    _, module, _, _ = fit("train.steps=4")
    again, other, curriculum, spy = fit("train.steps=4", resume=saved(tmp_path / "fit")[0])
    assert again.global_step == 4 and not spy.train and curriculum.done
    assert identical(dict(module.state_dict()), dict(other.state_dict()))


def test_accumulation_reads_the_batch_of_an_optimizer_step_in_parts(fit):
    trainer, _, _, spy = fit("train.steps=4", "train.valid_every=2", "train.trainer={accumulate_grad_batches: 2}")
    task = trainer.datamodule.whole_task
    assert trainer.global_step == 4 and len(spy.ids) == 8 and [step for step, _ in spy.valid] == [2, 4]
    halves = [half for k in range(4) for half in task.batch(0, "train", k, 4).ids_BT.split(2)]
    assert all(map(torch.equal, spy.ids, halves))


@pytest.mark.parametrize(("workers", "accumulate"), [(2, 1), (0, 2), (2, 2)])
def test_a_run_resumes_between_validations_with_workers_and_accumulation(
    fit, tmp_path, monkeypatch, workers, accumulate
):
    """An early stop is the same as a kill after the last checkpoint."""
    knobs = (
        "train.steps=5",
        "train.valid_every=5",
        f"train.workers={workers}",
        f"train.trainer={{accumulate_grad_batches: {accumulate}}}",
    )
    _, whole, _, spy = fit(*knobs)
    shutil.rmtree(tmp_path / "fit")
    monkeypatch.setattr(saving, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(Spy, "on_before_optimizer_step", lambda self, trainer, *args: fail_at(trainer, 3))
    with pytest.raises(KeyError):
        fit(*knobs)
    assert saved(tmp_path / "fit")[0].name == "step-00000003.ckpt"
    monkeypatch.undo()
    _, again, _, rest = fit(*knobs, resume=saved(tmp_path / "fit")[0])
    assert identical(dict(whole.state_dict()), dict(again.state_dict()))
    assert rest.train == spy.train[3 * accumulate :] and all(map(torch.equal, rest.ids, spy.ids[3 * accumulate :]))


def fail_at(trainer, step):
    if trainer.global_step == step:
        raise KeyError(step)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(fit, workers):
    _, alone, _, _ = fit("train.steps=4", "train.valid_every=2")
    _, helped, _, spy = fit("train.steps=4", "train.valid_every=2", f"train.workers={workers}")
    assert len(spy.ids) == 4 and identical(dict(alone.state_dict()), dict(helped.state_dict()))


# Optimizer


@pytest.mark.parametrize(
    ("overrides", "rates"),
    [
        (["train.warmup=3"], [1 / 3, 2 / 3, 1, 1, 1, 1]),
        (["train.warmup=0.5"], [1, 1, 1 / 2, 1, 1, 1]),
        (["train.schedule=linear", "train.final_lr=0"], [1, 1 / 2, 1, 3 / 4, 1 / 2, 1 / 4]),
        (["train.schedule=linear", "train.final_lr=0.5", "train.warmup=2"], [1 / 2, 3 / 4, 1, 7 / 8, 3 / 4, 5 / 8]),
    ],
)
def test_learning_rates_over_two_stages(fit, overrides, rates):
    _, _, _, spy = fit("train.stages=[{steps: 2}, {steps: 4}]", "train.lr=1e-3", *overrides)
    assert [lr / 1e-3 for lr in spy.lr] == pytest.approx(rates)


@pytest.mark.parametrize(
    "knob",
    [
        "train.clip_norm=1e-3",
        "train.clip_value=1e-3",
        "train.weight_decay=0.9",
        "train.bptt=1",
        "train.precision=64-true",
    ],
)
def test_knobs_of_the_training_change_the_weights(fit, knob):
    _, plain, _, _ = fit("train.steps=2", "train.lr=1e-2", "model.value_std=0.5")
    _, other, _, _ = fit("train.steps=2", "train.lr=1e-2", "model.value_std=0.5", knob)
    assert not identical(dict(plain.state_dict()), dict(other.state_dict()))


# Guards


class Poison(L.Callback):
    """Makes the loss or one gradient of step 2 non-finite, and keeps the weights from before it."""

    def __init__(self, where, value):
        self.where, self.value, self.before = where, value, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 2 and self.where == "loss":
            loss.data.fill_(self.value)

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 2 and self.where == "gradient":
            next(pl_module.parameters()).grad[0, 0] = self.value


@pytest.mark.parametrize("clip", ["train.clip_norm=1.0", "train.clip_value=1.0", "train.clip_norm=0"])
@pytest.mark.parametrize(
    ("where", "value"), [("loss", math.nan), ("loss", math.inf), ("gradient", math.nan), ("gradient", -math.inf)]
)
def test_a_non_finite_number_stops_before_the_weights_change(fit, where, value, clip):
    poison = Poison(where, value)
    with pytest.raises(
        NonFinite, match=rf"{where}( norm)? is (nan|inf) at step 2, stage 2 of 2, arm a, lr 0\.01; lower train\.lr"
    ) as caught:
        fit("train.stages=[{steps: 1}, {steps: 3}]", "train.lr=1e-2", clip, callbacks=[poison])
    trainer = next(frame.locals["trainer"] for frame in caught.traceback if "trainer" in frame.locals)
    assert trainer.global_step == 2 and ("denom_floor" in str(caught.value)) == (where == "loss")
    assert all(torch.equal(p, poison.before[name]) for name, p in trainer.lightning_module.named_parameters())


def test_who_has_no_floor_is_not_told_to_raise_it(fit):
    model = "model={name: rmt, layers: 1, width: 16, heads: 2, memory_tokens: 1}"
    with pytest.raises(NonFinite, match=r"lower train\.lr$"):
        fit(model, "train.stages=[{steps: 1}, {steps: 3}]", callbacks=[Poison("loss", math.nan)])


def test_a_failed_run_says_where_and_goes_on_from_its_checkpoint(make_spec, root):
    spec = make_spec("train.lr=1e30")
    with pytest.raises(NonFinite):
        run(spec, root)
    found = Tracker(root).find(spec.key)
    assert found.status == "FAILED" and not any(name.startswith("test/") for name in found.metrics)
    assert found.tags["lit.error"].startswith("NonFinite: ") and all(
        part in found.tags["lit.error"] for part in ("at step 1", "stage 1 of 1", "lr 1e+30")
    )
    with pytest.raises(NonFinite):
        run(spec, root)
    assert Tracker(root).find(spec.key).run_id == found.run_id


def test_a_training_that_breaks_down_is_tested(make_spec, root):
    """With the weights before, which are saved: a test that was cut short goes on from them, and another run starts
    from them. The run knows the step."""
    overrides = ("train.lr=1e30", "train.breakdown=test", "train.stages=[{steps: 3}, {steps: 3}]")
    spec, sent = make_spec(*overrides), []

    def interrupt(message):
        sent.append(message)
        if message["event"] == "testing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(spec, root, interrupt)
    assert any("training broke down" in message.get("message", "") for message in sent)
    before = checkpoint(spec, root)
    found, rows = run(spec, root)
    assert found.status == "FINISHED" and found.metrics["broke_down"] == found.metrics["steps"] == 1
    assert found.tags["lit.stage_steps"] == "1" and {x for _, x, _ in rows} == {2, 4}
    assert all(torch.isfinite(weights).all() for weights in before["state_dict"].values())
    assert before["global_step"] == 1 and checkpoint(spec, root)["global_step"] == 1
    started = build(dataclasses.replace(spec, start=spec), root)[0]
    assert identical(started.state_dict(), before["state_dict"])


# Pretrained weights


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A pretrained GPT-2, made here."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(1)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(folder)
    return folder


GPT2 = ["model.family=gpt2", "model.vocab_size=64", "model.positions=32"]


def test_a_run_starts_from_pretrained_weights(make_spec, decoder, tmp_path):
    """The decoder is that of the folder in every seed, the memory that of the seed; and so it is in a model of ours
    that was saved."""
    spec = make_spec(*GPT2, f"train.init={decoder}")
    builds = [build(dataclasses.replace(spec, seed=seed))[0].model for seed in (0, 1)]
    whole = load_class("model", "transformer").from_pretrained(decoder).state_dict()
    for model in builds:
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in whole.items())
    assert not torch.equal(builds[0].memory, builds[1].memory)
    builds[0].save_pretrained(tmp_path / "ours")
    again = build(make_spec(*GPT2, f"train.init={tmp_path / 'ours'}"))[0].model
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in builds[0].state_dict().items())
    assert make_spec(*GPT2).key != make_spec(*GPT2, f"train.init={decoder}").key


def test_a_run_starts_from_a_decoder_and_an_encoder(make_spec, tmp_path):
    """Both from their folders, what lies between them from the seed."""
    (bert, _), decoder = make_bert(tmp_path), make_decoder(tmp_path)
    encoder = "encoder_layers: 2, encoder_width: 12, encoder_heads: 3"
    sizes = "family: gpt2, layers: 2, width: 16, heads: 2, positions: 20, vocab_size: 23, latent_width: 8"
    spec = make_spec(
        f"model={{name: larimar, {sizes}, {encoder}}}",
        f"train.init={{decoder: {decoder}, encoder: {bert}}}",
    )
    model, whole = (
        build(spec)[0].model,
        load_class("model", "larimar").from_pretrained(decoder, encoder=bert, latent_width=8).state_dict(),
    )
    own = model.state_dict()
    assert torch.equal(own["encoder.layers.1.up.weight"], whole["encoder.layers.1.up.weight"].float())
    assert torch.equal(own["decoder.layers.1.block.up.weight"], whole["decoder.layers.1.block.up.weight"].float())
    assert spec.key != dataclasses.replace(spec, train=spec.train | {"init": str(decoder)}).key
    with pytest.raises(ValueError, match=r"encoder_layers=1: expected 2, as in .*bert"):
        build(dataclasses.replace(spec, model=spec.model | {"encoder_layers": 1}))


@pytest.mark.parametrize(("name", "value", "theirs"), [("layers", 2, 1), ("vocab_size", 65, 64)])
def test_pretrained_weights_of_another_model(make_spec, decoder, name, value, theirs):
    """The plan tells it; a run whose folder has changed since, or whose weights come from the hub, as well."""
    spec = make_spec(*GPT2, f"train.init={decoder}")
    expected = f"init='.*decoder.*': its {name} is {theirs}, that of the model {value}; expected the same, set model."
    with pytest.raises(ValueError, match=expected):
        build(dataclasses.replace(spec, model=spec.model | {name: value}))
    with pytest.raises(FileNotFoundError, match="no/where: no such folder"):
        build(make_spec(*GPT2, "train.init=no/where"))


def test_weights_of_a_run_of_another_model(make_spec, tmp_path):
    """And of a run that has left none."""
    silence_lightning()
    start = make_spec()
    with pytest.raises(FileNotFoundError, match=r"init={run: tiny/a}: no checkpoint of its seed 0 in .*; run it first"):
        build(dataclasses.replace(start, start=start), tmp_path)
    trainer = make_trainer(
        start,
        tmp_path,
        False,
        Curriculum(start.stages, start.train["valid_every"]),
        RunCheckpoint(start.folder(tmp_path)),
    )
    module, data = build(start)
    trainer.fit(module, datamodule=data)
    again = build(dataclasses.replace(start, start=start, seed=1), tmp_path)[0]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"init={run: tiny/a}: .*has shape"):
        build(dataclasses.replace(make_spec("model.width=32"), start=start), tmp_path)
    with pytest.raises(ValueError, match=r"init={run: tiny/a}: .*layers.1"):
        build(dataclasses.replace(make_spec("model.layers=2"), start=start), tmp_path)


def test_parts_that_only_one_of_two_models_has(tree, tmp_path):
    """They are drawn from the seed, or left behind: a memory of lines may begin with an auto-encoder, whatever will
    tell their order."""
    silence_lightning()
    lines = {
        "name": "memreasoner",
        "layers": 1,
        "encoder_layers": 1,
        "width": 16,
        "heads": 2,
        "latent_width": 8,
        "slots": 4,
        "line_tokens": 12,
        "pad_id": 0,
    }
    tree["base"] |= {
        "model": lines,
        "task": {"name": "memreasoner", "line_tokens": 12, "segment_len": 16, "vocab_size": 300, "books": 1},
    }
    start = {"train.init": {"run": "a"}}
    arms = {"a": {"model.temporal": "none"}, "b": start, "c": start | {"model": lines | {"name": "larimar"}}}
    tree |= {"arms": arms, "report": {"x": "test_tokens"}, "expect": []}
    a, b, c = parse(tree, "tiny.yaml").at().plan()
    module, data = build(a)
    make_trainer(
        a, tmp_path, False, Curriculum(a.stages, a.train["valid_every"]), RunCheckpoint(a.folder(tmp_path))
    ).fit(module, datamodule=data)
    found, fresh, trained = build(b, tmp_path)[0].state_dict(), build(b)[0].state_dict(), module.state_dict()
    assert {name.split(".")[1] for name in found.keys() - trained.keys()} == {"gru"}
    assert all(torch.equal(tensor, trained.get(name, fresh[name])) for name, tensor in found.items())
    larimar = build(c, tmp_path)[0].state_dict()
    assert {name.split(".")[1] for name in trained.keys() - larimar.keys()} == {"W_q"}
    assert all(torch.equal(tensor, trained[name]) for name, tensor in larimar.items())
