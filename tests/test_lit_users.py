"""Lightning as people use it: tuners, schedulers and callbacks of their own, pairs of tensors, pretrained weights."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from test_lit import small
from test_lit_plain import S, V, samples
from torch.utils.data import DataLoader, TensorDataset

import lit_memory
from lit_memory.lit.plain import as_batch
from lit_memory.recurrence import state_tensors, unroll

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*is not saved together with"),
]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Rates(Callback):
    """Keeps the rate with which every step was made."""

    def __init__(self):
        self.rates = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def module(cls=lit_memory.LitRMT, **options):
    return cls(**small(cls), vocab_size=V, segment_len=S, **options)


def trained(lit, *callbacks, steps=6, **options):
    rates = Rates()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False} | options
    options |= {"enable_model_summary": False, "accelerator": "cpu", "max_steps": steps}
    trainer = L.Trainer(callbacks=[rates, *callbacks], **options)
    trainer.fit(lit, DataLoader(samples(8), batch_size=4))
    return [rate for step in rates.rates for rate in step]


def test_lr_find_trains_at_the_rates_that_it_records(tmp_path):
    """Every step is made at its own rate, and the suggestion becomes that of the module."""
    rates = []

    class Recording(lit_memory.LitRMT):  # the tuner switches callbacks off
        def on_before_optimizer_step(self, optimizer):
            rates.extend(group["lr"] for group in optimizer.param_groups)

    lit = module(Recording, lr=1e-3)
    trainer = L.Trainer(default_root_dir=tmp_path, max_epochs=1, **QUIET)
    data = DataLoader(samples(160), batch_size=4)
    found = Tuner(trainer).lr_find(lit, data, min_lr=1e-5, max_lr=1e-1, num_training=30, early_stop_threshold=None)
    assert rates == pytest.approx(found.results["lr"])
    assert len(set(found.results["lr"])) == len(found.results["lr"]) >= 29
    assert lit.hparams["lr"] == found.suggestion() in found.results["lr"]


def test_a_scheduler_of_the_user():
    """``configure_optimizers`` of a subclass may return one; without it, the rates are the module's own."""

    class Mine(lit_memory.LitRMT):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    assert trained(module(Mine, lr=0.1)) == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert trained(module(lr=0.1, schedule="linear", final_lr=0.0), steps=4) == pytest.approx([0.1, 0.075, 0.05, 0.025])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_optimizer_of_the_user_keeps_its_rates(tmp_path):
    """Every group has its own largest rate, which the schedule scales; also where a training goes on."""

    class Mine(lit_memory.LitRMT):
        def configure_optimizers(self):
            first, *others = self.parameters()
            return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1)

    options = {"schedule": "linear", "final_lr": 0.0, "warmup": 2}
    expected = [[0.25, 0.05], [0.375, 0.075], [0.25, 0.05], [0.125, 0.025]]  # of 4 steps
    assert trained(module(Mine, **options), steps=4) == pytest.approx([rate for step in expected for rate in step])
    keep, rates, fixed = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1), Rates(), {"warmup": 4}
    data = DataLoader(samples(8), batch_size=4)
    L.Trainer(max_steps=2, callbacks=[keep], **QUIET).fit(module(Mine, **fixed), data)
    L.Trainer(max_steps=4, callbacks=[rates, keep], **QUIET).fit(
        module(Mine, **fixed), data, ckpt_path=next(tmp_path.glob("*.ckpt"))
    )
    assert rates.rates == [pytest.approx([0.375, 0.075]), pytest.approx([0.5, 0.1])]


def test_weights_that_a_callback_unfreezes_have_their_rate():
    """A group that joins later is scaled like the others."""

    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.model.decoder)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.model.decoder, optimizer, lr=0.2)

    rates = trained(module(lr=0.1, schedule="linear", final_lr=0.0), Unfreezing(), steps=4)
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.1, 0.025, 0.05])


def test_a_monitor_sees_the_rates_of_its_steps(tmp_path):
    """``LearningRateMonitor`` looks before the module's own hook."""
    seen = []

    class Monitor(LearningRateMonitor):
        def on_train_batch_start(self, trainer, *args, **kwargs):
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])
            super().on_train_batch_start(trainer, *args, **kwargs)

    logger = CSVLogger(tmp_path, name="csv")
    rates = trained(module(lr=0.1, warmup=3), Monitor(logging_interval="step"), logger=logger, steps=4)
    assert seen == rates == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.1])


