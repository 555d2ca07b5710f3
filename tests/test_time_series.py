"""Time series: windows, normalisation and splits against slow twins, errors by hand, files that are wrong. Common tests
are in test_tasks.py."""

import io
import math
import re
from datetime import datetime, timedelta
from http.client import IncompleteRead
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TEXT_ONLY

from lit_memory.models.decoder import Numbers
from lit_memory.recurrence import unroll
from lit_memory.registry import MODELS
from lit_memory.tasks import time_series_sets
from lit_memory.tasks.time_series import TimeSeries, repeat_day, repeat_last
from lit_memory.tasks.time_series_sets import LAG, borders, load_series, read_csv, seasons


def make(**config):
    return TimeSeries(TimeSeries.Config(**config))


@pytest.fixture
def table(tmp_path):
    """``table(rows)``: a CSV file with dates and two columns, a ramp and a season."""

    def write(rows, name="own.csv"):
        start = datetime(2020, 1, 1)
        lines = [f"{start + timedelta(hours=r)},{r},{math.sin(r)}" for r in range(rows)]
        (tmp_path / name).write_text("\n".join(["date,ramp,season", *lines]) + "\n")
        return str(tmp_path / name)

    return write


def test_windows_slow_twin(table):
    """Every window of every split, channel by channel: look-back in patches, forecast, both minus the look-back's mean;
    no row is left out."""
    task = make(source=table(200), lookback=24, horizon=5, patch=6)
    columns = np.array([range(200), [math.sin(r) for r in range(200)]])
    normal = (columns - columns[:, :140].mean(1, keepdims=True)) / columns[:, :140].std(1, keepdims=True)  # 7:1:2
    for split, (start, end) in {"train": (0, 140), "valid": (140, 160), "test": (160, 200)}.items():
        expected = []
        for channel in normal:
            for at in range(200):  # where the forecast begins
                if at - 24 >= 0 and at >= start and at + 5 <= end:
                    past = channel[at - 24 : at]
                    expected.append(np.concatenate([past, channel[at : at + 5]]) - past.mean())
        batch = task.take(split, range(task.count(split)))
        assert (
            batch.ids_BT.shape == (len(expected), 5, 6)
            and (batch.ids_BT[:, -1] == 0).all()
            and batch.targets_BT[:, :-1].isnan().all()
        )
        found = torch.cat([batch.ids_BT[:, :-1].flatten(1), batch.targets_BT[:, -1]], dim=1)
        assert np.allclose(found.numpy(), expected, atol=1e-5)


def test_normalisation_knows_the_training_rows_only(table):
    """Other numbers after the training part leave its numbers as they are."""
    path = table(200)
    before = load_series(path).numbers_CR[:, :140]
    text = (Path(path)).read_text().splitlines()
    Path(path).write_text("\n".join([*text[:141], *(f"x,{10**6},{-(10**6)}" for _ in range(60))]))
    load_series.cache_clear()
    assert np.array_equal(load_series(path).numbers_CR[:, :140], before)
    assert np.allclose(before.mean(1), 0, atol=1e-6) and np.allclose(before.std(1), 1, atol=1e-6)


@pytest.mark.parametrize(("name", "rows", "day"), [("ETTh1", 17420, 24), ("ETTm2", 69680, 96), ("seasons", 17420, 24)])
def test_borders_of_ett(name, rows, day):
    """12, 4 and 4 months of 30 days; ETTh1 has the 8,449, 2,785 and 2,785 windows of the field at 96 and 96."""
    assert borders(name, rows) == {
        "train": (0, 360 * day),
        "valid": (360 * day, 480 * day),
        "test": (480 * day, 600 * day),
    }
    assert [make().part(split).windows for split in ("train", "valid", "test")] == [8449, 2785, 2785]
    assert borders("own", 1000) == {"train": (0, 700), "valid": (700, 800), "test": (800, 1000)}


