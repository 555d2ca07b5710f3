"""Every field of every config.json with everything that it may not have: a model that works, or one line that names the
field."""

import contextlib
import json
import math
import random
import shutil
import signal

import pytest
import torch
from conftest import build_model
from test_interop import BACKBONES, IDS, hugging_face, hugging_face_mamba
from test_pretrained import make_bert, make_decoder

from lit_memory.hf import pretrained
from lit_memory.recurrence import SegmentRecurrent, unroll
from lit_memory.registry import MODELS, load_class
from lit_memory.util.checks import check_types, fits

HUGE = 10**30
BAD = (
    None,
    True,
    False,
    "",
    "16",
    "nonsense\n",
    [],
    [[]],
    ["x"],
    {},
    {"a": {"b": 1}},
    -1,
    0,
    1,
    3,
    2**31 - 1,
    2**31,
    2**63,
    HUGE,
    -0.5,
    0.5,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    [math.nan],
)
"""What is put in the place of a value; json writes NaN and Infinity as Python reads them."""
SAMPLE = 40
"""Changes of a file that are tried in every run of the tests; ``slow`` tries all."""


def ours(tmp_path, name):
    """A folder of ours, and a function that loads it."""
    build_model(name, layers=1).save_pretrained(tmp_path / "folder")
    return tmp_path / "folder", lambda folder: SegmentRecurrent.from_pretrained(folder)


def theirs(tmp_path, name):
    """A folder of Hugging Face's, and a function that loads it."""
    if name == "bert":
        folder, decoder = make_bert(tmp_path)[0], make_decoder(tmp_path)
        larimar = load_class("model", "larimar")
        return folder, lambda folder: larimar.from_pretrained(decoder, encoder=folder, latent_width=8, slots=4)
    model = hugging_face_mamba() if name == "mamba" else hugging_face(name)
    model.save_pretrained(tmp_path / "folder")
    cls = load_class("model", "mamba" if name == "mamba" else "transformer")
    return tmp_path / "folder", cls.from_pretrained


SOURCES = {f"ours {name}": (ours, name) for name in MODELS}
SOURCES |= {f"theirs {name}": (theirs, name) for name in (*BACKBONES, "mamba", "bert")}


def places(config):
    """The keys of a configuration, and of the objects in it."""
    for name, value in config.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *rest) for rest in places(value))


def put(config, place, value):
    """A copy of a configuration with another value; without the field for ``...``."""
    config = json.loads(json.dumps(config))
    *parents, last = place
    section = config
    for name in parents:
        section = section[name]
    if value is ...:
        del section[last]
    else:
        section[last] = value
    return config


def finite(value):
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


NAMED = {"shape", "weights:", "type", "tied", "head_dim"}
"""What else tells where the fault is: weights that a field does not fit, or the field that it contradicts."""


def outcome(folder, load, place, missing=False):
    """ "model" or "line"; everything else is a failure of the test."""
    try:
        with torch.no_grad():
            model = load(folder)
            assert finite(vars(model.config)), model.config
            sizes = [n for n in vars(model.config).values() if isinstance(n, int | float)]
            rows = IDS.shape[1] + 2 * getattr(model.config, "memory_tokens", 0)
            if 0 < getattr(model.config, "span", 0) < rows:
                return "model"  # a short span is no mistake, but refuses longer segments
            if (
                model.config.vocab_size and max(sizes) < 10**6
            ):  # a window of 2**31 tokens is no mistake, but costs memory
                model.logits(unroll(model, IDS % model.config.vocab_size).hidden_BTD)
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        assert type(error).__module__.startswith(("builtins", "lit_memory")), repr(error)
        assert str(folder) in text and "\n" not in text and len(text) < 1200, text
        named = missing or place[-1] == "settings" or any(word in text for word in (*NAMED, place[-1]))
        assert named, f"{place}: {text}"
        return "line"
    return "model"


