"""Language modelling: windows, oracles of known perplexity, the curve by segment, and metrics of which less is
better."""

import copy
import csv
import math
import re
import sys
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional as F

from lit_memory import LanguageModelingData, LitTransformer
from lit_memory.cli import main
from lit_memory.lit import losses
from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.lit.callbacks.progress import Progress
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import parse
from lit_memory.plan.measured import check_report, x_values
from lit_memory.recurrence import SegmentRecurrent
from lit_memory.recurrence import loss as recurrence_loss
from lit_memory.run.build import build
from lit_memory.run.engine import run_one
from lit_memory.run.reporting import train_x
from lit_memory.run.saving import RunCheckpoint
from lit_memory.run.selection import chosen
from lit_memory.run.tracking import Run, Tracker
from lit_memory.run.trainer import make_trainer, silence_lightning
from lit_memory.tasks.language_modeling import LanguageModeling
from lit_memory.text.corpus import Corpus, load_corpus
from lit_memory.text.stream import Stream, build_stream
from lit_memory.text.tokenizers import ByteTokenizer, WordTokenizer

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]
LETTERS = {"train": "abcdefgh", "valid": "ijklmnop", "test": "qrstuvwx"}


@pytest.fixture
def source(tmp_path):
    """Two books of a split; each split has letters of its own. 603 bytes each."""
    for split, letters in LETTERS.items():
        draw = np.random.Generator(np.random.PCG64(ord(letters[0])))
        for book in "12":
            (tmp_path / "text" / split).mkdir(parents=True, exist_ok=True)
            (tmp_path / "text" / split / f"{book}.txt").write_text("".join(draw.choice(list(letters), 603)))
    return str(tmp_path / "text")


def make(**config) -> LanguageModeling:
    return LanguageModeling(LanguageModeling.Config(**{"segments": 3, "segment_len": 4, "tokenizer": "char", **config}))


def make_data(source, **options) -> LanguageModelingData:
    return LanguageModelingData(
        **{
            "source": source,
            "tokenizer": "char",
            "segments": 3,
            "segment_len": 16,
            "batch_size": 3,
            "epoch_steps": 2,
            **options,
        }
    )


def measure(model, data) -> dict[str, float]:
    """What a test logs for a model of ``SegmentRecurrent``'s interface."""
    module = LitTransformer(width=16, layers=1)
    module.model = model
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    parts = trainer.test(module, data, verbose=False)
    return {name.removeprefix("test/"): value for part in parts for name, value in part.items()}


class Bigram(SegmentRecurrent):
    """Predicts by a table of log-probabilities (V, V) and remembers nothing: its losses can be looked up."""

    def __init__(self, table_VV, requires_grad=False):
        super().__init__()
        self.table_VV = torch.nn.Parameter(table_VV, requires_grad=requires_grad)
        self.config = SimpleNamespace(vocab_size=len(table_VV))

    def init_state(self, batch, device=None, dtype=None):
        return (torch.zeros(batch, 1),)

    def step(self, state, ids_BT, mask_BT=None, write=True):
        return F.one_hot(ids_BT, len(self.table_VV)).to(self.table_VV.dtype), state

    def logits(self, hidden_BTD):
        return hidden_BTD @ self.table_VV


def bigram(requires_grad=False) -> Bigram:
    return Bigram(
        torch.randn(259, 259, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1),
        requires_grad,
    )


# Windows


