"""Plans: merging, scales, grids, runs that start from others, and that every experiment of the project builds and
trains."""

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
import yaml
from plans import change, plan

from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.plan.deviations import differences
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import load, parse
from lit_memory.plan.measured import check_report
from lit_memory.plan.runspec import RunSpec
from lit_memory.registry import load_class, model_size
from lit_memory.report.marks import has_marks
from lit_memory.run import checkpoint
from lit_memory.run.build import build, build_data
from lit_memory.run.results import collect
from lit_memory.run.saving import RunCheckpoint
from lit_memory.run.trainer import make_trainer, silence_lightning
from lit_memory.run.worklist import with_starts
from lit_memory.tasks import babilong, language_modeling, needle, planted_facts
from lit_memory.tasks.memreasoner import OTHER_PLACES
from lit_memory.text.corpus import Corpus, load_corpus
from lit_memory.text.shipped import SHIPPED

EXPERIMENTS = [
    path for path in sorted((Path(__file__).parents[1] / "experiments").glob("*.yaml")) if not has_marks(path)
]


# Merging

LAYERS = (
    "base/train/steps",
    "scales/cpu/train.steps",
    "arms/a/train.steps",
    "scales/cpu/arms.a.train.steps",
    "grid/train.steps",
    "command line",
)


@pytest.mark.parametrize("last", range(len(LAYERS)), ids=LAYERS)
def test_later_layers_win(tree, last):
    edits = {
        path: [100 + i] if "grid" in path else 100 + i
        for i, path in enumerate(LAYERS[: last + 1])
        if path != "command line"
    }
    overrides = ["train.steps=7", "train.steps=105"] if last == 5 else []
    specs = plan(tree, {"scales/cpu": {}, **edits}, overrides)
    assert specs[0].train["steps"] == 100 + last
    assert specs[1].arm == "b" and specs[1].train["steps"] == {0: 100, 1: 101, 2: 101, 3: 101}.get(last, 100 + last)


def test_a_whole_section_is_replaced(tree):
    rmt = {"name": "rmt", "width": 32}
    edits = {"scales/cpu": {"model.layers": 3, "arms.b.model.heads": 8}, "arms/b": {"model": rmt}}
    a, b = plan(tree, edits)
    assert (a.model["name"], a.model["layers"], a.model["width"]) == ("armt", 3, 16)
    defaults = dataclasses.asdict(load_class("model", "rmt").Config())
    assert b.model == {"name": "rmt", **defaults, "width": 32, "heads": 8, "vocab_size": 19}
    assert plan(tree, edits, ["model={name: tarm}"])[0].model == {
        "name": "tarm",
        **dataclasses.asdict(load_class("model", "tarm").Config(vocab_size=19)),
    }


def test_a_question_mark_applies_where_the_field_exists(tree):
    edits = {"arms/b": {"model": {"name": "rmt"}}, "arms/c": {"model.memory_dim": 6}}
    a, b, c = plan(tree, edits, ["model.memory_dim?=5"])
    assert (a.model["memory_dim"], c.model["memory_dim"]) == (5, 5) and "memory_dim" not in b.model
    a, _, c = plan(tree, edits | {"base/model/memory_dim": ..., "base/model/memory_dim?": 5, "base/model/heads?": 4})
    assert (a.model["memory_dim"], a.model["heads"], c.model["memory_dim"]) == (5, 4, 6)


def test_nested_and_dotted_layers_do_not_leak_into_each_other(tree):
    before = copy.deepcopy(tree)
    first = plan(tree, {}, ["task.test_pairs=[2, 8]"])
    first[0].task["test_pairs"].append(99)
    assert tree == before and first[1].task["test_pairs"] == [2, 8]


# Plans


def test_a_grid_is_a_cross_product(tree):
    edits = {
        "grid": {"train.lr": [0.1, 0.2], "model.layers": [1, 2, 3]},
        "seeds": [3, 5],
        "scales": {"cpu": {}, "gpu": {"grid": {"train.lr": [0.3]}}},
    }
    specs = plan(tree, edits)
    points = [(lr, layers) for lr in (0.1, 0.2) for layers in (1, 2, 3)]
    expected = [
        (arm, f"lr{lr}-layers{layers}", lr, layers, seed) for arm in "ab" for lr, layers in points for seed in (3, 5)
    ]
    assert [(s.arm, s.point, s.train["lr"], s.model["layers"], s.seed) for s in specs] == expected
    assert len({s.key for s in specs}) == len({s.name for s in specs}) == len(specs)
    assert [(s.point, s.train["lr"], s.model["layers"]) for s in plan(tree, edits, scale="gpu")[::2]] == [
        ("lr0.3", 0.3, 1)
    ] * 2


