"""Any of Lightning's loggers from Python: each gets every metric and every setting of a module of ours."""

import csv

import lightning as L
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from test_lit import make_data, small

import lit_memory

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


class Recording(Logger):
    """What Lightning hands to its loggers."""

    name, version = "recording", 0

    def __init__(self):
        super().__init__()
        self.values, self.settings = {}, {}

    def log_metrics(self, metrics, step=None):
        self.values.update(metrics)

    def log_hyperparams(self, params, *args, **kwargs):
        self.settings = dict(params)


def logged(folder, logger):
    """Everything that a fit and a test log, beside what ``logger`` has got of it."""
    told = Recording()
    lit = lit_memory.LitARMT(**small(lit_memory.LitARMT), lr=0.01)
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        logger=[told, logger],
        max_steps=2,
        log_every_n_steps=1,
        val_check_interval=1,
        default_root_dir=folder,
        accelerator="cpu",
        **options,
    )
    data = make_data(lit_memory.AssociativeRetrievalData, test_pairs=[2, 3])
    trainer.fit(lit, data)
    trainer.test(lit, data, verbose=False)
    logger.finalize("success")
    for name in ("train/loss", "valid/exact_match", "test/exact_match@2", "test/exact_match@3"):
        assert name in told.values
    assert told.settings["lr"] == 0.01 and told.settings["width"] == lit.hparams["width"]
    return told


def test_csv(tmp_path):
    told = logged(tmp_path, CSVLogger(tmp_path, name="csv"))
    (folder,) = (tmp_path / "csv").iterdir()
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {name: float(row[name]) for row in rows for name in row if row[name]}
    assert {name: found.get(name) for name in told.values} == pytest.approx(told.values)
    settings = yaml.unsafe_load((folder / "hparams.yaml").read_text())
    assert {*told.settings} == {*settings} and settings["lr"] == 0.01


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = logged(tmp_path, TensorBoardLogger(tmp_path, name="board"))
    (folder,) = (tmp_path / "board").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    found = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    assert {name: found.get(name) for name in told.values} == pytest.approx(told.values)
    assert {*told.settings} <= {*yaml.unsafe_load((folder / "hparams.yaml").read_text())}


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb")
    for name, value in {"WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path), "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    logger = WandbLogger(name="mine", save_dir=tmp_path, project="lit-memory", offline=True)
    told = logged(tmp_path, logger)
    found, settings = dict(logger.experiment.summary), dict(logger.experiment.config)
    logger.experiment.finish()
    assert {name: found.get(name) for name in told.values} == pytest.approx(told.values)
    assert {*told.settings} <= {*settings}
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
