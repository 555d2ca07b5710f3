"""Samples of BABILong: slices of tokenized books against tokenizing everything for each sample, and the memory of a
stream.

Prints tokens per second of both (equal samples, 128k tokens), their ratio, and the resident memory after streams of 1
and 50 million tokens. The naive generator has the text of the books in memory, split into sentences; it tokenizes
sentence by sentence until the sample is full and puts the facts in between.
"""

import argparse
import resource
import statistics
import time

import numpy as np
import torch

from lit_memory.tasks.babi.files import questions
from lit_memory.tasks.babilong import BABILong
from lit_memory.tasks.samples import Sample
from lit_memory.text.corpus import load_corpus, sentences

SEGMENT = 512


def naive(task: BABILong, sample: Sample, facts: list[str], text: list[str]) -> list[int]:
    """The context of a sample whose draws are given."""
    encode = task.tokenizer.encode
    told = [encode(f" {fact}").tolist() for fact in facts]
    budget, noise = sample.context_len - sum(map(len, told)), []
    k, length = int(np.searchsorted(sample.noise.starts_S, sample.position)), 0
    while length < budget:
        noise.append(encode(f" {text[k % len(text)]}").tolist()[: budget - length])
        k, length = k + 1, length + len(noise[-1])
    before = np.cumsum([0, *map(len, told)])[:-1]
    gaps = np.searchsorted(np.cumsum([0, *map(len, noise)]), sample.starts_F - before).tolist()
    row: list[int] = []
    for gap, sentence in enumerate([*noise, []]):
        while gaps and gaps[0] == gap:
            row += told[len(told) - len(gaps)]
            gaps.pop(0)
        row += sentence
    return row


def resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--tokenizer", default="word")
    arguments.add_argument("--haystack", default="noise")
    args = arguments.parse_args()
    torch.set_num_threads(1)
    task = BABILong(
        BABILong.Config(
            segments=256, segment_len=SEGMENT, tokenizer=args.tokenizer, haystack=args.haystack, vocab_size=8192
        )
    )
    tokenizer = task.tokenizer
    kept = [s for book in load_corpus(args.haystack, "train").texts() for s in sentences(book)]
    noise = task.samples(0, "train", 0, 1)[0].noise
    text = [s for s in kept if len(tokenizer.encode(f" {s}")) >= 10]
    if len(text) != len(noise.starts_S):
        raise SystemExit(
            "the haystack leaves out sentences about persons and places; this benchmark wants one that has none"
        )
    ours, theirs = [], []
    for step in range(args.rounds):
        start = time.perf_counter()
        (sample,) = task.samples(0, "train", step, 1)
        row = sample.read(0, sample.context_len)
        ours.append(time.perf_counter() - start)
        facts = list(next(questions("qa1", 0, "train", step, 1)).facts)
        start = time.perf_counter()
        expected = naive(task, sample, facts, text)
        theirs.append(time.perf_counter() - start)
        assert row.tolist() == expected
    a, b = statistics.median(ours), statistics.median(theirs)
    tokens = sample.context_len
    print(f"samples of {tokens:,} tokens, {args.tokenizer} tokenizer, median of {args.rounds}")
    print(f"slices      {a * 1000:8.2f} ms  {tokens / a:14,.0f} tokens/s")
    print(f"naive       {b * 1000:8.2f} ms  {tokens / b:14,.0f} tokens/s   ratio {b / a:,.0f}")
    for millions in (1, 50):
        batch = task.at(segments=millions * 1_000_000 // SEGMENT).batch(0, "test", 0, 1)
        start = time.perf_counter()
        count = sum(ids.numel() for ids in batch.context)
        taken = time.perf_counter() - start
        speed, peak = count / taken, resident_mb()
        print(f"stream of {millions:2} M tokens: {taken:6.2f} s, {speed:12,.0f} tokens/s, peak resident {peak:.0f} MB")


if __name__ == "__main__":
    main()
