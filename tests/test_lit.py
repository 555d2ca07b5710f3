"""The LightningModules and LightningDataModules as a reader of the README types them, without a YAML."""

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from conftest import TEXT_ONLY
from torch.nn import functional as F
from torch.optim import AdamW

import lit_memory
from lit_memory.lit import LIT_DATA, LIT_MODULES, reads
from lit_memory.lit.data import LitData
from lit_memory.lit.modules import LitMemory
from lit_memory.models.attention import rotary_table
from lit_memory.recurrence import LayerRecurrent
from lit_memory.registry import MODELS, TASKS, load_class
from lit_memory.tasks.mixins import ContinuousTokens, FiniteSplits, FreeSegments, LossScored

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]
SMALL = {"width": 16, "layers": 2}


def small(lit):
    """Arguments of a tiny module of any architecture, without dropout."""
    return SMALL | (
        {"dropout": 0.0} if "dropout" in load_class("model", lit.model_name).Config.__dataclass_fields__ else {}
    )


# Small settings of a task, with two conditions of its test; one that has none here is tested with its defaults.
DATA = {
    "associative_retrieval": {"pairs": 3, "test_pairs": [2, 4], "queries": 2},
    "babilong": {
        "segments": 3,
        "test_segments": [2, 4],
        "segment_len": 32,
        "margin": 12,
        "books": 2,
        "vocab_size": 256,
        "vary": 0.5,
    },
    "needle": {
        "digits": 2,
        "note": False,
        "segments": 2,
        "test_segments": [2, 4],
        "segment_len": 60,
        "margin": 36,
        "books": 2,
        "vocab_size": 512,
        "vary": 0.5,
    },
    "memreasoner": {
        "task": "qa2",
        "tokens": 60,
        "test_tokens": [50, 80],
        "line_tokens": 12,
        "segment_lines": 6,
        "segment_len": 8,
        "books": 2,
        "vocab_size": 256,
    },
    "variable_tracking": {
        "layout": "text",
        "statements": 2,
        "tokens": 80,
        "test_tokens": [61, 80],
        "segment_len": 80,
        "margin": 66,
        "books": 2,
        "vocab_size": 256,
    },
    "passkey": {
        "layout": "text",
        "digits": 2,
        "tokens": 80,
        "test_tokens": [70, 80],
        "segment_len": 30,
        "margin": 14,
        "books": 2,
        "vocab_size": 256,
    },
    "time_series": {"horizon": 5, "test_horizon": [3, 4], "segment_len": 5},
    "dna": {"length": 44, "test_length": [40, 50], "segment_len": 16},
    "language_modeling": {"segments": 3, "test_segments": [2, 4], "segment_len": 8, "books": 1, "vocab_size": 256},
    "quadratic": {"max_root": 5, "test_max_root": [5, 10], "segment_len": 50},
    "mqar": {"vocabulary": 16, "length": 16, "pairs": 3, "test_pairs": [2, 3], "segment_len": 4},
    "algorithmic": {"length": 4, "symbols": 3, "segment_len": 4, "test_length": [4, 5]},
}
for _name in ("memreasoner", "variable_tracking", "passkey"):
    DATA[_name] |= {"books": 2, "vocab_size": 256}
SCORED = {"dna": 1, "language_modeling": 23, "needle": 3, "passkey": 3, "quadratic": 150, "algorithmic": 8, "mqar": 1}
SCORED |= dict.fromkeys(("associative_retrieval", "babilong", "memreasoner", "variable_tracking"), 2)
"""Task -> scored tokens of an answer with these settings."""
SIZES = {"batch_size": 4, "valid_size": 6, "test_size": 6, "eval_batch_size": 4, "epoch_steps": 2}
WRITES = {"rmt", "xl"}
"""Models that write the 150 tokens of an equation, which takes most of them seconds."""
PAIRS = [
    (m, d)
    for name, m in LIT_MODULES.items()
    for task, d in LIT_DATA.items()
    if not (name in TEXT_ONLY and task == "time_series")
]
PAIRS = [(m, d) for m, d in PAIRS if d.task_name != "quadratic" or m.model_name in WRITES]
COMMON = {"armt"}, {"associative_retrieval"}
"""Models that are tested with every task, and tasks with every model, and the pair of one name; all other pairs are
slow tests."""
modules_and_data = pytest.mark.parametrize(
    ("lit", "data"),
    [
        pytest.param(
            m,
            d,
            marks=[] if m.model_name in (*COMMON[0], d.task_name) or d.task_name in COMMON[1] else [pytest.mark.slow],
        )
        for m, d in PAIRS
    ],
    ids=lambda c: c.__name__,
)
all_modules = pytest.mark.parametrize("lit", LIT_MODULES.values(), ids=LIT_MODULES)
all_data = pytest.mark.parametrize("data", LIT_DATA.values(), ids=LIT_DATA)


