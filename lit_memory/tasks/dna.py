"""DNA: which class a sequence of bases belongs to.

Paper:     Behrouz et al. 2025, Titans, arXiv 2501.00663, section 5.6 and table 4.
Data:      Gresova et al. 2023, GenomicsBenchmarks, BMC Genomic Data 24:25; tokens and padding as in Nguyen et al. 2023,
           HyenaDNA, arXiv 2306.15794 (spec 9).

    [padding] A C G T ... N ASK class        one character is one token; scored at the class, which has a token of its
    own

Deviations
1. Without a download there is a stand-in, ``motifs``: in a sequence of class 1 motif A is followed by motif B at a
   distance of 20 to 120 bases, on either strand; class 0 has them in the wrong order, or one with the letters of the
   other shuffled, so that both classes have the same bases. Samples are drawn on the fly and checked: what chance adds
   does not change a class.
2. The paper pre-trains on the human genome. ``next_base`` makes every base of the training sequences a target, for a
   first stage.
3. Validation has a tenth of the training sequences, by a hash of their bases; the published sets have none of their
   own.

Shape suffixes: B batch, L bases of a sample, T tokens.
"""

import csv
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import PCG64, Generator
from torch import Tensor

from lit_memory.tasks.base import Batch, Task
from lit_memory.util.checks import FieldError, at_least, nearest
from lit_memory.util.seeds import mixed_seed

BASES = "ACGTN"
PAD, ASK, FIRST_CLASS = 5, 6, 7
"""Token ids behind those of the bases, 0 to 4."""
SETS = (
    "human_enhancers_cohn",
    "human_enhancers_ensembl",
    "human_ensembl_regulatory",
    "human_nontata_promoters",
    "human_ocr_ensembl",
)
HUB = {name: f"katarinagresova/Genomic_Benchmarks_{name}" for name in SETS}
"""Source -> name on the Hugging Face hub."""
HELD_OUT = 10
"""One training sequence in so many is for validation."""

MOTIFS = np.array([[0, 2, 3, 1, 0, 3, 1, 2], [3, 1, 0, 2, 2, 0, 3, 1]])
"""A and B of the stand-in, as bases; two of each kind in both."""
WIDTH = MOTIFS.shape[1]
NEAREST, FARTHEST = 20, 120
"""Bases between A and B."""


