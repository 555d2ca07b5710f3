"""The public names of the package: frozen, each importable, and all that the README shows among them."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lit_memory
from lit_memory.registry import MODELS, TASKS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PUBLIC = """
ARMT Algorithmic AlgorithmicData AssociativeRetrieval AssociativeRetrievalData BABILong BABILongData BabiData
BabiEpisodes DNA DNAData DeltaNet GatedDeltaNet LMM LanguageModeling LanguageModelingData Larimar LitARMT LitDeltaNet
LitGatedDeltaNet LitLMM LitLarimar LitMAC LitMAG LitMAL LitMamba LitMemReasoner LitMemoryConfig LitMemoryForCausalLM
LitPRMT LitRMT LitRMTR LitRMTXL LitRWKV LitTARM LitTransformer LitXL MAC MAG MAL MQAR MQARData Mamba MemReasoner
MemReasonerData Needle NeedleData PRMT Passkey PasskeyData Quadratic QuadraticData RMT RMTR RMTXL RWKV TARM TimeSeries
TimeSeriesData Transformer VariableTracking VariableTrackingData XL generate load_experiment load_huggingface
load_reference register_model register_task unroll
"""
NAMES = PUBLIC.split()


def test_the_names_are_frozen():
    """A new model or task adds its names here; none may go."""
    assert sorted(NAMES) == lit_memory.__all__ == dir(lit_memory)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves(name):
    found = getattr(lit_memory, name)
    assert callable(found)
    if name != "load_experiment":  # ``load`` in its module
        assert found.__name__ == name


def test_names_follow_from_the_registry(monkeypatch):
    """A line in the registry is all that a model or a task needs, even after the import of the package."""
    monkeypatch.setitem(MODELS, "fraction", "fractions:Fraction")
    monkeypatch.setitem(TASKS, "counter", "collections:Counter")
    assert {"Fraction", "LitFraction", "Counter", "CounterData"} == set(dir(lit_memory)) - set(NAMES)
    assert lit_memory.Fraction(1, 2) * 2 == 1 and lit_memory.Counter("aa")["a"] == 2


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match=r"^module 'lit_memory' has no attribute 'AMRT'$"):
        _ = lit_memory.AMRT
    with pytest.raises(ImportError, match="AMRT"):
        exec("from lit_memory import AMRT")


def test_the_import_is_light():
    """Names are resolved when they are used, and their list needs no class."""
    code = "import sys, lit_memory; dir(lit_memory); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "numpy", "lightning", "transformers"} & set(run.stdout.split())


def shown_imports() -> list[tuple[str, str]]:
    """(module, name) of every import from our package in the Python of the README and docs/."""
    text = "\n".join(page.read_text() for page in PAGES)
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shown = []
    for node in (node for snippet in snippets for node in ast.walk(ast.parse(snippet))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lit_memory"):
            shown += [(str(node.module), alias.name) for alias in node.names]
    return shown


def test_names_on_the_pages_exist():
    shown = shown_imports()
    assert ("lit_memory", "LitARMT") in shown and ("lit_memory", "unroll") in shown
    for module, name in shown:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
        if module == "lit_memory":
            assert name in NAMES
