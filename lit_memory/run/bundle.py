"""Finished runs in one file, with which a plan goes on below another root: ``--bundle FILE``.

The file is a zip with a folder for every key: the journal of the run, without the place where it was trained, and the
files that the journal names. The store gets the run from them as it gets what was left on disk while it was away. There
are no weights: a run that starts from those of another trains that one again for them.
"""

import contextlib
import hashlib
import json
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from filelock import Timeout

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run import checkpoint, journal
from lit_memory.run.display import counted
from lit_memory.run.worklist import WorkList
from lit_memory.util import files
from lit_memory.util.checks import first_line

DAMAGED = (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError, NotImplementedError)
"""What a file that is not as ``pack`` wrote it makes its readers raise."""


def take(work: WorkList) -> str:
    """``unpack`` for the command, as a line for the user. Raises ConfigError for a dry run, and for what no file can
    be at the end."""
    path = Path(work.sweep.options.bundle or "")
    if work.sweep.options.dry_run:
        raise ConfigError("command line", "--bundle", "takes runs over, and --dry-run does nothing; leave one out")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("command line", "--bundle", f"{path}: expected a file in a folder that is there")
    with told(path), tempfile.TemporaryFile(dir=path.parent):  # hours later it would be too late
        pass
    return f"bundle   {len(unpack(work.specs, work.sweep.root, path))} runs taken from {path}"


def keep(work: WorkList, warn: Callable[[str], None]) -> list[str]:
    """``pack`` for the command, as a line for the user; none where no file was written. warn: is told of finished runs
    that are not in the file."""
    path, root = Path(work.sweep.options.bundle or ""), work.sweep.root
    with told(path):
        kept = pack(work.specs, root, path)
    left = [spec for spec in work.specs if work.status(spec) == "finished" and spec.key not in kept]
    if left:
        warn(f"{counted(len(left), 'finished run')} without a whole journal below {root}, so not in {path}")
    return [f"bundle   {len(kept)} runs in {path}"] if kept else []


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """What the system refuses, as a ConfigError about the file."""
    try:
        yield
    except OSError as error:
        what = error.filename if isinstance(error.filename, str) else path
        reason = f"{path}: cannot be written ({what}: {error.strerror}); expected a file in a folder that is writable"
        raise ConfigError("command line", "--bundle", reason) from None


def pack(specs: Iterable[RunSpec], root: Path, path: Path) -> Collection[str]:
    """Write the runs that are complete below ``root``, and those of other keys that the file has, to the file. Returns
    the keys that it has then; without any, nothing is written. A run with a damaged or missing file is left out: with
    it, nobody could read the bundle. Raises ConfigError for a damaged bundle."""
    own = {spec.key: portable(spec.folder(root)) for spec in specs if journal.complete(spec.folder(root))}
    own = {key: parts for key, parts in own.items() if whole(parts)}
    with files.alone(path.parent):  # two commands may keep their runs in one file
        found = (contents(path) if path.is_file() else {}) | own
        if found:
            write(found, path)
    return found.keys()


def write(runs: Mapping[str, Mapping[str, bytes]], path: Path) -> None:
    """Write the file. runs: key -> name -> content."""
    with files.replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for key, parts in sorted(runs.items()):
            for name, content in sorted(parts.items()):
                # A ZipInfo has a time of its own, so that the same runs are the same bytes.
                archive.writestr(zipfile.ZipInfo(f"{key}/{name}"), content, zipfile.ZIP_DEFLATED, 9)


def unpack(specs: Iterable[RunSpec], root: Path, path: Path) -> list[RunSpec]:
    """Put the runs of a plan that are in the file below ``root``, where the next ``deliver`` finds them; returns them.

    A run that has begun below ``root`` stays as it is. Raises ConfigError for a damaged file.
    """
    found, taken = contents(path) if path.is_file() else {}, []
    for spec in specs:
        folder = spec.folder(root)
        if spec.key in found and not begun(folder):
            with contextlib.suppress(Timeout), checkpoint.acquired(folder):
                own = dict(found[spec.key])
                own[journal.NAME] = own.pop(journal.NAME)  # is written last: with it the run is complete
                files.write_all(folder, own)
                taken.append(spec)
    return taken


def begun(folder: Path) -> bool:
    """Whether there is something of a run in its folder."""
    return (folder / journal.NAME).is_file() or bool(checkpoint.saved(folder))


def portable(folder: Path) -> dict[str, bytes]:
    """Name -> content of the files of a complete run that go into the file, of those that are there."""
    whole_lines = (folder / journal.NAME).read_bytes()[: journal.read(folder).end]
    lines = portable_lines(whole_lines.splitlines())
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    paths = (folder / name for name in messages(text).files)
    return {journal.NAME: text} | {path.name: path.read_bytes() for path in paths if path.is_file()}


def portable_lines(lines: Iterable[bytes]) -> Iterator[dict]:
    """The messages of a journal, without those that a store has confirmed, and without places."""
    for message in map(json.loads, lines):
        if "begin" in message:
            message["begin"].pop("where", None)
        if "sent" not in message:
            yield message


def messages(text: bytes) -> journal.Messages:
    """What the lines of a journal come to. Raises ValueError for a line that is not whole."""
    told = journal.Messages(0)
    for line in text.splitlines():
        told.add(json.loads(line))
    return told


def contents(path: Path) -> dict[str, dict[str, bytes]]:
    """Key -> name -> content. Raises ConfigError unless every run is complete and its files have their checksums."""
    found: dict[str, dict[str, bytes]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for place in archive.namelist():
                key, _, name = place.partition("/")
                found.setdefault(key, {})[name] = archive.read(place)
        for key, parts in found.items():
            if not whole(parts):
                raise ValueError(f"run {key[:8]} is not whole")
    except DAMAGED as error:
        message = f"damaged ({first_line(error)}); expected a file that --bundle wrote"
        raise ConfigError(str(path), "", message) from None
    return found


def whole(parts: dict[str, bytes]) -> bool:
    """Whether a run is as its journal says. Raises ValueError for a line that is not whole, KeyError without a
    journal."""
    told = messages(parts[journal.NAME])
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items() if name != journal.NAME}
    return told.status == "FINISHED" and digests == told.files and all(Path(name).name == name for name in digests)
