"""Mamba beside Hugging Face's ``MambaForCausalLM`` on its path without kernels: training step and forward pass of the
same weights. Hugging Face's backward pass is quadratic in the length."""

from functools import partial

import torch

from benchmarks.work import Settings, Timed, Work, need, placed

BATCH, LAYERS, WIDTH, VOCAB, LENGTH = 8, 2, 64, 128, 384


def pass_over(settings: Settings, tiny: bool, theirs: bool = False, backward: bool = True) -> Timed:
    need("transformers")
    from transformers import MambaConfig, MambaForCausalLM

    from lit_memory.recurrence import unroll
    from lit_memory.registry import build

    ids = placed(torch.randint(VOCAB, (2, 20) if tiny else (BATCH, LENGTH)), settings)
    if theirs:
        config = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS}
        model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, use_cache=False, **config))
    else:
        model = build("model", {"name": "mamba", "vocab_size": VOCAB, "layers": LAYERS, "width": WIDTH})
    model = placed(model, settings)

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
