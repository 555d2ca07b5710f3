"""Files of code that users bring along: the names by which they are imported, and their digest. Standard library only.

A file is an ordinary module: its folder (or, of a file in a package, the folder of the package) joins the end of
``sys.path``, so that it can import the files beside it, pickled objects find it in every process, and no file of a user
stands in the way of an installed module.
"""

import ast
import hashlib
import importlib
import sys
import traceback
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from lit_memory.util import files
from lit_memory.util.inputs import read_text

OURS = "lit_memory"


def top_folder(path: Path) -> Path:
    """The folder from which a file is imported: its own, or that of the package that it lies in."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def module_name(path: Path) -> str:
    """The name by which a file is imported: "my_models", or "my_package.models" of a file in a package."""
    parts = path.relative_to(top_folder(path)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def importable(path: Path) -> str:
    """The name by which a Python file can be imported from now on. Raises ValueError where that is another module's."""
    name, folder = module_name(path), str(top_folder(path))
    if path.suffix != ".py" or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("expected a Python file with a name of letters, digits and '_' before .py")
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    loaded, found = sys.modules.get(name), None if name in sys.modules else found_spec(path, name)
    origin = getattr(loaded, "__file__", None) or (found and found.origin) or "built into Python"
    if Path(origin).absolute() != path:
        raise ValueError(f"there is another module {name!r} ({origin}); rename the file")
    return name


def found_spec(path: Path, name: str) -> ModuleSpec | None:
    """``find_spec`` of a file's name, which imports the package that it lies in. Raises ValueError for whatever the
    code of that raises."""
    try:
        return find_spec(name)
    except (Exception, SystemExit) as error:
        where = place(error, path.with_name("__init__.py"))
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from None


def place(error: BaseException, path: Path) -> str:
    """Where in a file an error was raised, or went through: "my_models.py:12"; the file alone where it did not."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{path}:{lines[-1]}" if lines else str(path)


def digest(path: Path) -> str:
    """Digest of a file and of all files beside it that it imports; where they lie is no part of it.

    Raises ValueError for a file that is no Python.
    """
    top, parts = top_folder(path), hashlib.sha256()
    for file in sources(path):
        parts.update(f"{file.relative_to(top).as_posix()}\0{files.digest(file)}\0".encode())
    return parts.hexdigest()


def sources(path: Path) -> list[Path]:
    """A Python file and the files beside it that it imports, those that they import, and so on.

    "Beside" is the same package, or the same folder; of the folder of installed packages it is the file alone. Raises
    ValueError for one that is no Python.
    """
    found, waiting = set[Path](), [path]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += beside(file)
    return sorted(found)


def beside(path: Path) -> Iterator[Path]:
    """The files that one imports from its own package or folder."""
    top = top_folder(path)
    package = path.relative_to(top).parts[:-1]
    try:
        names = imported(read_text(path), package)
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    for parts in names:
        own = parts[0] == package[0] if package else "site-packages" not in top.parts and parts[0] != OURS
        for length in range(1, len(parts) + 1) if own else ():
            place = top.joinpath(*parts[:length])
            yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


@lru_cache(maxsize=256)
def imported(text: str, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The dotted names that a file imports, as their parts: of ``from a import b`` a.b, which may be a module. The same
    text is parsed once: every run of a plan asks for it.

    package: of the file, where relative imports begin. Raises SyntaxError.
    """
    found: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += (tuple(alias.name.split(".")) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = (*above, *(node.module.split(".") if node.module else ()))
            found += ((*start, alias.name) for alias in node.names)
    return found