def make_data(cls: type[LitData], **changes) -> LitData:
    return cls(**{**SIZES, **DATA.get(cls.task_name, {}), **changes})


def make_trainer(**options) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(accelerator="cpu", **{"max_steps": 2, **quiet, **options})


def make_double(lit: type[LitMemory], data: LitData, **options) -> LitMemory:
    """A module in fp64, with weights in which a memory matters, that logs nowhere."""
    module = lit(
        **small(lit), vocab_size=data.task.vocab_size, inputs=getattr(data.task, "input_dim", 0), **options
    ).double()
    for name, p in module.named_parameters():
        if not name.endswith("to_gates.bias"):  # Titans' memory would forget half of all with every token
            torch.nn.init.normal_(p, std=0.2)
    module.log = lambda *args, **kwargs: None
    return module


def test_everything_that_is_registered_has_a_public_name():
    assert set(LIT_MODULES) == set(MODELS) and set(LIT_DATA) == set(TASKS)
    for lit in [*LIT_MODULES.values(), *LIT_DATA.values()]:
        assert getattr(lit_memory, lit.__name__) is lit and lit.__doc__
    for target in [*MODELS.values(), *TASKS.values()]:
        name = target.partition(":")[2]
        assert getattr(lit_memory, name).__name__ == name and name in dir(lit_memory)
    assert all(getattr(lit_memory, name) for name in lit_memory.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'LitXYZ'"):
        _ = lit_memory.LitXYZ


@modules_and_data
def test_fit_and_test_without_a_yaml(lit, data):
    """Trainer's own inference mode comes first (the sanity check), and nothing that it cached may break the
    training."""
    rotary_table.cache_clear()
    module, samples, trainer = lit(**small(lit), lr=1e-2), make_data(data), make_trainer()
    assert module.model is None
    trainer.fit(module, samples)
    assert (
        trainer.global_step == 2
        and module.model.config.vocab_size == module.hparams["vocab_size"] == samples.task.vocab_size
    )
    metrics = {
        name
        for part in trainer.validate(module, samples, verbose=False) + trainer.test(module, samples, verbose=False)
        for name in part
    }
    expected = {f"test/{name}@{x}" for x, _ in samples.test_conditions for name in ("loss", samples.task.metrics[0])}
    assert metrics >= expected | {"valid/loss", f"valid/{samples.task.metrics[0]}"}


@pytest.mark.parametrize(
    ("model", "data"), [("armt", "associative_retrieval"), ("lmm", "time_series"), ("rmt", "mqar"), ("mac", "dna")]
)
def test_predictions_are_what_the_test_scores(model, data):
    """``Trainer.predict`` reads the batches of the test, and a task makes the test's metrics of what it gives."""
    module, samples, trainer = (lit := LIT_MODULES[model])(**small(lit)), make_data(LIT_DATA[data]), make_trainer()
    trainer.fit(module, samples)
    tested = trainer.test(module, samples, verbose=False)
    loaders = zip(trainer.predict(module, samples), samples.test_dataloader(), strict=True)
    for (predicted, batches), (x, task), metrics in zip(loaders, samples.test_conditions, tested, strict=True):
        pairs, scores = list(zip(predicted, batches, strict=True)), []
        for predicted_BT, batch in pairs:
            unscored = (part[~batch.scored_BT] for part in (predicted_BT, batch.targets_BT))
            torch.testing.assert_close(*unscored, rtol=0, atol=0, equal_nan=True)
            scores.append(task.score(predicted_BT, batch))
        for name in filter(None, scores[0]):
            mean = torch.cat([score[name] for score in scores]).mean()
            assert metrics[f"test/{name}@{x}"] == pytest.approx(float(mean), rel=1e-5), name


@all_modules
def test_a_checkpoint_round_trip(lit, tmp_path):
    """Hyper-parameters are plain, so that torch's safe loading suffices."""
    module, data, trainer = (
        lit(**small(lit), lr=1e-2, bptt=1),
        make_data(LIT_DATA["associative_retrieval"]),
        make_trainer(),
    )
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    plain = torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"]
    assert all(isinstance(v, int | float | str | bool | None) for v in plain.values())
    again = lit.load_from_checkpoint(tmp_path / "x.ckpt")
    assert dict(again.hparams) == dict(module.hparams) and again.hparams["lr"] == 1e-2 and again.hparams["width"] == 16
    assert again.state_dict().keys() == module.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), module.state_dict().values(), strict=True)
    )
    loss, before = (float(make_trainer().test(m, data, verbose=False)[0]["test/loss@2"]) for m in (again, module))
    assert loss == before


