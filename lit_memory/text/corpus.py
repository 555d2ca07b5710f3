"""Corpora: books from several sources by split, their sentences, and a cache on disk for what is built from them.

Source: arXiv 2407.04841 hides facts in the books of PG19 (appendix C; the sampler of BABILong, spec 3.3) and models
    WikiText-103.

A ``Corpus`` becomes token ids in ``tokenizers.py`` and a ``Haystack`` in ``haystack.py``. What the repository has in
``data/`` is a folder like those of users, with a name (``shipped.py``).

Deviations
1. Sentences end where ``[.!?]`` and any closing quotes or brackets are followed by white space; the reference has an
   untrained Punkt tokenizer, which breaks at much the same places. Any white space becomes one space: line ends, which
   the facts do not have, would give these away.
2. Synthetic prose (``noise.py``) needs no download. Validation has books of its own; the reference validates on test
   books.
"""

import difflib
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from lit_memory.text.noise import noise, noise_key
from lit_memory.text.shipped import folder_of
from lit_memory.util import files
from lit_memory.util.checks import FieldError
from lit_memory.util.inputs import missing, plain_name, read_text, reading, text_files

SPLITS = ("train", "valid", "test")
SENTENCE_END = re.compile(r"""([.!?]["')\]”’]*) """)
HUB = {
    "pg19": ("emozilla/pg19", None),
    "wikitext-2-v1": ("Salesforce/wikitext", "wikitext-2-v1"),
    "wikitext-2-raw-v1": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "wikitext-103-v1": ("Salesforce/wikitext", "wikitext-103-v1"),
    "wikitext-103-raw-v1": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "fineweb-edu-100bt": ("HuggingFaceFW/fineweb-edu", "sample-100BT"),
}
"""Source -> name on the Hugging Face hub, and configuration."""
FOLDERS = ("shipped-books", "shipped-wikitext-2")
"""The folders of ``SHIPPED`` that have texts."""
SOURCES = ("noise", *FOLDERS, *HUB)
BOOKS = {"noise": 50, "pg19": 100, "fineweb-edu": 100_000, "fineweb-edu-100bt": 100_000}
"""Default number of books per split: about 2 million words of noise, 10 million of PG19."""
LACKING = {"pg19": ("valid",), "fineweb-edu": ("valid", "test"), "fineweb-edu-100bt": ("valid", "test")}
"""Splits that a source lacks; they get the first of its training texts."""
BLANK = " \n"
"""A blank line of WikiText's files, which on the hub is a row without text."""
NEAR = 1000
"""Characters within which a word begins."""
HELD_OUT = 10
"""One book in this many is held out, and at least one."""


@dataclass(frozen=True)
class Corpus:
    """Texts, such as books, which are generated or fetched when ``texts`` is called."""

    key: str
    """A hash that identifies the content without reading it."""
    texts: Callable[[], Iterable[str]]
    name: str = "text"
    """For messages."""


