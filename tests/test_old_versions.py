"""What version 0.1 left behind still loads: a database, checkpoints in the middle of a run, a saved folder."""

import gzip
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_memory import ARMT
from lit_memory.cli import main
from lit_memory.lit.modules import LitMemory
from lit_memory.recurrence import unroll
from lit_memory.run import checkpoint
from lit_memory.run.options import parse_options
from lit_memory.run.store import open_tracker
from lit_memory.run.sweep import Sweep
from lit_memory.run.worklist import WorkList

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]
OLD = Path(__file__).parent / "fixtures" / "root_of_0.1"
OLD_PLACE = "file:///work/scratch/v0/root"
"""Where that root lay: MLflow keeps absolute paths."""


@pytest.fixture
def old_root(tmp_path, monkeypatch):
    """That root at another place, and its file; nothing can be written where it lay."""
    for name in ("MLFLOW_TRACKING_URI", "LIT_MEMORY_ROOT", "MPLCONFIGDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("lit_memory.plan.runspec.KEY_VERSION", 1)  # of the numbers, not of the files
    monkeypatch.setattr("lit_memory.models.rmt.RMT.numbers", 0)
    root, gone = tmp_path / "root", tmp_path / "gone"
    shutil.copytree(OLD / "checkpoints", root / "checkpoints")
    (root / "mlflow.db").write_bytes(gzip.decompress((OLD / "mlflow.db.gz").read_bytes()))
    gone.touch()  # a file: not even root makes folders below it
    with closing(sqlite3.connect(root / "mlflow.db")) as database, database:
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            database.execute(f"update {table} set {column} = replace({column}, '{OLD_PLACE}', '{gone.as_uri()}')")
    return root


def sweep_at(root):
    return Sweep.prepare(parse_options([str(OLD / "tiny.yaml"), "--root", str(root)]))


def test_what_is_finished_and_what_is_to_resume(old_root):
    work = WorkList(sweep_at(old_root))
    work.refresh(open_tracker(old_root))
    assert {spec.arm: work.status(spec) for spec in work.sweep.specs} == {
        "a": "finished",
        "b": "to resume",
        "c": "to resume",
    }
    assert [spec.arm for spec in work.todo()] == ["b", "c"]
    steps = [torch.load(path, weights_only=True)["global_step"] for path in old_root.rglob("*.ckpt")]
    assert sorted(steps) == [4, 4, 9]


def test_another_version_of_the_numbers_trains_anew(old_root, monkeypatch):
    """What 0.1 computed is not taken for what is computed today: the last digits moved with the speed of 0.2."""
    monkeypatch.undo()
    work = WorkList(sweep_at(old_root))
    work.refresh(open_tracker(old_root))
    assert {work.status(spec) for spec in work.sweep.specs} == {"new"}


def test_the_same_command_completes_them(old_root, inline, monkeypatch, capsys):
    """From step 4 of 9 on, to the weights that version 0.1 came to."""
    steps, train = [], LitMemory.training_step

    def training_step(self, *args):
        steps.append(self.trainer.global_step)
        return train(self, *args)

    monkeypatch.setattr(LitMemory, "training_step", training_step)
    assert main([str(OLD / "tiny.yaml"), "--root", str(old_root)]) == 0
    out = capsys.readouterr().out
    assert "3 runs: 1 finished, 2 to resume" in out and "INCOMPLETE" not in out
    assert steps == 2 * [4, 5, 6, 7, 8]
    found = {}
    for spec in sweep_at(old_root).specs[1:]:
        folder = spec.folder(old_root)
        weights = torch.load(checkpoint.saved(folder)[0], weights_only=True)["state_dict"]
        found |= {f"{folder.name}/{name}": tensor for name, tensor in weights.items()}
    expected = load_file(OLD / "final.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        pair = found[name], tensor
        if name.endswith("qkv.bias"):  # of a key's bias the gradient is rounding, of which Adam makes steps
            pair = [torch.cat(bias.chunk(3)[::2]) for bias in pair]
        torch.testing.assert_close(*pair, rtol=0, atol=1e-5, msg=name)  # CPUs round differently


def test_a_finished_run_is_reported_as_it_was(old_root, capsys):
    assert main([str(OLD / "tiny.yaml"), "--root", str(old_root), "--report"]) == 0
    rows = (old_root / "reports/tiny/table.csv").read_text().splitlines()
    assert sum(",later_steps," in row for row in rows) == 6  # three arms, two x; version 0.1 had no such metric
    assert [row for row in rows if ",later_steps," not in row] == (OLD / "table.csv").read_text().splitlines()
    assert "INCOMPLETE; missing: b seed 0 (to resume)" in capsys.readouterr().out


def test_a_saved_folder_loads():
    model, expected = ARMT.from_pretrained(OLD / "model"), load_file(OLD / "model" / "model.safetensors")
    assert model.config.memory_dim == 4
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[f"model.{name}"])
    assert torch.isfinite(unroll(model, torch.arange(16).reshape(1, 16), 8).hidden_BTD).all()
