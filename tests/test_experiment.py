"""Plans: merging, keys, scales, stages, what broken files are told, and that every experiment of the project builds and
trains."""

import contextlib
import copy
import dataclasses
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
import yaml

from lit_memory.lit.callbacks.curriculum import Curriculum
from lit_memory.plan.deviations import differences
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import ADDED, load, parse
from lit_memory.plan.runspec import RunSpec
from lit_memory.plan.sections import TrainConfig
from lit_memory.registry import MODELS, load_class, model_size
from lit_memory.report.marks import has_marks
from lit_memory.run import checkpoint, engine
from lit_memory.run.build import build
from lit_memory.run.saving import Keeper

EXPERIMENTS = [
    path for path in sorted((Path(__file__).parents[1] / "experiments").glob("*.yaml")) if not has_marks(path)
]


def change(tree, edits):
    """``tree`` with values at "a/b/c" set, or deleted where the value is ``...``."""
    tree = copy.deepcopy(tree)
    for path, value in edits.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return tree


def plan(tree, edits=None, overrides=(), scale=None):
    return parse(change(tree, edits or {}), "tiny.yaml").at(scale).plan(overrides)


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


# Keys


def test_the_key_is_stable_and_canonical(tree, make_spec):
    spec = make_spec()
    assert spec.key == "6f4240874ab5f94b988c8bf9017cce69a545e630cced26a2b1f6bb3c63c9594e"
    same = {
        "base/train/lr": 3e-4,
        "base/model/vocab_size": 19,
        "base/task/vary": 0,
        "base/model/dropout": 0,
        "base/train/steps": 6,
    }
    shuffled = dataclasses.replace(
        spec, model=dict(reversed(spec.model.items())), train=dict(reversed(spec.train.items()))
    )
    assert {plan(tree, same)[0].key, shuffled.key, make_spec("train.steps=6", "task.pairs=2").key} == {spec.key}


def test_the_key_changes_with_every_setting(make_spec):
    spec = make_spec()
    fields = {
        "model": load_class("model", "armt").Config,
        "task": load_class("task", "associative_retrieval").Config,
        "train": TrainConfig,
    }
    keys = {spec.key, dataclasses.replace(spec, seed=1).key}
    for section, cls in fields.items():
        settings = getattr(spec, section)
        assert set(settings) == {f.name for f in dataclasses.fields(cls)} | ({"name"} if section != "train" else set())
        keys |= {dataclasses.replace(spec, **{section: settings | {name: "changed"}}).key for name in settings}
    assert len(keys) == 2 + len(spec.model) + len(spec.task) + len(spec.train)


def test_a_field_that_came_later_leaves_old_keys_alone(make_spec):
    pairs = [
        ("armt", "babilong"),
        ("xl", "language_modeling"),
        ("larimar", "passkey"),
        ("memreasoner", "memreasoner"),
        ("rmt", "variable_tracking"),
    ]
    specs = [make_spec(f"model={{name: {model}}}", f"task={{name: {task}}}") for model, task in pairs]
    for setting, before in ADDED.items():
        section, _, name = setting.partition(".")
        spec = next(spec for spec in specs if name in getattr(spec, section))
        values = getattr(spec, section)
        assert values[name] == before
        without = dataclasses.replace(spec, **{section: {k: v for k, v in values.items() if k != name}})
        assert spec.key == without.key != dataclasses.replace(spec, **{section: values | {name: "changed"}}).key


def test_keys_are_what_they_were(make_spec):
    """Another field or default would train everything anew, without a word; see ``ADDED`` and ``KEY_VERSION``."""
    assert (make_spec().key[:12], make_spec("task={name: babilong}").key[:12]) == ("6f4240874ab5", "5b10acd6b92b")


