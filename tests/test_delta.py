"""The delta rule in WY form against its two lines, token by token: values, final state and all gradients."""

import pytest
import torch
from torch.nn import functional as F

from lit_memory.memory import delta
from lit_memory.memory.delta import CHUNK, Kernels, by_chunks, delta_rule, with_kernels

LENGTHS = [1, 2, CHUNK, CHUNK + 1, 3 * CHUNK - 5]
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
DECAY = pytest.mark.parametrize("decays", [False, True], ids=["plain", "gated"])


def delta_inputs(T, decays, dtype=torch.float64, B=2, H=2, K=3, V=4, device="cpu"):
    """q, keys of unit length, v, beta up to 2, a state that is not zero, and log decays down to a forgotten memory."""
    draw = torch.Generator().manual_seed(T)
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, H, K, V), (B, T, H)]
    q, k, v, beta, state, decay = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    log_decay = F.logsigmoid(3 * decay)
    log_decay[0, T // 2] = -1000  # of an exponential that is 0
    inputs = [q, F.normalize(k, dim=-1), v, 2 * beta.sigmoid(), state, *([log_decay] if decays else [])]
    return [t.to(device, dtype).requires_grad_() for t in inputs]


def naive_delta(q, k, v, beta, S, log_decay=None):
    """(1) and (2), one token after another."""
    outs = []
    for t in range(q.shape[1]):
        if log_decay is not None:
            S = log_decay[:, t].exp()[..., None, None] * S
        missing = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], missing)
        outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outs, 1), S


def values_and_gradients(fn, inputs):
    """Output, final state, and the gradients of a random functional of both."""
    out, draw = fn(*inputs), torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t) for t in out]
    loss = sum((t * w).sum() for t, w in zip(out, weights, strict=True))
    return [*out, *torch.autograd.grad(loss, inputs)]


def agree(a, b, tol):
    """Relative to the largest entry of each tensor: gradients add up over time."""
    return all((x - y).abs().max() <= tol * max(1.0, y.abs().max().item()) for x, y in zip(a, b, strict=True))


@PRECISIONS
@DECAY
@pytest.mark.parametrize("T", LENGTHS)
def test_slow_twin(T, decays, dtype, tol):
    inputs = delta_inputs(T, decays, dtype)
    assert agree(values_and_gradients(delta_rule, inputs), values_and_gradients(naive_delta, inputs), tol)


@DECAY
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_chunk_changes_nothing(chunk, decays, monkeypatch):
    inputs = delta_inputs(2 * CHUNK + 3, decays, H=1, K=5, V=1)
    expected = values_and_gradients(by_chunks, inputs)
    monkeypatch.setattr(delta, "CHUNK", chunk)
    assert agree(values_and_gradients(by_chunks, inputs), expected, 1e-12)


def test_gradients_of_gradients():
    """The rule may be a part of something that is differentiated twice."""
    inputs = [t.detach().requires_grad_() for t in delta_inputs(3, True, B=1, H=1, K=2, V=1)]
    inputs[5].data.clamp_(min=-1)
    assert torch.autograd.gradgradcheck(by_chunks, inputs)


def test_a_decay_of_one_is_none():
    inputs = delta_inputs(CHUNK + 5, False)
    still = torch.zeros_like(inputs[3]).requires_grad_()
    gated = values_and_gradients(by_chunks, [*inputs, still])
    assert agree(gated[:-1], values_and_gradients(by_chunks, inputs), 1e-12)


@DECAY
def test_a_token_of_beta_and_log_decay_zero_changes_no_state(decays):
    """That is how padding is skipped, wherever it is in a chunk."""
    inputs, keep = [t.detach() for t in delta_inputs(CHUNK + 9, decays)], torch.arange(CHUNK + 9) % 3 > 0
    padded = [t * keep.view(1, -1, *[1] * (t.dim() - 2)) if i in (3, 5) else t for i, t in enumerate(inputs)]
    real = [t if i == 4 else t[:, keep] for i, t in enumerate(inputs)]
    (outs, state), expected = by_chunks(*padded), by_chunks(*real)
    assert agree([outs[:, keep], state], expected, 1e-12)


def test_what_the_rule_is_for():
    """With keys of unit length: beta 1 replaces a value and leaves those of orthogonal keys; beta 2 reflects."""
    k = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 0]].view(1, 4, 1, 4)
    v, beta = torch.randn(1, 4, 1, 3, dtype=torch.float64), torch.ones(1, 4, 1, dtype=torch.float64)
    state = by_chunks(k, k, v, beta, torch.zeros(1, 1, 4, 3, dtype=torch.float64))[1][0, 0]
    expected = torch.stack([v[0, 3, 0], v[0, 1, 0], v[0, 2, 0], torch.zeros(3, dtype=torch.float64)])
    assert torch.allclose(state, expected, rtol=1e-14)
    flipped = by_chunks(k[:, :1], k[:, :1], torch.zeros_like(v[:, :1]), 2 * beta[:, :1], state[None, None])[1][0, 0]
    assert torch.allclose(flipped, torch.cat([-state[:1], state[1:]]), rtol=1e-14)


def test_the_state_sets_the_precision():
    q, k, v, beta, state = (t.detach() for t in delta_inputs(5, False))
    outs, new = delta_rule(q.bfloat16(), k.bfloat16(), v.bfloat16(), beta.bfloat16(), state.float())
    assert outs.dtype == new.dtype == torch.float32


@DECAY
def test_how_the_kernels_are_called(decays):
    """A stand-in with the reference's arguments: its default scale of queries is K^-1/2, and its decay is in logs."""

    def stand_in(q, k, v, beta, g=None, scale=None, initial_state=None, output_final_state=False):
        assert output_final_state and all(t.is_contiguous() for t in (q, k, v, beta))
        return naive_delta(q * (k.shape[-1] ** -0.5 if scale is None else scale), k, v, beta, initial_state, g)

    def refuse(**options):
        raise AssertionError("the other kernel")

    inputs = delta_inputs(7, decays, torch.float32)
    kernels = Kernels(refuse, stand_in) if decays else Kernels(stand_in, refuse)
    found = with_kernels(kernels, *inputs, *([] if decays else [None]))
    assert agree(found, delta_rule(*inputs), 1e-5)
