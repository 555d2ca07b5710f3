"""Broken files and command lines: one line that names file, key and the nearest valid name."""

import math

import pytest
import yaml
from plans import change, check_message, plan

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import load
from lit_memory.plan.measured import check_report
from lit_memory.registry import MODELS

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
        {"scales/cpu/model.width": 8, "arms/a/model": {"name": "rmt", "width": "x"}},
        "FILE (arm a): model.width: Value 'x'",
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
        "FILE (arm b): model.gamma: … expected one of ['clip', 'raw', 'off']; … write them in quotes … (got False)",
    ),
    "number without quotes": ({"paper/arxiv": 2407.0484}, "FILE: paper.arxiv: wrong type: write text in quotes"),
    "option that a report had once": ({"report/kind": "line"}, "FILE: report.kind: unknown key; expected one of x, y,"),
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
    "replay on a cpu": ({"base/train/replay": True}, "FILE (arm a): train.replay: true: … train.accelerator: cuda"),
    "replay of a model that looks": (
        {"base/train/replay": True, "base/train/accelerator": "cuda", "base/model": {"name": "xl", "width": 16}},
        "FILE (arm a): train.replay: true: XL looks at numbers of a batch on the CPU; expected false",
    ),
    "replay on several devices": (
        {"base/train/replay": True, "base/train/accelerator": "cuda", "base/train/trainer": {"devices": 2}},
        "FILE (arm a): train.replay: true: … expected one device",
    ),
    "replay of what is computed again": (
        {"base/train/replay": True, "base/train/accelerator": "auto", "base/train/checkpoint_segments": 2},
        "FILE (arm a): train.replay: true: … expected no checkpoint_segments",
    ),
    "replay of a stream": (
        {
            "base/train/replay": True,
            "base/train/accelerator": "cuda",
            "base/task": {"name": "language_modeling", "stream": True, "window": 64, "segment_len": 16},
        },
        "FILE (arm a): train.replay: true: … expected false",
    ),
    "bptt": ({"base/train/bptt": 0}, "FILE (arm a): train.bptt: bptt=0: expected at least 1"),
    "sizes of the test": (
        {"base/train/test_size": [8]},
        "FILE (arm a): train.test_size: test_size=[8]: expected one number, or 2 of them, one for each of",
    ),
    **{
        f"{name} of samples in order": (
            {
                "base/task": {"name": "babilong", "stories": "shipped-babi", "test_segments": [1, 2]},
                "base/train": {"batch_size": 6, "eval_batch_size": 3, "trainer": {"devices": 3}, **sizes},
            },
            f"FILE (arm a): train.{name}: {name}=100: read in order, … of 2, for 3 devices; expected a multiple of 3",
        )
        for name, sizes in {
            "test_size": {"valid_size": 9, "test_size": [9, 100]},
            "valid_size": {"valid_size": 100, "test_size": 9},
        }.items()
    },
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
    "needed without until": (
        {"base/train/stages": [{"needed": True}]},
        "FILE (arm a): train.stages[0].needed: True: expected true, in a stage that has an until",
    ),
    "needed a number": (
        {"base/train/stages": [{"until": {"exact_match": 1}, "needed": 1}]},
        "FILE (arm a): train.stages[0].needed: 1: expected true",
    ),
    "vocabulary of a stage": (
        {"base/train/stages": [{"task.legacy_ids": True}]},
        "FILE (arm a): model.vocab_size: 19: the task has 128 token ids",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tree, tmp_path, name):
    edits, expected = BROKEN[name]
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(change(tree, edits), sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        experiment = load(path).at()
        check_report(experiment, experiment.plan())
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
    "model=3": "3: expected a mapping, the whole section, or model.<field>",
    "seeds=[1]": "expected model.<field>,",
    "arms.a.model.width=3": "expected model.<field>,",
    "model.gama?=1": "unknown key; did you mean 'gamma'?",
    "model.name=zz": f"unknown model 'zz'; expected one of {NAMES}",
    "model.gamma=off": "… expected one of ['clip', 'raw', 'off']; … on a command line '\"off\"' (got False)",
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