def batches_read(trainer, data, lit=None, **options):
    """The ids of every training batch."""
    found = []

    class Reads(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            found.append(batch.ids_BT.clone())

    lit = lit or lit_memory.LitRMT(**small(lit_memory.LitRMT))
    trainer.callbacks.append(Reads())
    trainer.fit(lit, data, **options)
    return found


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("parts", [1, 2])
def test_every_epoch_has_batches_of_its_own(tmp_path, parts):
    """A plain Trainer reads steps 0, 1, 2, ... of the task, as a run does, and goes on in the middle of an epoch bit by
    bit."""
    torch.manual_seed(0)
    sizes = {"seed": 3, "batch_size": 4, "epoch_steps": 3, "valid_size": 4, "eval_batch_size": 4}
    data = lit_memory.AssociativeRetrievalData(pairs=3, test_pairs=[3], **sizes)
    quiet = QUIET | {"accumulate_grad_batches": parts}
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    whole = lit_memory.LitRMT(**small(lit_memory.LitRMT), vocab_size=19, lr=0.05)
    again = lit_memory.LitRMT(**small(lit_memory.LitRMT), vocab_size=19, lr=0.05)
    read = batches_read(L.Trainer(max_steps=8, callbacks=[keep], **quiet), data, whole)
    expected = [data.task.batch(3, "train", step, 4).part(i, parts).ids_BT for step in range(8) for i in range(parts)]
    assert all(torch.equal(a, b) for a, b in zip(read, expected, strict=True))
    options = {"ckpt_path": next(tmp_path.glob("*step=4.ckpt"))}
    rest = batches_read(L.Trainer(max_steps=8, callbacks=[keep], **quiet), data, again, **options)
    assert all(torch.equal(a, b) for a, b in zip(rest, expected[4 * parts :], strict=True))
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in whole.state_dict().items())


def test_a_batch_is_drawn_once_for_all_its_parts(monkeypatch):
    data = lit_memory.AssociativeRetrievalData(pairs=3, test_pairs=[3], batch_size=8, epoch_steps=3, valid_size=8)
    drawn, draw = [], data.task.batch
    monkeypatch.setattr(
        data.task, "batch", lambda seed, split, *rest: drawn.append((split, *rest)) or draw(seed, split, *rest)
    )
    quiet = QUIET | {"enable_checkpointing": False, "limit_val_batches": 0}
    batches_read(L.Trainer(max_steps=3, accumulate_grad_batches=4, **quiet), data)
    assert [step for split, step, _ in drawn if split == "train"] == [0, 1, 2]


def test_stochastic_weight_averaging():
    """From its first epoch on, the rate is that of the callback."""
    average = StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=2, annealing_epochs=1)
    rates = trained(module(lr=0.1), average, steps=-1, max_epochs=5)
    assert rates[:4] == [0.1] * 4 and rates[-1] == 0.5


def test_pairs_train():
    """A ``TensorDataset`` of ids and labels; labels that are shifted already are told."""
    ids_BT = torch.stack([sample["input_ids"] for sample in samples(8)])
    labels_BT = torch.stack([sample["labels"] for sample in samples(8)])
    lit = module(lr=0.01)
    before = [p.detach().clone() for p in lit.parameters()]
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_steps=2, enable_model_summary=False, **options)
    trainer.fit(lit, DataLoader(TensorDataset(ids_BT, labels_BT), batch_size=4))
    assert any(not torch.equal(p, old) for p, old in zip(lit.parameters(), before, strict=True))
    pair, named = as_batch((ids_BT, labels_BT), S), as_batch({"input_ids": ids_BT, "labels": labels_BT}, S)
    assert torch.equal(pair.targets_BT, named.targets_BT) and torch.equal(pair.ids_BT, named.ids_BT)
    shifted_BT = torch.cat([ids_BT[:, 1:], torch.zeros_like(ids_BT[:, :1])], dim=1)
    with pytest.raises(ValueError, match=r"^labels=the token at t \+ 1 as label t: expected the token at t"):
        as_batch((ids_BT, shifted_BT), S)
    with pytest.raises(ValueError, match=r"^batch=tuple: expected .* or a pair \(input_ids, labels\)$"):
        as_batch((ids_BT,), S)


def test_a_constant_sequence_is_not_shifted():
    """Where all tokens are equal nobody can tell."""
    ids_BT = torch.ones(2, 5, dtype=torch.long)
    assert as_batch((ids_BT, ids_BT), None).targets_BT[:, 1:].eq(1).all()


def test_from_pretrained(tmp_path):
    """Settings of the module and flags of the model, in one call; the weights are those of the folder."""
    model = module().model
    model.save_pretrained(tmp_path / "mine", segment_len=S)
    lit = lit_memory.LitRMT.from_pretrained(tmp_path / "mine", lr=0.5, segment_len=S)
    assert lit.hparams["lr"] == 0.5 and lit.hparams["width"] == model.config.width and lit.model.training
    ids_BT = torch.randint(V, (2, 3 * S), generator=torch.Generator().manual_seed(0))
    found, known = (unroll(m.eval(), ids_BT, S) for m in (lit.model, model))
    assert torch.equal(found.hidden_BTD, known.hidden_BTD)
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(found.state), state_tensors(known.state), strict=True))
    before = lit.train().model.decoder.tokens.weight.detach().clone()
    trained(lit, steps=1)
    assert not torch.equal(lit.model.decoder.tokens.weight, before)


