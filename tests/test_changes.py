"""What changes between the interruption of a run and its end: code, libraries, the file."""

import shutil
from importlib.metadata import version

import pytest
import torch
import yaml
from conftest import identical
from faults import slow
from test_engine import STAGED, checkpoint, run

from lit_memory.cli import main
from lit_memory.lit.callbacks.progress import Progress
from lit_memory.run.checkpoint import CheckpointError, digest_file, saved
from lit_memory.run.engine import run_one
from lit_memory.run.saving import VerifiedCheckpoints
from lit_memory.run.tracking import Tracker
from lit_memory.util.provenance import code, code_changes, provenance

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]
NOW = {
    "commit": "bbbbbbbbbbbb",
    "dirty": "false",
    "versions": "lit-memory 0.2, Python 3.11.2, torch 2.5 lightning 2.6 mlflow 3.1",
    "hardware": "a processor, 2 cores",
    "code": code(),
}
CHANGES = {
    "nothing": ({}, ""),
    "another machine": ({"hardware": "another, 8 cores"}, ""),
    "commit": ({"commit": "aaaaaaaaaaaa"}, "commit aaaaaaaaaaaa -> bbbbbbbbbbbb"),
    "files that are not committed": ({"dirty": "true"}, "dirty true -> false"),
    "torch": (
        {"versions": NOW["versions"].replace("torch 2.5", "torch 2.4")},
        "versions torch 2.4 lightning 2.6 mlflow 3.1 -> torch 2.5 lightning 2.6 mlflow 3.1",
    ),
    "this package and Python": (
        {"versions": NOW["versions"].replace("0.2", "0.1").replace("3.11.2", "3.12.0"), "commit": "aaaaaaaaaaaa"},
        "commit aaaaaaaaaaaa -> bbbbbbbbbbbb; versions lit-memory 0.1, Python 3.12.0 -> lit-memory 0.2, Python 3.11.2",
    ),
    "code and back again": ({"commit": "bbbbbbbbbbbb; aaaaaaaaaaaa"}, "commit aaaaaaaaaaaa -> bbbbbbbbbbbb"),
    "no git at that time": ({"commit": ""}, ""),
    "code that no commit has": ({"code": "cccccccccccc"}, f"code cccccccccccc -> {NOW['code']}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_code(name):
    before, told = CHANGES[name]
    assert code_changes(NOW | before, NOW) == told


def test_provenance_has_what_is_compared(monkeypatch):
    for changed in (" M run.py", ""):
        monkeypatch.setattr("lit_memory.util.provenance.git", lambda *arguments, changed=changed: changed)
        found = provenance()
        assert {"commit", "dirty", "versions", "code"} <= found.keys()
        assert all(f" {name} {version(name)}" in found["versions"] for name in ("torch", "numpy", "tokenizers"))


def test_code_that_no_commit_has_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_memory.util.provenance._ABOVE", tmp_path)
    file = tmp_path / "lit_memory" / "a.py"
    file.parent.mkdir()
    seen = set()
    for text in ("a = 1\n", "a = 2\n"):
        file.write_text(text)
        seen |= {code(), code()}
    assert len(seen) == 2


def interrupted(spec, root, monkeypatch, tags, step=4):
    """A run that ends as by Ctrl-C at a step; its checkpoints."""

    def send(message):
        if message.get("total_step") == step:
            raise KeyboardInterrupt

    tracker = Tracker(root)
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, SystemExit)):
        patch.setattr(Progress, "on_train_batch_end", lambda self, trainer, *args: self.report(trainer))
        run_one(spec, root, tracker.uri, tracker.parent(spec.experiment, spec.scale, {}), tags, send)
    assert saved(spec.folder(root))
    return saved(spec.folder(root))


@pytest.mark.parametrize("name", ["nothing", "commit", "torch"])
def test_a_run_goes_on_with_other_code(make_spec, make_root, monkeypatch, name):
    """It keeps what it has learnt, its tags name both, and one line says that numbers may differ."""
    spec, root, messages = make_spec(*STAGED), make_root(), []
    before, told = CHANGES[name]
    interrupted(spec, root, monkeypatch, NOW | before)
    tracker = Tracker(root)
    run_one(spec, root, tracker.uri, tracker.parent(spec.experiment, spec.scale, {}), NOW, messages.append)
    found = tracker.find(spec.key)
    assert found.status == "FINISHED"
    assert found.tags["lit.commit"] == {"commit": "aaaaaaaaaaaa; bbbbbbbbbbbb"}.get(name, "bbbbbbbbbbbb")
    warnings = [message["message"] for message in messages if message["event"] == "warning"]
    expected = f"a seed 0 goes on with other code than it began with ({told}); its numbers may differ from those of "
    assert warnings == ([expected + "either; --fresh trains anew"] if told else [])
    whole = make_root("whole")
    run(spec, whole)
    assert identical(checkpoint(spec, root)["state_dict"], checkpoint(spec, whole)["state_dict"])