@pytest.mark.parametrize("length", [12, 13, 14, 20, 24, 25, 26, 35, 36, 37])
@pytest.mark.parametrize("stride", [None, 1, 4, 5, 30])
def test_windows(monkeypatch, length, stride):
    """Those of validation and test begin every ``stride`` tokens up to the end of the text; without a stride every
    token is in one and scored once, except for the first of each window, and one that is left alone at the end."""
    monkeypatch.setattr(LanguageModeling, "text", lambda self, split: Stream(np.arange(100, 100 + length), length))
    task, step = make(stride=stride), stride or 12
    expected, start = [], 0
    while start < length - 1 and (start == 0 or start - step + 12 < length):
        expected.append(list(range(100 + start, 100 + min(start + 12, length))))
        start += step
    for split in ("valid", "test"):
        assert task.count(split) == len(expected)
        batch = task.take(split, range(len(expected)))
        for row, targets, tokens in zip(batch.ids_BT.tolist(), batch.targets_BT.tolist(), expected, strict=True):
            padding = 12 - len(tokens)
            assert row == tokens + [0] * padding and targets == [-100, *tokens[1:], *[-100] * padding]
        if stride is None:
            covered = [i for row in batch.ids_BT.tolist() for i in row if i]
            assert covered == list(range(100, 100 + length - (length % 12 == 1 and length > 12)))
    assert task.count("train") == length - 11
    assert task.take("train", [length - 12]).ids_BT.tolist() == [list(range(100 + length - 12, 100 + length))]


def test_training_windows_begin_anywhere(monkeypatch):
    monkeypatch.setattr(LanguageModeling, "text", lambda self, split: Stream(np.arange(50), 50))
    starts = make(stride=7).batch(0, "train", 0, 2000).ids_BT[:, 0]
    assert sorted(set(starts.tolist())) == list(range(39)) and torch.bincount(starts).min() > 20


def test_no_text_is_in_two_splits(source):
    """No token of the test's text is in a window of the training."""
    task = make(source=source, vocabulary="noise")
    for split, letters in LETTERS.items():
        ids = [set(task.batch(0, split, step, 50).ids_BT.flatten().tolist()) for step in range(4)]
        assert set.union(*ids) - {0, task.tokenizer.eos_id} == set(task.tokenizer.encode(letters).tolist())


