"""Continuations of prompts: packing of ragged prompts, choice of tokens, and the loop over new tokens.

Full segments are written to memory once. Of the last one, which is open, is kept what its next token needs; see
``Incremental``.

Shape suffixes: B batch, T tokens of a prompt, S tokens of a full segment, V vocabulary, D width.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lit_memory.recurrence.protocol import SegmentRecurrent
from lit_memory.recurrence.reading import joined, prefix_mask, reader
from lit_memory.recurrence.segment import with_new_samples
from lit_memory.recurrence.state import State, at_least_single, map_state
from lit_memory.recurrence.unroll import unroll
from lit_memory.util.checks import check_least


class Prompts(NamedTuple):
    """Ragged samples, their real tokens in front.

    ids_BT: the tokens, 0 behind the real ones. lengths_B: number of real tokens. order_BT: original column of each.
    """

    ids_BT: Tensor
    lengths_B: Tensor
    order_BT: Tensor

    def mask(self) -> Tensor | None:
        """True at the real tokens (B, T); None if all are."""
        return prefix_mask(self.lengths_B, self.ids_BT.shape[1])


def pack(ids_BT: Tensor, mask_BT: Tensor | None = None) -> Prompts:
    """Move the real tokens of every sample to the front, in order.

    Padding on the left then changes neither positions nor segments. mask_BT: True at real tokens; default: all are
    real. Raises ValueError for a mask of another shape, and for a sample without a real token.
    """
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT.bool()
    if mask_BT.shape != ids_BT.shape:
        raise ValueError(f"mask of shape {tuple(mask_BT.shape)}: expected {tuple(ids_BT.shape)}, that of the ids")
    lengths_B = mask_BT.sum(1)
    if not bool(lengths_B.all()) or not ids_BT.numel():
        raise ValueError(f"ids of shape {tuple(ids_BT.shape)}: expected at least one real token in every sample")
    order_BT = (~mask_BT).byte().argsort(dim=1, stable=True)
    return Prompts(ids_BT.masked_fill(~mask_BT, 0).gather(1, order_BT), lengths_B, order_BT)


def sample_token(
    logits_BV: Tensor, temperature: float = 0.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Token ids (B,): the likeliest at temperature 0, else drawn from softmax(logits / temperature).

    top_k: draw from the ``top_k`` likeliest alone. generator: default is torch's own.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = at_least_single(logits_BV) / temperature
    if top_k is not None:
        likeliest, places = logits_BV.topk(min(top_k, logits_BV.shape[1]))  # of equal ones no more than k
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(1, places, likeliest)
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
    """Continuations (B, max_new_tokens) of prompts, each token from the logits of all before it.

    ids_BT, mask_BT: the prompts, and True at real tokens (default: all). Padding on either side changes nothing.
    segment_len: default one segment for prompt and continuation.
    state: the memory to start from; default ``model.init_state``. Samples that it does not have, the last ones, begin
        here.
    stop: token ids that end a sample, which then repeats the id that ended it.
    temperature, top_k, generator: see ``sample_token``; the default is greedy.
    Raises ValueError for an argument out of its range.
    """
    check_least(1, max_new_tokens=max_new_tokens, segment_len=segment_len, top_k=top_k)
    check_least(0, temperature=temperature)
    stops = torch.tensor([stop] if isinstance(stop, int) else list(stop), dtype=ids_BT.dtype, device=ids_BT.device)
    hidden_B1D, position = read_prompts(model, pack(ids_BT, mask_BT), segment_len, state)
    draw = partial(sample_token, temperature=temperature, top_k=top_k, generator=generator)
    return continue_from(model, hidden_B1D, position, max_new_tokens, stops, draw)


class Position(NamedTuple):
    """How far every sample has been read.

    state: the memory of the segments before the open one. opened: what is kept of that, see ``Incremental``.
    filled_B: its tokens so far. segment_len: when it is full; None: never.
    """

    state: State
    opened: State
    filled_B: Tensor
    segment_len: int | None


def continue_from(
    model: SegmentRecurrent,
    hidden_B1D: Tensor,
    position: Position,
    count: int,
    stops: Tensor,
    draw: Callable[[Tensor], Tensor],
) -> Tensor:
    """``count`` new tokens (B, count). hidden_B1D: that of the last token. stops: ids that end a sample. draw: logits
    (B, V) -> ids (B,)."""
    tokens = [draw(model.logits(hidden_B1D)[:, 0])]
    ended_B = torch.isin(tokens[0], stops)
    while len(tokens) < count and not bool(ended_B.all()):
        hidden_B1D, position = read_on(model, position, tokens[-1][:, None])
        tokens.append(torch.where(ended_B, tokens[-1], draw(model.logits(hidden_B1D)[:, 0])))
        ended_B = ended_B | torch.isin(tokens[-1], stops)
    return torch.stack(tokens + tokens[-1:] * (count - len(tokens)), dim=1)


def read_prompts(
    model: SegmentRecurrent,
    prompts: Prompts,
    segment_len: int | None,
    state: State | None = None,
    last: bool = True,
) -> tuple[Tensor, Position]:
    """Hidden states (B, 1, D) of the last tokens of prompts, or (B, T, D) of all, and the position after them.

    A segment that is full, but the last of its prompt, is not written yet.
    """
    (batch, total), device = prompts.ids_BT.shape, prompts.ids_BT.device
    written_B = (prompts.lengths_B - 1) // (segment_len or total) * (segment_len or total)
    state = model.init_state(batch, device) if state is None else with_new_samples(model, state, prompts.ids_BT)
    full, parts = int(written_B.max()), []
    if full:
        mask, keep = prefix_mask(written_B, full), 0 if last else None
        out = unroll(model, prompts.ids_BT[:, :full], segment_len, mask_BT=mask, state=state, keep=keep)
        parts, state = [] if last else [out.hidden_BTD], out.state
    filled_B = prompts.lengths_B - written_B
    columns_BT = (written_B[:, None] + torch.arange(int(filled_B.max()), device=device)).clamp(max=total - 1)
    read = reader(model)
    hidden_BTD, opened = read.extend(state, read.begin(state), prompts.ids_BT.gather(1, columns_BT), filled_B)
    position = Position(state, opened, filled_B, segment_len)
    if last:
        return hidden_BTD.take_along_dim((filled_B - 1)[:, None, None], dim=1), position
    return joined(torch.cat([*parts, hidden_BTD], dim=1), written_B, full, total), position


def read_on(model: SegmentRecurrent, position: Position, ids_BT: Tensor) -> tuple[Tensor, Position]:
    """Hidden states (B, T, D) of further tokens of every sample, and the position after them.

    Where a segment is full, it is written and the next one begins.
    """
    (state, opened, filled_B, segment_len), read, hidden, done = position, reader(model), [], 0
    while done < ids_BT.shape[1]:
        count = ids_BT.shape[1] - done
        if segment_len is not None:
            full_B = filled_B == segment_len
            if bool(full_B.any()):
                state = read.close(state, opened, full_B)
                opened, filled_B = read.begin(state, opened, full_B), filled_B.masked_fill(full_B, 0)
            count = min(count, segment_len - int(filled_B.max()))
        hidden_BTD, opened = read.extend(state, opened, ids_BT[:, done : done + count])
        hidden.append(hidden_BTD)
        filled_B, done = filled_B + count, done + count
    return torch.cat(hidden, dim=1), Position(state, opened, filled_B, segment_len)


def reorder(model: SegmentRecurrent, position: Position, idx: Tensor) -> Position:
    """The position of the samples ``idx``, which may repeat."""
    opened = map_state(lambda t: t.index_select(0, idx), position.opened)
    state = model.reorder(position.state, idx)
    return Position(state, opened, position.filled_B.index_select(0, idx), position.segment_len)
