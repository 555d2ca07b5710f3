"""Haystacks: reads of a ring of sentences at once, in pieces and by loops; which sentences are kept; the cache."""

import time

import numpy as np
import pytest
from numpy.random import PCG64, Generator

from lit_memory.text.corpus import Corpus, content_key, load_corpus, sentences
from lit_memory.text.haystack import Haystack, build_haystack, tokenize
from lit_memory.text.tokenizers import WORD, ByteTokenizer, WordTokenizer, build_tokenizer

STARTS = [0, 3, 7, 8, 15, 19]
RING = Haystack(np.arange(100, 123, dtype=np.uint16), np.array(STARTS))


def rng(seed=0):
    return Generator(PCG64(seed))


def read(position, length):
    """Tokens of a context, and the offsets at which sentences start in it."""
    return RING.tokens(position, length), RING.offset(position, np.arange(RING.sentences(position, length)))


def slowly(position, length):
    """``read``, token by token."""
    tokens = [100 + p % 23 for p in range(position, position + length)]
    return tokens, [i for i in range(length) if (position + i) % 23 in STARTS]


@pytest.mark.parametrize("position", [*range(25), 23 * 10**12 + 5])
@pytest.mark.parametrize("length", [1, 2, 7, 22, 23, 24, 46, 70])
def test_read(position, length):
    tokens, starts = read(position, length)
    assert (tokens.tolist(), starts.tolist()) == slowly(position, length) and tokens.dtype == np.uint16
    assert [RING.offset(position, k) for k in range(len(starts))] == starts.tolist()
    assert RING.offset(position, len(starts)) >= length
    assert np.shares_memory(tokens, RING.tokens_N) == (
        position % 23 + length <= 22
    )  # not a copy where it lies in one piece


@pytest.mark.parametrize("chunk", [1, 2, 5, 23, 24, 60])
def test_pieces_join(chunk):
    """Read in pieces of any length, a context is the same."""
    for start in STARTS:
        pieces = [RING.tokens(start + done, min(chunk, 120 - done)) for done in range(0, 120, chunk)]
        assert np.concatenate(pieces).tolist() == RING.tokens(start, 120).tolist()


def test_a_context_starts_with_any_sentence():
    drawn = rng()
    counts = np.unique([RING.random_start(drawn) for _ in range(3000)], return_counts=True)
    assert counts[0].tolist() == STARTS and counts[1].min() > 400


def test_a_context_is_known_before_it_is_read():
    """Gaps drawn from the number of sentences alone are where the sentences of the whole context start, or its end."""
    place, draw = RING.random_start(rng(1)), rng(2)
    tokens, starts = slowly(place, 100)
    gaps = np.sort(draw.integers(0, RING.sentences(place, 100) + 1, 50))
    offsets = np.minimum(RING.offset(place, gaps), len(tokens))
    assert offsets.tolist() == [[*starts, 100][gap] for gap in gaps]


def test_repeats():
    assert len(RING) == 23 and not RING.repeats(23) and RING.repeats(24)


@pytest.mark.parametrize("length", [0, -1])
def test_lengths_below_one(length):
    with pytest.raises(ValueError, match=f"^{length} tokens of a haystack: expected at least 1$"):
        RING.tokens(0, length)


def test_offsets_cost_no_reading():
    """The gaps of a context of 50 million tokens are found without reading its tokens."""
    place = RING.random_start(rng())
    assert RING.sentences(place, 23 * 10**9) == 6 * 10**9
    assert RING.offset(place, 6 * 10**9) == 23 * 10**9


TEXT = "One two three. Anna sat in the hall! She saw the hall. “Bob ran. Bob saw ANNA in the Hall.”\nA b c d e f."
WORDS = WordTokenizer(sorted(set(WORD.findall(TEXT))))


def corpus(*texts):
    return Corpus(content_key(*texts), lambda: texts, "tiny")


def kept(haystack, tokenizer):
    stops = [*haystack.starts_S[1:], len(haystack)]
    return [
        tokenizer.decode(haystack.tokens_N[start:stop]) for start, stop in zip(haystack.starts_S, stops, strict=True)
    ]


