"""Files: what is no experiment, what extends what, and that any YAML library reads them."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from plans import change, check_message, plan

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.experiment import load, parse
from lit_memory.plan.measured import check_report
from lit_memory.report.marks import has_marks

FILES = sorted((Path(__file__).parents[1] / "experiments").glob("*.yaml"))

TEXTS = {
    "": "FILE: experiment: missing",
    "- a\n- b\n": "FILE: expected a mapping with the keys experiment, paper,",
    "hello\n": "FILE: hello: unknown key",
    "seeds: [0]\nseeds: [1]\n": "FILE:2: not valid YAML: found duplicate key seeds",
    "base: {model: {layers: 1, layers: 2}}": "FILE:1: not valid YAML: found duplicate key layers",
    "base:\n\tmodel: 1\n": "FILE:2: not valid YAML: found character … cannot start any token",
    "seeds: [0\n": "FILE:2: not valid YAML:",
    "seeds: *x\n": "FILE:1: not valid YAML: found undefined alias",
    "a: 1\n---\nb: 2\n": "FILE:2: not valid YAML: but found another document",
    "experiment: ${nothing}": "FILE: experiment: '${nothing}': '${' asks for an interpolation",
    "grid: !!python/object/apply:os.mkdir [OWNED]\n": "FILE:1: not valid YAML: could not determine a constructor for",
    bytes(range(256)): "FILE: not valid YAML: 'utf-8' codec can't decode",
    "paper: \u00e9".encode("latin1"): "FILE: not valid YAML: 'utf-8' codec can't decode",
    b'a: "\0"': "FILE: not valid YAML: unacceptable character",
}


@pytest.mark.parametrize("text", TEXTS)
def test_files_that_are_not_experiments(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load(path)
    check_message(caught.value, TEXTS[text], path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_extends_another(tree, tmp_path):
    """Sections, scales, paper and report key by key; arms, grid, seeds and claims as a whole, and what scales say of
    the old arms goes, as do the labels of those that are gone; a title is the file's own."""
    tree["scales"] = {"cpu": {"train.lr": 0.5, "model.width": 8, "arms.a.train.lr": 0.1}, "paper": {}}
    tree |= {"title": "What a recalls", "labels": {"a": "ARMT", "b": "without gamma"}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree))
    two = {
        "extends": "one",
        "experiment": "two",
        "base": {"task": {"pairs": 1}},
        "scales": {"cpu": {"train.lr": 0.25}},
        "arms": {"b": {}, "c": {}},
        "labels": {"c": "RMT"},
        "expect": [],
    }
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    (tmp_path / "three.yaml").write_text(
        yaml.safe_dump({"extends": "two", "experiment": "three", "seeds": [7], "paper": {"claim": "other"}})
    )
    whole = {**tree, "experiment": "three", "arms": {"b": {}, "c": {}}, "expect": [], "seeds": [7]}
    whole |= {"title": "", "labels": {"b": "without gamma", "c": "RMT"}}
    whole["base"]["task"]["pairs"] = 1
    whole["paper"]["claim"] = "other"
    whole["scales"] = {"cpu": {"train.lr": 0.25, "model.width": 8}, "paper": {}}
    assert load(tmp_path / "three.yaml") == parse(whole, str(tmp_path / "three.yaml"))


