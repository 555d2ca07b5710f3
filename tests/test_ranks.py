"""A run on several devices: two ranks on CPU have the numbers of one, and end together."""

import gc
import math
import multiprocessing
import os
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch
from conftest import identical
from test_lit import all_data, all_modules, make_data, make_double
from torch import distributed

from lit_memory.lit import LIT_DATA, LIT_MODULES
from lit_memory.lit.callbacks.finite import NonFinite
from lit_memory.lit.callbacks.seed import StepSeed
from lit_memory.lit.modules import LitMemory
from lit_memory.run import ranks, training
from lit_memory.run.checkpoint import saved
from lit_memory.run.journal import Journal, read
from lit_memory.run.member import take_part
from lit_memory.run.results import collect
from lit_memory.run.trainer import silence_lightning

TWO = "train.trainer={strategy: ddp, devices: 2}"
# A metric ends the first stage; the last batch of validations and tests is too small for two. Epochs end at 2, 4 and 5.
STAGED = (
    "train.stages=[{task.pairs: 1, steps: 4, until: {exact_match: 0}}, {task.pairs: 3, steps: 3, batch_size: 8}]",
    *("train.valid_every=2", "train.valid_size=5", "train.test_size=7", "train.eval_batch_size=3"),
    *("train.precision=64-true", "train.lr=0.01"),
)


HANGS = 60.0


class Fork:
    """``subprocess.Popen`` of a member as a fork of this process: imports would take most of the time."""

    def __init__(self, arguments):
        gc.collect()  # the store of an earlier test would wait, in the fork, for a thread that is not there
        self.process = multiprocessing.get_context("fork").Process(target=self.work, args=arguments, daemon=True)
        self.process.start()

    def work(self, *arguments):
        gc.disable()
        take_part(*arguments)

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout: float = HANGS):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("fork", timeout)

    def kill(self):
        self.process.kill()


@pytest.fixture
def train(make_spec, monkeypatch, tmp_path):
    """``train(root, "train.steps=8", ...)``: a run without MLflow; its rows, sample scores, journal and checkpoint, and
    the weights of every rank."""
    monkeypatch.setattr(ranks, "started", Fork)
    test = training.Training.test

    def keeping(self):
        test(self)
        torch.save(self.module.state_dict(), self.trainer.default_root_dir + f"/rank-{self.rank.number}.pt")

    monkeypatch.setattr(training.Training, "test", keeping)

    def run(name, *overrides, check=lambda: None):
        silence_lightning()
        spec, root = make_spec(*overrides), tmp_path / name
        folder = spec.folder(root)
        with training.trained(spec, root, Journal(folder), check, lambda message: None) as done:
            done.test()
        weights = [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank-*.pt"))]
        return SimpleNamespace(
            rows=collect(done.trainer.callback_metrics, done.data),
            scores=done.scores.scores,
            journal=sorted(row[:3] for row in read(folder).rows),
            weights=weights,
            checkpoint=torch.load(saved(folder)[0], weights_only=True),
            folder=folder,
        )

    return run


WHOLE = {}


@pytest.fixture
def two(train):
    """A run of two ranks that nothing interrupts (trained once)."""
    if not WHOLE:
        WHOLE["two"] = train("whole", *STAGED, TWO)
    return WHOLE["two"]


def close(found, expected):
    """The same rows (name, x, value), to the order of sums."""
    assert [row[:2] for row in found] == [row[:2] for row in expected] and len(found)
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-9, abs=1e-12)


def test_two_ranks_have_the_numbers_of_one(train, two):
    """Weights, metrics of training, validation and test, and the scores of every sample in its place."""
    one = train("one", *STAGED)
    assert len(two.weights) == 2 and not distributed.is_initialized()
    for name, weight in one.weights[0].items():
        assert torch.equal(two.weights[0][name], two.weights[1][name]), name
        torch.testing.assert_close(two.weights[0][name], weight, rtol=1e-9, atol=1e-12)
    close(two.rows, one.rows)
    close(two.journal, one.journal)
    assert {name for name, _, _ in one.journal} >= {"train/loss", "valid/loss", "valid/exact_match"}
    assert two.scores.keys() == one.scores.keys()
    assert all(two.scores[x] == pytest.approx(one.scores[x]) and len(one.scores[x]) == 7 for x in one.scores)
    assert [entry["solved"] for entry in two.checkpoint["callbacks"]["Curriculum"]["history"]] == [True, False]
    assert two.checkpoint["callbacks"]["Curriculum"] == one.checkpoint["callbacks"]["Curriculum"]


def test_a_killed_rank_ends_the_run_which_goes_on_bit_for_bit(train, two, monkeypatch):
    def die(trainer, callback):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with (
        monkeypatch.context() as patch,
        pytest.raises(ranks.RankLost, match=r"^rank 1 of 2 was ended by SIGKILL; run the"),
    ):
        patch.setattr(StepSeed, "on_train_batch_start", lambda self, trainer, *args: die(trainer, self))
        train("killed", *STAGED, TWO)
    again = train("killed", *STAGED, TWO)
    for part in ("state_dict", "optimizer_states", "global_step"):
        assert identical(again.checkpoint[part], two.checkpoint[part]), part
    assert again.rows == two.rows and again.journal == two.journal


def test_a_loss_that_is_nan_on_one_rank_ends_all(train, monkeypatch):
    whole = LitMemory.loss

    def loss(self, batch):
        return whole(self, batch) * (math.nan if self.global_rank and self.global_step == 1 else 1)

    monkeypatch.setattr(LitMemory, "loss", loss)
    with pytest.raises(NonFinite, match=r"^loss on rank 1 is nan at step 1, stage 1 of 1, arm a"):
        train("nan", TWO)
    tested = train("nan", TWO, "train.breakdown=test", "train.valid_every=1")
    assert tested.checkpoint["global_step"] == 1 and identical(*tested.weights) and tested.rows


@pytest.mark.slow
def test_sigterm_saves_on_all_ranks(train, two, monkeypatch):
    """It comes to rank 0 between two validations, and to the others, which leave the answer to it."""

    def terminate(trainer):
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(StepSeed, "on_train_batch_start", lambda self, trainer, *args: terminate(trainer))
        train("terminated", *STAGED, TWO)
    again = train("terminated", *STAGED, TWO)
    assert identical(again.checkpoint["state_dict"], two.checkpoint["state_dict"]) and again.rows == two.rows


# The parts of a batch


def gradients(module, *batches):
    """Loss and gradients, as the mean over the devices that read these batches has them."""
    module.zero_grad()
    torch.manual_seed(0)
    total = torch.stack([module.loss(batch) * batch.share for batch in batches]).mean()
    total.backward()
    return {"": total.detach()} | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def check_parts(lit, data):
    samples = make_data(data)
    module, batch = make_double(lit, samples), samples.task.batch(0, "train", 0, 3)
    parts = [batch.part(k, 2) for k in range(2)]
    assert [len(part.ids_BT) for part in parts] == [2, 1] and sum(part.share for part in parts) == pytest.approx(2)
    found, expected = gradients(module, *parts), gradients(module, batch)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@all_modules
def test_the_parts_of_a_batch_have_its_gradients(lit):
    check_parts(lit, LIT_DATA["associative_retrieval"])


@all_data
def test_the_parts_of_a_batch_of_any_task_have_its_gradients(data):
    check_parts(LIT_MODULES["rmt"], data)