@all_modules
def test_unknown_arguments_of_a_module(lit):
    fields = load_class("model", lit.model_name).Config.__dataclass_fields__
    for wrong, message in {
        "widht": "'widht'; did you mean 'width'",
        "learning_rat": f"'learning_rat'; expected one of {next(iter(fields))},",
    }.items():
        with pytest.raises(TypeError, match=f"unknown argument {message}"):
            lit(**{wrong: 3})
    with pytest.raises(ValueError, match=r"width=-1: expected (at least 1|a multiple)"):
        lit(width=-1)
    with pytest.raises(ValueError, match="schedule='Linear': expected one of constant, linear, cosine"):
        lit(schedule="Linear")
    with pytest.raises(ValueError, match="warmup=-3: expected 0 or more"):
        lit(warmup=-3)
    assert isinstance(lit(**small(lit), vocab_size=30).model.logits(torch.zeros(1, 1, 16)), torch.Tensor)


@all_data
def test_unknown_arguments_of_a_data_module(data):
    axis, _ = make_data(data).task.test_axis()
    with pytest.raises(TypeError, match=f"unknown argument 'test_{axis[:-1]}'; did you mean 'test_{axis}'"):
        data(**{f"test_{axis[:-1]}": [3]})
    with pytest.raises(ValueError, match=f"{axis}=-1: expected (at least [12]|0 or more)"):
        data(**{axis: -1})
    for name in ("batch_size", "eval_batch_size", "epoch_steps"):
        with pytest.raises(ValueError, match=f"{name}=0: expected 1 or more"):
            data(**{name: 0})
    with pytest.raises(ValueError, match=r"cuts=\[-1\]: expected numbers of tokens|cannot be cut anew; expected none"):
        data(cuts=[-1])


