"""A tracking store that goes away: nothing is lost, nothing is there twice, and no run dies of it."""

import contextlib
import http.client
import http.server
import json
import math
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import records
import torch
from faults import statuses
from mlflow.exceptions import MlflowException

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.run import checkpoint, engine, journal, saving
from lit_memory.run.delivery import deliver, waiting
from lit_memory.run.engine import run_one
from lit_memory.run.journal import Journal, merged, read
from lit_memory.run.lease import Lease
from lit_memory.run.options import parse_options
from lit_memory.run.outbox import Outbox, Sender, sending
from lit_memory.run.search import search
from lit_memory.run.sweep import Sweep
from lit_memory.run.tracking import Tracker
from lit_memory.run.uri import StoreURI
from lit_memory.run.worklist import WorkList

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]
RUN = Path(__file__).resolve().parent.parent / "run.py"
CLOCK = ("seconds", "train_seconds", "peak_memory_mb", "time/seconds")


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def nobody():
    """The URI of a server that is not there."""
    return f"http://127.0.0.1:{free_port()}"


def rows_of(tracker, run):
    """All rows of a run, as often as the store has them."""
    found = [m for name in run.metrics for m in tracker.client.get_metric_history(run.run_id, name)]
    return sorted((m.key, m.step, str(m.value)) for m in found)


def comparable(rows):
    return [row for row in rows if row[0] not in CLOCK]


def train(spec, root, uri, send=lambda message: None):
    run_one(spec, root, uri, "", {"commit": "abc"}, send)


# The journal


def test_a_journal_adds_up(tmp_path):
    story = Journal(tmp_path)
    story.begin({"commit": "abc", "where": "here"}, {"lr": 0.1})
    story.log({"train/loss": 1.0, "valid/loss": math.inf}, 3)
    story.tag({"error": "out of memory"})
    story.end("FAILED")
    again = Journal(tmp_path)
    again.begin({"commit": "def", "where": "there"}, {"lr": 0.1})
    again.log({"train/loss": 1.0, "train/lr": 2.0}, 3)  # the first was logged before
    told = read(tmp_path)
    assert told.origin == {"commit": "abc; def", "where": "there"} and told.params == {"lr": "0.1"}
    assert [row[:3] for row in told.rows] == [("train/loss", 3, 1.0), ("valid/loss", 3, math.inf), ("train/lr", 3, 2.0)]
    assert (told.status, told.tags, told.end) == ("RUNNING", {}, os.path.getsize(tmp_path / journal.NAME))
    assert read(tmp_path, told.end).rows == [] and merged(told.origin, {"commit": "def"}) == told.origin
    assert journal.waits(tmp_path) and not journal.complete(tmp_path)


@pytest.mark.parametrize("rest", [b'{"rows": [["train/lo', b"\0" * 9, b"\0\0\n", b'{"rows": "'])
def test_half_a_line_is_no_message(tmp_path, rest):
    """As a full disk or a power cut leaves it; the next message takes its place."""
    Journal(tmp_path).log({"train/loss": 1.0}, 1)
    with (tmp_path / journal.NAME).open("ab") as file:
        file.write(rest)
    assert [row[:3] for row in read(tmp_path).rows] == [("train/loss", 1, 1.0)]
    assert journal.last(tmp_path)["rows"] == [["train/loss", 1, 1.0]]
    Journal(tmp_path).log({"train/loss": 2.0}, 2)
    assert [row[:3] for row in read(tmp_path).rows] == [("train/loss", 1, 1.0), ("train/loss", 2, 2.0)]


@pytest.mark.parametrize("bad", [b"\xff{}\n", b"17\n", b'{"rows": 3, "time": 0}\n', b'"text"\n'])
def test_a_damaged_journal_ends_where_it_is_whole(make_spec, root, bad):
    """A bad line in the middle of what is complete: the run is no longer complete, its beginning is sent, and it goes
    on."""
    spec = make_spec()
    path, story = spec.folder(root) / journal.NAME, Journal(spec.folder(root))
    story.begin({}, {})
    story.log({"train/loss": 1.0}, 1)
    whole = path.read_bytes()
    story.finish([("exact_match", 2, 0.5)], {"steps": 3})
    assert journal.complete(spec.folder(root))
    path.write_bytes(whole + bad + path.read_bytes()[len(whole) :])
    assert not journal.complete(spec.folder(root)) and waiting([spec], root) == [spec]
    tracker = Tracker(root)
    assert read(spec.folder(root)).began > 1e9
    assert deliver([spec], root, tracker) == "" and waiting([spec], root) == []
    run = tracker.find(spec.key)
    assert run.status == "KILLED" and run.metrics["train/loss"] == 1.0
    assert path.read_bytes().startswith(whole) and bad not in path.read_bytes()


