"""The project's experiments by name."""

from pathlib import Path

import pytest

from lit_memory import catalogue
from lit_memory.catalogue import located
from lit_memory.cli import main
from lit_memory.config import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A project with one experiment, and a working folder beside it with files of its own."""
    monkeypatch.setattr(catalogue, "PROJECT", tmp_path / "project")
    for folder, names in {"project/experiments": ["gamma", "both"], "cwd": ["mine", "both"], "cwd/gamma": []}.items():
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / folder / f"{name}.yaml").touch()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("mine.yaml", "mine.yaml"),
        ("mine", "mine.yaml"),
        ("both", "both.yaml"),
        ("gamma", "PROJECT/gamma.yaml"),
        ("gamma.yaml", "PROJECT/gamma.yaml"),
        ("no/gamma.yaml", "no/gamma.yaml"),
    ],
)
def test_a_name_leads_to_a_file(place, text, found):
    """A file of the working folder comes first; a folder is no file; what is not there is for the reader to tell."""
    assert located(text) == Path(found.replace("PROJECT", str(place / "project/experiments")))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gama", "did you mean 'gamma'?"),
        ("gama.yaml", "did you mean 'gamma.yaml'?"),
        ("mnie.yaml", "did you mean 'mine.yaml'?"),
        ("x", "expected a file, or the name of an experiment"),
    ],
)
def test_a_wrong_name_is_told_the_nearest(place, text, hint):
    with pytest.raises(ConfigError) as caught:
        located(text)
    assert str(caught.value) == f"{text}: no such file; {hint}"


@pytest.mark.parametrize("folder", [ROOT, ROOT / "tests"])
@pytest.mark.parametrize("name", ["armt_ablation_gamma", "armt_ablation_gamma.yaml"])
def test_the_command_takes_a_name(name, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main([name, "--root", str(tmp_path), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("armt_ablation_gamma (scale cpu): 6 runs: 6 new")
