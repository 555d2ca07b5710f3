"""Sizes and flags that Titans' four models share.

Paper:     Behrouz et al. 2025, Titans: learning to memorize at test time, arXiv 2501.00663, sections 3 and 4. What it
           leaves open follows spec 10 and is a flag.
"""

from dataclasses import dataclass
from typing import Literal

from lit_memory.models.token_recurrent import TokenRecurrentConfig
from lit_memory.util.checks import FieldError, at_least, check_layers, one_of
from lit_memory.util.fields import added


@dataclass
class TitansConfig(TokenRecurrentConfig):
    """Sizes that the four models share. The paper gives none of the memory; those here are ours."""

    norm_eps: float = 1e-6
    persistent: int = 4
    """N_p, learned tokens in front of the input of a layer (section 3.3)."""
    chunk: int = 16
    """Tokens that take their surprise at the same weights of the memory; 1 is the rule token by token."""
    exact: bool | None = added(None, before=False)
    """Every token takes its surprise at the weights right before it, as with chunk 1, and ``chunk`` is speed alone.
    Only with memory_depth 1; default: with it, without per_chunk_gates."""
    memory_depth: int = 2
    """L_M, layers of the memory; 1 is a matrix."""
    memory_expand: int = 1
    """Width of the memory's inner layers over that of its keys."""
    memory_heads: int = 1
    """Memories side by side, each for its share of the channels."""
    memory_activation: Literal["silu", "gelu"] = "silu"
    memory_residual: bool = False
    """M(k) = k + network(k)."""
    memory_std: float | None = None
    """Standard deviation of the memory's learned initial weights; default: Xavier's."""
    momentum: bool = True
    """Without: eta = 0, and no S in the state (the ablation)."""
    forget: bool = True
    """Without: alpha = 0 (the ablation)."""
    conv_taps: int = 4
    """Taps of the depthwise convolutions after the projections; 0: none (the ablation)."""
    per_chunk_gates: bool = False
    """alpha, eta and theta are constant within a chunk (section 3.2)."""
    half_loss: bool = True
    """Inner loss 1/2 |M(k) - v|^2; without, |M(k) - v|^2 as in eq. 12, whose steps are twice as long."""
    theta_max: float | None = None
    """Longest step of the memory; default: by ``overshoot``."""
    overshoot: float = added(4.0, before=1.0)
    """How many of its errors a chunk whose tokens have one key may correct at most: theta_max is by default overshoot
    over the tokens that share a surprise, at most 1. Up to 1 no chunk corrects more than its error, and with long
    chunks a token hardly writes."""
    damped: bool = True
    """theta = theta_max sigmoid(.) (1 - eta), which with an overshoot of 1 keeps chunk*theta below 1-eta, the limit of
    stability of a memory of one layer; without, theta_max sigmoid(.)."""
    alpha_init: float = 1e-4
    """alpha of a row of zeros at init. As small as contexts are long: alpha takes the memory to 0, not back to the
    learned M_0, which a model trained on short contexts relies on. With 0.02 a needle is lost right beyond the training
    length."""
    eta_init: float = 0.5
    """eta of a row of zeros at init."""
    theta_init: float = 0.5
    """The sigmoid in theta, of a row of zeros at init."""
    normalized: bool = True
    """Divide theta by the factor that a step is longer in a memory of several layers than in a matrix, so that both are
    equally stable."""
    output_gate: Literal["silu", "sigmoid"] = "silu"
    """Gate on the memory's normalised output, before its last projection (section 4.4)."""
    ff_mult: float = 8 / 3
    """Width of the gated feed-forward over the model's, the product rounded; 0: no feed-forward."""
    tie_embeddings: bool = False
    embedding_std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self)
        at_least(1, self, "chunk", "memory_depth", "memory_expand", "memory_heads")
        check_layers(self, "memory_depth")
        at_least(0, self, "persistent", "conv_taps", "memory_std", "theta_max", "overshoot", "ff_mult", "embedding_std")
        for name in ("alpha_init", "eta_init", "theta_init"):
            if not 0 < getattr(self, name) < 1:
                raise FieldError(
                    name, getattr(self, name), "expected a number between 0 and 1, which a sigmoid reaches"
                )
        if self.exact is None:
            self.exact = self.memory_depth == 1 and not self.per_chunk_gates
        if self.exact and (self.memory_depth > 1 or self.per_chunk_gates):
            raise FieldError("exact", self.exact, "expected memory_depth 1 and no per_chunk_gates with it, or false")
        if self.width % self.memory_heads:
            raise FieldError("width", self.width, f"expected a multiple of memory_heads={self.memory_heads}")

    @property
    def shared(self) -> int:
        """Tokens that take their surprise at the same weights."""
        return 1 if self.exact else self.chunk

    @property
    def theta_limit(self) -> float:
        """The longest step of the memory."""
        return min(1.0, self.overshoot / self.shared) if self.theta_max is None else self.theta_max

    @property
    def ff_width(self) -> int:
        return round(self.ff_mult * self.width)


@dataclass
class AttentionConfig(TitansConfig):
    """Sizes that the three models with attention share."""

    heads: int = 4
    """Heads of attention."""
    window: int = 64
    """MAG and MAL: tokens that a token sees, itself included. MAC: tokens of a segment of attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "heads", "window")
        if self.width % (2 * self.heads):
            raise FieldError(
                "heads", self.heads, f"expected heads of an even width, for rotary positions, but width={self.width}"
            )
