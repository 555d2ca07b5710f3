"""Segment-level recurrence: what every model offers, and the only loop over segments.

A ``SegmentRecurrent`` model reads one segment at a time and carries a state between segments. The state is a pytree
(tuples of tensors, batch first) that is passed in and returned, never kept on the module: that is what makes data
parallelism, activation checkpointing, beam search and tests work. A ``LayerRecurrent`` model keeps one state per layer,
which allows the diagonal schedule of Sivtsov et al. 2025 (arXiv 2506.05229). ``unroll`` serves training, evaluation and
benchmarks alike.

Shape suffixes: B batch, T tokens, S tokens of a full segment, N tokens of any sample, D width, V vocabulary, G cells
that run together.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_memory.util.checks import FieldError

State = Any  # a tensor, or a (named) tuple of States


def map_state(fn: Callable[..., Tensor], state: State, *others: State) -> State:
    """Apply ``fn`` to every tensor of a state (and to the tensors at the same place in ``others``)."""
    if isinstance(state, Tensor):
        return fn(state, *others)
    items = [map_state(fn, *parts) for parts in zip(state, *others, strict=True)]
    return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)


def state_tensors(state: State) -> Iterator[Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, Tensor):
        yield state
    else:
        for part in state:
            yield from state_tensors(part)


def detach(state: State) -> State:
    """The same values without their graph."""
    return map_state(Tensor.detach, state)


class SegmentRecurrent(nn.Module):
    """A model that reads segments: ``init_state``, ``step`` and ``logits`` are its whole interface."""

    config: Any
    """The ``Config`` that it was built from."""
    decoder: Any
    """The backbone: embeddings, layers, norm and ``head``."""
    diagnosed: ClassVar[tuple[str, ...]] = ()
    """Names of what a validation tells about the memory, besides its metrics; a report may show them."""
    tested: ClassVar[tuple[str, ...]] = ()
    """Those of them that a test tells as well, for every x."""
    loss_names: ClassVar[tuple[str, ...]] = ()
    """Of a model that is trained on several losses: what ``train.losses`` may weigh, the task's own being "answer"."""
    state_growth: int = 0
    """Floats that every segment adds to the state of one sample, or what else ``growth_unit`` says; 0 for a memory of
    constant size."""
    growth_unit: ClassVar[str] = "segment"

    def init_state(self, batch: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> State:
        """The state before the first segment of ``batch`` samples. Default device and dtype: those of the parameters,
        but never below fp32."""
        raise NotImplementedError

    def step(
        self, state: State, ids_BT: Tensor, mask_BT: Tensor | None = None, write: bool = True
    ) -> tuple[Tensor, State]:
        """Read one segment: hidden states (B, T, D) of its tokens, and the next state.

        ``mask_BT`` is True at real tokens (default: all). With ``write=False`` the state comes back as it was.
        """
        raise NotImplementedError

    def advance(self, state: State, ids_BT: Tensor, mask_BT: Tensor | None = None) -> State:
        """The state after one segment whose hidden states nobody reads. Default: those of ``step`` are thrown away."""
        return self.step(state, ids_BT, mask_BT)[1]

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Vocabulary scores (B, T, V). Apart from ``step`` because on a long context only the answer needs them."""
        return self.decoder.head(hidden_BTD)

    @property
    def scores(self) -> int:
        """Numbers that the loss of one token takes."""
        return self.config.vocab_size

    def cross_entropy(self, hidden_ND: Tensor, targets_N: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy of the ids that hidden states predict: the mean, or with ``reduction`` "sum" or "none" (N,)."""
        return F.cross_entropy(self.logits(hidden_ND), targets_N, reduction=reduction)

    def state_floats(self, state: State) -> int:
        """Floats that one sample carries from segment to segment."""
        return sum(t[0].numel() for t in state_tensors(state) if t.is_floating_point())

    def reorder(self, state: State, idx: Tensor) -> State:
        """The state of samples ``idx`` (which may repeat), for beam search and for several readers of one memory."""
        return map_state(lambda t: t.index_select(0, idx), state)

    def choose(self, live_B: Tensor, new: State, old: State) -> State:
        """State ``new`` for the samples that are live, ``old`` for those that have no real token in the segment between
        the two."""
        return map_state(lambda a, b: torch.where(live_B.view(-1, *[1] * (a.dim() - 1)), a, b), new, old)

    def join(self, state: State, others: State) -> State:
        """The state of the samples of ``state``, then of ``others``, which have just begun."""
        return map_state(lambda a, b: torch.cat([a, b.to(a.dtype)]), state, others)

    def share(self, state: State, readers: int) -> State:
        """The state for ``readers`` samples in a row that all read what one sample wrote (``step`` with
        ``write=False``)."""
        if readers == 1:
            return state
        batch = next(state_tensors(state))
        return self.reorder(state, torch.arange(len(batch), device=batch.device).repeat_interleave(readers))

    @property
    def undecayed(self) -> set[str]:
        """Names of the parameters that weight decay leaves alone. Default: none."""
        return set()

    def generate(self, ids_BT: Tensor, max_new_tokens: int = 20, **options: Any) -> Tensor:
        """Continuations (B, max_new_tokens) of prompts; ``options`` are those of ``generate`` in this file."""
        return generate(self, ids_BT, max_new_tokens, **options)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *, revision: str | None = None, **flags: Any) -> Self:
        """The model in a folder that ``save_pretrained`` wrote, or a new one around a pretrained decoder; see
        ``pretrained.py``."""
        from lit_memory.hf.pretrained import from_pretrained

        return from_pretrained(cls, source, revision=revision, **flags)

    def save_pretrained(self, folder: str | os.PathLike[str], segment_len: int | None = None) -> None:
        """Write config.json and model.safetensors to a folder; see ``pretrained.py``."""
        from lit_memory.hf.pretrained import save_pretrained

        save_pretrained(self, folder, segment_len)

    def state_options(self, device: torch.device | None, dtype: torch.dtype | None) -> dict[str, Any]:
        """``device`` and ``dtype`` for new state tensors, with the defaults of ``init_state``."""
        weight = next(self.parameters())
        return {"device": device or weight.device, "dtype": dtype or torch.promote_types(weight.dtype, torch.float32)}


