"""The tracking URI before anything starts: its secrets, and servers that answer what no server of MLflow would."""

import base64
import contextlib
import datetime
import ipaddress
import multiprocessing
import os
import pickle
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from faults import statuses
from sqlalchemy.engine import make_url

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.run import engine
from lit_memory.run import server as server_check
from lit_memory.run.launchers.local import run_child
from lit_memory.run.tracking import Tracker
from lit_memory.run.uri import StoreURI

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
RUN = Path(__file__).parents[1] / "run.py"
WORD = "Tr0ub4dor-3"
"""The secret that nothing may show."""
PLACES = ("MLFLOW_TRACKING_URI", "LIT_MEMORY_ROOT", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
CREDENTIALS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
CERTIFICATES = ("MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@pytest.fixture
def place(write, tmp_path, monkeypatch):
    """``place(uri)``: the command's arguments, with this tracking URI in the environment."""
    for name in (*PLACES, *CREDENTIALS, *CERTIFICATES):
        monkeypatch.setenv(name, "")  # so that what the command sets is undone
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def make(uri):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        return [write(), "--root", str(tmp_path / "root")]

    return make


# Secrets

SHOWN = {
    "http://ann:{}@host:5000/path": "http://ann:***@host:5000/path",
    "https://ann:{}@[::1]:5000": "https://ann:***@[::1]:5000",
    "postgresql://ann:{}@host/db": "postgresql://ann:***@host/db",
    "postgresql+psycopg2://ann:{}@host:5432/db?sslmode=require": "postgresql+psycopg2://ann:***@host:5432/db?sslmode=require",
    "postgresql://host/db?user=ann&password={}&sslmode=require": "postgresql://host/db?user=ann&password=***&sslmode=require",
    "postgresql://ann@host/db": "postgresql://ann@host/db",
    "mysql+pymysql://ann:{}@host/db": "mysql+pymysql://ann:***@host/db",
    "mysql://ann:pa/{}@host/db": "mysql://ann:***@host/db",
    "postgresql://ann:p@{}@host/db": "postgresql://ann:***@host/db",
    "postgresql://ann:p@{}/x@host/db": "postgresql://ann:***@host/db",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3D{}%3B": "mssql+pyodbc:///?odbc_connect=***",
    "mssql+pyodbc://host/db?driver=x;PWD={}": "mssql+pyodbc://host/db?driver=***",
    "databricks://ann:{}@host": "databricks://ann:***@host",
    "http://{}@host": "http://***@host",
    "http://:{}@host": "http://:***@host",
    "http://host?token={}": "http://host?***",
    "http://host/#access_token={}": "http://host/?***",
    "http://ann:a/{}@host": "http://ann:***@host",
    "http://ann:a#{}@host": "http://ann:***@host",
    "http://ann:a?{}@host": "http://ann:***@host",
    "http://ann:1@{}@host": "http://ann:***@host",
    "http://ann:{}\n@host": "http://ann:***@host",
    "htp://ann:{}@host": "htp://ann:***@host",
    "http:/ann:{}@host": "http:***@host",
    "ann:{}@host": "ann:***@host",
    "": "",
    "folder": "folder",
    "sqlite:////data/a:b@c/my runs.db": "sqlite:////data/a:b@c/my runs.db",
}
"""URI -> the form that is shown; {} is the secret."""


@pytest.mark.parametrize("uri", SHOWN)
def test_what_is_shown_of_a_uri(uri):
    for word in (WORD, "%41%2f%3A-x", "b+c", "***", "a"):
        if "@{}@" in uri and "*" in word:
            continue
        found = StoreURI(uri.format(word))
        for text in (str(found), f"{found}", found.shown):
            assert text == SHOWN[uri]
        assert repr(found) == f"StoreURI({SHOWN[uri]!r})" and pickle.loads(pickle.dumps(found)) == found


def test_the_password_is_the_one_that_sqlalchemy_reads():
    for uri in SHOWN:
        found = StoreURI(uri.format(WORD))
        if found.scheme in ("postgresql", "mysql", "mssql") and "@{}" not in uri:
            meant = make_url(found.text)
            hidden = [meant.password, *(v for k, v in meant.query.items() if k in ("password", "odbc_connect"))]
            assert {v for v in hidden if v} <= set(found.secrets) and WORD not in found.hide(repr(hidden))


@pytest.mark.parametrize(
    ("uri", "texts"),
    {
        f"postgresql://ann:{WORD}@host/db": [
            f"Invalid database URI: 'postgresql://ann:{WORD}@host/db'. See",
            f"password={WORD} user=ann",
            f"ann:{WORD}@other:1",
            f"('{WORD}',)",
        ],
        "postgresql://ann:a%2Fb%20c@host/db": ["a/b c", "a%2Fb%20c", "x:a/b c@y"],
        "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3Dq7%2F%3B": ["DRIVER=x;PWD=q7/;", "PWD=q7/ "],
    }.items(),
)
def test_secrets_are_hidden_in_texts_of_libraries(uri, texts):
    hide = StoreURI(uri).hide
    for text in texts:
        assert "***" in hide(text)
        assert not any(secret in hide(text) for secret in (WORD, "a/b", "a%2Fb", "q7"))
    assert hide("nothing to hide, in /data/ann/host/db") == "nothing to hide, in /data/ann/host/db"


def test_a_password_that_is_no_secret_leaves_texts_readable():
    """The user, the database and the password of many a docker-compose.yml."""
    uri = StoreURI("postgresql://mlflow:mlflow@host/mlflow")
    assert uri.hide(f"cannot use {uri.text}, see /data/mlflow.db") == f"cannot use {uri}, see /data/mlflow.db"
    assert uri.shown == "postgresql://mlflow:***@host/mlflow"


def test_errors_are_cleaned_with_their_causes():
    uri = StoreURI(f"postgresql://ann:{WORD}@host/db")
    try:
        try:
            raise KeyError(f"no {uri.text}")
        except KeyError as error:
            raise RuntimeError(f"password {WORD} refused", 5) from error
    except RuntimeError as error:
        uri.clean(error)
        assert error.args == ("password *** refused", 5) and error.__cause__.args == (f"no {uri}",)


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "http://127.0.0.1:abc": "'http://127.0.0.1:abc': its port cannot be one; expected a number from 1 to 65535",
        "http://127.0.0.1:99999": "'http://127.0.0.1:99999': its port cannot be one…",
        "http://127.0.0.1:0": "'http://127.0.0.1:0': its port cannot be one…",
        "http://127.0.0.1:-1": "'http://127.0.0.1:-1': its port cannot be one…",
        "http://my host:5000": "'http://my host:5000': expected no ' ' in it; percent-encode it or take it out",
        " http://host": "' http://host': expected sqlite:///FILE or http://HOST:PORT…",
        "http://host ": "'http://host ': expected no ' ' in it…",
        "http://ho\nst": "'http://ho\\nst': expected no '\\n' in it…",
        "http://host/\x1b[31m": "'http://host/\\x1b[31m': expected no '\\x1b' in it…",
        "http://host\u2028": "'http://host\\u2028': expected no '\\u2028' in it…",
        "http://host\udcff": "'http://host\\udcff': expected no '\\udcff' in it…",
        "sqlite:///a\tb.db": "'sqlite:///a\\tb.db': expected no '\\t' in it…",
        "http://[::1": "'http://[::1': its host cannot be read; expected HOST:PORT, or [IPV6]:PORT",
        "http://a\u2100b": "'http://a\u2100b': its host cannot be read…",
        f"http://a\u2100:{WORD}@host/": "…",
        "http://:5000": "'http://:5000': names no host…",
        "http://": "'http://': names no host; expected http://HOST:PORT",
        "https://user:pass@": "'https://user:***@': names no host; expected https://HOST:PORT",
        f"http://host/?token={WORD}": "'http://host/?***': expected http://HOST:PORT/PATH and nothing behind it…",
        "http://host#": "'http://host#': expected http://HOST:PORT/PATH and nothing behind it…",
        f"http://{WORD}@host": "'http://***@host': expected http://USER:PASSWORD@HOST:PORT; a token goes to MLFLOW_TR…",
        f"http://:{WORD}@host": "'http://:***@host': expected http://USER:PASSWORD@HOST:PORT…",
        "http://ann:@host": "'http://ann:***@host': expected http://USER:PASSWORD@HOST:PORT…",
        f"http://ann:a/{WORD}@host": "'http://ann:***@host': expected %2F for '/' in a user, a password or a path",
        f"http://ann:a@{WORD}@host": "'http://ann:***@host': expected %40 for '@' in a user, a password or a path",
        f"postgresql://ann:a@{WORD}@host/db": "'postgresql://ann:***@host/db': expected %40 for '@'…",
        f"postgres://ann:{WORD}@host": "'postgres://ann:***@host': expected…; did you mean 'postgresql'?",
    }.items(),
    ids=repr,
)
def test_a_uri_that_cannot_be_one(place, capsys, text, expected):
    if "\udcff" in text and sys.getfilesystemencoding() != "utf-8":
        pytest.skip("no such bytes in this environment")
    assert main(place(text)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and WORD not in err
    first, _, rest = f"error: MLFLOW_TRACKING_URI: {expected}\n".partition("…")
    assert err.startswith(first.rstrip("\n")) and err.endswith(rest)
    assert not Path("root").exists()


def test_good_uris_pass():
    for text in (
        "",
        "http://host",
        "https://host:443/path/",
        "http://ann:p%40ss@host",
        "http://[::1]:5000",
        "http://b\u00fccher.example:5000",
        "sqlite:////my folder/x.db",
        "postgresql://ann:pa/ss@host/db",
        "postgresql:///db?host=/var/run",
        "mysql+pymysql://ann@host/db",
        "databricks",
        "databricks://profile",
    ):
        StoreURI(text).check()


def test_user_and_password_of_a_server_are_mlflows(place, monkeypatch):
    """MLflow reads them from the environment, so no text of it can quote them."""
    place("")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "bob")
    uri = StoreURI("http://ann%40x:p%2F%C3%A9+@host:5000/path/")
    uri.give_credentials()
    assert [os.environ[name] for name in CREDENTIALS] == ["ann@x", "p/\u00e9+"]
    assert uri.address == "http://host:5000/path/"
    for text in ("http://host", "postgresql://x:y@host/db", ""):
        StoreURI(text).give_credentials()
        assert StoreURI(text).address == text and os.environ["MLFLOW_TRACKING_USERNAME"] == "ann@x"


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg2", "mysql+pymysql"])
@pytest.mark.parametrize("checked", [True, False])
def test_a_database_out_of_reach_shows_no_password(place, capfd, monkeypatch, scheme, checked):
    """With a driver or without one; where nothing listens, before MLflow tries for minutes."""
    if not checked:
        monkeypatch.setattr("lit_memory.run.store.check_server", lambda uri: None)
        monkeypatch.setattr("mlflow.store.db.utils.MAX_RETRY_COUNT", 1)
    assert main(place(f"{scheme}://ann:{WORD}@127.0.0.1:1/db")) == 2
    out, err = capfd.readouterr()
    assert err.startswith("error: ML") and err.count("\n") == 1 and WORD not in out + err
    assert f"{scheme}://ann:***@127.0.0.1:1/db: " in err
    assert not checked or "no server answers (Connection refused)" in err


