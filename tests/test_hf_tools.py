"""Our models in the hands of Hugging Face's tools: ``Trainer`` and ``peft``."""

import copy
import re

import pytest
import torch
from conftest import VOCAB, build_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

import lit_memory.hf
from lit_memory.hf.adapters import backbone_layers, memory_modules
from lit_memory.hf.auto import token_loss
from lit_memory.models.decoder import Block
from lit_memory.registry import MODELS

N = 5
REASON = "needs the extra peft"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator"),
]


def samples(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (count, 2 * N + 3), generator=draw)
    return [{"input_ids": row, "labels": row} for row in ids]


def shell_of(folder, name="armt", **settings):
    """A model of ours, from a folder, through AutoModelForCausalLM."""
    build_model(name, **settings).float().save_pretrained(folder, segment_len=N)
    return AutoModelForCausalLM.from_pretrained(folder)


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


# transformers.Trainer


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """``train(name, **arguments)``: four steps of transformers' Trainer with dropout, saved every second."""
    pytest.importorskip("accelerate", reason=REASON)
    from transformers import Trainer, TrainingArguments

    root = tmp_path_factory.mktemp("trainer")

    def run(name, resume=None, **arguments):
        torch.set_num_threads(1)  # before a fixture of a test does it
        shell = shell_of(root / "model", dropout=0.1)
        options = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 2}
        options |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
        trainer = Trainer(
            model=shell,
            args=TrainingArguments(str(root / name), **(options | arguments)),
            train_dataset=samples(8),  # type: ignore[arg-type]
            eval_dataset=samples(4, seed=1),  # type: ignore[arg-type]
        )
        trainer.train(resume_from_checkpoint=resume and str(root / resume))
        return trainer, root / name

    return run


@pytest.fixture(scope="module")
def trained(train):
    return train("whole")