def test_an_arm_may_have_a_grid_of_its_own(tree):
    """As the paper's settings for one arm, and the best of several for another."""
    specs = plan(tree, {"grid": {"model.layers": [1, 2], "arms.b.train.lr": [0.1, 0.2], "arms.b.model.layers": [3]}})
    assert [(s.arm, s.point) for s in specs] == [
        ("a", "layers1"),
        ("a", "layers2"),
        ("b", "layers3-lr0.1"),
        ("b", "layers3-lr0.2"),
    ]
    assert [(s.model["layers"], s.train["lr"]) for s in specs] == [(1, 3e-4), (2, 3e-4), (3, 0.1), (3, 0.2)]


def test_a_scale_has_its_own_seeds_and_claims(tree):
    own = {"seeds": [4, 5], "expect": ["a[2] > 0.9"], "requires": ["a[2] > 0.5"], "verify": [], "model.layers": 2}
    tree = tree | {"requires": ["b[2] > 0.1"], "verify": ["a[2] >= 0"]}
    whole = parse(change(tree, {"scales": {"cpu": {}, "paper": own}}), "tiny.yaml")
    assert whole.scales.keys() == {"cpu", "paper"}
    cpu, paper = whole.at(), whole.at("paper")
    assert ([s.seed for s in cpu.plan()], [s.seed for s in paper.plan()]) == ([0, 0], [4, 5, 4, 5])
    assert (cpu.expect, paper.expect) == (tree["expect"], ["a[2] > 0.9"]) and {s.scale for s in paper.plan()} == {
        "paper"
    }
    assert (cpu.requires, paper.requires) == (["b[2] > 0.1"], ["a[2] > 0.5"]) and (cpu.verify, paper.verify) == (
        ["a[2] >= 0"],
        [],
    )
    assert {s.model["layers"] for s in paper.plan()} == {2} and whole.seeds == [0] and "seeds" in whole.scales["paper"]
    default = parse(tree, "tiny.yaml")
    assert default.default_scale == "default" and default.at().plan()[0].scale == "default"


def test_lines_are_in_no_key(tree):
    """What is required and verified changes no run, and a file without them has none."""
    with_lines = parse(tree | {"requires": ["a[2] > 0.5"], "verify": ["b[2] >= 0"]}, "tiny.yaml").at()
    without = parse(change(tree, {"requires": ...}), "tiny.yaml").at()
    assert keys(with_lines.plan()) == keys(without.plan()) and (without.requires, without.verify) == ([], [])


def test_words_are_in_no_key_and_at_every_scale(tree):
    words = {"title": "What a recalls", "labels": {"b": "without gamma"}}
    with_words = parse(change(tree, words | {"scales": {"cpu": {}, "gpu": {}}}), "tiny.yaml").at("gpu")
    without = parse(tree, "tiny.yaml").at()
    assert keys(with_words.plan()) == keys(without.plan()) and (without.title, without.labels) == ("", {})
    assert {"title": with_words.title, "labels": with_words.labels} == words


def test_a_scale_changes_the_report(tree):
    """Key by key, and strictly."""
    experiment = parse(
        tree
        | {
            "scales": {"cpu": {"report": {"chance": 0.5}, "train.steps": 3}, "gpu": {}, "bad": {"report": {"chnce": 1}}}
        },
        "tiny.yaml",
    )
    assert [(at.report.x, at.report.chance) for at in map(experiment.at, ("cpu", "gpu"))] == [
        ("test_pairs", 0.5),
        ("test_pairs", None),
    ]
    assert experiment.at("cpu").plan()[0].train["steps"] == 3
    with pytest.raises(
        ConfigError, match=r"^tiny\.yaml \(scale bad\): report\.chnce: unknown key; did you mean 'chance'"
    ):
        experiment.at("bad")


