"""Replay: the same values as one segment after the other. A GPU's recording is replaced by the work itself, so that all
but the CUDA graph is tested here; ``test_gpu`` has that."""

from types import SimpleNamespace

import pytest
import torch

from lit_memory.recurrence import GrowingState, map_state, replay, unroll
from lit_memory.testing.models import same

N, TOTAL = 5, replay.WORTH + 4


@pytest.fixture
def calls(monkeypatch):
    """How often work was recorded and replayed."""
    seen = []

    def recorded(work):
        seen.append("record")
        return lambda: seen.append("replay") or work()

    monkeypatch.setattr(replay, "recorded", recorded)
    monkeypatch.setattr("lit_memory.recurrence.schedules.replays", lambda model: True)
    return seen


@pytest.mark.parametrize("keep", [None, 0, 3])
@pytest.mark.parametrize("masked", [False, True])
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


def test_only_on_a_gpu_without_gradients_and_hooks(build):
    """What keeps a model from being recorded, each alone."""
    model = build("rmt")
    weight = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    model.parameters = lambda: iter([weight])
    assert not replay.replays(model)
    with torch.no_grad():
        assert replay.replays(model)
        weight.device.type = "cpu"
        assert not replay.replays(model)
        weight.device.type, model.looks_at_numbers = "cuda", True
        assert not replay.replays(model)
        model.looks_at_numbers = False
        model.decoder.register_forward_hook(print)
        assert not replay.replays(model)
