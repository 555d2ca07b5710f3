"""Models and tasks of users, beside the package: ``imports:`` of an experiment, decorators and entry points.

Every command has a process of its own, a fork where that will do: what is registered here would stay for the tests
behind.
"""

import ast
import json
import multiprocessing
import os
import pickle
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml

from lit_memory.cli import main
from lit_memory.plan.experiment import load
from lit_memory.registry import RegistrationError, discover, import_file, load_class
from lit_memory.util.code import digest, sources

pytestmark = [
    pytest.mark.usefixtures("unsaved_figures"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]

ROOT = Path(__file__).parents[1]
MODEL, TASK = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)[:2]
EXPERIMENT = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)[0]


def python(*arguments, cwd):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


def forked(folder, work, *arguments):
    """Call ``work`` in a fork of this process, in a folder; returns its exit code and all that it printed."""
    printed = folder / "printed.txt"

    def child():
        os.chdir(folder)
        with printed.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            code = work(*arguments)
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode, printed.read_text()


@pytest.fixture
def folder(tmp_path):
    """A fresh folder with the template of docs/extending.md."""
    for name, text in {"my_model.py": MODEL, "my_task.py": TASK, "mine.yaml": EXPERIMENT}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def plan():
    for spec in load("mine.yaml").at().plan():
        print(spec.arm, spec.key)
    return 0


def keys(folder):
    """Arm -> key, planned in a fork."""
    code, printed = forked(folder, plan)
    assert code == 0, printed
    return dict(line.split() for line in printed.splitlines())


QUICK = ["mine.yaml", "train.steps=4", "train.test_size=4"]


def trained_anew(folder, call):
    """The arms that the command trains the first time, again, and after a change of the model's file.

    call(): the exit code of the command and what it printed.
    """
    for changed in (False, False, True):
        if changed:
            (folder / "my_model.py").write_text(MODEL.replace("rate: float = 0.5", "rate: float = 0.25"))
        code, printed = call()
        assert code == 0, printed
        yield re.findall(r"✓ (\w+) seed 0 finished", printed)


EXPECTED = [["average", "armt"], [], ["average"]]


def test_the_template_trains_and_reports(folder, root, inline, unsaved_figures):
    """The command trains both arms, tests and reports; again it does nothing; a change of the model's file trains that
    arm anew."""
    arguments = [*QUICK, "--root", str(root)]
    assert list(trained_anew(folder, lambda: forked(folder, main, arguments))) == EXPECTED
    (verdict,) = root.glob("reports/**/verdict.json")
    assert not json.loads(verdict.read_text())["missing"]
    page = (verdict.parent / "README.md").read_text()
    assert f"lit-memory run mine.yaml train.steps=4 train.test_size=4 --root {root}" in page
    assert re.search(r"- imports: my_model\.py \w{12}, my_task\.py \w{12}\n", page)


def test_what_a_class_lacks_is_told(folder, root, inline):
    """In one line, and by its name."""
    (folder / "my_task.py").write_text(TASK.replace("def score(", "def scores("))
    code, printed = forked(folder, main, [*QUICK, "--root", str(root)])
    assert code == 1 and "NotImplementedError: Copy lacks score" in printed


@pytest.mark.slow
def test_the_template_trains_in_children(folder, root):
    """The same as a user calls it: processes that a fork server starts know the user's files."""

    def call():
        done = python("-m", "lit_memory", *QUICK, "--root", str(root), cwd=folder)
        return done.returncode, done.stdout + done.stderr

    assert list(trained_anew(folder, call)) == EXPECTED


