"""Real servers on loopback, in temporary folders: PostgreSQL, MariaDB, MLflow. Tests skip where they are absent.

``postgres``, ``mariadb`` and ``mlflow_server`` are fixtures (``conftest.py`` offers them to all tests).
"""

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

UNPRIVILEGED = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}
"""Databases refuse to run as root."""
PATIENCE = 180.0
"""Seconds that a server has to start."""


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def answers(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """A process that listens on a port of loopback, with a folder of its own."""

    settings: dict[str, str] = {}  # noqa: RUF012
    """Of its environment."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lit-memory-server-"))
        self.port, self.process = free_port(), None
        self.as_user = UNPRIVILEGED if os.geteuid() == 0 else {}
        if self.as_user:
            shutil.chown(self.folder, UNPRIVILEGED["user"], UNPRIVILEGED["group"])

    def call(self, *command: object) -> str:
        """Run a tool of the server to its end; returns what it prints."""
        settings = {"cwd": self.folder, "capture_output": True, "text": True, "check": True, **self.as_user}
        return subprocess.run(list(map(str, command)), **settings).stdout

    def start(self) -> None:
        """Start the server, or start it again on the same port, and wait until it answers."""
        with (self.folder / "log.txt").open("ab") as log:
            settings = {
                "cwd": self.folder,
                "stdout": log,
                "stderr": log,
                "env": os.environ | self.settings,
                **self.as_user,
            }
            self.process = subprocess.Popen(list(map(str, self.command())), start_new_session=True, **settings)
        deadline = time.monotonic() + PATIENCE
        while not self.ready():
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log.txt").read_text()
            time.sleep(0.1)

    def ready(self) -> bool:
        return answers(self.port)

    def stop(self) -> None:
        """End the server with all its processes, at once."""
        if self.process is not None:
            with_children = os.getpgid(self.process.pid)
            os.killpg(with_children, 9)
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Database(Server):
    """A database server; ``fresh()`` is the tracking URI of a new, empty database."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return self.create(f"tracking_{self.count}")


class Postgres(Database):
    def __init__(self, tools: Path) -> None:
        super().__init__()
        self.tools = tools
        options = ("--auth=trust", "--username=owner", "--no-sync", "--no-instructions")
        self.call(tools / "initdb", "-D", self.folder / "data", *options)

    def command(self) -> list:
        settings = ("-c", "listen_addresses=127.0.0.1", "-c", "fsync=off")
        return [self.tools / "postgres", "-D", self.folder / "data", "-p", self.port, "-k", self.folder, *settings]

    def ready(self) -> bool:
        call = [self.tools / "pg_isready", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(call, capture_output=True).returncode == 0

    def create(self, name: str) -> str:
        self.call(self.tools / "createdb", "-h", "127.0.0.1", "-p", self.port, "-U", "owner", name)
        return f"postgresql+psycopg2://owner:secret@127.0.0.1:{self.port}/{name}"


class MariaDB(Database):
    def __init__(self) -> None:
        super().__init__()
        options = ("--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db")
        self.call("mariadb-install-db", *options, f"--datadir={self.folder / 'data'}")

    def command(self) -> list:
        place = (f"--datadir={self.folder / 'data'}", f"--socket={self.folder / 'socket'}")
        return [shutil.which("mariadbd"), "--no-defaults", *place, f"--port={self.port}", "--bind-address=127.0.0.1"]

    def create(self, name: str) -> str:
        sql = f"create database {name}; grant all on {name}.* to owner@'%' identified by 'secret'"
        self.call("mariadb", "--no-defaults", f"--socket={self.folder / 'socket'}", "-u", "root", "-e", sql)
        return f"mysql+pymysql://owner:secret@127.0.0.1:{self.port}/{name}"


class MLflowServer(Server):
    """``mlflow server`` on a database: its own, or the one of ``store``."""

    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}  # noqa: RUF012

    def __init__(self, store: str = "") -> None:
        super().__init__()
        self.as_user = {}  # it reads the environment of Python, which may be root's
        self.store = store or f"sqlite:///{self.folder / 'mlflow.db'}"

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list:
        place = ("--backend-store-uri", self.store, "--artifacts-destination", self.folder / "artifacts")
        where = ("--host", "127.0.0.1", "--port", self.port, "--workers", 1)
        return [sys.executable, "-m", "mlflow", "server", *place, *where]


def postgres_tools() -> Path | None:
    """The folder of PostgreSQL's programs."""
    on_path = shutil.which("postgres")
    found = [Path(on_path).resolve().parent] if on_path else []
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in found if (folder / "initdb").is_file()), None)


@contextlib.contextmanager
def lent(server):
    """A server, started, until the block ends."""
    try:
        server.start()
        yield server
    finally:
        server.close()


def need_driver(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"no {module}: pip install 'lit-memory[servers]'")


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server."""
    tools = postgres_tools()
    if tools is None:
        pytest.skip("no PostgreSQL on this machine")
    need_driver("psycopg2")
    with lent(Postgres(tools)) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb():
    """A MariaDB server."""
    if not all(map(shutil.which, ("mariadbd", "mariadb", "mariadb-install-db"))):
        pytest.skip("no MariaDB on this machine")
    need_driver("pymysql")
    with lent(MariaDB()) as server:
        yield server


@pytest.fixture
def mlflow_server():
    """An MLflow server with an empty SQLite database."""
    with lent(MLflowServer()) as server:
        yield server


@pytest.fixture
def serve():
    """``serve(uri)``: an MLflow server on the database of a tracking URI."""
    with contextlib.ExitStack() as stack:
        yield lambda uri: stack.enter_context(lent(MLflowServer(uri)))
