"""Sizes of the causal decoder that ``decoder.py`` builds, and what its families have in common."""

from dataclasses import dataclass
from typing import Literal

from lit_memory.util.checks import FieldError, at_least, check_layers, one_of
from lit_memory.util.fields import added

ROTATED = {"gpt2": 0.0, "gptj": 0.25, "gpt_neox": 0.25, "llama": 1.0, "gemma": 1.0}
"""Family -> the share of a head that is rotated by default."""
GATED = ("llama", "gemma")
"""Families with gated feed-forwards, RMS norms, and no biases but those of ``qkv_bias``."""
UNBIASED = ("gptj", *GATED)
"""Families whose attention has no biases but those of ``qkv_bias``."""
PARALLEL = ("gptj", "gpt_neox")
"""Families that add attention and feed-forward to the same input."""
TIED = ("gpt2", "gemma")
"""Families whose head is the token embedding by default."""


@dataclass
class BackboneConfig:
    """Sizes of the decoder. Defaults: the tiny GPT-NeoX of the ARMT paper's associative retrieval (spec 1)."""

    family: Literal["gpt2", "gptj", "gpt_neox", "llama", "gemma"] = "gpt_neox"
    vocab_size: int = 0
    """Number of token ids; 0 takes the task's."""
    inputs: int = added(0)
    """Numbers per token, in a task of numbers in place of token ids; 0 takes the task's."""
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int | None = None
    """Heads of keys and values, each shared by heads / kv_heads queries; default: as many as ``heads``."""
    head_dim: int | None = added(None)
    """Channels of a head; default: width / heads."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values; default: yes for gpt2 and gpt_neox, no for the others (Qwen2 has
    them)."""
    qk_norm: bool = added(False)
    """RMS norms of the queries and of the keys of every head, before their rotation (Qwen3, Gemma 3)."""
    query_scale: float | None = added(None)
    """Factor of the scores of attention; default: head width ** -0.5 (Gemma 2)."""
    score_cap: float = added(0.0)
    """c of the soft cap c tanh(x / c) of the scores of attention; 0: none (Gemma 2)."""
    logit_cap: float = added(0.0)
    """The same of the logits (Gemma 2)."""
    post_norms: bool = added(False)
    """RMS norms of what attention and feed-forward add as well (Gemma 2)."""
    span: int = added(0)
    """Rows that every layer can see: segments must not be longer. 0: no limit (Gemma 2: its sliding window)."""
    ff_mult: float = 4.0
    """Feed-forward width over width, rounded. The paper's "about 500k parameters" fits 2, its code has 4."""
    positions: int = 1024
    """Rows of the position table (gpt2 only): the longest segment, memory rows included."""
    wrap_pos: bool = False
    """Tokens start at position 0, and memory rows have own rows of the table, behind ``positions`` (gpt2 only)."""
    rotary_fraction: float | None = None
    """Fraction of each head that is rotated (not gpt2); default: 1/4 for gptj and gpt_neox, 1 for llama and gemma."""
    rotary_base: float = 10_000.0
    """Channel pair i of n turns by rotary_base^(-i/n) per position ("rope_theta"; not gpt2)."""
    rotary_bases: list[float] = added([])
    """``rotary_base`` of every layer, where they differ (Gemma 3)."""
    tie_embeddings: bool | None = None
    """Output head = token embedding; default: yes for gpt2 and gemma, no for the others."""
    dropout: float = 0.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    embedding_std: float | None = None

    def __post_init__(self) -> None:
        one_of(self)
        at_least(1, self, "layers", "width", "heads", "kv_heads", "head_dim", "positions")
        at_least(0, self, "inputs", "vocab_size")
        check_layers(self, "layers")
        if self.head_dim is None and self.width % self.heads:
            raise FieldError("width", self.width, f"expected a multiple of heads={self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise FieldError("kv_heads", self.kv_heads, f"expected a divisor of heads={self.heads}")
        if self.ff_width < 1:
            raise FieldError("ff_mult", self.ff_mult, "expected at least one feed-forward channel")
        if self.wrap_pos and self.family != "gpt2":
            raise FieldError("wrap_pos", self.wrap_pos, f"{self.family} has no position table; use family: gpt2")
        if not 0 <= (self.rotary_fraction or 0) <= 1:
            raise FieldError("rotary_fraction", self.rotary_fraction, "expected a number from 0 to 1")
        if self.rotary_base <= 0:
            raise FieldError("rotary_base", self.rotary_base, "expected more than 0")
        if self.rotary_dims + self.rotary_dims % 2 > self.head_width:
            raise FieldError(
                "rotary_fraction",
                self.rotary_fraction,
                f"rotated channels come in pairs, but a head has {self.head_width}; lower it",
            )
        if not 0 <= self.dropout < 1:
            raise FieldError("dropout", self.dropout, "expected a number from 0 up to, but not including, 1")
        at_least(0, self, "norm_eps", "init_std", "embedding_std", "score_cap", "logit_cap", "span")
        if self.query_scale is not None and self.query_scale <= 0:
            raise FieldError("query_scale", self.query_scale, "expected more than 0")
        if len(self.rotary_bases) not in (0, self.layers) or not all(base > 0 for base in self.rotary_bases):
            raise FieldError("rotary_bases", self.rotary_bases, f"expected none, or {self.layers} numbers above 0")
        if self.post_norms and self.family not in GATED:
            raise FieldError("post_norms", self.post_norms, f"expected a family of {' or '.join(GATED)}")

    @property
    def head_width(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def special(self) -> list[str]:
        """What its blocks have beyond those of GPT-2, GPT-NeoX, Llama and Qwen2."""
        names = ("head_dim", "qk_norm", "query_scale", "score_cap", "post_norms", "span", "rotary_bases")
        return [self.family] * (self.family in ("gptj", "gemma")) + [name for name in names if getattr(self, name)]

    @property
    def ff_width(self) -> int:
        return round(self.ff_mult * self.width)

    @property
    def rotary_dims(self) -> int:
        """Channels of a head that are rotated. An odd number is rounded up, at its own frequencies (as in Hugging
        Face)."""
        default = ROTATED[self.family]
        share = default if self.rotary_fraction is None or self.family == "gpt2" else self.rotary_fraction
        return int(self.head_width * share)

    def rows(self, segment_len: int) -> int:
        """Rows that one segment occupies, memory rows included."""
        return segment_len

    def check_segment(self, segment_len: int) -> None:
        """Raise FieldError if a segment does not fit the position table."""
        rows = segment_len if self.wrap_pos else self.rows(segment_len)
        if self.span and self.rows(segment_len) > self.span:
            raise FieldError("span", self.span, f"a segment of {segment_len} tokens takes {rows} rows; shorten it")
        if self.family == "gpt2" and rows > self.positions:
            raise FieldError(
                "positions",
                self.positions,
                f"a segment of {segment_len} tokens takes {rows} rows; raise positions or use family: gpt_neox",
            )