@pytest.mark.parametrize("most", [1, 7, 25, 26, 1000])
def test_evaluation_reads_windows_in_order_at_equal_distances(source, most):
    """1,208 tokens in windows of 48 are 26; of fewer, none is read twice."""
    data = make_data(source, test_size=most, eval_batch_size=4)
    (loader,) = data.test_dataloader()
    rows = torch.cat([batch.ids_BT for batch in loader])
    numbers = [i * 26 // min(most, 26) for i in range(min(most, 26))]
    assert torch.equal(rows, data.task.take("test", numbers).ids_BT) and len(set(numbers)) == len(numbers) == len(
        loader.dataset.task.take("test", numbers).ids_BT
    )
    assert len(torch.cat([batch.ids_BT for batch in data.val_dataloader()])) == 26


def test_workers_change_nothing(source):
    batches = [list(make_data(source, workers=workers).train_dataloader()) for workers in (0, 1, 2)]
    for several in batches[1:]:
        assert len(several) == 2 and all(
            torch.equal(a.ids_BT, b.ids_BT) for a, b in zip(batches[0], several, strict=True)
        )


@pytest.mark.parametrize(
    ("plain", "change"),
    [
        ({}, {"source": "noise"}),
        ({}, {"books": 1}),
        ({}, {"tokenizer": "bpe", "vocab_size": 300}),
        ({"tokenizer": "bpe", "vocab_size": 300}, {"vocab_size": 261}),
        ({"tokenizer": "bpe", "vocab_size": 300}, {"vocabulary": "noise"}),
        ({}, {"segments": 2}),
        ({}, {"segment_len": 5}),
        ({}, {"stride": 3}),
        ({}, {"window": 11}),
    ],
    ids=str,
)
def test_every_knob_matters(source, plain, change):
    tasks = [make(**{"source": source, "books": 2, **plain, **more}) for more in ({}, change)]
    pairs = [[task.take(split, [task.count(split) - 2]).ids_BT for task in tasks] for split in ("train", "test")]
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


def test_windows_by_their_tokens(source):
    """They are those of as many segments, if they are cut alike; a window may also end within a segment, or be one."""
    whole, tokens = make(source=source), make(source=source, window=12, test_window=[12, 10])
    assert torch.equal(whole.take("test", [1]).ids_BT, tokens.take("test", [1]).ids_BT)
    assert tokens.x_values("test_window") == [12, 10] and tokens.x_values("test_segments") == []
    assert (tokens.tokens, tokens.written, tokens.curve_positions("segment")) == (12, 2, [0, 1, 2])
    short, one = tokens.test_conditions()[1][1], make(source=source, window=10, segment_len=0)
    assert (short.tokens, short.written, one.segment_len, one.written) == (10, 2, None, 0)
    batches = [task.take("test", [0]) for task in (short, one)]
    assert torch.equal(batches[0].ids_BT, batches[1].ids_BT) and batches[1].segment_len is None
    with pytest.raises(ValueError, match=r"^window=5000: a window has 5,000 tokens, all of"):
        make(source=source, window=5000).text("test")
    found = measure(bigram(), make_data(source, window=50, segment_len=0))
    assert found["segment_loss[0]@50"] == pytest.approx(found["loss@50"], rel=1e-12)


# Losses


def test_a_uniform_model(source):
    """Its perplexity is V, and its bits per byte log2(V) * tokens / bytes, with the tokens and bytes of the test."""
    model = Bigram(torch.zeros(259, 259))
    found = measure(model, make_data(source))
    ratio = (2 * 603 + 2) / (2 * 603)
    assert found["perplexity@3"] == pytest.approx(259, rel=1e-5) and found["bits_per_byte@3"] == pytest.approx(
        math.log2(259) * ratio, rel=1e-5
    )
    assert found["segment_bits_per_byte[2]@3"] == pytest.approx(math.log2(259) * ratio, rel=1e-5)


@pytest.mark.parametrize("eval_batch_size", [1, 3, 25, 26])
def test_means_are_over_tokens(source, eval_batch_size):
    """An oracle of known losses has exactly their mean, over all tokens and by segment, however the windows are
    batched: the last one is shorter. The token at a boundary counts in the later segment (spec 8.1), the first of a
        window nowhere."""
    model, data = bigram(), make_data(source, eval_batch_size=eval_batch_size)
    tokens = data.task.text("test").tokens_N.astype(int)
    assert len(tokens) == 25 * 48 + 8
    losses = [(j % 48 // 16, -float(model.table_VV[tokens[j - 1], tokens[j]])) for j in range(len(tokens)) if j % 48]
    found = measure(model, data)
    assert found["loss@3"] == pytest.approx(np.mean([loss for _, loss in losses]), rel=1e-12)
    assert found["perplexity@3"] == pytest.approx(math.exp(found["loss@3"]), rel=1e-6)
    for segment in range(3):
        own = [loss for i, loss in losses if i == segment]
        assert len(own) == (25 * 15 + 7, 25 * 16, 25 * 16)[segment]
        assert found[f"segment_loss[{segment}]@3"] == pytest.approx(np.mean(own), rel=1e-12)


def test_bits_per_byte_are_those_of_the_split(source, tmp_path):
    """Books of longer words have fewer tokens for their bytes."""
    for split, word in {"train": "a", "valid": "bb", "test": "cccc"}.items():
        (tmp_path / f"{split}.txt").write_text(f"{word} " * 40)
    task = make(source=str(tmp_path), tokenizer="word", vocab_size=10)
    assert [task.take(split, [0]).meta["bytes_per_token"].item() for split in LETTERS] == pytest.approx(
        [80 / 41, 120 / 41, 200 / 41]
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_in_parts(monkeypatch, reduction):
    """Equal to that of all logits at once, and so is its gradient; so are predictions."""
    results, targets_N = [], torch.arange(11)
    for most in (2**25, 259 * 4):
        monkeypatch.setattr(recurrence_loss, "MAX_LOGITS", most)
        model = bigram(requires_grad=True)
        hidden_ND = torch.randn(
            11, 259, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True
        )
        loss = losses.hidden_loss(model, hidden_ND, targets_N, reduction)
        loss.square().sum().backward()
        with torch.no_grad():
            losses_N, predicted_N = losses.losses_and_predictions(model, hidden_ND, targets_N)
        assert reduction == "mean" or torch.allclose(losses_N, loss)
        results.append((loss, hidden_ND.grad, model.table_VV.grad, losses_N, predicted_N))
    assert results[0][0].shape == (() if reduction == "mean" else (11,))
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, parts, atol=1e-12, rtol=1e-12)
    monkeypatch.setattr(recurrence_loss, "MAX_LOGITS", 3)
    calls = []
    monkeypatch.setattr(model, "logits", lambda hidden: calls.append(len(hidden)) or hidden @ model.table_VV)
    with torch.no_grad():
        losses.hidden_loss(model, hidden_ND, targets_N, reduction)
    assert calls == [1] * 11


def test_validation_logs_no_curve(source):
    module, data = LitTransformer(width=16, layers=1), make_data(source)
    L.Trainer(accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(
        module, data
    )
    metrics = module.trainer.callback_metrics
    assert {name for name in metrics if name.startswith("valid/")} == {
        "valid/loss",
        "valid/perplexity",
        "valid/bits_per_byte",
    }
    assert metrics["valid/perplexity"] == pytest.approx(math.exp(metrics["valid/loss"]), rel=1e-5)


def test_a_diverged_model_has_a_perplexity():
    assert make().summarize({"loss": 1e4})["perplexity"] == pytest.approx(math.exp(700))


# Streams


def test_streams(tmp_path):
    """All texts, each with its end token; on disk, mapped and read-only; made once, and anew for another text or
    tokenizer."""
    texts, made = ["one two", "", "three é"], []
    corpus = Corpus("key", lambda: made.append(1) or texts, "tiny")
    words = WordTokenizer(["one", "two", "three"])
    for _ in range(2):
        stream = build_stream(corpus, words, tmp_path)
        assert stream.tokens_N.tolist() == [4, 5, 1, 1, 6, 3, 1] and stream.num_bytes == 7 + 8 and len(stream) == 7
        assert (
            isinstance(stream.tokens_N.base, np.memmap)
            and not stream.tokens_N.flags.writeable
            and stream.tokens_N.dtype == np.uint16
        )
    assert len(made) == 1
    wide = build_stream(corpus, WordTokenizer([str(i) for i in range(70_000)]), tmp_path)
    assert wide.tokens_N.dtype == np.int32 and len(made) == 2
    assert build_stream(corpus, ByteTokenizer(), tmp_path).tokens_N.tolist()[:4] == [ord(c) + 3 for c in "one "]
    with pytest.raises(ValueError, match=r"^tiny: expected text, found none$"):
        build_stream(Corpus("other", lambda: [""], "tiny"), words, tmp_path)


def test_a_text_comes_back(source):
    task = make(source=source)
    text = task.tokenizer.decode(task.text("train").tokens_N.tolist())
    assert text == "".join(f"{book}<eos>" for book in load_corpus(source, "train").texts())


# Wrong input


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"source": "wikitext"},
            "source='wikitext': no such folder; expected a folder, or one of noise, shipped-books, shipped-",
        ),
        ({"source": ""}, "source='': no such folder"),
        ({"vocabulary": "no/folder"}, "vocabulary='no/folder': no such folder"),
        ({"segments": 0}, "segments=0: expected at least 1"),
        ({"segment_len": 0}, "segment_len=0: expected at least 1"),
        ({"segments": 1, "segment_len": 1}, "segment_len=1: expected at least 2 tokens in a window"),
        ({"stride": 0}, "stride=0: expected at least 1"),
        ({"window": -1}, "window=-1: expected 0 or more"),
        ({"window": 1}, "window=1: expected at least 2 tokens in a window"),
        ({"test_window": [8]}, "test_window=[8]: expected window beside it, and no test_segments"),
        ({"window": 8, "test_window": [8], "test_segments": [2]}, "test_window=[8]: expected window beside it"),
    ],
)
def test_wrong_settings(config, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make(**config)


def test_a_text_that_is_too_short(source):
    """Told before the training, also of a test."""
    message = (
        r"^segments=76: a window has 1,216 tokens, all of .*text, split test, 1,208; expected fewer, or more text$"
    )
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(LitTransformer(width=16, layers=1), make_data(source, test_segments=[3, 76]))
    assert trainer.global_step == 0
    with pytest.raises(ValueError, match=r"segments=80.*split train"):
        make_data(source, segments=80).task.batch(0, "train", 0, 1)


def test_a_tokenizer_with_too_many_ids(source, tmp_path):
    make(source=source, tokenizer="bpe", vocab_size=270).tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}'
    )
    ids = make(source=source, tokenizer=str(tmp_path), vocab_size=300).take("test", [0]).ids_BT
    assert torch.equal(ids, make(source=source, tokenizer="bpe", vocab_size=270).take("test", [0]).ids_BT)
    with pytest.raises(ValueError, match=r"^vocab_size=200: expected at least 270, the ids of tokenizer '.*'$"):
        make(source=source, tokenizer=str(tmp_path), vocab_size=200).take("test", [0])