def content_key(*parts: object) -> str:
    """A hash, 32 hexadecimal digits, of values whose ``repr`` is exact and short."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def sentences(text: str) -> list[str]:
    """The sentences of a text, with runs of white space replaced by one space."""
    return SENTENCE_END.sub("\\1\n", " ".join(text.split())).split("\n")


def check_source(name: str, value: str, known: Sequence[str] = SOURCES) -> None:
    """Raise FieldError for a source of text, in the field ``name``, that is neither ``known`` nor a folder."""
    if value not in known and (why := missing(value)):
        raise FieldError(name, value, f"{why}; expected a folder, or one of {', '.join(known)}")


@lru_cache(maxsize=64)
def check_texts(source: str, splits: Sequence[str], books: int | None = None) -> None:
    """Read the texts of a folder, each once, so that wrong files are told before anything starts. What is generated or
    fetched passes. Raises ValueError and FileNotFoundError."""
    for split in splits if source not in ("noise", *HUB) else ():
        corpus = load_corpus(source, split, books)
        if not sum(bool(text.strip()) for text in corpus.texts()):
            raise ValueError(f"{corpus.name}: expected text, found none")


def load_corpus(source: str, split: str, books: int | None = None) -> Corpus:
    """The books of one split. No text is in two splits.

    source: "noise", which needs no download; "shipped-books" or "shipped-wikitext-2", folders of the repository's
        ``data/``; from the Hugging Face hub "pg19", a configuration of WikiText, whose
        "books" are articles, or "fineweb-edu" (-100bt), whose "books" are web pages; or a folder: with WikiText's own
        ``wiki.train.tokens`` (or ``.raw``) and so on; with ``train/*.txt`` and ``test/*.txt``; with ``train.txt`` and
        ``test.txt``; or with all books side by side, which a hash of their names then assigns to the splits. Every file
        may be packed (``.txt.xz``). A folder without ``valid`` gives a part of its training books to it.
    books: maximum number of books in the split. Default: all of a folder and of WikiText, 50 of noise, 100 of PG19,
        100,000 of FineWeb-Edu.
    Raises FieldError for an unknown source or split and FileNotFoundError for a folder without text, or one of the
    repository where there is none. ``texts`` raises
    FileNotFoundError for a name that is not in reach on the hub, ValueError for a file that is not UTF-8.
    """
    if split not in SPLITS:
        raise FieldError("split", split, f"expected one of {', '.join(SPLITS)}")
    books = BOOKS.get(source) if books is None else books
    if books is not None and books < 1:
        raise FieldError("books", books, "expected at least 1")
    name = f"{source}, split {split}"
    if source == "noise":
        key = content_key(noise_key(), split, books)
        return Corpus(key, lambda: (noise(split, i) for i in range(books or 0)), name)
    if source in HUB:
        key = content_key(HUB[source], split, books, *[BLANK] * source.startswith("wikitext"))
        return Corpus(key, lambda: _fetch(source, split, books), name)
    folder = folder_of(source)
    if not folder.is_dir():
        hint = "".join(f"; did you mean {known!r}?" for known in difflib.get_close_matches(source, SOURCES, 1))
        raise FieldError(
            "source", source, f"no such folder; expected one with .txt books, or one of {', '.join(SOURCES)}{hint}"
        )
    return _load_folder(folder, split, books, name)


def _load_folder(folder: Path, split: str, books: int | None, name: str) -> Corpus:
    """The books of a folder, or the articles of WikiText's own files; see ``load_corpus``."""
    if wikis := [path for end in ("tokens", "raw") for path in text_files(folder, f"wiki.{split}.{end}")]:
        wiki = wikis[0]
        key = content_key("wiki", _digest(wiki), books)
        return Corpus(key, lambda: islice(_articles(io.StringIO(_read(wiki, 0, 1))), books), name)
    parts = _parts(folder, split)[:books]
    key = content_key(*((_digest(path), share) for path, share in parts))
    return Corpus(key, lambda: (_read(path, *share) for path, share in parts), name)


Part = tuple[Path, tuple[float, float]]
"""A file, and the start and the end of the part of it, as fractions of its length."""


def _parts(folder: Path, split: str) -> list[Part]:
    """The books of a folder that belong to a split."""
    given = {name: [*text_files(folder, f"{name}.txt"), *text_files(folder, f"{name}/*.txt")] for name in SPLITS}
    if not any(given.values()):
        parts = _spread(text_files(folder, "*.txt"), SPLITS)[split]
    elif split != "test" and not given["valid"]:
        parts = _spread(given["train"], SPLITS[:2])[split]
    else:
        parts = [(path, (0.0, 1.0)) for path in given[split]]
    if not parts:
        raise FileNotFoundError(
            f"{folder}: no .txt file for split {split!r}; "
            f"expected books in it, or in {folder / 'train'} and {folder / 'test'}"
        )
    return parts


def _spread(paths: Sequence[Path], splits: Sequence[str]) -> dict[str, list[Part]]:
    """The books of each split. Every split but the first gets a tenth of the books, at least one, by a hash of the
    names; where there are fewer books than splits, a tenth at the end of each book."""
    if len(paths) < len(splits):
        cuts = [0.0, *(1 - i / HELD_OUT for i in range(len(splits) - 1, -1, -1))]
        return {split: [(path, (cuts[i], cuts[i + 1])) for path in paths] for i, split in enumerate(splits)}
    ranked = sorted(paths, key=lambda path: hashlib.blake2b(plain_name(path).name.encode()).digest())
    held, parts = max(1, len(paths) // HELD_OUT), {}
    for split in reversed(splits):
        count = held if split != splits[0] else len(ranked)
        parts[split], ranked = [(path, (0.0, 1.0)) for path in ranked[:count]], ranked[count:]
    return parts


def _read(path: Path, start: float, stop: float) -> str:
    """The part of a file's text between two fractions of its length, both moved back to the start of a word."""
    text = read_text(path)
    return text[_word_start(text, start) : _word_start(text, stop)]


def _digest(path: Path) -> str:
    with reading(path):
        return files.digest(path)


def _word_start(text: str, fraction: float) -> int:
    """The index at a fraction of a text, moved back to the start of a word: behind a space, behind a line end where
    none is near, and as it is in writing without both."""
    at = int(fraction * len(text))
    if fraction == 1:
        return len(text)
    return next((i + 1 for space in " \n" if (i := text.rfind(space, max(0, at - NEAR), at)) >= 0), at)


def _fetch(source: str, split: str, books: int | None) -> Iterator[str]:
    """Books of PG19, articles of WikiText or pages of FineWeb-Edu, streamed from the Hugging Face hub."""
    from datasets import load_dataset

    name, config = HUB[source]
    lacking = LACKING.get(source, ())
    part, start = "validation" if split == "valid" else split, 0
    if lacking and split in ("train", *lacking):  # held-out books come first, then those for training
        part, held = "train", max(1, (books or 0) // HELD_OUT)
        start = held * (lacking.index(split) if split in lacking else len(lacking))
        books = held if split in lacking else books
    stop = None if books is None else start + books
    try:
        rows = (row["text"] for row in load_dataset(name, config, split=part, streaming=True))
        texts = _articles(row or BLANK for row in rows) if source.startswith("wikitext") else rows
        yield from islice(texts, start, stop)
    except Exception as error:  # no network, no such name, no permission: the library has a class for each
        kind = type(error).__name__
        raise FileNotFoundError(
            f"{source}: {name} is not in reach on the Hugging Face hub ({kind}); "
            "check the network, or name a folder of books"
        ) from error


def _articles(rows: Iterable[str]) -> Iterator[str]:
    """The articles, which start with ``= Title =``, in lines of WikiText."""
    lines: list[str] = []
    for row in rows:
        if re.match(r" = [^=]", row) and any(map(str.strip, lines)):
            yield "".join(lines)
            lines = []
        lines.append(row)
    yield "".join(lines)


def cached(folder: Path, names: Sequence[str], build: Callable[[], Sequence[bytes]]) -> list[Path]:
    """The files ``names`` in ``folder``, with the contents that ``build`` returns. They are built where one is missing
    or differs from its checksum.

    The name of ``folder`` has to depend on all that the contents depend on. Processes that build it at once write the
    same files.
    """
    paths = [folder / name for name in names]
    if not _intact(paths, folder / "sha256.json"):
        contents = dict(zip(names, build(), strict=True))
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        files.write_all(folder, {**contents, "sha256.json": json.dumps(sums).encode()})
    return paths


def _intact(paths: Sequence[Path], sums: Path) -> bool:
    """Whether all files are there and have their checksums."""
    if not all(path.is_file() for path in (*paths, sums)):
        return False
    return sums.read_bytes() == json.dumps({path.name: files.digest(path) for path in paths}).encode()
