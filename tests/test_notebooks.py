"""The notebooks of docs/notebooks run from the first cell to the last."""

import json
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs/notebooks"
BOOKS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.ipynb"))}
SLOW = {"tutorial"}
"""It trains through the command, in processes of its own."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in BOOKS])
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = {"__name__": "notebook"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*no accelerator")
        for cell in BOOKS[name]["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}.ipynb {cell['id']}", "exec"), page)
    if name == "tutorial":
        assert page["verdict"]["verdict"] == "INCONCLUSIVE"


def test_notebooks_are_kept_without_output():
    """What a cell printed belongs to the machine where it ran. Every notebook begins with its title."""
    assert len(BOOKS) == 3
    for book in BOOKS.values():
        assert book["cells"][0]["source"][0].startswith("# ")
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book["cells"])
