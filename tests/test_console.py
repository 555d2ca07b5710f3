"""``lit-memory``: the command with words, its template, and what a wheel brings along."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from lit_memory.cli import main
from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import load
from lit_memory.plan.measured import check_report
from lit_memory.run.options import WORDS, flags_of, parse_options, parser
from lit_memory.util import provenance

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("run x.yaml a=1 --jobs 2", "x.yaml a=1 --jobs 2"),
        ("list", "--list"),
        ("report x.yaml --scale gpu", "--report x.yaml --scale gpu"),
        ("gallery --root r", "--gallery --root r"),
        ("new mine", "--new mine"),
    ],
)
def test_words_are_flags(words, flags):
    assert flags_of(words.split()) == flags.split()


def test_every_word_has_its_flag():
    flags = {option for action in parser()._actions for option in action.option_strings} | {""}
    assert {flag for flag, _ in WORDS.values()} <= flags


def test_the_help_names_every_word(capsys):
    assert main([], words=True) == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {word} " in shown for word in WORDS)


def test_a_wrong_word_is_told(capsys):
    assert main(["rnu", "x"], words=True) == 2
    assert capsys.readouterr().err == "error: command line: rnu: unknown command; did you mean 'run'?\n"


def test_new_writes_an_experiment(tmp_path, monkeypatch, capsys):
    """It plans as it is and with its last lines switched on, and never replaces a file."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"], words=True) == 0
    assert capsys.readouterr().out == "mine.yaml; start it: lit-memory run mine\n"
    text = Path("mine.yaml").read_text()
    lines = text.replace("# paper:", "paper:").replace("# requires:", "requires:").replace("# expect:", "expect:")
    Path("claim.yaml").write_text(lines)
    for name, claims in {"mine": [], "claim": ["armt[last] > rmt[last]"]}.items():
        experiment = load(f"{name}.yaml").at()
        check_report(experiment, experiment.plan())
        assert experiment.experiment == "mine" and experiment.expect == claims
    assert parse_options(["mine"]).experiment == "mine.yaml"
    for name, reason in {"mine": "mine.yaml exists already", "../x": "expected letters"}.items():
        assert main(["new", name], words=True) == 2
        assert reason in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == text


def test_what_a_wheel_declares():
    """The script, the marker of types, the template, and the experiments outside of the package."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["lit-memory"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))
    own = project["tool"]["setuptools"]["package-data"]["lit_memory"]
    assert {"py.typed", "run/template.yaml"} <= set(own) and all(list((ROOT / "lit_memory").glob(p)) for p in own)
    assert project["tool"]["setuptools"]["data-files"] == {"share/lit-memory/experiments": ["experiments/*.yaml"]}
    assert provenance.PROJECT == ROOT and provenance.IS_CHECKOUT


INSTALLED = """
import sys
from pathlib import Path
from lit_memory.__main__ import console
from lit_memory.util import provenance
assert not provenance.IS_CHECKOUT
provenance.PROJECT = Path(sys.argv.pop(1)) / "share/lit-memory"
import lit_memory.report.catalogue
console()
"""


@pytest.mark.slow
def test_a_wheel_has_its_experiments(tmp_path):
    """Unpacked elsewhere, ``lit-memory list`` shows them, and runs go below the folder in which it is called."""
    source = tmp_path / "source"
    kept = ("pyproject.toml", "README.md", "run.py", "LICENSE")
    source.mkdir()
    for name in (name for name in kept if (ROOT / name).exists()):
        shutil.copy(ROOT / name, source)
    for name in ("lit_memory", "experiments"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    made = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(source / made.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(tmp_path / "site")
    (data,) = (tmp_path / "site").glob("*.data/data")
    (tmp_path / "cwd").mkdir()
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}

    def call(*words):
        command = [sys.executable, "-c", INSTALLED, str(data), *words]
        return subprocess.run(command, cwd=tmp_path / "cwd", env=environment, capture_output=True, text=True)

    listed = call("list")
    assert "armt_ablation_gamma" in listed.stdout, listed.stderr
    planned = call("run", "armt_ablation_gamma", "--dry-run")
    assert "20 runs: 20 new" in planned.stdout, planned.stderr
    assert "lit_memory/py.typed" in wheel.namelist()
    with pytest.raises(ConfigError):
        load(tmp_path / "cwd/armt_ablation_gamma.yaml")
    assert yaml.safe_load((data / "share/lit-memory/experiments/armt_rewrite.yaml").read_text())["experiment"]
