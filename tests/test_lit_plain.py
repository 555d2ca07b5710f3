"""A ``LitMemory`` on data that is no ``LitData``: dictionaries and batches from plain dataloaders."""

import math

import lightning as L
import pytest
import torch
from test_lit import make_data, make_trainer, small
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lit_memory
from lit_memory.lit import LIT_DATA, LIT_MODULES
from lit_memory.lit.plain import TokenMetrics, as_batch
from lit_memory.recurrence import unroll
from lit_memory.tasks.batch import Batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]
V, T, S = 19, 12, 4  # vocabulary, tokens, segment


def samples(count, seed=0):
    """Dictionaries of one sequence each, of which ever fewer labels are scored; the last one has none."""
    draw = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        ids_T = torch.randint(V, (T,), generator=draw)
        hidden_T = torch.rand(T, generator=draw) < i / max(1, count - 1)
        out.append({"input_ids": ids_T, "labels": ids_T.masked_fill(hidden_T, -100)})
    return out


def expected(module, data):
    """Metrics of all scored tokens together, one sequence at a time."""
    losses, hits = [], []
    for sample in data:
        hidden_BTD, _ = unroll(module.model, sample["input_ids"][None], S)
        logits_TV, labels_T = module.model.logits(hidden_BTD)[0, :-1], sample["labels"][1:]
        scored_T = labels_T != -100
        losses += F.cross_entropy(logits_TV[scored_T], labels_T[scored_T], reduction="none").tolist()
        hits += (logits_TV.argmax(-1) == labels_T)[scored_T].tolist()
    loss = sum(losses) / len(losses)
    return {"loss": loss, "accuracy": sum(hits) / len(hits), "perplexity": math.exp(loss)}


@pytest.mark.parametrize("lit", LIT_MODULES.values(), ids=LIT_MODULES)
def test_dictionaries_train_validate_and_test(lit):
    """Every architecture; metrics are means over tokens, whatever the sizes of the batches."""
    module, data = lit(**small(lit), vocab_size=V, segment_len=S, lr=1e-2), samples(7)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = make_trainer(max_steps=3, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(data, batch_size=2), DataLoader(data, batch_size=3))
    assert trainer.global_step == 3
    assert any(not torch.equal(p, before[name]) for name, p in module.named_parameters())
    for split, run in (("valid", trainer.validate), ("test", trainer.test)):
        (metrics,) = run(module, DataLoader(data, batch_size=3), verbose=False)
        with torch.no_grad():
            wanted = {f"{split}/{name}": value for name, value in expected(module.eval(), data).items()}
        assert metrics == pytest.approx(wanted, rel=1e-4), split


def test_predictions_of_single_tokens():
    module = lit_memory.LitARMT(**small(lit_memory.LitARMT), vocab_size=V, segment_len=S)
    data, trainer = samples(7), make_trainer()
    (metrics,) = trainer.test(module, DataLoader(data, batch_size=3), verbose=False)
    predicted_BT = torch.cat(trainer.predict(module, DataLoader(data, batch_size=3)))
    labels_BT = torch.stack([item["labels"] for item in data])[:, 1:]
    right = (predicted_BT[:, 1:] == labels_BT)[labels_BT != -100].float().mean()
    assert metrics["test/accuracy"] == pytest.approx(float(right))


def test_the_loss_of_a_dictionary_is_that_of_a_batch():
    module = lit_memory.LitARMT(**small(lit_memory.LitARMT), vocab_size=V, segment_len=S)
    module.log = lambda *args, **kwargs: None
    (item,) = samples(1)
    item = {name: value[None] for name, value in item.items()}
    loss = module.training_step(item, 0)
    targets = F.pad(item["labels"][:, 1:], (1, 0), value=-100)  # nothing predicts the first token
    assert torch.equal(loss, module.training_step(Batch(item["input_ids"], targets, S), 0))
    module.hparams["segment_len"] = None
    assert not torch.equal(loss, module.training_step(item, 0))