@modules_and_data
def test_the_loss_is_cross_entropy_on_full_logits(lit, data):
    """A slow twin: every segment by itself, all logits, one target at a time."""
    samples = make_data(data)
    module, batch = make_double(lit, samples), samples.task.batch(0, "train", 0, 3)
    segments, logits = batch.ids_BT.split(batch.segment_len or batch.ids_BT.shape[1], dim=1), []
    for b in range(3):
        state, own = module.model.init_state(1), []
        for part in batch.context:
            ids, mask = part if isinstance(part, tuple) else (part, torch.ones_like(part, dtype=torch.bool))
            if b < len(ids) and mask[b].any():
                _, state = module.model.step(state, ids[b : b + 1], mask[b : b + 1])
        for i, ids in enumerate(segments):
            hidden, state = module.model.step(state, ids[b : b + 1], write=i < len(segments) - batch.read_only)
            own.append(module.model.logits(hidden))
        logits.append(torch.cat(own, dim=1))
    if isinstance(samples.task, ContinuousTokens):
        expected = (torch.cat(logits)[:, -2] - batch.targets_BT[:, -1]).square().mean()
        torch.testing.assert_close(module.training_step(batch, 0), expected, atol=1e-10, rtol=0)
        found = module.evaluate(batch, samples.task)
        assert [found[name][0].item() for name in ("loss", "mse")] == pytest.approx([expected.item()] * 2)
        return
    log_p = torch.cat(logits).log_softmax(-1)
    scored = [(b, p) for b in range(3) for p in range(log_p.shape[1]) if batch.targets_BT[b, p] != -100]
    expected = -sum(log_p[b, p - 1, batch.targets_BT[b, p]] for b, p in scored) / len(scored)
    asked = samples.task.config.pairs if data.task_name == "mqar" else getattr(samples.task.config, "queries", 1)
    if data.task_name in SCORED:
        assert len(scored) == 3 * SCORED[data.task_name] * asked
    torch.testing.assert_close(module.training_step(batch, 0), expected, atol=1e-10, rtol=0)
    found = module.evaluate(batch, samples.task)
    torch.testing.assert_close(found["loss"][0], expected, atol=1e-10, rtol=0)
    if (
        isinstance(samples.task, LossScored) or samples.task.metrics[0] not in found
    ):  # a metric of what is written freely
        return
    right = [log_p[b, p - 1].argmax() == batch.targets_BT[b, p] for b, p in scored]
    answers = torch.tensor(right).view(3, asked, -1).all(-1).double().mean()
    assert float(found[samples.task.metrics[0]][0]) == pytest.approx(float(answers))


def graph_of(loss):
    """Names of all nodes behind a loss."""
    found, left = {}, [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            left += [parent for parent, _ in node.next_functions]
    return sorted(found.values())


@all_modules
def test_knobs_of_the_unrolling_arrive(lit, monkeypatch):
    data = make_data(LIT_DATA["associative_retrieval"])
    batch, seen = data.task.batch(0, "train", 0, 2), []
    monkeypatch.setattr(
        reads,
        "unroll",
        lambda *args, unroll=reads.unroll, **kw: seen.append((kw["bptt"], kw["schedule"])) or unroll(*args, **kw),
    )
    gradients = []
    for options in ({}, {"bptt": 1}):
        torch.manual_seed(0)
        module = make_double(lit, data, **options)
        module.training_step(batch, 0).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    assert seen == [(None, "auto"), (1, "auto")]
    assert lit.model_name in ("transformer", "xl") or not torch.equal(
        *gradients
    )  # no memory, and one that is detached anyway
    module = make_double(lit, data, unroll_schedule="diagonal")
    if issubclass(module.model_class, LayerRecurrent):
        module.training_step(batch, 0)
        assert seen[-1] == (None, "diagonal")
    else:
        with pytest.raises(ValueError, match="schedule='diagonal' is impossible"):
            module.training_step(batch, 0)
    losses = []
    for options in ({}, {"unroll_schedule": "sequential"}, {"checkpoint_segments": 1}):
        torch.manual_seed(0)
        losses.append(make_double(lit, data, **options).training_step(batch, 0))
    assert all(torch.allclose(losses[0], loss, rtol=1e-10) for loss in losses)
    again = ["CheckpointBackward" in graph_of(loss) for loss in losses]
    assert again == [False, False, lit.model_name != "transformer"]  # which has no state
    losses[2].backward()


# Optimizer and learning rate


def test_the_optimizer_gets_its_settings():
    optimizer = lit_memory.LitARMT(**SMALL, vocab_size=19, lr=0.5, weight_decay=0.25).configure_optimizers()
    assert isinstance(optimizer, AdamW)
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.5, 0.25)
    assert len(optimizer.param_groups[0]["params"]) == len(
        list(lit_memory.LitARMT(**SMALL, vocab_size=19).parameters())
    )


def test_weight_decay_spares_what_the_model_names():
    """Spec 8: without ``wd_all`` a step without gradient leaves A, D and the bias of Delta as they are, and shrinks the
    rest."""
    for wd_all in (True, False):
        module = lit_memory.LitMamba(**SMALL, vocab_size=19, lr=0.5, weight_decay=0.25, wd_all=wd_all)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
        module.configure_optimizers().step()
        kept = {name.rpartition("layers.")[2] for name, p in module.named_parameters() if torch.equal(p, before[name])}
        spared = set() if wd_all else {f"{i}.{name}" for i in range(2) for name in ("A_log", "D", "dt_proj.bias")}
        assert kept == spared


