"""Our models in lm-evaluation-harness: its own wrapper as the slow twin, lengths without a limit, and the command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, build_model
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import lit_memory.hf
from lit_memory.recurrence import unroll
from lit_memory.registry import MODELS

pytest.importorskip("lm_eval", reason="needs the extra lm-eval, whose 25 packages no other test needs")
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lit_memory.hf.harness import LitMemoryLM

N = 5
WORDS = ["<eos>", "<unk>", *(f"w{i}" for i in range(2, VOCAB))]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def save(folder, name="armt", bos=False, segment_len=N):
    """A folder with a model of ours and a tokenizer of words."""
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "unk_token": "<unk>"} | ({"bos_token": "w2"} if bos else {})
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    build_model(name).float().save_pretrained(folder, segment_len=segment_len)
    return str(folder)


def text(count, seed):
    draw = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(2, VOCAB, (count,), generator=draw))


def requests(kind, arguments):
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


CONTEXTS = [text(count, seed) for seed, count in enumerate((3, 2 * N, 1, 3 * N + 2))]
PAIRS = [(CONTEXTS[i], f" {text(count, 9 + count)}") for i, count in ((0, 2), (1, 1), (1, N + 2), (2, 1), (3, 1))]
PAIRS += [("", text(3, 1)), (CONTEXTS[0] + " ", text(2, 2))]
TEXTS = [(text(2 * N + 1, 20),), (text(2, 21),), ("",)]
PROMPTS = [(CONTEXTS[i], {"until": until, "max_gen_toks": 4}) for i, until in ((0, []), (1, []), (3, ["w9"]))]
QUICK = ("transformer", "rmt", "armt", "xl", "lmm")
"""Without and with a cache of keys and values, and a chunk that is read again; all others take a minute."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_scores_are_those_of_the_harness(tmp_path, name):
    """Its wrapper of Hugging Face models reads each sample alone, in one call; ours reads batches, and each context
    once."""
    folder = save(tmp_path, name)
    ours = LitMemoryLM(folder, batch_size="3", device="cuda:0")
    shell, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    theirs = HFLM(pretrained=shell, tokenizer=tokenizer, batch_size=1, device="cpu")
    found, wanted = (lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True) for lm in (ours, theirs))
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], rel=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    rolling = requests("loglikelihood_rolling", TEXTS)
    found, wanted = (lm.loglikelihood_rolling(rolling, disable_tqdm=True) for lm in (ours, theirs))
    assert found == pytest.approx(wanted, rel=1e-4) and found[2] == 0
    found, wanted = (lm.generate_until(requests("generate_until", PROMPTS), disable_tqdm=True) for lm in (ours, theirs))
    assert found == wanted and len({*found}) > 1


def test_greedy_continuations_are_known(tmp_path):
    """What ``generate`` gives is a greedy continuation, and anything else is not."""
    lm = LitMemoryLM(save(tmp_path), batch_size=2)
    (new,) = lm.generate_until(requests("generate_until", [(CONTEXTS[3], {"max_gen_toks": 2 * N})]), disable_tqdm=True)
    pairs = [(CONTEXTS[3], f" {new}"), (CONTEXTS[3], f" {text(N, 3)}")]
    scored = lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert len(new.split()) > 2 and [greedy for _, greedy in scored] == [True, False]


def test_no_length_is_cut_off(tmp_path):
    """A context beyond 2,048 tokens, where the harness begins to cut, is read from its first token."""
    lm, context = LitMemoryLM(save(tmp_path, "rmt", segment_len=256)), text(2600, 5)
    ((score, _),) = lm.loglikelihood(requests("loglikelihood", [(context, " w5")]), disable_tqdm=True)
    ids, found = torch.tensor([lm.tok_encode(context)]), []
    for part in (ids, ids[:, -2048:]):
        hidden = unroll(lm.shell.model, part, 256, keep=1).hidden_BTD[:, -1:]
        found.append(lm.shell.model.logits(hidden).log_softmax(-1)[0, 0, WORDS.index("w5")].item())
    assert ids.shape[1] == 2600 and score == pytest.approx(found[0], rel=1e-4) != pytest.approx(found[1], rel=1e-4)


