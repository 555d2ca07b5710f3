"""DNA: which class a sequence of bases belongs to.

Paper:     Behrouz et al. 2025, Titans, arXiv 2501.00663, section 5.6 and table 4.
Data:      Gresova et al. 2023, GenomicsBenchmarks, BMC Genomic Data 24:25; tokens and padding as in Nguyen et al. 2023,
           HyenaDNA, arXiv 2306.15794 (spec 9).

    [padding] A C G T ... N ASK class        one character is one token; every class has a token, which is scored

Deviations
1. Without a download there is a synthetic stand-in, ``motifs``: in a sequence of class 1 motif A is followed by motif B
   at a distance of 20 to 120 bases, on either strand; class 0 has them in the wrong order, or one of them with its
   letters shuffled, so that both classes have the same bases. Samples are drawn on the fly and checked: no class
   changes by chance.
2. The paper pre-trains on the human genome. ``next_base`` makes every base of the training sequences a target, for a
   first stage.
3. A tenth of the training sequences, by a hash of their bases, is held out for validation; the published sets have no
   validation part.

Shape suffixes: B batch, L bases of a sample, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lit_memory.tasks.batch import Batch
from lit_memory.tasks.dna_motifs import NEAREST, WIDTH, draw_motifs
from lit_memory.tasks.dna_sets import HUB, Sequences, load_sequences
from lit_memory.tasks.mixins import FiniteSplits
from lit_memory.text.corpus import SPLITS
from lit_memory.util.checks import FieldError, at_least, nearest
from lit_memory.util.inputs import missing

PAD, ASK, FIRST_CLASS = 5, 6, 7
"""Token ids after those of the bases, 0 to 4."""


class DNA(FiniteSplits):
    """Classify a sequence of bases."""

    metrics = ("accuracy",)
    sources: ClassVar = {"source": ("motifs", *HUB)}

    @dataclass
    class Config:
        source: str = "motifs"
        """motifs, the stand-in; a set of GenomicsBenchmarks on the hub, human_enhancers_cohn for example; or a folder,
        see ``load_sequences``."""
        length: int = 500
        """Bases per sample; longer sequences are cut at their end, shorter ones padded in front."""
        classes: int = 2
        segment_len: int = 0
        """Tokens per segment; the last segment is read only. 0: the whole sample is one segment."""
        next_base: bool = False
        """Score every base of a training sample as well (pre-training)."""
        test_length: list[int] = field(default_factory=list)
        """Values of ``length`` in the test; default: ``length``."""

        def __post_init__(self) -> None:
            at_least(1, self, "length")
            at_least(2, self, "classes")
            at_least(0, self, "segment_len")
            if self.segment_len == 1:
                raise FieldError("segment_len", 1, "expected 0, or at least 2: ASK and the class share a segment")
            if self.source not in ("motifs", *HUB) and (why := missing(self.source)):
                raise FieldError("source", self.source, f"{why}; {nearest(self.source, ['motifs', *HUB])}")
            if self.source == "motifs" and (self.classes != 2 or self.length < 2 * WIDTH + NEAREST):
                name, least = ("classes", "2") if self.classes != 2 else ("length", f"at least {2 * WIDTH + NEAREST}")
                raise FieldError(name, getattr(self, name), f"expected {least} with source='motifs'")

    @property
    def vocab_size(self) -> int:
        return FIRST_CLASS + self.config.classes

    @property
    def segment_len(self) -> int:
        return self.config.segment_len or self.config.length + 2

    @property
    def material(self) -> str:
        return "" if self.config.source == "motifs" else "data"

    @property
    def written(self) -> int:
        return -(-(self.config.length + 2) // self.segment_len) - 1

    def sequences(self, split: str) -> Sequences:
        """Sequences of a split of a set or folder."""
        return load_sequences(self.config.source, split, self.config.classes)

    def check_files(self) -> None:
        for split in SPLITS if self.config.source not in ("motifs", *HUB) else ():
            self.sequences(split)

    def count(self, split: str) -> int | None:
        return None if self.config.source == "motifs" else len(self.sequences(split).classes)

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        if self.config.source != "motifs":
            return super().batch(seed, split, step, size)
        return self.lay_out(split, *draw_motifs(self.config.length, seed, split, step, size))

    def take(self, split: str, numbers: Sequence[int]) -> Batch:
        sequences, length = self.sequences(split), self.config.length
        bases_BL = np.full((len(numbers), length), PAD)
        for row, i in zip(bases_BL, numbers, strict=True):
            sequence = sequences.bases[sequences.starts[i] : sequences.starts[i + 1]][:length]
            row[length - len(sequence) :] = sequence
        return self.lay_out(split, bases_BL, sequences.classes[numbers])

    def lay_out(self, split: str, bases_BL: np.ndarray, class_B: np.ndarray) -> Batch:
        """Batch of samples, padded in front to whole segments."""
        c, size = self.config, len(class_B)
        ids_BT = torch.full((size, (self.written + 1) * self.segment_len), PAD)
        ids_BT[:, -c.length - 2 : -2] = torch.from_numpy(bases_BL)
        ids_BT[:, -2] = ASK
        ids_BT[:, -1] = FIRST_CLASS + torch.from_numpy(class_B)
        every = c.next_base and split == "train"
        scored_BT = (ids_BT != PAD) & (ids_BT != ASK) if every else torch.zeros_like(ids_BT, dtype=torch.bool)
        scored_BT[:, 0], scored_BT[:, -1] = False, True
        meta = {"length": torch.full((size,), c.length), "class": torch.from_numpy(class_B)}
        return Batch(ids_BT, ids_BT.where(scored_BT, -100), self.segment_len, read_only=0 if every else 1, meta=meta)

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"accuracy": (predicted_BT[:, -1] == batch.targets_BT[:, -1]).float()}