def test_a_file_elsewhere_extends_an_experiment_of_the_project(tmp_path):
    """And starts from weights of one; a file beside it comes first."""
    own = {"extends": "armt_rewrite", "experiment": "mine", "arms": ["armt"], "seeds": [0]}
    own |= {"expect": [], "verify": [], "requires": []}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(own))
    theirs = {spec.arm: spec.key for spec in load(FILES[0].parent / "armt_rewrite.yaml").at().plan() if spec.seed == 0}
    assert [spec.key for spec in load(tmp_path / "mine.yaml").at().plan()] == [theirs["armt"]]
    start = own | {"arms": {"a": {"train.init": {"run": "armt_rewrite/armt"}}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(start))
    (spec,) = load(tmp_path / "mine.yaml").at().plan()
    assert spec.start.key == theirs["armt"]
    (tmp_path / "armt_rewrite.yaml").write_text("experiment: armt_rewrite\narms: {c: {}}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: base: missing"):
        load(tmp_path / "mine.yaml").at().plan()


def test_lines_of_the_file_that_is_extended_are_told_as_such(tree, tmp_path):
    """A line about an arm that is gone is in a file that the message would not name."""
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree))
    two = {"extends": "one", "experiment": "two", "arms": ["a"], "requires": []}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    with pytest.raises(ConfigError, match=r"no arm 'b'; arms: a; it is one of one: write expect anew, \[\] for none"):
        check(tmp_path / "two.yaml")
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two | {"expect": ["b[2] > 0"]}))
    with pytest.raises(ConfigError, match=r"no arm 'b'; arms: a$"):
        check(tmp_path / "two.yaml")


def check(path):
    """What a command checks before anything else."""
    experiment = load(path).at()
    check_report(experiment, experiment.plan())


def test_these_arms_of_another_file(tree, tmp_path):
    """``arms: [b, a]``: in this order, with all that scales, grids, labels and curves of the paper say of them, and
    nothing of the others; what the file itself says of them counts."""
    tree["arms"] = {"a": {}, "b": {"model.gamma": "off"}, "bb": {}}
    of_each = {f"arms.{arm}.train.lr": rate for arm, rate in {"a": 0.1, "b": 0.2, "bb": 0.3}.items()}
    grid = {f"arms.{arm}.train.steps": [1, 2] for arm in tree["arms"]}
    tree |= {"scales": {"cpu": {"train.lr": 0.5, **of_each, "grid": grid}, "paper": None}, "grid": grid}
    tree |= {"labels": {"a": "ARMT", "bb": "RMT"}, "expect": []}
    tree["report"] |= {"paper_values": "armt_text_and_figures", "paper_curves": {"a": "ARMT", "bb": "RMT"}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree))
    two = {"extends": "one", "experiment": "two", "arms": ["b", "a"], "scales": {"cpu": {"arms.a.train.lr": 0.4}}}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    (tmp_path / "three.yaml").write_text(yaml.safe_dump({"extends": "two", "experiment": "two"}))
    rest = {"arms.a.train.steps": [1, 2], "arms.b.train.steps": [1, 2]}
    whole = {**tree, "experiment": "two", "arms": {"b": {"model.gamma": "off"}, "a": {}}, "grid": rest, "title": ""}
    cpu = {"train.lr": 0.5, "arms.a.train.lr": 0.4, "arms.b.train.lr": 0.2, "grid": rest}
    whole |= {"labels": {"a": "ARMT"}, "scales": {"cpu": cpu, "paper": {}}}
    whole["report"]["paper_curves"] = {"a": "ARMT"}
    for name in ("two", "three"):
        found, expected = load(tmp_path / f"{name}.yaml"), parse(whole, str(tmp_path / f"{name}.yaml"))
        assert found == expected and list(found.arms) == ["b", "a"]