def test_a_child_that_fails_shows_no_password(root, make_spec, monkeypatch):
    """Its message, its log and its tag, where MLflow quotes the URI in the middle of a run."""
    spec, uri = make_spec(), StoreURI(f"postgresql://ann:{WORD}@host/db")
    tracker = Tracker(root)
    parent = tracker.parent("tiny", "default", {})

    def fails(*_):
        try:
            raise ConnectionError(f"no answer with {WORD}")
        except ConnectionError as error:
            raise RuntimeError(f"cannot use {uri.text}") from error

    def opened(*_):
        tracker.uri = uri
        return tracker

    reader, writer = multiprocessing.Pipe(duplex=False)

    def child():
        sys.stderr = sys.__stderr__  # not pytest's
        engine.Tracker, engine.train_and_test = opened, fails
        tracker.client = Tracker(root).client
        run_child(spec, root, uri, parent, {}, writer)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 1
    assert reader.recv() == {"event": "failed", "message": "RuntimeError: cannot use postgresql://ann:***@host/db"}
    log = (spec.folder(root) / "log.txt").read_text()
    assert "RuntimeError: cannot use postgresql://ann:***@host/db" in log and "no answer with ***" in log
    assert Tracker(root).find(spec.key).tags["lit.error"] == "RuntimeError: cannot use postgresql://ann:***@host/db"
    assert holding(WORD, root) == []


