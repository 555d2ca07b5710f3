"""Tokenizers: words, bytes, and subwords, trained here or pretrained.

Source: the reference of arXiv 2407.04841 has GPT-2's tokenizer, pads with its end of text and asks for the answer by
    the first piece of "GEN" (spec 3.2). Words and a byte-level BPE trained on the books are for models that are trained
    from scratch (spec 0).

Deviations
1. Our tokenizers have tokens of their own for padding, end and generation, and those of words one for unknown words:
   WikiText-103 has 267,738 ids, three more than in the papers.
2. Text never becomes a special token, even if it spells one; only the line ends of "wikitext" do.

Shape suffixes: T tokens.
"""

import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lit_memory.text.corpus import Corpus, cached, content_key
from lit_memory.util import hub
from lit_memory.util.checks import FieldError

WORD = re.compile(r"\w+|[^\w\s]")
SPECIALS = ("<pad>", "<eos>", "<gen>")
BUILT_IN = ("word", "wikitext", "char", "bpe")
FETCHED = ["tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "config.json"]
FETCHED += ["chat_template*"]
FILE = "tokenizer.json"
VOCAB_SIZE = 4096
"""Token ids of a task that names no number."""
WANTED = "expected one in the format of the tokenizers package (tokenizer.json)"
FORMAT = 1
"""Version of trained vocabularies; to be raised when the same corpus and settings give other ones."""
UNKNOWN = len(SPECIALS)
"""Id of ``<unk>``, which only tokenizers of words have."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int
    pad_id: int
    """Fills batches."""
    eos_id: int
    """Ends an answer."""
    gen_id: int
    """Asks for an answer."""
    key: str
    """A hash of all that ids depend on."""

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
    """Words and single punctuation marks, case kept. A word outside the vocabulary is ``<unk>``, and so is an id beyond
    it, as a model may have more ids than a short text has words."""

    name, pattern = "word", WORD
    pad_id, eos_id, gen_id = range(3)

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.words = [*SPECIALS, "<unk>", *vocabulary]
        self.vocab_size = len(self.words)
        self.key = content_key(self.name, self.pattern.pattern, *self.words)
        self._ids = {word: i for i, word in enumerate(self.words) if i > UNKNOWN}

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        words = [self.pattern.findall(text) for text in texts]
        ids = np.array([self._ids.get(word, UNKNOWN) for word in chain.from_iterable(words)], np.int32)
        return np.split(ids, np.cumsum([len(part) for part in words], dtype=int))[:-1]

    def decode(self, ids: Iterable[int]) -> str:
        text = " ".join(self.words[i if i < self.vocab_size else UNKNOWN] for i in ids)
        return re.sub(r" (?=[.,;:!?)\]}’”])", "", text)


class WikiTextTokenizer(WordTokenizer):
    """The words of WikiText, ``<unk>`` among them, split at white space, with ``<eos>`` between lines. With the end
    token that follows a text, every line has one, as in the word-level results of the papers."""

    name, pattern = "wikitext", re.compile(r"[^\s]+|\n(?!\Z)")

    def __init__(self, vocabulary: Sequence[str]) -> None:
        super().__init__(vocabulary)
        self._ids["\n"] = self.eos_id


class ByteTokenizer:
    """The bytes of UTF-8."""

    pad_id, eos_id, gen_id = range(3)
    parts = (*(name.encode() for name in SPECIALS), *(bytes([byte]) for byte in range(256)))
    vocab_size = len(parts)
    key = "bytes"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + len(SPECIALS)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        # A model may have more ids than there are bytes.
        return b"".join(self.parts[min(i, self.vocab_size - 1)] for i in ids).decode(errors="replace")


class SubwordTokenizer:
    """A ``tokenizers.Tokenizer`` and the special tokens that it has."""

    def __init__(self, backend: Any, pad_id: int, eos_id: int, gen_id: int | None = None) -> None:
        """gen_id: default: the first piece of "GEN"."""
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
        encoded = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)


def build_tokenizer(
    name: str, corpus: Corpus, cache: Path, vocab_size: int = VOCAB_SIZE, words: Iterable[str] = ()
) -> Tokenizer:
    """The tokenizer ``name``.

    name: "word": the words of the texts ``words``, then the most frequent ones of ``corpus``, ties in alphabetical
        order; "wikitext": the same with words split at white space, line by line; "char": bytes; "bpe": byte-level BPE
        trained on ``corpus``; otherwise a folder, or a name on the Hugging Face hub such as "gpt2", or "gpt2@commit".
    cache: folder for trained vocabularies.
    vocab_size: maximum number of ids of "word", "wikitext" and "bpe", special tokens included.
    Raises FieldError for a vocabulary that is too small, ValueError for a pretrained tokenizer without an end token and
    FileNotFoundError for an unknown name.
    """
    if name == "char":
        return ByteTokenizer()
    for kind in (WordTokenizer, WikiTextTokenizer):
        if name == kind.name:
            return _build_words(kind, corpus, cache, vocab_size, words)
    # its threads do not survive the fork of the loader's workers
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if name == "bpe":
        return _build_bpe(corpus, cache, vocab_size)
    found = pretrained_tokenizer(name)
    if found.eos_token_id is None:
        raise ValueError(f"tokenizer {name!r}: {WANTED} that names its end of text (eos_token)")
    pad_id = found.eos_token_id if found.pad_token_id is None else found.pad_token_id
    return SubwordTokenizer(found.backend_tokenizer, pad_id, found.eos_token_id)


def _build_words(
    kind: type[WordTokenizer], corpus: Corpus, cache: Path, vocab_size: int, words: Iterable[str]
) -> WordTokenizer:
    """The tokenizer "word" or "wikitext"; see ``build_tokenizer``."""
    closed = list(dict.fromkeys(chain.from_iterable(map(kind.pattern.findall, words))))
    specials = UNKNOWN + 1
    why = f"{len(closed)} words that have to be in it and {specials} special tokens"
    _check_size(vocab_size, specials + len(closed), why)

    def build() -> list[bytes]:
        return [json.dumps(vocabulary(corpus, vocab_size, closed, kind.pattern)).encode()]

    folder = cache / f"{kind.name}-{content_key(FORMAT, kind.pattern.pattern, corpus.key, vocab_size, closed)}"
    (path,) = cached(folder, ["vocabulary.json"], build)
    return kind(json.loads(path.read_bytes()))


def _build_bpe(corpus: Corpus, cache: Path, vocab_size: int) -> SubwordTokenizer:
    """The tokenizer "bpe"; see ``build_tokenizer``."""
    from tokenizers import Tokenizer as Backend

    _check_size(vocab_size, ByteTokenizer.vocab_size, f"256 bytes and {len(SPECIALS)} special tokens")
    folder = cache / f"bpe-{content_key(FORMAT, corpus.key, vocab_size)}"
    (path,) = cached(folder, ["tokenizer.json"], lambda: [train_bpe(corpus, vocab_size)])
    return SubwordTokenizer(Backend.from_file(str(path)), *range(len(SPECIALS)))


def _check_size(vocab_size: int, least: int, why: str) -> None:
    """Raise FieldError for a vocabulary of fewer than ``least`` ids."""
    if vocab_size < least:
        raise FieldError("vocab_size", vocab_size, f"expected at least {least}, for {why}")


def vocabulary(corpus: Corpus, vocab_size: int, closed: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
    """The words ``closed``, then the most frequent other words of a corpus; with the special tokens at most
    ``vocab_size``."""
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


@lru_cache(maxsize=8)
def size_in(name: str) -> int | None:
    """Token ids of the pretrained tokenizer in a folder, or of a name on the hub with its commit; None for any other
    tokenizer, and for a file that cannot be read, which ``pretrained_tokenizer`` tells. Raises FieldError for a name
    with a commit that is not in reach."""
    from tokenizers import Tokenizer as Backend

    if name in ("", *BUILT_IN):
        return None
    try:
        path = hub.pinned_file(name, FILE) if hub.is_pinned(name) else Path(name) / FILE
    except (ValueError, FileNotFoundError) as error:
        raise FieldError("tokenizer", name, str(error)) from None
    if path is None or not path.is_file():
        return None
    try:
        return 1 + max(Backend.from_file(str(path)).get_vocab().values())
    except Exception:  # of the tokenizers package, which has no class of its own
        return None


def check_tokenizer(name: str) -> None:
    """Raise FieldError for a name on the hub with its commit that is not in reach, or with something else after @."""
    if "@" in name:
        size_in(name)


def vocabulary_size(name: str, wanted: int) -> int:
    """Token ids of a task whose tokenizer is ``name``: of bytes and of the one in a folder its own, of that unless
    others were wanted."""
    own = ByteTokenizer.vocab_size if name == "char" else size_in(name) if wanted == VOCAB_SIZE else None
    return wanted if own is None else own


def pretrained_tokenizer(name: str) -> Any:
    """The ``transformers`` tokenizer in a folder, or of a name on the Hugging Face hub. Raises FileNotFoundError for an
    unknown name and ValueError for a tokenizer that is not in the format of the tokenizers package, as one whose folder
    brings Python code, which is never run."""
    from transformers import AutoTokenizer

    try:
        folder = Path(name) if Path(name).is_dir() else hub.snapshot(name, FETCHED)
        if not any(path for pattern in ("tokenizer.*", "vocab*", "*.model") for path in folder.glob(pattern)):
            raise FileNotFoundError("tokenizer.json")  # for some models transformers would make one without words
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # no network, no such name, no permission, a folder of something else: the libraries have a class for each
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"tokenizer {name!r}: Python code in its folder (none of it was run); {WANTED}") from error
        hint = "".join(f"; did you mean {known!r}?" for known in difflib.get_close_matches(name, BUILT_IN, 1))
        raise FileNotFoundError(
            f"tokenizer {name!r}: expected {', '.join(BUILT_IN)}, a folder with a tokenizer, "
            f"or a name in reach on the Hugging Face hub ({type(error).__name__}){hint}"
        ) from error
    if getattr(found, "backend_tokenizer", None) is None:
        raise ValueError(f"tokenizer {name!r}: {WANTED}")
    return found
