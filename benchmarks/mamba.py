"""Mamba beside Hugging Face's ``MambaForCausalLM`` on its path without kernels: training step and forward pass of the
same weights. Hugging Face's backward pass is quadratic in the length."""

from functools import partial

import torch

from benchmarks.work import Settings, Timed, Work, need, placed

BATCH, LAYERS, WIDTH, VOCAB, LENGTH = 8, 2, 64, 128, 384


def pass_over(settings: Settings, tiny: bool, theirs: bool = False, backward: bool = True) -> Timed:
    need("transformers")
    from transformers import MambaConfig, MambaForCausalLM

    from lit_memory.hf.huggingface import load_huggingface
    from lit_memory.recurrence import unroll

    ids = placed(torch.randint(VOCAB, (2, 20) if tiny else (BATCH, LENGTH)), settings)
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    source = MambaForCausalLM(MambaConfig(use_cache=False, **sizes))
    model = placed(source if theirs else load_huggingface(source, "mamba"), settings)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            logits = model(ids).logits if theirs else model.logits(unroll(model, ids).hidden_BTD)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if backward:
            loss.backward()
            model.zero_grad()

    return Timed(run, ids.numel())


def works() -> dict[str, Work]:
    return {
        f"mamba/{name}": Work(
            {
                "ours": partial(pass_over, backward=backward),
                "transformers": partial(pass_over, theirs=True, backward=backward),
            }
        )
        for name, backward in (("step", True), ("forward", False))
    }
