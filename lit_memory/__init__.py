"""Memory-augmented long-context transformers: models, tasks and the experiments of five papers.

Names are imported when they are first used, so that ``import lit_memory`` costs nothing. The Auto classes of
transformers know our models once both packages have been imported, in either order.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any

from lit_memory.registry import MODELS, TASKS, class_name, lit_names

_NAMES = {
    **{class_name(target): target.partition(":")[0] for target in (*MODELS.values(), *TASKS.values())},
    **dict.fromkeys((*lit_names(), "BabiData"), "lit_memory.lit"),
    "unroll": "lit_memory.recurrence",
    "generate": "lit_memory.recurrence",
    "load_reference": "lit_memory.hf.interop",
    "load_huggingface": "lit_memory.hf.interop",
    "LitMemoryConfig": "lit_memory.hf.autoclasses",
    "LitMemoryForCausalLM": "lit_memory.hf.shell",
    "load_experiment": "lit_memory.plan.experiment",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'lit_memory' has no attribute {name!r}")
    module = import_module(_NAMES[name])
    return module.load if name == "load_experiment" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__


class _AfterAutoClasses:
    """A finder that finds nothing itself: it has the modules of transformers' Auto classes followed by
    ``autoclasses.register``.

    transformers has no entry point for that, and importing it here would cost those who do not need it seconds.
    """

    modules = ("transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto")

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in cls.modules:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path[sys.meta_path.index(cls) + 1 :])  # type: ignore[arg-type]
        spec: Any = next((spec for spec in others if spec), None)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                cls.register(name)

            spec.loader.exec_module = execute_and_register
        return spec

    @staticmethod
    def register(name: str) -> None:
        import_module("lit_memory.hf.autoclasses").register(name)


for _module in _AfterAutoClasses.modules:
    if _module in sys.modules:
        _AfterAutoClasses.register(_module)
sys.meta_path.insert(0, _AfterAutoClasses)  # type: ignore[arg-type]
