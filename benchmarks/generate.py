"""128 new tokens after a prompt, greedy: ARMT and the plain decoder, beside a GPT-NeoX of that size in transformers,
with its cache. "ARMT, transformers' generate" is ours behind its ``GenerationMixin``.

The tokens of a row are the new ones; its time includes reading the prompt, which ARMT does in segments of 1,024.
"""

from functools import partial
from typing import Any

import torch

from benchmarks.work import Settings, Timed, Work, need, placed

VOCAB, SEGMENT, NEW = 1000, 1024, 128
LAYERS, WIDTH, HEADS = 4, 256, 4
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "family": "gpt_neox", "layers": LAYERS, "width": WIDTH, "heads": HEADS}


def prompts(settings: Settings, tiny: bool, prompt: int, batch: int) -> tuple[torch.Tensor, int]:
    """Prompts, and how many tokens to add."""
    return placed(torch.randint(VOCAB, (2, 9) if tiny else (batch, prompt)), settings), 3 if tiny else NEW


def armt() -> Any:
    from lit_memory.models.armt import ARMT

    return ARMT(ARMT.Config(memory_tokens=16, memory_dim=32, value_std=0.02, **SIZES)).eval()


def ours(settings: Settings, tiny: bool, prompt: int, batch: int) -> Timed:
    (ids, new), model = prompts(settings, tiny, prompt, batch), placed(armt(), settings)
    return Timed(lambda: model.generate(ids, new, segment_len=SEGMENT), new * len(ids))


def plain(settings: Settings, tiny: bool, prompt: int, batch: int) -> Timed:
    from lit_memory.models.transformer import Transformer

    (ids, new), model = prompts(settings, tiny, prompt, batch), Transformer(Transformer.Config(**SIZES)).eval()
    model = placed(model, settings)
    return Timed(lambda: model.generate(ids, new), new * len(ids))


def shell(settings: Settings, tiny: bool, prompt: int, batch: int) -> Timed:
    need("transformers")
    from lit_memory.hf import LitMemoryConfig, LitMemoryForCausalLM

    sizes = {"memory_tokens": 16, "memory_dim": 32, "value_std": 0.02, **SIZES}
    model = LitMemoryForCausalLM(LitMemoryConfig("armt", sizes, SEGMENT)).eval()
    return theirs(placed(model, settings), *prompts(settings, tiny, prompt, batch))


def transformers(settings: Settings, tiny: bool, prompt: int, batch: int) -> Timed:
    need("transformers")
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=prompt + NEW,
        bos_token_id=None,
        eos_token_id=None,
        **sizes,
    )
    model = placed(GPTNeoXForCausalLM(config).eval(), settings)
    return theirs(model, *prompts(settings, tiny, prompt, batch))


def theirs(model: Any, ids: torch.Tensor, new: int) -> Timed:
    """``generate`` of transformers."""
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
    return Timed(lambda: model.generate(ids, **options), new * len(ids))


def works() -> dict[str, Work]:
    ways = {"ARMT": ours, "decoder": plain, "ARMT, transformers' generate": shell, "transformers": transformers}
    return {
        f"generate/{prompt}x{batch}": Work(
            {name: partial(way, prompt=prompt, batch=batch) for name, way in ways.items()}
        )
        for prompt in (1024, 8192)
        for batch in (1, 8)
    }
