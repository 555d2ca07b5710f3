"""Every benchmark runs, at tiny sizes; and the tool measures, skips and reports what it should."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import measure
from benchmarks.__main__ import main
from benchmarks.measure import Failed, Measured, rows
from benchmarks.steps import settings
from benchmarks.work import PROJECT, Skipped, Work, need
from benchmarks.works import WORKS
from lit_memory.registry import MODELS

WAYS = [
    pytest.param(name, way, id=f"{name}-{way}", marks=[pytest.mark.slow] * name.startswith("babilong"))
    for name, work in WORKS.items()
    for way in work.ways
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_every_way_runs(name, way):
    work = WORKS[name]
    try:
        timed = work.ways[way](work.settings(), True)
    except Skipped as reason:
        pytest.skip(str(reason))
    timed.run()
    with FlopCounterMode(display=False):  # as the worker counts operations
        timed.run()
    assert timed.tokens > 0


@pytest.mark.slow
def test_the_two_ways_of_a_sample_agree():
    slices, naive = (way({}, True).run for way in WORKS["babilong/sample"].ways.values())
    assert slices() == naive() and slices() == naive()


@pytest.mark.parametrize("name", ["armt/step", "armt/schedules", "armt/text", "mamba/step", "titans/128"])
def test_models_and_inputs_are_on_the_device(name, monkeypatch):
    """Of a device without numbers, as of one that may not be here. What looks at numbers there is not tried."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # unknown for meta
    made, backward, ours = [], torch.Tensor.backward, next(iter(WORKS[name].ways.values()))
    monkeypatch.setattr(torch.Tensor, "backward", lambda t: made.append(t.device.type) or backward(t))
    ours({"device": "meta"}, True).run()
    assert made == ["meta"] * (name != "armt/text")


def test_both_mambas_have_the_same_weights(monkeypatch):
    losses, backward = [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: losses.append(loss.item()) or backward(loss))
    for way in WORKS["mamba/step"].ways.values():
        torch.manual_seed(0)  # as the worker does
        way({}, True).run()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_every_architecture_has_a_row():
    """At the sizes of an arm of its own where there is one."""
    assert {f"step/{name}" for name in MODELS} <= set(WORKS)
    assert all(settings(name)["model"]["name"] == name for name in MODELS)
    assert settings("mamba")["model"]["state_dim"] == 32 and settings("mamba")["task"]["pairs"] == 50


def test_a_row():
    ours = Measured(tokens=100, flops=50, peak=7.0, seconds=[1.0, 2.0, 4.0], rates=[100.0, 100.0, 100.0])
    other = Measured(tokens=100, peak=9.0, seconds=[3.0, 4.0, 4.0], rates=[1.0] * 3)
    absent = Measured(skipped="x is not installed")
    assert rows("w", {"ours": ours, "other": other, "absent": absent}) == [
        "| w | ours | 2 | 38% | 1.00 | 50 | 25.0% | 7 |",
        "| w | other | 4 | 6% | 2.00 | 25 |  | 9 |",
        "| w | absent | skipped: x is not installed ||||||",
    ]


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(Skipped, match="no_such_package is not installed"):
        need("no_such_package")
    monkeypatch.delenv("ARMT_REFERENCE", raising=False)
    with pytest.raises(Skipped, match=r"\$ARMT_REFERENCE names no file; expected the published"):
        WORKS["armt/step"].ways["published code"]({}, True)


@pytest.mark.parametrize("argv", [["no_such_work"], ["mamba", "--rounds", "0"]])
def test_a_wrong_command_line(argv, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and "step/armt" in err


@pytest.mark.slow
def test_a_worker_measures_and_one_that_fails_is_told():
    found = measure.measure("armt/forward", WORKS["armt/forward"], 2, None, True)
    assert found["ours"].tokens == 24 and len(found["ours"].seconds) == 2 and found["ours"].flops > 0
    assert (
        0 < found["ours"].share < 1 and found["ours"].peak >= 0 and "ARMT_REFERENCE" in found["published code"].skipped
    )
    with pytest.raises(Failed, match=r"step/armt \(ours\): KeyError"):
        measure.measure("step/armt", Work(WORKS["step/armt"].ways, dict), 1, None, True)


WATCHED = """
import sys
from benchmarks import worker
before, forget = set(), worker.forget_peak
worker.forget_peak = lambda device: before.update(sys.modules) or forget(device)
worker.main("armt/text", "default")
assert before and not set(sys.modules) - before, f"{len(set(sys.modules) - before)} modules"
"""


def test_a_peak_has_no_imports():
    """They would count against the way that is the first to need them."""
    request = '{"settings": {}, "tiny": true}\n'
    done = subprocess.run([sys.executable, "-c", WATCHED], cwd=PROJECT, input=request, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_worker_that_says_much_is_not_stopped(monkeypatch, tmp_path):
    """More than a pipe holds."""
    talk = "import sys; sys.stderr.write('x' * 300_000 + '\\nthe last line\\n'); sys.stderr.flush(); "
    answer = "print('{}', flush=True); input(); input()"
    monkeypatch.setattr(measure.sys, "executable", write_program(tmp_path, f"{talk}{answer}; raise SystemExit(1)"))
    worker = measure.Worker("step/armt", "ours", tmp_path, None, True, tmp_path)
    with pytest.raises(Failed, match=r"step/armt \(ours\): the last line"):
        worker.ask()
    worker.close()


def write_program(folder, code):
    """A program that takes the place of Python."""
    path = folder / "program"
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_beside_another_commit():
    """The files of the commit come into a folder that is gone afterwards."""
    command = [sys.executable, "-m", "benchmarks", "step/rmt_r", "--tiny", "--rounds", "2", "--against", "HEAD"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split(" | ")[1] for line in done.stdout.splitlines()[2:]] == ["here", "HEAD"]
    trees = subprocess.run(["git", "-C", PROJECT, "worktree", "list"], capture_output=True, text=True, check=True)
    assert "/tree " not in trees.stdout