@contextlib.contextmanager
def limited(seconds):
    """A TimeoutError where the block takes longer; a size of a file must not become a loop."""

    def late(*_):
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tries(name, tmp_path, limit):
    """The outcome of every change, or of ``limit`` of them: (place, value) -> outcome."""
    make, which = SOURCES[name]
    folder, load = make(tmp_path, which)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert outcome(folder, load, ("",)) == "model"
    changes = [(place, value) for place in places(config) for value in (*BAD, ...)]
    random.Random(name).shuffle(changes)
    found, wrong = [], []
    for place, value in changes[:limit]:
        path.write_text(json.dumps(put(config, place, value)))
        try:
            with limited(120):
                found.append(outcome(folder, load, place, value is ...))
        except Exception as error:
            wrong.append(f"{'.'.join(place)} = {value!r}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, f"{len(wrong)} of {len(changes[:limit])}\n" + "\n".join(wrong)
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_some_bad_fields(name, tmp_path):
    assert "line" in tries(name, tmp_path, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_all_bad_fields(name, tmp_path):
    assert len(tries(name, tmp_path, None)) > 200


FILES = {
    "arch is a list": (
        '{"model_type": "lit_memory", "arch": [], "settings": {}}',
        "arch=[]: expected a registered",
    ),
    "deep": ("[" * 100_000, "config.json cannot be read as .json (RecursionError)"),
    "deep object": ('{"a":' * 100_000, "config.json cannot be read as .json (RecursionError)"),
    "deep settings": (
        '{"model_type": "lit_memory", "arch": "rmt", "settings": {"width": ' + "[" * 400 + "]" * 400 + "}}",
        "]]: expected a whole number",
    ),
    "number without end": ('{"a": ' + "1" * 5000 + "}", "config.json cannot be read as .json (ValueError)"),
    "twice": (
        '{"model_type": "gpt2", "model_type": "llama"}',
        "model_type='llama': expected it once, it is there 2",
    ),
    "NaN": ('{"model_type": "gpt2", "layer_norm_epsilon": NaN}', "layer_norm_epsilon=nan: expected a finite number"),
    "overflow": ('{"model_type": "gpt2", "layer_norm_epsilon": 1e999}', "layer_norm_epsilon=inf: expected a finite"),
    "bytes": (b"\xff\xfe{}", "config.json cannot be read as .json (UnicodeDecodeError)"),
    "empty": ("", "config.json cannot be read as .json (JSONDecodeError)"),
    "null": ("null", "config.json holds a NoneType: expected an object"),
    "nothing in it": ("{}", "model_type=None: expected one of gpt2"),
    "model_type is a list": ('{"model_type": ["gpt2"]}', "model_type=['gpt2']: expected one of gpt2"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_configuration(name, tmp_path):
    content, says = FILES[name]
    build_model("rmt").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for cls in (SegmentRecurrent, load_class("model", "rmt")):
        if cls is SegmentRecurrent and says.startswith("model_type=") and "once" not in says:
            continue
        with pytest.raises(ValueError) as caught:
            cls.from_pretrained(tmp_path)
        text = str(caught.value)
        assert text.startswith(f"{tmp_path}: {says}") or (says in text and "\n" not in text), text


def test_a_missing_file_is_named(tmp_path):
    build_model("rmt").save_pretrained(tmp_path / "folder")
    for missing in ("config.json", "model.safetensors"):
        shutil.copytree(tmp_path / "folder", tmp_path / missing)
        (tmp_path / missing / missing).unlink()
        with pytest.raises(FileNotFoundError, match=missing):
            SegmentRecurrent.from_pretrained(tmp_path / missing)


def test_auto_classes_check_the_same(tmp_path):
    from transformers import AutoModelForCausalLM

    import lit_memory.hf  # noqa: F401, registers

    build_model("rmt").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for place, value, says in (
        (("arch",), [], r"arch=\[\]: expected a registered architecture"),
        (("settings", "width"), "16", "width='16': expected a whole number"),
        (("settings", "norm_eps"), math.nan, "norm_eps=nan: expected a finite number"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(put(config, place, value)))
        with pytest.raises(ValueError, match=says):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_every_field_of_ours_has_a_type_that_files_can_have():
    for name in MODELS:
        cls = load_class("model", name).Config
        check_types(cls, vars(cls()))


def test_nan_is_no_number_for_callers_either():
    for name in MODELS:
        cls = load_class("model", name).Config
        if "norm_eps" in cls.__dataclass_fields__:
            for value in (math.nan, math.inf, -1.0):
                with pytest.raises(ValueError, match="norm_eps="):
                    cls(norm_eps=value)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (1, int, True),
        (True, int, False),
        (1.0, int, False),
        (2**31, int, False),
        (1, float, True),
        (True, float, False),
        (math.nan, float, False),
        (10**400, float, False),
        (None, int | None, True),
        ("1", int | None, False),
        ([1, 2], list[int], True),
        ([1, "2"], list[int] | None, False),
        ({}, dict, True),
    ],
)
def test_types_of_a_file(value, kind, expected):
    assert fits(value, kind) is expected


def test_a_folder_that_nothing_fits_is_not_allocated(tmp_path):
    """Sizes that only config.json has cost neither memory nor time."""
    build_model("rmt").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(put(config, ("settings", "vocab_size"), 2**31 - 1)))
    with pytest.raises(ValueError, match="has shape"):
        pretrained.from_pretrained(SegmentRecurrent, tmp_path)