def test_differences_to_the_paper(tree):
    scales = {
        "cpu": {"model.layers": 2, "arms.b.train.steps": 3, "arms.a.model": {"name": "rmt", "layers": 2}},
        "paper": {},
    }
    whole = parse(change(tree, {"scales": scales}), "tiny.yaml")
    ours, paper = whole.at("cpu").plan(), whole.at("paper").plan()
    lines = differences(ours, paper)
    assert "`model.layers`: 1 → 2" in lines and "`train.steps`: 6 → 3 (b)" in lines
    assert "`model.name`: armt → rmt (a)" in lines and "`model.memory_dim`: 4 → none (a)" in lines
    assert differences(paper, paper) == [] and not any("seed" in line for line in lines)


def test_differences_of_stages_and_of_arms_that_the_paper_does_not_have(tree):
    stages = {level: [{"task.pairs": 2, "until": {"exact_match": level}}, {}] for level in (0.9, 0.99)}
    scales = {"cpu": {"train.stages": stages[0.9]}, "gpu": {"train.stages": []}}
    whole = parse(change(tree, {"scales": scales | {"paper": {"arms": ["a"], "train.stages": stages[0.99]}}}), "t.yaml")
    paper = whole.at("paper").plan()
    theirs = "`train.stages`: pairs 2, until exact_match 0.99; unchanged"
    assert differences(whole.at("cpu").plan(), paper) == [f"{theirs} → pairs 2, until exact_match 0.9; unchanged"]
    assert differences(whole.at("gpu").plan(), paper) == [f"{theirs} → none"]


# Runs that start from others


def test_a_run_starts_from_another(tree):
    """Its key has that of the other, whatever that is called; a run that trains nothing passes on what it started
    from."""
    starts = {
        "again": {"train.init": {"run": "a"}, "train.steps": 0},
        "third": {"train.init": {"run": "again"}, "model.gamma": "off"},
    }
    found = {spec.arm: spec for spec in plan(tree, {"arms": tree["arms"] | starts})}
    assert found["again"].start == found["again"].trained == found["a"] and not found["again"].stages
    assert found["third"].start == found["a"] and found["third"].trained is found["third"]
    assert len({spec.key for spec in found.values()}) == 4
    renamed = plan(tree, {"arms": {"x": {}, "y": {"train.init": {"run": "tiny/x"}, "train.steps": 0}}})[1]
    assert renamed.key == found["again"].key
    other = plan(
        tree,
        {
            "arms": {
                "x": {"train.lr": 0.1},
                "y": {"train.init": {"run": "tiny/x"}, "train.steps": 0, "train.lr": found["a"].train["lr"]},
            }
        },
    )[1]
    assert {**other.config(), "start": 0, "arm": 0} == {
        **renamed.config(),
        "start": 0,
        "arm": 0,
    } and other.key != renamed.key


def test_a_run_starts_from_another_experiment(tree, tmp_path):
    """At the same scale, from the same seed, without what the command line changes here."""
    whole = tree | {"scales": {"cpu": {}, "gpu": {"train.steps": 9}}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(whole))
    own = {
        "experiment": "later",
        "arms": {"y": {"train.init": {"run": "tiny/b"}, "train.steps": 0}},
        "expect": [],
        "seeds": [0, 5],
    }
    (tmp_path / "later.yaml").write_text(yaml.safe_dump(whole | own))
    for scale, steps in (("cpu", 6), ("gpu", 9)):
        specs = load(tmp_path / "later.yaml").at(scale).plan(["train.batch_size=2"])
        starts = [spec.start for spec in specs]
        assert [(s.experiment, s.arm, s.scale, s.seed, s.train["steps"], s.train["batch_size"]) for s in starts] == [
            ("tiny", "b", scale, seed, steps, 4) for seed in (0, 5)
        ]
        assert starts[0] == load(tmp_path / "tiny.yaml").at(scale).plan()[1]


# The experiments of the project


WHOLE = {path: load(path) for path in EXPERIMENTS}
LARGE = [path for path, whole in WHOLE.items() if "cpu" not in whole.scales]
"""Those that ask what the size of a published model does."""
SCALES = [(path, scale) for path, whole in WHOLE.items() for scale in whole.scales]


KEYS = json.loads((Path(__file__).parent / "fixtures/keys.json").read_text())
"""Experiment -> scale -> run -> the first 16 digits of its key. They change with ``KEY_VERSION`` and a model's
``numbers`` alone: finished runs of users must stay finished."""