@pytest.mark.parametrize("read_only", [0, 1])
def test_a_target_that_nothing_predicts(read_only):
    """Before it lies another sample, or a token that is not read with it."""
    module = lit_memory.LitARMT(**small(lit_memory.LitARMT), vocab_size=V, segment_len=S)
    first = T - S if read_only else 0
    batch = Batch(torch.zeros(2, T, dtype=torch.long), torch.full((2, T), -100), S, read_only)
    for place in (first, first + 1):
        batch.targets_BT[1] = -100
        batch.targets_BT[1, place] = 3
        if place > first:
            assert module.loss(batch).isfinite()
            continue
        with pytest.raises(
            ValueError, match=f"targets_BT: a target at token {first}, where those behind token {first} "
        ):
            module.loss(batch)


def test_a_part_without_targets():
    """Its loss is 0, and so is its share in that of its batch."""
    module = lit_memory.LitARMT(**small(lit_memory.LitARMT), vocab_size=V, segment_len=S)
    module.log = lambda *args, **kwargs: None
    ids_BT = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))
    whole = Batch(ids_BT, ids_BT.masked_fill(torch.tensor([[False], [True]]), -100), S)
    whole.targets_BT[:, 0] = -100
    losses = [module.training_step(part, 0) for part in (whole.part(0, 2), whole.part(1, 2))]
    torch.testing.assert_close(losses[0] / 2, module.training_step(whole, 0))
    assert losses[1] == 0
    (grad,) = torch.autograd.grad(losses[1], module.model.decoder.head.weight)
    assert (grad == 0).all()


def test_a_context_that_is_generated(monkeypatch):
    """It is read in the order that was asked for; training refuses what needs its length."""
    order: list[dict] = []
    read = lambda *args, **options: order.append(options) or unroll(*args, **options)  # noqa: E731
    monkeypatch.setattr("lit_memory.lit.reads.unroll", read)
    ids_BT = torch.zeros(2, S, dtype=torch.long)

    def loss(train: bool, **options):
        torch.manual_seed(0)
        module = lit_memory.LitARMT(**small(lit_memory.LitARMT), vocab_size=V, segment_len=S, **options).train(train)
        targets_BT = torch.full_like(ids_BT, -100).index_fill_(1, torch.tensor([S - 1]), 1)
        return module.loss(Batch(ids_BT, targets_BT, S, context=iter([ids_BT] * 3)))

    for schedule in ("auto", "sequential"):
        order.clear()
        assert loss(True, unroll_schedule=schedule) == loss(False, unroll_schedule=schedule)
        assert [options["schedule"] for options in order] == [schedule] * 4
    for options in ({"bptt": 2}, {"checkpoint_segments": 1}, {"unroll_schedule": "diagonal"}):
        assert loss(False, **options).isfinite()
        with pytest.raises(ValueError, match="an iterator of segments allows neither"):
            loss(True, **options)


def test_several_dataloaders_have_a_condition_each():
    module = lit_memory.LitRMT(**small(lit_memory.LitRMT), vocab_size=V, segment_len=S).eval()
    parts = [samples(3), samples(5, seed=1)]
    found = {}
    for part in make_trainer().test(module, [DataLoader(data, batch_size=2) for data in parts], verbose=False):
        found |= part
    wanted = {
        f"test/{name}@{i}": value for i, data in enumerate(parts) for name, value in expected(module, data).items()
    }
    assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("task", ["associative_retrieval", "babilong", "time_series"])
def test_batches_without_their_data_module(task):
    """Contexts and questions are read as ever; only the task's own metrics are missing. Of numbers, the loss alone."""
    data = make_data(LIT_DATA[task])
    inputs = getattr(data.task, "input_dim", 0)
    module = lit_memory.LitMamba(width=16, layers=1, vocab_size=data.task.vocab_size, inputs=inputs)
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, data.train_dataloader(), data.val_dataloader())
    names = {"loss"} if inputs else {"loss", "accuracy", "perplexity"}
    assert {name for name in trainer.callback_metrics if name.startswith("valid/")} == {f"valid/{n}" for n in names}
    (plain,) = trainer.validate(module, data.val_dataloader(), verbose=False)
    (scored,) = trainer.validate(module, datamodule=data, verbose=False)
    assert plain["valid/loss"] == pytest.approx(scored["valid/loss"], rel=1e-5)


