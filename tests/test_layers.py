"""Who may import what (DESIGN, section 1), and the rules that a syntax tree can check."""

import ast
import importlib
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

import lit_memory

PACKAGE = Path(lit_memory.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}

# File or folder -> what it may import at module level besides the standard library; parts of the package by their own
# name.
RULES = {
    "__init__.py": "",
    "expect.py": "",
    "curves.py": "expect",
    "figures.py": "expect placing report",
    "files.py": "",
    "placing.py": "",
    "checkpoint.py": "filelock files",
    "markdown.py": "",
    "paper.py": "markdown",
    "report.py": "curves expect figures files markdown paper",
    "provenance.py": "",
    "registry.py": "models tasks",
    "config.py": "omegaconf checks registry",
    "places.py": "config registry",
    "experiment.py": "omegaconf yaml config curves expect registry report",
    "catalogue.py": "config expect experiment provenance",
    "launch.py": "experiment files",
    "checks.py": "",
    "seeds.py": "",
    "backbone.py": "torch checks",
    "recurrence.py": "torch",
    "memory/": "torch memory",
    "models/": "torch backbone checks memory recurrence models",
    "text/corpus.py": "files text",
    "text/lexicon.py": "",
    "text/": "numpy seeds text",
    "tasks/": "torch numpy checks files provenance registry seeds tasks text",
    "lit/": "torch lightning lit models recurrence registry tasks",
    "interop.py": "torch safetensors backbone models recurrence registry",
    "pretrained.py": "torch safetensors backbone files interop models recurrence registry",
    "hub.py": "torch transformers autoclasses interop pretrained recurrence registry",
    "autoclasses.py": "transformers",
    "tracking.py": "mlflow filelock sqlalchemy config curves experiment files registry report",
    "engine.py": "torch lightning filelock checkpoint files experiment lit pretrained registry seeds tracking",
    "job.py": "catalogue checkpoint config curves experiment files places provenance registry",
    "summary.py": "config expect experiment figures files markdown paper provenance registry report",
    "cli.py": "rich catalogue checkpoint config experiment files job launch provenance registry summary",
}
# What it may import besides inside a function, where it costs nothing until it is needed.
LAZY = {
    "figures.py": "matplotlib",
    "tracking.py": "pandas",
    "interop.py": "transformers",
    "pretrained.py": "huggingface_hub text",
    "recurrence.py": "pretrained",
    "autoclasses.py": "hub",
    "launch.py": "engine",
    "job.py": "report tracking",
}
LAZY |= {
    "tasks/babilong_sets.py": "datasets",
    "tasks/dna.py": "datasets",
    "text/corpus.py": "datasets",
    "text/tokenizers.py": "huggingface_hub tokenizers transformers",
}
LAZY |= {"registry.py": "torch", "provenance.py": "torch", "memory/scan.py": "mamba_ssm"}
PURE = (
    "memory/",
    "models/",
    "tasks/",
    "text/",
    "backbone.py",
    "recurrence.py",
    "config.py",
    "experiment.py",
    "expect.py",
    "curves.py",
    "report.py",
    "summary.py",
    "figures.py",
    "placing.py",
)
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


def imports(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Packages (and parts of lit_memory) that are imported at module level, and inside functions."""
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    found: tuple[set[str], set[str]] = set(), set()
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            names = [f"lit_memory.{a.name}" for a in node.names] if node.module == "lit_memory" else [str(node.module)]
        found[node in inside].update(name.removeprefix("lit_memory.").partition(".")[0] for name in names)
    return found


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


def rule(table: dict[str, str], file: str) -> set[str]:
    return set(next(v for k, v in table.items() if file == k or (k.endswith("/") and file.startswith(k))).split())


@pytest.mark.parametrize("file", FILES)
def test_dependency_direction(file):
    at_import, inside = imports(ast.parse(FILES[file].read_text()))
    stdlib = set(sys.stdlib_module_names) - (CLOCKS if file.startswith(PURE) else set())
    allowed = rule(RULES, file) | stdlib
    assert at_import <= allowed, f"{file} imports {at_import - allowed}"
    assert inside <= allowed | set(LAZY.get(file, "").split()), f"{file} imports {inside - allowed} inside a function"


@pytest.mark.parametrize("file", FILES)
def test_forbidden_constructs(file):
    assert not offences(ast.parse(FILES[file].read_text()), file)


def test_heavy_packages_have_one_home():
    homes = {
        "mlflow": {"tracking.py"},
        "transformers": {"interop.py", "hub.py", "autoclasses.py", "text/tokenizers.py"},
        "tokenizers": {"text/tokenizers.py"},
        "datasets": {"text/corpus.py", "tasks/babilong_sets.py", "tasks/dna.py"},
        "matplotlib": {"figures.py"},
        "lightning": {"engine.py", "lit/"},
        "rich": {"cli.py"},
    }
    for package, files in homes.items():
        assert {file for table in (RULES, LAZY) for file, names in table.items() if package in names.split()} == files
    assert not (rule(RULES, "models/") & {"tasks"} or rule(RULES, "tasks/") & {"models"})


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
    code = "import torch.nn as nn\nfrom lit_memory import report\nfrom lit_memory.tasks.base import Task\ndef f():\n    import mlflow"
    assert imports(ast.parse(code)) == ({"torch", "report", "tasks"}, {"mlflow"})


HEAVY = ["torch", "numpy", "lightning", "mlflow", "transformers", "matplotlib", "pandas"]
LIGHT = (
    "expect",
    "curves",
    "placing",
    "figures",
    "report",
    "provenance",
    "registry",
    "config",
    "experiment",
    "catalogue",
    "launch",
    "cli",
)
LIGHT += ("models", "tasks", "memory")
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
        for old in [module for module in sys.modules if module.startswith("lit_memory")]:
            del sys.modules[old]
        importlib.import_module(name)


def test_every_module_imports_alone_and_no_more_than_it_needs():
    """One process for all: the package is forgotten before each import, and light modules come first. Those that may
    import anything are imported in a fork of this process, which has Lightning, MLflow and transformers already."""
    names = [".".join(["lit_memory", *Path(file).with_suffix("").parts]).removesuffix(".__init__") for file in FILES]
    light = ["lit_memory", *(f"lit_memory.{name}" for name in LIGHT)]
    torch_only = [
        name
        for name in names
        if name not in light
        and (name.count(".") > 1 or name.endswith(("backbone", "recurrence")))
        and ".lit" not in name
    ]
    rest = [name for name in names if name not in light + torch_only]
    run = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(HEAVY), *light, *torch_only],
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(run.stdout)
    assert {*seen, *rest} == set(names) and len(rest) >= 6
    fork = multiprocessing.get_context("fork").Process(target=import_each, args=(rest,))
    fork.start()
    fork.join()
    assert fork.exitcode == 0
    assert {name: seen[name] for name in light if seen[name]} == {}
    assert all(set(seen[name]) <= {"torch", "numpy"} for name in torch_only), seen