def test_the_key_has_the_file(folder, tmp_path_factory):
    """Runs that use a class have its file in their key, with the files beside it that it imports; others have not.
    The place of the file is no part of it."""
    before = keys(folder)
    (folder / "my_model.py").write_text("import my_helper\n" + MODEL)
    (folder / "my_helper.py").write_text("FACTOR = 1")
    helped = keys(folder)
    (folder / "my_helper.py").write_text("FACTOR = 2")
    changed = keys(folder)
    assert len({before["average"], helped["average"], changed["average"]}) == 3
    # Both arms have the user's task: the model alone is no part of the other's key.
    assert before["armt"] == helped["armt"] == changed["armt"]
    moved = tmp_path_factory.mktemp("moved")
    for path in folder.glob("*.*"):
        (moved / path.name).write_bytes(path.read_bytes())
    assert keys(moved) == changed


def count_imports():
    """Prints how often a plan of eight runs imports and parses the two files of the user."""
    seen, parse = [], ast.parse
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_memory.plan.imports.import_file", lambda path: seen.append(path.name) or import_file(path))
        patch.setattr("ast.parse", lambda text, *rest, **more: seen.append("parsed") or parse(text, *rest, **more))
        specs = load("mine.yaml").at().plan(["train.lr=1e-3,2e-3,3e-3,4e-3"])
    print(len(specs), *sorted(seen))
    return 0


def test_a_plan_imports_a_file_once(folder):
    assert forked(folder, count_imports) == (0, "8 my_model.py my_task.py parsed parsed\n")


def a_child(spec, folder):
    """What a child does that knows nothing yet: it unpickles the run, and registers its classes."""
    sys.path[:] = [entry for entry in sys.path if entry != str(folder)]
    pickle.loads(spec).provide_code()
    print(load_class("model", "average").Config().rate)
    return 0


def test_a_child_registers_what_its_run_needs(folder):
    """By the files of the run; a file that has changed since the command began is told."""
    (folder / "plan.py").write_text(
        "import pickle, sys\nfrom lit_memory.plan.experiment import load\n"
        "spec = load('mine.yaml').at().plan()[0]\nopen('spec', 'wb').write(pickle.dumps(spec))"
    )
    code, printed = forked(folder, lambda: runpy.run_path("plan.py") and 0)
    assert code == 0, printed
    spec = (folder / "spec").read_bytes()
    assert forked(folder, a_child, spec, folder) == (0, "0.5\n")
    (folder / "my_model.py").write_text(MODEL.replace("0.5", "0.25"))
    with pytest.raises(RegistrationError, match=r"my_model.py has changed since the command began; give it again$"):
        raise_what(folder, spec)


def raise_what(folder, spec):
    """Raise the RegistrationError of a child."""

    def work():
        try:
            pickle.loads(spec).provide_code()
        except RegistrationError as error:
            print(error, end="")
            return 1
        return 0

    code, printed = forked(folder, work)
    if code:
        raise RegistrationError(printed)


