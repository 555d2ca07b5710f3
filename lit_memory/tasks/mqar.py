"""Multi-query associative recall (MQAR): many keys are asked after many pairs, in one sequence.

Paper:     Arora, Eyuboglu et al. 2023, Zoology: measuring and improving recall in efficient language models, arXiv
           2312.04927, section 3 and appendix on synthetic data.
Reference: github.com/HazyResearch/zoology at 0c59e619, ``zoology/data/associative_recall.py``, and
    ``experiments/iclr24_zoology_figure2`` (its settings).

    pairs 2, length 16      2 8 4 7   0 0 4 0 0 0 0 0 0 0 2 0
                            k v k v       q 7             q 8     scored behind queries, where filler stands

Keys, values and the filler (token 0) are different tokens. Every pair is written once, side by side at the beginning,
and asked once. The rest is slots of two tokens, a query and filler, or filler alone. The slots of the queries are drawn
without replacement, slot g with a weight of g^(exponent - 1): most queries come soon, as words of a text are repeated.

    published (figure 2)    length 64, 128, 256, 512 with 4, 8, 16, 64 pairs; vocabulary 8,192; 100,000 training samples

Deviations
1. Samples are drawn on the fly, with a random stream for each split (reference: 100,000 samples, 64 times each).
2. ``segment_len`` cuts the sequence for models with a memory of segments. Ours.

Shape suffixes: B batch, N pairs, T tokens, S slots.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lit_memory.tasks.base import Task, generator
from lit_memory.tasks.batch import Batch
from lit_memory.util.checks import FieldError, at_least, one_of


class MQAR(Task):
    """Read all pairs, then answer with the value of every key.

    accuracy: share of a sample's queries whose value is right.
    """

    metrics = ("accuracy",)
    tells_answers = False

    @dataclass
    class Config:
        vocabulary: int = 8192
        """Token ids: 0 is filler, the others below one half are keys, those above are values."""
        length: int = 512
        """Tokens of a sample."""
        pairs: int = 64
        exponent: float = 0.01
        """Slot g has a weight of g^(exponent - 1); 1: all slots are equally likely."""
        filler: Literal["zero", "random"] = "zero"
        """What slots without a query hold: token 0, or random tokens, keys and values among them."""
        segment_len: int = 0
        """Tokens per segment; 0: the sample is one segment."""
        test_pairs: list[int] = field(default_factory=list)
        """Values of ``pairs`` in the test; default: ``pairs``."""

        def __post_init__(self) -> None:
            one_of(self)
            at_least(1, self, "pairs", "length")
            at_least(0, self, "segment_len", "exponent")
            if self.exponent > 10:
                raise FieldError("exponent", self.exponent, "expected at most 10")
            if self.length % 2:
                raise FieldError("length", self.length, "expected an even number, as slots have two tokens")
            if self.vocabulary % 2 or self.vocabulary < 4:
                raise FieldError("vocabulary", self.vocabulary, "expected an even number of at least 4")
            if 4 * self.pairs > self.length:
                most = f"expected at most {self.length // 4} in length={self.length}: two tokens and a slot for each"
                raise FieldError("pairs", self.pairs, most)
            if self.pairs >= self.vocabulary // 2:
                keys = f"expected at most {self.vocabulary // 2 - 1}, the keys of vocabulary={self.vocabulary}"
                raise FieldError("pairs", self.pairs, keys)

    @property
    def vocab_size(self) -> int:
        return self.config.vocabulary

    @property
    def segment_len(self) -> int | None:
        return self.config.segment_len or None

    @property
    def written(self) -> int:
        return -(-self.config.length // (self.config.segment_len or self.config.length)) - 1

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        c, rng = self.config, generator(seed, split, step)
        half, slots = c.vocabulary // 2, c.length // 2 - c.pairs
        keys_BN, values_BN = 1 + distinct(size, half - 1, c.pairs, rng), half + distinct(size, half, c.pairs, rng)
        weight_S = torch.arange(1, slots + 1, dtype=torch.float64) ** (c.exponent - 1)
        asked_BN = torch.multinomial(weight_S.expand(size, -1), c.pairs, generator=rng)  # in the order of the pairs
        rest = torch.zeros(size, slots, 2, dtype=torch.long)
        if c.filler == "random":
            rest = torch.randint(c.vocabulary, rest.shape, generator=rng)
        rest[:, :, 0].scatter_(1, asked_BN, keys_BN)  # no answer stands behind: it would rule out those of other keys
        pairs = torch.stack([keys_BN, values_BN], dim=2)
        ids_BT = torch.cat([pairs, rest], dim=1).flatten(1)
        targets_BT = torch.full_like(ids_BT, -100)
        targets_BT.scatter_(1, 2 * (c.pairs + asked_BN) + 1, values_BN)
        return Batch(ids_BT, targets_BT, self.segment_len, meta={"pairs": torch.full((size,), c.pairs)})

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        right_BT = (predicted_BT == batch.targets_BT) & batch.scored_BT
        return {"accuracy": right_BT.sum(1) / batch.scored_BT.sum(1)}


def distinct(rows: int, of: int, count: int, rng: torch.Generator) -> Tensor:
    """``count`` different numbers below ``of`` for each row, in random order."""
    return torch.rand(rows, of, generator=rng).topk(count, dim=1).indices
