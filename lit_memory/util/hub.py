"""Names on the Hugging Face hub: ``owner/name``, or ``owner/name@commit``, which stands for the same bytes for ever.

Files lie in the cache of ``huggingface_hub``, which ``HF_HOME`` and ``HF_HUB_OFFLINE`` concern.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?(@.*)?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


def is_name(source: object) -> bool:
    """Whether a source can be a name on the hub, which nobody asks here."""
    path = isinstance(source, Path) or os.path.exists(str(source))  # False for what is too long for a path
    return not path and NAME.fullmatch(str(source)) is not None


def split(source: str) -> tuple[str, str | None]:
    """The name and the commit, None where there is none. Raises ValueError for what is no commit."""
    name, at, commit = source.partition("@")
    if at and not COMMIT.fullmatch(commit):
        expected = "expected the 40 hexadecimal digits of a commit after @, as the hub shows them; a branch moves"
        raise ValueError(f"{source}: {expected}")
    return name, commit or None


def is_pinned(source: str) -> bool:
    """Whether a source is a name on the hub with its commit. Raises ValueError for what is no commit."""
    return is_name(source) and split(source)[1] is not None


def snapshot(source: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """The folder with the files of a name, from the cache or the hub. Raises what ``huggingface_hub`` raises."""
    from huggingface_hub import snapshot_download

    name, commit = split(source)
    return Path(snapshot_download(name, revision=commit or revision, allow_patterns=[*patterns]))


def pinned_file(source: str, file: str) -> Path | None:
    """One file of a name with its commit, from the cache or the hub; None where that commit has none.

    Raises FileNotFoundError for one that is not in reach, in one line that says what to do.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    name, commit = split(source)
    try:
        return Path(hf_hub_download(name, file, revision=commit))
    except RemoteEntryNotFoundError:
        return None
    except Exception as error:  # no network, no such name or commit, no permission: the library has a class for each
        kind = type(error).__name__
        raise FileNotFoundError(f"{source}: {file} is {OUT_OF_REACH} ({kind}); {advice(source)}") from error


OUT_OF_REACH = "neither in the cache of the Hugging Face hub nor in reach"


def advice(source: str) -> str:
    """What to do about a name that is not in reach."""
    name, at, commit = source.partition("@")
    return f"check the name, or get it where there is a network: hf download {name}{' --revision ' * bool(at)}{commit}"
