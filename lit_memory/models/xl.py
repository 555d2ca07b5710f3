"""Transformer-XL: each layer attends to its own inputs of the segments before, at relative positions.

Paper:     Dai et al. 2019, Transformer-XL, arXiv 1901.02860, section 3; as the backbone of RMT and TARM (spec 1).
Reference: github.com/kimiyoung/transformer-xl at 44781ed, ``pytorch/mem_transformer.py``.

With H the inputs of a layer in this segment and C those of the W tokens before it, the layer computes (section 3.3)

(1) q = H W_q,  [k; v] = [C; H] W_kv,  r_n = R_n W_r, where R_n is the sinusoid of distance n
(2) A_ij = (q_i . k_j + q_i . r_(i-j) + u . k_j + v . r_(i-j)) / sqrt(K) = ((q_i + u) . k_j + (q_i + v) . r_(i-j)) /
    sqrt(K)
(3) a = LayerNorm(H + softmax(A) v W_o), and the output LayerNorm(a + W_2 relu(W_1 a)); one u and one v serve all layers

The cache holds inputs, so that W_kv applies to it and learns from it. Where a short segment sees far more rows than it
has, W_k multiplies its queries and W_v its sums over rows: the same products in another order, in which no cached row
is projected (``score``, ``blend``).

The plain window of cached keys with rotary positions is ``transformer`` with its ``window``.

Deviations
1. The cache has W rows from the start, and a mask of those that are real; the reference's grows to W. The values are
   the same. Padding takes no place in it.
2. The softmax is over the whole vocabulary unless there are ``cutoffs``. Then it is torch's adaptive softmax, whose
   clusters have the full width, as in the reference for 267,735 words, but own weights (reference: those of the
   embeddings).
3. Norms start at 1 (reference: N(1, 0.02)), and each layer has its own dropout of the sinusoids (reference: one for all
   layers).
4. ``mem_detach=False`` lets gradients enter the cache. Ours.

Shape suffixes: B batch, T rows, W cached rows, S = W + T keys (in front: segments), D width, H heads, K head width, N
tokens of any sample, V vocabulary, E = H K, R rows of a segment.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_memory.models import xl_segments
from lit_memory.models.attention import attention_mask
from lit_memory.models.decoder import embedding
from lit_memory.models.parts import Dropout, newest
from lit_memory.models.plain import is_plain
from lit_memory.models.relative import blend, by_distance, probabilities, score, sinusoids, weight_first
from lit_memory.recurrence import LayerMajor, LossHead, SeparateWrite, full_precision, state_options
from lit_memory.recurrence.calls import no_graph
from lit_memory.util.checks import FieldError, at_least, check_layers
from lit_memory.util.fields import added

ALL = slice(None)


class XLState(NamedTuple):
    """Inputs of one layer at the last W tokens, and which of them are real (at first: none)."""

    rows_BWD: Tensor
    mask_BW: Tensor


class XLBlock(nn.Module):
    """The layer on rows ``[cached; own]`` at consecutive positions.

    Masks are the caller's, so that rows may be memory as well as tokens.
    """

    def __init__(self, config: "XL.Config", u_HK: nn.Parameter, v_HK: nn.Parameter) -> None:
        super().__init__()
        width, inner = config.width, config.heads * config.head_width
        self.heads, self.clamp = config.heads, config.clamp_len
        self.u_HK, self.v_HK = u_HK, v_HK
        self.query, self.key_value = nn.Linear(width, inner, bias=False), nn.Linear(width, 2 * inner, bias=False)
        self.distance, self.out = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.norm1, self.norm2 = (nn.LayerNorm(width, config.norm_eps) for _ in range(2))
        self.dropout = Dropout(config.dropout)
        up, down = nn.Linear(width, config.ff_width), nn.Linear(config.ff_width, width)
        self.feed_forward = nn.Sequential(up, nn.ReLU(), Dropout(config.dropout), down, Dropout(config.dropout))

    def queries(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (B, H, T, K) of content and of position."""
        q_BTHK = self.query(x_BTD).unflatten(-1, (self.heads, -1))
        biased = ((q_BTHK + bias_HK) / q_BTHK.shape[-1] ** 0.5 for bias_HK in (self.u_HK, self.v_HK))
        content_BHTK, position_BHTK = (q.transpose(1, 2) for q in biased)
        return content_BHTK, position_BHTK

    def keys_values(self, rows_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, K)."""
        key_BHSK, value_BHSK = self.key_value(rows_BSD).unflatten(-1, (2, self.heads, -1)).transpose(1, 3).unbind(2)
        return key_BHSK, value_BHSK

    def distances(self, count: int, like: Tensor) -> Tensor:
        """r_n (H, count, K) of the distances count-1, ..., 0."""
        table_SD = sinusoids(count, like.shape[-1], self.clamp, like.device, like.dtype)
        return self.distance(self.dropout(table_SD)).unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def leave(self, x_BTD: Tensor, y_BTE: Tensor) -> Tensor:
        """Output (B, T, D), from what a row has attended to in all heads."""
        a_BTD = self.norm1(x_BTD + self.dropout(self.out(y_BTE)))  # (3)
        return self.norm2(a_BTD + self.feed_forward(a_BTD))

    def forward(self, x_BTD: Tensor, all_BSD: Tensor, mask: Tensor) -> Tensor:
        """Output (B, T, D) of the rows ``x_BTD``, which are the last of ``all_BSD``.

        mask: (B or 1, 1, T, S), True where a row may attend: not ahead, where distances are arbitrary.
        """
        content_BHTK, position_BHTK = self.queries(x_BTD)
        r_HSK = self.distances(all_BSD.shape[1], x_BTD)
        distant_BHTS = by_distance(torch.einsum("bhtk,hsk->bhts", position_BHTK, r_HSK))
        sizes = x_BTD.shape[1], all_BSD.shape[1], self.u_HK.shape[1], x_BTD.shape[2]
        if is_plain(self.key_value) and weight_first(*sizes):
            key_HKD, value_HKD = self.key_value.weight.unflatten(0, (2, self.heads, -1)).unbind(0)  # (1)
            p_BHTS = probabilities(score(content_BHTK, key_HKD, all_BSD) + distant_BHTS, mask)
            y_BHTK = blend(p_BHTS, value_HKD, all_BSD)
        else:
            key_BHSK, value_BHSK = self.keys_values(all_BSD)
            y_BHTK = probabilities(content_BHTK @ key_BHSK.mT + distant_BHTS, mask) @ value_BHSK
        return self.leave(x_BTD, y_BHTK.transpose(1, 2).flatten(2))


class XLLayer(nn.Module):
    """A block that reads and updates the cache of its own inputs. Only the rows ``tokens`` enter the cache."""

    def __init__(self, config: "XL.Config", u_HK: nn.Parameter, v_HK: nn.Parameter) -> None:
        super().__init__()
        self.detach = config.mem_detach
        self.block = XLBlock(config, u_HK, v_HK)

    def forward(
        self,
        rows_BTD: Tensor,
        state: XLState,
        mask_BT: Tensor | None = None,
        write: bool = True,
        tokens: slice = ALL,
        last: int | None = None,
    ) -> tuple[Tensor, XLState]:
        """Outputs of the ``last`` rows (default: all), and the cache."""
        now_BT = rows_BTD.new_ones(rows_BTD.shape[:2], dtype=torch.bool) if mask_BT is None else mask_BT
        mask_BS = torch.cat([state.mask_BW, now_BT], dim=1)
        all_BSD = torch.cat([state.rows_BWD.to(rows_BTD.dtype), rows_BTD], dim=1)
        last_BTD = rows_BTD if last is None else rows_BTD[:, rows_BTD.shape[1] - last :]
        out_BTD = self.block(last_BTD, all_BSD, attention_mask(mask_BS, last_BTD.shape[1]))
        kept_BT = None if mask_BT is None else mask_BT[:, tokens]
        return out_BTD, self.cached(rows_BTD[:, tokens], state, kept_BT) if write else state

    def cached(self, rows_BTD: Tensor, state: XLState, mask_BT: Tensor | None = None) -> XLState:
        """The cache with these rows as the newest."""
        count, old = rows_BTD.shape[1], state.rows_BWD
        rows_BSD = torch.cat([old, (rows_BTD.detach() if self.detach else rows_BTD).to(old.dtype)], dim=1)
        if mask_BT is None:
            kept_BWD = rows_BSD[:, count:].clone()  # a view would keep the whole segment alive
            return XLState(kept_BWD, nn.functional.pad(state.mask_BW, (0, count), value=True)[:, count:])
        mask_BS = torch.cat([state.mask_BW, mask_BT], dim=1)
        columns_BW = newest(mask_BS, old.shape[1])  # padding takes no place
        return XLState(rows_BSD.take_along_dim(columns_BW.unsqueeze(-1), dim=1), mask_BS.take_along_dim(columns_BW, 1))


class AdaptiveHead(LossHead, nn.AdaptiveLogSoftmaxWithLoss):
    """Adaptive softmax: clusters of rare tokens, which have the highest ids, behind one logit each. In the precision of
    its weights, as torch's own mixes types under autocast.

    The loss needs the logits of the frequent tokens and, for a rare one, those of its cluster. Called with hidden
    states (..., D), the head returns the log-probabilities (..., V) of all tokens. Source: Grave et al. 2017, arXiv
    1609.04309.
    """

    def __init__(self, width: int, vocab_size: int, cutoffs: list[int]) -> None:
        if cutoffs[-1] >= vocab_size:
            raise FieldError("cutoffs", cutoffs, f"expected ids below vocab_size={vocab_size}")
        super().__init__(width, vocab_size, cutoffs, div_value=1.0)
        self.logits_per_token = self.head_size

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        with full_precision(hidden.device):
            return self.log_prob(hidden.flatten(0, -2).to(self.head.weight.dtype)).unflatten(0, hidden.shape[:-1])

    def losses(self, hidden_ND, targets_N):
        with full_precision(hidden_ND.device):
            return -super().forward(hidden_ND.to(self.head.weight.dtype), targets_N).output


class XLDecoder(nn.Module):
    """Scaled embeddings, layers and head, as parts that an architecture wires."""

    def __init__(self, config: "XL.Config") -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise FieldError("vocab_size", config.vocab_size, "expected at least 1 (0 is filled in from the task)")
        self.tokens, self.scale = embedding(config), config.width**0.5
        self.dropout = Dropout(config.dropout)
        u_HK, v_HK = (nn.Parameter(torch.empty(config.heads, config.head_width)) for _ in range(2))
        self.layers = nn.ModuleList(XLLayer(config, u_HK, v_HK) for _ in range(config.layers))
        cutoffs, sizes = config.cutoffs, (config.width, config.vocab_size)
        self.head = AdaptiveHead(*sizes, cutoffs) if cutoffs else nn.Linear(*sizes)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif ".norm" not in name:
                nn.init.normal_(parameter, std=config.init_std)
        if config.tie_embeddings and not config.inputs:
            self.head.weight = self.tokens.weight

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Rows that enter the first layer, (B, T, D)."""
        return self.dropout(self.tokens(ids_BT) * self.scale)


