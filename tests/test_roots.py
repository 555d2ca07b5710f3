"""Roots that may not be written to, that have two names, that belong to several users or that are full."""

import ctypes
import shutil

import pytest
import yaml
from faults import (
    NOLOAD,
    NOT_PERMITTED,
    PLACES,
    die,
    fork_command,
    forked,
    last_line,
    mount,
    permitted,
    slow,
    statuses,
    train,
)

from lit_memory.cli import main
from lit_memory.run.options import parse_options
from lit_memory.run.sweep import Sweep
from lit_memory.tasks import language_modeling

pytestmark = [pytest.mark.usefixtures("warm", "unsaved_figures"), pytest.mark.filterwarnings(NOLOAD)]


def on_mount(arguments, file, root, log, *flags):
    """The exit code of the command where ``mount`` was called with ``arguments`` before."""

    def work():
        try:
            for each in arguments:
                mount(*each)
        except OSError:
            return NOT_PERMITTED
        return main([str(file), "--root", str(root), *flags])

    return permitted(work, log=log)


def read_only(root):
    return [("--bind", root, root), ("-o", "remount,bind,ro", root)]


def table(root):
    return (root / "reports/tiny/table.csv").read_bytes()


@pytest.mark.parametrize("database", [True, False], ids=["finished", "new"])
def test_a_read_only_root_shows_its_plan(file, root, tmp_path, database):
    """What would write is refused before it starts."""
    log, expected = tmp_path / "log", "2 finished" if database else "2 new"
    if database:
        assert fork_command(file, root, log)() == 0
    else:
        (root / "mlflow.db").unlink()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert on_mount(read_only(root), file, root, log, "--dry-run") == 0, log.read_text()
    assert expected in log.read_text()
    for flags in ([], ["--report"], ["--fresh"]):
        assert on_mount(read_only(root), file, root, log, *flags) == 2, log.read_text()
        assert f"{root} may not be written to; expected a folder of yours" in last_line(log), log.read_text()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_root_with_two_names_is_one_root(file, root, tmp_path):
    """A run that was killed under one name is closed and goes on under the other, and is trained once."""
    log, link = tmp_path / "log", tmp_path / "link"
    link.symlink_to(root)
    here, there = (Sweep.prepare(parse_options([str(file), "--root", str(name)])) for name in (root, link))
    assert here.location == there.location
    spec = here.specs[0]
    killed = (*PLACES["the last checkpoint of two"], die)
    assert forked(lambda: train(spec, link, {"where": there.location}), killed)() == -9
    assert forked(lambda: main([str(file), "--root", str(root), "--report"]), log=log)() == 0
    assert sorted(statuses(root).values()) == ["FINISHED", "KILLED"]
    waits = [fork_command(file, name, tmp_path / f"{name.name}.log", "--jobs", "2") for name in (root, link)]
    assert [wait() for wait in waits] == [0, 0], [p.read_text() for p in tmp_path.glob("*.log")]
    assert sorted(statuses(root).values()) == ["FINISHED"] * 3
    assert not (link / "mlflow.db").is_symlink() and list(link.parent.glob("*.db")) == []


# Full


def on_small_mount(options, place, file, root, tmp_path):
    """The command where ``place`` is a file system of its own with ``options``, and again where that has room: exit
    codes, and what the first said. ``tmp_path`` / "table" has the table."""
    place.mkdir(parents=True, exist_ok=True)
    first = tmp_path / "first"

    def work():
        kept = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
        try:
            mount("-t", "tmpfs", "-o", f"size=8m,{options}", "none", place)
        except OSError:
            return NOT_PERMITTED
        for name, content in kept.items():
            (place / name).write_bytes(content)
        language_modeling.cache_folder = lambda: root / "data/cache"
        code = fork_command(file, root, first)()
        mount("-o", "remount,size=64m,nr_inodes=9999", place)
        again = fork_command(file, root, tmp_path / "second")()
        shutil.copy(next((root / "reports").glob("*/table.csv")), tmp_path / "table")
        return 10 * code + again

    return divmod(permitted(work, log=tmp_path / "log"), 10), first.read_text()


TEXT = {"name": "language_modeling", "source": "noise", "books": 1, "tokenizer": "char", "segment_len": 8}


def check_full(options, place, file, root, whole, tmp_path):
    codes, text = on_small_mount(options, place, file, root, tmp_path)
    assert codes == (1, 0), text
    assert str(place) in text and "no room to write it" in text and "Traceback" not in text, text
    assert fork_command(file, whole, tmp_path / "whole.log")() == 0
    assert (tmp_path / "table").read_bytes() == next((whole / "reports").glob("*/table.csv")).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "checkpoints", "reports", "mlruns"])
def test_a_full_file_system_below_the_root(tree, root, make_root, tmp_path, name):
    """Whichever folder is full is named, and with room again the same command ends as if nothing had been."""
    tree["base"]["task"] = TEXT | {"segments": 2, "test_segments": [1, 3]}
    tree |= {"report": {"x": "test_segments", "y": "perplexity"}, "expect": []}
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree))
    check_full("size=8k", root / name, file, root, make_root("whole"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [4, 9, 16])
def test_a_file_system_without_more_files(file, root, make_root, tmp_path, spare):
    """Bytes are free, but so many files are all that it takes."""
    check_full(f"nr_inodes={spare}", root, file, root, make_root("whole"), tmp_path)
    assert "may have no more files" in (tmp_path / "first").read_text()


# Another user


def without_rights():
    """In a fork: no capabilities, which let user root write everywhere."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0


def under(path):
    return [path, *path.rglob("*")]


@pytest.mark.parametrize("name", ["mlflow.db", *slow("checkpoints", "reports")])
def test_what_belongs_to_another_user(file, root, make_root, tmp_path, name):
    """It is told before anything starts; a plan needs no right to write. With the rights, the same command ends as if
    nothing had been."""
    log, foreign = tmp_path / "log", root / name
    assert fork_command(file, root, log, "--arms", "a")() == 0, log.read_text()
    expected, modes = statuses(root), {path: path.stat().st_mode for path in under(foreign)}
    for path in modes:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for flags, code in (([], 2), (["--report"], 2), (["--dry-run"], 0)):
        assert fork_command(file, root, log, *flags, before=without_rights)() == code, log.read_text()
        if code:
            assert f"{foreign} may not be written to; expected a" in last_line(log), log.read_text()
    assert statuses(root) == expected
    for path, mode in modes.items():
        path.chmod(mode)
    assert fork_command(file, root, log, before=without_rights)() == 0, log.read_text()
    whole = make_root("whole")
    assert fork_command(file, whole, log)() == 0
    assert table(root) == table(whole)