def test_frozen_parts_keep_their_weights():
    """They have no gradient and no weight decay; all others move."""
    module = lit_memory.LitMemReasoner(
        width=16, heads=2, layers=2, vocab_size=19, lr=0.5, frozen=["encoder", "decoder.layers.0"]
    )
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    optimizer = module.configure_optimizers()
    for p in module.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    kept = {name for name, p in module.model.named_parameters() if torch.equal(p, before[name])}
    assert kept == {name for name in before if name.startswith(("encoder.", "decoder.layers.0."))} != set()
    with pytest.raises(
        ValueError,
        match=r"frozen='decoder\.layer': the model has no weights of that name; did you mean 'decoder.layers'",
    ):
        lit_memory.LitMemReasoner(width=16, heads=2, vocab_size=19, frozen=["decoder.layer"]).configure_optimizers()


@pytest.mark.parametrize(
    ("options", "span", "expected"),
    [
        ({}, (0, 4), {0: 1, 3: 1, 9: 1}),
        ({"warmup": 4}, (0, 8), {0: 0.25, 1: 0.5, 3: 1, 7: 1}),
        ({"warmup": 4}, (2, 8), {2: 0.75, 3: 1, 9: 1}),  # steps: once, at the start of the run
        ({"warmup": 0.5}, (2, 8), {2: 0.25, 3: 0.5, 5: 1, 9: 1}),  # a share: in every stage
        ({"schedule": "linear"}, (0, 4), {0: 1, 2: 0.75, 4: 0.5, 9: 0.5}),
        ({"schedule": "linear", "final_lr": 0}, (10, 4), {10: 1, 11: 0.75, 13: 0.25}),
        ({"schedule": "cosine", "final_lr": 0.2}, (10, 4), {10: 1, 12: 0.6, 14: 0.2, 20: 0.2}),
        ({"schedule": "linear", "warmup": 2, "final_lr": 0}, (0, 4), {0: 0.5, 1: 0.75, 2: 0.5}),
        ({"schedule": "linear", "warmup": 0.5, "final_lr": 0}, (4, 4), {4: 0.5, 5: 0.75, 6: 0.5}),
    ],
)
def test_learning_rates(options, span, expected):
    module = lit_memory.LitRMT(lr=1.0, **options)
    module.set_stage(*span)
    assert {step: module.rate_share(step) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("limit", "rates"),
    [({"max_steps": 4}, [1, 0.75, 0.5, 0.25]), ({"max_steps": -1, "max_epochs": 2}, [1, 0.75, 0.5, 0.25])],
)
def test_without_stages_the_schedule_spans_the_training(limit, rates):
    module, seen = lit_memory.LitRMT(**SMALL, lr=1.0, schedule="linear", final_lr=0), []
    module.on_before_optimizer_step = lambda optimizer: seen.append(optimizer.param_groups[0]["lr"])
    make_trainer(**limit).fit(module, make_data(LIT_DATA["associative_retrieval"]))
    assert seen == pytest.approx(rates)


def test_a_share_of_endless_steps_is_an_error():
    for options in ({"schedule": "linear"}, {"warmup": 0.1}):
        with pytest.raises(ValueError, match=r"needs Trainer\(max_steps"):
            make_trainer(max_steps=-1, max_epochs=-1).fit(
                lit_memory.LitRMT(**SMALL, **options), make_data(LIT_DATA["associative_retrieval"])
            )


# Data


def equal(a, b) -> bool:
    return torch.equal(a.ids_BT, b.ids_BT) and torch.equal(a.targets_BT.nan_to_num(), b.targets_BT.nan_to_num())