def test_the_callbacks_of_lightning(tmp_path):
    """ModelCheckpoint, EarlyStopping and RichProgressBar around a user's own dataloaders, with accumulation."""
    lit, data = module(lr=0.02), samples(16)
    keep = ModelCheckpoint(tmp_path / "best", monitor="valid/loss", save_last=True, filename="{epoch}")
    stop = EarlyStopping("valid/loss", patience=1, min_delta=10.0)  # nothing is that much better
    trainer = L.Trainer(
        max_epochs=5,
        accumulate_grad_batches=2,
        callbacks=[keep, stop, RichProgressBar()],
        default_root_dir=tmp_path,
        logger=CSVLogger(tmp_path, name="csv"),
        accelerator="cpu",
        enable_model_summary=False,
    )
    trainer.fit(lit, DataLoader(data, batch_size=4), DataLoader(data, batch_size=8))
    assert (trainer.current_epoch, trainer.global_step) == (2, 4)  # of 4 batches per epoch; the second was no better
    best = lit_memory.LitRMT.load_from_checkpoint(keep.best_model_path)
    (found,) = trainer.validate(best, DataLoader(data, batch_size=8), verbose=False)
    assert keep.best_model_score is not None and found["valid/loss"] == pytest.approx(keep.best_model_score.item())
    metrics = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text()
    assert "valid/loss" in metrics and "valid/perplexity" in metrics


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_of_the_user_resumes_bit_by_bit(tmp_path):
    """Stopped after three of six steps and started again from ModelCheckpoint's file: the weights of one training."""
    whole, half = module(lr=0.05), module(lr=0.05)
    half.load_state_dict(whole.state_dict())
    data = DataLoader(samples(12), batch_size=4)  # three batches: a step in the middle of an epoch is warned of
    L.Trainer(max_steps=6, enable_checkpointing=False, **QUIET).fit(whole, data)
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    L.Trainer(max_steps=3, callbacks=[keep], **QUIET).fit(half, data)
    again = module(lr=0.05)
    trainer = L.Trainer(max_steps=6, callbacks=[keep], **QUIET)
    trainer.fit(again, data, ckpt_path=next(tmp_path.glob("*step=3.ckpt")))
    assert trainer.global_step == 6
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in whole.state_dict().items())
    assert not torch.equal(half.model.memory, whole.model.memory)


def test_bf16(monkeypatch):
    """Mixed precision of Lightning: matrix products in bf16, weights and the state of the memory in fp32."""
    lit, seen = module(lr=0.01), []
    lit.model.decoder.layers[0].attention.qkv.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    before = [p.detach().clone() for p in lit.parameters()]
    trained(lit, steps=2, precision="bf16-mixed")
    assert set(seen) == {torch.bfloat16} and {p.dtype for p in lit.parameters()} == {torch.float32}
    assert any(not torch.equal(p, old) for p, old in zip(lit.parameters(), before, strict=True))
    assert {t.dtype for t in state_tensors(lit.model.init_state(2))} == {torch.float32}


def test_accumulated_batches_are_one(tmp_path):
    """Two batches of two are one of four, where all have as many labels."""
    ids_BT = torch.stack([sample["input_ids"] for sample in samples(4)])
    data, found = TensorDataset(ids_BT, ids_BT), []
    for size in (2, 4):
        torch.manual_seed(0)
        lit = module(lr=0.01)
        found.append(lit)
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        trainer = L.Trainer(max_steps=1, accumulate_grad_batches=4 // size, enable_model_summary=False, **options)
        trainer.fit(lit, DataLoader(data, batch_size=size))
    pairs = zip(found[0].parameters(), found[1].parameters(), strict=True)
    # 1e-5: a bias of keys has no gradient but for rounding, of which Adam makes a step
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # which Dynamo does
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("cls", [lit_memory.LitRMT, lit_memory.LitARMT])
def test_a_compiled_module_trains_as_it_does_itself(cls):
    """``torch.compile(LitARMT(...))``, traced by Dynamo: half a minute and more."""
    found = []
    for change in (lambda lit: lit, lambda lit: torch.compile(lit, backend="eager")):
        torch.manual_seed(0)
        lit = module(cls, lr=0.01)
        trained(change(lit), steps=2)
        found.append(dict(lit.model.state_dict()))
    # 1e-4, a hundredth of a step: a bias of keys has no gradient but for rounding, of which Adam makes a part of a step
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-4) for name in found[0])
