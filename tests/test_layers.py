"""Who may import what (DESIGN, section 1), and the rules that a syntax tree can check."""

import ast
import importlib
import json
import multiprocessing
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import lit_memory

PACKAGE = Path(lit_memory.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
TEXTS = {file: path.read_text() for file, path in FILES.items()}
TREES = {file: ast.parse(text) for file, text in TEXTS.items()}

# Part of the package -> the parts that it may import, functions included. A part is a folder, or a file at the root.
ORDER = {
    "util": "",
    "registry": "util",
    "memory": "util",
    "recurrence": "util",
    "models": "util memory recurrence",
    "text": "util",
    "tasks": "util text",
    "testing": "util recurrence tasks",
    "plan": "util registry",
    "report": "util registry plan",
    "hf": "util registry text recurrence models",
    "lit": "util registry recurrence tasks",
    "run": "util registry plan report hf lit tasks",
    "cli": "util registry plan report run",
    "__init__": "util registry",
    "__main__": "util run cli",
}
# Part or file -> packages from elsewhere that it imports with itself, besides the standard library.
OUTSIDE = {
    "util": "",
    "registry": "",
    "memory": "torch",
    "recurrence": "torch",
    "memory/kernels.py": "numba numpy",
    "memory/associative_kernels.py": "numpy",
    "memory/associative_rows.py": "numpy",
    "models": "torch",
    "text": "numpy",
    "tasks": "torch numpy",
    "testing": "torch",
    "plan": "omegaconf yaml",
    "report": "",
    "hf": "torch safetensors transformers",
    "hf/harness.py": "torch lm_eval tqdm",
    "lit": "torch lightning torchmetrics",
    "run": "torch lightning filelock",
    "run/tracking.py": "mlflow filelock sqlalchemy",
    "run/display.py": "rich",
    "run/launchers/choice.py": "yaml",
    "cli": "rich",
    "__init__": "",
    "__main__": "",
}
# Files -> packages that they import inside a function, where those cost nothing until they are needed.
LATE = {
    "report/axes.py": "matplotlib",
    "report/cards.py": "PIL",
    "report/figures.py": "matplotlib",
    "report/maps.py": "matplotlib",
    "report/marks_page.py": "matplotlib",
    "report/fold.py": "numpy",
    "report/gallery.py": "jinja2",
    "report/margins.py": "numpy scipy",
    "report/results.py": "numpy",
    "report/scores.py": "numpy",
    "report/statistics.py": "numpy scipy",
    "report/views.py": "matplotlib",
    "run/frame.py": "pandas",
    "run/launchers/ray.py": "ray",
    "run/launchers/slurm.py": "submitit",
    "run/completion.py": "argcomplete",
    "run/server.py": "requests",
    "util/hub.py": "huggingface_hub",
    "tasks/babilong_sets.py": "datasets",
    "tasks/dna_sets.py": "datasets",
    "text/corpus.py": "datasets",
    "text/tokenizers.py": "tokenizers transformers",
    "registry.py": "torch",
    "util/provenance.py": "torch",
    "memory/delta.py": "fla",
    "memory/scan.py": "mamba_ssm",
    "plan/trainer.py": "lightning",
}
OPTIONAL = {
    "memory/kernels.py": "numba",
    "memory/associative_kernels.py": "numba",
    "memory/associative_rows.py": "numba",
    "hf/harness.py": "lm_eval",
}
"""Files that need an optional package -> that package. Others import them inside a function, where it is installed."""
PURE = ("memory/", "models/", "recurrence/", "tasks/", "text/", "plan/", "report/")
CLOCKS = {"time", "datetime", "random"}
SAMPLERS = {
    f"torch.{name}"
    for name in (
        "rand",
        "randn",
        "randint",
        "randperm",
        "multinomial",
        "normal",
        "bernoulli",
        "rand_like",
        "randn_like",
    )
}
GLOBAL_RNG = (
    "torch.manual_seed",
    "torch.seed",
    "torch.random.",
    "torch.cuda.manual_seed",
    "torch.set_rng_state",
    "random.",
    "np.random.",
    "numpy.random.",
)


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """Dotted names of the modules that a file imports, for type checkers too, and whether a function does it."""
    found, left = [], [(tree, False)]
    while left:
        node, inside = left.pop()
        inside |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        left += [(child, inside) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            own = str(node.module).partition(".")[0] == "lit_memory"
            names = [f"{node.module}.{a.name}" for a in node.names] if own else [str(node.module)]
        found += [(name, inside) for name in names]
    return found


def module_of(name: str) -> str:
    """The file of a dotted name below lit_memory, without its ending: of a name in a module, that module."""
    parts = name.split(".")[1:]
    while parts:
        for file in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
            if file in FILES:
                return file
        parts.pop()
    return "__init__.py"


def part_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


IMPORTS = {file: imports(tree) for file, tree in TREES.items()}
GRAPH = {
    file: {module_of(name) for name, _ in names if name.partition(".")[0] == "lit_memory"} - {file}
    for file, names in IMPORTS.items()
}
"""File -> the files that it imports, inside functions as well."""


def dotted(node: ast.expr) -> str:
    """``torch.manual_seed`` of a chain of attributes."""
    return (
        f"{dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def offences(tree: ast.AST, file: str) -> list[str]:
    """What a file does that only others may, with line numbers."""
    found, pure = [], file.startswith(PURE)
    for node in ast.walk(tree):
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        if file != "cli.py" and name in ("print", "Console", "sys.stdout.write", "sys.stderr.write"):
            found.append(f"{node.lineno}: {name} outside cli.py")
        if pure and f"{name}.".startswith(GLOBAL_RNG):
            found.append(f"{node.lineno}: {name} is global")
        if (
            file.startswith(("tasks/", "memory/"))
            and name in SAMPLERS
            and "generator" not in [k.arg for k in node.keywords]
        ):
            found.append(f"{node.lineno}: {name} without a generator")
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{node.lineno}: bare except")
    return found


def test_parts_import_lower_ones_only():
    for file, others in GRAPH.items():
        part = part_of(file)
        allowed = {part, *ORDER[part].split()}
        assert {part_of(other) for other in others} <= allowed, f"{file} imports {others}"


def test_the_order_is_one():
    """Every part stands below those that may import it, and there is no other part; few files lie at the root."""
    seen: list[str] = []
    for part, lower in ORDER.items():
        assert set(lower.split()) <= set(seen), part
        seen.append(part)
    assert {part_of(file) for file in FILES} == set(ORDER)
    assert sum("/" not in file for file in FILES) <= 8
    assert not {"models", "memory"} & set(ORDER["tasks"].split()) and "tasks" not in ORDER["models"].split()


def circle(graph, start):
    """A way along the arrows of ``graph`` from ``start`` back to it; [] where there is none."""
    ways, seen = [[start]], set()
    while ways:
        way = ways.pop()
        for other in graph[way[-1]]:
            if other == start:
                return [*way, start]
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return []


def test_no_import_comes_back():
    """Files form no circle; a package's ``__init__`` only shows what its files have."""
    assert not [way for file in FILES if (way := circle(GRAPH, file))]


def test_a_circle_is_seen():
    assert circle({"a": ["b"], "b": ["c"], "c": ["a"]}, "a") == ["a", "b", "c", "a"]
    assert circle({"a": ["b", "c"], "b": ["c"], "c": []}, "a") == []


def test_packages_from_elsewhere():
    for file, names in IMPORTS.items():
        stdlib = set(sys.stdlib_module_names) - (CLOCKS if file.startswith(PURE) else set())
        found = [(name.partition(".")[0], late) for name, late in names]
        at_import = {name for name, late in found if not late} - {"lit_memory"}
        allowed = stdlib | set(OUTSIDE.get(file, OUTSIDE[part_of(file)]).split())
        assert at_import <= allowed, f"{file} imports {at_import - allowed}"
        inside = {name for name, late in found if late} - {"lit_memory"}
        assert inside <= allowed | set(LATE.get(file, "").split()), f"{file}: {inside - allowed} inside a function"


def legend_of(file):
    """The dimensions that a file explains, with those of files of its folder that its legend refers to."""
    paragraph = (ast.get_docstring(TREES[file]) or "").partition("Shape suffixes")[2].partition("\n\n")[0]
    others = [str(Path(file).with_name(name)) for name in re.findall(r"``(\w+\.py)``", paragraph)]
    return set(re.findall(r"\b[A-Z]\b", paragraph)).union(*(legend_of(other) for other in others if other in TREES))


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith(("memory/", "models/", "recurrence/"))])
def test_legends(file):
    """Every dimension of a shape suffix is in the legend of its file."""
    named = (getattr(n, "id", getattr(n, "arg", getattr(n, "attr", None))) for n in ast.walk(TREES[file]))
    suffixes = {name: name.rpartition("_")[2] for name in named if name and "_" in name and not name.isupper()}
    legend = legend_of(file)
    shaped = {name: {*filter(str.isalpha, dims)} for name, dims in suffixes.items() if re.fullmatch("[A-Z0-9]+", dims)}
    assert not {name: dims - legend for name, dims in shaped.items() if dims - legend}


def test_sizes():
    """Files of at most 300 lines, functions of at most 40 and lines of at most 120 columns."""
    for file, text in TEXTS.items():
        assert text.count("\n") <= 300, file
        assert max(map(len, text.splitlines()), default=0) <= 120, file
        functions = [n for n in ast.walk(TREES[file]) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert not [f"{file}: {n.name}" for n in functions if n.end_lineno - n.lineno >= 40]


def test_forbidden_constructs():
    assert not [f"{file}:{offence}" for file, tree in TREES.items() for offence in offences(tree, file)]


def test_every_file_with_compiled_functions_is_in_their_names():
    """What numba keeps is called after these files, so that a change of one of them compiles anew."""
    from lit_memory.memory import kernels

    assert {file for file in FILES if "@compiled" in TEXTS[file]} == {f"memory/{name}" for name in kernels.FILES}


def test_mlflow_has_one_home():
    assert [file for table in (OUTSIDE, LATE) for file, names in table.items() if "mlflow" in names.split()] == [
        "run/tracking.py"
    ]


@pytest.mark.parametrize(
    ("file", "code", "offence"),
    [
        ("report.py", "def f():\n    print(1)", "2: print outside cli.py"),
        ("engine.py", "try:\n    pass\nexcept:\n    pass", "3: bare except"),
        ("models/x.py", "torch.manual_seed(0)", "1: torch.manual_seed is global"),
        ("tasks/x.py", "np.random.default_rng(0)", "1: np.random.default_rng is global"),
        ("tasks/x.py", "torch.randint(3, (2,))", "1: torch.randint without a generator"),
    ],
)
def test_the_checker_sees(file, code, offence):
    assert offences(ast.parse(code), file) == [offence]


def test_imports_are_told_apart():
    code = "import torch.nn as nn\nfrom lit_memory import report\nfrom lit_memory.tasks.base import Task\n"
    code += "def f():\n    import mlflow"
    assert sorted(imports(ast.parse(code))) == [
        ("lit_memory.report", False),
        ("lit_memory.tasks.base.Task", False),
        ("mlflow", True),
        ("torch.nn", False),
    ]
    assert module_of("lit_memory.tasks.base.Task") == "tasks/base.py" and module_of("lit_memory") == "__init__.py"


HEAVY = ["torch", "numpy", "lightning", "mlflow", "transformers", "matplotlib", "pandas"]
LIGHT = {"util", "registry", "plan", "report", "cli", "__init__"}
"""Parts that a wrong command line is told by in a moment, as they import nothing heavy."""
TENSORS = {"memory", "recurrence", "models", "text", "tasks", "testing"}
ALONE = """
import importlib, json, sys
seen = {}
for name in sys.argv[2:]:
    for old in [m for m in sys.modules if m.startswith("lit_memory")]:
        del sys.modules[old]
    importlib.import_module(name)
    seen[name] = [heavy for heavy in json.loads(sys.argv[1]) if heavy in sys.modules]
print(json.dumps(seen))
"""


def import_each(names):
    """The package is forgotten before each import, as in ``ALONE``."""
    for name in names:
        for old in [module for module in sys.modules if module.startswith(("lit_memory", "lm_eval"))]:
            del sys.modules[old]
        importlib.import_module(name)


def test_every_module_imports_alone_and_no_more_than_it_needs():
    """One process for all: the package is forgotten before each import, and light modules come first. Those that may
    import anything are imported in a fork of this process, which has Lightning, MLflow and transformers already."""
    names = {
        file: ".".join(["lit_memory", *Path(file).with_suffix("").parts]).removesuffix(".__init__")
        for file in FILES
        if file not in OPTIONAL or find_spec(OPTIONAL[file])
    }
    light = [name for file, name in names.items() if part_of(file) in LIGHT]
    torch_only = [name for file, name in names.items() if part_of(file) in TENSORS]
    rest = [name for name in names.values() if name not in light + torch_only]
    run = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(HEAVY), *light, *torch_only],
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(run.stdout)
    assert {*seen, *rest} == set(names.values()) and len(rest) >= 6
    fork = multiprocessing.get_context("fork").Process(target=import_each, args=(rest,))
    fork.start()
    fork.join()
    assert fork.exitcode == 0
    assert {name: seen[name] for name in light if seen[name]} == {}
    assert all(set(seen[name]) <= {"torch", "numpy"} for name in torch_only), seen
