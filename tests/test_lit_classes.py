"""Lightning classes follow from the registry: names, signatures, docstrings, pickles, and what a new model needs."""

import inspect
import json
import pickle
import pydoc
import subprocess
import sys
from dataclasses import dataclass, fields
from inspect import Parameter

import pytest
import torch
from conftest import build_model

import lit_memory
from lit_memory import lit, registry
from lit_memory.lit import LIT_DATA, LIT_MODULES
from lit_memory.lit.data import LitData
from lit_memory.lit.lines import LitLines
from lit_memory.lit.modules import LitMemory
from lit_memory.models.episodic.larimar import Larimar
from lit_memory.models.rmt import RMT
from lit_memory.registry import MODELS, TASKS

CLASSES = [*LIT_MODULES.values(), *LIT_DATA.values(), lit_memory.BabiData]
all_classes = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def test_names():
    assert list(LIT_MODULES) == list(MODELS) and list(LIT_DATA) == list(TASKS)
    assert [LIT_MODULES[name].__name__ for name in ("armt", "rmt_xl", "memreasoner")] == [
        "LitARMT",
        "LitRMTXL",
        "LitMemReasoner",
    ]
    assert [LIT_DATA[name].__name__ for name in ("dna", "babilong", "memreasoner")] == [
        "DNAData",
        "BABILongData",
        "MemReasonerData",
    ]
    for cls in CLASSES:
        assert getattr(lit_memory, cls.__name__) is cls is getattr(lit, cls.__name__)
        assert cls.__name__ in dir(lit) and cls.__name__ in lit_memory.__all__
    with pytest.raises(AttributeError, match="has no attribute 'LitXYZ'"):
        _ = lit.LitXYZ


def test_the_base_is_that_of_what_the_model_offers():
    for cls in LIT_MODULES.values():
        assert issubclass(cls, LitLines) == bool(cls.model_name in ("larimar", "memreasoner")), cls
    assert all(issubclass(cls, LitMemory) for cls in LIT_MODULES.values())
    assert all(issubclass(cls, LitData) for cls in LIT_DATA.values())