# Exactly once


@pytest.fixture(autouse=True)
def no_lease_is_left(monkeypatch):
    """Nobody ends the lease of an outbox that a test uses alone; its thread would go on through later tests."""
    taken, take = [], Lease.take
    monkeypatch.setattr(Lease, "take", lambda own, before: taken.append(own) or take(own, before))
    yield
    for own in taken:
        own.end()


@pytest.fixture
def told(make_spec, root):
    """A spec whose journal has two rows, one of them no number, and the tracker of its root."""
    spec = make_spec()
    story = Journal(spec.folder(root))
    story.begin({"commit": "abc"}, {"lr": 0.1})
    story.log({"train/loss": 1.0, "valid/loss": math.nan}, 3)
    return spec, story, Tracker(root)


CALLS = [
    "create_run",
    "log_dict",
    "log_inputs",
    "log_batch",
    "create_logged_model",
    "log_outputs",
    "finalize_logged_model",
    "set_terminated",
]
"""Of the client, in the order in which a run of an experiment that is there makes them."""
EXPECTED = [("train/loss", 3, "1.0"), ("valid/loss", 3, "nan")]


def test_a_row_that_is_sent_twice_is_there_once(told, root):
    """Even where nobody asks the store first: a call that was given up may arrive much later."""
    spec, _, tracker = told
    outbox = Outbox(spec, root, lambda: tracker)
    outbox.send()
    rows = read(spec.folder(root)).rows
    for _ in range(2):
        tracker.write(outbox.run_id, [*rows, ("train/lr", 3, 0.5, rows[0][3])])
    assert rows_of(tracker, tracker.find(spec.key)) == sorted([*EXPECTED, ("train/lr", 3, "0.5")])


