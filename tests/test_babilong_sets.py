"""Distributed sets of BABILong: what is read from them, that it is what we would have made, and what a wrong one is
told."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import lightning as L
import numpy as np
import pytest
import torch
import yaml

from lit_memory import BABILongData, LitARMT
from lit_memory.recurrence import unroll
from lit_memory.tasks import babilong_sets
from lit_memory.tasks.babilong import BABILong
from lit_memory.tasks.babilong_sets import load_set, part_name

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated", "ignore:.*does not have many workers")
SMALL = {"segment_len": 64, "margin": 12, "books": 2, "vocab_size": 2048}


@pytest.fixture(autouse=True)
def _fresh():
    load_set.cache_clear()


def make(**config) -> BABILong:
    return BABILong(BABILong.Config(**{**SMALL, **config}))


STORY = "Mary moved to the garden. John went to the office."
ROWS = [
    {"input": " \n".join([STORY] * n), "question": "Where is Mary? ", "target": "garden"} for n in (1, 9, 20, 5, 14, 32)
]
"""Contexts of 12 tokens times n."""


def written(folder, rows=ROWS, name="1k/qa1.jsonl"):
    """A set with one part; returns the folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def tokens(task, batch):
    """Per sample its real tokens, as they are read."""
    found = [[] for _ in batch.ids_BT]
    for part in batch.context:
        ids, mask = part if isinstance(part, tuple) else (part, torch.ones_like(part, dtype=torch.bool))
        for i, row in enumerate(ids):
            found[i] += row[mask[i]].tolist()
    ends = batch.meta["answer_start"] + (batch.targets_BT != -100).sum(1)
    return [row + tail[:end].tolist() for row, tail, end in zip(found, batch.ids_BT, ends, strict=True)]


BYTES = {"tokenizer": "char", "segment_len": 512, "margin": 80, "leading_space": False}


@pytest.mark.parametrize("options", [{}, {"segments": 0}, BYTES, {"task": "qa5"}], ids=str)
def test_our_samples_written_out_are_read_back(tmp_path, options):
    """The same ids, targets, segments and scores as those that our generator made, by words and by bytes, with noise
    and without."""
    for part in ("train", "valid"):  # the same, so that no word is unknown
        (tmp_path / f"{part}.txt").write_text(
            " ".join(f"Of all these old chairs, only two or {n} stood by my window." for n in range(2, 30))
        )
    options = {"haystack": str(tmp_path), "books": None} | options
    ours = make(**{"segments": 3, **options})
    tokenizer, rows, kept = ours.tokenizer, [], []
    for sample in ours.samples(0, "valid", 0, 10):
        text = tokenizer.decode(sample.read(0, sample.context_len))
        if text == text.rstrip():  # else it was cut behind a space
            rows.append(
                {
                    "input": text,
                    "question": tokenizer.decode(sample.question[:-1]),
                    "target": tokenizer.decode(sample.answer[:-1]),
                }
            )
            kept.append(sample)
    assert len(rows) >= 4
    read = make(
        **options,
        eval_set=written(tmp_path / "set", rows, f"1k/{ours.config.task}.jsonl"),
        test_eval_length=[1000],
        eval_length=1000,
    )
    theirs = read.batch(0, "test", 0, len(rows))
    ours.samples = lambda *_: kept
    expected = ours.batch(0, "test", 0, len(rows))
    assert torch.equal(theirs.ids_BT, expected.ids_BT) and torch.equal(theirs.targets_BT, expected.targets_BT)
    assert {*expected.meta} - {*theirs.meta} == {"depth"}  # a file does not say which sentence is the fact
    assert all(torch.equal(theirs.meta[name], expected.meta[name]) for name in theirs.meta)
    assert all(torch.equal(a, b) for a, b in zip(theirs.context, expected.context, strict=True))
    said = torch.full((len(rows), read.new_tokens), read.tokenizer.pad_id)
    for row, sample in zip(said, kept, strict=True):
        row[: len(sample.answer)] = torch.from_numpy(sample.answer)
    said[0] = read.tokenizer.pad_id
    scores, same = read.score_text(said, theirs), ours.score_text(said, expected)
    assert scores["exact_match"].tolist() == [0.0, *[1.0] * (len(rows) - 1)]
    assert {name: value.tolist() for name, value in scores.items()} == {
        name: value.tolist() for name, value in same.items()
    }


