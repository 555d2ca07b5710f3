"""Keys and values of an open segment, for architectures around ``decoder.Decoder``.

Rows of a segment have columns in the cache, in order: memory in front of the tokens, the tokens, and, while the segment
is written, the memory behind them. The samples of a batch may be at different columns. What lies behind a sample's rows
is arbitrary: whoever comes to such a column writes it before anyone looks.

Shape suffixes: B batch, T new rows, C columns, P columns in front, D width, H heads of queries, G heads of keys and
values, K head width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_memory.models.attention import rotary_table, turn
from lit_memory.models.decoder import Decoder
from lit_memory.recurrence import Incremental, State, batch_size, select_samples

GROWTH = 256
"""Columns that a full cache grows by."""


class KeyValues(NamedTuple):
    """Keys, rotated to their columns, and values of one layer."""

    k_BGCK: Tensor
    v_BGCK: Tensor


class OpenRows(NamedTuple):
    """The cache of every layer, the rows of every sample, and which of the first columns are real (the others are)."""

    layers: tuple[KeyValues, ...]
    rows_B: Tensor
    real_BP: Tensor


class Piece:
    """The next rows of open segments on their way through the layers.

    lengths_B: rows of every sample that are real, which come first; default: all. The caches of ``opened`` are written
    to.
    """

    def __init__(self, opened: OpenRows, count: int, lengths_B: Tensor | None = None) -> None:
        self.opened, self.layers = opened, []
        rows_B = opened.rows_B
        self.rows_B = rows_B + (count if lengths_B is None else lengths_B)
        first, most, self.rows = torch.stack([*rows_B.aminmax(), self.rows_B.max()]).tolist()
        self.end = most + count
        self.columns_BT = rows_B[:, None] + torch.arange(count, device=rows_B.device)
        self.even = slice(first, self.end) if first == most else None
        """The columns, if they are those of all samples."""
        self.mask, self.causal = self.visible(first, count), count > 1

    def visible(self, first: int, count: int) -> Tensor | None:
        """(B or 1, 1, T, C): True at the columns that a row sees; None if they are all up to its own."""
        known = self.opened.real_BP.shape[1]
        if self.even is not None and not known and (first == 0 or count == 1):
            return None
        seen = torch.arange(self.end, device=self.columns_BT.device) <= self.columns_BT[:, None, :, None]
        return seen & F.pad(self.opened.real_BP, (0, self.end - known), value=True)[:, None, None] if known else seen

    def through(self, block: Any, rows_BTD: Tensor) -> Tensor:
        """Rows after the ``Block`` of the next layer."""
        attention = block.attention
        q, k, v = attention.heads(attention.qkv(block.norm1(rows_BTD)))
        if attention.rotary:
            tables = rotary_table(self.capacity, attention.rotary, attention.base, q.device, q.dtype)
            place = self.columns_BT if self.even is None else self.even
            cos, sin = (table[place] if self.even else table[place].unsqueeze(1) for table in tables)
            q, k = turn(q, cos, sin), turn(k, cos, sin)
        k, v = (part[:, :, : self.end] for part in self.put(k, v))
        return block.join(rows_BTD, attention.mix(q, k, v, self.mask, self.causal))

    @property
    def capacity(self) -> int:
        """Columns of the caches."""
        old = self.opened.layers[0].k_BGCK.shape[2]
        return old if self.end <= old else -(-self.end // GROWTH) * GROWTH

    def put(self, k_BGTK: Tensor, v_BGTK: Tensor) -> KeyValues:
        """The next layer's cache with new rows."""
        old = self.opened.layers[len(self.layers)]
        self.layers.append(KeyValues(self.stored(old.k_BGCK, k_BGTK), self.stored(old.v_BGCK, v_BGTK)))
        return self.layers[-1]

    def stored(self, cache_BGCK: Tensor, rows_BGTK: Tensor) -> Tensor:
        missing = self.capacity - cache_BGCK.shape[2]
        if missing:
            cache_BGCK = F.pad(cache_BGCK.to(rows_BGTK.dtype), (0, 0, 0, missing))
        rows_BGTK = rows_BGTK.to(cache_BGCK.dtype)  # under autocast those of a state have more digits than new ones
        if self.even is not None:
            cache_BGCK[:, :, self.even] = rows_BGTK
            return cache_BGCK
        return cache_BGCK.scatter_(2, self.columns_BT[:, None, :, None].expand_as(rows_BGTK), rows_BGTK)

    def add_positions(self, decoder: Decoder, rows_BTD: Tensor, front: int = 0, wrapped: int | None = None) -> Tensor:
        """``Decoder.add_positions`` of these rows.

        front: columns in front of the first token. wrapped: the first of the table's own rows for memory, if the rows
        are memory. Both matter with ``wrap_pos``.
        """
        if decoder.positions is None:
            return decoder.dropout(rows_BTD)
        table, size, wrap = decoder.positions.weight, decoder.config.positions, decoder.config.wrap_pos
        if wrap and wrapped is not None:
            return decoder.dropout(rows_BTD + table[size + wrapped :][: rows_BTD.shape[1]])
        count = self.rows - (front if wrap else 0)
        if count > size:
            raise ValueError(f"{count} rows in one segment, but the position table has {size}: use shorter segments")
        places_BT = (self.columns_BT - (front if wrap else 0)).clamp(max=size - 1)
        return decoder.dropout(rows_BTD + table[places_BT])

    def done(self) -> OpenRows:
        """The open segments with these rows."""
        return OpenRows(tuple(self.layers), self.rows_B, self.opened.real_BP)


class KeyValueCache(Incremental):
    """A model around a ``Decoder`` that keeps the keys and values of its open segment.

    Of ``read_memory``, ``read_tokens`` and ``write_memory`` an architecture defines what it has: rows in front of the
    tokens, the tokens, and rows behind them.
    """

    front: int = 0
    """Columns in front of the tokens."""

    def read_memory(self, state: State, opened: OpenRows, live_B: Tensor) -> OpenRows:
        """The open segments of samples that are live, of no row yet, after the columns in front of the tokens."""
        return opened

    def read_tokens(self, state: State, piece: Piece, rows_BTD: Tensor) -> Tensor:
        """Rows of tokens after all layers."""
        raise NotImplementedError

    def write_memory(self, state: State, opened: OpenRows) -> State:
        """The state after open segments."""
        raise NotImplementedError

    def begin(self, state, opened=None, live_B=None):
        if opened is None or live_B is None:
            weight, c, batch = self.decoder.norm.weight, self.config, batch_size(state)
            empty = weight.new_zeros(batch, c.kv_heads or c.heads, 0, c.head_width)
            rows_B = torch.zeros(batch, dtype=torch.long, device=weight.device)
            layers = tuple(KeyValues(empty, empty) for _ in self.decoder.layers)
            opened, live_B = OpenRows(layers, rows_B, rows_B.new_zeros(batch, 0, dtype=torch.bool)), rows_B == 0
        return self.read_memory(state, opened._replace(rows_B=opened.rows_B.masked_fill(live_B, 0)), live_B)

    def extend(self, state, opened, ids_BT, lengths_B=None):
        piece = Piece(opened, ids_BT.shape[1], lengths_B)
        rows_BTD = piece.add_positions(self.decoder, self.decoder.tokens(ids_BT), self.front)
        return self.decoder.norm(self.read_tokens(state, piece, rows_BTD)), piece.done()

    def close(self, state, opened, live_B):
        return select_samples(self, live_B, self.write_memory(state, opened), state)
