"""What tasks share that hide facts in a text and ask about them: samples that are read part by part, their layout in
segments, prompts.

    context                                  tail
    [noise ... fact ... noise, T tokens]     question answer EOS      T = segments * segment_len - margin

The last segment, which the model reads without writing, holds the end of the context and the tail; the answer and EOS
are scored.

Shape suffixes: B batch, b samples that have begun, T tokens, S tokens of a segment, F facts, N tokens of an answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from lit_memory.tasks.base import Batch, Segment, Task
from lit_memory.text.corpus import check_source, load_corpus
from lit_memory.text.haystack import Haystack
from lit_memory.text.tokenizers import Tokenizer, build_tokenizer
from lit_memory.util.checks import FieldError, at_least, one_of
from lit_memory.util.provenance import cache_folder

ROUND = 8
"""Last segments of a batch that is not a test's are as wide as its longest, in whole multiples of this, so that few
shapes come up."""

Asked = tuple[np.ndarray, np.ndarray]
"""Tokens of a question, with all that comes before the answer, and of the answer, with EOS."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample whose context is not there yet: what it takes to read any part of it."""

    noise: Haystack | None
    """None where there are facts alone."""
    position: int
    """Where its noise begins in the haystack."""
    facts: list[np.ndarray]
    starts_F: np.ndarray
    """Offsets of the facts in the context."""
    segments: int
    context: int
    """Tokens of the context."""
    question: np.ndarray
    """With all that comes before the answer."""
    answer: np.ndarray
    """With EOS."""
    more: Sequence[Asked] = ()
    """What else is asked, each in a read-only segment of its own; an answer without tokens is not scored."""

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens ``start .. start + count`` of the context."""
        out, at, end = np.empty(count, np.int64), start, start + count
        ends_F = self.starts_F + [len(fact) for fact in self.facts]
        i = int(np.searchsorted(ends_F, start, side="right"))
        before = sum(len(fact) for fact in self.facts[:i])
        while at < end:
            upcoming = int(self.starts_F[i]) if i < len(self.facts) else end
            if at < upcoming and self.noise:
                stop = min(upcoming, end)
                out[at - start : stop - start] = self.noise.tokens(self.position + at - before, stop - at)
            else:
                stop = min(int(ends_F[i]), end)
                out[at - start : stop - start] = self.facts[i][at - upcoming : stop - upcoming]
                before, i = before + len(self.facts[i]), i + 1
            at = stop
        return out

    def segment(self, k: int, segment_len: int, margin: int) -> np.ndarray:
        """The part of the context that segment ``k`` has, counted back from the end: the last one leaves ``margin``
        free, and the first may be short."""
        first = self.context - (segment_len - margin) - (self.segments - 1 - k) * segment_len
        start, stop = max(first, 0), min(first + segment_len, self.context)
        return self.read(start, stop - start)


def padded(rows: Sequence[np.ndarray], segment_len: int, pad_id: int) -> Segment:
    """Rows of tokens as one full segment (b, S), with a mask of the real tokens where some are short.

    A short one is never read as it is: what a model appends to a segment, memory tokens for example, lies where it lay
    in training, and no sample depends on the others of its batch.
    """
    lengths = np.array([len(row) for row in rows])
    if (lengths == segment_len).all():
        return torch.from_numpy(np.stack(rows))
    mask_bS = np.arange(segment_len) < lengths[:, None]
    ids_bS = np.full(mask_bS.shape, pad_id, np.int64)
    ids_bS[mask_bS] = np.concatenate(rows)
    return torch.from_numpy(ids_bS), torch.from_numpy(mask_bS)


def tail(starts: Sequence[np.ndarray], asked: Sequence[Asked], segment_len: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """Read-only segments (B, S) and their targets, of what stands in front of the questions, questions and answers."""
    ids_BS = np.full((len(asked), segment_len), pad_id, np.int64)
    targets_BS = np.full_like(ids_BS, -100)
    for row, targets, start, (question, answer) in zip(ids_BS, targets_BS, starts, asked, strict=True):
        prompt = len(start) + len(question)
        row[: prompt + len(answer)] = np.concatenate([start, question, answer])
        targets[prompt : prompt + len(answer)] = answer
    return torch.from_numpy(ids_BS), torch.from_numpy(targets_BS)


@lru_cache(maxsize=16)
def load_tokenizer(task: type[Task], name: str, vocab_size: int, source: str, books: int | None) -> Tokenizer:
    """The tokenizer of a task, trained (word, bpe) on the training books of a source; a word tokenizer knows the task's
    ``words``."""
    return build_tokenizer(
        name, load_corpus(source, "train", books), cache_folder(), vocab_size, getattr(task, "words", ())
    )


@dataclass
class TextConfig:
    """The text, and the segments in which it is read."""

    segment_len: int = 512
    margin: int = 20
    """Tokens at the end of the last segment for the question, the answer, and what else stands there."""
    haystack: str = "noise"
    """Synthetic English; a folder of books; or a set of the hub, pg19 or wikitext-..., see ``text.load_corpus``."""
    books: int | None = None
    """Most books of a split; default: all of a folder, 50 of noise, 100 of pg19."""
    tokenizer: str = "word"
    """word, char, bpe, gpt2, or any folder or name on the hub."""
    vocab_size: int = 4096
    vocabulary: str = ""
    """Where the text comes from that word and bpe are trained on; default: ``haystack``. A trained model keeps its
    own."""

    def __post_init__(self) -> None:
        one_of(self)
        at_least(1, self, "segment_len", "margin", "vocab_size", "books")
        check_source("haystack", self.haystack)
        check_source("vocabulary", self.vocabulary or self.haystack)

    def check_margin(self) -> None:
        """Raise ValueError where nothing of the last segment is left for the context."""
        if self.margin >= self.segment_len:
            raise FieldError("margin", self.margin, f"expected less than segment_len={self.segment_len}")


@dataclass
class HiddenConfig(TextConfig):
    """How long the text is, in segments."""

    segments: int = 8
    """Segments of a sample; with ``vary`` the most of them."""
    vary: float = 0.0
    """Share of the training samples whose number of segments is drawn, 1..segments, one by one."""
    test_segments: list[int] = field(default_factory=list)
    """Segments of the samples that the test visits; default: ``segments``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_margin()
        if not 0 <= self.vary <= 1:
            raise FieldError("vary", self.vary, "expected a share from 0 to 1")


