"""What ``transformers`` is told about our models as soon as its Auto classes are there: cheap, the rest is in
``hub.py``.

``lit_memory/__init__.py`` calls ``register`` after each of the two modules that hold the Auto classes. torchmetrics,
and so every run, imports those, which is why nothing heavier may happen here.
"""

import sys
from typing import Any

from transformers.configuration_utils import PreTrainedConfig


class LitMemoryConfig(PreTrainedConfig):
    """What config.json says: the registered name of an architecture, the fields of its ``Config``, and the length of
    segments.

    segment_len: tokens per segment where a call does not say; default: one segment for all.
    """

    model_type = "lit_memory"

    def __init__(
        self, arch: str = "armt", settings: dict[str, Any] | None = None, segment_len: int | None = None, **others: Any
    ) -> None:
        self.arch, self.settings, self.segment_len = arch, settings or {}, segment_len
        self.vocab_size = self.settings.get("vocab_size")
        super().__init__(**others)


class LitMemoryForCausalLM:
    """Stands for the class of this name in ``hub.py``, which replaces it when it is first used."""

    config_class = LitMemoryConfig

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        from lit_memory.hf import shell as hub

        return hub.LitMemoryForCausalLM.from_pretrained(*args, **options)

    @classmethod
    def _from_config(cls, *args: Any, **options: Any) -> Any:
        from lit_memory.hf import shell as hub

        return hub.LitMemoryForCausalLM._from_config(*args, **options)


def register(module: str) -> None:
    """Enter our configuration or model into the Auto class of a module of transformers that has just been imported."""
    if module.endswith("configuration_auto"):
        sys.modules[module].AutoConfig.register(LitMemoryConfig.model_type, LitMemoryConfig, exist_ok=True)
    else:
        sys.modules[module].AutoModelForCausalLM.register(LitMemoryConfig, LitMemoryForCausalLM, exist_ok=True)