def test_sentences_that_are_kept(tmp_path):
    """Sentences are kept if they are long enough and lack the words of a group, in any case; parts of words do not
    count."""
    options = {"tokenizer": WORDS, "cache": tmp_path, "min_tokens": 5}
    everything = ["Anna sat in the hall!", "She saw the hall.", "Bob saw ANNA in the Hall.”", "A b c d e f."]
    assert kept(build_haystack(corpus(TEXT), **options), WORDS) == everything
    assert kept(build_haystack(corpus(TEXT), without=[["Anna", "Bo"], ["HALL"]], **options), WORDS) == [
        everything[1],
        everything[3],
    ]
    assert kept(build_haystack(corpus(TEXT), without=[["anna"]], **options), WORDS) == [everything[1], everything[3]]
    assert kept(build_haystack(corpus(TEXT), without=[["Anna"], []], **options), WORDS) == everything
    assert len(kept(build_haystack(corpus(TEXT), **{**options, "min_tokens": 1}), WORDS)) == 6
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("leading_space", [True, False])
def test_leading_space(tmp_path, leading_space):
    tokenizer = ByteTokenizer()
    haystack = build_haystack(corpus(TEXT, "Bye."), tokenizer, tmp_path, min_tokens=1, leading_space=leading_space)
    assert kept(haystack, tokenizer) == [" " * leading_space + s for s in [*sentences(TEXT), "Bye."]]


def test_books_follow_each_other(tmp_path):
    haystack = build_haystack(corpus("A b c.", "D.", "E f g. A a."), WordTokenizer(["A", "."]), tmp_path, min_tokens=3)
    assert haystack.tokens_N.tolist() == [4, 3, 3, 5, 3, 3, 3, 5, 4, 3, 5] and haystack.starts_S.tolist() == [0, 4, 8]


def test_wide_vocabularies(tmp_path):
    tokenizer = WordTokenizer([str(i) for i in range(70_000)])
    haystack = build_haystack(corpus("69999 1 2 3."), tokenizer, tmp_path, min_tokens=1)
    assert haystack.tokens_N.dtype == np.int32 and haystack.tokens_N[0] == 70_003
    assert (
        build_haystack(corpus("1."), WordTokenizer(["x"] * (2**16 - 4)), tmp_path, min_tokens=1).tokens_N.dtype
        == np.uint16
    )


def test_no_sentence_left(tmp_path):
    for options in ({}, {"min_tokens": 1, "without": [["a"]]}):
        with pytest.raises(ValueError, match=r"^tiny: no sentence left of \d+ tokens") as caught:
            build_haystack(corpus("A b c. A d."), WORDS, tmp_path, **options)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_cached_is_uncached(tmp_path):
    """The cache equals books tokenized sentence by sentence; it is mapped read-only, and rebuilt when damaged."""
    reads = []
    noise = load_corpus("noise", "test", books=2)
    counted = Corpus(noise.key, lambda: reads.append(1) or noise.texts())
    tokenizer = build_tokenizer("word", noise, tmp_path, 500)
    rows = [tokenizer.encode(" " + s) for text in noise.texts() for s in sentences(text)]
    rows = [ids for ids in rows if len(ids) >= 10]
    for round_ in range(4):
        haystack = build_haystack(counted, tokenizer, tmp_path)
        assert (
            np.array_equal(haystack.tokens_N, np.concatenate(rows))
            and haystack.starts_S.tolist() == np.cumsum([0, *map(len, rows[:-1])]).tolist()
        )
        assert isinstance(haystack.tokens_N.base, np.memmap) and not haystack.tokens_N.flags.writeable
        assert len(reads) == 1 + round_ // 2
        if round_ == 1:
            (path,) = tmp_path.glob("haystack-*/tokens.npy")
            path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    assert np.array_equal(tokenize(noise, tokenizer, 10, [], True)[0], haystack.tokens_N)


def test_every_setting_has_its_own_cache(tmp_path):
    settings = [
        {},
        {"min_tokens": 2},
        {"without": [["a"]]},
        {"without": [["b"]]},
        {"without": [["a"], ["b"]]},
        {"leading_space": False},
    ]
    text = corpus("One two three four five six seven eight nine ten.")
    for options in [*settings, {"without": [["A"]]}]:
        build_haystack(text, WORDS, tmp_path, **options)
    build_haystack(text, ByteTokenizer(), tmp_path)
    build_haystack(corpus("One two three four five six seven eight nine zehn."), WORDS, tmp_path)
    assert len(list(tmp_path.iterdir())) == len(settings) + 2


def test_slices_are_quick():
    """A context of 128k tokens at above 10 million tokens/s on any core: 2,000 million are measured on a slow one."""
    haystack = Haystack(np.zeros(2_000_000, np.uint16), np.arange(0, 2_000_000, 20))
    draw, start = rng(), time.perf_counter()
    for _ in range(50):
        haystack.tokens(haystack.random_start(draw), 2**17)
    assert 50 * 2**17 / (time.perf_counter() - start) > 1e7