class DNA(Task):
    """Classify a sequence of bases."""

    metrics = ("accuracy",)

    @dataclass
    class Config:
        source: str = "motifs"
        """motifs, the stand-in; a set of GenomicsBenchmarks on the hub, human_enhancers_cohn for example; or a folder,
        see ``load_sequences``."""
        length: int = 500
        """Bases of a sample; longer sequences are cut at their end, shorter ones padded in front."""
        classes: int = 2
        segment_len: int = 0
        """Tokens of a segment; the last one is read only. 0: the whole sample is one segment."""
        next_base: bool = False
        """Every base of a training sample is a target, too (pre-training)."""
        test_length: list[int] = field(default_factory=list)
        """Lengths that the test visits; default: ``length``."""

        def __post_init__(self) -> None:
            at_least(1, self, "length")
            at_least(2, self, "classes")
            at_least(0, self, "segment_len")
            if self.source not in ("motifs", *HUB) and not Path(self.source).is_dir():
                raise FieldError("source", self.source, f"no such folder; {nearest(self.source, ['motifs', *HUB])}")
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
    def written(self) -> int:
        return -(-(self.config.length + 2) // self.segment_len) - 1

    def sequences(self, split: str) -> "Sequences":
        return load_sequences(self.config.source, split, self.config.classes)

    def count(self, split: str) -> int | None:
        return None if self.config.source == "motifs" else len(self.sequences(split).classes)

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        if self.config.source != "motifs":
            return super().batch(seed, split, step, size)
        return self.lay_out(split, *draw_motifs(self.config.length, seed, split, step, size))

    def take(self, split: str, numbers: Sequence[int]) -> Batch:
        found, length = self.sequences(split), self.config.length
        bases_BL = np.full((len(numbers), length), PAD)
        for row, i in zip(bases_BL, numbers, strict=True):
            sequence = found.bases[found.starts[i] : found.starts[i + 1]][:length]
            row[length - len(sequence) :] = sequence
        return self.lay_out(split, bases_BL, found.classes[numbers])

    def lay_out(self, split: str, bases_BL: np.ndarray, class_B: np.ndarray) -> Batch:
        """Samples in segments, with padding in front of those that are shorter."""
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


# The stand-in


@lru_cache(maxsize=1)
def background() -> np.ndarray:
    """Cumulative probabilities (64, 4) of a base after three others, the newest of which counts most in the index.

    Every row is random, and G after C is rare, as in a genome.
    """
    table = Generator(PCG64(mixed_seed(0, "dna/background", 0))).dirichlet([4.0] * 4, size=64)
    table[16 * BASES.index("C") : 16 * (BASES.index("C") + 1), BASES.index("G")] *= 0.25
    return (table / table.sum(1, keepdims=True)).cumsum(1)


def draw_background(rng: Generator, size: int, length: int) -> np.ndarray:
    """Bases (B, L) of an order-3 Markov chain."""
    cumulative, last_B, draws_LB1 = background(), rng.integers(64, size=size), rng.random((length, size, 1))
    out_LB = np.empty((length, size), np.int64)
    for i, draw_B1 in enumerate(draws_LB1):
        out_LB[i] = (draw_B1 > cumulative[last_B, :3]).sum(1)
        last_B = out_LB[i] * 16 + last_B // 4
    return out_LB.T


def reverse_complement(bases: np.ndarray) -> np.ndarray:
    """The other strand, read in its own direction; without N."""
    return 3 - bases[..., ::-1]


def plant(rng: Generator, bases_L: np.ndarray, label: int) -> None:
    """Write what makes a sequence one of class ``label``, in place."""
    pair = list(MOTIFS)
    if not label:
        pair = pair[::-1]
        if rng.random() < 0.5:  # one motif is missing, in either place
            hidden = rng.integers(2)
            pair[hidden] = rng.permutation(pair[hidden])
    for i, motif in enumerate(pair):
        if rng.random() < 0.5:
            pair[i] = motif.copy()
            pair[i][rng.integers(WIDTH)] = rng.integers(4)
    gap = rng.integers(NEAREST, min(FARTHEST, len(bases_L) - 2 * WIDTH) + 1)
    start = rng.integers(len(bases_L) - 2 * WIDTH - gap + 1)
    if rng.random() < 0.5:
        pair = [reverse_complement(motif) for motif in pair[::-1]]
    for motif, at in zip(pair, (start, start + WIDTH + gap), strict=True):
        bases_L[at : at + WIDTH] = motif


def has_pair(bases_BL: np.ndarray) -> np.ndarray:
    """Which sequences, (B,), have A before B at the right distance on either strand, each with at most one other
    base."""
    found_B = np.zeros(len(bases_BL), bool)
    for strand_BL in (bases_BL, reverse_complement(bases_BL)):
        windows = np.lib.stride_tricks.sliding_window_view(strand_BL, WIDTH, axis=1)
        a, b = ((windows == motif).sum(-1) >= WIDTH - 1 for motif in MOTIFS)
        count = np.pad(b.cumsum(1), ((0, 0), (1, 0)))  # of B before every place
        first = np.minimum(np.arange(a.shape[1]) + WIDTH + NEAREST, a.shape[1])
        last = np.minimum(first + FARTHEST - NEAREST + 1, a.shape[1])
        found_B |= (a & (count[:, last] > count[:, first])).any(1)
    return found_B


def draw_motifs(length: int, seed: int, split: str, step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Bases (B, L) and classes (B,) of the stand-in."""
    rng = Generator(PCG64(mixed_seed(seed, f"dna/{split}", step)))
    class_B, bases_BL = rng.integers(2, size=size), np.empty((size, length), np.int64)
    wrong = np.arange(size)
    while len(wrong):
        bases_BL[wrong] = draw_background(rng, len(wrong), length)
        for i in wrong:
            plant(rng, bases_BL[i], class_B[i])
        wrong = wrong[has_pair(bases_BL[wrong]) != class_B[wrong]]
    return bases_BL, class_B


# Published sets and folders


class Sequences(NamedTuple):
    """All sequences of one split, joined: sequence i is ``bases[starts[i] : starts[i + 1]]``."""

    bases: np.ndarray
    starts: np.ndarray
    classes: np.ndarray
    names: list[str]
    """Of the classes."""


@lru_cache(maxsize=8)
def load_sequences(source: str, split: str, classes: int) -> Sequences:
    """The sequences of one split of a set on the hub or of a folder, which has, for train, test and maybe valid,

    train.csv             with the columns seq and label, or
    train/<class>/*       .txt files with one sequence a line, or .fa and .fasta files, or
    train/<class>.txt     (or .fa, or .fasta) the same, with one file for each class.

    Classes are numbered in the order of their names in the training part. Raises ValueError for a character that is no
    base, for a table without these columns and for classes that do not fit; FileNotFoundError for what is not there.
    """
    part = split if split != "valid" or _has(source, "valid") else "train"
    found = list(_fetch(source, part) if source in HUB else _read(Path(source), part))
    names = sorted({label for _, label in found}) if part == "train" else load_sequences(source, "train", classes).names
    if len(names) != classes:
        raise ValueError(
            f"{source}: has {len(names)} classes ({', '.join(names)}), but classes={classes}; set it to {len(names)}"
        )
    if strange := {label for _, label in found}.difference(names):
        raise ValueError(
            f"{source}: the {part} part has the class {min(strange)!r}; expected those of the train part, {', '.join(names)}"
        )
    if part == "train" and not _has(source, "valid"):
        found = [
            (bases, label)
            for bases, label in found
            if (zlib.crc32(bases.tobytes()) % HELD_OUT == 0) == (split == "valid")
        ]
    if not found:
        raise ValueError(f"{source}: no sequences for split {split!r}; expected more than a few")
    ends = np.cumsum([0, *(len(bases) for bases, _ in found)])
    return Sequences(
        np.concatenate([bases for bases, _ in found]), ends, np.array([names.index(label) for _, label in found]), names
    )


Record = tuple[np.ndarray, str]
"""Bases of a sequence, and its class."""
CODES = np.full(256, 255, np.uint8)
CODES[list(BASES.encode() + BASES.lower().encode())] = [*range(len(BASES))] * 2


def encode(text: bytes, where: str) -> np.ndarray:
    """Bases of one line, of either case. Raises ValueError with its place for any other character."""
    bases = CODES[np.frombuffer(text, np.uint8)]
    if len(wrong := np.flatnonzero(bases == 255)):
        raise ValueError(f"{where}: {chr(text[wrong[0]])!r} at column {wrong[0] + 1}; expected A, C, G, T or N")
    return bases


def _has(source: str, part: str) -> bool:
    return source not in HUB and bool([*Path(source).glob(f"{part}.csv"), *Path(source).glob(f"{part}/*")])


def _read(folder: Path, part: str) -> Iterator[Record]:
    if (table := folder / f"{part}.csv").is_file():
        yield from _read_table(table)
        return
    paths = sorted(path for path in (folder / part).rglob("*") if path.suffix in (".txt", ".fa", ".fasta"))
    if not paths:
        raise FileNotFoundError(
            f"{folder}: no sequences in {part}; expected {part}.csv, or .txt or .fa files in {part}/<class>"
        )
    for path in paths:
        label = path.stem if path.parent == folder / part else path.parent.name
        yield from ((bases, label) for bases in _read_lines(path))


def _read_lines(path: Path) -> Iterator[np.ndarray]:
    """The sequences of a file: one a line, or, after headers with ``>``, over several lines."""
    lines = path.read_bytes().splitlines()
    fasta, parts = any(line.startswith(b">") for line in lines), []
    for number, line in enumerate(lines, start=1):
        header = line.startswith(b">")
        if line.strip() and not header:
            parts.append(encode(line.strip(), f"{path}:{number}"))
        if parts and (header or not fasta):
            yield np.concatenate(parts)
            parts = []
    if parts:
        yield np.concatenate(parts)


def _read_table(path: Path) -> Iterator[Record]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.DictReader(file)
        if not {"seq", "label"} <= set(rows.fieldnames or ()):
            raise ValueError(
                f"{path}:1: has the columns {', '.join(rows.fieldnames or ())}; expected seq and label among them"
            )
        for row in rows:
            if not row["seq"] or not row["label"]:
                raise ValueError(f"{path}:{rows.line_num}: expected a sequence and a label")
            yield encode(row["seq"].encode(), f"{path}:{rows.line_num}"), row["label"]


def _fetch(source: str, part: str) -> Iterator[Record]:
    """A set of GenomicsBenchmarks from the hub."""
    from datasets import load_dataset

    try:
        rows: Any = load_dataset(HUB[source], split=part)
    except Exception as error:  # no network, no such name, no permission: the library has a class for each
        kind = type(error).__name__
        raise FileNotFoundError(
            f"{source}: {HUB[source]} is not in reach on the Hugging Face hub ({kind}); check the network, or name a folder"
        ) from error
    for number, row in enumerate(rows):
        if not {"seq", "label"} <= row.keys():
            raise ValueError(f"{HUB[source]}: has the columns {', '.join(row)}; expected seq and label among them")
        yield encode(row["seq"].encode(), f"{HUB[source]}, {part}, row {number}"), str(row["label"])
