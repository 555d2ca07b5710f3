"""Which weights of a model are its memory's and which its backbone's, for ``peft``.

``LoraConfig(task_type="CAUSAL_LM", target_modules=backbone_layers(shell), modules_to_save=memory_modules(shell))`` adds
low-rank matrices to the backbone, and trains and saves the memory whole. All functions raise ValueError for a model
that is not built around the blocks of ``models.decoder``.
"""

import copy
from typing import Any

from torch import nn

from lit_memory.models.decoder import Block

SHARED = ("tokens", "positions", "norm", "head")
"""Parts of a decoder that are neither layers nor memory."""


def backbone_layers(shell: Any) -> list[str]:
    """Names of the linear layers in the blocks of a ``LitMemoryForCausalLM``."""
    return [
        f"{prefix}.{name}"
        for prefix, block in _blocks(shell).items()
        for name, part in block.named_modules()
        if isinstance(part, nn.Linear)
    ]


def memory_modules(shell: Any) -> list[str]:
    """Names of the modules with weights outside of the decoder's blocks, embeddings, norm and head."""
    names = [name for name, part in _outside(shell) if not any(part.children()) and [*part.parameters()]]
    return names + ["memory_tokens"] * bool(_bare(shell))


class MemoryTokens(nn.Module):
    """The memory's weights that belong to no such module, such as memory tokens, as one: peft saves modules alone.

    ``LitMemoryForCausalLM.memory_tokens``. It is empty while the model has these weights itself. A copy, which peft
    makes for every adapter, has weights of its own, and a call puts the weights of the module into the model.
    """

    def __init__(self, shell: nn.Module) -> None:
        super().__init__()
        self.whole = (shell,)  # in a tuple, as the shell is no part of this module
        self.places: dict[str, list[tuple[nn.Module, str]]] = {}
        """Own name of a weight -> all modules of the model that have it, and their name of it."""

    def forward(self) -> None:
        for name, weight in self._parameters.items():
            for module, own in self.places[name]:
                module._parameters[own] = weight

    def settled(self) -> "MemoryTokens":
        """Put the weights into the model for good; the empty module that is left."""
        self()
        return MemoryTokens(*self.whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MemoryTokens":
        """A copy in a copy of the whole model belongs to that; one of this module alone is for an adapter."""
        (shell,) = self.whole
        if copied := memo.get(id(shell)):
            made = MemoryTokens(copied)
            made.places = copy.deepcopy(self.places, memo)
        else:
            self._take()
            made = MemoryTokens(shell)
            made.places = self.places
        for name, weight in self._parameters.items():
            made.register_parameter(name, copy.deepcopy(weight, memo))
        return made

    def _take(self) -> None:
        """Have the model's weights as well: they are those without an adapter."""
        (shell,) = self.whole
        for path, weight in {} if self.places else _bare(shell).items():
            name = path.replace(".", "_")
            parts = [(part, own) for part in shell.modules() for own in part._parameters]
            self.places[name] = [(part, own) for part, own in parts if part._parameters[own] is weight]
            self.register_parameter(name, weight)


def _bare(shell: Any) -> dict[str, nn.Parameter]:
    """The memory's weights that a module with parts of its own has, by name."""
    return {
        f"{name}.{own}": parameter
        for name, part in _outside(shell)
        if any(part.children())
        for own, parameter in part.named_parameters(recurse=False)
    }


def _outside(shell: Any) -> list[tuple[str, nn.Module]]:
    """The modules of a model that lie in no block, embedding, norm or head of its decoder."""
    known = (*_blocks(shell), *(f"model.decoder.{name}" for name in SHARED))
    return [
        (name, part)
        for name, part in shell.named_modules()
        if not any(f"{name}.".startswith(f"{other}.") for other in known)
    ]


def _blocks(shell: Any) -> dict[str, Block]:
    """The blocks of the decoder, by name. Raises ValueError for a model without them."""
    found = {name: part for name, part in shell.named_modules() if isinstance(part, Block)}
    if not found:
        raise ValueError(f"{type(shell.model).__name__} has no transformer blocks; name the modules for peft yourself")
    return found
