"""Associative retrieval, Remember and Rewrite.

Paper:     Rodkin et al. 2024, arXiv 2407.04841, section 3 and appendices B.2, D.
Reference: github.com/RodkinIvan/associative-recurrent-memory-transformer at aa145de,
    ``run_finetuning_associative_retrieval.py``.

    segment 1..n : key digits, SEP, value digits, EOS        one pair each
    query        : key digits, GEN, value digits, EOS        scored at the value digits and EOS

    Remember, key_size 2, three pairs: 5 2 SEP 9 EOS | 0 7 SEP 3 EOS | 12 1 SEP 9 EOS | 0 7 GEN 3 EOS
    Rewrite,  key_size 1, three pairs: 4 SEP 1 EOS | 7 SEP 5 EOS | 4 SEP 2 EOS | 4 GEN 2 EOS

Deviations
1. Samples are drawn on the fly (the reference draws a million once and caches them under a name that omits the seed).
2. Validation and test samples always have ``pairs`` pairs; the reference varies their number when the training does.
3. Several ``queries`` per context may read the same memory. Default 1, as in the paper.
4. ``vary`` may be a share of the batches (1.0 is the reference's ``vary_n_segments``).
5. A sample of one split may occur in another: with one digit a key, all those of one pair do, half of those of two, and
   of fifty none. A stage of few pairs that ends by ``until`` is judged on such samples.
6. Pairs, and queries with them, may stand ``together`` in one segment. Default no, as in the paper.

Shape suffixes: B batch, N pairs, Q queries, K key digits.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lit_memory.tasks.base import generator
from lit_memory.tasks.batch import Batch, exact_match
from lit_memory.tasks.mixins import FreeSegments
from lit_memory.util.checks import FieldError, at_least, one_of
from lit_memory.util.fields import added

BASE = 16
"""Symbols 0..15 are the digits of keys and values."""


class AssociativeRetrieval(FreeSegments):
    """Read n key-value pairs, one per segment, then answer with the value of a key."""

    derived = ("capacity",)

    @dataclass
    class Config:
        mode: Literal["remember", "rewrite"] = "rewrite"
        """remember: keys are unique. rewrite: keys repeat, and the last value counts."""
        pairs: int = 50
        key_size: int = 1
        """Digits of a key; there are 16^key_size keys."""
        value_size: int = 1
        vary: float = 0.0
        """Share of training batches that keep only the last k pairs, with a random k from 1 to ``pairs``."""
        queries: int = 1
        """Independent queries that read the same memory. Ours; the paper has 1."""
        together: Literal["nothing", "pairs", "all"] = added("nothing")
        """What stands in one segment. pairs: all of them, and queries read them from the memory. all: queries as well,
        so that attention finds the values; ``exact_match`` is then the share of samples with all of them. For the first
        stages of a training, as looking up is what takes longest to learn; ours."""
        legacy_ids: bool = False
        """Use the reference's ids (SEP 100, GEN 101, EOS 102) instead of 16, 17, 18."""
        test_pairs: list[int] = field(default_factory=list)
        """Values of ``pairs`` in the test; default: ``pairs``."""

        def __post_init__(self) -> None:
            one_of(self)
            at_least(1, self, "pairs", "key_size", "value_size", "queries")
            if self.key_size > 5:
                raise FieldError("key_size", self.key_size, "expected at most 5: all 16^key_size keys are drawn from")
            if self.value_size > 15:
                raise FieldError(
                    "value_size", self.value_size, "expected at most 15, as 16^value_size has to be a 64-bit number"
                )
            if not 0 <= self.vary <= 1:
                raise FieldError("vary", self.vary, "expected a share from 0 to 1")
            if self.mode == "remember" and self.pairs > BASE**self.key_size:
                raise FieldError(
                    "pairs", self.pairs, f"only 16^key_size = {BASE**self.key_size} unique keys exist; raise key_size"
                )

    @property
    def special_ids(self) -> tuple[int, int, int]:
        """Ids of SEP, GEN and EOS."""
        return (100, 101, 102) if self.config.legacy_ids else (16, 17, 18)

    @property
    def vocab_size(self) -> int:
        return 128 if self.config.legacy_ids else 19

    @property
    def pair_len(self) -> int:
        """Tokens of a pair, and of a query."""
        return self.config.key_size + self.config.value_size + 2

    @property
    def segment_len(self) -> int | None:
        return None if self.config.together == "all" else self.pair_len

    @property
    def any_segments(self) -> bool:  # pairs that stand together are cut already
        return self.config.together == "nothing"

    @property
    def written(self) -> int:
        return self.config.pairs

    @property
    def tokens(self) -> int:
        return (self.config.pairs + self.config.queries) * self.pair_len

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        c, rng = self.config, generator(seed, split, step)
        keys_BN = self._keys(size, rng)
        values_BN = torch.randint(BASE**c.value_size, keys_BN.shape, generator=rng)
        if split == "train" and torch.rand((), generator=rng) < c.vary:
            kept = int(torch.randint(1, c.pairs + 1, (), generator=rng))
            keys_BN, values_BN = keys_BN[:, -kept:], values_BN[:, -kept:]
        query_BQ = self._queries(keys_BN, rng)
        sep, gen, _ = self.special_ids
        pairs = self._segments(keys_BN, values_BN, sep)
        queries = self._segments(keys_BN.gather(1, query_BQ), values_BN.gather(1, query_BQ), gen)
        ids_BT = torch.cat([pairs, queries], dim=1).flatten(1)
        targets = torch.full_like(ids_BT, -100).view(size, -1, self.pair_len)
        answer = slice(c.key_size + 1, None)
        targets[:, -c.queries :, answer] = queries[:, :, answer]
        meta = {"pairs": torch.full((size,), keys_BN.shape[1])}
        if c.together == "all":
            return Batch(ids_BT, targets.flatten(1), meta=meta)
        batch = Batch(ids_BT, targets.flatten(1), self.pair_len, read_only=c.queries, meta=meta)
        return batch.recut([0] if c.together == "pairs" else [])

    def _keys(self, size: int, rng: torch.Generator) -> Tensor:
        """Draw keys as integers (B, N)."""
        c = self.config
        if c.mode == "rewrite":
            return torch.randint(BASE**c.key_size, (size, c.pairs), generator=rng)
        return torch.rand(size, BASE**c.key_size, generator=rng).topk(c.pairs, dim=1).indices

    def _queries(self, keys_BN: Tensor, rng: torch.Generator) -> Tensor:
        """Draw the indices (B, Q) of the queried pairs: uniform over distinct keys, the last occurrence of each."""
        last_BN = torch.ones_like(keys_BN, dtype=torch.bool)
        if self.config.mode == "rewrite":
            later = keys_BN.shape[1] - 1 - torch.arange(keys_BN.shape[1])
            newest = torch.full((len(keys_BN), BASE**self.config.key_size), len(later))
            newest.scatter_reduce_(1, keys_BN, later.expand_as(keys_BN), "amin")
            last_BN = newest.gather(1, keys_BN) == later
        return torch.multinomial(last_BN.double(), self.config.queries, replacement=True, generator=rng)

    def _segments(self, keys_BN: Tensor, values_BN: Tensor, mark: int) -> Tensor:
        """Token ids (B, N, pair_len) of pairs, or of queries if ``mark`` is GEN instead of SEP."""
        eos = self.special_ids[2]
        parts = [digits(keys_BN, self.config.key_size), mark, digits(values_BN, self.config.value_size), eos]
        full = [p if isinstance(p, Tensor) else torch.full((*keys_BN.shape, 1), p) for p in parts]
        return torch.cat(full, dim=-1)

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"exact_match": exact_match(predicted_BT, batch)}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {"capacity": capacity(means["exact_match"], self.config.pairs, BASE**self.config.value_size)}


def digits(numbers: Tensor, count: int) -> Tensor:
    """Digits of numbers in base 16, least significant first: (...) -> (..., count)."""
    return numbers.unsqueeze(-1) // BASE ** torch.arange(count) % BASE


def capacity(exact_match: float, pairs: int, values: int) -> float:
    """Estimated number of pairs that a model remembers if it guesses the values of all others.

    k = n (v a - 1) / (v - 1) with n ``pairs``, v ``values`` and accuracy a ``exact_match``. Source: section 3.
    """
    return pairs * (values * exact_match - 1) / (values - 1)