@all_data
def test_loaders_have_their_sizes(data):
    samples = make_data(data, epoch_steps=3, valid_size=6, test_size=5, eval_batch_size=4)
    assert [len(b.ids_BT) for b in samples.train_dataloader()] == [4, 4, 4]
    assert [len(b.ids_BT) for b in samples.val_dataloader()] == [4, 2]
    axis, values = samples.task.test_axis()
    assert [x for x, _ in samples.test_conditions] == DATA.get(data.task_name, {}).get(f"test_{axis}", values)
    loaders, count = samples.test_dataloader(), len(values)
    assert [[len(b.ids_BT) for b in loader] for loader in loaders] == [[4, 1]] * count
    fewer = make_data(data, test_size=[2, *[5] * (count - 1)], eval_batch_size=4).test_dataloader()
    assert [[len(b.ids_BT) for b in loader] for loader in fewer] == [[2], *[[4, 1]] * (count - 1)]
    assert equal(
        fewer[-1].dataset[0], make_data(data, test_size=2 if count == 1 else 5).test_dataloader()[-1].dataset[0]
    )
    expected = rf"test_size=\[\]: expected one number, or {count} of them, one for each of \{values}"
    with pytest.raises(ValueError, match=expected):
        make_data(data, test_size=[])
    steps = samples.val_dataloader().dataset
    assert len(steps) == 2
    for index in (-1, 2):
        with pytest.raises(IndexError):
            steps[index]


