"""The scores of the samples of a test: what a run keeps of them, how they reach the store, and how a report reads
them."""

import hashlib
import shutil

import numpy as np
import pytest
import torch
from records import finish

from lit_memory import report
from lit_memory.cli import main
from lit_memory.lit.scores import Mean, Part, as_drawn
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.sections import ReportConfig
from lit_memory.registry import build_config, load_class
from lit_memory.report.render import write as redrawn
from lit_memory.report.scores import NAME, pack, unpack
from lit_memory.run.engine import run_one
from lit_memory.run.journal import Journal
from lit_memory.run.outbox import Outbox
from lit_memory.run.scores import read_scores, scores_file
from lit_memory.run.tracking import Tracker

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
CASES = {
    "retrieval": (["train.test_size=30"], {"exact_match", "capacity"}),
    "several batches": (["train.test_size=[30, 7]", "train.eval_batch_size=8"], {"exact_match", "capacity"}),
}


def train(spec, root):
    tracker = Tracker(root)
    run_one(spec, root, tracker.uri, tracker.parent(spec.experiment, spec.scale, {}), {}, lambda message: None)
    return tracker, tracker.find(spec.key)


@pytest.mark.parametrize("case", CASES)
def test_their_mean_is_the_result(make_spec, root, case):
    """Of every metric that samples have, also of those that follow from others; the sizes are those of the test."""
    overrides, metrics = CASES[case]
    spec = make_spec(*overrides)
    tracker, found = train(spec, root)
    results = {(name, float(x)): value for name, x, value in tracker.results(found)}
    scores = unpack((spec.folder(root) / NAME).read_bytes())
    cells = {name: (metric, float(x)) for name, (metric, x) in ((name, name.split("/")) for name in scores)}
    assert set(cells.values()) == {cell for cell in results if cell[0] in metrics}
    sizes = dict(zip([2.0, 4.0], [30, 30] if case == "retrieval" else [30, 7], strict=True))
    for name, cell in cells.items():
        assert scores[name].mean() == pytest.approx(results[cell], abs=1e-5) and len(scores[name]) == sizes[cell[1]]
    assert {scores[name].dtype.name for name, cell in cells.items() if cell[0] == "exact_match"} == {"uint8"}


def test_a_text_has_the_losses_of_its_contexts(make_spec, root):
    """One number per context, not per token: tokens of one context are no samples of their own. A perplexity is no mean
    of theirs, so it has none."""
    text = "task={name: language_modeling, source: noise, segment_len: 8, segments: 3}"
    spec = make_spec(text, "train.test_size=5", "train.eval_batch_size=2", "train.stages=[]", "train.steps=1")
    tracker, found = train(spec, root)
    results = {(name, float(x)): value for name, x, value in tracker.results(found)}
    scores = unpack((spec.folder(root) / NAME).read_bytes())
    assert "loss/3" in scores and not any(name.startswith("perplexity") for name in scores)
    assert {len(of_x) for of_x in scores.values()} == {5} and len({*scores["loss/3"]}) == 5
    for name, of_x in scores.items():
        metric, _, x = name.partition("/")
        assert of_x.mean() == pytest.approx(results[metric, float(x)], rel=1e-5)


def test_scores_are_in_the_order_of_the_draw():
    """Whatever order a layout gives a batch, and however devices share it."""
    parts = [Part(0, torch.tensor([3.0, 1.0]), torch.tensor([2, 0])), Part(0, torch.tensor([2.0]), torch.tensor([1]))]
    parts += [Part(1, torch.tensor([9.0, 8.0]), None)]
    assert torch.cat(list(as_drawn(parts))).tolist() == [1, 2, 3, 9, 8]


def test_layouts_ask_the_same_questions_in_the_same_order():
    """Arms in lines and in text are compared sample by sample."""
    texts = []
    for layout in ("lines", "text"):
        cls, options = load_class("task", "memreasoner"), {"layout": layout, "segment_len": 64, "margin": 40}
        task = cls(build_config(cls.Config, options | {"haystack": "noise", "tokenizer": "word"}))
        batch = task.batch(0, "test", 0, 50)
        texts.append([task.tokenizer.decode(row[row != -100].tolist()) for row in batch.as_drawn(batch.targets_BT)])
    assert texts[0] == texts[1]


def test_contexts_of_unequal_length_have_no_scores():
    """Their mean would not be that of the tokens."""
    scored = torch.tensor([[True, True, True], [True, True, False]])
    mean = Mean.of_tokens(torch.arange(5.0), scored)
    assert (float(mean.value), mean.weight, mean.scores_B) == (2.0, 5, None)
    even = Mean.of_tokens(torch.arange(4.0), scored & torch.tensor([True, True, False]))
    assert even.scores_B is not None and even.scores_B.tolist() == [0.5, 2.5]