@pytest.mark.parametrize("applied", [True, False], ids=["answer lost", "call lost"])
@pytest.mark.parametrize("call", [*CALLS, "update_run", "set_tag"])
def test_every_call_may_fail(told, root, monkeypatch, call, applied):
    """The first, the second and so on, whether the store has done it or not; then all is there once."""
    spec, story, tracker = told
    story.finish([("exact_match", 2, 0.5)], {"steps": 3, "result/exact_match at 2": 0.5})
    original, count = getattr(tracker.client, call), [0]
    for fails in range(1, 5):

        def failing(*args, fails=fails, **kwargs):
            count[0] += 1
            result = original(*args, **kwargs) if applied or count[0] != fails else None
            if count[0] == fails:
                raise MlflowException("no answer")
            return result

        count[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(tracker.client, call, failing)
            with contextlib.suppress(MlflowException):
                Outbox(spec, root, lambda: tracker).send()
    Outbox(spec, root, lambda: tracker).send()
    run = tracker.find(spec.key)
    result = ("result/exact_match at 2", 0, "0.5")
    assert rows_of(tracker, run) == sorted([*EXPECTED, ("test/exact_match", 2, "0.5"), ("steps", 0, "3.0"), result])
    assert (run.status, run.params, run.tags["lit.commit"]) == ("FINISHED", {"lr": "0.1"}, "abc")
    (runs,) = search(tracker.client, f"tags.`lit.key` = '{spec.key}'")
    assert len(runs) == 1 and not journal.waits(spec.folder(root))
    whole = tracker.client.get_run(run.run_id)
    (model,) = tracker.client.search_logged_models([whole.info.experiment_id])
    assert [output.model_id for output in whole.outputs.model_outputs] == [model.model_id]
    assert (model.status, [(m.key, m.value) for m in model.metrics]) == ("READY", [(result[0], 0.5)])
    uses = {i.dataset.name: [tag.value for tag in i.tags] for i in whole.inputs.dataset_inputs}
    assert uses == {"associative_retrieval train": ["training"], "associative_retrieval test": ["evaluation"]}


def test_finished_is_sent_last(told, root, monkeypatch):
    spec, story, tracker = told
    story.finish([("exact_match", 2, 0.5)], {"steps": 3})
    seen = []
    for name in CALLS:
        inner = getattr(tracker.client, name)
        monkeypatch.setattr(
            tracker.client, name, lambda *a, inner=inner, name=name, **k: (seen.append(name), inner(*a, **k))[1]
        )
    Outbox(spec, root, lambda: tracker).send()
    assert seen.count("set_terminated") == 1 and seen[-1] == "set_terminated"


def test_a_run_that_another_root_finished_is_left_alone(told, root):
    """It was trained here as well, while the store was away."""
    spec, story, tracker = told
    run_id = tracker.start(spec, None, tracker.parent("tiny", "default", {}), {}, {"lr": 0.1})
    records.finish(tracker, run_id, [("exact_match", 2, 0.5)], {"steps": 3})
    before = rows_of(tracker, tracker.find(spec.key))
    story.finish([("exact_match", 2, 0.5)], {"steps": 3})
    assert deliver([spec], root, tracker) == "" and not waiting([spec], root)
    assert rows_of(tracker, tracker.find(spec.key)) == before


def test_a_run_deleted_in_the_middle_comes_back(told, root):
    spec, story, tracker = told
    outbox = Outbox(spec, root, lambda: tracker)
    outbox.send()
    tracker.client.delete_run(outbox.run_id)
    story.log({"train/loss": 2.0}, 6)
    with pytest.raises(MlflowException):
        outbox.send()
    outbox.send()
    assert rows_of(tracker, tracker.find(spec.key)) == sorted([*EXPECTED, ("train/loss", 6, "2.0")])


def test_one_run_that_is_refused_does_not_hold_up_the_others(make_spec, root, monkeypatch):
    specs, tracker = [replace(make_spec(), seed=seed) for seed in range(3)], Tracker(root)
    for spec in specs:
        story = Journal(spec.folder(root))
        story.begin({}, {"lr": 0.1})
        story.finish([("exact_match", 2, 0.5)], {"steps": 3})
    write = tracker.write

    def refusing(run_id, rows):
        if tracker.client.get_run(run_id).data.tags["lit.seed"] == "1":
            raise MlflowException("refused")
        write(run_id, rows)

    monkeypatch.setattr(tracker, "write", refusing)
    assert deliver(specs, root, tracker) == "refused" and waiting(specs, root) == [specs[1]]
    with checkpoint.lock(specs[1].folder(root)):
        assert not waiting(specs, root)  # its own process sends it


# The thread


def test_the_thread_says_once_that_the_store_is_away_and_sends_when_it_is_back(make_spec, root, monkeypatch):
    monkeypatch.setattr("lit_memory.run.outbox.FIRST_DELAY", 0.01)
    monkeypatch.setattr("lit_memory.run.outbox.LONGEST_DELAY", 0.01)
    spec, tracker, messages = make_spec(), Tracker(root), []
    back, tries, arrived = threading.Event(), threading.Semaphore(0), threading.Event()

    def connect():
        tries.release()
        if not back.is_set():
            raise MlflowException("away")
        return tracker

    outbox = Outbox(spec, root, connect)
    send = outbox.send
    monkeypatch.setattr(outbox, "send", lambda: (send(), arrived.set()))
    with sending(outbox, messages.append) as story:
        story.begin({}, {"lr": 0.1})
        story.log({"train/loss": 1.0}, 3)
        for _ in range(3):
            assert tries.acquire(timeout=30)
        back.set()
        assert arrived.wait(30)
        assert rows_of(tracker, tracker.find(spec.key)) == [("train/loss", 3, "1.0")]  # while the run goes on
        story.finish([("exact_match", 2, 0.5)], {})
    assert [m["event"] for m in messages] == ["warning"] and "does not answer (away)" in messages[0]["message"]
    assert tracker.find(spec.key).status == "FINISHED"


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), ZeroDivisionError("a mistake")])
def test_another_problem_of_the_thread_fails_the_run(make_spec, root, problem):
    def connect():
        raise problem

    with pytest.raises(type(problem)), sending(Outbox(make_spec(), root, connect), print) as story:
        story.begin({}, {})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_run_does_not_wait_for_a_store_that_hangs(make_spec, root, monkeypatch, error):
    monkeypatch.setattr("lit_memory.run.outbox.PATIENCE", 0.1)
    hang, started = threading.Event(), time.monotonic()
    with pytest.raises(type(error)), sending(Outbox(make_spec(), root, lambda: hang.wait(60)), print) as story:
        story.begin({}, {})
        raise error
    assert time.monotonic() - started < 30
    hang.set()


