"""Standard streams on which no output can fail: what is printed never ends the work. Standard library only."""

import codecs
import contextlib
import os
import sys
from typing import Any

PLAIN = {"✓": "+", "✗": "x", "≤": "<=", "≥": ">=", "–": "-", "—": "-", "…": "...", "·": "|", "±": "+/-", "×": "x"}
"""Characters for a terminal that cannot show others; whatever is not here becomes "?"."""


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replace what an encoding lacks: an error handler of ``codecs``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


codecs.register_error("lit_memory.plain", _plain)


class Lenient:
    """A text stream that shows what it can: other characters become plain ones, and what cannot be written (a closed
    pipe, a full disk, no stream at all) is lost."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.encoding: str = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # ValueError: closed; AttributeError: None
            self.stream.write(text.encode(self.encoding, "lit_memory.plain").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def fill_gaps() -> None:
    """Open the null device in place of standard streams that are closed: a database would get their numbers, and what
    a library prints would go into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def settle() -> None:
    """Flush the standard streams; what cannot be written goes to the null device. Python's own attempt, when it ends,
    would fail with another exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except ValueError:  # it is closed
            continue
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