def test_trainer_trains_evaluates_and_saves(trained):
    """The loss falls, evaluation gives the mean over labels, and the last checkpoint is the model."""
    trainer, folder = trained
    found = trainer.evaluate()["eval_loss"]
    ids = torch.stack([sample["input_ids"] for sample in samples(4, seed=1)])
    with torch.no_grad():
        assert found == pytest.approx(trainer.model.eval()(ids, labels=ids).loss.item(), rel=1e-5)
    start = AutoModelForCausalLM.from_pretrained(folder.parent / "model")
    ids = torch.stack([sample["input_ids"] for sample in samples(8)])
    assert trainer.model(ids, labels=ids).loss < start(ids, labels=ids).loss
    assert same(AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4"), trainer.model)
    assert lit_memory.ARMT.from_pretrained(folder / "checkpoint-4").memory.equal(trainer.model.model.memory)


def test_trainer_resumes_bit_by_bit(train, trained):
    """Weights after the last step, dropout included, are those of the run that nothing interrupted."""
    again, folder = train("again", resume="whole/checkpoint-2")
    assert same(again.model, trained[0].model) and not (folder / "checkpoint-2").exists()


def test_trainer_computes_segments_again(train, trained):
    """Activation checkpointing changes nothing."""
    again, _ = train("checkpointed", activation_checkpointing=True)
    assert again.model.gradient_checkpointing and same(again.model, trained[0].model)


def test_trainer_smooths_the_labels_of_next_tokens(train):
    """The loss of ``label_smoothing_factor`` is that of predicting label t+1 at token t."""
    trainer, _ = train("smooth", max_steps=1, label_smoothing_factor=0.1)
    found = trainer.evaluate()["eval_loss"]
    ids = torch.stack([sample["input_ids"] for sample in samples(4, seed=1)])
    with torch.no_grad():
        logits_NV = trainer.model.eval()(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits_NV, ids[:, 1:].flatten(), label_smoothing=0.1)
    assert found == pytest.approx(expected.item(), rel=1e-5)


def test_parts_of_a_batch_count_by_their_labels(tmp_path):
    """Accumulated gradients are those of the whole batch, also where its parts have different numbers of labels."""
    shell = shell_of(tmp_path)
    ids = torch.stack([sample["input_ids"] for sample in samples(4)])
    labels = ids.clone()
    labels[2:, 4:] = -100
    count = (labels[:, 1:] != -100).sum()
    whole = shell(ids, labels=labels).loss
    parts = [shell(ids[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=count).loss for i in (0, 2)]
    assert torch.allclose(sum(parts), whole, rtol=1e-5)
    assert shell.accepts_loss_kwargs  # without it, the Trainer would not tell the number


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [None, 8192])
def test_the_loss_of_half_precision_is_not(dtype, count):
    """It is that of transformers' own models: no sum that overflows, and no rounding."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (2, 4097), generator=draw)
    logits = (10 * torch.randn(2, 4097, VOCAB, generator=draw)).to(dtype)
    loss = token_loss(logits, ids, count)
    assert loss.isfinite() and torch.equal(loss, ForCausalLMLoss(logits, ids, VOCAB, num_items_in_batch=count))


def test_what_our_models_do_not_have(tmp_path):
    shell, ids = shell_of(tmp_path), torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^inputs_embeds: our models read tokens, .*; give input_ids$"):
        shell(inputs_embeds=torch.zeros(1, 3, 16))
    with pytest.raises(ValueError, match=r"^output_attentions=True: no attention weights are kept; leave it out$"):
        shell(ids, output_attentions=True)
    with pytest.raises(ValueError, match=r"^input_ids of shape \(0, 4\): expected at least one token in every sample$"):
        shell(ids.new_zeros(0, 4))
    (hidden,) = shell(ids, output_hidden_states=True).hidden_states
    assert torch.equal(shell.model.logits(hidden), shell(ids).logits) and shell(ids).hidden_states is None


@pytest.mark.parametrize("name", MODELS)
def test_sizes_by_hugging_faces_names(name):
    config = lit_memory.LitMemoryConfig(arch=name, settings={"layers": 3})
    assert config.num_hidden_layers == 3 and config.hidden_size == 128
    assert lit_memory.LitMemoryConfig(**config.to_dict()).num_hidden_layers == 3


# peft


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_has_one_place(tmp_path, name):
    """A weight is the backbone's or the memory's; models with blocks of their own are told."""
    shell = shell_of(tmp_path, name)
    if not any(isinstance(part, Block) for part in shell.modules()):
        for find in (backbone_layers, memory_modules):
            with pytest.raises(ValueError, match=r"^[A-Za-z]+ has no transformer blocks; name the modules for peft"):
                find(shell)
        return
    parts = memory_modules(shell)
    held = copy.deepcopy(shell.memory_tokens)  # as peft copies a module of modules_to_save
    tokens = {path for places in held.places.values() for part, own in places for path in paths(shell, part, own)}
    of_memory = {f"{part}.{own}" for part in parts for own, _ in shell.get_submodule(part).named_parameters()} | tokens
    rest = {n for n, _ in shell.named_parameters()} - of_memory
    assert all(re.search(r"\.(block|layers\.\d+)\.|decoder\.(tokens|positions|norm|head)\.", n) for n in rest)
    assert not {*parts} & {*backbone_layers(shell)} and not of_memory & rest
    assert ("memory_tokens" in parts) == bool(tokens)
    known = {"armt": (9, 1), "rmt": (1, 1), "prmt": (1, 2), "transformer": (0, 0)}
    assert (len(parts), len(tokens)) == known.get(name, (len(parts), len(tokens)))


def paths(shell, part, own):
    return [f"{name}.{own}" for name, module in shell.named_modules() if module is part]


def lora(shell):
    peft = pytest.importorskip("peft", reason=REASON)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=backbone_layers(shell), modules_to_save=memory_modules(shell)
    )
    return peft.get_peft_model(shell, config)


def test_lora_on_the_backbone(tmp_path):
    """The backbone stays, the memory is trained whole; the adapter loads, and merged it is a model of ours."""
    tuned = lora(shell_of(tmp_path / "base"))
    ids = torch.stack([sample["input_ids"] for sample in samples(4)])
    trainable = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "modules_to_save" in name for name in trainable)
    start = {name: p.detach().clone() for name, p in trainable.items()}
    others = {name: p.detach().clone() for name, p in tuned.named_parameters() if name not in trainable}
    untrained = tuned(input_ids=ids).logits
    optimizer = torch.optim.AdamW(trainable.values(), lr=0.02)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    moved = {name for name, p in trainable.items() if not torch.equal(p, start[name])}
    for part in ("memory_tokens.modules_to_save", "to_value.modules_to_save", "qkv.lora_B"):
        assert any(part in name for name in moved)
    tuned.eval()
    expected = tuned(input_ids=ids).logits
    with tuned.disable_adapter():
        assert torch.allclose(tuned(input_ids=ids).logits, untrained, atol=1e-4)
    left = dict(tuned.named_parameters(remove_duplicate=False))
    assert all(torch.equal(left[name], before) for name, before in others.items())
    assert not torch.allclose(expected, untrained, atol=1e-3)
    tuned.save_pretrained(tmp_path / "adapter")
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(copy.deepcopy(again)(input_ids=ids).logits, again(input_ids=ids).logits)
    assert torch.allclose(again(input_ids=ids).logits, expected, atol=1e-5)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert again.generate(input_ids=ids, **options).shape == (4, ids.shape[1] + 3)


def test_an_adapter_becomes_a_model(tmp_path):
    """``merge_and_unload`` leaves a model of ours, memory tokens included, also where nothing was computed before."""
    tuned = lora(shell_of(tmp_path / "base"))
    with torch.no_grad():
        for weight in tuned.parameters():
            weight += 0.1 * weight.requires_grad
    ids = torch.stack([sample["input_ids"] for sample in samples(2)])
    expected = tuned.eval()(input_ids=ids).logits
    tuned.save_pretrained(tmp_path / "adapter")
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    keys = base.state_dict().keys()
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    assert merged.state_dict().keys() == keys
    merged.save_pretrained(tmp_path / "theirs")
    merged.model.save_pretrained(tmp_path / "ours")
    for folder in ("theirs", "ours"):
        whole = lit_memory.ARMT.from_pretrained(tmp_path / folder)
        logits = whole.logits(lit_memory.unroll(whole, ids, N).hidden_BTD)
        assert torch.allclose(logits, expected, atol=1e-5)


def test_two_adapters(tmp_path):
    """Each has memory tokens of its own."""
    tuned, ids = lora(shell_of(tmp_path / "base")).eval(), torch.ones(1, 2 * N, dtype=torch.long)
    first = tuned(input_ids=ids).logits
    tuned.add_adapter("second", tuned.peft_config["default"])
    tuned.set_adapter("second")
    tuned.get_base_model().memory_tokens.modules_to_save["second"].model_memory.data += 1
    assert not torch.allclose(tuned(input_ids=ids).logits, first, atol=1e-3)
    tuned.set_adapter("default")
    assert torch.equal(tuned(input_ids=ids).logits, first)


def test_trainer_on_lora(train, tmp_path, monkeypatch):
    """peft inside the Trainer; memory tokens are trained as well."""
    from transformers import Trainer, TrainingArguments

    tuned = lora(shell_of(tmp_path / "base"))
    (tokens,) = tuned.get_base_model().memory_tokens.modules_to_save["default"].parameters()
    before = tokens.detach().clone()
    options = {"max_steps": 2, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path / "run"), learning_rate=0.1, **options)
    Trainer(model=tuned, args=arguments, train_dataset=samples(8)).train()
    assert not torch.equal(tokens, before)


SMALL_RMT = {"vocab_size": VOCAB, "layers": 1, "width": 16, "heads": 2, "memory_tokens": 2}


def test_the_attention_of_torch_may_be_asked_for(tmp_path):
    shell_of(tmp_path)
    shell = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    ids_BT = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(shell(ids_BT).logits, AutoModelForCausalLM.from_pretrained(tmp_path)(ids_BT).logits)


def test_switches_of_the_configuration():
    """``output_hidden_states`` and ``return_dict`` count where a call says nothing, and columns may be a tensor."""
    shell = lit_memory.hf.LitMemoryForCausalLM(lit_memory.hf.LitMemoryConfig("rmt", {**SMALL_RMT})).eval()
    ids_BT = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = shell(ids_BT)
        assert whole.hidden_states is None
        assert torch.equal(shell(ids_BT, logits_to_keep=torch.tensor([1, 4])).logits, whole.logits[:, [1, 4]])
        shell.config.output_hidden_states, shell.config.return_dict = True, False
        logits, (hidden_BTD,) = shell(ids_BT)
        assert torch.equal(logits, whole.logits) and hidden_BTD.shape[:2] == (2, 7)
        assert shell(ids_BT, return_dict=True, output_hidden_states=False).hidden_states is None
