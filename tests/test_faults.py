"""What must not happen, whatever goes wrong: code that a file brings along is never executed, and nothing is left where it does not belong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lit_memory.cli import main
from lit_memory.config import ConfigError
from lit_memory.experiment import load, parse, parse_override

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
PROJECT = Path(__file__).parents[1]


# Security

TAGS = ["!!python/object/apply:os.mkdir [PROOF]", "!!python/object/new:os.mkdir [PROOF]", "!!python/object/apply:os.mkdir {args: [PROOF]}"]


@pytest.mark.parametrize("tag", TAGS)
def test_yaml_executes_nothing(tree, tmp_path, tag):
    proof = tmp_path / "executed"
    text = tag.replace("PROOF", str(proof))
    yaml.unsafe_load(text)
    assert proof.exists(), "the attack does not work at all"
    proof.rmdir()
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree).replace("a recalls what b forgets", text))
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(path)
    with pytest.raises(ConfigError, match="is not YAML"):
        parse_override(f"model.width={text}")
    assert not proof.exists()


def test_yaml_reads_no_environment(tree, monkeypatch):
    """The same file means the same on every machine, and a report quotes no secret."""
    monkeypatch.setenv("SECRET", "hidden")
    tree["report"]["notes"] = "${oc.env:SECRET}"
    with pytest.raises(ConfigError) as caught:
        parse(tree, "tiny.yaml")
    assert str(caught.value).startswith("tiny.yaml: report.notes: '${oc.env:SECRET}'") and "hidden" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_override("model.name=${oc.env:SECRET}")
    assert "hidden" not in str(caught.value)


def test_plans_and_reports_open_no_checkpoint(tree, root, tmp_path, make_spec, hostile_checkpoint, capsys):
    checkpoint = make_spec().folder(root) / "last.ckpt"
    proof = hostile_checkpoint(checkpoint)
    torch.load(checkpoint, weights_only=False)
    assert proof.exists(), "the attack does not work at all"
    proof.rmdir()
    before = checkpoint.read_bytes()
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree))
    for flag in ("--dry-run", "--report"):
        assert main([str(file), "--root", str(root), flag]) == 0
        assert "1 to resume" in capsys.readouterr().out
        assert not proof.exists() and checkpoint.read_bytes() == before


# Footprint

ISOLATED = """
set -e
mount --bind "$1" "$1"
mount -o remount,ro,bind /
mount --bind "$1/source" "$1/source"
mount -o remount,ro,bind "$1/source"
cd "$1/cwd"
shift
exec "$@"
"""
POISON = """
import socket

def refuse(self, address):
    if self.family != socket.AF_UNIX:
        raise OSError(101, "Network is unreachable")
    return connect(self, address)

connect, socket.socket.connect = socket.socket.connect, refuse
"""
PROBE = """
import pathlib, socket, sys
for place in sys.argv[1:]:
    try:
        pathlib.Path(place, ".lit-memory-probe").touch()
        print("wrote", place)
    except OSError:
        pass
try:
    socket.create_connection(("192.0.2.1", 80), timeout=2)
except OSError as error:
    print(error.errno)