def test_errors_by_hand(table):
    """MSE and MAE of a forecast, of the last number and of the last day."""
    task = make(source=table(200), lookback=24, horizon=3, center=False)
    batch = task.take("test", [0])
    batch.ids_BT[0, :-1] = torch.arange(24.0).view(3, 8)  # then 0, 1, 2 come again, or 23
    batch.targets_BT[0, -1] = torch.tensor([1.0, 1.0, 5.0])
    predicted = batch.targets_BT.clone()
    predicted[0, -1] = torch.tensor([1.0, 2.0, 3.0])
    found = {name: value.item() for name, value in task.score(predicted, batch).items()}
    linear = task.linear(batch.ids_BT[:, :-1].flatten(1)) - batch.targets_BT[:, -1]
    expected = {
        "mse": 5 / 3,
        "mae": 1,
        "season_mse": (1 + 0 + 9) / 3,
        "season_mae": 4 / 3,
        "repeat_mse": (22**2 * 2 + 18**2) / 3,
        "repeat_mae": 62 / 3,
        "linear_mse": linear.square().mean().item(),
        "linear_mae": linear.abs().mean().item(),
    }
    assert found == pytest.approx(expected) and set(found) == set(task.metrics) == set(task.minimized_metrics)


def test_naive_forecasts():
    past = torch.arange(30.0)[None]
    assert repeat_last(past, 3).tolist() == [[29, 29, 29]]
    assert repeat_day(past, 26, 24).tolist() == [[*range(6, 30), 6, 7]]
    days = {source: TimeSeries.Config(source).day for source in ("seasons", "ETTh1", "ETTm2")}
    assert days == {"seasons": 24, "ETTh1": 24, "ETTm2": 96}
    with pytest.raises(ValueError, match=r"lookback=48: expected a multiple of patch=8 of at least 96, a day"):
        TimeSeries.Config("ETTm1", lookback=48)


@pytest.mark.parametrize(("center", "lookback", "patch"), [(True, 24, 8), (False, 24, 8), (True, 25, 5)])
def test_the_linear_forecast_slow_twin(table, center, lookback, patch):
    """It is that of least squares over all windows of the training, and knows the future of a ramp and a wave."""
    task = make(source=table(200), lookback=lookback, patch=patch, horizon=3, center=center)
    batch = task.take("train", range(task.count("train")))
    past, future = batch.ids_BT[:, :-1].flatten(1).double(), batch.targets_BT[:, -1].double()
    past = torch.cat([past, torch.ones(len(past), 1)], dim=1).numpy()
    expected = past @ np.linalg.lstsq(past, future.numpy(), rcond=1e-6)[0]
    assert np.allclose(task.linear(batch.ids_BT[:, :-1].flatten(1)).numpy(), expected, atol=1e-4)
    unseen = task.take("test", range(task.count("test")))
    scores = task.score(torch.zeros_like(unseen.targets_BT), unseen)
    assert scores["linear_mse"].max() < 1e-5 < scores["season_mse"].min()


def test_the_oracle_and_a_blind_solver():
    """Who knows the future makes no error; who says the mean of the look-back, about one variance, and no less on the
    memory channel."""
    task = make()
    batch = task.take("test", range(0, task.count("test"), 41))
    right, blind = (task.score(p, batch) for p in (batch.targets_BT, torch.zeros_like(batch.targets_BT)))
    assert right["mse"].max() == right["mae"].max() == 0
    memory = batch.meta["channel"] == 6
    assert 0.9 < blind["mse"][memory].mean() < 1.15 and 0.3 < blind["mse"].mean() < 3