class Hidden(Task):
    """Say what facts tell that are hidden in a long text. ``Config`` is a ``HiddenConfig``, or a ``TextConfig`` where
    ``written`` says how long."""

    words: ClassVar[tuple[str, ...]]
    """Texts that the word tokenizer has to know."""

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def segment_len(self) -> int:
        return self.config.segment_len

    @property
    def written(self) -> int:
        return max(self.config.segments - 1, 0)

    @property
    def tokenizer(self) -> Tokenizer:
        """Of texts, questions and answers."""
        c = self.config
        return load_tokenizer(type(self), c.tokenizer, c.vocab_size, c.vocabulary or c.haystack, c.books)

    def samples(self, seed: int, split: str, step: int, size: int) -> list[Sample]:
        """Samples in the order in which they are drawn."""
        raise NotImplementedError

    def draw_segments(self, split: str, size: int, rng: Generator) -> list[int]:
        """How many segments each of ``size`` samples has."""
        c = self.config
        varied = rng.random(size) < (c.vary if split == "train" else 0)
        return np.where(varied, rng.integers(min(c.segments, 1), c.segments + 1, size), c.segments).tolist()

    @property
    def stop_id(self) -> int:
        return self.tokenizer.eos_id

    def batch(self, seed: int, split: str, step: int, size: int) -> Batch:
        return self.laid_out(self.samples(seed, split, step, size), split)

    def laid_out(self, samples: Sequence[Sample], split: str) -> Batch:
        """Samples as a batch, the longest first. Their last segments are as wide as the batch needs."""
        samples = sorted(samples, key=lambda sample: -sample.segments)
        length, margin, pad_id = self.config.segment_len, self.config.margin, self.tokenizer.pad_id
        starts = [sample.segment(sample.segments - 1, length, margin) for sample in samples]
        asked = [[(sample.question, sample.answer), *sample.more] for sample in samples]
        test = split == "test"
        if not test:  # where no sample has a token left, nobody reads; a test may say more than the answer
            longest = max(
                len(start) + len(question) + len(answer)
                for start, each in zip(starts, asked, strict=True)
                for question, answer in each
            )
            length = min(length, -(-longest // ROUND) * ROUND)
        ids, targets = zip(*(tail(starts, each, length, pad_id) for each in zip(*asked, strict=True)), strict=True)
        asked_B = torch.tensor([len(start) for start in starts])
        meta = self.meta(samples) | {
            "asked": asked_B,
            "prompt": asked_B + torch.tensor([len(sample.question) for sample in samples]),
        }
        context = self.contexts(samples) if samples[0].segments > 1 else ()
        return Batch(
            torch.cat(ids, dim=1),
            torch.cat(targets, dim=1),
            length,
            read_only=len(ids),
            meta=meta,
            context=context if test else tuple(context),
            prompt_B=meta["prompt"] if test else None,
        )

    def meta(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """What kind of sample each one is, numbers (B,)."""
        return {"segments": torch.tensor([sample.segments for sample in samples])}

    def contexts(self, samples: Sequence[Sample]) -> Iterator[Segment]:
        """The segments (b, S) before the last one; the samples, the longest first, end together."""
        c, most = self.config, samples[0].segments
        for s in range(most - 1):
            begun = [sample for sample in samples if s >= most - sample.segments]
            parts = [sample.segment(s - most + sample.segments, c.segment_len, c.margin) for sample in begun]
            yield padded(parts, c.segment_len, self.tokenizer.pad_id)

    def judge(self, target: str, said: str, ended: bool, question: str) -> dict[str, float]:
        """Metrics of one answer: what is right, what a model said before EOS, whether EOS came, and what it was
        asked."""
        return {"exact_match": float(ended and said.strip() == target)}

    def score(self, predicted_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        return self.judged([row[scored] for row, scored in zip(predicted_BT, batch.scored_BT, strict=True)], batch)

    def score_text(self, said_BN: Tensor, batch: Batch) -> dict[str, Tensor]:
        return self.judged(list(said_BN), batch)

    def judged(self, said: Sequence[Tensor], batch: Batch) -> dict[str, Tensor]:
        """``judge`` of every sample."""
        scores: dict[str, list[float]] = {name: [] for name in self.metrics}
        tokenizer = self.tokenizer
        rows = zip(
            said,
            batch.ids_BT.tolist(),
            batch.targets_BT.tolist(),
            batch.meta["asked"].tolist(),
            batch.meta["prompt"].tolist(),
            strict=True,
        )
        for answer, ids, targets, asked, prompt in rows:
            target = tokenizer.decode([t for t in targets if t not in (-100, tokenizer.eos_id)]).strip()
            spoken, ended = until(answer.tolist(), tokenizer.eos_id)
            for name, value in self.judge(
                target, tokenizer.decode(spoken), ended, tokenizer.decode(ids[asked:prompt])
            ).items():
                scores[name].append(value)
        return {name: torch.tensor(values, device=batch.ids_BT.device) for name, values in scores.items()}


def until(ids: list[int], stop: int) -> tuple[list[int], bool]:
    """What comes before ``stop``, and whether it came."""
    return (ids[: ids.index(stop)], True) if stop in ids else (ids, False)


def encoded(tokenizer: Tokenizer, texts: Sequence[str], leading_space: bool) -> list[np.ndarray]:
    """Token ids of every text by itself."""
    return tokenizer.encode_batch([f" {text}" if leading_space else text for text in texts])