def test_no_network(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("a long\nstory")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        FileNotFoundError,
        match=r"^fineweb-edu: HuggingFaceFW/fineweb-edu is not in reach on the Hugging Face hub .*; check the network",
    ) as caught:
        make(source="fineweb-edu").count("train")
    assert "\n" not in str(caught.value)


# The command


@pytest.fixture
def experiment():
    """``experiment(**changes)``: the content of a file with two arms, of which one learns; "top__below" names what to
    change."""
    tree = {
        "experiment": "tiny_lm",
        "paper": {"title": "A paper", "item": "Figure 1", "claim": "a reads better than b"},
        "base": {
            "model": {"name": "armt", "layers": 1, "width": 16, "heads": 2, "memory_tokens": 1, "memory_dim": 4},
            "task": {
                "name": "language_modeling",
                "source": "noise",
                "books": 1,
                "tokenizer": "char",
                "segments": 2,
                "segment_len": 8,
                "test_segments": [1, 3],
            },
            "train": {
                "steps": 4,
                "lr": 0.01,
                "batch_size": 4,
                "valid_every": 2,
                "valid_size": 4,
                "test_size": 9,
                "eval_batch_size": 4,
            },
        },
        "arms": {
            "armt": {},
            "transformer": {"model": {"name": "transformer", "layers": 1, "width": 16, "heads": 2}, "train.lr": 0.0},
        },
        "seeds": [0],
        "report": {"x": "test_segments", "y": "perplexity"},
        "expect": ["armt[first] < transformer[first]"],
        "requires": ["armt[first] > 0"],
    }

    def change(**changes):
        new = copy.deepcopy(tree)
        for path, value in changes.items():
            *parents, last = path.split("__")
            node = new
            for name in parents:
                node = node[name]
            node[last] = value
        return new

    return change