def keys(specs):
    """Runs and those that they start from, as ``KEYS`` has them."""
    return {f"{on.experiment}/{on.arm} {on.point} {on.seed}": on.key[:16] for spec in specs for on in with_starts(spec)}


def test_keys_behind_a_report_are_frozen():
    """Who commits a report adds the keys of its experiment to ``KEYS``."""
    reports = Path(__file__).parents[1] / "reports"
    assert {path.stem for path in EXPERIMENTS if (reports / path.stem / "verdict.json").is_file()} <= KEYS.keys()


@cache
def plan_of(path: Path, scale: str) -> list[RunSpec]:
    """All runs of an experiment at a scale, planned once; that of the paper is compared with every other."""
    return WHOLE[path].at(scale).plan()


@pytest.mark.parametrize(
    "path", [path for path in EXPERIMENTS if "eval_places: other" in path.read_text()], ids=lambda path: path.stem
)
def test_who_is_asked_for_other_places_has_read_of_them(path):
    """Models that start from nothing have met the words of the other places, all six and no others, on their way."""
    asked = [s for s in plan_of(path, WHOLE[path].default_scale) if s.task.get("eval_places") == "other"]
    read = [{phrase for on in with_starts(spec) for phrase in on.task.get("mentioned", [])} for spec in asked]
    assert asked and all(phrases == {f"the {place}" for place in OTHER_PLACES.values()} for phrases in read)


@cache
def size_of(model: str) -> dict[str, int]:
    """``model_size`` of a section as JSON; experiments share many."""
    return model_size(json.loads(model))


@pytest.mark.parametrize(("path", "scale"), SCALES, ids=[f"{path.stem}-{scale}" for path, scale in SCALES])
def test_every_scale_plans_and_builds(path, scale):
    whole = WHOLE[path]
    experiment, specs = whole.at(scale), plan_of(path, scale)
    frozen = KEYS.get(path.stem, {}).get(scale) or keys(specs)  # a new experiment has finished no runs
    assert keys(specs) == frozen, "finished runs would be trained again"
    check_report(experiment, specs)
    assert (
        experiment.experiment == path.stem
        and (experiment.expect or experiment.verify)
        and (whole.default_scale == "cpu") != (path in LARGE)
    )
    assert {spec.train["accelerator"] for spec in specs} == {"cpu" if scale in ("cpu", "real") else "cuda"}
    points = sum(len(list(experiment.grid_points(arm))) for arm in experiment.arms)
    assert len({(spec.arm, spec.key) for spec in specs}) == len(specs) == points * len(experiment.seeds)
    widths = [spec.model["width"] for spec in specs]
    assert max(widths) <= 2 * min(widths), "an arm has the size of another scale"
    differences(specs, plan_of(path, "paper"))
    for model in {json.dumps(spec.model) for spec in specs}:
        size = size_of(model)
        assert size["parameters"] > 0 and size["state_floats"] >= 0


BUILT: set[str] = set()
"""Tasks that have been built; experiments share many."""


def beginnings(*args: Any) -> Corpus:
    """A corpus with the first 100,000 characters of each of its first hundred texts."""
    whole = load_corpus(*args)
    return Corpus(
        whole.key + "-beginnings", lambda: (text[:100_000] for text in islice(whole.texts(), 100)), whole.name
    )


LARGER = [(path, scale) for path, scale in SCALES if scale in ("real", "gpu")]


@pytest.mark.parametrize(("path", "scale"), LARGER, ids=[f"{path.stem}-{scale}" for path, scale in LARGER])
def test_every_task_of_the_larger_scales_has_samples(path, scale, monkeypatch):
    """Of every stage, but where the text is on a hub: how many tokens a question has follows from the text, which
    planning does not read. The beginnings of the books do: tokenizers of less text have no fewer tokens."""
    for module in (babilong, language_modeling, needle, planted_facts):
        monkeypatch.setattr(module, "load_corpus", beginnings)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for spec in plan_of(path, scale):
        for stage in ({}, *(stage["task"] for stage in spec.stages)):
            if (key := json.dumps([spec.task, stage], sort_keys=True)) not in BUILT:
                BUILT.add(key)
                data = build_data(spec)
                try:
                    data.prepare_data()
                    data.setup("fit")
                    assert len(data.task.at(**stage).batch(0, "train", 0, 1).ids_BT) == 1
                except FileNotFoundError as error:
                    assert "Hugging Face hub" in str(error)