def test_a_file_has_the_same_bytes_at_any_time_and_keeps_every_value():
    arrays = {"b/2": np.array([0.0, 1, 1]), "a/4": np.array([0.1, np.nan]), "a/2": np.float32([0.5, 0.3]).astype(float)}
    content = pack(arrays)
    assert content == pack(dict(reversed(arrays.items())))
    found = unpack(content)
    assert {name: of_x.dtype.name for name, of_x in found.items()} == {
        "b/2": "uint8",
        "a/4": "float64",
        "a/2": "float32",
    }
    for name, of_x in arrays.items():
        assert np.array_equal(found[name], of_x, equal_nan=True)


# On the way to the report

SCORES = {("exact_match", 2): np.array([0.0, 1]), ("exact_match", 4): np.array([1.0, 1])}


@pytest.fixture
def finished(make_spec, root):
    """A run that is FINISHED, with its scores on disk and in the store: spec, tracker and what the store knows."""
    spec, tracker = make_spec(), Tracker(root)
    story = Journal(spec.folder(root))
    story.begin({}, {})
    story.attach(NAME, scores_file(SCORES))
    story.finish([("exact_match", 2, 0.5), ("exact_match", 4, 1.0)], {"steps": 3})
    Outbox(spec, root, lambda: tracker).send()
    return spec, tracker, tracker.find(spec.key)


def read(spec, tracker, run, root, x="test_pairs"):
    found = read_scores(tracker, [spec], {spec.key: run}, root, ReportConfig(x=x), [10, 20])
    return {cell[1:3]: of_x.tolist() for cell, of_x in found.items()}


EXPECTED = {("exact_match", 2.0): [0, 1], ("exact_match", 4.0): [1, 1]}


def test_they_are_read_from_the_folder_or_else_from_the_store(finished, root):
    spec, tracker, run = finished
    assert run.own_tags[NAME] == hashlib.sha256(scores_file(SCORES)).hexdigest()
    assert tracker.files.read(run.run_id, NAME) == scores_file(SCORES) == (spec.folder(root) / NAME).read_bytes()
    assert read(*finished, root) == EXPECTED
    shutil.rmtree(spec.folder(root))
    assert read(*finished, root) == EXPECTED


def test_along_a_training_they_are_those_of_its_end(finished, root):
    assert read(*finished, root, x="step") == {("test_exact_match", 20.0): [1, 1]}


@pytest.mark.parametrize("where", ["folder", "store"])
def test_a_damaged_file_is_told_in_one_line(finished, root, where):
    spec, _, run = finished
    if where == "folder":
        path, advice = spec.folder(root) / NAME, "its copy in MLflow is read"
    else:
        (path,), advice = (root / "mlruns").rglob(f"{run.run_id}/artifacts/{NAME}"), "intervals do without them"
        shutil.rmtree(spec.folder(root))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(
        ConfigError, match=f"damaged \\(its checksum does not match\\); expected .*; remove it, and {advice}"
    ):
        read(*finished, root)
    path.unlink()
    assert read(*finished, root) == (EXPECTED if where == "folder" else {})


def test_a_file_that_is_nowhere_is_told_once(finished, root):
    spec, tracker, _ = finished
    shutil.rmtree(spec.folder(root))
    shutil.rmtree(root / "mlruns")
    lines = []
    tracker.warn = lines.append
    assert read(*finished, root) == {}
    assert len(lines) == 1 and "the scores of a seed 0 cannot be read (" in lines[0] and "do without them" in lines[0]


def test_a_run_from_before_there_were_scores_has_none(make_spec, root):
    spec, tracker = make_spec(), Tracker(root)
    run_id = tracker.start(spec, None, tracker.parent(spec.experiment, spec.scale, {}), {}, {})
    finish(tracker, run_id, [("exact_match", 2, 0.5)], {})
    tracker.warn = pytest.fail
    assert read(spec, tracker, tracker.find(spec.key), root) == {}
    assert read(spec, tracker, None, root) == {}


def test_a_command_draws_samples_too(write, root, tmp_path, inline, unsaved_figures, capsys):
    """The report of a sweep has the scores of its runs, also when it is drawn from another root's store."""
    file = write(expect=["a[2] >= 0"], requires=["a[4] >= 0"], seeds=[0, 1])
    assert main([file, "--root", str(root)]) == 0
    folder = root / "reports" / "tiny"
    before = {name: (folder / name).read_bytes() for name in (NAME, "verdict.json")}
    assert b'"resampled": "seeds and samples"' in before["verdict.json"]
    again = redrawn(report.load(folder), tmp_path / "again")
    assert again.paths["verdict.json"].read_bytes() == before["verdict.json"]
    for path in (root / "checkpoints").rglob(NAME):
        path.unlink()
    (folder / NAME).unlink()
    assert main([file, "--root", str(root), "--report"]) == 0
    assert {name: (folder / name).read_bytes() for name in before} == before
    next(path for path in (root / "mlruns").rglob(NAME) if "report" not in path.parts).write_bytes(b"x")
    capsys.readouterr()
    assert main([file, "--root", str(root), "--report"]) == 2
    assert "damaged (its checksum does not match)" in capsys.readouterr().err