def test_an_interrupted_run_waits_for_a_store_that_is_slow_but_answers(make_spec, root, monkeypatch):
    """On a busy machine, say: all calls together take longer than the patience with one of them."""
    monkeypatch.setattr("lit_memory.run.outbox.PATIENCE", 6.0)
    spec, tracker, started = make_spec(), Tracker(root), time.monotonic()
    for name in ("find", "write", "tag", "end"):
        inner = getattr(tracker, name)
        monkeypatch.setattr(tracker, name, lambda *a, inner=inner: (time.sleep(2.0), inner(*a))[1])
    with pytest.raises(SystemExit), sending(Outbox(spec, root, lambda: tracker), print) as story:
        story.begin({}, {"lr": 0.1})
        story.tag({"error": "SystemExit"})
        story.end("KILLED")
        raise SystemExit(143)
    assert time.monotonic() - started > 6
    assert Tracker(root).find(spec.key).status == "KILLED" and not journal.waits(spec.folder(root))


def test_a_sender_ends_with_its_run(make_spec, root):
    tracker = Tracker(root)
    sender = Sender(Outbox(make_spec(), root, lambda: tracker), print)
    sender.thread.start()
    sender.close()
    assert not sender.thread.is_alive()


# A run, and a command


@pytest.fixture(scope="module")
def whole():
    return {}


@pytest.fixture
def undisturbed(whole, make_spec, make_root):
    """The spec, weights and rows of a run whose store was always there (trained once)."""
    spec = make_spec()
    if not whole:
        root = make_root("whole")
        tracker = Tracker(root)
        train(spec, root, tracker.uri)
        whole["weights"] = weights(spec, root)
        whole["rows"] = comparable(rows_of(tracker, tracker.find(spec.key)))
    return spec, whole


def weights(spec, root):
    return torch.load(checkpoint.saved(spec.folder(root))[0], weights_only=True)["state_dict"]


def test_a_run_needs_no_store_and_the_next_command_sends_it(undisturbed, root, write, inline, monkeypatch, capsys):
    spec, expected = undisturbed
    messages = []
    train(spec, root, nobody(), messages.append)
    warnings = [m["message"] for m in messages if m["event"] == "warning"]
    assert len(warnings) == 1 and "(Connection refused)" in warnings[0]
    train(spec, root, nobody(), lambda message: pytest.fail("trained again"))
    found = weights(spec, root)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected["weights"].items())
    argv = [write(), "--root", str(root), "--arms", "a"]
    assert main([*argv, "--dry-run"]) == 0
    assert "1 run: 1 to send" in capsys.readouterr().out
    monkeypatch.setattr(engine, "train_and_test", lambda *args: pytest.fail("trained again"))
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "sent     what waited on disk: a seed 0\n" in out and "1 run: 1 finished" in out
    tracker = Tracker(root)
    run = tracker.find(spec.key)
    assert run.status == "FINISHED" and comparable(rows_of(tracker, run)) == expected["rows"]
    assert main(argv) == 0 and "sent" not in capsys.readouterr().out


def test_a_run_of_an_interrupted_store_goes_on_where_it_was(undisturbed, root):
    """Begun with a store, gone on without, finished with one: every row once, and the tags of all three."""
    spec, expected = undisturbed
    uri = Tracker(root).uri

    def stop_at(step):
        def send(message):
            if message.get("total_step") == step and "metric" in message:
                raise KeyboardInterrupt

        return send

    handler = signal.getsignal(signal.SIGINT)
    for commit, place, step in (("first", uri, 3), ("second", StoreURI(nobody()), 6)):
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run_one(spec, root, place, "", {"commit": commit}, stop_at(step))
    run_one(spec, root, uri, "", {"commit": "third"}, lambda message: None)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores SIGINT from the first one on
    tracker = Tracker(root)
    run = tracker.find(spec.key)
    assert comparable(rows_of(tracker, run)) == expected["rows"]
    assert run.tags["lit.commit"] == "first; second; third" and "lit.error" not in run.tags


