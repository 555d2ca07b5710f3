"""The contract of every registered model, and ``unroll``, the only loop over segments.

All comparisons are in fp64. ``model`` runs over the whole registry, ``layered`` over the models whose recurrence lies
inside their layers.
"""

import copy
import gc

import pytest
import torch
from conftest import row
from torch.nn import functional as F

from lit_memory.memory import compiled
from lit_memory.memory.associative_compiled import CompiledChunk
from lit_memory.models import armt_cell, armt_segments, by_hand
from lit_memory.models.decoder import Decoder
from lit_memory.models.episodic.line_recurrent import LineRecurrent
from lit_memory.models.token_recurrent import ReadsAhead, TokenRecurrent
from lit_memory.recurrence import (
    Grouped,
    GrowingState,
    LayerMajor,
    LayerRecurrent,
    SegmentRecurrent,
    SeparateWrite,
    detach,
    generate,
    map_state,
    pack,
    sample_token,
    segment_lengths,
    state_tensors,
    unroll,
)
from lit_memory.registry import MODELS, load_class
from lit_memory.testing import models as checks
from lit_memory.testing.models import gradients, same

N = 5  # tokens per segment
LAST = slice(-N, None)
LAYER_MAJOR = [name for name in MODELS if issubclass(load_class("model", name), LayerMajor)]
GROUPED = [name for name in MODELS if issubclass(load_class("model", name), Grouped)]
NOT_LAYERED = [name for name in MODELS if not issubclass(load_class("model", name), LayerRecurrent)]


def close(a, b, tol):
    """Two tensors, or two states, agree to ``tol`` times the largest value of each tensor."""
    pairs = zip(*([t.double() for t in state_tensors(state)] for state in (a, b)), strict=True)
    return all(x.shape == y.shape and (x - y).abs().max() <= tol * y.abs().max() for x, y in pairs if y.numel())


def naive(model, ids, lengths, read_only=0, masks=None):
    """The loop over segments, written out."""
    state, hidden = model.init_state(len(ids)), []
    for i, part in enumerate(ids.split(lengths, dim=1)):
        mask = None if masks is None else masks.split(lengths, dim=1)[i]
        out, state = model.step(state, part, mask, write=i < len(lengths) - read_only)
        hidden.append(out)
    return torch.cat(hidden, dim=1), state


# --- segments


