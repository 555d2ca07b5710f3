"""Import of weights: the reference's golden vectors, Hugging Face's logits, and all inputs that are errors."""

import json
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from lit_memory.hf.huggingface import load_huggingface
from lit_memory.hf.names import HEAD
from lit_memory.hf.reference import LAYOUTS, load_reference
from lit_memory.models import attention
from lit_memory.recurrence import state_tensors, unroll
from lit_memory.registry import MODELS

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
NAMES = ["armt_gpt2_clip_s10", "armt_gpt2_off_s11", "armt_neox_clip_s10", "armt_neox_off_s11"]
NAMES += ["rmt_gpt2_s12", "rmt_neox_s13", "prmt_gpt2_s14", "prmt_neox_s14"]
BACKBONES = {
    "gpt2": "model.transformer.h",
    "gptj": "model.transformer.h",
    "neox": "model.gpt_neox.layers",
    "llama": "model.model.layers",
    "qwen2": "model.model.layers",
    "qwen3": "model.model.layers",
    "gemma": "model.model.layers",
    "gemma2": "model.model.layers",
    "gemma3": "model.model.layers",
}
TIED = ("gpt2", "qwen2", "gemma", "gemma2", "gemma3")  # in the tests; the head may then be missing
SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LATER = {"intermediate_size": 40, "num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 5}
LATER |= {"sliding_window": 16, "pad_token_id": 0, "attn_implementation": "eager"}
IDS = torch.randint(23, (2, 12), generator=torch.Generator().manual_seed(1))


def hugging_face(backbone, **settings):
    """A tiny model in fp64 whose every weight is random, biases and norms included."""
    import transformers as hf

    model_class, config_class, defaults = {
        "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, {"n_positions": 20}),
        "gptj": (hf.GPTJForCausalLM, hf.GPTJConfig, {"n_positions": 20, "rotary_dim": 6}),
        "neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {"intermediate_size": 64}),
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {"intermediate_size": 40, "num_key_value_heads": 1}),
        "qwen2": (
            hf.Qwen2ForCausalLM,
            hf.Qwen2Config,
            {"intermediate_size": 24, "num_key_value_heads": 2, "tie_word_embeddings": True},
        ),
        "qwen3": (
            hf.Qwen3ForCausalLM,
            hf.Qwen3Config,
            {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8},
        ),
        "gemma": (
            hf.GemmaForCausalLM,
            hf.GemmaConfig,
            {"intermediate_size": 40, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0},
        ),
        "gemma2": (
            hf.Gemma2ForCausalLM,
            hf.Gemma2Config,
            {**LATER, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        ),
        "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {**LATER, "sliding_window_pattern": 2}),
    }[backbone]
    model = model_class(config_class(**{**SIZES, **defaults, **settings}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.normal_(std=0.4, generator=generator)
    return model.eval()


def reference_weights(arch, backbone):
    """A checkpoint as the reference code names it: 3 memory tokens, key width 5."""
    weights = {f"model.{name}": t.detach().clone() for name, t in hugging_face(backbone).state_dict().items()}
    generator = torch.Generator().manual_seed(2)
    armt = {
        "W_mq.weight": (5, 16),
        "W_mk.weight": (5, 16),
        "W_mv.weight": (16, 16),
        "W_mb.weight": (1, 16),
        "W_mb.bias": (1,),
    }
    if arch in (wrapped := {"prmt": {"memory": (1, 3, 16)}, "armt": armt}):
        weights = {re.sub(r"(\.(?:h|layers)\.\d+)\.", r"\1.layer.", name): t for name, t in weights.items()}
        shapes = {f"{BACKBONES[backbone]}.{i}.{name}": shape for i in range(2) for name, shape in wrapped[arch].items()}
        weights |= {
            name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()
        }
    return (
        weights
        if arch == "transformer"
        else weights | {"memory": torch.randn(3, 16, dtype=torch.float64, generator=generator)}
    )


@pytest.fixture
def exact(monkeypatch):
    """Hugging Face computes rotary tables and RMS norms in fp32 even in an fp64 model; here it does all in fp64."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm, GemmaRotaryEmbedding
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm, Gemma2RotaryEmbedding
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3RotaryEmbedding
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
    from transformers.models.gptj.modeling_gptj import GPTJRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

    def table(self, x, position_ids):
        rope, head = self.config.rope_parameters, self.config.hidden_size // self.config.num_attention_heads
        head = getattr(self.config, "head_dim", None) or head
        dims = int(head * rope.get("partial_rotary_factor", 1.0))
        frequency = 1.0 / rope["rope_theta"] ** (torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        angle = (position_ids[..., None].double() * frequency).repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    def rms(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()

    def gemma_rms(self, x):
        return (1 + self.weight) * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def table3(self, x, position_ids, layer_type):
        rope = self.config.rope_parameters[layer_type]
        frequency = 1.0 / rope["rope_theta"] ** (
            torch.arange(0, self.config.head_dim, 2).double() / self.config.head_dim
        )
        angle = (position_ids[..., None].double() * frequency).repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    def pairs(self, x, position_ids):
        frequency = 10_000 ** (-torch.arange(0, self.pos_embd_dim, 2).double() / self.pos_embd_dim)
        angle = position_ids[..., None].double() * frequency
        return angle.sin(), angle.cos()

    monkeypatch.setattr(GPTJRotaryEmbedding, "forward", pairs)
    monkeypatch.setattr(Gemma3RotaryEmbedding, "forward", table3)
    softmax = torch.nn.functional.softmax  # theirs is computed in fp32
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    rotary = (LlamaRotaryEmbedding, Qwen2RotaryEmbedding, Qwen3RotaryEmbedding)
    rotary = (*rotary, GemmaRotaryEmbedding, Gemma2RotaryEmbedding)
    for module in (GPTNeoXRotaryEmbedding, *rotary):
        monkeypatch.setattr(module, "forward", table)
    for module in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(module, "forward", rms)
    for module in (GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm):
        monkeypatch.setattr(module, "forward", gemma_rms)


def load(weights, arch="armt", backbone="gpt2", n_head=2, **flags):
    return load_reference(weights, arch=arch, backbone=backbone, n_head=n_head, **flags)


def logits(model, segment_len=4):
    with torch.no_grad():
        return model.logits(unroll(model, IDS, segment_len).hidden_BTD)


def refused(error, words, call, *args, **kwargs):
    """The call must raise an error of one line that contains the word, or each of the words."""
    with pytest.raises(error) as info:
        call(*args, **kwargs)
    message = str(info.value)
    assert "\n" not in message and all(word in message for word in ([words] if isinstance(words, str) else words)), (
        message
    )


def compare_golden(name, logits_atol, state_rtol):
    """Run a golden file segment by segment. States are compared relative to their largest entry."""
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden vectors in {GOLDEN}")
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        meta, golden = json.loads(file.metadata()["meta"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    weights = {key.removeprefix("w."): t for key, t in golden.items() if key.startswith("w.")}
    model = load(
        weights,
        meta["arch"],
        meta["backbone"],
        meta["n_head"],
        **{key: meta[key] for key in ("gamma", "nu") if key in meta},
    )
    state = model.init_state(meta["batch"])
    for s, segment in enumerate(golden["input_ids"].split(meta["segment_size"], dim=1)):
        with torch.no_grad():
            hidden, state = model.step(state, segment)
            torch.testing.assert_close(model.logits(hidden), golden[f"logits.{s}"], rtol=0, atol=logits_atol)
        expected = {key: t for key, t in golden.items() if re.match(rf"(A|z|memory)\.{s}\b", key)}
        ours = {f"memory.{s}": state} if meta["arch"] == "rmt" else {}
        if meta["arch"] == "armt":
            ours = {f"{part}.{s}.{i}": t for i, layer in enumerate(state) for part, t in zip("Az", layer, strict=True)}
        assert ours.keys() == expected.keys()
        for key, t in expected.items():
            torch.testing.assert_close(ours[key], t, rtol=0, atol=state_rtol * max(1.0, t.abs().max().item()))


@pytest.mark.parametrize("name", NAMES)
def test_golden(name):
    # NeoX: 6.6e-7 was measured, well within the 1e-4 that the golden vectors ask for
    compare_golden(name, *((1e-8, 1e-10) if "gpt2" in name else (1e-5, 1e-5)))


@pytest.mark.parametrize("name", [name for name in NAMES if "neox" in name])
def test_golden_neox_differs_by_the_precision_of_rotary_tables_only(name, monkeypatch):
    def table_in_fp32(length, dims, base, device, dtype):
        frequency = 1.0 / (base ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims))
        angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency.repeat(2)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    monkeypatch.setattr(attention, "rotary_table", table_in_fp32)
    compare_golden(name, 1e-10, 1e-10)


SETTINGS = [
    ("gpt2", {"num_attention_heads": 1}),
    ("gpt2", {"num_attention_heads": 4, "tie_word_embeddings": False}),
    (
        "gpt2",
        {"n_inner": 32, "layer_norm_epsilon": 1e-2, "num_hidden_layers": 3, "activation_function": "gelu_pytorch_tanh"},
    ),
    ("gptj", {}),
    ("gptj", {"num_attention_heads": 4, "rotary_dim": 4, "n_inner": 40, "layer_norm_epsilon": 1e-2}),
    ("gptj", {"num_attention_heads": 1, "rotary_dim": 10, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    ("neox", {"rotary_pct": 0.25}),
    ("neox", {"rotary_pct": 1.0, "num_attention_heads": 4, "tie_word_embeddings": True}),
    ("neox", {"rotary_pct": 0.5, "num_attention_heads": 1, "layer_norm_eps": 1e-2}),
    (
        "neox",
        {"rotary_pct": 0.25, "hidden_size": 24, "intermediate_size": 40},
    ),  # 3 of the 12 channels of a head: Hugging Face rotates 4
    ("neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    ("llama", {}),
    (
        "llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        },
    ),
    (
        "llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "num_hidden_layers": 3,
        },
    ),
    ("qwen2", {}),
    (
        "qwen2",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": False, "hidden_size": 24}),
    ("qwen3", {}),
    ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": True}),
    ("llama", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12}),
    ("gemma", {}),
    ("gemma", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "rms_norm_eps": 1e-2}),
    ("gemma", {"tie_word_embeddings": False, "head_dim": 10, "num_hidden_layers": 1}),
    ("gemma2", {}),
    ("gemma2", {"attn_logit_softcapping": None, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}),
    ("gemma3", {}),
    ("gemma3", {"num_hidden_layers": 3, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("backbone", "settings"), SETTINGS)
@pytest.mark.usefixtures("exact")
def test_logits_are_hugging_faces(backbone, settings):
    theirs = hugging_face(backbone, **settings)
    with torch.no_grad():
        expected = theirs(IDS).logits
    model = load_huggingface(theirs)
    tied = settings.get("tie_word_embeddings", backbone in TIED)
    assert model.config.tie_embeddings is tied and (model.decoder.head.weight is model.decoder.tokens.weight) is tied
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float64}
    torch.testing.assert_close(logits(model, 12), expected, rtol=0, atol=1e-11)
    if tied or backbone != "gpt2":  # the same weights as the plain decoder of the reference code
        names = ("norm_eps", "rotary_fraction", "rotary_base", "rotary_bases", "query_scale", "score_cap")
        flags = {name: getattr(model.config, name) for name in (*names, "logit_cap", "span")}
        flags |= {"tie_embeddings": tied}
        again = load(theirs.state_dict(), "transformer", backbone, theirs.config.num_attention_heads, **flags)
        torch.testing.assert_close(logits(again, 12), logits(model, 12), rtol=0, atol=0)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_logits_of_hugging_face_as_it_is(backbone):
    """Its fp32 tables and norms make the difference: 5e-7 in the logits, where GPT-2, which has neither, agrees to
    rounding."""
    theirs = hugging_face(backbone)
    with torch.no_grad():
        torch.testing.assert_close(
            logits(load_huggingface(theirs), 12), theirs(IDS).logits, rtol=0, atol=1e-11 if backbone == "gpt2" else 1e-5
        )


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.usefixtures("exact")
def test_fresh_armt_is_the_backbone_on_tokens_and_memory(backbone):
    theirs = hugging_face(backbone)
    armt, plain = load_huggingface(theirs, "armt", memory_tokens=3, memory_dim=5), load_huggingface(theirs)
    state = armt.init_state(2)
    for segment in IDS.split(4, dim=1):
        with torch.no_grad():
            rows = torch.cat([plain.decoder.tokens(segment), armt.memory.expand(2, -1, -1)], dim=1)
            expected, x = theirs(inputs_embeds=rows).logits[:, :4], plain.decoder.add_positions(rows)
            for layer in plain.layers:
                x = layer.block(x)
            hidden, state = armt.step(state, segment)
            assert torch.equal(hidden, plain.decoder.norm(x)[:, :4])
            torch.testing.assert_close(armt.logits(hidden), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("arch", LAYOUTS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_architecture_takes_the_decoder_of_hugging_face(arch, backbone):
    theirs = hugging_face(backbone)
    plain = {name.replace(".block.", "."): t for name, t in load_huggingface(theirs).decoder.state_dict().items()}
    model = load_huggingface(theirs, arch, **({} if arch == "transformer" else {"memory_tokens": 2}))
    ours = {name.replace(".block.", "."): t for name, t in model.decoder.state_dict().items()}
    assert all(torch.equal(ours[name], t) for name, t in plain.items()) and logits(model).isfinite().all()
    with torch.no_grad():
        model.decoder.tokens.weight.zero_()
    assert theirs.get_input_embeddings().weight.abs().sum() > 0  # copied, not shared
    if arch in ("rmt", "tarm", "armt"):  # a fresh memory has the scale of the imported embeddings
        memory = load_huggingface(theirs, arch, memory_tokens=100).memory
        scale = 4 if "gemma" in backbone else 1  # the square root of the width
        assert memory.dtype == torch.float64 and memory.std().item() == pytest.approx(
            scale * theirs.get_input_embeddings().weight.std().item(), rel=0.1
        )


@pytest.mark.parametrize(("arch", "before"), [("armt", 0), ("rmt", 3), ("tarm", 3), ("prmt", 3)])
def test_wrapped_positions(arch, before):
    """wrap_pos (spec 2): tokens have positions 0..n-1, memory rows those behind the pretrained table, first the read
    rows."""
    weights, segment, seen = reference_weights("rmt" if arch == "tarm" else arch, "gpt2"), IDS[:, :6], []
    model, plain, table = (
        load(weights, arch, wrap_pos=True),
        load(weights, arch),
        weights["model.transformer.wpe.weight"],
    )
    last = 20 - before - 3
    assert model.config.positions == last and torch.equal(model.decoder.positions.weight, table)
    for write in (True, False):
        handle = model.decoder.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model.step(model.init_state(2), segment, write=write)
        handle.remove()
        after = 3 if write else 0
        memory = weights["memory"].expand(2, -1, -1) * (arch != "prmt")  # PRMT overwrites these rows
        rows = torch.cat([memory[:, :before], model.decoder.tokens(segment), memory[:, :after]], dim=1)
        positions = [*range(last, last + before), *range(6), *range(last + before, last + before + after)]
        assert torch.equal(seen.pop(), rows + table[positions])
    model.config.check_segment(last)
    refused(ValueError, (f"positions={last}", f"{last + 1} rows"), model.config.check_segment, last + 1)
    refused(ValueError, f"table has {last}", model.step, model.init_state(1), IDS.repeat(1, 2)[:1, : last + 1])
    assert not torch.allclose(
        *(torch.cat([t.flatten() for t in state_tensors(unroll(m, IDS, 4).state)]) for m in (model, plain)), atol=1e-3
    )
    refused(ValueError, "wrap_pos", load, reference_weights("rmt", "neox"), "rmt", "neox", wrap_pos=True)
    refused(
        ValueError,
        "positions",
        load,
        weights | {"model.transformer.wpe.weight": table[: before + 3]},
        arch,
        wrap_pos=True,
    )
    grown = load_huggingface(hugging_face("gpt2"), arch, memory_tokens=3, wrap_pos=True)
    assert grown.config.positions == 20 and grown.decoder.positions.num_embeddings == 20 + before + 3
    assert torch.equal(grown.decoder.positions.weight[:20], table) and logits(grown).isfinite().all()


def test_folders(tmp_path):
    theirs = {backbone: hugging_face(backbone) for backbone in BACKBONES}
    for backbone, model in theirs.items():
        model.save_pretrained(tmp_path / backbone)
        model.save_pretrained(tmp_path / f"{backbone}-shards", max_shard_size="5KB")
    assert (tmp_path / "neox-shards" / "model.safetensors.index.json").is_file()
    theirs["gpt2"].transformer.save_pretrained(tmp_path / "gpt2-headless")
    theirs["qwen2"].model.save_pretrained(tmp_path / "qwen2-headless")
    theirs["gpt2"].config.save_pretrained(tmp_path / "gpt2-bin")
    torch.save(theirs["gpt2"].state_dict(), tmp_path / "gpt2-bin" / "pytorch_model.bin")
    for folder in sorted(tmp_path.iterdir()):
        expected = load_huggingface(theirs[folder.name.partition("-")[0]]).state_dict()
        loaded = load_huggingface(folder).state_dict()
        assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], t) for name, t in expected.items()), (
            folder.name
        )
    next((tmp_path / "neox-shards").glob("*00001*")).unlink()
    refused(FileNotFoundError, "model-00001", load_huggingface, tmp_path / "neox-shards")
    refused(FileNotFoundError, "config.json", load_huggingface, str(tmp_path / "nothing"))
    (tmp_path / "gpt2" / "config.json").write_text("{")
    refused(ValueError, ".json", load_huggingface, tmp_path / "gpt2")


@pytest.mark.parametrize("arch", LAYOUTS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_reference_is_strict(arch, backbone):
    weights, layer = reference_weights(arch, backbone), f"{BACKBONES[backbone]}.1"
    optional = {"memory"} if arch == "prmt" else set()  # never used
    optional |= {"model.lm_head.weight"} if backbone not in ("gptj", "neox") else set()  # tied
    for name, tensor in weights.items():
        without = {other: t for other, t in weights.items() if other != name}
        if name in optional:
            load(without, arch, backbone)
            continue
        refused(ValueError, ("missing", name.removeprefix("model.")), load, without, arch, backbone)
        refused(ValueError, "state_dict: ", load, weights | {name: tensor.new_ones(*tensor.shape, 2)}, arch, backbone)
        if name not in ("memory", "model.transformer.wpe.weight"):  # nothing else depends on their length
            refused(ValueError, "expected", load, weights | {name: torch.cat([tensor, tensor[-1:]])}, arch, backbone)
    for surplus in (f"{layer}.W_new.weight", "model.score.weight", "extra"):
        refused(
            ValueError,
            ("surplus", surplus.removeprefix("model.")),
            load,
            weights | {surplus: torch.ones(2).double()},
            arch,
            backbone,
        )
    refused(
        ValueError,
        ("two weights", HEAD),
        load,
        weights | {"embed_out.weight": weights["model.lm_head.weight"]},
        arch,
        backbone,
    )
    refused(ValueError, ("missing", "check"), load, weights, arch, "neox" if backbone == "gpt2" else "gpt2")
    refused(ValueError, ("width=16", "heads=3"), load, weights, arch, backbone, n_head=3)


@pytest.mark.parametrize("arch", LAYOUTS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_prefixes_of_the_wrapper(arch, backbone):
    """The reference's checkpoints have the names of its inner module, with or without ``memory_cell.``."""
    weights = reference_weights(arch, backbone)
    expected = logits(load(weights, arch, backbone))
    assert torch.equal(
        logits(load({f"memory_cell.{name}": t for name, t in weights.items()}, arch, backbone)), expected
    )


@pytest.mark.parametrize("buffer", ["attn.bias", "layer.attn.masked_bias", "attention.rotary_emb.inv_freq"])
def test_prefixes_and_buffers_of_old_checkpoints(buffer):
    weights = reference_weights("armt", "gpt2")
    old = {f"memory_cell.{name}": t for name, t in weights.items()} | {
        f"memory_cell.model.transformer.h.0.{buffer}": torch.ones(1, 1, 9, 9).bool()
    }
    assert torch.equal(logits(load(old)), logits(load(weights)))


def test_flags_reach_the_configuration():
    weights = reference_weights("armt", "gpt2")
    runs = [
        logits(load(weights, **flags))
        for flags in ({}, {"gamma": "off"}, {"nu": 3}, {"nu": 2}, {"n_head": 4}, {"norm_eps": 0.1})
    ]
    assert [torch.equal(run, runs[0]) for run in runs] == [True, False, True, False, False, False]
    rmt = reference_weights("rmt", "neox")
    tarm = {alpha: logits(load(rmt, "tarm", "neox", alpha=alpha)) for alpha in (0.2, 1.0)}
    torch.testing.assert_close(tarm[1.0], logits(load(rmt, "rmt", "neox")))
    assert not torch.allclose(tarm[0.2], tarm[1.0]) and not torch.allclose(
        logits(load(rmt, "rmt", "neox", rotary_fraction=1.0)), tarm[1.0]
    )
    refused(TypeError, ("gama", "gamma"), load, weights, gama="off")
    refused(ValueError, ("gamma", "off"), load, weights, gamma="of")
    refused(ValueError, ("width=16", "leave it out"), load, weights, width=16)
    refused(ValueError, ("amrt", "armt"), load, weights, arch="amrt")
    refused(ValueError, ("gpt-2", "gpt2"), load, weights, backbone="gpt-2")
    refused(ValueError, "state_dict: no weights", load, {})


def test_precision_and_tying():
    weights = reference_weights("armt", "gpt2")
    for dtype in (torch.float32, torch.bfloat16):
        assert {p.dtype for p in load({name: t.to(dtype) for name, t in weights.items()}).parameters()} == {dtype}
    refused(ValueError, ("float32", "float64"), load, weights | {"memory": weights["memory"].float()})
    refused(ValueError, "int64", load, {name: t.long() for name, t in weights.items()})
    untied = weights | {"model.lm_head.weight": weights["model.lm_head.weight"] + 1}
    assert load(weights).config.tie_embeddings and not load(untied).config.tie_embeddings
    refused(ValueError, "tied", load, untied, tie_embeddings=True)
    neox = {name: t for name, t in reference_weights("rmt", "neox").items() if name != "model.lm_head.weight"}
    assert load(neox, "rmt", "neox", tie_embeddings=True).config.tie_embeddings


OTHER = {  # settings with which Hugging Face computes something else
    "gpt2": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "add_cross_attention": True},
    "gptj": {"activation_function": "gelu", "rotary_dim": 7, "resid_pdrop": 0.5},
    "neox": {"use_parallel_residual": False, "hidden_act": "gelu_fast", "attention_bias": False, "hidden_dropout": 0.5},
    "llama": {"hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "attention_dropout": 0.5},
    "qwen2": {"hidden_act": "gelu", "use_sliding_window": True, "attention_dropout": 0.5},
    "qwen3": {"hidden_act": "gelu", "use_sliding_window": True, "attention_bias": True, "attention_dropout": 0.5},
    "gemma": {"hidden_act": "silu", "attention_bias": True, "use_bidirectional_attention": True},
    "gemma2": {"hidden_activation": "silu", "attention_bias": True, "attention_dropout": 0.5},
    "gemma3": {"hidden_activation": "silu", "use_bidirectional_attention": True},
}
REFUSED = [(backbone, name, value) for backbone, settings in OTHER.items() for name, value in settings.items()]
REFUSED += [("gpt2", "activation_function", value) for value in ("gelu", "gelu_fast", "relu")]
SLIDING = {"rope_type": "default", "rope_theta": 500.0}
REFUSED += [
    (
        "gemma3",
        "rope_parameters",
        {"sliding_attention": SLIDING, "full_attention": SLIDING | {"rope_type": "linear", "factor": 8.0}},
    )
]
REFUSED += [
    (backbone, "rope_parameters", {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0})
    for backbone in ("neox", "llama", "qwen2", "qwen3", "gemma", "gemma2")
]


@pytest.mark.parametrize(("backbone", "name", "value"), REFUSED)
def test_settings_with_other_numbers_are_refused(backbone, name, value):
    words = {"rope_parameters": "rope_type", "add_cross_attention": "crossattention"}
    refused(ValueError, words.get(name, name), load_huggingface, hugging_face(backbone, **{name: value}))


def test_huggingface_flags():
    theirs = hugging_face("gpt2", attn_pdrop=0.2, embd_pdrop=0.2, resid_pdrop=0.2)
    assert load_huggingface(theirs).config.dropout == 0.2 and load_huggingface(theirs, dropout=0.0).config.dropout == 0
    refused(ValueError, "heads=1", load_huggingface, theirs, heads=1)
    refused(TypeError, ("memory_token'", "memory_tokens"), load_huggingface, theirs, "rmt", memory_token=3)
    refused(TypeError, ("dict", "load_reference"), load_huggingface, theirs.state_dict())
    refused(
        ValueError,
        ("bert", "gpt2, gptj, gpt_neox, llama, qwen2"),
        load_huggingface,
        SimpleNamespace(config=SimpleNamespace(model_type="bert"), state_dict=dict),
    )
    llama = hugging_face("llama", attention_dropout=0.2)
    assert load_huggingface(llama, dropout=0.1).config.dropout == 0.1


class Hostile:
    """Unpickling this would write a file."""

    def __reduce__(self):
        return Path.touch, (Path("run"),)


def test_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = logits(load(weights := reference_weights("armt", "gpt2")))
    for suffix in ("safetensors", "bin", "pt", "pth"):
        path, broken = tmp_path / f"model.{suffix}", tmp_path / f"broken.{suffix}"
        safetensors.torch.save_file(weights, path) if suffix == "safetensors" else torch.save(weights, path)
        assert torch.equal(logits(load(path if suffix == "pt" else str(path))), expected)
        whole = path.read_bytes()
        for content in (
            b"",
            b"PK",
            whole[:9],
            whole[: len(whole) // 2],
            whole[:-9],
            b"\x80\x02garbage",
            bytes(range(256)) * 9,
            b"{}",
        ):
            broken.write_bytes(content)
            refused(ValueError, str(broken), load, broken)
    for name, content in (
        ("list.pt", [torch.ones(2)]),
        ("nested.pt", {"model_state_dict": weights, "step": 3}),
        ("hostile.pt", Hostile()),
    ):
        torch.save(content, name)
        refused(ValueError, (name, "state_dict"), load, name)
    Path("hostile.bin").write_bytes(pickle.dumps(Hostile()))
    Path("weights.ckpt").touch()
    for error, name in (
        (ValueError, "hostile.bin"),
        (FileNotFoundError, "none.bin"),
        (FileNotFoundError, "."),
        (ValueError, "weights.ckpt"),
    ):
        refused(error, name, load, name)
    assert not Path("run").exists()


def test_architectures_without_checkpoints_of_the_reference():
    """An architecture that the reference code lacks is an error of one line. Of these, RMT-R, Larimar and MemReasoner
    can have a Hugging Face decoder."""
    theirs = hugging_face("gpt2")
    for arch in sorted(set(MODELS) - set(LAYOUTS) - {"mamba"}):
        refused(
            ValueError, (f"arch={arch!r}", "not known here", "expected one of transformer", "mamba"), load, {}, arch
        )
        if arch == "rmt_r":
            model = load_huggingface(theirs, arch, memory_tokens=2)
            assert model.memory.shape == (4, 16) and logits(model).isfinite().all()
            assert torch.equal(model.decoder.tokens.weight, theirs.get_input_embeddings().weight)
        elif arch in ("larimar", "memreasoner"):  # their encoder has the decoder's embeddings
            model = load_huggingface(theirs, arch, latent_width=8, slots=4)
            assert logits(model).isfinite().all() and torch.equal(
                model.decoder.tokens.weight, theirs.get_input_embeddings().weight
            )
        else:
            refused(
                ValueError,
                (f"arch={arch!r}", "expected an architecture around a gpt2 decoder"),
                load_huggingface,
                theirs,
                arch,
            )


# Mamba


def hugging_face_mamba(**settings):
    """A tiny Mamba in fp64 whose every weight is random."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {
        "vocab_size": 23,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "state_size": 5,
        "conv_kernel": 3,
        "time_step_rank": 2,
        "expand": 3,
    }
    model = MambaForCausalLM(MambaConfig(**{**sizes, **settings}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.normal_(std=0.4, generator=generator)
    return model.eval()


def test_golden_mamba():
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden vectors in {GOLDEN}")
    golden = safetensors.torch.load_file(GOLDEN / "mamba_hf_s15.safetensors")
    model = load_reference(
        {k.removeprefix("w."): t for k, t in golden.items() if k.startswith("w.")}, arch="mamba", backbone=None
    )
    ids = golden["input_ids"]
    for segment_len in (
        45,
        1,
        7,
        32,
    ):  # one pass, tokens, and ragged segments; the logits were written in fp32, and 2.2e-7 was measured
        with torch.no_grad():
            ours = model.logits(unroll(model, ids, segment_len).hidden_BTD)
        torch.testing.assert_close(ours, golden["logits"].double(), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*fast path is not available")
@pytest.mark.parametrize(
    "settings",
    [{}, {"tie_word_embeddings": False, "layer_norm_epsilon": 0.1}, {"expand": 1, "conv_kernel": 2}],
    ids=str,
)
def test_mamba_of_hugging_face(settings, tmp_path):
    theirs = hugging_face_mamba(**settings)
    with torch.no_grad():
        expected = theirs(IDS).logits.double()
    theirs.save_pretrained(tmp_path / "whole")
    theirs.backbone.save_pretrained(tmp_path / "headless")
    tied, weights = settings.get("tie_word_embeddings", True), theirs.state_dict()
    sources = [theirs, tmp_path / "whole", *([tmp_path / "headless"] if tied else [])]
    models = [load_huggingface(source, arch="mamba") for source in sources]
    old = {name.replace("embeddings", "embedding"): t for name, t in weights.items()}  # as mamba_ssm names it
    eps = {"norm_eps": settings.get("layer_norm_epsilon", 1e-5)}
    models += [load_reference(w, arch="mamba", **eps) for w in (weights, old)]
    for model in models:
        assert model.config.tie_embeddings is tied and not model.training
        torch.testing.assert_close(
            logits(model), expected, rtol=0, atol=1e-5
        )  # Hugging Face computes its norms in fp32
        assert torch.equal(logits(model), logits(models[0]))


def test_mamba_is_strict():
    theirs = hugging_face_mamba()
    weights = {name: t for name, t in theirs.state_dict().items() if name != HEAD}
    load_mamba = partial(load_reference, arch="mamba")
    assert load_mamba(weights).config.tie_embeddings
    for name, tensor in weights.items():
        refused(ValueError, ("missing", name), load_mamba, {other: t for other, t in weights.items() if other != name})
        refused(ValueError, "state_dict: ", load_mamba, weights | {name: tensor.new_ones(*tensor.shape, 2)})
        if "embeddings" not in name:
            refused(ValueError, "expected", load_mamba, weights | {name: torch.cat([tensor, tensor[-1:]])})
    refused(
        ValueError,
        ("surplus", "in_proj.bias"),
        load_mamba,
        weights | {"backbone.layers.0.mixer.in_proj.bias": torch.ones(96).double()},
    )
    refused(ValueError, "float32", load_mamba, weights | {"backbone.norm_f.weight": torch.ones(16)})
    refused(ValueError, "missing", load_mamba, {})
    refused(ValueError, ("width=16", "leave it out"), load_mamba, weights, width=16)
    refused(TypeError, "memory_tokens", load_mamba, weights, memory_tokens=3)
    refused(ValueError, ("backbone='gpt2'", "None"), load_mamba, weights, backbone="gpt2", n_head=2)
    refused(ValueError, "arch='transformer'", load_huggingface, theirs)
    refused(ValueError, "model_type='gpt2'", load_huggingface, hugging_face("gpt2"), "mamba")
    refused(ValueError, "hidden_act='gelu'", load_huggingface, hugging_face_mamba(hidden_act="gelu"), "mamba")
    refused(ValueError, "n_head=None", load_reference, {}, arch="rmt", backbone="gpt2")


LIGHT = """
import sys
import lit_memory.run.build, lit_memory.tasks.base
from lit_memory import ARMT, AssociativeRetrieval, LitARMT, generate, load_experiment, unroll
sys.exit("lit_memory.hf" in sys.modules)
"""


def test_transformers_is_imported_only_when_needed():
    """``lit_memory.hf`` imports all that transformers needs for a model, which costs seconds: models, tasks and runs do
    without it."""
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
