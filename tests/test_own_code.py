"""Models and tasks of users, beside the package: ``imports:`` of an experiment, decorators and entry points.

What a user does runs in a process of its own: what is registered here would stay for the tests behind.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_memory.util.code import digest, sources

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy

ROOT = Path(__file__).parents[1]
MODEL, TASK = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)[:2]
EXPERIMENT = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)[0]
PLAN = """
import sys
from lit_memory.plan.experiment import load
for spec in load(sys.argv[1]).at().plan():
    print(spec.arm, spec.key)
"""


def python(*arguments, cwd):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def folder(tmp_path):
    """A fresh folder with the template of docs/extending.md."""
    for name, text in {"my_model.py": MODEL, "my_task.py": TASK, "mine.yaml": EXPERIMENT}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def keys(folder):
    """Arm -> key, planned in a new process."""
    done = python("-c", PLAN, "mine.yaml", cwd=folder)
    assert not done.returncode, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


def test_the_template_trains_and_reports(folder, make_root):
    """The command trains both arms in its children, tests and reports; the second time it does nothing, and a change
    of the model's file trains that arm anew."""
    root = make_root()
    command = [
        "-m",
        "lit_memory",
        "mine.yaml",
        "train.steps=4",
        "train.test_size=4",
        "--jobs",
        "1",
        "--root",
        str(root),
    ]
    first, second = (python(*command, cwd=folder) for _ in range(2))
    assert not first.returncode, first.stderr + first.stdout
    assert "average seed 0 finished" in first.stdout and "armt seed 0 finished" in first.stdout
    assert not second.returncode and "2 finished" in second.stdout and "seed 0 finished" not in second.stdout
    (folder / "my_model.py").write_text(MODEL.replace("rate: float = 0.5", "rate: float = 0.25"))
    third = python(*command, cwd=folder)
    assert "average seed 0 finished" in third.stdout and "armt seed 0 finished" not in third.stdout
    (verdict,) = root.glob("reports/**/verdict.json")
    assert not json.loads(verdict.read_text())["missing"]


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
    assert before["armt"] == helped["armt"] == changed["armt"]
    moved = tmp_path_factory.mktemp("moved")
    for path in folder.glob("*.*"):
        (moved / path.name).write_bytes(path.read_bytes())
    assert keys(moved) == changed


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
        "my_model.py:2: Average is no model: it lacks Config (a dataclass), init_state, step, logits",
    ),
    "an error": ({}, {"my_model.py": "import math\nmath.sqroot(2)"}, "my_model.py:2: AttributeError: "),
    "an exit": ({}, {"my_model.py": "raise SystemExit(3)"}, "my_model.py:1: SystemExit: 3"),
    "no Python": ({}, {"my_model.py": "class:"}, "my_model.py:1: not Python: "),
    "no text": ({}, {"my_model.py": "\0"}, "my_model.py:1: not text"),
    "a taken module": ({"imports": ["json.py"]}, {"json.py": MODEL}, "there is another module 'json' ("),
    "no module": ({"imports": ["my-model.py"]}, {"my-model.py": MODEL}, "letters, digits and '_' before .py"),
    "not imported": ({"imports": ["my_task.py"]}, {}, "model.name: unknown model 'average'"),
}
ERRORS = """
import os
import sys

import torch

import lit_memory.models.armt
from lit_memory.cli import main

for name in sys.argv[1:]:  # every case in a fork: they import files of the same name
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        os.chdir(name)
        code = main(["mine.yaml", "--dry-run", "--root", name])
        sys.stderr.flush()
        os._exit(code)
    print(f"code={os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", file=sys.stderr, flush=True)
"""


def test_wrong_imports_are_told_in_a_line(tmp_path):
    """One line each, exit code 2, and nothing is started."""
    for i, (changes, texts, _) in enumerate(WRONG.values()):
        (case := tmp_path / str(i)).mkdir()
        for name, text in {"my_model.py": MODEL, "my_task.py": TASK, **texts}.items():
            (case / name).write_text(text)
        (case / "mine.yaml").write_text(yaml.safe_dump(yaml.safe_load(EXPERIMENT) | changes))
    done = python("-c", ERRORS, *(str(tmp_path / str(i)) for i in range(len(WRONG))), cwd=tmp_path)
    *lines, rest = re.split(r"code=(\d+)\n", done.stderr)
    assert not rest and len(lines) == 2 * len(WRONG)
    for (name, (_, _, expected)), line, code in zip(WRONG.items(), lines[::2], lines[1::2], strict=True):
        assert code == "2" and line.startswith("error: mine.yaml") and line.count("\n") == 1, (name, line)
        assert expected in line, (name, line)


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
def test_entry_points(folder, line, expected):
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
    done = python("-m", "lit_memory", "mine.yaml", "--dry-run", "--root", "root", cwd=folder)
    assert done.returncode == (2 if expected else 0), done.stderr
    assert expected in done.stderr and done.stderr.count("\n") <= 1
    if not expected:
        public = "from lit_memory import Average, CopyData, LitAverage; print(LitAverage(rate=0.1).hparams.rate)"
        assert python("-c", public, cwd=folder).stdout == "0.1\n"


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