REAL = [path for path, scale in SCALES if scale == "real"]


@pytest.mark.parametrize("path", REAL, ids=[path.stem for path in REAL])
def test_a_scale_called_real_reads_the_shipped_text_alone(path):
    """In every stage, and so do the runs that its runs start from: no rules make stories that might be the test's, and
    tokenizers learn from training texts."""
    for spec in plan_of(path, "real"):
        while spec is not None:
            for task in (spec.task, *(spec.task | stage["task"] for stage in spec.stages)):
                sources = {task[name] for name in ("haystack", "source", "stories") if name in task}
                assert sources and sources <= SHIPPED.keys() and not task["vocabulary"] and task["tokenizer"] == "bpe"
            assert spec.scale == "real" and spec.train["accelerator"] == "cpu"
            spec = spec.start


SMALL = [
    "train.steps=2",
    "train.valid_every=2",
    "train.valid_size=4",
    "train.test_size=4",
    "train.batch_size=4",
    "train.eval_batch_size=4",
]
SMALL += [
    "train.stages=[]",
    "task.pairs?=2",
    "task.test_pairs?=[2, 3]",
    "task.segments?=2",
    "task.test_segments?=[2, 3]",
    "task.books?=2",
    "task.length?=40",
    "task.test_length?=[40, 48]",
    "task.horizon?=4",
    "task.test_horizon?=[3, 4]",
    "task.tokens?=110",
    "task.segment_lines?=16",
]
AXES = {
    "test_tokens": ["task.test_tokens=[110, 120]"],
    "test_window": ["task.window=110", "task.test_window=[110, 120]", "task.test_segments=[]"],
}


def planned(path: Path) -> list[RunSpec]:
    """The runs of an experiment, each made a matter of a second; of the fields that tests of lines vary, the report
    names the one."""
    experiment = WHOLE[path].at()
    return experiment.plan([*SMALL, *AXES.get(experiment.report.x, [])])


def alone(spec: RunSpec) -> RunSpec:
    """The same run without the one that it starts from, which has left no weights here."""
    return dataclasses.replace(spec, start=None, train=spec.train | {"init": ""}) if spec.start else spec


TRAINED = [path for path in reversed(EXPERIMENTS) if path not in LARGE]
RATES = {"lr", "weight_decay"}


def but_for_rates(spec: RunSpec) -> str:
    """What two runs have in common whose rates differ alone; two steps of one of them are enough."""
    train = {name: value for name, value in spec.train.items() if name not in RATES}
    return json.dumps([spec.model, spec.task, train, spec.seed], sort_keys=True)


DISTINCT = {
    but_for_rates(spec): (f"{path.stem}-{spec.arm}", spec)
    for path in TRAINED
    for spec in map(alone, reversed(planned(path)))
}


def training() -> Iterator[Any]:
    """The runs to train, as parameters. Those are slow tests whose model and whose task have been in runs before them;
    test_lit trains pairs of a tiny model and a task as well."""
    seen = set()
    for name, spec in DISTINCT.values():
        pair = {("model", spec.model["name"]), ("task", spec.task["name"])}
        if spec.seed == 0:
            yield pytest.param(spec, id=name, marks=[pytest.mark.slow] if pair <= seen else [])
            seen |= pair


@pytest.mark.parametrize("spec", list(training()))
def test_every_arm_trains_two_steps(spec, tmp_path):
    """With the engine's own modules, callbacks and trainer, without MLflow."""
    silence_lightning()
    module, data = build(spec)
    trainer = make_trainer(
        spec, tmp_path, False, Curriculum(spec.stages, spec.train["valid_every"]), RunCheckpoint(tmp_path)
    )
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 2 and [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000002.ckpt"]
    assert any(not torch.equal(p, before[name]) for name, p in module.named_parameters())
    trainer.test(module, datamodule=data, verbose=False)
    rows = collect(trainer.callback_metrics, data)
    assert {x for name, x, _ in rows if name in data.task.metrics} == {x for x, _ in data.test_conditions}
    if spec.model["name"] == "larimar":
        assert {(name, x) for name in module.model.tested for x, _ in data.test_conditions} <= {
            (name, x) for name, x, _ in rows
        }
    assert all(math.isfinite(value) for _, _, value in rows)