def holding(word, folder):
    """Every file below a folder with the bytes of a word, in base64 too."""
    words = (word.encode(), base64.b64encode(f"ann:{word}".encode()))
    return [path for path in folder.rglob("*") if path.is_file() and any(w in path.read_bytes() for w in words)]


SERVE = """
import sys
import os
os.environ["_MLFLOW_SERVER_FILE_STORE"] = sys.argv[1]
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from mlflow.server import app

class Quiet(WSGIRequestHandler):
    def log_message(self, *args): pass

class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

def guarded(environ, start):
    if environ.get("HTTP_AUTHORIZATION") != sys.argv[2]:
        start("401 Unauthorized", [("WWW-Authenticate", "Basic"), ("Content-Length", "0")])
        return [b""]
    return app(environ, start)

server = make_server("127.0.0.1", 0, guarded, Server, Quiet)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def guarded_server(root, tmp_path):
    """The port of a real MLflow server that asks for the user ann and her password."""
    header = "Basic " + base64.b64encode(f"ann:{WORD}/@".encode()).decode()
    argv = [sys.executable, "-W", "ignore", "-c", SERVE, f"sqlite:///{root}/mlflow.db", header]
    with (tmp_path / "server.txt").open("w") as log:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, cwd=tmp_path)
    with process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def test_how_to_look_at_a_store():
    assert StoreURI("https://ann:word@host/mlflow").viewer == "https://ann:***@host/mlflow"
    assert StoreURI("sqlite:////a/mlflow.db").viewer == "mlflow ui --backend-store-uri sqlite:////a/mlflow.db"


@pytest.mark.slow
def test_user_and_password_in_the_uri_of_a_server(place, guarded_server, root, tree, tmp_path):
    """The whole command, with an arm that fails: it trains, tracks, reports, and shows the password nowhere."""
    uri = f"http://ann:{WORD}%2F%40@127.0.0.1:{guarded_server}"
    tree["arms"]["b"] = {"train.lr": 1e30, "model.gamma": "off"}
    file = tmp_path / "tiny.yaml"
    place(uri)
    file.write_text(yaml.safe_dump(tree | {"expect": []}))
    runs = tmp_path / "runs"
    argv = [sys.executable, str(RUN), str(file), "--root", str(runs)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "a seed 0 finished" in done.stdout and "failed after" in done.stderr, done.stderr
    assert f"runs     http://ann:***@127.0.0.1:{guarded_server}\n" in done.stdout
    assert WORD not in done.stdout + done.stderr
    assert sorted(statuses(root).values()) == ["FAILED", "FINISHED", "FINISHED"]
    logs = list(runs.glob("checkpoints/*/log.txt"))
    assert len(logs) == 2 and any("Traceback" in log.read_text() for log in logs)
    assert holding(WORD, runs) == [] and holding(WORD, root) == [] and (runs / "reports/tiny/README.md").is_file()
    os.environ["MLFLOW_TRACKING_URI"] = uri.replace(WORD, "wrong")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "401" in done.stderr
    assert "http://ann:***@" in done.stderr and "wrong" not in done.stderr


# Servers that answer something else

OK = b"HTTP/1.1 200 OK\r\n"


def forever(first, then, pause=0.0):
    """What a server sends: ``first``, then ``then`` without end."""

    def parts(stop):
        yield first
        while not stop.wait(pause):
            yield then

    return parts


HOSTILE = {
    "SSH": (b"SSH-2.0-OpenSSH_9.6\r\n", "what answers speaks no HTTP (BadStatusLine: SSH-2.0-OpenSSH_9.6"),
    "nothing": (b"", "no server answers (Remote end closed connection without response)"),
    "silence": (forever(b"", b"", 0.1), "no server answers (timed out)"),
    "drip": (forever(OK, b"X", 0.1), "no server answers (timed out)"),
    "dripping body": (forever(OK + b"Content-Length: 9999\r\n\r\n", b"X", 0.1), "no server answers (timed out)"),
    "300 headers": (
        OK + b"".join(b"X-%d: y\r\n" % i for i in range(300)) + b"\r\n{}",
        "what answers speaks no HTTP (HTTPException: got more than 100 headers)",
    ),
    "endless status line": (forever(b"HTTP/1.1 200 ", b"A" * 4096), "what answers speaks no HTTP (LineTooLong"),
    "endless header": (forever(OK + b"X: ", b"A" * 4096), "what answers speaks no HTTP (LineTooLong"),
    "endless headers": (forever(OK, b"X: y\r\n"), "what answers speaks no HTTP (HTTPException"),
    "endless 100": (forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "no server answers (timed out)"),
    "endless body": (forever(OK + b"\r\n", b"A" * 65536), "its answer has more than 10,000,000 bytes"),
    "endless chunks": (
        forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"8000\r\n" + b"A" * 0x8000 + b"\r\n"),
        "its answer has more than 10,000,000 bytes",
    ),
    "endless 404": (forever(b"HTTP/1.1 404 No\r\n\r\n", b"A" * 65536), "its answer has more than 10,000,000 bytes"),
    "wrong chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "speaks no HTTP (InvalidChunkLength"),
    "cut body": (OK + b"Content-Length: 100\r\n\r\n{}", "what answers speaks no HTTP (IncompleteRead"),
    "wrong gzip": (OK + b"Content-Encoding: gzip\r\n\r\n{}", "no server answers"),
    "status that is none": (b"HTTP/1.1 abc OK\r\n\r\n", "what answers speaks no HTTP (BadStatusLine"),
    "redirects in a circle": (
        b"HTTP/1.1 302 Go\r\nConnection: close\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
        "no server answers (Exceeded 30 redirects",
    ),
    "redirect to a file": (b"HTTP/1.1 302 Go\r\nLocation: file:///etc/passwd\r\n\r\n", "No connection adapters"),
    "redirect to nonsense": (b"HTTP/1.1 302 Go\r\nLocation: http://[\r\n\r\n", "no server answers"),
    "500": (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", "the server answers 500 Oh; expected an MLflow server"),
    "page": (OK + b"Content-Length: 13\r\n\r\n<html></html>", "not in a valid JSON format"),
    "list": (OK + b"Content-Length: 2\r\n\r\n[]", "cannot use"),
    "other object": (OK + b'Content-Length: 18\r\n\r\n{"experiments": 5}', "cannot use"),
    "other objects": (OK + b'Content-Length: 20\r\n\r\n{"experiments": [5]}', "cannot use"),
    "nested": (OK + b"Content-Length: 200000\r\n\r\n" + b'{"a":' * 40000, "cannot use"),
    "404": (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "cannot use"),
}
"""What a server sends to everybody, and what the user is told."""


@pytest.fixture
def answering(monkeypatch):
    """``answering(content, context)``: the port of a server that sends this, over TLS with a context."""
    stop, sockets, threads = threading.Event(), [], []

    def answer(connection, content, context):
        with contextlib.suppress(OSError), connection:
            connection.settimeout(5)
            speaks_http = context or connection.recv(1, socket.MSG_PEEK).isalpha()
            if context:
                connection = context.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as request:
                lines = iter(request.readline, b"\r\n") if speaks_http else ()
                length = [int(line.split(b":")[1]) for line in lines if b"Length:" in line]
                request.read(*length or [0])  # closing with something unread would be a reset
                for part in content(stop) if callable(content) else [content]:
                    connection.sendall(part)

    def serve(content, context=None):
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    thread = threading.Thread(target=answer, args=(listener.accept()[0], content, context))
                    thread.start()
                    threads.append(thread)

        thread = threading.Thread(target=accept)
        thread.start()
        threads.append(thread)
        return listener.getsockname()[1]

    yield serve
    stop.set()
    for listener in sockets:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_is_told_in_one_line(place, answering, capfd, monkeypatch, name):
    content, says = HOSTILE[name]
    monkeypatch.setattr(server_check, "TIMEOUT", 1.0 if "timed out" in says else 5.0)
    uri = f"http://127.0.0.1:{answering(content)}"
    argv = place(uri)
    start = time.monotonic()
    assert main([*argv, "--dry-run"]) == 2
    took = time.monotonic() - start
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 1100, err
    assert uri in err and says in err and took < 10, (err, took)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silence", "drip", "endless 100"])
def test_a_server_has_ten_seconds_with_the_start_of_the_command(place, answering, name):
    """As a process of its own, with the time limit that users have."""
    argv = place(f"http://127.0.0.1:{answering(HOSTILE[name][0])}")
    start = time.monotonic()
    done = subprocess.run([sys.executable, str(RUN), *argv], capture_output=True, text=True, timeout=60)
    took = time.monotonic() - start
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "(timed out)" in done.stderr
    assert took < 15  # 10 on a machine that does nothing else
    assert not Path("root").exists()


def test_a_work_that_takes_too_long():
    release = threading.Event()
    with pytest.raises(TimeoutError):
        server_check.within(0.05, release.wait)
    release.set()
    assert server_check.within(5, lambda: 7) == 7
    with pytest.raises(KeyError, match="x"):
        server_check.within(5, lambda: {}["x"])


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate for 127.0.0.1 with its key, in one file."""
    x509 = pytest.importorskip("cryptography.x509", reason="makes the certificate")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    pem, formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    secret = key.private_bytes(pem, formats, serialization.NoEncryption())
    (tmp_path / "server.pem").write_bytes(secret + made.public_bytes(pem))
    return tmp_path / "server.pem"