@pytest.mark.parametrize(
    ("arms", "message"),
    {
        ("aa",): "two.yaml: arms: no arm 'aa' in one.yaml; did you mean 'a'?",
        (1,): "two.yaml: arms: no arm 1 in one.yaml; expected",
        ("a", "a"): "two.yaml: arms: 'a' is said twice; expected once",
    }.items(),
)
def test_arms_that_the_other_file_does_not_have(tree, tmp_path, arms, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("one.yaml").write_text(yaml.safe_dump(tree))
    Path("two.yaml").write_text(yaml.safe_dump({"extends": "one", "experiment": "two", "arms": list(arms)}))
    with pytest.raises(ConfigError) as caught:
        load("two.yaml")
    assert str(caught.value).startswith(message)


def test_some_arms_at_one_scale(tree, tmp_path):
    """``arms: [b, a]`` in a scale: in this order, and nothing is left there of the others."""
    tree["arms"] = {"a": {}, "b": {"model.gamma": "off"}, "bb": {}}
    cpu = {"arms": ["b", "a"], "arms.bb.train.lr": 0.3, "grid": {"arms.bb.train.steps": [1, 2]}}
    tree |= {"labels": {"a": "ARMT", "bb": "RMT"}, "expect": [], "scales": {"cpu": cpu, "paper": {}}}
    tree["report"] |= {"paper_values": "armt_text_and_figures", "paper_curves": {"a": "ARMT", "bb": "Mamba"}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree))
    whole = load(tmp_path / "one.yaml")
    found = whole.at("cpu")
    assert [spec.arm for spec in found.plan()] == ["b", "a"] and list(whole.at("paper").arms) == ["a", "b", "bb"]
    assert (found.labels, found.settings, found.grid) == ({"a": "ARMT"}, {}, {})
    assert found.report.paper_curves == {"a": "ARMT"}
    # Of a file that extends this one: the arms that both name, or all of its own.
    for arms, expected in ((["a", "bb"], ["a"]), (["bb"], ["bb"]), ({"a": {}, "c": {}}, ["a", "c"])):
        two = {"extends": "one", "experiment": "two", "arms": arms, "report": {"paper_curves": {}}}
        (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
        assert list(load(tmp_path / "two.yaml").at("cpu").arms) == expected


def test_a_report_of_a_scale_is_taken_over_key_by_key(tree, tmp_path):
    tree |= {"scales": {"cpu": {"report": {"chance": 0.5}}, "gpu": {"extends": "cpu", "report": {"log_x": True}}}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree))
    two = {"extends": "one", "experiment": "two", "scales": {"cpu": {"report": {"caveats": ["one"]}}}}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    found = load(tmp_path / "two.yaml")
    assert (found.at("cpu").report.chance, found.at("cpu").report.caveats) == (0.5, ["one"])
    assert (found.at("gpu").report.chance, found.at("gpu").report.log_x) == (0.5, True)


def test_nothing_is_left_of_arms_that_are_gone(tree, tmp_path):
    """Of a grid and of the paper's curves, which a scale may have of its own."""
    report = {"paper_values": "armt_text_and_figures", "paper_curves": {"a": "ARMT", "b": "Mamba"}}
    scales = {"cpu": {"report": report}, "gpu": {"extends": "cpu", "arms": ["a"]}}
    tree |= {"arms": {"a": {}, "b": {"model.gamma": "off"}}, "scales": scales, "grid": {"arms.b.train.steps": [1, 2]}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree | {"expect": []}))
    assert load(tmp_path / "one.yaml").at("gpu").report.paper_curves == {"a": "ARMT"}
    for arms in (["a"], {"a": {}, "b": {}}):
        (tmp_path / "two.yaml").write_text(yaml.safe_dump({"extends": "one", "experiment": "two", "arms": arms}))
        found = load(tmp_path / "two.yaml")
        assert found.grid == {}
        assert found.at("cpu").report.paper_curves == ({"a": "ARMT"} if isinstance(arms, list) else {})


def test_lines_of_a_file_count_at_every_scale_of_the_file_below(tree, tmp_path):
    tree |= {"scales": {"cpu": {"expect": ["a[5] > 0.5"], "requires": ["a[5] > 0.4"]}, "paper": {}}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree))
    two = {
        "extends": "one",
        "experiment": "two",
        "expect": ["a[5] > 0.6"],
        "scales": {"paper": {"expect": ["a[5] > 0.7"]}},
    }
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    found = load(tmp_path / "two.yaml")
    assert (found.at("cpu").expect, found.at("cpu").requires) == (["a[5] > 0.6"], ["a[5] > 0.4"])
    assert found.at("paper").expect == ["a[5] > 0.7"]


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (["aa"], "no arm 'aa'; did you mean 'a'?"),
        (["a", "a"], "'a' is said twice; expected once"),
        ([["a"]], "no arm ['a']; expected one of a"),
        ([], "[]: expected a list of arms, for example [a]"),
        ({"a": {"train.lr": 1}}, "{'a': {'train.lr': 1}}: expected a list of arms, for example [a]"),
    ],
)
def test_arms_of_a_scale_that_are_none(tree, arms, message):
    with pytest.raises(ConfigError) as caught:
        parse(tree | {"arms": {"a": {}}, "scales": {"cpu": {"arms": arms}}}, "one.yaml")
    assert str(caught.value) == f"one.yaml: scales.cpu.arms: {message}"