def test_the_memory_channel():
    """The channel repeats its own value of 300 rows before in seven of ten rows, which a look-back of 96 does not
    hold."""
    memory = seasons()[-1]
    assert abs((memory[LAG:] == memory[:-LAG]).mean() - 0.7) < 0.015
    task, long = make(), make(lookback=384)
    number = task.part("test").windows * 6 + 50
    assert torch.equal(
        task.take("test", [number]).meta["row"], long.take("test", [number]).meta["row"]
    )  # the same forecasts
    batch = long.take("test", range(long.count("test") * 6 // 7, long.count("test"), 20))
    past = batch.ids_BT[:, :-1].flatten(1)
    known = past[:, 384 - LAG : 384 - LAG + 96]
    assert (0.7 * known - batch.targets_BT[:, -1]).square().mean() < 0.7 * batch.targets_BT[:, -1].square().mean()


def test_golden_numbers():
    """The stand-in never changes silently: old results would no longer be comparable."""
    batch = make(horizon=2).batch(0, "train", 0, 1)
    assert batch.meta["row"].item() == GOLDEN[0] and batch.targets_BT[0, -1].tolist() == pytest.approx(
        GOLDEN[1:], abs=1e-3
    )


GOLDEN = (2846, -1.1238, 0.1186)


@pytest.mark.parametrize(
    ("field", "value"),
    [("lookback", 48), ("horizon", 3), ("patch", 4), ("segment_len", 2), ("center", False), ("source", "own")],
)
def test_every_knob_matters(table, field, value):
    """Each field of the configuration changes the batch."""
    a, b = (make(**change).take("valid", [7]) for change in ({}, {field: table(3000) if value == "own" else value}))
    same = a.ids_BT.shape == b.ids_BT.shape and torch.equal(a.ids_BT, b.ids_BT)
    assert not same or a.targets_BT.shape != b.targets_BT.shape or a.segment_len != b.segment_len


@pytest.mark.parametrize("name", sorted(TEXT_ONLY))
def test_models_of_text_refuse_numbers(build, name):
    with pytest.raises(ValueError, match=r"^inputs=8: .* expected 0"):
        build(name, inputs=8)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in TEXT_ONLY])
def test_every_model_forecasts(build, name):
    """With ``inputs`` a token is numbers: a linear map in place of the table, which no head shares, in any
    precision."""
    model = build(name, inputs=8, vocab_size=11)
    assert isinstance(model.decoder.tokens, Numbers) and model.decoder.head.weight.shape[0] == 11
    batch = make(lookback=24).take("valid", [0, 9])
    hidden = unroll(model, batch.ids_BT, 2).hidden_BTD
    assert model.logits(hidden).shape == (2, 4, 11)
    changed = batch.ids_BT.clone()
    changed[:, 0] += 1
    assert not torch.allclose(
        unroll(model, changed, 4).hidden_BTD[:, -2], unroll(model, batch.ids_BT, 4).hidden_BTD[:, -2]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("date,a,b\nx,1,2\nx,3,\n", r"own\.csv:3: column 'b' has ''; expected a number, as no value may be missing"),
        ("date,a,b\nx,1,2\nx,nan,2\n", r"own\.csv:3: column 'a' has 'nan'; expected a number"),
        ("date,a,b\nx,1,2\n\nx,3\n", r"own\.csv:4: expected 3 fields, as many as there are names of columns; got 2"),
        ("date,a\nx,y\n", r"own\.csv:2: column 'a' has 'y'; expected a number"),
        ("date\nx\n", r"own\.csv: no column of numbers; expected at least one"),
        ("x,y\nnan,1\n2,3\n", r"own\.csv:2: column 'x' has 'nan'; expected a number, as no value may be missing"),
        ("x,y\n,1\n2,3\n", r"own\.csv:2: column 'x' has ''; expected a number"),
        ("0.5,1\n2,3\n", r"own\.csv:1: has numbers, 0\.5, 1; expected the names of the columns"),
        ("", r"own\.csv:1: expected the names of the columns; the file is empty"),
        ("date,a\n", r"own\.csv:2: expected lines of 2 numbers below the names of the columns; got none"),
    ],
)
def test_bad_files(tmp_path, text, message):
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        make(source=str(tmp_path / "own.csv")).count("train")
    assert "\n" not in str(error.value)