EMPTY = OK + b"Content-Length: 2\r\n\r\n{}"
"""The answer of a server of MLflow without experiments."""


def test_a_self_signed_certificate(place, answering, certificate, capfd, monkeypatch):
    """One line that names the variables; with either of them the check passes, as MLflow's own calls do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    uri = f"https://127.0.0.1:{answering(EMPTY, context)}"
    argv = place(uri)
    assert main([*argv, "--dry-run"]) == 2
    assert re.fullmatch(
        rf"error: MLFLOW_TRACKING_URI: {uri}: the server's certificate is not trusted \(self.signed certificate\); "
        r"set MLFLOW_TRACKING_SERVER_CERT_PATH or REQUESTS_CA_BUNDLE to a .pem file with it or its authority\n",
        capfd.readouterr().err,
    )
    for variable in ("MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(certificate))
            server_check.check_server(StoreURI(uri))
            assert Tracker(Path("root"), uri).client.search_experiments() == []
    monkeypatch.setenv("MLFLOW_TRACKING_INSECURE_TLS", "true")
    server_check.check_server(StoreURI(uri))
    for variable, value, says in (
        ("MLFLOW_TRACKING_SERVER_CERT_PATH", "no/such.pem", "no/such.pem"),
        ("REQUESTS_CA_BUNDLE", __file__, "no server answers"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=says):
            patch.setenv(variable, value)
            patch.delenv("MLFLOW_TRACKING_INSECURE_TLS")
            server_check.check_server(StoreURI(uri))


def test_tls_where_there_is_none(answering, place):
    place("")
    with pytest.raises(ConfigError, match=r"https://127.0.0.1:\d+: no server answers \(.*wrong version number"):
        server_check.check_server(StoreURI(f"https://127.0.0.1:{answering(EMPTY)}"))