def test_several_arms_at_once(tree, tmp_path):
    """``arms.a,b.<key>`` is ``arms.a.<key>`` and ``arms.b.<key>``, in scales and grids, and a file that extends this
    one may change one of them."""
    each = {
        "arms.a.train.lr": 0.1,
        "arms.b.train.lr": 0.1,
        "grid": {"arms.a.train.steps": [1, 2], "arms.b.train.steps": [1, 2]},
    }
    both = {"arms.a, b.train.lr": 0.1, "grid": {"arms.a,b.train.steps": [1, 2]}}
    for name, values in {"each": each, "both": both}.items():
        (tmp_path / f"{name}.yaml").write_text(
            yaml.safe_dump({**tree, "scales": {"cpu": values}, "grid": values["grid"]})
        )
        more = {"extends": name, "experiment": "more", "scales": {"cpu": {"arms.b.train.lr": 0.2}}}
        (tmp_path / f"more_{name}.yaml").write_text(yaml.safe_dump(more))
    for more, rates in {"": [0.1, 0.1], "more_": [0.1, 0.2]}.items():
        ours, theirs = (load(tmp_path / f"{more}{name}.yaml") for name in ("both", "each"))
        assert dataclasses.replace(ours, file="") == dataclasses.replace(theirs, file="")
        assert [s.train["lr"] for s in ours.at("cpu").plan()[::2]] == rates


def test_files_and_scales_that_do_not_exist(tmp_path, tree):
    (tmp_path / "tiny.yaml").touch()
    for name, expected in {"tinny.yaml": "did you mean", "no/such.yaml": "no such file"}.items():
        with pytest.raises(ConfigError, match="no such file") as caught:
            load(tmp_path / name)
        assert expected in str(caught.value)
    with pytest.raises(ConfigError, match=r"^tiny\.yaml: --scale: unknown scale 'cpuu'; did you mean 'cpu'"):
        plan(tree, {"scales": {"cpu": {}, "paper": {}}}, scale="cpuu")


def test_a_scale_that_extends_another(tree, tmp_path):
    """Its settings lie over those of the other, key by key; seeds, claims and grid are settings as well. A file that
    extends this one starts from the whole scale."""
    cpu = {"train.lr": 0.5, "model.width": 8, "arms.a, b.train.steps": 9, "seeds": [3], "report": {"chance": 0.5}}
    scales = {
        "paper": {"extends": "gpu", "model.width": 32},
        "gpu": {"extends": "cpu", "train.lr": 0.25, "arms.b.train.steps": 12},
        "cpu": cpu,
    }
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree | {"scales": scales}, sort_keys=False))
    shared = {"arms.a.train.steps": 9, "seeds": [3], "report": {"chance": 0.5}}
    expected = {
        "paper": {"train.lr": 0.25, "model.width": 32, "arms.b.train.steps": 12} | shared,
        "gpu": {"train.lr": 0.25, "model.width": 8, "arms.b.train.steps": 12} | shared,
        "cpu": {"train.lr": 0.5, "model.width": 8, "arms.b.train.steps": 9} | shared,
    }
    one = load(tmp_path / "one.yaml")
    assert one.scales == expected and one.default_scale == "paper"
    assert [spec.train["lr"] for spec in one.at("gpu").plan()] == [0.25, 0.25]
    two = {"extends": "one", "experiment": "two", "scales": {"cpu": {"model.width": 64}}}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    assert load(tmp_path / "two.yaml").scales == expected | {"cpu": expected["cpu"] | {"model.width": 64}}