def test_the_x_axis_is_what_the_test_varies(tree):
    task = {"name": "babilong", "eval_set": "a/b", "test_eval_length": [0, 1000], "test_segments": [2]}
    experiment = parse(
        tree | {"base": tree["base"] | {"task": task}, "report": {"x": "test_segments"}, "expect": []}, "tiny.yaml"
    )
    with pytest.raises(
        ConfigError,
        match=r"report\.x: 'test_segments' is not what the test of babilong varies; expected test_eval_length",
    ):
        experiment.check_report(experiment.plan())


def test_only_tasks_that_allow_it_are_cut_anew(make_spec, monkeypatch):
    monkeypatch.setattr(load_class("task", "associative_retrieval"), "any_segments", False)
    with pytest.raises(
        ConfigError, match=r"train.test_cuts: \[3\]: the contexts of this task cannot be cut anew; expected none"
    ):
        make_spec("train.test_cuts=[3]")


def test_claims_may_be_about_time(tree):
    for claim, message in (("a.seconds[2] < 9", ""), ("a.second[2] < 9", "did you mean 'seconds'")):
        experiment = parse(tree | {"expect": [claim]}, "tiny.yaml")
        with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
            experiment.check_report(experiment.plan())


def test_claims_may_be_about_the_memory(tree):
    """What a model tells of its memory in every test is a metric of its experiments, and of no others; some of it
    validations alone have."""
    task, claim = (
        {"name": "passkey", "layout": "lines", "test_tokens": [100, 200]},
        "a.hop1_support[last] >= a.lines[first] / 99",
    )
    edits = {
        "base/task": task,
        "base/model": {"width": 16, "heads": 2, "layers": 1},
        "report": {"x": "test_tokens", "y": "lines"},
        "expect": [claim],
    }
    for name, right in (("larimar", True), ("memreasoner", True), ("transformer", False)):
        experiment = parse(
            change(tree, {**edits, "base/model/name": name, "scales": {"cpu": {}}, "arms": {"a": {}}}), "tiny.yaml"
        )
        with (
            contextlib.nullcontext()
            if right
            else pytest.raises(ConfigError, match=r"report\.y: unknown metric 'lines'")
        ):
            experiment.check_report(experiment.plan())
    assert load_class("model", "rmt").diagnosed and not load_class("model", "rmt").tested


def test_the_key_ignores_names_and_reports(tree):
    names = {
        "experiment": "other",
        "paper/title": "Other",
        "report/notes": "Other",
        "report/chance": 0.5,
        "expect": [],
        "arms": {"c": {}},
    }
    spec, other = plan(tree)[0], plan(tree, names | {"scales": {"big": {}}})[0]
    assert (other.experiment, other.arm, other.scale) == ("other", "c", "big") and other.key == spec.key
    assert dataclasses.replace(spec, point="x").key == spec.key


def test_a_spec_is_plain_and_names_its_folder(make_spec):
    spec = make_spec("train.stages=[{task.pairs: 1, until: {exact_match: 0.5}}]")
    assert pickle.loads(pickle.dumps(spec)) == spec and RunSpec(**json.loads(json.dumps(spec.config()))) == spec
    assert spec.folder(Path("r")) == Path(f"r/checkpoints/{spec.key[:16]}")
    assert dataclasses.replace(spec, point="lr1").name == f"a-lr1-s0-{spec.key[:8]}"


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


def test_stages(make_spec):
    whole = {"steps": 6, "batch_size": 4, "until": {}, "task": {}}
    assert make_spec().stages == [whole]
    stages = make_spec(
        "train.stages=[{task.pairs: 1, until: {exact_match: 0.9}}, {steps: 3, batch_size: 2, task.pairs: 4, task.vary: 0.5}, {}]"
    ).stages
    own = {"steps": 3, "batch_size": 2, "task": {"pairs": 4, "vary": 0.5}}
    assert stages == [whole | {"until": {"exact_match": 0.9}, "task": {"pairs": 1}}, whole | own, whole]