class Largest(TorchDispatchMode):
    """The size of the largest tensor of floats that is made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        self.size = max([self.size, *(t.numel() for t in made)])
        return out


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_memory_does_not_grow_with_the_text(tmp_path, kind):
    lm, found = LitMemoryLM(save(tmp_path)), []
    for segments in (4, 16):
        words = text(segments * N, 3)
        with Largest() as largest:
            getattr(lm, kind)(requests(kind, [(words, " w5") if kind == "loglikelihood" else (words,)]), True)
        found.append(largest.size)
    assert found[0] == found[1] > 0


def test_the_prefix_is_the_tokenizers(tmp_path):
    lm = LitMemoryLM(save(tmp_path, bos=True), segment_len=3, max_gen_toks=2)
    assert (lm.prefix_token_id, lm.eot_token_id, lm.segment_len) == (2, 0, 3)
    assert LitMemoryLM(save(tmp_path)).prefix_token_id == 0
    (new,) = lm.generate_until(requests("generate_until", [(CONTEXTS[0], {"until": []})]), disable_tqdm=True)
    assert len(new.split()) <= 2


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"^batch_size='auto': expected a number of contexts$"):
        LitMemoryLM(str(tmp_path), batch_size="auto")
    with pytest.raises(FileNotFoundError, match=r"^\./nowhere: no such folder; expected one with config\.json"):
        LitMemoryLM("./nowhere")
    build_model("armt").save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^tokenizer .*expected .*a folder with a tokenizer"):
        LitMemoryLM(str(tmp_path))


TASK = """
task: recall
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [w3, w4, "w5 w6"]
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def task(tmp_path):
    """A folder with a task of one's own: six contexts of 15 words, and the choice of a greedy model as the answer."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lm = LitMemoryLM(save(tmp_path / "model"))
    rows = []
    for seed in range(6):
        context = text(3 * N, seed)
        asked = [(context, f" {choice}") for choice in ("w3", "w4", "w5 w6")]
        scores = [s for s, _ in lm.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)]
        rows.append({"text": context, "label": (scores.index(max(scores)) + (seed == 5)) % 3})
    (folder / "recall.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recall.yaml").write_text(TASK.replace("FILE", str(folder / "recall.jsonl")))
    return folder


def test_a_task_of_ones_own(task, tmp_path, monkeypatch):
    """A YAML and a file of samples, through the harness: five of six answers are the likeliest."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    manager = TaskManager(include_path=str(task), include_defaults=False)
    arguments = {"pretrained": str(tmp_path / "model")}
    options = {"batch_size": 4, "bootstrap_iters": 0, "task_manager": manager, "log_samples": False}
    results = simple_evaluate(model="lit_memory", model_args=arguments, tasks=["recall"], **options)
    assert results["results"]["recall"]["acc,none"] == pytest.approx(5 / 6)


@pytest.mark.slow
def test_the_command(task, tmp_path):
    """``lm_eval`` with our model, as its users type it; the harness reads its own 12,000 tasks first."""
    arguments = ["--model", "lit_memory", "--model_args", f"pretrained={tmp_path / 'model'}", "--batch_size", "2"]
    arguments += ["--tasks", "recall", "--include_path", str(task), "--output_path", str(tmp_path / "out.json")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "HF_DATASETS_CACHE": str(tmp_path / "c")}
    command = [sys.executable, "-m", "lit_memory.hf.harness", *arguments]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "|recall|" in run.stdout and "0.8333" in run.stdout


def test_the_entry_point_is_the_class():
    """What the harness after 0.4.13 looks up."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["lm_eval.models"]["lit_memory"].split(":")
    assert getattr(sys.modules[module], name) is LitMemoryLM
    assert lit_memory.hf.LitMemoryForCausalLM
