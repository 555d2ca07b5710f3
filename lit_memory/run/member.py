"""The other ranks of a run, see ``ranks``."""

import os
import pickle
import signal
import sys
import threading
import traceback
from pathlib import Path

from lit_memory.plan.runspec import RunSpec
from lit_memory.run.ranks import POLL, Rank
from lit_memory.run.trainer import silence_lightning
from lit_memory.run.training import training
from lit_memory.util.child import wait_for_the_end_of


def take_part(spec: RunSpec, root: Path, newest: Path | None, rank: Rank, port: int) -> None:
    """Train and test with the other ranks. port: of the store of rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides
    silence_lightning()
    spec.provide_code()
    rank.join(port)
    try:
        with training(spec, root, None, lambda: None, lambda message: None, rank, newest) as done:
            if rank.next() == "test":
                done.test()
    except BaseException as error:
        rank.fail(error)
        traceback.print_exc()
        raise SystemExit(1) from None


def end_with(parent: int) -> None:
    """End this process when ``parent`` is gone, whatever it is waiting for: the work of a thread."""
    wait_for_the_end_of(parent, POLL)
    os._exit(1)


def main() -> None:
    """The process of a rank."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    take_part(*pickle.load(sys.stdin.buffer))


if __name__ == "__main__":
    main()
