"""Text for the tasks: books from several sources by split, their sentences, and a cache on disk for what is made of
them.

Source: arXiv 2407.04841 hides facts in the books of PG19 (appendix C; the sampler of BABILong, spec 3.3) and models
    WikiText-103.

A ``Corpus`` becomes token ids in ``tokenizers.py`` and a ``Haystack`` in ``haystack.py``.

Deviations
1. Sentences end where ``[.!?]`` and any closing quotes or brackets are followed by white space; the reference has an
   untrained Punkt tokenizer, which breaks at much the same places. White space is one space each: line ends would give
   the facts away, which have none.
2. Without a download there is synthetic prose (``noise.py``). Validation has books of its own; the reference validates
   on test books.
"""

import difflib
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from lit_memory.text.noise import noise, noise_key
from lit_memory.util import files
from lit_memory.util.checks import FieldError

SPLITS = ("train", "valid", "test")
SENTENCE_END = re.compile(r"""([.!?]["')\]”’]*) """)
HUB = {"pg19": ("emozilla/pg19", None)}
HUB |= {
    name: ("Salesforce/wikitext", name)
    for name in ("wikitext-2-v1", "wikitext-2-raw-v1", "wikitext-103-v1", "wikitext-103-raw-v1")
}
HUB |= {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "fineweb-edu-100bt": ("HuggingFaceFW/fineweb-edu", "sample-100BT"),
}
"""Source -> name on the Hugging Face hub, and configuration."""
SOURCES = ("noise", *HUB)
BOOKS = {"noise": 50, "pg19": 100, "fineweb-edu": 100_000, "fineweb-edu-100bt": 100_000}
"""Books of a split where a source has more than anybody needs: about 2 million words of noise, 10 million of PG19."""
LACKING = {"pg19": ("valid",), "fineweb-edu": ("valid", "test"), "fineweb-edu-100bt": ("valid", "test")}
"""Splits that a source does not have: they get the first of its training texts."""
HELD_OUT = 10
"""One book in so many is held out, and at least one."""


@dataclass(frozen=True)
class Corpus:
    """Texts, books say, and a key that names their content before any of it is generated or fetched."""

    key: str
    texts: Callable[[], Iterable[str]]
    name: str = "text"
    """For messages."""


def joined(*corpora: Corpus) -> Corpus:
    """One corpus after the other."""
    return Corpus(
        content_key(*(c.key for c in corpora)),
        lambda: chain.from_iterable(c.texts() for c in corpora),
        " + ".join(c.name for c in corpora),
    )