WRONG = {
    "no file": ({"imports": ["my_modle.py"]}, {}, "my_modle.py: no such file; did you mean 'my_model.py'?"),
    "a folder": ({"imports": ["."]}, {}, "is a folder"),
    "no list": ({"imports": "my_model.py"}, {}, "expected a list of Python files, for example [my_models.py]"),
    "no registration": ({}, {"my_model.py": "x = 1"}, "my_model.py: registers nothing; expected @register_model(name)"),
    "a taken name": (
        {},
        {"my_model.py": MODEL.replace('"average"', '"armt"')},
        "model 'armt' exists already (lit_memory.models.armt:ARMT); choose another name",
    ),
    "a taken class": (
        {},
        {"my_model.py": MODEL.replace("Average(", "ARMT(")},
        "model 'average': a class ARMT exists already (lit_memory.models.armt:ARMT); rename the class",
    ),
    "no model": (
        {},
        {"my_model.py": 'from lit_memory import register_model\n@register_model("average")\nclass Average:\n  pass'},
        "my_model.py:2: Average is no model: it lacks a Config with @dataclass above it, init_state, step, logits",
    ),
    "a forgotten decorator": (
        {},
        {"my_model.py": MODEL.replace("    @dataclass\n", "")},
        "Average is no model: it lacks a Config with @dataclass above it",
    ),
    "no vocabulary": (
        {},
        {"my_model.py": MODEL.replace("class Config(BackboneConfig)", "class Config")},
        "Average is no model: it lacks vocab_size, inputs in its Config (BackboneConfig has them)",
    ),
    "no task": (
        {},
        {"my_task.py": TASK.replace("class Copy(Task)", "class Copy")},
        "Copy is no task: it lacks at, test_conditions, test_sizes",
    ),
    "a name for type checkers alone": (
        {},
        {
            "my_model.py": "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from collections.abc import Sequence\n"
            + MODEL.replace("rate: float = 0.5", "rate: float = 0.5\n        more: Sequence[int] = ()")
        },
        "model: Average.Config: name 'Sequence' is not defined; expected fields of types that YAML has",
    ),
    "a field that no YAML has": (
        {},
        {"my_model.py": MODEL.replace("rate: float = 0.5", "rate: float = 0.5\n        call: callable = print")},
        "model: Average.Config: Unexpected type annotation",
    ),
    "a number of a weight": (
        {},
        {
            "my_model.py": MODEL.replace(
                "super().__init__()", "super().__init__()\n        __import__('torch').ones(1).item()"
            )
        },
        "cannot be built; a plan builds it on torch's device meta, where a tensor has no numbers",
    ),
    "no end": (
        {},
        {"my_model.py": MODEL.replace("        super().__init__()\n", "        self.__init__(config)\n")},
        "cannot be built; it calls itself without end",
    ),
    "an error": ({}, {"my_model.py": "import math\nmath.sqroot(2)"}, "my_model.py:2: AttributeError: "),
    "an error of its package": (
        {"imports": ["pkg/m.py"]},
        {"pkg/__init__.py": "import math\nmath.sqroot(2)", "pkg/m.py": MODEL},
        "pkg/__init__.py:2: AttributeError: ",
    ),
    "an exit": ({}, {"my_model.py": "raise SystemExit(3)"}, "my_model.py:1: SystemExit: 3"),
    "no Python": ({}, {"my_model.py": "class:"}, "my_model.py:1: not Python: "),
    "no text": ({}, {"my_model.py": "\0"}, "my_model.py:1: not text"),
    "a taken module": ({"imports": ["json.py"]}, {"json.py": MODEL}, "there is another module 'json' ("),
    "no module": ({"imports": ["my-model.py"]}, {"my-model.py": MODEL}, "letters, digits and '_' before .py"),
    "not imported": ({"imports": ["my_task.py"]}, {}, "model.name: unknown model 'average'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_imports_are_told_in_a_line(folder, wrong):
    """Exit code 2, and nothing is started."""
    changes, texts, expected = WRONG[wrong]
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "mine.yaml").write_text(yaml.safe_dump(yaml.safe_load(EXPERIMENT) | changes))
    code, printed = forked(folder, main, ["mine.yaml", "--dry-run", "--root", "root"])
    assert code == 2 and printed.startswith("error: mine.yaml") and printed.count("\n") == 1, printed
    assert expected in printed


OWN_MAIN = """
import sys
from lit_memory.cli import main

if __name__ == "__main__":
    sys.exit(main(["mine.yaml", "train.steps=2", "--arms", "average", "--root", sys.argv[1]]))
"""


@pytest.mark.slow
def test_a_script_of_the_user_registers(folder, make_root):
    """A class in the file that starts the command is found by the children, too."""
    tree = yaml.safe_load(EXPERIMENT)
    del tree["imports"]
    (folder / "mine.yaml").write_text(yaml.safe_dump(tree))
    (folder / "train_it.py").write_text(MODEL + TASK + OWN_MAIN)
    done = python("train_it.py", str(make_root()), cwd=folder)
    assert not done.returncode and "average seed 0 finished" in done.stdout, done.stderr


ENTRY_POINTS = "[lit_memory.models]\n{}\n[lit_memory.tasks]\ncopying = my_task:Copy\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("average = my_model:Average", ""),
        ("armt = my_model:Average", "entry point of the package mine: model 'armt' exists already"),
        ("average = my_modle:Average", "model 'average': my_modle:Average of the package mine cannot be imported"),
    ],
)
def test_entry_points(folder, line, expected, monkeypatch):
    """An installed package adds models and tasks; one that clashes or is broken is told in a line."""
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS.format(line))
    for name, text in {"my_model.py": MODEL, "my_task.py": TASK}.items():
        (folder / name).write_text(re.sub(r"^@register.*\n", "", text, flags=re.MULTILINE))
    tree = yaml.safe_load(EXPERIMENT)
    del tree["imports"]
    (folder / "mine.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.syspath_prepend(folder)
    discover.cache_clear()
    code, printed = forked(folder, main, ["mine.yaml", "--dry-run", "--root", "root"])
    assert code == (2 if expected else 0) and (not expected or printed.count("\n") == 1), printed
    assert expected in printed
    if not expected:
        public = "from lit_memory import Average, CopyData, LitAverage; print(LitAverage(rate=0.1).hparams.rate)"
        assert forked(folder, lambda: exec(public, {}) or 0) == (0, "0.1\n")


def test_sources_are_what_a_file_imports_beside_it(tmp_path):
    """In its folder or its package, relative imports and circles included; never ours, nor what lies elsewhere."""
    package = tmp_path / "pack"
    package.mkdir()
    texts = {
        "pack/__init__.py": "",
        "pack/a.py": "from . import b\nfrom .c import x\nimport torch, lone",
        "pack/b.py": "import pack.a",
        "pack/c.py": "def f():\n    from pack.d import y",
        "pack/d.py": "",
        "pack/e.py": "",
        "lone.py": "import other, lit_memory.models, pack.e",
        "other.py": "import lone",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = [str(path.relative_to(tmp_path)) for path in sources(package / "a.py")]
    assert found == ["pack/__init__.py", "pack/a.py", "pack/b.py", "pack/c.py", "pack/d.py"]
    found = [str(path.relative_to(tmp_path)) for path in sources(tmp_path / "lone.py")]
    assert found == ["lone.py", "other.py", "pack/__init__.py", "pack/e.py"]
    before = digest(tmp_path / "lone.py")
    (tmp_path / "pack/d.py").write_text("y = 1")
    assert digest(tmp_path / "lone.py") == before
    (tmp_path / "other.py").write_text("y = 1")
    assert digest(tmp_path / "lone.py") != before


def test_annotations_may_be_text(folder):
    """As ``from __future__ import annotations`` makes them: types and choices are checked as elsewhere, and a model is
    saved and loaded."""
    text = MODEL.replace("rate: float = 0.5", 'rate: float = 0.5\n        mode: Literal["a", "b"] = "a"')
    text = "from __future__ import annotations\nfrom typing import Literal\n" + text
    (folder / "my_model.py").write_text(text)
    for change, says in {"model.mode=c": "expected one of ['a', 'b']", "model.rate=x": "'x'"}.items():
        code, printed = forked(folder, main, ["mine.yaml", change, "--arms", "average", "--dry-run", "--root", "root"])
        assert code == 2 and says in printed and printed.count("\n") == 1, printed
    saved = """
import my_model
from lit_memory.util.checks import one_of
model = my_model.Average(my_model.Average.Config(vocab_size=20, layers=1, width=32, heads=2))
model.save_pretrained("kept")
assert my_model.Average.from_pretrained("kept").config == model.config
try:
    one_of(my_model.Average.Config(vocab_size=20, mode="c"))
except ValueError as error:
    print(error)
"""
    done = python("-c", saved, cwd=folder)
    assert done.returncode == 0 and "mode='c': expected one of a, b" in done.stdout, done.stderr
    assert "import my_model  # registers average\n" in (folder / "kept/README.md").read_text()
