"""Thousands of runs, and a server that is away (slow)."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import yaml
from faults import NOLOAD, train

from benchmarks import budget
from lit_memory.plan.experiment import load
from lit_memory.registry import build, model_size
from lit_memory.run.search import FEW, search
from lit_memory.run.tracking import Tracker

pytestmark = pytest.mark.filterwarnings(NOLOAD)
PROJECT = Path(__file__).parents[1]
GRID = {"train.lr": [round(0.001 * (i + 1), 3) for i in range(10)], "model.memory_dim": [4, 6, 8, 12, 16]}
TABLES = ("runs", "tags", "params", "metrics", "latest_metrics")


def copies(database, template, specs):
    """Write runs like one that has finished: as MLflow would, in a thousandth of the time."""
    with contextlib.closing(sqlite3.connect(database)) as store, store:
        for table in TABLES:
            names = [column[1] for column in store.execute(f"pragma table_info({table})")]
            of_template = store.execute(f"select * from {table} where run_uuid = ?", (template,)).fetchall()
            for spec in specs:
                run_id = uuid.uuid5(uuid.NAMESPACE_OID, spec.key).hex
                own = {"lit.key": spec.key, "lit.seed": str(spec.seed), "lit.arm": spec.arm, "lit.point": spec.point}
                for row in of_template:
                    new = dict(zip(names, row, strict=True)) | {"run_uuid": run_id}
                    if table == "tags":
                        new["value"] = own.get(new["key"], new["value"])
                    store.execute(f"insert into {table} values ({','.join('?' * len(names))})", [*new.values()])


def timed(root, file, *flags):
    """(seconds, output) of a command in a process of its own."""
    started = time.monotonic()
    argv = [sys.executable, PROJECT / "run.py", file, "--root", root, *flags]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - started, done.stdout


@pytest.mark.slow
def test_thousands_of_runs_take_seconds(tree, tmp_path, root):
    """10,000 runs, of which 1,000 have finished. Prints the seconds; the bounds are for two busy cores."""
    big, part = tmp_path / "big.yaml", tmp_path / "part.yaml"
    for file, seeds in ((big, 100), (part, 10)):
        file.write_text(yaml.safe_dump(tree | {"experiment": file.stem, "grid": GRID, "seeds": list(range(seeds))}))
    specs = load(part).at().plan()
    train(specs[0], root)
    (run,) = search(Tracker(root).client, f"tags.`lit.key` = '{specs[0].key}'")
    copies(root / "mlflow.db", run[0].run_id, specs[1:])
    seconds = {}
    seconds["dry run of 10,000"], out = timed(root, big, "--dry-run")
    assert "10000 runs: 1000 finished, 9000 new" in out and out.count("\n") > 10_000
    seconds["report of 1,000"], reported = timed(root, part)
    assert "1000 runs: 1000 finished" in reported
    seconds["second start of it"], again = timed(root, part)
    assert again == reported
    print({name: round(took, 1) for name, took in seconds.items()})
    assert seconds["dry run of 10,000"] < 60 and seconds["report of 1,000"] < 40 and seconds["second start of it"] < 30


def test_many_keys_are_found_as_few_are(make_spec, root):
    """Searched for one by one, or in all runs of the store; and metrics read ahead are those that are read alone."""
    spec = make_spec()
    train(spec, root)
    tracker = Tracker(root)
    (few,), many = tracker.find_all([spec.key]), tracker.find_all([spec.key, *(f"{i:064}" for i in range(FEW))])
    assert few is not None and [few, *[None] * FEW] == many
    alone = [tracker.results(few, prefix) for prefix in ("test/", "valid/", "time/")]
    tracker.read_ahead([few], ("test/", "valid/", "time/"))
    assert tracker.histories and [tracker.results(few, prefix) for prefix in ("test/", "valid/", "time/")] == alone


@pytest.mark.slow
def test_a_server_that_is_away_for_a_minute_costs_no_run(tree, tmp_path, postgres, serve):
    """Eight runs at a time on MLflow's server with PostgreSQL, which is killed while they train."""
    uri = postgres.fresh()
    server, file, root = serve(uri), tmp_path / "tiny.yaml", tmp_path / "root"
    tree["base"]["train"] |= {"steps": 400, "valid_every": 20}
    file.write_text(yaml.safe_dump(tree | {"seeds": [0, 1, 2, 3]}))
    argv = [sys.executable, PROJECT / "run.py", file, "--root", root, "--jobs", 8]
    settings = {"env": os.environ | {"MLFLOW_TRACKING_URI": server.uri}, "stderr": subprocess.STDOUT, "text": True}
    first = subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, **settings)
    deadline = time.monotonic() + 300
    while not list(root.rglob("step-*.ckpt")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.5)
    server.stop()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a minute without it, unless all has ended by then
        first.wait(60)
    server.start()
    out, _ = first.communicate(timeout=600)
    assert "failed" not in out and "the tracking store does not answer" in out, out
    second = subprocess.run(list(map(str, argv)), stdout=subprocess.PIPE, **settings)
    assert second.returncode == 0 and "8 runs: 8 finished" in second.stdout, out + second.stdout

    import psycopg2

    with contextlib.closing(psycopg2.connect(uri.replace("+psycopg2", ""))) as store, store.cursor() as ask:
        ask.execute(
            "select count(*), count(distinct t.value) from tags t join runs r using (run_uuid) "
            "where t.key = 'lit.key' and r.status = 'FINISHED'"
        )
        assert ask.fetchone() == (8, 8)
        ask.execute(  # of runs: every report writes the means into the parent run
            "select count(*) from metrics m join tags t using (run_uuid) where t.key = 'lit.key' "
            "group by run_uuid, m.key, m.step having count(*) > 1"
        )
        assert ask.fetchall() == []


def test_the_budget_is_arithmetic(tree, tmp_path):
    """By hand: two runs of 6 steps of 4 contexts; one that trains nothing costs nothing, and shares what it starts
    from."""
    arms = {"a": {}, "b": {"model.gamma": "off"}, "c": {"train.init": {"run": "a"}, "train.steps": 0}}
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree | {"arms": arms}))
    specs = load(file).at().plan()
    size, length = model_size(specs[0].model)["parameters"], build("task", specs[0].task).tokens
    assert budget.tokens(specs[0]) == 6 * 4 * length and budget.tokens(specs[2]) == 0
    runs, free, largest, read, operations, hours, stored = budget.row(specs, 100.0)
    assert (runs, free, largest, read) == (3, 2, size, 2 * 24 * length)
    assert operations == pytest.approx(6 * size * read / 1e15) and hours == pytest.approx(operations / 100e-3 / 3600)
    assert stored == pytest.approx(2 * 2 * 12 * size / 1e9)
    table = budget.lines([file], "default", 100.0)
    assert len(table) == 4 and table[2].startswith("| `tiny` | 3 | 2 |") and table[3].startswith("| all | 3 | 2 |")
    assert budget.lines([file], "paper", 100.0)[2:] == ["| all | 0 | 0 | 0 | 0 | 0 | 0 | 0 |"]
