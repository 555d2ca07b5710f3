"""Tokenizers: words, bytes, and subwords that are trained here or by others.

Source: the reference of arXiv 2407.04841 has GPT-2's tokenizer, pads with its end of text and asks for the answer by
    the first piece of
"GEN" (spec 3.2); word level and a byte-level BPE trained on the books are for models that are trained from scratch
(spec 0).

Deviations
1. Tokenizers of ours have tokens of their own for padding, end and generation, and words one for what is unknown:
   WikiText-103 has 267,738 ids, three more than in the papers.
2. Text never turns into a special token, whatever it says; line ends of "wikitext" do.

Shape suffixes: T tokens.
"""

import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lit_memory.text.corpus import Corpus, cached, content_key
from lit_memory.util.checks import FieldError

WORD = re.compile(r"\w+|[^\w\s]")
SPECIALS = ("<pad>", "<eos>", "<gen>")
BUILT_IN = ("word", "wikitext", "char", "bpe")
FETCHED = ["tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "config.json"]
FORMAT = "expected one in the format of the tokenizers package (tokenizer.json)"
UNKNOWN = len(SPECIALS)
"""Id of ``<unk>``, which only words have."""


class Tokenizer(Protocol):
    """Text to ids and back. ``eos_id`` ends an answer, ``gen_id`` asks for one, ``pad_id`` fills batches; ``key`` names
    all that ids depend on."""

    vocab_size: int
    pad_id: int
    eos_id: int
    gen_id: int
    key: str

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int32 (T,), without special tokens."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """``encode`` of every text, faster."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, with special tokens by name."""
        ...


class WordTokenizer:
    """Words and single marks, case kept. Others than those of the vocabulary are ``<unk>``, and so are ids that no word
    has: a model may have more of them than a short text has words."""

    name, pattern = "word", WORD
    pad_id, eos_id, gen_id = range(3)

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.words = [*SPECIALS, "<unk>", *vocabulary]
        self.vocab_size = len(self.words)
        self.key = content_key(self.name, *self.words)
        self._ids = {word: i for i, word in enumerate(self.words) if i > UNKNOWN}

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        words = [self.pattern.findall(text) for text in texts]
        ids = np.array([self._ids.get(word, UNKNOWN) for word in chain.from_iterable(words)], np.int32)
        return np.split(ids, np.cumsum([len(part) for part in words], dtype=int))[:-1]

    def decode(self, ids: Iterable[int]) -> str:
        return re.sub(
            r" (?=[.,;:!?)\]}’”])", "", " ".join(self.words[i if i < self.vocab_size else UNKNOWN] for i in ids)
        )


class WikiTextTokenizer(WordTokenizer):
    """The words of WikiText as they lie between spaces, its ``<unk>`` one of them; ``<eos>`` between lines. With the
    end token that follows a text, every line has one, as in the word-level results of the papers."""

    name, pattern = "wikitext", re.compile(r"[^\s]+|\n(?!\Z)")

    def __init__(self, vocabulary: Sequence[str]) -> None:
        super().__init__(vocabulary)
        self._ids["\n"] = self.eos_id


class ByteTokenizer:
    """The bytes of UTF-8."""

    pad_id, eos_id, gen_id = range(3)
    vocab_size = len(SPECIALS) + 256
    key = "bytes"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + len(SPECIALS)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(SPECIALS[i].encode() if i < len(SPECIALS) else bytes([i - len(SPECIALS)]) for i in ids).decode(
            errors="replace"
        )


class SubwordTokenizer:
    """A ``tokenizers.Tokenizer`` and the special tokens that it has."""

    def __init__(self, backend: Any, pad_id: int, eos_id: int, gen_id: int | None = None) -> None:
        """gen_id: default the first piece of "GEN"."""
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # as any other text
        self.backend = backend
        self.vocab_size = 1 + max(backend.get_vocab().values())
        self.pad_id, self.eos_id = pad_id, eos_id
        self.gen_id = int(self.encode("GEN")[0]) if gen_id is None else gen_id
        self.key = content_key("subword", backend.to_str(), self.pad_id, self.eos_id, self.gen_id)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.array(found.ids, np.int32) for found in self.backend.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)