def test_a_scale_of_its_own_that_extends_one_of_another_file(tree, tmp_path):
    """It starts from that scale as the file has it, with what the other file sets for it; a scale that both have does
    not."""
    scales = {"cpu": {"train.lr": 0.5, "arms.a.train.steps": 9, "seeds": [3]}, "gpu": {"train.lr": 0.25}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree | {"scales": scales}, sort_keys=False))
    own = {
        "real": {"extends": "small", "model.width": 32},
        "small": {"extends": "cpu", "train.lr": 0.1},
        "cpu": {"model.width": 64},
        "gpu": {"extends": "cpu", "train.steps": 7},
    }
    two = {"extends": "one", "experiment": "two", "scales": own}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two, sort_keys=False))
    cpu = scales["cpu"] | {"model.width": 64}
    small = cpu | {"train.lr": 0.1}
    gpu = {"train.lr": 0.25, "model.width": 64, "train.steps": 7}
    expected = {"cpu": cpu, "gpu": gpu, "small": small, "real": small | {"model.width": 32}}
    assert load(tmp_path / "two.yaml").scales == expected


def test_the_upper_file_has_the_last_word(tree, tmp_path):
    """Also over a whole section, or the same setting with ? or without, that a file in between has put in."""
    one, two, three = (
        {"model.width": 32, "model.heads?": 2},
        {"model": {**tree["base"]["model"], "width": 128}, "model.heads": 4},
        {"model.width": 16, "model.heads?": 8},
    )
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree | {"scales": {"cpu": one}}))
    for name, below, settings in (("two", "one", two), ("three", "two", three)):
        content = {"extends": below, "experiment": name, "scales": {"cpu": settings}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    spec = load(tmp_path / "three.yaml").at("cpu").plan()[0]
    assert (spec.model["width"], spec.model["heads"]) == (16, 8)
    scales = {"cpu": one, "gpu": {"extends": "cpu"} | two, "paper": {"extends": "gpu"} | three}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree | {"scales": scales}, sort_keys=False))
    spec = load(tmp_path / "one.yaml").at("paper").plan()[0]
    assert (spec.model["width"], spec.model["heads"]) == (16, 8)


def test_scales_keep_the_order_of_the_file(tree, tmp_path):
    """Those of the lower file first; not that of a set, which differs from process to process."""
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree | {"scales": {"cpu": {}}}))
    names = ["real", "tiny", "small", "large", "gpu", "paper"]
    scales = {"cpu": {}} | {name: {"extends": "cpu"} for name in names}
    two = {"extends": "one", "experiment": "two", "scales": scales}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two, sort_keys=False))
    assert list(load(tmp_path / "two.yaml").scales) == ["cpu", *names]


EXTENDS = {
    "unknown scale": ({"a": {"extends": "b"}, "c": {}}, "FILE: scales.a.extends: no scale 'b' in this file; expected"),
    "near scale": ({"cpu": {}, "a": {"extends": "cpuu"}}, "FILE: scales.a.extends: no scale 'cpuu' … 'cpu'?"),
    "itself": ({"a": {"extends": "a"}}, "FILE: scales.a.extends: 'a' extends this scale; expected no circle"),
    "circle": (
        {"a": {"extends": "b"}, "b": {"extends": "c"}, "c": {"extends": "a"}},
        "FILE: scales.c.extends: 'a' extends this scale; expected no circle",
    ),
    "list": ({"a": {"extends": ["b"]}, "b": {}}, "FILE: scales.a.extends: no scale ['b'] in this file"),
    "scale that is text": ({"a": {"extends": "b"}, "b": "x"}, "FILE: scales.b: 'x': expected a mapping"),
    "scale called 1": ({"a": {"extends": "b"}, 1: {}}, "FILE: scales.a.extends: no scale 'b' in this file"),
}


