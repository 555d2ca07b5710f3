"""``--bundle``: finished runs go to another root in one file."""

import contextlib
import errno
import fcntl
import os
import threading
import zipfile
from pathlib import Path

import pytest
from faults import NOLOAD

from lit_memory.cli import main
from lit_memory.run import bundle, journal
from lit_memory.run.options import parse_options
from lit_memory.run.sweep import Sweep
from lit_memory.util import files

pytestmark = [pytest.mark.usefixtures("inline", "unsaved_figures"), pytest.mark.filterwarnings(NOLOAD)]


@pytest.fixture
def command(file):
    """``command(root, *flags)``: the exit code."""

    def call(root, *flags):
        return main([str(file), "--root", str(root), *map(str, flags)])

    return call


@pytest.fixture
def packed(command, root, tmp_path):
    """The bundle of the first of two arms."""
    path = tmp_path / "runs.zip"
    assert command(root, "--arms", "a", "--bundle", path) == 0
    return path


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_finished_runs_go_on_below_another_root(command, root, make_root, packed, file, capsys):
    """The other root trains what the file has not, and its table is that of a root that has trained everything."""
    there = make_root("there")
    capsys.readouterr()
    assert command(there, "--bundle", packed) == 0
    out = capsys.readouterr().out
    assert "1 runs taken from" in out and "sent     what waited on disk: a seed 0" in out
    assert "2 runs: 1 finished, 1 new" in out and f"2 runs in {packed}" in out
    assert command(root) == 0
    assert (there / "reports/tiny/table.csv").read_bytes() == (root / "reports/tiny/table.csv").read_bytes()
    assert (there / "reports/tiny/scores.npz").read_bytes() == (root / "reports/tiny/scores.npz").read_bytes()


def test_a_bundle_of_everything_trains_nothing(command, root, make_root, packed, no_training, capsys):
    """Also not where the runs are finished already, and the file stays as it was, byte for byte."""
    before = packed.read_bytes()
    there = make_root("there")
    for taken in (1, 0):
        assert command(there, "--report", "--bundle", packed) == 0
        assert f"bundle   {taken} runs taken" in capsys.readouterr().out
    assert packed.read_bytes() == before


def test_finished_runs_without_a_journal_here_are_told(command, root, tmp_path, file, capsys):
    """Their store knows them, but they were trained elsewhere; no file is named that was not written."""
    assert command(root) == 0
    for path in (root / "checkpoints").glob("*/journal.jsonl"):
        path.unlink()
    capsys.readouterr()
    assert command(root, "--bundle", tmp_path / "runs.zip") == 0
    out, err = capsys.readouterr()
    line = f"warning: 2 finished runs without a whole journal below {root}, so not in {tmp_path / 'runs.zip'}\n"
    assert err == line and "runs in" not in out and not (tmp_path / "runs.zip").exists()


def test_the_file_names_no_place(packed, root):
    """Neither the machine, nor its folders, nor the run's id in a store."""
    for name, content in members(packed).items():
        assert name.endswith("journal.jsonl") != (b"where" not in content and name.endswith("scores.npz"))
        assert str(root).encode() not in content and b'"sent"' not in content


def test_runs_are_kept_where_the_store_is_away_behind_the_training(command, root, tmp_path, monkeypatch):
    def away(*args):
        raise ConnectionError("the server is away")

    monkeypatch.setattr("lit_memory.run.worklist.WorkList.later", away)
    path = tmp_path / "runs.zip"
    with contextlib.suppress(ConnectionError):
        command(root, "--bundle", path)
    assert len(bundle.contents(path)) == 2


def test_runs_of_other_plans_stay_in_the_file(command, root, packed, tmp_path):
    """One file may serve several experiments."""
    assert command(root, "train.steps=3", "--arms", "a", "--bundle", packed) == 0
    assert len({name.partition("/")[0] for name in members(packed)}) == 2


def test_two_commands_keep_their_runs_in_one_file(command, file, root, packed):
    """Each after the other: none writes what it read before the other one wrote."""
    specs = Sweep.prepare(parse_options([str(file), "--root", str(root)])).selected
    done = threading.Thread(target=bundle.pack, args=(specs, root, packed))
    with files.alone(packed.parent):
        done.start()
        done.join(0.3)
        assert done.is_alive()
        packed.unlink()
    done.join()
    assert set(bundle.contents(packed)) == {spec.key for spec in specs if journal.complete(spec.folder(root))} != set()


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"damaged"), Path.unlink], ids=["damaged", "missing"])
def test_a_run_with_a_damaged_file_is_left_out(file, command, root, tmp_path, damage):
    """So that the others can be read."""
    assert command(root) == 0
    specs = Sweep.prepare(parse_options([str(file), "--root", str(root)])).selected
    damage(specs[0].folder(root) / "scores.npz")
    assert len(bundle.pack(specs, root, tmp_path / "others.zip")) == len(specs) - 1
    assert list(bundle.contents(tmp_path / "others.zip")) == [spec.key for spec in specs[1:]]