def test_samples_of_any_length_share_a_batch(tmp_path):
    """Cut back from the end, the first segment short; what a model has read in the end is what it reads of each sample
    alone."""
    task = make(eval_set=written(tmp_path), test_eval_length=[1000], eval_length=1000, vocabulary="noise")
    batch = task.batch(0, "test", 0, len(ROWS))
    segments = list(batch.context)
    assert batch.meta["segments"].tolist() == [7, 4, 3, 2, 2, 1] and batch.meta["question_start"].tolist() == [
        52
    ] * 5 + [12]
    shapes = [(part[0] if isinstance(part, tuple) else part).shape for part in segments]
    assert shapes == [(1, 64), (1, 64), (1, 64), (2, 64), (3, 64), (5, 64)]
    masks = [part[1].sum(1).tolist() for part in segments if isinstance(part, tuple)]
    assert masks == [[12], [64, 60], [64, 64, 52], [64, 64, 64, 56, 8]]
    order = sorted(range(len(ROWS)), key=lambda i: -len(ROWS[i]["input"]))
    for row, i in zip(tokens(task, task.batch(0, "test", 0, len(ROWS))), order, strict=True):
        text = f"{' '.join(ROWS[i]['input'].split())} Where is Mary?"
        assert row == [
            *task.tokenizer.encode(text),
            task.tokenizer.gen_id,
            *task.tokenizer.encode("garden"),
            task.tokenizer.eos_id,
        ]
    module = LitARMT(
        width=16, layers=2, heads=2, memory_tokens=2, memory_dim=4, value_std=0.5, vocab_size=task.vocab_size
    ).double()
    module.configure_model()
    state = unroll(module.model, iter(segments), keep=0).state
    for place, i in enumerate(order[:-1]):
        alone = task.batch(0, "test", i, 1)
        expected = unroll(module.model, alone.context, keep=0).state
        for ours, theirs in zip(state, expected, strict=True):
            assert all(torch.allclose(a[place], b[0], atol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_a_model_is_tested_on_a_set(tmp_path):
    """``trainer.test`` reads every sample once, at every length, although the batches leave a rest; training does not
    read it."""
    path = written(tmp_path)
    written(tmp_path, [ROWS[0]] * 5, "0k/qa1.jsonl")
    data = BABILongData(
        **SMALL,
        segments=2,
        eval_set=path,
        test_eval_length=[0, 1000],
        test_size=5,
        eval_batch_size=4,
        batch_size=2,
        valid_size=2,
    )
    loaders = data.test_dataloader()
    assert (
        [x for x, _ in data.test_conditions] == [0, 1000]
        and [len(loader) for loader in loaders] == [5, 5]
        and len(data.val_dataloader()) == 1
    )
    read = [b.meta["segments"].item() for b in loaders[1]]
    assert read == [1, 2, 4, 2, 3] and [task.written for _, task in data.test_conditions] == [0, 15]
    module = LitARMT(width=16, layers=1, heads=2, memory_tokens=2, memory_dim=4)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator="cpu", max_steps=1, limit_val_batches=0, **quiet)
    trainer.fit(module, data)
    (found, *rest) = trainer.test(module, data, verbose=False)
    names = {f"test/{metric}@{x}" for metric in ("loss", "exact_match", "babilong_compare") for x in (0, 1000)}
    assert names == {name for part in (found, *rest) for name in part}


def kinds(folder):
    """The same samples in every form, by name."""
    rows = datasets.Dataset.from_list(ROWS)
    yield "folder of jsonl", written(folder / "jsonl")
    (folder / "json" / "1k").mkdir(parents=True)
    (folder / "json" / "1k" / "qa1.json").write_text(json.dumps(ROWS))
    yield "folder of json", str(folder / "json")
    (folder / "parquet" / "1k").mkdir(parents=True)
    rows.to_parquet(str(folder / "parquet" / "1k" / "qa1.parquet"))
    yield "folder of parquet", str(folder / "parquet")
    datasets.DatasetDict({"qa1": rows}).save_to_disk(str(folder / "saved" / "1k"))
    yield "save_to_disk", str(folder / "saved")
    yield "one saved", str(folder / "saved" / "1k" / "qa1")
    yield "one file", str(folder / "jsonl" / "1k" / "qa1.jsonl")


def test_forms_of_a_set(tmp_path):
    for name, source in kinds(tmp_path):
        found = make(eval_set=source, test_eval_length=[1000], eval_length=1000).rows(0, len(ROWS))
        assert found == [{column: text.strip() for column, text in row.items()} for row in ROWS], name


def test_a_set_of_the_hub(monkeypatch):
    asked, rows = [], datasets.Dataset.from_list(ROWS)

    def load_dataset_builder(name, config, *, revision, cache_dir):
        asked.append((name, config, revision, Path(cache_dir).name))
        return SimpleNamespace(
            config=SimpleNamespace(data_files=None),
            download_and_prepare=lambda **_: None,
            as_dataset=lambda split: asked.append(split) or rows,
        )

    hub = SimpleNamespace(load_dataset_builder=load_dataset_builder, load_dataset=None, load_from_disk=None)
    hub.disable_progress_bars = lambda: None
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = make(
        eval_set="RMT-team/babilong",
        eval_revision="abc",
        test_eval_length=[0, 64_000, 10_000_000],
        task="qa2",
        segment_len=128,
    )
    for _, condition in task.test_conditions():
        assert condition.rows(5, 1)[0]["target"] == "garden"
    assert asked == [
        part for name in ("0k", "64k", "10M") for part in (("RMT-team/babilong", name, "abc", "qa2"), "qa2")
    ]


def test_of_a_set_of_the_hub_one_task_is_read(tmp_path, monkeypatch):
    """As ``datasets`` finds it: of a folder with the same page as the repositories. The files of other tasks, which may
    be gigabytes, stay where they are; what was read once is there without a network."""
    folder, cache = tmp_path / "set", str(tmp_path / "cache")
    for task in ("qa1", "qa2"):
        written(folder, [ROWS[0] | {"target": task}], f"data/{task}/1k.json")
    written(folder, "{", "data/qa3/1k.json")
    splits = [{"split": task, "path": f"data/{task}/1k.json"} for task in ("qa1", "qa2", "qa3")]
    sizes = [{"name": task, "num_bytes": 9, "num_examples": 9} for task in ("qa1", "qa2", "qa3")]
    columns = [{"name": column, "dtype": "string"} for column in ROWS[0]]
    card = {
        "configs": [{"config_name": "1k", "data_files": splits}],
        "dataset_info": [{"config_name": "1k", "features": columns, "splits": sizes}],
    }
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    for task in ("qa1", "qa2"):
        rows = babilong_sets._read(str(folder), "1k", task, None, None, cache)
        assert [row["target"] for row in rows] == [task] and rows.split == task
    with pytest.raises(FileNotFoundError, match="no qa5; there are qa1, qa2, qa3"):
        babilong_sets._read(str(folder), "1k", "qa5", None, None, cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for task in ("qa1", "qa2"):
        assert babilong_sets._read("set", "1k", task, None, None, cache)[0]["target"] == task


@pytest.mark.parametrize(
    ("length", "name"), [(0, "0k"), (1000, "1k"), (512_000, "512k"), (1_000_000, "1M"), (10_000_000, "10M")]
)
def test_names_of_lengths(length, name):
    assert part_name(length) == name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"eval_set": "nobody"},
            "test_eval_length=[]: expected lengths where eval_set is set, [0, 1000] for 0k and 1k",
        ),
        ({"test_eval_length": [1000]}, "test_eval_length=[1000]: expected lengths where eval_set is set"),
        (
            {"eval_set": "no/such/folder", "test_eval_length": [0]},
            "eval_set='no/such/folder': no such file or folder; expected one, or a name on the",
        ),
        ({"eval_set": "sets/qa1.jsonl", "test_eval_length": [0]}, "eval_set='sets/qa1.jsonl': no such file or folder"),
        (
            {"eval_set": __file__, "test_eval_length": [0]},
            "expected .jsonl, .json, .parquet, a folder, or a name on the Hugging Face hub",
        ),
        (
            {"eval_set": "a/b", "test_eval_length": [1500]},
            "test_eval_length=1500: expected thousands, or millions from 1000000 on",
        ),
    ],
)
def test_wrong_settings(config, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        make(**config).test_conditions()
    assert "\n" not in str(caught.value)


def test_one_file_has_one_length(tmp_path):
    path = written(tmp_path) + "/1k/qa1.jsonl"
    with pytest.raises(
        ValueError,
        match=r"test_eval_length=\[0, 1000\]: expected one length, as .*/qa1.jsonl is one; "
        r"a folder has a part for each",
    ):
        make(eval_set=path, test_eval_length=[0, 1000])


WRONG = {
    "column": (
        [{"input": "", "question": "", "answer": ""}],
        "{part}: no column 'target'; expected input, question, target, got input, question, answer",
    ),
    "value": ([ROWS[0], ROWS[0] | {"target": None}], "{part}, sample 2: target is None; expected text"),
    "too few": ([ROWS[0]], "{part}: 1 samples, and number 2 is asked for; lower test_size"),
    "broken": ("{", "{part}: cannot be read (DatasetGenerationError: JSON parse error: "),
    "empty": ("", "{part}: cannot be read ("),
    "length": (None, "{folder}: no 1k/qa1; expected 1k/qa1.jsonl, .json, .parquet or a folder of save_to_disk"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_set_ends_a_run_before_its_training(tmp_path, case):
    """One line with the file, what is wrong there and what was expected."""
    rows, message = WRONG[case]
    part = tmp_path / ("1k" if rows is not None else "2k") / "qa1.jsonl"
    part.parent.mkdir()
    part.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows or ()))
    data = BABILongData(**SMALL, eval_set=str(tmp_path), test_eval_length=[1000], test_size=2)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        data.prepare_data()
    assert str(caught.value).startswith(message.format(part=part, folder=tmp_path)) and "\n" not in str(caught.value)


def test_a_question_that_needs_more_than_the_margin(tmp_path):
    task = make(
        eval_set=written(tmp_path, [ROWS[0] | {"question": "Where " * 20}]), test_eval_length=[1000], eval_length=1000
    )
    with pytest.raises(
        ValueError, match="margin=12: expected at least 23, the tokens of a question, GEN, its answer and EOS"
    ):
        task.batch(0, "test", 0, 1)


def test_a_set_out_of_reach(monkeypatch):
    """Offline, with the library itself."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError,
        match=r"^nobody/nothing 1k qa1: not in reach on the Hugging Face hub \(.*\); check name and network",
    ):
        make(eval_set="nobody/nothing", test_eval_length=[1000], eval_length=1000).rows(0, 1)


def test_a_read_context_is_as_long_as_its_text():
    """No token is read twice or left out, wherever a context ends."""
    task = make()
    for tokens_ in range(0, 200, 7):
        sample = task.from_row({"input": "one " * tokens_, "question": "Where?", "target": "garden"})
        parts = [sample.segment(k, 64, 12) for k in range(sample.segments)]
        assert sample.context_len == tokens_ == sum(map(len, parts)) and all(len(part) == 64 for part in parts[1:-1])
        assert (
            len(parts[-1]) == min(tokens_, 52)
            and (len(parts) == 1 or len(parts[0]))
            and np.concatenate(parts).size == tokens_
        )
