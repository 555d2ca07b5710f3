"""Blocks of Qwen3 and Gemma (norms of queries and keys, heads of any width, scaled embeddings) in every architecture.

Their parity with Hugging Face is in test_interop.py.
"""

import pytest
import torch
from conftest import TINY, build_model
from test_pretrained import WRAPPING

from lit_memory.models.backbone import BackboneConfig
from lit_memory.models.decoder import Scaled
from lit_memory.recurrence import LayerMajor, Rereading, read_on, read_prompts, unroll
from lit_memory.recurrence.generate import pack

BLOCKS = {"family": "gemma", "qk_norm": True, "head_dim": 6, "heads": 4, "kv_heads": 2, "rotary_fraction": None}
N = 5


def make(name):
    """A tiny model in fp64 with all of it, whose norms of queries and keys are not 1."""
    model = build_model(name, {k: v for k, v in TINY.items() if k != "rotary_fraction"}, **BLOCKS)
    for part_name, part in model.named_parameters():
        if "q_norm" in part_name or "k_norm" in part_name:
            part.data.normal_(1.0, 0.3)
    return model


@pytest.mark.parametrize("name", WRAPPING)
@torch.no_grad()
def test_pieces_are_the_whole(name, tokens):
    """Read with a cache of keys and values, piece by piece, a text gives what it gives in whole segments; the state
    as well. And no later token changes an earlier one."""
    model, ids = make(name), tokens(2, 3 * N)
    whole = unroll(model, ids, N)
    first, position = read_prompts(model, pack(ids[:, :7]), N, last=False)
    second, position = read_on(model, position, ids[:, 7:9])
    third, position = read_on(model, position, ids[:, 9:])
    assert torch.allclose(torch.cat([first, second, third], dim=1), whole.hidden_BTD, rtol=1e-10, atol=1e-10)
    other = ids.clone()
    other[:, 7] = (other[:, 7] + 1) % 19
    changed = (unroll(model, other, N).hidden_BTD - whole.hidden_BTD).abs().amax((0, 2)) > 1e-12
    assert not changed[:7].any() and changed[7]


@pytest.mark.parametrize("name", [n for n in WRAPPING if isinstance(build_model(n), LayerMajor)])
def test_layer_by_layer_is_segment_by_segment(name, tokens):
    """Where no backward pass by hand knows these blocks, ``auto`` reads in order; the results are the same."""
    model, ids, found = make(name), tokens(2, 4 * N), []
    for schedule in ("sequential", "auto"):
        model.zero_grad()
        out = unroll(model, ids, N, schedule=schedule)
        out.hidden_BTD.square().sum().backward()
        found.append([out.hidden_BTD, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(*found, strict=True))
    if name == "armt":
        with pytest.raises(ValueError, match=r"its blocks \(gemma, qk_norm, head_dim\) have no backward pass by hand"):
            unroll(model, ids, N, schedule="layer")


def test_a_cache_is_used(tokens):
    assert not any(isinstance(make(name), Rereading) for name in WRAPPING)
    attention = make("transformer").decoder.layers[0].block.attention
    q, k, v = attention.heads(attention.qkv(torch.randn(2, N, 16).double()))
    assert (q.shape, k.shape, v.shape) == ((2, 4, N, 6), (2, 2, N, 6), (2, 2, N, 6))
    plain = q.transpose(1, 2) / attention.q_norm.weight
    assert torch.allclose(plain.square().mean(-1), torch.ones(2, N, 4).double(), atol=1e-2)


def test_a_memory_has_the_scale_of_scaled_embeddings(tokens):
    decoder = make("transformer").decoder
    assert isinstance(decoder.tokens, Scaled) and decoder.head.weight is decoder.tokens.weight
    rows, ids = decoder.tokens(tokens(2, N)), tokens(2, N)
    assert torch.allclose(rows, decoder.tokens.weight[ids] * 4)
    torch.manual_seed(0)
    assert decoder.memory_tokens(500).std().item() == pytest.approx(4 * decoder.tokens.weight.std().item(), rel=0.05)


def test_wrong_sizes():
    config = BackboneConfig(width=16, heads=3, head_dim=6, rotary_fraction=1.0)
    assert config.head_width == 6 and config.rotary_dims == 6
    with pytest.raises(ValueError, match=r"^width=16: expected a multiple of heads=3$"):
        BackboneConfig(width=16, heads=3)
    with pytest.raises(ValueError, match=r"^head_dim=0: expected at least 1$"):
        BackboneConfig(head_dim=0)