class Own(L.LightningDataModule):
    """A data module of somebody else."""

    def train_dataloader(self):
        return DataLoader(samples(4), batch_size=2)

    val_dataloader = test_dataloader = train_dataloader


def test_a_data_module_of_ones_own():
    module, trainer = lit_memory.LitXL(width=16, layers=1, vocab_size=V), make_trainer()
    trainer.fit(module, Own())
    (metrics,) = trainer.test(module, Own(), verbose=False)
    assert set(metrics) == {"test/loss", "test/accuracy", "test/perplexity"}


def test_a_schedule_spans_plain_training():
    module, seen = lit_memory.LitRMT(**small(lit_memory.LitRMT), vocab_size=V, lr=1.0, schedule="linear"), []
    module.on_before_optimizer_step = lambda optimizer: seen.append(optimizer.param_groups[0]["lr"])
    loader = DataLoader(samples(4), batch_size=2)
    make_trainer(max_steps=-1, max_epochs=2).fit(module, loader, loader)
    assert seen == pytest.approx([1, 0.875, 0.75, 0.625])


def test_padding_on_the_right_changes_nothing():
    item = {name: value[None] for name, value in samples(1)[0].items()}
    padded = {
        "input_ids": F.pad(item["input_ids"], (0, 4)),
        "labels": F.pad(item["labels"], (0, 4), value=-100),
        "attention_mask": F.pad(torch.ones_like(item["input_ids"]), (0, 4)),
    }
    module = lit_memory.LitARMT(**small(lit_memory.LitARMT), vocab_size=V, segment_len=S)
    module.log = lambda *args, **kwargs: None
    assert module.training_step(item, 0).item() == pytest.approx(module.training_step(padded, 0).item(), rel=1e-6)
    padded["attention_mask"] = padded["attention_mask"].flip(1)
    with pytest.raises(ValueError, match=r"^attention_mask=padding on the left: expected padding on the right alone$"):
        module.training_step(padded, 0)


def test_token_metrics_slow_twin():
    """Tokens of two batches of different sizes count alike; a large vocabulary, and numbers."""
    draw = torch.Generator().manual_seed(0)
    logits_NV, targets_N = torch.randn(7, 50, generator=draw), torch.randint(50, (7,), generator=draw)
    targets_N[:3] = logits_NV[:3].argmax(-1)
    losses_N = F.cross_entropy(logits_NV, targets_N, reduction="none")
    metrics = TokenMetrics(50, torch.device("cpu"))
    for part in (slice(0, 2), slice(2, 7)):
        metrics.update(losses_N[part], logits_NV[part].argmax(-1), targets_N[part])
    found, hits = metrics.compute(), (logits_NV.argmax(-1) == targets_N).float().mean().item()
    wanted = {"loss": losses_N.mean().item(), "accuracy": hits, "perplexity": losses_N.mean().exp().item()}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(wanted, rel=1e-6) and hits >= 3 / 7


# Wrong input


@pytest.mark.parametrize(
    ("batch", "shown"),
    [({"input_ids": torch.ones(1, 2)}, "input_ids"), ({}, ""), ([1, 2], "list"), (torch.ones(2), "Tensor")],
)
def test_batches_of_another_kind(batch, shown):
    expected = r"expected a Batch, a dictionary with input_ids and labels, or a pair \(input_ids, labels\)"
    with pytest.raises(ValueError, match=f"^batch={shown}: {expected}$"):
        as_batch(batch, None)


def test_a_vocabulary_that_nobody_knows():
    with pytest.raises(ValueError, match=r"^vocab_size=0: expected the number of token ids, as the data has no task$"):
        loader = DataLoader(samples(2))
        make_trainer().fit(lit_memory.LitRMT(**small(lit_memory.LitRMT)), loader, loader)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_masks_of_any_kind(kind):
    """Padding on the right is none on the left."""
    ids_BT = torch.arange(8).view(2, 4)
    mask_BT = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    batch = {"input_ids": ids_BT, "labels": ids_BT, "attention_mask": mask_BT.to(kind)}
    assert as_batch(batch, None).ids_BT.equal(ids_BT)
    with pytest.raises(ValueError, match="padding on the left"):
        as_batch(batch | {"attention_mask": mask_BT.flip(1).to(kind)}, None)