def plan(tree):
    found = parse(tree, "tiny_lm.yaml").at()
    specs = found.plan()
    check_report(found, specs)
    return found, specs


def table(root):
    with (root / "reports" / "tiny_lm" / "table.csv").open() as file:
        return {(row["arm"], row["x"], row["metric"]): float(row["mean"]) for row in csv.DictReader(file)}


def test_the_command_ends_with_a_verdict(experiment, root, tmp_path, capsys):
    """Perplexity by length, and from the same runs the curve by segment of the longest windows; no metric strays into
    the other table."""
    path = tmp_path / "tiny_lm.yaml"
    path.write_text(yaml.safe_dump(experiment()))
    tracker = Tracker(root)
    for spec in plan(experiment())[1]:
        run_one(spec, root, tracker.uri, tracker.parent(spec.experiment, spec.scale, {}), {}, lambda message: None)
    assert main([str(path), "--root", str(root), "--report"]) == 0
    out, by_length = capsys.readouterr().out, table(root)
    assert "INCONCLUSIVE" in out and "perplexity, mean" in out and "✗" not in out
    assert {(x, metric) for _, x, metric in by_length} == {
        (x, m) for x in "13" for m in ("perplexity", "bits_per_byte", "loss", "steps")
    }
    assert by_length["armt", "3", "perplexity"] == pytest.approx(math.exp(by_length["armt", "3", "loss"]), rel=1e-4)
    path.write_text(
        yaml.safe_dump(
            experiment(
                report={"x": "segment", "y": "segment_bits_per_byte"},
                expect=["armt[2] < transformer.segment_loss[last]"],
            )
        )
    )
    assert main([str(path), "--root", str(root), "--report"]) == 0
    curve = table(root)
    assert {(x, metric) for _, x, metric in curve} == {
        (x, m) for x in "012" for m in ("segment_bits_per_byte", "segment_loss", "steps")
    }
    weights = (9 * 7, 9 * 8, 9 * 8)  # nine windows of three segments
    mean = sum(curve["armt", str(i), "segment_loss"] * n for i, n in enumerate(weights)) / sum(weights)
    assert mean == pytest.approx(by_length["armt", "3", "loss"], abs=2e-6)


