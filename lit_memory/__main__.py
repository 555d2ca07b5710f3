"""``python -m lit_memory``: the command as a process of its own. ``run.py`` does the same, and ``lit-memory`` has a
word for every use of it."""

import atexit
import gc
import os
import signal
from typing import NoReturn


def interrupted(number: int, frame: object) -> NoReturn:
    """The handler of Ctrl-C while nothing trains: end at once. An exception in the middle of an import would come out
    as a traceback, or be lost; on the disk everything is whole or absent."""
    os._exit(128 + number)


def command(words: bool = False) -> NoReturn:
    """Run the command line and end the process with its exit code. words: it begins with one of ``options.WORDS``."""
    signal.signal(signal.SIGINT, interrupted)  # before the imports, which take seconds
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # runs last, when nothing is left to interrupt
    gc.set_threshold(
        100_000, 20
    )  # imports make many objects and no garbage: a fifth of their time would be collections
    if "_ARGCOMPLETE" in os.environ:  # the shell asks, after Tab
        from lit_memory.run.completion import complete

        complete(words)
    from lit_memory.util.streams import fill_gaps, settle

    fill_gaps()
    from lit_memory.cli import main

    code = main(words=words)
    settle()
    raise SystemExit(code)


def console() -> NoReturn:
    """The script ``lit-memory``."""
    command(words=True)


if __name__ == "__main__":
    command()
