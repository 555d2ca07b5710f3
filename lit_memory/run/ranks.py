"""The processes of a run on several devices: one for each, its rank.

Rank 0 is the process of the run itself. It alone holds the lock and the lease, writes checkpoints, and speaks to MLflow
and to the command; it starts the others (``member``) and decides how the run ends. They compute, write to the log of
the run alone, ignore signals, and may be killed at any time: whatever ends rank 0 ends them, and where one of them
ends, the run does.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from lit_memory.plan.runspec import RunSpec
from lit_memory.util.child import child_environment

if TYPE_CHECKING:
    from lit_memory.lit.callbacks.progress import Send

HOST = "127.0.0.1"
JOIN = timedelta(minutes=10)
"""Most time until all ranks have started."""
STEP = timedelta(minutes=30)
"""Most time that ranks wait for each other."""
GRACE = 10.0
"""Seconds in which rank 0 notices by itself that another rank has ended, and that the others get to end."""
POLL = 0.2
MEMBER = [sys.executable, "-m", "lit_memory.run.member"]
"""The command of the other ranks."""


class RankLost(Exception):
    """A process of the run has ended before the run has."""


@dataclass
class Rank:
    """The place of a process among those of its run, and their store of short messages."""

    number: int = 0
    world: int = 1
    backend: str = "gloo"
    store: Any = None
    """None for a run on one device."""

    def join(self, port: int) -> None:
        """Meet the other ranks, in the store of rank 0."""
        self.store = distributed.TCPStore(HOST, port, timeout=STEP)
        self.meet()

    def meet(self) -> None:
        """Begin to compute together."""
        place = {"store": self.store, "rank": self.number, "world_size": self.world}
        distributed.init_process_group(self.backend, timeout=STEP, **place)

    def tell(self, word: str) -> None:
        """Rank 0 says what comes next: "test" or "end"."""
        if self.store is not None and self.number == 0:
            self.store.set("next", word)

    def next(self) -> str:
        """What rank 0 says that comes next."""
        return self.store.get("next").decode()

    def fail(self, error: BaseException) -> None:
        """Say why this rank ends, unless another one has said so before."""
        line = f"{type(error).__name__}: {error}".replace("\n", " ")
        with contextlib.suppress(RuntimeError):  # rank 0 is gone
            self.store.compare_set("failure", "", f"rank {self.number}: {line}")


ALONE = Rank()
"""The place of a run on one device."""


@dataclass
class Others:
    """The other ranks, as rank 0 sees them."""

    own: Rank
    send: "Send"
    processes: list[Any] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self, *arguments: Any) -> None:
        """Start them, and wait until they have joined. arguments: of ``member.take_part``, before its rank."""
        store = self.own.store
        for number in range(1, self.own.world):
            rank = Rank(number, self.own.world, self.own.backend)
            self.processes.append(started((*arguments, rank, store.port)))
        threading.Thread(target=self.watch, daemon=True).start()

    def lost(self) -> str:
        """Which rank has ended, and why; "" where none has."""
        codes = [process.poll() for process in self.processes]
        if not any(code is not None for code in codes):
            return ""
        killed = [i for i, code in enumerate(codes) if code is not None and code < 0]
        if killed:
            what = f"rank {killed[0] + 1} of {self.own.world} was ended by {signal.Signals(-codes[killed[0]]).name}"
        elif self.own.store.check(["failure"]):
            what = self.own.store.get("failure").decode()
        else:
            what = f"another rank of {self.own.world} ended"
        return f"{what}; run the same command again to go on from the last checkpoint"

    def watch(self) -> None:
        """End this process where a rank is lost and the call that waits for it does not return: the work of a
        thread."""
        while not self.ended.wait(POLL):
            if (lost := self.lost()) and not self.ended.wait(GRACE):
                self.send({"event": "failed", "message": f"{RankLost.__name__}: {lost}"})
                os._exit(1)

    def raise_if_lost(self, error: RuntimeError) -> None:
        """Raise RankLost where a call has failed because another rank has ended."""
        deadline = time.monotonic() + GRACE / 2
        while time.monotonic() < deadline:
            if lost := self.lost():
                raise RankLost(lost) from error
            time.sleep(POLL)

    def end(self, patience: float) -> None:
        """End them, by force after so many seconds."""
        self.ended.set()
        deadline = time.monotonic() + patience
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.wait()
        if distributed.is_initialized():
            distributed.destroy_process_group()


def started(arguments: Any) -> Any:
    """A process of ``member``; its arguments come by stdin, as those of a command are seen by every user."""
    environment = child_environment(os.environ)
    process = subprocess.Popen(MEMBER, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(pickle.dumps(arguments))
    return process


@contextlib.contextmanager
def together(spec: RunSpec, root: Path, newest: Path | None, send: "Send") -> Iterator[Rank]:
    """This process as rank 0 of a run, with the others until the block ends; alone for a run on one device.

    newest: the checkpoint to go on from. Raises RankLost where another rank ends before the block does.
    """
    if spec.devices == 1:
        yield ALONE
        return
    backend = "gloo" if spec.train["accelerator"] == "cpu" or not torch.cuda.is_available() else "nccl"
    own = Rank(0, spec.devices, backend, store=distributed.TCPStore(HOST, 0, is_master=True, timeout=JOIN))
    others, patience = Others(own, send), 0.0
    try:
        others.start(spec, root, newest)
        own.meet()
        yield own
        own.tell("end")
        patience = GRACE
    except RuntimeError as error:
        others.raise_if_lost(error)
        raise
    finally:
        others.end(patience)