def test_a_scale_has_its_own_seeds_and_claims(tree):
    own = {"seeds": [4, 5], "expect": ["a[2] > 0.9"], "model.layers": 2}
    whole = parse(change(tree, {"scales": {"cpu": {}, "paper": own}}), "tiny.yaml")
    assert whole.scale_names() == ["cpu", "paper"]
    cpu, paper = whole.at(), whole.at("paper")
    assert ([s.seed for s in cpu.plan()], [s.seed for s in paper.plan()]) == ([0, 0], [4, 5, 4, 5])
    assert (cpu.expect, paper.expect) == (tree["expect"], ["a[2] > 0.9"]) and {s.scale for s in paper.plan()} == {
        "paper"
    }
    assert {s.model["layers"] for s in paper.plan()} == {2} and whole.seeds == [0] and "seeds" in whole.scales["paper"]
    default = parse(tree, "tiny.yaml")
    assert default.scale_names() == ["default"] and default.at().plan()[0].scale == "default"


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
    assert "`model.name`: armt → rmt (a)" in lines and "`model.memory_dim`: 4 → None (a)" in lines
    assert differences(paper, paper) == [] and not any("seed" in line for line in lines)


# Broken files and command lines: one line that names file, key and the nearest valid name

NAMES = ", ".join(MODELS)
BROKEN = {
    # unknown names, at each level
    "top level": ({"bse": {}}, "FILE: bse: unknown key; did you mean 'base'?"),
    "section": ({"base/modell": {}}, "FILE: base.modell: unknown section; did you mean 'model'?"),
    "paper": ({"paper/titel": "x"}, "FILE: paper.titel: unknown key; did you mean 'title'?"),
    "report": ({"report/logx": True}, "FILE: report.logx: unknown key; did you mean 'log_x'?"),
    "model": ({"base/model/widht": 8}, "FILE (arm a): model.widht: unknown key; did you mean 'width'?"),
    "task": ({"base/task/pair": 8}, "FILE (arm a): task.pair: unknown key; did you mean 'pairs'?"),
    "train": ({"base/train/step": 8}, "FILE (arm a): train.step: unknown key; did you mean 'steps'?"),
    "field of an arm": ({"arms/b/model.gama": "off"}, "FILE (arm b): model.gama: unknown key; did you mean 'gamma'?"),
    "section of an arm": (
        {"arms/b/mdel.gamma": "off"},
        "FILE (arm b): mdel.gamma: expected model.<field>, … did you mean 'model'?",
    ),
    "field of a replaced section": (
        {"scales/cpu/model.width": 8, "arms/b/model": {"name": "rmt", "width": "x"}},
        "FILE (arm b): model.width: Value 'x'",
    ),
    "field of a scale": (
        {"scales/cpu/model.wdth": 8},
        "FILE (scale cpu): model.wdth: unknown key; did you mean 'width'?",
    ),
    "field of a scale's arm": (
        {"scales/cpu/arms.b.model.wdth": 8},
        "FILE (scale cpu, arm b): model.wdth: unknown key; did you mean 'width'?",
    ),
    "arm of a scale": (
        {"scales/cpu/arms.bb.model.width": 8},
        "FILE: scales.cpu.arms.bb.model.width: unknown arm 'bb'; did you mean 'b'?",
    ),
    "arm of a scale, nested": (
        {"scales/cpu/arms.b": {"model.width": 8}},
        "FILE: scales.cpu.arms.b: expected arms.b.<section>.<field>",
    ),
    "field of the grid": ({"grid/train.lrr": [1]}, "FILE (grid): train.lrr: unknown key; did you mean 'lr'?"),
    "field of no model": ({"base/model/gama?": "off"}, "FILE (arm a): model.gama: unknown key; did you mean 'gamma'?"),
    "model name": ({"base/model/name": "amrt"}, "FILE (arm a): model.name: unknown model 'amrt'; did you mean 'armt'?"),
    "no model name": ({"base/model/name": ...}, f"FILE (arm a): model.name: expected one of {NAMES}"),
    "task name": (
        {"base/task/name": "associative"},
        "FILE (arm a): task.name: unknown task 'associative'; did you mean 'associative_retrieval'?",
    ),
    "arm in a claim": (
        {"expect": ["bb[2] > 0"]},
        "FILE: expect: expect[0] 'bb[2] > 0': no arm 'bb'; arms: a, b (did you mean 'b'?)",
    ),
    "arm in a scale's claim": (
        {"scales/cpu/expect": ["c[2] > 0"]},
        "FILE: expect: expect[0] 'c[2] > 0': no arm 'c'; arms: a, b",
    ),
    "x in a claim": (
        {"expect": ["a[3] > 0"]},
        "FILE: expect: expect[0] 'a[3] > 0': a[3]: 3 is not tested; tested: 2, 4 (nearest: 2)",
    ),
    "x of the report": (
        {"report/x": "test_pair"},
        "FILE: report.x: 'test_pair' is not what the test of associative_retrieval varies; expected test_pairs",
    ),
    "x of the second figure": (
        {"report/state_x": 3},
        "FILE: report.state_x: state_x=3: expected one of the tested values 2, 4, first or last",
    ),
    "x of the second figure, a word": (
        {"report/state_x": "lst"},
        "FILE: report.state_x: state_x='lst': expected a tested number",
    ),
    "x of the second figure, a list": ({"report/state_x": [2]}, "FILE: report.state_x: … (got [2])"),
    "values of the paper": (
        {"report/paper_values": "armt"},
        "FILE: report.paper_values: … expected one of armt_table1_babilong,",
    ),
    # missing or wrong values
    "missing section": ({"arms": ...}, "FILE: arms: missing"),
    "missing field": ({"paper/claim": ...}, "FILE: paper.claim: … missing mandatory value"),
    "text for a number": ({"base/model/width": "wide"}, "FILE (arm a): model.width: Value 'wide' … (got 'wide')"),
    "fraction for a count": ({"base/model/width": 16.5}, "FILE (arm a): model.width: Value '16.5' … (got 16.5)"),
    "off without quotes": (
        {"arms/b/model.gamma": False},
        "FILE (arm b): model.gamma: … expected one of ['clip', 'raw', 'off'] (got False)",
    ),
    "number without quotes": ({"paper/arxiv": 2407.0484}, "FILE: paper.arxiv: wrong type: write text in quotes"),
    "kind of report": ({"report/kind": "bar"}, "FILE: report.kind: … expected one of ['line']"),
    "section that is a list": ({"arms": ["a"]}, "FILE: arms: ['a']: expected a mapping"),
    "arm that is text": ({"arms/a": "x"}, "FILE: arms.a: 'x': expected a mapping"),
    "no arms": ({"arms": {}}, "FILE: arms: expected at least one arm"),
    "arm name": ({"arms/a-b": {}}, "FILE: arms.a-b: expected a name of at most 64 letters"),
    "key that is a number": ({"base/model": {1: 2}}, "FILE: base.model.1: 1 is not text; put the key in quotes"),
    "arm called off": ({"arms": {False: {}}}, "FILE: arms.False: False is not text; put the key in quotes"),
    "key that is a number, in a scale": ({"scales/cpu": {3: 4}}, "FILE: scales.cpu.3: 3 is not text"),
    "experiment name": ({"experiment": "a/b"}, "FILE: experiment: 'a/b': expected letters, digits"),
    "experiment name ..": ({"experiment": ".."}, "FILE: experiment: '..': expected letters, digits"),
    "grid that is no list": ({"grid/train.lr": 1}, "FILE: grid.train.lr: 1: expected a list of different values"),
    "claim that is no list": ({"expect": "a[2] > 0"}, "FILE: expect: 'a[2] > 0': expected a list of claims"),
    "syntax of a claim": ({"expect": ["a[2] >"]}, "FILE: expect: expect[0] 'a[2] >': syntax"),
    **{
        f"seeds {s}": ({"seeds": s}, f"FILE: seeds: {s}: expected a list of different whole numbers")
        for s in ([], 3, [0, 0], [-1], [0.5], ["0"], [True])
    },
    "seeds of a scale": ({"scales/cpu/seeds": []}, "FILE: scales.cpu.seeds: []: expected a list"),
    # settings that do not fit each other
    "keys of remember": (
        {"base/task/mode": "remember", "base/task/pairs": 17},
        "FILE (arm a): task.pairs: pairs=17: only 16^key_size = 16",
    ),
    "keys of the test": (
        {"base/task/mode": "remember", "base/task/test_pairs": [2, 17]},
        "FILE (arm a): task.test_pairs: test_pairs=17: only",
    ),
    "heads": ({"base/model/heads": 3}, "FILE (arm a): model.width: width=16: expected a multiple of heads=3"),
    "vocabulary": ({"base/model/vocab_size": 18}, "FILE (arm a): model.vocab_size: 18: the task has 19 token ids"),
    "positions": (
        {"base/model/family": "gpt2", "base/model/positions": 4},
        "FILE (arm a): model.positions: positions=4: a segment of 4 tokens takes 5 rows",
    ),
    "learning rate": ({"base/train/lr": -1}, "FILE (arm a): train.lr: lr=-1.0: expected"),
    "learning rate nan": ({"base/train/lr": math.nan}, "FILE: base.train.lr: nan: expected a finite number"),
    "two clippings": (
        {"base/train/clip_norm": 1, "base/train/clip_value": 1},
        "FILE (arm a): train.clip_value: … choose one",
    ),
    "bptt": ({"base/train/bptt": 0}, "FILE (arm a): train.bptt: bptt=0: expected at least 1"),
    "sizes of the test": (
        {"base/train/test_size": [8]},
        "FILE (arm a): train.test_size: test_size=[8]: expected one number, or 2 of them, one for each of",
    ),
    "segments of the test": (
        {"base/train/test_cuts": [0, 1]},
        "FILE (arm a): train.test_cuts: test_cuts=[0, 1]: expected numbers of tokens",
    ),
    "segments of the test and positions": (
        {"base/model/family": "gpt2", "base/model/positions": 9, "base/train/test_cuts": [4, 0]},
        "FILE (arm a): train.test_cuts: [4, 0]: positions=9: a segment of 16 tokens takes 17 rows",
    ),
    "loss of a model with one": (
        {"base/train/losses": {"order": 1}},
        "FILE (arm a): train.losses.order: unknown loss; ARMT has one loss; expected none",
    ),
    "loss that a model has not": (
        {"base/model": {"name": "larimar", "width": 16}, "base/train/losses": {"memroy": 1}},
        "FILE (arm a): train.losses.memroy: unknown loss; did you mean 'memory'?",
    ),
    "weight of a loss": (
        {"base/model": {"name": "larimar", "width": 16}, "base/train/losses": {"memory": -1}},
        "FILE (arm a): train.losses.memory: -1: expected a finite number, 0 or more",
    ),
    "part that a model has not": (
        {"base/train/frozen": ["encoder"]},
        "FILE (arm a): train.frozen: frozen='encoder': the model has no weights of that name; ",
    ),
    "all parts": (
        {"base/train/frozen": ["decoder", "memory"]},
        "FILE (arm a): train.frozen: ['decoder', 'memory']: nothing is left to train; expected fewer parts",
    ),
    "time for y": (
        {"report/y": "seconds"},
        "FILE: report.y: 'seconds' is measured anew by every run; expected time: seconds beside another metric",
    ),
    # stages
    "stages, no list": ({"base/train/stages": {"steps": 2}}, "FILE (arm a): train.stages: "),
    "stage, no mapping": ({"base/train/stages": [3]}, "FILE (arm a): train.stages: "),
    "key of a stage": (
        {"base/train/stages": [{"step": 3}]},
        "FILE (arm a): train.stages[0].step: unknown key; did you mean 'steps'?",
    ),
    "task of a stage": (
        {"base/train/stages": [{}, {"task.pair": 3}]},
        "FILE (arm a): train.stages[1]: task.pair: unknown key; did you mean 'pairs'?",
    ),
    "batch size of a stage": (
        {"base/train/stages": [{"batch_size": 2.5}]},
        "FILE (arm a): train.stages[0].batch_size: 2.5: expected a whole number",
    ),
    "steps of a stage": (
        {"base/train/stages": [{"steps": 0}]},
        "FILE (arm a): train.stages[0].steps: 0: expected a whole number",
    ),
    "until a number": (
        {"base/train/stages": [{"until": 0.9}]},
        "FILE (arm a): train.stages[0].until: 0.9: expected {metric: number}",
    ),
    "until a text": (
        {"base/train/stages": [{"until": {"exact_match": "x"}}]},
        "FILE (arm a): train.stages[0].until: … expected {metric: number}",
    ),
    "vocabulary of a stage": (
        {"base/train/stages": [{"task.legacy_ids": True}]},
        "FILE (arm a): model.vocab_size: 19: the task has 128 token ids",
    ),
}


