"""Streams: columns of a text, the memory that goes on from batch to batch, and runs that are killed in the middle of
one."""

import itertools
import math
import re
import signal
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from conftest import build_model
from faults import assert_same, die, forked, outcome, train
from lightning.pytorch.loggers import CSVLogger
from test_language_modeling import bigram, make, make_data, measure, source  # noqa: F401  (a fixture)

from lit_memory.lit import LIT_MODULES, diagnostics
from lit_memory.plan.errors import ConfigError
from lit_memory.recurrence import detach, map_state, state_tensors, unroll
from lit_memory.run import checkpoint, saving
from lit_memory.tasks.language_modeling import LanguageModeling
from lit_memory.text.stream import Stream

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]
W = 12  # tokens of a window


@pytest.fixture
def numbered(monkeypatch):
    """``numbered(n)``: every split is a text of n tokens, 100, 101, ..."""
    return lambda n: monkeypatch.setattr(
        LanguageModeling, "text", lambda self, split: Stream(np.arange(100, 100 + n), n)
    )


# Columns


@pytest.mark.parametrize("length", [61, 75, 100])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_training_columns(numbered, length, size):
    """Column c of batch k is window k of the c-th part of the text, which begins at the place of the epoch; a batch
    begins with the last token of the one before, and all that follow a token are scored."""
    numbered(length)
    task, steps = make(stream=True), (length - 1) // size // W
    assert task.stream_steps("train", size) == steps
    starts = []
    for epoch in range(3):
        first = task.batch(7, "train", epoch * steps, size)
        starts.append(int(first.ids_BT[0, 0]))
        for k in range(steps):
            batch = task.batch(7, "train", epoch * steps + k, size)
            expected = [
                [100 + (starts[-1] - 100 + c * ((length - 1) // size) + k * W + j) % length for j in range(W + 1)]
                for c in range(size)
            ]
            assert batch.ids_BT.tolist() == expected and batch.continues == (k > 0)
            assert torch.equal(batch.targets_BT[:, 1:], batch.ids_BT[:, 1:]) and (batch.targets_BT[:, 0] == -100).all()
    assert (
        len(set(starts)) == 3 and len({int(task.batch(seed, "train", 0, size).ids_BT[0, 0]) for seed in range(5)}) > 2
    )


@pytest.mark.parametrize("length", [61, 62, 73, 100])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_evaluation_scores_every_token_but_the_first_once(numbered, length, size):
    numbered(length)
    task = make(stream=True)
    batches = [task.batch(0, "test", k, size) for k in range(task.stream_steps("test", size))]
    assert [batch.continues for batch in batches] == [k > 0 for k in range(len(batches))]
    columns = torch.cat([batch.targets_BT[:, 1:] for batch in batches], dim=1)
    assert columns[columns != -100].tolist() == list(range(101, 100 + length))
    for batch in batches:  # what a token is predicted from is the token before it
        row, column = batch.scored_BT.nonzero(as_tuple=True)
        assert torch.equal(batch.ids_BT[row, column - 1] + 1, batch.targets_BT[row, column])


@pytest.mark.parametrize("eval_batch_size", [1, 3, 16])
def test_the_loss_is_that_of_the_whole_text(source, eval_batch_size):  # noqa: F811
    """An oracle of known losses has exactly their mean over all tokens but the first, whatever the columns."""
    model, data = bigram(), make_data(source, stream=True, eval_batch_size=eval_batch_size)
    tokens = data.task.text("test").tokens_N.astype(int)
    found = measure(model, data)
    assert found["loss@3"] == pytest.approx(
        np.mean([-float(model.table_VV[a, b]) for a, b in itertools.pairwise(tokens)]), rel=1e-12
    )
    assert found["perplexity@3"] == pytest.approx(math.exp(found["loss@3"]), rel=1e-6)
    assert found.keys() == {"loss@3", "perplexity@3", "bits_per_byte@3"}  # no curve by segment


def test_evaluation_reads_whole_batches(source):  # noqa: F811
    """At most as many contexts as it may, and at least one batch."""
    for most, batches in [(1, 1), (7, 1), (8, 2), (1000, 7)]:  # 1,208 tokens in 4 columns: 302 in windows of 48
        (loader,) = make_data(source, stream=True, test_size=most, eval_batch_size=4).test_dataloader()
        assert [len(batch.ids_BT) for batch in loader] == [4] * batches


# Memory


def stream_of(count, size=2, segments=2, segment_len=4):
    """Batches of a stream of random tokens."""
    window, generator = segments * segment_len, torch.Generator().manual_seed(7)
    ids = torch.randint(19, (size, count * window + 1), generator=generator)
    task = make(stream=True, segments=segments, segment_len=segment_len)
    for k in range(count):
        part = ids[:, k * window : (k + 1) * window + 1].numpy()
        yield task.make_batch(Stream(np.arange(9), 9), part, np.where(np.arange(window + 1) > 0, part, -100), k > 0)


def module_of(name, **options):
    module = LIT_MODULES[name](width=16, vocab_size=19, **options)
    module.model = build_model(name)
    module.log = lambda *args, **kwargs: None
    return module


CARRIERS = [
    "transformer",
    "xl",
    "rmt",
    "rmt_xl",
    "rmt_r",
    "prmt",
    "armt",
    "tarm",
    "mamba",
    "rwkv",
    "deltanet",
    "gated_deltanet",
    "mac",
]


@pytest.mark.parametrize("name", CARRIERS)
def test_the_memory_goes_on_and_the_gradient_does_not(name):
    """Losses and gradients of every batch against one reading of the stream, whose state is cut from its graph where a
    batch ends."""
    module = module_of(name)
    model, state = module.model, None
    for batch in stream_of(3):
        fast = module.training_step(batch, 0)
        hidden, state = unroll(model, batch.ids_BT[:, :-1], 4, state=state)
        slow = torch.nn.functional.cross_entropy(model.logits(hidden).flatten(0, 1), batch.ids_BT[:, 1:].flatten())
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=0)
        for a, b in zip(
            *(torch.autograd.grad(x, list(model.parameters()), materialize_grads=True) for x in (fast, slow)),
            strict=True,
        ):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        state = detach(state)
    alone = next(stream_of(1))
    assert torch.equal(module.training_step(alone, 0), module_of(name).training_step(alone, 0))  # False begins anew


@pytest.mark.parametrize("name", ["xl", "rmt"])
def test_a_stream_is_read_as_in_one_piece(name):
    """The mean of the losses of a test's batches is the loss of one long reading."""
    module = module_of(name).eval()
    batches = list(stream_of(4))
    with torch.no_grad():
        losses = [module.evaluate(batch, make(stream=True))["loss"][0] for batch in batches]
        whole = torch.cat([batches[0].ids_BT, *(batch.ids_BT[:, 1:] for batch in batches[1:])], dim=1)
        hidden = unroll(module.model, whole[:, :-1], 4).hidden_BTD
        expected = torch.nn.functional.cross_entropy(module.model.logits(hidden).flatten(0, 1), whole[:, 1:].flatten())
    assert torch.stack(losses).mean().item() == pytest.approx(expected.item(), rel=1e-12)


def test_validation_has_a_memory_of_its_own():
    """The training goes on where it was, and so does a validation after it, from nothing."""
    plain, disturbed = module_of("rmt"), module_of("rmt")
    first, second = stream_of(2)
    expected = [plain.training_step(batch, 0) for batch in (first, second)]
    assert torch.equal(disturbed.training_step(first, 0), expected[0])
    with torch.no_grad():
        values = [disturbed.eval().evaluate(batch, make(stream=True))["loss"][0] for batch in (first, second, first)]
    assert values[0] == values[2] == pytest.approx(expected[0].item(), rel=1e-12) and torch.equal(
        disturbed.train().training_step(second, 0), expected[1]
    )


@pytest.mark.parametrize("name", CARRIERS)
def test_a_checkpoint_holds_the_memory(name):
    """Plain tensors, and no more of them than the state has; a module that loads them goes on bit for bit."""
    module, (first, second) = module_of(name), stream_of(2)
    module.training_step(first, 0)
    saved = {}
    module.on_save_checkpoint(saved)
    assert all(
        type(t) is torch.Tensor and not t.requires_grad and t.untyped_storage().nbytes() == t.nbytes
        for t in saved["carried"]
    )
    again = module_of(name)
    again.on_load_checkpoint(saved)
    assert torch.equal(again.training_step(second, 0), module.training_step(second, 0))
    assert all(map(torch.equal, again.carried[True], module.carried[True]))
    fresh = module_of(name)
    fresh.carried = {True: list(state_tensors(map_state(torch.clone, fresh.model.init_state(2))))}
    if name not in ("transformer", "rwkv", "mamba", "deltanet", "gated_deltanet"):
        assert not torch.equal(fresh.training_step(second, 0), module.training_step(second, 0))
    fresh.on_load_checkpoint({})  # of another version, or of windows
    assert fresh.carried == {True: []}
    of_two = {"carried": [saved["carried"]] * 2}
    fresh.on_load_checkpoint(of_two)  # to be asked, not to be trained further
    assert fresh.carried == {True: []}
    fresh._trainer = SimpleNamespace(world_size=1)
    with pytest.raises(ValueError, match="the memory of its stream is that of 2 devices; expected those of 1"):
        fresh.on_load_checkpoint(of_two)
    fresh.on_load_checkpoint({"carried": [[], []]})
    assert fresh.carried == {True: []}


# Killed


@pytest.fixture
def stream_spec(make_spec, source):  # noqa: F811
    """Three batches an epoch, validations at steps 4, 8 and 10: a run is killed in the middle of streams, and of
    epochs."""

    def make(name):
        sizes = {
            "rmt": "heads: 2, memory_tokens: 2",
            "rmt_xl": "heads: 2, head_width: 8, ff_width: 32, mem_len: 20, alpha: 0.3, dropout: 0.2",
        }[name]
        return make_spec(
            f"model={{name: {name}, layers: 2, width: 16, {sizes}}}",
            f"task={{name: language_modeling, source: {source}, stream: true, tokenizer: char, "
            "segments: 3, segment_len: 32}",
            *("train.steps=10", "train.valid_every=4", "train.lr=1e-2", "train.batch_size=4", "train.test_size=8"),
        )

    return make


def test_kill_9_in_the_middle_of_a_stream(stream_spec, make_root, monkeypatch):
    """After kill -9 at several places, a checkpoint after every step, the run ends with the same weights, rows and
    carried memory, bit for bit."""
    spec = stream_spec("rmt_xl")
    monkeypatch.setattr(saving, "SAVE_SECONDS", -1.0)
    whole, root = make_root("whole"), make_root("killed")
    assert forked(lambda: train(spec, whole))() == 0
    for place in [
        ("lit.callbacks.seed:StepSeed.on_train_batch_start", 3),
        ("lit.callbacks.finite:FiniteGuard.on_before_optimizer_step", 3),
        ("run.saving:save", 3),
    ]:
        assert forked(lambda: train(spec, root), (f"lit_memory.{place[0]}", place[1], die))() == -signal.SIGKILL
    assert forked(lambda: train(spec, root))() == 0
    assert_same(outcome(spec, root), outcome(spec, whole))
    carried = [torch.load(checkpoint.saved(spec.folder(r))[0], weights_only=True)["carried"] for r in (root, whole)]
    assert len(carried[0]) == 5 and all(map(torch.equal, *carried))


@pytest.mark.slow
def test_a_lost_memory_would_be_seen(stream_spec, make_root):
    """The twin of the test before: a run that goes on with an empty memory ends elsewhere."""
    spec, roots = stream_spec("rmt"), [make_root("whole"), make_root("killed")]
    assert forked(lambda: train(spec, roots[0]))() == 0
    assert (
        forked(lambda: train(spec, roots[1]), ("lit_memory.lit.callbacks.seed:StepSeed.on_train_batch_start", 6, die))()
        == -signal.SIGKILL
    )

    def forgetful():
        LIT_MODULES["rmt"].on_load_checkpoint = lambda self, saved: self.carried.update(
            {True: [torch.zeros_like(t) for t in saved["carried"]]}
        )
        train(spec, roots[1])

    assert forked(forgetful)() == 0
    weights = [outcome(spec, root)[0] for root in roots]
    assert any(not torch.equal(value, weights[1][name]) for name, value in weights[0].items())


# Wrong input


def test_wrong_settings():
    with pytest.raises(ValueError, match=r"^stride=3: expected none for a stream"):
        make(stream=True, stride=3)


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_column_that_is_too_short(source, split):  # noqa: F811
    """Told before the training, of every split."""
    sizes = {"batch_size": 1000} if split == "train" else {"batch_size": 1, "eval_batch_size": 1000}
    message = (
        "segments=3: a window has 48 tokens, a column of .*text, split %s, in 1,000 columns, 1; "
        "expected fewer, or more text"
    )
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with pytest.raises(ValueError, match=message % ("valid" if split == "test" else split)):
        trainer.fit(LIT_MODULES["rmt"](width=16, layers=1), make_data(source, stream=True, **sizes))
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "train.bptt=4",
            "train.bptt: 4: a batch of the stream has 3 segments, and no gradient leaves it; "
            "expected that many at most, or more task.segments",
        ),
        (
            "train.stages=[{task.segments: 2}]",
            "train.stages[0].task.segments: a stage of a stream cannot change what its memory comes from",
        ),
        ("train.stages=[{steps: 2, batch_size: 8}]", "train.stages[0].batch_size: a stage of a stream cannot change"),
    ],
)
def test_what_a_stream_does_not_allow(make_spec, settings, message):
    task = "task={name: language_modeling, segments: 3, stream: true}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_spec(task, settings)
    make_spec(task, "train.bptt=3", "train.stages=[{steps: 2}, {until: {perplexity: 9.0}}]")
    make_spec(task.replace("true", "false"), "train.bptt=4")