@pytest.mark.parametrize(("align", "lengths"), [("left", [4, 4, 2]), ("right", [2, 4, 4]), ("center", [4, 3, 3])])
def test_seg_roundtrip(align, lengths):
    """T-SEG-roundtrip: every alignment cuts a sequence into segments that join to it again; none is empty or too
    long."""
    assert segment_lengths(10, 4, align) == lengths
    for total in range(1, 30):
        ids = torch.arange(total)
        parts = ids.split(segment_lengths(total, 4, align))
        assert torch.equal(torch.cat(parts), ids)
        assert len(parts) == -(-total // 4) and all(1 <= len(p) <= 4 for p in parts)


@pytest.mark.parametrize("align", [row("left"), row("right"), "center"])
def test_unroll_is_the_loop(model, tokens, align):
    """T-SEG-boundary: the joined hidden states are those of the segments in order, so the last token of one predicts
    the first of the next."""
    ids = tokens(2, 3 * N + 2)
    out = unroll(model, ids, N, align=align, schedule="sequential")
    hidden, state = naive(model, ids, segment_lengths(ids.shape[1], N, align))
    assert torch.equal(out.hidden_BTD, hidden) and same(out.state, state, 0)


def test_seg_boundary_prediction(model, tokens):
    """T-SEG-boundary: what follows a prompt of whole segments is predicted by the logits at the prompt's last token."""
    ids = tokens(3, 3 * N)
    logits = model.logits(unroll(model, ids, N).hidden_BTD)
    assert torch.equal(generate(model, ids[:, : 2 * N], 1, segment_len=N)[:, 0], logits[:, 2 * N - 1].argmax(-1))


@pytest.mark.parametrize(
    ("name", "empty"), [("rmt", {"memory_tokens": 0}), ("tarm", {"memory_tokens": 0}), ("transformer", {"window": 0})]
)
def test_seg_shift(build, tokens, name, empty):
    """T-SEG-shift: without memory and with one segment, the loss is exactly that of the plain backbone, shifted by
    one."""
    model, ids = build(name, **empty), tokens(3, 9)
    backbone = Decoder(model.config).double()
    backbone.load_state_dict({k.replace(".block.", "."): v for k, v in model.decoder.state_dict().items()})

    def loss(logits):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    assert torch.equal(loss(model.logits(unroll(model, ids).hidden_BTD)), loss(backbone(ids)))


def test_state_passing(model):
    """Two calls with the state passed on equal one call."""
    checks.state_passed_on(model)


def test_state_pure(model, tokens):
    """T-STATE-pure: interleaved samples equal separate ones; the same state twice gives the same bits; no state stays
    behind."""
    a, b = tokens(2, 2 * N).chunk(2)
    before = copy.deepcopy(model.state_dict())
    (state_a, state_b), hidden = (model.init_state(1), model.init_state(1)), {}
    for part in (slice(N), slice(N, None)):
        hidden["a"], state_a = model.step(state_a, a[:, part])
        hidden["b"], state_b = model.step(state_b, b[:, part])
    for name, ids, state in (("a", a, state_a), ("b", b, state_b)):
        alone = unroll(model, ids, N, schedule="sequential")
        assert torch.equal(hidden[name], alone.hidden_BTD[:, N:]) and same(state, alone.state, 0)
    kept = [t.clone() for t in state_tensors(state_a)]
    first, again = model.step(state_a, b[:, :N]), model.step(state_a, b[:, :N])
    assert torch.equal(first[0], again[0]) and same(first[1], again[1], 0)
    assert all(torch.equal(x, y) for x, y in zip(kept, state_tensors(state_a), strict=True))
    assert (
        all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
        and before.keys() == model.state_dict().keys()
    )


def test_step_is_a_function(model):
    """The same state twice gives the same bits, and ``step`` changes nothing in place."""
    checks.pure(model)


def test_reading_only(model):
    """Without ``write`` the state stays, and the hidden states are those of writing."""
    checks.reading_only(model)


def test_batch_rows_are_independent(model):
    """A permuted batch gives permuted results, and no sample sees another."""
    checks.rows_independent(model)


@pytest.mark.parametrize("changed", [row(0), 3, row(7), 12])
def test_causal(model, changed):
    """T-CAUSAL: another token at j changes no hidden state before j, the one at j, and, through the memory, those of
    later segments."""
    moved, end = checks.causal(model, changed), (changed // N + 1) * N
    if (
        type(model).__name__ == "MemReasoner" and end == 2 * N
    ):  # its second line asks about the first, and finds that, whatever it asks
        end += N
    assert (moved[end : end + N] > 1e-9).all() == (model.state_floats(model.init_state(1)) > 0)


# --- padding


def test_seg_mask(model):
    """T-SEG-mask: padding changes no hidden state of a real token, nor the state of a sample that ended with a
    segment."""
    checks.padding(model)


def test_leading_padding_segments(model, tokens):
    """A sample that starts one segment late equals the same sample without that segment."""
    ids, mask = tokens(2, 3 * N), torch.ones(2, 3 * N, dtype=torch.bool)
    mask[1, :N] = False
    late, alone = unroll(model, ids, N, mask_BT=mask), unroll(model, ids[1:, N:], N)
    assert same(late.hidden_BTD[1:, N:], alone.hidden_BTD) and same(
        model.reorder(late.state, torch.tensor([1])), alone.state
    )


def test_full_mask_is_no_mask(model, tokens):
    """A mask that hides nothing changes nothing; one that hides a token does."""
    ids, mask = tokens(2, 2 * N), torch.ones(2, 2 * N, dtype=torch.bool)
    plain = unroll(model, ids, N).hidden_BTD
    assert same(unroll(model, ids, N, mask_BT=mask).hidden_BTD, plain)
    mask[:, 1] = False
    assert not same(unroll(model, ids, N, mask_BT=mask).hidden_BTD[:, 2:N], plain[:, 2:N], 1e-6)


def test_masked_token_is_invisible(model):
    """Another id at a masked token changes no other hidden state, in its segment or in later ones."""
    checks.masked_token_invisible(model)


# --- gradients


REACHES = [(None, 0), row(1, 0), (2, 0), row(3, 0), row(4, 0), row(1, 1), (2, 1), row(3, 1)]


@pytest.mark.parametrize(("bptt", "read_only"), REACHES)
def test_gradient_reach(model, bptt, read_only):
    """T-RMT-grad, T-ARMT-bptt: the last segment's loss reaches ``bptt`` segments (all by default), and the others get
    exactly 0."""
    checks.gradient_reach(model, bptt, read_only)


@pytest.mark.parametrize("read_only", [row(0), 2])
def test_bptt_values_and_full_length(model, tokens, read_only):
    """Truncation changes no value, and none that spans the sequence changes a gradient, that of a learned initial
    memory included."""
    ids = tokens(2, 4 * N)
    full, cut, whole = (unroll(model, ids, N, bptt=b, read_only=read_only, schedule="sequential") for b in (None, 1, 4))
    assert torch.equal(full.hidden_BTD, cut.hidden_BTD) and same(full.state, cut.state, 0)
    for a, b in zip(gradients(model, full), gradients(model, whole), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_bptt_counts_readers_once(model):
    """However many segments only read, they are one of the ``bptt`` levels: with 2, each of them reaches the last
    write."""
    ids = torch.arange(5).repeat_interleave(N).expand(2, -1)
    hidden = unroll(model, ids, N, bptt=2, read_only=2).hidden_BTD[:, LAST]
    (grad,) = torch.autograd.grad((hidden * torch.randn_like(hidden)).sum(), model.decoder.tokens.weight)
    carries = model.state_floats(model.init_state(1)) > 0
    assert (grad[:5].abs().amax(1) > 1e-12).tolist() == [False, False, carries, False, True]


def test_bptt_cuts_a_given_state(model, tokens):
    """Gradients enter a state that was passed in only if ``bptt`` is longer than the sequence."""
    ids = tokens(2, 3 * N)
    state = unroll(model, ids[:, :N], N).state
    carried = [t for t in state_tensors(state) if t.requires_grad]
    for bptt in (2, 3):
        hidden = unroll(model, ids[:, N:], N, state=state, bptt=bptt).hidden_BTD
        grads = (
            torch.autograd.grad((hidden * torch.randn_like(hidden)).sum(), carried, materialize_grads=True)
            if carried
            else []
        )
        assert any(g.any() for g in grads) == (bptt == 3 and bool(carried))


def test_activation_checkpointing(model):
    """Recomputing a segment in the backward pass writes nothing twice: outputs and gradients stay the same."""
    checks.recomputed(model)


def test_inference_mode_leaves_no_trace(build, tokens):
    """Validation under ``inference_mode`` at a new length does not break training at that length (cached rotary
    tables)."""
    model, ids = build("transformer"), tokens(1, 13)
    with torch.inference_mode():
        unroll(model, ids, 13)
    unroll(model, ids, 13).hidden_BTD.square().sum().backward()
    assert model.decoder.layers[0].block.attention.qkv.weight.grad.any()


# --- state


def test_state_floats(model, tokens):
    """``state_floats`` counts what one sample really carries. It grows by ``state_growth`` a segment in RMT-R and in
    the line-reading models, and in no other."""
    short, long = (unroll(model, tokens(3, segments * N), N).state for segments in (1, 9))
    real = sum(t.numel() for t in state_tensors(long) if t.is_floating_point())
    assert model.state_floats(long) * 3 == real and all(len(t) == 3 for t in state_tensors(long))
    fresh, growth = model.state_floats(model.init_state(1)), getattr(model, "state_growth", 0)
    assert (model.state_floats(short), model.state_floats(long)) == (
        fresh + growth,
        fresh + 9 * growth,
    )
    assert bool(growth) == (type(model).__name__ in ("RMTR", "Larimar", "MemReasoner"))


def test_a_state_holds_no_segment(model, tokens):
    """Its tensors are no views of what a whole segment has computed."""
    if isinstance(model, GrowingState):
        pytest.skip("it keeps a part of every segment")
    _, state = model.step(model.init_state(2), tokens(2, 200))
    tensors = list(state_tensors(state))
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_floating_point()}
    own = sum(t.numel() * t.element_size() for t in tensors if t.is_floating_point())
    assert sum(held.values()) <= 1.5 * own


def test_half_precision(model):
    checks.half_precision(model)


@pytest.mark.parametrize("schedule", ["auto", "sequential"])
def test_segments_without_a_token(model, tokens, schedule):
    """Every model reads them but those whose segment is a line. What is recurrent in every token remembers nothing."""
    ids = tokens(2, N)
    if isinstance(model, LineRecurrent):
        with pytest.raises(ValueError, match=r"ids_BT=\(2, 0\): a segment is a line; expected at least one token"):
            unroll(model, (ids, ids[:, :0]), schedule=schedule)
        return
    before, after = (unroll(model, parts, schedule=schedule) for parts in ((ids,), (ids, ids[:, :0])))
    assert same(after.hidden_BTD, before.hidden_BTD)
    assert not isinstance(model, TokenRecurrent) or same(after.state, before.state)


def test_reorder(model, tokens):
    """``reorder`` selects samples, repeats included: reading on from it equals reading on and selecting."""
    ids, idx = tokens(3, 2 * N), torch.tensor([2, 2, 0, 1])
    state = unroll(model, ids[:, :N], N).state
    hidden, new = model.step(state, ids[:, N:])
    hidden_idx, new_idx = model.step(model.reorder(state, idx), ids[idx, N:])
    assert same(hidden_idx, hidden[idx]) and same(new_idx, model.reorder(new, idx))


def test_iterator_of_segments(model):
    """An iterator equals the tensor, and one by one needs memory for two segments only."""
    checks.streaming(model)


@torch.no_grad()
def test_an_iterator_is_read_in_groups(model, tokens, monkeypatch):
    """Of segments of one shape, with masks or without; memory is needed for two groups at the most."""
    monkeypatch.setattr("lit_memory.recurrence.schedules.GROUP_ROWS", 3 * 2 * N)
    ids = tokens(2, 20 * N)
    expected = unroll(model, ids, N, schedule="sequential")
    for keep in (None, 2, 0):
        out = unroll(model, checks.passing(ids.split(N, dim=1), 7), keep=keep)
        assert same(out.state, expected.state)
        assert keep == 0 or same(out.hidden_BTD, expected.hidden_BTD[:, -(keep or 20) * N :])
    lengths, mask = [N, N, N, 2, 2, N, N, N, N], torch.ones(2, N, dtype=torch.bool)
    parts = ids[:, : sum(lengths)].split(lengths, dim=1)
    mixed = [(part, mask) if i in (1, 7) else part for i, part in enumerate(parts)]
    one_by_one, grouped = (unroll(model, iter(mixed), schedule=schedule) for schedule in ("sequential", "auto"))
    assert same(grouped.hidden_BTD, one_by_one.hidden_BTD) and same(grouped.state, one_by_one.state)


@pytest.mark.parametrize(
    "options",
    [row({}), {"bptt": 2}, row({"read_only": 2}), row({"keep": 1}), row({"schedule": "diagonal"})],
    ids=str,
)
def test_tuple_of_segments(model, tokens, options):
    """A tuple equals the tensor, gradients included."""
    if options.get("schedule") and not isinstance(model, LayerRecurrent):
        pytest.skip("no diagonal schedule")
    ids = tokens(2, 4 * N)
    out, expected = unroll(model, ids.split(N, dim=1), **options), unroll(model, ids, N, **options)
    assert same(out.hidden_BTD, expected.hidden_BTD) and same(out.state, expected.state)
    for a, b in zip(gradients(model, out), gradients(model, expected), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_samples_that_join_at_a_cut_train_their_first_memory(model, tokens):
    """``bptt`` cuts what the others have read, not the first memory of those that have just begun."""
    ids, found = tokens(2, 2 * N), []
    for schedule in ("sequential", "auto"):
        out = unroll(model, (ids[:1, :N], ids[:, N:]), bptt=1, keep=1, schedule=schedule)
        found.append(gradients(model, out._replace(hidden_BTD=out.hidden_BTD[1:])))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("schedule", ["sequential", row("diagonal")])
def test_samples_that_begin_later(model, tokens, schedule):
    """Samples of 4, 2 and 1 segments that end together equal each by itself: hidden states, state and all gradients
    (1e-10)."""
    if schedule == "diagonal" and not isinstance(model, LayerRecurrent):
        pytest.skip("no diagonal schedule")
    ids, counts = tokens(3, 4 * N), (4, 2, 1)
    begun = [sum(s >= 4 - count for count in counts) for s in range(4)]
    segments = tuple(part[:b] for part, b in zip(ids.split(N, dim=1), begun, strict=True))
    joined = unroll(model, segments, keep=1, schedule=schedule)
    alone = [unroll(model, ids[i : i + 1, (4 - count) * N :], N, keep=1) for i, count in enumerate(counts)]
    assert same(joined.hidden_BTD, torch.cat([one.hidden_BTD for one in alone]))
    asked = unroll(
        model, ids, N, state=unroll(model, segments[:3], keep=0).state, read_only=4, keep=1
    )  # the third begins with a question
    assert same(asked.hidden_BTD, joined.hidden_BTD)
    following = tokens(3, 5 * N)[:, 4 * N :]
    after = model.step(joined.state, following)[0]
    expected = torch.cat([model.step(one.state, following[i : i + 1])[0] for i, one in enumerate(alone)])
    assert same(after, expected)
    got, wanted = (
        torch.autograd.grad(h.square().sum(), list(model.parameters()), materialize_grads=True)
        for h in (after, expected)
    )
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_segments_may_have_masks(model, tokens):
    """Pairs of ids and a mask, in an iterator or a tuple, read as one tensor with its mask does, and samples may begin
    in one."""
    ids, mask = tokens(2, 3 * N), torch.ones(2, 3 * N, dtype=torch.bool)
    mask[0, 2:N] = mask[1, N + 1 : 2 * N] = False
    first, second, third = zip(ids.split(N, dim=1), mask.split(N, dim=1), strict=True)
    whole = unroll(model, ids, N, mask_BT=mask)
    for schedule in ("auto", "sequential"):
        streamed = unroll(model, iter([first, second, third[0]]), schedule=schedule)
        assert same(streamed.hidden_BTD[mask], whole.hidden_BTD[mask]) and same(streamed.state, whole.state)
    listed = unroll(model, (first, second, third[0]), schedule="sequential")
    assert same(listed.hidden_BTD, streamed.hidden_BTD, 0) and same(listed.state, streamed.state, 0)
    asked = unroll(model, (first, second, third), read_only=1)
    assert same(asked.hidden_BTD, unroll(model, ids, N, mask_BT=mask, read_only=1).hidden_BTD, 0)
    later = unroll(model, iter([(first[0][:1], first[1][:1]), second, third[0]]), keep=1)
    alone = unroll(model, ids[1:, N:], N, mask_BT=mask[1:, N:], keep=1)
    assert same(later.hidden_BTD, torch.cat([whole.hidden_BTD[:1, 2 * N :], alone.hidden_BTD]))


# --- read-only segments and what is kept


READERS = [row(1, 5 * N - 2), row(3, 5 * N), (3, 5 * N - 2), row(5, 5 * N - 2)]


@pytest.mark.parametrize(("read_only", "total"), READERS)
def test_read_only_slow_twin(model, tokens, read_only, total):
    """Read-only segments, folded into the batch, equal the loop with write=False: values, state and all gradients
    (1e-10)."""
    ids = tokens(2, total)
    folded, lengths = unroll(model, ids, N, read_only=read_only), segment_lengths(total, N)
    looped = folded._replace(**dict(zip(("hidden_BTD", "state"), naive(model, ids, lengths, read_only), strict=True)))
    assert same(folded.hidden_BTD, looped.hidden_BTD) and same(folded.state, looped.state)
    for a, b in zip(gradients(model, folded), gradients(model, looped), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_read_only_masked(model, tokens):
    """The fold carries the padding mask along."""
    ids, mask = tokens(2, 4 * N), torch.ones(2, 4 * N, dtype=torch.bool)
    mask[0, -2:] = mask[1, 2 * N + 1] = False
    folded = unroll(model, ids, N, read_only=2, mask_BT=mask)
    assert same(folded.hidden_BTD, naive(model, ids, [N] * 4, 2, mask)[0])


@pytest.mark.parametrize("read_only", [0, 2])
def test_keep(model, tokens, read_only):
    """``keep`` returns that many trailing segments and changes neither their values nor the state."""
    ids = tokens(2, 4 * N)
    full = unroll(model, ids, N, read_only=read_only)
    for keep in (0, 1, 2, 3, 9):
        kept = unroll(model, ids, N, read_only=read_only, keep=keep)
        assert kept.hidden_BTD.shape[:2] == (2, min(keep, 4) * N) and same(kept.state, full.state), keep
        assert keep == 0 or same(kept.hidden_BTD, full.hidden_BTD[:, -keep * N :]), keep


def test_advance(model, tokens):
    """A ``SeparateWrite`` model gives the state that ``step`` gives, with its gradients, and ``unroll`` uses that for
    all segments that are not kept: a line-reading model decodes nothing there."""
    ids, mask, seen = tokens(2, 4 * N), torch.ones(2, 4 * N, dtype=torch.bool), []
    mask[0, 2:N] = mask[1, 3 * N + 1 :] = False
    state = unroll(model, ids[:, :N], N, mask_BT=mask[:, :N], schedule="sequential").state  # several backward passes
    following = ids[:, N : 2 * N], mask[:, N : 2 * N]
    if isinstance(model, SeparateWrite):
        for segment in (following, following[:1]):
            fast, slow = model.advance(state, *segment), model.step(state, *segment)[1]
            assert same(fast, slow, 1e-12)
            assert same(state_gradients(model, fast), state_gradients(model, slow), 1e-10)
    expected = [unroll(model, ids, N, mask_BT=mask, keep=keep) for keep in (None, 1)]
    model.decoder.layers[0].register_forward_pre_hook(lambda *_: seen.append(1))
    for keep, decoded in ((0, 0), (1, 1), (3, 3), (None, 4)):
        seen.clear()
        assert same(unroll(model, ids, N, mask_BT=mask, keep=keep).state, expected[0].state, 1e-12)
        assert len(seen) == decoded or not isinstance(model, LineRecurrent)
    seen.clear()
    unroll(model, iter(ids.split(N, dim=1)), keep=0)
    assert not seen or not isinstance(model, LineRecurrent)
    assert same(expected[1].hidden_BTD, expected[0].hidden_BTD[:, LAST], 1e-12)


def state_gradients(model, state):
    """Gradients of all parameters of a functional of a state; 0 where there is no graph."""
    floats = [tensor for tensor in state_tensors(state) if tensor.is_floating_point()]
    loss = sum(((tensor + 1).square() * torch.linspace(-1, 1, tensor.shape[-1])).sum() for tensor in floats)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return ()
    return torch.autograd.grad(
        loss, [*model.parameters()], retain_graph=True, allow_unused=True, materialize_grads=True
    )


# --- the diagonal schedule


@pytest.mark.parametrize("segments", [row(1), row(2), 5])
def test_diagonal_equals_sequential(layered, tokens, segments):
    """T-DIAG-eq, T-ARMT-diag, T-PRMT-diag: hidden states, final state and all gradients equal the sequential
    schedule's."""
    ids = tokens(2, segments * N)
    diagonal, sequential = unroll(layered, ids, N, schedule="diagonal"), unroll(layered, ids, N, schedule="sequential")
    assert same(diagonal.hidden_BTD, sequential.hidden_BTD) and same(diagonal.state, sequential.state)
    for a, b in zip(gradients(layered, diagonal), gradients(layered, sequential), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_diagonal_leaves_shared_modules_whole(build, tokens):
    """GPT-J has one norm under two names."""
    model, ids = build("armt", family="gptj"), tokens(2, 3 * N)
    found = unroll(model, ids, N, schedule="diagonal").hidden_BTD
    assert same(found, unroll(model, ids, N, schedule="sequential").hidden_BTD)
    assert all(type(weight) is torch.nn.Parameter for weight in model.parameters())


@pytest.mark.parametrize("segments", [row(1), row(2), 3, row(6)])
def test_diagonal_steps(layered, tokens, segments):
    """T-DIAG-steps: S segments and L layers take S + L - 1 grouped steps."""
    calls = []
    layered.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    unroll(layered, tokens(1, segments * N), N, schedule="diagonal")
    assert len(calls) == segments + len(layered.layers) - 1


def test_samples_join_the_diagonal(layered, tokens):
    """As they join the sequential schedule."""
    state, ids = unroll(layered, tokens(1, N), N).state, tokens(3, 2 * N)
    found, expected = (unroll(layered, ids, N, state=state, schedule=name) for name in ("diagonal", "sequential"))
    assert same(tuple(found), tuple(expected))


@pytest.mark.parametrize("keep", [0, 1])
def test_the_diagonal_finishes_what_is_kept(layered, tokens, monkeypatch, keep):
    """No norm of hidden states that nobody reads."""
    finished, finish = [], layered.finish
    monkeypatch.setattr(layered, "finish", lambda *rows: finished.append(rows) or finish(*rows))
    unroll(layered, tokens(2, 5 * N), N, keep=keep, schedule="diagonal")
    assert len(finished) == keep


@pytest.mark.parametrize("align", [row("left"), row("right"), "center"])
def test_diagonal_ragged(layered, tokens, align):
    """T-DIAG-ragged: a short segment, wherever it is, and ``keep`` give the same as the sequential schedule."""
    ids, lengths = tokens(2, 3 * N + 2), segment_lengths(3 * N + 2, N, align)
    sequential = unroll(layered, ids, N, align=align, schedule="sequential")
    for keep in (None, 1, 2):
        diagonal = unroll(layered, ids, N, align=align, keep=keep, schedule="diagonal")
        kept = sum(lengths[-keep:] if keep else lengths)
        assert diagonal.hidden_BTD.shape[1] == kept and same(diagonal.hidden_BTD, sequential.hidden_BTD[:, -kept:]), (
            keep
        )
        assert same(diagonal.state, sequential.state), keep


def test_diagonal_with_readers_and_state(layered, tokens):
    """The diagonal schedule starts from a given state and serves read-only segments."""
    ids = tokens(2, 6 * N)
    state = unroll(layered, ids[:, : 2 * N], N).state
    diagonal, sequential = (
        unroll(layered, ids[:, 2 * N :], N, state=state, read_only=2, schedule=s) for s in ("diagonal", "sequential")
    )
    assert same(diagonal.hidden_BTD, sequential.hidden_BTD) and same(diagonal.state, sequential.state)


@pytest.mark.parametrize("name", NOT_LAYERED)
def test_diagonal_refused(build, tokens, name):
    """T-DIAG-refuse: RMT, RMT-R, TARM and whatever else hands memory from the top to the bottom has no diagonal
    schedule."""
    assert {"rmt", "rmt_r", "tarm"} <= set(NOT_LAYERED)
    with pytest.raises(ValueError, match=f"{type(build(name)).__name__} .*diagonal.*sequential"):
        unroll(build(name), tokens(1, 2 * N), N, schedule="diagonal")


@pytest.mark.parametrize("flags", [{"memory_layers": [1]}, {"rotary_bases": [2.0, 500.0]}], ids=str)
def test_diagonal_needs_equal_layers(build, tokens, flags):
    with pytest.raises(ValueError, match=f"ARMT .*diagonal.*{'|'.join(flags).split('_')[-1]}.*sequential"):
        unroll(build("armt", **flags), tokens(1, 2 * N), N, schedule="diagonal")


# --- segments in groups: the layer-major schedule, and RMT's


def test_diagonal_refuses_autocast(layered, tokens):
    """In one line, in place of an error of torch."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"schedule='diagonal': .*'sequential'"):
        unroll(layered.float(), tokens(1, 2 * N), N, schedule="diagonal")


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    """ARMT's memory through numba's loops, in chunks of 4 segments, or as where numba is not installed."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    monkeypatch.setattr(armt_segments, "CHUNK", 4)
    monkeypatch.setattr(armt_segments, "WORTH", 0)
    monkeypatch.setattr(compiled, "installed", lambda: request.param == "compiled")


@pytest.mark.parametrize(
    "options", [row({}), row({"bptt": 3}), {"read_only": 2, "keep": 2}, {"masked": True, "keep": 1}], ids=str
)
@pytest.mark.usefixtures("way")
def test_groups_equal_sequential(grouped, tokens, options):
    """Hidden states, final state and all gradients equal the sequential schedule's, with masks and ``bptt`` as well,
    over several chunks of a layer."""
    ids, options = tokens(3, 11 * N), dict(options)
    if options.pop("masked", False):
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[0, 4 * N - 2 : 6 * N] = mask[1, : 2 * N] = mask[2, 10 * N + 1 :] = False
        options["mask_BT"] = mask
    agrees(grouped, ids, 1e-10, **options)


OUTPUTS = {"mamba": "out_proj", "rwkv": "channel", "deltanet": "out_proj", "gated_deltanet": "feed_forward"}
"""Models that read ahead -> the part of a layer that only its rows need."""


@pytest.mark.parametrize("name", OUTPUTS)
def test_rows_that_nobody_reads_are_not_computed(build, tokens, name, monkeypatch):
    """Of a context that is read for its memory the top layer computes the state alone; gradients are the same."""
    assert set(OUTPUTS) == {name for name in MODELS if issubclass(load_class("model", name), ReadsAhead)}
    found, ids = [], tokens(2, 6 * N)
    for schedule in ("layer", "sequential"):
        model, calls = build(name), []
        part = model.layers[-1].get_submodule(OUTPUTS[name])  # without a hook, which would be called for every segment
        run = part.forward
        monkeypatch.setattr(part, "forward", lambda *args, run=run, calls=calls: calls.append(1) or run(*args))
        state = unroll(model, ids, N, keep=0, schedule=schedule).state
        sum(t.square().sum() for t in state_tensors(state)).backward()
        found.append((state, tuple(p.grad for p in model.parameters() if p.grad is not None), len(calls)))
    (state, grads, few), (twin, twin_grads, many) = found
    assert few == 0 < many and same(state, twin, 1e-10) and same(grads, twin_grads, 1e-10)


@pytest.mark.parametrize(("weights", "precision"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@pytest.mark.parametrize("masked", [False, True])
def test_groups_with_a_state_of_another_precision(grouped, tokens, weights, precision, masked):
    """A state is of the type that was asked for, whatever that of the weights; in single precision to its rounding."""
    model, ids = grouped.to(weights), tokens(3, 4 * N)
    mask = torch.arange(4 * N) < torch.tensor([[4 * N], [2 * N], [N + 2]]) if masked else None
    fast, slow = (
        unroll(model, ids, N, mask_BT=mask, state=model.init_state(3, dtype=precision), schedule=schedule)
        for schedule in ("auto", "sequential")
    )
    real = slice(None) if mask is None else mask
    assert close(fast.hidden_BTD[real], slow.hidden_BTD[real], 1e-4) and close(fast.state, slow.state, 1e-4)
    assert {t.dtype for t in state_tensors(fast.state) if t.is_floating_point()} <= {precision}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.usefixtures("way")
def test_groups_in_single_precision(build, tokens, name):
    """The same to 1e-5 in fp32, where no denominator comes near 0 and no step is so long that rounding grows."""
    tame = {"armt": {"denom_floor": 1.0, "value_std": 0.05}, "mac": {"overshoot": 1.0}}.get(name, {})
    agrees(build(name, layers=3, **tame).float(), tokens(3, 11 * N), 1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        {"memory_tokens": 1, "denom_floor": 0.3, "gamma": "raw"},
        {"update": "sequential", "gamma": "raw", "beta_on_z": True},
        {"gamma_detach": False, "beta_on_z": True, "denom_floor": 0.3},
        {"gamma_detach": False, "gamma": "raw", "update": "sequential", "denom_floor": 0.3, "gamma_eps": 0.2},
        {"gamma": "off", "normalize_phi": True, "gamma_detach": False},
        {"use_denom": False, "normalize_phi": True},
        {"normalize_phi": True, "gamma_eps": 0.0},
        {"memory_layers": [1]},
        {"recall_on_mem_rows": False, "denom_floor": 0.3},
        {"recall_on_mem_rows": False, "family": "gpt2"},
        {"recall_on_mem_rows": False, "family": "llama", "nu": 1, "kv_heads": 1},
    ],
    ids=str,
)
@pytest.mark.usefixtures("way")
def test_layer_major_with_flags(build, tokens, flags):
    """Every branch of the backward pass by hand, with samples that end."""
    ids = tokens(3, 10 * N)
    mask = torch.arange(10 * N) < torch.tensor([10 * N, 4 * N, 0])[:, None]
    agrees(build("armt", **flags), ids, 1e-10, mask_BT=mask)


@pytest.mark.parametrize(("installed", "worth"), [(True, 0), (True, 1 << 30), (False, 0)])
def test_layer_major_is_compiled_where_it_pays(build, tokens, installed, worth, monkeypatch):
    """A short input, and a machine without numba, takes the plain operations."""
    pytest.importorskip("numba")
    seen = []
    monkeypatch.setattr(armt_segments, "WORTH", worth)
    monkeypatch.setattr(compiled, "installed", lambda: installed)
    monkeypatch.setattr(armt_cell, "CompiledChunk", lambda *given: seen.append(1) or CompiledChunk(*given))
    unroll(build("armt"), tokens(2, 3 * N), N, schedule="layer")
    assert bool(seen) == (installed and not worth)


@pytest.mark.parametrize("part", ["to_query", "to_key", "to_value"])
@pytest.mark.usefixtures("way")
def test_layer_major_passes_nan_on(build, tokens, part):
    """A channel that is not a number is none that is zero: the guard of a run has to see it."""
    model = build("armt")
    model.layers[0].get_submodule(part).weight.data[0, 0] = torch.nan
    assert unroll(model, tokens(2, 3 * N), N, schedule="layer").hidden_BTD[:, -1].isnan().all()


def agrees(model, ids, tol, **options):
    """Segments in groups equal the sequential schedule."""
    assert not model.refuses_groups()
    groups, sequential = (unroll(model, ids, N, schedule=s, **options) for s in ("auto", "sequential"))
    assert close(groups.hidden_BTD, sequential.hidden_BTD, tol) and close(groups.state, sequential.state, tol)
    assert close(gradients(model, groups), gradients(model, sequential), tol)


@pytest.mark.parametrize("align", [row("left"), row("right"), "center"])
def test_ragged_groups(grouped, tokens, align, monkeypatch):
    """Segments of several lengths, a given state, and groups of few segments give the same as the sequential
    schedule."""
    monkeypatch.setattr("lit_memory.recurrence.schedules.GROUP_ROWS", 3 * 2 * N)
    ids = tokens(2, 9 * N + 2)
    state = unroll(grouped, ids[:, : 2 * N], N).state
    for keep in (None, 0, 1, 5):
        groups, sequential = (
            unroll(grouped, ids[:, 2 * N :], N, align=align, state=state, keep=keep, bptt=4, schedule=s)
            for s in ("auto", "sequential")
        )
        assert same(groups.hidden_BTD, sequential.hidden_BTD) and same(groups.state, sequential.state), keep


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LAYER_MAJOR])
def test_layer_major_refused(build, tokens, name):
    """A model without the schedule says so in one line, and ``auto`` is then the sequential one."""
    model, ids = build(name), tokens(1, 2 * N)
    with pytest.raises(ValueError, match=f"{type(model).__name__} allows no schedule='layer': .*'sequential'"):
        unroll(model, ids, N, schedule="layer")
    exact = 1e-10 if isinstance(model, Grouped) else 0
    assert same(unroll(model, ids, N), unroll(model, ids, N, schedule="sequential"), exact)


@pytest.mark.parametrize("name", [name for name in LAYER_MAJOR if not hasattr(load_class("model", name), "grain")])
def test_layer_major_conditions(build, tokens, name):
    """Dropout and autocast are refused in one line; ``auto`` is the layer-major schedule wherever that is allowed."""
    model, ids = build(name, dropout=0.1), tokens(1, 2 * N)
    with pytest.raises(ValueError, match=r"dropout=0.1 would draw other numbers; use 'sequential'"):
        unroll(model, ids, N, schedule="layer")
    assert same(unroll(model.eval(), ids, N, schedule="layer"), unroll(model, ids, N, schedule="auto"), 0)
    with torch.autocast("cpu"), pytest.raises(ValueError, match="autocast"):
        unroll(model, ids, N, schedule="layer")


class Doubled(torch.nn.Module):
    """A layer as ``peft`` and its like put in the place of another: with its weights, and something of their own."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

    def forward(self, x):
        return 2 * self.inner(x)


@pytest.mark.parametrize("name", GROUPED)
def test_replaced_and_hooked_layers_are_called(build, tokens, name):
    """A backward pass by hand reads weights alone: what another library does in a layer would be lost without a
    word."""
    for change in ("replaced", "hooked"):
        model, ids = build(name), tokens(2, 5 * N)
        before = unroll(model, ids, N, schedule="auto").hidden_BTD
        owner, own, layer = next(
            (part, own, layer)
            for part in (getattr(model, "layers", None) or model.decoder.layers).modules()
            for own, layer in part.named_children()
            if type(layer) is torch.nn.Linear
        )
        if change == "replaced":
            setattr(owner, own, Doubled(layer))
        else:
            layer.register_forward_hook(lambda module, inputs, output: 2 * output)
        found, twin = (unroll(model, ids, N, schedule=schedule).hidden_BTD for schedule in ("auto", "sequential"))
        assert same(found, twin, 1e-10) and not torch.allclose(found, before), change


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("rmt", {"layers": 1, "memory_tokens": 1}),
        ("rmt", {"heads": 4, "kv_heads": 2, "qkv_bias": False}),
        ("tarm", {"heads": 4, "kv_heads": 1, "family": "llama"}),
        ("rmt_r", {"formula": "paper", "rotary_fraction": 0.0}),
        ("rmt_r", {"retrieval": "top_1"}),
    ],
    ids=str,
)
def test_rmt_by_hand_with_flags(build, tokens, name, flags):
    """Every branch of the backward pass by hand, with samples that end."""
    mask = torch.arange(7 * N) < torch.tensor([7 * N, 4 * N - 1, 0])[:, None]
    for keep in (0, 2):
        agrees(build(name, **flags), tokens(3, 7 * N), 1e-10, mask_BT=mask, keep=keep)


def test_rmt_by_hand_of_some_segments(build, tokens):
    """Segments that the loss does not reach take no part; a second pass through the same one is refused in one line."""
    model, ids = build("rmt"), tokens(2, 6 * N)
    ids_SBT = ids.unflatten(1, (6, N)).transpose(0, 1)
    by_hand, _ = model.read_group(ids_SBT, model.init_state(2), None, frozenset(range(1, 6)), 6)
    twin = unroll(model, ids, N, bptt=1, schedule="sequential").hidden_BTD.split(N, dim=1)
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    for s in (3, 1):
        found = [
            torch.autograd.grad(hidden[s].square().sum(), list(model.parameters()), **options)
            for hidden in (by_hand, twin)
        ]
        assert all(same(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(RuntimeError, match=r"allows one backward pass; use schedule='sequential'"):
        by_hand[3].sum().backward()


def test_a_graph_that_nobody_runs_back_is_freed(model, tokens):
    """At once, without the garbage collector, whatever reads the segments."""

    def tensors():  # of those that have come since
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects(generation=0))

    ids, counts = tokens(2, 3 * N), []
    unroll(model, ids, N, keep=1)  # what is computed once for all is kept
    gc.collect(0)
    gc.disable()
    try:
        for _ in range(3):
            unroll(model, ids, N, keep=1)
            counts.append(tensors())
    finally:
        gc.enable()
    assert counts == counts[:1] * 3


def test_rmt_by_hand_refused(build, tokens):
    """What has no backward pass by hand, or does not gain by it, is read by the module's own step, to the bit."""
    hooked, frozen = build("rmt"), build("rmt")
    hooked.decoder.layers[0].up.register_forward_hook(lambda module, args, output: output)
    cases = [
        (hooked, "hooks of its modules"),
        (build("rmt", family="gpt2"), "gpt2"),
        (build("rmt", family="llama", qk_norm=True), "qk_norm"),
        (build("rmt", memory_tokens=0), "no memory"),
        (build("rmt", dropout=0.1), "dropout=0.1"),
        (build("tarm").to(torch.bfloat16), "less precise"),
    ]
    for model, reason in cases:
        assert reason in model.refuses_groups(N)
    assert "512 tokens" in frozen.refuses_groups(513) and not frozen.refuses_groups(512)
    ids = tokens(2, 3 * N)
    assert same(unroll(hooked, ids, N), unroll(hooked, ids, N, schedule="sequential"), 0)
    frozen.decoder.requires_grad_(False)
    grads = [
        torch.autograd.grad(unroll(frozen, ids, N, schedule=s).hidden_BTD.sum(), frozen.memory)[0]
        for s in ("auto", "sequential")
    ]
    assert same(*grads)


@pytest.mark.parametrize("name", ["rmt", "armt"])
def test_frozen_weights_by_hand(build, tokens, name, monkeypatch):
    """The others get the gradients that they have without them, and no product is computed for the frozen ones."""
    products: list[int] = []
    monkeypatch.setattr(by_hand, "learns", lambda weight, f=by_hand.learns: f(weight) and (products.append(1) or True))
    model, ids, found = build(name), tokens(2, 3 * N), []
    for trained in (True, False):
        model.decoder.layers.requires_grad_(trained)
        others = [p for name, p in model.named_parameters() if "layers" not in name]
        products.clear()
        found.append(torch.autograd.grad(unroll(model, ids, N).hidden_BTD.square().sum(), others, allow_unused=True))
        assert bool(products) == trained
    assert all(a is b is None or same(a, b) for a, b in zip(*found, strict=True))


# --- segment checkpointing


@pytest.mark.parametrize(("options", "size"), [row({"read_only": 1}, 2), ({"bptt": 3, "keep": 2}, 3)], ids=str)
def test_checkpointed_segments(model, tokens, options, size):
    """Segments that are computed again on the way back: the same bits, and the same gradients."""
    ids = tokens(2, 6 * N)
    options = options | {"schedule": "sequential"}
    plain, again = (unroll(model, ids, N, checkpoint_segments=n, **options) for n in (None, size))
    assert same(again, plain, 0)
    assert close(gradients(model, again), gradients(model, plain), 1e-12)


def test_checkpointed_segments_under_autocast(model, tokens):
    """Casts of the weights that the pass without a graph makes are not what later segments train."""
    if isinstance(model, LineRecurrent):
        pytest.skip("its solver has no bfloat16")
    ids, found = tokens(2, 3 * N), []
    for size in (None, 1):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(unroll(model.float(), ids, N, read_only=1, checkpoint_segments=size, schedule="sequential"))
    pairs = list(zip(*(gradients(model, out) for out in found), strict=True))
    assert all((plain - again).norm() <= 0.05 * plain.norm() + 1e-6 for plain, again in pairs)


def test_checkpointed_dropout(build, tokens):
    """The second pass drops what the first one dropped, and leaves the generator where it was."""
    model, ids, found = build("armt", dropout=0.2), tokens(2, 6 * N), []
    for size in (None, 2):
        torch.manual_seed(1)
        found.append(gradients(model, unroll(model, ids, N, checkpoint_segments=size)))
    assert close(*found, 1e-12)


@pytest.mark.parametrize("schedule", ["sequential", "layer"])
def test_checkpointed_segments_save_memory(build, tokens, schedule):
    """Between the passes the graph has no node of a segment, and so none of its tensors."""
    model, ids = build("armt"), tokens(2, 32 * N)

    def nodes(size):
        out = unroll(model, ids, N, keep=1, schedule=schedule, checkpoint_segments=size)
        found, left = set(), [out.hidden_BTD.grad_fn]
        while left:
            node = left.pop()
            if node is not None and node not in found:
                found.add(node)
                left += [parent for parent, _ in node.next_functions]
        return len([node for node in found if "AccumulateGrad" not in node.name()])

    assert nodes(8) <= 8 < nodes(None)


# --- generation and errors


@pytest.mark.parametrize(("prompt", "segment_len"), [(7, 5), row(10, 5), row(7, None)])
def test_generate_is_greedy(model, prompt, segment_len):
    """T-ARMT-genmode: each generated token is the argmax of a teacher-forced run over prompt and continuation."""
    checks.generates(model, prompt, segment_len)


LENGTHS = [1, 4, N, N + 1, 2 * N + 3]  # of prompts, with segments of N tokens


def padded(tokens, side):
    """Prompts of ``LENGTHS`` in one batch, padded with a token that means something, and the mask."""
    ids, total = tokens(len(LENGTHS), max(LENGTHS)), max(LENGTHS)
    place = torch.arange(total)
    mask = torch.stack([place >= total - n if side == "left" else place < n for n in LENGTHS])
    return ids.masked_fill(~mask, 3), mask


def logits_of(model, call):
    """What ``call`` returns, and the logits of the last position that it asked for, one (B, V) for each time."""
    seen, logits = [], model.logits
    model.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
    try:
        return call(), [each[:, -1] for each in seen]
    finally:
        del model.logits


@pytest.mark.parametrize("segment_len", [N, row(None)])
@pytest.mark.parametrize("side", ["left", row("right")])
def test_generate_slow_twin(model, tokens, side, segment_len):
    """T-cached-generate: in a ragged batch, every step's logits are those of a full pass over that sample alone,
    without padding (1e-10)."""
    ids, mask = padded(tokens, side)
    new, steps = logits_of(model, lambda: generate(model, ids, 2 * N + 1, segment_len=segment_len, mask_BT=mask))
    assert new.shape == (len(LENGTHS), 2 * N + 1) and len(steps) == 2 * N + 1
    for i in range(len(LENGTHS)):
        whole = torch.cat([ids[i][mask[i]], new[i, :-1]])[None]
        full = model.logits(unroll(model, whole, segment_len).hidden_BTD)[0, LENGTHS[i] - 1 :]
        assert same(torch.stack([step[i] for step in steps]), full) and torch.equal(new[i], full.argmax(-1))


def test_generate_goes_on_from_a_state(model, tokens):
    """The memory of what was read before can be passed in; the method is the function."""
    ids = tokens(3, 3 * N + 2)
    state = unroll(model, ids[:, : 2 * N], N).state
    assert torch.equal(
        model.generate(ids[:, 2 * N :], 8, segment_len=N, state=state), generate(model, ids, 8, segment_len=N)
    )
    assert model.generate(ids).shape == (3, 20)


def test_generate_where_some_samples_begin(model, tokens):
    """A state of the first samples: the others begin with their prompts, as they do by themselves."""
    ids = tokens(3, 2 * N)
    state = unroll(model, ids[:2, :N], N, keep=0).state
    own = (
        model.generate(ids[:2, N:], 6, segment_len=N + 2, state=state),
        model.generate(ids[2:, N:], 6, segment_len=N + 2),
    )
    assert torch.equal(model.generate(ids[:, N:], 6, segment_len=N + 2, state=state), torch.cat(own))


@pytest.mark.parametrize("several", [row(False), True])
def test_generate_stops(model, tokens, several):
    """After a stop token a sample repeats it; before, and in the other samples, nothing changes; once all have ended
    nothing is computed."""
    ids = tokens(4, 7)
    free = generate(model, ids, 9, segment_len=N)
    stops = [free[0, 3].item(), free[1, 5].item()] if several else [free[0, 3].item()]
    stopped = generate(model, ids, 9, segment_len=N, stop=stops if several else stops[0])
    for sample, expected in zip(stopped.tolist(), free.tolist(), strict=True):
        end = next((i for i, token in enumerate(expected) if token in stops), 8)
        assert sample == expected[:end] + [expected[end]] * (9 - end)
    short, steps = logits_of(model, lambda: generate(model, ids[:1], 9, segment_len=N, stop=stops))
    assert torch.equal(short, stopped[:1]) and len(steps) == 1 + min(
        free[0].tolist().index(stop) for stop in stops if stop in free[0]
    )


def test_generate_samples(build, tokens):
    """The generator decides the draw; top_k 1 and a temperature near 0 are greedy; the draws follow softmax(logits /
    temperature)."""
    model, ids = build("rmt"), tokens(2, 4)

    def draw(seed, **options):
        return generate(model, ids, 9, segment_len=N, generator=torch.Generator().manual_seed(seed), **options)

    greedy, one, other = draw(0), draw(0, temperature=2.0), draw(1, temperature=2.0)
    assert torch.equal(draw(0, temperature=2.0), one) and not torch.equal(one, other) and not torch.equal(one, greedy)
    assert torch.equal(draw(1, temperature=2.0, top_k=1), greedy) and torch.equal(draw(1, temperature=1e-6), greedy)
    assert torch.equal(draw(1, temperature=2.0, top_k=999), other)
    state = torch.get_rng_state()
    draw(0, temperature=2.0)
    assert torch.equal(torch.get_rng_state(), state)
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    for top_k, kept in ((None, [0, 1, 2, 3]), (2, [1, 2])):
        drawn = (
            sample_token(logits.expand(40_000, -1), 1.5, top_k, torch.Generator().manual_seed(0)).bincount(minlength=4)
            / 40_000
        )
        expected = torch.zeros(4).index_copy(0, torch.tensor(kept), (logits[kept] / 1.5).softmax(0))
        assert torch.allclose(drawn, expected, atol=0.01)


def test_of_equal_tokens_no_more_than_top_k_are_drawn():
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0]).expand(100, -1)
    assert len(sample_token(logits, 1.0, 1, torch.Generator().manual_seed(0)).unique()) == 1


def test_prompts_longer_than_the_positions(build, tokens):
    """Segments make a prompt legal that is longer than the position table; without, the error says what to do."""
    model, ids = build("armt", family="gpt2", positions=8), tokens(2, 30)
    assert generate(model, ids, 5, segment_len=6).shape == (2, 5)
    with pytest.raises(ValueError, match="position table has 8: use shorter segments"):
        generate(model, ids, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected 1 or more"),
        ({"segment_len": 0}, "segment_len=0"),
        ({"top_k": 0}, "top_k=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"mask_BT": torch.ones(1, 4)}, r"shape \(1, 4\): expected \(2, 4\)"),
        ({"mask_BT": torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])}, "at least one real token"),
    ],
)
def test_generate_errors(build, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        generate(build("armt"), tokens(2, 4), **options)


def test_pack_worked_example():
    """Real tokens move to the front in order, wherever the padding is; ``order_BT`` says where they came from."""
    prompts = pack(torch.tensor([[9, 9, 5, 6], [5, 9, 6, 7]]), torch.tensor([[0, 0, 1, 1], [1, 0, 1, 1]]))
    assert prompts.ids_BT.tolist() == [[5, 6, 0, 0], [5, 6, 7, 0]] and prompts.lengths_B.tolist() == [2, 3]
    assert prompts.order_BT.tolist() == [[2, 3, 0, 1], [0, 2, 3, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zigzag"}, "schedule='zigzag'"),
        ({"align": "top"}, "align='top'"),
        ({"read_only": 4}, "read_only=4"),
        ({"read_only": -1}, "read_only=-1"),
        ({"bptt": 0}, "bptt=0"),
        ({"checkpoint_segments": 0}, "checkpoint_segments=0: expected at least 1 segment"),
        ({"segment_len": 0}, "segment_len=0: expected 1 or more"),
        ({"segment_len": -2}, "segment_len=-2: expected 1 or more"),
        ({"keep": -1}, "keep=-1: expected 0 or more"),
        ({"schedule": "diagonal", "bptt": 1}, "bptt"),
        ({"schedule": "diagonal", "mask_BT": torch.ones(1, 3 * N, dtype=torch.bool)}, "mask_BT"),
    ],
)
def test_unroll_errors(build, tokens, options, message):
    """Impossible requests raise ValueError and name the argument."""
    with pytest.raises(ValueError, match=message):
        unroll(build("armt"), tokens(1, 3 * N), **{"segment_len": N, **options})


def test_ids_and_states_that_do_not_fit(build, tokens):
    """What torch would say of them names neither."""
    model = build("armt")
    with pytest.raises(ValueError, match=r"ids_BT=\(5,\): expected a batch of sequences, \(B, T\)"):
        unroll(model, tokens(1, N)[0])
    with pytest.raises(TypeError, match=r"a state has a dict; expected tensors in \(named\) tuples, samples first"):
        model.state_floats({"memory": model.init_state(1)})


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda model, ids, **options: unroll(model, ids[:1], N, **options), id="ids"),
        pytest.param(lambda model, ids, **options: unroll(model, iter([ids[:1]] * 3), **options), id="iterator"),
        pytest.param(lambda model, ids, **options: unroll(model, (ids, ids[:1], ids), **options), id="between"),
        pytest.param(lambda model, ids, **options: unroll(model, ids[:1], N, read_only=1, **options), id="reading"),
        pytest.param(
            lambda model, ids, **options: generate(model, ids[:1], 2, segment_len=N, **options), id="generate"
        ),
    ],
)
def test_a_state_of_more_samples(model, tokens, read):
    """It belongs to others, whatever reads it and wherever the samples get fewer."""
    with torch.no_grad(), pytest.raises(ValueError, match="state=2: its samples are more than the 1 of ids_BT"):
        read(model, tokens(2, N), state=model.init_state(2))


