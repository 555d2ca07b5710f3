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


def declared(requirements):
    """Normalized names of requirements."""
    return {re.split(r"[^\w.-]", text)[0].lower().replace("_", "-") for text in requirements}


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
