"""What pyproject.toml declares."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import lit_memory

PACKAGE = Path(lit_memory.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow", "fla": "flash-linear-attention"}
"""Import name -> name on PyPI, where they differ by more than case, "_" and "-"."""


def third_party(text):
    """Names of the packages from elsewhere that a file imports, inside functions as well."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"lit_memory"}


def named(requirement):
    """Normalized name and versions of a requirement."""
    name, versions = re.fullmatch(r"([\w.-]+)(?:\[.*\])?(.*)", requirement).groups()
    return name.lower().replace("_", "-"), versions


def declared(requirements):
    """Normalized names of requirements."""
    return {named(text)[0] for text in requirements}


def test_every_import_is_declared():
    """As a dependency or in an extra; what another package happens to bring along may go."""
    names = set().union(*(third_party(path.read_text()) for path in PACKAGE.rglob("*.py")))
    needed = {DISTRIBUTIONS.get(name, name).lower().replace("_", "-") for name in names}
    known = declared(PROJECT["dependencies"])
    for requirements in PROJECT["optional-dependencies"].values():
        known |= declared(requirements)
    assert {"torch", "numpy", "pyyaml"} <= needed <= known, needed - known


def test_the_scan_sees_imports_in_functions():
    code = "import os, yaml\nfrom lit_memory import cli\ndef f():\n    from sqlalchemy.exc import DatabaseError"
    assert third_party(code) == {"yaml", "sqlalchemy"}
    assert declared(["PyYAML>=6,<7", "huggingface_hub[cli] >= 1"]) == {"pyyaml", "huggingface-hub"}


def locked():
    """The file that ``uv lock`` wrote."""
    return tomllib.loads((PACKAGE.parent / "uv.lock").read_text())["package"]


def test_lock_is_of_this_project_file():
    """After a change of dependencies: ``uv lock``."""
    (ours,) = (package for package in locked() if package["name"] == PROJECT["name"])
    assert ours["version"] == PROJECT["version"]
    known = {
        (need["name"], need.get("specifier", ""), need.get("marker", "")) for need in ours["metadata"]["requires-dist"]
    }
    groups = {"": PROJECT["dependencies"]} | {f"extra == '{e}'": r for e, r in PROJECT["optional-dependencies"].items()}
    wanted = {(*named(text), marker) for marker, requirements in groups.items() for text in requirements}
    assert known == wanted


def test_lock_names_no_place_but_pypi():
    text = (PACKAGE.parent / "uv.lock").read_text()
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
