"""``lit_memory.testing``: the templates of docs/extending.md pass, and every mistake is told in a line.

The registered models and tasks pass the same checks in test_recurrence.py and test_tasks.py.
"""

import re
from pathlib import Path

import pytest

from lit_memory.models.armt import ARMT
from lit_memory.testing import check_model, check_task

PAGE = (Path(__file__).parents[1] / "docs/extending.md").read_text()
MODEL, TASK = (re.sub(r"@register.*\n", "", code) for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2])


def made(code, name, *changes):
    """The class of a template with parts of its text replaced."""
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    names: dict = {"__name__": "page"}
    exec(code, names)
    return names[name]


def test_the_templates_pass():
    check_model(made(MODEL, "Average"))
    check_task(made(TASK, "Copy"), length=8)


def test_settings_that_use_the_memory():
    """A new ARMT writes nothing until it is trained, and the check says so; a setting lets it write."""
    with pytest.raises(AssertionError, match="is the write 0 in a new model"):
        check_model(ARMT, memory_tokens=2, memory_dim=4)
    check_model(ARMT, memory_tokens=2, memory_dim=4, value_std=0.5, init_std=0.2)


STEP = "        rows_BTD = self.decoder.tokens(ids_BT)\n"
WRONG_MODELS = {
    "reads ahead": (
        ("rows_BTD = rows_BTD + state[:, None]", "rows_BTD = rows_BTD + rows_BTD.mean(1, True) + state[:, None]"),
        "not causal: token 12",
    ),
    "keeps the state": (
        (STEP, STEP + "        state = self.kept = state + getattr(self, 'kept', 0 * state).detach()\n"),
        "step depends on what was read before it",
    ),
    "in place": (("state.lerp(", "state.lerp_("), "step changes the state that it is given"),
    "mixes samples": (
        ("kept_BTD.mean(1)", "kept_BTD.mean(1) + kept_BTD.mean((0, 1))"),
        "a sample sees the others",
    ),
    "writes always": (("if write else state", "if write else state + 1"), "write=False changes the state"),
    "writes padding": (("hidden_BTD if mask_BT is None", "hidden_BTD if True"), "a masked token changes"),
    "sees padding": (("add_positions(rows_BTD), mask_BT)", "add_positions(rows_BTD))"), "a masked token changes"),
    "no gradient": (("kept_BTD.mean(1)", "kept_BTD.detach().mean(1)"), "the gradient ends too early"),
    "low precision": (("new_zeros(batch, self.config.width, **options)", "new_zeros(batch, 16)"), "init_state(dtype="),
    "one precision": ((".to(rows_BTD.dtype)", ""), "with weights in bfloat16 it fails"),
    "no vocabulary": (("class Config(BackboneConfig)", "class Config"), "Config lacks vocab_size, inputs"),
}


@pytest.mark.parametrize("wrong", WRONG_MODELS)
def test_wrong_models_are_told(wrong):
    (old, new), message = WRONG_MODELS[wrong]
    with pytest.raises(AssertionError, match=re.escape(message)) as told:
        check_model(made(MODEL, "Average", (old, new)))
    assert "\n" not in str(told.value)


DRAW = "torch.randint(16, (size, self.config.length), generator=generator(seed, split, step))"
WRONG_TASKS = {
    "global numbers": ((DRAW, "torch.randint(16, (size, self.config.length))"), "torch's global generator"),
    "one split": (("generator(seed, split, step))", "generator(seed, 'train', step))"), "seed 0, valid, step 3 gives"),
    "few samples": (("randint(16, (size", "randint(2, (size"), "a sample of valid is one of train, too"),
    "other targets": (
        ("cat([unscored, words]", "cat([unscored, words + 1]"),
        "a target is not the id",
    ),
    "a target that nothing predicts": (
        ("cat([unscored, words]", "cat([unscored[:, 1:], mark, words]"),
        "the first token of the read-only segments is scored",
    ),
    "small vocabulary": (("vocab_size = 17", "vocab_size = 16"), "ids 0 to 16, vocab_size 16"),
    "another metric": (('{"exact_match": exact', '{"em": exact'), "metrics names exact_match, which neither score nor"),
    "no score": (
        ('{"exact_match": exact_match(predicted_BT, batch)}', '{"exact_match": torch.ones(16)}'),
        "exact_match is 1 for right answers and 1 for wrong ones",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TASKS)
def test_wrong_tasks_are_told(wrong):
    (old, new), message = WRONG_TASKS[wrong]
    with pytest.raises(AssertionError, match=re.escape(message)) as told:
        check_task(made(TASK, "Copy", (old, new)), length=8)
    assert "\n" not in str(told.value)
