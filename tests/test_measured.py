"""What a plan will measure: its x axis, its metrics, and claims about both."""

import contextlib

import pytest
from plans import change

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import parse
from lit_memory.plan.measured import check_report, evidence, stops, x_values
from lit_memory.registry import TASKS, build, load_class


def test_the_x_axis_is_what_the_test_varies(tree):
    task = {"name": "babilong", "eval_set": "a/b", "test_eval_length": [0, 1000], "test_segments": [2]}
    experiment = parse(
        tree | {"base": tree["base"] | {"task": task}, "report": {"x": "test_segments"}, "expect": []}, "tiny.yaml"
    ).at()
    with pytest.raises(
        ConfigError,
        match=r"report\.x: 'test_segments' is not what the test of babilong varies; expected test_eval_length",
    ):
        check_report(experiment, experiment.plan())


def test_an_arm_may_have_the_first_values_alone(tree):
    """``stops`` tells how many; what is not the beginning of the others' values is refused."""
    for values, found in (([2], {"b": 1}), ([2, 4], {}), ([4], "'test_pairs' has not the same values in every arm")):
        edits = {"base/task/test_pairs": [2, 4], "arms": {"a": {}, "b": {"task.test_pairs": values}}, "expect": []}
        experiment = parse(change(tree, {**edits, "grid": {}, "scales": {"cpu": {}}}), "tiny.yaml").at()
        with pytest.raises(ConfigError, match=found) if isinstance(found, str) else contextlib.nullcontext():
            specs = experiment.plan()
            assert (x_values(experiment, specs), stops(experiment, specs)) == ([2, 4], found)
            check_report(experiment, specs)


@pytest.mark.parametrize("name", ["cuts", "test_cuts"])
def test_only_tasks_that_allow_it_are_cut_anew(name, make_spec, monkeypatch):
    monkeypatch.setattr(load_class("task", "associative_retrieval"), "any_segments", False)
    with pytest.raises(
        ConfigError, match=rf"train.{name}: \[3\]: the contexts of this task cannot be cut anew; expected none"
    ):
        make_spec(f"train.{name}=[3]")


def test_no_stage_is_cut_anew_whose_pairs_stand_together(make_spec):
    """The test, which has no stages, may be."""
    stages = "train.stages=[{task.together: pairs, steps: 1}, {steps: 1}]"
    with pytest.raises(ConfigError, match=r"train.cuts: \[3\]: the contexts of this task cannot be cut anew"):
        make_spec("train.cuts=[3]", stages)
    assert make_spec("train.test_cuts=[3]", stages).train["test_cuts"] == [3]


def test_claims_may_be_about_time(tree):
    for claim, message in (("a.seconds[2] < 9", ""), ("a.second[2] < 9", "did you mean 'seconds'")):
        experiment = parse(tree | {"expect": [claim]}, "tiny.yaml").at()
        with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
            check_report(experiment, experiment.plan())


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
        ).at()
        with (
            contextlib.nullcontext()
            if right
            else pytest.raises(ConfigError, match=r"report\.y: unknown metric 'lines'")
        ):
            check_report(experiment, experiment.plan())
    assert load_class("model", "rmt").diagnosed and not load_class("model", "rmt").tested


@pytest.mark.parametrize("name", TASKS)
def test_no_task_reads_what_was_not_made_by_a_program_unless_told_to(name):
    assert build("task", {"name": name}).material == ""


MATERIALS = [
    ("language_modeling", {"source": "wikitext-2-v1"}, "text"),
    ("babilong", {"haystack": "pg19"}, "text"),
    ("babilong", {"haystack": "pg19", "test_segments": [0]}, ""),  # stories alone
    ("babilong", {"eval_set": "a/b", "eval_length": 1000, "test_eval_length": [1000]}, "text"),
    ("needle", {"haystack": "pg19"}, "text"),
    ("needle", {"haystack": "pg19", "variant": "pk"}, ""),  # one line, repeated
    ("passkey", {"haystack": "pg19"}, ""),
    ("passkey", {"haystack": "pg19", "needle": "magic"}, "text"),
    ("memreasoner", {"haystack": "pg19"}, ""),  # which its training alone reads
    ("memreasoner", {"haystack": "pg19", "test_tokens": [0, 1000]}, "text"),
    ("memreasoner", {"haystack": "pg19", "test_tokens": [1000], "noise": "soft"}, ""),
    ("variable_tracking", {"haystack": "pg19", "test_tokens": [1000]}, ""),
    ("variable_tracking", {"haystack": "pg19", "test_tokens": [1000], "noise": "books"}, "text"),
    ("dna", {"source": "human_enhancers_cohn"}, "data"),
    ("time_series", {"source": "ETTh1"}, "data"),
]


@pytest.mark.parametrize(("name", "settings", "material"), MATERIALS)
def test_what_a_test_reads(name, settings, material):
    assert build("task", {"name": name} | settings).material == material


@pytest.mark.parametrize(
    ("scale", "modified", "source", "level"),
    [
        ("cpu", False, "noise", "toy"),
        ("cpu", True, "wikitext-2-v1", "real text"),
        ("paper", False, "wikitext-2-v1", "paper scale"),
        ("paper_small", False, "wikitext-2-v1", "paper scale"),
        ("paper", True, "wikitext-2-v1", "real text"),
        ("paper", True, "noise", "toy"),
        ("papers", False, "noise", "toy"),
    ],
)
def test_the_level_of_evidence(make_spec, tree, scale, modified, source, level):
    """A change of a setting cannot claim more than what is tested; one arm on synthetic text makes a toy."""
    spec = make_spec(f"task={{name: language_modeling, source: {source}, test_segments: [2, 4]}}")
    named = parse(tree | {"scales": {scale: {}}}, "tiny.yaml").at()
    assert evidence(named, [spec], modified) == level
    if "paper" not in level:
        assert evidence(named, [spec, make_spec()], modified) == "toy"
    del tree["paper"]
    assert "paper" not in evidence(parse(tree | {"scales": {scale: {}}}, "tiny.yaml").at(), [spec], modified)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"expect": ["a.train_tokens_per_s[2] > 1"]},
            "expect[0]: 'a.train_tokens_per_s[2] > 1': a.train_tokens_per_s[2]",
        ),
        ({"report": {"time": "train_tokens_per_s"}}, "report.time: train_tokens_per_s needs train.timed_steps"),
        ({"expect": ["std(a[2]) < 0.1"], "seeds": [0]}, "expect[0]: 'std(a[2]) < 0.1': one seed has no std"),
    ],
    ids=["time of a line", "time of the figure", "std"],
)
def test_what_no_run_measures_is_told_before_any(tree, change, says):
    report = tree["report"] | change.get("report", {})
    tree = tree | change | {"report": report, "requires": ["a[2] > 0"]}
    experiment = parse(tree, "tiny.yaml").at()
    with pytest.raises(ConfigError) as caught:
        check_report(experiment, experiment.plan())
    assert str(caught.value).startswith(f"tiny.yaml: {says}")