@pytest.mark.parametrize(
    "segments", [(), iter(()), torch.zeros(2, 0, dtype=torch.long)], ids=["tuple", "iterator", "ids"]
)
def test_no_segments(build, segments):
    """Nothing to read is an error, as nothing says how many samples there are; with a state it is no change."""
    model = build("armt")
    with pytest.raises(ValueError, match="expected at least one segment, or a state"):
        unroll(model, segments)
    state = model.init_state(2)
    out = unroll(model, segments, state=state)
    assert out.state is state and out.hidden_BTD.shape == (2, 0, 0)


@pytest.mark.parametrize("given", ["one tensor", "segments", "stream"])
def test_masks_of_whole_numbers(model, tokens, given):
    """A mask may hold 1 and 0, as Hugging Face's do."""
    ids, mask = tokens(2, 3 * N), torch.ones(2, 3 * N, dtype=torch.bool)
    mask[0, 2 * N + 1 :] = mask[1, 1] = False

    def read(mask):
        if given == "one tensor":
            return unroll(model, ids, N, mask_BT=mask)
        pairs = tuple(zip(ids.split(N, dim=1), mask.split(N, dim=1), strict=True))
        return unroll(model, pairs if given == "segments" else iter(pairs))

    with torch.no_grad():
        found, wanted = read(mask.long()), read(mask)
    assert torch.equal(found.hidden_BTD, wanted.hidden_BTD) and same(found.state, wanted.state, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"read_only": 1},
        {"bptt": 2},
        {"schedule": "layer"},
        {"checkpoint_segments": 2},
        {"schedule": "diagonal"},
        {"mask_BT": torch.ones(1, N, dtype=torch.bool)},
    ],
)
def test_iterator_errors(build, tokens, options):
    """What needs the number of segments is refused for an iterator."""
    with pytest.raises(ValueError, match="iterator"):
        unroll(build("armt"), iter([tokens(1, N)]), **options)


