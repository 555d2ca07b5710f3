"""Which weights of a model are its memory's and which its backbone's, for ``peft``.

``LoraConfig(task_type="CAUSAL_LM", target_modules=backbone_layers(shell), modules_to_save=memory_modules(shell))`` adds
low-rank matrices to the backbone and trains the memory whole. All functions raise ValueError for a model that is not
built around the blocks of ``models.decoder``.
"""

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
    return [name for name, part in _outside(shell) if not any(part.children()) and [*part.parameters()]]


def memory_tokens(shell: Any) -> dict[str, nn.Parameter]:
    """The memory's weights that belong to no such module, such as memory tokens, by name.

    peft saves modules alone: ``requires_grad_(True)`` trains these as well, and then ``merge_and_unload`` and
    ``save_pretrained`` save them, while a folder with the adapter alone does not have them.
    """
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
