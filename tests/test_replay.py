"""Replay: the same values as without. A GPU's recording is replaced by the work itself, so that all but the CUDA graph
is tested here; ``test_gpu`` has that."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import row
from test_lit import make_data, make_double
from torch.utils._python_dispatch import TorchDispatchMode

from lit_memory.lit import LIT_DATA, LIT_MODULES, LitARMT
from lit_memory.recurrence import GrowingState, map_state, replay, unroll
from lit_memory.registry import load_class
from lit_memory.tasks.associative_retrieval import AssociativeRetrieval
from lit_memory.testing.models import same

N, TOTAL = 5, replay.WORTH + 4
WAITS = {"_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero", "_unique2"}
"""Operations whose results, or their shapes, the CPU would have to wait for."""


class Recordable(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        marks = name in ("index", "index_put", "index_put_") and any(
            idx is not None and idx.dtype == torch.bool for idx in args[1]
        )
        assert not marks and name not in WAITS and str(func) != "aten.repeat_interleave.Tensor", f"{name} waits"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def calls(monkeypatch):
    """How often work was recorded and replayed."""
    seen = []

    def recorded(work, pool=None):
        seen.append("record")
        gradients = torch.is_grad_enabled()

        def replayed():
            seen.append("replay")
            with torch.set_grad_enabled(gradients), Recordable():
                work()

        return replayed

    monkeypatch.setattr(replay, "recorded", recorded)
    monkeypatch.setattr(replay, "memory_pool", lambda: "pool")
    monkeypatch.setattr("lit_memory.recurrence.schedules.replays", lambda model: True)
    monkeypatch.setattr("lit_memory.lit.reads.can_record", lambda tensor: True)
    return seen


@pytest.mark.parametrize(
    ("keep", "masked"),
    [(None, True), row(None, False), *(row(keep, masked) for keep in (0, 3) for masked in (False, True))],
)
def test_replay_slow_twin(model, tokens, calls, keep, masked):
    """Hidden states and the final state, of samples that end at different segments as well."""
    if model.looks_at_numbers:
        pytest.skip("looks at numbers")
    ids = tokens(3, TOTAL * N)
    mask = torch.arange(TOTAL * N) < torch.tensor([[TOTAL * N], [7 * N + 2], [N]]) if masked else None
    with torch.no_grad():
        out = unroll(model, ids, N, mask_BT=mask, keep=keep)
        expected = unroll(model, ids, N, mask_BT=mask, keep=keep, schedule="sequential")
    if not isinstance(model, GrowingState):  # every state of which has another shape
        assert calls.count("record") >= 1 and calls.count("replay") > 8
    assert same(tuple(out), tuple(expected))


def test_iterator_with_new_samples(build, tokens, calls):
    """Segments that come one by one and gain a sample on the way; the state that went in is not written to."""
    model, ids = build("armt"), tokens(3, TOTAL * N)
    parts = ids.split(N, dim=1)
    with torch.no_grad():
        begun = model.init_state(2)
        before = map_state(torch.clone, begun)

        def segments():
            yield from (part[:2] for part in parts[:8])
            yield from parts[8:]

        out = unroll(model, segments(), state=begun, keep=2)
        expected = unroll(model, segments(), state=begun, keep=2, schedule="sequential")
    assert calls.count("record") == 2
    assert same(begun, before)
    assert same(tuple(out), tuple(expected))


@pytest.mark.parametrize(("segments", "recorded"), [(replay.WORTH - 1, 0), (replay.WORTH, 1)])
def test_short_sequences_are_not_recorded(build, tokens, calls, segments, recorded):
    with torch.no_grad():
        unroll(build("armt"), tokens(2, segments * N), N)
    assert calls.count("record") == recorded


def test_what_cannot_be_recorded_is_read_as_it_is(build, tokens, calls, monkeypatch):
    """A model that waits for a number and does not say so: one warning, the same values, and no second try."""

    def refused(work):
        calls.append("try")
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(replay, "recorded", refused)
    model, ids = build("armt"), tokens(2, TOTAL * N)
    ids = [*ids.split(N, dim=1), *tokens(2, 6 * 3).split(3, dim=1)]
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"ARMT cannot be recorded \(CUDA error: [\w ]+\); all are read"):
            out = unroll(model, tuple(ids))
        expected = unroll(model, tuple(ids), schedule="sequential")
    assert calls == ["try"] and model.looks_at_numbers and not build("armt").looks_at_numbers
    assert same(tuple(out), tuple(expected))


def test_a_step_that_cannot_be_recorded_is_an_error(calls, monkeypatch):
    """It was asked for."""
    data = make_data(LIT_DATA["associative_retrieval"])
    module = make_double(LIT_MODULES["armt"], data, replay=True)

    def refused(work, pool):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(replay, "recorded", refused)
    with pytest.raises(RuntimeError, match=r"^replay: a training step cannot be recorded \(CUDA error: [\w ]+\); exp"):
        train(module, [data.task.batch(0, "train", step, 3) for step in range(4)])


def test_only_on_a_gpu_without_gradients_and_hooks(build, monkeypatch):
    """What keeps a model from being recorded, each alone."""
    model, capturing = build("rmt"), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    weight = SimpleNamespace(is_cuda=True)
    model.parameters = lambda: iter([weight])
    assert not replay.replays(model)
    with torch.no_grad():
        assert replay.replays(model)
        weight.is_cuda = False
        assert not replay.replays(model)
        weight.is_cuda, model.looks_at_numbers = True, True
        assert not replay.replays(model)
        model.looks_at_numbers = False
        assert replay.replays(model)
        capturing.append("somebody else's graph")
        assert not replay.replays(model)
        capturing.clear()
        model.decoder.register_forward_hook(print)
        assert not replay.replays(model)


REPLAYED = [name for name, lit in LIT_MODULES.items() if not load_class("model", name).looks_at_numbers]


def train(module, batches):
    """Losses and gradients of training steps, one after the other."""
    found = []
    for batch in batches:
        module.zero_grad()
        loss = module.training_step(batch, 0)
        (loss * 3).backward()
        found += [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("name", REPLAYED)
def test_training_steps_slow_twin(name, calls):
    """Losses and gradients of batches of two shapes in turn, one with its segments in ``context``."""
    data = make_data(LIT_DATA["associative_retrieval"])
    batches = [data.task.batch(0, "train", step, 3) for step in range(10)]
    batches[1::2] = [batch.recut([7]) for batch in batches[1::2]]
    found = []
    for options in ({}, {"replay": True}):
        torch.manual_seed(0)
        found.append(train(make_double(LIT_MODULES[name], data, **options), batches))
    assert (calls.count("record"), calls.count("replay")) == (2, 4)
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.row
@pytest.mark.parametrize("name", REPLAYED)
def test_samples_that_begin_at_different_segments_slow_twin(name, calls):
    """All are in every segment then, and batches with other lengths or other numbers of scored tokens share a
    recording."""
    data = make_data(LIT_DATA["babilong"])
    batches = [data.task.batch(0, "train", step, 3) for step in range(16)]
    assert len({len(segment) for batch in batches for segment in batch.context}) > 1
    found = []
    for options in ({}, {"replay": True}):
        torch.manual_seed(0)
        found.append(train(make_double(LIT_MODULES[name], data, **options), batches))
    assert 1 <= calls.count("record") <= 3 and calls.count("replay") >= 4
    assert all(same(a, b) for a, b in zip(*found, strict=True))


def test_numbers_in_place_of_tokens_slow_twin(calls):
    """A forecast has several numbers at a position."""
    data = make_data(LIT_DATA["time_series"])
    batches, found = [data.task.batch(0, "train", step, 3) for step in range(6)], []
    for options in ({}, {"replay": True}):
        torch.manual_seed(0)
        found.append(train(make_double(LIT_MODULES["armt"], data, **options), batches))
    assert calls.count("record") == 1
    assert all(same(a, b) for a, b in zip(*found, strict=True))


def test_weights_that_move_are_recorded_anew(calls):
    """A recording has the addresses of the weights."""
    data = make_data(LIT_DATA["associative_retrieval"])
    module = make_double(LIT_MODULES["armt"], data, replay=True)
    batches = [data.task.batch(0, "train", step, 3) for step in range(5)]
    train(module, batches)
    first = calls.count("record")
    weight = next(module.parameters())
    weight.data = weight.data.clone()
    train(module, batches)
    assert (first, calls.count("record")) == (1, 2)


def test_old_recordings_make_room(calls, monkeypatch):
    """Of more shapes than fit, the oldest is recorded again."""
    monkeypatch.setattr(replay, "SHAPES", 2)
    data = make_data(LIT_DATA["associative_retrieval"])
    module = make_double(LIT_MODULES["armt"], data, replay=True)
    train(module, [data.task.batch(0, "train", step, size) for size in (2, 3, 4, 4, 2) for step in range(4)])
    assert calls.count("record") == 4


def test_batches_of_a_stream_are_not_replayed(calls):
    data = make_data(LIT_DATA["associative_retrieval"])
    module = make_double(LIT_MODULES["armt"], data, replay=True)
    batch = data.task.batch(0, "train", 0, 2)
    generated = batch.recut([7])
    for _ in range(6):
        train(
            module, [replace(generated, context=iter(generated.context)), replace(batch, continues=False, read_only=0)]
        )
    assert not calls


def test_weights_that_are_unfrozen_are_trained(calls):
    """A recording has gradients of the weights that it was made for; a callback may unfreeze others."""
    task = AssociativeRetrieval(AssociativeRetrieval.Config(pairs=3))
    module = LitARMT(vocab_size=task.vocab_size, layers=1, width=16, heads=2, memory_dim=4, replay=True)
    weight = module.model.decoder.tokens.weight.requires_grad_(False)
    for step in range(6):
        if step == 5:
            weight.requires_grad_(True)
        module.loss(task.batch(0, "train", step, 8)).backward()
        assert (weight.grad is not None) == (step == 5)
    assert "replay" in calls