@pytest.mark.parametrize(
    ("report", "expect", "message"),
    [
        (
            {"x": "segments", "y": "perplexity"},
            [],
            "report.x: 'segments' is not what the test of language_modeling varies; "
            "expected test_segments, segment or step$",
        ),
        (
            {"x": "segment", "y": "perplexity"},
            [],
            "report.y: unknown metric 'perplexity'; expected one of segment_loss, segment_bits_per_byte, steps",
        ),
        ({"x": "test_segments", "y": "segment_loss"}, [], "report.y: unknown metric 'segment_loss'"),
        (
            {"x": "segment", "y": "segment_loss", "time": "seconds"},
            [],
            "report.time: seconds: expected none where x=segment is no test_<field>",
        ),
        ({"x": "segment", "y": "segment_loss", "state_x": "last"}, [], "report.state_x: last: expected none"),
        ({"x": "segment", "y": "segment_loss"}, ["armt.seconds[0] > 1"], "expect: .*no metric 'seconds'"),
        ({"x": "segment", "y": "segment_loss"}, ["armt[3] > 1"], "expect: .*3 is not tested; tested: 0, 1, 2"),
    ],
)
def test_a_report_that_asks_for_the_wrong_thing(experiment, report, expect, message):
    with pytest.raises(ConfigError, match=message):
        plan(experiment(report=report, expect=expect))


def test_the_curve_knows_where_the_training_ended(experiment):
    """The last place that any stage of any arm has trained."""
    tree = experiment(
        report={"x": "segment", "y": "segment_loss"},
        expect=[],
        base__task__segments=5,
        base__task__test_segments=[1, 9],
    )
    for stages, last in [([], 4), ([{"task.segments": 2}, {"task.segments": 7}], 6)]:
        tree["base"]["train"]["stages"] = stages
        found, specs = plan(tree)
        assert x_values(found, specs) == list(range(9)) and train_x("segment", specs) == last


@pytest.mark.parametrize(("goal", "solved"), [(1e9, True), (0.5, False)])
def test_less_perplexity_ends_a_stage(experiment, tmp_path, goal, solved):
    silence_lightning()
    spec = plan(experiment(base__train__stages=[{"until": {"perplexity": goal}}]))[1][0]
    (module, data), curriculum = build(spec), Curriculum(spec.stages, spec.train["valid_every"])
    make_trainer(spec, tmp_path, False, curriculum, RunCheckpoint(tmp_path)).fit(module, datamodule=data)
    assert [(entry["step"], entry["solved"]) for entry in curriculum.history] == [(2 if solved else 4, solved)]


@pytest.mark.parametrize(("y", "best"), [("perplexity", "lr0.1"), ("exact_match", "lr0.2")])
def test_less_perplexity_selects_a_grid_point(experiment, tree, y, best):
    """And more exact match another."""
    found, specs = plan({**(experiment() if y == "perplexity" else tree), "grid": {"train.lr": [0.2, 0.1]}})
    runs = {spec.key: Run("id", "FINISHED", metrics={f"valid/{y}": 10 * spec.train["lr"]}) for spec in specs}
    assert chosen(found, specs, runs)[0].point == best


def test_progress_of_a_test_knows_how_much_there_is(source):
    """Fewer windows than ``test_size``."""
    data = make_data(source, test_segments=[1, 3], test_size=60)
    module = LitTransformer(width=16, layers=1)
    progress = Progress(lambda message: None, SimpleNamespace(), "perplexity")
    L.Trainer(
        accelerator="cpu", callbacks=[progress], logger=False, enable_checkpointing=False, enable_progress_bar=False
    ).test(module, data, verbose=False)
    assert progress.tokens_read == progress.test_tokens == 60 * 16 + 26 * 48
