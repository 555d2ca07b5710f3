"""Quadratic equations, solved step by step.

Paper:     Bulatov et al. 2022, Recurrent Memory Transformer, arXiv 2207.06881, section 5; Vigneswaran 2023, TARM, table
    1 (spec 7.1).
Reference: github.com/booydar/LM-RMT.

    step                cell                       cell of an equation without roots
    1 equation          -6*x^2+24*x+360=0          2*x^2+2*x+10=0
    2 canonical form    x^2-4*x-60=0               x^2+x+5=0
    3 discriminant      D=4^2-4*1*-60=256=16^2     D=1^2-4*1*5=-19
    4 smaller root      x=(4-16)/2=-6
    5 larger root       x=(4+16)/2=10
    6 answer            -6,10

One character is one token. Every step is padded to a cell of 30 tokens, so a sample has 180; all but the first cell are
scored.

Deviations
1. Samples are drawn on the fly, and a hash of the equation assigns the split: 10 equations in 13 to training, 1 to
   validation, 2 to the test. The reference draws more than it needs once, drops duplicates, and splits the rest in that
   proportion (100k, 10k, 20k). So likely equations, those with small numbers, are more frequent here.
2. An equation without roots has c > b^2/4. The reference's bound also admits D = 0 (5 in 100,000), without its root.
3. ``max_root`` below 100 gives easier equations, for a curriculum. Ours.
4. Token accuracy is the mean over samples of the share of right tokens, and both accuracies are also measured with
   teacher forcing (``forced_``).

Shape suffixes: B batch, N equations or generated tokens, T tokens, S scored tokens.
"""

import math
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lit_memory.tasks.base import generator
from lit_memory.tasks.batch import Batch
from lit_memory.tasks.mixins import Prompted
from lit_memory.util.checks import FieldError, at_least

CHARACTERS = "0123456789+-*/^=()xD;,"
"""Their token ids begin at 2; 1 is unused."""
PAD = 0
CELL, STEPS = 30, 6
"""Tokens of a step, and number of steps."""
SCORED = CELL * (STEPS - 1)
IDS = np.zeros(128, np.int64)
IDS[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS)) + 2