class LayerRecurrent(SegmentRecurrent):
    """A model whose recurrence lies inside each layer of its ``decoder``.

    The layers are modules of equal structure, ``layer(rows, layer_state, mask, write) -> (rows, layer_state')``, and
    the state is a tuple with one entry per layer.
    """

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    def embed(self, ids_BT: Tensor, write: bool = True) -> Tensor:
        """Rows that enter the first layer; without ``write`` the rows that only write memory are left out."""
        raise NotImplementedError

    def finish(self, rows_BTD: Tensor, write: bool = True) -> Tensor:
        """Hidden states of the ordinary tokens, after the final norm, from the rows that leave the last layer."""
        raise NotImplementedError

    def step(self, state, ids_BT, mask_BT=None, write=True):
        rows = self.embed(ids_BT, write)
        states = []
        for layer, layer_state in zip(self.layers, state, strict=True):
            rows, layer_state = layer(rows, layer_state, mask_BT, write)
            states.append(layer_state)
        return self.finish(rows, write), tuple(states)


class Unrolled(NamedTuple):
    """Hidden states of the segments that were kept, joined to (B, T, D), and the state after the last writing
    segment."""

    hidden_BTD: Tensor
    state: State


def full_precision(device: torch.device) -> AbstractContextManager:
    """No autocast, for what is computed in the precision of a state; there is none to leave on "meta", where sizes are
    counted."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


def segment_lengths(total: int, segment_len: int, align: str = "left") -> list[int]:
    """How ``total`` tokens are cut: "left" leaves the last segment short, "right" the first one, "center" makes
    ceil(total / segment_len) nearly equal ones. Source: the reference's segmenter (spec 0.2)."""
    count, rest = -(-total // segment_len), total % segment_len
    if align == "center":
        return [total // count + (i < total % count) for i in range(count)]
    full = [segment_len] * (total // segment_len)
    if align not in ("left", "right"):
        raise FieldError("align", align, "expected 'left', 'right' or 'center'")
    return full if not rest else [*full, rest] if align == "left" else [rest, *full]


def unroll(
    model: SegmentRecurrent,
    ids_BT: Tensor | Iterable[Tensor | tuple[Tensor, Tensor]],
    segment_len: int | None = None,
    *,
    mask_BT: Tensor | None = None,
    state: State | None = None,
    read_only: int = 0,
    keep: int | None = None,
    bptt: int | None = None,
    schedule: str = "sequential",
    align: str = "left",
) -> Unrolled:
    """Read a sequence segment by segment.

    ids_BT: (B, T) token ids, cut every ``segment_len`` tokens (default: one segment); or a tuple of segments; or an
        iterator of them, which is consumed with constant memory (besides a state that grows), so that 50 million tokens
        fit (use ``keep``). Segments may gain samples, which begin there, behind those that are under way; one of a
        tuple or an iterator may be a pair (ids, mask).
    mask_BT: (B, T), True at real tokens. A sample whose segment has none keeps its state.
    state: where to start; default ``model.init_state``.
    read_only: the last ``read_only`` segments read the memory and do not write it. They are independent of each other
        and run as one batch.
    keep: number of trailing segments whose hidden states are returned; default all.
    bptt: gradients stay within the last ``bptt`` segments, of which the read-only ones count as one; default no
        truncation.
    schedule: "sequential", or "diagonal" for LayerRecurrent models: cells (segment, layer) on one diagonal run
        together.
    Raises ValueError for a schedule that the model does not allow, for a mask on a tuple, and for ``read_only``,
    ``bptt``, a mask or a schedule on an iterator.
    """
    if bptt is not None and bptt < 1:
        raise FieldError("bptt", bptt, "expected at least 1 segment, or None for no truncation")
    if schedule not in ("sequential", "diagonal"):
        raise FieldError("schedule", schedule, "expected 'sequential' or 'diagonal'")
    if schedule == "diagonal" and not isinstance(model, LayerRecurrent):
        raise ValueError(
            f"{type(model).__name__} passes memory from the top layer to the bottom one, so schedule='diagonal' is impossible; use 'sequential'"
        )
    if not isinstance(ids_BT, Tensor | tuple):
        if read_only or mask_BT is not None or schedule != "sequential" or bptt is not None:
            raise ValueError(
                "an iterator of segments allows neither read_only, bptt, mask_BT nor a schedule: its length is unknown"
            )
        return _sequential(model, ids_BT, None, state, keep, None)
    ids: Any = ids_BT
    masks = None
    if isinstance(ids, Tensor):
        lengths = segment_lengths(ids.shape[1], segment_len or ids.shape[1], align)
        ids, masks = ids.split(lengths, dim=1), mask_BT.split(lengths, dim=1) if mask_BT is not None else None
    elif mask_BT is not None:
        raise ValueError("a tuple of segments allows no mask_BT; pass one tensor, or pairs of ids and mask")
    elif any(isinstance(segment, tuple) for segment in ids):
        pairs = [
            segment if isinstance(segment, tuple) else (segment, segment.new_ones(segment.shape[:2], dtype=torch.bool))
            for segment in ids
        ]
        ids, masks = zip(*pairs, strict=True)
    if not 0 <= read_only <= len(ids):
        raise FieldError("read_only", read_only, f"the input has {len(ids)} segments")
    writing, reading = len(ids) - read_only, read_only if keep is None else min(read_only, keep)
    if state is None:
        state = model.init_state(ids[0].shape[0], ids[0].device)
    elif bptt is not None and bptt <= writing + (read_only > 0):
        state = detach(state)
    keep_writing = None if keep is None else max(keep - read_only, 0)
    bptt_writing = None if bptt is None else bptt - (read_only > 0)
    run: Callable[..., Unrolled] = _diagonal if schedule == "diagonal" else _sequential
    done = run(model, ids[:writing], masks and masks[:writing], state, keep_writing, bptt_writing)
    if not reading:
        return done
    state = _grown(model, detach(done.state) if bptt == 1 and writing else done.state, ids[-1])
    read = _read(model, ids[-reading:], masks and masks[-reading:], state)
    hidden = torch.cat([done.hidden_BTD, read], dim=1) if done.hidden_BTD.shape[1] else read
    return Unrolled(hidden, done.state)


def _sequential(model, segments: Any, masks, state, keep: int | None, bptt: int | None) -> Unrolled:
    hidden: deque[Tensor] = deque(maxlen=keep)
    unread: float = 0  # segments in front whose hidden states are not kept; of an iterator any may be the last
    if keep is not None and (keep == 0 or isinstance(segments, tuple)):
        unread = len(segments) - keep if keep else math.inf
    for i, segment in enumerate(segments):
        ids, mask = segment if isinstance(segment, tuple) else (segment, masks and masks[i])
        if state is None:
            state = model.init_state(ids.shape[0], ids.device)
        if bptt is not None and 0 < i <= len(segments) - bptt:  # i = 0: a learned initial memory is trained
            state = detach(state)
        state = _grown(model, state, ids)
        if i < unread:
            new = model.advance(state, ids, mask)
        else:
            h_BTD, new = model.step(state, ids, mask)
            hidden.append(h_BTD)
        state = _live(model, new, state, mask)
    return Unrolled(_join(model, hidden, state), state)


def _grown(model, state, ids) -> State:
    """The state of all samples of a segment, of which some may begin there."""
    new = ids.shape[0] - len(next(state_tensors(state)))
    return model.join(state, model.init_state(new, ids.device)) if new > 0 else state


def _live(model, new, old, mask) -> State:
    """State ``new``, but ``old`` for samples that have ended, which must not write their padding."""
    return new if mask is None else model.choose(mask.any(1), new, old)


def _join(model, hidden: deque[Tensor], state) -> Tensor:
    if hidden:
        return torch.cat(list(hidden), dim=1) if len(hidden) > 1 else hidden[0]
    batch = next(state_tensors(state)).shape[0]
    return next(model.parameters()).new_zeros(batch, 0, 0)


def _read(model, segments, masks, state) -> Tensor:
    """Hidden states of segments that all read the same state, (B, T, D)."""
    if len({ids.shape for ids in segments}) > 1:
        outs = [
            model.step(state, ids, masks[i] if masks is not None else None, write=False)[0]
            for i, ids in enumerate(segments)
        ]
        return torch.cat(outs, dim=1)
    batch, count = segments[0].shape[0], len(segments)
    ids = torch.stack(segments, dim=1).flatten(0, 1)
    mask = torch.stack(masks, dim=1).flatten(0, 1) if masks is not None else None
    hidden = model.step(model.share(state, count), ids, mask, write=False)[0]
    return hidden.unflatten(0, (batch, count)).flatten(1, 2)


def _diagonal(model: LayerRecurrent, segments, masks, state, keep: int | None, bptt: int | None) -> Unrolled:
    """Run cell (segment s, layer l) at time s + l: S + L - 1 grouped steps in place of S * L single ones.

    The layers of one group run as one ``vmap`` over stacked weights. Segments of another length than the first (a short
    last one) are read sequentially afterwards. Source: spec 13.
    """
    if masks is not None or bptt is not None:
        raise ValueError("schedule='diagonal' allows neither mask_BT nor bptt")
    even = next((i for i, ids in enumerate(segments) if ids.shape != segments[0].shape), len(segments))
    num_layers = len(model.layers)
    layer = model.layers[0]
    single = [{**dict(layer.named_parameters()), **dict(layer.named_buffers())} for layer in model.layers]
    weights = {
        name: torch.stack([w[name] for w in single]) for name in single[0]
    }  # torch.func.stack_module_state would cut the graph

    def cell(weights, rows, layer_state):
        return torch.func.functional_call(layer, weights, (rows, layer_state, None, True))

    group = torch.func.vmap(cell, randomness="different")
    states, rows, hidden = list(state), [torch.empty(0)] * num_layers, []
    for t in range(even + num_layers - 1 if even else 0):
        first, last = max(0, t - even + 1), min(t, num_layers - 1)
        if first == 0:
            rows[0] = model.embed(segments[t])
        part = slice(first, last + 1)
        stacked = map_state(lambda *a: torch.stack(a), *states[part])
        with sdpa_kernel(SDPBackend.MATH):  # the only attention kernel that vmap can batch on every device
            out_GBTD, new = group({k: v[part] for k, v in weights.items()}, torch.stack(rows[part]), stacked)
        for i, out in enumerate(out_GBTD.unbind(0)):
            states[first + i] = map_state(lambda a, i=i: a.unbind(0)[i], new)
            if first + i + 1 < num_layers:
                rows[first + i + 1] = out
            else:
                hidden.append(model.finish(out))
    tail = _sequential(model, segments[even:], None, tuple(states), keep, None)
    kept = deque((ids.shape[1] for ids in segments[even:]), maxlen=keep)
    hidden = deque([*hidden, *tail.hidden_BTD.split(list(kept), dim=1)], maxlen=keep)
    return Unrolled(_join(model, hidden, tail.state), tail.state)


class Prompts(NamedTuple):
    """Ragged samples: their real tokens in front (B, T), 0 behind, how many there are (B,), and where each column comes
    from."""

    ids_BT: Tensor
    lengths_B: Tensor
    order_BT: Tensor

    def mask(self) -> Tensor | None:
        """True at the real tokens (B, T); None if all are."""
        return _front(self.lengths_B, self.ids_BT.shape[1])


def pack(ids_BT: Tensor, mask_BT: Tensor | None = None) -> Prompts:
    """Move the real tokens of every sample to the front, in order, so that padding on the left changes neither
    positions nor segments. ``mask_BT`` is True at real tokens (default: all). Raises ValueError for another shape and
    for a sample without any."""
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT.bool()
    if mask_BT.shape != ids_BT.shape:
        raise ValueError(f"mask of shape {tuple(mask_BT.shape)}: expected {tuple(ids_BT.shape)}, that of the ids")
    lengths_B = mask_BT.sum(1)
    if not bool(lengths_B.all()) or not ids_BT.numel():
        raise ValueError(f"ids of shape {tuple(ids_BT.shape)}: expected at least one real token in every sample")
    order_BT = (~mask_BT).byte().argsort(dim=1, stable=True)
    return Prompts(ids_BT.masked_fill(~mask_BT, 0).gather(1, order_BT), lengths_B, order_BT)


def choose(
    logits_BV: Tensor, temperature: float = 0.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Token ids (B,): the likeliest at temperature 0, else drawn from softmax(logits / temperature), cut to the
    ``top_k`` likeliest."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)) / temperature
    if top_k is not None:
        least = logits_BV.topk(min(top_k, logits_BV.shape[1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, -torch.inf)
    return logits_BV.softmax(-1).multinomial(1, generator=generator)[:, 0]


@torch.no_grad()
def generate(
    model: SegmentRecurrent,
    ids_BT: Tensor,
    max_new_tokens: int = 20,
    *,
    segment_len: int | None = None,
    mask_BT: Tensor | None = None,
    state: State | None = None,
    stop: int | Iterable[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continuations (B, max_new_tokens) of prompts: each token is chosen from the logits that a full pass over all
    before it has.

    Full segments are written to memory once; the last one is read anew for every token, without writing.

    ids_BT, mask_BT: the prompts, and True at their real tokens (default: all); padding, on either side, changes
        nothing.
    segment_len: default one segment for prompt and continuation.
    state: the memory to start from; default ``model.init_state``. Of fewer samples: the others, the last ones, begin
        here.
    stop: token ids that end a sample, which repeats the one that it met.
    temperature, top_k, generator: see ``choose``; the default is greedy, and the default generator is torch's own.
    Raises ValueError for an argument out of its range.
    """
    for name, value, least in (
        ("max_new_tokens", max_new_tokens, 1),
        ("segment_len", segment_len, 1),
        ("top_k", top_k, 1),
        ("temperature", temperature, 0),
    ):
        if value is not None and value < least:
            raise FieldError(name, value, f"expected {least} or more")
    stops = torch.tensor([stop] if isinstance(stop, int) else list(stop), dtype=ids_BT.dtype, device=ids_BT.device)
    segment_len = segment_len or ids_BT.shape[1] + max_new_tokens
    state, current_BS, filled_B = _read_prompts(model, pack(ids_BT, mask_BT), segment_len, state)
    ended_B, out = torch.zeros_like(filled_B, dtype=torch.bool), []
    for _ in range(max_new_tokens):
        if out:
            state, current_BS, filled_B = _append(model, state, current_BS, filled_B, out[-1])
        longest = int(filled_B.max())
        hidden_BTD, _ = model.step(state, current_BS[:, :longest], _front(filled_B, longest), write=False)
        last_B1D = hidden_BTD.take_along_dim((filled_B - 1)[:, None, None], dim=1)
        token_B = choose(model.logits(last_B1D)[:, 0], temperature, top_k, generator)
        out.append(torch.where(ended_B, out[-1], token_B) if out else token_B)
        ended_B = ended_B | torch.isin(out[-1], stops)
        if bool(ended_B.all()):
            break
    return torch.stack(out + out[-1:] * (max_new_tokens - len(out)), dim=1)


def _read_prompts(
    model: SegmentRecurrent, prompts: Prompts, segment_len: int, state: State | None
) -> tuple[State, Tensor, Tensor]:
    """The state after the full segments that others follow, the segment (B, S) that each sample is in, and its tokens
    so far (B,)."""
    (batch, total), device = prompts.ids_BT.shape, prompts.ids_BT.device
    written_B = (prompts.lengths_B - 1) // segment_len * segment_len
    state = model.init_state(batch, device) if state is None else _grown(model, state, prompts.ids_BT)
    if full := int(written_B.max()):
        state = unroll(
            model, prompts.ids_BT[:, :full], segment_len, mask_BT=_front(written_B, full), state=state, keep=0
        ).state
    places_BS = (written_B[:, None] + torch.arange(segment_len, device=device)).clamp(max=total - 1)
    return state, prompts.ids_BT.gather(1, places_BS), prompts.lengths_B - written_B


def _append(
    model: SegmentRecurrent, state: State, current_BS: Tensor, filled_B: Tensor, token_B: Tensor
) -> tuple[State, Tensor, Tensor]:
    """One more token for every sample; where the segment is full, it is written and the next one starts."""
    full_B = filled_B == current_BS.shape[1]
    if bool(full_B.any()):
        mask = None if bool(full_B.all()) else full_B[:, None].expand_as(current_BS)
        state = _live(model, model.advance(state, current_BS, mask), state, mask)
        filled_B = filled_B.masked_fill(full_B, 0)
    return state, current_BS.scatter(1, filled_B[:, None], token_B[:, None]), filled_B + 1


def _front(lengths_B: Tensor, total: int) -> Tensor | None:
    """A mask of the first ``lengths_B`` of ``total`` tokens; None if that is all."""
    return (
        None if bool((lengths_B == total).all()) else torch.arange(total, device=lengths_B.device) < lengths_B[:, None]
    )
