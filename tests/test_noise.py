"""The synthetic prose: the same everywhere, rich in words, free of bAbI, fast, and true to its grammar."""

import hashlib
import re
import time
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from numpy.random import PCG64

from lit_memory.text import noise as module
from lit_memory.text.lexicon import COMPOUNDS, LOCAL, WORDS, inflect, inflected
from lit_memory.text.noise import GRAMMAR, PARAGRAPHS, noise, noise_key
from lit_memory.util.seeds import mixed_seed

BABI = {
    "mary",
    "john",
    "sandra",
    "daniel",
    "bill",
    "fred",
    "jeff",
    "bathroom",
    "bedroom",
    "garden",
    "hallway",
    "kitchen",
    "office",
    "apple",
    "football",
    "milk",
}
FACTS = r"""
    (moved|went|went\ back|journeyed|travelled)\ to\ the
    | (got|took|grabbed|picked\ up|dropped|discarded|put\ down|left)\ the
    | (gave|handed|passed)\ the\ \w+\ to | \bis\ (north|south|east|west)\ of | where\ is | what\ is"""


@pytest.fixture(scope="module")
def books():
    return [noise("train", i) for i in range(8)]


def test_bits():
    """Pinned, so that no other platform or version of numpy may give other text."""
    assert hashlib.blake2b(noise("train", 0).encode(), digest_size=8).hexdigest() == "8c29b048976a6dfb"


def test_books_and_splits_differ(books):
    texts = [*books, noise("valid", 0), noise("test", 0)]
    assert len(set(texts)) == len(texts) and noise("train", 3) == books[3]
    lines = [set(text.split("\n\n")) for text in texts]
    assert max(len(lines[0] & other) / len(lines[0]) for other in lines[1:]) < 0.01  # a short remark may come twice


def test_the_key_follows_the_text(monkeypatch):
    """Another text has another key; the same rules on other lines have the same one."""
    old = noise_key()
    monkeypatch.setattr(module, "GRAMMAR", GRAMMAR.replace("\n  ", " "))
    assert noise_key() == old
    monkeypatch.setattr(module, "PARAGRAPHS", 2)
    assert noise_key() != old


def test_many_words_with_frequencies_of_zipf(books):
    counts = Counter(chain.from_iterable(re.findall(r"\w+", text) for text in books))
    assert len(counts) > 10_000
    ranked = np.array(sorted(counts.values(), reverse=True))
    assert 0.05 < ranked[0] / ranked.sum() < 0.12  # "the"
    ranks = np.arange(9, 3000)
    slope, _ = np.polyfit(np.log(ranks + 1), np.log(ranked[ranks]), 1)
    assert -1.3 < slope < -0.7


def test_sentences_of_prose(books):
    lengths = np.array([len(re.findall(r"\w+|[^\w\s]", s)) for text in books for s in re.split(r"(?<=[.!?])\s", text)])
    assert 10 < np.median(lengths) < 20 and 25 < np.percentile(lengths, 95) < 60
    assert 200_000 < len(books[0]) < 300_000


def test_no_fact_of_babi(books):
    words = set(chain.from_iterable(inflected(name) for name in WORDS | COMPOUNDS)) | set(re.findall(r"\w+", GRAMMAR))
    assert not {word.lower() for word in words} & BABI
    assert not re.search(FACTS, "\n".join(books), re.IGNORECASE | re.VERBOSE)


def test_spelling(books):
    for text in books:
        assert not re.search(r" [.,;:?!]|[.,;:?!][.,;:?!]|  |\^|[“”¶]|[A-Z]{2}", text)
        assert not re.search(r"\b[Aa] [aeiouAEIOU]|\b[Aa]n [^aeiouAEIOU]", text)
        assert not re.search(r'(^|[.?!]"? |\n\n"?)[a-z]', re.sub(r'[?!]" \w+', "", text))  # "Never!" cried ...
        assert text.count('"') % 2 == 0 and text.endswith("\n\n")


@pytest.mark.parametrize(
    ("word", "ending", "form"),
    [
        ("carry", "ed", "carried"),
        ("play", "ed", "played"),
        ("scrub+", "ed", "scrubbed"),
        ("hire", "ed", "hired"),
        ("mend", "ed", "mended"),
        ("carry", "ing", "carrying"),
        ("scrub+", "ing", "scrubbing"),
        ("hire", "ing", "hiring"),
        ("scrub+", "", "scrub"),
        ("mend", "", "mend"),
        ("scrub+", "s", "scrubs"),
        ("carry", "s", "carries"),
        ("ferryman", "s", "ferrymen"),
        ("knife", "s", "knives"),
        ("box", "s", "boxes"),
        ("gentle", "ly", "gently"),
        ("pale", "ly", "palely"),
        ("dull", "ly", "dully"),
        ("happy", "ly", "happily"),
        ("calm", "ly", "calmly"),
        ("happy", "ness", "happiness"),
        ("pale", "ness", "paleness"),
        ("bench", "s", "benches"),
        ("lamp", "s", "lamps"),
        ("play", "s", "plays"),
    ],
)
def test_inflection(word, ending, form):
    assert inflect(word, ending) == form


def slowly(split: str, index: int) -> str:
    """``noise`` by lists and loops."""
    rules = {}
    for line in GRAMMAR.replace("\n  ", " ").strip().split("\n"):
        head, alternatives = line.split(" = ")
        rules[head] = [(int(body.split()[0]), body.split()[1:]) for body in alternatives.split(" | ")]
    words = {
        name: inflected(name)
        for name in chain.from_iterable(body for rule in rules.values() for _, body in rule)
        if inflected(name)
    }
    bits = PCG64(mixed_seed(index, f"noise/{split}", 0))

    def choose(options, weights):
        at, total = (bits.random_raw() >> 32) / 2**32 * sum(weights), 0.0
        for option, weight in zip(options, weights, strict=True):
            total += weight
            if at < total:
                return option
        raise AssertionError

    def expand(symbol):
        if symbol not in rules:
            return [symbol]
        return choose([body for _, body in rules[symbol]], [weight for weight, _ in rules[symbol]])

    text = ["PARAGRAPH"] * PARAGRAPHS
    while set(text) & rules.keys():
        text = list(chain.from_iterable(map(expand, text)))
    turns = {name: bits.random_raw() % len(options) * (name in LOCAL) for name, options in words.items()}
    for i, name in enumerate(text):
        if name in words:
            rank = choose(range(len(words[name])), [1 / (r + 3) for r in range(len(words[name]))])
            text[i] = words[name][(rank + turns[name]) % len(words[name])]
    text = " ".join(text)
    text = re.sub(r" ,(?= [.,;:?!¶])", "", text)
    text = re.sub(r"\^ (\w)", lambda found: found[1].upper(), text)
    text = re.sub(r"\ba (?=[aeiouAEIOU])", "an ", re.sub(r"\bA (?=[aeiouAEIOU])", "An ", text))
    text = re.sub(r" (?=[.,;:?!”¶])|(?<=[“¶]) ", "", text)
    return text.replace("“", '"').replace("”", '"').replace("¶", "\n\n")


def test_expansion_by_arrays_is_that_by_loops(monkeypatch):
    monkeypatch.setattr(module, "PARAGRAPHS", 60)
    monkeypatch.setitem(globals(), "PARAGRAPHS", 60)
    assert noise("test", 5) == slowly("test", 5)


def test_speed():
    """At least a megabyte a second on any core: about twenty are measured on a slow one."""
    noise("train", 0)
    start = time.perf_counter()
    size = len("".join(noise("valid", i) for i in range(4)))
    assert size / (time.perf_counter() - start) > 1e6
