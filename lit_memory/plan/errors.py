"""The error of a wrong experiment file or command line. Imports nothing heavy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LONGEST = 1000
"""Characters of a message. Some of the values that it quotes have no end."""


class ConfigError(Exception):
    """A wrong experiment file or command line, in one printable line.

    where: the file, with the scale or the arm, or "command line". key: the dotted key. message: what was expected.
    """

    def __init__(self, where: str, key: str, message: str) -> None:
        self.parts = where, key, message
        text = ": ".join(part for part in (where, key, message) if part).replace("\n", " ")
        # A NUL or an escape code must not reach the terminal.
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST - 300]} … {text[-290:]}")


def dotted(section: str, name: str) -> str:
    """The key of a field, or of its section where ``name`` is ""."""
    return f"{section}.{name}" if name else section


@contextmanager
def naming_changes(file: str, overrides: Sequence[str]) -> Iterator[None]:
    """Add the overrides of the command line to an error that blames ``file``, as they may have caused it."""
    try:
        yield
    except ConfigError as error:
        where, key, message = error.parts
        if not overrides or not where.startswith(file):
            raise
        place = where.removesuffix(")") + (", " if where.endswith(")") else " (")
        raise ConfigError(f"{place}with {' '.join(overrides)})", key, message) from None
