"""Blocks of GPT-J, and those of Qwen3 and of Gemma 1 to 3, all their differences at once, in every architecture around
a decoder.

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
BLOCKS |= {"query_scale": 0.6, "score_cap": 2.0, "logit_cap": 3.0, "post_norms": True, "rotary_bases": [10.0, 500.0]}
BLOCKS |= {"span": 20}
FAMILIES = {"gptj": {"family": "gptj"}, "gemma": BLOCKS}
N = 5


def make(name, family="gemma"):
    """A tiny model in fp64 with all of it, whose norms of queries and keys, and whose biases, are not what they are at
    first."""
    model = build_model(name, {k: v for k, v in TINY.items() if k != "rotary_fraction"}, **FAMILIES[family])
    for part_name, part in model.named_parameters():
        if "q_norm" in part_name or "k_norm" in part_name:
            part.data.normal_(1.0, 0.3)
        elif part_name == "decoder.head.bias":
            part.data.normal_(0.0, 0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", WRAPPING)
@torch.no_grad()
def test_pieces_are_the_whole(name, family, tokens):
    """Read with a cache of keys and values, piece by piece, a text gives what it gives in whole segments; the state
    as well. And no later token changes an earlier one."""
    model, ids = make(name, family), tokens(2, 3 * N)
    whole = unroll(model, ids, N)
    first, position = read_prompts(model, pack(ids[:, :7]), N, last=False)
    second, position = read_on(model, position, ids[:, 7:9])
    third, position = read_on(model, position, ids[:, 9:])
    assert torch.allclose(torch.cat([first, second, third], dim=1), whole.hidden_BTD, rtol=1e-10, atol=1e-10)
    other = ids.clone()
    other[:, 7] = (other[:, 7] + 1) % 19
    changed = (unroll(model, other, N).hidden_BTD - whole.hidden_BTD).abs().amax((0, 2)) > 1e-12
    assert not changed[:7].any() and changed[7]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [n for n in WRAPPING if isinstance(build_model(n), LayerMajor)])
def test_layer_by_layer_is_segment_by_segment(name, family, tokens):
    """Where no backward pass by hand knows these blocks, ``auto`` reads in order; the results are the same."""
    model, ids, found = make(name, family), tokens(2, 4 * N), []
    for schedule in ("sequential", "auto"):
        model.zero_grad()
        out = unroll(model, ids, N, schedule=schedule)
        out.hidden_BTD.square().sum().backward()
        found.append([out.hidden_BTD, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(*found, strict=True))
    if name == "armt":
        words = {"gptj": "gptj", "gemma": "gemma, head_dim, .*, rotary_bases"}[family]
        with pytest.raises(ValueError, match=rf"blocks \({words}\) have no backward pass by"):
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


def test_soft_caps():
    """With a cap that nothing reaches, the attention and the logits are those without one; the mask counts."""
    model, wide = make("transformer"), make("transformer")
    q, k, v = (torch.randn(2, heads, N, 6).double() for heads in (4, 2, 2))
    mask = torch.rand(2, 1, N, N) < 0.6
    mask |= torch.eye(N, dtype=torch.bool)
    for given, causal in ((None, True), (None, False), (mask, True)):
        attention = wide.decoder.layers[0].block.attention
        attention.cap = 1e6
        found = attention.mix(q, k, v, given, causal)
        attention.cap = 0.0
        assert torch.allclose(found, attention.mix(q, k, v, given, causal), rtol=1e-8, atol=1e-8)
    hidden = 100 * torch.randn(2, N, 16).double()
    assert model.logits(hidden).abs().max() <= 3 < (hidden @ model.decoder.head.weight.T).abs().max()


def test_segments_within_the_span(tokens):
    """What a sliding window would cut is refused, by the plan and by the model."""
    model = make("rmt")
    model.config.check_segment(20 - 2 * model.config.memory_tokens)
    with pytest.raises(ValueError, match=r"^span=20: a segment of 17 tokens takes 21 rows; shorten it$"):
        model.config.check_segment(17)
    with pytest.raises(ValueError, match=r"^2\d rows in one segment, but span=20: use shorter segments$"):
        model.step(model.init_state(2), tokens(2, 19))
    with pytest.raises(ValueError, match=r"^2\d rows in one segment, but span=20: use shorter segments$"):
        make("transformer").generate(tokens(1, 15), 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rotary_bases": [1.0]}, r"^rotary_bases=\[1\.0\]: expected none, or 4 numbers above 0$"),
        ({"query_scale": 0.0}, "^query_scale=0.0: expected more than 0$"),
        ({"post_norms": True}, "^post_norms=True: expected a family of llama or gemma$"),
        ({"score_cap": -1.0}, "^score_cap=-1.0: expected 0 or more$"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        BackboneConfig(**settings)


def test_wrong_sizes():
    config = BackboneConfig(width=16, heads=3, head_dim=6, rotary_fraction=1.0)
    assert config.head_width == 6 and config.rotary_dims == 6
    with pytest.raises(ValueError, match=r"^width=16: expected a multiple of heads=3$"):
        BackboneConfig(width=16, heads=3)
    with pytest.raises(ValueError, match=r"^head_dim=0: expected at least 1$"):
        BackboneConfig(head_dim=0)