"""


def namespaces():
    """The command that gives a process its own network, which is empty, and its own mounts; [] where the system forbids it."""
    for flags in (["-n", "-m"], ["-r", "-n", "-m"]):
        command = ["unshare", *flags, "sh", "-c"]
        try:
            if subprocess.run([*command, "mount --bind /tmp /tmp && mount -o remount,ro,bind /"], capture_output=True).returncode == 0:
                return command
        except OSError:
            break
    return []


@pytest.fixture(scope="module")
def confined(tmp_path_factory, _database):
    """``call(*argv)`` runs Python without a network, on a source tree that cannot be written to, in an empty working folder, without HOME.

    Where the system has namespaces, nothing but ``base`` can be written to. Elsewhere a poisoned socket stands for the missing
    network and permissions for the mounts, which stop everyone but root.
    """
    base = tmp_path_factory.mktemp("f")
    for name in ("cwd", "root", "tmp", "source", "poison"):
        (base / name).mkdir()
    shutil.copytree(PROJECT / "lit_memory", base / "source/lit_memory", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "run.py", base / "source")
    shutil.copy(_database, base / "root")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(base / "source"), "LIT_MEMORY_ROOT": str(base / "root"), "TMPDIR": str(base / "tmp")}
    environment |= {name: os.environ[name] for name in ("OMP_NUM_THREADS", "LD_LIBRARY_PATH") if name in os.environ}
    prefix = namespaces()
    if prefix:
        prefix = [*prefix, ISOLATED, "sh", str(base)]
    elif os.geteuid() == 0:
        pytest.skip("root may write everywhere, and this system forbids it namespaces of its own")
    else:
        (base / "poison/sitecustomize.py").write_text(POISON)
        environment["PYTHONPATH"] += f":{base / 'poison'}"
        for path in (base / "source", *(base / "source").rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)

    def call(*argv):
        return subprocess.run([*prefix, sys.executable, *argv], cwd=base / "cwd", env=environment, capture_output=True, text=True)

    yield SimpleNamespace(base=base, call=call, namespaces=bool(prefix))
    for path in (base / "source", *(base / "source").rglob("*")):
        path.chmod(0o755)


def listing(folder):
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_the_confinement_confines(confined):
    """Or the next test would pass for nothing."""
    places = [str(confined.base / "source"), str(confined.base / "source/lit_memory"), *([str(Path.home()), "/"] if confined.namespaces else [])]
    run = confined.call("-c", PROBE, *places)
    assert (run.stdout, run.stderr) == ("101\n", "")


def test_a_whole_run_writes_below_its_root_only(confined, tree, tmp_path):
    base = confined.base
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    source, before = listing(base / "source"), listing(base / "root")
    run = confined.call(str(base / "source/run.py"), str(file), "--dry-run")
    assert (run.returncode, run.stderr) == (0, "") and "2 runs: 2 new" in run.stdout
    assert os.listdir(base / "tmp") == [] and set(listing(base / "root")) - {"mlflow.db.lock"} == set(before)
    run = confined.call(str(base / "source/run.py"), str(file))
    assert (run.returncode, run.stderr) == (0, ""), run
    assert "REPRODUCED" in run.stdout.splitlines()
    assert sorted(path.name for path in (base / "root").iterdir()) == ["checkpoints", "mlflow.db", "mlflow.db.lock", "mlruns", "reports"]
    assert {path.name for path in (base / "root/reports/tiny").iterdir()} >= {"README.md", "figure.png", "table.csv", "verdict.json"}
    assert {name: sorted(os.listdir(base / name)) for name in ("cwd", "tmp")} == {"cwd": [], "tmp": []}
    assert listing(base / "source") == source


TELEMETRY = "from lit_memory import tracking; from mlflow.telemetry.utils import is_telemetry_disabled; print(is_telemetry_disabled())"


@pytest.mark.parametrize(("given", "disabled"), [({}, "True"), ({"MLFLOW_DISABLE_TELEMETRY": "false"}, "False")])
def test_telemetry_is_off_as_mlflow_sees_it(given, disabled):
    """MLflow also keeps silent under pytest and in CI; what it does elsewhere counts."""
    from mlflow.telemetry import utils

    silent = ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "PYTEST_CURRENT_TEST", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in silent} | given
    code = TELEMETRY.replace("print", "import mlflow.telemetry.utils as u; u._is_ci_env_or_testing = lambda: False; print")
    assert hasattr(utils, "_is_ci_env_or_testing"), "MLflow has changed; look again at how it decides"
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == disabled
    assert "MLFLOW_DISABLE_TELEMETRY" in (PROJECT / "README.md").read_text()
