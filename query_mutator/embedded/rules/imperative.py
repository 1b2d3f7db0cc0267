"""Docstring phrasing: "How do I turn bytes into text?" -> "Turn bytes into text."; "Where is …" -> "Return …"."""

from __future__ import annotations

import re
from functools import cache

from query_mutator.embedded.rules.inflect import forms, stems
from query_mutator.embedded.rules.lexicon import Lexicon
from query_mutator.embedded.rules.tables import load_rows
from query_mutator.embedded.rules.text import capitalize, sentences, tidy

__all__ = ["Imperative"]

_LEAD_IN = re.compile(
    r"(?:so|and|but|ok|okay|well|now|also|then|please|hi|hello|hey|(?:in |with )?python|quick question)\b[,:]?\s+",
    re.IGNORECASE,
)
_TAIL = re.compile(
    r",?\s*(?:please|(?:in|with) python|any ideas?|thanks|thank you|how)?\s*[?.!]*\s*\Z",
    re.IGNORECASE,
)
#: "my list is long, how do I cut it" asks in its last clause.
_LAST_CLAUSE = re.compile(r",\s+(?=(?:how|what|which|is there|can|could|where|who)\b)", re.IGNORECASE)
_IMPERSONAL = (
    (re.compile(r"\b(?:my|our|your)\b", re.IGNORECASE), "the"),
    (re.compile(r"\b(?:for|to) (?:me|us|you)\b", re.IGNORECASE), ""),
    (re.compile(r"\b(?:i|we) (?:have|own|got)\b", re.IGNORECASE), "given"),
)


@cache
def openings() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return the patterns of `openings.tsv` with their docstring shapes, in order."""
    rows = load_rows("openings.tsv")
    named = {f"<{row[0][1:]}>": row[1] for row in rows if row[0].startswith("@")}
    compiled = []
    for pattern, shape in (row for row in rows if not row[0].startswith("@")):
        for name, meaning in named.items():
            pattern = pattern.replace(name, meaning)
        compiled.append((re.compile(rf"{pattern}\Z", re.IGNORECASE), shape))
    return tuple(compiled)


class Imperative:
    """Rephrases the request as the first line of a docstring."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon

    def __call__(self, text: str) -> str:
        """Return the text with its request in docstring phrasing; other sentences stay."""
        found = sentences(text)
        rephrased = [self.rephrase(sentence) for sentence in found]
        return " ".join(new or old for old, new in zip(found, rephrased, strict=True))

    def rephrase(self, sentence: str) -> str | None:
        """Return one sentence in docstring phrasing, or None if it asks for nothing."""
        core = _TAIL.sub("", sentence, count=1)
        while lead_in := _LEAD_IN.match(core):
            core = core[lead_in.end() :]
        *before, request = _LAST_CLAUSE.split(core, maxsplit=1)
        for pattern, shape in openings():
            match = pattern.match(request)
            if match is not None:
                said = self._base_verb(_impersonal(shape.format(*(part or "" for part in match.groups()))))
                return " ".join([tidy(f"{said}."), *(f"{capitalize(clause)}." for clause in before)])
        return None

    def _base_verb(self, text: str) -> str:
        """Return the text with its first word in the base form: "removes spaces" -> "remove spaces"."""
        first, space, rest = text.strip().partition(" ")
        low = first.lower()
        for stem in stems(low):
            if stem != low and low in forms(stem)[1:3] and self._lexicon.lists(stem):
                return f"{stem}{space}{rest}"
        return text.strip()


def _impersonal(text: str) -> str:
    for pattern, new in _IMPERSONAL:
        text = pattern.sub(new, text)
    return text
