"""What a model takes over from another one: a decoder becomes that of every architecture with a memory."""

import dataclasses

import pytest
import torch
from conftest import build_model
from test_experiment import plan

from lit_memory.models.inherited import check_inherited, inherited, parts_of
from lit_memory.plan.errors import ConfigError
from lit_memory.registry import MODELS, load_class

NOT = ("transformer", "larimar", "memreasoner")
"""What gives, and models that have an encoder besides."""


def around_a_decoder(name):
    """Whether an architecture is one around a decoder."""
    return {"family", "wrap_pos"} <= {f.name for f in dataclasses.fields(load_class("model", name).Config)}


def plain(model):
    """Weights of a model by the names that they have in a plain decoder."""
    return {name: model.state_dict()[full] for name, (_, full) in parts_of(model.state_dict()).items()}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("name", [name for name in MODELS if around_a_decoder(name) and name not in NOT])
def test_a_decoder_gets_a_memory(name, family):
    """All weights of a plain decoder are taken over, and nothing else changes; back again, the memory is left."""
    start = build_model("transformer", family=family, window=0)
    for p in start.parameters():
        p.data.normal_()
    model, fresh = (build_model(name, family=family) for _ in range(2))
    check_inherited(model, start)
    model.load_state_dict(inherited(model.state_dict(), start.state_dict()))
    given, found, drawn = plain(start), plain(model), plain(fresh)
    assert given.keys() <= found.keys() and len(found) > len(given)
    assert all(torch.equal(found[n], given.get(n, drawn[n])) for n in found)
    start.load_state_dict(
        inherited(build_model("transformer", family=family, window=0).state_dict(), model.state_dict())
    )
    assert all(torch.equal(tensor, given[n]) for n, tensor in plain(start).items())


def test_what_does_not_fit():
    """A part that both have is whole, of the same sizes, and computed in the same way."""
    start = build_model("transformer", family="llama", window=0)
    for flags, message in (
        ({"layers": 3}, "its layers is 2, that of the model 3; expected the same, set model.layers"),
        (
            {"rotary_fraction": 1.0},
            "its rotary_dims is 4, that of the model 8; expected the same, set model.rotary_fraction",
        ),
        ({"heads": 4}, "its heads is 2, that of the model 4; expected the same, set model.heads"),
        ({"qkv_bias": True}, r"it lacks decoder.layers.0.attention.qkv.bias, .*; expected the same weights in decoder"),
        ({"ff_mult": 1.0}, r"its decoder.layers.0.\w+.weight has shape .*; expected"),
    ):
        with pytest.raises(ValueError, match=message):
            check_inherited(build_model("armt", family="llama", **flags), start)
    with pytest.raises(ValueError, match=r"it has besides decoder.layers.0.attention.qkv.bias"):
        check_inherited(start, build_model("armt", family="llama", qkv_bias=True))


def test_a_plan_refuses_it(tree):
    """Before anything is trained."""
    other = {"train.init": {"run": "a"}, "model.heads": 1}
    message = r"tiny.yaml \(arm c\): train.init: {run: a}: its heads is \d, that of the model 1; expected the same"
    with pytest.raises(ConfigError, match=message):
        plan(tree, {"arms": tree["arms"] | {"c": other}})