def test_a_batch_of_a_stream_is_read_whole(source):  # noqa: F811
    """By several devices in parts, each of which continues its own samples; but not in parts one after the other."""
    data = make_data(source, stream=True)
    data.trainer = SimpleNamespace(global_step=0, accumulate_grad_batches=2, world_size=1, global_rank=0)
    with pytest.raises(
        ValueError, match=r"^accumulate_grad_batches=2: a batch of a stream continues the one before it"
    ):
        data.train_dataloader()


# Diagnostics


@pytest.mark.parametrize(("stream", "most", "count"), [(True, 64, 13), (True, 5, 7), (False, 64, 4)])
def test_diagnostics_follow_the_stream(source, tmp_path, monkeypatch, stream, most, count):  # noqa: F811
    """Over the batches of a stream as if they were one, and over the first windows; up to so many memories."""
    monkeypatch.setattr(diagnostics, "MAX_MEMORIES", most)
    module, data = (
        LIT_MODULES["rmt"](width=16, layers=1, heads=2, memory_tokens=2),
        make_data(source, stream=stream, valid_size=16, eval_batch_size=4),
    )
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_steps=1, limit_train_batches=1, logger=CSVLogger(tmp_path), **quiet)
    trainer.fit(module, data)
    batches = list(data.val_dataloader())
    ids = torch.cat([b.ids_BT[:, :-1] for b in batches], dim=1) if stream else batches[0].ids_BT
    memories, _ = module.model.trace(ids[:, : (count - 1) * 16].split(16, 1))
    assert len(memories) == count
    for name, value in module.model.diagnostics(memories).items():
        assert trainer.callback_metrics[f"valid/{name}"].item() == pytest.approx(value.item(), rel=1e-5)
