"""Tells the soak where a process of the command is: every call of a place sends "<pid> <phase>" to its socket.

Python imports this file at its start, also in the fork server, where this folder is in PYTHONPATH. A command that is
a fork of the test calls ``tell_all``.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import socket
import sys

PLACES = {
    "lit_memory.run.launchers.local": {"run_child": "start of a run"},
    "lit_memory.lit.callbacks.seed": {"StepSeed.on_train_batch_start": "training"},
    "lit_memory.lit.modules": {"LitMemory.validation_step": "validation", "LitMemory.test_step": "test"},
    "lit_memory.run.saving": {"save": "checkpoint"},
    "mlflow.tracking.client": {"MlflowClient.log_batch": "MLflow write", "MlflowClient.set_terminated": "end of a run"},
    "lit_memory.report.render": {"main_table": "report"},
}
"""Module -> function -> phase."""
START = "start of a process"
TELLER = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
TELLER.setblocking(False)


def tell(phase):
    with contextlib.suppress(OSError):  # the soak has ended, or does not listen fast enough
        TELLER.sendto(f"{os.getpid()} {phase}".encode(), os.environ["LIT_MEMORY_SOAK"])


def telling(inner, phase):
    @functools.wraps(inner)
    def call(*args, **kwargs):
        tell(phase)
        return inner(*args, **kwargs)

    return call


def wrap(module):
    for path, phase in PLACES[module.__name__].items():
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, module)
        setattr(owner, name, telling(getattr(owner, name), phase))


def tell_all():
    """Wrap the places of modules that are loaded already."""
    for name in PLACES:
        wrap(importlib.import_module(name))
    tell(START)


class Telling(importlib.abc.Loader):
    """A loader that wraps the places of a module after its own loader has filled it."""

    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        wrap(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in PLACES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = Telling(spec.loader)
        return spec


if __name__ == "sitecustomize" and "LIT_MEMORY_SOAK" in os.environ:
    sys.meta_path.insert(0, Finder())
    tell(START)