def test_a_line_that_the_power_cut_short(file, command, root, tmp_path):
    """It is left out, and the next one does not go on behind it."""
    assert command(root) == 0
    specs = Sweep.prepare(parse_options([str(file), "--root", str(root)])).selected
    path = specs[0].folder(root) / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"status": "FINI')
    assert len(bundle.pack(specs, root, tmp_path / "all.zip")) == len(specs)
    journal.append(path, {"tags": {}})
    assert path.read_bytes().startswith(whole) and journal.read(path.parent).end == path.stat().st_size
    assert path.read_bytes().count(b"\n") == whole.count(b"\n") + 1


def test_a_run_that_has_begun_stays_as_it_is(command, root, make_root, packed, file):
    there = make_root("there")
    (spec,) = Sweep.prepare(parse_options([str(file), "--root", str(there), "--arms", "a"])).selected
    folder = spec.folder(there)
    folder.mkdir(parents=True)
    (folder / "step-00000001.ckpt").write_bytes(b"begun")
    assert bundle.unpack([spec], there, packed) == [] and not (folder / "journal.jsonl").exists()


BROKEN = {
    "no zip": lambda path: path.write_bytes(b"PK nothing"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "other scores": lambda path: rewrite(path, "scores.npz", b"other"),
    "no journal": lambda path: rewrite(path, "journal.jsonl", None),
    "unfinished": lambda path: rewrite(path, "journal.jsonl", b'{"status": "KILLED", "time": 1}\n'),
    "no JSON": lambda path: rewrite(path, "journal.jsonl", b"{\n"),
}


def test_who_looks_at_a_lock_stands_in_nobodys_way(root, make_root, packed, file):
    """It is held for a moment, while another command takes the run over."""
    there = make_root("there")
    spec = Sweep.prepare(parse_options([str(file), "--root", str(root)])).specs[0]
    spec.folder(there).mkdir(parents=True)
    looking = (spec.folder(there) / "lock").open("wb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.05, looking.close).start()
    assert bundle.unpack([spec], there, packed) == [spec]


def rewrite(path, name, content):
    """Replace a member of the first run, or leave it out."""
    found = members(path)
    key = next(member for member in found if member.endswith(name))
    found[key] = content
    with zipfile.ZipFile(path, "w") as archive:
        for member, of in found.items():
            if of is not None:
                archive.writestr(member, of)


def test_a_damaged_file_is_refused_in_one_line(command, make_root, packed, no_training, capsys):
    whole, there = packed.read_bytes(), make_root("there")
    for broken in BROKEN.values():
        packed.write_bytes(whole)
        broken(packed)
        capsys.readouterr()
        assert command(there, "--bundle", packed) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{packed}: damaged (" in line and "expected a file that --bundle wrote" in line
        assert not (there / "checkpoints").exists()


@pytest.mark.parametrize("place", [".", "missing/runs.zip"])
def test_where_no_file_can_be(command, root, tmp_path, no_training, capsys, place):
    """Said before anything is trained for it."""
    assert command(root, "--bundle", tmp_path / place) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--bundle: " in line and "expected a file in a folder that is there" in line


def test_a_dry_run_takes_nothing(command, root, packed, capsys):
    assert command(root, "--dry-run", "--bundle", packed) == 2
    assert "--bundle: takes runs over, and --dry-run does nothing" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder in which nobody can write")
def test_a_folder_that_takes_no_file_is_told_before_the_training(command, root, no_training, capsys):
    assert command(root, "--bundle", "/proc/self/runs.zip") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--bundle: /proc/self/runs.zip: cannot be written (" in line and "expected a file in a folder" in line


def test_a_file_system_that_locks_only_what_is_open_for_writing(command, root, tmp_path, monkeypatch):
    """As NFS does."""
    flock = fcntl.flock

    def strict(place, operation):
        if fcntl.fcntl(place, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return flock(place, operation)

    monkeypatch.setattr("lit_memory.util.files.fcntl.flock", strict)
    assert command(root, "--arms", "a", "--bundle", tmp_path / "runs.zip") == 0
    assert len({name.partition("/")[0] for name in members(tmp_path / "runs.zip")}) == 1