# --- the protocol


def test_the_base_class_has_what_every_model_must_have():
    """What only some models need is a mixin, so that a reader of the base class sees no more than this."""
    members = {name for name in vars(SegmentRecurrent) if not name.startswith("_")}
    assert members | set(SegmentRecurrent.__annotations__) == {
        *("config", "decoder", "numbers", "looks_at_numbers", "init_state", "step", "logits", "state_floats"),
        *("reorder", "generate", "from_pretrained", "save_pretrained"),
    }


@pytest.mark.parametrize("changed", ["state", "weights"])
def test_changes_in_place_are_seen(grouped, tokens, changed):
    """Who changes the first state or a weight before the backward pass gets an error or the gradients of what was read,
    as by the definition; never others."""
    ids, model = tokens(2, 3 * N), grouped
    first = detach(unroll(model, tokens(2, N), N).state)

    def grads(change):
        state = map_state(torch.clone, first)
        loss = unroll(model, ids, N, state=state).hidden_BTD.square().sum()
        weights = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            for tensor in [*(state_tensors(state) if changed == "state" else weights)] if change else []:
                tensor.mul_(3) if tensor.is_floating_point() else tensor.logical_not_()
        return torch.autograd.grad(loss, weights, materialize_grads=True)

    wanted = grads(False)
    try:
        found = grads(True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert all(map(torch.equal, found, wanted))