def build_tokenizer(
    name: str,
    corpus: Corpus,
    cache: Path,
    vocab_size: int = 4096,
    words: Iterable[str] = (),
    revision: str | None = None,
) -> Tokenizer:
    """The tokenizer ``name``.

    "word": the words of the texts ``words``, then the most frequent ones of ``corpus``, of equal ones the first in the
    alphabet. "wikitext": the same with words between spaces, line by line. "char": bytes. "bpe": byte-level BPE trained
    on ``corpus``. All but "char" have at most ``vocab_size`` ids, special tokens included, and are kept in ``cache``.
    Any other: a folder or a name on the Hugging Face hub, "gpt2" say, at ``revision``, as
    ``transformers.AutoTokenizer`` reads it. Raises ValueError for a vocabulary that is too small and for a tokenizer
    that lacks what is needed; FileNotFoundError for an unknown name.
    """
    if name == "char":
        return ByteTokenizer()
    if kind := {cls.name: cls for cls in (WordTokenizer, WikiTextTokenizer)}.get(name):
        closed = list(dict.fromkeys(chain.from_iterable(map(kind.pattern.findall, words))))
        _check_size(
            vocab_size,
            UNKNOWN + 1 + len(closed),
            f"{len(closed)} words that have to be in it and {UNKNOWN + 1} special tokens",
        )
        folder = cache / f"{name}-{content_key(corpus.key, vocab_size, closed)}"
        (path,) = cached(
            folder,
            ["vocabulary.json"],
            lambda: [json.dumps(vocabulary(corpus, vocab_size, closed, kind.pattern)).encode()],
        )
        return kind(json.loads(path.read_bytes()))
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # its threads do not survive the fork of the loader's workers
    if name == "bpe":
        from tokenizers import Tokenizer as Backend

        _check_size(vocab_size, ByteTokenizer.vocab_size, f"256 bytes and {len(SPECIALS)} special tokens")
        folder = cache / f"bpe-{content_key(corpus.key, vocab_size)}"
        (path,) = cached(folder, ["tokenizer.json"], lambda: [train_bpe(corpus, vocab_size)])
        return SubwordTokenizer(Backend.from_file(str(path)), *range(len(SPECIALS)))
    found = pretrained_tokenizer(name, revision)
    if found.eos_token_id is None:
        raise ValueError(f"tokenizer {name!r}: {FORMAT} that names its end of text (eos_token)")
    pad_id = found.eos_token_id if found.pad_token_id is None else found.pad_token_id
    return SubwordTokenizer(found.backend_tokenizer, pad_id, found.eos_token_id)


def _check_size(vocab_size: int, least: int, why: str) -> None:
    if vocab_size < least:
        raise FieldError("vocab_size", vocab_size, f"expected at least {least}, for {why}")


def vocabulary(corpus: Corpus, vocab_size: int, closed: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
    """``closed``, then the most frequent other words of a corpus: ``vocab_size`` less the special tokens, or all that
    there are."""
    counts = Counter(chain.from_iterable(map(pattern.findall, corpus.texts())))
    ranked = sorted(counts.keys() - {"\n", *closed}, key=lambda word: (-counts[word], word))
    return [*closed, *ranked][: vocab_size - UNKNOWN - 1]


def train_bpe(corpus: Corpus, vocab_size: int) -> bytes:
    """A byte-level BPE in the JSON of the ``tokenizers`` package."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(corpus.texts(), trainer)
    return backend.to_str().encode()


def pretrained_tokenizer(name: str, revision: str | None = None) -> Any:
    """A ``transformers`` tokenizer, of a folder or a name on the Hugging Face hub. Raises FileNotFoundError for an
    unknown name and ValueError for one that is not in the format of the tokenizers package."""
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer

    try:
        folder = Path(
            name if Path(name).is_dir() else snapshot_download(name, revision=revision, allow_patterns=FETCHED)
        )
        if not any(path for pattern in ("tokenizer.*", "vocab*", "*.model") for path in folder.glob(pattern)):
            raise FileNotFoundError("tokenizer.json")  # of some models transformers would make one that knows no word
        found = AutoTokenizer.from_pretrained(folder)
    # no network, no such name, no permission, a folder of something else: the libraries have a class for each
    except Exception as error:
        hint = "".join(f"; did you mean {known!r}?" for known in difflib.get_close_matches(name, BUILT_IN, 1))
        raise FileNotFoundError(
            f"tokenizer {name!r}: expected {', '.join(BUILT_IN)}, a folder with a tokenizer, or a name in reach on the Hugging Face hub "
            f"({type(error).__name__}){hint}"
        ) from error
    if getattr(found, "backend_tokenizer", None) is None:
        raise ValueError(f"tokenizer {name!r}: {FORMAT}")
    return found