def test_too_short(table):
    with pytest.raises(
        ValueError,
        match=r"rows 140 to 160 are those of split 'valid', too few for lookback=24 and horizon=21; expected more rows",
    ):
        make(source=table(200), lookback=24, horizon=21).count("valid")
    with pytest.raises(
        ValueError, match=r"rows 0 to 14 are those of split 'train', too few for lookback=96 and horizon=96"
    ):
        make(source=table(20, "short.csv")).count("train")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"source": "ETTh3"}, r"source='ETTh3': no such file; did you mean 'ETTh"),
        ({"lookback": 90}, r"lookback=90: expected a multiple of patch=8"),
        ({"lookback": 16}, r"lookback=16: expected a multiple of patch=8 of at least 24"),
        ({"horizon": 0}, "horizon=0: expected at least 1"),
    ],
)
def test_invalid_config(config, message):
    with pytest.raises(ValueError, match=message):
        make(**config)


def test_horizons_of_the_test():
    with pytest.raises(ValueError, match="test_horizon=97: expected at most horizon=96"):
        make(test_horizon=[24, 97]).test_conditions()


ETT_COLUMNS = "date,HUFL,HULL,MUFL,MULL,LUFL,LULL"


def answered(monkeypatch, folder, content):
    """The cache in ``folder``, and a network that answers all with ``content``; returns what is asked for."""
    asked = []
    monkeypatch.setattr(time_series_sets, "cache_folder", lambda: folder)
    monkeypatch.setattr(time_series_sets, "urlopen", lambda url, timeout: asked.append(url) or io.BytesIO(content))
    return asked


def test_ett_is_downloaded_once(monkeypatch, tmp_path):
    rows = 600 * 24
    content = "".join(f"{line}\n" for line in (f"{ETT_COLUMNS},OT", *["2016-07-01,1,2,3,4,5,6,7"] * rows))
    asked = answered(monkeypatch, tmp_path / "cache", content.encode())
    for _ in range(2):
        assert read_csv(time_series_sets.fetch("ETTh2")).shape == (7, rows)
    assert asked == ["https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/ETTh2.csv"]


@pytest.mark.parametrize("error", [OSError("no route"), IncompleteRead(b"date", 99)], ids=repr)
def test_ett_out_of_reach(monkeypatch, tmp_path, error):
    def unreachable(url, timeout):
        raise error

    monkeypatch.setattr(time_series_sets, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(time_series_sets, "urlopen", unreachable)
    told = rf"^ETTh1: .* is not in reach \({re.escape(str(error))}\); check the network, or name a CSV file$"
    with pytest.raises(FileNotFoundError, match=told):
        time_series_sets.fetch("ETTh1")


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ("<html>\nSign in\n</html>", r"b'<html>\nSign in\n</html>' and has 2 lines"),
        (
            f"{ETT_COLUMNS},OT\n2016-07-01,1,2,3,4,5,6,7\n",
            r"b'date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n20' and has 2 lines",
        ),
        ("", r"b'' and has 0 lines"),
    ],
)
def test_what_is_no_ett_is_not_kept(monkeypatch, tmp_path, content, got):
    """A page to sign in, and a file that was cut short."""
    answered(monkeypatch, tmp_path, content.encode())
    with pytest.raises(FileNotFoundError) as caught:
        time_series_sets.fetch("ETTh1")
    expected = f"expected {ETT_COLUMNS} and more than 14400 lines; check the network, or name a CSV file"
    url = "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/ETTh1.csv"
    assert str(caught.value) == f"ETTh1: {url} begins with {got}; {expected}" and not any(tmp_path.iterdir())


def test_which_columns_are_channels(tmp_path):
    """All but a first one of dates, or of row numbers without a name, as pandas writes it."""
    for head, first in {"date,a,b": "2016-07-01", ",a,b": "3", "a,b": "", "0,1": ""}.items():
        lines = "".join(f"{f'{first},' * bool(first)}{i},{i * i}\n" for i in range(5))
        (tmp_path / "own.csv").write_text(f"{head}\n{lines}")
        assert np.array_equal(read_csv(tmp_path / "own.csv"), [np.arange(5), np.arange(5) ** 2])


def test_a_file_of_the_stand_ins_name_is_split_as_others_are(tmp_path):
    path = tmp_path / "seasons.csv"
    path.write_text("a\n" + "".join(f"{i}\n" for i in range(20_000)))
    assert load_series(str(path)).borders["test"] == (16_000, 20_000)
