"""One run as plain data: its key, its names and its stages."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from plans import plan

from lit_memory.plan.runspec import RunSpec
from lit_memory.plan.sections import TrainConfig
from lit_memory.registry import MODELS, TASKS, load_class
from lit_memory.util.fields import added_fields


@pytest.fixture
def spec(make_spec):
    return make_spec()


def test_the_key_is_stable_and_canonical(tree, make_spec):
    spec = make_spec()
    assert spec.key == "5be978bb388a3ddb609877484ea8737095d7d8bd2fcc9fa5d632475bfdd25608"
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
        other = "rmt" if section == "model" else "dna"
        changed = {
            name: settings | {name: {"changed": True} if value == {} else other} for name, value in settings.items()
        }
        keys |= {dataclasses.replace(spec, **{section: values}).key for values in changed.values()}
    assert len(keys) == 2 + len(spec.model) + len(spec.task) + len(spec.train)


CONFIGURATIONS = {
    "model": {name: load_class("model", name).Config for name in MODELS},
    "task": {name: load_class("task", name).Config for name in TASKS},
    "train": {"": TrainConfig},
}
ADDED = [
    (section, name, field, before)
    for section, classes in CONFIGURATIONS.items()
    for name, cls in classes.items()
    for field, before in added_fields(cls).items()
]


@pytest.mark.parametrize(("section", "name", "field", "before"), ADDED, ids=lambda value: str(value) or "-")
def test_a_field_that_came_later_leaves_old_keys_alone(spec, section, name, field, before):
    """At the value for what was done before the key is that of a run without it."""
    values = dataclasses.asdict(CONFIGURATIONS[section][name]()) | ({"name": name} if name else {}) | {field: before}
    without = {k: v for k, v in values.items() if k != field}
    now, old, changed = (
        dataclasses.replace(spec, **{section: settings}).key for settings in (values, without, values | {field: "x"})
    )
    assert now == old != changed


def test_new_runs_do_what_was_done_before():
    """But for these, whose default the evidence has changed."""
    changed = {f for section, name, f, before in ADDED if getattr(CONFIGURATIONS[section][name](), f) != before}
    assert changed == {"overshoot"}


def test_fields_that_came_later_say_so():
    """The list before they did, by the section and the name of the field."""
    names = {f"{section}.{field}" for section, _, field, _ in ADDED}
    train = {
        f"train.{name}" for name in ("cuts", "test_cuts", "init", "timed_steps", "timed_contexts", "losses", "frozen")
    }
    model = {f"model.{name}" for name in ("inputs", "cutoffs", "bos_id", "encoder_width", "encoder_heads")}
    babilong = {f"task.{name}" for name in ("eval_set", "eval_revision", "eval_length", "test_eval_length")}
    lines = {f"task.{name}" for name in ("train_digits", "value_digits", "one_tail", "apart", "stream")}
    assert names >= train | model | babilong | lines | {"model.test_readout"}


def test_keys_are_what_they_were(make_spec):
    """Another field or default would train everything anew, silently; see ``fields.added`` and ``KEY_VERSION``."""
    assert (make_spec().key[:12], make_spec("task={name: babilong}").key[:12]) == ("5be978bb388a", "c2ddc11a393f")


def test_the_numbers_of_a_model_are_part_of_its_keys(make_spec, monkeypatch):
    rmt, armt = make_spec("model={name: rmt}"), make_spec()
    keys = rmt.key, armt.key
    monkeypatch.setattr("lit_memory.models.rmt.RMT.numbers", 99)
    assert dataclasses.replace(rmt).key != keys[0] and dataclasses.replace(armt).key == keys[1]


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


def test_stages(make_spec):
    whole = {"steps": 6, "batch_size": 4, "until": {}, "needed": False, "task": {}}
    assert make_spec().stages == [whole]
    first, second = "task.pairs: 1, until: {exact_match: 0.9}", "steps: 3, batch_size: 2, task.pairs: 4, task.vary: 0.5"
    stages = make_spec(f"train.stages=[{{{first}}}, {{{second}}}, {{}}]").stages
    own = {"steps": 3, "batch_size": 2, "task": {"pairs": 4, "vary": 0.5}}
    assert stages == [whole | {"until": {"exact_match": 0.9}, "task": {"pairs": 1}}, whole | own, whole]