def test_fresh_forgets_the_journal(undisturbed, root, write):
    spec, _ = undisturbed
    train(spec, root, Tracker(root).uri)
    sweep = Sweep.prepare(parse_options([write(), "--root", str(root), "--arms", "a", "--fresh"]))
    work = WorkList(sweep)
    work.refresh(Tracker(root))
    work.retire(Tracker(root), work.todo())
    assert read(spec.folder(root)).rows == [] and Tracker(root).find(spec.key) is None


def test_fresh_leaves_a_run_that_another_process_trains(undisturbed, root, write):
    spec, _ = undisturbed
    train(spec, root, Tracker(root).uri)
    work = WorkList(Sweep.prepare(parse_options([write(), "--root", str(root), "--fresh"])))
    work.refresh(Tracker(root))
    before = read(spec.folder(root)).rows
    with (
        checkpoint.lock(work.specs[-1].folder(root)),
        pytest.raises(ConfigError, match=r"--fresh: another process trains b"),
    ):
        work.retire(Tracker(root), work.todo())
    assert read(spec.folder(root)).rows == before != [] and Tracker(root).find(spec.key) is not None


# Real servers


class Relay(http.server.BaseHTTPRequestHandler):
    """Passes requests on to ``server.target``, or does what ``server.mode`` says: 500, hang, or lose the answer."""

    protocol_version = "HTTP/1.1"

    def relay(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        mode = self.server.mode(self.path) if callable(self.server.mode) else self.server.mode
        self.server.seen.append((mode, self.path))
        if mode == "hang":
            self.server.released.wait(60)
            self.close_connection = True
            return  # the client has given up
        status, content = 500, b'{"error_code": "INTERNAL_ERROR", "message": "broken"}'
        if mode != "500":
            connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
            connection.close()
        if mode == "lose":
            self.close_connection = True
            return
        with contextlib.suppress(OSError):  # the client has given up
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = relay

    def log_message(self, *args):
        pass


class Server:
    """A real ``mlflow server`` that can be killed and started again."""

    def __init__(self, folder, database):
        self.folder, self.port, self.process = folder, free_port(), None
        self.database = folder / "server.db"
        self.database.write_bytes(database.read_bytes())

    @property
    def uri(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        store = f"sqlite:///{self.database}"
        argv = ["--backend-store-uri", store, "--artifacts-destination", str(self.folder / "artifacts")]
        argv += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *argv],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        wait_for(self.answers, self.process, 120)

    def answers(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True

    def kill(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def rows(self):
        """Arm -> (metric, step, value) of its run, and the statuses of all runs, read without MLflow."""
        query = "select t.value, m.key, m.step, m.value from metrics m join tags t on t.run_uuid = m.run_uuid"
        with contextlib.closing(sqlite3.connect(self.database)) as database:
            rows = database.execute(f"{query} where t.key = 'lit.arm' order by 1, 2, 3, 4").fetchall()
        return [row for row in rows if row[1] not in CLOCK], list(statuses(self.database).values())


def wait_for(condition, process=None, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came"
        assert process is None or process.poll() is None, "the process ended"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory, _database):
    """A server for the tests that leave it alive."""
    server = Server(tmp_path_factory.mktemp("server"), _database)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def relay():
    """Stands between a client and the server at ``target``."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Relay) as relay:
        relay.daemon_threads, relay.mode, relay.target, relay.seen = True, "pass", 0, []
        relay.released = threading.Event()
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        yield relay
        relay.released.set()
        relay.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["500", "hang", "lose"])
def test_a_server_with_a_bad_time(make_spec, make_root, server, relay, monkeypatch, mode):
    """It fails for the second half of the training and is well again when the run ends."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr("lit_memory.run.outbox.FIRST_DELAY", 0.1)
    relay.target = server.port
    spec = replace(make_spec(), seed={"500": 7, "hang": 8, "lose": 9}[mode])
    here, other = make_root(), make_root("other")
    tracker = Tracker(other)
    train(spec, other, tracker.uri)
    expected = comparable(rows_of(tracker, tracker.find(spec.key)))
    uri, messages = f"http://127.0.0.1:{relay.server_port}", []

    def send(message):
        messages.append(message)
        if message.get("total_step") == 3 and "metric" in message:
            relay.mode = mode
        if message["event"] == "testing":
            wait_for(lambda: any(seen == mode for seen, _ in relay.seen))
            relay.mode = "pass"

    train(spec, here, uri, send)
    remote = Tracker(here, uri)
    run = remote.find(spec.key)
    assert run.status == "FINISHED" and comparable(rows_of(remote, run)) == expected
    assert [m["event"] for m in messages].count("warning") <= 1 and not journal.waits(spec.folder(here))


@pytest.mark.slow
def test_every_answer_may_be_lost(undisturbed, root, server, relay, monkeypatch):
    """Of all that changes something, a third is done without an answer: in the end all of it is done, and once."""
    monkeypatch.setattr("lit_memory.run.outbox.FIRST_DELAY", 0.01)
    monkeypatch.setattr("lit_memory.run.outbox.LONGEST_DELAY", 0.01)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    spec, expected = undisturbed
    draw, lost = random.Random(0), []

    def mode(path):
        changes = any(name in path for name in ("runs/create", "runs/log-batch", "runs/update", "runs/set-tag"))
        if not changes or draw.random() > 1 / 3:
            return "pass"
        lost.append(path)
        return "lose"

    relay.mode, relay.target = mode, server.port
    uri = f"http://127.0.0.1:{relay.server_port}"
    train(spec, root, uri)
    tracker = Tracker(root, uri)
    for _ in range(50):
        deliver([spec], root, tracker)
    relay.mode = "pass"
    run = tracker.find(spec.key)
    assert run.status == "FINISHED" and comparable(rows_of(tracker, run)) == expected["rows"]
    assert lost and not waiting([spec], root)


@pytest.fixture
def own_server(tmp_path, _database):
    """A server for a test that kills it."""
    server = Server(tmp_path, _database)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def command(tmp_path, tree, write):
    """``command(root, uri)``: run.py with two arms, one after the other, in a session of its own."""
    tree["base"]["train"] |= {"steps": 400, "valid_every": 5}
    file, started = write(), []

    def start(root, uri):
        argv = [sys.executable, "-u", str(RUN), file, "--root", str(root), "--jobs", "1"]
        environment = os.environ | {"MLFLOW_TRACKING_URI": uri}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen(argv, cwd=tmp_path, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ended(process, seconds=300):
    out, err = process.communicate(timeout=seconds)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def checkpoints(root, arms=1):
    return lambda: len({path.parent for path in root.rglob("*.ckpt")}) >= arms


@pytest.mark.slow
def test_a_server_killed_for_good_and_for_a_while(own_server, command, tmp_path):
    """Killed in the first of two runs and not back: both are complete on disk, and the command ends soon. The next
    command sends them. A command whose server comes back during the second run sends all of it itself."""
    here, other, calm = (tmp_path / name for name in ("here", "other", "calm"))
    assert ended(command(calm, f"sqlite:///{tmp_path}/calm.db"))[0] == 0

    process = command(here, own_server.uri)
    wait_for(checkpoints(here), process)
    own_server.kill()
    killed = time.monotonic()
    code, out, err = ended(process)
    print(f"the command ended {time.monotonic() - killed:.1f} s after the server was killed: {err}")
    assert code == 1 and "(2 of 2)" in out
    warnings = [line for line in err.splitlines() if line.startswith("warning:")]
    assert "does not answer (Connection refused); runs go on" in warnings[0] and len(warnings) == 2
    assert "a seed 0, b seed 0; the same command sends it" in warnings[1]
    assert err.splitlines()[-1].startswith("error: the tracking store does not answer (Connection refused)")
    own_server.start()
    code, out, err = ended(command(here, own_server.uri))
    assert (code, err) == (0, "") and "sent     what waited on disk: a seed 0, b seed 0" in out
    assert "2 runs: 2 finished" in out and "(1 of 2)" not in out
    rows, found = own_server.rows()
    assert found.count("FINISHED") == 3 and len(rows) == len({row[:3] for row in rows})
    assert metric_lines(here) == metric_lines(calm)

    with contextlib.closing(sqlite3.connect(own_server.database)) as database, database:
        database.execute("update tags set value = 'retired' where key = 'lit.kind' and value = 'run'")
    process = command(other, own_server.uri)
    wait_for(checkpoints(other), process)
    own_server.kill()
    wait_for(checkpoints(other, 2), process)
    own_server.start()
    code, out, err = ended(process)
    assert code == 0 and len(err.splitlines()) == 1 and "runs go on" in err
    assert metric_lines(other) == metric_lines(calm)


def metric_lines(root):
    """The report's table without what the clock measured."""
    lines = (root / "reports/tiny/table.csv").read_text().splitlines()
    return [line for line in lines if "seconds" not in line]


def iter_until(file, text):
    """The lines of a file up to one that contains ``text``."""
    for line in file:
        yield line
        if text in line:
            return
    pytest.fail(f"no line says {text!r}")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_ctrl_c_while_the_server_is_away(own_server, command, relay, tmp_path, how):
    """The command ends within ten seconds, and the same command goes on."""
    root, uri = tmp_path / "root", f"http://127.0.0.1:{relay.server_port}"
    relay.target = own_server.port
    process = command(root, uri)
    wait_for(checkpoints(root), process)
    if how == "hangs":
        relay.mode = "hang"
        wait_for(lambda: "hang" in [mode for mode, _ in relay.seen], process)
    else:
        own_server.kill()
    pressed = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    lines = list(iter_until(process.stderr, "interrupted; run the same command again"))
    took = time.monotonic() - pressed  # all is closed; Python's own end takes long on a busy machine
    code, _, _ = ended(process)
    print(f"{how}: closed after {took:.1f} s, ended after {time.monotonic() - pressed:.1f} s")
    assert code == 130 and took < 10 and "Traceback" not in "".join(lines)
    if how == "refuses":
        own_server.start()
    relay.mode = "pass"
    code, out, err = ended(command(root, uri))
    assert code == 0 and "1 to resume" in out, err
    rows, _ = own_server.rows()
    assert rows and len(rows) == len({row[:3] for row in rows})


def test_an_sqlite_store_that_is_locked_takes_the_same_path(undisturbed, root, monkeypatch):
    """By a backup, say: the run is trained to its end, and what it logged arrives when the lock is gone."""
    spec, expected = undisturbed
    tracker = Tracker(root)
    with contextlib.closing(sqlite3.connect(root / "mlflow.db", isolation_level=None)) as database:
        monkeypatch.setattr("lit_memory.run.engine.Tracker", lambda *args: tracker)
        execute = "PRAGMA busy_timeout = 20000;"
        patience = lambda text: text.replace("20000", "10") if text == execute else text  # noqa: E731
        import mlflow.store.db.utils as utils

        real = utils.sql.text
        monkeypatch.setattr(utils.sql, "text", lambda text: real(patience(text)))
        database.execute("begin exclusive")
        messages = []
        train(spec, root, tracker.uri, messages.append)
        assert "database is locked" in next(m for m in messages if m["event"] == "warning")["message"]
        assert weights(spec, root) and waiting([spec], root) == [spec]
        database.execute("rollback")
    assert deliver([spec], root, Tracker(root)) == ""
    run = tracker.find(spec.key)
    assert run.status == "FINISHED" and comparable(rows_of(tracker, run)) == expected["rows"]


def test_a_journal_is_on_the_disk_before_its_checkpoint(make_spec, root, monkeypatch):
    """A checkpoint that survives a power cut has all its rows; those after it are computed again."""
    spec, seen = make_spec(), []
    monkeypatch.setattr(Journal, "sync", lambda self: seen.append(len(read(self.path.parent).rows)))
    save = saving.RunCheckpoint.save
    monkeypatch.setattr(saving.RunCheckpoint, "save", lambda self, trainer: (save(self, trainer), seen.append("saved")))
    train(spec, root, Tracker(root).uri)
    assert seen[1::2] == ["saved"] * 2 and 0 < seen[0] < seen[2]
    line = (spec.folder(root) / journal.NAME).read_text().splitlines()[-1]
    assert json.loads(line)["status"] == "FINISHED" and json.loads(line)["sent"]