@pytest.mark.parametrize("name", EXTENDS)
def test_scales_that_extend_nothing(tree, tmp_path, name):
    scales, expected = EXTENDS[name]
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(change(tree, {"scales": scales}), sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        load(path)
    check_message(caught.value, expected, path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_plain_yaml(path):
    """For PyYAML's own loader, which knows less than libyaml: ``{a?: 1}`` needs quotes."""
    assert yaml.load(path.read_text(), Loader=yaml.SafeLoader)["experiment"] == path.stem


WITHOUT_LIBYAML = """
import sys
sys.modules["yaml._yaml"] = None
import yaml
from pathlib import Path
from lit_memory.plan.reading import extended
assert not yaml.__with_libyaml__
print(*(extended(Path(path))["experiment"] for path in sys.argv[1:]))
"""


PLANS = """
import sys
if sys.argv[1] == "without":
    sys.modules["yaml._yaml"] = None
import yaml
from lit_memory.plan.experiment import load
assert yaml.__with_libyaml__ == (sys.argv[1] == "with")
for path in sys.argv[2:]:
    whole = load(path)
    for scale in whole.scales:
        print(whole.experiment, scale, *(spec.key for spec in whole.at(scale).plan()))
"""


@pytest.mark.slow
def test_plans_are_the_same_without_libyaml():
    """As the command makes them: every scale of every file, and the key of every run."""
    files = [str(path) for path in FILES if not has_marks(path)]
    runs = [
        subprocess.Popen([sys.executable, "-c", PLANS, how, *files], stdout=subprocess.PIPE, text=True)
        for how in ("with", "without")
    ]
    (theirs, _), (plain, _) = (run.communicate() for run in runs)
    assert all(run.returncode == 0 for run in runs)
    assert theirs == plain and len(plain.splitlines()) >= len(files) > 50


@pytest.mark.slow
def test_a_command_without_libyaml(tmp_path):
    """The first of the experiments, from the command line to the plan, with a change that is YAML as well."""
    code = "import sys; sys.modules['yaml._yaml'] = None; from lit_memory.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["--root", str(tmp_path), "--dry-run", "train.stages=[{task.pairs: 1, steps: 4}]"]
    found = []
    for how in (code, code.replace("sys.modules['yaml._yaml'] = None; ", "")):
        run = subprocess.run([sys.executable, "-c", how, "armt_remember", *argv], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        found.append(run.stdout)
    assert found[0] == found[1] and "key" in found[0]


def test_files_are_read_without_libyaml():
    run = subprocess.run([sys.executable, "-c", WITHOUT_LIBYAML, *map(str, FILES)], capture_output=True, text=True)
    assert run.stdout.split() == [path.stem for path in FILES], run.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_experiment_has_words_for_people(path):
    """A title of its own, not longer than a figure is wide, and words for every arm."""
    (title,) = re.findall(r"^title: (.*)$", path.read_text(), re.MULTILINE)
    assert 10 < len(title) <= 82 and sum(f"\ntitle: {title}\n" in other.read_text() for other in FILES) == 1
    if not has_marks(path):
        experiment = load(path)
        assert experiment.title == title.strip('"') and experiment.labels.keys() == experiment.arms.keys()


@pytest.mark.parametrize("empty", [{"cpu": None}, {"cpu": {}}, None, {}])
def test_nothing_takes_nothing_away(tree, tmp_path, empty):
    """An empty scale, or no scales, of a file that extends another one says nothing."""
    tree["scales"] = {"cpu": {"train.lr": 0.5}, "gpu": {"seeds": [0, 1]}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"extends": "one", "experiment": "two", "scales": empty}))
    assert load(tmp_path / "two.yaml").scales == {"cpu": {"train.lr": 0.5}, "gpu": {"seeds": [0, 1]}}
