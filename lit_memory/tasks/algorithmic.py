"""Copy, reverse and associative retrieval over segments: the simplest tests of a memory.

Paper:     Bulatov et al. 2022, Recurrent Memory Transformer, arXiv 2207.06881, section 5 (spec 7.2, 7.3).
Reference: github.com/booydar/LM-RMT.

    copy         x START x x              7 3 9 7 START 7 3 9 7 7 3 9 7    scored behind START
    reverse      x START x reversed       7 3 9 7 START 7 9 3 7            scored behind START
    associative  pairs, key START value   q 4 e 0 w 7 b 2 w START 7        letters are keys, digits their values

Token ids of copy and reverse: START is 1, the symbols follow. Of associative retrieval: the digits, START (10), then
the letters (11 to 36).

Deviations
1. A sample also contains the last token of its answer, from which nothing is predicted: copy of 24 symbols has 73
   tokens, cut after 24, 48 and 72, where the reference reads 72 in three segments. What is predicted from which tokens
   in which segment is the same.
2. Samples are drawn on the fly, with a random stream for each split (reference: 100k, 10k, 20k samples). Of the 10^24
   inputs of length 24 none occurs twice. A stage of length 4 has 10^4, of which 500 steps of 32 draw 80 %: an ``until``
   that ends it is judged on inputs that were trained on.
3. The reference measures generated answers only where the answer is no shorter than a segment, and teacher-forced ones
   elsewhere; here both have a name, at any length.
4. ``length`` and ``symbols`` are free for associative retrieval, too (reference: 4 pairs).

Shape suffixes: B batch, N input symbols or pairs, T tokens, S scored or generated tokens.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lit_memory.tasks.base import generator
from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import Prompted
from lit_memory.util.checks import FieldError, at_least, one_of

LETTERS = 26


class Algorithmic(Prompted):
    """Repeat symbols that were read segments ago, or find the value of a key.

    token_accuracy: share of right tokens in the answer, which the model generates.
    forced_token_accuracy: the same with teacher forcing, the right tokens in front of every one.
    """

    metrics = ("token_accuracy", "forced_token_accuracy")

    @dataclass
    class Config:
        task: Literal["copy", "reverse", "associative"] = "copy"
        length: int = 24
        """Symbols of the input; pairs of associative retrieval."""
        symbols: int = 10
        """Number of different symbols; of digits in associative retrieval, which has 26 letters besides."""
        segment_len: int = 24
        test_length: list[int] = field(default_factory=list)
        """Values of ``length`` in the test; default: ``length``."""

        def __post_init__(self) -> None:
            one_of(self)
            at_least(1, self, "length", "segment_len")
            at_least(2, self, "symbols")
            most = min(self.symbols, LETTERS)
            if self.task == "associative" and self.length > most:
                twice = f"as no letter and none of symbols={self.symbols} comes twice; the paper has 4"
                raise FieldError("length", self.length, f"expected at most {most}, {twice}")

    @property
    def start_id(self) -> int:
        """The token between input and answer."""
        return self.config.symbols if self.config.task == "associative" else 1

    @property
    def vocab_size(self) -> int:
        return self.config.symbols + (1 + LETTERS if self.config.task == "associative" else 2)

    @property
    def prompt_len(self) -> int:
        """Tokens before the answer."""
        return 2 * self.config.length + 2 if self.config.task == "associative" else self.config.length + 1

    @property
    def new_tokens(self) -> int:
        return {"copy": 2 * self.config.length, "reverse": self.config.length, "associative": 1}[self.config.task]

    @property
    def segment_len(self) -> int:
        return self.config.segment_len

    @property
    def written(self) -> int:
        # What the last segment writes is never read.
        return -(-(self.prompt_len + self.new_tokens - 1) // self.segment_len) - 1

    @property
    def stop_id(self) -> tuple[int, ...]:
        return ()

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        input_BN, answer_BS = self.draw(size, generator(seed, split, step))
        ids_BT = torch.cat([input_BN, torch.full((size, 1), self.start_id), answer_BS], dim=1)
        targets_BT = ids_BT.clone()
        targets_BT[:, : self.prompt_len] = -100
        prompt_B = None if split == "train" else torch.full((size,), self.prompt_len)
        meta = {"length": torch.full((size,), self.config.length)}
        return Batch(ids_BT, targets_BT, self.segment_len, meta=meta, prompt_B=prompt_B)

    def draw(self, size: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens before START (B, N) and after it (B, S)."""
        c = self.config
        if c.task == "associative":
            keys_BN, values_BN = (
                torch.rand(size, many, generator=rng).topk(c.length, dim=1).indices for many in (LETTERS, c.symbols)
            )
            keys_BN += self.start_id + 1
            query_B1 = torch.randint(c.length, (size, 1), generator=rng)
            pairs = torch.stack([keys_BN, values_BN], dim=2).flatten(1)
            return torch.cat([pairs, keys_BN.gather(1, query_B1)], dim=1), values_BN.gather(1, query_B1)
        input_BN = torch.randint(c.symbols, (size, c.length), generator=rng) + self.start_id + 1
        return input_BN, input_BN.repeat(1, 2) if c.task == "copy" else input_BN.flip(1)

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        scores = self.score_text(predicted_BT[:, self.prompt_len :], batch)
        return {f"forced_{name}": value for name, value in scores.items()}

    def score_text(self, generated_BN: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"token_accuracy": (generated_BN == batch.ids_BT[:, self.prompt_len :]).float().mean(1)}
