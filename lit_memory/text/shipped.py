"""The real text that the repository ships in ``data/``: sources of text, and of bAbI's stories, with a name each.

``data/SOURCES.md`` says where the files are from, their licences and what was changed. They are part of what a name
means, as runs have only the name in their keys: other files need another name.
"""

from pathlib import Path

from lit_memory.util.provenance import PROJECT, default_root

SHIPPED = {"shipped-books": "books", "shipped-wikitext-2": "wikitext-2", "shipped-babi": "babi"}
"""Name -> folder of ``data/``."""


def folder_of(source: str) -> Path:
    """The folder of a source: that of a name in ``SHIPPED``, else the one that it names itself.

    A wheel has no ``data/``; then it may lie where runs do. Raises FileNotFoundError if it is in neither place.
    """
    if source not in SHIPPED:
        return Path(source)
    places = [root / "data" / SHIPPED[source] for root in dict.fromkeys((PROJECT, default_root()))]
    if found := next((place for place in places if place.is_dir()), None):
        return found
    raise FileNotFoundError(
        f"{source}: no folder {places[-1]}; a wheel has no data/; expected that of the repository there"
    )