def content_key(*parts: object) -> str:
    """A name of 32 hexadecimal digits for a sequence of values that have a short, exact ``repr``."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def sentences(text: str) -> list[str]:
    """The sentences of a text, with one space for every run of white space."""
    return SENTENCE_END.sub("\\1\n", " ".join(text.split())).split("\n")


def check_source(name: str, value: str, known: Sequence[str] = SOURCES) -> None:
    """Raise ValueError for a source of text, the setting ``name``, that is neither ``known`` nor a folder."""
    if value not in known and not (value and Path(value).is_dir()):
        raise FieldError(name, value, f"no such folder; expected one, or one of {', '.join(known)}")


def load_corpus(source: str, split: str, books: int | None = None, revision: str | None = None) -> Corpus:
    """The books of one split. No text is in two splits.

    source: "noise", which needs no download; "pg19", a configuration of WikiText, whose "books" are articles, or
        "fineweb-edu" (-100bt), whose are web pages, from the Hugging Face hub; or a folder: with WikiText's own
        ``wiki.train.tokens`` (or ``.raw``) and so on; with ``train/*.txt`` and ``test/*.txt``; with ``train.txt`` and
        ``test.txt``; or with all books in one place, which are then spread over the splits by a hash of their names.
        ``valid`` has a part of the training books where the folder has no such part.
    books: most books of the split. Default: all of a folder and of WikiText, 50 of noise, 100 of PG19, 100,000 of
        FineWeb-Edu.
    revision: branch, tag or commit on the hub.
    Raises ValueError for an unknown source or split; FileNotFoundError for a folder without text, and later, where
    ``texts`` is called, for a name that is not in reach on the hub; then also ValueError for a file that is not UTF-8.
    """
    if split not in SPLITS:
        raise FieldError("split", split, f"expected one of {', '.join(SPLITS)}")
    books = BOOKS.get(source) if books is None else books
    if books is not None and books < 1:
        raise FieldError("books", books, "expected at least 1")
    if source == "noise":
        return Corpus(
            content_key(noise_key(), split, books),
            lambda: (noise(split, i) for i in range(books or 0)),
            f"noise, split {split}",
        )
    if source in HUB:
        return Corpus(
            content_key(HUB[source], revision, split, books),
            lambda: _fetch(source, split, books, revision),
            f"{source}, split {split}",
        )
    if not Path(source).is_dir():
        hint = "".join(f"; did you mean {name!r}?" for name in difflib.get_close_matches(source, SOURCES, 1))
        raise FieldError(
            "source", source, f"no such folder; expected one with .txt books, or one of {', '.join(SOURCES)}{hint}"
        )
    if wiki := next(
        (path for end in ("tokens", "raw") if (path := Path(source, f"wiki.{split}.{end}")).is_file()), None
    ):
        key = content_key("wiki", files.digest(wiki), books)
        return Corpus(key, lambda: islice(_articles(io.StringIO(_read(wiki, 0, 1))), books), f"{source}, split {split}")
    parts = _parts(Path(source), split)[:books]
    key = content_key(*((files.digest(path), share) for path, share in parts))
    return Corpus(key, lambda: (_read(path, *share) for path, share in parts), f"{source}, split {split}")


Part = tuple[Path, tuple[float, float]]
"""A file, and from where to where of it, as shares of its length."""


def _parts(folder: Path, split: str) -> list[Part]:
    """The books of a folder that belong to a split."""
    given = {name: sorted([*folder.glob(f"{name}.txt"), *folder.glob(f"{name}/*.txt")]) for name in SPLITS}
    if not any(given.values()):
        parts = _spread(sorted(folder.glob("*.txt")), SPLITS)[split]
    elif split != "test" and not given["valid"]:
        parts = _spread(given["train"], SPLITS[:2])[split]
    else:
        parts = [(path, (0.0, 1.0)) for path in given[split]]
    if not parts:
        raise FileNotFoundError(
            f"{folder}: no .txt file for split {split!r}; expected books in it, or in {folder / 'train'} and {folder / 'test'}"
        )
    return parts


def _spread(paths: Sequence[Path], splits: Sequence[str]) -> dict[str, list[Part]]:
    """Books to splits: all but the first split get one book in ten, at least one, by a hash of the names. Where there
    are fewer books than splits, each is cut: a tenth at its end for every split but the first."""
    if len(paths) < len(splits):
        cuts = [0.0, *(1 - i / HELD_OUT for i in range(len(splits) - 1, -1, -1))]
        return {split: [(path, (cuts[i], cuts[i + 1])) for path in paths] for i, split in enumerate(splits)}
    ranked = sorted(paths, key=lambda path: hashlib.blake2b(path.name.encode()).digest())
    held, parts = max(1, len(paths) // HELD_OUT), {}
    for split in reversed(splits):
        count = held if split != splits[0] else len(ranked)
        parts[split], ranked = [(path, (0.0, 1.0)) for path in ranked[:count]], ranked[count:]
    return parts


def _read(path: Path, start: float, stop: float) -> str:
    """A file's text from one share of its length to another, both moved back to the start of a word."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 text (byte {error.start:,} is {content[error.start]:#04x}); convert it, or take it out of the folder"
        ) from None
    if "\0" in text:
        raise ValueError(f"{path}: not text (byte {content.index(0):,} is 0x00); take it out of the folder")
    low, high = (len(text) if share == 1 else text.rfind(" ", 0, int(share * len(text))) + 1 for share in (start, stop))
    return text[low:high]


def _fetch(source: str, split: str, books: int | None, revision: str | None) -> Iterator[str]:
    """Books of PG19, articles of WikiText or pages of FineWeb-Edu, as they arrive from the hub."""
    from datasets import load_dataset

    (name, config), start, part = HUB[source], 0, split
    lacking = LACKING.get(source, ())
    if split in ("train", *lacking) and lacking:
        part, held = "train", max(1, (books or 0) // HELD_OUT)
        start, books = (held * lacking.index(split), held) if split in lacking else (held * len(lacking), books)
    elif split == "valid":
        part = "validation"
    try:
        rows = (row["text"] for row in load_dataset(name, config, split=part, revision=revision, streaming=True))
        yield from islice(
            _articles(rows) if name.endswith("wikitext") else rows, start, None if books is None else start + books
        )
    except Exception as error:  # no network, no such name, no permission: the library has a class for each
        kind = type(error).__name__
        raise FileNotFoundError(
            f"{source}: {name} is not in reach on the Hugging Face hub ({kind}); check the network, or name a folder of books"
        ) from error


def _articles(rows: Iterable[str]) -> Iterator[str]:
    """Lines of WikiText to articles, which start with ``= Title =``."""
    lines: list[str] = []
    for row in rows:
        if re.match(r" = [^=]", row) and any(map(str.strip, lines)):
            yield "".join(lines)
            lines = []
        lines.append(row)
    yield "".join(lines)


def cached(folder: Path, names: Sequence[str], build: Callable[[], Sequence[bytes]]) -> list[Path]:
    """The files ``names`` in ``folder``, with the contents that ``build`` returns: built where one is missing or
    differs from its checksum.

    ``folder`` has to be named by all that the contents depend on. Processes that build it at once write the same files.
    """
    paths = [folder / name for name in names]
    if not _intact(paths, folder / "sha256.json"):
        contents = dict(zip(names, build(), strict=True))
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        files.write_all(folder, {**contents, "sha256.json": json.dumps(sums).encode()})
    return paths


def _intact(paths: Sequence[Path], sums: Path) -> bool:
    if not all(path.is_file() for path in (*paths, sums)):
        return False
    return sums.read_bytes() == json.dumps({path.name: files.digest(path) for path in paths}).encode()
