"""The data files in this folder: tab-separated rows; lines that begin with `# ` are comments."""

from __future__ import annotations

from functools import cache
from importlib import resources

__all__ = ["Row", "grammar", "load_classes", "load_rows", "load_words"]

Row = tuple[str, ...]


@cache
def load_rows(name: str) -> tuple[Row, ...]:
    """Return the rows of a file as tuples of cells."""
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("# "))
    return tuple(tuple(line.split("\t")) for line in lines)


@cache
def load_words(name: str) -> frozenset[str]:
    """Return all words of a file."""
    return frozenset(word for row in load_rows(name) for cell in row for word in cell.split())


@cache
def load_classes(name: str) -> dict[str, frozenset[str]]:
    """Return the words of a file whose rows are `class <tab> words`, by class; a class may have several rows."""
    found: dict[str, frozenset[str]] = {}
    for name_of_class, words in load_rows(name):
        found[name_of_class] = found.get(name_of_class, frozenset()) | frozenset(words.split())
    return found


def grammar(name_of_class: str) -> frozenset[str]:
    """Return the English function words of one class of `grammar.tsv`."""
    return load_classes("grammar.tsv")[name_of_class]