def check_message(message, expected, path="tiny.yaml"):
    """One line that starts with ``expected`` up to the first "…" and has its other parts in this order."""
    text, first, *rest = str(message).replace(str(path), "FILE"), *expected.split("…")
    assert text.startswith(first.strip()) and "\n" not in text and "Error" not in text, text
    for part in rest:
        assert part.strip() in text
        text = text.partition(part.strip())[2]


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tree, tmp_path, name):
    edits, expected = BROKEN[name]
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(change(tree, edits), sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        experiment = load(path).at()
        experiment.check_report(experiment.plan())
    check_message(caught.value, expected, path)


OVERRIDES = {
    "nothing": "expected key=value",
    "=3": "expected key=value",
    "two\nlines": "expected key=value",
    "model.widht=8": "unknown key; did you mean 'width'?",
    "model.width=wide": "Value 'wide'",
    "model.width=": "field 'width' is not Optional",
    "model.width=[": "value '[' is not YAML",
    "model.width=!!python/name:os.system ": "… is not YAML",
    "mdel.width=8": "expected model.<field>, … did you mean 'model'?",
    "model=3": "expected model.<field>,",
    "seeds=[1]": "expected model.<field>,",
    "arms.a.model.width=3": "expected model.<field>,",
    "model.gama?=1": "unknown key; did you mean 'gamma'?",
    "model.name=zz": f"unknown model 'zz'; expected one of {NAMES}",
    "model.gamma=off": "… expected one of ['clip', 'raw', 'off'] (got False)",
    "train.lr=.nan": "nan: expected a finite number",
    "train.steps=1e3": "Value '1000.0'",
    "task.test_pairs=2": "expected a list, write task.test_pairs=[2] (got 2)",
    "train.stages=[{task.pair: 2}]": "task.pair: unknown key; did you mean 'pairs'?",
}


@pytest.mark.parametrize("text", OVERRIDES)
def test_broken_overrides(tree, text):
    with pytest.raises(ConfigError) as caught:
        plan(tree, overrides=[text])
    key = text.replace("\n", " ") if OVERRIDES[text] == "expected key=value" else text.partition("=")[0].rstrip("?")
    key += "[0]" if "stages" in key else ""
    check_message(caught.value, f"command line: {key}: {OVERRIDES[text]}")


TEXTS = {
    "": "FILE: experiment: missing",
    "- a\n- b\n": "FILE: expected a mapping with the keys experiment, paper,",
    "hello\n": "FILE: hello: unknown key",
    "seeds: [0]\nseeds: [1]\n": "FILE:2: not valid YAML: found duplicate key seeds",
    "base: {model: {layers: 1, layers: 2}}": "FILE:1: not valid YAML: found duplicate key layers",
    "base:\n\tmodel: 1\n": "FILE:2: not valid YAML: found character … cannot start any token",
    "seeds: [0\n": "FILE:2: not valid YAML:",
    "seeds: *x\n": "FILE:1: not valid YAML: found undefined alias",
    "a: 1\n---\nb: 2\n": "FILE:2: not valid YAML: but found another document",
    "experiment: ${nothing}": "FILE: experiment: '${nothing}': '${' asks for an interpolation",
    "grid: !!python/object/apply:os.mkdir [OWNED]\n": "FILE:1: not valid YAML: could not determine a constructor for the tag",
    bytes(range(256)): "FILE: not valid YAML: 'utf-8' codec can't decode",
    "paper: \u00e9".encode("latin1"): "FILE: not valid YAML: 'utf-8' codec can't decode",
    b'a: "\0"': "FILE: not valid YAML: unacceptable character",
}


@pytest.mark.parametrize("text", TEXTS)
def test_files_that_are_not_experiments(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load(path)
    check_message(caught.value, TEXTS[text], path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_extends_another(tree, tmp_path):
    """Sections, scales, paper and report key by key; arms, grid, seeds and claims as a whole, and what scales say of
    the old arms goes."""
    tree["scales"] = {"cpu": {"train.lr": 0.5, "model.width": 8, "arms.a.train.lr": 0.1}, "paper": {}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree))
    two = {
        "extends": "one",
        "experiment": "two",
        "base": {"task": {"pairs": 1}},
        "scales": {"cpu": {"train.lr": 0.25}},
        "arms": {"c": {}},
        "expect": [],
    }
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    (tmp_path / "three.yaml").write_text(
        yaml.safe_dump({"extends": "two", "experiment": "three", "seeds": [7], "paper": {"claim": "other"}})
    )
    whole = {**tree, "experiment": "three", "arms": {"c": {}}, "expect": [], "seeds": [7]}
    whole["base"]["task"]["pairs"] = 1
    whole["paper"]["claim"] = "other"
    whole["scales"] = {"cpu": {"train.lr": 0.25, "model.width": 8}, "paper": {}}
    assert load(tmp_path / "three.yaml") == parse(whole, str(tmp_path / "three.yaml"))


def test_several_arms_at_once(tree, tmp_path):
    """``arms.a,b.<key>`` is ``arms.a.<key>`` and ``arms.b.<key>``, in scales and grids, and a file that extends this
    one may change one of them."""
    each = {
        "arms.a.train.lr": 0.1,
        "arms.b.train.lr": 0.1,
        "grid": {"arms.a.train.steps": [1, 2], "arms.b.train.steps": [1, 2]},
    }
    both = {"arms.a, b.train.lr": 0.1, "grid": {"arms.a,b.train.steps": [1, 2]}}
    for name, values in {"each": each, "both": both}.items():
        (tmp_path / f"{name}.yaml").write_text(
            yaml.safe_dump({**tree, "scales": {"cpu": values}, "grid": values["grid"]})
        )
        more = {"extends": name, "experiment": "more", "scales": {"cpu": {"arms.b.train.lr": 0.2}}}
        (tmp_path / f"more_{name}.yaml").write_text(yaml.safe_dump(more))
    for more, rates in {"": [0.1, 0.1], "more_": [0.1, 0.2]}.items():
        ours, theirs = (load(tmp_path / f"{more}{name}.yaml") for name in ("both", "each"))
        assert dataclasses.replace(ours, file="") == dataclasses.replace(theirs, file="")
        assert [s.train["lr"] for s in ours.at("cpu").plan()[::2]] == rates


def test_files_and_scales_that_do_not_exist(tmp_path, tree):
    (tmp_path / "tiny.yaml").touch()
    for name, expected in {"tinny.yaml": "did you mean", "no/such.yaml": "no such file"}.items():
        with pytest.raises(ConfigError, match="no such file") as caught:
            load(tmp_path / name)
        assert expected in str(caught.value)
    with pytest.raises(ConfigError, match=r"^tiny\.yaml: --scale: unknown scale 'cpuu'; did you mean 'cpu'"):
        plan(tree, {"scales": {"cpu": {}, "paper": {}}}, scale="cpuu")


# The experiments of the project

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


LARGE = [path for path in EXPERIMENTS if load(path).scale_names() == ["paper"]]
"""Those that ask what the size of a published model does."""
SCALES = [(path, scale) for path in EXPERIMENTS for scale in load(path).scale_names()]


KEYS = json.loads((Path(__file__).parent / "fixtures/keys.json").read_text())
"""Experiment -> scale -> run -> the first 16 digits of its key, as they were when the runs behind the reports were
made."""


def keys(specs):
    """Runs and those that they start from, as ``KEYS`` has them."""
    found = {}
    for spec in specs:
        while spec is not None:
            found[f"{spec.experiment}/{spec.arm} {spec.point} {spec.seed}"] = spec.key[:16]
            spec = spec.start
    return found


@pytest.mark.parametrize(("path", "scale"), SCALES, ids=[f"{path.stem}-{scale}" for path, scale in SCALES])
def test_every_scale_plans_and_builds(path, scale):
    whole = load(path)
    experiment = whole.at(scale)
    specs = experiment.plan()
    assert keys(specs) == KEYS[path.stem][scale], "finished runs would be trained again; a new experiment adds its keys"
    experiment.check_report(specs)
    assert (
        experiment.experiment == path.stem
        and experiment.expect
        and (whole.scale_names()[0] == "cpu") != (path in LARGE)
    )
    points = sum(len(list(experiment.grid_points(arm))) for arm in experiment.arms)
    assert len({(spec.arm, spec.key) for spec in specs}) == len(specs) == points * len(experiment.seeds)
    differences(specs, whole.at("paper").plan())
    for model in {json.dumps(spec.model): spec.model for spec in specs}.values():
        size = model_size(model)
        assert size["parameters"] > 0 and size["state_floats"] >= 0


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


def planned(path: Path) -> list[RunSpec]:
    """The runs of an experiment, each made a matter of a second; of the fields that tests of lines vary, the report
    names the one."""
    experiment = load(path).at()
    return experiment.plan([*SMALL, *["task.test_tokens=[110, 120]"] * (experiment.report.x == "test_tokens")])


def alone(spec: RunSpec) -> RunSpec:
    """The same run without the one that it starts from, which has left no weights here."""
    return dataclasses.replace(spec, start=None, train=spec.train | {"init": ""}) if spec.start else spec


TRAINED = [path for path in reversed(EXPERIMENTS) if path not in LARGE]
DISTINCT = {
    spec.key: (f"{path.stem}-{spec.arm}", spec) for path in TRAINED for spec in map(alone, reversed(planned(path)))
}


@pytest.mark.parametrize("spec", [pytest.param(spec, id=name) for name, spec in DISTINCT.values() if spec.seed == 0])
def test_every_arm_trains_two_steps(spec, tmp_path):
    """With the engine's own modules, callbacks and trainer, without MLflow."""
    engine.quiet()
    module, data = build(spec)
    trainer = engine.make_trainer(
        spec, tmp_path, False, Curriculum(spec.stages, spec.train["valid_every"]), Keeper(tmp_path)
    )
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 2 and [path.name for path in checkpoint.saved(tmp_path)] == ["step-00000002.ckpt"]
    assert any(not torch.equal(p, before[name]) for name, p in module.named_parameters())
    trainer.test(module, datamodule=data, verbose=False)
    rows = engine.collect(trainer.callback_metrics, data)
    assert {x for name, x, _ in rows if name in data.task.metrics} == {x for x, _ in data.test_conditions}
    if spec.model["name"] == "larimar":
        assert {(name, x) for name in module.model.tested for x, _ in data.test_conditions} <= {
            (name, x) for name, x, _ in rows
        }
    assert all(math.isfinite(value) for _, _, value in rows)
