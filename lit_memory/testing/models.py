"""Checks of models: small ones in fp64, which read segments of ``N`` tokens.

Shape suffixes: B batch, T tokens.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_memory.recurrence import Grouped, State, Unrolled, generate, state_tensors, unroll
from lit_memory.util.checks import first_line, require

N = 5
STATE_OPTIONS = "make its tensors with **state_options(self, device, dtype)"
SMALL: dict[str, Any] = {"vocab_size": 19, "layers": 2, "width": 16, "heads": 2, "dropout": 0.0}
"""Settings of a small model, of those that its ``Config`` has."""


def check_model(cls: Any, **config: Any) -> None:
    """Check a class of models: causality, state, padding, gradients, streaming, and what a plan needs.

    config: settings with which a fresh model uses its memory, beside ``SMALL``. Raises AssertionError.
    """
    lacking = [name for name in ("vocab_size", "inputs") if name not in {f.name for f in fields(cls.Config)}]
    require(not lacking, f"Config lacks {', '.join(lacking)}, which the task fills in (BackboneConfig has them)")
    require(hasattr(cls.Config, "check_segment"), "Config lacks check_segment(segment_len) (BackboneConfig has it)")
    settings = {name: value for name, value in SMALL.items() if name in {f.name for f in fields(cls.Config)}} | config
    with torch.device("meta"):
        planned = cls(cls.Config(**settings))
        floats = planned.state_floats(planned.init_state(1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(cls.Config(**settings)).double().eval()
    require(model.state_floats(model.init_state(1)) == floats, "state_floats differs where weights have no values")
    for check in MODEL_CHECKS:
        check(model)


def same(a: State, b: State, tol: float = 1e-10) -> bool:
    """Whether two tensors, or two states, agree to ``tol``."""
    pairs = list(zip(state_tensors(a), state_tensors(b), strict=True))
    return all(x.shape == y.shape and torch.allclose(x, y, rtol=tol, atol=tol) for x, y in pairs)


def tokens(model: Any, batch: int, length: int) -> Tensor:
    """Random ids (B, T), the same in every check."""
    vocabulary, generator = model.config.vocab_size, torch.Generator().manual_seed(7)
    return torch.randint(vocabulary, (batch, length), generator=generator)


def causal(model: Any, changed: int) -> Tensor:
    """Another token at one place changes no hidden state before it, and its own; returns how far each moves, (T)."""
    ids_BT = tokens(model, 2, 4 * N)
    other_BT = ids_BT.clone()
    other_BT[:, changed] = (ids_BT[:, changed] + 1) % model.config.vocab_size
    moved = (unroll(model, ids_BT, N).hidden_BTD - unroll(model, other_BT, N).hidden_BTD).abs().amax((0, 2))
    require(bool((moved[:changed] < 1e-12).all()), f"not causal: token {changed} changes hidden states before it")
    require(bool(moved[changed] > 1e-3), f"the hidden state of token {changed} does not depend on it")
    return moved


def state_passed_on(model: Any) -> None:
    """Two calls with the state passed on equal one call."""
    ids_BT = tokens(model, 3, 4 * N)
    whole, first = unroll(model, ids_BT, N), unroll(model, ids_BT[:, : 2 * N], N)
    second = unroll(model, ids_BT[:, 2 * N :], N, state=first.state)
    joined = torch.cat([first.hidden_BTD, second.hidden_BTD], dim=1)
    wrong = "two calls with the state passed on differ from one: something is kept beside the state"
    require(same(joined, whole.hidden_BTD) and same(second.state, whole.state), wrong)


def pure(model: Any) -> None:
    """The same state twice gives the same bits, ``step`` changes no state in place, and nothing stays on the module."""
    ids_BT, before = tokens(model, 2, 2 * N), {k: v.clone() for k, v in model.state_dict().items()}
    _, state = model.step(model.init_state(2), ids_BT[:, :N])
    kept = [t.clone() for t in state_tensors(state)]
    first = model.step(state, ids_BT[:, N:])
    model.step(model.init_state(2), ids_BT.flip(0)[:, :N])
    again = model.step(state, ids_BT[:, N:])
    unchanged = all(torch.equal(x, y) for x, y in zip(kept, state_tensors(state), strict=True))
    require(unchanged, "step changes the state that it is given; return a new one")
    require(torch.equal(first[0], again[0]) and same(first[1], again[1], 0), "step depends on what was read before it")
    after = model.state_dict()
    kept_all = before.keys() == after.keys() and all(torch.equal(value, after[k]) for k, value in before.items())
    require(kept_all, "step changes a parameter or a buffer; what it remembers belongs in the state")


def rows_independent(model: Any) -> None:
    """A permuted batch gives permuted results, and no sample sees another."""
    ids_BT, order = tokens(model, 4, 3 * N), torch.tensor([2, 0, 3, 1])
    out, permuted = unroll(model, ids_BT, N), unroll(model, ids_BT[order], N)
    moved = same(permuted.hidden_BTD, out.hidden_BTD[order]) and same(permuted.state, model.reorder(out.state, order))
    require(moved, "a permuted batch gives other results: is the batch the first dimension of the whole state?")
    alone = same(unroll(model, ids_BT[:1], N).hidden_BTD, out.hidden_BTD[:1])
    require(alone, "a sample sees the others of its batch")


def reading_only(model: Any) -> None:
    """``write=False`` gives the hidden states of ``write=True``, and the state as it was."""
    ids_BT = tokens(model, 2, 2 * N)
    _, state = model.step(model.init_state(2), ids_BT[:, :N])
    writing, reading = (model.step(state, ids_BT[:, N:], write=write) for write in (True, False))
    require(same(reading[1], state, 0), "write=False changes the state")
    require(same(writing[0], reading[0]), "write=False changes the hidden states")


def padding(model: Any) -> None:
    """Padding changes no hidden state of a real token, nor the state of a sample that ended with a segment."""
    lengths = [3, 2 * N, 2 * N + 3, 4 * N]
    ids_BT = tokens(model, len(lengths), 4 * N)
    mask_BT = torch.arange(4 * N) < torch.tensor(lengths)[:, None]
    padded = unroll(model, ids_BT.masked_fill(~mask_BT, 0), N, mask_BT=mask_BT)
    require(bool(padded.hidden_BTD.isfinite().all()), "a segment of padding alone gives NaN")
    for i, length in enumerate(lengths):
        alone = unroll(model, ids_BT[i : i + 1, :length], N)
        seen = same(padded.hidden_BTD[i : i + 1, :length], alone.hidden_BTD)
        require(seen, f"padding changes the hidden states of a sample of {length} tokens: use mask_BT in attention")
        if length % N == 0:
            kept = same(model.reorder(padded.state, torch.tensor([i])), alone.state)
            require(kept, f"padding changes the state of a sample of {length} tokens: write what mask_BT marks alone")


def masked_token_invisible(model: Any) -> None:
    """Another id at a masked token changes no other hidden state, in its segment or in later ones."""
    ids_BT, mask_BT = tokens(model, 2, 4 * N), torch.ones(2, 4 * N, dtype=torch.bool)
    mask_BT[0, 1] = mask_BT[1, N + 2 : N + 4] = False
    other_BT = torch.where(mask_BT, ids_BT, (ids_BT + 1) % model.config.vocab_size)
    a, b = (unroll(model, x, N, mask_BT=mask_BT).hidden_BTD[mask_BT] for x in (ids_BT, other_BT))
    require(
        torch.allclose(a, b, rtol=1e-12, atol=1e-12),
        "a masked token changes hidden states or memory: write what mask_BT marks alone",
    )


def gradient_reach(model: Any, bptt: int | None = None, read_only: int = 0) -> None:
    """The loss of the last of four segments reaches ``bptt`` segments (all by default); the others get exactly 0."""
    ids_BT = torch.arange(4).repeat_interleave(N).expand(2, -1)  # segment s is made of token s
    hidden_BTD = unroll(model, ids_BT, N, bptt=bptt, read_only=read_only).hidden_BTD[:, -N:]
    noise = torch.randn(hidden_BTD.shape, generator=torch.Generator().manual_seed(3), dtype=hidden_BTD.dtype)
    (grad,) = torch.autograd.grad((hidden_BTD * noise).sum(), embedding(model).weight)
    reached = grad[:4].abs().amax(1)
    segments = (bptt or 4) if model.state_floats(model.init_state(1)) else 1
    require(bool((reached[4 - segments :] > 1e-12).all()), f"bptt={bptt}: the gradient ends too early; a detach()?")
    require(bool((reached[: 4 - segments] == 0).all()), f"bptt={bptt}: the gradient passes beside the state")


def embedding(model: Any) -> nn.Embedding:
    """The table of the token ids."""
    found = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    return next(part for part in found if part.num_embeddings == model.config.vocab_size)


def gradients(model: Any, out: Unrolled) -> tuple[Tensor, ...]:
    """Gradients of a random functional of hidden states and final state with respect to every parameter."""
    generator = torch.Generator().manual_seed(3)
    parts = [t for t in (out.hidden_BTD, *state_tensors(out.state)) if t.requires_grad]
    losses = [(t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in parts]
    return torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters()), materialize_grads=True)


def recomputed(model: Any) -> None:
    """Recomputing a segment in the backward pass writes nothing twice: outputs and gradients stay the same."""
    ids_BT, state, hidden = tokens(model, 2, 3 * N), model.init_state(2), []
    for part in ids_BT.split(N, dim=1):
        out, state = checkpoint(model.step, state, part, use_reentrant=False)  # type: ignore[misc]
        hidden.append(out)
    plain = unroll(model, ids_BT, N, schedule="sequential")
    again = plain._replace(hidden_BTD=torch.cat(hidden, dim=1), state=state)
    require(torch.equal(again.hidden_BTD, plain.hidden_BTD), "activation checkpointing changes hidden states")
    pairs = zip(gradients(model, again), gradients(model, plain), strict=True)
    equal = all(torch.allclose(a, b, rtol=1e-12) for a, b in pairs)
    require(equal, "activation checkpointing changes gradients: step must be a function of its arguments")


def streaming(model: Any) -> None:
    """A generated stream of segments equals the tensor, and needs memory for two segments only; in groups, for those of
    a group."""
    ids_BT = tokens(model, 2, 20 * N)
    with torch.no_grad():
        expected = unroll(model, ids_BT, N, keep=2)
        for schedule, most in (("sequential", 2), ("auto", 20 if isinstance(model, Grouped) else 2)):
            parts = passing(ids_BT.split(N, dim=1), most)
            out = unroll(model, parts, keep=2, schedule=schedule)
            equal = same(out.hidden_BTD, expected.hidden_BTD) and same(out.state, expected.state)
            ended = next(parts, None) is None
            require(ended and equal, "a stream of segments gives other results than the tensor")


def passing(parts: Iterable[Tensor], most: int) -> Iterator[Tensor]:
    """Copies of tensors one after another, of which a reader may hold ``most`` at a time."""
    alive = []
    for part in parts:
        part = part.clone()
        alive.append(weakref.ref(part))
        require(sum(ref() is not None for ref in alive) <= most, "segments that were read are kept in memory")
        yield part


def generates(model: Any, prompt: int = 7, segment_len: int | None = N) -> None:
    """Each generated token is the argmax of a teacher-forced run over prompt and continuation."""
    ids_BT = tokens(model, 4, prompt)
    new_BT = generate(model, ids_BT, 9, segment_len=segment_len)
    forced = model.logits(unroll(model, torch.cat([ids_BT, new_BT], dim=1), segment_len).hidden_BTD)
    equal = new_BT.shape == (4, 9) and torch.equal(new_BT, forced[:, prompt - 1 : -1].argmax(-1))
    require(equal, "generate gives other tokens than reading prompt and continuation at once")


def state_precision(model: Any) -> None:
    """The default state is at least fp32, and of the asked type where one is asked for."""
    for asked in (None, torch.float64, torch.float32):
        wanted = asked or torch.promote_types(next(model.parameters()).dtype, torch.float32)
        found = {t.dtype for t in state_tensors(model.init_state(1, dtype=asked)) if t.is_floating_point()}
        require(found <= {wanted}, f"init_state(dtype={asked}) has {found}, not {wanted}: {STATE_OPTIONS}")


def half_precision(model: Any) -> None:
    """Weights may be bfloat16, with a state in fp32."""
    half = copy.deepcopy(model).bfloat16()
    try:
        with torch.no_grad():
            hidden_BTD = unroll(half, tokens(model, 2, 2 * N), N).hidden_BTD
    except RuntimeError as error:
        advice = "its state stays fp32: cast what it reads of it to the type of its rows"
        raise AssertionError(f"with weights in bfloat16 it fails ({first_line(error)}); {advice}") from error
    found = hidden_BTD.dtype
    require(found == torch.bfloat16, f"with weights in bfloat16 its hidden states are {found}, which its head refuses")


def remembers(model: Any) -> None:
    """A model with a state reads in later segments what it wrote in an earlier one."""
    moved = causal(model, 3)[N:] > 1e-9
    carries = model.state_floats(model.init_state(1)) > 0
    require(not carries or bool(moved.any()), "no later segment reads what one wrote: is the write 0 in a new model?")


MODEL_CHECKS: Sequence[Callable[[Any], Any]] = (
    pure,
    partial(causal, changed=0),
    partial(causal, changed=12),
    remembers,
    state_passed_on,
    rows_independent,
    reading_only,
    padding,
    masked_token_invisible,
    gradient_reach,
    partial(gradient_reach, bptt=2),
    recomputed,
    streaming,
    generates,
    state_precision,
    half_precision,
)