class Quadratic(Prompted):
    """Solve a quadratic equation in six steps, each written into a cell of its own.

    answer_accuracy: share of samples whose last cell has only right tokens.
    token_accuracy: share of right tokens in steps 2 to 6, without padding.
    forced_answer_accuracy, forced_token_accuracy: the same with teacher forcing; otherwise the model generates all five
        cells.
    """

    metrics = ("answer_accuracy", "token_accuracy", "forced_answer_accuracy", "forced_token_accuracy")
    new_tokens = SCORED

    @dataclass
    class Config:
        segment_len: int = CELL
        """Tokens per segment: 30 for a step, 180 for the whole sample."""
        max_root: int = 100
        """Roots lie strictly between this number and its negative. Default: the paper's, whose longest equations just
        fit into the cells."""
        test_max_root: list[int] = field(default_factory=list)
        """Values of ``max_root`` in the test; default: ``max_root``."""

        def __post_init__(self) -> None:
            at_least(1, self, "segment_len")
            at_least(2, self, "max_root")
            if self.segment_len > CELL * STEPS:
                raise FieldError(
                    "segment_len", self.segment_len, f"expected at most {CELL * STEPS}, the tokens of a sample"
                )
            if self.max_root > 100:
                raise FieldError("max_root", self.max_root, f"expected at most 100, as a step has {CELL} characters")

    @property
    def vocab_size(self) -> int:
        return len(CHARACTERS) + 2

    @property
    def segment_len(self) -> int:
        return self.config.segment_len

    @property
    def written(self) -> int:
        return -(-CELL * STEPS // self.segment_len) - 1  # what the last segment writes is never read

    @property
    def stop_id(self) -> tuple[int, ...]:
        return ()

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        rng, samples = generator(seed, split, step), []
        while len(samples) < size:
            samples += [numbers for numbers in self.draw(size, rng).tolist() if split_of(equation(*numbers)) == split]
        ids_BT = encode([cell for numbers in samples[:size] for cell in solution(*numbers)]).view(size, -1)
        targets_BT = ids_BT.clone()
        targets_BT[:, :CELL] = -100
        prompt_B = None if split == "train" else torch.full((size,), CELL)
        meta = {"max_root": torch.full((size,), self.config.max_root)}
        return Batch(ids_BT, targets_BT, self.segment_len, meta=meta, prompt_B=prompt_B)

    def draw(self, count: int, rng: torch.Generator) -> Tensor:
        """Draw equations k * (x^2 + b*x + c) = 0 as (k, b, c), shape (N, 3). Four in five have roots."""
        bound, draws = self.config.max_root, torch.rand(7, count, dtype=torch.float64, generator=rng)
        first_N, second_N = ((2 * draws[:2] - 1) * bound).trunc().long()  # toward zero
        linear_N = (draws[2] * 2 * bound).long()
        least_N = linear_N**2 // 4 + 1
        constant_N = least_N + (draws[3] * (bound**2 - least_N)).long()
        factor_N = (1 + 9 * draws[4]).round().long() * torch.where(draws[5] < 0.5, -1, 1)
        rooted_N = draws[6] < 0.8
        b_N = torch.where(rooted_N, -(first_N + second_N), linear_N)
        c_N = torch.where(rooted_N, first_N * second_N, constant_N)
        return torch.stack([factor_N, b_N, c_N], dim=1)

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {f"forced_{name}": value for name, value in self.score_text(predicted_BT[:, CELL:], batch).items()}

    def score_text(self, generated_BN: Tensor, batch: Batch) -> dict[str, Tensor]:
        solution_BS = batch.ids_BT[:, CELL:]
        right_BS, real_BS = generated_BN == solution_BS, solution_BS != PAD
        return {
            "answer_accuracy": right_BS[:, -CELL:].all(1).float(),
            "token_accuracy": (right_BS & real_BS).sum(1) / real_BS.sum(1),
        }


def split_of(text: str) -> str:
    """Split of an equation, by a hash of its text."""
    bucket = zlib.crc32(text.encode()) % 13
    return "train" if bucket < 10 else "valid" if bucket < 11 else "test"


def encode(cells: list[str]) -> Tensor:
    """Token ids (len(cells), CELL) of texts with at most CELL characters."""
    text = "".join(cell.ljust(CELL, "\0") for cell in cells)
    return torch.from_numpy(IDS[np.frombuffer(text.encode(), np.uint8)]).view(-1, CELL)


def equation(k: int, b: int, c: int) -> str:
    """Text of an equation: ``-6*x^2+24*x+360=0`` for -6, -4, -60. Zero terms and factors of one are left out."""
    text = ""
    for factor, power in ((k, "x^2"), (k * b, "x"), (k * c, "")):
        if not factor:
            continue
        text += "-" if factor < 0 else "+" if text else ""
        if not power:
            text += str(abs(factor))
        else:
            text += power if abs(factor) == 1 else f"{abs(factor)}*{power}"
    return f"{text}=0"


def solution(k: int, b: int, c: int) -> list[str]:
    """The six cells of a solution; without roots the last three are empty."""
    square = b * b - 4 * c
    cells = [equation(k, b, c), equation(1, b, c), f"D={abs(b)}^2-4*1*{c}={square}"]
    if square < 0:
        return [*cells, "", "", ""]
    root = math.isqrt(square)
    low, high = (-b - root) // 2, (-b + root) // 2
    cells[-1] += f"={root}^2"
    return [*cells, f"x=({-b}-{root})/2={low}", f"x=({-b}+{root})/2={high}", f"{low},{high}" if root else f"{low}"]