@all_data
def test_item_k_of_a_loader_is_step_k_of_the_task(data):
    samples, seven = make_data(data), make_data(data, seed=7)
    for k, batch in enumerate(seven.train_dataloader()):
        assert equal(batch, seven.task.batch(7, "train", k, 4)) and not equal(
            batch, samples.task.batch(0, "train", k, 4)
        )
    whole = seven.task.batch(7, "train", 5, 4)
    for devices, accumulated in [(1, 1), (2, 1), (1, 2), (2, 2)]:
        parts = []
        for rank in range(devices):
            seven.trainer = SimpleNamespace(
                global_step=5, accumulate_grad_batches=accumulated, world_size=devices, global_rank=rank
            )
            loader = seven.train_dataloader()
            assert len(loader) == 2 * accumulated
            parts.append(list(loader)[:accumulated])
        joined = torch.cat([of_one[k].ids_BT for k in range(accumulated) for of_one in parts])
        assert torch.equal(joined, whole.ids_BT)
    seven.trainer = None
    for ours, theirs in zip(
        [samples.val_dataloader(), *samples.test_dataloader()],
        [seven.val_dataloader(), *seven.test_dataloader()],
        strict=True,
    ):
        assert all(equal(a, b) for a, b in zip(ours, theirs, strict=True))
    count = samples.task.count("valid") if isinstance(samples.task, FiniteSplits) else None
    first = (
        samples.task.batch(0, "valid", 0, 4)
        if count is None
        else samples.task.take("valid", [i * count // 6 for i in range(4)])
    )
    assert equal(next(iter(samples.val_dataloader())), first)


@all_data
def test_a_stage_changes_training_and_validation_but_not_the_test(data):
    samples = make_data(data)
    before = next(iter(samples.test_dataloader()[-1]))
    axis, (first, *_) = samples.task.test_axis()
    samples.set_stage({axis: first - 1}, batch_size=3, epoch_steps=5)
    assert [len(batch.ids_BT) for batch in samples.train_dataloader()] == [3] * 5
    other = make_data(data, **{axis: first - 1, f"test_{axis}": [first - 1]}, batch_size=3, epoch_steps=5)
    for name in ("train_dataloader", "val_dataloader"):
        assert all(equal(a, b) for a, b in zip(getattr(samples, name)(), getattr(other, name)(), strict=True))
    assert equal(before, next(iter(samples.test_dataloader()[-1])))
    samples.set_stage({}, batch_size=4, epoch_steps=2)
    assert samples.task is samples.whole_task


def test_babi_is_babilong_without_noise():
    bare, hidden = (
        lit_memory.BabiData(**{**SIZES, "segment_len": 128, "books": 2, "vocab_size": 256}, **options)
        for options in ({}, {"segments": 2})
    )
    assert (bare.task.config.segments, hidden.task.config.segments) == (0, 2) and bare.test_conditions[0][0] == 0
    text = bare.task.tokenizer.decode(next(iter(bare.train_dataloader())).ids_BT[0])
    assert re.fullmatch(r"(\w+ [a-z ]+\. ?)+ Where is \w+\? <gen> \w+ <eos>( <pad>)+", text), text


def has_free_segments(data):
    return issubclass(load_class("task", data.task_name), FreeSegments)


cut_data = pytest.mark.parametrize("data", [data for data in LIT_DATA.values() if has_free_segments(data)])


@all_data
@pytest.mark.parametrize("name", ["cuts", "test_cuts"])
def test_other_tasks_refuse_to_be_cut(data, name):
    if has_free_segments(data):
        assert getattr(make_data(data, **{name: [5, 1]}), name) == [5, 1]
        return
    with pytest.raises(ValueError, match=rf"^{name}=\[5, 1\]: the contexts of this task cannot be cut anew"):
        make_data(data, **{name: [5, 1]})


@cut_data
def test_segments_of_the_test_are_those_of_the_test_alone(data):
    samples, cut = make_data(data), make_data(data, test_cuts=[5, 1])
    assert all(equal(a, b) for a, b in zip(samples.train_dataloader(), cut.train_dataloader(), strict=True))
    assert all(equal(a, b) for a, b in zip(samples.val_dataloader(), cut.val_dataloader(), strict=True))
    for ours, theirs in zip(samples.test_dataloader(), cut.test_dataloader(), strict=True):
        for whole, parts in zip(ours, theirs, strict=True):
            assert [part.shape[1] for part in parts.context][:2] == [5, 1] and equal(whole.recut([5, 1]), parts)


@cut_data
def test_segments_of_every_split(data):
    """Cut anew, in training, validation and test; the test may have others."""
    samples, cut, both = make_data(data), make_data(data, cuts=[5, 1]), make_data(data, cuts=[5, 1], test_cuts=[7])
    for name, of_test in (("train", [5, 1]), ("val", [5, 1]), ("test", [5, 1]), ("test", [7])):
        loaders = (getattr(d, f"{name}_dataloader")() for d in (samples, both if of_test == [7] else cut))
        whole, parts = (next(iter(found[0] if name == "test" else found)) for found in loaders)
        assert equal(whole.recut(of_test), parts) and len(parts.context) > 1


@pytest.mark.parametrize("name", MODELS)
def test_segments_of_the_test_change_what_depends_on_segments(name):
    """A model that is recurrent in every token answers the same however a test is cut; a memory of segments does
    not."""
    data = make_data(LIT_DATA["associative_retrieval"])
    pairs = 20 if name == "xl" else 8  # more than its memory holds
    module, batch = make_double(LIT_MODULES[name], data), data.task.at(pairs=pairs).batch(0, "test", 0, 2)
    with torch.no_grad():
        loss = [
            module.training_step(b, 0)
            for b in (batch, batch.recut([batch.segment_len]), batch.recut([0]), batch.recut([9, 1]))
        ]
    assert abs(loss[0] - loss[1]) < 1e-10
    if name in ("mamba", "rwkv", "deltanet", "gated_deltanet"):
        assert max(abs(loss[0] - other) for other in loss[2:]) < 1e-10
    elif name != "transformer":  # which has no memory here
        assert min(abs(loss[0] - other) for other in loss[2:]) > 1e-6


@pytest.mark.parametrize("name", sorted(set(MODELS) - TEXT_ONLY))
def test_columns_that_nobody_reads_are_left_out(name):
    """The last segments of a training batch are as wide as its longest; with the columns up to the task's own width
    losses and gradients are the same."""
    data = make_data(LIT_DATA["babilong"], segments=3, vary=0.0, segment_len=48, margin=24)
    module, batch = make_double(LIT_MODULES[name], data), data.task.batch(0, "train", 0, 2)
    more = data.task.segment_len - batch.segment_len
    assert more >= 8 and batch.ids_BT.shape[1] == batch.segment_len
    wide = replace(
        batch,
        segment_len=data.task.segment_len,
        ids_BT=F.pad(batch.ids_BT, (0, more)),
        targets_BT=F.pad(batch.targets_BT, (0, more), value=-100),
    )
    losses = [module.loss(b) for b in (batch, wide)]
    grads = [
        torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, materialize_grads=True)
        for loss in losses
    ]
    assert abs(losses[0] - losses[1]) < 1e-10 and all(
        torch.allclose(a, b, atol=1e-10) for a, b in zip(*grads, strict=True)
    )


@all_data
def test_workers_reach_the_training_loader_only(data):
    samples = make_data(data, workers=2)
    assert samples.train_dataloader().num_workers == 2 and samples.val_dataloader().num_workers == 0


@all_data
def test_no_loader_setting_has_the_name_of_a_field_of_a_task(data):
    settings = {name for name, p in inspect.signature(LitData.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert settings and not settings & set(load_class("task", data.task_name).Config.__dataclass_fields__)


@pytest.mark.parametrize("together", ["pairs", "all"])
def test_pairs_that_stand_together_cannot_be_cut(together):
    """As in a YAML: what they would be cut into has lost the pairs."""
    with pytest.raises(ValueError, match=r"cuts=\[8\]: the contexts of this task cannot be cut anew"):
        lit_memory.AssociativeRetrievalData(pairs=3, together=together, cuts=[8])
    data = lit_memory.AssociativeRetrievalData(pairs=3, cuts=[8])
    with pytest.raises(ValueError, match=r"cuts=\[8\]: the contexts of this task cannot be cut anew"):
        data.set_stage({"together": together}, 4, 1)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (
            {"vocab_size": 5},
            lit_memory.AssociativeRetrievalData(),
            "vocab_size=5: expected 19 or more, the task's token",
        ),
        ({"vocab_size": 19}, lit_memory.TimeSeriesData(), "inputs=0: expected 8, the numbers of a token of the task"),
    ],
)
def test_a_model_that_cannot_read_the_data_is_told(model, data, message):
    module = lit_memory.LitTransformer(**small(lit_memory.LitTransformer), **model)
    with pytest.raises(ValueError, match=message):
        make_trainer(max_steps=1).fit(module, data)


def test_a_test_that_cannot_be_drawn_fails_before_the_training():
    data = lit_memory.PasskeyData(tokens=200, test_tokens=[20, 200], layout="text", digits=3, train_digits=[3])
    with pytest.raises(ValueError, match=r"^test_tokens=20: expected at least \d+, those of the sentences that matter"):
        data.setup("fit")


def test_the_loss_does_not_depend_on_the_size_of_batches():
    """It is the mean over tokens, of which answers have unequal numbers."""
    torch.manual_seed(0)
    sizes = {"digits": 5, "train_digits": [1, 9], "tokenizer": "char", "segment_len": 400, "margin": 99}
    data = lit_memory.PasskeyData(tokens=300, layout="text", **sizes)
    module = lit_memory.LitRMT(**small(lit_memory.LitRMT), vocab_size=data.task.vocab_size).double()
    batch, found = data.task.batch(0, "valid", 0, 16), []
    assert len(set(batch.scored_BT.sum(1).tolist())) > 1
    for parts in (1, 4, 16):
        with torch.no_grad():
            means = [module.evaluate(batch.part(i, parts), data.task)["loss"] for i in range(parts)]
        assert sum(mean.weight for mean in means) == batch.scored_BT.sum()
        found.append(sum(float(mean.value) * mean.weight for mean in means) / sum(mean.weight for mean in means))
    assert found == pytest.approx([found[0]] * 3, rel=1e-10)


def test_a_task_gives_the_metrics_that_it_names(monkeypatch):
    data = lit_memory.AssociativeRetrievalData(pairs=3, test_pairs=[3], test_size=4, batch_size=4)
    score = data.task.score
    for _, task in data.test_conditions:
        monkeypatch.setattr(task, "score", lambda *args: {"em": score(*args)["exact_match"]})
        monkeypatch.setattr(task, "summarize", lambda means: {})
    module = lit_memory.LitRMT(**small(lit_memory.LitRMT), vocab_size=19)
    with pytest.raises(
        ValueError, match=r"metrics=.*exact_match.*: neither score nor summarize gave it; expected .*em"
    ):
        make_trainer().test(module, data, verbose=False)
