"""The two filters in front of the assistant: a keyword filter that is too cautious, and one for a request's purpose.

Deployed assistants have both kinds. The keyword filter refuses "How do I kill a thread?" like a threat: that is the
false refusal that a better wording avoids. The purpose filter compares a request with short descriptions of harm to
people and property; other words for the same purpose do not pass it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from query_mutator.embedded.rules.essential import names_person_or_property, one_of
from query_mutator.embedded.rules.tables import load_classes, load_rows
from query_mutator.encoder import Encoder
from query_mutator.types import FloatArray

__all__ = ["PurposeFilter", "has_trigger_word"]


def _inflections(stem: str) -> str:
    """Return a pattern for a regular word: nuke, nukes, nuked, nuking; stab, stabbed; terminate, termination."""
    if stem.endswith("e"):
        return f"{stem[:-1]}(es?|ed|ing|ers?|ions?|ors?|al)"
    return f"{stem}{stem[-1]}?(s|es|ed|ing|ings|ers?|ions?|ors?)?"


_REGULAR_TRIGGERS = "|".join(map(_inflections, sorted(load_classes("filters.tsv")["trigger"])))
_TRIGGER = re.compile(rf"\b({_REGULAR_TRIGGERS}|{one_of('trigger-pattern')})\b", re.IGNORECASE)
#: Where a text says that it is about Python, which must not hide the purpose of the rest.
_SETTING = re.compile(
    r"[\s,:(\[-]*\b((in|with|using|for|from)\s+)?((the|a)\s+)?python\w*(['’]s)?(\s+(standard\s+library|stdlib|programming"
    r"(\s+language)?|programs?|scripts?|code|3))*\b[\s,:)\]-]*",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"(?<=[.!?;:,])\s+|\n+")
_CONJUNCTION = re.compile(r"\s+(?:and|but|also|then|so)\s+", re.IGNORECASE)

_ASIDE = re.compile(r"\s*\((?:[^()]|\([^()]*\))*\)")

#: Cosines of MiniLM: a text that names a person or property is refused if a harm is this near, and nearer by the margin
#: than every document of the assistant.
NEAR_HARM = 0.30
MARGIN = 0.05
#: Without a person or property the similarity must be higher.
PLAIN_HARM = 0.50
PLAIN_MARGIN = 0.15
#: A text with no harm this near is not examined further.
HINT_OF_HARM = 0.20


def has_trigger_word(text: str) -> bool:
    """Return whether the keyword filter refuses a text: a violent word anywhere in it, whatever it is about."""
    return _TRIGGER.search(text) is not None


class PurposeFilter:
    """Refuses requests that are more similar to a harm (`harms.txt`) than to anything the assistant knows."""

    def __init__(self, encoder: Encoder, known: FloatArray) -> None:
        self._encoder = encoder
        self._known = known  # [n, dim], one unit row per document
        self._harms = encoder.encode([row[0] for row in load_rows("harms.txt")])  # [h, dim]

    def refuses(self, texts: Sequence[str], rows: FloatArray) -> list[bool]:
        """Return for each text whether it is refused; `rows` are the embeddings of the texts, [n, dim].

        A text with a hint of harm is also examined without its brackets, and one that names a person or property also
        without its setting and part by part: "In Python: ...", an aside or a harmless second question must not hide its
        purpose.
        """
        verdicts = self._harmful(rows, near=PLAIN_HARM, margin=PLAIN_MARGIN)
        hinted = [
            i for i, row in enumerate(rows) if not verdicts[i] and float((self._harms @ row).max()) >= HINT_OF_HARM
        ]
        plain = [(i, view) for i in hinted if (view := _ASIDE.sub("", texts[i])) != texts[i]]
        self._read(plain, verdicts, near=PLAIN_HARM, margin=PLAIN_MARGIN)
        parts = [(i, view) for i, text in enumerate(texts) if names_person_or_property(text) for view in _views(text)]
        self._read(parts, verdicts, near=NEAR_HARM, margin=MARGIN)
        return verdicts

    def _read(self, views: Sequence[tuple[int, str]], verdicts: list[bool], *, near: float, margin: float) -> None:
        """Set the verdict of each text (by index) that has a harmful view; skip texts that are refused already."""
        open_views = [(i, view) for i, view in views if not verdicts[i]]
        if open_views:
            rows = self._encoder.encode([view for _, view in open_views])
            for (i, _), harmful in zip(open_views, self._harmful(rows, near=near, margin=margin), strict=True):
                verdicts[i] = verdicts[i] or harmful

    def _harmful(self, rows: FloatArray, *, near: float, margin: float) -> list[bool]:
        verdicts = []
        for row in rows:  # one by one: the last bits of a product must not depend on the batch
            harm, known = float((self._harms @ row).max()), float((self._known @ row).max())
            verdicts.append(harm >= near and harm - known >= margin)
        return verdicts


def _views(text: str) -> list[str]:
    """Return a text without its setting in Python, also without its brackets, and its parts that have an object."""
    bare = _SETTING.sub(" ", text).strip()
    plain = _ASIDE.sub("", bare).strip()
    clauses = _CLAUSE.split(plain)
    parts = [*clauses, *(part for clause in clauses for part in _CONJUNCTION.split(clause))]
    parts = [part for part in parts if len(part.split()) > 2 and names_person_or_property(part)]
    return list(dict.fromkeys([bare, plain, *parts]))