def empty_cache(config: "XL.Config", batch: int, **options: Any) -> tuple[XLState, ...]:
    """The cache of every layer before the first token. ``options``: device and dtype of its rows."""
    rows_BWD = torch.zeros(batch, config.mem_len, config.width, **options)
    mask_BW = torch.zeros(batch, config.mem_len, dtype=torch.bool, device=options["device"])
    return tuple(XLState(rows_BWD, mask_BW) for _ in range(config.layers))


class XL(SeparateWrite, LayerMajor):
    """Transformer with relative positions and a cache of the hidden states before the segment."""

    numbers = 1
    looks_at_numbers = True  # which rows of the cache are real

    @dataclass
    class Config:
        """Sizes. The defaults are the model of the quadratic equations (spec 1)."""

        vocab_size: int = 0
        """Number of token ids; 0 takes the task's."""
        inputs: int = added(0)
        """Numbers per token, in a task of numbers in place of token ids; 0 takes the task's."""
        layers: int = 6
        width: int = 128
        heads: int = 6
        head_width: int = 64
        ff_width: int = 256
        mem_len: int = 30
        """Cached tokens; 0: no cache."""
        mem_detach: bool = True
        clamp_len: int = 0
        """Largest distance; longer ones count as this one. 0: no limit."""
        tie_embeddings: bool = True
        cutoffs: list[int] = added([])
        """First id of every cluster of rare tokens, for an adaptive softmax ([20000, 40000, 200000] for the paper's
        words); default: a full softmax."""
        dropout: float = 0.1
        norm_eps: float = 1e-5
        init_std: float = 0.02

        def __post_init__(self) -> None:
            at_least(1, self, "layers", "width", "heads", "head_width", "ff_width")
            check_layers(self, "layers")
            at_least(0, self, "inputs", "cutoffs", "mem_len", "clamp_len", "norm_eps", "init_std")
            if self.cutoffs != sorted({*self.cutoffs} - {0}):
                raise FieldError("cutoffs", self.cutoffs, "expected ids that rise")
            if self.cutoffs and self.tie_embeddings:
                expected = "an adaptive softmax has weights of its own; expected tie_embeddings: false"
                raise FieldError("cutoffs", self.cutoffs, expected)
            if self.width % 2:
                raise FieldError("width", self.width, "expected an even number, for pairs of sine and cosine")
            if not 0 <= self.dropout < 1:
                raise FieldError("dropout", self.dropout, "expected a number from 0 up to, but not including, 1")

        def rows(self, segment_len: int) -> int:
            """Rows that one segment occupies."""
            return segment_len

        def check_segment(self, segment_len: int) -> None:
            """Any segment fits: there is no position table."""

    def __init__(self, config: "XL.Config") -> None:
        super().__init__()
        self.config = config
        self.decoder = XLDecoder(config)

    def init_state(self, batch, device=None, dtype=None):
        return empty_cache(self.config, batch, **state_options(self, device, dtype))

    def refuses_groups(self, longest=0):
        return super().refuses_groups(longest) if self.config.mem_len else "it has no cache"

    def read_layer(self, layer, rows_SBRD, state, mask_SBT, cuts, keep):
        return xl_segments.read_layer(layer, rows_SBRD, state, mask_SBT, cuts, keep)

    def advance(self, state, ids_BT, mask_BT=None):
        if self.training and self.config.dropout:  # fewer rows would draw other numbers
            return self.step(state, ids_BT, mask_BT)[1]
        if not self.config.mem_len:
            return state
        layers: Any = self.layers
        states = []
        with no_graph(self.config.mem_detach):
            rows_BTD = self.embed(ids_BT)
            for i, (layer, old) in enumerate(zip(layers, state, strict=True)):
                states.append(layer.cached(rows_BTD, old, mask_BT))
                if i + 1 < len(layers):  # the cache of the last layer has its inputs
                    rows_BTD = layer(rows_BTD, old, mask_BT, write=False)[0]
        return tuple(states)

    def embed(self, ids_BT, write=True):
        return self.decoder.embed(ids_BT)

    def finish(self, rows_BTD, write=True):
        return self.decoder.dropout(rows_BTD)