def test_code_that_changes_while_a_command_trains(make_spec, root, monkeypatch):
    """A run that begins after that has the tags of its own code, and one line says so."""
    spec, messages, tracker = make_spec(), [], Tracker(root)
    began = NOW | {"code": "cccccccccccc", "commit": "aaaaaaaaaaaa"}
    monkeypatch.setattr("lit_memory.util.provenance.provenance", lambda: NOW)
    run_one(spec, root, tracker.uri, tracker.parent(spec.experiment, spec.scale, {}), began, messages.append)
    assert tracker.find(spec.key).own_tags.items() >= NOW.items()
    told = f"commit aaaaaaaaaaaa -> bbbbbbbbbbbb; code cccccccccccc -> {NOW['code']}"
    line = f"the command goes on with other code than it began with ({told}); the numbers of its later runs may differ "
    warnings = [message["message"] for message in messages if message["event"] == "warning"]
    assert warnings == [f"{line}from those of either; --fresh trains anew"]


def test_a_run_that_has_nothing_yet_warns_of_nothing(make_spec, root):
    spec, messages, tracker = make_spec(), [], Tracker(root)
    parent = tracker.parent(spec.experiment, spec.scale, {})
    run_id = tracker.start(spec, None, parent, NOW | {"commit": "aaaaaaaaaaaa"}, {})
    tracker.end(run_id, "FAILED")
    run_one(spec, root, tracker.uri, parent, NOW, messages.append)
    assert not [message for message in messages if message["event"] == "warning"]


def rewritten(path, change):
    """A checkpoint with other content, and the checksum of that."""
    content = torch.load(path, weights_only=True)
    change(content)
    shutil.rmtree(path.parent)
    VerifiedCheckpoints().save_checkpoint(content, path)
    assert digest_file(path).is_file()


@pytest.mark.parametrize("version", ["99.0.0", *slow("2.0.0", "2.6.0")])
@pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with Lightning")
def test_a_checkpoint_of_another_lightning(make_spec, make_root, monkeypatch, version):
    spec, root = make_spec(*STAGED), make_root()
    newest, *_ = interrupted(spec, root, monkeypatch, {})
    rewritten(newest, lambda content: content.update({"pytorch-lightning_version": version}))
    whole = make_root("whole")
    assert run(spec, root)[1] == run(spec, whole)[1]


def test_a_checkpoint_of_another_model(write, root, make_spec, monkeypatch, inline):
    """The code of the model changed, its settings did not: one line, and what to do."""
    spec = make_spec()
    newest, *_ = interrupted(spec, root, monkeypatch, {}, step=5)
    rewritten(newest, lambda content: content["state_dict"].pop(next(iter(content["state_dict"]))))
    with pytest.raises(CheckpointError) as caught:
        run(spec, root)
    line = str(caught.value)
    assert line.startswith(f"{newest}: does not fit the model (Missing key") and "--fresh" in line and "\n" not in line
    assert Tracker(root).find(spec.key).status == "FAILED"
    assert main([write(arms={"a": {}}, expect=[]), "--root", str(root), "--fresh"]) == 0


def test_a_file_that_is_edited_in_between(write, tree, root, make_spec, monkeypatch, inline, capsys):
    """Another key is another run: the old one is left alone, and waits for its file."""
    old = make_spec()
    before = [path.read_bytes() for path in interrupted(old, root, monkeypatch, {}, step=5)]
    only = {"arms": {"a": {}}, "expect": []}
    edited = yaml.safe_load(yaml.safe_dump(tree["base"]))
    edited["train"]["lr"] = 0.5
    assert main([write(**only), "--root", str(root), "--dry-run"]) == 0
    assert "1 run: 1 to resume" in capsys.readouterr().out
    assert main([write(**only, base=edited), "--root", str(root)]) == 0
    assert "1 run: 1 new" in capsys.readouterr().out
    assert [path.read_bytes() for path in saved(old.folder(root))] == before
    assert Tracker(root).find(old.key).status == "KILLED"
    assert main([write(**only), "--root", str(root)]) == 0
    assert "1 run: 1 to resume" in capsys.readouterr().out
    assert Tracker(root).find(old.key).status == "FINISHED"


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_a_profiler_writes_and_changes_no_number(make_spec, make_root, profiler):
    plain, root = make_spec(), make_root()
    spec = make_spec(f"train.trainer={{profiler: {profiler}}}")
    rows = run(spec, root)[1]
    assert rows == run(plain, root)[1] and spec.key != plain.key
    assert [path.stat().st_size > 100 for path in spec.folder(root).glob("fit-profile*.txt")] == [True]
