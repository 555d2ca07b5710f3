"""Continuations of prompts: packing of ragged prompts, choice of tokens, and the loop over new tokens.

Full segments are written to memory once. The last one, which is not full, is read anew for every token and not written.

Shape suffixes: B batch, T tokens of a prompt, S tokens of a full segment, V vocabulary.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lit_memory.recurrence.protocol import SegmentRecurrent
from lit_memory.recurrence.schedules import advance, with_new_samples
from lit_memory.recurrence.state import State
from lit_memory.recurrence.unroll import unroll
from lit_memory.util.checks import FieldError


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
    """Continuations (B, max_new_tokens) of prompts, each token from the logits of a full pass over all before it.

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
    position = read_prompts(model, pack(ids_BT, mask_BT), segment_len or ids_BT.shape[1] + max_new_tokens, state)
    draw = partial(sample_token, temperature=temperature, top_k=top_k, generator=generator)
    return continue_from(model, position, max_new_tokens, stops, draw)


def check_least(least: int, **arguments: float | None) -> None:
    """Raise FieldError for an argument below ``least``. None passes."""
    for name, value in arguments.items():
        if value is not None and value < least:
            raise FieldError(name, value, f"expected {least} or more")


class Position(NamedTuple):
    """How far every sample has been read.

    state: the memory of the segments before the present one. segment_BS: the present segment. filled_B: its tokens so
    far.
    """

    state: State
    segment_BS: Tensor
    filled_B: Tensor


def continue_from(
    model: SegmentRecurrent, position: Position, count: int, stops: Tensor, draw: Callable[[Tensor], Tensor]
) -> Tensor:
    """``count`` new tokens (B, count). ``stops``: ids that end a sample. ``draw``: logits (B, V) -> ids (B,)."""
    tokens = [draw(next_logits(model, position))]
    ended_B = torch.isin(tokens[0], stops)
    while len(tokens) < count and not bool(ended_B.all()):
        position = append_token(model, position, tokens[-1])
        tokens.append(torch.where(ended_B, tokens[-1], draw(next_logits(model, position))))
        ended_B = ended_B | torch.isin(tokens[-1], stops)
    return torch.stack(tokens + tokens[-1:] * (count - len(tokens)), dim=1)


def read_prompts(model: SegmentRecurrent, prompts: Prompts, segment_len: int, state: State | None) -> Position:
    """The position after prompts. A segment that is full, but the last of its prompt, is not written yet."""
    (batch, total), device = prompts.ids_BT.shape, prompts.ids_BT.device
    written_B = (prompts.lengths_B - 1) // segment_len * segment_len
    state = model.init_state(batch, device) if state is None else with_new_samples(model, state, prompts.ids_BT)
    if full := int(written_B.max()):
        mask = prefix_mask(written_B, full)
        state = unroll(model, prompts.ids_BT[:, :full], segment_len, mask_BT=mask, state=state, keep=0).state
    columns_BS = (written_B[:, None] + torch.arange(segment_len, device=device)).clamp(max=total - 1)
    return Position(state, prompts.ids_BT.gather(1, columns_BS), prompts.lengths_B - written_B)


def next_logits(model: SegmentRecurrent, position: Position) -> Tensor:
    """Logits (B, V) of the token after the last one of every sample."""
    state, segment_BS, filled_B = position
    longest = int(filled_B.max())
    mask = prefix_mask(filled_B, longest)
    hidden_BTD, _ = model.step(state, segment_BS[:, :longest], mask, write=False)
    last_B1D = hidden_BTD.take_along_dim((filled_B - 1)[:, None, None], dim=1)
    return model.logits(last_B1D)[:, 0]


def append_token(model: SegmentRecurrent, position: Position, token_B: Tensor) -> Position:
    """One more token for every sample. Where the segment is full, it is written and the next one starts."""
    state, segment_BS, filled_B = position
    full_B = filled_B == segment_BS.shape[1]
    if bool(full_B.any()):
        mask = None if bool(full_B.all()) else full_B[:, None].expand_as(segment_BS)
        state = advance(model, state, segment_BS, mask)
        filled_B = filled_B.masked_fill(full_B, 0)
    return Position(state, segment_BS.scatter(1, filled_B[:, None], token_B[:, None]), filled_B + 1)


def prefix_mask(lengths_B: Tensor, total: int) -> Tensor | None:
    """True at the first ``lengths_B`` of ``total`` tokens, (B, T); None if that is all of them."""
    if bool((lengths_B == total).all()):
        return None
    return torch.arange(total, device=lengths_B.device) < lengths_B[:, None]
