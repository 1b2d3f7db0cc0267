"""What a rewrite must not drop from a question: persons, property, code, names and quoted text."""

from __future__ import annotations

import re

from query_mutator.embedded.rules.tables import load_classes

__all__ = ["has_essentials", "names_person_or_property", "one_of"]

#: Code, names with dots or underscores, numbers and quoted text.
_LITERAL = re.compile(r"[`\"“_\d]|\w\.\w|\w\(\)")


def one_of(*name_of_classes: str) -> str:
    """Return the alternatives of classes in `filters.tsv` as a pattern."""
    return "|".join(sorted(word for name in name_of_classes for word in load_classes("filters.tsv")[name]))


#: A person or property, but not as part of a program: "child process", "parent class".
_OBJECT = re.compile(
    rf"\b({one_of('person', 'property')})(e?s)?\b(?!['’]?s?[\s-]+({one_of('computing-head')}))", re.IGNORECASE
)


def names_person_or_property(text: str) -> bool:
    """Return whether a text names a person or property, other than as part of a program ("child process")."""
    return _OBJECT.search(text) is not None


def has_essentials(question: str) -> bool:
    """Return whether a phrase alone would lose what a question is about: whom, which file, which name."""
    return _LITERAL.search(question) is not None or names_person_or_property(question)