@all_classes
def test_signatures_have_every_argument(cls):
    """Those of the base, then every field of the Config, by keyword, with defaults and types."""
    parameters = inspect.signature(cls).parameters
    base = LitMemory if issubclass(cls, LitMemory) else LitData
    own = [p for p in inspect.signature(base.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [parameters[p.name] for p in own] == own and len(own) == (11 if base is LitMemory else 9)
    for field in fields(cls.config_class()):
        found = parameters[field.name]
        assert found.annotation == field.type and found.kind is Parameter.KEYWORD_ONLY
        if cls is not lit_memory.BabiData or field.name != "segments":
            assert cls.config_class()(**{field.name: found.default}) == cls.config_class()()
    assert len(set(parameters)) == len(parameters) and "self" not in parameters


@all_classes
def test_defaults_of_the_signature_are_used(cls):
    """A class that gets all its defaults is as one that gets none."""
    defaults = {name: p.default for name, p in inspect.signature(cls).parameters.items()}
    if issubclass(cls, LitMemory):
        silent, explicit = cls(), cls(**defaults)
        assert silent.hparams.items() <= explicit.hparams.items() and dict(explicit.hparams) == defaults
    else:
        assert cls().task.config == cls(**defaults).task.config


@all_classes
def test_docstrings_list_every_argument(cls):
    """With its default, and with the docstring below the field; so does ``help``."""
    shown = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    for name, parameter in inspect.signature(cls).parameters.items():
        (line,) = [line for line in cls.__doc__.splitlines() if line.startswith(f"{name} :")]
        assert line.endswith(f"= {parameter.default!r}") and line in shown.replace(" |  ", "")
    lines = cls.__doc__.splitlines()
    settings = inspect.signature(LitMemory.__init__ if issubclass(cls, LitMemory) else LitData.__init__)
    for name, parameter in settings.parameters.items():
        if parameter.kind is Parameter.KEYWORD_ONLY:
            (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{name} :")]
            assert lines[at + 1].startswith("    "), name


def test_field_docstrings_arrive():
    assert "nu : int = 3\n    Rolls of DPFP." in lit_memory.LitARMT.__doc__
    assert "keys_loss : float = 0.0\n    Weight of the KL term" in lit_memory.LitLarimar.__doc__
    assert "segments : int = 0\n" in lit_memory.BabiData.__doc__
    assert inspect.signature(lit_memory.LitMemReasoner).parameters["order_loss"].default == 1.0
    assert inspect.signature(lit_memory.BabiData).parameters["segments"].default == 0


@all_classes
def test_classes_and_their_instances_are_pickled_by_name(cls):
    assert pickle.loads(pickle.dumps(cls)) is cls
    sizes = {"width": 16, "layers": 1, "vocab_size": 19} if issubclass(cls, LitMemory) else {}
    again = pickle.loads(pickle.dumps(cls(**sizes)))
    assert type(again) is cls
    if sizes:
        assert again.hparams["width"] == 16


def test_a_subclass_has_a_signature_of_its_own():
    class Mine(lit_memory.LitRMT):
        """Mine.

        scale: Of something.
        """

        def __init__(self, *, scale: float = 2.0, **options):
            super().__init__(**options)
            self.scale = scale

    parameters = inspect.signature(Mine).parameters
    assert parameters["scale"].default == 2.0 and "memory_tokens" in parameters
    assert "scale" not in inspect.signature(lit_memory.LitRMT).parameters
    module = Mine(width=16, layers=1)
    assert module.scale == 2.0 and module.hparams["scale"] == 2.0
    assert "batch" in inspect.signature(module.training_step).parameters
    for base in (LitMemory, LitData):
        assert any(p.kind is p.VAR_KEYWORD for p in inspect.signature(base).parameters.values())


@pytest.mark.parametrize("cls", LIT_MODULES.values(), ids=LIT_MODULES)
def test_replay_is_refused_where_it_could_not_be_heeded(cls):
    if cls(replay=False).model_class.looks_at_numbers:
        with pytest.raises(ValueError, match=r"replay=True: .+ looks at numbers of a batch"):
            cls(replay=True)
    else:
        cls(replay=True)


def test_importing_them_imports_no_model_and_no_task():
    code = "import sys, json, lit_memory.lit; print(json.dumps([m for m in sys.modules if m.startswith('lit_memory')]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(run.stdout)
    assert not [name for name in loaded if name.startswith("lit_memory.models")]
    shared = {f"lit_memory.tasks.{name}" for name in ("base", "batch", "mixins")}
    assert {name for name in loaded if name.startswith("lit_memory.tasks.")} <= shared


# A new model: its file and its line in the registry


class Toy(RMT):
    """Passes memory tokens."""

    @dataclass
    class Config(RMT.Config):
        spice: int = 3
        """Of the toy."""


class ToyLines(Larimar):
    """Reads lines."""


def registered(monkeypatch, name, target):
    """The Lightning class of a model after its line in the registry."""
    monkeypatch.setitem(MODELS, name, target)
    return getattr(lit, f"Lit{registry.class_name(target)}")


def test_a_new_model_needs_its_line_alone(monkeypatch):
    cls = registered(monkeypatch, "toy", f"{__name__}:Toy")
    assert issubclass(cls, LitMemory) and not issubclass(cls, LitLines) and cls.model_name == "toy"
    assert "spice : int = 3\n    Of the toy." in cls.__doc__ and inspect.signature(cls).parameters["spice"].default == 3
    assert isinstance(cls(width=16, layers=1, heads=2, vocab_size=9).model, Toy)


def test_a_new_model_with_several_losses_weighs_them(monkeypatch):
    """The default is that of the task alone; the others are those of ``model.losses``."""
    cls = registered(monkeypatch, "toy_lines", f"{__name__}:ToyLines")
    assert issubclass(cls, LitLines)
    names = [name for name in inspect.signature(cls).parameters if name.endswith("_loss")]
    assert names == [f"{name}_loss" for name in Larimar.loss_names]
    module = cls(width=16, layers=1, heads=2, vocab_size=9, memory_loss=0.5)
    assert module.active_losses == ["answer", "memory"] and module.hparams["keys_loss"] == 0.0


# Diagnostics


@pytest.mark.parametrize("name", MODELS)
def test_which_models_have_diagnostics(name):
    """Memory tokens of a memory that does not grow, and Titans."""
    from lit_memory.lit.diagnostics import FirstContext, MemoryTokens, diagnostics_of

    expected = dict.fromkeys(("rmt", "rmt_xl", "tarm"), MemoryTokens)
    expected |= dict.fromkeys(("lmm", "mac", "mag", "mal"), FirstContext)
    found = diagnostics_of(build_model(name))
    assert type(found) is expected.get(name, type(None))


def test_memory_tokens_are_followed_through_the_context_of_a_batch():
    """As if it were one with the tokens behind it; not behind the end of a sample, whose memory stands still."""
    from lit_memory.lit import diagnostics
    from lit_memory.tasks.batch import Batch

    model, ids = build_model("rmt"), torch.randint(0, 11, (2, 40))
    context = ids[:, :32].split(8, 1)

    def found(context, ids_BT):
        followed = diagnostics.MemoryTokens(model)
        followed.update(Batch(ids_BT, torch.zeros_like(ids_BT), segment_len=8, read_only=1, context=context), 0)
        return followed.compute()

    whole = found((), ids)
    assert whole.keys() == set(model.diagnosed) and found(context, ids[:, 32:]) == whole
    late = (context[0][:1], *context[1:])  # the second sample begins later, and is not followed
    assert found(late, ids[:, 32:]) == found((), ids[:1]) != whole
    ended = (context[3], torch.tensor([True, False])[:, None].expand(2, 8))
    assert found((*context[:3], ended), ids[:, 32:]) == found((), ids[:, [*range(24), *range(32, 40)]])


def test_a_callback_keeps_the_name_of_its_state():
    """Old checkpoints have a curriculum's state under the name of its class."""
    from lit_memory.lit.callbacks.curriculum import Curriculum
    from lit_memory.lit.callbacks.timing import TestTimer

    assert Curriculum([], 1).state_key == "Curriculum"
    assert not TestTimer().state_dict()
